"""Birkhoff: run, read and steer DeepSeek-V4.

This package exports the public names. Each is imported on first access, so that code which needs only a part of the
package (the command line printing its help, a config reader) does not wait for PyTorch to be imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birkhoff import mhc as mhc
    from birkhoff.api.engine import Engine as Engine
    from birkhoff.api.load import load as load
    from birkhoff.api.options import EngineOptions as EngineOptions
    from birkhoff.capture.spec.request import Capture as Capture
    from birkhoff.engine.sampling_params import SamplingParams as SamplingParams
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
    "EngineOptions",
    "Output",
    "Patch",
    "Project",
    "Sae",
    "SaeReconstruct",
    "SaeSet",
    "SamplingParams",
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
    "Engine": "api.engine",
    "EngineOptions": "api.options",
    "Output": "output",
    "Trace": "output",
    "SamplingParams": "engine.sampling_params",
    "load": "api.load",
}


def __getattr__(name: str) -> object:
    if name == "mhc":
        return importlib.import_module("birkhoff.mhc")
    if name not in _HOMES:
        raise AttributeError(f"module 'birkhoff' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"birkhoff.{_HOMES[name]}"), name)
    globals()[name] = value  # later accesses bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
