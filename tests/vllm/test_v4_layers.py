"""Armed layers of V4 in both shapes, without vLLM: a layer that hands on streams, and one that hands on the parts of a
fused boundary. Both compute the same, armed beside fused ones too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from birkhoff.errors import UnsupportedModel
from birkhoff.hooks.sites import SITES
from birkhoff.hooks.tap import EagerTap, NoTap
from birkhoff.vllm.armed_sites import V4_HOOKS
from birkhoff.vllm.armed_v4 import ArmedV4Layer, CpuBoundary, NvidiaBoundary, arm_v4

D, STREAMS, LAYERS = 6, 4, 3
EVERY = dict.fromkeys(V4_HOOKS[:-1], tuple(range(LAYERS))) | {"mhc_streams_final": (2,), "final_hidden": (2,)}


class Sublayer(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.weight = torch.randn(D, D, generator=torch.Generator().manual_seed(seed))

    def forward(self, *given):
        x = given[1] if given[0].dim() == 1 else given[0]  # attention takes positions first
        return torch.tanh(x @ self.weight)


class Layer(nn.Module):
    """`fused` layers are handed (y, streams, post, mix) and hand on the same."""

    hc_mult = STREAMS
    rms_norm_eps = hc_eps = 1e-6
    hc_post_alpha, hc_sinkhorn_iters = 2.0, 3

    def __init__(self, number, fused):
        super().__init__()
        self.use_fused_mhc = fused
        self.attn, self.ffn = Sublayer(number), Sublayer(100 + number)
        self.attn_norm = self.ffn_norm = nn.Identity()
        for name in ("attn", "ffn"):
            for part in ("fn", "scale", "base"):
                seed = 1000 * number + len(name) + len(part)
                value = torch.randn(STREAMS, generator=torch.Generator().manual_seed(seed))
                setattr(self, f"hc_{name}_{part}", value)

    def hc_pre(self, streams, fn, scale, base):
        weights = torch.softmax(streams.mean(-1) * fn + base, -1)
        mix = torch.softmax(streams @ streams.transpose(1, 2) * scale.abs().mean(), -1)
        return (weights.unsqueeze(-1) * streams).sum(1), weights.unsqueeze(-1) * 2, mix

    def hc_post(self, y, streams, post, mix):
        return mix.transpose(1, 2) @ streams + post * y.unsqueeze(1)

    def weights(self, name):
        return tuple(getattr(self, f"hc_{name}_{part}") for part in ("fn", "scale", "base"))

    def forward(self, x, positions, input_ids, post_mix=None, res_mix=None, residual=None):
        streams = x if residual is None else self.hc_post(x, residual, post_mix, res_mix)
        if streams.dim() == 2:
            streams = streams.unsqueeze(1).expand(-1, STREAMS, -1).contiguous()
        u, post, mix = self.hc_pre(streams, *self.weights("attn"))
        streams = self.hc_post(self.attn(positions, self.attn_norm(u), None), streams, post, mix)
        u, post, mix = self.hc_pre(streams, *self.weights("ffn"))
        y = self.ffn(self.ffn_norm(u), input_ids)
        if self.use_fused_mhc:
            return y, streams, post, mix
        return self.hc_post(y, streams, post, mix), None, None, None


class Head(nn.Module):
    def forward(self, streams, *more):
        return streams.mean(1)


class Model(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(number, fused) for number in range(LAYERS))
        self.model.start_layer, self.model.end_layer = 0, LAYERS
        self.model.hc_head_op = Head()

    def forward(self, x):
        positions = torch.arange(len(x))
        residual = post = mix = None
        for layer in self.model.layers:
            x, residual, post, mix = layer(x, positions, None, post, mix, residual)
        if layer.use_fused_mhc:
            x = layer.hc_post(x, residual, post, mix)
        return self.model.hc_head_op(x)


def nvidia(layer):
    """The unfused kernels as vLLM names their arguments; `x` is returned last."""

    def pre(streams, fn, scale, base, rms, eps, sinkhorn, alpha, rounds):
        assert (rms, eps, sinkhorn, alpha, rounds) == (1e-6, 1e-6, 1e-6, 2.0, 3)
        u, post, mix = layer.hc_pre(streams, fn, scale, base)
        return post, mix, u

    return NvidiaBoundary(layer, pre, layer.hc_post)


ROWS = torch.randn(5, D, generator=torch.Generator().manual_seed(9))


def seen_by(model, edits=None):
    seen = {}
    tap = EagerTap(
        lambda site, layer, x: seen.__setitem__((site.name, layer), x.clone()),
        None if edits is None else lambda site, layer, x: edits.get((site.name, layer), lambda rows: None)(x),
    )
    return seen, tap.at


@pytest.mark.parametrize("fused, boundary", [(False, CpuBoundary), (True, CpuBoundary), (True, nvidia)])
def test_an_armed_layer_computes_the_same(fused, boundary):
    plain = Model(fused)(ROWS)
    armed = Model(fused)
    arm_v4(armed.model, EVERY, lambda layer: NoTap(), boundary)
    assert torch.equal(armed(ROWS), plain)
    assert torch.allclose(Model(not fused)(ROWS), plain, atol=1e-5)


def test_both_shapes_show_the_same_rows_beside_layers_that_stay_fused():
    models = [Model(False), Model(True), Model(True)]
    chosen = {hook: tuple(layers) for hook, layers in EVERY.items()}
    middle = {hook: (1,) for hook in V4_HOOKS if hook not in ("mhc_streams_final", "final_hidden")}
    captured = []
    for model, armed, boundary in zip(models, (chosen, chosen, middle), (CpuBoundary, nvidia, nvidia)):
        seen, tap_at = seen_by(model)
        arm_v4(model.model, armed, tap_at, boundary)
        model(ROWS)
        captured.append(seen)
    assert set(captured[0]) == {(hook, layer) for hook, layers in EVERY.items() for layer in layers}
    for key, rows in captured[2].items():
        assert torch.equal(rows, captured[1][key]), key
    for key, rows in captured[0].items():
        assert torch.allclose(rows, captured[1][key], atol=1e-5), key
    assert [type(layer) is ArmedV4Layer for layer in models[2].model.layers] == [False, True, False]


def test_an_edit_between_the_halves_of_a_boundary_moves_what_follows():
    outputs = []
    for edits in (None, {("mhc_streams_pre_mlp", 1): lambda x: x + 1.0}):
        model = Model(True)
        seen, tap_at = seen_by(model, edits)
        arm_v4(model.model, EVERY, tap_at, nvidia)
        outputs.append((model(ROWS), seen))
    plain, steered = outputs
    assert torch.equal(plain[1]["mhc_streams_pre_mlp", 1], steered[1]["mhc_streams_pre_mlp", 1])
    assert torch.equal(plain[1]["pre_attn", 1], steered[1]["pre_attn", 1])
    assert not torch.allclose(plain[1]["mlp_in", 1], steered[1]["mlp_in", 1])
    assert not torch.allclose(plain[0], steered[0])


@pytest.mark.parametrize("boundary", [CpuBoundary, nvidia])
def test_mixers_can_be_edited(boundary):
    """Post weights of zero keep the output of the sublayer out of the streams; an identity keeps the streams apart."""
    edits = {
        ("mhc_attn_post_mix", 1): torch.zeros_like,
        ("mhc_attn_res_mix", 1): lambda mix: torch.eye(STREAMS).expand_as(mix),
    }
    model = Model(True)
    seen, tap_at = seen_by(model, edits)
    arm_v4(model.model, EVERY, tap_at, boundary)
    model(ROWS)
    assert torch.allclose(seen["mhc_streams_pre_mlp", 1], seen["mhc_streams_pre_attn", 1])
    assert not torch.allclose(seen["mhc_streams_pre_mlp", 0], seen["mhc_streams_pre_attn", 0])


def test_what_cannot_be_armed_is_refused():
    model = Model(True)
    del model.model.hc_head_op
    with pytest.raises(UnsupportedModel, match="mhc_streams_final and final_hidden cannot be armed"):
        arm_v4(model.model, EVERY, lambda layer: NoTap(), nvidia)
    model = Model(True)
    model.model.layers[1].use_sequence_parallel = True
    with pytest.raises(UnsupportedModel, match="sequence parallelism"):
        arm_v4(model.model, EVERY, lambda layer: NoTap(), nvidia)
    assert {site.name for site in SITES} >= set(V4_HOOKS)
