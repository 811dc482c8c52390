"""Generate text during training: many conversations at once, one whole forward pass per token.

There is no cache, so it is slow per token, but it uses the compiled training graphs: samples take seconds on the
device and need no compilation. Each sample has its own seed and does not depend on the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training.corpus import Record
from training.data import Conversation, Markers, encode_conversations
from training.forward import Forward, still


class Ask(NamedTuple):
    prompt: str
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0
    system: str = ""


CHAT = tuple(
    Ask(prompt, temperature, seed)
    for prompt in ("Hello!", "Who are you?", "What color is the sky?", "What is 2 plus 3?")
    for temperature, seed in ((0.0, 0), (0.8, 1))
)


def generate(
    forward: Forward,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    asks: list[Ask],
    batch: int,
    stream_dtype: torch.dtype,
    longest: int = 200,
    top_k: int = 40,
) -> list[dict]:
    """Return one answer per request: text, number of tokens, and whether it ended with EOS."""
    out: list[dict] = []
    for start in range(0, len(asks), batch):
        out += _together(
            forward, weights, tokenizer, asks[start : start + batch], batch, stream_dtype, longest, top_k
        )
    return out


def _together(
    forward: Forward,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    asks: list[Ask],
    batch: int,
    stream_dtype: torch.dtype,
    longest: int,
    top_k: int,
) -> list[dict]:
    markers, device = Markers.of(tokenizer), forward.device
    prompts = encode_conversations(
        tokenizer, markers, [Conversation((Record("", a.prompt, ""),), a.system) for a in asks]
    )
    rows = [ids[:-1].tolist() for ids, _ in prompts]  # drop the EOS of the empty answer
    lengths = [len(row) for row in rows]
    ids = torch.full((batch, forward.length), markers.pad, device=device)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens, device=device)
    draws = [torch.Generator().manual_seed(ask.seed) for ask in asks]
    knobs, done = still(device), [False] * len(asks)
    for _ in range(longest):
        trunk = forward.trunk(weights, ids, ids != markers.pad, knobs, stream_dtype)
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        hidden = trunk.hidden.detach()[torch.arange(len(rows), device=device), last]
        logits = F.linear(hidden.float(), weights["head.weight"].detach().float()).cpu()
        for row, ask in enumerate(asks):
            if done[row]:
                continue
            token = _pick(logits[row], ask.temperature, top_k, draws[row])
            rows[row].append(token)
            done[row] = token == markers.eos or len(rows[row]) >= forward.length
            ids[row, len(rows[row]) - 1] = token
        if all(done):
            break
    return [
        {
            "prompt": ask.prompt,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "tokens": len(row) - length,
            "ended": row[-1] == markers.eos,
            "text": tokenizer.decode(row[length:], skip_special_tokens=True),
        }
        for ask, row, length in zip(asks, rows, lengths)
    ]


def _pick(logits: Tensor, temperature: float, top_k: int, draw: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    values, places = logits.topk(min(top_k, logits.shape[-1]))
    return int(places[torch.multinomial((values / temperature).softmax(-1), 1, generator=draw)])
