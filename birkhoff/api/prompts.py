"""What callers pass in: prompts, token ids, options; and the text side of one request."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from birkhoff.capture.spec import Capture
from birkhoff.config import V4Config
from birkhoff.errors import OptionError, PromptError, TokenError, quoted
from birkhoff.text.stop import StopMatcher
from birkhoff.text.stream import IncrementalDecoder
from birkhoff.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Captures = Capture | Sequence[Capture | None] | None  # one for all prompts, or one per prompt
_ARRAYS = (torch.Tensor, np.ndarray)


class TextStream:
    """Token ids to text for one request: whole characters only, stop strings taken out.

    The first `min_tokens` tokens cannot end an answer, so no stop string is looked for in their text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int = 0):
        self._decoder, self._matcher = IncrementalDecoder(tokenizer, skip_special=True), StopMatcher(stops)
        self._safe = min_tokens
        self.text = ""

    def feed(self, token_id: int) -> tuple[str, bool]:
        piece = self._decoder.feed(token_id)
        if self._safe:
            self._safe -= 1
        else:
            piece = self._matcher.feed(piece)
        self.text += piece
        return piece, self._matcher.matched is not None

    def finish(self) -> str:
        piece = self._matcher.feed(self._decoder.finish()) + self._matcher.finish()
        self.text += piece
        return piece


def is_single(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, _ARRAYS) and prompts.ndim == 2:
        return False
    items = _as_list(prompts)
    return len(items) > 0 and not isinstance(items[0], (str, Sequence, *_ARRAYS))


def _as_list(values: Any) -> list[Any]:
    """A list, tuple, range, or array of one axis; bytes are numbers too, but never token ids."""
    if isinstance(values, _ARRAYS) and values.ndim == 1:
        return values.tolist()
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes, bytearray, memoryview)):
        return list(values)
    kind = f"an array of {values.ndim} axes" if isinstance(values, _ARRAYS) else f"a {type(values).__name__}"
    raise PromptError(
        f"{kind} was given where a list of token ids was expected. Text goes into generate, chat and stream as str "
        "(decode bytes first); elsewhere encode it with engine.tokenizer.encode."
    )


def check_ids(token_ids: Sequence[int], config: V4Config) -> list[int]:
    """Token ids as whole numbers of this model's vocabulary."""
    ids, last = _as_list(token_ids), config.vocab_size - 1
    if not ids:
        raise PromptError("the list of token ids is empty. Pass at least one id.")
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise TokenError(
                f"token_ids[{place}] is {quoted(token)}, expected a whole number from 0 to {last}. "
                "Text goes in as one string, or through engine.tokenizer.encode."
            )
        if not 0 <= int(token) <= last:
            raise TokenError(
                f"token_ids[{place}] is {quoted(token)}, this model has ids 0..{last}. "
                "Was the text encoded with another model's tokenizer?"
            )
    if len(ids) > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise PromptError(f"{len(ids)} tokens, the model's limit is {limit}. Shorten the text or cut it in parts.")
    return [int(token) for token in ids]


def not_built(name: str, value: object) -> None:
    if value is not None:
        raise OptionError(f"{name} is not built yet. Leave it out.")


def per_prompt(capture: Captures, prompts: int) -> list[Capture | None]:
    """One capture for each prompt: the same for all, or as many as there are prompts."""
    if capture is None or isinstance(capture, Capture):
        return [capture] * prompts
    if not isinstance(capture, Sequence) or not all(c is None or isinstance(c, Capture) for c in capture):
        raise OptionError(f"capture is {quoted(capture)}, expected a Capture or a list with one for each prompt.")
    if len(capture) != prompts:
        raise OptionError(f"capture has {len(capture)} entries for {prompts} prompts. Give one Capture, or one each.")
    return list(capture)
