"""Requests for their prompts alone: every row of the prompt is there, no token is sampled, and memory is free again."""

from __future__ import annotations

import queue

import pytest
import torch

from birkhoff.api.driver import RequestOutput
from birkhoff.errors import CaptureValidationError, ContextError
from birkhoff.output import Output
from tests.api.conftest import CONTEXT, open_engine

ROWS = {"memory": {"hooks": {"mlp_out": "all"}, "positions": "all_prompt", "dtype": "fp32"}}
IDS = [5, 80, 200, 7, 91] * 40


def run(engine, *requests) -> list[list[RequestOutput]]:
    """Run requests with a driver; returns the outputs of each."""
    delivered: queue.Queue[RequestOutput] = queue.Queue()
    driver = engine.driver(lambda outputs: [delivered.put(output) for output in outputs])
    try:
        driver.submit(requests)
        outputs: dict = {request: [] for request in requests}
        while not all(request.done and any(o.last for o in outputs[request]) for request in requests):
            output = delivered.get(timeout=120)
            outputs[output.request].append(output)
        return list(outputs.values())
    finally:
        driver.close()


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"speculative": 2}], ids=str)
def test_rows_are_those_of_a_request_that_samples(checkpoint, options):
    with open_engine(checkpoint, **options) as engine:
        (request,) = engine.requests(IDS, capture=ROWS, prompt_only=True, temperature=0, logprobs=2)
        ((*_, last),) = run(engine, request)
        alone, sampled = Output.of(request), engine.generate(IDS, capture=ROWS, max_tokens=1, temperature=0)
        assert alone.finish_reason == "length" and alone.token_ids == [] and alone.logprobs == []
        assert [token.token_id for token in last.tokens] == [None]
        assert alone.acts.keys() == sampled.acts.keys()
        for key, rows in sampled.acts.items():
            assert alone.acts[key].positions == rows.positions == tuple(range(len(IDS)))
            assert torch.allclose(alone.acts[key].tensor, rows.tensor, atol=1e-4)
        timings = alone.timings
        assert timings["prefill_ms"] > 0 and timings["decode_ms"] is None and timings["output_tokens"] == 0
        assert engine._core.scheduler.idle


def test_the_next_request_finds_the_prompt_in_the_cache(checkpoint):
    with open_engine(checkpoint) as engine:
        run(engine, *engine.requests(IDS, prompt_only=True))
        plain = engine.generate([*IDS, 9], max_tokens=8, temperature=0)
        assert plain.timings["cached_tokens"] == len(IDS)
    with open_engine(checkpoint) as engine:
        assert engine.generate([*IDS, 9], max_tokens=8, temperature=0).token_ids == plain.token_ids


def test_beside_requests_that_decode(idle):
    """Prompts of several chunks beside decoding requests: the tokens of these do not change."""
    expected = idle.generate(IDS[:30], max_tokens=20, temperature=0).token_ids
    decoding = idle.requests(IDS[:30], max_tokens=20, temperature=0)
    alone = [each for length in (1, 129, CONTEXT) for each in idle.requests([7] * length, prompt_only=True)]
    run(idle, *decoding, *alone)
    assert decoding[0].output_ids == expected
    assert all(request.finish_reason == "length" and not request.output_ids for request in alone)


def test_a_prompt_may_fill_the_context_and_no_more(idle):
    run(idle, *idle.requests([7] * CONTEXT, prompt_only=True))
    with pytest.raises(
        ContextError, match=f"the prompt has {CONTEXT + 1} tokens, the context holds {CONTEXT}"
    ):
        idle.requests([7] * (CONTEXT + 1), prompt_only=True)
    with pytest.raises(ContextError, match="an answer needs at least one"):
        idle.requests([7] * CONTEXT, max_tokens=1)


def test_positions_after_the_prompt_are_refused(idle):
    """There is no generated token that could be captured."""
    spec = {"memory": {"hooks": {"mlp_out": "all"}, "positions": {"generated": "all"}}}
    with pytest.raises(CaptureValidationError, match="selects nothing"):
        idle.requests(IDS, capture=spec, prompt_only=True)


def test_several_choices_and_cancellation(idle):
    requests = idle.requests(IDS, prompt_only=True, n=3)
    run(idle, *requests)
    assert [request.finish_reason for request in requests] == ["length"] * 3
    (request,) = idle.requests(IDS, prompt_only=True)
    idle._core.submit(request)
    idle._core.cancel(request)
    assert request.finish_reason == "cancelled"
