"""The built-in models, and a foreign one, that print at their end what they have met."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stepbench.data.synthetic import SyntheticFeatures, SyntheticImages, SyntheticTokens
from stepbench.models.autoencoder import LitAutoencoder
from stepbench.models.mlp import LitMLP
from stepbench.models.transformer import LitTransformer

sys.path.insert(0, str(Path(__file__).parent / "user_project"))

from rivers.data import make_river_data  # noqa: F401
from rivers.model import Encoder, RiverForecast

LOADING: dict[str, Any] = {
    "num_workers": 0,
    "pin_memory": False,
    "persistent_workers": False,
    "drop_last": True,
    "num_samples": 4096,
    "seed": 0,
    "load_s": 0.0,
}
NUM_COMPARED = 10


def first_tensor(batch: Any) -> torch.Tensor:
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return batch


class Reporting:
    """Notes when each batch came and what it held; prints it when the training ends."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not hasattr(self, "times"):
            self.times: list[float] = []
            self.batches: list[str] = []
        self.times.append(time.perf_counter())
        if len(self.batches) < NUM_COMPARED:
            self.batches.append(hashlib.sha256(first_tensor(batch).numpy().tobytes()).hexdigest()[:12])

    def on_train_end(self) -> None:
        times, self.times = self.times, []
        if len(times) > 2 * NUM_COMPARED:  # not where a further step is only counted
            steps = [later - earlier for earlier, later in itertools.pairwise(times[10:])]
            facts = {
                "batches": self.batches,
                "start_method": multiprocessing.get_start_method(),
                "threads": torch.get_num_threads(),
                "median_step_s": statistics.median(steps),
            }
            print("FACTS " + json.dumps(facts), flush=True)


class ReportingAutoencoder(Reporting, LitAutoencoder):
    def __init__(self) -> None:
        super().__init__(channels=1, image_size=28, width=16, latent_dim=16, learning_rate=1e-3)


class ReportingTransformer(Reporting, LitTransformer):
    def __init__(self) -> None:
        super().__init__(vocab_size=64, sequence_length=16, width=32, depth=1, num_heads=2, learning_rate=1e-3)


class ReportingMLP(Reporting, LitMLP):
    def __init__(self) -> None:
        super().__init__(num_features=32, num_classes=10, width=32, depth=8, learning_rate=1e-3)


class ReportingForecast(Reporting, RiverForecast):  # type: ignore[misc]
    """Without what looks for a logger, which the plain script has none of."""

    def __init__(self) -> None:
        super().__init__(Encoder())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        forecast = self.head(self.encoder(batch["upstream"]["levels"]))[:, 0]
        loss: torch.Tensor = torch.nn.functional.mse_loss(forecast, batch["target"])
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def make_images(batch_size: int) -> SyntheticImages:
    return SyntheticImages(batch_size=batch_size, channels=1, image_size=28, num_classes=10, **LOADING)


def make_tokens(batch_size: int) -> SyntheticTokens:
    return SyntheticTokens(batch_size=batch_size, vocab_size=64, sequence_length=16, **LOADING)


def make_features(batch_size: int) -> SyntheticFeatures:
    return SyntheticFeatures(batch_size=batch_size, num_features=32, num_classes=10, **LOADING)
