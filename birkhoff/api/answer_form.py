"""What follows the prompt of a call, and how its tokens become text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.text.chat_format import Tools
from birkhoff.text.output_stream import ChatStream, TextStream
from birkhoff.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerForm:
    """`thinking` is None for plain text, else the answer is parsed as a chat message in which calls of `tools` are
    found; with `forced_call` a grammar makes it such a call. With `prompt_only` nothing follows the prompt."""

    thinking: bool | None = None
    tools: Tools = None
    forced_call: bool = False
    prompt_only: bool = False

    def text_sink(
        self, params: SamplingParams, tokenizer: Tokenizer | None, chat_stream: Callable[..., ChatStream]
    ) -> TextStream | ChatStream | None:
        """A new text sink for one answer; None for a model without a tokenizer."""
        if tokenizer is None:
            return None
        if self.thinking is None:
            return TextStream(tokenizer, params.stop, min_tokens=params.min_tokens)
        return chat_stream(
            params.stop,
            thinking=self.thinking,
            tools=self.tools,
            min_tokens=params.min_tokens,
            forced_call=self.forced_call,
        )
