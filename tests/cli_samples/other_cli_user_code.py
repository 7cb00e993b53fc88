"""The same for people who use `pytorch_lightning`, whose classes are others than those of `lightning`."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset


class OtherCliModule(pl.LightningModule):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.width = width

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).mean()
        return loss


class OtherCliData(pl.LightningDataModule):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(512, 4)), batch_size=self.batch_size)


class OtherCallback(pl.Callback):
    pass


class OtherCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("data.init_args.batch_size", "model.init_args.width")

    def before_fit(self) -> None:
        self.model.seen_epochs = self.trainer.max_epochs
