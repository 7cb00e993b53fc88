"""Modules of people who expect more of a trainer than that it runs the loop."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from user_code_samples import TinyData, TinyModule


class LoggingModule(TinyModule):
    """Talks to the client of a logging service, and writes beside its logs."""

    def on_train_start(self) -> None:
        self.logger.experiment.config.update({"lr": 0.1}, allow_val_change=True)
        self.logger.experiment.config["name"] = "tiny"
        self.logger.watch(self)
        self.logger.log_image(key="examples", images=[1, 2])
        (Path(self.logger.log_dir) / "notes.txt").write_text("written")
        with self.logger.experiment.run() as run:
            run.log({"x": 1})
        assert list(self.loggers)
        assert self.trainer.log_dir

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.logger.experiment.add_scalar("loss", 1.0, self.global_step)
        return loss


class CallbackModule(TinyModule):
    """Configures callbacks, and looks for the best checkpoint."""

    def configure_callbacks(self) -> list[Any]:
        return [
            LearningRateMonitor(logging_interval="step"),
            ModelCheckpoint(monitor="val_loss"),
            EarlyStopping("val_loss"),
            RichProgressBar(),
        ]

    def on_train_epoch_end(self) -> None:
        checkpoint = self.trainer.checkpoint_callback
        assert checkpoint.best_model_path == ""
        assert checkpoint.dirpath
        assert isinstance(checkpoint, ModelCheckpoint)


class ScheduledModule(TinyModule):
    """Makes a schedule of what the trainer says of the training; `kind` says how."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        trainer = self.trainer
        if self.kind == "estimated":
            assert 0 < trainer.estimated_stepping_batches < 10**8
            made: Any = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=trainer.estimated_stepping_batches)
        elif self.kind == "epochs":
            made = lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=trainer.max_epochs, steps_per_epoch=10)
        elif self.kind == "short":
            made = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
        elif self.kind == "sequence":
            parts: list[Any] = [
                lr_scheduler.ConstantLR(optimizer),
                lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3),
            ]
            made = lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
        else:
            made = lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "monitor": "val_loss"}}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": "step"}}


class LateModule(pl.LightningModule):
    """Makes its layers when it is told to, and says how often it was set up."""

    def configure_model(self) -> None:
        if not hasattr(self, "layer"):
            self.layer = torch.nn.Linear(4, 1)

    def setup(self, stage: str) -> None:
        print("module set up")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class ExpensiveData(TinyData):
    """Takes its time to get ready, and writes a file."""

    def prepare_data(self) -> None:
        Path("prepared.txt").write_text("ready")

    def setup(self, stage: str) -> None:
        print("data set up")
        time.sleep(0.3)


class ClashingModule(TinyModule):
    def __init__(self, batch_size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


class ClashingData(TinyData):
    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.save_hyperparameters()


class NoisyModule(TinyModule):
    """Prints and warns by the thousand."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for number in range(2000):
            print("line", number)
            warnings.warn(f"warning {number}", stacklevel=1)
        return super().training_step(batch, batch_idx)


class StoppingModule(TinyModule):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 20:
            self.trainer.should_stop = True


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat((torch.ones(4),))


class OwnLoaderModule(ScheduledModule):
    """Brings an endless stream of its own."""

    def train_dataloader(self) -> Any:
        return DataLoader(Endless(), batch_size=4)


class DroppingData(TinyData):
    """Leaves out what is no whole batch."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(10, 4)), batch_size=self.batch_size, drop_last=True)


class NoOptimizerModule(TinyModule):
    configure_optimizers = pl.LightningModule.configure_optimizers  # type: ignore[assignment]


class NeedyModule(TinyModule):
    def __init__(self, hidden: int) -> None:
        super().__init__()


def nothing(model: Any, datamodule: Any) -> None:
    """Sets what no argument does."""
    datamodule.batch_size = 4


def of_one(model: Any) -> None:
    """Has the wrong signature."""
