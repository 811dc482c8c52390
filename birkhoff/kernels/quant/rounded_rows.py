"""Rows with their FP8 codes, for several products of one input that is rounded as released numerics do."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Order = Literal["natural", "halves", "fragments"]  # of the columns within a group of 128: `device.ORDERS`


class RoundedRows(NamedTuple):
    """`rows` [n, d] before rounding; their codes [m, d], m >= n, and scales [d / 128, m] float32, as `quantise_fp8`
    returns them; and the codes in the order of columns that the kernels of FP4 experts read, if asked for."""

    rows: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    ordered: torch.Tensor | None = None


Input = torch.Tensor | RoundedRows


def rows_of(x: Input) -> torch.Tensor:
    return x.rows if isinstance(x, RoundedRows) else x
