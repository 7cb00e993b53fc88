"""The frozen types that a run leaves on disk, and how they are written and read. Standard library only.

The files described here are the contract between the run side and the report side: `records/<round>.<attempt>.json`
holds one `RunRecord`, `timing_results.csv` one row per `BatchTiming`. Units are SI: seconds, bytes, samples per second.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
import json
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

SCHEMA_VERSION = 1

PHASES = ("data", "transfer", "forward", "backward", "optimizer", "other")
"""Every nanosecond of a batch belongs to exactly one of these, in the order in which they happen."""

OWN_SCRIPT = "own script"
"""The name of the protocol of a run that a user's own script made, with settings of its own."""

RUN_DIRECTORY = "<the run's directory>"
"""What stands in an argument for the directory of its run, which is no part of the workload."""

CUSTOM = "custom"
"""The option of a config group that leaves it to a class of the user's, given by its path."""

REQUEST_FILE = "request.json"
CONFIG_FILE = "benchmark_config.yaml"
TIMING_RESULTS_FILE = "timing_results.csv"
TIMING_SUMMARY_FILE = "timing_summary.yaml"
SWEEP_FILE = "sweep.json"


class Status(str, Enum):
    """What happened to a run. How far its numbers can be trusted is another question."""

    OK = "ok"
    OOM = "oom"
    ERROR = "error"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    UNSUPPORTED = "unsupported"
    NO_BATCHES = "no_batches"
    INTERRUPTED = "interrupted"
    SKIPPED = "skipped"


class RecordError(ValueError):
    """A file that should hold a record does not, or was written by a newer stepbench. The message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A model or a data module to build: an importable target and its resolved arguments as canonical JSON."""

    target: str
    arguments_json: str = "{}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The resolved keyword arguments."""
        parsed: dict[str, Any] = json.loads(self.arguments_json)
        return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class CliProgram:
    """A program that is configured by files for Lightning's own command line, `LightningCLI`.

    `files` are absolute paths, of which later ones win, and `sha256` says what they held. The dotted paths name a
    subclass of `LightningCLI` and the classes that it is made for, where the files were written for such a one, and
    modules to import before, whose classes the files then may give short names.
    `overrides_json` is a mapping laid over the files, like `{"model": {"init_args": {"hidden": 64}}}`.
    """

    files: tuple[str, ...]
    sha256: tuple[str, ...]
    cli_class: str | None = None
    model_class: str | None = None
    data_class: str | None = None
    imports: tuple[str, ...] = ()
    overrides_json: str = "{}"

    @property
    def overrides(self) -> dict[str, Any]:
        """What is laid over the files."""
        parsed: dict[str, Any] = json.loads(self.overrides_json)
        return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The workload that a run measures, as requested. Equal specs are the same cell; protocol and timer stay outside.

    The program is a `model`, with `data` unless its module has loaders of its own, and a `trainer` with the user's own
    settings where there is one; or it is a `cli` instead. `setup_fn` is the dotted path of a function of the user's
    that is called with module and data module before they are fitted.

    None leaves a setting to the user's own code and files, torch or Lightning; the model is uncompiled, and `compile`
    is else a mode of `torch.compile`.
    """

    model: Component | None = None
    data: Component | None = None
    cli: CliProgram | None = None
    trainer: Component | None = None
    setup_fn: str | None = None
    batch_size: int | None = None
    num_workers: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    precision: str | None = None
    accelerator: str | None = None
    num_devices: int = 1
    strategy: str | None = None
    accumulate_grad_batches: int | None = None
    compile: str | None = None
    seed: int | None = None
    num_threads: int | None = None
    float32_matmul_precision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How long a run measures.

    The warm-up lasts until `warmup_batches` and `warmup_s` seconds have both passed; then at least `timed_batches` and
    `timed_s` seconds are timed. With `epochs` the run is that many whole epochs instead, and nothing else ends it.
    """

    name: str
    warmup_batches: int
    warmup_s: float
    timed_batches: int
    timed_s: float
    epochs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Block sampling: of every `period_steps` optimizer steps the first `timed_steps` are timed by phase.

    The others are timed as a whole only, so that what the marks cost falls on a part of the run, and can be told.
    """

    timed_steps: int
    period_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Which of Lightning's profilers looks into a cell, and over how many batches, after some that warm up.

    `memory` asks the profiler of torch for a timeline of the memory in use too.
    """

    profiler: str
    warmup_batches: int
    batches: int
    memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Everything a worker needs to know: the workload, how to measure it, and which visit of the cell this is.

    `choices` pairs a config group with the option chosen for it, for labels. `sampling` None leaves the choice to the
    timer. `batch_size_fn` is the path of a function of the user's that counts the samples of a batch, `batch_size_key`
    the dotted key of the user's configuration that sets the batch size, where it has to be told. `placed` pairs a
    setting of the loaders with the argument that it has already been written to, `set_aside` names what of the user's
    files has been left out already. With `own_directory` the run starts in a directory of its own, else where the
    command was typed. `count_flops` has the floating-point operations of a step counted after the timing;
    `peak_flop_per_s` is the device's, if told. `profile` looks into the cell, on a run of its own.
    """

    spec: RunSpec
    protocol: Protocol
    timer: str
    sampling: Sampling | None = None
    batch_size_fn: str | None = None
    batch_size_key: str | None = None
    placed: tuple[tuple[str, str], ...] = ()
    set_aside: tuple[str, ...] = ()
    own_directory: bool = False
    count_flops: bool = True
    peak_flop_per_s: float | None = None
    profile: ProfileRequest | None = None
    round: int = 0
    attempt: int = 0
    timeout_s: float | None = None
    choices: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTiming:
    """Where the wall time of one batch went, in seconds: from the request for it to the request for the next.

    The six phases sum to `batch_s`. A row that block sampling left out has `batch_s` alone. Where the training step ran
    autograd itself, which nothing announces, `backward_s` is None and inside `forward_s` (`backward_merged`).
    `validation_s` ran after the batch and `epoch_turnover_s` passed between the end of the previous epoch's last batch
    and the request for this one; both lie outside `batch_s`. `step` counts optimizer steps: the micro-batches of one
    accumulation window share it. `num_samples` is None where it cannot be counted.

    The `device_` columns are the same partition on the timeline of an accelerator that ran behind the host: its phases
    sum to `device_batch_s`, and `device_data_s` is how long it had nothing to do because the batch was late. They are
    None without such a timeline. `rank_wait_s` is how much longer than the fastest rank's this rank's backward took,
    which is where ranks wait for each other; None with a single rank.
    """

    epoch: int
    batch: int
    step: int
    num_samples: int | None
    warmup: bool
    data_s: float | None
    transfer_s: float | None
    forward_s: float | None
    backward_s: float | None
    optimizer_s: float | None
    other_s: float | None
    batch_s: float
    validation_s: float = 0.0
    epoch_turnover_s: float | None = None
    device_data_s: float | None = None
    device_transfer_s: float | None = None
    device_forward_s: float | None = None
    device_backward_s: float | None = None
    device_optimizer_s: float | None = None
    device_other_s: float | None = None
    device_batch_s: float | None = None
    rank: int = 0
    rank_wait_s: float | None = None
    took_optimizer_step: bool = True
    starts_epoch: bool = False
    validation_ran: bool = False
    skipped_by_scaler: bool = False
    backward_merged: bool = False
    compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An interval for a median in seconds, its nominal coverage, and what varied: `rounds` or `one run`."""

    low_s: float
    high_s: float
    coverage: float
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The distribution of one duration over the timed optimizer steps of a run, in seconds."""

    median_s: float
    mean_s: float
    min_s: float
    p5_s: float
    p25_s: float
    p75_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSummary:
    """One phase of the step: its distribution, and its share of all time timed by phase (a ratio of sums, 0 to 1).

    Both are None for a backward that cannot be told from the forward it is part of.
    """

    phase: str
    step: Distribution | None
    share_fraction: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One of several ranks over the timed steps: its own median step, and the mean per step that it waited for others.

    `phase_means_s` are its mean seconds per step in the order of `PHASES`.
    """

    rank: int
    num_batches: int
    num_samples: int | None
    median_step_s: float
    mean_wait_s: float | None
    phase_means_s: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in numbers, over its timed optimizer steps; warm-up batches are counted and left out.

    `samples_per_s` is all samples over all wall time of the same batches, None where samples could not be counted.
    `effective_sample_size` is the number of independent steps that the autocorrelated ones are worth.

    `phases` partition the step on `timeline`: the device's where an accelerator ran behind the host (then
    `host_phases` has the host's), else the host's. `num_sampled_steps` is how many steps were timed by phase.
    `timer_slowdown_fraction` is by how much steps timed by phase took longer than those that block sampling left out.
    Batches in which a model was compiled are counted and left out; steps that a scaler skipped are counted and kept.

    With several ranks a step ends with its slowest rank: `step` takes the longest of the ranks' times, samples are
    those of all ranks, `phases` are those of the rank that the others waited for most, `phases_rank`.
    """

    num_warmup_batches: int
    warmup_s: float
    num_batches: int
    num_steps: int
    num_samples: int | None
    measured_s: float
    samples_per_s: float | None
    step: Distribution
    step_interval: Interval | None
    effective_sample_size: float
    phases: tuple[PhaseSummary, ...]
    timeline: str = "host"
    host_phases: tuple[PhaseSummary, ...] = ()
    num_sampled_steps: int | None = None
    timer_slowdown_fraction: float | None = None
    num_skipped_steps: int = 0
    num_compiled_batches: int = 0
    phases_rank: int = 0
    ranks: tuple[RankSummary, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveSettings:
    """What really ran, to be shown wherever it differs from what the spec asked for. None is unknown.

    `sampling` is `N/M`, N steps in every M timed by phase; None where all of them were. `placed` pairs a setting of the
    loaders with what brought it to them, `trainer_settings` are the user's own settings of the trainer that were kept,
    `set_aside` names what a timing run must not use.
    """

    precision: str | None = None
    batch_size: int | None = None
    accelerator: str | None = None
    device_name: str | None = None
    num_devices: int | None = None
    strategy: str | None = None
    accumulate_grad_batches: int | None = None
    num_workers: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    start_method: str | None = None
    worker_start: str | None = None
    num_threads: int | None = None
    float32_matmul_precision: str | None = None
    compile: str | None = None
    timer: str | None = None
    sampling: str | None = None
    lightning_package: str | None = None
    placed: tuple[tuple[str, str], ...] = ()
    trainer_settings: tuple[tuple[str, str], ...] = ()
    set_aside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorState:
    """One accelerator as the driver describes it when the run starts. None where the driver's library is not there."""

    name: str
    memory_bytes: int | None = None
    driver: str | None = None
    sm_clock_hz: float | None = None
    max_sm_clock_hz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    performance_state: int | None = None
    num_other_processes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and the software that a run met. None is unknown."""

    host: str
    operating_system: str
    cpu_model: str | None
    num_cores: int | None
    num_usable_cores: int | None
    cgroup_cpu_limit: float | None
    memory_bytes: int | None
    load_average_start: float | None = None
    load_average_end: float | None = None
    accelerators: tuple[AcceleratorState, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    git_commit: str | None = None
    git_dirty: bool | None = None
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Seconds spent before the first timed batch. `import_s` is the worker's own (0.0 where a warm server had paid it).

    `first_batch_s` runs from the call of `fit` to the end of the first batch.
    """

    import_s: float
    build_s: float
    first_batch_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What `torch.compile` did while the run trained: graphs compiled, how often again, in how many batches, how long.

    `compile_s` is torch's own account of it, None where it keeps none.
    """

    num_graphs: int
    num_recompilations: int
    num_batches: int
    compile_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """Floating-point operations of one optimizer step over all devices, counted on a pass of its own.

    `flop_per_step` is None where they could not be counted, for the reason `problem`. `unknown_operators` ran and have
    no formula, so that the count is a lower bound. `peak_flop_per_s` is what one device can do at most in the precision
    that ran, None where it is unknown, and `peak_source` who says so.
    """

    flop_per_step: int | None
    unknown_operators: tuple[str, ...] = ()
    problem: str | None = None
    peak_flop_per_s: float | None = None
    peak_source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run: what was asked, what ran, what happened, and its own summary. A cell always leaves one.

    `num_forced_waits` is how often the timer had to wait for a device that was too far behind.
    """

    request: RunRequest
    spec_hash: str
    status: Status
    reason: str | None = None
    traceback: str | None = None
    started_unix_s: float
    wall_s: float
    effective: EffectiveSettings | None = None
    environment: Environment | None = None
    start_up: StartUp | None = None
    compilation: Compilation | None = None
    num_forced_waits: int = 0
    summary: RunSummary | None = None
    flop: FlopCount | None = None
    rank: int = 0
    peak_host_memory_bytes: int | None = None
    peak_device_memory_bytes: int | None = None
    num_parameters: int | None = None
    num_trainable_parameters: int | None = None
    schema_version: int = SCHEMA_VERSION


def spec_hash(spec: RunSpec) -> str:
    """Sixteen hexadecimal digits that equal specs share; fields that are None do not count, so more can be added.

    Of files it is what they hold that counts, not where they lie.
    """
    known = {key: value for key, value in dataclasses.asdict(spec).items() if value is not None}
    if spec.cli is not None:
        known["cli"] = {key: value for key, value in known["cli"].items() if key != "files" and value is not None}
    return hashlib.sha256(canonical_json(known).encode()).hexdigest()[:16]


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text. Raises ValueError for infinities and NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


# ---- where things lie in a cell's directory ----


def record_path(cell_dir: Path, round_: int, attempt: int, rank: int = 0) -> Path:
    """The record of one visit of a cell; each further rank of it leaves one of its own beside it."""
    return cell_dir / "records" / (f"{round_}.{attempt}.json" if rank == 0 else f"{round_}.{attempt}.rank{rank}.json")


def log_path(cell_dir: Path, round_: int, attempt: int) -> Path:
    """What the worker of one visit printed; a repeated visit has a log of its own."""
    return cell_dir / "logs" / (f"{round_}.log" if attempt == 0 else f"{round_}.{attempt}.log")


def find_cells(directory: Path) -> list[Path]:
    """The cell directories at or below `directory`, in numeric order of their names."""
    cells = {path.parent.parent for path in directory.rglob("records/*.json")}
    return sorted(cells, key=lambda cell: [_numeric_first(part) for part in cell.relative_to(directory).parts])


def _numeric_first(text: str) -> tuple[int, int, str]:
    return (0, int(text), "") if text.isdigit() else (1, 0, text)


# ---- writing ----


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` as a whole: a reader sees the old text or the new, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_record(cell_dir: Path, record: RunRecord) -> Path:
    """Write a run's record atomically and return its path."""
    path = record_path(cell_dir, record.request.round, record.request.attempt, record.rank)
    write_text_atomically(path, json.dumps(dataclasses.asdict(record), indent=1) + "\n")
    return path


def write_request(cell_dir: Path, request: RunRequest) -> Path:
    """Write what a worker is to do, for a worker to read with `read_request`."""
    path = cell_dir / REQUEST_FILE
    write_text_atomically(path, json.dumps(dataclasses.asdict(request), indent=1) + "\n")
    return path


ROW_COLUMNS = ("round", "attempt", *(field.name for field in dataclasses.fields(BatchTiming)))


def append_rows(cell_dir: Path, rows: Sequence[BatchTiming], round_: int, attempt: int) -> Path:
    """Append one run's raw rows to `timing_results.csv` in a single write; the header comes with the first run."""
    path = cell_dir / TIMING_RESULTS_FILE
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if os.fstat(descriptor).st_size == 0:
            writer.writerow(ROW_COLUMNS)
        for row in rows:
            values = (getattr(row, name) for name in ROW_COLUMNS[2:])
            writer.writerow([round_, attempt, *map(_cell_text, values)])
        remaining = text.getvalue().encode()
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
    finally:
        os.close(descriptor)
    return path


def _cell_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.9f}"  # the clock's own grain, a nanosecond
    return str(value)


# ---- reading ----


def read_record(path: Path) -> RunRecord:
    """Read a run's record. Raises `RecordError`, naming the file, where it holds something else."""
    record = _read(path, RunRecord)
    problem = _find_contradiction(record)
    if problem is not None:
        raise RecordError(f"{path} is not a stepbench RunRecord: {problem}")
    return record


def read_request(path: Path) -> RunRequest:
    """Read a worker's request. Raises `RecordError`, naming the file, where it holds something else."""
    return _read(path, RunRequest)


def _find_contradiction(record: RunRecord) -> str | None:
    """What no run can have written although every type is right; None where there is nothing of the kind."""
    spec = record.request.spec
    texts = [(c.target, c.arguments_json) for c in (spec.model, spec.data, spec.trainer) if c is not None]
    texts += [] if spec.cli is None else [("the files", spec.cli.overrides_json)]
    for target, text in texts:
        try:
            if not isinstance(json.loads(text), dict):
                return f"the arguments of {target} are no mapping"
        except ValueError:
            return f"the arguments of {target} are no JSON"
    summary = record.summary
    if summary is None:
        return None
    if tuple(phase.phase for phase in summary.phases) != PHASES:
        return "its phases are not those of a step"
    if not (math.isfinite(summary.step.median_s) and summary.step.median_s > 0):
        return f"its median step takes {summary.step.median_s} s"
    return None


T = TypeVar("T")


def _read(path: Path, kind: type[T]) -> T:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read as JSON: {error}") from error
    version = data.get("schema_version", SCHEMA_VERSION) if isinstance(data, dict) else SCHEMA_VERSION
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RecordError(f"{path} has schema_version {version}; this stepbench reads up to {SCHEMA_VERSION}")
    try:
        return typing.cast(T, from_plain(kind, data))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is not a stepbench {kind.__name__}: {error}") from error


def from_plain(kind: Any, value: Any) -> Any:
    """Rebuild a value of type `kind` from plain JSON data: nested dataclasses, enums, tuples, unions with None.

    Unknown keys are ignored, so that a later version may add some. Raises TypeError or ValueError on a mismatch.
    """
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (inner,) = [option for option in typing.get_args(kind) if option is not type(None)]
        return from_plain(inner, value)
    if origin is tuple:
        arguments = typing.get_args(kind)
        if not isinstance(value, list):
            raise TypeError(f"expected a list, got {type(value).__name__}")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(from_plain(arguments[0], item) for item in value)
        return tuple(from_plain(argument, item) for argument, item in zip(arguments, value, strict=True))
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise TypeError(f"expected a mapping, got {type(value).__name__}")
        hints = _field_types(typing.cast(type, kind))
        return typing.cast(type, kind)(**{k: from_plain(hints[k], v) for k, v in value.items() if k in hints})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


@functools.cache
def _field_types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
