import dataclasses
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml
from studies import (
    NOISE,
    component,
    first_example,
    leave_out,
    make_rows,
    make_spec,
    merge_backward,
    on_device,
    two_ranks,
    write_run,
    write_sweep,
)

from stepbench.aggregate import cell_labels, draw_cell, main, read_rows, write_cell_summary, write_study
from stepbench.cells import read_cell
from stepbench.record import (
    SCHEMA_VERSION,
    BatchTiming,
    Compilation,
    RunSpec,
    Status,
    append_rows,
    read_record,
    write_request,
)
from stepbench.report import report_markdown
from stepbench.study import build_study

CELL_PICTURES = ("batch_time_breakdown.png", "total_batch_time.png", "time_distribution_pie.png")


def ten_ms(_: RunSpec) -> float:
    return 0.010


def axis_names(directory: Path) -> list[str]:
    return [axis.name for axis in build_study([directory], directory).axes]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The first example's sweep, and the directory in which its study lies."""
    sweep, out = tmp_path_factory.mktemp("sweep"), tmp_path_factory.mktemp("out")
    write_study([first_example(sweep)], out)
    return sweep, out


def test_runs_csv_has_a_row_per_run_with_known_numbers(first: tuple[Path, Path]) -> None:
    runs = pd.read_csv(first[1] / "runs.csv", dtype={"requested_precision": str})
    assert list(runs.columns[:5]) == ["cell", "round", "attempt", "status", "reason"]
    assert len(runs) == 6
    row = runs[(runs["requested_precision"] == "16-mixed") & (runs["batch_size"] == 32)].iloc[0]
    assert row["effective_precision"] == "bf16-mixed"
    assert row["median_step_s"] == pytest.approx(0.0125, rel=1e-3)
    assert row["forward_s"] == pytest.approx(0.4 * row["median_step_s"], rel=1e-6)
    assert row["forward_fraction"] == pytest.approx(0.4)
    assert sum(row[f"{p}_fraction"] for p in ("data", "transfer", "forward", "backward", "optimizer", "other")) == (
        pytest.approx(1)
    )
    assert row["samples_per_s"] == pytest.approx(32 / row["mean_step_s"], rel=1e-6)
    assert row["num_steps"] == 30
    assert row["peak_host_memory_bytes"] == 700 * 1024**2


def test_two_aggregations_give_the_same_bytes(first: tuple[Path, Path], tmp_path: Path) -> None:
    sweep, out = first
    write_study([sweep], tmp_path)
    names = sorted(path.name for path in out.iterdir())
    assert {"runs.csv", "cells.csv", "report.md", "step_time.svg", "phases.svg", "speedup.svg"} <= set(names)
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_cells_are_in_numeric_order_within_series_of_first_appearance(tmp_path: Path) -> None:
    specs = [make_spec(batch, p) for batch in (128, 16, 32) for p in ("bf16-mixed", "32")]
    study = build_study([write_sweep(tmp_path, specs, ten_ms)], tmp_path)
    assert study.series == ("bf16-mixed", "32")
    assert list(study.cell_frame["batch_size"]) == [16, 32, 128] * 2
    assert next(axis.values for axis in study.axes if axis.name == "batch_size") == (16, 32, 128)


def test_axis_that_only_relabels_another_is_dropped(tmp_path: Path) -> None:
    assert axis_names(first_example(tmp_path)) == ["batch_size", "precision"]


def test_arguments_that_come_with_the_model_are_no_axes_of_their_own(tmp_path: Path) -> None:
    models = [component("a.Wide", {"width": 9}), component("a.Deep", {"depth": 3}), component("a.Thin", {"depth": 3})]
    assert axis_names(write_sweep(tmp_path, [make_spec(model=model) for model in models], ten_ms)) == ["model"]


def test_nested_arguments_that_vary_are_axes(tmp_path: Path) -> None:
    specs = [make_spec(16, model={"net": {"width": w}}, data={"num_workers": n}) for w in (8, 64) for n in (0, 4)]
    assert axis_names(write_sweep(tmp_path, specs, ten_ms)) == ["model.net.width", "data.num_workers"]


def test_chosen_option_labels_the_model(tmp_path: Path) -> None:
    for i, choice in enumerate(("autoencoder", "mlp")):
        spec = make_spec(model=component(f"stepbench.models.Class{i}"))
        write_run(tmp_path / str(i), spec, make_rows(0.01), choices={"model": choice})
    assert build_study([tmp_path], tmp_path).series == ("autoencoder", "mlp")


def test_one_option_name_for_two_models_falls_back_to_their_targets(tmp_path: Path) -> None:
    for i in range(2):
        spec = make_spec(model=component(f"mine.Net{i}"))
        write_run(tmp_path / str(i), spec, make_rows(0.01), choices={"model": "net"})
    assert build_study([tmp_path], tmp_path).series == ("mine.Net0", "mine.Net1")


@pytest.mark.parametrize(
    ("requested", "effective", "label"),
    [
        ("16-mixed", "bf16-mixed", "16-mixed (ran as bf16-mixed)"),
        ("32", "32-true", "32"),
        ("16", "16-mixed", "16"),
        ("bf16", "bf16-mixed", "bf16"),
        ("64", "64-true", "64"),
        ("16-true", "bf16-true", "16-true (ran as bf16-true)"),
    ],
)
def test_label_shows_what_ran_but_not_a_mere_spelling(
    tmp_path: Path, requested: str, effective: str, label: str
) -> None:
    write_run(tmp_path / "0", make_spec(precision="bf16-true"), make_rows(0.01))
    write_run(tmp_path / "1", make_spec(precision=requested), make_rows(0.01), effective={"precision": effective})
    assert build_study([tmp_path], tmp_path).series == ("bf16-true", label)


def test_failed_cell_shares_the_series_of_those_that_ran(tmp_path: Path) -> None:
    specs = [make_spec(batch, p) for p in ("32", "16-mixed") for batch in (16, 32)]
    study = build_study([write_sweep(tmp_path, specs, ten_ms, {3: (Status.OOM, "out of memory")})], tmp_path)
    assert study.series == ("32", "16-mixed (ran as bf16-mixed)")


def test_failed_runs_are_in_both_tables_with_status_and_reason(tmp_path: Path) -> None:
    specs = [make_spec(batch) for batch in (16, 32)]
    write_study([write_sweep(tmp_path, specs, ten_ms, {1: (Status.OOM, "out of memory")})], tmp_path)
    for name in ("runs.csv", "cells.csv"):
        row = pd.read_csv(tmp_path / name).iloc[1]
        assert (row["status"], row["reason"], row["batch_size"]) == ("oom", "out of memory", 32)
        assert pd.isna(row["median_step_s"])


def test_unreadable_and_newer_records_are_skipped_with_a_warning_that_names_them(tmp_path: Path) -> None:
    sweep = first_example(tmp_path)
    (sweep / "1" / "records" / "0.0.json").write_text("{")
    newer = sweep / "2" / "records" / "0.0.json"
    newer.write_text(json.dumps(json.loads(newer.read_text()) | {"schema_version": SCHEMA_VERSION + 1}))
    with pytest.warns(UserWarning, match=r"records/0\.0\.json") as caught:
        study = write_study([sweep], tmp_path / "out")
    assert any("1/records/0.0.json" in str(warning.message) for warning in caught)
    assert any("schema_version" in str(warning.message) for warning in caught)
    assert len(study.cells) == 4
    assert "1/records/0.0.json" in (tmp_path / "out" / "report.md").read_text()


def test_planned_cell_that_never_ran_is_named(tmp_path: Path) -> None:
    sweep = first_example(tmp_path)
    request = read_record(sweep / "0" / "records" / "0.0.json").request
    write_request(sweep / "6", dataclasses.replace(request, spec=make_spec(256)))
    study = build_study([sweep], sweep)
    assert study.cell_frame["cell"].tolist().count("6") == 1
    (row,) = study.run_frame[study.run_frame["cell"] == "6"].to_dict("records")
    assert (row["status"], row["reason"]) == ("interrupted", "planned, but the sweep ended before it ran")
    assert row["batch_size"] == 256


def test_cell_over_rounds_is_the_median_of_its_run_medians(tmp_path: Path) -> None:
    for round_, step_s in enumerate((0.010, 0.030, 0.012)):
        write_run(tmp_path / "0", make_spec(), make_rows(step_s), round_=round_)
    study = build_study([tmp_path], tmp_path)
    (cell,) = study.cell_frame.to_dict("records")
    assert (cell["num_rounds"], cell["median_step_s"]) == (3, pytest.approx(0.012))
    assert (cell["step_low_s"], cell["step_high_s"]) == (pytest.approx(0.010), pytest.approx(0.030))
    assert (cell["interval_basis"], cell["interval_coverage"]) == ("rounds", 0.75)
    write_cell_summary(tmp_path / "0")
    assert yaml.safe_load((tmp_path / "0" / "timing_summary.yaml").read_text())["rounds"] == 3


def test_several_sweeps_keep_their_cells_apart(tmp_path: Path) -> None:
    first = write_sweep(tmp_path / "a", [make_spec(16), make_spec(32)], ten_ms)
    second = write_sweep(tmp_path / "b", [make_spec(16), make_spec(32)], lambda _: 0.02, host="lab-2")
    study = build_study([first, second], tmp_path)
    assert set(study.cell_frame["cell"]) == {"a/0", "a/1", "b/0", "b/1"}
    assert [axis.name for axis in study.axes] == ["batch_size", "host"]
    again = build_study([first, write_sweep(tmp_path / "c", [make_spec(16)], ten_ms)], tmp_path)
    assert [axis.name for axis in again.axes] == ["batch_size", "sweep"]


def test_cell_gets_its_summary_and_three_pictures(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(precision="16-mixed"), make_rows(0.010, noise=0.1))
    write_cell_summary(tmp_path)
    draw_cell(tmp_path)
    assert all((tmp_path / name).stat().st_size > 5000 for name in CELL_PICTURES)
    summary = yaml.safe_load((tmp_path / "timing_summary.yaml").read_text())
    assert summary["status"] == "ok"
    assert summary["findings"] == ["most time goes to forward (40 % of the step)"]
    assert summary["settings"]["ran_differently"] == {"precision": "requested 16-mixed, ran bf16-mixed"}
    assert summary["phases"]["forward"]["share_fraction"] == pytest.approx(0.4)
    assert summary["four_way_view"]["other"]["share_fraction"] == pytest.approx(0.18)
    assert sum(view["share_fraction"] for view in summary["four_way_view"].values()) == pytest.approx(1)
    assert summary["warmup"]["num_batches"] == 5
    assert summary["timed"]["num_steps"] == 30


@pytest.mark.parametrize(
    ("damage", "wording", "has_pictures"),
    [
        (lambda text: "", "holds no rows", False),
        (lambda text: "a,b\n1,2\n", "holds no rows", False),
        (lambda text: text + "0,0,0,9", "1 incomplete rows are left out", True),
        (lambda text: text + "\xff", "incomplete rows are left out", True),
    ],
)
def test_damaged_raw_rows_cost_no_more_than_themselves(
    tmp_path: Path, damage: Callable[[str], str], wording: str, has_pictures: bool
) -> None:
    write_run(tmp_path, make_spec(), make_rows(0.01))
    path = tmp_path / "timing_results.csv"
    path.write_text(damage(path.read_text()))
    with pytest.warns(UserWarning, match=wording):
        draw_cell(tmp_path)
    assert (tmp_path / "total_batch_time.png").exists() is has_pictures


def test_a_cell_whose_record_is_damaged_says_so(tmp_path: Path) -> None:
    sweep = first_example(tmp_path)
    request = read_record(sweep / "0" / "records" / "0.0.json").request
    write_request(sweep / "0", request)
    (sweep / "0" / "records" / "0.0.json").write_text('{"request": ')
    study = build_study([sweep], sweep)
    (row,) = study.cell_frame[study.cell_frame["cell"] == "0"].to_dict("records")
    assert (row["status"], row["reason"]) == ("crashed", "its record cannot be read")


def test_what_cannot_be_written_ends_with_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = first_example(tmp_path / "sweep")
    (tmp_path / "file").write_text("")
    assert main([str(sweep), "--out", str(tmp_path / "file")]) == 2
    assert "file" in capsys.readouterr().err


def test_a_dollar_sign_in_a_setting_is_a_dollar_sign(tmp_path: Path) -> None:
    specs = [make_spec(batch, model={"text": text}) for text in ("a$\\frac$b", "x$_$y") for batch in (16, 32)]
    study = write_study([write_sweep(tmp_path, specs, ten_ms)], tmp_path)
    assert (tmp_path / "step_time.png").exists()
    assert "a$\\frac$b" in study.series[0]


def test_failed_cell_gets_a_summary_and_no_pictures(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(), status=Status.TIMEOUT, reason="too slow")
    write_cell_summary(tmp_path)
    draw_cell(tmp_path)
    summary = yaml.safe_load((tmp_path / "timing_summary.yaml").read_text())
    assert (summary["status"], summary["reason"]) == ("timeout", "too slow")
    assert not any((tmp_path / name).exists() for name in CELL_PICTURES)


def test_cell_without_raw_rows_keeps_its_summary_and_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(), make_rows(0.01))
    (tmp_path / "timing_results.csv").unlink()
    write_cell_summary(tmp_path)
    with pytest.warns(UserWarning, match=r"timing_results\.csv"):
        draw_cell(tmp_path)
    assert (tmp_path / "timing_summary.yaml").exists()


def test_command_line_ends_with_2_and_one_line_where_there_is_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "missing")]) == 2
    assert capsys.readouterr().err == f"stepbench-aggregate: no such directory: {tmp_path / 'missing'}\n"
    assert main([str(tmp_path)]) == 2
    assert "no stepbench record" in capsys.readouterr().err


def test_command_line_aggregates_into_another_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path / "sweep", [make_spec(16)], ten_ms)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([str(sweep), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.md").exists()
    assert (sweep / "0" / "timing_summary.yaml").exists()
    assert not (sweep / "report.md").exists()
    assert "1 cell planned, 1 measured" in capsys.readouterr().out


def test_several_directories_need_a_place_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweeps = [str(write_sweep(tmp_path / name, [make_spec(16)], ten_ms)) for name in ("a", "b")]
    assert main(sweeps) == 2
    message = "several directories need --out DIR, so that the study of none of them is overwritten"
    assert capsys.readouterr().err == f"stepbench-aggregate: {message}\n"
    assert not (tmp_path / "a" / "report.md").exists()


def test_sweeps_of_models_with_other_arguments_are_one_study(tmp_path: Path) -> None:
    """Arguments that a model does not take are no values: neither a crash nor a label."""
    first = [make_spec(b, model=component("mine.A", {"width": w})) for b in (16, 32) for w in (1, 2)]
    second = [make_spec(b, model=component("mine.B", {"depth": d})) for b in (16, 32) for d in (1, 2)]
    write_sweep(tmp_path / "a", first, ten_ms)
    write_sweep(tmp_path / "b", second, ten_ms, dict.fromkeys(range(4), (Status.ERROR, "ValueError: boom")))
    study = write_study([tmp_path], tmp_path / "out")
    assert study.series == ("A, width 1", "A, width 2", "B, depth 1", "B, depth 2")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "- B, depth 2, batch 32: error: ValueError: boom" in text
    assert "| b/0 | B | – | 1 | 16 | error |" in text


def test_a_setting_left_open_in_some_cells_is_named_default(tmp_path: Path) -> None:
    specs = [make_spec(batch, num_threads=count) for count in (None, 2) for batch in (16, 32)]
    study = build_study([write_sweep(tmp_path, specs, ten_ms, {1: (Status.OOM, "out of memory")})], tmp_path)
    assert study.cell_frame["requested_num_threads"].isna().sum() == 2
    assert "- num_threads default, batch 32: oom" in report_markdown(study)


def test_cells_csv_tells_which_numbers_are_too_noisy(tmp_path: Path) -> None:
    specs = [make_spec(batch) for batch in (16, 32, 64)]
    sweep = write_sweep(
        tmp_path, specs, ten_ms, {2: (Status.OOM, "")}, noise=lambda spec: NOISE if spec.batch_size == 32 else 0.0
    )
    frame = build_study([sweep], sweep).cell_frame
    assert frame["verdict"].fillna("").tolist() == ["ok", "noisy", ""]


def test_pictures_of_a_cell_name_its_settings_by_their_axes(tmp_path: Path) -> None:
    spec = make_spec(data={"num_workers": 2}, accumulate_grad_batches=4)
    write_run(tmp_path, spec, make_rows(0.01, accumulate=4), choices={"model": "autoencoder"})
    cell, _ = read_cell(tmp_path, tmp_path, "0")
    assert cell is not None
    title = cell_labels(cell).title
    assert title == "autoencoder, batch 16, precision 32, accumulate_grad_batches 4, num_workers 2"


def test_report_side_imports_nothing_that_trains() -> None:
    code = (
        "import sys; import stepbench.aggregate, stepbench.report; "
        "print(sorted({'torch', 'lightning', 'hydra', 'omegaconf'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- raw rows ----


def raw_rows(directory: Path) -> pd.DataFrame:
    cell, _ = read_cell(directory, directory, "0")
    assert cell is not None
    return read_rows(cell)


@pytest.mark.parametrize("kind", [merge_backward, on_device, lambda rows: leave_out(rows, 5, 10)])
def test_rows_without_some_of_the_phases_are_whole(
    tmp_path: Path, kind: Callable[[list[BatchTiming]], list[BatchTiming]]
) -> None:
    run = kind(make_rows(0.01))
    write_run(tmp_path, make_spec(), run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frame = raw_rows(tmp_path)
    assert len(frame) == 35
    for name in ("data_s", "backward_s", "device_data_s"):
        assert frame[name].notna().tolist() == [getattr(row, name) is not None for row in run]
    assert frame["backward_merged"].tolist() == [row.backward_merged for row in run]


@pytest.mark.parametrize("column", ["forward_s", "backward_s", "compiled", "rank"])
def test_a_row_with_a_hole_is_left_out(tmp_path: Path, column: str) -> None:
    write_run(tmp_path, make_spec(), make_rows(0.01))
    path = tmp_path / "timing_results.csv"
    frame = pd.read_csv(path, dtype=str)
    frame.loc[7, column] = None
    frame.to_csv(path, index=False)
    with pytest.warns(UserWarning, match="1 incomplete rows are left out"):
        assert raw_rows(tmp_path)["step"].tolist() == [i for i in range(35) if i != 7]


def test_rows_of_an_older_stepbench_are_read_with_what_it_knew(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(), make_rows(0.01))
    path = tmp_path / "timing_results.csv"
    frame = pd.read_csv(path, dtype=str)
    newer = [name for name in frame.columns if name.startswith("device_")]
    frame.drop(columns=[*newer, "rank", "rank_wait_s", "backward_merged", "compiled"]).to_csv(path, index=False)
    old = raw_rows(tmp_path)
    assert (old["rank"] == 0).all() and not old["compiled"].any() and old["device_data_s"].isna().all()
    draw_cell(tmp_path)
    assert all((tmp_path / name).exists() for name in CELL_PICTURES)


def test_rows_of_several_ranks_are_those_whose_phases_are_summarized(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(), two_ranks())
    frame = raw_rows(tmp_path)
    assert (len(frame), set(frame["rank"])) == (35, {1})
    append_rows(tmp_path, two_ranks(), 1, 0)  # of a round that left no record
    assert len(raw_rows(tmp_path)) == 35


# ---- what a run may be besides ----


def columns_of(directory: Path) -> dict[str, object]:
    return {str(k): v for k, v in build_study([directory], directory).cell_frame.iloc[0].items()}


def summary_of(directory: Path) -> dict[str, dict[str, object]]:
    write_cell_summary(directory)
    loaded: dict[str, dict[str, object]] = yaml.safe_load((directory / "timing_summary.yaml").read_text())
    return loaded


def test_unknown_phases_are_empty_in_tables_and_null_in_the_summary(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(), merge_backward(make_rows(0.01)))
    row = columns_of(tmp_path)
    assert pd.isna(row["backward_s"]) and pd.isna(row["backward_mean_s"]) and pd.isna(row["backward_fraction"])
    assert row["forward_fraction"] == pytest.approx(0.77)
    summary = summary_of(tmp_path)
    assert set(summary["phases"]["backward"].values()) == {None}  # type: ignore[attr-defined]
    assert summary["four_way_view"]["backward"] == {"mean_s": None, "share_fraction": None}
    assert summary["four_way_view"]["forward"]["share_fraction"] == pytest.approx(0.77)  # type: ignore[index]


def test_block_sampling_is_told_with_what_the_timer_cost(tmp_path: Path) -> None:
    rows = leave_out(make_rows(0.01), 5, 10, faster=1.25)
    for round_, run in enumerate((rows, make_rows(0.01))):
        write_run(tmp_path / "0", make_spec(), run, round_=round_)
    row = columns_of(tmp_path)
    assert (row["num_steps"], row["num_sampled_steps"]) == (60, 15 + 30)
    assert row["timer_slowdown_fraction"] == pytest.approx(0.25)
    assert summary_of(tmp_path / "0")["timer"] == {"slowdown_fraction": 0.25, "num_sampled_steps": 45}
    write_run(tmp_path / "1", make_spec(), make_rows(0.01))
    assert "timer" not in summary_of(tmp_path / "1")


def test_a_device_s_timeline_comes_with_the_host_s_phases_and_what_was_exposed(tmp_path: Path) -> None:
    for round_ in range(2):
        write_run(tmp_path / "0", make_spec(), on_device(make_rows(0.01)), round_=round_)
    row = columns_of(tmp_path)
    assert row["timeline"] == "device"
    assert (row["data_s"], row["host_data_s"]) == (pytest.approx(0.003), pytest.approx(0.0005))
    summary = summary_of(tmp_path / "0")
    assert summary["timeline"] == "device"
    assert summary["exposed"] == {"data_s": 0.003, "transfer_s": 0.0005, "idle_at_least_s": 0.003}
    assert summary["host_phases"]["forward"]["share_fraction"] == pytest.approx(0.4)  # type: ignore[index]
    write_run(tmp_path / "1", make_spec(), make_rows(0.01))
    host = summary_of(tmp_path / "1")
    assert host["timeline"] == "host"
    assert not {"exposed", "host_phases"} & set(host)


def test_ranks_and_compilation_are_in_the_summary(tmp_path: Path) -> None:
    compilation = Compilation(num_graphs=2, num_recompilations=0, num_batches=1, compile_s=None)
    write_run(tmp_path, make_spec(num_devices=2, strategy="ddp"), two_ranks(), compilation=compilation)
    row = columns_of(tmp_path)
    assert (row["phases_rank"], row["rank_wait_s"]) == (1, pytest.approx(0.02))
    summary = summary_of(tmp_path)
    assert summary["phases_rank"] == 1
    ranks: list[dict[str, object]] = list(summary["ranks"])  # type: ignore[arg-type]
    assert [rank["mean_wait_s"] for rank in ranks] == [0.02, 0.0]
    assert ranks[0]["phase_means_s"]["backward"] == 0.022  # type: ignore[index]
    assert summary["compilation"] == {
        "num_compiled_batches": 0,
        "rounds": [{"round": 0, "num_graphs": 2, "num_recompilations": 0, "num_batches": 1}],
    }


# ---- devices, strategy, compilation as axes ----


def test_devices_are_a_numeric_axis_and_no_choice(tmp_path: Path) -> None:
    specs = [make_spec(batch, num_devices=count) for count in (2, 1) for batch in (16, 32)]
    study = build_study([write_sweep(tmp_path, specs, ten_ms)], tmp_path)
    devices = next(axis for axis in study.axes if axis.name == "num_devices")
    assert (devices.title, devices.is_numeric, devices.is_choice) == ("devices", True, False)
    assert devices in study.work_axes
    assert study.cell_frame["requested_num_devices"].tolist() == [2, 2, 1, 1]
    assert study.cell_frame["samples_per_step"].tolist() == [32, 64, 16, 32]
    assert "- devices 2: train with batch 32" in report_markdown(study)
    alone = build_study([write_sweep(tmp_path / "x", specs[::2], ten_ms)], tmp_path)
    assert alone.x_axis is not None and alone.x_axis.name == "num_devices"


def test_a_strategy_ran_as_requested_where_its_class_is_that_of_its_name(tmp_path: Path) -> None:
    strategies = {"ddp": "DDPStrategy", "ddp_spawn": "DDPStrategy", "fsdp": "DDPStrategy", None: "SingleDeviceStrategy"}
    for i, (name, effective) in enumerate(strategies.items()):
        write_run(tmp_path / str(i), make_spec(strategy=name), make_rows(0.01), effective={"strategy": effective})
    study = build_study([tmp_path], tmp_path)
    assert study.series == ("ddp", "ddp_spawn", "fsdp (ran as DDPStrategy)", "default")


def test_an_uncompiled_model_is_called_so_and_not_the_default_mode(tmp_path: Path) -> None:
    specs = [make_spec(batch, compile=mode) for mode in (None, "default") for batch in (16, 32)]
    study = build_study([write_sweep(tmp_path, specs, ten_ms)], tmp_path)
    assert study.series == ("off", "default")
    assert study.baseline == "compile off"
    assert "compile default: the same at batch 16" in report_markdown(study)


def test_what_all_cells_share_names_devices_and_strategy_only_where_they_are_unusual(tmp_path: Path) -> None:
    specs = [make_spec(batch, num_devices=2, strategy="ddp") for batch in (16, 32)]
    text = report_markdown(build_study([write_sweep(tmp_path / "two", specs, ten_ms)], tmp_path))
    assert "- all cells: model AutoEncoder, data Images, precision 32, devices 2, strategy ddp\n" in text
    text = report_markdown(build_study([write_sweep(tmp_path / "one", [make_spec(16)], ten_ms)], tmp_path))
    assert "precision 32, batch size 16\n" in text
