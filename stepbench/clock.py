"""The only module that reads a clock, synchronizes a device or makes its events."""

from __future__ import annotations

import time
from typing import Any, Protocol

NS_PER_S = 1_000_000_000

TIMERS = ("auto", "host", "sync", "events")
"""Accepted values of `timer`; `auto` takes the best one that the device has."""

EVENT_DEVICES = ("cuda", "xpu")
"""Where events tell the time on the device's own timeline. Not on MPS: there they are stamped by the host."""

SYNCHRONIZED_DEVICES = (*EVENT_DEVICES, "mps")
"""Where work runs behind the host and can be waited for."""


class Event(Protocol):
    """A point on a device's timeline, as `torch.Event` is one."""

    def record(self) -> None:
        """Put it behind everything that the device has been given so far."""
        ...

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds on the device's timeline from this event to a later one; both must be complete."""
        ...


class Clock(Protocol):
    """What marks are stamped with. Tests put a scripted clock and a scripted device in its place."""

    def now(self) -> int:
        """Nanoseconds on the host since an arbitrary origin; never goes back."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished everything it was given."""
        ...

    def make_event(self) -> Event:
        """An event of the device, to be recorded on its current stream."""
        ...

    def can_record(self) -> bool:
        """Whether an event can be recorded at this moment: not while a graph of device work is being captured."""
        ...


class HostClock:
    """The host's monotonic clock. Right where the device is the host: nothing runs behind the Python thread's back."""

    now = staticmethod(time.perf_counter_ns)

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def make_event(self) -> Event:
        """The host has no events. Raises TypeError."""
        raise TypeError("the host has no events: use timer=host")

    def can_record(self) -> bool:
        """Never."""
        return False


class DeviceClock(HostClock):
    """The host's clock beside an accelerator that runs behind it."""

    def __init__(self, device: Any) -> None:
        self._device = str(device)
        self._is_cuda = self._device.startswith("cuda")

    def synchronize(self) -> None:
        """See `Clock.synchronize`."""
        import torch

        torch.accelerator.synchronize(self._device)

    def make_event(self) -> Event:
        """See `Clock.make_event`."""
        import torch

        return torch.Event(device=self._device, enable_timing=True)  # said, for the default has changed over time

    def can_record(self) -> bool:
        """See `Clock.can_record`: an event that a CUDA graph captures cannot be timed."""
        if not self._is_cuda:
            return True
        import torch

        return not torch.cuda.is_current_stream_capturing()


def resolve_timer(timer: str, device_type: str) -> str:
    """The timer that runs on a type of device: `host`, `sync` or `events`.

    On the host there is nothing to synchronize, and where events tell no time the device is synchronized instead.
    """
    if device_type not in SYNCHRONIZED_DEVICES:
        return "host"
    if timer in ("auto", "events"):
        return "events" if device_type in EVENT_DEVICES else "sync"
    return timer


def make_clock(timer: str, device: Any) -> Clock:
    """The clock of a resolved timer on a device."""
    return HostClock() if timer == "host" else DeviceClock(device)


def unix_time_s() -> float:
    """Seconds since 1970, for people and file names; not for durations."""
    return time.time()


def local_time_text() -> str:
    """The date and the time of day here, for the names of directories: `2026-11-30/17-00-00`."""
    return time.strftime("%Y-%m-%d/%H-%M-%S")


def monotonic_s() -> float:
    """Seconds since an arbitrary origin, for durations that are no measurement of a step: start-up, timeouts."""
    return time.monotonic()
