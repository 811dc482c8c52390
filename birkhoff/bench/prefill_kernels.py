"""Single prefill kernels on a GPU: some rows checked against the reference twins, then all of them timed.

    product    the FP8 projections of a layer, including the grouped one, next to bfloat16 `torch` products
    experts    FP4 gate and up, and down, over tokens sorted by expert; uniform and skewed routing
    streams    write, mix and read of an mHC boundary
    attention  a window alone, all entries of HCA, 512 selected entries of CSA
    indexer    scores and top 512 among the entries of a context

Rows have the operations and bytes that a kernel needs and the achieved shares of the measured matmul speed and read
bandwidth; the larger share tells what bounds the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from birkhoff.bench.report import Row, significant
from birkhoff.bench.timing import cuda_seconds, graph_us, median
from birkhoff.config import V4Config
from birkhoff.kernels.attend import TopkIndices
from birkhoff.kernels.attend import reference as plain_attend
from birkhoff.kernels.experts import reference as plain_experts
from birkhoff.kernels.index import reference as plain_index
from birkhoff.kernels.mhc import reference as plain_mhc
from birkhoff.kernels.rope import frequencies, phases
from birkhoff.kernels.row_index import RowIndex
from birkhoff.model.attention import Attention
from birkhoff.model.moe import MoE
from birkhoff.model.transformer import Transformer

CHUNKS = (2048, 4096, 8192)
BOUNDARY_US = 300  # at 8,192 tokens
CHECKED = 48  # rows compared with the reference


def product_speed(device: torch.device) -> float:
    """Operations per second of a large bfloat16 matmul, best of several."""
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    torch.mm(a, b)
    return 2 * 8192**3 / min(cuda_seconds(lambda: torch.mm(a, b), 10))


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


class Meter:
    """Times calls and relates them to the measured speeds of the device."""

    def __init__(self, matmul: float, reading: float):
        self.matmul = matmul
        self.reading = reading

    def row(
        self,
        labels: Row,
        call: Callable[[], Any],
        operations: float,
        moved: float,
        error: float,
        tolerance: float,
        others: Sequence[tuple[dict[str, int], Callable[[], Any]]] = (),
    ) -> Row:
        """`others`: the same call with other tile sizes, to check that the default is the fastest."""
        us = self.us(call)
        other_tiles = [tile | {"us": self.us_or_none(other)} for tile, other in others]
        return (
            labels
            | ({"other_tiles": other_tiles} if other_tiles else {})
            | {
                "us": significant(us),
                "operations": significant(operations),
                "bytes": round(moved),
                "share_of_product_speed": significant(operations / self.matmul / (us * 1e-6)),
                "share_of_reading_speed": significant(moved / self.reading / (us * 1e-6)),
                "error": significant(error),
                "passed": error < tolerance,
            }
        )

    def us_or_none(self, call: Callable[[], Any]) -> float | None:
        from triton.runtime.errors import OutOfResources

        try:
            return significant(self.us(call))
        except OutOfResources:
            return None

    def us(self, call: Callable[[], Any]) -> float:
        return median(cuda_seconds(call, 9, warm=1)) * 1e6


def linear_rows(model: Transformer, chunks: Sequence[int], meter: Meter) -> Iterator[Row]:
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
            checked = x[:CHECKED].double().view(CHECKED, groups, -1)
            expected = torch.einsum(
                "ngk,grk->ngr", checked, dense.double().view(groups, -1, rows.inner)
            ).flatten(1)
            call = partial(packed_linear, x, rows, group)
            operations = 2.0 * count * rows.out * rows.inner
            moved = rows.nbytes + x.nbytes + 2 * count * rows.out
            labels = {"kind": "many", "kernel": "product", "shape": name, "tokens": count}
            tiles = [
                {"TOKENS": tokens, "ROWS": 128, "INNER": inner, "num_warps": 8, "num_stages": stages}
                for tokens, inner, stages in ((128, 128, 4), (128, 64, 4), (64, 128, 4))
            ]
            others = [(tile, partial(packed_linear, x, rows, group, None, tile)) for tile in tiles]
            row = meter.row(
                labels, call, operations, moved, relative_error(call()[:CHECKED], expected), 5e-3, others
            )
            if group is None:
                plain = median(cuda_seconds(partial(torch.nn.functional.linear, x, dense), 9))
                row["us_bf16_torch"] = significant(plain * 1e6)
            yield row


def expert_rows(model: Transformer, chunks: Sequence[int], meter: Meter) -> Iterator[Row]:
    from birkhoff.kernels.experts import prefill

    c, moe = model.config, model.layers[3].ffn
    assert isinstance(moe, MoE)
    experts, device = moe.experts, model.embed.device
    stack, limit = experts.stack(), c.swiglu_limit
    expert_elements = 3 * c.moe_intermediate_size * c.hidden_size
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
            expected = plain_experts.experts(
                x[:CHECKED], ids[:CHECKED], weights[:CHECKED], stack, limit, None
            )
            operations = 2.0 * expert_elements * count * c.num_experts_per_tok
            used = len(ids.unique())
            moved = used * expert_elements * (0.5 + 1 / 32) + 4 * x.nbytes
            labels = {
                "kind": "many",
                "kernel": "experts",
                "tokens": count,
                "skewed": skewed,
                "experts_used": used,
                "block": prefill.block_size(ids.numel(), c.n_routed_experts),
            }
            arguments = (x, ids, weights, stack, limit, None)
            others = [
                ({"block": size}, partial(prefill.experts, *arguments, None, size))
                for size in prefill.BLOCKS[1:]
            ]
            yield meter.row(
                labels, call, operations, moved, relative_error(call()[:CHECKED], expected), 1e-2, others
            )


def _boundary(write_inputs: Sequence[torch.Tensor], read_inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
    """Write of one sublayer and read of the next."""
    from birkhoff.kernels.mhc import decode, prefill

    write: Callable[..., torch.Tensor] = decode.write
    read: Callable[..., Sequence[torch.Tensor]] = prefill.read_rows
    return read(write(*write_inputs), *read_inputs)


def _boundary_in_blocks(write_inputs: Sequence[torch.Tensor], read_inputs: Sequence[Any], rows: int) -> None:
    """A boundary in blocks of `rows`, whose streams may still be in L2 when they are read again."""
    for start in range(0, len(write_inputs[0]), rows):
        _boundary([tensor[start : start + rows] for tensor in write_inputs], read_inputs)


def stream_rows(config: V4Config, chunks: Sequence[int], meter: Meter, device: torch.device) -> Iterator[Row]:
    """A boundary as in prefill: write, then read; the norm of the input is a separate launch."""
    from birkhoff.kernels.mhc import prefill

    width = config.hidden_size
    iters = config.hc_sinkhorn_iters
    eps = config.hc_eps
    for count in chunks:
        streams, y = (torch.randn(count, *tile, width, device=device).bfloat16() for tile in ((4,), ()))
        post = torch.rand(count, 4, device=device)
        mix = torch.rand(count, 4, 4, device=device) / 4
        fn = torch.randn(24, 4 * width, device=device) * (4 * width) ** -0.5
        split_fn = prefill.prepare(fn, streams.dtype)  # once per weight, as in a model
        base = torch.randn(24, device=device)
        scale = torch.rand(3, device=device)

        write_inputs = (streams, y, post, mix)
        read_inputs = (split_fn, base, scale, iters, eps, eps)
        boundary = partial(_boundary, write_inputs, read_inputs)

        checked = plain_mhc.write(streams[:CHECKED], y[:CHECKED], post[:CHECKED], mix[:CHECKED])
        expected = plain_mhc.read(checked, fn, base, scale, iters, eps, eps)
        pairs = zip((part[:CHECKED] for part in boundary()), expected)
        error = max(relative_error(selected, expected) for selected, expected in pairs)
        moved = count * width * 2 * (4 + 1 + 4 + 4 + 4 + 1)
        labels = {"kind": "many", "kernel": "streams", "tokens": count, "hidden": width}
        others = [
            ({"rows_at_once": rows}, partial(_boundary_in_blocks, write_inputs, read_inputs, rows))
            for rows in (512, 1024, 2048)
        ]
        row = meter.row(labels, boundary, 2.0 * count * 24 * 4 * width, moved, error, 5e-3, others)
        us = graph_us([boundary] * 4)  # as in a chunk, where launches are queued; the row has single launches
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
    from birkhoff.kernels.attend.prefill import attend_paged

    c, window = config, config.sliding_window
    table, sink = torch.zeros(1, 1, dtype=torch.long, device=device), torch.randn(c.num_attention_heads)
    ring = torch.randn(1, window, c.head_dim, device=device).bfloat16()
    for count in chunks:
        rows = RowIndex.of([(0, count, 2 * count)], device)
        queries = torch.randn(count, c.num_attention_heads, c.head_dim, device=device).bfloat16()
        keys = torch.randn(count, c.head_dim, device=device).bfloat16()
        turn = phases(rows.positions, frequencies(c.qk_rope_head_dim, c.rope_theta).to(device))
        for name, ratio in (("window", 0), ("all entries", 128), ("listed entries", 4)):
            pages = selected = part = None
            num_keys = window
            if ratio:
                pages = torch.randn(1, 2 * count // ratio, c.head_dim, device=device).bfloat16()
                counts = ((rows.positions + 1) // ratio).int()
                selected = TopkIndices(counts)
                num_keys += int(counts.float().mean())
            if selected is not None and ratio == 4:
                ranks = torch.rand(count, 2 * count // 4, device=device).argsort(-1)[..., : c.index_topk]
                selected = TopkIndices(selected.counts.clamp_max(c.index_topk), ranks.sort(-1).values.int())
                num_keys = window + c.index_topk
            if selected is not None:
                part = TopkIndices(selected.counts[:CHECKED], _first(selected.indices))
            constants = (sink.to(device), window, c.head_dim**-0.5)
            call = partial(attend_paged, queries, keys, ring, pages, table, rows, selected, *constants, turn)
            expected = plain_attend.attend_paged(
                queries[:CHECKED],
                keys[:CHECKED],
                ring,
                pages,
                table,
                RowIndex.of([(0, count, count + CHECKED)], device),
                part,
                *constants,
                turn.view(lambda each: each[:CHECKED]),
            )
            error = relative_error(call()[:CHECKED], expected)
            operations = 4.0 * count * c.num_attention_heads * num_keys * c.head_dim
            labels = {
                "kind": "many",
                "kernel": "attention",
                "keys": name,
                "tokens": count,
                "keys_a_query": num_keys,
            }
            yield meter.row(labels, call, operations, 2.0 * queries.nbytes, error, 2e-2)


def _first(indices: torch.Tensor | None) -> torch.Tensor | None:
    return None if indices is None else indices[:CHECKED]


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
            expected = plain_index.index_topk(
                queries[:, :CHECKED], keys, weights[:, :CHECKED], counts[:, :CHECKED], c.index_topk
            ).mask(entries)
            result = call()
            assert result.indices is not None
            selected = TopkIndices(result.counts[:, :CHECKED], result.indices[:, :CHECKED]).mask(entries)
            missed = 1 - (selected & expected).sum().item() / expected.sum().item()
            operations = 2.0 * float(counts.sum()) * c.index_n_heads * c.index_head_dim
            labels = {"kind": "many", "kernel": "indexer", "tokens": count, "context": context}
            yield meter.row(labels, call, operations, 4.0 * count * entries, missed, 1e-2)


@torch.inference_mode()
def bench_prefill_kernels(model: Transformer, chunks: Sequence[int], reading: float) -> Iterator[Row]:
    """All rows; `model` is packed, on a GPU, and has at least four layers."""
    device, config = model.embed.device, model.config
    meter = Meter(product_speed(device), reading)
    yield from linear_rows(model, chunks, meter)
    yield from expert_rows(model, chunks, meter)
    yield from stream_rows(config, chunks, meter, device)
    yield from attention_rows(config, chunks, meter, device)
    yield from index_rows(config, chunks, meter, device)
