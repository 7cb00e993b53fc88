"""How many samples a batch holds: read where the batch says so, or asked of the user's own function; never guessed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

MAX_PARTS = 256
"""Parts of a batch that are looked at to find the ones that tell its size."""

MAX_DEPTH = 8
"""How deep in a batch is looked."""

MAX_PLACES = 4
"""Places that tell a batch's size which are compared in every batch."""

MAX_LOOKS = 20
"""Batches in a row that tell nothing before they are no more looked into, which takes longer than reading a place."""

Path = tuple[Callable[[Any], Any], ...]
"""The way to a part of a batch, from container to container."""


class Place(NamedTuple):
    """Where in a batch a number of samples may stand: the way to it, what to ask there, and what it says now."""

    path: Path
    kind: str
    number: int


class SampleCounter:
    """Counts the samples of batch after batch, at the places that tell them.

    Those are found in the first full batch: whatever tensor, list or declared size (`num_graphs`, `batch_size`) says
    the same as the loader's own batch size. From then on the number is what these places say, if they agree. Without a
    batch size of the loader a declared one is believed, and several tensors of one length are proof enough unless they
    may be the samples, or the parts of one. Where nothing is proof the number is None, unknown. No batch, however odd,
    fails to be counted: it is unknown.
    """

    def __init__(self, batch_size_fn: Callable[[Any], int | None] | None = None) -> None:
        self._batch_size_fn = batch_size_fn
        self._expected: int | None = None
        self._places: tuple[Place, ...] = ()
        self._num_looks = 0

    def expect(self, loader_batch_size: int | None) -> None:
        """What the loader says from here on; to be called before a batch is counted."""
        if loader_batch_size != self._expected:
            self._expected, self._places = loader_batch_size, ()
        self._num_looks = 0

    def count(self, batch: Any) -> int | None:
        """The number of samples, None where it is unknown. Raises TypeError where the user's function returns none."""
        if self._batch_size_fn is not None:
            return _checked(self._batch_size_fn(batch))
        if not self._places and self._num_looks >= MAX_LOOKS:
            return None
        try:
            return self._count_at_places(batch)
        except Exception:  # the batch is the user's, and asking it for its parts may do anything
            return None

    def _count_at_places(self, batch: Any) -> int | None:
        numbers = self._read_places(batch)
        if numbers:
            return self._agreed(numbers)
        if self._num_looks >= MAX_LOOKS:  # it has places, which this batch does not
            return None
        self._num_looks += 1
        found = list(_find_places(batch))
        proven = _proven_places(found, self._expected)
        places = proven or _agreeing_places(batch, found, self._expected)
        if proven or (places and not self._places):
            self._places, self._num_looks = places, 0
        return self._agreed({place.number for place in places}) if places else None

    def _read_places(self, batch: Any) -> set[int]:
        """What the known places say of this batch; nothing where it is made in another way than the first one was."""
        numbers = set()
        for path, kind, _ in self._places:
            part = batch
            try:
                for step in path:
                    part = step(part)
            except IndexError:  # a shorter list
                continue
            except (KeyError, TypeError, AttributeError):
                return set()
            number = _own_count(part, kind)
            if number is not None:
                numbers.add(number)
        return numbers

    def _agreed(self, numbers: set[int]) -> int | None:
        """The one number that all places say; None where they differ or it is more than the loader gives."""
        number = next(iter(numbers))
        is_too_large = self._expected is not None and number > self._expected
        return None if len(numbers) > 1 or is_too_large else number


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


def flatten_loaders(loaders: Any) -> list[Any]:
    """The training loaders one by one, out of whatever lists and mappings the user has put them in."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return [loader for part in loaders for loader in flatten_loaders(part)]
    return [] if loaders is None else [loaders]


def own_batch_size(loader: Any) -> int | None:
    """The batch size of one loader, or of its batch sampler; None where neither has one."""
    for path in ("batch_size", "batch_sampler.batch_size"):
        with contextlib.suppress(Exception):  # the loader is the user's, and may not be ready to say
            size = operator.attrgetter(path)(loader)
            if isinstance(size, int):
                return size
    return None


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


def _find_places(batch: Any) -> Iterator[Place]:
    """Every place of a batch that has a length or a declared size, depth first, as far as is looked."""
    parts: list[tuple[Any, Path]] = [(batch, ())]
    for _ in range(MAX_PARTS):
        if not parts:
            return
        value, path = parts.pop()
        declared = _declared_count(value)
        if declared is not None:
            yield Place(path, "declared", declared)
        elif isinstance(value, torch.Tensor):
            if value.ndim:
                yield Place(path, "tensor", len(value))
        elif len(path) < MAX_DEPTH:
            if isinstance(value, (list, tuple)):
                yield Place(path, "list", len(value))
            steps = list(itertools.islice(_steps_into(value), MAX_PARTS))
            parts += [(step(value), (*path, step)) for step in reversed(steps)]


def _steps_into(value: Any) -> Iterator[Callable[[Any], Any]]:
    """How to come to each part of a container; nothing of what is none."""
    if isinstance(value, (list, tuple)):
        return (operator.itemgetter(index) for index in range(len(value)))
    if isinstance(value, Mapping):
        return (operator.itemgetter(key) for key in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (operator.attrgetter(field.name) for field in dataclasses.fields(value))
    return iter(())


def _proven_places(places: list[Place], expected: int | None) -> tuple[Place, ...]:
    """The places that tell the number of samples; a list of one is only the wrapping of what is in it."""
    if expected is None:
        return tuple(place for place in places if place.kind == "declared")[:1]
    return tuple(place for place in places if place.number == expected and (place.kind != "list" or place.number > 1))[
        :MAX_PLACES
    ]


def _agreeing_places(batch: Any, places: list[Place], expected: int | None) -> tuple[Place, ...]:
    """The tensors of the batch if the length that all of them share is proof: see `SampleCounter`."""
    tensors = [place for place in places if place.kind == "tensor"]
    numbers = {place.number for place in tensors}
    if len(tensors) < 2 or len(numbers) != 1 or (expected is not None and tensors[0].number > expected):
        return ()
    return () if _may_be_samples(batch) else tuple(tensors[:MAX_PLACES])


def _may_be_samples(value: Any, depth: int = 0) -> bool:
    """Whether tensors of one length may be the samples themselves, or the parts of one, side by side.

    That is so where all tensors of a container have as many dimensions: images, or tokens and their labels. What has
    been put together of samples has in general some of one value a sample, and some of more.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)) or depth > MAX_DEPTH:
        return False
    dimensions = {part.ndim for part in value if isinstance(part, torch.Tensor) and part.ndim}
    num_tensors = sum(isinstance(part, torch.Tensor) and part.ndim > 0 for part in value)
    return (num_tensors > 1 and len(dimensions) == 1) or any(_may_be_samples(part, depth + 1) for part in value)
