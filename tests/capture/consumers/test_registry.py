"""Consumers built from the text of a flag."""

from __future__ import annotations

import uuid

import pytest

from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.sinks.consumer_registry import KINDS, build_consumer, parameters
from birkhoff.capture.sinks.filesystem import FilesystemConsumer
from birkhoff.capture.sinks.log_consumer import LoggingConsumer
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.sinks.sae_stats import SaeStatsConsumer
from birkhoff.errors import OptionError
from tests.capture.sample_chunks import chunk


def test_every_kind_can_be_built(tmp_path):
    texts = {
        "filesystem": f"filesystem:root={tmp_path},fsync=false,num_shards=3,default_layout=sharded,timeout_seconds=0.5",
        "logging": "logging:level=DEBUG",
        "sae_stats": "sae_stats:hook=mlp_out,layer=3,top_k=2",
        "shm": f"shm:name=birkhoff-test-{uuid.uuid4().hex},max_bytes=4096,overflow=drop",
    }
    assert set(texts) == set(KINDS)
    for kind, text in texts.items():
        name, consumer = build_consumer(text)
        assert name == kind and isinstance(consumer, Consumer)
        if isinstance(consumer, FilesystemConsumer):
            options = consumer.options
            assert (options.fsync, options.num_shards, options.timeout_seconds) == (False, 3, 0.5)
        if isinstance(consumer, SaeStatsConsumer):
            assert (consumer.hook, consumer.layer) == ("mlp_out", 3)
        consumer.shutdown()


def test_an_instance_can_be_named():
    name, consumer = build_consumer("talk=logging:level=debug")
    assert name == "talk" and isinstance(consumer, LoggingConsumer)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "unknown"),
        ("tape", "unknown"),
        ("=logging", "unknown"),
        ("logging:size=3", "level"),
        ("logging:level", "key=value"),
        ("logging:level=INFO,level=DEBUG", "at most once"),
        ("filesystem", "needs root"),
        ("filesystem:root=x,fsync=maybe", "fsync"),
        ("filesystem:root=x,disk=1", "not understood"),
        ("sae_stats:hook=mlp_out,layer=1,top_k=1.5", "top_k"),
        ("sae_stats:hook=mlp_out", "layer"),
    ],
)
def test_invalid_specs_are_refused(text, word):
    with pytest.raises(OptionError, match=word):
        build_consumer(text)


def test_the_filesystem_takes_every_parameter_of_the_documentation():
    documented = """root writer_threads queue_size timeout_seconds on_collision fd_cache_size fsync atomic_publish
    default_layout coalesce_max_bytes num_shards shard_max_bytes""".split()
    assert set(documented) <= set(parameters("filesystem"))


def test_results_of_the_filesystem_can_be_waited_for(tmp_path):
    files = FilesystemConsumer(str(tmp_path))
    assert files.get_result("a").status == "not_requested"
    files.begin(CaptureRequest("a", "a", "run"))
    files.submit_chunk(chunk("a", "post_attn", 0, 0, 2))
    assert files.get_result("a").status == "pending"
    files.finalize(CaptureFinish("a", "stop"))
    result = files.get_result("a", wait=True)
    assert result.status == "ok" and result.durable and files.get_result("a") == result
    wire = result.to_json()
    assert wire["status"] == "ok" and wire["paths"] == ["run/a/packed.bin"] and wire["id"] == "run/a"
    assert set(wire["sha256"]) == set(wire["paths"])
    files.shutdown()
