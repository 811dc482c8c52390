"""The standalone layer: equal to the trunk's mixer and the oracle's modules; weight forms, gradients, refusals."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)

from birkhoff.config import V4Config
from birkhoff.errors import (
    OptionError,
    TensorDtype,
    TensorMissing,
    TensorShape,
    TensorUnexpected,
    TensorValue,
)
from birkhoff.mhc import HyperConnection
from birkhoff.model.linear import Numerics
from birkhoff.model.mhc import HeadMixer, Mixer
from tests.model.float64 import Float64
from tests.models import TINY, variant
from tests.oracle import oracle_config


def drawn(shape, seed, spread=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def random_layer(config: V4Config = TINY, seed: int = 0) -> HyperConnection:
    """A layer with random parameters."""
    layer = HyperConnection(config.hidden_size, config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps)
    spreads = {"fn": 0.1, "head_fn": 0.1}
    layer.load_weights(
        {
            n: drawn(p.shape, seed + i, spreads.get(n, 0.8))
            for i, (n, p) in enumerate(layer.named_parameters())
        }
    )
    return layer


def test_it_is_the_trunks_mixer_and_head_bit_for_bit():
    layer, mixer, head = random_layer(), Mixer(TINY, Numerics()), HeadMixer(TINY)
    with torch.no_grad():
        for part in ("fn", "base", "scale"):
            getattr(mixer, part).copy_(getattr(layer, part))
            getattr(head, part).copy_(getattr(layer, f"head_{part}"))
    for dtype in (torch.float32, torch.bfloat16):
        streams, y = drawn((50, 4, 64), 1).to(dtype), drawn((50, 64), 2).to(dtype)
        u, post, comb = layer.pre(streams)
        theirs = mixer.read(streams)
        assert torch.equal(u, theirs[0]) and torch.equal(post, theirs[2]) and torch.equal(comb, theirs[3])
        assert torch.equal(layer.post(streams, y, post, comb), mixer.write(streams, y, post, comb))
        assert torch.equal(layer.head(streams), head(streams)[0])
        assert u.dtype == dtype and comb.dtype == torch.float32


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_it_is_the_oracles_modules(streams):
    config = variant(hc_mult=streams)
    layer = random_layer(config)
    theirs, head = (
        DeepseekV4HyperConnection(oracle_config(config)),
        DeepseekV4HyperHead(oracle_config(config)),
    )
    theirs.load_state_dict({n: p for n, p in layer.state_dict().items() if "head" not in n})
    head.load_state_dict({n.replace("head", "hc"): p for n, p in layer.state_dict().items() if "head" in n})
    x = drawn((3, 7, streams, 64), 3)
    with torch.no_grad():
        (u, post, comb), other = layer.pre(x), theirs(x)
        for mine, true in ((post, other[0]), (comb, other[1]), (u, other[2]), (layer.head(x), head(x))):
            assert (mine - true).abs().max() < 3e-6


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 1, 3)])
def test_any_leading_shape_and_every_token_on_its_own(lead):
    layer = random_layer()
    x, y = drawn((*lead, 4, 64), 4), drawn((*lead, 64), 5)
    u, post, comb = layer.pre(x)
    assert u.shape == (*lead, 64) and post.shape == (*lead, 4) and comb.shape == (*lead, 4, 4)
    after, merged = layer.post(x, y, post, comb), layer.head(x)
    assert after.shape == x.shape and merged.shape == u.shape
    for place in np.ndindex(*lead):
        alone = layer.pre(x[place])
        assert all((mine[place] - one).abs().max() < 1e-6 for mine, one in zip((u, post, comb), alone))
        assert (after[place] - layer.post(x[place], y[place], *alone[1:])).abs().max() < 3e-6


def test_streams_begin_as_copies_that_own_their_memory():
    layer, x = HyperConnection(8, 3), drawn((2, 8), 6)
    streams = layer.init(x)
    assert streams.shape == (2, 3, 8) and all(torch.equal(streams[:, s], x) for s in range(3))
    streams[:, 0] = 0  # a view would zero its neighbours
    assert torch.equal(streams[:, 1], x)


def mean_share(layers) -> float:
    """Share of the streams' energy in their mean, after every layer has added its output."""
    streams = layers[0].init(drawn((200, 32), 7))
    for i, layer in enumerate(layers):
        _, post, comb = layer.pre(streams)
        streams = layer.post(streams, drawn((200, 32), 8 + i), post, comb)
    return (streams.mean(-2).square().sum() * layers[0].streams / streams.square().sum()).item()


def test_a_fresh_stack_parts_its_streams_and_an_even_one_does_not():
    torch.manual_seed(0)
    with torch.no_grad():
        staggered = mean_share([HyperConnection(32, sublayer=i) for i in range(8)])
        alike = [HyperConnection(32, sublayer=i) for i in range(8)]
        for layer in alike:
            layer.base[:8] = 0.0
            layer.scale.fill_(0.01)
        even = mean_share(alike)
    print(f"share of the stream mean: staggered {staggered:.3f}, even {even:.5f}")
    assert staggered < 0.98 and even > 0.999


def test_the_start_is_the_documented_one():
    layer = HyperConnection(16, sublayer=6)
    assert layer.base[:4].tolist() == [-1.5, -1.5, 1.5, -1.5] and layer.base[4:8].tolist() == [
        -0.5,
        -0.5,
        1.0,
        -0.5,
    ]
    assert torch.equal(layer.base[8:].view(4, 4), 3 * torch.eye(4)) and layer.scale.tolist() == [0.5] * 3
    assert 0.8 < layer.fn.std() * (4 * 16) ** 0.5 < 1.2


def split_form(layer, transposed=False, to_from=False):
    m = layer.streams
    matrices, biases = layer.fn.detach().split((m, m, m * m)), layer.base.detach().split((m, m, m * m))
    form = {}
    for part, matrix, bias, alpha in zip(("pre", "post", "res"), matrices, biases, layer.scale.detach()):
        if part == "res" and to_from:
            matrix = matrix.unflatten(0, (m, m)).transpose(0, 1).flatten(0, 1)
            bias = bias.view(m, m).T
        form |= {f"W_{part}": matrix.T if transposed else matrix, f"S_{part}": bias, f"alpha_{part}": alpha}
    return form


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("to_from", [False, True])
def test_the_split_form_is_the_released_triple(transposed, to_from):
    layer = random_layer()
    other = HyperConnection(64).load_weights(
        split_form(layer, transposed, to_from), res_axes="to_from" if to_from else "from_to"
    )
    for part in ("fn", "base", "scale"):
        assert torch.equal(getattr(layer, part), getattr(other, part))
    if to_from:  # the other order of axes gives another layer
        wrong = HyperConnection(64).load_weights(split_form(layer, transposed, to_from))
        x = drawn((5, 4, 64), 9)
        assert (wrong.pre(x)[2] - layer.pre(x)[2]).abs().max() > 0.05


def test_a_released_checkpoint_is_read_by_prefix():
    layer = random_layer()
    stored = {f"layers.3.hc_ffn_{p}": getattr(layer, p).detach() for p in ("fn", "base", "scale")}
    stored |= {f"hc_head_{p}": getattr(layer, f"head_{p}").detach() for p in ("fn", "base", "scale")}
    stored |= {"layers.3.ffn_norm.weight": torch.ones(64), "layers.13.hc_ffn_fn": torch.ones(3)}
    other = (
        HyperConnection(64).load_weights(stored, prefix="layers.3.hc_ffn_").load_weights(stored, prefix="hc_")
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(layer.parameters(), other.parameters()))


def test_gradients_reach_every_parameter_and_agree_with_float64_differences():
    config = variant(hidden_size=6, hc_mult=3)
    layer = random_layer(config, 30)
    x, y = drawn((3, 6), 31).requires_grad_(), drawn((6,), 32)
    weighing = drawn((6,), 33)

    def run(x):
        u, post, comb = layer.pre(x)
        return (weighing * layer.head(layer.post(x, y + u, post, comb))).sum()

    run(x).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (*layer.parameters(), x))

    names = {
        "fn": "l.hc_attn_fn",
        "base": "l.hc_attn_base",
        "scale": "l.hc_attn_scale",
        "head_fn": "hc_head_fn",
        "head_base": "hc_head_base",
        "head_scale": "hc_head_scale",
    }
    values = {n: p.detach().double().numpy() for n, p in layer.named_parameters()} | {
        "x": x.detach().double().numpy()
    }

    def true(moved):
        model = Float64(config.to_dict(), {names[n]: v for n, v in moved.items() if n != "x"})
        u, post, comb = model.read("l.hc_attn", moved["x"])
        after = model.write(moved["x"], y.double().numpy() + u, post, comb)
        return weighing.double().numpy() @ model.head("hc_head", after)

    for name, tensor in (*layer.named_parameters(), ("x", x)):
        along = np.random.default_rng(3).standard_normal(tensor.shape)
        there, back = (true(values | {name: values[name] + step * along}) for step in (1e-6, -1e-6))
        mine = float((tensor.grad.double().numpy() * along).sum())
        size = np.linalg.norm(tensor.grad.double().numpy() * along)
        assert abs(mine - (there - back) / 2e-6) < 1e-4 * size, name


def test_it_comes_without_the_rest_of_the_package():
    others = "tokenizers safetensors jinja2 transformers triton typer"
    code = (
        f"import sys, birkhoff.mhc; names = 'birkhoff {others}'.split(); "
        "print(*(module for module in sys.modules if module.split('.')[0] in names))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(loaded) == {
        "birkhoff",
        "birkhoff.errors",
        "birkhoff.kernels",
        "birkhoff.kernels.mhc",
        "birkhoff.kernels.mhc.reference",
        "birkhoff.mhc",
        "birkhoff.option_checks",
    }


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"hidden": 0}, "hidden is 0"),
        ({"hidden": 8.0}, "hidden is 8.0"),
        ({"hidden": True}, "hidden is True"),
        ({"hidden": 8, "streams": -1}, "streams is -1"),
        ({"hidden": 8, "sinkhorn_iters": 0}, "sinkhorn_iters is 0"),
        ({"hidden": 8, "eps": 0.0}, "eps is 0.0"),
        ({"hidden": 8, "eps": float("nan")}, "eps is nan"),
        ({"hidden": 8, "rms_eps": "small"}, "rms_eps is 'small'"),
        ({"hidden": 8, "sublayer": -1}, "sublayer is -1"),
    ],
)
def test_impossible_sizes_are_refused(options, word):
    with pytest.raises(OptionError, match=word):
        HyperConnection(**options)


def test_wrong_shapes_are_refused_with_the_right_one():
    layer = HyperConnection(8, 3)
    streams, y = torch.zeros(5, 3, 8), torch.zeros(5, 8)
    _, post, comb = layer.pre(streams)
    for call in (lambda: layer.init(torch.zeros(5, 9)), lambda: layer.init(torch.tensor(1.0))):
        with pytest.raises(OptionError, match=r"expected \[\.\.\., 8\]"):
            call()
    for bad in (torch.zeros(5, 4, 8), torch.zeros(5, 24), torch.zeros(8)):
        for call in (layer.pre, layer.head, lambda x: layer.post(x, y, post, comb)):
            with pytest.raises(OptionError, match=r"expected \[\.\.\., 3, 8\]; `init`"):
                call(bad)
    with pytest.raises(OptionError, match=r"y is \(8,\), expected \(5, 8\)"):
        layer.post(streams, y[0], post, comb)
    with pytest.raises(OptionError, match=r"post is \(5, 1\), expected \(5, 3\)"):
        layer.post(streams, y, post[:, :1], comb)
    with pytest.raises(OptionError, match=r"comb is \(3, 3\), expected \(5, 3, 3\)"):
        layer.post(streams, y, post, comb[0])


def test_weights_that_do_not_fit_are_refused_and_change_nothing():
    layer = random_layer()
    before = {n: p.detach().clone() for n, p in layer.named_parameters()}
    triple = {n: torch.full_like(before[n], 2.0) for n in ("fn", "base", "scale")}
    split = split_form(layer)
    for error, match, weights in (
        (TensorMissing, "got nothing", {}),
        (TensorMissing, "scale missing beside base, fn", {k: triple[k] for k in ("fn", "base")}),
        (TensorMissing, "head_base, head_scale missing", triple | {"head_fn": before["head_fn"]}),
        (TensorMissing, "got W_pre, base, fn, scale, expected either", triple | {"W_pre": split["W_pre"]}),
        (TensorMissing, "alpha_res missing", {k: v for k, v in split.items() if k != "alpha_res"}),
        (TensorUnexpected, "bias: expected fn, base, scale", triple | {"bias": torch.zeros(1)}),
        (
            TensorShape,
            r"fn is \(24, 255\), expected \(24, 256\) for 4 stre",
            triple | {"fn": torch.zeros(24, 255)},
        ),
        (TensorShape, r"scale is \(1,\), expected \(3,\)", triple | {"scale": torch.zeros(1)}),
        (
            TensorShape,
            r"W_res is \(4, 4, 256\), expected \(16, 256\)",
            split | {"W_res": torch.zeros(4, 4, 256)},
        ),
        (TensorShape, r"S_res is \(4,\), expected \(16,\) or \(4, 4\)", split | {"S_res": torch.zeros(4)}),
        (TensorShape, r"S_pre is \(2, 2\), expected \(4,\) or", split | {"S_pre": torch.zeros(2, 2)}),
        (
            TensorShape,
            r"alpha_pre is \(4,\), expected a single number",
            split | {"alpha_pre": torch.zeros(4)},
        ),
        (TensorDtype, "fn is torch.int64", triple | {"fn": torch.zeros(24, 256, dtype=torch.long)}),
        (TensorDtype, "fn is torch.float8", triple | {"fn": torch.zeros(24, 256).to(torch.float8_e4m3fn)}),
        (TensorDtype, "base is list", triple | {"base": [0.0] * 24}),
        (TensorValue, "base holds NaN or infinity", triple | {"base": torch.full((24,), torch.nan)}),
    ):
        with pytest.raises(error, match=match):
            layer.load_weights(weights)
        assert all(torch.equal(p, before[n]) for n, p in layer.named_parameters())
    with pytest.raises(TensorMissing, match=r"got nothing.*prefix 'layers\.9'"):
        layer.load_weights(triple, prefix="layers.9")
    with pytest.raises(OptionError, match="res_axes is 'rows'"):
        layer.load_weights(split, res_axes="rows")


def test_a_square_matrix_has_no_orientation():
    layer = HyperConnection(4, 4)  # W_res is 16 x 16
    with pytest.raises(TensorShape, match=r"W_res is square \(16, 16\)"):
        layer.load_weights(split_form(layer))
    layer.load_weights(fn=layer.fn.detach(), base=layer.base.detach(), scale=layer.scale.detach())
