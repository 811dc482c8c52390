"""The vector edits of a request: `Add`, `Project`, `Clamp`, `Patch`, `Scale`. Plain data, checked on construction and
again against a model.

    Add(vector, hook="mhc_streams_pre_attn", layers=[4], scale=2.0, streams=[1])     h' = h + scale * v
    Project(vector, ...)                                                             h' = h - scale * (h.v) v
    Clamp(vector, ..., min=None, max=None)                                           min <= h.v <= max on exit
    Patch(vector, ...)                                                               h' = h + scale * (v - h)
    Scale(factor, ...)                                                               h' = factor * h

At mixers (`mixer_edits.py`) `Patch` takes matrices, `Clamp` without a vector bounds entries, and `streams` selects
entries. Directions of `Project` and `Clamp` are normalised here. `where` selects tokens as captures do; `phase` selects
prompt tokens or generated ones, by position and not by the size of a step. `path` selects which streams are edited:
those the sublayer reads, those carried past it, or both. `resolve` returns the `hooks.plan.Edit` that an engine runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch

from birkhoff.errors import SteeringError, did_you_mean, quoted
from birkhoff.hooks import site_names
from birkhoff.hooks.edit import SiteEdit
from birkhoff.hooks.layers import is_list
from birkhoff.hooks.phases import PHASES, offsets
from birkhoff.hooks.plan import Key
from birkhoff.hooks.resolved_edit import ResolvedEdit
from birkhoff.hooks.schema import HookSchema, Schema
from birkhoff.hooks.selector import bind
from birkhoff.option_checks import as_int, listed
from birkhoff.steering.gated_edits import Gate
from birkhoff.steering.mixer_edits import MixerMatrix, is_mixer, mixer_entries, renormalised
from birkhoff.steering.position_rows import ALIGN, PositionRows, RunRows, TensorRows
from birkhoff.steering.request_edit import Modules, PromptIds, RequestEdit, bound, parse_fields
from birkhoff.steering.vector import Vector, finite_number
from birkhoff.steering.vector_file import SteeringVector

MAX_DIRECTIONS = 4
PATHS = ("both", "read", "carry")


@dataclass(frozen=True)
class VectorEdit(RequestEdit):
    """Fields of every edit. `vector` is the name of a module, a tensor, a list of numbers or a `SteeringVector`;
    the last provides hook, layers and streams where the edit has none."""

    vector: Any
    hook: str | None = None
    layers: Any = None
    scale: float = 1.0
    streams: Any = None
    where: Any = None
    phase: str = "both"
    path: str = "both"
    when: Gate | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "vector", self._source(self.vector))
        if self.hook is not None and not isinstance(self.hook, str):
            raise SteeringError(f"hook is {quoted(self.hook)}, expected the name of a hook.")
        parse_fields(self, path=PATHS)
        put(self, "scale", finite_number(self.scale, "scale"))
        put(self, "streams", _streams(self.streams))
        if self.when is not None:
            put(self, "when", Gate.parse(self.when))
        self._check()

    def _check(self) -> None:
        pass

    @staticmethod
    def _source(value: Any) -> Any:
        if isinstance(value, Mapping):
            return SteeringVector.from_json(value)
        return value if isinstance(value, (str, Vector, SteeringVector)) else Vector(value, shaped=True)

    def resolve(
        self, schema: Schema, num_layers: int, modules: Modules, prompt: PromptIds, max_tokens: int
    ) -> ResolvedVectorEdit:
        """Resolve against one model and one prompt. All errors are raised here; without a prompt, all except those
        about positions."""
        edit = self._from_module(modules)._with_vector_fields()
        named = edit.hook is not None and (
            site_names.from_tool(edit.hook, num_layers, site_names.has_streams(schema)) is not None
            or (edit.hook in schema and schema[edit.hook].once)
        )  # the hook says its layer itself
        why = None if edit.hook is None else _unknown(edit.hook, schema)
        if why is not None:
            raise SteeringError(why)
        if edit.hook is None or (edit.layers is None and not named):
            raise SteeringError(
                f"{type(self).__name__} says no {'hook' if edit.hook is None else 'layers'}, and its "
                "vector brings none. Give hook= and layers=."
            )
        sites: dict[Key, SiteEdit] = {}
        operations: dict[tuple[str, int], SiteEdit] = {}  # layers with the same vector share one operation
        at_layers: list[VectorEdit] = []
        addresses = [
            entry
            for name in site_names.members(edit.hook, schema)
            for entry in edit._addresses(name, schema, num_layers)
        ]
        for layer, (hook, at), path in addresses:
            at_layer = edit._at_address((hook, at), layer, schema[hook], prompt, max_tokens)
            vector = at_layer.vector
            if (hook, id(vector)) not in operations:
                values = at_layer._values(vector, hook, schema[hook])
                at_site = at_layer._at_mixer if is_mixer(hook) else at_layer._at_site
                operations[hook, id(vector)] = at_site(values, schema[hook], hook, path)
                at_layers.append(at_layer)
            sites[hook, at] = operations[hook, id(vector)]
        renormalised = bool(getattr(edit, "renormalise", False))
        if prompt is None:
            return ResolvedVectorEdit(sites, None, edit.phase, renormalised=renormalised)
        selector = bound(edit.where, prompt, max_tokens)
        length = prompt if isinstance(prompt, int) else len(prompt)
        positions = {at_layer._positions(length + max_tokens) for at_layer in at_layers}
        if len(positions) > 1:
            raise SteeringError(
                "the source has rows of different positions at different sites. Patch them with one edit each."
            )
        return ResolvedVectorEdit(
            sites, selector, edit.phase, positions.pop(), length, renormalised=renormalised
        )

    def _addresses(self, name: str, schema: Schema, num_layers: int) -> list[tuple[int, Key, Any]]:
        """The layers that one hook is edited at, with their sites and the path of the edit there."""
        addresses: list[tuple[int, Key, Any]] = []
        for layer, (hook, at) in site_names.select(name, self.layers, schema, num_layers).items():
            _check_op(self.op, hook, schema)
            if self.streams == "post_mix" and (hook, at) == ("mhc_streams_pre_attn", 0):
                raise SteeringError(
                    "streams='post_mix' at mhc_streams_pre_attn[0]: no sublayer has written those streams "
                    "yet. Use a later layer, or name the streams."
                )
            if self.path != "both" and "mhc_streams_final" not in schema:
                raise SteeringError(
                    f"path is {quoted(self.path)}, but edits of this model act on what is read and on what is carried. "
                    "Leave path out."
                )
            path = self.path if hook.startswith("mhc_streams") else "both"
            if hook == "mhc_streams_final" and path == "carry":
                path = "both"  # everything after it reads the carried streams
            addresses.append((layer, (hook, at), path))
        return addresses

    def _at_address(
        self, address: Key, layer: int, row: HookSchema, prompt: PromptIds, max_tokens: int
    ) -> Self:
        """The edit with the vector for one site, whose rows are described by `row`."""
        vector = self.vector.at(layer) if hasattr(self.vector, "at") else self.vector
        return self if vector is self.vector else replace(self, vector=vector)

    def _values(self, vector: Any, hook: str, row: HookSchema) -> torch.Tensor:
        """The numbers of the vector at a hook: [width], or [positions, width]."""
        if isinstance(vector, MixerMatrix):
            return vector.tensor(hook, row)
        shape: tuple[int, ...] = getattr(vector, "shape", ())
        if len(shape) > 1 and shape != row.logical_shape:
            expected = ", ".join(map(str, row.logical_shape))
            raise SteeringError(
                f"the vector has shape {shape}, {hook} has rows of shape ({expected}). Give one row for all tokens; "
                "rows by position go into Patch, or into a function (Call)."
            )
        return torch.zeros(row.width) if vector == 0 else vector.tensor()

    def _at_mixer(self, vector: torch.Tensor, row: HookSchema, hook: str, path: Any) -> SiteEdit:
        """The operation for rows of a mixer; `streams` selects entries."""
        if vector.shape[-1] != row.width:
            shape = "x".join(map(str, row.logical_shape))
            raise SteeringError(f"the source has {vector.shape[-1]} numbers, {hook} has {shape} weights.")
        renormalise = bool(getattr(self, "renormalise", False))
        if renormalise and len(row.logical_shape) == 1:
            raise SteeringError(
                f"renormalise makes a mixer [from, to] doubly stochastic, and {hook} has one weight for each stream. "
                "Leave it out."
            )
        entries = mixer_entries(self.streams, row)
        edit = self._site_edit(vector, None, False, path)
        if edit.op == "patch" and edit.scale == 1 and entries is None and renormalise:
            edit, renormalise = replace(edit, vector=renormalised(vector, row)), False
        return replace(edit, entries=entries, renormalise=renormalise)

    def _positions(self, text_len: int) -> frozenset[int] | None:
        """The positions that this edit has rows for; None if it is the same at all positions."""
        if not isinstance(self.vector, PositionRows):
            return None
        end = text_len - 1
        late = [position for position in self.vector.positions if position >= end]
        if late:
            raise SteeringError(
                f"there is a row for position {late[0]}, but the last token that is run stands at {end - 1}. Leave it "
                "out (where=), align a run by its tokens (align='tokens'), or patch a longer text."
            )
        return frozenset(self.vector.positions)

    def _from_module(self, modules: Mapping[str, Any]) -> Self:
        if not isinstance(self.vector, str):
            return self
        if self.vector not in modules:
            known = ", ".join(sorted(modules)) or "none"
            raise SteeringError(
                f"there is no module named {quoted(self.vector)}; registered: {known}."
                f"{did_you_mean(self.vector, modules)} "
                "Register it first: engine.modules[name] = vector."
            )
        return replace(self, vector=modules[self.vector])

    def _with_vector_fields(self) -> Self:
        """The edit with hook, layers and streams of its steering vector, where it has none of its own."""
        vector = self.vector
        if not isinstance(vector, SteeringVector):
            return self
        if vector.op != "add" and self.op in ("add", "patch"):
            raise SteeringError(
                f"this vector is made to {vector.op}, and {type(self).__name__} would take it for what to {self.op}. "
                f"Use {vector.op.capitalize()}, or import it again with op='add'."
            )
        fields: dict[str, Any] = {}
        if self.hook is None:
            fields["hook"] = vector.hook
        if self.layers is None:
            fields["layers"] = list(vector.layers)
        if self.streams is None and vector.streams != "flat":
            fields["streams"] = vector.streams
        if vector.scale_unit == "row_norm" and self.op == "add":
            fields["norm_match"] = True
        return replace(self, **fields)

    def _at_site(self, vector: torch.Tensor, row: HookSchema, hook: str, path: Any) -> SiteEdit:
        """The operation for rows of this hook; widths and streams are checked."""
        streams = self.streams
        if getattr(self, "renormalise", False):
            raise SteeringError(f"renormalise is for mixers [from, to], and {hook} is none. Leave it out.")
        has_streams = hook.startswith("mhc_streams")
        width, numbers = row.width, vector.shape[-1]
        if not has_streams:
            if streams is not None:
                raise SteeringError(
                    f"streams is {quoted(streams)}, but {hook} has one stream. Leave streams out."
                )
            heads = getattr(self, "heads", None)
            if heads is not None:
                return self._at_heads(vector, row, hook, heads)
            if numbers != width:
                raise SteeringError(f"the vector has {numbers} numbers, {hook} has rows of {width}.")
            return self._site_edit(vector, None, False, path)
        if getattr(self, "heads", None) is not None:
            raise SteeringError(_no_heads(hook))
        m, d = row.logical_shape
        if streams == "post_mix":
            if numbers != d or self.op != "add":
                raise SteeringError(
                    f"streams='post_mix' adds one vector of {d} numbers to every stream by its weight; "
                    f"got {self.op} with {numbers} numbers."
                )
            return self._site_edit(vector, None, True, path)
        chosen = tuple(range(m)) if streams == "all" else streams
        if chosen is not None and any(s >= m for s in chosen):
            raise SteeringError(f"streams is {list(chosen)}, this model has streams 0..{m - 1}.")
        if numbers == d:
            if chosen is None:
                raise SteeringError(
                    f"the vector has {d} numbers, one stream's width, and streams is not given; {hook} has "
                    f"rows of m*d = {width}. Give streams='all', 'post_mix' or a list."
                )
            return self._site_edit(vector, chosen, False, path)
        if numbers != width:
            raise SteeringError(
                f"the vector has {numbers} numbers, {hook} has rows of m*d = {m}*{d} = {width} (or {d} with streams=)."
            )
        if chosen is not None and self.op == "patch":  # the other streams are unchanged
            return self._site_edit(vector, chosen, False, path)
        if chosen is not None:  # the parts of other streams are zeroed
            keep = vector.new_zeros(m, d)
            keep[list(chosen)] = vector.view(m, d)[list(chosen)]
            vector = keep.flatten()
        return self._site_edit(vector, None, False, path)

    def _at_heads(self, vector: torch.Tensor, row: HookSchema, hook: str, heads: tuple[int, ...]) -> SiteEdit:
        """The operation for some heads of a hook that has their outputs side by side. `vector` is a whole row, of which
        the parts of these heads are used, or has the width of one head."""
        if len(row.logical_shape) != 2:
            raise SteeringError(_no_heads(hook))
        count, width = row.logical_shape
        if heads[-1] >= count:
            raise SteeringError(f"heads is {list(heads)}, this model has heads 0..{count - 1}.")
        if vector.shape[-1] == width:
            vector = torch.cat([vector] * count, -1)
        if vector.shape[-1] != row.width:
            raise SteeringError(
                f"the vector has {vector.shape[-1]} numbers, {hook} has rows of {row.width}, {width} for each head."
            )
        entries = tuple(head * width + index for head in heads for index in range(width))
        return replace(self._site_edit(vector, None, False, "both"), entries=entries)

    def _site_edit(self, vector: Any, streams: tuple[int, ...] | None, post_mix: bool, path: Any) -> SiteEdit:
        raise AssertionError("implemented by every kind of edit")


@dataclass(frozen=True)
class Add(VectorEdit):
    """Add a vector: `h + scale * vector`. `Add("spooky")`, `Add(vector, "mlp_out", [4], scale=2.0, streams=[1])`.

    `vector` is the name of a module, a tensor, a list of numbers or a `SteeringVector`, which provides hook, layers and
    streams where the edit has none. `streams` of a stream hook are the streams it is added to; "post_mix" multiplies it
    by the live write-out weights, as if the sublayer had produced it. `norm_match` scales the vector to the norm of
    each row. `where` and `phase` select tokens, `path` the streams that are read, carried or both, `when` is a `Gate`.
    """

    norm_match: bool = False

    op: ClassVar[str] = "add"

    def _site_edit(self, vector: Any, streams: tuple[int, ...] | None, post_mix: bool, path: Any) -> SiteEdit:
        if self.norm_match and post_mix:
            raise SteeringError(
                "norm_match goes by a row's norm, streams='post_mix' by live weights. Choose one."
            )
        if self.norm_match and float(vector.norm()) == 0:
            raise SteeringError("norm_match needs a direction, and the vector is zero.")
        return SiteEdit("add", vector, self.scale, path, streams, self.norm_match, post_mix)


@dataclass(frozen=True)
class Clamp(VectorEdit):
    """Keep the component along a direction within bounds: `min <= h . v / |v| <= max`; `min = max` holds it.

    `scale` from 0 to 1 goes a part of the way. At mixers, without a vector (None), every entry is clamped, and
    `renormalise` makes the mixer doubly stochastic again. The other fields are those of `Add`."""

    min: float | None = None
    max: float | None = None
    renormalise: bool = False

    op: ClassVar[str] = "clamp"

    @staticmethod
    def _source(value: Any) -> Any:
        return None if value is None else VectorEdit._source(value)

    def _check(self) -> None:
        _check_flag(self.renormalise)
        for name in ("min", "max"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, finite_number(getattr(self, name), name))
        if self.min is None and self.max is None:
            raise SteeringError(
                "Clamp has neither min nor max. Give at least one bound; min = max holds a value."
            )
        if self.min is not None and self.max is not None and self.min > self.max:
            raise SteeringError(f"min ({self.min}) is above max ({self.max}). Swap them.")
        if not 0 <= self.scale <= 1:
            raise SteeringError(
                f"scale is {self.scale}, expected 0 to 1 for a clamp. Project allows other strengths."
            )

    def _values(self, vector: Any, hook: str, row: HookSchema) -> torch.Tensor:
        if vector is None and not is_mixer(hook):
            raise SteeringError(
                f"Clamp has no vector, which bounds every weight of a mixer, and {hook} is none. Give a vector."
            )
        return torch.zeros(row.width) if vector is None else super()._values(vector, hook, row)

    def _site_edit(self, vector: Any, streams: tuple[int, ...] | None, post_mix: bool, path: Any) -> SiteEdit:
        if self.vector is None:
            return SiteEdit("bound", vector, self.scale, path, streams, low=self.min, high=self.max)
        return SiteEdit("clamp", _unit(vector), self.scale, path, streams, low=self.min, high=self.max)


@dataclass(frozen=True)
class Project(VectorEdit):
    """Remove a direction: `h - scale * (h . v) v` with `v` of norm 1. The fields are those of `Add`."""

    op: ClassVar[str] = "project"

    def _site_edit(self, vector: Any, streams: tuple[int, ...] | None, post_mix: bool, path: Any) -> SiteEdit:
        return SiteEdit("clamp", _unit(vector), self.scale, path, streams, low=0.0, high=0.0)


@dataclass(frozen=True)
class Patch(VectorEdit):
    """Replace rows: `h + scale * (vector - h)`. The other fields are those of `Add`.

    `vector` is the new row: a vector as for other edits, 0 for zeros, or rows by position: a tensor [T, *row_shape]
    from position 0 on, `PositionRows`, captured rows (`output.acts[hook, layer]`), or a whole run (a `Trace`,
    `output.acts`), of which the rows of the edit's hook and layers are used. With rows by position only those positions
    are patched. For mixers it may also be "identity", "uniform", `{"permutation": [...]}` or a matrix [from, to].

    `align` says which row of a run goes where: "position" keeps positions, "tokens" aligns the two texts token by
    token (`align_tokens`), for texts of different length. `heads` of the hook attn_head_out are the heads that are
    patched, the others keep their output."""

    align: str = "position"
    renormalise: bool = False
    heads: Any = None

    op: ClassVar[str] = "patch"

    def _check(self) -> None:
        _check_flag(self.renormalise)
        object.__setattr__(self, "heads", _heads(self.heads))
        if self.align not in ALIGN:
            raise SteeringError(f"align is {quoted(self.align)}, expected one of {', '.join(ALIGN)}.")
        if self.align != "position" and not isinstance(self.vector, RunRows):
            raise SteeringError(
                "align='tokens' needs the rows of a run with its tokens: a Trace, or output.acts. Leave align out."
            )

    def _at_address(
        self, address: Key, layer: int, row: HookSchema, prompt: PromptIds, max_tokens: int
    ) -> Self:
        if isinstance(self.vector, TensorRows):
            return replace(self, vector=self.vector.for_hook(address[0], row.logical_shape))
        if not isinstance(self.vector, RunRows):
            return VectorEdit._at_address(self, address, layer, row, prompt, max_tokens)
        only: Sequence[int] | None = None
        if self.where is not None and prompt is not None and not isinstance(prompt, int):
            selector = bind(self.where, prompt, max_tokens, "where")
            only = list(offsets(self.phase, selector, 0, prompt, len(prompt)))
        return replace(self, vector=self.vector.at_site(address, prompt, self.align, only), align="position")

    @staticmethod
    def _source(value: Any) -> Any:
        matrix = MixerMatrix.parse(value)
        if matrix is not None:
            return matrix
        if is_list(value) and value and all(is_list(line) for line in value):
            value = [number for line in value for number in line]
        if TensorRows.fits(value):
            return TensorRows(value)
        if isinstance(value, (PositionRows, RunRows, TensorRows)) or (
            type(value) in (int, float) and value == 0
        ):
            return value
        if isinstance(value, Mapping) and value and isinstance(next(iter(value)), tuple):
            return RunRows(value)
        if isinstance(value, Mapping) and "positions" in value:
            return PositionRows.from_json(value)
        if hasattr(value, "tensor") and hasattr(value, "positions"):
            return PositionRows.captured(value)
        return VectorEdit._source(value)

    def _site_edit(self, vector: Any, streams: tuple[int, ...] | None, post_mix: bool, path: Any) -> SiteEdit:
        positions = self.vector.positions if isinstance(self.vector, PositionRows) else None
        return SiteEdit("patch", vector, self.scale, path, streams, positions=positions)


@dataclass(frozen=True)
class Scale(VectorEdit):
    """Multiply rows: `vector` is the factor, `Scale(0.5, "mlp_out", [4])` halves the output.

    `scale` below 1 goes a part of the way. `heads` of the hook attn_head_out limits it to these heads. The other fields
    are those of `Add`."""

    renormalise: bool = False
    heads: Any = None

    op: ClassVar[str] = "scale"

    @property
    def factor(self) -> float:
        factor: float = self.vector
        return factor

    @staticmethod
    def _source(value: Any) -> Any:
        return finite_number(value, "factor")

    def _check(self) -> None:
        _check_flag(self.renormalise)
        object.__setattr__(self, "heads", _heads(self.heads))

    def to_json(self) -> dict[str, Any]:
        fields = super().to_json()
        return {"op": self.op, "factor": fields.pop("vector")} | fields

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        return super().from_json({"vector" if name == "factor" else name: raw[name] for name in raw})

    def _values(self, vector: Any, hook: str, row: HookSchema) -> torch.Tensor:
        named = hook.startswith("mhc_streams") and self.streams not in (None, "post_mix")
        return torch.zeros(row.logical_shape[-1] if named else row.width)

    def _site_edit(self, vector: Any, streams: tuple[int, ...] | None, post_mix: bool, path: Any) -> SiteEdit:
        return SiteEdit("patch", vector, self.scale * (1 - self.factor), path, streams)


@dataclass(frozen=True, eq=False)
class ResolvedVectorEdit(ResolvedEdit):
    """`renormalised`: its mixers are made doubly stochastic."""

    renormalised: bool = False

    def describe(self) -> Mapping[str, Any]:
        """Of an edited mixer [from, to]: whether the edit leaves it doubly stochastic. Of a gate: what it reads."""
        mixers = [key for key in self.sites if key[0].endswith("_res_mix")]
        if not mixers:
            return super().describe()
        report = {
            "sites": [f"{hook}[{layer}]" for hook, layer in mixers],
            "mixer": "renormalised" if self.renormalised else "as given",
            "doubly_stochastic": self.renormalised or all(_keeps_sums(self.sites[key]) for key in mixers),
        }
        return {**super().describe(), "mixers": report}


def _unknown(hook: str, schema: Schema) -> str | None:
    """Why this model has no hook, or group of hooks, of this name; None if it has."""
    reasons = (site_names.refusal(name, schema) for name in site_names.members(hook, schema))
    return next((why for why in reasons if why is not None), None)


def check_directions(edits: Sequence[ResolvedEdit]) -> None:
    """Refuse more than `MAX_DIRECTIONS` clamps and projections at one site in one phase."""
    for phase in PHASES[1:]:
        count: Counter[Key] = Counter()
        for edit in edits:
            if edit.phase in ("both", phase):
                count.update(key for key, site in edit.sites.items() if site.op == "clamp")
        for (hook, layer), directions in count.items():
            if directions > MAX_DIRECTIONS:
                raise SteeringError(
                    f"{directions} directions are clamped or projected at {hook}[{layer}] during {phase}, at most "
                    f"{MAX_DIRECTIONS} can be, global ones included. Drop some, or spread them over layers."
                )


def check_edits(edits: Any) -> tuple[RequestEdit, ...]:
    """The edits as a tuple; anything but a list of edits is refused."""
    listed = [edits] if isinstance(edits, RequestEdit) else edits
    if not isinstance(listed, (list, tuple)) or not all(isinstance(edit, RequestEdit) for edit in listed):
        raise SteeringError(
            f"steer is {quoted(edits)}, expected a list of edits such as Add, Project, Clamp, Patch or Scale."
        )
    return tuple(listed)


def _check_op(op: str, hook: str, schema: Schema) -> None:
    """Refuse an edit that a hook does not take."""
    row = schema[hook]
    if op in row.edits:
        return
    if row.edits:
        raise SteeringError(f"{hook} takes {', '.join(row.edits)}, not {op}.")
    steerable = ", ".join(sorted(name for name, row in schema.items() if row.steerable))
    raise SteeringError(f"{hook} is capture-only: it can be read, not changed. Steerable: {steerable}.")


def _check_flag(renormalise: Any) -> None:
    if not isinstance(renormalise, bool):
        raise SteeringError(f"renormalise is {quoted(renormalise)}, expected True or False.")


def _keeps_sums(edit: SiteEdit) -> bool:
    """Whether a doubly stochastic mixer is one after the edit, as far as that is known before it runs."""
    if edit.op != "patch" or edit.entries is not None or not 0 <= edit.scale <= 1:
        return False
    m = math.isqrt(edit.vector.shape[-1])
    matrix = edit.vector.unflatten(-1, (m, m))
    sums = torch.cat((matrix.sum(-1), matrix.sum(-2)))
    return bool((matrix >= 0).all()) and bool((sums - 1).abs().max() < 1e-3)


def _unit(vector: Any) -> Any:
    norm = float(vector.norm())
    if norm == 0:
        raise SteeringError(
            "the direction is zero, so nothing lies along it. Give a vector that is not zero."
        )
    return vector / norm


def _no_heads(hook: str) -> str:
    return (
        f"heads is for hooks that have the output of every head by itself, as attn_head_out of DeepSeek-V4; {hook} has "
        "not. Leave heads out, or change a part of its rows with a function: Call(fn, hook, layers)."
    )


def _heads(value: Any) -> tuple[int, ...] | None:
    value = listed(value)
    numbers = [as_int(head) for head in value] if is_list(value) else []
    if value is not None and (not numbers or any(head is None or head < 0 for head in numbers)):
        raise SteeringError(f"heads is {quoted(value)}, expected a list of numbers from 0.")
    return tuple(sorted({head for head in numbers if head is not None})) or None


def _streams(value: Any) -> Any:
    value = listed(value)
    if value is None or value in ("all", "post_mix"):
        return value
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise SteeringError(
            f"streams is {quoted(value)}, expected 'all', 'post_mix' or a list of stream numbers."
        )
    for stream in value:
        if as_int(stream) is None or stream < 0:
            raise SteeringError(f"streams holds {quoted(stream)}, expected stream numbers from 0.")
    return tuple(sorted(set(value)))
