"""Launches of the CUDA sources: which variant for how many tokens, which grid, which addresses.

The weights' widths must suit sixteen-byte loads: inputs a multiple of 128 (of 512 for experts), outputs of 16. Expert
scales become float16 powers of two, which hold 29 octaves: each matrix kind is moved by a common power of two, found
when the weights are bound and taken out of the sums. Weights that do not fit are refused by `unsupported_reason`, and run portable.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.kernels.cuda.compile import Module, find_nvrtc
from birkhoff.kernels.linear.packed import PackedWeight

if TYPE_CHECKING:
    from birkhoff.config import V4Config

HERE = Path(__file__).parent
MOST_ROWS = 64
FEW = 8  # rows up to which a boundary's `fn` is read for each of them
_OUT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_OCTAVES = 29


def unsupported_reason(config: V4Config, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why these kernels cannot serve a model, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "the GPU is older than compute capability 9.0"
    if dtype is not torch.bfloat16:
        return "the model does not compute in bfloat16"
    return unsupported_size(config)


def unsupported_size(config: V4Config) -> str | None:
    """Which of a model's sizes these kernels cannot serve, or None."""
    if max(config.hidden_size, config.moe_intermediate_size) > 8192:
        return "rows are longer than 8192"
    if config.n_routed_experts > 512:
        return f"a layer has {config.n_routed_experts} experts, more than 512"
    if config.num_experts_per_tok > 16:
        return f"a token asks {config.num_experts_per_tok} experts, more than 16"
    widths = {
        "hidden_size": 512,
        "moe_intermediate_size": 512,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "head_dim": 128,
        "n_routed_experts": 16,
        "vocab_size": 16,
        "index_head_dim": 16,
    }
    for name, multiple in widths.items():
        if getattr(config, name) % multiple:
            return f"{name} is {getattr(config, name)}, no multiple of {multiple}"
    return None


def scale_offset(scales: torch.Tensor) -> int | None:
    """What to add to an E8M0 byte to get a float16 exponent for all of `scales`; None when they span too far."""
    most, least = int(scales.max()), int(scales.min())
    return None if most - least > _OCTAVES else 30 - most


@lru_cache
def _compiled(file: str, device: torch.device) -> Module:
    """Once per process and device: it takes seconds."""
    nvrtc = find_nvrtc()
    assert nvrtc is not None
    return Module(nvrtc, HERE / file, device)


class CudaBackend:
    """Bound to one device. `pdl` lets kernels begin while their predecessors end."""

    name = "cuda"
    fp16_inputs = True  # inputs are wanted in float16 too

    def __init__(self, device: torch.device, pdl: bool = True):
        self.pdl = pdl
        sources = ("products.cu", "experts.cu", "small.cu", "attend.cu")
        self.products, self.experts, self.small, self.attention = (
            _compiled(file, device) for file in sources
        )

    def gemv(
        self,
        weights: Sequence[PackedWeight],
        x: tuple[torch.Tensor | None, torch.Tensor],
        out: torch.Tensor,
        group: int | None = None,
    ) -> None:
        """Up to two FP8 matrices and one of bfloat16; x as float16 for the former and bfloat16 for the latter."""
        coded = [rows for rows in weights if rows.scale is not None]
        plain = [rows for rows in weights if rows.scale is None]
        assert len(coded) <= 2 and len(plain) <= 1
        n, inner = x[1].shape[0], weights[0].inner
        tiles = _tiles(n)
        total = sum(rows.out for rows in weights)
        warps, depth, beside = _variant(tiles, inner, total, group is not None)
        self.products.launch(
            f"product_{_OUT[out.dtype]}_{tiles}_{warps}_{depth}_{beside}",
            (-(-total // (16 * beside)), 1),
            beside * warps * 32,
            *_fields(coded, 0),
            *_fields(coded, 1),
            plain[0].weight if plain else None,
            plain[0].out if plain else 0,
            x[0],
            x[1],
            n,
            inner,
            x[1].stride(0),
            out,
            out.stride(0),
            group or 0,
            pdl=self.pdl,
        )

    def route_and_shared(self, w: Any, buffers: Any, ids: torch.Tensor, limit: float, factor: float) -> None:
        """The router's logits, the choice of experts and the plan of the step; and the shared expert's gate and up."""
        n, width = buffers.x.shape
        inner, experts = buffers.shared_hidden.shape[1], w.router.out
        given = (
            w.shared_gate_up.weight,
            w.shared_gate_up.scale,
            inner,
            w.router.weight,
            experts,
            buffers.x_fp16,
            buffers.x,
        )
        routing = (
            w.router_bias,
            w.hash_table,
            buffers.token_ids,
            w.expert_addresses,
            ids,
            buffers.topk_weights,
        )
        if n == 1:
            self.products.launch(
                f"open_one_{8 if experts <= 256 else 16}",
                (experts // 8 + inner // 16, 1),
                256,
                *given,
                width,
                buffers.shared_hidden,
                buffers.router_gate_up,
                float(limit),
                buffers.router_gate_up[0, experts:],
                buffers.blocks_done,
                *routing,
                buffers.pair_order[1],
                buffers.expert_slots,
                ids.shape[1],
                float(factor),
                pdl=self.pdl,
            )
            return
        tiles = _tiles(n)
        self.products.launch(
            f"open_shared_{tiles}",
            ((inner + experts) // 16, 1),
            128 if tiles == 8 else 256,
            *given,
            n,
            width,
            buffers.shared_hidden,
            buffers.router_gate_up,
            buffers.router_gate_up.stride(0),
            float(limit),
            pdl=self.pdl,
        )
        self.route(
            buffers.router_gate_up[:, :experts], *routing, buffers.pair_order, buffers.expert_slots, factor
        )

    def gate_up(self, w: Any, buffers: Any, limit: float) -> None:
        warps = 2 if buffers.rows == 1 else 4
        inner, width = buffers.expert_hidden.shape[1], buffers.x.shape[1]
        offset = w.scale_offsets[0]
        self.experts.launch(
            f"open_experts_{warps}{_bus(w)}",
            (inner // 16, buffers.expert_slots.shape[0]),
            warps * 32,
            buffers.expert_slots,
            buffers.pair_order[1],
            buffers.topk_weights,
            buffers.x_fp4_order,
            buffers.expert_hidden,
            inner,
            width,
            buffers.topk_weights.shape[1],
            float(limit),
            offset,
            _gain(offset),
            *_far(w),
            pdl=self.pdl,
        )

    def down(self, w: Any, buffers: Any) -> None:
        warps, tall = (1, 1) if buffers.rows == 1 else (4, 1) if buffers.rows < 8 else (2, 2)
        inner = buffers.expert_hidden.shape[1]
        width = buffers.x.shape[1]
        n = buffers.x.shape[0]
        offset, slots = w.scale_offsets[1], buffers.expert_slots.shape[0]
        self.experts.launch(
            f"close_experts_{warps}_{tall}{_bus(w)}",
            (width // (16 * tall), slots + -(-n // 8)),
            warps * 32,
            buffers.expert_slots,
            slots,
            buffers.pair_order[1],
            buffers.expert_hidden,
            buffers.expert_out,
            inner,
            width,
            buffers.topk_weights.shape[1],
            offset,
            _gain(offset),
            w.shared_down.weight,
            w.shared_down.scale,
            buffers.shared_hidden,
            n,
            *_far(w),
            pdl=self.pdl,
        )

    def write_and_mix(self, streams, y, post, mix, fn, parts, mode: int = 0, embed=None, tokens=None) -> None:
        """The contract of `mhc.triton.write_and_mix`, which takes over for many rows, the head, and other dtypes."""
        from birkhoff.kernels.mhc import decode as mhc

        n, _, width = streams.shape
        known = (
            y.dtype is torch.float32
            if mode == mhc.KEEP
            else mode == mhc.EMBED and embed.dtype is torch.bfloat16
        )
        if n > FEW or fn.shape[0] != mhc.COUNT or width % 64 or not known:
            mhc.write_and_mix(streams, y, post, mix, fn, parts, mode, embed, tokens, self.pdl)
            return
        added = y if mode == mhc.KEEP else None
        self.small.launch(
            "write_and_mix",
            (width // 64, n),
            128,
            streams,
            added,
            1 if y is None or y.dim() == 2 else y.shape[1],
            post,
            mix,
            fn,
            parts,
            embed,
            tokens,
            width,
            pdl=self.pdl,
        )

    def read_streams(
        self, buffers: Any, base, scale, norm, iters: int, eps: float, rms_eps: float, norm_eps: float
    ) -> None:
        """After `write_and_mix`: x in all its forms, and the weights of the write."""
        n, splits, _ = buffers.mix_parts.shape
        self.small.launch(
            "read_streams",
            (n, 2),
            512,
            buffers.mix_parts,
            splits,
            buffers.streams,
            base,
            scale,
            norm,
            buffers.x,
            buffers.x_fp16,
            buffers.x_fp4_order,
            buffers.pre,
            buffers.post,
            buffers.mix,
            buffers.x.shape[1],
            iters,
            eps,
            rms_eps,
            norm_eps,
            pdl=self.pdl,
        )

    def route(
        self, logits, bias, table, tokens, addresses, ids, weights, order, slots, factor: float
    ) -> None:
        """The contract of `experts.triton.route`."""
        n, experts = logits.shape
        self.small.launch(
            f"route_{8 if experts <= 256 else 16}",
            (1, 1),
            1024,
            logits,
            logits.stride(0),
            bias,
            table,
            tokens,
            addresses,
            ids,
            weights,
            order[1],
            slots,
            slots.shape[0],
            n,
            experts,
            ids.shape[1],
            float(factor),
            pdl=self.pdl,
        )

    def topk(self, scores: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor) -> None:
        """The contract of `index.triton.choose`, which takes over beyond 262,144 entries (1M tokens)."""
        n, room = scores.shape
        wide = room > 256 * 32  # then eight blocks of 1,024 threads share a sequence
        blocks, threads = (8, 1024) if wide else (1, 256)
        each = next((count for count in (4, 8, 16, 32) if room <= blocks * threads * count), None)
        if each is None:
            from birkhoff.kernels.index.decode import topk_entries

            topk_entries(scores, positions, chosen)
            return
        self.small.launch(
            f"choose_{'wide_' if wide else ''}{each}",
            (n * blocks, 1),
            threads,
            scores,
            positions,
            chosen,
            room,
            chosen.shape[1],
            pdl=self.pdl,
        )

    def attend(
        self,
        queries,
        keys,
        window: int,
        pages,
        ratio: int,
        table,
        chosen,
        slots,
        positions,
        cos,
        sin,
        sums,
        peaks,
        masses,
        sink,
        share: int,
        scale: float,
        eps: float,
        out,
        half,
    ) -> None:
        """The contract of `attend.triton.attend`, which takes over for many rows, other widths and other dtypes."""
        n, shares, heads, width = sums.shape
        turning = 2 * cos.shape[-1]
        few = n < 16 and share % 32 == 0 and keys.dtype is torch.bfloat16
        aligned = heads % 16 == 0 and turning % 8 == 0 and queries.stride(0) % 8 == 0
        if not few or not aligned or width not in (128, 512) or turning > width:
            from birkhoff.kernels.attend.decode import attend

            attend(
                queries,
                keys,
                window,
                pages,
                ratio,
                table,
                chosen,
                slots,
                positions,
                cos,
                sin,
                sums,
                peaks,
                masses,
                sink,
                share,
                scale,
                eps,
                out,
                half,
                self.pdl,
            )
            return
        stages = 1 if share == 32 else 2
        warps = width // 64  # each has 4 KiB of keys a stage, and 2 KiB of scores
        self.attention.launch(
            f"attend_{width}",
            (n, heads // 16, shares),
            warps * 32,
            queries,
            queries.stride(0),
            keys,
            keys.shape[1],
            window,
            pages if ratio else None,
            max(ratio.bit_length() - 1, 0),
            table,
            table.stride(0),
            chosen,
            1 if chosen is None else chosen.shape[1],
            slots,
            positions,
            cos,
            sin,
            turning,
            sums,
            peaks,
            masses,
            heads,
            share,
            stages,
            float(scale),
            float(eps),
            pdl=self.pdl,
            shared=warps * (4096 * stages + 2048),
        )
        self.attention.launch(
            f"combine_{width}",
            (n, heads * (width // 128)),
            256,
            sums,
            peaks,
            masses,
            sink,
            cos,
            sin,
            turning,
            out,
            half,
            heads,
            shares,
            pdl=self.pdl,
        )


def _far(w: Any) -> tuple[c_void_p, c_void_p] | tuple[None, None]:
    return (None, None) if w.host_range is None else (c_void_p(w.host_range[0]), c_void_p(w.host_range[1]))


def _bus(w: Any) -> str:
    """Which kind of kernel: one that expects some experts in host memory, or one that does not."""
    return "" if w.host_range is None else "_bus"


def _fields(coded: list[PackedWeight], place: int) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Codes, scales and height of an FP8 matrix, or of none."""
    if place >= len(coded):
        return None, None, 0
    return coded[place].weight, coded[place].scale, coded[place].out


def _variant(tiles: int, inner: int, total: int, grouped: bool) -> tuple[int, int, int]:
    """Warps that share a row's input, blocks of 128 that each has on its way, and row blocks side by side in one block
    of threads; the fastest measured."""
    if tiles == 1:
        return (8, 1, 1) if inner <= 1024 or grouped else (8, 3, 1) if total <= 8192 else (8, 2, 1)
    if tiles == 2:
        return (4, 1, 1) if inner <= 1024 else (8, 1, 1)
    if tiles == 4:
        return (2, 1, 4) if total >= 16384 else (4, 1, 2) if grouped else (8, 1, 1)
    if total >= 16384:  # enough rows that warps need not share them
        return (2, 1, 4) if inner > 1024 else (1, 1, 8)
    return (2, 1, 4) if grouped else (4, 1, 1)


def _tiles(n: int) -> int:
    assert n <= MOST_ROWS
    return next(tiles for tiles in (1, 2, 4, 8) if n <= 8 * tiles)


def _gain(offset: int) -> float:
    """Undoes the common power of two, and the 2^-6 that an FP4 code is short of as E4M3 bits.

    The factor's exponent field is byte + offset: 2^(byte + offset - 15), where 2^(byte - 127 + 6) was meant."""
    return 2.0 ** (-offset - 127 + 6 + 15)
