"""Random dictionaries, and a reference implementation in float64 NumPy, one row and one feature at a time."""

from __future__ import annotations

import numpy as np
import torch

from birkhoff.sae.clamps import ABSOLUTE, ADDITIVE, BOUND, MULTIPLY, ClampRow
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
    return Sae(
        draw(features, width) / width**0.5,
        draw(features) * 0.1,
        draw(features, width) / width**0.5,
        draw(width) * 0.2,
        activation=family,
        **{**extra, **more},
    )


def features_of(sae: Sae, row: np.ndarray) -> np.ndarray:
    """The feature activations of one row, in float64."""
    e, c = sae.encoder.double().numpy(), sae.encoder_bias.double().numpy()
    z = np.array([float(np.dot(e[i], row)) + c[i] for i in range(len(e))])
    name, parameters = (
        sae.activation.name,
        {k: v.double().numpy() for k, v in sae.activation.tensors().items()},
    )
    if name == "relu":
        return np.maximum(z, 0)
    if name in ("jumprelu", "batchtopk"):
        return np.array([z[i] if z[i] > parameters["threshold"][i] else 0.0 for i in range(len(z))])
    if name == "gated":
        return np.array(
            [
                max(parameters["scale"][i] * z[i] + parameters["shift"][i], 0) if z[i] > 0 else 0.0
                for i in range(len(z))
            ]
        )
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))[: sae.activation.k]
    kept = np.zeros_like(z)
    kept[order] = z[order]
    return np.maximum(kept, 0) if sae.activation.rectified else kept


def decoded(sae: Sae, f: np.ndarray) -> np.ndarray:
    return f @ sae.decoder.double().numpy() + sae.decoder_bias.double().numpy()


def clamped(sae: Sae, f: np.ndarray, clamps: dict[int, tuple]) -> np.ndarray:
    """The activations after clamps, by definition. A clamp is (kind, value, only_if_active); the value of a bound is a
    pair."""
    out = f.copy()
    for feature, (kind, value, gated) in clamps.items():
        live = f[feature] != 0 if sae.activation.name == "topk" else f[feature] > 0
        if gated and not live:
            continue
        if kind == "absolute":
            out[feature] = value
        elif kind == "additive":
            out[feature] = f[feature] + value
        elif kind == "multiply":
            out[feature] = f[feature] * value
        else:
            low, high = value
            out[feature] = min(
                max(f[feature], -np.inf if low is None else low), np.inf if high is None else high
            )
    return out


def plain(sae: Sae, v: torch.Tensor, row: ClampRow, error: str) -> torch.Tensor:
    """Splice rows `[n, d]` that share their clamps: all features dense, in float32, by definition."""
    f = sae.encode(v)
    new = f.clone()
    for feature, kind, low, high, gate in zip(row.features, row.kinds, row.lows, row.highs, row.gates):
        old = f[:, feature]
        values = {
            ABSOLUTE: torch.full_like(old, low),
            ADDITIVE: old + low,
            MULTIPLY: old * low,
            BOUND: torch.clamp(old, low, high),
        }
        active = old != 0 if sae.activation.whole_row else old > 0
        new[:, feature] = torch.where(active, values[kind], old) if gate else values[kind]
    lost = v.float() - sae.decode(f) if error == "keep" else 0.0
    return sae.decode(new) + lost


def changed_unit(sae: Sae, v: np.ndarray, clamps: dict[int, tuple], mode: str) -> np.ndarray:
    """One encoded row after a delta (`mode` "delta") or a reconstruction that keeps or drops the error ("keep",
    "drop")."""
    f = features_of(sae, v)
    new = clamped(sae, f, clamps)
    if mode == "delta":
        return v + sum(((new[i] - f[i]) * sae.decoder[i].double().numpy() for i in clamps), np.zeros_like(v))
    return decoded(sae, new) + (v - decoded(sae, f) if mode == "keep" else 0.0)


def changed_row(sae: Sae, x: np.ndarray, clamps: dict[int, tuple], mode: str, a=None, p=None, streams=None):
    """Edit one row of a site, [d] or [m, d], through the view of the dictionary."""
    view = sae.view
    if view == "single":
        return changed_unit(sae, x, clamps, mode)
    if view == "flat":
        return changed_unit(sae, x.reshape(-1), clamps, mode).reshape(x.shape)
    if view == "per_stream":
        chosen = range(len(x)) if streams is None else streams
        return np.stack(
            [changed_unit(sae, x[s], clamps, mode) if s in chosen else x[s] for s in range(len(x))]
        )
    v = x.mean(0) if view == "mean" else sum(a[s] * x[s] for s in range(len(x)))
    delta = changed_unit(sae, v, clamps, mode) - v
    if view == "mean" or sae.spread == "uniform":
        weights = np.ones(len(x))
    else:
        weights = p if sae.spread == "post" else a / (a * a).sum()
    return np.stack([x[s] + weights[s] * delta for s in range(len(x))])
