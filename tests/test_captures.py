"""Captures through the public API: memory, files, wire form, refusals; the same rows by every path."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import birkhoff
from birkhoff import Capture
from birkhoff.capture.sinks.result import CaptureResult, done
from birkhoff.capture.store.reader import read_request, to_torch
from birkhoff.convert.synth import synth
from birkhoff.errors import CaptureValidationError, ContextError, OptionError

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
    spec = Capture(HOOKS, positions="all", returns="file", request_id="probe", tag="test")
    filed = filing.generate(prompts, **greedy, capture=spec)
    for index, (memory, files) in enumerate(zip(kept, filed)):
        result = files.capture_results["filesystem"]
        assert result.status == "ok" and result.durable and result.dropped_rows == 0
        entries = read_request(tmp_path / "test" / f"probe-{index}")
        assert set(entries) == set(memory.acts)
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
    specs = [Capture({"mlp_out": [0]}), None, Capture({"mlp_out": [1]}, positions="last_prompt")]
    outputs = engine.generate(["a b c"] * 3, max_tokens=2, temperature=0, capture=specs)
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
    text_indices = torch.cat([batch.texts for batch in batches])
    assert text_indices.tolist() == [
        n for n, acts in enumerate(whole) for _ in range(len(acts["mlp_out", 2]))
    ]


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


def everything_under(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


REFUSED = {
    "validation": ({}, Capture({"mlp_out": [99]}), CaptureValidationError),
    "context": ({"max_tokens": 10**6}, Capture({"mlp_out": [0]}), ContextError),
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("why", REFUSED)
def test_a_call_that_is_refused_leaves_no_file_and_no_taken_id(filing, tmp_path, n, why):
    """Planning has no side effect: files open when all requests of a call are accepted."""
    sampling, second, error = REFUSED[why]
    filed = Capture({"mlp_out": [0]}, returns="file", request_id="probe", tag="test")
    before = everything_under(tmp_path)
    with pytest.raises(error):
        filing.generate(["one", "two"], n=n, capture=[filed, second], **{"max_tokens": 2, **sampling})
    assert everything_under(tmp_path) == before and not (tmp_path / "test").exists()
    out = filing.generate("one", max_tokens=2, capture=filed)
    assert out.capture_results["filesystem"].id == "test/probe" and out.capture_results["filesystem"].durable


def test_an_id_that_is_taken_is_an_error_of_its_capture_alone(filing):
    filed = Capture({"mlp_out": [0]}, returns="file", request_id="probe", tag="test")
    assert filing.generate("one", max_tokens=2, capture=filed).capture_results["filesystem"].status == "ok"
    again = filing.generate("one", max_tokens=2, capture=filed)
    assert again.finish_reason in ("length", "stop")
    assert again.capture_results["filesystem"].status == "error"


def test_a_stream_that_is_never_read_opens_no_file(filing, tmp_path):
    before = everything_under(tmp_path)
    stream = filing.stream(
        "one", capture=Capture({"mlp_out": [0]}, returns="file", request_id="a", tag="test")
    )
    assert everything_under(tmp_path) == before
    stream.close()
    assert stream.output.capture_results["filesystem"].status == "not_requested"
    assert everything_under(tmp_path) == before


class EveryRequest:
    """A consumer with a global spec: counts rows by request."""

    reads_client_spec = False
    writer_threads = 1

    def __init__(self, spec):
        self.spec, self.rows, self.ended = spec, {}, []

    def global_capture_spec(self):
        return self.spec

    def validate_client_spec(self, spec, path):
        raise AssertionError("no request can name this consumer")

    def begin(self, request):
        self.rows[request.key] = []

    def submit_chunk(self, chunk):
        self.rows[chunk.request_id] += [(chunk.hook, chunk.layer, position) for position in chunk.positions]

    def finalize(self, finish):
        self.ended.append(finish.key)
        return done(CaptureResult("ok"))

    def get_result(self, key):
        return CaptureResult("ok")

    def shutdown(self):
        pass


def test_a_consumer_with_a_global_spec_receives_rows_of_every_request(checkpoint):
    spy = EveryRequest({"hooks": {"mlp_out": [1]}, "positions": "all_prompt"})
    with birkhoff.load(checkpoint) as engine:
        engine.add_consumer("spy", spy)
        with pytest.raises(OptionError, match="'number' is 3, expected an object with the methods of"):
            engine.add_consumer("number", 3)
        plain, captured = engine.generate(
            ["hello", "you"], max_tokens=2, temperature=0, capture=[None, Capture({"pre_attn": [0]})]
        )
        list(engine.stream("streamed", max_tokens=2))
        next(engine.stream_acts(["fed"], Capture({"pre_attn": [0]})))
        with pytest.raises(CaptureValidationError, match="no consumer has this name"):
            engine.generate("hello", max_tokens=1, capture={"spy": {"hooks": {"mlp_out": [0]}}})
        assert plain.capture_results == {} and "capture_hash" not in plain.interp and plain.acts == {}
        assert set(captured.capture_results) == {"memory"} and set(captured.acts) == {("pre_attn", 0)}
    assert len(spy.rows) == len(spy.ended) == 4
    lengths = [len(engine.prompt_ids(text)) for text in ("hello", "you", "streamed", "fed")]
    assert list(spy.rows.values()) == [[("mlp_out", 1, at) for at in range(length)] for length in lengths]


def test_a_global_spec_of_another_model_is_refused_and_one_that_does_not_fit_a_request_is_skipped(checkpoint):
    with birkhoff.load(checkpoint) as engine:
        with pytest.raises(CaptureValidationError, match=r"capture\.spy.*99"):
            engine.add_consumer("spy", EveryRequest({"hooks": {"mlp_out": [99]}, "positions": "all"}))
        spy = EveryRequest({"hooks": {"mlp_out": [1]}, "positions": [0, 10]})
        engine.add_consumer("spy", spy)
        assert engine.generate("x", max_tokens=1).finish_reason is not None
        engine.generate("a text of more than ten tokens", max_tokens=1)
    assert [[at for _, _, at in rows] for rows in spy.rows.values()] == [[0, 10]]


def test_positions_are_an_index(engine):
    """A tuple would index axis by axis."""
    rows = engine.generate([5, 6, 7, 8], max_tokens=1, capture=Capture({"mlp_out": [1]}, [0, 2])).acts[
        "mlp_out", 1
    ]
    logits = engine.logits([5, 6, 7, 8])
    assert torch.equal(logits[rows.positions], logits[[0, 2]])
    assert np.array_equal(logits.numpy()[rows.positions], logits.numpy()[[0, 2]])
    for expected in ((0, 2), [0, 2]):
        assert expected == rows.positions and rows.positions == expected
    assert rows.positions != (0, 1) and rows.positions != "02"
    assert (
        rows.token_ids == (5, 7)
        and tuple(rows.positions) == (0, 2)
        and json.dumps(rows.positions) == "[0, 2]"
    )
