"""Signals: small summaries of the streams at every token, cheap enough to return with a generation.

    engine.generate(prompt, signals=["res_mix", "stream_norm", "experts"]).signals

A frame belongs to one token and holds the requested signals by sublayer, in the order of the forward pass (attention of
layer 0, experts of layer 0, attention of layer 1, ...), S = 2 * layers in all:

    res_mix              [S][from][to]    the mixers
    pre_mix, post_mix    [S][m]           read-in and write-out weights
    head_mix             [m]              read-out weights of the head
    stream_norm          [S + 1][m]       norm of each stream; the last entry is the input of the head
    experts              [layers][k][2]   chosen experts and their weights
    cosine:NAME          [S + 1][m]       of each stream to a named vector
    blocks               [layers]         spans [from, to) of the compressed blocks that were attended to; null in a
                                          layer without block selection

"all" means all but the last two: a direction needs a name, and blocks have to be selected a second time.

Signals are a job of the request's plan, like a capture: they change no bit of the output, and frames come in order,
each when its token has been computed. The last token of an output is never computed and has no frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from birkhoff.errors import OptionError, quoted
from birkhoff.hooks.plan import Key, SiteRows

MIXES = {
    "res_mix": ("mhc_attn_res_mix", "mhc_ffn_res_mix"),
    "pre_mix": ("mhc_attn_pre_mix", "mhc_ffn_pre_mix"),
    "post_mix": ("mhc_attn_post_mix", "mhc_ffn_post_mix"),
}
STREAMS = ("mhc_streams_pre_attn", "mhc_streams_pre_mlp")
NAMES = ("res_mix", "pre_mix", "post_mix", "head_mix", "stream_norm", "experts")
COSINE, BLOCKS = "cosine:", "blocks"
Frame = dict[str, Any]


def check_signals(signals: Any, modules: Mapping[str, Any], width: int) -> tuple[str, ...]:
    """The requested names without duplicates; unknown names are refused. `width` is the width of one stream."""
    if signals is True or signals == "all":
        return NAMES
    if isinstance(signals, str) or not isinstance(signals, Sequence):
        raise OptionError(
            f"signals is {quoted(signals)}, expected a list of {', '.join(NAMES)}, {BLOCKS}, or 'all'."
        )
    for index, name in enumerate(signals):
        if isinstance(name, str) and name.startswith(COSINE):
            known = name[len(COSINE) :]
            if known not in modules:
                registered = ", ".join(sorted(modules)) or "none"
                raise OptionError(
                    f"signals[{index}]: there is no vector named {quoted(known)}; there are: {registered}."
                )
            if hasattr(modules[known], "parts"):
                raise OptionError(
                    f"signals[{index}]: {quoted(known)} has vectors of several hooks, layers or phases, expected "
                    "a module of one vector."
                )
            if direction(modules[known]).shape[-1] % width:
                raise OptionError(
                    f"signals[{index}]: {quoted(known)} is no vector of streams of {width} numbers."
                )
        elif name not in NAMES and name != BLOCKS:
            known = ", ".join((*NAMES, BLOCKS))
            raise OptionError(f"signals[{index}] is {quoted(name)}, expected {known} or {COSINE}NAME.")
    return tuple(dict.fromkeys(signals))


def direction(vector: Any) -> torch.Tensor:
    """A named vector as a tensor; the mean over layers if it has several."""
    tensor = vector.tensor() if hasattr(vector, "tensor") else torch.as_tensor(vector)
    return tensor.float().reshape(-1, tensor.shape[-1]).mean(0) if tensor.ndim > 1 else tensor.float()


class SignalJob:
    """The frames of one request. `take` returns those completed since the last call.

    `others` are rows that another job receives and passes on through `put`."""

    after = False

    def __init__(
        self,
        names: Sequence[str],
        num_layers: int,
        modules: Mapping[str, Any] | None = None,
        others: Sequence[Key] = (),
    ):
        self.names = tuple(names)
        self._layers = num_layers
        self._others = tuple(others)
        self._directions = {
            name: direction((modules or {})[name[len(COSINE) :]])
            for name in self.names
            if name.startswith(COSINE)
        }
        keys: list[Key] = []
        for name in self.names:
            if name in MIXES:
                keys += [(hook, layer) for layer in range(num_layers) for hook in MIXES[name]]
        if "head_mix" in self.names:
            keys.append(("mhc_head_mix", num_layers - 1))
        if "experts" in self.names:
            keys += [("moe_topk", layer) for layer in range(num_layers)]
        if "stream_norm" in self.names or self._directions:
            keys += [(hook, layer) for layer in range(num_layers) for hook in STREAMS]
            keys.append(("mhc_streams_final", num_layers - 1))
        self.keys = tuple(keys)
        self._open: dict[int, tuple[Frame, set[Key]]] = {}
        self._done: list[Frame] = []
        self.frames: list[Frame] = []  # all frames so far, for callers that wait for the end

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        return range(len(token_ids))

    def open(self) -> None:
        pass

    def deliver(self, rows: SiteRows) -> None:
        self._fill(rows, self._values(rows))

    def put(self, rows: SiteRows, name: str, layer: int, values: Sequence[Any]) -> None:
        """Add values that another job computed from these rows."""
        self._fill(rows, {name: (layer, values)})

    def _fill(self, rows: SiteRows, values: Mapping[str, tuple[int | None, Sequence[Any]]]) -> None:
        for index, (position, token) in enumerate(zip(rows.positions, rows.token_ids)):
            frame, missing = self._open.setdefault(
                position, ({"position": position, "token_id": token}, {*self.keys, *self._others})
            )
            for name, (sublayer, numbers) in values.items():
                if sublayer is None:
                    frame[name] = numbers[index]
                else:
                    frame.setdefault(name, [None] * self._length(name))[sublayer] = numbers[index]
            missing.discard((rows.hook, rows.layer))
            if not missing:
                del self._open[position]
                self._done.append(frame)

    def close(self, finish_reason: str, num_tokens: int) -> None:
        self._open.clear()  # a cancelled step may leave an incomplete frame

    def take(self) -> list[Frame]:
        """New frames, in order of position."""
        fresh = sorted(self._done, key=lambda frame: frame["position"])
        self._done = []
        self.frames += fresh
        return fresh

    def _length(self, name: str) -> int:
        return {"experts": self._layers, BLOCKS: self._layers}.get(
            name, 2 * self._layers + (name not in MIXES)
        )

    def _values(self, rows: SiteRows) -> dict[str, tuple[int | None, Sequence[Any]]]:
        """The values in these rows, by signal: the index in the frame, and the numbers of each row."""
        tensor, at = rows.tensor.float(), 2 * rows.layer
        for name, (attn, ffn) in MIXES.items():
            if rows.hook in (attn, ffn):
                return {name: (at + (rows.hook == ffn), _rounded(tensor))}
        if rows.hook == "mhc_head_mix":
            return {"head_mix": (None, _rounded(tensor))}
        if rows.hook == "moe_topk":
            return {"experts": (rows.layer, _rounded(tensor))}
        index = {"mhc_streams_pre_attn": at, "mhc_streams_pre_mlp": at + 1}.get(rows.hook, 2 * self._layers)
        values: dict[str, tuple[int | None, Sequence[Any]]] = {}
        norms = tensor.norm(dim=-1)  # [rows, m]
        if "stream_norm" in self.names:
            values["stream_norm"] = (index, _rounded(norms))
        for name, vector in self._directions.items():
            each = vector.view(-1, tensor.shape[-1])  # one direction for all streams, or one per stream
            along = (tensor * each).sum(-1) / (norms * each.norm(dim=-1)).clamp_min(1e-30)
            values[name] = (index, _rounded(along))
        return values


def _rounded(tensor: torch.Tensor) -> list[Any]:
    """Nested lists of numbers with six significant digits: enough for plots, at a third of the bytes."""
    values = tensor.numpy().astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = np.where(values == 0, 0.0, 5 - np.floor(np.log10(np.abs(values))))
    scale = 10.0 ** np.clip(np.nan_to_num(digits, nan=0.0, posinf=0.0, neginf=0.0), -30, 30)
    rounded: list[Any] = (np.round(values * scale) / scale).tolist()
    return rounded


def signal_number(name: str, value: Any) -> float:
    """One number for the value of a signal at a token, for colours and plots (see `Output.values`)."""
    if name == BLOCKS:
        raise OptionError(f"{BLOCKS} are spans of text, not numbers. Choose another signal.")
    numbers = np.asarray(value, np.float64)
    if name == "res_mix":
        streams = numbers.shape[-1]
        return float(1 - numbers.trace(axis1=-2, axis2=-1).mean() / streams)
    if name == "stream_norm":
        return float(numbers[-1].mean())
    if name in ("head_mix", "experts"):
        weights = numbers if name == "head_mix" else numbers[..., 1]
        shares = weights / weights.sum(-1, keepdims=True)
        return float(-(shares * np.log(np.maximum(shares, 1e-12))).sum(-1).mean())
    return float(numbers.mean())
