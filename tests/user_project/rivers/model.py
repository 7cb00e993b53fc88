"""A recurrent network over the gauges' readings."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn


class Encoder(nn.Module):
    """Readings of one window to a vector."""

    def __init__(self, gauges: int = 6, width: int = 32) -> None:
        super().__init__()
        self.recurrent = nn.GRU(gauges, width, batch_first=True)

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        return self.recurrent(levels)[1][0]


class RiverForecast(pl.LightningModule):
    """Forecasts the next level. Expects a logger, a checkpoint callback and an end of the training."""

    def __init__(self, encoder: nn.Module, width: int = 32, batch_size: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["encoder"])
        self.encoder = encoder
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        levels = batch["upstream"]["levels"].masked_fill(batch["upstream"]["silent"], 0.0)
        loss = nn.functional.mse_loss(self.head(self.encoder(levels))[:, 0], batch["target"])
        self.log("train/loss", loss, batch_size=len(batch["names"]), prog_bar=True, sync_dist=True)
        if self.trainer.is_global_zero and batch_idx % 50 == 0:
            self.logger.experiment.add_scalar("loss", float(loss.detach()), self.global_step)
        return loss

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        levels = batch["upstream"]["levels"]
        self.log("val/loss", nn.functional.mse_loss(self.head(self.encoder(levels))[:, 0], batch["target"]))

    def on_train_end(self) -> None:
        print("best so far:", self.trainer.checkpoint_callback.best_model_path)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"}}


class BareForecast(RiverForecast):
    """The same for a configuration that chooses the optimizer."""

    configure_optimizers = pl.LightningModule.configure_optimizers
