"""Brings the settings of a training loader to modules that are already built, and to the loaders that they return."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import inspect
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepbench.loader_arguments import LOADER_SETTINGS, LoaderSettings, find_arguments
from stepbench.samples import own_batch_size

REBUILT = "rebuilt loader"
AS_IT_WAS = "as it was"

MAX_DEPTH = 3
"""How deep in containers an attribute is looked for."""

MAX_ITEMS = 500
"""Items of a container beyond which it is taken for data."""

_FRAMEWORKS = frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "torch", "builtins", "abc", "typing"})
_OWN_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_hparams", "_hparams_initial"}


class LoaderOverrides:
    """Gives the wanted settings to the training loader of a run, and tells in `placed` how each one came there.

    `placed` begins with the settings that constructor arguments were given for. It changes when a module is attached,
    and when its `train_dataloader` has been called; a setting that could not be brought there is not in it.
    """

    def __init__(self, wanted: LoaderSettings, placed: Mapping[str, str]) -> None:
        self.wanted = wanted
        self.placed = dict(placed)
        self._attributes: dict[str, list[_Place]] = {}
        self._reach_provider = set(self.placed)

    def attach(self, model: Any, datamodule: Any | None = None) -> None:
        """Set the attributes that hold settings not yet placed, and override what `train_dataloader` returns.

        That of the datamodule counts where there is one, as in Lightning. Never raises: what cannot be set is left.
        """
        model = getattr(model, "_orig_mod", model)
        provider = model if datamodule is None else datamodule
        for setting, value in self.wanted.given:
            if setting in self.placed:
                continue
            for owner in (provider, model):
                places = _set_attributes(owner, setting, value)
                if places is None:
                    break
                if places:
                    self.placed[setting] = " and ".join(place.description for place in places)
                    self._attributes[setting] = places
                    if owner is provider:
                        self._reach_provider.add(setting)
                    break
        method = getattr(provider, "train_dataloader", None)
        if self.wanted.given and callable(method):
            with contextlib.suppress(AttributeError):  # a property, or slots
                object.__setattr__(provider, "train_dataloader", _OverriddenHook(method, self))

    def take_back_workers(self) -> bool:
        """Give the attributes that are about workers their old values, if any was set; whether that was so."""
        taken = [setting for setting in ("num_workers", "persistent_workers") if setting in self._attributes]
        for setting in taken:
            for place in self._attributes.pop(setting):
                _set(place.container, place.name, place.old)
            self.placed.pop(setting, None)
        return bool(taken)

    def override(self, loaders: Any) -> Any:
        """What `train_dataloader` is to return in place of `loaders`, whose settings then are accounted for."""
        wanted = self.wanted
        if "batch_size" in self._reach_provider and {_batch_size(loader) for loader in _flatten(loaders)} == {1}:
            wanted = dataclasses.replace(wanted, batch_size=None)  # its items may be whole batches of that size
        loaders, changed = _override(loaders, wanted)
        for setting, value in self.wanted.given:
            if setting in changed:
                self.placed[setting] = REBUILT
            elif setting not in self.placed and _have(loaders, setting, value):
                self.placed[setting] = AS_IT_WAS
        return loaders


class _OverriddenHook:
    """The `train_dataloader` of one instance with its loaders overridden; copied and pickled with the instance."""

    __wrapped__: Callable[..., Any]

    def __init__(self, method: Callable[..., Any], overrides: LoaderOverrides) -> None:
        functools.update_wrapper(self, method)
        self.__wrapped__ = _innermost(method)
        self._method = method
        self._overrides = overrides

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            loaders = self._method(*args, **kwargs)
        except ValueError as error:  # torch: other arguments that the user's code gives need workers
            if "num_workers > 0" not in str(error) or not self._overrides.take_back_workers():
                raise
            loaders = self._method(*args, **kwargs)
        return self._overrides.override(loaders)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._method, self._overrides)


def _innermost(method: Callable[..., Any]) -> Callable[..., Any]:
    """The function whose code Lightning compares with its own to see whether it is overridden; it unwraps only once."""
    while True:
        if isinstance(method, functools.partial):
            method = method.func
        elif hasattr(method, "__wrapped__"):
            method = inspect.unwrap(method)
        else:
            return method


# ---- the loaders ----


def override_loaders(loaders: Any, wanted: LoaderSettings) -> tuple[Any, list[str]]:
    """The loaders with the wanted settings, and a note such as `batch_size: rebuilt loader` for each that had others.

    Loaders may stand in lists, tuples, dicts and Lightning's `CombinedLoader`. None is changed itself: another one
    takes its place, of the same class and with the same dataset and sampler. What cannot be changed, or needs not be,
    is returned as it is. A batch size is changed in all loaders or in none, and only where all of them have the same.
    """
    loaders, changed = _override(loaders, wanted)
    return loaders, [f"{setting}: {REBUILT}" for setting in LOADER_SETTINGS if setting in changed]


def _override(loaders: Any, wanted: LoaderSettings) -> tuple[Any, set[str]]:
    """The overridden loaders, and the settings that have come to one of them so."""
    all_loaders = {id(loader): loader for loader in _flatten(loaders)}
    sized = [key for key, loader in all_loaders.items() if _batch_size(loader) is not None]
    sizes = {_batch_size(all_loaders[key]) for key in sized}
    without_size = dataclasses.replace(wanted, batch_size=None)
    settings = wanted if len(sizes) == 1 else without_size
    rebuilt = {key: _rebuild(loader, settings) for key, loader in all_loaders.items()}
    if settings.batch_size is not None and any(_batch_size(rebuilt[key]) != settings.batch_size for key in sized):
        rebuilt = {key: _rebuild(loader, without_size) for key, loader in all_loaders.items()}
    changed = {
        setting
        for key, loader in all_loaders.items()
        for setting, value in wanted.given
        if rebuilt[key] is not loader and _own_value(rebuilt[key], setting) == value != _own_value(loader, setting)
    }
    return _replace(loaders, rebuilt), changed


def _have(loaders: Any, setting: str, value: Any) -> bool:
    """Whether the loaders that tell the setting have this value: one of them for the batch size, else all."""
    values = [own for loader in _flatten(loaders) if (own := _own_value(loader, setting)) is not None]
    if setting == "batch_size":
        return value in values
    return bool(values) and all(own == value for own in values)


def _flatten(loaders: Any) -> Iterator[Any]:
    if _is_combined(loaders):
        loaders = loaders.flattened
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple, deque)):
        for part in loaders:
            yield from _flatten(part)
    elif loaders is not None:
        yield loaders


def _replace(loaders: Any, rebuilt: Mapping[int, Any]) -> Any:
    """The same containers with the rebuilt loaders; one in which nothing is rebuilt is returned itself."""
    if _is_combined(loaders):
        parts = [_replace(part, rebuilt) for part in loaders.flattened]
        if _are_same(parts, loaders.flattened):
            return loaders
        combined = copy.copy(loaders)
        combined.flattened = parts
        return combined
    if isinstance(loaders, dict):
        values = {key: _replace(part, rebuilt) for key, part in loaders.items()}
        if _are_same(values.values(), loaders.values()):
            return loaders
        mapping = copy.copy(loaders)
        for key, part in values.items():
            mapping[key] = part
        return mapping
    if isinstance(loaders, (list, tuple, deque)):
        parts = [_replace(part, rebuilt) for part in loaders]
        if _are_same(parts, loaders):
            return loaders
        if isinstance(loaders, tuple):
            return type(loaders)(*parts) if hasattr(loaders, "_fields") else tuple(parts)
        sequence = copy.copy(loaders)
        for index, part in enumerate(parts):
            sequence[index] = part
        return sequence
    return rebuilt.get(id(loaders), loaders)


def _are_same(parts: Any, others: Any) -> bool:
    return all(part is other for part, other in zip(parts, others, strict=True))


def _is_combined(loaders: Any) -> bool:
    """Whether it is a `CombinedLoader`, of either of Lightning's packages: neither is imported for it."""
    return any(kind.__name__ == "CombinedLoader" for kind in type(loaders).__mro__) and hasattr(loaders, "flattened")


def _own_value(loader: Any, setting: str) -> Any:
    if setting == "batch_size":
        return _batch_size(loader)
    with contextlib.suppress(Exception):  # the loader is the user's
        return getattr(loader, setting, None)
    return None


def _batch_size(loader: Any) -> int | None:
    size = own_batch_size(loader)
    if size is None and isinstance(loader, DataLoader) and isinstance(loader.sampler, BatchSampler):
        size = loader.sampler.batch_size  # the dataset is asked for whole batches
    return size


# ---- one loader ----


def _rebuild(loader: Any, wanted: LoaderSettings) -> Any:
    """A loader like this one with the wanted settings; this one where it has them or cannot have them."""
    if not isinstance(loader, DataLoader):
        return loader
    try:
        rebuilt = _copy(loader)
        changes = _change(rebuilt, wanted)
        if not changes or any(getattr(rebuilt, name) != value for name, value in changes.items()):
            return loader
    except Exception:  # the loader is the user's, and copying it may do anything
        return loader
    if type(loader) is DataLoader:  # a subclass may not bear other arguments, but the record is replayed on it
        without_workers = {"multiprocessing_context": None} if rebuilt.num_workers == 0 else {}
        _change_recorded_arguments(rebuilt, changes | without_workers)
    record = vars(rebuilt).get("__pl_attrs_record", [])
    vars(rebuilt)["__pl_attrs_record"] = [*record, ((wanted,), _change)]
    return rebuilt


def _change(loader: Any, wanted: LoaderSettings) -> dict[str, Any]:
    """Change a loader in place, and return its changed attributes.

    Lightning does it again to a loader that it has made like this one, as its record of attributes says.
    """
    changes = _find_changes(loader, wanted)
    if not changes:
        return changes
    attributes = vars(loader)
    attributes.update(changes)  # torch forbids to assign some of them
    for name in ("_iterator", "_IterableDataset_len_called"):
        if name in attributes:
            attributes[name] = None
    for name, value in list(attributes.items()):
        if loader.num_workers == 0 and name.endswith("__multiprocessing_context"):
            attributes[name] = None
        elif isinstance(value, _BaseDataLoaderIter):  # of a loader whose workers never end
            attributes[name] = DataLoader.__iter__(loader)
    return changes


def _find_changes(loader: Any, wanted: LoaderSettings) -> dict[str, Any]:
    """The attributes of a loader that have to be changed, with their new values: consistent ones, as torch demands."""
    values: dict[str, Any] = {}
    num_workers = loader.num_workers if wanted.num_workers is None else wanted.num_workers
    if wanted.num_workers is not None and num_workers != loader.num_workers:
        values["num_workers"] = num_workers
        if num_workers == 0:
            values |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
        elif loader.prefetch_factor is None:
            values["prefetch_factor"] = 2
    if wanted.persistent_workers is not None:
        values["persistent_workers"] = wanted.persistent_workers and num_workers > 0
    if wanted.pin_memory is not None:
        values["pin_memory"] = wanted.pin_memory
    changes = {name: value for name, value in values.items() if getattr(loader, name) != value}
    size = _batch_size(loader)
    if wanted.batch_size is not None and size is not None and size != wanted.batch_size:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        resized = _resize(getattr(loader, name), wanted.batch_size)
        if resized is not None:
            changes[name] = resized
            if loader.batch_size is not None:
                changes["batch_size"] = wanted.batch_size
    return changes


def _resize(sampler: Any, batch_size: int) -> Any | None:
    """A batch sampler like this one, over the same sampler, with another batch size; None where that cannot be.

    One that holds its batches ready made is made anew, where Lightning has recorded of what.
    """
    if type(sampler) is BatchSampler:
        return BatchSampler(sampler.sampler, batch_size, sampler.drop_last)
    try:
        own_size = getattr(sampler, "batch_size", None)
        resized = _copy(sampler)
        _change_recorded_arguments(resized, {"batch_size": batch_size})
        has_inner = _resize_inner(resized, batch_size)
        if not isinstance(own_size, int):
            return resized if has_inner else None
        if _holds_batches(sampler, own_size):
            resized = type(sampler)(*vars(resized)["__pl_saved_args"], **vars(resized)["__pl_saved_kwargs"])
        elif resized.batch_size != batch_size:
            object.__setattr__(resized, "batch_size", batch_size)
        return resized if resized.batch_size == batch_size else None
    except Exception:  # the sampler is the user's
        return None


def _resize_inner(sampler: Any, batch_size: int) -> bool:
    """Resize the batch sampler that another one wraps; whether there is one that can be."""
    for name in ("batch_sampler", "sampler"):
        inner = getattr(sampler, name, None)
        resized = _resize(inner, batch_size) if isinstance(inner, BatchSampler) or name == "batch_sampler" else None
        if resized is not None:
            object.__setattr__(sampler, name, resized)
            return True
    return False


def _holds_batches(sampler: Any, batch_size: int) -> bool:
    """Whether a batch sampler has an attribute that is a list of batches, each of so many indices but for the last."""
    for value in vars(sampler).values():
        if isinstance(value, (list, tuple)) and len(value) > 1:
            with contextlib.suppress(TypeError, IndexError):  # of something else
                operator.index(value[0][0])
                if all(len(part) == batch_size for part in value[:-1]):
                    return True
    return False


def _copy(value: Any) -> Any:
    """A shallow copy that has the original's bound methods as its own, and Lightning's records for itself."""
    copied = copy.copy(value)
    attributes = vars(copied)
    for name, part in list(attributes.items()):
        if isinstance(part, types.MethodType) and part.__self__ is value:
            attributes[name] = types.MethodType(part.__func__, copied)
        elif name in ("__pl_saved_kwargs", "__pl_attrs_record"):
            attributes[name] = copy.copy(part)
    return copied


def _change_recorded_arguments(value: Any, changes: Mapping[str, Any]) -> None:
    """Change the constructor arguments that Lightning has recorded, with which it makes loaders and samplers anew."""
    attributes = vars(value)
    if "__pl_saved_args" not in attributes:
        return
    names = attributes["__pl_saved_arg_names"]
    args, kwargs = list(attributes["__pl_saved_args"]), dict(attributes["__pl_saved_kwargs"])
    for name, new in changes.items():
        if name in names:
            args[names.index(name)] = new
        elif name in kwargs or name in attributes["__pl_saved_default_kwargs"]:
            kwargs[name] = new
    attributes.update({"__pl_saved_args": tuple(args), "__pl_saved_kwargs": kwargs})


# ---- the attributes ----


class _Place(NamedTuple):
    """An attribute that was set, or an item of a container among the attributes, and what it was before."""

    description: str
    container: Any
    name: str
    old: Any


def _set_attributes(owner: Any, setting: str, value: Any) -> list[_Place] | None:
    """Set what holds the setting on a module or datamodule; where that was, or None where it is ambiguous."""
    if owner is None:
        return []
    roots = [("attribute ", _Attributes(owner)), ("hparams.", getattr(owner, "__dict__", {}).get("_hparams"))]
    found = [(label, root, find_arguments(_as_tree(root, MAX_DEPTH), setting)) for label, root in roots]
    if any(len(paths) > 1 for _, _, paths in found):
        return None
    places = [
        _set_at(root, path.split("."), value, f"{label}{path} of {type(owner).__name__}")
        for label, root, paths in found
        for path in paths
    ]
    return [place for place in places if place is not None]


class _Attributes:
    """The attributes of a module that the user's code has given it, on itself or in its class."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def names(self) -> list[str]:
        """Those of the instance, then the numbers and flags of its classes."""
        own = [name for name in getattr(self.owner, "__dict__", {}) if name not in _OWN_ATTRIBUTES]
        for kind in type(self.owner).__mro__:
            if kind.__module__.partition(".")[0] not in _FRAMEWORKS:
                own += [name for name, value in vars(kind).items() if isinstance(value, int)]
        return list(dict.fromkeys(own))


def _as_tree(value: Any, depth: int) -> Any:
    """Plain nested mappings of the numbers and flags in a container, as `find_arguments` takes them."""
    fields = _fields(value) if depth >= 0 else None
    if fields is None:
        return {}
    tree: dict[str, Any] = {}
    for name, part in fields.items():
        if isinstance(part, int) or (isinstance(part, str) and part.startswith("${")):
            tree[name] = part
        elif not isinstance(part, (str, nn.Module)):
            tree[name] = _as_tree(part, depth - 1)
    return tree


def _fields(value: Any) -> dict[str, Any] | None:
    """The named parts of a container of settings; None where it is anything else."""
    fields: Any = None
    with contextlib.suppress(Exception):  # the user's properties may do anything
        if isinstance(value, _Attributes):
            return {name: _read_attribute(value.owner, name) for name in value.names()}
        if _is_omegaconf(value):
            value = sys.modules["omegaconf"].OmegaConf.to_container(value)  # interpolations as they are written
        if isinstance(value, dict):
            fields = value if len(value) <= MAX_ITEMS else None
        elif isinstance(value, (list, tuple)):
            fields = {str(index): part for index, part in enumerate(value)} if len(value) <= MAX_ITEMS else None
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        elif isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
            fields = vars(value)
    return None if fields is None else {name: part for name, part in fields.items() if isinstance(name, str)}


def _read_attribute(owner: Any, name: str) -> Any:
    with contextlib.suppress(Exception):  # a property of the user's
        return getattr(owner, name)
    return None


def _is_omegaconf(value: Any) -> bool:
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig))


def _set_at(root: Any, path: list[str], value: Any, description: str) -> _Place | None:
    """Set a part of nested containers and read it back; None where that cannot be done."""
    *parents, last = path
    with contextlib.suppress(Exception):  # a frozen container, or a property of the user's that raises
        container = functools.reduce(_get, parents, root)
        place = _Place(description, container, last, _get(container, last))
        _set(container, last, value)
        return place if _get(container, last) == value else None
    return None


def _get(container: Any, name: str) -> Any:
    if isinstance(container, _Attributes):
        return getattr(container.owner, name)
    if isinstance(container, dict):
        return container[name]
    if isinstance(container, (list, tuple)):
        return container[int(name)]
    if _is_omegaconf(container):
        return container[int(name)] if sys.modules["omegaconf"].OmegaConf.is_list(container) else container[name]
    return getattr(container, name)


def _set(container: Any, name: str, value: Any) -> None:
    if isinstance(container, dict):
        container[name] = value
    elif _is_omegaconf(container):
        with sys.modules["omegaconf"].read_write(container):
            container[name] = value
    elif dataclasses.is_dataclass(container):
        object.__setattr__(container, name, value)  # frozen ones too
    else:
        setattr(container.owner if isinstance(container, _Attributes) else container, name, value)
