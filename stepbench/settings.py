"""From the composed configuration to a `RunRequest`, with every check of a value that needs no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stepbench import user_files
from stepbench.clock import TIMERS
from stepbench.composition_errors import did_you_mean
from stepbench.profile_files import EVERY_CELL, PROFILERS, SLOWEST
from stepbench.record import (
    RUN_DIRECTORY,
    CliProgram,
    Component,
    ProfileRequest,
    Protocol,
    RunRequest,
    RunSpec,
    Sampling,
    canonical_json,
)
from stepbench.user_files import TrainerWishes

WORKER_STARTS = ("auto", "fork", "spawn")
FREE_GROUPS = ("model", "data", "trainer")
"""Config groups whose keys belong to the user's classes."""

NAMING_GROUPS = ("callbacks", "logger", "paths", "extras", "local")
"""Config groups that a directory of the user's may have, and no program of LightningCLI knows."""

GROUPS_SHOWN = ("model", "data", "precision", "device", "protocol")
"""Config groups whose choices label a cell."""

PRECISIONS = (
    "64",
    "64-true",
    "32",
    "32-true",
    "16",
    "16-mixed",
    "16-true",
    "bf16",
    "bf16-mixed",
    "bf16-true",
    "transformer-engine",
    "transformer-engine-float16",
)
"""The spellings that Lightning's Trainer takes."""

A_FUNCTION = "the path of a function, such as my_module:my_function"
A_CLASS = "an importable path, such as my_module:MyClass"

A_YEAR_S = 366 * 86_400

MATMUL_PRECISIONS = ("highest", "high", "medium")
"""What torch.set_float32_matmul_precision takes."""

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""The modes that torch.compile takes."""

STRATEGIES_WITHOUT_RECORDS = ("spawn", "fork", "notebook")
"""Parts of the names of Lightning's strategies whose processes are no runs of a command, so none leaves a record."""


class SettingsError(ValueError):
    """The request is wrong; `problems` has a line for each mistake, with the key, the value and what is accepted."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def conf_dir() -> Path:
    """The directory of the configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


class _Checker:
    """Takes values out of the configuration and gathers what is wrong with them."""

    def __init__(self, values: Mapping[str, Any], problems: Sequence[str], run_directory: Path | None) -> None:
        self._values = values
        self._run_directory = run_directory
        self._taken: set[str] = set()
        self.problems: list[str] = list(problems)

    def take(self, key: str, accepts: Callable[[Any], bool], expected: str) -> Any:
        """The value at a dotted key; None, with a problem noted, where it is missing or not accepted."""
        self._taken.add(key)
        value: Any = self._values
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                self.problems.append(f"{key} is missing; expected {expected}")
                return None
            value = value[part]
        if not accepts(value):
            self.problems.append(f"{key} must be {expected}, got {value!r}")
            return None
        return value

    def find_unused(self, text: str, typed: Collection[str] | None) -> None:
        """Note keys that change nothing: those of our own groups that nobody takes, and plain values beside them.

        A plain value that another one is made of (`${name}` in the unresolved configuration, `text`) is the user's, and
        so is one that was not `typed` but stands in a file of the user's.
        """
        for key, value in self._values.items():
            prefix = f"{key}."
            known = {taken.removeprefix(prefix) for taken in self._taken if taken.startswith(prefix)}
            if isinstance(value, Mapping):
                unused = [prefix + name for name in value if key not in FREE_GROUPS and known and name not in known]
                self.problems += [f"there is no setting {name}{did_you_mean(name, self._taken)}" for name in unused]
            elif key not in self._taken and f"${{{key}}}" not in text and (typed is None or key in typed):
                self.problems.append(f"there is no setting {key}{did_you_mean(key, self._taken)}")

    def whole_number(self, key: str, *, minimum: int, optional: bool = False) -> Any:
        expected = f"a whole number >= {minimum}" + (" or null" if optional else "")
        return self.take(key, lambda v: (optional and v is None) or (_is_int(v) and v >= minimum), expected)

    def seconds(self, key: str, *, positive: bool = False, optional: bool = False) -> Any:
        expected = f"seconds {'>' if positive else '>='} 0, at most a year{', or null' if optional else ''}"
        value = self.take(
            key,
            lambda v: (optional and v is None) or (_is_number(v) and (0 < v if positive else 0 <= v) and v <= A_YEAR_S),
            expected,
        )
        return None if value is None else float(value)

    def positive_number(self, key: str) -> Any:
        value = self.take(key, lambda v: v is None or (_is_number(v) and v > 0), "a number > 0, or null")
        return None if value is None else float(value)

    def choice(self, key: str, options: Sequence[str], *, optional: bool = False) -> Any:
        expected = "one of " + ", ".join(options) + (", null" if optional else "")
        return self.take(key, lambda v: (optional and v is None) or (isinstance(v, str) and v in options), expected)

    def strategy(self, key: str) -> Any:
        """A Lightning strategy's name; None where Lightning chooses."""
        name = self.take(
            key,
            lambda v: v is None or (isinstance(v, str) and v != ""),
            "the name of a Lightning strategy, such as ddp, or null",
        )
        return None if name == "auto" else name

    def check_strategy(self, key: str, name: str | None) -> None:
        """Note a strategy, whoever has asked for it, whose processes leave nothing."""
        if any(part in (name or "") for part in STRATEGIES_WITHOUT_RECORDS):
            self.problems.append(
                f"{key} must be one that starts each process as a command, such as ddp, which measures the same, got "
                f"{name!r}: the results of processes that it starts another way come back through no file"
            )

    def compile_mode(self, key: str) -> Any:
        """A mode of torch.compile; None where the model stays as it is."""
        value = self.take(
            key,
            lambda v: isinstance(v, bool) or v in COMPILE_MODES,
            "true, false, or one of " + ", ".join(COMPILE_MODES),
        )
        return ("default" if value else None) if isinstance(value, bool) else value

    def sampling(self, key: str) -> Sampling | None:
        """Which optimizer steps are timed by phase; None where the timer chooses."""
        value = self.take(
            key,
            lambda v: v is None or _parse_sampling(v) is not None,
            "all, N/M with 1 <= N <= M such as 10/100, or null",
        )
        return _parse_sampling(value)

    def profile(self, key: str) -> ProfileRequest | None:
        """Which profiler looks into a cell, and over how much; None where none is asked for."""
        name = self.choice(f"{key}.name", PROFILERS, optional=True)
        warmup_batches = self.whole_number(f"{key}.warmup_batches", minimum=0)
        batches = self.whole_number(f"{key}.batches", minimum=1)
        memory = self.flag(f"{key}.memory") if "memory" in self.group(key) else False
        if memory and name not in (None, "pytorch"):
            self.problems.append(f"{key}.memory=true needs {key}=pytorch, got {name}")
        if name is None:
            return None
        return ProfileRequest(profiler=name, warmup_batches=warmup_batches, batches=batches, memory=memory)

    def path(self, key: str, expected: str) -> Any:
        """The import path of a function or class of the user's, or None."""
        return self.take(key, lambda v: v is None or _is_path(v), f"{expected}, or null")

    def names(self, key: str, what: str) -> list[str]:
        """A list of names; one alone may stand without the brackets."""
        value = self.take(
            key,
            lambda v: isinstance(v, str) or (isinstance(v, list) and all(isinstance(item, str) for item in v)),
            f"a list of {what}",
        )
        return [value] if isinstance(value, str) else value or []

    def flag(self, key: str, *, optional: bool = False) -> Any:
        return self.take(
            key,
            lambda v: isinstance(v, bool) or (optional and v is None),
            "true or false" + (", or null" if optional else ""),
        )

    def component(self, key: str) -> Component:
        """A class and its arguments: those beside `_target_`, or in `kwargs` beside a `path`."""
        node = self._values.get(key) or {}
        has_path = "path" in node and "_target_" not in node
        target = self.take(
            f"{key}.path" if has_path else f"{key}._target_",
            _is_path,
            "an importable path, such as my_package.my_module:MyClass or ./my_file.py:MyClass",
        )
        arguments = (node.get("kwargs") or {}) if has_path else {k: v for k, v in node.items() if k != "_target_"}
        if has_path:
            self._taken.add(f"{key}.kwargs")
        return self.make_component(key, target or "", arguments)

    def make_component(self, key: str, target: str, arguments: Mapping[str, Any]) -> Component:
        """A component, or an empty one with a problem noted where its arguments cannot be recorded."""
        try:
            text = canonical_json(arguments)
        except ValueError:
            self.problems.append(f"{key} holds an infinity or a NaN among its arguments, which no record can hold")
            return Component(target="")
        if self._run_directory is not None:
            text = text.replace(json.dumps(str(self._run_directory))[1:-1], RUN_DIRECTORY)
        return Component(target=target, arguments_json=text)

    def has(self, key: str) -> bool:
        """Whether a group has anything in it."""
        return bool(self._values.get(key))

    def group(self, key: str) -> dict[str, Any]:
        """A group of the user's, empty where there is none."""
        value = self._values.get(key)
        if isinstance(value, Mapping):
            return dict(value)
        if value is not None:
            self._taken.add(key)
            self.problems.append(f"{key} must be a group of settings, got {value!r}")
        return {}

    def rest(self) -> dict[str, Any]:
        """The groups that nothing has been taken of, but for those whose values only others are made of."""
        taken = {name.partition(".")[0] for name in self._taken}
        left = {key: value for key, value in self._values.items() if key not in (*taken, *NAMING_GROUPS)}
        return {key: value for key, value in left.items() if isinstance(value, Mapping) and value}


@dataclass(frozen=True, slots=True, kw_only=True)
class _UserProgram:
    """What is to be trained: fields of the spec, what the user's files ask of the trainer, and names for labels."""

    fields: dict[str, Any]
    wishes: TrainerWishes
    labels: dict[str, str]
    usual_trainer: Mapping[str, Any]
    set_aside: tuple[str, ...] = ()


def read_request(
    config: DictConfig,
    choices: Mapping[str, str],
    *,
    directory: Path = Path(),
    run_directory: Path | None = None,
    own_directory: bool = False,
    typed: Collection[str] | None = None,
) -> RunRequest:
    """Check a composed configuration and freeze it; `directory` is where the command was typed.

    Where arguments hold `run_directory`, the run's own, they hold `RUN_DIRECTORY` instead. `typed` are the keys of the
    command line, None where they are not known. The settings of the loaders are written to the arguments that they are
    for, in `config` itself. Raises `SettingsError` with every problem found.
    """
    problems: list[str] = []
    is_cli = config.get("cli_config") is not None
    placed = {} if is_cli else user_files.place_loader_settings(config, problems)
    checker = _Checker(_resolve(config), problems, run_directory)
    spec = {
        "batch_size": checker.whole_number("batch_size", minimum=1, optional=True),
        "num_workers": checker.whole_number("num_workers", minimum=0, optional=True),
        "pin_memory": checker.flag("pin_memory", optional=True),
        "persistent_workers": checker.flag("persistent_workers", optional=True),
        "setup_fn": checker.path("setup_fn", A_FUNCTION),
        "compile": checker.compile_mode("compile"),
        "num_threads": checker.whole_number("device.num_threads", minimum=1, optional=True),
        "float32_matmul_precision": checker.choice(
            "precision.float32_matmul_precision", MATMUL_PRECISIONS, optional=True
        ),
    }
    trainer = {
        "precision": checker.choice("precision.trainer", PRECISIONS, optional=True),
        "accelerator": checker.take(
            "device.accelerator", lambda v: v is None or (isinstance(v, str) and v != ""), "a name, or null"
        ),
        "num_devices": checker.whole_number("devices", minimum=1, optional=True),
        "strategy": checker.strategy("strategy"),
        "accumulate_grad_batches": checker.whole_number("accumulate_grad_batches", minimum=1, optional=True),
    }
    seed = checker.take(
        "seed", lambda v: v is None or (_is_int(v) and 0 <= v < 2**32), "a whole number from 0 to 2^32 - 1, or null"
    )
    protocol = {
        "name": choices.get("protocol", "custom"),
        "warmup_batches": checker.whole_number("protocol.warmup_batches", minimum=0),
        "warmup_s": checker.seconds("protocol.warmup_s"),
        "timed_batches": checker.whole_number("protocol.timed_batches", minimum=1),
        "timed_s": checker.seconds("protocol.timed_s"),
        "epochs": checker.whole_number("protocol.epochs", minimum=1, optional=True),
    }
    request = {
        "timer": checker.choice("timer", TIMERS),
        "sampling": checker.sampling("sampling"),
        "batch_size_fn": checker.path("batch_size_fn", A_FUNCTION),
        "batch_size_key": checker.take(
            "batch_size_key", lambda v: v is None or (isinstance(v, str) and v != ""), "a dotted key, or null"
        ),
        "timeout_s": checker.seconds("timeout_s", positive=True, optional=True),
        "count_flops": checker.flag("flops"),
        "peak_flop_per_s": checker.positive_number("device.peak_flop_per_s"),
    }
    profile = checker.profile("profiler")
    checker.take(
        "profile_cell",
        lambda v: v in (SLOWEST, EVERY_CELL) or (_is_int(v) and v >= 0),
        f"{SLOWEST}, {EVERY_CELL}, or the number of a cell's directory",
    )
    checker.choice("worker_start", WORKER_STARTS)
    checker.flag("plots")
    program = _read_cli(checker, choices, directory) if is_cli else _read_components(checker)
    trainer = _decide(trainer, program.wishes, usual=program.usual_trainer)
    checker.check_strategy("strategy", trainer["strategy"])
    checker.find_unused(OmegaConf.to_yaml(config), typed)
    if checker.problems:
        raise SettingsError(checker.problems)
    labels = {group: choices[group] for group in GROUPS_SHOWN if choices.get(group)} | program.labels
    if trainer["precision"] is not None and spec["float32_matmul_precision"] is None:
        labels |= {"precision": trainer["precision"]} if labels.get("precision") == INHERIT else {}
    elif labels.get("precision") == INHERIT:
        del labels["precision"]
    return RunRequest(
        spec=RunSpec(**spec, **trainer, **program.fields, seed=seed if seed is not None or is_cli else 0),
        protocol=Protocol(**protocol),
        **request,
        placed=tuple(placed.items()),
        set_aside=program.set_aside,
        own_directory=own_directory,
        profile=profile,
        choices=tuple(labels.items()),
    )


USUAL_TRAINER = {"precision": "32", "accelerator": "auto", "accumulate_grad_batches": 1}
"""What a trainer is asked for where neither the command line nor the user's files say anything."""

INHERIT = "inherit"
"""The choice of a precision that leaves it to the user's files."""


def _decide(asked: Mapping[str, Any], wishes: TrainerWishes, usual: Mapping[str, Any]) -> dict[str, Any]:
    """What the command line asks, then what the user's own files do, then what is usual."""
    decided = {}
    for name, value in asked.items():
        options = (value, getattr(wishes, name), usual.get(name))
        decided[name] = next((option for option in options if option is not None), None)
    decided["num_devices"] = decided["num_devices"] or 1
    return decided


def _read_components(checker: _Checker) -> _UserProgram:
    """A module, and a data module and a trainer where there are some, each a class with its arguments."""
    checker.take("cli_config", lambda v: v is None, "null")
    for key, what in CLI_KEYS.items():
        checker.take(key, lambda v: not v, f"null where there is no cli_config (it is {what})")
    fields: dict[str, Any] = {"model": None, "data": None}
    if checker.has("model"):
        fields["model"] = checker.component("model")
    else:
        checker.problems.append("model=none takes a cli_config=FILE, which names the module; or choose another model")
    if checker.has("data"):
        fields["data"] = checker.component("data")
    trainer, callbacks = checker.group("trainer"), checker.group("callbacks")
    arguments, set_aside = user_files.gather_trainer(trainer, callbacks)
    wishes = user_files.read_wishes(trainer)
    if isinstance(arguments.get("strategy"), str):
        del arguments["strategy"]
    if arguments or "_target_" in trainer:
        target = trainer.get("_target_") or "lightning.pytorch.Trainer"
        fields["trainer"] = checker.make_component("trainer", str(target), arguments)
    usual = {name: value for name, value in USUAL_TRAINER.items() if name != "precision" or "plugins" not in arguments}
    set_aside = [*set_aside, *wishes.set_aside]
    return _UserProgram(fields=fields, wishes=wishes, labels={}, usual_trainer=usual, set_aside=tuple(set_aside))


CLI_KEYS = {
    "cli_config_extra": "for more of its files",
    "cli_class": "for a subclass of LightningCLI",
    "cli_model": "for the class that its model: section has arguments of",
    "cli_data": "for the class that its data: section has arguments of",
    "cli_import": "for modules whose classes it gives short names",
}


def _read_cli(checker: _Checker, choices: Mapping[str, str], directory: Path) -> _UserProgram:
    """A program that is configured by files for LightningCLI, with whatever is set beside them laid over them."""
    names = [*checker.names("cli_config", "files"), *checker.names("cli_config_extra", "files")]
    classes = {
        "cli_class": checker.path("cli_class", A_CLASS),
        "model_class": checker.path("cli_model", A_CLASS),
        "data_class": checker.path("cli_data", A_CLASS),
    }
    imports = checker.names("cli_import", "modules")
    rest = checker.rest()
    files = user_files.read_cli_files(names, directory, rest, checker.problems)
    for key in ("model", "data"):
        if {"_target_", "path"} & set(checker.group(key)):
            checker.problems.append(
                f"{key}={choices.get(key)} and cli_config both name what to train; leave one out ({key}=none)"
            )
    overrides = checker.make_component("the settings laid over cli_config", "cli_config", rest)
    cli = CliProgram(
        files=files.files,
        sha256=files.sha256,
        imports=tuple(imports),
        overrides_json=overrides.arguments_json,
        **classes,
    )
    model, data = classes["model_class"] or files.model, classes["data_class"] or files.data
    labels = {
        "model": _short_name(model) if model else Path(names[0] if names else "").name,
        "data": _short_name(data) if data else "none",
    }
    return _UserProgram(
        fields={"cli": cli}, wishes=files.wishes, labels=labels, usual_trainer={}, set_aside=files.wishes.set_aside
    )


def _short_name(path: str) -> str:
    """The class's own name, of its import path."""
    return re.split("[.:]", path)[-1] or path


def _resolve(config: DictConfig) -> dict[str, Any]:
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise SettingsError([f"{key} is required and has no default: give it as {key}=VALUE" for key in missing])
        plain = OmegaConf.to_container(config, resolve=True)
        json.dumps(plain)
    except OmegaConfBaseException as error:
        what, why = error.full_key or "the configuration", str(error.msg).splitlines()[0]
        raise SettingsError([f"{what} cannot be resolved: {why}"]) from error
    except TypeError as error:
        raise SettingsError([f"the configuration holds a value that is no plain data: {error}"]) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def config_text(config: DictConfig) -> str:
    """The resolved configuration as a file that runs again as it is."""
    head = (
        "# What this cell ran, resolved. To run it again, from the directory that it was run from:\n"
        "#   python -m stepbench --config-dir THIS_DIRECTORY --config-name benchmark_config\n"
        "# Values can be changed on the command line, such as protocol.timed_s=5; groups cannot be chosen anew.\n"
        "defaults: [base, _self_]\n\n"
    )
    return head + OmegaConf.to_yaml(OmegaConf.create(_resolve(config)))


def _parse_sampling(value: Any) -> Sampling | None:
    """The sampling that `all` or `N/M` stands for; None for anything else."""
    if value == "all":
        return Sampling(timed_steps=1, period_steps=1)
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", value) if isinstance(value, str) else None
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        return None
    return Sampling(timed_steps=int(match[1]), period_steps=int(match[2]))


def _is_path(value: Any) -> bool:
    """Whether a value looks like the path of something to import: `a.b`, `a:b` or `./a.py:b`."""
    return isinstance(value, str) and bool(re.search(r"[^.:][.:][^.:]", value)) and not value.endswith((".", ":"))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
