"""How every picture looks: theme, colours of phases and series, captions, and how a figure reaches the disk."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from stepbench.record import PHASES

PNG_DPI = 150
PADDING_INCHES = 0.08

_COLOURBLIND: Any = sns.color_palette("colorblind")

PHASE_COLOURS: dict[str, Any] = {
    "data": _COLOURBLIND[1],
    "transfer": _COLOURBLIND[8],
    "forward": _COLOURBLIND[9],
    "backward": _COLOURBLIND[0],
    "optimizer": _COLOURBLIND[2],
    "other": (0.85, 0.85, 0.85),
}
"""The same colour for the same phase in every picture."""

PHASE_HATCHES = {
    "data": "////",
    "transfer": "....",
    "forward": "",
    "backward": "\\\\\\\\",
    "optimizer": "xxxx",
    "other": "",
}
"""Tells phases apart in a grey print."""

MAX_SERIES = 8
"""As many series as can be told apart in one panel."""

NOISY_ALPHA = 0.4
"""Points too noisy to compare are drawn this faint, with a `?` beside them."""

FAILURE_COLOUR = "#b22222"
NOTE_COLOUR = "0.35"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesStyle:
    """Colour, marker and dash pattern of one series: two of them survive colour blindness, two a grey print."""

    colour: Any
    marker: str
    line: Any


_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = (
    "-",
    (0, (5, 1.5)),
    (0, (1.5, 1)),
    (0, (5, 1, 1.2, 1)),
    "-",
    (0, (5, 1.5)),
    (0, (1.5, 1)),
    (0, (5, 1, 1.2, 1)),
)
_SERIES_COLOURS = (0, 3, 2, 4, 1, 9, 5, 7)


def series_styles(series: Sequence[str]) -> dict[str, SeriesStyle]:
    """A style for each of at most `MAX_SERIES` series, by position."""
    return {
        label: SeriesStyle(colour=_COLOURBLIND[_SERIES_COLOURS[i]], marker=_MARKERS[i], line=_LINES[i])
        for i, label in enumerate(series[:MAX_SERIES])
    }


@contextmanager
def theme() -> Iterator[None]:
    """The look of all pictures, for the time of a `with` block; nothing global stays changed."""
    rc: dict[str, Any] = {
        **sns.plotting_context("paper", font_scale=1.05),
        **sns.axes_style("ticks"),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.family": ["sans-serif"],
        "hatch.linewidth": 0.5,
        "svg.hashsalt": "stepbench",
        "text.parse_math": False,  # labels are the user's: a dollar sign in them is a dollar sign
        "legend.frameon": False,
        "axes.axisbelow": True,
    }
    with matplotlib.rc_context(rc):  # type: ignore[arg-type]
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that no global state knows of."""
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=PADDING_INCHES, h_pad=PADDING_INCHES))


def add_title(figure: Figure, title: str, note: str) -> None:
    """A bold title over a smaller note that says what is drawn, both wrapped to the figure's width above the axes."""
    width, height = figure.get_size_inches()
    title = textwrap.fill(title, int(width * 9.0))
    note = "\n".join(textwrap.fill(line, int(width * 16.0)) for line in note.splitlines())
    title_size, note_size = 11.0, 8.0
    top = PADDING_INCHES
    for text, size, weight, colour in ((title, title_size, "bold", "0.1"), (note, note_size, "normal", NOTE_COLOUR)):
        place = figure.transFigure + ScaledTranslation(PADDING_INCHES, -top, figure.dpi_scale_trans)
        figure.text(
            0, 1, text, va="top", fontsize=size, fontweight=weight, color=colour, linespacing=1.25, transform=place
        ).set_in_layout(False)
        top += (text.count("\n") + 1) * size * 1.32 / 72 + 0.03
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, 1, 1 - top / height))


def phase_patches(phases: Sequence[str] = PHASES, is_hatched: bool = True) -> list[Patch]:
    """Legend entries for phases."""
    return [
        Patch(
            facecolor=PHASE_COLOURS[phase],
            hatch=PHASE_HATCHES[phase] if is_hatched else "",
            edgecolor="white",
            linewidth=0.5,
            label=phase,
        )
        for phase in phases
    ]


def save_figure(figure: Figure, path: Path, formats: Sequence[str]) -> list[Path]:
    """Write a figure as `path` with each suffix; equal figures give equal bytes."""
    paths = [path.with_suffix(f".{suffix}") for suffix in formats]
    with theme():
        for target in paths:
            metadata = {"Date": None} if target.suffix == ".svg" else {"Software": None}
            figure.savefig(target, dpi=PNG_DPI, metadata=metadata)
            figure.set_layout_engine("none")  # laid out once, for all formats
    return paths
