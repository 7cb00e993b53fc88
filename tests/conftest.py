"""What all tests share: one torch thread, one warm server, and the commands that people type."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

# Two threads on a loaded two-core host spin and time out; set before torch is imported, and inherited by workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Workers import the faulty modules of `user_code_samples`; commands run from other directories import stepbench.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), str(ROOT), os.environ.get("PYTHONPATH")]))


Stepbench = Callable[..., "subprocess.CompletedProcess[str]"]
Measure = Callable[..., Any]


@pytest.fixture
def stepbench(tmp_path: Path) -> Stepbench:
    """Runs `python -m stepbench ARGUMENTS` in a directory of its own, `tmp_path` unless `cwd` says otherwise."""

    def run(*arguments: str, cwd: Path = tmp_path, module: str = "stepbench") -> subprocess.CompletedProcess[str]:
        command: Sequence[str] = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=180, check=False)

    return run


@pytest.fixture(scope="session")
def launcher() -> Iterator[object]:
    """One warm server for all tests that need workers."""
    from stepbench.launcher import make_launcher

    shared = make_launcher("auto")
    yield shared
    shared.close()


@pytest.fixture
def measure(launcher: object, tmp_path: Path) -> Measure:
    """Measures one cell of the samples' classes in a worker of the shared server, in the directory `cell`."""
    from worker_lab import plan

    from stepbench.sweep import measure_cell

    def run(name: str = "cell", **settings: Any) -> Any:
        return measure_cell(plan(tmp_path / name, **settings), launcher)  # type: ignore[arg-type]

    return run
