"""How many samples a batch holds: read where the batch says so, or asked of the user's own function; never guessed."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

MAX_PLACES = 256
"""Places of a batch that are looked at to find the one that tells its size."""

MIN_AGREEING = 2
"""Tensors of the same length that, without any other proof, make it the number of samples."""


Path = tuple[Callable[[Any], Any], ...]
"""The way to a part of a batch, from container to container."""


class Place(NamedTuple):
    """Where in a batch a number of samples may stand: the way to it, what to ask there, and what it says now."""

    path: Path
    kind: str
    number: int

    def read(self, batch: Any) -> int | None:
        """The number that stands at this place of another batch; None where that batch has no such place."""
        try:
            for step in self.path:
                batch = step(batch)
        except (KeyError, IndexError, TypeError, AttributeError):
            return None
        return _own_count(batch, self.kind)


class SampleCounter:
    """Counts the samples of batch after batch, at the place that tells them.

    That place is found in the first full batch: the first tensor, else the first list, that is as long as the loader's
    own batch size. An object that declares its size (`num_graphs`, `batch_size`) is believed. Of a loader without a
    batch size several tensors of one length are proof enough, unless they may be a list of samples. Where nothing is
    proof the number is None, unknown.
    """

    def __init__(self, batch_size_fn: Callable[[Any], int | None] | None = None) -> None:
        self.loader_batch_size: int | None = None
        """What the loader says; to be set before a batch is counted, and when the loader changes."""
        self._batch_size_fn = batch_size_fn
        self._place: Place | None = None

    def count(self, batch: Any) -> int | None:
        """The number of samples, None where it is unknown. Raises TypeError where the user's function returns none."""
        if self._batch_size_fn is not None:
            return _checked(self._batch_size_fn(batch))
        if self._place is not None:
            count = self._place.read(batch)
            if count is not None:
                return count
        places = [place for place, _ in zip(_places(batch, ()), range(MAX_PLACES), strict=False)]
        place = _proven_place(places, self.loader_batch_size)
        if place is not None:
            self._place = place
            return place.number
        return _agreed_count(batch, places, self.loader_batch_size)


def _checked(count: Any) -> int | None:
    if count is None:
        return None
    try:
        whole = operator.index(count)
    except TypeError:
        whole = -1
    if whole < 0 or isinstance(count, bool):
        raise TypeError(f"batch_size_fn must return a whole number of samples or None, got {count!r}")
    return whole


def loader_batch_size(loaders: Any) -> int | None:
    """The batch size that the training loader has, the first one of several; None where it has none."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return loader_batch_size(loaders[0]) if loaders else None
    return own_batch_size(loaders)


def own_batch_size(loader: Any) -> int | None:
    """The batch size of one loader, or of its batch sampler; None where neither has one."""
    sizes = (getattr(holder, "batch_size", None) for holder in (loader, getattr(loader, "batch_sampler", None)))
    return next((size for size in sizes if isinstance(size, int)), None)


def _own_count(value: Any, kind: str) -> int | None:
    """What one part of a batch says by itself: its length, or the size it declares."""
    if kind == "tensor":
        return len(value) if isinstance(value, torch.Tensor) and value.ndim else None
    if kind == "list":
        return len(value) if isinstance(value, (list, tuple)) else None
    return _declared_count(value)


def _declared_count(value: Any) -> int | None:
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, torch.Tensor):
        return None
    for name in ("num_graphs", "batch_size"):  # PyG; DGL, TensorDict
        declared = getattr(value, name, None)
        if isinstance(declared, torch.Size) and declared:
            declared = declared[0]
        if isinstance(declared, int) and not isinstance(declared, bool):
            return declared
    return None


def _places(value: Any, path: Path) -> Iterator[Place]:
    """Every place of a batch that has a length or a declared size, depth first."""
    declared = _declared_count(value)
    if declared is not None:
        yield Place(path, "declared", declared)
    elif isinstance(value, torch.Tensor):
        if value.ndim:
            yield Place(path, "tensor", len(value))
    elif isinstance(value, (list, tuple)):
        yield Place(path, "list", len(value))
        yield from _places_of_parts(value, path, (operator.itemgetter(index) for index in range(len(value))))
    elif isinstance(value, Mapping):
        yield from _places_of_parts(value, path, map(operator.itemgetter, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        yield from _places_of_parts(value, path, map(operator.attrgetter, names))


def _places_of_parts(value: Any, path: Path, steps: Iterable[Callable[[Any], Any]]) -> Iterator[Place]:
    for step in steps:
        yield from _places(step(value), (*path, step))


def _proven_place(places: list[Place], expected: int | None) -> Place | None:
    """The place that surely tells the number of samples: a declared one, else one that says what the loader says."""
    for kind in ("declared", "tensor", "list"):
        for place in places:
            is_proof = kind == "declared" or (place.number == expected and (kind == "tensor" or place.number > 1))
            if place.kind == kind and is_proof:  # a list of one is only the wrapping of what is in it
                return place
    return None


def _agreed_count(batch: Any, places: list[Place], expected: int | None) -> int | None:
    """The length that all tensors of the batch share, where that is proof: see `SampleCounter`."""
    tensors = [place.number for place in places if place.kind == "tensor"]
    if len(set(tensors)) != 1 or (expected is not None and tensors[0] > expected):
        return None
    if isinstance(batch, torch.Tensor):
        return tensors[0] if expected is None else None
    if len(tensors) < MIN_AGREEING and expected is not None:
        return None
    return None if _may_be_samples(batch) else tensors[0]


def _may_be_samples(value: Any) -> bool:
    """Whether a part of the batch may be a list of samples: tensors alone, side by side, with as many dimensions."""
    if isinstance(value, Mapping):
        return any(map(_may_be_samples, value.values()))
    if not isinstance(value, (list, tuple)):
        return False
    dimensions = [part.ndim if isinstance(part, torch.Tensor) else None for part in value]
    is_list = len(dimensions) > 1 and dimensions[0] is not None and len(set(dimensions)) == 1
    return is_list or any(map(_may_be_samples, value))
