"""Manifold-constrained hyper-connections as a standalone layer, for models other than V4.

A hyper-connection replaces the residual addition around one sublayer. A token carries `m` streams instead of one
residual vector. The layer reads one input from them, and writes the output of the sublayer back while it mixes the
streams with a nearly doubly stochastic matrix, `comb[from, to]`:

    streams = layer.init(x)                             # [..., d] -> [..., m, d]
    u, post, comb = layer.pre(streams)                  # [..., d], [..., m], [..., m, m]
    streams = layer.post(streams, sublayer(u), post, comb)
    out = layer.head(streams)                           # [..., d], once, at the end of the model

`init_state`, `pre_block`, `post_block` and `read_out` are other names of these four, as a layer-only port has them;
what that port computes differently is listed in `docs/mhc.md`.

The arithmetic is that of the V4 trunk: differentiable, in float32 whatever the dtype of the streams, for any leading
shape. The result of a token depends on its own streams only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from birkhoff.errors import (
    OptionError,
    TensorDtype,
    TensorMissing,
    TensorShape,
    TensorUnexpected,
    TensorValue,
)
from birkhoff.kernels import mhc
from birkhoff.option_checks import check_int

_TRIPLE = ("fn", "base", "scale")
_HEAD = ("head_fn", "head_base", "head_scale")
_PARTS = ("pre", "post", "res")
_SPLIT = tuple(f"{kind}_{part}" for kind in ("W", "S", "alpha") for part in _PARTS)
_STACKED = ("W", "S", "alpha")
ORDERS = ("pre_post_res", "pre_res_post")


class HyperConnection(nn.Module):
    """The hyper-connection of one sublayer, and a head that merges the streams.

    `sublayer` is the index of the sublayer in its model. All streams start as copies of one vector and would stay
    copies if every sublayer read and wrote them alike, so sublayer i is initialised to prefer stream i mod m.
    """

    def __init__(
        self,
        hidden: int,
        streams: int = 4,
        sinkhorn_iters: int = 20,
        eps: float = 1e-6,
        rms_eps: float = 1e-6,
        *,
        sublayer: int = 0,
    ):
        super().__init__()
        for name, value, least in (
            ("hidden", hidden, 1),
            ("streams", streams, 1),
            ("sinkhorn_iters", sinkhorn_iters, 1),
            ("sublayer", sublayer, 0),
        ):
            check_int(name, value, least)
        for name, size in (("eps", eps), ("rms_eps", rms_eps)):
            if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 < size < 1:
                raise OptionError(f"{name} is {size!r}, expected a small positive number such as 1e-6.")
        self.hidden = hidden
        self.streams = streams
        self.sinkhorn_iters = sinkhorn_iters
        self.eps = float(eps)
        self.rms_eps = float(rms_eps)
        self.sublayer = sublayer
        outputs, inputs = (2 + streams) * streams, streams * hidden
        self.fn = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(outputs, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))
        self.head_fn = nn.Parameter(torch.empty(streams, inputs, dtype=torch.float32))
        self.head_base = nn.Parameter(torch.empty(streams, dtype=torch.float32))
        self.head_scale = nn.Parameter(torch.empty(1, dtype=torch.float32))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise to near-identity mixing, with read and write weights that prefer one stream per sublayer."""
        m, preferred = self.streams, self.sublayer % self.streams
        for matrix in (self.fn, self.head_fn):
            matrix.normal_(std=matrix.shape[1] ** -0.5)  # unit RMS inputs give logits of unit size
        self.scale.fill_(0.5)
        self.head_scale.fill_(0.5)
        self.head_base.zero_()
        pre, post, mix = self.base.split((m, m, m * m))
        pre.fill_(-1.5)
        post.fill_(-0.5)
        pre[preferred], post[preferred] = 1.5, 1.0
        mix.copy_(3.0 * torch.eye(m).flatten())

    def init(self, x: torch.Tensor) -> torch.Tensor:
        """[..., d] -> streams [..., m, d], all copies of x."""
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise OptionError(f"x is {tuple(x.shape)}, expected [..., {self.hidden}].")
        return x.unsqueeze(-2).repeat_interleave(self.streams, dim=-2)

    def pre(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Streams [..., m, d] -> sublayer input [..., d], write-out weights [..., m], mixer [..., from, to]."""
        self._check_streams(streams)
        u, _, post, comb = mhc.read(
            streams, self.fn, self.base, self.scale, self.sinkhorn_iters, self.eps, self.rms_eps
        )
        return u, post, comb

    def post(
        self, streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """`post[k] * y + sum_j comb[j, k] * streams[j]` for every stream k; `streams` are the ones passed to `pre`."""
        self._check_streams(streams)
        lead, m = tuple(streams.shape[:-2]), self.streams
        for name, tensor, tail in (("y", y, (self.hidden,)), ("post", post, (m,)), ("comb", comb, (m, m))):
            if tuple(tensor.shape) != lead + tail:
                raise OptionError(
                    f"{name} is {tuple(tensor.shape)}, expected {lead + tail} beside streams "
                    f"{tuple(streams.shape)}: pass what `pre` returned for them."
                )
        return mhc.write(streams, y, post, comb)

    def head(self, streams: torch.Tensor) -> torch.Tensor:
        """Streams [..., m, d] -> one vector [..., d], with the weights of the head."""
        self._check_streams(streams)
        return mhc.head(streams, self.head_fn, self.head_base, self.head_scale, self.eps, self.rms_eps)[0]

    def init_state(self, x: torch.Tensor) -> torch.Tensor:
        """`init` by its name in the layer-only port."""
        return self.init(x)

    def pre_block(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`pre` by its name in the layer-only port. The mixer is `comb[from, to]`, and `eps` is added to the read-in
        weights after the sigmoid, as V4 does; the port does neither."""
        return self.pre(streams)

    def post_block(
        self, streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """`post` by its name in the layer-only port: `sum_j comb[j, k] * streams[j]`, where the port multiplies
        `comb @ streams`."""
        return self.post(streams, y, post, comb)

    def read_out(self, streams: torch.Tensor) -> torch.Tensor:
        """`head` by its name in the layer-only port, which returns stream 0; V4 mixes all streams."""
        return self.head(streams)

    def load_weights(
        self,
        weights: Mapping[str, torch.Tensor | float] | None = None,
        *,
        prefix: str = "",
        res_axes: Literal["from_to", "to_from"] = "from_to",
        order: Literal["pre_post_res", "pre_res_post"] | None = None,
        **named: torch.Tensor | float,
    ) -> HyperConnection:
        """Load weights from a mapping, from keywords, or both; nothing is changed unless everything fits.

        Released form: `fn [(2+m)m, m*d]` (rows: pre, post, comb row-major), `base [(2+m)m]`, `scale [3]`, and for the
        head `head_fn [m, m*d]`, `head_base [m]`, `head_scale [1]`; either triple may be given alone. With a `prefix`,
        only names that start with it are used: `layers.0.hc_attn_` selects a sublayer of a released checkpoint, `hc_`
        its head.

        Split form, as in standalone ports of the layer: `W_pre`, `W_post` `[m, m*d]`, `W_res [m*m, m*d]`, static
        biases `S_pre`, `S_post` `[m]`, `[1, m]` or `[m, 1]`, `S_res [m, m]` or `[m*m]`, and factors `alpha_*`, numbers
        or tensors of one element. A transposed `W [m*d, ...]` is recognised unless it is square.

        Stacked form: the same in one matrix `W [(2+m)m, m*d]`, `S [(2+m)m]` and `alpha [3]`. Its parts have the same
        sizes in either order, so `order` must say which it is: "pre_res_post" or "pre_post_res". With `fn`, `base` and
        `scale`, which are in the release's order, `order` is refused unless it is that one.

        `res_axes` is the order of `S_res` and of the rows of `W_res`: "to_from" if the weights were trained with
        `comb @ streams`.
        """
        if res_axes not in ("from_to", "to_from"):
            raise OptionError(f"res_axes is {res_axes!r}, expected 'from_to' or 'to_from'.")
        if order not in (None, *ORDERS):
            raise OptionError(f"order is {order!r}, expected one of {_join_names(ORDERS)}.")
        given: dict[str, Any] = {
            k.removeprefix(prefix): v for k, v in (weights or {}).items() if k.startswith(prefix)
        } | named
        forms = _forms_in(given, prefix)
        tensors = {
            name: _as_tensor(value) if name.startswith("alpha") else value for name, value in given.items()
        }
        for name, tensor in tensors.items():
            _check_numbers(name, tensor)
        if _TRIPLE in forms and order == "pre_res_post":
            raise OptionError(
                "order is 'pre_res_post', but fn, base and scale are in the release's order, pre_post_res. Name a "
                "stacked matrix of another order W, S and alpha."
            )
        ready = {name: tensors[name] for form in forms if form in (_TRIPLE, _HEAD) for name in form}
        if _STACKED in forms:
            ready |= self._merge_split_form(self._split_stacked_form(tensors, order), res_axes)
        elif _SPLIT in forms:
            ready |= self._merge_split_form(tensors, res_axes)
        for name, tensor in ready.items():
            if tensor.shape != getattr(self, name).shape:
                raise TensorShape(
                    f"{name} is {tuple(tensor.shape)}, expected {tuple(getattr(self, name).shape)} for "
                    f"{self.streams} streams of {self.hidden}."
                )
        with torch.no_grad():
            for name, tensor in ready.items():
                getattr(self, name).copy_(tensor)
        return self

    def _split_stacked_form(
        self, tensors: Mapping[str, torch.Tensor], order: str | None
    ) -> dict[str, torch.Tensor]:
        """The stacked form as the split form."""
        if order is None:
            raise OptionError(
                "W is stacked, and [pre; res; post] and [pre; post; res] have the same shape. Say which it is: "
                "order='pre_res_post' or order='pre_post_res'."
            )
        m, inputs = self.streams, self.streams * self.hidden
        outputs = (2 + m) * m
        matrix = _as_out_in("W", tensors["W"], outputs, inputs)
        for name, count in (("S", outputs), ("alpha", 3)):
            if tuple(tensors[name].shape) != (count,):
                raise TensorShape(f"{name} is {tuple(tensors[name].shape)}, expected ({count},).")
        parts = order.split("_")
        sizes = [m * m if part == "res" else m for part in parts]
        split: dict[str, torch.Tensor] = {}
        for part, rows, bias, factor in zip(
            parts, matrix.split(sizes), tensors["S"].split(sizes), tensors["alpha"]
        ):
            split |= {f"W_{part}": rows, f"S_{part}": bias, f"alpha_{part}": factor}
        return split

    def _merge_split_form(
        self, tensors: Mapping[str, torch.Tensor], res_axes: str
    ) -> dict[str, torch.Tensor]:
        """The split form as the released triple."""
        m, inputs = self.streams, self.streams * self.hidden
        rows = []
        biases = []
        factors = []
        for part, count in zip(_PARTS, (m, m, m * m)):
            matrix = _as_out_in(f"W_{part}", tensors[f"W_{part}"], count, inputs)
            bias, factor = tensors[f"S_{part}"], tensors[f"alpha_{part}"]
            shapes = [(count,), (m, m)] if part == "res" else [(count,), (1, count), (count, 1)]
            if tuple(bias.shape) not in shapes:
                raise TensorShape(
                    f"S_{part} is {tuple(bias.shape)}, expected {' or '.join(map(str, shapes))}."
                )
            if factor.numel() != 1:
                raise TensorShape(f"alpha_{part} is {tuple(factor.shape)}, expected a single number.")
            bias = bias.reshape(count)
            if part == "res" and res_axes == "to_from":
                matrix = matrix.reshape(m, m, inputs).transpose(0, 1).reshape(m * m, inputs)
                bias = bias.reshape(m, m).T.reshape(m * m)
            rows.append(matrix.float())
            biases.append(bias.float())
            factors.append(factor.reshape(1).float())
        return {"fn": torch.cat(rows), "base": torch.cat(biases), "scale": torch.cat(factors)}

    def _check_streams(self, streams: torch.Tensor) -> None:
        if streams.dim() < 2 or tuple(streams.shape[-2:]) != (self.streams, self.hidden):
            raise OptionError(
                f"streams are {tuple(streams.shape)}, expected [..., {self.streams}, {self.hidden}]; "
                "`init` makes them from a single vector."
            )

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, streams={self.streams}, sinkhorn_iters={self.sinkhorn_iters}"


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _forms_in(tensors: Mapping[str, object], prefix: str) -> list[tuple[str, ...]]:
    """The forms that these names make up; raises if one of them is incomplete."""
    unknown = sorted(set(tensors) - {*_TRIPLE, *_HEAD, *_SPLIT, *_STACKED})
    if unknown:
        raise TensorUnexpected(
            f"{_join_names(unknown)}: expected {_join_names(_TRIPLE + _HEAD)} or the split form "
            f"{_join_names(_SPLIT)}. Pass prefix= to pick from a whole checkpoint."
        )
    forms = [form for form in (_TRIPLE, _SPLIT, _STACKED, _HEAD) if any(name in tensors for name in form)]
    if not forms or len([form for form in forms if form is not _HEAD]) > 1:
        raise TensorMissing(
            f"got {_join_names(sorted(tensors))}, expected either {_join_names(_TRIPLE)} or {_join_names(_SPLIT)}, "
            f"and optionally {_join_names(_HEAD)}. Check the names and the prefix {prefix!r}."
        )
    missing = [name for form in forms for name in form if name not in tensors]
    if missing:
        raise TensorMissing(
            f"{_join_names(missing)} missing beside {_join_names(sorted(tensors))}: a form is loaded whole."
        )
    return forms


def _as_tensor(value: Any) -> Any:
    """A number as a tensor; anything else as it is."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return torch.tensor(float(value)) if is_number else value


def _check_numbers(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.element_size() < 2:
        seen = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TensorDtype(
            f"{name} is {seen}, expected a floating-point tensor; the release keeps it in float32."
        )
    if not torch.isfinite(tensor).all():
        raise TensorValue(
            f"{name} holds NaN or infinity, expected finite numbers. Check the file it came from."
        )


def _as_out_in(name: str, matrix: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """The matrix as [out, in]; transposed if its shape is [in, out]."""
    shape = tuple(matrix.shape)
    if shape == (outputs, inputs) == (inputs, outputs):
        raise TensorShape(
            f"{name} is square {shape}, so its orientation cannot be seen. Join the split form into "
            "fn, base and scale, rows being outputs, and load those."
        )
    if shape == (inputs, outputs):
        return matrix.T
    if shape != (outputs, inputs):
        raise TensorShape(
            f"{name} is {shape}, expected {(outputs, inputs)}, or {(inputs, outputs)} if transposed."
        )
    return matrix
