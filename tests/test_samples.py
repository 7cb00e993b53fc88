"""Counting the samples of any batch: right, or unknown."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from stepbench.samples import MAX_LOOKS, SampleCounter, flatten_loaders, own_batch_size

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Annotated:
    image: Any
    label: Any


class GraphBatch:
    """As PyG's: the nodes of all graphs in one tensor."""

    num_graphs = 6
    x = torch.ones(100, 3)


class SizedBatch:
    """As DGL's and TensorDict's."""

    def __init__(self, batch_size: Any) -> None:
        self.batch_size = batch_size


class LikeAMapping(dict):  # type: ignore[type-arg]
    pass


def count(batch: Any, loader_batch_size: int | None = None) -> int | None:
    counter = SampleCounter()
    counter.expect(loader_batch_size)
    return counter.count(batch)


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        ((torch.ones(5, 2), torch.ones(5)), 5),
        ([torch.ones(5, 2), torch.ones(5)], 5),
        ({"mask": None, "image": torch.ones(7, 3), "label": torch.ones(7)}, 7),
        (LikeAMapping(input_ids=torch.ones(4, 9), labels=torch.ones(4)), 4),
        ([[], {"deep": (torch.ones(2, 2), torch.ones(2))}], 2),
        (Pair(torch.ones(4, 8), torch.ones(4)), 4),
        (Annotated(torch.ones(4, 8), torch.ones(4)), 4),
        (GraphBatch(), 6),
        ({"graph": GraphBatch(), "extra": torch.ones(50)}, 6),
        (SizedBatch(12), 12),
        (SizedBatch(torch.Size([9, 2])), 9),
        (pack_sequence([torch.ones(3), torch.ones(2), torch.ones(1)]), 3),
        ((torch.ones(4, 3), torch.ones(4), torch.tensor(1.0), "text", None), 4),
    ],
)
def test_without_a_loader_s_word_the_batch_speaks_for_itself(batch: Any, number: int) -> None:
    assert count(batch) == number


@pytest.mark.parametrize(
    "batch",
    [
        torch.tensor(1.0),
        torch.ones(3, 2),  # one sample, or three?
        {"image": torch.ones(3, 224, 224)},
        {"tokens": torch.ones(512), "labels": torch.ones(512)},
        "text",
        None,
        [],
        {},
        [torch.ones(3, 8, 8)] * 16,  # sixteen images, not three samples
        (torch.ones(16, 3), torch.ones(2, 40)),  # features and edges, say: which is it?
        [torch.ones(3, 8, 8), torch.ones(3, 9, 9)],  # variable sizes: channels agree, but are no samples
        ["one", "two"],
        SizedBatch(True),
    ],
)
def test_where_nothing_is_proof_the_number_is_unknown(batch: Any) -> None:
    assert count(batch) is None


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        ([torch.ones(3, 8, 8)] * 16, 16),
        ((tuple(torch.ones(3, 8, 8) for _ in range(16)), tuple({"boxes": torch.ones(2, 4)} for _ in range(16))), 16),
        ([torch.ones(16, 3, 8, 8), torch.ones(16, 3, 8, 8)], 16),  # two views
        ((torch.ones(40, 16), torch.ones(16)), 16),  # sequences along the first dimension
        ((torch.ones(2, 90), torch.ones(16)), 16),
        (["text"] * 16, 16),
        (GraphBatch(), None),  # not what the loader says
        ((SizedBatch(64), torch.ones(16)), 16),  # not its number of samples
        (torch.ones(16, 3), 16),
        (torch.ones(40, 16), None),
        (torch.ones(3, 8, 8), None),
        ((torch.ones(5, 2), torch.ones(5)), 5),  # a data set smaller than a batch
        ((torch.ones(32, 2), torch.ones(32)), None),  # more than the loader gives
    ],
)
def test_the_loader_s_batch_size_is_looked_for_in_the_batch(batch: Any, number: int | None) -> None:
    assert count(batch, 16) == number


def test_a_list_of_one_is_no_proof_of_one_sample() -> None:
    assert count([torch.ones(16, 4)], 1) is None
    assert count([torch.ones(1, 4)], 1) == 1


def test_the_place_found_in_a_full_batch_counts_the_ragged_one() -> None:
    counter = SampleCounter()
    counter.expect(16)
    assert counter.count([torch.ones(3, 8, 8)] * 16) == 16
    assert counter.count([torch.ones(3, 8, 8)] * 7) == 7
    assert counter.count([torch.ones(3, 8, 8)] * 3) == 3
    assert counter.count([torch.ones(3, 8, 8)] * 17) is None  # more than the loader gives


def test_places_that_agree_by_accident_are_found_out() -> None:
    images = [torch.ones(3, 8, 8)] * 3  # three images of three channels
    counter = SampleCounter()
    counter.expect(3)
    assert counter.count(images) == 3
    assert counter.count(images[:2]) is None
    time_major = SampleCounter()
    time_major.expect(8)
    assert [time_major.count(torch.ones(length, 8)) for length in (8, 12)] == [8, None]


def test_a_loader_of_another_batch_size_is_looked_at_anew() -> None:
    counter = SampleCounter()
    counter.expect(4)
    assert counter.count((torch.ones(20, 4), torch.ones(4))) == 4
    counter.expect(20)
    assert counter.count((torch.ones(20, 4), torch.ones(4))) == 20


def test_batches_that_tell_nothing_are_not_looked_into_for_ever() -> None:
    counter = SampleCounter()
    counter.expect(4)
    assert [counter.count(torch.ones(9)) for _ in range(MAX_LOOKS)] == [None] * MAX_LOOKS
    assert counter.count(torch.ones(4)) is None
    counter.expect(4)  # as another epoch begins
    assert counter.count(torch.ones(4)) == 4


class Hostile:
    @property
    def batch_size(self) -> int:
        raise RuntimeError("not now")


def endless() -> dict[str, object]:
    batch: dict[str, object] = {}
    batch["self"] = batch
    return batch


@pytest.mark.parametrize(
    "batch",
    [
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        Hostile(),
        (Hostile(), torch.ones(4)),
        endless(),
        [list(range(100_000))],
    ],
)
def test_no_batch_however_odd_fails_to_be_counted(batch: object) -> None:
    assert count(batch, 4) is None
    assert count(batch) is None


def test_batches_that_change_their_structure_are_each_counted() -> None:
    counter = SampleCounter()
    counter.expect(4)
    assert counter.count({"a": torch.ones(4, 2)}) == 4
    assert counter.count(None) is None
    assert counter.count((torch.ones(4), torch.ones(4))) == 4
    assert counter.count({"a": torch.ones(2, 2)}) is None  # the place of the last one is not there
    assert counter.count((torch.ones(3), torch.ones(3))) == 3


def test_the_user_s_function_has_the_last_word() -> None:
    assert SampleCounter(lambda batch: len(batch) // 2).count(torch.ones(8)) == 4
    assert SampleCounter(lambda batch: torch.tensor(5)).count(None) == 5
    assert SampleCounter(lambda batch: None).count(torch.ones(8)) is None


@pytest.mark.parametrize("answer", ["8", 2.5, -1, True, [8]])
def test_a_function_that_returns_no_number_of_samples_is_refused(answer: Any) -> None:
    with pytest.raises(TypeError, match=r"batch_size_fn must return a whole number"):
        SampleCounter(lambda batch: answer).count(torch.ones(8))


def test_loaders_are_found_in_whatever_holds_them_and_asked_for_their_batch_size() -> None:
    long, short = (DataLoader(TensorDataset(torch.ones(32)), batch_size=size) for size in (8, 4))
    assert flatten_loaders(long) == [long]
    assert flatten_loaders({"a": short, "b": [long, {"c": short}]}) == [short, long, short]
    assert flatten_loaders(None) == flatten_loaders([]) == []
    assert own_batch_size(long) == 8
    assert own_batch_size(iter(())) is None
    assert own_batch_size(Hostile()) is None
    by_sampler = DataLoader(
        TensorDataset(torch.ones(32)), batch_sampler=torch.utils.data.BatchSampler(range(32), 6, drop_last=False)
    )
    assert own_batch_size(by_sampler) == 6
