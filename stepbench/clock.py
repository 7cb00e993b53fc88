"""The only module that reads a clock or synchronizes a device."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock for marks. Tests put a scripted one in its place."""

    def now(self) -> int:
        """Nanoseconds since an arbitrary origin; never goes back."""
        ...


class HostClock:
    """The host's monotonic clock. Right where the device is the host: nothing runs behind the Python thread's back."""

    now = staticmethod(time.perf_counter_ns)


class SynchronizingClock:
    """The host's clock, read once the accelerator has finished everything queued so far.

    Each mark then bounds the device work before it, so kernels cannot be booked to a later phase. The price: host and
    device no longer overlap, and the step may be slower than without the timer.
    """

    def __init__(self) -> None:
        import torch

        self._synchronize = torch.accelerator.synchronize

    def now(self) -> int:
        """Nanoseconds on the host once the current accelerator is idle."""
        self._synchronize()
        return time.perf_counter_ns()


TIMERS = ("auto", "host", "sync")
"""Accepted values of `timer`: `auto` synchronizes on an accelerator and reads the host's clock elsewhere."""


def resolve_timer(timer: str, *, on_accelerator: bool) -> str:
    """The timer that runs on this kind of device, `host` or `sync`: on the host there is nothing to synchronize."""
    if not on_accelerator:
        return "host"
    return "sync" if timer == "auto" else timer


def make_clock(timer: str) -> Clock:
    """The clock of a resolved timer, `host` or `sync`."""
    return SynchronizingClock() if timer == "sync" else HostClock()


def unix_time_s() -> float:
    """Seconds since 1970, for people and file names; not for durations."""
    return time.time()


def monotonic_s() -> float:
    """Seconds since an arbitrary origin, for durations that are no measurement of a step: start-up, timeouts."""
    return time.monotonic()
