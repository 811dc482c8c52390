"""A chunk: rows of one hook and layer from one or a few steps, sent to consumers.

The memory of the rows is not written again after the chunk is made. Rows are flat, [rows, width]; readers reshape a row
to `row_shape`. `row_offset` is the number of earlier rows of this request and site, so that gaps are visible. `check`
validates sizes and dtypes; it runs before a chunk is queued, because an error in a writer thread could not name the
origin of the chunk. torch is imported only if a chunk holds a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from birkhoff.capture.spec.dtypes import STORED, WRITTEN, Array
from birkhoff.dtype_names import dtype_name
from birkhoff.errors import CaptureWriteError, quoted

if TYPE_CHECKING:
    import torch

PREFILL, DECODE = "p", "d"  # one letter per row
PHASES = {PREFILL: "prefill", DECODE: "decode"}


@dataclass(frozen=True, eq=False)
class Chunk:
    """`rows` is [rows, width] on the host; bf16 as a torch tensor or as uint16, fp8 as a torch tensor or as uint8."""

    request_id: str
    tag: str
    hook: str
    layer: int
    rows: torch.Tensor | Array
    dtype: str
    row_shape: tuple[int, ...]
    positions: Sequence[int] | None  # None if a row stands for several tokens, such as a mean
    token_ids: Sequence[int] | None
    phases: str | bytes | None  # PREFILL or DECODE for each row
    row_offset: int = 0
    step_index: int = 0
    scale: torch.Tensor | Array | None = None  # one float32 per row, for fp8
    num_steps: int = 1  # number of steps joined in this chunk, from `step_index` on
    ready: Callable[[], None] | None = None  # blocks until rows that are being copied from a device are here

    @property
    def last_step(self) -> int:
        return self.step_index + self.num_steps - 1

    @property
    def num_rows(self) -> int:
        return int(self.rows.shape[0])

    @property
    def width(self) -> int:
        return int(self.rows.shape[1])

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.width * STORED[self.dtype].itemsize

    def check(self) -> None:
        """Refuse a chunk that could not be written and read back."""
        where = f"chunk of {quoted(self.hook)}[{self.layer}] of request {quoted(self.request_id)}"
        if self.dtype not in WRITTEN:
            raise CaptureWriteError(
                f"{where}: dtype is {quoted(self.dtype)}, expected one of {', '.join(WRITTEN)}."
            )
        if self.rows.ndim != 2 or self.width < 1 or math.prod(self.row_shape) != self.width:
            raise CaptureWriteError(
                f"{where}: rows have shape {tuple(self.rows.shape)}, expected [rows, {math.prod(self.row_shape)}] for "
                f"row_shape {tuple(self.row_shape)}. Flatten each row."
            )
        stored_as = dtype_name(self.rows.dtype)
        if stored_as not in _ACCEPTED_DTYPES[self.dtype]:
            raise CaptureWriteError(
                f"{where}: rows are {stored_as}, expected {' or '.join(_ACCEPTED_DTYPES[self.dtype])}."
            )
        labels = {"positions": self.positions, "token_ids": self.token_ids, "phases": self.phases}
        if self.dtype == "fp8_e4m3" or self.scale is not None:
            labels["scale"] = () if self.scale is None else self.scale.reshape(-1)  # type: ignore[assignment]
        for name, values in labels.items():
            if values is not None and len(values) != self.num_rows:
                raise CaptureWriteError(
                    f"{where}: {len(values)} {name} for {self.num_rows} rows, expected one each."
                )
        if not set(self.letters() or "") <= set(PHASES):
            raise CaptureWriteError(
                f"{where}: phases are {quoted(self.phases)}, expected letters of {list(PHASES)}."
            )
        scales = self.scales()
        if scales is not None and not np.isfinite(scales).all():
            raise CaptureWriteError(
                f"{where}: a scale is not finite. The rows hold a NaN or an infinity; use bfloat16."
            )

    def array(self) -> Array:
        """The rows in NumPy's nearest dtype (`dtypes.STORED`); shares memory if the rows are contiguous."""
        if self.ready is not None:
            self.ready()
        rows: Any = self.rows
        if not isinstance(rows, np.ndarray):
            import torch

            rows = rows.detach().contiguous()
            if rows.dtype in (torch.bfloat16, torch.float8_e4m3fn):
                rows = rows.view(torch.int16 if rows.dtype == torch.bfloat16 else torch.uint8)
            rows = rows.numpy()
        return np.ascontiguousarray(rows).view(STORED[self.dtype])

    def part(self, start: int, stop: int) -> Chunk:
        """Rows start..stop as a chunk."""
        rows = slice(start, stop)
        return replace(
            self,
            rows=self.rows[rows],
            positions=None if self.positions is None else self.positions[rows],
            token_ids=None if self.token_ids is None else self.token_ids[rows],
            phases=None if self.phases is None else self.phases[rows],
            row_offset=self.row_offset + start,
            scale=None if self.scale is None else self.scale.reshape(-1)[rows],
        )

    def data(self) -> memoryview:
        """The payload as bytes."""
        rows: Any = self.array()
        return memoryview(rows.reshape(-1).view(np.uint8))

    def head(self) -> dict[str, Any]:
        """Everything except the payload, for JSON; `from_head` is its inverse."""
        scales = self.scales()
        return {
            "request_id": self.request_id,
            "tag": self.tag,
            "hook": self.hook,
            "layer": self.layer,
            "dtype": self.dtype,
            "row_shape": list(self.row_shape),
            "positions": None if self.positions is None else plain_ints(self.positions),
            "token_ids": None if self.token_ids is None else plain_ints(self.token_ids),
            "phases": self.letters(),
            "row_offset": self.row_offset,
            "step_index": self.step_index,
            "scale": None if scales is None else scales.tolist(),
            "num_steps": self.num_steps,
        }

    @staticmethod
    def from_head(head: dict[str, Any], payload: bytes | memoryview) -> Chunk:
        shape = tuple(head["row_shape"])
        rows = np.frombuffer(payload, STORED[head["dtype"]]).reshape(-1, math.prod(shape))
        scale = None if head["scale"] is None else np.array(head["scale"], np.float32)
        return Chunk(**head | {"rows": rows, "row_shape": shape, "scale": scale})

    def scales(self) -> Array | None:
        if self.scale is not None and self.ready is not None:
            self.ready()
        return None if self.scale is None else np.asarray(self.scale, dtype=np.float32).reshape(-1)

    def letters(self) -> str | None:
        return self.phases.decode("ascii", "replace") if isinstance(self.phases, bytes) else self.phases

    @property
    def form(self) -> tuple[object, ...]:
        """Properties that rows must share to be described by one entry."""
        labelled = (self.positions is None, self.token_ids is None, self.phases is None, self.scale is None)
        return self.dtype, tuple(self.row_shape), self.width, labelled


_ACCEPTED_DTYPES = {
    "bfloat16": ("bfloat16", "uint16", "int16"),
    "float16": ("float16",),
    "float32": ("float32",),
    "fp8_e4m3": ("float8_e4m3fn", "uint8"),
}


def plain_ints(values: Sequence[int] | None) -> list[int]:
    """Labels as a list of Python ints, for JSON."""
    if values is None:
        return []
    return [int(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]
