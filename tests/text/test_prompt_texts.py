import hashlib
import json
import sys

import pytest

from birkhoff.errors import ChatError, CheckpointError
from birkhoff.small_file import CONFIG_BYTES
from birkhoff.text.encoder_file import read_templates
from birkhoff.text.markers import DSML, END_THINK, THINK
from birkhoff.text.prompt_texts import PromptTexts, load_prompt_texts, own_prompt_texts
from birkhoff.text.segments import Marker, split_markers

# published lengths and sha256
PUBLISHED = {
    "tools_head": (890, "c7c9042638154a237b5d1bd48be772374a35a4d24c5cacfd1ffbd92703da329c"),
    "tools_tail": (99, "690702850fe256512cb1ee67c4e436ecb3e735c71ebee77ca45ff357a75fb5a7"),
    "effort_v4_max": (476, "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"),
    "effort_0731_high": (476, "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"),
    "effort_0731_max": (528, "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c"),
    "response_format_head": (80, "5200f58413f49f3957c43beddbc97bead023232cb5934fad0c1997c30c139112"),
}


def test_the_official_texts_have_their_published_hashes(official_texts):
    for name, (size, sha256) in PUBLISHED.items():
        data = official_texts[name].encode()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (size, sha256), name


def templated(text):
    return text.replace(DSML, "{dsml}").replace(THINK, "{opens}").replace(END_THINK, "{closes}")


TOKENS = f"dsml: str = {DSML!r}\nopens = {THINK!r}\ncloses = {END_THINK!r}\n"


def one_template(t):
    tools = templated(t["tools_head"]) + "{schemas}" + templated(t["tools_tail"])
    lines = "".join(f"    {line!r}\n" for line in t["effort_v4_max"].splitlines(keepends=True))
    return (
        f"{TOKENS}ANYTHING = {tools!r}\nREASONING_EFFORT_MAX = (\n{lines})\n"
        f"answer: str = {t['response_format_head'] + '{schema}'!r}\n"
    )


def separate_constants(t):
    names = ("tools_head", "tools_tail", "effort_v4_max", "response_format_head")
    return "".join(f"TEXT_{i} = {t[name]!r}\n" for i, name in enumerate(names))


def f_strings_in_functions(t):
    def literal(text):  # the text as f-string source, with markers by name
        return (
            repr(text)[1:-1].replace(DSML, "{dsml}").replace(THINK, "{opens}").replace(END_THINK, "{closes}")
        )

    tools = literal(t["tools_head"]) + "{lines(tools)}" + literal(t["tools_tail"])
    quote = "'''"
    return (
        f"{TOKENS}def tools_text(tools):\n    return f{quote}{tools}{quote}\n"
        f"def shape(schema):\n    return {t['response_format_head']!r} + dump(schema)\n"
        f"class Effort:\n    MAX = {t['effort_v4_max']!r}\n"
    )


def renamed_by_format(t):
    tools = t["tools_head"].replace(DSML, "{a}").replace(THINK, "{b}").replace(END_THINK, "{c}")
    tools += "{d}" + t["tools_tail"]
    return (
        f"{TOKENS}T = {tools!r}\nE = {t['effort_v4_max'][:100]!r} + {t['effort_v4_max'][100:]!r}\n"
        f"R = {t['response_format_head']!r}\n"
        "def render(tools):\n    return T.format(a=dsml, b=opens, c=closes, d=dump(tools))\n"
    )


@pytest.mark.parametrize(
    "style", [one_template, separate_constants, f_strings_in_functions, renamed_by_format]
)
@pytest.mark.parametrize("place", ["encoding/encoding_dsv4.py", "encoding_dsv4.py", "encoding/chat.py"])
def test_texts_are_found_whatever_they_are_called(tmp_path, official_texts, style, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(style(official_texts), encoding="utf-8")
    loaded = load_prompt_texts(tmp_path)
    assert loaded.verified and loaded.source == place.split("/")[-1]
    for name in ("tools_head", "tools_tail", "response_format_head"):
        assert loaded.require(name) == official_texts[name]
    assert dict(loaded.effort) == {"max": official_texts["effort_v4_max"]}
    assert loaded.effort_text("high") == loaded.effort_text("low") == loaded.effort_text(None) == ""


def test_the_new_effort_levels_follow_the_file(tmp_path, official_texts):
    t = official_texts
    levels = {"low": "", "high": t["effort_0731_high"], "max": t["effort_0731_max"]}
    for effort in (f"PROMPTS = {levels!r}\n", f"A = {levels['high']!r}\nB = {levels['max']!r}\n"):
        (tmp_path / "encoding_dsv4.py").write_text(
            separate_constants(t).replace("TEXT_2 = ", "_ = ") + effort
        )
        loaded = load_prompt_texts(tmp_path)
        assert loaded.verified
        assert (
            loaded.effort_text("high") == t["effort_0731_high"]
            and loaded.effort_text("max") == t["effort_0731_max"]
        )
        assert loaded.effort_text("low") == loaded.effort_text(None) == ""


NEW_REVISION = (
    f'{TOKENS}TOOLS = """## Tools\\n\\nNew words <{{dsml}}tool_calls>:\\n{{schemas}}\\n\\nNew end.\\n"""\n'
    'FORMAT = "## Response Format:\\n\\nNew words:\\n{schema}"\n'
    'EFFORTS = {"low": "", "high": "Reasoning Effort: more.\\n", "max": "Reasoning Effort: most.\\n"}\n'
)


def test_an_unknown_revision_is_read_by_its_shape_and_marked(tmp_path):
    (tmp_path / "encoding_dsv4.py").write_text(NEW_REVISION, encoding="utf-8")
    loaded = load_prompt_texts(tmp_path)
    assert not loaded.verified and loaded.source == "encoding_dsv4.py"
    assert (
        loaded.tools_head == f"## Tools\n\nNew words <{DSML}tool_calls>:\n"
        and loaded.tools_tail == "\n\nNew end.\n"
    )
    assert loaded.response_format_head == "## Response Format:\n\nNew words:\n"
    assert dict(loaded.effort) == {"high": "Reasoning Effort: more.\n", "max": "Reasoning Effort: most.\n"}


def test_the_file_is_never_executed(tmp_path):
    canary = tmp_path / "canary"
    harm = f"import pathlib, sys\npathlib.Path({str(canary)!r}).write_text('ran')\nsys.exit(3)\n"
    (tmp_path / "encoding_dsv4.py").write_text(harm + NEW_REVISION, encoding="utf-8")
    assert load_prompt_texts(tmp_path).tools_head is not None
    assert not canary.exists() and "encoding_dsv4" not in sys.modules


def test_without_an_encoder_file_our_own_words_do_the_same_job(tmp_path):
    own = load_prompt_texts(tmp_path)
    assert own == own_prompt_texts() and own.source == "birkhoff"
    markers = [
        segment.string for segment in split_markers(own.require("tools_head")) if isinstance(segment, Marker)
    ]
    assert markers.count(DSML) == 6 and THINK in markers and END_THINK in markers
    assert own.effort_text("max") and own.require("response_format_head").endswith("\n")


def test_our_own_words_are_not_theirs(official_texts):
    own = own_prompt_texts()
    ours = " ".join([own.tools_head, own.tools_tail, own.response_format_head, own.effort["max"]])
    theirs = {
        line
        for text in official_texts.values()
        for line in text.split("\n")
        if len(line) > 40 and DSML not in line
    }
    assert theirs and not any(line in ours for line in theirs)


def test_a_text_the_file_lacks_is_refused_by_name():
    bare = PromptTexts(None, None, None, source="encoding_dsv4.py")
    with pytest.raises(ChatError, match=r"encoding_dsv4\.py has no recognisable tools head text"):
        bare.require("tools_head")
    with pytest.raises(ChatError, match="no recognisable effort 'max' text"):
        bare.effort_text("max")
    for level in ("extreme", "none", "", 5, True):
        with pytest.raises(ChatError, match="expected None, low, high, max"):
            bare.effort_text(level)


@pytest.mark.parametrize(
    "content",
    [
        b"def broken(:\n",
        b"\x00",
        b"x = '\xff'",
        b"(" * 5000,
        b"a" + b"+a" * 100_000,
        b"#" * (CONFIG_BYTES + 1),
    ],
    ids=["syntax", "nul", "encoding", "nesting", "sum", "size"],
)
def test_a_damaged_file_is_refused(tmp_path, content):
    file = tmp_path / "encoding_dsv4.py"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"encoding_dsv4\.py"):
        load_prompt_texts(tmp_path)


def test_braces_that_are_no_template_stay(tmp_path):
    file = tmp_path / "encoding_x.py"
    file.write_text('A = "{ not a template"\nB = "{{kept}}"\nC = f"{1!r:>3} and {A}"\n')
    texts = {template.label: template.text for template in read_templates(file) if template.text}
    assert texts["A"] == "{ not a template" and "{kept}" in json.dumps([t.text for t in read_templates(file)])
