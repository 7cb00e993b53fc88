from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from stepbench.overrides import QuoteSweepParameters, quote_arguments, quote_choices

GROUPS = frozenset({"precision", "model"})


@pytest.mark.parametrize(
    ("argument", "quoted"),
    [
        ("precision=32", "precision='32'"),
        ("precision=16-mixed", "precision=16-mixed"),
        ("precision=32,16-mixed,64", "precision='32',16-mixed,'64'"),
        ("precision=choice(32,bf16)", "precision=choice('32',bf16)"),
        ("precision='32'", "precision='32'"),
        ("precision='32',16", "precision='32','16'"),
        ("+precision=32", "+precision='32'"),
        ("batch_size=32,64", "batch_size=32,64"),  # no group: a number it is
        ("model.width=32", "model.width=32"),
        ("~precision", "~precision"),
        ("precision=[", "precision=["),  # Hydra says what is wrong with it
        ("precision=glob(1*)", "precision=glob(1*)"),
        ("--help", "--help"),
    ],
)
def test_numeric_choices_of_groups_are_quoted_and_nothing_else(argument: str, quoted: str) -> None:
    assert quote_choices(argument, GROUPS) == quoted


def test_groups_of_the_users_directory_count(tmp_path: Path) -> None:
    (tmp_path / "depth").mkdir()
    arguments = ["--config-dir", str(tmp_path), "depth=18,50", "precision=32"]
    assert quote_arguments(arguments) == ["--config-dir", str(tmp_path), "depth='18','50'", "precision='32'"]
    assert quote_arguments([f"--config-dir={tmp_path}", "depth=18"])[1] == "depth='18'"
    assert quote_arguments(["depth=18"]) == ["depth=18"]


def test_a_sweep_file_may_give_numbers_a_list_or_text() -> None:
    for value in ("32,16-mixed", "32, 16-mixed", ["32", "16-mixed"], [32, "16-mixed"]):
        config = OmegaConf.create({"hydra": {"sweeper": {"params": {"precision": value, "batch_size": "16,32"}}}})
        QuoteSweepParameters().on_multirun_start(config)
        assert config.hydra.sweeper.params == {"precision": "'32',16-mixed", "batch_size": "16,32"}
    config = OmegaConf.create({"hydra": {"sweeper": {"params": {"precision": 32}}}})
    QuoteSweepParameters().on_multirun_start(config)
    assert config.hydra.sweeper.params == {"precision": "'32'"}


def test_a_sweeper_without_parameters_is_left_alone() -> None:
    for sweeper in ({"params": None}, {}):
        config = OmegaConf.create({"hydra": {"sweeper": sweeper}})
        QuoteSweepParameters().on_multirun_start(config)
        assert config.hydra.sweeper == sweeper
