"""Sweeps and attributions of several pairs of texts: every pair equals its own call, and the mean that of a loop."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff import Add, LogProb, Patch
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError, PromptError
from birkhoff.trace import TraceBatch

CLEAN = [[0, 17, 300, 4, 99], [0, 21, 300, 8, 77], [5, 17, 12, 4, 13]]
CORRUPT = [[0, 17, 301, 4, 98], [0, 21, 17, 8, 76], [5, 17, 13, 4, 12]]
HOOK = "mhc_streams_pre_attn"
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "tiny"
    synth(path, "tiny", seed=6)
    with birkhoff.load(path, cache_bytes=2**26, max_context=256) as engine:
        yield engine


def test_cells_of_all_pairs_equal_single_runs(engine):
    batch = engine.patch_sweep(CLEAN, CORRUPT, (7, 9), HOOK, layers=[1, 4], positions=[2, 4])
    by_hand = torch.zeros(3, 2, 2)
    for p, (clean, corrupt) in enumerate(zip(CLEAN, CORRUPT)):
        run = engine.trace(clean)
        for i, layer in enumerate([1, 4]):
            for j, position in enumerate([2, 4]):
                logits = engine.logits(corrupt, [Patch(run, HOOK, [layer], where=[position])])
                by_hand[p, i, j] = logits[-1, 7] - logits[-1, 9]
    torch.testing.assert_close(batch.values, by_hand, **CLOSE)
    torch.testing.assert_close(batch.mean.values, by_hand.mean(0), **CLOSE)
    torch.testing.assert_close(batch[1].values, by_hand[1], **CLOSE)
    ends = [
        [float(logits[-1, 7] - logits[-1, 9]) for logits in map(engine.logits, texts)]
        for texts in (CLEAN, CORRUPT)
    ]
    assert [sweep.clean for sweep in batch] == pytest.approx(ends[0], abs=1e-4)
    assert batch.mean.clean == pytest.approx(sum(ends[0]) / 3, abs=1e-4)
    assert batch.mean.corrupt == pytest.approx(sum(ends[1]) / 3, abs=1e-4)
    assert batch.axes == ("layer", "position") and batch.labels["position"] == [2, 4]
    assert len(batch) == 3 and batch.passes == 1, "the cells of all pairs share a pass"
    assert "3 pairs in 1 passes" in repr(batch) and "Mean of 3 pairs" in batch._repr_html_()


def test_metrics_edits_and_runs_of_each_pair(engine):
    steer = [[Add(torch.ones(64), "mlp_out", [layer])] for layer in (0, 1, 2)]
    metrics = [(7, 9), LogProb(3), lambda logits: logits[-1, 5]]
    runs = engine.trace(CLEAN, "mlp_out")
    assert isinstance(runs, TraceBatch)
    batch = engine.patch_sweep(runs, CORRUPT, metrics, "mlp_out", positions=None, steer=steer)
    for i, sweep in enumerate(batch):
        alone = engine.patch_sweep(
            CLEAN[i], CORRUPT[i], metrics[i], "mlp_out", positions=None, steer=steer[i]
        )
        torch.testing.assert_close(sweep.values, alone.values, **CLOSE)
    by_ids = engine.patch_sweep(runs, CORRUPT, torch.tensor([[7, 9], [1, 2], [3, 4]]), "mlp_out", layers=[1])
    alone = engine.patch_sweep(CLEAN[1], CORRUPT[1], (1, 2), "mlp_out", layers=[1])
    torch.testing.assert_close(by_ids[1].values, alone.values, **CLOSE)
    with pytest.raises(
        OptionError, match=r"metric has 2 entries for 3 texts\. Give one for all, or one each"
    ):
        engine.patch_sweep(CLEAN, CORRUPT, metrics[:2], "mlp_out")


def test_passes_are_divided_between_pairs(engine, monkeypatch):
    expected = engine.patch_sweep(CLEAN, CORRUPT, 7, "mlp_out").values
    monkeypatch.setattr("birkhoff.analysis.forward.PASS_TOKENS", 12)
    batch = engine.patch_sweep(CLEAN, CORRUPT, 7, "mlp_out")
    torch.testing.assert_close(batch.values, expected, **CLOSE)
    assert batch.passes > len(CLEAN) and batch[0].passes < batch.passes


def test_texts_of_unequal_length_are_refused(engine):
    longer = [CLEAN[0], [*CLEAN[1], 3], CLEAN[2]]
    with pytest.raises(
        PromptError, match=r"pair 1 has 6 clean and 5 corrupted tokens, expected 5 .*positions=None"
    ):
        engine.patch_sweep(longer, CORRUPT, 7, "mlp_out")
    both = [CORRUPT[0], [*CORRUPT[1], 3], CORRUPT[2]]
    batch = engine.patch_sweep(longer, both, 7, "mlp_out", positions=None)
    torch.testing.assert_close(
        batch[1].values, engine.patch_sweep(longer[1], both[1], 7, "mlp_out", positions=None).values, **CLOSE
    )
    with pytest.raises(PromptError, match="clean has 2 texts and corrupt 3"):
        engine.patch_sweep(CLEAN[:2], CORRUPT, 7, "mlp_out")
    with pytest.raises(PromptError, match="clean has one text and corrupt 3"):
        engine.patch_sweep(CLEAN[0], CORRUPT, 7, "mlp_out")
    with pytest.raises(PromptError, match=r"text 1 has 6 tokens and the first 5; .*one by one"):
        engine.attribute(longer, 7)
    with pytest.raises(PromptError, match="the baseline has 5 tokens and text 0 6"):
        engine.attribute([[*ids, 1] for ids in CLEAN], 7, baseline=CORRUPT)
    with pytest.raises(PromptError, match="baseline has 2 texts for 3 prompts"):
        engine.attribute(CLEAN, 7, baseline=CORRUPT[:2])


@pytest.mark.parametrize("method", ["gradient", "integrated", "inputs", "exact"])
@pytest.mark.parametrize("baseline", [None, CORRUPT])
def test_attributions_equal_a_loop(engine, method, baseline):
    batch = engine.attribute(CLEAN, (7, 9), layers=[2], method=method, steps=2, baseline=baseline)
    alone = [
        engine.attribute(
            ids,
            (7, 9),
            layers=[2],
            method=method,
            steps=2,
            baseline=None if baseline is None else baseline[i],
        )
        for i, ids in enumerate(CLEAN)
    ]
    for one, other in zip(batch, alone, strict=True):
        torch.testing.assert_close(one.scores, other.scores, **CLOSE)
        assert one.value == pytest.approx(other.value, abs=1e-4) and one.token_ids == other.token_ids
    mean = torch.stack([each["mlp_out", 2] for each in alone]).mean(0)
    torch.testing.assert_close(batch.mean["mlp_out", 2], mean, **CLOSE)
    assert batch["mlp_out", 2].shape == (3, 5)
    assert batch.mean.value == pytest.approx(sum(each.value for each in alone) / 3, abs=1e-4)
    assert (batch.mean.baseline_value is None) == (baseline is None)
    assert batch.mean.token_ids == [] and batch.mean.tokens is None


def test_gradients_of_texts_are_one_batch(engine, monkeypatch):
    """One pass for the values and one for the gradients, not one of each per text; each text has its metric and
    edits."""
    counted = []
    original = birkhoff.analysis.attribute.run_with_graph
    monkeypatch.setattr(
        "birkhoff.analysis.attribute.run_with_graph",
        lambda model, ids, *rest: counted.append(ids.shape) or original(model, ids, *rest),
    )
    steer = [[Add(torch.ones(64), "mlp_out", [layer])] for layer in (0, 1, 2)]
    batch = engine.attribute(CLEAN, [(7, 9), LogProb(3), (1, 2)], "sublayers", steer=steer)
    assert counted == [(3, 5), (3, 5)]
    alone = engine.attribute(CLEAN[1], LogProb(3), "sublayers", steer=steer[1])
    torch.testing.assert_close(batch[1].scores, alone.scores, **CLOSE)
    assert batch.mean.metric == "mean of 3 metrics" and "3 texts" in repr(batch)
    counted.clear()
    engine.attribute(CLEAN, 7, max_batch_tokens=10)
    assert counted == [(2, 5), (2, 5), (1, 5), (1, 5)], "batches hold at most max_batch_tokens"


def test_means_over_experts_count_absent_ones_as_zero(engine):
    batch = engine.attribute(CLEAN, 7, "experts", layers=[4])
    dense = torch.stack([each["mlp_out", 4] for each in batch])
    torch.testing.assert_close(batch.mean["mlp_out", 4], dense.mean(0), **CLOSE)
    assert len(batch.mean) > max(len(each) for each in batch)


def test_patches_by_position_at_one_site_are_one_operation():
    """Patches of many texts in one pass would copy the whole tensor once per patch."""
    from birkhoff.hooks.edit import SiteContext, SiteEdit, edit_stages

    edits = [(SiteEdit("patch", torch.full((1, 4), float(row))), [row]) for row in range(32)]
    stages = edit_stages(edits, None, lambda gate, rows: None)
    assert len(stages) == 1
    x = torch.zeros(40, 4)
    changed = stages[0](x, SiteContext())
    assert changed[:32].equal(torch.arange(32.0).unsqueeze(1).expand(32, 4)) and not changed[32:].any()
