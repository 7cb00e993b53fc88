"""Builds the user's classes from what the configuration says of them."""

from __future__ import annotations

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from stepbench.record import Component


def build(component: Component) -> Any:
    """Import a component's target and call it with its arguments, nested `_target_`s included (Hydra's own rules).

    An exception of the user's constructor comes out as it was raised; what Hydra itself finds wrong, such as a target
    that cannot be imported, as Hydra's `InstantiationException`.
    """
    try:
        return instantiate({"_target_": component.target, **component.arguments})
    except InstantiationException as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, InstantiationException):
            raise error.__cause__ from None
        raise
