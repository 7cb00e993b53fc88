"""Cells of the samples' classes, planned for a real worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepbench.record import Component, Protocol, RunRequest, RunSpec, canonical_json
from stepbench.sweep import PlannedCell

TINY = Protocol(name="tiny", warmup_batches=2, warmup_s=0.0, timed_batches=8, timed_s=0.0)

SAMPLES = (
    *("user_code_samples.", "other_package_samples.", "demanding_samples.", "plain_script_samples."),
    *("forecasting_samples.", "lightning."),
)


def target_of(name: str) -> str:
    """A class of the usual samples, or of another module where the name is dotted."""
    return name if name.startswith(SAMPLES) else f"user_code_samples.{name}"


def plan(directory: Path, *, model: str = "TinyModule", data: str | None = "TinyData", **settings: Any) -> PlannedCell:
    data_arguments = {"batch_size": settings.get("batch_size", 16), **settings.pop("data_arguments", {})}
    data_arguments = {name: value for name, value in data_arguments.items() if value is not None}
    model_json = canonical_json(settings.pop("model_arguments", {}))
    data_json = canonical_json(data_arguments)
    request = RunRequest(
        protocol=settings.pop("protocol", TINY),
        timer="auto",
        batch_size_fn=settings.pop("batch_size_fn", None),
        timeout_s=settings.pop("timeout_s", 60.0),
        placed=(("batch_size", "data.batch_size"),) if data is not None and "batch_size" in data_arguments else (),
        spec=RunSpec(
            model=Component(target=target_of(model), arguments_json=model_json),
            data=None if data is None else Component(target=target_of(data), arguments_json=data_json),
            **{"batch_size": 16, "precision": "32", "accelerator": "cpu", **settings},
        ),
    )
    (directory / "logs").mkdir(parents=True)
    return PlannedCell(directory=directory, request=request, config_text="", label="cell")
