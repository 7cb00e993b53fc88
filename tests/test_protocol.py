from __future__ import annotations

import dataclasses

import pytest

from stepbench.protocol import ProtocolRule, mark_warmup
from stepbench.record import BatchTiming, Protocol

QUICK = Protocol(name="quick", warmup_batches=5, warmup_s=0.3, timed_batches=30, timed_s=1.0)


def follow(protocol: Protocol, batch_s: float, *, accumulate: int = 1, limit: int = 10_000) -> tuple[int | None, int]:
    """The warm-up's batches and the number of batches at which the run stopped, with batches of `batch_s` seconds."""
    rule = ProtocolRule(protocol)
    rule.start(0)
    for batch in range(1, limit + 1):
        steps = batch % accumulate == 0
        if rule.batch_done(round(batch * batch_s * 1e9), completes_step=steps, took_step=steps):
            return rule.num_warmup_batches, batch
    return rule.num_warmup_batches, limit


@pytest.mark.parametrize(
    ("batch_s", "warmup", "stop"),
    [
        (0.001, 300, 1300),  # both bounded by time
        (0.1, 5, 35),  # both bounded by batches
        (0.2, 5, 35),  # no slow batch yet
        (0.25, 5, 15),  # slow batches: ten are enough
    ],
)
def test_a_run_warms_up_and_stops_by_batches_and_by_seconds(batch_s: float, warmup: int, stop: int) -> None:
    assert follow(QUICK, batch_s) == (warmup, stop)


def test_warm_up_and_run_end_with_a_whole_step() -> None:
    assert follow(QUICK, 0.1, accumulate=4) == (8, 40)


def test_whole_epochs_are_never_cut() -> None:
    assert follow(dataclasses.replace(QUICK, epochs=2), 0.1, limit=500) == (5, 500)


def test_a_run_that_never_steps_is_ended() -> None:
    assert follow(QUICK, 0.1, accumulate=10**9) == (None, 20 * 35)
    assert follow(QUICK, 0.001, accumulate=10**9, limit=50_000) == (None, 26_000)


def test_no_warm_up_may_be_asked_for() -> None:
    assert follow(dataclasses.replace(QUICK, warmup_batches=0, warmup_s=0.0), 0.1) == (1, 31)


def test_the_warm_up_does_not_end_before_an_optimizer_has_really_stepped() -> None:
    rule = ProtocolRule(QUICK)
    rule.start(0)
    for batch in range(1, 20):  # a gradient scaler skips the first nineteen steps
        assert not rule.batch_done(round(batch * 0.1e9), completes_step=True, took_step=False)
    assert rule.num_warmup_batches is None
    rule.batch_done(round(2e9), completes_step=True, took_step=True)
    assert rule.num_warmup_batches == 20


def test_the_warm_up_starts_anew_behind_a_compilation() -> None:
    rule = ProtocolRule(QUICK)
    rule.start(0)
    now_s = 0.0
    for batch in range(1, 20):
        compiled = batch == 3
        now_s += 30.0 if compiled else 0.1
        rule.batch_done(round(now_s * 1e9), completes_step=True, took_step=True, compiled=compiled)
    assert rule.num_warmup_batches == 3 + 5


def test_batches_that_compiled_are_not_timed() -> None:
    rule = ProtocolRule(QUICK)
    rule.start(0)
    now_s = 0.0
    for batch in range(1, 100):
        compiled = batch == 10
        now_s += 30.0 if compiled else 0.1
        if rule.batch_done(round(now_s * 1e9), completes_step=True, took_step=True, compiled=compiled):
            break
    assert batch == 5 + 1 + 30


def rows(num_batches: int, accumulate: int = 1) -> list[BatchTiming]:
    return [
        BatchTiming(
            epoch=0,
            batch=batch,
            step=batch // accumulate,
            num_samples=1,
            warmup=False,
            data_s=0.0,
            transfer_s=0.0,
            forward_s=0.0,
            backward_s=0.0,
            optimizer_s=0.0,
            other_s=1.0,
            batch_s=1.0,
        )
        for batch in range(num_batches)
    ]


@pytest.mark.parametrize(
    ("num_batches", "num_warmup", "accumulate", "marked"),
    [
        (10, 3, 1, 3),
        (10, 8, 1, 5),  # never more than half
        (10, None, 1, 5),  # ended before it was warm
        (3, None, 1, 1),
        (1, None, 1, 0),  # one batch is all there is
        (12, 4, 4, 4),
        (12, 5, 4, 4),
        (12, 12, 4, 4),
        (0, None, 1, 0),
    ],
)
def test_warm_up_is_marked_in_whole_steps_and_leaves_half(
    num_batches: int, num_warmup: int | None, accumulate: int, marked: int
) -> None:
    flags = [row.warmup for row in mark_warmup(rows(num_batches, accumulate), num_warmup)]
    assert flags == [True] * marked + [False] * (num_batches - marked)
