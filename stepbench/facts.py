"""What is to be said of a training beside its timings: what really ran, where, with which loaders, in what memory."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Sequence
from typing import Any

import torch

from stepbench import device, environment
from stepbench.callback import PhaseTimer
from stepbench.record import BatchTiming, EffectiveSettings, Environment, Sampling
from stepbench.samples import flatten_loaders, own_batch_size


def effective_settings(
    trainer: Any,
    timer: PhaseTimer | None,
    rows: Sequence[BatchTiming],
    *,
    worker_start: str | None = None,
    compile_mode: str | None = None,
) -> EffectiveSettings:
    """What ran, to be compared with what was asked for; `rows` are those of one rank."""
    root_device = trainer.strategy.root_device
    return EffectiveSettings(
        precision=str(trainer.precision),
        batch_size=largest_batch(rows) or next(iter(loader_batch_sizes(trainer)), None),
        accelerator=root_device.type,
        device_name=device.device_name(root_device, environment.static_environment().cpu_model),
        num_devices=trainer.world_size,
        strategy=type(trainer.strategy).__name__,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        num_workers=loader_setting(trainer, "num_workers"),
        pin_memory=loader_setting(trainer, "pin_memory"),
        persistent_workers=loader_setting(trainer, "persistent_workers"),
        start_method=multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        worker_start=worker_start,
        num_threads=torch.get_num_threads(),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        compile=compile_mode,
        timer=None if timer is None else timer.timer_kind,
        sampling=None if timer is None else _sampling_text(timer.sampling),
        lightning_package=None if timer is None else timer.package.name,
    )


def _sampling_text(sampling: Sampling) -> str | None:
    is_every_step = sampling.timed_steps == sampling.period_steps
    return None if is_every_step else f"{sampling.timed_steps}/{sampling.period_steps}"


def largest_batch(rows: Sequence[BatchTiming]) -> int | None:
    """The samples of the largest batch seen; None where they could not be counted."""
    return max((row.num_samples for row in rows if row.num_samples is not None), default=None)


def loader_batch_sizes(trainer: Any) -> list[int]:
    """The batch sizes of the training loaders, as far as they have one."""
    sizes = map(own_batch_size, flatten_loaders(trainer.train_dataloader))
    return [size for size in sizes if size is not None]


def numbers_of_items(trainer: Any) -> list[int]:
    """The lengths of the data sets that the training loaders batch, as far as they have one."""
    lengths = []
    for loader in flatten_loaders(trainer.train_dataloader):
        if own_batch_size(loader) is not None:
            with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
                lengths.append(len(loader.dataset))
    return lengths


def loader_setting(trainer: Any, name: str) -> Any:
    """The largest value that one of the training loaders has; None where no loader tells."""
    loaders = flatten_loaders(trainer.train_dataloader)
    return max((getattr(loader, name) for loader in loaders if hasattr(loader, name)), default=None)


def environment_at_start() -> Environment:
    """The machine and the software, as a run meets them."""
    return dataclasses.replace(
        environment.static_environment(),
        load_average_start=environment.load_average(),
        variables=environment.speed_variables(),
    )


def environment_at_end(at_start: Environment, *, has_trained: bool) -> Environment:
    """The same with what is only known at the end; the accelerators are looked at where they have been at work."""
    states = environment.accelerator_states() if has_trained else ()
    return dataclasses.replace(at_start, load_average_end=environment.load_average(), accelerators=states)


def peak_memory(trainer: Any) -> dict[str, Any]:
    """The most memory used so far by this process and on its device, as fields of a record; the device's unless CPU."""
    root_device = None if trainer is None else trainer.strategy.root_device
    return {
        "peak_host_memory_bytes": device.peak_host_memory_bytes(),
        "peak_device_memory_bytes": None if root_device is None else device.peak_device_memory_bytes(root_device),
    }


def count_parameters(model: object) -> dict[str, Any]:
    """A model's parameters, as fields of a record; nothing of what is no model."""
    if not isinstance(model, torch.nn.Module):
        return {}
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
