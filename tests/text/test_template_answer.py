"""Answers of models with a chat template: reasoning and tool calls in the formats of several families."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.text.events import ToolCall, assemble
from birkhoff.text.segments import Marker, TextSegment
from birkhoff.text.template_answer import (
    ARGS,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    PHI,
    TemplateParser,
    call_syntax,
)

HALF = "\\ud83d"  # of a surrogate pair, as JSON spells it

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ROME = ToolCall("weather", '{"city": "Rome", "days": 3}')
NOW = ToolCall("now", "{}")
CITY = '{"city": "Rome", "days": 3}'


def parse(pieces, calls=None, **options):
    parser = TemplateParser(calls=calls, tools=TOOLS if calls else (), **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return assemble([*events, *parser.finish()])


def of(text, calls=None, **options):
    """The message, which is the same however the text is cut."""
    whole = parse([TextSegment(text)], calls, **options)
    assert parse([TextSegment(character) for character in text], calls, **options) == whole
    return whole


@pytest.mark.parametrize(
    "syntax", [HERMES, MISTRAL, MISTRAL_NAMED, PHI, LLAMA], ids=lambda each: each.opening
)
def test_a_forced_call_that_is_cut_off_anywhere_is_no_content(syntax):
    call = f'{{"name": "weather", "{syntax.arguments}": {CITY}}}'
    inner = f"weather{ARGS}{CITY}" if syntax.named else f"[{call}]" if syntax.array else call
    text = inner if syntax.bare else syntax.opening + inner + syntax.closing
    for stop in range(1, len(text) + 1):
        message = of(text[:stop], syntax, forced_call=True)
        assert message.content == "" and bool(message.tool_calls) != bool(message.problems)
        if message.problems:
            assert message.problems[-1].raw == text[:stop]
    assert message.tool_calls == (ROME,)
    thought = of(
        "<think>Hm.</think>" + text[: max(len(syntax.opening), 2) - 1], syntax, reasons=True, forced_call=True
    )
    assert (thought.reasoning, thought.content, len(thought.problems)) == ("Hm.", "", 1)
    assert of("1 < 2 <", HERMES).content == "1 < 2 <"  # a call that is not forced may be none


@pytest.mark.parametrize(
    "syntax, text, calls",
    [
        (HERMES, f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>', [ROME]),
        (
            HERMES,
            f'<tool_call>{{"name": "weather", "arguments": {CITY}}}</tool_call>\n'
            '<tool_call>{"name": "now"}</tool_call>',
            [ROME, NOW],
        ),
        (
            HERMES,
            "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
            [ROME],
        ),
        (HERMES, f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}', [ROME]),  # no closing tag
        (
            MISTRAL,
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]',
            [ROME, NOW],
        ),
        (MISTRAL_NAMED, f"[TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{{}}", [ROME, NOW]),
        (LLAMA, f'{{"name": "weather", "parameters": {CITY}}}', [ROME]),
        (
            LLAMA,
            f'<|python_tag|>{{"name": "weather", "parameters": {CITY}}}; {{"name": "now", "parameters": {{}}}}',
            [ROME, NOW],
        ),
        (PHI, f'<|tool_call|>[{{"name": "weather", "arguments": {json.dumps(CITY)}}}]<|/tool_call|>', [ROME]),
    ],
)
def test_calls_of_every_format(syntax, text, calls):
    for before in ("", "\n", *(["I look it up.\n"] if syntax is not LLAMA else [])):
        message = of(before + text, syntax)
        assert (
            list(message.tool_calls) == calls and message.content == before.strip() and not message.problems
        )
    assert of(text + "\n", syntax).content == ""
    assert of(text).content == text and not of(text).tool_calls  # without tools it is text


def test_tags_that_are_tokens_of_their_own():
    call = TextSegment('[{"name": "now", "arguments": {}}]')
    found = parse([Marker("<s>"), Marker("[TOOL_CALLS]"), call, Marker("</s>")], MISTRAL)
    assert found.tool_calls == (NOW,) and found.content == ""
    thought = parse([Marker("<think>"), TextSegment("a"), Marker("</think>"), TextSegment("b")], reasons=True)
    assert (thought.reasoning, thought.content) == ("a", "b")


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_split_off(opened):
    text = (
        "a < b\n\n</thin\n</think>\n\nAnswer </think>" if opened else "\n<think>\n a\n</think>\n\nb <think>"
    )
    message = of(text, reasons=True, in_reasoning=opened)
    want = ("a < b\n\n</thin", "Answer </think>") if opened else ("a", "b <think>")
    assert (message.reasoning, message.content) == want and not message.problems
    cut = of("never ends", reasons=True, in_reasoning=True)
    assert cut.reasoning == "never ends" and "ends before </think>" in cut.problems[0].message
    assert (
        of("plain\n", reasons=True).content == "plain\n"
        and of("<think>x</think>").content == "<think>x</think>"
    )
    both = of('<think>x</think>\n<tool_call>{"name": "now"}</tool_call>', HERMES, reasons=True)
    assert (both.reasoning, both.content, both.tool_calls) == ("x", "", (NOW,))


def test_what_is_no_call_stays_content_or_is_reported():
    for text in ("<tool_call>{oops}</tool_call>", '<tool_call>{"arguments": {}}</tool_call> after'):
        message = of(text, HERMES)
        assert message.content == text and "not valid" in message.problems[0].message
    cut = of('<tool_call>{"name": "weather", "argu', HERMES)
    assert (
        not cut.content
        and not cut.tool_calls
        and cut.problems[0].raw == '<tool_call>{"name": "weather", "argu'
    )
    for text in (
        '{"name": "Bob", "parameters": {}}',
        '{"city": "Rome"} is JSON',
        "{not json",
        "{}",
        '{"name": 3}',
    ):
        assert of(text, LLAMA).content == text and not of(text, LLAMA).tool_calls
    assert of('[TOOL_CALLS][{"name": "now", "arguments": NaN}]', MISTRAL).problems


PIECES = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "now",
    ),
    *(
        "{",
        "}",
        '{"name": "now"}',
        '{"name": "now", "parameters": {}}',
        "[",
        "]",
        ";",
        " ",
        "\n",
        "<",
        "text",
    ),
]


@given(
    st.lists(st.sampled_from(PIECES), max_size=12),
    st.sampled_from([None, HERMES, LLAMA, MISTRAL, PHI]),
    st.booleans(),
    st.booleans(),
)
def test_any_text_gives_the_same_message_however_it_is_cut(pieces, calls, reasons, opened):
    text = "".join(pieces)
    message = of(text, calls, reasons=reasons, in_reasoning=reasons and opened)
    if calls is None and not reasons:
        assert message.content == text
    assert parse(map(TextSegment, pieces), calls, reasons=reasons, in_reasoning=reasons and opened) == message


def test_the_format_is_read_from_the_template():
    assert call_syntax("{{ tools }} <tool_call>") is HERMES and call_syntax("{{ tools }}") is LLAMA
    assert call_syntax("[TOOL_CALLS]") is MISTRAL and call_syntax("[TOOL_CALLS] x [ARGS]") is MISTRAL_NAMED


def test_half_of_a_surrogate_pair_does_not_reach_the_arguments():
    """No encoder of UTF-8 takes it: the answer of a server would fail."""
    call = of(f'<tool_call>{{"name": "weather", "arguments": {{"city": "a{HALF}b"}}}}</tool_call>', HERMES)
    assert call.tool_calls == (ToolCall("weather", '{"city": "a?b"}'),)
