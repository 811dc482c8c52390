import time

from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.text.detokenizer import IncrementalDetokenizer, SegmentDetokenizer
from birkhoff.text.markers import DSML, EOS, USER
from birkhoff.text.segments import Marker, TextSegment
from tests.sizes import scaled
from tests.text.conversations import render_text

# Byte strings of whole characters (one to four bytes), stray bytes, truncated and overlong sequences.
RAGGED = st.lists(
    st.one_of(
        st.binary(max_size=4),
        st.text(max_size=3).map(lambda text: text.encode()),
        st.sampled_from(["é", "天", "🙂", "\u0301", "\U0010ffff"]).map(lambda c: c.encode()),
        st.sampled_from(
            [b"\xf0\x9f\x98", b"\xe5\xa4", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5", b"\x80"]
        ),
    ),
    max_size=12,
).map(b"".join)


def ids_of_bytes(tokenizer, data):
    id_of = {tokenizer.piece(i): i for i in range(3, 259)}
    return [id_of[bytes([byte])] for byte in data]


@settings(max_examples=scaled(3000))
@given(data=RAGGED)
def test_pieces_join_to_the_whole_and_never_hold_half_a_character(byte_tokenizer, data):
    ids = ids_of_bytes(byte_tokenizer, data)
    decoder, shown = IncrementalDetokenizer(byte_tokenizer), ""
    for count, token in enumerate(ids, start=1):
        shown += decoder.feed(token)
        so_far = data[:count].decode("utf-8", errors="replace")
        # The output is a prefix of the whole decoding; at most three bytes of one character are held back.
        pending = so_far[len(shown) :]
        assert so_far.startswith(shown) and len(pending) <= 3 and set(pending) <= {"\ufffd"}
    assert shown + decoder.finish() == byte_tokenizer.decode(ids) == data.decode("utf-8", errors="replace")


@given(data=st.data())
def test_any_ids_join_to_the_whole(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    for skip in (False, True):
        decoder = IncrementalDetokenizer(tokenizer, skip_special=skip)
        assert "".join(map(decoder.feed, ids)) + decoder.finish() == tokenizer.decode(ids, skip_special=skip)


@given(data=st.data())
def test_segments_say_the_same_and_know_markers_by_id(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    decoder = SegmentDetokenizer(tokenizer)
    segments = [segment for i in ids for segment in decoder.feed(i)] + decoder.finish()
    assert render_text(segments) == tokenizer.decode(ids)
    assert [s.string for s in segments if isinstance(s, Marker)] == [
        m for i in ids if (m := tokenizer.marker(i))
    ]


def test_spelled_markers_stay_text_and_half_characters_end_at_a_marker(byte_tokenizer):
    spelled = byte_tokenizer.encode(USER)
    half = byte_tokenizer.encode("🙂")[:2]
    decoder = SegmentDetokenizer(byte_tokenizer)
    ids = [*spelled, *half, byte_tokenizer.token_id(DSML), byte_tokenizer.token_id(EOS)]
    segments = [segment for i in ids for segment in decoder.feed(i)]
    assert "".join(s.string for s in segments if isinstance(s, TextSegment)) == USER + "\ufffd"
    assert segments[-3:] == [TextSegment("\ufffd"), Marker(DSML), Marker(EOS)]


def test_cost_per_token_does_not_grow(byte_tokenizer):
    def seconds(count):
        ids = byte_tokenizer.encode("日本語 text " * (count // 10))
        runs = []
        for _ in range(3):
            decoder, start = IncrementalDetokenizer(byte_tokenizer), time.process_time()
            for i in ids:
                decoder.feed(i)
            runs.append((time.process_time() - start) / len(ids))
        return min(runs)

    assert seconds(40_000) < 12 * seconds(
        1_000
    )  # decoding the whole again per token would cost 40 times more
