"""The timing callback: Lightning's hooks, profiler actions and torch's optimizer hooks become marks.

Hooks alone cannot see the wait for a batch, the transfer or the end of an optimizer's closure. So while training runs,
`trainer.profiler` is a tap that forwards to the user's own profiler and marks the actions that bound a phase. The names
of those actions are visible output of Lightning rather than a documented contract; a test pins them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from stepbench.clock import Clock, HostClock
from stepbench.record import BatchTiming
from stepbench.timing import ConfirmedBatch, Mark, PhaseAccountant

FETCH_ACTION = "train_dataloader_next"
EPOCH_ACTION = "run_training_epoch"

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

    def batch_done(self, now_ns: int, *, completes_step: bool) -> bool:
        """A batch has ended; returns whether the run is to stop."""
        ...


class StepTimer(pl.Callback):
    """Times every training batch by phase. The position among other callbacks does not matter.

    After `fit` the timings are in `rows`. `stop_rule`, where given, ends the training once it has seen enough. The
    user's profiler keeps working, and everything is put back when training ends or an exception ends it.
    """

    # Lightning calls only what is callable: hooks that are not needed cost nothing.
    on_before_zero_grad = None  # type: ignore[assignment]
    on_before_backward = None  # type: ignore[assignment]
    on_after_backward = None  # type: ignore[assignment]
    on_before_optimizer_step = None  # type: ignore[assignment]
    on_train_batch_end: Any = None

    def __init__(self, *, clock: Clock | None = None, stop_rule: StopRule | None = None) -> None:
        self._now = (HostClock() if clock is None else clock).now
        self._stop_rule = stop_rule
        self._accountant = PhaseAccountant()
        self._marks: list[int] = []
        self._confirmed: list[ConfirmedBatch] = []
        self._hook_handles: list[Any] = []
        self._users_profiler: Profiler | None = None
        self._epoch = 0
        self._batch = 0
        self._took_step = False
        self._trainer_counts_steps = True
        self._scales_gradients = False
        self._global_step = 0
        self._enter_closure = Mark.ENTER_OTHER
        self._num_samples: int | None = None
        self.first_batch_end_ns: int | None = None
        self.exception: BaseException | None = None

    @property
    def rows(self) -> list[BatchTiming]:
        """The batches timed so far, complete once training has ended."""
        return self._accountant.rows

    @property
    def num_discarded(self) -> int:
        """Requests for a batch that led to no finished one: the end of an unsized loader, a skipped epoch, an error."""
        return self._accountant.num_discarded

    # ---- Lightning's hooks ----

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the tap before the user's profiler and hooks on every optimizer."""
        self._marks.clear()
        self._confirmed.clear()
        self._accountant.start_run()
        self._users_profiler = trainer.profiler  # type: ignore[attr-defined]
        is_manual = not pl_module.automatic_optimization
        scales_gradients = getattr(trainer.precision_plugin, "scaler", None) is not None
        phase_marks = NESTED_PHASE_MARKS if is_manual else SCALED_PHASE_MARKS if scales_gradients else PHASE_MARKS
        self._enter_closure = Mark.ENTER_FORWARD if is_manual else Mark.ENTER_OTHER
        trainer.profiler = _Tap(  # type: ignore[attr-defined]
            self._users_profiler,
            self._marks,
            self._now,
            {
                ("LightningModule", "on_train_batch_end"): lambda: self._end_batch(trainer),
                ("", EPOCH_ACTION): self._end_epoch,
            },
            phase_marks,
        )
        self._trainer_counts_steps = True  # until an optimizer's hook has been called
        self._scales_gradients = scales_gradients
        self._global_step = trainer.global_step
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            self._accountant.fetches_inside_step = True
            self.on_train_batch_end = self._count_fetched_samples
        if self._stop_rule is not None:
            self._stop_rule.start(self._now())

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the epoch's number."""
        self._epoch = trainer.current_epoch
        self._batch = 0
        if not self._hook_handles:  # not earlier: the user's own `on_train_start` may replace the optimizers
            for optimizer in trainer.optimizers:
                if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a wrapper may never have called its base class
                    self._hook_handles.append(optimizer.register_step_pre_hook(self._before_step))
                    self._hook_handles.append(optimizer.register_step_post_hook(self._after_step))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop a run whose epochs are empty: its rule, which counts batches, would never end it."""
        has_batches = bool(self.rows) and self.rows[-1].epoch == self._epoch
        if self._stop_rule is not None and not has_batches:
            trainer.should_stop = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the batch's number and count its samples."""
        self._batch = batch_idx
        self._num_samples = count_samples(batch)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put everything back."""
        self._restore(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Drop the batch that was under way and put everything back; the batches before it are kept."""
        self.exception = exception
        if self._users_profiler is not None:
            self._marks += (Mark.ABORT, self._now())
            self._restore(trainer)

    def _restore(self, trainer: pl.Trainer) -> None:
        if self._users_profiler is not None:
            trainer.profiler = self._users_profiler  # type: ignore[attr-defined]
            self._users_profiler = None
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles.clear()
        self._fold()

    def _count_fetched_samples(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Where the training step asks for its batches itself, only the hook at the end knows the batch."""
        self.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    # ---- marks that no hook of Lightning's gives ----

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Enter the optimizer, and have the closure, which runs forward and backward inside the step, leave it."""
        self._marks += (Mark.ENTER_STEP, self._now())
        closure = kwargs.get("closure")
        if closure is not None:
            return args, {**kwargs, "closure": self._time_closure(closure)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._time_closure(args[1]), *args[2:]), kwargs
        return None

    def _time_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def timed_closure() -> Any:
            self._marks += (self._enter_closure, self._now())
            try:
                return closure()
            finally:
                self._marks += (Mark.EXIT, self._now())

        return timed_closure

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._marks += (Mark.STEPPED, self._now())
        self._took_step = True
        self._trainer_counts_steps = self._scales_gradients  # a scaler skips steps, which the trainer counts

    def _end_batch(self, trainer: pl.Trainer) -> None:
        """Confirm the batch and ask whether enough has been measured.

        Called when the module's own hook has returned: as good a place as a hook of ours, which costs several
        microseconds more.
        """
        now = self._now()
        self._marks += (Mark.BATCH_DONE, now)
        completes_step, self._took_step = self._took_step, False
        if self._trainer_counts_steps:
            completes_step, self._global_step = trainer.global_step != self._global_step, trainer.global_step
        self._confirmed.append(ConfirmedBatch(self._epoch, self._batch, self._num_samples, completes_step))
        self._batch, self._num_samples = self._batch + 1, None  # for a batch of None, which does not start
        if self.first_batch_end_ns is None:
            self.first_batch_end_ns = now
        if self._stop_rule is not None and self._stop_rule.batch_done(now, completes_step=completes_step):
            trainer.should_stop = True

    def _end_epoch(self) -> None:
        self._marks += (Mark.EPOCH_END, self._now())
        self._fold()

    def _fold(self) -> None:
        self._accountant.fold(self._marks, self._confirmed)
        self._marks.clear()
        self._confirmed.clear()


class _PhaseContext:
    """Marks the entry and the end of one action. Holds no state of a use, so one object serves all of them."""

    __slots__ = ("_enter", "_exit", "_marks", "_now")

    def __init__(self, marks: list[int], now: Callable[[], int], enter: Mark | None, exit_: Mark | None) -> None:
        self._marks = marks
        self._now = now
        self._enter = enter
        self._exit = exit_

    def __enter__(self) -> None:
        if self._enter is not None:
            self._marks += (self._enter, self._now())

    def __exit__(self, *exception: object) -> None:
        if self._exit is not None:
            self._marks += (self._exit, self._now())


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


class _Tap(Profiler):
    """Stands before the user's profiler while training runs: marks what bounds a phase and forwards everything.

    But for `setup` and `teardown`: they happen outside training, and a profiler tears itself down when it is deleted.
    """

    def __init__(
        self,
        users_profiler: Profiler,
        marks: list[int],
        now: Callable[[], int],
        at_end: Mapping[tuple[str, str], Callable[[], None]],
        phase_marks: Mapping[tuple[str, str], Marks],
    ) -> None:
        super().__init__(dirpath=users_profiler.dirpath, filename=users_profiler.filename)
        self._users = users_profiler
        self._user_has_none = type(users_profiler) is PassThroughProfiler
        self._marks = marks
        self._now = now
        self._at_end = at_end
        self._phase_marks = phase_marks
        self._contexts: dict[str, AbstractContextManager[None]] = {}

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
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
            return self._users.profile(action_name)
        return _WrappedContext(self._users.profile(action_name), marking)

    def _classify(self, action_name: str) -> AbstractContextManager[None]:
        at_end = self._at_end.get(owner_and_hook(action_name))
        if at_end is not None:
            return _CallingContext(at_end)
        enter, exit_ = action_marks(action_name, self._phase_marks)
        if enter is None and exit_ is None:
            return _NOTHING
        return _PhaseContext(self._marks, self._now, enter, exit_)

    def start(self, action_name: str) -> None:
        """Forward, then mark: fetching is the one action that Lightning starts and stops by name."""
        self._users.start(action_name)
        if action_name.endswith(FETCH_ACTION):
            self._marks += (Mark.FETCH, self._now())

    def stop(self, action_name: str) -> None:
        """Mark, then forward."""
        if action_name.endswith(FETCH_ACTION):
            self._marks += (Mark.EXIT, self._now())
        self._users.stop(action_name)

    def summary(self) -> str:
        """The user's profiler's summary."""
        return self._users.summary()

    def describe(self) -> None:
        """Have the user's profiler report."""
        self._users.describe()


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


def count_samples(batch: Any) -> int | None:
    """The number of samples in a batch; None where its structure does not tell.

    The first dimension of the first tensor found, depth first; `num_graphs` where the batch has it (graph libraries
    concatenate the nodes of a batch's graphs).
    """
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else None
    num_graphs = getattr(batch, "num_graphs", None)
    if isinstance(num_graphs, int):
        return num_graphs
    if isinstance(batch, Mapping):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    else:
        return None
    return next((count for part in parts if (count := count_samples(part)) is not None), None)
