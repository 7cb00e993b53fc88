"""Training loops whose every part has a known cost, and what a timer must make of them. Tests and docs share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from tempfile import mkdtemp
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from truth_lab import (
    ITEMS_PER_BATCH,
    CostlyDataModule,
    CostlyItems,
    CostlyModule,
    CostlyScaler,
    CostlyStream,
    DictModule,
    EndingEarlyModule,
    GrowingDataModule,
    InfiniteLossModule,
    Lab,
    ManualAccumulationModule,
    ManualClosureModule,
    ManualSteppingModule,
    OwnFetchingModule,
    OwnOptimizerStepModule,
    RawAccumulationModule,
    RawBackwardModule,
    SlowCallback,
    SometimesNoneLoader,
    SometimesNoneModule,
    ThreeClosuresModule,
    TwoOptimizersModule,
    WrappedOptimizerModule,
)

from stepbench.record import BatchTiming, Sampling

PLAIN = (4.0, 2.0, 5.0, 6.0, 5.0, 8.0, 30.0)
"""Data, transfer, forward, backward, optimizer, other and the whole batch, in milliseconds per batch."""


@dataclass(frozen=True, kw_only=True)
class KnownAnswer:
    """A loop to run and the milliseconds per batch that are right: the six phases, the batch, and validation apart."""

    name: str
    build: Callable[[], Lab]
    expected_ms: tuple[float | None, ...]
    num_rows: int = 24
    num_discarded: int = 0
    validation_ms: float = 0.0

    def run(self) -> tuple[Lab, list[BatchTiming]]:
        """The lab after its run, and its rows; with block sampling those that were timed by phase."""
        lab = self.build()
        return lab, [row for row in lab.run() if row.data_s is not None]


def lab_with(module: type[CostlyModule], **settings: Any) -> Lab:
    lab = Lab(**settings)
    lab.module = module(lab.clock)
    return lab


def validating(**settings: Any) -> Lab:
    lab = Lab(**settings)
    lab.validation = DataLoader(CostlyItems(lab.clock, 12), batch_size=ITEMS_PER_BATCH)  # three batches of 4 ms
    return lab


def streaming(**settings: Any) -> Lab:
    lab = Lab(max_epochs=2, **settings)
    lab.data = CostlyStream(lab.clock, 48)
    return lab


def without_scheduler() -> Lab:
    lab = Lab()
    lab.module.scheduler = False
    return lab


def with_optimizer(**kind: bool) -> Lab:
    lab = Lab()
    lab.module.optimizer_kind = kind
    return lab


def scheduler_per_epoch() -> Lab:
    lab = Lab(num_items=24, max_epochs=4)
    lab.module.scheduler_interval = "epoch"
    return lab


def with_slow_callback() -> Lab:
    lab = Lab()
    lab.further_callbacks = [SlowCallback(lab.clock)]
    return lab


def scaled(module: type[CostlyModule] = CostlyModule, **settings: Any) -> Lab:
    scaler = CostlyScaler("cpu", init_scale=1.0)
    lab = lab_with(module, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **settings)
    scaler.clock = lab.clock
    return lab


def scheduled_accumulation() -> Lab:
    lab = Lab(num_items=48, max_epochs=3)
    lab.further_callbacks = [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})]
    return lab


def two_loaders() -> Lab:
    lab = lab_with(DictModule)
    long, short = (DataLoader(CostlyItems(lab.clock, items), batch_size=ITEMS_PER_BATCH) for items in (96, 32))
    lab.loader = CombinedLoader({"a": long, "b": short}, "max_size")
    return lab


def with_data_module() -> Lab:
    lab = Lab()
    lab.loader = CostlyDataModule(lab.clock)
    return lab


def batches_of_none() -> Lab:
    lab = Lab()
    lab.loader = SometimesNoneLoader(CostlyItems(lab.clock, 96), batch_size=ITEMS_PER_BATCH)
    return lab


def finding_a_learning_rate() -> Lab:
    lab = Lab(default_root_dir=mkdtemp())
    lab.module.scheduler = False  # the finder's checkpoint cannot hold a scripted clock
    lab.module.lr = 1e-4
    lab.further_callbacks = [LearningRateFinder(num_training_steps=5)]
    return lab


def finding_a_batch_size() -> Lab:
    lab = Lab(default_root_dir=mkdtemp())
    lab.module.scheduler = False
    lab.loader = GrowingDataModule(lab.clock)
    lab.further_callbacks = [BatchSizeFinder(init_val=4, max_trials=3, steps_per_trial=1)]
    return lab


KNOWN_ANSWERS = (
    KnownAnswer(name="plain loop", build=Lab, expected_ms=PLAIN),
    KnownAnswer(name="plain loop, timer last", build=lambda: Lab(timer_first=False), expected_ms=PLAIN),
    KnownAnswer(name="no scheduler", build=without_scheduler, expected_ms=(4, 2, 5, 6, 5, 7, 29)),
    KnownAnswer(
        name="accumulation 4",
        build=lambda: Lab(accumulate_grad_batches=4),
        expected_ms=(4, 2, 5, 6, 1.25, 5.75, 24),
    ),
    KnownAnswer(
        name="accumulation 5 of 24 batches",
        build=lambda: Lab(accumulate_grad_batches=5),
        expected_ms=(4, 2, 5, 6, 1.0416667, 5.625, 23.6666667),
    ),
    KnownAnswer(
        name="accumulation 4, epochs of 3 batches",
        build=lambda: Lab(num_items=12, accumulate_grad_batches=4, max_epochs=3),
        expected_ms=(4, 2, 5, 6, 1.6666667, 6, 24.6666667),
        num_rows=9,
    ),
    KnownAnswer(
        name="accumulation 1, 2, 3 by epoch",
        build=scheduled_accumulation,
        expected_ms=(4, 2, 5, 6, 3.0555556, 6.8333333, 26.8888889),
        num_rows=36,
    ),
    KnownAnswer(
        name="two optimizers, manual",
        build=lambda: lab_with(TwoOptimizersModule),
        expected_ms=(4, 2, 10, 12, 6, 8, 42),
    ),
    KnownAnswer(
        name="step(closure), manual",
        build=lambda: lab_with(ManualClosureModule),
        expected_ms=(4, 2, 5, 6, 3, 5.5, 25.5),
    ),
    KnownAnswer(
        name="accumulation by hand, manual",
        build=lambda: lab_with(ManualAccumulationModule),
        expected_ms=(4, 2, 5, 6, 1, 5.1666667, 23.1666667),
    ),
    KnownAnswer(
        name="loss.backward() by hand, manual",
        build=lambda: lab_with(RawBackwardModule),
        expected_ms=(4, 2, 11, None, 3, 3.5, 23.5),  # nothing tells backward from forward
    ),
    KnownAnswer(
        name="loss.backward() by hand, step in every second batch",
        build=lambda: lab_with(RawAccumulationModule),
        expected_ms=(4, 2, 11, None, 1.5, 3.25, 21.75),
    ),
    KnownAnswer(
        name="no loss in every third batch",
        build=lambda: lab_with(SometimesNoneModule),
        expected_ms=(4, 2, 5, 4, 5, 7.3333333, 27.3333333),
    ),
    KnownAnswer(name="loss in a dictionary", build=lambda: lab_with(DictModule), expected_ms=PLAIN),
    KnownAnswer(
        name="three closures a step",
        build=lambda: lab_with(ThreeClosuresModule),
        expected_ms=(4, 2, 15, 18, 9, 13, 61),
    ),
    KnownAnswer(
        name="module's own optimizer_step, 2 ms",
        build=lambda: lab_with(OwnOptimizerStepModule),
        expected_ms=(4, 2, 5, 6, 5, 10, 32),
    ),
    KnownAnswer(
        name="clipping by norm",
        build=lambda: Lab(gradient_clip_val=0.5, gradient_clip_algorithm="norm"),
        expected_ms=PLAIN,
    ),
    KnownAnswer(
        name="clipping by value",
        build=lambda: Lab(gradient_clip_val=0.5, gradient_clip_algorithm="value"),
        expected_ms=PLAIN,
    ),
    KnownAnswer(name="foreach optimizer", build=lambda: with_optimizer(foreach=True), expected_ms=PLAIN),
    KnownAnswer(name="fused optimizer", build=lambda: with_optimizer(fused=True), expected_ms=PLAIN),
    KnownAnswer(
        name="scheduler once an epoch, 4 epochs",
        build=scheduler_per_epoch,
        expected_ms=(4, 2, 5, 6, 5, 7.1666667, 29.1666667),  # in the last batch of each epoch
    ),
    KnownAnswer(name="a slow callback, 20 ms", build=with_slow_callback, expected_ms=(4, 2, 5, 6, 5, 28, 50)),
    KnownAnswer(name="bf16-mixed", build=lambda: Lab(precision="bf16-mixed"), expected_ms=PLAIN),
    KnownAnswer(name="gradient scaler, 2.75 ms of its own", build=scaled, expected_ms=(4, 2, 5, 6, 7.75, 8, 32.75)),
    KnownAnswer(
        name="gradient scaler that skips every step",
        build=lambda: scaled(InfiniteLossModule),
        expected_ms=(4, 2, 5, 6, 4.75, 8, 29.75),
    ),
    KnownAnswer(
        name="gradient scaler, manual",
        build=lambda: scaled(ManualSteppingModule),
        expected_ms=(4, 2, 5, 6, 5.75, 5.5, 28.25),
    ),
    KnownAnswer(
        name="an optimizer without hooks",
        build=lambda: lab_with(WrappedOptimizerModule),
        expected_ms=(4, 2, 5, 6, 5, 7, 29),
    ),
    KnownAnswer(
        name="unsized loader, 12 batches, 2 epochs",
        build=streaming,
        # The request inside a batch is for the batch after it; the last of an epoch meets the end of the stream.
        expected_ms=(3.6666667, 2, 5, 6, 5, 8, 29.6666667),
        num_discarded=1,
    ),
    KnownAnswer(
        name="unsized loader, limit 10",
        build=lambda: streaming(limit_train_batches=10),
        expected_ms=PLAIN,
        num_rows=20,
    ),
    KnownAnswer(name="half of the batches", build=lambda: Lab(limit_train_batches=0.5), expected_ms=PLAIN, num_rows=12),
    KnownAnswer(
        name="overfit_batches 4, 6 epochs", build=lambda: Lab(overfit_batches=4, max_epochs=6), expected_ms=PLAIN
    ),
    KnownAnswer(name="6 epochs of 4", build=lambda: Lab(num_items=16, max_epochs=6), expected_ms=PLAIN),
    KnownAnswer(name="max_steps 10", build=lambda: Lab(max_steps=10, max_epochs=-1), expected_ms=PLAIN, num_rows=10),
    KnownAnswer(
        name="loaders reloaded each epoch",
        build=lambda: Lab(num_items=24, max_epochs=4, reload_dataloaders_every_n_epochs=1),
        expected_ms=PLAIN,
    ),
    KnownAnswer(
        name="ragged last batch",
        build=lambda: Lab(num_items=22),
        expected_ms=(3.6666667, 2, 5, 6, 5, 8, 29.6666667),
        num_rows=6,
    ),
    KnownAnswer(name="two loaders, max_size", build=two_loaders, expected_ms=(5.3333333, 2, 5, 6, 5, 8, 31.3333333)),
    KnownAnswer(name="data module's own hooks", build=with_data_module, expected_ms=(4, 7, 5, 6, 5, 10, 37)),
    KnownAnswer(
        name="step that fetches its own batches",
        build=lambda: lab_with(OwnFetchingModule, num_items=32, max_epochs=2),
        # The start hooks (1 ms) of each epoch's first batch come before any mark, the others with the batch before.
        expected_ms=(4, 0, 5, 6, 5, 5.875, 25.875),
        num_rows=16,
    ),
    KnownAnswer(
        name="validation every 6", build=lambda: validating(val_check_interval=6), expected_ms=PLAIN, validation_ms=2.0
    ),
    KnownAnswer(
        name="validation every 3, accumulation 4",
        build=lambda: validating(val_check_interval=3, accumulate_grad_batches=4),
        expected_ms=(4, 2, 5, 6, 1.25, 5.75, 24),
        validation_ms=4.0,
    ),
    KnownAnswer(
        name="sanity check before",
        build=lambda: validating(num_sanity_val_steps=2, val_check_interval=24),
        expected_ms=PLAIN,
        validation_ms=0.5,
    ),
    KnownAnswer(
        name="epochs that end at batch 5",
        build=lambda: lab_with(EndingEarlyModule, max_epochs=4),
        expected_ms=PLAIN,
        num_rows=20,
        num_discarded=4,
    ),
    KnownAnswer(
        name="None in place of every second batch",
        build=batches_of_none,
        # A batch of None is asked for, transferred and ended: of other the hook after the transfer, two hooks at the
        # end, the scheduler and the logger, 4 ms.
        expected_ms=(4, 2, 2.5, 3, 2.5, 6, 20),
    ),
    KnownAnswer(
        name="learning-rate finder before",
        build=finding_a_learning_rate,
        expected_ms=(4, 2, 5, 6, 5, 7, 29),
    ),
    KnownAnswer(
        name="batch-size finder before, finds 16",
        build=finding_a_batch_size,
        expected_ms=(16, 2, 5, 6, 5, 7, 41),
        num_rows=6,
    ),
    KnownAnswer(
        name="block sampling, 5 steps in every 20",
        build=lambda: Lab(num_items=400, sampling=Sampling(timed_steps=5, period_steps=20)),
        expected_ms=PLAIN,
        num_rows=25,
    ),
)
