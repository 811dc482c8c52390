"""How a model is talked to: messages to token ids, and generated tokens back to a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict, Unpack

from birkhoff.text.chat import ChatOptions, encode_chat
from birkhoff.text.output_stream import ChatStream
from birkhoff.text.parse import CompletionParser
from birkhoff.text.prompt_texts import PromptTexts
from birkhoff.text.template_answer import CallSyntax
from birkhoff.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None  # functions in OpenAI's form


class AnswerOptions(TypedDict, total=False):
    """How an answer is parsed: `thinking` and `tools` are those its prompt was encoded with; no stop string is matched
    in the first `min_tokens` tokens. With `forced_call` a grammar makes the answer a call of a tool, so that a tag
    which is cut off is no content."""

    thinking: bool
    tools: Tools
    min_tokens: int
    forced_call: bool


class ChatFormat(Protocol):
    """`tools`: whether calls of tools are encoded and parsed; `calls`: how they are written, None for V4's own way;
    `reasons`: whether an answer may begin with reasoning."""

    @property
    def calls(self) -> CallSyntax | None: ...

    @property
    def tools(self) -> bool: ...

    @property
    def reasons(self) -> bool: ...

    def encode(self, messages: Messages, **options: Unpack[ChatOptions]) -> list[int]:
        """The token ids of the prompt that asks for the next message."""
        ...

    def reasoning_start(self, thinking: bool) -> str | None:
        """The tag that opens the reasoning of an answer to a prompt encoded with `thinking`: empty if the prompt ends
        with it, None if the answer has no reasoning."""
        ...

    def stream(self, stops: Sequence[str] = (), **options: Unpack[AnswerOptions]) -> ChatStream:
        """A parser of one answer."""
        ...


class V4Chat:
    """The chat format of DeepSeek-V4. A conversation that must have more than `max_tokens` is refused early."""

    tools = True
    calls: CallSyntax | None = None
    reasons = True

    def __init__(self, tokenizer: Tokenizer, texts: PromptTexts, max_tokens: int | None = None):
        self._tokenizer = tokenizer
        self._texts = texts
        self._max_tokens = max_tokens

    def encode(self, messages: Messages, **options: Unpack[ChatOptions]) -> list[int]:
        return encode_chat(messages, self._tokenizer, self._texts, max_tokens=self._max_tokens, **options)

    def reasoning_start(self, thinking: bool) -> str | None:
        return "" if thinking else None

    def stream(self, stops: Sequence[str] = (), **options: Unpack[AnswerOptions]) -> ChatStream:
        parser = CompletionParser(
            thinking=options.get("thinking", False), forced_call=options.get("forced_call", False)
        )
        return ChatStream(self._tokenizer, stops, parser=parser, min_tokens=options.get("min_tokens", 0))
