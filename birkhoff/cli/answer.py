"""Answers on the command line: load with a progress bar, stream with reasoning and content apart, end as JSON.

`open_engine` is `birkhoff.load` for verbs that hold one conversation. `ChatAnswer` is one running answer in the chat
format: iterate over the events of each token, close it at any time, and ask for its output: what there was of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from birkhoff.cli.talk import bar

if TYPE_CHECKING:
    from birkhoff.api import Engine
    from birkhoff.output import Output
    from birkhoff.text.events import Event

Messages = Sequence[Mapping[str, Any]]


def open_engine(loading: Mapping[str, Any], requests: int = 1) -> Engine:
    """Load a model for a few requests at a time, so that the context they share its memory with can be long."""
    import birkhoff

    options = {"max_requests": requests, **loading}
    with bar("loading") as advance:
        return birkhoff.load(options.pop("model"), progress=advance, **options)


class ChatAnswer:
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
        from birkhoff.text.detokenizer import ChatStream

        stops = sampling.get("stop", ())
        prompt = engine.encode_chat(messages, thinking=thinking, effort=effort)
        self._parsed = ChatStream(
            engine.tokenizer, [stops] if isinstance(stops, str) else stops, thinking=thinking
        )
        self._stream = engine.stream(prompt, steer=steer, **sampling)

    def __iter__(self) -> Iterator[list[Event]]:
        """What each token brought to light, often nothing or one piece of text."""
        told = 0
        for token in self._stream:
            if token.token_id is not None:
                self._parsed.feed(token.token_id)
            if token.finish_reason is not None:
                self._parsed.finish()
            yield self._parsed.events[told:]
            told = len(self._parsed.events)

    def close(self) -> None:
        self._stream.close()

    @property
    def output(self) -> Output:
        output = self._stream.output
        output.message = self._parsed.message()
        output.text = output.message.content
        return output


def as_json(output: Output) -> dict[str, Any]:
    """The fields of an `Output` that are plain data."""
    fields: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": output.finish_reason,
        "logprobs": None
        if output.logprobs is None
        else [{"token_id": p.token_id, "logprob": p.logprob, "top": p.top} for p in output.logprobs],
        "acts": {},  # these verbs capture nothing
        "interp": output.interp,
        "timings": output.timings,
    }
    if output.message is not None:
        fields["reasoning"] = output.message.reasoning
        fields["problems"] = [problem.message for problem in output.message.problems]
    if output.error is not None:
        fields["error"] = {"code": getattr(output.error, "code", "defect"), "message": str(output.error)}
    return fields


def how_it_went(output: Output) -> str:
    """One line for the end of an answer: why it ended and how fast it was."""
    timings, rate = output.timings, output.timings["tokens_per_second"]
    parts = [f"{timings['output_tokens']} tokens, ended by {output.finish_reason}"]
    if timings["prefill_ms"] is not None:
        parts.append(f"prompt of {timings['prompt_tokens']} in {timings['prefill_ms']:.0f} ms")
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    return ", ".join(parts)
