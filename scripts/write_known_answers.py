"""Runs every loop with a known answer and writes the table at the end of docs/timing.md.

python scripts/write_known_answers.py
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from known_answers import KNOWN_ANSWERS, KnownAnswer  # noqa: E402
from naive_timer import naive_errors_ms  # noqa: E402
from truth_lab import mean_milliseconds, phase_milliseconds  # noqa: E402

DOCUMENT = ROOT / "docs" / "timing.md"
MARKER = "<!-- known answers -->\n"


def numbers(values: Sequence[float | None]) -> str:
    *phases, batch = ("?" if value is None else f"{value:.3f}".rstrip("0").rstrip(".") for value in values)
    return f"{' / '.join(phases)} = {batch}"


def table_row(case: KnownAnswer) -> str:
    lab = case.build()
    rows = lab.run()
    errors_ms = {phase: error for phase, error in naive_errors_ms(case).items() if phase != "other"}
    phase, error_ms = max(errors_ms.items(), key=lambda item: abs(item[1]))
    share = abs(error_ms) / case.expected_ms[-1]
    measured = phase_milliseconds(rows)
    validation = mean_milliseconds(rows, "validation")
    apart = f", validation {validation:g} apart" if validation else ""
    return (
        f"| {case.name} | {numbers(case.expected_ms)} | {numbers(measured)}{apart} | "
        f"{phase} {error_ms:+.1f} ms ({share:.0%} of the batch) |"
    )


def render_table() -> str:
    head = ["| loop | expected | measured | hook to hook |", "|---|---|---|---|"]
    return "\n".join([*head, *(table_row(case) for case in KNOWN_ANSWERS)]) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    text, _, _ = DOCUMENT.read_text().partition(MARKER)
    DOCUMENT.write_text(text + MARKER + "\n" + render_table())


if __name__ == "__main__":
    main()
