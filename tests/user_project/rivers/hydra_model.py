"""The module for Hydra, which hands over optimizers that only lack the parameters."""

from collections.abc import Callable
from typing import Any

import torch

from rivers.model import RiverForecast


class HydraForecast(RiverForecast):
    """Optimizer and scheduler come as functions."""

    def __init__(
        self, optimizer: Callable, scheduler: Callable, encoder: torch.nn.Module, width: int, notes: str
    ) -> None:
        super().__init__(encoder, width)
        self.make_optimizer, self.make_scheduler = optimizer, scheduler

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.make_optimizer(params=self.trainer.model.parameters())
        scheduler = self.make_scheduler(optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}
