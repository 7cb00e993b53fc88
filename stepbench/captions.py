"""The notes under a picture's title: what points and bars are, from how many steps and rounds, and where measured."""

from __future__ import annotations

from stepbench.study import Study


def name_series(study: Study, label: str) -> str:
    """A series in running text: `precision 32`, or its label alone where several settings make it up."""
    return f"{study.series_title} {label}" if len(study.series_axes) == 1 else label


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
