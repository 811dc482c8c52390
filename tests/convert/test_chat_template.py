"""The chat template in GGUF files against the chat encoder."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import _compile_jinja_template

from birkhoff.convert.chat_template import chat_template
from birkhoff.errors import ChatError
from birkhoff.text.chat import render
from birkhoff.text.prompt_texts import own_prompt_texts
from tests.sizes import scaled
from tests.text.conversations import HONEST, HOSTILE, conversations, tools

USER = {"role": "user", "content": "Tell me 'a story' of \"quotes\" & <tags>."}
ANSWER = {"role": "assistant", "content": "Once.", "reasoning_content": "hm"}
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "look",
    "tool_calls": [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "find", "arguments": {"q": 'größe "x"', "n": 3, "deep": [1, None]}},
        },
        {"id": "2", "type": "function", "function": {"name": "find", "arguments": {"q": "b"}}},
    ],
}
RESULTS = [
    {"role": "tool", "content": "one", "tool_call_id": "1"},
    {"role": "tool", "content": "two", "tool_call_id": "2"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {}}}},
    }
]
SYSTEM = {"role": "system", "content": "Be kind."}
CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "two turns": [USER, ANSWER, {"role": "user", "content": "More"}],
    "answered": [USER, ANSWER],
    "merged": [USER, {"role": "user", "content": "and"}],
    "developer": [{"role": "developer", "content": "rules"}, USER, ANSWER, USER],
    "reminder": [SYSTEM, USER, {"role": "latest_reminder", "content": "today"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
}


def by_template(messages, **variables) -> str:
    """Rendered as Transformers does it for `apply_chat_template`."""
    compiled = _compile_jinja_template(chat_template(own_prompt_texts()))
    return compiled.render(messages=messages, **variables)


def by_encoder(messages, **options) -> str:
    return "".join(part.string for part in render(messages, own_prompt_texts(), **options))


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_render_alike(name, thinking):
    messages = CONVERSATIONS[name]
    assert by_template(messages, thinking=thinking) == by_encoder(messages, thinking=thinking)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("head", [[], [SYSTEM]])
def test_tools_and_calls_render_alike(head, thinking):
    messages = [*head, USER, CALL, *RESULTS, ANSWER, {"role": "user", "content": "More"}]
    assert by_template(messages, tools=TOOLS, enable_thinking=thinking) == by_encoder(
        messages, tools=TOOLS, thinking=thinking
    )
    assert by_template(messages[:-2], tools=TOOLS) == by_encoder(messages[:-2], tools=TOOLS)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"q": "größe \\"x\\"", "n": 3, "deep": [1, null, {"a": -0.5e3}]}',
        ' { "a" : "\\u00e9\\n\\/\\ud83d\\ude42" , "b":[ ] , "c":{ }, "a": true } ',
        '{"n": [-0, 1E2, 12345678901234567890, NaN, -Infinity, 1e400]}',
        "{}",
        "",
        "null",
        "[1]",
        '"text"',
        '{"a": 1',
        '{"a": 01}',
        '{"a": 1.}',
        '{"a": +1}',
        '{"a": 1} x',
        '{"a": 1,}',
        '{"a": [1,]}',
        '{"a" 1}',
        "{a: 1}",
        '{"a": "\\x"}',
        '{"a": "\\u12"}',
        '{"a": "\t"}',
        '{"a": tru}',
        '{"a": [1}',
        "{'a': 1}",
    ],
)
def test_arguments_as_json_text(arguments):
    """OpenAI's clients send arguments as text; what is no JSON object is one argument of that name."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert by_template(messages) == by_encoder(messages)


def test_task_tokens_and_developers_after_results():
    for task in ("action", "query", "authority", "domain", "title", "read_url"):
        asked = [{"role": "user", "content": "Where?", "task": task}]
        for messages in (asked, [*asked, {"role": "assistant", "content": "here"}], [SYSTEM, *asked, USER]):
            for thinking in (False, True):
                assert by_template(messages, thinking=thinking) == by_encoder(messages, thinking=thinking)
    developer = {"role": "developer", "content": "Answer in French."}
    backwards = [USER, CALL, *reversed(RESULTS), developer, ANSWER, USER]
    for messages in (backwards, backwards[:-1], backwards[:-2]):
        for thinking in (False, True):
            assert by_template(messages, thinking=thinking) == by_encoder(messages, thinking=thinking)


@given(
    messages=st.one_of(conversations(HONEST), conversations(HOSTILE)),
    thinking=st.booleans(),
    effort=st.sampled_from([None, None, "high", "max"]),
    listed=st.one_of(st.none(), st.none(), tools(HOSTILE)),
    form=st.one_of(st.none(), st.none(), st.just({"type": "json_object"})),
)
@settings(max_examples=scaled(3000), deadline=None, suppress_health_check=list(HealthCheck))
def test_random_conversations_render_alike(messages, thinking, effort, listed, form):
    try:
        expected = by_encoder(messages, thinking=thinking, effort=effort, tools=listed, response_format=form)
    except ChatError:
        return  # such as tools given twice
    variables = {"thinking": thinking, "tools": listed, "response_format": form, "reasoning_effort": effort}
    given_ones = {name: value for name, value in variables.items() if value is not None}
    assert by_template(messages, **given_ones) == expected


def test_effort_and_no_generation_prompt():
    assert by_template([USER], thinking=True, reasoning_effort="max") == by_encoder(
        [USER], thinking=True, effort="max"
    )
    assert by_template([USER], add_generation_prompt=False) == by_encoder([USER]).removesuffix(
        "<｜Assistant｜></think>"
    )


def test_a_checkpoints_own_texts_travel_in_the_file(tmp_path):
    from dataclasses import replace

    from birkhoff.api.load import load
    from birkhoff.convert.convert import convert
    from birkhoff.convert.synth import synth
    from birkhoff.text.prompt_texts import prompt_texts_from_json, prompt_texts_to_json

    texts = replace(
        own_prompt_texts(), tools_head="## Tools of our own ｜DSML｜\n", source="encoding_dsv4.py"
    )
    assert (
        replace(prompt_texts_from_json(prompt_texts_to_json(texts), "x.gguf"), source=texts.source) == texts
    )
    for odd in ("{", "[]", '{"tools_head": 5}', prompt_texts_to_json(texts).replace('"max"', '"most"')):
        assert prompt_texts_from_json(odd, "x.gguf") == own_prompt_texts()
    synth(tmp_path / "tiny", "tiny", mtp=False)
    (tmp_path / "tiny/encoding").mkdir()
    code = f"TOOLS = '''## Our tools {'｜DSML｜'}\n{{tools}}\nthat is all\n'''\n"
    (tmp_path / "tiny/encoding/encoding_dsv4.py").write_text(code)
    convert(tmp_path / "tiny", tmp_path / "m.gguf")
    with load(tmp_path / "m.gguf", kernels="reference", cache_bytes=2**22, max_context=256) as engine:
        ids = engine.encode_chat([USER], tools=TOOLS)
        assert "## Our tools" in engine.tokenizer.decode(ids) and "that is all" in engine.tokenizer.decode(
            ids
        )
