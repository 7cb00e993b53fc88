"""A run is timed with the Lightning package that the user's module is built on."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as other
import torch
from torch.utils.data import DataLoader, TensorDataset

from stepbench.callback import make_phase_timer
from stepbench.lightning_package import PACKAGES, load_package, package_of


def module_of(package: Any) -> Any:
    class Module(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    return Module()


def fit(package: Any, timer: Any, profiler: str | None = None) -> Any:
    trainer = package.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[timer],
        profiler=profiler,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module_of(package), DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=4))
    return trainer


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("profiler", [None, "simple"])
def test_both_packages_are_timed_by_callbacks_of_their_own(name: str, profiler: str | None) -> None:
    package = load_package(name)
    timer = make_phase_timer(package)
    assert isinstance(timer, package.root.Callback)
    trainer = fit(package.root, timer, profiler)
    rows = timer.rows
    assert len(rows) == 3
    assert all(
        row.forward_s > 0 and row.backward_s > 0 and row.optimizer_s > 0 and row.num_samples == 4 for row in rows
    )
    assert isinstance(trainer.profiler, package.profiler_base)
    assert "_Tap" not in type(trainer.profiler).__name__


def test_a_timer_of_the_other_package_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"for the Trainer of lightning\.pytorch, got one of pytorch_lightning"):
        fit(other, make_phase_timer(load_package("lightning.pytorch")))


def test_the_package_of_a_module_is_found_through_its_bases() -> None:
    assert package_of(module_of(pl), "LightningModule") == "lightning.pytorch"
    assert package_of(module_of(other), "LightningModule") == "pytorch_lightning"
    assert package_of(other.LightningDataModule(), "LightningDataModule") == "pytorch_lightning"
    assert package_of(torch.nn.Linear(1, 1), "LightningModule") is None
    assert package_of(torch.compile(module_of(pl)), "LightningModule") == "lightning.pytorch"
