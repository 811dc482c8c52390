"""Read the corpus: records of a request and an answer, in xz-compressed JSON Lines.

One record is `{"source", "prompt", "text"}`. The corpus is four training parts and two held-out files with fixed
names. *Core* is what the model is evaluated on (stories, tinystories, smalltalk); *general* has harder words and is
used in early training only. Held-out files are used neither for training nor for the tokenizer.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from birkhoff.errors import OptionError, PromptError

TRAIN_FILES = {
    "stories": "stories-train.jsonl.xz",
    "tinystories": "tinystories-train.jsonl.xz",
    "smalltalk": "smalltalk.jsonl",
    "general": "general-train.jsonl.xz",
}
HELD_OUT_FILES = {"stories": "stories-val.jsonl.xz", "tinystories": "tinystories-val.jsonl.xz"}
CORE_PARTS = ("stories", "tinystories")


@dataclass(frozen=True)
class Record:
    """One request and its answer; `source` names the sub-corpus."""

    source: str
    prompt: str
    text: str


@dataclass(frozen=True)
class Corpus:
    core: tuple[Record, ...]
    general: tuple[Record, ...]
    smalltalk: tuple[Record, ...]
    held_out: dict[str, tuple[Record, ...]]


def read_corpus(folder: str | Path) -> Corpus:
    """Read all six files in `folder`; each must exist."""
    folder = Path(folder)
    expected = [*TRAIN_FILES.values(), *HELD_OUT_FILES.values()]
    missing = [name for name in expected if not (folder / name).is_file()]
    if missing:
        raise OptionError(
            f"--data {folder} lacks {', '.join(missing)}; expected a folder with {', '.join(expected)}."
        )
    parts = {part: tuple(read_records(folder / name)) for part, name in TRAIN_FILES.items()}
    return Corpus(
        core=tuple(record for part in CORE_PARTS for record in parts[part]),
        general=parts["general"],
        smalltalk=parts["smalltalk"],
        held_out={part: tuple(read_records(folder / name)) for part, name in HELD_OUT_FILES.items()},
    )


def read_records(path: str | Path) -> Iterator[Record]:
    path = Path(path)
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                raw = json.loads(line)
                record = Record(raw["source"], raw["prompt"], raw["text"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise PromptError(
                    f"{path.name} line {number} is no record ({error!r}); expected an object with source, "
                    "prompt and text. Restore the file from its source."
                ) from None
            if not record.prompt.strip() or not record.text.strip():
                raise PromptError(f"{path.name} line {number} has an empty prompt or text. Remove the line.")
            yield record
