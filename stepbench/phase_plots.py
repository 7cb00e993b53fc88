"""Stacked phases of every cell of a study, in time and as shares of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stepbench import units
from stepbench.axes import label_value
from stepbench.captions import describe_machine, describe_timeline
from stepbench.frames import has_merged_backward, rows_of
from stepbench.plot_style import (
    FAILURE_COLOUR,
    NOISY_ALPHA,
    PHASE_COLOURS,
    PHASE_HATCHES,
    add_title,
    new_figure,
    phase_patches,
    theme,
)
from stepbench.record import PHASES
from stepbench.scaling import noisy
from stepbench.study import ALL_CELLS, Study, name_series, plain_value

MAX_CELLS = 60
"""More bars than this are no picture; the rest stands in cells.csv."""

MIN_LABELLED_FRACTION = 0.08
"""Narrower segments carry no label (STATISTICS P4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bar: its place from the top, its label, and the index of its cell in the frame; None for a heading."""

    position: float
    label: str
    index: int | None


def plot_phases(study: Study) -> Figure:
    """Mean time per step by phase, one bar a cell, beside the same bars as shares of the step."""
    frame = study.cell_frame.iloc[:MAX_CELLS]
    rows = _lay_out(study, len(frame))
    unit = units.duration_unit(frame["median_step_s"].astype("float64"))
    doubtful = noisy(frame).tolist()
    sampled = " timed by phase" if frame["num_sampled_steps"].notna().any() else ""
    meaning = (
        f"bars: mean per step{sampled} · ◇ median step and its interval{' · ?: too noisy to compare' * any(doubtful)}"
    )
    is_merged = any(has_merged_backward(row) for row in rows_of(frame))
    meaning += " · where no backward is drawn, forward holds it" * is_merged
    note = f"{meaning}\n{describe_machine(study)}"
    timeline = describe_timeline(study)
    note = f"{timeline} · {note}" if timeline else note
    if len(study.cell_frame) > MAX_CELLS:
        note += f"\nfirst {MAX_CELLS} of {len(study.cell_frame)} cells; all of them in cells.csv"
    height = max(2.6, 1.5 + 0.26 * (rows[-1].position + 1))
    with theme():
        figure = new_figure(9.6, height)
        grid = figure.add_gridspec(1, 2, width_ratios=(1.25, 1))
        absolute = figure.add_subplot(grid[0])
        relative = figure.add_subplot(grid[1], sharey=absolute)
        means = frame[[f"{phase}_mean_s" for phase in PHASES]].to_numpy(dtype="float64", na_value=np.nan) * unit.per_s
        shares = frame[[f"{phase}_fraction" for phase in PHASES]].to_numpy(dtype="float64", na_value=np.nan) * 100
        bars = [row for row in rows if row.index is not None]
        _stack(absolute, bars, means)
        _stack(relative, bars, shares)
        _label_segments(relative, bars, shares)
        _draw_medians(absolute, bars, study, unit)
        _mark_failures(absolute, bars, study)
        _label_rows(absolute, rows)
        absolute.set_xlim(left=0)
        if not (means > 0).any() and frame["median_step_s"].isna().all():
            absolute.set_xticks([])
        absolute.set_xlabel(f"time per step [{unit.name}]")
        relative.set_xlim(0, 100)
        relative.set_xlabel("share of the step [%]")
        relative.tick_params(axis="y", labelleft=False, length=0)
        absolute.set_ylim(rows[-1].position + 0.7, -0.7)
        present = [phase for i, phase in enumerate(PHASES) if np.nansum(means[:, i]) > 0] or list(PHASES)
        median = Line2D(
            [], [], marker="D", color="black", markerfacecolor="white", markersize=4, linestyle="-", label="median"
        )
        relative.legend(
            handles=[*phase_patches(present), median], loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small"
        )
        add_title(figure, "Where the time of a step goes", note)
    return figure


def _lay_out(study: Study, num_cells: int) -> list[Row]:
    """Bars from the top, series by series under their headings; the x value labels each bar."""
    frame = study.cell_frame.iloc[:num_cells]
    doubtful = noisy(frame).tolist()
    rows: list[Row] = []
    position, heading = 0.0, None
    for index in range(num_cells):
        cell = frame.iloc[index]
        series = str(cell["series"])
        has_headings = study.x_axis is not None and bool(study.series_axes)
        if has_headings and series != heading:
            position += 0.35 if rows else 0.0
            rows.append(Row(position=position, label=name_series(study, series), index=None))
            position, heading = position + 1, series
        if study.x_axis is not None:
            label = f"{study.x_axis.short_title} {label_value(plain_value(cell[study.x_axis.column]))}"
        else:
            label = str(cell["cell"]) if series == ALL_CELLS else series
        rows.append(Row(position=position, label=f"{label} ?" if doubtful[index] else label, index=index))
        position += 1
    return rows


def _stack(axes: Axes, bars: Sequence[Row], values: Any) -> None:
    positions = [bar.position for bar in bars]
    left = np.zeros(len(bars))
    for i, phase in enumerate(PHASES):
        width = np.nan_to_num(values[:, i])
        axes.barh(
            positions,
            width,
            left=left,
            height=0.78,
            color=PHASE_COLOURS[phase],
            hatch=PHASE_HATCHES[phase],
            edgecolor="white",
            linewidth=0.4,
        )
        left += width


def _label_segments(axes: Axes, bars: Sequence[Row], shares: Any) -> None:
    for bar, row in zip(bars, shares, strict=True):
        ends = np.cumsum(np.nan_to_num(row))
        for share, end in zip(row, ends, strict=True):
            if share >= 100 * MIN_LABELLED_FRACTION:
                axes.text(
                    end - share / 2,
                    bar.position,
                    f"{share:.0f}",
                    ha="center",
                    va="center",
                    fontsize="x-small",
                    bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
                )


def _draw_medians(axes: Axes, bars: Sequence[Row], study: Study, unit: units.DurationUnit) -> None:
    frame = study.cell_frame
    doubtful = noisy(frame).tolist()
    for bar in bars:
        cell = frame.iloc[bar.index or 0]
        values = [cell[name] for name in ("median_step_s", "step_low_s", "step_high_s")]
        median, low, high = (float("nan") if pd.isna(value) else float(value) * unit.per_s for value in values)
        if not np.isfinite(median):
            continue
        errors = np.nan_to_num([[median - low], [high - median]])
        axes.errorbar(
            median,
            bar.position,
            xerr=errors,
            fmt="D",
            color="black",
            markerfacecolor="white",
            markersize=3.5,
            markeredgewidth=0.9,
            elinewidth=0.9,
            alpha=NOISY_ALPHA if doubtful[bar.index or 0] else None,
            capsize=2,
        )


def _mark_failures(axes: Axes, bars: Sequence[Row], study: Study) -> None:
    for bar in bars:
        cell = study.cell_frame.iloc[bar.index or 0]
        if cell["status"] != "ok":
            axes.annotate(
                f"× {cell['status']}",
                (0, bar.position),
                xycoords=axes.get_yaxis_transform(),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize="small",
                color=FAILURE_COLOUR,
            )


def _label_rows(axes: Axes, rows: Sequence[Row]) -> None:
    bars = [row for row in rows if row.index is not None]
    axes.set_yticks([row.position for row in bars], [row.label for row in bars])
    axes.tick_params(axis="y", length=0)
    for row in rows:
        if row.index is None:  # inside, so that a long heading takes no room from the bars
            axes.annotate(
                row.label,
                (0, row.position + 0.1),
                xycoords=axes.get_yaxis_transform(),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize="small",
                fontweight="bold",
            ).set_in_layout(False)
