"""`birkhoff serve --backend vllm`: a real server, the OpenAI client, and refusals before a worker sees anything."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from birkhoff.capture.store.reader import read_request
from tests.certificate import make_certificate
from tests.hf.reference import Reference
from tests.hf.test_loading import TEMPLATE, byte_level, own
from tests.vllm.batch import reference_text, worst_error
from tests.vllm.conftest import HAS_VLLM
from tests.vllm.models import CONTEXT, LAYERS, D, make_model

pytestmark = pytest.mark.vllm
if HAS_VLLM:
    import httpx
    import openai
    import transformers
VECTOR = torch.randn(D, generator=torch.Generator().manual_seed(4))
KEY = "key-of-clients"
DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


class Served:
    """A server over HTTPS; where this machine has IPv6, on its loopback address of that."""

    def __init__(self, folder, *flags):
        self.host = "::1" if has_ipv6() else "127.0.0.1"
        cert, key = make_certificate(folder, self.host)
        self.tls = ssl.create_default_context(cafile=str(cert))
        self.log = folder / "log"
        self.root = folder / "captures"
        command = [
            sys.executable,
            "-m",
            "birkhoff",
            "serve",
            str(folder / "model"),
            "--backend",
            "vllm",
            "--port",
            "0",
            "--host",
            self.host,
        ]
        command += ["--ssl-certfile", str(cert), "--ssl-keyfile", str(key)]
        command += ["--dtype", "float32", "--max-context", str(CONTEXT), "--max-requests", "4"]
        command += [
            "--max-batch-tokens",
            "64",
            "--cache-bytes",
            str(64 << 20),
            "--capture-root",
            str(self.root),
        ]
        command += ["--vllm", '{"enforce_eager": true}', "--api-key", KEY, "--served-name", "small", *flags]
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ}, cwd=folder
            )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        name = f"[{self.host}]" if ":" in self.host else self.host
        assert self.url.startswith(f"https://{name}:"), self.log.read_text()[-4000:]

    def call(self, path, body=None, **headers):
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}", **headers}
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, headers), timeout=120, context=self.tls
            ) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    tokenizer = own(byte_level(), TEMPLATE)
    make_model("llama", folder / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def served(folder):
    server = Served(folder)
    yield server
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(120)


@pytest.fixture(scope="module")
def theirs(folder):
    network = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    return transformers.AutoTokenizer.from_pretrained(folder / "model"), Reference(network.eval())


@pytest.fixture(scope="module")
def client(served):
    with httpx.Client(verify=served.tls, timeout=120) as http:
        yield openai.OpenAI(base_url=served.url + "/v1", api_key=KEY, timeout=120, http_client=http)


def steered(hook, layer, x):
    return x + 3 * VECTOR if (hook, layer) == ("pre_attn", 1) else None


EDIT = [{"op": "add", "at": {"hook": "pre_attn", "layers": [1]}, "vector": "@calm", "scale": 3.0}]
TEXT = "once upon a time there was a model"
GREEDY = {"model": "small", "temperature": 0, "max_tokens": 8}
EXTRA = {"ignore_eos": True, "return_token_ids": True}


def test_steered_and_captured_answers_equal_transformers(served, client, theirs):
    tokenizer, reference = theirs
    status, made = served.call("/v1/steering/modules/register", {"name": "calm", "vector": VECTOR.tolist()})
    assert status == 200 and made["modules"] == ["calm"], made
    ids = tokenizer(TEXT).input_ids
    plain_tokens, seen = reference_text(reference, ids, 8, None, None)
    steered_tokens, _ = reference_text(reference, ids, 8, steered, None)
    assert plain_tokens != steered_tokens

    def tokens(answer):
        return answer.choices[0].model_extra["token_ids"]

    first = client.completions.create(prompt=TEXT, **GREEDY, extra_body={**EXTRA, "interventions": EDIT})
    plain = client.completions.create(prompt=TEXT, **GREEDY, extra_body=EXTRA)
    assert tokens(first) == steered_tokens and tokens(plain) == plain_tokens
    assert first.model_extra["interp"]["rows_steered"] == len(ids) + 7
    files = {"hooks": {"post_mlp": [3]}, "positions": "all", "request_id": "web", "tag": "t"}
    inline = {"hooks": {"post_attn": [2]}, "positions": "last_prompt"}
    captured = client.completions.create(
        prompt=ids, **GREEDY, extra_body={**EXTRA, "capture": {"filesystem": files, "memory": inline}}
    )
    assert tokens(captured) == plain_tokens
    results = captured.model_extra["capture_results"]
    assert results["filesystem"]["status"] == "ok" and results["filesystem"]["rows"] == len(ids) + 7
    entry = read_request(served.root / "t" / "web")["post_mlp", 3]
    assert worst_error(torch.from_numpy(entry.values()), seen["post_mlp", 3]) < 1e-4
    (tensor,) = results["memory"]["tensors"]
    row = torch.frombuffer(bytearray(base64.b64decode(tensor["data"])), dtype=torch.float32)
    assert worst_error(row, seen["post_attn", 2][len(ids) - 1]) < 1e-4
    status, listed = served.call("/v1/interp/captures/t/web")
    assert status == 200 and listed["entries"][0]["rows"] == len(ids) + 7


def test_a_stream_ends_with_what_became_of_it(client, theirs):
    tokenizer, reference = theirs
    messages = [{"role": "user", "content": TEXT}]
    chunks = list(
        client.chat.completions.create(
            messages=messages, **GREEDY, stream=True, extra_body={"ignore_eos": True, "interventions": EDIT}
        )
    )
    last = chunks[-1]
    assert not last.choices and last.model_extra["interp"]["rows_steered"] > 8
    assert all(chunk.usage is None for chunk in chunks[:-1]), "usage was not asked for"
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    tokens, _ = reference_text(reference, ids, 8, steered, None)
    answer = client.chat.completions.create(
        messages=messages, **GREEDY, extra_body={**EXTRA, "interventions": EDIT}
    )
    assert answer.choices[0].model_extra["token_ids"] == tokens
    assert (
        answer.model_extra["interp"]["rows_steered"]
        == len(ids) + 7
        == last.model_extra["interp"]["rows_steered"]
    )


def test_a_stop_string_ends_the_rows(client):
    plain = client.completions.create(prompt=TEXT, **GREEDY, extra_body={"ignore_eos": True})
    stop = plain.choices[0].text[3:5]
    files = {"hooks": {"post_mlp": [1]}, "positions": "all", "request_id": "stopped", "tag": "t"}
    body = {"ignore_eos": True, "capture": {"filesystem": files}}
    answer = client.completions.create(prompt=TEXT, stop=[stop], **GREEDY, extra_body=body)
    rows = answer.model_extra["capture_results"]["filesystem"]["rows"]
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens < 8
    assert rows == answer.usage.prompt_tokens + answer.usage.completion_tokens - 1


def test_refused_requests_reach_no_worker(served):
    _, before = served.call("/v1/interp/counts")
    base = {**GREEDY, "prompt": TEXT}
    marked = json.dumps({**base, "vllm_xargs": {"birkhoff": "{}"}})
    hidden = marked.replace("birkhoff", "\\u0062irkhoff").encode()
    for body, code, says in (
        ({**base, "vllm_xargs": {"birkhoff": "{}"}}, 400, "set by the server"),
        (hidden, 400, "set by the server"),
        ({**base, "interventions": EDIT, "n": 2}, 400, "n is 2"),
        ({**base, "interventions": [{**EDIT[0], "vector": "@clam"}]}, 400, "calm"),
        ({**base, "interventions": [{**EDIT[0], "at": {"hook": "mlp_out", "layers": [1]}}]}, 400, "mlp_out"),
        (
            {**base, "interventions": [{**EDIT[0], "at": {"hook": "pre_attn", "layers": [LAYERS]}}]},
            400,
            "layer",
        ),
        ({**base, "capture": {"memory": {"hooks": {"post_mpl": [3]}}}}, 400, "post_mpl"),
        ({**base, "capture": {"memory": {"hooks": {"post_mlp": [3]}, "positions": [999]}}}, 400, "999"),
        ({**base, "prompt": ["a", "b"], "interventions": EDIT}, 400, "prompt is"),
    ):
        status, answer = served.call("/v1/completions", body)
        assert status == code and says in json.dumps(answer), (body, answer)
    for headers in ({"authorization": "Bearer wrong"}, {"authorization": ""}):
        status, _ = served.call("/v1/completions", {**base, "interventions": EDIT}, **headers)
        assert status == 401
    _, after = served.call("/v1/interp/counts")
    assert [rank["steps"] for rank in after["ranks"]] == [rank["steps"] for rank in before["ranks"]]
    assert all(rank["requests"] == 0 for rank in after["ranks"])
    assert served.call("/v1/completions", base)[0] == 200


def test_routes_of_modules_dictionaries_and_captures(served, tmp_path):
    from tests.sae.reference import random_sae

    status, schema = served.call("/v1/interp/schema")
    assert status == 200 and schema["hooks"]["post_mlp"]["layers"] == list(range(LAYERS))
    random_sae("jumprelu", 48, D, seed=4, hook="post_mlp", layer=1, view="single").save(tmp_path / "sae")
    body = {"name": "features", "kind": "sae_delta", "path": str(tmp_path / "sae")}
    assert served.call("/v1/steering/modules/register", body)[0] == 200
    assert len(served.call("/v1/saes")[1]["saes"]) == 1
    edit = [{"op": "sae", "module": "features", "set": {"5": 9.0}}]
    status, answer = served.call("/v1/completions", {**GREEDY, "prompt": TEXT, "interventions": edit})
    assert status == 200 and answer["interp"]["rows_steered"] > 8
    assert served.call("/v1/steering/modules/unregister", {"name": "features"})[0] == 200
    assert served.call("/v1/steering/modules/unregister", {"name": "features"})[0] == 404
    assert served.call("/v1/interp/captures/t/none")[0] == 404
    assert served.call("/v1/interp/captures/..%2F/x")[0] == 404


def test_the_command_of_the_documentation(folder, theirs, tmp_path):
    """`vllm serve` by hand, as docs/vllm.md gives it, with a real checkpoint, root and port."""
    fences = re.findall(r"```sh\n(VLLM_PLUGINS=.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (line,) = fences
    root = tmp_path / "captures"
    for written, real in (("org/name", str(folder / "model")), ("/data/captures", str(root))):
        assert written in line
        line = line.replace(written, real)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    small = f"--port {port} --dtype float32 --max-model-len {CONTEXT} --max-num-seqs 2 --enforce-eager"
    small += f" --kv-cache-memory-bytes {64 << 20} --served-model-name small"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {line.rstrip()} {small}"],
            stdout=output,
            stderr=output,
            env={**os.environ, "PATH": path},
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(process, url, log)
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", timeout=300)
        tokenizer, reference = theirs
        ids = tokenizer(TEXT).input_ids
        edit = [{"op": "add", "at": {"hook": "post_mlp", "layers": [1]}, "vector": VECTOR.tolist()}]
        files = {"hooks": {"post_mlp": [2]}, "positions": "all", "request_id": "line", "tag": "t"}
        answer = client.completions.create(
            prompt=TEXT,
            **GREEDY,
            extra_body={**EXTRA, "interventions": edit, "capture": {"filesystem": files}},
        )
        tokens, seen = reference_text(
            reference,
            ids,
            8,
            lambda hook, layer, x: x + VECTOR if (hook, layer) == ("post_mlp", 1) else None,
            None,
        )
        assert answer.choices[0].model_extra["token_ids"] == tokens
        assert answer.model_extra["interp"]["rows_steered"] == len(ids) + 7
        entry = read_request(root / "t" / "line")["post_mlp", 2]
        assert worst_error(torch.from_numpy(entry.values()), seen["post_mlp", 2]) < 1e-4
        body = json.dumps({"name": "calm", "vector": VECTOR.tolist()}).encode()
        with pytest.raises(urllib.error.HTTPError) as refused:  # it listens on all addresses, without a key
            urllib.request.urlopen(f"{url}/v1/steering/modules/register", body, timeout=300)
        assert refused.value.code == 401 and b"no steering key" in refused.value.read()
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(300)


def wait_until_healthy(process, url, log):
    deadline = time.monotonic() + 900
    while True:
        try:
            with urllib.request.urlopen(url + "/health", timeout=60) as reply:
                assert reply.status == 200
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)


def test_a_client_that_leaves_ends_its_request(served):
    body = {
        **GREEDY,
        "prompt": TEXT,
        "max_tokens": 150,
        "ignore_eos": True,
        "stream": True,
        "interventions": EDIT,
    }
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(served.url + "/v1/completions", json.dumps(body).encode(), headers)
    reply = urllib.request.urlopen(request, timeout=120, context=served.tls)
    reply.read(64)
    reply.close()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        served.call(
            "/v1/completions", {**GREEDY, "prompt": TEXT, "max_tokens": 1}
        )  # the next step says what has ended
        if all(rank["requests"] == 0 for rank in served.call("/v1/interp/counts")[1]["ranks"]):
            return
    pytest.fail("the request of a client that left is still there")
