"""What changes with batch size and between series, without any model: doubling cost, speed-up, the best cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd

from stepbench.frames import NOISY

NEAR_BEST_FRACTION = 0.95
"""A batch this close to the best throughput is good enough (STATISTICS S14)."""

RISING_GAIN_FRACTION = 0.05
"""Throughput still rises where the last doubling gained more (STATISTICS S14)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubling:
    """What a larger batch costs between two neighbouring measured sizes of a series.

    `time_ratio` is as measured; `doubling_ratio` is t(2B)/t(B), for sizes that are no factor of two apart by the local
    exponent d ln t / d ln B between them.
    """

    series: str
    batch_size: int
    larger_batch_size: int
    time_ratio: float
    doubling_ratio: float
    local_exponent: float
    is_noisy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Step time at a value of a numeric axis over that at the next smaller one, within a series."""

    series: str
    x: float
    larger_x: float
    time_ratio: float
    is_noisy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """Baseline's time over this series' time for the same samples, all else equal; `x` None without a numeric axis."""

    series: str
    baseline: str
    x: float | None
    ratio: float
    is_noisy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The smallest measured batch of a series within 5 % of its best measured throughput.

    It is not certain where the chosen size, the best one or a neighbour of the best is noisy.
    """

    series: str
    batch_size: int
    samples_per_s: float
    best_batch_size: int
    best_samples_per_s: float
    is_still_rising: bool
    batch_sizes: tuple[int, ...]
    noisy_batch_sizes: tuple[int, ...]
    is_certain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The cell with the highest throughput among those that do the same work, and that of the first one measured.

    Noisy cells are left out where any other is left.
    """

    cell: str
    samples_per_s: float
    baseline_cell: str
    ratio: float
    is_noisy: bool
    noisy_rivals: tuple[str, ...]
    """Noisy cells that may be faster."""


def measured(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells that have a step time."""
    frame: pd.DataFrame = cells[cells["median_step_s"].notna()]
    return frame


def noisy(cells: pd.DataFrame) -> pd.Series[bool]:
    """Which cells are too noisy to be compared."""
    return cells["verdict"] == NOISY


def find_growths(cells: pd.DataFrame, column: str) -> tuple[Growth, ...]:
    """How step time grows between neighbouring measured values of a numeric column, series by series."""
    growths = []
    for series, group in measured(cells).groupby("series", sort=False):
        points = group[column].astype("float64")
        times = group["median_step_s"].astype("float64").groupby(points).median().sort_index()
        doubtful = noisy(group).groupby(points).any()
        for x, larger in pairwise(times.index):
            growths.append(
                Growth(
                    series=str(series),
                    x=float(x),
                    larger_x=float(larger),
                    time_ratio=float(times[larger] / times[x]),
                    is_noisy=bool(doubtful[x] or doubtful[larger]),
                )
            )
    return tuple(growths)


def find_doublings(cells: pd.DataFrame) -> tuple[Doubling, ...]:
    """The cost of doubling the batch between neighbouring measured sizes, series by series in the frame's order."""
    doublings = []
    for growth in find_growths(cells, "batch_size"):
        exponent = math.log2(growth.time_ratio) / math.log2(growth.larger_x / growth.x)
        doublings.append(
            Doubling(
                series=growth.series,
                batch_size=int(growth.x),
                larger_batch_size=int(growth.larger_x),
                time_ratio=growth.time_ratio,
                doubling_ratio=growth.time_ratio if growth.larger_x == 2 * growth.x else 2.0**exponent,
                local_exponent=exponent,
                is_noisy=growth.is_noisy,
            )
        )
    return tuple(doublings)


def find_speed_ups(cells: pd.DataFrame, compared: str, others: Sequence[str], x: str | None) -> tuple[SpeedUp, ...]:
    """Speed over the baseline, all else equal: the first measured value of the column `compared` is the baseline.

    Cells are compared that share the columns `others` and, where there is one, the numeric column `x`. The times are
    per sample, so that steps of different size compare.
    """
    frame = measured(cells)
    if frame.empty:
        return ()
    values = _texts(frame[compared])
    names = [*others, *([x] if x else [])]
    keys = list(zip(*(_texts(frame[name]) for name in names), strict=True)) if names else [()] * len(frame)
    table = pd.DataFrame(
        {
            "key": pd.Series(keys, index=frame.index, dtype="object"),
            "is_baseline": [value == values[0] for value in values],
            "series": frame["series"],
            "x": frame[x].astype("float64") if x else 0.0,
            "is_noisy": noisy(frame),
            "sample_s": frame["median_step_s"].astype("float64") / frame["samples_per_step"].astype("float64"),
        }
    )
    baselines = {
        key: (str(group["series"].iloc[0]), float(group["sample_s"].median()), bool(group["is_noisy"].any()))
        for key, group in table[table["is_baseline"]].groupby("key")
    }
    speed_ups = []
    for (series, point, key), group in table[~table["is_baseline"]].groupby(["series", "x", "key"], sort=False):
        if key in baselines:
            baseline, baseline_s, is_baseline_noisy = baselines[key]
            speed_ups.append(
                SpeedUp(
                    series=str(series),
                    baseline=baseline,
                    x=float(point) if x else None,
                    ratio=baseline_s / float(group["sample_s"].median()),
                    is_noisy=is_baseline_noisy or bool(group["is_noisy"].any()),
                )
            )
    return tuple(speed_ups)


def _texts(column: pd.Series[Any]) -> list[str]:
    """The values as texts, so that a setting left open equals itself, which a missing value does not."""
    return [str(value) for value in column]


def recommend_batch_sizes(cells: pd.DataFrame) -> tuple[Recommendation, ...]:
    """The recommended batch size of each series with at least two measured sizes. Throughput is not convergence."""
    recommendations = []
    frame = cells[cells["samples_per_s"].notna()]
    for series, group in frame.groupby("series", sort=False):
        rates = group.groupby("batch_size")["samples_per_s"].median().sort_index()
        sizes = [int(size) for size in rates.index]
        if len(sizes) < 2:
            continue
        doubtful = sorted({int(size) for size in group.loc[noisy(group), "batch_size"]})
        best = int(rates.idxmax())
        place = sizes.index(best)
        chosen = next(size for size in sizes if rates[size] >= NEAR_BEST_FRACTION * rates[best])
        last_gain = float(rates[sizes[-1]] / rates[sizes[-2]]) ** (1 / math.log2(sizes[-1] / sizes[-2]))
        recommendations.append(
            Recommendation(
                series=str(series),
                batch_size=chosen,
                samples_per_s=float(rates[chosen]),
                best_batch_size=best,
                best_samples_per_s=float(rates[best]),
                is_still_rising=best == sizes[-1] and last_gain > 1 + RISING_GAIN_FRACTION,
                batch_sizes=tuple(sizes),
                noisy_batch_sizes=tuple(doubtful),
                is_certain=not {chosen, *sizes[max(0, place - 1) : place + 2]} & set(doubtful),
            )
        )
    return tuple(recommendations)


def find_fastest(cells: pd.DataFrame, work: Sequence[str]) -> tuple[Fastest, ...]:
    """The fastest cell for each combination of the columns `work` (what is trained, and where) with several cells."""
    frame = cells[cells["samples_per_s"].notna()]
    keys = ["|".join(map(str, key)) for key in zip(*(frame[name] for name in work), strict=True)]
    found = []
    for _, group in frame.groupby(keys or [""] * len(frame), sort=False):
        if len(group) < 2:
            continue
        doubtful = noisy(group)
        candidates = group if doubtful.all() else group[~doubtful]
        best, first = candidates.loc[candidates["samples_per_s"].astype("float64").idxmax()], group.iloc[0]
        rivals = group[doubtful & (group["samples_per_s"] > best["samples_per_s"])]
        found.append(
            Fastest(
                cell=str(best["cell"]),
                samples_per_s=float(best["samples_per_s"]),
                baseline_cell=str(first["cell"]),
                ratio=float(best["samples_per_s"] / first["samples_per_s"]),
                is_noisy=bool(doubtful[best.name] or doubtful[first.name]),
                noisy_rivals=tuple(map(str, rivals["cell"])),
            )
        )
    return tuple(found)
