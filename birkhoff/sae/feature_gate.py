"""Gates by features: where a feature of an attached dictionary is above a threshold, as a probe of the row itself.

For activations that go by one column (relu, jumprelu, batchtopk, gated) "the feature is above t" is "its pre-activation
is above t'", and that is a component of the row along the feature's encoder row. So nothing else is encoded."""

from __future__ import annotations

from typing import Any

import torch

from birkhoff.errors import SaeError, quoted
from birkhoff.hooks.gating import SiteGate
from birkhoff.sae.activations import Gated, JumpRelu
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.registry import SaeRegistry
from birkhoff.sae.views import View


def feature_gate(
    registry: SaeRegistry, module: str, feature: Any, above: float, stream: int | None
) -> SiteGate:
    """The gate of a feature, by number or label, of a module at one site."""
    attached = registry[module]
    if len(attached.saes) > 1:
        sites = ", ".join(f"{hook}[{layer}]" for hook, layer in attached.saes)
        raise SaeError(f"{quoted(module)} has dictionaries at {sites}. Attach the one that gates by itself.")
    ((key, sae),) = attached.saes.items()
    if above < 0:
        raise SaeError(f"above is {above}, and features are at least 0. Give a threshold from 0.")
    if sae.activation.whole_row:
        raise SaeError(
            f"{quoted(module)} is a top-k dictionary: whether a feature is active depends on all others. Gate by a "
            "vector (its encoder row), or use a jumprelu or relu dictionary."
        )
    if sae.normalize != "none":
        raise SaeError(
            f"{quoted(module)} normalises rows ({sae.normalize}), which a gate does not. Gate by a vector."
        )
    row = sae.feature(feature)
    direction = _by_view(sae.encoder[row].float(), attached.hosts[key].view, stream, module)
    return SiteGate(key, direction, float(sae.encoder_bias[row]), _threshold(sae, row, above))


def _threshold(sae: Sae, row: int, above: float) -> float:
    """The pre-activation above which a feature is above `above`."""
    activation = sae.activation
    if isinstance(activation, JumpRelu):
        return max(above, float(activation.threshold[row]))
    if isinstance(activation, Gated):
        scale, shift = float(activation.scale[row]), float(activation.shift[row])
        if scale <= 0:
            raise SaeError("the feature falls as its gate rises. Gate by a vector.")
        return max((above - shift) / scale, 0.0)
    return above


def _by_view(encoder: torch.Tensor, view: View, stream: int | None, module: str) -> torch.Tensor:
    """The encoder row as a direction of the site's flat row."""
    if view.name == "per_stream":
        if stream is None or stream >= view.streams:
            raise SaeError(
                f"{quoted(module)} encodes every stream by itself: give the gate stream=0..{view.streams - 1}."
            )
        whole = encoder.new_zeros(view.streams, len(encoder))
        whole[stream] = encoder
        return whole.flatten()
    if stream is not None:
        raise SaeError(f"{quoted(module)} has the view {view.name!r}, which has no stream. Leave stream out.")
    if view.name == "mean":
        return (encoder / view.streams).repeat(view.streams)
    if view.name == "read":
        raise SaeError(
            f"{quoted(module)} encodes what the next sublayer reads, with weights that change from token to token. "
            "Attach a dictionary of another view, or gate by a vector."
        )
    return encoder
