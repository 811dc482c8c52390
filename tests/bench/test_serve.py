"""The benchmark of serving: a real server for a second or two; its rows say what happened and that everything ended."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace

import pytest

from birkhoff.bench.load_generator import LoadResult, run_load
from birkhoff.bench.serve import ServeSetting, _memory_course, bench_serve
from birkhoff.convert.synth import synth


def test_a_short_run_ends_everything(tmp_path):
    synth(tmp_path / "tiny", "tiny")
    engine, held, over = bench_serve(str(tmp_path / "tiny"), ServeSetting(seconds=1.5, streams=2, tokens=12))
    json.dumps([engine, held, over])
    assert [row["kind"] for row in (engine, held, over)] == ["engine", "streams", "overload"]
    assert (
        held["answers"] > 0
        and not held["failed"]
        and held["everything_ended"]
        and held["share_of_engine"] > 0
    )
    assert (
        held["prefix"]["pages"] >= held["prefix"]["pages_before"] > 0 and held["callers_cpu_ms_per_token"] > 0
    )
    assert (
        held["first_token_ms"]["p50"] <= held["first_token_ms"]["p95"]
        and held["resident_bytes"]["before"] > 1 << 26
    )
    assert sum(over["statuses"].values()) == over["callers"] == 20 and set(over["statuses"]) <= {200, 429}
    assert not over["failed"] and over["recovered"] and engine["machine"]["cores"]


def test_memory_is_told_by_its_memory_course():
    level = [(float(at), 500 + 40 * min(at, 10)) for at in range(31)]  # rises for ten seconds, then stays
    assert _memory_course(level) == {
        "before": 500,
        "half": 900,
        "after": 900,
        "later_growth": 0,
        "later_growth_per_minute": 0,
        "series": [500, 900],
    }
    rising = [(float(at), 1000 + 7 * at) for at in range(21)]
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
def test_a_caller_counts_what_it_is_told_however_it_is_cut(name, size):
    """A server that says what it was told to, in pieces of one size, and hangs up."""
    said, expected, times = ANSWERS[name]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                asked = b""
                while b"stream" not in asked:
                    asked += connection.recv(4096)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for start in range(0, len(said), size):
                    connection.sendall(said[start : start + size])
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        seen = run_load(listener.getsockname(), iter([{"messages": []}]), 1)
        thread.join()
    assert (len(seen.first), len(seen.between)) == times
    assert replace(seen, first=[], between=[]) == expected
