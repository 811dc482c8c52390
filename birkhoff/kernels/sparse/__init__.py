"""Products of sparse codes with dense rows, and the Adam step that uses them: what training a dictionary needs.

A *code* is a list of pairs grouped by `starts` [groups + 1]: group i has the pairs `starts[i]..starts[i + 1]`. Tables
are `[rows, width]` in float32 or bfloat16; sums, weights and results are float32.

`weighted_rows(starts, index, weights, table) -> [groups, width]`: `out[i]` is the sum over the pairs j of group i of
`weights[j] * table[index[j]]`. With rows as groups it decodes a code; with features as groups it is a gradient.
`pair_dots(left, left_index, right, right_index) -> [pairs]`: `left[left_index[j]] . right[right_index[j]]`.
`segment_sums(starts, weights) -> [groups]`: the sum of the weights of each group.
`adam_rows(rows, gradient, step)`: one Adam step of a matrix in place, whose gradient is the weighted rows of a code
(and a few dense rows); the GPU twin never writes the gradient to memory.

No sum depends on the order in which threads run, so that a step gives the same bits every time.
Tolerance of fast twins: 1e-6 relative to the largest value in float32, one rounding where a table is bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from birkhoff.kernels.sparse import reference
from birkhoff.kernels.sparse.reference import AdamStep, RowGradient, RowParameters, adam

__all__ = ["AdamStep", "RowGradient", "RowParameters", "SparseKernels", "adam", "kernels_for"]


@dataclass(frozen=True)
class SparseKernels:
    weighted_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    pair_dots: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    segment_sums: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    adam_rows: Callable[[RowParameters, RowGradient, AdamStep], None]


REFERENCE = SparseKernels(
    reference.weighted_rows, reference.pair_dots, reference.segment_sums, reference.adam_rows
)


def kernels_for(device: torch.device) -> SparseKernels:
    """The plain twins on a CPU, those in Triton on a GPU."""
    if device.type != "cuda":
        return REFERENCE
    from birkhoff.kernels.sparse import training

    return SparseKernels(
        training.weighted_rows, training.pair_dots, training.segment_sums, training.adam_rows
    )
