"""Vectors captured from the official API: what a checkpoint must say, token by token (the `official.vec` grammar).

    case ID CONTEXT STEPS PROMPT-FILE
    step I SELECTED-HEX N          then N lines
    top HEX LOGPROB
    end

Lines beginning with # are comments. Tokens are hex of raw bytes, so tokens are compared by bytes and never by id. A
step holds when the likeliest token has the selected bytes, every listed token is among our 20 likeliest, and
log-probabilities differ by at most 4. The prompt is a user's message in chat mode with an empty system prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.errors import DataError, OptionError, quoted

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

TOP = 20
LARGEST_GAP = 4.0
SENTINEL = -9999.0  # "not reported"
_MAX_STEPS = 10_000


@dataclass(frozen=True)
class OfficialStep:
    selected: bytes
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True)
class Case:
    name: str
    context: int
    prompt_file: str
    steps: tuple[OfficialStep, ...]


@dataclass(frozen=True)
class StepCheck:
    """How one step went."""

    case: str
    step: int
    argmax: bool
    listed: bool
    gap: float

    @property
    def ok(self) -> bool:
        return self.argmax and self.listed and self.gap <= LARGEST_GAP


def read_vectors(path: str | Path) -> list[Case]:
    """Parse a file; everything wrong is an error with its line."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}). Give an official.vec file.") from None
    reader = _Lines(path.name, lines)
    cases: list[Case] = []
    while (words := reader.next()) is not None:
        name, context, steps, prompt = reader.fields(words, "case", 4)
        count = reader.whole(steps, _MAX_STEPS)
        cases.append(Case(name, reader.whole(context), prompt, tuple(_step(reader, i) for i in range(count))))
        reader.fields(reader.next(), "end", 0)
    if not cases:
        raise DataError(f"{path.name} holds no case. Expected lines as in: case ID CONTEXT STEPS PROMPT-FILE")
    return cases


def _step(reader: _Lines, number: int) -> OfficialStep:
    index, selected, count = reader.fields(reader.next(), "step", 3)
    if reader.whole(index) != number:
        reader.refuse(f"step {index} follows step {number - 1}")
    chosen = reader.bytes(selected)
    top = []
    for _ in range(reader.whole(count, 1000)):
        token, value = reader.fields(reader.next(), "top", 2)
        top.append((reader.bytes(token), reader.number(value)))
    return OfficialStep(chosen, tuple(pair for pair in top if pair[1] != SENTINEL))


class _Lines:
    def __init__(self, name: str, lines: list[str]):
        self.name = name
        self.lines = lines
        self.at = 0

    def next(self) -> list[str] | None:
        while self.at < len(self.lines):
            self.at += 1
            line = self.lines[self.at - 1].strip()
            if line and not line.startswith("#"):
                return line.split()
        return None

    def refuse(self, why: str) -> Any:
        raise DataError(
            f"{self.name} line {self.at}: {why}. See the grammar in the documentation of validate."
        )

    def fields(self, words: list[str] | None, head: str, count: int) -> list[str]:
        if words is None or words[0] != head or len(words) != count + 1:
            seen = "the end of the file" if words is None else quoted(" ".join(words))
            self.refuse(f"{seen} where {head!r} with {count} words was expected")
        assert words is not None
        return words[1:]

    def whole(self, word: str, most: int = 1 << 24) -> int:
        if not word.isdecimal() or len(word) > 9 or int(word) > most:
            self.refuse(f"{quoted(word)} is no whole number up to {most}")
        return int(word)

    def number(self, word: str) -> float:
        try:
            return float(word)
        except ValueError:
            return self.refuse(f"{quoted(word)} is no number")

    def bytes(self, word: str) -> bytes:
        try:
            return bytes.fromhex(word)
        except ValueError:
            return self.refuse(f"{quoted(word)} is not hex")


def hold(engine: Engine, cases: list[Case], prompts: str | Path) -> list[StepCheck]:
    """Run every case, each step after the official tokens before it."""
    if engine.tokenizer is None:
        raise OptionError("official vectors compare text, and this checkpoint has no tokenizer.")
    ids_of: dict[bytes, int] = {}
    for token in range(engine.tokenizer.vocab_size):
        ids_of.setdefault(engine.tokenizer.piece(token), token)
    out = []
    for case in cases:
        file = Path(prompts) / Path(case.prompt_file).name
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"case {case.name}: {file} cannot be read ({error}).") from None
        prompt = engine.encode_chat([{"role": "user", "content": text}])
        forced: list[int] = []
        for number, step in enumerate(case.steps):
            logits = engine.logits([*prompt, *forced])[-1]
            out.append(_held(engine, case.name, number, step, logits))
            if step.selected not in ids_of:
                raise DataError(
                    f"case {case.name} step {number}: this tokenizer has no token {step.selected!r}."
                )
            forced.append(ids_of[step.selected])
    return out


def _held(engine: Engine, case: str, number: int, step: OfficialStep, logits: torch.Tensor) -> StepCheck:
    values = logits.double().log_softmax(-1)
    ours = {
        engine.tokenizer.piece(int(i)): float(values[i]) for i in values.topk(min(TOP, len(values))).indices
    }
    best = engine.tokenizer.piece(int(values.argmax()))
    listed = all(token in ours for token, _ in step.top)
    gap = max((abs(ours[token] - value) for token, value in step.top if token in ours), default=0.0)
    return StepCheck(case, number, best == step.selected, listed, gap)
