"""Models with CPU kernels against the plain model: whole, in chunks, token by token, batched, observed and edited."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from birkhoff.decode.cpu import install_cpu_decode
from birkhoff.hooks import sites
from birkhoff.hooks.tap import EagerTap, NoTap
from birkhoff.kernels.select import select
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.linear import Numerics
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer
from tests.models import TINY, fill_random, random_model, random_tokens, variant
from tests.oracle import agreement, build_oracle

LENGTH = 300
TOLERANCE = 1e-4


def fast_model(config=TINY, seed=0, fused=True, **numerics) -> Transformer:
    kernels = select("cpu")
    if kernels.name != "cpu":
        pytest.skip("the cpu twins cannot run here")
    model = Transformer(config, Numerics(kernels=kernels, **numerics))
    fill_random(model, seed)
    return install_cpu_decode(model.eval()) if fused else model.eval()


@pytest.fixture(scope="module")
def fast():
    return fast_model()


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(TINY, LENGTH)


@pytest.fixture(scope="module")
def whole(tokens):
    with torch.no_grad():
        return random_model()(tokens)


def run(model, tokens, cuts, tap=None):
    state, rows = State.contiguous(model.config, 1, len(tokens), dtype=model.numerics.dtype), []
    bounds = [0, *cuts, len(tokens)]
    with torch.no_grad():
        for a, b in pairwise(bounds):
            hidden, _ = model.run(Batch.of([SequenceChunk(0, a, tokens[a:b])]), state, tap or NoTap())
            rows.append(model.logits(hidden))
    return torch.cat(rows)


@pytest.mark.parametrize(
    "config",
    [TINY, variant(hidden_size=61, hc_mult=3, sliding_window=5, num_attention_heads=2)],
    ids=["tiny", "odd sizes"],
)
def test_it_equals_transformers(config):
    model = fast_model(config, 3)
    result = agreement(model, build_oracle(model), random_tokens(config, LENGTH, 3))
    assert result.error <= TOLERANCE and result.compared == LENGTH


@pytest.mark.parametrize(
    "cuts",
    [[], [1, 2, 3, 5, 8, 13, 21, 34, 128, 256], list(range(1, LENGTH)), [290]],
    ids=["whole", "chunks", "single tokens", "tail"],
)
def test_every_chunking_equals_the_plain_model(fast, tokens, whole, cuts):
    assert (run(fast, tokens, cuts) - whole).abs().max() < TOLERANCE


def test_a_batch_of_decoding_sequences_equals_each_alone(fast):
    count, length, start = 7, 60, 40
    prompts = [random_tokens(TINY, length, seed) for seed in range(count)]
    with torch.no_grad():
        expected = [random_model()(p) for p in prompts]
        state = State.contiguous(TINY, count, length)
        fast.run(
            Batch.of([SequenceChunk(s, 0, p[: start - s]) for s, p in enumerate(prompts)]), state, NoTap()
        )
        for step in range(length - start):
            at = [start - s + step for s in range(count)]  # every sequence at another position
            batch = Batch.of([SequenceChunk(s, at[s], prompts[s][at[s] : at[s] + 1]) for s in range(count)])
            logits = fast.logits(fast.run(batch, state, NoTap())[0])
            for piece, row in zip(batch.chunks, logits):
                assert (row - expected[piece.slot][piece.start]).abs().max() < TOLERANCE


def test_fused_layers_equal_separate_ones(tokens):
    separate = fast_model(fused=False)
    fused = fast_model()
    assert (
        run(separate, tokens[:140], [100, 101]) - run(fused, tokens[:140], [100, 101])
    ).abs().max() < TOLERANCE
    for actual, expected in zip(fused.destinations(), separate.destinations(), strict=True):
        assert actual.name == expected.name and torch.equal(actual.tensor, expected.tensor)


def test_weights_loaded_after_fusing_are_used(tokens):
    """Named weights remain views of the fused matrices."""
    model = fast_model(seed=1)
    fill_random(model, 0)
    with torch.no_grad():
        expected = random_model()(tokens[:50])
        assert (model(tokens[:50]) - expected).abs().max() < TOLERANCE
    assert (run(model, tokens[:50], range(1, 50)) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("cuts", [[], list(range(1, 40))], ids=["whole", "single tokens"])
def test_every_site_equals_the_plain_model(fast, cuts):
    tokens, seen = random_tokens(TINY, 40, 5), {True: {}, False: {}}

    def listen(quick):
        def keep(site, layer, x):
            seen[quick].setdefault((site.name, layer), []).append(x.clone())

        return EagerTap(keep)

    run(fast, tokens, cuts, listen(True))
    run(random_model(), tokens, cuts, listen(False))
    assert seen[True].keys() == seen[False].keys()
    for key, rows in seen[True].items():
        actual, true = torch.cat(rows), torch.cat(seen[False][key])
        assert (actual - true).abs().max() < 2e-5 * true.abs().max().clamp_min(1.0), key


def test_observation_and_zero_edits_change_no_bit(fast, tokens):
    plain = run(fast, tokens[:60], [50, 51, 52])
    assert torch.equal(plain, run(fast, tokens[:60], [50, 51, 52], EagerTap(lambda *_: None)))
    assert torch.equal(plain, run(fast, tokens[:60], [50, 51, 52], EagerTap(edit=lambda s, i, x: x + 0.0)))


def test_an_edit_changes_the_logits(fast, tokens):
    plain = run(fast, tokens[:20], range(1, 20))
    for site in (sites.PRE_ATTN, sites.MLP_OUT, sites.MHC_STREAMS_PRE_MLP):
        tap = EagerTap(edit=lambda s, i, x, site=site: x + 0.5 if s is site and i == 3 else None)
        assert (run(fast, tokens[:20], range(1, 20), tap) - plain).abs().max() > 1e-3


def test_released_numerics():
    """All kernels share the rounding; its inputs differ in the last bits of float32, so occasionally a tie is rounded
    differently and propagates. Most positions agree closely, and the whole far closer than the effect of rounding."""
    tokens = random_tokens(TINY, 80, 4)
    with torch.no_grad():
        true, unrounded = random_model(seed=4, released=True)(tokens), random_model(seed=4)(tokens)
    actual = run(fast_model(seed=4, released=True), tokens, range(1, 80))
    close = ((actual - true).abs().amax(-1) < TOLERANCE).float().mean().item()
    error = ((actual - true).square().mean() / (true - unrounded).square().mean()).sqrt().item()
    print(f"released: {close:.0%} of positions within 1e-4, off by {error:.1e} of what rounding does")
    assert close > 0.5 and error < 0.3


def test_gradients_use_the_plain_twins():
    model, plain = fast_model(seed=2, fused=False), random_model(seed=2)
    tokens = random_tokens(TINY, 20, 2)
    for each in (model, plain):
        each(tokens).square().mean().backward()
    for (name, actual), expected in zip(model.named_parameters(), plain.parameters()):
        assert (actual.grad is None) == (expected.grad is None), name
        assert actual.grad is None or torch.allclose(actual.grad, expected.grad, atol=1e-6), name
