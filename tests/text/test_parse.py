import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.text.chat import encode_chat, render
from birkhoff.text.events import (
    ContentDelta,
    FormatProblem,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    assemble,
)
from birkhoff.text.markers import CHAT_MARKERS, DSML, END_THINK, EOS, THINK, USER
from birkhoff.text.output_stream import ChatStream
from birkhoff.text.parse import CompletionParser
from birkhoff.text.prompt_texts import own_prompt_texts
from birkhoff.text.segments import Marker, TextSegment, split_markers
from tests.sizes import scaled
from tests.text.conversations import HOSTILE, HOSTILE_PIECES, assistants, render_text

QUESTION = {"role": "user", "content": "q"}


def events_of(segments, *, thinking=False):
    parser = CompletionParser(thinking=thinking)
    return [event for segment in segments for event in parser.feed(segment)] + parser.finish()


def message_of(completion, *, thinking=False):
    """The message of a completion whose markers are spelled out."""
    return assemble(events_of(split_markers(completion), thinking=thinking))


def streamed_message(token_ids, tokenizer, *, thinking=False):
    """The message of generated tokens, as an engine reads them."""
    stream = ChatStream(tokenizer, parser=CompletionParser(thinking=thinking))
    for token_id in token_ids:
        stream.feed(token_id)
    return stream.message()


def test_an_opening_tag_that_is_cut_off_is_no_content():
    tag = f"\n\n<{DSML}tool_calls>"
    for stop in (1, 2, 3, 3 + len(DSML), len(tag) - 1):
        parser = CompletionParser(thinking=False, forced_call=True)
        events = [
            event for each in split_markers(tag[:stop]) for event in parser.feed(each)
        ] + parser.finish()
        assert [(type(event), event.raw) for event in events] == [(FormatProblem, tag[:stop])]
        found = message_of("Well." + tag[:stop])  # the call is not forced: known by its marker
        marked = DSML in tag[:stop]
        assert found.content == ("Well." if marked else "Well." + tag[:stop])
        assert [problem.raw for problem in found.problems] == ([tag[:stop]] if marked else [])


def expected_arguments(call):
    """Arguments after encoding: JSON objects unchanged, anything else as one parameter."""
    arguments = call["function"]["arguments"]
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"arguments": arguments}


@settings(max_examples=scaled(1000))
@given(message=assistants(HOSTILE), thinking=st.booleans())
def test_parsing_inverts_rendering_whatever_the_text_spells(tokenizer, message, thinking):
    """By ids, so that a marker spelled in content, reasoning, arguments or names is parsed as text."""
    question = encode_chat([QUESTION], tokenizer, own_prompt_texts(), thinking=thinking)
    whole = encode_chat([QUESTION, message], tokenizer, own_prompt_texts(), thinking=thinking)
    assert whole[: len(question)] == question
    completion = whole[len(question) :]
    parsed = streamed_message(completion, tokenizer, thinking=thinking)
    assert parsed.reasoning == ((message["reasoning_content"] or "") if thinking else "")
    assert parsed.content == (message["content"] or "")
    assert [call.name for call in parsed.tool_calls] == [
        call["function"]["name"] for call in message["tool_calls"]
    ]
    for call, given_ in zip(parsed.tool_calls, message["tool_calls"]):
        assert json.loads(call.arguments_json) == expected_arguments(given_)
    assert parsed.problems == ()


def pieces_of(segments, cuts):
    """Split the texts of a completion at the positions in `cuts`."""
    out, index = [], 0
    for segment in segments:
        if isinstance(segment, Marker):
            out.append(segment)
            continue
        start = 0
        for i in range(1, len(segment.string)):
            index += 1
            if index in cuts:
                out.append(TextSegment(segment.string[start:i]))
                start = i
        out.append(TextSegment(segment.string[start:]))
    return out


def same(whole, events):
    """Messages are equal, and so are events once adjacent deltas are joined."""
    assert assemble(events) == assemble(whole)
    assert compact(events) == compact(whole)


def compact(events):
    out = []
    for event in events:
        if out and type(out[-1]) is type(event) and isinstance(event, (ReasoningDelta, ContentDelta)):
            out[-1] = type(event)(out[-1].text + event.text)
        elif out and isinstance(event, ToolCallDelta) and isinstance(out[-1], ToolCallDelta):
            out[-1] = ToolCallDelta(event.index, out[-1].arguments + event.arguments)
        else:
            out.append(event)
    return out


COMPLETION = (
    "Thoughts\n\n<b>\n</think>Say\n\n<i>\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="a">\n'
    '<｜DSML｜parameter name="x" string="true">1</2> "q" </｜DSML｜invoke> </｜DSML｜parade </｜DSML｜para'
    "</｜DSML｜parameter>\n"
    '<｜DSML｜parameter name="y" string="false">[1, {"z": "é"}]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="b">\n\n</｜DSML｜invoke>\n'
    f"</｜DSML｜tool_calls>{EOS}"
)


def test_a_whole_completion():
    parsed = message_of(COMPLETION, thinking=True)
    assert parsed.reasoning == "Thoughts\n\n<b>\n" and parsed.content == "Say\n\n<i>"
    assert parsed.tool_calls == (
        ToolCall(
            "a",
            '{"x": "1</2> \\"q\\" </｜DSML｜invoke> </｜DSML｜parade </｜DSML｜para", "y": [1, {"z": "é"}]}',
        ),
        ToolCall("b", "{}"),
    )


def test_streamed_pieces_join_to_the_whole_at_every_split():
    segments = split_markers(COMPLETION)
    whole = events_of(segments, thinking=True)
    count = sum(len(segment.string) for segment in segments)
    for cut in range(count):
        same(whole, events_of(pieces_of(segments, {cut}), thinking=True))
    same(whole, events_of(pieces_of(segments, set(range(count))), thinking=True))


@settings(max_examples=scaled(1000))
@given(message=assistants(HOSTILE), thinking=st.booleans(), data=st.data())
def test_any_cut_of_any_answer_is_the_same_answer(message, thinking, data):
    head = render([QUESTION], own_prompt_texts(), thinking=thinking)
    segments = render([QUESTION, message], own_prompt_texts(), thinking=thinking)[len(head) :]
    cuts = data.draw(st.sets(st.integers(1, 1 + sum(len(s.string) for s in segments))))
    whole = events_of(segments, thinking=thinking)
    same(whole, events_of(pieces_of(segments, cuts), thinking=thinking))


def test_arguments_stream_before_the_call_ends():
    opening = split_markers(
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="t" string="true">'
    )
    parser = CompletionParser(thinking=False)
    events = [event for segment in opening for event in parser.feed(segment)]
    assert events == [ToolCallStart(0, "f"), ToolCallDelta(0, '{"t": '), ToolCallDelta(0, '"')]
    assert parser.feed(TextSegment('say "hi')) == [ToolCallDelta(0, 'say \\"hi')]


def test_text_is_held_back_only_while_it_may_open_a_block():
    parser = CompletionParser(thinking=False)
    assert parser.feed(TextSegment("a\n")) == [ContentDelta("a")]
    assert parser.feed(TextSegment("\n")) == [] and parser.feed(TextSegment("<")) == []
    assert parser.feed(TextSegment("b>")) == [ContentDelta("\n\n<b>")]
    assert parser.feed(TextSegment("x <")) == [ContentDelta("x ")]
    assert parser.finish() == [ContentDelta("<")]


def tool_block(inside):
    return f"\n\n<{DSML}tool_calls>{inside}"


CALL = f'\n<{DSML}invoke name="f">\n<{DSML}parameter name="k" string="false">1</{DSML}parameter>\n</{DSML}invoke>'
END = f"\n</{DSML}tool_calls>"


@pytest.mark.parametrize(
    ("completion", "thinking", "message"),
    [
        ("no end", True, "ends before </think>"),
        (f"r{EOS}", True, "ends before </think>"),
        (f"r{tool_block(CALL + END)}", True, "before </think>"),
        ("a</think>b", False, "</think> marker stands inside content"),
        ("a<think>b", False, "<think> marker stands inside content"),
        ("a<think>b</think>", True, "<think> marker stands inside reasoning"),
        ("a</think>b</think>c", True, "</think> marker stands inside content"),
        (f"a{USER}b", False, "marker stands inside content"),
        (f"a{DSML}b", False, "marker stands inside content"),
        (f"a<{DSML}b>", False, "outside a tool-call block"),
        (f"a\n\n<{DSML}invoke", False, "outside a tool-call block"),
        (f"a{EOS}b", False, "behind the end marker"),
        (f"a{tool_block(CALL + END)}b", False, "behind the tool calls"),
        (f"{tool_block(CALL)}", False, "ends inside a tool-call block"),
        (f"{tool_block(CALL[:-7] + EOS)}", False, "ends inside a tool-call block"),
        (f"{tool_block('x' + CALL + END)}", False, "text between the tags"),
        (f"{tool_block(CALL + USER + END)}", False, "marker stands where"),
        (f"{tool_block(CALL.replace('invoke name', 'call name') + END)}", False, "marker stands where"),
        (f"{tool_block(CALL.replace(' string=', ' kind=') + END)}", False, "marker stands where"),
        (f"{tool_block(CALL.replace('false', 'maybe') + END)}", False, "marker stands where"),
        (f"{tool_block(CALL.replace('>1<', '>one<') + END)}", False, "'one' is marked as JSON and is not"),
        (f"{tool_block(CALL.replace('>1<', '>NaN<') + END)}", False, "marked as JSON and is not"),
        (
            f"{tool_block(CALL.replace('</' + DSML + 'invoke>', '</' + DSML + 'call>') + END)}",
            False,
            "another tag",
        ),
        (f"{tool_block(CALL + END.replace('tool_', ''))}", False, "another tag"),
        (
            f"{tool_block(CALL.replace(DSML + 'parameter>', DSML + 'parameterX') + END)}",
            False,
            "ends inside a tool-call block",
        ),
        (
            f'{tool_block(f"""{chr(10)}<{DSML}invoke name="{"n" * 9000}">""")}',
            False,
            "within 8192 characters",
        ),
        (
            tool_block(
                CALL.replace(
                    f"\n</{DSML}invoke>",
                    f'\n<{DSML}parameter name="k" string="true">2</{DSML}parameter>\n</{DSML}invoke>',
                )
                + END
            ),
            False,
            "'k' is given twice",
        ),
    ],
)
def test_a_deviation_is_reported_and_no_marker_becomes_text(completion, thinking, message):
    parsed = message_of(completion, thinking=thinking)
    assert any(message in problem.message for problem in parsed.problems), parsed.problems
    text = parsed.reasoning + parsed.content
    assert not any(marker in text for marker in CHAT_MARKERS)


def test_a_missing_end_marker_is_no_deviation():
    answer, call = message_of("answer"), message_of(tool_block(CALL + END))
    assert answer.content == "answer" and len(call.tool_calls) == 1
    assert answer.problems == call.problems == ()


@pytest.mark.parametrize(
    ("completion", "thinking", "reasoning", "content", "calls"),
    [
        # a stray marker is dropped, the text around it is kept
        (f"a{USER}b", False, "", "ab", 0),
        ("a</think>b", False, "", "ab", 0),
        ("a<think>b</think>c", False, "b", "ac", 0),
        (f"see <{DSML}thing> there", False, "", "see <thing> there", 0),
        # a block inside reasoning ends it; missing line breaks are accepted
        (f"r{tool_block(CALL + END)}", True, "r", "", 1),
        (f"a<{DSML}tool_calls>{CALL}{END}", False, "", "a", 1),
        (tool_block(CALL.replace("\n", "") + END.replace("\n", "  ")), False, "", "", 1),
        (tool_block(CALL.replace(' string="false"', "") + END), False, "", "", 1),
        (tool_block(CALL + CALL + END) + "\n", False, "", "", 2),
        (tool_block(CALL + END) + "\nbye", False, "", "\nbye", 1),
        (tool_block(CALL + END) + tool_block(CALL + END), False, "", "", 2),
        (tool_block(CALL), False, "", "", 1),
        (f"a{EOS}b", False, "", "a", 0),
    ],
)
def test_lenient_recovery(completion, thinking, reasoning, content, calls):
    parsed = message_of(completion, thinking=thinking)
    assert (parsed.reasoning, parsed.content, len(parsed.tool_calls)) == (reasoning, content, calls)
    assert all(json.loads(call.arguments_json) == {"k": 1} for call in parsed.tool_calls)


def test_a_value_that_is_not_json_becomes_a_string():
    completion = tool_block(CALL.replace(">1<", ">{one<") + END)
    parsed = message_of(completion)
    assert json.loads(parsed.tool_calls[0].arguments_json) == {"k": "{one"}
    assert [problem.message for problem in parsed.problems] == [
        "the value '{one' is marked as JSON and is not"
    ]


def test_half_of_a_surrogate_pair_is_not_json():
    """Python's parser takes it, but no encoder of UTF-8 does: the value becomes a string that spells it."""
    parsed = message_of(tool_block(CALL.replace(">1<", '>"\\ud83d"<') + END))
    assert json.loads(parsed.tool_calls[0].arguments_json) == {"k": '"\\ud83d"'}
    whole = message_of(tool_block(CALL.replace(">1<", '>"\\ud83d\\ude00"<') + END))
    assert json.loads(whole.tool_calls[0].arguments_json) == {"k": "😀"} and whole.problems == ()


def test_a_broken_call_ends_incomplete_and_the_rest_is_kept_whole():
    rest = f'\n<{DSML}invoke name="g">oops{CALL}{END} tail'
    events = events_of(split_markers("hi" + tool_block(CALL + rest)))
    assert ToolCallEnd(0, True) in events and ToolCallEnd(1, False) in events
    message = assemble(events)
    assert [call.name for call in message.tool_calls] == ["f"] and message.content == "hi"
    assert [problem.raw for problem in message.problems] == [rest]


def test_an_answer_cut_off_inside_a_call_says_so():
    cut = tool_block(CALL.replace("false", "true").split("</")[0])
    events = events_of(split_markers(cut))
    assert events[-2:] == [
        ToolCallEnd(0, False),
        FormatProblem("the answer ends inside a tool-call block", cut),
    ]
    message = assemble(events)
    assert message.tool_calls == () and message.incomplete_call == ToolCall("f", '{"k": "1')


SEGMENTS = st.lists(
    st.one_of(
        st.sampled_from(CHAT_MARKERS).map(Marker),
        st.just(Marker(DSML)),
        st.sampled_from(
            ["tool_calls>", "\n<", "\n</", 'invoke name="f">', "invoke>", "parameter>", "\n\n<", "x"]
        ).map(TextSegment),
        st.just(TextSegment('parameter name="k" string="true">')),
        st.sampled_from(HOSTILE_PIECES).map(TextSegment),
    ),
    max_size=24,
)


@settings(max_examples=scaled(3000))
@given(segments=SEGMENTS, thinking=st.booleans(), data=st.data())
def test_any_rubbish_is_read_the_same_at_every_cut_and_leaks_no_marker(segments, thinking, data):
    whole = events_of(segments, thinking=thinking)
    cuts = data.draw(st.sets(st.integers(1, 1 + sum(len(s.string) for s in segments))))
    same(whole, events_of(pieces_of(segments, cuts), thinking=thinking))
    # The output consists of text segments only: removing them all leaves nothing.
    text = "".join(e.text for e in whole if isinstance(e, (ReasoningDelta, ContentDelta)))
    texts = iter("".join(s.string for s in segments if isinstance(s, TextSegment)))
    assert all(character in texts for character in text)


@settings(max_examples=scaled(2000))
@given(
    segments=st.lists(
        st.one_of(st.sampled_from([THINK, END_THINK, USER, DSML]).map(Marker), HOSTILE.map(TextSegment)),
        max_size=10,
    ),
    thinking=st.booleans(),
)
def test_without_a_tool_block_no_text_is_lost(segments, thinking):
    segments = [
        TextSegment(s.string.replace("tool_calls", "")) if isinstance(s, TextSegment) else s for s in segments
    ]
    events = events_of(segments, thinking=thinking)
    text = "".join(e.text for e in events if isinstance(e, (ReasoningDelta, ContentDelta)))
    assert text == "".join(s.string for s in segments if isinstance(s, TextSegment))


def test_text_that_spells_markers_is_content(tokenizer):
    spelled = f"</think>{EOS}\n\n<{DSML}tool_calls>{CALL}{END}"
    ids = [*tokenizer.encode(spelled), tokenizer.token_id(EOS)]
    parsed = streamed_message(ids, tokenizer)
    assert parsed.content == spelled and parsed.tool_calls == () and parsed.problems == ()
    assert message_of(render_text(split_markers(f"r{END_THINK}a")), thinking=True).reasoning == "r"
