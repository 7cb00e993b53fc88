"""Pure functions over numbers: the summary of a run. No files, no printing, no torch; durations are in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from stepbench.record import PHASES, BatchTiming, Distribution, Interval, PhaseSummary, RunSummary

MIN_EFFECTIVE_SAMPLE_SIZE = 6.0
"""Below it a run's own steps say too little for an interval (STATISTICS S8)."""

NORMAL_QUANTILE_95 = 1.959964
"""The 0.975 quantile of the standard normal distribution."""


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """The `fraction` quantile of values in ascending order, linear between neighbours (Hyndman and Fan's type 7)."""
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Iterable[float]) -> float:
    """The middle value. Raises IndexError where there is none."""
    return quantile(sorted(values), 0.5)


def describe(values: Sequence[float]) -> Distribution:
    """The distribution of durations in seconds, at least one."""
    ordered = sorted(values)
    return Distribution(
        median_s=quantile(ordered, 0.5),
        mean_s=math.fsum(ordered) / len(ordered),
        min_s=ordered[0],
        p5_s=quantile(ordered, 0.05),
        p25_s=quantile(ordered, 0.25),
        p75_s=quantile(ordered, 0.75),
        p95_s=quantile(ordered, 0.95),
        p99_s=quantile(ordered, 0.99),
        max_s=ordered[-1],
    )


def spread(distribution: Distribution) -> float | None:
    """Interquartile range over median, a ratio; None where the median is zero (a phase that took no time)."""
    if distribution.median_s == 0:
        return None
    return (distribution.p75_s - distribution.p25_s) / distribution.median_s


def effective_sample_size(values: Sequence[float]) -> float:
    """How many independent values a series is worth for its median, from 1 to its length.

    n / tau, where tau is the largest of 1 + 2 * sum of the autocorrelations of the indicator [value > median], up to
    each lag until the first lag k >= 5 tau (Sokal's automatic window). The largest, because in a drifting series the
    later terms cancel the earlier ones. A constant series has no correlation and counts in full.
    """
    n = len(values)
    middle = median(values)
    above = [1.0 if value > middle else 0.0 for value in values]
    mean = sum(above) / n
    centred = [value - mean for value in above]
    variance = sum(value * value for value in centred) / n
    if variance == 0:
        return float(n)
    tau = largest = 1.0
    for lag in range(1, n):
        covariance = sum(a * b for a, b in zip(centred, centred[lag:], strict=False)) / n
        tau += 2 * covariance / variance
        largest = max(largest, tau)
        if lag >= 5 * tau:
            break
    return n / largest


def interval_within_run(values: Sequence[float]) -> Interval | None:
    """An order-statistic interval for the median of one run's steps, widened for their autocorrelation (S8, one round).

    It leaves out everything that differs from run to run, hence the basis `one run`. None below six effective steps.
    """
    size = effective_sample_size(values)
    if size < MIN_EFFECTIVE_SAMPLE_SIZE:
        return None
    half_width = NORMAL_QUANTILE_95 * 0.5 / math.sqrt(size)
    ordered = sorted(values)
    return Interval(
        low_s=quantile(ordered, max(0.0, 0.5 - half_width)),
        high_s=quantile(ordered, min(1.0, 0.5 + half_width)),
        coverage=0.95,
        basis="one run",
    )


def summarize_run(rows: Sequence[BatchTiming]) -> RunSummary | None:
    """Summarize a run over its timed optimizer steps; None where no whole step was timed.

    A step is all batches that share a step number; a step whose last batch did not update the weights is left out.
    """
    timed = [row for row in rows if not row.warmup]
    steps = [list(group) for _, group in groupby(timed, key=lambda row: row.step)]
    steps = [step for step in steps if step[-1].took_optimizer_step or step[-1].skipped_by_scaler]
    if not steps:
        return None
    batches = [row for step in steps for row in step]
    step_s = [math.fsum(row.batch_s for row in step) for step in steps]
    measured_s = math.fsum(step_s)
    counts = [row.num_samples for row in batches if row.num_samples is not None]
    num_samples = sum(counts) if len(counts) == len(batches) else None
    warmup = [row for row in rows if row.warmup]
    return RunSummary(
        num_warmup_batches=len(warmup),
        warmup_s=math.fsum(row.batch_s for row in warmup),
        num_batches=len(batches),
        num_steps=len(steps),
        num_samples=num_samples,
        measured_s=measured_s,
        samples_per_s=None if num_samples is None or measured_s == 0 else num_samples / measured_s,
        step=describe(step_s),
        step_interval=interval_within_run(step_s),
        effective_sample_size=effective_sample_size(step_s),
        phases=tuple(_summarize_phase(phase, steps, measured_s) for phase in PHASES),
    )


def _summarize_phase(phase: str, steps: Sequence[Sequence[BatchTiming]], measured_s: float) -> PhaseSummary:
    phase_s = [math.fsum(getattr(row, f"{phase}_s") for row in step) for step in steps]
    return PhaseSummary(
        phase=phase,
        step=describe(phase_s),
        share_fraction=math.fsum(phase_s) / measured_s if measured_s else 0.0,
    )
