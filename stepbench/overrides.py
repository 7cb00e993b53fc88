"""Makes Hydra accept what people type: numbers as choices of a config group, and flags between overrides.

Hydra parses `precision=32` as an integer and refuses it as a choice; and its command line ends where a flag follows an
override, as in `model=mine -m batch_size=8,16`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, QuotedString, RangeSweep
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from yaml import YAMLError

from stepbench.settings import conf_dir

IMPLIED = ("model=none", "data=none")
"""What is chosen beside files for LightningCLI, which name module and data."""


def config_directories(arguments: Sequence[str]) -> list[Path]:
    """Where configuration files lie: our own directory and the one that `--config-dir` names."""
    directories = [conf_dir()]
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            directories.append(Path(value or "".join(arguments[position + 1 : position + 2])))
    return [directory for directory in directories if directory.is_dir()]


def find_groups(directories: Sequence[Path]) -> dict[str, list[str]]:
    """The config groups of these directories, by name, with their choices."""
    groups: dict[str, list[str]] = {}
    for directory in directories:
        for path in sorted(directory.glob("*/*.yaml")):
            groups.setdefault(path.parent.name, []).append(path.stem)
    return groups


def prepare_arguments(arguments: Sequence[str]) -> list[str]:
    """The command line with flags before overrides and with the numeric choices of config groups quoted.

    Ends the process with Hydra's own usage message where a flag is unknown.
    """
    groups = find_groups(config_directories(arguments))
    overrides = list(get_args_parser().parse_intermixed_args(list(arguments)).overrides)
    left = list(overrides)
    flags = [argument for argument in arguments if not (left and argument == left[0] and left.pop(0))]
    keys = {override.partition("=")[0].lstrip("+") for override in overrides}
    if "cli_config" in keys:  # its files name module and data
        overrides += [choice for choice in IMPLIED if choice.partition("=")[0] not in keys]
    return [*flags, *(quote_choices(override, groups) for override in overrides)]


def find_project_root(arguments: Sequence[str]) -> Path:
    """What the environment variable PROJECT_ROOT is to be where it is not set, as some templates for projects expect.

    The nearest directory with a file `.project-root`, from the configuration directory upwards; else the working one.
    """
    for start in [*config_directories(arguments)[1:], Path.cwd()]:
        for directory in (start.resolve(), *start.resolve().parents):
            if (directory / ".project-root").exists():
                return directory
    return Path.cwd()


def find_choices(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The choices of config groups on a prepared command line, as group and choice."""
    groups = find_groups(config_directories(arguments))
    pairs = (argument.lstrip("+").partition("=") for argument in arguments)
    return [
        (group, choice.strip("'")) for group, _, choices in pairs if group in groups for choice in choices.split(",")
    ]


def find_unquoted_choices(arguments: Sequence[str]) -> list[str]:
    """What is wrong with numbers that stand as choices in the defaults lists of the user's files, a line for each."""
    problems = []
    for directory in config_directories(arguments):
        for path in sorted(directory.rglob("*.yaml")):
            try:
                config = OmegaConf.load(path)
            except (OSError, ValueError, YAMLError):
                continue  # not the file in question, else Hydra had said so
            defaults = config.get("defaults") if isinstance(config, DictConfig) else None
            for entry in defaults if isinstance(defaults, ListConfig) else ():
                for key, choice in entry.items() if isinstance(entry, DictConfig) else ():
                    if _is_number(choice):
                        found = f"{path}: {key!s}: {choice} in the defaults list"
                        problems.append(f'{found}; write it in quotes: "{choice}"')
    return problems


def quote_choices(argument: str, groups: Mapping[str, Sequence[str]]) -> str:
    """An override such as `precision=32,16-mixed` as `precision='32',16-mixed`; anything else comes back unchanged.

    `choice(…)`, `range(…)` and `glob(…)` over a group are written out, since Hydra would drop the quotes inside them.
    """
    key = argument.partition("=")[0].lstrip("+")
    group = key.partition("@")[0]
    if group not in groups or "=" not in argument:
        return argument
    try:
        override = OverridesParser.create().parse_override(argument)
        value: Any = override.value()
        if isinstance(value, ChoiceSweep):
            choices: list[Any] = list(value.list)
        elif isinstance(value, RangeSweep):
            choices = list(value.range())
        elif isinstance(value, Glob):
            patterns = Glob(include=[str(p) for p in value.include], exclude=[str(p) for p in value.exclude])
            choices = list(patterns.filter(list(groups[group])))
        else:
            choices = [value] if _is_number(value) else []
    except HydraException:
        return argument  # Hydra says what is wrong with it
    if not choices:
        return argument
    return argument.partition("=")[0] + "=" + ",".join(_quoted(choice) for choice in choices)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _looks_like_a_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _quoted(choice: Any) -> str:
    if _is_number(choice) or (isinstance(choice, str) and _looks_like_a_number(choice)):
        return f"'{choice}'"
    return choice.with_quotes() if isinstance(choice, QuotedString) else str(choice)


class QuoteSweepParameters(Callback):
    """Does for a sweep file's `hydra.sweeper.params` what `prepare_arguments` does for the command line."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Rewrite the parameters in place, before the sweeper reads them."""
        parameters = config.hydra.sweeper.get("params") or {}
        groups = find_groups([Path(source.path) for source in config.hydra.runtime.config_sources])
        with open_dict(config):
            for key, value in list(parameters.items()):
                text = ",".join(map(str, value)) if isinstance(value, ListConfig) else str(value)
                if str(key).lstrip("+") in groups:
                    parameters[key] = quote_choices(f"{key}={text}", groups).partition("=")[2]
