"""The one-line edit syntax: parsing, printing, and errors with a caret at the position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.errors import SteeringError, SteeringSyntax
from birkhoff.option_checks import FLOAT32_MAX
from birkhoff.steering.edit_syntax import parse_line, print_line
from birkhoff.steering.expert_edits import ExpertSet
from birkhoff.steering.gated_edits import Gate
from birkhoff.steering.vector_edits import Add, Clamp, Patch, Project, Scale

HOOKS = ("mlp_out", "mhc_streams_pre_attn", "mhc_streams_final")


def test_the_documented_example():
    line = "+2.0 calm @ mhc_streams_pre_attn[4] stream=1"
    assert parse_line(line) == [Add("calm", "mhc_streams_pre_attn", [4], 2.0, [1])]
    assert print_line(parse_line(line)) == line


@pytest.mark.parametrize(
    ("line", "edits", "canonical"),
    [
        ("2 calm", [Add("calm", scale=2.0)], "+2.0 calm"),
        ("  -.5e1   calm@mlp_out [ * ]  ", [Add("calm", "mlp_out", "all", -5.0)], "-5.0 calm @ mlp_out[*]"),
        (
            "+1 a@mlp_out[6,4,4..8,-1];",
            [Add("a", "mlp_out", {"layers": [6, 4, -1], "ranges": [[4, 8]]})],
            "+1.0 a @ mlp_out[-1,4,6,4..8]",
        ),
        (
            "+1 ./my-vectors/calm.v2.safetensors @ mlp_out",
            [Add("./my-vectors/calm.v2.safetensors", "mlp_out")],
            "+1.0 ./my-vectors/calm.v2.safetensors @ mlp_out",
        ),
        ('+1 "two words; [and] @"', [Add("two words; [and] @")], '+1.0 "two words; [and] @"'),
        (
            "+0.5 r @ mlp_out[1] op=project phase=decode ;+3 c @ mlp_in[2..3] op=clamp",
            [
                Project("r", "mlp_out", [1], 0.5, phase="decode"),
                Clamp("c", "mlp_in", {"ranges": [[2, 3]]}, min=3.0, max=3.0),
            ],
            "+0.5 r @ mlp_out[1] phase=decode op=project; +3.0 c @ mlp_in[2..3] op=clamp",
        ),
        (
            "1 p @ mhc_streams_pre_mlp[2] op=patch path=read stream=all",
            [Patch("p", "mhc_streams_pre_mlp", [2], streams="all", path="read")],
            "+1.0 p @ mhc_streams_pre_mlp[2] stream=all path=read op=patch",
        ),
        (
            "1 p @ mhc_streams_pre_mlp[2] stream=3,1,1",
            [Add("p", "mhc_streams_pre_mlp", [2], streams=[1, 3])],
            "+1.0 p @ mhc_streams_pre_mlp[2] stream=1,3",
        ),
        (
            "2 calm when=sad above=1.5 below=3; 0 @ mlp_out[6] op=scale tokens=digits",
            [
                Add("calm", scale=2.0, when=Gate("sad", above=1.5, below=3.0)),
                Scale(0.0, "mlp_out", [6], when=Gate(tokens="digits")),
            ],
            "+2.0 calm when=sad above=+1.5 below=+3.0; +0.0 @ mlp_out[6] op=scale tokens=digits",
        ),
        (
            "@ moe_topk[4] op=ban expert=3 tokens=13,11",
            [ExpertSet([4], ban=[3], when=Gate(tokens=[11, 13]))],
            "@ moe_topk[4] op=ban expert=3 tokens=11,13",
        ),
    ],
)
def test_lines_and_their_canonical_form(line, edits, canonical):
    assert parse_line(line) == edits
    assert print_line(edits) == canonical and parse_line(canonical) == edits


numbers = st.floats(-FLOAT32_MAX, FLOAT32_MAX)
targets = st.fixed_dictionaries(
    {
        "hook": st.sampled_from(HOOKS),
        "layers": st.none()
        | st.just("all")
        | st.fixed_dictionaries(
            {
                "layers": st.lists(st.integers(-60, 60), min_size=1, max_size=4),
                "ranges": st.lists(st.tuples(st.integers(0, 30), st.integers(30, 60)).map(list), max_size=2),
            }
        ),
    }
) | st.just({})
rest = {
    "streams": st.none()
    | st.sampled_from(["all", "post_mix"])
    | st.lists(st.integers(0, 9), min_size=1, max_size=3),
    "phase": st.sampled_from(["both", "prefill", "decode"]),
    "path": st.sampled_from(["both", "read", "carry"]),
}
names = st.text(min_size=1) | st.from_regex(r"[\w./~+-]+", fullmatch=True)
rest["when"] = (
    st.none()
    | st.builds(Gate, names, above=numbers, below=st.none() | numbers)
    | st.builds(
        Gate, tokens=st.lists(st.integers(0, 99), min_size=1) | st.sampled_from(["digits", "newlines"])
    )
)


@st.composite
def line_edits(draw):
    name, target = draw(names), draw(targets)
    options = target | {key: draw(values) for key, values in rest.items()}
    if draw(st.integers(0, 3)) == 0:
        value = draw(numbers)
        return Clamp(name, min=value, max=value, **options)
    return draw(st.sampled_from([Add, Project, Patch]))(name, scale=draw(numbers), **options)


@given(edits=st.lists(line_edits(), min_size=1, max_size=3))
def test_print_and_parse_round_trip(edits):
    line = print_line(edits)
    assert parse_line(line) == edits
    assert print_line(parse_line(line)) == line


@given(line=st.text(alphabet='+-.0123456789abc @[]*,;="\\ \téstreamop', max_size=40) | st.text())
def test_any_text_parses_or_raises_with_a_position_in_the_line(line):
    try:
        edits = parse_line(line)
    except SteeringSyntax as error:
        assert 0 <= error.place <= len(line)
        text, shown, caret = str(error).split("\n")
        assert text.endswith(f"at character {error.place + 1}.") and caret.strip() == "^"
        assert len(shown) <= 122 and "\t" not in shown
    except SteeringError:
        pass  # valid syntax, but no valid edit: for example an invalid stream number
    else:
        assert parse_line(print_line(edits)) == edits


@pytest.mark.parametrize(
    ("line", "position", "words"),
    [
        ("", 0, "the name of a vector"),
        ("calm mood", 5, "'mood' is no key"),
        ("+2.0", 4, "blank"),
        ("+2.0calm", 4, "blank"),
        ("1e999 calm", 0, "beyond every number"),
        ("+2.0 @ mlp_out[1]", 5, "name of a vector"),
        ('+2.0 "calm', 5, "closing quote"),
        ('+2.0 "\\x"', 5, "JSON"),
        ('+2.0 ""', 5, "empty"),
        ("+2.0 calm @", 11, "name of a hook"),
        ("+2.0 calm @ mlp_out[", 20, "a layer, a range"),
        ("+2.0 calm @ mlp_out[x]", 20, "a layer, a range"),
        ("+2.0 calm @ mlp_out[4", 21, "']'"),
        ("+2.0 calm @ mlp_out[4..]", 23, "last layer"),
        ("+2.0 calm @ mlp_out[8..4]", 20, "starts after its end"),
        ("+2.0 calm @ mlp_out[4] strm=1", 23, "'strm' is no key"),
        ("+2.0 calm @ mlp_out[4] phase", 28, "'='"),
        ("+2.0 calm @ mlp_out[4] phase=now", 29, "'now', expected one of both, prefill, decode"),
        ("+2.0 calm @ mlp_out[4] op=multiply", 26, "'multiply'"),
        ("+2.0 calm @ mlp_out[4] path=both path=read", 33, "given twice"),
        ("+2.0 calm @ mlp_out[4] stream=-1", 30, "from 0"),
        ("+2.0 calm @ mlp_out[4] stream=one", 30, "stream numbers"),
        ("+2.0 calm tokens=vowels", 17, "'vowels', expected one of digits"),
        ("+2.0 calm when=sad above=much", 25, "a number after above="),
        ("+2.0 calm above=1", 10, "lacks the vector"),
        ("+2.0 calm when=sad", 10, "lacks a bound"),
        ("+2.0 calm when=sad tokens=1", 19, "a gate of its own"),
        ("+2.0 calm @ mlp_out[4]; ; +1 b", 24, "the name of a vector"),
        ("+2.0 calm @ mlp_out[4] , +1 b", 23, "';' or one of"),
    ],
)
def test_errors_point_at_the_position(line, position, words):
    with pytest.raises(SteeringSyntax, match=words) as refused:
        parse_line(line)
    assert refused.value.place == position
    _, shown, caret = str(refused.value).split("\n")
    assert caret.index("^") - 2 == position and shown[2:] == line


def test_a_long_line_is_cut_around_the_error():
    line = "; ".join(["+1.0 calm @ mlp_out[4]"] * 30) + " !"
    with pytest.raises(SteeringSyntax) as refused:
        parse_line(line)
    _, shown, caret = str(refused.value).split("\n")
    assert len(shown) < 130 and shown[caret.index("^")] == "!"


@pytest.mark.parametrize(
    "edit",
    [
        Add([1.0, 2.0], "mlp_out", [1]),
        Add("calm", "mlp_out", [1], where=[3]),
        Add("calm", "mlp_out", [1], norm_match=True),
        Add("calm", "mlp_out", {"every": 2}),
        Add("calm", layers=[1]),
        Add("calm", when=Gate("sad", "mlp_out", 3, above=1.0)),
        Clamp("calm", "mlp_out", [1], max=0.0),
    ],
    ids=["numbers", "where", "norm_match", "every", "no hook", "gate elsewhere", "bounds"],
)
def test_edits_that_a_line_cannot_express_are_refused(edit):
    with pytest.raises(SteeringError):
        print_line([edit])
