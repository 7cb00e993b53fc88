from __future__ import annotations

import math
import random

import pytest

from stepbench.record import PHASES, BatchTiming
from stepbench.statistics import (
    describe,
    effective_sample_size,
    interval_within_run,
    median,
    spread,
    summarize_run,
)


def batch(index: int, batch_s: float, **changes: object) -> BatchTiming:
    values: dict[str, object] = {
        "epoch": 0,
        "batch": index,
        "step": index,
        "num_samples": 32,
        "warmup": False,
        "data_s": 0.0,
        "transfer_s": 0.0,
        "forward_s": batch_s / 4,
        "backward_s": batch_s / 2,
        "optimizer_s": 0.0,
        "other_s": batch_s / 4,
        "batch_s": batch_s,
        **changes,
    }
    return BatchTiming(**values)  # type: ignore[arg-type]


def autocorrelated(generator: random.Random, correlation: float, n: int) -> list[float]:
    value, series = generator.gauss(0, 1), []
    for _ in range(n):
        value = correlation * value + math.sqrt(1 - correlation**2) * generator.gauss(0, 1)
        series.append(value)
    return series


def test_constant_steps_give_a_point_and_no_division_by_zero() -> None:  # K2
    values = [0.010] * 100
    assert describe(values).median_s == 0.010
    interval = interval_within_run(values)
    assert interval is not None
    assert (interval.low_s, interval.high_s) == (0.010, 0.010)
    assert spread(describe(values)) == 0
    assert spread(describe([0.0] * 5)) is None


def test_one_outlier_moves_the_mean_not_the_median() -> None:  # K3
    values = [10 + 0.1 * (index - 49) / 49 for index in range(99)] + [100.0]
    random.Random(0).shuffle(values)
    distribution = describe(values)
    assert distribution.median_s == pytest.approx(10, abs=0.01)
    assert distribution.mean_s == pytest.approx(10.9, abs=0.01)
    assert distribution.max_s == 100


def test_quantiles_are_linear_between_neighbours() -> None:
    distribution = describe([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (distribution.p25_s, distribution.median_s, distribution.p75_s) == (2, 3, 4)
    assert distribution.p5_s == pytest.approx(1.2)
    assert median([4.0, 1.0]) == 2.5


def test_effective_sample_size_of_an_autoregressive_series() -> None:  # K8
    tau = 1 + 2 * sum(2 / math.pi * math.asin(0.9**lag) for lag in range(1, 500))
    sizes = [effective_sample_size(autocorrelated(random.Random(seed), 0.9, 2000)) for seed in range(10)]
    assert sum(sizes) / len(sizes) == pytest.approx(2000 / tau, rel=0.15)


def test_independent_values_count_in_full() -> None:
    generator = random.Random(3)
    size = effective_sample_size([generator.gauss(0, 1) for _ in range(2000)])
    assert 1500 <= size <= 2000


def test_interval_covers_the_truth_where_a_naive_one_does_not() -> None:  # K9
    covered = naive_covered = 0
    for seed in range(100):
        values = autocorrelated(random.Random(seed), 0.9, 1000)
        interval = interval_within_run(values)
        assert interval is not None
        covered += interval.low_s <= 0 <= interval.high_s
        ordered = sorted(values)
        naive_covered += ordered[469] <= 0 <= ordered[530]
    assert 85 <= covered <= 99
    assert naive_covered < 60


def test_few_effective_steps_give_no_interval() -> None:
    assert interval_within_run([1.0, 2.0, 3.0]) is None
    assert interval_within_run([1.0] * 10 + [2.0] * 10) is None


def test_throughput_is_a_ratio_of_sums() -> None:  # K22
    summary = summarize_run([batch(0, 0.010), batch(1, 0.030)])
    assert summary is not None
    assert summary.samples_per_s == pytest.approx(1600)
    assert summary.step.median_s == pytest.approx(0.020)


def test_accumulation_sums_micro_batches_to_steps() -> None:  # K23
    rows = [
        batch(index, (0.010, 0.010, 0.010, 0.030)[index % 4], step=index // 4, took_optimizer_step=index % 4 == 3)
        for index in range(40)
    ]
    summary = summarize_run(rows)
    assert summary is not None
    assert summary.num_steps == 10
    assert summary.num_batches == 40
    assert summary.step.median_s == pytest.approx(0.060)
    assert summary.samples_per_s == pytest.approx(4 * 32 / 0.060)


def test_an_unfinished_step_is_left_out() -> None:
    rows = [batch(index, 0.01, step=index // 4, took_optimizer_step=index % 4 == 3) for index in range(6)]
    summary = summarize_run(rows)
    assert summary is not None
    assert summary.num_batches == 4
    assert summarize_run(rows[:3]) is None


def test_warm_up_is_counted_and_left_out() -> None:
    rows = [batch(0, 5.0, warmup=True), *(batch(index, 0.01) for index in range(1, 11))]
    summary = summarize_run(rows)
    assert summary is not None
    assert (summary.num_warmup_batches, summary.warmup_s) == (1, 5.0)
    assert summary.step.max_s == 0.01
    assert summarize_run(rows[:1]) is None


def test_one_uncounted_batch_makes_throughput_unknown() -> None:
    summary = summarize_run([batch(0, 0.01), batch(1, 0.01, num_samples=None)])
    assert summary is not None
    assert summary.num_samples is None
    assert summary.samples_per_s is None


def test_shares_are_of_all_wall_time_and_sum_to_one() -> None:
    summary = summarize_run([batch(0, 0.010), batch(1, 0.030, forward_s=0.02, backward_s=0.01, other_s=0.0)])
    assert summary is not None
    shares = {phase.phase: phase.share_fraction for phase in summary.phases}
    assert tuple(shares) == PHASES
    assert shares["forward"] == pytest.approx((0.0025 + 0.02) / 0.04)
    assert sum(shares.values()) == pytest.approx(1)
