"""What the timing callback adds to a step, beside Lightning's SimpleProfiler and a callback that does nothing.

    python scripts/measure_overhead.py [--rounds 30] [--steps 200] [--long 100000]

Every round fits the same null model in a block of steps under each configuration, in random order, in one process with
one torch thread. The loader itself notes when each batch is requested, so all are measured alike and by none of them. A
block counts with a low quantile of its steps; the figure is the median over rounds of the paired difference to the
bare trainer's block of the same round, with the interval between the quartiles.

Last, one fit of `--long` steps shows whether a step takes longer, and the process more memory, the longer a run is.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import statistics
import time
import warnings
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.profilers import SimpleProfiler

from stepbench.callback import make_phase_timer
from stepbench.lightning_package import load_package
from stepbench.record import Sampling

PACKAGE = load_package("lightning.pytorch")

QUANTILE = 0.2
"""Of a block's steps: the lower ones are those that nothing else on the machine disturbed."""


class NotingLoader:
    """Gives the same batch `num_batches` times and notes when each is asked for."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self.requested_ns = array("q", bytes(8 * num_batches))
        self.resident_bytes: list[int] = []

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = torch.ones(1, 8)
        for number in range(self.num_batches):
            if number in (self.num_batches // 10, self.num_batches - 1):
                self.resident_bytes.append(psutil.Process().memory_info().rss)
            self.requested_ns[number] = time.perf_counter_ns()
            yield batch


class NullModule(pl.LightningModule):
    """The least that trains; `work_s` of busy waiting makes its step longer without touching memory."""

    def __init__(self, work_s: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.work_ns = round(work_s * 1e9)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        end = time.perf_counter_ns() + self.work_ns
        while time.perf_counter_ns() < end:
            pass
        loss: torch.Tensor = self.layer(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


CONFIGURATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "bare": dict,
    "no-op callback": lambda: {"callbacks": [pl.Callback()]},
    "stepbench": lambda: {"callbacks": [make_phase_timer(PACKAGE)]},
    "stepbench, 10 of 100 steps": lambda: {
        "callbacks": [make_phase_timer(PACKAGE, sampling=Sampling(timed_steps=10, period_steps=100))]
    },
    "SimpleProfiler": lambda: {"profiler": SimpleProfiler()},
}


def fit(configuration: str, steps: int, work_s: float) -> tuple[NotingLoader, list[float]]:
    """One fit; its loader, and the microseconds from request to request, the first tenth left out as warm-up."""
    loader = NotingLoader(steps)
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **CONFIGURATIONS[configuration](),
    ).fit(NullModule(work_s), loader)
    requested_ns = loader.requested_ns[steps // 10 :]
    return loader, [(later - earlier) / 1e3 for earlier, later in itertools.pairwise(requested_ns)]


def low_quantile(times: list[float]) -> float:
    return sorted(times)[round(QUANTILE * (len(times) - 1))]


def block_us(configuration: str, steps: int, work_s: float) -> float:
    """A low quantile of the step times of one block, in microseconds."""
    return low_quantile(fit(configuration, steps, work_s)[1])


def run_long(configuration: str, steps: int) -> None:
    """Print what the steps of one long fit take at its start and at its end, and what they leave in memory."""
    loader, times = fit(configuration, steps, 0.0)
    tenth = len(times) // 10
    first, last = low_quantile(times[:tenth]), low_quantile(times[-tenth:])
    start, end = loader.resident_bytes
    per_step = (end - start) / (0.9 * steps)
    print(
        f"{configuration}, {steps:,} steps: {first:.0f} µs at the start, {last:.0f} µs at the end "
        f"({last / first - 1:+.1%}); {(end - start) / 1e6:+.1f} MB, {per_step:.0f} bytes a step",
        flush=True,
    )


def compare(name: str, rounds: int, steps: int, work_s: float) -> None:
    blocks: dict[str, list[float]] = {configuration: [] for configuration in CONFIGURATIONS}
    for _ in range(rounds):
        for configuration in random.sample(list(CONFIGURATIONS), len(CONFIGURATIONS)):
            blocks[configuration].append(block_us(configuration, steps, work_s))
    bare_us = statistics.median(blocks["bare"])
    parts = []
    for configuration in list(CONFIGURATIONS)[1:]:
        added = sorted(x - bare for x, bare in zip(blocks[configuration], blocks["bare"], strict=True))
        low, high = added[round(0.25 * (rounds - 1))], added[round(0.75 * (rounds - 1))]
        middle = statistics.median(added)
        parts.append(f"{configuration}: {middle:+.0f} µs [{low:.0f}, {high:.0f}] ({middle / bare_us:+.1%})")
    print(f"{name}, bare step {bare_us:.0f} µs: " + "; ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--long", type=int, default=100_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for configuration in CONFIGURATIONS:
        block_us(configuration, 50, 0.0)  # warm up
    compare("null model", arguments.rounds, arguments.steps, 0.0)
    compare("5 ms model", max(4, arguments.rounds // 3), arguments.steps // 2, 0.0042)
    for configuration in ("bare", "stepbench") if arguments.long else ():
        run_long(configuration, arguments.long)


if __name__ == "__main__":
    main()
