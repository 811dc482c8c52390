"""Our own layout: `manifest.json` and one safetensors file for each site.

    {"d_model", "d_sae", "activation", "activation_params", "layers": [[layer, hook], ...], "clampable_features": [...],
     "view", "spread", "normalize"}
    layer_{i}_{hook}.safetensors: encoder_weight, encoder_bias, decoder_weight [F, d]; decoder_bias; threshold, scale,
     shift, x_max if it has them

`view` defaults to "single", `normalize` to "none". `activation_params` holds `k` and `rectified` of top-k dictionaries.
Directories of vLLM's SAE steering have the same layout; theirs may name a `kind` and hold the rows of
`clampable_features` only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from birkhoff.atomic_file import save_tensors
from birkhoff.errors import SaeError, SaeFileError, quoted
from birkhoff.sae.activations import TopK
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.stored_parts import read_json, read_labels, read_tensors, save_labels
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
    "normalize",
)
_VLLM_FIELDS = ("kind", "weights_uri")
MODULE_KINDS = {"sae_delta": "delta", "sae_full_reconstruction": "full"}


def load_manifest(path: Path) -> list[Sae]:
    """One dictionary per site, all of the same shape."""
    return parse_manifest(
        read_json(path / MANIFEST, MANIFEST_BYTES),
        lambda layer, hook: read_tensors(path / f"layer_{layer}_{hook}.safetensors"),
        str(path / MANIFEST),
        read_labels(path),
    )


def parse_manifest(
    manifest: Mapping[str, Any],
    read: Callable[[int, str], Mapping[str, torch.Tensor]],
    where: str,
    labels: Mapping[int, str] | None = None,
) -> list[Sae]:
    """The dictionaries of a manifest. `read` returns the tensors of a site; `where` names the manifest in errors.

    Files of vLLM's SAE steering may have the rows of `clampable_features` only, in the order of that list."""
    _check_fields(manifest, where)
    layers = manifest["layers"]
    if not isinstance(layers, (list, tuple)) or not layers or not all(_is_site(site) for site in layers):
        raise SaeFileError(f"{where}: layers is {quoted(layers)}, expected a list of [layer, hook].")
    options = _activation_options(manifest, where)
    clampable = _clampable(manifest, where)
    saes = []
    for layer, hook in layers:
        site = f"the site {hook}[{layer}] of {where}"
        tensors = read(layer, hook)
        ids = _stored_features(tensors, (manifest["d_sae"], manifest["d_model"]), clampable, site)
        saes.append(_dictionary(manifest, tensors, hook, layer, ids, labels or {}, options))
    return saes


def _check_fields(manifest: Mapping[str, Any], where: str) -> None:
    unknown = sorted(set(manifest) - {*_FIELDS, *_VLLM_FIELDS, "metadata"})
    missing = [name for name in (*_FIELDS[:3], "layers") if name not in manifest]
    if unknown or missing:
        problem = f"has the unknown field {quoted(unknown[0])}" if unknown else f"lacks {', '.join(missing)}"
        raise SaeFileError(f"{where} {problem}; a manifest has {', '.join((*_FIELDS, *_VLLM_FIELDS))}.")
    if manifest.get("kind") not in (None, *MODULE_KINDS):
        raise SaeFileError(
            f"{where}: kind is {quoted(manifest['kind'])}, expected one of {', '.join(MODULE_KINDS)}."
        )


def _activation_options(manifest: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = manifest.get("activation_params") or {}
    options = dict(given) if isinstance(given, Mapping) else {"": given}  # refused below
    if not set(options) <= {"k", "rectified", "threshold"}:
        raise SaeFileError(
            f"{where}: activation_params is {quoted(options)}, expected k, rectified or threshold."
        )
    if isinstance(options.get("k"), float) and options["k"].is_integer():
        options["k"] = int(options["k"])  # vLLM's manifests hold floats
    return options


def _stored_features(
    tensors: Mapping[str, torch.Tensor], whole: tuple[int, int], clampable: list[int] | None, site: str
) -> list[int] | None:
    """The features whose rows a site's tensors hold, if these are the `clampable` ones only; None if they hold all.

    `whole` is the shape of the complete encoder."""
    lacks = [name for name in ("encoder_weight", "encoder_bias", "decoder_weight") if name not in tensors]
    if lacks:
        raise SaeFileError(f"{site} lacks {', '.join(lacks)}.")
    shape = tuple(tensors["encoder_weight"].shape)
    if shape == whole:
        return None
    if clampable and shape == (len(clampable), whole[1]):
        return clampable
    or_rows = "" if clampable is None else f", or ({len(clampable)}, {whole[1]}) for clampable_features"
    raise SaeFileError(f"{site}: the encoder is {shape}, the manifest says {whole}{or_rows}.")


def _dictionary(
    manifest: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    hook: str,
    layer: int,
    ids: list[int] | None,
    labels: Mapping[int, str],
    options: Mapping[str, Any],
) -> Sae:
    """The dictionary of one site. `ids`: the features it holds, None for all of them."""
    optional: dict[str, Any] = {
        name: tensors[name] for name in ("scale", "shift", "threshold", "x_max") if name in tensors
    }
    if ids is not None:
        labels = {row: labels[feature] for row, feature in enumerate(ids) if feature in labels}
        if "k" in options:
            optional["k"] = min(options["k"], len(ids))  # the k largest of the rows there are
    return Sae(
        tensors["encoder_weight"],
        tensors["encoder_bias"],
        tensors["decoder_weight"],
        tensors.get("decoder_bias"),
        activation=manifest["activation"],
        hook=hook,
        layer=layer,
        view=manifest.get("view", "single"),
        spread=manifest.get("spread"),
        normalize=manifest.get("normalize", "none"),
        labels=labels,
        metadata=manifest.get("metadata"),
        feature_ids=None if ids is None else list(ids),
        total_features=manifest["d_sae"] if ids is not None else None,
        **{**options, **optional},
    )


def module_kind(path: Path) -> str | None:
    """The kind of attachment that the manifest at `path` asks for: "delta" or "full"; None if there is none."""
    file = path / MANIFEST
    kind = read_json(file, MANIFEST_BYTES).get("kind") if file.is_file() else None
    return MODULE_KINDS.get(kind) if isinstance(kind, str) else None


def save_manifest(saes: Sequence[Sae], path: Path, clampable: Sequence[int] | None = None) -> None:
    """Write the dictionaries of one module, which may differ in their site and weights only."""
    first = saes[0]
    for sae in saes:
        if sae.hook is None or sae.layer is None:
            raise SaeError(
                f"{sae} says no site, and a manifest names one for each. Place it with sae.at(hook, layer)."
            )
        if _common_fields(sae) != _common_fields(first):
            raise SaeError(
                f"{sae} and {first} differ in more than their site, and a manifest describes them together."
            )
    path.mkdir(parents=True, exist_ok=True)
    for sae in saes:
        save_tensors(path / f"layer_{sae.layer}_{sae.hook}.safetensors", _tensors(sae))
    save_labels(first, path)
    manifest = _manifest(saes, clampable)
    (path / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _common_fields(sae: Sae) -> tuple[Any, ...]:
    """What the dictionaries of one module have in common."""
    return (
        sae.d_sae,
        sae.d_model,
        sae.activation.name,
        getattr(sae.activation, "k", None),
        getattr(sae.activation, "rectified", None),
        sae.view,
        sae.spread,
        sae.normalize,
        dict(sae.labels),
        sae.feature_ids,
        sae.total_features,
    )


def _manifest(saes: Sequence[Sae], clampable: Sequence[int] | None) -> dict[str, Any]:
    first = saes[0]
    top = first.activation
    manifest: dict[str, Any] = {
        "d_model": first.d_model,
        "d_sae": first.total_features,
        "activation": first.activation.name,
        "activation_params": {"k": top.k, "rectified": top.rectified} if isinstance(top, TopK) else {},
        "layers": [[sae.layer, sae.hook] for sae in saes],
        "view": first.view,
    }
    if first.spread is not None:
        manifest["spread"] = first.spread
    if first.normalize != "none":
        manifest["normalize"] = first.normalize
    if first.feature_ids is not None:
        manifest["clampable_features"] = list(first.feature_ids)
    elif clampable is not None:
        manifest["clampable_features"] = sorted(clampable)
    if first.metadata:
        manifest["metadata"] = first.metadata
    return manifest


def _tensors(sae: Sae) -> dict[str, torch.Tensor]:
    tensors = {
        "encoder_weight": sae.encoder,
        "encoder_bias": sae.encoder_bias,
        "decoder_weight": sae.decoder,
        "decoder_bias": sae.decoder_bias,
        **sae.activation.tensors(),
    }
    if sae.x_max is not None:
        tensors["x_max"] = sae.x_max
    return tensors


def clampable_features(path: Path) -> list[int] | None:
    """The features that a manifest allows to be clamped; None if it has no such list."""
    return (
        _clampable(read_json(path / MANIFEST, MANIFEST_BYTES), str(path / MANIFEST))
        if (path / MANIFEST).is_file()
        else None
    )


def _clampable(manifest: Mapping[str, Any], where: str) -> list[int] | None:
    features = manifest.get("clampable_features")
    if features is None:
        return None
    if not isinstance(features, list) or any(type(feature) is not int for feature in features):
        raise SaeFileError(f"{where}: clampable_features is {quoted(features)}, expected a list of numbers.")
    return features


def _is_site(site: Any) -> bool:
    return (
        isinstance(site, (list, tuple))
        and len(site) == 2
        and type(site[0]) is int
        and site[0] >= 0
        and isinstance(site[1], str)
        and re.fullmatch("[a-z_]+", site[1]) is not None
    )
