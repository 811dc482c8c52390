"""Rows copied out of a capture buffer: each job gets the rows of its sites, unchanged, in unshared memory."""

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


def filled_buffer(sites, seed=0):
    """A capture buffer filled with random rows, and the rows by site."""
    buffer = CaptureBuffer(ROWS, sites, torch.device("cpu"))
    g = torch.Generator().manual_seed(seed)
    expected = {
        site: torch.randn(ROWS, *shape, generator=g).to(dtype) for site, (shape, dtype) in sites.items()
    }
    for site, rows in expected.items():
        buffer.site(site).copy_(rows)
    return buffer, expected


@given(sites=SITES, data=st.data())
def test_every_job_gets_the_rows_of_its_sites(sites, data):
    buffer, expected = filled_buffer(sites)
    requested = [
        (row, data.draw(st.lists(st.sampled_from(sorted(sites)), unique=True, min_size=1)))
        for row in data.draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=6))
    ]
    plan = RowCopyPlan(buffer, requested)
    rows_of_job = HostCopier().copy(buffer, plan)
    buffer.data.fill_(255)  # overwrite the buffer, as the next step does
    memory, all_rows = set(), []
    for job, (row, job_sites) in enumerate(requested):
        rows = rows_of_job(job)
        all_rows.append(rows)
        assert len(rows) == len(job_sites)
        for site in job_sites:
            after = [tensor for key, tensor in rows if key == site[0]]
            assert any(torch.equal(tensor, expected[site][row : row + 1]) for tensor in after), site
        assert all(tensor.is_contiguous() and tensor.data_ptr() % ALIGNED == 0 for _, tensor in rows)
        storages = {tensor.untyped_storage().data_ptr() for _, tensor in rows}
        assert len(storages) == 1 and not storages & memory, (
            "each job has one block of memory that no other job shares"
        )
        memory |= storages
    assert plan.num_bytes <= buffer.data.numel()


def test_distant_rows_are_copied_separately_and_small_gaps_are_included():
    wide = GAP // 2
    # Each row is two gaps wide.
    sites = {(("a", layer), False): ((wide,), torch.float32) for layer in range(6)}
    buffer, expected = filled_buffer(sites)
    first, second, last = (("a", 0), False), (("a", 1), False), (("a", 5), False)
    plan = RowCopyPlan(buffer, [(0, [first, last]), (0, [second])])
    assert [(start, stop) for start, stop, _ in plan.copies] == [(0, 4 * GAP), (10 * GAP, 12 * GAP)]
    assert plan.num_bytes == 6 * GAP
    rows_of_job = HostCopier().copy(buffer, plan)
    assert [
        torch.equal(tensor, expected[site][:1]) for site, (_, tensor) in zip((first, last), rows_of_job(0))
    ] == [True, True]
    sites = {(("a", layer), False): ((8,), torch.float32) for layer in range(3)}
    buffer, _ = filled_buffer(sites)
    assert (
        len(RowCopyPlan(buffer, [(row, [(("a", 0), False), (("a", 2), False)]) for row in (0, 3)]).copies)
        == 1
    )


def test_pinned_memory_is_reused_once_all_jobs_have_their_rows():
    buffer, _ = filled_buffer({(("a", 0), False): KINDS[0]})
    plan, copier = RowCopyPlan(buffer, [(0, [(("a", 0), False)]), (1, [(("a", 0), False)])]), HostCopier()
    first, second = copier.copy(buffer, plan), copier.copy(buffer, plan)
    assert first._buffer is not second._buffer, "the rows of two steps may be in flight"
    first(0)
    assert copier._free == []
    first(1)
    assert copier.copy(buffer, plan)._buffer is first._buffer


def test_delivered_rows_are_not_overwritten_by_later_steps():
    site = (("a", 0), False)
    buffer, _ = filled_buffer({site: KINDS[1]})
    plan, copier = RowCopyPlan(buffer, [(2, [site])]), HostCopier()
    delivered, expected = [], []
    for step in range(2 * ARENA_STEPS + 1):
        buffer.site(site).fill_(step)
        ((_, rows),) = copier.copy(buffer, plan)(0)
        delivered.append(rows)
        expected.append(torch.full((1, 4, 6), float(step)))
    assert torch.equal(torch.cat(delivered).float(), torch.cat(expected))
