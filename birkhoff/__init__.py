"""Birkhoff: run, read and steer DeepSeek-V4.

The public names and nothing else. Each is fetched when it is first asked for, so that whoever needs only a part (the
command line printing its help, a reader of configs) does not wait for PyTorch to come up.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birkhoff import mhc as mhc
    from birkhoff.api import Engine as Engine
    from birkhoff.api import load as load
    from birkhoff.capture.spec.request import Capture as Capture
    from birkhoff.errors import BirkhoffError as BirkhoffError
    from birkhoff.output import Output as Output
    from birkhoff.output import Trace as Trace
    from birkhoff.sae.dictionary import Sae as Sae
    from birkhoff.sae.feature_edits import SaeReconstruct as SaeReconstruct
    from birkhoff.sae.feature_edits import SaeSet as SaeSet
    from birkhoff.steering.vector_edits import Add as Add
    from birkhoff.steering.vector_edits import Clamp as Clamp
    from birkhoff.steering.vector_edits import Patch as Patch
    from birkhoff.steering.vector_edits import Project as Project

__version__ = "0.1.0"
__all__ = [
    "Add",
    "BirkhoffError",
    "Capture",
    "Clamp",
    "Engine",
    "Output",
    "Patch",
    "Project",
    "Sae",
    "SaeReconstruct",
    "SaeSet",
    "Trace",
    "load",
    "mhc",
]

_HOMES = {
    "Add": "steering.vector_edits",
    "Clamp": "steering.vector_edits",
    "Patch": "steering.vector_edits",
    "Project": "steering.vector_edits",
    "Sae": "sae.dictionary",
    "SaeReconstruct": "sae.feature_edits",
    "SaeSet": "sae.feature_edits",
    "BirkhoffError": "errors",
    "Capture": "capture.spec.request",
    "Engine": "api",
    "Output": "output",
    "Trace": "output",
    "load": "api",
}


def __getattr__(name: str) -> object:
    if name == "mhc":
        return importlib.import_module("birkhoff.mhc")
    if name not in _HOMES:
        raise AttributeError(f"module 'birkhoff' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"birkhoff.{_HOMES[name]}"), name)
    globals()[name] = found  # the next look-up does not come here
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
