"""Streams: events join to the whole output, closing frees the slot at once, and asyncio runs many concurrently."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from birkhoff.errors import OptionError, PromptError, RequestError
from tests.api.conftest import CONTEXT, REQUESTS

IDS = [5, 80, 200, 7, 91]


def free_slots(engine) -> int:
    return engine._core.scheduler.slots.num_free


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"seed": 3}, {"seed": 4, "top_k": 20, "logprobs": 2}, {"seed": 5, "min_tokens": 10}],
    ids=["greedy", "sampled", "top-k", "min_tokens"],
)
@pytest.mark.parametrize("prompt", ["héllo 🙂 wörld", IDS], ids=["text", "ids"])
def test_streamed_text_joins_to_the_output_of_generate(idle, prompt, options):
    whole = idle.generate(prompt, max_tokens=30, **options)
    stream = idle.stream(prompt, max_tokens=30, **options)
    events = list(stream)
    assert "".join(e.text for e in events) == whole.text and [e.token_id for e in events] == whole.token_ids
    assert [e.finish_reason for e in events] == [None] * (len(events) - 1) + [whole.finish_reason]
    assert stream.output.text == whole.text and stream.output.token_ids == whole.token_ids
    if whole.logprobs is None:
        assert all(e.logprob is None for e in events)
    else:  # batches may differ between the two calls: equal up to rounding
        assert [e.logprob.logprob for e in events] == pytest.approx(
            [p.logprob for p in whole.logprobs], abs=1e-4
        )


def test_no_part_of_a_stop_string_is_streamed(idle, letters):
    plain = idle.generate("x", temperature=0, max_tokens=40, logit_bias=letters).text
    stop = plain[10:15]
    shown = ""
    for event in idle.stream("x", temperature=0, max_tokens=40, logit_bias=letters, stop=stop):
        shown += event.text
        assert plain.startswith(shown) and len(shown) <= plain.index(stop)
    assert shown == plain[: plain.index(stop)] and event.finish_reason == "stop"


def test_closing_frees_the_slot_before_the_next_step(idle):
    streams = [idle.stream(IDS, max_tokens=100, ignore_eos=True) for _ in range(REQUESTS)]
    assert all(next(stream).token_id is not None for stream in streams) and free_slots(idle) == 0
    streams[1].close()
    assert free_slots(idle) == 1
    late = idle.stream(IDS, max_tokens=100, temperature=0, ignore_eos=True)
    assert next(late).token_id is not None and free_slots(idle) == 0  # it got the slot in this step
    with streams[2]:
        next(streams[2])
    assert free_slots(idle) == 1
    del streams[3]  # a dropped stream is cancelled before the next step
    idle._core.step()
    assert free_slots(idle) == 2
    streams[0].close()
    streams[0].close()
    late.close()
    assert late.output.finish_reason == "cancelled" and len(late.output.token_ids) >= 1
    assert next(streams[0], None) is None  # an exhausted iterator stays exhausted


def test_a_stream_in_a_reference_cycle_can_be_collected_during_a_step(idle):
    """The collector runs every few allocations here, also while the lock of the engine is held."""
    thresholds, answers = gc.get_threshold(), []

    def drop_streams_and_generate():
        for _ in range(3):
            lost = [idle.stream(IDS, max_tokens=100)]
            lost.append(lost)
            next(lost[0])
            del lost
            answers.append(idle.generate(IDS, max_tokens=5))

    worker = threading.Thread(target=drop_streams_and_generate, daemon=True)
    gc.set_threshold(5, 2, 1)
    try:
        worker.start()
        worker.join(300)
    finally:
        gc.set_threshold(*thresholds)
    assert len(answers) == 3, "the engine deadlocked"
    gc.collect()


def test_another_thread_can_close_a_stream_that_is_being_read(idle):
    stream, events = idle.stream(IDS, max_tokens=CONTEXT - 10, ignore_eos=True), []
    reader = threading.Thread(target=lambda: events.extend(stream), daemon=True)
    reader.start()
    while len(events) < 3:
        time.sleep(0.001)
    stream.close()
    reader.join(300)
    assert (
        not reader.is_alive()
        and stream.output.finish_reason == "cancelled"
        and events[-1].finish_reason in (None, "cancelled")
    )


def test_closing_early_gives_the_partial_output(idle, letters):
    stream = idle.stream("x", temperature=0, max_tokens=60, logit_bias=letters)
    with pytest.raises(RequestError, match=r"has not ended yet. Read it to its end or close it"):
        stream.output  # noqa: B018
    received = ""
    for event in stream:
        received += event.text
        if len(received) == 7:
            break
    stream.close()
    assert stream.output.text.startswith(received) and stream.output.finish_reason == "cancelled"


def test_a_stream_that_is_never_read_does_not_run(idle):
    stream = idle.stream(IDS, max_tokens=100)
    assert idle._core.scheduler.idle
    stream.close()
    assert stream.output.finish_reason == "cancelled" and stream.output.token_ids == []
    del stream
    idle.stream(IDS, max_tokens=100)
    gc.collect()


def test_concurrent_streams_equal_streams_alone(idle):
    prompts = [[9 + i, 30, 31] for i in range(REQUESTS + 2)]
    alone = [idle.generate(p, temperature=0, max_tokens=10).token_ids for p in prompts]
    streams = [idle.stream(p, temperature=0, max_tokens=10) for p in prompts]
    received = [[] for _ in prompts]
    while any(len(t) < 10 for t in received):
        for stream, tokens in zip(streams, received):
            event = next(stream, None)
            if event is not None:
                tokens.append(event.token_id)
    assert received == alone
    assert all(next(stream, None) is None for stream in streams)


def test_generate_works_while_a_stream_is_open(idle):
    expected = idle.generate(IDS, temperature=0, max_tokens=8).token_ids
    with idle.stream([9, 9], max_tokens=300, ignore_eos=True) as stream:
        next(stream)
        assert idle.generate(IDS, temperature=0, max_tokens=8).token_ids == expected
        assert next(stream).token_id is not None


def test_a_stream_takes_one_prompt_and_one_choice(idle):
    with pytest.raises(PromptError, match="stream takes one prompt"):
        idle.stream(["a", "b"])
    with pytest.raises(OptionError, match="n is more than 1"):
        idle.stream("a", n=2)


async def read(engine, prompt, **options):
    return [event async for event in engine.astream(prompt, **options)]


def test_many_async_streams_at_once(idle):
    """More streams than slots, and more than the threads of a default executor."""
    prompts = [[9 + i, 30, 31] for i in range(24)]
    alone = [o.token_ids for o in idle.generate(prompts, temperature=0, max_tokens=6)]

    async def gather_all():
        return await asyncio.gather(*(read(idle, p, temperature=0, max_tokens=6) for p in prompts))

    outputs = asyncio.run(gather_all())
    assert [[e.token_id for e in events] for events in outputs] == alone
    assert all(events[-1].finish_reason for events in outputs)


def test_the_event_loop_is_not_blocked_by_a_step(idle):
    ticks, reading = [], True

    async def tick():
        while reading:
            ticks.append(threading.get_ident())
            await asyncio.sleep(0)

    async def both():
        nonlocal reading
        ticker = asyncio.create_task(tick())
        events = await read(idle, [5] * 400, temperature=0, max_tokens=5)
        reading = False
        await ticker
        return events

    assert len(asyncio.run(both())) == 5
    print(f"{len(ticks)} iterations of the event loop during one request")
    assert len(ticks) > 20


def test_closing_an_async_stream_cancels_its_request(idle):
    async def leave():
        stream = idle.astream(IDS, max_tokens=200)
        async for _ in stream:
            break
        assert free_slots(idle) == REQUESTS - 1
        await stream.aclose()
        return free_slots(idle)

    assert asyncio.run(leave()) == REQUESTS


def test_a_cancelled_task_frees_its_slot(idle):
    async def cancel():
        task = asyncio.create_task(read(idle, [5] * 300, max_tokens=200, ignore_eos=True))
        while idle._core.scheduler.idle:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())  # waits for the thread that is in a step
    assert free_slots(idle) == REQUESTS


def test_async_streams_raise_the_same_errors(idle):
    for prompt, options in (("a", {"n": 2}), (["a", "b"], {}), ("", {}), ("a", {"temprature": 1})):
        with pytest.raises((OptionError, PromptError)):
            asyncio.run(read(idle, prompt, **options))
