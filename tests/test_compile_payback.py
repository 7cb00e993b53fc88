from __future__ import annotations

from pathlib import Path

import pytest
from studies import make_rows, make_spec, write_run

from stepbench.answers import answer_study
from stepbench.record import Compilation, Status
from stepbench.study import build_study

COMPILED = Compilation(num_graphs=1, num_recompilations=0, num_batches=1, compile_s=12.0)


def answer(directory: Path) -> tuple[str, ...]:
    study = build_study([directory], directory)
    return next((a.lines for a in answer_study(study) if a.question == "Does compiling pay"), ())


@pytest.mark.parametrize(
    ("compiled_step_s", "wording"),
    [
        (
            0.008,
            "took 12.0 s and saves 2.00 ms per step: it pays for itself after 6,000 steps",
        ),
        (0.011, "took 12.0 s, and the step is no faster for it: it never pays for itself"),
    ],
)
def test_compiling_pays_after_as_many_steps_as_save_its_time(
    tmp_path: Path, compiled_step_s: float, wording: str
) -> None:
    write_run(tmp_path / "0", make_spec(), make_rows(0.010))
    write_run(tmp_path / "1", make_spec(compile="default"), make_rows(compiled_step_s), compilation=COMPILED)
    assert answer(tmp_path) == (f"compile default: compiling {wording}",)


def test_without_a_measured_twin_nothing_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "0", make_spec(), status=Status.ERROR, reason="it broke")
    write_run(tmp_path / "1", make_spec(compile="default"), make_rows(0.008), compilation=COMPILED)
    write_run(tmp_path / "2", make_spec(batch_size=32), make_rows(0.010))
    assert answer(tmp_path) == ()
