"""`Trace` as a mapping, its names, files and batches, and the prompts that all analyses take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import birkhoff
from birkhoff import Add, AttentionEdit, Capture, ExpertSet, Patch, Scale
from birkhoff.convert.synth import synth
from birkhoff.errors import (
    CaptureValidationError,
    DataError,
    OptionError,
    PromptError,
    SelectorError,
    SiteError,
    SteeringError,
)
from birkhoff.hooks.site_names import TOOLS, resolve, to_tool
from birkhoff.trace import Trace, TraceBatch

TEXT = "a small text"
CHAT = [{"role": "user", "content": "hello"}]
IDS = [0, 17, 300, 4, 99]
LAYERS = 6


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "tiny"
    synth(path, "tiny", seed=5)
    with birkhoff.load(path, cache_bytes=2**26, max_context=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def trace(engine):
    return engine.trace(IDS)


def test_tensors_before_and_after_the_edits_of_their_site(engine, trace):
    """`capture_point="after"` gives what a capture of the same name gives; other texts of the pass keep theirs."""
    one, streams = torch.linspace(-2, 2, 64), "mhc_streams_pre_attn"
    cases = [("mlp_out", Add(one, "mlp_out", [2])), ("mlp_out", Patch(0, "mlp_out", [2], where=[1]))]
    cases += [(streams, Add(one, streams, [2], streams=[1], path=path)) for path in ("both", "read", "carry")]
    cases += [
        ("moe_topk", ExpertSet([2], ban=[0, 1])),
        ("attn_head_out", AttentionEdit([2], heads=[1])),
        ("mhc_attn_res_mix", Patch("identity", "mhc_attn_res_mix", [2])),
        ("mhc_ffn_pre_mix", Scale(0, "mhc_ffn_pre_mix", [2])),
    ]
    for hook, edit in cases:
        capture = Capture({hook: [2]}, "all_prompt", capture_point="after")
        expected = engine.generate(IDS, max_tokens=1, capture=capture, steer=[edit]).acts[hook, 2].tensor
        after = engine.trace([IDS, IDS], hook, steer=[[edit], None], capture_point="after")
        before = engine.trace(IDS, hook, steer=[edit])
        assert torch.allclose(after[0][hook, 2], expected, atol=1e-5), (hook, edit)
        assert torch.allclose(before[hook, 2], trace[hook, 2], atol=1e-5)
        assert torch.allclose(after[1][hook, 2], trace[hook, 2], atol=1e-5)
        assert not torch.allclose(after[0][hook, 2], before[hook, 2], atol=1e-3)
    mixed = [[Add(one, streams, [2], streams=[1], path=path)] for path in ("read", "carry")]
    both = engine.trace([IDS, IDS], streams, steer=mixed, capture_point="after")
    assert torch.allclose(both[0][streams, 2], both[1][streams, 2], atol=1e-5)
    with pytest.raises(OptionError, match="capture_point is 'later'"):
        engine.trace(IDS, capture_point="later")


def test_a_trace_is_a_mapping(engine, trace):
    copied = dict(trace)
    assert list(copied) == list(trace.keys()) == list(trace) and len(trace) == len(copied)
    assert all(tensor is trace[key] for key, tensor in trace.items())
    assert trace.get(("mlp_out", 99)) is None and trace.get("mlp_out") is not None
    assert ("mlp_out", -1) in trace and "mlp_out" in trace and "blocks.2.mlp.hook_out" in trace
    for key in (
        ("mlp_out", LAYERS),
        "nowhere",
        ("mlp_out", 1.0),
        ("mlp_out",),
        3,
        None,
        "blocks.6.mlp.hook_out",
    ):
        assert key not in trace
    order = [(layer, birkhoff.hooks.sites.BY_NAME[hook].id) for hook, layer in trace]
    assert order == sorted(order)


def test_keys_have_the_order_of_captured_rows(engine, trace):
    hooks = {"final_hidden": "all", "mlp_out": [4, 1], "pre_attn": [1]}
    acts = engine.generate(IDS, max_tokens=1, capture=Capture(hooks)).acts
    assert list(acts) == list(engine.trace(IDS, hooks)) == [key for key in trace if key in set(acts)]
    for key, rows in acts.items():
        torch.testing.assert_close(rows.tensor, trace[key], rtol=1e-4, atol=1e-4)


def test_a_hook_alone_is_stacked_over_its_layers(trace):
    stacked = trace["mlp_out"]
    assert stacked.shape == (LAYERS, len(IDS), 64) and torch.equal(stacked[2], trace["mlp_out", 2])
    assert torch.equal(trace["mlp_out", -2], trace["mlp_out", LAYERS - 2])
    once = trace["mhc_streams_final"]
    assert torch.equal(once, trace["mhc_streams_final", 0]) and torch.equal(
        once, trace["mhc_streams_final", -1]
    )
    leaving = trace["mhc_streams_post_mlp"]
    assert torch.equal(leaving[0], trace["mhc_streams_pre_attn", 1]) and torch.equal(leaving[-1], once)


def test_some_layers_of_a_hook(engine, trace):
    some = engine.trace(IDS, {"mlp_out": [-1, 0], "blocks.3.hook_out": "all", "hc_head.hook_out": "all"})
    assert some.layers("mlp_out") == [0, 5] and some["mlp_out"].shape[0] == 2
    assert set(some) == {("mlp_out", 0), ("mlp_out", 5), ("mhc_streams_pre_attn", 4), ("final_hidden", 5)}
    assert torch.equal(some["blocks.3.hook_out"], trace["mhc_streams_pre_attn", 4])
    with pytest.raises(
        SiteError, match=r"was not traced\. This trace holds final_hidden, mhc_streams_pre_attn, mlp_out"
    ):
        some["mlp_out", 1]
    for key, words in {
        ("mlp_otu", 0): "Did you mean 'mlp_out'?",
        "mlp_otu": "Did you mean 'mlp_out'?",
        ("mlp_out", 6): "There is no layer 6.",
        ("resid_pre", 3): "DeepSeek-V4 has 'mhc_streams_pre_attn' instead, the four residual streams.",
        "blocks.3.hook_mlp_out": "DeepSeek-V4 has 'mlp_out' instead.",
        (): "() was not traced. This trace holds",
    }.items():
        with pytest.raises(SiteError) as refused:
            some[key]
        assert words in str(refused.value), key


@pytest.mark.parametrize("tool", TOOLS)
def test_every_name_of_another_tool_is_the_tensor_of_ours(engine, trace, tool):
    names = 0
    for hook in TOOLS[tool]:
        for layer in range(LAYERS):
            name = to_tool(tool, (hook, layer), LAYERS)
            if name is not None:
                names += 1
                ours = trace[resolve(hook, layer, engine.schema, LAYERS)]
                assert trace[name] is ours and trace[name, layer] is ours
                assert resolve(name, None, engine.schema, LAYERS) == resolve(
                    hook, layer, engine.schema, LAYERS
                )
    assert names > 5 * LAYERS


def test_names_of_other_tools_in_captures_edits_and_features(engine):
    vector = torch.randn(64, generator=torch.Generator().manual_seed(1))
    ours = engine.logits(IDS, [Add(vector, "mlp_out", [2]), Patch(0, "mhc_streams_pre_attn", [3])])
    theirs = engine.logits(IDS, [Add(vector, "blocks.2.mlp.hook_out"), Patch(0, "blocks.3.hook_in", [3])])
    assert torch.equal(ours, theirs) and not torch.equal(ours, engine.logits(IDS))
    acts = engine.generate(
        IDS, max_tokens=1, capture=Capture({"blocks.2.hook_out": "all", "mlp_out": [1]})
    ).acts
    assert set(acts) == {("mhc_streams_pre_attn", 3), ("mlp_out", 1)}
    assert acts["blocks.2.hook_out"] is acts["mhc_streams_pre_attn", 3] is acts["blocks.3.hook_in"]
    assert acts["blocks.1.mlp.hook_out"] is acts["mlp_out", 1] and "blocks.2.hook_out" in acts
    sae = birkhoff.Sae(
        torch.eye(64), torch.zeros(64), torch.eye(64), torch.zeros(64), hook="mlp_out", layer=2
    )
    with engine.attach("eye", sae):
        expected = engine.features(IDS, "eye", k=3)
        assert engine.features(IDS, "eye", k=3, at="blocks.2.mlp.hook_out") == expected
        assert engine.features(IDS, "eye", k=3, at=("mlp_out", -4)) == expected


def test_a_name_with_another_layer_is_refused(engine):
    vector = torch.ones(64)
    with pytest.raises(SelectorError, match="tensor of layer 2, but other layers are selected"):
        engine.logits(IDS, [Add(vector, "blocks.2.mlp.hook_out", [1])])
    with pytest.raises(CaptureValidationError, match="tensor of layer 2"):
        engine.generate(IDS, capture=Capture({"blocks.2.mlp.hook_out": [1, 2]}))
    with pytest.raises(SiteError, match=r"layers 0\.\.5"):
        engine.trace(IDS, "blocks.9.mlp.hook_out")
    with pytest.raises(SiteError, match="is not a hook of this model"):
        engine.trace(IDS, "blocks.2.hook_resid_pre")  # an ordinary model's
    with pytest.raises(SteeringError, match="says no layers"):
        engine.logits(IDS, [Add(vector, "mlp_out")])


def test_numpy_and_files(trace, tmp_path):
    arrays = trace.numpy()
    assert list(arrays) == list(trace) and all(isinstance(array, np.ndarray) for array in arrays.values())
    assert np.array_equal(arrays["mlp_out", 3], trace["mlp_out", 3].numpy())
    trace.save(tmp_path / "trace.safetensors")
    again = Trace.load(tmp_path / "trace.safetensors")
    assert list(again) == list(trace) and all(torch.equal(again[key], trace[key]) for key in trace)
    assert torch.equal(again.logits, trace.logits)
    assert (again.token_ids, again.tokens, repr(again)) == (trace.token_ids, trace.tokens, repr(trace))
    assert torch.equal(again["blocks.1.hook_in"], trace["blocks.1.hook_in"])
    half = Trace(trace.logits, {("mlp_out", 0): trace["mlp_out", 0].bfloat16()}, LAYERS)
    assert half.numpy()["mlp_out", 0].dtype == np.float32
    (tmp_path / "other.safetensors").write_bytes(b"no trace")
    for name in ("other.safetensors", "missing.safetensors"):
        with pytest.raises(DataError, match="cannot be read as a trace"):
            Trace.load(tmp_path / name)


def test_text_messages_and_ids_are_the_same_prompt(engine):
    for prompt, ids in ((TEXT, engine.prompt_ids(TEXT)), (CHAT, engine.encode_chat(CHAT))):
        for call in (
            lambda p: engine.logits(p),
            lambda p: engine.trace(p, "mlp_out")["mlp_out"],
            lambda p: engine.lens(p).logits(3),
            lambda p: engine.attention(p)[2].window,
        ):
            assert torch.equal(call(prompt), call(ids))
        assert engine.trace(prompt, []).token_ids == ids
        assert (
            engine.generate(prompt, max_tokens=3, seed=1).token_ids
            == engine.generate(ids, max_tokens=3, seed=1).token_ids
        )
    assert "".join(engine.trace(TEXT, []).tokens[1:]) == TEXT


def test_several_prompts_give_what_each_gives_alone(engine):
    """Lists are ragged: every result is as long as its prompt. A batch of traces can also be padded."""
    prompts = [TEXT, [7], CHAT, [5, 6, 7], "b"]
    batch = engine.trace(prompts, ["mlp_out", "mhc_streams_final"])
    assert isinstance(batch, TraceBatch) and len(batch) == 5 and batch.padding == "right"
    logits, lenses, attended = engine.logits(prompts), engine.lens(prompts), engine.attention(prompts, 0)
    for index, prompt in enumerate(prompts):
        alone = engine.trace(prompt, ["mlp_out", "mhc_streams_final"])
        count = batch.lengths[index]
        assert batch[index].token_ids == alone.token_ids and count == len(alone.token_ids)
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(batch[index].logits, alone.logits, **close)
        torch.testing.assert_close(logits[index], alone.logits, **close)
        torch.testing.assert_close(lenses[index].logits(-1), alone.logits, **close)
        torch.testing.assert_close(attended[index][0].window, engine.attention(prompt, 0)[0].window, **close)
        for key in alone:
            torch.testing.assert_close(batch[index][key], alone[key], **close)
            assert torch.equal(batch[key][index, :count], batch[index][key])
        assert torch.equal(batch["mlp_out"][index, :, :count], batch[index]["mlp_out"])
        assert torch.equal(batch["mhc_streams_final"][index, :count], batch[index]["mhc_streams_final"])
        assert torch.equal(batch["blocks.2.mlp.hook_out"][index, :count], batch[index]["mlp_out", 2])
        assert not batch["mlp_out", 1][index, count:].any() and batch.mask[index].sum() == count
    assert batch.logits.shape == (5, max(batch.lengths), 512) and batch.keys() == list(batch[0])
    assert [trace.token_ids for trace in batch[1:3]] == [[7], engine.encode_chat(CHAT)]
    with pytest.raises(PromptError, match="list of prompts is empty"):
        engine.trace([])


def test_every_prompt_has_its_own_edits(engine):
    vector = torch.randn(64, generator=torch.Generator().manual_seed(2)) * 3
    edit = Add(vector, "mlp_out", [1])
    plain, steered = engine.logits([IDS, IDS], steer=[None, [edit]])
    torch.testing.assert_close(plain, engine.logits(IDS), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(steered, engine.logits(IDS, [edit]), rtol=1e-4, atol=1e-4)
    assert (plain - steered).abs().max() > 0.1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=9), min_size=1, max_size=6))
def test_any_lengths_run_together(engine, texts):
    batch = engine.trace(texts, "mlp_out")
    assert batch.lengths == [len(ids) for ids in texts]
    for ids, trace in zip(texts, batch):
        torch.testing.assert_close(trace.logits, engine.logits(ids), rtol=1e-3, atol=1e-3)


def test_long_lists_run_in_several_passes(engine, monkeypatch):
    from birkhoff.analysis import forward

    texts = [[5] * 7, [6] * 3, [7] * 9, [8] * 2]
    whole = engine.logits(texts)
    monkeypatch.setattr(forward, "PASS_TOKENS", 10)
    assert list(forward.passes(texts)) == [[0, 1], [2], [3]]
    for one, other in zip(whole, engine.logits(texts)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_in_takes_the_keys_of_the_brackets(engine, trace):
    batch = engine.trace([IDS, IDS[:2]])
    for key in (("mlp_out", 3), ("mlp_out", -1), "mlp_out", "blocks.1.hook_in", ("blocks.1.mlp.hook_out", 1),
                "model.layers.1.mlp:output", ("mhc_streams_post_mlp", 0), ("final_hidden", 0)):  # fmt: skip
        assert key in trace and key in batch
        assert trace[key] is not None and batch[key] is not None
    for key in (("mlp_out", LAYERS), ("mlp_out",), "mlp_oat", ("mlp_out", "3"), 3, None):
        assert key not in trace and key not in batch
    assert batch[0] in batch and trace not in batch


def test_hooks_by_a_function(engine, trace):
    some = engine.trace(IDS, lambda hook, layer: hook.startswith("mhc_") and layer > 2)
    assert set(some) == {(hook, layer) for hook, layer in trace if hook.startswith("mhc_") and layer > 2}
    assert all(torch.equal(some[key], trace[key]) for key in some)
    assert not engine.trace(IDS, lambda hook, layer: False)
    with engine.grad(lambda hook, layer: hook == "mlp_out") as g:
        g.backward(engine.logits(IDS)[-1, 3])
    assert g.acts.hooks == ["mlp_out"]
