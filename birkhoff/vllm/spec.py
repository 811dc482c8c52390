"""What the front sends to the ranks: the captures and edits of one request, and what each rank sends back.

Everything is JSON or raw tensors; nothing that is executed. Vectors are sent once and then named by their digest. The
request itself carries a `RequestMark` only: its key, the salt of its cached state, and whether it captures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from birkhoff.hooks.plan import Key, SiteRows
from birkhoff.hooks.results import CaptureResult
from birkhoff.steering.position_rows import PositionRows
from birkhoff.steering.steering_fields import OPS
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_edits import VectorEdit
from birkhoff.steering.vector_file import SteeringVector

FIELD = "birkhoff"  # the key of a request's mark in vLLM's `extra_args`
DIGEST_HEX = 32


@dataclass(frozen=True)
class RequestMark:
    """`salt` is None if plain requests may share the cached state; `reads_cache` is False if every row of the prompt
    must be computed, because it may be captured."""

    key: str
    salt: str | None = None
    reads_cache: bool = True

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> RequestMark | None:
        """The mark in `extra_args`; None if the request neither captures nor edits."""
        text = (extra_args or {}).get(FIELD)
        return None if text is None else cls(**json.loads(text))


@dataclass(frozen=True)
class RequestSpec:
    """Captures and edits of one request. `edits` are `encode_edit` objects, `rows` captures whose rows are sent back to
    the front, `files` a capture that the ranks write. With `hold`, rows of generated tokens are written when the
    request has ended: until then it is not known where the answer ends."""

    key: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    edits: tuple[Mapping[str, Any], ...] = ()
    rows: tuple[Mapping[str, Any], ...] = ()
    files: Mapping[str, Any] | None = None
    hold: bool = False

    @property
    def captures(self) -> bool:
        return bool(self.rows) or self.files is not None

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> RequestSpec:
        raw = json.loads(text)
        return cls(**{**raw, **{name: tuple(raw[name]) for name in ("prompt_ids", "edits", "rows")}})


@dataclass
class RankReport:
    """What became of one request on one rank. `steered` are ranges of positions; `files` is a `CaptureResult` as JSON;
    `rows` has one packed part per capture in `RequestSpec.rows`."""

    steered: list[tuple[int, int]] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)
    files: dict[str, Any] | None = None
    errors: list[str] = field(default_factory=list)

    def steered_positions(self) -> set[int]:
        return {position for start, stop in self.steered for position in range(start, stop)}


def ranges(positions: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted positions as half-open ranges."""
    out: list[tuple[int, int]] = []
    for position in sorted(positions):
        if out and out[-1][1] == position:
            out[-1] = (out[-1][0], position + 1)
        else:
            out.append((position, position + 1))
    return out


def pack_rows(rows: Mapping[Key, SiteRows], stop: int) -> bytes:
    """Rows of positions below `stop`, with their labels, as one safetensors file."""
    tensors: dict[str, torch.Tensor] = {}
    labels: dict[str, Any] = {}
    for (hook, layer), part in rows.items():
        count = sum(position < stop for position in part.positions)
        name = f"{hook}.{layer}"
        tensors[name] = part.tensor[:count].contiguous()
        labels[name] = [list(part.positions[:count]), list(part.token_ids[:count])]
    return save_tensors(tensors, {"labels": json.dumps(labels)})


def unpack_rows(data: bytes) -> list[SiteRows]:
    size = int.from_bytes(data[:8], "little")
    labels = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["labels"])
    tensors = load_tensors(data)
    out = []
    for name, (positions, token_ids) in labels.items():
        hook, _, layer = name.rpartition(".")
        out.append(SiteRows(hook, int(layer), tensors[name], tuple(positions), tuple(token_ids)))
    return out


def encode_vector(vector: Vector | SteeringVector | PositionRows) -> tuple[str, str]:
    """A vector as JSON text, and the digest that names it."""
    text = json.dumps(vector.to_json(), separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_HEX], text


def decode_vector(text: str) -> Vector | SteeringVector | PositionRows:
    raw = json.loads(text)
    if isinstance(raw, list):
        return Vector(raw, "the vector")
    return PositionRows.from_json(raw) if "positions" in raw else SteeringVector.from_json(raw)


def encode_edit(edit: Any, vectors: dict[str, str]) -> dict[str, Any]:
    """An edit without named vectors as JSON; its vector is added to `vectors`, by digest."""
    fields: dict[str, Any] = edit.to_json()
    if not isinstance(edit, VectorEdit) or not isinstance(
        edit.vector, (Vector, SteeringVector, PositionRows)
    ):
        return fields  # a factor, zero, or a mixer by its name
    digest, text = encode_vector(edit.vector)
    vectors[digest] = text
    return {**fields, "vector": {"digest": digest}}


def decode_edit(raw: Mapping[str, Any], vectors: Mapping[str, Any]) -> VectorEdit:
    """The vector edit of `encode_edit`; `vectors` has its vector by digest."""
    fields = dict(raw)
    if isinstance(fields.get("vector"), Mapping) and "digest" in fields["vector"]:
        fields["vector"] = vectors[fields["vector"]["digest"]]
    edit: VectorEdit = OPS[fields["op"]].from_json(fields)
    return edit


def is_feature_edit(raw: Mapping[str, Any]) -> bool:
    return raw.get("op") == "sae"


def join_reports(reports: Sequence[RankReport]) -> tuple[set[int], CaptureResult | None]:
    """Steered positions, which are the same on all ranks, and the result of the files that the ranks wrote parts of."""
    steered = {position for report in reports for position in report.steered_positions()}
    parts = [CaptureResult(**report.files) for report in reports if report.files is not None]
    if not parts:
        return steered, None
    worst = max(parts, key=lambda part: _SEVERITY.index(part.status))
    joined = CaptureResult(
        worst.status,
        parts[0].id,
        worst.error,
        sum(part.rows for part in parts),
        sum(part.bytes for part in parts),
        sum(part.keys for part in parts),
        sum(part.dropped_rows for part in parts),
        tuple(path for part in parts for path in part.paths),
        {path: digest for part in parts for path, digest in part.sha256.items()},
        all(part.durable for part in parts),
    )
    return steered, joined


_SEVERITY = ("not_requested", "ok", "pending", "partial_error", "error")
