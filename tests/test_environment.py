from __future__ import annotations

import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from stepbench import environment


def test_the_host_and_its_software_are_described() -> None:
    found = environment.static_environment()
    assert found.host
    assert found.num_usable_cores is not None and 1 <= found.num_usable_cores <= (found.num_cores or 0)
    assert found.memory_bytes is not None and found.memory_bytes > 2**28
    versions = dict(found.versions)
    assert versions["torch"] == torch.__version__
    assert {"python", "lightning", "stepbench", "numpy"} <= versions.keys()
    assert environment.static_environment() is found  # asked once, inherited by every fork


def test_variables_that_change_speed_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.SPEED_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert environment.speed_variables() == ()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment.speed_variables() == (("OMP_NUM_THREADS", "3"),)


def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert environment._git_state(tmp_path / "nowhere") == (None, None)
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    commit, dirty = environment._git_state(tmp_path)
    assert commit is not None and len(commit) == 40
    assert dirty is False
    (tmp_path / "a").write_text("2")
    assert environment._git_state(tmp_path) == (commit, True)


class FakeError(Exception):
    pass


def fake_driver(**refused: bool) -> types.SimpleNamespace:
    """A driver library that answers in its own units, and refuses what `refused` names."""

    def answer(name: str, value: Any) -> Any:
        def ask(*arguments: Any) -> Any:
            if refused.get(name):
                raise FakeError(name)
            return value

        return ask

    return types.SimpleNamespace(
        NVMLError=FakeError,
        NVML_CLOCK_SM=1,
        nvmlSystemGetDriverVersion=answer("driver", "570.1"),
        nvmlDeviceGetClockInfo=answer("clock", 1500),  # MHz
        nvmlDeviceGetMaxClockInfo=answer("max_clock", 1980),
        nvmlDeviceGetPowerUsage=answer("power", 350_000),  # mW
        nvmlDeviceGetEnforcedPowerLimit=answer("limit", 700_000),
        nvmlDeviceGetPerformanceState=answer("state", 0),
        nvmlDeviceGetComputeRunningProcesses=answer("processes", [types.SimpleNamespace(pid=1)]),
    )


def test_the_driver_s_units_become_base_units_and_refusals_none() -> None:
    view = environment._driver_view(fake_driver(limit=True), handle=None)
    assert view == {
        "driver": "570.1",
        "sm_clock_hz": 1.5e9,
        "max_sm_clock_hz": 1.98e9,
        "power_w": 350.0,
        "power_limit_w": None,
        "performance_state": 0,
        "num_other_processes": 1,
    }
