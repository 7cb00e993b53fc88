"""Where a cell's profile lies, and what its files are called. Standard library only."""

from __future__ import annotations

PROFILE_DIR = "profile"
"""Inside a cell's directory."""

PROFILE_REQUEST_FILE = "profile_request.json"
"""What a worker is to do there; of another name than that of a cell, since this is none."""

PROFILE_FILES = {
    "simple": ("simple.txt",),
    "advanced": ("advanced.txt", "advanced.prof"),
    "pytorch": ("trace.json", "top_operators.txt", "memory_timeline.html", "memory_snapshot.pickle"),
}
"""What each profiler leaves; not every run of it leaves all of them."""

PROFILERS = tuple(PROFILE_FILES)

SLOWEST, EVERY_CELL = "slowest", "all"
"""Which cells of a sweep are profiled: the one with the longest median step, or each that is ok; else a number."""

ERROR_FILE = "error.txt"
"""Why there is no profile: in one line, and below it the traceback if there is one."""

LOG_FILE = "worker.log"
"""What the user's code printed meanwhile."""
