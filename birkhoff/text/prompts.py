"""Prompts as users pass them (text, token ids or chat messages) and the checks of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from birkhoff.config import ModelConfig
from birkhoff.errors import ContextError, PromptError, TokenError, quoted
from birkhoff.option_checks import as_int
from birkhoff.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
_ARRAYS = (torch.Tensor, np.ndarray)


def is_single(prompts: Any) -> bool:
    """Whether `prompts` is one prompt (a text, token ids or chat messages) rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, _ARRAYS) and prompts.ndim == 2:
        return False
    items = _as_list(prompts)
    return len(items) > 0 and not isinstance(items[0], (str, Sequence, *_ARRAYS))


def is_messages(prompt: Any) -> bool:
    """Whether a prompt is a conversation: a list of chat messages."""
    items = (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, (str, bytes, bytearray, memoryview))
        and prompt
    )
    return bool(items) and isinstance(prompt[0], Mapping)


def check_ids(token_ids: Any, config: ModelConfig) -> list[int]:
    """Return token ids as a list of ints within the model's vocabulary and context; raise a `PromptError` or
    `TokenError` otherwise."""
    ids, last = _as_list(token_ids), config.vocab_size - 1
    if not ids:
        raise PromptError("the list of token ids is empty. Pass at least one id.")
    plain = set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= last  # one by one is slow
    for index, token in enumerate(() if plain else ids):
        value = as_int(token)
        if value is None:
            raise TokenError(
                f"token_ids[{index}] is {quoted(token)}, expected a whole number from 0 to {last}. "
                "Text goes in as one string, or through engine.tokenizer.encode."
            )
        if not 0 <= value <= last:
            raise TokenError(
                f"token_ids[{index}] is {quoted(token)}, this model has ids 0..{last}. "
                "Was the text encoded with another model's tokenizer?"
            )
    limit = config.max_position_embeddings
    if len(ids) > limit:
        raise ContextError(
            f"{len(ids)} tokens, the model's limit is {limit}. Shorten the text or cut it in parts."
        )
    return [int(token) for token in ids]


def check_length(characters: int, tokenizer: Tokenizer, max_tokens: int) -> None:
    """Raise `ContextError` for a text that cannot have at most `max_tokens` tokens, whatever it says."""
    least = tokenizer.least_tokens(characters)
    if least > max_tokens:
        raise ContextError(
            f"the text has {characters} characters, at least {least} tokens; the model's limit is {max_tokens}. "
            "Shorten the text or cut it in parts."
        )


def room_for(ids: Sequence[int], max_context: int, prompt_only: bool = False) -> int:
    """How many tokens can follow a prompt; raises `ContextError` when there is room for none, or with `prompt_only`
    when the prompt itself does not fit."""
    room = max_context - len(ids)
    if room < 0 or (room == 0 and not prompt_only):
        answer = "" if prompt_only else " and an answer needs at least one"
        raise ContextError(
            f"the prompt has {len(ids)} tokens, the context holds {max_context}{answer}. "
            "Shorten the prompt or load with a larger max_context."
        )
    return room


def _as_list(values: Any) -> list[Any]:
    """A list, tuple, range or one-dimensional array as a list. Bytes are sequences of ints, but not token ids."""
    if isinstance(values, _ARRAYS) and values.ndim == 1:
        items: list[Any] = values.tolist()
        return items
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes, bytearray, memoryview)):
        return list(values)
    kind = f"an array of {values.ndim} axes" if isinstance(values, _ARRAYS) else type(values).__name__
    raise PromptError(
        f"{kind} was given where a prompt was expected: a text (decode bytes first), a list of token ids, or a list of "
        "chat messages."
    )
