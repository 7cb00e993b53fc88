"""Builds the user's classes from what the configuration says of them."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from stepbench.record import Component


def build(component: Component) -> Any:
    """Import a component's target and call it with its arguments, nested `_target_`s included (Hydra's own rules).

    Raises ImportError where the target cannot be imported; an exception of the user's constructor comes out as it was
    raised.
    """
    find(component.target)
    try:
        return instantiate({"_target_": component.target, **component.arguments})
    except InstantiationException as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, InstantiationException):
            raise error.__cause__ from None
        raise


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
    """What a dotted path names. Raises an ImportError that says which part of it is missing, and where was searched."""
    parts = target.split(".")
    found: Any = None
    for position, name in enumerate(parts):
        path = ".".join(parts[: position + 1])
        if position == 0 or (isinstance(found, ModuleType) and not hasattr(found, name)):
            try:
                found = importlib.import_module(path)
                continue
            except ModuleNotFoundError as error:
                if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
                    raise  # something that the user's module imports itself
        if position == 0:
            raise ModuleNotFoundError(f"{target}: no module {name} in {os.getcwd()} or on Python's path")
        if not hasattr(found, name):
            close = difflib.get_close_matches(name, dir(found), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ImportError(f"{target}: {'.'.join(parts[:position])} has no {name}{hint}")
        found = getattr(found, name)
    return found
