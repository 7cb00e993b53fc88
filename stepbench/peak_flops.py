"""What devices can do at most, in FLOP/s, as their vendors state it. Standard library only.

The figures are for dense arithmetic: where a datasheet states them with sparsity, half of that is taken. With 16 bits
they are those that accumulate in 32, as torch does. Devices are known by torch's exact name of them and by nothing
else: a name that merely resembles one may be another board, with other clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TERA = 1e12

ARITHMETIC = {
    "64-true": "fp64",
    "32-true": "fp32",
    "16-true": "fp16",
    "16-mixed": "fp16",
    "bf16-true": "bf16",
    "bf16-mixed": "bf16",
    "transformer-engine": "fp8",
    "transformer-engine-float16": "fp8",
}
"""The arithmetic that a step's matrix products are done in, by Lightning's name of the precision."""


@dataclass(frozen=True, slots=True)
class Peak:
    """A device's peak in one arithmetic, and where its vendor says so."""

    flop_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class _Board:
    """The peaks of one board in TFLOP/s by arithmetic; that of fp64 is its tensor cores' where they have it."""

    source: str
    tera_flop_per_s: Mapping[str, float]


_V100 = "NVIDIA V100 Tensor Core GPU datasheet"
_T4 = "NVIDIA T4 Tensor Core GPU datasheet"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture whitepaper"
_H100_SHEET = "NVIDIA H100 Tensor Core GPU datasheet"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper"
_ADA = "NVIDIA Ada GPU Architecture whitepaper"
_TURING = "NVIDIA Turing GPU Architecture whitepaper"
_BLACKWELL_RTX = "NVIDIA RTX Blackwell GPU Architecture whitepaper"

_A100_PEAKS = {"fp64": 19.5, "fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}
_H100_SXM_PEAKS = {"fp64": 66.9, "fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_HOPPER_NVL_PEAKS = {"fp64": 60.0, "fp32": 60.0, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5, "fp8": 1670.5}
_V100_SXM_PEAKS = {"fp64": 7.8, "fp32": 15.7, "fp16": 125.0}
_V100_PCIE_PEAKS = {"fp64": 7.0, "fp32": 14.0, "fp16": 112.0}
_TU102_PEAKS = {"fp32": 16.3, "fp16": 130.5}

BOARDS = {
    # Blackwell
    "NVIDIA B200": _Board("NVIDIA Blackwell datasheet", {"fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0}),
    "NVIDIA GeForce RTX 5090": _Board(
        _BLACKWELL_RTX, {"fp32": 104.8, "tf32": 104.8, "fp16": 209.5, "bf16": 209.5, "fp8": 419.0}
    ),
    # Hopper. The whitepaper has the dense figures of the chip that H200 and GH200 are built on as well; their own
    # datasheets state the same ones, rounded and with sparsity.
    "NVIDIA H200": _Board(_H200, _H100_SXM_PEAKS),
    "NVIDIA H200 NVL": _Board(_H200, _HOPPER_NVL_PEAKS),
    "NVIDIA GH200 480GB": _Board("NVIDIA GH200 Grace Hopper Superchip datasheet", _H100_SXM_PEAKS),
    "NVIDIA H100 80GB HBM3": _Board(_H100, _H100_SXM_PEAKS),
    "NVIDIA H100 PCIe": _Board(
        _H100, {"fp64": 51.2, "fp32": 51.2, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0, "fp8": 1513.0}
    ),
    "NVIDIA H100 NVL": _Board(_H100_SHEET, _HOPPER_NVL_PEAKS),
    # Ada Lovelace
    "NVIDIA L40S": _Board(
        "NVIDIA L40S datasheet", {"fp32": 91.6, "tf32": 183.0, "fp16": 362.05, "bf16": 362.05, "fp8": 733.0}
    ),
    "NVIDIA L40": _Board(
        "NVIDIA L40 datasheet", {"fp32": 90.5, "tf32": 90.5, "fp16": 181.05, "bf16": 181.05, "fp8": 362.0}
    ),
    "NVIDIA L4": _Board(
        "NVIDIA L4 Tensor Core GPU datasheet",
        {"fp32": 30.3, "tf32": 60.0, "fp16": 121.0, "bf16": 121.0, "fp8": 242.5},
    ),
    "NVIDIA RTX 6000 Ada Generation": _Board(
        _ADA, {"fp32": 91.1, "tf32": 182.1, "fp16": 364.2, "bf16": 364.2, "fp8": 728.5}
    ),
    "NVIDIA GeForce RTX 4090": _Board(_ADA, {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3}),
    # Ampere
    "NVIDIA A100-SXM4-80GB": _Board(_A100, _A100_PEAKS),
    "NVIDIA A100-SXM4-40GB": _Board(_A100, _A100_PEAKS),
    "NVIDIA A100 80GB PCIe": _Board(_A100, _A100_PEAKS),
    "NVIDIA A100-PCIE-40GB": _Board(_A100, _A100_PEAKS),
    "A100-SXM4-80GB": _Board(_A100, _A100_PEAKS),  # without the vendor: as drivers before 470 call it
    "A100-SXM4-40GB": _Board(_A100, _A100_PEAKS),
    "A100-PCIE-40GB": _Board(_A100, _A100_PEAKS),
    "NVIDIA A30": _Board(
        "NVIDIA A30 Tensor Core GPU datasheet",
        {"fp64": 10.3, "fp32": 10.3, "tf32": 82.0, "fp16": 165.0, "bf16": 165.0},
    ),
    "NVIDIA A10": _Board(
        "NVIDIA A10 Tensor Core GPU datasheet", {"fp32": 31.2, "tf32": 62.5, "fp16": 125.0, "bf16": 125.0}
    ),
    "NVIDIA A40": _Board("NVIDIA A40 datasheet", {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7}),
    "NVIDIA RTX A6000": _Board(_GA102, {"fp32": 38.7, "tf32": 77.4, "fp16": 154.8, "bf16": 154.8}),
    "NVIDIA GeForce RTX 3090": _Board(_GA102, {"fp32": 35.6, "tf32": 35.6, "fp16": 71.0, "bf16": 71.0}),
    # Turing and Volta, whose tensor cores have neither TF32 nor bfloat16
    "Tesla T4": _Board(_T4, {"fp32": 8.1, "fp16": 65.0}),
    "Quadro RTX 6000": _Board(_TURING, _TU102_PEAKS),
    "Quadro RTX 8000": _Board(_TURING, _TU102_PEAKS),
    "Tesla V100-SXM2-16GB": _Board(_V100, _V100_SXM_PEAKS),
    "Tesla V100-SXM2-32GB": _Board(_V100, _V100_SXM_PEAKS),
    "Tesla V100-PCIE-16GB": _Board(_V100, _V100_PCIE_PEAKS),
    "Tesla V100-PCIE-32GB": _Board(_V100, _V100_PCIE_PEAKS),
    "Tesla V100S-PCIE-32GB": _Board(_V100, {"fp64": 8.2, "fp32": 16.4, "fp16": 130.0}),
}
"""By the exact name that `torch.cuda.get_device_name()` gives.

Left out are names that boards of different speed share ("NVIDIA GeForce RTX 3080", "NVIDIA GeForce RTX 2080 Ti").
"""


def find_peak(device_name: str | None, precision: str | None, matmul_precision: str | None) -> Peak | None:
    """A device's peak for a precision in Lightning's spelling; None where the table does not have it.

    `matmul_precision` is torch's `float32_matmul_precision`: with `high` and `medium` products of float32 are done in
    TF32 where the device has it. Convolutions of float32 are not asked: cuDNN does them in TF32 unless
    `torch.backends.cudnn.allow_tf32` is off, so those can exceed the peak of `highest`.
    """
    board = BOARDS.get(device_name or "")
    arithmetic = ARITHMETIC.get(precision or "")
    if board is None or arithmetic is None:
        return None
    if arithmetic == "fp32" and matmul_precision in ("high", "medium") and "tf32" in board.tera_flop_per_s:
        arithmetic = "tf32"
    peak = board.tera_flop_per_s.get(arithmetic)
    return None if peak is None else Peak(peak * TERA, board.source)
