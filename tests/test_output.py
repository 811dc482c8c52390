"""Streams of running requests, and their outputs."""

import pytest

import birkhoff
from birkhoff.convert.synth import synth
from birkhoff.errors import RequestError

SAMPLING = {"seed": 7, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("output") / "tiny"
    synth(path, "tiny")
    with birkhoff.load(path, cache_bytes=2**28) as engine:
        yield engine


def test_a_stream_read_to_its_end_has_the_output_generate_gives(engine):
    stream = engine.stream("once", **SAMPLING)
    events = list(stream)
    whole = engine.generate("once", **SAMPLING)
    assert "".join(event.text for event in events) == stream.output.text == whole.text
    assert stream.output.token_ids == whole.token_ids and stream.output.finish_reason == "length"
    assert (
        stream.output.prompt_token_ids == whole.prompt_token_ids
        and stream.output.timings["output_tokens"] == 12
    )


def test_a_closed_stream_keeps_what_it_had(engine):
    with engine.stream("once", **SAMPLING) as stream:
        first = [next(stream).token_id for _ in range(3)]
        with pytest.raises(RequestError, match="not ended"):
            _ = stream.output
    assert stream.output.finish_reason == "cancelled" and stream.output.token_ids[:3] == first
    assert list(stream) == []
    assert engine.generate("once", **SAMPLING).token_ids[:3] == first


def test_a_stream_that_was_never_read_can_be_closed(engine):
    stream = engine.stream("once", **SAMPLING)
    stream.close()
    assert (stream.output.finish_reason, stream.output.token_ids) == ("cancelled", [])
