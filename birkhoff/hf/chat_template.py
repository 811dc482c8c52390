"""The chat format of a model of Transformers: the template that its tokenizer comes with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from birkhoff.errors import OptionError, PromptError, quoted
from birkhoff.text.chat_format import AnswerOptions, Messages, Tools
from birkhoff.text.markers import END_THINK, THINK
from birkhoff.text.output_stream import ChatStream
from birkhoff.text.template_answer import MISTRAL, TemplateParser, call_syntax, takes_tools, writes_reasoning
from birkhoff.text.tokenizer import Tokenizer


class TemplateChat:
    """`tokenizer` is the Transformers tokenizer, `decoder` ours for the same ids. What the template takes decides:
    tools if it names `tools`, reasoning if it writes `<think>`; calls are parsed in the format that it writes."""

    def __init__(self, tokenizer: Any, decoder: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = decoder
        source = tokenizer.get_chat_template(tools=[{}])
        self.tools = takes_tools(source)
        self.calls = call_syntax(source) if self.tools else None
        self.reasons = writes_reasoning(source)
        self._takes_effort = "reasoning_effort" in source
        self._opens = {
            thinking: self.reasons and self._opens_reasoning(thinking) for thinking in (False, True)
        }

    def reasoning_start(self, thinking: bool) -> str | None:
        return "" if self._opens[thinking] else THINK if self.reasons and thinking else None

    def encode(
        self,
        messages: Messages,
        *,
        thinking: bool = False,
        effort: str | None = None,
        tools: Tools = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """`thinking` is passed to the template as `enable_thinking` and `thinking`, `effort` as `reasoning_effort`. A
        `response_format` constrains the tokens of the answer and is not part of the prompt."""
        if effort is not None and not self._takes_effort:
            raise OptionError(
                f"effort is {quoted(effort)}, but this model's chat template has no reasoning effort. Leave it out."
            )
        if thinking and not (self.reasons or self._takes_effort):
            raise OptionError(
                "thinking is true, but this model's chat template has no reasoning. Leave it out."
            )
        if tools and not self.tools:
            raise OptionError(
                "tools are given, but this model's chat template takes none. Leave tools out, or describe them in a "
                "message."
            )
        if not messages:
            raise PromptError("the list of messages is empty. Pass at least one.")
        asks = messages[-1].get("role") != "assistant"
        options = {"add_generation_prompt": asks, "tools": list(tools) if tools else None}
        if not asks and messages[-1].get("wo_eos"):
            options["continue_final_message"] = True
        if effort is not None:
            options["reasoning_effort"] = effort
        try:
            ids = self._apply(
                [self._message(message) for message in messages], thinking, tokenize=True, **options
            )
        except PromptError:
            raise
        except Exception as error:  # the template raises whatever it likes
            raise PromptError(
                f"the model's chat template refuses these messages: {quoted(str(error), 300)}."
            ) from None
        return [int(token) for token in ids]

    def stream(self, stops: Sequence[str] = (), **options: Unpack[AnswerOptions]) -> ChatStream:
        tools = options.get("tools")
        parser = TemplateParser(
            reasons=self.reasons,
            in_reasoning=self._opens[options.get("thinking", False)],
            calls=self.calls if tools else None,
            tools=tools or (),
            forced_call=options.get("forced_call", False),
        )
        return ChatStream(self._decoder, stops, parser=parser, min_tokens=options.get("min_tokens", 0))

    def _apply(self, messages: list[dict[str, Any]], thinking: bool, **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(
            messages, return_dict=False, enable_thinking=thinking, thinking=thinking, **options
        )

    def _opens_reasoning(self, thinking: bool) -> bool:
        """Whether the prompt that asks for an answer ends inside reasoning."""
        try:
            text: str = self._apply(
                [{"role": "user", "content": "a"}], thinking, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # a template that wants other messages than one question
            return False
        return text.rfind(THINK) > text.rfind(END_THINK)

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message as templates of text models take it: content as one text, arguments of calls as objects."""
        message = {**message, "content": _text(message.get("content"))}
        if (message.get("tool_calls") or message.get("role") == "tool") and not self.tools:
            raise PromptError(
                "a message calls a tool or is the result of one, but this model's chat template takes no tools. "
                "Describe it in a text message."
            )
        if message.get("reasoning") and not message.get("reasoning_content"):
            message["reasoning_content"] = message.pop("reasoning")
        if message.get("tool_calls"):
            message["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        if message.get("tool_call_id"):
            message["tool_call_id"] = self._call_id(message["tool_call_id"])
        return message

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        try:
            function["arguments"] = (
                json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
            )
        except ValueError:
            raise PromptError(
                f"a message calls {quoted(function.get('name'))} with the arguments {quoted(arguments)}, expected "
                "a JSON object as text."
            ) from None
        return {**call, "function": function} | ({"id": self._call_id(call["id"])} if call.get("id") else {})

    def _call_id(self, call_id: Any) -> str:
        """Mistral's templates refuse ids that are not nine letters or digits: others are replaced, always alike."""
        if (
            self.calls is None
            or self.calls.name != MISTRAL.name
            or re.fullmatch(r"[A-Za-z0-9]{9}", str(call_id))
        ):
            return str(call_id)
        return hashlib.sha256(str(call_id).encode()).hexdigest()[:9]


def _text(content: Any) -> str:
    """The content of a message as one text: templates of text models take no list of parts."""
    if isinstance(content, str) or content is None:
        return content or ""
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
            raise PromptError(
                f"a message has the part {quoted(part)}, expected text: this model reads text only."
            )
        texts.append(str(part.get("text", "")))
    return "\n".join(texts)
