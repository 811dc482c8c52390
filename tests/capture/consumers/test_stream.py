"""Subscriptions to rows of running requests, and the logging consumer."""

from __future__ import annotations

import logging
import threading

import pytest

from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.sinks.log_consumer import LoggingConsumer
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.sinks.stream_consumer import StreamConsumer
from birkhoff.errors import OptionError
from tests.capture.sample_chunks import chunk


def positions(chunks) -> list[int]:
    return [position for part in chunks for position in part.positions]


def test_a_subscriber_sees_its_request_from_first_to_last():
    stream = StreamConsumer()
    assert isinstance(stream, Consumer)
    subscription, every = stream.subscribe("a"), stream.subscribe()
    stream.begin(CaptureRequest("a", "a", "run"))
    for start in range(0, 6, 2):
        for name in "ab":
            stream.submit_chunk(chunk(name, "post_attn", 0, start, 2))
    assert stream.get_result("a").status == "pending"
    assert stream.finalize(CaptureFinish("a")).result().rows == 6
    assert positions(subscription) == list(range(6)), "the iteration ends with the request"
    stream.finalize(CaptureFinish("b"))
    stream.shutdown()
    assert len(list(every)) == 6 and stream.subscribe().get() is None
    assert stream.get_result("a").status == "ok"


def test_a_slow_subscriber_loses_the_oldest_rows_and_their_count_is_reported():
    stream = StreamConsumer(depth=2)
    subscription = stream.subscribe("a")
    for start in range(0, 10, 2):
        stream.submit_chunk(chunk("a", "post_attn", 0, start, 2))
    result = stream.finalize(CaptureFinish("a")).result()
    assert subscription.dropped_rows == 6 == result.dropped_rows and result.status == "partial_error"
    assert positions(subscription) == [6, 7, 8, 9]


def test_a_blocking_stream_waits_for_its_subscriber():
    stream = StreamConsumer(depth=1, overflow="block", timeout_seconds=30)
    seen: list[int] = []

    def listen() -> None:
        for part in subscription:
            seen.extend(part.positions)

    subscription = stream.subscribe("a")
    listener = threading.Thread(target=listen)
    listener.start()
    for start in range(50):
        stream.submit_chunk(chunk("a", "post_attn", 0, start, 1))
    assert stream.finalize(CaptureFinish("a")).result().status == "ok"
    listener.join(300)
    assert seen == list(range(50)) and subscription.dropped_rows == 0


def test_no_subscriber_is_no_loss_and_unsubscribing_is_allowed():
    stream = StreamConsumer(depth=1)
    with stream.subscribe() as listener:
        stream.submit_chunk(chunk("a", "post_attn", 0, 0, 1))
        assert positions([listener.get(1)]) == [0]
        with pytest.raises(TimeoutError):
            listener.get(0.01)
    for start in range(1, 5):
        stream.submit_chunk(chunk("a", "post_attn", 0, start, 1))
    result = stream.finalize(CaptureFinish("a")).result()
    assert result.status == "ok" and result.rows == 5 and listener.dropped_rows == 0
    for wrong in ({"depth": 0}, {"overflow": "panic"}):
        with pytest.raises(OptionError):
            StreamConsumer(**wrong)


def test_the_log_names_captures_without_their_values(caplog):
    consumer = LoggingConsumer("info")
    assert isinstance(consumer, Consumer)
    with caplog.at_level(logging.DEBUG, "birkhoff.capture"):
        consumer.begin(CaptureRequest("key", "probe", "run"))
        for layer in (1, 2):
            consumer.submit_chunk(chunk("key", "post_attn", layer, 0, 3))
        assert consumer.get_result("key").status == "pending"
        result = consumer.finalize(CaptureFinish("key", "length", dropped_rows=2)).result()
    assert result.rows == 6 and result.bytes == 96 and result.keys == 2 and result.status == "partial_error"
    assert consumer.get_result("key") == result
    lines = [record.getMessage() for record in caplog.records]
    assert (
        lines[-1] == "capture probe finished (length): 6 rows, 96 bytes, 2 layers of post_attn"
        and len(lines) == 3
    )
    token = chunk("key", "post_attn", 1, 0, 3).token_ids[0]
    assert not any(str(token) in line for line in lines)
    assert consumer.finalize(CaptureFinish("other")).result().status == "not_requested"
    with pytest.raises(OptionError, match="level"):
        LoggingConsumer("loud")
