from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities import throughput

from stepbench.peak_flops import BOARDS, find_peak

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("device_name", "precision", "matmul_precision", "tera_flop_per_s"),
    [
        ("NVIDIA H200", "bf16-mixed", "highest", 989.4),
        ("NVIDIA H200", "32-true", "highest", 66.9),
        ("NVIDIA H200", "32-true", "high", 494.7),
        ("NVIDIA H200", "32-true", "medium", 494.7),
        ("NVIDIA H200", "bf16-true", "high", 989.4),
        ("NVIDIA H200", "transformer-engine", "highest", 1978.9),
        (H100, "16-mixed", None, 989.4),
        ("NVIDIA A100-SXM4-80GB", "16-true", "highest", 312.0),
        ("NVIDIA A100-SXM4-40GB", "64-true", "highest", 19.5),
        ("Tesla T4", "32-true", "high", 8.1),  # it has no TF32: float32 stays float32
        ("Tesla V100-SXM2-16GB", "16-mixed", "highest", 125.0),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed", "highest", 165.2),
    ],
)
def test_the_peak_is_that_of_the_arithmetic(
    device_name: str, precision: str, matmul_precision: str | None, tera_flop_per_s: float
) -> None:
    peak = find_peak(device_name, precision, matmul_precision)
    assert peak is not None
    assert peak.flop_per_s == pytest.approx(tera_flop_per_s * 1e12)
    assert "NVIDIA" in peak.source


@pytest.mark.parametrize(
    ("device_name", "precision"),
    [
        (None, "32-true"),
        ("NVIDIA H100", "32-true"),  # which of them?
        ("nvidia h200", "32-true"),
        ("NVIDIA H200 ", "32-true"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "32-true"),
        ("AMD EPYC 7763 64-Core Processor", "32-true"),
        ("Tesla T4", "bf16-mixed"),
        ("NVIDIA A100-SXM4-80GB", "transformer-engine"),
        ("NVIDIA L4", "64-true"),
        ("NVIDIA H200", "int8"),
        ("NVIDIA H200", None),
    ],
)
def test_what_the_table_does_not_have_is_not_guessed(device_name: str | None, precision: str | None) -> None:
    assert find_peak(device_name, precision, "highest") is None


def test_every_figure_is_of_a_plausible_size_and_order() -> None:
    order = ("fp64", "fp32", "tf32", "fp16", "fp8")
    for name, board in BOARDS.items():
        peaks = board.tera_flop_per_s
        assert board.source
        assert all(1 < peak < 10_000 for peak in peaks.values()), name
        known = [peaks[arithmetic] for arithmetic in order if arithmetic in peaks]
        assert known == sorted(known), name
        assert peaks.get("bf16") in (None, peaks["fp16"]), name


DENSE_BY_LIGHTNING = {  # the entries of Lightning's own table that are of dense tensor-core figures
    H100: "h100 sxm",
    "NVIDIA H100 PCIe": "h100 pcie",
    "NVIDIA L4": "l4",
    "NVIDIA L40": "l40",
    "NVIDIA A100-SXM4-80GB": "a100",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100 sxm",
    "Tesla V100-PCIE-16GB": "v100 pcie",
    "Tesla V100S-PCIE-32GB": "v100s pcie",
}
HALF_OF_LIGHTNING = {"NVIDIA H200": "h200 sxm1", "NVIDIA H200 NVL": "h200 nvl1"}  # it states those with sparsity


@pytest.mark.parametrize("device_name", [*DENSE_BY_LIGHTNING, *HALF_OF_LIGHTNING])
def test_lightning_s_own_table_says_the_same(device_name: str) -> None:
    factor = 0.5 if device_name in HALF_OF_LIGHTNING else 1.0
    theirs = throughput._CUDA_FLOPS[(DENSE_BY_LIGHTNING | HALF_OF_LIGHTNING)[device_name]]
    ours = BOARDS[device_name].tera_flop_per_s
    dtypes = {"fp32": torch.float32, "tf32": "tfloat32", "fp16": torch.float16, "bf16": torch.bfloat16}
    for arithmetic, dtype in dtypes.items():
        if arithmetic in ours:
            expected = theirs[dtype] * (1.0 if arithmetic == "fp32" else factor)  # type: ignore[index]
            assert ours[arithmetic] * 1e12 == pytest.approx(expected, rel=0.025)
