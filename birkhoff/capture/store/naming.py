"""File names of captures: three layouts, safe names, and shards chosen by a hash of the request id.

    per_file   {tag}/{request}/{layer}_{hook}.bin + .json
    packed     {tag}/{request}/packed.bin + packed.json
    sharded    {tag}/shard-{index}-{seq}.bin + .json

With several pipeline stages each stage has files of its own, `packed-pp03` and `shard-pp03-...`. An open file is named
`.bin.tmp` and has a `.journal` beside it. A slug contains only [A-Za-z0-9._-], fits a file name, does not start with a
dot (the root keeps its lock there) and never looks like a shard.
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
MAX_SLUG = 200  # file names may have 255 bytes; leaves space for suffixes

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_SHARD = re.compile(r"shard-.*\.(bin|json|tmp|journal|poison)", re.DOTALL)


def slug(text: str) -> str:
    """A file name for this text: the text itself if it is safe."""
    safe = _UNSAFE.sub("_", text)
    if safe.startswith("."):
        safe = "_" + safe[1:]
    if len(safe) > MAX_SLUG or _SHARD.fullmatch(safe):
        safe = f"{safe[:MAX_SLUG]}-{short_hash(text)}"
    return safe or "_"


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def stage(pp_rank: int, pp_size: int) -> str:
    """The suffix of the files of one pipeline stage."""
    return f"-pp{pp_rank:02d}" if pp_size > 1 else ""


def shard_index(request_id: str, num_shards: int) -> int:
    return zlib.crc32(request_id.encode("utf-8", "surrogatepass")) % num_shards


def shard_stem(stage_name: str, index: int, seq: int) -> str:
    return f"shard{stage_name}-{index:03d}-{seq:06d}"


def shard_seq(name: str, stage_name: str, index: int) -> int | None:
    """The sequence number in a shard's file name, or None for other names."""
    match = re.fullmatch(rf"shard{re.escape(stage_name)}-{index:03d}-(\d+)\.[a-z.]+", name)
    return int(match[1]) if match else None


def per_file_stem(layer: int, hook: str) -> str:
    return f"{layer}_{slug(hook)}"
