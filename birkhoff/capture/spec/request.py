"""`Capture`: which activations of a request to keep, as plain data; and the wire form, keyed by consumer.

    Capture({"mhc_streams_pre_attn": [10, 20], "mhc_ffn_res_mix": "all"}, positions="last_prompt", dtype="bf16")

A capture is frozen, hashable and compared by value; `to_json` and `from_json` are inverses. Rules that need no model
are checked on construction, the others by `resolve`; both use the list of rules in `validation.py`. A resolved capture
states which sites to tap, which tokens to keep, how a row is stored and the upper bound of its cost. Nothing here
depends on an engine or imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from birkhoff.capture.spec.requested import Requested
from birkhoff.capture.spec.validation import CaptureContext, ConsumerRules, Resolution, check, field_path
from birkhoff.errors import CaptureValidationError, quoted
from birkhoff.hooks.layers import LayerSelector
from birkhoff.hooks.positions import Positions
from birkhoff.hooks.schema import Schema
from birkhoff.hooks.site_names import Address
from birkhoff.option_checks import listed

_DESTINATION_FIELDS = ("request_id", "tag", "layout", "return")  # not part of the digest of a capture


class Hooks(Mapping[str, LayerSelector]):
    """Immutable, hashable mapping from hook name to layer selector."""

    def __init__(self, items: Mapping[str, LayerSelector]):
        self._items = dict(items)

    def __getitem__(self, hook: str) -> LayerSelector:
        return self._items[hook]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {hook: layers.to_json() for hook, layers in self._items.items()}


@dataclass(frozen=True, init=False, repr=False)
class Capture:
    """Which activations of a request to keep: `Capture({"mlp_out": [3, 4]}, positions="last_prompt", dtype="bf16")`.

    `hooks` maps hook names to layers: "all", one layer, a list, ranges. `positions` selects tokens: "all_prompt",
    "last_prompt", "all_generated", "all", one position, a list of them, or an object. `capture_point` is "before" or
    "after" the edits of the site, `reduce` keeps one row per text, `project` names a matrix that rows are multiplied
    with, `dtype` casts them, `streams` selects residual streams. `returns` (field "return" of the wire form), `layout`,
    `request_id` and `tag` say where a consumer puts the rows. `accepted_only` may only be True: rows of rejected draft
    tokens are never delivered.
    """

    hooks: Hooks
    positions: Positions
    capture_point: str
    reduce: str | None
    project: str | None
    dtype: str | None
    streams: tuple[int, ...] | None
    returns: str | None
    layout: str | None
    request_id: str | None
    tag: str | None
    accepted_only: bool | None

    def __init__(
        self,
        hooks: Mapping[str, Any],
        positions: Any = "all_prompt",
        *,
        capture_point: str = "before",
        reduce: str | None = None,
        project: str | None = None,
        dtype: str | None = None,
        streams: int | Sequence[int] | None = None,
        returns: str | None = None,
        layout: str | None = None,
        request_id: str | None = None,
        tag: str | None = None,
        accepted_only: bool | None = None,
        **wire_fields: Any,  # "return", which is no keyword of Python; others are refused
    ):
        if returns is not None and "return" in wire_fields:
            raise CaptureValidationError(
                "is given twice, as 'return' and as 'returns'. Give one.", "capture.return"
            )
        fields = {
            "hooks": {hook: listed(layers) for hook, layers in hooks.items()}
            if isinstance(hooks, Mapping)
            else hooks,
            "positions": listed(positions),
            "capture_point": capture_point,
            "reduce": reduce,
            "project": project,
            "dtype": dtype,
            "streams": listed(streams),
            "return": returns,
            "layout": layout,
            "request_id": request_id,
            "tag": tag,
            "accepted_only": accepted_only,
            **wire_fields,
        }
        self._fill(check(fields, "capture", None, None)[0])

    def _fill(self, values: Mapping[str, Any]) -> Capture:
        for name, value in values.items():
            parsed = Hooks(value) if name == "hooks" else value
            object.__setattr__(self, "returns" if name == "return" else name, parsed)
        return self

    def __repr__(self) -> str:
        return f"Capture.from_json({self.to_json()!r})"

    def to_json(self) -> dict[str, Any]:
        """The wire form for one consumer; fields with their default value are omitted."""
        out: dict[str, Any] = {"hooks": self.hooks.to_json(), "positions": self.positions.to_json()}
        for name, value in self.fields().items():
            if name not in out and value is not None and (name, value) != ("capture_point", "before"):
                out[name] = list(value) if name == "streams" else value
        return out

    @classmethod
    def from_json(cls, raw: Any) -> Capture:
        """Parse and check the wire form for one consumer."""
        return cls.__new__(cls)._fill(check(raw, "capture", None, None)[0])

    def replace(self, **fields: Any) -> Capture:
        """A copy with some fields replaced by values that are already parsed, by their attribute names."""
        values = {**vars(self), **fields}
        return Capture.__new__(Capture)._fill(values)

    def digest(self) -> str:
        """128 bits in hex that identify the rows: equal for captures that select the same rows."""
        named = {name: value for name, value in self.to_json().items() if name not in _DESTINATION_FIELDS}
        return _digest(
            b"birkhoff capture 1", json.dumps(named, sort_keys=True, separators=(",", ":")).encode()
        )

    def resolve(
        self,
        schema: Schema,
        num_layers: int,
        prompt_ids: int | Sequence[int],
        max_tokens: int,
        *,
        consumers: Mapping[str, ConsumerRules | None] | None = None,
        max_request_bytes: int | None = None,
        max_inline_bytes: int | None = None,
        projections: Mapping[str, tuple[int, int]] | None = None,
        cached_tokens: int = 0,
        path: str = "capture.memory",
    ) -> ResolvedCapture:
        """Check against one model and one prompt (token ids or their count). `path` ends with the consumer."""
        context = CaptureContext(
            schema,
            num_layers,
            prompt_ids,
            max_tokens,
            consumers,
            projections or {},
            max_request_bytes,
            max_inline_bytes,
            cached_tokens,
        )
        consumer = path.rpartition(".")[2]
        _, resolution = check(self.fields(), path, consumer, context)
        assert resolution is not None
        return ResolvedCapture.of(self, consumer, num_layers, resolution)

    def fields(self) -> dict[str, Any]:
        """Every field by its wire name, as parsed."""
        return {"return" if name == "returns" else name: value for name, value in vars(self).items()}


@dataclass(frozen=True, eq=False)
class ResolvedCapture(Resolution):
    """A capture checked against one model and prompt."""

    capture: Capture
    consumer: str
    num_layers: int

    @property
    def returns(self) -> str:
        return self.capture.returns or self.rules.returns

    @property
    def names(self) -> Requested:
        """The names of the request, which say what a key stands for."""
        return Requested(dict(self.requested), self.num_layers)

    def address(self, hook: str, layer: int | None) -> Address:
        return self.names.address(hook, layer)

    @classmethod
    def of(cls, capture: Capture, consumer: str, num_layers: int, resolution: Resolution) -> ResolvedCapture:
        return cls(**vars(resolution), capture=capture, consumer=consumer, num_layers=num_layers)


CaptureSpecs = Mapping[str, Any]  # by consumer: a `Capture`, or its wire form


def resolve_capture_request(specs: CaptureSpecs, context: CaptureContext) -> dict[str, ResolvedCapture]:
    """Check and resolve all captures of a request. The limit on bytes applies to all consumers together."""
    if not isinstance(specs, Mapping) or not specs or not all(isinstance(name, str) for name in specs):
        example = '{"memory": {"hooks": {"mlp_out": [3]}, "positions": "last_prompt"}}'
        message = f"is {quoted(specs)}, expected an object keyed by consumer, such as {example}."
        raise CaptureValidationError(message, "capture", "V1")
    resolved = {}
    for consumer, spec in specs.items():
        fields = spec.fields() if isinstance(spec, Capture) else spec
        values, resolution = check(fields, field_path("capture", consumer), consumer, context)
        assert resolution is not None
        context = replace(context, spent_bytes=context.spent_bytes + resolution.estimate.bytes)
        capture = spec if isinstance(spec, Capture) else Capture.__new__(Capture)._fill(values)
        resolved[consumer] = ResolvedCapture.of(capture, consumer, context.num_layers, resolution)
    return resolved


def capture_hash(captures: Mapping[str, Capture], projections: Mapping[str, str] | None = None) -> str:
    """One digest for all captures of a request, independent of the order of the consumers.

    `projections` maps each projection name to the digest of its matrix: two matrices of one name differ."""
    pieces = [
        piece for name in sorted(captures) for piece in (name.encode(), captures[name].digest().encode())
    ]
    named = sorted({capture.project for capture in captures.values() if capture.project is not None})
    pieces += [(projections or {}).get(project, project).encode() for project in named]
    return _digest(b"birkhoff captures 1", *pieces)


def _digest(*pieces: bytes) -> str:
    """Hash of the pieces, each preceded by its length, so that different lists never give the same bytes."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()[:32]
