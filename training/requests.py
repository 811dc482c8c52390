"""Rephrase requests with templates, drawn anew on every pass.

A request is parsed (a title, a topic, two people and a place) and rendered by another template of its kind.
TinyStories have no requests, so theirs are derived from the story: its hero, three of its words, its opening (the
answer is then the rest), or no hint. About half of the requests stay unchanged, as does a request that matches no
pattern, so every request fits its answer.
"""

from __future__ import annotations

import random
import re

from training.corpus import Record

KEEP_SHARE = 0.5

CHILD = (
    "Tell me a story called {title}.",
    "Tell me a short story about {title}.",
    "I want to hear a story about {title}.",
    "Can you tell me the story of {title}?",
    "Write a children's story titled {title}.",
    "Please tell a story: {title}.",
    "Write a story for a child called {title}.",
    "Please tell me the story of {title}.",
    "Tell a story called {title}.",
    "Could you write a story called {title}?",
    "Write a short children's story called {title}.",
    "Do you know the story of {title}?",
    "I would like a story called {title}.",
    "Story time! Tell me about {title}.",
    "Make up a story called {title}.",
    "Tell me about {title}.",
)
BEDTIME = (
    "Tell me a bedtime story called {title}.",
    "Please read me a bedtime story about {title}.",
    "Write a bedtime story called {title}.",
    "It is time for bed. Tell me a story about {title}.",
    "Can you tell me a bedtime story about {title}?",
    "I can't sleep. Tell me a bedtime story called {title}.",
    "Read me the bedtime story {title}.",
    "One more bedtime story, please: {title}.",
    "Good night story, please. It is called {title}.",
    "Tell a bedtime story about {title}.",
)
CAMPFIRE = (
    "Tell a campfire story called {title}.",
    "Tell me a spooky campfire story about {title}.",
    "Tell a scary story called {title}.",
    "Let's sit by the campfire. Tell the story of {title}.",
    "Can you tell me a scary story about {title}?",
    "Tell us a campfire story called {title}.",
    "Write a spooky story called {title}.",
    "The fire is burning. Tell us the tale of {title}.",
    "I want to hear a spooky story about {title}.",
    "Scare me with a campfire story about {title}.",
)
EXPLAIN = (
    "Explain {title} like I'm five years old.",
    "Explain {title} in simple terms.",
    "Can you explain {title} to a child?",
    "Explain {title} to me in simple words.",
    "Please explain {title}.",
    "Tell me about {title} in simple words.",
    "Explain {title} simply.",
    "Can you explain {title} in simple terms?",
)
POEM = (
    "Write a {form} about {title}.",
    "Compose a {form} about {title}.",
    "Draft a {form} about {title}.",
    "Can you write a {form} about {title}?",
    "Please write me a {form} about {title}.",
    "Make up a {form} about {title}.",
    "I would like a {form} about {title}.",
    "Write me a {form} about {title}.",
)
SLICE = (
    "Write a slice-of-life story about {who} discussing {title}.",
    "Write a short story in which {who} talk about {title}.",
    "Tell me a story about {who} discussing {title}.",
    "Write a story about {who} talking about {title}.",
)
STORY = ("Tell me this story: {title}", "Write a story about this: {title}", "Write this story: {title}")

_TITLED = r"^(?:{}) (.+?)[.?]?$"
_PATTERNS: dict[str, tuple[re.Pattern[str], tuple[str, ...]]] = {
    "child": (
        re.compile(
            _TITLED.format(
                "I want to hear a story about|Can you tell me the story of|Tell me a short story about|"
                "Tell me a story called|"
                "Write a children's story titled|Write a story for a child called|Please tell a story:"
            )
        ),
        CHILD,
    ),
    "bedtime": (
        re.compile(
            _TITLED.format(
                r"It is time for bed\. Tell me a story about|Tell me a bedtime story called|"
                "Please read me a bedtime story about|Write a bedtime story called"
            )
        ),
        BEDTIME,
    ),
    "campfire": (
        re.compile(
            _TITLED.format(
                r"Let's sit by the campfire\. Tell the story of|Tell a scary story called|"
                "Tell me a spooky campfire story about|Tell a campfire story called"
            )
        ),
        CAMPFIRE,
    ),
    "explain": (re.compile(r"^Explain (.+?) (?:like I'm five years old|in simple terms)\.$"), EXPLAIN),
    "poem": (re.compile(r"^(?:Compose|Write|Draft) a (?P<form>poem|song) about (.+?)\.$"), POEM),
    "slice": (
        re.compile(r"^Write a slice-of-life story about (?P<who>.+? and .+?) discussing (.+?)\.$"),
        SLICE,
    ),
    "story": (re.compile(r"^(?:Tell me this story:|Write a story about this:) (.+)$", re.S), STORY),
}

HERO = (
    "Tell me a story about {hero}.",
    "Write a story about {hero}.",
    "I want a story about {hero}.",
    "Can you tell me a short story about {hero}?",
    "Please write a little story about {hero}.",
    "Can you tell me a story about {hero}?",
    "Write a short story about {hero}.",
    "Please tell me about {hero}.",
)
WORDS = (
    "Tell me a story that uses the words {words}.",
    "Use the words {words} in a story.",
    "Write a story with the words {words}.",
    "Write a short story with these words: {words}.",
    "Can you tell me a story with the words {words}?",
)
OPENING = ("Continue this story: {opening}", "Finish the story: {opening}", "What happens next? {opening}")
OPENING_OF_TEXT = (
    "Continue this text: {opening}",
    "Write the rest of this: {opening}",
    "Please go on: {opening}",
)
PLAIN = (
    "Tell me a story.",
    "Write a short story.",
    "Write a simple story.",
    "Can you tell me a story?",
    "Please tell me a short story.",
    "Tell me a story for children.",
    "I want to hear a story.",
    "Tell me a little story.",
    "Can you write a short story?",
)

_STORIES = frozenset({"tiny", "child", "bedtime", "campfire", "story", "slice"})
_CONTINUED = re.compile(r"^(?:Continue this story:|Finish the story:|What happens next\?) (.+)$", re.S)
_HERO = re.compile(r"\b(?:was|lived|loved|saw) (an? (?:[a-z]+ ){1,3}(?:named|called) [A-Z][a-z]+)")
_SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s)")
_WORD = re.compile(r"\b[a-z]{4,}\b")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DULL = _words(
    """that this then they them their there with were when what would could said went want wanted have from very some
    came come into back like liked looked upon time once little your just about play played with named called felt
    make made down over more made again around always began first after before where which will been other every much
    also only even than still through because didn asked told knew know really away things thing named while each
    """
)


def fresh_request(record: Record, draw: random.Random) -> Record:
    """Return the record with its request rephrased; the answer changes only if a story is continued."""
    if record.source == "tiny":
        return _tiny_request(record, draw)
    if draw.random() < KEEP_SHARE or record.source not in _PATTERNS:
        return record
    pattern, templates = _PATTERNS[record.source]
    match = pattern.match(record.prompt)
    if match is None:
        return record
    title = match.group(match.lastindex or 1).strip()
    if title.startswith('"') and title.endswith('"'):
        title = title[1:-1]
    if record.source in ("child", "bedtime", "campfire") and draw.random() < 0.5:
        title = f'"{title}"'
    return Record(record.source, draw.choice(templates).format(title=title, **match.groupdict()), record.text)


def _tiny_request(record: Record, draw: random.Random) -> Record:
    continued = _CONTINUED.match(record.prompt)
    story = f"{continued.group(1).strip()} {record.text}" if continued else record.text
    kind = draw.choices(("kept", "hero", "words", "opening", "plain"), (30, 30, 18, 10, 12))[0]
    if kind == "hero":
        hero = _HERO.search(story[:400])
        if hero:
            return Record("tiny", draw.choice(HERO).format(hero=hero.group(1)), story)
    if kind == "words":
        words = list(dict.fromkeys(word for word in _WORD.findall(story) if word not in _DULL))
        if len(words) >= 4:
            *most, last = draw.sample(words, draw.choice((2, 3, 3, 3)))
            return Record("tiny", draw.choice(WORDS).format(words=f"{', '.join(most)} and {last}"), story)
    if kind == "opening":
        opening, rest = split_after_sentences(story, draw.choice((1, 2, 2, 3)))
        if rest:
            return Record("tiny", draw.choice(OPENING).format(opening=opening), rest)
    if kind == "plain":
        return Record("tiny", draw.choice(PLAIN), story)
    return record


def split_after_sentences(text: str, count: int) -> tuple[str, str]:
    """Return the first `count` sentences and the rest (possibly empty)."""
    ends = [match.start() for match in _SENTENCE_END.finditer(text)]
    if len(ends) < count:
        return text, ""
    cut = ends[count - 1]
    return text[:cut], text[cut:].strip()


def split_late(record: Record, draw: random.Random) -> list[Record]:
    """Yield requests to continue a record too long for a row, with complete answers from later and later paragraphs.

    The shortest answers come last; the caller takes the first that fits. The start is drawn, so passes differ.
    """
    gap = "\n\n" if "\n\n" in record.text else "\n"
    paragraphs = [paragraph for paragraph in record.text.split(gap) if paragraph.strip()]
    starts = list(range(1, len(paragraphs)))
    first = draw.randrange(max(1, len(starts) // 2)) if starts else 0
    template = draw.choice(OPENING if record.source in _STORIES else OPENING_OF_TEXT)
    return [
        Record(
            record.source,
            template.format(opening=paragraphs[start - 1].strip()),
            gap.join(paragraphs[start:]),
        )
        for start in starts[first:]
    ]
