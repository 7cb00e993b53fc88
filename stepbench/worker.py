"""One run in a fresh process: build the user's classes, fit them under the timer, write the record.

Knows nothing of the configuration system that composed the request; a cell's directory is all it is given. As a
command, `python -m stepbench.worker DIR` measures the request that lies in DIR.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepbench.clock import make_clock, monotonic_s, resolve_timer, unix_time_s

_IMPORT_STARTED_S = monotonic_s()

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.accelerators import AcceleratorRegistry  # noqa: E402
from lightning.pytorch.utilities.exceptions import SIGTERMException  # noqa: E402

from stepbench import device, environment, user_code  # noqa: E402
from stepbench.callback import StepTimer  # noqa: E402
from stepbench.protocol import ProtocolRule, mark_warmup  # noqa: E402
from stepbench.record import (  # noqa: E402
    REQUEST_FILE,
    BatchTiming,
    EffectiveSettings,
    Environment,
    RunRecord,
    RunRequest,
    StartUp,
    Status,
    append_rows,
    read_request,
    spec_hash,
    write_record,
)
from stepbench.statistics import summarize_run  # noqa: E402

_IMPORT_S = monotonic_s() - _IMPORT_STARTED_S


MAX_REASON_LENGTH = 500
"""Characters of an exception's message that a table can bear; the whole of it is in the record's traceback."""


class UnsupportedError(Exception):
    """The machine has no such device, or the device no such precision."""


@dataclass(slots=True)
class _Run:
    """What a run has gathered so far, so that a failure loses none of it."""

    environment: Environment
    model: pl.LightningModule | None = None
    trainer: pl.Trainer | None = None
    timer: StepTimer | None = None
    rule: ProtocolRule | None = None
    timer_kind: str | None = None
    build_s: float = 0.0
    fit_started_ns: int = 0


def measure(cell_dir: Path, *, worker_start: str) -> RunRecord:
    """Do what the cell's request asks for and leave a record, whatever happens. `worker_start` is `fork` or `spawn`."""
    request = read_request(cell_dir / REQUEST_FILE)
    started_unix_s, started_s = unix_time_s(), monotonic_s()
    run = _Run(environment=_environment_at_start())
    status, reason, trace = Status.OK, None, None
    try:
        _fit(request, run)
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        status, reason = classify(error, run.timer)
        trace = printable("".join(traceback.format_exception(error)))
        with contextlib.suppress(Exception):  # the user's code may have closed the stream
            print(trace, file=sys.stderr)
    rows = _rows(run, request.spec.batch_size)
    append_rows(cell_dir, rows, request.round, request.attempt)
    if status is Status.OK:
        status, reason = check_batches(run, rows, request.spec.batch_size)
    summary = summarize_run(rows) if status is Status.OK else None
    if status is Status.OK and summary is None:
        status, reason = Status.NO_BATCHES, "no optimizer step was completed"
    record = RunRecord(
        request=request,
        spec_hash=spec_hash(request.spec),
        status=status,
        reason=reason,
        traceback=trace,
        started_unix_s=started_unix_s,
        wall_s=monotonic_s() - started_s,
        effective=_effective_settings(run, rows, worker_start),
        environment=_environment_at_end(run),
        start_up=_start_up(run, worker_start),
        summary=summary,
        peak_host_memory_bytes=device.peak_host_memory_bytes(),
        peak_device_memory_bytes=None
        if run.trainer is None
        else device.peak_device_memory_bytes(run.trainer.strategy.root_device),
        **_count_parameters(run.model),
    )
    write_record(cell_dir, record)
    return record


def _fit(request: RunRequest, run: _Run) -> None:
    spec = request.spec
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    if spec.float32_matmul_precision is not None:
        torch.set_float32_matmul_precision(spec.float32_matmul_precision)
    pl.seed_everything(spec.seed, verbose=False)
    build_started_s = monotonic_s()
    run.model = user_code.build(spec.model)
    datamodule = user_code.build(spec.data)
    _check_kind(run.model, pl.LightningModule, "model", spec.model.target)
    _check_kind(datamodule, pl.LightningDataModule, "data", spec.data.target)
    run.rule = ProtocolRule(request.protocol)
    run.trainer = _make_trainer(request)
    on_accelerator = run.trainer.strategy.root_device.type != "cpu"
    run.timer_kind = resolve_timer(request.timer, on_accelerator=on_accelerator)
    clock = make_clock(run.timer_kind)
    run.timer = StepTimer(clock=clock, stop_rule=run.rule)
    run.trainer.callbacks.append(run.timer)  # type: ignore[attr-defined]
    run.build_s = monotonic_s() - build_started_s
    run.fit_started_ns = clock.now()
    run.trainer.fit(run.model, datamodule=datamodule)


def _check_kind(built: object, kind: type, key: str, target: str) -> None:
    if not isinstance(built, kind):
        raise TypeError(
            f"{key}._target_ must name a {kind.__module__.split('.')[0]} {kind.__name__}, "
            f"got {target} which gives a {type(built).__module__}.{type(built).__qualname__}"
        )


def _make_trainer(request: RunRequest) -> pl.Trainer:
    """A trainer that runs the loop and nothing beside it: what prints, logs, saves or validates is off."""
    spec = request.spec
    epochs = request.protocol.epochs
    try:
        return pl.Trainer(
            accelerator=spec.accelerator,
            devices=spec.num_devices,
            precision=spec.precision,  # type: ignore[arg-type]
            accumulate_grad_batches=spec.accumulate_grad_batches,
            max_epochs=-1 if epochs is None else epochs,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except Exception as error:
        # Every argument has been checked or is ours, so what is left is the machine.
        usable = [name for name, entry in AcceleratorRegistry.items() if entry["accelerator"].is_available()]
        if spec.accelerator not in ("auto", "gpu", *usable):
            found = f"there is no {spec.accelerator} device here; usable: {', '.join(usable)}"
            raise UnsupportedError(found) from error
        raise UnsupportedError(f"precision {spec.precision} on {spec.accelerator}: {error}") from error


def classify(error: BaseException, timer: StepTimer | None) -> tuple[Status, str]:
    """The status and the reason of a run that an exception ended."""
    if isinstance(error, UnsupportedError):
        return Status.UNSUPPORTED, str(error)
    if device.is_out_of_memory(error):
        return Status.OOM, _one_line(error)
    # Lightning turns a keyboard interrupt and SIGTERM into an exit
    original = timer.exception if timer is not None and isinstance(error, SystemExit) else error
    if isinstance(original, KeyboardInterrupt):
        return Status.INTERRUPTED, "the worker was interrupted"
    if isinstance(original, SIGTERMException):
        return Status.CRASHED, "the worker was ended by SIGTERM"
    if isinstance(error, SystemExit):
        return Status.ERROR, f"the user's code called sys.exit({error.code!r}){_place(error)}"
    return Status.ERROR, _one_line(error) + _place(error)


def _one_line(error: BaseException) -> str:
    """The exception's type and message in one line of bearable length."""
    try:
        text = str(error)
    except Exception:  # the user's class may fail at it
        text = ""
    if "in DataLoader worker process" in text:  # torch puts the worker's whole traceback into the message
        return f"in a data loader worker: {_shortened(text.strip().splitlines()[-1])}"
    text = _shortened(" ".join(text.split()))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shortened(text: str) -> str:
    text = printable(text)
    return text if len(text) <= MAX_REASON_LENGTH else f"{text[:MAX_REASON_LENGTH]} … ({len(text)} characters)"


def printable(text: str) -> str:
    """Text that any file takes: a file name that is not UTF-8 comes as lone surrogates, which none can hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _place(error: BaseException) -> str:
    """Where the exception was raised, as far as it can be said of the user's own files."""
    not_users = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(not_users)]
    frames = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""


def _rows(run: _Run, batch_size: int) -> list[BatchTiming]:
    """The timed rows; their sample counts only where they agree with the batch size that the loader has."""
    if run.timer is None or run.rule is None:
        return []
    rows = mark_warmup(run.timer.rows, run.rule.num_warmup_batches)
    if _largest_batch(rows) != batch_size and batch_size in _loader_batch_sizes(run):
        # the batches are built so that their first tensor does not tell the number of samples
        return [dataclasses.replace(row, num_samples=None) for row in rows]
    return rows


def _largest_batch(rows: list[BatchTiming]) -> int | None:
    return max((row.num_samples for row in rows if row.num_samples is not None), default=None)


def check_batches(run: _Run, rows: list[BatchTiming], batch_size: int) -> tuple[Status, str | None]:
    """Whether a fit that ended well has measured what was asked for: batches at all, and of the size asked for.

    The loader's own batch size is the proof where it has one; the samples counted in the batches are where it has none.
    """
    assert run.timer is not None
    num_discarded = run.timer.num_discarded
    if not rows and num_discarded:
        return Status.NO_BATCHES, f"none of {num_discarded} requests for a batch led to a batch that could be timed"
    if not rows:
        return Status.NO_BATCHES, "the data loader gave no batches"
    counted, sizes = _largest_batch(run.timer.rows), _loader_batch_sizes(run)
    if batch_size not in (counted, *sizes) and (counted is not None or sizes):
        found = sizes[0] if sizes else counted
        return Status.ERROR, (
            f"batch_size={batch_size} did not reach the data loader, whose batches hold {found} samples: put "
            "batch_size: ${batch_size} into the data's configuration and have the data module pass it on"
        )
    num_items = min(_numbers_of_items(run), default=None)
    if counted != batch_size and num_items is not None and num_items < batch_size:
        return Status.ERROR, f"the data set has {num_items} samples, fewer than one batch of batch_size={batch_size}"
    return Status.OK, None


def _effective_settings(run: _Run, rows: list[BatchTiming], worker_start: str) -> EffectiveSettings | None:
    trainer = run.trainer
    if trainer is None:
        return None
    root_device = trainer.strategy.root_device
    return EffectiveSettings(
        precision=str(trainer.precision),
        batch_size=_largest_batch(rows) or next(iter(_loader_batch_sizes(run)), None),
        accelerator=root_device.type,
        device_name=device.device_name(root_device, environment.static_environment().cpu_model),
        num_devices=trainer.num_devices,
        strategy=type(trainer.strategy).__name__,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        num_workers=_num_workers(run),
        start_method=multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        worker_start=worker_start,
        num_threads=torch.get_num_threads(),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        timer=run.timer_kind,
    )


def _loaders(run: _Run) -> list[Any]:
    """The training loaders as far as they are found: the loader, or those of a list or a dictionary."""
    loaders: Any = None if run.trainer is None else run.trainer.train_dataloader
    if isinstance(loaders, dict):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


def _loader_batch_sizes(run: _Run) -> list[int]:
    """The batch sizes of the training loaders, as far as they have one."""
    sizes = (
        getattr(holder, "batch_size", None)
        for loader in _loaders(run)
        for holder in (loader, getattr(loader, "batch_sampler", None))
    )
    return [size for size in sizes if isinstance(size, int)]


def _numbers_of_items(run: _Run) -> list[int]:
    """The lengths of the data sets that the training loaders batch, as far as they have one."""
    lengths = []
    for loader in _loaders(run):
        if getattr(loader, "batch_size", None) is not None:
            with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
                lengths.append(len(loader.dataset))
    return lengths


def _num_workers(run: _Run) -> int | None:
    """The most worker processes that one of the training loaders has; None where no loader tells."""
    return max((loader.num_workers for loader in _loaders(run) if hasattr(loader, "num_workers")), default=None)


def _environment_at_start() -> Environment:
    return dataclasses.replace(
        environment.static_environment(),
        load_average_start=environment.load_average(),
        variables=environment.speed_variables(),
    )


def _environment_at_end(run: _Run) -> Environment:
    states = () if run.timer is None else environment.accelerator_states()
    return dataclasses.replace(run.environment, load_average_end=environment.load_average(), accelerators=states)


def _start_up(run: _Run, worker_start: str) -> StartUp | None:
    if run.timer is None:
        return None
    first_ns = run.timer.first_batch_end_ns
    return StartUp(
        import_s=0.0 if worker_start == "fork" else _IMPORT_S,
        build_s=run.build_s,
        first_batch_s=None if first_ns is None else (first_ns - run.fit_started_ns) / 1e9,
    )


def _count_parameters(model: pl.LightningModule | None) -> dict[str, int]:
    if not isinstance(model, torch.nn.Module):
        return {}
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def main() -> int:
    """Measure the request in the directory given on the command line. The record, not the exit code, tells the rest."""
    measure(Path(sys.argv[1]), worker_start="spawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
