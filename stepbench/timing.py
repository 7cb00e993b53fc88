"""From marks to batch timings: a state machine over (code, nanoseconds) pairs. Knows nothing of Lightning or torch.

A window runs from one request for a batch to the next. One cursor walks over the marks and books every nanosecond of
the window to the innermost phase entered at that moment (exclusive time), so that nesting is right by itself: forward
and backward inside the optimizer step's closure, several closures in one step, hooks inside hooks. The phases of a
window therefore sum to its wall time exactly. A window that no end-of-batch mark confirms is discarded, and so is one
whose marks contradict each other: what cannot be told is not guessed.

Where marks also have a stamp on a device's timeline, a second cursor books that one in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from stepbench.record import PHASES
from stepbench.timing_table import TimingTable


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
    FETCH_WHOLE = 17
    """A batch is requested that is timed as a whole only, not by phase."""
    PAUSE = 18
    """The open window ends here, and the next has not started: the timer puts its own house in order."""


_OTHER = int(Mark.ENTER_OTHER)
_PHASE_OF = {Mark.ENTER_STEP: int(Mark.ENTER_OPTIMIZER)} | {code: code for code in range(_OTHER + 1)}
_NEVER_LEFT = (Mark.ENTER_BACKWARD, Mark.ENTER_STEP)
"""Entries of the stack that no context guards: an exception may keep them from being left."""
_REQUESTS = (Mark.FETCH, Mark.FETCH_WHOLE)
_STEP_STARTS = (Mark.STEP_CALLED, Mark.SCALED_STEP_CALLED, Mark.ENTER_FORWARD)


class ConfirmedBatch(NamedTuple):
    """What is known of a batch at its end, one for every `BATCH_DONE` in order. A tuple: made in every batch."""

    epoch: int
    batch: int
    num_samples: int | None
    completes_step: bool = True
    skipped_by_scaler: bool = False
    compiled: bool = False


class _Cursor:
    """Walks along one timeline and books what it passes to phases, in nanoseconds."""

    __slots__ = ("phase_ns", "position", "start")

    def __init__(self, now: int) -> None:
        self.start = self.position = now
        self.phase_ns = [0] * len(PHASES)

    @property
    def passed_ns(self) -> int:
        """How far it has come."""
        return self.position - self.start

    def book(self, phase: int, now: int) -> None:
        """Walk to `now`; never back, which stamps of two streams of a device might ask for."""
        if now > self.position:
            self.phase_ns[phase] += now - self.position
            self.position = now


class _Window:
    """The time from one request for a batch to the next, phase by phase, as far as it has come."""

    def __init__(self, now: int, stamp: int | None, *, is_whole: bool, turnover_ns: int | None) -> None:
        self.host = _Cursor(now)
        self.device = None if stamp is None else _Cursor(stamp)
        self.is_whole = is_whole
        self.turnover_ns = turnover_ns
        self.stack: list[int] = []
        self.confirmed: ConfirmedBatch | None = None
        self.num_stepped = 0
        self.has_backward = False
        self.validation_ran = False
        """Whether the batch has been followed by validation: the cursors then stand where it started."""
        self.is_consistent = True

    def book(self, now: int, stamp: int | None) -> None:
        """Walk both cursors to a mark."""
        phase = _PHASE_OF[self.stack[-1]] if self.stack else _OTHER
        self.host.book(phase, now)
        if stamp is None:
            self.device = None
        elif self.device is not None:
            self.device.book(phase, stamp)

    def move(self, code: int) -> None:
        """Enter or leave a phase as a mark says."""
        if code <= _OTHER:
            self.stack.append(code)
            self.has_backward = self.has_backward or code == Mark.ENTER_BACKWARD
        elif code == Mark.FETCH:
            self.stack.append(Mark.ENTER_DATA)
        elif code == Mark.FETCH_WHOLE:
            pass
        elif code == Mark.STEP_CALLED:
            self.stack.append(_OTHER)
        elif code == Mark.SCALED_STEP_CALLED:
            self.stack.append(Mark.ENTER_OPTIMIZER)
        elif code == Mark.ENTER_STEP:
            self.stack.append(code)
        elif code == Mark.VALIDATION:
            self.validation_ran = self.confirmed is not None  # else a callback validates on its own account
        elif code == Mark.EXIT_BACKWARD:
            if self.stack and self.stack[-1] == Mark.ENTER_BACKWARD:
                self.stack.pop()
        elif code == Mark.STEPPED:
            self.num_stepped += 1
            self._leave(unguarded=(Mark.ENTER_BACKWARD,))
        else:
            self._leave(unguarded=_NEVER_LEFT)

    def confirm(self, batch: ConfirmedBatch) -> None:
        """The batch ran to its end, where no phase may be left."""
        self.confirmed = batch
        self.is_consistent = self.is_consistent and not self.stack
        self.stack.clear()

    def _leave(self, unguarded: tuple[int, ...]) -> None:
        """Leave the innermost phase that was not entered by one of `unguarded`, and those on the way to it."""
        while self.stack and self.stack[-1] in unguarded:
            self.stack.pop()
        if self.stack:
            self.stack.pop()
        else:
            self.is_consistent = False


class PhaseAccountant:
    """Folds marks into a table of batch timings; may be fed in pieces, cut anywhere between two marks.

    `table` holds the confirmed windows, `num_discarded` counts the others.
    """

    def __init__(self) -> None:
        self.table = TimingTable()
        self.num_discarded = 0
        self.fetches_inside_step = False
        """Whether the training step asks for its batches itself, as `training_step(self, dataloader_iter)` does. The
        request is then no boundary: a window starts with the first call of the step after the end of the last batch."""
        self.may_hide_backward = False
        """Whether the training step may run autograd itself, unannounced, as manual optimization can: an optimizer that
        steps without any backward before has had it inside the forward."""
        self._next_step = 0
        self._step_has_backward = False
        self._previous_end: int | None = None  # of the last epoch, until a window starts
        self._window: _Window | None = None

    def start_run(self) -> None:
        """Another run begins: what passed since the last one is no time between epochs."""
        self._window = None
        self._previous_end = None

    def fold(
        self,
        marks: Sequence[int],
        confirmed: deque[ConfirmedBatch],
        device_stamps: Sequence[int | None] | None = None,
    ) -> None:
        """Consume `marks`, a flat series of code, nanoseconds, code, nanoseconds, …, and the batches they confirm.

        `device_stamps` has a stamp in nanoseconds for every mark, None for one that has none; a window with such a mark
        has no timing on the device's timeline.
        """
        stamps = [None] * (len(marks) // 2) if device_stamps is None else device_stamps
        for code, now, stamp in zip(marks[::2], marks[1::2], stamps, strict=True):
            if self._starts_window(code):
                self._close(now, stamp)
                self._start_window(now, stamp, is_whole=code == Mark.FETCH_WHOLE)
            if code in (Mark.EPOCH_END, Mark.PAUSE):
                self._close(now, stamp)
                self._previous_end = now if code == Mark.EPOCH_END else None
            elif code == Mark.ABORT:
                self._abort(now, stamp)
            else:
                batch = confirmed.popleft() if code == Mark.BATCH_DONE else None
                window = self._window
                if window is None or window.validation_ran:
                    continue
                window.book(now, stamp)
                if batch is None:
                    window.move(code)
                else:
                    window.confirm(batch)

    def _starts_window(self, code: int) -> bool:
        window = self._window
        if self.fetches_inside_step:
            return code in _STEP_STARTS and (window is None or window.confirmed is not None)
        return code in _REQUESTS and (window is None or not window.stack or window.validation_ran)

    def _start_window(self, now: int, stamp: int | None, *, is_whole: bool) -> None:
        turnover_ns = None if self._previous_end is None else now - self._previous_end
        self._window = _Window(now, stamp, is_whole=is_whole, turnover_ns=turnover_ns)
        self._previous_end = None

    def _close(self, now: int, stamp: int | None) -> None:
        """End the open window at `now`; validation, if it ran, has ended the batch earlier, where the cursors stand."""
        window, self._window = self._window, None
        if window is None:
            return
        self._step_has_backward |= window.has_backward
        batch = window.confirmed
        if batch is None or window.stack or not window.is_consistent:
            self.num_discarded += 1
        else:
            if not window.validation_ran:
                window.book(now, stamp)
            self._append_row(window, batch, validation_ns=now - window.host.position)
        if batch is not None and batch.completes_step:
            self._next_step += 1
            self._step_has_backward = False

    def _append_row(self, window: _Window, batch: ConfirmedBatch, *, validation_ns: int) -> None:
        host, device = window.host, window.device
        assert sum(host.phase_ns) == host.passed_ns, "the phases of a batch must sum to its wall time"
        self.table.append(
            epoch=batch.epoch,
            batch=batch.batch,
            step=self._next_step,
            num_samples=batch.num_samples,
            phase_ns=None if window.is_whole else host.phase_ns,
            batch_ns=host.passed_ns,
            validation_ns=validation_ns,
            epoch_turnover_ns=window.turnover_ns,
            device_phase_ns=None if window.is_whole or device is None else device.phase_ns,
            device_batch_ns=None if device is None else device.passed_ns,
            took_optimizer_step=batch.completes_step and not batch.skipped_by_scaler,
            validation_ran=window.validation_ran,
            skipped_by_scaler=batch.skipped_by_scaler,
            compiled=batch.compiled,
        )
        if self.may_hide_backward and window.num_stepped and not self._step_has_backward:
            self.table.merge_backward(self._next_step)

    def _abort(self, now: int, stamp: int | None) -> None:
        if self._window is not None and self._window.validation_ran:
            self._close(now, stamp)
        elif self._window is not None:
            self._window = None
            self.num_discarded += 1
