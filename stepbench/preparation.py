"""What comes before every fit, timed or profiled: the process's settings, the user's program, loaders, trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stepbench.lightning_package import LightningPackage, load_package
from stepbench.loader_overrides import LoaderOverrides
from stepbench.program import build_program, wanted_of
from stepbench.record import RunRequest
from stepbench.trainer_setup import make_trainer, quieten_module
from stepbench.user_code import hidden_command_line

PRELOADED = load_package("lightning.pytorch")
"""The package that most modules are built on; the other one is imported only by a module that is built on it."""


@dataclass(slots=True)
class Preparation:
    """What a run has made ready so far, so that a failure loses none of it."""

    package: LightningPackage = PRELOADED
    model: Any = None
    datamodule: Any = None
    loaders: LoaderOverrides | None = None
    trainer: Any = None
    make_trainer: Callable[..., Any] | None = None
    trainer_settings: tuple[tuple[str, str], ...] = ()
    set_aside: list[str] = field(default_factory=list)


def prepare(request: RunRequest, run: Preparation, scratch: Path, *, epochs: int | None) -> Any:
    """Do what the request asks for before the fit, note it in `run`, and return the module to fit, compiled if asked.

    `scratch` is a directory for what the user's code writes. The trainer trains for `epochs`, or until it is told to
    stop. Raises what `build_program` and `make_trainer` raise.
    """
    spec = request.spec
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    if spec.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(spec.float32_matmul_precision)
    PRELOADED.root.seed_everything(spec.seed or 0, verbose=False)  # before there is a module; both packages do the same
    with hidden_command_line():
        program, run.package = build_program(request, scratch.parent)
    run.model, run.datamodule = program.model, program.datamodule
    run.loaders = LoaderOverrides(wanted_of(spec), program.placed)
    run.loaders.attach(program.model, program.datamodule)
    quieten_module(program.model, program.datamodule, run.package, run.set_aside.append)
    model = program.model if spec.compile is None else _compile(program.model, spec.compile)
    prepared = make_trainer(spec, run.package, program.trainer, epochs=epochs, scratch=scratch)
    run.trainer, run.trainer_settings, run.make_trainer = prepared.trainer, prepared.kept, prepared.make_another
    run.set_aside += prepared.set_aside
    return model


def _compile(model: Any, mode: str) -> Any:
    """The module compiled as Lightning's documentation has it, but for its logging, which the compiler cannot trace."""
    model.log = torch.compiler.disable(model.log)  # type: ignore[no-untyped-call]  # `log_dict` calls it too
    return torch.compile(model, mode=mode)
