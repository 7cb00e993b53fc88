"""A study's answers as sentences and its table as text cells: what terminal and Markdown report both say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from stepbench import units
from stepbench.axes import Axis, label_value
from stepbench.captions import is_one_round
from stepbench.cells import Cell
from stepbench.compile_payback import find_paybacks
from stepbench.frames import largest_phase, spread_of_steps
from stepbench.record import PHASES
from stepbench.scaling import Fastest, Recommendation, measured, noisy
from stepbench.study import Study, has_value, label_axis, label_cell, name_series, plain_value

DOUBT = " (?)"
DOUBT_NOTE = "(?) rests on a cell too noisy to compare"
SPREAD_NOTE = "spread: IQR / median of the steps."
SPREAD = "spread"
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
        Answer(question="In short", lines=_advice_in_short(study)),
        Answer(question="Where the time goes", lines=tuple(finding.text for finding in study.findings)),
        Answer(question="Batch size to train with", lines=_recommendations(study)),
        Answer(question="Fastest setting", lines=_fastest(study)),
        Answer(question="Cost of doubling the batch", lines=_doublings(study)),
        Answer(question=_growth_question(study), lines=_growths(study)),
        Answer(question=_speed_up_question(study), lines=_speed_ups(study)),
        Answer(question="Does compiling pay", lines=_compile_paybacks(study)),
        Answer(question="Not measured", lines=_failures(study)),
    )
    return tuple(answer for answer in answers if answer.lines)


def closing_notes(answers: Sequence[Answer]) -> tuple[str, ...]:
    """What explains the marks in these answers."""
    return (DOUBT_NOTE,) if any(DOUBT in line for answer in answers for line in answer.lines) else ()


def _doubt(is_noisy: bool) -> str:
    return DOUBT if is_noisy else ""


def _prefix(study: Study, series: str) -> str:
    return "" if len(study.series) == 1 else f"{name_series(study, series)}: "


def _has_batch_axis(study: Study) -> bool:
    return study.x_axis is not None and study.x_axis.name == "batch_size"


def _work_prefix(study: Study, cell: Cell) -> str:
    return f"{label_cell(study, cell, study.work_axes)}: " if study.work_axes else ""


def _advice_in_short(study: Study) -> tuple[str, ...]:
    """One sentence on what to train with for each model and place of the study."""
    if not _has_batch_axis(study):
        return ()
    first_cells: dict[str, Cell] = {}
    for series, cell in zip(study.cell_frame["series"], study.cells, strict=True):
        first_cells.setdefault(series, cell)
    works: dict[str, list[str]] = {}
    for series, cell in first_cells.items():
        works.setdefault(_work_prefix(study, cell), []).append(series)
    lines = []
    for prefix, members in works.items():
        text = _recommend_in_short(study, members, first_cells)
        lines.append(prefix + text[0].lower() + text[1:] if prefix else text)
    return tuple(lines)


def _recommend_in_short(study: Study, members: Sequence[str], first_cells: Mapping[str, Cell]) -> str:
    frame = study.cell_frame[study.cell_frame["series"].isin(members)]
    items = [item for item in study.recommendations if item.series in members]
    certain = [item for item in items if item.is_certain]
    choices = [axis for axis in study.series_axes if axis.is_choice]
    count = f"{noisy(frame).sum()} of {units.format_count(len(measured(frame)), 'cell')}"
    if not certain:
        reason = f"too noisy: {count}" if items else "fewer than two batch sizes were measured"
        return f"No recommendation can be made: {reason}"
    best = max(certain, key=lambda item: item.samples_per_s)
    names = {series: label_cell(study, first_cells[series], choices) for series in members} if choices else {}
    setting = ", ".join(part for part in (names.get(best.series), f"batch {best.batch_size}") if part)
    setting += f" ({units.format_throughput(best.samples_per_s)})"
    rivals = [item for item in items if not item.is_certain and item.best_samples_per_s > best.samples_per_s]
    if rivals:
        faster = "; ".join(names[item.series] for item in rivals)
        return f"No recommendation can be made: {faster} may be faster than {setting}, but too noisy: {count}"
    overall = next((item for item in study.fastest if item.cell in set(frame["cell"])), None)
    if overall is not None and overall.samples_per_s > best.best_samples_per_s:  # a series of one size
        label = label_cell(study, _find_cell(study, overall.cell), [*choices, *_x_axes(study)])
        return f"Train with {label} ({units.format_throughput(overall.samples_per_s)}), the best measured"
    text = f"Train with {setting}"
    if best.is_still_rising:
        larger = _failed_larger(study, best)
        text += "; throughput was still rising: " + (
            f"larger ones failed: {larger}" if larger else "try larger batches"
        )
    elif best.batch_size == best.best_batch_size:
        text += ", the best measured"
    else:
        text += ", the smallest batch within 5 % of the best"
    left_out = [names[item.series] for item in items if not item.is_certain]
    return text + (f"; too noisy to tell: {'; '.join(left_out)}" if left_out else "")


def _recommendations(study: Study) -> tuple[str, ...]:
    if not _has_batch_axis(study):
        return ()
    lines = [_prefix(study, item.series) + _recommend(study, item) for item in study.recommendations]
    for item in study.fastest:
        rate, cell = units.format_throughput(item.samples_per_s), _find_cell(study, item.cell)
        of_all = "of all" if not study.work_axes else f"of {label_cell(study, cell, study.work_axes)}"
        label = label_cell(study, cell)
        text = f"best throughput {of_all}: {rate} ({label}){_doubt(_is_noisy(study, cell))}"
        lines.append(text + _rivals(study, item))
    return tuple(lines)


def _rivals(study: Study, item: Fastest) -> str:
    names = [label_cell(study, _find_cell(study, name)) for name in item.noisy_rivals]
    return f"; perhaps faster, but too noisy to compare: {'; '.join(names)}" if names else ""


def _x_axes(study: Study) -> list[Axis]:
    return [study.x_axis] if study.x_axis else []


def _failed_larger(study: Study, item: Recommendation) -> str:
    """`64 oom, 128 skipped`: the larger batches of a series without numbers."""
    failed = study.cell_frame[(study.cell_frame["series"] == item.series) & (study.cell_frame["status"] != "ok")]
    larger = failed[failed["batch_size"] > item.best_batch_size]
    return ", ".join(f"{row['batch_size']} {row['status']}" for _, row in larger.iterrows())


def _recommend(study: Study, item: Recommendation) -> str:
    if not item.is_certain:
        sizes = ", ".join(map(str, item.noisy_batch_sizes))
        count = f"{len(item.noisy_batch_sizes)} of {units.format_count(len(item.batch_sizes), 'cell')}"
        verb = "is" if len(item.noisy_batch_sizes) == 1 else "are"
        return f"no recommendation: {count} {verb} too noisy (batch {sizes})"
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
    larger = _failed_larger(study, item)
    return text + (f"; larger ones not measured: {larger}" if larger else "")


def _fastest(study: Study) -> tuple[str, ...]:
    """The fastest cell of each kind of work against the first one measured."""
    return () if _has_batch_axis(study) else tuple(_describe_fastest(study, item) for item in study.fastest)


def _describe_fastest(study: Study, item: Fastest) -> str:
    best, first = _find_cell(study, item.cell), _find_cell(study, item.baseline_cell)
    choices = [axis for axis in (*study.series_axes, *_x_axes(study)) if axis.is_choice]
    text = (
        f"{_work_prefix(study, best)}{label_cell(study, best, choices)}: {units.format_throughput(item.samples_per_s)}"
    )
    if best is first:
        return f"{text}, the first one measured{_doubt(item.is_noisy)}{_rivals(study, item)}"
    ratio = f"{units.format_ratio(item.ratio)}{_doubt(item.is_noisy)}"
    return f"{text}, {ratio} over {label_cell(study, first, choices)}{_rivals(study, item)}"


def _find_cell(study: Study, name: str) -> Cell:
    return next(cell for cell in study.cells if cell.name == name)


def _is_noisy(study: Study, cell: Cell) -> bool:
    return bool(noisy(study.cell_frame).iloc[study.cells.index(cell)])


def _doublings(study: Study) -> tuple[str, ...]:
    lines = []
    for series in study.series:
        parts = []
        for item in study.doublings:
            if item.series == series:
                ratio = units.format_ratio(item.doubling_ratio) + _doubt(item.is_noisy)
                is_exact = item.larger_batch_size == 2 * item.batch_size
                measured = "" if is_exact else f" per doubling ({units.format_ratio(item.time_ratio)} measured)"
                parts.append(f"{item.batch_size}→{item.larger_batch_size} {ratio}{measured}")
        if parts:
            lines.append(_prefix(study, series) + "step time " + ", ".join(parts))
    return tuple(lines)


def _growth_question(study: Study) -> str:
    return f"Growth of the step time with {study.x_axis.title}" if study.x_axis else ""


def _growths(study: Study) -> tuple[str, ...]:
    lines = []
    for series in study.series:
        parts = [
            f"{label_value(plain_value(item.x))}→{label_value(plain_value(item.larger_x))}: "
            f"{units.format_ratio(item.time_ratio)}{_doubt(item.is_noisy)}"
            for item in study.growths
            if item.series == series
        ]
        if parts and study.x_axis:
            parts[0] = parts[0].replace(": ", ": step time ", 1)
            lines.append(f"{_prefix(study, series)}{study.x_axis.title} {', '.join(parts)}")
    return tuple(lines)


def _speed_up_question(study: Study) -> str:
    return f"Speed-up over {study.baseline}, all else equal"


def _speed_ups(study: Study) -> tuple[str, ...]:
    lines = []
    for series in dict.fromkeys(item.series for item in study.speed_ups):
        own = [item for item in study.speed_ups if item.series == series]
        parts = [
            units.format_speed(item.ratio)
            + (f" at {study.x_axis.short_title} {label_value(plain_value(item.x))}" if study.x_axis else "")
            + _doubt(item.is_noisy)
            for item in own
        ]
        lines.append(f"{name_series(study, series)}: {', '.join(parts)}")
    return tuple(lines)


def _compile_paybacks(study: Study) -> tuple[str, ...]:
    """For each compiled cell with a twin that is not: after how many steps the time spent compiling is saved."""
    lines = []
    for payback in find_paybacks(study.cells):
        compiled = label_cell(study, payback.cell, study.axes)
        took = f"{compiled}: compiling took {units.format_duration(payback.compile_s)}"
        if payback.num_steps is None:
            lines.append(f"{took}, and the step is no faster for it: it never pays for itself")
        else:
            steps = units.format_count(payback.num_steps, "step")
            saved = units.format_duration(payback.saved_step_s)
            lines.append(f"{took} and saves {saved} per step: it pays for itself after {steps}")
    return tuple(lines)


def _failures(study: Study) -> tuple[str, ...]:
    lines = []
    for cell in study.cells:
        if not cell.ok_records:
            reason = " ".join((cell.reason or "no reason recorded").split())
            log = f" · log: {cell.log}" if cell.log and cell.log.exists() and str(cell.log) not in reason else ""
            lines.append(f"{label_cell(study, cell)}: {cell.status}: {reason}{log}")
    return tuple(lines)


# ---- the tables of cells ----


def cell_table(study: Study) -> Table:
    """Every planned cell in a row: its directory, its axes, its status, and its numbers in one unit a column."""
    frame = study.cell_frame
    step_unit = units.duration_unit(frame["median_step_s"].astype("float64"))
    axes = [*study.series_axes, *_x_axes(study)]
    memory = "peak_device_memory_bytes"
    memory = memory if frame[memory].notna().any() else "peak_host_memory_bytes"
    rows = []
    for cell, (_, row) in zip(study.cells, frame.iterrows(), strict=True):
        values = (label_axis(study, cell, axis) if has_value(cell, axis) else units.UNKNOWN for axis in axes)
        names = [cell.name, *values]
        rows.append((*names, cell.status, *_numbers(row, step_unit, memory)))
    names = ["cell", *(axis.short_title for axis in axes)]
    memory_heading = f"{memory.split('_')[1]} memory [GiB]"
    numbers = (f"step [{step_unit.name}]", "samples/s", "steps", SPREAD, "most time in", memory_heading)
    return Table(
        headings=(*names, "status", *numbers),
        rows=tuple(rows),
        num_names=len(names) + 1,
        optional=(memory_heading, "steps", SPREAD, "most time in"),
    )


def table_note(study: Study, shown: Sequence[str]) -> str | None:
    """One line under the cell table of which these columns are shown; None where nothing was measured."""
    if study.cell_frame["median_step_s"].isna().all():
        return None
    if is_one_round(study):
        text = "±: 95 % interval within one run; a repeat may differ more."
    else:
        text = "±: range of the run medians; of a cell with one run the interval within it."
    return f"{text} {SPREAD_NOTE}" if SPREAD in shown else text


def _numbers(row: Any, unit: units.DurationUnit, memory: str) -> list[str]:
    median = _number(row["median_step_s"])
    if median is None:
        return [units.UNKNOWN] * 6
    ends = [_number(row["step_low_s"]), _number(row["step_high_s"])]
    low, high = (None if end is None else end * unit.per_s for end in ends)
    top = largest_phase(row)
    num_bytes = _number(row[memory])
    return [
        units.format_with_interval(median * unit.per_s, low, high),
        units.format_rate(_number(row["samples_per_s"])),
        f"{row['num_steps']:,}",
        units.format_fraction(spread_of_steps(row)),
        f"{top[0]} {units.format_fraction(top[1])}" if top else units.UNKNOWN,
        units.format_significant(None if num_bytes is None else num_bytes / GIB),
    ]


def _number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)


def phase_table(study: Study) -> Table:
    """Median milliseconds (or another unit) per step of each phase, and its share, for each measured cell."""
    frame = study.cell_frame
    unit = units.duration_unit(frame["median_step_s"].astype("float64"))
    rows = []
    for cell, (_, row) in zip(study.cells, frame.iterrows(), strict=True):
        if cell.ok_records:
            rows.append((label_cell(study, cell), *(_phase_text(row, phase, unit) for phase in PHASES)))
    headings = ("cell", *(f"{phase} [{unit.name}]" for phase in PHASES))
    return Table(headings=headings, rows=tuple(rows), num_names=1)


def _phase_text(row: Any, phase: str, unit: units.DurationUnit) -> str:
    """`3.70 (37 %)`: median per step and share; unknown where nothing tells the phase from another."""
    median_s = _number(row[f"{phase}_s"])
    if median_s is None:
        return units.UNKNOWN
    share = units.format_fraction(_number(row[f"{phase}_fraction"]))
    return f"{units.format_significant(median_s * unit.per_s)} ({share})"
