"""Names of torch dtypes as they appear in files, messages and JSON: `bfloat16`, not `torch.bfloat16`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without the `torch.` prefix."""
    return str(dtype).removeprefix("torch.")
