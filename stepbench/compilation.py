"""Watches `torch.compile`: whether it was at work, and for how long."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from stepbench.clock import NS_PER_S, HostClock
from stepbench.record import Compilation


class CompilationWatch:
    """Told by torch when a compilation starts and ends: of a graph, of a deferred backward, of a recorded CUDA graph.

    Whoever uses `torch.compile` has its compiler loaded; until then there is nothing to watch, and it is not loaded for
    the sake of it. What it had done by the time it is first seen has no duration.
    """

    def __init__(self, now: Callable[[], int] = HostClock.now) -> None:
        self._now = now
        self._callbacks = (self._on_start, self._on_end)
        self._was_at_work = False
        self._started_ns: int | None = None
        self._compile_ns = 0
        self._num_batches = 0
        self._num_recompilations = 0
        self._num_graphs = 0
        self._last_num_graphs = 0

    def start(self) -> None:
        """A run begins: whatever is compiled from here on is its own."""
        dynamo = _loaded_compiler()
        if dynamo is not None:
            self._last_num_graphs = _count_graphs(dynamo)
            self._register(dynamo)

    def was_at_work(self) -> bool:
        """Whether anything was compiled since the last call, which is the end of a batch.

        Also where torch did not tell: because its compiler was loaded in this batch, or the user's code has reset it.
        """
        dynamo = _loaded_compiler()
        if dynamo is None:
            return False
        was_at_work, num_graphs = self._was_at_work, _count_graphs(dynamo)
        if num_graphs != self._last_num_graphs:
            was_at_work = was_at_work or num_graphs > self._last_num_graphs
            self._num_graphs += max(0, num_graphs - self._last_num_graphs)
            self._last_num_graphs = num_graphs
        if self._callbacks[0] not in dynamo.callback_handler.start_callbacks:
            self._register(dynamo)
        if was_at_work:
            self._was_at_work = False
            self._num_batches += 1
        return was_at_work

    def stop(self) -> None:
        """The run has ended."""
        dynamo = _loaded_compiler()
        if dynamo is not None:
            handler = dynamo.callback_handler
            with contextlib.suppress(ValueError):
                handler.remove_start_callback(self._callbacks[0])
                handler.remove_end_callback(self._callbacks[1])

    def result(self) -> Compilation | None:
        """What was compiled so far; None where nothing was."""
        if not (self._num_graphs or self._num_batches):
            return None
        return Compilation(
            num_graphs=self._num_graphs,
            num_recompilations=self._num_recompilations,
            num_batches=self._num_batches,
            compile_s=self._compile_ns / NS_PER_S if self._compile_ns else None,
        )

    def _register(self, dynamo: Any) -> None:
        dynamo.callback_handler.register_start_callback(self._callbacks[0])
        dynamo.callback_handler.register_end_callback(self._callbacks[1])

    def _on_start(self, *arguments: Any) -> None:
        self._started_ns = self._now()
        self._was_at_work = True
        # A compile id is the frame's number and how often it was compiled before: 0/1 is a recompilation.
        compile_id = str(getattr(arguments[0], "compile_id", "")) if arguments else ""
        trigger = str(getattr(arguments[0], "callback_trigger", "")) if arguments else ""
        count = compile_id.rpartition("/")[2].partition("_")[0]
        self._num_recompilations += trigger.endswith("DYNAMO") and count.isdigit() and int(count) > 0

    def _on_end(self, *arguments: Any) -> None:
        if self._started_ns is not None:
            self._compile_ns += self._now() - self._started_ns
            self._started_ns = None


def _loaded_compiler() -> Any:
    """Torch's compiler where somebody has loaded it; None else."""
    return sys.modules.get("torch._dynamo")


def _count_graphs(dynamo: Any) -> int:
    return int(dynamo.utils.counters["stats"]["unique_graphs"])
