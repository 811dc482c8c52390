"""Load a checkpoint into a model's tensors, one strip of rows at a time.

The model lists its destinations (`WeightDestination`: name, tensor, kind). All names, shapes and dtypes are checked
from headers before any tensor data is read, so a model is either left untouched or filled completely, unless the data
itself is damaged. "value" destinations receive exactly dequantised values rounded once to their dtype; "codes" and
"scale" receive the stored bytes, as do "blocks" whole rows of a ggml type; "ids" receive a validated expert table.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from birkhoff.errors import TensorDtype, TensorMissing, TensorShape, TensorUnexpected
from birkhoff.kernels.packed import PackedMatrix, PackedType, from_blocks, stored_type
from birkhoff.weights.checkpoint import Checkpoint
from birkhoff.weights.layout import scale_name
from birkhoff.weights.safetensors import TORCH_DTYPES, read_exactly
from birkhoff.weights.shard_index import join_names
from birkhoff.weights.staged_copy import BLOCK_BYTES, StagedCopy, blocks, stored_rows
from birkhoff.weights.tensor_ref import (
    FLOATS,
    INSPECT,
    TensorRef,
    check_blocks,
    check_codes,
    check_expert_table,
    check_experts,
    check_finite,
    check_scale,
    check_shape,
    naming_files,
    strips,
    value_strips,
)

_PACKED_DTYPES: dict[torch.dtype, tuple[str, ...]] = {
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.int8: ("I8", "U8"),
    torch.uint8: ("I8", "U8", "F8_E8M0"),
    torch.float8_e8m0fnu: ("F8_E8M0", "U8"),
}


MAX_READERS = 16  # threads that read a checkpoint for a GPU


class WeightDestination(Protocol):
    """A model tensor to fill. `kind` is "value", "codes", "scale", "blocks" or "ids"; `type` is that of packed kinds;
    `tensor` may be a view on any device."""

    @property
    def name(self) -> str: ...
    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def kind(self) -> str: ...
    @property
    def type(self) -> PackedType | None: ...


_Step = tuple[WeightDestination, list[str]]  # a destination and the stored names it uses


@dataclass(frozen=True)
class LoadReport:
    """Counts and timing of one load. `file_bytes` were read, `resident_bytes` are the filled tensors."""

    tensors: int
    file_bytes: int
    resident_bytes: int
    seconds: float
    skipped: int
    notices: tuple[str, ...]
    deferred: DeferredLoad | None = None


class DeferredLoad:
    """What `load_into` left out: the checked destinations of experts, by the names before their matrices'."""

    def __init__(self, groups: dict[str, list[_Step]], checkpoint: Checkpoint):
        self._groups = groups
        self._checkpoint = checkpoint

    def __len__(self) -> int:
        return len(self._groups)

    def fill(self, group: str) -> None:
        """Fill the destinations of one expert."""
        with torch.no_grad():
            for destination, _ in self._groups[group]:
                _FILL[destination.kind](destination, self._checkpoint)


def load_into(
    destinations: Iterable[WeightDestination],
    checkpoint: Checkpoint,
    *,
    skip: tuple[str, ...] = (),
    later: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Fill every destination. Stored names that start with a prefix in `skip` may stay unused; any other raises.

    Experts in `later`, named as `layers.3.ffn.experts.17`, are checked and left to the caller, in `deferred`.

    `progress` is called with (bytes read, total bytes) at the start and after each tensor or block of the files.
    """
    began = time.perf_counter()
    whole, skipped = _plan(list(destinations), checkpoint, skip)
    plan: list[_Step] = []
    groups: dict[str, list[_Step]] = {}
    for step in whole:
        name = step[0].name.rsplit(".", 2)[0]
        (groups.setdefault(name, []) if name in later else plan).append(step)
    total = sum(checkpoint[name].nbytes for _, names in plan for name in names)
    done = 0
    if progress is not None:
        progress(0, total)
    with naming_files(checkpoint):
        for count in _fill(plan, checkpoint):
            done += count
            if progress is not None:
                progress(done, total)
    resident = sum(destination.tensor.nbytes for destination, _ in plan)
    seconds = time.perf_counter() - began
    deferred = DeferredLoad(groups, checkpoint) if groups else None
    return LoadReport(len(plan), total, resident, seconds, skipped, tuple(checkpoint.notices), deferred)


def _fill(plan: Sequence[_Step], checkpoint: Checkpoint) -> Iterator[int]:
    """Fill every destination; yields bytes as they are read.

    Rows that a GPU receives as they are stored are read into pinned buffers (`staged_copy.py`). Other destinations of a
    model on a GPU are filled by several threads, each with a CUDA stream; those of a model on a CPU one by one."""
    device = next((d.tensor.device for d, _ in plan if d.tensor.device.type == "cuda"), None)
    if device is None:
        for destination, names in plan:
            with torch.no_grad():
                _FILL[destination.kind](destination, checkpoint)
            yield sum(checkpoint[name].nbytes for name in names)
        return
    readers = min(MAX_READERS, os.cpu_count() or 1)
    staged = [step for step in plan if _is_staged(step[0], checkpoint)]
    yield from _fill_staged([destination for destination, _ in staged], checkpoint, device, readers)
    done = {destination.name for destination, _ in staged}
    yield from _fill_by_threads([step for step in plan if step[0].name not in done], checkpoint, readers)
    torch.cuda.synchronize(device)


def _is_staged(destination: WeightDestination, checkpoint: Checkpoint) -> bool:
    """Whether a GPU receives the stored rows of a tensor as they are, or its plain numbers."""
    ref = checkpoint[destination.name]
    if destination.tensor.device.type != "cuda" or ref.location is None or ref.encoding:
        return False
    return destination.kind in ("codes", "scale") or (destination.kind == "value" and ref.format == "float")


def _fill_staged(
    destinations: Sequence[WeightDestination], checkpoint: Checkpoint, device: torch.device, readers: int
) -> Iterator[int]:
    copies = StagedCopy(device, readers)
    rows = (
        piece
        for destination in destinations
        for piece in stored_rows(
            checkpoint[destination.name], destination.tensor, destination.kind, BLOCK_BYTES
        )
    )
    yield from copies.run(list(blocks(rows)))
    suspects = copies.suspects()
    for destination in destinations:
        if destination.name in suspects:
            with torch.no_grad():
                _FILL[destination.kind](destination, checkpoint)  # raises and names the value


def _fill_by_threads(plan: Sequence[_Step], checkpoint: Checkpoint, readers: int) -> Iterator[int]:
    local = threading.local()

    def fill(step: _Step) -> int:
        destination, names = step
        device = destination.tensor.device
        with torch.no_grad():
            if device.type != "cuda":
                _FILL[destination.kind](destination, checkpoint)
            else:
                if not hasattr(local, "stream"):
                    local.stream = torch.cuda.Stream(device)
                with torch.cuda.stream(local.stream):
                    _FILL[destination.kind](destination, checkpoint)
        return sum(checkpoint[name].nbytes for name in names)

    with ThreadPoolExecutor(readers, "birkhoff-load") as pool:
        try:
            yield from pool.map(fill, plan)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _plan(
    destinations: list[WeightDestination], checkpoint: Checkpoint, skip: tuple[str, ...]
) -> tuple[list[_Step], int]:
    """Return (destination, stored names it uses) pairs in file order, and the number of skipped names."""
    missing = [d.name for d in destinations if d.name not in checkpoint]
    if missing:
        raise TensorMissing(
            f"{len(missing)} tensors the model needs are not in {checkpoint.path.name}: {join_names(missing)}. "
            f"{INSPECT}"
        )
    plan = [(d, _check(d, checkpoint)) for d in destinations]
    used = [name for _, names in plan for name in names]
    assert len(used) == len(set(used)), "two destinations use one stored tensor"
    unused = set(checkpoint) - set(used)
    left_over = sorted(name for name in unused if not name.startswith(skip)) if skip else sorted(unused)
    if left_over:
        raise TensorUnexpected(
            f"{checkpoint.path.name} holds {len(left_over)} tensors the model has no place for: "
            f"{join_names(left_over)}. {INSPECT}"
        )
    file_order = {name: index for index, name in enumerate(checkpoint)}
    plan.sort(key=lambda step: file_order[step[0].name])
    return plan, len(unused)


def _check(destination: WeightDestination, checkpoint: Checkpoint) -> list[str]:
    """Check a destination's dtype and shape against the headers; return the stored names it uses."""
    name = destination.name
    tensor = destination.tensor
    kind = destination.kind
    shape, ref = tuple(tensor.shape), checkpoint[name]
    if kind == "value":
        assert tensor.is_floating_point(), f"{name} is a value destination of dtype {tensor.dtype}"
        check_shape(name, ref.value_shape, shape, f"for {ref.dtype}")
        return [name] if ref.format == "float" else [name, scale_name(name)]
    if kind == "ids":
        check_expert_table(checkpoint, name, shape)
        return [name]
    if kind == "blocks":
        return _check_blocks(destination, ref)
    assert kind in ("codes", "scale"), kind
    accepted = _PACKED_DTYPES.get(tensor.dtype, ())
    if ref.dtype not in accepted:
        plain = " Plain floats cannot be kept packed; load them as numbers." if ref.dtype in FLOATS else ""
        raise TensorDtype(
            f"{name} is stored as {ref.dtype}, expected {' or '.join(accepted)} to keep it packed.{plain} {INSPECT}"
        )
    if ref.shape != shape:
        raise TensorShape(f"{name} is {ref.shape}, expected {shape} as packed {kind}. {INSPECT}")
    return [name]


def _check_blocks(destination: WeightDestination, ref: TensorRef) -> list[str]:
    name, kind = destination.name, destination.type
    assert kind is not None
    kind = stored_type(kind)
    if ref.packed_type != kind:
        raise TensorDtype(
            f"{name} is stored as {ref.encoding or ref.dtype}, expected {kind.name} to keep it packed. {INSPECT}"
        )
    shape = (ref.shape[0], kind.row_bytes(ref.value_shape[1]))
    check_shape(name, shape, tuple(destination.tensor.shape), f"for rows of {kind.name} blocks")
    return [name, scale_name(name)] if ref.format == "fp4" else [name]


def _fill_blocks(destination: WeightDestination, checkpoint: Checkpoint) -> None:
    ref, tensor, kind = checkpoint[destination.name], destination.tensor, destination.type
    assert kind is not None
    for start, stop in strips(tuple(tensor.shape), 1):
        rows = ref.stored_rows(start, stop)
        check_blocks(destination.name, PackedMatrix(stored_type(kind), ref.value_shape[1], rows), start)
        tensor[start:stop].copy_(from_blocks(kind, rows.to(tensor.device)))


def _fill_value(destination: WeightDestination, checkpoint: Checkpoint) -> None:
    name, tensor = destination.name, destination.tensor
    for start, values in value_strips(checkpoint, name, tensor.device):
        rows = tensor[start : start + len(values)]
        rows.copy_(values)
        if tensor.dtype not in (torch.float32, torch.float64):
            check_finite(name, rows, start)  # rounding to a narrower dtype may overflow


def _fill_packed(destination: WeightDestination, checkpoint: Checkpoint) -> None:
    ref = checkpoint[destination.name]
    tensor = destination.tensor
    check = check_scale if destination.kind == "scale" else check_codes
    stored = TORCH_DTYPES[ref.dtype]
    if (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and ref.location is not None
        and not ref.encoding
    ):
        read_exactly(*ref.location, tensor.view(-1).view(torch.uint8).numpy().data)
        for start, stop in strips(ref.shape, 1):
            check(destination.name, tensor[start:stop].view(stored), start)
        return
    for start, stop in strips(ref.shape, 1):
        rows = ref.rows(start, stop).to(tensor.device)
        check(destination.name, rows, start)
        tensor[start:stop].copy_(rows if rows.dtype == tensor.dtype else rows.view(tensor.dtype))


def _fill_ids(destination: WeightDestination, checkpoint: Checkpoint) -> None:
    name, tensor = destination.name, destination.tensor
    for start, stop in strips(tuple(tensor.shape), 8):
        ids = checkpoint[name].rows(start, stop)
        check_experts(name, ids, checkpoint.config.n_routed_experts, start)
        tensor[start:stop].copy_(ids)


_FILL: dict[str, Callable[[WeightDestination, Checkpoint], None]] = {
    "value": _fill_value,
    "codes": _fill_packed,
    "scale": _fill_packed,
    "blocks": _fill_blocks,
    "ids": _fill_ids,
}
