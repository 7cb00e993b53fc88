"""What a program for `LightningCLI` is made of: its files as text, and the classes that it names."""

from __future__ import annotations

import contextlib
import importlib
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stepbench.lightning_package import PACKAGES, LightningPackage, load_package
from stepbench.record import CliProgram
from stepbench.user_code import find

FIT = "fit"

KEYS = {"imports": "cli_import", "cli_class": "cli_class", "model_class": "cli_model", "data_class": "cli_data"}
"""What the command line calls the fields of a program."""

BASES = ("LightningModule", "LightningDataModule", "LightningCLI")


class CliConfigError(ValueError):
    """The files cannot be made into a program. The message is one line that names the file and the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CliFile:
    """A file, and what it holds as far as it can be told without a parser; that is for questions and messages only."""

    path: str
    text: str
    sections: Mapping[str, Any]


def read_file(path: str) -> CliFile:
    """Read a file. Raises CliConfigError where that cannot be."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CliConfigError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CliConfigError(f"{path} cannot be read: {error}") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:  # the parser will say it, or it is in another language
        content = None
    sections = content if isinstance(content, dict) else {}
    return CliFile(path=path, text=text, sections=unwrapped(sections))


def unwrapped(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a file says to `fit`, whether it has a section for each subcommand or is for `fit` alone."""
    section = content.get(FIT)
    return section if isinstance(section, dict) else content


@dataclass(frozen=True, slots=True, kw_only=True)
class UserClasses:
    """The classes that a program names, and the Lightning package that they are built on."""

    package: LightningPackage
    cli_class: type[Any]
    cli_name: str
    model_class: Any
    data_class: Any


def find_user_classes(cli: CliProgram, files: Sequence[CliFile]) -> UserClasses:
    """Import what the program names, and find the package. Raises CliConfigError where one does not go with another."""
    for name in cli.imports:
        _found("imports", name)
    cli_class = _found("cli_class", cli.cli_class)
    if cli.cli_class is not None and package_of_class(cli_class, ("LightningCLI",)) is None:
        raise CliConfigError(f"cli_class must name a subclass of LightningCLI, got {cli.cli_class}")
    model_class, data_class = _found("model_class", cli.model_class), _found("data_class", cli.data_class)
    told: dict[str | None, Any] = {cli.cli_class: cli_class}
    for section, given, value in (("model", cli.model_class, model_class), ("data", cli.data_class, data_class)):
        path = given or _class_path(cli, files, section)
        if path is None and cli.cli_class is None:
            _check_that_a_class_is_named(cli, files, section)
        told[path] = try_to_find(path) if value is None else value
    packages = {name: package_of_class(value, BASES) for name, value in told.items()}
    known = {name: package for name, package in packages.items() if package is not None}
    if len(set(known.values())) > 1:
        each = ", ".join(f"{name} on {package}" for name, package in known.items())
        raise CliConfigError(f"all must be built on one Lightning package, but {each}: import all from one")
    for key, told_name, value, base in (
        ("model_class", cli.model_class, model_class, "LightningModule"),
        ("data_class", cli.data_class, data_class, "LightningDataModule"),
    ):
        if isinstance(value, type) and package_of_class(value, (base,)) is None:
            raise CliConfigError(f"{KEYS[key]} must name a {base}, got {told_name}")
    package = load_package(next(iter(known.values()), PACKAGES[0]))
    return UserClasses(
        package=package,
        cli_class=importlib.import_module(f"{package.name}.cli").LightningCLI if cli_class is None else cli_class,
        cli_name=cli.cli_class or "LightningCLI",
        model_class=model_class,
        data_class=data_class,
    )


def _found(key: str, name: str | None) -> Any:
    try:
        return None if name is None else find(name)
    except ImportError as error:
        raise CliConfigError(f"{KEYS[key]}: {error}") from error


def _check_that_a_class_is_named(cli: CliProgram, files: Sequence[CliFile], section: str) -> None:
    """Raise CliConfigError where the files hold arguments of a class that none of them names."""
    for file in files:
        content = file.sections.get(section)
        if isinstance(content, dict) and content:
            raise CliConfigError(
                f"{file.path}: {section}: has arguments, but no class_path: name the class that they are for, "
                f"cli_{section}=my_package.my_module:MyClass"
            )


def _class_path(cli: CliProgram, files: Sequence[CliFile], section: str) -> str | None:
    """The class that the files name for a section, if they do so plainly."""
    for content in (cli.overrides, *(file.sections for file in reversed(files))):
        value = content.get(section)
        value = value.get("class_path") if isinstance(value, dict) else value
        if isinstance(value, str):
            return value
    return None


def try_to_find(name: str | None) -> Any:
    """The class of a name, None where there is none such: the parser will say so. Short names are of what is loaded."""
    if name is None or "${" in name:
        return None
    if "." not in name:
        for package in PACKAGES:
            for base in BASES[:2]:
                for loaded in _subclasses(getattr(sys.modules.get(package), base, None)):
                    if loaded.__name__ == name and loaded.__module__.partition(".")[0] != package.partition(".")[0]:
                        return loaded
        return None
    try:
        return find(name)
    except Exception:
        return None


def _subclasses(base: type[Any] | None) -> Iterator[type[Any]]:
    for subclass in () if base is None else base.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def package_of_class(value: Any, class_names: Sequence[str]) -> str | None:
    """The Lightning package of a class, or of what a function says to return."""
    if value is not None and not isinstance(value, type):
        with contextlib.suppress(Exception):
            value = typing.get_type_hints(value).get("return")
    for base in getattr(value, "__mro__", ()):
        for name in PACKAGES:
            if base.__name__ in class_names and base.__module__.startswith(f"{name}."):
                return name
    return None
