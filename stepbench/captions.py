"""How numbers came about, in words: under a picture's title what its points are, in a report method and machine."""

from __future__ import annotations

import pandas as pd

from stepbench import units
from stepbench.axes import TITLES, USUAL_SETTINGS, flatten_request, label_setting, list_names
from stepbench.record import EffectiveSettings, Environment
from stepbench.scaling import measured, noisy
from stepbench.statistics import DEVICE
from stepbench.study import Study

MEDIAN_NOTE = (
    "Step time is a median over steps; throughput is all samples over all wall time of the same steps, "
    "so the two need not multiply to the batch size."
)
PHASE_NOTE = "Phase medians need not sum to the step's median; means do."
INTERVAL_NOTE = (
    "± is half of the 95 % interval within one run, [low, high] that interval where it is wide; it excludes run-to-run "
    "variation. Without it a run had too few independent steps."
)
ROUNDS_NOTE = (
    "± is half of the range of the run medians, [low, high] that range where it is wide; "
    "for a cell with one round, of the interval within it."
)
COMMON_SETTINGS = ("model", "data", "precision", "batch_size")
NOISE_NOTE = "faded with ?: too noisy to compare"


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
    frame = measured(study.cell_frame)
    if frame.empty:
        return describe_machine(study)
    steps, rounds = frame["num_steps"].astype("int64"), frame["num_rounds"].astype("int64")
    if (rounds <= 1).all():
        bars = "95 % interval within the run, a repeat may differ more"
    else:
        bars = "range of the run medians, of one run the 95 % interval within it"
    text = f"median of {_span(steps.min(), steps.max())} steps"
    if rounds.max() > 1:
        text += f", {_span(rounds.min(), rounds.max())} rounds"
    return "\n".join([f"{text} · bars: {bars}", *_describe_points(study), describe_machine(study)])


def describe_ratio(study: Study, what: str) -> str:
    """What the points of a picture are whose values are not medians of steps and have no interval."""
    return "\n".join([f"{what} · uncertainty not shown", *_describe_points(study), describe_machine(study)])


def _describe_points(study: Study) -> list[str]:
    """What hollow and faded points say, where there are any."""
    rounds = study.cell_frame["num_rounds"].astype("int64")
    notes = ["hollow marker: one run"] if (rounds == 1).any() else []
    notes += [NOISE_NOTE] if noisy(study.cell_frame).any() else []
    return [" · ".join(notes)] if notes else []


def describe_steps(study: Study, what: str) -> str:
    """What the points of a throughput picture are: `what` of the same steps."""
    frame = measured(study.cell_frame)
    if frame.empty:
        return describe_machine(study)
    steps = frame["num_steps"].astype("int64")
    return describe_ratio(study, f"{what} of the same {_span(steps.min(), steps.max())} steps")


def _span(low: float, high: float) -> str:
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


# ---- what was measured, and where ----


def environment_lines(study: Study) -> tuple[str, ...]:
    """Each machine of the study in one line, then the versions and commits that its runs met."""
    records = [record for cell in study.cells for record in cell.records]
    lines: list[str] = []
    for record in records:
        if record.environment is not None:
            device = record.effective.device_name if record.effective else None
            lines.append(describe_environment(record.environment, device))
            versions = ", ".join(f"{name} {version}" for name, version in record.environment.versions)
            if versions:
                lines.append(versions)
            if record.environment.git_commit:
                dirty = " with uncommitted changes" if record.environment.git_dirty else ""
                lines.append(f"git commit {record.environment.git_commit[:12]}{dirty}")
    lines = list(dict.fromkeys(lines))
    return tuple(line for line in lines if not any(other != line and other.startswith(line) for other in lines))


def program_lines(effective: EffectiveSettings) -> tuple[str, ...]:
    """What became of the user's own settings, a line each: kept, set aside, and what brought others to the loader."""
    lines = [f"your trainer's settings: {list_names(effective.trainer_settings)}"] * bool(effective.trainer_settings)
    lines += [f"set aside for timing: {list_names(effective.set_aside)}"] * bool(effective.set_aside)
    unusual = [(name, f"by {where}") for name, where in effective.placed if where != f"data.{name}"]
    lines += [f"reached the loader: {list_names(unusual)}"] * bool(unusual)
    return tuple(lines)


def describe_environment(environment: Environment, device_name: str | None) -> str:
    """A machine in one line."""
    cores = environment.num_usable_cores or environment.num_cores
    parts = [
        f"host {environment.host}",
        environment.operating_system,
        environment.cpu_model,
        units.format_count(cores, "usable core") if cores else None,
        units.format_bytes(environment.memory_bytes) + " memory" if environment.memory_bytes else None,
        f"device {device_name}" if device_name and device_name != environment.cpu_model else None,
    ]
    return " · ".join(part for part in parts if part)


def describe_common(study: Study) -> str:
    """What all cells share of the settings that a reader asks for first, labelled by what ran."""
    flat = flatten_request(study.cells[0].request)
    records = [record for cell in study.cells for record in cell.records]
    varied = {axis.name for axis in study.axes}
    unusual = [name for name, usual in USUAL_SETTINGS.items() if flat.get(name) not in (None, usual)]
    shared = [name for name in (*COMMON_SETTINGS, *unusual) if name not in varied]
    titles = {name: TITLES.get(name, name.rpartition(".")[2]) for name in shared}
    return ", ".join(f"{titles[name]} {label_setting(name, flat[name], records)}" for name in shared)


def method_lines(study: Study) -> tuple[str, ...]:
    """How the numbers came about."""
    requests = [cell.request for cell in study.cells]
    protocols = dict.fromkeys(request.protocol for request in requests)
    lines = [f"all cells: {describe_common(study)}"]
    lines += [
        f"protocol {protocol.name}: "
        + (
            units.format_count(protocol.epochs, "whole epoch")
            if protocol.epochs
            else f"at least {units.format_count(protocol.timed_batches, 'batch', 'batches')} "
            "(fewer where they are slow) "
            f"and {protocol.timed_s:g} s timed after a warm-up of at least "
            f"{units.format_count(protocol.warmup_batches, 'batch', 'batches')} and {protocol.warmup_s:g} s"
        )
        for protocol in protocols
    ]
    timers = dict.fromkeys(
        (record.effective.timer if record.effective and record.effective.timer else record.request.timer)
        for cell in study.cells
        for record in cell.records
    )
    lines += [f"timer: {timer}" for timer in timers]
    effective = [record.effective for cell in study.cells for record in cell.records if record.effective is not None]
    lines += dict.fromkeys(line for settings in effective for line in program_lines(settings))
    steps = measured(study.cell_frame)["num_steps"]
    if steps.empty:
        return tuple(lines)
    lines.append(f"{_count_span(steps)} timed per cell")
    sampled = measured(study.cell_frame)["num_sampled_steps"].astype("Int64").fillna(steps.astype("Int64"))
    if (sampled < steps).any():
        lines.append(f"{_count_span(sampled)} of them timed by phase, the others as a whole")
    lines += [note for note in [describe_timeline(study)] if note]
    return (*lines, MEDIAN_NOTE, PHASE_NOTE, INTERVAL_NOTE if is_one_round(study) else ROUNDS_NOTE)


def _count_span(counts: pd.Series[int]) -> str:
    low, high = int(counts.min()), int(counts.max())
    return units.format_count(low, "step") if low == high else f"{low:,} to {units.format_count(high, 'step')}"


def describe_timeline(study: Study) -> str | None:
    """On whose timeline phases are, where that is not the host's in every cell."""
    timelines = set(measured(study.cell_frame)["timeline"])
    if DEVICE not in timelines:
        return None
    return f"phases on the device's timeline{'' if len(timelines) == 1 else ' where a device ran behind the host'}"


def is_one_round(study: Study) -> bool:
    """Whether no cell was measured more than once."""
    return all(len(cell.ok_records) <= 1 for cell in study.cells)
