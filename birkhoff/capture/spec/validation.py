"""Validation of captures: rules V1 to V12, checked in this order.

One function checks a `Capture` on construction (without a model: forms and types), when it is resolved against a
model, and the JSON form, so that the Python and the wire form cannot diverge. Each rule is applied to every hook
before the next rule. Errors are `CaptureValidationError`s that begin with the path of the field and carry the rule.
One exception to the order: an estimate (V11) that needs an unusable projection is left to V12.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from birkhoff.capture.spec.estimate import (
    DTYPES,
    REDUCTIONS,
    Estimate,
    StoredRow,
    estimate,
    has_streams,
    stored_row,
)
from birkhoff.errors import CaptureValidationError, SelectorError, did_you_mean, quoted
from birkhoff.hooks import site_names
from birkhoff.hooks.layers import ALL_LAYERS, LayerSelector, check_layers_form, is_list, parse_layers
from birkhoff.hooks.positions import parse_positions
from birkhoff.hooks.schema import Schema
from birkhoff.hooks.selector import PositionSelector, bind
from birkhoff.hooks.site_names import Address
from birkhoff.hooks.sites import BY_NAME
from birkhoff.option_checks import as_int

LAYOUTS = ("per_file", "packed", "sharded")
POINTS = ("before", "after")
RETURNS = ("inline", "file", "handle")
FIELDS = (
    "hooks positions request_id tag capture_point reduce project dtype streams return layout accepted_only"
).split()
_WORDS = {
    "capture_point": POINTS,
    "reduce": (None, *REDUCTIONS),
    "dtype": (None, *DTYPES),
    "return": (None, *RETURNS),
}
_RULES = {"form": "V5", "layer": "V6", "empty": "V7", "position": "V8"}
_LONGEST_ID = 256


@dataclass(frozen=True)
class ConsumerRules:
    """Requirements of an enabled consumer on requests that name it."""

    needs_ids: bool = False  # request_id and tag are required: they become file names
    layouts: tuple[str, ...] = LAYOUTS
    returns: str = "inline"  # default of the field `return`


@dataclass(frozen=True)
class CaptureContext:
    """What a request is checked against. In `consumers`, None marks a consumer that exists but is not enabled."""

    schema: Schema
    num_layers: int
    prompt: int | Sequence[int]  # token ids, or their count
    max_tokens: int
    consumers: Mapping[str, ConsumerRules | None] | None = None  # None: any name is accepted
    projections: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # name -> (rows, columns)
    max_request_bytes: int | None = None
    max_inline_bytes: int | None = None
    cached_tokens: int = 0  # tokens of the prompt that come from a cache and cannot be computed
    spent_bytes: int = 0  # by other consumers of the same request


@dataclass(frozen=True, eq=False)
class Resolution:
    """What the rules find out about a capture for one model and prompt. `addresses` are (hook, layer) as tapped."""

    requested: Mapping[Address, Address]  # (hook, layer) as the request names it -> address
    addresses: tuple[Address, ...]  # by layer, then by hook id, without duplicates
    rows: Mapping[str, StoredRow]  # by tapped hook
    selector: PositionSelector
    estimate: Estimate
    rules: ConsumerRules


def check(
    raw: Any, path: str, consumer: str | None, context: CaptureContext | None
) -> tuple[dict[str, Any], Resolution | None]:
    """Parse and check the fields of a capture; with `context`, also resolve them."""
    rules = _consumer(path, consumer, context)  # V1
    _known_fields(raw, path)
    fields = dict(raw)
    _identifiers(fields, path, rules)  # V2
    hooks = _hooks_object(fields, path)  # V3
    _hook_names(hooks, path, context)  # V4
    with _translated():
        selectors = _layer_selectors(hooks, path, context)  # V5, V6, V7
        positions = parse_positions(fields.get("positions", "all_prompt"), f"{path}.positions")  # V8
        selector = (
            None
            if context is None
            else bind(positions, context.prompt, context.max_tokens, f"{path}.positions")
        )
    _cached(selector, path, context)  # V9
    _layout(fields, path, rules)  # V10
    values = {**_optional(fields, path), "hooks": selectors, "positions": positions}
    if context is None or selector is None:
        return values, None
    return values, _resolve(values, path, context, rules, selector)  # V11, V12


def field_path(path: str, name: str) -> str:
    """The path of a caller-supplied field name: unusual or long names are quoted and truncated."""
    return f"{path}.{name if re.fullmatch(r'[A-Za-z0-9_-]{1,64}', name) else quoted(name, 40)}"


@contextmanager
def _translated() -> Iterator[None]:
    """Convert errors of the selectors to capture validation errors."""
    try:
        yield
    except SelectorError as error:
        raise CaptureValidationError(error.reason, error.path, _RULES[error.kind]) from None


def _consumer(path: str, consumer: str | None, context: CaptureContext | None) -> ConsumerRules:
    if context is None or context.consumers is None or consumer is None:
        return ConsumerRules()
    enabled = (
        ", ".join(sorted(name for name, rules in context.consumers.items() if rules is not None)) or "none"
    )
    if consumer not in context.consumers:
        nested = (
            ' The fields of a capture are nested under a consumer: {"memory": {"hooks": {hook: layers}}}.'
            if consumer in FIELDS or site_names.known_name(consumer)
            else ""
        )
        raise CaptureValidationError(
            f"no consumer has this name. Enabled here: {enabled}.{nested}", path, "V1"
        )
    rules = context.consumers[consumer]
    if rules is None:
        raise CaptureValidationError(
            f"this consumer is not enabled on this server. Enabled here: {enabled}. A server enables it with "
            "--capture-consumers.",
            path,
            "V1",
        )
    return rules


def _known_fields(raw: Any, path: str) -> None:
    if not isinstance(raw, Mapping):
        raise CaptureValidationError(
            f"is {quoted(raw)}, expected an object with 'hooks' and 'positions'.", path
        )
    unknown = [key for key in raw if key not in FIELDS]
    if unknown:
        raise CaptureValidationError(
            f"has the unknown field {quoted(unknown[0])}. Fields: {', '.join(FIELDS)}.", path
        )


def _identifiers(fields: Mapping[str, Any], path: str, rules: ConsumerRules) -> None:
    for name in ("request_id", "tag"):
        value, where = fields.get(name), f"{path}.{name}"
        if value is None and not rules.needs_ids:
            continue
        if value is None:
            raise CaptureValidationError("is missing; this consumer files captures under it.", where, "V2")
        if not isinstance(value, str) or not value:
            raise CaptureValidationError(
                f"is {quoted(value)}, expected a text that is not empty.", where, "V2"
            )
        if len(value) > _LONGEST_ID:
            raise CaptureValidationError(
                f"has {len(value)} characters, expected {_LONGEST_ID} at most.", where, "V2"
            )
        if ".." in value or value.startswith("/"):
            raise CaptureValidationError(
                f"is {quoted(value)}; it becomes part of a path and may neither hold '..' nor start with '/'.",
                where,
                "V2",
            )


def _hooks_object(fields: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    hooks, where = fields.get("hooks"), f"{path}.hooks"
    if not isinstance(hooks, Mapping) or not hooks:
        seen = "is missing" if "hooks" not in fields else f"is {quoted(hooks)}"
        raise CaptureValidationError(
            f'{seen}, expected an object such as {{"mlp_out": [3, 7]}}.', where, "V3"
        )
    for hook in hooks:
        if not isinstance(hook, str):
            raise CaptureValidationError(f"has the key {quoted(hook)}, expected names of hooks.", where, "V3")
    return hooks


def _hook_names(hooks: Mapping[str, Any], path: str, context: CaptureContext | None) -> None:
    for hook in hooks:
        why = None
        if context is not None:
            why = site_names.refusal(hook, context.schema)
        elif not site_names.known_name(hook):
            names = sorted((*BY_NAME, *site_names.ALIASES))
            hint = site_names.counterpart(hook) or did_you_mean(hook, names)
            why = f"no model has a hook of this name.{hint} Hooks: {', '.join(names)}."
        if why is not None:
            raise CaptureValidationError(why, field_path(f"{path}.hooks", hook), "V4")


def _layer_selectors(
    hooks: Mapping[str, Any], path: str, context: CaptureContext | None
) -> dict[str, LayerSelector]:
    where = {hook: field_path(f"{path}.hooks", hook) for hook in hooks}
    once = {hook for hook in hooks if hook in BY_NAME and BY_NAME[hook].once}
    for hook, value in hooks.items():
        # A hook that fires once accepts any selector, even a malformed one; only its JSON type must be a selector's.
        if hook not in once or not (isinstance(value, (str, Mapping, LayerSelector)) or is_list(value)):
            check_layers_form(value, where[hook])
    parsed = {h: ALL_LAYERS if h in once else parse_layers(value, where[h]) for h, value in hooks.items()}
    for hook, selector in parsed.items():
        if context is not None:
            selector.check(context.num_layers, where[hook])
            if site_names.from_tool(hook, context.num_layers, site_names.has_streams(context.schema)):
                site_names.select(hook, selector, context.schema, context.num_layers)
    for hook, selector in parsed.items():
        selector.check_not_empty(where[hook])
    return parsed


def _cached(selector: PositionSelector | None, path: str, context: CaptureContext | None) -> None:
    if selector is None or context is None:
        return
    lowest = selector.lowest_prompt_position()
    if lowest is not None and lowest < context.cached_tokens:
        raise CaptureValidationError(
            f"asks for position {lowest}, but the first {context.cached_tokens} tokens come from the prefix cache and "
            "are not computed. Ask for later positions, or send the request without cached prefix.",
            f"{path}.positions",
            "V9",
        )


def _layout(fields: Mapping[str, Any], path: str, rules: ConsumerRules) -> None:
    layout, where = fields.get("layout"), f"{path}.layout"
    if layout is not None and (not isinstance(layout, str) or layout not in LAYOUTS):
        raise CaptureValidationError(
            f"is {quoted(layout)}, expected one of {', '.join(LAYOUTS)}.", where, "V10"
        )
    if layout is not None and layout not in rules.layouts:
        allowed = ", ".join(rules.layouts) or "no layout"
        raise CaptureValidationError(
            f"is {quoted(layout)}, but this consumer stores {allowed}.", where, "V10"
        )


def _optional(fields: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Parse the fields outside the numbered rules, and those that need no further check."""
    values = {name: fields.get(name) for name in ("request_id", "tag", "layout", "project", "accepted_only")}
    for name, allowed in _WORDS.items():
        value = fields.get(name, allowed[0])
        if not (value is None or isinstance(value, str)) or value not in allowed:
            words = ", ".join("null" if word is None else word for word in allowed)
            raise CaptureValidationError(f"is {quoted(value)}, expected one of {words}.", f"{path}.{name}")
        values[name] = value
    if values["accepted_only"] is not None and values["accepted_only"] is not True:
        seen = quoted(values["accepted_only"])
        raise CaptureValidationError(
            f"is {seen}, expected true: rows of rejected draft tokens are never delivered. Leave it out.",
            f"{path}.accepted_only",
        )
    if values["project"] is not None and (not isinstance(values["project"], str) or not values["project"]):
        seen = quoted(values["project"])
        raise CaptureValidationError(f"is {seen}, expected the name of a matrix.", f"{path}.project", "V12")
    values["streams"] = _streams(fields.get("streams"), f"{path}.streams")
    return values


def _streams(value: Any, path: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    streams = [as_int(item) for item in value] if is_list(value) else []
    if (
        not streams
        or any(stream is None or stream < 0 for stream in streams)
        or len(set(streams)) < len(streams)
    ):
        raise CaptureValidationError(
            f"is {quoted(value)}, expected a list of different streams, from 0.", path
        )
    return tuple(sorted(stream for stream in streams if stream is not None))


def _resolve(
    values: Mapping[str, Any],
    path: str,
    context: CaptureContext,
    rules: ConsumerRules,
    selector: PositionSelector,
) -> Resolution:
    requested: dict[Address, Address] = {}
    for hook, layers in values["hooks"].items():
        try:
            addresses_of = site_names.select(hook, layers, context.schema, context.num_layers)
        except SelectorError as error:
            where = field_path(f"{path}.hooks", hook)
            raise CaptureValidationError(error.reason, where, _RULES[error.kind]) from None
        requested |= {(hook, layer): address for layer, address in addresses_of.items()}
    addresses = tuple(sorted(set(requested.values()), key=lambda at: (at[1], BY_NAME[at[0]].id)))
    schemas = {hook: context.schema[hook] for hook, _ in addresses}
    _plain_if_ragged(values, schemas, path)
    _streams_exist(values["streams"], schemas, f"{path}.streams")
    project = values["project"]
    matrix = None if project is None else context.projections.get(project)
    columns = None if matrix is None else matrix[1]
    rows = {
        hook: stored_row(schema, values["streams"], columns, values["reduce"], values["dtype"])
        for hook, schema in schemas.items()
    }
    length = (context.prompt if isinstance(context.prompt, int) else len(context.prompt)) + context.max_tokens

    def ragged_rows(address: Address, tokens: int) -> int | None:
        ragged = schemas[address[0]].ragged
        return None if ragged is None else ragged.total(*address, length, tokens)

    cost = estimate(rows, addresses, selector, values["reduce"], ragged_rows)
    if project is None or matrix is not None:
        _affordable(cost, values["return"] or rules.returns, path, context)  # V11
    if project is not None:
        _projects(project, matrix, schemas, values["streams"], path, context)  # V12
    return Resolution(requested, addresses, rows, selector, cost, rules)


def _plain_if_ragged(values: Mapping[str, Any], schemas: Schema, path: str) -> None:
    """Rows of ragged hooks name tokens in their first numbers and are stored as they are."""
    ragged = [hook for hook, schema in schemas.items() if schema.ragged is not None]
    for name in ("reduce", "project", "streams"):
        if ragged and values[name] is not None:
            raise CaptureValidationError(
                f"cannot be applied to {ragged[0]}, which has any number of rows for a token. Capture it by itself "
                f"without {name}.",
                f"{path}.{name}",
            )
    if ragged and values["dtype"] not in (None, "fp32"):
        raise CaptureValidationError(
            f"is {quoted(values['dtype'])}, but rows of {ragged[0]} hold positions, which need float32. Leave it out.",
            f"{path}.dtype",
        )


def _streams_exist(streams: tuple[int, ...] | None, schemas: Schema, path: str) -> None:
    if streams is None:
        return
    counts = {schema.logical_shape[0] for schema in schemas.values() if has_streams(schema)}
    if not counts:
        raise CaptureValidationError("none of the hooks has a row of streams. Leave the field out.", path)
    if streams[-1] >= min(counts):
        raise CaptureValidationError(
            f"names stream {streams[-1]}, this model has 0..{min(counts) - 1}.", path
        )


def _affordable(cost: Estimate, returns: str, path: str, context: CaptureContext) -> None:
    total = context.spent_bytes + cost.bytes
    rows = f"{cost.rows} rows at {cost.sites} sites"
    advice = "Choose fewer layers or positions, or use reduce, project, streams or dtype."
    if context.max_request_bytes is not None and total > context.max_request_bytes:
        others = f" ({context.spent_bytes} of them for other consumers)" if context.spent_bytes else ""
        raise CaptureValidationError(
            f"would store up to {total} bytes{others}, {rows}; a request may store {context.max_request_bytes} "
            f"(capture_max_request_bytes). {advice}",
            path,
            "V11",
        )
    if returns == "inline" and context.max_inline_bytes is not None and cost.bytes > context.max_inline_bytes:
        raise CaptureValidationError(
            f"would return up to {cost.bytes} bytes inline, {rows}; {context.max_inline_bytes} are allowed "
            f'(capture_inline_max_bytes). Use "return": "file", or: {advice}',
            path,
            "V11",
        )


def _projects(
    project: str,
    matrix: tuple[int, int] | None,
    schemas: Schema,
    streams: tuple[int, ...] | None,
    path: str,
    context: CaptureContext,
) -> None:
    where = f"{path}.project"
    if matrix is None:
        known = ", ".join(sorted(context.projections)) or "none"
        raise CaptureValidationError(
            f"no matrix is registered as {quoted(project)}. Registered: {known}.", where, "V12"
        )
    for hook, schema in schemas.items():
        width = stored_row(schema, streams).width
        if width != matrix[0]:
            raise CaptureValidationError(
                f"{quoted(project)} takes rows of {matrix[0]} numbers, those of {hook} have {width}.",
                where,
                "V12",
            )
