"""Aliases and the names of other tools: bijections, checked against the tensors of running models."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.errors import OptionError, SiteError
from birkhoff.hooks.schema import build_hook_schema, schema_of
from birkhoff.hooks.site_names import ALIASES, TOOLS, known_name, refusal, resolve, to_tool, unnamed
from birkhoff.hooks.sites import BY_NAME
from birkhoff.hooks.tap import EagerTap
from tests.models import TINY, random_model, random_tokens
from tests.oracle import build_oracle

V4, L = schema_of(TINY, "float32"), TINY.num_hidden_layers
PLAIN = build_hook_schema(64, "float32", None)


@pytest.fixture(scope="module")
def run():
    """Tensors of one forward pass: ours by (hook, layer), and the reference port's by Transformers name."""
    model, tokens, ours, theirs = random_model(seed=8), random_tokens(TINY, 140, 8), {}, {}
    with torch.no_grad():
        model(tokens, EagerTap(lambda s, layer, x: ours.update({(s.name, layer): x.clone()})))
    oracle = build_oracle(model)

    def keep(name, side, part):
        def hook(module, args, out):
            value = args[0] if side == "input" else out
            theirs[name] = (value if part is None else value[int(part)]).squeeze(0).clone()

        return hook

    for hook in TOOLS["transformers"]:
        for layer in range(L):
            name = to_tool("transformers", (hook, layer), L)
            if name is not None:
                module, side, part = re.fullmatch(r"(.*):(input|output)(?:\[(\d)\])?", name).groups()
                oracle.get_submodule(module).register_forward_hook(keep(name, side, part))
    with torch.no_grad():
        oracle(tokens.unsqueeze(0), use_cache=False)
    return ours, theirs


@pytest.mark.parametrize("hook", TOOLS["transformers"])
def test_transformers_names_map_to_equal_tensors(hook, run):
    ours, theirs = run
    layers = [L - 1] if hook in V4 and V4[hook].once else range(L)
    for layer in layers:
        actual, other = ours[resolve(hook, layer, V4, L)], theirs[to_tool("transformers", (hook, layer), L)]
        assert actual.shape == other.shape and (actual - other).abs().max() <= 1e-4, (hook, layer)


def test_the_mixer_of_the_reference_port_is_indexed_from_to(run):
    """Rebuilding the streams distinguishes the two orders; sums over rows and columns do not."""
    _, theirs = run
    for layer in range(L):
        streams, after = theirs[f"model.layers.{layer}.ffn_hc:input"], theirs[f"model.layers.{layer}:output"]
        y, post = theirs[f"model.layers.{layer}.mlp:output"], theirs[f"model.layers.{layer}.ffn_hc:output[0]"]
        mix = theirs[f"model.layers.{layer}.ffn_hc:output[1]"]  # [n, from, to]
        write = post.unsqueeze(-1) * y.unsqueeze(-2)
        right = (write + torch.einsum("nij,nid->njd", mix, streams) - after).abs().max()
        wrong = (write + torch.einsum("nji,nid->njd", mix, streams) - after).abs().max()
        assert right <= 1e-4 < 1e-2 < wrong, layer


def test_streams_post_mlp_resolves_to_the_next_layers_input():
    for layer in range(L - 1):
        assert resolve("mhc_streams_post_mlp", layer, V4, L) == ("mhc_streams_pre_attn", layer + 1)
    assert resolve("mhc_streams_post_mlp", L - 1, V4, L) == ("mhc_streams_final", L - 1)
    assert resolve("mhc_streams_post_mlp", -1, V4, L) == ("mhc_streams_final", L - 1)
    assert resolve("mhc_streams_post_mlp", 0, V4, 1) == ("mhc_streams_final", 0)


def test_post_block_is_post_mlp_on_ordinary_models():
    assert resolve("post_block", 3, PLAIN, 12) == resolve("post_mlp", 3, PLAIN, 12) == ("post_mlp", 3)


@pytest.mark.parametrize("hook", ["post_mlp", "post_block"])
def test_post_mlp_on_v4_is_refused_with_alternatives(hook):
    with pytest.raises(SiteError) as refused:
        resolve(hook, 0, V4, L)
    message = str(refused.value)
    assert message.startswith(hook)
    assert all(
        name in message
        for name in ("mhc_streams_pre_mlp", "mhc_streams_pre_attn of the next layer", "mhc_streams_final")
    )


def test_errors_for_unknown_hooks_suggest_the_nearest_and_list_all():
    why = refusal("mlp_uot", V4)
    assert "Did you mean 'mlp_out'?" in why and why.endswith(f"It has: {', '.join(sorted(V4))}.")
    assert "Did you mean 'mhc_streams_post_mlp'?" in refusal("mhc_stream_post_mlp", V4)
    assert "Did you mean" not in refusal("zzz", V4)
    for name, hook in {
        "blocks.3.hook_resid_pre": "mhc_streams_pre_attn",
        "resid_mid": "mhc_streams_pre_mlp",
        "hook_resid_post": "mhc_streams_post_mlp",
        "blocks.0.hook_mlp_out": "mlp_out",
        "blocks.0.hook_attn_out": "post_attn",
        "blocks.0.attn.hook_z": "attn_head_out",
    }.items():
        assert f"DeepSeek-V4 has {hook!r} instead" in refusal(name, V4)
    assert (
        "An ordinary model has 'pre_attn'." in (why := refusal("resid_pre", PLAIN)) and "DeepSeek" not in why
    )
    assert "An ordinary model has 'attn_z'." in refusal("z", PLAIN) and "An ordinary" not in refusal("z", V4)
    for hook in ("mhc_streams_pre_attn", "mhc_streams_post_mlp", "mlp_in", "final_hidden"):
        assert refusal(hook, PLAIN).endswith("It has: post_attn, post_mlp, pre_attn.")
    assert all(refusal(hook, V4) is None for hook in [*V4, "mhc_streams_post_mlp"])
    assert all(refusal(hook, PLAIN) is None for hook in [*PLAIN, "post_block"])
    assert len(refusal("x" * 10**6, V4)) < 1000


@pytest.mark.parametrize("layer", [L, -L - 1, True, 2.0, "3", None])
def test_layers_that_do_not_exist_are_refused(layer):
    with pytest.raises(SiteError, match=rf"^mlp_out\[.*this model has layers 0\.\.{L - 1}"):
        resolve("mlp_out", layer, V4, L)


def test_the_nearest_layer_is_named():
    with pytest.raises(SiteError, match=rf"Nearest: mlp_out\[{L - 1}\]"):
        resolve("mlp_out", 50, V4, L)
    with pytest.raises(SiteError, match=r"Nearest: mlp_out\[0\]"):
        resolve("mlp_out", -50, V4, L)


@given(st.sampled_from([*V4]), st.integers(-L, L - 1))
def test_ordinary_names_resolve_to_themselves(hook, layer):
    assert resolve(hook, layer, V4, L) == (hook, L - 1 if V4[hook].once else layer % L)


def test_known_names():
    assert all(known_name(name) for name in [*BY_NAME, *ALIASES]) and known_name("blocks.0.hook_in")
    assert not known_name("blocks.0.hook_none") and not known_name("blocks.{}.hook_in")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("layers", [1, 2, 11, 101])
def test_the_tables_are_bijections(tool, layers):
    table = {}
    for hook in [*V4, *ALIASES]:
        for layer in range(layers):
            name = to_tool(tool, (hook, layer), layers)
            if name is not None:
                table[hook, layer] = name
    assert len(set(table.values())) == len(table), "two addresses share a name"
    once = sum(hook in V4 and V4[hook].once for hook in TOOLS[tool])
    assert len(table) == once + layers * (len(TOOLS[tool]) - once)
    assert not set(TOOLS[tool]) & set(unnamed(tool)) and set(TOOLS[tool]) | set(unnamed(tool)) >= set(V4)


def test_a_wrong_tool_or_layer_is_refused():
    with pytest.raises(
        OptionError, match="names is 'nnsight', expected one of transformer_lens, transformers"
    ):
        to_tool("nnsight", ("mlp_in", 0), L)
    with pytest.raises(SiteError, match=r"mlp_in\[6\]"):
        to_tool("transformers", ("mlp_in", L), L)


def test_transformer_lens_names_match_the_specification():
    """Listed here a second time, because notebooks depend on these names."""
    expected = {
        "mhc_streams_pre_attn": "blocks.2.hook_in",
        "mhc_streams_pre_mlp": "blocks.2.mlp_hc.hook_in",
        "mhc_streams_post_mlp": "blocks.2.hook_out",
        "pre_attn": "blocks.2.attn_hc.hook_out",
        "mlp_in": "blocks.2.mlp_hc.hook_out",
        "mhc_attn_post_mix": "blocks.2.attn_hc.hook_post",
        "mhc_ffn_post_mix": "blocks.2.mlp_hc.hook_post",
        "mhc_attn_res_mix": "blocks.2.attn_hc.hook_comb",
        "mhc_ffn_res_mix": "blocks.2.mlp_hc.hook_comb",
        "post_attn": "blocks.2.attn.hook_out",
        "mlp_out": "blocks.2.mlp.hook_out",
    }
    assert {hook: to_tool("transformer_lens", (hook, 2), L) for hook in expected} == expected
    assert to_tool("transformer_lens", ("final_hidden", L - 1), L) == "hc_head.hook_out"
    assert to_tool("transformer_lens", ("final_hidden", 0), L) is None
