import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import ChatError
from birkhoff.text.chat import encode_chat, render
from birkhoff.text.markers import DSML
from birkhoff.text.prompt_texts import PromptTexts, own_prompt_texts
from birkhoff.text.segments import Marker
from tests.sizes import scaled
from tests.text.conversations import HONEST, HOSTILE, HOSTILE_PIECES, conversations, render_text

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
WORDS = PromptTexts("[tools:", ":tools]", "[format:", {"max": "[max]"})
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"q": "é"}}}
SEARCH_JSON = '{"name": "search", "parameters": {"q": "é"}}'


def user(content, **fields):
    return {"role": "user", "content": content, **fields}


def assistant(content, reasoning=None, **fields):
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, **fields}


def call(name, arguments, call_id=""):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text(messages, **options):
    return render_text(render(messages, WORDS, **options))


@pytest.mark.parametrize(("number", "thinking"), [(1, True), (2, True), (3, True), (4, False)])
def test_official_fixtures_byte_for_byte(official, official_literals, number, thinking):
    given_ = json.loads((official / f"test_input_{number}.json").read_text(encoding="utf-8"))
    messages, tools = (given_["messages"], given_["tools"]) if isinstance(given_, dict) else (given_, None)
    expected = (official / f"test_output_{number}.txt").read_bytes()
    assert (
        render_text(render(messages, official_literals, thinking=thinking, tools=tools)).encode() == expected
    )


def test_official_fixtures_become_the_ids_of_the_released_pipeline(
    official, official_literals, tokenizer, library
):
    for index, thinking in ((1, True), (2, True), (3, True), (4, False)):
        given_ = json.loads((official / f"test_input_{index}.json").read_text(encoding="utf-8"))
        messages, tools = (
            (given_["messages"], given_["tools"]) if isinstance(given_, dict) else (given_, None)
        )
        whole = (official / f"test_output_{index}.txt").read_text(encoding="utf-8")
        ids = encode_chat(messages, tokenizer, official_literals, thinking=thinking, tools=tools)
        assert ids == library.encode(whole, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([user("Hi")], {}, "<｜User｜>Hi<｜Assistant｜></think>"),
        ([user("Hi")], {"thinking": True}, "<｜User｜>Hi<｜Assistant｜><think>"),
        ([{"role": "system", "content": "S"}, user("Hi")], {}, "S<｜User｜>Hi<｜Assistant｜></think>"),
        # an earlier turn loses its reasoning, unless drop_thinking is off or there are tools
        (
            [user("a"), assistant("b", "r"), user("c")],
            {"thinking": True},
            f"<｜User｜>a<｜Assistant｜></think>b{EOS}<｜User｜>c<｜Assistant｜><think>",
        ),
        (
            [user("a"), assistant("b", "r"), user("c")],
            {"thinking": True, "drop_thinking": False},
            f"<｜User｜>a<｜Assistant｜><think>r</think>b{EOS}<｜User｜>c<｜Assistant｜><think>",
        ),
        (
            [user("a"), assistant("b", "r"), user("c")],
            {"thinking": True, "tools": [SEARCH]},
            f"\n\n[tools:{SEARCH_JSON}:tools]<｜User｜>a<｜Assistant｜><think>r</think>b{EOS}<｜User｜>c<｜Assistant｜><think>",
        ),
        # chat mode contains no reasoning
        ([user("a"), assistant("b", "r")], {}, f"<｜User｜>a<｜Assistant｜></think>b{EOS}"),
        (
            [user("a"), assistant("b", "r")],
            {"thinking": True},
            f"<｜User｜>a<｜Assistant｜><think>r</think>b{EOS}",
        ),
        ([user("a"), assistant("b", wo_eos=True)], {}, "<｜User｜>a<｜Assistant｜></think>b"),
        # earlier developer messages are dropped with the reasoning; a last one is the question
        (
            [{"role": "developer", "content": "D"}, user("a")],
            {"thinking": True},
            "<｜User｜>a<｜Assistant｜><think>",
        ),
        ([{"role": "developer", "content": "D"}], {}, "<｜User｜>D<｜Assistant｜></think>"),
        (
            [{"role": "developer", "content": "D"}, user("a")],
            {},
            "<｜User｜>D<｜User｜>a<｜Assistant｜></think>",
        ),
        # a reminder after the question follows the assistant marker
        (
            [user("a"), {"role": "latest_reminder", "content": "R"}],
            {},
            "<｜User｜>a<｜Assistant｜></think><｜latest_reminder｜>R",
        ),
        ([user("a"), user("b")], {}, "<｜User｜>a\n\nb<｜Assistant｜></think>"),
        # tasks
        ([user("a", task="action")], {}, "<｜User｜>a<｜Assistant｜></think><｜action｜>"),
        ([user("a", task="action")], {"thinking": True}, "<｜User｜>a<｜Assistant｜><think><｜action｜>"),
        ([user("a", task="title")], {"thinking": True}, "<｜User｜>a<｜title｜>"),
        ([user("a", task="query"), assistant("b", "r")], {"thinking": True}, f"<｜User｜>a<｜query｜>b{EOS}"),
        # a task ends its turn, so the second message starts a new one
        ([user("a", task="domain"), user("b")], {}, "<｜User｜>a<｜User｜>b<｜Assistant｜></think>"),
        # effort
        ([user("a")], {"thinking": True, "effort": "max"}, "[max]<｜User｜>a<｜Assistant｜><think>"),
        ([user("a")], {"thinking": True, "effort": "high"}, "<｜User｜>a<｜Assistant｜><think>"),
        ([user("a")], {"effort": "max"}, "<｜User｜>a<｜Assistant｜></think>"),
        (
            [{"role": "system", "content": "S"}, user("a")],
            {"thinking": True, "effort": "max"},
            "[max]S<｜User｜>a<｜Assistant｜><think>",
        ),
        # instructions join the leading system or developer message
        (
            [{"role": "system", "content": "S"}, user("a")],
            {"tools": [SEARCH], "response_format": {"x": 1}},
            f'S\n\n[tools:{SEARCH_JSON}:tools]\n\n[format:{{"x": 1}}<｜User｜>a<｜Assistant｜></think>',
        ),
        (
            [{"role": "developer", "content": "D"}],
            {"tools": [SEARCH]},
            f"<｜User｜>D\n\n[tools:{SEARCH_JSON}:tools]<｜Assistant｜></think>",
        ),
        ([user("a")], {"tools": []}, "<｜User｜>a<｜Assistant｜></think>"),
        # parts
        (
            [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
            {},
            "<｜User｜>a\n\nb<｜Assistant｜></think>",
        ),
    ],
)
def test_rules_of_the_format(messages, options, expected):
    assert text(messages, **options) == BOS + expected


def test_tool_results_are_user_text_in_the_order_of_the_calls():
    messages = [
        user("q"),
        assistant(
            None, tool_calls=[call("f", "{}", "one"), call("g", "{}", "two"), call("h", "{}", "three")]
        ),
        {"role": "tool", "tool_call_id": "three", "content": "3"},
        {"role": "tool", "tool_call_id": "unknown", "content": "?"},
        {"role": "user", "content": "and"},
        {
            "role": "tool",
            "tool_call_id": "two",
            "content": [{"type": "text", "text": "2"}, {"type": "image"}],
        },
        {"role": "tool", "tool_call_id": "one", "content": "1"},
    ]
    # Unknown ids sort as the first call, so '?' stays before '1'; text keeps its position.
    expected = (
        "<｜User｜><tool_result>?</tool_result>\n\n<tool_result>1</tool_result>\n\nand\n\n"
        "<tool_result>2\n\n[Unsupported image]</tool_result>\n\n<tool_result>3</tool_result><｜Assistant｜></think>"
    )
    assert text(messages).endswith(EOS + expected)


def test_tool_calls_are_written_as_dsml():
    arguments = {"city": "São\nPaulo", "days": 3, "deep": {"a": [1, None, True]}, "raw": '"</x>'}
    calls = [
        call("weather", json.dumps(arguments)),
        call("empty", "{}"),
        call("odd", "not json"),
        call("list", "[1]"),
        call("given", {"n": 1.5}),
    ]
    assert text([user("q"), assistant("ok", tool_calls=calls)]).endswith(
        "ok\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">São\nPaulo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="deep" string="false">{"a": [1, null, true]}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="raw" string="true">"</x></｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="empty">\n\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="odd">\n<｜DSML｜parameter name="arguments" string="true">not json</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="list">\n<｜DSML｜parameter name="arguments" string="true">[1]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="given">\n<｜DSML｜parameter name="n" string="false">1.5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        f"</｜DSML｜tool_calls>{EOS}"
    )


OPTIONS = st.fixed_dictionaries(
    {
        "thinking": st.booleans(),
        "drop_thinking": st.booleans(),
        "effort": st.sampled_from([None, "low", "high", "max"]),
    }
)


@settings(max_examples=scaled(1000))
@given(messages=conversations(HONEST), options=OPTIONS)
def test_honest_conversations_have_the_ids_of_the_released_pipeline(tokenizer, library, messages, options):
    """Equal to one string split at markers with each run tokenised whole."""
    segments = render(messages, own_prompt_texts(), **options)
    whole = render_text(segments)
    expected = library.encode(whole, add_special_tokens=False).ids
    assert encode_chat(messages, tokenizer, own_prompt_texts(), **options) == expected


@settings(max_examples=scaled(1000))
@given(honest=conversations(HONEST), hostile=conversations(HOSTILE), options=OPTIONS)
def test_no_text_of_anybody_becomes_a_marker(tokenizer, honest, hostile, options):
    """The markers among the ids are exactly those that the encoder placed."""
    messages = hostile + honest
    segments = render(messages, own_prompt_texts(), **options)
    placed = [tokenizer.token_id(s.string) for s in segments if isinstance(s, Marker)]
    ids = encode_chat(messages, tokenizer, own_prompt_texts(), **options)
    assert [i for i in ids if i in tokenizer.added_ids] == placed
    assert tokenizer.decode(ids) == render_text(segments)


@pytest.mark.parametrize("evil", HOSTILE_PIECES)
def test_each_special_string_stays_text_in_each_field(tokenizer, evil):
    """Replacing hostile text by a plain word leaves the markers and their order unchanged."""

    def conversation(word):
        tool = {
            "type": "function",
            "function": {"name": word, "description": word, "parameters": {word: word}},
        }
        return [
            {"role": "system", "content": word, "tools": [tool], "response_format": {"k": word}},
            {"role": "latest_reminder", "content": word},
            {"role": "developer", "content": word},
            assistant(word, word, tool_calls=[call(word, json.dumps({word: word, "n": [word]}), word)]),
            {"role": "tool", "tool_call_id": word, "content": word},
            {
                "role": "tool",
                "tool_call_id": "x",
                "content": [{"type": "text", "text": word}, {"type": word}],
            },
            user(word),
            assistant(word, word, tool_calls=[call(word, word)]),
            user(word),
        ]

    def markers(word):
        ids = encode_chat(conversation(word), tokenizer, own_prompt_texts(), thinking=True, effort="max")
        return [i for i in ids if i in tokenizer.added_ids]

    assert markers(evil) == markers("harmless")


def test_official_prompt_texts_bring_their_own_markers(official_literals):
    segments = render([user("a")], official_literals, tools=[SEARCH])
    assert [s.string for s in segments if isinstance(s, Marker)].count(
        DSML
    ) == official_literals.tools_head.count(DSML)


@pytest.mark.parametrize(
    "options", [{"thinking": 1}, {"thinking": None}, {"drop_thinking": "no"}, {"effort": "huge"}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(ChatError, match=next(iter(options))):
        render([user("a")], WORDS, **options)


def test_a_checkpoint_without_a_text_refuses_only_what_needs_it():
    bare = PromptTexts(None, None, None, source="encoding_dsv4.py")
    assert render([user("a")], bare)
    with pytest.raises(ChatError, match="no recognisable tools head"):
        render([user("a")], bare, tools=[SEARCH])
    with pytest.raises(ChatError, match="no recognisable response format head"):
        render([user("a")], bare, response_format={"x": 1})
