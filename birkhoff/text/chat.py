"""A conversation to a prompt, as DeepSeek-V4 was trained to read it (spec 13.2, steps 3 to 5).

`render` gives segments, `encode_chat` gives token ids. Markers are placed here and nowhere else; everything that came
with a message (contents, reasoning, tool names, arguments, results, schemas) is `TextSegment` and stays text. Only our own
fixed texts are searched for markers, because the release's prompt texts contain some.

Three habits of the format worth knowing: chat mode answers after `<｜Assistant｜></think>`; in a finished earlier turn
the reasoning is gone and the history reads the same way; and one message with tools keeps all reasoning.
`effort` adds text in thinking mode only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from birkhoff.errors import ChatError
from birkhoff.text.literals import Literals
from birkhoff.text.markers import ASSISTANT, BOS, DSML, END_THINK, EOS, LATEST_REMINDER, TASKS, THINK, USER
from birkhoff.text.messages import EncodedToolCall, Turn, read_conversation
from birkhoff.text.segments import Marker, Segment, TextSegment, encode_segments, joined, split_markers
from birkhoff.text.tokenizer import Tokenizer


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    literals: Literals,
    *,
    thinking: bool = False,
    effort: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    drop_thinking: bool = True,
    response_format: Mapping[str, Any] | None = None,
) -> list[int]:
    """Prompt token ids of a conversation, ready for an answer."""
    segments = render(
        messages,
        literals,
        thinking=thinking,
        effort=effort,
        tools=tools,
        drop_thinking=drop_thinking,
        response_format=response_format,
    )
    return encode_segments(segments, tokenizer)


def render(
    messages: Sequence[Mapping[str, Any]],
    literals: Literals,
    *,
    thinking: bool = False,
    effort: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    drop_thinking: bool = True,
    response_format: Mapping[str, Any] | None = None,
) -> list[Segment]:
    """The prompt as markers and text, neighbouring texts joined."""
    for name, value in (("thinking", thinking), ("drop_thinking", drop_thinking)):
        if not isinstance(value, bool):
            raise ChatError(f"{name} is {value!r}, expected True or False.")
    effort_text = literals.effort_text(effort)  # refuses an unknown level in chat mode too
    turns = read_conversation(messages, tools=tools, response_format=response_format)
    drop_thinking = drop_thinking and not any(turn.tools for turn in turns)
    if thinking and drop_thinking:
        turns = _without_old_reasoning(turns)
    scene = _Scene(turns, thinking, drop_thinking, _last_user(turns), literals)
    out: list[Segment] = [Marker(BOS)]
    if thinking:
        out += split_markers(effort_text)
    for index in range(len(turns)):
        out += scene.turn(index)
        out += scene.transition(index)
    return list(joined(out))


def _last_user(turns: Sequence[Turn]) -> int:
    return max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def _without_old_reasoning(turns: list[Turn]) -> list[Turn]:
    """Step 4: before the last question, assistants lose their reasoning and developer turns disappear."""
    last = _last_user(turns)
    old = [replace(turn, reasoning="") for turn in turns[: max(last, 0)] if turn.role != "developer"]
    return old + turns[max(last, 0) :]


@dataclass(frozen=True)
class _Scene:
    """The turns of one conversation and what every turn's rendering depends on."""

    turns: list[Turn]
    thinking: bool
    drop_thinking: bool
    last_user: int
    literals: Literals

    def turn(self, index: int) -> Iterator[Segment]:
        turn = self.turns[index]
        if turn.role == "user":
            yield Marker(USER)
            yield TextSegment("\n\n".join(_result(b.text) if b.is_result else b.text for b in turn.blocks))
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
        answers_task = index > 0 and self.turns[index - 1].task is not None
        if self.thinking and not answers_task and (not self.drop_thinking or index > self.last_user):
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
            yield from split_markers(self.literals.require("tools_head"))
            yield TextSegment("\n".join(turn.tools))
            yield from split_markers(self.literals.require("tools_tail"))
        if turn.response_format is not None:
            yield TextSegment("\n\n")
            yield from split_markers(self.literals.require("response_format_head"))
            yield TextSegment(turn.response_format)

    def transition(self, index: int) -> Iterator[Segment]:
        """What stands between a message and the answer to it."""
        turn = self.turns[index]
        if index + 1 < len(self.turns) and self.turns[index + 1].role not in ("assistant", "latest_reminder"):
            return
        if turn.task is not None:
            if turn.task == "action":
                yield Marker(ASSISTANT)
                yield Marker(THINK if self.thinking else END_THINK)
            yield Marker(TASKS[turn.task])
        elif turn.role in ("user", "developer"):
            thinks = self.thinking and (not self.drop_thinking or index >= self.last_user)
            yield Marker(ASSISTANT)
            yield Marker(THINK if thinks else END_THINK)


def _result(text: str) -> str:
    return f"<tool_result>{text}</tool_result>"


def render_calls(calls: Sequence[EncodedToolCall]) -> Iterator[Segment]:
    """The block of tool calls that ends an answer. Names and values are text, whatever they spell."""
    yield TextSegment("\n\n")
    yield from _tag("<", "tool_calls>")
    for call in calls:
        yield TextSegment("\n")
        yield from _tag("<", f'invoke name="{call.name}">\n')
        for place, (name, is_string, value) in enumerate(call.parameters):
            kind = "true" if is_string else "false"
            yield TextSegment("\n" if place else "")
            yield from _tag("<", f'parameter name="{name}" string="{kind}">{value}')
            yield from _tag("</", "parameter>")
        yield TextSegment("\n")
        yield from _tag("</", "invoke>")
    yield TextSegment("\n")
    yield from _tag("</", "tool_calls>")


def _tag(opening: str, rest: str) -> tuple[Segment, ...]:
    return TextSegment(opening), Marker(DSML), TextSegment(rest)
