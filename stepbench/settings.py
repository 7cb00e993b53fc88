"""From the composed configuration to a `RunRequest`, with every check of a value that needs no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stepbench.clock import TIMERS
from stepbench.composition_errors import did_you_mean
from stepbench.record import Component, Protocol, RunRequest, RunSpec, Sampling, canonical_json

WORKER_STARTS = ("auto", "fork", "spawn")
FREE_GROUPS = ("model", "data")
"""Config groups whose keys belong to the user's classes."""

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

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._taken: set[str] = set()
        self.problems: list[str] = []

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

    def find_unused(self, text: str) -> None:
        """Note keys that change nothing: those of our own groups that nobody takes, and plain values beside them.

        A plain value that another one is made of (`${name}` in the unresolved configuration, `text`) is the user's.
        """
        for key, value in self._values.items():
            prefix = f"{key}."
            known = {taken.removeprefix(prefix) for taken in self._taken if taken.startswith(prefix)}
            if isinstance(value, Mapping):
                unused = [prefix + name for name in value if key not in FREE_GROUPS and known and name not in known]
                self.problems += [f"there is no setting {name}{did_you_mean(name, self._taken)}" for name in unused]
            elif key not in self._taken and f"${{{key}}}" not in text:
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
        if any(part in (name or "") for part in STRATEGIES_WITHOUT_RECORDS):
            self.problems.append(
                f"{key} must be one that starts each process as a command, such as ddp, which measures the same, got "
                f"{name!r}: the results of processes that it starts another way come back through no file"
            )
        return None if name == "auto" else name

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

    def function_path(self, key: str) -> Any:
        """The dotted path of a function, or None."""
        return self.take(
            key,
            lambda v: v is None or (isinstance(v, str) and "." in v.strip(".")),
            "the dotted path of a function, such as my_module.count_samples, or null",
        )

    def component(self, key: str) -> Component:
        target = self.take(
            f"{key}._target_", lambda v: isinstance(v, str) and "." in v.strip("."), "an importable dotted path"
        )
        arguments = {name: value for name, value in (self._values.get(key) or {}).items() if name != "_target_"}
        try:
            return Component(target=target or "", arguments_json=canonical_json(arguments))
        except ValueError:
            self.problems.append(f"{key} holds an infinity or a NaN among its arguments, which no record can hold")
            return Component(target="")


def read_request(config: DictConfig, choices: Mapping[str, str]) -> RunRequest:
    """Check a composed configuration and freeze it. Raises `SettingsError` with every problem found."""
    checker = _Checker(_resolve(config))
    model, data = checker.component("model"), checker.component("data")
    spec = {
        "batch_size": checker.whole_number("batch_size", minimum=1),
        "precision": checker.choice("precision.trainer", PRECISIONS),
        "accelerator": checker.take("device.accelerator", lambda v: isinstance(v, str) and v != "", "a name"),
        "num_devices": checker.whole_number("devices", minimum=1),
        "strategy": checker.strategy("strategy"),
        "accumulate_grad_batches": checker.whole_number("accumulate_grad_batches", minimum=1),
        "compile": checker.compile_mode("compile"),
        "seed": checker.take("seed", lambda v: _is_int(v) and 0 <= v < 2**32, "a whole number from 0 to 2^32 - 1"),
        "num_threads": checker.whole_number("device.num_threads", minimum=1, optional=True),
        "float32_matmul_precision": checker.choice(
            "precision.float32_matmul_precision", MATMUL_PRECISIONS, optional=True
        ),
    }
    protocol = {
        "name": choices.get("protocol", "custom"),
        "warmup_batches": checker.whole_number("protocol.warmup_batches", minimum=0),
        "warmup_s": checker.seconds("protocol.warmup_s"),
        "timed_batches": checker.whole_number("protocol.timed_batches", minimum=1),
        "timed_s": checker.seconds("protocol.timed_s"),
        "epochs": checker.whole_number("protocol.epochs", minimum=1, optional=True),
    }
    timer = checker.choice("timer", TIMERS)
    sampling = checker.sampling("sampling")
    batch_size_fn = checker.function_path("batch_size_fn")
    timeout_s = checker.seconds("timeout_s", positive=True, optional=True)
    checker.choice("worker_start", WORKER_STARTS)
    checker.take("plots", lambda v: isinstance(v, bool), "true or false")
    checker.find_unused(OmegaConf.to_yaml(config))
    if checker.problems:
        raise SettingsError(checker.problems)
    return RunRequest(
        spec=RunSpec(model=model, data=data, **spec),
        protocol=Protocol(**protocol),
        timer=timer,
        sampling=sampling,
        batch_size_fn=batch_size_fn,
        timeout_s=timeout_s,
        choices=tuple((group, choices[group]) for group in GROUPS_SHOWN if choices.get(group)),
    )


def _resolve(config: DictConfig) -> dict[str, Any]:
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise SettingsError([f"{key} is required and has no default: give it as {key}=VALUE" for key in missing])
        plain = OmegaConf.to_container(config, resolve=True)
        json.dumps(plain)
    except OmegaConfBaseException as error:
        raise SettingsError([f"{error.full_key or 'the configuration'} cannot be resolved: {error.msg}"]) from error
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


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
