"""Runs the cells of a sweep one after the other, and sees to it that each leaves a record, whatever happens to it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import stepbench
from stepbench import units
from stepbench.clock import monotonic_s, unix_time_s
from stepbench.launcher import Launcher, SpawnLauncher, WorkerExit
from stepbench.profile_files import ERROR_FILE, LOG_FILE, PROFILE_DIR, PROFILE_FILES, PROFILE_REQUEST_FILE, SLOWEST
from stepbench.record import (
    CONFIG_FILE,
    SCHEMA_VERSION,
    SWEEP_FILE,
    ProfileRequest,
    RecordError,
    RunRecord,
    RunRequest,
    RunSpec,
    Status,
    find_cells,
    log_path,
    read_record,
    record_path,
    spec_hash,
    write_record,
    write_request,
    write_text_atomically,
)

EXIT_OK, EXIT_SOME_FAILED, EXIT_WRONG_REQUEST, EXIT_INTERRUPTED = 0, 1, 2, 130


class DirectoryTakenError(ValueError):
    """The directory for the results already holds some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCell:
    """A cell that is still to be measured, and where. `label` tells it from the other cells of the sweep.

    `profile` is for a run of its own, after the last cell has been measured; `request` has none.
    """

    directory: Path
    request: RunRequest
    config_text: str
    label: str
    profile: ProfileRequest | None = None


def claim_directory(directory: Path, *, may_rename: bool) -> Path:
    """Make `directory` ours, in one step that no other sweep can share, and return it.

    Where results lie there already, or another sweep started in the same second, a directory with a number behind its
    name serves instead if it `may_rename`. Otherwise raises `DirectoryTakenError`.
    """
    number, candidate = 1, directory
    if not may_rename and find_cells(directory):
        raise DirectoryTakenError(f"{directory} already holds results, its own or in it; name another directory")
    while True:
        candidate.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(candidate / SWEEP_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            return candidate
        except FileExistsError:
            if not may_rename:
                raise DirectoryTakenError(f"{directory} already holds results; name another directory") from None
        number += 1
        candidate = directory.with_name(f"{directory.name}_{number}")


def write_plan(directory: Path, cells: Sequence[PlannedCell]) -> None:
    """Write what is going to be measured, before any of it is: each cell's configuration and request, and the plan.

    So that a sweep which is killed shows what it has not come to.
    """
    for cell in cells:
        (cell.directory / "logs").mkdir(parents=True, exist_ok=True)
        write_text_atomically(cell.directory / CONFIG_FILE, cell.config_text)
        write_request(cell.directory, cell.request)
    plan = {
        "schema_version": SCHEMA_VERSION,
        "stepbench": stepbench.__version__,
        "cells": [
            {
                "directory": str(cell.directory.relative_to(directory)),
                "label": cell.label,
                "spec_hash": spec_hash(cell.request.spec),
            }
            for cell in cells
        ],
    }
    write_text_atomically(directory / SWEEP_FILE, json.dumps(plan, indent=1) + "\n")


def run_cells(cells: Sequence[PlannedCell], launcher: Launcher) -> int:
    """Measure every cell; returns the exit code. A failed cell never ends the sweep, an interrupt does.

    Prints a line as each cell starts and completes it with the result; nothing is printed while a worker measures.
    """
    records: list[RunRecord] = []
    started_s = monotonic_s()
    try:
        for position, cell in enumerate(cells):
            print(f"[{position + 1}/{len(cells)}] {cell.label} … ", end="", flush=True)
            records.append(measure_cell(cell, SpawnLauncher() if starts_ranks(cell.request.spec) else launcher))
            aside = list_set_aside(records)
            remaining = _remaining_text(monotonic_s() - started_s, len(records), len(cells))
            print(_result_text(records[-1]) + remaining, flush=True)
            if len(cells) > 1 and aside and aside != list_set_aside(records[:-1]):
                print(f"      set aside for timing: {aside}", flush=True)
    except KeyboardInterrupt:
        current, left = cells[len(records) : len(records) + 1], cells[len(records) + 1 :]
        for cell in current:
            _record_unmeasured(cell, Status.INTERRUPTED, "the sweep was interrupted during this cell")
        for cell in left:
            _record_unmeasured(cell, Status.SKIPPED, "the sweep was interrupted before this cell")
        print("interrupted", flush=True)  # last: whoever interrupts may have closed the stream
        return EXIT_INTERRUPTED
    is_ok = all(record.status in (Status.OK, Status.SKIPPED) for record in records)
    return EXIT_OK if is_ok else EXIT_SOME_FAILED


def list_set_aside(records: Sequence[RunRecord]) -> str:
    """The names of what of the user's own files the runs so far have set aside."""
    return ", ".join(dict.fromkeys(name for r in records if r.effective is not None for name in r.effective.set_aside))


def measure_cell(cell: PlannedCell, launcher: Launcher) -> RunRecord:
    """Have a worker measure a cell and return its record; where the worker left none, write one that says so."""
    request = cell.request
    write_request(cell.directory, request)
    log = log_path(cell.directory, request.round, request.attempt)
    started_unix_s, started_s = unix_time_s(), monotonic_s()
    end = launcher.run(cell.directory, log, request.timeout_s)
    records = _read_records(cell)
    own = next((record for record in records if record.rank == 0), None)
    if own is not None and own.status is Status.OK:
        return own
    if not end.timed_out and any(record.status is not Status.OK for record in records):
        record = _blame(records, own)
    else:
        status, reason = _explain(end, request)
        record = RunRecord(
            request=request,
            spec_hash=spec_hash(request.spec),
            status=status,
            reason=reason,
            started_unix_s=started_unix_s,
            wall_s=monotonic_s() - started_s,
        )
    if record is own:
        return own
    record = dataclasses.replace(record, reason=f"{record.reason}; log: {log}")
    write_record(cell.directory, record)
    return record


def profile_cells(cells: Sequence[PlannedCell], launcher: Launcher, which: str | int, directory: Path) -> int:
    """Profile cells that have been measured and that ask for it; returns 0, or the exit code of an interrupt.

    `which` is `all`, or `slowest`, the one with the longest median step, or the number of a cell's directory. Prints a
    line for each, with paths that start in `directory`. A profile that fails changes nothing else.
    """
    try:
        for cell in _choose_profiled(cells, which):
            print(f"profile of {cell.label} … ", end="", flush=True)
            reason = profile_cell(cell, SpawnLauncher() if starts_ranks(cell.request.spec) else launcher)
            place = (cell.directory / PROFILE_DIR).relative_to(directory)
            files = ", ".join(str(place / name) for name in _profile_files(cell))
            print(files if reason is None else f"failed: {reason}; see {place / ERROR_FILE}", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return EXIT_INTERRUPTED
    return EXIT_OK


def _choose_profiled(cells: Sequence[PlannedCell], which: str | int) -> list[PlannedCell]:
    """The cells to be profiled, of those that have been measured well; says so where that is none."""
    wanted = [cell for cell in cells if cell.profile is not None]
    if isinstance(which, int):
        wanted = [cell for cell in wanted if cell.directory.name == str(which)]
    step_s = {cell.directory: _median_step_s(cell) for cell in wanted}
    measured = [cell for cell in wanted if step_s[cell.directory] is not None]
    if wanted and not measured:
        print("no profile: " + ("no cell is ok" if len(wanted) > 1 else f"{wanted[0].label} is not ok"), flush=True)
    if which == SLOWEST and measured:
        return [max(measured, key=lambda cell: step_s[cell.directory] or 0.0)]
    return measured


def _median_step_s(cell: PlannedCell) -> float | None:
    """The median step of a cell's runs that went well; None where there is none."""
    found = []
    for path in (cell.directory / "records").glob("*.json"):
        with contextlib.suppress(RecordError):
            record = read_record(path)
            if record.rank == 0 and record.status is Status.OK and record.summary is not None:
                found.append(record.summary.step.median_s)
    return statistics.median(found) if found else None


def profile_cell(cell: PlannedCell, launcher: Launcher) -> str | None:
    """Have a worker profile a cell; returns in one line why there is no profile, None where there is one.

    Where there is none, a file in its place says why.
    """
    directory = cell.directory / PROFILE_DIR
    error = directory / ERROR_FILE
    request = dataclasses.replace(cell.request, profile=cell.profile)
    text = json.dumps(dataclasses.asdict(request), indent=1)
    write_text_atomically(directory / PROFILE_REQUEST_FILE, text + "\n")
    try:
        end = launcher.run(directory, directory / LOG_FILE, request.timeout_s)
    except KeyboardInterrupt:
        write_text_atomically(error, "the sweep was interrupted during the profile\n")
        raise
    if error.exists() and not end.timed_out:
        return error.read_text(encoding="utf-8").partition("\n")[0]
    if end.returncode == 0 and _profile_files(cell):
        return None
    _, reason = _explain(end, request, missing="profile")
    write_text_atomically(error, f"{reason}\n")
    return reason


def _profile_files(cell: PlannedCell) -> list[str]:
    names = [name for files in PROFILE_FILES.values() for name in files]
    return [name for name in names if (cell.directory / PROFILE_DIR / name).exists()]


def starts_ranks(spec: RunSpec) -> bool:
    """Whether Lightning starts the worker's command again for further ranks, which takes a worker that is a command."""
    return spec.num_devices > 1 or spec.strategy is not None


def _read_records(cell: PlannedCell) -> list[RunRecord]:
    """What the ranks of a visit have left, as far as it can be read."""
    request = cell.request
    records = []
    for rank in range(request.spec.num_devices):
        with contextlib.suppress(RecordError):
            records.append(read_record(record_path(cell.directory, request.round, request.attempt, rank)))
    return records


def _blame(records: Sequence[RunRecord], own: RunRecord | None) -> RunRecord:
    """The cell's record after a failure: rank 0's own, unless another rank, which it waited for, is the cause.

    A rank that fails takes the others with it, some of which may only say that a connection was lost: the cause is the
    first failure that is of another kind.
    """
    failed = [record for record in records if record.status is not Status.OK]
    cause = min(failed, key=lambda record: (record.status is Status.CRASHED, record.started_unix_s + record.wall_s))
    if own is None:
        own = dataclasses.replace(cause, rank=0, summary=None)
    if cause.rank != 0:
        reason = f"rank {cause.rank}: {cause.reason}"
        return dataclasses.replace(own, status=cause.status, reason=reason, traceback=cause.traceback)
    lost = sorted(set(range(own.request.spec.num_devices)) - {record.rank for record in records})
    if own.status is Status.CRASHED and lost:
        names = ", ".join(map(str, lost))
        return dataclasses.replace(own, reason=f"{own.reason}; no record of rank {names}")
    return own


def _explain(end: WorkerExit, request: RunRequest, missing: str = "record") -> tuple[Status, str]:
    """The status and the reason of a run whose worker left no record of its own."""
    if end.timed_out:
        return Status.TIMEOUT, f"the run took longer than timeout_s={request.timeout_s:g}"
    if end.returncode < 0:
        number = -end.returncode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return Status.CRASHED, f"the worker was killed by {name}"
    return Status.CRASHED, f"the worker ended with exit code {end.returncode} and left no {missing}"


def _record_unmeasured(cell: PlannedCell, status: Status, reason: str) -> None:
    record = RunRecord(
        request=cell.request,
        spec_hash=spec_hash(cell.request.spec),
        status=status,
        reason=reason,
        started_unix_s=unix_time_s(),
        wall_s=0.0,
    )
    write_record(cell.directory, record)


def _result_text(record: RunRecord) -> str:
    if record.summary is None:
        return f"{record.status.value}: {record.reason}"
    text = f"{units.format_duration(record.summary.step.median_s)} per step"
    if record.summary.samples_per_s is not None:
        text += f", {units.format_throughput(record.summary.samples_per_s)}"
    return text


def _remaining_text(elapsed_s: float, num_done: int, num_cells: int) -> str:
    left = num_cells - num_done
    return f"  ({left} left, about {left * elapsed_s / num_done:.0f} s)" if left else ""
