"""Encode a conversation as a DeepSeek-V4 prompt (spec 13.2, steps 3 to 5).

`render` returns segments, `encode_chat` token ids. Only this module places markers; everything that comes with a
message (contents, reasoning, tool names, arguments, results, schemas) is a `TextSegment` and stays text. Only the
fixed prompt texts are searched for markers, because those of the release contain some.

Properties of the format: in chat mode the answer follows `<｜Assistant｜></think>`; reasoning of finished earlier turns
is dropped, so they have the same form; one message with tools keeps all reasoning. `effort` adds text in thinking mode
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from birkhoff.errors import ChatError
from birkhoff.option_checks import check_bool
from birkhoff.text.markers import ASSISTANT, BOS, DSML, END_THINK, EOS, LATEST_REMINDER, TASKS, THINK, USER
from birkhoff.text.messages import PromptToolCall, Turn, read_conversation
from birkhoff.text.prompt_texts import PromptTexts
from birkhoff.text.prompts import check_length
from birkhoff.text.segments import Marker, Segment, TextSegment, encode_segments, join_texts, split_markers
from birkhoff.text.tokenizer import Tokenizer


class ChatOptions(TypedDict, total=False):
    """The keywords of `encode_chat`, as `render` has them."""

    thinking: bool
    effort: str | None
    tools: Sequence[Mapping[str, Any]] | None
    response_format: Mapping[str, Any] | None


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    texts: PromptTexts,
    *,
    max_tokens: int | None = None,
    **options: Unpack[ChatOptions],
) -> list[int]:
    """Return the prompt token ids of a conversation, ready for an answer.

    A conversation that must have more than `max_tokens` is refused before it is encoded."""
    segments = render(messages, texts, **options)
    if max_tokens is not None:
        check_length(sum(len(segment.string) for segment in segments), tokenizer, max_tokens)
    return encode_segments(segments, tokenizer)


def render(
    messages: Sequence[Mapping[str, Any]],
    texts: PromptTexts,
    *,
    thinking: bool = False,
    effort: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    drop_thinking: bool = True,
    response_format: Mapping[str, Any] | None = None,
) -> list[Segment]:
    """Return the prompt as markers and text, with adjacent texts joined."""
    check_bool("thinking", thinking, ChatError)
    check_bool("drop_thinking", drop_thinking, ChatError)
    effort_text = texts.effort_text(effort)  # rejects an unknown level in chat mode too
    turns = read_conversation(messages, tools=tools, response_format=response_format)
    drop_thinking = drop_thinking and not any(turn.tools for turn in turns)
    if thinking and drop_thinking:
        turns = _without_old_reasoning(turns)
    renderer = _Renderer(turns, thinking, drop_thinking, _last_user(turns), texts)
    out: list[Segment] = [Marker(BOS)]
    if thinking:
        out += split_markers(effort_text)
    for index in range(len(turns)):
        out += renderer.turn(index)
        out += renderer.transition(index)
    return list(join_texts(out))


def _last_user(turns: Sequence[Turn]) -> int:
    return max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def _without_old_reasoning(turns: list[Turn]) -> list[Turn]:
    """Step 4: before the last question, drop the assistants' reasoning and the developer turns."""
    last = _last_user(turns)
    old = [replace(turn, reasoning="") for turn in turns[: max(last, 0)] if turn.role != "developer"]
    return old + turns[max(last, 0) :]


@dataclass(frozen=True)
class _Renderer:
    """Renders the turns of one conversation."""

    turns: list[Turn]
    thinking: bool
    drop_thinking: bool
    last_user: int
    texts: PromptTexts

    def turn(self, index: int) -> Iterator[Segment]:
        turn = self.turns[index]
        if turn.role == "user":
            yield Marker(USER)
            yield TextSegment("\n\n".join(_result(b.text) if b.is_result else b.text for b in turn.parts))
        elif turn.role == "assistant":
            yield from self._answer(index)
        elif turn.role == "latest_reminder":
            yield Marker(LATEST_REMINDER)
            yield TextSegment(turn.content)
        else:  # system and developer
            if turn.role == "developer":
                yield Marker(USER)
            yield TextSegment(turn.content)
            yield from self._instructions(turn)

    def _answer(self, index: int) -> Iterator[Segment]:
        turn = self.turns[index]
        is_task_answer = index > 0 and self.turns[index - 1].task is not None
        if self.thinking and not is_task_answer and (not self.drop_thinking or index > self.last_user):
            yield TextSegment(turn.reasoning)
            yield Marker(END_THINK)
        yield TextSegment(turn.content)
        if turn.calls:
            yield from render_calls(turn.calls)
        if not turn.wo_eos:
            yield Marker(EOS)

    def _instructions(self, turn: Turn) -> Iterator[Segment]:
        if turn.tools:
            yield TextSegment("\n\n")
            yield from split_markers(self.texts.require("tools_head"))
            yield TextSegment("\n".join(turn.tools))
            yield from split_markers(self.texts.require("tools_tail"))
        if turn.response_format is not None:
            yield TextSegment("\n\n")
            yield from split_markers(self.texts.require("response_format_head"))
            yield TextSegment(turn.response_format)

    def transition(self, index: int) -> Iterator[Segment]:
        """Yield the markers between a message and the answer to it."""
        turn = self.turns[index]
        if index + 1 < len(self.turns) and self.turns[index + 1].role not in ("assistant", "latest_reminder"):
            return
        if turn.task is not None:
            if turn.task == "action":
                yield Marker(ASSISTANT)
                yield Marker(THINK if self.thinking else END_THINK)
            yield Marker(TASKS[turn.task])
        elif turn.role in ("user", "developer"):
            opens_reasoning = self.thinking and (not self.drop_thinking or index >= self.last_user)
            yield Marker(ASSISTANT)
            yield Marker(THINK if opens_reasoning else END_THINK)


def _result(text: str) -> str:
    return f"<tool_result>{text}</tool_result>"


def render_calls(calls: Sequence[PromptToolCall]) -> Iterator[Segment]:
    """Yield the block of tool calls that ends an answer. Names and values are always text."""
    yield TextSegment("\n\n")
    yield from _tag("<", "tool_calls>")
    for call in calls:
        yield TextSegment("\n")
        yield from _tag("<", f'invoke name="{call.name}">\n')
        for index, (name, is_string, value) in enumerate(call.parameters):
            kind = "true" if is_string else "false"
            yield TextSegment("\n" if index else "")
            yield from _tag("<", f'parameter name="{name}" string="{kind}">{value}')
            yield from _tag("</", "parameter>")
        yield TextSegment("\n")
        yield from _tag("</", "invoke>")
    yield TextSegment("\n")
    yield from _tag("</", "tool_calls>")


def _tag(opening: str, rest: str) -> tuple[Segment, ...]:
    return TextSegment(opening), Marker(DSML), TextSegment(rest)
