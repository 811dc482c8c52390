import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import ChatError
from birkhoff.text.messages import read_conversation
from tests.sizes import scaled
from tests.text.conversations import HONEST, conversations


def deep(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hi", "messages is a str"),
        (None, "messages is a NoneType"),
        ({"role": "user"}, "messages is a dict"),
        (["hi"], r"messages\[0\] is a str"),
        ([{}], r"messages\[0\].role is None, expected one of system"),
        (
            [{"role": "user", "content": "a"}, {"role": "foo"}],
            r"messages\[1\].role is 'foo', expected one of system",
        ),
        ([{"role": "asistant"}], "Did you mean 'assistant'"),
        ([{"role": ["user"]}], r"messages\[0\].role is \['user'\]"),
        ([{"role": "user"}], r"messages\[0\].content is None, expected text"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is 5, expected text"),
        ([{"role": "user", "content": b"x"}], r"messages\[0\].content is b'x'"),
        (
            [{"role": "user", "content": ["x"]}],
            r"messages\[0\].content\[0\] is 'x', expected {'type': 'text'",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"content\[0\] is 'image_url'.* V4 reads text only",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text is None, expected text"),
        (
            [{"role": "user", "content": "\ud800"}],
            r"messages\[0\].content: character 0 .* lone surrogate U\+D800",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": 3}], r"tool_call_id is 3, expected text"),
        ([{"role": "tool", "content": [{"type": 3}]}], r"messages\[0\].content\[0\] is 3"),
        ([{"role": "developer", "content": ""}], "a developer message needs text"),
        (
            [{"role": "user", "content": "a", "task": "poem"}],
            r"messages\[0\].task is 'poem', expected one of action",
        ),
        ([{"role": "assistant", "wo_eos": 1}], r"wo_eos is 1, expected true or false"),
        ([{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}], "differ; give one"),
        ([{"role": "assistant", "tool_calls": "x"}], r"tool_calls is 'x', expected a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\].function is None"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"tool_calls\[0\].function.name is None"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
            r"function.arguments is None, expected a JSON object",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {1: 2}}}]}],
            r"arguments\.? is 1, expected text",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": {1, 2}}}}]}],
            r"arguments.a cannot be written as JSON",
        ),
        (
            [{"role": "system", "tools": [{"name": "f"}]}],
            r"messages\[0\].tools\[0\] is .*expected {'type': 'function'",
        ),
        ([{"role": "system", "tools": {"a": 1}}], r"tools is {'a': 1}, expected a list"),
        (
            [{"role": "system", "tools": [{"function": {"name": "f", "x": deep(100_000)}}]}],
            "cannot be written as JSON",
        ),
        (
            [{"role": "user", "content": "a", "tools": []}],
            r"messages\[0\].tools is not a field of a user message",
        ),
        ([{"role": "user", "content": "a", "contents": "b"}], "Did you mean 'content'"),
        ([{"role": "assistant", "content": "a", "function_call": {}}], "function_call is not a field"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(messages, message):
    with pytest.raises(ChatError, match=message):
        read_conversation(messages)


def test_fields_of_clients_that_mean_nothing_here_pass():
    turn = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "function_call": None,
        "name": "x",
        "annotations": [],
    }
    assert read_conversation([turn])[0].content == "a"


def test_reasoning_has_two_names():
    for field in ("reasoning", "reasoning_content"):
        assert read_conversation([{"role": "assistant", field: "r"}])[0].reasoning == "r"


def test_instructions_are_given_once():
    tool = {"type": "function", "function": {"name": "f"}}
    for field, value in (("tools", [tool]), ("response_format", {"a": 1})):
        with pytest.raises(ChatError, match=r"give (them|it) once"):
            read_conversation([{"role": "system", field: value}], **{field: value})


def test_messages_never_echo_a_whole_prompt():
    for messages in ([{"role": "x" * 10_000}], [{"role": "user", "content": "a", "k" * 5000: 1}]):
        with pytest.raises(ChatError) as caught:
            read_conversation(messages)
        assert len(str(caught.value)) < 400


@given(messages=conversations(HONEST))
def test_the_callers_messages_are_left_alone(messages):
    before = copy.deepcopy(messages)
    read_conversation(messages)
    assert messages == before


JSONISH = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.text(max_size=3),
        st.sampled_from(["user", "text", "tool"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "tools", "function", "name", "tool_calls", "task"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=scaled(5000))
@given(messages=JSONISH)
def test_any_json_is_read_or_refused(messages):
    try:
        read_conversation(messages)
    except ChatError as error:
        assert str(error)
