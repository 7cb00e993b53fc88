import io
from pathlib import Path

import pytest
from rich.console import Console
from studies import first_example, make_rows, make_spec, write_run, write_sweep

from stepbench.aggregate import write_study
from stepbench.record import Status
from stepbench.report import print_run, print_study, report_markdown
from stepbench.study import Study


def console(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False)


def printed(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Study:
    directory = tmp_path_factory.mktemp("example")
    return write_study([first_example(directory)], directory)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Study:
    directory = tmp_path_factory.mktemp("broken")
    specs = [make_spec(batch, p) for p in ("32", "16-mixed") for batch in (16, 32)]
    failures = {3: (Status.OOM, "CUDA out of memory [in batch 7]"), 1: (Status.ERROR, "ValueError: boom")}
    return write_study([write_sweep(directory, specs, lambda _: 0.01, failures)], directory)


def test_study_prints_its_answers(example: Study) -> None:
    where = console()
    print_study(example, where)
    text = printed(where)
    assert "6 cells planned, 6 measured" in text
    assert "most time goes to forward in 6 of 6 cells (40 % of the step)" in text
    assert "  precision 32: step time 16→32 ×1.50, 32→128 ×1.50 per doubling (×2.25 measured)" in text
    assert "still rising" in text
    assert "  precision 16-mixed (ran as bf16-mixed): ×1.00 at batch 16, ×1.20 at batch 32, ×1.73 at batch 128" in text
    assert "best throughput of all" in text
    assert str(example.out) in text


def test_a_series_of_one_number_is_named_by_its_axis(tmp_path: Path) -> None:
    specs = [make_spec(batch, accumulate_grad_batches=count) for count in (1, 4) for batch in (16, 32)]
    text = report_markdown(write_study([write_sweep(tmp_path, specs, lambda _: 0.01)], tmp_path))
    assert "- accumulate grad batches 4: step time 16→32" in text
    assert "(accumulate grad batches 4, batch 32)" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_truncated_or_coloured_when_piped(example: Study, width: int) -> None:
    where = console(width)
    print_study(example, where)
    assert "…" not in printed(where)
    assert "\x1b" not in printed(where)


def test_table_fits_eighty_columns_by_dropping_what_is_optional(example: Study) -> None:
    where = console(80)
    print_study(example, where)
    table = printed(where).split("Where the time goes")[0].splitlines()
    assert max(map(len, table)) <= 80
    assert "step [ms]" in table[1]


def test_every_planned_cell_is_in_the_table_with_its_status(broken: Study) -> None:
    where = console(120)
    print_study(broken, where)
    text = printed(where)
    assert "4 cells planned, 2 measured, 2 without numbers (1 error, 1 oom)" in text
    table = text.split("Where the time goes")[0]
    assert sum(f" {status} " in table for status in ("ok", "oom", "error")) == 3


def test_failures_are_named_with_reason_and_log(broken: Study) -> None:
    where = console()
    print_study(broken, where)
    assert f"32, batch 32: error: ValueError: boom · log: {broken.cells[1].log}\n" in printed(where)
    assert "CUDA out of memory [in batch 7]" in printed(where)


def test_markdown_has_the_answers_first_and_all_cells(broken: Study) -> None:
    text = report_markdown(broken)
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[0] == "## Where the time goes"
    assert headings.index("## Not measured") < headings.index("## Cells")
    rows = [line for line in text.split("## Cells")[1].split("##")[0].splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 4
    assert len({row.count("|") for row in rows}) == 1
    assert text.count("Step time is a median") == 1
    assert "## Environment" in text
    assert "torch 2.13.0" in text


def test_run_prints_phases_throughput_and_the_answer(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(precision="16-mixed"), make_rows(0.010, noise=0.1), choices={"model": "autoencoder"})
    where = console()
    print_run(tmp_path, where)
    text = printed(where)
    assert "most time goes to forward (40 % of the step)" in text
    assert "precision: asked for 16-mixed, ran as bf16-mixed" in text
    assert "ran on cpu · Example CPU 3000 · 1 device · 2 threads · timer host" in text
    assert "in four: data 5.0 %, forward 40 %, backward 37 %, other 18 %" in text
    assert "samples/s" in text
    assert "30 steps timed after 5 batches of warm-up" in text
    assert "timing_results.csv" in text
    assert all(phase in text for phase in ("data", "transfer", "forward", "backward", "optimizer", "other", "step"))
    assert max(len(line) for line in text.splitlines() if not line.startswith("files in")) <= 120


def test_failed_run_prints_status_reason_and_log(tmp_path: Path) -> None:
    write_run(tmp_path, make_spec(), status=Status.CRASHED, reason="the worker was killed by SIGKILL")
    where = console()
    print_run(tmp_path, where)
    assert "crashed: the worker was killed by SIGKILL" in printed(where)
    assert f"log: {tmp_path / 'logs' / '0.log'}" in printed(where)


def test_directory_without_a_record_is_said(tmp_path: Path) -> None:
    where = console()
    print_run(tmp_path, where)
    assert "no readable record" in printed(where)
