"""`POST /v1/completions`: plain text on from a prompt, several prompts at a time, whole and streamed.

A prompt is text, token ids, or a list of either; choices are numbered prompt by prompt. Markers spelled in a text
prompt stay text. `echo` puts the prompt before the answer, and with `logprobs` its tokens' chances too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.api.driver import Told
from birkhoff.engine.request import Request, TokenLogprob
from birkhoff.server.calls import Call, check_end, is_end, new_id, now, parsed, stop_reason, usage
from birkhoff.server.desk import Desk
from birkhoff.server.fields import ResponseFormat, Sampling, TokenId
from birkhoff.server.hub import Running
from birkhoff.server.inside import findings
from birkhoff.server.problems import bad
from birkhoff.server.sse import DONE, PING, frame

Ids = Annotated[list[TokenId], Field(min_length=1)]
MOST_PROMPTS = 8


class CompletionBody(Sampling):
    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None


class Completions:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def answer(self, http: HttpRequest) -> Response:
        body, warnings = await self._desk.read(http, CompletionBody)
        model = self._desk.model_name(body.model)
        calls = await self._desk.call(http, body, lambda: self.calls(body, warnings))
        shape = CompletionShape(self._desk, calls, model, body)
        return await self._desk.run(http, calls, shape, bool(body.stream), body.request_id)

    def calls(self, body: CompletionBody, warnings: list[str]) -> list[Call]:
        if body.suffix:
            raise bad("suffix: this model fills no gaps. Leave it out.", "suffix")
        prompts = self._prompts(body)
        if len(prompts) > MOST_PROMPTS:
            raise bad(f"prompt has {len(prompts)} entries, this server takes at most {MOST_PROMPTS}.", "prompt")
        if len(prompts) > 1 and (body.capture or body.baseline):
            raise bad("capture and baseline are for one prompt at a time. Send one call each.", "prompt")
        if body.echo and body.stream and body.logprobs is not None:
            raise bad("echo with logprobs is not streamed. Leave one of the three out.", "echo")
        sampling = body.options(self._desk.settings.max_choices)
        sampling.setdefault("max_tokens", 16)  # what clients of this route expect
        if body.logprobs is not None:
            sampling["logprobs"] = body.logprobs
        mask = self._desk.grammars.of_format(body.response_format, False)
        looking = self._desk.looking(body)
        return [Call(prompt, sampling, mask=mask, warnings=warnings, **looking) for prompt in prompts]

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        engine, given = self._desk.engine, body.prompt
        several = isinstance(given, list) and isinstance(given[0], (str, list))
        prompts: list[Any] = list(given) if several else [given]
        if body.add_special_tokens is False:
            prompts = [engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return [engine.prompt_ids(prompt) for prompt in prompts]


class CompletionShape:
    def __init__(self, desk: Desk, calls: list[Call], model: str, body: CompletionBody):
        self._desk, self._calls, self._body = desk, calls, body
        self._head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now(), "model": model}
        self._begun: set[int] = set()
        self._written: dict[int, int] = {}

    def _chosen(self, running: Running) -> tuple[Request, ...]:
        return running.requests[: len(running.requests) // 2] if self._calls[0].baseline else running.requests

    def whole(self, running: Running) -> dict[str, Any]:
        for request in running.requests:
            check_end(request)
        chosen = self._chosen(running)
        answer = {**self._head, "choices": [self._choice(index, request) for index, request in enumerate(chosen)],
                  "usage": self._usage(chosen)}  # fmt: skip
        twins = running.requests[len(chosen) :]
        if twins:
            answer["baseline"] = [self._choice(index, request) for index, request in enumerate(twins)]
        return answer | self._tail(running)

    def _usage(self, chosen: tuple[Request, ...]) -> dict[str, Any]:
        """Every prompt once, every answer."""
        each = len(chosen) // len(self._calls)
        parts = [
            usage(chosen[start : start + each], self._calls[0], self._desk.engine)
            for start in range(0, len(chosen), each)
        ]
        found = parts[0]
        for part in parts[1:]:
            for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
                found[key] += part[key]
        return found

    def _tail(self, running: Running) -> dict[str, Any]:
        found = findings(self._chosen(running), self._calls[0], self._desk.shelf, bool(self._body.stream))
        said = self._calls[0].warnings
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._calls[0].prompt
        return {**found, **({"warnings": said} if said else {})}

    def _choice(self, index: int, request: Request) -> dict[str, Any]:
        text = parsed(request).content
        choice: dict[str, Any] = {
            "index": index, "text": text, "finish_reason": request.finish_reason, "logprobs": None,
            "stop_reason": stop_reason(request),
        }  # fmt: skip
        found = [logprob for logprob in request.logprobs if not is_end(logprob.token_id, request)]
        before = ""
        if self._body.echo:
            before = self._desk.engine.tokenizer.decode(request.prompt_ids, skip_special=True)
            choice["text"] = before + text
        if self._body.logprobs is not None:
            prompt = self._prompt_logprobs(request) if self._body.echo else []
            choice["logprobs"] = self._logprobs([*prompt, *found], 0)
        if self._body.return_token_ids:
            choice["token_ids"] = list(request.output_ids)
        return choice

    def _prompt_logprobs(self, request: Request) -> list[TokenLogprob | int]:
        """The prompt's own tokens; the first has nothing before it that could make it likely."""
        engine, ids = self._desk.engine, list(request.prompt_ids)
        chances = engine.logits(ids).log_softmax(-1)
        found: list[TokenLogprob | int] = [ids[0]]
        for place, token in enumerate(ids[1:]):
            best = chances[place].topk(max(self._body.logprobs or 0, 1))
            top = tuple(zip(best.indices.tolist(), best.values.tolist()))[: self._body.logprobs]
            found.append(TokenLogprob(token, float(chances[place, token]), top))
        return found

    def _logprobs(self, found: list[TokenLogprob | int], start: int) -> dict[str, Any]:
        """Four lists side by side, as this route has always had them."""

        def text(token: int) -> str:
            return self._desk.engine.tokenizer.piece(token).decode("utf-8", "replace")

        tokens, values, tops, offsets = list[str](), list[float | None](), list[dict[str, float] | None](), list[int]()
        for each in found:
            known = isinstance(each, TokenLogprob)
            tokens.append(text(each.token_id if known else each))  # type: ignore[union-attr,arg-type]
            values.append(max(each.logprob, -9999.0) if known else None)  # type: ignore[union-attr]
            tops.append({text(t): max(value, -9999.0) for t, value in each.top} if known else None)  # type: ignore[union-attr]
            offsets.append(start)
            start += len(tokens[-1])
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    async def frames(self, running: Running, ping_seconds: float) -> AsyncIterator[bytes]:
        chosen = self._chosen(running)
        ready = b""
        try:
            async for item in running.news(ping_seconds):
                if item is None:
                    yield PING
                    continue
                index, told = item
                if told.refused is not None:
                    raise told.refused
                ready += b"".join(frame(chunk) for chunk in self._chunks(index, told, twin=index >= len(chosen)))
                if ready and not running.behind:
                    yield ready
                    ready = b""
            if ready:
                yield ready
                ready = b""
            if running.cancelled:
                return
            yield frame({**self._head, "choices": [], **await asyncio.to_thread(self._tail, running)})
            options = self._body.stream_options
            if options is not None and options.include_usage:
                yield frame({**self._head, "choices": [], "usage": self._usage(chosen)})
        except Exception as error:
            yield ready + frame(self._desk.told(error, running.id))
        yield DONE

    def _chunks(self, index: int, told: Told, twin: bool) -> list[dict[str, Any]]:
        mark: dict[str, Any] = {"baseline": True} if twin else {}
        text = "".join(token.text for token in told.tokens)
        chunks = []
        if index not in self._begun:
            self._begun.add(index)
            if self._body.echo:
                text = self._desk.engine.tokenizer.decode(told.request.prompt_ids, skip_special=True) + text
        last = told.tokens[-1] if told.tokens else None
        reason = last.finish_reason if last is not None else None
        if reason is not None:
            check_end(told.request)
        ids = [token.token_id for token in told.tokens if token.token_id is not None]
        if text or ids or reason is not None:
            choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": reason, "logprobs": None}
            if self._body.logprobs is not None:
                found: list[Any] = [
                    t.logprob for t in told.tokens if t.logprob and not is_end(t.token_id, told.request)
                ]
                start = self._written.get(index, 0)
                choice["logprobs"] = self._logprobs(found, start)
                self._written[index] = start + sum(map(len, choice["logprobs"]["tokens"]))
            if self._body.return_token_ids:
                choice["token_ids"] = ids
            if reason is not None:
                choice["stop_reason"] = stop_reason(told.request)
            chunks.append({**self._head, "choices": [choice], **mark})
        if told.frames:
            chunks.append({**self._head, "choices": [], "signals": list(told.frames), "index": index, **mark})
        return chunks
