"""Rows that come with a response can be decoded by the client, in every dtype they may be asked for."""

from __future__ import annotations

import base64

import pytest
import torch

from tests.server.conftest import user

ASK = {"messages": user("Tell me a story about a fox."), "max_tokens": 2, "temperature": 0}
READ_AS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def inline_rows(served, **more):
    capture = {"memory": {"hooks": {"mlp_out": [3]}, "positions": "all_prompt", **more}}
    answer = served.post("/v1/chat/completions", {**ASK, "capture": capture})
    assert answer.status_code == 200, answer.text
    (rows,) = answer.json()["capture_results"]["memory"]["tensors"]
    return rows


@pytest.mark.parametrize(
    ("dtype", "error"), [("fp32", 0), ("fp16", 1e-3), ("bf16", 1e-2), ("fp8_e4m3", 0.08)]
)
def test_rows_of_every_dtype_are_decoded(served, dtype, error):
    plain, cast = inline_rows(served), inline_rows(served, dtype=dtype)
    expected = torch.frombuffer(bytearray(base64.b64decode(plain["data"])), dtype=torch.float32)
    values = torch.frombuffer(bytearray(base64.b64decode(cast["data"])), dtype=READ_AS[dtype]).float()
    expected, values = expected.reshape(plain["shape"]), values.reshape(cast["shape"])
    assert ("scale" in cast) is (dtype == "fp8_e4m3")
    if "scale" in cast:
        assert len(cast["scale"]) == len(cast["positions"])
        values *= torch.tensor(cast["scale"])[:, None]
    assert (values - expected).norm() <= error * expected.norm()
