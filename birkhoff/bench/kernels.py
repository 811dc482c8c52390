"""Single kernels on a GPU, checked against the reference twins, then timed; those of a decode step in CUDA graphs.

    boundary   write of one sublayer, mix, Sinkhorn, collapse and norm of the next: hidden sizes of both releases, 1 to
               8,192 tokens, next to PyTorch eager and compiled; mixing matrices alternate so that none stays in a cache
    product    the FP8 and bfloat16 projections of a layer by shape and tokens, next to bfloat16 `torch` products
    experts    FP4 gate and up, and down with the shared expert, with uniform routing
    many       the prefill kernels (`prefill_kernels.py`)

Every row has the bytes that must be moved and the achieved share of the measured read bandwidth. The weights are those
of a few full-width layers, used in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from birkhoff.bench.decode import device_facts, reading_speed
from birkhoff.bench.prefill_kernels import CHUNKS, bench_prefill_kernels
from birkhoff.bench.report import Row, significant
from birkhoff.bench.synthetic import filled_state, random_on_device
from birkhoff.bench.timing import graph_us, release_memory
from birkhoff.convert.presets import preset
from birkhoff.decode.gpu import Decoder
from birkhoff.decode.layer_weights import LayerWeights
from birkhoff.kernels.cuda.backend import CudaBackend
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.mhc import decode as mhc_decode
from birkhoff.kernels.mhc import reference as mhc
from birkhoff.kernels.norm.reference import rms_norm

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 2048, 4096, 8192)
COMPILED = (1, 8, 512)
ITERS, EPS = 20, 1e-6


class MhcBoundary:
    """Buffers of one mHC boundary at one size, computed by the kernels (`ours`) or by the reference (`plain`)."""

    def __init__(self, tokens: int, width: int, device: torch.device, copies: int):
        def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        self.streams = random(tokens, 4, width, dtype=torch.bfloat16)
        self.y = random(tokens, width)
        self.post = torch.rand(tokens, 4, device=device)
        self.mix = torch.rand(tokens, 4, 4, device=device) / 4
        self.fns = [random(24, 4 * width) * (4 * width) ** -0.5 for _ in range(copies)]
        self.base = random(24)
        self.scale = random(3) * 0.1 + 0.6
        self.norm = random(width) * 0.1 + 1
        options = {"dtype": torch.float32, "device": device}
        self.mix_parts = torch.empty(tokens, mhc_decode.slices(tokens, width)[1], 32, **options)  # type: ignore[call-overload]
        self.x = torch.empty(tokens, width, dtype=torch.bfloat16, device=device)
        self.x_fp16: torch.Tensor | None = torch.empty_like(self.x, dtype=torch.float16)
        self.x_fp4_order: torch.Tensor | None = torch.empty_like(self.x, dtype=torch.float16)
        self.pre = torch.empty_like(self.post)

    def ours(self, kernels: CudaBackend, fn: torch.Tensor) -> None:
        kernels.write_and_mix(self.streams, self.y, self.post, self.mix, fn, self.mix_parts)
        kernels.read_streams(self, self.base, self.scale, self.norm, ITERS, EPS, EPS, EPS)

    def plain(self, fn: torch.Tensor) -> tuple[torch.Tensor, ...]:
        streams = mhc.write(self.streams, self.y.to(self.streams.dtype), self.post, self.mix)
        u, _, post, mix = mhc.read(streams, fn, self.base, self.scale, ITERS, EPS, EPS)
        return rms_norm(u, self.norm, EPS), streams, post, mix


@torch.inference_mode()
def boundary_rows(
    kernels: CudaBackend, speed: float, tokens: Sequence[int], widths: Sequence[int]
) -> Iterator[Row]:
    for width in widths:
        for count in tokens:
            device = torch.device("cuda")
            copies = 64 if count <= 64 else 8
            b = MhcBoundary(count, width, device, copies)
            x, streams, post, mix = b.plain(b.fns[0])
            b.ours(kernels, b.fns[0])
            pairs = ((b.x, x), (b.streams, streams), (b.post, post), (b.mix, mix))
            errors = [((a.double() - t.double()).norm() / t.double().norm()).item() for a, t in pairs]
            us = graph_us([partial(b.ours, kernels, fn) for fn in b.fns])
            eager = graph_us([partial(b.plain, fn) for fn in b.fns[:4]], 5)
            row = {
                "kind": "boundary",
                "tokens": count,
                "hidden": width,
                "us": significant(us),
                "us_eager_in_a_graph": significant(eager),
                "errors": [significant(e) for e in errors],
                "passed": max(errors) < 5e-3,
            }
            moved = count * width * 2 * (4 + 4 + 1) + count * width * 4 + 24 * 4 * width * 4
            row |= {"bytes": moved, "share_of_reading_speed": significant(moved / speed / (us * 1e-6))}
            if count in COMPILED and width == widths[0]:
                compiled = torch.compile(b.plain)
                compiled(b.fns[0])
                row["us_compiled_in_a_graph"] = significant(
                    graph_us([partial(compiled, fn) for fn in b.fns[:4]], 5)
                )
            yield row
            del b
            release_memory()


@torch.inference_mode()
def gemv_rows(decoder: Decoder, tokens: Sequence[int], speed: float) -> Iterator[Row]:
    device = torch.device("cuda")
    kernels = decoder.kernels
    layers = decoder.layers
    shapes: list[tuple[str, Callable[[LayerWeights], list[PackedWeight]], int, int | None]] = [
        ("enter", lambda w: w.qkv_proj, 1, None),
        ("query", lambda w: w.q_b_proj[:1], 1, None),
        ("out a", lambda w: w.o_a_proj, decoder.config.o_groups, decoder.config.o_lora_rank),
        ("out b", lambda w: w.o_b_proj, 1, None),
        ("head", lambda w: [decoder.head], 1, None),
    ]
    for name, get, groups, group in shapes:
        for count in tokens:
            rows = get(layers[2])
            x = torch.randn(count, rows[0].inner * groups, device=device).bfloat16()
            out = torch.full((count, sum(r.out for r in rows)), torch.nan, device=device)
            kernels.gemv(rows, (x.half(), x), out, group)
            dense = torch.cat([weight.dense().float() for weight in rows])
            if group is None:
                true = x.double() @ dense.double().T
            else:
                true = torch.einsum(
                    "ngk,grk->ngr", x.double().view(count, groups, -1), dense.double().view(groups, group, -1)
                ).flatten(1)
            error = ((out.double() - true).norm() / true.norm()).item()
            x_fp16 = x.half()
            us = graph_us([partial(kernels.gemv, get(w), (x_fp16, x), out, group) for w in layers[2:]])
            moved = sum(r.nbytes for w in layers[2:] for r in get(w)) / (len(layers) - 2)
            row = {
                "kind": "product",
                "shape": name,
                "tokens": count,
                "us": significant(us),
                "bytes": round(moved),
                "share_of_reading_speed": significant(moved / speed / (us * 1e-6)),
                "error": significant(error),
                "passed": error < 1e-4,
            }
            if group is None:
                weight = dense.bfloat16()
                copies = [weight.clone() for _ in range(max(2, (1 << 28) // weight.nbytes))]
                row["us_bf16_torch"] = significant(
                    graph_us([partial(torch.nn.functional.linear, x, w) for w in copies])
                )
            yield row


@torch.inference_mode()
def expert_rows(decoder: Decoder, tokens: Sequence[int], speed: float) -> Iterator[Row]:
    c = decoder.config
    kernels = decoder.kernels
    layers = decoder.layers[3:]
    assert isinstance(kernels, CudaBackend)
    for count in tokens:
        buffers_of_layers = [decoder.buffers(count, 4096) for _ in layers]
        used = 0
        for w, buffers in zip(layers, buffers_of_layers):
            for buffer in (
                buffers.x,
                buffers.router_gate_up,
                buffers.x_fp16,
                buffers.x_fp4_order,
                buffers.shared_hidden,
            ):
                assert buffer is not None
                buffer.normal_()
            kernels.route(
                buffers.router_gate_up[:, : c.n_routed_experts],
                w.router_bias,
                w.hash_table,
                buffers.token_ids,
                w.expert_addresses,
                buffers.topk_ids[0],
                buffers.topk_weights,
                buffers.pair_order,
                buffers.expert_slots,
                c.routed_scaling_factor,
                buffers.x_fp16,
                buffers.x_digits,
            )
            used += int((buffers.expert_slots[:, 2] > 0).sum())
        each = 3 * c.moe_intermediate_size * c.hidden_size * (0.5 + 1 / 32)
        for name, part, call in (
            ("open", 2 / 3, partial(kernels.gate_up, limit=c.swiglu_limit)),
            ("close", 1 / 3, kernels.down),
        ):
            us = graph_us([partial(call, w, buffers) for w, buffers in zip(layers, buffers_of_layers)])
            moved = used / len(layers) * each * part
            if name == "close":
                moved += c.moe_intermediate_size * c.hidden_size
            yield {
                "kind": "experts",
                "part": name,
                "tokens": count,
                "experts_used": significant(used / len(layers)),
                "us": significant(us),
                "bytes": round(moved),
                "share_of_reading_speed": significant(moved / speed / (us * 1e-6)),
            }
        del buffers_of_layers
        release_memory()


def bench_kernels(tokens: Sequence[int] = TOKENS, widths: Sequence[int] = (4096, 7168)) -> Iterator[Row]:
    device = torch.device("cuda")
    speed = reading_speed(device)
    common = {"bench": "kernels", **device_facts(device), "read_bytes_per_second": significant(speed)}
    config = preset("flash", 9, False)
    model = random_on_device(config, device)
    decoder = Decoder(model, filled_state(config, 1, 4096, device), fast=True)
    kernels = decoder.kernels
    assert isinstance(kernels, CudaBackend)
    decode_tokens = tuple(count for count in (1, 8, 32, 64) if count <= max(tokens))
    for rows in (
        boundary_rows(kernels, speed, tokens, widths),
        gemv_rows(decoder, decode_tokens, speed),
        expert_rows(decoder, decode_tokens, speed),
        bench_prefill_kernels(model, CHUNKS, speed),
    ):
        for row in rows:
            yield common | row
