"""Prepares a GPU engine before its first request: compiles kernels and records the decode graphs.

Prompts of a few lengths, several sequences in one chunk, mixed prefill/decode chunks and chunks at large positions
run once on memory that no request uses yet, so that every kernel variant is compiled (Triton and NVRTC keep theirs on
disk). Then the decode graph of every batch size and context length is recorded; with speculation, steps of draft tokens
and MTP steps as well. Graphs of steps with captures or edits are recorded when a pattern occurs for the second time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from birkhoff.config import PAGE_TOKENS
from birkhoff.engine.cuda_graphs import CONTEXTS, CudaGraphs
from birkhoff.engine.draft_chain import DraftChain
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import Snapshot, State
from birkhoff.model.transformer import Transformer

PROMPT_LENGTHS = (2, 9, 20, 40, 100, 160, 300, 700, 1300, 2100, 3000, 4096, 8192)
COMPILE_THREADS = 8
CHUNK = 130  # tokens of the chunks at large positions

Progress = Callable[[int, int], None]


def warm_up(
    model: Transformer,
    state: State,
    graphs: CudaGraphs,
    max_batch_tokens: int,
    progress: Progress | None = None,
    chain: DraftChain | None = None,
) -> float:
    """Run every warm-up batch and record the graphs; returns the seconds it took.

    `progress` is called with (done, total). `chain` drafts with the MTP block. Must run before the first request: pages
    and slots are overwritten."""
    started = time.perf_counter()
    batches = list(
        warm_up_batches(graphs.scratch_slot, graphs.max_context, max_batch_tokens, state.num_pages)
    )
    shapes = list(graph_shapes(graphs))
    mtp_rows = [] if chain is None else sorted({rows for rows, _ in shapes})
    total = len(batches) + len(shapes) + len(mtp_rows)
    with torch.inference_mode():
        state.give_pages(graphs.scratch_slot, list(range(min(state.num_pages, state.page_table.shape[1]))))
        if state.device.type == "cuda":
            _compile_parts(model, state, graphs.scratch_slot, [len(chunk[0].token_ids) for chunk in batches])
        for done, chunks in enumerate(batches):
            if progress is not None:
                progress(done, total)
            batch = Batch.of(chunks, state.device)
            if chunks[0].stop >= PAGE_TOKENS and chunks[0].start == 0:  # as for the prefix cache
                state.watched[chunks[0].slot] = [Snapshot(PAGE_TOKENS)]
            hidden, streams = model.run(batch, state, NoTap())
            state.watched.clear()
            model.logits(hidden[-1:])
            if chain is not None:
                model.mtp_prefill(streams, batch, state)
        state.page_table.zero_()
        for done, (rows, context) in enumerate(shapes, start=len(batches)):
            if progress is not None:
                progress(done, total)
            graphs.prepare(rows, context)
        for done, rows in enumerate(mtp_rows, start=len(batches) + len(shapes)):
            if progress is not None:
                progress(done, total)
            assert chain is not None
            chain.prepare(rows)
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)
    if progress is not None:
        progress(total, total)
    return time.perf_counter() - started


def _compile_parts(model: Transformer, state: State, slot: int, lengths: Sequence[int]) -> None:
    """Run attention, experts, mixers and head in threads of their own, so that their kernels compile concurrently.

    The results are discarded; whatever is compiled here is found compiled by the batches that follow."""
    device, config = state.device, model.config
    kinds = {
        (block.attn.ratio, block.ffn.gate.bias is None): layer for layer, block in enumerate(model.blocks())
    }

    def run(length: int, part: Callable[[torch.Tensor, torch.Tensor, Batch], object]) -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(device)):
            batch = Batch.of([SequenceChunk(slot, 0, [0] * length)], device)
            streams = torch.ones(
                length, config.hc_mult, config.hidden_size, device=device, dtype=model.numerics.dtype
            )
            part(streams[:, 0].contiguous(), streams, batch)
            torch.cuda.current_stream().synchronize()

    def attention(layer: int) -> Callable[[torch.Tensor, torch.Tensor, Batch], object]:
        block = model.blocks()[layer]
        return lambda x, _, batch: block.attn(x, batch, model.rope.step(batch.positions), state.at(layer))

    def experts(layer: int) -> Callable[[torch.Tensor, torch.Tensor, Batch], object]:
        return lambda x, _, batch: model.blocks()[layer].ffn(x, batch, NoTap())

    def mixers(_x: torch.Tensor, streams: torch.Tensor, _batch: Batch) -> None:
        mixer = model.blocks()[0].hc_attn
        u, _, post, mix = mixer.read(streams)
        mixer.write(streams, u, post, mix)
        model.logits(model.norm(model.hc_head(streams)[0][-1:]))

    parts = [mixers, *(make(layer) for layer in kinds.values() for make in (attention, experts))]
    chosen = sorted({max(lengths), min(lengths, key=lambda n: abs(n - 300)), min(lengths)}, reverse=True)
    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(COMPILE_THREADS, "birkhoff-compile") as pool:
        for done in [pool.submit(run, length, part) for length in chosen for part in parts]:
            done.result()


def warm_up_batches(
    scratch: int, max_context: int, max_batch_tokens: int, num_pages: int
) -> Iterator[list[SequenceChunk]]:
    """Chunks of token 0 for slot `scratch`, alone and beside slots 0 and 1."""
    reach = min(max_context, num_pages * PAGE_TOKENS)
    longest = min(max_batch_tokens, reach)
    for length in sorted({*(n for n in PROMPT_LENGTHS if n < longest), longest}):
        yield [SequenceChunk(scratch, 0, [0] * length)]
    if scratch > 1 and longest >= 64:
        yield [SequenceChunk(scratch, 0, [0] * 33), SequenceChunk(0, 0, [0] * 24)]
        yield [SequenceChunk(0, 40, [0]), SequenceChunk(1, 57, [0]), SequenceChunk(scratch, 0, [0] * 50)]
    position = 4096
    while position + CHUNK <= reach and longest >= CHUNK:
        yield [SequenceChunk(scratch, position, [0] * CHUNK)]
        position *= 2


def graph_shapes(graphs: CudaGraphs) -> Iterator[tuple[int, int]]:
    """Rows and context of the graphs that are recorded at load: `scratch` is also the number of request slots, and each
    request may have draft tokens."""
    contexts = sorted({min(context, graphs.max_context) for context in CONTEXTS})
    most = graphs.scratch_slot * (1 + graphs.decoder.drafts)
    largest = next((rows for rows in graphs.row_sizes if rows >= most), graphs.row_sizes[-1])
    for rows in graphs.row_sizes:
        if rows <= largest:
            for context in contexts:
                yield rows, context
