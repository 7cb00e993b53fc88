"""Gauges upstream, and the level downstream that they foretell."""

import dataclasses

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset


@dataclasses.dataclass
class LoaderOptions:
    """How the readings are loaded."""

    batch_size: int = 8
    num_workers: int = 0
    pin_memory: bool = False


class Readings(Dataset):
    """A window of readings per gauge, as many windows as there are hours; some gauges are silent."""

    def __init__(self, hours: int, window: int, gauges: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.levels = torch.randn(hours + window, gauges, generator=generator).cumsum(0) / 10
        self.window = window

    def __len__(self) -> int:
        return len(self.levels) - self.window

    def __getitem__(self, hour: int) -> dict:
        window = self.levels[hour : hour + self.window]
        return {
            "upstream": {"levels": window, "silent": window.abs() > 1.5},
            "target": self.levels[hour + self.window, 0],
            "name": f"hour {hour}",
            "gauges": list(range(hour % 3)),
        }


def collate(samples: list) -> dict:
    """A batch as this project has it: tensors, a list of names, and lists of different lengths."""
    return {
        "upstream": {
            "levels": torch.stack([sample["upstream"]["levels"] for sample in samples]),
            "silent": torch.stack([sample["upstream"]["silent"] for sample in samples]),
        },
        "target": torch.stack([sample["target"] for sample in samples]),
        "names": [sample["name"] for sample in samples],
        "gauges": [torch.tensor(sample["gauges"]) for sample in samples],
    }


def count(batch: dict) -> int:
    """How many windows a batch has."""
    return len(batch["target"])


class RiverData(pl.LightningDataModule):
    """Readings of the last hours; `loader` holds what loaders take."""

    def __init__(self, loader: LoaderOptions, hours: int = 2000, window: int = 24, gauges: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loader = loader

    def setup(self, stage: str) -> None:
        self.readings = Readings(self.hparams.hours, self.hparams.window, self.hparams.gauges)

    def train_dataloader(self) -> DataLoader:
        options = self.loader
        return DataLoader(
            self.readings,
            batch_size=options.batch_size,
            num_workers=options.num_workers,
            pin_memory=options.pin_memory,
            shuffle=True,
            collate_fn=collate,
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.readings, batch_size=4, collate_fn=collate)


def make_river_data(batch_size: int, num_workers: int = 0, **options: int) -> RiverData:
    """The same for callers that know nothing of `LoaderOptions`."""
    return RiverData(LoaderOptions(batch_size=batch_size, num_workers=num_workers), **options)


class Blocks(IterableDataset):
    """Whole batches of successive hours: the loader has nothing to gather."""

    def __init__(self, readings: Readings, rows: int, blocks: int) -> None:
        self.readings, self.rows, self.blocks = readings, rows, blocks

    def __iter__(self):
        for block in range(self.blocks):
            yield collate([self.readings[block + row] for row in range(self.rows)])


class BlockData(pl.LightningDataModule):
    """Readings in blocks of `rows` windows."""

    def __init__(self, rows: int, blocks: int = 200) -> None:
        super().__init__()
        self.dataset = Blocks(Readings(rows + blocks, 24, 6), rows, blocks)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, batch_size=None)
