from pathlib import Path

import pandas as pd
import pytest
from studies import first_example, make_spec, write_sweep

from stepbench.record import Status
from stepbench.scaling import find_doublings, recommend_batch_sizes
from stepbench.study import Study, build_study


def cells(times: dict[int, float], rates: dict[int, float] | None = None) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "series": "32",
            "batch_size": list(times),
            "median_step_s": list(times.values()),
            "samples_per_s": [(rates or {}).get(size, size / seconds) for size, seconds in times.items()],
        }
    )


def test_cost_of_doubling_is_exact() -> None:
    doublings = find_doublings(cells({64: 0.04, 16: 0.01, 32: 0.015}))
    assert [(d.batch_size, d.larger_batch_size) for d in doublings] == [(16, 32), (32, 64)]
    assert [d.doubling_ratio for d in doublings] == pytest.approx([1.5, 0.04 / 0.015])


def test_sizes_that_are_no_doubling_apart_give_the_local_exponent() -> None:
    (doubling,) = find_doublings(cells({16: 0.010, 128: 0.080 / 64}))
    assert doubling.time_ratio == pytest.approx(0.125)
    assert doubling.local_exponent == pytest.approx(-1)
    assert doubling.doubling_ratio == pytest.approx(0.5)


def test_recommended_is_the_smallest_batch_within_five_per_cent_of_the_best() -> None:
    rates = {16: 900.0, 32: 951.0, 64: 1000.0, 128: 980.0}
    (found,) = recommend_batch_sizes(cells(dict.fromkeys(rates, 1.0), rates))
    assert (found.batch_size, found.best_batch_size, found.is_still_rising) == (32, 64, False)


def test_throughput_that_gains_more_than_five_per_cent_is_still_rising() -> None:
    (rising,) = recommend_batch_sizes(cells({16: 1.0, 32: 1.0}, {16: 100.0, 32: 106.0}))
    (flat,) = recommend_batch_sizes(cells({16: 1.0, 32: 1.0}, {16: 100.0, 32: 104.0}))
    assert (rising.batch_size, rising.is_still_rising) == (32, True)
    assert (flat.batch_size, flat.is_still_rising) == (16, False)


def test_one_size_gives_no_recommendation() -> None:
    assert recommend_batch_sizes(cells({16: 1.0})) == ()


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return build_study([first_example(tmp_path)], tmp_path)


def test_doublings_of_a_whole_study_are_those_it_was_made_with(study: Study) -> None:
    ratios = {(d.series, d.batch_size): d.doubling_ratio for d in study.doublings}
    assert ratios["32", 16] == pytest.approx(1.5, abs=1e-6)
    assert ratios["32", 32] == pytest.approx(1.5, abs=1e-6)
    assert ratios["16-mixed (ran as bf16-mixed)", 32] == pytest.approx(1.25, abs=1e-6)


def test_speed_up_compares_equal_batch_sizes(study: Study) -> None:
    assert {s.baseline for s in study.speed_ups} == {"32"}
    assert [s.x for s in study.speed_ups] == [16, 32, 128]
    assert [s.ratio for s in study.speed_ups] == pytest.approx([1.0, 1.2, 1.2**3], abs=1e-6)


def test_speed_up_keeps_all_else_equal(tmp_path: Path) -> None:
    specs = [
        make_spec(batch, p, model={"width": w}) for batch in (16, 32) for w in (64, 512) for p in ("32", "bf16-mixed")
    ]
    time_s = {("32", 64): 0.01, ("bf16-mixed", 64): 0.005, ("32", 512): 0.09, ("bf16-mixed", 512): 0.03}
    write_sweep(tmp_path, specs, lambda spec: time_s[spec.precision, spec.model.arguments["width"]])
    study = build_study([tmp_path], tmp_path)
    assert study.baseline == "precision 32"
    assert [(s.baseline, s.series, s.x, round(s.ratio, 6)) for s in study.speed_ups] == [
        ("32, width=64", "bf16-mixed, width=64", 16, 2.0),
        ("32, width=64", "bf16-mixed, width=64", 32, 2.0),
        ("32, width=512", "bf16-mixed, width=512", 16, 3.0),
        ("32, width=512", "bf16-mixed, width=512", 32, 3.0),
    ]


def test_speed_up_with_accumulation_is_per_sample(tmp_path: Path) -> None:
    specs = [make_spec(batch, accumulate_grad_batches=a) for a in (1, 4) for batch in (16, 32)]
    write_sweep(tmp_path, specs, lambda spec: 0.01 * spec.accumulate_grad_batches)
    study = build_study([tmp_path], tmp_path)
    assert study.series == ("1", "4")
    assert [s.ratio for s in study.speed_ups] == pytest.approx([1.0, 1.0])


def test_failed_baseline_leaves_no_speed_up_at_that_size(tmp_path: Path) -> None:
    specs = [make_spec(batch, p) for p in ("32", "bf16-mixed") for batch in (16, 32)]
    write_sweep(tmp_path, specs, lambda spec: 0.01, {1: (Status.OOM, "out of memory")})
    assert [s.x for s in build_study([tmp_path], tmp_path).speed_ups] == [16]
