"""Request bodies: read within limits, parsed strictly, validated against a model.

Each step refuses with 400, 408, 413 or 415. Reading limits bytes and seconds. Parsing uses orjson, which rejects NaN,
lone surrogates and every encoding but UTF-8; nesting is limited before. Duplicate keys are refused, because two readers
of the same body could use different values. Validation uses pydantic in strict mode: `true` is not a number and `"3"`
is not an integer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from birkhoff.errors import quoted
from birkhoff.json_limits import exceeds_depth, structure
from birkhoff.server.api_errors import ApiError, bad_request
from birkhoff.server.field_errors import FIELD_UNKNOWN, explain, unknown_field

PROMPT_FIELDS = ("messages", "prompt", "input", "token_ids")  # names of the text in the bodies of all APIs
LARGE_BODY = 256 * 1024  # bytes from which a body is parsed and validated in a worker thread
Body = TypeVar("Body", bound="RequestBody")


class RequestBody(BaseModel):
    """A JSON object of a request. Unknown fields are kept, so that `refuse_unknown_fields` can name them.

    `without_effect` are fields of the protocol that are accepted and change nothing here; a call that sets one gets a
    warning. `refused` are fields of the protocol that cannot be served, with the reason; null, empty and false values
    of these are accepted."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)
    without_effect: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, str]] = {}

    @property
    def unknown_fields(self) -> list[str]:
        return list(self.model_extra or ())

    @property
    def prompt_field(self) -> str | None:
        """The name of the field that holds the text, None in a body without one."""
        return next((name for name in PROMPT_FIELDS if getattr(self, name, None) is not None), None)

    def given(self, names: Iterable[str]) -> dict[str, Any]:
        """The fields of these names that are not null."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class StrictBody(RequestBody):
    """A JSON object in which unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class EmptyBody(StrictBody):
    """The body of a call without fields: none, or an empty object."""


def read_query(http: Request, **defaults: str) -> list[str]:
    """The query parameters of these names in this order, or their defaults. Others are refused."""
    for name in http.query_params:
        if name not in defaults:
            raise bad_request(unknown_field(name[:64], name, list(defaults)), name[:64], FIELD_UNKNOWN)
    return [http.query_params.get(name, default) for name, default in defaults.items()]


MAX_UNKNOWN_FIELDS = 64


def refuse_unknown_fields(body: RequestBody, strict: bool = False) -> list[str]:
    """Raise 400 for the first field, also of nested objects, that this call does not have or cannot serve.

    Returns warnings about fields without effect; with `strict` these are refused too."""
    warnings = []
    for path, owner in _nested_bodies(body, ""):
        unknown = owner.unknown_fields
        if len(unknown) > MAX_UNKNOWN_FIELDS:
            raise bad_request(
                f"the body has {len(unknown)} unknown fields. Remove them.", code="fields-unknown"
            )
        for name in unknown:
            shown = path + name[:64]
            if name in owner.refused:
                if getattr(owner, name) in (None, {}, [], False, "none", "disabled"):
                    continue
                raise bad_request(
                    f"{shown} is not served: {owner.refused[name]}. Leave it out.", shown, "field-refused"
                )
            if name not in owner.without_effect:
                message = unknown_field(shown, name, list(type(owner).model_fields))
                raise bad_request(message, shown, FIELD_UNKNOWN)
            if strict:
                raise bad_request(
                    f"{shown!a} has no effect here, and X-Strict asks for exactness. Remove it.",
                    shown,
                    FIELD_UNKNOWN,
                )
            if getattr(owner, name) is not None:
                warnings.append(f"{shown!a} has no effect here.")
    return warnings


def _nested_bodies(value: Any, path: str) -> Iterator[tuple[str, RequestBody]]:
    """The bodies in a value, with the prefix of the names of their fields."""
    if isinstance(value, RequestBody):
        yield path, value
        for name in type(value).model_fields:
            yield from _nested_bodies(getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list) and value and isinstance(value[0], RequestBody):
        for index, item in enumerate(value):
            yield from _nested_bodies(item, f"{path[:-1]}[{index}].")


async def _read_bytes(request: Request, max_bytes: int, seconds: float) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 15 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {seconds:g} s. Send it again, in one go.",
            code="body-too-slow",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ApiError(499, "the client left before its body had arrived.") from None
    return b"".join(parts)


def parse_json(raw: bytes, max_depth: int) -> dict[str, Any]:
    """Parse a JSON object. Refuses other JSON values, nesting beyond `max_depth` and duplicate keys.

    The body is decoded once: outside strings every colon belongs to one key, so a result with fewer keys than the
    text has colons has lost a duplicate. Only then is the text decoded again, to name the key."""
    brackets = structure(raw)
    if exceeds_depth(brackets, max_depth):
        raise bad_request(
            f"the body is nested more than {max_depth} deep. Send a flatter one.", code="json-too-deep"
        )
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(
            f"the body is not JSON: {error.msg}. Expected one object in UTF-8.", code="json-invalid"
        ) from None
    if not isinstance(value, dict):
        raise bad_request(f"the body is a JSON {_type_name(value)}, expected an object.", code="json-invalid")
    if not _has_keys(value, brackets.count(b":")):
        json.loads(raw, object_pairs_hook=_refuse_duplicates, parse_int=str, parse_float=str)
    return value


def validate(body_type: type[Body], fields: dict[str, Any]) -> Body:
    """Build a `body_type` from `fields`; the error of a refusal names the first invalid field."""
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        path, message, code = explain(error.errors(include_url=False), body_type.model_fields)
        raise bad_request(message, path or None, code) from None
    except RecursionError:
        raise bad_request(
            "the body refers to itself too deeply. Send a flatter one.", code="json-invalid"
        ) from None


async def read_json(
    request: Request, max_bytes: int, seconds: float, max_depth: int, optional: bool = False
) -> dict[str, Any]:
    """Read the body of `request` and parse it as a JSON object. With `optional`, no body and `null` are empty ones."""
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            415,
            f"the content type is {quoted(content_type)}, expected application/json. Send the header "
            "Content-Type: application/json.",
            code="content-type",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "the body is compressed, expected plain JSON.", code="content-encoding")
    raw = await _read_bytes(request, max_bytes, seconds)
    if optional and raw.strip() in (b"", b"null"):
        return {}
    if len(raw) < LARGE_BODY:
        return parse_json(raw, max_depth)
    return await asyncio.to_thread(parse_json, raw, max_depth)


def _has_keys(value: dict[str, Any], count: int) -> bool:
    """Whether the objects in `value` have `count` keys together. Stops at the last key, before most long arrays."""
    pending: list[dict[str, Any] | list[Any]] = [value]
    while count and pending:
        node = pending.pop()
        if isinstance(node, dict):
            count -= len(node)
        children = node.values() if isinstance(node, dict) else node
        pending += [child for child in children if isinstance(child, (dict, list))]
    return count == 0


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise bad_request(
                f"the key {quoted(key)} stands twice in one object. Give it once.", code="json-key-twice"
            )
        seen.add(key)


def _type_name(value: object) -> str:
    names = {
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names.get(type(value), "value")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {max_bytes} bytes. Send less, or raise the server's limit.",
        code="body-too-large",
        headers={"Connection": "close"},
    )
