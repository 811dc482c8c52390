"""Attribution and circuits on ordinary models: every node and gradient against edits by hand on Transformers."""

from __future__ import annotations

import pytest
import torch

from birkhoff import Sae
from birkhoff.errors import OptionError
from tests.hf.models import LAYERS, D
from tests.hf.test_families import LOGIT_TOLERANCE, PROMPTS

TOKEN = 7
IDS = PROMPTS[1]
HEADS = 4


def logit(reference, edit=None):
    return float(reference.forward(IDS, edit)[0][-1, TOKEN])


def zeroed(nodes):
    """An edit that sets the rows of the nodes, or the parts of their heads, to zero."""

    def edit(hook, layer, x):
        mine = [node for node in nodes if (node.hook, node.layer) == (hook, layer)]
        if not mine:
            return None
        new = x.clone()
        for node in mine:
            row = new[node.position]
            if node.index:
                row = row.view(HEADS, -1)[dict(node.index)["head"]]
            row.zero_()
        return new

    return edit


def test_exact_scores_are_those_of_zeroed_rows(pair, device):
    """Also where a whole residual is zeroed, whose remains a norm would blow up."""
    engine, reference = pair
    before = logit(reference)
    hooks = [hook for hook, entry in engine.schema.items() if entry.replaceable and hook != "attn_z"]
    for over in (*hooks, "heads"):
        found = engine.attribute(IDS, TOKEN, over, method="exact")
        for node in [*found.top(3), found.top(1000)[-1]]:
            assert bool(node.index) == (over == "heads")
            after = logit(reference, zeroed([node]))
            assert abs(node.score - (before - after)) < LOGIT_TOLERANCE[device], node


def test_gradients_are_those_of_small_steps(pair):
    """Along a random direction at every site."""
    engine, reference = pair
    if "num_experts_per_tok" in engine.config.raw:
        return  # a step may choose other experts
    with engine.grad() as gradients:
        gradients.backward(engine.logits(IDS)[-1, TOKEN])
    step, generator = 1e-3, torch.Generator().manual_seed(5)
    reference.model.double()
    try:
        for key in engine.trace(IDS).sites:
            gradient = gradients[key].double().cpu()
            direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)

            def along(sign, key=key, direction=direction):
                return lambda hook, layer, x: x + sign * step * direction if (hook, layer) == key else None

            seen = (logit(reference, along(1)) - logit(reference, along(-1))) / (2 * step)
            assert float((gradient * direction).sum()) == pytest.approx(seen, rel=1e-2, abs=1e-2), key
    finally:
        reference.model.float()


def test_a_circuit_has_nodes_of_sublayers_and_is_what_it_says(pair, device):
    engine, reference = pair
    found = engine.circuit(IDS, TOKEN)
    assert found.hooks == ("attn_out", "mlp_out") and found.candidates == 2 * LAYERS * len(IDS)
    assert found.edges == [] and "attn 0" in found.svg()
    kept = {(node.hook, node.layer, node.position) for node in found.nodes}

    def edit(hook, layer, x):
        if hook not in found.hooks:
            return None
        rows = torch.tensor([(hook, layer, position) in kept for position in range(len(x))])
        return torch.where(rows[:, None], x, 0.0)

    assert abs(found.measured.circuit - logit(reference, edit)) < LOGIT_TOLERANCE[device]
    heads = engine.circuit(IDS, TOKEN, "heads")
    again = heads.evaluate(engine, IDS, TOKEN)
    assert heads.candidates == LAYERS * len(IDS) * HEADS
    assert again.circuit == pytest.approx(heads.measured.circuit, abs=LOGIT_TOLERANCE[device])


def test_features_are_attributed_at_their_site(pair, device):
    engine, reference = pair
    g = torch.Generator().manual_seed(3)
    weights = (torch.randn(24, D, generator=g), torch.zeros(24), torch.randn(24, D, generator=g) / 8)
    sae = Sae(*weights, torch.zeros(D), hook="mlp_out", layer=1)
    with engine.attach("few", sae):
        found = engine.attribute(IDS, TOKEN, "features:few", method="exact")
    before = logit(reference)
    for node in found.top(4):
        feature = dict(node.index)["feature"]

        def edit(hook, layer, x, node=node, feature=feature):
            if (hook, layer) != ("mlp_out", 1):
                return None
            new = x.clone()
            new[node.position] -= (
                sae.encode(x[node.position : node.position + 1])[0, feature] * weights[2][feature]
            )
            return new

        assert abs(node.score - (before - logit(reference, edit))) < LOGIT_TOLERANCE[device]


def test_groups_of_v4_are_refused_by_name(pair):
    engine, _ = pair
    for group in ("streams", "mixers"):
        with pytest.raises(OptionError, match=f"over is '{group}', and this model has none of mhc_"):
            engine.attribute(IDS, TOKEN, group)
