"""Packed weights give the results of the same weights unpacked."""

from __future__ import annotations

import pytest
import torch

from birkhoff.hooks.tap import NoTap
from birkhoff.kernels import quant
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.linear import Linear, Numerics, stack_linears
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer
from tests.models import TINY, fill_random, random_tokens, weights_of

LENGTH = 150


def packed_and_unpacked(released: bool, dtype: torch.dtype) -> tuple[Transformer, Transformer]:
    """A model with codes and scales, and one with their values."""
    numerics = Numerics(dtype, released)
    packed, dense = Transformer(TINY, numerics, packed=True), Transformer(TINY, numerics)
    fill_random(dense, 8)
    values, made = weights_of(dense), {}
    with torch.no_grad():
        for d in packed.destinations():
            if d.kind == "codes":
                quantise = quant.quant_fp8 if d.tensor.dtype == torch.float8_e4m3fn else quant.quant_fp4
                codes, scale = quantise(values[d.name].float())
                made[d.name], made[d.name.removesuffix("weight") + "scale"] = codes, scale
                unpack = quant.dequant_fp8 if d.tensor.dtype == torch.float8_e4m3fn else quant.dequant_fp4
                values[d.name].copy_(unpack(codes, scale))
            elif d.tensor.dtype is torch.bfloat16:  # the release stores float32 weights in 16 bits
                values[d.name].copy_(values[d.name].bfloat16())
        for d in packed.destinations():
            source = made.get(d.name)
            if source is None:
                source = values[d.name]
            d.tensor.copy_(source.view(d.tensor.dtype) if d.kind in ("codes", "scale") else source)
    return packed.eval(), dense.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("released", [False, True], ids=["plain", "released"])
def test_a_packed_model_equals_the_unpacked_one(released, dtype):
    packed, dense = packed_and_unpacked(released, dtype)
    assert (
        sum(d.kind == "codes" for d in packed.destinations()) == 7 * 8 + 2 + 2 + 7 * 3 * TINY.n_routed_experts
    )
    for actual, expected in zip(packed.modules(), dense.modules(), strict=True):
        assert not isinstance(actual, Linear) or torch.equal(actual.dense(), expected.dense())
    # The unpacked matrices are equal to the bit; only their layout, and so the order of a sum, may differ.
    near = 1e-4 if not released and dtype is torch.float32 else 0.05
    tokens = random_tokens(TINY, LENGTH, 8)
    with torch.no_grad():
        logits = dense(tokens)
        assert (packed(tokens) - logits).abs().max() < near
        states = [State.contiguous(TINY, 1, LENGTH, dtype=dtype, mtp=True) for _ in range(2)]
        for at, stop in ((0, 100), (100, 101), (101, 102)):
            batch = Batch.of([SequenceChunk(0, at, tokens[at:stop])])
            (actual, streams), (expected, _) = (
                m.run(batch, s, NoTap()) for m, s in zip((packed, dense), states)
            )
            drafts = [m.draft(streams, batch, s)[0] for m, s in zip((packed, dense), states)]
            assert (actual - expected).abs().max() < near and (drafts[0] - drafts[1]).abs().max() < near


def test_packed_shapes_equal_the_file_shapes_with_partial_blocks():
    layer = Linear(200, 130, "fp8", Numerics(), packed=True)
    shapes = {d.name: tuple(d.tensor.shape) for d in layer.destinations("w")}
    assert shapes == {"w.weight": (130, 200), "w.scale": (2, 2)}
    assert [d.name for d in Linear(64, 48, "bf16", Numerics(), packed=True).destinations("w")] == ["w.weight"]


def test_stacked_matrices_keep_their_names_and_order():
    layer = Linear(6, {"w1": 3, "w3": 5}, "fp8", Numerics())
    first, second = layer.destinations("x")
    with torch.no_grad():
        first.tensor.fill_(1.0)
        second.tensor.fill_(2.0)
    assert (first.name, second.name) == ("x.w1.weight", "x.w3.weight")
    assert layer(torch.ones(1, 6)).tolist() == [[6.0] * 3 + [12.0] * 5]


@pytest.mark.parametrize(
    ("role", "inside"), [("fp8", torch.bfloat16), ("bf16", torch.bfloat16), ("f32", torch.float32)]
)
def test_the_role_selects_the_dtype_of_the_product(role, inside):
    layer = Linear(8, 4, role, Numerics(torch.bfloat16))
    torch.nn.init.ones_(layer.weight)
    assert layer.weight.dtype == layer(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == inside


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
def test_stacked_layers_keep_views_of_one_matrix(packed):
    layers = [
        Linear(256, {"a": 130, "b": 6}, "fp8", Numerics(), packed),
        Linear(256, 20, "fp8", Numerics(), packed),
    ]
    for layer in layers:
        for destination in layer.destinations("w"):
            scale = destination.kind == "scale"
            values = (
                torch.full(destination.tensor.shape, 124 + len(layer.parts))
                if scale
                else torch.randn(destination.tensor.shape)
            )
            destination.tensor.copy_(values.to(destination.tensor.dtype))
    before = [layer.dense().clone() for layer in layers]
    stacked = stack_linears(layers, narrow=False)
    assert torch.equal(stacked.dense(), torch.cat(before))
    assert all(torch.equal(layer.dense(), dense) for layer, dense in zip(layers, before))
    first = stacked.weight.data_ptr()
    row_bytes = stacked.weight[0].nbytes
    assert [layer.stored.data_ptr() - first for layer in layers] == [0, 136 * row_bytes]
    assert all(torch.equal(layer.packed_weight().dense(), dense) for layer, dense in zip(layers, before))
