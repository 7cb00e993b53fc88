"""When a run is warm and when it has measured enough. Knows nothing of Lightning, torch or clocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stepbench.clock import NS_PER_S
from stepbench.record import BatchTiming, Protocol

SLOW_BATCH_S = 0.2
"""Where a batch takes longer than this, fewer of them are enough: the spread of long batches is relatively small."""

SLOW_TIMED_BATCHES = 10

PATIENCE = 20
"""How many times its planned length a run may take until its first optimizer step."""


class ProtocolRule:
    """Follows a run batch by batch. The warm-up ends, and the run stops, only where an optimizer step is complete.

    The warm-up does not end before an optimizer has really stepped, which a gradient scaler may put off, and batches in
    which a model was compiled do not count: the warm-up starts anew behind one, and later ones are not timed.
    """

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._start_ns = 0
        self._warmup_start_ns = 0
        self._num_warmup_counted = 0
        self._timed_ns = 0
        self._num_timed = 0
        self._last_ns = 0
        self._num_batches = 0
        self._has_stepped = False
        self.num_warmup_batches: int | None = None
        """How many batches the warm-up took; None while it lasts."""

    def start(self, now_ns: int) -> None:
        """Training starts."""
        self._start_ns = self._warmup_start_ns = self._last_ns = now_ns

    def batch_done(self, now_ns: int, *, completes_step: bool, took_step: bool = True, compiled: bool = False) -> bool:
        """A batch has ended; returns whether the run is to stop (with `epochs` only the last one's end stops it)."""
        self._num_batches += 1
        self._has_stepped |= took_step
        batch_ns, self._last_ns = now_ns - self._last_ns, now_ns
        if self.num_warmup_batches is None:
            self._follow_warmup(now_ns, completes_step=completes_step, compiled=compiled)
            return self._is_without_steps(now_ns)
        if not compiled:
            self._num_timed += 1
            self._timed_ns += batch_ns
        return completes_step and self._protocol.epochs is None and self._is_enough()

    def _follow_warmup(self, now_ns: int, *, completes_step: bool, compiled: bool) -> None:
        if compiled:
            self._warmup_start_ns, self._num_warmup_counted = now_ns, 0
            return
        self._num_warmup_counted += 1
        elapsed_s = (now_ns - self._warmup_start_ns) / NS_PER_S
        is_long = self._num_warmup_counted >= self._protocol.warmup_batches and elapsed_s >= self._protocol.warmup_s
        if is_long and completes_step and self._has_stepped:
            self.num_warmup_batches = self._num_batches

    def _is_enough(self) -> bool:
        timed_s = self._timed_ns / NS_PER_S
        enough = self._protocol.timed_batches
        if timed_s > SLOW_BATCH_S * self._num_timed:
            enough = min(SLOW_TIMED_BATCHES, enough)
        return self._num_timed >= enough and timed_s >= self._protocol.timed_s

    def _is_without_steps(self, now_ns: int) -> bool:
        """Whether a run has gone on far longer than it should without a single optimizer step, and never will stop."""
        enough = PATIENCE * (self._protocol.warmup_batches + self._protocol.timed_batches)
        enough_s = PATIENCE * (self._protocol.warmup_s + self._protocol.timed_s)
        is_late = self._num_batches >= enough and (now_ns - self._start_ns) / NS_PER_S >= enough_s
        return is_late and not self._has_stepped and self._protocol.epochs is None


def find_warmup(rows: Sequence[BatchTiming], protocol: Protocol) -> int | None:
    """How many batches of a run that has ended were its warm-up; None: all of them."""
    rule, now_s = ProtocolRule(protocol), 0.0
    rule.start(0)
    for row in rows:
        now_s += row.batch_s
        rule.batch_done(
            round(now_s * NS_PER_S),
            completes_step=row.took_optimizer_step or row.skipped_by_scaler,
            took_step=row.took_optimizer_step,
            compiled=row.compiled,
        )
    return rule.num_warmup_batches


def mark_warmup(rows: Sequence[BatchTiming], num_warmup_batches: int | None) -> list[BatchTiming]:
    """The rows with their warm-up marked: whole optimizer steps, and never more than half of them.

    A run that the data or the user's code ended early, or whose epochs are short, keeps its later half for the summary.
    """
    steps = [row.step for row in rows]
    if not steps:
        return []
    first_step, last_step = steps[0], steps[-1]
    half = first_step + (last_step - first_step + 1) // 2
    wanted = half if num_warmup_batches is None or num_warmup_batches >= len(rows) else steps[num_warmup_batches]
    first_timed_step = min(wanted, half)
    return [dataclasses.replace(row, warmup=row.step < first_timed_step) for row in rows]
