"""Faults of disks, clocks and clients on a running server with captures and steering on.

After every fault the server answers, and nothing it acknowledged is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from birkhoff.capture.store.reader import read_request
from tests.capture.test_faults import small_disk  # noqa: F401 (a fixture)
from tests.kills import PROMPTS, capture_body
from tests.server.conftest import serving

CHAT = "/v1/chat/completions"


def captured(served, name: str) -> tuple[int, str]:
    """Status of the answer, and of its capture."""
    answer = served.post(CHAT, capture_body(PROMPTS[0], name))
    results = answer.json().get("capture_results", {"filesystem": {"status": "none"}})
    return answer.status_code, results["filesystem"]["status"]


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("steady")) as running:
        yield running


def test_a_capture_beside_a_refused_one_leaves_no_file_and_no_locked_id(steady):
    """Several choices capture to files, and one of them is refused: nothing is planned, opened or claimed."""
    first = capture_body(PROMPTS[0], "shared")
    refusals = [
        {**first, "max_tokens": 10**6},
        {**first, "capture": {**first["capture"], "memory": {"hooks": {"none": [1]}}}},
        {**first, "capture": {**first["capture"], "nowhere": {"hooks": {"mlp_out": [1]}}}},
        {
            **first,
            "interventions": [{"op": "add", "at": {"hook": "mlp_out", "layers": [1]}, "vector": [1.0]}],
        },
        {**first, "n": 2, "logit_bias": {"999999": 1.0}},
    ]
    for body in refusals:
        assert steady.post(CHAT, body).status_code == 400
        assert not list(steady.root.rglob("*shared*")), "a refused capture left files"
    answer = steady.post(CHAT, first)
    assert answer.status_code == 200, answer.text
    assert answer.json()["capture_results"]["filesystem"]["status"] == "ok"
    stored = {path: path.read_bytes() for path in (steady.root / "k" / "shared").iterdir()}
    assert stored and captured(steady, "shared")[1] != "ok", "now the id is taken"
    assert {path: path.read_bytes() for path in stored} == stored and steady.idle()


def test_two_calls_with_one_id_at_the_same_time(steady):
    """One of them writes the files; the other is refused and does not touch them."""
    answers = []

    def ask() -> None:
        answers.append(captured(steady, "twice")[1])

    callers = [threading.Thread(target=ask) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert answers.count("ok") == 1, answers
    assert read_request(steady.root / "k" / "twice") and steady.idle()


def test_clients_that_leave_during_a_capture(steady):
    """The slot is free again, and what was captured is marked as cancelled or not there."""
    for number in range(10):
        body = {**capture_body(PROMPTS[2], f"left-{number}"), "max_tokens": 3000, "ignore_eos": True}
        raw = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", steady.port)) as connection:
            connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
            time.sleep(0.02 * number)
    assert steady.idle()
    for folder in (steady.root / "k").glob("left-*"):
        if any(folder.glob("*.json")):
            reasons = {entry.meta["finish_reason"] for entry in read_request(folder).values()}
            assert reasons <= {"cancelled"}  # none, if the client left before the first row
    assert captured(steady, "after-they-left") == (200, "ok")


def test_a_second_server_on_one_capture_root_is_refused(steady, tmp_path):
    with pytest.raises(AssertionError) as refused, serving(tmp_path, "--capture-root", str(steady.root)):
        pass
    assert "in use" in str(refused.value) or "lock" in str(refused.value).lower()
    assert captured(steady, "still-mine") == (200, "ok")


def test_a_disk_that_is_full_or_read_only_fails_captures_and_not_answers(small_disk, tmp_path):  # noqa: F811
    with serving(tmp_path, "--capture-root", str(small_disk / "captures")) as served:
        assert captured(served, "before") == (200, "ok")
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 12)):
                pass
        statuses = [captured(served, f"full-{number}") for number in range(3)]
        assert all(status in (200, 507) for status, _ in statuses), statuses
        assert all(capture != "ok" for _, capture in statuses), statuses
        assert served.chat()["choices"]
        filler.unlink()
        assert _recovers(served), "captures do not recover when there is space again"
        if subprocess.run(["mount", "-o", "remount,ro", small_disk], capture_output=True).returncode == 0:
            try:
                status, capture = captured(served, "read-only")
                assert status in (200, 507) and capture != "ok"
                assert served.chat()["choices"]
            finally:
                subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
            assert _recovers(served)
        assert read_request(small_disk / "captures/k/before")


@pytest.mark.parametrize("full", [True, False])
def test_pages_that_the_disk_does_not_take_are_told_once(full, tmp_path, request):
    if full:
        root = request.getfixturevalue("small_disk")
    else:
        (tmp_path / "file").touch()
        root = tmp_path / "file" / "pages"
    with serving(tmp_path / "served", "--context-root", str(root)) as served:
        for index in range(6):
            text = f"{index} " + "There was a fox who lived in a wood. " * 60
            assert served.chat(text)["choices"]
    lines = [line for line in served.log.read_text().splitlines() if "cache pages" in line]
    assert len(lines) == 1 and f"written to {root} (" in lines[0] and "context_root" in lines[0], lines
    assert not full or "No space left" in lines[0]


def _recovers(served) -> bool:
    """Whether a capture succeeds again within some minutes."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if captured(served, f"again-{time.monotonic_ns()}") == (200, "ok"):
            return True
        time.sleep(0.5)
    return False


CLOCK = """
import sys, time
real = time.time
start = real()
jump = lambda: real() - 86400 * 400 * (int((real() - start) / 0.2) % 2)
time.time = jump
sys.argv = ["birkhoff", *sys.argv[1:]]
import runpy
runpy.run_module("birkhoff", run_name="__main__")
"""


def test_a_clock_that_jumps_by_a_year(tmp_path):
    """Five times a second the wall clock goes back or forward by 400 days. Nothing is timed by it."""
    site = tmp_path / "jump.py"
    site.write_text(CLOCK)
    with serving(tmp_path, command=(sys.executable, str(site))) as served:
        for number in range(8):
            assert captured(served, f"jump-{number}") == (200, "ok")
            time.sleep(0.07)
        events = served.events(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8})
        assert events[-1]["choices"][0]["finish_reason"]
        names = {path.name for path in (served.root / "k").iterdir()}
        assert {f"jump-{number}" for number in range(8)} <= names


def test_files_are_private_under_the_users_umask_and_secrets_are_never_logged(tmp_path):
    """Files get the permissions of the umask. Keys, prompts and bodies appear in no log, metric or error."""
    key, steering, text = "sk-" + "k" * 40, "st-" + "s" * 40, "a very private sentence"
    old = os.umask(0o077)
    try:
        with serving(tmp_path, "--api-key", key, "--steering-api-key", steering) as served:
            right = {"authorization": f"Bearer {key}"}
            body = {**capture_body(text, "private"), "max_tokens": 2}
            answer = served.post(CHAT, body, **right)
            assert answer.json()["capture_results"]["filesystem"]["status"] == "ok"
            shown = served.post(CHAT, body, authorization=f"Bearer {key[:-1]}x").text
            shown += served.post(CHAT, {**body, "temperature": text}, **right).text
            shown += served.post("/v1/steering/set", {}, **{**right, "x-steering-key": steering + "x"}).text
            shown += served.get(f"/nowhere?key={key}", **right).text + served.get("/metrics", **right).text
    finally:
        os.umask(old)
    shown += served.log.read_text()
    for secret in (key, key[:-1], steering, text):
        assert secret not in shown
    paths = list(served.root.rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
