"""An accelerator that works behind the host, on a scripted clock: what it does when is known to the nanosecond.

Per batch the host spends, before it hands the work over: request 0.05 ms, transfer 0.05, forward 0.5, backward 1,
optimizer 0.3, and 0.3 at the batch's end. The device works 1 ms for the transfer, 8 forward, 16 backward and 3 for the
optimizer, one after the other: 28 ms. A host that does not wait is thus far ahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from truth_lab import ScriptedClock, make_timer

from stepbench.record import PHASES, BatchTiming, Sampling

HOST_MS = {"data": 0.05, "transfer": 0.05, "forward": 0.5, "backward": 1.0, "optimizer": 0.3, "other": 0.3}
DEVICE_MS = {"transfer": 1.0, "forward": 8.0, "backward": 16.0, "optimizer": 3.0}
TINY_DEVICE_MS = dict.fromkeys(DEVICE_MS, 0.02)
SLOW_DATA_MS = 37.85
"""With it the host alone takes 40 ms for a batch."""


class ScriptedEvent:
    """Passed by the device once all that was launched before is done."""

    def __init__(self, device: ScriptedDevice) -> None:
        self.device = device
        self.ns: int | None = None

    def record(self) -> None:
        self.ns = max(self.device.ns, self.device.end_ns)

    def query(self) -> bool:
        return self.ns is not None and self.ns <= self.device.ns

    def synchronize(self) -> None:
        assert self.ns is not None
        self.device.num_synchronizations += 1
        self.device.ns = max(self.device.ns, self.ns)

    def elapsed_time(self, end_event: ScriptedEvent, /) -> float:
        assert self.query() and end_event.query(), "both events must be complete"
        assert self.ns is not None and end_event.ns is not None
        return (end_event.ns - self.ns) / 1e6


class ScriptedDevice(ScriptedClock):
    """Does what it is given in order, behind the host, which may be `queue_depth` launches ahead."""

    def __init__(self, queue_depth: int = 64) -> None:
        super().__init__()
        self.end_ns = 0
        self.queue_depth = queue_depth
        self.ends: deque[int] = deque()
        self.num_synchronizations = 0
        self.num_events = 0
        self.is_capturing = False

    def launch(self, milliseconds: float) -> None:
        while self.ends and self.ends[0] <= self.ns:
            self.ends.popleft()
        if len(self.ends) >= self.queue_depth:
            self.ns = self.ends.popleft()
        self.end_ns = max(self.ns, self.end_ns) + round(milliseconds * 1e6)
        self.ends.append(self.end_ns)

    def wait(self) -> None:
        """What the user's own code does when it reads a number from the device."""
        self.ns = max(self.ns, self.end_ns)

    def synchronize(self) -> None:
        self.num_synchronizations += 1
        self.wait()

    def make_event(self) -> Any:
        self.num_events += 1
        return ScriptedEvent(self)

    def can_record(self) -> bool:
        return not self.is_capturing


class _LaunchingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, module: LaunchingModule) -> torch.Tensor:
        ctx.module = module
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.module.work("backward")
        return gradient, None


class LaunchingModule(pl.LightningModule):
    """Every part costs the host a little and gives the device something to do."""

    def __init__(self, device: ScriptedDevice, device_ms: dict[str, float], *, waits: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.scripted = device
        self.device_ms = device_ms
        self.waits = waits

    def work(self, part: str) -> None:
        self.scripted.spend(HOST_MS[part])
        if part in self.device_ms:
            self.scripted.launch(self.device_ms[part])

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.work("transfer")
        return batch

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.work("forward")
        loss: torch.Tensor = _LaunchingBackward.apply(self.layer(batch).mean(), self)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self.waits:  # as `loss.item()` does
            self.scripted.wait()
        self.work("other")

    def configure_optimizers(self) -> Any:
        module = self

        class LaunchingSGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:  # type: ignore[override]
                loss = closure()
                module.work("optimizer")
                return loss

        return LaunchingSGD(self.parameters(), lr=1e-4)


class SlowItems(Dataset[torch.Tensor]):
    def __init__(self, device: ScriptedDevice, milliseconds: float, num_items: int) -> None:
        self.scripted = device
        self.milliseconds = milliseconds
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> torch.Tensor:
        self.scripted.spend(self.milliseconds)
        return torch.ones(2)


class DeviceLab:
    """One fit whose work happens on the scripted device; one sample a batch."""

    def __init__(
        self,
        *,
        timer: str = "events",
        sampling: Sampling | None = None,
        device_ms: dict[str, float] | None = None,
        data_ms: float = HOST_MS["data"],
        waits: bool = False,
        num_batches: int = 60,
        queue_depth: int = 64,
    ) -> None:
        self.device = ScriptedDevice(queue_depth)
        self.module = LaunchingModule(self.device, DEVICE_MS if device_ms is None else device_ms, waits=waits)
        self.items = SlowItems(self.device, data_ms, num_batches)
        self.timer = make_timer(timer=timer, clock=self.device, sampling=sampling)

    def run(self, **trainer_settings: Any) -> list[BatchTiming]:
        settings: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "logger": False}
        settings |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = pl.Trainer(callbacks=[self.timer], **{**settings, **trainer_settings})
        trainer.fit(self.module, DataLoader(self.items, batch_size=1))
        rows: list[BatchTiming] = self.timer.rows
        return rows


def milliseconds(row: BatchTiming, prefix: str = "") -> tuple[float, ...]:
    """The six phases and the batch of one row, in milliseconds; `prefix` is `device_` for the device's timeline."""
    return tuple(round(getattr(row, f"{prefix}{name}_s") * 1e3, 6) for name in (*PHASES, "batch"))


@dataclass(frozen=True, kw_only=True)
class DeviceAnswer:
    """A loop on the scripted device and what is right on the device's timeline: six phases and the batch, in ms."""

    name: str
    expected_ms: tuple[float, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def run(self, timer: str) -> list[BatchTiming]:
        """The batches in the steady state: without the first ones, and the last, behind which the queue runs dry."""
        return DeviceLab(timer=timer, **self.settings).run()[5:-1]


DEVICE_ANSWERS = (
    DeviceAnswer(name="the device is the bottleneck", expected_ms=(0, 1, 8, 16, 3, 0, 28)),
    DeviceAnswer(
        # The device then waits for the host while that asks for the next batch and hands it over.
        name="the same, and the host reads a number in every batch",
        settings={"waits": True},
        expected_ms=(0.05, 1.05, 8, 16, 3, 0.3, 28.4),
    ),
    DeviceAnswer(
        # A batch every 40 ms for 28 ms of work: idle for 12, of which 0.05 before the transfer is handed over.
        name="the data is the bottleneck",
        settings={"data_ms": SLOW_DATA_MS},
        expected_ms=(11.95, 1.05, 8, 16, 3, 0, 40),
    ),
    DeviceAnswer(
        name="the same, and the host reads a number in every batch: all of the wait falls on an idle device",
        settings={"data_ms": SLOW_DATA_MS, "waits": True},
        expected_ms=(37.85, 1.05, 8, 16, 3, 0.3, 66.2),
    ),
    DeviceAnswer(
        # The device always waits for the host; each kernel ends 0.02 ms after the host has left its part.
        name="the host is the bottleneck: tiny kernels",
        settings={"device_ms": TINY_DEVICE_MS},
        expected_ms=(0.05, 0.07, 0.5, 1, 0.3, 0.28, 2.2),
    ),
    DeviceAnswer(
        name="the same, and the host reads a number in every batch",
        settings={"device_ms": TINY_DEVICE_MS, "waits": True},
        expected_ms=(0.05, 0.07, 0.5, 1, 0.3, 0.3, 2.22),
    ),
)
