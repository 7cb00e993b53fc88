"""A user's program, whatever it is configured by, built and made ready to be fitted."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection
from pathlib import Path

from stepbench import user_code
from stepbench.lightning_package import LightningPackage, load_package, package_of
from stepbench.loader_arguments import LoaderSettings, find_parameter
from stepbench.record import CUSTOM, RUN_DIRECTORY, Component, RunRequest, RunSpec, canonical_json
from stepbench.trainer_setup import NEVER_BUILT, UserTrainer, set_aside_callback_types
from stepbench.user_code import Program


def build_program(request: RunRequest, run_directory: Path) -> tuple[Program, LightningPackage]:
    """Build what the request's spec describes; nothing is fitted. `run_directory` is the one that arguments may hold.

    Raises ImportError, TypeError or ValueError that name the key where it cannot be; an exception of the user's own
    code comes out as it was raised.
    """
    spec = request.spec
    if spec.cli is not None:
        from stepbench.cli_program import build_cli_program  # takes a parser that only such a program needs

        program = build_cli_program(
            spec.cli, wanted=wanted_of(spec), seed=spec.seed, batch_size_key=request.batch_size_key
        )
        package = _find_package(program, "the file's model", "the file's data")
    else:
        assert spec.model is not None
        program = _build_components(request, spec.model, run_directory)
        custom = tuple(key for key, choice in request.choices if choice == CUSTOM)
        package = _find_package(program, spec.model.target, spec.data.target if spec.data else "", custom)
        if spec.trainer is not None:
            program.trainer = _build_trainer(_located(spec.trainer, run_directory), package)
    program.trainer.set_aside = [*request.set_aside, *program.trainer.set_aside]
    if spec.setup_fn is not None:
        _set_up(program, spec.setup_fn)
    return program, package


def wanted_of(spec: RunSpec) -> LoaderSettings:
    """What the spec asks of the training loaders."""
    return LoaderSettings(
        batch_size=spec.batch_size,
        num_workers=spec.num_workers,
        pin_memory=spec.pin_memory,
        persistent_workers=False if spec.num_workers == 0 else spec.persistent_workers,  # else torch refuses
    )


def _located(component: Component, run_directory: Path) -> Component:
    """The component with the run's directory in its place."""
    text = component.arguments_json.replace(RUN_DIRECTORY, json.dumps(str(run_directory))[1:-1])
    return Component(target=component.target, arguments_json=text)


def _build_components(request: RunRequest, model: Component, run_directory: Path) -> Program:
    """Module and data module from their targets, with the loaders' settings where their constructors take them."""
    data, choices = request.spec.data, dict(request.choices)
    placed = dict(request.placed)
    keys = {key: f"{key}.kwargs" if choices.get(key) == CUSTOM else key for key in ("model", "data")}
    if data is not None:
        data = _with_loader_settings(data, keys["data"], request.spec, placed)
    else:
        model = _with_loader_settings(model, keys["model"], request.spec, placed)
    built_model = user_code.build(_located(model, run_directory), keys["model"])
    built_data = None if data is None else user_code.build(_located(data, run_directory), keys["data"])
    return Program(model=built_model, datamodule=built_data, placed=placed)


def _with_loader_settings(component: Component, key: str, spec: RunSpec, placed: dict[str, str]) -> Component:
    """The component with the settings that its constructor has an argument for, which the configuration left out."""
    try:
        parameters = inspect.signature(user_code.find(component.target)).parameters
    except (TypeError, ValueError):  # it does not tell
        return component
    arguments = component.arguments
    names = [name for name, parameter in parameters.items() if parameter.kind is not parameter.POSITIONAL_ONLY]
    for setting, value in wanted_of(spec).given:
        name = find_parameter([name for name in names if name not in arguments], setting)
        if setting not in placed and name is not None:
            arguments[name] = value
            placed[setting] = f"{key}.{name}"
    return Component(target=component.target, arguments_json=canonical_json(arguments))


def _find_package(program: Program, model_name: str, data_name: str, custom: Collection[str] = ()) -> LightningPackage:
    """The one of the two Lightning packages that both are built on. Raises TypeError where there is no such package."""
    keys = {key: f"{key}.path" if key in custom else f"{key}._target_" for key in ("model", "data")}
    model_package = _package_of(program.model, "LightningModule", keys["model"], model_name)
    if program.datamodule is None:
        return load_package(model_package)
    data_package = _package_of(program.datamodule, "LightningDataModule", keys["data"], data_name)
    if model_package != data_package:
        raise TypeError(
            f"model and data must be built on the same Lightning package, but {model_name} is a LightningModule "
            f"of {model_package} and {data_name} a LightningDataModule of {data_package}: import both from one"
        )
    return load_package(model_package)


def _package_of(built: object, class_name: str, key: str, target: str) -> str:
    package = package_of(built, class_name)
    if package is None:
        found = f"{type(built).__module__}.{type(built).__qualname__}"
        raise TypeError(f"{key} must name a lightning {class_name}, got {target} which gives a {found}")
    return package


def _build_trainer(component: Component, package: LightningPackage) -> UserTrainer:
    """The trainer's arguments as objects, without building those that are set aside."""
    trainer_class = user_code.find(component.target)
    if not (inspect.isclass(trainer_class) and issubclass(trainer_class, package.root.Trainer)):
        raise TypeError(
            f"trainer._target_ must name the Trainer of {package.name}, as the module is, got {component.target}"
        )
    arguments = component.arguments
    set_aside = [f"trainer.{name}" for name in arguments if name in NEVER_BUILT]
    kept = {name: value for name, value in arguments.items() if f"trainer.{name}" not in set_aside}
    callbacks = []
    for callback in kept.pop("callbacks", None) or []:
        kind = user_code.find(callback["_target_"])
        if inspect.isclass(kind) and issubclass(kind, set_aside_callback_types(package)):
            set_aside.append(kind.__name__)
        else:
            callbacks.append(user_code.build_nested(callback))
    built = {name: user_code.build_nested(value) for name, value in kept.items()}
    return UserTrainer(
        arguments={**built, "callbacks": callbacks},
        trainer_class=None if trainer_class is package.root.Trainer else trainer_class,
        set_aside=set_aside,
    )


def _set_up(program: Program, setup_fn: str) -> None:
    """Call the user's function between construction and fit; it may give another module and data module."""
    function = user_code.find_function("setup_fn", setup_fn)
    try:
        inspect.signature(function).bind(program.model, program.datamodule)
    except TypeError as error:
        raise TypeError(f"setup_fn={setup_fn} is called as a function of (model, datamodule): {error}") from error
    given = function(program.model, program.datamodule)
    if given is None:
        return
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(
            f"setup_fn={setup_fn} must return nothing, or a module and a data module, got {type(given).__name__}"
        )
    program.model, program.datamodule = given
