"""The worker measures the user's program: the same batches, start method, threads and pace as in a plain script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TESTS, Measure

from stepbench.record import Protocol, Status, log_path

pytestmark = pytest.mark.full

LONG = Protocol(name="long", warmup_batches=10, warmup_s=0.0, timed_batches=60, timed_s=0.0)

SCRIPT = """
import lightning.pytorch as pl
from plain_script_samples import {model}, {data}

pl.seed_everything(0, verbose=False)
model, data = {model}(), {data}(batch_size=16)
trainer = pl.Trainer(
    accelerator="cpu", max_steps=70, limit_val_batches=0, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, datamodule=data)
"""


def facts_of(text: str) -> dict[str, Any]:
    """What the samples have printed when their training ended."""
    (line,) = [line for line in text.splitlines() if line.startswith("FACTS ")]
    facts: dict[str, Any] = json.loads(line.removeprefix("FACTS "))
    return facts


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("ReportingAutoencoder", "make_images"),
        ("ReportingTransformer", "make_tokens"),
        ("ReportingMLP", "make_features"),
        ("ReportingForecast", "make_river_data"),
    ],
)
def test_the_worker_measures_what_a_plain_script_does(measure: Measure, tmp_path: Path, model: str, data: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(model=model, data=data))
    classes = {"model": f"plain_script_samples.{model}", "data": f"plain_script_samples.{data}"}
    ratios: list[float] = []
    for attempt in range(3):  # a busy machine may slow down either of them
        done = subprocess.run([sys.executable, str(script)], cwd=TESTS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        plain, cell = facts_of(done.stdout), f"cell{attempt}"
        record = measure(cell, **classes, seed=0, protocol=LONG)
        assert record.status is Status.OK, record.reason
        ours, effective = facts_of(log_path(tmp_path / cell, 0, 0).read_text()), record.effective
        assert ours["batches"] == plain["batches"]
        assert (ours["start_method"], ours["threads"]) == (plain["start_method"], plain["threads"])
        assert (effective.start_method, effective.num_threads) == (plain["start_method"], plain["threads"])
        ratios.append(ours["median_step_s"] / plain["median_step_s"])
        if 0.5 < ratios[-1] < 2:
            return
    pytest.fail(f"step times differ: {ratios}")
