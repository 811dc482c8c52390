"""SAEs registered over HTTP: `POST /v1/steering/modules/register` with `kind` "sae_delta" or "sae_full_reconstruction".

The body describes the SAE as the manifest of vLLM's SAE steering does. Its weights come from a directory under
`--sae-root` (`weights_uri`), or with the body (`sae_weights`): packed tensors by file name of a site and by name. No
other file is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from birkhoff.errors import BirkhoffError, SaeFileError, SteeringError, quoted
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.sae_manifest import parse_manifest
from birkhoff.sae.stored_parts import read_tensors
from birkhoff.server.api_errors import bad_request
from birkhoff.server.body import StrictBody
from birkhoff.server.fields import PositiveInt
from birkhoff.steering.vector_encoding import unpacked_array

SiteName = Annotated[list[int | str], Field(min_length=2, max_length=2)]
FeatureId = Annotated[int, Field(ge=0, lt=2**31)]


class SaeManifestBody(StrictBody):
    """The manifest of an SAE. `clampable_features` may be set; files may hold only their rows."""

    d_model: PositiveInt
    d_sae: PositiveInt
    activation: Literal["relu", "jumprelu", "topk"]
    layers: Annotated[list[SiteName], Field(min_length=1, max_length=1024)]
    clampable_features: Annotated[list[FeatureId], Field(min_length=1, max_length=1 << 20)] | None = None
    activation_params: dict[str, float] | None = None
    weights_uri: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class SaeFields(StrictBody):
    """The fields of a module that is an SAE."""

    sae_manifest: SaeManifestBody | None = None
    sae_weights: dict[str, dict[str, Any]] | None = None


def read_saes(body: SaeFields, root: str) -> tuple[list[Sae], list[int] | None]:
    """The dictionaries of a body and the features that may be set. `root` is the directory of `weights_uri`."""
    manifest = body.sae_manifest
    if manifest is None:
        raise bad_request("sae_manifest is missing; this kind of module needs one.", "sae_manifest")
    if (manifest.weights_uri is None) == (body.sae_weights is None):
        raise bad_request(
            "say where the weights are, once: sae_manifest.weights_uri or sae_weights.",
            "sae_manifest.weights_uri" if manifest.weights_uri is None else "sae_weights",
        )
    fields = manifest.model_dump(exclude={"weights_uri"}, exclude_none=True)
    if body.sae_weights is not None:
        sites = {f"layer_{layer}_{hook}" for layer, hook in manifest.layers}
        unknown = sorted(set(body.sae_weights) - sites)
        if unknown:
            raise bad_request(
                f"sae_weights has {quoted(unknown[0])}, expected {', '.join(sorted(sites))}.", "sae_weights"
            )
        weights = body.sae_weights

        def read(layer: int, hook: str) -> Mapping[str, torch.Tensor]:
            return _unpacked(weights.get(f"layer_{layer}_{hook}", {}), f"sae_weights.layer_{layer}_{hook}")
    else:
        directory = _directory(str(manifest.weights_uri), root)

        def read(layer: int, hook: str) -> Mapping[str, torch.Tensor]:
            return read_tensors(directory / f"layer_{layer}_{hook}.safetensors")

    try:
        saes = parse_manifest(fields, read, "sae_manifest")
    except SaeFileError as error:
        raise bad_request(str(error), "sae_manifest", error.code) from None
    except BirkhoffError as error:
        raise bad_request(str(error), getattr(error, "path", None) or "sae_manifest", error.code) from None
    return saes, manifest.clampable_features


def _directory(uri: str, root: str) -> Path:
    where = "sae_manifest.weights_uri"
    if not root:
        raise bad_request(
            "this server reads no SAE files for calls. Start it with --sae-root, or send sae_weights.", where
        )
    base = Path(root).resolve()
    directory = (base / uri.removeprefix("file://")).resolve()
    if not directory.is_relative_to(base) or not directory.is_dir():
        raise bad_request(f"{quoted(uri)} is no directory under the server's --sae-root.", where)
    return directory


def _unpacked(raw: Mapping[str, Any], path: str) -> dict[str, torch.Tensor]:
    try:
        return {
            name: torch.from_numpy(unpacked_array(value, f"{path}.{name}").astype("float32"))
            for name, value in raw.items()
        }
    except SteeringError as error:
        raise bad_request(str(error), error.path, error.code) from None
