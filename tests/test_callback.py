"""The known answers of the timing callback: on a scripted clock exact, with real sleeps as lower bounds."""

from __future__ import annotations

import copy
import gc
import importlib.util
import pickle
import time
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import ROOT
from known_answers import (
    KNOWN_ANSWERS,
    PLAIN,
    InfiniteLossModule,
    KnownAnswer,
    finding_a_batch_size,
    lab_with,
    scaled,
    scheduled_accumulation,
    validating,
)
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from naive_timer import naive_errors_ms
from torch.utils.data import DataLoader, TensorDataset
from truth_lab import (
    CostlyItems,
    CostlyModule,
    CostlySGD,
    EverySecondStepModule,
    Lab,
    ManualAccumulationModule,
    ManualModule,
    OwnCallbacksModule,
    OwnFetchingModule,
    ReplacingModule,
    SometimesNoneLoader,
    SwallowingModule,
    WrappedOptimizerModule,
    make_timer,
    mean_milliseconds,
    phase_milliseconds,
)

from stepbench import callback
from stepbench.profiler_tap import PHASE_MARKS, action_marks
from stepbench.record import PHASES, BatchTiming, Sampling
from stepbench.statistics import summarize_run
from stepbench.timing import Mark


def assert_phases_sum_to_wall(rows: list[BatchTiming]) -> None:
    for row in rows:
        phases_ns = [round((getattr(row, f"{phase}_s") or 0.0) * 1e9) for phase in PHASES]
        assert sum(phases_ns) == round(row.batch_s * 1e9)


@pytest.mark.parametrize("case", KNOWN_ANSWERS, ids=lambda case: case.name)
def test_known_answers_are_exact(case: KnownAnswer) -> None:
    lab, rows = case.run()
    assert phase_milliseconds(rows) == case.expected_ms
    assert mean_milliseconds(rows, "validation") == case.validation_ms
    assert len(rows) == case.num_rows
    assert lab.timer.num_discarded == case.num_discarded
    assert_phases_sum_to_wall(rows)


def test_a_timer_from_hook_to_hook_is_wrong_where_it_is_known_to_be() -> None:
    cases = {case.name: case for case in KNOWN_ANSWERS}
    plain = naive_errors_ms(cases["plain loop"])
    assert plain["data"] > 3  # the transfer and the hooks around it are taken for the wait for data
    assert plain["transfer"] == -2
    validation = naive_errors_ms(cases["validation every 6"])
    assert validation["data"] > plain["data"] + 1  # validation too
    closures = naive_errors_ms(cases["three closures a step"])
    assert closures["optimizer"] < 0
    assert naive_errors_ms(cases["two optimizers, manual"])["forward"] != 0


def test_the_table_of_the_documentation_is_what_runs() -> None:
    spec = importlib.util.spec_from_file_location("script", ROOT / "scripts" / "write_known_answers.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (ROOT / "docs" / "timing.md").read_text().endswith(script.MARKER + "\n" + script.render_tables())


def test_every_batch_is_exact_not_only_the_mean() -> None:
    for row in Lab().run():
        assert phase_milliseconds([row]) == PLAIN


def test_accumulation_4_books_the_optimizer_to_the_batches_that_step() -> None:
    rows = Lab(accumulate_grad_batches=4).run()
    assert [row.took_optimizer_step for row in rows] == [False, False, False, True] * 6
    assert [row.step for row in rows] == [index // 4 for index in range(24)]
    steps = [rows[start : start + 4] for start in range(0, 24, 4)]
    assert all(round(sum(row.optimizer_s for row in step) * 1e3, 7) == 5 for step in steps)
    assert not any(row.skipped_by_scaler for row in rows)


def test_accumulation_5_steps_early_at_the_end_of_the_epoch() -> None:
    rows = Lab(accumulate_grad_batches=5).run()
    assert sum(row.took_optimizer_step for row in rows) == 5
    assert [row.step for row in rows].count(4) == 4


@pytest.mark.parametrize(
    ("settings", "num_rows", "num_epochs"),
    [
        ({"overfit_batches": 4, "max_epochs": 6}, 24, 6),
        ({"num_items": 16, "max_epochs": 6}, 24, 6),
        ({"max_steps": 10, "max_epochs": -1}, 10, 1),
        ({"num_items": 24, "max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}, 24, 4),
    ],
)
def test_epochs_and_limits_leave_every_batch_plain(settings: dict[str, Any], num_rows: int, num_epochs: int) -> None:
    lab = Lab(**settings)
    rows = lab.run()
    assert phase_milliseconds(rows) == PLAIN
    assert len(rows) == num_rows
    assert sum(row.starts_epoch for row in rows) == num_epochs
    assert sum(row.epoch_turnover_s is not None for row in rows) == num_epochs - 1
    assert lab.timer.num_discarded == 0


def test_validation_is_kept_apart() -> None:
    rows = validating(val_check_interval=6).run()
    assert {round(row.validation_s * 1e3) for row in rows if row.validation_ran} == {12}
    assert [index for index, row in enumerate(rows) if row.validation_ran] == [5, 11, 17, 23]


def test_a_ragged_last_batch_has_its_own_sample_count() -> None:
    rows = Lab(num_items=22).run()
    assert [row.num_samples for row in rows] == [4, 4, 4, 4, 4, 2]
    assert mean_milliseconds(rows, "data") == 3.6666667


def test_a_step_that_the_scaler_skips_is_told_from_a_free_one() -> None:
    rows = scaled(InfiniteLossModule).run()
    assert all(row.skipped_by_scaler and not row.took_optimizer_step for row in rows)
    assert [row.step for row in rows] == list(range(24))
    assert not any(row.skipped_by_scaler for row in scaled().run())


def test_accumulation_by_hand_counts_its_own_steps() -> None:
    rows = lab_with(ManualAccumulationModule).run()
    assert [row.step for row in rows] == [index // 3 for index in range(24)]
    assert [row.took_optimizer_step for row in rows] == [False, False, True] * 8


def test_a_ragged_accumulation_window_steps_at_the_end_of_the_epoch() -> None:
    rows = Lab(num_items=12, accumulate_grad_batches=4, max_epochs=3).run()
    assert [row.took_optimizer_step for row in rows] == [False, False, True] * 3
    assert [row.step for row in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_accumulation_may_change_with_the_epoch() -> None:
    rows = scheduled_accumulation().run()
    assert [sum(row.took_optimizer_step for row in rows if row.epoch == epoch) for epoch in range(3)] == [12, 6, 4]


def test_batches_of_none_are_timed_and_hold_no_samples() -> None:
    lab = Lab()
    lab.loader = SometimesNoneLoader(CostlyItems(lab.clock, 32), batch_size=4)
    rows = lab.run()
    assert [row.num_samples for row in rows] == [4, None] * 4
    assert [row.batch for row in rows] == list(range(8))
    assert phase_milliseconds(rows[::2]) == PLAIN
    assert phase_milliseconds(rows[1::2]) == (4, 2, 0, 0, 0, 4, 10)


def test_a_step_that_fetches_its_own_batches_has_them_counted() -> None:
    rows = lab_with(OwnFetchingModule, num_items=32, max_epochs=2).run()
    assert [row.num_samples for row in rows] == [4] * 16
    assert [row.batch for row in rows] == [*range(8), *range(8)]


def test_steps_that_the_module_leaves_out_are_no_steps() -> None:
    rows = lab_with(EverySecondStepModule).run()
    assert [row.took_optimizer_step for row in rows[2:]] == [False, True] * 11
    assert not any(row.skipped_by_scaler for row in rows)


def test_an_exception_that_the_module_swallows_stays_in_its_batch() -> None:
    lab = lab_with(SwallowingModule)
    rows = lab.run()
    assert len(rows) == 24
    assert lab.timer.num_discarded == 0
    ordinary = [row for index, row in enumerate(rows) if index != 5]
    assert {phase_milliseconds([row]) for row in ordinary} == {phase_milliseconds(rows[:1])}
    assert mean_milliseconds(rows[5:6], "optimizer") == 2
    assert_phases_sum_to_wall(rows)


def test_an_optimizer_without_hooks_is_counted_by_the_trainer_and_timed_as_the_rest_of_its_step() -> None:
    rows = lab_with(WrappedOptimizerModule).run()
    assert phase_milliseconds(rows) == (4, 2, 5, 6, 5, 7, 29)
    assert all(row.took_optimizer_step for row in rows)
    assert [row.step for row in rows] == list(range(24))
    assert_phases_sum_to_wall(rows)


def test_optimizers_that_the_module_replaces_at_the_start_are_seen() -> None:
    assert mean_milliseconds(lab_with(ReplacingModule).run(), "optimizer") == 5


def test_a_timer_that_the_module_brings_along_works() -> None:
    lab = lab_with(OwnCallbacksModule)
    assert isinstance(lab.module, OwnCallbacksModule)
    lab.module.own_callbacks = [lab.timer]
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    trainer.fit(lab.module, DataLoader(lab.data, batch_size=4))
    assert phase_milliseconds(lab.timer.rows) == (4, 2, 5, 6, 5, 4, 26)


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_checkpoints_and_progress_bars_leave_the_phases_alone(bar: type[pl.Callback], tmp_path: Path) -> None:
    lab = Lab(enable_checkpointing=True, enable_progress_bar=True)
    lab.further_callbacks = [ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4), bar()]
    assert phase_milliseconds(lab.run()) == PLAIN
    assert list(tmp_path.iterdir())


def test_only_fits_are_timed_and_each_by_itself() -> None:
    lab = validating(max_epochs=1, val_check_interval=24)
    lab.run()
    lab.trainer.validate(lab.module, lab.validation)
    assert len(lab.timer.rows) == 24
    lab.trainer.fit_loop.max_epochs = 2
    lab.trainer.fit(lab.module, DataLoader(lab.data, batch_size=4))
    rows = lab.timer.rows
    assert phase_milliseconds(rows) == PLAIN
    assert [(row.epoch, row.step) for row in rows] == [(1, step) for step in range(24)]
    assert rows[0].starts_epoch
    assert [row.epoch_turnover_s for row in rows] == [None] * 24


def test_a_fit_after_one_of_another_kind_is_timed_as_its_own_kind() -> None:
    lab = lab_with(OwnFetchingModule, num_items=32)
    lab.run()
    plain = Lab(num_items=96)
    plain.timer = lab.timer
    plain.clock = plain.module.clock = plain.data.clock = lab.clock  # type: ignore[attr-defined]
    assert phase_milliseconds(plain.run()) == PLAIN


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_timer_can_be_copied_and_pickled(when: str) -> None:
    timer = make_timer(sampling=Sampling(timed_steps=1, period_steps=2))
    if when == "after":
        fit_for_real(SleepingModule(), num_batches=4, timer=timer)
    for copied in (copy.deepcopy(timer), pickle.loads(pickle.dumps(timer))):
        assert type(copied) is type(timer)
        assert copied.rows == timer.rows
        rows = fit_for_real(SleepingModule(), num_batches=4, timer=copied)
        assert [row.forward_s is not None for row in rows] == [True, False, True, False]


def test_nothing_of_the_trainer_is_kept() -> None:
    timer = make_timer()
    module = SleepingModule()
    fit_for_real(module, num_batches=2, timer=timer)
    kept = weakref.ref(module.trainer)
    module.trainer = None
    gc.collect()
    assert kept() is None


def test_a_timer_that_comes_when_training_has_started_does_no_harm() -> None:
    late = make_timer()

    class Adding(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.callbacks = [*trainer.callbacks, late]  # type: ignore[attr-defined]

    lab = Lab(num_items=24)
    lab.further_callbacks = [Adding()]
    assert phase_milliseconds(lab.run()) == PLAIN
    assert late.rows == []


class ReplacingCallback(pl.Callback):
    """Puts a profiler of its own in the place of whatever is there."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.profiler = trainer.profiler = SimpleProfiler()  # type: ignore[attr-defined]


def test_a_profiler_that_replaces_the_tap_is_left_alone_and_named() -> None:
    lab = Lab()
    replacing = ReplacingCallback()
    lab.further_callbacks = [replacing]
    assert lab.run() == []
    assert lab.trainer.profiler is replacing.profiler  # type: ignore[attr-defined]
    assert "trainer.profiler" in lab.timer.why_nothing_was_timed()


@pytest.mark.parametrize("first", [True, False])
def test_two_timers_time_the_same_and_both_go(first: bool) -> None:
    lab = Lab(timer_first=first)
    other = make_timer(timer="host", clock=lab.clock)
    lab.further_callbacks = [other]
    assert phase_milliseconds(lab.run()) == phase_milliseconds(other.rows) == PLAIN
    assert_everything_put_back(lab)


def test_the_user_s_code_finds_its_own_profiler_behind_the_tap() -> None:
    class AskingModule(CostlyModule):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            self.seen = dict(self.trainer.profiler.recorded_durations)  # type: ignore[attr-defined]

    lab = lab_with(AskingModule, profiler="simple")
    assert phase_milliseconds(lab.run()) == PLAIN
    assert lab.module.seen  # type: ignore[attr-defined]


def test_a_profiler_without_its_base_s_constructor_keeps_working() -> None:
    class BareProfiler(Profiler):
        def __init__(self) -> None:
            pass

        def setup(self, *args: Any, **kwargs: Any) -> None:
            pass

        def teardown(self, stage: str | None) -> None:
            pass

        def describe(self) -> None:
            pass

        def start(self, action_name: str) -> None:
            pass

        def stop(self, action_name: str) -> None:
            pass

    assert phase_milliseconds(Lab(profiler=BareProfiler()).run()) == PLAIN


def test_a_closure_may_take_arguments() -> None:
    class LineSearchModule(ManualModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()

            def closure(*, backward: bool = True) -> torch.Tensor:
                loss = self.compute_loss(batch)
                if backward:
                    self.manual_backward(loss)
                return loss

            optimizer.optimizer.step(closure)

        def configure_optimizers(self) -> Any:
            class LineSearch(CostlySGD):
                def step(self, closure: Any = None) -> Any:
                    closure(backward=False)
                    return super().step(closure)

            return LineSearch(self.clock, self.parameters())

    rows = lab_with(LineSearchModule).run()
    assert mean_milliseconds(rows, "forward") == 10
    assert mean_milliseconds(rows, "backward") == 6
    assert mean_milliseconds(rows, "optimizer") == 3


def test_optimizers_that_are_replaced_between_epochs_are_seen() -> None:
    class LateReplacingModule(CostlyModule):
        def on_train_epoch_end(self) -> None:
            self.trainer.strategy.setup_optimizers(self.trainer)

    rows = lab_with(LateReplacingModule, num_items=24, max_epochs=3).run()
    assert phase_milliseconds(rows)[:5] == PLAIN[:5]
    assert [row.step for row in rows] == list(range(18))


def test_a_fit_inside_the_fit_is_not_the_training_s(tmp_path: Path) -> None:
    class FindingAgain(LearningRateFinder):
        def on_fit_start(self, *args: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.current_epoch == 1:
                self.lr_find(trainer, pl_module)

    lab = Lab(num_items=48, max_epochs=3, default_root_dir=tmp_path)
    lab.module.scheduler = False
    lab.module.lr = 1e-4
    lab.further_callbacks = [FindingAgain(num_training_steps=5)]
    rows = lab.run()
    assert [(row.epoch, row.batch) for row in rows] == [(epoch, batch) for epoch in range(3) for batch in range(12)]
    assert phase_milliseconds(rows) == (4, 2, 5, 6, 5, 7, 29)


def test_an_interrupt_between_two_marks_keeps_the_batches_before_it() -> None:
    lab = Lab(timer_first=False)
    real = lab.timer._compilations.was_at_work

    class Interrupting(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 7:
                lab.timer._compilations.was_at_work = self.interrupt  # inside of what the timer does at a batch's end

        def interrupt(self) -> bool:
            lab.timer._compilations.was_at_work = real
            raise KeyboardInterrupt

    lab.further_callbacks = [Interrupting()]
    with pytest.raises(SystemExit):
        lab.run()
    assert phase_milliseconds(lab.timer.rows) == PLAIN
    assert [row.batch for row in lab.timer.rows] == list(range(7))
    assert_everything_put_back(lab)


def test_an_exception_keeps_the_batches_before_it_and_puts_everything_back() -> None:
    lab = Lab()
    lab.module.raise_at = 10
    with pytest.raises(RuntimeError, match="planted"):
        lab.run()
    assert phase_milliseconds(lab.timer.rows) == PLAIN
    assert len(lab.timer.rows) == 10
    assert lab.timer.num_discarded == 1
    assert_everything_put_back(lab)
    assert isinstance(lab.timer.exception, RuntimeError)


def test_everything_is_put_back_after_training() -> None:
    lab = Lab(profiler="simple")
    lab.run()
    assert_everything_put_back(lab)


class RecordingRule:
    """Never stops; keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[dict[str, bool]] = []

    def start(self, now_ns: int) -> None:
        pass

    def batch_done(self, now_ns: int, **told: bool) -> bool:
        self.told.append(told)
        return False


def test_the_stop_rule_is_told_which_steps_were_real() -> None:
    for lab, is_real in (
        (scaled(InfiniteLossModule), False),
        (scaled(), True),
        (lab_with(WrappedOptimizerModule), True),
    ):
        rule = RecordingRule()
        lab.timer._stop_rule = rule
        lab.run()
        assert [told["completes_step"] for told in rule.told] == [True] * 24
        assert [told["took_step"] for told in rule.told] == [is_real] * 24
        assert not any(told["compiled"] for told in rule.told)


def test_blocks_of_steps_are_timed_by_phase_and_the_others_as_wholes() -> None:
    rows = Lab(num_items=400, sampling=Sampling(timed_steps=5, period_steps=20)).run()
    by_phase = [row for row in rows if row.forward_s is not None]
    assert [row.batch for row in by_phase] == [batch for batch in range(100) if batch % 20 < 5]
    assert phase_milliseconds(by_phase) == PLAIN
    assert {row.batch_s for row in rows} == {0.030}
    assert all(row.took_optimizer_step for row in rows)


def test_blocks_change_over_between_optimizer_steps() -> None:
    lab = Lab(accumulate_grad_batches=4, sampling=Sampling(timed_steps=1, period_steps=2), val_check_interval=6)
    lab.validation = DataLoader(CostlyItems(lab.clock, 12), batch_size=4)
    rows = lab.run()
    assert [row.step for row in rows if row.forward_s is not None] == [step for step in (0, 2, 4) for _ in range(4)]
    assert phase_milliseconds([row for row in rows if row.forward_s is not None]) == (4, 2, 5, 6, 1.25, 5.75, 24)
    assert mean_milliseconds(rows, "batch") == 24
    assert mean_milliseconds(rows, "validation") == 2


def test_sampling_leaves_manual_and_scaled_steps_right() -> None:
    every_second = Sampling(timed_steps=1, period_steps=2)
    manual = lab_with(ManualAccumulationModule, sampling=every_second).run()
    assert [row.took_optimizer_step for row in manual] == [False, False, True] * 8
    assert [row.forward_s is not None for row in manual] == ([True] * 3 + [False] * 3) * 4
    skipping = scaled(InfiniteLossModule, sampling=every_second).run()
    assert [row.step for row in skipping] == list(range(24))
    assert all(row.skipped_by_scaler for row in skipping)
    assert not any(row.skipped_by_scaler for row in scaled(sampling=every_second).run())


@pytest.mark.parametrize("case", KNOWN_ANSWERS, ids=lambda case: case.name)
def test_folding_in_the_middle_of_an_epoch_changes_no_answer(
    case: KnownAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback, "MAX_NOTED", 2)
    lab, rows = case.run()
    assert phase_milliseconds(rows) == case.expected_ms
    assert (len(rows), lab.timer.num_discarded) == (case.num_rows, case.num_discarded)


def test_what_is_noted_in_a_long_epoch_stays_small() -> None:
    lab = Lab(num_items=4 * 600)
    lengths: list[int] = []

    class Watching(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            lengths.append(len(lab.timer._marks) + len(lab.timer._confirmed))

    lab.further_callbacks = [Watching()]
    assert phase_milliseconds(lab.run()) == PLAIN
    assert max(lengths) < callback.MAX_NOTED + 300


def test_batches_are_counted_as_the_batch_size_finder_left_them() -> None:
    assert [row.num_samples for row in finding_a_batch_size().run()] == [16] * 6


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}])
def test_real_fused_and_foreach_optimizers_take_their_steps(kind: dict[str, bool]) -> None:
    class AdamModule(SleepingModule):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3, **kind)  # type: ignore[arg-type]

    rows = fit_for_real(AdamModule(), num_batches=4)
    assert all(row.took_optimizer_step and row.optimizer_s > 0 for row in rows)


def test_throughput_is_not_divided_by_accumulation() -> None:
    rates = {}
    for accumulate in (1, 4):
        rows = fit_for_real(SleepingModule(), num_batches=24, accumulate_grad_batches=accumulate)
        summary = summarize_run(rows)
        assert summary is not None and summary.samples_per_s is not None
        rates[accumulate] = summary.samples_per_s
    # Fewer optimizer steps of 5 ms for as many samples: 21 or 22.25 of 26 ms a batch.
    assert 1.0 < rates[4] / rates[1] < 1.4


def assert_everything_put_back(lab: Lab) -> None:
    assert lab.trainer.profiler is lab.profiler_before  # type: ignore[attr-defined]
    for optimizer in lab.trainer.optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler])
def test_the_users_profiler_keeps_working(kind: type[Profiler], tmp_path: Path) -> None:
    profiler = kind(dirpath=str(tmp_path), filename="profile")
    rows = Lab(num_items=24, profiler=profiler).run()
    assert phase_milliseconds(rows) == PLAIN
    if isinstance(profiler, SimpleProfiler):
        counts = {name: len(durations) for name, durations in profiler.recorded_durations.items()}
        assert counts["[_TrainingEpochLoop].train_dataloader_next"] == 6
        assert counts["[Strategy]SingleDeviceStrategy.training_step"] == 6
        assert counts["[LightningModule]CostlyModule.optimizer_step"] == 6
        assert counts["run_training_epoch"] == 1
        assert not profiler.current_actions


class RecordingProfiler(Profiler):
    def __init__(self) -> None:
        super().__init__()
        self.actions: list[str] = []

    def start(self, action_name: str) -> None:
        self.actions.append(action_name)

    def stop(self, action_name: str) -> None:
        pass


def test_lightning_still_names_its_actions_as_the_timer_expects() -> None:
    profiler = RecordingProfiler()
    lab = Lab(num_items=8, profiler=profiler)
    lab.run()
    seen = {action.partition("]")[0].lstrip("[") + "." + action.rpartition(".")[2] for action in profiler.actions}
    assert "[_TrainingEpochLoop].train_dataloader_next" in profiler.actions
    assert "run_training_epoch" in profiler.actions
    of_the_module = {f"{owner}.{hook}" for owner, hook in PHASE_MARKS if owner != "LightningDataModule"}
    assert of_the_module <= seen


def test_actions_that_bound_nothing_have_no_marks() -> None:
    assert action_marks("[Callback]Progress.on_train_batch_end", PHASE_MARKS) == (None, None)
    assert action_marks("run_training_batch", PHASE_MARKS) == (None, None)
    name = "[Callback]ModelCheckpoint{'monitor': 'a.training_step'}.on_after_backward"
    assert action_marks(name, PHASE_MARKS) == (Mark.EXIT_BACKWARD, None)


class SleepingModule(pl.LightningModule):
    """Real time: transfer 3 ms, forward 6 ms, backward 8 ms, optimizer 5 ms, a hook 4 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        time.sleep(0.003)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.006)
        loss: torch.Tensor = self.layer(batch[0]).mean()
        loss.register_hook(lambda gradient: time.sleep(0.008))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        class SleepingSGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:  # type: ignore[override]
                loss = super().step(closure)  # type: ignore[arg-type]
                time.sleep(0.005)
                return loss

        return SleepingSGD(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(0.004)


def slow_collate(samples: Any) -> Any:
    time.sleep(0.010)
    return torch.utils.data.default_collate(samples)


def fit_for_real(module: pl.LightningModule, *, num_batches: int, **settings: Any) -> list[BatchTiming]:
    """Two samples a batch, on the real clock."""
    timer = settings.pop("timer", None) or make_timer()
    loader = settings.pop("loader", None) or DataLoader(TensorDataset(torch.ones(2 * num_batches, 2)), batch_size=2)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"max_epochs": 1, "accelerator": "cpu", "enable_checkpointing": False}
    pl.Trainer(callbacks=[timer], **{**quiet, **settings}).fit(module, loader)
    rows: list[BatchTiming] = timer.rows
    return rows


@pytest.mark.parametrize("num_workers", [0, 1])
def test_real_sleeps_are_lower_bounds_and_phases_sum_to_wall(num_workers: int) -> None:
    loader = DataLoader(
        TensorDataset(torch.ones(24, 2)), batch_size=2, collate_fn=slow_collate, num_workers=num_workers
    )
    rows = fit_for_real(SleepingModule(), num_batches=12, loader=loader)
    assert len(rows) == 12
    assert_phases_sum_to_wall(rows)
    for row in rows:
        if num_workers == 0:
            assert row.data_s >= 0.010  # with a worker the 10 ms are hidden behind the rest of the step
        assert row.transfer_s >= 0.003
        assert row.forward_s >= 0.006
        assert row.backward_s >= 0.008
        assert row.optimizer_s >= 0.005
        assert row.other_s >= 0.004
    if num_workers == 1:
        assert sorted(row.data_s for row in rows)[6] < 0.010


class WaitingLoader:
    """Notes how long each wait for a batch took, by the clock that the timer reads."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.waits_s: list[float] = []

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        batches = iter(self.loader)
        for _ in range(len(self.loader)):
            started = time.perf_counter()
            batch = next(batches)
            self.waits_s.append(time.perf_counter() - started)
            yield batch


def sleepy_collate(samples: Any) -> Any:
    time.sleep(0.02)
    return torch.utils.data.default_collate(samples)


class TenMillisecondsModule(SleepingModule):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.01)
        loss: torch.Tensor = self.layer(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (2, False), (2, True), (3, False)])
def test_the_wait_for_data_is_that_of_the_request_itself(num_workers: int, persistent: bool) -> None:
    loader = WaitingLoader(
        DataLoader(
            TensorDataset(torch.ones(40, 2)),
            batch_size=2,
            collate_fn=sleepy_collate,
            num_workers=num_workers,
            persistent_workers=persistent,
        )
    )
    rows = fit_for_real(TenMillisecondsModule(), num_batches=20, loader=loader, max_epochs=2)
    assert len(rows) == 40
    errors_ms = sorted(abs(row.data_s - wait_s) * 1e3 for row, wait_s in zip(rows, loader.waits_s, strict=True))
    assert errors_ms[len(errors_ms) * 9 // 10] < 0.3  # the rest is what the machine does between two clock readings
    # Starting workers anew for the second epoch is time between epochs, not a wait of its first batch.
    turnover_s = rows[20].epoch_turnover_s
    assert turnover_s is not None
    assert (turnover_s > 0.005) == (num_workers > 0 and not persistent)
