"""Official client libraries against a real server: parsing, errors and tool loops."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

import birkhoff
from tests.server.conftest import serving, user

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "unit", "days"],
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


@pytest.fixture(scope="module")
def claude(served):
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as connected:
        yield connected


ASK = {"model": "nano", "messages": user("Hello, who are you?"), "temperature": 0, "max_tokens": 30}


def test_openai_chat_whole_and_streamed(client):
    whole = client.chat.completions.create(**ASK)
    assert (
        whole.choices[0].finish_reason == "stop"
        and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    )
    assert whole.timings["output_tokens"] == whole.usage.completion_tokens  # extension fields are preserved
    with client.chat.completions.stream(**ASK) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_openai_streams_in_the_plainest_loop(client):
    """The loop of OpenAI's own examples reads `chunk.choices[0]` of every chunk."""
    for extra in ({}, {"n": 2}, {"extra_body": {"signals": ["stream_norm"], "return_progress": True}}):
        pieces, last = ["", ""], None
        for chunk in client.chat.completions.create(**ASK, **extra, stream=True):
            pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            last = chunk
        whole = client.chat.completions.create(**ASK, **extra)
        assert pieces[: len(whole.choices)] == [choice.message.content for choice in whole.choices]
        assert last.choices[0].finish_reason == "stop" and last.usage is None
        assert last.timings["output_tokens"] == whole.timings["output_tokens"]

    text = ""
    ask = {"model": "nano", "prompt": "Once upon", "max_tokens": 6, "temperature": 0}
    for chunk in client.completions.create(**ask, stream=True):
        text += chunk.choices[0].text
    assert text == client.completions.create(**ask).choices[0].text
    assert chunk.choices[0].finish_reason == "length" and chunk.timings["output_tokens"] == 6

    *others, usage = client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert usage.choices == [] and usage.usage.completion_tokens == 6
    assert all(chunk.choices for chunk in others)


def test_openai_n_seed_stop_and_logprobs(client):
    request_body = {
        **ASK,
        "messages": user("Tell me a story."),
        "temperature": 1,
        "seed": 5,
        "n": 3,
        "max_tokens": 12,
    }
    request_body |= {"logprobs": True, "top_logprobs": 2}
    first, again = (
        client.chat.completions.create(**request_body),
        client.chat.completions.create(**request_body),
    )
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices] and len(set(texts)) > 1
    entry = first.choices[0].logprobs.content[0]
    assert len(entry.top_logprobs) == 2 and entry.logprob <= entry.top_logprobs[0].logprob <= 0
    assert "".join(each.token for each in first.choices[0].logprobs.content) == texts[0]
    stopped = client.chat.completions.create(**{**ASK, "stop": ["model"]})
    assert "model" not in stopped.choices[0].message.content and stopped.choices[0].stop_reason == "model"


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_tool_round_trip(client, streamed):
    request_body = {
        **ASK,
        "messages": user("What is the weather?"),
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    if streamed:
        with client.chat.completions.stream(**request_body) as stream:
            message = stream.get_final_completion().choices[0]
    else:
        message = client.chat.completions.create(**request_body).choices[0]
    assert message.finish_reason == "tool_calls" and not message.message.content
    (call,) = message.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and arguments["unit"] in "CF" and 1 <= arguments["days"] <= 9
    reply = {
        "id": call.id,
        "type": "function",
        "function": call.function.model_dump(include={"name", "arguments"}),
    }
    back = [
        *request_body["messages"],
        {"role": "assistant", "content": None, "tool_calls": [reply]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    closed = client.chat.completions.create(
        **{**request_body, "messages": back, "tool_choice": "auto", "max_tokens": 8}
    )
    assert closed.choices[0].finish_reason in ("stop", "length") and "DSML" not in (
        closed.choices[0].message.content or ""
    )


def test_openai_json(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    completion = client.chat.completions.create(**{**ASK, "response_format": form, "max_tokens": 60})
    Person.model_validate_json(completion.choices[0].message.content)
    parsed = client.chat.completions.parse(**{**ASK, "max_tokens": 60}, response_format=Person)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    thinking = client.chat.completions.create(
        **{**ASK, "temperature": 1, "seed": 3}, response_format=form, reasoning_effort="low", logit_bias={}
    )
    reply = thinking.choices[0].message
    assert thinking.choices[0].finish_reason == "length" or Person.model_validate_json(reply.content)


def test_openai_reasoning_is_separate(client):
    completion = client.chat.completions.create(**{**ASK, "reasoning_effort": "medium", "max_tokens": 20})
    message = completion.choices[0].message
    assert message.reasoning_content == message.reasoning and message.reasoning
    assert completion.usage.completion_tokens_details.reasoning_tokens > 0
    chunks = list(
        client.chat.completions.create(**{**ASK, "reasoning_effort": "medium", "max_tokens": 20}, stream=True)
    )
    streamed = "".join(
        chunk.choices[0].delta.reasoning_content or ""
        for chunk in chunks
        if hasattr(chunk.choices[0].delta, "reasoning_content")
    )
    assert streamed == message.reasoning


def test_openai_logprobs_of_reasoning_have_a_list_of_their_own(client):
    """A bias ends the reasoning after some tokens; then a schema leaves one answer."""
    with birkhoff.load("nano") as engine:
        end = engine.tokenizer.token_id("</think>")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "a fox in a box"}}}
    ask = {"model": "nano", "messages": ASK["messages"], "max_tokens": 80, "seed": 5, "response_format": form}
    ask |= {"logprobs": True, "top_logprobs": 1, "reasoning_effort": "low", "logit_bias": {str(end): 12}}
    whole = client.chat.completions.create(**ask)
    (choice,) = whole.choices
    message, logprobs = choice.message, choice.logprobs
    assert message.content == '"a fox in a box"' and message.reasoning
    assert "".join(entry.token for entry in logprobs.content) == message.content
    reasoning = [entry["token"] for entry in logprobs.reasoning_content]
    assert "".join(reasoning) == message.reasoning + "</think>"
    assert len(reasoning) == whole.usage.completion_tokens_details.reasoning_tokens > 1
    streamed: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    for chunk in client.chat.completions.create(**ask, stream=True):
        found = chunk.choices[0].logprobs
        for name, tokens in streamed.items() if found is not None else ():
            tokens += [dict(entry)["token"] for entry in getattr(found, name, ())]
    assert streamed["content"] == [entry.token for entry in logprobs.content]
    assert streamed["reasoning_content"] == reasoning
    plain = client.chat.completions.create(**ask | {"reasoning_effort": "none"}).choices[0]
    assert not hasattr(plain.logprobs, "reasoning_content")


def test_openai_text_offsets_are_positions_of_characters(client):
    """A character of several tokens has one position, in a whole answer and in a stream."""
    ask = {
        "model": "nano",
        "prompt": "Hi 😀é",
        "max_tokens": 12,
        "temperature": 1.5,
        "seed": 3,
        "logprobs": 0,
    }
    whole = client.completions.create(**ask, echo=True).choices[0]
    offsets, tokens = whole.logprobs.text_offset, whole.logprobs.tokens
    assert len(tokens) > len(whole.text.split()) and offsets == sorted(offsets)
    for offset, token in zip(offsets[1:], tokens[1:]):  # the first is the begin-of-text token
        assert "\ufffd" in token or whole.text[offset:].startswith(token)
    after = whole.text.index("é") + 1
    plain = client.completions.create(**ask).choices[0]
    assert [offset - after for offset in offsets[-12:]] == plain.logprobs.text_offset
    streamed = [
        offset
        for chunk in client.completions.create(**ask, stream=True)
        for offset in (chunk.choices[0].logprobs.text_offset if chunk.choices[0].logprobs else ())
    ]
    assert streamed == plain.logprobs.text_offset


def test_openai_responses_logprobs_are_those_of_the_text(client):
    ask = {"model": "nano", "input": "Hi", "temperature": 0, "max_output_tokens": 60, "top_logprobs": 1}
    include = ["message.output_text.logprobs"]
    whole = client.responses.create(**ask, include=include).output[0].content[0]
    assert "".join(entry.token for entry in whole.logprobs) == whole.text
    events = list(client.responses.create(**ask, include=include, stream=True))
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [entry.token for entry in done.logprobs] == [entry.token for entry in whole.logprobs]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [e.token for e in whole.logprobs]
    plain = client.responses.create(**ask | {"top_logprobs": None}, stream=True)
    assert not any(event.logprobs for event in plain if event.type == "response.output_text.delta")


def test_openai_completions_and_models(client):
    completion = client.completions.create(
        model="nano", prompt=["Once upon", "The fox"], max_tokens=5, temperature=0, logprobs=1, echo=True
    )
    assert [choice.index for choice in completion.choices] == [0, 1] and completion.choices[
        0
    ].text.startswith("Once upon")
    assert (
        completion.choices[0].logprobs.token_logprobs[0] is None
        and len(completion.choices[0].logprobs.tokens) > 5
    )
    for choice in completion.choices:  # offsets are into the text, which has no begin-of-text token
        offsets, tokens = choice.logprobs.text_offset, choice.logprobs.tokens
        assert offsets[:2] == [0, 0] and tokens[0] not in choice.text
        assert all(choice.text[at:].startswith(token) for at, token in zip(offsets[1:], tokens[1:]))
    pieces = client.completions.create(
        model="nano", prompt="Once upon", max_tokens=5, temperature=0, stream=True
    )
    assert "Once upon" + "".join(piece.choices[0].text for piece in pieces) == completion.choices[0].text
    assert [model.id for model in client.models.list()] == ["nano"] and client.models.retrieve(
        "nano"
    ).max_model_len > 0


def test_openai_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ASK, "top_p": 3})
    assert caught.value.param == "top_p" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**ASK, "model": "gpt-9"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(**{**ASK, "messages": user("word " * 9000)})
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as empty:
        client.embeddings.create(model="nano", input=[])
    assert empty.value.status_code == 400


def test_openai_responses(client):
    whole = client.responses.create(
        model="nano", input="Hello, who are you?", temperature=0, max_output_tokens=30
    )
    assert whole.status == "completed" and whole.output_text and whole.usage.output_tokens > 0
    with client.responses.stream(
        model="nano", input="Hello, who are you?", temperature=0, max_output_tokens=30
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (
        final.output_text == whole.output_text
        and kinds[0] == "response.created"
        and kinds[-1] == "response.completed"
    )
    forced = {"type": "function", "name": WEATHER["name"]}
    called = client.responses.create(
        model="nano",
        input="Weather?",
        tools=[{"type": "function", **WEATHER}],
        tool_choice=forced,
        temperature=0,
    )
    (call,) = called.output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city", "unit", "days"}
    after = client.responses.create(
        model="nano",
        temperature=0,
        max_output_tokens=8,
        instructions="Be brief.",
        input=[
            {"role": "user", "content": "Weather?"},
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ],
    )
    assert after.status in ("completed", "incomplete")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="nano", input="a", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_anthropic_whole_and_streamed(claude):
    request_body = {
        "model": "nano",
        "max_tokens": 30,
        "extra_body": {"temperature": 0},
        "messages": user("Hello, who are you?"),
    }
    whole = claude.messages.create(**request_body)
    assert (
        whole.content[0].type == "text" and whole.stop_reason == "end_turn" and whole.usage.output_tokens > 0
    )
    with claude.messages.stream(**request_body) as stream:
        text, final = "".join(stream.text_stream), stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text and final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = claude.messages.count_tokens(model="nano", messages=request_body["messages"])
    assert counted.input_tokens == whole.usage.input_tokens
    stopped = claude.messages.create(**request_body, stop_sequences=["model"])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "model"
    assert claude.messages.create(**{**request_body, "max_tokens": 2}).stop_reason == "max_tokens"


def test_anthropic_thinking_is_a_separate_block(claude):
    request_body = {
        "model": "nano",
        "max_tokens": 30,
        "extra_body": {"temperature": 0},
        "messages": user("Hello, who are you?"),
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    whole = claude.messages.create(**request_body)
    assert whole.content[0].type == "thinking" and whole.content[0].thinking
    with claude.messages.stream(**request_body) as stream:
        final = stream.get_final_message()
    assert final.content[0].thinking == whole.content[0].thinking


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_tool_round_trip(claude, streamed):
    tool = {"name": WEATHER["name"], "description": "w", "input_schema": WEATHER["parameters"]}
    request_body = {
        "model": "nano",
        "max_tokens": 200,
        "extra_body": {"temperature": 0},
        "messages": user("Weather?"),
        "tools": [tool],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }
    if streamed:
        with claude.messages.stream(**request_body) as stream:
            answer = stream.get_final_message()
    else:
        answer = claude.messages.create(**request_body)
    (block,) = answer.content
    assert (
        answer.stop_reason == "tool_use"
        and block.type == "tool_use"
        and set(block.input) == {"city", "unit", "days"}
    )
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
    back = [
        *request_body["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    closed = claude.messages.create(
        **{**request_body, "messages": back, "tool_choice": {"type": "auto"}, "max_tokens": 8}
    )
    assert closed.stop_reason in ("end_turn", "max_tokens")


def test_anthropic_errors(claude):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(
            model="nano",
            max_tokens=8,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
                    ],
                }
            ],
        )
    assert (
        caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "invalid_request_error"
    )
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude-9", max_tokens=8, messages=user("a"))


def test_langchain(served):
    model = ChatOpenAI(
        base_url=f"{served.url}/v1", api_key="none", model="nano", temperature=0, max_tokens=30, max_retries=0
    )
    question = [HumanMessage("Hello, who are you?")]
    whole = model.invoke(question)
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(question)) == whole.content
    bound = model.bind_tools(TOOLS, tool_choice="required").bind(max_tokens=200, parallel_tool_calls=False)
    (call,) = bound.invoke(question).tool_calls
    assert call["name"] == "get_weather" and call["args"]["unit"] in "CF"
    person = (
        model.bind(max_tokens=80)
        .bind()
        .bound.with_structured_output(Person, method="json_schema")
        .invoke(question)
    )
    assert isinstance(person, Person)


def test_clients_retry_when_the_queue_is_full(tmp_path):
    """With one slot and no queue the second client gets 429, retries and succeeds."""
    with serving(tmp_path, "--max-requests", "1", "--max-queue", "0") as small:
        url = f"{small.url}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="none", max_retries=0) as eager,
            openai.OpenAI(base_url=url, api_key="none", max_retries=8) as patient,
        ):
            long = {**ASK, "max_tokens": 150, "extra_body": {"ignore_eos": True}}
            with eager.chat.completions.create(**long, stream=True) as answer:
                next(iter(answer))
                with pytest.raises(openai.RateLimitError) as caught:
                    eager.chat.completions.create(**ASK)
                assert (
                    int(caught.value.response.headers["retry-after"]) >= 1
                    and caught.value.code == "queue-full"
                )
                assert patient.chat.completions.create(**ASK).choices[0].message.content


def test_the_last_message_of_the_assistant_is_continued(client, claude, served):
    """Anthropic's clients begin an answer in this way; OpenAI's say `continue_final_message`, as vLLM's do."""
    messages = [*user("Tell me a story."), {"role": "assistant", "content": "Once upon a time, there was a"}]
    with birkhoff.load("nano") as engine:
        begun = [*messages[:-1], {**messages[-1], "wo_eos": True}]
        expected = engine.chat(begun, temperature=0, max_tokens=12).text
        prompt = len(engine.encode_chat(begun))
    said = claude.messages.create(
        model="nano", max_tokens=12, messages=messages, extra_body={"temperature": 0}
    )
    assert said.content[0].text == expected and said.usage.input_tokens == prompt
    assert claude.messages.count_tokens(model="nano", messages=messages).input_tokens == prompt
    ask = {"model": "nano", "messages": messages, "max_tokens": 12, "temperature": 0}
    continued = client.chat.completions.create(**ask, extra_body={"continue_final_message": True})
    assert continued.choices[0].message.content == expected
    anew = client.chat.completions.create(**ask)
    assert "there is nothing to answer" in anew.warnings[0]
    with pytest.raises(openai.BadRequestError, match="no text of the assistant"):
        client.chat.completions.create(**ASK, extra_body={"continue_final_message": True})
    with pytest.raises(openai.BadRequestError, match="the answer with reasoning begins anew"):
        client.chat.completions.create(
            **ask, reasoning_effort="low", extra_body={"continue_final_message": True}
        )
    with pytest.raises(anthropic.BadRequestError, match="begins anew"):
        claude.messages.create(
            model="nano",
            max_tokens=2000,
            messages=messages,
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
    wrong = {**ask, "continue_final_message": True, "add_generation_prompt": True}
    assert served.post("/v1/chat/completions", wrong).json()["error"]["param"] == "add_generation_prompt"


def test_options_of_streams_need_a_stream(served):
    for path, prompt in (
        ("/v1/chat/completions", {"messages": user("Hi"), "max_tokens": 2}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
    ):
        usage = {**prompt, "stream_options": {"include_usage": True}}
        refused = served.post(path, usage)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream_options"
        assert served.events(path, usage)[-1]["usage"]["completion_tokens"] == 2
        progress = {**prompt, "return_progress": True}
        (warning,) = served.post(path, progress).json()["warnings"]
        assert warning == "return_progress has no effect without stream."
        assert not any("warnings" in chunk for chunk in served.events(path, progress))


def test_items_of_one_answer_are_one_message(client):
    """In the plain loop of the Responses API, reasoning, text and calls come back as items of their own."""
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    items = [
        {"role": "user", "content": "Look."},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "a fox"},
        {"type": "function_call_output", "call_id": "2", "output": "a box"},
        {"type": "reasoning", "id": "q", "summary": [{"type": "summary_text", "text": "Nothing."}]},
    ]
    function = {"name": "look", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function} for name in "12"]
    messages = [
        *user("Look."),
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "a fox"},
        {"role": "tool", "tool_call_id": "2", "content": "a box"},
    ]
    shown = [{"type": "function", "function": {key: tool[key] for key in ("name", "parameters")}}]
    with birkhoff.load("nano") as engine:
        for thinking, effort in ((True, "low"), (False, "none")):
            prompt = engine.encode_chat(messages, thinking=thinking, tools=shown)
            answer = client.responses.create(
                model="nano", input=items, tools=[tool], reasoning={"effort": effort}, max_output_tokens=2
            )
            assert answer.usage.input_tokens == len(prompt)
            chat = client.chat.completions.create(
                model="nano",
                messages=messages,
                tools=shown,
                reasoning_effort=effort,
                max_tokens=2,
                extra_body={"return_token_ids": True},
            )
            assert chat.prompt_token_ids == prompt
    with pytest.raises(openai.BadRequestError, match="expected parts with a text"):
        client.responses.create(model="nano", input=[{"type": "reasoning", "content": "Hm."}])
