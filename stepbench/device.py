"""What is known of devices: their names, their memory, and what running out of it looks like."""

from __future__ import annotations

import resource
import sys

import torch

OUT_OF_MEMORY_WORDINGS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "MPS backend out of memory",
    "HIP out of memory",
    "can't allocate memory",  # torch's CPU allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that memory ran out: on the host or on a device.

    Only types that allocators raise count: a ValueError that speaks of memory is an error of another kind.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(seen, RuntimeError) and any(wording in str(seen) for wording in OUT_OF_MEMORY_WORDINGS):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def device_name(device: torch.device, cpu_model: str | None) -> str | None:
    """The name of a device as its vendor gives it; the CPU's model for the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_model if device.type == "cpu" else device.type


def peak_host_memory_bytes() -> int:
    """The largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_memory_bytes(device: torch.device) -> int | None:
    """The most memory that torch's allocator had reserved on a device; None on the CPU and where it does not count."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
