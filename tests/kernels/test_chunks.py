"""Prefill kernels that take the chunks of several sequences at once, compared with their plain twins."""

from __future__ import annotations

import pytest
import torch

from birkhoff.kernels.attend import TopkIndices
from birkhoff.kernels.attend import reference as plain_attend
from birkhoff.kernels.compress import reference as plain_compress
from birkhoff.kernels.rope import frequencies, phases
from birkhoff.kernels.row_index import RowIndex
from tests.interpreter import DEVICE
from tests.kernels.test_decode import assert_close, normal

from birkhoff.kernels.attend import prefill as attend  # isort: skip
from birkhoff.kernels.compress import RawRows, RingRows
from birkhoff.kernels.compress import prefill as compress

# (slot, start, stop): a fresh prompt, a chunk that continues one, a single token, and one longer than the ring
CHUNKS = [(2, 0, 9), (0, 5, 14), (3, 6, 7), (1, 3, 31)]
WINDOW, RING, SLOTS = 6, 8, 4


def rows_and_table() -> tuple[RowIndex, torch.Tensor]:
    table = torch.tensor([[3, 7], [0, 5], [6, 1], [2, 4]], device=DEVICE)
    return RowIndex.of(CHUNKS, DEVICE), table


def test_the_row_index_lists_slots_and_positions_of_all_chunks():
    rows, _ = rows_and_table()
    expected = [(slot, p, start, stop) for slot, start, stop in CHUNKS for p in range(start, stop)]
    actual = zip(*(t.tolist() for t in (rows.slots, rows.positions, rows.starts, rows.stops)))
    assert [*actual] == expected
    assert (rows.bases + rows.positions).tolist() == list(range(len(expected)))


@pytest.mark.parametrize("entries", ["none", "first", "listed"])
@pytest.mark.parametrize("width", [32, 24])
def test_attention_of_several_chunks_matches_the_reference(entries, width):
    rows, table = rows_and_table()
    n, heads = len(rows.slots), 5
    queries, keys = normal(1, n, heads, width), normal(2, n, width)
    ring, pages, sink = normal(3, SLOTS, RING, width), normal(4, 8, 4, width), normal(5, heads)
    finished = ((rows.positions + 1) // 4).to(torch.int32)
    selected = None
    if entries == "first":
        selected = TopkIndices(finished)
    elif entries == "listed":
        indices = torch.stack([torch.randperm(7)[:3].sort().values for _ in range(n)]).int().to(DEVICE)
        selected = TopkIndices(finished.clamp_max(3), indices)
    turn = phases(rows.positions, frequencies(12 if width == 24 else 8, 1e4).to(DEVICE))  # six pairs, or four
    arguments = (queries, keys, ring, pages, table, rows, selected, sink, WINDOW, 0.3, turn)
    assert_close(attend.attend_paged(*arguments), plain_attend.attend_paged(*arguments))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="compiled for one GPU, not interpreted")
@pytest.mark.parametrize("entries", ["none", "first", "listed"])
def test_attention_of_full_width_matches_the_reference(entries):
    """More rows than the GPU runs programs, with one tile of keys and with several."""
    rows = RowIndex.of([(2, 0, 300), (0, 140, 201), (3, 600, 601), (1, 77, 400)], DEVICE)
    n, heads, width, window, topk = len(rows.slots), 64, 512, 128, 40
    queries, keys = normal(1, n, heads, width).bfloat16(), normal(2, n, width).bfloat16()
    ring, pages = normal(3, SLOTS, window, width).bfloat16(), normal(4, 24, 32, width).bfloat16()
    table = torch.randperm(24, generator=torch.Generator().manual_seed(1)).view(SLOTS, 6).to(DEVICE)
    finished = ((rows.positions + 1) // 4).to(torch.int32)
    selected = None
    if entries == "first":
        selected = TopkIndices(finished, most=150)
    elif entries == "listed":
        few = [torch.randperm(max(int(count), topk))[:topk].sort().values for count in finished]
        selected = TopkIndices(finished.clamp_max(topk), torch.stack(few).int().to(DEVICE))
    turn = phases(rows.positions, frequencies(64, 1e4).to(DEVICE))
    arguments = (queries, keys, ring, pages, table, rows, selected, normal(5, heads), window, 0.04, turn)
    assert_close(attend.attend_paged(*arguments), plain_attend.attend_paged(*arguments), 0.02)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("strided", [False, True])
def test_blocks_of_several_chunks_are_compressed_like_the_reference(ratio, strided):
    chunks = [(slot, start * ratio // 4, stop * ratio // 4) for slot, start, stop in CHUNKS]
    if ratio == 128:
        chunks = [(0, 100, 130), (2, 0, 128), (1, 255, 256)]
    rows, width = RowIndex.of(chunks, DEVICE), 16
    row_width = (4 if ratio == 4 else 2) * width
    n = len(rows.slots)
    table = torch.arange(12, device=DEVICE).view(4, 3).flip(0)
    raw = normal(1, n, row_width + 5)[:, :row_width] if strided else normal(1, n, row_width)
    ape, norm = normal(2, ratio, row_width // 2), normal(3, width)
    ring = normal(4, SLOTS, 2 * ratio if ratio == 4 else ratio, row_width)
    blocks = phases(rows.positions // ratio * ratio, frequencies(8, 1e4).to(DEVICE))
    made = []
    for twin in (compress, plain_compress):
        pages = torch.zeros(12, 128 // ratio, width, device=DEVICE)
        other = torch.zeros(12, 128 // ratio, 2 * width, device=DEVICE)
        parts = [RawRows(raw, ape, norm, ring, pages)]
        if strided:  # a second compressor, of another width
            wide = normal(5, n, 2 * row_width), normal(6, ratio, row_width), normal(7, 2 * width)
            parts.append(RawRows(*wide, normal(8, *ring.shape[:2], 2 * row_width), other))
        twin.compress_blocks(parts, table, rows, blocks.cos, blocks.sin, 1e-6)
        assert bool(other.any()) == strided
        made.append(torch.cat((pages, other), dim=-1))
    assert (made[1] != 0).any(-1).sum() == sum(stop // ratio - start // ratio for _, start, stop in chunks)
    assert_close(*made)


@pytest.mark.parametrize("biased", [False, True])
def test_rows_are_stored_and_gathered_like_the_reference(biased):
    rows, _ = rows_and_table()
    width = 24
    values, old = normal(1, len(rows.slots), width), normal(2, SLOTS, RING, width)
    ape = normal(3, 4, width // 2) if biased else None
    rings, others = [], []
    for twin in (compress, plain_compress):
        ring = old.clone()
        more = normal(6, SLOTS, 2 * RING, 40), normal(7, SLOTS, RING, 16)
        parts = [RingRows(values, ring, ape), RingRows(normal(4, len(values), 40), more[0])]
        parts.append(RingRows(normal(5, len(values), 20)[:, :16], more[1], normal(9, 4, 8)))
        twin.store_rows(parts[: 3 if biased else 1], rows)
        rings.append(ring)
        others.append(more)
    assert_close(*rings)
    for actual, expected, before in zip(
        *others, (normal(6, SLOTS, 2 * RING, 40), normal(7, SLOTS, RING, 16))
    ):
        assert_close(actual, expected)
        assert torch.equal(actual, before) != biased
    assert (rings[0] != old).any(-1).sum() == sum(min(stop - start, RING) for _, start, stop in CHUNKS)
    wanted = [torch.tensor(column, device=DEVICE) for column in ([0, 0, 1, 3], [4, 5, 2, 6], [-1, 9, -1, 18])]
    gathered = [twin.gather_rows(values, old, *wanted, ape) for twin in (compress, plain_compress)]
    assert_close(*gathered)
    assert torch.equal(gathered[0][0], old[0, 4])
    none = [column[:0] for column in wanted]
    assert compress.gather_rows(values, old, *none, ape).shape == (0, width)
