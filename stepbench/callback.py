"""The timing callback: Lightning's hooks, profiler actions and torch's optimizer hooks become marks.

Hooks alone cannot see the wait for a batch, the transfer or the end of an optimizer's closure. So while training runs,
`trainer.profiler` is a tap that forwards to the user's own profiler and marks the actions that bound a phase. The names
of those actions are visible output of Lightning rather than a documented contract; a test pins them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from stepbench.clock import EVENT_DEVICES, Clock, make_clock, resolve_timer
from stepbench.compilation import CompilationWatch
from stepbench.device_timeline import DeviceTimeline
from stepbench.lightning_package import LightningPackage
from stepbench.record import BatchTiming, Compilation, Sampling
from stepbench.samples import SampleCounter, loader_batch_size
from stepbench.timing import ConfirmedBatch, Mark, PhaseAccountant

FETCH_ACTION = "train_dataloader_next"
EPOCH_ACTION = "run_training_epoch"

MAX_MARKS = 2 * 2048
"""Numbers noted at most before they are folded, between two batches: a hundred batches' worth or so."""

EVERY_STEP = Sampling(timed_steps=1, period_steps=1)
HALF_OF_THE_STEPS = Sampling(timed_steps=10, period_steps=20)

DEFAULT_SAMPLING = {"host": EVERY_STEP, "events": EVERY_STEP, "sync": HALF_OF_THE_STEPS}
"""By timer. Synchronizing slows the step; the steps that it leaves out tell by how much."""

VALIDATION_HOOKS = frozenset(
    {"on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_start", "val_dataloader"}
)
"""Whichever of these comes first after a batch opens its validation."""

Marks = tuple[Mark | None, Mark | None]
"""The mark at the start of an action and the one at its end."""

PHASE_MARKS: dict[tuple[str, str], Marks] = {
    ("LightningModule", "transfer_batch_to_device"): (Mark.ENTER_TRANSFER, Mark.EXIT),
    ("LightningDataModule", "transfer_batch_to_device"): (Mark.ENTER_TRANSFER, Mark.EXIT),
    ("Strategy", "training_step"): (Mark.ENTER_FORWARD, Mark.EXIT),
    ("LightningModule", "on_before_backward"): (None, Mark.ENTER_BACKWARD),
    ("LightningModule", "on_after_backward"): (Mark.EXIT_BACKWARD, None),
    ("Callback", "on_after_backward"): (Mark.EXIT_BACKWARD, None),
    ("LightningModule", "optimizer_zero_grad"): (Mark.ENTER_OPTIMIZER, Mark.EXIT),
    ("LightningModule", "configure_gradient_clipping"): (Mark.ENTER_OPTIMIZER, Mark.EXIT),
    ("LightningModule", "optimizer_step"): (Mark.STEP_CALLED, Mark.EXIT),
}
"""What an action marks, by the owner and the hook that its name gives: `[LightningModule]LitNet.optimizer_step`."""

NESTED_PHASE_MARKS: dict[tuple[str, str], Marks] = {
    **PHASE_MARKS,
    ("LightningModule", "on_before_zero_grad"): (Mark.ENTER_OTHER, Mark.EXIT),
    ("Callback", "on_before_zero_grad"): (Mark.ENTER_OTHER, Mark.EXIT),
    ("LightningModule", "on_before_optimizer_step"): (Mark.ENTER_OTHER, Mark.EXIT),
    ("Callback", "on_before_optimizer_step"): (Mark.ENTER_OTHER, Mark.EXIT),
    ("Callback", "on_before_backward"): (Mark.ENTER_OTHER, Mark.EXIT),
    ("LightningModule", "on_before_backward"): (Mark.ENTER_OTHER, Mark.ENTER_BACKWARD),
    ("LightningModule", "on_after_backward"): (Mark.EXIT_BACKWARD, Mark.EXIT),
}
"""The same where hooks run inside a phase and have to be told apart from it: inside `training_step` with manual
optimization, inside the optimizer's phase with a gradient scaler."""

SCALED_PHASE_MARKS: dict[tuple[str, str], Marks] = {
    **NESTED_PHASE_MARKS,
    ("LightningModule", "optimizer_step"): (Mark.SCALED_STEP_CALLED, Mark.EXIT),
}
"""With a gradient scaler all of the optimizer step that is no other phase is the scaler's work: unscaling, its check
for infinite gradients and its update."""


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
        self._blocks = EVERY_STEP
        self._clock = clock
        self._stop_rule = stop_rule
        self._samples = SampleCounter(batch_size_fn)
        self._accountant = PhaseAccountant()
        self._marks: list[int] = []
        self._confirmed: deque[ConfirmedBatch] = deque()
        self._hook_handles: list[Any] = []
        self._users_profiler: Any = None
        self._timeline: DeviceTimeline | None = None
        self._stamp: Callable[[], int]
        self._stamp_boundary: Callable[[], int]
        """The time of a mark in a step that is timed as a whole: what is not to be slowed is not synchronized."""
        self._compilations = CompilationWatch()
        self._epoch = 0
        self._batch = 0
        self._took_step = False
        self._trainer_counts_steps = True
        self._scales_gradients = False
        self._global_step = 0
        self._num_steps = 0
        self._is_between_steps = True
        self._is_sampled = True
        self._enter_closure = Mark.ENTER_OTHER
        self._num_samples: int | None = None
        self.timer_kind: str | None = None
        """The timer that runs, `host`, `sync` or `events`; None before training has started."""
        self.first_batch_end_ns: int | None = None
        self.exception: BaseException | None = None

    @property
    def rows(self) -> list[BatchTiming]:
        """The batches timed so far, complete once training has ended."""
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

    # ---- Lightning's hooks ----

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the tap before the user's profiler and a watch on the compiler."""
        self._check_package(trainer)
        clock = self._choose_clock(trainer.strategy.root_device)
        self._marks.clear()
        self._confirmed.clear()
        self._accountant.start_run()
        self._users_profiler = trainer.profiler
        is_manual = not pl_module.automatic_optimization
        scales_gradients = getattr(trainer.precision_plugin, "scaler", None) is not None
        phase_marks = NESTED_PHASE_MARKS if is_manual else SCALED_PHASE_MARKS if scales_gradients else PHASE_MARKS
        self._enter_closure = Mark.ENTER_FORWARD if is_manual else Mark.ENTER_OTHER
        self._accountant.may_hide_backward = is_manual
        self._tap = trainer.profiler = _make_tap(
            self.package,
            self._users_profiler,
            self._marks,
            self._stamp,
            self._stamp_boundary,
            self._request_batch,
            {
                ("LightningModule", "on_train_batch_end"): lambda: self._end_batch(trainer),
                ("", EPOCH_ACTION): self._end_epoch,
            },
            phase_marks,
        )
        self._trainer_counts_steps = True  # until an optimizer's hook has been called
        self._scales_gradients = scales_gradients
        self._global_step = trainer.global_step
        self._num_steps, self._is_between_steps, self._is_sampled = 0, True, True
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            self._accountant.fetches_inside_step = True
            self._blocks = EVERY_STEP  # its requests for a batch are no boundaries at which to change over
            self.on_train_batch_end = self._count_fetched_samples
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
        if self.timer_kind is None:
            # A clock that was given stands for whatever device the timer is said to be for.
            device_type = device.type if self._clock is None else EVENT_DEVICES[0]
            self.timer_kind = resolve_timer(self._timer, device_type)
        clock = self._clock = self._clock or make_clock(self.timer_kind, device)
        self._blocks = self._sampling or DEFAULT_SAMPLING[self.timer_kind]
        self._stamp = self._stamp_boundary = clock.now
        if self.timer_kind == "sync":
            self._stamp = _synchronizing(clock)
        elif self.timer_kind == "events":
            self._timeline = DeviceTimeline(clock)
            self._stamp = self._stamp_boundary = _recording(self._timeline, clock)
        return clock

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the epoch's number and its loader's batch size; put hooks on every optimizer."""
        self._epoch = trainer.current_epoch
        self._batch = 0
        self._samples.loader_batch_size = loader_batch_size(trainer.train_dataloader)
        if not self._hook_handles:  # not earlier: the user's own `on_train_start` may replace the optimizers
            for optimizer in trainer.optimizers:
                if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a wrapper may never have called its base class
                    self._hook_handles.append(optimizer.register_step_pre_hook(self._before_step))
                    self._hook_handles.append(optimizer.register_step_post_hook(self._after_step))

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
        if self._users_profiler is not None:
            self._marks += (Mark.ABORT, self._stamp_boundary())
            self._restore(trainer)

    def _restore(self, trainer: Any) -> None:
        if self._users_profiler is not None:
            trainer.profiler = self._users_profiler
            self._users_profiler = None
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles.clear()
        self._compilations.stop()
        self._fold(wait=True)

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

    def _time_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def timed_closure() -> Any:
            self._marks += (self._enter_closure, self._stamp())
            try:
                return closure()
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
        if len(self._marks) >= MAX_MARKS and not self._accountant.fetches_inside_step:
            self._marks += (Mark.PAUSE, self._stamp())
            self._fold()
        self._marks += (Mark.FETCH if self._is_sampled else Mark.FETCH_WHOLE, stamp())

    def _end_batch(self, trainer: Any) -> None:
        """Confirm the batch and ask whether enough has been measured.

        Called when the module's own hook has returned: as good a place as a hook of ours, which costs several
        microseconds more.
        """
        now = self._stamp() if self._is_sampled else self._stamp_boundary()
        self._marks += (Mark.BATCH_DONE, now)
        took_step, self._took_step = self._took_step, False
        completes_step, skipped = took_step, False
        if self._trainer_counts_steps:
            completes_step, self._global_step = trainer.global_step != self._global_step, trainer.global_step
            skipped = self._scales_gradients and completes_step and not took_step
        compiled = self._compilations.was_at_work()
        self._confirmed.append(
            ConfirmedBatch(self._epoch, self._batch, self._num_samples, completes_step, skipped, compiled)
        )
        self._batch, self._num_samples = self._batch + 1, None  # for a batch of None, which does not start
        self._num_steps += completes_step
        self._is_between_steps = completes_step
        if self.first_batch_end_ns is None:
            self.first_batch_end_ns = now
        if self._stop_rule is not None and self._stop_rule.batch_done(
            now, completes_step=completes_step, took_step=completes_step and not skipped, compiled=compiled
        ):
            trainer.should_stop = True

    def _end_epoch(self) -> None:
        self._marks += (Mark.EPOCH_END, self._stamp())
        self._fold()

    def _fold(self, *, wait: bool = False) -> None:
        """Fold the marks noted so far; on a device's timeline those that the device has come to."""
        if self._timeline is None:
            self._accountant.fold(self._marks, self._confirmed)
            self._marks.clear()
            return
        stamps = self._timeline.read(wait=wait)
        self._accountant.fold(self._marks[: 2 * len(stamps)], self._confirmed, stamps)
        del self._marks[: 2 * len(stamps)]


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
    return phase_timer_class(package)(**settings)


@functools.cache
def phase_timer_class(package: LightningPackage, base: type[PhaseTimer] = PhaseTimer) -> type[Any]:
    """`PhaseTimer`, or a class built on it, as a callback of this Lightning package."""
    return type(base.__name__, (base, package.root.Callback), {"package": package, "__doc__": base.__doc__})


class _PhaseContext:
    """Marks the entry and the end of one action. Holds no state of a use, so one object serves all of them."""

    __slots__ = ("_enter", "_exit", "_marks", "_stamp")

    def __init__(self, marks: list[int], stamp: Callable[[], int], enter: Mark | None, exit_: Mark | None) -> None:
        self._marks = marks
        self._stamp = stamp
        self._enter = enter
        self._exit = exit_

    def __enter__(self) -> None:
        if self._enter is not None:
            self._marks += (self._enter, self._stamp())

    def __exit__(self, *exception: object) -> None:
        if self._exit is not None:
            self._marks += (self._exit, self._stamp())


class _WrappedContext:
    """A user's profiler around the marks of the same action, so that its cost stays outside the phase."""

    __slots__ = ("_marking", "_users")

    def __init__(self, users: AbstractContextManager[Any], marking: AbstractContextManager[None]) -> None:
        self._users = users
        self._marking = marking

    def __enter__(self) -> Any:
        result = self._users.__enter__()
        self._marking.__enter__()
        return result

    def __exit__(self, *exception: object) -> bool | None:
        self._marking.__exit__(*exception)  # type: ignore[arg-type]
        return self._users.__exit__(*exception)  # type: ignore[arg-type]


class _CallingContext:
    """Calls a function at the end of an action, unless an exception ended it."""

    __slots__ = ("_at_end",)

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self._at_end()


_NOTHING = contextlib.nullcontext()


class _Tap:
    """Stands before the user's profiler while training runs: marks what bounds a phase and forwards everything.

    But for `setup` and `teardown`: they happen outside training, and a profiler tears itself down when it is deleted.
    In steps that are not sampled only the ends of batches and epochs and the start of validation are marked.
    """

    def __init__(
        self,
        users_profiler: Any,
        user_has_none: bool,
        marks: list[int],
        stamp: Callable[[], int],
        stamp_boundary: Callable[[], int],
        request_batch: Callable[[], None],
        at_end: Mapping[tuple[str, str], Callable[[], None]],
        phase_marks: Mapping[tuple[str, str], Marks],
    ) -> None:
        super().__init__(dirpath=users_profiler.dirpath, filename=users_profiler.filename)  # type: ignore[call-arg]
        self._users = users_profiler
        self._user_has_none = user_has_none
        self._marks = marks
        self._stamp = stamp
        self._stamp_boundary = stamp_boundary
        self._request_batch = request_batch
        self._at_end = at_end
        self._phase_marks = phase_marks
        self._contexts_by_sampling: dict[bool, dict[str, AbstractContextManager[None]]] = {True: {}, False: {}}
        self.is_sampled = True

    @property
    def is_sampled(self) -> bool:
        """Whether the present step is timed by phase."""
        return self._is_sampled

    @is_sampled.setter
    def is_sampled(self, is_sampled: bool) -> None:
        self._is_sampled = is_sampled
        self._contexts = self._contexts_by_sampling[is_sampled]

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """The context of an action: a marking one where it bounds a phase, and the user's profiler's own around it.

        Where the user has no profiler, an action that bounds nothing has an empty context instead of the one that
        Lightning's stand-in for a profiler makes each time: what is saved makes up for a part of what marking costs.
        """
        try:
            marking = self._contexts[action_name]
        except KeyError:
            marking = self._contexts[action_name] = self._classify(action_name)
        if self._user_has_none:
            return marking
        if marking is _NOTHING:
            return self._users.profile(action_name)  # type: ignore[no-any-return]
        return _WrappedContext(self._users.profile(action_name), marking)

    def _classify(self, action_name: str) -> AbstractContextManager[None]:
        at_end = self._at_end.get(owner_and_hook(action_name))
        if at_end is not None:
            return _CallingContext(at_end)
        enter, exit_ = action_marks(action_name, self._phase_marks)
        is_boundary = enter is Mark.VALIDATION
        if (enter is None and exit_ is None) or not (is_boundary or self._is_sampled):
            return _NOTHING
        stamp = self._stamp if self._is_sampled else self._stamp_boundary
        return _PhaseContext(self._marks, stamp, enter, exit_)

    def start(self, action_name: str) -> None:
        """Forward, then mark: fetching is the one action that Lightning starts and stops by name."""
        self._users.start(action_name)
        if action_name.endswith(FETCH_ACTION):
            self._request_batch()

    def stop(self, action_name: str) -> None:
        """Mark, then forward."""
        if self._is_sampled and action_name.endswith(FETCH_ACTION):
            self._marks += (Mark.EXIT, self._stamp())
        self._users.stop(action_name)

    def summary(self) -> str:
        """The user's profiler's summary."""
        return self._users.summary()  # type: ignore[no-any-return]

    def describe(self) -> None:
        """Have the user's profiler report."""
        self._users.describe()


def _make_tap(package: LightningPackage, users_profiler: Any, *arguments: Any) -> Any:
    """A tap that is a profiler of this Lightning package."""
    user_has_none = type(users_profiler) is package.pass_through_profiler
    return _tap_class(package)(users_profiler, user_has_none, *arguments)


@functools.cache
def _tap_class(package: LightningPackage) -> type[Any]:
    return type("_Tap", (_Tap, package.profiler_base), {})


def owner_and_hook(action_name: str) -> tuple[str, str]:
    """The parts of an action's name: `[Strategy]DDPStrategy.training_step` has the owner Strategy and this hook."""
    owner, bracket, rest = action_name.removeprefix("[").partition("]")
    return (owner, rest.rpartition(".")[2]) if bracket else ("", action_name)


def action_marks(action_name: str, phase_marks: Mapping[tuple[str, str], Marks]) -> Marks:
    """The marks at the start and the end of an action; (None, None) where it bounds nothing."""
    owner, hook = owner_and_hook(action_name)
    if owner and hook in VALIDATION_HOOKS:
        return Mark.VALIDATION, None
    return phase_marks.get((owner, hook), (None, None))
