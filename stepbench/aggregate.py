"""Records -> everything made from them: a cell's summary and pictures, a study's tables, plots and report."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from stepbench import advice, axes, cell_plots, phase_plots, plots, report
from stepbench.cell_summary import summarize_cell
from stepbench.cells import Cell, read_cell
from stepbench.frames import largest_phase, merge_summaries
from stepbench.plot_style import save_figure
from stepbench.record import (
    PHASES,
    ROW_COLUMNS,
    TIMING_RESULTS_FILE,
    TIMING_SUMMARY_FILE,
    BatchTiming,
    Status,
    write_text_atomically,
)
from stepbench.statistics import DEVICE
from stepbench.study import Study, build_study

RUNS_FILE = "runs.csv"
CELLS_FILE = "cells.csv"
REPORT_FILE = "report.md"
SECOND_DECIMALS = 9

NEEDED_NUMBERS = ("round", "attempt", "epoch", "batch", "step", "batch_s", "rank")
"""Without one of these a raw row is incomplete."""


def write_cell_summary(cell_dir: Path) -> None:
    """Write a cell's `timing_summary.yaml`; one without numbers says there why."""
    cell, skipped = read_cell(cell_dir, cell_dir, cell_dir.name)
    for text in skipped:
        warnings.warn(text, stacklevel=2)
    summary = summarize_cell(cell) if cell else {"status": Status.ERROR.value, "reason": "no readable record"}
    text = yaml.safe_dump(summary, sort_keys=False, allow_unicode=True, width=120)
    write_text_atomically(cell_dir / TIMING_SUMMARY_FILE, text)


def draw_cell(cell_dir: Path) -> None:
    """Draw a cell's three pictures; none of a cell without numbers, and of phases only where some are known."""
    cell, _ = read_cell(cell_dir, cell_dir, cell_dir.name)
    if cell is None or not cell.ok_records:
        return
    row = merge_summaries([record.summary for record in cell.ok_records if record.summary])
    labels = cell_labels(cell)
    means = {phase: row[f"{phase}_mean_s"] for phase in PHASES}
    shares = {phase: row[f"{phase}_fraction"] for phase in PHASES}
    if largest_phase(row) is not None:
        figure = cell_plots.plot_distribution(means, shares, labels)
        save_figure(figure, cell_dir / "time_distribution_pie", ("png",))
    rows = read_rows(cell)
    if rows.empty:
        warnings.warn(f"{cell_dir / TIMING_RESULTS_FILE} holds no rows of the recorded runs", stacklevel=2)
        return
    by_phase = choose_timeline(rows, labels.timeline)
    if by_phase["data_s"].notna().any():
        save_figure(cell_plots.plot_batch_breakdown(by_phase, labels), cell_dir / "batch_time_breakdown", ("png",))
    save_figure(cell_plots.plot_total_time(rows, labels), cell_dir / "total_batch_time", ("png",))


def read_rows(cell: Cell) -> pd.DataFrame:
    """The raw rows of the runs that count for a cell, round after round; of several ranks the one summarized by phase.

    Empty where the file is missing or is none of ours; a row that was cut off is left out. Both with a warning.
    Columns that an older stepbench did not write have the values of a run that knew nothing of them.
    """
    path = cell.directory / TIMING_RESULTS_FILE
    nothing: pd.DataFrame = pd.DataFrame(columns=list(ROW_COLUMNS))
    try:
        rows: pd.DataFrame = pd.read_csv(path)
    except (OSError, ValueError):  # pandas' own errors are ValueErrors
        return nothing
    fields = dataclasses.fields(BatchTiming)
    defaults: dict[str, Any] = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    missing = [name for name in ROW_COLUMNS if name not in rows.columns]
    if not set(missing) <= defaults.keys():
        return nothing
    rows = rows.assign(**{name: defaults[name] for name in missing})
    flags = [field.name for field in fields if field.type == "bool"]
    numbers = [name for name in ROW_COLUMNS if name not in flags]
    rows[numbers] = rows[numbers].apply(pd.to_numeric, errors="coerce")
    is_whole = rows[[*NEEDED_NUMBERS, *flags]].notna().all(axis="columns") & _has_plausible_phases(rows)
    whole: pd.DataFrame = rows[is_whole].astype(dict.fromkeys(flags, bool))
    if len(whole) < len(rows):
        warnings.warn(f"{path}: {len(rows) - len(whole)} incomplete rows are left out", stacklevel=2)
    parts = [
        whole[
            (whole["round"] == record.request.round)
            & (whole["attempt"] == record.request.attempt)
            & (whole["rank"] == (record.summary.phases_rank if record.summary else 0))
        ]
        for record in cell.ok_records
    ]
    counted: pd.DataFrame = pd.concat(parts, ignore_index=True)
    return counted


def _has_plausible_phases(rows: pd.DataFrame) -> pd.Series[bool]:
    """Whether a row has all phases, all but a backward that is part of forward, or none as block sampling leaves it."""
    known = rows[[f"{phase}_s" for phase in PHASES]].notna()
    known["backward_s"] |= known["forward_s"] & rows["backward_merged"].eq(True)
    plausible: pd.Series[bool] = known.all(axis="columns") | ~known.any(axis="columns")
    return plausible


def choose_timeline(rows: pd.DataFrame, timeline: str) -> pd.DataFrame:
    """Raw rows whose phases and batch times are those of this timeline; without phases where it has none of a batch."""
    if timeline != DEVICE:
        return rows
    chosen: pd.DataFrame = rows.assign(
        **{f"{name}_s": rows[f"device_{name}_s"].astype("float64") for name in (*PHASES, "batch")}
    )
    return chosen


def cell_labels(cell: Cell) -> cell_plots.CellLabels:
    """What the pictures of a measured cell say about it."""
    record = cell.last_record
    assert record is not None and record.summary is not None
    row = merge_summaries([record.summary for record in cell.ok_records if record.summary])
    flat = axes.flatten_request(cell.request)
    rounds = len(cell.ok_records)
    host = record.environment.host if record.environment else None
    device = record.effective.device_name if record.effective else None
    basis = "one round" if rounds == 1 else f"{rounds} rounds"
    ranks = record.summary.ranks
    rank = f"rank {record.summary.phases_rank} of {len(ranks)}, for which the others wait" if ranks else None
    return cell_plots.CellLabels(
        title=f"{flat['model']}, {axes.label_request(cell.request, cell.ok_records)}",
        note=" · ".join(part for part in (basis, rank, f"host {host}" if host else None, device) if part),
        median_step_s=row["median_step_s"],
        low_s=row["step_low_s"],
        high_s=row["step_high_s"],
        interval_name="95 % interval within one run" if rounds == 1 else "range of the run medians",
        batches_per_step=round(row["num_batches"] / row["num_steps"]),
        timeline=record.summary.timeline,
    )


def write_study(directories: Sequence[Path], out: Path) -> Study:
    """Write tables, plots and report over the sweeps in these directories. Raises FileNotFoundError without a record.

    A file that holds no readable record is skipped with a warning, which the report repeats.
    """
    study = build_study(directories, out)
    for text in study.warnings:
        warnings.warn(text, stacklevel=2)
    out.mkdir(parents=True, exist_ok=True)
    study = dataclasses.replace(study, findings=advice.find_findings(study))
    files = [out / REPORT_FILE, out / CELLS_FILE, out / RUNS_FILE]
    write_text_atomically(out / RUNS_FILE, to_csv(study.run_frame))
    write_text_atomically(out / CELLS_FILE, to_csv(study.cell_frame))
    files += _write_plots(study)
    study = dataclasses.replace(study, files=tuple(files))
    write_text_atomically(out / REPORT_FILE, report.report_markdown(study))
    return study


def to_csv(frame: pd.DataFrame) -> str:
    """A frame as CSV text, seconds to the nanosecond, unknown values empty."""
    rounded = frame.copy()
    for name in rounded.select_dtypes("float64").columns:
        rounded[name] = rounded[name].round(SECOND_DECIMALS)
    text: str = rounded.to_csv(index=False, lineterminator="\n")
    return text


def _write_plots(study: Study) -> list[Path]:
    out, formats = study.out, ("png", "svg")
    if study.cell_frame["median_step_s"].isna().all():
        return []
    files = save_figure(phase_plots.plot_phases(study), out / "phases", formats)
    if not study.axes:
        return files
    files += save_figure(plots.plot_step_time(study), out / "step_time", formats)
    files += save_figure(plots.plot_time_per_sample(study), out / "time_per_sample", formats)
    files += save_figure(plots.plot_throughput(study), out / "throughput", formats)
    if study.speed_ups:
        files += save_figure(plots.plot_speed_up(study, study.speed_ups), out / "speedup", formats)
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: aggregate directories and print the study. Returns 0, or 2 where there is nothing to read."""
    parser = argparse.ArgumentParser(
        prog="stepbench-aggregate",
        description="Read the records of one or several sweeps and write tables, plots and a report.",
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="a run, a sweep, or a tree of them")
    parser.add_argument("--out", type=Path, help="where to write (default: DIR); required with several DIRs")
    options = parser.parse_args(arguments)
    if options.out is None and len(options.directories) > 1:
        message = "several directories need --out DIR, so that the study of none of them is overwritten"
        print(f"stepbench-aggregate: {message}", file=sys.stderr)
        return 2
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            study = write_study(options.directories, options.out or options.directories[0])
            for cell in study.cells:
                write_cell_summary(cell.directory)
                draw_cell(cell.directory)
    except OSError as error:
        print(f"stepbench-aggregate: {error}", file=sys.stderr)
        return 2
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"stepbench-aggregate: warning: {text}", file=sys.stderr)
    report.print_study(study)
    return 0


if __name__ == "__main__":
    sys.exit(main())
