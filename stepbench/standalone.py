"""`StepTimer`: the timing callback for anyone's own script, with a summary at the end and the files of a cell.

    Trainer(callbacks=[StepTimer()])

The one place where the run side and the report side meet in a process: what draws and prints is imported when training
is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from stepbench import facts, ranks
from stepbench.callback import PhaseTimer, phase_timer_class
from stepbench.clock import NS_PER_S, TIMERS, HostClock, local_time_text, monotonic_s, unix_time_s
from stepbench.lightning_package import PACKAGES, load_package
from stepbench.protocol import find_warmup
from stepbench.record import (
    OWN_SCRIPT,
    BatchTiming,
    Component,
    Environment,
    Protocol,
    RunRecord,
    RunRequest,
    RunSpec,
    Sampling,
    StartUp,
    Status,
    append_rows,
    canonical_json,
    spec_hash,
    write_record,
)
from stepbench.samples import flatten_loaders
from stepbench.statistics import summarize_run, with_rank_waits
from stepbench.sweep import PlannedCell, claim_directory, write_plan

WARMUP = Protocol(name=OWN_SCRIPT, warmup_batches=5, warmup_s=0.3, timed_batches=1, timed_s=0.0, epochs=1)
"""When a script's training is warm; how long it trains is its own affair."""


class StepTimer(PhaseTimer):
    """Times the training of a script of your own, prints where the time went, and writes the files of a run.

    `out_dir` is where they go (default: `outputs/<date>/<time>`; a directory that holds results already is left alone
    and another one beside it is taken). `sampling=(10, 100)` times the phases of 10 optimizer steps in every 100.
    `batch_size_fn` counts the samples of a batch where nothing in it tells. Training itself is not changed: it lasts as
    long as the trainer is told, with whatever callbacks, loggers and validation it has.

    After `fit` the results lie in `directory`, `record` has them in numbers, and `rows` has the batches of this rank.
    Where Lightning trains in processes of its own (`ddp_spawn`, `ddp_fork`), only the files tell.
    """

    def __init__(
        self,
        out_dir: str | os.PathLike[str] | None = None,
        *,
        timer: str = "auto",
        sampling: tuple[int, int] | None = None,
        batch_size_fn: Callable[[Any], int | None] | None = None,
        plots: bool = True,
        print_summary: bool = True,
    ) -> None:
        if timer not in TIMERS:
            raise ValueError(f"timer must be one of {', '.join(TIMERS)}, got {timer!r}")
        if batch_size_fn is not None and not callable(batch_size_fn):
            raise ValueError(f"batch_size_fn must be a function of a batch, got {batch_size_fn!r}")
        blocks = None if sampling is None else _checked_sampling(sampling)
        super().__init__(timer=timer, sampling=blocks, batch_size_fn=batch_size_fn)
        self._out_dir = Path(f"outputs/{local_time_text()}" if out_dir is None else out_dir)
        self._plots = plots
        self._print_summary = print_summary
        self._environment: Environment | None = None
        self._accumulate_grad_batches = 1
        self._started_unix_s = 0.0
        self._started_s = 0.0
        self._fit_started_ns = 0
        self.directory: Path | None = None
        """Where the results lie; None before training has started, and on all ranks but the first."""
        self.record: RunRecord | None = None
        """What is known of the run; None before it has ended, and on all ranks but the first."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Note when fitting starts."""
        if stage == "fit":
            self._fit_started_ns = HostClock.now()
            self._started_unix_s, self._started_s = unix_time_s(), monotonic_s()
            self.directory, self.record = None, None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start timing, and take the directory: better now than when all has been measured."""
        super().on_train_start(trainer, pl_module)
        self._environment = facts.environment_at_start()
        self._accumulate_grad_batches = trainer.accumulate_grad_batches  # other callbacks may change it at the end
        if trainer.is_global_zero:
            self.directory = claim_directory(self._out_dir.absolute(), may_rename=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Put everything back, then write and print."""
        super().on_train_end(trainer, pl_module)
        self._finish(trainer, pl_module, ranks.gather(self._own_timings()), Status.OK, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put everything back and keep what was measured before training failed; an interrupt is an end like others."""
        was_training = self._tap is not None
        super().on_exception(trainer, pl_module, exception)
        if was_training:  # the other ranks cannot be asked any more
            status = Status.OK if isinstance(exception, KeyboardInterrupt) else Status.ERROR
            self._finish(trainer, pl_module, [self._own_timings()], status, exception)

    def _own_timings(self) -> ranks.RankTimings:
        rows = self.rows  # made anew each time they are asked for
        return ranks.RankTimings(rows=rows, num_warmup_batches=find_warmup(rows, WARMUP))

    def _finish(
        self,
        trainer: Any,
        pl_module: Any,
        timings: list[ranks.RankTimings],
        status: Status,
        error: BaseException | None,
    ) -> None:
        """Have rank 0 write and print. Whatever goes wrong here is said, and the script goes on."""
        if self.directory is None:
            return
        try:
            rows = with_rank_waits(ranks.mark_common_warmup(timings))
            self.record = self._describe_run(trainer, pl_module, rows, status, error)
            _write(self.directory, self.record, rows)
            if self.record.summary is None:
                print(f"stepbench: {self.record.reason}; {len(rows)} batches are in {self.directory}")
            else:
                _report(self.directory, plots=self._plots, print_summary=self._print_summary)
        except Exception as problem:
            print(f"stepbench: the timings could not all be written: {problem}", file=sys.stderr)
            if not isinstance(problem, OSError):
                traceback.print_exception(problem)

    def _describe_run(
        self, trainer: Any, pl_module: Any, rows: list[BatchTiming], status: Status, error: BaseException | None
    ) -> RunRecord:
        summary = summarize_run(rows) if status is Status.OK else None
        reason = None if error is None else f"training ended with {type(error).__name__}: {error}"
        if status is Status.OK and summary is None:
            status, reason = Status.NO_BATCHES, reason or self.why_nothing_was_timed()
        spec = _describe_spec(trainer, pl_module, rows, self._accumulate_grad_batches)
        request = RunRequest(
            spec=spec,
            protocol=dataclasses.replace(WARMUP, epochs=max(1, len({row.epoch for row in rows}))),
            timer=self._timer,
            sampling=self._sampling,
            choices=tuple((key, getattr(spec, key).target.rpartition(".")[2]) for key in ("model", "data")),
        )
        first_ns = self.first_batch_end_ns
        assert self._environment is not None
        return RunRecord(
            request=request,
            spec_hash=spec_hash(spec),
            status=status,
            reason=reason,
            traceback=None if error is None else "".join(traceback.format_exception(error)),
            started_unix_s=self._started_unix_s,
            wall_s=monotonic_s() - self._started_s,
            effective=dataclasses.replace(
                facts.effective_settings(trainer, self, rows), accumulate_grad_batches=self._accumulate_grad_batches
            ),
            environment=facts.environment_at_end(self._environment, has_trained=True),
            start_up=StartUp(
                import_s=0.0,
                build_s=0.0,
                first_batch_s=None if first_ns is None else (first_ns - self._fit_started_ns) / NS_PER_S,
            ),
            compilation=self.compilation,
            num_forced_waits=self.num_forced_waits,
            summary=summary,
            **facts.peak_memory(trainer),
            **facts.count_parameters(pl_module),
        )


def step_timer_class(package_name: str | None = None) -> type[Any]:
    """`StepTimer` for the Trainer of `lightning.pytorch` or `pytorch_lightning`.

    Unless it is named, the package is the one that the script has imported, `lightning.pytorch` if it has both.
    """
    if package_name is None:
        package_name = next((name for name in PACKAGES if name in sys.modules), PACKAGES[0])
    return phase_timer_class(load_package(package_name), StepTimer)


def _checked_sampling(sampling: tuple[int, int]) -> Sampling:
    is_pair = isinstance(sampling, tuple) and len(sampling) == 2 and all(isinstance(part, int) for part in sampling)
    if not is_pair or not 1 <= sampling[0] <= sampling[1]:
        raise ValueError(f"sampling must be (N, M): N steps in every M, 1 <= N <= M; got {sampling!r}")
    return Sampling(timed_steps=sampling[0], period_steps=sampling[1])


# ---- what a script does not say in so many words ----


def _describe_spec(trainer: Any, pl_module: Any, rows: list[BatchTiming], accumulate_grad_batches: int) -> RunSpec:
    """What the script trains in the terms of a request, under the names of its classes."""
    data = trainer.datamodule if trainer.datamodule is not None else _training_set(trainer)
    batch_size = next(iter(facts.loader_batch_sizes(trainer)), None) or facts.largest_batch(rows)
    return RunSpec(
        model=Component(target=_path_of(pl_module), arguments_json=_hyperparameters(pl_module)),
        data=Component(target=_path_of(data), arguments_json=_hyperparameters(data)),
        batch_size=batch_size or 0,
        precision=str(trainer.precision),
        accelerator=trainer.strategy.root_device.type,
        num_devices=trainer.world_size,
        accumulate_grad_batches=accumulate_grad_batches,
        seed=_global_seed(),
    )


def _global_seed() -> int:
    """The seed that Lightning's `seed_everything` was given, which it leaves in the environment; 0 without one."""
    text = os.environ.get("PL_GLOBAL_SEED", "")
    return int(text) if text.isdecimal() else 0


def _training_set(trainer: Any) -> Any:
    """What the first training loader loads from; the loader itself where it does not say."""
    loader = next(iter(flatten_loaders(trainer.train_dataloader)), None)
    return getattr(loader, "dataset", loader)


def _path_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _hyperparameters(value: object) -> str:
    """What `save_hyperparameters` has kept, as far as it is plain data."""
    plain = {}
    for name, item in dict(getattr(value, "hparams_initial", {})).items():
        with contextlib.suppress(TypeError, ValueError):
            canonical_json(item)
            plain[str(name)] = item
    return canonical_json(plain)


# ---- files ----


def _write(directory: Path, record: RunRecord, rows: list[BatchTiming]) -> None:
    """Write what the report is made from."""
    text = "# What was trained, as far as it can be told. It was measured inside a script: run that again.\n"
    text += yaml.safe_dump(json.loads(canonical_json(dataclasses.asdict(record.request))), sort_keys=False)
    write_plan(directory, [PlannedCell(directory=directory, request=record.request, config_text=text, label="one run")])
    append_rows(directory, rows, record.request.round, record.request.attempt)
    write_record(directory, record)


def _report(directory: Path, *, plots: bool, print_summary: bool) -> None:
    """Summarize, draw and print. What that takes is imported here, when nothing is measured any more."""
    from stepbench import aggregate, report

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        aggregate.write_cell_summary(directory)
        if plots:
            aggregate.draw_cell(directory)
    if print_summary:
        report.print_run(directory)
