"""Gradients of the whole-sequence path against central differences of the float64 model, which shares no code with it.

The loss is a random weighting of all trunk and MTP logits. For each class of parameters, and for a vector added at each
site, the derivative along a random direction must agree. float64 differences are accurate to nine digits, so the
tolerance is the float32 error of back-propagation.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from birkhoff.hooks import sites
from birkhoff.hooks.tap import EagerTap, NoTap
from birkhoff.model.batch import Batch
from birkhoff.model.state import Fresh
from birkhoff.model.transformer import Transformer
from tests.model.float64 import Float64
from tests.model.recorded import array
from tests.models import random_model, random_tokens, variant, weights_of

LENGTH = 133  # one HCA entry and a few queries that see it; 33 CSA entries of which 6 are selected
CONFIG = variant(
    hidden_size=24,
    vocab_size=60,
    compress_ratios=(0, 4, 128),
    num_hash_layers=1,
    sliding_window=5,
    index_topk=6,
    num_attention_heads=2,
    head_dim=12,
    qk_rope_head_dim=4,
    q_lora_rank=10,
    o_lora_rank=6,
    index_head_dim=8,
    n_routed_experts=4,
    moe_intermediate_size=16,
)
STEP = 1e-6
TOLERANCE = 1e-4  # relative to the largest possible contribution of the class; measured: at most 3e-6


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, seed=21)


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(CONFIG, LENGTH + 1, 21)


@pytest.fixture(scope="module")
def weighing():
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(2, LENGTH, CONFIG.vocab_size, generator=generator) / (LENGTH * CONFIG.vocab_size) ** 0.5
    )


def loss_of(model, tokens, weighing, tap=None):
    hidden, streams = model.run(Batch.whole(tokens[:-1]), Fresh(), tap or NoTap())
    drafted, _ = model.draft(streams, Batch.whole(tokens[1:]), Fresh())
    return (weighing[0] * model.logits(hidden)).sum() + (weighing[1] * model.logits(drafted)).sum()


def true_loss(weights, tokens, weighing, watch=None) -> float:
    reference, total = Float64(CONFIG.to_dict(), weights, watch=watch), 0.0
    for t in range(LENGTH):
        total += weighing[0, t] @ reference.step(int(tokens[t]))
        total += weighing[1, t] @ reference.draft(reference.streams, int(tokens[t + 1]), t)[0]
    return float(total)


@pytest.fixture(scope="module")
def gradients(model, tokens, weighing):
    """Every gradient by its released name, through the destinations of a model of the same shape."""
    loss_of(model, tokens, weighing).backward()
    shadow = Transformer(CONFIG)
    with torch.no_grad():
        for target, source in zip(shadow.parameters(), model.parameters()):
            target.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
    return {name: array(tensor) for name, tensor in weights_of(shadow).items() if tensor.is_floating_point()}


CLASSES = {
    "embedding": ("embed.weight",),
    "head": ("head.weight",),
    "norms": ("norm.weight",),
    "mHC projections": ("hc_attn_fn", "hc_ffn_fn"),
    "mHC bases": ("hc_attn_base", "hc_ffn_base"),
    "mHC scales": ("hc_attn_scale", "hc_ffn_scale"),
    "mHC heads": ("hc_head_fn", "hc_head_base", "hc_head_scale"),
    "query projections": ("wq_a.weight", "attn.wq_b.weight"),
    "key projection": ("attn.wkv.weight",),
    "output projections": ("wo_a.weight", "wo_b.weight"),
    "sinks": ("attn_sink",),
    "compressor projections": ("attn.compressor.wkv.weight", "attn.compressor.wgate.weight"),
    "compressor position biases": ("attn.compressor.ape",),
    "router": (".gate.weight",),
    "routed experts": tuple(f"experts.{e}.{w}.weight" for e in range(4) for w in ("w1", "w2", "w3")),
    "shared experts": tuple(f"shared_experts.{w}.weight" for w in ("w1", "w2", "w3")),
    "MTP projections": ("e_proj.weight", "h_proj.weight"),
}


@pytest.fixture(scope="module")
def weights(model):
    return {name: array(tensor) for name, tensor in weights_of(model).items()}


def members(weights, suffixes):
    return [name for name in weights if name.endswith(suffixes) and "indexer" not in name]


def test_the_classes_cover_every_trained_parameter(weights):
    named = [name for suffixes in CLASSES.values() for name in members(weights, suffixes)]
    left = {name for name in weights if name not in named}
    assert len(named) == len(set(named))
    assert all("indexer" in name or name.endswith(("tid2eid", "gate.bias")) for name in left)


def test_both_models_have_the_same_loss(model, weights, tokens, weighing):
    with torch.no_grad():
        actual = float(loss_of(model, tokens, weighing))
    assert abs(actual - true_loss(weights, tokens, array(weighing))) < 1e-5 * LENGTH


@pytest.mark.parametrize("group", CLASSES)
def test_parameters(group, gradients, weights, tokens, weighing):
    generator = np.random.default_rng(len(group))
    names = members(weights, CLASSES[group])
    along = {name: generator.standard_normal(weights[name].shape) * weights[name].std() for name in names}

    def at(step):
        return true_loss(weights | {n: weights[n] + step * along[n] for n in names}, tokens, array(weighing))

    true = (at(STEP) - at(-STEP)) / (2 * STEP)
    actual = sum(float((gradients[name] * along[name]).sum()) for name in names)
    # A derivative can be close to zero by chance; its error is relative to a typical one.
    size = np.sqrt(sum(float(((gradients[name] * along[name]) ** 2).sum()) for name in names))
    print(f"{group}: {actual:.6f} against {true:.6f}, off by {abs(actual - true) / size:.1e} of its size")
    assert size > 1e-4
    assert abs(actual - true) < TOLERANCE * size


SITES = [
    (site, layer)
    for site, layer in zip((s for s in sites.SITES if s.edit and not s.absent), (0, 1, 2, 0, 1, 2, 2, 2))
]


@pytest.mark.parametrize(("site", "at"), SITES, ids=lambda v: v.name if isinstance(v, sites.Site) else str(v))
def test_a_vector_added_at_a_site(site, at, model, weights, tokens, weighing):
    shape = (CONFIG.hc_mult, CONFIG.hidden_size) if site.shape == "md" else (CONFIG.hidden_size,)
    added = torch.zeros(shape, requires_grad=True)
    tap = EagerTap(edit=lambda s, layer, x: x + added if s is site and layer == at else None)
    (gradient,) = torch.autograd.grad(loss_of(model, tokens, weighing, tap), added)
    along = np.random.default_rng(site.id).standard_normal(shape)

    def moved(step):
        def watch(name, layer, value):
            return value + step * along if (name, layer) == (site.name, at) else None

        return true_loss(weights, tokens, array(weighing), watch)

    true = (moved(STEP) - moved(-STEP)) / (2 * STEP)
    actual, size = float((array(gradient) * along).sum()), float(np.linalg.norm(array(gradient) * along))
    print(
        f"{site.name}[{at}]: {actual:.6f} against {true:.6f}, off by {abs(actual - true) / size:.1e} of its size"
    )
    assert size > 1e-3 and abs(actual - true) < TOLERANCE * size


def test_the_indexer_has_no_gradient(model, gradients):
    """Its scores select entries and are not used in attention, so they have no gradient; training the indexer takes a
    separate loss. The routing bias likewise only selects, and is not a trained parameter."""
    indexer = [(name, p) for name, p in model.named_parameters() if ".indexer." in name]
    assert len(indexer) >= 4 and all(p.grad is None for _, p in indexer)
    biases = [p for name, p in model.named_parameters() if name.endswith("gate.bias")]
    assert biases and all(not p.requires_grad and p.grad is None for p in biases)
    others = [
        n for n, p in model.named_parameters() if p.requires_grad and p.grad is None and ".indexer." not in n
    ]
    assert not others


def test_the_embedding_of_an_unused_token_has_no_gradient(gradients, tokens):
    absent = sorted(set(range(CONFIG.vocab_size)) - set(tokens.tolist()))
    present = sorted(set(tokens.tolist()))
    assert absent and not gradients["embed.weight"][absent].any()
    assert np.abs(gradients["embed.weight"][present]).sum(-1).all()
