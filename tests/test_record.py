from __future__ import annotations

import csv
import dataclasses
import json
import os
from pathlib import Path

import pytest

from stepbench.record import (
    BatchTiming,
    CliProgram,
    Component,
    EffectiveSettings,
    Protocol,
    RecordError,
    RunRecord,
    RunRequest,
    RunSpec,
    Status,
    append_rows,
    find_cells,
    read_record,
    read_request,
    spec_hash,
    write_record,
    write_request,
)
from stepbench.statistics import summarize_run

SPEC = RunSpec(
    model=Component(target="a.Net", arguments_json='{"width":3}'),
    data=Component(target="a.Data"),
    batch_size=8,
    precision="32",
    accelerator="cpu",
)
REQUEST = RunRequest(
    spec=SPEC,
    protocol=Protocol(name="quick", warmup_batches=5, warmup_s=0.3, timed_batches=30, timed_s=1.0),
    timer="auto",
    choices=(("model", "net"),),
)
ROW = BatchTiming(
    epoch=0,
    batch=3,
    step=1,
    num_samples=None,
    warmup=True,
    data_s=0.000000001,
    transfer_s=0.0,
    forward_s=0.25,
    backward_s=0.5,
    optimizer_s=0.0,
    other_s=0.0,
    batch_s=0.750000001,
)


def record(**changes: object) -> RunRecord:
    values: dict[str, object] = {
        "request": REQUEST,
        "spec_hash": spec_hash(SPEC),
        "status": Status.OK,
        "started_unix_s": 1.5,
        "wall_s": 2,
        "effective": EffectiveSettings(precision="32-true"),
        "summary": summarize_run([dataclasses.replace(ROW, warmup=False)]),
    }
    return RunRecord(**{**values, **changes})  # type: ignore[arg-type]


def test_a_record_survives_the_disk(tmp_path: Path) -> None:
    written = record()
    path = write_record(tmp_path, written)
    assert path == tmp_path / "records" / "0.0.json"
    assert read_record(path) == written
    assert read_record(path).status is Status.OK
    assert [p.name for p in path.parent.iterdir()] == ["0.0.json"]


def test_a_request_survives_the_disk(tmp_path: Path) -> None:
    assert read_request(write_request(tmp_path, REQUEST)) == REQUEST


@pytest.mark.parametrize(
    ("text", "wording"),
    [
        ("", "cannot be read as JSON"),
        ('{"request": ', "cannot be read as JSON"),
        ("[1, 2]", "is not a stepbench RunRecord"),
        ('{"a": 1}', "is not a stepbench RunRecord"),
        ('{"schema_version": 99}', "has schema_version 99"),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path: Path, text: str, wording: str) -> None:
    path = tmp_path / "0.0.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=wording) as caught:
        read_record(path)
    assert str(path) in str(caught.value)


def test_a_wrong_type_inside_is_refused(tmp_path: Path) -> None:
    path = write_record(tmp_path, record())
    data = json.loads(path.read_text())
    for key, value in [("status", "great"), ("wall_s", "2"), ("spec_hash", None), ("effective", [])]:
        path.write_text(json.dumps({**data, key: value}))
        with pytest.raises(RecordError, match="is not a stepbench RunRecord"):
            read_record(path)


def test_numbers_that_no_run_has_are_refused(tmp_path: Path) -> None:
    path = write_record(tmp_path, record())
    good = path.read_text()
    for old, new, wording in [
        ('"phase": "forward"', '"phase": "sideways"', "phases"),
        ('"median_s": 0.750000001', '"median_s": NaN', "median step takes nan s"),
        ('"median_s": 0.750000001', '"median_s": 0.0', "median step takes 0.0 s"),
        ('"median_s": 0.750000001', '"median_s": -1.0', "median step takes -1.0 s"),
        ('{\\"width\\":3}', "[1]", "the arguments of a.Net are no mapping"),
        ('{\\"width\\":3}', "{", "the arguments of a.Net are no JSON"),
    ]:
        assert old in good
        path.write_text(good.replace(old, new))
        with pytest.raises(RecordError, match=wording):
            read_record(path)


def test_keys_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    path = write_record(tmp_path, record())
    path.write_text(json.dumps({**json.loads(path.read_text()), "mood": "good"}))
    assert read_record(path) == record()


def test_equal_specs_share_a_hash_and_only_they_do() -> None:
    assert spec_hash(dataclasses.replace(SPEC)) == spec_hash(SPEC)
    for field in dataclasses.fields(RunSpec):
        other = CliProgram(files=("/a.yaml",), sha256=("1",)) if field.name == "cli" else "other"
        changed = dataclasses.replace(SPEC, **{field.name: other})  # type: ignore[arg-type]
        assert spec_hash(changed) != spec_hash(SPEC), field.name
    assert len({SPEC, dataclasses.replace(SPEC)}) == 1  # may be the key of a dictionary


def test_of_files_only_what_they_hold_is_the_workload() -> None:
    one = CliProgram(files=("/a.yaml",), sha256=("1",))
    moved, changed = dataclasses.replace(one, files=("/b.yaml",)), dataclasses.replace(one, sha256=("2",))
    hashes = [spec_hash(dataclasses.replace(SPEC, cli=cli)) for cli in (one, moved, changed)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_rows_keep_every_nanosecond_and_their_columns(tmp_path: Path) -> None:
    path = append_rows(tmp_path, [ROW, ROW], 0, 0)
    append_rows(tmp_path, [dataclasses.replace(ROW, num_samples=4)], 1, 2)
    lines = list(csv.DictReader(path.open()))
    assert ",".join(lines[0]).startswith(
        "round,attempt,epoch,batch,step,num_samples,warmup,"
        "data_s,transfer_s,forward_s,backward_s,optimizer_s,other_s,batch_s,validation_s"
    )
    assert len(lines) == 3
    assert (lines[0]["num_samples"], lines[0]["warmup"], lines[0]["data_s"]) == ("", "true", "0.000000001")
    assert float(lines[0]["data_s"]) + 0.75 == float(lines[0]["batch_s"])
    assert (lines[2]["round"], lines[2]["attempt"], lines[2]["num_samples"]) == ("1", "2", "4")


def test_writing_where_nothing_may_be_written_leaves_the_old_record(tmp_path: Path) -> None:
    path = write_record(tmp_path, record())
    if os.geteuid() == 0:
        pytest.skip("the superuser may write anywhere")
    path.parent.chmod(0o500)
    try:
        with pytest.raises(OSError, match="Permission denied"):
            write_record(tmp_path, record(status=Status.ERROR))
        assert read_record(path).status is Status.OK
    finally:
        path.parent.chmod(0o700)


def test_cells_are_found_in_numeric_order(tmp_path: Path) -> None:
    for name in ("10", "2", "1"):
        write_record(tmp_path / name, record())
    assert [cell.name for cell in find_cells(tmp_path)] == ["1", "2", "10"]
    assert find_cells(tmp_path / "2") == [tmp_path / "2"]
