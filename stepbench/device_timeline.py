"""When a device came to each mark: events recorded behind its work, read later, many at once. No torch."""

from __future__ import annotations

from collections import deque

from stepbench.clock import Clock, Event

CAPACITY = 4096
"""Events in flight at most, some two hundred batches: no device's queue lets the host run that far ahead."""

NS_PER_MS = 1_000_000


class DeviceTimeline:
    """Records an event per mark and turns those that the device has passed into nanoseconds on its own timeline.

    An event behind the device's queue is passed at the host's time or when the work before it ends, whichever is later.
    The differences from mark to mark thus partition the device's time, and while it has nothing to do they are the
    host's. Nothing waits for the device, but where it is further behind than `capacity` events (`num_forced_waits`).
    """

    def __init__(self, clock: Clock, capacity: int = CAPACITY) -> None:
        self.num_forced_waits = 0
        self._clock = clock
        self._capacity = capacity
        self._pending: deque[Event | None] = deque()
        self._passed: list[int | None] = []  # stamps not yet asked for
        self._free: list[Event] = []
        self._last: Event | None = None
        self._last_ns = 0

    def record(self) -> None:
        """Record the next mark's event; none while the device's work is only being captured into a graph."""
        if not self._clock.can_record():
            self._pending.append(None)
            return
        if len(self._pending) >= self._capacity:
            self._make_room()
        event = self._free.pop() if self._free else self._clock.make_event()
        event.record()
        self._pending.append(event)

    def read(self, *, wait: bool = False) -> list[int | None]:
        """The stamps of further marks in their order, as far as the device has come; with `wait` of all of them.

        Nanoseconds since the first event; None for a mark without one. Neighbours are subtracted from one another, not
        all from the first: the difference comes in milliseconds of single precision, whose grain grows with it.
        """
        if wait and self._pending:
            self._clock.synchronize()
        while self._pending and self._take_first():
            pass
        stamps, self._passed = self._passed, []
        return stamps

    def _take_first(self) -> bool:
        """Stamp the oldest pending event; returns whether the device had passed it."""
        event = self._pending[0]
        if event is None:
            self._passed.append(None)
        elif event.query():
            if self._last is not None:
                self._last_ns += round(self._last.elapsed_time(event) * NS_PER_MS)
                self._free.append(self._last)
            self._last = event
            self._passed.append(self._last_ns)
        else:
            return False
        self._pending.popleft()
        return True

    def _make_room(self) -> None:
        """Free the oldest event; where the device has not come to it, the host has to wait."""
        oldest = self._pending[0]
        if oldest is not None and not oldest.query():
            self.num_forced_waits += 1
            oldest.synchronize()
        while self._pending and self._take_first():
            pass
