import itertools

from hypothesis import given
from hypothesis import strategies as st

from birkhoff.text.markers import CHAT_MARKERS, DSML, THINK, USER
from birkhoff.text.segments import Marker, TextSegment, encode_segments, join_texts, split_markers
from tests.text.conversations import render_text

PIECES = st.lists(
    st.one_of(st.text(max_size=6).map(TextSegment), st.sampled_from(CHAT_MARKERS).map(Marker)), max_size=10
)


@given(pieces=PIECES)
def test_joining_changes_neither_prompt_nor_markers(pieces):
    out = list(join_texts(pieces))
    assert render_text(out) == render_text(pieces)
    assert [s for s in out if isinstance(s, Marker)] == [s for s in pieces if isinstance(s, Marker)]
    assert not any(
        isinstance(a, TextSegment) and isinstance(b, TextSegment) for a, b in itertools.pairwise(out)
    )
    assert TextSegment("") not in out


def test_how_text_was_cut_does_not_change_ids(tokenizer):
    text = "The weather in Beijing: 12345 degrees,\n\nand then 天地玄黄 <tool_result>"
    whole = tokenizer.encode(text)
    differing = 0
    for cut in range(len(text) + 1):
        pieces = [TextSegment(text[:cut]), TextSegment(""), TextSegment(text[cut:])]
        assert encode_segments(pieces, tokenizer) == whole
        differing += tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:]) != whole
    assert differing > 20 or tokenizer.vocab_size == 512  # joining matters for tokenizers with merges


@given(pieces=PIECES)
def test_ids_hold_exactly_the_placed_markers(tokenizer, pieces):
    placed = [tokenizer.token_id(s.string) for s in pieces if isinstance(s, Marker)]
    ids = encode_segments(pieces, tokenizer)
    assert [i for i in ids if i in tokenizer.added_ids] == placed
    assert tokenizer.decode(ids) == render_text(pieces)


def test_our_own_texts_are_cut_at_markers():
    text = f"<{DSML}tool_calls> after {THINK} {USER}"
    assert split_markers(text) == [
        TextSegment("<"),
        Marker(DSML),
        TextSegment("tool_calls> after "),
        Marker(THINK),
        TextSegment(" "),
        Marker(USER),
    ]
    assert render_text(split_markers(text)) == text and split_markers("") == []
