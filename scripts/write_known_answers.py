"""Runs every loop with a known answer and writes the tables at the end of docs/timing.md.

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

from device_lab import DEVICE_ANSWERS, DeviceAnswer, milliseconds  # noqa: E402
from known_answers import KNOWN_ANSWERS, KnownAnswer  # noqa: E402
from naive_timer import naive_errors_ms  # noqa: E402
from truth_lab import mean_milliseconds, phase_milliseconds  # noqa: E402

from stepbench.record import BatchTiming  # noqa: E402

DOCUMENT = ROOT / "docs" / "timing.md"
MARKER = "<!-- known answers -->\n"
DEVICE_TEXT = """
The same for a device that works behind the host, scripted too. For a batch it works 1 ms for the transfer, 8 for the
forward, 16 for the backward and 3 for the optimizer, or 0.02 each where its kernels are tiny; the host takes 2.2 ms
to ask for the batch and hand all of it over, 40 where the data is the bottleneck. *Expected* and *measured* are on the
device's timeline, *by the host's clock* is what a timer would say that knows no device.
"""


def numbers(values: Sequence[float | None]) -> str:
    *phases, batch = ("?" if value is None else f"{value:.3f}".rstrip("0").rstrip(".") for value in values)
    return f"{' / '.join(phases)} = {batch}"


def table_row(case: KnownAnswer) -> str:
    _, rows = case.run()
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


def device_row(case: DeviceAnswer) -> str:
    def mean(rows: Sequence[BatchTiming], prefix: str) -> str:
        columns = zip(*(milliseconds(row, prefix) for row in rows), strict=True)
        return numbers([sum(column) / len(rows) for column in columns])

    measured, by_host = mean(case.run("events"), "device_"), mean(case.run("host"), "")
    return f"| {case.name} | {numbers(case.expected_ms)} | {measured} | {by_host} |"


def render_tables() -> str:
    head = ["| loop | expected | measured | hook to hook |", "|---|---|---|---|"]
    device_head = ["| loop | expected | measured | by the host's clock |", "|---|---|---|---|"]
    loops = [*head, *(table_row(case) for case in KNOWN_ANSWERS)]
    device_loops = [*device_head, *(device_row(case) for case in DEVICE_ANSWERS)]
    return "\n".join([*loops, DEVICE_TEXT, *device_loops]) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    text, _, _ = DOCUMENT.read_text().partition(MARKER)
    DOCUMENT.write_text(text + MARKER + "\n" + render_tables())


if __name__ == "__main__":
    main()
