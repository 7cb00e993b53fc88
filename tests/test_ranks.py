"""What ranks agree on, with ranks played by threads and clocks of their own; then real ranks on gloo."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import Stepbench
from test_main import FAST, tiny_group
from test_worker import assert_nobody_is_left
from worker_lab import plan

from stepbench import ranks
from stepbench.launcher import SpawnLauncher
from stepbench.protocol import ProtocolRule
from stepbench.ranks import AgreedRule, RankTimings, common_num_warmup_batches
from stepbench.record import Protocol, RunRecord, Status, read_record, record_path
from stepbench.sweep import measure_cell

QUICK = Protocol(name="quick", warmup_batches=5, warmup_s=0.3, timed_batches=30, timed_s=1.0)


class Meeting:
    """Where ranks ask each other: each waits for all, and all get the same answer."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks)
        self.wishes: list[bool] = []
        self.num_held = 0

    def agree(self, wish: bool) -> bool:
        self.wishes.append(wish)
        self.barrier.wait(timeout=10)
        answer = all(self.wishes)
        if self.barrier.wait(timeout=10) == 0:
            self.wishes.clear()
            self.num_held += 1
        self.barrier.wait(timeout=10)
        return answer


def stops(
    batch_s: tuple[float, ...], protocol: Protocol = QUICK, batches_per_step: int = 1, patience: int = 100_000
) -> tuple[list[int], int]:
    """At which batch each rank stops, whose batches take so many seconds by its own clock, and how often they met."""
    meeting = Meeting(len(batch_s))
    stopped = [0] * len(batch_s)

    def train(rank: int) -> None:
        rule = AgreedRule(ProtocolRule(protocol), protocol, meeting.agree, batches_per_step=batches_per_step)
        rule.start(0)
        for batch in range(1, patience):
            steps = batch % batches_per_step == 0
            now_ns = round(batch * batch_s[rank] * 1e9)
            if rule.batch_done(now_ns, completes_step=steps, took_step=steps, compiled=False):
                stopped[rank] = batch
                return

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(len(batch_s))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stopped, meeting.num_held


def test_ranks_whose_clocks_differ_stop_at_the_same_batch() -> None:
    (one, other), _ = stops((0.010, 0.011))
    assert one == other
    alone = 1 + round(1.3 / 0.010)
    assert alone <= one <= 1.25 * alone + 1


def test_no_rank_stops_before_the_slowest_clock_has_enough() -> None:
    (one, other), _ = stops((0.010, 0.001))
    assert one == other >= 1300


def test_ranks_ask_each_other_ever_more_rarely() -> None:
    (num_batches, _), num_held = stops((0.0001, 0.0001))
    assert num_batches >= 13_000
    assert num_held <= 35


def test_slow_batches_end_as_early_as_with_one_rank() -> None:
    assert stops((0.3, 0.3)) == ([15, 15], 1)


def test_ranks_stop_with_a_whole_step() -> None:
    (one, other), _ = stops((0.010, 0.011), batches_per_step=4)
    assert one == other
    assert one % 4 == 0


def test_all_ranks_leave_out_the_warm_up_of_the_slowest() -> None:
    def timings(count: int | None) -> RankTimings:
        return RankTimings(rows=[], num_warmup_batches=count)

    assert common_num_warmup_batches([timings(5), timings(9)]) == 9
    assert common_num_warmup_batches([timings(5), timings(None)]) is None


def test_a_single_process_gathers_what_it_has_and_waits_for_nobody() -> None:
    assert ranks.gather("mine") == ["mine"]
    ranks.wait_for_all()


def test_lightning_tells_a_process_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert ranks.own_rank() == 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert ranks.own_rank() == 3


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("[pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. This is"), True),
        (torch.distributed.DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
        (RuntimeError("my database said: connection refused"), False),
    ],
)
def test_a_lost_connection_is_told_from_a_failure_of_its_own(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_lost: bool
) -> None:
    assert not ranks.is_lost_connection(error)  # a single process has nobody to lose
    monkeypatch.setattr(ranks, "has_process_group", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert ranks.is_lost_connection(error) == is_lost


# ---- real ranks ----


def record_of(directory: Path, rank: int = 0) -> RunRecord:
    return read_record(record_path(directory, 0, 0, rank))


@pytest.mark.full
def test_the_fast_rank_waits_for_the_slow_one_in_backward(tmp_path: Path) -> None:
    tiny = Protocol(name="tiny", warmup_batches=3, warmup_s=0.0, timed_batches=20, timed_s=0.0)
    arguments = {"rank": 1, "sleep_s": 0.02}
    cell = plan(tmp_path / "cell", model="OneRankModule", model_arguments=arguments, num_devices=2, protocol=tiny)
    record = measure_cell(cell, SpawnLauncher())
    assert record.status is Status.OK, record.reason
    summary, effective = record.summary, record.effective
    assert summary is not None and effective is not None
    assert (effective.num_devices, effective.strategy, effective.batch_size) == (2, "DDPStrategy", 16)
    assert summary.phases_rank == 1
    assert summary.num_samples == 2 * 16 * summary.num_batches
    fast, slow = summary.ranks
    assert 0.012 < (fast.mean_wait_s or 0) < 0.03
    assert (slow.mean_wait_s or 0) < 0.005
    forward, backward = 2, 3
    assert (slow.phase_means_s[forward] or 0) - (fast.phase_means_s[forward] or 0) > 0.015
    assert (fast.phase_means_s[backward] or 0) - (slow.phase_means_s[backward] or 0) > 0.012
    other = record_of(cell.directory, rank=1)
    assert (other.rank, other.status) == (1, Status.OK)
    assert other.summary is not None
    assert other.summary.num_samples == 16 * summary.num_batches
    assert other.summary.num_warmup_batches == summary.num_warmup_batches
    lines = (cell.directory / "timing_results.csv").read_text().splitlines()
    column = lines[0].split(",").index("rank")
    assert [line.split(",")[column] for line in lines[1:]].count("1") == (len(lines) - 1) / 2


@pytest.mark.full
def test_a_sweep_over_devices_measures_each_cell_once(stepbench: Stepbench, tmp_path: Path) -> None:
    tiny_group(tmp_path / "conf")
    done = stepbench(
        *("--config-dir", "conf", "-m", "model=tiny", "data=tiny", "devices=1,2,1", "strategy=ddp", "plots=false"),
        *("hydra.sweep.dir=study", *FAST),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [sorted(p.name for p in (tmp_path / "study" / str(i) / "records").iterdir()) for i in range(3)]
    assert names == [["0.0.json"], ["0.0.json", "0.0.rank1.json"], ["0.0.json"]]
    for index, world_size in enumerate((1, 2, 1)):
        record = record_of(tmp_path / "study" / str(index))
        assert record.effective is not None and record.summary is not None
        assert record.effective.num_devices == world_size
        assert record.summary.num_samples == world_size * 32 * record.summary.num_batches
        rows = (tmp_path / "study" / str(index) / "timing_results.csv").read_text().splitlines()[1:]
        assert len(rows) == world_size * 10
    assert_nobody_is_left(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("rank", "at", "fault", "status", "wording"),
    [
        (1, -1, "raise_value_error", Status.ERROR, "rank 1: ValueError: planted"),  # the others still wait for it
        (1, 7, "raise_value_error", Status.ERROR, "rank 1: ValueError: planted"),
        (1, 7, "exit_politely", Status.ERROR, "rank 1: the user's code called sys.exit(0)"),
        (1, 7, "kill_itself", Status.CRASHED, "no record of rank 1"),
        (0, 7, "raise_value_error", Status.ERROR, "ValueError: planted"),
    ],
)
def test_a_rank_that_fails_alone_ends_the_cell_with_its_reason(
    tmp_path: Path, rank: int, at: int, fault: str, status: Status, wording: str
) -> None:
    arguments = {"rank": rank, "fault": fault, "at": at}
    cell = plan(tmp_path / "cell", model="OneRankModule", model_arguments=arguments, num_devices=2, timeout_s=150.0)
    started_s = time.monotonic()
    record = measure_cell(cell, SpawnLauncher())
    assert record.status is status
    assert wording in (record.reason or "")
    assert "Traceback" in (record.traceback or "")
    assert record_of(cell.directory) == record
    assert time.monotonic() - started_s < 60  # imports included; nobody waits until the time limit
    assert_nobody_is_left(tmp_path)


@pytest.mark.full
def test_fewer_ranks_than_asked_for_are_an_error(tmp_path: Path) -> None:
    record = measure_cell(plan(tmp_path / "cell", num_devices=2, strategy="single_device"), SpawnLauncher())
    assert record.status is Status.ERROR
    assert "devices=2 were asked for, but 1 trained" in (record.reason or "")


@pytest.mark.full
def test_a_rank_of_somebody_elses_run_measures_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    cell = plan(tmp_path / "cell", num_devices=2, timeout_s=100.0)
    record = measure_cell(cell, SpawnLauncher())
    assert record.status is Status.OK, record.reason
    assert len(list((cell.directory / "records").iterdir())) == 2
