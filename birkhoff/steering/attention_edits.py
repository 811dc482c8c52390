"""Edits of the attention sublayer of a request: `AttentionEdit`. Plain data, checked on construction and again against
a model.

    AttentionEdit(layers=[4], heads=[2])                              head 2 contributes nothing
    AttentionEdit("all", mask=[0, 1])                                 the first two tokens get no weight
    AttentionEdit([4], heads=[2], mask={"text": "Alice"})             nor do tokens of this text, in one head
    AttentionEdit([4], blocks={"force": [3], "forbid": [0]})          what the indexer chooses
    AttentionEdit("all", sink=0.0)                                    no sink
    AttentionEdit([5], entries=[2])                                   a compressed entry is missing
    AttentionEdit([4], heads=[2], when=Gate("happy", above=1.0))      head 2, where a probe fires

`where` and `phase` select the tokens whose attention changes (the queries), as for vector edits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from birkhoff.errors import SteeringError, quoted
from birkhoff.hooks.attention_change import AttentionChange, Blocks, Ranges, ranges_of
from birkhoff.hooks.edit import SiteEdit
from birkhoff.hooks.field_paths import check_keys
from birkhoff.hooks.gating import SiteGate
from birkhoff.hooks.layers import is_list
from birkhoff.hooks.plan import Key
from birkhoff.hooks.positions import Positions, parse_positions
from birkhoff.hooks.resolved_edit import ResolvedEdit
from birkhoff.hooks.schema import Schema
from birkhoff.hooks.selector import bind
from birkhoff.hooks.site_names import layers_with
from birkhoff.hooks.sites import ATTN_HEAD_OUT, ATTN_WEIGHTS, ENTRY_TOKENS, INDEX_BLOCKS
from birkhoff.option_checks import as_int, listed
from birkhoff.steering.gated_edits import Gate
from birkhoff.steering.request_edit import Modules, PromptIds, RequestEdit, bound, parse_fields
from birkhoff.steering.vector import finite_number

HEAD_OUT, WEIGHTS = ATTN_HEAD_OUT.name, ATTN_WEIGHTS.name
RULES = ("any", "all", "none")
ABLATIONS = ("remove", "zero")
Pieces = Callable[[int], bytes]  # token id -> its bytes


@dataclass(frozen=True)
class TokenChoice:
    """Tokens of a text: by position, or as those that overlap an occurrence of `text` in the prompt."""

    positions: Positions | None = None
    text: str | None = None

    @classmethod
    def parse(cls, value: Any, path: str) -> TokenChoice:
        if isinstance(value, Mapping) and "text" in value:
            check_keys(value, ("text",), path, SteeringError)
            if not isinstance(value["text"], str) or not value["text"]:
                raise SteeringError(f"is {quoted(value['text'])}, expected a text.", f"{path}.text")
            return cls(text=value["text"])
        return cls(parse_positions(value, path))

    def to_json(self) -> Any:
        return {"text": self.text} if self.positions is None else self.positions.to_json()

    def located(self, ids: Sequence[int], pieces: Pieces | None, path: str) -> TokenChoice:
        """With positions in a prompt instead of a text."""
        if self.text is None:
            return self
        return TokenChoice(Positions(indices=_positions_of(self.text, ids, pieces, path)))

    def ranges(self, prompt: Sequence[int] | int, max_tokens: int, path: str) -> Ranges:
        """The tokens of a text as ranges of positions. A text must be located before."""
        if self.positions is None:
            raise SteeringError("a text needs a prompt with a tokenizer. Give positions.", path)
        selector = bind(self.positions, prompt, max_tokens, path)
        positions = selector.all_positions(None if isinstance(prompt, int) else prompt)
        if positions is None:
            raise SteeringError(
                "chooses generated tokens by id, which are not known yet. Choose them by position.", path
            )
        return ranges_of(positions.tolist())


@dataclass(frozen=True)
class KeyMask:
    """Keys that get no weight; `entries` says when a compressed entry of such tokens is masked too."""

    tokens: TokenChoice
    entries: str = "any"

    @classmethod
    def parse(cls, value: Any) -> KeyMask:
        if isinstance(value, KeyMask):
            return value
        rest, rule = _with_word(value, "positions", "mask", "entries", RULES)
        return cls(TokenChoice.parse(rest, "mask"), rule)

    def to_json(self) -> Any:
        tokens = self.tokens.to_json()
        if self.entries == RULES[0]:
            return tokens
        own = tokens if self.tokens.positions is None else {"positions": tokens}
        return {**own, "entries": self.entries}


@dataclass(frozen=True)
class BlockChoice:
    """Compressed entries: by number, or as those of some tokens."""

    numbers: tuple[int, ...] = ()
    tokens: TokenChoice | None = None

    @classmethod
    def parse(cls, value: Any, path: str) -> BlockChoice:
        if isinstance(value, BlockChoice):
            return value
        if isinstance(value, Mapping):
            if "tokens" in value:
                check_keys(value, ("tokens",), path, SteeringError)
                return cls(tokens=TokenChoice.parse(value["tokens"], f"{path}.tokens"))
            return cls(tokens=TokenChoice.parse(value, path))
        return cls(_numbers(value, path))

    def to_json(self) -> Any:
        return list(self.numbers) if self.tokens is None else {"tokens": self.tokens.to_json()}

    def located(self, ids: Sequence[int], pieces: Pieces | None, path: str) -> BlockChoice:
        if self.tokens is None:
            return self
        return BlockChoice(tokens=self.tokens.located(ids, pieces, path))

    def bound(self, prompt: Sequence[int] | int, max_tokens: int, path: str) -> Blocks:
        return Blocks(
            self.numbers, () if self.tokens is None else self.tokens.ranges(prompt, max_tokens, path)
        )


@dataclass(frozen=True)
class BlockEdit:
    """Blocks that the indexer always chooses, and blocks that it never chooses."""

    force: BlockChoice | None = None
    forbid: BlockChoice | None = None

    @classmethod
    def parse(cls, value: Any) -> BlockEdit:
        if isinstance(value, BlockEdit):
            return value
        if not isinstance(value, Mapping) or not value:
            raise SteeringError(f"is {quoted(value)}, expected an object with 'force' or 'forbid'.", "blocks")
        check_keys(value, ("force", "forbid"), "blocks", SteeringError)
        return cls(**{name: BlockChoice.parse(part, f"blocks.{name}") for name, part in value.items()})

    def to_json(self) -> Any:
        parts = {"force": self.force, "forbid": self.forbid}
        return {name: part.to_json() for name, part in parts.items() if part is not None}


@dataclass(frozen=True)
class Ablated:
    """Compressed entries that are ablated: not found at all, or found as zeros."""

    entries: BlockChoice
    to: str = "remove"

    @classmethod
    def parse(cls, value: Any) -> Ablated:
        if isinstance(value, Ablated):
            return value
        rest, to = _with_word(value, "numbers", "entries", "to", ABLATIONS)
        return cls(BlockChoice.parse(rest, "entries"), to)

    def to_json(self) -> Any:
        entries = self.entries.to_json()
        if self.to == "remove":
            return entries
        return {**(entries if isinstance(entries, dict) else {"numbers": entries}), "to": self.to}


@dataclass(frozen=True)
class AttentionEdit(RequestEdit):
    """Changes attention in `layers` for the selected tokens.

    `heads` alone takes these heads out: their output is zero before the grouped projection. With `mask` or `sink` it
    limits those to the heads. `mask`: keys that get no weight. `blocks`: what the indexer chooses. `sink`: factor of
    the sink's share before normalisation, 0 for none. `entries`: compressed entries that are ablated.
    `when` limits it to tokens where a gate is open: gates of tokens for all edits, gates that read a row for heads that
    are taken out."""

    layers: Any = None
    heads: Any = None
    mask: Any = None
    blocks: Any = None
    sink: float | None = None
    entries: Any = None
    where: Any = None
    phase: str = "both"
    when: Any = None

    op: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.layers is None:
            raise SteeringError("AttentionEdit says no layers. Give layers=[...] or 'all'.")
        parse_fields(self)
        if self.when is not None:
            put(self, "when", Gate.parse(self.when))
        put(self, "heads", None if self.heads is None else _numbers(self.heads, "heads"))
        put(self, "mask", None if self.mask is None else KeyMask.parse(self.mask))
        put(self, "blocks", None if self.blocks is None else BlockEdit.parse(self.blocks))
        put(self, "entries", None if self.entries is None else Ablated.parse(self.entries))
        if self.sink is not None:
            put(self, "sink", finite_number(self.sink, "sink"))
            if self.sink < 0:
                raise SteeringError(f"sink is {self.sink}, expected a factor of 0 or more.")
        if all(part is None for part in (self.heads, self.mask, self.blocks, self.sink, self.entries)):
            raise SteeringError("AttentionEdit changes nothing. Give heads, mask, blocks, sink or entries.")
        if self.heads is not None and (self.blocks is not None or self.entries is not None):
            raise SteeringError(
                "heads is given beside blocks or entries, which all heads share. Use one edit for the heads and one "
                "for the others."
            )

    @property
    def takes_out_heads(self) -> bool:
        """Whether it silences heads, and does not change what is attended to."""
        return (self.mask, self.blocks, self.sink, self.entries) == (None, None, None, None)

    def located(self, ids: Sequence[int], pieces: Pieces | None) -> AttentionEdit:
        """The edit with positions in a prompt instead of texts. `pieces` gives the bytes of a token, if they are
        known."""
        mask, blocks, entries = self.mask, self.blocks, self.entries
        if mask is not None:
            mask = replace(mask, tokens=mask.tokens.located(ids, pieces, "mask"))
        if blocks is not None:
            choices = {"force": blocks.force, "forbid": blocks.forbid}
            blocks = BlockEdit(
                **{
                    name: None if choice is None else choice.located(ids, pieces, f"blocks.{name}")
                    for name, choice in choices.items()
                }
            )
        if entries is not None:
            entries = replace(entries, entries=entries.entries.located(ids, pieces, "entries"))
        return replace(self, mask=mask, blocks=blocks, entries=entries)

    def resolve(
        self, schema: Schema, num_layers: int, modules: Modules, prompt: PromptIds, max_tokens: int
    ) -> ResolvedEdit:
        if HEAD_OUT not in schema:
            raise SteeringError(
                "AttentionEdit needs a model of the V4 architecture on our own engine; this model has no "
                f"{HEAD_OUT}. It has: {', '.join(sorted(schema))}."
            )
        hook = HEAD_OUT
        if self.entries is not None:
            hook = ENTRY_TOKENS.name
        if self.blocks is not None:
            hook = INDEX_BLOCKS.name
        layers = layers_with(hook, self.layers, schema, num_layers)
        heads, channels = schema[HEAD_OUT].logical_shape
        if self.heads is not None and self.heads[-1] >= heads:
            raise SteeringError(f"heads is {list(self.heads)}, this model has heads 0..{heads - 1}.")
        sites: dict[Key, SiteEdit | AttentionChange] = {}
        if self.takes_out_heads:
            silent = SiteEdit("patch", torch.zeros(channels), streams=self.heads)
            sites = {(HEAD_OUT, layer): silent for layer in layers}
        elif prompt is not None:
            change = self._change(prompt, max_tokens)
            if change != AttentionChange(self.heads):  # otherwise it changes nothing
                sites = {(WEIGHTS, layer): change for layer in layers}
        fields = self.to_json()
        names = ("heads", "mask", "blocks", "sink", "entries")
        report = {name: fields[name] for name in names if name in fields} | {"layers": list(layers)}
        return ResolvedAttention(
            sites,
            bound(self.where, prompt, max_tokens),
            self.phase,
            report={"attention": report},
            takes_out_heads=self.takes_out_heads,
        )

    def _change(self, prompt: Sequence[int] | int, max_tokens: int) -> AttentionChange:
        values: dict[str, Any] = {"heads": self.heads}
        if self.mask is not None:
            ranges = self.mask.tokens.ranges(prompt, max_tokens, "mask")
            values |= {"mask": ranges, "mask_entries": self.mask.entries}
        for name in ("force", "forbid"):
            choice = None if self.blocks is None else getattr(self.blocks, name)
            if choice is not None:
                values[name] = choice.bound(prompt, max_tokens, f"blocks.{name}")
        if self.entries is not None:
            ablated = self.entries.entries.bound(prompt, max_tokens, "entries")
            values |= {"ablate": ablated, "ablation": self.entries.to}
        if self.sink is not None and self.sink != 1.0:
            values["sink"] = self.sink
        return AttentionChange(**values)


@dataclass(frozen=True, eq=False)
class ResolvedAttention(ResolvedEdit):
    """`takes_out_heads`: it replaces rows of heads, so that a gate which reads a row can limit it."""

    takes_out_heads: bool = False

    def gated(self, gate: SiteGate | frozenset[int], gate_report: Mapping[str, Any] | None = None) -> Self:
        if not isinstance(gate, frozenset) and not self.takes_out_heads:
            raise SteeringError(
                "the gate reads a row, but the keys, blocks, entries and sink that a token attends to are set before "
                "the layers run. Take out heads, or gate by tokens: Gate(tokens=...)."
            )
        return super().gated(gate, gate_report)


def _with_word(value: Any, inner: str, path: str, name: str, allowed: Sequence[str]) -> tuple[Any, str]:
    """A choice and the word beside it, the first allowed one if there is none: the choice itself, its fields and
    `name`, or the choice as `inner` and `name`."""
    if not isinstance(value, Mapping) or not {name, inner} & set(value):
        return value, allowed[0]
    rest = {key: part for key, part in value.items() if key != name}
    if inner in rest:
        check_keys(rest, (inner,), path, SteeringError)
    word = value.get(name, allowed[0])
    if word not in allowed:
        raise SteeringError(f"is {quoted(word)}, expected one of {', '.join(allowed)}.", f"{path}.{name}")
    return rest.get(inner, rest), word


def _positions_of(text: str, ids: Sequence[int], pieces: Pieces | None, path: str) -> tuple[int, ...]:
    """Positions of the tokens that overlap an occurrence of `text` in the prompt."""
    if pieces is None:
        raise SteeringError("a text needs a tokenizer, and there is none here. Give positions.", path)
    wanted = text.encode()
    ends = [0]
    parts = [pieces(token) for token in ids]
    for part in parts:
        ends.append(ends[-1] + len(part))
    whole = b"".join(parts)
    found: set[int] = set()
    at = whole.find(wanted)
    while at >= 0:
        found |= {i for i in range(len(parts)) if ends[i] < at + len(wanted) and ends[i + 1] > at}
        at = whole.find(wanted, at + 1)
    if not found:
        raise SteeringError(f"{quoted(text)} does not occur in the prompt.", path)
    return tuple(sorted(found))


def _numbers(value: Any, name: str) -> tuple[int, ...]:
    value = listed(value)
    numbers = [as_int(item) for item in value] if is_list(value) else []
    if not numbers or any(number is None or number < 0 for number in numbers):
        raise SteeringError(f"{name} is {quoted(value)}, expected a list of numbers from 0.")
    return tuple(sorted({number for number in numbers if number is not None}))
