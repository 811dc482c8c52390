"""The chat template in GGUF files against the chat encoder."""

from __future__ import annotations

import json

import jinja2
import pytest

from birkhoff.convert.chat_template import chat_template
from birkhoff.text.chat import render
from birkhoff.text.prompt_texts import own_prompt_texts

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
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(chat_template(own_prompt_texts())).render(messages=messages, **variables)


def by_encoder(messages, **options) -> str:
    ready = json.loads(json.dumps(messages))
    for message in ready:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    segments = render(ready, own_prompt_texts(), **options)
    return "".join(part.string for part in segments)


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
