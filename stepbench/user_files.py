"""What the user's own configuration says beside its classes, read where cells are composed: without torch.

The files of a LightningCLI program are only looked into here, for how many processes they ask and what to call them;
it is `LightningCLI` itself that reads them, in the worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from stepbench.cli_classes import unwrapped
from stepbench.composition_errors import did_you_mean
from stepbench.loader_arguments import LOADER_SETTINGS, find_arguments
from stepbench.trainer_setup import NEVER_BUILT, is_set_aside_callback

DEFAULT_BATCH_SIZE = 32
"""Of a configuration that asks for `${batch_size}` where none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWishes:
    """What the user's own files ask of the trainer that stepbench has settings for too; None where they say nothing.

    `set_aside` names what they ask that is not followed.
    """

    precision: str | None = None
    accelerator: str | None = None
    num_devices: int | None = None
    strategy: str | None = None
    accumulate_grad_batches: int | None = None
    set_aside: tuple[str, ...] = ()


def read_wishes(trainer: Mapping[str, Any]) -> TrainerWishes:
    """The wishes in a trainer's arguments as far as they are plain values."""
    precision, devices = trainer.get("precision"), trainer.get("devices")
    number = len(devices) if isinstance(devices, list) else _whole_number(devices)
    num_devices = number if number is not None and number >= 1 else None
    return TrainerWishes(
        precision=str(precision) if isinstance(precision, (str, int)) and not _is_open(precision) else None,
        accelerator=_plain_text(trainer.get("accelerator")),
        num_devices=num_devices,
        strategy=_plain_text(trainer.get("strategy")),
        accumulate_grad_batches=_whole_number(trainer.get("accumulate_grad_batches")),
        set_aside=() if devices is None or num_devices is not None else (f"trainer.devices={devices}",),
    )


def _whole_number(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _plain_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value != "auto" and not _is_open(value) else None


def _is_open(value: Any) -> bool:
    """Whether a value is an interpolation that only the program's own parser resolves."""
    return isinstance(value, str) and "${" in value


# ---- a LightningCLI program's files ----


@dataclass(frozen=True, slots=True, kw_only=True)
class CliFiles:
    """The files as they are found, and what can be seen in them: wishes for the trainer, the classes' short names."""

    files: tuple[str, ...]
    sha256: tuple[str, ...]
    wishes: TrainerWishes
    model: str | None
    data: str | None


def read_cli_files(
    names: Sequence[str], directory: Path, overrides: Mapping[str, Any], problems: list[str]
) -> CliFiles:
    """Look into the files, of which later ones win, and `overrides` over all; what is wrong is added to `problems`.

    `sha256` has a digest for each file, and for each that they name in place of a section.
    """
    merged: dict[str, Any] = {}
    files, digests = [], []
    for name in names:
        path = (directory / Path(name).expanduser()).resolve()
        try:
            text = path.read_bytes()
            content = yaml.safe_load(text) if path.suffix != ".jsonnet" else {}
        except OSError as error:
            problems.append(f"cli_config: {name} cannot be read: {error.strerror}")
            continue
        except yaml.YAMLError as error:
            problems.append(f"cli_config: {name} is no YAML: {' '.join(str(error).split())}")
            continue
        if content is not None and not isinstance(content, dict):
            problems.append(f"cli_config: {name} must hold a mapping with model:, data: and trainer:")
            continue
        files.append(str(path))
        digests.append(hashlib.sha256(text).hexdigest())
        _merge(merged, _with_named_files(unwrapped(content or {}), path.parent, digests))
    _merge(merged, overrides)
    trainer = merged.get("trainer")
    return CliFiles(
        files=tuple(files),
        sha256=tuple(digests),
        wishes=read_wishes(trainer if isinstance(trainer, dict) else {}),
        model=_class_name(merged.get("model")),
        data=_class_name(merged.get("data")),
    )


def _with_named_files(content: Any, directory: Path, digests: list[str]) -> Any:
    """A file's content with what lies in files that it names in place of sections, whose digests are added."""
    if isinstance(content, dict):
        return {key: _with_named_files(value, directory, digests) for key, value in content.items()}
    if not (isinstance(content, str) and content.endswith((".yaml", ".yml"))):
        return content
    path = directory / content
    try:
        text = path.read_bytes()
        inner = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):  # no such file, or none for LightningCLI
        return content
    digests.append(hashlib.sha256(text).hexdigest())
    return _with_named_files(inner, path.parent, digests) if isinstance(inner, dict) else content


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _class_name(section: Any) -> str | None:
    path = section.get("class_path") if isinstance(section, dict) else section
    return path.rpartition(".")[2] if isinstance(path, str) else None


# ---- Hydra trees ----


def place_loader_settings(config: DictConfig, problems: list[str]) -> dict[str, str]:
    """Write the settings of the loaders that are given to the arguments that they are for, in `config` itself.

    Returns for each setting where it was written to, so that interpolations follow. Of data's arguments, of the
    module's where there is no data, it is the one with a usual name; for the batch size, what `batch_size_key` names.
    Loaders without workers take no persistent ones, whatever the user's own files say.
    """
    placed: dict[str, str] = {}
    group = "data" if config.get("data") else "model"
    if config.get("batch_size") is None and "${batch_size}" in OmegaConf.to_yaml(config):
        config.batch_size = DEFAULT_BATCH_SIZE
    node = config.get(group)
    if not isinstance(node, DictConfig):
        return placed
    arguments: Any = OmegaConf.to_container(node, resolve=False)
    for setting in LOADER_SETTINGS:
        value = config.get(setting)
        if setting == "persistent_workers" and value is None and config.get("num_workers") == 0:
            value = False
        key = config.get("batch_size_key") if setting == "batch_size" else None
        if value is None:
            continue
        if key is not None:
            path = _find_key(config, str(key), problems)
        else:
            found = find_arguments(arguments, setting)
            path = f"{group}.{found[0]}" if len(found) == 1 else None
        if path is not None:
            if not _has_value(config, path, value):
                with open_dict(config):
                    OmegaConf.update(config, path, value)
            placed[setting] = path
    return placed


def _has_value(config: DictConfig, path: str, value: Any) -> bool:
    try:
        return bool(OmegaConf.select(config, path) == value)
    except OmegaConfBaseException:
        return False


def _find_key(config: DictConfig, key: str, problems: list[str]) -> str | None:
    """The key as it is, or None, with a problem noted, where the configuration has no such key."""
    parent, _, name = key.rpartition(".")
    try:
        node = OmegaConf.select(config, parent) if parent else config
    except OmegaConfBaseException:
        node = None
    if isinstance(node, DictConfig) and (name in node or parent.endswith(".kwargs")):
        return key
    siblings = [str(sibling) for sibling in node] if isinstance(node, DictConfig) else []
    problems.append(f"batch_size_key={key}: the configuration has no such key{did_you_mean(name, siblings)}")
    return None


def gather_trainer(trainer: Mapping[str, Any], callbacks: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments of the user's trainer, callbacks included, and the names of what is set aside here already.

    Whatever names a directory of the run's would else make equal cells of two sweeps look different.
    """
    listed = trainer.get("callbacks") or []
    found = [*listed] if isinstance(listed, list) else [listed]
    found += [callback for callback in callbacks.values() if isinstance(callback, Mapping) and "_target_" in callback]
    kept = [callback for callback in found if not is_set_aside_callback(str(callback.get("_target_")))]
    aside = [name for name in trainer if name in (*NEVER_BUILT, "default_root_dir")]
    arguments = {
        name: value for name, value in trainer.items() if name not in (*aside, "callbacks", "_target_", *WISHES)
    }
    named = [f"trainer.{name}" for name in aside if trainer[name] is not None]
    named += [str(callback["_target_"]).rpartition(".")[2] for callback in found if callback not in kept]
    return {**arguments, **({"callbacks": kept} if kept else {})}, named


WISHES = ("precision", "accelerator", "devices", "accumulate_grad_batches")
"""Arguments of a trainer that are settings of the spec, whoever has set them."""
