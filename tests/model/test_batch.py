"""`Batch`: every token of every chunk has exactly one row, and groups are rectangles."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.model.batch import Batch, SequenceChunk


@st.composite
def steps(draw) -> list[SequenceChunk]:
    count = draw(st.integers(1, 9))
    pieces = []
    for slot in range(count):
        start, length = draw(st.sampled_from([0, 0, 3, 8, 100])), draw(st.sampled_from([1, 1, 1, 2, 5, 9]))
        pieces.append(
            SequenceChunk(slot, start, [1000 * slot + start + i for i in range(length)])
        )  # a token encodes its slot and position
    return draw(st.permutations(pieces))


@given(pieces=steps())
def test_every_token_has_one_row_at_the_index_of_its_chunk(pieces):
    batch = Batch.of(pieces)
    assert batch.num_tokens == sum(len(p.token_ids) for p in pieces) == len(batch.positions)
    assert sorted(p.slot for p in batch.chunks) == sorted(p.slot for p in pieces)
    for piece, offset, last in zip(batch.chunks, batch.offsets, batch.last_rows(), strict=True):
        rows = slice(offset, offset + len(piece.token_ids))
        assert batch.token_ids[rows].tolist() == list(piece.token_ids)
        assert batch.positions[rows].tolist() == list(range(piece.start, piece.stop))
        assert last == rows.stop - 1


@given(pieces=steps())
def test_groups_are_rectangles_that_cover_the_rows_in_order(pieces):
    batch, row, seen = Batch.of(pieces), 0, []
    for group in batch.groups:
        assert group.rows == slice(row, row + group.size * group.length)
        row = group.rows.stop
        assert group.length == 1 or len(set(group.starts)) == 1
        assert group.view(batch.positions).tolist() == group.positions().tolist()
        assert group.first.tolist() == list(group.starts) and group.last_position == int(
            group.positions().max()
        )
        assert group.view(batch.token_ids)[:, 0].tolist() == [
            1000 * s + f for s, f in zip(group.slots.tolist(), group.starts)
        ]
        seen += group.slots.tolist()
    assert row == batch.num_tokens and sorted(seen) == sorted(p.slot for p in pieces)
    # Equal shapes share a group, and all single tokens do whatever their positions.
    keys = {(len(p.token_ids), p.start if len(p.token_ids) > 1 else 0) for p in pieces}
    assert len(batch.groups) == len(keys)


def test_decoding_sequences_form_one_group_whatever_their_positions():
    batch = Batch.of([SequenceChunk(slot, 10 * slot, [slot]) for slot in range(5)])
    (group,) = batch.groups
    assert group.starts == (0, 10, 20, 30, 40) and group.length == 1
    later = group.advanced([1, 3])
    assert later.starts == (11, 31) and later.slots.tolist() == [1, 3] and later.first.tolist() == [11, 31]


def test_whole_sequences_start_at_zero_one_slot_each():
    batch = Batch.whole(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 10] and batch.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert [p.slot for p in batch.chunks] == [0, 1] and batch.last_rows() == [2, 5]
    assert Batch.whole(torch.tensor([4])).token_ids.tolist() == [4]
