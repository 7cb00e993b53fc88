"""The axes of a study: which settings vary between its cells, found from the recorded specs, and their labels."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepbench.record import CUSTOM, Component, EffectiveSettings, RunRecord, RunRequest, RunSpec, canonical_json

PRECISION_SPELLINGS = {"32-true": "32", "64-true": "64", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Lightning's several spellings of one precision: a run that shows the other one ran as requested."""

EFFECTIVE_TWINS = {"data.num_workers": "num_workers"} | {
    field.name: field.name
    for field in dataclasses.fields(EffectiveSettings)
    if field.name in {spec_field.name for spec_field in dataclasses.fields(RunSpec)}
}
"""A requested axis and the effective setting that tells whether it ran so."""

GROUPS = ("model", "data", "precision")
"""Config groups whose chosen option is the best label of what was asked for."""

DECISIVE_AXES = {"float32_matmul_precision": "precision"}
"""An axis that the other decides where its option sets both (the precision option `tf32`)."""

NOT_AN_X_AXIS = ("seed",)
"""Numeric, but order and distance mean nothing."""

PLACES = ("host", "device", "sweep")
"""Where and when cells ran; settings of a study over several sweeps only."""

RESOURCES = ("num_devices",)
"""What a cell had to work with: more of it is no better way to do the same work."""

TITLES = {"batch_size": "batch size", "num_devices": "devices"}
"""Names in words where the setting's own is none."""

LEFT_OPEN = ("batch_size", "precision", "accumulate_grad_batches")
"""Settings that the user's own files may have decided: without a value of their own they are called what ran."""

UNSET = {"compile": "off"}
"""What a setting without a value is called where it is not left open."""

LOADER_ARGUMENTS = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
"""Arguments of a data module that change how samples are loaded; any other one changes the samples."""

USUAL_SETTINGS = {
    "num_devices": 1,
    "strategy": None,
    "accumulate_grad_batches": 1,
    "compile": None,
    "num_workers": None,
    "pin_memory": None,
    "persistent_workers": None,
    "data.num_workers": 0,
}
"""Settings that a cell's label names only where they are others than these."""

SELF_EXPLAINING = ("model", "data", "accelerator", *PLACES)
"""Axes whose values say without their axis's name what they are."""

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A setting that varies in a study, its name in words, and the requested values, in numeric order if numeric."""

    name: str
    title: str
    values: tuple[Value, ...]

    @property
    def is_numeric(self) -> bool:
        """Whether distances along the axis mean something."""
        return self.name not in NOT_AN_X_AXIS and all(is_number(value) for value in self.values)

    @property
    def column(self) -> str:
        """The column of `runs.csv` and `cells.csv` that holds the requested value."""
        return requested_column(self.name)

    @property
    def short_title(self) -> str:
        """The name before a value: `batch 16`, `num_workers 2`."""
        return self.title.removesuffix(" size")

    @property
    def is_choice(self) -> bool:
        """Whether its values are ways to do the same work, so that one can be the best: no other model or machine."""
        group, _, last = self.name.partition(".")
        if group == "data":
            return last in LOADER_ARGUMENTS
        return group not in ("model", *NOT_AN_X_AXIS, *PLACES, *RESOURCES)


def is_number(value: object) -> bool:
    """Whether a value is a number (true and false are not)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def requested_column(name: str) -> str:
    """The column for a requested setting: with the prefix `requested_` where an effective one stands beside it."""
    return f"requested_{name}" if name in EFFECTIVE_TWINS and name != "batch_size" and "." not in name else name


def flatten_request(request: RunRequest) -> dict[str, Value]:
    """Every setting of a request by its dotted name: the spec's own fields, then the arguments of what it builds."""
    spec, choices = request.spec, dict(request.choices)
    flat: dict[str, Value] = {}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        default = re.split("[.:]", value.target)[-1] if isinstance(value, Component) else value
        if field.name not in ("cli", "trainer"):
            choice = choices.get(field.name) if field.name in GROUPS else None
            flat[field.name] = default if choice in (None, CUSTOM) else choice
    for name in ("model", "data", "trainer"):
        component = getattr(spec, name)
        flat |= {} if component is None else _flatten(name, component.arguments)
    if spec.cli is not None:
        flat["cli_config"] = " ".join("/".join(Path(file).parts[-2:]) for file in spec.cli.files)
        for name, value in spec.cli.overrides.items():
            flat |= _flatten(name, value)
    return flat


def _flatten(prefix: str, value: Any) -> dict[str, Value]:
    if isinstance(value, Mapping) and value:
        return {key: leaf for name, inner in value.items() for key, leaf in _flatten(f"{prefix}.{name}", inner).items()}
    plain = value if value is None or isinstance(value, str | int | float | bool) else canonical_json(value)
    return {} if value == {} and "." not in prefix else {prefix: plain}


def find_axes(settings: Sequence[Mapping[str, Value]]) -> tuple[Axis, ...]:
    """The settings with more than one value over these cells, without those that only relabel an earlier one."""
    names = list(dict.fromkeys(name for cell in settings for name in cell))
    columns = {name: [cell.get(name) for cell in settings] for name in names}
    kept: list[str] = []
    for name in names:
        if len({_key(value) for value in columns[name]}) > 1 and not _is_redundant(name, kept, columns):
            kept.append(name)
    short = [name.rpartition(".")[2] for name in kept]
    titles = [
        TITLES.get(name, last if short.count(last) == 1 else name) for name, last in zip(kept, short, strict=True)
    ]
    return tuple(
        Axis(name=name, title=title, values=_ordered(columns[name])) for name, title in zip(kept, titles, strict=True)
    )


def _is_redundant(name: str, kept: Sequence[str], columns: Mapping[str, Sequence[Value]]) -> bool:
    """Whether the axes kept so far already tell this one's values apart: a derived setting, not a choice of its own."""
    owner = DECISIVE_AXES.get(name, name.partition(".")[0])
    if owner in kept and owner != name and _decides(columns[owner], columns[name]):
        return True
    if "." not in name and name not in ("data", "cli_config"):
        return False
    candidates = kept if "." in name else [other for other in kept if other == "model"]
    return any(_decides(columns[o], columns[name]) and _decides(columns[name], columns[o]) for o in candidates)


def _decides(first: Sequence[Value], second: Sequence[Value]) -> bool:
    return len({_key(a) for a in first}) == len({(_key(a), _key(b)) for a, b in zip(first, second, strict=True)})


def _key(value: Value) -> tuple[str, Value]:
    """True and 1 are different settings; 1 and 1.0 are not."""
    return ("number" if is_number(value) else type(value).__name__, value)


def _ordered(values: Sequence[Value]) -> tuple[Value, ...]:
    unique = list({_key(value): value for value in values}.values())
    if all(value is None or is_number(value) for value in unique):
        unique.sort(key=lambda value: (value is not None, value if is_number(value) else 0))
    return tuple(unique)


def choose_x_axis(axes: Sequence[Axis]) -> Axis | None:
    """The axis to plot against: batch size where it varies, else the first numeric one, else None."""
    numeric = [axis for axis in axes if axis.is_numeric]
    return next((axis for axis in numeric if axis.name == "batch_size"), numeric[0] if numeric else None)


# ---- labels: what ran, not what was asked ----


def list_names(names: Sequence[str | tuple[str, str]]) -> str:
    """Names, or names with what belongs to them, in one line: `gradient_clip_val 1.0, deterministic True`."""
    return ", ".join(name if isinstance(name, str) else " ".join(name) for name in names)


def ran_differently(name: str, requested: Value, effective: Value) -> bool:
    """Whether a setting ran as something else than requested. Unknown, left open or spelled otherwise is not."""
    if effective is None or requested is None:
        return False
    if name == "precision":
        return _plain_precision(requested) != _plain_precision(effective)
    if name == "strategy":
        return requested != "auto" and not _plain_strategy(requested).startswith(_plain_strategy(effective))
    return bool(requested != effective)


def _plain_precision(value: Value) -> str:
    return PRECISION_SPELLINGS.get(str(value), str(value))


def _plain_strategy(value: Value) -> str:
    """`ddp` for `DDPStrategy`, as which `ddp`, `ddp_spawn` and other variants of it run."""
    return str(value).lower().replace("_", "").removesuffix("strategy")


def find_differences(record: RunRecord) -> dict[str, tuple[Value, Value]]:
    """Requested and effective value of every setting of a run that ran as something else, by name."""
    if record.effective is None:
        return {}
    requested = flatten_request(record.request) | {"precision": record.request.spec.precision}
    pairs = {name: (requested.get(name), getattr(record.effective, twin)) for name, twin in EFFECTIVE_TWINS.items()}
    pairs["timer"] = (record.request.timer, record.effective.timer)
    return {name: pair for name, pair in pairs.items() if ran_differently(name, *pair)}


def label_value(value: Value, name: str = "") -> str:
    """A requested value for people; `name` tells which setting's, where one without a value has a word of its own."""
    if value is None:
        return UNSET.get(name, "default")
    return str(value).lower() if isinstance(value, bool) else str(value)


def label_setting(name: str, value: Value, records: Sequence[RunRecord]) -> str:
    """`16-mixed (ran as bf16-mixed)`: a requested value with what it ran as in these runs where that is another."""
    if name not in EFFECTIVE_TWINS:
        return label_value(value, name)
    if value is None and name in LEFT_OPEN:
        ran = {getattr(record.effective, name) for record in records if record.effective is not None} - {None}
        return " or ".join(sorted(map(str, ran))) or label_value(value, name)
    ran_as = [find_differences(record)[name][1] for record in records if name in find_differences(record)]
    suffix = " or ".join(dict.fromkeys(label_value(effective) for effective in ran_as))
    return f"{label_value(value, name)} (ran as {suffix})" if suffix else label_value(value, name)


def label_combination(labels: Mapping[str, str]) -> str:
    """One label for several settings, by axis title: `autoencoder, precision 32`; of a single one its value alone."""
    if len(labels) == 1:
        return next(iter(labels.values()))
    if not labels:
        return label_value(None)
    return ", ".join(label if title in SELF_EXPLAINING else f"{title} {label}" for title, label in labels.items())


def label_request(request: RunRequest, records: Sequence[RunRecord]) -> str:
    """A cell's settings without its study: `batch 16, precision 32`, then those that are not as they mostly are."""
    flat = flatten_request(request)
    batch_size = label_setting("batch_size", flat["batch_size"], records)
    parts = [f"batch {batch_size}", f"precision {label_setting('precision', flat['precision'], records)}"]
    for name, usual in USUAL_SETTINGS.items():
        value = flat.get(name)
        if value is not None and value != usual:
            parts.append(f"{TITLES.get(name, name.rpartition('.')[2])} {label_setting(name, value, records)}")
    return ", ".join(parts)
