"""A study's answers as sentences and its table as text cells: what terminal and Markdown report both say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepbench import units
from stepbench.axes import Axis, label_setting, label_value
from stepbench.cells import Cell
from stepbench.record import PHASES, Environment
from stepbench.scaling import Recommendation
from stepbench.study import ALL_CELLS, Study

MEDIAN_NOTE = (
    "Step time is a median over steps; throughput is all samples over all wall time of the same steps, "
    "so the two need not multiply to the batch size."
)
INTERVAL_NOTE = (
    "± is half of the 95 % interval within one run, [low, high] that interval where it is wide; it excludes run-to-run "
    "variation. Without it a run had too few independent steps."
)
CONVERGENCE_NOTE = "Throughput is not convergence: a larger batch may need more samples."
GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question of a study, answered in lines."""

    question: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Headings and rows of text. The first `num_names` columns name a row; the optional ones go first where narrow."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_names: int
    optional: tuple[str, ...] = ()


def count_cells(study: Study) -> str:
    """`6 cells planned, 5 measured, 1 failed (1 oom)`."""
    statuses = [cell.status for cell in study.cells]
    measured = sum(1 for cell in study.cells if cell.ok_records)
    text = f"{units.format_count(len(statuses), 'cell')} planned, {measured} measured"
    others = [status for status, cell in zip(statuses, study.cells, strict=True) if not cell.ok_records]
    if others:
        kinds = ", ".join(f"{others.count(status)} {status}" for status in dict.fromkeys(others))
        text += f", {len(others)} without numbers ({kinds})"
    return text


def answer_study(study: Study) -> tuple[Answer, ...]:
    """Every question the study can answer, the most useful first; questions without an answer are left out."""
    answers = (
        Answer(question="Where the time goes", lines=tuple(finding.text for finding in study.findings)),
        Answer(question="Batch size to train with", lines=_recommendations(study)),
        Answer(question="Cost of doubling the batch", lines=_doublings(study)),
        Answer(question=_speed_up_question(study), lines=_speed_ups(study)),
        Answer(question="Not measured", lines=_failures(study)),
    )
    return tuple(answer for answer in answers if answer.lines)


def name_series(study: Study, series: str) -> str:
    """A series in words: `precision 32` where one axis makes the series, the combination's own label else."""
    return f"{study.series_title} {series}" if len(study.series_axes) == 1 else series


def _prefix(study: Study, series: str) -> str:
    return "" if len(study.series) == 1 else f"{name_series(study, series)}: "


def _recommendations(study: Study) -> tuple[str, ...]:
    lines = [_prefix(study, item.series) + _recommend(study, item) for item in study.recommendations]
    rates = study.cell_frame["samples_per_s"].astype("float64")
    if rates.notna().sum() > 1:
        best = study.cells[int(rates.fillna(-1.0).to_numpy().argmax())]
        lines.append(f"best throughput of all: {units.format_throughput(rates.max())} ({label_cell(study, best)})")
    return tuple(lines)


def _recommend(study: Study, item: Recommendation) -> str:
    failed = study.cell_frame[(study.cell_frame["series"] == item.series) & (study.cell_frame["status"] != "ok")]
    larger = failed[failed["batch_size"] > item.best_batch_size]
    rate = units.format_throughput(item.samples_per_s)
    if item.is_still_rising:
        text = f"batch {item.batch_size} ({rate})"
        text += ", still rising with the batch: the largest measured is best"
    elif item.batch_size == item.best_batch_size:
        text = f"batch {item.batch_size} ({rate}), the best measured"
    else:
        text = (
            f"batch {item.batch_size} ({rate}), the smallest within 5 % of the best "
            f"(batch {item.best_batch_size}, {units.format_throughput(item.best_samples_per_s)})"
        )
    if not larger.empty:
        kinds = ", ".join(f"{row['batch_size']} {row['status']}" for _, row in larger.iterrows())
        text += f"; larger ones not measured: {kinds}"
    return text


def _doublings(study: Study) -> tuple[str, ...]:
    lines = []
    for series in study.series:
        parts = []
        for item in study.doublings:
            if item.series == series:
                ratio = units.format_ratio(item.doubling_ratio)
                is_exact = item.larger_batch_size == 2 * item.batch_size
                measured = "" if is_exact else f" per doubling ({units.format_ratio(item.time_ratio)} measured)"
                parts.append(f"{item.batch_size}→{item.larger_batch_size} {ratio}{measured}")
        if parts:
            lines.append(_prefix(study, series) + "step time " + ", ".join(parts))
    return tuple(lines)


def _speed_up_question(study: Study) -> str:
    return f"Speed-up over {study.baseline}, all else equal"


def _speed_ups(study: Study) -> tuple[str, ...]:
    lines = []
    for series in dict.fromkeys(item.series for item in study.speed_ups):
        own = [item for item in study.speed_ups if item.series == series]
        name = study.x_axis.title.removesuffix(" size") if study.x_axis else ""
        parts = [
            units.format_ratio(item.ratio) + (f" at {name} {label_value(_whole(item.x))}" if name else "")
            for item in own
        ]
        lines.append(f"{name_series(study, series)}: {', '.join(parts)}")
    return tuple(lines)


def _whole(value: float | None) -> float | int | None:
    return int(value) if value is not None and value == int(value) else value


def _failures(study: Study) -> tuple[str, ...]:
    lines = []
    for cell in study.cells:
        if not cell.ok_records:
            reason = " ".join((cell.reason or "no reason recorded").split())
            log = f" · log: {cell.log}" if cell.log and cell.log.exists() and str(cell.log) not in reason else ""
            lines.append(f"{label_cell(study, cell)}: {cell.status}: {reason}{log}")
    return tuple(lines)


# ---- naming cells ----


def _row(frame: Any, cell: Cell) -> Any:
    return frame.loc[frame["cell"] == cell.name].iloc[0]


def label_cell(study: Study, cell: Cell) -> str:
    """A cell by its place on the axes: `precision 32, batch 16`; by its name where nothing varies."""
    row = _row(study.cell_frame, cell)
    parts = [] if row["series"] == ALL_CELLS else [name_series(study, str(row["series"]))]
    if study.x_axis is not None:
        parts.append(f"{study.x_axis.title.removesuffix(' size')} {label_value(_requested(cell, study.x_axis, row))}")
    return ", ".join(parts) or f"cell {cell.name}"


def _requested(cell: Cell, axis: Axis, row: Any) -> Any:
    value = row[axis.column]
    return None if value is None or value != value else _whole(value) if isinstance(value, float) else value


# ---- the table of cells ----


def cell_table(study: Study) -> Table:
    """Every planned cell in a row: its axes, its status, and its numbers in one unit a column."""
    frame = study.cell_frame
    step_unit = units.duration_unit(frame["median_step_s"].astype("float64"))
    axes = [*study.series_axes, *([study.x_axis] if study.x_axis else [])]
    memory = "peak_device_memory_bytes"
    memory = memory if frame[memory].notna().any() else "peak_host_memory_bytes"
    rows = []
    for cell in study.cells:
        row = _row(frame, cell)
        names = [label_setting(axis.name, _requested(cell, axis, row), cell.records) for axis in axes]
        rows.append((*(names or [cell.name]), cell.status, *_numbers(row, step_unit, memory)))
    names = [axis.title.replace("batch size", "batch") for axis in axes] or ["cell"]
    memory_heading = f"{memory.split('_')[1]} memory [GiB]"
    return Table(
        headings=(*names, "status", f"step [{step_unit.name}]", "samples/s", "spread", "most time in", memory_heading),
        rows=tuple(rows),
        num_names=len(names) + 1,
        optional=(memory_heading, "spread", "most time in"),
    )


def _numbers(row: Any, unit: units.DurationUnit, memory: str) -> list[str]:
    median = _number(row["median_step_s"])
    if median is None:
        return [units.UNKNOWN] * 5
    ends = [_number(row["step_low_s"]), _number(row["step_high_s"])]
    low, high = (None if end is None else end * unit.per_s for end in ends)
    low_quartile, high_quartile = _number(row["p25_step_s"]), _number(row["p75_step_s"])
    spread = (high_quartile - low_quartile) / median if median and high_quartile and low_quartile else None
    shares = {phase: _number(row[f"{phase}_fraction"]) or 0.0 for phase in PHASES}
    top = max(PHASES, key=lambda phase: shares[phase])
    num_bytes = _number(row[memory])
    return [
        units.format_with_interval(median * unit.per_s, low, high),
        units.format_rate(_number(row["samples_per_s"])),
        units.format_fraction(spread),
        f"{top} {units.format_fraction(shares[top])}",
        units.format_significant(None if num_bytes is None else num_bytes / GIB),
    ]


def _number(value: Any) -> float | None:
    return None if value is None or value != value or str(value) == "<NA>" else float(value)


def phase_table(study: Study) -> Table:
    """Median milliseconds (or another unit) per step of each phase, and its share, for each measured cell."""
    frame = study.cell_frame
    unit = units.duration_unit(frame["median_step_s"].astype("float64"))
    rows = []
    for cell in study.cells:
        if cell.ok_records:
            row = _row(frame, cell)
            texts = [
                f"{units.format_significant(row[f'{phase}_s'] * unit.per_s)} "
                f"({units.format_fraction(row[f'{phase}_fraction'])})"
                for phase in PHASES
            ]
            rows.append((label_cell(study, cell), *texts))
    headings = ("cell", *(f"{phase} [{unit.name}]" for phase in PHASES))
    return Table(headings=headings, rows=tuple(rows), num_names=1)


# ---- what was measured, and where ----


def environment_lines(study: Study) -> tuple[str, ...]:
    """Each machine of the study in one line, then the versions and commits that its runs met."""
    records = [record for cell in study.cells for record in cell.records]
    lines: list[str] = []
    for record in records:
        if record.environment is not None:
            device = record.effective.device_name if record.effective else None
            lines.append(describe_environment(record.environment, device))
            versions = ", ".join(f"{name} {version}" for name, version in record.environment.versions)
            if versions:
                lines.append(versions)
            if record.environment.git_commit:
                dirty = " with uncommitted changes" if record.environment.git_dirty else ""
                lines.append(f"git commit {record.environment.git_commit[:12]}{dirty}")
    lines = list(dict.fromkeys(lines))
    return tuple(line for line in lines if not any(other != line and other.startswith(line) for other in lines))


def describe_environment(environment: Environment, device_name: str | None) -> str:
    """A machine in one line."""
    cores = environment.num_usable_cores or environment.num_cores
    parts = [
        f"host {environment.host}",
        environment.operating_system,
        environment.cpu_model,
        units.format_count(cores, "usable core") if cores else None,
        units.format_bytes(environment.memory_bytes) + " memory" if environment.memory_bytes else None,
        f"device {device_name}" if device_name and device_name != environment.cpu_model else None,
    ]
    return " · ".join(part for part in parts if part)


def method_lines(study: Study) -> tuple[str, ...]:
    """How the numbers came about."""
    requests = [cell.request for cell in study.cells]
    protocols = dict.fromkeys(request.protocol for request in requests)
    lines = [
        f"protocol {protocol.name}: "
        + (
            units.format_count(protocol.epochs, "whole epoch")
            if protocol.epochs
            else f"at least {units.format_count(protocol.timed_batches, 'batch', 'batches')} "
            f"and {protocol.timed_s:g} s timed after a warm-up of at least "
            f"{units.format_count(protocol.warmup_batches, 'batch', 'batches')} and {protocol.warmup_s:g} s"
        )
        for protocol in protocols
    ]
    timers = dict.fromkeys(
        (record.effective.timer if record.effective and record.effective.timer else record.request.timer)
        for cell in study.cells
        for record in cell.records
    )
    lines += [f"timer: {timer}" for timer in timers]
    return (*lines, MEDIAN_NOTE, INTERVAL_NOTE if _is_one_round(study.cells) else _rounds_note())


def _is_one_round(cells: Sequence[Cell]) -> bool:
    return all(len(cell.ok_records) <= 1 for cell in cells)


def _rounds_note() -> str:
    return (
        "± is half of the range of the run medians, [low, high] that range where it is wide; "
        "for a cell with one round, of the interval within it."
    )
