"""A warm process that has imported torch and lightning, done nothing else, and forks a worker for every request.

`python -m stepbench.server REQUESTS REPLIES` reads and writes JSON lines on two inherited file descriptors. For each
`{"cell_dir": …, "log": …}` it replies `{"pid": …}` once the worker runs and `{"returncode": …}` (negative: a signal)
once it and every process of its group are gone. One worker at a time. When the other end of the pipe closes, because
the parent has finished or died, the server kills its worker's group and ends.

OpenBLAS starts threads when numpy is imported. It ends them before a fork and starts as many in the child on first use
(its own fork handlers), so a worker has the threads that a plain script would have.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import multiprocessing.util
import os
import select
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import IO, Any

PR_SET_PDEATHSIG = 1
"""Linux's prctl option: the signal that a process gets when its parent dies."""


def main() -> int:
    """Import what workers need, then serve requests until the parent closes the pipe."""
    requests_fd, replies_fd = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when a worker ends
    from stepbench import environment, worker  # noqa: F401  (imported here so that every fork has it)

    environment.static_environment()
    gc.collect()  # here, once: a full collection in a worker would first have to copy every page of the imports
    with os.fdopen(requests_fd, encoding="utf-8") as requests, os.fdopen(replies_fd, "w", encoding="utf-8") as replies:
        _reply(replies, ready=True)
        for line in requests:
            _serve(json.loads(line), requests, replies)
    return 0


def _serve(request: dict[str, str], requests: IO[str], replies: IO[str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of OpenBLAS's threads, see above
        pid = os.fork()
    if pid == 0:
        requests.close()
        replies.close()
        _run_worker(Path(request["cell_dir"]), request["log"])
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # here and in the child: whichever comes first
    _reply(replies, pid=pid)
    worker_fd = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([requests.fileno(), worker_fd], [], [])
    finally:
        os.close(worker_fd)
    parent_died = worker_fd not in readable
    _kill_group(pid)
    _, wait_status = os.waitpid(pid, 0)
    if parent_died:
        os._exit(1)
    _reply(replies, returncode=os.waitstatus_to_exitcode(wait_status))


def _reply(replies: IO[str], **message: Any) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _kill_group(pid: int) -> None:
    """Kill what is left of a worker's process group, the worker included; it may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _run_worker(cell_dir: Path, log: str) -> None:
    """Turn the fork into what a fresh process would be, measure, and end; never returns."""
    returncode = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _redirect_output(log)
        atexit._clear()  # the server's; the worker runs its own at its end, as multiprocessing's children do
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        from stepbench.worker import work

        returncode = work(cell_dir, worker_start="fork")
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(returncode)


def _redirect_output(log: str) -> None:
    """Point standard output and error at a log file, and standard input at nothing."""
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    os.close(null_fd)
    for stream in (sys.stdout, sys.stderr):  # line by line, so that a worker which is killed has said what it said
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main())
