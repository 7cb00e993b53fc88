"""Axes of the study's pictures: real values as ticks, logarithms where they help, limits that fit."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from stepbench.study import Study

FAILURE_ROW_FRACTION = 0.055
"""Height of a row of failure marks at the top edge, as a fraction of the axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A quantity to draw over the x axis: columns of `point_frame` for the value and, where known, its interval."""

    value: str
    low: str | None
    high: str | None
    y_label: str
    is_log: bool


def scale_x(axes: Axes, study: Study, frame: pd.DataFrame) -> None:
    """The real values as ticks: log2 where positive and far apart, else linear; names without a numeric axis."""
    ticks = sorted(frame["x"].unique())
    if study.x_axis is None:
        names = list(dict.fromkeys(frame["series"]))
        wrapped = [textwrap.fill(name, max(12, 70 // len(names)), break_long_words=False) for name in names]
        axes.set_xticks(range(len(names)), wrapped)
        if len(names) * max(len(line) for name in wrapped for line in name.splitlines()) > 75:
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


def scale_y(axes: Axes, frame: pd.DataFrame, curve: Curve, num_failure_rows: int, is_linear: bool) -> None:
    """Room for values, intervals and failure marks: from zero, or log2 with an octave and several ticks at least."""
    names = [name for name in (curve.value, curve.low, curve.high) if name]
    values = frame[names].to_numpy(dtype="float64").ravel()
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        axes.set_yticks([])
        axes.set_ylim(0, 1)
        return
    low, high = float(values.min()), float(values.max())
    headroom = FAILURE_ROW_FRACTION * (num_failure_rows + 0.5)
    if is_linear:
        highest = max(high, 1.0 if curve.value == "ratio" else 0)
        axes.set_ylim(0, highest * 1.08 / (1 - headroom))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        return
    axes.set_yscale("log", base=2)
    octaves = np.log2(high / low)
    pad = max(0.08 * octaves, 0.12) if octaves >= 1 else (1.2 - octaves) / 2
    low, high = low * 2**-pad, high * 2**pad
    high *= 2 ** (np.log2(high / low) * headroom / (1 - headroom))
    axes.set_ylim(low, high)
    if np.log2(high / low) >= 2.5:
        exponents = np.arange(np.ceil(np.log2(low)), np.floor(np.log2(high)) + 1)
        stride = max(1, int(np.ceil(len(exponents) / 9)))
        ticks = [2.0**exponent for exponent in exponents[::stride]]
    else:
        candidates = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        ticks = [tick for tick in candidates if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
