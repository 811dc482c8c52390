"""Compare greedy answers of two builds: length of the common prefix, and the logit gap where they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from birkhoff.errors import OptionError

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

PROMPTS = ("What is 1+1?", "Say 1 to 100 then backwards", "Say 1 to 1000")


@dataclass(frozen=True)
class GreedyResult:
    """`same` of `tokens` tokens agree; `gap` separates the second build's two best logits where they differ."""

    prompt: str
    tokens: int
    same: int
    gap: float | None

    @property
    def ok(self) -> bool:
        return self.same == self.tokens


def compare_greedy(
    first: Engine, second: Engine, prompts: tuple[str, ...] = PROMPTS, max_tokens: int = 100
) -> list[GreedyResult]:
    """Answer chat prompts at temperature 0 with EOS ignored, and compare the token ids."""
    if first.tokenizer is None or second.tokenizer is None:
        raise OptionError("comparing answers needs a tokenizer in both checkpoints.")
    out = []
    for prompt in prompts:
        ids = first.encode_chat([{"role": "user", "content": prompt}])
        ours, theirs = (
            list(engine.generate(ids, max_tokens=max_tokens, temperature=0, ignore_eos=True).token_ids)
            for engine in (first, second)
        )
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        gap = None
        if same < len(theirs):
            two = second.logits([*ids, *theirs[:same]])[-1].topk(2).values
            gap = float(two[0] - two[1])
        out.append(GreedyResult(prompt, len(theirs), same, gap))
    return out
