import math
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from studies import (
    DEVICE_SHARES,
    NOISE,
    SHARES,
    change,
    first_example,
    leave_out,
    make_rows,
    make_spec,
    merge_backward,
    noisy_example,
    on_device,
    two_ranks,
    write_run,
    write_sweep,
)

from stepbench import phase_plots, plots
from stepbench.aggregate import cell_labels, choose_timeline, draw_cell, read_rows
from stepbench.cell_plots import CellLabels, plot_batch_breakdown, plot_distribution, plot_total_time, robust_limit
from stepbench.cells import read_cell
from stepbench.plot_style import NOISY_ALPHA, PHASE_COLOURS, PHASE_HATCHES, save_figure, series_styles
from stepbench.record import PHASES, BatchTiming, RunSpec, Status
from stepbench.study import Study, build_study

LABELS = CellLabels(
    title="autoencoder, batch 16, 32",
    note="one round",
    median_step_s=0.01,
    low_s=0.0099,
    high_s=0.0101,
    interval_name="interval",
    batches_per_step=1,
    timeline="host",
)


def texts(figure: Figure) -> str:
    found = [text.get_text() for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text"))]
    return "\n".join(" ".join(text.split()) for text in found)


def tick_labels(figure: Figure) -> list[str]:
    figure.draw_without_rendering()
    return [label.get_text() for label in figure.axes[0].get_xticklabels()]


def study_of(directory: Path, specs: list[RunSpec], failures: dict[int, tuple[Status, str]] | None = None) -> Study:
    write_sweep(directory, specs, lambda spec: 0.001 * math.sqrt(spec.batch_size), failures, noise=0.1)
    return build_study([directory], directory)


@pytest.fixture
def example(tmp_path: Path) -> Study:
    return build_study([first_example(tmp_path)], tmp_path)


def test_step_time_has_the_real_sizes_as_ticks_on_a_binary_axis(example: Study) -> None:
    figure = plots.plot_step_time(example)
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert tick_labels(figure) == ["16", "32", "128"]
    assert axes.get_ylabel() == "step time [ms]"


def test_labels_show_what_ran(example: Study) -> None:
    for draw in (plots.plot_step_time, plots.plot_throughput, phase_plots.plot_phases):
        assert "16-mixed (ran as bf16-mixed)" in texts(draw(example))


def test_points_of_one_round_are_hollow_and_the_note_says_why(example: Study) -> None:
    figure = plots.plot_step_time(example)
    assert "hollow marker: one run" in texts(figure)
    markers = [line for line in figure.axes[0].lines if line.get_marker() == "o" and len(line.get_xdata()) == 3]
    assert markers[-1].get_markerfacecolor() == "white"


def test_intervals_are_drawn_from_the_summary(example: Study) -> None:
    axes = plots.plot_step_time(example).axes[0]
    first = example.cell_frame.iloc[0]
    segments = [segment for bars in axes.containers for segment in bars.lines[2][0].get_segments()]
    lows = [segment[0][1] for segment in segments if segment[0][0] == 16]
    assert first["step_low_s"] * 1000 == pytest.approx(lows[0])


def test_throughput_starts_at_zero_and_rings_the_recommended_batch(example: Study) -> None:
    axes = plots.plot_throughput(example).axes[0]
    assert axes.get_ylim()[0] == 0
    rings = [line.get_xdata()[0] for line in axes.lines if line.get_markersize() == 13]
    assert rings == [item.batch_size for item in example.recommendations]


def faded(figure: Figure) -> list[float]:
    """Where the faint markers lie on the x axis."""
    lines = [line for line in figure.axes[0].lines if line.get_alpha() == NOISY_ALPHA and line.get_marker() != "_"]
    return [x for line in lines if line.get_marker() in "os" for x in line.get_xdata()]


def test_noisy_cells_are_faded_and_questioned_and_never_ringed(tmp_path: Path) -> None:
    study = build_study([noisy_example(tmp_path, (32, 64))], tmp_path)
    for draw in (plots.plot_step_time, plots.plot_throughput):
        figure = draw(study)
        assert faded(figure) == [32, 64]
        assert texts(figure).splitlines().count("?") == 2
        assert "faded with ?: too noisy to compare" in texts(figure)
    rings = [line for line in plots.plot_throughput(study).axes[0].lines if line.get_markersize() == 13]
    assert [(ring.get_xdata()[0], ring.get_ydata()[0]) for ring in rings] == [(64, pytest.approx(1973, abs=1))]
    assert faded(plots.plot_speed_up(study, study.speed_ups)) == [32, 64]
    assert "batch 64 ?" in texts(phase_plots.plot_phases(study))


def test_nothing_is_faded_where_nothing_is_noisy(example: Study) -> None:
    assert faded(plots.plot_step_time(example)) == []
    assert "?" not in texts(plots.plot_step_time(example))


def test_the_guide_says_from_where_and_starts_at_no_noisy_point(example: Study, tmp_path: Path) -> None:
    assert "proportional, from precision 32 at batch 16" in texts(plots.plot_step_time(example))
    noisy = build_study([noisy_example(tmp_path / "some", (16,))], tmp_path)
    assert "proportional, from precision 64 at batch 16" in texts(plots.plot_step_time(noisy))
    specs = [make_spec(batch) for batch in (16, 32)]
    write_sweep(tmp_path / "all", specs, lambda _: 0.01, noise=NOISE)
    all_noisy = build_study([tmp_path / "all"], tmp_path)
    assert "proportional" not in texts(plots.plot_step_time(all_noisy))


def test_the_note_says_what_is_shown(example: Study) -> None:
    assert "wall time per sample of the same 30 steps · uncertainty not shown" in texts(
        plots.plot_time_per_sample(example)
    )
    assert "samples over wall time of the same 30 steps · uncertainty not shown" in texts(
        plots.plot_throughput(example)
    )


def test_failed_cells_are_marked_with_their_status(tmp_path: Path) -> None:
    specs = [make_spec(batch) for batch in (16, 32, 64)]
    study = study_of(tmp_path, specs, {2: (Status.OOM, "out of memory")})
    for draw in (plots.plot_step_time, plots.plot_throughput, phase_plots.plot_phases):
        assert "oom" in texts(draw(study))
    assert tick_labels(plots.plot_step_time(study)) == ["16", "32", "64"]


def test_another_numeric_axis_serves_where_batch_size_does_not_vary(tmp_path: Path) -> None:
    study = study_of(tmp_path, [make_spec(16, data={"num_workers": n}) for n in (8, 0, 2)])
    figure = plots.plot_step_time(study)
    assert tick_labels(figure) == ["0", "2", "8"]
    assert figure.axes[0].get_xlabel() == "num_workers"


def test_categories_are_bars_from_zero(tmp_path: Path) -> None:
    study = study_of(tmp_path, [make_spec(16, precision) for precision in ("32", "bf16-mixed", "64")])
    figure = plots.plot_step_time(study)
    assert figure.axes[0].get_ylim()[0] == 0
    assert tick_labels(figure) == ["32", "bf16-mixed", "64"]


def test_more_series_than_colours_are_cut_with_a_note(tmp_path: Path) -> None:
    specs = [make_spec(batch, seed=seed) for seed in range(10) for batch in (16, 32)]
    assert "first 8 of 10 series" in texts(plots.plot_step_time(study_of(tmp_path, specs)))


def test_one_cell_and_a_study_without_numbers_draw(tmp_path: Path) -> None:
    one = study_of(tmp_path / "one", [make_spec()])
    assert len(save_figure(phase_plots.plot_phases(one), tmp_path / "one", ("png", "svg"))) == 2
    none = study_of(tmp_path / "none", [make_spec()], {0: (Status.CRASHED, "killed")})
    assert "crashed" in texts(phase_plots.plot_phases(none))
    plots.plot_step_time(none)


def test_speed_up_names_its_baseline_and_draws_the_line_at_one(example: Study) -> None:
    figure = plots.plot_speed_up(example, example.speed_ups)
    assert "Speed-up over precision 32" in texts(figure)
    assert any(list(line.get_ydata()) == [1, 1] for line in figure.axes[0].lines)
    assert {"faster", "slower"} <= set(texts(figure).splitlines())


def test_series_keep_their_style_from_picture_to_picture(example: Study) -> None:
    style = series_styles(example.series)[example.series[1]]
    colours = {line.get_color() for line in plots.plot_speed_up(example, example.speed_ups).axes[0].lines}
    assert style.colour in colours


def test_styles_differ_in_colour_and_in_marker() -> None:
    styles = list(series_styles([str(i) for i in range(8)]).values())
    assert len({style.marker for style in styles}) == 8
    assert len({style.colour for style in styles}) == 8


def test_phases_are_told_apart_by_colour_and_neighbours_by_hatch() -> None:
    assert len(set(PHASE_COLOURS.values())) == len(PHASES)
    neighbours = pairwise(PHASES)
    assert all(PHASE_HATCHES[first] != PHASE_HATCHES[second] for first, second in neighbours)


def test_nothing_is_drawn_outside_the_picture(tmp_path: Path) -> None:
    names = ("a_very_long_option_name_for_a_model_indeed", "another_long_option_name_for_another_model")
    for i, name in enumerate(names):
        for j, batch in enumerate((16, 64)):
            write_run(tmp_path / str(2 * i + j), make_spec(batch), make_rows(0.01 * batch), choices={"model": name})
    study = build_study([tmp_path], tmp_path)
    assert study.series == names
    for figure in (plots.plot_step_time(study), phase_plots.plot_phases(study)):
        figure.draw_without_rendering()
        box = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


# ---- one cell ----


def rows(**changes: object) -> pd.DataFrame:
    settings: dict[str, object] = {"noise": 0.1} | changes
    frame = pd.DataFrame([{name: getattr(row, name) for name in row.__slots__} for row in make_rows(0.01, **settings)])  # type: ignore[arg-type]
    return frame.assign(round=0, attempt=0)


def test_far_outliers_are_counted_and_do_not_stretch_the_picture() -> None:
    figure = plot_total_time(rows(num_batches=65, stretch={0: 80.0, 20: 50.0}), LABELS)
    assert figure.axes[0].get_ylim()[1] < 20
    assert "6 slower batches not shown (up to 2.40 s; 5 in the warm-up)" in texts(figure)


def test_batch_times_start_at_zero() -> None:
    assert plot_total_time(rows(noise=0.02), LABELS).axes[0].get_ylim()[0] == 0


def test_warm_up_is_outlined_in_black_not_grey_like_the_phase_other() -> None:
    for draw in (plot_batch_breakdown, plot_total_time):
        (patch,) = [patch for patch in draw(rows(), LABELS).axes[0].patches if "warm-up" in str(patch.get_label())]
        assert patch.get_edgecolor()[:3] == (0, 0, 0)
        assert patch.get_facecolor()[:3] == (1, 1, 1)


def test_many_columns_are_drawn_without_hatches() -> None:
    def hatches(num_batches: int) -> set[str | None]:
        axes = plot_batch_breakdown(rows(num_batches=num_batches), LABELS).axes[0]
        legend = axes.get_legend()
        assert legend is not None
        drawn = [*axes.collections[: len(PHASES)], *legend.get_patches()]
        return {artist.get_hatch() for artist in drawn} - {None, ""}

    assert hatches(60)
    assert not hatches(61)


def test_limit_keeps_the_bulk_and_every_common_value() -> None:
    assert robust_limit(np.array([10.0] * 50)) == pytest.approx(11.2)
    assert robust_limit(np.array([10.0] * 30 + [30.0] * 10)) > 30
    assert robust_limit(np.array([10.0] * 29 + [500.0])) < 12


def test_phases_are_stacked_to_the_batch_time() -> None:
    frame = rows()
    axes = plot_batch_breakdown(frame, LABELS).axes[0]
    tops = axes.collections[len(PHASES) - 1].get_paths()[0].vertices
    height_at_ten = tops[np.isclose(tops[:, 0], 9.5), 1].max()
    assert height_at_ten == pytest.approx(max(frame["batch_s"][8:10]) * 1000)


def test_warmup_epochs_and_validation_are_marked() -> None:
    legend = texts(plot_total_time(rows(num_batches=60, epoch_length=20), LABELS))
    assert all(name in legend for name in ("warm-up", "epoch starts", "validation follows"))


def test_accumulation_draws_the_median_batch_and_names_the_step() -> None:
    labels = CellLabels(**{name: getattr(LABELS, name) for name in LABELS.__slots__} | {"batches_per_step": 4})
    figure = plot_total_time(rows(num_batches=84, num_warmup=4, accumulate=4), labels)
    assert "4 batches a step" in texts(figure)
    assert "median batch" in texts(figure)


def test_small_slices_of_the_pie_are_merged_in_the_drawing_and_kept_in_the_legend() -> None:
    shares = {"data": 0.01, "transfer": 0.02, "forward": 0.5, "backward": 0.4, "optimizer": 0.07, "other": 0.0}
    figure = plot_distribution({phase: 0.01 * share for phase, share in shares.items()}, shares, LABELS)
    assert len(figure.axes[0].patches) == 4
    assert "transfer 0.200 ms, 2.0 % (small)" in texts(figure)


def pictures_of(directory: Path, run: list[BatchTiming]) -> tuple[Figure, Figure]:
    """The breakdown and the total time of a run, from its files."""
    write_run(directory, make_spec(), run)
    cell, _ = read_cell(directory, directory, "0")
    assert cell is not None
    frame, labels = read_rows(cell), cell_labels(cell)
    return plot_batch_breakdown(choose_timeline(frame, labels.timeline), labels), plot_total_time(frame, labels)


def bottom_height(figure: Figure) -> float:
    """The height of the lowest phase at the last batch."""
    corners = figure.axes[0].collections[0].get_paths()[0].vertices
    return float(corners[np.isclose(corners[:, 0], corners[:, 0].max()), 1].max())


def test_batches_left_out_by_block_sampling_are_in_the_total_only(tmp_path: Path) -> None:
    breakdown, total = pictures_of(tmp_path, leave_out(make_rows(0.01), 5, 10))
    assert "only the 20 of 35 batches that were timed by phase" in texts(breakdown)
    assert breakdown.axes[0].get_xlim() == (0.5, 20.5)
    assert total.axes[0].get_xlim() == (0.5, 35.5)
    assert "timed by phase" not in texts(total)


def test_no_picture_of_phases_where_none_is_known(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(), leave_out(make_rows(0.01), 0, 10))
    draw_cell(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["total_batch_time.png"]
    axes = phase_plots.plot_phases(build_study([tmp_path], tmp_path)).axes[0]
    assert len(axes.get_xticks()) > 1  # of the median step, which is known


def test_a_merged_backward_is_named_with_the_forward_that_holds_it(tmp_path: Path) -> None:
    breakdown, _ = pictures_of(tmp_path, merge_backward(make_rows(0.01)))
    shares = {"data": 0.1, "transfer": 0.0, "forward": 0.8, "backward": None, "optimizer": 0.1, "other": 0.0}
    means = {phase: None if share is None else 0.01 * share for phase, share in shares.items()}
    for figure in (breakdown, plot_distribution(means, shares, LABELS)):
        assert "forward and backward" in texts(figure)
        assert not any(line.startswith("backward") for line in texts(figure).splitlines())
    note = "where no backward is drawn, forward holds it"
    assert note in texts(phase_plots.plot_phases(build_study([tmp_path], tmp_path)))
    assert note not in texts(phase_plots.plot_phases(study_of(tmp_path / "other", [make_spec()])))


def test_pictures_show_the_phases_of_the_summary_s_timeline_and_say_so(tmp_path: Path) -> None:
    breakdown, total = pictures_of(tmp_path / "device", on_device(make_rows(0.01)))
    assert bottom_height(breakdown) == pytest.approx(0.3 * 10)
    assert "Phases batch by batch on the device's timeline" in texts(breakdown)
    assert "timeline" not in texts(total)
    phases = phase_plots.plot_phases(build_study([tmp_path / "device"], tmp_path))
    assert "phases on the device's timeline" in texts(phases)
    breakdown, _ = pictures_of(tmp_path / "host", make_rows(0.01))
    assert bottom_height(breakdown) == pytest.approx(0.05 * 10)
    assert "timeline" not in texts(breakdown)


def test_a_cell_s_picture_on_disk_is_on_the_device_s_timeline_too(tmp_path: Path) -> None:
    pictures = []
    for number, shares in enumerate((SHARES, DEVICE_SHARES)):
        write_run(tmp_path / str(number), make_spec(), on_device(make_rows(0.01), shares))
        draw_cell(tmp_path / str(number))
        pictures.append((tmp_path / str(number) / "batch_time_breakdown.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_pictures_of_several_ranks_show_the_one_that_the_others_wait_for(tmp_path: Path) -> None:
    breakdown, total = pictures_of(tmp_path, two_ranks())
    forward = breakdown.axes[0].collections[PHASES.index("forward")].get_paths()[0].vertices
    assert forward[:, 1].max() == pytest.approx(31)
    for figure in (breakdown, total):
        assert figure.axes[0].get_xlim() == (0.5, 35.5)
        assert "rank 1 of 2, for which the others wait" in texts(figure)


def test_batches_that_compiled_are_marked_and_do_not_stretch_the_picture(tmp_path: Path) -> None:
    run = change(make_rows(0.01), [10, 20], compiled=True, batch_s=2.0, forward_s=1.9945)
    for figure in pictures_of(tmp_path, run):
        (marks,) = [line for line in figure.axes[0].lines if line.get_label() == "compiled (not counted)"]
        assert list(marks.get_xdata()) == [11, 21]
        assert "30 timed batches after 5 of warm-up, 2 of them compiled and not counted" in texts(figure)
        assert figure.axes[0].get_ylim()[1] < 20
    assert "compiled" not in texts(plot_total_time(rows(), LABELS))
    many = change(make_rows(0.01), range(5, 25), compiled=True, batch_s=2.0, forward_s=1.9945)
    for figure in pictures_of(tmp_path / "many", many):
        assert figure.axes[0].get_ylim()[1] < 20


def test_three_thousand_batches_draw_quickly(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(), make_rows(0.002, num_batches=3000, noise=0.3, stretch={700: 30.0}))
    started = time.perf_counter()
    draw_cell(tmp_path)
    assert time.perf_counter() - started < 10  # with a bar a batch it took 18 s
