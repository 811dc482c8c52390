"""Prefix cache: page ownership and sharing, what a key covers, and outputs that do not depend on the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.config import PAGE_TOKENS
from birkhoff.engine.cache_plan import plan_prefix
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.id_pool import IdPool
from birkhoff.engine.page_files import PageFiles
from birkhoff.engine.prefix import page_key
from birkhoff.engine.request import Request
from birkhoff.engine.row_cache import RowCache
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.hooks.digest import DigestPart
from birkhoff.hooks.plan import Plan, SiteRows
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.cache_size import page_bytes, slot_bytes, snapshot_bytes
from birkhoff.model.state import Snapshot, State
from tests import models
from tests.models import TINY, fused_model, random_tokens, variant
from tests.sizes import scaled

SMALL = variant(compress_ratios=(0, 4, 128), num_hash_layers=1)
MICRO = replace(models.MICRO, vocab_size=512)
TEXTS = [random_tokens(SMALL, 700, seed).tolist() for seed in range(3)]


@pytest.fixture(scope="module")
def model():
    return fused_model(SMALL, kernels="cpu")


def ask(tokens, count=3, plan=None, **options) -> Request:
    made = SamplingParams(
        **{"temperature": 0, "max_tokens": count, "logprobs": 0, "ignore_eos": True, **options}
    )
    return Request(tuple(tokens), made, count, seed=3, plan=plan)


def engine(model, **options) -> EngineCore:
    given = {
        "max_requests": 2,
        "max_context": 1024,
        "num_pages": 16,
        "max_batch_tokens": 300,
        "prefix_bytes": 2**22,
    }
    return EngineCore(model, **{**given, **options})


def run(core: EngineCore, *requests: Request) -> list[Request]:
    for request in requests:
        core.submit(request)
    while core.step():
        pass
    assert core.scheduler.idle and core.scheduler.pages.num_free == core.scheduler.pages.size
    return list(requests)


# Page pool


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=60), st.integers(1, 6))
def test_every_page_is_free_idle_or_allocated_and_only_kept_pages_are_shared(moves, size):
    gone: list[int] = []
    pool, allocated, kept = IdPool(size, gone.append), [], set()
    for move, which in moves:
        if move <= 1 and (taken := pool.allocate(1)):
            assert taken[0] not in allocated
            kept -= set(taken)
            allocated += taken
        elif move == 2 and allocated:
            pool.keep(allocated[which % len(allocated)])
            kept.add(allocated[which % len(allocated)])
        elif move == 3 and (candidates := sorted(kept)):
            pool.share([candidates[which % len(candidates)]])
            allocated.append(candidates[which % len(candidates)])
        elif move == 4 and allocated:
            pool.release([allocated.pop(which % len(allocated))])
        elif move == 5 and kept:
            pool.forget(index := sorted(kept)[which % len(kept)])
            kept.discard(index)
        assert pool.num_free == size - len(set(allocated)) and pool.num_idle == len(kept - set(allocated))
    for index in gone:
        assert 0 <= index < size


def test_eviction_takes_the_longest_idle_page_and_later_pages_first():
    gone: list[int] = []
    pool = IdPool(4, gone.append)
    chain = pool.allocate(3)
    for index in chain:
        pool.keep(index)
    pool.release(chain)
    assert pool.num_free == 4 and pool.allocate(2) is not None and gone == [chain[2]]
    pool.share(chain[:1])
    assert pool.allocate(1) is not None and gone == [chain[2], chain[1]] and pool.allocate(1) is None
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share([chain[2]])


# Snapshots


@pytest.mark.parametrize("position", [128, 129, 256, 131, 7])
def test_a_restored_slot_continues_with_equal_results(model, position):
    """For snapshots copied from the rings and for snapshots filled while a longer chunk is computed."""
    tokens = TEXTS[0]
    with torch.inference_mode():
        state = State.contiguous(SMALL, 3, 1024, lookback=2)
        model.run(Batch.of([SequenceChunk(0, 0, tokens[:position])]), state, NoTap())
        saved = state.save(0, position)
        passing = Snapshot(position)
        state.watched[1] = [passing]
        model.run(Batch.of([SequenceChunk(1, 0, tokens[: position + 70])]), state, NoTap())
        state.watched.clear()
        assert saved.rows.keys() == passing.rows.keys()
        for name, rows in saved.rows.items():
            torch.testing.assert_close(rows, passing.rows[name], atol=1e-4, rtol=0, msg=name)
        expected = model.run(
            Batch.of([SequenceChunk(0, position, tokens[position : position + 9])]), state, NoTap()
        )[0]
        state.restore(2, saved)
        state.give_pages(2, state.page_table[0, :8].tolist())
        again = model.run(
            Batch.of([SequenceChunk(2, position, tokens[position : position + 9])]), state, NoTap()
        )[0]
    assert torch.equal(expected, again)


def test_snapshot_bytes_equal_those_computed_from_the_config(model):
    for mtp in (False, True):
        state = State.contiguous(SMALL, 1, 256, lookback=1, mtp=mtp)
        assert state.save(0, 128).nbytes == snapshot_bytes(SMALL, 4, mtp)
        rings = [ring for layer in state._all_layers() for _, ring in layer.rings()]
        assert sum(ring.rows.nbytes for ring in rings) == slot_bytes(SMALL, 4, 1, mtp)


@given(left=st.integers(-(10**7), 10**9), pages=st.integers(1, 500))
def test_a_planned_cache_fits(left, pages):
    extra, snapshots = plan_prefix(TINY, 4, left, pages)
    assert 0 <= extra <= 3 * pages and extra * page_bytes(TINY, 4) + max(snapshots, 0) <= max(left, 0)


# Keys


class Named:
    """An edit of these positions whose digest is derived from `name`; with None it has no digest."""

    def __init__(self, name: str | None, positions, block="add"):
        self.name, self.positions, self.block, self.sites = name, set(positions), block, {}

    def offsets(self, start, token_ids, prompt_len):
        return [p - start for p in sorted(self.positions) if start <= p < start + len(token_ids)]

    def digest_parts(self, phase):
        return [] if self.name is None else [DigestPart(self.block, self.name.encode())]


def key(*edits, tokens=None, prompt=None, page=0, before=b"root"):
    tokens = TEXTS[0][:256] if tokens is None else tokens
    request = ask(tokens[: prompt or len(tokens)], plan=Plan(edits=tuple(edits)))
    request.output_ids += tokens[prompt or len(tokens) :]
    return page_key(request, page, before)


def test_a_key_covers_the_tokens_the_previous_key_and_the_edits_of_the_page():
    plain = key()
    assert key() == plain and len(plain) == 16
    assert key(tokens=[1, *TEXTS[0][1:256]]) != plain and key(before=b"other") != plain
    assert key(Named("a", [130])) == plain, "an edit of a later page does not change this key"
    steered = {
        key(Named("a", [5])),
        key(Named("a", [6])),
        key(Named("b", [5])),
        key(Named("a", [5, 6])),
        plain,
    }
    assert len(steered) == 5
    assert key(Named("a", [5]), Named("b", [6])) != key(Named("b", [5]), Named("a", [6]))
    assert key(Named(None, [5])) is None and key(Named(None, [200])) == plain


def test_t_cache_1_delta_and_full_with_equal_content_never_share():
    assert key(Named("clamps", [5], "delta")) != key(Named("clamps", [5], "full"))


def test_decode_edits_do_not_change_prompt_pages_and_a_page_may_have_both_kinds():
    class Decode(Named):
        def offsets(self, start, token_ids, prompt_len):
            return [o for o in super().offsets(start, token_ids, prompt_len) if start + o >= prompt_len]

    everywhere = Decode("a", range(300))
    assert key(everywhere) == key() and key(everywhere, prompt=128) == key()
    assert key(everywhere, prompt=100) != key(everywhere, prompt=101)


# Row store


def test_the_row_store_returns_complete_rows_or_none_within_its_limit():
    keys = [b"0", b"1"]

    def rows(first, stop, layer=0):
        positions = tuple(range(first, stop))
        return SiteRows(
            "mlp_out", layer, torch.arange(first, stop).float().unsqueeze(-1), positions, positions
        )

    store = RowCache(4 * 300)
    store.put(keys, False, rows(0, 100))
    store.put(keys, False, rows(100, 260))  # the last four rows belong to a page without a key
    got = store.get(keys, "mlp_out", 0, False, [3, 99, 100, 127, 128, 255])
    assert got.flatten().tolist() == [3, 99, 100, 127, 128, 255]
    assert (
        store.get(keys, "mlp_out", 0, True, [3]) is None and store.get(keys, "mlp_out", 1, False, [3]) is None
    )
    assert store.get([b"other", b"1"], "mlp_out", 0, False, [3]) is None and store.held_bytes == 260 * 4
    store.get(keys, "mlp_out", 0, False, [3])  # most recently used
    store.put(keys, False, rows(0, 60, layer=1))
    assert store.held_bytes == 160 * 4 and store.get(keys, "mlp_out", 0, False, [200]) is None
    assert store.get(keys, "mlp_out", 0, False, [3]) is not None
    store.put(keys, False, rows(0, 256, layer=2))
    store.put(keys, False, SiteRows("mlp_out", 3, torch.zeros(128, 99), tuple(range(128)), tuple(range(128))))
    assert store.held_bytes <= store.limit_bytes and store.get(keys, "mlp_out", 3, False, [3]) is None
    store.clear()
    assert store.held_bytes == 0 and store.get(keys, "mlp_out", 2, False, [3]) is None


# Engines


@pytest.mark.parametrize("invariant", [False, True], ids=["batched", "invariant"])
def test_a_cached_prefix_is_not_recomputed(model, invariant):
    core, cold = (
        engine(model, batch_invariant=invariant),
        engine(model, batch_invariant=invariant, prefix_bytes=0),
    )
    text = TEXTS[0]
    cases = [
        (text[:500], 0),
        (text[:500], 384),
        (text[:300] + [5] * 100, 256),
        (text[:256], 128),
        (text[:257], 256),
        (text[:128], 0),
        (text[:129], 128),
        ([7, *text[1:300]], 0),
    ]
    for tokens, cached in cases:
        (warm,), (plain,) = run(core, ask(tokens)), run(cold, ask(tokens))
        assert warm.cached_tokens == cached and plain.cached_tokens == 0
        assert warm.shared_pages == cached // PAGE_TOKENS and warm.output_ids == plain.output_ids
        if invariant:
            assert warm.logprobs == plain.logprobs


def test_generated_pages_are_reused_by_the_next_turn_except_in_batch_invariant_mode(model):
    for invariant, known in ((False, 274), (True, 0)):  # all but the last token, which is never computed
        core = engine(model, batch_invariant=invariant)
        (first,) = run(core, ask(TEXTS[0][:100], 175))
        (turn,) = run(core, ask([*TEXTS[0][:100], *first.output_ids, 9, 9], 2))
        assert turn.cached_tokens == known
        if not invariant:
            (plain,) = run(engine(model, prefix_bytes=0), ask(turn.prompt_ids, 2))
            assert plain.output_ids == turn.output_ids


def test_later_turns_continue_in_copies_of_the_partial_page(model):
    """Two different second turns after one response, and a third turn: each computes only its new tokens."""
    core, cold = engine(model), engine(model, prefix_bytes=0)
    (first,) = run(core, ask(TEXTS[0][:200], 20))
    end = [*TEXTS[0][:200], *first.output_ids]
    for words in ([3, 4, 5], [6, 7], [3, 4, 5]):
        (turn,), (plain,) = run(core, ask([*end, *words], 30)), run(cold, ask([*end, *words], 30))
        assert turn.cached_tokens == 219 and turn.shared_pages == 1 and turn.output_ids == plain.output_ids
    (third,) = run(core, ask([*end, 6, 7, 8], 5))
    assert third.cached_tokens == 219
    longer = [*end, *words, *turn.output_ids, 9]
    (last,), (plain,) = run(core, ask(longer, 5)), run(cold, ask(longer, 5))
    assert last.cached_tokens == len(longer) - 2 and last.output_ids == plain.output_ids
    (again,) = run(core, ask(TEXTS[0][:190], 5))
    assert again.cached_tokens == 128, "a partial page is reused only by prompts that contain all of it"


def test_a_partial_page_is_cached_only_after_a_normal_finish_and_above_a_minimum_length(model):
    core = engine(model)
    short, cancelled = ask(TEXTS[0][:10], 3), ask(TEXTS[1][:90], 50)
    run(core, short)
    core.submit(cancelled)
    core.step()
    core.cancel(cancelled)
    assert len(core.scheduler.prefix) == 0
    run(core, ask(TEXTS[2][:90], 5))
    assert len(core.scheduler.prefix) == 1 and core.scheduler.prefix._partial_lengths == {b"": {94: 1}}
    core.scheduler.prefix.clear()
    assert core.scheduler.prefix._partial_lengths == {}


def test_concurrent_requests_share_computed_pages(model):
    core = engine(model, max_requests=2)
    first, second = ask(TEXTS[0][:600], 40), ask(TEXTS[0][:600], 3)
    core.submit(first)
    while not first.output_ids:
        core.step()
    core.submit(second)
    core.step()
    assert (
        second.cached_tokens == 512
        and second.pages[:4] == first.pages[:4]
        and second.pages[4] != first.pages[4]
    )
    assert core.scheduler.pages.size - core.scheduler.pages.num_free == len({*first.pages, *second.pages})
    while core.step():
        pass
    assert first.output_ids[:3] == second.output_ids


def test_a_preempted_request_reuses_its_own_pages(model):
    """Two requests that do not fit together: the newer one is preempted and later reuses most of its pages."""
    core = engine(model, num_pages=5, max_batch_tokens=1024)
    old, young = ask(TEXTS[0][:250], 140), ask(TEXTS[1][:250], 140)
    run(core, old, young)
    assert young.timings.preemptions >= 1 and young.cached_tokens == 0
    assert core.scheduler.prefix.hits >= 1
    for request in (old, young):
        (alone,) = run(engine(model, prefix_bytes=0), ask(request.prompt_ids, 140))
        assert alone.output_ids == request.output_ids


def test_an_interrupted_step_caches_nothing(model):
    core = engine(model)
    real, calls = core.runner.model.run, []

    class Interrupted:
        def __getattr__(self, name):
            return getattr(model, name)

        def run(self, *arguments):
            calls.append(1)
            result = real(*arguments)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return result

    core.runner.model = Interrupted()
    request = ask(TEXTS[0][:600], 3)
    core.submit(request)
    core.step()
    entered = len(core.scheduler.prefix)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert len(core.scheduler.prefix) == entered == 2 and not core.runner.state.watched
    run(core)
    (alone,) = run(engine(model, prefix_bytes=0), ask(request.prompt_ids, 3))
    assert request.output_ids == alone.output_ids and request.timings.preemptions == 1


def test_clear_drops_everything_but_pages_in_use(model):
    core = engine(model)
    run(core, ask(TEXTS[0][:300]))
    prefix = core.scheduler.prefix
    assert len(prefix) == 3 and prefix.held_bytes
    prefix.clear()
    assert len(prefix) == prefix.held_bytes == 0 and core.scheduler.pages.num_idle == 0
    assert run(core, ask(TEXTS[0][:300]))[0].cached_tokens == 0


REQUESTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 420), st.integers(0, 40), st.sampled_from([1, 2, 20])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=scaled(100, 8))
@given(REQUESTS, st.sampled_from([5, 7, 16]), st.sampled_from([2**22, 60_000, 30_000]))
def test_outputs_are_bit_identical_whatever_is_cached(model, drawn, pages, snapshots):
    """Batch-invariant mode: any requests in any order, with many or few pages."""
    core = engine(model, batch_invariant=True, num_pages=pages, prefix_bytes=snapshots)
    cold = engine(model, batch_invariant=True, num_pages=pages, prefix_bytes=0)
    requests = [
        [ask([*TEXTS[text][:length], *range(tail)], count) for text, length, tail, count in drawn]
        for _ in range(2)
    ]
    for warm, plain in zip(run(core, *requests[0]), run(cold, *requests[1])):
        assert warm.logprobs == plain.logprobs
    prefix = core.scheduler.prefix
    assert prefix.held_bytes <= prefix.snapshots.nbytes <= snapshots and len(prefix) <= pages
    assert {node.page for node in prefix._by_key.values()} == set(prefix._by_page)


@pytest.mark.timeout(scaled(3600, 600))
def test_memory_stays_within_bounds_over_many_requests(tmp_path):
    """Ten thousand random requests under `make test-all`, with little memory and little disk."""
    model = fused_model(MICRO, kernels="cpu")
    files = PageFiles(tmp_path, b"m" * 16, 200_000)
    core = engine(model, num_pages=9, prefix_bytes=15_000, max_requests=4, files=files)
    pick = torch.Generator().manual_seed(0)
    prefix = core.scheduler.prefix
    for _ in range(scaled(10_000, 150)):
        text, length, tail, cancel = torch.randint(0, 2**30, (4,), generator=pick).tolist()
        request = ask([*TEXTS[text % 3][: 1 + length % 280], tail % 50], 1 + tail % 4)
        core.submit(request)
        if cancel % 3:
            core.step()
        if cancel % 7 == 0:
            core.cancel(request)
        assert (
            prefix.held_bytes <= prefix.snapshots.nbytes <= 15_000
            and len(prefix) <= 9
            and files.held_bytes <= 200_000
        )
        assert prefix.held_bytes == sum(n.snapshot.nbytes for n in prefix._by_key.values() if n.snapshot)
    run(core)
    assert prefix.hits > 10 and prefix.evictions > 3 and len(prefix._chains) < 30
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    assert (
        files.held_bytes == on_disk <= 200_000
        and files.written > 5
        and not files.failures
        and not files.refused
    )
