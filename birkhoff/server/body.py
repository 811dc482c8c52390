"""A request's body: read within limits, parsed strictly, checked against a model.

Three steps, each refusing with 400, 408, 413 or 415 in our own shape. Reading counts bytes and seconds. Parsing is
orjson's, which knows no NaN, no lone surrogates and no encoding but UTF-8; nesting is bounded before, and a key that
stands twice in an object is refused, since whoever checks a request and whoever runs it might read different ones.
Checking is pydantic's in strict mode: `true` is no number and `"3"` no integer.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from birkhoff.errors import quoted
from birkhoff.server.api_errors import ApiError, bad

LARGE = 256 * 1024  # bytes from which parsing leaves the event loop
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")
Model = TypeVar("Model", bound="RequestBody")


class RequestBody(BaseModel):
    """A JSON object of the wire. Unknown fields are kept, so that the route can name them."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    @property
    def unknown(self) -> list[str]:
        return list(self.model_extra or ())


class StrictBody(RequestBody):
    """An object in which an unknown field is a mistake."""

    model_config = ConfigDict(extra="forbid")


async def read_body(request: Request, most_bytes: int, seconds: float) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 15 or int(declared) > most_bytes):
        raise _too_large(most_bytes)
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most_bytes:
                    raise _too_large(most_bytes)
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


def parse(raw: bytes, most_depth: int) -> dict[str, Any]:
    """The JSON object in `raw`."""
    _check_depth(raw, most_depth)
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad(
            f"the body is not JSON: {error.msg}. Expected one object in UTF-8.", code="json-invalid"
        ) from None
    if not isinstance(found, dict):
        raise bad(f"the body is a JSON {_kind(found)}, expected an object.", code="json-invalid")
    json.loads(raw, object_pairs_hook=_once, parse_int=str, parse_float=str)  # numbers were read by orjson
    return found


def checked(model: type[Model], fields: dict[str, Any]) -> Model:
    """`fields` as a `model`, or a refusal that names the first field at fault."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = _path(first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise bad(
            f"{where or 'the body'}: {message[0].lower() + message[1:]}.", where or None, "field-invalid"
        ) from None
    except RecursionError:
        raise bad("the body refers to itself too deeply. Send a flatter one.", code="json-invalid") from None


async def json_fields(request: Request, most_bytes: int, seconds: float, most_depth: int) -> dict[str, Any]:
    """Read and parse."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"the content type is {quoted(kind)}, expected application/json.", code="content-type"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "the body is compressed, expected plain JSON.", code="content-encoding")
    raw = await read_body(request, most_bytes, seconds)
    return parse(raw, most_depth) if len(raw) < LARGE else await asyncio.to_thread(parse, raw, most_depth)


def _check_depth(raw: bytes, most: int) -> None:
    """Brackets outside strings, counted before any parser sees them."""
    depth = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub(b"", raw)):
        depth += 1 if bracket in b"[{" else -1
        if depth > most:
            raise bad(f"the body is nested more than {most} deep. Send a flatter one.", code="json-too-deep")


def _once(pairs: list[tuple[str, Any]]) -> None:
    keys = {key for key, _ in pairs}
    if len(keys) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise bad(
                    f"the key {quoted(key)} stands twice in one object. Give it once.", code="json-key-twice"
                )
            seen.add(key)


def _kind(value: object) -> str:
    names = {
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names.get(type(value), "value")


def _path(location: tuple[int | str, ...]) -> str:
    out = ""
    for part in location:
        if isinstance(part, int):
            out += f"[{part}]"
        elif (
            "(" not in part and part.replace("_", "").isalnum()
        ):  # pydantic also names the branches of a union
            out += f".{part[:64]}" if out else part[:64]
    return out


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {most_bytes} bytes. Send less, or raise the server's limit.",
        code="body-too-large",
        headers={"Connection": "close"},
    )
