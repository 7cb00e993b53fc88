"""Batch timings packed into one array of whole nanoseconds: a run may have a hundred thousand of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from stepbench.clock import NS_PER_S
from stepbench.record import PHASES, BatchTiming

UNKNOWN = -1
"""Stands for None: no number that is stored can be negative."""

FLAGS = ("took_optimizer_step", "starts_epoch", "validation_ran", "skipped_by_scaler", "backward_merged", "compiled")

HOST_PHASES = tuple(f"{phase}_s" for phase in PHASES)
DEVICE_PHASES = tuple(f"device_{phase}_s" for phase in PHASES)
COUNTS = ("epoch", "batch", "step", "num_samples")
DURATIONS = (*HOST_PHASES, "batch_s", "validation_s", "epoch_turnover_s", *DEVICE_PHASES, "device_batch_s")
COLUMNS = (*COUNTS, *DURATIONS, "flags")

WIDTH = len(COLUMNS)
STEP, FLAG_BITS = COLUMNS.index("step"), COLUMNS.index("flags")


class TimingTable:
    """Rows of `BatchTiming` in the order in which they were appended, eight bytes a number.

    Rows are made when they are read; `warmup` is False in all of them, and `rank` 0.
    """

    def __init__(self) -> None:
        self._numbers = array("q")

    def __len__(self) -> int:
        return len(self._numbers) // WIDTH

    def __iter__(self) -> Iterator[BatchTiming]:
        return (self._row(start) for start in range(0, len(self._numbers), WIDTH))

    @property
    def last_epoch(self) -> int | None:
        """The epoch of the last row; None without rows."""
        return self._numbers[-WIDTH] if self._numbers else None

    def append(
        self,
        *,
        epoch: int,
        batch: int,
        step: int,
        num_samples: int | None,
        phase_ns: Sequence[int] | None,
        batch_ns: int,
        validation_ns: int,
        epoch_turnover_ns: int | None,
        device_phase_ns: Sequence[int] | None,
        device_batch_ns: int | None,
        **flags: bool,
    ) -> None:
        """Append a row; durations in nanoseconds, None where unknown. `starts_epoch` follows from the row before."""
        flags["starts_epoch"] = epoch != self.last_epoch
        unknown_phases = [UNKNOWN] * len(PHASES)
        row = [epoch, batch, step, _packed(num_samples), *(phase_ns or unknown_phases)]
        row += [batch_ns, validation_ns, _packed(epoch_turnover_ns), *(device_phase_ns or unknown_phases)]
        row += [_packed(device_batch_ns), sum(flags.get(name, False) << bit for bit, name in enumerate(FLAGS))]
        self._numbers.extend(row)  # at once: an interrupt must not leave a part of it

    def merge_backward(self, step: int) -> None:
        """Note of the rows of the last step, `step`, that their backward cannot be told from their forward."""
        start = len(self._numbers) - WIDTH
        while start >= 0 and self._numbers[start + STEP] == step:
            self._numbers[start + FLAG_BITS] |= 1 << FLAGS.index("backward_merged")
            for name in ("backward_s", "device_backward_s"):
                self._numbers[start + COLUMNS.index(name)] = UNKNOWN
            start -= WIDTH

    def _row(self, start: int) -> BatchTiming:
        numbers = dict(zip(COLUMNS, self._numbers[start : start + WIDTH], strict=True))
        flags = numbers.pop("flags")
        values: dict[str, Any] = {name: None if number == UNKNOWN else number for name, number in numbers.items()}
        for name in DURATIONS:
            if values[name] is not None:
                values[name] /= NS_PER_S
        values |= {name: bool(flags >> bit & 1) for bit, name in enumerate(FLAGS)}
        return BatchTiming(**values, warmup=False)


def _packed(number: int | None) -> int:
    return UNKNOWN if number is None else number
