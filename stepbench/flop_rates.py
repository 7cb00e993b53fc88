"""Floating-point rates of a run: its counted operations over its measured time, and the share of the device's peak."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepbench import units
from stepbench.record import RunRecord

MAX_NAMED_OPERATORS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopRate:
    """What a run computed per optimizer step over all devices [FLOP] and per second [FLOP/s].

    `utilization` is the model FLOP utilization, a fraction of what all its devices can do at most (Chowdhery et al.,
    PaLM, 2022, appendix B), None where no peak is known. With `is_lower_bound` some operators had no formula.
    """

    flop_per_step: int
    flop_per_s: float
    utilization: float | None
    is_lower_bound: bool


def flop_rate(record: RunRecord | None) -> FlopRate | None:
    """The rates over all timed steps of a run, a ratio of sums; None where nothing was counted or timed."""
    if record is None or record.flop is None or record.flop.flop_per_step is None or record.summary is None:
        return None
    flop, summary = record.flop, record.summary
    assert flop.flop_per_step is not None
    per_s = flop.flop_per_step * summary.num_steps / summary.measured_s
    num_devices = (record.effective and record.effective.num_devices) or record.request.spec.num_devices
    peak = flop.peak_flop_per_s
    return FlopRate(
        flop_per_step=flop.flop_per_step,
        flop_per_s=per_s,
        utilization=None if peak is None else per_s / (peak * num_devices),
        is_lower_bound=bool(flop.unknown_operators),
    )


def flop_columns(records: Sequence[RunRecord]) -> dict[str, Any]:
    """The rates of a cell's runs as columns of a table, medians over them; all None where they are unknown."""
    rates = [rate for rate in map(flop_rate, records) if rate is not None]
    utilizations = [rate.utilization for rate in rates if rate.utilization is not None]
    return {
        "flop_per_step": rates[0].flop_per_step if rates else None,
        "flop_per_s": statistics.median(rate.flop_per_s for rate in rates) if rates else None,
        "mfu_fraction": statistics.median(utilizations) if utilizations else None,
        "mfu_is_lower_bound": any(rate.is_lower_bound for rate in rates) if utilizations else None,
    }


def describe_flop(record: RunRecord) -> str | None:
    """A run's rates in a line, with what the count leaves out; None where counting was not asked for."""
    flop, rate = record.flop, flop_rate(record)
    if flop is None:
        return None
    if rate is None:
        return None if flop.problem is None else f"FLOP not counted: {flop.problem}"
    text = f"{units.format_flop(rate.flop_per_step)} per step, {units.format_flop(rate.flop_per_s)}/s"
    if rate.utilization is not None:
        bound = "at least " if rate.is_lower_bound else ""
        peak = units.format_flop(flop.peak_flop_per_s)
        text += f", {bound}{units.format_fraction(rate.utilization)} of the peak of {peak}/s ({flop.peak_source})"
    if rate.is_lower_bound:
        names = flop.unknown_operators[:MAX_NAMED_OPERATORS]
        more = len(flop.unknown_operators) - len(names)
        text += f"; not counted: {', '.join(names)}" + (f" and {more} more" if more else "")
    return text
