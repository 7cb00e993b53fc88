"""The three pictures of one cell: batch by batch in phases and in total, and the average share of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from stepbench import units
from stepbench.frames import MERGED_PHASE
from stepbench.plot_style import (
    FAILURE_COLOUR,
    PHASE_COLOURS,
    PHASE_HATCHES,
    add_title,
    new_figure,
    phase_patches,
    theme,
)
from stepbench.record import PHASES
from stepbench.statistics import DEVICE

SMALL_SLICE_FRACTION = 0.03
"""Thinner slices of the pie are drawn as one (STATISTICS P5)."""

MAX_HATCHED_COLUMNS = 60
"""Hatching of more columns than this is noise, not a pattern."""

MAX_COLUMNS = 800
"""As many columns as the picture has room for; beyond, neighbouring batches share one."""

MAX_EPOCH_LINES = 100
"""More epoch starts than this would cover what they mark."""

WHITE_EDGE = {"markeredgecolor": "white", "markeredgewidth": 0.5}
"""Of a marker that may lie on a bar."""

OUTLIER_IQRS = 6.0
"""Batches further above the upper quartile may lie outside the picture; they are counted and marked."""


COMPILED = "compiled (not counted)"
"""The mark of a batch in which a model was compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLabels:
    """What the pictures of a cell say about it: a title, and a note on machine and rounds."""

    title: str
    note: str
    median_step_s: float
    low_s: float | None
    high_s: float | None
    interval_name: str
    batches_per_step: int
    timeline: str


def plot_batch_breakdown(rows: pd.DataFrame, labels: CellLabels) -> Figure:
    """Phases stacked batch by batch, warm-up shaded, from the raw rows of a cell's counted runs.

    Batches that block sampling left out have no phases and are not drawn; at least one must have some.
    """
    num_batches, rows = len(rows), rows[rows["data_s"].notna()]
    unit = units.duration_unit(rows.loc[~rows["warmup"], "batch_s"])
    stride = -(-len(rows) // MAX_COLUMNS)
    edges, index = _edges(len(rows), stride)
    starts = np.arange(0, len(rows), stride)
    lengths = np.diff(np.append(starts, len(rows)))
    parts, names = _stack_phases(rows)
    values = {phase: np.add.reduceat(part, starts) / lengths * unit.per_s for phase, part in parts.items()}
    with theme():
        figure = new_figure(8.6, 4.2)
        axes = figure.add_subplot()
        polygons = axes.stackplot(
            edges,
            *(series[index] for series in values.values()),
            colors=[PHASE_COLOURS[phase] for phase in values],
            linewidth=0,
        )
        is_hatched = len(starts) <= MAX_HATCHED_COLUMNS
        if is_hatched:
            for phase, polygon in zip(values, polygons, strict=True):
                polygon.set(hatch=PHASE_HATCHES[phase], edgecolor="white")
        note = _decorate(axes, rows, unit, labels)
        if len(rows) < num_batches:
            note += f"\nonly the {len(rows):,} of {num_batches:,} batches that were timed by phase"
            axes.set_xlabel(f"{axes.get_xlabel()} (timed by phase)")
        if stride > 1:
            note += f"\neach column is the mean of {stride} batches"
        axes.set_ylabel(f"time per batch [{unit.name}]")
        patches = phase_patches([phase for phase, series in values.items() if series.sum() > 0], is_hatched)
        for patch in patches:
            patch.set_label(names.get(str(patch.get_label()), patch.get_label()))
        handles: list[Any] = [*reversed(patches), *_note_handles(axes)]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small")
        add_title(figure, f"Phases batch by batch{_on_timeline(labels)}: {labels.title}", note)
    return figure


def _stack_phases(rows: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """Seconds of each batch by phase, and what a phase is called where it is more than its name says.

    Where backward is part of forward in any batch it is so in all: the two are told apart everywhere or nowhere.
    """
    phases = {phase: rows[f"{phase}_s"].fillna(0.0).to_numpy(dtype="float64") for phase in PHASES}
    if not rows["backward_merged"].any():
        return phases, {}
    phases["forward"] = phases["forward"] + phases.pop("backward")
    return phases, {"forward": MERGED_PHASE}


def _on_timeline(labels: CellLabels) -> str:
    return " on the device's timeline" if labels.timeline == DEVICE else ""


def plot_total_time(rows: pd.DataFrame, labels: CellLabels) -> Figure:
    """Wall time of every batch, warm-up shaded, with the median and its interval."""
    timed = rows.loc[~rows["warmup"] & ~rows["compiled"], "batch_s"]
    unit = units.duration_unit(timed)
    values = rows["batch_s"].to_numpy() * unit.per_s
    with theme():
        figure = new_figure(8.6, 4.2)
        axes = figure.add_subplot()
        note = _decorate(axes, rows, unit, labels)
        limit = axes.get_ylim()[1]
        x = np.arange(1, len(rows) + 1)
        inside = values <= limit
        size = float(np.clip(900 / len(rows), 2.5, 18))
        colour = PHASE_COLOURS["backward"]
        axes.plot(x, np.where(inside, values, np.nan), color=colour, linewidth=0.5, alpha=0.35, zorder=2)
        axes.scatter(x[inside], values[inside], s=size, color=colour, linewidths=0, zorder=3)
        is_step = labels.batches_per_step == 1
        median_s = labels.median_step_s if is_step else float(timed.median())
        name = "median step" if is_step else "median batch"
        line = axes.axhline(
            median_s * unit.per_s,
            color="black",
            linewidth=1.1,
            zorder=4,
            label=f"{name} {units.format_duration(median_s, unit)}",
        )
        handles: list[Any] = [line]
        if is_step and labels.low_s is not None and labels.high_s is not None:
            band = axes.axhspan(
                labels.low_s * unit.per_s,
                labels.high_s * unit.per_s,
                color=PHASE_COLOURS["data"],
                alpha=0.35,
                linewidth=0,
                zorder=1,
                label=labels.interval_name,
            )
            handles.append(band)
        axes.set_ylabel(f"time per batch [{unit.name}]")
        handles += _note_handles(axes)
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small")
        add_title(figure, f"Total time per batch: {labels.title}", note)
    return figure


def plot_distribution(
    means_s: Mapping[str, float | None], shares: Mapping[str, float | None], labels: CellLabels
) -> Figure:
    """Average share of each phase as a pie; values in time and per cent stand in the legend.

    A backward that is part of forward is None in both.
    """
    is_merged = shares["backward"] is None
    means_s, shares = ({name: value or 0.0 for name, value in values.items()} for values in (means_s, shares))
    total_s = sum(means_s.values())
    unit = units.duration_unit([total_s])
    small = [phase for phase in PHASES if shares[phase] < SMALL_SLICE_FRACTION]
    if len(small) == 1 and shares[small[0]] > 0:
        small = []
    slices = [phase for phase in PHASES if phase not in small and shares[phase] > 0]
    sizes = [shares[phase] for phase in slices]
    colours: list[Any] = [PHASE_COLOURS[phase] for phase in slices]
    hatches = [PHASE_HATCHES[phase] for phase in slices]
    if sum(shares[phase] for phase in small) > 0:
        sizes.append(sum(shares[phase] for phase in small))
        colours.append((0.35, 0.35, 0.35))
        hatches.append("")
    with theme():
        figure = new_figure(7.0, 4.0)
        axes = figure.add_subplot(anchor="W")
        wedges = axes.pie(
            sizes,
            colors=colours,
            startangle=90,
            counterclock=False,
            wedgeprops={"edgecolor": "white", "linewidth": 1.0},
        )[0]
        for wedge, hatch in zip(wedges, hatches, strict=True):
            wedge.set_hatch(hatch)
        for wedge, size in zip(wedges, sizes, strict=True):
            if size >= 0.08:
                angle = np.deg2rad((wedge.theta1 + wedge.theta2) / 2)
                axes.text(
                    0.66 * np.cos(angle),
                    0.66 * np.sin(angle),
                    units.format_fraction(size),
                    ha="center",
                    va="center",
                    bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
                )
        handles = []
        for phase in PHASES:
            if is_merged and phase == "backward":
                continue
            (patch,) = phase_patches([phase])
            name = MERGED_PHASE if is_merged and phase == "forward" else phase
            is_drawn_small = "  (small)" if phase in small and shares[phase] > 0 else ""
            mean, share = units.format_duration(means_s[phase], unit), units.format_fraction(shares[phase])
            patch.set_label(f"{name}  {mean}, {share}{is_drawn_small}")
            handles.append(patch)
        if len(sizes) > len(slices):
            handles.append(Patch(facecolor=(0.35, 0.35, 0.35), edgecolor="white", label="small phases"))
        axes.legend(
            handles=handles,
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            title="mean per step, share of the step",
            alignment="left",
        )
        note = f"mean step {units.format_duration(total_s, unit)} · {labels.note}"
        add_title(figure, f"Average share of each phase{_on_timeline(labels)}: {labels.title}", note)
    return figure


# ---- what the two batch-by-batch pictures share ----


def _edges(count: int, stride: int) -> tuple[Any, Any]:
    """Both edges of each column of `stride` batches, and the index of the column at each edge: steps, not slopes."""
    left = np.arange(0, count, stride) + 0.5
    right = np.append(left[1:], count + 0.5)
    return np.column_stack([left, right]).ravel(), np.repeat(np.arange(len(left)), 2)


def robust_limit(timed: Any) -> float:
    """An upper limit that shows the bulk of the timed batches: far outliers do not stretch it."""
    ordered = np.sort(timed)
    low, middle, high = np.quantile(ordered, [0.25, 0.5, 0.75])
    common = ordered[int(0.95 * (len(ordered) - 1))]
    fence = max(high + OUTLIER_IQRS * (high - low), 1.6 * middle, common)
    return float(1.12 * ordered[ordered <= fence].max())


def _decorate(axes: Axes, rows: pd.DataFrame, unit: units.DurationUnit, labels: CellLabels) -> str:
    """Limits, marks of warm-up, epochs, validation and compilation, points above; returns the note that names them."""
    values = rows["batch_s"].to_numpy() * unit.per_s
    warmup = rows["warmup"].to_numpy(dtype=bool)
    compiled = rows["compiled"].to_numpy(dtype=bool)
    counted = ~warmup & ~compiled
    timed = values[counted] if counted.any() else values
    limit = robust_limit(timed)
    x = np.arange(1, len(rows) + 1)
    axes.set_xlim(0.5, len(rows) + 0.5)
    axes.set_ylim(0, limit)
    axes.set_xlabel("batch" if rows["round"].nunique() == 1 else "batch, round after round")
    changes = np.flatnonzero(np.diff(warmup.astype(int), prepend=0, append=0))
    for i, (start, end) in enumerate(zip(changes[::2], changes[1::2], strict=True)):
        axes.axvspan(
            start + 0.5,
            end + 0.5,
            facecolor=(1, 1, 1, 0.55),
            edgecolor="black",
            linewidth=1.0,
            linestyle=(0, (3, 1.5)),
            zorder=5,
            label="_warmup" if i else "warm-up (paler)",
        )
    starts = np.flatnonzero(rows["starts_epoch"].to_numpy(dtype=bool) & (np.arange(len(rows)) > 0))
    validated = np.flatnonzero(rows["validation_ran"].to_numpy(dtype=bool))
    transform = axes.get_xaxis_transform()
    if 0 < len(starts) <= MAX_EPOCH_LINES:
        axes.vlines(
            x[starts] - 0.5,
            0,
            1,
            transform=transform,
            color="0.35",
            linewidth=0.7,
            linestyle=(0, (2, 2)),
            label="epoch starts",
            zorder=6,
        )
    if len(validated):
        style = {"marker": "v", "markersize": 5, "color": "0.25", **WHITE_EDGE}
        _mark_batches(axes, x[validated] + 0.5, 0.965, label="validation follows", **style)
    if compiled.any():
        style = {"marker": "X", "markersize": 6, "color": "black", **WHITE_EDGE}
        _mark_batches(axes, x[compiled], 0.92, label=COMPILED, **style)
    above = values > limit
    if above.any():
        style = {"marker": "^", "markersize": 5, "color": FAILURE_COLOUR, "clip_on": False}
        _mark_batches(axes, x[above], 1.0, label="not shown: slower", **style)
    lines = [_describe_rows(rows, labels)]
    if above.any():
        highest = units.format_duration(float(values.max()) / unit.per_s)
        num_warmup = int((above & warmup).sum())
        where = f"; {'all' if num_warmup == above.sum() else f'{num_warmup:,}'} in the warm-up" if num_warmup else ""
        count = units.format_count(int(above.sum()), "slower batch", "slower batches")
        lines.append(f"{count} not shown (up to {highest}{where})")
    return "\n".join([*lines, labels.note])


def _mark_batches(axes: Axes, x: np.ndarray, height: float, **style: Any) -> None:
    """A marker at each of these batches, at this fraction of the axes' height."""
    transform = axes.get_xaxis_transform()
    axes.plot(x, np.full(len(x), height), linestyle="none", transform=transform, zorder=7, **style)


def _describe_rows(rows: pd.DataFrame, labels: CellLabels) -> str:
    num_warmup, num_compiled = int(rows["warmup"].sum()), int((rows["compiled"] & ~rows["warmup"]).sum())
    left_out = f", {num_compiled:,} of them compiled and not counted" if num_compiled else ""
    text = (
        f"{units.format_count(len(rows) - num_warmup, 'timed batch', 'timed batches')} after {num_warmup:,} of warm-up"
        f"{left_out} · median step {units.format_duration(labels.median_step_s)}"
    )
    return text + (f" ({labels.batches_per_step} batches a step)" if labels.batches_per_step > 1 else "")


def _note_handles(axes: Axes) -> list[Any]:
    handles, names = axes.get_legend_handles_labels()
    wanted = ("warm-up (paler)", "epoch starts", "validation follows", COMPILED, "not shown: slower")
    return [handle for handle, name in zip(handles, names, strict=True) if name in wanted]
