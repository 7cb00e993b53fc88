"""Synthetic sweeps on disk: records and raw rows with known answers, written with the package's own writers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepbench.record import (
    PHASES,
    BatchTiming,
    Compilation,
    Component,
    EffectiveSettings,
    Environment,
    Protocol,
    RunRecord,
    RunRequest,
    RunSpec,
    StartUp,
    Status,
    append_rows,
    canonical_json,
    log_path,
    spec_hash,
    write_record,
)
from stepbench.statistics import summarize_run, with_rank_waits

SHARES = {"data": 0.05, "transfer": 0.01, "forward": 0.40, "backward": 0.37, "optimizer": 0.12, "other": 0.05}
RAN_AS = {"16-mixed": "bf16-mixed", "32": "32-true"}
PROTOCOL = Protocol(name="default", warmup_batches=5, warmup_s=0.3, timed_batches=30, timed_s=1.0)

ENVIRONMENT = Environment(
    host="lab-1",
    operating_system="Linux 6.1",
    cpu_model="Example CPU 3000",
    num_cores=8,
    num_usable_cores=2,
    cgroup_cpu_limit=None,
    memory_bytes=16 * 1024**3,
    versions=(("python", "3.11.7"), ("torch", "2.13.0"), ("lightning", "2.6.6")),
    git_commit="0123456789abcdef0123456789abcdef01234567",
    git_dirty=True,
)


def make_spec(batch_size: int = 16, precision: str = "32", **changes: Any) -> RunSpec:
    """A spec of the built-in kind; `model` and `data` may be mappings of arguments."""
    model = changes.pop("model", {"width": 64})
    data = changes.pop("data", {})
    model = model if isinstance(model, Component) else component("stepbench.models.AutoEncoder", model)
    data = (
        data if isinstance(data, Component) else component("stepbench.data.Images", {"batch_size": batch_size} | data)
    )
    changes = {"accumulate_grad_batches": 1, "seed": 0} | changes
    return RunSpec(model=model, data=data, batch_size=batch_size, precision=precision, accelerator="cpu", **changes)


def component(target: str, arguments: Mapping[str, Any] | None = None) -> Component:
    return Component(target=target, arguments_json=canonical_json(dict(arguments or {})))


def make_rows(
    step_s: float,
    batch_size: int = 16,
    num_batches: int = 35,
    num_warmup: int = 5,
    shares: Mapping[str, float] = SHARES,
    noise: float = 0.0,
    accumulate: int = 1,
    stretch: Mapping[int, float] | None = None,
    epoch_length: int | None = None,
) -> list[BatchTiming]:
    """Rows whose timed steps take `step_s` (times 1 ± `noise`, median exact); `stretch` multiplies single batches."""
    num_warmup, num_batches = (-(-count // accumulate) * accumulate for count in (num_warmup, num_batches))
    rows = []
    for i in range(num_batches):
        wave = 1 + noise * math.sin(2.4 * i) * (0.3 + 0.7 * ((i * 7919) % 13) / 13)
        total = step_s / accumulate * (1 + 2.0 * (num_warmup - i) / num_warmup if i < num_warmup else wave)
        total *= (stretch or {}).get(i, 1.0)
        is_last = (i + 1) % accumulate == 0
        own = {f"{phase}_s": total * share for phase, share in shares.items()}
        if accumulate > 1 and not is_last:
            own["other_s"] += own["optimizer_s"]
            own["optimizer_s"] = 0.0
        starts = epoch_length is not None and i % epoch_length == 0
        ends = epoch_length is not None and (i + 1) % epoch_length == 0
        rows.append(
            BatchTiming(
                epoch=0 if epoch_length is None else i // epoch_length,
                batch=i if epoch_length is None else i % epoch_length,
                step=i // accumulate,
                num_samples=batch_size,
                warmup=i < num_warmup,
                batch_s=total,
                took_optimizer_step=is_last,
                starts_epoch=starts or i == 0,
                validation_ran=ends,
                validation_s=0.5 if ends else 0.0,
                **own,
            )
        )
    return rows


def leave_out(rows: Sequence[BatchTiming], timed: int, period: int, faster: float = 1.0) -> list[BatchTiming]:
    """Block sampling: of every `period` steps all but the first `timed` are timed as a whole, `faster` times faster."""
    columns = [f"{prefix}{phase}_s" for prefix in ("", "device_") for phase in PHASES]
    unknown = dict.fromkeys([*columns, "device_batch_s"])
    return [
        dataclasses.replace(row, batch_s=row.batch_s / faster, **unknown) if row.step % period >= timed else row
        for row in rows
    ]


def merge_backward(rows: Sequence[BatchTiming]) -> list[BatchTiming]:
    """The same rows of a module that runs autograd itself."""
    return [
        dataclasses.replace(
            row, forward_s=(row.forward_s or 0) + (row.backward_s or 0), backward_s=None, backward_merged=True
        )
        for row in rows
    ]


DEVICE_SHARES = {"data": 0.30, "transfer": 0.05, "forward": 0.25, "backward": 0.25, "optimizer": 0.10, "other": 0.05}


def on_device(rows: Sequence[BatchTiming], shares: Mapping[str, float] = DEVICE_SHARES) -> list[BatchTiming]:
    """The same rows with an accelerator's timeline of its own, which takes as long as the host's."""
    placed = []
    for row in rows:
        own: dict[str, float | None] = {f"device_{phase}_s": row.batch_s * share for phase, share in shares.items()}
        if row.backward_merged:
            own["device_forward_s"] = row.batch_s * (shares["forward"] + shares["backward"])
            own["device_backward_s"] = None
        placed.append(dataclasses.replace(row, device_batch_s=row.batch_s, **own))
    return placed


def change(rows: Sequence[BatchTiming], indices: Sequence[int], **changes: Any) -> list[BatchTiming]:
    """The rows with these fields at these indices."""
    return [dataclasses.replace(row, **changes) if i in indices else row for i, row in enumerate(rows)]


def two_ranks(num_batches: int = 35, num_warmup: int = 5) -> list[BatchTiming]:
    """Rank 1 takes 20 ms longer in forward, and rank 0 waits for it in backward: the straggler of TIMING section 4."""

    def rows(forward_s: float, backward_s: float) -> list[BatchTiming]:
        zero = {"data_s": 0.0, "transfer_s": 0.0, "optimizer_s": 0.0, "other_s": 0.0}
        return [
            dataclasses.replace(row, forward_s=forward_s, backward_s=backward_s, batch_s=forward_s + backward_s, **zero)
            for row in make_rows(0.01, num_batches=num_batches, num_warmup=num_warmup)
        ]

    return with_rank_waits([rows(0.011, 0.022), rows(0.031, 0.002)])


def write_run(
    cell_dir: Path,
    spec: RunSpec,
    rows: Sequence[BatchTiming] = (),
    status: Status = Status.OK,
    reason: str | None = None,
    round_: int = 0,
    effective: Mapping[str, Any] | None = None,
    choices: Mapping[str, str] | None = None,
    host: str = "lab-1",
    load_average: float | None = None,
    compilation: Compilation | None = None,
) -> RunRecord:
    """One run on disk: its record, its rows and a log."""
    cell_dir.mkdir(parents=True, exist_ok=True)
    request = RunRequest(
        spec=spec, protocol=PROTOCOL, timer="host", round=round_, choices=tuple((choices or {}).items())
    )
    ran = {
        "precision": RAN_AS.get(spec.precision, spec.precision),
        "batch_size": spec.batch_size,
        "accelerator": spec.accelerator,
        "device_name": "Example CPU 3000",
        "num_devices": spec.num_devices,
        "strategy": "DDPStrategy" if spec.num_devices > 1 else "SingleDeviceStrategy",
        "compile": spec.compile,
        "accumulate_grad_batches": spec.accumulate_grad_batches,
        "num_threads": 2,
        "timer": "host",
    }
    record = RunRecord(
        request=request,
        spec_hash=spec_hash(spec),
        status=status,
        reason=reason,
        started_unix_s=1_700_000_000.0,
        wall_s=3.0,
        effective=EffectiveSettings(**(ran | dict(effective or {}))) if rows or effective else None,
        environment=dataclasses.replace(ENVIRONMENT, host=host, load_average_end=load_average) if rows else None,
        start_up=StartUp(import_s=0.0, build_s=0.05, first_batch_s=0.2) if rows else None,
        compilation=compilation,
        summary=summarize_run(rows) if status is Status.OK else None,
        peak_host_memory_bytes=700 * 1024**2 if rows else None,
        num_parameters=1_234_567 if rows else None,
        num_trainable_parameters=1_234_567 if rows else None,
    )
    write_record(cell_dir, record)
    if rows:
        append_rows(cell_dir, rows, round_, 0)
    log = log_path(cell_dir, round_, 0)
    log.parent.mkdir(exist_ok=True)
    log.write_text("what user code printed\n")
    return record


def write_sweep(
    directory: Path,
    specs: Sequence[RunSpec],
    step_s: Callable[[RunSpec], float],
    failures: Mapping[int, tuple[Status, str]] | None = None,
    noise: float | Callable[[RunSpec], float] = 0.0,
    choices: Mapping[str, str] | None = None,
    host: str = "lab-1",
    shares: Callable[[RunSpec], Mapping[str, float]] | None = None,
    load_average: float | None = None,
) -> Path:
    """A sweep on disk: the cells 0, 1, 2, … of these specs, timed by `step_s`, some of them failed or noisy."""
    for number, spec in enumerate(specs):
        cell_dir = directory / str(number)
        if failures and number in failures:
            status, reason = failures[number]
            write_run(cell_dir, spec, status=status, reason=reason, choices=choices, host=host)
            continue
        rows = make_rows(
            step_s(spec),
            batch_size=spec.batch_size,
            noise=noise(spec) if callable(noise) else noise,
            accumulate=spec.accumulate_grad_batches or 1,
            shares=shares(spec) if shares else SHARES,
        )
        write_run(cell_dir, spec, rows, choices=choices, host=host, load_average=load_average)
    return directory


NOISE = 0.95
"""The `noise` of a cell that is too noisy to compare."""


def noisy_example(directory: Path, noisy_batches: Sequence[int], load_average: float | None = 2.3) -> Path:
    """Two precisions by three batch sizes on a busy machine, the cells with precision 32 and these batches noisy."""
    specs = [make_spec(batch_size, precision) for precision in ("32", "64") for batch_size in (16, 32, 64)]

    def noise(spec: RunSpec) -> float:
        return NOISE if spec.precision == "32" and spec.batch_size in noisy_batches else 0.04

    def step_s(spec: RunSpec) -> float:
        return float(0.010 * (1.5 if spec.precision == "32" else 1.8) ** math.log2(spec.batch_size / 16))

    return write_sweep(directory, specs, step_s, noise=noise, load_average=load_average)


def first_example(directory: Path) -> Path:
    """The README's sweep, 2 precisions by 3 batch sizes: 10 ms at batch 16, doubling costs exactly 1.5 (bf16: 1.25)."""
    specs = [make_spec(batch_size, precision) for precision in ("32", "16-mixed") for batch_size in (16, 32, 128)]

    def step_s(spec: RunSpec) -> float:
        factor = 1.5 if spec.precision == "32" else 1.25
        return float(0.010 * factor ** math.log2(spec.batch_size / 16))

    return write_sweep(directory, specs, step_s, noise=0.04, choices={"model": "autoencoder", "data": "images"})
