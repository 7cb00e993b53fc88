"""Scaling for people: SI values in, text out. Standard library only; nothing else in the package scales a quantity."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MAX_FIGURES = 4
"""A lone value is never shown with more significant figures (STATISTICS S15)."""

DEFAULT_FIGURES = 3
"""Significant figures of a value whose uncertainty is unknown."""

WIDE_FRACTION = 0.15
"""An interval whose half-width is more of its value is wide: the value is noisy (STATISTICS S11)."""

SAME_FRACTION = 0.02
"""Times no further apart are the same (STATISTICS S10)."""

UNKNOWN = "–"
"""How a table shows a value that is None."""

FLOP_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationUnit:
    """A unit of time for a table column or a plot axis: multiply seconds by `per_s`."""

    name: str
    per_s: float


SECONDS = DurationUnit(name="s", per_s=1.0)
MILLISECONDS = DurationUnit(name="ms", per_s=1e3)
MICROSECONDS = DurationUnit(name="µs", per_s=1e6)


def duration_unit(values_s: Iterable[float | None]) -> DurationUnit:
    """The unit in which the middle one of these durations (in seconds) is at least 1; milliseconds without any."""
    known = sorted(value for value in values_s if value is not None and value > 0 and math.isfinite(value))
    if not known:
        return MILLISECONDS
    middle = known[len(known) // 2]
    if middle >= 1.0:
        return SECONDS
    return MILLISECONDS if middle >= 1e-3 else MICROSECONDS


def is_unknown(value: float | None) -> bool:
    """Whether a value is None or not a number."""
    return value is None or math.isnan(value)


def format_significant(value: float | None, figures: int = DEFAULT_FIGURES) -> str:
    """`value` with so many significant figures, never in scientific notation, and no digit before the point lost."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    return f"{value:,.{max(0, _decimals(value, figures))}f}"


def format_value(value: float | None, half_width: float | None = None) -> str:
    """`value` alone, as precise as its interval's half-width allows, with at most four significant figures."""
    if value is None or math.isnan(value) or half_width is None or math.isnan(half_width):
        return format_significant(value)
    if half_width <= 0 or value == 0:
        return format_significant(value, MAX_FIGURES)
    decimals = min(_half_width_decimals(half_width), _decimals(value, MAX_FIGURES))
    return f"{value:,.{max(0, decimals)}f}"


def format_with_half_width(value: float | None, half_width: float | None) -> str:
    """`12.3 ± 0.2`: the half-width to two figures if it leads with a 1, else to one; the value to the same place."""
    if value is None or math.isnan(value) or half_width is None or math.isnan(half_width) or half_width < 0:
        return format_significant(value)
    if half_width == 0:
        return f"{format_significant(value, MAX_FIGURES)} ± 0"
    decimals = max(0, _half_width_decimals(half_width))
    return f"{value:,.{decimals}f} ± {half_width:,.{decimals}f}"


def format_with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """`12.3 ± 0.2`; where the interval is wide, and so rarely symmetric, `41 [26, 112]`; alone where there is none."""
    if value is None or low is None or high is None or math.isnan(value + low + high):
        return format_significant(value)
    half_width = (high - low) / 2
    if half_width <= WIDE_FRACTION * abs(value):
        return format_with_half_width(value, half_width)
    return f"{format_significant(value)} [{format_significant(low, 2)}, {format_significant(high, 2)}]"


def format_duration(value_s: float | None, unit: DurationUnit | None = None, half_width_s: float | None = None) -> str:
    """A duration in seconds as `12.3 ± 0.2 ms`, in its own best unit unless one is given."""
    if value_s is None or math.isnan(value_s):
        return UNKNOWN
    unit = unit or duration_unit([value_s])
    if half_width_s is None:
        return f"{format_significant(value_s * unit.per_s)} {unit.name}"
    return f"{format_with_half_width(value_s * unit.per_s, half_width_s * unit.per_s)} {unit.name}"


def format_rate(samples_per_s: float | None) -> str:
    """A throughput without its unit, thousands separated: `1,234`."""
    return format_significant(samples_per_s)


def format_throughput(samples_per_s: float | None) -> str:
    """A throughput: `1,234 samples/s`."""
    if samples_per_s is None or math.isnan(samples_per_s):
        return UNKNOWN
    return f"{format_rate(samples_per_s)} samples/s"


def format_bytes(num_bytes: float | None) -> str:
    """Memory in GiB (1024³ bytes), below 1 GiB in MiB."""
    if num_bytes is None or math.isnan(num_bytes):
        return UNKNOWN
    if num_bytes >= 1024**3:
        return f"{format_significant(num_bytes / 1024**3)} GiB"
    return f"{format_significant(num_bytes / 1024**2)} MiB"


def format_flop(flop: float | None) -> str:
    """A number of floating-point operations: `7.87 MFLOP`; with `/s` behind it, a rate."""
    if flop is None or math.isnan(flop):
        return UNKNOWN
    power = min(max(int(math.log10(flop)) // 3 if flop >= 1 else 0, 0), len(FLOP_PREFIXES) - 1)
    return f"{format_significant(flop / 1000**power)} {FLOP_PREFIXES[power]}FLOP"


def format_fraction(fraction: float | None) -> str:
    """A fraction of 1 in per cent: `62 %`, without decimals from 10 on, `4.3 %` below."""
    if fraction is None or math.isnan(fraction):
        return UNKNOWN
    percent = 100 * fraction
    if percent == 0:
        return "0 %"
    if abs(percent) < 0.05:
        return "<0.1 %" if percent > 0 else ">-0.1 %"
    return f"{percent:.1f} %" if abs(percent) < 9.95 else f"{percent:.0f} %"


def format_ratio(ratio: float | None) -> str:
    """A ratio of two like quantities: `×1.23`."""
    if ratio is None or math.isnan(ratio):
        return UNKNOWN
    return f"×{ratio:.2f}" if ratio < 99.5 else f"×{ratio:.0f}"


def format_speed(ratio: float | None) -> str:
    """A speed-up in words: `1.8 × faster`, below 1 inverted as `5.2 × slower`, `the same` within ±2 %."""
    if ratio is None or math.isnan(ratio) or ratio <= 0:
        return UNKNOWN
    factor = max(ratio, 1 / ratio)
    if factor <= 1 + SAME_FRACTION:
        return "the same"
    text = f"{factor:.2f}" if factor < 2 else f"{factor:.1f}" if factor < 100 else f"{factor:,.0f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{text} × {'faster' if ratio > 1 else 'slower'}"


def format_count(count: int, singular: str, plural: str | None = None) -> str:
    """A number of things: `1 batch`, `1,200 batches`."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def _decimals(value: float, figures: int) -> int:
    """Decimal places that leave so many significant figures, after rounding (9.996 to three figures is 10.0)."""
    exponent = int(f"{abs(value):.{figures - 1}e}".split("e")[1])
    return figures - 1 - exponent


def _half_width_decimals(half_width: float) -> int:
    leading = f"{half_width:.1e}"[0]
    return _decimals(half_width, 2 if leading == "1" else 1)
