from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
from studies import make_rows, make_spec, write_run

from stepbench.flop_rates import describe_flop, flop_columns, flop_rate
from stepbench.record import FlopCount, RunRecord


def record_with(flop: FlopCount | None) -> RunRecord:
    with tempfile.TemporaryDirectory() as directory:
        record = write_run(Path(directory), make_spec(), make_rows(0.01))
    return dataclasses.replace(record, flop=flop)


def test_the_rate_is_a_ratio_of_sums_and_the_utilization_its_share_of_the_peak() -> None:
    record = record_with(FlopCount(flop_per_step=2_000_000, peak_flop_per_s=1e9, peak_source="a datasheet"))
    rate = flop_rate(record)
    assert rate is not None
    assert rate.flop_per_s == pytest.approx(2e8)
    assert rate.utilization == pytest.approx(0.2)
    assert flop_columns([record, record])["mfu_fraction"] == pytest.approx(0.2)
    assert describe_flop(record) == "2.00 MFLOP per step, 200 MFLOP/s, 20 % of the peak of 1.00 GFLOP/s (a datasheet)"


def test_unknown_operators_make_it_a_lower_bound_and_are_named() -> None:
    names = ("aten.fft_r2c", "aten.mkldnn_rnn_layer", "mine.thing", "mine.other")
    flop = FlopCount(flop_per_step=1000, unknown_operators=names, peak_flop_per_s=1e9, peak_source="me")
    text = describe_flop(record_with(flop))
    assert text is not None
    assert ", at least <0.1 % of the peak" in text
    assert text.endswith("; not counted: aten.fft_r2c, aten.mkldnn_rnn_layer, mine.thing and 1 more")


def test_without_a_peak_there_is_no_utilization_and_without_a_count_a_reason() -> None:
    assert flop_columns([record_with(FlopCount(flop_per_step=1000))])["mfu_fraction"] is None
    assert describe_flop(record_with(None)) is None
    assert describe_flop(record_with(FlopCount(flop_per_step=None, problem="it broke"))) == "FLOP not counted: it broke"
    assert flop_columns([]) == dict.fromkeys(("flop_per_step", "flop_per_s", "mfu_fraction", "mfu_is_lower_bound"))
