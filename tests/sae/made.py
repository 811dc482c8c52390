"""Dictionaries for tests, and the mathematics again: float64 numpy, one row and one feature at a time."""

from __future__ import annotations

import numpy as np
import torch

from birkhoff.sae.dictionary import Sae

FAMILIES = ("relu", "jumprelu", "topk", "batchtopk", "gated")


def random_sae(family: str, features: int = 24, width: int = 16, seed: int = 0, **more) -> Sae:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g)

    extra: dict = {
        "relu": {},
        "jumprelu": {"threshold": draw(features).abs() * 0.5},
        "topk": {"k": max(1, features // 4)},
        "batchtopk": {"threshold": 0.4},
        "gated": {"scale": draw(features).exp(), "shift": draw(features) * 0.3},
    }[family]
    return Sae(draw(features, width) / width**0.5, draw(features) * 0.1, draw(features, width) / width**0.5,
               draw(width) * 0.2, activation=family, **{**extra, **more})  # fmt: skip


def features_of(sae: Sae, row: np.ndarray) -> np.ndarray:
    """f of one row, float64."""
    e, c = sae.encoder.double().numpy(), sae.encoder_bias.double().numpy()
    z = np.array([float(np.dot(e[i], row)) + c[i] for i in range(len(e))])
    name, numbers = sae.activation.name, {k: v.double().numpy() for k, v in sae.activation.tensors().items()}
    if name == "relu":
        return np.maximum(z, 0)
    if name in ("jumprelu", "batchtopk"):
        return np.array([z[i] if z[i] > numbers["threshold"][i] else 0.0 for i in range(len(z))])
    if name == "gated":
        return np.array([max(numbers["scale"][i] * z[i] + numbers["shift"][i], 0) if z[i] > 0 else 0.0
                         for i in range(len(z))])  # fmt: skip
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))[: sae.activation.k]
    kept = np.zeros_like(z)
    kept[order] = z[order]
    return np.maximum(kept, 0) if sae.activation.rectified else kept


def decoded(sae: Sae, f: np.ndarray) -> np.ndarray:
    return f @ sae.decoder.double().numpy() + sae.decoder_bias.double().numpy()
