"""Patches from traces and other prompts, their alignment, and sweeps: every cell equals its own single run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import birkhoff
from birkhoff import Add, AttentionEdit, Capture, ExpertSet, Patch
from birkhoff.analysis import forward
from birkhoff.convert.synth import synth
from birkhoff.errors import CaptureValidationError, OptionError, PromptError, SiteError, SteeringError
from birkhoff.steering.position_rows import PositionRows, align_tokens

CLEAN = [0, 17, 300, 4, 99, 501, 17]
CORRUPT = [0, 17, 301, 4, 98, 501, 18]
SHORT = [0, 17, 4, 98, 501, 18]
HOOK = "mhc_streams_pre_attn"
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("patching") / "tiny"
    synth(path, "tiny", seed=6)
    with birkhoff.load(path, cache_bytes=2**26, max_context=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def clean(engine):
    return engine.trace(CLEAN)


@pytest.mark.parametrize("hook", ["mlp_out", HOOK, "attn_head_out", "mhc_attn_res_mix", "mhc_ffn_pre_mix"])
def test_a_tensor_is_one_row_or_rows_by_position(engine, clean, hook):
    """[T, *row_shape] are rows from position 0 on; a tensor in the shape of a row is that row at every position."""
    rows = clean[hook, 2]
    by_run = engine.logits(CORRUPT, [Patch(clean, hook, [2])])
    for tensor in (rows, rows.flatten(1), rows.numpy()):
        assert engine.logits(CORRUPT, [Patch(tensor, hook, [2])]).equal(by_run)
    some = engine.logits(CORRUPT, [Patch(clean, hook, [2], where=[1, -1])])
    assert engine.logits(CORRUPT, [Patch(rows, hook, [2], where=[1, -1])]).equal(some)
    first = engine.logits(CORRUPT, [Patch(clean, hook, [2], where=[0])])
    assert engine.logits(CORRUPT, [Patch(rows[:1], hook, [2])]).equal(first)
    flat = engine.logits(CORRUPT, [Patch(rows[3].flatten(), hook, [2])])
    assert engine.logits(CORRUPT, [Patch(rows[3], hook, [2])]).equal(flat)
    output = engine.generate(CORRUPT, max_tokens=2, temperature=0, steer=[Patch(rows, hook, [2])])
    assert (
        output.token_ids
        == engine.generate(CORRUPT, max_tokens=2, temperature=0, steer=[Patch(clean, hook, [2])]).token_ids
    )
    with pytest.raises(
        SteeringError, match=r"the source has shape .* Give one row, or rows by position: \[T, "
    ):
        engine.logits(CORRUPT, [Patch(torch.ones(7, 3), hook, [2])])


def test_vectors_in_the_shape_of_a_row(engine, clean):
    row = clean[HOOK, 2][3]
    flat = engine.logits(CORRUPT, [Add(row.flatten(), HOOK, [2])])
    assert engine.logits(CORRUPT, [Add(row, HOOK, [2])]).equal(flat)
    one = engine.logits(CORRUPT, [Patch(clean[HOOK, 2][:, 1], HOOK, [2], streams=[1])])
    assert one.equal(engine.logits(CORRUPT, [Patch(clean, HOOK, [2], streams=[1])]))
    engine.modules["shaped"] = row
    assert engine.logits(CORRUPT, [Add("shaped", HOOK, [2])]).equal(flat)
    with pytest.raises(
        SteeringError, match=r"has shape \(7, 64\), mlp_out has rows of shape \(64\)\. .*Patch"
    ):
        engine.logits(CORRUPT, [Add(clean["mlp_out", 2], "mlp_out", [2])])


def test_an_unknown_hook_without_layers_is_answered_with_the_right_one(engine):
    for hook, instead in (
        ("blocks.2.hook_resid_pre", HOOK),
        ("mlp_ot", "mlp_out"),
        ("mhc_mix", "mhc_head_mix"),
    ):
        with pytest.raises(SteeringError, match=f"is not a hook of this model.*'{instead}'"):
            engine.logits(CORRUPT, [Patch(0, hook)])
    with pytest.raises(SteeringError, match="says no layers"):
        engine.logits(CORRUPT, [Patch(0, "mlp_out")])


def test_a_patch_of_a_trace_has_the_rows_of_that_run(engine, clean):
    """The tensor after the patch is the tensor of the clean run, and everything after it follows."""
    after = engine.trace(CORRUPT, steer=[Patch(clean, HOOK, [3], where=[2, -1])])
    by_hand = engine.logits(
        CORRUPT, [Patch(PositionRows({p: clean[HOOK, 3][p].flatten()}), HOOK, [3]) for p in (2, 6)]
    )
    torch.testing.assert_close(after.logits, by_hand, **CLOSE)
    assert (after.logits - engine.logits(CORRUPT)).abs().max() > 1e-2
    whole = engine.logits(CORRUPT, [Patch(clean, "mhc_streams_final")])
    torch.testing.assert_close(whole, clean.logits, **CLOSE)
    everywhere = engine.trace(
        CORRUPT, steer=[Patch(clean, "mlp_out", "all"), Patch(clean, "post_attn", "all")]
    )
    assert torch.equal(everywhere["mlp_out", 0][0], clean["mlp_out", 0][0])


def test_one_call_patches_from_a_trace_from_captured_rows_and_from_a_prompt(engine, clean):
    acts = engine.generate(CLEAN, max_tokens=1, capture=Capture({HOOK: [2, 4]})).acts
    from_trace, from_acts, from_prompt = (
        engine.patch(CORRUPT, source, HOOK, [2, 4], where=[3], hooks="mlp_out")
        for source in (clean, acts, CLEAN)
    )
    expected = engine.logits(CORRUPT, [Patch(clean, HOOK, [2, 4], where=[3])])
    for patched in (from_trace, from_acts, from_prompt):
        torch.testing.assert_close(patched.logits, expected, **CLOSE)
        assert patched["mlp_out"].shape[0] == 6 and patched.token_ids == CORRUPT
    named = engine.patch(CORRUPT, clean, f"blocks.{4}.hook_in", where=[3])
    torch.testing.assert_close(
        named.logits, engine.logits(CORRUPT, [Patch(clean, HOOK, [4], where=[3])]), **CLOSE
    )


def test_a_patch_from_a_trace_generates(engine, clean):
    patched = engine.generate(
        CORRUPT, max_tokens=4, temperature=0, steer=[Patch(clean, "mhc_streams_final", [-1])]
    )
    assert patched.token_ids[0] == int(clean.logits[-1].argmax())
    assert patched.interp["steered_positions"] == list(range(len(CLEAN)))


def test_tokens_align_texts_of_different_length(engine, clean):
    """SHORT is CORRUPT without its third token: after alignment each row comes from its own token."""
    assert align_tokens(CLEAN, SHORT) == {0: 0, 1: 1, 2: 3, 3: 4, 4: 5, 5: 6}
    by_tokens = engine.logits(SHORT, [Patch(clean, "mlp_out", [1], align="tokens")])
    rows = {target: clean["mlp_out", 1][source] for target, source in align_tokens(CLEAN, SHORT).items()}
    by_hand = engine.logits(SHORT, [Patch(PositionRows(rows), "mlp_out", [1])])
    torch.testing.assert_close(by_tokens, by_hand, **CLOSE)
    one = engine.patch(SHORT, CLEAN, "mlp_out", [1], align="tokens", where=[2])
    rows = {2: clean["mlp_out", 1][3]}
    alone = engine.logits(SHORT, [Patch(PositionRows(rows), "mlp_out", [1])])
    torch.testing.assert_close(one.logits, alone, **CLOSE)


TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@given(TOKENS, TOKENS)
def test_alignment_is_one_to_one_and_in_order(source, target):
    matches = align_tokens(source, target)
    pairs = sorted(matches.items())
    assert len(set(matches.values())) == len(matches)
    assert [origin for _, origin in pairs] == sorted(matches.values())
    assert all(0 <= t < len(target) and 0 <= s < len(source) for t, s in pairs)
    assert align_tokens(source, source) == {i: i for i in range(len(source))}


def test_a_sweep_is_what_single_patches_give(engine, clean):
    token, other = 5, 77
    sweep = engine.patch_sweep(CLEAN, CORRUPT, (token, other), HOOK, streams="each", layers=[0, 3, 5])
    assert sweep.axes == ("layer", "position", "stream") and sweep.values.shape == (3, 7, 4)
    assert (sweep.passes, sweep.cells) == (1, 84)

    def difference(logits):
        return float(logits[-1, token] - logits[-1, other])

    assert abs(sweep.clean - difference(clean.logits)) < 1e-4
    assert abs(sweep.corrupt - difference(engine.logits(CORRUPT))) < 1e-4
    for i, layer in enumerate((0, 3, 5)):
        for position in (2, 4, 6):
            for stream in (0, 3):
                alone = engine.logits(
                    CORRUPT, [Patch(clean, HOOK, [layer], where=[position], streams=[stream])]
                )
                assert abs(float(sweep.values[i, position, stream]) - difference(alone)) < 1e-4
    together = engine.patch_sweep(
        clean, CORRUPT, (token, other), ["mhc_streams_pre_attn", "mlp_out"], positions=None
    )
    assert together.axes == ("hook", "layer") and together.labels["hook"] == [HOOK, "mlp_out"]
    alone = engine.logits(CORRUPT, [Patch(clean, "mlp_out", [2])])
    assert abs(float(together.values[1, 2]) - difference(alone)) < 1e-4
    # All streams after the hash-routed layers are the clean text; before them the experts still follow the token ids.
    hashed = engine.config.num_hash_layers
    assert (together.recovered[0, hashed:] - 1).abs().max() < 1e-3 < (together.recovered[0, 0] - 1).abs()


def test_a_sweep_by_function_by_text_and_with_other_edits(engine):
    vector = torch.randn(64, generator=torch.Generator().manual_seed(4))
    steer = [Add(vector, "mlp_out", [1])]

    def loss(logits):
        assert logits.shape == (7, 512)
        return -logits[:-1].log_softmax(-1)[range(6), CORRUPT[1:]].mean()

    sweep = engine.patch_sweep(CLEAN, CORRUPT, loss, "mlp_out", layers=[4], positions=[-1, 2], steer=steer)
    assert sweep.labels == {"layer": [4], "position": [6, 2]}
    alone = engine.logits(CORRUPT, [Patch(engine.trace(CLEAN), "mlp_out", [4], where=[2]), *steer])
    assert abs(float(sweep.values[0, 1]) - float(loss(alone))) < 1e-4
    assert abs(sweep.corrupt - float(loss(engine.logits(CORRUPT, steer)))) < 1e-4
    single = engine.patch_sweep("abc", "abd", "x", "mlp_out", layers=[1], positions=[-1])
    assert abs(single.clean - float(engine.logits("abc")[-1, engine.tokenizer.encode("x")[0]])) < 1e-4
    label, value = sweep.top(1)[0]
    assert value in sweep.values and label["layer"] == 4 and "PatchSweep(1 layer x 2 positions" in repr(sweep)


def test_sixty_four_cells_are_one_pass_and_more_are_few(engine, monkeypatch):
    runs = []
    run = type(engine.model).run_texts
    monkeypatch.setattr(
        type(engine.model),
        "run_texts",
        lambda self, texts, tap: runs.append(len(texts)) or run(self, texts, tap),
    )
    prompt = list(range(5, 21))  # 16 tokens, 4 layers: 64 cells
    whole = engine.patch_sweep(prompt, prompt[::-1], (1, 2), "mlp_out", layers=[0, 1, 2, 3])
    assert (whole.cells, whole.passes, runs) == (
        64,
        1,
        [1, 65],
    )  # the clean text, then all cells and the corrupted one
    monkeypatch.setattr(forward, "PASS_TOKENS", 400)
    parts = engine.patch_sweep(prompt, prompt[::-1], (1, 2), "mlp_out", layers=[0, 1, 2, 3])
    assert parts.passes == 3
    torch.testing.assert_close(parts.values, whole.values, **CLOSE)


def test_a_sweep_takes_captured_rows_as_the_clean_run(engine):
    """`output.acts` have no logits: the metric of the clean text is that of its tokens run again."""
    output = engine.generate(CLEAN, max_tokens=1, capture=Capture({"mlp_out": "all"}))
    expected = engine.patch_sweep(CLEAN, CORRUPT, (7, 9), "mlp_out", layers=[1, 3])
    sweep = engine.patch_sweep(output.acts, CORRUPT, (7, 9), "mlp_out", layers=[1, 3])
    torch.testing.assert_close(sweep.values, expected.values, **CLOSE)
    assert sweep.clean == pytest.approx(expected.clean, abs=1e-4) and sweep.labels == expected.labels
    batch = engine.patch_sweep([output.acts, CLEAN], [CORRUPT, CORRUPT], (7, 9), "mlp_out", layers=[1, 3])
    torch.testing.assert_close(batch.values, expected.values.expand(2, -1, -1), **CLOSE)
    aligned = engine.patch_sweep(output.acts, SHORT, (7, 9), "mlp_out", layers=1, align="tokens")
    by_text = engine.patch_sweep(CLEAN, SHORT, (7, 9), "mlp_out", layers=1, align="tokens")
    assert aligned.labels == by_text.labels
    torch.testing.assert_close(aligned.values, by_text.values, **CLOSE)
    with pytest.raises(SteeringError, match=r"no rows of post_attn\[1\]; it holds mlp_out"):
        engine.patch_sweep(output.acts, CORRUPT, (7, 9), "post_attn", layers=1)


def test_one_number_stands_for_a_list_of_it(engine, clean):
    """Layers, positions, streams and heads: wherever Python takes a list, one of them is enough."""
    ones, prompt = torch.ones(64), CORRUPT
    for one, listed in [
        (Add(ones, "mlp_out", 3, where=2), Add(ones, "mlp_out", [3], where=[2])),
        (Add(ones, HOOK, -1, streams=1), Add(ones, HOOK, [-1], streams=[1])),
        (AttentionEdit(3, heads=1), AttentionEdit([3], heads=[1])),
        (ExpertSet(5, ban=[1]), ExpertSet([5], ban=[1])),
        (Patch(clean, HOOK, 2, where=4), Patch(clean, HOOK, [2], where=[4])),
    ]:
        changed = engine.logits(prompt, [one])
        assert changed.equal(engine.logits(prompt, [listed])) and not changed.equal(engine.logits(prompt))
    assert Capture({HOOK: 2}, 3, streams=1) == Capture({HOOK: [2]}, [3], streams=[1])
    rows = engine.generate(prompt, max_tokens=1, capture=Capture({HOOK: 2}, 3, streams=1)).acts[HOOK, 2]
    assert rows.positions == [3] and rows.tensor.shape[:2] == (1, 1)
    assert list(engine.trace(prompt, {"mlp_out": -1})) == [("mlp_out", 5)]
    assert list(engine.attention_patterns(prompt, 4)) == [4]
    assert {node.layer for node in engine.attribute(prompt, 5, layers=4)} == {4}
    sweep = engine.patch_sweep(clean, prompt, 5, HOOK, layers=2, positions=4, streams=3)
    assert sweep.labels == {"layer": [2], "position": [4], "stream": [3]}
    wire = {"memory": {"hooks": {"mlp_out": 3}}}  # the format of requests has lists
    with pytest.raises(CaptureValidationError, match=r"is 3, expected .* a list of layers"):
        engine.generate(prompt, max_tokens=1, capture=wire)


def test_refusals(engine, clean):
    mine = engine.trace(CLEAN, {"mlp_out": [2]})
    last = engine.generate(CLEAN, max_tokens=1, capture=Capture({"mlp_out": 2}, "last_prompt"))
    for kind, says, call in [
        (
            SteeringError,
            r"no rows of mlp_out\[3\]; it holds mlp_out",
            lambda: engine.patch(CORRUPT, mine, "mlp_out", [3]),
        ),
        (SteeringError, "position 6, but the last token", lambda: engine.patch(SHORT, clean, "mlp_out", [1])),
        (
            SteeringError,
            "where selects position 8",
            lambda: engine.patch([*CORRUPT, 1, 2], clean, "mlp_out", [1], where=[8]),
        ),
        (SteeringError, "takes experts, not patch", lambda: engine.patch(CORRUPT, clean, "moe_topk", [1])),
        (
            SteeringError,
            "align is 'words'",
            lambda: engine.patch(CORRUPT, clean, "mlp_out", [1], align="words"),
        ),
        (
            SteeringError,
            "needs the rows of a run",
            lambda: Patch(torch.ones(64), "mlp_out", [1], align="tokens"),
        ),
        (SteeringError, "no JSON form", lambda: Patch(clean, "mlp_out", [1]).to_json()),
        (PromptError, "takes one prompt", lambda: engine.patch([CORRUPT, CLEAN], clean, "mlp_out", [1])),
        (SiteError, "is not a hook", lambda: engine.patch_sweep(CLEAN, CORRUPT, 1, "nowhere")),
        (
            OptionError,
            "same layers",
            lambda: engine.patch_sweep(CLEAN, CORRUPT, 1, ["mlp_out", "final_hidden"]),
        ),
        (
            OptionError,
            "positions is 'all'",
            lambda: engine.patch_sweep(CLEAN, CORRUPT, 1, "mlp_out", positions="all"),
        ),
        (
            OptionError,
            "positions holds 7",
            lambda: engine.patch_sweep(CLEAN, CORRUPT, 1, "mlp_out", positions=[7]),
        ),
        (OptionError, "empty list", lambda: engine.patch_sweep(CLEAN, CORRUPT, 1, "mlp_out", positions=[])),
        (OptionError, "streams is 2.5", lambda: engine.patch_sweep(CLEAN, CORRUPT, 1, HOOK, streams=2.5)),
        (
            SteeringError,
            r"streams is \[4\], this model has streams 0..3",
            lambda: engine.patch_sweep(CLEAN, CORRUPT, 1, HOOK, streams=4),
        ),
        (
            PromptError,
            r"clean is Acts\(.*a row of every token of its text",
            lambda: engine.patch_sweep(last.acts, CORRUPT, 1, "mlp_out"),
        ),
        (
            PromptError,
            "a row of every token of its text",
            lambda: engine.patch_sweep(dict(mine), CORRUPT, 1, "mlp_out"),
        ),
        (
            PromptError,
            "a row of every token of its text",
            lambda: engine.patch_sweep(engine.generate(CLEAN, max_tokens=1).acts, CORRUPT, 1, "mlp_out"),
        ),
        (OptionError, "an id 0..511", lambda: engine.patch_sweep(CLEAN, CORRUPT, 512, "mlp_out")),
        (OptionError, "is 2 tokens", lambda: engine.patch_sweep(CLEAN, CORRUPT, "ab", "mlp_out")),
        (OptionError, "a pair of tokens", lambda: engine.patch_sweep(CLEAN, CORRUPT, (1, 2, 3), "mlp_out")),
        (
            OptionError,
            "a tensor of one number",
            lambda: engine.patch_sweep(CLEAN, CORRUPT, lambda x: x, "mlp_out"),
        ),
        (
            OptionError,
            "a tensor of one number",
            lambda: engine.patch_sweep(CLEAN, CORRUPT, lambda x: "a", "mlp_out"),
        ),
        (OptionError, "NaN", lambda: engine.patch_sweep(CLEAN, CORRUPT, lambda x: float("nan"), "mlp_out")),
    ]:
        with pytest.raises(kind, match=says):
            call()
    same = engine.patch_sweep(CLEAN, CLEAN, 1, "mlp_out", layers=[1], positions=[2])
    with pytest.raises(OptionError, match="same for both texts"):
        _ = same.recovered


def test_a_sweep_over_heads_patches_one_head_at_a_time(engine, clean):
    """A cell equals a patch of the whole row in which only that head's part is the clean one."""
    sweep = engine.patch_sweep(clean, CORRUPT, 5, "heads", layers=[1, 3], positions=[2, -1])
    heads, _ = engine.schema["attn_head_out"].logical_shape
    assert sweep.axes == ("layer", "position", "head") and sweep.values.shape == (2, 2, heads)
    before = engine.trace(CORRUPT, "attn_head_out")
    for i, layer in enumerate((1, 3)):
        for j, position in enumerate((2, 6)):
            for head in (0, heads - 1):
                row = before["attn_head_out", layer][position].clone()
                row[head] = clean["attn_head_out", layer][position][head]
                rows = PositionRows({position: row.flatten()})
                alone = engine.logits(CORRUPT, [Patch(rows, "attn_head_out", [layer])])
                assert abs(float(sweep.values[i, j, head]) - float(alone[-1, 5])) < 1e-4
    assert (sweep.values - sweep.corrupt).abs().max() > 1e-3
    together = engine.patch_sweep(CLEAN, CORRUPT, 5, "heads", layers=[1], positions=None)
    assert together.axes == ("layer", "head") and together.cells == heads
