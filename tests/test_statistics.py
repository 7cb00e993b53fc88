from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

import pytest
from studies import DEVICE_SHARES, change, leave_out, make_rows, merge_backward, on_device, two_ranks

from stepbench.record import PHASES, BatchTiming, PhaseSummary, RunSummary
from stepbench.statistics import (
    describe,
    effective_sample_size,
    interval_within_run,
    median,
    spread,
    summarize_run,
    with_rank_waits,
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


def summary_of(rows: Sequence[BatchTiming]) -> RunSummary:
    summary = summarize_run(rows)
    assert summary is not None
    return summary


def means_s(phases: Sequence[PhaseSummary]) -> dict[str, float | None]:
    return {phase.phase: None if phase.step is None else phase.step.mean_s for phase in phases}


# ---- block sampling ----


def test_phases_are_those_of_the_steps_timed_by_phase_and_all_steps_make_the_step() -> None:
    rows = [batch(index, 0.012 if index < 10 else 0.010) for index in range(30)]
    summary = summary_of(leave_out(rows, 10, 30))
    assert (summary.num_steps, summary.num_sampled_steps) == (30, 10)
    assert summary.step.median_s == 0.010
    assert summary.samples_per_s == pytest.approx(30 * 32 / (10 * 0.012 + 20 * 0.010))
    assert means_s(summary.phases)["backward"] == pytest.approx(0.006)
    assert sum(phase.share_fraction or 0 for phase in summary.phases) == pytest.approx(1)
    assert summary.timer_slowdown_fraction == pytest.approx(0.2)


def test_slowdown_is_a_mean_of_blocks_since_single_batches_are_erratic() -> None:
    rows = leave_out([batch(index, 0.001 if index % 2 else 0.019) for index in range(40)], 10, 20)
    assert summary_of(rows).timer_slowdown_fraction == pytest.approx(0)


def test_a_run_timed_by_phase_throughout_knows_no_slowdown() -> None:
    summary = summary_of([batch(index, 0.01) for index in range(10)])
    assert (summary.num_sampled_steps, summary.timer_slowdown_fraction) == (None, None)


def test_where_no_step_was_timed_by_phase_the_phases_are_unknown_and_the_step_is_not() -> None:
    summary = summary_of(leave_out([batch(index, 0.01) for index in range(10)], 0, 10))
    assert (summary.num_sampled_steps, summary.timer_slowdown_fraction) == (0, None)
    assert summary.step.median_s == 0.01
    assert [(phase.phase, phase.step, phase.share_fraction) for phase in summary.phases] == [
        (phase, None, None) for phase in PHASES
    ]


def test_a_step_of_which_one_batch_was_left_out_has_no_phases() -> None:
    rows = [batch(index, 0.01, step=index // 2, took_optimizer_step=index % 2 == 1) for index in range(8)]
    unknown = dict.fromkeys((f"{phase}_s" for phase in PHASES), None)
    summary = summary_of(change(rows, [3], **unknown))
    assert (summary.num_steps, summary.num_sampled_steps) == (4, 3)


# ---- a backward that nothing announces ----


def test_merged_backward_is_unknown_and_forward_holds_it() -> None:
    summary = summary_of(merge_backward([batch(index, 0.01) for index in range(10)]))
    means = means_s(summary.phases)
    assert means["backward"] is None
    assert means["forward"] == pytest.approx(0.0075)
    shares = {phase.phase: phase.share_fraction for phase in summary.phases}
    assert shares["backward"] is None
    assert shares["forward"] == pytest.approx(0.75)


def test_one_merged_step_merges_backward_in_all_so_that_nothing_is_guessed() -> None:
    rows = [batch(index, 0.01) for index in range(10)]
    summary = summary_of([*rows[:9], *merge_backward(rows[9:])])
    assert means_s(summary.phases)["backward"] is None
    assert means_s(summary.phases)["forward"] == pytest.approx(0.0075)
    assert summary.phases[2].step is not None
    assert summary.phases[2].step.min_s == pytest.approx(0.0075)


def test_a_merged_step_in_the_warm_up_merges_nothing() -> None:
    rows = [batch(index, 0.01, warmup=index == 0) for index in range(10)]
    assert means_s(summary_of([*merge_backward(rows[:1]), *rows[1:]]).phases)["backward"] == pytest.approx(0.005)


# ---- a device's timeline ----


def test_phases_are_the_device_s_where_it_ran_behind_the_host() -> None:
    rows = on_device([batch(index, 0.01) for index in range(10)])
    summary = summary_of(rows)
    assert summary.timeline == "device"
    assert {phase.phase: phase.share_fraction for phase in summary.phases} == pytest.approx(DEVICE_SHARES)
    assert means_s(summary.phases)["data"] == pytest.approx(0.003)
    assert means_s(summary.host_phases)["data"] == 0
    assert means_s(summary.host_phases)["backward"] == pytest.approx(0.005)
    assert summary.step.median_s == 0.01


def test_shares_on_the_device_s_timeline_are_of_its_own_time() -> None:
    half = [
        dataclasses.replace(row, **{f"device_{phase}_s": 0.005 * DEVICE_SHARES[phase] for phase in PHASES})
        for row in on_device([batch(index, 0.01) for index in range(10)])
    ]
    assert sum(phase.share_fraction or 0 for phase in summary_of(half).phases) == pytest.approx(1)


def test_one_batch_without_a_device_s_time_leaves_all_on_the_host_s_timeline() -> None:
    rows = on_device([batch(index, 0.01) for index in range(10)])
    summary = summary_of(change(rows, [4], device_data_s=None))
    assert (summary.timeline, summary.host_phases) == ("host", ())
    assert means_s(summary.phases)["backward"] == pytest.approx(0.005)


def test_batches_left_out_and_the_warm_up_need_no_device_s_time() -> None:
    rows = on_device([batch(index, 0.01, warmup=index == 0) for index in range(10)])
    none = {name: None for name in BatchTiming.__slots__ if name.startswith("device_")}
    rows = change(rows, [0, 5, 6, 7, 8, 9], **none)
    assert summary_of(leave_out(rows, 5, 10)).timeline == "device"


# ---- compiled and skipped steps ----


def test_a_step_that_compiled_is_left_out_wholly_and_its_batches_are_counted() -> None:
    rows = [
        batch(index, 0.01, step=index // 2, took_optimizer_step=index % 2 == 1, warmup=index < 2) for index in range(12)
    ]
    summary = summary_of(change(rows, [0, 1, 4], compiled=True, batch_s=30.0))
    assert summary.num_compiled_batches == 3
    assert (summary.num_steps, summary.num_batches) == (4, 8)
    assert summary.step.max_s == pytest.approx(0.02)


def test_a_step_that_the_scaler_skipped_is_kept_and_counted() -> None:
    rows = [batch(index, 0.01, warmup=index == 0) for index in range(10)]
    summary = summary_of(change(rows, [0, 3, 7], skipped_by_scaler=True, took_optimizer_step=False))
    assert (summary.num_steps, summary.num_skipped_steps) == (9, 2)


# ---- several ranks ----


def test_the_slowest_rank_is_the_one_that_waits_least() -> None:
    summary = summary_of(two_ranks())
    assert summary.phases_rank == 1
    assert [rank.mean_wait_s for rank in summary.ranks] == pytest.approx([0.020, 0.0])
    assert means_s(summary.phases) == pytest.approx(
        {"data": 0, "transfer": 0, "forward": 0.031, "backward": 0.002, "optimizer": 0, "other": 0}
    )
    assert summary.ranks[0].phase_means_s == pytest.approx((0, 0, 0.011, 0.022, 0, 0))
    assert [rank.median_step_s for rank in summary.ranks] == pytest.approx([0.033, 0.033])


def test_samples_are_those_of_all_ranks_and_batches_those_of_one() -> None:
    summary = summary_of(two_ranks())
    assert (summary.num_batches, summary.num_steps, summary.num_warmup_batches) == (30, 30, 5)
    assert summary.num_samples == 2 * 30 * 16
    assert summary.measured_s == pytest.approx(30 * 0.033)
    assert summary.samples_per_s == pytest.approx(2 * 16 / 0.033)
    assert [(rank.num_batches, rank.num_samples) for rank in summary.ranks] == [(30, 480), (30, 480)]
    unknown = summary_of(change(two_ranks(), [50], num_samples=None))
    assert (unknown.num_samples, unknown.samples_per_s) == (None, None)


def test_a_step_lasts_as_long_as_on_its_slowest_rank() -> None:
    first = [batch(index, (0.010, 0.030)[index % 2]) for index in range(10)]
    second = [batch(index, (0.020, 0.020)[index % 2]) for index in range(10)]
    summary = summary_of(with_rank_waits([first, second]))
    assert summary.step.mean_s == pytest.approx(0.025)
    assert [rank.median_step_s for rank in summary.ranks] == pytest.approx([0.020, 0.020])


def test_only_steps_that_every_rank_timed_count() -> None:
    first = [batch(index, 0.01, warmup=index < 2) for index in range(10)]
    second = [batch(index, 0.01, warmup=index < 4, compiled=index == 5) for index in range(9)]
    summary = summary_of(with_rank_waits([first, second]))
    assert (summary.num_steps, summary.num_compiled_batches) == (4, 1)
    assert [rank.num_batches for rank in summary.ranks] == [4, 4]


def test_ranks_are_matched_by_epoch_and_batch_whatever_they_call_the_step() -> None:
    first = [batch(index, 0.01, epoch=index // 5) for index in range(10)]
    second = [dataclasses.replace(row, step=row.step + 3) for row in first]
    assert summary_of(with_rank_waits([first, second])).num_steps == 10
    later = [dataclasses.replace(row, epoch=row.epoch + 1) for row in first]
    assert summarize_run(with_rank_waits([first, later])) is None


def test_ranks_that_wait_alike_or_unknown_are_told_by_the_lowest() -> None:
    same = with_rank_waits([[batch(0, 0.01), batch(1, 0.01)] for _ in range(3)])
    assert summary_of(same).phases_rank == 0
    merged = with_rank_waits([merge_backward([batch(0, 0.01)]), merge_backward([batch(0, 0.01)])])
    summary = summary_of(merged)
    assert (summary.phases_rank, [rank.mean_wait_s for rank in summary.ranks]) == (0, [None, None])
    assert summary.ranks[0].phase_means_s[3] is None


def test_a_single_rank_has_no_ranks() -> None:
    summary = summary_of([batch(0, 0.01), batch(1, 0.01)])
    assert (summary.phases_rank, summary.ranks) == (0, ())


def test_waits_are_what_backward_took_longer_than_on_the_fastest_rank() -> None:
    rows = with_rank_waits(
        [[batch(0, 0.04), batch(1, 0.04)], [batch(1, 0.02)], [batch(0, 0.01), batch(1, 0.03, backward_s=0.01)]]
    )
    assert [(row.rank, row.batch) for row in rows] == [(0, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert [row.rank_wait_s for row in rows] == [None, pytest.approx(0.01), 0, None, 0]
    merged = with_rank_waits([[batch(0, 0.04)], merge_backward([batch(0, 0.04)])])
    assert [row.rank_wait_s for row in merged] == [None, None]


def test_waits_are_on_the_device_s_timeline_where_all_ranks_have_one() -> None:
    first, second = [batch(0, 0.04)], [batch(0, 0.02)]
    waits = [row.rank_wait_s for row in with_rank_waits([on_device(first), on_device(second)])]
    assert waits == pytest.approx([0.25 * 0.02, 0])
    assert [row.rank_wait_s for row in with_rank_waits([on_device(first), second])] == pytest.approx([0.01, 0])


def test_ranks_with_epochs_of_different_length_are_matched_as_they_ran() -> None:
    def epochs_of(length: int, backward_s: float) -> list[BatchTiming]:
        rows = make_rows(1.0, num_batches=12, num_warmup=0, epoch_length=length)
        return [dataclasses.replace(row, backward_s=backward_s) for row in rows]

    rows = with_rank_waits([epochs_of(3, 0.5), epochs_of(4, 0.2)])
    assert [row.rank_wait_s for row in rows] == pytest.approx([0.3] * 12 + [0.0] * 12)
    summary = summary_of(rows)
    assert summary.num_steps == 12
    assert summary.phases_rank == 1


def test_a_single_rank_s_rows_are_left_as_they_are() -> None:
    rows = make_rows(0.01)
    assert with_rank_waits([rows]) == rows
    assert with_rank_waits([]) == []


# ---- what holds for every run ----


def sampled(rows: list[BatchTiming]) -> list[BatchTiming]:
    return leave_out(rows, 3, 7)


def same(rows: list[BatchTiming]) -> list[BatchTiming]:
    return rows


@pytest.mark.parametrize("left_out", [same, sampled])
@pytest.mark.parametrize("merged", [same, merge_backward])
@pytest.mark.parametrize("timeline", [same, on_device])
@pytest.mark.parametrize("seed", range(3))
def test_known_phases_sum_to_the_time_of_the_steps_timed_by_phase(
    left_out: Callable[[list[BatchTiming]], list[BatchTiming]],
    merged: Callable[[list[BatchTiming]], list[BatchTiming]],
    timeline: Callable[[list[BatchTiming]], list[BatchTiming]],
    seed: int,
) -> None:
    generator = random.Random(seed)
    rows = []
    for index in range(60):
        parts = {f"{phase}_s": generator.expovariate(100) for phase in PHASES}
        is_last = index % 3 == 2
        rows.append(batch(index, sum(parts.values()), step=index // 3, took_optimizer_step=is_last, **parts))
    run = left_out(timeline(merged(rows)))
    for row in run:
        known = [value for phase in PHASES if (value := getattr(row, f"{phase}_s")) is not None]
        assert not known or sum(known) == pytest.approx(row.batch_s)
    summary = summary_of(run)
    steps = [[row for row in run if row.step == step] for step in range(20)]
    times = [sum(row.batch_s for row in step) for step in steps if step[0].data_s is not None]
    for phases in (summary.phases, summary.host_phases):
        if phases:
            assert sum(mean or 0 for mean in means_s(phases).values()) == pytest.approx(sum(times) / len(times))
            assert sum(phase.share_fraction or 0 for phase in phases) == pytest.approx(1)
    assert bool(summary.host_phases) == (timeline is on_device)
