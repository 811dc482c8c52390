"""SAE tools end to end on a small model: training on captures, loss recovered, feature descriptions."""

from __future__ import annotations

import json

import pytest
import torch

from birkhoff import Add, Capture, SaeReconstruct
from birkhoff.analysis.sae_features import collect_features, explain, promoted_tokens, save_features
from birkhoff.analysis.sae_quality import LossRecovered, loss_recovered, row_quality, zero_sae
from birkhoff.analysis.sae_rows import LiveRows, StoreRows, check_view, view_rows
from birkhoff.analysis.sae_train import SETTINGS, STATE, check_share, share_device, train_sae
from birkhoff.errors import OptionError, SaeError
from birkhoff.hooks.tap import EagerTap
from birkhoff.sae.compact import compact, rounded
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.evaluate import quality
from birkhoff.sae.saelens_files import WEIGHTS
from birkhoff.sae.train import TrainOptions
from tests.api.conftest import open_engine
from tests.killed_write import kill_while_writing

HOOK, LAYER, PLANTED, WINDOW = "mlp_out", 2, 24, 2
STREAMS = "mhc_streams_pre_attn"


def texts(count: int, seed: int = 0, length: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 259, (count, length), generator=generator).tolist()


@pytest.fixture(scope="module")
def directions(engine) -> torch.Tensor:
    drawn = torch.randn(PLANTED, engine.schema[HOOK].width, generator=torch.Generator().manual_seed(1))
    return drawn / drawn.norm(dim=1, keepdim=True)


@pytest.fixture(scope="module")
def store(checkpoint, directions, tmp_path_factory):
    """Captures of a synthetic model with planted features: each pair of token ids has two directions of its own, added
    during the forward pass, about ten times as strong as the row itself."""
    root = tmp_path_factory.mktemp("planted")
    prompts = texts(160)
    generator = torch.Generator().manual_seed(2)
    with open_engine(checkpoint, capture_root=root) as engine:
        size = engine.trace(prompts[0], [HOOK])[HOOK, LAYER].norm(dim=-1).mean().item()
        steer = []
        for prompt in prompts:
            edits = []
            for start in range(0, len(prompt), WINDOW):
                for direction in torch.randperm(PLANTED, generator=generator)[:2].tolist():
                    strength = size * 8 * (1 + torch.rand((), generator=generator).item())
                    where = {"prompt": {"window": [start, start + WINDOW]}}
                    edits.append(Add(directions[direction], HOOK, [LAYER], scale=strength, where=where))
            steer.append(edits)
        captures = [
            Capture(
                {HOOK: [LAYER]},
                capture_point="after",
                tag="planted",
                request_id=f"r{number}",
                **{"return": "file"},
            )
            for number in range(len(prompts))
        ]
        outputs = engine.generate(prompts, max_tokens=1, temperature=0, capture=captures, steer=steer)
        assert all(next(iter(output.capture_results.values())).status == "ok" for output in outputs)
    return root / "planted"


def test_planted_directions_of_a_models_captures_are_found_again(store, directions, tmp_path):
    source = StoreRows(store, HOOK, LAYER, "single", 256)
    done = train_sae(source, TrainOptions(32, k=2, steps=900, rate=5e-3), tmp_path / "sae")
    best = (directions @ done.sae.decoder.T).amax(1)
    assert done.quality.explained_variance >= 0.9
    assert (best > 0.9).float().mean() >= 0.9
    again = Sae.load(tmp_path / "sae")
    assert (again.hook, again.layer, again.view, again.activation.name) == (HOOK, LAYER, "single", "jumprelu")
    rows = next(source.batches(0))
    assert torch.allclose(again.encode(rows), done.sae.encode(rows), atol=1e-3)


def test_an_interrupted_training_gives_the_same_sae(store, tmp_path):
    source, options = StoreRows(store, HOOK, LAYER, "single", 128), TrainOptions(32, k=2, steps=24)
    whole = train_sae(source, options, tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(report):
        if report.step == 17:
            raise Stop

    with pytest.raises(Stop):
        train_sae(source, options, tmp_path / "cut", every=5, progress=stop)
    assert (tmp_path / "cut" / STATE).is_file()
    for name in (STATE, SETTINGS, WEIGHTS):
        kill_while_writing(tmp_path / "cut" / name)
    with pytest.raises(SaeError, match="other settings"):
        train_sae(source, TrainOptions(32, k=3, steps=24), tmp_path / "cut")
    seen = []
    again = train_sae(source, options, tmp_path / "cut", progress=lambda report: seen.append(report.step))
    assert seen[0] == 16 and torch.equal(again.sae.decoder, whole.sae.decoder)
    written = [
        {path.name: path.read_bytes() for path in (tmp_path / run).iterdir()} for run in ("cut", "whole")
    ]
    assert again.sae.digest == whole.sae.digest and written[0] == written[1]


def test_a_device_is_shared_by_model_and_training():
    assert share_device(0.25, 1000) == (750, 250)
    for share, words in ((0.0, "share is 0"), (1.0, "nothing for the model"), (1.5, "share is 1.5")):
        with pytest.raises(OptionError, match=words):
            share_device(share, 1000)
    options = TrainOptions(65_536, products="bfloat16")
    needed = check_share(options, 16_384, 4096, 32_768, 1 << 40)
    assert 28 * 65_536 * 16_384 < needed < 48 << 30
    with pytest.raises(OptionError, match=r"its share of the device is 10\.00 GiB"):
        check_share(options, 16_384, 4096, 32_768, 10 << 30)


def test_an_interrupted_training_on_live_texts_gives_the_same_sae(engine, tmp_path):
    """The position in the texts is part of the checkpoint; the engine is not batch-invariant."""
    prompts = texts(30, 11)
    options = TrainOptions(32, k=4, kind="jumprelu", steps=12, accumulate=2)

    def source():
        return LiveRows(engine, prompts, STREAMS, 2, "flat", batch_rows=16, pool_batches=2)

    class Stop(Exception):
        pass

    def stop(report):
        if report.step == 11:
            raise Stop

    whole = train_sae(source(), options)
    with pytest.raises(Stop):
        train_sae(source(), options, tmp_path / "cut", every=10, progress=stop)
    seen = []
    again = train_sae(source(), options, tmp_path / "cut", progress=lambda report: seen.append(report.step))
    assert seen == [11, 12] and again.sae.digest == whole.sae.digest
    assert again.quality == whole.quality


@pytest.mark.parametrize("view", ["flat", "per_stream", "mean", "read"])
def test_live_rows_are_those_of_the_forward_pass(engine, view):
    prompts = texts(5, 3)
    source = LiveRows(engine, prompts, STREAMS, 2, view, batch_rows=40, pool_batches=2)
    result = torch.cat(list(source.batches(0)))
    hook = "pre_attn" if view == "read" else STREAMS
    rows = torch.cat([view_rows(engine.trace(ids, [hook])[hook, 2], view) for ids in prompts])
    assert result.shape == rows.shape
    distances = torch.cdist(result, rows, compute_mode="donot_use_mm_for_euclid_dist")
    close = distances.amin(1) / rows.norm(dim=1).mean()
    assert close.max() < 1e-3, "every row is a row of the pass"
    assert not torch.allclose(result, rows, atol=1e-3), "and they are mixed"
    again = torch.cat(list(source.batches(0)))
    assert torch.allclose(result, again, atol=1e-4), "by the seed"


def test_a_dictionary_of_what_a_sublayer_reads_is_trained_saved_and_spliced(engine, tmp_path):
    """The reconstruction of the read view is what the sublayer reads when it is spliced in."""
    prompts = texts(6, 3)
    source = LiveRows(engine, prompts, STREAMS, 2, "read", batch_rows=40, pool_batches=2)
    done = train_sae(source, TrainOptions(24, k=4, steps=8), tmp_path / "sae")
    sae = Sae.load(tmp_path / "sae")
    assert (done.sae.view, done.sae.spread, sae.view, sae.spread) == ("read", "read", "read", "read")
    assert loss_recovered(engine, sae, prompts[:2]).tokens == 2 * (len(prompts[0]) - 1)
    with engine.attach("read", sae, kind="full"):
        steer = [SaeReconstruct("read", error="drop")]
        hooks = {STREAMS: [2], "mhc_attn_pre_mix": [2]}
        capture = Capture(hooks, "all_prompt", capture_point="after")
        acts = engine.generate(prompts[0], max_tokens=1, capture=capture, steer=steer).acts
    plain = engine.trace(prompts[0], ["pre_attn", "mhc_attn_pre_mix"])
    read = (plain["mhc_attn_pre_mix", 2].unsqueeze(-1) * acts[STREAMS, 2].tensor).sum(1)
    assert (read - sae.reconstruct(plain["pre_attn", 2])).abs().max() < 1e-3


@pytest.fixture(scope="module")
def dictionary(engine) -> Sae:
    source = LiveRows(engine, texts(24, 7), STREAMS, 3, "flat", batch_rows=128, pool_batches=2)
    return train_sae(source, TrainOptions(96, k=12, steps=60, rate=5e-3)).sae


def test_loss_recovered_equals_its_definition(engine, dictionary):
    prompts = texts(3, 9)
    result = loss_recovered(engine, dictionary, prompts)
    assert result.tokens == 3 * 23

    def loss(change) -> float:
        total = 0.0
        for ids in prompts:
            with torch.no_grad():

                def edit(site, layer, x):
                    return change(x) if (site.name, layer) == (STREAMS, 3) else x

                logits = engine.model(torch.tensor(ids), EagerTap(edit=edit))
            total -= logits[:-1].log_softmax(-1)[torch.arange(23), ids[1:]].sum().item()
        return total / result.tokens

    assert result.plain == pytest.approx(loss(lambda x: x), abs=1e-4)
    assert result.ablated == pytest.approx(loss(torch.zeros_like), abs=1e-4)
    assert result.spliced == pytest.approx(
        loss(lambda x: dictionary.reconstruct(x.flatten(1)).view_as(x)), abs=1e-3
    )
    assert result.added == pytest.approx(result.spliced - result.plain)
    assert (
        LossRecovered(9, 1.0, 1.5, 3.0).recovered == 0.75
        and LossRecovered(9, 1.0, 1.5, 0.9).recovered is None
    )
    nothing = loss_recovered(engine, zero_sae(dictionary), prompts)
    assert nothing.spliced == nothing.ablated
    left_alone = loss_recovered(engine, dictionary, [[5, 5, 5, 5]], exclude=[5])
    assert left_alone.plain == left_alone.spliced == left_alone.ablated
    with pytest.raises(OptionError, match="two tokens"):
        loss_recovered(engine, dictionary, [[1]])


def test_quality_of_texts_is_that_of_their_rows(engine, dictionary):
    prompts = texts(4, 11)
    result, measure = row_quality(engine, dictionary, prompts, skip=2)
    rows = torch.cat([engine.trace(ids, [STREAMS])[STREAMS, 3][2:].flatten(1) for ids in prompts])
    assert result.rows == len(rows) == measure.rows
    assert result.explained_variance == pytest.approx(
        quality(dictionary, [rows]).explained_variance, abs=1e-5
    )


def test_features_are_found_where_they_fire_most(engine, dictionary, tmp_path):
    prompts = texts(6, 13)
    book = collect_features(engine, dictionary, prompts, skip=1, contexts=3)
    every = [dictionary.encode(engine.trace(ids, [STREAMS])[STREAMS, 3].flatten(1)) for ids in prompts]
    checked = 0
    for feature in range(dictionary.d_sae):
        best = sorted(((f[1:, feature].max().item(), n) for n, f in enumerate(every)), reverse=True)[:3]
        peaks = book.peaks(feature)
        assert [peak.text for peak in peaks] == [n for value, n in best if value > 0]
        for peak in peaks:
            assert every[peak.text][peak.position, feature].item() == pytest.approx(peak.value, abs=1e-4)
            checked += 1
    assert checked > 20
    fired = torch.cat([f[1:] for f in every]).gt(0).float().mean(0)
    assert torch.allclose(book.density, fired)

    result = explain(engine, dictionary, prompts, contexts=3, tokens=4)
    feature, entry = next(iter(result.items()))
    assert entry.contexts[0]["value"] == pytest.approx(book.peaks(feature)[0].value, abs=1e-3)
    assert "[" in entry.contexts[0]["text"] and len(entry.promotes) == len(entry.suppresses) == 4
    saved = json.loads(save_features(result, tmp_path).read_text())
    assert set(saved) == {str(number) for number in result}
    assert all(one.score is None and one.made in ("rule", "peaks") for one in result.values()), (
        "too few texts"
    )
    scored = explain(engine, dictionary, texts(12, 13), contexts=3, tokens=4)
    assert any(one.score is not None and one.scored_rows == 3 * 23 for one in scored.values())
    fired = torch.cat([f[1:] for f in every]).gt(0).any(0).nonzero().flatten().tolist()
    assert sorted(result) == fired and all(one.label and one.examples for one in result.values())
    for number, one in result.items():
        drawn = {example["value"] for example in one.examples}
        levels = torch.cat([f[1:, number] for f in every])
        assert all((levels - value).abs().min() < 2e-3 for value in drawn)


def test_promoted_tokens_are_those_the_decoder_row_raises(engine, dictionary):
    up, down = promoted_tokens(engine, dictionary, 3)
    row = dictionary.decoder[5].view(4, -1).mean(0)
    with torch.no_grad():
        logits = engine.model.logits(engine.model.norm(row.unsqueeze(0)))[0]
    assert logits.topk(3).indices.tolist() == up[5].tolist() and logits.argmin() == down[5][0]


def test_half_precision_halves_the_size_of_an_sae(dictionary, tmp_path):
    small = rounded(dictionary)
    small.save(tmp_path / "sae")
    whole = (tmp_path / "sae" / WEIGHTS).stat().st_size
    assert compact(tmp_path / "sae") < 0.6 * whole
    again = Sae.load(tmp_path / "sae")
    assert torch.equal(again.encoder, small.encoder) and torch.equal(again.decoder, small.decoder)
    assert again.digest == small.digest != dictionary.digest
    dictionary.save(tmp_path / "exact")
    compact(tmp_path / "exact")  # tensors that would be rounded are left unchanged
    assert torch.equal(Sae.load(tmp_path / "exact").decoder, dictionary.decoder)


def test_views_a_hook_does_not_have_are_refused(engine, tmp_path):
    for hook, view, words in (
        (HOOK, "flat", "expected single"),
        (STREAMS, "single", "expected flat"),
        ("mhc_streams_final", "read", "final_hidden"),
    ):
        with pytest.raises(OptionError, match=words):
            check_view(hook, view)
    with pytest.raises(SaeError, match="no rows"):
        train_sae(LiveRows(engine, [], HOOK, 1), TrainOptions(8, k=2))
    nowhere = Sae(torch.eye(4), None, torch.eye(4))
    with pytest.raises(SaeError, match="where its rows come from"):
        collect_features(engine, nowhere, [[1, 2]])
