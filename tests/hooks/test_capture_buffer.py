"""Rows out of a tray: everybody gets what he asked for, as he would from the sites themselves, in memory of his own."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.engine.host_copier import HostCopier
from birkhoff.hooks.capture_buffer import ALIGNED, ARENA_STEPS, GAP, CaptureBuffer, RowCopyPlan

ROWS = 5
KINDS = [((6,), torch.bfloat16), ((4, 6), torch.bfloat16), ((4,), torch.float32), ((3, 2), torch.float32)]
SITES = st.dictionaries(
    st.tuples(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), st.booleans()),
    st.sampled_from(KINDS),
    min_size=1,
)


def filled(sites, seed=0):
    """A tray and what was put in its columns."""
    tray = CaptureBuffer(ROWS, sites, torch.device("cpu"))
    g = torch.Generator().manual_seed(seed)
    held = {site: torch.randn(ROWS, *shape, generator=g).to(dtype) for site, (shape, dtype) in sites.items()}
    for site, rows in held.items():
        tray.site(site).copy_(rows)
    return tray, held


@given(sites=SITES, data=st.data())
def test_every_job_gets_the_rows_of_its_sites(sites, data):
    tray, held = filled(sites)
    wanted = [
        (row, data.draw(st.lists(st.sampled_from(sorted(sites)), unique=True, min_size=1)))
        for row in data.draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=6))
    ]
    cut = RowCopyPlan(tray, wanted)
    landed = HostCopier().copy(tray, cut)
    tray.data.fill_(255)  # the next step
    memory, all_rows = set(), []
    for number, (row, own) in enumerate(wanted):
        rows = landed(number)
        all_rows.append(rows)
        assert len(rows) == len(own)
        for site in own:
            after = [tensor for key, tensor in rows if key == site[0]]
            assert any(torch.equal(tensor, held[site][row : row + 1]) for tensor in after), site
        assert all(tensor.is_contiguous() and tensor.data_ptr() % ALIGNED == 0 for _, tensor in rows)
        storages = {tensor.untyped_storage().data_ptr() for _, tensor in rows}
        assert len(storages) == 1 and not storages & memory, "one block for a job, shared with nobody"
        memory |= storages
    assert cut.num_bytes <= tray.data.numel()


def test_what_lies_far_apart_is_copied_alone_and_small_gaps_along():
    wide = GAP // 2
    sites = {(("a", layer), False): ((wide,), torch.float32) for layer in range(6)}  # two gaps each
    tray, held = filled(sites)
    first, second, last = (("a", 0), False), (("a", 1), False), (("a", 5), False)
    cut = RowCopyPlan(tray, [(0, [first, last]), (0, [second])])
    assert [(start, stop) for start, stop, _ in cut.copies] == [(0, 4 * GAP), (10 * GAP, 12 * GAP)]
    assert cut.num_bytes == 6 * GAP
    landed = HostCopier().copy(tray, cut)
    assert [torch.equal(tensor, held[site][:1]) for site, (_, tensor) in zip((first, last), landed(0))] == [
        True,
        True,
    ]
    sites = {(("a", layer), False): ((8,), torch.float32) for layer in range(3)}
    tray, _ = filled(sites)
    assert (
        len(RowCopyPlan(tray, [(row, [(("a", 0), False), (("a", 2), False)]) for row in (0, 3)]).copies) == 1
    )


def test_page_locked_memory_goes_back_when_everybody_has_his_rows():
    tray, _ = filled({(("a", 0), False): KINDS[0]})
    cut, way_out = RowCopyPlan(tray, [(0, [(("a", 0), False)]), (1, [(("a", 0), False)])]), HostCopier()
    first, second = way_out.copy(tray, cut), way_out.copy(tray, cut)
    assert first._buffer is not second._buffer, "rows of two steps may be on their way"
    first(0)
    assert way_out._free == []
    first(1)
    assert way_out.copy(tray, cut)._buffer is first._buffer


def test_what_was_handed_out_stays_as_it_is_while_more_comes():
    site = (("a", 0), False)
    tray, _ = filled({site: KINDS[1]})
    cut, way_out = RowCopyPlan(tray, [(2, [site])]), HostCopier()
    given_out, true = [], []
    for step in range(2 * ARENA_STEPS + 1):
        tray.site(site).fill_(step)
        ((_, rows),) = way_out.copy(tray, cut)(0)
        given_out.append(rows)
        true.append(torch.full((1, 4, 6), float(step)))
    assert torch.equal(torch.cat(given_out).float(), torch.cat(true))
