"""The chat format of a model of Transformers: the template that its tokenizer comes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from birkhoff.errors import OptionError, PromptError, quoted
from birkhoff.text.chat_format import Messages
from birkhoff.text.output_stream import ChatStream, ContentParser
from birkhoff.text.tokenizer import Tokenizer


class TemplateChat:
    """`tokenizer` is the Transformers tokenizer, `decoder` ours for the same ids. Answers are plain content: every
    family writes calls of tools and reasoning in its own way, so tools are refused and reasoning is not split off."""

    tools = False
    reasons = False

    def __init__(self, tokenizer: Any, decoder: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = decoder

    def encode(
        self,
        messages: Messages,
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """`thinking` is passed to the template as `enable_thinking`. A `response_format` constrains the tokens of the
        answer and is not part of the prompt."""
        if effort is not None:
            raise OptionError(
                f"effort is {quoted(effort)}, but a chat template has no reasoning effort. Leave it out."
            )
        if tools:
            raise OptionError(
                "tools are given, but calls in the format of this model are not parsed. Leave tools out, or describe "
                "them in a message."
            )
        if not messages:
            raise PromptError("the list of messages is empty. Pass at least one.")
        asks = messages[-1].get("role") != "assistant"
        try:
            ids = self._tokenizer.apply_chat_template(
                [_message(message) for message in messages],
                add_generation_prompt=asks,
                tokenize=True,
                return_dict=False,
                enable_thinking=thinking,
            )
        except Exception as error:  # the template raises whatever it likes
            raise PromptError(
                f"the model's chat template refuses these messages: {quoted(str(error), 300)}."
            ) from None
        return [int(token) for token in ids]

    def stream(self, stops: Sequence[str] = (), *, thinking: bool = False, min_tokens: int = 0) -> ChatStream:
        parser = ContentParser(self._decoder.markers)
        return ChatStream(self._decoder, stops, thinking=thinking, min_tokens=min_tokens, parser=parser)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its content as one text: templates of text models take no list of parts."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return {**message, "content": content or ""}
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
            raise PromptError(
                f"a message has the part {quoted(part)}, expected text: this model reads text only."
            )
        texts.append(str(part.get("text", "")))
    return {**message, "content": "\n".join(texts)}
