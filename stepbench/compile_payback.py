"""After how many steps a compiled model has saved the time that compiling it took."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stepbench.cells import Cell
from stepbench.record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Payback:
    """What compiling cost a cell and what it saves per step, in seconds, beside the same cell uncompiled.

    `num_steps` is the number of steps after which the one outweighs the other; None where nothing is saved.
    """

    cell: Cell
    compile_s: float
    saved_step_s: float
    num_steps: int | None


def find_paybacks(cells: Sequence[Cell]) -> tuple[Payback, ...]:
    """The payback of each compiled cell with a measured twin in the same sweep that differs in `compile` alone."""
    plain = {(cell.root, cell.request.spec): cell for cell in cells if cell.request.spec.compile is None}
    paybacks = []
    for cell in cells:
        spec = cell.request.spec
        twin = None if spec.compile is None else plain.get((cell.root, dataclasses.replace(spec, compile=None)))
        times = [r.compilation.compile_s for r in cell.ok_records if r.compilation and r.compilation.compile_s]
        if twin is None or not twin.ok_records or not times:
            continue
        saved_s = _median_step_s(twin.ok_records) - _median_step_s(cell.ok_records)
        compile_s = times[0]  # a later round may find it in a cache
        num_steps = math.ceil(compile_s / saved_s) if saved_s > 0 else None
        paybacks.append(Payback(cell=cell, compile_s=compile_s, saved_step_s=saved_s, num_steps=num_steps))
    return tuple(paybacks)


def _median_step_s(records: Sequence[RunRecord]) -> float:
    return statistics.median(record.summary.step.median_s for record in records if record.summary)
