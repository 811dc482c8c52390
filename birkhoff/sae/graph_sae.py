"""A dictionary spliced into a site in fixed shapes, so that a step with it can be recorded and replayed.

`SaeHost` already computes with shapes from a few sizes (`SpliceKind`), on tensors that are gathered when uses change
(`SpliceData`). A recorded step runs the same function on buffers that stay in place; `fill` copies new data into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.hooks.edit import SiteContext

if TYPE_CHECKING:
    from birkhoff.sae.splice import SaeHost, SpliceData, SpliceKind


class GraphSae:
    """Buffers of one kind of use of one dictionary at one site."""

    def __init__(self, host: SaeHost, kind: SpliceKind):
        self.host = host
        self.kind = kind
        self.data: SpliceData | None = None  # allocated by the first `fill`

    def fill(self, uses: Sequence[tuple[Any, list[int]]]) -> None:
        """Set the uses of the next steps, replacing those before."""
        data = self.host.splice_data(uses)
        assert data.kind == self.kind, "uses of another kind have another pattern"
        if self.data is None:
            self.data = data.clone()
            return
        for buffer, tensor in zip(self.data.tensors(), data.tensors()):
            buffer.copy_(tensor)

    def run(self, x: torch.Tensor, context: SiteContext) -> torch.Tensor:
        assert self.data is not None, "buffers are filled before a step"
        return self.host.run_splice(x, self.data, context)
