"""Imports optional packages; a missing one is a `PackageMissing` error that names what to install."""

from __future__ import annotations

import importlib
from typing import Any

from birkhoff.errors import PackageMissing

EXTRAS = {  # the extra of birkhoff-v4 that installs a package
    "pyarrow": "parquet",
    "zstandard": "zstd",
    "datasets": "datasets",
    "zarr": "zarr",
    "ray": "ray",
}


def require(module: str, purpose: str) -> Any:
    """Import a module of an optional package. `purpose` begins the sentence of the error: "reading x.parquet"."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError:
        needed = f"'birkhoff-v4[{EXTRAS[package]}]'" if package in EXTRAS else package
        raise PackageMissing(
            f"{purpose} needs the package {package}, which is not installed: pip install {needed}."
        ) from None
