"""The pictures of a study over its x axis: a frame of cells in, a figure out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stepbench import units
from stepbench.captions import describe_ratio, describe_step_time, describe_steps
from stepbench.plot_scales import FAILURE_ROW_FRACTION, Curve, scale_x, scale_y
from stepbench.plot_style import (
    FAILURE_COLOUR,
    MAX_SERIES,
    NOISY_ALPHA,
    SeriesStyle,
    add_title,
    new_figure,
    series_styles,
    theme,
)
from stepbench.scaling import Recommendation, SpeedUp, noisy
from stepbench.study import ALL_CELLS, Study, name_series, plain_value

MAX_SIDE_LABEL = 25
"""Longer labels go below the picture: beside it they would squeeze the axes."""


def point_frame(study: Study) -> pd.DataFrame:
    """The cells with `x` as position on the axis, the value where that is numeric, else 0, 1, 2, …; and `is_noisy`."""
    frame: pd.DataFrame = study.cell_frame.copy()
    axis = study.x_axis
    if axis is None:
        labels = list(dict.fromkeys(frame["series"]))
        frame["x"] = [float(labels.index(label)) for label in frame["series"]]
    else:
        frame["x"] = frame[axis.column].astype("float64")
    for name in ("median_step_s", "step_low_s", "step_high_s", "samples_per_s"):
        frame[name] = frame[name].astype("float64")
    frame["sample_s"] = 1 / frame["samples_per_s"]
    frame["is_noisy"] = noisy(frame)
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
    return _plot_curves(study, frame, curve, "Time per sample", describe_steps(study, "wall time per sample"))


def plot_throughput(study: Study) -> Figure:
    """Throughput from zero against batch size, the recommended batch of each series marked."""
    curve = Curve(value="samples_per_s", low=None, high=None, y_label="throughput [samples/s]", is_log=False)
    note = describe_steps(study, "samples over wall time")
    certain = [item for item in study.recommendations if item.is_certain]
    if certain:
        note += "\nring: smallest measured batch within 5 % of the series' best throughput"
    return _plot_curves(study, point_frame(study), curve, "Throughput", note, certain)


def plot_speed_up(study: Study, speed_ups: Sequence[SpeedUp]) -> Figure:
    """Speed of each series over the baseline at equal x; above 1 is faster."""
    baseline = study.baseline
    labels = list(dict.fromkeys(speed_up.series for speed_up in speed_ups))
    frame = pd.DataFrame(
        [
            {
                "series": s.series,
                "x": float(labels.index(s.series)) if s.x is None else s.x,
                "ratio": s.ratio,
                "is_noisy": s.is_noisy,
            }
            for s in speed_ups
        ]
    )
    frame["status"], frame["num_rounds"] = "ok", 1
    curve = Curve(value="ratio", low=None, high=None, y_label="speed-up", is_log=False)
    note = describe_ratio(study, "baseline's median time / series' median time for the same samples, all else equal")
    return _plot_curves(study, frame, curve, f"Speed-up over {baseline}", note)


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
    is_categorical = study.x_axis is None
    styles, hidden = _choose_styles(study, list(dict.fromkeys(frame["series"])))
    if hidden:
        note += f"\nfirst {len(styles)} of {len(styles) + hidden} series; all of them in cells.csv"
    axis_title = study.x_axis.title if study.x_axis else study.series_title
    with theme():
        figure = new_figure(7.2, 4.5 + _extra_height(list(styles)))
        axes = figure.add_subplot()
        scale_x(axes, study, frame)
        for label, style in styles.items():
            _draw_series(axes, frame[frame["series"] == label], label, style, curve, is_categorical)
        scale_y(axes, frame, curve, _count_failure_rows(frame, styles), is_categorical or not curve.is_log)
        if curve.value == "ratio":
            _draw_line_of_equality(axes)
        if guide and study.x_axis is not None and study.x_axis.name == "batch_size":
            _draw_guide(axes, study, frame, curve)
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
        _add_legend(figure, axes, list(styles), study)
        over = f" against {axis_title}" if axis_title and curve.value != "ratio" else ""
        add_title(figure, title + over, note)
    return figure


def _choose_styles(study: Study, drawn: Sequence[str]) -> tuple[dict[str, SeriesStyle], int]:
    """A style for each series that is drawn, the same in every picture of a study, and how many find no room.

    On a categorical axis each series has a place of its own and needs no style of its own.
    """
    if study.x_axis is None:
        (style,) = series_styles(["any"]).values()
        return dict.fromkeys(drawn, style), 0
    labels = study.series if len(study.series) <= MAX_SERIES else [label for label in study.series if label in drawn]
    styles = {label: style for label, style in series_styles(labels).items() if label in drawn}
    return styles, len(drawn) - len(styles)


def _extra_height(labels: Sequence[str]) -> float:
    """Inches for a legend below the axes that is longer than three rows."""
    return 0.17 * max(0, len(labels) - 2) if max((len(label) for label in labels), default=0) > MAX_SIDE_LABEL else 0.0


def _draw_series(
    axes: Axes, cells: pd.DataFrame, label: str, style: SeriesStyle, curve: Curve, is_categorical: bool
) -> None:
    points = cells[cells[curve.value].notna()].sort_values("x", kind="stable")
    doubtful = points["is_noisy"].astype(bool)
    if is_categorical:
        for alpha, group in ((0.15, points[doubtful]), (0.35, points[~doubtful])):
            axes.bar(group["x"], group[curve.value], width=0.6, color=style.colour, alpha=alpha, zorder=2)
    else:
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
    for hollow, faded in itertools.product((True, False), (True, False)):
        group = points[((rounds <= 1) == hollow) & (doubtful == faded)]
        if group.empty:
            continue
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
            alpha=NOISY_ALPHA if faded else None,
            label="_nolegend_",
            zorder=3,
        )
        for x, value in zip(group["x"], group[curve.value], strict=True) if faded else ():
            axes.annotate(
                "?",
                (x, value),
                xytext=(5, -3),
                textcoords="offset points",
                va="top",
                fontweight="bold",
                color=style.colour,
                zorder=4,
            )
    axes.plot(
        [],
        [],
        marker=style.marker,
        color=style.colour,
        linestyle="none" if is_categorical else style.line,
        markerfacecolor="white" if (rounds <= 1).all() else style.colour,
        markeredgewidth=1.3,
        markersize=5.5,
        label=label,
    )


def _draw_line_of_equality(axes: Axes) -> None:
    """A dashed line at ratio 1, and which side of it is which."""
    axes.axhline(1, color="0.4", linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    left, right = axes.transData.inverted().transform(axes.transAxes.transform([(-0.08, 0), (1, 0)]))[:, 0]
    axes.set_xlim(left, right)  # room for the words beside the first point
    for word, offset, alignment in (("faster", 3, "bottom"), ("slower", -3, "top")):
        axes.annotate(
            word,
            (0, 1),
            xycoords=axes.get_yaxis_transform(),
            xytext=(4, offset),
            textcoords="offset points",
            va=alignment,
            fontsize="small",
            fontstyle="italic",
            color="0.4",
        )


def _draw_guide(axes: Axes, study: Study, frame: pd.DataFrame, curve: Curve) -> None:
    """A dotted line of slope 1, on which a batch twice as large takes twice as long; it leaves the limits alone."""
    points = frame[frame[curve.value].notna()]
    if points["x"].nunique() < 2 or points["is_noisy"].all():
        return
    points = points[~points["is_noisy"]]
    first = points.loc[points["x"].idxmin()]
    series = "" if first["series"] == ALL_CELLS else f"{name_series(study, first['series'])} at "
    x = np.array(axes.get_xlim())
    limits = axes.get_ylim()
    axes.plot(
        x,
        first[curve.value] * x / first["x"],
        color="0.55",
        linestyle=":",
        linewidth=1,
        zorder=1,
        label=f"proportional, from\n{series}batch {plain_value(first['x'])}",
    )
    axes.set_xlim(*x)
    axes.set_ylim(*limits)


def _count_failure_rows(frame: pd.DataFrame, styles: dict[str, SeriesStyle]) -> int:
    failed = frame[(frame["status"] != "ok") & frame["series"].isin(list(styles))]
    return int(failed.groupby("x").size().max()) if len(failed) else 0


def _mark_failures(axes: Axes, frame: pd.DataFrame, styles: dict[str, SeriesStyle]) -> None:
    """A × at the top edge for each cell without numbers, in its series' colour, with the word for what happened."""
    failed = frame[(frame["status"] != "ok") & frame["series"].isin(list(styles))]
    for x, group in failed.groupby("x"):
        for row, (label, status) in enumerate(zip(group["series"], group["status"], strict=True)):
            height = 1 - FAILURE_ROW_FRACTION * (row + 0.5)
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


def _add_legend(figure: Figure, axes: Axes, labels: Sequence[str], study: Study) -> None:
    """Beside the axes where labels are short, below them where they are long; none for a single unnamed series."""
    handles, names = axes.get_legend_handles_labels()
    kept = [(h, n) for h, n in zip(handles, names, strict=True) if n != ALL_CELLS and (study.x_axis or n not in labels)]
    if not kept:
        return
    title = study.series_title if study.x_axis and any(n in labels for _, n in kept) else None
    longest = max(len(line) for _, name in kept for line in name.splitlines())
    style: dict[str, Any] = {"title": title, "alignment": "left", "fontsize": "small", "title_fontsize": "small"}
    if longest <= MAX_SIDE_LABEL:
        axes.legend(*zip(*kept, strict=True), loc="upper left", bbox_to_anchor=(1.01, 1.0), **style)
    else:
        columns = max(1, int(figure.get_figwidth() / (0.6 + 0.075 * longest)))
        figure.legend(*zip(*kept, strict=True), loc="outside lower left", ncols=columns, **style)
