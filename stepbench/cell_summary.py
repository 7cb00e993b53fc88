"""The content of `timing_summary.yaml`: one cell over its rounds, in plain keys, units in their names."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stepbench import advice, axes
from stepbench.cells import Cell
from stepbench.flop_rates import flop_columns
from stepbench.frames import merge_summaries
from stepbench.record import PHASES, PhaseSummary, RunRecord, RunSummary
from stepbench.statistics import DEVICE

QUANTITIES = ("min", "p5", "p25", "p75", "p95", "p99", "max")
FOUR_WAY = ("data", "forward", "backward")
"""The tutorial's view: these three phases; its `other` is all the rest."""


def four_way_means(means_s: Mapping[str, float | None]) -> dict[str, float | None]:
    """Mean seconds per step as data, forward, backward and other, where other is the rest; unknown stays unknown."""
    rest = [value for phase, value in means_s.items() if phase not in FOUR_WAY]
    known = [value for value in rest if value is not None]
    return {**{phase: means_s[phase] for phase in FOUR_WAY}, "other": sum(known) if len(known) == len(rest) else None}


def four_way_shares(means_s: Mapping[str, float | None]) -> dict[str, float | None]:
    """The four-way view as fractions of the mean step."""
    total_s = sum(value for value in means_s.values() if value is not None)
    return {
        name: value / total_s if value is not None and total_s else None
        for name, value in four_way_means(means_s).items()
    }


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
        if record.flop is not None:
            summary["flop"] = _known(**flop_columns([record])) | _plain(record.flop)
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
    row = merge_summaries(summaries)
    means = {phase: row[f"{phase}_mean_s"] for phase in PHASES}
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
    shares = four_way_shares(means)
    return {
        "findings": [finding.text for finding in advice.find_cell_findings(row, cell.ok_records)],
        "step": step,
        "timeline": row["timeline"],
        "phases": _phases([summary.phases for summary in summaries]),
        **_device_view(row, summaries),
        "four_way_view": {
            name: {"mean_s": mean, "share_fraction": shares[name]} for name, mean in four_way_means(means).items()
        },
        "throughput": {"samples_per_s": row["samples_per_s"]},
        "note": "step time is a median, throughput all samples over all wall time of the same steps",
        "timed": {
            "num_steps": row["num_steps"],
            "num_batches": row["num_batches"],
            "num_samples": row["num_samples"],
            "measured_s": row["measured_s"],
            "effective_sample_size": row["effective_sample_size"],
            "num_skipped_steps": row["num_skipped_steps"],
        },
        "warmup": {"num_batches": row["num_warmup_batches"], "seconds": row["warmup_s"]},
        **_timer(row, cell.ok_records),
        **_compilation(row, cell.ok_records),
        **_ranks(summaries[-1]),
    }


def _phases(phases_of_runs: Sequence[Sequence[PhaseSummary]]) -> dict[str, Any]:
    """Each phase over the runs of a cell: medians of the runs' numbers; null where nothing is known of it."""
    quantities = [f"{name}_s" for name in ("median", "mean", *QUANTITIES)]
    phases: dict[str, Any] = {}
    for i, phase in enumerate(PHASES):
        known = [own[i] for own in phases_of_runs if own[i].step is not None]
        own: dict[str, Any] = {
            name: statistics.median(getattr(item.step, name) for item in known) if known else None
            for name in quantities
        }
        shares = [item.share_fraction for item in known if item.share_fraction is not None]
        share_fraction = statistics.median(shares) if shares else None
        phases[phase] = {"share_fraction": share_fraction, **own, "spread": _spread(own)}
    return phases


def _device_view(row: Mapping[str, Any], summaries: Sequence[RunSummary]) -> dict[str, Any]:
    """On a device's timeline: the host's phases, and what the device was kept from its work by, in medians per step.

    Its idle time is at least the wait for data: gaps between kernels inside a phase are not seen.
    """
    if row["timeline"] != DEVICE:
        return {}
    exposed = {"data_s": row["data_s"], "transfer_s": row["transfer_s"], "idle_at_least_s": row["data_s"]}
    return {"host_phases": _phases([summary.host_phases for summary in summaries]), "exposed": exposed}


def _timer(row: Mapping[str, Any], records: Sequence[RunRecord]) -> dict[str, Any]:
    """What timing by phase cost, where block sampling left out some steps, and where the timer had to wait."""
    timer = _known(
        slowdown_fraction=row["timer_slowdown_fraction"],
        num_sampled_steps=row["num_sampled_steps"],
        num_forced_waits=sum(record.num_forced_waits for record in records) or None,
    )
    return {"timer": timer} if timer else {}


def _compilation(row: Mapping[str, Any], records: Sequence[RunRecord]) -> dict[str, Any]:
    """What each round compiled; a later one may find a part of it in a cache."""
    rounds = [{"round": r.request.round, **_plain(r.compilation)} for r in records if r.compilation]
    return {"compilation": {"num_compiled_batches": row["num_compiled_batches"], "rounds": rounds}} if rounds else {}


def _ranks(summary: RunSummary) -> dict[str, Any]:
    """The ranks of the last round; the phases are those of the rank that the others waited for."""
    ranks = [
        dataclasses.asdict(rank) | {"phase_means_s": dict(zip(PHASES, rank.phase_means_s, strict=True))}
        for rank in summary.ranks
    ]
    return {"phases_rank": summary.phases_rank, "ranks": ranks} if ranks else {}


def _spread(values: Mapping[str, Any]) -> float | None:
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
