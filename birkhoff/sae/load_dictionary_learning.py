"""dictionary_learning's layout: `ae.pt`, a state_dict, with `config.json` beside it.

The kind of dictionary follows from the names of its tensors and from `dict_class` in the config. Gated and jumprelu
dictionaries multiply features by the norm of their decoder row after encoding; all but the newer relu and jumprelu
subtract the decoder's bias from the input. Both are folded in. Files are not trusted (`torch_file.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from birkhoff.errors import SaeFileError, quoted
from birkhoff.sae.fold import SaeWeights
from birkhoff.sae.stored_parts import read_json
from birkhoff.sae.torch_file import load_state_dict


def dictionary_learning_file(path: Path) -> Path | None:
    """The state_dict at a path, or None."""
    if path.is_file() and path.suffix == ".pt":
        return path
    return path / "ae.pt" if (path / "ae.pt").is_file() else None


def load_dictionary_learning(path: Path) -> dict[str, Any]:
    """Arguments of `Sae`."""
    state = load_state_dict(path)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    config = read_json(path.with_name("config.json")) if path.with_name("config.json").is_file() else {}
    trainer = config.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}
    kind = _kind(set(tensors), str(trainer.get("dict_class", "")), path)
    if kind == "jumprelu":
        w = _weights(tensors, "W_enc", "b_enc", "W_dec", "b_dec", path, transposed=True)
        return {"activation": "jumprelu", **w.decoder_norms(threshold_too=True).arguments()}
    if kind == "matryoshka":
        w = _weights(tensors, "W_enc", "b_enc", "W_dec", "b_dec", path, transposed=True).bias_on_input()
        return {**w.arguments(), "activation": "batchtopk", "threshold": _threshold(tensors, path)}
    if kind == "gated":
        w = _weights(tensors, "encoder.weight", "mag_bias", "decoder.weight", "decoder_bias", path)
        return {"activation": "gated", **w.bias_on_input().decoder_norms(threshold_too=False).arguments()}
    if kind == "newer relu":
        w = _weights(tensors, "encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias", path)
        return {"activation": "relu", **w.arguments()}
    bias = "bias" if kind == "relu" else "b_dec"
    w = _weights(tensors, "encoder.weight", "encoder.bias", "decoder.weight", bias, path).bias_on_input()
    if kind == "relu":
        return {"activation": "relu", **w.arguments()}
    if kind == "batchtopk":
        return {"activation": "batchtopk", "threshold": _threshold(tensors, path), **w.arguments()}
    # earlier versions have it in the config only
    k = int(tensors["k"]) if "k" in tensors else trainer.get("k")
    return {"activation": "topk", "k": k, "rectified": True, **w.arguments()}


def _threshold(tensors: dict[str, torch.Tensor], path: Path) -> float:
    threshold = float(tensors["threshold"]) if "threshold" in tensors else -1.0
    if threshold < 0:
        raise SaeFileError(
            f"{path}: its threshold is {threshold}, so training never set one. Train it to the end."
        )
    return threshold


def _kind(names: set[str], dict_class: str, path: Path) -> str:
    if {"W_enc", "W_dec", "threshold"} <= names:
        # The same names with different formulas.
        return "matryoshka" if "group_sizes" in names else "jumprelu"
    if {"r_mag", "gate_bias", "mag_bias"} <= names:
        return "gated"
    if "b_dec" in names:
        if "BatchTopK" in dict_class:
            return "batchtopk"
        if "TopK" in dict_class:
            return "topk"
        raise SaeFileError(
            f"{path} holds a top-k dictionary, and config.json beside it does not say which of the two kinds "
            f"(trainer.dict_class is {quoted(dict_class)}). Put its config.json there: the features differ."
        )
    if "bias" in names:
        return "relu"
    if "decoder.bias" in names:
        return "newer relu"
    raise SaeFileError(
        f"{path} holds {', '.join(sorted(names)[:6]) or 'no tensors'}, which is no dictionary we know."
    )


def _weights(
    tensors: dict[str, torch.Tensor],
    encoder: str,
    c: str,
    decoder: str,
    b: str,
    path: Path,
    transposed: bool = False,
) -> SaeWeights:
    missing = [name for name in (encoder, c, decoder, b) if name not in tensors]
    if missing:
        raise SaeFileError(f"{path} lacks {', '.join(missing)}.")
    e, w = tensors[encoder], tensors[decoder]
    if e.ndim != 2 or w.ndim != 2:
        raise SaeFileError(
            f"{path}: {encoder} has shape {tuple(e.shape)}, expected a matrix. Crosscoders are not read."
        )
    scale = tensors["r_mag"].double().exp() if "r_mag" in tensors else None
    threshold = tensors["threshold"] if transposed else None
    weights = SaeWeights(
        e.T if transposed else e,
        tensors[c],
        w if transposed else w.T,
        tensors[b],
        threshold,
        tensors.get("gate_bias"),
        scale,
    )
    return weights.double()
