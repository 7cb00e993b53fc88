"""The timing callback in anyone's own script: a summary on the terminal, the files of a run, nothing else changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

import stepbench
from stepbench import aggregate
from stepbench.record import CONFIG_FILE, Status, read_record, record_path
from stepbench.standalone import step_timer_class


class LitNet(pl.LightningModule):
    def __init__(self, hidden: int = 8, raise_at: int | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="error")
        self.net = torch.nn.Linear(2, hidden)
        self.raise_at = raise_at
        self.error = error or RuntimeError("planted in step 7")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.raise_at:
            raise self.error
        loss: torch.Tensor = self.net(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(timer: Any, module: pl.LightningModule | None = None, num_batches: int = 40, **settings: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        **{"max_epochs": 2, "accelerator": "cpu", "enable_checkpointing": False, **quiet, **settings}, callbacks=[timer]
    )
    trainer.fit(module or LitNet(), DataLoader(TensorDataset(torch.ones(4 * num_batches, 2)), batch_size=4))
    return trainer


def test_a_script_gets_a_summary_and_the_files_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timer = stepbench.StepTimer(tmp_path / "timing")
    trainer = fit(timer, accumulate_grad_batches=2)
    assert trainer.global_step == 40  # as long as the script has said
    assert {path.name for path in (tmp_path / "timing").iterdir()} >= {
        "timing_summary.yaml",
        "timing_results.csv",
        "batch_time_breakdown.png",
        "total_batch_time.png",
        "time_distribution_pie.png",
        CONFIG_FILE,
    }
    printed = capsys.readouterr().out
    assert "LitNet on TensorDataset" in printed
    assert "most time goes to" in printed
    record = read_record(record_path(tmp_path / "timing", 0, 0))
    assert record == timer.record
    assert record.status is Status.OK
    assert record.summary is not None and record.summary.num_batches + record.summary.num_warmup_batches == 80
    assert record.request.spec.batch_size == 4
    assert record.request.spec.accumulate_grad_batches == 2
    assert record.request.spec.model.target == f"{__name__}.LitNet"
    assert record.request.spec.model.arguments["hidden"] == 8
    assert record.effective is not None and (record.effective.timer, record.effective.sampling) == ("host", None)
    assert yaml.safe_load((tmp_path / "timing" / CONFIG_FILE).read_text())["spec"]["batch_size"] == 4


def test_its_directory_can_be_aggregated_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        fit(stepbench.StepTimer(tmp_path / str(seed), print_summary=False, plots=False), LitNet(hidden=8 * (seed + 1)))
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.rglob("*.png"))
    assert aggregate.main([str(tmp_path), "--out", str(tmp_path / "study")]) == 0
    assert "2 cells planned, 2 measured" in capsys.readouterr().out


def test_results_of_an_earlier_run_are_left_alone(tmp_path: Path) -> None:
    first, second = (stepbench.StepTimer(tmp_path / "timing", print_summary=False, plots=False) for _ in range(2))
    fit(first)
    fit(second)
    assert (first.directory, second.directory) == (tmp_path / "timing", tmp_path / "timing_2")


def test_a_failed_training_keeps_its_batches_and_its_exception(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timer = stepbench.StepTimer(tmp_path / "timing")
    with pytest.raises(RuntimeError, match="planted in step 7"):
        fit(timer, LitNet(raise_at=7))
    assert timer.record.status is Status.ERROR
    assert "planted in step 7" in timer.record.reason
    assert "7 batches are in" in capsys.readouterr().out
    assert len((tmp_path / "timing" / "timing_results.csv").read_text().splitlines()) == 1 + 7


def test_an_interrupt_ends_the_training_with_numbers(tmp_path: Path) -> None:
    timer = stepbench.StepTimer(tmp_path / "timing", print_summary=False, plots=False)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(timer, LitNet(raise_at=30, error=KeyboardInterrupt()))
    assert timer.record.status is Status.OK
    assert timer.record.summary.num_batches > 10


def test_a_disk_that_fails_costs_the_script_its_timings_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stepbench.standalone.append_rows", fail)
    trainer = fit(stepbench.StepTimer(tmp_path / "timing"))
    assert trainer.global_step == 80
    assert "No space left on device" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    module = LitNet()
    with pytest.raises(OSError, match="file"):
        fit(stepbench.StepTimer(tmp_path / "file" / "timing"), module)
    assert module.trainer.global_step == 0


def test_sampling_and_counting_are_the_script_s_to_say(tmp_path: Path) -> None:
    timer = stepbench.StepTimer(
        tmp_path / "timing", sampling=(5, 10), batch_size_fn=lambda batch: 2 * len(batch[0]), plots=False
    )
    fit(timer)
    assert sum(row.forward_s is not None for row in timer.rows) == 40
    assert {row.num_samples for row in timer.rows} == {8}
    assert timer.record.summary.num_sampled_steps < timer.record.summary.num_steps
    assert timer.record.effective.sampling == "5/10"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timer": "fast"}, "timer must be one of auto, host, sync, events, got 'fast'"),
        ({"sampling": (0, 10)}, "1 <= N <= M"),
        ({"sampling": (11, 10)}, "1 <= N <= M"),
        ({"sampling": "10/100"}, "1 <= N <= M"),
        ({"batch_size_fn": "my_module.count"}, "batch_size_fn must be a function"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stepbench.StepTimer(**settings)


def test_validation_loggers_and_checkpoints_go_on_beside_it(tmp_path: Path) -> None:
    class Validated(LitNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(batch[0]).mean())

        def val_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)

    timer = stepbench.StepTimer(tmp_path / "timing", print_summary=False, plots=False)
    fit(timer, Validated(), logger=True, enable_checkpointing=True, default_root_dir=tmp_path, val_check_interval=10)
    assert sum(row.validation_ran for row in timer.rows) == 8
    assert list(tmp_path.rglob("*.ckpt"))


def test_the_timer_is_of_the_package_that_the_script_uses() -> None:
    code = (
        "import sys, pytorch_lightning as pl\n"
        "from stepbench import StepTimer\n"
        "assert issubclass(StepTimer, pl.Callback)\n"
        "assert 'lightning.pytorch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert issubclass(stepbench.StepTimer, pl.Callback)
    assert step_timer_class("lightning.pytorch") is stepbench.StepTimer
    with pytest.raises(AttributeError, match="StepTimers"):
        stepbench.StepTimers  # noqa: B018


def test_importing_the_package_alone_imports_nothing_heavy() -> None:
    code = "import sys, stepbench; assert not {'torch', 'lightning', 'pandas', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.full
def test_what_draws_is_imported_when_training_is_over(tmp_path: Path) -> None:
    code = (
        "import sys, torch, lightning.pytorch as pl\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "from stepbench import StepTimer\n"
        "class Net(pl.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.net = torch.nn.Linear(2, 1)\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        assert not {'seaborn', 'stepbench.aggregate', 'stepbench.report'} & set(sys.modules)\n"
        "        return self.net(batch[0]).mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=1e-3)\n"
        "trainer = pl.Trainer(max_epochs=1, accelerator='cpu', callbacks=[StepTimer()], logger=False,\n"
        "                     enable_checkpointing=False, enable_progress_bar=False)\n"
        "trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(64, 2)), batch_size=4))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    (record,) = tmp_path.glob("outputs/*/*/records/0.0.json")
    assert json.loads(record.read_text())["status"] == "ok"
