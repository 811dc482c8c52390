"""Birkhoff: run, read and steer DeepSeek-V4.

This package exports the public names. Each is imported on first access, so that code which needs only a part of the
package (the command line printing its help, a config reader) does not wait for PyTorch to be imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birkhoff import mhc as mhc
    from birkhoff import plot as plot
    from birkhoff.analysis.attribution import Attribution as Attribution
    from birkhoff.analysis.metric import LogitDiff as LogitDiff
    from birkhoff.analysis.metric import LogProb as LogProb
    from birkhoff.api.engine import Engine as Engine
    from birkhoff.api.load import load as load
    from birkhoff.api.options import EngineOptions as EngineOptions
    from birkhoff.capture.spec.request import Capture as Capture
    from birkhoff.engine.sampling_params import SamplingParams as SamplingParams
    from birkhoff.errors import BirkhoffError as BirkhoffError
    from birkhoff.output import Output as Output
    from birkhoff.sae.dictionary import Sae as Sae
    from birkhoff.sae.feature_edits import SaeReconstruct as SaeReconstruct
    from birkhoff.sae.feature_edits import SaeSet as SaeSet
    from birkhoff.steering.attention_edits import AttentionEdit as AttentionEdit
    from birkhoff.steering.call import Call as Call
    from birkhoff.steering.expert_edits import ExpertSet as ExpertSet
    from birkhoff.steering.gated_edits import Gate as Gate
    from birkhoff.steering.vector_edits import Add as Add
    from birkhoff.steering.vector_edits import Clamp as Clamp
    from birkhoff.steering.vector_edits import Patch as Patch
    from birkhoff.steering.vector_edits import Project as Project
    from birkhoff.steering.vector_edits import Scale as Scale
    from birkhoff.trace import Trace as Trace

__version__ = "0.1.0"
__all__ = [
    "Add",
    "AttentionEdit",
    "Attribution",
    "BirkhoffError",
    "Call",
    "Capture",
    "Clamp",
    "Engine",
    "EngineOptions",
    "ExpertSet",
    "Gate",
    "LogProb",
    "LogitDiff",
    "Output",
    "Patch",
    "Project",
    "Sae",
    "SaeReconstruct",
    "SaeSet",
    "SamplingParams",
    "Scale",
    "Trace",
    "load",
    "mhc",
    "plot",
]

_HOMES = {
    "Add": "steering.vector_edits",
    "AttentionEdit": "steering.attention_edits",
    "Call": "steering.call",
    "Clamp": "steering.vector_edits",
    "Patch": "steering.vector_edits",
    "Project": "steering.vector_edits",
    "Scale": "steering.vector_edits",
    "Sae": "sae.dictionary",
    "SaeReconstruct": "sae.feature_edits",
    "SaeSet": "sae.feature_edits",
    "BirkhoffError": "errors",
    "Capture": "capture.spec.request",
    "Attribution": "analysis.attribution",
    "LogProb": "analysis.metric",
    "LogitDiff": "analysis.metric",
    "Engine": "api.engine",
    "EngineOptions": "api.options",
    "ExpertSet": "steering.expert_edits",
    "Gate": "steering.gated_edits",
    "Output": "output",
    "Trace": "trace",
    "SamplingParams": "engine.sampling_params",
    "load": "api.load",
}


def _warn_of_other_package() -> None:
    """Warn if the package `birkhoff` of another project is installed into the same folder.

    Both have a module `birkhoff`, so each overwrites files of the other. Ours is called `birkhoff-v4`."""
    folder = os.path.dirname(os.path.dirname(__file__))
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith("birkhoff-") and name.endswith((".dist-info", ".egg-info")):
                warnings.warn(
                    f"{name.rsplit('.', 1)[0]}, a package of another project, is installed into {folder} and shares "
                    "the module name birkhoff. Remove it and repair this one: pip uninstall birkhoff && pip install "
                    "--force-reinstall --no-deps birkhoff-v4",
                    stacklevel=3,
                )


def __getattr__(name: str) -> object:
    if name in ("mhc", "plot"):
        return importlib.import_module(f"birkhoff.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'birkhoff' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"birkhoff.{_HOMES[name]}"), name)
    globals()[name] = value  # later accesses bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_warn_of_other_package()
