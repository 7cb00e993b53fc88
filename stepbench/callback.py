"""The timing callback: Lightning's hooks, profiler actions and torch's optimizer hooks become marks.

Hooks alone cannot see the wait for a batch, the transfer or the end of an optimizer's closure. So while training runs,
`trainer.profiler` is a tap that forwards to the user's own profiler and marks the actions that bound a phase.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from stepbench.clock import EVENT_DEVICES, Clock, HostClock, make_clock, resolve_timer
from stepbench.compilation import CompilationWatch
from stepbench.device_timeline import DeviceTimeline
from stepbench.lightning_package import LightningPackage, load_package
from stepbench.profiler_tap import NESTED_PHASE_MARKS, PHASE_MARKS, RESIDUAL_PHASE_MARKS, make_tap
from stepbench.record import BatchTiming, Compilation, Sampling
from stepbench.samples import SampleCounter, flatten_loaders, own_batch_size
from stepbench.timing import ConfirmedBatch, Mark, PhaseAccountant

MAX_NOTED = 2 * 2048
"""Numbers noted at most before they are folded, between two batches: a hundred batches' worth or so."""

EVERY_STEP = Sampling(timed_steps=1, period_steps=1)
HALF_OF_THE_STEPS = Sampling(timed_steps=10, period_steps=20)

DEFAULT_SAMPLING = {"host": EVERY_STEP, "events": EVERY_STEP, "sync": HALF_OF_THE_STEPS}
"""By timer. Synchronizing slows the step; the steps that it leaves out tell by how much."""


class StopRule(Protocol):
    """Decides when enough has been measured."""

    def start(self, now_ns: int) -> None:
        """Training starts."""
        ...

    def batch_done(self, now_ns: int, *, completes_step: bool, took_step: bool, compiled: bool) -> bool:
        """A batch has ended; returns whether the run is to stop.

        `took_step` is whether an optimizer really stepped, `compiled` whether `torch.compile` was at work in the batch.
        """
        ...


class PhaseTimer:
    """Times every training batch by phase. The position among other callbacks does not matter.

    Made by `make_phase_timer` into a callback of one of the two Lightning packages. After `fit` the timings are in
    `rows`. `stop_rule`, where given, ends the training once it has seen enough. The user's profiler keeps working, and
    everything is put back when training ends or an exception ends it.

    `timer` is `auto`, `host`, `sync` or `events`, resolved when training starts and the device is known; `sampling`
    says which steps are timed by phase (None: as the timer needs); `batch_size_fn` counts the samples of a batch.
    """

    # Lightning calls only what is callable: hooks that are not needed cost nothing.
    on_before_zero_grad: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None
    on_train_batch_end: Any = None

    package: LightningPackage
    """Set by `make_phase_timer`."""

    def __init__(
        self,
        *,
        timer: str = "auto",
        sampling: Sampling | None = None,
        clock: Clock | None = None,
        stop_rule: StopRule | None = None,
        batch_size_fn: Callable[[Any], int | None] | None = None,
    ) -> None:
        self._timer = timer
        self._sampling = sampling
        self._given_clock = clock
        self._stop_rule = stop_rule
        self._batch_size_fn = batch_size_fn
        self.exception: BaseException | None = None
        """What ended the last fit, if it was not its end."""
        self._begin_fit()

    def _begin_fit(self) -> None:
        """The state of one fit, as it is before its first batch."""
        self._accountant = PhaseAccountant()
        self._samples = SampleCounter(self._batch_size_fn)
        self._compilations = CompilationWatch()
        self._marks: list[int] = []
        self._confirmed: deque[ConfirmedBatch] = deque()
        self._hook_handles: list[Any] = []
        self._tap: Any = None
        self._timeline: DeviceTimeline | None = None
        self._clock: Clock = HostClock()
        self._stamp: Callable[[], int] = HostClock.now
        self._stamp_boundary: Callable[[], int] = HostClock.now
        """The time of a mark in a step that is timed as a whole: what is not to be slowed is not synchronized."""
        self._blocks = EVERY_STEP
        self._epoch = 0
        self._batch = 0
        self._num_samples: int | None = None
        self._took_step = False
        self._trainer_counts_steps = True
        self._is_manual = False
        self._scales_gradients = False
        self._global_step = 0
        self._num_steps = 0
        self._is_between_steps = True
        self._is_sampled = True
        self.on_train_batch_end = None
        self.timer_kind: str | None = None
        """The timer that runs, `host`, `sync` or `events`; None before training has started."""
        self.first_batch_end_ns: int | None = None
        self.profiler_was_replaced = False
        """Whether other code has put a profiler of its own in the place of the tap, so that nothing more was seen."""

    def __reduce__(self) -> Any:
        """Copies and pickles are rebuilt by name: the class is made for a Lightning package and stands in no module."""
        base = next(base for base in type(self).__mro__ if "package" not in base.__dict__)
        return _rebuild, (self.package.name, base), self.__dict__.copy()

    @property
    def rows(self) -> list[BatchTiming]:
        """The batches of the last fit, complete once it has ended."""
        return list(self._accountant.table)

    @property
    def num_discarded(self) -> int:
        """Requests for a batch that led to no finished one: the end of an unsized loader, a skipped epoch, an error."""
        return self._accountant.num_discarded

    @property
    def compilation(self) -> Compilation | None:
        """What `torch.compile` did during training; None where it did nothing."""
        return self._compilations.result()

    @property
    def sampling(self) -> Sampling:
        """Which steps are timed by phase, once training has started."""
        return self._blocks

    @property
    def num_forced_waits(self) -> int:
        """How often the host had to wait for the device because too many of its events were under way."""
        return 0 if self._timeline is None else self._timeline.num_forced_waits

    def why_nothing_was_timed(self) -> str:
        """The reason, to be told where there are no rows."""
        if self.profiler_was_replaced:
            return "other code has put a profiler of its own in the place of the timer's (trainer.profiler)"
        if self.num_discarded:
            return f"none of {self.num_discarded} requests for a batch led to a batch that could be timed"
        return "no optimizer step was completed" if self.rows else "the data loader gave no batches"

    # ---- Lightning's hooks ----

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the tap before the user's profiler and a watch on the compiler."""
        self._check_package(trainer)
        self._begin_fit()
        self.exception = None
        clock = self._choose_clock(trainer.strategy.root_device)
        self._is_manual = not pl_module.automatic_optimization
        self._scales_gradients = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._accountant.may_hide_backward = self._is_manual
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            self._accountant.fetches_inside_step = True
            self._blocks = EVERY_STEP  # its requests for a batch are no boundaries at which to change over
            self.on_train_batch_end = self._count_fetched_samples
        self._tap = trainer.profiler = make_tap(
            self.package,
            trainer.profiler,
            marks=self._marks,
            stamp=self._stamp,
            stamp_boundary=self._stamp_boundary,
            phase_marks=PHASE_MARKS,
            request_batch=self._request_batch,
            end_batch=lambda: self._end_batch(trainer),
            end_epoch=self._end_epoch,
        )
        self._compilations.start()
        if self._stop_rule is not None:
            self._stop_rule.start(clock.now())

    def _check_package(self, trainer: Any) -> None:
        if not isinstance(trainer, self.package.root.Trainer):
            found = type(trainer).__module__
            raise TypeError(
                f"this timer is for the Trainer of {self.package.name}, got one of {found}; "
                f"use stepbench.standalone.step_timer_class({found.partition('.trainer')[0]!r})"
            )

    def _choose_clock(self, device: torch.device) -> Clock:
        """Resolve the timer, and with it how a mark gets its time."""
        # A clock that was given stands for whatever device the timer is said to be for.
        device_type = device.type if self._given_clock is None else EVENT_DEVICES[0]
        self.timer_kind = resolve_timer(self._timer, device_type)
        clock = self._clock = self._given_clock or make_clock(self.timer_kind, device)
        self._blocks = self._sampling or DEFAULT_SAMPLING[self.timer_kind]
        self._stamp = self._stamp_boundary = clock.now
        if self.timer_kind == "sync":
            self._stamp = _synchronizing(clock)
        elif self.timer_kind == "events":
            self._timeline = DeviceTimeline(clock)
            self._stamp = self._stamp_boundary = _recording(self._timeline, clock)
        return clock

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the epoch's number and its loader's batch size; put hooks on every optimizer, which may be new ones."""
        if self._tap is None:  # a callback that came when training had started
            return
        self._epoch = trainer.current_epoch
        self._batch = 0
        self._samples.expect(next(map(own_batch_size, flatten_loaders(trainer.train_dataloader)), None))
        self._remove_hooks()
        for optimizer in trainer.optimizers:
            if _has_hooks(optimizer):
                self._hook_handles.append(optimizer.register_step_pre_hook(self._before_step))
                self._hook_handles.append(optimizer.register_step_post_hook(self._after_step))
        self._trainer_counts_steps = True  # until an optimizer's hook has been called
        self._global_step = trainer.global_step
        takes_residual = self._scales_gradients or not all(map(_has_hooks, trainer.optimizers))
        nested_marks = NESTED_PHASE_MARKS if self._is_manual else PHASE_MARKS
        self._tap.phase_marks = RESIDUAL_PHASE_MARKS if takes_residual else nested_marks

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop a run whose epochs are empty: its rule, which counts batches, would never end it."""
        if self._stop_rule is not None and self._batch == 0:
            trainer.should_stop = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the batch's number and count its samples."""
        self._batch = batch_idx
        self._num_samples = self._samples.count(batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Put everything back."""
        self._restore(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Drop the batch that was under way and put everything back; the batches before it are kept."""
        self.exception = exception
        if self._tap is not None:
            self._restore(trainer, has_failed=True)

    def _restore(self, trainer: Any, *, has_failed: bool = False) -> None:
        """Put everything back, and only then fold what is left: a device that has failed can no longer be asked."""
        if self._tap is None:
            return
        self.profiler_was_replaced = not self._tap.remove(trainer)
        self._tap = None  # it knows the trainer, which is not to be kept for the timer's sake
        self._remove_hooks()
        self._compilations.stop()
        self._stamp = self._stamp_boundary = HostClock.now
        if not has_failed:
            self._fold(is_last=True)
            return
        self._marks += (Mark.ABORT, self._clock.now())
        try:
            self._fold(is_last=True)
        except Exception:  # the device has failed as well: what it had yet to say is lost, the host's times are not
            self._timeline = None
            self._fold(is_last=True)

    def _remove_hooks(self) -> None:
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles.clear()

    def _count_fetched_samples(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Where the training step asks for its batches itself, only the hook at the end knows the batch."""
        self.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    # ---- marks that no hook of Lightning's gives ----

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Enter the optimizer, and have the closure, which runs forward and backward inside the step, leave it."""
        if not self._is_sampled:
            return None
        self._marks += (Mark.ENTER_STEP, self._stamp())
        closure = kwargs.get("closure")
        if closure is not None:
            return args, {**kwargs, "closure": self._time_closure(closure)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._time_closure(args[1]), *args[2:]), kwargs
        return None

    def _time_closure(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        enter = Mark.ENTER_FORWARD if self._is_manual else Mark.ENTER_OTHER

        def timed_closure(*args: Any, **kwargs: Any) -> Any:
            self._marks += (enter, self._stamp())
            try:
                return closure(*args, **kwargs)
            finally:
                self._marks += (Mark.EXIT, self._stamp())

        return timed_closure

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_sampled:
            self._marks += (Mark.STEPPED, self._stamp())
        self._took_step = True
        self._trainer_counts_steps = self._scales_gradients  # a scaler skips steps, which the trainer counts

    def _request_batch(self) -> None:
        """A batch is about to be requested: the last one's window ends here, and the next one's starts.

        Between the two is the only place where folding what was noted costs no batch any time.
        """
        stamp = self._stamp_boundary
        if self._is_between_steps:
            self._is_between_steps = False
            is_sampled = self._num_steps % self._blocks.period_steps < self._blocks.timed_steps
            if is_sampled != self._is_sampled:
                self._is_sampled = self._tap.is_sampled = is_sampled
                stamp = self._stamp  # so that what the device has yet to do counts to the steps that gave it to do
        if self._is_sampled:
            stamp = self._stamp
        if len(self._marks) >= MAX_NOTED and not self._accountant.fetches_inside_step:
            self._marks += (Mark.PAUSE, self._stamp())
            self._fold()
        self._marks += (Mark.FETCH if self._is_sampled else Mark.FETCH_WHOLE, stamp())

    def _end_batch(self, trainer: Any) -> None:
        """Confirm the batch and ask whether enough has been measured.

        Called when the module's own hook has returned: as good a place as a hook of ours, which costs several
        microseconds more.
        """
        if self not in trainer.callbacks:  # a fit inside the fit, as of a finder, whose batches are not the training's
            return
        now = self._stamp() if self._is_sampled else self._stamp_boundary()
        took_step, self._took_step = self._took_step, False
        completes_step, skipped = took_step, False
        if self._trainer_counts_steps:
            completes_step, self._global_step = trainer.global_step != self._global_step, trainer.global_step
            skipped = self._scales_gradients and completes_step and not took_step
        compiled = self._compilations.was_at_work()
        self._confirmed.append(
            ConfirmedBatch(self._epoch, self._batch, self._num_samples, completes_step, skipped, compiled)
        )
        self._marks += (Mark.BATCH_DONE, now)  # behind what it confirms: an interrupt may come between the two
        self._batch, self._num_samples = self._batch + 1, None  # for a batch of None, which does not start
        self._num_steps += completes_step
        self._is_between_steps = completes_step
        if self.first_batch_end_ns is None:
            self.first_batch_end_ns = now
        if self._stop_rule is not None and self._stop_rule.batch_done(
            now, completes_step=completes_step, took_step=completes_step and not skipped, compiled=compiled
        ):
            trainer.should_stop = True
        if self._accountant.fetches_inside_step and len(self._marks) >= MAX_NOTED:
            self._fold()  # here, for lack of a better place

    def _end_epoch(self) -> None:
        self._marks += (Mark.EPOCH_END, self._stamp())
        self._fold()

    def _fold(self, *, is_last: bool = False) -> None:
        """Fold the marks noted so far; on a device's timeline those that it has come to, at last all of them."""
        num_marks, stamps = len(self._marks) // 2, None
        if self._timeline is not None:
            stamps = self._timeline.read(wait=is_last)[:num_marks]
            if is_last:
                stamps += [None] * (num_marks - len(stamps))
            num_marks = len(stamps)
        marks = self._marks[: 2 * num_marks]
        del self._marks[: 2 * num_marks]  # before they are folded: an interrupt must not have them folded twice
        self._accountant.fold(marks, self._confirmed, stamps)


def _has_hooks(optimizer: object) -> bool:
    """Whether an optimizer takes step hooks: a wrapper may never have called its base class's constructor."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def _synchronizing(clock: Clock) -> Callable[[], int]:
    """The host's time once the device has done all that came before a mark: no work can be booked to a later phase."""

    def stamp() -> int:
        clock.synchronize()
        return clock.now()

    return stamp


def _recording(timeline: DeviceTimeline, clock: Clock) -> Callable[[], int]:
    """The host's time, and an event behind all that the device was given before a mark."""

    def stamp() -> int:
        timeline.record()
        return clock.now()

    return stamp


def make_phase_timer(package: LightningPackage, **settings: Any) -> Any:
    """A `PhaseTimer` with these settings that is a callback of this Lightning package."""
    return phase_timer_class(package, PhaseTimer)(**settings)  # type: ignore[arg-type]


@functools.cache
def phase_timer_class(package: LightningPackage, base: type[PhaseTimer]) -> type[Any]:
    """`PhaseTimer`, or a class built on it, as a callback of this Lightning package."""
    return type(base.__name__, (base, package.root.Callback), {"package": package, "__doc__": base.__doc__})


def _rebuild(package_name: str, base: Any) -> Any:
    """An empty timer of this kind, for a copy's state to be put into."""
    return object.__new__(phase_timer_class(load_package(package_name), base))
