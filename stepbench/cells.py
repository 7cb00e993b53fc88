"""Cells as they lie on disk: one directory each, its records read, what is unreadable or missing named."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepbench.record import (
    REQUEST_FILE,
    RecordError,
    RunRecord,
    RunRequest,
    Status,
    find_cells,
    log_path,
    read_record,
    read_request,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One directory with the runs of one spec. A planned cell that no run has visited holds a request and no record."""

    name: str
    root: Path
    directory: Path
    request: RunRequest
    records: tuple[RunRecord, ...]
    is_unreadable: bool = False
    """Whether a run has visited the cell and all that it left cannot be read."""

    @property
    def ok_records(self) -> tuple[RunRecord, ...]:
        """The run of each round that counts: its last good attempt."""
        by_round = {record.request.round: record for record in self.records if is_measured(record)}
        return tuple(by_round.values())

    @property
    def last_record(self) -> RunRecord | None:
        """The run that speaks for the cell: the last good one, else the last."""
        return (self.ok_records or self.records or (None,))[-1]

    @property
    def status(self) -> str:
        """The status of the run that speaks for the cell; `interrupted` where none has been."""
        record = self.last_record
        if record is None:
            return Status.CRASHED.value if self.is_unreadable else Status.INTERRUPTED.value
        return record.status.value

    @property
    def reason(self) -> str | None:
        """Why the cell has no numbers; None where it has."""
        record = self.last_record
        if record is None:
            return "its record cannot be read" if self.is_unreadable else "planned, but the sweep ended before it ran"
        return None if is_measured(record) else record.reason or "no optimizer step was timed"

    @property
    def log(self) -> Path | None:
        """The log of the run that speaks for the cell."""
        record = self.last_record
        return None if record is None else log_path(self.directory, record.request.round, record.request.attempt)


def is_measured(record: RunRecord) -> bool:
    """Whether a run ended well and has numbers."""
    return record.status is Status.OK and record.summary is not None


# ---- reading ----


def read_cell(directory: Path, root: Path, name: str) -> tuple[Cell | None, list[str]]:
    """The cell in a directory, None without a readable record; and a warning for each file that is not one."""
    records, warnings = [], []
    for path in sorted((directory / "records").glob("*.json")):
        if path.stem.count(".") > 1:  # a further rank's own record, `<round>.<attempt>.rank<k>.json`
            continue
        try:
            records.append(read_record(path))
        except RecordError as error:
            warnings.append(f"skipped: {error}")
    records.sort(key=lambda record: (record.request.round, record.request.attempt))
    request = records[-1].request if records else None
    if request is None and (directory / REQUEST_FILE).exists():
        try:
            request = read_request(directory / REQUEST_FILE)
        except RecordError as error:
            warnings.append(f"skipped: {error}")
    if request is None:
        return None, warnings
    cell = Cell(
        name=name,
        root=root,
        directory=directory,
        request=request,
        records=tuple(records),
        is_unreadable=bool(warnings) and not records,
    )
    return cell, warnings


def read_cells(directories: Sequence[Path]) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    """All cells at or below these directories under distinct names, and warnings naming what was skipped.

    Raises FileNotFoundError where a directory is missing or none holds a record.
    """
    roots = list(dict.fromkeys(directory.resolve() for directory in directories))
    missing = [str(root) for root in roots if not root.is_dir()]
    if missing:
        raise FileNotFoundError(f"no such directory: {', '.join(missing)}")
    cells: dict[Path, Cell] = {}
    warnings: list[str] = []
    for root in roots:
        found = find_cells(root)
        planned = sorted({path.parent for path in root.rglob(REQUEST_FILE)} - set(found), key=_natural_key)
        for directory in [*found, *planned]:
            if directory not in cells:
                cell, skipped = read_cell(directory, root, _cell_name(directory, root, roots))
                warnings += skipped
                cells |= {directory: cell} if cell else {}
    if not cells:
        details = "".join(f"\n  {warning}" for warning in warnings)
        raise FileNotFoundError(f"no stepbench record in {', '.join(map(str, roots))}{details}")
    ordered = sorted(cells.values(), key=lambda cell: (roots.index(cell.root), _natural_key(cell.directory)))
    return tuple(ordered), tuple(warnings)


def _cell_name(directory: Path, root: Path, roots: Sequence[Path]) -> str:
    if len(roots) == 1:
        return root.name if directory == root else directory.relative_to(root).as_posix()
    return directory.relative_to(os.path.commonpath([root.parent for root in roots])).as_posix()


def _natural_key(path: Path) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.parts]
