"""The server process: start, failed starts, drain and stop."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import time

import httpx2
import pytest

from birkhoff.capture.store.reader import read_request
from birkhoff.convert.convert import convert
from birkhoff.embedded import EMBEDDED, shipped_vectors
from tests.cli.conftest import COMMAND, birkhoff, clean_environment, no_trace_of_python
from tests.free_port import free_port
from tests.server.conftest import serving, user

CHAT = "/v1/chat/completions"


def cut_short(tmp_path):
    """A checkpoint with a truncated shard."""
    where = tmp_path / "half"
    shutil.copytree(EMBEDDED / "nano", where)
    shard = where / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    return where


def missing(tmp_path):
    where = tmp_path / "missing"
    shutil.copytree(EMBEDDED / "nano", where)
    (where / "model-00002-of-00002.safetensors").unlink()
    return where


STARTS = {
    "bad flag": (["--no-such-flag"], 2),
    "bad port": (["--port", "70000"], 2),
    "bad number": (["--max-queue", "many"], 2),
    "bad host": (["--host", "no.such.host.invalid", "--api-key", "k"], 2),
    "open": (["--host", "0.0.0.0"], 2),
    "bad log": (["--log", "loud"], 2),
    "no model": (["--model", "nowhere"], 1),
    "bad sae": (["--sae", "x"], 2),
    "bad vector": (["--steering-modules", "nowhere.safetensors"], 1),
    "bad device": (["--device", "toaster"], 2),
    "bad seconds": (["--header-seconds", "-1"], 2),
    "bad key": (["--api-key", "\u00e9"], 2),
}


@pytest.mark.parametrize("name", STARTS)
def test_e5_a_failed_start_prints_one_line(name):
    flags, status = STARTS[name]
    done = birkhoff("serve", "--port", "0", *flags)
    assert done.returncode == status and not done.stdout, done.stderr
    assert no_trace_of_python(done.stderr) and 0 < len(done.stderr.strip().splitlines()) <= 8


def test_e5_a_capture_root_that_cannot_be_written_is_told_before_the_model_is_read(tmp_path):
    """Reading the checkpoint would fail, after minutes if it is large."""
    (tmp_path / "file").touch()
    root = str(tmp_path / "file" / "captures")
    done = birkhoff("serve", "--port", "0", "--model", str(cut_short(tmp_path)), "--capture-root", root)
    assert done.returncode == 1 and done.stderr.startswith(b"capture-write  "), done.stderr


TWICE = {
    "sae": (["--sae", "a=/x", "--sae", "a=/y"], b"sae is 'a=/y', but sae 'a=/x' has this name already"),
    "sae and sae_full": (["--sae", "a=/x", "--sae-full", "a=/x"], b"sae_full is 'a=/x', but sae 'a=/x' has"),
    "served_name": (["--served-name", "a,b, a"], b"served_name is 'a,b, a', expected each name once"),
    "api_key": (["--api-key", "secret", "--api-key", "secret"], b"one api_key is given twice"),
}


@pytest.mark.parametrize("flags, message", TWICE.values(), ids=TWICE)
def test_a_name_given_twice_is_refused(flags, message):
    done = birkhoff("serve", "--port", "0", *flags)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert b"secret" not in done.stderr


def test_steering_modules_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(shipped_vectors("nano")["spooky"], tmp_path / folder / "tilt.safetensors")
    paths = [str(tmp_path / folder / "tilt.safetensors") for folder in ("a", "b")]
    done = birkhoff(
        "serve", "--port", "0", *(part for path in paths for part in ("--steering-modules", path))
    )
    assert done.returncode == 2 and b"another one is called 'tilt' already" in done.stderr, done.stderr


@pytest.mark.parametrize("option", ["--sae", "--sae-full", "--steering-modules"])
def test_e5_an_sae_without_files_is_told_before_the_model_is_read(tmp_path, option):
    (tmp_path / "empty").mkdir()
    model = ("--model", str(cut_short(tmp_path)))
    for name in ("empty",) if option == "--steering-modules" else ("empty", "nowhere"):
        done = birkhoff("serve", "--port", "0", *model, option, f"x={tmp_path / name}")
        assert done.returncode == 1 and done.stderr.startswith(b"sae-file  "), done.stderr
        assert name.encode() in done.stderr and no_trace_of_python(done.stderr)


@pytest.mark.parametrize("broken", [cut_short, missing])
def test_e5_an_incomplete_checkpoint(tmp_path, broken):
    done = birkhoff("serve", "--port", "0", "--model", str(broken(tmp_path)))
    assert done.returncode == 1 and no_trace_of_python(done.stderr) and b"safetensors" in done.stderr


def test_e5_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = birkhoff("serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2 and b"in use" in done.stderr


def wait_until_draining(running) -> None:
    """Wait until the server drains: /ready fails or the port is closed."""
    until = time.monotonic() + 300
    with contextlib.suppress(httpx2.TransportError):
        while httpx2.get(f"{running.url}/ready", timeout=300).status_code == 200:
            assert time.monotonic() < until, "the server did not react to the signal"


def test_e4_on_a_signal_it_drains_requests_and_seals_captures(tmp_path):
    with serving(tmp_path) as running:
        capture = {
            "filesystem": {
                "request_id": "last",
                "tag": "drain",
                "hooks": {"mhc_ffn_res_mix": "all"},
                "positions": "all",
            }
        }
        body = {
            "messages": user("Tell me a story."),
            "max_tokens": 40,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "capture": capture,
        }
        ids, refused = [], 0
        with running.http as client, client.stream("POST", CHAT, json=body) as answer:
            for index, line in enumerate(answer.iter_lines()):
                if index == 4:
                    running.process.send_signal(signal.SIGTERM)
                    wait_until_draining(running)
                    try:
                        refused = httpx2.post(running.url + CHAT, json=body, timeout=300).status_code
                    except httpx2.TransportError:
                        refused = 503  # the port is closed already
                if line.startswith("data: {"):
                    ids += [
                        i for choice in json.loads(line[6:])["choices"] for i in choice.get("token_ids", ())
                    ]
        assert running.process.wait(300) == 0 and len(ids) == 40 and refused == 503
        rows = read_request(running.root / "drain" / "last")
        assert all(len(entry) > 40 for entry in rows.values())


def test_e4_a_second_signal_does_not_wait(tmp_path):
    with serving(tmp_path, "--drain-seconds", "600") as running:
        body = {"messages": user("Tell me a story."), "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with running.http as client, client.stream("POST", CHAT, json=body) as answer:
            next(answer.iter_lines())
            running.process.send_signal(signal.SIGINT)
            wait_until_draining(running)
            assert running.process.poll() is None  # it waits for the request
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(300) == 1


def test_requests_that_outlast_the_drain_end_with_an_error(tmp_path):
    """A stream gets an error event, a whole answer status 503, and the log has no traceback."""
    body = {"messages": user("Tell me a story."), "max_tokens": 3500, "ignore_eos": True}
    with serving(tmp_path, "--drain-seconds", "0.2", "--max-requests", "1") as running:
        lines: list[str] = []
        with concurrent.futures.ThreadPoolExecutor() as threads, running.http as client:
            with client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
                stream = answer.iter_lines()
                lines.append(next(stream))
                waiting = threads.submit(running.post, CHAT, body)
                while len(running.get("/slots").json()["requests"]) < 2:
                    time.sleep(0.02)
                running.process.send_signal(signal.SIGTERM)
                lines += stream
            whole = waiting.result()
        assert running.process.wait(300) == 0
        assert lines[-2:] == ["data: [DONE]", ""]
        error = json.loads(lines[-4].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("overloaded_error", "draining")
        assert whole.status_code == 503 and whole.json()["error"]["code"] == "draining"
        assert "Traceback" not in running.log.read_text()
        log = [json.loads(line) for line in running.log.read_text().splitlines() if line.startswith("{")]
        noted = {line["status"]: line["note"] for line in log if line["path"] == CHAT}
        assert noted == {200: "draining", 503: ""}


def test_it_is_not_ready_while_loading_and_prints_one_url(tmp_path):
    port = free_port()
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", str(port), "--log", "off"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    try:
        statuses = set()
        while 200 not in statuses:
            assert process.poll() is None, "it ended"
            try:
                answer = httpx2.get(f"http://127.0.0.1:{port}/health", timeout=300)
                statuses.add(answer.status_code)
                assert answer.status_code == 200 or answer.json()["error"]["code"] == "loading"
            except httpx2.TransportError:
                time.sleep(0.05)
        assert statuses <= {200, 503} and 200 in statuses
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
        assert out == f"http://127.0.0.1:{port}\n" and process.returncode == 0 and "Traceback" not in err
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_a_conversion_of_nano_answers_as_nano_does(tmp_path):
    """Without reasoning by default: the model is the same under another name."""
    convert("nano", tmp_path / "story.gguf", experts="mxfp4", dense="bf16")
    with serving(tmp_path / "served", model=str(tmp_path / "story.gguf")) as running:
        answer = running.chat("Tell me a story about a fox.", max_tokens=12)
        assert running.get("/props").json()["thinks"] is False
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
