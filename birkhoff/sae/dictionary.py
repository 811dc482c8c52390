"""`Sae`: one dictionary of features, as checked tensors.

For a row x of width d, with encoder rows e_i, biases c_i, decoder rows w_i and bias b:

    z_i = e_i . x + c_i        f_i = activation(z)_i        x^ = sum_i f_i w_i + b

Everything is float32 and checked on construction: shapes agree, all numbers are finite. What trainers do around
these (subtracting b from the input, scaling rows, decoder norms) is folded into e, c, w, b by the file loaders, so
the formulas above are the only form, except that a dictionary may `normalize` every row first (`row_norm.py`). `hook`,
`layer` and `view` are the rows of a model it was trained on; `labels` are names of features, `x_max` the largest
activation seen of each.

A dictionary may hold the rows of some features only (`feature_ids`): single features of it can be read and changed, and
nothing can be reconstructed from it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.functional import linear

from birkhoff import notebook
from birkhoff.errors import SaeError, did_you_mean, quoted
from birkhoff.option_checks import as_int
from birkhoff.sae.activations import Activation, make, per_feature
from birkhoff.sae.row_norm import NORMS, normalize_rows

if TYPE_CHECKING:
    from birkhoff.sae.feature_index import FeatureIndex

VIEWS = ("single", "flat", "per_stream", "read", "mean")
SPREADS = ("read", "post", "uniform")


class Sae:
    """`encoder` and `decoder` are `[F, d]`, one row per feature. Immutable by convention."""

    def __init__(
        self,
        encoder: Any,
        encoder_bias: Any,
        decoder: Any,
        decoder_bias: Any = None,
        *,
        activation: str = "relu",
        threshold: Any = None,
        k: int | None = None,
        scale: Any = None,
        shift: Any = None,
        rectified: bool = False,
        normalize: str = "none",
        hook: str | None = None,
        layer: int | None = None,
        view: str = "single",
        spread: str | None = None,
        labels: Mapping[int, str] | None = None,
        x_max: Any = None,
        metadata: Mapping[str, Any] | None = None,
        feature_ids: Sequence[int] | None = None,
        total_features: int | None = None,
        transcodes: bool = False,
    ):
        """`activation` is relu, jumprelu (`threshold`), batchtopk (`threshold`), topk (`k`; `rectified`: negative
        activations become 0) or gated (`scale`, `shift`). `normalize` is what a row goes through first (`row_norm.py`).

        `hook`, `layer` and `view` name the rows it reads; `spread` is how a change of a row of view
        "read" is written back to the streams. With `feature_ids`, row i is feature `feature_ids[i]` of a dictionary of
        `total_features`; `labels`, `x_max` and other tensors go by row. `transcodes`: decoder rows may be of another
        width, because they reconstruct other rows (`crosscoder.py`)."""
        self.encoder = _matrix(encoder, "encoder")
        self.decoder = _matrix(decoder, "decoder")
        same = (
            len(self.encoder) == len(self.decoder) if transcodes else self.encoder.shape == self.decoder.shape
        )
        if not same:
            raise SaeError(
                f"the encoder is {tuple(self.encoder.shape)} and the decoder {tuple(self.decoder.shape)}; both hold "
                "one row per feature, [features, width]. Transpose the one that is stored the other way round."
            )
        self.encoder_bias = per_feature(
            0.0 if encoder_bias is None else encoder_bias, self.d_sae, "encoder_bias"
        )
        self.decoder_bias = _bias(decoder_bias, self.decoder.shape[1])
        self.activation: Activation = make(activation, self.d_sae, threshold, k, scale, shift, rectified)
        if normalize not in NORMS:
            raise SaeError(f"normalize is {quoted(normalize)}, expected one of {', '.join(NORMS)}.")
        self.normalize = normalize
        self.hook = _hook(hook)
        self.layer = _layer(layer)
        self.view, self.spread = _view(view, spread)
        self.labels: Mapping[int, str] = _labels(labels, self.d_sae)
        self.x_max = None if x_max is None else per_feature(x_max, self.d_sae, "x_max")
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.feature_ids = _feature_ids(feature_ids, self.d_sae, total_features)
        self.total_features = self.d_sae if total_features is None else total_features
        self.directory: Path | None = None  # where it was read from

    @cached_property
    def descriptions(self) -> FeatureIndex:
        """Labels, contexts and examples of features, from the `features.json` of its directory; empty without one."""
        from birkhoff.sae.feature_index import FeatureIndex  # imports this module

        return FeatureIndex({}) if self.directory is None else FeatureIndex.read(self.directory)

    @property
    def d_sae(self) -> int:
        """The number of features it has rows of."""
        return self.encoder.shape[0]

    @property
    def is_partial(self) -> bool:
        return self.feature_ids is not None

    def _repr_html_(self) -> str:
        labels = list(self.labels.items())
        facts = {
            "features": f"{self.d_sae:,}" + (f" of {self.total_features:,}" if self.is_partial else ""),
            "width": self.d_model,
            "site": None if self.hook is None else f"{self.hook}[{self.layer}]",
            "view": self.view,
            "activation": type(self.activation).__name__,
            "labels": f"{len(labels):,}" if labels else None,
            "for example": "; ".join(f"{self.feature_id(row)} {label}" for row, label in labels[:5]) or None,
        }
        return notebook.facts("Sparse autoencoder", facts)

    def feature_id(self, row: int) -> int:
        """The number of the feature of a row."""
        return row if self.feature_ids is None else self.feature_ids[row]

    def check_whole(self, what: str) -> None:
        """Refuse what needs every feature if this dictionary has rows of some only."""
        if self.is_partial:
            raise SaeError(
                f"{what} needs every feature, and this dictionary has the rows of {self.d_sae} of "
                f"{self.total_features} features. Load the whole dictionary, or set single features (SaeSet)."
            )

    @property
    def d_model(self) -> int:
        """The width of the rows it encodes: that of its view, which may differ from that of its hook."""
        return self.encoder.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in weight_tensors(self))

    def to(self, device: torch.device | str) -> Sae:
        """The same dictionary with its weights on a device, so that rows there are encoded without copying them."""
        moved = copy.copy(self)
        for name in ("encoder", "encoder_bias", "decoder", "decoder_bias", "activation"):
            setattr(moved, name, getattr(self, name).to(device))
        return moved

    def pre_activations(self, x: torch.Tensor) -> torch.Tensor:
        """z of rows `[.., d]`, float32 `[.., F]`."""
        rows = normalize_rows(_rows(x, self.d_model), self.normalize).rows
        return linear(rows, self.encoder.to(x.device), self.encoder_bias.to(x.device))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Features of rows `[.., d]`, float32 `[.., F]`."""
        return self.activation.to(x.device)(self.pre_activations(x))

    def decode(self, features: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        """Rows `[.., d]` from features `[.., F]`. A dictionary that normalises rows needs the rows `x` themselves, to
        undo it."""
        self.check_whole("a reconstruction")
        if x is None and self.normalize != "none":
            raise SaeError(
                f"this dictionary normalises every row ({self.normalize}): give the rows too, decode(features, x)."
            )
        out = _rows(features, self.d_sae) @ self.decoder.to(features.device) + self.decoder_bias.to(
            features.device
        )
        return out if x is None else normalize_rows(_rows(x, self.d_model), self.normalize).restore(out)

    def reconstruct(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x), x)

    def feature(self, name: int | str) -> int:
        """The row of a feature given by number or label."""
        if isinstance(name, str):
            rows = [row for row, label in self.labels.items() if label == name]
            labels = dict(self.labels)
            if not rows:
                labels = {row: label for row in range(self.d_sae) if (label := self.label(row)) is not None}
                rows = [row for row, label in labels.items() if label == name]
            if len(rows) == 1:
                return rows[0]
            self._refuse_label(name, rows, sorted(set(labels.values())))
        if as_int(name) is None or not 0 <= name < self.total_features:
            raise SaeError(
                f"feature {quoted(name)} does not exist: this dictionary has 0..{self.total_features - 1}."
            )
        if self.feature_ids is None:
            return name
        if name not in self.feature_ids:
            some = ", ".join(map(str, self.feature_ids[:8])) + (", ..." if self.d_sae > 8 else "")
            raise SaeError(
                f"feature {name} has no row here: these files have {self.d_sae} of {self.total_features} features "
                f"({some})."
            )
        return self.feature_ids.index(name)

    def label(self, row: int) -> str | None:
        """The label of the feature of a row: a given one, else that of its description; None without either."""
        if row in self.labels:
            return self.labels[row]
        entry = self.descriptions.get(self.feature_id(row))
        return None if entry is None else entry.label or None

    def _refuse_label(self, name: str, rows: Sequence[int], labels: Sequence[str]) -> NoReturn:
        if rows:
            numbers = [self.feature_id(row) for row in rows]
            raise SaeError(
                f"{len(rows)} features are labelled {quoted(name)} ({numbers[:4]}). Give the number."
            )
        known = ", ".join(map(quoted, labels)) if len(labels) <= 8 else f"{len(labels)} others"
        raise SaeError(
            f"no feature is labelled {quoted(name)}; labels: {known or 'none'}.{did_you_mean(name, labels)} Give a "
            "label or a number; search_features and birkhoff sae search find labels by word."
        )

    @cached_property
    def digest(self) -> str:
        """128-bit digest of what it computes and where, as hex; labels and metadata are not included."""
        state = hashlib.sha256(b"birkhoff sae 1")
        fields = [
            self.hook,
            self.layer,
            self.view,
            self.spread,
            self.activation.name,
            tuple(self.encoder.shape),
            getattr(self.activation, "k", None),
            getattr(self.activation, "rectified", None),
        ]
        if self.is_partial:
            fields += [self.feature_ids, self.total_features]
        if self.normalize != "none":
            fields.append(self.normalize)
        state.update(repr(fields).encode())
        for tensor in weight_tensors(self):
            state.update(tensor.contiguous().numpy().data)
        return state.hexdigest()[:32]

    def at(self, hook: str, layer: int, view: str | None = None, spread: str | None = None) -> Sae:
        """The same dictionary at another site; the weights are shared."""
        other = object.__new__(Sae)
        other.__dict__.update({name: value for name, value in vars(self).items() if name != "digest"})
        other.hook = _hook(hook)
        other.layer = _layer(layer)
        other.view, other.spread = _view(
            view or self.view, self.spread if view is None and spread is None else spread
        )
        return other

    @staticmethod
    def load(
        path: str | Path,
        hook: str | None = None,
        layer: int | None = None,
        view: str | None = None,
        spread: str | None = None,
        *,
        centered: bool | None = None,
        input_scale: float | None = None,
    ) -> Sae:
        """Read a dictionary from files of SAELens, Gemma Scope, dictionary_learning, or our manifest; see
        `docs/sae.md`. `path` may be a name in the hub cache: `org/name/folder`, or a published dictionary such as
        `gpt2-small-res-jb/blocks.8.hook_resid_pre`; `nano` is the one that ships with that model.

        `centered` and `input_scale` say what some files of SAELens leave out: that rows had their mean removed, and
        the factor they were multiplied by. Published dictionaries bring them."""
        from birkhoff.sae.files import load_named, only_one  # files.py imports this module

        site = {"hook": hook, "layer": layer, "view": view, "spread": spread}
        return only_one(load_named(path, site, centered, input_scale), path)

    def save(self, path: str | Path, layout: str = "saelens") -> Path:
        """Write a directory in the layout `saelens` or `manifest` (our own); returns the directory."""
        from birkhoff.sae.files import save_one

        return save_one(self, Path(path), layout)

    def __repr__(self) -> str:
        site = "no site" if self.hook is None else f"{self.hook}[{self.layer}]"
        return f"Sae({self.d_sae} {self.activation.name} features of {self.d_model}, {site}, {self.view})"


def weight_tensors(weights: Any) -> list[torch.Tensor]:
    """All tensors of an `Sae` or of a copy on a device."""
    names = ("encoder", "encoder_bias", "decoder", "decoder_bias")
    return [*(getattr(weights, name) for name in names), *weights.activation.tensors().values()]


def _matrix(value: Any, name: str) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value).detach().float().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise SaeError(f"{name} is {quoted(value)}, expected a matrix [features, width].") from None
    if tensor.ndim != 2 or not tensor.numel():
        raise SaeError(
            f"{name} has shape {tuple(tensor.shape)}, expected [features, width], neither of them 0."
        )
    if not tensor.isfinite().all():
        feature, column = (~tensor.isfinite()).nonzero()[0].tolist()
        raise SaeError(
            f"{name}[{feature}, {column}] is {float(tensor[feature, column])}, expected finite numbers. "
            "Training that diverged leaves such weights: take an earlier checkpoint."
        )
    return tensor.contiguous()


def _bias(value: Any, width: int) -> torch.Tensor:
    tensor = torch.zeros(width) if value is None else torch.as_tensor(value).detach().float().cpu().clone()
    if tuple(tensor.shape) != (width,):
        raise SaeError(
            f"decoder_bias has shape {tuple(tensor.shape)}, expected ({width},), the width of a row."
        )
    if not tensor.isfinite().all():
        raise SaeError("decoder_bias holds numbers that are not finite. Take an earlier checkpoint.")
    return tensor


def _rows(x: torch.Tensor, width: int) -> torch.Tensor:
    if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[-1] != width == x.shape[-2] * x.shape[-1]:
        x = x.flatten(-2)  # streams [..., m, d] of a dictionary of all of them
    if not isinstance(x, torch.Tensor) or x.ndim < 1 or x.shape[-1] != width:
        seen = f"rows of {x.shape[-1]}" if isinstance(x, torch.Tensor) and x.ndim else quoted(x)
        raise SaeError(f"got {seen}, this dictionary works on tensors whose last dimension is {width}.")
    return x.float()


def _hook(hook: Any) -> str | None:
    if hook is not None and (not isinstance(hook, str) or not hook):
        raise SaeError(f"hook is {quoted(hook)}, expected the name of a hook.")
    return hook


def _layer(layer: Any) -> int | None:
    if layer is None:
        return None
    index = as_int(layer)
    if index is None:
        raise SaeError(f"layer is {quoted(layer)}, expected a whole number.")
    return index


def _view(view: Any, spread: Any) -> tuple[str, str | None]:
    if view not in VIEWS:
        raise SaeError(f"view is {quoted(view)}, expected one of {', '.join(VIEWS)}.")
    if view == "read" and spread not in SPREADS:
        raise SaeError(
            f"view 'read' writes back to several streams and spread is {quoted(spread)}: say how, with one of "
            f"{', '.join(SPREADS)}."
        )
    if view != "read" and spread is not None:
        raise SaeError(f"spread is {quoted(spread)}, but only view 'read' has a spread. Leave it out.")
    return view, spread


def _feature_ids(ids: Any, rows: int, total: Any) -> tuple[int, ...] | None:
    if ids is None:
        return None
    checked = tuple(ids)
    if as_int(total) is None or len(checked) != rows or len(set(checked)) != rows:
        raise SaeError(
            f"{rows} rows have {len(set(checked))} different features of {quoted(total)}, expected one for each row."
        )
    for feature in checked:
        if as_int(feature) is None or not 0 <= feature < total:
            raise SaeError(
                f"there is a row of feature {quoted(feature)}, expected numbers from 0 to {total - 1}."
            )
    return checked


def _labels(labels: Any, features: int) -> Mapping[int, str]:
    if labels is None:
        return {}
    if not isinstance(labels, Mapping):
        raise SaeError(f"labels is {quoted(labels)}, expected a mapping from feature numbers to texts.")
    for feature, label in labels.items():
        if as_int(feature) is None or not 0 <= feature < features:
            raise SaeError(
                f"labels names feature {quoted(feature)}, expected a number from 0 to {features - 1}."
            )
        if not isinstance(label, str) or not label:
            raise SaeError(f"the label of feature {feature} is {quoted(label)}, expected a text.")
    return dict(labels)
