from __future__ import annotations

import dataclasses
import random
from collections import deque

import pytest

from stepbench.record import PHASES
from stepbench.timing import ConfirmedBatch, Mark, PhaseAccountant


def fold(*marks: tuple[Mark, int], batches: int | None = None) -> PhaseAccountant:
    accountant = PhaseAccountant()
    flat = [value for mark in marks for value in mark]
    count = sum(code == Mark.BATCH_DONE for code, _ in marks) if batches is None else batches
    accountant.fold(flat, deque(ConfirmedBatch(epoch=0, batch=i, num_samples=4) for i in range(count)))
    return accountant


def milliseconds(row: object) -> dict[str, float]:
    return {phase: round(getattr(row, f"{phase}_s") * 1e3, 9) for phase in PHASES if getattr(row, f"{phase}_s")}


MS = 1_000_000


def test_time_in_no_phase_is_other() -> None:
    (row,) = fold((Mark.FETCH, 0), (Mark.EXIT, 2 * MS), (Mark.BATCH_DONE, 5 * MS), (Mark.EPOCH_END, 6 * MS)).table
    assert milliseconds(row) == {"data": 2, "other": 4}
    assert row.batch_s == 0.006


def test_nested_phases_take_their_time_from_the_outer_one() -> None:
    (row,) = fold(
        (Mark.FETCH, 0),
        (Mark.EXIT, 1 * MS),
        (Mark.ENTER_STEP, 2 * MS),
        (Mark.ENTER_OTHER, 3 * MS),  # the closure
        (Mark.ENTER_FORWARD, 5 * MS),
        (Mark.EXIT, 10 * MS),
        (Mark.ENTER_BACKWARD, 11 * MS),
        (Mark.EXIT_BACKWARD, 18 * MS),
        (Mark.EXIT, 20 * MS),
        (Mark.STEPPED, 23 * MS),
        (Mark.BATCH_DONE, 24 * MS),
        (Mark.EPOCH_END, 24 * MS),
    ).table
    assert milliseconds(row) == {"data": 1, "forward": 5, "backward": 7, "optimizer": 1 + 3, "other": 1 + 2 + 1 + 2 + 1}
    assert row.took_optimizer_step


def test_a_second_mark_of_the_end_of_backward_changes_nothing() -> None:
    (row,) = fold(
        (Mark.FETCH, 0),
        (Mark.EXIT, 0),
        (Mark.ENTER_BACKWARD, 0),
        (Mark.EXIT_BACKWARD, 3 * MS),
        (Mark.EXIT_BACKWARD, 4 * MS),
        (Mark.BATCH_DONE, 4 * MS),
        (Mark.EPOCH_END, 5 * MS),
    ).table
    assert milliseconds(row) == {"backward": 3, "other": 2}


def test_a_batch_that_no_mark_confirms_is_discarded() -> None:
    accountant = fold((Mark.FETCH, 0), (Mark.EXIT, 4 * MS), (Mark.EPOCH_END, 4 * MS))
    assert len(accountant.table) == 0
    assert accountant.num_discarded == 1


def test_validation_is_outside_the_batch() -> None:
    first, second = fold(
        (Mark.FETCH, 0),
        (Mark.EXIT, 1 * MS),
        (Mark.BATCH_DONE, 2 * MS),
        (Mark.VALIDATION, 3 * MS),
        (Mark.ENTER_TRANSFER, 4 * MS),  # validation's own transfer is no phase of training
        (Mark.EXIT, 6 * MS),
        (Mark.VALIDATION, 7 * MS),
        (Mark.FETCH, 20 * MS),
        (Mark.EXIT, 21 * MS),
        (Mark.BATCH_DONE, 22 * MS),
        (Mark.EPOCH_END, 22 * MS),
    ).table
    assert milliseconds(first) == {"data": 1, "other": 2}
    assert first.validation_ran
    assert first.validation_s == 0.017
    assert not second.validation_ran
    assert second.validation_s == 0


def test_the_time_between_epochs_is_kept_apart() -> None:
    first, second = fold(
        (Mark.FETCH, 0),
        (Mark.EXIT, 1 * MS),
        (Mark.BATCH_DONE, 2 * MS),
        (Mark.EPOCH_END, 2 * MS),
        (Mark.FETCH, 50 * MS),
        (Mark.EXIT, 51 * MS),
        (Mark.BATCH_DONE, 52 * MS),
        (Mark.EPOCH_END, 52 * MS),
    ).table
    assert first.epoch_turnover_s is None
    assert second.epoch_turnover_s == 0.048
    assert second.batch_s == 0.002


def test_an_abort_loses_the_open_batch_alone() -> None:
    accountant = fold(
        (Mark.FETCH, 0),
        (Mark.EXIT, 1),
        (Mark.BATCH_DONE, 2),
        (Mark.FETCH, 3),
        (Mark.EXIT, 4),
        (Mark.ENTER_FORWARD, 5),
        (Mark.ABORT, 6),
    )
    assert [row.batch for row in accountant.table] == [0]
    assert accountant.num_discarded == 1


def test_an_abort_during_validation_keeps_the_batch_before_it() -> None:
    accountant = fold(
        (Mark.FETCH, 0), (Mark.EXIT, 1), (Mark.BATCH_DONE, 2), (Mark.VALIDATION, 3), (Mark.ABORT, 9), batches=1
    )
    assert [row.batch_s for row in accountant.table] == [3e-9]


def test_micro_batches_share_the_step_that_they_lead_to() -> None:
    marks = []
    for batch in range(6):
        start = batch * 10
        marks += [(Mark.FETCH, start), (Mark.EXIT, start + 1)]
        if batch % 3 == 2:
            marks += [(Mark.STEP_CALLED, start + 2), (Mark.ENTER_STEP, start + 3)]
            marks += [(Mark.STEPPED, start + 5), (Mark.EXIT, start + 6)]
        marks += [(Mark.BATCH_DONE, start + 9)]
    flat = [value for mark in [*marks, (Mark.EPOCH_END, 60)] for value in mark]
    accountant = PhaseAccountant()
    accountant.fold(flat, deque(ConfirmedBatch(0, batch, 4, completes_step=batch % 3 == 2) for batch in range(6)))
    rows = list(accountant.table)
    assert [row.step for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row.took_optimizer_step for row in rows] == [False, False, True] * 2


def test_a_step_that_was_asked_for_and_not_taken_is_flagged() -> None:
    accountant = PhaseAccountant()
    marks = [Mark.FETCH, 0, Mark.EXIT, 1, Mark.SCALED_STEP_CALLED, 2, Mark.EXIT, 7, Mark.BATCH_DONE, 8]
    accountant.fold([*marks, Mark.EPOCH_END, 9], deque([ConfirmedBatch(0, 0, 4, skipped_by_scaler=True)]))
    (row,) = accountant.table
    assert row.skipped_by_scaler
    assert not row.took_optimizer_step
    assert row.optimizer_s == 5e-9


def test_a_step_that_an_exception_ended_does_not_reach_into_the_next_batch() -> None:
    accountant = fold(
        *((Mark.FETCH, 0), (Mark.EXIT, 1), (Mark.STEP_CALLED, 2), (Mark.ENTER_STEP, 3), (Mark.ENTER_OTHER, 4)),
        *((Mark.ENTER_BACKWARD, 5), (Mark.EXIT, 6), (Mark.EXIT, 8), (Mark.BATCH_DONE, 9)),
        *((Mark.FETCH, 10), (Mark.EXIT, 12), (Mark.BATCH_DONE, 13), (Mark.EPOCH_END, 14)),
    )
    first, second = accountant.table
    assert (first.backward_s, first.optimizer_s, first.other_s) == (1e-9, 3e-9, 5e-9)
    assert (second.data_s, second.other_s) == (2e-9, 2e-9)
    assert accountant.num_discarded == 0


def test_validation_inside_a_batch_is_the_batch_s_own() -> None:
    (row,) = fold(
        *((Mark.FETCH, 0), (Mark.EXIT, 1), (Mark.VALIDATION, 2), (Mark.BATCH_DONE, 7), (Mark.EPOCH_END, 8)),
    ).table
    assert (row.batch_s, row.validation_ran) == (8e-9, False)


@pytest.mark.parametrize("contradiction", [Mark.EXIT, Mark.ENTER_FORWARD])
def test_a_batch_whose_marks_contradict_each_other_is_discarded_alone(contradiction: Mark) -> None:
    accountant = fold(
        *((Mark.FETCH, 0), (Mark.EXIT, 1), (Mark.BATCH_DONE, 2)),
        *((Mark.FETCH, 3), (Mark.EXIT, 4), (contradiction, 5), (Mark.BATCH_DONE, 6), (Mark.EPOCH_END, 7)),
        *((Mark.FETCH, 8), (Mark.EXIT, 9), (Mark.BATCH_DONE, 10), (Mark.EPOCH_END, 11)),
    )
    assert [(row.batch, row.step) for row in accountant.table] == [(0, 0), (2, 2)]
    assert accountant.num_discarded == 1


PAIRS = [
    *(
        (phase, Mark.EXIT)
        for phase in (Mark.ENTER_TRANSFER, Mark.ENTER_FORWARD, Mark.ENTER_OPTIMIZER, Mark.ENTER_OTHER)
    ),
    (Mark.ENTER_BACKWARD, Mark.EXIT_BACKWARD),
    (Mark.ENTER_STEP, Mark.STEPPED),
]


def random_marks(generator: random.Random, num_batches: int) -> tuple[list[int], list[ConfirmedBatch]]:
    """Balanced marks at random times, nested at random."""
    now, marks = 0, []

    def mark(code: Mark) -> None:
        nonlocal now
        now += generator.randrange(1_000_000)
        marks.extend((code, now))

    def phases(depth: int) -> None:
        for _ in range(generator.randrange(3)):
            enter, leave = generator.choice(PAIRS)
            mark(enter)
            if depth < 3:
                phases(depth + 1)
            if leave == Mark.EXIT or generator.random() < 0.8:  # else an exception was swallowed
                mark(leave)

    batches = []
    for batch in range(num_batches):
        mark(Mark.FETCH)
        mark(Mark.EXIT)
        mark(Mark.ENTER_OTHER)
        phases(0)
        mark(Mark.EXIT)
        mark(Mark.BATCH_DONE)
        batches.append(ConfirmedBatch(epoch=0, batch=batch, num_samples=1))
        if generator.random() < 0.2:
            mark(Mark.VALIDATION)
            phases(0)
    mark(Mark.EPOCH_END)
    return marks, batches


@pytest.mark.parametrize("seed", range(20))
def test_phases_sum_to_batch_time_and_batches_to_the_whole(seed: int) -> None:
    marks, batches = random_marks(random.Random(seed), num_batches=30)
    accountant = PhaseAccountant()
    accountant.fold(marks, deque(batches))
    assert len(accountant.table) == 30
    total = 0
    for row in accountant.table:
        phases_ns = [round(getattr(row, f"{phase}_s") * 1e9) for phase in PHASES]
        assert min(phases_ns) >= 0
        assert sum(phases_ns) == round(row.batch_s * 1e9)
        total += round((row.batch_s + row.validation_s) * 1e9)
    assert total == marks[-1] - marks[1]


@pytest.mark.parametrize("piece", [2, 6, 34])
def test_marks_may_be_folded_in_pieces(piece: int) -> None:
    marks, batches = random_marks(random.Random(1), num_batches=20)
    whole, pieces = PhaseAccountant(), PhaseAccountant()
    whole.fold(marks, deque(batches))
    confirmed = deque(batches)
    for start in range(0, len(marks), piece):
        pieces.fold(marks[start : start + piece], confirmed)
    assert [dataclasses.astuple(row) for row in pieces.table] == [dataclasses.astuple(row) for row in whole.table]


def test_a_pause_is_in_no_batch() -> None:
    first, second = fold(
        *((Mark.FETCH, 0), (Mark.EXIT, 1), (Mark.BATCH_DONE, 2), (Mark.PAUSE, 3)),
        *((Mark.FETCH, 90), (Mark.EXIT, 91), (Mark.BATCH_DONE, 92), (Mark.EPOCH_END, 93)),
    ).table
    assert (first.batch_s, second.batch_s) == (3e-9, 3e-9)
    assert second.epoch_turnover_s is None


def test_a_batch_timed_as_a_whole_has_no_phases() -> None:
    whole, by_phase = fold(
        *((Mark.FETCH_WHOLE, 0), (Mark.BATCH_DONE, 5)),
        *((Mark.FETCH, 7), (Mark.EXIT, 8), (Mark.BATCH_DONE, 9), (Mark.EPOCH_END, 10)),
    ).table
    assert whole.batch_s == 7e-9
    assert [getattr(whole, f"{phase}_s") for phase in PHASES] == [None] * len(PHASES)
    assert (by_phase.data_s, by_phase.other_s) == (1e-9, 2e-9)


def device_phases(row: object) -> dict[str, float]:
    return {phase: getattr(row, f"device_{phase}_s") for phase in PHASES if getattr(row, f"device_{phase}_s")}


def test_a_device_s_timeline_is_booked_beside_the_host_s() -> None:
    accountant = PhaseAccountant()
    codes = [Mark.FETCH, Mark.EXIT, Mark.ENTER_FORWARD, Mark.EXIT, Mark.BATCH_DONE, Mark.EPOCH_END]
    marks = [value for code, now in zip(codes, (0, 2, 3, 4, 5, 6), strict=True) for value in (code, now)]
    accountant.fold(marks, deque([ConfirmedBatch(0, 0, 4)]), [10, 10, 11, 31, 31, 32])
    (row,) = accountant.table
    assert (row.data_s, row.forward_s, row.other_s, row.batch_s) == (2e-9, 1e-9, 3e-9, 6e-9)
    assert device_phases(row) == {"forward": 20e-9, "other": 2e-9}
    assert row.device_batch_s == 22e-9


def test_stamps_that_go_back_are_booked_as_no_time() -> None:
    accountant = PhaseAccountant()
    marks = [Mark.FETCH, 0, Mark.EXIT, 1, Mark.BATCH_DONE, 2, Mark.EPOCH_END, 3]
    accountant.fold(marks, deque([ConfirmedBatch(0, 0, 4)]), [10, 30, 20, 35])
    (row,) = accountant.table
    assert device_phases(row) == {"data": 20e-9, "other": 5e-9}
    assert row.device_batch_s == 25e-9


def test_a_mark_without_a_stamp_leaves_its_batch_without_a_device_timing() -> None:
    accountant = PhaseAccountant()
    marks = [Mark.FETCH, 0, Mark.EXIT, 1, Mark.BATCH_DONE, 2, Mark.FETCH, 3, Mark.EXIT, 4, Mark.BATCH_DONE, 5]
    marks += [Mark.EPOCH_END, 6]
    accountant.fold(marks, deque([ConfirmedBatch(0, 0, 4), ConfirmedBatch(0, 1, 4)]), [0, None, 2, 3, 4, 5, 6])
    assert [row.device_batch_s for row in accountant.table] == [None, 3e-9]
    assert [row.batch_s for row in accountant.table] == [3e-9, 3e-9]


def test_a_backward_that_nothing_announces_is_unknown_in_all_batches_of_its_step() -> None:
    accountant = PhaseAccountant()
    accountant.may_hide_backward = True
    raw = [Mark.FETCH, Mark.EXIT, Mark.ENTER_FORWARD, Mark.EXIT, Mark.BATCH_DONE]
    stepping = [*raw[:3], Mark.ENTER_STEP, Mark.STEPPED, *raw[3:]]
    announced = [*raw[:3], Mark.ENTER_BACKWARD, Mark.EXIT_BACKWARD, Mark.ENTER_STEP, Mark.STEPPED, *raw[3:]]
    codes = [*raw, *stepping, *announced, *raw, Mark.EPOCH_END]
    marks = [value for now, code in enumerate(codes) for value in (code, now)]
    completes = [False, True, True, False]
    accountant.fold(marks, deque(ConfirmedBatch(0, i, 4, completes_step=c) for i, c in enumerate(completes)))
    assert [row.backward_merged for row in accountant.table] == [True, True, False, False]
    assert [row.backward_s for row in accountant.table] == [None, None, 1e-9, 0.0]
