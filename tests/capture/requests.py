"""Shared by the tests of capture requests: a tiny model, a prompt, a server's context, and a check of refusals."""

from __future__ import annotations

import pytest

from birkhoff.capture.spec.request import resolve_capture_request
from birkhoff.capture.spec.validation import CaptureContext, ConsumerRules
from birkhoff.errors import CaptureValidationError, RequestError
from birkhoff.hooks.schema import build_hook_schema, schema_of
from tests.models import TINY

V4, L, M, D = schema_of(TINY, "bfloat16"), TINY.num_hidden_layers, TINY.hc_mult, TINY.hidden_size
PLAIN = build_hook_schema(32, "float32", None)
PROMPT, MAX_TOKENS = [7, 8, 9, 7], 5
FACTS = CaptureContext(
    V4,
    L,
    PROMPT,
    MAX_TOKENS,
    consumers={
        "memory": ConsumerRules(),
        "disk": ConsumerRules(needs_ids=True, layouts=("packed",), returns="file"),
        "shm": None,
    },
    projections={"probe": (D, 2), "wide": (M * D, 3), "pair": (2 * D, 1)},
    max_request_bytes=90_000,
    max_inline_bytes=60_000,
)
GOOD = {"hooks": {"mlp_out": [1]}, "positions": "all_prompt"}
FILED = {"request_id": "probe-1", "tag": "mhc"}
MEMORY, DISK = "capture.memory", "capture.disk"


def part(**changes):
    """A valid part with some fields changed; a field set to `...` is removed."""
    return {name: value for name, value in (GOOD | changes).items() if value is not ...}


def refused(raw, facts=FACTS) -> CaptureValidationError:
    with pytest.raises(CaptureValidationError) as caught:
        resolve_capture_request(raw, facts)
    error = caught.value
    assert isinstance(error, RequestError) and error.code == "capture-invalid"
    assert str(error).startswith(error.path + ": ") and len(str(error)) < 900
    return error
