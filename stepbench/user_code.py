"""Builds the user's classes from what the configuration says of them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from stepbench.composition_errors import did_you_mean
from stepbench.loader_arguments import LOADER_SETTINGS, find_parameter
from stepbench.record import Component
from stepbench.trainer_setup import UserTrainer

HYDRA_KEY = re.compile(r"_[a-z]+_")
"""Keys such as `_target_` and `_partial_`, which are for Hydra and no arguments."""


STARTED_IN_VARIABLE = "STEPBENCH_STARTED_IN"

STARTED_IN = Path(os.environ.get(STARTED_IN_VARIABLE) or Path.cwd())
"""Where the command was typed: a run may have a directory of its own, in which its further ranks start."""


@dataclass(slots=True)
class Program:
    """A user's program, built but not yet fitted: its module, its data module if any, and its trainer's settings.

    `placed` says of settings of the loaders which argument they were given through.
    """

    model: Any
    datamodule: Any | None
    trainer: UserTrainer = field(default_factory=UserTrainer)
    placed: dict[str, str] = field(default_factory=dict)


def enter(directory: Path) -> None:
    """Change to another directory for what the user's code writes; what it imports is still found."""
    os.environ[STARTED_IN_VARIABLE] = str(STARTED_IN)
    if str(STARTED_IN) not in sys.path:
        sys.path.insert(0, str(STARTED_IN))
    os.chdir(directory)


@contextlib.contextmanager
def hidden_command_line() -> Iterator[None]:
    """The user's code may look at the arguments of the process, which are not for it: it finds none."""
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments


def build(component: Component, key: str) -> Any:
    """Import a component's target and call it with its arguments, nested `_target_`s included (Hydra's own rules).

    `key` is where the configuration has the arguments. Raises ImportError where the target cannot be imported,
    TypeError where an argument is missing or is none; an exception of the user's constructor comes out as it was
    raised.
    """
    target, arguments = find(component.target), component.arguments
    _check_arguments(key, target, component.target, arguments)
    return build_nested({"_target_": target, **arguments})


def build_nested(value: Any) -> Any:
    """A value with each `_target_` in it built; what has none comes back as it is."""
    if not isinstance(value, (dict, list)):
        return value
    try:
        return instantiate(_with_targets_found(value))
    except InstantiationException as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, InstantiationException):
            raise error.__cause__ from None
        raise


def _with_targets_found(value: Any) -> Any:
    """Arguments whose nested `_target_`s that Hydra cannot import, such as `pkg.mod:Class`, are the classes instead."""
    if isinstance(value, dict):
        return {
            key: find(inner) if key == "_target_" and isinstance(inner, str) and ":" in inner else inner
            for key, inner in ((key, _with_targets_found(inner)) for key, inner in value.items())
        }
    return [_with_targets_found(inner) for inner in value] if isinstance(value, list) else value


def _check_arguments(key: str, function: Any, target: str, arguments: dict[str, Any]) -> None:
    """Raise TypeError, naming the key, where a call cannot go well: an argument that is missing, or is none."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # it does not tell
        return
    given = {name for name in arguments if not HYDRA_KEY.fullmatch(name)}
    if "_args_" in arguments or "_partial_" in arguments:
        return
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in by_name and parameter.default is parameter.empty and name not in given
    ]
    if missing:
        hints = " ".join(_hint(key, name) for name in missing)
        raise TypeError(f"{target} needs {' and '.join(missing)}, which {key} does not have: give {hints}")
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [name for name, parameter in parameters.items() if parameter.kind in by_name]
    unknown = sorted(given - set(known))
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise TypeError(f"{target} takes no argument {unknown[0]} ({key}.{unknown[0]}); {takes}")


def _hint(key: str, name: str) -> str:
    """How an argument is given on the command line; for one of the loaders' there is a setting."""
    settings = [setting for setting in LOADER_SETTINGS if find_parameter([name], setting)]
    return f"{settings[0]}=VALUE" if settings else f"+{key}.{name}=VALUE"


def find_function(key: str, target: str) -> Callable[..., Any]:
    """The function at a dotted path that the setting `key` gives.

    Raises ImportError where it cannot be imported, TypeError where it is something else; both name the key.
    """
    try:
        found = find(target)
    except ImportError as error:
        raise type(error)(f"{key}: {error}") from error
    if not callable(found):
        raise TypeError(f"{key} must name a function, got {target} whose type is {type(found).__qualname__}")
    function: Callable[..., Any] = found
    return function


def find(target: str) -> Any:
    """What a path names: `pkg.mod.Class`, `pkg.mod:Class`, or `./file.py:Class` with the file's own neighbours.

    Raises an ImportError that says which part of it is missing, and where was searched.
    """
    module_part, colon, attribute_part = target.rpartition(":")
    if target.endswith(".py"):
        raise ImportError(f"{target}: name something in the file, such as {target}:MyClass")
    if colon and module_part.endswith(".py"):
        return _find_attribute(_import_file(Path(module_part)), module_part, attribute_part, target)
    if colon:
        return _find_attribute(_import_module(module_part, target), module_part, attribute_part, target)
    parts = target.split(".")
    found: Any = _import_module(parts[0], target)
    for position, name in enumerate(parts[1:], start=1):
        if isinstance(found, ModuleType) and not hasattr(found, name):
            path = ".".join(parts[: position + 1])
            try:
                found = importlib.import_module(path)
                continue
            except ModuleNotFoundError as error:
                if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
                    raise  # something that the user's module imports itself
        found = _find_attribute(found, ".".join(parts[:position]), name, target)
    return found


def _import_module(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # something that the user's module imports itself
        raise ModuleNotFoundError(f"{target}: no module {error.name} {where_was_searched()}") from None


def where_was_searched() -> str:
    """The directories that modules are looked for in, but for those of Python itself, for a person to read."""
    own = [os.getcwd(), *sys.path]
    not_users = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    searched = dict.fromkeys(path for path in own if path and not path.startswith(not_users) and os.path.isdir(path))
    shown = ", ".join(searched)
    return (
        f"in {shown}, or installed; start in the directory that holds it (python -m stepbench and stepbench look alike "
        "there), or name that directory in PYTHONPATH"
    )


def _find_attribute(owner: Any, owner_name: str, path: str, target: str) -> Any:
    found = owner
    for name in path.split("."):
        if not hasattr(found, name):
            raise ImportError(f"{target}: {owner_name} has no {name}{did_you_mean(name, dir(found))}")
        found, owner_name = getattr(found, name), f"{owner_name}.{name}"
    return found


@functools.cache
def _import_file(path: Path) -> ModuleType:
    """Import a file as the script that it may be: what lies beside it can be imported from it."""
    path = (STARTED_IN / path.expanduser()).resolve()
    if not path.is_file():
        raise ModuleNotFoundError(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__spec__ is not None and loaded.__spec__.origin == str(path):
        return loaded
    if loaded is not None or not name.isidentifier():
        name = f"file_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
