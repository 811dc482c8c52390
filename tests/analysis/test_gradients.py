"""`engine.grad()`: gradients at every site, by the chain rule between sites and against other ways to compute them."""

from __future__ import annotations

import threading

import pytest
import torch

import birkhoff
from birkhoff import Add
from birkhoff.errors import OptionError, SiteError
from birkhoff.hooks import sites
from birkhoff.hooks.tap import EagerTap
from tests.hf.models import make

IDS = [1, *range(20, 55)]


@pytest.fixture(scope="module")
def recorded(engine):
    """Gradients of one log-probability at every site."""
    with engine.grad() as g:
        g.backward(engine.logits(IDS)[-1].log_softmax(-1)[9])
    return g


def close(a, b):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= 1e-5 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("site", [s for s in sites.SITES if s.edit and not s.absent], ids=lambda s: s.name)
def test_a_vector_added_at_a_site_has_the_summed_gradient(engine, recorded, site):
    layer = engine.config.num_hidden_layers - 1 if site.once else 2
    if (site.name, layer) not in recorded:
        pytest.skip("this model has no such site")
    added = torch.zeros(engine.schema[site.name].logical_shape, requires_grad=True)
    tap = EagerTap(edit=lambda s, at, x: x + added if s is site and at == layer else None)
    value = engine.model(torch.tensor(IDS), tap)[-1].log_softmax(-1)[9]
    (gradient,) = torch.autograd.grad(value, added)
    close(recorded[site.name, layer].sum(0), gradient)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize(
    ("kind", "out", "after"), [("attn", "post_attn", "pre_mlp"), ("ffn", "mlp_out", "next")]
)
def test_mixers_by_the_chain_rule(engine, recorded, kind, out, after):
    """streams' = mix^T streams + post y, so the gradients of mix and post follow from those of streams'."""
    layer = 2
    before = recorded.acts[f"mhc_streams_pre_{'attn' if kind == 'attn' else 'mlp'}", layer]
    key = ("mhc_streams_pre_mlp", layer) if after == "pre_mlp" else ("mhc_streams_pre_attn", layer + 1)
    behind = recorded[key]
    close(recorded[f"mhc_{kind}_res_mix", layer], torch.einsum("tid,tjd->tij", before, behind))
    post = torch.einsum("td,tjd->tj", recorded.acts[out, layer], behind)
    close(recorded[f"mhc_{kind}_post_mix", layer], post)
    write = recorded.acts[f"mhc_{kind}_post_mix", layer]
    close(recorded[out, layer], torch.einsum("tj,tjd->td", write, behind))


def test_expert_weights_by_the_chain_rule(engine, recorded):
    """The output is linear in the weights of the chosen experts: their gradients are products with its gradient."""
    layer = 3
    block = engine.v4_model.blocks()[layer]
    x = block.ffn_norm(recorded.acts["mlp_in", layer]).detach()
    ids, weights = (part.squeeze(-1) for part in recorded.acts["moe_topk", layer].split(1, -1))
    for choice in range(ids.shape[1]):
        only = torch.zeros_like(weights)
        only[:, choice] = 1.0
        output = block.ffn.experts(x, ids.long(), only)
        expected = (output * recorded["mlp_out", layer]).sum(-1)
        close(recorded["moe_topk", layer][:, choice, 1], expected.detach())
    assert not recorded["moe_topk", layer][..., 0].any()  # the choice itself is a constant


def test_recomputing_layers_changes_nothing(engine, recorded):
    with engine.grad(recompute=True) as g:
        g.backward(engine.logits(IDS)[-1].log_softmax(-1)[9])
    assert set(g) == set(recorded) and len(g) == len(recorded)
    for key in g:
        close(g[key], recorded[key])
        close(g.acts[key], recorded.acts[key])


def test_recomputing_keeps_less(engine):
    """Bytes that the graph keeps for the backward pass: with `recompute` far fewer, and only those of one layer."""

    def kept(recompute):
        total = 0

        def count(tensor):
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with (
            engine.grad("final_hidden", recompute=recompute),
            torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        ):
            engine.logits(IDS)
        return total

    assert kept(True) < kept(False) / 4


def test_a_value_of_a_trace_can_be_differentiated(engine):
    """The norm of an activation, instead of a logit; it does not depend on later layers."""
    with engine.grad("mlp_in") as g:
        trace = engine.trace(IDS, hooks=["mlp_out"])
        g.backward(trace["mlp_out", 2][-1].pow(2).sum())
    close(g["mlp_out", 2][-1], 2 * trace["mlp_out", 2][-1].detach())
    assert not g["mlp_out", 2][:-1].any() and not g["mlp_out", 3].any()
    assert g["mlp_in", 2].abs().sum() > 0 and set(g) == {
        (hook, layer) for hook in ("mlp_out", "mlp_in") for layer in range(engine.config.num_hidden_layers)
    }


def test_gradients_are_those_of_the_edited_pass(engine, recorded):
    v = torch.randn(engine.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with engine.grad("mlp_out") as g:
        g.backward(engine.logits(IDS, [Add(v, "mlp_out", [1])])[-1].log_softmax(-1)[9])
    close(g.acts["mlp_out", 1], recorded.acts["mlp_out", 1] + v)
    assert (g["mlp_out", 1] - recorded["mlp_out", 1]).abs().max() > 1e-6


def test_several_passes_in_one_block(engine):
    other = IDS[:-1]
    with engine.grad("mlp_out") as g:
        first, second = engine.logits(IDS)[-1, 9], engine.logits(other)[-1, 9]
        g.backward(first - second, retain_graph=True)
        gradients = [g.passes[0]["mlp_out", 2], g.passes[1]["mlp_out", 2]]
        g.backward(second)
    assert len(g.passes) == 2 and g["mlp_out", 2].shape[0] == len(other)
    close(g["mlp_out", 2], -gradients[1])
    assert not g.passes[0]["mlp_out", 2].any() and gradients[0].any()


def test_other_threads_have_no_graph(engine):
    results = []
    with engine.grad("mlp_out"):
        thread = threading.Thread(target=lambda: results.append(engine.logits(IDS)))
        thread.start()
        thread.join()
        assert engine.logits(IDS).requires_grad
    assert not results[0].requires_grad and not engine.logits(IDS).requires_grad
    assert not engine.trace(IDS, hooks="mlp_out")["mlp_out", 0].requires_grad


def test_what_is_refused(engine):
    with pytest.raises(SiteError, match="not a hook"), engine.grad("mlp_oat"):
        pass
    with engine.grad("mlp_out") as g:
        with pytest.raises(OptionError, match="nothing was run"):
            g["mlp_out", 0]
        with pytest.raises(OptionError, match="no forward pass"):
            g.backward(torch.zeros((), requires_grad=True))
        with pytest.raises(OptionError, match="open already"), engine.grad():
            pass
        logits = engine.logits(IDS)
        with pytest.raises(SiteError, match="no gradients yet"):
            g["mlp_out", 0]
        for value, message in (
            (logits, "one number"),
            (3.0, "one number"),
            (logits.detach()[0, 0], "depends on no tensor"),
        ):
            with pytest.raises(OptionError, match=message):
                g.backward(value)
        g.backward(logits[-1, 3])
        with pytest.raises(SiteError, match="This block holds mlp_out"):
            g["mlp_in", 0]
    with pytest.raises(OptionError, match="block has ended"):
        g.backward(logits[-1, 3])
    assert engine.logits(IDS).shape[0] == len(IDS)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "qwen3_moe"])
def test_models_of_transformers(kind, tmp_path):
    """Gradients at the residual entering a layer are those that Transformers' own hidden states get."""
    theirs = make(kind, tmp_path / "model")
    ids = list(range(5, 25))
    with birkhoff.load(tmp_path / "model", device="cpu") as engine, engine.grad() as g:
        g.backward(engine.logits(ids)[-1].log_softmax(-1)[9])
    output = theirs(torch.tensor([ids]), output_hidden_states=True)
    states = output.hidden_states[:-1]
    gradients = torch.autograd.grad(output.logits[0, -1].float().log_softmax(-1)[9], states)
    for layer, (state, gradient) in enumerate(zip(states, gradients)):
        close(g.acts["pre_attn", layer], state[0].detach())
        close(g["pre_attn", layer], gradient[0])
    assert all(g[key].shape[0] == len(ids) for key in g)
    assert all(g[hook, layer].any() for hook, layer in g if hook in ("mlp_out", "post_attn", "attn_z"))


def test_keys_of_gradients_and_values_are_those_of_a_trace(engine):
    with engine.grad(["mlp_out", "mhc_streams_pre_attn", "final_hidden"]) as g:
        g.backward(engine.logits(IDS)[-1, 3])
    last = engine.config.num_hidden_layers - 1
    for part in (g, g.acts, g.passes[0]):
        assert part["mlp_out", -1] is part["mlp_out", last] and part["final_hidden"].dim() == 2
        assert part["mlp_out"].shape[0] == last + 1 and part["mlp_out"][1].equal(part["mlp_out", 1])
        assert part["blocks.1.mlp.hook_out"].equal(part["mlp_out", 1])
        assert part["mhc_streams_post_mlp", 0].equal(part["mhc_streams_pre_attn", 1])
        assert ("mlp_out", -1) in part and "blocks.1.mlp.hook_out" in part and ("mlp_in", 0) not in part
    with pytest.raises(
        SiteError, match=r"\('mlp_ot', 1\) has no gradient\. Did you mean 'mlp_out'\? This block"
    ):
        g["mlp_ot", 1]
    with pytest.raises(SiteError, match=r"was not recorded\. There is no layer 99"):
        g.acts["mlp_out", 99]
