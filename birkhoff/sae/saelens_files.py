"""SAELens' layout, read and written: a directory with `cfg.json` and `sae_weights.safetensors`.

Reads standard, jumprelu, topk and gated dictionaries of its current (6.0) and earlier layouts. Scaling by an expected
norm and centred weights (`center_writing_weights`: rows without their mean) are folded in; normalisation of every row
by itself is kept (`row_norm.py`). The site follows from `hook_name`. Writes files that SAELens opens
unchanged. A batchtopk dictionary is written as the jumprelu it is after training, as SAELens itself does. Fields
that SAELens does not have (hook, layer and view in a model with several streams) are in the config's metadata under
`birkhoff`; labels and largest activations are in separate files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from birkhoff.atomic_file import save_tensors
from birkhoff.errors import SaeError, SaeFileError, quoted
from birkhoff.sae.activations import TopK
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.fold import SaeWeights
from birkhoff.sae.hook_names import site_of
from birkhoff.sae.stored_parts import read_json, read_labels, read_tensors, save_labels

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
SCALER = "activation_scaler.json"
STATISTICS = "birkhoff_statistics.safetensors"
_NORMS = {"layer_norm": "layer_norm", "constant_norm_rescale": "constant_norm"}
_KEPT = ("model_name", "hook_name", "prepend_bos", "context_size")
_ARCHITECTURES = {"standard": "relu", "jumprelu": "jumprelu", "topk": "topk", "gated": "gated"}


def is_saelens(path: Path) -> bool:
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


def load_saelens(
    path: Path, centered: bool | None = None, input_scale: float | None = None
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, int] | None]:
    """Arguments of `Sae` for the weights, the site in our own fields (`hook`, `layer`, `view`, ...), and the site that
    follows from the name of the tensor in the model.

    `centered` and `input_scale` are what some releases do not have in their files: whether the model's weights were
    centred, and the factor of normalize_activations 'expected_average_only_in'."""
    config = read_json(path / CONFIG)
    metadata = _object(config.get("metadata"))
    tensors = read_tensors(path / WEIGHTS)
    kind, k = _architecture(config, path)
    _check_head(config, metadata, tensors, path)
    weights = _stored_weights(tensors, kind, path)
    if config.get("rescale_acts_by_decoder_norm"):
        weights = weights.decoder_norms(threshold_too=False)
    if config.get("apply_b_dec_to_input", True):
        weights = weights.bias_on_input()
    normalize, factor = _normalization(config, path, input_scale)
    if factor is not None:
        weights = weights.input_scale(factor)
    if centered is None:
        options = metadata.get("model_from_pretrained_kwargs", config.get("model_from_pretrained_kwargs"))
        centered = bool(_object(options).get("center_writing_weights"))
    if centered:
        if normalize == "constant_norm":
            raise SaeFileError(
                f"{path / CONFIG}: rows of a model with centred weights that are scaled by their own norm are not "
                "read: the two cannot be folded together."
            )
        weights = weights.centered()
    arguments: dict[str, Any] = {"activation": kind, "normalize": normalize, **weights.arguments()}
    if kind == "topk":
        arguments |= {"k": k, "rectified": True}
    arguments["labels"] = read_labels(path)
    if (path / STATISTICS).is_file():
        arguments["x_max"] = read_tensors(path / STATISTICS).get("x_max")
    site = _object(metadata.get("birkhoff"))
    every = {**config, **metadata}
    every.setdefault("hook_name", config.get("hook_point"))
    kept = {name: every[name] for name in _KEPT if every.get(name) is not None}
    if centered:
        kept["centered"] = True
    return (
        arguments | {"metadata": kept | _object(site.pop("metadata", None))},
        site,
        site_of(every["hook_name"]),
    )


def _stored_weights(tensors: Mapping[str, torch.Tensor], kind: str, path: Path) -> SaeWeights:
    """The weights as stored, in float64, before anything is folded into them."""
    gated = kind == "gated"
    names = ["W_enc", "W_dec", "b_dec", *(("b_gate", "b_mag", "r_mag") if gated else ("b_enc",))]
    names += ["threshold"] if kind == "jumprelu" else []
    missing = [name for name in names if name not in tensors]
    if missing:
        raise SaeFileError(
            f"{path / WEIGHTS}: a {kind} dictionary needs {', '.join(missing)}, which the file lacks."
        )
    return SaeWeights(
        tensors["W_enc"].T,
        tensors["b_mag" if gated else "b_enc"],
        tensors["W_dec"],
        tensors["b_dec"],
        threshold=tensors.get("threshold") if kind == "jumprelu" else None,
        gate_bias=tensors["b_gate"] if gated else None,
        scale=tensors["r_mag"].double().exp() if gated else None,
    ).double()


def _check_head(
    config: dict[str, Any], metadata: dict[str, Any], tensors: dict[str, torch.Tensor], path: Path
) -> None:
    """Refuse what the formulas of `Sae` do not have: one head of many, and a factor per feature."""
    head = metadata.get("hook_head_index", config.get("hook_head_index", config.get("hook_point_head_index")))
    if head is not None:
        raise SaeFileError(
            f"{path / CONFIG}: hook_head_index is {quoted(head)}: it was trained on one attention head, which is no "
            "site of ours."
        )
    factor = tensors.get("scaling_factor")
    if config.get("finetuning_scaling_factor") and (
        factor is None or not torch.allclose(factor, torch.ones(()))
    ):
        raise SaeFileError(
            f"{path / CONFIG}: finetuning_scaling_factor is set, which we do not read. Fold it first."
        )


def save_saelens(sae: Sae, path: Path) -> None:
    """Write a dictionary in SAELens' layout; one that would mean something else there is refused."""
    sae.check_whole("SAELens' layout")
    if isinstance(sae.activation, TopK) and not sae.activation.rectified:
        raise SaeError(
            "SAELens' top-k sets what is below zero to zero, and this dictionary keeps it, so the files would mean "
            "something else there. Save with layout='manifest', or make it with rectified=True."
        )
    tensors = _saved_tensors(sae)
    config = _saved_config(sae)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_tensors(path / WEIGHTS, {name: tensor.contiguous() for name, tensor in tensors.items()})
    save_labels(sae, path)
    (path / STATISTICS).unlink(missing_ok=True)
    if sae.x_max is not None:
        save_tensors(path / STATISTICS, {"x_max": sae.x_max})


def _saved_tensors(sae: Sae) -> dict[str, torch.Tensor]:
    tensors = {
        "W_enc": sae.encoder.T,
        "W_dec": sae.decoder,
        "b_dec": sae.decoder_bias,
        "b_enc": sae.encoder_bias,
    }
    numbers = sae.activation.tensors()
    if sae.activation.name == "gated":
        if not (numbers["scale"] > 0).all():
            raise SaeError("a gated dictionary of SAELens has positive scales (it keeps their logarithm).")
        del tensors["b_enc"]
        tensors |= {
            "b_gate": sae.encoder_bias,
            "r_mag": numbers["scale"].log(),
            "b_mag": numbers["shift"] + numbers["scale"] * sae.encoder_bias,
        }
    elif "threshold" in numbers:
        if (numbers["threshold"] < 0).any():
            raise SaeError(
                "SAELens rectifies before it compares, and this dictionary has thresholds below zero."
            )
        tensors["threshold"] = numbers["threshold"]
    return tensors


def _saved_config(sae: Sae) -> dict[str, Any]:
    """SAELens' fields; our own are in `metadata.birkhoff`."""
    kind = sae.activation.name
    site = {"hook": sae.hook, "layer": sae.layer, "view": sae.view, "spread": sae.spread, "activation": kind}
    config: dict[str, Any] = {
        "architecture": {"relu": "standard", "batchtopk": "jumprelu"}.get(kind, kind),
        "d_in": sae.d_model,
        "d_sae": sae.d_sae,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": False,
        "normalize_activations": {ours: theirs for theirs, ours in _NORMS.items()}.get(sae.normalize, "none"),
        "reshape_activations": "none",
        "metadata": {
            "model_name": sae.metadata.get("model_name"),
            "hook_name": sae.metadata.get("hook_name") or _hook_name(sae),
            **{name: sae.metadata[name] for name in _KEPT[2:] if name in sae.metadata},
            "birkhoff": {**site, "metadata": sae.metadata},
        },
    }
    if isinstance(sae.activation, TopK):
        config |= {"k": sae.activation.k, "rescale_acts_by_decoder_norm": False}
    return config


def _architecture(config: dict[str, Any], path: Path) -> tuple[str, int | None]:
    architecture = config.get("architecture", "standard")
    activation = config.get("activation_fn", config.get("activation_fn_str", "relu"))  # earlier layouts
    options = _object(config.get("activation_fn_kwargs"))
    if architecture == "standard" and activation == "topk":
        architecture = "topk"
    known = isinstance(architecture, str) and architecture in _ARCHITECTURES
    if not known or activation not in ("relu", "topk"):
        raise SaeFileError(
            f"{path / CONFIG}: architecture {quoted(architecture)} with activation {quoted(activation)} "
            f"is not one we read; we read {', '.join(_ARCHITECTURES)}. A dictionary trained with another can often "
            "be exported as jumprelu by its trainer."
        )
    k = config.get("k", options.get("k")) if architecture == "topk" else None
    return _ARCHITECTURES[architecture], k


def _normalization(config: dict[str, Any], path: Path, input_scale: float | None) -> tuple[str, float | None]:
    """How every row is normalised by itself, and the factor that all rows are multiplied by, or None."""
    mode = config.get("normalize_activations", "none")
    if mode in ("none", False, None):
        return "none", None
    if isinstance(mode, str) and mode in _NORMS:
        return _NORMS[mode], None
    if mode not in ("expected_average_only_in", True):
        raise SaeFileError(
            f"{path / CONFIG}: normalize_activations is {quoted(mode)}, expected none, expected_average_only_in, "
            f"{' or '.join(_NORMS)}. Have SAELens fold it and save again."
        )
    if input_scale is not None:
        return "none", input_scale
    if not (path / SCALER).is_file():
        raise SaeFileError(
            f"{path / CONFIG}: rows were scaled by their expected norm, and the factor is not in {SCALER}. Give it: "
            "Sae.load(path, input_scale=...), or have SAELens fold it (fold_activation_norm_scaling_factor)."
        )
    factor = read_json(path / SCALER).get("scaling_factor")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
        raise SaeFileError(
            f"{path / SCALER}: scaling_factor is {quoted(factor)}, expected a positive number."
        )
    return "none", float(factor)


def _object(value: Any) -> dict[str, Any]:
    """A copy of an optional JSON object; empty if it is missing."""
    return dict(value) if isinstance(value, dict) else {}


def _hook_name(sae: Sae) -> str | None:
    return None if sae.hook is None else f"{sae.hook}.{sae.layer}"
