import itertools

from hypothesis import given
from hypothesis import strategies as st

from birkhoff.text.markers import CHAT_MARKERS, DSML, THINK, USER
from birkhoff.text.segments import Marker, Text, encode_segments, joined, render_text, split_markers

PIECES = st.lists(
    st.one_of(st.text(max_size=6).map(Text), st.sampled_from(CHAT_MARKERS).map(Marker)), max_size=10
)  # fmt: skip


@given(pieces=PIECES)
def test_joining_changes_neither_prompt_nor_markers(pieces):
    out = list(joined(pieces))
    assert render_text(out) == render_text(pieces)
    assert [s for s in out if isinstance(s, Marker)] == [s for s in pieces if isinstance(s, Marker)]
    assert not any(isinstance(a, Text) and isinstance(b, Text) for a, b in itertools.pairwise(out))
    assert Text("") not in out


@given(text=st.text(st.sampled_from("the quick 123\n<>｜DSML think天")), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_how_text_was_cut_does_not_change_ids(tokenizer, text, cuts):
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [Text(text[a:b]) for a, b in itertools.pairwise(borders)]
    assert encode_segments(pieces, tokenizer) == tokenizer.encode(text)


@given(pieces=PIECES)
def test_ids_hold_exactly_the_placed_markers(tokenizer, pieces):
    placed = [tokenizer.token_id(s.string) for s in pieces if isinstance(s, Marker)]
    ids = encode_segments(pieces, tokenizer)
    assert [i for i in ids if i in tokenizer.added_ids] == placed
    assert tokenizer.decode(ids) == render_text(pieces)


def test_our_own_texts_are_cut_at_markers():
    text = f"<{DSML}tool_calls> after {THINK} {USER}"
    assert split_markers(text) == [
        Text("<"), Marker(DSML), Text("tool_calls> after "), Marker(THINK), Text(" "), Marker(USER),
    ]  # fmt: skip
    assert render_text(split_markers(text)) == text and split_markers("") == []
