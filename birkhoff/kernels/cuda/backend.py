"""Launches of the CUDA kernels: kernel variant, grid and arguments by the number of tokens.

Weights are read in 16-byte loads: input widths must be multiples of 128 (512 for experts), output widths of 16. Expert
scales are applied as float16 powers of two, which span 29 octaves: each kind of matrix is shifted by a common power of
two, found when the weights are bound and divided out of the sums. Models that do not fit are reported by
`unsupported_reason` and use the Triton backend. Projections of FP8, Q8_0 and bfloat16 and experts of FP4, FP8 and the
`BLOCK_TYPES` have kernels here; other types are multiplied by the Triton twins, between these kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_void_p
from typing import TYPE_CHECKING

import torch

from birkhoff.kernels.cuda.block_experts import DIGITS_X, DIGITS_Z, BlockExperts
from birkhoff.kernels.cuda.compile import Module, compiled_module
from birkhoff.kernels.cuda.entry_attention import EntryAttention
from birkhoff.kernels.cuda.variants import (
    ROWS_CHOICES,
    block_variant,
    gemv_variant,
    is_fp8_experts,
    reads,
    reads_experts,
    rows_variant,
    token_tiles,
    type_sources,
)
from birkhoff.kernels.decode_buffers import ExpertBuffers, ExpertLayerWeights, StreamBuffers, is_fp4
from birkhoff.kernels.linear.packed import PackedWeight

if TYPE_CHECKING:
    from birkhoff.config import V4Config

QUERY_RANK = 1024  # width of the query latent in query.cu
MAX_MIX_ROWS = 8  # `write_and_mix` reads `fn` once per row; with more rows the Triton kernel is faster
_DTYPE_SUFFIX = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_FP16_OCTAVES = 29


def unsupported_reason(config: V4Config, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why these kernels cannot run a model, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "the GPU is older than compute capability 9.0"
    if dtype is not torch.bfloat16:
        return "the model does not compute in bfloat16"
    return unsupported_size(config)


def unsupported_size(config: V4Config) -> str | None:
    """Which size of a model these kernels cannot handle, or None."""
    if max(config.hidden_size, config.moe_intermediate_size) > 8192:
        return "rows are longer than 8192"
    if config.n_routed_experts > 512:
        return f"a layer has {config.n_routed_experts} experts, more than 512"
    if config.num_experts_per_tok > 16:
        return f"a token asks {config.num_experts_per_tok} experts, more than 16"
    multiples = {
        "hidden_size": 512,
        "moe_intermediate_size": 512,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "head_dim": 128,
        "n_routed_experts": 16,
        "vocab_size": 16,
        "index_head_dim": 16,
    }
    for name, multiple in multiples.items():
        if getattr(config, name) % multiple:
            return f"{name} is {getattr(config, name)}, no multiple of {multiple}"
    return None


def scale_offset(scales: torch.Tensor) -> int | None:
    """Offset from E8M0 bytes to float16 exponents that suits all `scales`; None if they span too many octaves."""
    highest, lowest = int(scales.max()), int(scales.min())
    return None if highest - lowest > _FP16_OCTAVES else 30 - highest


class CudaBackend(BlockExperts, EntryAttention):
    """The decode kernels of one device. `pdl` enables programmatic dependent launch: a kernel may start while the
    preceding one ends. Kernels of `types` (the names of those of a model's weights) are compiled with the others; those
    of further types when they are first launched."""

    name = "cuda"
    fp16_inputs = True  # FP8 and FP4 products read their inputs in float16

    def __init__(self, device: torch.device, pdl: bool = True, types: Iterable[str] = ()):
        self.pdl = pdl
        self.device = device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        sources: list[tuple[str, tuple[str, ...]]] = [
            (f"{stem}.cu", ()) for stem in ("gemv", "experts", "mhc", "route", "topk", "attend", "query")
        ]
        sources += sorted(type_sources(types))
        hopper = torch.cuda.get_device_capability(device) == (9, 0)
        if hopper:
            chosen = sorted({each.defines(tiles) for tiles, row in ROWS_CHOICES.items() for each in row})
            sources += [("gemm_rows.cu", defines) for defines in chosen]
            sources.append(("digit_experts.cu", ()))
        with ThreadPoolExecutor(len(sources)) as pool:  # NVRTC takes seconds per source
            modules = list(pool.map(lambda each: compiled_module(each[0], device, each[1]), sources))
        self._gemv, self._experts, self._mhc, self._route, self._topk, self._attend, self._query = modules[:7]
        self._digits = modules[-1] if hopper else None

    def reads_digits(self, config: V4Config) -> bool:
        """Whether FP4 experts of several tokens are multiplied by digit_experts.cu: on Hopper, with whole rounds of its
        stages, and if the results of SwiGLU are within the range of digits."""
        largest = config.swiglu_limit**2 * config.routed_scaling_factor
        whole = config.hidden_size % 1024 == 0 and config.moe_intermediate_size % 1024 == 0
        return self._digits is not None and whole and largest <= 256 * DIGITS_Z

    def gemv(
        self,
        weights: Sequence[PackedWeight],
        x: tuple[torch.Tensor | None, torch.Tensor],
        out: torch.Tensor,
        group: int | None = None,
    ) -> None:
        """Multiply x with matrices; results side by side in `out`.

        `x` is (float16, bfloat16), for weights of codes and bfloat16 weights respectively; `group` as in
        `linear.decode.gemv`. Up to two matrices of one type of codes and one bfloat16 matrix are one launch; other
        types are multiplied by the Triton twin."""
        codes = [weight for weight in weights if reads(weight, x) and weight.is_codes]
        bf16 = [weight for weight in weights if reads(weight, x) and not weight.is_codes]
        mixed = len({weight.kernel_type for weight in codes}) > 1
        if len(codes) + len(bf16) < len(weights) or len(codes) > 2 or len(bf16) > 1 or mixed:
            from birkhoff.kernels.linear.decode import gemv

            column = 0
            for weight in weights:
                part = out[:, column : column + weight.out]
                if reads(weight, x):
                    self.gemv([weight], x, part, group)
                else:
                    gemv([weight], x[1], part, group)
                column += weight.out
            return
        n, inner = x[1].shape[0], weights[0].inner
        tiles = token_tiles(n)
        total = sum(weight.out for weight in weights)
        suffix = _DTYPE_SUFFIX[out.dtype]
        q8 = bool(codes) and not codes[0].is_fp8
        outs = [weight.out for weight in weights]
        rows = None
        if (
            self._digits is not None
            and group is None
            and not q8
            and not (codes and bf16)
            and out.stride(0) % 4 == 0
        ):
            rows = rows_variant(tiles, inner, outs, bool(codes))
        if rows is not None:
            module = compiled_module("gemm_rows.cu", self.device, rows.defines(tiles))
            name, blocks, threads = f"rows_{suffix}", rows.thread_blocks(outs), rows.rows
        else:
            warps, depth, row_blocks = gemv_variant(tiles, inner, total, group is not None, q8)
            module = self._products(codes[0] if codes else None)
            name = f"gemv_{suffix}_{tiles}_{warps}_{depth}_{row_blocks}"
            blocks, threads = -(-total // (16 * row_blocks)), row_blocks * warps * 32
        module.launch(
            name,
            (blocks, 1),
            threads,
            *_code_arguments(codes, 0),
            *_code_arguments(codes, 1),
            bf16[0].weight if bf16 else None,
            bf16[0].out if bf16 else 0,
            x[0],
            x[1],
            n,
            inner,
            x[1].stride(0),
            out,
            out.stride(0),
            group or 0,
            pdl=self.pdl,
            shared=0 if rows is None else rows.memory(tiles),
        )

    def project_queries(
        self,
        weights: Sequence[PackedWeight],
        raw: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> bool:
        """`gemv` of a single token with the RMS norm of the first columns of `raw`; False if it does not apply.

        Runs beside the preceding launch, which must not write `raw` nor have started before `raw` was complete."""
        fp8 = all(weight.is_fp8 and weight.inner == QUERY_RANK and weight.out % 16 == 0 for weight in weights)
        if raw.shape[0] > 1 or not fp8 or len(weights) > 2 or out.dtype is not torch.bfloat16:
            return False
        self._query.launch(
            "project_query",
            (sum(weight.out for weight in weights) // 16, 1),
            256,
            *_code_arguments(weights, 0),
            *_code_arguments(weights, 1),
            raw,
            norm,
            eps,
            out,
            pdl=self.pdl,
        )
        return True

    def _products(self, codes: PackedWeight | None) -> Module:
        """gemv.cu for the type of `codes`."""
        if codes is None or codes.is_fp8:
            return self._gemv
        return compiled_module("gemv.cu", self.device, ("Q8_CODES=1",))

    def route_and_shared(
        self, w: ExpertLayerWeights, buffers: ExpertBuffers, ids: torch.Tensor, limit: float, factor: float
    ) -> None:
        """Router logits, expert selection and routing plan; and gate and up of the shared expert.

        `ids` [n, k] int32 receives the selected experts; `limit` clamps SwiGLU, `factor` scales the weights."""
        n, width = buffers.x.shape
        inner, experts = buffers.shared_hidden.shape[1], w.router.out
        x = (buffers.x_fp16, buffers.x)
        if w.router.is_codes or not (reads(w.shared_gate_up, x) and reads(w.router, x)):
            from birkhoff.kernels.experts.decode import swiglu

            both = buffers.router_gate_up
            self.gemv([w.router, w.shared_gate_up], x, both)
            swiglu(both[:, experts:], buffers.shared_hidden, limit)
            plan = (buffers.topk_weights, buffers.pair_order, buffers.expert_slots, factor)
            table = (w.router_bias, w.hash_table, buffers.token_ids, w.expert_addresses)
            self.route(both[:, :experts], *table, ids, *plan, buffers.x_fp16, buffers.x_digits)
            return
        inputs = (
            w.shared_gate_up.weight,
            w.shared_gate_up.scale,
            inner,
            w.router.weight,
            experts,
            buffers.x_fp16,
            buffers.x,
        )
        logits, products = buffers.router_gate_up, self._products(w.shared_gate_up)
        routing = (
            w.router_bias,
            w.hash_table,
            buffers.token_ids,
            w.expert_addresses,
            ids,
            buffers.topk_weights,
        )
        if n == 1:
            products.launch(
                f"router_gate_up_one_{8 if experts <= 256 else 16}",
                (experts // 8 + inner // 16, 1),
                256,
                *inputs,
                width,
                buffers.shared_hidden,
                logits,
                float(limit),
                logits[0, experts:],
                buffers.blocks_done,
                *routing,
                buffers.pair_order[1],
                buffers.expert_slots,
                ids.shape[1],
                float(factor),
                pdl=self.pdl,
            )
            return
        tiles = token_tiles(n)
        warps = 4 if tiles == 8 else 8
        products.launch(
            f"router_gate_up_{tiles}",
            ((inner + experts) // 16, 1),
            32 * warps,
            *inputs,
            n,
            width,
            buffers.shared_hidden,
            logits,
            logits.stride(0),
            float(limit),
            pdl=self.pdl,
        )
        self.route(
            logits[:, :experts],
            *routing,
            buffers.pair_order,
            buffers.expert_slots,
            factor,
            buffers.x_fp16,
            buffers.x_digits,
        )

    def gate_up(self, w: ExpertLayerWeights, buffers: ExpertBuffers, limit: float) -> None:
        """Gate and up of the routed experts: x_fp4_order -> expert_hidden, times the routing weight."""
        inner, width = buffers.expert_hidden.shape[1], buffers.x.shape[1]
        if not is_fp4(w):
            if not reads_experts(w, width, inner):
                from birkhoff.kernels.triton_backend import block_gate_up

                block_gate_up(w, buffers, limit)
                return
            if is_fp8_experts(w):
                self.fp8_gate_up(buffers, limit)
            else:
                host = w.host_range is not None
                variant = block_variant(w.expert_types[0].name, "gate_up", buffers.rows, host)
                self.block_gate_up(w, buffers, limit, variant)
            return
        if buffers.x_digits is not None:
            self.digits_gate_up(buffers, limit)
            return
        warps, suffix = 4 if 1 < buffers.rows < 16 else 2, _host_suffix(w)
        if buffers.rows >= 16 and not suffix:
            suffix = "_many"
        offset = w.scale_offsets[0]
        assert offset is not None
        self._experts.launch(
            f"experts_gate_up_{warps}{suffix}",
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
            *_host_range(w),
            pdl=self.pdl,
        )

    def down(self, w: ExpertLayerWeights, buffers: ExpertBuffers) -> None:
        """Down of the routed experts and of the shared expert: expert_hidden, shared_hidden -> expert_out."""
        shared = (buffers.shared_hidden, buffers.shared_hidden)
        q8 = not w.shared_down.is_fp8
        inner = buffers.expert_hidden.shape[1]
        n, width = buffers.x.shape
        if is_fp4(w):
            fused = reads(w.shared_down, shared) and not (q8 and w.host_range is not None)
        else:
            in_blocks = reads_experts(w, width, inner) and not is_fp8_experts(w)
            fused = in_blocks and q8 and n <= 8 and reads(w.shared_down, shared)
        if not fused:
            self.gemv([w.shared_down], shared, buffers.expert_out[:, -1])
        if not is_fp4(w):
            if not reads_experts(w, width, inner):
                from birkhoff.kernels.triton_backend import block_down

                block_down(w, buffers)
                return
            if is_fp8_experts(w):
                self.fp8_down(buffers)
            else:
                host = w.host_range is not None
                variant = block_variant(w.expert_types[1].name, "down", buffers.rows, host)
                self.block_down(w, buffers, variant, w.shared_down if fused else None)
            return
        if buffers.hidden_digits is not None:
            self.digits_down(w, buffers)
            return
        warps, row_tiles = (1, 1) if buffers.rows == 1 else (4, 1) if buffers.rows < 8 else (2, 2)
        offset, slots = w.scale_offsets[1], buffers.expert_slots.shape[0]
        assert offset is not None
        suffix = "_q8" if fused and q8 else _host_suffix(w)
        self._experts.launch(
            f"experts_down_{warps}_{row_tiles}{suffix}",
            (width // (16 * row_tiles), slots + (-(-n // 8) if fused else 0)),
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
            w.shared_down.weight if fused else None,
            w.shared_down.scale if fused else None,
            buffers.shared_hidden,
            n,
            *_host_range(w),
            pdl=self.pdl,
        )

    def write_and_mix(
        self,
        streams: torch.Tensor,
        y: torch.Tensor | None,
        post: torch.Tensor,
        mix: torch.Tensor,
        fn: torch.Tensor,
        parts: torch.Tensor,
        mode: int = 0,
        embed: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """As `mhc.decode.write_and_mix`, which is called for many rows, the head and other dtypes."""
        from birkhoff.kernels.mhc import decode as mhc

        n, _, width = streams.shape
        adds = mode == mhc.KEEP and y is not None and y.dtype is torch.float32
        embeds = mode == mhc.EMBED and embed is not None and embed.dtype is torch.bfloat16
        if n > MAX_MIX_ROWS or fn.shape[0] != mhc.COUNT or width % 64 or not (adds or embeds):
            mhc.write_and_mix(streams, y, post, mix, fn, parts, mode, embed, tokens, self.pdl)
            return
        self._mhc.launch(
            "write_and_mix",
            (width // 64, n),
            128,
            streams,
            y if adds else None,
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
        self,
        buffers: StreamBuffers,
        base: torch.Tensor,
        scale: torch.Tensor,
        norm: torch.Tensor,
        iters: int,
        eps: float,
        rms_eps: float,
        norm_eps: float,
    ) -> None:
        """After `write_and_mix`: x in all its forms, and the coefficients pre, post and mix."""
        n, splits, _ = buffers.mix_parts.shape
        self._mhc.launch(
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
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        hash_table: torch.Tensor | None,
        tokens: torch.Tensor,
        addresses: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        order: torch.Tensor,
        slots: torch.Tensor,
        factor: float,
        x: torch.Tensor | None = None,
        digits: torch.Tensor | None = None,
    ) -> None:
        """As `experts.decode.route`; slots also receive the addresses of their expert. `digits`, if given, receives
        those of x."""
        n, experts = logits.shape
        groups = 0 if digits is None else digits.numel() // 128
        self._route.launch(
            f"route_{8 if experts <= 256 else 16}",
            (1 + -(-groups // 32), 1),
            1024,
            logits,
            logits.stride(0),
            bias,
            hash_table,
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
            x,
            digits,
            groups,
            1 / DIGITS_X,
            pdl=self.pdl,
        )


def _host_range(w: ExpertLayerWeights) -> tuple[c_void_p, c_void_p] | tuple[None, None]:
    return (None, None) if w.host_range is None else (c_void_p(w.host_range[0]), c_void_p(w.host_range[1]))


def _host_suffix(w: ExpertLayerWeights) -> str:
    """Kernel variant: with or without support for experts in host memory."""
    return "" if w.host_range is None else "_host"


def _code_arguments(
    weights: Sequence[PackedWeight], index: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Codes, scales (of FP8) and rows of matrix `index`, or of an absent one."""
    if index >= len(weights):
        return None, None, 0
    return weights[index].weight, weights[index].scale, weights[index].out


def _gain(offset: int) -> float:
    """Undo the common power of two, and the 2^-6 by which an FP4 code read as E4M3 bits is too small.

    The scale's exponent field is byte + offset, i.e. 2^(byte + offset - 15), where 2^(byte - 127 + 6) is meant."""
    return 2.0 ** (-offset - 127 + 6 + 15)
