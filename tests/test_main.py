"""The command as people type it: real processes, real files, real signals."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TESTS, Stepbench

from stepbench.record import PHASES, Status, find_cells, read_record

FAST = (
    "device=cpu",
    "protocol.warmup_batches=2",
    "protocol.warmup_s=0",
    "protocol.timed_batches=8",
    "protocol.timed_s=0",
)
TINY = ("model._target_=user_code_samples.TinyModule", "data._target_=user_code_samples.TinyData")

CELL_FILES = {
    "timing_summary.yaml",
    "timing_results.csv",
    "batch_time_breakdown.png",
    "total_batch_time.png",
    "time_distribution_pie.png",
    "benchmark_config.yaml",
}


def tiny_group(directory: Path, faults: Sequence[str] = ()) -> Path:
    """A user's configuration with `model=tiny`, `data=tiny` and a model for each fault."""
    for group, name, text in [
        ("model", "tiny", "_target_: user_code_samples.TinyModule\n"),
        ("data", "tiny", "_target_: user_code_samples.TinyData\nbatch_size: ${batch_size}\nnum_items: 512\n"),
        *(("model", fault, f"_target_: user_code_samples.TinyModule\nfault: {fault}\nat: 7\n") for fault in faults),
    ]:
        (directory / group).mkdir(parents=True, exist_ok=True)
        (directory / group / f"{name}.yaml").write_text(text)
    return directory


def in_the_full_tier(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


def only_directory(parent: Path) -> Path:
    (date,) = parent.iterdir()
    (directory,) = date.iterdir()
    return directory


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def test_the_first_example_gives_a_whole_study(stepbench: Stepbench, tmp_path: Path) -> None:
    done = stepbench("-m", "precision=32,16-mixed", "batch_size=16,128", "model.width=8", *FAST)
    assert done.returncode == 0, done.stdout + done.stderr
    directory = only_directory(tmp_path / "multirun")
    lines = done.stdout.splitlines()
    assert lines[0] == f"4 cells; results in {directory.relative_to(tmp_path)}"
    assert lines[1].startswith("[1/4] precision=32 batch_size=16 … ")
    assert "per step" in lines[1] and "(3 left, about" in lines[1]
    cells = find_cells(directory)
    assert [cell.name for cell in cells] == ["0", "1", "2", "3"]
    for cell in cells:
        assert {path.name for path in cell.iterdir() if path.is_file()} >= CELL_FILES
        record = read_record(cell / "records" / "0.0.json")
        assert record.status is Status.OK
        assert (cell / "logs" / "0.log").exists()
        assert min(png_size(cell / "total_batch_time.png")) > 300
        with (cell / "timing_results.csv").open() as file:
            for row in csv.DictReader(file):
                phases_ns = [round(float(row[f"{phase}_s"]) * 1e9) for phase in PHASES]
                assert sum(phases_ns) == round(float(row["batch_s"]) * 1e9)
        summary = yaml.safe_load((cell / "timing_summary.yaml").read_text())
        assert summary["status"] == "ok"
    for name in ("step_time", "time_per_sample", "throughput", "phases", "speedup"):
        assert min(png_size(directory / f"{name}.png")) > 300
        assert (directory / f"{name}.svg").read_text().lstrip().startswith("<?xml")
    with (directory / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [(run["requested_precision"], run["effective_precision"]) for run in runs] == [
        ("32", "32-true"),
        ("32", "32-true"),
        ("16-mixed", "bf16-mixed"),
        ("16-mixed", "bf16-mixed"),
    ]
    assert "16-mixed (ran as bf16-mixed)" in done.stdout
    assert "16-mixed (ran as bf16-mixed)" in (directory / "report.md").read_text()
    assert "doubling" in done.stdout.lower()
    assert "most time goes to" in done.stdout.lower()


def test_one_run_prints_its_phases_and_runs_again_from_its_own_configuration(
    stepbench: Stepbench, tmp_path: Path
) -> None:
    conf = tiny_group(tmp_path / "my_conf")
    done = stepbench("--config-dir", str(conf), "model=tiny", "data=tiny", "batch_size=8", "precision=16", *FAST)
    assert done.returncode == 0, done.stdout + done.stderr
    for phase in PHASES:
        assert phase in done.stdout
    assert "samples/s" in done.stdout
    assert "bf16-mixed" in done.stdout  # what ran instead of 16
    directory = only_directory(tmp_path / "outputs")
    assert {path.name for path in directory.iterdir()} >= CELL_FILES | {"records", "logs"}
    again = stepbench(
        "--config-dir", str(directory), "--config-name", "benchmark_config", f"hydra.run.dir={tmp_path}/again"
    )
    assert again.returncode == 0, again.stdout + again.stderr
    first, second = (read_record(path / "records" / "0.0.json") for path in (directory, tmp_path / "again"))
    assert second.request.spec == first.request.spec
    assert second.spec_hash == first.spec_hash
    assert second.request.protocol.timed_batches == first.request.protocol.timed_batches


def test_a_sweep_over_faults_keeps_everything_measured(stepbench: Stepbench, tmp_path: Path) -> None:
    faults = ["raise_value_error", "raise_out_of_memory", "kill_itself"]
    conf = tiny_group(tmp_path / "my_conf", faults)
    models = ",".join(["tiny", *faults])
    done = stepbench(
        "--config-dir", str(conf), "-m", f"model={models}", "data=tiny", "plots=false", "hydra.sweep.dir=study", *FAST
    )
    assert done.returncode == 1, done.stdout + done.stderr
    study = tmp_path / "study"
    records = [read_record(study / str(index) / "records" / "0.0.json") for index in range(4)]
    assert [record.status.value for record in records] == ["ok", "error", "oom", "crashed"]
    with (study / "runs.csv").open() as file:
        assert [run["status"] for run in csv.DictReader(file)] == ["ok", "error", "oom", "crashed"]
    assert "ValueError: planted" in done.stdout
    assert "killed by SIGKILL" in done.stdout
    assert "logs/0.log" in done.stdout
    assert len((study / "1" / "timing_results.csv").read_text().splitlines()) == 1 + 7
    report = (study / "report.md").read_text()
    assert "crashed" in report and "oom" in report

    aggregated = stepbench(str(study), "--out", "elsewhere", module="stepbench.aggregate")
    assert aggregated.returncode == 0, aggregated.stderr
    assert (tmp_path / "elsewhere" / "cells.csv").read_text() == (study / "cells.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "wording"),
    [
        (["precision=8"], "precision=8: there is no such choice; choices: 16, 16-mixed"),
        (["batchsize=8"], "there is no setting batchsize; did you mean batch_size?; settings: data, model"),
        (["batch_size=many"], "batch_size must be a whole number >= 1 or null, got 'many'"),
        (["batch_size=-1"], "batch_size must be a whole number >= 1 or null, got -1"),
        (["data=image_folder"], "data.root is required and has no default"),
        (["-m", "batch_size=8,0,-1"], "cell 2 (batch_size=-1): batch_size must be a whole number >= 1 or null, got -1"),
        (["+batchsize=8"], "there is no setting batchsize; did you mean batch_size?"),
        (["batch_size=8,16"], "batch_size=8,16 has several values: add -m to measure each of them"),
        (["--batch-size", "16"], "Settings are given as key=value, without dashes: batch_size=16"),
    ],
)
def test_a_wrong_request_is_named_and_runs_nothing(
    stepbench: Stepbench, tmp_path: Path, arguments: list[str], wording: str
) -> None:
    done = stepbench(*arguments)
    assert done.returncode == 2
    assert wording in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("records"))


def test_a_choice_that_would_be_shadowed_is_refused(stepbench: Stepbench, tmp_path: Path) -> None:
    conf = tiny_group(tmp_path / "my_conf")
    (conf / "model" / "mlp.yaml").write_text("_target_: user_code_samples.TinyModule\n")
    done = stepbench("--config-dir", str(conf), "model=mlp", "data=tiny")
    assert done.returncode == 2
    assert f"{conf}/model/mlp.yaml has the name of a built-in choice" in done.stderr


def test_closed_standard_streams_do_not_matter(tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m stepbench batch_size=x <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, check=False).returncode == 2


def test_directories_that_would_mix_cells_are_refused(stepbench: Stepbench) -> None:
    for override in ("hydra.sweep.subdir=x", "hydra.sweep.dir=v/${batch_size}", "+hydra.job.env_set.A=2"):
        done = stepbench("-m", "batch_size=8,16", override)
        assert done.returncode == 2, done.stdout
        assert override.split("=")[0].lstrip("+").removesuffix(".A") in done.stderr


def test_a_wrong_request_with_the_full_error_asked_for_exits_2_as_well(
    stepbench: Stepbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    done = stepbench("model=nope")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "wording"),
    [
        (["data=image_folder", "data.root=/no/such/place"], "error", "data.root must be a directory"),
        in_the_full_tier(["data.num_samples=0"], "no_batches", "the data set has 0 samples, fewer than one batch"),
        in_the_full_tier(["model._target_=no.such.Net", "data=tiny"], "error", "no.such.Net: no module no in "),
        in_the_full_tier(
            ["model=tiny", "data=tiny", "data.num_items=3", "batch_size=8"],
            "error",
            "the data set has 3 samples, fewer than",
        ),
        in_the_full_tier(
            ["model=tiny", "data=tiny", "+model.depth=3"], "error", "takes no argument depth (model.depth)"
        ),
    ],
)
def test_a_cell_that_fails_says_why_in_one_line_and_exits_1(
    stepbench: Stepbench, tmp_path: Path, arguments: list[str], status: str, wording: str
) -> None:
    done = stepbench("--config-dir", str(tiny_group(tmp_path / "my_conf")), *arguments, *FAST)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[1/1]")]
    assert f"{status}: " in line
    assert wording in line
    assert "Traceback" not in done.stdout + done.stderr
    summary = yaml.safe_load((only_directory(tmp_path / "outputs") / "timing_summary.yaml").read_text())
    assert summary["status"] == status


@pytest.mark.full
def test_results_in_a_named_directory_are_never_overwritten(stepbench: Stepbench, tmp_path: Path) -> None:
    conf = tiny_group(tmp_path / "my_conf")
    arguments = ("--config-dir", str(conf), "model=tiny", "data=tiny", "plots=false", "hydra.run.dir=mine", *FAST)
    assert stepbench(*arguments).returncode == 0
    before = (tmp_path / "mine" / "records" / "0.0.json").read_text()
    done = stepbench(*arguments)
    assert done.returncode == 2
    assert "mine already holds results" in done.stderr
    assert (tmp_path / "mine" / "records" / "0.0.json").read_text() == before


def test_an_interrupt_keeps_what_there_is_and_exits_130(tmp_path: Path) -> None:
    conf = tiny_group(tmp_path / "my_conf", ["sleep_forever"])
    command = [
        *(sys.executable, "-m", "stepbench", "--config-dir", str(conf), "-m", "model=tiny,sleep_forever,tiny"),
        *("data=tiny", "plots=false", "hydra.sweep.dir=study", "seed=0", *FAST),
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    rows = tmp_path / "study" / "1" / "logs" / "0.log"
    deadline = time.monotonic() + 60
    while not rows.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to everything in the foreground
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, output + errors
    assert "Traceback" not in errors
    records = [read_record(tmp_path / "study" / str(index) / "records" / "0.0.json") for index in range(2)]
    assert [record.status.value for record in records] == ["ok", "interrupted"]
    assert (tmp_path / "study" / "runs.csv").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["--info", "searchpath"]])
def test_questions_are_answered_without_measuring(stepbench: Stepbench, tmp_path: Path, arguments: list[str]) -> None:
    done = stepbench(*arguments)
    assert done.returncode == 0
    assert done.stdout
    assert not (tmp_path / "outputs").exists()


def test_precision_32_works_in_every_spelling(stepbench: Stepbench) -> None:
    for spelling in ("precision=32", "precision='32'", "precision=16", "precision=bf16", "precision=64"):
        done = stepbench(spelling, "--cfg", "job")
        assert done.returncode == 0, done.stderr
    done = stepbench("precision=16", "--cfg", "job", "--package", "precision")
    assert yaml.safe_load(done.stdout)["trainer"] == "16"


@pytest.mark.full
@pytest.mark.parametrize("experiment", sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")))
def test_every_experiment_runs(stepbench: Stepbench, tmp_path: Path, experiment: str) -> None:
    smaller = {
        "batch_precision": ["precision=32", "batch_size=16,32", "model.width=8"],
        "width": ["model.width=8,16"],
        "workers": ["data.num_workers=0,1", "model.width=8"],
    }[experiment]
    done = stepbench(f"experiment={experiment}", *smaller, "plots=false", *FAST)
    assert done.returncode == 0, done.stdout + done.stderr
    directory = only_directory(tmp_path / "multirun")
    assert len(find_cells(directory)) == 2
    (axis,) = {override.split("=")[0] for override in smaller if "," in override}
    assert axis.rpartition(".")[2] in (directory / "cells.csv").read_text().splitlines()[0]


@pytest.mark.full
def test_a_sweep_file_may_hold_unquoted_numbers(stepbench: Stepbench, tmp_path: Path) -> None:
    conf = tiny_group(tmp_path / "my_conf")
    (conf / "experiment").mkdir()
    (conf / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {precision: 32, batch_size: '8,16'}}}\n"
    )
    arguments = ("--config-dir", str(conf), "experiment=mine", "model=tiny", "data=tiny", "plots=false", *FAST)
    done = stepbench(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads((only_directory(tmp_path / "multirun") / "sweep.json").read_text())
    assert [cell["label"] for cell in plan["cells"]] == ["batch_size=8", "batch_size=16"]


def test_an_unquoted_number_as_a_choice_in_a_file_says_to_quote_it(stepbench: Stepbench, tmp_path: Path) -> None:
    conf = tiny_group(tmp_path / "my_conf")
    (conf / "experiment").mkdir()
    (conf / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults: [{override /precision: 32}]\n")
    done = stepbench("--config-dir", str(conf), "experiment=mine")
    assert done.returncode == 2
    assert 'write it in quotes: "32"' in done.stderr


@pytest.mark.full
def test_the_tutorials_epochs_are_whole(stepbench: Stepbench, tmp_path: Path) -> None:
    conf = tiny_group(tmp_path / "my_conf")
    done = stepbench(
        *("--config-dir", str(conf), "model=tiny", "data=tiny", "batch_size=64", "protocol.epochs=3"),
        *("hydra.run.dir=D", "precision=32", "device=cpu", "plots=false"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "D" / "timing_results.csv").read_text().splitlines()) == 1 + 3 * 512 // 64


def test_the_aggregator_as_a_script_answers(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "aggregate.py"), str(tmp_path / "nowhere")]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nowhere" in done.stderr
