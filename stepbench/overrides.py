"""Makes numbers acceptable as choices of a config group: Hydra parses `precision=32` as an integer and refuses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig, open_dict

from stepbench.settings import conf_dir


def find_groups(arguments: Sequence[str]) -> frozenset[str]:
    """The config groups at hand: directories of our configuration and of the one that `--config-dir` names."""
    directories = [conf_dir()]
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            directories.append(Path(value or "".join(arguments[position + 1 : position + 2])))
    return frozenset(
        path.name for directory in directories if directory.is_dir() for path in directory.iterdir() if path.is_dir()
    )


def quote_arguments(arguments: Sequence[str]) -> list[str]:
    """The command line with the numeric choices of config groups quoted, everything else as it is."""
    groups = find_groups(arguments)
    return [quote_choices(argument, groups) for argument in arguments]


def quote_choices(argument: str, groups: Iterable[str]) -> str:
    """An override such as `precision=32,16-mixed` as `precision='32',16-mixed`; anything else comes back unchanged."""
    key = argument.partition("=")[0].lstrip("+")
    if key.partition("@")[0] not in groups or "=" not in argument:
        return argument
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return argument  # Hydra says what is wrong with it
    value: Any = override.value()
    prefix = argument.partition("=")[0] + "="
    if isinstance(value, ChoiceSweep):
        choices = ",".join(_quoted(choice) for choice in value.list)
        return prefix + (choices if value.simple_form else f"choice({choices})")
    return prefix + _quoted(value) if _is_number(value) else argument


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _quoted(choice: Any) -> str:
    if _is_number(choice):
        return f"'{choice}'"
    return choice.with_quotes() if isinstance(choice, QuotedString) else str(choice)


class QuoteSweepParameters(Callback):
    """Does for a sweep file's `hydra.sweeper.params` what `quote_arguments` does for the command line."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Rewrite the parameters in place, before the sweeper reads them."""
        parameters = config.hydra.sweeper.get("params") or {}
        groups = find_groups([])
        with open_dict(config):
            for key, value in list(parameters.items()):
                text = ",".join(map(str, value)) if isinstance(value, ListConfig) else str(value)
                if key in groups:
                    parameters[key] = quote_choices(f"{key}={text}", groups).partition("=")[2]
