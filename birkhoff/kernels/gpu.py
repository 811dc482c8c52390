"""Whether Triton kernels can run here, and the few facts about a device that choices depend on.

Triton is optional and is imported by `triton.py` and `many.py` files alone, which nobody imports before `available`
said yes: with a CUDA device, or under Triton's interpreter (`TRITON_INTERPRET=1`), which runs the same kernels on a
CPU, slowly.
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


def power_of_two(count: int, least: int = 1) -> int:
    """The next power of two: what a tile of at least `count` elements measures."""
    return max(least, 1 << max(count - 1, 0).bit_length())
