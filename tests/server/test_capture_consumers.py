"""Capture consumers of a running server: built from flags, fed by every request or by name; refused calls."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from birkhoff.capture.store.reader import read_request, read_sharded
from tests.cli.conftest import COMMAND, clean_environment
from tests.server.conftest import serving, user

CHAT = "/v1/chat/completions"


def test_consumers_of_flags_receive_rows_and_files_can_be_fetched(tmp_path):
    stats, files = tmp_path / "stats.npz", tmp_path / "other"
    flags = (
        f"sae_stats:hook=mlp_out,layer=1,out={stats}",
        f"shards=filesystem:root={files},default_layout=sharded",
    )
    repeated = [part for flag in flags for part in ("--capture-consumers", flag)]
    with serving(tmp_path / "server", *repeated) as served:
        first = served.chat("One.", ignore_eos=True)
        capture = {"shards": {"request_id": "a", "tag": "t", "hooks": {"mlp_out": [1]}, "positions": "all"}}
        second = served.chat("Two.", ignore_eos=True, capture=capture, capture_wait=True)
        result = second["capture_results"]["shards"]
        assert "capture_results" not in first and set(second["capture_results"]) == {"shards"}
        assert result["status"] == "ok" and result["durable"]
        named = served.post(
            CHAT, {"messages": user("x"), "capture": {"sae_stats": {"hooks": {"mlp_out": [0]}}}}
        )
        assert named.status_code == 400 and "no consumer has this name" in named.json()["error"]["message"]
        delivered = served.metric('birkhoff_capture_rows{consumer="shards",state="delivered"}')
        assert served.metric('birkhoff_capture_rows{consumer="shards",state="dropped"}') == 0
    usage = [answer["usage"] for answer in (first, second)]
    computed = sum(each["prompt_tokens"] + each["completion_tokens"] - 1 for each in usage)
    assert int(np.load(stats)["rows"]) == computed  # every request, with and without a capture
    (rows,) = read_sharded(files / "t")["a"].values()
    assert len(rows) == usage[1]["prompt_tokens"] + usage[1]["completion_tokens"] - 1 == delivered


@pytest.mark.parametrize("flag", ["tape", "filesystem", "logging:level=loud"])
def test_a_consumer_that_cannot_be_built_ends_the_server(tmp_path, flag):
    done = subprocess.run(
        [*COMMAND, "serve", "--port", "0", "--capture-consumers", flag],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode != 0 and ("capture consumer" in done.stderr or "level" in done.stderr)


def test_a_call_that_is_refused_leaves_no_file_and_no_taken_id(served):
    capture = {"filesystem": {"request_id": "refused", "tag": "http", "hooks": {"mlp_out": [1]}}}
    body = {"messages": user("Hello."), "temperature": 0, "n": 2, "capture": capture}
    answer = served.post(CHAT, {**body, "max_tokens": 10**6})
    assert answer.status_code == 400, answer.text
    assert not list((served.root / "http").glob("refused*"))
    found = served.post(CHAT, {**body, "max_tokens": 2, "capture_wait": True}).json()["capture_results"]
    assert found["filesystem"]["status"] == "ok"
    assert len(read_request(served.root / "http" / "refused-0")) == 1
