"""Convert records to rows: varied wording, V4's chat layout, loss weights, whole records packed into rows of fixed
length.

A conversation is `BOS [system] (User request Assistant </think> answer EOS)+`, exactly as the chat encoder writes it.
Every row starts with BOS and contains only whole conversations (padding fills the rest), and every answer ends in EOS.
Loss weights: answers 1 including EOS, requests 0.1, BOS and padding 0. A *unit* is one slice of one pass and depends
only on (seed, pass, slice), so units can be generated anywhere, in any order.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from birkhoff.errors import TokenError
from birkhoff.text.markers import ASSISTANT, BOS, END_THINK, EOS, PAD, USER
from training.corpus import Corpus, Record
from training.names import KEEP_NAMES, fresh_names, rename
from training.requests import fresh_request, split_late
from training.smalltalk import THANKS, facts, near_miss, system_sentence

# role of a token in the loss
IGNORED = 0
REQUEST = 1
ANSWER = 2
RENAME_SHARE = 0.6
SYSTEM_SHARE = 0.1
TWO_TURN_SHARE = 0.08
SMALLTALK_REPEATS = 5  # per pass and record; a run has about twenty passes
CHARACTERS_PER_TOKEN = 4.6  # an upper bound for this corpus (mean 3.95)
PARTS = ("mixed", "core")  # core and general together; core alone


@dataclass(frozen=True)
class Markers:
    bos: int
    eos: int
    pad: int
    user: int
    assistant: int
    end_think: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Markers:
        token_ids = [tokenizer.token_to_id(marker) for marker in (BOS, EOS, PAD, USER, ASSISTANT, END_THINK)]
        ids = [token_id for token_id in token_ids if token_id is not None]
        if len(ids) < len(token_ids):
            raise TokenError(
                "the tokenizer lacks one of V4's chat markers. Make it with python -m training.tokenizer."
            )
        return cls(*ids)


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Record, ...]
    system: str = ""


@dataclass(frozen=True)
class Rows:
    """`ids` and `roles` [rows, length]; `roles` is IGNORED, REQUEST or ANSWER for the token itself."""

    ids: np.ndarray
    roles: np.ndarray
    dropped: int = 0


def seeded(*parts: object) -> random.Random:
    """Return a generator that depends only on the parts, not on process or platform."""
    return random.Random(hashlib.sha256(repr(parts).encode()).digest())


def encode_conversations(
    tokenizer: Tokenizer, markers: Markers, conversations: list[Conversation]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return ids and roles of each conversation. Text is encoded in pieces separated by markers."""
    pieces = [
        piece
        for c in conversations
        for piece in (c.system, *(t for turn in c.turns for t in (turn.prompt, turn.text)))
    ]
    encoded = iter([encoding.ids for encoding in tokenizer.encode_batch(pieces, add_special_tokens=False)])
    out = []
    for conversation in conversations:
        ids, roles = [markers.bos], [IGNORED]

        def put(tokens: list[int], role: int, ids: list[int] = ids, roles: list[int] = roles) -> None:
            ids.extend(tokens)
            roles.extend([role] * len(tokens))

        put(next(encoded), REQUEST)
        for _ in conversation.turns:
            put([markers.user, *next(encoded), markers.assistant, markers.end_think], REQUEST)
            put([*next(encoded), markers.eos], ANSWER)
        out.append((np.array(ids, dtype=np.uint16), np.array(roles, dtype=np.uint8)))
    return out


def dress(record: Record, draw: random.Random) -> Record:
    """Return one record as this pass presents it: another request, other names."""
    record = near_miss(record, draw) if record.source == "smalltalk" else fresh_request(record, draw)
    if record.source in KEEP_NAMES or draw.random() >= RENAME_SHARE:
        return record
    mapping = fresh_names(f"{record.prompt}\n{record.text}", draw)
    return Record(record.source, rename(record.prompt, mapping), rename(record.text, mapping))


def converse(record: Record, smalltalk: list[Record], draw: random.Random) -> Conversation:
    """Build a conversation around one record, sometimes with a system sentence or a short turn before or after."""
    turns = [record]
    if smalltalk and draw.random() < (0.3 if record.source == "smalltalk" else TWO_TURN_SHARE):
        other = near_miss(draw.choice(smalltalk), draw)
        thanks = [r for r in smalltalk if r.prompt in THANKS]
        if record.source != "smalltalk" and thanks and draw.random() < 0.4:
            turns = [record, near_miss(draw.choice(thanks), draw)]
        else:
            turns = [other, record] if draw.random() < 0.6 else [record, other]
    system = system_sentence(record.source, draw) if draw.random() < SYSTEM_SHARE else ""
    return Conversation(tuple(turns), system)


def make_unit(
    corpus: Corpus,
    tokenizer: Tokenizer,
    length: int,
    part: str,
    seed: int,
    turn: int,
    piece: int,
    pieces: int,
) -> Rows:
    """Build slice `piece` of `pieces` of pass `turn` over `part`, packed and shuffled. Small talk is in every slice."""
    markers = Markers.of(tokenizer)
    records = [*corpus.core, *corpus.general] if part == "mixed" else list(corpus.core)
    seeded(seed, part, turn).shuffle(records)
    smalltalk = [*corpus.smalltalk, *facts()]
    repeated = smalltalk * SMALLTALK_REPEATS
    seeded(seed, part, turn, "smalltalk").shuffle(repeated)
    draw = seeded(seed, part, turn, piece)
    records_shown = [dress(record, draw) for record in records[piece::pieces] + repeated[piece::pieces]]
    conversations = [converse(record, smalltalk, draw) for record in records_shown]
    encoded = encode_conversations(tokenizer, markers, conversations)
    fitting, dropped = [], 0
    for conversation, (ids, roles) in zip(conversations, encoded):
        if len(ids) <= length:
            fitting.append((ids, roles))
            continue
        shorter = _shorten(conversation, tokenizer, markers, length, draw)
        if shorter is None:
            dropped += 1
        else:
            fitting.append(shorter)
    rows = pack(fitting, length, markers.pad, draw)
    return Rows(rows.ids, rows.roles, dropped)


def _shorten(
    conversation: Conversation, tokenizer: Tokenizer, markers: Markers, length: int, draw: random.Random
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the long turn alone, as a whole answer that starts later in its text; None if even its end is too long."""
    longest = max(conversation.turns, key=lambda turn: len(turn.text))
    for record in split_late(longest, draw):
        if len(record.prompt) + len(record.text) > CHARACTERS_PER_TOKEN * length:
            continue  # it cannot fit, so skip encoding it
        encoded = encode_conversations(tokenizer, markers, [Conversation((record,))])[0]
        if len(encoded[0]) <= length:
            return encoded
    return None


def pack(encoded: list[tuple[np.ndarray, np.ndarray]], length: int, pad: int, draw: random.Random) -> Rows:
    """Best fit, longest first: each conversation goes to the fullest row that has room for it."""
    order = sorted(range(len(encoded)), key=lambda i: (-len(encoded[i][0]), draw.random()))
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]  # free tokens -> rows
    for index in order:
        size = len(encoded[index][0])
        room = next((free for free in range(size, length + 1) if by_room[free]), None)
        if room is None:
            rows.append([index])
            by_room[length - size].append(len(rows) - 1)
        else:
            row = by_room[room].pop()
            rows[row].append(index)
            by_room[room - size].append(row)
    draw.shuffle(rows)
    ids = np.full((len(rows), length), pad, dtype=np.uint16)
    roles = np.zeros((len(rows), length), dtype=np.uint8)
    for row, members in enumerate(rows):
        draw.shuffle(members)
        start = 0
        for index in members:
            stop = start + len(encoded[index][0])
            ids[row, start:stop], roles[row, start:stop] = encoded[index]
            start = stop
    return Rows(ids, roles)


def held_out_rows(records: tuple[Record, ...], tokenizer: Tokenizer, length: int) -> Rows:
    """Return one unmodified record per row from position 0; a record longer than the row is truncated, only here."""
    markers = Markers.of(tokenizer)
    encoded = encode_conversations(tokenizer, markers, [Conversation((record,)) for record in records])
    ids = np.full((len(encoded), length), markers.pad, dtype=np.uint16)
    roles = np.zeros((len(encoded), length), dtype=np.uint8)
    for row, (tokens, role) in enumerate(encoded):
        stop = min(len(tokens), length)
        ids[row, :stop], roles[row, :stop] = tokens[:stop], role[:stop]
    return Rows(ids, roles)
