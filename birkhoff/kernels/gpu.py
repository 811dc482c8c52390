"""Whether Triton kernels can run in this process.

Triton is optional. The files that import it (`decode.py`, `prefill.py`, `training.py`, `fp8.py`, `device.py`,
`routing.py`, `unpack.py`, `block_types.py`, `hopper.py`) must not be imported unless `available()`: with a CUDA device,
or under Triton's interpreter (`TRITON_INTERPRET=1`), which runs the same kernels slowly on a CPU.
"""

from __future__ import annotations

import importlib.util
import os

import torch


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def available() -> bool:
    """Whether the Triton twins can be imported and run in this process."""
    return importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or interpreted())


HOPPER_SHARED = (
    232_448  # bytes of shared memory that one thread block may have on compute capability 9.0 and 10.0
)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of a thread block: tiles of kernels are smaller where there is less than on Hopper."""
    if is_hopper(device):
        return HOPPER_SHARED
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def is_hopper(device: torch.device) -> bool:
    """Whether large tiles are those of an H200; also where kernels are interpreted."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


def prompt_fallback(device: torch.device) -> str | None:
    """What runs in place of the kernels for prompts that only Hopper has; None where they run."""
    if is_hopper(device):
        return None
    return "prompts run on portable Triton kernels: faster ones for attention and experts need compute capability 9.0"


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`: the size of a tile."""
    return max(least, 1 << max(count - 1, 0).bit_length())
