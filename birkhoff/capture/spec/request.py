"""`Capture`: which activations of a request to keep, as plain data; and the wire form, keyed by consumer.

    Capture({"mhc_streams_pre_attn": [10, 20], "mhc_ffn_res_mix": "all"}, positions="last_prompt", dtype="bf16")

A capture is frozen, hashable, and equal to whatever says the same; `to_json` and `from_json` are inverses. What can be
checked without a model is checked when it is made, the rest by `resolve`, both by the one list of rules in `checks.py`.
A resolved capture says where to tap, which tokens to keep, how a row is stored and what it costs at most; it does not
know any engine. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from birkhoff.capture.spec.estimate import Estimate, StoredRow
from birkhoff.capture.spec.validation import CaptureContext, ConsumerRules, Resolution, check, field_path
from birkhoff.errors import CaptureValidationError, SiteError, quoted
from birkhoff.hooks.layers import LayerSelector
from birkhoff.hooks.positions import Positions
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.selector import PositionSelector
from birkhoff.hooks.site_names import Address
from birkhoff.hooks.sites import BY_NAME

_PLACE_FIELDS = ("request_id", "tag", "layout", "return")  # where rows go, not which rows they are


class Hooks(Mapping[str, LayerSelector]):
    """The hooks of a capture and their layers: a mapping that cannot change and can be hashed."""

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
    """See the module. `returns` is the field "return" of the wire form; both spellings are understood."""

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

    def __init__(self, hooks: Mapping[str, Any], positions: Any = "all_prompt", **optional: Any):
        if "returns" in optional:
            if "return" in optional:
                raise CaptureValidationError(
                    "is given twice, as 'return' and as 'returns'. Give one.", "capture.return"
                )
            optional["return"] = optional.pop("returns")
        values, _ = check({"hooks": hooks, "positions": positions, **optional}, "capture", None, None)
        self._fill(values)

    def _fill(self, values: Mapping[str, Any]) -> Capture:
        for name, value in values.items():
            kept = Hooks(value) if name == "hooks" else value
            object.__setattr__(self, "returns" if name == "return" else name, kept)
        return self

    def __repr__(self) -> str:
        return f"Capture.from_json({self.to_json()!r})"

    def to_json(self) -> dict[str, Any]:
        """The wire form of one consumer's part; fields that say nothing are left out."""
        out: dict[str, Any] = {"hooks": self.hooks.to_json(), "positions": self.positions.to_json()}
        for name in (
            "capture_point",
            "reduce",
            "project",
            "dtype",
            "streams",
            "return",
            "layout",
            "request_id",
            "tag",
            "accepted_only",
        ):
            value = getattr(self, "returns" if name == "return" else name)
            if value is not None and (name, value) != ("capture_point", "before"):
                out[name] = list(value) if name == "streams" else value
        return out

    @classmethod
    def from_json(cls, raw: Any) -> Capture:
        """The inverse of `to_json`; also of what a client wrote by hand."""
        return cls.__new__(cls)._fill(check(raw, "capture", None, None)[0])

    def digest(self) -> str:
        """128 bits, as text, of what decides the rows: equal for captures that would keep the same ones."""
        named = {name: value for name, value in self.to_json().items() if name not in _PLACE_FIELDS}
        return _digest(
            b"birkhoff capture 1", json.dumps(named, sort_keys=True, separators=(",", ":")).encode()
        )

    def resolve(
        self,
        schema: Mapping[str, HookSchema],
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
        """Against one model and one prompt (its ids, or their number). The consumer is the last part of `path`."""
        facts = CaptureContext(
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
        _, resolution = check(self._fields(), path, consumer, facts)
        assert resolution is not None
        return ResolvedCapture.of(self, consumer, num_layers, resolution)

    def _fields(self) -> dict[str, Any]:
        """Every field by its wire name, parsed as it is."""
        return {"return" if name == "returns" else name: value for name, value in vars(self).items()}


@dataclass(frozen=True, eq=False)
class ResolvedCapture:
    """What a running request has to keep. `addresses` are (hook, layer) as tapped, by layer and hook id."""

    capture: Capture
    consumer: str
    num_layers: int
    addresses: tuple[Address, ...]
    asked: Mapping[Address, Address]  # by the caller's own name -> address
    rows: Mapping[str, StoredRow]  # by tapped hook
    selector: PositionSelector
    estimate: Estimate
    returns: str
    accepted_only: bool  # hold rows back until it is known that their tokens stay

    def address(self, hook: str, layer: int) -> Address:
        """Where rows asked for under this name are found: aliases and negative layers as in the request."""
        if hook in BY_NAME and BY_NAME[hook].once:
            layer = self.num_layers - 1
        key = (hook, layer + self.num_layers if layer < 0 else layer)
        if key in self.asked:
            return self.asked[key]
        if key in self.addresses:  # asked for under an alias
            return key
        held = ", ".join(f"{name}[{at}]" for name, at in sorted(self.asked))
        raise SiteError(f"{quoted(hook)}[{layer}] was not captured. This capture holds {quoted(held, 400)}.")

    @classmethod
    def of(cls, capture: Capture, consumer: str, num_layers: int, found: Resolution) -> ResolvedCapture:
        returns = capture.returns or found.rules.returns
        accepted_only = returns == "inline" if capture.accepted_only is None else capture.accepted_only
        return cls(
            capture,
            consumer,
            num_layers,
            found.addresses,
            found.asked,
            found.rows,
            found.selector,
            found.estimate,
            returns,
            accepted_only,
        )


def parse_capture_request(
    raw: Any, facts: CaptureContext | None = None, path: str = "capture"
) -> dict[str, Capture]:
    """The wire form, one capture by consumer. With `facts` everything is checked, without them what needs no model."""
    return {consumer: capture for consumer, capture, _ in _parts(raw, facts, path)}


def resolve_capture_request(
    raw: Any, facts: CaptureContext, path: str = "capture"
) -> dict[str, ResolvedCapture]:
    """The wire form, resolved; the cap on bytes is one for all consumers together."""
    found = {}
    for consumer, capture, resolution in _parts(raw, facts, path):
        assert resolution is not None
        found[consumer] = ResolvedCapture.of(capture, consumer, facts.num_layers, resolution)
    return found


def _parts(
    raw: Any, facts: CaptureContext | None, path: str
) -> Iterator[tuple[str, Capture, Resolution | None]]:
    if not isinstance(raw, Mapping) or not raw or not all(isinstance(name, str) for name in raw):
        example = '{"memory": {"hooks": {"mlp_out": [3]}, "positions": "last_prompt"}}'
        message = f"is {quoted(raw)}, expected an object keyed by consumer, such as {example}."
        raise CaptureValidationError(message, path, "V1")
    for consumer, part in raw.items():
        values, resolution = check(part, field_path(path, consumer), consumer, facts)
        if facts is not None and resolution is not None:
            facts = replace(facts, spent_bytes=facts.spent_bytes + resolution.estimate.bytes)
        yield consumer, Capture.__new__(Capture)._fill(values), resolution


def capture_hash(captures: Mapping[str, Capture], projections: Mapping[str, str] | None = None) -> str:
    """One digest for all of a request's captures, whatever the order of the consumers.

    `projections` gives the digest of each matrix they name: the same name for other numbers is another capture."""
    pieces = [
        piece for name in sorted(captures) for piece in (name.encode(), captures[name].digest().encode())
    ]
    named = sorted({capture.project for capture in captures.values() if capture.project is not None})
    pieces += [(projections or {}).get(project, project).encode() for project in named]
    return _digest(b"birkhoff captures 1", *pieces)


def _digest(*pieces: bytes) -> str:
    """Each piece behind its length, so that no two lists of pieces read as the same bytes."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(len(piece).to_bytes(8, "little") + piece)
    return found.hexdigest()[:32]
