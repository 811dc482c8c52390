"""`POST /v1/completions`: plain text completion of one or several prompts, complete and streamed.

A prompt is text, token ids, or a list of either; choices are numbered prompt by prompt. Chat markers spelled out in a
text prompt are encoded as text. `echo` puts the prompt before the completion, with `logprobs` also its tokens' log
probabilities: those of the model as the call steers it. With `max_tokens` 0 there is nothing but the prompt: clients
score texts in this way, and no token is sampled. A stream begins with the prompt, in one chunk for each choice.
"""

from __future__ import annotations

import codecs
from typing import Annotated, Any

import torch
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.analysis.forward import edited_logits
from birkhoff.api.driver import RequestOutput
from birkhoff.engine.request import Request, TokenLogprob
from birkhoff.errors import LogitsError
from birkhoff.server.api_errors import bad_request, to_api_error
from birkhoff.server.choices import ChoicesFormatter
from birkhoff.server.context import Routes, ServingContext
from birkhoff.server.fields import ResponseFormat, SamplingFields, TokenId
from birkhoff.server.generation import (
    MIN_LOGPROB,
    GenerationCall,
    is_eos,
    new_id,
    now,
    parsed_message,
    stop_reason,
)
from birkhoff.text.tokenizer import Tokenizer

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
MAX_PROMPTS = 8
DEFAULT_MAX_TOKENS = 16  # the default of OpenAI's completions API


class CompletionBody(SamplingFields):
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None


class CompletionRoutes(Routes):
    async def create(self, http: HttpRequest) -> Response:
        """OpenAI's completions API: continues one or several prompts of plain text or token ids."""
        body, warnings = await self._context.read_body(http, CompletionBody)
        model = self._context.check_model(body.model)
        generations = await self._context.build(http, body, lambda: self._generations(body, warnings))
        formatter = CompletionFormatter(self._context, generations, model, body)
        return await self._context.run(http, generations, formatter, bool(body.stream), body.request_id)

    def _generations(self, body: CompletionBody, warnings: list[str]) -> list[GenerationCall]:
        """One generation per prompt."""
        if body.suffix:
            raise bad_request("suffix: this model fills no gaps. Leave it out.", "suffix")
        prompts = self._prompts(body)
        if len(prompts) > MAX_PROMPTS:
            raise bad_request(
                f"prompt has {len(prompts)} entries, this server takes at most {MAX_PROMPTS}.", "prompt"
            )
        if len(prompts) > 1 and (body.capture or body.baseline):
            raise bad_request(
                "capture and baseline are for one prompt at a time. Send one call each.", "prompt"
            )
        prompt_only = body.max_tokens == 0
        if prompt_only and not body.echo:
            raise bad_request(
                "max_tokens is 0 and echo is not set, so nothing would be returned. Set echo to score the prompt, or "
                "max_tokens to 1 or more.",
                "max_tokens",
            )
        if prompt_only and body.min_tokens:
            raise bad_request(
                f"min_tokens is {body.min_tokens} and max_tokens is 0. Leave one of them out.", "min_tokens"
            )
        sampling = body.sampling_arguments(self._context.settings.max_choices)
        sampling.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
        if prompt_only:
            del sampling["max_tokens"]
        if body.logprobs is not None:
            sampling["logprobs"] = body.logprobs
        warnings = [*warnings, *body.warnings]
        mask = self._context.grammars.from_response_format(body.response_format)
        arguments = self._context.interp_arguments(body)
        arguments["prompt_logprobs"] = bool(body.echo) and body.logprobs is not None
        arguments["prompt_only"] = prompt_only
        return [
            GenerationCall(prompt, sampling, mask=mask, warnings=warnings, **arguments) for prompt in prompts
        ]

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        engine, prompt_field = self._context.engine, body.prompt
        several = isinstance(prompt_field, list) and isinstance(prompt_field[0], (str, list))
        prompts: list[Any] = list(prompt_field) if several else [prompt_field]
        if body.add_special_tokens is False:
            prompts = [
                engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
            ]
        return [engine.prompt_ids(prompt) for prompt in prompts]


class TextOffsets:
    """Positions of tokens in a text of characters. A character may be several tokens: all have its position."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def add(self, token: int) -> int:
        """The position of the next token. Special tokens, such as begin of text, are no characters."""
        position = self._characters
        if token not in self._tokenizer.special_ids:
            self._characters += len(self._decoder.decode(self._tokenizer.piece(token)))
        return position


class CompletionFormatter(ChoicesFormatter):
    """Renders `text_completion` objects."""

    def __init__(
        self, context: ServingContext, generations: list[GenerationCall], model: str, body: CompletionBody
    ):
        head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now(), "model": model}
        super().__init__(context, generations, body, head, head)
        self._echo = bool(body.echo)
        self._top_logprobs = body.logprobs
        self.slow_start = any(generation.prompt_logprobs for generation in generations)
        self._offsets: dict[int, TextOffsets] = {}  # of streams, by choice
        self._prompt_entries: dict[Any, list[TokenLogprob | int]] = {}  # by prompt and edits

    def choice(self, index: int, request: Request) -> dict[str, Any]:
        text = parsed_message(request).content
        choice: dict[str, Any] = {
            "index": index,
            "text": self._prompt_text(request) + text if self._echo else text,
            "logprobs": None,
            **self._ending(request),
        }
        if self._top_logprobs is not None:
            prompt = self._prompt_logprobs(request) if self._echo else []
            output = [entry for entry in request.logprobs if not is_eos(entry.token_id, request)]
            choice["logprobs"] = self._logprobs(
                [*prompt, *output], TextOffsets(self._context.engine.tokenizer)
            )
        if self._body.return_token_ids:
            choice["token_ids"] = list(request.output_ids)
        return choice

    def _ending(self, request: Request) -> dict[str, Any]:
        return {"finish_reason": request.finish_reason, "stop_reason": stop_reason(request)}

    def _prompt_text(self, request: Request) -> str:
        return self._context.engine.tokenizer.decode(request.prompt_ids, skip_special=True)

    def _prompt_logprobs(self, request: Request) -> list[TokenLogprob | int]:
        """Log probabilities of the prompt's tokens under the edits of the request; the first token, which has no
        context, is its bare id. Choices of one prompt share their edits, and with them these entries."""
        engine, ids = self._context.engine, list(request.prompt_ids)
        edits = () if request.plan is None else request.plan.edits
        key = request.prompt_ids, tuple(map(id, edits))
        if key not in self._prompt_entries:
            logprobs = edited_logits(engine, [ids], [edits])[0].log_softmax(-1)
            if bool(logprobs.isnan().any()):
                message = "the logits of the prompt are NaN or infinite. If the call steers, steer less."
                raise to_api_error(LogitsError(message), steered=bool(edits))
            self._prompt_entries[key] = self._entries(ids, logprobs)
        return self._prompt_entries[key]

    def _entries(self, ids: list[int], logprobs: torch.Tensor) -> list[TokenLogprob | int]:
        """The entries of a text from its log probabilities [T, vocab]."""
        entries: list[TokenLogprob | int] = [ids[0]]
        for position, token in enumerate(ids[1:]):
            best = logprobs[position].topk(max(self._top_logprobs or 0, 1))
            top = tuple(zip(best.indices.tolist(), best.values.tolist()))[: self._top_logprobs]
            entries.append(TokenLogprob(token, float(logprobs[position, token]), top))
        return entries

    def _logprobs(self, entries: list[TokenLogprob | int], offsets: TextOffsets) -> dict[str, Any]:
        """The four parallel lists of the completions API."""

        def text(token: int) -> str:
            return self._context.engine.tokenizer.piece(token).decode("utf-8", "replace")

        tokens = list[str]()
        token_logprobs = list[float | None]()
        top_logprobs = list[dict[str, float] | None]()
        text_offset = list[int]()
        for entry in entries:
            token = entry.token_id if isinstance(entry, TokenLogprob) else entry
            tokens.append(text(token))
            if isinstance(entry, TokenLogprob):
                token_logprobs.append(max(entry.logprob, MIN_LOGPROB))
                top_logprobs.append({text(other): max(value, MIN_LOGPROB) for other, value in entry.top})
            else:
                token_logprobs.append(None)
                top_logprobs.append(None)
            text_offset.append(offsets.add(token))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }

    def first_choice(self, index: int, request: Request) -> dict[str, Any] | None:
        """With `echo` the prompt, with its log probabilities if they are requested."""
        if not self._echo:
            return None
        choice = {**self.empty_choice(index), "text": self._prompt_text(request)}
        if self._top_logprobs is not None:
            choice["logprobs"] = self._logprobs(self._prompt_logprobs(request), self._stream_offsets(index))
        if self._body.return_token_ids:
            choice["token_ids"] = []
        return choice

    def chunk_choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        text = "".join(token.text for token in output.tokens)
        ids = [token.token_id for token in output.tokens if token.token_id is not None]
        if not text and not ids:
            return []
        choice = {**self.empty_choice(index), "text": text}
        if self._top_logprobs is not None:
            entries = [
                token.logprob
                for token in output.tokens
                if token.logprob and not is_eos(token.token_id, output.request)
            ]
            choice["logprobs"] = self._logprobs([*entries], self._stream_offsets(index))
        if self._body.return_token_ids:
            choice["token_ids"] = ids
        return [choice]

    def _stream_offsets(self, index: int) -> TextOffsets:
        return self._offsets.setdefault(index, TextOffsets(self._context.engine.tokenizer))

    def empty_choice(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "finish_reason": None, "logprobs": None}

    def final_choice(self, index: int, request: Request) -> dict[str, Any]:
        return {**self.empty_choice(index), **self._ending(request)}
