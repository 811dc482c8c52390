"""DeepSeek-V4 through Transformers equals our own model: sites, edits and tokens, each backend checking the other."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff import Add, Capture
from birkhoff.errors import BirkhoffError
from birkhoff.hooks.tap import EagerTap
from tests.models import TINY, random_model
from tests.oracle import build_oracle

IDS = torch.randint(3, TINY.vocab_size, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def pair(device, tmp_path_factory):
    ours = random_model(seed=5)
    folder = tmp_path_factory.mktemp("v4")
    build_oracle(ours).save_pretrained(folder)
    with birkhoff.load(folder, backend="transformers", device=device, cache_bytes=1 << 24) as engine:
        yield ours, engine


def test_sites_and_edits_equal_our_own_model(pair):
    ours, engine = pair
    vector = torch.linspace(-1, 1, TINY.hidden_size)
    for edited in (False, True):
        seen = {}

        def see(site, layer, x, seen=seen):
            seen[site.name, layer] = x.detach().clone()

        def edit(site, layer, x, edited=edited):
            return x + vector if edited and (site.name, layer) in (("mlp_out", 1), ("pre_attn", 2)) else None

        with torch.no_grad():
            logits = ours(torch.tensor(IDS), EagerTap(see, edit))
        steer = [Add(vector, "mlp_out", [1]), Add(vector, "pre_attn", [2])] if edited else None
        trace = engine.trace(IDS, steer=steer)
        assert trace.sites <= seen.keys() and engine.num_streams == TINY.hc_mult
        for key in trace.sites:
            if key[0] != "moe_topk":  # the order of chosen experts is free
                torch.testing.assert_close(trace[key].cpu(), seen[key], rtol=2e-4, atol=2e-4, msg=str(key))
        torch.testing.assert_close(trace.logits.cpu(), logits, rtol=2e-4, atol=2e-4)


def test_generation_recomputes_the_text_and_captures_every_row_once(pair):
    ours, engine = pair
    output = engine.generate(
        IDS[:9], capture=Capture({"post_attn": [1]}, "all"), max_tokens=3, temperature=0, ignore_eos=True
    )
    text = IDS[:9]
    for _ in range(3):
        with torch.no_grad():
            text = [*text, int(ours(torch.tensor(text))[-1].argmax())]
    assert output.token_ids == text[9:] and list(output.acts["post_attn", 1].positions) == list(range(11))
    with pytest.raises(BirkhoffError, match="mhc_streams_pre_attn"):
        engine.generate(
            IDS[:3], steer=[Add(torch.ones(TINY.hidden_size), "mhc_streams_pre_attn", [0])], max_tokens=1
        )


def test_the_lens_merges_streams_as_the_model_does(pair):
    ours, engine = pair
    lens = engine.lens(IDS)
    assert lens.views == [*range(TINY.hc_mult), "mean", "head"] and lens.depths == TINY.num_hidden_layers + 1
    torch.testing.assert_close(lens.logits(-1), engine.logits(IDS), rtol=1e-4, atol=1e-4)
    streams = engine.trace(IDS, "mhc_streams_pre_attn")["mhc_streams_pre_attn", 2].cpu()
    with torch.no_grad():
        merged = ours.logits(ours.norm(ours.hc_head(streams)[0]))
        alone = ours.logits(ours.norm(streams[:, 1]))
    torch.testing.assert_close(lens.logits(2).cpu(), merged, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(lens.logits(2, 1).cpu(), alone, rtol=2e-4, atol=2e-4)
    merged_only = engine.lens(IDS, per_stream=False)
    torch.testing.assert_close(merged_only.logits(2), lens.logits(2), rtol=1e-5, atol=1e-5)
