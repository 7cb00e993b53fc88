"""Code that expects more of a trainer than the loop runs, and mistakes that a newcomer makes get one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Measure

from stepbench.record import Component, Protocol, RunRecord, Status, canonical_json, log_path

LONGER = Protocol(name="longer", warmup_batches=2, warmup_s=0.0, timed_batches=40, timed_s=0.0)


def demanding(name: str) -> str:
    return f"demanding_samples.{name}"


def ok(record: RunRecord) -> RunRecord:
    assert record.status is Status.OK, record.reason
    assert record.flop is not None
    assert record.flop.problem is None
    return record


def test_a_logger_stands_in_and_its_directory_can_be_written_to(measure: Measure, tmp_path: Path) -> None:
    ok(measure(model=demanding("LoggingModule")))
    assert (tmp_path / "cell" / "scratch" / "notes.txt").read_text() == "written"


def test_callbacks_that_the_module_configures_are_kept_or_set_aside_and_named(measure: Measure) -> None:
    record = ok(measure(model=demanding("CallbackModule"), data_arguments={"num_items": 64}))
    assert record.effective is not None
    assert record.effective.set_aside == ("ModelCheckpoint", "EarlyStopping", "RichProgressBar")


@pytest.mark.parametrize("kind", ["estimated", "epochs", "short", "sequence", "plateau"])
def test_schedules_are_made_for_the_training_and_bear_a_longer_run(measure: Measure, kind: str) -> None:
    record = ok(
        measure(
            model=demanding("ScheduledModule"),
            model_arguments={"kind": kind},
            data_arguments={"num_items": 64},
            protocol=LONGER,
        )
    )
    assert record.summary is not None
    assert record.summary.num_steps == 40


def test_a_module_with_an_endless_stream_of_its_own_is_measured(measure: Measure) -> None:
    record = ok(measure(model=demanding("OwnLoaderModule"), data=None, model_arguments={"kind": "estimated"}))
    assert record.effective is not None
    assert dict(record.effective.placed) == {"batch_size": "rebuilt loader"}
    assert record.effective.batch_size == 16


def test_what_is_expensive_is_done_once_and_is_no_part_of_a_batch(
    measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = ok(measure(model=demanding("LateModule"), data=demanding("ExpensiveData")))
    assert log_path(tmp_path / "cell", 0, 0).read_text().count("data set up") == 1
    assert record.start_up is not None
    assert (record.start_up.first_batch_s or 0) > 0.3
    assert record.summary is not None
    assert record.summary.step.max_s < 0.3
    Path("prepared.txt").unlink()  # where the command was typed


def test_hyperparameters_of_module_and_data_may_differ(measure: Measure) -> None:
    ok(measure(model=demanding("ClashingModule"), data=demanding("ClashingData")))


def test_prints_and_warnings_by_the_thousand_go_to_the_log(measure: Measure, tmp_path: Path) -> None:
    ok(measure(model=demanding("NoisyModule")))
    assert log_path(tmp_path / "cell", 0, 0).read_text().count("line 1999\n") >= 10


def test_a_module_that_stops_the_training_is_measured_that_far(measure: Measure) -> None:
    record = ok(measure(model=demanding("StoppingModule"), protocol=LONGER))
    assert record.summary is not None
    assert record.summary.num_batches + record.summary.num_warmup_batches == 20


@pytest.mark.parametrize("num_items", [16, 40])
def test_epochs_may_be_shorter_than_the_warmup(measure: Measure, num_items: int) -> None:
    record = ok(measure(model=demanding("ScheduledModule"), **shorter_epochs(num_items)))
    assert record.summary is not None
    assert (record.summary.num_warmup_batches, record.summary.num_batches) == (5, 8)


def shorter_epochs(num_items: int) -> dict[str, Any]:
    """Epochs of one batch, or of three of which the last is smaller."""
    protocol = Protocol(name="short", warmup_batches=5, warmup_s=0.0, timed_batches=8, timed_s=0.0)
    return {
        "model_arguments": {"kind": "estimated"},
        "data_arguments": {"num_items": num_items},
        "protocol": protocol,
    }


def test_the_users_own_trainer_is_honoured(measure: Measure) -> None:
    callbacks = [
        {"_target_": "lightning.pytorch.callbacks.LearningRateMonitor"},
        {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val_loss"},
    ]
    arguments = {"gradient_clip_val": 0.5, "max_epochs": 3, "profiler": "simple", "callbacks": callbacks}
    trainer = Component(target="lightning.pytorch.Trainer", arguments_json=canonical_json(arguments))
    effective = ok(measure(trainer=trainer)).effective
    assert effective is not None
    assert dict(effective.trainer_settings) == {"gradient_clip_val": "0.5", "callbacks": "LearningRateMonitor"}
    assert effective.set_aside == ("trainer.profiler", "EarlyStopping", "trainer.max_epochs")


def with_callback(path: str) -> Component:
    arguments = canonical_json({"callbacks": [{"_target_": path}]})
    return Component(target="lightning.pytorch.Trainer", arguments_json=arguments)


@pytest.mark.parametrize(
    ("settings", "wording"),
    [
        (
            {"trainer": with_callback("pytorch_lightning.callbacks.LearningRateMonitor")},
            "callbacks must be built on lightning.pytorch, as the module is, but pytorch_lightning.callbacks",
        ),
        ({"model": demanding("NoSuch")}, "demanding_samples has no NoSuch"),
        ({"model": "lightning.pytorch.nonsense.Net"}, "lightning.pytorch has no nonsense"),
        ({"model": demanding("NeedyModule")}, "needs hidden, which model does not have: give +model.hidden=VALUE"),
        ({"data": demanding("DroppingData")}, "the data set has 10 samples, fewer than one batch of batch_size=16"),
        ({"model": demanding("NoOptimizerModule")}, "configure_optimizers"),
        (
            {"setup_fn": "demanding_samples:of_one"},
            "setup_fn=demanding_samples:of_one is called as a function",
        ),
        ({"setup_fn": "demanding_samples:none"}, "setup_fn: demanding_samples:none: demanding_samples has no none"),
    ],
)
def test_a_newcomer_s_mistake_gets_one_line_that_says_what_to_do(measure: Measure, settings: Any, wording: str) -> None:
    record = measure(**settings)
    assert record.status in (Status.ERROR, Status.NO_BATCHES)
    assert wording in (record.reason or "")
    assert "\n" not in (record.reason or "")


def test_a_function_of_the_user_s_comes_between_construction_and_fit(measure: Measure) -> None:
    record = ok(measure(setup_fn="demanding_samples:nothing", batch_size=4, data_arguments={"batch_size": 64}))
    assert record.effective is not None
    assert record.effective.batch_size == 4


@pytest.mark.full
@pytest.mark.parametrize(
    "classes",
    [
        {"model": "lightning.pytorch.demos.boring_classes.BoringModel"},
        {"model": "lightning.pytorch.demos.boring_classes.ManualOptimBoringModel"},
        {
            "model": "lightning.pytorch.demos.boring_classes.DemoModel",
            "data": "lightning.pytorch.demos.boring_classes.BoringDataModule",
        },
    ],
)
def test_lightning_s_own_demonstrations_are_measured(measure: Measure, classes: dict[str, str]) -> None:
    record = ok(measure(**{"data": None, **classes}, data_arguments={"batch_size": None}))
    assert record.effective is not None
    assert record.effective.batch_size == 16


@pytest.mark.full
@pytest.mark.parametrize("network", ["NBeats", "NHiTS", "TemporalFusionTransformer", "DeepAR"])
def test_networks_of_a_package_that_many_use_are_measured(measure: Measure, network: str) -> None:
    pytest.importorskip("pytorch_forecasting", reason="pytorch-forecasting asks for an older pandas")
    record = ok(
        measure(
            model="forecasting_samples.make", model_arguments={"network": network}, data="forecasting_samples.Series"
        )
    )
    assert record.summary is not None
    assert record.summary.num_samples == 8 * 16
