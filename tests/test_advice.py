import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from studies import (
    NOISE,
    change,
    leave_out,
    make_rows,
    make_spec,
    merge_backward,
    noisy_example,
    on_device,
    two_ranks,
    write_run,
)

from stepbench.advice import find_cell_findings, find_findings, find_study_findings, suggest_rerun
from stepbench.frames import NOISY, TRUSTED, is_noisy, summary_columns
from stepbench.record import PHASES, BatchTiming, Compilation, RunRecord
from stepbench.study import build_study

SHARES = {"data": 0.05, "transfer": 0.01, "forward": 0.62, "backward": 0.2, "optimizer": 0.1, "other": 0.02}
WAITING = SHARES | {"data": 0.25, "forward": 0.42}


def row(shares: Mapping[str, float | None] = SHARES, mean_step_s: float = 0.01, **changes: Any) -> dict[str, Any]:
    """Summary columns of a cell whose median step takes 10 ms."""
    numbers: dict[str, Any] = {"mean_step_s": mean_step_s, "median_step_s": 0.01, "num_steps": 30, "timeline": "host"}
    numbers |= {"p25_step_s": 0.0099, "p75_step_s": 0.0101}
    numbers |= {"num_skipped_steps": 0, "timer_slowdown_fraction": None}
    numbers |= {"step_low_s": 0.0099, "step_high_s": 0.0101}
    return numbers | {f"{phase}_fraction": shares[phase] for phase in PHASES} | changes


def subjects(*arguments: Any) -> list[str]:
    return [finding.subject for finding in find_cell_findings(*arguments)]


def study_texts(*rows: dict[str, Any]) -> list[str]:
    cells = [own | {"verdict": NOISY if is_noisy(own) else TRUSTED} for own in rows]
    labels = [f"batch {2**i}" for i in range(len(rows))]
    return [finding.text for finding in find_study_findings(pd.DataFrame(cells), labels)]


def test_one_line_answer_names_the_largest_phase() -> None:
    (finding,) = find_cell_findings(row())
    assert finding.text == "most time goes to forward (62 % of the step)"


def test_waiting_for_data_is_named_first_even_if_another_phase_is_larger() -> None:
    first, second = find_cell_findings(row(WAITING))
    assert first.subject == "data"
    assert "25 %" in first.text
    assert second.text.startswith("most time goes to forward (42 %")


def test_twenty_per_cent_is_not_yet_waiting() -> None:
    assert subjects(row(SHARES | {"data": 0.20})) == ["phase"]


def test_mean_far_above_the_median_is_said() -> None:
    stalls = [finding for finding in find_cell_findings(row(mean_step_s=0.0112)) if finding.subject == "stalls"]
    assert "×1.12" in stalls[0].text


def test_study_counts_cells_by_their_largest_phase() -> None:
    assert study_texts(row(), row(SHARES | {"forward": 0.5})) == [
        "most time goes to forward in 2 of 2 cells (50–62 % of the step)"
    ]


def test_study_names_the_cells_that_wait_for_data_first_and_by_their_labels() -> None:
    texts = study_texts(row(), row(WAITING))
    assert texts[0] == "1 of 2 cells waits for data more than 20 % of the step (worst: batch 2: 25 %)"


def test_wide_interval_is_too_noisy_to_compare_and_an_action_follows() -> None:
    assert subjects(row()) == ["phase"]
    assert subjects(row(step_low_s=0.008, step_high_s=0.0115)) == ["phase", "noise", "action"]
    assert study_texts(row(), row(step_low_s=0.005))[-1] == (
        "1 of 2 cells is too noisy to compare (interval wider than ±15 %, or none and spread above 30 %): batch 2"
    )


def test_without_an_interval_the_spread_tells_whether_a_cell_is_noisy() -> None:
    none = {"step_low_s": None, "step_high_s": None}
    assert not is_noisy(row(**none, p25_step_s=0.0086, p75_step_s=0.0114))
    wide = row(**none, p25_step_s=0.0080, p75_step_s=0.0112)
    assert is_noisy(wide)
    noise = find_cell_findings(wide)[1].text
    assert noise == "too noisy to compare: the middle half of the steps spans 32 % of the median"


def test_many_noisy_cells_are_counted_not_all_named() -> None:
    text = study_texts(*[row(step_low_s=0.005)] * 20)[-1]
    assert text.endswith("batch 128; and 12 more")


def test_nothing_is_said_where_nothing_was_measured() -> None:
    assert study_texts(row(median_step_s=None)) == []


# ---- what is out of the ordinary ----


def findings_of(directory: Path, rows: list[BatchTiming], **changes: Any) -> dict[str, str]:
    """The findings about a run by their subjects."""
    record = write_run(directory, changes.pop("spec", make_spec()), rows, **changes)
    return {finding.subject: finding.text for finding in find_cell_findings(summary_columns(record.summary), [record])}


def test_an_ordinary_run_has_one_finding(tmp_path: Path) -> None:
    assert set(findings_of(tmp_path, make_rows(0.01))) == {"phase"}


def test_a_merged_backward_is_explained_with_the_call_that_shows_it(tmp_path: Path) -> None:
    found = findings_of(tmp_path, merge_backward(make_rows(0.01)))
    assert found == {
        "phase": "most time goes to forward and backward (77 % of the step)",
        "backward": "the module runs autograd itself (`loss.backward()`), so backward cannot be told from forward "
        "(77 % together): call `self.manual_backward(loss)` to see it apart",
    }


def test_phases_that_no_step_was_timed_by_are_said_to_be_unknown(tmp_path: Path) -> None:
    assert findings_of(tmp_path, leave_out(make_rows(0.01), 0, 10)) == {
        "phases": "phases are unknown: block sampling timed none of the 30 steps by phase; time more steps"
    }


def test_the_wait_for_data_is_the_device_s_on_its_timeline(tmp_path: Path) -> None:
    found = findings_of(tmp_path, on_device(make_rows(0.01)))
    assert found["data"].startswith("the device waited for data 30 % of the step: ")


def test_steps_that_the_scaler_skipped_are_counted(tmp_path: Path) -> None:
    rows = change(make_rows(0.01), [3, 10, 20], skipped_by_scaler=True, took_optimizer_step=False)
    found = findings_of(tmp_path / "two", rows)
    assert found["scaler"] == "2 of 30 steps were skipped by the gradient scaler: the optimizer did nothing in them"
    one = findings_of(tmp_path / "one", rows[:20])
    assert one["scaler"].startswith("1 of 15 steps was skipped")


def test_compilation_is_told_with_its_cost(tmp_path: Path) -> None:
    compilation = Compilation(num_graphs=3, num_recompilations=1, num_batches=2, compile_s=41.02)
    spec = make_spec(compile="default")
    found = findings_of(tmp_path / "some", make_rows(0.01), spec=spec, compilation=compilation)
    assert found["compilation"] == (
        "torch.compile compiled 3 graphs with 1 recompilation in 2 batches (41.0 s); "
        "steps that compile are left out of the numbers"
    )
    nothing = Compilation(num_graphs=0, num_recompilations=0, num_batches=0, compile_s=None)
    found = findings_of(tmp_path / "none", make_rows(0.01), spec=spec, compilation=nothing)
    assert found["compilation"] == "torch.compile compiled 0 graphs: the model ran as it is"
    assert "compilation" not in findings_of(tmp_path / "off", make_rows(0.01), compilation=nothing)


@pytest.mark.parametrize(
    ("timer", "faster", "text"),
    [
        ("sync", 1.01, "timer=sync slowed the step by 1.0 %: it waits for the device at every phase"),
        ("sync", 0.99, None),
        ("host", 1.01, None),
        ("host", 1.10, "timing by phase slowed the step by 10 %"),
    ],
)
def test_a_timer_that_slows_the_step_says_by_how_much(
    tmp_path: Path, timer: str, faster: float, text: str | None
) -> None:
    rows = leave_out(make_rows(0.01), 5, 10, faster=faster)
    assert findings_of(tmp_path, rows, effective={"timer": timer}).get("timer") == text


def test_ranks_that_wait_more_than_five_per_cent_name_the_slowest(tmp_path: Path) -> None:
    found = findings_of(tmp_path / "apart", two_ranks())
    assert (
        found["ranks"] == "rank 1 is the slowest: in backward the others wait up to 20.0 ms (61 % of the step) for it"
    )
    waits = [None if row.rank_wait_s is None else row.rank_wait_s / 20 for row in two_ranks()]
    close = [dataclasses.replace(row, rank_wait_s=wait) for row, wait in zip(two_ranks(), waits, strict=True)]
    assert "ranks" not in findings_of(tmp_path / "close", close)


def test_a_study_tells_once_what_several_cells_have_and_of_which(tmp_path: Path) -> None:
    for i in range(3):
        run = make_rows(0.01) if i == 0 else merge_backward(make_rows(0.01))
        write_run(tmp_path / "several" / str(i), make_spec(16 * 2**i), run)
    found = find_findings(build_study([tmp_path / "several"], tmp_path))
    assert [finding.subject for finding in found] == ["phase", "phase", "backward"]
    assert found[0].text == "most time goes to forward and backward in 2 of 3 cells (77 % of the step)"
    assert found[2].text.startswith("batch 32: the module runs autograd itself")
    assert found[2].text.endswith("; likewise in 1 other cell")
    write_run(tmp_path / "one", make_spec(), merge_backward(make_rows(0.01)))
    (_, alone) = find_findings(build_study([tmp_path / "one"], tmp_path))
    assert alone.text.startswith("the module runs autograd itself") and "likewise" not in alone.text


# ---- what to do about noise ----


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    return write_run(tmp_path, make_spec(), make_rows(0.01, noise=NOISE), load_average=2.26)


def test_the_action_names_the_load_only_where_the_machine_was_busy(record: RunRecord) -> None:
    assert suggest_rerun([record]) == (
        "The machine was busy (load 2.3 on 2 cores): run again when it is idle, longer (protocol.timed_s=10) "
        "or on fewer threads (device.num_threads=1)"
    )
    assert record.environment is not None
    idle = dataclasses.replace(record, environment=dataclasses.replace(record.environment, load_average_end=1.2))
    assert suggest_rerun([idle]).startswith("Run again when the machine is idle, longer (protocol.timed_s=10) or on")


def test_the_action_asks_for_nothing_that_was_so_already(record: RunRecord) -> None:
    assert record.effective is not None
    protocol = dataclasses.replace(record.request.protocol, timed_s=20.0)
    one_thread = dataclasses.replace(
        record,
        effective=dataclasses.replace(record.effective, num_threads=1),
        request=dataclasses.replace(record.request, protocol=protocol),
    )
    assert suggest_rerun([one_thread]).endswith("run again when it is idle or longer (protocol.timed_s=60)")
    epochs = dataclasses.replace(record.request, protocol=dataclasses.replace(protocol, epochs=2))
    assert "protocol.epochs=6" in suggest_rerun([dataclasses.replace(record, request=epochs)])


def test_a_study_says_once_what_to_do_about_its_noise(tmp_path: Path) -> None:
    findings = find_findings(build_study([noisy_example(tmp_path, (32, 64))], tmp_path))
    assert [finding.subject for finding in findings] == ["phase", "noise", "action"]
    assert findings[1].text.endswith(": precision 32, batch 32; precision 32, batch 64")
    assert "load 2.3 on 2 cores" in findings[2].text
