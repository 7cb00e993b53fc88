"""The tap: what stands before the user's profiler while training runs and turns Lightning's actions into marks.

The names of the actions are visible output of Lightning rather than a documented contract; a test pins them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from stepbench.lightning_package import LightningPackage
from stepbench.timing import Mark

FETCH_ACTION = "train_dataloader_next"
EPOCH_ACTION = "run_training_epoch"
MANUAL_STEP_ACTION = "optimizer_step"
"""The step of an optimizer in manual optimization; in automatic one the module's hook of that name is an action."""

END_OF_BATCH = ("LightningModule", "on_train_batch_end")

VALIDATION_HOOKS = frozenset(
    {"on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_start", "val_dataloader"}
)
"""Whichever of these comes first after a batch opens its validation."""

ActionMarks = tuple[Mark | None, Mark | None]
"""The mark at the start of an action and the one at its end."""

PhaseMarks = Mapping[tuple[str, str], ActionMarks]

PHASE_MARKS: PhaseMarks = {
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

NESTED_PHASE_MARKS: PhaseMarks = {
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

RESIDUAL_PHASE_MARKS: PhaseMarks = {
    **NESTED_PHASE_MARKS,
    ("LightningModule", "optimizer_step"): (Mark.SCALED_STEP_CALLED, Mark.EXIT),
}
"""The same where all of the optimizer step that is no other phase belongs to the optimizer: with a gradient scaler,
whose work it is (unscaling, its check for infinite gradients, its update), or an optimizer whose step has no hooks."""


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


class ProfilerTap:
    """Stands before the user's profiler while training runs: marks what bounds a phase and forwards everything.

    But for `setup` and `teardown`: they happen outside training, and a profiler tears itself down when it is deleted.
    In steps that are not sampled only the ends of batches and epochs and the start of validation are marked.
    """

    def __init__(
        self,
        users_profiler: Any,
        *,
        user_has_none: bool,
        marks: list[int],
        stamp: Callable[[], int],
        stamp_boundary: Callable[[], int],
        phase_marks: PhaseMarks,
        request_batch: Callable[[], None],
        end_batch: Callable[[], None],
        end_epoch: Callable[[], None],
    ) -> None:
        self._users = users_profiler  # first, for what is not found here is looked for there
        super().__init__(  # type: ignore[call-arg]
            dirpath=getattr(users_profiler, "dirpath", None), filename=getattr(users_profiler, "filename", None)
        )
        self._user_has_none = user_has_none
        self._marks = marks
        self._stamp = stamp
        self._stamp_boundary = stamp_boundary
        self._request_batch = request_batch
        self._at_end = {END_OF_BATCH: end_batch, ("", EPOCH_ACTION): end_epoch}
        self._is_open = True
        self._phase_marks = phase_marks
        self._forget_contexts()
        self.is_sampled = True

    def __getattr__(self, name: str) -> Any:
        """What the user's code asks its own profiler for."""
        if name == "_users":  # before it is there
            raise AttributeError(name)
        return getattr(self._users, name)

    @property
    def is_sampled(self) -> bool:
        """Whether the present step is timed by phase."""
        return self._is_sampled

    @is_sampled.setter
    def is_sampled(self, is_sampled: bool) -> None:
        self._is_sampled = is_sampled
        self._contexts = self._contexts_by_sampling[is_sampled]
        self._marks_manual_steps = is_sampled and self._phase_marks is RESIDUAL_PHASE_MARKS

    @property
    def phase_marks(self) -> PhaseMarks:
        """What the actions mark."""
        return self._phase_marks

    @phase_marks.setter
    def phase_marks(self, phase_marks: PhaseMarks) -> None:
        self._phase_marks = phase_marks
        self._forget_contexts()
        self.is_sampled = self._is_sampled

    def _forget_contexts(self) -> None:
        self._contexts_by_sampling: dict[bool, dict[str, AbstractContextManager[None]]] = {True: {}, False: {}}

    def remove(self, trainer: Any) -> bool:
        """Give the user's profiler its place back and mark nothing more; returns whether the tap was still there.

        Another callback may have put a profiler of its own before the tap, or in its place: that one is left alone.
        """
        self._request_batch, self._at_end, self._phase_marks, self._marks = _do_nothing, {}, {}, []
        self._is_open = False
        self._forget_contexts()
        self.is_sampled = False
        if trainer.profiler is self:
            trainer.profiler = self._users
            return True
        profiler = trainer.profiler
        while isinstance(profiler, ProfilerTap):
            if profiler._users is self:
                profiler._users = self._users
                return True
            profiler = profiler._users
        return False

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
        if not self._is_open:
            return _NOTHING
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
        """Forward, then mark: the actions that Lightning starts and stops by name."""
        self._users.start(action_name)
        if action_name.endswith(FETCH_ACTION):
            self._request_batch()
        elif self._marks_manual_steps and action_name == MANUAL_STEP_ACTION:
            self._marks += (Mark.SCALED_STEP_CALLED, self._stamp())

    def stop(self, action_name: str) -> None:
        """Mark, then forward."""
        if self._is_sampled and (
            action_name.endswith(FETCH_ACTION) or (self._marks_manual_steps and action_name == MANUAL_STEP_ACTION)
        ):
            self._marks += (Mark.EXIT, self._stamp())
        self._users.stop(action_name)

    def summary(self) -> str:
        """The user's profiler's summary."""
        return self._users.summary()  # type: ignore[no-any-return]

    def describe(self) -> None:
        """Have the user's profiler report."""
        self._users.describe()


def _do_nothing() -> None:
    pass


def make_tap(package: LightningPackage, users_profiler: Any, **settings: Any) -> Any:
    """A `ProfilerTap` that is a profiler of this Lightning package."""
    user_has_none = type(users_profiler) is package.pass_through_profiler
    return _tap_class(package)(users_profiler, user_has_none=user_has_none, **settings)


@functools.cache
def _tap_class(package: LightningPackage) -> type[Any]:
    return type("ProfilerTap", (ProfilerTap, package.profiler_base), {})


def owner_and_hook(action_name: str) -> tuple[str, str]:
    """The parts of an action's name: `[Strategy]DDPStrategy.training_step` has the owner Strategy and this hook."""
    owner, bracket, rest = action_name.removeprefix("[").partition("]")
    return (owner, rest.rpartition(".")[2]) if bracket else ("", action_name)


def action_marks(action_name: str, phase_marks: PhaseMarks) -> ActionMarks:
    """The marks at the start and the end of an action; (None, None) where it bounds nothing."""
    owner, hook = owner_and_hook(action_name)
    if owner and hook in VALIDATION_HOOKS:
        return Mark.VALIDATION, None
    return phase_marks.get((owner, hook), (None, None))
