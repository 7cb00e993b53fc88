"""Made-up samples that cost next to nothing to fetch, so that a run shows the model and not the data.

Each data set is a small pool of samples drawn once from `seed` and repeated up to `num_samples`; the pool is
the same whatever `num_samples` is. Drawing it leaves torch's global random state alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from stepbench.arguments import integer_problem, raise_problems
from stepbench.data.loading import LoaderSettings, build_train_loader

# Small enough that 64 colour images of 224 x 224 take 37 MiB.
POOL_SIZE = 64


class RepeatedPool(Dataset[Any]):
    """`num_samples` pairs (input, target) that repeat two sequences of equal length."""

    def __init__(self, inputs: torch.Tensor, targets: Sequence[Any] | torch.Tensor, *, num_samples: int) -> None:
        assert len(inputs) == len(targets)
        self.inputs = inputs
        self.targets = targets
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        position = index % len(self.inputs)
        return self.inputs[position], self.targets[position]


class SyntheticImages(pl.LightningDataModule):
    """Batches (images, labels): float32 (batch, channels, image_size, image_size) in 0..1, int64 (batch,)."""

    def __init__(
        self,
        *,
        batch_size: int,
        num_samples: int = 8192,
        channels: int = 1,
        image_size: int = 28,
        num_classes: int = 10,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        drop_last: bool = True,
        load_s: float = 0.0,
    ) -> None:
        raise_problems(
            integer_problem("batch_size", batch_size, minimum=1),
            integer_problem("num_samples", num_samples, minimum=0),
            integer_problem("channels", channels, minimum=1),
            integer_problem("image_size", image_size, minimum=1),
            integer_problem("num_classes", num_classes, minimum=1),
            integer_problem("seed", seed, minimum=0),
        )
        super().__init__()
        self.batch_size = batch_size
        self.num_samples = num_samples
        self.image_shape = (channels, image_size, image_size)
        self.num_classes = num_classes
        self.seed = seed
        self.settings = LoaderSettings(
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            drop_last=drop_last,
            load_s=load_s,
        )

    def setup(self, stage: str) -> None:
        """Draw the pool."""
        generator = torch.Generator().manual_seed(self.seed)
        images = torch.rand(POOL_SIZE, *self.image_shape, generator=generator)
        labels = torch.randint(self.num_classes, (POOL_SIZE,), generator=generator).tolist()
        self.dataset = RepeatedPool(images, labels, num_samples=self.num_samples)

    def train_dataloader(self) -> DataLoader[Any]:
        """The shuffling loader."""
        return build_train_loader(self.dataset, batch_size=self.batch_size, settings=self.settings)


class SyntheticTokens(pl.LightningDataModule):
    """Batches (inputs, targets): int64 (batch, sequence_length) in 0..vocab_size-1, the targets one ahead."""

    def __init__(
        self,
        *,
        batch_size: int,
        num_samples: int = 8192,
        vocab_size: int = 256,
        sequence_length: int = 64,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        drop_last: bool = True,
        load_s: float = 0.0,
    ) -> None:
        raise_problems(
            integer_problem("batch_size", batch_size, minimum=1),
            integer_problem("num_samples", num_samples, minimum=0),
            integer_problem("vocab_size", vocab_size, minimum=2),
            integer_problem("sequence_length", sequence_length, minimum=1),
            integer_problem("seed", seed, minimum=0),
        )
        super().__init__()
        self.batch_size = batch_size
        self.num_samples = num_samples
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.seed = seed
        self.settings = LoaderSettings(
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            drop_last=drop_last,
            load_s=load_s,
        )

    def setup(self, stage: str) -> None:
        """Draw the pool."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.randint(self.vocab_size, (POOL_SIZE, self.sequence_length + 1), generator=generator)
        self.dataset = RepeatedPool(tokens[:, :-1], tokens[:, 1:], num_samples=self.num_samples)

    def train_dataloader(self) -> DataLoader[Any]:
        """The shuffling loader."""
        return build_train_loader(self.dataset, batch_size=self.batch_size, settings=self.settings)


class SyntheticFeatures(pl.LightningDataModule):
    """Batches (features, labels): float32 (batch, num_features) from a unit normal, int64 (batch,)."""

    def __init__(
        self,
        *,
        batch_size: int,
        num_samples: int = 8192,
        num_features: int = 32,
        num_classes: int = 10,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        drop_last: bool = True,
        load_s: float = 0.0,
    ) -> None:
        raise_problems(
            integer_problem("batch_size", batch_size, minimum=1),
            integer_problem("num_samples", num_samples, minimum=0),
            integer_problem("num_features", num_features, minimum=1),
            integer_problem("num_classes", num_classes, minimum=2),
            integer_problem("seed", seed, minimum=0),
        )
        super().__init__()
        self.batch_size = batch_size
        self.num_samples = num_samples
        self.num_features = num_features
        self.num_classes = num_classes
        self.seed = seed
        self.settings = LoaderSettings(
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            drop_last=drop_last,
            load_s=load_s,
        )

    def setup(self, stage: str) -> None:
        """Draw the pool."""
        generator = torch.Generator().manual_seed(self.seed)
        features = torch.randn(POOL_SIZE, self.num_features, generator=generator)
        labels = torch.randint(self.num_classes, (POOL_SIZE,), generator=generator).tolist()
        self.dataset = RepeatedPool(features, labels, num_samples=self.num_samples)

    def train_dataloader(self) -> DataLoader[Any]:
        """The shuffling loader."""
        return build_train_loader(self.dataset, batch_size=self.batch_size, settings=self.settings)
