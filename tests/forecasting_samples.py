"""Networks of the package pytorch-forecasting, made as its documentation does, for where it is installed."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytorch_forecasting

NUM_HOURS = 400
LENGTHS = {
    "max_encoder_length": 24,
    "min_encoder_length": 24,
    "max_prediction_length": 6,
    "min_prediction_length": 6,
}


def make_dataset() -> Any:
    values = np.random.default_rng(0).random(2 * NUM_HOURS).astype("float32")
    groups = ["a"] * NUM_HOURS + ["b"] * NUM_HOURS
    frame = pd.DataFrame({"value": values, "group": groups, "time_idx": [*range(NUM_HOURS)] * 2})
    columns = {"group_ids": ["group"], "target": "value", "time_idx": "time_idx"}
    return pytorch_forecasting.TimeSeriesDataSet(frame, **columns, time_varying_unknown_reals=["value"], **LENGTHS)


class Series(pl.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.dataset = make_dataset()

    def train_dataloader(self) -> Any:
        return self.dataset.to_dataloader(train=True, batch_size=self.batch_size)


def make(network: str) -> Any:
    """One of the package's networks, small."""
    arguments = {"widths": [16, 16]} if network == "NBeats" else {"hidden_size": 8}
    return getattr(pytorch_forecasting, network).from_dataset(make_dataset(), **arguments)
