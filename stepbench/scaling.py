"""What changes with batch size and between series, without any model: doubling cost, speed-up, recommended batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """Baseline's time over this series' time for the same samples, all else equal; `x` None without a numeric axis."""

    series: str
    baseline: str
    x: float | None
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The smallest measured batch of a series within 5 % of its best measured throughput."""

    series: str
    batch_size: int
    samples_per_s: float
    best_batch_size: int
    best_samples_per_s: float
    is_still_rising: bool


def measured(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells that have a step time."""
    frame: pd.DataFrame = cells[cells["median_step_s"].notna()]
    return frame


def find_doublings(cells: pd.DataFrame) -> tuple[Doubling, ...]:
    """The cost of doubling the batch between neighbouring measured sizes, series by series in the frame's order."""
    doublings = []
    for series, group in measured(cells).groupby("series", sort=False):
        times = group.groupby("batch_size")["median_step_s"].median().sort_index()
        sizes = [int(size) for size in times.index]
        for size, larger in pairwise(sizes):
            time_ratio = float(times[larger] / times[size])
            doublings_between = math.log2(larger / size)
            exponent = math.log2(time_ratio) / doublings_between
            doublings.append(
                Doubling(
                    series=str(series),
                    batch_size=size,
                    larger_batch_size=larger,
                    time_ratio=time_ratio,
                    doubling_ratio=time_ratio if larger == 2 * size else 2.0**exponent,
                    local_exponent=exponent,
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
    first = frame[compared].astype(str).iloc[0]
    names = [*others, *([x] if x else [])]
    keys = list(zip(*(frame[name].astype(str) for name in names), strict=True)) if names else [()] * len(frame)
    table = pd.DataFrame(
        {
            "key": pd.Series(keys, index=frame.index, dtype="object"),
            "is_baseline": frame[compared].astype(str) == first,
            "series": frame["series"],
            "x": frame[x].astype("float64") if x else 0.0,
            "sample_s": frame["median_step_s"].astype("float64") / frame["samples_per_step"].astype("float64"),
        }
    )
    baselines = {
        key: (str(group["series"].iloc[0]), float(group["sample_s"].median()))
        for key, group in table[table["is_baseline"]].groupby("key")
    }
    speed_ups = []
    for (series, point, key), group in table[~table["is_baseline"]].groupby(["series", "x", "key"], sort=False):
        if key in baselines:
            baseline, baseline_s = baselines[key]
            ratio = baseline_s / float(group["sample_s"].median())
            speed_ups.append(SpeedUp(series=str(series), baseline=baseline, x=float(point) if x else None, ratio=ratio))
    return tuple(speed_ups)


def recommend_batch_sizes(cells: pd.DataFrame) -> tuple[Recommendation, ...]:
    """The recommended batch size of each series with at least two measured sizes. Throughput is not convergence."""
    recommendations = []
    frame = cells[cells["samples_per_s"].notna()]
    for series, group in frame.groupby("series", sort=False):
        rates = group.groupby("batch_size")["samples_per_s"].median().sort_index()
        sizes = [int(size) for size in rates.index]
        if len(sizes) < 2:
            continue
        best = int(rates.idxmax())
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
            )
        )
    return tuple(recommendations)
