"""Tidy frames of runs and cells: what the columns of `runs.csv` and `cells.csv` are, and how rounds become a cell."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from stepbench import units
from stepbench.axes import Axis, Value, is_number, list_names, requested_column
from stepbench.cells import Cell
from stepbench.flop_rates import flop_columns
from stepbench.record import PHASES, Distribution, EffectiveSettings, RunRecord, RunSummary

TRUSTED, NOISY = "ok", "noisy"
"""The verdicts on a measured cell's numbers (STATISTICS S11); a cell without numbers has None."""

MERGED_PHASE = "forward and backward"
"""What forward is called where it holds a backward that cannot be told from it."""


def _requested(values: Mapping[str, Value], axes: Sequence[Axis]) -> dict[str, Value]:
    names = dict.fromkeys([*(name for name in values if "." not in name), *(axis.name for axis in axes)])
    shown = {axis.name for axis in axes} | (names.keys() - {"device", "sweep"})
    return {requested_column(name): values.get(name) for name in names if name in shown}


def _effective(record: RunRecord | None) -> dict[str, Value]:
    effective = (record and record.effective) or EffectiveSettings()
    values = {field.name: getattr(effective, field.name) for field in dataclasses.fields(effective)}
    return {f"effective_{name}": list_names(v) if isinstance(v, tuple) else v for name, v in values.items()}


def run_row(cell: Cell, record: RunRecord | None, values: Mapping[str, Value], axes: Sequence[Axis]) -> dict[str, Any]:
    """A row of `runs.csv`; a cell that no run has visited has one without round and numbers."""
    identity: dict[str, Any] = {
        "cell": cell.name,
        "round": None,
        "attempt": None,
        "status": cell.status,
        "reason": cell.reason,
    }
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
    return (
        identity
        | _requested(values, axes)
        | _effective(record)
        | summary_columns(record.summary if record else None)
        | flop_columns([record] if record else [])
        | outcome
    )


def summary_columns(summary: RunSummary | None) -> dict[str, Any]:
    """A run's summary as columns, all None without one. Per step, `data_s` is the median and `data_mean_s` the mean.

    Phases are those of the column `timeline`; where that is the device's, `host_data_s` and so on are the medians of
    the host's, which are None otherwise. `rank_wait_s` is the longest mean wait of a rank for the others.
    """
    step, interval = (summary.step, summary.step_interval) if summary else (None, None)
    phases = {phase.phase: phase for phase in summary.phases} if summary else {}
    steps = {name: phase.step for name, phase in phases.items()}
    host_steps = {phase.phase: phase.step for phase in summary.host_phases} if summary else {}
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
        "timeline": summary and summary.timeline,
        **{f"{phase}_s": _median_s(steps.get(phase)) for phase in PHASES},
        **{f"{phase}_mean_s": _mean_s(steps.get(phase)) for phase in PHASES},
        **{f"{phase}_fraction": phases[phase].share_fraction if phase in phases else None for phase in PHASES},
        **{f"host_{phase}_s": _median_s(host_steps.get(phase)) for phase in PHASES},
        "num_steps": summary and summary.num_steps,
        "num_sampled_steps": summary and summary.num_sampled_steps,
        "timer_slowdown_fraction": summary and summary.timer_slowdown_fraction,
        "num_skipped_steps": summary and summary.num_skipped_steps,
        "num_compiled_batches": summary and summary.num_compiled_batches,
        "num_batches": summary and summary.num_batches,
        "num_samples": summary and summary.num_samples,
        "measured_s": summary and summary.measured_s,
        "num_warmup_batches": summary and summary.num_warmup_batches,
        "warmup_s": summary and summary.warmup_s,
        "effective_sample_size": summary and summary.effective_sample_size,
        "phases_rank": summary and summary.phases_rank,
        "rank_wait_s": longest_wait_s(summary) if summary else None,
    }


def _median_s(distribution: Distribution | None) -> float | None:
    return None if distribution is None else distribution.median_s


def _mean_s(distribution: Distribution | None) -> float | None:
    return None if distribution is None else distribution.mean_s


def longest_wait_s(summary: RunSummary) -> float | None:
    """The longest mean time per step that a rank waited for the others; None with a single rank or where unknown."""
    return max((rank.mean_wait_s for rank in summary.ranks if rank.mean_wait_s is not None), default=None)


def has_merged_backward(row: Mapping[str, Any]) -> bool:
    """Whether backward is part of forward in a row of summary columns, because nothing told them apart."""
    return bool(pd.isna(row["backward_fraction"]) and not pd.isna(row["forward_fraction"]))


def largest_phase(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """The phase that most time goes to and its share, from a row of summary columns; None where no phase is known."""
    shares = {phase: row[f"{phase}_fraction"] for phase in PHASES if not pd.isna(row[f"{phase}_fraction"])}
    if not shares:
        return None
    top = max(shares, key=lambda phase: shares[phase])
    name = MERGED_PHASE if top == "forward" and has_merged_backward(row) else top
    return name, float(shares[top])


def spread_of_steps(row: Mapping[str, Any]) -> float | None:
    """Interquartile range over median of the step times in a row of summary columns."""
    median_s, low_s, high_s = (row[name] for name in ("median_step_s", "p25_step_s", "p75_step_s"))
    if any(pd.isna(value) for value in (median_s, low_s, high_s)) or median_s == 0:
        return None
    return float((high_s - low_s) / median_s)


def is_noisy(row: Mapping[str, Any]) -> bool:
    """Whether a row's median step time is too uncertain to be compared with another.

    Its interval is wider than ± `units.WIDE_FRACTION`; or there is none, and the steps are spread wider than that.
    """
    median_s, low_s, high_s = (row[name] for name in ("median_step_s", "step_low_s", "step_high_s"))
    if pd.isna(median_s):
        return False
    if pd.isna(low_s) or pd.isna(high_s):
        return (spread_of_steps(row) or 0.0) > 2 * units.WIDE_FRACTION
    return bool(high_s - low_s > 2 * units.WIDE_FRACTION * median_s)


def cell_row(cell: Cell, values: Mapping[str, Value], axes: Sequence[Axis], series: str) -> dict[str, Any]:
    """A row of `cells.csv`: a cell over its rounds."""
    ok = cell.ok_records
    summary = merge_summaries([record.summary for record in ok if record.summary])
    verdict = None if not ok else NOISY if is_noisy(summary) else TRUSTED
    identity = {"cell": cell.name, "series": series, "status": cell.status, "reason": cell.reason, "verdict": verdict}
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
        | summary
        | {"samples_per_step": _samples_per_step(cell)}
        | flop_columns(ok)
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
        if name in ("timeline", "phases_rank"):
            merged[name] = column[0] if len(set(column)) == 1 else None
        elif name == "num_sampled_steps":
            merged[name] = _sum_sampled(rows)
        elif name.startswith("num_") or name in ("measured_s", "warmup_s"):
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


def _sum_sampled(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Steps timed by phase over all rounds; None where that is every step of every round."""
    if all(row["num_sampled_steps"] is None for row in rows):
        return None
    counts: list[int] = [row["num_steps" if row["num_sampled_steps"] is None else "num_sampled_steps"] for row in rows]
    return sum(counts)


def _samples_per_step(cell: Cell) -> int | None:
    """Samples of a whole step over all devices, by the settings that ran; a ragged last batch is not the rule.

    None where neither the settings nor the runs tell.
    """
    spec, record = cell.request.spec, cell.last_record
    effective = (record and record.effective) or EffectiveSettings()
    batch_size = effective.batch_size or spec.batch_size
    micro_batches = effective.accumulate_grad_batches or spec.accumulate_grad_batches or 1
    return None if batch_size is None else batch_size * micro_batches * (effective.num_devices or spec.num_devices)


def make_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a frame in which whole numbers stay whole where some are unknown."""
    frame: pd.DataFrame = pd.DataFrame(list(rows))
    for name in frame.columns:
        known = [row[name] for row in rows if row[name] is not None]
        if known and all(isinstance(value, int) and not isinstance(value, bool) for value in known):
            frame[name] = frame[name].astype("Int64")
        elif known and all(is_number(value) for value in known):
            frame[name] = frame[name].astype("float64")
    return frame


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame, each by its columns' names."""
    return [{str(name): value for name, value in row.items()} for _, row in frame.iterrows()]


def sort_cells(frame: pd.DataFrame, series: Sequence[str], x_axis: Axis | None) -> pd.DataFrame:
    """Cells series by series, in the numeric order of x; equal ones keep the sweep's order."""
    keys = pd.DataFrame({"series": [list(series).index(label) for label in frame["series"]]}, index=frame.index)
    if x_axis is not None:
        keys["x"] = frame[x_axis.column].astype("float64")
    order = keys.sort_values(list(keys.columns), kind="stable").index
    ordered: pd.DataFrame = frame.loc[order].reset_index(drop=True)
    return ordered
