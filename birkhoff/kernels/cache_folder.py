"""Where compiled kernels are kept between processes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder of one kind of compiled code: in `$BIRKHOFF_CACHE`, else in `birkhoff` of the user's cache folder.

    It need not exist. Without a home folder it is one that cannot be created: a shared temporary folder would let
    other users place code there."""
    named = os.environ.get("BIRKHOFF_CACHE")
    if named:
        return Path(named) / kind
    try:
        user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        user_cache = Path(os.devnull)
    return user_cache / "birkhoff" / kind
