"""The 1,797 handwritten digits that come with scikit-learn: real data without a download."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from stepbench.arguments import choice_problem, integer_problem, raise_problems
from stepbench.data.loading import LoaderSettings, build_train_loader

# scikit-learn's pixels are whole numbers from 0 to 16.
MAX_PIXEL = 16


class Digits(pl.LightningDataModule):
    """Batches (images, labels): float32 (batch, channels, image_size, image_size) in 0..1, int64 (batch,).

    The originals are grey and 8 x 8 pixels; another `image_size` resizes them once, before training, and
    `channels=3` repeats the grey. Needs scikit-learn.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        channels: int = 1,
        image_size: int = 8,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        drop_last: bool = True,
        load_s: float = 0.0,
    ) -> None:
        raise_problems(
            integer_problem("batch_size", batch_size, minimum=1),
            choice_problem("channels", channels, accepted=(1, 3)),
            integer_problem("image_size", image_size, minimum=1),
        )
        super().__init__()
        self.batch_size = batch_size
        self.channels = channels
        self.image_size = image_size
        self.settings = LoaderSettings(
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            drop_last=drop_last,
            load_s=load_s,
        )

    def setup(self, stage: str) -> None:
        """Read the digits; raises ImportError where scikit-learn is missing."""
        images, labels = _read_digits()
        if self.image_size != images.shape[-1]:
            images = F.interpolate(images, size=(self.image_size, self.image_size), mode="bilinear")
        self.dataset = DigitsDataset(images.expand(-1, self.channels, -1, -1), labels)

    def train_dataloader(self) -> DataLoader[Any]:
        """The shuffling loader."""
        return build_train_loader(self.dataset, batch_size=self.batch_size, settings=self.settings)


class DigitsDataset(Dataset[Any]):
    """Pairs (image, label): float32 (channels, image_size, image_size) in 0..1, and 0..9."""

    def __init__(self, images: torch.Tensor, labels: list[int]) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], self.labels[index]


def _read_digits() -> tuple[torch.Tensor, list[int]]:
    """Images float32 (1797, 1, 8, 8) in 0..1 and their labels 0..9."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("data=digits needs scikit-learn; install it with: pip install 'stepbench[digits]'") from error
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / MAX_PIXEL
    return images, digits.target.tolist()
