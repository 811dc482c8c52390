"""`/steer` in a conversation: it steers the next answers, shows the current line, and rejects invalid ones."""

import json

import pytest
import torch

import birkhoff as package
from birkhoff import Add
from birkhoff.steering.vector_file import SteeringVector
from tests.cli.conftest import birkhoff, no_trace_of_python

SAMPLING = {"max_tokens": 8, "temperature": 0}
FLAGS = ("--max-tokens", "8", "--temperature", "0", "--json")


@pytest.fixture(scope="module")
def vector(tmp_path_factory):
    row = torch.randn(64, generator=torch.Generator().manual_seed(2)) * 8
    steering = SteeringVector({2: row}, "add", "mlp_out")
    path = tmp_path_factory.mktemp("vectors") / "push.safetensors"
    steering.save(path)
    return path


def test_steering_applies_until_it_is_removed(tiny, vector):
    lines = [
        "hi",
        "/steer",
        f"/steer +3.0 {vector} @ mlp_out[2]",
        "/reset",
        "hi",
        "/steer +1 nobody @ mlp_out[2]",
        "/steer",
        "/steer off",
        "/reset",
        "hi",
        "",
    ]
    done = birkhoff("chat", "--model", tiny, *FLAGS, stdin="\n".join(lines).encode())
    lines = done.stdout.decode().splitlines()
    answers = [json.loads(line)["token_ids"] for line in lines if line.startswith("{")]
    shown = [line for line in lines if line.startswith("steering:")]
    with package.load(tiny, max_requests=1) as engine:
        message = [{"role": "user", "content": "hi"}]
        plain = engine.chat(message, **SAMPLING).token_ids
        pushed = engine.chat(
            message, steer=[Add(SteeringVector.load(vector), "mlp_out", [2], 3.0)], **SAMPLING
        ).token_ids
    assert answers == [plain, pushed, plain] and plain != pushed
    assert (
        shown[0] == "steering: none"
        and "mlp_out[2]" in shown[1]
        and shown[2] == shown[1]
        and shown[3] == "steering: none"
    )
    assert done.returncode == 1 and b"nobody" in done.stderr and no_trace_of_python(done.stderr)


def test_an_invalid_steering_line_is_refused(tiny):
    done = birkhoff("chat", "--model", tiny, stdin=b"/steer +2 x @\n/steer nonsense\n")
    assert (
        done.returncode == 1
        and len(done.stderr.decode().splitlines()) >= 2
        and no_trace_of_python(done.stderr)
    )
