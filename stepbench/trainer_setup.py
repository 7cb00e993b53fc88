"""The trainer of a run: the user's own settings without what a timing run must not do, and stand-ins for that.

The trainer runs the loop and nothing beside it: what prints, logs, saves, stops early or validates is off. The user's
code may still look for it: there is a logger that keeps nothing, a checkpoint callback that saves nothing, and the
epochs and steps that the training would have had, so that a learning-rate schedule is made as it would be.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepbench.lightning_package import LightningPackage, package_of
from stepbench.record import RunSpec

SET_ASIDE_ARGUMENTS = (
    "logger",
    "enable_checkpointing",
    "enable_progress_bar",
    "enable_model_summary",
    "enable_autolog_hparams",
    "model_registry",
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "max_time",
    "fast_dev_run",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "num_nodes",
    "profiler",
    "barebones",
)
"""Arguments of the trainer that a timing run must not use, or decides itself."""

SET_ASIDE_CALLBACKS = (
    "Checkpoint",
    "EarlyStopping",
    "BatchSizeFinder",
    "LearningRateFinder",
    "Timer",
    "ProgressBar",
    "ModelSummary",
)
"""Callbacks of Lightning's, with all that derive from them, that save, stop, search or print."""

HORIZON = ("max_epochs", "max_steps")
"""Arguments that schedules are made for, and that are therefore looked at before they are set aside."""

NEVER_BUILT = tuple(name for name in SET_ASIDE_ARGUMENTS if name not in HORIZON)
"""Arguments that are set aside while they are still text, so that no logger or profiler of the user's is ever made."""

NO_LIMIT = -1

USUAL_MAX_EPOCHS = 1000
"""What Lightning trains for where nothing is said."""

PLANNED_STEPS = 1_000_000
"""How many steps a training is said to have that has no end of its own."""


class UnsupportedError(Exception):
    """The machine has no such device, or not as many, or the device no such precision."""


@dataclass(slots=True)
class UserTrainer:
    """What the user's own files say of the trainer: arguments by name, callbacks among them, and its class if any."""

    arguments: dict[str, Any] = field(default_factory=dict)
    trainer_class: type[Any] | None = None
    set_aside: list[str] = field(default_factory=list)
    """What has been set aside already, while it was still text."""


SET_ASIDE_CALLBACK_PATH = re.compile(
    r"(lightning\.pytorch|pytorch_lightning)\..*\."
    r"(\w*Checkpoint|EarlyStopping|BatchSizeFinder|LearningRateFinder|Timer|\w*ProgressBar|\w*ModelSummary)"
)


def is_set_aside_callback(path: str) -> bool:
    """Whether a dotted path is that of one of Lightning's own callbacks that are set aside; nothing is imported."""
    return SET_ASIDE_CALLBACK_PATH.fullmatch(path) is not None


def set_aside_callback_types(package: LightningPackage) -> tuple[type[Any], ...]:
    """The classes of `SET_ASIDE_CALLBACKS` that this package has."""
    return tuple(getattr(package.root.callbacks, name) for name in SET_ASIDE_CALLBACKS)


def without_set_aside(
    arguments: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that are kept and those that are set aside; one that is as it is by default is neither."""
    told = {name: value for name, value in arguments.items() if name not in defaults or value != defaults[name]}
    kept = {name: value for name, value in told.items() if name not in SET_ASIDE_ARGUMENTS}
    return kept, {name: value for name, value in told.items() if name in SET_ASIDE_ARGUMENTS}


def trainer_defaults(package: LightningPackage) -> dict[str, Any]:
    """The trainer's own default of each of its arguments."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(package.root.Trainer).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTrainer:
    """A trainer with what was kept of the user's settings, as text, and what was set aside.

    `make_another` makes a further trainer like it, without the user's callbacks, with arguments of its own on top.
    """

    trainer: Any
    make_another: Callable[..., Any]
    kept: tuple[tuple[str, str], ...]
    set_aside: tuple[str, ...]


def make_trainer(
    spec: RunSpec, package: LightningPackage, user: UserTrainer, *, epochs: int | None, scratch: Path
) -> PreparedTrainer:
    """The trainer that a spec asks for; what it leaves open is as the user has it, and else as Lightning has it.

    It trains for `epochs`, or until it is told to stop. `scratch` is a directory for what the user's code writes.
    Raises UnsupportedError where the machine cannot do it, TypeError for a callback that is none of this package's.
    """
    kept, aside = without_set_aside(user.arguments, trainer_defaults(package))
    callbacks, callbacks_aside = _split_checked(kept.pop("callbacks", None), package)
    asked = _asked_for(spec, package)
    kept = {name: value for name, value in kept.items() if name not in asked}
    planned_epochs, planned_steps = aside.get("max_epochs"), aside.get("max_steps", NO_LIMIT)
    ours = {
        "max_epochs": planned_epochs
        if planned_epochs is not None or planned_steps != NO_LIMIT
        else (epochs or USUAL_MAX_EPOCHS),
        "max_steps": planned_steps,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "logger": _stand_in_logger_class(package)(scratch),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    settings = {**kept, **asked, **ours, "callbacks": [*callbacks, _run_preparation(package, epochs)]}
    trainer_class = _timed_trainer_class(user.trainer_class or package.root.Trainer, package)  # type: ignore[arg-type]

    def make(**further: Any) -> Any:
        trainer = trainer_class(**{**settings, **further, "logger": settings["logger"]})
        trainer.scratch = scratch
        return trainer

    try:
        trainer = make()
    except Exception as error:
        _raise_if_unsupported(spec, package, {**asked, **ours}, error)
        raise
    shown = [(name, _as_text(value)) for name, value in kept.items() if value is not None]
    shown += [("callbacks", ", ".join(type(callback).__name__ for callback in callbacks))] if callbacks else []
    if user.arguments.get("devices", "auto") not in ("auto", spec.num_devices, str(spec.num_devices), -1):
        aside |= {f"devices={user.arguments['devices']}": None}
    named = [*user.set_aside, *(f"trainer.{name}" for name in aside), *callbacks_aside]
    return PreparedTrainer(trainer=trainer, make_another=make, kept=tuple(shown), set_aside=tuple(dict.fromkeys(named)))


def _as_text(value: Any) -> str:
    """A setting for people, of an object its class."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_as_text, value))
    return str(value) if isinstance(value, (str, int, float, Path)) else type(value).__name__


def _asked_for(spec: RunSpec, package: LightningPackage) -> dict[str, Any]:
    """The arguments that the spec decides. Raises ValueError for a strategy that Lightning does not know."""
    strategies = package.root.strategies.StrategyRegistry
    if spec.strategy not in (None, *strategies):
        raise ValueError(f"Lightning has no strategy={spec.strategy}; strategies: {', '.join(sorted(strategies))}")
    asked = {
        "accelerator": spec.accelerator,
        "devices": spec.num_devices,
        "strategy": spec.strategy,
        "precision": spec.precision,
        "accumulate_grad_batches": spec.accumulate_grad_batches,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _raise_if_unsupported(
    spec: RunSpec, package: LightningPackage, settings: Mapping[str, Any], error: Exception
) -> None:
    """Raise UnsupportedError where the trainer cannot be made without the user's own settings either."""
    try:
        package.root.Trainer(**settings)
    except Exception:
        pass
    else:
        return
    registry = package.accelerator_registry
    usable = [name for name, entry in registry.items() if entry["accelerator"].is_available()]
    if spec.accelerator not in (None, "auto", "gpu", *usable):
        found = f"there is no {spec.accelerator} device here; usable: {', '.join(usable)}"
        raise UnsupportedError(found) from error
    further = [f"devices={spec.num_devices}"] * (spec.num_devices > 1)
    further += [f"strategy={spec.strategy}"] * (spec.strategy is not None)
    asked = f"precision {spec.precision} on {spec.accelerator}" + " with " * bool(further) + " ".join(further)
    raise UnsupportedError(f"{asked}: {' '.join(str(error).split())}") from error


# ---- callbacks ----


def split_callbacks(callbacks: Sequence[Any], package: LightningPackage) -> tuple[list[Any], list[str]]:
    """The callbacks that are kept, and the names of those that are set aside."""
    types = set_aside_callback_types(package)
    kept = [callback for callback in callbacks if not isinstance(callback, types)]
    return kept, [type(callback).__name__ for callback in callbacks if isinstance(callback, types)]


def _split_checked(callbacks: Any, package: LightningPackage) -> tuple[list[Any], list[str]]:
    """The same of one callback, several or none. Raises TypeError for one that is none of this package's."""
    found = [] if callbacks is None else callbacks if isinstance(callbacks, Sequence) else [callbacks]
    for callback in found:
        other = package_of(callback, "Callback")
        if other != package.name:
            name = f"{type(callback).__module__}.{type(callback).__qualname__}"
            what = f"a callback of {other}" if other else "no Lightning callback"
            raise TypeError(f"callbacks must be built on {package.name}, as the module is, but {name} is {what}")
    return split_callbacks(found, package)


def quieten_module(model: Any, datamodule: Any, package: LightningPackage, set_aside: Callable[[str], None]) -> None:
    """Have the module configure only callbacks that are kept, and no hyperparameters be logged.

    `set_aside` is told the names of the other callbacks. Lightning compares the hyperparameters of module and data
    module only to log them, and fails where one has been given another value than the other.
    """
    configure = model.configure_callbacks

    @functools.wraps(configure)
    def configure_kept() -> list[Any]:
        kept, aside = _split_checked(configure(), package)
        for name in aside:
            set_aside(name)
        return kept

    model.configure_callbacks = configure_kept
    for owner in (model, datamodule):
        if owner is not None:
            owner._log_hyperparams = False


@functools.cache
def _run_preparation_class(base: type[Any]) -> type[Any]:
    class RunPreparation(base):  # type: ignore[misc]
        """Does what can only be done when training starts, and then costs nothing: it takes itself off."""

        def __init__(self, epochs: int | None) -> None:
            self.epochs = epochs

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Lift the limits that the schedules were made for, and let the schedules bear it."""
            trainer.planned = (trainer.max_epochs, trainer.max_steps)
            trainer.fit_loop.max_epochs = NO_LIMIT if self.epochs is None else self.epochs
            trainer.fit_loop.epoch_loop.max_steps = NO_LIMIT
            for config in trainer.lr_scheduler_configs:
                config.strict = False  # the metric that it watches may be one of the validation, which is off
                for scheduler in _flatten_schedulers(config.scheduler):
                    _stop_at_its_end(scheduler, trainer)
            trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]

    return RunPreparation


def _run_preparation(package: LightningPackage, epochs: int | None) -> Any:
    return _run_preparation_class(package.root.Callback)(epochs)


def _flatten_schedulers(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those that it is made of."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _flatten_schedulers(inner)


def _stop_at_its_end(scheduler: Any, trainer: Any) -> None:
    """Let a schedule that fails when it is stepped past its end keep its last rate instead."""
    if not callable(getattr(scheduler, "step", None)):
        return
    step = scheduler.step
    has_ended = False

    @functools.wraps(step)
    def step_until_its_end(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_ended
        if has_ended:
            return None
        try:
            return step(*args, **kwargs)
        except Exception:
            num_steps = getattr(scheduler, "total_steps", None) or _planned_steps(trainer)
            if max(getattr(scheduler, "last_epoch", 0), trainer.global_step) < num_steps:
                raise
            has_ended = True
            return None

    scheduler.step = step_until_its_end


def _planned_steps(trainer: Any) -> float:
    try:
        return float(trainer.estimated_stepping_batches)
    except Exception:  # such as an accumulation that changes from epoch to epoch
        return math.inf


# ---- stand-ins ----


@functools.cache
def _timed_trainer_class(base: type[Any], package: LightningPackage) -> type[Any]:
    class Trainer(base):  # type: ignore[misc]
        """Shows the user's code the training that it would be part of, whatever the limits of the run are."""

        planned: tuple[Any, Any] | None = None
        """Epochs and steps that the training would have; None until the run lifts them."""

        scratch: Path

        @property
        def max_epochs(self) -> Any:
            """The epochs that the training would have."""
            return super().max_epochs if self.planned is None else self.planned[0]

        @property
        def max_steps(self) -> Any:
            """The steps that the training would have."""
            return super().max_steps if self.planned is None else self.planned[1]

        @property
        def estimated_stepping_batches(self) -> Any:
            """The steps that the training would have, a large number where it would have no end."""
            steps = super().estimated_stepping_batches
            return steps if math.isfinite(steps) and steps != NO_LIMIT else PLANNED_STEPS

        @property
        def checkpoint_callback(self) -> Any:
            """A checkpoint callback to look at; it is not among the callbacks, so that it costs nothing."""
            return super().checkpoint_callback or self.stand_in_checkpoint

        @functools.cached_property
        def stand_in_checkpoint(self) -> Any:
            """Saves nothing."""
            return package.root.callbacks.ModelCheckpoint(dirpath=self.scratch)

    return Trainer


class Nothing:
    """Whatever is asked of it, it does nothing and gives itself, as the client of a logging service must be able to."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        """Do nothing."""
        return self

    def __getitem__(self, key: Any) -> Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *exception: object) -> None:
        """Let the exception pass."""


@functools.cache
def _stand_in_logger_class(package: LightningPackage) -> type[Any]:
    class StandInLogger(package.root.loggers.Logger):  # type: ignore[misc, name-defined]
        """Keeps nothing; `log_dir` is a directory that is made when it is asked for."""

        def __init__(self, scratch: Path) -> None:
            super().__init__()
            self._scratch = scratch

        @property
        def name(self) -> str:
            """The experiment's."""
            return "stepbench"

        @property
        def version(self) -> int:
            """The run's."""
            return 0

        @property
        def experiment(self) -> Nothing:
            """Takes any call."""
            return NOTHING

        @property
        def log_dir(self) -> str:
            """A directory to write to."""
            self._scratch.mkdir(parents=True, exist_ok=True)
            return str(self._scratch)

        root_dir = save_dir = log_dir

        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            """Keep nothing."""

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            """Keep nothing."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return NOTHING

    return StandInLogger


NOTHING = Nothing()
