"""The Hydra app: composes every cell, checks them together, has them measured, and has the results put together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from stepbench import units
from stepbench.composition_errors import explain
from stepbench.launcher import LaunchError, make_launcher
from stepbench.overrides import (
    IMPLIED,
    config_directories,
    find_choices,
    find_project_root,
    find_unquoted_choices,
    prepare_arguments,
)
from stepbench.profile_files import EVERY_CELL, SLOWEST
from stepbench.record import RunRequest
from stepbench.settings import SettingsError, conf_dir, config_text, read_request
from stepbench.sweep import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SOME_FAILED,
    EXIT_WRONG_REQUEST,
    DirectoryTakenError,
    PlannedCell,
    claim_directory,
    profile_cells,
    run_cells,
    starts_ranks,
    write_plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComposedCell:
    """A cell as Hydra composed it, with the overrides that made it."""

    request: RunRequest
    config_text: str
    overrides: tuple[str, ...]


@dataclass(slots=True)
class _Plan:
    """What Hydra has composed so far: the cells that may run and the mistakes of those that may not."""

    cells: list[_ComposedCell] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    directory: Path = Path()
    is_sweep: bool = False
    directory_is_default: bool = True
    plots: bool = True
    worker_start: str = "auto"
    profile_cell: str | int = SLOWEST


def _collect(config: DictConfig, plan: _Plan) -> None:
    """Hydra's task function: freeze one cell into the plan. Measuring starts when all cells are known."""
    hydra_config = HydraConfig.get()
    _refuse_what_is_not_supported(hydra_config)
    overrides = tuple(str(override) for override in hydra_config.overrides.task)
    plan.is_sweep = hydra_config.mode is RunMode.MULTIRUN
    key, name = (
        ("hydra.sweep.dir", hydra_config.sweep.dir) if plan.is_sweep else ("hydra.run.dir", hydra_config.run.dir)
    )
    directory = Path(os.path.abspath(Path(hydra_config.runtime.cwd) / name))
    if plan.cells and directory != plan.directory:
        raise SettingsError([f"{key} must be the same for all cells, got {plan.directory} and {directory}"])
    plan.directory = directory
    plan.directory_is_default = not any(override.startswith(key) for override in hydra_config.overrides.hydra)
    try:
        choices = {str(group): str(choice) for group, choice in hydra_config.runtime.choices.items() if choice}
        _refuse_shadowed(choices.items(), [Path(source.path) for source in hydra_config.runtime.config_sources])
        request = read_request(
            config,
            choices,
            directory=Path(hydra_config.runtime.cwd),
            run_directory=Path(hydra_config.runtime.output_dir),
            own_directory=bool(hydra_config.job.chdir),
            typed={override.partition("=")[0].lstrip("+~") for override in overrides},
        )
    except SettingsError as error:
        where = f"cell {hydra_config.job.num} ({' '.join(overrides)}): " if plan.is_sweep else ""
        plan.problems.extend(f"{where}{problem}" for problem in error.problems)
        return
    plan.plots, plan.worker_start, plan.profile_cell = config.plots, config.worker_start, config.profile_cell
    plan.cells.append(_ComposedCell(request=request, config_text=config_text(config), overrides=overrides))


def _refuse_what_is_not_supported(hydra_config: HydraConf) -> None:
    """Hydra's own launcher and sweeper alone know what is asked of them here, and `sweep.py` owns the directories."""
    problems = [
        f"hydra/{kind}={hydra_config.runtime.choices[f'hydra/{kind}']} is not supported; use basic"
        for kind in ("launcher", "sweeper")
        if not str(getattr(hydra_config, kind)["_target_"]).startswith("hydra._internal.core_plugins.")
    ]
    if hydra_config.job.env_set:
        problems.append("hydra.job.env_set does not reach the workers; set the variables before the command")
    if any(override.startswith("hydra.sweep.subdir") for override in hydra_config.overrides.hydra):
        problems.append("hydra.sweep.subdir cannot be changed: cells lie in directories numbered from 0")
    if problems:
        raise SettingsError(problems)


def _refuse_shadowed(choices: Iterable[tuple[str, str]], sources: Sequence[Path]) -> None:
    """Hydra takes our file where a user's has the same group and name, without a word."""
    users = [source for source in sources if source.is_dir() and source.resolve() != conf_dir().resolve()]
    shadowed = [
        directory / group / f"{choice}.yaml"
        for group, choice in choices
        for directory in users
        if (directory / group / f"{choice}.yaml").exists() and (conf_dir() / group / f"{choice}.yaml").exists()
    ]
    if shadowed:
        raise SettingsError(
            [f"{path} has the name of a built-in choice, which Hydra prefers: rename it" for path in shadowed]
        )


def main() -> int:
    """Run the command line; returns the exit code: 0 all ok, 1 some cell not ok, 2 a wrong request, 130 interrupted."""
    plan = _Plan()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as an interrupt: what is measured is put together
    _secure_standard_streams()
    try:
        _compose(plan)
    except SystemExit as end:
        if end.code in (0, None):
            return EXIT_OK
        print("Settings are given as key=value, without dashes: batch_size=16, cli_config=FILE", file=sys.stderr)
        return EXIT_WRONG_REQUEST
    except SettingsError as error:
        plan.problems.extend(error.problems)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if not plan.problems:
        plan.problems.extend(_find_profile_problem(plan))
    if plan.problems:
        return _refuse(plan.problems)
    if not plan.cells:
        return EXIT_OK  # --help, --cfg and the like
    try:
        return _execute(plan)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _find_profile_problem(plan: _Plan) -> list[str]:
    """That the cell to be profiled is none of the sweep, if it is so; a run that is alone has no number."""
    number, cells = plan.profile_cell, plan.cells
    if isinstance(number, str) or not plan.is_sweep or not any(cell.request.profile for cell in cells):
        return []
    if number >= len(cells):
        return [f"there is no profile_cell={number}: the cells are numbered from 0 to {len(cells) - 1}"]
    if cells[number].request.profile is None:
        return [f"profile_cell={number} names a cell that no profiler= is asked for"]
    return []


def _secure_standard_streams() -> None:
    """Point closed standard streams at nothing, lest other files take their place, and let any text be printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _compose(plan: _Plan) -> None:
    """Have Hydra compose every cell into the plan. Raises `SettingsError` with what Hydra finds wrong."""
    arguments = sys.argv[1:]
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have errors come here, instead of as prints and an exit code of Hydra's
    try:
        sys.argv[0] = "stepbench"
        os.environ.setdefault("PROJECT_ROOT", str(find_project_root(arguments)))
        sys.argv[1:] = prepare_arguments(arguments)
        _refuse_shadowed(find_choices(sys.argv[1:]), config_directories(arguments))
        app = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
        app(lambda config: _collect(config, plan))()
    except SettingsError:
        raise
    except Exception as error:
        if full_error == "1":
            traceback.print_exc()
        unquoted = find_unquoted_choices(arguments) if "item value in defaults" in str(error) else []
        raise SettingsError(unquoted or [explain(error)]) from error
    finally:
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _refuse(problems: Sequence[str]) -> int:
    print("Nothing was run:", *dict.fromkeys(problems), sep="\n  ", file=sys.stderr)
    return EXIT_WRONG_REQUEST


def _execute(plan: _Plan) -> int:
    """Measure the planned cells, then put together whatever there is, also after failures and an interrupt."""
    try:
        directory = claim_directory(plan.directory, may_rename=plan.directory_is_default)
        cells = _place_cells(plan, directory)
        write_plan(directory, cells)
    except (DirectoryTakenError, OSError) as error:
        return _refuse([str(error)])
    print(f"{units.format_count(len(cells), 'cell')}; results in {_short(directory)}", flush=True)
    needs_no_server = all(starts_ranks(cell.request.spec) for cell in cells)
    with contextlib.closing(make_launcher("spawn" if needs_no_server else plan.worker_start)) as launcher:
        launcher.start()
        from stepbench import aggregate, report  # noqa: F401  (imported while the launcher gets ready, not after)

        try:
            launcher.wait_until_ready()
        except LaunchError as error:
            return _refuse([str(error)])
        try:
            exit_code = run_cells(cells, launcher)
            if exit_code != EXIT_INTERRUPTED:
                which = plan.profile_cell if plan.is_sweep else EVERY_CELL
                exit_code = profile_cells(cells, launcher, which, directory) or exit_code
        except (LaunchError, OSError) as error:
            print(f"\nThe sweep had to stop, what was measured is kept: {error}", file=sys.stderr)
            exit_code = EXIT_SOME_FAILED
    try:
        _report(plan, directory, cells)
    except OSError as error:
        print(f"The measurements are kept, but not all results could be written: {error}", file=sys.stderr)
        exit_code = exit_code or EXIT_SOME_FAILED
    return exit_code


def _place_cells(plan: _Plan, directory: Path) -> list[PlannedCell]:
    """The cells with their directories and with labels that say what tells them apart."""
    common = set.intersection(*(set(cell.overrides) for cell in plan.cells)) if plan.is_sweep else set()
    return [
        PlannedCell(
            directory=directory / str(number) if plan.is_sweep else directory,
            request=dataclasses.replace(cell.request, profile=None),
            profile=cell.request.profile,
            config_text=cell.config_text,
            label=" ".join(o.replace("'", "") for o in cell.overrides if o not in (*common, *IMPLIED)) or "one run",
        )
        for number, cell in enumerate(plan.cells)
    ]


def _report(plan: _Plan, directory: Path, cells: Sequence[PlannedCell]) -> None:
    """Draw and print."""
    from stepbench import aggregate, report

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the report says them itself
        for cell in cells:
            aggregate.write_cell_summary(cell.directory)
            if plan.plots:
                aggregate.draw_cell(cell.directory)
        study = aggregate.write_study([directory], directory) if plan.is_sweep else None
    if study is None:
        report.print_run(directory)
    else:
        report.print_study(study)


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    sys.exit(main())
