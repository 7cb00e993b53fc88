"""What `torch.compile` does during a run is seen, timed and kept out of the timed batches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from truth_lab import ScriptedClock, make_timer

from stepbench.compilation import CompilationWatch
from stepbench.record import BatchTiming


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class CompiledModule(pl.LightningModule):
    """Compiles the part that it trains, for one shape at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(torch.nn.Linear(4, 1), backend="aot_eager", dynamic=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(module: pl.LightningModule, num_items: int, epochs: int = 1) -> tuple[Any, list[BatchTiming]]:
    timer = make_timer()
    settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[timer], enable_checkpointing=False, **settings).fit(
        module, DataLoader(TensorDataset(torch.ones(num_items, 4)), batch_size=8)
    )
    return timer, timer.rows


def test_batches_in_which_a_model_is_compiled_are_flagged_and_counted() -> None:
    torch._dynamo.reset()  # whatever has been compiled in this process before
    timer, rows = fit(CompiledModule(), 8 * 30 + 5, epochs=2)
    assert len(rows) == 62  # every batch is seen, compiled or not
    assert [index for index, row in enumerate(rows) if row.compiled] == [0, 30]  # the first, and the ragged one
    compilation = timer.compilation
    assert (compilation.num_graphs, compilation.num_recompilations, compilation.num_batches) == (2, 1, 2)
    compiling_s = sum(row.batch_s for row in rows if row.compiled)
    assert 0 < compilation.compile_s < compiling_s
    assert timer.first_batch_end_ns is not None


def test_a_run_without_a_compiler_has_no_compilation() -> None:
    class PlainModule(CompiledModule):
        def __init__(self) -> None:
            pl.LightningModule.__init__(self)
            self.net = torch.nn.Linear(4, 1)

    timer, rows = fit(PlainModule(), 24)
    assert timer.compilation is None
    assert not any(row.compiled for row in rows)


@pytest.mark.full
def test_a_compiled_optimizer_is_timed() -> None:
    class CompiledStepModule(CompiledModule):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[method-assign]
            return optimizer

    _, rows = fit(CompiledStepModule(), 80)
    assert len(rows) == 10
    assert all(row.took_optimizer_step for row in rows)
    assert not any(row.compiled for row in rows[3:])


def test_nothing_of_the_watch_stays_behind() -> None:
    handler = torch._dynamo.callback_handler
    before = len(handler.start_callbacks), len(handler.end_callbacks)
    fit(CompiledModule(), 16)
    assert (len(handler.start_callbacks), len(handler.end_callbacks)) == before


def test_what_is_compiled_after_the_user_has_reset_the_compiler_is_seen() -> None:
    class ResettingModule(CompiledModule):
        def on_train_start(self) -> None:
            torch._dynamo.reset()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                torch._dynamo.reset()

    timer, rows = fit(ResettingModule(), 80)
    assert [index for index, row in enumerate(rows) if row.compiled] == [0, 4]
    assert (timer.compilation.num_graphs, timer.compilation.num_batches) == (2, 2)


def test_durations_come_from_the_clock() -> None:
    clock = ScriptedClock()
    watch = CompilationWatch(clock.now)
    watch.start()

    class SlowBackend:
        def __call__(self, graph: Any, inputs: Any) -> Any:
            clock.spend(250)
            return graph.forward

    compiled = torch.compile(torch.nn.Linear(4, 1), backend=SlowBackend(), dynamic=False)
    compiled(torch.ones(2, 4))
    assert watch.was_at_work()
    compiled(torch.ones(2, 4))
    assert not watch.was_at_work()
    watch.stop()
    result = watch.result()
    assert result is not None
    assert (result.compile_s, result.num_graphs, result.num_batches) == (0.25, 1, 1)


def test_the_compiler_is_not_loaded_for_the_watch_s_sake_and_noticed_when_it_comes() -> None:
    code = (
        "import sys, torch\n"
        "from stepbench.compilation import CompilationWatch\n"
        "watch = CompilationWatch()\n"
        "watch.start()\n"
        "assert not watch.was_at_work()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "torch.compile(torch.nn.Linear(4, 1), backend='eager')(torch.ones(2, 4))\n"
        "assert watch.was_at_work()\n"
        "assert not watch.was_at_work()\n"
        "watch.stop()\n"
        "assert watch.result().num_graphs == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
