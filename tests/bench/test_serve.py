"""The serving benchmark with a real server for one or two seconds: its rows, and that all requests complete."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from dataclasses import replace

import pytest

from birkhoff.bench.load_generator import LoadResult, run_load
from birkhoff.bench.serve import ServeSetting, _memory_course, bench_serve
from birkhoff.bench.serve_mixed import MixedSetting, bench_mixed, bodies
from birkhoff.convert.synth import synth


def test_a_short_run_completes_all_requests(tmp_path):
    synth(tmp_path / "tiny", "tiny")
    engine, streams, overload, hostile = bench_serve(
        str(tmp_path / "tiny"), ServeSetting(seconds=1.5, streams=2, tokens=12, hostile=True)
    )
    json.dumps([engine, streams, overload, hostile])
    assert hostile["kind"] == "hostile" and hostile["requests"] > 20 and hostile["statuses"]["400"] > 10
    assert not hostile["honest_failed"] and hostile["honest_answers"] and hostile["everything_ended"]
    assert all(200 <= int(status) < 500 for status in hostile["statuses"])
    assert [row["kind"] for row in (engine, streams, overload)] == ["engine", "streams", "overload"]
    assert (
        streams["answers"] > 0
        and not streams["failed"]
        and streams["everything_ended"]
        and streams["share_of_engine"] > 0
    )
    assert (
        streams["prefix"]["pages"] >= streams["prefix"]["pages_before"] > 0
        and streams["callers_cpu_ms_per_token"] > 0
    )
    assert (
        streams["first_token_ms"]["p50"] <= streams["first_token_ms"]["p95"]
        and streams["resident_bytes"]["before"] > 1 << 26
    )
    assert sum(overload["statuses"].values()) == overload["callers"] == 20 and set(overload["statuses"]) <= {
        200,
        429,
    }
    assert not overload["failed"] and overload["recovered"] and engine["machine"]["cores"]


def test_memory_course_of_level_and_rising_memory():
    # Rises for ten seconds, then stays level.
    level = [(float(second), 500 + 40 * min(second, 10)) for second in range(31)]
    assert _memory_course(level) == {
        "before": 500,
        "half": 900,
        "after": 900,
        "later_growth": 0,
        "later_growth_per_minute": 0,
        "series": [500, 900],
    }
    rising = [(float(second), 1000 + 7 * second) for second in range(21)]
    assert _memory_course(rising) == {
        "before": 1000,
        "half": 1070,
        "after": 1140,
        "later_growth": 70,
        "later_growth_per_minute": 420,
        "series": [1000],
    }


ANSWERS = {
    "whole": (
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{"delta":{"content":"a"},"token_ids":[1]}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"b"},"token_ids":[2,3]}]}\n\n'
        b'data: {"choices":[],"timings":{"output_tokens":3},"prompt_token_ids":[9]}\n\ndata: [DONE]\n\n',
        LoadResult(tokens=3, ended=1, statuses={200: 1}),
        (1, 1),
    ),
    "refused": (b'HTTP/1.1 429 Too Many Requests\r\n\r\n{"error":{}}', LoadResult(statuses={429: 1}), (0, 0)),
    "an error": (
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{"code":"x"}}\n\ndata: [DONE]\n\n',
        LoadResult(ended=1, statuses={200: 1}, failed=['data: {"error":{"code":"x"}}']),
        (0, 0),
    ),
    "broken off": (
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"choi',
        LoadResult(statuses={200: 1}, failed=["the stream broke off"]),
        (0, 0),
    ),
    "nothing": (b"", LoadResult(failed=["the stream broke off"]), (0, 0)),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_the_load_generator_parses_responses_in_any_chunking(name, size):
    """A server that sends a fixed response in pieces of `size` bytes and closes the connection."""
    response, expected, times = ANSWERS[name]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                received = b""
                while b"stream" not in received:
                    received += connection.recv(4096)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for start in range(0, len(response), size):
                    connection.sendall(response[start : start + size])
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        result = run_load(listener.getsockname(), iter([{"messages": []}]), 1)
        thread.join()
    assert (len(result.first), len(result.between)) == times
    assert replace(result, first=[], between=[]) == expected


def test_mixed_traffic_is_served_and_compared_with_the_engine(tmp_path):
    synth(tmp_path / "tiny", "tiny")
    setting = MixedSetting(
        model=str(tmp_path / "tiny"), device="cpu", seconds=0.5, streams=4, tokens=6, prompt_words=3
    )
    engine, streams = bench_mixed(setting)
    json.dumps([engine, streams])
    assert [row["kind"] for row in (engine, streams)] == ["engine, mixed traffic", "streams, mixed traffic"]
    for row in (engine, streams):
        assert row["answers"] >= 4 and not row["failed"] and row["tokens_per_s"] > 0
        assert row["first_token_ms"]["p50"] > 0 and row["between_tokens_ms"]["p95"] > 0
        assert row["gpu_busy"] is None and (row["steered"], row["captured"]) == (0.3, 0.1)
    assert streams["share_of_engine"] > 0


def test_mixed_bodies_have_the_shares_that_were_asked_for():
    setting = MixedSetting(steered=0.3, captured=0.1, tokens=20)
    made = list(itertools.islice(bodies(setting, 8, float("inf")), 400))
    steered = sum("interventions" in body for body in made)
    captured = sum("capture" in body for body in made)
    assert abs(steered - 120) <= 2 and abs(captured - 40) <= 2
    assert not any("interventions" in body and "capture" in body for body in made)
    assert len({body["messages"][0]["content"] for body in made}) == 400
    assert {body["max_tokens"] for body in made} <= set(range(10, 31))
