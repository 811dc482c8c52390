"""Engine loading, chat streaming and output formatting shared by `generate`, `chat` and other commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from birkhoff.cli.terminal import progress_bar

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.output import Output
    from birkhoff.text.events import Event

Messages = Sequence[Mapping[str, Any]]


def open_engine(load_options: Mapping[str, Any], max_requests: int = 1) -> Engine:
    """Call `birkhoff.load` with a progress bar. A low `max_requests` leaves more cache memory for long contexts."""
    import birkhoff

    options = {"max_requests": max_requests, **load_options}
    with progress_bar("loading") as advance:
        return birkhoff.load(options.pop("model"), progress=advance, **options)


class ChatGeneration:
    """One running chat completion. Iterating yields the parsed events of each token; `close` cancels it.

    `output` holds the text, reasoning and message parsed so far, also after a cancellation.
    """

    def __init__(
        self,
        engine: Engine,
        messages: Messages,
        sampling: Mapping[str, Any],
        *,
        thinking: bool,
        effort: str | None,
        steer: Sequence[Any] | None = None,
    ):
        stops = sampling.get("stop", ())
        prompt = engine.encode_chat(messages, thinking=thinking, effort=effort)
        self._parser = engine.chat_stream([stops] if isinstance(stops, str) else stops, thinking=thinking)
        self._stream = engine.stream(prompt, steer=steer, **sampling)

    def __iter__(self) -> Iterator[list[Event]]:
        """Yield the events each token completes; the list is often empty or one piece of text."""
        emitted = 0
        for token in self._stream:
            if token.token_id is not None:
                self._parser.feed(token.token_id)
            if token.finish_reason is not None:
                self._parser.finish()
            yield self._parser.events[emitted:]
            emitted = len(self._parser.events)

    def close(self) -> None:
        self._stream.close()

    @property
    def output(self) -> Output:
        output = self._stream.output
        output.message = self._parser.message()
        output.text = output.message.content
        return output


def output_to_json(output: Output) -> dict[str, Any]:
    """Return the JSON-serialisable fields of an `Output`."""
    fields: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": output.finish_reason,
        "logprobs": None
        if output.logprobs is None
        else [{"token_id": p.token_id, "logprob": p.logprob, "top": p.top} for p in output.logprobs],
        "acts": {},  # `generate` and `chat` have no capture option
        "interp": output.interp,
        "timings": output.timings,
    }
    if output.message is not None:
        fields["reasoning"] = output.message.reasoning
        fields["problems"] = [problem.message for problem in output.message.problems]
    if output.error is not None:
        fields["error"] = {"code": getattr(output.error, "code", "defect"), "message": str(output.error)}
    return fields


def summarize(output: Output) -> str:
    """Return one line with the token count, finish reason, prefill time and decode speed."""
    timings, rate = output.timings, output.timings["tokens_per_second"]
    count = timings["output_tokens"]
    parts = [f"{count} token{'' if count == 1 else 's'}, ended by {output.finish_reason}"]
    if timings["prefill_ms"] is not None:
        parts.append(f"prompt of {timings['prompt_tokens']} in {timings['prefill_ms']:.0f} ms")
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    return ", ".join(parts)
