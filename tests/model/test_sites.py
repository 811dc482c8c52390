"""Every site: the right tensor, once, with the documented shape; observation changes nothing, edits apply."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from birkhoff.hooks import sites
from birkhoff.hooks.tap import EagerTap, NoTap
from birkhoff.model.batch import Batch
from birkhoff.model.state import Fresh
from tests.models import TINY, random_model, random_tokens
from tests.oracle import build_oracle, oracle_sites

LENGTH = 300
LAST = TINY.num_hidden_layers - 1
STREAM_SITES = (sites.MHC_STREAMS_PRE_ATTN, sites.MHC_STREAMS_PRE_MLP, sites.MHC_STREAMS_FINAL)
EDITABLE = [
    (site, layer)
    for site in sites.SITES
    if site.editable and not site.absent and site is not sites.MOE_TOPK
    for layer in ([LAST] if site.once else [0, 2, 3, LAST])
    if (site, layer)
    != (sites.MHC_ATTN_PRE_MIX, 0)  # equal streams: their sum is normalised, whatever its weights
]


def address(value):
    return f"{value.name}" if isinstance(value, sites.Site) else str(value)


@pytest.fixture(scope="module")
def tiny():
    return random_model(seed=5)


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(TINY, LENGTH, 5)


def trace(model, tokens, edit=None, part=None):
    """Logits, and the tensor of every site by (site name, layer)."""
    seen = {}
    with torch.no_grad():
        logits = model(
            tokens, EagerTap(lambda s, layer, x: seen.update({(s.name, layer): x.clone()}), edit, part)
        )
    return logits, seen


@pytest.fixture(scope="module")
def whole(tiny, tokens):
    return trace(tiny, tokens)


@pytest.fixture(scope="module")
def oracle(tiny, tokens):
    return oracle_sites(build_oracle(tiny), tokens)


def by_expert(topk):
    """Experts in ascending order of id; their order is not significant."""
    order = topk[..., 0].argsort(-1)
    return topk.gather(-2, order.unsqueeze(-1).expand_as(topk))


@pytest.mark.parametrize("site", [s for s in sites.SITES if not s.absent and not s.ragged], ids=address)
def test_every_site_equals_the_oracle(site, whole, oracle):
    actual = {layer: x for (name, layer), x in whole[1].items() if name == site.name}
    expected = {layer: x for (name, layer), x in oracle.items() if name == site.name}
    if site.id in (
        12,
        13,
        14,
    ):  # internal to its modules; test_streams_can_be_rebuilt_from_captures covers them
        assert not expected
        return
    assert actual.keys() == expected.keys() == ({LAST} if site.once else set(range(LAST + 1)))
    for layer, x in actual.items():
        other = expected[layer]
        if site is sites.MOE_TOPK:
            x, other = by_expert(x), by_expert(other)
            assert torch.equal(x[..., 0], other[..., 0])
        assert (x - other).abs().max() <= 1e-4, (site.name, layer)


def test_every_site_is_called_once_with_its_documented_shape_and_dtype(tiny, tokens):
    calls, letters = (
        Counter(),
        {
            "d": TINY.hidden_size,
            "m": TINY.hc_mult,
            "E": TINY.n_routed_experts,
            "k": TINY.num_experts_per_tok,
            "h": TINY.num_attention_heads,
            "c": TINY.head_dim,
            "2": 2,
        },
    )

    def seen(site, layer, x):
        calls[site.name, layer] += 1
        assert x.shape == (LENGTH, *(letters[letter] for letter in site.shape)), site.name
        assert x.dtype == torch.float32 and not site.absent

    tiny(tokens, EagerTap(seen))
    present = [site for site in sites.SITES if not site.absent and not site.ragged]
    assert set(calls) == {
        (s.name, layer) for s in present for layer in ([LAST] if s.once else range(LAST + 1))
    }
    assert set(calls.values()) == {1}


def test_dtypes_of_a_bfloat16_model_are_the_documented_ones(tokens):
    model = random_model(seed=5, dtype=torch.bfloat16)
    for (name, _), x in trace(model, tokens[:20])[1].items():
        assert x.dtype == (torch.bfloat16 if sites.BY_NAME[name].dtype == "model" else torch.float32), name


def rebuild(streams, y, post, mix):
    return post.unsqueeze(-1) * y.unsqueeze(-2) + torch.einsum("njk,njd->nkd", mix, streams)


@pytest.mark.parametrize("layer", range(LAST + 1))
def test_streams_can_be_rebuilt_from_captures_but_not_with_a_transposed_mixer(layer, whole):
    seen = whole[1]
    after = ("mhc_streams_final", LAST) if layer == LAST else ("mhc_streams_pre_attn", layer + 1)
    for kind, before, inside, out, then in (
        ("attn", "mhc_streams_pre_attn", "pre_attn", "post_attn", ("mhc_streams_pre_mlp", layer)),
        ("ffn", "mhc_streams_pre_mlp", "mlp_in", "mlp_out", after),
    ):
        streams, y, mix = seen[before, layer], seen[out, layer], seen[f"mhc_{kind}_res_mix", layer]
        post, pre = seen[f"mhc_{kind}_post_mix", layer], seen[f"mhc_{kind}_pre_mix", layer]
        assert (rebuild(streams, y, post, mix) - seen[then]).abs().max() < 1e-5
        if layer or kind == "ffn":  # the first streams are equal, so mixing does not change them
            assert (rebuild(streams, y, post, mix.transpose(-1, -2)) - seen[then]).abs().max() > 0.05
        assert (torch.einsum("nm,nmd->nd", pre, streams) - seen[inside, layer]).abs().max() < 1e-5


def test_the_head_merges_the_final_streams_with_the_captured_weights(whole):
    seen = whole[1]
    merged = torch.einsum("nm,nmd->nd", seen["mhc_head_mix", LAST], seen["mhc_streams_final", LAST])
    assert (merged - seen["final_hidden", LAST]).abs().max() < 1e-5


def test_observation_changes_no_bit(tiny, tokens, whole):
    with torch.no_grad():
        assert torch.equal(tiny(tokens), whole[0])
        assert torch.equal(tiny(tokens, NoTap()), whole[0])


@pytest.mark.parametrize(("site", "at"), EDITABLE, ids=address)
def test_an_edit_changes_logits_from_its_token_on_and_a_zero_edit_changes_nothing(
    site, at, tiny, tokens, whole
):
    token = 150
    bump = torch.randn(whole[1][site.name, at].shape[1:], generator=torch.Generator().manual_seed(site.id))

    def add(strength):
        def edit(s, layer, x):
            if s is not site or layer != at:
                return None
            x = x.clone()
            x[token] += strength * bump
            return x

        return edit

    logits, seen = trace(tiny, tokens, add(1.0))
    assert torch.equal(seen[site.name, at], whole[1][site.name, at])  # a site is observed before its own edit
    # Edits do not affect earlier positions. Not bit for bit: another expert for one token changes how rows are batched.
    assert (logits[:token] - whole[0][:token]).abs().max() < 1e-4
    assert (logits[token] - whole[0][token]).abs().max() > 1e-3
    assert torch.equal(trace(tiny, tokens, add(0.0))[0], whole[0])


@pytest.mark.parametrize("site", [s for s in sites.SITES if not s.editable], ids=address)
def test_a_read_only_site_is_never_edited(site, tiny, tokens):
    offered = []
    trace(tiny, tokens[:5], lambda s, layer, x: offered.append(s))
    assert site not in offered and {s.name for s in offered} == {
        s.name for s in sites.SITES if s.editable and not s.absent
    }


INNER = {
    sites.MHC_STREAMS_PRE_ATTN: (
        "pre_attn",
        "mhc_attn_pre_mix",
        "mhc_attn_post_mix",
        "mhc_attn_res_mix",
        "post_attn",
    ),
    sites.MHC_STREAMS_PRE_MLP: (
        "mlp_in",
        "mhc_ffn_pre_mix",
        "mhc_ffn_post_mix",
        "mhc_ffn_res_mix",
        "mlp_out",
    ),
}


def parted(tiny, tokens, site, at, how):
    bump = torch.randn(TINY.hc_mult, TINY.hidden_size, generator=torch.Generator().manual_seed(1))

    def part(s, layer, x):
        if s is not site or layer != at:
            return None
        return {"read": (x + bump, x), "carry": (x, x + bump), "both": (x + bump, x + bump)}[how]

    return bump, trace(tiny, tokens, part=part)


@pytest.mark.parametrize("at", [0, 2, LAST])
@pytest.mark.parametrize("site", INNER, ids=address)
def test_read_edits_change_the_sublayer_input_but_not_the_carried_streams(site, at, tiny, tokens, whole):
    kind = "attn" if site is sites.MHC_STREAMS_PRE_ATTN else "ffn"
    _, (_, seen) = parted(tiny, tokens, site, at, "read")
    for name in INNER[site]:
        assert not torch.equal(seen[name, at], whole[1][name, at]), name
    # The write uses the unedited streams and the coefficients read from the edited ones.
    out, post, mix = (seen[n, at] for n in (INNER[site][-1], f"mhc_{kind}_post_mix", f"mhc_{kind}_res_mix"))
    carried = whole[1][site.name, at]
    assert torch.equal(tiny.layers[at].hc_attn.write(carried, out, post, mix), following(seen, site, at))


@pytest.mark.parametrize("at", [0, 2, LAST])
@pytest.mark.parametrize("site", INNER, ids=address)
def test_carry_edits_change_the_carried_streams_but_not_the_sublayer(site, at, tiny, tokens, whole):
    kind = "attn" if site is sites.MHC_STREAMS_PRE_ATTN else "ffn"
    bump, (_, seen) = parted(tiny, tokens, site, at, "carry")
    for name in INNER[site]:
        assert torch.equal(seen[name, at], whole[1][name, at]), name
    out, post, mix = (seen[n, at] for n in (INNER[site][-1], f"mhc_{kind}_post_mix", f"mhc_{kind}_res_mix"))
    carried = whole[1][site.name, at] + bump
    assert torch.equal(tiny.layers[at].hc_attn.write(carried, out, post, mix), following(seen, site, at))


@pytest.mark.parametrize("at", [0, 2, LAST])
@pytest.mark.parametrize("site", INNER, ids=address)
def test_path_both_equals_a_plain_edit(site, at, tiny, tokens):
    bump, (logits, seen) = parted(tiny, tokens, site, at, "both")
    plain, plain_seen = trace(
        tiny, tokens, lambda s, layer, x: x + bump if s is site and layer == at else None
    )
    assert torch.equal(logits, plain) and all(torch.equal(seen[key], plain_seen[key]) for key in seen)


def following(seen, site, at):
    if site is sites.MHC_STREAMS_PRE_ATTN:
        return seen["mhc_streams_pre_mlp", at]
    return seen["mhc_streams_final", at] if at == LAST else seen["mhc_streams_pre_attn", at + 1]


def test_at_the_final_streams_read_changes_the_head_and_carry_only_the_mtp_block(tiny, tokens, whole):
    results = {}
    for how in ("read", "carry", "both"):
        bump = torch.ones(TINY.hc_mult, TINY.hidden_size)
        pair = {"read": (bump, 0 * bump), "carry": (0 * bump, bump), "both": (bump, bump)}[how]
        tap = EagerTap(
            part=lambda s, _, x, pair=pair: (x + pair[0], x + pair[1]) if s is STREAM_SITES[2] else None
        )
        with torch.no_grad():
            hidden, streams = tiny.run(Batch.whole(tokens), Fresh(), tap)
            results[how] = tiny.logits(hidden), streams
    final = whole[1]["mhc_streams_final", LAST]
    assert torch.equal(results["read"][1], final) and torch.equal(results["carry"][0], whole[0])
    assert torch.equal(results["carry"][1], final + 1) and torch.equal(results["both"][1], final + 1)
    assert torch.equal(results["read"][0], results["both"][0])
    assert (results["read"][0] - whole[0]).abs().max() > 1e-3
