from __future__ import annotations

import numpy as np
import pytest
import torch

from stepbench.device import device_name, is_out_of_memory, peak_device_memory_bytes, peak_host_memory_bytes


def raised_from(outer: Exception, inner: Exception) -> Exception:
    try:
        try:
            raise inner
        except Exception as error:
            raise outer from error
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (raised_from(ValueError("while building"), MemoryError()), True),
        (ValueError("CUDA out of memory"), False),
        (RuntimeError("the memory of the network is out of range"), False),
        (KeyError("can't allocate memory"), False),
    ],
)
def test_running_out_of_memory_is_told_from_speaking_of_it(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_real_allocators_are_recognized() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(of_torch.value)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**60, dtype=np.uint8)
    assert is_out_of_memory(of_numpy.value)


def test_the_cpu_has_its_model_s_name_and_no_device_memory() -> None:
    cpu = torch.device("cpu")
    assert device_name(cpu, "Model X") == "Model X"
    assert device_name(cpu, None) is None
    assert peak_device_memory_bytes(cpu) is None


def test_peak_memory_grows_with_what_is_touched() -> None:
    before = peak_host_memory_bytes()
    block = np.ones(before // 8 + 2**24, dtype=np.float64)
    assert peak_host_memory_bytes() >= before + 2**24
    del block
