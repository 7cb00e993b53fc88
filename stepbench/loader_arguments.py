"""Where the settings of a training loader stand among somebody's arguments: found by their usual names, never guessed.

Knows neither torch nor a configuration system: arguments are plain mappings and lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

LOADER_SETTINGS = ("batch_size", "num_workers", "pin_memory", "persistent_workers")

USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "batch_size": (
        "per_device_train_batch_size",
        "per_gpu_train_batch_size",
        "train_batch_size_per_device",
        "train_batch_size_per_gpu",
        "train_batch_size",
        "batch_size_train",
        "train_loader_batch_size",
        "per_device_batch_size",
        "per_gpu_batch_size",
        "batch_size_per_device",
        "batch_size_per_gpu",
        "device_batch_size",
        "local_batch_size",
        "batch_size",
        "batchsize",
        "batch_sz",
        "bsz",
        "bs",
        "loader_batch_size",
        "dataloader_batch_size",
        "data_loader_batch_size",
        "data_batch_size",
        "micro_batch_size",
        "microbatch_size",
        "mini_batch_size",
        "minibatch_size",
        "mb_size",
        "samples_per_gpu",
        "samples_per_device",
        "samples_per_batch",
        "imgs_per_gpu",
    ),
    "num_workers": (
        "train_num_workers",
        "num_workers_train",
        "num_train_workers",
        "train_workers",
        "num_workers",
        "numworkers",
        "num_worker",
        "n_workers",
        "nworkers",
        "nr_workers",
        "number_of_workers",
        "dataloader_num_workers",
        "data_loader_num_workers",
        "loader_num_workers",
        "data_num_workers",
        "num_dataloader_workers",
        "num_loader_workers",
        "num_data_workers",
        "dataloader_workers",
        "data_loader_workers",
        "loader_workers",
        "data_workers",
        "workers_per_gpu",
        "workers_per_device",
        "num_workers_per_gpu",
        "num_workers_per_device",
        "num_processes_loader",
        "workers",
    ),
    "pin_memory": (
        "train_pin_memory",
        "pin_memory",
        "pin_mem",
        "pinmemory",
        "dataloader_pin_memory",
        "data_loader_pin_memory",
        "loader_pin_memory",
        "use_pin_memory",
    ),
    "persistent_workers": (
        "train_persistent_workers",
        "persistent_workers",
        "persistent_worker",
        "persistentworkers",
        "dataloader_persistent_workers",
        "data_loader_persistent_workers",
        "loader_persistent_workers",
        "use_persistent_workers",
    ),
}
"""What each setting is called in the wild, best first; a word for the training stage may stand before or after it."""

TRAINING_WORDS = frozenset({"train", "training", "trn"})

OTHER_STAGE_WORDS = frozenset(
    {
        "val",
        "vals",
        "valid",
        "validation",
        "validate",
        "test",
        "tests",
        "testing",
        "predict",
        "prediction",
        "predictions",
        "pred",
        "eval",
        "evaluation",
        "evaluate",
        "evaluating",
        "inference",
        "infer",
        "dev",
    }
)
"""Words of a name that say that it is not about training."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

_RANKS = {setting: {name: rank for rank, name in enumerate(names)} for setting, names in USUAL_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """What a training loader is to be given. None leaves alone what the user's code says."""

    batch_size: int | None = None
    num_workers: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None

    @property
    def given(self) -> tuple[tuple[str, int | bool], ...]:
        """The settings that are not None, each with its value."""
        pairs = ((name, getattr(self, name)) for name in LOADER_SETTINGS)
        return tuple((name, value) for name, value in pairs if value is not None)


def find_arguments(arguments: Mapping[str, Any], setting: str) -> list[str]:
    """The dotted paths at which a setting stands: one where there is a best one, several where they are equally good.

    Where a path names the training stage it is better than where none is named, and where it names another stage it is
    none; then the better name counts, then the shallower place. Raises KeyError where there is no such setting.
    """
    best: tuple[bool, int, int] | None = None
    found: list[str] = []
    for parts, value in _leaves(arguments, (), ()):
        rank = _name_rank(parts, setting) if _may_be_value(value, setting) else None
        if rank is None:
            continue
        order = (not any(TRAINING_WORDS & _words(part) for part in parts), rank, len(parts))
        if best is None or order < best:
            best, found = order, []
        if order == best:
            found.append(".".join(parts))
    return found


def find_parameter(parameter_names: Iterable[str], setting: str) -> str | None:
    """The best of a constructor's parameter names for a setting, None where there is none.

    Raises KeyError where there is no such setting.
    """
    ranked = []
    for position, name in enumerate(parameter_names):
        rank = None if _words(name) & OTHER_STAGE_WORDS else _name_rank((name,), setting)
        if rank is not None:
            ranked.append((not TRAINING_WORDS & _words(name), rank, position, name))
    return min(ranked)[-1] if ranked else None


def get_at(container: Any, path: str) -> Any:
    """The value at a dotted path in nested mappings and lists. Raises KeyError, naming the path, if there is none."""
    return _walk(container, path.split("."), path)


def set_at(container: Any, path: str, value: Any) -> None:
    """Put a value at a dotted path; its last part may be a new key of a mapping, all others must be there.

    Raises KeyError, naming the path, where the value has no place.
    """
    *parents, last = path.split(".")
    owner = _walk(container, parents, path)
    if isinstance(owner, MutableMapping):
        owner[last] = value
    elif isinstance(owner, MutableSequence) and last.isdecimal() and int(last) < len(owner):
        owner[int(last)] = value
    else:
        raise KeyError(path)


def _walk(value: Any, parts: Sequence[str], path: str) -> Any:
    for part in parts:
        try:
            value = _step(value, part)
        except (LookupError, ValueError, TypeError):
            raise KeyError(path) from None
    return value


def _step(value: Any, part: str) -> Any:
    if isinstance(value, Mapping):
        return value[part]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value[int(part)]
    raise KeyError(part)


def _leaves(value: Any, parts: tuple[str, ...], above: tuple[int, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values that no container is, each with its path, but for those on which other stages of a run depend."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = ((str(index), item) for index, item in enumerate(value) if isinstance(item, (Mapping, list, tuple)))
    else:
        yield parts, value
        return
    if id(value) in above:
        return
    for key, item in items:
        if isinstance(key, str) and "." not in key and not _words(key) & OTHER_STAGE_WORDS:
            yield from _leaves(item, (*parts, key), (*above, id(value)))


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(name)}


def _name_rank(parts: tuple[str, ...], setting: str) -> int | None:
    """How good a name of the setting a path ends in, 0 is best; None where it ends in none.

    A mapping from stages to values, as in `batch_size.train`, has the name one part earlier.
    """
    ranks = _RANKS[setting]
    leaf = parts[-1]
    if len(parts) > 1 and leaf.lower() in TRAINING_WORDS:
        leaf = parts[-2]
    words = [word.lower() for word in _WORD.findall(leaf)]
    neutral = [word for word in words if word not in TRAINING_WORDS]
    found = [ranks[name] for name in ("_".join(words), "_".join(neutral)) if name in ranks]
    return min(found, default=None)


def _may_be_value(value: Any, setting: str) -> bool:
    if value is None:
        return True
    if isinstance(value, str):
        return value.startswith("${") and value.endswith("}")
    is_flag = setting in ("pin_memory", "persistent_workers")
    return isinstance(value, bool) if is_flag else isinstance(value, int) and not isinstance(value, bool)
