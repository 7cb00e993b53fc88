"""How not to time a step: from callback hook to callback hook, as scripts and callbacks in the wild do it.

Kept to be shown wrong: what happens between two hooks is booked whole to the phase that the hooks' names suggest.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from known_answers import KnownAnswer
from truth_lab import ScriptedClock

from stepbench.record import PHASES

HOOK_PHASES = {
    "on_train_batch_start": "data",
    "on_before_zero_grad": "forward",
    "on_before_backward": "forward",
    "on_after_backward": "backward",
    "on_before_optimizer_step": "other",
    "on_train_batch_end": "optimizer",
}
"""The phase that is taken to have ended when a hook is called."""


class NaiveTimer(pl.Callback):
    """Sums milliseconds per phase over all batches in `totals_ms`."""

    def __init__(self, clock: ScriptedClock) -> None:
        self.clock = clock
        self.totals_ms = dict.fromkeys(PHASES, 0.0)
        self.num_batches = 0
        self.last_ns: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.last_ns = self.clock.now()

    def _end_of(self, hook: str) -> Any:
        now = self.clock.now()
        if self.last_ns is not None:
            self.totals_ms[HOOK_PHASES[hook]] += (now - self.last_ns) / 1e6
        self.last_ns = now
        self.num_batches += hook == "on_train_batch_end"

    def on_train_batch_start(self, *args: Any) -> None:
        self._end_of("on_train_batch_start")

    def on_before_zero_grad(self, *args: Any) -> None:
        self._end_of("on_before_zero_grad")

    def on_before_backward(self, *args: Any) -> None:
        self._end_of("on_before_backward")

    def on_after_backward(self, *args: Any) -> None:
        self._end_of("on_after_backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._end_of("on_before_optimizer_step")

    def on_train_batch_end(self, *args: Any) -> None:
        self._end_of("on_train_batch_end")

    def mean_ms(self, phase: str) -> float:
        return self.totals_ms[phase] / max(1, self.num_batches)


def naive_errors_ms(case: KnownAnswer) -> dict[str, float]:
    """By how many milliseconds per batch a timer from hook to hook is wrong, phase by phase."""
    lab = case.build()
    naive = NaiveTimer(lab.clock)
    lab.further_callbacks = [*lab.further_callbacks, naive]
    lab.run()
    answers = zip(PHASES, case.expected_ms, strict=False)
    return {phase: naive.mean_ms(phase) - right for phase, right in answers if right is not None}
