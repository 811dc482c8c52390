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
    from birkhoff.analysis.activations_store import ActBatch as ActBatch
    from birkhoff.analysis.activations_store import ActStream as ActStream
    from birkhoff.analysis.attention import AttentionPattern as AttentionPattern
    from birkhoff.analysis.attention import AttentionReadout as AttentionReadout
    from birkhoff.analysis.attribution import Agreement as Agreement
    from birkhoff.analysis.attribution import Attribution as Attribution
    from birkhoff.analysis.attribution import AttributionBatch as AttributionBatch
    from birkhoff.analysis.attribution import Node as Node
    from birkhoff.analysis.circuit import Circuit as Circuit
    from birkhoff.analysis.circuit import Edge as Edge
    from birkhoff.analysis.circuit import Faithfulness as Faithfulness
    from birkhoff.analysis.gradients import Gradients as Gradients
    from birkhoff.analysis.lens import Lens as Lens
    from birkhoff.analysis.logit_attribution import LogitAttribution as LogitAttribution
    from birkhoff.analysis.metric import Logit as Logit
    from birkhoff.analysis.metric import LogitDiff as LogitDiff
    from birkhoff.analysis.metric import LogProb as LogProb
    from birkhoff.analysis.patching import PatchSweep as PatchSweep
    from birkhoff.analysis.patching import PatchSweepBatch as PatchSweepBatch
    from birkhoff.api.engine import Engine as Engine
    from birkhoff.api.load import load as load
    from birkhoff.api.options import EngineOptions as EngineOptions
    from birkhoff.capture.sinks.captured_rows import Acts as Acts
    from birkhoff.capture.spec.estimate import Estimate as Estimate
    from birkhoff.capture.spec.request import Capture as Capture
    from birkhoff.engine.request import TokenEvent as TokenEvent
    from birkhoff.engine.sampling_params import SamplingParams as SamplingParams
    from birkhoff.errors import BirkhoffError as BirkhoffError
    from birkhoff.hooks.plan import SiteRows as SiteRows
    from birkhoff.hooks.schema import HookSchema as HookSchema
    from birkhoff.output import Output as Output
    from birkhoff.output import Stream as Stream
    from birkhoff.sae.dictionary import Sae as Sae
    from birkhoff.sae.feature_edits import SaeReconstruct as SaeReconstruct
    from birkhoff.sae.feature_edits import SaeSet as SaeSet
    from birkhoff.sae.feature_index import FeatureMatch as FeatureMatch
    from birkhoff.sae.feature_probe import Feature as Feature
    from birkhoff.sae.features import FeatureEntry as FeatureEntry
    from birkhoff.sae.resolver import Attachment as Attachment
    from birkhoff.steering.attention_edits import AttentionEdit as AttentionEdit
    from birkhoff.steering.call import Call as Call
    from birkhoff.steering.expert_edits import ExpertSet as ExpertSet
    from birkhoff.steering.gated_edits import Gate as Gate
    from birkhoff.steering.vector_edits import Add as Add
    from birkhoff.steering.vector_edits import Clamp as Clamp
    from birkhoff.steering.vector_edits import Patch as Patch
    from birkhoff.steering.vector_edits import Project as Project
    from birkhoff.steering.vector_edits import Scale as Scale
    from birkhoff.steering.vector_file import SteeringVector as SteeringVector
    from birkhoff.trace import Trace as Trace
    from birkhoff.trace import TraceBatch as TraceBatch

__version__ = "0.1.0"
__all__ = [
    "ActBatch",
    "ActStream",
    "Acts",
    "Add",
    "Agreement",
    "Attachment",
    "AttentionEdit",
    "AttentionPattern",
    "AttentionReadout",
    "Attribution",
    "AttributionBatch",
    "BirkhoffError",
    "Call",
    "Capture",
    "Circuit",
    "Clamp",
    "Edge",
    "Engine",
    "EngineOptions",
    "Estimate",
    "ExpertSet",
    "Faithfulness",
    "Feature",
    "FeatureEntry",
    "FeatureMatch",
    "Gate",
    "Gradients",
    "HookSchema",
    "Lens",
    "LogProb",
    "Logit",
    "LogitAttribution",
    "LogitDiff",
    "Node",
    "Output",
    "Patch",
    "PatchSweep",
    "PatchSweepBatch",
    "Project",
    "Sae",
    "SaeReconstruct",
    "SaeSet",
    "SamplingParams",
    "Scale",
    "SiteRows",
    "SteeringVector",
    "Stream",
    "TokenEvent",
    "Trace",
    "TraceBatch",
    "load",
    "mhc",
    "plot",
]

_HOMES = {
    "ActBatch": "analysis.activations_store",
    "ActStream": "analysis.activations_store",
    "Acts": "capture.sinks.captured_rows",
    "Add": "steering.vector_edits",
    "Agreement": "analysis.attribution",
    "Attachment": "sae.resolver",
    "AttentionEdit": "steering.attention_edits",
    "AttentionPattern": "analysis.attention",
    "AttentionReadout": "analysis.attention",
    "Attribution": "analysis.attribution",
    "AttributionBatch": "analysis.attribution",
    "BirkhoffError": "errors",
    "Call": "steering.call",
    "Capture": "capture.spec.request",
    "Circuit": "analysis.circuit",
    "Clamp": "steering.vector_edits",
    "Edge": "analysis.circuit",
    "Engine": "api.engine",
    "EngineOptions": "api.options",
    "Estimate": "capture.spec.estimate",
    "ExpertSet": "steering.expert_edits",
    "Faithfulness": "analysis.circuit",
    "Feature": "sae.feature_probe",
    "FeatureEntry": "sae.features",
    "FeatureMatch": "sae.feature_index",
    "Gate": "steering.gated_edits",
    "Gradients": "analysis.gradients",
    "HookSchema": "hooks.schema",
    "Lens": "analysis.lens",
    "LogProb": "analysis.metric",
    "Logit": "analysis.metric",
    "LogitAttribution": "analysis.logit_attribution",
    "LogitDiff": "analysis.metric",
    "Node": "analysis.attribution",
    "Output": "output",
    "Patch": "steering.vector_edits",
    "PatchSweep": "analysis.patching",
    "PatchSweepBatch": "analysis.patching",
    "Project": "steering.vector_edits",
    "Sae": "sae.dictionary",
    "SaeReconstruct": "sae.feature_edits",
    "SaeSet": "sae.feature_edits",
    "SamplingParams": "engine.sampling_params",
    "Scale": "steering.vector_edits",
    "SiteRows": "hooks.plan",
    "SteeringVector": "steering.vector_file",
    "Stream": "output",
    "TokenEvent": "engine.request",
    "Trace": "trace",
    "TraceBatch": "trace",
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
