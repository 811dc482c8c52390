"""T-CAP-1: the hooks of a tiny V4 model with shapes and dtypes; a model without hyper-connections has exactly three."""

from __future__ import annotations

import pytest
import torch

from birkhoff.errors import ConfigError
from birkhoff.hooks.schema import build_hook_schema, schema_of
from birkhoff.hooks.tap import EagerTap
from tests.models import TINY, random_model, random_tokens

M, D, E, K = TINY.hc_mult, TINY.hidden_size, TINY.n_routed_experts, TINY.num_experts_per_tok

# name -> row shape, dtype, may be edited, once (spec: interpretability 1.1)
EXPECTED = {
    "pre_attn": ((D,), "bfloat16", True, False),
    "post_attn": ((D,), "bfloat16", True, False),
    "mlp_in": ((D,), "bfloat16", True, False),
    "mlp_out": ((D,), "bfloat16", True, False),
    "mhc_streams_pre_attn": ((M, D), "bfloat16", True, False),
    "mhc_streams_pre_mlp": ((M, D), "bfloat16", True, False),
    "mhc_streams_final": ((M, D), "bfloat16", True, True),
    "mhc_attn_post_mix": ((M,), "float32", False, False),
    "mhc_ffn_post_mix": ((M,), "float32", False, False),
    "mhc_attn_res_mix": ((M, M), "float32", False, False),
    "mhc_ffn_res_mix": ((M, M), "float32", False, False),
    "mhc_attn_pre_mix": ((M,), "float32", False, False),
    "mhc_ffn_pre_mix": ((M,), "float32", False, False),
    "mhc_head_mix": ((M,), "float32", False, True),
    "final_hidden": ((D,), "bfloat16", True, True),
    "moe_router_logits": ((E,), "float32", False, False),
    "moe_topk": ((K, 2), "float32", False, False),
    "attn_head_out": ((TINY.num_attention_heads, TINY.head_dim), "bfloat16", True, False),
    "attn_weights": ((2 + TINY.num_attention_heads,), "float32", False, False),
    "index_scores": ((2,), "float32", False, False),
    "index_blocks": ((3,), "float32", False, False),
    "entry_tokens": ((2 + TINY.head_dim,), "float32", False, False),
}
RAGGED = {"attn_weights", "index_scores", "index_blocks", "entry_tokens"}


def test_t_cap_1_every_hook_with_its_shape_and_dtype():
    schema = schema_of(TINY, "bfloat16")
    assert {n: (h.logical_shape, h.dtype, h.steerable, h.once) for n, h in schema.items()} == EXPECTED
    for name, hook in schema.items():
        shape, dtype, _, _ = EXPECTED[name]
        assert hook.width == torch.Size(shape).numel() and len(hook.axes) == len(shape)
        assert hook.row_bytes == hook.width * getattr(torch, dtype).itemsize
    assert schema["mhc_attn_res_mix"].axes == schema["mhc_ffn_res_mix"].axes == ("from", "to")


def test_t_cap_1_an_ordinary_model_has_exactly_three():
    schema = build_hook_schema(96, "float16", None)
    assert list(schema) == ["pre_attn", "post_attn", "post_mlp"]
    for hook in schema.values():
        assert (hook.width, hook.dtype, hook.logical_shape, hook.steerable) == (96, "float16", (96,), True)


def test_without_their_sizes_the_hooks_of_experts_and_heads_are_absent():
    schema = build_hook_schema(D, "bfloat16", M)
    assert (
        set(EXPECTED) - set(schema) == {"moe_router_logits", "moe_topk", "attn_head_out", *RAGGED}
        and "post_mlp" not in schema
    )


def test_t_cap_1_captured_tensors_match_the_schema():
    model, seen = random_model(seed=3, dtype=torch.bfloat16), {}
    with torch.no_grad():
        model(random_tokens(TINY, 9, 3), EagerTap(lambda s, layer, x: seen.update({(s.name, layer): x})))
    schema, last = schema_of(TINY, "bfloat16"), TINY.num_hidden_layers - 1
    assert {name for name, _ in seen} == set(schema) - RAGGED
    for (name, layer), x in seen.items():
        assert tuple(x.shape[1:]) == schema[name].logical_shape, name
        assert str(x.dtype) == f"torch.{schema[name].dtype}", name
        assert layer == last or not schema[name].once


def test_schemas_compare_by_content():
    assert schema_of(TINY, "float32") == schema_of(TINY, "float32")
    assert schema_of(TINY, "float32") != schema_of(TINY, "bfloat16")


def test_hash_routed_layers_are_marked_on_routing_hooks_only():
    schema = schema_of(TINY, "float32")
    marked = {name: hook.hash_routed for name, hook in schema.items() if hook.hash_routed}
    expected = tuple(layer for layer in range(TINY.num_hidden_layers) if TINY.is_hash_routed(layer))
    assert expected and marked == {"moe_router_logits": expected, "moe_topk": expected}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, "bfloat16", 4), "hidden"),
        ((True, "bfloat16", 4), "hidden"),
        ((None, "bfloat16", 4), "hidden"),
        ((64, "bf16", 4), "dtype"),
        ((64, "float32", 0), "hc_mult"),
        ((64, "float32", 4, -1, 2), "experts"),
        ((64, "float32", 4, 8, 0), "experts_per_token"),
    ],
)
def test_invalid_sizes_raise_errors_that_name_the_argument(arguments, named):
    with pytest.raises(ConfigError, match=f"^{named} is"):
        build_hook_schema(*arguments)


def test_ragged_hooks_name_their_layers_and_bound_their_rows():
    schema = schema_of(TINY, "float32")
    assert {name for name, row in schema.items() if row.ragged is not None} == RAGGED
    assert schema["index_scores"].layers == schema["index_blocks"].layers == (2, 4)
    assert schema["entry_tokens"].layers == (2, 3, 4, 5) and schema["attn_weights"].layers is None
    bounds = schema["attn_weights"].ragged
    window, topk = TINY.sliding_window, TINY.index_topk
    assert bounds.most("attn_weights", 0, 300) == window + 1
    assert bounds.most("attn_weights", 2, 300) == window + topk + 1
    assert bounds.most("attn_weights", 3, 300) == window + 2 + 1
    assert bounds.most("index_scores", 2, 300) == 75 and bounds.most("index_blocks", 2, 300) == topk
    assert bounds.most("entry_tokens", 2, 300) == 8 and bounds.most("entry_tokens", 3, 300) == 128
    assert schema["index_scores"].to_json()["layers"] == [2, 4] and schema["index_scores"].to_json()["ragged"]
