"""The calls of the layer-only port of mHC, and how far its arithmetic is from V4's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import birkhoff
from birkhoff.errors import OptionError, TensorMissing, TensorShape
from birkhoff.mhc import HyperConnection
from tests.mhc_port import Port, port_of
from tests.test_mhc import drawn, random_layer


def fresh_port(m=4, d=64, seed=50) -> Port:
    return Port(
        drawn(((2 + m) * m, m * d), seed, 0.1),
        drawn((1, m), seed + 1),
        drawn((m, m), seed + 2),
        drawn((m, 1), seed + 3),
        alpha_pre=0.3,
        alpha_res=0.7,
        alpha_post=0.2,
    )


@pytest.mark.parametrize("layer_of", ["port", "ours"])
def test_the_smoke_test_runs_on_both(layer_of):
    """Weights by keyword with float factors; a few sublayers; shapes, bounds and a doubly stochastic mixer."""
    port = fresh_port()
    layer = port if layer_of == "port" else HyperConnection(64).load_weights(**port.tensors())
    x = drawn((2, 7, 64), 60)
    state = layer.init_state(x)
    assert state.shape == (2, 7, 4, 64) and torch.equal(state[..., 3, :], x)
    with torch.no_grad():
        for seed in range(3):
            u, post, comb = layer.pre_block(state)
            assert u.shape == (2, 7, 64) and post.shape == (2, 7, 4) and comb.shape == (2, 7, 4, 4)
            assert (post > 0).all() and (post < 2).all() and (comb >= 0).all()
            for axis in (-1, -2):
                assert (comb.sum(axis) - 1).abs().max() < 1e-3
            state = layer.post_block(state, torch.tanh(u) + drawn(u.shape, seed), post, comb)
        out = layer.read_out(state)
    assert out.shape == x.shape and out.isfinite().all()


def test_with_its_differences_switched_off_the_port_is_ours():
    """Orientation, order and eps explain everything: no other difference hides in the arithmetic."""
    layer = random_layer()
    switches = {"round_mixes": False, "eps_on_pre": 1e-6, "sinkhorn_eps": 1e-6, "sum_of_squares": False}
    port = port_of(layer, **switches, to_from=False)
    x, y = drawn((20, 4, 64), 70), drawn((20, 64), 71)
    with torch.no_grad():
        for mine, theirs in zip(layer.pre(x), port.pre_block(x)):
            assert (mine - theirs).abs().max() < 1e-5
        _, post, comb = layer.pre(x)
        assert (layer.post(x, y, post, comb) - port.post_block(x, y, post, comb)).abs().max() < 1e-5


def test_weights_trained_in_the_port_keep_their_mixing():
    """`res_axes="to_from"`: our comb is the transpose of the port's, so the streams come out the same."""
    port = fresh_port()
    port.round_mixes = False
    layer = HyperConnection(64).load_weights(**port.tensors(), res_axes="to_from")
    x, y = drawn((20, 4, 64), 72), drawn((20, 64), 73)
    with torch.no_grad():
        u, post, comb = layer.pre(x)
        theirs = port.pre_block(x)
        assert (u - theirs[0]).abs().max() < 1e-4
        # Sinkhorn ends on columns, so a transposed matrix has converged to a slightly different one.
        assert (comb.mT - theirs[2]).abs().max() < 3e-3
        mine, other = layer.post_block(x, y, post, comb), port.post_block(x, y, *theirs[1:])
        assert (mine - other).abs().max() < 2e-2
        as_v4 = HyperConnection(64).load_weights(**port.tensors())
        assert (as_v4.post(x, y, *as_v4.pre(x)[1:]) - other).abs().max() > 0.1


@pytest.fixture(scope="module")
def nano():
    with birkhoff.load("nano") as engine:
        yield engine


def relative(mine, other) -> float:
    return float((mine.double() - other.double()).norm() / other.double().norm())


EXACT = {
    "round_mixes": False,
    "eps_on_pre": 1e-6,
    "sinkhorn_eps": 1e-6,
    "sum_of_squares": False,
    "to_from": False,
}
POINTS = {
    "orientation of the mixer": {"to_from": True},
    "`hc_eps` on the read-in weights": {"eps_on_pre": 0.0},
    "eps in Sinkhorn": {"sinkhorn_eps": 0.0},
    "eps of the norm": {"sum_of_squares": True},
    "the 24 mixes": {"round_mixes": True},
}


def test_the_page_has_the_measured_differences(nano):
    """Every number of the table in docs/mhc.md, measured on the weights and activations of nano."""
    text = "Once upon a time, there was a little fox who lived in a forest and wanted to see the sea."
    trace = nano.trace(nano.prompt_ids(text))
    m, d, count = nano.config.hc_mult, nano.config.hidden_size, nano.config.num_hidden_layers
    found: dict[str, list[tuple[float, float]]] = {}
    with torch.no_grad():
        for layer_index in range(count):
            block = nano.model.layers[layer_index]
            for part, hook, y_hook in (
                ("attn", "mhc_streams_pre_attn", "post_attn"),
                ("ffn", "mhc_streams_pre_mlp", "mlp_out"),
            ):
                mixer = getattr(block, f"hc_{part}")
                weights = {name: getattr(mixer, name).detach() for name in ("fn", "base", "scale")}
                layer = HyperConnection(d, m, nano.config.hc_sinkhorn_iters, nano.config.hc_eps)
                layer.load_weights(weights)
                x, y = trace[hook, layer_index].view(-1, m, d), trace[y_hook, layer_index]
                u, post, comb = layer.pre(x)
                after = layer.post(x, y, post, comb)
                for point, switch in POINTS.items():
                    port = port_of(layer, **(EXACT | switch))
                    read, *write = port.pre_block(x)
                    pair = relative(read, u), relative(port.post_block(x, y, *write), after)
                    found.setdefault(point, []).append(pair)
                stacked = dict(zip(("W", "S", "alpha"), weights.values()))
                wrong = HyperConnection(d, m).load_weights(stacked, order="pre_res_post")
                read, *write = wrong.pre(x)
                pair = relative(read, u), relative(wrong.post(x, y, *write), after)
                found.setdefault("order of the stacked rows", []).append(pair)
        final = trace["mhc_streams_final", count - 1].view(-1, m, d)
        found["read-out"] = [(0.0, relative(final[:, 0], trace["final_hidden", count - 1]))]
    page = (Path(__file__).parent.parent / "docs/mhc.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    table = {row[0].strip(): [cell.strip() for cell in row[3:]] for row in rows if len(row) == 5}
    for point, pairs in found.items():
        for cell, values in zip(table[point], zip(*pairs)):
            measured = sum(values) / len(values)
            stated = float(cell or 0)
            assert measured < 5e-7 if stated == 0 else measured == pytest.approx(stated, rel=0.25), point


def test_a_stacked_matrix_needs_its_order():
    layer = random_layer()
    port = port_of(layer)
    stacked = {
        "W": port.W,
        "S": torch.cat([port.S_pre.flatten(), port.S_res.flatten(), port.S_post.flatten()]),
        "alpha": torch.tensor([port.alpha_pre, port.alpha_res, port.alpha_post]),
    }
    loaded = HyperConnection(64).load_weights(stacked, order="pre_res_post")
    for part in ("fn", "base", "scale"):
        assert torch.equal(getattr(loaded, part), getattr(layer, part))
    with pytest.raises(OptionError, match="W is stacked"):
        HyperConnection(64).load_weights(stacked)
    wrong = HyperConnection(64).load_weights(stacked, order="pre_post_res")
    x = drawn((5, 4, 64), 74)
    assert (wrong.pre(x)[2] - layer.pre(x)[2]).abs().max() > 0.05
    triple = {name: getattr(layer, name).detach() for name in ("fn", "base", "scale")}
    HyperConnection(64).load_weights(triple, order="pre_post_res")
    with pytest.raises(OptionError, match="release's order"):
        HyperConnection(64).load_weights(triple, order="pre_res_post")
    with pytest.raises(OptionError, match="order is 'other'"):
        HyperConnection(64).load_weights(stacked, order="other")
    with pytest.raises(TensorShape, match="alpha"):
        HyperConnection(64).load_weights({**stacked, "alpha": torch.ones(2)}, order="pre_res_post")
    with pytest.raises(TensorMissing):
        HyperConnection(64).load_weights({**stacked, **port.tensors()}, order="pre_res_post")
