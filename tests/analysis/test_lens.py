"""Logit lens: the last depth equals the model's output, other depths equal a direct computation from the streams."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff import Add, Scale
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError, SiteError

IDS = [0, 17, 300, 4, 99, 501, 17]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("lens") / "tiny"
    synth(path, like="tiny")
    with birkhoff.load(path) as engine:
        yield engine


def by_hand(engine, hidden: torch.Tensor) -> torch.Tensor:
    """Final norm and head in float64, from the checkpoint's own tensors."""
    weights = {weight.name: weight.tensor.detach().double() for weight in engine.model.destinations()}
    x = hidden.double()
    x = x / (x.pow(2).mean(-1, keepdim=True) + engine.config.rms_norm_eps).sqrt()
    return x * weights["norm.weight"] @ weights["head.weight"].T


def merged_by_hand(engine, streams: torch.Tensor) -> torch.Tensor:
    weights = {weight.name: weight.tensor.detach().double() for weight in engine.model.destinations()}
    x = streams.double()
    flat = x.flatten(1)
    scaled = flat / (flat.pow(2).mean(-1, keepdim=True) + engine.config.rms_norm_eps).sqrt()
    mix = scaled @ weights["hc_head_fn"].T * weights["hc_head_scale"] + weights["hc_head_base"]
    share = torch.sigmoid(mix) + engine.config.hc_eps
    return (share.unsqueeze(-1) * x).sum(1)


def test_the_last_depth_is_the_models_answer_bit_for_bit(engine):
    for per_stream in (True, False):
        lens = engine.lens(IDS, per_stream=per_stream)
        assert lens.depths == engine.config.num_hidden_layers + 1
        assert torch.equal(lens.logits(-1), engine.logits(IDS))


@pytest.mark.parametrize("per_stream", [True, False])
def test_the_last_depth_is_the_answer_of_the_steered_model(engine, per_stream):
    wide = torch.randn(engine.schema["mhc_streams_final"].width, generator=torch.Generator().manual_seed(2))
    for edit in (
        Add(wide, "mhc_streams_final"),
        Add(wide, "mhc_streams_final", path="read"),
        Scale(0.3, "final_hidden"),
        Scale(0, "mhc_head_mix", streams=[1]),
        Add(wide, "mhc_streams_pre_attn", [1]),
    ):
        lens = engine.lens(IDS, per_stream, steer=[edit])
        assert lens.logits(-1).equal(engine.logits(IDS, steer=[edit]))
    if per_stream:  # the depth that an edit acts at has the edited streams
        entering = lens.logits(1, 0) - engine.lens(IDS).logits(1, 0)
        assert entering.abs().max() > 1e-3 and lens.logits(0, 0).equal(engine.lens(IDS).logits(0, 0))


def test_every_view_at_every_depth_follows_from_the_streams(engine):
    lens, trace = engine.lens(IDS), engine.trace(IDS)
    layers = engine.config.num_hidden_layers
    sites = [("mhc_streams_pre_attn", layer) for layer in range(layers)] + [("mhc_streams_final", layers - 1)]
    assert lens.views == [0, 1, 2, 3, "mean", "head"]
    for depth, site in enumerate(sites):
        streams = trace[site]
        expected = {stream: by_hand(engine, streams[:, stream]) for stream in range(4)}
        expected |= {
            "mean": by_hand(engine, streams.mean(1)),
            "head": by_hand(engine, merged_by_hand(engine, streams)),
        }
        for view, logits in expected.items():
            torch.testing.assert_close(lens.logits(depth, view).double(), logits, rtol=1e-4, atol=1e-4)


def test_streams_differ_after_the_first_layer_and_not_before(engine):
    lens = engine.lens(IDS)
    assert all(torch.equal(lens.logits(0, stream), lens.logits(0, "mean")) for stream in range(4))
    assert not torch.allclose(lens.logits(2, 0), lens.logits(2, 1), atol=1e-3)


def test_top_tokens_are_the_largest_logits(engine):
    lens = engine.lens(IDS)
    for position in (0, -1):
        chances = lens.logits(3, "mean")[position].double().softmax(-1)
        top = lens.top(3, "mean", position, k=4)
        assert [token for token, _ in top] == chances.topk(4).indices.tolist()
        assert all(abs(chance - chances[token]) < 1e-6 for token, chance in top)


def test_without_streams_only_the_merge_is_kept(engine):
    whole, slim = engine.lens(IDS), engine.lens(IDS, per_stream=False)
    for depth in range(slim.depths):
        assert torch.equal(slim.logits(depth), whole.logits(depth))
    with pytest.raises(OptionError, match="per_stream=True"):
        slim.logits(0, 1)


def test_unknown_depths_views_and_positions_are_refused(engine):
    lens = engine.lens(IDS)
    for wrong in (7, -8, True, "2"):
        with pytest.raises(SiteError, match=r"0\.\.6"):
            lens.logits(wrong)
    for view in (4, -1, "median", True):
        with pytest.raises(OptionError, match="'mean', 'head'"):
            lens.logits(1, view)
    with pytest.raises(SiteError, match="7 tokens"):
        lens.top(1, position=7)
    with pytest.raises(OptionError, match="k is 0"):
        lens.top(1, k=0)
