"""Starts workers and waits for them: forked from a warm server, or spawned. Imports neither torch nor lightning."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import IO, Any, Protocol

import psutil

from stepbench.clock import monotonic_s

GRACE_S = 3.0
"""How long a process group may take to end after SIGTERM before it is killed."""

KILL_S = 10.0
"""How long a killed process group may take to be gone; a process that waits for a device's driver takes its time."""


RANK_VARIABLES = frozenset(
    {
        "LOCAL_RANK",
        "RANK",
        "NODE_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PL_GLOBAL_SEED",
    }
)
"""Variables that would make a worker one rank of somebody else's run, or seed it."""

RANK_VARIABLE_PREFIX = "TORCHELASTIC_"


class LaunchError(RuntimeError):
    """No worker could be started; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How a worker ended: its exit code, negative for a signal, and whether the time limit ended it."""

    returncode: int
    timed_out: bool


class Launcher(Protocol):
    """Runs one worker at a time and waits for it without using the processor."""

    def start(self) -> None:
        """Begin to get ready; returns at once, so that the caller may get ready too."""
        ...

    def wait_until_ready(self) -> None:
        """Return once the first worker would start as fast as the others. Raises `LaunchError` where none could."""
        ...

    def run(self, cell_dir: Path, log: Path, timeout_s: float | None) -> WorkerExit:
        """Have a worker measure the request in `cell_dir`; its output goes to `log`. Interrupts end it and pass on."""
        ...

    def close(self) -> None:
        """Let go of every process."""
        ...


def worker_environment() -> dict[str, str]:
    """The environment that workers start with: this process's, without what tells a process its rank and its seed."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and not name.startswith(RANK_VARIABLE_PREFIX)
    }


def can_fork() -> bool:
    """Whether workers can be forked from a warm server: on Linux, with a kernel that lets a process be waited for."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def make_launcher(worker_start: str) -> Launcher:
    """The launcher for `auto`, `fork` or `spawn`."""
    if worker_start == "auto":
        worker_start = "fork" if can_fork() else "spawn"
    return ForkLauncher() if worker_start == "fork" else SpawnLauncher()


class ForkLauncher:
    """Forks workers from a warm server, which is replaced if it dies."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)

    def run(self, cell_dir: Path, log: Path, timeout_s: float | None) -> WorkerExit:
        """See `Launcher.run`. A server that dies counts as the worker's death; the next call starts another."""
        self.wait_until_ready()
        request = json.dumps({"cell_dir": str(cell_dir), "log": str(log)}) + "\n"
        pid: int | None = None
        timed_out = False
        try:
            self._requests.write(request)
            self._requests.flush()
            pid = self._read_reply()["pid"]
            if timeout_s is not None and not self._wait_readable(timeout_s):
                timed_out = True
                self._end_group(pid)
            return WorkerExit(returncode=self._read_reply()["returncode"], timed_out=timed_out)
        except (EOFError, BrokenPipeError):
            if pid is not None:
                _signal_group(pid, signal.SIGKILL)  # the worker dies with the server, its children do not
            returncode = self._stop_server()
            return WorkerExit(returncode=returncode or 1, timed_out=timed_out)
        except KeyboardInterrupt:
            if pid is None:
                self._stop_server()
            else:
                self._end_group(pid)
                with contextlib.suppress(EOFError):
                    self._read_reply()
            raise

    def close(self) -> None:
        """End the server, and with it a worker that still runs."""
        self._stop_server()
        self._errors.close()

    def start(self) -> None:
        """Start the server, which begins to import what workers need; nothing where it runs already."""
        if self._server is not None:
            return
        requests_read, requests_write = os.pipe()
        replies_read, replies_write = os.pipe()
        command = [sys.executable, "-m", "stepbench.server", str(requests_read), str(replies_write)]
        self._server = subprocess.Popen(
            command,
            pass_fds=(requests_read, replies_write),
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            env=worker_environment(),
            start_new_session=True,  # an interrupt from the terminal reaches the parent alone
        )
        os.close(requests_read)
        os.close(replies_write)
        self._requests = os.fdopen(requests_write, "w", encoding="utf-8")
        self._replies = os.fdopen(replies_read, "rb", buffering=0)
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Start the server unless it runs, and wait for its imports. Raises `LaunchError` with what it printed."""
        self.start()
        if self._is_ready:
            return
        try:
            self._read_reply()
            self._is_ready = True
        except EOFError:
            returncode = self._stop_server()
            self._errors.seek(0)
            printed = self._errors.read().decode(errors="replace").strip()
            raise LaunchError(f"the measuring process did not start, it ended with {returncode}:\n{printed}") from None

    def _read_reply(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _wait_readable(self, timeout_s: float) -> bool:
        return bool(select.select([self._replies], [], [], timeout_s)[0])

    def _end_group(self, pid: int) -> None:
        _signal_group(pid, signal.SIGTERM)
        if not self._wait_readable(GRACE_S):
            _signal_group(pid, signal.SIGKILL)

    def _stop_server(self) -> int:
        if self._server is None:
            return 0
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._replies.close()
        if not self._is_ready:
            self._server.kill()  # it may be seconds from noticing that nobody waits for it
        returncode = self._server.wait()
        self._server = None
        return returncode


class SpawnLauncher:
    """Starts every worker as a new process, which imports everything anew, and which may start others as its ranks."""

    def start(self) -> None:
        """Nothing can be prepared."""

    def wait_until_ready(self) -> None:
        """There is nothing to wait for."""

    def run(self, cell_dir: Path, log: Path, timeout_s: float | None) -> WorkerExit:
        """See `Launcher.run`."""
        command = [sys.executable, "-m", "stepbench.worker", str(cell_dir)]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=worker_environment(),
                start_new_session=True,
            )
        try:
            timed_out = not _wait(process, timeout_s)
            if timed_out:
                self._end_group(process)
            returncode = process.wait()
        except KeyboardInterrupt:
            self._end_group(process)
            raise
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            _wait_until_group_is_gone(process.pid)
        return WorkerExit(returncode=returncode, timed_out=timed_out)

    def close(self) -> None:
        """Nothing is kept."""

    def _end_group(self, process: subprocess.Popen[bytes]) -> None:
        _signal_group(process.pid, signal.SIGTERM)
        if not _wait(process, GRACE_S):
            _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], timeout_s: float | None) -> bool:
    """Wait for a child without polling where the kernel can say when it ends; returns whether it did."""
    if timeout_s is None:
        process.wait()
        return True
    if hasattr(os, "pidfd_open"):
        descriptor = os.pidfd_open(process.pid)
        try:
            return bool(select.select([descriptor], [], [], timeout_s)[0])
        finally:
            os.close(descriptor)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _wait_until_group_is_gone(group: int) -> None:
    """Return once a killed process group has ended, so that none of it disturbs the next run."""
    deadline_s = monotonic_s() + KILL_S
    while _is_alive(group) and monotonic_s() < deadline_s:
        sleep(0.02)


def _is_alive(group: int) -> bool:
    """Whether a process of the group still runs; one that has ended and that nobody asks for does not."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
