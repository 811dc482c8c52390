"""Response format shared by `/v1/chat/completions` and `/v1/completions`: numbered choices.

The two routes differ in how one choice looks, complete and in chunks; subclasses provide that. This module adds the
rest: the choices followed by their unsteered twins, chunks merged into one packet when several are pending, response
extras, usage if requested, and `[DONE]`. An error after the first byte is sent as an event. With `return_progress` a
stream reports how much of the prompt has been computed until the first token arrives.

Every chunk has a choice, so that clients can read `chunk.choices[0]`: progress and signals come with an empty one, the
extras with the finishing one of the choice that ends last. Only the usage chunk of `include_usage` has none, as
OpenAI's has.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from birkhoff.api.driver import RequestOutput
from birkhoff.engine.request import Request
from birkhoff.server.api_errors import ApiError
from birkhoff.server.async_engine import ActiveCall
from birkhoff.server.context import ServingContext
from birkhoff.server.fields import SamplingFields
from birkhoff.server.generation import GenerationCall, raise_on_failure, usage
from birkhoff.server.interp_response import capture_results, response_extras
from birkhoff.server.sse import DONE, format_event
from birkhoff.server.stream_formatter import StreamFormatter

Json = dict[str, Any]


class ChoicesFormatter(StreamFormatter):
    """Renders one call. `head` holds the first fields of the full response, `chunk_head` those of every chunk."""

    def __init__(
        self,
        context: ServingContext,
        generations: list[GenerationCall],
        body: SamplingFields,
        head: Json,
        chunk_head: Json,
    ):
        super().__init__(context)
        self._generations = generations
        self._body = body
        self._head = head
        self._chunk_head = chunk_head
        self._final_chunk: Json = {}

    @abstractmethod
    def choice(self, index: int, request: Request) -> Json:
        """The complete choice of a finished request."""

    @abstractmethod
    def chunk_choices(self, index: int, output: RequestOutput) -> list[Json]:
        """The new output of one request, as choices of chunks."""

    def first_choice(self, index: int, request: Request) -> Json | None:
        """The choice of a chunk before the output of a request; None if there is none."""
        return None

    @abstractmethod
    def empty_choice(self, index: int) -> Json:
        """The choice of a chunk that brings no output."""

    @abstractmethod
    def final_choice(self, index: int, request: Request) -> Json:
        """The choice of a request's last chunk, which carries its `finish_reason`."""

    def full_response(self, call: ActiveCall) -> Json:
        for request in call.requests:
            raise_on_failure(request)
        requests, twins = self._split(call)
        choices = [self.choice(index, request) for index, request in enumerate(requests)]
        generation = self._generations[0]
        if len(requests) > 1 and generation.capture is not None:  # each choice has its own captures
            for choice, request in zip(choices, requests):
                choice["capture_results"] = capture_results(
                    request, self._context.capture_index, generation.capture_wait
                )
        response = {**self._head, "choices": choices, "usage": self._usage(requests)}
        if twins:
            response["baseline"] = [self.choice(index, request) for index, request in enumerate(twins)]
        return response | self._extras(call)

    def start_events(self, call: ActiveCall) -> Iterable[bytes]:
        self._unfinished = len(call.requests)
        self._choice_count = len(self._split(call)[0])
        for index, request in enumerate(call.requests):
            choice = self.first_choice(index, request)
            if choice is not None:
                yield format_event(self._chunk([choice], **self._twin_mark(index)))

    def output_events(self, index: int, output: RequestOutput) -> Iterable[bytes]:
        chunks = self._output_chunks(index, output)
        self._unfinished -= output.last
        if not self._unfinished:
            self._final_chunk = chunks.pop()
        return map(format_event, chunks)

    def end_events(self, call: ActiveCall) -> Iterable[bytes]:
        yield format_event(self._final_chunk | self._extras(call))
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield format_event(self._chunk([], usage=self._usage(self._split(call)[0])))
        yield DONE

    def error_event(self, error: ApiError) -> bytes:
        return format_event(error.as_json()) + DONE

    def _split(self, call: ActiveCall) -> tuple[tuple[Request, ...], tuple[Request, ...]]:
        """The requests of the choices, and those of their unsteered twins if there are any."""
        count = len(call.requests) // (2 if self._generations[0].baseline else 1)
        return call.requests[:count], call.requests[count:]

    def _output_chunks(self, index: int, output: RequestOutput) -> list[Json]:
        """The chunks of one output; that of the `finish_reason`, if it has ended, is the last."""
        extra = self._twin_mark(index)
        chunks = []
        if output.computed_prompt_tokens is not None and self._body.return_progress:
            progress = _prompt_progress(output)
            chunks.append(
                self._chunk([self.empty_choice(index)], prompt_progress=progress, index=index, **extra)
            )
        chunks += [self._chunk([choice], **extra) for choice in self.chunk_choices(index, output)]
        if output.frames:
            chunks.append(
                self._chunk([self.empty_choice(index)], signals=output.frames, index=index, **extra)
            )
        if output.last:
            raise_on_failure(output.request)
            chunks.append(self._chunk([self.final_choice(index, output.request)], **extra))
        return chunks

    def _twin_mark(self, index: int) -> Json:
        """What marks a chunk of an unsteered twin. Twins have indices of their own, because clients join deltas by
        index."""
        return {} if index < self._choice_count else {"baseline": True}

    def _chunk(self, choices: list[Json], **more: Any) -> Json:
        return {**self._chunk_head, "choices": choices, **more}

    def _usage(self, requests: tuple[Request, ...]) -> Json:
        return usage(requests, len(requests) // len(self._generations))

    def _extras(self, call: ActiveCall) -> Json:
        """Response extras, and the prompt as token ids or text if requested."""
        generation, body = self._generations[0], self._body
        requests, twins = self._split(call)
        extras = response_extras(
            requests, generation, self._context.capture_index, twins, streamed=bool(body.stream)
        )
        if body.return_token_ids:
            extras["prompt_token_ids"] = generation.prompt
        if body.return_prompt_text:
            extras["prompt_text"] = self._context.engine.tokenizer.decode(generation.prompt)
        return extras


def _prompt_progress(output: RequestOutput) -> Json:
    """Prompt tokens in total, from the cache and computed so far; milliseconds since the request got its slot."""
    request, admitted = output.request, output.request.timings.admitted
    seconds = 0.0 if admitted is None else (request.timings.first_token or time.perf_counter()) - admitted
    return {
        "total": len(request.prompt_ids),
        "cache": request.cached_tokens or 0,
        "processed": output.computed_prompt_tokens,
        "time_ms": round(seconds * 1e3, 3),
    }
