"""What Hydra finds wrong with a command line, in the words of someone who only wants to measure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

FREE_ARGUMENTS = ("model.", "data.", "trainer.", "optimizer.", "lr_scheduler.")
"""Where a key that the configuration does not declare may be meant: an argument of the user's class."""

NO_SETTINGS = ("hydra", "_target_")
"""Keys that are there but are not for the user to set."""


def explain(error: Exception) -> str:
    """One problem for a person to read; what is not recognized comes in Hydra's own words."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        return _explain_choice(str(error.missing_cfg_file), error.options)
    if isinstance(cause, OmegaConfBaseException) and "is not in struct" in str(cause):
        typed = re.match(r"Could not override '([^']+)'", str(error))
        return _explain_key(str(cause.full_key), cause.parent_node, typed[1] if typed else "")
    text = str(error) or type(error).__name__
    if text.startswith("Ambiguous value for argument"):
        argument = text.partition("'")[2].partition("'\n")[0]
        return f"{argument} has several values: add -m to measure each of them"
    return f"{text}: {cause}" if isinstance(cause, OmegaConfBaseException) else text


def _explain_choice(config_file: str, options: Iterable[str]) -> str:
    group, _, choice = config_file.partition("/")
    if group in ("model", "data") and re.search(r"[^.][.:][^.]", choice):
        return (
            f"{group}={choice}: there is no such choice: a class of yours is given by its path, "
            f"{group}=custom {group}.path={choice}"
        )
    return (
        f"{group}={choice}: there is no such choice{did_you_mean(choice, options)}; choices: {', '.join(options)} "
        "(those of your own are found with --config-dir DIRECTORY)"
    )


def _explain_key(key: str, parent: object, typed: str) -> str:
    prefix, _, name = key.rpartition(".")
    names = list(parent) if isinstance(parent, DictConfig) else []
    siblings = [str(sibling) for sibling in names if sibling not in NO_SETTINGS]
    text = f"there is no setting {key}{did_you_mean(name, siblings)}"
    if siblings:
        text += f"; {f'settings of {prefix}' if prefix else 'settings'}: {', '.join(siblings)}"
    if key.startswith(FREE_ARGUMENTS):
        text += f" (a further argument of the class is given as +{typed or key}=VALUE)"
    return text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean batch_size?` where one of the known words is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
