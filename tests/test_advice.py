import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from studies import NOISE, make_rows, make_spec, noisy_example, write_run

from stepbench.advice import find_cell_findings, find_findings, find_study_findings, suggest_rerun
from stepbench.frames import NOISY, TRUSTED, is_noisy
from stepbench.record import PHASES, RunRecord
from stepbench.study import build_study

SHARES = {"data": 0.05, "transfer": 0.01, "forward": 0.62, "backward": 0.2, "optimizer": 0.1, "other": 0.02}
WAITING = SHARES | {"data": 0.25, "forward": 0.42}


def row(shares: dict[str, float] = SHARES, mean_step_s: float = 0.01, **changes: float | None) -> dict[str, Any]:
    """Summary columns of a cell whose median step takes 10 ms."""
    numbers = {"mean_step_s": mean_step_s, "median_step_s": 0.01, "p25_step_s": 0.0099, "p75_step_s": 0.0101}
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
