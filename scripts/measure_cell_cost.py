"""What one more cell costs: forked against spawned workers, and the shares of composing and of drawing.

    python scripts/measure_cell_cost.py [--cells 20] [--spawned 4]

A null cell trains the smallest model for as few batches as the protocol allows, so that what is left is the cost of
having a cell at all.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hydra import compose, initialize_config_dir

from stepbench.launcher import ForkLauncher, Launcher, SpawnLauncher
from stepbench.settings import conf_dir, config_text, read_request
from stepbench.sweep import PlannedCell, measure_cell

NULL_CELL = [
    "model=mlp",
    "model.depth=1",
    "data=synthetic_features",
    "data.num_samples=64",
    "batch_size=4",
    "device=cpu",
    "device.num_threads=1",
    "protocol.warmup_batches=1",
    "protocol.warmup_s=0",
    "protocol.timed_batches=2",
    "protocol.timed_s=0",
]


def plan(directory: Path) -> PlannedCell:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("config", overrides=NULL_CELL)
    (directory / "logs").mkdir(parents=True)
    return PlannedCell(
        directory=directory, request=read_request(config, {}), config_text=config_text(config), label="null"
    )


def cell_times_s(launcher: Launcher, directory: Path, count: int) -> list[float]:
    """Seconds for each of `count` cells after a first one, which starts the server."""
    times_s = []
    for index in range(count + 1):
        cell = plan(directory / str(index))
        started_s = time.perf_counter()
        record = measure_cell(cell, launcher)
        times_s.append(time.perf_counter() - started_s)
        if record.summary is None:
            sys.exit(f"a null cell failed: {record.reason}")
    launcher.close()
    return times_s[1:]


def command_s(cells: int, *, plots: bool) -> float:
    """Seconds of a whole sweep of null cells as a command, in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = [*NULL_CELL, f"plots={str(plots).lower()}", "seed=" + ",".join(map(str, range(cells)))]
        started_s = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "stepbench", "-m", f"hydra.sweep.dir={directory}/sweep", *overrides],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return time.perf_counter() - started_s


def composing_s(cells: int) -> float:
    """Seconds that Hydra and the checks take for one cell."""
    with tempfile.TemporaryDirectory() as directory:
        started_s = time.perf_counter()
        for index in range(cells):
            plan(Path(directory) / str(index))
        return (time.perf_counter() - started_s) / cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=20)
    parser.add_argument("--spawned", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        forked = cell_times_s(ForkLauncher(), Path(directory) / "forked", arguments.cells)
        spawned = cell_times_s(SpawnLauncher(), Path(directory) / "spawned", arguments.spawned)
    forked_s, spawned_s = statistics.median(forked), statistics.median(spawned)
    print(
        f"a further null cell: {forked_s * 1e3:.0f} ms forked, {spawned_s * 1e3:.0f} ms spawned, "
        f"{spawned_s / forked_s:.0f} times cheaper (medians of {len(forked)} and {len(spawned)})",
        flush=True,
    )
    few, many = 2, 2 + arguments.cells
    without_s = (command_s(many, plots=False) - command_s(few, plots=False)) / arguments.cells
    with_s = (command_s(many, plots=True) - command_s(few, plots=True)) / arguments.cells
    compose_s = composing_s(arguments.cells)
    print(
        f"a further null cell of a whole sweep: {with_s * 1e3:.0f} ms with its own plots, {without_s * 1e3:.0f} ms "
        f"without; of those Hydra's composition and the checks take {compose_s * 1e3:.0f} ms "
        f"({compose_s / without_s:.0%}); drawing takes {(with_s - without_s) / with_s:.0%} of the whole",
        flush=True,
    )


if __name__ == "__main__":
    main()
