"""A steering vector with its metadata: rows for one or more layers, and what is needed to apply them correctly.

A file of numbers alone does not tell whether to add or to project, at which hook and layer, in which unit. This
container does: a safetensors file with one tensor `layer.N` per layer (row N applies *at* layer N of `hook`, no
offset) and the metadata in `REQUIRED`. Files that lack any of it, or whose `sha256` does not match their content,
are refused. `streams` is "flat" if a row holds all streams in sequence, "all" or a list if it is one stream wide.
`scale_unit` "row_norm" means that a scale is in units of the norm of the row it is added to. `digest` covers what
determines the effect only, so files with the same effect are the same module."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from birkhoff.embedded import shipped_vectors, vector_path
from birkhoff.errors import SteeringError, VectorFileError, did_you_mean, quoted
from birkhoff.hooks.site_names import ALIASES
from birkhoff.hooks.sites import BY_NAME
from birkhoff.option_checks import as_int
from birkhoff.small_file import VECTOR_BYTES, check_regular
from birkhoff.steering.vector import Vector

FORMAT = "birkhoff-vector-1"
OPS = ("add", "project", "clamp")
UNITS = ("absolute", "row_norm")
REQUIRED = (
    "op hook layers width streams normalised scale_unit model model_revision quant method n_pairs "
    "created_at sha256"
).split()
_FREE = ("scale", "note", "effect")  # optional: a recommended strength, a note, measured effects


@dataclass(frozen=True, eq=False)
class SteeringVector:
    """`rows[layer]` at `hook`, made by `contrast`, an importer or by hand. Checked on construction, immutable."""

    rows: Mapping[int, Vector]
    op: str
    hook: str
    streams: str | tuple[int, ...] = "flat"
    normalised: bool = False
    scale_unit: str = "absolute"
    model: str = "unknown"
    model_revision: str = "unknown"
    quant: str = "unknown"
    method: str = "unknown"
    n_pairs: int = 0
    created_at: str = ""
    scale: float | None = None
    note: str = ""
    effect: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not isinstance(self.rows, Mapping) or not self.rows:
            raise SteeringError(
                f"rows is {quoted(self.rows)}, expected a row of numbers for at least one layer."
            )
        rows = {}
        for layer, row in sorted(self.rows.items()):
            if as_int(layer) is None or layer < 0:
                raise SteeringError(f"rows has the layer {quoted(layer)}, expected layer numbers from 0.")
            rows[int(layer)] = row if isinstance(row, Vector) else Vector(row, f"the row of layer {layer}")
        put(self, "rows", rows)
        widths = {len(row) for row in rows.values()}
        if len(widths) > 1:
            raise SteeringError(f"the rows have {sorted(widths)} numbers, expected one width for all layers.")
        if self.op not in OPS:
            raise SteeringError(
                f"op is {quoted(self.op)}, expected one of {', '.join(OPS)}. State what it is for."
            )
        if self.hook not in BY_NAME and self.hook not in ALIASES:
            raise SteeringError(f"hook is {quoted(self.hook)}, expected one of {', '.join(sorted(BY_NAME))}.")
        put(self, "streams", _streams(self.streams))
        if self.streams != "flat" and not self.hook.startswith("mhc_streams"):
            raise SteeringError(
                f"streams is {quoted(self.streams)}, but {self.hook} has one stream. Say 'flat'."
            )
        if self.scale_unit not in UNITS:
            raise SteeringError(
                f"scale_unit is {quoted(self.scale_unit)}, expected one of {', '.join(UNITS)}."
            )
        if not isinstance(self.normalised, bool):
            raise SteeringError(f"normalised is {quoted(self.normalised)}, expected true or false.")
        if as_int(self.n_pairs) is None or self.n_pairs < 0:
            raise SteeringError(
                f"n_pairs is {quoted(self.n_pairs)}, expected how many pairs it was made from."
            )
        for name in ("model", "model_revision", "quant", "method", "created_at", "note"):
            if not isinstance(getattr(self, name), str):
                raise SteeringError(f"{name} is {quoted(getattr(self, name))}, expected a text.")
        for layer, row in rows.items():
            norm = float(row.tensor().norm())
            if norm == 0:
                raise SteeringError(
                    f"the row of layer {layer} is zero, so it steers nothing. Leave the layer out."
                )
            if self.normalised and abs(norm - 1) > 1e-3:
                raise SteeringError(
                    f"normalised is true, but the row of layer {layer} has norm {norm:.4g}. Say false, or divide it."
                )
        if not self.created_at:
            put(self, "created_at", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.rows)

    @property
    def width(self) -> int:
        return len(next(iter(self.rows.values())))

    def __len__(self) -> int:
        return self.width

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SteeringVector) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        where = f"{self.hook}{list(self.layers)}"
        return f"SteeringVector({self.op} at {where}, {self.width} numbers, streams {self.streams}, {self.method})"

    @cached_property
    def digest(self) -> str:
        """128-bit digest of what determines its effect: rows, hook, layers, streams, operation and unit."""
        fields = json.dumps([self.op, self.hook, _plain(self.streams), self.scale_unit, list(self.layers)])
        rows = "".join(row.digest for row in self.rows.values())
        return hashlib.sha256(f"{FORMAT}\n{fields}\n{rows}".encode()).hexdigest()[:32]

    def at(self, layer: int) -> Vector:
        """The row for one layer of its hook; a hook that fires once per model has one row for any layer."""
        if len(self.rows) == 1 and self.hook in BY_NAME and BY_NAME[self.hook].once:
            return next(iter(self.rows.values()))
        if layer not in self.rows:
            raise SteeringError(
                f"this vector has rows for layers {list(self.layers)} of {self.hook}, not for layer {layer}. Leave "
                "layers out, or name one of these."
            )
        return self.rows[layer]

    def only(self, layers: Sequence[int]) -> SteeringVector:
        """The same vector with some of its layers."""
        return replace(self, rows={layer: self.at(layer) for layer in layers})

    def to_json(self) -> dict[str, Any]:
        """All fields, rows as lists of numbers."""
        return {**self.describe(), "rows": {str(layer): row.to_json() for layer, row in self.rows.items()}}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SteeringVector:
        fields = {
            name: raw[name] for name in raw if name not in ("rows", "layers", "width", "digest", "norms")
        }
        rows = raw.get("rows")
        if not isinstance(rows, Mapping):
            raise SteeringError(f"rows is {quoted(rows)}, expected an object of layer to numbers.")
        unknown = sorted(set(fields) - set(cls.__dataclass_fields__))
        if unknown or "op" not in fields or "hook" not in fields:
            fault = f"has the unknown field {quoted(unknown[0])}" if unknown else "states no op or no hook"
            raise SteeringError(f"the vector {fault}, expected {', '.join(cls.__dataclass_fields__)}.")
        try:
            by_layer = {int(layer): row for layer, row in rows.items()}
        except (TypeError, ValueError):
            raise SteeringError(
                f"rows has the layers {quoted(list(rows))}, expected whole numbers."
            ) from None
        return cls(by_layer, **fields)

    def describe(self) -> dict[str, Any]:
        """All fields except the rows, as plain data."""
        out: dict[str, Any] = {
            "op": self.op,
            "hook": self.hook,
            "layers": list(self.layers),
            "width": self.width,
        }
        out |= {"streams": _plain(self.streams), "normalised": self.normalised, "scale_unit": self.scale_unit}
        for name in ("model", "model_revision", "quant", "method", "n_pairs", "created_at"):
            out[name] = getattr(self, name)
        out |= {name: getattr(self, name) for name in _FREE if getattr(self, name) not in (None, "", {})}
        norms = {str(layer): round(float(row.tensor().norm()), 6) for layer, row in self.rows.items()}
        return {**out, "norms": norms, "digest": self.digest}

    def save(self, path: str | Path) -> Path:
        """Write the file; the same vector gives the same bytes."""
        path = Path(path)
        if path.suffix != ".safetensors":
            raise VectorFileError(f"{path} ends in {path.suffix or 'nothing'!r}, expected .safetensors.")
        tensors = {f"layer.{layer}": row.tensor() for layer, row in self.rows.items()}
        fields = {name: value for name, value in self.describe().items() if name not in ("norms", "digest")}
        metadata = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()
        }
        metadata["format"] = FORMAT
        metadata["sha256"] = _checksum(tensors, metadata)
        path.write_bytes(_safetensors(tensors, metadata))
        return path

    @classmethod
    def load(cls, path: str | Path) -> SteeringVector:
        """Read a file, or a shipped vector by name; missing metadata, unknown tensors and a wrong checksum are
        refused."""
        path = vector_path(path)
        if not path.is_file():
            raise VectorFileError(
                f"{path} is {'not a file' if path.exists() else 'missing'}, expected a vector file or one of "
                f"{', '.join(shipped_vectors('nano'))}.{did_you_mean(str(path), shipped_vectors('nano'))}"
            )
        try:
            check_regular(path, VECTOR_BYTES)
            with safe_open(path, "pt") as file:
                metadata = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise VectorFileError(
                f"{path} cannot be read as safetensors ({error}). Other kinds: birkhoff vectors import"
            ) from None
        missing = [name for name in REQUIRED if name not in metadata]
        if missing:
            raise VectorFileError(
                f"{path} does not say {', '.join(missing)}. A vector is used only when its file says what it is for; "
                "state it: birkhoff vectors import FILE --op … --hook …"
            )
        if metadata.get("format") != FORMAT:
            raise VectorFileError(
                f"{path} has the format {quoted(metadata.get('format'))}, expected {FORMAT!r}."
            )
        if _checksum(tensors, metadata) != metadata["sha256"]:
            raise VectorFileError(
                f"{path} has changed since it was written: its sha256 does not match. Fetch it again."
            )
        return cls._of(path, tensors, metadata)

    @classmethod
    def _of(
        cls, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> SteeringVector:
        def parsed(name: str) -> Any:
            try:
                return json.loads(metadata[name])
            except ValueError:
                return metadata[name]

        free: dict[str, Any] = {name: parsed(name) for name in _FREE if name in metadata}
        if "note" in free:
            free["note"] = metadata["note"]  # text, even if it parses as JSON
        try:
            vector = cls(
                {int(name.removeprefix("layer.")): Vector(row, name) for name, row in tensors.items()},
                metadata["op"],
                metadata["hook"],
                parsed("streams"),
                parsed("normalised"),
                metadata["scale_unit"],
                metadata["model"],
                metadata["model_revision"],
                metadata["quant"],
                metadata["method"],
                parsed("n_pairs"),
                metadata["created_at"],
                **free,
            )
        except ValueError:
            raise VectorFileError(
                f"{path} holds {quoted(sorted(tensors))}, expected tensors named layer.N."
            ) from None
        except SteeringError as error:
            raise VectorFileError(f"{path}: {error}") from None
        if (list(vector.layers), vector.width) != (parsed("layers"), parsed("width")):
            raise VectorFileError(
                f"{path} says layers {metadata['layers']} of {metadata['width']} numbers and has {list(vector.layers)} "
                f"of {vector.width}. Write it again from its source."
            )
        return vector


def _checksum(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """sha256 of all tensors and all metadata except the checksum itself."""
    total = hashlib.sha256(json.dumps(sorted((k, v) for k, v in metadata.items() if k != "sha256")).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"\n{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _safetensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Serialise in the safetensors format. The library writes metadata in an order that differs from run to run."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    data = bytearray()
    for name, tensor in tensors.items():
        start = len(data)
        data += tensor.numpy().astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, len(data)]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + bytes(data)


def _streams(value: Any) -> str | tuple[int, ...]:
    if value in ("flat", "all"):
        return str(value)
    if isinstance(value, (list, tuple)) and value and all(as_int(s) is not None and s >= 0 for s in value):
        return tuple(sorted({int(stream) for stream in value}))
    raise SteeringError(f"streams is {quoted(value)}, expected 'flat', 'all' or a list of stream numbers.")


def _plain(streams: str | tuple[int, ...]) -> Any:
    return streams if isinstance(streams, str) else list(streams)
