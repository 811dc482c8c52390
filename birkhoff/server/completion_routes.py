"""`POST /v1/completions`: plain text on from a prompt, several prompts at a time, whole and streamed.

A prompt is text, token ids, or a list of either; choices are numbered prompt by prompt. Markers spelled in a text
prompt stay text. `echo` puts the prompt before the answer, and with `logprobs` its tokens' chances too.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.api.driver import RequestOutput
from birkhoff.engine.request import Request, TokenLogprob
from birkhoff.server.api_errors import bad
from birkhoff.server.calls import GenerationCall, is_end, new_id, now, parsed, stop_reason
from birkhoff.server.choices import Choices
from birkhoff.server.context import ServingContext
from birkhoff.server.fields import ResponseFormat, Sampling, TokenId

Ids = Annotated[list[TokenId], Field(min_length=1)]
MOST_PROMPTS = 8


class CompletionBody(Sampling):
    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None


class CompletionRoutes:
    def __init__(self, context: ServingContext):
        self._context = context

    async def answer(self, http: HttpRequest) -> Response:
        body, warnings = await self._context.read(http, CompletionBody)
        model = self._context.model_name(body.model)
        calls = await self._context.call(http, body, lambda: self.calls(body, warnings))
        shape = CompletionFormatter(self._context, calls, model, body)
        return await self._context.run(http, calls, shape, bool(body.stream), body.request_id)

    def calls(self, body: CompletionBody, warnings: list[str]) -> list[GenerationCall]:
        if body.suffix:
            raise bad("suffix: this model fills no gaps. Leave it out.", "suffix")
        prompts = self._prompts(body)
        if len(prompts) > MOST_PROMPTS:
            raise bad(
                f"prompt has {len(prompts)} entries, this server takes at most {MOST_PROMPTS}.", "prompt"
            )
        if len(prompts) > 1 and (body.capture or body.baseline):
            raise bad("capture and baseline are for one prompt at a time. Send one call each.", "prompt")
        if body.echo and body.stream and body.logprobs is not None:
            raise bad("echo with logprobs is not streamed. Leave one of the three out.", "echo")
        sampling = body.options(self._context.settings.max_choices)
        sampling.setdefault("max_tokens", 16)  # what clients of this route expect
        if body.logprobs is not None:
            sampling["logprobs"] = body.logprobs
        mask = self._context.grammars.of_format(body.response_format, False)
        looking = self._context.looking(body)
        return [
            GenerationCall(prompt, sampling, mask=mask, warnings=warnings, **looking) for prompt in prompts
        ]

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        engine, given = self._context.engine, body.prompt
        several = isinstance(given, list) and isinstance(given[0], (str, list))
        prompts: list[Any] = list(given) if several else [given]
        if body.add_special_tokens is False:
            prompts = [
                engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
            ]
        return [engine.prompt_ids(prompt) for prompt in prompts]


class CompletionFormatter(Choices):
    """How one call's answers look in this dialect."""

    def __init__(
        self, context: ServingContext, calls: list[GenerationCall], model: str, body: CompletionBody
    ):
        head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now(), "model": model}
        super().__init__(context, calls, body, head, head)
        self._echo = bool(body.echo)
        self._most = body.logprobs
        self._written: dict[int, int] = {}  # characters of each choice that were told

    def choice(self, index: int, request: Request) -> dict[str, Any]:
        text = parsed(request).content
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "finish_reason": request.finish_reason,
            "logprobs": None,
            "stop_reason": stop_reason(request),
        }
        found = [logprob for logprob in request.logprobs if not is_end(logprob.token_id, request)]
        if self._echo:
            choice["text"] = (
                self._context.engine.tokenizer.decode(request.prompt_ids, skip_special=True) + text
            )
        if self._most is not None:
            prompt = self._prompt_logprobs(request) if self._echo else []
            choice["logprobs"] = self._logprobs([*prompt, *found], 0)
        if self._body.return_token_ids:
            choice["token_ids"] = list(request.output_ids)
        return choice

    def _prompt_logprobs(self, request: Request) -> list[TokenLogprob | int]:
        """The prompt's own tokens; the first has nothing before it that could make it likely."""
        engine, ids = self._context.engine, list(request.prompt_ids)
        chances = engine.logits(ids).log_softmax(-1)
        found: list[TokenLogprob | int] = [ids[0]]
        for place, token in enumerate(ids[1:]):
            best = chances[place].topk(max(self._most or 0, 1))
            top = tuple(zip(best.indices.tolist(), best.values.tolist()))[: self._most]
            found.append(TokenLogprob(token, float(chances[place, token]), top))
        return found

    def _logprobs(self, found: list[TokenLogprob | int], start: int) -> dict[str, Any]:
        """Four lists side by side, as this route has always had them."""

        def text(token: int) -> str:
            return self._context.engine.tokenizer.piece(token).decode("utf-8", "replace")

        tokens = list[str]()
        values = list[float | None]()
        tops = list[dict[str, float] | None]()
        offsets = list[int]()
        for each in found:
            known = isinstance(each, TokenLogprob)
            tokens.append(text(each.token_id if known else each))  # type: ignore[union-attr,arg-type]
            values.append(max(each.logprob, -9999.0) if known else None)  # type: ignore[union-attr]
            tops.append({text(t): max(value, -9999.0) for t, value in each.top} if known else None)  # type: ignore[union-attr]
            offsets.append(start)
            start += len(tokens[-1])
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def pieces(self, index: int, told: RequestOutput) -> list[dict[str, Any]]:
        text = "".join(token.text for token in told.tokens)
        ids = [token.token_id for token in told.tokens if token.token_id is not None]
        if not text and not ids:
            return []
        before = self._written.get(index)
        if before is None and self._echo:
            text = self._context.engine.tokenizer.decode(told.request.prompt_ids, skip_special=True) + text
        choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": None, "logprobs": None}
        self._written[index] = before or 0
        if self._most is not None:
            found: list[Any] = [
                t.logprob for t in told.tokens if t.logprob and not is_end(t.token_id, told.request)
            ]
            choice["logprobs"] = self._logprobs(found, before or 0)
            self._written[index] += sum(map(len, choice["logprobs"]["tokens"]))
        if self._body.return_token_ids:
            choice["token_ids"] = ids
        return [choice]

    def end(self, index: int, request: Request) -> dict[str, Any]:
        return {
            "index": index,
            "text": "",
            "finish_reason": request.finish_reason,
            "logprobs": None,
            "stop_reason": stop_reason(request),
        }
