"""Capture consumers of a running server: built from flags, fed by every request or by name; refused calls."""

from __future__ import annotations

import base64
import os
import subprocess

import numpy as np
import pytest

from birkhoff.capture.store.reader import read_request, read_sharded
from tests.cli.conftest import COMMAND, ROOT, clean_environment
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
        flat = served.post(CHAT, {"messages": user("x"), "capture": {"hooks": {"mlp_out": [0]}}}).json()[
            "error"
        ]
        assert '{"memory": {"hooks": {hook: layers}}}' in flat["message"] and flat["param"] == "capture.hooks"
        delivered = served.metric('birkhoff_capture_rows{consumer="shards",state="delivered"}')
        assert served.metric('birkhoff_capture_rows{consumer="shards",state="dropped"}') == 0
    usage = [answer["usage"] for answer in (first, second)]
    computed = sum(each["prompt_tokens"] + each["completion_tokens"] - 1 for each in usage)
    assert int(np.load(stats)["rows"]) == computed  # every request, with and without a capture
    (rows,) = read_sharded(files / "t")["a"].values()
    assert len(rows) == usage[1]["prompt_tokens"] + usage[1]["completion_tokens"] - 1 == delivered


PLUGIN = '''
from dataclasses import replace
from birkhoff.capture.sinks.consumer import CountingConsumer
from birkhoff.errors import CaptureValidationError

class Tally(CountingConsumer):
    """Sums every value of a request, times the request's own `weight`."""

    client_parameters = ("weight",)

    def __init__(self, offset=0.0):
        super().__init__()
        self.offset, self.sums, self.weights = offset, {}, {}

    def validate_client_spec(self, spec, path):
        if not isinstance(spec.get("weight", 1.0), (int, float)):
            raise CaptureValidationError("is not a number.", f"{path}.weight")

    def begin(self, request):
        super().begin(request)
        self.sums[request.key], self.weights[request.key] = self.offset, request.parameters.get("weight", 1.0)

    def submit_chunk(self, chunk):
        super().submit_chunk(chunk)
        self.sums[chunk.request_id] += float(chunk.array().sum(dtype="float64")) * self.weights[chunk.request_id]

    def _result(self, finish, counts):
        return replace(super()._result(finish, counts), payload={"sum": self.sums[finish.key]})

class Watch(CountingConsumer):
    """Counts the rows of every request, whether or not it names a consumer."""

    reads_client_spec = False

    def __init__(self, out):
        super().__init__()
        self.out = out

    def global_capture_spec(self):
        return {"hooks": {"mlp_out": [0]}, "positions": "last_prompt"}

    def _result(self, finish, counts):
        with open(self.out, "a") as file:
            file.write(f"{counts.rows}\\n")
        return super()._result(finish, counts)
'''


def test_any_registered_consumer_by_name_with_its_own_parameters(tmp_path):
    """Consumers of another package, found by their entry points: one that requests name, one that sees them all."""
    package = tmp_path / "site"
    info = package / "tally-1.0.dist-info"
    info.mkdir(parents=True)
    (package / "tally_plugin.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tally\nVersion: 1.0\n")
    entries = "[birkhoff.capture_consumers]\ntally = tally_plugin:Tally\nwatch = tally_plugin:Watch\n"
    (info / "entry_points.txt").write_text(entries)
    seen = tmp_path / "seen"
    consumers = (f"watch:out={seen}", "sums=tally:offset=1.5", "logging:hooks=mlp_in")
    flags = [part for text in consumers for part in ("--capture-consumers", text)]
    path = os.pathsep.join([str(package), str(ROOT)])
    with serving(tmp_path / "run", *flags, PYTHONPATH=path) as served:
        memory = {"hooks": {"mlp_out": [1]}, "positions": "last_prompt"}
        capture = {"sums": {**memory, "weight": 2.0}, "memory": memory}
        results = served.chat("One.", capture=capture, capture_wait=True)["capture_results"]
        (tensor,) = results["memory"]["tensors"]
        row = np.frombuffer(base64.b64decode(tensor["data"]), np.float32)
        assert results["sums"]["status"] == "ok" and results["sums"]["rows"] == 1
        assert results["sums"]["payload"]["sum"] == pytest.approx(
            1.5 + 2 * row.sum(dtype=np.float64), rel=1e-5
        )
        served.chat("Two.")
        for own, message in (({"weight": "x"}, "not a number"), ({"heavy": 1}, "unknown field 'heavy'")):
            bad = served.post(CHAT, {"messages": user("x"), "capture": {"sums": {**memory, **own}}})
            assert bad.status_code == 400 and message in bad.json()["error"]["message"]
        nameless = served.post(CHAT, {"messages": user("x"), "capture": {"watch": memory}})
        assert nameless.status_code == 400 and "sums" in nameless.json()["error"]["message"]
    assert seen.read_text() == "1\n1\n"


@pytest.mark.parametrize("flag", ["tape", "filesystem", "logging:level=loud"])
def test_a_consumer_that_cannot_be_built_ends_the_server(tmp_path, flag):
    done = subprocess.run(
        [*COMMAND, "serve", "--port", "0", "--capture-consumers", flag],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode != 0 and ("capture consumer" in done.stderr or "level" in done.stderr)


def test_a_call_that_is_refused_leaves_no_file_and_no_taken_id(served):
    capture = {"filesystem": {"request_id": "refused", "tag": "http", "hooks": {"mlp_out": [1]}}}
    body = {"messages": user("Hello."), "temperature": 0, "n": 2, "capture": capture}
    answer = served.post(CHAT, {**body, "max_tokens": 10**6})
    assert answer.status_code == 400, answer.text
    assert not list((served.root / "http").glob("refused*"))
    result = served.post(CHAT, {**body, "max_tokens": 2, "capture_wait": True}).json()["capture_results"]
    assert result["filesystem"]["status"] == "ok"
    assert len(read_request(served.root / "http" / "refused-0")) == 1
