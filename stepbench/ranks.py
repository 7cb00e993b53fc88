"""What the ranks of a run with several devices agree on while it trains, and tell each other when it is over.

Each rank is a process of its own that trains the same batches in step with the others; a rank that stopped, or asked
the others for something, on its own account would wait for them for ever.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from stepbench.protocol import SLOW_TIMED_BATCHES, ProtocolRule, mark_warmup
from stepbench.record import BatchTiming, Protocol

AGREEMENT_GROWTH = 1.25
"""Each time the ranks ask each other whether to stop, the run is this many times as long as the last time."""


class AgreedRule:
    """Ends a run only where every rank's own rule would have ended it, and at the same batch on all of them.

    The ranks' clocks differ, so each would stop at another batch. They ask each other at numbers of batches that grow
    geometrically, so that few batches are disturbed; `agree` is given a rank's own wish and returns what all of them
    wish. `batches_per_step` lets a run end with a whole optimizer step.
    """

    def __init__(
        self, rule: ProtocolRule, protocol: Protocol, agree: Callable[[bool], bool], *, batches_per_step: int = 1
    ) -> None:
        self._rule = rule
        self._agree = agree
        self._batches_per_step = batches_per_step
        self._num_batches = 0
        self._has_enough = False
        shortest = protocol.warmup_batches + min(protocol.timed_batches, SLOW_TIMED_BATCHES)
        self._next_agreement = self._whole_steps(shortest)

    def start(self, now_ns: int) -> None:
        """Training starts."""
        self._rule.start(now_ns)

    def batch_done(self, now_ns: int, *, completes_step: bool, took_step: bool, compiled: bool) -> bool:
        """A batch has ended; returns whether the run is to stop, which is the same on every rank."""
        self._num_batches += 1
        if self._rule.batch_done(now_ns, completes_step=completes_step, took_step=took_step, compiled=compiled):
            self._has_enough = True
        if self._num_batches < self._next_agreement:
            return False
        self._next_agreement = self._whole_steps(self._num_batches * AGREEMENT_GROWTH)
        return self._agree(self._has_enough)

    def _whole_steps(self, num_batches: float) -> int:
        return math.ceil(num_batches / self._batches_per_step) * self._batches_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimings:
    """What one rank has timed, and how many of its batches were warm-up by its own clock; None: all of them."""

    rows: list[BatchTiming]
    num_warmup_batches: int | None


def common_num_warmup_batches(timings: list[RankTimings]) -> int | None:
    """The warm-up of the rank that took longest: all ranks leave out the same batches, for they wait for each other."""
    counts = [timing.num_warmup_batches for timing in timings]
    known = [count for count in counts if count is not None]
    return max(known) if len(known) == len(counts) else None


def mark_common_warmup(timings: list[RankTimings]) -> list[list[BatchTiming]]:
    """The rows of every rank with the warm-up marked that they have in common."""
    num_warmup_batches = common_num_warmup_batches(timings)
    return [mark_warmup(timing.rows, num_warmup_batches) for timing in timings]


T = TypeVar("T")


def gather(value: T) -> list[T]:
    """What every rank has given, in the order of the ranks. Every rank must call it; it waits for all of them."""
    if not has_process_group():
        return [value]
    values: list[T | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return [given for given in values if given is not None]


def wait_for_all() -> None:
    """Return once every rank has called it, or one is gone: what it has left behind tells whether it should be."""
    if has_process_group():
        with contextlib.suppress(RuntimeError):
            torch.distributed.barrier()


def has_process_group() -> bool:
    """Whether this process can talk to other ranks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def own_rank() -> int:
    """The rank of this process, also before it has met the others: Lightning tells the processes that it starts."""
    return int(os.environ.get("LOCAL_RANK", 0))


LOST_CONNECTION = re.compile(
    r"(gloo|pair\.cc).*(connection (closed|reset|refused)|broken pipe|timed? ?out)|socket.*timed? ?out",
    re.IGNORECASE | re.DOTALL,
)
"""What torch says when another rank is gone; gloo names one of its source files in it."""


def is_lost_connection(error: BaseException) -> bool:
    """Whether a rank fails because another one is gone, as far as its error tells."""
    if not has_process_group() or torch.distributed.get_world_size() == 1:
        return False
    kinds = tuple(
        getattr(torch.distributed, name) for name in ("DistBackendError", "DistNetworkError", "DistStoreError")
    )
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and LOST_CONNECTION.search(str(error)) is not None
    )
