"""Which file a capture goes to: three layouts, names made safe, shards chosen by the request's name.

    per_file   {tag}/{request}/{layer}_{hook}.bin + .json
    packed     {tag}/{request}/packed.bin + packed.json
    sharded    {tag}/shard-{index}-{seq}.bin + .json

With several pipeline stages every stage writes files of its own, `packed-pp03` and `shard-pp03-...`. While a file is
open it is called `.bin.tmp`, with a `.journal` beside it. A slug holds only [A-Za-z0-9._-], fits a file name, never
starts with a dot (the root keeps its lock there) and never looks like a shard.
"""

from __future__ import annotations

import hashlib
import re
import zlib

LAYOUTS = ("per_file", "packed", "sharded")
PAYLOAD = ".bin"
SIDECAR = ".json"
OPEN = ".tmp"
JOURNAL = ".journal"
POISON = ".poison"
MAX_SLUG = 200  # names may have 255 bytes; leave room for suffixes

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_SHARD = re.compile(r"shard-.*\.(bin|json|tmp|journal|poison)", re.DOTALL)
PER_FILE = re.compile(r"\d+_[A-Za-z0-9._-]+")


def slug(text: str) -> str:
    """A file name for this text: the text itself when it is safe."""
    safe = _UNSAFE.sub("_", text)
    if safe.startswith("."):
        safe = "_" + safe[1:]
    if len(safe) > MAX_SLUG or _SHARD.fullmatch(safe):
        safe = f"{safe[:MAX_SLUG]}-{short_hash(text)}"
    return safe or "_"


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def stage(pp_rank: int, pp_size: int) -> str:
    """What the files of one pipeline stage add to their names."""
    return f"-pp{pp_rank:02d}" if pp_size > 1 else ""


def shard_index(request_id: str, num_shards: int) -> int:
    return zlib.crc32(request_id.encode("utf-8", "surrogatepass")) % num_shards


def shard_stem(stage_name: str, index: int, seq: int) -> str:
    return f"shard{stage_name}-{index:03d}-{seq:06d}"


def shard_seq(name: str, stage_name: str, index: int) -> int | None:
    """The sequence number in a shard's file name, or None when the name belongs to something else."""
    match = re.fullmatch(rf"shard{re.escape(stage_name)}-{index:03d}-(\d+)\.[a-z.]+", name)
    return int(match[1]) if match else None


def per_file_stem(layer: int, hook: str) -> str:
    return f"{layer}_{slug(hook)}"
