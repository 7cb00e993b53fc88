"""Builds a program that is configured by files for `LightningCLI`: by that class itself, without running anything.

The command line is made and parses the files as `python main.py fit --config FILE` would; what a timing run must not
use is taken out of the configuration while it is still text, and the trainer is not made.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from stepbench.cli_classes import (
    FIT,
    CliConfigError,
    CliFile,
    UserClasses,
    find_user_classes,
    read_file,
    try_to_find,
    unwrapped,
)
from stepbench.cli_messages import RETOLD, file_names, one_line
from stepbench.lightning_package import LightningPackage
from stepbench.loader_arguments import LoaderSettings, find_arguments, get_at
from stepbench.record import CliProgram, RunSpec
from stepbench.trainer_setup import (
    NEVER_BUILT,
    UserTrainer,
    make_trainer,
    set_aside_callback_types,
    split_callbacks,
    trainer_defaults,
)
from stepbench.user_code import Program, hidden_command_line

MACHINE_ARGUMENTS = ("accelerator", "devices", "strategy", "precision", "sync_batchnorm", "plugins")

SEEN_OF_TRAINER = ("max_epochs", "max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")
"""What a trainer that is already made tells of its arguments."""

YAML_MODES = ("yaml", "json", "omegaconf", "omegaconf+")
"""Modes of the parser that can give way to one that resolves interpolations."""

NEAR_KEYS = 4

LINKED_TO_FIXED = "Target key expected to start with"
"""What jsonargparse says of a link to an argument of a class that the parser does not know."""


def build_cli_program(
    cli: CliProgram, *, wanted: LoaderSettings, seed: int | None, batch_size_key: str | None = None
) -> Program:
    """Build what the files describe, with the wanted loader settings where the configuration has an argument for them.

    `batch_size_key` is the dotted key of the batch size, such as `data.init_args.loader.batch_size`. Raises
    CliConfigError where the files cannot be used; an exception of the user's own code comes out as it was raised.
    """
    return build_cli_program_and_config(cli, wanted=wanted, seed=seed, batch_size_key=batch_size_key)[0]


def build_cli_program_and_config(
    cli: CliProgram, *, wanted: LoaderSettings, seed: int | None, batch_size_key: str | None = None
) -> tuple[Program, str]:
    """The program, and the whole configuration that it was built from, as YAML that `LightningCLI` reads again."""
    if importlib.util.find_spec("jsonargparse") is None:
        raise CliConfigError("files for LightningCLI need jsonargparse: pip install 'jsonargparse[signatures]'")
    files = [read_file(path) for path in cli.files]
    user = find_user_classes(cli, files)
    job = _Job(
        files=files,
        overrides=cli.overrides,
        package=user.package,
        wanted=wanted,
        seed=seed,
        batch_size_key=batch_size_key,
    )
    has_interpolations = any("${" in text for text in (*(file.text for file in files), cli.overrides_json))
    modes = _interpolation_modes() if has_interpolations else (None,)
    failure: CliConfigError | None = None
    for mode in modes:  # the second one can resolve what decides on classes, but only within each file
        job.parser_mode = mode
        try:
            return _build(user, job)
        except CliConfigError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _build(user: UserClasses, job: _Job) -> tuple[Program, str]:
    line = _quiet_class(user.cli_class, job)
    arguments = _constructor_arguments(user, job)
    with hidden_command_line():
        try:
            built = line(**arguments)
        except CliConfigError:
            raise
        except ValueError as error:
            if user.model_class is None and str(error).startswith(LINKED_TO_FIXED):
                fixed = f"{user.cli_name} links arguments of fixed classes: name them with cli_model= and cli_data="
                raise CliConfigError(fixed) from error
            original = _original_error(error)
            raise original from original.__cause__
        except SystemExit as error:
            raise CliConfigError(
                f"{file_names(job.files)}: {user.cli_name} ended with exit code {error.code}"
            ) from error
    trainer = _captured_trainer(built, job)
    program = Program(model=built.model, datamodule=built.datamodule, trainer=trainer, placed=dict(job.placed))
    return program, job.config_text


def _original_error(error: ValueError) -> BaseException:
    """What the user's constructor raised: jsonargparse tells of it as of a value that no type accepts."""
    original: BaseException = error
    while original.__cause__ is not None and str(original).lstrip().startswith(RETOLD):
        original = original.__cause__
    return original


def _constructor_arguments(user: UserClasses, job: _Job) -> dict[str, Any]:
    """What the command line is called with: as little as it takes. Raises CliConfigError where that is too little."""
    parameters = inspect.signature(user.cli_class).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    wished: dict[str, Any] = {"args": job.arguments(has_subcommands=True)}
    for key, value, section in (("model", user.model_class, "model"), ("datamodule", user.data_class, "data")):
        if value is None:
            continue
        wished[f"{key}_class"] = value
        if not takes_any and f"{key}_class" not in parameters:
            raise CliConfigError(f"{user.cli_name} takes no {key}_class: leave cli_{section} out")
        if job.names_a_class(section):
            wished[f"subclass_mode_{section}"] = True
    given = {name: value for name, value in wished.items() if takes_any or name in parameters}
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in given
    ]
    if needed:
        raise CliConfigError(f"{user.cli_name} needs {' and '.join(needed)}, which the benchmark cannot give it")
    return given


def _interpolation_modes() -> tuple[str | None, ...]:
    """The parser modes that resolve interpolations, of which the first does it when all is merged."""
    try:
        from jsonargparse import set_parsing_settings

        # the keys of a file are below `fit` when all is merged; what is relative finds its way there too
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    except (ImportError, TypeError):  # an older version
        return ("omegaconf",)
    return "omegaconf+", "omegaconf"


# ---- the job of one command line ----


@dataclass(slots=True, kw_only=True)
class _Job:
    """What a command line is to do, and what it has found on its way."""

    files: list[CliFile]
    overrides: dict[str, Any]
    package: LightningPackage
    wanted: LoaderSettings
    seed: int | None
    batch_size_key: str | None
    parser_mode: str | None = None
    failed_file: str | None = None
    placed: dict[str, str] = field(default_factory=dict)
    set_aside: list[str] = field(default_factory=list)
    trainer_class: Any = None
    trainer_arguments: dict[str, Any] | None = None
    config_text: str = ""
    subcommand_names: tuple[str, ...] = ()
    """What may stand at the top of a file that has a section for each subcommand."""

    def names_a_class(self, section: str) -> bool:
        """Whether the files or the overrides name a class in a section."""
        contents = (self.overrides, *(file.sections for file in self.files))
        return any("class_path" in value for content in contents if isinstance(value := content.get(section), dict))

    def arguments(self, *, has_subcommands: bool, placed: Mapping[str, Any] | None = None) -> list[str]:
        """The command line, with `placed` values by key at its end."""
        given = [*_flattened(self.overrides), *(placed or {}).items()]
        if self.seed is not None:
            given.append(("seed_everything", self.seed))
        if self.parser_mode == "omegaconf+":
            given = [(key, _with_relative_paths(value, key.count(".") + 1)) for key, value in given]
        return [
            *([FIT] if has_subcommands else []),
            *(f"--config={file.path}" for file in self.files),
            *(f"--{key}={_argument_text(value)}" for key, value in given),
        ]


def _flattened(mapping: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The values by dotted key, classes before their arguments."""
    for key, value in sorted(mapping.items(), key=lambda item: item[0] != "class_path"):
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{above}{key}.")
        else:
            yield above + key, value


_ABSOLUTE = re.compile(r"\$\{(?:fit\.)?([A-Za-z_][\w.\[\]-]*)\}")


def _argument_text(value: Any) -> str:
    """A value as somebody would type it."""
    return value if isinstance(value, str) else json.dumps(value)


def _with_relative_paths(value: Any, depth: int) -> Any:
    """A value that lies as deep in the configuration, with interpolations that find their way from there.

    The parser does the same with those in files; without, they would count from above the subcommand.
    """
    if isinstance(value, str):
        return _ABSOLUTE.sub(lambda match: "${" + "." * depth + match[1] + "}", value)
    if isinstance(value, list):
        return [_with_relative_paths(item, depth + 1) for item in value]
    return value


# ---- the command line ----


def _quiet_class(base: type[Any], job: _Job) -> type[Any]:
    """A command line that parses what the job says, builds the parts, and runs nothing."""

    job.subcommand_names = (*base.subcommands(), "config", "subcommand")

    class Quiet(base):  # type: ignore[misc]
        parser_class: Any
        trainer_class: Any

        def init_parser(self, **kwargs: Any) -> Any:
            """Have errors raised, and interpolations resolved where there are any."""
            kwargs.update(exit_on_error=False, allow_abbrev=False)
            if job.parser_mode is not None and kwargs.get("parser_mode", "yaml") in YAML_MODES:
                kwargs["parser_mode"] = job.parser_mode
            if not hasattr(self.parser_class, "seen_links"):
                self.parser_class = _parser_class(self.parser_class, job)
            return super().init_parser(**kwargs)

        def _setup_parser_kwargs(self, parser_kwargs: dict[str, Any]) -> Any:
            others = set(base.subcommands()) - {FIT}
            return super()._setup_parser_kwargs(
                {key: kwargs for key, kwargs in parser_kwargs.items() if key not in others}
            )

        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            """The one that is needed: each costs a parser of its own."""
            return {FIT: base.subcommands()[FIT]}

        def parse_arguments(self, parser: Any, args: Any) -> None:
            """Parse the job's arguments, whatever it is called with, then those that bring the loader settings."""
            _parse_with_settings(self, functools.partial(self._parse_for_job, parser), job)

        def _parse_for_job(self, parser: Any, placed: Mapping[str, Any]) -> None:
            job.failed_file = None
            arguments = job.arguments(has_subcommands=_has_subcommands(self), placed=placed)
            try:
                super().parse_arguments(parser, arguments)
            except (argparse.ArgumentError, OmegaConfBaseException) as error:
                raise CliConfigError(one_line(str(error), job.files, job.overrides, job.failed_file)) from error

        def _parse_ckpt_path(self) -> None:
            """Load no checkpoint, and take no hyperparameters from it."""

        def before_instantiate_classes(self) -> None:
            """Set aside what a timing run must not use, when the user's own hook has seen the configuration."""
            super().before_instantiate_classes()
            job.config_text = _dump(self)
            _set_aside(self, job)
            job.trainer_class, self.trainer_class = self.trainer_class, functools.partial(_StandInTrainer, job)
            functools.update_wrapper(self.trainer_class, job.trainer_class, updated=())

        def _run_subcommand(self, subcommand: str) -> None:
            before = getattr(self, f"before_{subcommand}", None)
            if callable(before):
                before()

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Quiet, name, getattr(base, name))
    return Quiet


def _parser_class(base: type[Any], job: _Job) -> type[Any]:
    class Parser(base):  # type: ignore[misc]
        """Takes files with a section for each subcommand too, and tells of links and of a file that fails."""

        seen_links: tuple[_Link, ...] = ()

        def link_arguments(
            self, source: Any, target: str, compute_fn: Any = None, apply_on: str = "parse", **kwargs: Any
        ) -> None:
            super().link_arguments(source, target, compute_fn, apply_on, **kwargs)
            sources = (source,) if isinstance(source, str) else tuple(source)
            is_copy = compute_fn is None and apply_on == "parse"
            self.seen_links = (*self.seen_links, _Link(sources=sources, target=target, is_copy=is_copy))

        def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().parse_path(path, *args, **kwargs)
            except Exception:
                job.failed_file = job.failed_file or str(path)
                raise

        def _apply_actions(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
            if self._subcommands_action is None and isinstance(cfg, dict) and not (args or kwargs.get("parent_key")):
                section = unwrapped(cfg)
                unknown = () if section is cfg else [key for key in cfg if key not in job.subcommand_names]
                if unknown:
                    raise TypeError(f"Option '{unknown[0]}' is not accepted")
                cfg = section
            return super()._apply_actions(cfg, *args, **kwargs)

    return Parser


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """An argument that is derived from others; a copy is the same as its only source when all is parsed."""

    sources: tuple[str, ...]
    target: str
    is_copy: bool


def _has_subcommands(line: Any) -> bool:
    """Not where the user's script trains by itself."""
    return bool(getattr(line, "_subcommand_parsers", None))


def _fit_parser(line: Any) -> Any:
    return line._parser(FIT if _has_subcommands(line) else None)


def _fit_config(line: Any) -> Any:
    return line.config[FIT] if _has_subcommands(line) else line.config


def _dump(line: Any) -> str:
    """The configuration as `LightningCLI` stores it; empty where the user's own hook has put objects into it."""
    for unset in ("skip_unset", "skip_none"):  # the name in newer versions of jsonargparse, and in older ones
        with contextlib.suppress(Exception):
            return str(_fit_parser(line).dump(_fit_config(line), format="yaml", **{unset: False}))
    return ""


def _set_aside(line: Any, job: _Job) -> None:
    """Take out of the configuration, and name, what a timing run must not use or decides itself."""
    config = _fit_config(line)
    trainer = config.get("trainer")
    if trainer is not None:
        defaults = trainer_defaults(job.package)
        for name in NEVER_BUILT:
            if name in trainer and trainer[name] != defaults.get(name):
                job.set_aside.append(f"trainer.{name}")
                trainer[name] = defaults.get(name)
        callbacks = trainer.get("callbacks")
        if callbacks is not None:
            types = set_aside_callback_types(job.package)
            each = callbacks if isinstance(callbacks, list) else [callbacks]
            classes = [_callback_class(callback) for callback in each]
            is_aside = [isinstance(found, type) and issubclass(found, types) for found in classes]
            job.set_aside += [found.__name__ for found, aside in zip(classes, is_aside, strict=True) if aside]
            trainer["callbacks"] = [callback for callback, aside in zip(each, is_aside, strict=True) if not aside]
    if _has_subcommands(line):
        for name in line._subcommand_method_arguments.get(FIT, ()):
            if config.get(name) is not None:
                job.set_aside.append(name)
                config[name] = None
    if line.save_config_callback is not None:
        if not line.save_config_callback.__module__.startswith(f"{job.package.name}."):
            job.set_aside.append(line.save_config_callback.__name__)
        line.save_config_callback = None


def _callback_class(callback: Any) -> Any:
    """The class of a callback that is still text, or was put there by the user's own hook."""
    path = callback.get("class_path") if hasattr(callback, "get") else callback
    return try_to_find(path) if isinstance(path, str) else type(callback)


# ---- the trainer that is not made ----


class _StandInTrainer:
    """Keeps what a trainer would have been made with, and is a plain one when the user's hooks look at it.

    That one has a logger that keeps nothing. It trains nothing.
    """

    def __init__(self, job: _Job, **arguments: Any) -> None:
        job.trainer_arguments = dict(arguments)
        vars(self)["_make"] = functools.partial(_make_plain_trainer, job, arguments)

    @functools.cached_property
    def _plain(self) -> tuple[Any, list[Any], Any]:
        plain: tuple[Any, list[Any], Any] = vars(self)["_make"]()
        return plain

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._plain[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._plain[0], name, value)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    validate = test = predict = fit

    def added_callbacks(self) -> list[Any]:
        """The callbacks that the user's hooks have added, if they have looked at the trainer at all."""
        if "_plain" not in vars(self):
            return []
        trainer, at_first, _ = self._plain
        return [callback for callback in trainer.callbacks if not any(callback is known for known in at_first)]


def _make_plain_trainer(job: _Job, arguments: Mapping[str, Any]) -> tuple[Any, list[Any], Any]:
    """A trainer for the processor, the callbacks that it has, and the directory for what is written through it."""
    plain = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, (bool, int, float, str, Path)) and name not in MACHINE_ARGUMENTS
    }
    user = UserTrainer(
        arguments={**plain, "callbacks": split_callbacks(arguments.get("callbacks") or [], job.package)[0]}
    )
    scratch = tempfile.TemporaryDirectory(prefix="stepbench-")
    path = Path(scratch.name)
    spec = RunSpec(accelerator="cpu")
    try:
        trainer = make_trainer(spec, job.package, user, epochs=None, scratch=path).trainer
    except TypeError:  # the user's trainer has arguments of its own
        known = {name: value for name, value in user.arguments.items() if name in trainer_defaults(job.package)}
        trainer = make_trainer(spec, job.package, UserTrainer(arguments=known), epochs=None, scratch=path).trainer
    return trainer, list(trainer.callbacks), scratch


def _captured_trainer(line: Any, job: _Job) -> UserTrainer:
    """What is known of the trainer that the command line would have made."""
    base = job.package.root.Trainer
    trainer_class = job.trainer_class
    if job.trainer_arguments is not None:
        arguments = dict(job.trainer_arguments)
        callbacks = list(arguments.get("callbacks") or [])
    else:  # the user's own way of making one never asked for the class
        arguments = {**(line._get(line.config_init, "trainer") or {})}
        callbacks = list(line.trainer.callbacks)
        arguments.update({name: getattr(line.trainer, name) for name in SEEN_OF_TRAINER})
        trainer_class = type(line.trainer)
    if isinstance(line.trainer, _StandInTrainer):
        callbacks += line.trainer.added_callbacks()
    kept, aside = split_callbacks(callbacks, job.package)
    if job.trainer_arguments is not None:
        job.set_aside += aside
    if not isinstance(trainer_class, type):
        job.set_aside.append(f"trainer_class {getattr(trainer_class, '__name__', trainer_class)}")
    defaults = trainer_defaults(job.package)
    dropped = [name for name in arguments if name in NEVER_BUILT]
    for name in dropped:
        if arguments.pop(name) != defaults.get(name):
            job.set_aside.append(f"trainer.{name}")
    is_own = isinstance(trainer_class, type) and issubclass(trainer_class, base) and trainer_class is not base
    return UserTrainer(
        arguments={**arguments, "callbacks": kept},
        trainer_class=trainer_class if is_own else None,
        set_aside=list(dict.fromkeys(job.set_aside)),
    )


# ---- the loader settings ----


def _parse_with_settings(line: Any, parse: Callable[[Mapping[str, Any]], None], job: _Job) -> None:
    """Parse, find the arguments of the wanted settings in the outcome, and parse again with these given.

    A setting without an argument that can be told, or with one that does not take it, is left to a later stage.
    """
    parse({})
    job.placed = {}
    keys = _find_keys(line, job)
    values = {keys[setting]: value for setting, value in job.wanted.given if setting in keys}
    if not values:
        return
    if _take(line, parse, values) != set(values):
        taken = {key: value for key, value in values.items() if _take(line, parse, {key: value})}
        parse(taken)
        values = taken
    job.placed = {setting: key for setting, key in keys.items() if key in values}
    told = job.batch_size_key
    if told is not None and job.wanted.batch_size is not None and "batch_size" not in job.placed:
        found = _value_at(_as_mapping(_fit_config(line)), keys["batch_size"])
        if found is None:
            raise CliConfigError(_no_such_key(told, line, job))
        raise CliConfigError(f"batch_size_key: {told} stays {found} although {job.wanted.batch_size} is given for it")


def _take(line: Any, parse: Callable[[Mapping[str, Any]], None], values: Mapping[str, Any]) -> set[str]:
    """The keys that have their values when these are given; none where they cannot be."""
    try:
        parse(values)
    except CliConfigError:
        return set()
    config = _as_mapping(_fit_config(line))
    return {key for key, value in values.items() if str(_value_at(config, key)) == str(value)}


def _find_keys(line: Any, job: _Job) -> dict[str, str]:
    """The key of each wanted setting that can be told."""
    config = _as_mapping(_fit_config(line))
    links = getattr(_fit_parser(line), "seen_links", ())
    keys: dict[str, str] = {}
    for setting, _ in job.wanted.given:
        if setting == "batch_size" and job.batch_size_key is not None:
            keys[setting] = _told_key(job.batch_size_key, config, links)
            continue
        key = _find_key(config, links, setting)
        if key is not None:
            keys[setting] = key
    return keys


def _told_key(told: str, config: Mapping[str, Any], links: Sequence[_Link]) -> str:
    """The whole key of one that may leave `init_args` out, as it may on the command line."""
    key = told.removeprefix(f"{FIT}.")
    whole = [known for known, _ in _flattened(config) if known.replace(".init_args", "") == key]
    key = whole[0] if len(whole) == 1 else key
    for link in links:
        if link.target == key and not link.is_copy:
            raise CliConfigError(f"batch_size_key: {key} is computed from {', '.join(link.sources)}: name one of these")
    return _source_of(key, links)


def _find_key(config: Mapping[str, Any], links: Sequence[_Link], setting: str) -> str | None:
    """Where the arguments of the data have a setting, or those of the model where there are no data beside it.

    Else the command line may have an argument of its own. What is linked is given through its source.
    """
    section = "data" if config.get("data") is not None else "model"
    content = {section: copy.deepcopy(config.get(section))}
    for link in links:
        if not link.is_copy:
            _remove(content, link.target)
    found = {_source_of(key, links) for key in find_arguments(content, setting)}
    if not found:
        own = {key: value for key, value in config.items() if not isinstance(value, (Mapping, list))}
        found = set(find_arguments(own, setting))
    return found.pop() if len(found) == 1 else None


def _source_of(key: str, links: Sequence[_Link]) -> str:
    for link in links:
        if link.is_copy and key == link.target:
            return link.sources[0]
        if link.is_copy and key.startswith(f"{link.target}."):
            return link.sources[0] + key.removeprefix(link.target)
    return key


def _remove(content: dict[str, Any], key: str) -> None:
    parent, _, name = key.rpartition(".")
    with contextlib.suppress(KeyError):
        owner = get_at(content, parent) if parent else content
        if isinstance(owner, dict):
            owner.pop(name, None)


def _as_mapping(value: Any) -> Any:
    """A configuration as plain mappings and lists."""
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {str(key): _as_mapping(inner) for key, inner in value.items()}
    return [_as_mapping(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _value_at(config: Mapping[str, Any], key: str) -> Any:
    try:
        return get_at(config, key)
    except KeyError:
        return None


def _no_such_key(key: str, line: Any, job: _Job) -> str:
    config = _as_mapping(_fit_config(line))
    keys = [
        name for name, _ in _flattened({section: config.get(section) for section in ("data", "model")}) if "." in name
    ]
    usual = [f"{section}.{found}" for section in ("data", "model") for found in _usual(config.get(section))]
    near = list(dict.fromkeys([*usual, *difflib.get_close_matches(key, keys, n=NEAR_KEYS, cutoff=0.5)]))[:NEAR_KEYS]
    hint = f"; near: {', '.join(near)}" if near else ""
    return f"batch_size_key: {file_names(job.files)}: no {key} in the configuration{hint}"


def _usual(section: Any) -> list[str]:
    return find_arguments(section, "batch_size") if isinstance(section, Mapping) else []
