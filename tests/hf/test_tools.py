"""Tools and reasoning of ordinary models: their own chat templates, calls forced and parsed."""

from __future__ import annotations

import json

import openai
import pytest
import transformers

import birkhoff
from birkhoff.errors import OptionError, PromptError
from birkhoff.hf.inspect_model import inspect_model
from birkhoff.server.json_grammar import GrammarCompiler
from birkhoff.server.tools import resolve_tool_choice
from tests.hf.models import make
from tests.hf.test_loading import SMALL, TEMPLATE, byte_level, own
from tests.server.conftest import serving

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Rome", "Bern"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
# As the families write it: who speaks, calls and results in tags, and reasoning that is closed when it is not wanted.
TALK = (
    "{% if tools %}<|user|>{% for t in tools %}{{ t | tojson }}{% endfor %}SIGN{% endif %}"
    "{% for m in messages %}<|user|>{{ m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}"
    "{% if m.role == 'tool' %}#{{ m.tool_call_id }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|bot|>"
)
CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
PICKY = "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
STYLES = {
    "hermes": ("<tool_call></tool_call>", "<tool_call>" + CALL + "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", PICKY + "[TOOL_CALLS][" + CALL + "]"),
    "named": (
        "[TOOL_CALLS][ARGS]",
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
    ),
    "phi": ("<|tool_call|>", "<|tool_call|>[" + CALL + "]<|/tool_call|>"),
    "llama": (
        "",
        CALL.replace("arguments", "parameters").replace("function.parameters", "function.arguments"),
    ),
}
QWEN3 = "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
R1 = "<think>\n{% endif %}"
TEXT_TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # tokens of their own, but not special
SPECIAL_TAGS = ["[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>"]
ASKED = [{"role": "user", "content": "Is it warm?"}]


def template(style, end="{% endif %}"):
    sign, call = STYLES[style]
    return (TALK + end).replace("CALL", call).replace("SIGN", sign) if style else TEMPLATE


def write(folder, chat_template):
    tokenizer = byte_level()
    tokenizer.add_tokens(TEXT_TAGS)
    tokenizer.add_special_tokens(SPECIAL_TAGS)
    tokenizer = own(tokenizer, chat_template)
    make("llama", folder, vocab_size=len(tokenizer), max_position_embeddings=2048)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    tokenizer = write(folder / "model", template("hermes", QWEN3))
    with serving(folder / "server", model=str(folder / "model")) as served:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none")
        yield served, client, tokenizer


def loop(client, stream):
    """The loop of every tutorial: ask, run the calls, send the results back, read the answer."""
    messages = list(ASKED)
    options = {"model": "", "tools": [WEATHER, CLOCK], "max_tokens": 300, "temperature": 0}
    for choice in ({"type": "function", "function": {"name": "get_weather"}}, "none"):
        extra = {"enable_thinking": False}
        answer = client.chat.completions.create(
            messages=messages,
            tool_choice=choice,
            stream=stream,
            extra_body={"chat_template_kwargs": extra, "ignore_eos": False},
            **options,
        )
        if stream:
            message = {"role": "assistant", "content": ""}
            for chunk in answer:
                delta = chunk.choices[0].delta
                message["content"] += delta.content or ""
                for call in delta.tool_calls or ():
                    calls = message.setdefault("tool_calls", [])
                    if call.id:
                        function = {"name": call.function.name, "arguments": ""}
                        calls.append({"id": call.id, "type": "function", "function": function})
                    calls[call.index]["function"]["arguments"] += call.function.arguments or ""
                finish = chunk.choices[0].finish_reason or None
        else:
            message = answer.choices[0].message.model_dump(exclude_none=True)
            finish = answer.choices[0].finish_reason
        messages.append(message)
        if choice != "none":
            assert finish == "tool_calls" and not message.get("content")
        for call in message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "sunny"})
    return messages


@pytest.mark.parametrize("stream", [False, True])
def test_the_loop_of_tool_calls(served, stream):
    _, client, _ = served
    _, called, result, answered = loop(client, stream)
    (call,) = called["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "get_weather" and arguments["city"] in ("Rome", "Bern")
    assert arguments["days"] in (1, 2) and result["tool_call_id"] == call["id"]
    assert answered["content"] and "tool_calls" not in answered


def test_reasoning_comes_before_an_answer_of_a_given_form(served):
    """The template does not open the reasoning: the model does, and a bias says when it ends."""
    served, client, tokenizer = served
    assert served.get("/props").json()["chat"] == {
        "chat": True,
        "tools": True,
        "reasoning": True,
        "system": True,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["fox", "dog"]}}}
    end = tokenizer.convert_tokens_to_ids("</think>")
    options = {"model": "", "messages": ASKED, "max_tokens": 400, "seed": 3, "response_format": form}
    closed = client.chat.completions.create(logit_bias={str(end): 100}, **options)
    assert json.loads(closed.choices[0].message.content) in ("fox", "dog")
    assert closed.usage.completion_tokens_details.reasoning_tokens == 2
    options["max_tokens"] = 20
    open_end = client.chat.completions.create(logit_bias={str(end): -100}, **options)
    message = open_end.choices[0].message
    assert message.reasoning_content and not message.content and open_end.choices[0].finish_reason == "length"
    assert open_end.usage.completion_tokens_details.reasoning_tokens == 20
    off = client.chat.completions.create(reasoning_effort="none", **options)
    assert json.loads(off.choices[0].message.content) in ("fox", "dog")
    assert not getattr(off.choices[0].message, "reasoning_content", None)
    assert off.usage.completion_tokens_details.reasoning_tokens == 0
    with pytest.raises(openai.BadRequestError, match="no reasoning effort"):
        client.chat.completions.create(reasoning_effort="high", **options)


def chat_name(style):
    return "mistral" if style == "named" else style


@pytest.fixture
def engines():
    """Filled by the test: the engine whose tokenizer grammars are compiled for."""
    return []


@pytest.fixture
def grammars(engines):
    grammars = GrammarCompiler(lambda: engines[0])
    yield grammars
    grammars._checker._stop()  # the child that compiles


@pytest.mark.parametrize("style", STYLES)
def test_forced_calls_of_every_format_are_parsed(style, tmp_path, engines, grammars):
    """A random model writes a call in the format of its template because the grammar allows nothing else."""
    tokenizer = write(tmp_path, template(style, R1 if style == "phi" else "{% endif %}"))
    with birkhoff.load(tmp_path, **SMALL) as engine:
        tools = [WEATHER, CLOCK]
        assert engine.chat_abilities == {"chat": True, "tools": True, "reasoning": style == "phi"}
        report = inspect_model(tmp_path)
        assert report["tools"] == chat_name(style) and report["reasoning"] == (style == "phi")
        prompt = engine.encode_chat(ASKED, tools=tools)
        assert '"get_weather"' in engine.tokenizer.decode(prompt)
        engines.append(engine)
        named = {"type": "function", "function": {"name": "get_weather"}}
        chat = engine.chat_format
        for choice in ("required", named):
            _, mask = resolve_tool_choice(grammars, tools, choice, None, choice == "required", chat.calls)
            options = {"max_tokens": 300, "seed": 1, "tools": tools, "mask": mask}
            (request,) = engine.requests(prompt, thinking=None, **options)
            engine._run([request])
            stream = chat.stream(tools=tools, thinking=False)
            if style == "phi":  # the prompt opened the reasoning
                for token in engine.tokenizer.encode("hm") + tokenizer.encode(
                    "</think>", add_special_tokens=False
                ):
                    stream.feed(token)
            for token in request.output_ids:
                stream.feed(token)
            message = stream.message()
            (call,) = message.tool_calls
            assert call.name in ("get_weather", "clock") and not message.problems and not message.content
            assert message.reasoning == ("hm" if style == "phi" else "")
            if choice is named:
                assert json.loads(call.arguments_json)["city"] in ("Rome", "Bern")
        called = {
            "id": "call_123",
            "type": "function",
            "function": {"name": "clock", "arguments": '{"a": 1}'},
        }
        history = [
            *ASKED,
            {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "call_123", "content": [{"type": "text", "text": "noon"}]},
        ]
        text = engine.tokenizer.decode(engine.encode_chat(history, tools=tools))
        assert '{"a": 1}' in text and "(why)" in text and "tool: noon" in text
        bad = {**called, "function": {"name": "clock", "arguments": "{"}}
        with pytest.raises(PromptError, match="JSON object"):
            engine.encode_chat([*ASKED, {"role": "assistant", "tool_calls": [bad]}])


def test_a_template_without_tools_or_reasoning_says_so(tmp_path):
    write(tmp_path, TEMPLATE)
    with birkhoff.load(tmp_path, **SMALL) as engine:
        with pytest.raises(OptionError, match="template takes none"):
            engine.chat(ASKED, tools=[CLOCK])
        with pytest.raises(OptionError, match="no reasoning"):
            engine.chat(ASKED, thinking=True)
        with pytest.raises(PromptError, match="takes no tools"):
            engine.encode_chat([*ASKED, {"role": "tool", "tool_call_id": "a", "content": "x"}])


def test_calls_in_python(tmp_path):
    """`chat(tools=...)` separates a call that the model writes by itself: here the only text that it can write."""
    tokenizer = write(tmp_path, template("hermes", R1))
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with birkhoff.load(tmp_path, **SMALL) as engine:
        output = engine.chat(ASKED, tools=[CLOCK], max_tokens=5, temperature=0, ignore_eos=True)
        prompt = tokenizer.apply_chat_template(
            ASKED, tools=[CLOCK], add_generation_prompt=True, enable_thinking=False, return_tensors="pt"
        )
        want = network.generate(**prompt, max_new_tokens=5, do_sample=False, eos_token_id=None)[0]
        assert [*output.prompt_token_ids, *output.token_ids] == want.tolist()
        assert output.message.reasoning and not output.message.content  # the prompt opened it
