"""What a person reads: a run's and a study's summary on the terminal, and the study's Markdown report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable

from stepbench import advice, answers, axes, captions, units
from stepbench.answers import Answer, Table
from stepbench.cell_summary import four_way_shares
from stepbench.cells import read_cell
from stepbench.flop_rates import describe_flop
from stepbench.frames import summary_columns
from stepbench.record import (
    CONFIG_FILE,
    TIMING_RESULTS_FILE,
    TIMING_SUMMARY_FILE,
    Distribution,
    EffectiveSettings,
    RunRecord,
    RunSummary,
)
from stepbench.statistics import spread
from stepbench.study import Study

CELL_FILES = (
    TIMING_SUMMARY_FILE,
    TIMING_RESULTS_FILE,
    "batch_time_breakdown.png",
    "total_batch_time.png",
    "time_distribution_pie.png",
    CONFIG_FILE,
    "records",
    "logs",
)


def make_console() -> Console:
    """A console that prints text as it is: no markup in it, nothing coloured by guess."""
    return Console(markup=False, highlight=False, emoji=False)


# ---- terminal: one run ----


def print_run(cell_dir: Path, console: Console | None = None) -> None:
    """Print a run's summary: the answer, the phases, the throughput, what ran other than asked, where the files lie."""
    console = console or make_console()
    cell, skipped = read_cell(cell_dir, cell_dir, cell_dir.name)
    for warning in skipped:
        _print_line(console, f"warning: {warning}", style="yellow")
    if cell is None:
        _print_line(console, f"{cell_dir} holds no readable record", style="red")
        return
    record = cell.last_record
    flat = axes.flatten_request(cell.request)
    title = f"{flat['model']} on {flat['data']}, {axes.label_request(cell.request, cell.records)}"
    _print_line(console, title, style="bold")
    if record is not None:
        for name, (requested, effective) in axes.find_differences(record).items():
            if requested != "auto":
                asked, ran = axes.label_value(requested), axes.label_value(effective)
                _print_line(console, f"{name}: asked for {asked}, ran as {ran}", style="yellow")
        if record.effective is not None:
            _print_line(console, _describe_effective(record.effective))
            for line in captions.program_lines(record.effective):
                _print_line(console, line)
    if record is None or record.summary is None or not cell.ok_records:
        _print_line(console, f"{cell.status}, so there are no numbers", style="red")  # the sweep has said why
        if cell.log is not None:
            _print_line(console, f"log: {cell.log}")
    else:
        _print_numbers(console, record)
        memory = (("host", record.peak_host_memory_bytes), ("device", record.peak_device_memory_bytes))
        flop = describe_flop(record)
        if flop is not None:
            _print_line(console, flop)
        known = ", ".join(f"{units.format_bytes(value)} ({name})" for name, value in memory if value)
        if known:
            _print_line(console, f"peak memory {known}")
    present = ", ".join(name for name in CELL_FILES if _has_content(cell_dir / name))
    _print_line(console, f"files in {cell_dir}: {present}")


def _has_content(path: Path) -> bool:
    """Whether a file is there and says something; raw rows are more than their heading."""
    if path.is_dir():
        return any(path.iterdir())
    if path.name != TIMING_RESULTS_FILE or not path.exists():
        return path.exists()
    with path.open(encoding="utf-8") as file:
        return len(list(zip(file, range(2), strict=False))) == 2


def _describe_effective(effective: EffectiveSettings) -> str:
    """What the run really used, in one line."""
    parts = [
        f"ran on {effective.accelerator}" if effective.accelerator else None,
        effective.device_name,
        units.format_count(effective.num_devices, "device") if effective.num_devices else None,
        units.format_count(effective.num_threads, "thread") if effective.num_threads else None,
        units.format_count(effective.num_workers, "loader worker") if effective.num_workers else None,
        f"timer {effective.timer}" if effective.timer else None,
    ]
    return " · ".join(part for part in parts if part)


def _print_numbers(console: Console, record: RunRecord) -> None:
    summary = record.summary
    assert summary is not None
    step, unit = summary.step, units.duration_unit([summary.step.median_s])
    interval = summary.step_interval
    ends = (None, None) if interval is None else (interval.low_s * unit.per_s, interval.high_s * unit.per_s)
    for finding in advice.find_cell_findings(summary_columns(summary), [record]):
        _print_line(console, finding.text, style="bold green" if finding.subject == "phase" else "bold yellow")
    console.print(_phase_table(summary, unit))
    means = {phase.phase: phase.step.mean_s if phase.step else None for phase in summary.phases}
    _print_line(console, f"as four parts: {_list_shares(four_way_shares(means))}")
    if summary.host_phases:
        host = {phase.phase: phase.share_fraction for phase in summary.host_phases}
        _print_line(console, f"phases on the device's timeline; of the host's time: {_list_shares(host)}")
    for rank in summary.ranks:
        own, wait = units.format_duration(rank.median_step_s, unit), units.format_duration(rank.mean_wait_s, unit)
        is_shown = " · its phases are shown" if rank.rank == summary.phases_rank else ""
        _print_line(console, f"rank {rank.rank}: step {own} (median), waits {wait} for others (mean){is_shown}")
    _print_line(
        console,
        f"step {units.format_with_interval(step.median_s * unit.per_s, *ends)} {unit.name} (median), "
        f"{units.format_duration(step.mean_s, unit)} (mean), "
        f"throughput {units.format_throughput(summary.samples_per_s)} (all samples over all wall time)",
    )
    warmup = units.format_count(summary.num_warmup_batches, "batch", "batches")
    _print_line(
        console,
        f"{units.format_count(summary.num_steps, 'step')} timed{_count_sampled(summary)} after {warmup} of warm-up; "
        + (
            "too few independent steps for an interval"
            if interval is None
            else "interval within one run, without run-to-run variation"
        ),
    )


def _list_shares(shares: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {units.format_fraction(share)}" for name, share in shares.items())


def _count_sampled(summary: RunSummary) -> str:
    """How many of the timed steps were timed by phase, where not all were."""
    return "" if summary.num_sampled_steps is None else f", {summary.num_sampled_steps:,} of them by phase,"


def _phase_table(summary: RunSummary, unit: units.DurationUnit) -> RichTable:
    table = _new_table(("phase", f"median [{unit.name}]", "spread", "share"), 1)
    for phase in summary.phases:
        table.add_row(phase.phase, *_phase_cells(phase.step, unit), units.format_fraction(phase.share_fraction))
    table.add_row("step", *_phase_cells(summary.step, unit), "100 %", style="bold")
    return table


def _phase_cells(distribution: Distribution | None, unit: units.DurationUnit) -> tuple[str, str]:
    if distribution is None:
        return units.UNKNOWN, units.UNKNOWN
    median = units.format_significant(distribution.median_s * unit.per_s)
    return median, units.format_fraction(spread(distribution))


# ---- terminal: a study ----


def print_study(study: Study, console: Console | None = None) -> None:
    """Print a sweep: every planned cell with its status, the answers, and where the files lie."""
    console = console or make_console()
    for warning in study.warnings:
        _print_line(console, f"warning: {warning}", style="yellow")
    _print_line(console, answers.count_cells(study), style="bold")
    _print_line(console, f"all cells: {captions.describe_common(study)}")
    shown = _print_table(console, answers.cell_table(study))
    note = answers.table_note(study, shown)
    if note is not None:
        _print_line(console, note, style="dim")
    given = answers.answer_study(study)
    for answer in given:
        _print_answer(console, answer)
    for closing in (*answers.closing_notes(given), *([captions.MEDIAN_NOTE] if note else [])):
        _print_line(console, closing, style="dim")
    if study.files:
        names = ", ".join(path.name for path in study.files if path.suffix != ".svg")
        also = " (plots also as SVG)" if any(path.suffix == ".svg" for path in study.files) else ""
        _print_line(console, f"files in {study.out}: {names}{also}")


def _print_answer(console: Console, answer: Answer) -> None:
    _print_line(console, answer.question, style="bold")
    for line in answer.lines:
        _print_line(console, f"  {line}")


def _print_table(console: Console, table: Table) -> list[str]:
    """Print a table whole and return the headings shown.

    Where it is wider than the console its optional columns go, then the console widens.
    """
    dropped: list[str] = []
    for heading in (None, *table.optional):
        dropped += [heading] if heading else []
        rich_table = _fill_table(table, dropped)
        width = Measurement.get(console, console.options.update(max_width=10_000), rich_table).maximum
        if width <= console.width:
            break
    original, console.width = console.width, max(console.width, width)
    console.print(rich_table)
    console.width = original
    return [heading for heading in table.headings if heading not in dropped]


def _fill_table(table: Table, dropped: Sequence[str]) -> RichTable:
    kept = [i for i, heading in enumerate(table.headings) if heading not in dropped]
    rich_table = _new_table([table.headings[i] for i in kept], table.num_names)
    for row in table.rows:
        is_measured = row[table.num_names - 1] == "ok"
        rich_table.add_row(*(row[i] for i in kept), style=None if is_measured else "red")
    return rich_table


def _new_table(headings: Sequence[str], num_names: int) -> RichTable:
    table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < num_names else "right", no_wrap=True)
    return table


def _print_line(console: Console, text: str, style: str | None = None) -> None:
    """A line that the terminal may wrap but rich does not: paths stay whole when copied or piped."""
    console.print(text, style=style, soft_wrap=True)


# ---- Markdown ----


def report_markdown(study: Study) -> str:
    """The study for a pull request or a language model: answers first, then complete numbers with their units."""
    lines = ["# stepbench report", "", answers.count_cells(study) + ".", ""]
    lines += [f"- **Warning:** {_escape(warning)}" for warning in study.warnings]
    lines += [""] if study.warnings else []
    given = answers.answer_study(study)
    for answer in given:
        lines += [f"## {_escape(answer.question)}", "", *(f"- {_escape(line)}" for line in answer.lines), ""]
    for note in answers.closing_notes(given):
        lines += [f"{note}.", ""]
    if study.recommendations:
        lines += [answers.CONVERGENCE_NOTE, ""]
    lines += ["## Cells", "", *_markdown_table(answers.cell_table(study)), ""]
    phases = answers.phase_table(study)
    if phases.rows:
        title = "## Phases: median per step, and share of all time"
        lines += [title, "", *_markdown_table(phases), ""]
    lines += ["## How measured", "", *(f"- {_escape(line)}" for line in captions.method_lines(study)), ""]
    lines += ["## Environment", "", *(f"- {_escape(line)}" for line in captions.environment_lines(study)), ""]
    if study.files:
        lines += ["## Files", "", ", ".join(f"`{path.name}`" for path in study.files), ""]
    return "\n".join(lines)


def _markdown_table(table: Table) -> list[str]:
    alignment = ["---" if i < table.num_names else "---:" for i in range(len(table.headings))]
    rows = [table.headings, alignment, *table.rows]
    return ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in rows]


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
