"""A device that works behind the host: a host's clock books its work wrongly, events and synchronizing rightly."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from device_lab import (
    DEVICE_ANSWERS,
    DeviceAnswer,
    DeviceLab,
    LaunchingModule,
    ScriptedDevice,
    ScriptedEvent,
    milliseconds,
)
from lightning.pytorch.profilers import PassThroughProfiler
from torch.utils.data import DataLoader, TensorDataset
from truth_lab import make_timer

from stepbench.clock import HostClock
from stepbench.device_timeline import DeviceTimeline
from stepbench.record import PHASES, Sampling
from stepbench.statistics import summarize_run


@pytest.mark.parametrize("case", DEVICE_ANSWERS, ids=lambda case: case.name)
def test_the_device_s_timeline_is_partitioned_as_it_was(case: DeviceAnswer) -> None:
    lab = DeviceLab(**case.settings)
    rows = lab.run()[5:-1]
    assert [milliseconds(row, "device_") for row in rows] == [case.expected_ms] * len(rows)
    assert lab.device.num_synchronizations <= 1  # behind the last batch, to read the last events
    assert lab.timer.num_forced_waits == 0


def test_a_host_s_clock_books_the_device_s_work_to_whatever_happens_to_wait_for_it() -> None:
    waiting = DeviceLab(timer="host", waits=True)
    rows = waiting.run()
    # 22 of 28 ms of forward and backward turn up where the host reads a number.
    assert milliseconds(rows[5]) == (0.05, 0.05, 0.5, 1.0, 0.3, 26.5, 28.4)
    ahead = DeviceLab(timer="host").run()
    assert milliseconds(ahead[5])[-1] == 2.2  # not 28: the device has yet to do it
    assert all(row.device_batch_s is None for row in rows)


def test_events_keep_the_host_s_own_time_beside_the_device_s() -> None:
    rows = DeviceLab(timer="events").run()
    assert milliseconds(rows[5]) == (0.05, 0.05, 0.5, 1.0, 0.3, 0.3, 2.2)
    for row in rows:
        assert sum(milliseconds(row)[:-1]) == pytest.approx(milliseconds(row)[-1], abs=1e-9)
        assert sum(milliseconds(row, "device_")[:-1]) == pytest.approx(milliseconds(row, "device_")[-1], abs=1e-9)


def test_back_pressure_is_no_work_of_the_phase_that_meets_it() -> None:
    rows = DeviceLab(queue_depth=6, num_batches=40).run()
    host, device = milliseconds(rows[-5]), milliseconds(rows[-5], "device_")
    assert host[-1] == device[-1] == 28.0
    assert device == DEVICE_ANSWERS[0].expected_ms
    assert host[2:5] != device[2:5]


def test_synchronizing_books_rightly_and_says_by_how_much_it_slows_the_step() -> None:
    lab = DeviceLab(timer="sync", num_batches=200)
    rows = lab.run()
    sampled = [row for row in rows if row.forward_s is not None]
    assert len(sampled) == 100  # half of them, by default: the others tell what the step takes undisturbed
    assert {milliseconds(row) for row in sampled} == {(0.05, 1.05, 8.5, 17.0, 3.3, 0.3, 30.2)}
    summary = summarize_run([row for row in rows if row.step >= 20])
    assert summary is not None
    assert summary.timer_slowdown_fraction is not None
    # The first batch of ten that are not synchronized finds the device idle, and the last one waits for it.
    undisturbed_ms = (10 * 28.0 + 0.05 + 0.05 + 0.3) / 10
    assert summary.timer_slowdown_fraction == pytest.approx(30.2 / undisturbed_ms - 1, abs=0.01)


def test_block_sampling_with_events_times_the_other_batches_as_wholes() -> None:
    rows = DeviceLab(sampling=Sampling(timed_steps=5, period_steps=20), num_batches=100).run()
    assert [row.step for row in rows if row.forward_s is not None] == [s for s in range(100) if s % 20 < 5]
    for row in rows[5:-1]:
        assert row.device_batch_s == 0.028
        assert (row.device_forward_s is None) == (row.forward_s is None)


def test_the_events_are_a_bounded_number() -> None:
    lab = DeviceLab(num_batches=2000, waits=True)
    rows = lab.run()
    assert len(rows) == 2000
    assert lab.device.num_events < 4200
    assert lab.timer.num_forced_waits == 0


def test_a_device_too_far_behind_is_waited_for_and_that_is_counted() -> None:
    device = ScriptedDevice()
    timeline = DeviceTimeline(device, capacity=3)
    for _ in range(5):
        device.launch(10)
        timeline.record()
    assert timeline.num_forced_waits == 2
    assert timeline.read(wait=True) == [0, 10_000_000, 20_000_000, 30_000_000, 40_000_000]
    assert timeline.read(wait=True) == []


def test_stamps_come_only_as_far_as_the_device_has_come() -> None:
    device = ScriptedDevice()
    timeline = DeviceTimeline(device)
    for milliseconds_of_work in (1, 2, 3):
        device.launch(milliseconds_of_work)
        timeline.record()
    assert timeline.read() == []
    device.spend(3.5)
    assert timeline.read() == [0, 2_000_000]
    device.spend(10)
    assert timeline.read() == [5_000_000]


def test_nothing_is_recorded_into_a_graph_that_is_being_captured() -> None:
    device = ScriptedDevice()
    timeline = DeviceTimeline(device)
    timeline.record()
    device.is_capturing = True
    timeline.record()
    device.is_capturing = False
    device.spend(4)
    timeline.record()
    assert timeline.read(wait=True) == [0, None, 4_000_000]
    assert device.num_events == 2


@pytest.mark.parametrize("failing", ["synchronize", "record"])
def test_a_device_that_fails_with_the_user_s_code_hides_nothing(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = DeviceLab()

    def fail(*arguments: Any) -> None:
        raise RuntimeError("device-side assert")

    class FailingModule(LaunchingModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 20:
                lab.device.synchronize = fail  # type: ignore[method-assign]
                if failing == "record":
                    monkeypatch.setattr(ScriptedEvent, "record", fail)
                raise ValueError("the user's own")
            return super().training_step(batch, batch_idx)

    lab.module = FailingModule(lab.device, {}, waits=False)
    with pytest.raises(ValueError if failing == "synchronize" else (ValueError, RuntimeError)):
        lab.run()
    assert len(lab.timer.rows) == 20
    for row in lab.timer.rows:
        assert milliseconds(row) == (0.05, 0.05, 0.5, 1.0, 0.3, 0.3, 2.2)
    assert type(lab.module.trainer.profiler) is PassThroughProfiler
    assert not lab.module.trainer.optimizers[0]._optimizer_step_pre_hooks


class QueueDevice(HostClock):
    """A device of real time: a thread that works through a queue."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Any] = queue.Queue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (task := self.queue.get()) is not None:
            task()
            self.queue.task_done()

    def launch(self, seconds: float) -> None:
        self.queue.put(lambda: time.sleep(seconds))

    def synchronize(self) -> None:
        self.queue.join()

    def make_event(self) -> Any:
        return QueueEvent(self)

    def can_record(self) -> bool:
        return True


class QueueEvent:
    def __init__(self, device: QueueDevice) -> None:
        self.device = device
        self.passed = threading.Event()
        self.ns = 0

    def record(self) -> None:
        self.passed.clear()
        self.device.queue.put(self._pass)

    def _pass(self) -> None:
        self.ns = time.perf_counter_ns()
        self.passed.set()

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()

    def elapsed_time(self, end_event: QueueEvent, /) -> float:
        return (end_event.ns - self.ns) / 1e6


class QueueModule(pl.LightningModule):
    """Hands the device 12 ms for the forward and 5 ms for the optimizer, and waits for it at the end of the batch."""

    def __init__(self, device: QueueDevice) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.queue_device = device

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.queue_device.launch(0.012)
        loss: torch.Tensor = self.layer(batch[0]).mean()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.queue_device.synchronize()

    def configure_optimizers(self) -> Any:
        device = self.queue_device

        class LaunchingSGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:  # type: ignore[override]
                loss = super().step(closure)  # type: ignore[arg-type]
                device.launch(0.005)
                return loss

        return LaunchingSGD(self.parameters(), lr=1e-4)


def test_a_real_queue_is_seen_by_events_and_missed_by_the_host() -> None:
    device = QueueDevice()
    timer = make_timer(timer="events", clock=device)
    settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[timer], enable_checkpointing=False, **settings).fit(
        QueueModule(device), DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=1)
    )
    device.queue.put(None)
    rows = timer.rows[2:]
    assert len(rows) == 14
    for row in rows:
        phases = [getattr(row, f"device_{phase}_s") for phase in PHASES]
        assert sum(phases) == pytest.approx(row.device_batch_s, abs=1e-8)
        # What is launched in a phase may only be worked on while the next one is already being marked.
        assert row.device_forward_s >= 0.012
        assert row.device_optimizer_s >= 0.005
    median = sorted(row.device_other_s for row in rows)[7]
    assert median < 0.006
    by_host = sorted(row.other_s for row in rows)[7]
    assert by_host > 0.012  # where the host waits for all of it
