"""Rules over measured numbers -> findings in words. Every finding names the number it rests on."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from stepbench import units
from stepbench.record import PHASES
from stepbench.scaling import measured
from stepbench.study import Finding

DATA_BOUND_FRACTION = 0.20
"""A run that waits longer for its data is data-bound (STATISTICS S11)."""

STALL_RATIO = 1.10
"""Mean over median step time from which rare slow steps matter (STATISTICS S5)."""


def is_noisy(median_s: float | None, low_s: float | None, high_s: float | None) -> bool:
    """Whether an interval is too wide for its median to be compared with another; False where there is none."""
    if median_s is None or low_s is None or high_s is None:
        return False
    return high_s - low_s > 2 * units.WIDE_FRACTION * median_s


def find_cell_findings(
    shares: Mapping[str, float],
    mean_step_s: float,
    median_step_s: float,
    low_s: float | None = None,
    high_s: float | None = None,
) -> tuple[Finding, ...]:
    """What one cell's numbers say. `shares` are the phases' fractions of all wall time; the answer comes first."""
    top = max(PHASES, key=lambda phase: shares[phase])
    findings = []
    if shares["data"] > DATA_BOUND_FRACTION:
        findings.append(
            Finding(
                subject="data",
                text=f"the step waits for data {units.format_fraction(shares['data'])} of the time: "
                "more loader workers or cheaper decoding come before anything else",
            )
        )
    findings.append(
        Finding(subject="phase", text=f"most time goes to {top} ({units.format_fraction(shares[top])} of the step)")
    )
    if median_step_s > 0 and mean_step_s / median_step_s > STALL_RATIO:
        findings.append(
            Finding(
                subject="stalls",
                text=f"some steps are much slower: the mean step ({units.format_duration(mean_step_s)}) is "
                f"{units.format_ratio(mean_step_s / median_step_s)} the median "
                f"({units.format_duration(median_step_s)})",
            )
        )
    if is_noisy(median_step_s, low_s, high_s):
        findings.append(
            Finding(
                subject="noise",
                text=f"too noisy to compare: the median step lies between {units.format_duration(low_s)} "
                f"and {units.format_duration(high_s)}",
            )
        )
    return tuple(findings)


def find_study_findings(cells: pd.DataFrame) -> tuple[Finding, ...]:
    """What all measured cells together say, the wait for data first."""
    frame = measured(cells)
    if frame.empty:
        return ()
    findings = []
    waiting = frame[frame["data_fraction"] > DATA_BOUND_FRACTION]
    if not waiting.empty:
        worst = waiting.loc[waiting["data_fraction"].idxmax()]
        findings.append(
            Finding(
                subject="data",
                text=f"{len(waiting)} of {units.format_count(len(frame), 'cell')} "
                f"{'waits' if len(waiting) == 1 else 'wait'} for data more than "
                f"{units.format_fraction(DATA_BOUND_FRACTION)} of the step "
                f"(worst: cell {worst['cell']}, {units.format_fraction(worst['data_fraction'])})",
            )
        )
    shares = frame[[f"{phase}_fraction" for phase in PHASES]].astype("float64")
    tops = shares.idxmax(axis="columns").str.removesuffix("_fraction")
    counts = tops.value_counts(sort=False)
    for phase in sorted(counts.index, key=lambda name: (-counts[name], PHASES.index(name))):
        own = shares.loc[tops == phase, f"{phase}_fraction"]
        low, high = units.format_fraction(own.min()), units.format_fraction(own.max())
        span = low if low == high else f"{low.removesuffix(' %')}–{high}"
        where = "" if len(frame) == 1 else f" in {counts[phase]} of {len(frame)} cells"
        findings.append(Finding(subject="phase", text=f"most time goes to {phase}{where} ({span} of the step)"))
    widths = (frame["step_high_s"] - frame["step_low_s"]).astype("float64") / frame["median_step_s"].astype("float64")
    noisy = frame[widths > 2 * units.WIDE_FRACTION]
    if not noisy.empty:
        count = f"{len(noisy)} of {units.format_count(len(frame), 'cell')}"
        findings.append(
            Finding(
                subject="noise",
                text=f"{count} {'is' if len(noisy) == 1 else 'are'} too noisy to compare (interval wider than "
                f"±{units.format_fraction(units.WIDE_FRACTION)}): {', '.join(noisy['cell'])}",
            )
        )
    return tuple(findings)
