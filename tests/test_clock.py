from __future__ import annotations

from typing import Any

import pytest
import torch

from stepbench.clock import DeviceClock, HostClock, make_clock, resolve_timer


@pytest.mark.parametrize(
    ("timer", "device_type", "resolved"),
    [
        ("auto", "cpu", "host"),
        ("sync", "cpu", "host"),
        ("events", "cpu", "host"),
        ("auto", "cuda", "events"),
        ("events", "xpu", "events"),
        ("sync", "cuda", "sync"),
        ("host", "cuda", "host"),
        ("auto", "mps", "sync"),  # its events are stamped by the host
        ("events", "mps", "sync"),
        ("auto", "xla", "host"),
    ],
)
def test_the_timer_is_one_that_the_device_has(timer: str, device_type: str, resolved: str) -> None:
    assert resolve_timer(timer, device_type) == resolved


def test_the_host_has_a_clock_of_its_own() -> None:
    clock = make_clock("host", "cpu")
    assert type(clock) is HostClock
    marks = [clock.now() for _ in range(100)]
    assert marks == sorted(marks)
    assert all(isinstance(mark, int) for mark in marks)
    clock.synchronize()
    assert not clock.can_record()
    with pytest.raises(TypeError, match="timer=host"):
        clock.make_event()


def test_a_device_is_synchronized_and_its_events_are_made_for_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: calls.append(device))
    monkeypatch.setattr(torch, "Event", lambda **settings: settings)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    clock = make_clock("events", "cuda:1")
    assert isinstance(clock, DeviceClock)
    clock.synchronize()
    assert calls == ["cuda:1"]
    assert clock.make_event() == {"device": "cuda:1", "enable_timing": True}
    assert not clock.can_record()
    assert DeviceClock("xpu").can_record()
