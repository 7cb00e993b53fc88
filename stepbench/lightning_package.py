"""Lightning exists twice, as `lightning.pytorch` and as `pytorch_lightning`, whose classes do not know each other.

All that a run needs of Lightning is taken from the package that the user's own module is built on.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LightningPackage:
    """One of the two packages and what is used of it."""

    name: str
    root: Any
    """The package itself: `Trainer`, `Callback`, `LightningModule`, `LightningDataModule`, `seed_everything`."""
    profiler_base: type[Any]
    pass_through_profiler: type[Any]
    sigterm_exception: type[BaseException]
    accelerator_registry: Any


@functools.cache
def load_package(name: str) -> LightningPackage:
    """Import `lightning.pytorch` or `pytorch_lightning`. Raises ImportError where it is not installed."""
    profilers = importlib.import_module(f"{name}.profilers")
    return LightningPackage(
        name=name,
        root=importlib.import_module(name),
        profiler_base=profilers.Profiler,
        pass_through_profiler=profilers.PassThroughProfiler,
        sigterm_exception=importlib.import_module(f"{name}.utilities.exceptions").SIGTERMException,
        accelerator_registry=importlib.import_module(f"{name}.accelerators").AcceleratorRegistry,
    )


def package_of(value: object, class_name: str) -> str | None:
    """The package whose `class_name`, such as `LightningModule`, a value is an instance of; None for neither.

    What `torch.compile` wraps counts as what it wraps, as it does for Lightning.
    """
    value = getattr(value, "_orig_mod", value)
    for base in type(value).__mro__:
        for name in PACKAGES:
            if base.__name__ == class_name and base.__module__.startswith(f"{name}."):
                return name
    return None
