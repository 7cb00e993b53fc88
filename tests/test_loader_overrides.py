"""Bringing the settings of a loader to anybody's modules and loaders."""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import gc
import importlib
import itertools
import pickle
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs, _update_dataloader
from omegaconf import OmegaConf
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from stepbench.loader_arguments import LoaderSettings
from stepbench.loader_overrides import LoaderOverrides, override_loaders

PACKAGES = [importlib.import_module(name) for name in ("lightning.pytorch", "pytorch_lightning")]
PACKAGE = PACKAGES[0]

BATCH_SIZE_REBUILT = ["batch_size: rebuilt loader"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def numbers(count: int = 24) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def batches(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


def seeded(loader: Any, seed: int = 3) -> list[list[int]]:
    torch.manual_seed(seed)
    return batches(loader)


def override(loaders: Any, **wanted: Any) -> Any:
    return override_loaders(loaders, LoaderSettings(**wanted))[0]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter([(torch.tensor(n),) for n in range(start, 12, step)])


class PairSampler:
    """A batch sampler of no base class."""

    drop_last = False

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool = False) -> None:
        self.sampler, self.batch_size = sampler, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.batch_size:
                yield batch
                batch = []

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size


class ReadyMade(BatchSampler):
    """A batch sampler that makes its batches when it is made."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.made = [list(batch) for batch in BatchSampler(sampler, batch_size, drop_last)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.made)


class Forever:
    """A batch sampler that repeats another one, as in ultralytics and timm."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from iter(self.sampler)


class EndlessLoader(DataLoader):  # type: ignore[type-arg]
    """One that keeps its own iterator, so that its workers never end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Forever(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class GraphLoader(DataLoader):  # type: ignore[type-arg]
    """As PyG's: arguments of its own, some of which leave no attribute."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        follow: Any = None,
        scale: int = 1,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("collate_fn", None)
        self.follow = follow
        super().__init__(dataset, batch_size, shuffle, collate_fn=self.collate, **kwargs)
        self.factor = scale

    def collate(self, items: list[Any]) -> Any:
        return [torch.stack([item[0] for item in items]) * self.factor]


class FixedLoader(DataLoader):  # type: ignore[type-arg]
    """Says all but the dataset itself."""

    def __init__(self, dataset: Any, sampler: Any = None, shuffle: bool = False, batch_sampler: Any = None) -> None:
        super().__init__(dataset, 4, shuffle, sampler, num_workers=1, persistent_workers=True)


# ---- one loader ----


def test_what_is_as_wanted_is_returned_itself() -> None:
    loader = DataLoader(numbers(), batch_size=4)
    wanted = LoaderSettings(batch_size=4, num_workers=0, pin_memory=False, persistent_workers=False)
    assert override_loaders(loader, wanted) == (loader, [])
    assert override_loaders(loader, LoaderSettings()) == (loader, [])
    assert override_loaders(loader, LoaderSettings(persistent_workers=True)) == (loader, [])


def test_batch_size_of_a_shuffled_loader() -> None:
    dataset = numbers()
    loader = DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True, worker_init_fn=print)
    rebuilt, notes = override_loaders(loader, LoaderSettings(batch_size=5))
    assert notes == BATCH_SIZE_REBUILT
    assert type(rebuilt) is DataLoader and rebuilt is not loader
    assert (loader.batch_size, rebuilt.batch_size, rebuilt.drop_last, len(rebuilt)) == (4, 5, True, 4)
    for name in ("dataset", "sampler", "collate_fn", "worker_init_fn", "generator"):
        assert getattr(rebuilt, name) is getattr(loader, name)
    assert rebuilt.batch_sampler.sampler is loader.sampler
    direct = DataLoader(dataset, batch_size=5, shuffle=True, drop_last=True)
    assert seeded(rebuilt) == seeded(direct)
    assert [len(batch) for batch in batches(loader)] == [4] * 6
    with pytest.raises(ValueError, match="should not be set"):
        rebuilt.batch_size = 3


def test_own_generator_gives_the_same_order() -> None:
    loaders = [
        DataLoader(numbers(), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(1))
        for size in (4, 7)
    ]
    assert batches(override(loaders[0], batch_size=7)) == batches(loaders[1])


def test_workers_come_and_really_load() -> None:
    loader = DataLoader(numbers(), batch_size=4, shuffle=True)
    wanted = LoaderSettings(batch_size=6, num_workers=2, persistent_workers=True)
    rebuilt, notes = override_loaders(loader, wanted)
    assert notes == [f"{name}: rebuilt loader" for name in ("batch_size", "num_workers", "persistent_workers")]
    assert (rebuilt.num_workers, rebuilt.prefetch_factor, rebuilt.persistent_workers) == (2, 2, True)
    assert seeded(rebuilt) == seeded(DataLoader(numbers(), batch_size=6, shuffle=True))
    assert rebuilt._iterator is not None and loader._iterator is None
    assert sorted(itertools.chain(*batches(rebuilt))) == list(range(24))
    again = override(rebuilt, num_workers=1)
    assert again._iterator is None and again.prefetch_factor == 2
    rebuilt._iterator._shutdown_workers()


def test_workers_go_with_all_that_needs_them() -> None:
    loader = DataLoader(
        numbers(),
        batch_size=4,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=5,
        multiprocessing_context="spawn",
    )
    rebuilt, notes = override_loaders(loader, LoaderSettings(num_workers=0, persistent_workers=True))
    assert notes == ["num_workers: rebuilt loader"]
    assert (rebuilt.num_workers, rebuilt.prefetch_factor, rebuilt.persistent_workers) == (0, None, False)
    assert rebuilt.multiprocessing_context is None and loader.multiprocessing_context is not None
    assert rebuilt.timeout == 0
    assert [len(batch) for batch in batches(rebuilt)] == [4] * 6
    more = override(loader, num_workers=3)
    assert (more.num_workers, more.prefetch_factor, more.persistent_workers, more.timeout) == (3, 3, True, 5)
    assert more.multiprocessing_context is loader.multiprocessing_context


def test_pinned_memory() -> None:
    loader = DataLoader(numbers(), batch_size=4)
    rebuilt, notes = override_loaders(loader, LoaderSettings(pin_memory=True))
    assert notes == ["pin_memory: rebuilt loader"]
    assert rebuilt.pin_memory and not loader.pin_memory
    assert not override(rebuilt, pin_memory=False).pin_memory


def test_weighted_sampler_is_kept() -> None:
    sampler = WeightedRandomSampler([1.0] * 12 + [0.0] * 12, 20)
    loader = DataLoader(numbers(), batch_size=4, sampler=sampler)
    rebuilt = override(loader, batch_size=8)
    assert rebuilt.sampler is sampler
    assert seeded(rebuilt) == seeded(DataLoader(numbers(), batch_size=8, sampler=sampler))
    assert max(itertools.chain(*batches(rebuilt))) < 12


def test_iterable_dataset() -> None:
    loader = DataLoader(Stream(), batch_size=4)
    rebuilt = override(loader, batch_size=3, num_workers=2)
    assert batches(rebuilt) == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert batches(override(loader, batch_size=5)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


def test_whole_batches_of_the_dataset_are_left_alone() -> None:
    loader = DataLoader(numbers(), batch_size=None)
    assert override_loaders(loader, LoaderSettings(batch_size=8)) == (loader, [])
    rebuilt, notes = override_loaders(loader, LoaderSettings(batch_size=8, num_workers=1))
    assert notes == ["num_workers: rebuilt loader"] and rebuilt.batch_size is None


def test_sampler_of_whole_batches() -> None:
    loader = DataLoader(numbers(), batch_size=None, sampler=BatchSampler(SequentialSampler(range(24)), 4, False))
    rebuilt, notes = override_loaders(loader, LoaderSettings(batch_size=12))
    assert notes == BATCH_SIZE_REBUILT
    assert [len(batch) for batch in batches(rebuilt)] == [12, 12]


def test_batch_sampler_of_torch() -> None:
    sampler = RandomSampler(range(24))
    loader = DataLoader(numbers(), batch_sampler=BatchSampler(sampler, 4, True))
    rebuilt = override(loader, batch_size=7)
    assert (rebuilt.batch_size, rebuilt.batch_sampler.batch_size, rebuilt.batch_sampler.drop_last) == (None, 7, True)
    assert rebuilt.batch_sampler.sampler is sampler
    assert [len(batch) for batch in batches(rebuilt)] == [7, 7, 7]
    assert loader.batch_sampler.batch_size == 4


def test_custom_batch_sampler_is_copied() -> None:
    own = PairSampler(SequentialSampler(range(24)), 4)
    rebuilt, notes = override_loaders(DataLoader(numbers(), batch_sampler=own), LoaderSettings(batch_size=8))
    assert notes == BATCH_SIZE_REBUILT
    assert type(rebuilt.batch_sampler) is PairSampler and own.batch_size == 4
    assert rebuilt.batch_sampler.sampler is own.sampler
    assert [len(batch) for batch in batches(rebuilt)] == [8, 8, 8]


def test_batch_sampler_that_cannot_be_changed() -> None:
    class ReadOnly(PairSampler):
        batch_size = property(lambda self: 4, lambda self, value: None)  # type: ignore[assignment]

    class Uncopied(PairSampler):
        def __copy__(self) -> Any:
            raise RuntimeError("no copies")

    for sampler in (ReadOnly(range(24), 4), Uncopied(range(24), 4), [[0, 1], [2, 3]], Forever(range(24))):
        loader = DataLoader(numbers(), batch_sampler=sampler)  # type: ignore[arg-type]
        assert override_loaders(loader, LoaderSettings(batch_size=8)) == (loader, [])
        assert override(loader, batch_size=8, pin_memory=True).batch_sampler is sampler


def test_batches_made_beforehand() -> None:
    loader = DataLoader(numbers(), batch_sampler=ReadyMade(range(24), 4))
    assert override_loaders(loader, LoaderSettings(batch_size=8)) == (loader, [])
    with in_a_hook():
        loader = DataLoader(numbers(), batch_sampler=ReadyMade(range(24), 4))
        rebuilt = override(loader, batch_size=8)
    assert [len(batch) for batch in batches(rebuilt)] == [8, 8, 8]
    again = _update_dataloader(rebuilt, SequentialSampler(range(16)))
    assert [len(batch) for batch in batches(again)] == [8, 8]


def test_batch_sampler_around_another_one() -> None:
    class Sharded:
        def __init__(self, batch_sampler: Any) -> None:
            self.batch_sampler = batch_sampler

        @property
        def batch_size(self) -> int:
            return int(self.batch_sampler.batch_size)

        def __iter__(self) -> Any:
            return iter(self.batch_sampler)

    inner = BatchSampler(SequentialSampler(range(24)), 4, False)
    rebuilt = override(DataLoader(numbers(), batch_sampler=Sharded(inner)), batch_size=8)  # type: ignore[arg-type]
    assert [len(batch) for batch in batches(rebuilt)] == [8, 8, 8]
    assert inner.batch_size == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_with_an_iterator_of_its_own(num_workers: int) -> None:
    loader = EndlessLoader(numbers(), batch_size=4, num_workers=num_workers)
    rebuilt, notes = override_loaders(loader, LoaderSettings(batch_size=8))
    assert notes == BATCH_SIZE_REBUILT and type(rebuilt) is EndlessLoader
    for _ in range(2):
        assert [len(batch) for batch in batches(rebuilt)] == [8, 8, 8]
    assert [len(batch) for batch in batches(loader)] == [4] * 6
    del loader, rebuilt
    gc.collect()


def test_subclass_with_arguments_of_its_own() -> None:
    loader = GraphLoader(numbers(), 4, True, follow=["x"], scale=2)
    rebuilt = override(loader, batch_size=8, num_workers=1)
    assert type(rebuilt) is GraphLoader and rebuilt.follow == ["x"]
    assert rebuilt.collate_fn.__self__ is rebuilt and loader.collate_fn.__self__ is loader
    expected = GraphLoader(numbers(), 8, True, scale=2)
    assert seeded(rebuilt) == seeded(expected)


def test_loader_that_forbids_it_is_left_alone() -> None:
    class Stubborn(DataLoader):  # type: ignore[type-arg]
        num_workers = property(lambda self: 0, lambda self, value: None)  # type: ignore[assignment]

    class Uncopied(DataLoader):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise RuntimeError("no copies")

    class Broken(DataLoader):  # type: ignore[type-arg]
        pin_memory = property(lambda self: 1 / 0, lambda self, value: None)  # type: ignore[assignment]

    for kind in (Stubborn, Uncopied, Broken):
        loader = kind(numbers(), batch_size=4)
        assert override_loaders(loader, LoaderSettings(num_workers=2, pin_memory=True)) == (loader, [])


@pytest.mark.parametrize("loader", [None, [], {}, range(4), object(), "text", [[1, 2], [3]]])
def test_what_is_no_loader_is_left_alone(loader: Any) -> None:
    wanted = LoaderSettings(batch_size=8, num_workers=2, pin_memory=True, persistent_workers=True)
    assert override_loaders(loader, wanted) == (loader, [])


# ---- several loaders ----


class Pair(NamedTuple):
    first: Any
    second: Any


def sized(*sizes: int | None) -> list[Any]:
    return [DataLoader(numbers(), batch_size=size) for size in sizes]


def test_containers_keep_their_kind() -> None:
    a, b = sized(4, 4)
    named = override({"a": a, "b": [b]}, batch_size=8)
    assert named["a"].batch_size == named["b"][0].batch_size == 8
    assert a.batch_size == 4
    pair = override(Pair(a, (b,)), batch_size=8)
    assert type(pair) is Pair and type(pair.second) is tuple and pair.second[0].batch_size == 8
    ordered = override(collections.OrderedDict(a=a), batch_size=8)
    assert type(ordered) is collections.OrderedDict and ordered["a"].batch_size == 8
    queue = override(collections.deque([a], maxlen=3), batch_size=8)
    assert type(queue) is collections.deque and queue.maxlen == 3 and queue[0].batch_size == 8


def test_a_container_is_itself_where_nothing_changes() -> None:
    loaders = {"a": sized(8), "b": tuple(sized(8))}
    assert override(loaders, batch_size=8, num_workers=0) is loaders


def test_one_loader_twice_stays_one() -> None:
    (loader,) = sized(4)
    first, second = override([loader, loader], batch_size=8)
    assert first is second and first.batch_size == 8


@pytest.mark.parametrize(
    ("sizes", "expected", "num_notes"),
    [
        ((4, 4), (8, 8), 1),
        ((4, 8), (4, 8), 0),
        ((4, 5), (4, 5), 0),
        ((4, None), (8, None), 1),
        ((8, 8), (8, 8), 0),
        ((None, None), (None, None), 0),
    ],
)
def test_batch_sizes_of_several(sizes: Any, expected: Any, num_notes: int) -> None:
    loaders, notes = override_loaders(sized(*sizes), LoaderSettings(batch_size=8))
    assert tuple(loader.batch_size for loader in loaders) == expected
    assert len(notes) == num_notes


def test_other_settings_are_changed_where_batch_sizes_are_not() -> None:
    loaders, notes = override_loaders(sized(4, 5), LoaderSettings(batch_size=8, num_workers=1))
    assert [(loader.batch_size, loader.num_workers) for loader in loaders] == [(4, 1), (5, 1)]
    assert notes == ["num_workers: rebuilt loader"]


def test_one_that_cannot_be_changed_keeps_the_batch_size_of_all() -> None:
    fixed = types.SimpleNamespace(batch_size=4)
    (loader,) = sized(4)
    loaders = [loader, fixed]
    assert override_loaders(loaders, LoaderSettings(batch_size=8)) == (loaders, [])
    rebuilt = override(loaders, batch_size=8, pin_memory=True)
    assert (rebuilt[0].batch_size, rebuilt[0].pin_memory, rebuilt[1]) == (4, True, fixed)


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_combined_loader(name: str) -> None:
    kind = importlib.import_module(f"{name}.utilities.combined_loader").CombinedLoader
    combined = kind({"a": sized(4)[0], "b": sized(4)}, "max_size_cycle")
    combined.limits = 2
    rebuilt = override(combined, batch_size=8)
    assert type(rebuilt) is kind and rebuilt is not combined
    assert rebuilt.iterables["b"][0].batch_size == rebuilt.flattened[0].batch_size == 8
    assert combined.iterables["a"].batch_size == 4
    batch, _, _ = next(iter(rebuilt))
    assert len(batch["a"][0]) == len(batch["b"][0][0]) == 8
    assert len(rebuilt) == 2
    assert override(combined, batch_size=4) is combined


# ---- Lightning makes loaders anew ----


@pytest.fixture(params=[False, True], ids=["outside", "in a hook"])
def maker(request: pytest.FixtureRequest) -> Any:
    """Makes a loader and overrides it, within the context in which Lightning calls `train_dataloader`, or outside."""

    def make(kind: Any, *args: Any, wanted: LoaderSettings, **kwargs: Any) -> tuple[Any, Any]:
        if request.param:
            with in_a_hook():
                loader = kind(*args, **kwargs)
                return loader, override_loaders(loader, wanted)[0]
        loader = kind(*args, **kwargs)
        return loader, override_loaders(loader, wanted)[0]

    return make


class in_a_hook:  # noqa: N801
    def __enter__(self) -> None:
        self.contexts = [_replace_dunder_methods(DataLoader, "dataset"), _replace_dunder_methods(BatchSampler)]
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(None, None, None)


def distributed(dataset: Any) -> DistributedSampler[Any]:
    return DistributedSampler(dataset, num_replicas=2, rank=1, shuffle=False)


ALL = LoaderSettings(batch_size=6, num_workers=2, pin_memory=True, persistent_workers=True)


def test_plain_loader_made_anew(maker: Any) -> None:
    dataset = numbers()
    loader, rebuilt = maker(DataLoader, dataset, batch_size=4, shuffle=True, drop_last=True, wanted=ALL)
    sampler = distributed(dataset)
    for _ in range(2):
        _, kwargs = _get_dataloader_init_args_and_kwargs(rebuilt, sampler)
        assert (kwargs["batch_size"], kwargs["num_workers"], kwargs["pin_memory"]) == (6, 2, True)
        again = _update_dataloader(rebuilt, sampler)
        assert (again.batch_size, again.num_workers, again.pin_memory, again.persistent_workers) == (6, 2, True, True)
        assert (again.sampler, again.drop_last, again.prefetch_factor) == (sampler, True, 2)
        assert batches(override(again, num_workers=0)) == [[1, 3, 5, 7, 9, 11], [13, 15, 17, 19, 21, 23]]
    assert _update_dataloader(loader, sampler).batch_size == 4


def test_positional_arguments_made_anew() -> None:
    with in_a_hook():
        rebuilt = override(DataLoader(numbers(), 4), batch_size=6)
    args, kwargs = _get_dataloader_init_args_and_kwargs(rebuilt, SequentialSampler(range(24)))
    assert args[1:] == (6,) and "batch_size" not in kwargs
    assert _update_dataloader(rebuilt, SequentialSampler(range(24))).batch_size == 6


def test_loader_without_workers_made_anew(maker: Any) -> None:
    kwargs = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True, "timeout": 9}
    kwargs["multiprocessing_context"] = "spawn"
    _, rebuilt = maker(DataLoader, numbers(), batch_size=4, wanted=LoaderSettings(num_workers=0), **kwargs)
    again = _update_dataloader(rebuilt, distributed(rebuilt.dataset))
    assert (again.batch_size, again.num_workers, again.prefetch_factor, again.timeout) == (4, 0, None, 0)
    assert again.multiprocessing_context is None
    assert [len(batch) for batch in batches(again)] == [4, 4, 4]


def test_subclass_made_anew() -> None:
    with in_a_hook():
        loader = GraphLoader(numbers(), batch_size=4, scale=3)
        rebuilt = override(loader, batch_size=6, num_workers=1)
    again = _update_dataloader(rebuilt, distributed(rebuilt.dataset))
    assert type(again) is GraphLoader and (again.batch_size, again.num_workers) == (6, 1)
    assert batches(again)[0] == [3, 9, 15, 21, 27, 33]
    assert _update_dataloader(loader, distributed(loader.dataset)).batch_size == 4


def test_subclass_that_takes_no_such_argument_made_anew() -> None:
    with in_a_hook():
        rebuilt = override(FixedLoader(numbers()), batch_size=6, num_workers=0)
    again = _update_dataloader(rebuilt, distributed(rebuilt.dataset))
    assert (again.batch_size, again.num_workers, again.persistent_workers) == (6, 0, False)
    assert [len(batch) for batch in batches(again)] == [6, 6]


def test_batch_sampler_made_anew(maker: Any) -> None:
    own = PairSampler(SequentialSampler(range(24)), 4)
    _, rebuilt = maker(DataLoader, numbers(), batch_sampler=own, wanted=LoaderSettings(batch_size=6))
    again = _update_dataloader(rebuilt, distributed(rebuilt.dataset))
    assert type(again.batch_sampler) is PairSampler
    assert [len(batch) for batch in batches(again)] == [6, 6]


def test_iterable_dataset_made_anew(maker: Any) -> None:
    _, rebuilt = maker(DataLoader, Stream(), batch_size=4, wanted=LoaderSettings(batch_size=6))
    again = _update_dataloader(rebuilt, None)  # type: ignore[arg-type]
    assert [len(batch) for batch in batches(again)] == [6, 6]


# ---- attributes ----


class Data(PACKAGE.LightningDataModule):  # type: ignore[name-defined,misc]
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)

    def train_dataloader(self) -> Any:
        return DataLoader(numbers(), batch_size=4)


class Net(PACKAGE.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


@dataclass(frozen=True, slots=True)
class FrozenConfig:
    batch_size: int = 4


@dataclass
class Config:
    loader: FrozenConfig = field(default_factory=FrozenConfig)
    lr: float = 0.1


def attached(
    model: Any, datamodule: Any = None, placed: dict[str, str] | None = None, **wanted: Any
) -> LoaderOverrides:
    overrides = LoaderOverrides(LoaderSettings(**(wanted or {"batch_size": 8})), placed or {})
    overrides.attach(model, datamodule)
    return overrides


@pytest.mark.parametrize(
    ("attributes", "path"),
    [
        ({"batch_size": 4}, "batch_size"),
        ({"_batch_size": 4}, "_batch_size"),
        ({"cfg": {"loader": {"batch_size": 4}}}, "cfg.loader.batch_size"),
        ({"cfg": {"a": {"b": {"batch_size": 4}}}}, "cfg.a.b.batch_size"),
        ({"loaders": [{"bs": 4}]}, "loaders.0.bs"),
        ({"args": argparse.Namespace(train_batch_size=4, batch_size=2)}, "args.train_batch_size"),
        ({"args": types.SimpleNamespace(data=argparse.Namespace(bs=4))}, "args.data.bs"),
        ({"cfg": Config()}, "cfg.loader.batch_size"),
        ({"train_cfg": {"batch_size": 4}, "val_cfg": {"batch_size": 2}}, "train_cfg.batch_size"),
        ({"cfg": OmegaConf.create({"loader": {"batch_size": 4}, "lr": "???"})}, "cfg.loader.batch_size"),
        ({"cfg": OmegaConf.create({"bs": 4, "loader": {"batch_size": "${bs}"}})}, "cfg.loader.batch_size"),
        ({"cfg": OmegaConf.structured(Config)}, "cfg.loader.batch_size"),
        ({"cfg": OmegaConf.create({"all": [{"batch_size": 4}]})}, "cfg.all.0.batch_size"),
        ({"cfg": {"here": OmegaConf.create({"batch_size": 4})}}, "cfg.here.batch_size"),
    ],
)
def test_an_attribute_is_set_where_it_is(attributes: dict[str, Any], path: str) -> None:
    for model, datamodule in ((Net(), Data(**copy.deepcopy(attributes))), (Net(**copy.deepcopy(attributes)), None)):
        owner = model if datamodule is None else datamodule
        overrides = attached(model, datamodule)
        assert overrides.placed == {"batch_size": f"attribute {path} of {type(owner).__name__}"}
        value: Any = owner
        for part in path.split("."):
            value = part_of(value, part)
        assert value == 8


def part_of(value: Any, name: str) -> Any:
    if isinstance(value, (list, dict)):
        return value[int(name) if name.isdigit() else name]
    return value[int(name)] if name.isdigit() else getattr(value, name)


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"batch_size": None},
        {"batch_size": "4"},
        {"batch_size": True},
        {"val_batch_size": 4},
        {"batch_size": torch.tensor(4)},
        {"a": {"batch_size": 4}, "b": {"batch_size": 4}},
        {"a": {"b": {"c": {"d": {"batch_size": 4}}}}},
        {"index": {f"key{n}": n for n in range(5000)} | {"batch_size": 4}},
        {"part": torch.nn.Linear(1, 1)},
        {"sampler": PairSampler(range(4), 2)},
    ],
)
def test_what_is_no_attribute_for_it_stays(attributes: dict[str, Any]) -> None:
    before = repr(attributes)
    datamodule = Data(**attributes)
    assert attached(Net(), datamodule).placed == {}
    assert repr(attributes) == before


def test_submodules_and_buffers_stay() -> None:
    model = Net()
    model.part = torch.nn.Linear(1, 1)
    model.part.batch_size = 4
    model.register_buffer("batch_size", torch.tensor(4))
    assert attached(model).placed == {}
    assert model.part.batch_size == 4 and int(model.batch_size) == 4


def test_the_datamodule_comes_first_and_an_ambiguous_one_ends_the_search() -> None:
    model = Net(batch_size=4)
    attached(model, Data(batch_size=4))
    assert model.batch_size == 4
    assert attached(model, Data(a={"batch_size": 4}, b={"batch_size": 4})).placed == {}
    assert attached(model, Data(num_workers=1)).placed == {"batch_size": "attribute batch_size of Net"}


def test_class_attributes_are_set_on_the_instance() -> None:
    class Classy(Data):
        batch_size = 4
        PIN_MEMORY = False

    datamodule = Classy()
    overrides = attached(Net(), datamodule, batch_size=8, pin_memory=True)
    assert overrides.placed == {
        "batch_size": "attribute batch_size of Classy",
        "pin_memory": "attribute PIN_MEMORY of Classy",
    }
    assert (datamodule.batch_size, Classy.batch_size, datamodule.PIN_MEMORY) == (8, 4, True)


def test_properties_do_not_fail() -> None:
    class ReadOnly(Data):
        batch_size = property(lambda self: 4)
        num_workers = property(lambda self: 1 / 0)

    datamodule = ReadOnly()
    vars(datamodule).update(batch_size=4, num_workers=2)
    overrides = attached(Net(), datamodule, batch_size=8, num_workers=1)
    assert overrides.placed == {}
    assert datamodule.train_dataloader().batch_size == 8


def test_frozen_configurations() -> None:
    config = OmegaConf.create({"batch_size": 4, "num_workers": 1})
    OmegaConf.set_readonly(config, True)
    OmegaConf.set_struct(config, True)
    overrides = attached(Net(), Data(cfg=config))
    assert overrides.placed == {"batch_size": "attribute cfg.batch_size of Data"}
    assert config.batch_size == 8 and OmegaConf.is_readonly(config)


def test_hyperparameters() -> None:
    class Saving(PACKAGE.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, batch_size: int = 4, width: int = 3, cfg: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return DataLoader(numbers(), batch_size=self.hparams.batch_size)

    model = Saving()
    overrides = attached(model)
    assert overrides.placed == {"batch_size": "hparams.batch_size of Saving"}
    assert dict(model.hparams) == {"batch_size": 8, "width": 3, "cfg": None}
    assert model.hparams_initial.batch_size == 4
    assert "batch_size" not in vars(model)
    assert model.train_dataloader().batch_size == 8
    assert overrides.placed == {"batch_size": "hparams.batch_size of Saving"}
    both = Saving()
    both.batch_size = 4
    assert attached(both).placed["batch_size"] == "attribute batch_size of Saving and hparams.batch_size of Saving"
    assert both.batch_size == both.hparams.batch_size == 8


def test_nothing_is_made_where_there_are_no_hyperparameters() -> None:
    model, datamodule = Net(), Data()
    attached(model, datamodule)
    assert "_hparams" not in vars(model) and "_hparams" not in vars(datamodule)


def test_what_is_placed_is_not_looked_for() -> None:
    datamodule = Data(batch_size=4, num_workers=0)
    overrides = attached(Net(), datamodule, {"batch_size": "data.batch_size"}, batch_size=8, num_workers=2)
    assert datamodule.batch_size == 4 and datamodule.num_workers == 2
    assert overrides.placed == {"batch_size": "data.batch_size", "num_workers": "attribute num_workers of Data"}


def test_attributes_of_workers_that_other_arguments_forbid_are_taken_back() -> None:
    class Needy(Data):
        num_calls = 0

        def train_dataloader(self) -> Any:
            self.num_calls += 1
            return DataLoader(numbers(), batch_size=4, num_workers=self.num_workers, persistent_workers=True)

    datamodule = Needy(num_workers=2)
    overrides = attached(Net(), datamodule, num_workers=0)
    loader = datamodule.train_dataloader()
    assert (loader.num_workers, loader.persistent_workers, datamodule.num_workers) == (0, False, 2)
    assert overrides.placed == {"num_workers": "rebuilt loader"}
    assert datamodule.num_calls == 2
    datamodule = Needy(num_workers=0)
    attached(Net(), datamodule, pin_memory=True)
    with pytest.raises(ValueError, match="num_workers > 0"):
        datamodule.train_dataloader()
    assert datamodule.num_calls == 1


# ---- the hook ----


def test_what_is_said_of_where_a_setting_came_from() -> None:
    datamodule = Data(num_workers=1)
    placed = {"batch_size": "data.batch_size"}
    wanted = {"batch_size": 8, "num_workers": 1, "pin_memory": False, "persistent_workers": True}
    overrides = attached(Net(), datamodule, placed, **wanted)
    assert placed == {"batch_size": "data.batch_size"}
    loader = datamodule.train_dataloader()
    assert (loader.batch_size, loader.num_workers, loader.persistent_workers) == (8, 1, True)
    expected = dict.fromkeys(("batch_size", "num_workers", "persistent_workers"), "rebuilt loader")
    assert overrides.placed == {**expected, "pin_memory": "as it was"}


def test_a_setting_that_cannot_be_given_is_not_placed() -> None:
    class Mixed(Data):
        def train_dataloader(self) -> Any:
            return sized(4, 5)

    datamodule = Mixed()
    overrides = attached(Net(), datamodule, batch_size=8, persistent_workers=True)
    datamodule.train_dataloader()
    assert overrides.placed == {}


def test_one_of_several_that_has_the_batch_size() -> None:
    class Mixed(Data):
        def train_dataloader(self) -> Any:
            return sized(8, 5)

    datamodule = Mixed()
    overrides = attached(Net(), datamodule)
    datamodule.train_dataloader()
    assert overrides.placed == {"batch_size": "as it was"}


def test_a_failure_and_arguments_go_through() -> None:
    class Picky(Data):
        def train_dataloader(self, size: int = 4, *, fail: bool = False) -> Any:
            """Makes it."""
            if fail:
                raise ValueError("no data")
            return DataLoader(numbers(size), batch_size=4)

    datamodule = Picky()
    attached(Net(), datamodule)
    assert datamodule.train_dataloader.__doc__ == "Makes it."
    assert len(datamodule.train_dataloader(16).dataset) == 16
    with pytest.raises(ValueError, match="no data"):
        datamodule.train_dataloader(fail=True)


def test_nothing_wanted_nothing_wrapped() -> None:
    datamodule = Data(batch_size=4)
    LoaderOverrides(LoaderSettings(), {}).attach(Net(), datamodule)
    assert "train_dataloader" not in vars(datamodule)
    LoaderOverrides(LoaderSettings(batch_size=8), {}).attach(object(), None)
    LoaderOverrides(LoaderSettings(batch_size=8), {}).attach(Net(), object())


def plain(self: Any) -> Any:
    return DataLoader(numbers(), batch_size=4)


def wrapping(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    "method",
    [plain, wrapping(plain), wrapping(wrapping(plain)), functools.lru_cache(plain)],
    ids=["plain", "wrapped", "wrapped twice", "cached"],
)
def test_lightning_still_sees_whether_the_hook_is_overridden(package: Any, method: Any) -> None:
    is_overridden = importlib.import_module(f"{package.__name__}.utilities.model_helpers").is_overridden
    for base in (package.LightningDataModule, package.LightningModule):
        kind = type("Own", (base,), {"train_dataloader": method})
        own, bare = kind(), base()
        for instance in (own, bare):
            attached(instance)
        assert is_overridden("train_dataloader", own)
        assert not is_overridden("train_dataloader", bare)
        assert own.train_dataloader().batch_size == 8


def test_a_hook_given_to_the_instance() -> None:
    datamodule = PACKAGE.LightningDataModule.from_datasets(numbers(), batch_size=4, num_workers=0)
    overrides = attached(Net(), datamodule)
    assert datamodule.train_dataloader().batch_size == 8
    assert overrides.placed == {"batch_size": "rebuilt loader"}
    model = Net()
    object.__setattr__(model, "train_dataloader", functools.partial(plain, model))
    attached(model)
    assert model.train_dataloader().batch_size == 8


class Whole(Dataset):  # type: ignore[type-arg]
    """A dataset that holds the datamodule, which then goes to the workers with it."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return (torch.tensor(index),)


class HoldingData(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(Whole(self), batch_size=4, collate_fn=self.collate)

    def collate(self, items: list[Any]) -> Any:
        return [torch.stack([item[0] for item in items])]


def test_instances_are_pickled_and_copied_with_their_hook() -> None:
    datamodule = HoldingData()
    attached(Net(), datamodule)
    for other in (pickle.loads(pickle.dumps(datamodule)), copy.deepcopy(datamodule)):
        loader = other.train_dataloader()
        assert loader.batch_size == 8 and loader.dataset.owner is other
    loader = pickle.loads(pickle.dumps(datamodule.train_dataloader()))
    assert [len(batch) for batch in batches(loader)] == [8, 8]
    rebuilt = override(datamodule.train_dataloader(), num_workers=2)
    assert [len(batch) for batch in batches(rebuilt)] == [8, 8]


# ---- training ----


def make_model(package: Any) -> Any:
    class Model(package.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[Any] = []
            self.num_calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            parts = list(batch.values()) if isinstance(batch, dict) else [batch]
            self.seen.append([len(part[0]) for part in parts])
            return self.layer(parts[0][0].float()[:, None]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.001)

        def train_dataloader(self) -> Any:
            self.num_calls += 1
            return {"a": DataLoader(numbers(), batch_size=4), "b": DataLoader(numbers(), 4)}

    return Model()


def fit(package: Any, model: Any, datamodule: Any = None, **settings: Any) -> Any:
    trainer = package.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(model, datamodule=datamodule)
    return trainer


@pytest.mark.parametrize("package", PACKAGES)
def test_training_with_loaders_of_the_module(package: Any) -> None:
    model = make_model(package)
    overrides = attached(model, batch_size=6, num_workers=1)
    fit(package, model)
    assert model.seen == [[6, 6], [6, 6]]
    assert model.num_calls == 1
    assert overrides.placed == {"batch_size": "rebuilt loader", "num_workers": "rebuilt loader"}


@pytest.mark.parametrize("package", PACKAGES)
def test_training_with_loaders_of_a_datamodule(package: Any) -> None:
    class Own(package.LightningDataModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 4

        def setup(self, stage: str) -> None:
            self.batch_size = 5

        def train_dataloader(self) -> Any:
            return GraphLoader(numbers(), self.batch_size, shuffle=True, scale=1)

    model, datamodule = make_model(package), Own()
    overrides = attached(model, datamodule)
    assert overrides.placed == {"batch_size": "attribute batch_size of Own"}
    trainer = fit(package, model, datamodule)
    assert model.seen == [[8], [8]]
    assert overrides.placed == {"batch_size": "rebuilt loader"}
    assert type(trainer.train_dataloader) is GraphLoader


@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_makes_the_loader_anew_while_it_trains(package: Any) -> None:
    class Shuffled(package.LightningDataModule):  # type: ignore[name-defined,misc]
        def train_dataloader(self) -> Any:
            return GraphLoader(numbers(), 4, shuffle=True, scale=1)

    class Positional(package.LightningDataModule):  # type: ignore[name-defined,misc]
        def train_dataloader(self) -> Any:
            return DataLoader(numbers(), 4, sampler=RandomSampler(range(24)), num_workers=1)

    for kind in (Shuffled, Positional):
        model, datamodule = make_model(package), kind()
        attached(model, datamodule, batch_size=8, num_workers=0)
        trainer = fit(package, model, datamodule, overfit_batches=2)
        assert type(trainer.train_dataloader.sampler) is SequentialSampler
        assert model.seen == [[8], [8]]
        assert trainer.train_dataloader.num_workers == 0


class Remembering(Sampler):  # type: ignore[type-arg]
    """An index sampler with a batch size of its own, as in metric learning: it stays the very same."""

    def __init__(self) -> None:
        self.batch_size = 4

    def __iter__(self) -> Iterator[int]:
        return iter(range(24))

    def __len__(self) -> int:
        return 24


def test_index_sampler_with_a_batch_size_stays() -> None:
    sampler = Remembering()
    rebuilt = override(DataLoader(numbers(), batch_size=4, sampler=sampler), batch_size=8)
    assert rebuilt.batch_sampler.sampler is sampler and sampler.batch_size == 4
    assert [len(batch) for batch in batches(rebuilt)] == [8, 8, 8]
