"""What the user's own configuration says beside its classes: read while cells are composed, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from stepbench.record import RunRequest
from stepbench.settings import SettingsError, conf_dir, read_request
from stepbench.user_files import TrainerWishes, gather_trainer, read_wishes

CUSTOM = ("data=custom", "data.path=my:Data")

CHOICES = {"model": "mine", "data": "mine", "precision": "inherit", "device": "auto", "protocol": "quick"}


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def request_of(*overrides: str, directory: Path = Path()) -> RunRequest:
    return read_request(composed(*overrides), CHOICES, directory=directory)


def problems_of(*overrides: str, directory: Path = Path()) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        request_of(*overrides, directory=directory)
    return caught.value.problems


# ---- the trainer ----


@pytest.mark.parametrize(
    ("trainer", "wishes"),
    [
        ({}, TrainerWishes()),
        ({"precision": 16, "accelerator": "gpu"}, TrainerWishes(precision="16", accelerator="gpu")),
        ({"precision": "${p}", "accelerator": "auto", "strategy": "auto"}, TrainerWishes()),
        ({"devices": 2, "strategy": "ddp"}, TrainerWishes(num_devices=2, strategy="ddp")),
        ({"devices": "2"}, TrainerWishes(num_devices=2)),
        ({"devices": [0, 3]}, TrainerWishes(num_devices=2)),
        ({"devices": "auto"}, TrainerWishes(set_aside=("trainer.devices=auto",))),
        ({"devices": -1}, TrainerWishes(set_aside=("trainer.devices=-1",))),
        ({"devices": "${n}"}, TrainerWishes(set_aside=("trainer.devices=${n}",))),
        (
            {"strategy": {"class_path": "DDPStrategy"}, "accumulate_grad_batches": 4},
            TrainerWishes(accumulate_grad_batches=4),
        ),
    ],
)
def test_plain_values_of_the_trainer_are_followed_and_others_named(trainer: Any, wishes: TrainerWishes) -> None:
    assert read_wishes(trainer) == wishes


def test_what_wins_is_the_command_line_then_the_users_files_then_the_default() -> None:
    users = ("+trainer.precision=bf16-mixed", "+trainer.accumulate_grad_batches=4", "+trainer.devices=2")
    spec = request_of(*users).spec
    assert (spec.precision, spec.accumulate_grad_batches, spec.num_devices) == ("bf16-mixed", 4, 2)
    spec = request_of(*users, "precision='64'", "accumulate_grad_batches=1", "devices=1").spec
    assert (spec.precision, spec.accumulate_grad_batches, spec.num_devices) == ("64", 1, 1)
    spec = request_of().spec
    assert (spec.precision, spec.accumulate_grad_batches, spec.num_devices, spec.seed) == ("32", 1, 1, 0)
    assert spec.trainer is None


def test_what_ran_labels_the_precision_of_a_users_file() -> None:
    assert dict(request_of("+trainer.precision=bf16-mixed").choices)["precision"] == "bf16-mixed"
    assert dict(request_of().choices)["precision"] == "32"


def test_a_run_s_own_directories_make_no_other_workload() -> None:
    trainer = {"_target_": "lightning.pytorch.Trainer", "default_root_dir": "/run/1", "max_epochs": 3, "min_epochs": 1}
    trainer |= {"gradient_clip_val": 0.5, "devices": 1, "logger": True}
    callbacks = {
        "save": {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": "/run/1"},
        "stop": {"_target_": "pytorch_lightning.callbacks.early_stopping.EarlyStopping"},
        "own": {"_target_": "my.Timer"},
        "nothing": None,
    }
    arguments, aside = gather_trainer(trainer, callbacks)
    assert arguments == {"max_epochs": 3, "gradient_clip_val": 0.5, "callbacks": [{"_target_": "my.Timer"}]}
    assert aside == [
        *("trainer.default_root_dir", "trainer.min_epochs", "trainer.logger"),
        *("ModelCheckpoint", "EarlyStopping"),
    ]


def test_a_strategy_that_leaves_no_records_is_refused_wherever_it_comes_from() -> None:
    (problem,) = problems_of("+trainer.strategy=ddp_spawn")
    assert "must be one that starts each process as a command" in problem


# ---- the loaders' settings ----


def test_settings_are_written_to_the_arguments_with_usual_names_at_any_depth() -> None:
    arguments = "loader: {bs: 4, workers: 0}, val_loader: {batch_size: 1}, copy: '${data.kwargs.loader.bs}'"
    request = request_of(*CUSTOM, f"+data.kwargs={{{arguments}}}", "batch_size=64", "num_workers=3")
    assert request.spec.data is not None
    assert request.spec.data.arguments == {
        "loader": {"bs": 64, "workers": 3},
        "val_loader": {"batch_size": 1},
        "copy": 64,  # an interpolation follows
    }
    assert dict(request.placed) == {
        "batch_size": "data.kwargs.loader.bs",
        "num_workers": "data.kwargs.loader.workers",
    }


def test_without_a_batch_size_the_users_own_stands() -> None:
    request = request_of(*CUSTOM, "+data.kwargs={batch_size: 4}")
    assert request.spec.batch_size is None
    assert request.placed == ()
    assert request_of(*CUSTOM, "+data.kwargs={batch_size: '${batch_size}'}").spec.batch_size == 32


def test_the_batch_size_key_is_what_is_set() -> None:
    data = (*CUSTOM, "+data.kwargs={size: 4, batch_size: 5}", "batch_size=9")
    request = request_of(*data, "batch_size_key=data.kwargs.size")
    assert request.spec.data is not None
    assert request.spec.data.arguments == {"size": 9, "batch_size": 5}
    (problem,) = problems_of(*data, "batch_size_key=data.sise")
    assert problem == "batch_size_key=data.sise: the configuration has no such key"


def test_two_candidates_are_left_to_the_loader() -> None:
    request = request_of(*CUSTOM, "+data.kwargs={a: {batch_size: 4}, b: {batch_size: 5}}", "batch_size=9")
    assert request.placed == ()


# ---- import paths without files ----


def test_a_class_and_its_arguments_may_stand_on_the_command_line() -> None:
    request = request_of("model=custom", "model.path=./train.py:LitNet", "+model.kwargs.hidden=64")
    assert request.spec.model is not None
    assert (request.spec.model.target, request.spec.model.arguments) == ("./train.py:LitNet", {"hidden": 64})
    assert request.spec.data is None
    assert problems_of("model=custom") == ("model.path is required and has no default: give it as model.path=VALUE",)
    assert "model.path must be an importable path" in problems_of("model=custom", "model.path=LitNet")[0]


# ---- files for LightningCLI ----


@pytest.fixture
def cli_file(tmp_path: Path) -> Path:
    path = tmp_path / "cli.yaml"
    path.write_text(
        "fit:\n  model: {class_path: my.pkg.LitNet}\n  data: {class_path: MyData}\n"
        "  trainer: {devices: 2, strategy: ddp, precision: 16}\n"
    )
    return path


def test_files_are_looked_into_for_what_the_parent_must_know(cli_file: Path) -> None:
    (cli_file.parent / "more.yaml").write_text("trainer: {precision: bf16-mixed}\n")
    overrides = ("model=none", "data=none", "cli_config=cli.yaml", "cli_config_extra=more.yaml")
    request = request_of(*overrides, "+model.init_args.hidden=8", "+optimizer.lr=1", directory=cli_file.parent)
    spec = request.spec
    assert (spec.num_devices, spec.strategy, spec.precision, spec.seed) == (2, "ddp", "bf16-mixed", None)
    assert spec.cli is not None
    assert spec.cli.files == (str(cli_file), str(cli_file.parent / "more.yaml"))
    assert spec.cli.overrides == {"model": {"init_args": {"hidden": 8}}, "optimizer": {"lr": 1}}
    assert (dict(request.choices)["model"], dict(request.choices)["data"]) == ("LitNet", "MyData")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("cli_config=no.yaml",), "cli_config: no.yaml cannot be read: No such file or directory"),
        (("cli_config=list.yaml",), "cli_config: list.yaml must hold a mapping with model:, data: and trainer:"),
        (("cli_config=broken.yaml",), "cli_config: broken.yaml is no YAML: "),
        (("cli_config=cli.yaml", "model=mlp"), "model=mine and cli_config both name what to train; leave one out"),
        (
            ("cli_config=cli.yaml", "cli_model=LitNet"),
            "cli_model must be an importable path, such as my_module:MyClass",
        ),
        (("cli_config=cli.yaml", "+hidden=3"), "there is no setting hidden"),
    ],
)
def test_a_wrong_file_is_named(cli_file: Path, overrides: tuple[str, ...], problem: str) -> None:
    (cli_file.parent / "list.yaml").write_text("- 1\n")
    (cli_file.parent / "broken.yaml").write_text("a: [\n")
    none = [f"{group}=none" for group in ("model", "data") if not any(o.startswith(group) for o in overrides)]
    found = problems_of(*none, *overrides, directory=cli_file.parent)
    assert problem in found[0]


def test_keys_for_files_need_a_file() -> None:
    assert problems_of("cli_class=my.CLI") == (
        "cli_class must be null where there is no cli_config (it is for a subclass of LightningCLI), got 'my.CLI'",
    )
    assert problems_of("model=none", "data=none") == (
        "model=none takes a cli_config=FILE, which names the module; or choose another model",
    )
