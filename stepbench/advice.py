"""Rules over measured numbers -> findings in words. Every finding names the number it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from stepbench import units
from stepbench.frames import is_noisy, spread_of_steps
from stepbench.record import PHASES, RunRecord
from stepbench.scaling import measured, noisy
from stepbench.study import Finding, Study, label_cell

DATA_BOUND_FRACTION = 0.20
"""A run that waits longer for its data is data-bound (STATISTICS S11)."""

STALL_RATIO = 1.10
"""Mean over median step time from which rare slow steps matter (STATISTICS S5)."""


LONGER_S = 10.0
"""Seconds timed that smooth most noise."""

MAX_NAMED = 8
"""More cells than this are counted, not named, in one sentence."""


def find_cell_findings(row: Mapping[str, Any], records: Sequence[RunRecord] = ()) -> tuple[Finding, ...]:
    """What one cell's summary columns say, the answer first; `records` tell how to measure better where it is noisy."""
    shares = {phase: row[f"{phase}_fraction"] for phase in PHASES}
    mean_step_s, median_step_s = row["mean_step_s"], row["median_step_s"]
    top = max(PHASES, key=lambda phase: shares[phase])
    findings = []
    if shares["data"] > DATA_BOUND_FRACTION:
        findings.append(
            Finding(
                subject="data",
                text=f"the step waits for data {units.format_fraction(shares['data'])} of the time: "
                "more loader workers or cheaper decoding come before anything else",
            )
        )
    findings.append(
        Finding(subject="phase", text=f"most time goes to {top} ({units.format_fraction(shares[top])} of the step)")
    )
    if median_step_s > 0 and mean_step_s / median_step_s > STALL_RATIO:
        findings.append(
            Finding(
                subject="stalls",
                text=f"some steps are much slower: the mean step ({units.format_duration(mean_step_s)}) is "
                f"{units.format_ratio(mean_step_s / median_step_s)} the median "
                f"({units.format_duration(median_step_s)})",
            )
        )
    if is_noisy(row):
        low_s, high_s = row["step_low_s"], row["step_high_s"]
        if low_s is None:
            reason = f"the middle half of the steps spans {units.format_fraction(spread_of_steps(row))} of the median"
        else:
            low, high = units.format_duration(low_s), units.format_duration(high_s)
            reason = f"the median step lies between {low} and {high}"
        findings.append(Finding(subject="noise", text=f"too noisy to compare: {reason}"))
        findings.append(Finding(subject="action", text=suggest_rerun(records)))
    return tuple(findings)


def suggest_rerun(records: Sequence[RunRecord]) -> str:
    """What to do about these runs' noise, in terms of the machine's load and the command line."""
    protocols = [record.request.protocol for record in records]
    num_epochs = max((protocol.epochs or 0 for protocol in protocols), default=0)
    timed_s = max((protocol.timed_s for protocol in protocols), default=0.0)
    longer = f"epochs={3 * num_epochs}" if num_epochs else f"timed_s={max(LONGER_S, 3 * timed_s):g}"
    ways = ["when the machine is idle", f"longer (protocol.{longer})", "on fewer threads (device.num_threads=1)"]
    if records and all(record.effective and record.effective.num_threads == 1 for record in records):
        ways.pop()
    busiest = max(((load, cores) for record in records for load, cores in _loads(record)), default=None)
    if busiest is not None and busiest[0] > busiest[1]:
        load, cores = busiest
        ways[0] = "when it is idle"
        start = f"The machine was busy (load {load:.1f} on {units.format_count(cores, 'core')}): run again "
    else:
        start = "Run again "
    return f"{start}{', '.join(ways[:-1])} or {ways[-1]}"


def _loads(record: RunRecord) -> list[tuple[float, int]]:
    """The load averages around a run, each with the number of cores that it had."""
    environment = record.environment
    cores = environment and (environment.num_usable_cores or environment.num_cores)
    if environment is None or not cores:
        return []
    loads = (environment.load_average_start, environment.load_average_end)
    return [(load, cores) for load in loads if load is not None]


def find_findings(study: Study) -> tuple[Finding, ...]:
    """What a study's measured cells together say, and what to do about those that are too noisy."""
    findings = find_study_findings(study.cell_frame, [label_cell(study, cell) for cell in study.cells])
    doubtful = noisy(study.cell_frame).tolist()
    records = [r for cell, is_doubtful in zip(study.cells, doubtful, strict=True) if is_doubtful for r in cell.records]
    return (*findings, Finding(subject="action", text=suggest_rerun(records))) if any(doubtful) else findings


def find_study_findings(cells: pd.DataFrame, labels: Sequence[str]) -> tuple[Finding, ...]:
    """What all measured cells together say, the wait for data first; `labels` name the cells in their order."""
    names = pd.Series(list(labels), index=cells.index, dtype="object")
    frame = measured(cells)
    if frame.empty:
        return ()
    findings = []
    waiting = frame[frame["data_fraction"] > DATA_BOUND_FRACTION]
    if not waiting.empty:
        worst = waiting.loc[waiting["data_fraction"].idxmax()]
        findings.append(
            Finding(
                subject="data",
                text=f"{len(waiting)} of {units.format_count(len(frame), 'cell')} "
                f"{'waits' if len(waiting) == 1 else 'wait'} for data more than "
                f"{units.format_fraction(DATA_BOUND_FRACTION)} of the step "
                f"(worst: {names[worst.name]}: {units.format_fraction(worst['data_fraction'])})",
            )
        )
    shares = frame[[f"{phase}_fraction" for phase in PHASES]].astype("float64")
    tops = shares.idxmax(axis="columns").str.removesuffix("_fraction")
    counts = tops.value_counts(sort=False)
    for phase in sorted(counts.index, key=lambda name: (-counts[name], PHASES.index(name))):
        own = shares.loc[tops == phase, f"{phase}_fraction"]
        low, high = units.format_fraction(own.min()), units.format_fraction(own.max())
        span = low if low == high else f"{low.removesuffix(' %')}–{high}"
        where = "" if len(frame) == 1 else f" in {counts[phase]} of {len(frame)} cells"
        findings.append(Finding(subject="phase", text=f"most time goes to {phase}{where} ({span} of the step)"))
    doubtful = names[frame.index[noisy(frame)]].tolist()
    if doubtful:
        count = f"{len(doubtful)} of {units.format_count(len(frame), 'cell')}"
        more = f"; and {len(doubtful) - MAX_NAMED} more" if len(doubtful) > MAX_NAMED else ""
        findings.append(
            Finding(
                subject="noise",
                text=f"{count} {'is' if len(doubtful) == 1 else 'are'} too noisy to compare (interval wider than "
                f"±{units.format_fraction(units.WIDE_FRACTION)}, or none and spread above "
                f"{units.format_fraction(2 * units.WIDE_FRACTION)}): {'; '.join(doubtful[:MAX_NAMED])}{more}",
            )
        )
    return tuple(findings)
