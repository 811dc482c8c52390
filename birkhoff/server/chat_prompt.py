"""From chat messages, tools and formats to prompt token ids: what the chat, responses and messages routes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from birkhoff.server.api_errors import bad_request
from birkhoff.server.context import ServingContext
from birkhoff.server.fields import ResponseFormat
from birkhoff.server.generation import GenerationCall
from birkhoff.server.json_grammar import MaskFactory
from birkhoff.server.tools import Tools, resolve_tool_choice

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
REASONING_EFFORTS: dict[str, tuple[bool, str | None]] = {  # (thinking, effort of the chat encoding)
    "none": (False, None),
    "minimal": (False, None),
    "low": (True, None),
    "medium": (True, None),
    "high": (True, "high"),
    "xhigh": (True, "max"),
    "max": (True, "max"),
}


@dataclass(frozen=True)
class ChatPrompt:
    """A chat as token ids, how its answer is parsed, and the grammar that the answer must follow, if any.

    `tools` are those that the model was shown. With `forced_call` the grammar is that of calls of them."""

    ids: list[int]
    thinking: bool
    tools: Tools | None
    mask: MaskFactory | None
    forced_call: bool
    warnings: tuple[str, ...] = ()

    def generation(self, sampling: dict[str, Any], warnings: list[str], **arguments: Any) -> GenerationCall:
        """The call that answers the chat; `arguments` are further fields of it."""
        return GenerationCall(
            self.ids,
            sampling,
            self.thinking,
            self.tools,
            mask=self.mask,
            forced_call=self.forced_call,
            warnings=[*warnings, *self.warnings],
            **arguments,
        )


def encode_chat(
    context: ServingContext,
    messages: list[dict[str, Any]],
    *,
    thinking: bool,
    effort: str | None,
    tools: Tools | None,
    tool_choice: str | dict[str, Any] | None,
    single_call: bool,
    response_format: ResponseFormat | None,
    refuse_both: bool = False,
    continue_final: bool = False,
) -> ChatPrompt:
    """Encode a chat and compile the grammar its output must follow.

    `messages` are in OpenAI's form, see `normalize_messages`. A forced tool call takes precedence over
    `response_format`; with `refuse_both` the combination is refused. With `continue_final` the answer continues the
    last message, which is the assistant's."""
    if tools and not context.engine.chat_abilities["tools"]:
        raise bad_request(
            "tools: this model's chat template takes none. Leave them out, or describe them in a message.",
            "tools",
        )
    chat = context.engine.chat_format
    reasoning = chat.reasoning_start(thinking)
    tools, mask = resolve_tool_choice(
        context.grammars, tools, tool_choice, reasoning, single_call, chat.calls
    )
    forced_call = mask is not None
    if mask is None or refuse_both:
        format_mask = context.grammars.from_response_format(response_format, reasoning)
        if mask and format_mask:
            raise bad_request(
                "response_format and a forced tool call exclude each other. Choose one.", "response_format"
            )
        mask = mask or format_mask
    warnings: tuple[str, ...] = ()
    last = messages[-1] if messages else {}
    if continue_final:
        if last.get("role") != "assistant" or last.get("tool_calls"):
            raise bad_request(
                "the last message is to be continued, and it is no text of the assistant.", "messages"
            )
        if thinking or mask is not None:
            what = "with reasoning" if thinking else "in a given form"
            raise bad_request(
                f"the last message is to be continued, and the answer {what} begins anew. Choose one.",
                "messages",
            )
        messages = [*messages[:-1], {**last, "wo_eos": True}]
    elif last.get("role") == "assistant" and not last.get("wo_eos"):
        warnings = (
            "the last message is the assistant's and complete: there is nothing to answer. End with another role, or "
            "continue it.",
        )
    json_schema = response_format.json_schema if response_format else None
    ids = context.engine.encode_chat(
        messages,
        thinking=thinking,
        effort=effort,
        tools=tools,
        response_format=json_schema.schema_ if json_schema else None,
    )
    return ChatPrompt(ids, thinking, tools, mask, forced_call, warnings)


def normalize_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI messages as the model's chat encoding takes them.

    `developer` becomes `system`, text parts are unified, and fields that only clients use are dropped."""
    normalized = []
    for index, message in enumerate(messages):
        fields = {
            key: value
            for key, value in message.items()
            if value is not None and key not in ("refusal", "audio", "function_call")
        }
        if fields.get("role") == "developer":
            fields["role"] = "system"
        if isinstance(fields.get("content"), list):
            fields["content"] = [
                _text_part(part, f"messages[{index}].content[{i}]")
                for i, part in enumerate(fields["content"])
            ]
        if fields.get("reasoning") and fields.get("reasoning_content"):
            fields.pop("reasoning")
        if fields.get("tool_calls") == []:
            fields.pop("tool_calls")
        normalized.append(fields)
    return normalized


def _text_part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        return {"type": "text", "text": str(part.get("refusal", ""))}
    raise bad_request(
        f"{where}: expected a text part; this model reads no images, sound or files.", where, "content-kind"
    )
