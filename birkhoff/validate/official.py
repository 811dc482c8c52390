"""Check a checkpoint against vectors captured from the official API (the `official.vec` grammar).

    case ID CONTEXT STEPS PROMPT-FILE
    step I SELECTED-HEX N          then N lines
    top HEX LOGPROB
    end

Lines that start with # are comments. Tokens are written as hex bytes and compared by bytes, not by id. A step passes
if the most likely token has the selected bytes, every listed token is among our 20 most likely, and log-probabilities
differ by at most 4. The prompt is a user message in chat mode with an empty system prompt. Markers such as the end of
the answer are written as the bytes of their names. The steps of `UNJUDGED` cases are reported and not judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from birkhoff.errors import DataError, OptionError, quoted
from birkhoff.small_file import MANIFEST_BYTES, read_text

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

TOP_TOKENS = 20
MAX_LOGPROB_GAP = 4.0
NOT_REPORTED = -9999.0
UNJUDGED = ("long_memory_archive",)  # the hosted API and the released reference code differ on it
_MAX_STEPS = 10_000


@dataclass(frozen=True)
class ReferenceStep:
    """One generated token of the official API, with the log-probabilities it reported."""

    selected: bytes
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True)
class ReferenceCase:
    """One prompt and its steps."""

    name: str
    context: int
    prompt_file: str
    steps: tuple[ReferenceStep, ...]


@dataclass(frozen=True)
class StepResult:
    """Result of one step: argmax agrees, all listed tokens in our top 20, largest log-probability gap."""

    case: str
    step: int
    argmax: bool
    listed: bool
    gap: float

    @property
    def judged(self) -> bool:
        return self.case not in UNJUDGED

    @property
    def ok(self) -> bool:
        return self.argmax and self.listed and self.gap <= MAX_LOGPROB_GAP


def read_vectors(path: str | Path) -> list[ReferenceCase]:
    """Parse a file. Errors name the line."""
    path = Path(path)
    try:
        lines = read_text(path, MANIFEST_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}). Give an official.vec file.") from None
    reader = _Lines(path.name, lines)
    cases: list[ReferenceCase] = []
    while (words := reader.next()) is not None:
        name, context, steps, prompt = reader.fields(words, "case", 4)
        count = reader.integer(steps, _MAX_STEPS)
        length = reader.integer(context)
        cases.append(ReferenceCase(name, length, prompt, tuple(_step(reader, i) for i in range(count))))
        reader.fields(reader.next(), "end", 0)
    if not cases:
        raise DataError(f"{path.name} holds no case. Expected lines as in: case ID CONTEXT STEPS PROMPT-FILE")
    return cases


def _step(reader: _Lines, expected: int) -> ReferenceStep:
    index, selected, count = reader.fields(reader.next(), "step", 3)
    if reader.integer(index) != expected:
        reader.fail(f"step {index} follows step {expected - 1}")
    chosen = reader.bytes(selected)
    top = []
    for _ in range(reader.integer(count, 1000)):
        token, value = reader.fields(reader.next(), "top", 2)
        top.append((reader.bytes(token), reader.number(value)))
    return ReferenceStep(chosen, tuple(pair for pair in top if pair[1] != NOT_REPORTED))


class _Lines:
    """Line reader with typed fields; errors carry the line number."""

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

    def fail(self, why: str) -> NoReturn:
        raise DataError(
            f"{self.name} line {self.at}: {why}. See the grammar in the documentation of validate."
        )

    def fields(self, words: list[str] | None, head: str, count: int) -> list[str]:
        if words is None or words[0] != head or len(words) != count + 1:
            seen = "the end of the file" if words is None else quoted(" ".join(words))
            self.fail(f"{seen} where {head!r} with {count} words was expected")
        return words[1:]

    def integer(self, word: str, most: int = 1 << 24) -> int:
        if not word.isdecimal() or len(word) > 9 or int(word) > most:
            self.fail(f"{quoted(word)} is no whole number up to {most}")
        return int(word)

    def number(self, word: str) -> float:
        try:
            return float(word)
        except ValueError:
            self.fail(f"{quoted(word)} is no number")

    def bytes(self, word: str) -> bytes:
        try:
            return bytes.fromhex(word)
        except ValueError:
            self.fail(f"{quoted(word)} is not hex")


def check_vectors(engine: Engine, cases: list[ReferenceCase], prompts: str | Path) -> list[StepResult]:
    """Run every case; each step is conditioned on the official tokens before it."""
    if engine.tokenizer is None:
        raise OptionError("official vectors compare text, and this checkpoint has no tokenizer.")
    token_ids: dict[bytes, int] = {}
    for token in range(engine.tokenizer.vocab_size):
        token_ids.setdefault(_token_bytes(engine, token), token)
    out = []
    for case in cases:
        file = Path(prompts) / Path(case.prompt_file).name
        try:
            text = read_text(file, MANIFEST_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"case {case.name}: {file} cannot be read ({error}).") from None
        prompt = engine.encode_chat([{"role": "user", "content": text}])
        forced: list[int] = []
        for index, step in enumerate(case.steps):
            if step.selected not in token_ids:
                raise DataError(
                    f"case {case.name} step {index}: this tokenizer has no token {step.selected!r}."
                )
            forced.append(token_ids[step.selected])
        if not case.steps:
            continue
        logits = engine.logits([*prompt, *forced[:-1]])[-len(forced) :]  # all steps in one pass
        for index, step in enumerate(case.steps):
            out.append(_check_step(engine, case.name, index, step, logits[index]))
    return out


def _token_bytes(engine: Engine, token: int) -> bytes:
    marker = engine.tokenizer.marker(token)
    return engine.tokenizer.piece(token) if marker is None else marker.encode()


def _check_step(
    engine: Engine, case: str, index: int, step: ReferenceStep, logits: torch.Tensor
) -> StepResult:
    values = logits.double().log_softmax(-1)
    ours = {
        _token_bytes(engine, int(i)): float(values[i])
        for i in values.topk(min(TOP_TOKENS, len(values))).indices
    }
    best = _token_bytes(engine, int(values.argmax()))
    listed = all(token in ours for token, _ in step.top)
    gap = max((abs(ours[token] - value) for token, value in step.top if token in ours), default=0.0)
    return StepResult(case, index, best == step.selected, listed, gap)
