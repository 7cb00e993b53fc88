from pathlib import Path

import pandas as pd
import pytest
from studies import first_example, make_spec, noisy_example, write_sweep

from stepbench.record import Status
from stepbench.scaling import find_doublings, find_fastest, find_growths, recommend_batch_sizes
from stepbench.study import Study, build_study


def cells(times: dict[int, float], rates: dict[int, float] | None = None, noisy: tuple[int, ...] = ()) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "cell": [f"of {size}" for size in times],
            "series": "32",
            "verdict": ["noisy" if size in noisy else "ok" for size in times],
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


@pytest.mark.parametrize(
    ("noisy", "is_certain"),
    [((), True), ((16,), True), ((32,), False), ((64,), False), ((128,), False), ((256,), True)],
)
def test_recommendation_is_certain_unless_chosen_best_or_its_neighbour_is_noisy(
    noisy: tuple[int, ...], is_certain: bool
) -> None:
    rates = {16: 600.0, 32: 951.0, 64: 1000.0, 128: 980.0, 256: 500.0}
    (found,) = recommend_batch_sizes(cells(dict.fromkeys(rates, 1.0), rates, noisy))
    assert (found.batch_size, found.best_batch_size, found.is_certain) == (32, 64, is_certain)
    assert (found.noisy_batch_sizes, found.batch_sizes) == (noisy, tuple(rates))


def test_ratios_of_noisy_cells_are_marked() -> None:
    doublings = find_doublings(cells({16: 0.01, 32: 0.015, 64: 0.02, 128: 0.03}, noisy=(32,)))
    assert [doubling.is_noisy for doubling in doublings] == [True, True, False]


def test_growth_is_the_ratio_between_neighbours_on_any_numeric_axis() -> None:
    growths = find_growths(cells({8: 0.010, 0: 0.020, 2: 0.008}, rates={0: 1.0, 2: 1.0, 8: 1.0}), "batch_size")
    assert [(g.x, g.larger_x) for g in growths] == [(0, 2), (2, 8)]
    assert [g.time_ratio for g in growths] == pytest.approx([0.4, 1.25])


def test_fastest_leaves_noisy_cells_out_while_any_other_is_left_and_names_them() -> None:
    rates = {16: 100.0, 32: 300.0, 64: 200.0}
    times = dict.fromkeys(rates, 1.0)
    (calm,) = find_fastest(cells(times, rates), [])
    assert (calm.cell, calm.ratio, calm.is_noisy, calm.noisy_rivals) == ("of 32", 3.0, False, ())
    (found,) = find_fastest(cells(times, rates, noisy=(32,)), [])
    assert (found.cell, found.ratio, found.is_noisy, found.noisy_rivals) == ("of 64", 2.0, False, ("of 32",))
    (none_left,) = find_fastest(cells(times, rates, noisy=(16, 32, 64)), [])
    assert (none_left.cell, none_left.is_noisy) == ("of 32", True)


def test_fastest_compares_only_cells_that_do_the_same_work() -> None:
    frame = cells(dict.fromkeys((1, 2, 3, 4, 5), 1.0), {1: 1.0, 2: 2.0, 3: 9.0, 4: 3.0, 5: 5.0})
    frame["model"] = ["a", "a", "b", "b", "c"]
    assert [item.cell for item in find_fastest(frame, ["model"])] == ["of 2", "of 3"]


def test_speed_up_is_noisy_where_either_cell_is(tmp_path: Path) -> None:
    study = build_study([noisy_example(tmp_path, (32,))], tmp_path)
    assert [(s.x, s.is_noisy) for s in study.speed_ups] == [(16, False), (32, True), (64, False)]


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
        ("precision 32, width 64", "precision bf16-mixed, width 64", 16, 2.0),
        ("precision 32, width 64", "precision bf16-mixed, width 64", 32, 2.0),
        ("precision 32, width 512", "precision bf16-mixed, width 512", 16, 3.0),
        ("precision 32, width 512", "precision bf16-mixed, width 512", 32, 3.0),
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


def test_a_setting_left_open_is_compared_like_any_other_value(tmp_path: Path) -> None:
    specs = [make_spec(batch, num_threads=count) for count in (None, 2) for batch in (16, 32)]
    sweep = write_sweep(tmp_path, specs, lambda spec: 0.01 if spec.num_threads is None else 0.005)
    speed_ups = build_study([sweep], sweep).speed_ups
    assert [(s.baseline, s.series, s.ratio) for s in speed_ups] == [("default", "2", pytest.approx(2))] * 2
