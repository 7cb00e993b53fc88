"""The pictures of a study: a frame of cells in, a figure out. How they look is plot_style's, how values read is units'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from stepbench import units
from stepbench.plot_style import (
    FAILURE_COLOUR,
    MAX_SERIES,
    SeriesStyle,
    add_title,
    new_figure,
    series_styles,
    theme,
)
from stepbench.scaling import Recommendation, SpeedUp
from stepbench.study import ALL_CELLS, Study


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A quantity to draw over the x axis: columns of `point_frame` for the value and, where known, its interval."""

    value: str
    low: str | None
    high: str | None
    y_label: str
    is_log: bool


def point_frame(study: Study) -> pd.DataFrame:
    """The cells with `x` as position on the axis: the value where the axis is numeric, else 0, 1, 2, …"""
    frame = study.cell_frame.copy()
    axis = study.x_axis
    if axis is None:
        labels = list(dict.fromkeys(frame["series"]))
        frame["x"] = [float(labels.index(label)) for label in frame["series"]]
    else:
        frame["x"] = frame[axis.column].astype("float64")
    for name in ("median_step_s", "step_low_s", "step_high_s", "samples_per_s"):
        frame[name] = frame[name].astype("float64")
    frame["sample_s"] = 1 / frame["samples_per_s"]
    return frame


def plot_step_time(study: Study) -> Figure:
    """Median step time with its interval against batch size (or another numeric axis), both logarithmic."""
    frame = point_frame(study)
    unit = units.duration_unit(frame["median_step_s"])
    for name in ("median_step_s", "step_low_s", "step_high_s"):
        frame[name] *= unit.per_s
    curve = Curve(
        value="median_step_s",
        low="step_low_s",
        high="step_high_s",
        y_label=f"step time [{unit.name}]",
        is_log=True,
    )
    return _plot_curves(study, frame, curve, "Step time", describe_step_time(study), guide=True)


def plot_time_per_sample(study: Study) -> Figure:
    """Wall time per sample, the inverse of throughput, against batch size."""
    frame = point_frame(study)
    unit = units.duration_unit(frame["sample_s"])
    frame["sample_s"] *= unit.per_s
    curve = Curve(value="sample_s", low=None, high=None, y_label=f"time per sample [{unit.name}]", is_log=True)
    return _plot_curves(study, frame, curve, "Time per sample", describe_throughput(study))


def plot_throughput(study: Study) -> Figure:
    """Throughput from zero against batch size, the recommended batch of each series marked."""
    curve = Curve(value="samples_per_s", low=None, high=None, y_label="throughput [samples/s]", is_log=False)
    note = describe_throughput(study)
    if study.recommendations:
        note += "\nring: smallest measured batch within 5 % of the series' best throughput"
    return _plot_curves(study, point_frame(study), curve, "Throughput", note, study.recommendations)


def plot_speed_up(study: Study, speed_ups: Sequence[SpeedUp]) -> Figure:
    """Speed of each series over the baseline at equal x; above 1 is faster."""
    baseline = speed_ups[0].baseline
    labels = list(dict.fromkeys(speed_up.series for speed_up in speed_ups))
    frame = pd.DataFrame(
        [
            {"series": s.series, "x": float(labels.index(s.series)) if s.x is None else s.x, "ratio": s.ratio}
            for s in speed_ups
        ]
    )
    frame["status"], frame["num_rounds"] = "ok", 1
    curve = Curve(value="ratio", low=None, high=None, y_label=f"speed-up over {baseline}", is_log=False)
    note = f"baseline's time / series' time for the same samples · above 1 is faster than {baseline} · no interval"
    with theme():
        return _plot_curves(study, frame, curve, f"Speed-up over {baseline}", f"{note}\n{describe_machine(study)}")


# ---- captions ----


def describe_machine(study: Study) -> str:
    """Host and device of the measured cells."""
    records = [record for cell in study.cells for record in cell.records]
    hosts = dict.fromkeys(record.environment.host for record in records if record.environment)
    devices = dict.fromkeys(
        record.effective.device_name for record in records if record.effective and record.effective.device_name
    )
    return " · ".join(part for part in (f"host {', '.join(hosts)}" if hosts else "", ", ".join(devices)) if part)


def describe_step_time(study: Study) -> str:
    """What points and bars of a step-time picture are."""
    rounds = study.cell_frame["num_rounds"].astype("int64")
    measured = study.cell_frame[rounds > 0]
    if measured.empty:
        return describe_machine(study)
    steps = measured["num_steps"].astype("int64")
    if (rounds <= 1).all():
        bars = "95 % interval within one run; excludes run-to-run variation (hollow)"
    else:
        bars = "range of the run medians; hollow: one run, 95 % interval within it"
    return (
        f"median of {_span(steps.min(), steps.max())} steps, {_span(rounds[rounds > 0].min(), rounds.max())} "
        f"{'round' if rounds.max() == 1 else 'rounds'} · bars: {bars}\n{describe_machine(study)}"
    )


def describe_throughput(study: Study) -> str:
    """What the points of a throughput picture are."""
    rounds = study.cell_frame["num_rounds"].astype("int64")
    measured = study.cell_frame[rounds > 0]
    if measured.empty:
        return describe_machine(study)
    steps = measured["num_steps"].astype("int64")
    text = f"samples over wall time of the same {_span(steps.min(), steps.max())} steps · no interval"
    return f"{text}\n{describe_machine(study)}"


def _span(low: float, high: float) -> str:
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


# ---- drawing ----


def _plot_curves(
    study: Study,
    frame: pd.DataFrame,
    curve: Curve,
    title: str,
    note: str,
    recommendations: Sequence[Recommendation] = (),
    guide: bool = False,
) -> Figure:
    series = [label for label in study.series if label in set(frame["series"])]
    if len(series) > MAX_SERIES:
        note += f"\nfirst {MAX_SERIES} of {len(series)} series; all of them in cells.csv"
    styles = series_styles(series)
    axis_title = study.x_axis.title if study.x_axis else study.series_title
    with theme():
        figure = new_figure(7.2, 4.5)
        axes = figure.add_subplot()
        _scale_x(axes, study, frame)
        for label, style in styles.items():
            _draw_series(axes, frame[frame["series"] == label], label, style, curve, study.x_axis is not None)
        _scale_y(axes, frame, curve)
        if curve.value == "ratio":
            axes.axhline(1, color="0.4", linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
        if guide and study.x_axis is not None and study.x_axis.name == "batch_size":
            _draw_guide(axes, frame, curve)
        for recommendation in recommendations:
            if recommendation.series in styles:
                axes.plot(
                    recommendation.batch_size,
                    recommendation.samples_per_s,
                    marker="o",
                    markersize=13,
                    markerfacecolor="none",
                    markeredgecolor=styles[recommendation.series].colour,
                    markeredgewidth=1.2,
                    linestyle="none",
                )
        _mark_failures(axes, frame, styles)
        axes.set_xlabel(axis_title + (" [samples]" if axis_title == "batch size" else ""))
        axes.set_ylabel(curve.y_label)
        _add_legend(axes, list(styles), study)
        over = f" against {axis_title}" if axis_title else ""
        add_title(figure, axes, title + over, note)
    return figure


def _draw_series(axes: Axes, cells: pd.DataFrame, label: str, style: SeriesStyle, curve: Curve, join: bool) -> None:
    points = cells[cells[curve.value].notna()].sort_values("x", kind="stable")
    if join:
        sns.lineplot(
            data=points,
            x="x",
            y=curve.value,
            ax=axes,
            color=style.colour,
            linestyle=style.line,
            linewidth=1.4,
            errorbar=None,
            legend=False,
        )
    rounds = points["num_rounds"].astype("int64")
    for hollow, group in ((True, points[rounds <= 1]), (False, points[rounds > 1])):
        errors: Any = None
        if curve.low and curve.high:
            value = group[curve.value]
            errors = np.nan_to_num(np.array([value - group[curve.low], group[curve.high] - value]))
        axes.errorbar(
            group["x"],
            group[curve.value],
            yerr=errors,
            fmt=style.marker,
            color=style.colour,
            markerfacecolor="white" if hollow else style.colour,
            markeredgewidth=1.3,
            markersize=5.5,
            elinewidth=1.1,
            capsize=3,
            label="_nolegend_",
            zorder=3,
        )
    axes.plot(
        [],
        [],
        marker=style.marker,
        color=style.colour,
        linestyle=style.line if join else "none",
        markerfacecolor="white" if (rounds <= 1).all() else style.colour,
        markeredgewidth=1.3,
        markersize=5.5,
        label=label,
    )


def _scale_x(axes: Axes, study: Study, frame: pd.DataFrame) -> None:
    """The real values as ticks: log2 where all are positive and far apart, else linear; names where nothing is numeric."""
    ticks = sorted(frame["x"].unique())
    if study.x_axis is None:
        names = list(dict.fromkeys(frame["series"]))
        axes.set_xticks(range(len(names)), names)
        if len("".join(names)) > 60:
            axes.tick_params(axis="x", rotation=30)
            for text in axes.get_xticklabels():
                text.set_horizontalalignment("right")
                text.set_rotation_mode("anchor")
        axes.set_xlim(-0.5, len(names) - 0.5)
        return
    if ticks[0] > 0 and (study.x_axis.name == "batch_size" or ticks[-1] / ticks[0] >= 4):
        axes.set_xscale("log", base=2)
        margin = max(0.06 * np.log2(ticks[-1] / ticks[0]), 0.15)
        axes.set_xlim(ticks[0] * 2**-margin, ticks[-1] * 2**margin)
    else:
        margin = 0.06 * (ticks[-1] - ticks[0]) or 0.5
        axes.set_xlim(ticks[0] - margin, ticks[-1] + margin)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value:,.0f}"))
    if len(ticks) > 12:
        axes.tick_params(axis="x", rotation=45)


def _scale_y(axes: Axes, frame: pd.DataFrame, curve: Curve) -> None:
    names = [name for name in (curve.value, curve.low, curve.high) if name]
    values = frame[names].to_numpy(dtype="float64").ravel()
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        axes.set_yticks([])
        axes.set_ylim(0, 1)
        return
    low, high = float(values.min()), float(values.max())
    if not curve.is_log:
        axes.set_ylim(0, max(high, 1.0 if curve.value == "ratio" else 0) * 1.18)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        return
    axes.set_yscale("log", base=2)
    octaves = np.log2(high / low)
    pad = max(0.08 * octaves, 0.12) if octaves >= 1 else (1.2 - octaves) / 2
    low, high = low * 2**-pad, high * 2 ** (pad + 0.1)
    axes.set_ylim(low, high)
    if np.log2(high / low) >= 2.5:
        exponents = np.arange(np.ceil(np.log2(low)), np.floor(np.log2(high)) + 1)
        stride = max(1, int(np.ceil(len(exponents) / 9)))
        ticks = [2.0**exponent for exponent in exponents[::stride]]
    else:
        ticks = [tick for tick in MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)]
        ticks = [tick for tick in ticks if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))


def _draw_guide(axes: Axes, frame: pd.DataFrame, curve: Curve) -> None:
    """A dotted line of slope 1, on which a batch twice as large takes twice as long; it leaves the limits alone."""
    points = frame[frame[curve.value].notna()]
    if points["x"].nunique() < 2:
        return
    last = points.loc[points["x"].idxmax()]
    x = np.array(axes.get_xlim())
    limits = axes.get_ylim()
    axes.plot(
        x,
        last[curve.value] * x / last["x"],
        color="0.55",
        linestyle=":",
        linewidth=1,
        zorder=1,
        label="proportional to batch size",
    )
    axes.set_xlim(*x)
    axes.set_ylim(*limits)


def _mark_failures(axes: Axes, frame: pd.DataFrame, styles: dict[str, SeriesStyle]) -> None:
    """A × at the top edge for each cell without numbers, in its series' colour, with the word for what happened."""
    failed = frame[(frame["status"] != "ok") & frame["series"].isin(list(styles))]
    for x, group in failed.groupby("x"):
        for row, (label, status) in enumerate(zip(group["series"], group["status"], strict=True)):
            height = 0.97 - 0.055 * row
            axes.plot(
                x,
                height,
                marker="x",
                markersize=6,
                markeredgewidth=1.8,
                color=styles[label].colour,
                transform=axes.get_xaxis_transform(),
                clip_on=False,
                zorder=4,
            )
            is_right = axes.transAxes.inverted().transform(axes.transData.transform((x, 1)))[0] > 0.85
            axes.annotate(
                status,
                (x, height),
                xycoords=axes.get_xaxis_transform(),
                xytext=(-6 if is_right else 6, 0),
                textcoords="offset points",
                ha="right" if is_right else "left",
                va="center",
                fontsize="x-small",
                color=FAILURE_COLOUR,
            )


def _add_legend(axes: Axes, labels: Sequence[str], study: Study) -> None:
    """Beside the axes where labels are short, below them where they are long; none for a single unnamed series."""
    handles, names = axes.get_legend_handles_labels()
    kept = [(h, n) for h, n in zip(handles, names, strict=True) if n != ALL_CELLS and (study.x_axis or n not in labels)]
    if not kept:
        return
    title = study.series_title if study.x_axis and any(n in labels for _, n in kept) else None
    if max(len(name) for _, name in kept) <= 28:
        placement: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    else:
        placement = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.15), "ncols": 1 if len(kept) < 3 else 2}
    axes.legend(
        *zip(*kept, strict=True), title=title, alignment="left", fontsize="small", title_fontsize="small", **placement
    )


