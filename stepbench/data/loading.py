"""The one place where a built-in data module's training loader is made."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from time import sleep
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset

from stepbench.arguments import integer_problem, number_problem, raise_problems


class SizedDataset(Sized, Protocol):
    """A map-style data set whose length is known."""

    def __getitem__(self, index: int) -> Any:
        """Sample number `index`, 0 <= index < len(self)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """How samples are loaded; raises ValueError naming each argument that is out of range.

    `load_s` is slept once per sample, where the sample is loaded: it stands for a slow disk or decoder [s].
    """

    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    drop_last: bool
    load_s: float

    def __post_init__(self) -> None:
        raise_problems(
            integer_problem("num_workers", self.num_workers, minimum=0),
            number_problem("load_s", self.load_s, zero_allowed=True),
        )


class SlowDataset(Dataset[Any]):
    """`dataset`, with a sleep of `load_s` seconds before each sample."""

    def __init__(self, dataset: SizedDataset, *, load_s: float) -> None:
        self.dataset = dataset
        self.load_s = load_s

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sleep(self.load_s)
        return self.dataset[index]


def build_train_loader(dataset: SizedDataset, *, batch_size: int, settings: LoaderSettings) -> DataLoader[Any]:
    """Shuffling loader of batches of `batch_size` samples.

    With `drop_last` all batches are of equal size, but a data set smaller than one batch is still one batch.
    An empty data set gives an empty loader.
    """
    loaded: Any = SlowDataset(dataset, load_s=settings.load_s) if settings.load_s > 0 else dataset
    return DataLoader(
        loaded,
        batch_size=batch_size,
        # torch's random sampler refuses an empty data set.
        shuffle=len(dataset) > 0,
        num_workers=settings.num_workers,
        pin_memory=settings.pin_memory,
        # torch refuses persistent workers where there are none.
        persistent_workers=settings.persistent_workers and settings.num_workers > 0,
        drop_last=settings.drop_last and len(dataset) >= batch_size,
    )
