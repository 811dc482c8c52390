"""Our request fields on the OpenAI routes of `vllm serve`: `--middleware birkhoff.vllm.http_fields.HookFields`.

A request to a generating route with steering fields or `capture` is checked completely, prepared on all ranks, and then
passed to vLLM without these fields and with a mark. Its response gets `interp` and `capture_results`; a stream gets one
more chunk with them before its end. No client can set the mark itself, on any route."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from birkhoff.errors import BirkhoffError, RequestError, quoted
from birkhoff.json_limits import check_json
from birkhoff.steering.steering_fields import COMPATIBLE, NATIVE
from birkhoff.vllm.front_planner import RemotePlan
from birkhoff.vllm.http_front import HttpFront
from birkhoff.vllm.spec import FIELD

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ROUTES = ("/v1/completions", "/v1/chat/completions")
FIELDS = (*COMPATIBLE, NATIVE, "capture")
MAX_BODY_BYTES = 64 << 20
COMPLETION_TOKENS = 16  # vLLM's default of max_tokens for completions
# Fields of a chat request that decide its tokens, as the route /tokenize takes them.
TOKENIZED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)


class HookFields:
    """ASGI middleware."""

    def __init__(self, app: App):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            await _refuse(send, RequestError(f"the body has more than {MAX_BODY_BYTES} bytes."), 413)
            return
        try:
            check_json(body, MAX_BODY_BYTES)
        except ValueError as error:
            await _refuse(send, RequestError(f"the body is refused: {error}."), 400)
            return
        given = _parse(body)
        if _names_mark(given) or (given is None and FIELD.encode() in body):
            why = f"{FIELD!r} is set by the server. Use {NATIVE} and capture."
            await _refuse(send, RequestError(why), 400)
            return
        fields: dict[str, Any] = {}
        if scope["path"] in ROUTES and isinstance(given, dict):
            fields = {name: given.pop(name) for name in FIELDS if given.get(name) is not None}
        if not fields:
            await self._app(scope, _replay(body, receive), send)
            return
        await self._hooked(scope, receive, send, given, fields)

    async def _hooked(
        self, scope: Scope, receive: Receive, send: Send, given: dict[str, Any], fields: dict[str, Any]
    ) -> None:
        """A request with our fields. What is refused here reaches neither the scheduler nor a worker."""
        # This middleware is outside of vLLM's authentication: a client that may not list models may do nothing else.
        status, answer = await self._ask(scope, "GET", "/v1/models", None)
        if status != 200:
            await _answer(send, status, answer)
            return
        front: HttpFront | None = getattr(scope["app"].state, "birkhoff", None)
        if front is None:
            why = "the server was started without its endpoint plugin. Set VLLM_PLUGINS=birkhoff (docs/vllm.md)."
            await _refuse(send, RequestError(why), 400)
            return
        try:
            _check_single(given)
            ids = await self._token_ids(scope, given)
            max_tokens = _max_tokens(given, scope["path"], len(ids), front.max_context)
            plan = await front.prepare(fields, ids, max_tokens, bool(given.get("stop")))
        except _Upstream as error:
            await _answer(send, error.status, error.body)
            return
        except (BirkhoffError, ValueError) as error:
            await _refuse(send, error, 400)
            return
        if plan is None:
            await self._app(scope, _replay(json.dumps(given).encode(), receive), send)
            return
        stream = bool(given.get("stream"))
        wants_usage = bool((given.get("stream_options") or {}).get("include_usage"))
        if stream:
            given["stream_options"] = {**(given.get("stream_options") or {}), "include_usage": True}
        given["vllm_xargs"] = {**(given.get("vllm_xargs") or {}), FIELD: plan.mark.to_text()}
        given["max_tokens"] = max_tokens
        given.pop("max_completion_tokens", None)
        body = json.dumps(given).encode()
        reply = _Reply(send, front, plan, len(ids), stream, wants_usage)
        try:
            await self._app(_with_length(scope, len(body)), _replay(body, receive), reply)
        finally:
            await reply.close()

    async def _token_ids(self, scope: Scope, given: Mapping[str, Any]) -> list[int]:
        """The token ids of the prompt: as given, or as vLLM's own route makes them."""
        prompt = given.get("prompt")
        if "messages" not in given:
            if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
                return prompt
            if isinstance(prompt, list) and len(prompt) == 1:
                prompt = prompt[0]
                if isinstance(prompt, list):
                    return prompt
            if not isinstance(prompt, str):
                raise RequestError(
                    f"prompt is {quoted(prompt)}, expected one text or one list of token ids beside {NATIVE} or "
                    "capture."
                )
            body: dict[str, Any] = {"prompt": prompt}
            if "add_special_tokens" in given:
                body["add_special_tokens"] = given["add_special_tokens"]
        else:
            body = {name: given[name] for name in TOKENIZED if given.get(name) is not None}
        if "model" in given:
            body["model"] = given["model"]
        status, answer = await self._ask(scope, "POST", "/tokenize", json.dumps(body).encode())
        if status != 200:
            raise _Upstream(status, answer)
        ids: list[int] = json.loads(answer)["tokens"]
        return ids

    async def _ask(self, scope: Scope, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """A request to the application itself, with the headers of the client."""
        parts: list[bytes] = []
        status = 500

        async def collect(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        inner = {
            **_with_length(scope, len(body or b"")),
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "state": dict(scope.get("state", {})),
        }

        async def stay() -> Message:
            """Never returns: a client that has disconnected would end the request."""
            await asyncio.Future()
            raise AssertionError("nothing wakes it")

        await self._app(inner, _replay(body or b"", stay), collect)
        return status, b"".join(parts)


class _Upstream(Exception):
    """vLLM refused a request that was made for the client's."""

    def __init__(self, status: int, body: bytes):
        super().__init__(status)
        self.status = status
        self.body = body


class _Reply:
    """Passes a response on and adds what became of the captures and edits."""

    def __init__(
        self, send: Send, front: HttpFront, plan: RemotePlan, prompt_len: int, stream: bool, wants_usage: bool
    ):
        self._send = send
        self._front = front
        self._plan: RemotePlan | None = plan
        self._num_tokens = prompt_len + 1
        self._prompt_len = prompt_len
        self._stream = stream
        self._wants_usage = wants_usage
        self._start: Message | None = None
        self._buffer = b""
        self._last: dict[str, Any] = {}

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            if self._streams:
                await self._send(message)
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        self._buffer += message.get("body", b"")
        more = bool(message.get("more_body"))
        if self._streams:
            await self._send({"type": "http.response.body", "body": await self._events(), "more_body": more})
        elif not more:
            await self._whole()

    @property
    def _streams(self) -> bool:
        return self._stream and self._start is not None and self._start["status"] == 200

    async def close(self) -> None:
        """If the response did not end, its client has left."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        if self._start is not None and self._start["status"] != 200:
            await self._front.discard(plan)
        else:
            await self._front.finish(plan, "cancelled", self._num_tokens)

    async def _whole(self) -> None:
        assert self._start is not None
        body = self._buffer
        if self._start["status"] == 200:
            answer = json.loads(body)
            answer |= await self._finish(_reason(answer), answer.get("usage"))
            body = json.dumps(answer).encode()
        headers = [(k, v) for k, v in self._start["headers"] if k.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _events(self) -> bytes:
        """The complete events of the buffer, with ours before the last."""
        out = b""
        while b"\n\n" in self._buffer:
            event, self._buffer = self._buffer.split(b"\n\n", 1)
            data = event.removeprefix(b"data: ")
            if data.strip() == b"[DONE]":
                extras = await self._finish(_reason(self._last), self._last.get("usage"))
                kept = {
                    name: self._last[name]
                    for name in ("id", "object", "created", "model")
                    if name in self._last
                }
                out += b"data: " + json.dumps({**kept, "choices": [], **extras}).encode() + b"\n\n"
            elif event.startswith(b"data: {"):
                chunk = json.loads(data)
                usage = chunk.get("usage")
                self._last = {
                    **self._last,
                    **chunk,
                    "choices": chunk.get("choices") or self._last.get("choices"),
                }
                if usage:
                    self._num_tokens = self._prompt_len + int(usage["completion_tokens"])
                if usage and not chunk.get("choices") and not self._wants_usage:
                    continue  # asked for by this middleware
            out += event + b"\n\n"
        return out

    async def _finish(self, reason: str, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        plan, self._plan = self._plan, None
        if plan is None:
            return {}
        if usage:
            self._num_tokens = self._prompt_len + int(usage["completion_tokens"])
        return await self._front.finish(plan, reason, self._num_tokens)


def _reason(answer: Mapping[str, Any]) -> str:
    choices = answer.get("choices") or [{}]
    return str(choices[0].get("finish_reason") or "stop")


def _check_single(given: Mapping[str, Any]) -> None:
    for name in ("n", "best_of"):
        if given.get(name) not in (None, 1):
            raise RequestError(
                f"{name} is {quoted(given[name])}: a request that is captured or steered has one answer. Send several."
            )
    for name in ("use_beam_search", "prompt_embeds"):
        if given.get(name):
            raise RequestError(
                f"{name} is given beside {NATIVE} or capture, and has no rows of tokens. Leave it out."
            )


def _max_tokens(given: Mapping[str, Any], path: str, prompt_len: int, max_context: int) -> int:
    value = given.get("max_completion_tokens")
    value = given.get("max_tokens") if value is None else value
    if value is None:
        value = COMPLETION_TOKENS if path == ROUTES[0] else max_context - prompt_len
    if type(value) is not int or value < 1:
        raise RequestError(f"max_tokens is {quoted(value)}, expected a whole number from 1.")
    return value


def _names_mark(given: Any) -> bool:
    """Whether a body contains the mark of a prepared request, at any depth."""
    waiting = [given]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            for name in ("vllm_xargs", "extra_args"):
                inner = value.get(name)
                if isinstance(inner, str):
                    inner = _parse(inner.encode())
                if isinstance(inner, dict) and FIELD in inner:
                    return True
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return False


def _parse(body: bytes) -> Any:
    """The JSON of a body; None if it is none, which vLLM's own routes refuse."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None if it is too long."""
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body"):
            return body


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [
        (k, v) for k, v in scope["headers"] if k.lower() not in (b"content-length", b"transfer-encoding")
    ]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


async def _refuse(send: Send, error: Exception, status: int) -> None:
    code = getattr(error, "code", "request")
    body = {"error": {"message": str(error), "type": "invalid_request_error", "code": code, "param": None}}
    await _answer(send, status, json.dumps(body).encode())


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
