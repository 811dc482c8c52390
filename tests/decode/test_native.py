"""Native decode steps: whole layers, their parts, rows alone or together and any number of threads give the same bits.

That they compute what the model computes is tested in `test_cpu.py`; here results are compared bit by bit, and with
the loops for machines without a C++ compiler.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from birkhoff.bench.timing import torch_threads
from birkhoff.decode.cpu import install_cpu_decode
from birkhoff.hooks.tap import EagerTap, NoTap
from birkhoff.kernels import jit
from birkhoff.kernels.packed import native
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from tests.models import TINY, fused_model, random_model, random_tokens, variant

pytestmark = pytest.mark.skipif(
    not (jit.AVAILABLE and native.available()), reason="no compiler for the native kernels"
)

LENGTH = 140
LAYERS = TINY.num_hidden_layers
# Large enough that products, experts, attention and mixers are divided among threads.
WIDE = variant(
    hidden_size=320,
    head_dim=64,
    num_attention_heads=8,
    q_lora_rank=192,
    o_lora_rank=96,
    moe_intermediate_size=96,
)


@pytest.fixture(scope="module")
def model():
    return fused_model(kernels="cpu")


class WatchedLayers(NoTap):
    """Something happens in some layers only."""

    def __init__(self, layers, edit=None):
        self.layers = layers
        self.tap = EagerTap(lambda *site: None, edit)

    def at(self, layer):
        return self.tap.at(layer) if layer in self.layers else NoTap()


def prefilled(model, starts, tokens, **options) -> State:
    """A state in which sequence s has the first starts[s] of `tokens[s]`."""
    state = State.contiguous(model.config, len(starts), LENGTH, **options)
    chunks = [SequenceChunk(slot, 0, tokens[slot][:start]) for slot, start in enumerate(starts) if start]
    with torch.inference_mode(), torch_threads(1):  # prompts of a dense model run in BLAS, which divides sums
        for chunk in chunks:
            model.run(Batch.of([chunk]), state, NoTap())
    return state


def decode(model, starts, tokens, steps, tap=None) -> list[torch.Tensor]:
    """Logits and streams of `steps` steps of all sequences, and everything their state holds then."""
    state = prefilled(model, starts, tokens)
    seen = []
    with torch.inference_mode():
        for ahead in range(steps):
            at = [start + ahead for start in starts]
            batch = Batch.of([SequenceChunk(row, p, tokens[row][p : p + 1]) for row, p in enumerate(at)])
            hidden, streams = model.run(batch, state, tap or NoTap())
            seen += [model.logits(hidden), streams]
    rings = [ring.rows for layer in state.layers for _, ring in layer.rings()]
    return [*seen, *rings, *(pages for layer in state.layers for pages in layer.pages.values())]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    watched=st.sets(st.integers(0, LAYERS - 1)),
    starts=st.lists(st.integers(0, LENGTH - 4), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_watching_any_layers_changes_no_bit(model, watched, starts, seed):
    tokens = [random_tokens(TINY, LENGTH, seed + row) for row in range(len(starts))]
    quiet = decode(model, starts, tokens, 3)
    assert same(quiet, decode(model, starts, tokens, 3, WatchedLayers(watched)))


def test_only_watched_layers_leave_the_whole_step(model, monkeypatch):
    """A layer that is edited runs in parts, the layers around it as a whole."""
    calls = []
    layers = model.compiled

    class Counting:
        accepts = staticmethod(layers.accepts)

        def __call__(self, streams, first, stop, *arguments):
            calls.append((first, stop))
            return layers(streams, first, stop, *arguments)

    monkeypatch.setattr(model, "compiled", Counting())
    tokens = [random_tokens(TINY, LENGTH, 3)]
    plain = decode(model, [40], tokens, 1)
    edited = decode(model, [40], tokens, 1, WatchedLayers({2, 3}, lambda site, layer, x: x * 0.5))
    assert calls == [(0, LAYERS), (0, 2), (4, LAYERS)]
    assert not torch.equal(plain[0], edited[0])


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(starts=st.lists(st.integers(0, LENGTH - 4), min_size=2, max_size=6), seed=st.integers(0, 99))
def test_a_row_alone_has_the_bits_it_has_in_a_batch(model, starts, seed):
    tokens = [random_tokens(TINY, LENGTH, seed + row) for row in range(len(starts))]
    together = decode(model, starts, tokens, 2)
    alone = decode(model, starts[-1:], tokens[-1:], 2)
    assert all(torch.equal(a[0], b[-1]) for a, b in zip(alone[:4], together[:4]))


@pytest.mark.parametrize("rows", [1, 5])
def test_any_number_of_threads_gives_the_same_bits(rows):
    model = fused_model(WIDE, 2, kernels="cpu")
    starts = [130 - 7 * row for row in range(rows)]
    tokens = [random_tokens(WIDE, LENGTH, row) for row in range(rows)]
    results = []
    for threads in (1, 2):
        with torch_threads(threads):
            results.append(decode(model, starts, tokens, 2))
    assert same(*results)


def test_equal_to_the_loops_at_every_site(model):
    loops = install_cpu_decode(random_model(kernels="cpu"), loops=True)
    assert loops.compiled is None and loops.layers[0].attn.compiled is not None
    starts = [0, 47, 124, 130]
    tokens = [random_tokens(TINY, LENGTH, 74 + row) for row in range(4)]

    def sites_of(own):
        seen: dict[tuple[str, int], list[torch.Tensor]] = {}

        def keep(site, layer, x):
            seen.setdefault((site.name, layer), []).append(x.clone())

        decode(own, starts, tokens, 8, EagerTap(keep))
        return {key: torch.cat(rows) for key, rows in seen.items()}

    actual, expected = sites_of(model), sites_of(loops)
    assert actual.keys() == expected.keys()
    for key, rows in actual.items():
        assert (rows - expected[key]).abs().max() <= 2e-5 * expected[key].abs().max().clamp_min(1.0), key


def test_states_that_come_and_go(model):
    """Addresses of a state are kept no longer than the state, so a new one at the same place is described anew."""
    tokens = [random_tokens(TINY, LENGTH, 5)]
    expected = decode(model, [30], tokens, 2)[0]
    for slots in (1, 4, 2, 1, 3):
        state = State.contiguous(TINY, slots, LENGTH, lookback=slots)
        with torch.inference_mode():
            model.run(Batch.of([SequenceChunk(slots - 1, 0, tokens[0][:30])]), state, NoTap())
            hidden, _ = model.run(Batch.of([SequenceChunk(slots - 1, 30, tokens[0][30:31])]), state, NoTap())
            assert (model.logits(hidden)[0] - expected[0]).abs().max() <= 1e-4
        del state
