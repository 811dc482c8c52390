"""Captures through the public face: memory, files, the wire form, refusals; the same rows whichever way they go."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff import Capture
from birkhoff.capture.store.reader import read_request, to_torch
from birkhoff.convert.synth import synth
from birkhoff.errors import CaptureValidationError, OptionError

HOOKS = {"mhc_streams_pre_attn": [1, -1], "mhc_ffn_res_mix": "all", "moe_topk": [0]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    synth(path, like="tiny")
    return path


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    with birkhoff.load(
        checkpoint, batch_invariant=True, capture_root=tmp_path_factory.mktemp("captures")
    ) as engine:
        yield engine


@pytest.fixture
def filing(checkpoint, tmp_path):
    with birkhoff.load(checkpoint, batch_invariant=True, capture_root=tmp_path) as engine:
        yield engine


def test_files_hold_the_rows_that_memory_gives(filing, tmp_path):
    greedy = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    prompts = ["hello streams", "and again"]
    kept = filing.generate(prompts, **greedy, capture=Capture(HOOKS, positions="all"))
    wish = Capture(HOOKS, positions="all", returns="file", request_id="probe", tag="test")
    filed = filing.generate(prompts, **greedy, capture=wish)
    for place, (memory, files) in enumerate(zip(kept, filed)):
        result = files.capture_results["filesystem"]
        assert result.status == "ok" and result.durable and result.dropped_rows == 0
        entries = read_request(tmp_path / "test" / f"probe-{place}")
        assert set(entries) == {(layer, hook) for hook, layer in memory.acts} or set(entries) == set(
            memory.acts
        )
        for entry in entries.values():
            rows = memory.acts[entry.hook, entry.layer]
            assert torch.equal(to_torch(entry), rows.tensor) and list(entry.positions) == list(rows.positions)
        assert result.rows == sum(len(rows) for rows in memory.acts.values())


def test_the_wire_form_means_the_same(engine):
    spec = Capture(HOOKS, positions="last_prompt")
    by_object = engine.generate("hello", max_tokens=2, temperature=0, capture=spec)
    by_wire = engine.generate("hello", max_tokens=2, temperature=0, capture={"memory": spec.to_json()})
    for key, rows in by_object.acts.items():
        assert (
            torch.equal(rows.tensor, by_wire.acts[key].tensor)
            and rows.positions == by_wire.acts[key].positions
        )


def test_one_capture_for_each_prompt(engine):
    wishes = [Capture({"mlp_out": [0]}), None, Capture({"mlp_out": [1]}, positions="last_prompt")]
    outputs = engine.generate(["a b c"] * 3, max_tokens=2, temperature=0, capture=wishes)
    assert [sorted(out.acts) for out in outputs] == [[("mlp_out", 0)], [], [("mlp_out", 1)]]
    assert len(outputs[2].acts["mlp_out", 1]) == 1
    assert len({tuple(out.token_ids) for out in outputs}) == 1  # looking changes nothing


def test_rows_are_found_by_the_names_they_were_asked_for(engine):
    out = engine.generate(
        "abc", max_tokens=1, capture=Capture({"mhc_streams_post_mlp": [0, -1], "final_hidden": "all"})
    )
    last = engine.config.num_hidden_layers - 1
    assert torch.equal(out.acts["mhc_streams_post_mlp", 0].tensor, out.acts["mhc_streams_pre_attn", 1].tensor)
    assert torch.equal(
        out.acts["mhc_streams_post_mlp", last].tensor, out.acts["mhc_streams_final", last].tensor
    )
    assert out.acts["final_hidden", 0].tensor.shape == (4, engine.config.hidden_size)  # three bytes after BOS


def test_places_that_never_came_are_reported(engine):
    out = engine.generate(
        "abc", max_tokens=3, temperature=0, capture=Capture({"mlp_out": [0]}, positions=[0, 5, 6])
    )
    assert out.acts["mlp_out", 0].positions == (0, 5) and out.acts.missing == [6]


def test_a_feed_gives_every_row_once_and_in_order(engine):
    texts = [f"text number {n} " * (n % 4 + 1) for n in range(30)]
    spec = Capture({"mlp_out": [2], "post_attn": [0]})
    whole = [engine.generate(text, max_tokens=1, temperature=0, capture=spec).acts for text in texts]
    batches = list(engine.stream_acts(texts, spec, batch_rows=64))
    assert all(len(batch) == 64 for batch in batches[:-1])
    for key in whole[0]:
        assert torch.equal(
            torch.cat([batch[key] for batch in batches]), torch.cat([acts[key].tensor for acts in whole])
        )
    numbers = torch.cat([batch.texts for batch in batches])
    assert numbers.tolist() == [n for n, acts in enumerate(whole) for _ in range(len(acts["mlp_out", 2]))]


def test_a_feed_that_is_dropped_leaves_nothing_running(engine):
    feed = engine.stream_acts(["some text here"] * 50, Capture({"mlp_out": [0]}), batch_rows=8)
    next(feed)
    feed.close()
    assert engine.generate("next", max_tokens=1).finish_reason == "length"
    assert engine._core.scheduler.idle


@pytest.mark.parametrize(
    ("wish", "error", "words"),
    [
        (lambda: Capture({"mlp_out": [99]}), CaptureValidationError, "99"),
        (lambda: Capture({"nonsense": "all"}), CaptureValidationError, "nonsense"),
        (lambda: {"elsewhere": {"hooks": {"mlp_out": [0]}}}, CaptureValidationError, "elsewhere"),
        (lambda: "mlp_out", OptionError, "Capture"),
        (lambda: [Capture({"mlp_out": [0]})] * 3, OptionError, "3"),
    ],
)
def test_bad_captures_are_refused_and_the_engine_goes_on(engine, wish, error, words):
    with pytest.raises(error, match=words):
        engine.generate("hello", max_tokens=2, capture=wish())
    assert engine.generate("hello", max_tokens=2, temperature=0).finish_reason in ("length", "stop")


def test_files_need_a_root(checkpoint):
    with birkhoff.load(checkpoint) as engine:
        with pytest.raises(OptionError, match="capture_root"):
            engine.generate("hello", max_tokens=1, capture=Capture({"mlp_out": [0]}, returns="file"))
