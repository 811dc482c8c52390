"""Crosscoders and transcoders: their mathematics, files, training, and what splicing one in does to the model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from birkhoff import Add, Call, Capture
from birkhoff.analysis.crosscoder_splice import crosscoder_loss, splice
from birkhoff.analysis.crosscoder_train import SiteRowSource, train_crosscoder
from birkhoff.analysis.harvest import harvest
from birkhoff.analysis.sae_train import STATE
from birkhoff.errors import CaptureFileError, OptionError, SaeError, SaeFileError
from birkhoff.sae.crosscoder import WEIGHTS, Crosscoder, SitePart
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.train import TrainOptions
from tests.cli.conftest import birkhoff
from tests.killed_write import kill_while_writing

STREAMS = "mhc_streams_pre_attn"
IDS = [5, 9, 40, 77, 12, 30, 8, 19, 101, 56]


def random_crosscoder(engine, inputs, outputs=None, features=12, seed=0, view="flat"):
    """Random weights for these sites of an engine, with some features active."""
    g = torch.Generator().manual_seed(seed)
    shapes = {hook: engine.schema[hook].logical_shape for hook, _ in [*inputs, *(outputs or [])]}

    def part(address):
        shape = shapes[address[0]]
        streams = address[0].startswith("mhc_streams")
        kind = view if streams else "single"
        return SitePart(*address, kind, shape[-1] if kind == "mean" else int(np.prod(shape)))

    read = [part(address) for address in inputs]
    write = read if outputs is None else [part(address) for address in outputs]
    wide, out = (sum(site.width for site in sites) for sites in (read, write))
    sae = Sae(
        torch.randn(features, wide, generator=g) / wide**0.5,
        torch.randn(features, generator=g) * 0.1,
        torch.randn(features, out, generator=g) / out**0.5,
        torch.randn(out, generator=g) * 0.1,
        activation="jumprelu",
        threshold=torch.full((features,), 0.02),
        labels={3: "third"},
        transcodes=True,
    )
    return Crosscoder(sae, read, None if outputs is None else write)


@pytest.fixture
def transcoder(engine):
    return random_crosscoder(engine, [("mlp_in", 2)], [("mlp_out", 2)])


@pytest.fixture
def crosscoder(engine):
    return random_crosscoder(engine, [(STREAMS, 1), (STREAMS, 3)])


def by_hand(crosscoder, trace, values, error):
    """New rows of every output site in float64; `values` are set."""
    sae = crosscoder.sae
    rows = [trace[site.address].double().flatten(1) for site in crosscoder.inputs]
    z = torch.cat(rows, 1) @ sae.encoder.double().T + sae.encoder_bias.double()
    before = torch.where(z > 0.02, z, 0.0)
    after = before.clone()
    for feature, value in values.items():
        after[:, feature] = value
    tables, first = {}, 0
    for site in crosscoder.outputs:
        decoder = sae.decoder[:, first : first + site.width].double()
        bias = sae.decoder_bias[first : first + site.width].double()
        first += site.width
        old = trace[site.address].double()
        new = after @ decoder + bias if error == "drop" else old.flatten(1) + (after - before) @ decoder
        tables[site.address] = new.view(old.shape).float()
    return tables


def setters(tables):
    return [
        Call(lambda rows, site, table=table: table[list(site.positions)], hook, [layer])
        for (hook, layer), table in tables.items()
    ]


@pytest.mark.parametrize("error", ["keep", "drop"])
def test_a_transcoder_writes_what_it_read_in_the_same_pass(engine, transcoder, error):
    trace = engine.trace(IDS, ["mlp_in", "mlp_out"])
    expected = engine.logits(IDS, steer=setters(by_hand(transcoder, trace, {3: 2.0, 7: -1.0}, error)))
    ours = engine.logits(IDS, steer=splice(engine, transcoder, {"third": 2.0, 7: -1.0}, error=error))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(ours, engine.logits(IDS), atol=1e-3)


def test_a_transcoder_also_edits_generated_tokens(engine, transcoder):
    options = {"max_tokens": 6, "temperature": 0.0}
    output = engine.generate(IDS, steer=splice(engine, transcoder, {3: 3.0}, error="drop"), **options)
    whole = IDS + output.token_ids
    logits = engine.logits(whole, steer=splice(engine, transcoder, {3: 3.0}, error="drop"))
    assert output.token_ids == logits[len(IDS) - 1 : -1].argmax(-1).tolist()
    several = engine.generate(
        [IDS, IDS[:4]], steer=splice(engine, transcoder, {3: 3.0}, error="drop"), **options
    )
    assert several[0].token_ids == output.token_ids


@pytest.mark.parametrize("error", ["keep", "drop"])
def test_a_crosscoder_sets_every_site_from_a_first_pass(engine, crosscoder, error):
    assert crosscoder.kind == "crosscoder" and not crosscoder.causal
    trace = engine.trace(IDS, [STREAMS])
    expected = engine.logits(IDS, steer=setters(by_hand(crosscoder, trace, {2: 1.5}, error)))
    ours = engine.logits(IDS, steer=splice(engine, crosscoder, {2: 1.5}, IDS, error=error))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_an_edit_that_changes_no_feature_changes_nothing(engine, crosscoder, transcoder):
    plain = engine.logits(IDS)
    for each in (crosscoder, transcoder):
        same = splice(engine, each, {2: 1.0}, IDS, kind="multiply")
        torch.testing.assert_close(engine.logits(IDS, steer=same), plain, atol=1e-5, rtol=1e-5)


def test_additions_are_those_of_vectors_and_need_no_prompt(engine, crosscoder):
    added = splice(engine, crosscoder, {4: 2.0}, kind="additive")
    parts = crosscoder.sae.decoder[4].split([site.width for site in crosscoder.outputs])
    vectors = [Add(part, STREAMS, [site.layer], scale=2.0) for part, site in zip(parts, crosscoder.outputs)]
    torch.testing.assert_close(
        engine.logits(IDS, steer=added), engine.logits(IDS, steer=vectors), atol=1e-4, rtol=1e-4
    )
    options = {"max_tokens": 4, "temperature": 0.0}
    assert (
        engine.generate(IDS, steer=added, **options).token_ids
        == engine.generate(IDS, steer=vectors, **options).token_ids
    )


def test_the_mean_of_streams_changes_every_stream_alike(engine):
    mean = random_crosscoder(engine, [(STREAMS, 1), (STREAMS, 3)], view="mean")
    site = mean.outputs[0]
    rows = torch.randn(5, *engine.schema[STREAMS].logical_shape)
    new = site.replaced(rows, site.read(rows) + 1.0)
    torch.testing.assert_close(new, rows + 1.0)
    assert mean.norms().shape == (12, 2)


def test_where_leaves_other_tokens_alone(engine, transcoder):
    where = {"prompt": {"window": [3, 5]}}
    seen = []
    watch = Call(lambda rows: seen.append(rows.clone()), "mhc_streams_pre_attn", [3])
    engine.logits(IDS, steer=[*splice(engine, transcoder, {3: 5.0}, where=where), watch])
    engine.logits(IDS, steer=[watch])
    changed = (seen[0] != seen[1]).flatten(1).any(1).nonzero().squeeze(1).tolist()
    assert changed[0] == 3  # later tokens attend to the changed ones


def test_what_cannot_be_spliced_is_refused(engine, crosscoder, transcoder):
    with pytest.raises(SaeError, match="reads layers after the first one it writes"):
        splice(engine, crosscoder, {1: 1.0})
    with pytest.raises(OptionError, match="nothing to splice"):
        splice(engine, transcoder)
    with pytest.raises(OptionError, match="kind is 'min'"):
        splice(engine, transcoder, {1: 1.0}, kind="min")
    with pytest.raises(SaeError, match="feature 99 does not exist"):
        splice(engine, transcoder, {99: 1.0})
    with pytest.raises(SaeError, match="expected flat or mean"):
        SitePart(STREAMS, 1, "single", 8)
    with pytest.raises(SaeError, match="numbers together"):
        Crosscoder(transcoder.sae, transcoder.inputs * 1, [SitePart("mlp_out", 2, "single", 5)])


def test_files_hold_everything_and_damage_is_named(engine, crosscoder, transcoder, tmp_path):
    trace = engine.trace(IDS, [STREAMS, "mlp_in", "mlp_out"])
    for name, one in (("cross", crosscoder), ("trans", transcoder)):
        again = Crosscoder.load(one.save(tmp_path / name))
        assert (again.inputs, again.outputs, again.kind) == (one.inputs, one.outputs, one.kind)
        assert again.sae.labels == one.sae.labels and repr(again) == repr(one)
        assert torch.equal(again.encode(trace), one.encode(trace))
        half = Crosscoder.load(one.save(tmp_path / f"{name}-half", half=True))
        assert torch.equal(half.sae.decoder, one.sae.decoder.bfloat16().float())
    weights = tmp_path / "cross" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(SaeFileError, match="cannot be read as a crosscoder"):
        Crosscoder.load(tmp_path / "cross")
    with pytest.raises(SaeFileError, match=r"crosscoder\.json"):
        Crosscoder.load(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def run(engine, tmp_path_factory):
    out = tmp_path_factory.mktemp("rows") / "out"
    generator = torch.Generator().manual_seed(3)
    texts = [
        "".join(chr(97 + int(c)) for c in torch.randint(0, 26, (40,), generator=generator)) for _ in range(24)
    ]
    harvest(engine, texts, Capture({STREAMS: [1, 3], "mlp_in": [2], "mlp_out": [2]}), out)
    return out


OPTIONS = TrainOptions(32, k=8, steps=30, rate=5e-3, dead_after=10_000)


def test_batches_hold_every_row_of_the_same_tokens_once(run):
    source = SiteRowSource(run, [("mlp_in", 2)], [("mlp_out", 2)], batch_rows=16, seed=1)
    epochs = [list(source.batches(0)), list(source.batches(0)), list(source.batches(1))]
    rows = [torch.cat([batch[0] for batch in epoch]) for epoch in epochs]
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])
    every = [sorted(row.numpy().tobytes() for row in epoch) for epoch in rows]
    assert every[0] == every[2] and len(rows[0]) == 24 * 40  # the first token is left out
    targets = torch.cat([batch[1] for batch in epochs[0]])
    both = SiteRowSource(run, [("mlp_in", 2), ("mlp_out", 2)], batch_rows=16, seed=2)
    joint = torch.cat([batch[0] for batch in both.batches(0)])
    width = rows[0].shape[1]
    known = {row[:width].numpy().tobytes(): row[width:] for row in joint}
    found = [known.get(row.numpy().tobytes()) for row in rows[0]]
    assert sum(one is not None for one in found) > 800
    assert all(torch.equal(one, target) for one, target in zip(found, targets) if one is not None)
    with pytest.raises(CaptureFileError, match=r"no rows of mlp_out\.3"):
        SiteRowSource(run, [("mlp_out", 3)])


@pytest.mark.parametrize("outputs", [None, [("mlp_out", 2)]])
def test_training_explains_rows_and_resumes_to_equal_bits(run, tmp_path, outputs):
    def source():
        return SiteRowSource(run, [(STREAMS, 1), (STREAMS, 3)], outputs, batch_rows=64, seed=1)

    whole = train_crosscoder(source(), OPTIONS, tmp_path / "whole")
    assert all(share > 0.2 for share in whole.quality["explained_variance"].values()), whole.quality
    assert whole.crosscoder.kind == ("crosscoder" if outputs is None else "transcoder")

    class Interrupted(Exception):
        pass

    def stop(report):
        if report.step == 20:
            raise Interrupted

    with pytest.raises(Interrupted):
        train_crosscoder(source(), OPTIONS, tmp_path / "part", every=10, progress=stop)
    kill_while_writing(tmp_path / "part" / STATE)
    again = train_crosscoder(source(), OPTIONS, tmp_path / "part", every=10)
    assert torch.equal(again.crosscoder.sae.encoder, whole.crosscoder.sae.encoder)
    assert torch.equal(again.crosscoder.sae.decoder, whole.crosscoder.sae.decoder)
    assert sorted(path.name for path in (tmp_path / "part").iterdir()) == [
        "crosscoder.json",
        "crosscoder.safetensors",
    ]


def test_the_loss_is_measured_with_the_model_in_the_loop(engine, run, tmp_path):
    source = SiteRowSource(run, [("mlp_in", 2)], [("mlp_out", 2)], batch_rows=64)
    trained = train_crosscoder(source, OPTIONS).crosscoder
    loss = crosscoder_loss(engine, trained, [IDS, IDS[::-1]])
    logprobs = engine.logits(IDS)[:-1].log_softmax(-1)
    alone = crosscoder_loss(engine, trained, [IDS])
    assert alone.plain == pytest.approx(
        -float(logprobs.gather(1, torch.tensor(IDS[1:])[:, None]).mean()), abs=1e-5
    )
    assert loss.tokens == 18 and loss.spliced != loss.plain != loss.ablated


def test_the_command_trains_both(birkhoff_here, run, tmp_path):
    arguments = ("--features", "32", "--k", "4", "--steps", "5", "--batch-rows", "32", "--json")
    sites = ("--input", f"{STREAMS}.1", "--input", f"{STREAMS}.3", "--view", "mean")
    done = birkhoff("sae", "crosscoder", "--store", run, *sites, "--out", tmp_path / "a", *arguments)
    assert done.returncode == 0 and json.loads(done.stdout)["kind"] == "crosscoder", done.stderr
    sites = ("--input", "mlp_in.2", "--output", "mlp_out.2")
    done = birkhoff_here(
        "sae", "crosscoder", "--store", run, *sites, "--out", tmp_path / "b", *arguments, "--half"
    )
    assert done.returncode == 0 and json.loads(done.stdout)["kind"] == "transcoder", done.stderr
    assert Crosscoder.load(tmp_path / "b").outputs[0].address == ("mlp_out", 2)
