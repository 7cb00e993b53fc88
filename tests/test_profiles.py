"""Profiles of cells: what each profiler leaves, that it covers the batches asked for, and that it changes nothing."""

from __future__ import annotations

import dataclasses
import json
import pstats
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Stepbench
from studies import make_rows, make_spec, write_run
from test_main import FAST, TINY, tiny_group
from test_settings import CHOICES, composed, problems
from worker_lab import plan

from stepbench.cells import read_cells
from stepbench.launcher import Launcher, SpawnLauncher, WorkerExit
from stepbench.profile_files import EVERY_CELL, SLOWEST
from stepbench.record import ProfileRequest, RunRequest, Status, find_cells, read_record
from stepbench.settings import read_request
from stepbench.sweep import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    PlannedCell,
    measure_cell,
    profile_cell,
    profile_cells,
    write_plan,
)

Profile = Callable[..., "str | None"]


def wanted(profiler: str, **changes: Any) -> ProfileRequest:
    return ProfileRequest(profiler=profiler, **{"warmup_batches": 2, "batches": 3, **changes})


@pytest.fixture
def profile(launcher: Launcher, tmp_path: Path) -> Profile:
    """Profiles the cell `cell` in a worker of the shared server; returns why there is no profile."""

    def run(request: ProfileRequest, **settings: Any) -> str | None:
        return profile_cell(dataclasses.replace(plan(tmp_path / "cell", **settings), profile=request), launcher)

    return run


def files(tmp_path: Path) -> set[str]:
    directory = tmp_path / "cell" / "profile"
    return {path.name for path in directory.iterdir() if path.is_file()} - {"profile_request.json", "worker.log"}


def text(tmp_path: Path, name: str) -> str:
    return (tmp_path / "cell" / "profile" / name).read_text()


def calls(table: str, action: str) -> list[int]:
    """How often an action is said to have happened, in `SimpleProfiler`'s table."""
    rows = [[column.strip() for column in line.split("|")] for line in table.splitlines() if line.startswith("|")]
    return [int(row[3]) for row in rows if row[1].endswith(action)]


# ---- what each profiler leaves ----


@pytest.mark.parametrize("warmup_batches", [0, 2])
@pytest.mark.parametrize("package", ["", "other_package_samples.Other"])
def test_simple_counts_the_batches_asked_for(
    profile: Profile, tmp_path: Path, package: str, warmup_batches: int
) -> None:
    classes = {"model": f"{package}Module", "data": f"{package}Data"} if package else {"data_arguments": SHORT_EPOCH}
    assert profile(wanted("simple", warmup_batches=warmup_batches, batches=5), **classes) is None
    assert files(tmp_path) == {"simple.txt"}
    table = text(tmp_path, "simple.txt")
    assert table.startswith(f"5 batches of the training, after {warmup_batches} that warmed up\n")
    for action in ("run_training_batch", ".training_step", ".backward", ".optimizer_step"):
        assert calls(table, action) == [5]
    if package:
        assert calls(table, ".train_dataloader_next") == [5]


SHORT_EPOCH = {"num_items": 48}
"""Three batches, so that the profile goes on in the next epoch."""


def test_advanced_leaves_python_s_statistics(profile: Profile, tmp_path: Path) -> None:
    assert profile(wanted("advanced")) is None
    assert files(tmp_path) == {"advanced.txt", "advanced.prof"}
    readable = text(tmp_path, "advanced.txt")
    assert readable.startswith("3 batches of the training, after 2 that warmed up\n")
    assert "by own time" in readable and "tottime" in readable and "user_code_samples.py" in readable
    statistics: Any = pstats.Stats(str(tmp_path / "cell" / "profile" / "advanced.prof"))
    counts = {name: count for (_, _, name), (count, *_) in statistics.stats.items()}
    assert counts["training_step"] == counts["backward"] == 3


def test_pytorch_leaves_a_trace_and_the_top_operators(profile: Profile, tmp_path: Path) -> None:
    assert profile(wanted("pytorch"), model="LoggingModule") is None
    assert files(tmp_path) == {"trace.json", "top_operators.txt"}
    events = json.loads(text(tmp_path, "trace.json"))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in complete)
    assert {"cpu_op", "user_annotation"} <= {event.get("cat") for event in complete}
    names = Counter(event["name"] for event in complete)
    for name in ("run_training_batch", "[_TrainingEpochLoop].train_dataloader_next", "layer", "aten::addmm"):
        assert names[name] == 3
    assert [name for name in names if name.startswith("ProfilerStep")] == [f"ProfilerStep#{n}" for n in (2, 3, 4)]
    (batch, *_) = (event for event in complete if event["name"] == "run_training_batch")
    assert any(  # nested in time, as viewers draw it
        batch["ts"] <= event["ts"] and event["ts"] + event["dur"] <= batch["ts"] + batch["dur"]
        for event in complete
        if event["name"] == "layer"
    )
    table = text(tmp_path, "top_operators.txt").splitlines()
    assert table[0] == "3 batches of the training, after 2 that warmed up"
    assert "Self CPU" in table[2] and "# of Calls" in table[2]
    rows = [line.split()[0] for line in table[4:] if line.startswith("  ")]
    assert 5 < len(rows) <= 30
    assert "aten::addmm" in rows
    assert not {"layer", "run_training_batch", "ProfilerStep*"} & set(rows)


@pytest.mark.full
def test_the_memory_has_a_timeline_where_asked_for(profile: Profile, tmp_path: Path) -> None:
    assert profile(wanted("pytorch", warmup_batches=0, memory=True)) is None
    assert files(tmp_path) == {"trace.json", "top_operators.txt", "memory_timeline.html"}
    assert "<img" in text(tmp_path, "memory_timeline.html")
    events = json.loads(text(tmp_path, "trace.json"))["traceEvents"]
    assert any(event["name"] == "[memory]" and "Total Allocated" in event["args"] for event in events)
    table = text(tmp_path, "top_operators.txt")
    assert "CPU Mem" in table
    assert ".py(" not in table  # Python's functions are no operators


@pytest.mark.full
def test_a_compiled_model_is_profiled_compiled(profile: Profile, tmp_path: Path) -> None:
    assert profile(wanted("pytorch"), compile="default", timeout_s=200.0) is None
    names = Counter(event["name"] for event in json.loads(text(tmp_path, "trace.json"))["traceEvents"])
    assert any(name.startswith("Torch-Compiled Region") for name in names)


@pytest.mark.full
def test_of_several_ranks_the_first_one_leaves_its_profile(tmp_path: Path) -> None:
    cell = plan(tmp_path / "cell", num_devices=2, strategy="ddp", timeout_s=120.0)
    assert profile_cell(dataclasses.replace(cell, profile=wanted("pytorch")), SpawnLauncher()) is None
    assert files(tmp_path) == {"trace.json", "top_operators.txt"}
    names = Counter(event["name"] for event in json.loads(text(tmp_path, "trace.json"))["traceEvents"])
    assert names["run_training_batch"] == 3


# ---- how it may fail ----


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise_value_error", "ValueError: planted: out of memory, says a ValueError (user_code_samples.py:"),
        ("exit_politely", "SystemExit: 0"),
        ("kill_itself", "the worker was killed by SIGKILL"),
        ("leave_quietly", "the worker ended with exit code 0 and left no profile"),
        ("sleep_forever", "the run took longer than timeout_s=2"),
    ],
)
def test_a_failure_says_why_and_leaves_no_record(profile: Profile, tmp_path: Path, fault: str, reason: str) -> None:
    timeout_s = 2.0 if fault == "sleep_forever" else 60.0
    found = profile(wanted("simple"), model_arguments={"fault": fault, "at": 3}, timeout_s=timeout_s)
    assert found is not None and found.startswith(reason)
    error = text(tmp_path, "error.txt")
    assert error.splitlines()[0] == found
    assert ("Traceback" in error) == (fault in ("raise_value_error", "exit_politely"))
    assert files(tmp_path) == {"error.txt"}
    assert find_cells(tmp_path) == []


def test_a_training_that_ends_before_the_profile_says_so(profile: Profile) -> None:
    reason = profile(wanted("pytorch", warmup_batches=10), data="EmptyStreamData")
    assert reason == (
        "RuntimeError: the training ended after 0 batches, none of them after the 10 that warm up"
    )  # without a place: it is in no file of the user's


def test_a_failed_profile_leaves_the_measured_cell_as_it_is(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Ten batches are measured; the profile comes to the thirteenth, which fails.
    cell = plan(tmp_path / "3", model_arguments={"fault": "raise_value_error", "at": 12})
    cell = dataclasses.replace(cell, profile=wanted("simple", warmup_batches=10, batches=5))
    cell = dataclasses.replace(cell, request=dataclasses.replace(cell.request, count_flops=False))
    assert measure_cell(cell, launcher).status is Status.OK
    record = (cell.directory / "records" / "0.0.json").read_text()
    assert profile_cells([cell], launcher, SLOWEST, tmp_path) == EXIT_OK
    printed = capsys.readouterr().out
    assert printed.startswith("profile of cell … failed: ValueError: planted")
    assert printed.endswith("; see 3/profile/error.txt\n")
    assert (cell.directory / "records" / "0.0.json").read_text() == record
    assert find_cells(tmp_path) == [cell.directory]
    cells, _ = read_cells([tmp_path])
    assert [cell.directory.name for cell in cells] == ["3"]


# ---- which cells ----


class ScriptedLauncher:
    """Writes a profile, as a worker would, or is interrupted."""

    def __init__(self, interrupted_at: str | None = None) -> None:
        self.visited: list[str] = []
        self._interrupted_at = interrupted_at

    def start(self) -> None:
        pass

    def wait_until_ready(self) -> None:
        pass

    def run(self, cell_dir: Path, log: Path, timeout_s: float | None) -> WorkerExit:
        self.visited.append(cell_dir.parent.name)
        if self.visited[-1] == self._interrupted_at:
            raise KeyboardInterrupt
        (cell_dir / "simple.txt").write_text("")
        return WorkerExit(returncode=0, timed_out=False)

    def close(self) -> None:
        pass


def measured_cells(directory: Path, *steps_s: float | None) -> list[PlannedCell]:
    """Cells that took so long per step; None is one that failed."""
    cells = []
    for number, step_s in enumerate(steps_s):
        spec = make_spec(batch_size=8)
        path = directory / str(number)
        rows = [] if step_s is None else make_rows(step_s)
        request = write_run(path, spec, rows, status=Status.ERROR if step_s is None else Status.OK).request
        cells.append(
            PlannedCell(
                directory=path, request=request, config_text="", label=f"batch_size={number}", profile=wanted("simple")
            )
        )
    return cells


@pytest.mark.parametrize(("which", "visited"), [(SLOWEST, ["2"]), (EVERY_CELL, ["0", "2", "3"]), (3, ["3"]), (1, [])])
def test_the_cells_asked_for_are_profiled_if_they_are_ok(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], which: str | int, visited: list[str]
) -> None:
    scripted = ScriptedLauncher()
    assert profile_cells(measured_cells(tmp_path, 0.1, None, 0.3, 0.2), scripted, which, tmp_path) == EXIT_OK
    assert scripted.visited == visited
    lines = [f"profile of batch_size={number} … {number}/profile/simple.txt" for number in visited]
    assert capsys.readouterr().out.splitlines() == (lines or ["no profile: batch_size=1 is not ok"])


def test_without_a_profiler_nothing_is_profiled_nor_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [dataclasses.replace(cell, profile=None) for cell in measured_cells(tmp_path, 0.1, 0.2)]
    assert profile_cells(cells, ScriptedLauncher(), EVERY_CELL, tmp_path) == EXIT_OK
    assert capsys.readouterr().out == ""


def test_an_interrupt_keeps_the_profiles_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = measured_cells(tmp_path, 0.1, 0.2, 0.3)
    scripted = ScriptedLauncher(interrupted_at="1")
    assert profile_cells(cells, scripted, EVERY_CELL, tmp_path) == EXIT_INTERRUPTED
    assert scripted.visited == ["0", "1"]
    assert (tmp_path / "0" / "profile" / "simple.txt").exists()
    assert "interrupted" in (tmp_path / "1" / "profile" / "error.txt").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == "profile of batch_size=1 … interrupted"


def test_a_profile_is_no_planned_cell(tmp_path: Path) -> None:
    cells = measured_cells(tmp_path, 0.1)
    write_plan(tmp_path, cells)
    profile_cells(cells, ScriptedLauncher(), SLOWEST, tmp_path)
    read, _ = read_cells([tmp_path])
    assert [cell.directory.name for cell in read] == ["0"]


# ---- settings ----


def request_of(*overrides: str) -> RunRequest:
    return read_request(composed(*overrides), CHOICES)


def test_a_profile_is_part_of_the_request_where_asked_for() -> None:
    assert request_of().profile is None
    usual = ProfileRequest(profiler="simple", warmup_batches=5, batches=10)
    assert request_of("profiler=simple").profile == usual
    assert request_of("profiler=advanced", "profiler.batches=3").profile == wanted(
        "advanced", warmup_batches=5, batches=3
    )
    assert request_of("profiler=pytorch", "profiler.memory=true").profile == dataclasses.replace(
        usual, profiler="pytorch", memory=True
    )
    assert request_of("profiler.name=pytorch").profile == dataclasses.replace(usual, profiler="pytorch")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["profiler.name=fast"], "profiler.name must be one of simple, advanced, pytorch, null, got 'fast'"),
        (["profiler=simple", "profiler.batches=0"], "profiler.batches must be a whole number >= 1, got 0"),
        (["profiler.warmup_batches=-1"], "profiler.warmup_batches must be a whole number >= 0, got -1"),
        (["profiler.memory=some"], "profiler.memory must be true or false, got 'some'"),
        (["profiler.name=simple", "profiler.memory=true"], "profiler.memory=true needs profiler=pytorch, got simple"),
        (["profile_cell=fast"], "profile_cell must be slowest, all, or the number of a cell's directory, got 'fast'"),
        (["profile_cell=-1"], "profile_cell must be slowest, all, or the number of a cell's directory, got -1"),
    ],
)
def test_a_wrong_profile_says_what_is_accepted(overrides: list[str], problem: str) -> None:
    assert problems(*overrides) == (problem,)


# ---- the command ----


@pytest.mark.full
def test_a_sweep_profiles_its_slowest_cell(stepbench: Stepbench, tmp_path: Path) -> None:
    conf = tiny_group(tmp_path / "my_conf")
    cells = ("model=tiny", "data=tiny", "batch_size=8", "+model.sleep_s=0,0.02", "hydra.sweep.dir=study", "plots=false")
    done = stepbench("--config-dir", str(conf), "-m", *cells, "profiler=simple", "profiler.batches=4", *FAST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "profile of +model.sleep_s=0.02 … 1/profile/simple.txt\n" in done.stdout
    assert not (tmp_path / "study" / "0" / "profile").exists()
    assert (tmp_path / "study" / "1" / "profile" / "simple.txt").exists()
    assert "2 cells planned, 2 measured" in done.stdout
    for cell in find_cells(tmp_path):
        assert read_record(cell / "records" / "0.0.json").request.profile is None


def test_a_cell_that_is_none_is_refused_before_anything_runs(stepbench: Stepbench, tmp_path: Path) -> None:
    done = stepbench(*TINY, "batch_size=4,8", "profiler=simple", "profile_cell=7", "-m", *FAST)
    assert done.returncode == 2
    assert done.stderr == "Nothing was run:\n  there is no profile_cell=7: the cells are numbered from 0 to 1\n"
    assert not list(tmp_path.rglob("*.json"))
