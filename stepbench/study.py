"""Cells and runs of one or several sweeps as tidy frames: records on disk in, `Study` out. Draws and prints nothing."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from stepbench import axes as axes_module
from stepbench.axes import Axis, Value
from stepbench.record import (
    PHASES,
    REQUEST_FILE,
    EffectiveSettings,
    RecordError,
    RunRecord,
    RunRequest,
    RunSummary,
    Status,
    find_cells,
    log_path,
    read_record,
    read_request,
)
from stepbench.scaling import Doubling, Recommendation, SpeedUp, find_doublings, find_speed_ups, recommend_batch_sizes

ALL_CELLS = "all cells"
"""The series of a study in which nothing but the x axis varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One directory with the runs of one spec. A planned cell that no run has visited holds its request and no record."""

    name: str
    root: Path
    directory: Path
    request: RunRequest
    records: tuple[RunRecord, ...]

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
        return Status.INTERRUPTED.value if record is None else record.status.value

    @property
    def reason(self) -> str | None:
        """Why the cell has no numbers; None where it has."""
        record = self.last_record
        if record is None:
            return "planned, but the sweep ended before it ran"
        return None if is_measured(record) else record.reason or "no optimizer step was timed"

    @property
    def log(self) -> Path | None:
        """The log of the run that speaks for the cell."""
        record = self.last_record
        return None if record is None else log_path(self.directory, record.request.round, record.request.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing worth saying about a study or a cell, as a sentence."""

    subject: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One or more sweeps read together: every run, every cell, what varies, and the answers."""

    directories: tuple[Path, ...]
    out: Path
    cells: tuple[Cell, ...]
    run_frame: pd.DataFrame
    cell_frame: pd.DataFrame
    axes: tuple[Axis, ...]
    x_axis: Axis | None
    series: tuple[str, ...]
    doublings: tuple[Doubling, ...]
    speed_ups: tuple[SpeedUp, ...]
    recommendations: tuple[Recommendation, ...]
    findings: tuple[Finding, ...] = ()
    warnings: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def series_axes(self) -> tuple[Axis, ...]:
        """The axes that make up a series: all but the x axis."""
        return tuple(axis for axis in self.axes if axis is not self.x_axis)

    @property
    def series_title(self) -> str:
        """What the series differ in: `precision`, `model, precision`."""
        return ", ".join(axis.title.replace(".", " ") for axis in self.series_axes)


def is_measured(record: RunRecord) -> bool:
    """Whether a run ended well and has numbers."""
    return record.status is Status.OK and record.summary is not None


# ---- reading ----


def read_cell(directory: Path, root: Path, name: str) -> tuple[Cell | None, list[str]]:
    """The cell in a directory, with a warning for each file that is no readable record; None where nothing is readable."""
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
    return Cell(name=name, root=root, directory=directory, request=request, records=tuple(records)), warnings


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


# ---- building the frames ----


def build_study(directories: Sequence[Path], out: Path) -> Study:
    """Read every record below these directories and answer what can be answered. Raises FileNotFoundError as above."""
    cells, warnings = read_cells(directories)
    settings = _settings(cells)
    axes = axes_module.find_axes(settings)
    x_axis = axes_module.choose_x_axis(axes)
    series_axes = [axis for axis in axes if axis is not x_axis]
    series = _label_series(cells, settings, series_axes)
    cell_rows = [
        _cell_row(cell, values, axes, label) for cell, values, label in zip(cells, settings, series, strict=True)
    ]
    cell_frame = _sort_cells(_frame(cell_rows), list(dict.fromkeys(series)), x_axis)
    order = tuple(dict.fromkeys(cell_frame["series"]))
    run_rows = [
        _run_row(cell, record, values, axes)
        for cell, values in zip(cells, settings, strict=True)
        for record in (cell.records or (None,))
    ]
    by_batch_size = x_axis is not None and x_axis.name == "batch_size"
    return Study(
        directories=tuple(directories),
        out=out,
        cells=tuple(sorted(cells, key=lambda cell: list(cell_frame["cell"]).index(cell.name))),
        run_frame=_frame(run_rows),
        cell_frame=cell_frame,
        axes=axes,
        x_axis=x_axis,
        series=order,
        doublings=find_doublings(cell_frame) if by_batch_size else (),
        speed_ups=find_speed_ups(cell_frame, x_axis.column if x_axis else None, order),
        recommendations=recommend_batch_sizes(cell_frame) if by_batch_size else (),
        warnings=warnings,
    )


def _settings(cells: Sequence[Cell]) -> list[dict[str, Value]]:
    """Each cell's settings by name. Host, device and sweep join in where several machines or repeated cells demand it."""
    settings = [axes_module.flatten_request(cell.request) for cell in cells]
    for group in ("model", "data"):
        targets = [getattr(cell.request.spec, group).target for cell in cells]
        if len(set(zip(targets, [flat[group] for flat in settings], strict=True))) > len({f[group] for f in settings}):
            for flat, target in zip(settings, targets, strict=True):
                flat[group] = target
    for name, read in (("host", _host), ("device", _device)):
        found = _fill_per_sweep(cells, [read(cell) for cell in cells])
        for flat, value in zip(settings, found, strict=True):
            flat[name] = value
    keys = [tuple(map(str, flat.values())) for flat in settings]
    if len({cell.root for cell in cells}) > 1 and len(set(keys)) < len(keys):
        common = os.path.commonpath([cell.root.parent for cell in cells])
        for flat, cell in zip(settings, cells, strict=True):
            flat["sweep"] = cell.root.relative_to(common).as_posix()
    return settings


def _host(cell: Cell) -> str | None:
    return next((record.environment.host for record in cell.records if record.environment), None)


def _device(cell: Cell) -> str | None:
    return next((record.effective.device_name for record in cell.records if record.effective), None)


def _fill_per_sweep(cells: Sequence[Cell], values: Sequence[str | None]) -> list[str | None]:
    """A run that failed early knows neither host nor device: the one value of its sweep's other cells is its own."""
    known = {cell.root: {v for c, v in zip(cells, values, strict=True) if c.root == cell.root and v} for cell in cells}
    return [
        value if value or len(known[cell.root]) != 1 else next(iter(known[cell.root]))
        for cell, value in zip(cells, values, strict=True)
    ]


def _label_series(
    cells: Sequence[Cell], settings: Sequence[Mapping[str, Value]], series_axes: Sequence[Axis]
) -> list[str]:
    """Each cell's series: its settings apart from x, labelled by what ran in any cell of that series."""
    if not series_axes:
        return [ALL_CELLS for _ in cells]
    keys = [tuple(str(flat.get(axis.name)) for axis in series_axes) for flat in settings]
    members: dict[tuple[str, ...], list[RunRecord]] = {}
    for key, cell in zip(keys, cells, strict=True):
        members.setdefault(key, []).extend(cell.records)
    return [
        axes_module.label_combination(
            {axis.name: axes_module.label_setting(axis.name, flat.get(axis.name), members[key]) for axis in series_axes}
        )
        for key, flat in zip(keys, settings, strict=True)
    ]


def _requested(values: Mapping[str, Value], axes: Sequence[Axis]) -> dict[str, Value]:
    names = dict.fromkeys([*(name for name in values if "." not in name), *(axis.name for axis in axes)])
    return {axes_module.requested_column(name): values.get(name) for name in names if name != "sweep"}


def _effective(record: RunRecord | None) -> dict[str, Value]:
    effective = (record and record.effective) or EffectiveSettings()
    return {f"effective_{field.name}": getattr(effective, field.name) for field in dataclasses.fields(effective)}


def _run_row(
    cell: Cell, record: RunRecord | None, values: Mapping[str, Value], axes: Sequence[Axis]
) -> dict[str, Any]:
    identity = {"cell": cell.name, "round": None, "attempt": None, "status": cell.status, "reason": cell.reason}
    if record is not None:
        identity |= {"round": record.request.round, "attempt": record.request.attempt}
        identity |= {"status": record.status.value, "reason": record.reason}
    outcome = {
        "started_unix_s": record and record.started_unix_s,
        "wall_s": record and record.wall_s,
        "peak_host_memory_bytes": record and record.peak_host_memory_bytes,
        "peak_device_memory_bytes": record and record.peak_device_memory_bytes,
        "num_parameters": record and record.num_parameters,
        "spec_hash": record and record.spec_hash,
    }
    return identity | _requested(values, axes) | _effective(record) | summary_columns(record and record.summary) | outcome


def summary_columns(summary: RunSummary | None) -> dict[str, Any]:
    """A run's summary as columns; all None where there is none. Phases are per step: `data_s` median, `data_mean_s` mean."""
    step, interval = (summary.step, summary.step_interval) if summary else (None, None)
    phases = {phase.phase: phase for phase in summary.phases} if summary else {}
    return {
        "median_step_s": step and step.median_s,
        "mean_step_s": step and step.mean_s,
        "step_low_s": interval and interval.low_s,
        "step_high_s": interval and interval.high_s,
        "interval_coverage": interval and interval.coverage,
        "interval_basis": interval and interval.basis,
        **{f"{name}_step_s": step and getattr(step, f"{name}_s") for name in ("min", "p5", "p25", "p75", "p95", "p99")},
        "max_step_s": step and step.max_s,
        "samples_per_s": summary and summary.samples_per_s,
        **{f"{phase}_s": phases[phase].step.median_s if phase in phases else None for phase in PHASES},
        **{f"{phase}_mean_s": phases[phase].step.mean_s if phase in phases else None for phase in PHASES},
        **{f"{phase}_fraction": phases[phase].share_fraction if phase in phases else None for phase in PHASES},
        "num_steps": summary and summary.num_steps,
        "num_batches": summary and summary.num_batches,
        "num_samples": summary and summary.num_samples,
        "measured_s": summary and summary.measured_s,
        "num_warmup_batches": summary and summary.num_warmup_batches,
        "warmup_s": summary and summary.warmup_s,
        "effective_sample_size": summary and summary.effective_sample_size,
    }


def _cell_row(cell: Cell, values: Mapping[str, Value], axes: Sequence[Axis], series: str) -> dict[str, Any]:
    ok = cell.ok_records
    identity = {"cell": cell.name, "series": series, "status": cell.status, "reason": cell.reason}
    counts = {"num_rounds": len(ok), "num_runs": len(cell.records)}
    memory = {
        name: _median_known([getattr(record, name) for record in ok])
        for name in ("peak_host_memory_bytes", "peak_device_memory_bytes")
    }
    return (
        identity
        | counts
        | _requested(values, axes)
        | _effective(cell.last_record)
        | merge_summaries([record.summary for record in ok if record.summary])
        | {"samples_per_step": _samples_per_step(cell)}
        | {name: None if value is None else round(value) for name, value in memory.items()}
    )


def merge_summaries(summaries: Sequence[RunSummary]) -> dict[str, Any]:
    """The summary columns of a cell: each the median over its rounds; counts of steps, samples and seconds are summed.

    From two rounds on the interval is the range of the run medians, with the coverage of a range, 1 - 2^(1 - R).
    """
    rows = [summary_columns(summary) for summary in summaries]
    if len(rows) < 2:
        return rows[0] if rows else summary_columns(None)
    merged: dict[str, Any] = {}
    for name in rows[0]:
        column = [row[name] for row in rows]
        if name.startswith("num_") or name in ("measured_s", "warmup_s"):
            merged[name] = None if None in column else sum(column)
        elif not name.startswith("interval_"):
            merged[name] = _median_known(column)
    medians = [row["median_step_s"] for row in rows]
    merged |= {"step_low_s": min(medians), "step_high_s": max(medians)}
    merged |= {"interval_coverage": 1 - 2.0 ** (1 - len(rows)), "interval_basis": "rounds"}
    return {name: merged[name] for name in rows[0]}


def _median_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _samples_per_step(cell: Cell) -> int:
    """Samples of a whole step over all devices, by the settings that ran; a ragged last batch is not the rule."""
    spec, record = cell.request.spec, cell.last_record
    effective = (record and record.effective) or EffectiveSettings()
    micro_batches = effective.accumulate_grad_batches or spec.accumulate_grad_batches
    return (effective.batch_size or spec.batch_size) * micro_batches * (effective.num_devices or spec.num_devices)


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a frame in which whole numbers stay whole where some are unknown."""
    frame = pd.DataFrame(list(rows))
    for name in frame.columns:
        known = [row[name] for row in rows if row[name] is not None]
        if known and all(isinstance(value, int) and not isinstance(value, bool) for value in known):
            frame[name] = frame[name].astype("Int64")
        elif known and all(axes_module.is_number(value) for value in known):
            frame[name] = frame[name].astype("float64")
    return frame


def _sort_cells(frame: pd.DataFrame, series: Sequence[str], x_axis: Axis | None) -> pd.DataFrame:
    """Cells series by series, in the numeric order of x; equal ones keep the sweep's order."""
    keys = pd.DataFrame({"series": [list(series).index(label) for label in frame["series"]]}, index=frame.index)
    if x_axis is not None:
        keys["x"] = frame[x_axis.column].astype("float64")
    return frame.loc[keys.sort_values(list(keys.columns), kind="stable").index].reset_index(drop=True)
