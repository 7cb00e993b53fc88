"""A project of somebody else's, measured with the commands that its owner would type, in a copy of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TESTS, Stepbench

from stepbench.record import EffectiveSettings, RunRecord, Status, find_cells, read_record

SOURCE = TESTS / "user_project"

SHORT = (
    *("protocol.warmup_batches=2", "protocol.warmup_s=0", "protocol.timed_batches=4", "protocol.timed_s=0"),
    *("plots=false", "hydra.run.dir=outputs/it", "hydra.sweep.dir=multirun/it"),
)

RESULTS = ("outputs", "multirun")

Bench = Callable[..., "subprocess.CompletedProcess[str]"]


def copy_project(directory: Path) -> Path:
    """A copy of the project as it is kept, without what an import of it has left."""
    return Path(shutil.copytree(SOURCE, directory / "rivers_project", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return copy_project(tmp_path)


@pytest.fixture
def bench(stepbench: Stepbench, project: Path) -> Bench:
    """Runs stepbench in the copy, and sees that nothing but results is left in it."""

    def run(*arguments: str, cwd: Path = project) -> subprocess.CompletedProcess[str]:
        before = contents(project)
        done = stepbench(*arguments, *SHORT, cwd=cwd)
        assert contents(project) == before
        return done

    return run


def contents(project: Path) -> dict[str, bytes]:
    """Every file of the project but results and compiled modules, which Python itself leaves."""
    files = [path for path in project.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    kept = [path for path in files if path.relative_to(project).parts[0] not in RESULTS]
    return {str(path.relative_to(project)): path.read_bytes() for path in kept}


def records_of(project: Path) -> list[RunRecord]:
    cells = sorted(cell for name in RESULTS if (project / name).exists() for cell in find_cells(project / name / "it"))
    return [read_record(cell / "records" / "0.0.json") for cell in cells]


def effective_of(record: RunRecord) -> EffectiveSettings:
    assert record.status is Status.OK, record.reason
    assert record.effective is not None
    return record.effective


def only_effective(project: Path) -> EffectiveSettings:
    (record,) = records_of(project)
    return effective_of(record)


def batch_sizes_and_places(project: Path) -> list[tuple[Any, Any]]:
    found = [effective_of(record) for record in records_of(project)]
    return [(effective.batch_size, dict(effective.placed).get("batch_size")) for effective in found]


def test_the_project_knows_nothing_of_stepbench() -> None:
    files = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 15
    naming = [path.name for path in files if "stepbench" in path.read_text().lower()]
    assert naming == ["README.md"]


def test_a_file_for_the_command_line_of_lightning(bench: Bench, project: Path) -> None:
    done = bench("cli_config=cli_config.yaml", "-m", "batch_size=8,16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert batch_sizes_and_places(project) == [
        (8, "data.init_args.loader.batch_size"),
        (16, "data.init_args.loader.batch_size"),
    ]
    for record in records_of(project):
        effective = effective_of(record)
        assert effective.accumulate_grad_batches == 2
        assert (effective.precision, effective.num_workers, effective.accelerator) == ("32-true", 0, "cpu")
        assert dict(effective.trainer_settings) == {
            "gradient_clip_val": "1.0",
            "callbacks": "LearningRateMonitor, CountBatches",
        }
        assert set(effective.set_aside) == {"trainer.logger", "trainer.max_epochs", "ModelCheckpoint", "EarlyStopping"}
        assert record.summary is not None
        assert (record.summary.num_batches, record.summary.num_steps) == (4, 2)
        assert record.summary.num_samples == 4 * (effective.batch_size or 0)
    shown = done.stdout
    assert "model RiverForecast, data RiverData, precision 32-true, accumulate_grad_batches 2" in shown
    assert "set aside for timing: trainer.logger, ModelCheckpoint, EarlyStopping, trainer.max_epochs" in shown
    log = (project / "multirun" / "it" / "0" / "logs" / "0.log").read_text()
    assert "best so far:" in log


def test_files_for_fixed_classes(bench: Bench, project: Path) -> None:
    classes = [
        "cli_class=rivers.main:RiverCLI",
        "cli_model=rivers.model:BareForecast",
        "cli_data=rivers.data:RiverData",
    ]
    done = bench("cli_config=fixed_config.yaml", *classes, "batch_size=16")
    assert done.returncode == 0, done.stdout + done.stderr
    effective = only_effective(project)
    assert effective.batch_size == 16
    assert dict(effective.placed) == {"batch_size": "data.loader.batch_size"}
    assert effective.set_aside == ("trainer.max_epochs",)
    assert effective.trainer_settings == ()
    assert "BareForecast on RiverData, batch 16" in done.stdout
    assert "reached the loader: batch_size by data.loader.batch_size" in done.stdout


def test_fixed_classes_that_are_not_named_are_asked_for(bench: Bench, project: Path) -> None:
    done = bench("cli_config=fixed_config.yaml", "batch_size=16")
    assert done.returncode == 1
    assert "fixed_config.yaml: model: has arguments, but no class_path" in done.stdout
    assert "cli_model=my_package.my_module:MyClass" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.full
def test_further_files_and_overrides_are_laid_over_the_first(bench: Bench, project: Path) -> None:
    overrides = ["+model.init_args.width=16", "+model.init_args.encoder.init_args.width=16"]
    overrides += ["+trainer.gradient_clip_val=0.7"]
    done = bench("cli_config=cli_config.yaml", "cli_config_extra=[faster.yaml]", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = records_of(project)
    effective = effective_of(record)
    assert effective.accumulate_grad_batches == 1  # of the second file
    assert dict(effective.trainer_settings)["gradient_clip_val"] == "0.7"
    assert effective.batch_size == 8  # of the first file
    assert effective.placed == ()
    assert record.num_parameters == 3 * 16 * (6 + 16 + 2) + 16 + 1  # a GRU and a linear layer of width 16
    assert "your trainer's settings: gradient_clip_val 0.7" in done.stdout


@pytest.mark.full
def test_a_setting_of_the_command_line_wins_over_the_file(bench: Bench, project: Path) -> None:
    done = bench("cli_config=cli_config.yaml", "accumulate_grad_batches=4", "precision=bf16-mixed", "num_workers=1")
    assert done.returncode == 0, done.stdout + done.stderr
    effective = only_effective(project)
    assert (effective.accumulate_grad_batches, effective.precision, effective.num_workers) == (4, "bf16-mixed", 1)
    assert dict(effective.placed)["num_workers"] == "data.init_args.loader.num_workers"


@pytest.mark.full
def test_a_tree_of_hydras(bench: Bench, project: Path) -> None:
    done = bench("--config-dir", "configs", "model=gru", "data=rivers", "-m", "batch_size=8,16", "num_workers=0,2")
    assert done.returncode == 0, done.stdout + done.stderr
    found = [effective_of(record) for record in records_of(project)]
    assert [(cell.batch_size, cell.num_workers) for cell in found] == [(8, 0), (8, 2), (16, 0), (16, 2)]
    for effective in found:
        placed = dict(effective.placed)
        assert (placed["batch_size"], placed["num_workers"]) == ("data.batch_size", "data.num_workers")
        assert dict(effective.trainer_settings)["gradient_clip_val"] == "0.5"
        assert dict(effective.trainer_settings)["callbacks"] == "LearningRateMonitor, CountBatches"
        assert {"EarlyStopping", "ModelCheckpoint", "trainer.max_epochs"} <= set(effective.set_aside)


@pytest.mark.full
def test_classes_by_their_paths(bench: Bench, project: Path) -> None:
    done = bench(
        *("model=custom", "model.path=rivers.model:RiverForecast"),
        *("+model.kwargs.encoder._target_=rivers.model.Encoder", "+model.kwargs.encoder.width=48"),
        *("+model.kwargs.width=48", "data=custom", "data.path=rivers.data:make_river_data", "+data.kwargs.hours=500"),
        "batch_size=16",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = records_of(project)
    assert effective_of(record).batch_size == 16
    assert dict(effective_of(record).placed) == {"batch_size": "data.kwargs.batch_size"}
    assert record.num_parameters == 3 * 48 * (6 + 48 + 2) + 48 + 1
    assert "RiverForecast on make_river_data, batch 16" in done.stdout
    assert "set aside" not in done.stdout


@pytest.mark.full
def test_a_class_in_a_file(bench: Bench, project: Path) -> None:
    done = bench("model=custom", "model.path=./train.py:LitNet", "+model.kwargs.hidden=64", "-m", "batch_size=16,32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert batch_sizes_and_places(project) == [(16, "rebuilt loader"), (32, "rebuilt loader")]
    assert [record.num_parameters for record in records_of(project)] == [64 * (8 + 1) + 64 + 1] * 2
    assert "model LitNet, data none" in done.stdout


@pytest.mark.full
def test_what_hands_out_whole_batches_needs_the_key_of_their_size(bench: Bench, project: Path) -> None:
    tree = ["--config-dir", "configs", "model=gru", "data=blocks"]
    done = bench(*tree, "batch_size=16")
    assert done.returncode == 1
    assert "whether batch_size=16 reached the data loader cannot be seen" in done.stdout  # with lists in its batches
    assert "batch_size_fn=my_module:my_function" in done.stdout
    shutil.rmtree(project / "outputs")
    tree += ["batch_size_fn=rivers.data:count"]
    done = bench(*tree, "batch_size=16")
    assert done.returncode == 1
    assert "batch_size=16 did not reach the data loader, whose batches hold 8 samples" in done.stdout
    assert "batch_size_key=data.KEY" in done.stdout
    shutil.rmtree(project / "outputs")
    done = bench(*tree, "batch_size_key=data.rows", "-m", "batch_size=16,32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert batch_sizes_and_places(project) == [(16, "data.rows"), (32, "data.rows")]


@pytest.mark.full
def test_a_key_that_is_not_there_is_named_before_anything_runs(bench: Bench, project: Path) -> None:
    done = bench("--config-dir", "configs", "model=gru", "data=blocks", "batch_size_key=data.row", "batch_size=16")
    assert done.returncode == 2
    assert "batch_size_key=data.row: the configuration has no such key; did you mean rows?" in done.stderr


@pytest.mark.full
def test_a_function_of_the_users_sets_up_what_is_built(bench: Bench, project: Path) -> None:
    setup = ["cli_config=cli_config.yaml", "setup_fn=rivers.quick:use_few_hours"]
    done = bench(*setup, "batch_size=16", "protocol=epochs", "protocol.epochs=3")
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = records_of(project)
    assert record.summary is not None
    assert record.summary.num_batches + record.summary.num_warmup_batches == 3 * 400 / 16
    assert effective_of(record).batch_size == 16


NOTING = """
import pathlib


def note(model, datamodule):
    pathlib.Path("noted.txt").write_text(str(pathlib.Path.cwd()))
    pathlib.Path("given.txt").read_text()
"""


@pytest.mark.full
def test_relative_paths_are_those_of_the_directory_of_the_command(
    stepbench: Stepbench, project: Path, tmp_path: Path
) -> None:
    (project / "notes.py").write_text(NOTING)
    (project / "given.txt").write_text("found")
    done = stepbench("cli_config=cli_config.yaml", "setup_fn=./notes.py:note", *SHORT, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project / "noted.txt").read_text() == str(project)


@pytest.mark.full
@pytest.mark.parametrize("is_sweep", [True, False])
def test_each_cell_can_have_a_directory_of_its_own(bench: Bench, project: Path, is_sweep: bool) -> None:
    (project / "notes.py").write_text(NOTING.replace('"given.txt"', f'"{project}/given.txt"'))
    (project / "given.txt").write_text("found")
    arguments = ["model=custom", "model.path=./train.py:LitNet", "+model.kwargs.hidden=8", "hydra.job.chdir=true"]
    sizes = ["-m", "batch_size=16,32"] if is_sweep else ["batch_size=16"]
    done = bench(*arguments, "setup_fn=./notes.py:note", *sizes)  # both files lie where the command was typed
    assert done.returncode == 0, done.stdout + done.stderr
    assert [effective_of(record).batch_size for record in records_of(project)] == ([16, 32] if is_sweep else [16])
    cells = [project / "multirun" / "it" / name for name in "01"] if is_sweep else [project / "outputs" / "it"]
    for cell in cells:
        assert (cell / "scratch" / "noted.txt").read_text() == str(cell / "scratch")


@pytest.mark.full
def test_files_for_the_command_line_are_found_from_a_directory_of_ones_own(bench: Bench, project: Path) -> None:
    done = bench("cli_config=cli_config.yaml", "cli_config_extra=[faster.yaml]", "hydra.job.chdir=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert only_effective(project).accumulate_grad_batches == 1


@pytest.mark.full
def test_a_module_that_is_not_found_says_where_it_was_looked_for(bench: Bench, project: Path, tmp_path: Path) -> None:
    by_path = ["model=custom", "model.path=rivers.model:RiverForecast"]
    for number, subject in enumerate([[f"cli_config={project}/cli_config.yaml"], by_path]):
        elsewhere = tmp_path / f"elsewhere{number}"
        elsewhere.mkdir()
        done = bench(*subject, cwd=elsewhere)
        assert done.returncode == 1
        assert f"no module rivers in {elsewhere}" in done.stdout
        assert "or name that directory in PYTHONPATH" in done.stdout
        assert "Traceback" not in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("subject", ["cli_config.yaml", "train.py"])
def test_a_run_can_be_run_again_from_its_own_configuration(
    stepbench: Stepbench, bench: Bench, project: Path, subject: str
) -> None:
    by_file = ["model=custom", "model.path=./train.py:LitNet", "+model.kwargs.hidden=64"]
    arguments = by_file if subject == "train.py" else [f"cli_config={subject}"]
    assert bench(*arguments, "batch_size=16").returncode == 0
    (first,) = records_of(project)
    again = ["--config-dir", "outputs/it", "--config-name", "benchmark_config", "hydra.run.dir=outputs/again"]
    done = stepbench(*again, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    second = read_record(project / "outputs" / "again" / "records" / "0.0.json")
    assert second.spec_hash == first.spec_hash
    assert effective_of(second) == effective_of(first)


@pytest.mark.full
@pytest.mark.parametrize("subject", ["train.py"])
def test_ranks_find_what_the_first_one_finds_from_a_directory_of_ones_own(
    bench: Bench, project: Path, subject: str
) -> None:
    by_file = ["model=custom", "model.path=./train.py:LitNet", "+model.kwargs.hidden=64"]
    arguments = by_file if subject == "train.py" else [f"cli_config={subject}"]
    done = bench(*arguments, "batch_size=16", "devices=2", "device=cpu", "strategy=ddp", "hydra.job.chdir=true")
    assert done.returncode == 0, done.stdout + done.stderr
    effective = only_effective(project)
    assert (effective.num_devices, effective.batch_size) == (2, 16)


NO_MODULE = "class Net:\n    pass\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "exit_code", "wording"),
    [
        (
            ["model.path=./train.py:LitNet", "+model.kwargs.hiden=1", "+model.kwargs.hidden=1"],
            1,
            "takes no argument hiden (model.kwargs.hiden); it takes hidden",
        ),
        (["model=./train.py:LitNet"], 2, "model=custom model.path=./train.py:LitNet"),
        (["model=rivers.model.RiverForecast"], 2, "model=custom model.path=rivers.model.RiverForecast"),
        (
            ["model=none", "cli_config=cli_config.yaml", "data.init_args.hours=3"],
            2,
            "is given as +data.init_args.hours=VALUE",
        ),
        (["model=none", "cli_config=no.yaml"], 2, "cli_config: no.yaml cannot be read: No such file or directory"),
        (["-c", "cli_config.yaml"], 2, "without dashes: batch_size=16, cli_config=FILE"),
        (
            ["model=none", "cli_config=cli_config.yaml", "+data.init_args.hour=3"],
            1,
            "data.init_args.hour: rivers.data.RiverData takes no such argument; did you mean hours?",
        ),
        (
            ["model=none", "cli_config=cli_config.yaml", "batch_size=3000"],
            1,
            "the data set has 2000 samples, fewer than one batch of batch_size=3000",
        ),
    ],
)
def test_a_mistake_of_somebody_new_is_answered_with_what_to_type(
    stepbench: Stepbench, project: Path, arguments: list[str], exit_code: int, wording: str
) -> None:
    chosen = [] if arguments[0].startswith(("model=", "-c")) else ["model=custom"]
    done = stepbench(*chosen, *arguments, *SHORT, cwd=project)
    assert done.returncode == exit_code
    assert wording in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.full
def test_a_path_that_names_no_module_says_what_it_names(stepbench: Stepbench, project: Path) -> None:
    (project / "net.py").write_text(NO_MODULE)
    wordings = {
        "./net.py:Net": "model.path must name a lightning LightningModule, got ./net.py:Net which",
        "./train.py:LitNet": "needs hidden, which model.kwargs does not have: give +model.kwargs.hidden=VALUE",
        "./train.py:Lit": "train.py has no Lit; did you mean LitNet?",
        "train.py": "train.py: name something in the file, such as train.py:MyClass",
        "./trian.py:LitNet": "there is no file ",
    }
    done = stepbench("model=custom", "-m", f"model.path={','.join(wordings)}", *SHORT, cwd=project)
    assert done.returncode == 1
    for wording in wordings.values():
        assert wording in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
