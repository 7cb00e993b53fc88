import pandas as pd

from stepbench.advice import find_cell_findings, find_study_findings
from stepbench.record import PHASES

SHARES = {"data": 0.05, "transfer": 0.01, "forward": 0.62, "backward": 0.2, "optimizer": 0.1, "other": 0.02}
WAITING = SHARES | {"data": 0.25, "forward": 0.42}


def frame(*shares: dict[str, float], low_s: float = 0.0099) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"cell": str(i), "median_step_s": 0.01, "step_low_s": low_s, "step_high_s": 0.0101}
            | {f"{phase}_fraction": row[phase] for phase in PHASES}
            for i, row in enumerate(shares)
        ]
    )


def test_one_line_answer_names_the_largest_phase() -> None:
    (finding,) = find_cell_findings(SHARES, 0.01, 0.01)
    assert finding.text == "most time goes to forward (62 % of the step)"


def test_waiting_for_data_is_named_first_even_if_another_phase_is_larger() -> None:
    first, second = find_cell_findings(WAITING, 0.01, 0.01)
    assert first.subject == "data"
    assert "25 %" in first.text
    assert second.text.startswith("most time goes to forward (42 %")


def test_twenty_per_cent_is_not_yet_waiting() -> None:
    assert [finding.subject for finding in find_cell_findings(SHARES | {"data": 0.20}, 0.01, 0.01)] == ["phase"]


def test_mean_far_above_the_median_is_said() -> None:
    stalls = [finding for finding in find_cell_findings(SHARES, 0.0112, 0.010) if finding.subject == "stalls"]
    assert "×1.12" in stalls[0].text


def test_study_counts_cells_by_their_largest_phase() -> None:
    texts = [finding.text for finding in find_study_findings(frame(SHARES, SHARES | {"forward": 0.5}))]
    assert texts == ["most time goes to forward in 2 of 2 cells (50–62 % of the step)"]


def test_study_names_the_cells_that_wait_for_data_first() -> None:
    texts = [finding.text for finding in find_study_findings(frame(SHARES, WAITING))]
    assert texts[0] == "1 of 2 cells waits for data more than 20 % of the step (worst: cell 1, 25 %)"


def test_wide_interval_is_called_too_noisy_to_compare() -> None:
    assert find_cell_findings(SHARES, 0.01, 0.01, 0.0099, 0.0101)[-1].subject == "phase"
    assert find_cell_findings(SHARES, 0.01, 0.01, 0.008, 0.0115)[-1].subject == "noise"
    texts = [finding.text for finding in find_study_findings(frame(SHARES, low_s=0.005))]
    assert texts[-1] == "1 of 1 cell is too noisy to compare (interval wider than ±15 %): 0"


def test_nothing_is_said_where_nothing_was_measured() -> None:
    assert find_study_findings(frame(SHARES).assign(median_step_s=None)) == ()
