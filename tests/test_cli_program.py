"""Programs built from files for LightningCLI: as the command line would have them, without running anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import yaml

from stepbench.cli_program import CliConfigError, build_cli_program, build_cli_program_and_config
from stepbench.loader_arguments import LoaderSettings
from stepbench.record import CliProgram
from stepbench.user_code import Program

SAMPLES = Path(__file__).resolve().parent / "cli_samples"

if str(SAMPLES) not in sys.path:
    sys.path.insert(0, str(SAMPLES))

import cli_user_code as code  # noqa: E402

Build = Callable[..., Program]

SMALL = "model:\n  class_path: cli_user_code.Model\ndata:\n  class_path: cli_user_code.Data\n"


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    code.CONSTRUCTED.clear()
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setattr(sys, "argv", ["main.py", "fit", "--config", "another.yaml"])
    yield
    assert sys.argv[1:] == ["fit", "--config", "another.yaml"]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Builds a program from the texts of its files, which are `0.yaml`, `1.yaml` and so on."""

    def run(
        *texts: str,
        wanted: dict[str, Any] | None = None,
        seed: int | None = None,
        batch_size_key: str | None = None,
        overrides: dict[str, Any] | None = None,
        **classes: Any,
    ) -> Program:
        paths = []
        for number, text in enumerate(texts):
            path = tmp_path / f"{number}.yaml"
            path.write_text(text)
            paths.append(str(path))
        named = {key: f"cli_user_code.{value}" if isinstance(value, str) else value for key, value in classes.items()}
        cli = CliProgram(
            files=tuple(paths), sha256=("",) * len(paths), overrides_json=json.dumps(overrides or {}), **named
        )
        return build_cli_program(cli, wanted=LoaderSettings(**(wanted or {})), seed=seed, batch_size_key=batch_size_key)

    return run


def train(program: Program, root: Any = lightning.pytorch) -> Any:
    trainer = root.Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=program.trainer.arguments["callbacks"],
    )
    trainer.fit(program.model, datamodule=program.datamodule)
    assert trainer.global_step == 2
    return trainer


def callbacks_of(program: Program) -> list[str]:
    return [type(callback).__name__ for callback in program.trainer.arguments["callbacks"]]


# ---- what is built ----


def test_a_flat_file_is_built_and_what_a_timing_run_must_not_use_never_is(build: Build) -> None:
    program = build(sample("flat.yaml"))
    assert (type(program.model).__name__, program.model.hidden) == ("NoOptimizerModel", 5)
    assert (program.datamodule.batch_size, program.datamodule.root) == (16, "somewhere")
    assert code.CONSTRUCTED == []
    assert program.trainer.set_aside == [
        "trainer.logger",
        "trainer.enable_progress_bar",
        "trainer.profiler",
        "EarlyStopping",
        "UserCheckpoint",
        "BatchSizeFinder",
        "ckpt_path",
    ]
    arguments = program.trainer.arguments
    assert (arguments["max_epochs"], arguments["max_steps"], arguments["gradient_clip_val"]) == (3, -1, 0.5)
    assert not {"logger", "profiler", "enable_progress_bar", "limit_val_batches"} & set(arguments)
    assert [vars(callback) for callback in arguments["callbacks"]] == [{"every": 2}]
    assert program.trainer.trainer_class is None
    assert program.placed == {}


def test_a_built_program_trains_with_the_optimizer_of_the_file(build: Build) -> None:
    trainer = train(build(sample("flat.yaml")))
    assert [type(optimizer) for optimizer in trainer.optimizers] == [torch.optim.SGD]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01


def test_a_schedule_that_watches_a_metric_is_built(build: Build) -> None:
    schedule = "lr_scheduler:\n  class_path: ReduceLROnPlateau\n  init_args:\n    monitor: train_loss\n"
    program = build(sample("flat.yaml") + schedule)
    config = program.model.configure_optimizers()["lr_scheduler"]
    assert config["monitor"] == "train_loss"
    assert isinstance(config["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau)
    train(program)


def test_optimizers_can_be_callables_of_the_model_or_linked_to_it(build: Build) -> None:
    scheduler = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}}
    optimizer = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.25}}
    model = {"class_path": "cli_user_code.CallableModel", "init_args": {"optimizer": optimizer, "scheduler": scheduler}}
    configured = build(yaml.safe_dump({"model": model})).model.configure_optimizers()
    assert isinstance(configured["optimizer"], torch.optim.Adam)
    assert isinstance(configured["lr_scheduler"], torch.optim.lr_scheduler.StepLR)
    text = (
        "model: {class_path: cli_user_code.LinkedOptimizerModel}\n"
        "first: {class_path: SGD, init_args: {lr: 0.5}}\n"
        "second: {lr: 0.25}\n"
    )
    linked = build(text, cli_class="OptimizersCLI").model
    assert linked.configure_optimizers().param_groups[0]["lr"] == 0.5
    assert linked.second_init["init_args"]["lr"] == 0.25


def test_files_with_sections_and_flat_ones_are_stacked_in_any_order(build: Build) -> None:
    program = build(sample("sectioned.yaml"))
    assert (program.model.hidden, program.datamodule.batch_size) == (5, 12)
    flat, section = "model: {init_args: {hidden: 6, width: 6}}\n", "fit: {model: {init_args: {width: 7}}}\n"
    program = build(sample("sectioned.yaml"), flat, section)
    assert (program.model.hidden, program.model.width) == (6, 7)
    program = build(SMALL, section, flat)
    assert (program.model.hidden, program.model.width) == (6, 6)


def test_short_names_and_imports(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_imported.py").write_text("from cli_user_code import Model\n\nclass Rare(Model):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    program = build("model:\n  class_path: Rare\n", imports=("only_imported",))
    assert type(program.model).__name__ == "Rare"
    assert type(build("model: OwnLoaderModel\n").model).__name__ == "OwnLoaderModel"


def test_files_named_in_a_file_are_found_beside_it(build: Build, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/model.yaml").write_text("class_path: cli_user_code.Model\ninit_args: {hidden: 4}\n")
    assert build("model: parts/model.yaml\n").model.hidden == 4


def test_overrides_are_what_a_command_line_gives(build: Build) -> None:
    overrides = {
        "model": {"init_args": {"hidden": 64}},
        "optimizer": {"init_args": {"lr": 0.5}, "class_path": "AdamW"},
        "trainer": {"max_epochs": None, "callbacks": [{"class_path": "cli_user_code.UserCallback"}]},
        "data": {"init_args": {"root": "7"}},
    }
    program = build(sample("flat.yaml"), overrides=overrides)
    assert program.model.hidden == 64
    assert program.datamodule.root == "7"
    assert program.trainer.arguments["max_epochs"] is None
    assert callbacks_of(program) == ["UserCallback"]
    optimizer = program.model.configure_optimizers()
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_seed_is_the_one_asked_for_else_the_files(build: Build) -> None:
    weights = [build(sample("flat.yaml"), seed=seed).model.net[0].weight for seed in (None, 7, 8)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_the_configuration_can_be_stored_and_read_again(build: Build, tmp_path: Path) -> None:
    path = SAMPLES / "flat.yaml"
    cli = CliProgram(files=(str(path),), sha256=("",))
    _, text = build_cli_program_and_config(cli, wanted=LoaderSettings(batch_size=3), seed=5)
    stored = yaml.safe_load(text)
    assert stored["seed_everything"] == 5
    assert stored["data"]["init_args"]["batch_size"] == 3
    assert stored["trainer"]["logger"]["class_path"] == "cli_user_code.CountingLogger"
    assert stored["ckpt_path"] == "nowhere/last.ckpt"
    assert build(text).datamodule.batch_size == 3


def test_the_arguments_of_the_process_do_not_matter(build: Build, recwarn: pytest.WarningsRecorder) -> None:
    build(SMALL)
    assert not [warning for warning in recwarn if "sys.argv" in str(warning.message)]


def test_an_exception_of_the_users_constructor_comes_out_as_it_was_raised(build: Build) -> None:
    with pytest.raises(TypeError, match="^the user's own mistake$"):
        build("model: cli_user_code.BrokenModel\n")
    with pytest.raises(ValueError, match="^second$") as caught:
        build("model: cli_user_code.ChainedModel\n")
    assert not isinstance(caught.value, CliConfigError)
    assert isinstance(caught.value.__cause__, KeyError)


# ---- command lines of the user's ----


def test_hooks_links_and_callbacks_of_the_users_command_line_take_effect(build: Build) -> None:
    text = "note: hello\nckpt_path: x.ckpt\nmy_cb: {every: 6}\n"
    program = build(sample("sectioned.yaml"), sample("flat.yaml"), text, cli_class="UserCLI", wanted={"batch_size": 9})
    assert code.CONSTRUCTED == ["before_instantiate_classes", "log_dir True", "before_fit"]
    assert program.model.name == "note hello"
    assert program.model.width == program.datamodule.batch_size == 9
    assert program.datamodule.max_epochs == program.model.seen_epochs == 3
    assert [callback.every for callback in program.trainer.arguments["callbacks"]] == [2, 6, 77]
    assert program.trainer.set_aside.count("EarlyStopping") == 1
    assert "ckpt_path" in program.trainer.set_aside
    train(program)


def test_a_command_line_that_takes_nothing_is_called_with_nothing(build: Build) -> None:
    program = build(sample("fixed.yaml"), cli_class="FixedCLI", wanted={"batch_size": 9, "num_workers": 0})
    assert (program.model.hidden, program.datamodule.batch_size) == (3, 9)
    assert program.placed == {"batch_size": "data.batch_size", "num_workers": "data.num_workers"}
    assert program.trainer.trainer_class is code.UserTrainerClass
    assert (program.trainer.arguments["tag"], program.trainer.arguments["max_epochs"]) == ("plain", 4)
    train(program)


def test_files_for_fixed_classes(build: Build) -> None:
    program = build(sample("fixed.yaml"), model_class="Model", data_class="Data", wanted={"batch_size": 9})
    assert (type(program.model).__name__, program.model.hidden, program.datamodule.batch_size) == ("Model", 3, 9)
    program = build(SMALL.replace(".Model", ".OwnLoaderModel"), model_class="Model", data_class="Data")
    assert type(program.model).__name__ == "OwnLoaderModel"
    assert build("model: {hidden: 2}\n", model_class="make_model").model.hidden == 2


def test_trainers_that_the_command_line_makes_in_its_own_way(build: Build) -> None:
    program = build(sample("flat.yaml"), cli_class="TrainerCLI")
    assert program.trainer.arguments["gradient_clip_val"] == 0.25
    assert program.trainer.set_aside.count("trainer.logger") == 1
    program = build(sample("flat.yaml"), cli_class="OwnTrainerCLI")
    assert [callback.every for callback in program.trainer.arguments["callbacks"]] == [9]
    assert program.trainer.arguments["max_epochs"] == 2
    program = build("model: {hidden: 3}\n", cli_class="DefaultsCLI", model_class="Model")
    assert [callback.every for callback in program.trainer.arguments["callbacks"]] == [3]
    assert program.trainer.arguments["gradient_clip_val"] == 0.5
    assert "UserCheckpoint" in program.trainer.set_aside
    program = build(SMALL, "trainer: {max_epochs: 8}\n", cli_class="FunctionCLI")
    assert program.trainer.set_aside == ["trainer_class build_trainer"]
    assert program.trainer.arguments["max_epochs"] == 8
    program = build(SMALL, cli_class="SavingCLI")
    assert program.trainer.set_aside == ["LoudSaver"]
    assert program.model.name == "parsed"


def test_a_script_that_trains_by_itself_does_not(build: Build) -> None:
    program = build(sample("sectioned.yaml"), cli_class="ScriptCLI", wanted={"batch_size": 9})
    assert code.CONSTRUCTED == ["trained"]
    assert program.model.name == "flat"
    assert program.model._trainer is None
    assert program.placed == {"batch_size": "data.init_args.batch_size"}


def test_settings_of_the_parsers_of_each_subcommand(build: Build) -> None:
    assert build("trainer: {max_epochs: 2}\n", cli_class="FilesCLI").model.hidden == 6


# ---- interpolations ----


def test_interpolations_follow_what_is_given_later(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPBENCH_CLI_TEST", "here")
    program = build(sample("interpolated.yaml"))
    assert (program.model.width, program.model.hidden, program.model.name) == (12, 12, "here/x")
    assert program.datamodule.root == "here/x"
    program = build(sample("interpolated.yaml"), wanted={"batch_size": 9})
    assert program.placed == {"batch_size": "data.init_args.batch_size"}
    assert (program.model.width, program.model.hidden, program.datamodule.batch_size) == (9, 9, 9)
    program = build(sample("interpolated.yaml"), "data: {init_args: {batch_size: 5}}\n", cli_class="OmegaCLI")
    assert (program.model.width, program.datamodule.batch_size) == (5, 5)


def test_interpolations_in_sections_and_overrides(build: Build) -> None:
    text = sample("sectioned.yaml").replace("hidden: 5", "hidden: ${fit.data.init_args.batch_size}")
    overrides = {"model": {"init_args": {"width": "${data.init_args.batch_size}"}}}
    program = build(text, overrides=overrides, wanted={"batch_size": 9})
    assert (program.model.hidden, program.model.width) == (9, 9)
    inside = {"hidden": "${oc.select:.width,3}", "width": 8, "name": "batches of ${data.init_args.batch_size}"}
    program = build(SMALL, overrides={"model": {"init_args": inside}}, wanted={"batch_size": 9})
    assert (program.model.hidden, program.model.name) == (8, "batches of 9")
    program = build(SMALL, overrides=overrides, cli_class="ScriptCLI", wanted={"batch_size": 9})
    assert program.model.width == 9


def test_a_class_can_be_interpolated_where_its_own_file_tells_it(build: Build) -> None:
    program = build("model:\n  class_path: cli_user_code.${oc.env:STEPBENCH_NOT_SET,Model}\n")
    assert type(program.model).__name__ == "Model"


# ---- loader settings ----


@pytest.mark.parametrize(
    ("data", "arguments", "place"),
    [
        ("Data", None, "data.init_args"),
        ("DictData", {"loader": {"batch_size": 3, "num_workers": 0}}, "data.init_args.loader"),
        ("DataclassData", {"loader": {"num_workers": 0}}, "data.init_args.loader"),
        (
            "NestedData",
            {"loader_config": {"class_path": "cli_user_code.LoaderConfig"}},
            "data.init_args.loader_config.init_args",
        ),
    ],
)
def test_settings_are_given_to_the_argument_that_has_them(
    build: Build, data: str, arguments: dict[str, Any] | None, place: str
) -> None:
    section = {"class_path": f"cli_user_code.{data}", **({"init_args": arguments} if arguments else {})}
    text = yaml.safe_dump({"model": {"class_path": "cli_user_code.Model"}, "data": section})
    program = build(text, wanted={"batch_size": 9, "num_workers": 1})
    assert program.placed == {"batch_size": f"{place}.batch_size", "num_workers": f"{place}.num_workers"}
    if data != "NestedData":
        loader = program.datamodule.train_dataloader()
        assert (loader.batch_size, loader.num_workers) == (9, 1)
    assert build(text, wanted={"persistent_workers": True}).placed == {}


def test_a_model_with_loaders_of_its_own_is_given_the_settings(build: Build) -> None:
    program = build("model: cli_user_code.OwnLoaderModel\n", wanted={"batch_size": 9})
    assert program.placed == {"batch_size": "model.init_args.batch_size"}
    assert program.datamodule is None
    assert program.model.train_dataloader().batch_size == 9
    beside_data = SMALL.replace("Model", "OwnLoaderModel").replace("Data", "DictData\n  init_args: {loader: {}}")
    assert build(beside_data, wanted={"batch_size": 9}).placed == {}


def test_settings_in_lists_are_left_as_they_are_and_keywords_are_not(build: Build) -> None:
    keywords = "model: cli_user_code.Model\ndata:\n  class_path: cli_user_code.KeywordData\n"
    text = f"{keywords}  init_args: {{others: [{{batch_size: 4}}]}}\n  dict_kwargs: {{num_workers: 0}}\n"
    program = build(text, wanted={"batch_size": 9, "num_workers": 2})
    assert program.placed == {"num_workers": "data.dict_kwargs.num_workers"}
    assert (program.datamodule.others, program.datamodule.loader) == ([{"batch_size": 4}], {"num_workers": 2})
    with pytest.raises(CliConfigError, match="others.0.batch_size stays 4 although 9 is given for it"):
        build(text, wanted={"batch_size": 9}, batch_size_key="data.init_args.others.0.batch_size")


def test_linked_settings_are_given_through_their_source(build: Build) -> None:
    text = SMALL.replace("Model", "ClassesModel")
    for key in (None, "data.init_args.batch_size", "data.batch_size", "batch_size"):
        program = build(text, cli_class="LinkedCLI", wanted={"batch_size": 9}, batch_size_key=key)
        assert program.placed == {"batch_size": "batch_size"}
        assert program.datamodule.batch_size == program.model.batch_size == 9
    assert program.model.num_classes == 7
    program = build(SMALL, cli_class="ComputedCLI", wanted={"batch_size": 9})
    assert (program.placed, program.datamodule.batch_size) == ({}, 8)
    with pytest.raises(CliConfigError, match="data.init_args.batch_size is computed from total: name one of these"):
        build(SMALL, cli_class="ComputedCLI", wanted={"batch_size": 9}, batch_size_key="data.init_args.batch_size")


def test_a_batch_size_key_decides(build: Build) -> None:
    loader = {"class_path": "cli_user_code.LoaderConfig"}
    data = {"class_path": "cli_user_code.TwoLoadersData", "init_args": {"labeled": loader, "unlabeled": loader}}
    text = yaml.safe_dump({"model": {"class_path": "cli_user_code.Model"}, "data": data})
    assert build(text, wanted={"batch_size": 9}).placed == {}
    for key in ("data.init_args.labeled.init_args.batch_size", "fit.data.labeled.batch_size"):
        program = build(text, wanted={"batch_size": 9}, batch_size_key=key)
        assert program.placed == {"batch_size": "data.init_args.labeled.init_args.batch_size"}
        assert (program.datamodule.labeled.batch_size, program.datamodule.unlabeled.batch_size) == (9, 2)
    new = SMALL.replace("Data", "DictData\n  init_args: {loader: {num_workers: 0}}")
    program = build(new, wanted={"batch_size": 9}, batch_size_key="data.init_args.loader.batch_size")
    assert program.datamodule.loader == {"num_workers": 0, "batch_size": 9}
    with pytest.raises(CliConfigError) as caught:
        build(SMALL, wanted={"batch_size": 9}, batch_size_key="data.init_args.batchsize")
    assert "no data.init_args.batchsize in the configuration; near: data.init_args.batch_size" in str(caught.value)


# ---- the two packages ----


def test_programs_of_the_other_package_are_built_with_it(build: Build) -> None:
    program = build(sample("other.yaml"), wanted={"batch_size": 9})
    assert isinstance(program.model, pytorch_lightning.LightningModule)
    assert program.trainer.set_aside == ["EarlyStopping"]
    assert callbacks_of(program) == ["OtherCallback"]
    train(program, pytorch_lightning)
    cli = CliProgram(files=(str(SAMPLES / "other.yaml"),), sha256=("",), cli_class="other_cli_user_code.OtherCLI")
    program = build_cli_program(cli, wanted=LoaderSettings(batch_size=9), seed=1)
    assert (program.model.width, program.model.seen_epochs) == (9, 2)
    short = sample("other.yaml").replace("other_cli_user_code.OtherCliModule", "OtherCliModule")
    assert isinstance(build(short).model, pytorch_lightning.LightningModule)


def test_mixed_packages_are_named(build: Build) -> None:
    both = "cli_user_code.Data on lightning.pytorch: import all from one"
    with pytest.raises(CliConfigError, match=both) as caught:
        build(sample("other.yaml").replace("other_cli_user_code.OtherCliData", "cli_user_code.Data"))
    assert "other_cli_user_code.OtherCliModule on pytorch_lightning" in str(caught.value)
    with pytest.raises(CliConfigError, match="cli_user_code.UserCLI on lightning.pytorch"):
        build(sample("other.yaml"), cli_class="UserCLI")
    with pytest.raises(CliConfigError, match="trainer.callbacks: .*UserCallback.* it is one of lightning.pytorch, but"):
        build(sample("other.yaml").replace("other_cli_user_code.OtherCallback", "cli_user_code.UserCallback"))


# ---- messages ----

FLAT = sample("flat.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            FLAT.replace("hidden: 5", "hiden: 5"),
            "model.init_args.hiden: cli_user_code.NoOptimizerModel takes no such argument; did you mean hidden?",
        ),
        (FLAT + "colour: red\n", "colour: the command line takes no such argument"),
        (FLAT.replace("max_epochs", "max_epoch"), "trainer.max_epoch: the command line takes no such argument"),
        (FLAT.replace("hidden: 5", "hidden: five"), "model.init_args.hidden: expected int, got five"),
        (FLAT.replace("max_epochs: 3", "max_epochs: three"), "trainer.max_epochs: expected int or None, got three"),
        (
            FLAT.replace("NoOptimizerModel", "NoModel"),
            "model: module 'cli_user_code' has no attribute 'NoModel'",
        ),
        pytest.param(
            FLAT.replace("cli_user_code.NoOpt", "Unknown"),
            "model: Expected a dot import path string: UnknownimizerModel",
            marks=pytest.mark.full,  # looks through all that is installed
        ),
        (
            FLAT.replace("NoOptimizerModel", "Data"),
            "model: cli_user_code.Data is no subclass of the LightningModule that is needed",
        ),
        (
            FLAT.replace("cli_user_code.Data\n  init_args:\n    root: somewhere", "cli_user_code.DictData"),
            "data.init_args.loader: cli_user_code.DictData needs it, and it is not given",
        ),
        ("trainer: {max_epochs: 3}\n", "model: the command line needs it, and it is not given"),
        (
            FLAT.replace("monitor:", "monitr:"),
            "trainer.callbacks.init_args.monitr: lightning.pytorch.callbacks.EarlyStopping takes no such argument; "
            "did you mean monitor?",
        ),
        (FLAT.replace("SGD", "SGDD"), "optimizer: module 'torch.optim' has no attribute 'SGDD'"),
        (
            "model: cli_user_code.Model\ndata:\n  class_path: cli_user_code.NestedData\n  init_args:\n"
            "    loader_config: {class_path: cli_user_code.LoaderConfig, init_args: {batch_size: x}}\n",
            "data.init_args.loader_config.init_args.batch_size: expected int, got x",
        ),
        (FLAT + "broken: [1\nnext: 2\n", "did not find expected ',' or ']' (line 34, column 5)"),
        ("- a\n", "a file for LightningCLI holds a mapping, but this one holds - a"),
        ("", "a file for LightningCLI holds a mapping, but this one holds nothing"),
        ("fit: {model: cli_user_code.Model}\ntets: {}\n", "tets: the command line takes no such argument"),
        (
            SMALL + "  init_args: {batch_size: '${no.such}'}\n",
            "data.init_args.batch_size: Interpolation key 'no.such' not found",
        ),
        (
            SMALL + "  init_args: {root: '${oc.env:STEPBENCH_NOT_SET}'}\n",
            "data.init_args.root: KeyError raised while resolving interpolation: "
            "\"Environment variable 'STEPBENCH_NOT_SET' not found\"",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_file_and_key(
    build: Build, tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    with pytest.raises(CliConfigError) as caught:
        build(text)
    assert str(caught.value) == f"{tmp_path / '0.yaml'}: {message}"
    assert "usage:" not in capfd.readouterr().err


def test_a_module_that_is_not_found_is_said_with_the_directories_that_were_searched(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CliConfigError) as caught:
        build(FLAT.replace("cli_user_code.NoOpt", "no_module.NoOpt"))
    assert str(caught.value).startswith(f"{tmp_path / '0.yaml'}: model: no module no_module in {tmp_path}, ")
    assert "or name that directory in PYTHONPATH" in str(caught.value)


@pytest.mark.parametrize("section", ["model", "data"])
def test_a_file_for_a_fixed_class_asks_for_its_name(build: Build, tmp_path: Path, section: str) -> None:
    text = "model:\n  hidden: 5\n" if section == "model" else "model: cli_user_code.Model\ndata:\n  root: x\n"
    with pytest.raises(CliConfigError) as caught:
        build(text)
    wanted = f"{section}: has arguments, but no class_path: name the class that they are for, cli_{section}=my_package"
    assert str(caught.value).startswith(f"{tmp_path / '0.yaml'}: {wanted}")


def test_the_file_that_has_the_key_is_named(build: Build, tmp_path: Path) -> None:
    with pytest.raises(CliConfigError) as caught:
        build(sample("sectioned.yaml"), "fit: {model: {init_args: {hidden: x}}}\n", "trainer: {max_epochs: 2}\n")
    assert str(caught.value) == f"{tmp_path / '1.yaml'}: model.init_args.hidden: expected int, got x"
    with pytest.raises(CliConfigError) as caught:
        build(SMALL, "model: [1\n")
    assert str(caught.value).startswith(f"{tmp_path / '1.yaml'}: did not find")
    with pytest.raises(CliConfigError) as caught:
        build(SMALL, overrides={"model": {"init_args": {"hiden": 3}}})
    assert str(caught.value).startswith("overrides: model.init_args.hiden: cli_user_code.Model takes no such argument")
    with pytest.raises(CliConfigError, match="^overrides: trainer.max_epoch: "):
        build(SMALL, overrides={"trainer": {"max_epoch": 3}})
    with pytest.raises(CliConfigError, match="^there is no file /no/such.yaml$"):
        build_cli_program(CliProgram(files=("/no/such.yaml",), sha256=("",)), wanted=LoaderSettings(), seed=None)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({"cli_class": "NeedyCLI"}, "NeedyCLI needs project and team, which the benchmark cannot give it"),
        ({"cli_class": "Model"}, "cli_class must name a subclass of LightningCLI, got cli_user_code.Model"),
        ({"cli_class": "NoCLI"}, "cli_class: cli_user_code.NoCLI: cli_user_code has no NoCLI"),
        ({"imports": ("no_module",)}, "cli_import: no_module: no module no_module in "),
        ({"model_class": "Data"}, "cli_model must name a LightningModule, got cli_user_code.Data"),
        ({"data_class": "Model"}, "cli_data must name a LightningDataModule, got cli_user_code.Model"),
        ({"cli_class": "FixedCLI", "model_class": "Model"}, "FixedCLI takes no model_class: leave cli_model out"),
    ],
)
def test_classes_that_do_not_fit_are_named(build: Build, classes: dict[str, Any], message: str) -> None:
    with pytest.raises(CliConfigError) as caught:
        build(SMALL, **classes)
    assert message in str(caught.value)
