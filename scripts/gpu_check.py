"""Checks the timer on a CUDA device: against kernels of known length, against a profiler's trace, and for its cost.

    scripts/gpu_check.sh [--steps 60]

Prints a line per check with what was expected and what was measured, and exits 1 if one of them fails. Without CUDA it
says so and exits 0.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from stepbench.callback import make_phase_timer
from stepbench.lightning_package import load_package
from stepbench.record import PHASES, BatchTiming, Sampling
from stepbench.statistics import median

PACKAGE = load_package("lightning.pytorch")
KERNEL_MS = {"forward": 8.0, "backward": 16.0, "optimizer": 3.0}
DEVICE_MS = sum(KERNEL_MS.values())
SLOW_BATCH_MS = 40.0
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table."""

    name: str
    expected: str
    measured: str
    is_right: bool


class Batches:
    """Batches that take `wait_s` each to come, noting when each is asked for."""

    def __init__(self, num_batches: int, wait_s: float, size: int) -> None:
        self.num_batches = num_batches
        self.wait_s = wait_s
        self.batch = torch.ones(size, 512)
        self.requested_s: list[float] = []

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.num_batches):
            self.requested_s.append(time.perf_counter())
            time.sleep(self.wait_s)
            yield self.batch


class _SleepingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles = cycles
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.cuda._sleep(ctx.cycles)
        return gradient, None


class KernelsModule(pl.LightningModule):
    """Its forward, backward and optimizer step each launch one kernel that spins for a known time."""

    def __init__(self, cycles_per_ms: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(512, 1)
        self.cycles = {part: round(ms * cycles_per_ms) for part, ms in KERNEL_MS.items()}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        torch.cuda._sleep(self.cycles["forward"])
        loss: torch.Tensor = _SleepingBackward.apply(self.layer(batch).mean(), self.cycles["backward"])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        cycles = self.cycles["optimizer"]

        class SleepingSGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:  # type: ignore[override]
                loss = super().step(closure)  # type: ignore[arg-type]
                torch.cuda._sleep(cycles)
                return loss

        return SleepingSGD(self.parameters(), lr=1e-6)


class MatrixModule(pl.LightningModule):
    """Multiplies matrices; `width` says for how long."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers = [torch.nn.Linear(512, width), *(torch.nn.Linear(width, width) for _ in range(depth))]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def fit(module: pl.LightningModule, batches: Batches, *callbacks: Any) -> None:
    pl.Trainer(
        max_epochs=1,
        accelerator="cuda",
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, batches)


def timed_rows(module: pl.LightningModule, batches: Batches, **settings: Any) -> list[BatchTiming]:
    """The rows of one fit, the first third left out as warm-up and the last batch because it ends the queue."""
    timer = make_phase_timer(PACKAGE, **settings)
    fit(module, batches, timer)
    rows: list[BatchTiming] = timer.rows
    return rows[len(rows) // 3 : -1]


def median_ms(rows: list[BatchTiming], column: str) -> float:
    return median([value * 1e3 for row in rows if (value := getattr(row, column)) is not None])


def calibrate() -> float:
    """Cycles of the spinning kernel per millisecond, by events of our own."""
    torch.cuda._sleep(1_000_000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 50_000_000
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / start.elapsed_time(end)


def check_kernels(cycles_per_ms: float, steps: int) -> list[Check]:
    rows = timed_rows(KernelsModule(cycles_per_ms), Batches(steps, 0.0, 8))
    checks = []
    for part, expected in KERNEL_MS.items():
        measured = median_ms(rows, f"device_{part}_s")
        is_right = abs(measured - expected) < max(0.05 * expected, 0.3)
        checks.append(
            Check(
                name=f"{part} kernel", expected=f"{expected:.2f} ms", measured=f"{measured:.2f} ms", is_right=is_right
            )
        )
    exposed = median_ms(rows, "device_data_s")
    checks.append(
        Check(name="exposed data, fast loader", expected="0 ms", measured=f"{exposed:.2f} ms", is_right=exposed < 0.5)
    )
    largest = max(
        abs(sum(getattr(row, f"device_{phase}_s") for phase in PHASES) - (row.device_batch_s or 0.0)) for row in rows
    )
    checks.append(
        Check(
            name="device phases sum to the batch",
            expected="0 ns",
            measured=f"{largest * 1e9:.0f} ns",
            is_right=largest < 1e-8,
        )
    )
    return checks


def check_exposed_data(cycles_per_ms: float, steps: int) -> Check:
    rows = timed_rows(KernelsModule(cycles_per_ms), Batches(steps, SLOW_BATCH_MS / 1e3, 8))
    exposed, batch = median_ms(rows, "device_data_s"), median_ms(rows, "device_batch_s")
    idle = batch - DEVICE_MS
    host = median_ms(rows, "data_s")
    return Check(
        name="exposed data, slow loader",
        expected=f"{idle:.1f} ms of {batch:.1f} (the host waits {host:.1f})",
        measured=f"{exposed:.1f} ms",
        is_right=abs(exposed - idle) < 1.5,
    )


def check_trace(steps: int) -> Check:
    """The time from the first forward kernel to the last of the optimizer, by kineto, against the timer's own."""
    module, timer = MatrixModule(4096, 8), make_phase_timer(PACKAGE)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        fit(module, Batches(steps, 0.0, 4096), timer)
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy_ms = sum(event.time_range.elapsed_us() for event in events) / 1e3 / steps
    measured_ms = sum(
        sum(getattr(row, f"device_{phase}_s") or 0.0 for phase in PHASES if phase not in ("data", "other"))
        for row in timer.rows
    ) * (1e3 / len(timer.rows))
    return Check(
        name="device work against a profiler's trace",
        expected=f"{busy_ms:.2f} ms busy a step",
        measured=f"{measured_ms:.2f} ms",
        is_right=0.97 * busy_ms < measured_ms < 1.15 * busy_ms + 0.5,
    )


def step_ms(settings: dict[str, Any] | None, width: int, steps: int) -> float:
    """The mean time from request to request of one fit, which ends with the device idle."""
    batches = Batches(steps, 0.0, 256)
    callbacks = [] if settings is None else [make_phase_timer(PACKAGE, **settings)]
    fit(MatrixModule(width, 4), batches, *callbacks)
    torch.cuda.synchronize()
    requested = batches.requested_s[steps // 4 :]
    return statistics.fmean(later - earlier for earlier, later in itertools.pairwise(requested)) * 1e3


def check_overhead(steps: int) -> list[Check]:
    checks = []
    kinds: dict[str, dict[str, Any] | None] = {
        "bare": None,
        "events": {"timer": "events"},
        "events, 10 of 100": {"timer": "events", "sampling": Sampling(timed_steps=10, period_steps=100)},
        "sync": {"timer": "sync", "sampling": Sampling(timed_steps=1, period_steps=1)},
    }
    for name, width in (("tiny model", 64), ("larger model", 8192)):
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind in random.sample(list(kinds), len(kinds)):
                times[kind].append(step_ms(kinds[kind], width, 4 * steps))
        bare = median(times["bare"])
        for kind in list(kinds)[1:]:
            ratio = median(x / y for x, y in zip(times[kind], times["bare"], strict=True)) - 1
            limit = None if kind == "sync" else 0.02 if name == "larger model" else 0.15
            checks.append(
                Check(
                    name=f"cost of {kind}, {name}",
                    expected=f"bare {bare:.3f} ms" + (f", at most {limit:+.0%}" if limit else ""),
                    measured=f"{ratio:+.1%}",
                    is_right=limit is None or ratio < limit,
                )
            )
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    if not torch.cuda.is_available():
        print(f"There is no CUDA device here (torch {torch.__version__}): nothing was checked.")
        return 0
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    random.seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    cycles_per_ms = calibrate()
    checks = [*check_kernels(cycles_per_ms, steps), check_exposed_data(cycles_per_ms, steps), check_trace(steps)]
    checks += check_overhead(steps)
    width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = "ok" if check.is_right else "WRONG"
        print(f"{verdict:5}  {check.name:{width}}  expected {check.expected}; measured {check.measured}")
    return 0 if all(check.is_right for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
