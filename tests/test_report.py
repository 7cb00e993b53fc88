import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console
from studies import (
    NOISE,
    component,
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

from stepbench.advice import find_findings
from stepbench.aggregate import write_study
from stepbench.captions import PHASE_NOTE
from stepbench.record import Status, append_rows
from stepbench.report import print_run, print_study, report_markdown
from stepbench.study import Study, build_study


def console(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False)


def printed(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


def study_of(directory: Path) -> Study:
    """A sweep with its findings, without pictures."""
    study = build_study([directory], directory)
    return dataclasses.replace(study, findings=find_findings(study))


def answer(text: str, question: str) -> list[str]:
    """The lines of one answer of a Markdown report."""
    return [line.removeprefix("- ") for line in text.split(f"## {question}\n")[1].split("##")[0].splitlines() if line]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Study:
    directory = tmp_path_factory.mktemp("example")
    return write_study([first_example(directory)], directory)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Study:
    directory = tmp_path_factory.mktemp("broken")
    specs = [make_spec(batch, p) for p in ("32", "16-mixed") for batch in (16, 32)]
    failures = {3: (Status.OOM, "CUDA out of memory [in batch 7]"), 1: (Status.ERROR, "ValueError: boom")}
    return study_of(write_sweep(directory, specs, lambda _: 0.01, failures))


def test_study_prints_its_answers(example: Study) -> None:
    where = console()
    print_study(example, where)
    text = printed(where)
    assert "6 cells planned, 6 measured" in text
    assert "most time goes to forward in 6 of 6 cells (40 % of the step)" in text
    assert "  precision 32: step time 16→32 ×1.50, 32→128 ×1.50 per doubling (×2.25 measured)" in text
    assert "still rising" in text
    assert (
        "  precision 16-mixed (ran as bf16-mixed): the same at batch 16, 1.2 × faster at batch 32, 1.73 × faster"
        in text
    )
    assert "best throughput of all" in text
    assert str(example.out) in text


def test_a_series_of_one_number_is_named_by_its_axis(tmp_path: Path) -> None:
    specs = [make_spec(batch, accumulate_grad_batches=count) for count in (1, 4) for batch in (16, 32)]
    text = report_markdown(study_of(write_sweep(tmp_path, specs, lambda _: 0.01)))
    assert "- accumulate_grad_batches 4: step time 16→32" in text
    assert "(accumulate_grad_batches 4, batch 32)" in text


# ---- noise ----


def test_answers_that_rest_on_noisy_cells_are_marked_or_withheld(tmp_path: Path) -> None:
    study = study_of(noisy_example(tmp_path, (32, 64)))
    text = report_markdown(study)
    assert answer(text, "Batch size to train with") == [
        "precision 32: no recommendation: 2 of 3 cells are too noisy (batch 32, 64)",
        "precision 64: batch 64 (1,973 samples/s), still rising with the batch: the largest measured is best",
        "best throughput of all: 1,973 samples/s (precision 64, batch 64); "
        "perhaps faster, but too noisy to compare: precision 32, batch 32; precision 32, batch 64",
    ]
    first, second = answer(text, "Cost of doubling the batch")
    assert first.count(" (?)") == 2 and "(?)" not in second
    speed_ups, note, _ = answer(text, "Speed-up over precision 32, all else equal")
    assert speed_ups.endswith("the same at batch 16, 1.2 × slower at batch 32 (?), 1.45 × slower at batch 64 (?)")
    assert note == "(?) rests on a cell too noisy to compare."
    where = console()
    print_study(study, where)
    assert "(?) rests on a cell too noisy to compare\n" in printed(where)


def test_nothing_is_marked_or_explained_where_nothing_is_noisy(example: Study) -> None:
    assert "(?)" not in report_markdown(example)
    assert "too noisy" not in report_markdown(example)


# ---- the answer in short ----


def test_one_sentence_says_what_to_train_with(example: Study, tmp_path: Path) -> None:
    assert answer(report_markdown(example), "In short") == [
        "Train with precision 16-mixed (ran as bf16-mixed), batch 128 (6,546 samples/s); "
        "throughput was still rising: try larger batches"
    ]
    flat = study_of(write_sweep(tmp_path, [make_spec(b) for b in (16, 32)], lambda spec: 0.001 * spec.batch_size))
    assert answer(report_markdown(flat), "In short") == ["Train with batch 16 (1,000 samples/s), the best measured"]


def test_no_series_is_recommended_while_a_noisy_one_may_be_faster(tmp_path: Path) -> None:
    (line,) = answer(report_markdown(study_of(noisy_example(tmp_path, (64,)))), "In short")
    assert line == (
        "No recommendation can be made: precision 32 may be faster than precision 64, batch 64 (1,973 samples/s), "
        "but too noisy: 1 of 6 cells"
    )


def test_it_is_said_why_nothing_can_be_recommended(tmp_path: Path) -> None:
    noisy = write_sweep(tmp_path / "a", [make_spec(b) for b in (16, 32)], lambda _: 0.01, noise=NOISE)
    (line,) = answer(report_markdown(study_of(noisy)), "In short")
    assert line == "No recommendation can be made: too noisy: 2 of 2 cells"
    failures = {0: (Status.OOM, "out of memory")}
    failed = write_sweep(tmp_path / "b", [make_spec(b) for b in (16, 32)], lambda _: 0.01, failures)
    (line,) = answer(report_markdown(study_of(failed)), "In short")
    assert line == "No recommendation can be made: fewer than two batch sizes were measured"


def test_models_are_not_weighed_against_each_other(tmp_path: Path) -> None:
    specs = [make_spec(batch, model=component(f"mine.{name}")) for name in ("A", "B") for batch in (16, 32)]
    lines = answer(report_markdown(study_of(write_sweep(tmp_path, specs, lambda _: 0.01))), "In short")
    assert [line.split(" (")[0] for line in lines] == [
        "model A: train with batch 32",
        "model B: train with batch 32",
    ]


def test_a_series_of_one_measured_size_is_recommended_where_it_is_the_fastest(tmp_path: Path) -> None:
    specs = [make_spec(batch, precision) for precision in ("32", "bf16-mixed") for batch in (16, 32)]
    failures = {3: (Status.OOM, "out of memory")}
    study = study_of(write_sweep(tmp_path, specs, lambda s: 0.001 if s.precision != "32" else 0.01, failures))
    (line,) = answer(report_markdown(study), "In short")
    assert line == "Train with precision bf16-mixed, batch 16 (16,000 samples/s), the best measured"


# ---- other axes ----


def test_the_fastest_setting_is_named_where_the_batch_does_not_vary(tmp_path: Path) -> None:
    specs = [make_spec(16, data={"num_workers": count}) for count in (0, 2)]
    text = report_markdown(
        study_of(write_sweep(tmp_path, specs, lambda s: 0.01 / (1 + s.data.arguments["num_workers"])))
    )
    assert "Batch size to train with" not in text
    assert answer(text, "Fastest setting") == ["num_workers 2: 4,800 samples/s, ×3.00 over num_workers 0"]
    assert answer(text, "Growth of the step time with num_workers") == ["num_workers 0→2: step time ×0.33"]


def test_a_wider_model_grows_and_is_no_faster_setting(tmp_path: Path) -> None:
    specs = [make_spec(16, model={"width": width}) for width in (8, 16, 32)]
    text = report_markdown(study_of(write_sweep(tmp_path, specs, lambda s: 0.01 * s.model.arguments["width"] ** 0.5)))
    assert "Fastest setting" not in text
    assert answer(text, "Growth of the step time with width") == ["width 8→16: step time ×1.41, 16→32: ×1.41"]


# ---- the terminal ----


def test_what_all_cells_share_is_labelled_by_what_ran(tmp_path: Path) -> None:
    specs = [make_spec(batch, precision="16") for batch in (16, 32)]
    study = write_study([write_sweep(tmp_path, specs, lambda _: 0.01)], tmp_path)
    where = console()
    print_study(study, where)
    for text in (printed(where), report_markdown(study)):
        assert "precision 16 (ran as " not in text  # another spelling of 16-mixed, which the builder says ran
        assert "all cells: model AutoEncoder, data Images, precision 16" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_truncated_or_coloured_when_piped(example: Study, width: int) -> None:
    where = console(width)
    print_study(example, where)
    assert "…" not in printed(where)
    assert "\x1b" not in printed(where)


def test_table_says_what_its_signs_mean_and_names_the_directories(example: Study) -> None:
    wide, narrow = console(200), console(80)
    print_study(example, wide)
    print_study(example, narrow)
    note = "±: 95 % interval within one run; a repeat may differ more."
    assert f"{note} spread: IQR / median of the steps.\nIn short" in printed(wide)
    assert f"{note}\nIn short" in printed(narrow)
    heading = printed(wide).splitlines()[2].split("  ")
    assert heading[0] == "cell"
    assert " steps " in printed(wide).splitlines()[2]


def test_table_fits_eighty_columns_by_dropping_what_is_optional(example: Study) -> None:
    where = console(80)
    print_study(example, where)
    table = printed(where).split("\n±")[0].splitlines()
    assert max(map(len, table)) <= 80
    assert "step [ms]" in table[2]


def test_every_planned_cell_is_in_the_table_with_its_status(broken: Study) -> None:
    where = console(120)
    print_study(broken, where)
    text = printed(where)
    assert "4 cells planned, 2 measured, 2 without numbers (1 error, 1 oom)" in text
    table = text.split("\n±")[0]
    assert sum(f" {status} " in table for status in ("ok", "oom", "error")) == 3


def test_failures_are_named_with_reason_and_log(broken: Study) -> None:
    where = console()
    print_study(broken, where)
    assert f"precision 32, batch 32: error: ValueError: boom · log: {broken.cells[1].log}\n" in printed(where)
    assert "CUDA out of memory [in batch 7]" in printed(where)


def test_markdown_has_the_answers_first_and_all_cells(broken: Study) -> None:
    text = report_markdown(broken)
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[:2] == ["## In short", "## Where the time goes"]
    assert headings.index("## Not measured") < headings.index("## Cells")
    rows = [line for line in text.split("## Cells")[1].split("##")[0].splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 4
    assert len({row.count("|") for row in rows}) == 1
    assert text.count("Step time is a median") == 1
    assert text.count(PHASE_NOTE) == 1
    assert "- 30 steps timed per cell\n" in text
    assert "## Environment" in text
    assert "torch 2.13.0" in text


def test_report_tells_how_many_steps_were_timed(tmp_path: Path) -> None:
    for number, num_batches in enumerate((15, 75)):
        write_run(tmp_path / str(number), make_spec(16 + number), make_rows(0.01, num_batches=num_batches))
    text = report_markdown(study_of(tmp_path))
    assert "- 10 to 70 steps timed per cell\n" in text
    assert "at least 30 batches (fewer where they are slow)" in text


def test_study_without_numbers_explains_none_and_has_no_pictures(tmp_path: Path) -> None:
    failures = {0: (Status.ERROR, "ValueError: boom")}
    study = write_study([write_sweep(tmp_path, [make_spec()], lambda _: 0.01, failures)], tmp_path)
    where = console()
    print_study(study, where)
    assert "median" not in printed(where)
    assert "±" not in printed(where)
    assert "SVG" not in printed(where)
    assert not list(tmp_path.glob("*.png"))


def test_run_prints_phases_throughput_and_the_answer(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(precision="16-mixed"), make_rows(0.010, noise=0.1), choices={"model": "autoencoder"})
    where = console()
    print_run(tmp_path, where)
    text = printed(where)
    assert "most time goes to forward (40 % of the step)" in text
    assert "precision: asked for 16-mixed, ran as bf16-mixed" in text
    assert "ran on cpu · Example CPU 3000 · 1 device · 2 threads · timer host" in text
    assert "as four parts: data 5.0 %, forward 40 %, backward 37 %, other 18 %" in text
    assert "" not in text.splitlines() and not any(line.isspace() for line in text.splitlines())
    assert "samples/s" in text
    assert "30 steps timed after 5 batches of warm-up" in text
    assert "timing_results.csv" in text
    assert all(phase in text for phase in ("data", "transfer", "forward", "backward", "optimizer", "other", "step"))
    assert max(len(line) for line in text.splitlines() if not line.startswith("files in")) <= 120


def test_run_names_its_settings_and_what_to_do_about_noise(tmp_path: Path) -> None:
    spec = make_spec(data={"num_workers": 2}, accumulate_grad_batches=4)
    write_run(tmp_path, spec, make_rows(0.010, noise=NOISE, accumulate=1), load_average=2.3)
    where = console()
    print_run(tmp_path, where)
    assert "batch 16, precision 32, accumulate_grad_batches 4, num_workers 2\n" in printed(where)
    assert "too noisy to compare: the median step lies between" in printed(where)
    assert "The machine was busy (load 2.3 on 2 cores): run again" in printed(where)


def run_text(directory: Path) -> str:
    where = console()
    print_run(directory, where)
    return printed(where)


def test_run_shows_what_is_unknown_as_such(tmp_path: Path) -> None:
    write_run(tmp_path / "merged", make_spec(), merge_backward(make_rows(0.010)))
    text = run_text(tmp_path / "merged")
    assert "backward             –       –      –\n" in text
    assert "as four parts: data 5.0 %, forward 77 %, backward –, other 18 %\n" in text
    write_run(tmp_path / "none", make_spec(), leave_out(make_rows(0.010), 0, 10))
    assert "30 steps timed, 0 of them by phase, after 5 batches of warm-up" in run_text(tmp_path / "none")
    for name, top in (("merged", "forward and backward 77 %"), ("none", "–")):
        markdown = report_markdown(study_of(tmp_path / name))
        assert f"| {top} |" in markdown.split("## Cells")[1].split("## Phases")[0]
        assert "– |" in markdown.split("## Phases")[1]


def test_run_with_two_timelines_shows_the_device_s_and_names_the_host_s(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(), on_device(make_rows(0.010)))
    text = run_text(tmp_path)
    assert "data              3.00     0 %   30 %\n" in text
    assert "phases on the device's timeline; of the host's time: data 5.0 %, transfer 1.0 %, forward 40 %" in text
    assert "- phases on the device's timeline\n" in report_markdown(study_of(tmp_path))


def test_run_of_several_ranks_shows_each(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(num_devices=2, strategy="ddp"), two_ranks())
    text = run_text(tmp_path)
    assert "batch 16, precision 32, devices 2, strategy ddp\n" in text
    assert "rank 0: step 33.0 ms (median), waits 20.0 ms for others (mean)\n" in text
    assert "rank 1: step 33.0 ms (median), waits 0 ms for others (mean) · its phases are shown\n" in text


def test_report_tells_how_many_steps_were_timed_by_phase(tmp_path: Path) -> None:
    for number, period in enumerate((10, 15)):
        write_run(tmp_path / "some" / str(number), make_spec(16 + number), leave_out(make_rows(0.01), 5, period))
    write_run(tmp_path / "some" / "2", make_spec(32), make_rows(0.01))
    assert "- 10 to 30 steps of them timed by phase, the others as a whole\n" in report_markdown(
        study_of(tmp_path / "some")
    )
    write_run(tmp_path / "all", make_spec(), make_rows(0.01))
    assert "timed by phase" not in report_markdown(study_of(tmp_path / "all"))


def test_failed_run_prints_status_and_log_but_not_again_what_the_sweep_has_said(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(), status=Status.CRASHED, reason="the worker was killed by SIGKILL")
    append_rows(tmp_path, [], 0, 0)
    where = console()
    print_run(tmp_path, where)
    assert "crashed, so there are no numbers" in printed(where)
    assert "SIGKILL" not in printed(where)
    assert (tmp_path / "timing_results.csv").exists() and "timing_results.csv" not in printed(where)
    assert f"log: {tmp_path / 'logs' / '0.log'}" in printed(where)


def test_directory_without_a_record_is_said(tmp_path: Path) -> None:
    where = console()
    print_run(tmp_path, where)
    assert "no readable record" in printed(where)
