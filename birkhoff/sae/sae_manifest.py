"""Our own layout: `manifest.json` and one safetensors file for each site.

    {"d_model", "d_sae", "activation", "activation_params", "layers": [[layer, hook], ...], "clampable_features": [...],
     "view", "spread"}
    layer_{i}_{hook}.safetensors: encoder_weight, encoder_bias, decoder_weight [F, d]; decoder_bias; threshold, scale,
     shift, x_max if it has them

`view` defaults to "single". `activation_params` holds `k` and `rectified` of top-k dictionaries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from birkhoff.errors import SaeError, SaeFileError, quoted
from birkhoff.sae.activations import TopK
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.load_saelens import read_json, read_labels, read_tensors, save_labels
from birkhoff.small_file import MANIFEST_BYTES

MANIFEST = "manifest.json"
_FIELDS = (
    "d_model",
    "d_sae",
    "activation",
    "activation_params",
    "layers",
    "clampable_features",
    "view",
    "spread",
)


def load_manifest(path: Path) -> list[Sae]:
    """One dictionary per site, all of the same shape."""
    manifest = read_json(path / MANIFEST, MANIFEST_BYTES)
    where = path / MANIFEST
    unknown = sorted(set(manifest) - {*_FIELDS, "metadata"})
    missing = [name for name in (*_FIELDS[:3], "layers") if name not in manifest]
    if unknown or missing:
        problem = f"has the unknown field {quoted(unknown[0])}" if unknown else f"lacks {', '.join(missing)}"
        raise SaeFileError(f"{where} {problem}; a manifest has {', '.join(_FIELDS)}.")
    layers = manifest["layers"]
    options = manifest.get("activation_params") or {}
    if not isinstance(layers, list) or not layers or not all(_is_site(site) for site in layers):
        raise SaeFileError(f"{where}: layers is {quoted(layers)}, expected a list of [layer, hook].")
    if not isinstance(options, dict) or not set(options) <= {"k", "rectified", "threshold"}:
        raise SaeFileError(
            f"{where}: activation_params is {quoted(options)}, expected k, rectified or threshold."
        )
    labels = read_labels(path)
    saes = []
    for layer, hook in layers:
        file = path / f"layer_{layer}_{hook}.safetensors"
        tensors = read_tensors(file)
        missing = [
            name for name in ("encoder_weight", "encoder_bias", "decoder_weight") if name not in tensors
        ]
        if missing:
            raise SaeFileError(f"{file} lacks {', '.join(missing)}.")
        shape = tuple(tensors["encoder_weight"].shape)
        if shape != (manifest["d_sae"], manifest["d_model"]):
            raise SaeFileError(
                f"{file}: the encoder is {shape}, the manifest says ({manifest['d_sae']}, {manifest['d_model']})."
            )
        optional: dict[str, Any] = {
            name: tensors[name] for name in ("scale", "shift", "threshold", "x_max") if name in tensors
        }
        saes.append(
            Sae(
                tensors["encoder_weight"],
                tensors["encoder_bias"],
                tensors["decoder_weight"],
                tensors.get("decoder_bias"),
                activation=manifest["activation"],
                hook=hook,
                layer=layer,
                view=manifest.get("view", "single"),
                spread=manifest.get("spread"),
                labels=labels,
                metadata=manifest.get("metadata"),
                **(options | optional),
            )
        )
    return saes


def save_manifest(saes: Sequence[Sae], path: Path, clampable: Sequence[int] | None = None) -> None:
    """Write the dictionaries of one module, which may differ in their site and weights only."""
    first = saes[0]

    def shape(sae: Sae) -> tuple[Any, ...]:
        k = getattr(sae.activation, "k", None)
        rectified = getattr(sae.activation, "rectified", None)
        return (
            sae.d_sae,
            sae.d_model,
            sae.activation.name,
            k,
            rectified,
            sae.view,
            sae.spread,
            dict(sae.labels),
        )

    for sae in saes:
        if sae.hook is None or sae.layer is None:
            raise SaeError(
                f"{sae} says no site, and a manifest names one for each. Place it with sae.at(hook, layer)."
            )
        if shape(sae) != shape(first):
            raise SaeError(
                f"{sae} and {first} differ in more than their site, and a manifest describes them together."
            )
    top = first.activation
    options = {"k": top.k, "rectified": top.rectified} if isinstance(top, TopK) else {}
    manifest: dict[str, Any] = {
        "d_model": first.d_model,
        "d_sae": first.d_sae,
        "activation": first.activation.name,
        "activation_params": options,
        "layers": [[sae.layer, sae.hook] for sae in saes],
        "view": first.view,
    }
    if first.spread is not None:
        manifest["spread"] = first.spread
    if clampable is not None:
        manifest["clampable_features"] = sorted(clampable)
    if first.metadata:
        manifest["metadata"] = first.metadata
    path.mkdir(parents=True, exist_ok=True)
    for sae in saes:
        tensors = {
            "encoder_weight": sae.encoder,
            "encoder_bias": sae.encoder_bias,
            "decoder_weight": sae.decoder,
            "decoder_bias": sae.decoder_bias,
            **sae.activation.tensors(),
        }
        if sae.x_max is not None:
            tensors["x_max"] = sae.x_max
        save_file(tensors, path / f"layer_{sae.layer}_{sae.hook}.safetensors")
    save_labels(first, path)
    (path / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def clampable_features(path: Path) -> list[int] | None:
    """The features that a manifest allows to be clamped; None if it has no such list."""
    features = (
        read_json(path / MANIFEST, MANIFEST_BYTES).get("clampable_features")
        if (path / MANIFEST).is_file()
        else None
    )
    if features is None:
        return None
    if not isinstance(features, list) or any(type(feature) is not int for feature in features):
        raise SaeFileError(
            f"{path / MANIFEST}: clampable_features is {quoted(features)}, expected a list of numbers."
        )
    return features


def _is_site(site: Any) -> bool:
    return (
        isinstance(site, list)
        and len(site) == 2
        and type(site[0]) is int
        and site[0] >= 0
        and isinstance(site[1], str)
        and re.fullmatch("[a-z_]+", site[1]) is not None
    )
