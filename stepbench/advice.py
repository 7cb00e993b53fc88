"""Rules over measured numbers -> findings in words. Every finding names the number it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from stepbench import units
from stepbench.frames import (
    MERGED_PHASE,
    has_merged_backward,
    is_noisy,
    largest_phase,
    longest_wait_s,
    rows_of,
    spread_of_steps,
)
from stepbench.record import OWN_SCRIPT, PHASES, Compilation, RunRecord, RunSummary
from stepbench.scaling import measured, noisy
from stepbench.statistics import DEVICE
from stepbench.study import Finding, Study, label_cell

DATA_BOUND_FRACTION = 0.20
"""A run that waits longer for its data is data-bound (STATISTICS S11)."""

STALL_RATIO = 1.10
"""Mean over median step time from which rare slow steps matter (STATISTICS S5)."""

WAIT_FRACTION = 0.05
"""Ranks that wait longer for the slowest one, as a fraction of the median step, are worth a word."""

SLOWDOWN_FRACTION = 0.02
"""A timer that slows its steps by less changes no conclusion; `timer=sync` always says by how much."""

LONGER_S = 10.0
"""Seconds timed that smooth most noise."""

MAX_NAMED = 8
"""More cells than this are counted, not named, in one sentence."""


def find_cell_findings(row: Mapping[str, Any], records: Sequence[RunRecord] = ()) -> tuple[Finding, ...]:
    """What one cell's summary columns say, the answer first; `records`, its runs, tell what columns do not."""
    mean_step_s, median_step_s = row["mean_step_s"], row["median_step_s"]
    top, data_fraction = largest_phase(row), row["data_fraction"]
    findings = []
    if not pd.isna(data_fraction) and data_fraction > DATA_BOUND_FRACTION:
        share = units.format_fraction(data_fraction)
        waits = f"the step waits for data {share} of the time"
        if row["timeline"] == DEVICE:
            waits = f"the device waited for data {share} of the step"
        text = f"{waits}: more loader workers or cheaper decoding come before anything else"
        findings.append(Finding(subject="data", text=text))
    if top is not None:
        name, share_fraction = top
        text = f"most time goes to {name} ({units.format_fraction(share_fraction)} of the step)"
        findings.append(Finding(subject="phase", text=text))
    findings += find_special_findings(row, records)
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


# ---- what is out of the ordinary in a cell ----


def find_special_findings(row: Mapping[str, Any], records: Sequence[RunRecord] = ()) -> list[Finding]:
    """What limits a cell's numbers or explains them: few cells have any of it."""
    texts = {
        "phases": _describe_unknown_phases(row),
        "backward": _describe_merged_backward(row),
        "scaler": _describe_skipped_steps(row),
        "compilation": _describe_compilation(row, records),
        "timer": _describe_timer(row, records),
        "ranks": _describe_ranks(records),
    }
    return [Finding(subject=subject, text=text) for subject, text in texts.items() if text is not None]


def _describe_unknown_phases(row: Mapping[str, Any]) -> str | None:
    if not pd.isna(row["forward_fraction"]):
        return None
    steps = units.format_count(int(row["num_steps"]), "step")
    return f"phases are unknown: block sampling timed none of the {steps} by phase; time more steps"


def _describe_merged_backward(row: Mapping[str, Any]) -> str | None:
    if not has_merged_backward(row):
        return None
    share = units.format_fraction(row["forward_fraction"])
    return (
        f"the module runs autograd itself (`loss.backward()`), so backward cannot be told from forward ({share} "
        "together): call `self.manual_backward(loss)` to see it apart"
    )


def _describe_skipped_steps(row: Mapping[str, Any]) -> str | None:
    num_skipped = row["num_skipped_steps"]
    if pd.isna(num_skipped) or not num_skipped:
        return None
    steps = f"{int(num_skipped):,} of {units.format_count(int(row['num_steps']), 'step')}"
    verb = "was" if num_skipped == 1 else "were"
    return f"{steps} {verb} skipped by the gradient scaler: the optimizer did nothing in them"


def _describe_compilation(row: Mapping[str, Any], records: Sequence[RunRecord]) -> str | None:
    """What the first run that compiled did: later ones may find a part of it in a cache."""
    found = [record.compilation for record in records if record.compilation]
    compiled = next((compilation for compilation in found if compilation.num_graphs), None)
    if compiled is not None:
        return f"{describe_compilation(compiled)}; steps that compile are left out of the numbers"
    if found and records[0].request.spec.compile is not None:
        return "torch.compile compiled 0 graphs: the model ran as it is"
    return None


def describe_compilation(compilation: Compilation) -> str:
    """`torch.compile compiled 3 graphs with 1 recompilation in 2 batches (41.0 s)`."""
    text = f"torch.compile compiled {units.format_count(compilation.num_graphs, 'graph')}"
    text += f" with {units.format_count(compilation.num_recompilations, 'recompilation')}"
    text += f" in {units.format_count(compilation.num_batches, 'batch', 'batches')}"
    return text if compilation.compile_s is None else f"{text} ({units.format_duration(compilation.compile_s)})"


def _describe_timer(row: Mapping[str, Any], records: Sequence[RunRecord]) -> str | None:
    slowdown = row["timer_slowdown_fraction"]
    if pd.isna(slowdown):
        return None
    timers = {record.effective.timer for record in records if record.effective}
    if timers == {"sync"} and slowdown > 0:
        return (
            f"timer=sync slowed the step by {units.format_fraction(slowdown)}: it waits for the device at every phase"
        )
    if slowdown > SLOWDOWN_FRACTION:
        return f"timing by phase slowed the step by {units.format_fraction(slowdown)}"
    return None


def _describe_ranks(records: Sequence[RunRecord]) -> str | None:
    """What the run says in which ranks waited longest."""
    summaries = [record.summary for record in records if record.summary and record.summary.ranks]
    worst = max(summaries, key=_wait_fraction, default=None)
    if worst is None or _wait_fraction(worst) <= WAIT_FRACTION:
        return None
    wait, share = units.format_duration(longest_wait_s(worst)), units.format_fraction(_wait_fraction(worst))
    others = f"in backward the others wait up to {wait} ({share} of the step) for it"
    return f"rank {worst.phases_rank} is the slowest: {others}"


def _wait_fraction(summary: RunSummary) -> float:
    return (longest_wait_s(summary) or 0.0) / summary.step.mean_s


# ---- what to do about noise ----


def suggest_rerun(records: Sequence[RunRecord]) -> str:
    """What to do about these runs' noise, in terms of the machine's load and the command line."""
    protocols = [record.request.protocol for record in records]
    num_epochs = max((protocol.epochs or 0 for protocol in protocols), default=0)
    timed_s = max((protocol.timed_s for protocol in protocols), default=0.0)
    longer = f"epochs={3 * num_epochs}" if num_epochs else f"timed_s={max(LONGER_S, 3 * timed_s):g}"
    ways = ["when the machine is idle", f"longer (protocol.{longer})", "on fewer threads (device.num_threads=1)"]
    if any(protocol.name == OWN_SCRIPT for protocol in protocols):  # it has its own ways of being told so
        ways[1:] = ["longer", "on fewer threads (torch.set_num_threads(1))"]
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


# ---- a study ----


def find_findings(study: Study) -> tuple[Finding, ...]:
    """What a study's measured cells together say, and what to do about those that are too noisy."""
    labels = [label_cell(study, cell) for cell in study.cells]
    findings = [*find_study_findings(study.cell_frame, labels), *_gather_special_findings(study, labels)]
    doubtful = noisy(study.cell_frame).tolist()
    records = [r for cell, is_doubtful in zip(study.cells, doubtful, strict=True) if is_doubtful for r in cell.records]
    findings += [Finding(subject="action", text=suggest_rerun(records))] if any(doubtful) else []
    return tuple(findings)


def _gather_special_findings(study: Study, labels: Sequence[str]) -> list[Finding]:
    """Each thing out of the ordinary once: of the first cell that has it, and in how many more cells it is so."""
    by_subject: dict[str, list[str]] = {}
    has_several = sum(1 for cell in study.cells if cell.ok_records) > 1
    for cell, label, row in zip(study.cells, labels, rows_of(study.cell_frame), strict=True):
        for finding in find_special_findings(row, cell.ok_records) if cell.ok_records else []:
            text = f"{label}: {finding.text}" if has_several else finding.text
            by_subject.setdefault(finding.subject, []).append(text)
    return [
        Finding(subject=subject, text=texts[0] + _count_others(len(texts) - 1)) for subject, texts in by_subject.items()
    ]


def _count_others(count: int) -> str:
    return f"; likewise in {units.format_count(count, 'other cell')}" if count else ""


def find_study_findings(cells: pd.DataFrame, labels: Sequence[str]) -> tuple[Finding, ...]:
    """What all measured cells together say, the wait for data first; `labels` name the cells in their order."""
    names = pd.Series(list(labels), index=cells.index, dtype="object")
    frame = measured(cells)
    if frame.empty:
        return ()
    findings = []
    data_fraction = frame["data_fraction"].astype("float64")
    waiting = frame[data_fraction > DATA_BOUND_FRACTION]
    if not waiting.empty:
        worst = waiting.loc[data_fraction.idxmax()]
        findings.append(
            Finding(
                subject="data",
                text=f"{len(waiting)} of {units.format_count(len(frame), 'cell')} "
                f"{'waits' if len(waiting) == 1 else 'wait'} for data more than "
                f"{units.format_fraction(DATA_BOUND_FRACTION)} of the step "
                f"(worst: {names[worst.name]}: {units.format_fraction(worst['data_fraction'])})",
            )
        )
    findings += _find_largest_phases(frame)
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


def _find_largest_phases(cells: pd.DataFrame) -> list[Finding]:
    """What most time goes to, the phase that leads in most of these cells first."""
    tops = [top for top in map(largest_phase, rows_of(cells)) if top is not None]
    names = [name for name, _ in tops]
    findings = []
    for phase in sorted(
        dict.fromkeys(names), key=lambda name: (-names.count(name), [*PHASES, MERGED_PHASE].index(name))
    ):
        own = [share for name, share in tops if name == phase]
        low, high = units.format_fraction(min(own)), units.format_fraction(max(own))
        span = low if low == high else f"{low.removesuffix(' %')}–{high}"
        where = "" if len(cells) == 1 else f" in {len(own)} of {len(cells)} cells"
        findings.append(Finding(subject="phase", text=f"most time goes to {phase}{where} ({span} of the step)"))
    return findings
