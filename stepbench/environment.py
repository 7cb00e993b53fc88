"""A snapshot of the host, its accelerators and the software, so that a figure can be told from another machine's."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

import stepbench
from stepbench.record import AcceleratorState, Environment

PACKAGES = ("torch", "lightning", "pytorch-lightning", "torchmetrics", "numpy", "hydra-core", "omegaconf")

SPEED_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "GOMP_CPU_AFFINITY",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "MALLOC_CONF",
    "LD_PRELOAD",
)
"""Environment variables that change how fast a step is."""


@functools.cache
def static_environment() -> Environment:
    """What does not change while a process and its forks live. Takes tens of milliseconds the first time."""
    commit, dirty = _git_state(Path.cwd())
    return Environment(
        host=socket.gethostname(),
        operating_system=platform.platform(),
        cpu_model=_cpu_model(),
        num_cores=os.cpu_count(),
        num_usable_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        cgroup_cpu_limit=_cgroup_cpu_limit(),
        memory_bytes=psutil.virtual_memory().total,
        versions=tuple(_versions().items()),
        git_commit=commit,
        git_dirty=dirty,
    )


def speed_variables() -> tuple[tuple[str, str], ...]:
    """The environment variables that are set and change speed, as name and value."""
    return tuple((name, os.environ[name]) for name in SPEED_VARIABLES if name in os.environ)


def load_average() -> float | None:
    """The number of runnable processes, averaged over a minute by the kernel; None where it does not tell."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


def accelerator_states() -> tuple[AcceleratorState, ...]:
    """The accelerators that torch sees, with the driver's view of clocks and power where `pynvml` is installed.

    Asks torch for names only when CUDA is in use already, since asking creates a context.
    """
    if not torch.cuda.is_available():
        return ()
    return tuple(_accelerator_state(index) for index in range(torch.cuda.device_count()))


def _accelerator_state(index: int) -> AcceleratorState:
    properties = torch.cuda.get_device_properties(index)
    name, memory_bytes = properties.name, properties.total_memory
    try:
        import pynvml
    except ImportError:
        return AcceleratorState(name=name, memory_bytes=memory_bytes)
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        return AcceleratorState(name=name, memory_bytes=memory_bytes, **_driver_view(pynvml, handle))
    except pynvml.NVMLError:
        return AcceleratorState(name=name, memory_bytes=memory_bytes)


def _driver_view(pynvml: Any, handle: Any) -> dict[str, Any]:
    """The fields of `AcceleratorState` that only the driver knows; those it refuses are None."""

    def ask(question: Any, *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except pynvml.NVMLError:
            return None

    def scaled(value: float | None, factor: float) -> float | None:
        return None if value is None else value * factor

    processes = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return {
        "driver": ask(pynvml.nvmlSystemGetDriverVersion),
        "sm_clock_hz": scaled(ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM), 1e6),
        "max_sm_clock_hz": scaled(ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM), 1e6),
        "power_w": scaled(ask(pynvml.nvmlDeviceGetPowerUsage, handle), 1e-3),
        "power_limit_w": scaled(ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle), 1e-3),
        "performance_state": ask(pynvml.nvmlDeviceGetPerformanceState, handle),
        "num_other_processes": None if processes is None else sum(p.pid != os.getpid() for p in processes),
    }


def _cpu_model() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True, timeout=5).strip()
    return platform.processor() or None


def _cgroup_cpu_limit() -> float | None:
    """The cores that the control group allows (cgroup v2), as a number of cores; None where there is no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    return None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "stepbench": stepbench.__version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    versions["torch"] = torch.__version__  # names the build, which the package's metadata may not
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        if cudnn is not None:
            versions["cudnn"] = str(cudnn)
    return versions


def _git_state(directory: Path) -> tuple[str | None, bool | None]:
    """The commit of a working directory and whether tracked files differ from it; None outside a repository."""
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        return commit, bool(_git(directory, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=10).strip()
