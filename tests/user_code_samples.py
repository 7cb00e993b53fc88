"""Modules and data of people who never heard of stepbench, each with its own way to behave or to fail."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset


class TinyModule(pl.LightningModule):
    """A linear layer. `at` calls something of `FAULTS` in that batch."""

    def __init__(self, fault: str | None = None, at: int = 7, sleep_s: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.fault = fault
        self.at = at
        self.sleep_s = sleep_s
        self.num_seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fault is not None and self.num_seen == self.at:
            FAULTS[self.fault]()
        self.num_seen += 1
        time.sleep(self.sleep_s)
        loss: torch.Tensor = self.layer(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class LoggingModule(TinyModule):
    """Logs its loss, as most do."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": 2 * loss})
        return loss


def raise_value_error() -> None:
    raise ValueError("planted: out of memory, says a ValueError")


def raise_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def allocate_too_much() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave_quietly() -> None:
    os._exit(0)


def exit_politely() -> None:
    sys.exit(0)


def end_itself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def raise_a_file_name() -> None:
    raise FileNotFoundError(f"no file {os.fsdecode(b'caf' + bytes([0xE9]) + b'.png')}")


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raise_something_silent() -> None:
    raise SilentError


def raise_at_length() -> None:
    raise ValueError("x" * 20_000)


def close_streams_and_raise() -> None:
    sys.stdout.close()
    sys.stderr.close()
    raise ValueError("planted")


def sleep_forever() -> None:
    time.sleep(3600)


def start_children_and_sleep() -> None:
    for _ in range(2):
        if os.fork() == 0:
            time.sleep(3600)
    time.sleep(3600)


FAULTS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        raise_value_error,
        raise_out_of_memory,
        allocate_too_much,
        kill_itself,
        leave_quietly,
        exit_politely,
        end_itself,
        interrupt_itself,
        raise_a_file_name,
        raise_something_silent,
        raise_at_length,
        close_streams_and_raise,
        sleep_forever,
        start_children_and_sleep,
    )
}


class OneRankModule(TinyModule):
    """Has its fault, or takes its time, in one of several ranks only; a fault before batch 0 comes as it is built."""

    def __init__(self, rank: int = 1, fault: str | None = None, at: int = 7, sleep_s: float = 0.0) -> None:
        is_this_rank = int(os.environ.get("LOCAL_RANK", 0)) == rank
        super().__init__(fault=fault if is_this_rank else None, at=at, sleep_s=sleep_s if is_this_rank else 0.0)
        if self.fault is not None and at < 0:
            FAULTS[self.fault]()


class CompilingModule(TinyModule):
    """Compiles a part of itself, with a compiler that needs no C++ and is done in a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.compile(self.layer, backend="aot_eager")  # type: ignore[assignment]


class TinyData(pl.LightningDataModule):
    def __init__(self, batch_size: int, num_items: int = 512, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_items = num_items
        self.num_workers = num_workers

    def train_dataloader(self) -> Any:
        dataset = TensorDataset(torch.ones(self.num_items, 4))
        return DataLoader(dataset, batch_size=self.batch_size, num_workers=self.num_workers)


def count_rows(batch: Any) -> int:
    return len(batch[0])


def count_opaque(batch: Any) -> int:
    return len(batch.values)


def count_in_words(batch: Any) -> str:
    return "sixteen"


NOT_A_FUNCTION = 3


class DeafData(TinyData):
    """Does not listen to `batch_size`."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=3, drop_last=True)


class AttributeData(pl.LightningDataModule):
    """Has its batch size as an attribute under another usual name."""

    train_batch_size = 8

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(256, 4)), batch_size=self.train_batch_size)


class ForeignLoader:
    """No loader of torch's, and deaf."""

    batch_size = 3

    def __iter__(self) -> Iterator[Any]:
        return iter([[torch.ones(3, 4)]] * 30)


class ForeignLoaderData(pl.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()

    def train_dataloader(self) -> Any:
        return ForeignLoader()


class LargerBatchData(TinyData):
    """Takes twice as many samples as asked for."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(256, 4)), batch_size=2 * self.batch_size)


class ListOfImagesData(TinyData):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(256, 4)), self.batch_size, collate_fn=ListBatch)


class ListBatch(list[torch.Tensor]):
    """A batch of images of different sizes: its first tensor is one sample, of three rows."""

    def __init__(self, samples: Any) -> None:
        super().__init__([torch.ones(3, 4), *(sample[0] for sample in samples)])


class TwoViewsData(TinyData):
    """Each sample comes twice."""

    def train_dataloader(self) -> Any:
        def twice(samples: Any) -> Any:
            return [torch.cat([torch.stack([sample[0] for sample in samples])] * 2)]

        return DataLoader(TensorDataset(torch.ones(256, 4)), self.batch_size, collate_fn=twice)


class OversamplingData(TinyData):
    """Draws full batches from fewer items than a batch holds."""

    def train_dataloader(self) -> Any:
        sampler = RandomSampler(range(5), replacement=True, num_samples=4096)
        return DataLoader(TensorDataset(torch.ones(5, 4)), self.batch_size, sampler=sampler)


def only_item(items: Any) -> Any:
    return items[0]


class BatchedItemsData(TinyData):
    """Its items are batches already, which the loader hands out one by one."""

    def train_dataloader(self) -> Any:
        dataset = TensorDataset(torch.ones(256, self.batch_size, 4))
        return DataLoader(dataset, batch_size=1, collate_fn=only_item)


class TwoLoadersData(TinyData):
    """A second loader takes three times as many samples."""

    def train_dataloader(self) -> Any:
        items = TensorDataset(torch.ones(512, 4))
        return [DataLoader(items, self.batch_size), DataLoader(items, 3 * self.batch_size)]


class FirstTensorModule(TinyModule):
    """Takes whatever tensor comes first."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        while not isinstance(batch, torch.Tensor):
            batch = batch[0]
        return super().training_step([batch], batch_idx)


class FailingItems(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        raise ValueError("planted in the data")


class FailingData(TinyData):
    def train_dataloader(self) -> Any:
        return DataLoader(FailingItems(torch.ones(256, 4)), self.batch_size, num_workers=self.num_workers)


class NothingButAnEnd(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(())


class EmptyStreamData(TinyData):
    def train_dataloader(self) -> Any:
        return DataLoader(NothingButAnEnd(), batch_size=self.batch_size)


class UncountableData(TinyData):
    """Batches whose structure does not tell how many samples they hold."""

    def train_dataloader(self) -> Any:
        def collate(samples: Any) -> Any:
            return Opaque(torch.stack([sample[0] for sample in samples]))

        return DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=self.batch_size, collate_fn=collate)


class Opaque:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values


class LeakyModule(TinyModule):
    """Changes everything that a process has only one of, and notes what it found."""

    def __init__(self) -> None:
        super().__init__()
        found = [torch.get_num_threads() == 1, torch.get_default_dtype() == torch.float64, "LEAKED" in os.environ]
        print("found", found)
        torch.set_num_threads(1)
        os.environ["LEAKED"] = "1"


def not_a_module(**kwargs: Any) -> object:
    return object()
