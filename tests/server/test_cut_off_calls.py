"""A tool call that `max_tokens` cuts off is the same in a stream and in a whole answer, in every API."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.server.conftest import user

PLACE = {
    "type": "object",
    "properties": {"days": {"const": 3}, "city": {"type": "string", "minLength": 400}},
    "required": ["days", "city"],
}
# Tokens after which the answer ends: within the name, before the first argument, within the second.
CUTS = [20, 30, 90]


@pytest.mark.parametrize("max_tokens", CUTS)
def test_chat(served, max_tokens):
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none")
    tool = {"type": "function", "function": {"name": "look", "parameters": PLACE}}
    ask = {
        "model": "nano",
        "messages": user("Look."),
        "tools": [tool],
        "tool_choice": "required",
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask).choices[0]
    names, arguments, reasons = [], "", []
    for chunk in client.chat.completions.create(**ask, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    calls = whole.message.tool_calls or []
    assert [call.function.name for call in calls] == names
    assert "".join(call.function.arguments for call in calls) == arguments
    assert whole.finish_reason == reasons[-1] == "length"
    if max_tokens == CUTS[-1]:
        assert arguments.startswith('{"days": 3, "city": "')


@pytest.mark.parametrize("max_tokens", CUTS)
def test_messages(served, max_tokens):
    client = anthropic.Anthropic(base_url=served.url, api_key="none")
    ask = {
        "model": "nano",
        "messages": user("Look."),
        "tools": [{"name": "look", "input_schema": PLACE}],
        "tool_choice": {"type": "any"},
        "max_tokens": max_tokens,
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()

    def blocks(message: anthropic.types.Message) -> list[tuple[str, object]]:
        return [(block.name, block.input) for block in message.content]

    assert blocks(whole) == blocks(final)
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    if max_tokens == CUTS[-1]:
        assert blocks(whole) == [("look", {"days": 3})]


@pytest.mark.parametrize("max_tokens", CUTS)
def test_responses(served, max_tokens):
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none")
    ask = {
        "model": "nano",
        "input": "Look.",
        "tools": [{"type": "function", "name": "look", "parameters": PLACE}],
        "tool_choice": "required",
        "max_output_tokens": max_tokens,
        "temperature": 0,
    }
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    final = events[-1].response

    def items(output: list) -> list[tuple[str, str, str, str]]:
        return [(item.type, item.status, item.name, item.arguments) for item in output]

    assert items(whole.output) == items(done) == items(final.output)
    assert whole.status == final.status == "incomplete"
    assert all(item.status == "incomplete" for item in whole.output)
    if max_tokens == CUTS[-1]:
        assert whole.output[0].arguments.startswith('{"days": 3, "city": "')


@pytest.mark.parametrize("max_tokens", range(1, 16, 2))
def test_an_opening_tag_that_is_cut_off_is_no_content(served, max_tokens):
    """A forced call that ends within its opening tag, which the model writes in several tokens."""
    tool = {"type": "function", "function": {"name": "look", "parameters": PLACE}}
    chat = {"messages": user("Look."), "temperature": 0, "max_tokens": max_tokens}
    chat |= {"tools": [tool], "tool_choice": "required"}
    whole = served.post("/v1/chat/completions", chat).json()
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == "" and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length" and any(
        "the answer ends inside" in w for w in whole["warnings"]
    )
    chunks = served.events("/v1/chat/completions", chat)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == ""
    assert chunks[-1]["warnings"] == whole["warnings"]
    message = {"messages": user("Look."), "temperature": 0, "max_tokens": max_tokens}
    message |= {"tools": [{"name": "look", "input_schema": PLACE}], "tool_choice": {"type": "any"}}
    answer = served.post("/v1/messages", message).json()
    assert answer["content"] == [] and answer["stop_reason"] == "max_tokens"
    item = {"type": "function", "name": "look", "parameters": PLACE}
    ask = {"input": "Look.", "temperature": 0, "max_output_tokens": max_tokens}
    response = served.post("/v1/responses", ask | {"tools": [item], "tool_choice": "required"}).json()
    assert response["output"] == [] and response["status"] == "incomplete"
