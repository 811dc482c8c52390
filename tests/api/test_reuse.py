"""Prefix cache, row cache and speculation through the public API: outputs, rows and reports do not depend on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import birkhoff
from birkhoff import Add, Capture
from birkhoff.api.options import SpeculationOptions, parse_speculation
from birkhoff.convert.synth import synth
from birkhoff.engine.cache_plan import plan_cache
from birkhoff.errors import CapacityError, OptionError
from birkhoff.model.cache_size import page_bytes, slot_bytes, snapshot_bytes
from tests.api.conftest import open_engine
from tests.models import TINY
from tests.sizes import scaled

TEXTS = [[0] + [5 + (n * n * (7 + t) + n) % 480 for n in range(520)] for t in range(3)]
GREEDY = {"temperature": 0, "ignore_eos": True}


def vector(seed: int, width: int = 64, norm: float = 6.0) -> list[float]:
    drawn = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return (drawn / drawn.norm() * norm).tolist()


def opened(path, **options) -> birkhoff.Engine:
    return open_engine(path, **{"batch_invariant": True, "speculative": False, **options})


@pytest.fixture(scope="module")
def cold(checkpoint) -> Iterator[birkhoff.Engine]:
    with opened(checkpoint, prefix_cache=False) as engine:
        yield engine


@pytest.fixture
def warm(checkpoint) -> Iterator[birkhoff.Engine]:
    with opened(checkpoint, prefix_cache=True) as engine:
        yield engine


def reused(output) -> int:
    return output.timings["cached_tokens"]


def same_rows(actual, expected) -> bool:
    assert set(actual.acts) == set(expected.acts)
    return all(
        actual.acts[site].positions == expected.acts[site].positions
        and actual.acts[site].token_ids == expected.acts[site].token_ids
        and torch.equal(actual.acts[site].tensor, expected.acts[site].tensor)
        for site in expected.acts
    )


def test_t_cache_1_decode_edits_share_pages_of_a_prompt_and_prompt_edits_do_not(warm, cold):
    prompt, options = TEXTS[0][:400], {**GREEDY, "max_tokens": 6}
    edit = {
        phase: [Add(vector(1), hook="mlp_out", layers=[2], phase=phase)]
        for phase in ("prefill", "decode", "both")
    }
    plain = warm.generate(prompt, **options)
    shared = {phase: reused(warm.generate(prompt, steer=steer, **options)) for phase, steer in edit.items()}
    assert reused(plain) == 0 and shared == {"prefill": 0, "decode": 384, "both": 384}, (
        "both phases equal prefill for prompt pages"
    )
    again = {phase: warm.generate(prompt, steer=steer, **options) for phase, steer in edit.items()}
    for phase, steer in edit.items():
        alone = cold.generate(prompt, steer=steer, **options)
        assert reused(again[phase]) == 384 and again[phase].token_ids == alone.token_ids
        assert alone.token_ids != plain.token_ids
    assert (
        warm.generate(prompt, **options).token_ids
        == plain.token_ids
        == cold.generate(prompt, **options).token_ids
    )


def test_steered_and_plain_requests_do_not_share_wrong_pages(warm, cold):
    """The same prompt steered, plain, steered differently, plain: no output depends on the other requests."""
    prompt, options = TEXTS[1][:300], {**GREEDY, "max_tokens": 5, "logprobs": 2}
    edits = [
        [Add(vector(2), hook="mhc_streams_pre_attn", layers=[1], streams=[0])],
        None,
        [Add(vector(3), hook="mlp_out", layers=[0], where=[-1])],
        None,
    ]
    for steer in [*edits, *edits]:
        actual, expected = (
            warm.generate(prompt, steer=steer, **options),
            cold.generate(prompt, steer=steer, **options),
        )
        assert actual.token_ids == expected.token_ids and actual.logprobs == expected.logprobs


def test_edits_of_late_positions_share_earlier_pages(warm):
    prompt = TEXTS[2][:400]
    warm.generate(prompt, max_tokens=1)
    for where, known in (([300], 256), ([-1], 384), ([10], 0), ([130], 128)):
        steer = [Add(vector(4), hook="mlp_out", layers=[1], where=where)]
        assert reused(warm.generate(prompt, steer=steer, max_tokens=1)) == known, where
    with warm.steering(Add(vector(5), hook="mlp_out", layers=[1])):
        assert reused(warm.generate(prompt, max_tokens=1)) == 0
    assert reused(warm.generate(prompt, max_tokens=1)) == 384


def test_a_changed_vector_of_the_same_name_does_not_reuse_pages(warm, cold):
    prompt, options = TEXTS[0][:300], {**GREEDY, "max_tokens": 4, "logprobs": 1}
    for seed in (6, 7):
        for engine in (warm, cold):
            engine.modules["calm"] = vector(seed)
        steer = [Add("calm", hook="mlp_out", layers=[1])]
        actual, expected = (
            warm.generate(prompt, steer=steer, **options),
            cold.generate(prompt, steer=steer, **options),
        )
        assert reused(actual) == 0 and actual.logprobs == expected.logprobs


CAPTURES = {
    "all_prompt": 0,
    "last_prompt": 256,
    "all_generated": 256,
    "all": 0,
    (5,): 0,
    (200,): 128,
    (300, 301): 256,
}


@pytest.mark.parametrize("positions", CAPTURES, ids=str)
def test_t_cache_3_rows_are_equal_with_the_cache_on_off_and_from_the_store(checkpoint, cold, positions):
    prompt = TEXTS[0][:330]
    points = {"mlp_out": [0, 3], "mhc_streams_pre_attn": [2], "moe_topk": [1]}
    capture = Capture(points, positions=list(positions) if isinstance(positions, tuple) else positions)
    options = {**GREEDY, "max_tokens": 4}
    alone = cold.generate(prompt, capture=capture, **options)
    with opened(checkpoint, prefix_cache=True) as warm:
        warm.generate(prompt, **options)
        first = warm.generate(prompt, capture=capture, **options)
        assert reused(first) == CAPTURES[positions] and same_rows(first, alone), (
            "computed from the first captured row on"
        )
        second = warm.generate(prompt, capture=capture, **options)
        served = warm.reuse["prefix"]["rows_served"]
        assert reused(second) == 256 and same_rows(second, alone), (
            "served from the store, and all pages reused"
        )
        assert (served > 0) is (CAPTURES[positions] < 256)
        other = Capture({"mlp_out": [0, 4]}, positions=capture.positions)  # layer 4 was never captured
        assert same_rows(
            warm.generate(prompt, capture=other, **options), cold.generate(prompt, capture=other, **options)
        )


def test_cached_rows_are_separate_for_different_edits(warm, cold):
    prompt, options = TEXTS[1][:300], {**GREEDY, "max_tokens": 2}
    steer = [Add(vector(8), hook="mlp_out", layers=[1])]
    for point in ("before", "after"):
        capture = Capture({"mlp_out": [1, 3]}, positions="all", capture_point=point)
        for edits in (steer, None, steer, None):
            actual = warm.generate(prompt, capture=capture, steer=edits, **options)
            assert same_rows(actual, cold.generate(prompt, capture=capture, steer=edits, **options)), (
                point,
                edits,
            )
        assert reused(actual) == 256


def test_captures_do_not_prevent_page_reuse(warm):
    prompt = TEXTS[2][:300]
    warm.generate(prompt, max_tokens=1, capture=Capture({"mlp_out": "all"}, positions="all"))
    assert reused(warm.generate(prompt, max_tokens=1)) == 256, "a request with a capture caches its pages"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_t_ste_4_phases_apply_to_their_tokens_after_a_full_cache_hit(warm, cold, phase):
    prompt = TEXTS[0][:257]  # all but its last token are in full pages
    steer = [Add(vector(9), hook="mlp_out", layers=[2], phase=phase)]
    capture = Capture({"mlp_out": [2], "mlp_in": [3]}, positions="all_generated", capture_point="after")
    options = {**GREEDY, "max_tokens": 6, "steer": steer}
    alone = cold.generate(prompt, capture=capture, **options)
    for _ in range(2):
        actual = warm.generate(prompt, capture=capture, **options)
        assert actual.token_ids == alone.token_ids and same_rows(actual, alone)
        expected = range(257) if phase == "prefill" else range(257, 262)
        assert actual.interp["steered_positions"] == list(expected)
    assert reused(actual) == 256


def test_t_ste_9_steered_positions_are_reported_with_cached_pages(warm):
    prompt, count = TEXTS[1][:400], 5
    cases = [({"phase": "decode"}, range(400, 404)), ({"where": [0, 399, -1]}, [0, 399]), ({}, range(404))]
    for options, expected in cases:
        steer = [Add(vector(10), hook="mlp_out", layers=[0], **options)]
        for turn in range(2):
            out = warm.generate(prompt, steer=steer, max_tokens=count, **GREEDY)
            assert out.interp["steered_positions"] == list(expected)
            assert turn == 0 or reused(out) == 384


# Speculation


@pytest.fixture(scope="module")
def engines(checkpoint) -> Iterator[list[birkhoff.Engine]]:
    """Without speculation, and with always 1 and 3 drafts; all with a prefix cache."""
    made = [open_engine(checkpoint, speculative=depth, prefix_cache=True) for depth in (False, 1, 3)]
    yield made
    for engine in made:
        engine.close()


def test_t_ste_8_steering_gives_the_same_tokens_with_speculation(engines):
    """Edits of the final streams affect MTP too; edits of every other site and path give the same text as well."""
    sites = [
        ("mhc_streams_final", "both", 256),
        ("mhc_streams_final", "read", 256),
        ("mlp_out", "both", 64),
        ("mhc_streams_pre_attn", "carry", 256),
        ("final_hidden", "both", 64),
    ]
    for hook, path, width in sites:
        layers = {"layers": "all" if hook in ("mhc_streams_final", "final_hidden") else [2]}
        steer = [Add(vector(11, width), hook=hook, path=path, **layers)]
        options = {"max_tokens": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True, "steer": steer}
        plain, *guessed = (engine.generate(TEXTS[0][:60], **options) for engine in engines)
        for out in guessed:
            assert out.token_ids == plain.token_ids, hook
            assert (
                out.interp["reuse"]["drafted"] > 0
                and 0 <= out.interp["reuse"]["accepted"] <= out.timings["drafted"]
            )
            assert out.interp["steered_positions"] == plain.interp["steered_positions"]


def test_t_cap_7_rows_are_complete_and_ordered_with_cache_and_speculation(engines):
    capture = Capture({"mlp_out": [0, 5], "mhc_streams_final": "all"}, positions="all")
    options = {"max_tokens": 30, "temperature": 1.0, "seed": 2, "ignore_eos": True, "capture": capture}
    prompts = [TEXTS[0][:200], TEXTS[0][:150], TEXTS[1][:20], TEXTS[0][:200]]
    runs = [engine.generate(prompts, **options) for engine in engines for _ in range(2)]
    for outputs in runs:
        for prompt, out, plain in zip(prompts, outputs, runs[0]):
            assert out.token_ids == plain.token_ids
            for site, rows in out.acts.items():
                assert rows.positions == tuple(range(len(prompt) + 29))
                assert list(rows.token_ids) == [*prompt, *out.token_ids[:-1]]
                torch.testing.assert_close(rows.tensor, plain.acts[site].tensor, atol=1e-3, rtol=1e-3)


def test_stop_strings_and_streams_are_equal_with_speculation(engines, letters):
    options = {"max_tokens": 40, "temperature": 0.9, "seed": 3, "logit_bias": letters}
    whole = engines[0].generate("abc", **options)
    stop = whole.text[7:9]
    for engine in engines:
        out = engine.generate("abc", stop=[stop], **options)
        assert out.text == whole.text[: whole.text.index(stop)] and out.finish_reason == "stop"
        assert "".join(event.text for event in engine.stream("abc", stop=[stop], **options)) == out.text


def test_drafts_of_nano_are_mostly_accepted_and_change_no_token():
    """Greedy at three depths, with and without steering the final streams: equal tokens, most first drafts accepted."""
    prompt = [{"role": "user", "content": "Tell me a story about a dog and a red ball."}]
    options = {"max_tokens": scaled(160, 40), "temperature": 0, "ignore_eos": True}
    steer = [Add(vector(1, 4 * 384, norm=8.0), hook="mhc_streams_final", layers="all")]
    with birkhoff.load("nano", max_requests=1, speculative=False) as plain:
        expected = [plain.chat(prompt, steer=edits, **options).token_ids for edits in (None, steer)]
    assert expected[0] != expected[1]
    for depth in (1, 2, 3):
        with birkhoff.load("nano", max_requests=1, speculative=depth) as engine:
            outputs = [engine.chat(prompt, steer=edits, **options) for edits in (None, steer)]
        assert [out.token_ids for out in outputs] == expected
        shares = [out.timings["accepted"] / out.timings["drafted"] for out in outputs]
        assert min(shares) > (0.5, 0.35, 0.25)[depth - 1], shares


# All features combined

ASKED = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([1, 100, 128, 129, 256, 300]),
        st.integers(0, 3),
        st.sampled_from([None, "prefill", "decode", "late"]),
        st.sampled_from([None, "all", "last_prompt", "all_generated"]),
    ),
    min_size=2,
    max_size=5,
)


@settings(max_examples=scaled(60, 6))
@given(drawn=ASKED, pages=st.sampled_from([4, 6, 40]), on_disk=st.booleans())
def test_any_conversations_are_bit_identical_to_an_engine_without_caches(
    checkpoint, cold, tmp_path_factory, drawn, pages, on_disk
):
    root = tmp_path_factory.mktemp("pages") if on_disk else None
    with opened(checkpoint, prefix_cache=True, context_root=root) as warm:
        scheduler = warm._core.scheduler
        scheduler.pages.allocate(
            scheduler.pages.size - pages
        )  # leaves memory for little more than one request
        for text, length, tail, edit, rows in drawn:
            prompt = [*TEXTS[text][:length], *range(7, 7 + tail)]
            where = {"late": {"where": [-1]}, None: {}}.get(edit, {"phase": edit})
            options = {
                **GREEDY,
                "max_tokens": 3,
                "logprobs": 1,
                "steer": None if edit is None else [Add(vector(12), hook="mlp_out", layers=[1, 4], **where)],
                "capture": None
                if rows is None
                else Capture({"mlp_out": [1], "pre_attn": [5]}, positions=rows),
            }
            actual, expected = warm.generate(prompt, **options), cold.generate(prompt, **options)
            assert actual.token_ids == expected.token_ids and actual.logprobs == expected.logprobs
            assert same_rows(actual, expected) if rows is not None else True
            assert actual.interp.get("steered_positions") == expected.interp.get("steered_positions")


def test_a_named_context_survives_a_restart(checkpoint, cold, tmp_path):
    prompt, options = TEXTS[0][:400], {**GREEDY, "max_tokens": 4, "logprobs": 1}
    with opened(checkpoint, context_root=tmp_path) as first:
        made = first.generate(prompt, context="book", **options)
        assert reused(made) == 0 and made.interp["reuse"]["cached_tokens"] == 0
        assert first.reuse["prefix"]["contexts"] == ["book"] and first.reuse["prefix"]["disk"]["written"] == 3
        assert reused(first.chat([{"role": "user", "content": "hi"}], context="talk", max_tokens=1)) == 0
    with opened(checkpoint, context_root=tmp_path) as later:
        out = later.generate(prompt, context="book", **options)
        assert reused(out) == 384 and out.logprobs == cold.generate(prompt, **options).logprobs
        assert out.interp["reuse"] == {"cached_tokens": 384, "pages_shared": 3, "drafted": 0, "accepted": 0}
        with pytest.raises(OptionError, match="context is ''"):
            later.generate(prompt, context="", **options)


def test_files_that_could_hold_no_page_are_refused(checkpoint, tmp_path):
    with pytest.raises(
        OptionError, match="context_bytes is 5000, and one page of this model takes"
    ) as refused:
        opened(checkpoint, context_root=tmp_path, context_bytes=5000)
    with pytest.raises(OptionError, match="context_root stores pages of the prefix cache"):
        opened(checkpoint, context_root=tmp_path, prefix_cache=False)
    one = int(str(refused.value).split("takes ")[1].split()[0])
    with opened(checkpoint, context_root=tmp_path, context_bytes=one + 4096) as engine:  # and its header
        engine.generate(TEXTS[0][:200], context="book", **GREEDY, max_tokens=1)
        disk = engine.reuse["prefix"]["disk"]
        assert disk["written"] == 1 and disk["too_large"] == 0


def test_rows_that_the_row_cache_cannot_hold_are_counted(checkpoint):
    with opened(checkpoint) as engine:
        engine._core.scheduler.prefix.rows.limit_bytes = 1000
        engine.generate(TEXTS[0][:200], capture=Capture({"mlp_out": [1]}), **GREEDY, max_tokens=1)
        assert engine.reuse["prefix"]["rows_too_large"] >= 200 and engine.reuse["prefix"]["row_bytes"] == 0


# Options


def test_option_values():
    assert (
        parse_speculation("auto", True, False) == SpeculationOptions(1)
        and parse_speculation(False, True, False) == SpeculationOptions()
    )
    assert parse_speculation(True, True, False) == SpeculationOptions(1, True) and parse_speculation(
        3, True, False
    ) == SpeculationOptions(3, True)
    assert (
        parse_speculation("auto", False, False)
        == parse_speculation("auto", True, True)
        == SpeculationOptions()
    )
    for value in (0, 4, "yes", None, 1.5, [1]):
        with pytest.raises(OptionError, match="speculative is"):
            parse_speculation(value, True, False)
    with pytest.raises(OptionError, match="no MTP block"):
        parse_speculation(True, False, False)
    with pytest.raises(OptionError, match="batch_invariant computes every token by itself"):
        parse_speculation(2, True, True)


def test_a_checkpoint_without_mtp_generates_and_refuses_speculation(tmp_path):
    synth(tmp_path / "c", "tiny", mtp=False)
    with open_engine(tmp_path / "c") as engine:
        assert (
            engine.generate([5, 6], max_tokens=2).timings["drafted"] == 0
            and engine.reuse["speculation"] is None
        )
    with pytest.raises(OptionError, match="no MTP block"):
        open_engine(tmp_path / "c", speculative=True)


@given(
    cache=st.integers(10_000, 2**26),
    requests=st.integers(1, 8),
    context=st.sampled_from([None, 200, 1024]),
    prefix=st.sampled_from(["auto", True, False]),
    depth=st.integers(0, 3),
)
def test_a_planned_memory_fits_its_bytes(cache, requests, context, prefix, depth):
    try:
        memory = plan_cache(TINY, 4, cache, requests, context, prefix, depth)
    except CapacityError as error:
        assert "Raise cache_bytes" in str(error)
        return
    used = (
        requests * slot_bytes(TINY, 4, depth, depth > 0)
        + memory.pages * page_bytes(TINY, 4)
        + memory.prefix_bytes
    )
    used += memory.row_bytes
    assert used <= cache and memory.context >= 1 and memory.pages >= requests
    assert prefix is not False or memory.prefix_bytes == 0
    assert prefix is not True or memory.prefix_bytes >= snapshot_bytes(TINY, 4, depth > 0)
