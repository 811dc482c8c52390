"""The expert store: at any time, every address in the table is that of a complete expert with the right contents.

The tests use their own copy stream, which moves a few bytes at a time on request, so that the state in the middle of a
copy can be inspected. It also tracks which slots a step may still read.
"""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.offload.copy_stream import HostCopy
from birkhoff.offload.expert_layout import ALIGNMENT, PackedExpertLayout
from birkhoff.offload.expert_store import ExpertStore
from tests.models import TINY, variant
from tests.sizes import scaled

SMALL = variant(hidden_size=32, moe_intermediate_size=32)
LAYERS, EXPERTS = 3, 5
ALL_EXPERTS = [(layer, number) for layer in range(LAYERS) for number in range(EXPERTS)]


class SlowCopy(HostCopy):
    """Copies in stream order, a few bytes at a time; `wait_current_stream` holds later ones until `steps_end`."""

    def __init__(self):
        self.queue, self.begun, self.over, self.fences = [], 0, 0, 0

    def copy(self, target, source):
        self.queue.append(["copy", target, source, 0])
        self.begun += 1

    def record_event(self):
        return self.begun

    def is_complete(self, event):
        return self.over >= event

    def synchronize(self, event):
        while not self.is_complete(event):
            self.steps_end()
            self.move(1 << 20)

    wait_event = synchronize

    def wait_current_stream(self):
        self.queue.append(["fence"])

    def steps_end(self):
        """All launched work is complete: waiting copies may proceed."""
        self.queue = [item for item in self.queue if item[0] == "copy"]

    def move(self, count):
        """Copy the next `count` bytes, up to the next wait."""
        while count and self.queue and self.queue[0][0] == "copy":
            _, target, source, done = item = self.queue[0]
            now = min(count, target.numel() - done)
            target[done : done + now] = source[done : done + now]
            item[3], count = done + now, count - now
            if item[3] == target.numel():
                self.queue.pop(0)
                self.over += 1


def filled(resident, spare=2, copy_stream=None):
    """A store with random contents, and the contents of each expert."""
    store = ExpertStore(PackedExpertLayout.of(SMALL), resident, spare=spare, copy_stream=copy_stream)
    store.slots.fill_(0xAA)
    store.host_slots.fill_(0xBB)
    truth = {}
    g = torch.Generator().manual_seed(0)
    for expert in ALL_EXPERTS:
        for part, dtype in zip(store.home_parts(expert), store.layouts[0].dtypes):
            low = -128 if dtype is torch.int8 else 0
            part.copy_(torch.randint(low, low + 256, part.shape, generator=g).to(dtype))
        truth[expert] = [part.clone() for part in store.home_parts(expert)]
    return store, truth


def read(store, expert):
    """What a kernel reads at the addresses of the table."""
    layer, index = expert
    parts = []
    for address, (rows, columns), dtype in zip(
        store.table[layer, index].tolist(), store.layouts[0].shapes, store.layouts[0].dtypes
    ):
        data = bytearray(ctypes.string_at(address, rows * columns))
        parts.append(torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(rows, columns))
    return parts


def slot_owners(store):
    """The expert in every slot of "device" and "host", None if free; no slot may have two."""
    owners = {"device": dict.fromkeys(store._free), "host": dict.fromkeys(store._host_free)}
    uses = [("device" if on_device else "host", slot, e) for e, (on_device, slot) in store._homes.items()]
    uses += [("device", cached.slot, cached.expert) for cached in store._cached.values()]
    for swap in store._swaps:
        uses += [("device", swap.slot, swap.arriving), ("host", swap.host_slot, swap.leaving)]
    for side, slot, expert in uses:
        assert slot not in owners[side], f"two experts in {side} slot {slot}"
        owners[side][slot] = expert
    return owners


def check(store, truth):
    owners = slot_owners(store)
    assert len(owners["device"]) == len(store.slots) and len(owners["host"]) == len(store.host_slots), (
        "no slot is lost"
    )
    assert len({int(row[0]) for row in store.table.view(-1, 4)}) == len(ALL_EXPERTS), (
        "an address belongs to one expert"
    )
    assert store.resident().tolist() == [
        [not store.is_cold((layer, index)) for index in range(EXPERTS)] for layer in range(LAYERS)
    ]
    for expert in ALL_EXPERTS:
        for seen, true in zip(read(store, expert), truth[expert]):
            assert torch.equal(seen, true), f"{expert} has wrong contents"
        assert all(torch.equal(a, b) for a, b in zip(store.home_parts(expert), truth[expert]))


def resident(count, seed=0):
    chosen = torch.randperm(LAYERS * EXPERTS, generator=torch.Generator().manual_seed(seed))[:count]
    return torch.zeros(LAYERS * EXPERTS, dtype=torch.bool).index_fill_(0, chosen, True).view(LAYERS, EXPERTS)


def test_a_record_fits_every_part_at_aligned_offsets():
    for config in (SMALL, TINY, variant(hidden_size=96, moe_intermediate_size=32)):
        record = PackedExpertLayout.of(config)
        parts = record.parts(torch.arange(record.nbytes, dtype=torch.int64).to(torch.uint8))
        assert [tuple(part.shape) for part in parts] == list(record.shapes)
        assert all(offset % ALIGNMENT == 0 for offset in (*record.offsets, record.nbytes))
        ends = [offset + part.nbytes for offset, part in zip(record.offsets, parts)]
        assert all(end <= begin for end, begin in zip(ends, (*record.offsets[1:], record.nbytes)))


def test_an_expert_of_v4_flash_is_13_37_megabytes():
    from birkhoff.config import V4Config

    assert PackedExpertLayout.of(V4Config()).nbytes == 13_369_344


@pytest.mark.parametrize("count", [0, 1, 7, 14, 15])
def test_every_share_can_be_built(count):
    store, truth = filled(resident(count))
    check(store, truth)
    assert int(store.resident().sum()) == count
    assert store.spare == (2 if count < 15 else 0), "no spare slots when everything is on the device"


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["swap", "acquire", "release", "publish", "publish", "wait", "move", "move", "steps_end"]
        ),
        st.integers(0, 10**6),
    ),
    max_size=60,
)


@settings(max_examples=scaled(600, 80), deadline=None)
@given(st.integers(0, 15), st.integers(1, 4), OPERATIONS)
def test_no_sequence_of_moves_exposes_a_wrong_or_incomplete_expert(count, spare, operations):
    copy_stream = SlowCopy()
    store, truth = filled(resident(count, spare), spare, copy_stream)
    references = []
    for what, seed in operations:
        pick = random.Random(seed)
        hot = [expert for expert in ALL_EXPERTS if not store.is_cold(expert)]
        cold = [expert for expert in ALL_EXPERTS if store.is_cold(expert)]
        if what == "swap" and hot and cold:
            store.swap(pick.choice(cold), pick.choice(hot))
        elif what == "acquire" and cold:
            cached = store.acquire(pick.choice(cold))
            if cached is not None:
                references.append(cached)
        elif what == "release" and references:
            store.release(references.pop(pick.randrange(len(references))))
        elif what == "wait" and references:
            cached = pick.choice(references)
            store.wait([cached])
            assert all(torch.equal(a, b) for a, b in zip(store.cached_parts(cached), truth[cached.expert]))
        elif what == "publish":
            store.publish()
        elif what == "move":
            copy_stream.move(seed % (2 * store.slot_bytes))
        elif what == "steps_end":
            copy_stream.steps_end()
        check(store, truth)
        assert int(store.resident().sum()) == count, "a swap keeps the number of hot experts"
    store.publish(wait=True)
    check(store, truth)
    assert not store._moving and not store._swaps


def test_a_freed_slot_is_not_written_while_a_step_may_read_it():
    copy_stream = SlowCopy()
    store, truth = filled(resident(4), 1, copy_stream)
    hot = [expert for expert in ALL_EXPERTS if not store.is_cold(expert)]
    cold = [expert for expert in ALL_EXPERTS if store.is_cold(expert)]
    assert store.swap(cold[0], hot[0])
    old = store.table[hot[0]].clone()
    copy_stream.move(1 << 20)
    assert store.publish() == 1 and not store.is_cold(cold[0])
    assert store.swap(cold[1], hot[1]), "into the slot that the first swap freed"
    copy_stream.move(1 << 20)
    data = bytearray(ctypes.string_at(int(old[0]), truth[hot[0]][0].numel()))
    assert torch.equal(torch.frombuffer(data, dtype=torch.int8).view_as(truth[hot[0]][0]), truth[hot[0]][0])
    assert store.publish() == 0, "the copy waits for the step"
    copy_stream.steps_end()
    copy_stream.move(1 << 20)
    assert store.publish() == 1
    check(store, truth)


def test_a_released_copy_is_not_overwritten_while_a_step_may_read_it():
    copy_stream = SlowCopy()
    store, truth = filled(resident(4), 1, copy_stream)
    first, second = [expert for expert in ALL_EXPERTS if store.is_cold(expert)][:2]
    cached = store.acquire(first)
    store.wait([cached])
    store.release(cached)
    taken = store.acquire(second)
    assert taken.slot == cached.slot
    copy_stream.move(1 << 20)
    assert all(torch.equal(a, b) for a, b in zip(store.cached_parts(cached), truth[first])), (
        "a step may still be reading it"
    )
    copy_stream.steps_end()
    copy_stream.move(1 << 20)
    assert all(torch.equal(a, b) for a, b in zip(store.cached_parts(taken), truth[second]))
    check(store, truth)


def test_an_expert_in_a_swap_cannot_be_moved_again():
    copy_stream = SlowCopy()
    store, truth = filled(resident(6), 4, copy_stream)
    hot = [expert for expert in ALL_EXPERTS if not store.is_cold(expert)]
    cold = [expert for expert in ALL_EXPERTS if store.is_cold(expert)]
    assert store.swap(cold[0], hot[0])
    assert (
        not store.swap(cold[0], hot[1]) and not store.swap(cold[1], hot[0]) and store.acquire(cold[0]) is None
    )
    assert store.swap(cold[1], hot[1]), "other experts can be swapped"
    cached = store.acquire(cold[2])
    assert not store.swap(cold[2], hot[2]), "an expert with a cached copy in use cannot be swapped"
    store.release(cached)
    assert store.swap(cold[2], hot[2])
    store.publish(wait=True)
    assert [store.is_cold(expert) for expert in cold[:3] + hot[:3]] == [False] * 3 + [True] * 3
    check(store, truth)


def test_unused_copies_are_evicted_for_new_ones():
    store, truth = filled(resident(5), spare=2)
    cold = [expert for expert in ALL_EXPERTS if store.is_cold(expert)]
    first, second = store.acquire(cold[0]), store.acquire(cold[1])
    assert first is not None and second is not None and store.acquire(cold[2]) is None, (
        "both slots are in use"
    )
    store.wait([first, second])
    at = int(store.table[cold[0]][0])
    assert at == store.cached_parts(first)[0].data_ptr() != store.home_parts(cold[0])[0].data_ptr()
    again = store.acquire(cold[0])
    assert again is first and first.refcount == 2, "a second reference shares the copy"
    store.release(second)
    third = store.acquire(cold[2])
    assert third is not None and third.slot == second.slot, "the unused copy is evicted"
    assert int(store.table[cold[1]][0]) == store.home_parts(cold[1])[0].data_ptr(), (
        "the table points to the home again"
    )
    check(store, truth)


def test_reads_are_counted_once_per_step_and_expert():
    store, _ = filled(resident(5))
    store.count_reads(torch.tensor([[[0, 1], [1, 1]], [[4, 3], [4, 0]]], dtype=torch.int32), layer=1)
    store.count_reads(torch.tensor([[[2, 4]]]))
    assert store.read_counts.tolist() == [[0, 0, 1, 0, 1], [1, 1, 0, 0, 0], [1, 0, 0, 1, 1]]
