import pytest
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.text.events import ReasoningDelta, ToolCall
from birkhoff.text.markers import DSML, END_THINK, EOS
from birkhoff.text.output_stream import ChatStream, TextStream
from birkhoff.text.parse import CompletionParser
from birkhoff.text.segments import encode_segments, split_markers


def run(stream, ids):
    """Return the text shown and the number of tokens consumed."""
    shown = ""
    for count, token in enumerate(ids, start=1):
        text, stopped = stream.feed(token)
        shown += text
        if stopped:
            return shown, count
    return shown + stream.finish(), len(ids)


@given(text=st.text(max_size=30))
def test_plain_text_streams_whole(tokenizer, text):
    assert run(TextStream(tokenizer), tokenizer.encode(text))[0] == text


def test_plain_text_stops_in_the_middle_of_tokens(tokenizer):
    ids = tokenizer.encode("one two\n\nthree 天地 four")
    stream = TextStream(tokenizer, ["ee 天"])
    shown, count = run(stream, ids)
    assert shown == "one two\n\nthr" and stream.matched == "ee 天" and stream.finish() == ""
    assert count < len(ids)


def test_special_tokens_are_not_text_and_markers_are(byte_tokenizer):
    ids = [0, *byte_tokenizer.encode("a"), byte_tokenizer.token_id(END_THINK), 1]
    assert run(TextStream(byte_tokenizer), ids)[0] == "a</think>"


ANSWER = (
    f'why 天{END_THINK}So.\n\n<{DSML}tool_calls>\n<{DSML}invoke name="f">\n'
    f'<{DSML}parameter name="k" string="true">v</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>{EOS}'
)


def test_a_chat_answer_shows_its_content_and_keeps_the_rest_in_events(tokenizer):
    ids = encode_segments(split_markers(ANSWER), tokenizer)
    stream = ChatStream(tokenizer, parser=CompletionParser(thinking=True))
    assert run(stream, ids)[0] == "So."
    message = stream.message()
    assert message.content == "So." and message.problems == ()
    assert message.reasoning == "why 天" and message.tool_calls == (ToolCall("f", '{"k": "v"}'),)


@pytest.mark.parametrize(
    ("stop", "reasoning", "content"),
    [
        ("y", "wh", ""),
        ("o.", "why 天", "S"),
        (END_THINK, "why 天", ""),
        ("never", "why 天", "So."),
        ("天S", "why 天", "So."),
    ],
)
def test_a_chat_answer_stops_at_text_or_marker(tokenizer, stop, reasoning, content):
    ids = encode_segments(split_markers(ANSWER), tokenizer)
    stream = ChatStream(tokenizer, [stop], parser=CompletionParser(thinking=True))
    shown, _ = run(stream, ids)
    message = stream.message()
    assert (message.reasoning, message.content, shown) == (reasoning, content, content)
    assert stream.matched == (stop if stop in ("y", "o.", END_THINK) else None)
    assert stream.finish() == ""  # a second call returns nothing
    assert sum(isinstance(event, ReasoningDelta) for event in stream.events) > 0
