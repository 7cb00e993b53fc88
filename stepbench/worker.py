"""One run in a fresh process: build the user's classes, fit them under the timer, write the record.

Knows nothing of the configuration system that composed the request; a cell's directory is all it is given. As a
command, `python -m stepbench.worker DIR` does what the request that lies in DIR asks for; where several devices train
together, Lightning starts the same command again for each further rank, which leaves a record of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import sysconfig
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepbench.clock import NS_PER_S, HostClock, monotonic_s, unix_time_s

_IMPORT_STARTED_S = monotonic_s()

from stepbench import device, facts, flops, ranks, user_code  # noqa: E402
from stepbench.callback import PhaseTimer, make_phase_timer  # noqa: E402
from stepbench.peak_flops import Peak, find_peak  # noqa: E402
from stepbench.preparation import Preparation, prepare  # noqa: E402
from stepbench.profile_files import ERROR_FILE, PROFILE_REQUEST_FILE  # noqa: E402
from stepbench.profiles import profile_program  # noqa: E402
from stepbench.protocol import ProtocolRule, mark_warmup  # noqa: E402
from stepbench.record import (  # noqa: E402
    REQUEST_FILE,
    BatchTiming,
    EffectiveSettings,
    Environment,
    FlopCount,
    RecordError,
    RunRecord,
    RunRequest,
    RunSpec,
    StartUp,
    Status,
    append_rows,
    read_record,
    read_request,
    record_path,
    spec_hash,
    write_record,
    write_text_atomically,
)
from stepbench.statistics import summarize_run, with_rank_waits  # noqa: E402
from stepbench.trainer_setup import UnsupportedError  # noqa: E402

_IMPORT_S = monotonic_s() - _IMPORT_STARTED_S


SCRATCH = "scratch"
"""A cell's directory for what the user's code writes, made when it is needed."""

MAX_REASON_LENGTH = 500
"""Characters of an exception's message that a table can bear; the whole of it is in the record's traceback."""


@dataclass(slots=True, kw_only=True)
class _Run(Preparation):
    """What a run has gathered so far, so that a failure loses none of it."""

    rank: int
    environment: Environment
    timer: PhaseTimer | None = None
    rule: ProtocolRule | None = None
    rows: list[BatchTiming] = field(default_factory=list)
    build_s: float = 0.0
    fit_started_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How a run ended."""

    status: Status
    reason: str | None = None
    traceback: str | None = None


OK = _Outcome(status=Status.OK)


def work(directory: Path, *, worker_start: str) -> int:
    """Measure or profile, whatever the request in a directory is for; returns the exit code.

    Of a measurement the record, not the exit code, tells what became of it. But for a rank beside the first: Lightning
    ends the others where one of those ends with another code than 0.
    """
    if (directory / PROFILE_REQUEST_FILE).exists():
        return _profile(directory.resolve(), read_request(directory / PROFILE_REQUEST_FILE))
    record = measure(directory, worker_start=worker_start)
    return 0 if record.rank == 0 or record.traceback is None else 1


def _profile(directory: Path, request: RunRequest) -> int:
    """Leave a profile in the directory, or a file that says why there is none."""
    is_first_rank = ranks.own_rank() == 0
    try:
        _enter_own_directory(request, directory)
        profile_program(directory, request, scratch=directory / SCRATCH, is_first_rank=is_first_rank)
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        trace = printable("".join(traceback.format_exception(error)))
        if is_first_rank:
            write_text_atomically(directory / ERROR_FILE, f"{_one_line(error)}{_place(error)}\n\n{trace}")
        with contextlib.suppress(Exception):  # the user's code may have closed the stream
            print(trace, file=sys.stderr, flush=True)
        return 1
    return 0


def _enter_own_directory(request: RunRequest, directory: Path) -> None:
    """Change to a directory for what the user's code writes, where the request asks for it."""
    if request.own_directory:
        (directory / SCRATCH).mkdir(exist_ok=True)
        user_code.enter(directory / SCRATCH)


def measure(cell_dir: Path, *, worker_start: str) -> RunRecord:
    """Do what the cell's request asks for and leave a record, whatever happens. `worker_start` is `fork` or `spawn`.

    With several ranks each of them does, and rank 0, whose record is the cell's, waits for those of the others.
    """
    request = read_request(cell_dir / REQUEST_FILE)
    started_unix_s, started_s = unix_time_s(), monotonic_s()
    run = _Run(rank=ranks.own_rank(), environment=facts.environment_at_start())
    cell_dir = cell_dir.resolve()
    _enter_own_directory(request, cell_dir)
    outcome = _train(request, run, cell_dir)
    has_trained = outcome.status is Status.OK
    if has_trained:
        outcome = check_batches(run, _own_rows(run), request.spec)
    rows = run.rows if run.rank == 0 else _own_rows(run)
    summary = summarize_run(rows) if outcome.status is Status.OK else None
    if outcome.status is Status.OK and summary is None:
        outcome = _Outcome(status=Status.NO_BATCHES, reason="no optimizer step was completed")
    record = RunRecord(
        request=request,
        spec_hash=spec_hash(request.spec),
        status=outcome.status,
        reason=outcome.reason,
        traceback=outcome.traceback,
        started_unix_s=started_unix_s,
        wall_s=monotonic_s() - started_s,
        effective=_effective_settings(run, worker_start, request.spec.compile),
        environment=facts.environment_at_end(run.environment, has_trained=run.timer is not None),
        start_up=_start_up(run, worker_start),
        compilation=None if run.timer is None else run.timer.compilation,
        num_forced_waits=0 if run.timer is None else run.timer.num_forced_waits,
        summary=summary,
        rank=run.rank,
        **facts.peak_memory(run.trainer),
        **facts.count_parameters(run.model),
    )
    if run.rank > 0:
        write_record(cell_dir, record)
    if has_trained:
        ranks.wait_for_all()
    if run.rank == 0:
        append_rows(cell_dir, rows, request.round, request.attempt)
        if has_trained:
            record = _with_other_ranks(record, cell_dir)
        write_record(cell_dir, record)
    if has_trained and request.count_flops:
        record = dataclasses.replace(record, flop=_count_flop(request, run, record))
        if run.rank == 0:
            write_record(cell_dir, record)
    return record


def _count_flop(request: RunRequest, run: _Run, record: RunRecord) -> FlopCount:
    """Count on a pass of its own, when all that was timed is safe on disk; every rank must, for its own device."""
    assert run.make_trainer is not None
    root_device, effective = run.trainer.strategy.root_device, record.effective
    assert effective is not None
    count = flops.count_step_flops(
        run.model,
        run.datamodule,
        run.make_trainer,
        package=run.package,
        accumulate_grad_batches=run.trainer.accumulate_grad_batches,
        devices=1 if root_device.index is None else [root_device.index],
    )
    peak = _peak(request, effective)
    return FlopCount(
        flop_per_step=None if count.flop_per_step is None else count.flop_per_step * run.trainer.world_size,
        unknown_operators=count.unknown_operators,
        problem=count.problem,
        peak_flop_per_s=None if peak is None else peak.flop_per_s,
        peak_source=None if peak is None else peak.source,
    )


def _peak(request: RunRequest, effective: EffectiveSettings) -> Peak | None:
    """What the device can do at most: as the user says, else as its maker states; None where nobody does."""
    if request.peak_flop_per_s is not None:
        return Peak(request.peak_flop_per_s, "device.peak_flop_per_s")
    name, precision = effective.device_name or "", effective.precision or ""
    return find_peak(name, precision, effective.float32_matmul_precision or "")


def _train(request: RunRequest, run: _Run, cell_dir: Path) -> _Outcome:
    """Fit and collect the rows: those of every rank where all went well, else the ones that this rank has."""
    try:
        _fit(request, run, cell_dir)
        run.rows = _gather_rows(run)
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        run.rows = _rows_before_failure(run)
        status, reason = classify(error, run)
        trace = printable("".join(traceback.format_exception(error)))
        with contextlib.suppress(Exception):  # the user's code may have closed the stream
            print(trace, file=sys.stderr, flush=True)
        return _Outcome(status=status, reason=reason, traceback=trace)
    return OK


def _fit(request: RunRequest, run: _Run, cell_dir: Path) -> None:
    build_started_s = monotonic_s()
    batch_size_fn = None
    if request.batch_size_fn is not None:
        batch_size_fn = user_code.find_function("batch_size_fn", request.batch_size_fn)
    model = prepare(request, run, cell_dir / SCRATCH, epochs=request.protocol.epochs)
    run.rule = ProtocolRule(request.protocol)
    run.timer = make_phase_timer(
        run.package,
        timer=request.timer,
        sampling=request.sampling,
        stop_rule=_make_stop_rule(request, run.rule, run.trainer),
        batch_size_fn=batch_size_fn,
    )
    run.trainer.callbacks.append(run.timer)
    run.build_s = monotonic_s() - build_started_s
    run.fit_started_ns = HostClock.now()
    run.trainer.fit(model, datamodule=run.datamodule)
    num_devices = request.spec.num_devices
    if run.trainer.world_size != num_devices:
        raise RuntimeError(f"devices={num_devices} were asked for, but {run.trainer.world_size} trained")


def _make_stop_rule(request: RunRequest, rule: ProtocolRule, trainer: Any) -> ProtocolRule | ranks.AgreedRule:
    if request.spec.num_devices == 1 or request.protocol.epochs is not None:  # whole epochs end by themselves
        return rule
    return ranks.AgreedRule(
        rule,
        request.protocol,
        lambda has_enough: bool(trainer.strategy.reduce_boolean_decision(has_enough, all=True)),
        batches_per_step=trainer.accumulate_grad_batches,
    )


def classify(error: BaseException, run: _Run) -> tuple[Status, str]:
    """The status and the reason of a run that an exception ended."""
    if isinstance(error, UnsupportedError):
        return Status.UNSUPPORTED, _shortened(str(error))
    if device.is_out_of_memory(error):
        return Status.OOM, _one_line(error)
    if ranks.is_lost_connection(error):
        return Status.CRASHED, f"the connection to another rank was lost ({_one_line(error)})"
    # Lightning turns a keyboard interrupt and SIGTERM into an exit
    original = run.timer.exception if run.timer is not None and isinstance(error, SystemExit) else error
    if isinstance(original, KeyboardInterrupt):
        return Status.INTERRUPTED, "the worker was interrupted"
    if isinstance(original, run.package.sigterm_exception):
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


def _gather_rows(run: _Run) -> list[BatchTiming]:
    """The rows of all ranks with their warm-up marked, the same batches on each; every rank must call it."""
    assert run.timer is not None
    own = ranks.RankTimings(rows=run.timer.rows, num_warmup_batches=_num_warmup_batches(run))
    return with_rank_waits(ranks.mark_common_warmup(ranks.gather(own)))


def _rows_before_failure(run: _Run) -> list[BatchTiming]:
    """What this rank has timed; the others cannot be asked."""
    if run.timer is None:
        return []
    rows = mark_warmup(run.timer.rows, _num_warmup_batches(run))
    return rows if run.rank == 0 else [dataclasses.replace(row, rank=run.rank) for row in rows]


def _num_warmup_batches(run: _Run) -> int | None:
    return None if run.rule is None else run.rule.num_warmup_batches


def _own_rows(run: _Run) -> list[BatchTiming]:
    return [row for row in run.rows if row.rank == run.rank]


def _with_other_ranks(record: RunRecord, cell_dir: Path) -> RunRecord:
    """Rank 0's record of a run that all ranks have ended, with what is wrong with another rank if anything is."""
    request = record.request
    if record.status is not Status.OK:
        return record
    for rank in range(1, request.spec.num_devices):
        try:
            other = read_record(record_path(cell_dir, request.round, request.attempt, rank))
        except RecordError as error:
            reason = f"rank {rank} left no record: {error}"
            return dataclasses.replace(record, status=Status.ERROR, reason=reason, summary=None)
        if other.status is not Status.OK:
            reason = f"rank {rank}: {other.reason}"
            return dataclasses.replace(record, status=other.status, reason=reason, summary=None)
    return record


def check_batches(run: _Run, rows: list[BatchTiming], spec: RunSpec) -> _Outcome:
    """Whether a fit that ended well has measured what was asked for: batches at all, loaded as they were to be.

    The loader's own batch size is the proof where it has one; the samples counted in the batches are where it has none.
    """
    assert run.timer is not None
    if not rows:
        sizes = facts.loader_batch_sizes(run.trainer)
        problem = _find_too_few_samples(run, sizes[0]) if sizes else None
        return _Outcome(status=Status.NO_BATCHES, reason=problem or run.timer.why_nothing_was_timed())
    problem = None if spec.batch_size is None else _find_batch_size_problem(run, rows, spec.batch_size)
    problem = problem or _find_loader_problem(run, spec)
    return OK if problem is None else _Outcome(status=Status.ERROR, reason=problem)


def _find_batch_size_problem(run: _Run, rows: list[BatchTiming], batch_size: int) -> str | None:
    counted, sizes = facts.largest_batch(rows), facts.loader_batch_sizes(run.trainer)
    if counted is None and not sizes:
        return (
            f"whether batch_size={batch_size} reached the data loader cannot be seen, neither in the loader nor in its "
            "batches: name a function that counts the samples of a batch, batch_size_fn=my_module:my_function"
        )
    if batch_size not in (counted, *sizes[:1]):
        found = sizes[0] if sizes else counted
        reason = (
            f"batch_size={batch_size} did not reach the data loader, whose batches hold {found} samples. "
            + _three_ways("batch_size", "batch_size_key=data.KEY")
        )
        if found == 1:
            reason += (
                "; if it hands out whole batches as items, name a function that counts their samples: batch_size_fn"
            )
        return reason
    return None if counted == batch_size else _find_too_few_samples(run, batch_size)


def _find_too_few_samples(run: _Run, batch_size: int) -> str | None:
    num_items = min(facts.numbers_of_items(run.trainer), default=None)
    num_devices = run.trainer.world_size
    if num_items is None or num_items >= batch_size * num_devices:
        return None
    wanted = f"batch_size={batch_size}" + (f" on each of {num_devices} devices" if num_devices > 1 else "")
    return f"the data set has {num_items} samples, fewer than one batch of {wanted}"


def _find_loader_problem(run: _Run, spec: RunSpec) -> str | None:
    """A setting asked of the loaders that none of them has, and that no argument may have brought without a trace."""
    placed = {} if run.loaders is None else run.loaders.placed
    for setting in ("num_workers", "pin_memory"):
        wanted, found = getattr(spec, setting), facts.loader_setting(run.trainer, setting)
        if wanted is not None and found != wanted and (found is not None or setting not in placed):
            has = "which does not tell what it has" if found is None else f"which has {found}"
            return f"{setting}={wanted} did not reach the data loader, {has}. {_three_ways(setting, 'data.KEY=VALUE')}"
    return None


def _three_ways(setting: str, key: str) -> str:
    return (
        f"Three ways to fix it: give the argument that sets it a usual name, such as {setting}; name the argument's "
        f"key, {key}; or set it in a function of yours, setup_fn=my_module:my_function"
    )


def _effective_settings(run: _Run, worker_start: str, compile_mode: str | None) -> EffectiveSettings | None:
    if run.trainer is None:
        return None
    effective = facts.effective_settings(
        run.trainer, run.timer, _own_rows(run), worker_start=worker_start, compile_mode=compile_mode
    )
    placed = () if run.loaders is None else tuple(run.loaders.placed.items())
    return dataclasses.replace(
        effective,
        placed=placed,
        trainer_settings=run.trainer_settings,
        set_aside=tuple(dict.fromkeys(run.set_aside)),
    )


def _start_up(run: _Run, worker_start: str) -> StartUp | None:
    if run.timer is None:
        return None
    first_ns = run.timer.first_batch_end_ns
    return StartUp(
        import_s=0.0 if worker_start == "fork" else _IMPORT_S,
        build_s=run.build_s,
        first_batch_s=None if first_ns is None else (first_ns - run.fit_started_ns) / NS_PER_S,
    )


def main() -> int:
    """Do what the request in the directory given on the command line asks for; returns the exit code."""
    return work(Path(sys.argv[1]), worker_start="spawn")


if __name__ == "__main__":
    sys.exit(main())
