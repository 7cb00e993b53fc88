"""Pure functions over numbers: the summary of a run. No files, no printing, no torch; durations are in seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from stepbench.record import PHASES, BatchTiming, Distribution, Interval, PhaseSummary, RankSummary, RunSummary

Step = list[BatchTiming]
"""The batches of one optimizer step on one rank."""

HOST, DEVICE = "host", "device"
"""The timelines on which phases are told apart."""

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


# ---- the summary of a run ----


def summarize_run(rows: Sequence[BatchTiming]) -> RunSummary | None:
    """Summarize a run over its timed optimizer steps; None where no whole step was timed.

    A step is all batches that share a step number. Left out are steps whose last batch did not update the weights and
    steps in which a model was compiled; with several ranks also those that some rank lacks.

    Phases are those of the steps in which every batch was timed by phase. They have no numbers where block sampling
    left out every step; backward has none where in any of these steps the training step ran autograd itself, and then
    forward holds both in all of them, so that nothing is guessed.

    With several ranks a step lasts as long as on its slowest rank; batches and the warm-up are counted on one rank.
    """
    ranks = sorted({row.rank for row in rows})
    rows_by_rank = [[row for row in rows if row.rank == rank] for rank in ranks]
    steps_by_rank = _match_steps(rows_by_rank)
    if not steps_by_rank or not steps_by_rank[0]:
        return None
    waits_s = [_mean_wait_s(steps) for steps in steps_by_rank]
    awaited = min(range(len(ranks)), key=lambda i: (waits_s[i] is None, waits_s[i] or 0.0))
    steps = steps_by_rank[awaited]
    sampled = [step for step in steps if _is_timed_by_phase(step)]
    timeline = _choose_timeline(steps_by_rank)
    step_s = [max(times) for times in zip(*(map(_duration_s, own) for own in steps_by_rank), strict=True)]
    measured_s = math.fsum(step_s)
    num_samples = _count_samples(row for own in steps_by_rank for step in own for row in step)
    warmup = [row for row in rows_by_rank[awaited] if row.warmup]
    return RunSummary(
        num_warmup_batches=len(warmup),
        warmup_s=math.fsum(row.batch_s for row in warmup),
        num_batches=sum(map(len, steps)),
        num_steps=len(steps),
        num_samples=num_samples,
        measured_s=measured_s,
        samples_per_s=None if num_samples is None or measured_s == 0 else num_samples / measured_s,
        step=describe(step_s),
        step_interval=interval_within_run(step_s),
        effective_sample_size=effective_sample_size(step_s),
        phases=_summarize_phases(sampled, timeline),
        timeline=timeline,
        host_phases=_summarize_phases(sampled, HOST) if timeline == DEVICE else (),
        num_sampled_steps=len(sampled) if len(sampled) < len(steps) else None,
        timer_slowdown_fraction=_timer_slowdown_fraction(steps),
        num_skipped_steps=sum(step[-1].skipped_by_scaler for step in steps),
        num_compiled_batches=len({(row.epoch, row.batch) for row in rows if row.compiled}),
        phases_rank=ranks[awaited],
        ranks=tuple(
            _summarize_rank(rank, own, wait_s, timeline)
            for rank, own, wait_s in zip(ranks, steps_by_rank, waits_s, strict=True)
            if len(ranks) > 1
        ),
    )


def _find_timed_steps(rows: Sequence[BatchTiming]) -> list[Step]:
    """The steps of one rank that count: timed as a whole, with an update or one that the scaler skipped."""
    timed = [row for row in rows if not row.warmup]
    steps = [list(group) for _, group in groupby(timed, key=lambda row: row.step)]
    ended = [step for step in steps if step[-1].took_optimizer_step or step[-1].skipped_by_scaler]
    return [step for step in ended if not any(row.compiled for row in step)]


def _match_steps(rows_by_rank: Sequence[Sequence[BatchTiming]]) -> list[list[Step]]:
    """The timed steps that all ranks have, rank by rank; a step is known by its batches."""
    steps_by_rank = [_find_timed_steps(rows) for rows in rows_by_rank]
    if len(steps_by_rank) < 2:
        return steps_by_rank
    names = {
        id(row): key
        for rows, own in zip(rows_by_rank, _match_batches(rows_by_rank), strict=True)
        for row, key in zip(rows, own, strict=True)
    }

    def key(step: Step) -> tuple[tuple[int, int], ...]:
        return tuple(names[id(row)] for row in step)

    common = set.intersection(*({key(step) for step in steps} for steps in steps_by_rank))
    return [[step for step in steps if key(step) in common] for steps in steps_by_rank]


def _match_batches(rows_by_rank: Sequence[Sequence[BatchTiming]]) -> list[list[tuple[int, int]]]:
    """A name for every row, the same for the batches that the ranks trained together.

    Their epoch and number; but where ranks have epochs of different length, gradients are averaged over the batches
    that come at the same place in each rank's run.
    """
    by_number = [[(row.epoch, row.batch) for row in rows] for rows in rows_by_rank]
    lasts = [dict(own) for own in by_number]  # the last batch of each epoch
    shared = [epoch for epoch in lasts[0] if all(epoch in own for own in lasts)]
    if all(own[epoch] == lasts[0][epoch] for own in lasts for epoch in shared[:-1]):
        return by_number
    return [[(0, place) for place in range(len(rows))] for rows in rows_by_rank]


def _duration_s(step: Step) -> float:
    return math.fsum(row.batch_s for row in step)


def _is_timed_by_phase(step: Step) -> bool:
    return all(row.data_s is not None for row in step)


def _count_samples(rows: Iterable[BatchTiming]) -> int | None:
    total = 0
    for row in rows:
        if row.num_samples is None:
            return None
        total += row.num_samples
    return total


def _choose_timeline(steps_by_rank: Sequence[Sequence[Step]]) -> str:
    """`device` where every batch that was timed by phase, on whatever rank, has a device's phases; else `host`."""
    sampled = [row for steps in steps_by_rank for step in steps if _is_timed_by_phase(step) for row in step]
    return DEVICE if sampled and all(row.device_data_s is not None for row in sampled) else HOST


def _timer_slowdown_fraction(steps: Sequence[Step]) -> float | None:
    """How much longer batches timed by phase take than those left out, as a fraction; None without one of the two.

    Means over whole blocks, not medians: on a device that runs behind the host single host times say nothing, as the
    host is held up now here, now there.
    """
    timed, left_out = (
        [row.batch_s for step in steps for row in step if (row.data_s is not None) is wanted]
        for wanted in (True, False)
    )
    if not timed or not left_out or sum(left_out) == 0:
        return None
    return (math.fsum(timed) / len(timed)) / (math.fsum(left_out) / len(left_out)) - 1


# ---- phases ----


def _summarize_phases(steps: Sequence[Step], timeline: str) -> tuple[PhaseSummary, ...]:
    """Each phase over these steps, its share one of all their time on this timeline."""
    seconds = _phase_seconds(steps, timeline)
    total_s = math.fsum(value for values in seconds.values() for value in values or ())
    return tuple(_summarize_phase(phase, seconds[phase], total_s) for phase in PHASES)


def _summarize_phase(phase: str, seconds: Sequence[float] | None, total_s: float) -> PhaseSummary:
    if seconds is None:
        return PhaseSummary(phase=phase, step=None, share_fraction=None)
    share_fraction = math.fsum(seconds) / total_s if total_s else 0.0
    return PhaseSummary(phase=phase, step=describe(seconds), share_fraction=share_fraction)


def _phase_seconds(steps: Sequence[Step], timeline: str) -> dict[str, list[float] | None]:
    """Seconds of each phase in each of these steps; None for a phase of which nothing is known."""
    if not steps:
        return dict.fromkeys(PHASES)
    prefix = "device_" if timeline == DEVICE else ""
    seconds: dict[str, list[float] | None] = {
        phase: [math.fsum(getattr(row, f"{prefix}{phase}_s") or 0.0 for row in step) for step in steps]
        for phase in PHASES
    }
    if any(row.backward_merged for step in steps for row in step):
        both = zip(seconds["forward"] or (), seconds["backward"] or (), strict=True)
        seconds |= {"forward": [forward_s + backward_s for forward_s, backward_s in both], "backward": None}
    return seconds


# ---- several ranks ----


def with_rank_waits(rows_by_rank: Sequence[Sequence[BatchTiming]]) -> list[BatchTiming]:
    """The rows of all ranks, rank after rank, each with its rank and how long it waited for the slowest, in seconds.

    Gradients are averaged inside backward, which ends on all ranks together: the rank that comes to it last has the
    shortest one, and what another's is longer is its wait. Device times where all ranks have them. The wait is None
    where a rank lacks the batch or its backward is unknown; a single rank's rows come back as they are.
    """
    if len(rows_by_rank) < 2:
        return [row for rows in rows_by_rank for row in rows]
    keys_by_rank = _match_batches(rows_by_rank)
    by_batch = [dict(zip(keys, rows, strict=True)) for keys, rows in zip(keys_by_rank, rows_by_rank, strict=True)]
    return [
        dataclasses.replace(
            row,
            rank=rank,
            rank_wait_s=_find_wait_s(row, [found.get(key) for found in by_batch]),
        )
        for rank, rows in enumerate(rows_by_rank)
        for key, row in zip(keys_by_rank[rank], rows, strict=True)
    ]


def _find_wait_s(row: BatchTiming, all_ranks: Sequence[BatchTiming | None]) -> float | None:
    """How much longer a row's backward took than the shortest among all ranks' rows of the same batch."""
    for column in ("device_backward_s", "backward_s"):
        known = [getattr(other, column) for other in all_ranks if other is not None]
        if len(known) == len(all_ranks) and None not in known:
            return float(getattr(row, column) - min(known))
    return None


def _mean_wait_s(steps: Sequence[Step]) -> float | None:
    """Mean wait for other ranks per step, over the steps in which it is known."""
    waits_s = [[row.rank_wait_s for row in step if row.rank_wait_s is not None] for step in steps]
    known_s = [math.fsum(own) for own, step in zip(waits_s, steps, strict=True) if len(own) == len(step)]
    return math.fsum(known_s) / len(known_s) if known_s else None


def _summarize_rank(rank: int, steps: Sequence[Step], wait_s: float | None, timeline: str) -> RankSummary:
    seconds = _phase_seconds([step for step in steps if _is_timed_by_phase(step)], timeline)
    return RankSummary(
        rank=rank,
        num_batches=sum(map(len, steps)),
        num_samples=_count_samples(row for step in steps for row in step),
        median_step_s=median(map(_duration_s, steps)),
        mean_wait_s=wait_s,
        phase_means_s=tuple(None if own is None else math.fsum(own) / len(own) for own in seconds.values()),
    )
