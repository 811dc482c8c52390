"""Kernels of a prompt, one by one, on a GPU: some rows checked against their plain twins, then all of them timed.

    product    the FP8 products of a layer, the grouped one among them, beside bfloat16 `torch` products
    experts    FP4 gate and up, and down, over tokens sorted by expert; uniform routing and a skewed one
    streams    write, mix and read of a boundary
    attention  a window alone, all entries of HCA, 512 listed entries of CSA
    indexer    scores and choice of 512 among the entries of a context

Rows carry the operations and bytes that must be spent, and what share of the device's measured product and reading
speeds that is: the larger of the two says what bounds a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from birkhoff.bench.decode import graph_us, seconds
from birkhoff.bench.report import significant
from birkhoff.config import V4Config
from birkhoff.kernels.attend import TopkIndices
from birkhoff.kernels.attend import reference as plain_attend
from birkhoff.kernels.experts import reference as plain_experts
from birkhoff.kernels.index import reference as plain_index
from birkhoff.kernels.mhc import reference as plain_mhc
from birkhoff.model.attention import Attention
from birkhoff.model.moe import MoE
from birkhoff.model.transformer import Transformer

Row = dict[str, Any]
CHUNKS = (2048, 4096, 8192)
BOUNDARY_US = 300  # at 8,192 tokens
CHECKED = 48  # rows that are compared with the plain twin


def product_speed(device: torch.device) -> float:
    """Operations a second of a large bfloat16 product, best of several."""
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    torch.mm(a, b)
    return 2 * 8192**3 / min(seconds(lambda: torch.mm(a, b), 10))


def error_of(mine: torch.Tensor, true: torch.Tensor) -> float:
    return ((mine.double() - true.double()).norm() / true.double().norm()).item()


class Meter:
    """Times calls and puts them beside what the device can do."""

    def __init__(self, product: float, reading: float):
        self.product = product
        self.reading = reading

    def row(
        self,
        what: Row,
        call: Callable[[], Any],
        operations: float,
        moved: float,
        error: float,
        most: float,
        others: Sequence[tuple[dict[str, int], Callable[[], Any]]] = (),
    ) -> Row:
        """`others` are the same call with other tiles: their times say whether the chosen ones are right."""
        us = self.us(call)
        tried = [shape | {"us": self.us_if_it_fits(other)} for shape, other in others]
        return (
            what
            | ({"other_tiles": tried} if tried else {})
            | {
                "us": significant(us),
                "operations": significant(operations),
                "bytes": round(moved),
                "share_of_product_speed": significant(operations / self.product / (us * 1e-6)),
                "share_of_reading_speed": significant(moved / self.reading / (us * 1e-6)),
                "error": significant(error),
                "passed": error < most,
            }
        )

    def us_if_it_fits(self, call: Callable[[], Any]) -> float | None:
        from triton.runtime.errors import OutOfResources

        try:
            return significant(self.us(call))
        except OutOfResources:
            return None

    def us(self, call: Callable[[], Any]) -> float:
        call()
        spans = sorted(seconds(call, 9))
        return spans[len(spans) // 2] * 1e6


def product_rows(model: Transformer, chunks: Sequence[int], meter: Meter) -> Iterator[Row]:
    from birkhoff.kernels.linear.prefill import packed_linear

    attention = model.layers[2].attn
    assert isinstance(attention, Attention)
    c, device = model.config, model.embed.device
    shapes = (
        ("query latent", attention.wq_a, None),
        ("query", attention.wq_b, None),
        ("out a", attention.wo_a, c.o_lora_rank),
        ("out b", attention.wo_b, None),
    )
    for name, layer, group in shapes:
        rows = layer.packed_weight()
        groups = 1 if group is None else rows.out // group
        dense = rows.dense().bfloat16()
        for count in chunks:
            x = torch.randn(count, rows.inner * groups, device=device).bfloat16()
            few = x[:CHECKED].double().view(CHECKED, groups, -1)
            true = torch.einsum("ngk,grk->ngr", few, dense.double().view(groups, -1, rows.inner)).flatten(1)
            call = partial(packed_linear, x, rows, group)
            operations = 2.0 * count * rows.out * rows.inner
            moved = rows.nbytes + x.nbytes + 2 * count * rows.out
            what = {"kind": "many", "kernel": "product", "shape": name, "tokens": count}
            shapes_tried = [
                {"TOKENS": tokens, "ROWS": 128, "INNER": inner, "num_warps": 8, "num_stages": stages}
                for tokens, inner, stages in ((128, 128, 4), (128, 64, 4), (64, 128, 4))
            ]
            others = [(shape, partial(packed_linear, x, rows, group, None, shape)) for shape in shapes_tried]
            row = meter.row(what, call, operations, moved, error_of(call()[:CHECKED], true), 5e-3, others)
            if group is None:
                plain = sorted(seconds(lambda x=x, w=dense: torch.nn.functional.linear(x, w), 9))[4]
                row["us_bf16_torch"] = significant(plain * 1e6)
            yield row


def expert_rows(model: Transformer, chunks: Sequence[int], meter: Meter) -> Iterator[Row]:
    from birkhoff.kernels.experts import prefill

    c, moe = model.config, model.layers[3].ffn
    assert isinstance(moe, MoE)
    experts, device = moe.experts, model.embed.device
    stack, limit = experts.stack(), c.swiglu_limit
    each = 3 * c.moe_intermediate_size * c.hidden_size
    for skewed in (False, True):
        for count in chunks:
            x = torch.randn(count, c.hidden_size, device=device).to(model.numerics.dtype)
            logits = torch.randn(count, c.n_routed_experts, device=device)
            if skewed:
                logits -= 0.5 * torch.arange(1, c.n_routed_experts + 1, device=device).log()
            bias = torch.zeros(c.n_routed_experts, device=device)
            ids, weights = plain_experts.route(
                logits, bias, None, c.num_experts_per_tok, c.routed_scaling_factor
            )
            call = partial(prefill.experts, x, ids, weights, stack, limit, None)
            true = plain_experts.experts(x[:CHECKED], ids[:CHECKED], weights[:CHECKED], stack, limit, None)
            operations = 2.0 * each * count * c.num_experts_per_tok
            used = len(ids.unique())
            moved = used * each * (0.5 + 1 / 32) + 4 * x.nbytes
            what = {
                "kind": "many",
                "kernel": "experts",
                "tokens": count,
                "skewed": skewed,
                "experts_used": used,
                "block": prefill.block_size(ids.numel(), c.n_routed_experts),
            }
            given = (x, ids, weights, stack, limit, None)
            others = [
                ({"block": size}, partial(prefill.experts, *given, None, size)) for size in prefill.BLOCKS[1:]
            ]
            yield meter.row(what, call, operations, moved, error_of(call()[:CHECKED], true), 1e-2, others)


def stream_rows(config: V4Config, chunks: Sequence[int], meter: Meter, device: torch.device) -> Iterator[Row]:
    """A boundary as a prompt meets it: write, then read; the norm of the input is a launch of its own."""
    from birkhoff.kernels.mhc import decode as mhc
    from birkhoff.kernels.mhc import prefill

    width = config.hidden_size
    iters = config.hc_sinkhorn_iters
    eps = config.hc_eps
    for count in chunks:
        streams, y = (torch.randn(count, *shape, width, device=device).bfloat16() for shape in ((4,), ()))
        post = torch.rand(count, 4, device=device)
        mix = torch.rand(count, 4, 4, device=device) / 4
        fn = torch.randn(24, 4 * width, device=device) * (4 * width) ** -0.5
        made = prefill.prepare(fn, streams.dtype)  # once, as a model does
        base = torch.randn(24, device=device)
        scale = torch.rand(3, device=device)

        def boundary(
            part=slice(None), streams=streams, y=y, post=post, mix=mix, fn=made, base=base, scale=scale
        ):
            written = mhc.write(streams[part], y[part], post[part], mix[part])
            return prefill.read_rows(written, fn, base, scale, iters, eps, eps)

        def in_pieces(rows: int, count=count, boundary=boundary) -> None:
            """A piece's streams may still be in L2 when they are read again."""
            for start in range(0, count, rows):
                boundary(slice(start, start + rows))

        few = plain_mhc.write(streams[:CHECKED], y[:CHECKED], post[:CHECKED], mix[:CHECKED])
        true = plain_mhc.read(few, fn, base, scale, iters, eps, eps)
        pairs = zip((part[:CHECKED] for part in boundary()), true)
        error = max(error_of(mine, true) for mine, true in pairs)
        moved = count * width * 2 * (4 + 1 + 4 + 4 + 4 + 1)
        what = {"kind": "many", "kernel": "streams", "tokens": count, "hidden": width}
        others = [({"rows_at_once": rows}, partial(in_pieces, rows)) for rows in (512, 1024, 2048)]
        row = meter.row(what, boundary, 2.0 * count * 24 * 4 * width, moved, error, 5e-3, others)
        us = graph_us([boundary] * 4)  # as in a chunk, where launches are waiting; row has them one by one
        row |= {
            "us_launched": row["us"],
            "us": significant(us),
            "share_of_reading_speed": significant(moved / meter.reading / (us * 1e-6)),
        }
        if count == 8192:
            row |= {"at_most_us": BOUNDARY_US, "passed": row["passed"] and row["us"] <= BOUNDARY_US}
        yield row


def attention_rows(
    config: V4Config, chunks: Sequence[int], meter: Meter, device: torch.device
) -> Iterator[Row]:
    from birkhoff.kernels.attend.prefill import attend

    c, window = config, config.sliding_window
    for count in chunks:
        context = 2 * count
        queries = torch.randn(1, count, c.num_attention_heads, c.head_dim, device=device).bfloat16()
        recent = torch.randn(1, window - 1 + count, c.head_dim, device=device).bfloat16()
        sink = torch.randn(c.num_attention_heads, device=device)
        oldest = torch.zeros(1, dtype=torch.long, device=device)
        for name, ratio in (("window", 0), ("all entries", 128), ("listed entries", 4)):
            entries = chosen = None
            seen = window
            if ratio:
                entries = torch.randn(1, context // ratio, c.head_dim, device=device).bfloat16()
                counts = ((torch.arange(count, device=device) + count + 1) // ratio).int().unsqueeze(0)
                chosen = TopkIndices(counts)
                seen += int(counts.float().mean())
            if ratio == 4:
                ranks = torch.rand(1, count, context // 4, device=device).argsort(-1)[..., : c.index_topk]
                chosen = TopkIndices(counts.clamp_max(c.index_topk), ranks.sort(-1).values.int())
                seen = window + c.index_topk
            given = (entries, chosen, sink, window, c.head_dim**-0.5)
            call = partial(attend, queries, recent, oldest, *given)
            part = None if chosen is None else TopkIndices(chosen.counts[:, :CHECKED], _first(chosen.indices))
            few = (queries[:, :CHECKED], recent[:, : window - 1 + CHECKED], oldest, entries, part, *given[2:])
            error = error_of(call()[:, :CHECKED], plain_attend.attend(*few))
            operations = 4.0 * count * c.num_attention_heads * seen * c.head_dim
            what = {
                "kind": "many",
                "kernel": "attention",
                "keys": name,
                "tokens": count,
                "keys_a_query": seen,
            }
            tiles = [
                {"HEADS": heads, "KEYS": keys, "num_warps": warps, "num_stages": stages}
                for heads, keys, warps, stages in (
                    (64, 32, 8, 2),
                    (64, 32, 8, 3),
                    (32, 32, 4, 2),
                    (32, 64, 4, 2),
                )
            ]
            others = [(shape, partial(attend, queries, recent, oldest, *given, shape)) for shape in tiles]
            yield meter.row(what, call, operations, 2.0 * queries.nbytes, error, 2e-2, others)


def _first(numbers: torch.Tensor | None) -> torch.Tensor | None:
    return None if numbers is None else numbers[:, :CHECKED]


def index_rows(config: V4Config, chunks: Sequence[int], meter: Meter, device: torch.device) -> Iterator[Row]:
    from birkhoff.kernels.index.prefill import index_topk

    c = config
    for count in chunks:
        for context in (2 * count, 32768):
            entries = context // 4
            queries = torch.randn(1, count, c.index_n_heads, c.index_head_dim, device=device).bfloat16()
            keys = torch.randn(1, entries, c.index_head_dim, device=device).bfloat16()
            weights = torch.randn(1, count, c.index_n_heads, device=device)
            counts = ((torch.arange(count, device=device) + context - count + 1) // 4).unsqueeze(0)
            call = partial(index_topk, queries, keys, weights, counts, c.index_topk)
            true = plain_index.index_topk(
                queries[:, :CHECKED], keys, weights[:, :CHECKED], counts[:, :CHECKED], c.index_topk
            ).mask(entries)
            found = call()
            mine = TopkIndices(found.counts[:, :CHECKED], _first(found.indices)).mask(entries)
            missed = 1 - (mine & true).sum().item() / true.sum().item()
            operations = 2.0 * float(counts.sum()) * c.index_n_heads * c.index_head_dim
            what = {"kind": "many", "kernel": "indexer", "tokens": count, "context": context}
            yield meter.row(what, call, operations, 4.0 * count * entries, missed, 1e-2)


@torch.inference_mode()
def bench_many(model: Transformer, chunks: Sequence[int], reading: float) -> Iterator[Row]:
    """`model` is packed, on a GPU, and has four layers at least."""
    device, config = model.embed.device, model.config
    meter = Meter(product_speed(device), reading)
    yield from product_rows(model, chunks, meter)
    yield from expert_rows(model, chunks, meter)
    yield from stream_rows(config, chunks, meter, device)
    yield from attention_rows(config, chunks, meter, device)
    yield from index_rows(config, chunks, meter, device)
