"""From marks to batch timings: a state machine over (code, nanoseconds) pairs. Knows nothing of Lightning or torch.

A window runs from one request for a batch to the next. One cursor walks over the marks and books every nanosecond of
the window to the innermost phase entered at that moment (exclusive time), so that nesting is right by itself: forward
and backward inside the optimizer step's closure, several closures in one step, hooks inside hooks. The phases of a
window therefore sum to its wall time exactly. A window that no end-of-batch mark confirms is discarded, and so is one
whose marks contradict each other: what cannot be told is not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from stepbench.record import BatchTiming

NS_PER_S = 1_000_000_000


class Mark(IntEnum):
    """What happened at a moment. The first six enter the phase of that name.

    An exception that the user's code swallows may keep backward or an optimizer's step from being left: they end with
    the action around them.
    """

    ENTER_DATA = 0
    ENTER_TRANSFER = 1
    ENTER_FORWARD = 2
    ENTER_BACKWARD = 3
    ENTER_OPTIMIZER = 4
    ENTER_OTHER = 5
    EXIT = 6
    """The end of an action: leaves the phase that it had entered, and what in it was never left."""
    FETCH = 7
    """A batch is requested: enters data and, unless nested in a phase, starts a window."""
    EXIT_BACKWARD = 8
    """Autograd has returned: leaves backward if it is the innermost phase, so that it may be marked by every hook."""
    STEP_CALLED = 9
    """An optimizer step is asked for: enters other, since forward and backward run inside it."""
    SCALED_STEP_CALLED = 10
    """The same where a gradient scaler is at work: enters optimizer, since what it does belongs to it."""
    ENTER_STEP = 11
    """An optimizer's own step starts: enters optimizer."""
    STEPPED = 12
    """An optimizer has updated its weights: leaves the step."""
    BATCH_DONE = 13
    """The batch ran to its end: its window counts."""
    VALIDATION = 14
    """Validation starts and lasts until the next request for a batch or the end of the epoch."""
    EPOCH_END = 15
    """The last window of the epoch ends here."""
    ABORT = 16
    """An exception ended the run: the open window is lost, unless all that was left of it is validation."""


_OTHER = int(Mark.ENTER_OTHER)
_PHASE_OF = {Mark.ENTER_STEP: int(Mark.ENTER_OPTIMIZER)} | {code: code for code in range(_OTHER + 1)}
_NEVER_LEFT = (Mark.ENTER_BACKWARD, Mark.ENTER_STEP)
"""Entries of the stack that no context guards: an exception may keep them from being left."""
_STEP_STARTS = (Mark.STEP_CALLED, Mark.SCALED_STEP_CALLED, Mark.ENTER_FORWARD)


class ConfirmedBatch(NamedTuple):
    """What is known of a batch at its end, one for every `BATCH_DONE` in order. A tuple: made in every batch."""

    epoch: int
    batch: int
    num_samples: int | None
    completes_step: bool = True


class PhaseAccountant:
    """Folds marks into `BatchTiming` rows; may be fed in pieces, cut anywhere between two marks.

    `rows` holds the confirmed windows, `num_discarded` counts the others.
    """

    def __init__(self) -> None:
        self.rows: list[BatchTiming] = []
        self.num_discarded = 0
        self.fetches_inside_step = False
        """Whether the training step asks for its batches itself, as `training_step(self, dataloader_iter)` does. The
        request is then no boundary: a window starts with the first call of the step after the end of the last batch."""
        self._next_step = 0
        self._previous_end: int | None = None  # end of the last window, while no window is open
        self._open = False
        self._clear(0)

    def _clear(self, now: int) -> None:
        self._stack: list[int] = []
        self._phase_ns = [0] * 6
        self._start = self._cursor = now
        self._validation_start: int | None = None
        self._num_stepped = 0
        self._is_scaled = False
        self._confirmed: ConfirmedBatch | None = None
        self._turnover_ns: int | None = None
        self._is_consistent = True

    def start_run(self) -> None:
        """Another run begins: what passed since the last one is no time between epochs."""
        self._open = False
        self._previous_end = None

    def fold(self, marks: Sequence[int], confirmed: Sequence[ConfirmedBatch]) -> None:
        """Consume `marks`, a flat series of code, nanoseconds, code, nanoseconds, …, and the batches they confirm."""
        batches = iter(confirmed)
        for code, now in zip(marks[::2], marks[1::2], strict=True):
            if self._starts_window(code):
                self._close(now)
                self._start_window(now)
            if code == Mark.EPOCH_END:
                self._close(now)
                self._previous_end = now
            elif code == Mark.ABORT:
                self._abort(now)
            elif code == Mark.BATCH_DONE:
                batch = next(batches)
                if self._open and self._validation_start is None:
                    self._book(now)
                    self._confirmed = batch
                    self._is_consistent = self._is_consistent and not self._stack
                    self._stack.clear()
            elif self._open and self._validation_start is None:
                self._book(now)
                self._move(code, now)

    def _starts_window(self, code: int) -> bool:
        if self.fetches_inside_step:
            return code in _STEP_STARTS and (not self._open or self._confirmed is not None)
        return code == Mark.FETCH and (not self._open or not self._stack or self._validation_start is not None)

    def _book(self, now: int) -> None:
        phase = _PHASE_OF[self._stack[-1]] if self._stack else _OTHER
        self._phase_ns[phase] += now - self._cursor
        self._cursor = now

    def _move(self, code: int, now: int) -> None:
        if code <= _OTHER:
            self._stack.append(code)
        elif code == Mark.FETCH:
            self._stack.append(Mark.ENTER_DATA)
        elif code == Mark.STEP_CALLED:
            self._stack.append(_OTHER)
        elif code == Mark.SCALED_STEP_CALLED:
            self._is_scaled = True
            self._stack.append(Mark.ENTER_OPTIMIZER)
        elif code == Mark.ENTER_STEP:
            self._stack.append(code)
        elif code == Mark.VALIDATION:
            if self._confirmed is not None:  # else a callback validates on its own account, inside the batch
                self._validation_start = now
        elif code == Mark.EXIT_BACKWARD:
            if self._stack and self._stack[-1] == Mark.ENTER_BACKWARD:
                self._stack.pop()
        elif code == Mark.STEPPED:
            self._num_stepped += 1
            self._leave(unguarded=(Mark.ENTER_BACKWARD,))
        else:
            self._leave(unguarded=_NEVER_LEFT)

    def _leave(self, unguarded: tuple[int, ...]) -> None:
        """Leave the innermost phase that was not entered by one of `unguarded`, and those on the way to it."""
        while self._stack and self._stack[-1] in unguarded:
            self._stack.pop()
        if self._stack:
            self._stack.pop()
        else:
            self._is_consistent = False

    def _start_window(self, now: int) -> None:
        previous_end = self._previous_end
        self._clear(now)
        self._open = True
        self._turnover_ns = None if previous_end is None else now - previous_end
        self._previous_end = None

    def _close(self, now: int) -> None:
        """End the open window at `now`; validation, if it ran, has ended the batch earlier."""
        if not self._open:
            return
        self._open = False
        if self._confirmed is None or self._stack or not self._is_consistent:
            self.num_discarded += 1
            self._next_step += self._confirmed is not None and self._confirmed.completes_step
            return
        end = now if self._validation_start is None else self._validation_start
        if self._validation_start is None:
            self._book(now)
        self._finish_row(self._confirmed, batch_ns=end - self._start, validation_ns=now - end)

    def _finish_row(self, batch: ConfirmedBatch, *, batch_ns: int, validation_ns: int) -> None:
        assert sum(self._phase_ns) == batch_ns, "the phases of a batch must sum to its wall time"
        data, transfer, forward, backward, optimizer, other = (ns / NS_PER_S for ns in self._phase_ns)
        skipped = self._is_scaled and self._num_stepped == 0
        self.rows.append(
            BatchTiming(
                epoch=batch.epoch,
                batch=batch.batch,
                step=self._next_step,
                num_samples=batch.num_samples,
                warmup=False,
                data_s=data,
                transfer_s=transfer,
                forward_s=forward,
                backward_s=backward,
                optimizer_s=optimizer,
                other_s=other,
                batch_s=batch_ns / NS_PER_S,
                validation_s=validation_ns / NS_PER_S,
                epoch_turnover_s=None if self._turnover_ns is None else self._turnover_ns / NS_PER_S,
                took_optimizer_step=batch.completes_step and not skipped,
                starts_epoch=not self.rows or self.rows[-1].epoch != batch.epoch,
                validation_ran=self._validation_start is not None,
                skipped_by_scaler=skipped,
            )
        )
        self._next_step += batch.completes_step

    def _abort(self, now: int) -> None:
        if self._open and self._validation_start is not None:
            self._close(now)
        elif self._open:
            self._open = False
            self.num_discarded += 1
