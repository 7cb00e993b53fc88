"""One or several sweeps read together: their axes, their series, and the answers. Draws and prints nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from stepbench import axes as axes_module
from stepbench.axes import Axis, Value
from stepbench.cells import Cell, read_cells
from stepbench.frames import cell_row, make_frame, run_row, sort_cells
from stepbench.record import RunRecord
from stepbench.scaling import (
    Doubling,
    Fastest,
    Growth,
    Recommendation,
    SpeedUp,
    find_doublings,
    find_fastest,
    find_growths,
    find_speed_ups,
    recommend_batch_sizes,
)

ALL_CELLS = "all cells"
"""The series of a study in which nothing but the x axis varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing worth saying about a study or a cell, as a sentence."""

    subject: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One or more sweeps read together: every run, every cell, what varies, and the answers."""

    directories: tuple[Path, ...]
    out: Path
    cells: tuple[Cell, ...]
    run_frame: pd.DataFrame
    cell_frame: pd.DataFrame
    axes: tuple[Axis, ...]
    x_axis: Axis | None
    series: tuple[str, ...]
    doublings: tuple[Doubling, ...]
    growths: tuple[Growth, ...]
    fastest: tuple[Fastest, ...]
    speed_ups: tuple[SpeedUp, ...]
    recommendations: tuple[Recommendation, ...]
    findings: tuple[Finding, ...] = ()
    warnings: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def series_axes(self) -> tuple[Axis, ...]:
        """The axes that make up a series: all but the x axis."""
        return tuple(axis for axis in self.axes if axis is not self.x_axis)

    @property
    def series_title(self) -> str:
        """What the series differ in: `precision`, `model, precision`."""
        return ", ".join(axis.title for axis in self.series_axes)

    @property
    def work_axes(self) -> tuple[Axis, ...]:
        """The axes along which cells do other work or run elsewhere: between them nothing can be the best choice."""
        return tuple(axis for axis in self.axes if not axis.is_choice)

    @property
    def baseline(self) -> str:
        """What speed-ups are measured against: `precision 32`, labelled by what ran."""
        axis = _choose_compared(self.series_axes)
        cell = next((cell for cell in self.cells if cell.ok_records), None)
        if axis is None or cell is None:
            return "nothing"
        return f"{axis.title} {label_axis(self, cell, axis)}"


# ---- names of cells and series ----


def name_series(study: Study, series: str) -> str:
    """A series in words: `precision 32` where one axis makes the series, the combination's own label else."""
    return f"{study.series_title} {series}" if len(study.series_axes) == 1 else series


def label_axis(study: Study, cell: Cell, axis: Axis) -> str:
    """A cell's value on an axis, with what it ran as; of a cell that never ran, as in the others of its series."""
    row = study.cell_frame.iloc[study.cells.index(cell)]
    records: Sequence[RunRecord] = [record for record in cell.records if record.effective is not None]
    if not records:
        same = (study.cell_frame["series"] == row["series"]).tolist()
        records = [r for other, is_same in zip(study.cells, same, strict=True) if is_same for r in other.records]
    return axes_module.label_setting(axis.name, plain_value(row[axis.column]), records)


def plain_value(value: Any) -> Value:
    """A value of a frame as it was requested: unknown as None, whole numbers whole."""
    if pd.isna(value):
        return None
    plain: Value = value.item() if hasattr(value, "item") else value
    return int(plain) if isinstance(plain, float) and plain.is_integer() else plain


def has_value(cell: Cell, axis: Axis) -> bool:
    """Whether a cell has a place on an axis: it may be an argument that its model does not take."""
    return "." not in axis.name or axis.name in axes_module.flatten_request(cell.request)


def label_cell(study: Study, cell: Cell, axes: Sequence[Axis] | None = None) -> str:
    """A cell by its place on these axes, all unless given: `precision 32, batch 16`; without any by its directory."""
    if axes is None:
        axes = [*study.series_axes, *([study.x_axis] if study.x_axis else [])]
    named = [(axis.short_title, label_axis(study, cell, axis)) for axis in axes if has_value(cell, axis)]
    if len(axes) == 1 and named:
        return " ".join(named[0])
    parts = [label if title in axes_module.SELF_EXPLAINING else f"{title} {label}" for title, label in named]
    return ", ".join(parts) or f"cell {cell.name}"


def build_study(directories: Sequence[Path], out: Path) -> Study:
    """Read every record below these directories and answer what can be answered. Raises FileNotFoundError as above."""
    cells, warnings = read_cells(directories)
    settings = _settings(cells)
    axes = axes_module.find_axes(settings)
    x_axis = axes_module.choose_x_axis(axes)
    series_axes = [axis for axis in axes if axis is not x_axis]
    series = _label_series(cells, settings, series_axes)
    cell_rows = [
        cell_row(cell, values, axes, label) for cell, values, label in zip(cells, settings, series, strict=True)
    ]
    cell_frame = sort_cells(make_frame(cell_rows), list(dict.fromkeys(series)), x_axis)
    order = tuple(dict.fromkeys(cell_frame["series"]))
    run_rows = [
        run_row(cell, record, values, axes)
        for cell, values in zip(cells, settings, strict=True)
        for record in (cell.records or (None,))
    ]
    by_batch_size = x_axis is not None and x_axis.name == "batch_size"
    return Study(
        directories=tuple(directories),
        out=out,
        cells=tuple(sorted(cells, key=lambda cell: list(cell_frame["cell"]).index(cell.name))),
        run_frame=make_frame(run_rows),
        cell_frame=cell_frame,
        axes=axes,
        x_axis=x_axis,
        series=order,
        doublings=find_doublings(cell_frame) if by_batch_size else (),
        growths=find_growths(cell_frame, x_axis.column) if x_axis is not None and not by_batch_size else (),
        fastest=find_fastest(cell_frame, [axis.column for axis in axes if not axis.is_choice])
        if any(axis.is_choice for axis in axes)
        else (),
        speed_ups=_compare(cell_frame, series_axes, x_axis),
        recommendations=recommend_batch_sizes(cell_frame) if by_batch_size else (),
        warnings=warnings,
    )


def _choose_compared(series_axes: Sequence[Axis]) -> Axis | None:
    """The axis along which series are compared: precision where it varies, else the first."""
    return next((axis for axis in series_axes if axis.name == "precision"), series_axes[0] if series_axes else None)


def _compare(cell_frame: pd.DataFrame, series_axes: Sequence[Axis], x_axis: Axis | None) -> tuple[SpeedUp, ...]:
    compared = _choose_compared(series_axes)
    if compared is None:
        return ()
    others = [axis.column for axis in series_axes if axis is not compared]
    return find_speed_ups(cell_frame, compared.column, others, x_axis.column if x_axis else None)


def _settings(cells: Sequence[Cell]) -> list[dict[str, Value]]:
    """Each cell's settings by name; host, device and sweep are settings too where several were read together."""
    settings = [axes_module.flatten_request(cell.request) for cell in cells]
    for group in ("model", "data"):
        components = [getattr(cell.request.spec, group) for cell in cells]
        targets = [None if component is None else component.target for component in components]
        if len(set(zip(targets, [flat[group] for flat in settings], strict=True))) > len({f[group] for f in settings}):
            for flat, target in zip(settings, targets, strict=True):
                flat[group] = target
    for name, read in (("host", _host), ("device", _device)):
        found = _fill_per_sweep(cells, [read(cell) for cell in cells])
        for flat, value in zip(settings, found, strict=True):
            flat[name] = value
    keys = [tuple(map(str, flat.values())) for flat in settings]
    if len({cell.root for cell in cells}) > 1 and len(set(keys)) < len(keys):
        common = os.path.commonpath([cell.root.parent for cell in cells])
        for flat, cell in zip(settings, cells, strict=True):
            flat["sweep"] = cell.root.relative_to(common).as_posix()
    return settings


def _host(cell: Cell) -> str | None:
    return next((record.environment.host for record in cell.records if record.environment), None)


def _device(cell: Cell) -> str | None:
    return next((record.effective.device_name for record in cell.records if record.effective), None)


def _fill_per_sweep(cells: Sequence[Cell], values: Sequence[str | None]) -> list[str | None]:
    """A run that failed early knows neither host nor device: the one value of its sweep's other cells is its own."""
    known = {cell.root: {v for c, v in zip(cells, values, strict=True) if c.root == cell.root and v} for cell in cells}
    return [
        value if value or len(known[cell.root]) != 1 else next(iter(known[cell.root]))
        for cell, value in zip(cells, values, strict=True)
    ]


def _label_series(
    cells: Sequence[Cell], settings: Sequence[Mapping[str, Value]], series_axes: Sequence[Axis]
) -> list[str]:
    """Each cell's series: its settings apart from x, labelled by what ran in any cell of that series."""
    if not series_axes:
        return [ALL_CELLS for _ in cells]
    keys = [tuple(str(flat.get(axis.name)) for axis in series_axes) for flat in settings]
    members: dict[tuple[str, ...], list[RunRecord]] = {}
    for key, cell in zip(keys, cells, strict=True):
        members.setdefault(key, []).extend(cell.records)
    return [
        axes_module.label_combination(
            {
                axis.title: axes_module.label_setting(axis.name, flat.get(axis.name), members[key])
                for axis in series_axes
                if axis.name in flat or len(series_axes) == 1
            }
        )
        for key, flat in zip(keys, settings, strict=True)
    ]
