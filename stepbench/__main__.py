"""The Hydra app: composes every cell, checks them together, has them measured, and has the results put together."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from stepbench.launcher import LaunchError, make_launcher
from stepbench.overrides import find_unquoted_choices, prepare_arguments
from stepbench.settings import SettingsError, conf_dir, config_text, read_request
from stepbench.sweep import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_WRONG_REQUEST,
    DirectoryTakenError,
    PlannedCell,
    claim_directory,
    run_cells,
    write_plan,
)


@dataclass(slots=True)
class _Plan:
    """What Hydra has composed so far: the cells that may run and the mistakes of those that may not."""

    cells: list[tuple[PlannedCell, tuple[str, ...]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    directory: Path = Path()
    is_sweep: bool = False
    directory_is_default: bool = True
    plots: bool = True
    worker_start: str = "auto"


def _collect(config: DictConfig, plan: _Plan) -> None:
    """Hydra's task function: freeze one cell into the plan. Measuring starts when all cells are known."""
    hydra_config = HydraConfig.get()
    overrides = tuple(str(override) for override in hydra_config.overrides.task)
    plan.is_sweep = hydra_config.mode is RunMode.MULTIRUN
    _refuse_plugins(hydra_config)
    output_dir = Path(hydra_config.runtime.output_dir)
    directory_key = "hydra.sweep.dir" if plan.is_sweep else "hydra.run.dir"
    plan.directory = Path(hydra_config.sweep.dir).absolute() if plan.is_sweep else output_dir
    plan.directory_is_default = not any(o.startswith(directory_key) for o in hydra_config.overrides.hydra)
    try:
        request = read_request(config, {str(k): str(v) for k, v in hydra_config.runtime.choices.items() if v})
    except SettingsError as error:
        where = f"cell {hydra_config.job.num} ({' '.join(overrides)}): " if plan.is_sweep else ""
        plan.problems.extend(f"{where}{problem}" for problem in error.problems)
        return
    plan.plots, plan.worker_start = config.plots, config.worker_start
    cell = PlannedCell(directory=output_dir, request=request, config_text=config_text(config), label="")
    plan.cells.append((cell, overrides))


def _refuse_plugins(hydra_config: HydraConf) -> None:
    """Only Hydra's own launcher and sweeper know what is asked of them here."""
    for kind in ("launcher", "sweeper"):
        target = str(getattr(hydra_config, kind)["_target_"])
        if not target.startswith("hydra._internal.core_plugins."):
            raise SettingsError(
                [f"hydra/{kind}={hydra_config.runtime.choices[f'hydra/{kind}']} is not supported; use basic"]
            )


def main() -> int:
    """Run the command line; returns the exit code: 0 all ok, 1 some cell not ok, 2 a wrong request, 130 interrupted."""
    plan = _Plan()
    try:
        _compose(plan)
    except SystemExit as end:  # Hydra's command line parser has said what is wrong
        return EXIT_OK if end.code in (0, None) else EXIT_WRONG_REQUEST
    except SettingsError as error:
        plan.problems.extend(error.problems)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if plan.problems:
        return _refuse(plan.problems)
    if not plan.cells:
        return EXIT_OK  # --help, --cfg and the like
    try:
        return _execute(plan)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _compose(plan: _Plan) -> None:
    """Have Hydra compose every cell into the plan. Raises `SettingsError` with what Hydra finds wrong."""
    arguments = sys.argv[1:]
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have errors come here, instead of as prints and an exit code of Hydra's
    try:
        sys.argv = ["stepbench", *prepare_arguments(arguments)]
        app = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
        app(lambda config: _collect(config, plan))()
    except SettingsError:
        raise
    except Exception as error:
        if full_error == "1":
            traceback.print_exc()
        unquoted = find_unquoted_choices(arguments) if isinstance(error, ValueError) else []
        causes = [str(error.__cause__)] if isinstance(error.__cause__, OmegaConfBaseException) else []
        raise SettingsError(unquoted or [str(error) or type(error).__name__, *causes]) from error
    finally:
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _refuse(problems: Sequence[str]) -> int:
    print("Nothing was run:", *problems, sep="\n  ", file=sys.stderr)
    return EXIT_WRONG_REQUEST


def _execute(plan: _Plan) -> int:
    """Measure the planned cells, then put together whatever there is, also after failures and an interrupt."""
    try:
        directory = claim_directory(plan.directory, may_rename=plan.directory_is_default)
        cells = _place_cells(plan, directory)
        write_plan(directory, cells)
    except (DirectoryTakenError, OSError) as error:
        return _refuse([str(error)])
    print(f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}; results in {_short(directory)}", flush=True)
    launcher = make_launcher(plan.worker_start)
    try:
        launcher.start()
        from stepbench import aggregate, report  # noqa: F401  (imported while the launcher gets ready, not after)

        launcher.wait_until_ready()
        exit_code = run_cells(cells, launcher)
    except LaunchError as error:
        return _refuse([str(error)])
    finally:
        launcher.close()
    _report(plan, directory, cells)
    return exit_code


def _place_cells(plan: _Plan, directory: Path) -> list[PlannedCell]:
    """The cells with their final directories and with labels that say what tells them apart."""
    common = set.intersection(*(set(overrides) for _, overrides in plan.cells)) if plan.is_sweep else set()
    placed = []
    for cell, overrides in plan.cells:
        label = " ".join(override.replace("'", "") for override in overrides if override not in common)
        placed.append(
            PlannedCell(
                directory=directory / cell.directory.relative_to(plan.directory),
                request=cell.request,
                config_text=cell.config_text,
                label=label or "one run",
            )
        )
    return placed


def _report(plan: _Plan, directory: Path, cells: Sequence[PlannedCell]) -> None:
    """Draw and print."""
    from stepbench import aggregate, report

    for cell in cells:
        aggregate.write_cell_summary(cell.directory)
        if plan.plots:
            aggregate.draw_cell(cell.directory)
    if plan.is_sweep:
        report.print_study(aggregate.write_study([directory], directory))
    else:
        report.print_run(directory)


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    sys.exit(main())
