"""Circuits: what they report is what runs with edits give, and their edges are sums over streams."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch

from birkhoff import Call, Patch
from birkhoff.errors import OptionError
from birkhoff.steering.position_rows import PositionRows

IDS = [1, *range(20, 33)]
OTHER = [1, *range(20, 26), 90, *range(27, 33)]
METRIC = (40, 41)


def metric(logits):
    return float(logits[-1, 40] - logits[-1, 41])


@pytest.fixture(scope="module")
def circuit(engine):
    return engine.circuit(IDS, METRIC, baseline=OTHER, faithfulness=0.7)


def ablations(engine, kept):
    """Patches of every sublayer's output outside of `kept` with its value in the other text."""
    theirs = engine.trace(OTHER, hooks=["post_attn", "mlp_out"])
    edits = []
    for hook in ("post_attn", "mlp_out"):
        for layer in range(engine.config.num_hidden_layers):
            places = [p for p in range(len(IDS)) if (hook, layer, p) not in kept]
            if places:
                edits.append(Patch(PositionRows({p: theirs[hook, layer][p] for p in places}), hook, [layer]))
    return edits


def test_faithfulness_is_what_patches_give(engine, circuit):
    everything = {
        (hook, layer, p)
        for hook in ("post_attn", "mlp_out")
        for layer in range(engine.config.num_hidden_layers)
        for p in range(len(IDS))
    }
    inside = {(node.hook, node.layer, node.position) for node in circuit.nodes}
    full = metric(engine.logits(IDS))
    runs = [
        metric(engine.logits(IDS, ablations(engine, kept))) for kept in (inside, set(), everything - inside)
    ]
    measured = circuit.measured
    for expected, actual in zip(
        (full, *runs), (measured.full, measured.circuit, measured.empty, measured.without)
    ):
        assert actual == pytest.approx(expected, abs=3e-4)
    span = full - runs[1]
    assert circuit.faithfulness == pytest.approx((runs[0] - runs[1]) / span, abs=2e-3)
    assert circuit.completeness == pytest.approx((full - runs[2]) / span, abs=2e-3)
    assert circuit.faithfulness >= 0.7 - 1e-4 and len(circuit) < circuit.candidates == len(everything)


def test_no_node_can_be_dropped_alone(engine, circuit):
    """Pruning ends when every further node would cost too much; a few rounds may leave one."""
    inside = {(node.hook, node.layer, node.position) for node in circuit.nodes}
    measured = circuit.measured
    wanted = measured.empty + 0.7 * (measured.full - measured.empty)
    sign = 1 if measured.full > measured.empty else -1
    droppable = 0
    for node in list(inside)[:6]:
        value = metric(engine.logits(IDS, ablations(engine, inside - {node})))
        droppable += sign * value > sign * wanted + 1e-3
    assert droppable <= 1


def test_a_circuit_of_everything_is_exact(engine):
    whole = engine.circuit(IDS, METRIC, baseline=OTHER, faithfulness=1.0)
    assert whole.faithfulness >= 1.0 - 1e-4
    again = whole.evaluate(engine, IDS, METRIC, OTHER)
    assert again.faithfulness == pytest.approx(whole.faithfulness, abs=1e-4)
    curve = dict(whole.curve)
    assert curve[0] == 0 and curve[whole.candidates] == 1


def test_edges_into_a_node_are_what_it_reads(engine, circuit):
    """The effect of one output on a later input: its edges over streams sum to (difference x gradient) of a pass in
    which the mixers are constants."""
    assert circuit.edges and {edge.stream for edge in circuit.edges} <= set(range(4))
    inside = {(node.hook, node.layer, node.position) for node in circuit.nodes}
    for edge in circuit.edges:
        assert edge.source in inside or edge.source[0] == "embedding"
        assert edge.target in inside or edge.target[0] == "output"
        assert edge.source[2] <= edge.target[2]
    ends = [edge for edge in circuit.edges if edge.target[0] == "output" and edge.source[0] != "embedding"]
    last = engine.config.num_hidden_layers - 1
    final = [edge for edge in ends if edge.source[:2] == ("mlp_out", last)]
    with engine.grad(["final_hidden", "mlp_out", "mhc_ffn_post_mix", "mhc_head_mix"]) as g:
        logits = engine.logits(IDS)
        g.backward(logits[-1, 40] - logits[-1, 41])
    theirs = engine.trace(OTHER, hooks=["mlp_out"])["mlp_out", last]
    difference = g.acts["mlp_out", last][-1] - theirs[-1]
    shares = g.acts["mhc_ffn_post_mix", last][-1] * g.acts["mhc_head_mix", last][-1]
    for edge in final:
        expected = float(shares[edge.stream] * (difference @ g["final_hidden", last][-1]))
        assert edge.score == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_streams_as_nodes(engine):
    """Nodes that are streams: single streams of a row are kept, the others of the same row ablated."""
    found = engine.circuit(IDS, METRIC, "mhc_streams_pre_mlp", baseline="mean", faithfulness=0.5)
    assert found.edges == [] and found.faithfulness >= 0.5 - 1e-4
    assert all(dict(node.index)["stream"] in range(4) for node in found.nodes)
    keep = {(node.layer, node.position, dict(node.index)["stream"]) for node in found.nodes}
    clean = engine.trace(IDS, hooks=["mhc_streams_pre_mlp"])

    def ablate(rows, site):
        mean = clean["mhc_streams_pre_mlp", site.layer].mean(0)
        mask = torch.tensor([[(site.layer, p, s) in keep for s in range(4)] for p in site.positions])
        return torch.where(mask.unsqueeze(-1), rows, mean)

    value = metric(engine.logits(IDS, [Call(ablate, "mhc_streams_pre_mlp", "all")]))
    assert found.measured.circuit == pytest.approx(value, abs=3e-4)


def test_json_and_text(circuit):
    document = circuit.to_json()
    assert document["candidates"] == circuit.candidates and len(document["nodes"]) == len(circuit)
    assert {"faithfulness", "completeness", "random", "curve", "edges", "tokens"} <= set(document)
    assert f"{len(circuit)} of {circuit.candidates} nodes" in repr(circuit)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"faithfulness": 0}, "faithfulness is 0"),
        ({"faithfulness": 1.5}, "faithfulness is 1.5"),
        ({"over": "experts"}, "attribution only"),
        ({"baseline": IDS}, "nothing to explain"),
        ({"method": "guess"}, "expected one of"),
    ],
)
def test_what_is_refused(engine, arguments, message):
    with pytest.raises(OptionError, match=message):
        engine.circuit(**{"prompt": IDS, "metric": METRIC, "baseline": OTHER, **arguments})


def test_another_text_must_have_the_same_length(engine, circuit):
    with pytest.raises(OptionError, match="same length"):
        circuit.evaluate(engine, IDS[:-1], METRIC, OTHER[:-1])


def test_the_picture_shows_every_node_and_edge(circuit):
    shown = ET.fromstring(replace(circuit, tokens=["<b>&\x00"] * len(circuit.token_ids)).svg())
    name = "{http://www.w3.org/2000/svg}%s"
    assert len(shown.findall(name % "circle")) == len(circuit.nodes)
    assert len(shown.findall(name % "path")) == len(circuit.edges)
    dashed = [path for path in shown.findall(name % "path") if path.get("stroke-dasharray")]
    assert len(dashed) == sum(edge.score < 0 for edge in circuit.edges)
    width, height = float(shown.get("width")), float(shown.get("height"))
    for circle in shown.findall(name % "circle"):
        assert 0 < float(circle.get("cx")) < width and 0 < float(circle.get("cy")) < height
    assert "<b>&·" in [text.text for text in shown.findall(name % "text")]
