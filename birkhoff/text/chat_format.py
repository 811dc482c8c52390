"""How a model is talked to: messages to token ids, and generated tokens back to a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from birkhoff.text.chat import encode_chat
from birkhoff.text.output_stream import ChatStream
from birkhoff.text.prompt_texts import PromptTexts
from birkhoff.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class ChatFormat(Protocol):
    """`tools`: whether calls of tools are encoded and parsed; `reasons`: whether an answer may begin with reasoning."""

    @property
    def tools(self) -> bool: ...

    @property
    def reasons(self) -> bool: ...

    def encode(
        self,
        messages: Messages,
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of the prompt that asks for the next message."""
        ...

    def stream(self, stops: Sequence[str] = (), *, thinking: bool = False, min_tokens: int = 0) -> ChatStream:
        """A parser of one answer."""
        ...


class V4Chat:
    """The chat format of DeepSeek-V4. A conversation that must have more than `max_tokens` is refused early."""

    tools = True
    reasons = True

    def __init__(self, tokenizer: Tokenizer, texts: PromptTexts, max_tokens: int | None = None):
        self._tokenizer = tokenizer
        self._texts = texts
        self._max_tokens = max_tokens

    def encode(
        self,
        messages: Messages,
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[int]:
        return encode_chat(
            messages,
            self._tokenizer,
            self._texts,
            thinking=thinking,
            effort=effort,
            tools=tools,
            response_format=response_format,
            max_tokens=self._max_tokens,
        )

    def stream(self, stops: Sequence[str] = (), *, thinking: bool = False, min_tokens: int = 0) -> ChatStream:
        return ChatStream(self._tokenizer, stops, thinking=thinking, min_tokens=min_tokens)
