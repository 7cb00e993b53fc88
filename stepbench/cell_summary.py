"""The content of `timing_summary.yaml`: one cell over its rounds, in plain keys, units in their names."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from stepbench import advice, axes
from stepbench.cells import Cell
from stepbench.frames import merge_summaries, summary_columns
from stepbench.record import PHASES, RunRecord

QUANTITIES = ("min", "p5", "p25", "p75", "p95", "p99", "max")
FOUR_WAY = ("data", "forward", "backward")
"""The tutorial's view: these three phases; its `other` is all the rest."""


def four_way_means(means_s: dict[str, float]) -> dict[str, float]:
    """Mean seconds per step as data, forward, backward and other, where other is the rest."""
    rest = sum(value for phase, value in means_s.items() if phase not in FOUR_WAY)
    return {**{phase: means_s[phase] for phase in FOUR_WAY}, "other": rest}


def summarize_cell(cell: Cell) -> dict[str, Any]:
    """Everything worth knowing about a cell as plain data, times rounded to the nanosecond."""
    record = cell.last_record
    summary: dict[str, Any] = {"status": cell.status, "reason": cell.reason}
    if cell.reason is None:
        del summary["reason"]
    summary["rounds"] = len(cell.ok_records)
    summary["settings"] = _settings(cell, record)
    if cell.ok_records:
        summary |= _numbers(cell)
    if record is not None:
        summary["memory"] = _known(
            peak_host_memory_bytes=record.peak_host_memory_bytes,
            peak_device_memory_bytes=record.peak_device_memory_bytes,
        )
        summary["model"] = _known(
            num_parameters=record.num_parameters, num_trainable_parameters=record.num_trainable_parameters
        )
        start_up = record.start_up
        if start_up is not None:
            summary["start_up"] = _known(
                import_s=start_up.import_s, build_s=start_up.build_s, first_batch_s=start_up.first_batch_s
            )
        summary["run"] = {"started_unix_s": record.started_unix_s, "wall_s": record.wall_s}
        if record.environment is not None:
            summary["environment"] = _plain(record.environment)
    rounded: dict[str, Any] = _round(summary)
    return rounded


def _settings(cell: Cell, record: RunRecord | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"requested": axes.flatten_request(cell.request)}
    settings["requested"] |= {"protocol": cell.request.protocol.name, "timer": cell.request.timer}
    if record is not None and record.effective is not None:
        settings["effective"] = _plain(record.effective)
        settings["ran_differently"] = {
            name: f"requested {axes.label_value(requested)}, ran {axes.label_value(effective)}"
            for name, (requested, effective) in axes.find_differences(record).items()
        }
    return settings


def _numbers(cell: Cell) -> dict[str, Any]:
    summaries = [record.summary for record in cell.ok_records if record.summary]
    row = merge_summaries(summaries) if summaries else summary_columns(None)
    means = {phase: row[f"{phase}_mean_s"] for phase in PHASES}
    total = sum(means.values())
    step = {"median_s": row["median_step_s"], "mean_s": row["mean_step_s"]}
    step |= {f"{name}_s": row[f"{name}_step_s"] for name in QUANTITIES}
    step["spread"] = _spread(step)
    if row["step_low_s"] is not None:
        step["interval"] = {
            "low_s": row["step_low_s"],
            "high_s": row["step_high_s"],
            "coverage": row["interval_coverage"],
            "varied": row["interval_basis"],
        }
    phases: dict[str, Any] = {}
    for i, phase in enumerate(PHASES):
        distributions = [summary.phases[i].step for summary in summaries]
        own = {
            f"{name}_s": statistics.median(getattr(distribution, f"{name}_s") for distribution in distributions)
            for name in ("median", "mean", *QUANTITIES)
        }
        phases[phase] = {"share_fraction": row[f"{phase}_fraction"], **own, "spread": _spread(own)}
    findings = advice.find_cell_findings(row, cell.ok_records)
    return {
        "findings": [finding.text for finding in findings],
        "step": step,
        "phases": phases,
        "four_way_view": {
            name: {"mean_s": mean, "share_fraction": mean / total if total else None}
            for name, mean in four_way_means(means).items()
        },
        "throughput": {"samples_per_s": row["samples_per_s"]},
        "note": "step time is a median, throughput all samples over all wall time of the same steps",
        "timed": {
            "num_steps": row["num_steps"],
            "num_batches": row["num_batches"],
            "num_samples": row["num_samples"],
            "measured_s": row["measured_s"],
            "effective_sample_size": row["effective_sample_size"],
        },
        "warmup": {"num_batches": row["num_warmup_batches"], "seconds": row["warmup_s"]},
    }


def _spread(values: dict[str, Any]) -> float | None:
    return (values["p75_s"] - values["p25_s"]) / values["median_s"] if values["median_s"] else None


def _known(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _plain(value: Any) -> dict[str, Any]:
    pairs = {}
    for name, item in dataclasses.asdict(value).items():
        if item is None:
            continue
        if isinstance(item, tuple | list):
            item = dict(item) if all(len(entry) == 2 and not isinstance(entry, dict) for entry in item) else list(item)
        pairs[name] = item
    return pairs


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _round(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_round(item) for item in value]
    return round(value, 9) if isinstance(value, float) else value
