"""What a traced forward pass returns: the tensors of its hooks by (hook, layer), for one text or for several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import torch

from birkhoff import notebook
from birkhoff.capture.sinks.captured_rows import spans
from birkhoff.errors import SiteError, did_you_mean, quoted
from birkhoff.hooks.site_names import Address, address_of, counterpart, follow_alias, from_tool
from birkhoff.hooks.sites import BY_NAME
from birkhoff.option_checks import as_int
from birkhoff.result_file import FileParts, SavedResult, join_parts, site_name, site_of, split_parts

Other = TypeVar("Other")


class TensorsBySite(Mapping[Address, torch.Tensor]):
    """Tensors of one text by (hook, layer), ordered by layer, then as in the table of hooks.

    Keys may have aliases, negative layers and names of other tools; a hook alone gives its tensors stacked over their
    layers."""

    _absent, _holder, _name = "is not here", "This mapping", "tensors"  # words of its errors

    def __init__(self, tensors: Mapping[Address, torch.Tensor], num_layers: int, streams: bool = True):
        """`streams`: whether the model has several residual streams, which decides what names of other tools mean."""
        order = sorted(tensors, key=lambda address: (address[1], BY_NAME[address[0]].id))
        self._tensors = {address: tensors[address] for address in order}
        self.num_layers = num_layers
        self.streams = streams

    @property
    def hooks(self) -> list[str]:
        """The hooks, in the order of the keys."""
        return list(dict.fromkeys(hook for hook, _ in self._tensors))

    def layers(self, hook: str) -> list[int]:
        """The layers that have a tensor of a hook, ascending; empty if none has."""
        foreign = from_tool(hook, self.num_layers, self.streams)
        if foreign is not None:
            return [foreign[1]] if follow_alias(*foreign, self.num_layers) in self._tensors else []
        return [
            layer
            for layer in range(self.num_layers)
            if follow_alias(hook, layer, self.num_layers) in self._tensors
        ]

    def __iter__(self) -> Iterator[Address]:
        return iter(self._tensors)

    def _ipython_key_completions_(self) -> list[Address]:
        return list(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, key: object) -> bool:
        return (
            bool(self.layers(key))
            if isinstance(key, str)
            else address_of(key, self.num_layers, self.streams) in self._tensors
        )

    @overload
    def get(self, key: Address | str, /) -> torch.Tensor | None: ...
    @overload
    def get(self, key: Address | str, default: torch.Tensor | Other) -> torch.Tensor | Other: ...
    def get(self, key: Address | str, default: Other | None = None) -> torch.Tensor | Other | None:
        try:
            return self[key]
        except SiteError:
            return default

    def __getitem__(self, key: Address | str) -> torch.Tensor:
        if not isinstance(key, str):
            address = address_of(key, self.num_layers, self.streams)
            if address is None or address not in self._tensors:
                raise self._missing(key)
            return self._tensors[address]
        layers = self.layers(key)
        if not layers:
            raise self._missing(key)
        foreign = from_tool(key, self.num_layers, self.streams)
        if foreign is not None:
            return self[foreign]
        if key in BY_NAME and BY_NAME[key].once:
            return self[key, layers[0]]
        return torch.stack([self[key, layer] for layer in layers])

    def _missing(self, key: Any) -> SiteError:
        hook, layer = (*key, None)[:2] if isinstance(key, tuple) and key else (key, None)
        number, hint = as_int(layer), ""
        if isinstance(hook, str) and hook not in self.hooks:
            hint = counterpart(hook, self.streams) or did_you_mean(hook, self.hooks)
        elif number is not None and not -self.num_layers <= number < self.num_layers:
            hint = f" There is no layer {number}."
        last = self.num_layers - 1
        return SiteError(
            f"{quoted(key)} {self._absent}.{hint} {self._holder} holds {', '.join(sorted(self.hooks)) or 'nothing'}; "
            f"ask with {self._name}[hook, layer], layers 0..{last} (or from -{self.num_layers}), or {self._name}[hook] "
            "for all."
        )


class Trace(TensorsBySite, SavedResult):
    """The tensors of one text: a mapping from (hook, layer) to `[T, *row_shape]`.

        trace["mlp_out", 3]          [T, d]
        trace["mlp_out", -1]         the last layer
        trace["mlp_out"]             [layers, T, d]: stacked over the traced layers, see `layers`
        trace["blocks.3.hook_in"]    by the name of the tensor in TransformerLens
        trace.logits                 [T, vocab], next-token logits at every position

    Keys are ordered by layer, then in the order of the table of hooks, as those of `output.acts`. Hooks that fire once
    per model have the index of the last layer, and no layer axis when asked for by name. `token_ids` and `tokens` are
    the text; `tokens` is None for a model without a tokenizer."""

    kind = "trace"
    _absent, _holder, _name = "was not traced", "This trace", "trace"

    def __init__(
        self,
        logits: torch.Tensor,
        tensors: Mapping[Address, torch.Tensor],
        num_layers: int,
        streams: bool = True,
        token_ids: Sequence[int] = (),
        tokens: Sequence[str] | None = None,
    ):
        super().__init__(tensors, num_layers, streams)
        self.logits = logits
        self.token_ids = list(token_ids)
        self.tokens = None if tokens is None else list(tokens)

    @property
    def sites(self) -> set[Address]:
        """The keys as a set."""
        return set(self._tensors)

    def numpy(self) -> dict[Address, np.ndarray[Any, Any]]:
        """All tensors as NumPy arrays by (hook, layer); bfloat16 becomes float32, which NumPy has."""
        return {key: _to_numpy(tensor) for key, tensor in self._tensors.items()}

    def file_parts(self) -> FileParts:
        """Tensors named `hook.layer`, and the logits; facts: the text and the shape of the model."""
        tensors = {site_name(*site): tensor for site, tensor in self._tensors.items()}
        facts = {
            "num_layers": self.num_layers,
            "streams": self.streams,
            "token_ids": self.token_ids,
            "tokens": self.tokens,
        }
        return FileParts({**tensors, "logits": self.logits}, facts)

    @classmethod
    def from_file_parts(cls, parts: FileParts) -> Trace:
        tensors = dict(parts.tensors)
        logits = tensors.pop("logits")
        return cls(logits, {site_of(name): tensor for name, tensor in tensors.items()}, **parts.facts)

    def _repr_html_(self) -> str:
        rows = []
        for hook in self.hooks:
            layers = self.layers(hook)
            tensor = self[hook, layers[0]]
            rows.append((hook, spans(layers), list(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        text = notebook.tokens(self.tokens or [str(token) for token in self.token_ids])
        return text + notebook.table(
            ("hook", "layers", "shape", "dtype"), rows, f"Trace of {len(self.token_ids)} tokens"
        )

    def __repr__(self) -> str:
        return f"Trace({len(self.token_ids)} tokens; {', '.join(self.summary()) or 'no hooks'})"

    def summary(self) -> list[str]:
        """One line per hook: its layers and the shape of its tensors."""
        lines = []
        for hook in self.hooks:
            layers = self.layers(hook)
            lines.append(f"{hook}[{spans(layers)}] {list(self[hook, layers[0]].shape)}")
        return lines


class TraceBatch(Sequence[Trace], SavedResult):
    """The traces of several texts, from one call.

    Ragged: `batch[0]` is the `Trace` of the first text, without padding. Padded: `batch["mlp_out", 3]` is
    `[texts, T, d]` with T the longest text, `batch["mlp_out"]` is `[texts, layers, T, d]`, and `batch.logits`
    `[texts, T, vocab]`; shorter texts have zeros on the right. `batch.mask` `[texts, T]` is True where there is a
    token, `batch.lengths` are the numbers of tokens."""

    kind = "trace batch"
    padding = "right"

    def __init__(self, traces: Sequence[Trace]):
        self._traces = list(traces)

    def __len__(self) -> int:
        return len(self._traces)

    def file_parts(self) -> FileParts:
        return join_parts(self._traces)

    @classmethod
    def from_file_parts(cls, parts: FileParts) -> TraceBatch:
        return cls([Trace.from_file_parts(each) for each in split_parts(parts)])

    @property
    def lengths(self) -> list[int]:
        return [len(trace.token_ids) for trace in self._traces]

    @property
    def mask(self) -> torch.Tensor:
        """[texts, T] bool, True where there is a token."""
        return torch.arange(max(self.lengths)) < torch.tensor(self.lengths).unsqueeze(-1)

    @property
    def logits(self) -> torch.Tensor:
        """[texts, T, vocab], padded on the right with zeros."""
        return _pad([trace.logits for trace in self._traces], 0)

    def keys(self) -> list[Address]:
        """The (hook, layer) of every trace, in their order."""
        return list(self._traces[0])

    _ipython_key_completions_ = keys

    @overload
    def __getitem__(self, key: int) -> Trace: ...
    @overload
    def __getitem__(self, key: slice) -> list[Trace]: ...
    @overload
    def __getitem__(self, key: Address | str) -> torch.Tensor: ...
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, slice)) and not isinstance(key, bool):
            return self._traces[key]
        tensors = [trace[key] for trace in self._traces]
        stacked = (
            isinstance(key, str)
            and from_tool(key, self._traces[0].num_layers, self._traces[0].streams) is None
        )
        once = isinstance(key, str) and key in BY_NAME and BY_NAME[key].once
        return _pad(tensors, 1 if stacked and not once else 0)

    def __contains__(self, key: object) -> bool:
        """Whether a trace, or a (hook, layer) or name as in `batch[key]`, is here."""
        if isinstance(key, (str, tuple)):
            return bool(self._traces) and key in self._traces[0]
        return any(key is trace for trace in self._traces)

    def _repr_html_(self) -> str:
        rows = [
            (index, len(trace.token_ids), "".join(trace.tokens or ()) or trace.token_ids)
            for index, trace in enumerate(self._traces)
        ]
        return notebook.table(
            ("", "tokens", "text"), rows, f"Traces of {', '.join(self._traces[0].summary())}"
        )

    def __repr__(self) -> str:
        return (
            f"TraceBatch({len(self)} texts of {', '.join(map(str, self.lengths))} tokens; batch[i] is ragged, "
            f"batch[hook, layer] is padded on the right to {max(self.lengths)})"
        )


def _to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    host = tensor.detach().cpu()
    array: np.ndarray[Any, Any] = (host.float() if host.dtype is torch.bfloat16 else host).numpy()
    return array


def _pad(tensors: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Stack tensors that differ in the length of one axis; the ends are filled with zeros."""
    shape = list(tensors[0].shape)
    shape[axis] = max(tensor.shape[axis] for tensor in tensors)
    padded = tensors[0].new_zeros(len(tensors), *shape)
    for row, tensor in zip(padded, tensors):
        row.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
    return padded
