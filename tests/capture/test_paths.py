"""Names that become paths: safe, distinct, and never those of another capture."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.naming import shard_index, slug
from birkhoff.capture.store.reader import read_request, read_sharded
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureWriteError
from tests.capture.disks import SoftDisk
from tests.capture.sample_chunks import bits, chunk, same_bits


def write(root: Path, request: str, tag: str = "run", key: str | None = None, files=None, **options):
    """Capture two rows that only `key` could have made. Returns the result."""
    key = key or request
    writer = files or CaptureWriter(FileOptions(root, **options), SoftDisk())
    writer.begin(CaptureRequest(key, request, tag))
    writer.append(chunk(key, "post_attn", 0, 0, 2))
    result = writer.finish(CaptureFinish(key, "stop")).result(300)
    if files is None:
        writer.close()
    return result


def holds(directory: Path, key: str) -> bool:
    return same_bits(read_request(directory)["post_attn", 0].array, bits(key, "post_attn", 0, 0, 2))


@given(st.text(max_size=400))
def test_a_slug_is_a_safe_file_name(text):
    name = slug(text)
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) and len(name) <= 220
    assert not re.fullmatch(r"shard-.*\.(bin|json|tmp|journal)", name)
    assert slug(name) == name


@given(st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,80}", fullmatch=True))
def test_a_safe_name_is_unchanged(text):
    assert slug(text) == text or text.startswith("shard-")


def test_shards_are_used_evenly():
    counts = [0] * 8
    for index in range(4000):
        counts[shard_index(f"request-{index}", 8)] += 1
    assert min(counts) > 350


TRICKS = [
    "../up",
    "..",
    ".",
    "/etc/passwd",
    "a/../../b",
    "%2e%2e/x",
    "nul\0byte",
    "CON",
    "x" * 256,
    "\u202etxt",
    "ａ／ｂ",
    "~root",
    "-rf",
    ".lock",
    ".hidden",
    "shard-000-000000.bin",
    "a\nb",
    "a b",
    "*",
    "packed.json",
    "\ud800",
]


@pytest.mark.parametrize("layout", ("packed", "per_file", "sharded"))
def test_no_name_leads_out_of_the_root(quick_path, layout):
    root = quick_path / "root"
    with CaptureWriter(FileOptions(root, default_layout=layout), SoftDisk()) as files:
        for index, trick in enumerate(TRICKS):
            assert write(root, trick, trick, f"k{index}", files).status == "ok", trick
            assert write(root, trick, "run", f"l{index}", files).status == "ok", trick
    assert os.listdir(quick_path) == ["root"]
    for path in root.rglob("*"):
        assert re.fullmatch(r"[A-Za-z0-9_.-]+", path.name) and len(path.name) < 256
    assert (root / ".lock").is_file()


def test_ids_that_look_alike_do_not_share_a_directory(quick_path):
    """In one run and across runs, for requests and for tags."""
    with CaptureWriter(FileOptions(quick_path), SoftDisk()) as files:
        first = write(quick_path, "a b", key="1", files=files)
        second = write(quick_path, "a/b", key="2", files=files)
        other_tag = write(quick_path, "a b", "ru/n", key="3", files=files)
        same_tag_slug = write(quick_path, "a b", "ru_n", key="4", files=files)
    third = write(quick_path, "a:b", key="5")
    results = [first, second, other_tag, same_tag_slug, third]
    assert [result.status for result in results] == ["ok"] * 5
    assert first.id == "run/a_b" and re.fullmatch(r"run/a_b-[0-9a-f]{8}", second.id)
    assert other_tag.id == "ru_n/a_b" and re.fullmatch(r"ru_n-[0-9a-f]{8}/a_b", same_tag_slug.id)
    assert len({result.id for result in results}) == 5
    for index, result in enumerate(results, 1):
        assert holds(quick_path / result.id, str(index))
    ids = [
        json.loads((quick_path / result.id / "packed.json").read_text())["request_id"] for result in results
    ]
    assert ids == ["a b", "a/b", "a b", "a b", "a:b"]


def test_a_used_id_is_refused_by_default(quick_path):
    assert write(quick_path, "a", key="1").status == "ok"
    again = write(quick_path, "a", key="2")
    assert (
        again.status == "error" and "already has a capture" in again.error and "on_collision" in again.error
    )
    assert holds(quick_path / "run/a", "1")
    with CaptureWriter(FileOptions(quick_path), SoftDisk()) as files:
        files.begin(CaptureRequest("3", "b", "run"))
        files.begin(CaptureRequest("4", "b", "run"))  # while the other is being written
        for key in "34":
            files.append(chunk(key, "post_attn", 0, 0, 2))
        refused, kept = (files.finish(CaptureFinish(key)).result(300) for key in "43")
    assert refused.status == "error" and "right now" in refused.error
    assert kept.status == "ok" and holds(quick_path / "run/b", "3")


def test_suffixes_count_up(quick_path):
    ids = [write(quick_path, "a", key=str(index), on_collision="suffix").id for index in range(4)]
    assert ids == ["run/a", "run/a-1", "run/a-2", "run/a-3"]
    assert all(holds(quick_path / name, str(index)) for index, name in enumerate(ids))


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("before", ["packed", "per_file"])
@pytest.mark.parametrize("after", ["packed", "per_file"])
def test_overwriting_replaces_the_whole_capture(quick_path, before, after, atomic):
    options = {"on_collision": "overwrite", "atomic_publish": atomic}
    with CaptureWriter(FileOptions(quick_path, default_layout=before, **options), SoftDisk()) as files:
        files.append(chunk("a", "mlp_out", 3, 0, 5))  # a site that the second capture does not have
        files.append(chunk("a", "post_attn", 0, 0, 5))
        assert files.finish(CaptureFinish("a")).result(300).status == "ok"
    assert write(quick_path, "a", key="2", default_layout=after, **options).status == "ok"
    entries = read_request(quick_path / "run/a")
    assert set(entries) == {("post_attn", 0)} and holds(quick_path / "run/a", "2")
    stem = "packed" if after == "packed" else "0_post_attn"
    assert sorted(os.listdir(quick_path / "run/a")) == [f"{stem}.bin", f"{stem}.json"]


def test_overwriting_keeps_the_old_capture_until_the_new_one_is_complete(quick_path):
    write(quick_path, "a", key="1")
    files = CaptureWriter(FileOptions(quick_path, on_collision="overwrite", coalesce_max_bytes=0), SoftDisk())
    files.begin(CaptureRequest("2", "a", "run"))
    files.append(chunk("2", "post_attn", 0, 0, 2))
    assert holds(quick_path / "run/a", "1")
    files.close()  # it never finished
    assert holds(quick_path / "run/a", "1") and len(os.listdir(quick_path / "run/a")) == 2


def test_shards_refuse_a_used_id_across_runs(quick_path):
    options = {"default_layout": "sharded", "num_shards": 2}
    assert write(quick_path, "a", key="1", **options).status == "ok"
    for policy in ("error", "overwrite"):
        again = write(quick_path, "a", key="2", on_collision=policy, **options)
        assert again.status == "error" and "already in the shards" in again.error
    third = write(quick_path, "a", key="3", on_collision="suffix", **options)
    assert third.status == "ok" and third.id == "run/a-1"
    requests = read_sharded(quick_path / "run")
    assert set(requests) == {"a", "a-1"}
    assert same_bits(requests["a-1"]["post_attn", 0].array, bits("3", "post_attn", 0, 0, 2))


def test_links_planted_in_the_root_are_not_followed(quick_path):
    outside, root = quick_path / "outside", quick_path / "root"
    outside.mkdir()
    root.mkdir()
    (root / "run").symlink_to(outside)
    linked_tag = write(root, "a")
    assert linked_tag.status == "error" and "not a directory" in linked_tag.error
    (root / "other").mkdir()
    (root / "other/a").symlink_to(outside)
    assert write(root, "a", "other").status == "error"
    (root / "third/a").mkdir(parents=True)
    for name in ("packed.bin.tmp", "packed.journal"):
        (root / "third/a" / name).symlink_to(outside / "victim")
    assert write(root, "a", "third").status == "error"
    assert os.listdir(outside) == []
    (outside / "precious").write_text("x" * 100)
    lock = root / ".lock"
    lock.unlink()
    lock.symlink_to(outside / "precious")
    with pytest.raises(CaptureWriteError, match="cannot be written"):
        CaptureWriter(FileOptions(root), SoftDisk())
    assert (outside / "precious").read_text() == "x" * 100
