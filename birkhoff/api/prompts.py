"""What callers pass in: prompts, token ids, captures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from birkhoff.capture.planner import CaptureRequestSpec
from birkhoff.capture.spec.request import Capture
from birkhoff.config import V4Config
from birkhoff.errors import ContextError, OptionError, PromptError, TokenError, quoted

Prompt = str | Sequence[int]
Captures = (
    CaptureRequestSpec | Sequence[CaptureRequestSpec | None] | None
)  # one for all prompts, or one per prompt
_ARRAYS = (torch.Tensor, np.ndarray)


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
    kind = f"an array of {values.ndim} axes" if isinstance(values, _ARRAYS) else type(values).__name__
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
        raise ContextError(
            f"{len(ids)} tokens, the model's limit is {limit}. Shorten the text or cut it in parts."
        )
    return [int(token) for token in ids]


def not_built(name: str, value: object) -> None:
    if value is not None:
        raise OptionError(f"{name} is not built yet. Leave it out.")


def per_prompt(capture: Captures, prompts: int) -> list[CaptureRequestSpec | None]:
    """One capture for each prompt: the same for all, or as many as there are prompts."""
    if capture is None or isinstance(capture, (Capture, Mapping)):
        return [capture] * prompts
    if not isinstance(capture, Sequence) or not all(
        c is None or isinstance(c, (Capture, Mapping)) for c in capture
    ):
        raise OptionError(
            f"capture is {quoted(capture)}, expected a Capture or a list with one for each prompt."
        )
    if len(capture) != prompts:
        raise OptionError(
            f"capture has {len(capture)} entries for {prompts} prompts. Give one Capture, or one each."
        )
    return list(capture)


def room_for(ids: Sequence[int], max_context: int) -> int:
    """How many tokens may follow a prompt; one that leaves no room is refused."""
    if len(ids) >= max_context:
        raise ContextError(
            f"the prompt has {len(ids)} tokens, the context holds {max_context} and an answer "
            "needs at least one. Shorten the prompt or load with a larger max_context."
        )
    return max_context - len(ids)
