"""CPU decode steps: the compiled sublayers compute what the model computes.

The reference is the whole forward pass of the plain model. Start positions are chosen so that every step crosses a
boundary in some sequence: the end of the window, a CSA block, the first entry beyond the indexer's top k, an HCA block,
a page. The seeds of the sequences are ones in which no selection of experts or entries is closer than 5e-5, thirty
times the float32 error here, so a difference is a defect and never a tie.
"""

from __future__ import annotations

import pytest
import torch

from birkhoff.decode.native import MAX_ROWS, is_decode_step
from birkhoff.hooks import sites
from birkhoff.hooks.tap import EagerTap, NoTap
from birkhoff.kernels import jit
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.rope import Rope
from birkhoff.model.state import Fresh, State
from tests.models import TINY, fill_random, fused_model, random_model, random_tokens, variant
from tests.sizes import scaled

pytestmark = pytest.mark.skipif(not jit.AVAILABLE, reason="no compiler for the CPU twins")

TOLERANCE = 1e-4
LENGTH = 560
SEEDS = (74, 101, 97, 81, 87, 84, 60, 67, 75, 62, 68, 65, 109, 63, 93, 106, 71)
STARTS = (0, 120, 47, 250, 1, 3, 4, 7, 8, 43, 48, 51, 124, 127, 128, 131, 254)
STEPS = scaled(300, 100)


def few_model(config=TINY, seed: int = 0):
    model = fused_model(config, seed, kernels="cpu")
    assert model.layers[0].attn.compiled is not None and model.layers[0].ffn.compiled is not None
    return model


@pytest.fixture(scope="module")
def plain():
    return random_model()


@pytest.fixture(scope="module")
def fast():
    return few_model()


@pytest.fixture(scope="module")
def sequences(plain):
    """Tokens of each sequence, and logits of the plain model at every position."""
    tokens = [random_tokens(TINY, LENGTH, seed) for seed in SEEDS]
    with torch.no_grad():
        return [(t, plain(t)) for t in tokens]


def step(model, state, pieces, tap=None) -> dict[int, torch.Tensor]:
    """Logits of the last token of each chunk, by slot."""
    with torch.inference_mode():
        batch = Batch.of(pieces, "cpu")
        hidden, _ = model.run(batch, state, tap or NoTap())
        logits = model.logits(hidden[batch.last_rows()])
    return {piece.slot: row for piece, row in zip(batch.chunks, logits)}


def decode(model, sequences, starts, steps, state=None, tap=None, slots=None) -> dict[int, torch.Tensor]:
    """Prefill each sequence to its start, then advance all of them together: logits [steps, vocab] by sequence."""
    slots = slots or list(range(len(starts)))
    state = state or State.contiguous(model.config, len(starts), LENGTH)
    for slot, (tokens, _), start in zip(slots, sequences, starts):
        if start:
            step(model, state, [SequenceChunk(slot, 0, tokens[:start])])
    rows: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(starts))}
    for ahead in range(steps):
        pieces = [
            SequenceChunk(slot, start + ahead, tokens[start + ahead : start + ahead + 1])
            for slot, (tokens, _), start in zip(slots, sequences, starts)
        ]
        for slot, row in step(model, state, pieces, tap).items():
            rows[slots.index(slot)].append(row)
    return {i: torch.stack(r) for i, r in rows.items()}


def worst(decoded, sequences, starts) -> float:
    errors = []
    for i, rows in decoded.items():
        errors.append((rows - sequences[i][1][starts[i] : starts[i] + len(rows)]).abs().max().item())
    return max(errors)


@pytest.mark.parametrize("count", [1, 3, 16, 17])
def test_decoding_together_equals_the_whole_forward_pass(fast, sequences, count):
    """17 rows exceed the limit of the compiled path: the same model uses the plain path, with the same result."""
    assert (
        is_decode_step(Batch.of([SequenceChunk(s, 0, [1]) for s in range(count)]), State(TINY, 1, 1)) is False
    )  # gradients are on
    with torch.no_grad():
        assert is_decode_step(
            Batch.of([SequenceChunk(s, 0, [1]) for s in range(count)]), State(TINY, 1, 1)
        ) == (count <= MAX_ROWS)
    starts = STARTS[:count]
    error = worst(decode(fast, sequences, starts, STEPS), sequences, starts)
    print(f"{count} sequences, {STEPS} steps: largest logit difference {error:.1e}")
    assert error <= TOLERANCE


def test_a_whole_sequence_token_by_token(fast, sequences):
    error = worst(decode(fast, sequences, [0], 300), sequences, [0])
    print(f"300 tokens from nothing: largest logit difference {error:.1e}")
    assert error <= TOLERANCE


def test_entering_and_leaving_the_compiled_path_midway(fast, sequences):
    """A sequence decodes alone, with 16 others, and alone again: both paths use one state."""
    state = State.contiguous(TINY, 17, LENGTH)
    tokens, expected = sequences[0]
    others = [tokens for tokens, _ in sequences[1:]]
    for at in range(60):
        pieces = [SequenceChunk(0, at, tokens[at : at + 1])]
        if 20 <= at < 40:
            pieces += [SequenceChunk(s + 1, at - 20, t[at - 20 : at - 19]) for s, t in enumerate(others)]
        assert (step(fast, state, pieces)[0] - expected[at]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("lookback", [1, 5, 8])
def test_a_state_that_can_step_back(fast, sequences, lookback):
    """Larger rings with other row indices; wrong tokens are run first, as a rejected draft is."""
    starts = STARTS[:3]
    state = State.contiguous(TINY, 3, LENGTH, lookback=lookback)
    for slot, ((tokens, _), start) in enumerate(zip(sequences, starts)):
        if start:
            step(fast, state, [SequenceChunk(slot, 0, tokens[:start])])
    wrong = random_tokens(TINY, 16, 1)
    for ahead in range(30):
        if ahead % 3 == 0:
            for back in range(lookback):
                step(
                    fast,
                    state,
                    [SequenceChunk(s, starts[s] + ahead + back, wrong[back : back + 1]) for s in range(3)],
                )
        at = [start + ahead for start in starts]
        rows = step(
            fast, state, [SequenceChunk(s, at[s], sequences[s][0][at[s] : at[s] + 1]) for s in range(3)]
        )
        assert all((rows[s] - sequences[s][1][at[s]]).abs().max() <= TOLERANCE for s in range(3))


@pytest.mark.parametrize("length", [2, 3, 4])
def test_several_tokens_of_one_sequence_are_rows_of_one_step(fast, sequences, length):
    """As when drafts are verified: rows of one slot whose blocks end inside the step, with another sequence."""
    state, tokens, (other, other_logits) = (
        State.contiguous(TINY, 2, LENGTH, lookback=3),
        sequences[0][0],
        sequences[1],
    )
    step(fast, state, [SequenceChunk(0, 0, tokens[:40])])
    step(fast, state, [SequenceChunk(1, 0, other[:122])])
    for ahead in range(0, 96, length):
        at, index = 40 + ahead, 122 + ahead // length
        pieces = [SequenceChunk(0, at + n, tokens[at + n : at + n + 1]) for n in range(length)]
        with torch.inference_mode():
            batch = Batch.of([*pieces, SequenceChunk(1, index, other[index : index + 1])])
            assert is_decode_step(batch, state)
            logits = fast.logits(fast.run(batch, state, NoTap())[0])
        assert (logits[:length] - sequences[0][1][at : at + length]).abs().max() <= TOLERANCE
        assert (logits[length] - other_logits[index]).abs().max() <= TOLERANCE


def test_slots_and_pages_can_be_anywhere_and_need_no_clearing(fast, sequences):
    state, slots = State(TINY, 6, 24), [4, 1, 5]
    for slot, pages in zip(slots, ([17, 3, 20, 9], [22, 0, 11, 5], [8, 23, 1, 14])):
        state.give_pages(slot, pages)
    starts = STARTS[:3]
    first = decode(fast, sequences, starts, 20, state, slots=slots)
    again = decode(
        fast, sequences[3:], starts, 20, state, slots=slots[::-1]
    )  # on pages that other sequences used
    assert worst(first, sequences, starts) <= TOLERANCE and worst(again, sequences[3:], starts) <= TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 61, "hc_mult": 3, "sliding_window": 5, "num_attention_heads": 2},
        {"head_dim": 16, "qk_rope_head_dim": 16, "index_head_dim": 16, "sliding_window": 1, "o_groups": 1},
        {"num_experts_per_tok": 8, "moe_intermediate_size": 5, "num_hash_layers": 0},
        {
            "num_experts_per_tok": 1,
            "n_routed_experts": 1,
            "index_n_heads": 1,
            "index_topk": 1,
            "q_lora_rank": 7,
        },
        {"compress_ratios": (4,)},
        {"compress_ratios": (128, 0)},
        {"sliding_window": 200, "o_lora_rank": 3, "hc_mult": 1},
    ],
    ids=[
        "odd widths",
        "all channels turn",
        "all experts",
        "one of each",
        "CSA alone",
        "HCA, window",
        "wide window",
    ],
)
def test_other_shapes(changes):
    config = variant(**changes)
    plain, fast, tokens = random_model(config, 5), few_model(config, 5), random_tokens(config, 150, 5)
    with torch.no_grad():
        expected = plain(tokens)
    state = State.contiguous(config, 1, 150)
    step(fast, state, [SequenceChunk(0, 0, tokens[:110])])
    rows = [step(fast, state, [SequenceChunk(0, at, tokens[at : at + 1])])[0] for at in range(110, 150)]
    assert (torch.stack(rows) - expected[110:]).abs().max() <= TOLERANCE


def test_equal_scores_select_the_oldest_entries_in_both_paths():
    """Without indexer queries all entries score zero: the first twelve are selected, later ones are not."""
    plain, fast = random_model(seed=6), few_model(seed=6)
    for model in (plain, fast):
        with torch.no_grad():
            for layer in (2, 4):
                model.layers[layer].attn.indexer.wq_b.weight.zero_()
    tokens = random_tokens(TINY, 120, 6)
    with torch.no_grad():
        expected = plain(tokens)
    state = State.contiguous(TINY, 1, 120)
    step(fast, state, [SequenceChunk(0, 0, tokens[:90])])
    rows = [step(fast, state, [SequenceChunk(0, at, tokens[at : at + 1])])[0] for at in range(90, 120)]
    assert (torch.stack(rows) - expected[90:]).abs().max() <= TOLERANCE


def test_a_hash_routing_table_may_name_an_expert_twice():
    """Both occurrences are counted."""
    plain, fast = random_model(seed=7), few_model(seed=7)
    for model in (plain, fast):
        for layer in (0, 1):
            model.layers[layer].ffn.gate.tid2eid[:] = 3
    tokens = random_tokens(TINY, 40, 7)
    with torch.no_grad():
        expected = plain(tokens)
    state = State.contiguous(TINY, 1, 40)
    rows = [step(fast, state, [SequenceChunk(0, at, tokens[at : at + 1])])[0] for at in range(40)]
    assert (torch.stack(rows) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("count", [1, 3, 17])
def test_nan_stays_in_its_sequence(kernels, count):
    """A token whose embedding is NaN affects its own sequence from there on and no other, not even the next one in its
    slot, whose window is short and whose neighbours are far ahead."""
    model = fused_model(kernels=kernels)
    with torch.no_grad():
        model.embed[7] = torch.nan
    tokens = [t.where(t != 7, 8) for t in (random_tokens(TINY, 170, seed) for seed in SEEDS[:count])]
    with torch.no_grad():
        expected = [model(t) for t in tokens]
    state, starts = State.contiguous(TINY, count, 170), [0] + [20 + s for s in range(1, count)]
    for slot in range(1, count):
        step(model, state, [SequenceChunk(slot, 0, tokens[slot][: starts[slot]])])
    step(model, state, [SequenceChunk(0, 0, [*tokens[0][:129], 7, *tokens[0][130:150]])])
    assert step(model, state, [SequenceChunk(0, 150, tokens[0][150:151])])[0].isnan().any()
    for ahead in range(6):  # the NaN sequence with the others
        pieces = [
            SequenceChunk(s, starts[s] + ahead, tokens[s][starts[s] + ahead :][:1]) for s in range(1, count)
        ]
        rows = step(model, state, [SequenceChunk(0, 151 + ahead, [9]), *pieces])
        assert all((rows[p.slot] - expected[p.slot][p.start]).abs().max() <= TOLERANCE for p in pieces)
    for ahead in range(6, 16):  # another sequence in its slot
        at = [ahead - 6] + [start + ahead for start in starts[1:]]
        rows = step(model, state, [SequenceChunk(s, at[s], tokens[s][at[s] :][:1]) for s in range(count)])
        assert all((rows[s] - expected[s][at[s]]).abs().max() <= TOLERANCE for s in range(count))


def keep(seen):
    def listen(site, layer, x):
        seen.setdefault((site.name, layer), []).append(x.clone())

    return EagerTap(listen)


def test_every_site_equals_the_plain_path(fast, plain, sequences):
    starts, actual, expected = STARTS[:3], {}, {}
    decode(fast, sequences, starts, 12, tap=keep(actual))
    decode(plain, sequences, starts, 12, tap=keep(expected))
    once = {s.name for s in sites.SITES if s.once}
    every = {
        (s.name, layer)
        for s in sites.SITES
        if not s.absent and not s.ragged
        for layer in range(6)
        if s.name not in once or layer == 5
    }
    assert actual.keys() == expected.keys() == every
    for key, rows in actual.items():
        assert [r.shape for r in rows] == [r.shape for r in expected[key]] and [r.dtype for r in rows] == [
            r.dtype for r in expected[key]
        ]
        true = torch.cat(expected[key])
        assert (torch.cat(rows) - true).abs().max() <= 2e-5 * true.abs().max().clamp_min(1.0), key


def test_observation_changes_no_bit_and_observed_tensors_are_not_reused(fast, sequences):
    """Sites are observed in place here, so a reused buffer would be noticed."""
    starts, seen, copies = STARTS[:3], [], []

    def hold(site, layer, x):
        seen.append(x)
        copies.append(x.clone())

    quiet = decode(fast, sequences, starts, 10)
    watched = decode(fast, sequences, starts, 10, tap=EagerTap(hold))
    assert all(torch.equal(quiet[i], watched[i]) for i in range(3))
    assert len(seen) > 500 and all(torch.equal(a, b) for a, b in zip(seen, copies))


@pytest.mark.parametrize(
    "site",
    [
        sites.PRE_ATTN,
        sites.POST_ATTN,
        sites.MLP_IN,
        sites.MLP_OUT,
        sites.MHC_STREAMS_PRE_ATTN,
        sites.MHC_STREAMS_PRE_MLP,
        sites.MHC_STREAMS_FINAL,
        sites.FINAL_HIDDEN,
    ],
    ids=lambda s: s.name,
)
def test_an_edit_gives_the_same_result_as_in_the_plain_path(fast, plain, sequences, site):
    def edit(where, layer, x):
        return x * 0.5 + 0.1 if where is site and layer in (3, 5) else None

    starts = STARTS[:2]
    actual = decode(fast, sequences, starts, 8, tap=EagerTap(edit=edit))
    expected = decode(plain, sequences, starts, 8, tap=EagerTap(edit=edit))
    untouched = decode(fast, sequences, starts, 8)
    for i in range(2):
        assert (actual[i] - expected[i]).abs().max() <= TOLERANCE
        assert (actual[i] - untouched[i]).abs().max() > 1e-3


def test_an_edited_tensor_may_have_any_strides(fast, sequences):
    """Edits may return strided or expanded tensors, or views of larger ones."""

    def strided(site, layer, x):
        return torch.stack((x, x), -1)[..., 0] if site.edit else None

    plain = decode(fast, sequences, STARTS[:2], 6)
    edited = decode(fast, sequences, STARTS[:2], 6, tap=EagerTap(edit=strided))
    assert all((plain[i] - edited[i]).abs().max() <= TOLERANCE for i in range(2))


@pytest.mark.parametrize("count", [1, 2, 64, 65])
def test_phases_are_the_same_for_a_few_positions_and_for_many(count):
    rope, positions = Rope(TINY), torch.arange(count) * 61
    step = rope.step(positions)
    for phases, compressed in ((step.sliding, False), (step.compressed, True)):
        expected = rope.at(positions, compressed)
        assert phases.cos.shape == expected.cos.shape and phases.cos.dtype == torch.float32
        assert (phases.cos - expected.cos).abs().max() <= 2.5e-7 and (
            phases.sin - expected.sin
        ).abs().max() <= 2.5e-7


def test_it_is_not_used_while_gradients_are_recorded(fast, sequences):
    tokens, state = sequences[0][0], State.contiguous(TINY, 1, 20)
    batch = Batch.of([SequenceChunk(0, 0, tokens[:1])])
    with torch.enable_grad():
        hidden, _ = fast.run(batch, state, NoTap())
    assert hidden.requires_grad
    with torch.no_grad():
        assert not fast.run(batch, state, NoTap())[0].requires_grad
        assert not is_decode_step(batch, Fresh()) and is_decode_step(batch, state)


def test_weights_changed_after_fusing_are_the_ones_used(sequences):
    """Arrays are views of the parameters, not copies made once."""
    model = few_model(seed=9)
    fill_random(model, 0)
    starts = STARTS[:2]
    assert worst(decode(model, sequences, starts, 6), sequences, starts) <= TOLERANCE


@pytest.mark.parametrize(
    "numerics", [{"dtype": torch.bfloat16}, {"released": True}], ids=["bfloat16", "released"]
)
def test_unsupported_numerics_do_not_use_it(numerics):
    model = fused_model(kernels="cpu", **numerics)
    assert all(block.attn.compiled is None and block.ffn.compiled is None for block in model.layers)
