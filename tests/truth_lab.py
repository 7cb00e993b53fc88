"""A training loop on a scripted clock: every part of it costs a known, different amount, so the answers are exact.

Milliseconds per batch: fetch 4 (1 per item, 4 items), transfer 2, after-transfer hook 1, forward 5, zero_grad 1,
backward 6, clipping 1, optimizer 3, another callback 6 x 0.5, module hooks 4 x 0.5, scheduler 1, logger 1.
Plain: data 4, transfer 2, forward 5, backward 6, optimizer 5, other 8; the batch takes 30.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stepbench.callback import make_phase_timer
from stepbench.clock import HostClock
from stepbench.lightning_package import load_package
from stepbench.record import PHASES, BatchTiming, Sampling

ITEMS_PER_BATCH = 4


class ScriptedClock(HostClock):
    """Time passes only where a test says so; in whole nanoseconds."""

    def __init__(self) -> None:
        self.ns = 0

    def now(self) -> int:  # type: ignore[override]
        return self.ns

    def spend(self, milliseconds: float) -> None:
        self.ns += round(milliseconds * 1_000_000)


class CostlyItems(Dataset[torch.Tensor]):
    def __init__(self, clock: ScriptedClock, num_items: int) -> None:
        self.clock = clock
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.spend(1)
        return torch.ones(2)


class CostlyStream(IterableDataset[torch.Tensor]):
    def __init__(self, clock: ScriptedClock, num_items: int) -> None:
        self.clock = clock
        self.num_items = num_items

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.num_items):
            self.clock.spend(1)
            yield torch.ones(2)


class _CostlyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, clock: ScriptedClock) -> torch.Tensor:
        ctx.clock = clock
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.spend(6)
        return gradient, None


class CostlySGD(torch.optim.SGD):
    def __init__(self, clock: ScriptedClock, parameters: Any, **kind: bool) -> None:
        super().__init__(parameters, lr=1e-4, **kind)  # type: ignore[arg-type]
        self.clock = clock

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.clock.spend(3)
        super().step()
        return loss


class CostlyScheduler(torch.optim.lr_scheduler.LambdaLR):
    clock: ScriptedClock | None = None

    def step(self, epoch: Any = None) -> None:
        if self.clock is not None:
            self.clock.spend(1)
        super().step()


class CostlyModule(pl.LightningModule):
    def __init__(self, clock: ScriptedClock, *, scheduler: bool = True, raise_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.clock = clock
        self.scheduler = scheduler
        self.scheduler_interval = "step"
        self.optimizer_kind: dict[str, bool] = {}
        self.raise_at = raise_at
        self.num_training_steps = 0

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.clock.spend(2)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.clock.spend(1)
        return batch

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.num_training_steps == self.raise_at:
            raise RuntimeError("planted")
        self.num_training_steps += 1
        self.clock.spend(5)
        loss = self.layer(batch).mean()
        self.log("loss", loss.detach())
        result: torch.Tensor = _CostlyBackward.apply(loss, self.clock)
        return result

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.clock.spend(1)
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clock.spend(1)
        super().configure_gradient_clipping(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        optimizer = CostlySGD(self.clock, self.parameters(), **self.optimizer_kind)
        if not self.scheduler:
            return optimizer
        scheduler = CostlyScheduler(optimizer, lambda _: 1.0)
        scheduler.clock = self.clock
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.scheduler_interval}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.clock.spend(0.5)

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.spend(0.5)

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.clock.spend(0.5)

    def on_after_backward(self) -> None:
        self.clock.spend(0.5)


class ManualModule(CostlyModule):
    """Manual optimization: the loop is in the module's hands. It logs nothing and has no scheduler."""

    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__(clock, scheduler=False)
        self.automatic_optimization = False

    def compute_loss(self, batch: torch.Tensor) -> torch.Tensor:
        self.clock.spend(5)
        result: torch.Tensor = _CostlyBackward.apply(self.layer(batch).mean(), self.clock)
        return result


class TwoOptimizersModule(ManualModule):
    """As a GAN trains: two optimizers, toggled, each with its own loss."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            loss = self.compute_loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [CostlySGD(self.clock, [self.layer.weight]), CostlySGD(self.clock, [self.layer.bias])]


class ManualClosureModule(ManualModule):
    """Hands its closure to the optimizer itself."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()

        def closure() -> torch.Tensor:
            loss = self.compute_loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class ManualAccumulationModule(ManualModule):
    """Steps in every third batch."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.compute_loss(batch))
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


class ManualSteppingModule(ManualModule):
    """The shortest loop by hand."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.compute_loss(batch))
        optimizer.step()
        optimizer.zero_grad()


class RawBackwardModule(ManualModule):
    """Runs autograd itself, which nothing announces."""

    steps_every = 1

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.compute_loss(batch).backward()
        if batch_idx % self.steps_every == self.steps_every - 1:
            optimizer.step()
            optimizer.zero_grad()


class RawAccumulationModule(RawBackwardModule):
    """The same, with a step in every second batch only."""

    steps_every = 2


class OwnFetchingModule(CostlyModule):
    """Asks for its batches itself and leaves them where they are."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        self.clock.spend(5)
        result: torch.Tensor = _CostlyBackward.apply(self.layer(batch).mean(), self.clock)
        return result


class SometimesNoneModule(CostlyModule):
    """Has no loss in every third batch."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 2 else loss


class DictModule(CostlyModule):
    """Returns its loss in a dictionary and takes its batch from one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch["a"] if isinstance(batch, dict) else batch, batch_idx)}


class ThreeClosuresModule(CostlyModule):
    """Its optimizer evaluates the closure three times in a step, as LBFGS does."""

    def configure_optimizers(self) -> Any:
        clock = self.clock

        class ThreeClosures(torch.optim.LBFGS):
            def step(self, closure: Any) -> Any:  # type: ignore[override]
                for _ in range(3):
                    with torch.enable_grad():
                        closure()
                clock.spend(3)

        return ThreeClosures(self.parameters())


class EndingEarlyModule(CostlyModule):
    """Gives up each epoch at batch 5."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        super().on_train_batch_start(batch, batch_idx)
        return -1 if batch_idx == 5 else None


class OwnOptimizerStepModule(CostlyModule):
    """Does 2 ms of its own around the optimizer step."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.clock.spend(2)
        super().optimizer_step(*args, **kwargs)


class EverySecondStepModule(CostlyModule):
    """Lets the optimizer step in every second batch only, as Lightning's documentation shows."""

    def optimizer_step(self, epoch: Any, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class SwallowingModule(CostlyModule):
    """Its optimizer fails in one batch, after its closure, and it takes no notice."""

    def configure_optimizers(self) -> Any:
        clock = self.clock

        class FailingSGD(CostlySGD):
            num_steps = 0

            def step(self, closure: Any = None) -> Any:
                self.num_steps += 1
                if self.num_steps == 6:
                    closure()
                    raise FloatingPointError
                return super().step(closure)

        return FailingSGD(clock, self.parameters())

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(FloatingPointError):
            super().optimizer_step(*args, **kwargs)


class WrappedOptimizerModule(CostlyModule):
    """Its optimizer is a wrapper that never calls its base class's constructor, and so has no hooks."""

    def configure_optimizers(self) -> Any:
        inner = CostlySGD(self.clock, self.parameters())

        class Wrapper(torch.optim.Optimizer):
            def __init__(self) -> None:
                self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

            def step(self, closure: Any = None) -> Any:  # type: ignore[override]
                return inner.step(closure)

            def zero_grad(self, set_to_none: bool = True) -> None:
                inner.zero_grad(set_to_none)

        return Wrapper()


class ReplacingModule(CostlyModule):
    """Sets its optimizers up anew when training starts."""

    def on_train_start(self) -> None:
        self.trainer.strategy.setup_optimizers(self.trainer)


class OwnCallbacksModule(CostlyModule):
    """Brings its callbacks along."""

    own_callbacks: list[pl.Callback]

    def configure_callbacks(self) -> Any:
        return self.own_callbacks


class CostlyDataModule(pl.LightningDataModule):
    """Owns the batch hooks: before transfer 1 ms, transfer 7 ms, after transfer 2 ms."""

    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__()
        self.clock = clock

    def train_dataloader(self) -> Any:
        return DataLoader(CostlyItems(self.clock, 96), batch_size=ITEMS_PER_BATCH)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.clock.spend(1)
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.clock.spend(7)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.clock.spend(2)
        return batch


class GrowingDataModule(pl.LightningDataModule):
    """Its batch size is there for a finder to raise."""

    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__()
        self.clock = clock
        self.batch_size = ITEMS_PER_BATCH

    def train_dataloader(self) -> Any:
        return DataLoader(CostlyItems(self.clock, 96), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return []


class SometimesNoneLoader(DataLoader[torch.Tensor]):
    """Gives None for every second batch."""

    def __iter__(self) -> Any:
        for index, batch in enumerate(super().__iter__()):
            yield None if index % 2 else batch


class CostlyScaler(torch.amp.GradScaler):
    """Unscaling costs 0.25 ms, the step's own check 0.5 ms, the update of the scale 2 ms."""

    clock: Any

    def unscale_(self, optimizer: Any) -> None:
        self.clock.spend(0.25)
        super().unscale_(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.clock.spend(0.5)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        self.clock.spend(2)
        super().update(new_scale)


class InfiniteLossModule(CostlyModule):
    """Its gradients are infinite, so that a scaler skips every step."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * float("inf")


class CostlyCallback(pl.Callback):
    """Six hooks of half a millisecond each."""

    def __init__(self, clock: ScriptedClock) -> None:
        self.clock = clock

    def _spend(self, *args: Any, **kwargs: Any) -> None:
        self.clock.spend(0.5)

    on_train_batch_start = _spend
    on_before_zero_grad = _spend
    on_before_backward = _spend
    on_after_backward = _spend
    on_before_optimizer_step = _spend
    on_train_batch_end = _spend


class SlowCallback(pl.Callback):
    """Twenty milliseconds at the end of every batch."""

    def __init__(self, clock: ScriptedClock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.spend(20)


class CostlyLogger(Logger):
    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__()
        self.clock = clock

    @property
    def name(self) -> str:
        return "costly"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "loss" in metrics:
            self.clock.spend(1)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Lab:
    """One fit on a scripted clock. After `run` the timer, the trainer and the clock are there to be asked."""

    def __init__(
        self,
        *,
        num_items: int = 96,
        timer_first: bool = True,
        sampling: Sampling | None = None,
        **trainer_settings: Any,
    ) -> None:
        self.clock = ScriptedClock()
        self.module = CostlyModule(self.clock)
        self.data: Dataset[torch.Tensor] = CostlyItems(self.clock, num_items)
        self.batch_size = ITEMS_PER_BATCH
        self.loader: Any = None
        self.validation: Any = None
        self.further_callbacks: list[pl.Callback] = []
        self.timer = make_timer(timer="host", clock=self.clock, sampling=sampling)
        self.timer_first = timer_first
        self.trainer_settings = trainer_settings
        self.exception: BaseException | None = None

    def run(self) -> list[BatchTiming]:
        callbacks: list[pl.Callback] = [self.timer, CostlyCallback(self.clock), *self.further_callbacks]
        settings: dict[str, Any] = {
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": CostlyLogger(self.clock),
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
        }
        self.trainer = pl.Trainer(
            callbacks=callbacks if self.timer_first else callbacks[::-1], **{**settings, **self.trainer_settings}
        )
        self.profiler_before = self.trainer.profiler
        loader = DataLoader(self.data, batch_size=self.batch_size) if self.loader is None else self.loader
        self.trainer.fit(self.module, loader, self.validation)
        return self.timer.rows


def make_timer(**settings: Any) -> Any:
    """A timer for the Trainer of `lightning.pytorch`."""
    return make_phase_timer(load_package("lightning.pytorch"), **settings)


def mean_milliseconds(rows: list[BatchTiming], column: str) -> float | None:
    """Milliseconds per batch, rounded to a tenth of a nanosecond; None where a row does not know them."""
    values = [getattr(row, f"{column}_s") for row in rows]
    return None if None in values else round(sum(values) / len(rows) * 1e3, 7)


def phase_milliseconds(rows: list[BatchTiming]) -> tuple[float | None, ...]:
    """Mean data, transfer, forward, backward, optimizer, other and batch, in milliseconds."""
    return tuple(mean_milliseconds(rows, column) for column in (*PHASES, "batch"))
