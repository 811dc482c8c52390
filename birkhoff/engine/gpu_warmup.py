"""Prepares a GPU engine before its first request: compiles kernels and records the decode graphs.

Prompts of a few lengths, several sequences in one chunk, mixed prefill/decode chunks and chunks at large positions
run once on memory that no request uses yet, so that every kernel variant is compiled (Triton and NVRTC keep theirs on
disk). Then the decode graph of every batch size is recorded for short contexts; graphs of longer contexts are
recorded when they are first needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from birkhoff.config import PAGE_TOKENS
from birkhoff.engine.cuda_graphs import CONTEXTS, ROWS, CudaGraphs
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import Snapshot, State
from birkhoff.model.transformer import Transformer

PROMPT_LENGTHS = (2, 9, 20, 40, 100, 160, 300, 700, 1300, 2100, 3000, 4096, 8192)
GRAPH_CONTEXTS = 2  # recorded at load: the first entries of CONTEXTS
CHUNK = 130  # tokens of the chunks at large positions

Progress = Callable[[int, int], None]


def warm_up(
    model: Transformer,
    state: State,
    graphs: CudaGraphs,
    max_batch_tokens: int,
    progress: Progress | None = None,
) -> float:
    """Run every warm-up batch and record the graphs; returns the seconds it took.

    `progress` is called with (done, total). Must run before the first request: pages and slots are overwritten."""
    started = time.perf_counter()
    batches = list(
        warm_up_batches(graphs.scratch_slot, graphs.max_context, max_batch_tokens, state.num_pages)
    )
    shapes = list(graph_shapes(graphs))
    total = len(batches) + len(shapes)
    with torch.inference_mode():
        state.give_pages(graphs.scratch_slot, list(range(min(state.num_pages, state.page_table.shape[1]))))
        for done, chunks in enumerate(batches):
            if progress is not None:
                progress(done, total)
            batch = Batch.of(chunks, state.device)
            if chunks[0].stop >= PAGE_TOKENS and chunks[0].start == 0:  # as for the prefix cache
                state.watched[chunks[0].slot] = [Snapshot(PAGE_TOKENS)]
            hidden, _ = model.run(batch, state, NoTap())
            state.watched.clear()
            model.logits(hidden[-1:])
        state.page_table.zero_()
        for done, (rows, context) in enumerate(shapes, start=len(batches)):
            if progress is not None:
                progress(done, total)
            graphs.prepare(rows, context)
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)
    if progress is not None:
        progress(total, total)
    return time.perf_counter() - started


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
    """Rows and context of the graphs that are recorded at load: `scratch` is also the number of request slots."""
    contexts = sorted({min(context, graphs.max_context) for context in CONTEXTS[:GRAPH_CONTEXTS]})
    largest = next((rows for rows in ROWS if rows >= graphs.scratch_slot), ROWS[-1])
    for rows in ROWS:
        if rows <= largest:
            for context in contexts:
                yield rows, context
