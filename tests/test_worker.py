"""Runs in real workers, forked from one warm server or spawned: what they leave behind, however they end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Measure
from worker_lab import plan

from stepbench.launcher import ForkLauncher, Launcher, SpawnLauncher, can_fork, worker_environment
from stepbench.record import Protocol, Status, find_cells, log_path
from stepbench.sweep import measure_cell


def test_an_ordinary_run_is_recorded_whole(measure: Measure, tmp_path: Path) -> None:
    record = measure(accumulate_grad_batches=2)
    assert record.status is Status.OK
    assert record.reason is None
    assert record.summary is not None
    assert record.summary.num_steps == 4
    assert record.summary.num_batches == 8
    assert record.summary.num_warmup_batches == 2
    assert record.summary.num_samples == 8 * 16
    assert record.num_parameters == record.num_trainable_parameters == 5
    effective = record.effective
    assert effective is not None
    assert (effective.precision, effective.batch_size, effective.accelerator) == ("32-true", 16, "cpu")
    assert (effective.accumulate_grad_batches, effective.num_workers, effective.timer) == (2, 0, "host")
    assert (effective.num_devices, effective.compile, effective.lightning_package) == (1, None, "lightning.pytorch")
    assert record.compilation is None
    environment = record.environment
    assert environment is not None
    assert {"python", "torch", "lightning", "stepbench"} <= dict(environment.versions).keys()
    assert record.start_up is not None
    assert record.start_up.first_batch_s is not None
    assert (record.peak_host_memory_bytes or 0) > 50e6
    lines = (tmp_path / "cell" / "timing_results.csv").read_text().splitlines()
    assert len(lines) == 1 + 10
    assert find_cells(tmp_path) == [tmp_path / "cell"]


def test_the_effective_precision_is_the_one_that_ran(measure: Measure) -> None:
    record = measure(precision="16-mixed")
    assert record.effective is not None
    assert record.effective.precision == "bf16-mixed"


def test_short_epochs_repeat_until_enough_is_measured(measure: Measure, tmp_path: Path) -> None:
    record = measure(data_arguments={"num_items": 48})
    assert record.summary is not None
    assert record.summary.num_batches == 8
    epochs = [line.split(",")[2] for line in (tmp_path / "cell" / "timing_results.csv").read_text().splitlines()[1:]]
    assert epochs == ["0", "0", "0", "1", "1", "1", "2", "2", "2", "3"]


def test_whole_epochs_run_to_their_end(measure: Measure) -> None:
    whole = Protocol(name="epochs", warmup_batches=2, warmup_s=0.0, timed_batches=1, timed_s=0.0, epochs=3)
    record = measure(data_arguments={"num_items": 64}, protocol=whole)
    assert record.summary is not None
    assert record.summary.num_batches + record.summary.num_warmup_batches == 12


def test_threads_asked_for_are_the_threads_that_run(measure: Measure) -> None:
    record = measure(num_threads=2)
    assert record.effective is not None
    assert record.effective.num_threads == 2


def test_unknown_sample_counts_stay_unknown(measure: Measure) -> None:
    record = measure(data="UncountableData")
    assert record.status is Status.OK
    assert record.summary is not None
    assert record.summary.samples_per_s is None


def test_the_users_own_count_of_samples_is_taken(measure: Measure) -> None:
    record = measure(data="UncountableData", batch_size_fn="user_code_samples.count_opaque")
    assert record.status is Status.OK, record.reason
    assert record.summary is not None
    assert record.summary.num_samples == 8 * 16


def test_a_module_of_the_other_lightning_package_is_measured_with_that_one(measure: Measure) -> None:
    record = measure(model="other_package_samples.OtherModule", data="other_package_samples.OtherData")
    assert record.status is Status.OK, record.reason
    assert record.effective is not None
    assert record.effective.lightning_package == "pytorch_lightning"
    assert record.summary is not None
    assert all(phase.step is not None and phase.step.median_s > 0 for phase in record.summary.phases)


def test_a_module_that_compiles_a_part_of_itself_says_so(measure: Measure) -> None:
    record = measure(model="CompilingModule")
    assert record.status is Status.OK, record.reason
    assert record.compilation is not None
    assert record.compilation.num_graphs >= 1
    assert record.effective is not None
    assert record.effective.compile is None


@pytest.mark.full
@pytest.mark.parametrize(
    "classes",
    [
        {},
        {"model": "LoggingModule"},
        {"model": "other_package_samples.OtherModule", "data": "other_package_samples.OtherData"},
    ],
)
def test_a_model_is_compiled_where_asked_for(measure: Measure, classes: dict[str, str]) -> None:
    record = measure(compile="default", timeout_s=200.0, **classes)
    assert record.status is Status.OK, record.reason
    assert record.effective is not None
    assert record.effective.compile == "default"
    assert record.compilation is not None
    assert record.compilation.num_graphs >= 1
    assert record.num_parameters == 5


@pytest.mark.parametrize(
    ("fault", "status", "wording"),
    [
        ("raise_value_error", Status.ERROR, "ValueError: planted: out of memory, says a ValueError (user_code_samples"),
        ("raise_out_of_memory", Status.OOM, "CUDA out of memory"),
        ("allocate_too_much", Status.OOM, "can't allocate memory"),
        ("exit_politely", Status.ERROR, "the user's code called sys.exit(0)"),
        ("end_itself", Status.CRASHED, "the worker was ended by SIGTERM"),
        ("interrupt_itself", Status.INTERRUPTED, "the worker was interrupted"),
        ("raise_a_file_name", Status.ERROR, "no file caf\\udce9.png"),
        ("raise_something_silent", Status.ERROR, "SilentError (user_code_samples.py:"),
        ("raise_at_length", Status.ERROR, "xxx … (20000 characters)"),
    ],
)
def test_a_fault_in_batch_7_keeps_the_batches_before_it(
    measure: Measure, tmp_path: Path, fault: str, status: Status, wording: str
) -> None:
    record = measure(model_arguments={"fault": fault})
    assert record.status is status
    assert wording in (record.reason or "")
    assert record.summary is None
    assert len((tmp_path / "cell" / "timing_results.csv").read_text().splitlines()) == 1 + 7
    assert "Traceback" in (record.traceback or "")
    assert len(record.reason or "") < 700
    assert (record.traceback or "x") in log_path(tmp_path / "cell", 0, 0).read_text()


@pytest.mark.parametrize(
    ("data", "batch_size_fn"),
    [
        ("OversamplingData", None),
        ("TwoLoadersData", None),
        ("BatchedItemsData", "user_code_samples.count_rows"),  # its loader says 1
    ],
)
def test_loaders_that_reach_the_batch_size_in_their_own_way_are_measured(
    measure: Measure, data: str, batch_size_fn: str | None
) -> None:
    record = measure(data=data, model="FirstTensorModule", batch_size_fn=batch_size_fn)
    assert record.status is Status.OK, record.reason
    assert record.effective is not None
    assert record.effective.batch_size == 16


@pytest.mark.parametrize(
    ("fault", "wording"),
    [
        ("kill_itself", "the worker was killed by SIGKILL"),
        ("leave_quietly", "ended with exit code 0 and left no record"),
    ],
)
def test_a_worker_that_vanishes_leaves_a_record_that_names_its_log(
    measure: Measure, tmp_path: Path, fault: str, wording: str
) -> None:
    record = measure(model_arguments={"fault": fault})
    assert record.status is Status.CRASHED
    assert wording in (record.reason or "")
    assert str(log_path(tmp_path / "cell", 0, 0)) in (record.reason or "")
    assert measure("next").status is Status.OK


def test_workers_do_not_inherit_a_rank_or_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    for name in ("MASTER_PORT", "PL_GLOBAL_SEED", "TORCHELASTIC_RUN_ID", "KEPT_BY_A_TEST"):
        monkeypatch.setenv(name, "1")
    kept = worker_environment()
    assert {name for name in os.environ if name not in kept} == {
        *("LOCAL_RANK", "RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"),
        *("MASTER_PORT", "PL_GLOBAL_SEED", "TORCHELASTIC_RUN_ID"),
    }
    assert kept["KEPT_BY_A_TEST"] == "1"


@pytest.mark.skipif(not can_fork(), reason="workers cannot be forked here")
def test_the_warm_server_is_no_rank_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    own = ForkLauncher()
    own.start()
    try:
        assert own._server is not None
        variables = Path(f"/proc/{own._server.pid}/environ").read_bytes().split(bytes(1))
        assert b"LOCAL_RANK=1" not in variables
        assert len(variables) > 3
    finally:
        own.close()


def launchers() -> list[Any]:
    fork = pytest.param(ForkLauncher, marks=pytest.mark.skipif(not can_fork(), reason="workers cannot be forked here"))
    return [fork, pytest.param(SpawnLauncher, marks=pytest.mark.full)]


@pytest.mark.parametrize("kind", launchers())
def test_the_time_limit_ends_the_whole_process_group(kind: Any, launcher: Launcher, tmp_path: Path) -> None:
    limited = launcher if isinstance(launcher, kind) else kind()
    fault = {"fault": "start_children_and_sleep", "at": 0}
    timeout_s = 2.0 if kind is ForkLauncher else 25.0  # a spawned worker imports torch first
    record = measure_cell(plan(tmp_path / "cell", model_arguments=fault, timeout_s=timeout_s), limited)
    assert record.status is Status.TIMEOUT
    assert f"timeout_s={timeout_s:g}" in (record.reason or "")
    assert_nobody_is_left(tmp_path)


def processes_of(directory: Path) -> list[int]:
    """The processes whose standard output is a log below `directory`."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.readlink(process / "fd" / "1").startswith(str(directory)):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def assert_nobody_is_left(directory: Path) -> None:
    deadline = time.monotonic() + 5
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(directory) == []


@pytest.mark.skipif(not can_fork(), reason="workers cannot be forked here")
def test_an_interrupt_ends_the_worker_and_leaves_the_server_usable(tmp_path: Path, launcher: Launcher) -> None:
    fault = {"fault": "start_children_and_sleep", "at": 0}
    timer = threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        measure_cell(plan(tmp_path / "cell", model_arguments=fault), launcher)
    assert_nobody_is_left(tmp_path)
    assert measure_cell(plan(tmp_path / "next"), launcher).status is Status.OK


@pytest.mark.full
@pytest.mark.skipif(not can_fork(), reason="workers cannot be forked here")
def test_a_server_that_dies_costs_one_cell(tmp_path: Path) -> None:
    own = ForkLauncher()
    try:
        assert measure_cell(plan(tmp_path / "first"), own).status is Status.OK
        assert own._server is not None
        timer = threading.Timer(1.0, own._server.kill)
        timer.start()
        record = measure_cell(plan(tmp_path / "second", model_arguments={"fault": "sleep_forever", "at": 0}), own)
        assert record.status is Status.CRASHED
        assert_nobody_is_left(tmp_path)
        assert measure_cell(plan(tmp_path / "third"), own).status is Status.OK
    finally:
        own.close()
    assert own._server is None


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ("TinyData", "data.batch_size"),
        ("DeafData", "rebuilt loader"),
        ("LargerBatchData", "rebuilt loader"),
        ("AttributeData", "attribute train_batch_size of AttributeData"),
    ],
)
def test_what_brought_the_batch_size_to_the_loader_is_recorded(measure: Measure, data: str, where: str) -> None:
    record = measure(data=data, data_arguments={"batch_size": None} if data == "AttributeData" else {})
    assert record.status is Status.OK, record.reason
    assert record.effective is not None
    assert record.effective.batch_size == 16
    assert dict(record.effective.placed)["batch_size"] == where


@pytest.mark.parametrize(
    ("settings", "status", "wording"),
    [
        (
            {"data": "ForeignLoaderData"},
            Status.ERROR,
            "batch_size=16 did not reach the data loader, whose batches hold 3 samples",
        ),
        (
            {"data": "ForeignLoaderData", "batch_size": 3, "num_workers": 2},
            Status.ERROR,
            "num_workers=2 did not reach the data loader, which does not tell what it has. Three ways",
        ),
        (
            {"data": "BatchedItemsData", "model": "FirstTensorModule"},
            Status.ERROR,
            "if it hands out whole batches as items, name a function that counts their samples: batch_size_fn",
        ),
        (
            {"data_arguments": {"num_items": 10}},
            Status.ERROR,
            "the data set has 10 samples, fewer than one batch",
        ),
        ({"data": "EmptyStreamData"}, Status.NO_BATCHES, "the data loader gave no batches"),
        ({"accelerator": "cuda"}, Status.UNSUPPORTED, "there is no cuda device here; usable: cpu"),
        ({"accelerator": "abacus"}, Status.UNSUPPORTED, "abacus"),
        ({"model": "TinyModul"}, Status.ERROR, "user_code_samples has no TinyModul; did you mean TinyModule?"),
        ({"model": "nested.Module"}, Status.ERROR, "user_code_samples has no nested"),
        ({"model": "not_a_module"}, Status.ERROR, "model._target_ must name a lightning LightningModule"),
        ({"data": "not_a_module"}, Status.ERROR, "data._target_ must name a lightning LightningDataModule"),
        (
            {"data": "other_package_samples.OtherData"},
            Status.ERROR,
            "model and data must be built on the same Lightning package, but user_code_samples.TinyModule is a "
            "LightningModule of lightning.pytorch and other_package_samples.OtherData a LightningDataModule of "
            "pytorch_lightning",
        ),
        ({"strategy": "abacus"}, Status.ERROR, "Lightning has no strategy=abacus; strategies: ddp, "),
        (
            {"strategy": "fsdp"},
            Status.UNSUPPORTED,
            "precision 32 on cpu with strategy=fsdp: The strategy `fsdp` requires",
        ),
        (
            {"batch_size_fn": "user_code_samples.count_row"},
            Status.ERROR,
            "batch_size_fn: user_code_samples.count_row: user_code_samples has no count_row; did you mean count_rows?",
        ),
        (
            {"batch_size_fn": "user_code_samples.NOT_A_FUNCTION"},
            Status.ERROR,
            "batch_size_fn must name a function, got user_code_samples.NOT_A_FUNCTION whose type is int",
        ),
        (
            {"batch_size_fn": "user_code_samples.count_in_words"},
            Status.ERROR,
            "batch_size_fn must return a whole number of samples or None, got 'sixteen'",
        ),
        ({"model_arguments": {"depth": 3}}, Status.ERROR, "takes no argument depth (model.depth); it takes fault"),
    ],
)
def test_what_cannot_be_measured_says_why(measure: Measure, settings: Any, status: Status, wording: str) -> None:
    if settings.get("accelerator") == "cuda":
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device here")
    record = measure(**settings)
    assert record.status is status
    assert wording in (record.reason or "")


@pytest.mark.skipif(not can_fork(), reason="workers cannot be forked here")
def test_a_cell_that_changes_its_process_leaves_no_trace_in_the_next(measure: Measure, tmp_path: Path) -> None:
    measure("first", model="LeakyModule", num_threads=2)
    measure("second", model="LeakyModule", num_threads=2)
    assert "found [False, False, False]" in log_path(tmp_path / "second", 0, 0).read_text()


def test_a_spawned_worker_measures_the_same(tmp_path: Path) -> None:
    record = measure_cell(plan(tmp_path / "cell"), SpawnLauncher())
    assert record.status is Status.OK
    assert record.effective is not None
    assert record.effective.worker_start == "spawn"
    assert record.start_up is not None
    assert record.start_up.import_s > 0
    assert json.loads((tmp_path / "cell" / "request.json").read_text())["timer"] == "auto"
