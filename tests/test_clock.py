from __future__ import annotations

from typing import Any

import pytest
import torch

from stepbench.clock import HostClock, SynchronizingClock, make_clock, resolve_timer


def test_only_an_accelerator_is_synchronized() -> None:
    assert resolve_timer("auto", on_accelerator=True) == "sync"
    assert resolve_timer("auto", on_accelerator=False) == "host"
    assert resolve_timer("sync", on_accelerator=False) == "host"
    assert resolve_timer("host", on_accelerator=True) == "host"
    assert isinstance(make_clock("sync"), SynchronizingClock)
    assert isinstance(make_clock("host"), HostClock)


def test_the_host_clock_counts_nanoseconds_forwards() -> None:
    clock = HostClock()
    marks = [clock.now() for _ in range(100)]
    assert marks == sorted(marks)
    assert all(isinstance(mark, int) for mark in marks)


def test_the_synchronizing_clock_waits_for_the_device_before_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def synchronize(*arguments: Any) -> None:
        events.append("synchronized")

    def read() -> int:
        events.append("read")
        return 7

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    monkeypatch.setattr("stepbench.clock.time.perf_counter_ns", read)
    assert SynchronizingClock().now() == 7
    assert events == ["synchronized", "read"]
