"""What a sweep does with its cells, in which order and with which exit code; the workers are played by a script."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from studies import make_spec

from stepbench.launcher import WorkerExit
from stepbench.record import (
    Protocol,
    RunRecord,
    RunRequest,
    Status,
    read_record,
    read_request,
    record_path,
    spec_hash,
    write_record,
)
from stepbench.sweep import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SOME_FAILED,
    DirectoryTakenError,
    PlannedCell,
    claim_directory,
    measure_cell,
    run_cells,
    starts_ranks,
    write_plan,
)

Play = Callable[[Path, RunRequest], WorkerExit]

ENDED = WorkerExit(returncode=0, timed_out=False)


def write(cell_dir: Path, request: RunRequest, status: Status, reason: str | None = None) -> WorkerExit:
    write_record(
        cell_dir,
        RunRecord(
            request=request,
            spec_hash=spec_hash(request.spec),
            status=status,
            reason=reason,
            started_unix_s=0.0,
            wall_s=1.0,
        ),
    )
    return ENDED


class ScriptedLauncher:
    """Plays one function for each cell, in turn."""

    def __init__(self, *plays: Play) -> None:
        self.plays = list(plays)
        self.visited: list[str] = []

    def start(self) -> None:
        pass

    def wait_until_ready(self) -> None:
        pass

    def run(self, cell_dir: Path, log: Path, timeout_s: float | None) -> WorkerExit:
        self.visited.append(cell_dir.name)
        return self.plays.pop(0)(cell_dir, read_request(cell_dir / "request.json"))

    def close(self) -> None:
        pass


def ok(cell_dir: Path, request: RunRequest) -> WorkerExit:
    return write(cell_dir, request, Status.OK)


def out_of_memory(cell_dir: Path, request: RunRequest) -> WorkerExit:
    return write(cell_dir, request, Status.OOM, "CUDA out of memory")


def vanish(cell_dir: Path, request: RunRequest) -> WorkerExit:
    return WorkerExit(returncode=-9, timed_out=False)


def interrupt(cell_dir: Path, request: RunRequest) -> WorkerExit:
    raise KeyboardInterrupt


def hang(cell_dir: Path, request: RunRequest) -> WorkerExit:
    return WorkerExit(returncode=-9, timed_out=True)


def hang_after_writing(cell_dir: Path, request: RunRequest) -> WorkerExit:
    ok(cell_dir, request)
    return WorkerExit(returncode=-9, timed_out=True)


def break_record(cell_dir: Path, request: RunRequest) -> WorkerExit:
    path = record_path(cell_dir, 0, 0)
    path.parent.mkdir()
    path.write_text('{"request": ')
    return ENDED


def cells(directory: Path, count: int) -> list[PlannedCell]:
    request = RunRequest(
        spec=make_spec(batch_size=8),
        protocol=Protocol(name="quick", warmup_batches=5, warmup_s=0.3, timed_batches=30, timed_s=1.0),
        timer="host",
        timeout_s=60.0,
    )
    planned = [
        PlannedCell(directory=directory / str(index), request=request, config_text="a: 1\n", label=f"cell {index}")
        for index in range(count)
    ]
    write_plan(directory, planned)
    return planned


def statuses(planned: list[PlannedCell]) -> list[Status]:
    return [read_record(record_path(cell.directory, 0, 0)).status for cell in planned]


def test_cells_run_in_order_and_all_ok_is_zero(tmp_path: Path) -> None:
    launcher = ScriptedLauncher(ok, ok, ok)
    assert run_cells(cells(tmp_path, 3), launcher) == EXIT_OK
    assert launcher.visited == ["0", "1", "2"]


def test_a_failed_cell_does_not_end_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = cells(tmp_path, 4)
    assert run_cells(planned, ScriptedLauncher(ok, out_of_memory, vanish, ok)) == EXIT_SOME_FAILED
    assert statuses(planned) == [Status.OK, Status.OOM, Status.CRASHED, Status.OK]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("[2/4] cell 1 … oom: CUDA out of memory  (2 left, about ")
    assert "killed by SIGKILL" in lines[2]
    assert "left" not in lines[3]


def test_an_interrupt_leaves_a_record_for_every_cell(tmp_path: Path) -> None:
    planned = cells(tmp_path, 4)
    assert run_cells(planned, ScriptedLauncher(ok, interrupt)) == EXIT_INTERRUPTED
    assert statuses(planned) == [Status.OK, Status.INTERRUPTED, Status.SKIPPED, Status.SKIPPED]


@pytest.mark.parametrize(
    ("play", "status", "wording"),
    [
        (vanish, Status.CRASHED, "the worker was killed by SIGKILL; log: "),
        (hang, Status.TIMEOUT, "longer than timeout_s="),
        (hang_after_writing, Status.OK, ""),  # it had measured; only its end took too long
        (break_record, Status.CRASHED, "ended with exit code 0 and left no record"),
    ],
)
def test_a_worker_without_a_record_gets_one(tmp_path: Path, play: Play, status: Status, wording: str) -> None:
    (cell,) = cells(tmp_path, 1)
    record = measure_cell(cell, ScriptedLauncher(play))
    assert record.status is status
    assert wording in (record.reason or "")
    assert read_record(record_path(cell.directory, 0, 0)) == record


def test_the_plan_is_on_disk_before_anything_is_measured(tmp_path: Path) -> None:
    planned = cells(tmp_path, 2)
    plan = json.loads((tmp_path / "sweep.json").read_text())
    assert [cell["directory"] for cell in plan["cells"]] == ["0", "1"]
    assert plan["cells"][0]["spec_hash"] == spec_hash(planned[0].request.spec)
    assert (tmp_path / "1" / "benchmark_config.yaml").read_text() == "a: 1\n"
    assert (tmp_path / "1" / "logs").is_dir()


def test_two_sweeps_of_the_same_second_get_two_directories(tmp_path: Path) -> None:
    directory = tmp_path / "17-00-00"
    assert claim_directory(directory, may_rename=True) == directory
    assert claim_directory(directory, may_rename=True) == tmp_path / "17-00-00_2"
    assert claim_directory(directory, may_rename=True) == tmp_path / "17-00-00_3"


def test_a_directory_around_other_results_is_not_taken(tmp_path: Path) -> None:
    ok(tmp_path / "earlier" / "0", cells(tmp_path / "earlier", 1)[0].request)
    with pytest.raises(DirectoryTakenError, match="already holds results"):
        claim_directory(tmp_path, may_rename=False)


def test_results_that_lie_in_a_named_directory_are_not_overwritten(tmp_path: Path) -> None:
    claim_directory(tmp_path, may_rename=False)
    with pytest.raises(DirectoryTakenError, match="already holds results"):
        claim_directory(tmp_path, may_rename=False)


def ranks_leave(*left: tuple[int, Status, float]) -> Play:
    """Leaves a record of each rank, with the second at which it ended."""

    def play(cell_dir: Path, request: RunRequest) -> WorkerExit:
        for rank, status, wall_s in left:
            record = RunRecord(
                request=request,
                spec_hash=spec_hash(request.spec),
                status=status,
                reason=f"what rank {rank} says",
                traceback=f"trace of rank {rank}",
                started_unix_s=0.0,
                wall_s=wall_s,
                rank=rank,
            )
            write_record(cell_dir, record)
        return ENDED if any(rank == 0 for rank, _, _ in left) else WorkerExit(returncode=-9, timed_out=False)

    return play


@pytest.mark.parametrize(
    ("left", "status", "reason"),
    [
        # rank 0 lost the others: the one that failed of itself is the cause
        (
            [(0, Status.CRASHED, 2.0), (1, Status.ERROR, 1.0), (2, Status.CRASHED, 0.5)],
            Status.ERROR,
            "rank 1: what rank 1",
        ),
        (
            [(0, Status.CRASHED, 1.0), (1, Status.ERROR, 2.0), (2, Status.CRASHED, 0.5)],
            Status.ERROR,
            "rank 1: what rank 1",
        ),
        # rank 0 was killed while it waited
        ([(1, Status.OOM, 1.0), (2, Status.ERROR, 2.0)], Status.OOM, "rank 1: what rank 1 says; log: "),
        # rank 0 failed of itself, before and after another
        ([(0, Status.ERROR, 1.0), (1, Status.CRASHED, 2.0)], Status.ERROR, "what rank 0 says"),
        ([(0, Status.ERROR, 2.0), (1, Status.ERROR, 1.0)], Status.ERROR, "rank 1: what rank 1"),
        # another rank has vanished
        (
            [(0, Status.CRASHED, 1.0), (2, Status.CRASHED, 1.5)],
            Status.CRASHED,
            "what rank 0 says; no record of rank 1; log",
        ),
        ([], Status.CRASHED, "the worker was killed by SIGKILL"),
    ],
)
def test_the_rank_that_failed_first_of_itself_is_the_reason(
    tmp_path: Path, left: list[tuple[int, Status, float]], status: Status, reason: str
) -> None:
    (cell,) = cells(tmp_path, 1)
    spec = dataclasses.replace(cell.request.spec, num_devices=3)
    cell = dataclasses.replace(cell, request=dataclasses.replace(cell.request, spec=spec))
    record = measure_cell(cell, ScriptedLauncher(ranks_leave(*left)))
    assert record.status is status
    assert (record.reason or "").startswith(reason)
    assert record.rank == 0
    assert record.summary is None
    if reason.startswith("rank 1"):
        assert record.traceback == "trace of rank 1"
    assert read_record(record_path(cell.directory, 0, 0)) == record


def test_only_a_command_can_be_started_again_for_further_ranks() -> None:
    assert not starts_ranks(make_spec(batch_size=8))
    assert starts_ranks(make_spec(batch_size=8, num_devices=2))
    assert starts_ranks(make_spec(batch_size=8, strategy="ddp"))


def test_a_cell_with_ranks_is_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several, one = cells(tmp_path, 2)
    spec = dataclasses.replace(several.request.spec, num_devices=2)
    several = dataclasses.replace(several, request=dataclasses.replace(several.request, spec=spec))
    warm, fresh = ScriptedLauncher(ok), ScriptedLauncher(ok)
    monkeypatch.setattr("stepbench.sweep.SpawnLauncher", lambda: fresh)
    assert run_cells([several, one], warm) == EXIT_OK
    assert (fresh.visited, warm.visited) == (["0"], ["1"])
