"""Options of the filesystem consumer.

`packed` and `error` are the defaults so that a request is one file and an existing capture is never replaced silently.
With `fsync` off, results have `durable: false`. With `atomic_publish` off, a payload has its final name from the start,
unless it replaces another capture; its sidecar is still written last. Shards only grow, so `overwrite` does not apply
to them: a request id that is already used is refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from birkhoff.capture.store.naming import LAYOUTS
from birkhoff.errors import OptionError, quoted
from birkhoff.option_checks import check_bool, check_float, check_int

COLLISIONS = ("overwrite", "error", "suffix")


@dataclass(frozen=True)
class FileOptions:
    root: str | os.PathLike[str]
    default_layout: str = "packed"
    on_collision: str = "error"
    fsync: bool = True
    atomic_publish: bool = True
    num_shards: int = 8
    shard_max_bytes: int = 256 << 20
    coalesce_max_bytes: int = 1 << 20  # rows buffered in memory per open file
    fd_cache_size: int = 256  # descriptors of one per_file capture; half as many open shards
    queue_size: int = 1024  # finished requests that may wait for the disk
    writer_threads: int = 4
    timeout_seconds: float = 30.0  # limit of `get_result(wait=True)`
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("default_layout", LAYOUTS), ("on_collision", COLLISIONS)):
            if getattr(self, name) not in allowed:
                raise OptionError(
                    f"{name} is {quoted(getattr(self, name))}, expected one of {', '.join(allowed)}."
                )
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if field.type == "bool":
                check_bool(field.name, value)
            if field.type == "int":
                lowest = 0 if field.name in ("pp_rank", "coalesce_max_bytes") else 1
                check_int(field.name, value, lowest)
        check_float("timeout_seconds", self.timeout_seconds, 0, 1e9)
        if not isinstance(self.root, (str, os.PathLike)) or not os.fspath(self.root):
            raise OptionError(f"root is {quoted(self.root)}, expected the directory that captures go to.")
        if self.pp_rank >= self.pp_size or self.num_shards > 1000:
            raise OptionError(
                f"pp_rank is {self.pp_rank} of {self.pp_size} and num_shards is {self.num_shards}: a rank is below "
                "pp_size, and file names have room for 1000 shards."
            )
