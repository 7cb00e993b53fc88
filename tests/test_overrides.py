from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from stepbench.overrides import QuoteSweepParameters, find_unquoted_choices, prepare_arguments, quote_choices
from stepbench.settings import conf_dir

GROUPS = {"precision": ["16-mixed", "32", "64"], "model": ["mlp"]}


@pytest.mark.parametrize(
    ("argument", "quoted"),
    [
        ("precision=32", "precision='32'"),
        ("precision=16-mixed", "precision=16-mixed"),
        ("precision=32,16-mixed,64", "precision='32',16-mixed,'64'"),
        ("precision=choice(32,bf16)", "precision='32',bf16"),
        ("precision=range(16,33,16)", "precision='16','32'"),
        ('precision=choice("32",64)', "precision='32','64'"),
        ("precision=glob([3*,64],exclude=6*)", "precision='32'"),
        ("precision=glob(*)", "precision=16-mixed,'32','64'"),
        ("precision='32'", "precision='32'"),
        ("precision='32',16", "precision='32','16'"),
        ("+precision=32", "+precision='32'"),
        ("batch_size=32,64", "batch_size=32,64"),  # no group: a number it is
        ("model.width=32", "model.width=32"),
        ("~precision", "~precision"),
        ("precision=[", "precision=["),  # Hydra says what is wrong with it
        ("precision=glob(1*)", "precision=16-mixed"),
        ("--help", "--help"),
    ],
)
def test_numeric_choices_of_groups_are_quoted_and_nothing_else(argument: str, quoted: str) -> None:
    assert quote_choices(argument, GROUPS) == quoted


def test_groups_of_the_users_directory_count(tmp_path: Path) -> None:
    (tmp_path / "depth").mkdir()
    (tmp_path / "depth" / "18.yaml").write_text("a: 1")
    arguments = ["--config-dir", str(tmp_path), "depth=18,50", "precision=32"]
    assert prepare_arguments(arguments) == ["--config-dir", str(tmp_path), "depth='18','50'", "precision='32'"]
    assert prepare_arguments([f"--config-dir={tmp_path}", "depth=18"])[1] == "depth='18'"
    assert prepare_arguments(["depth=18"]) == ["depth=18"]


def test_flags_may_stand_between_overrides() -> None:
    typed = ["model=mine", "-m", "batch_size=8,16", "--config-dir", "my_conf", "precision=32"]
    assert prepare_arguments(typed) == [
        "-m",
        "--config-dir",
        "my_conf",
        "model=mine",
        "batch_size=8,16",
        "precision='32'",
    ]


def test_an_unknown_flag_ends_with_hydra_s_usage() -> None:
    with pytest.raises(SystemExit) as caught:
        prepare_arguments(["--no-such-flag"])
    assert caught.value.code == 2


def test_unquoted_choices_in_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [{override /precision: 32}, {model: mine}, _self_]\n")
    (tmp_path / "b.yaml").write_text('defaults: [{override /precision: "32"}]\n')
    (problem,) = find_unquoted_choices(["--config-dir", str(tmp_path)])
    assert problem == f'{tmp_path}/a.yaml: override /precision: 32 in the defaults list; write it in quotes: "32"'


def sweep_file(parameters: Any) -> DictConfig:
    sources = [{"path": str(conf_dir())}, {"path": ""}]
    return OmegaConf.create({"hydra": {"sweeper": parameters, "runtime": {"config_sources": sources}}})


def test_a_sweep_file_may_give_numbers_a_list_or_text() -> None:
    for value in ("32,16-mixed", "32, 16-mixed", ["32", "16-mixed"], [32, "16-mixed"], "choice(32,16-mixed)"):
        config = sweep_file({"params": {"precision": value, "batch_size": "16,32"}})
        QuoteSweepParameters().on_multirun_start(config)
        assert config.hydra.sweeper.params == {"precision": "'32',16-mixed", "batch_size": "16,32"}
    config = sweep_file({"params": {"+precision": 32}})
    QuoteSweepParameters().on_multirun_start(config)
    assert config.hydra.sweeper.params == {"+precision": "'32'"}


@pytest.mark.parametrize("sweeper", [{"params": None}, {}])
def test_a_sweeper_without_parameters_is_left_alone(sweeper: dict[str, None]) -> None:
    config = sweep_file(sweeper)
    QuoteSweepParameters().on_multirun_start(config)
    assert config.hydra.sweeper == sweeper
