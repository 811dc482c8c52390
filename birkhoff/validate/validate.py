"""`validate(a, b)`: is this checkpoint, build or port right, and if not, where and why.

A is held against B: another checkpoint, the `transformers` oracle over the same weights, or goldens. One forward pass
of each over the same tokens, every site compared, then the logits; outside its gate the seven known mistakes are tried
one by one on whatever side can be run. The first thing to look at is the first diverging site, the second the
explanation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from birkhoff.embedded import EMBEDDED
from birkhoff.errors import OptionError, TokenError
from birkhoff.model.transformer import Transformer
from birkhoff.validate.compare import Comparison, compare
from birkhoff.validate.faults import explain
from birkhoff.validate.gates import gate_named, usual_gate
from birkhoff.validate.goldens import read_goldens, save_goldens
from birkhoff.validate.oracle import run_oracle
from birkhoff.validate.runs import Run, build, random_tokens, run_model
from birkhoff.weights.checkpoint import Checkpoint, open_checkpoint

LENGTH = 192  # past one block of 128, past the sliding windows of small models, and not a multiple of 4


def validate(
    a: str | Path,
    b: str | Path | None = None,
    *,
    oracle: str | None = None,
    goldens: str | Path | None = None,
    save: str | Path | None = None,
    tokens: Sequence[int] | None = None,
    length: int = LENGTH,
    seed: int = 0,
    dtype: str = "float32",
    against_dtype: str | None = None,
    numerics: str = "plain",
    gate: str | None = None,
    explanations: bool = True,
    device: str = "cpu",
) -> Comparison | None:
    """Compare A with exactly one of B, an oracle or goldens. None when goldens were only made."""
    others = [x for x in (b, oracle, goldens) if x is not None]
    if len(others) > 1 or (not others and save is None):
        raise OptionError(
            "compare with one thing: another checkpoint, --oracle transformers or --goldens DIR."
        )
    if oracle not in (None, "transformers"):
        raise OptionError(f"oracle is {oracle!r}, expected transformers.")
    if type(length) is not int or not 1 <= length <= 1 << 20:
        raise OptionError(f"length is {length!r}, expected 1 to 1048576 tokens.")
    first = open_checkpoint(_path(a))
    held = read_goldens(goldens) if goldens is not None else None
    ids = _tokens(first, held, tokens, length, seed)
    model = build(first, dtype, numerics, device)
    ours = run_model(model, ids, str(a))
    if save is not None:
        save_goldens(ours, save)
        if not others:
            return None
    against = against_dtype or dtype
    other: Transformer | None = None
    if held is not None:
        theirs = held
    elif oracle is not None:
        theirs, against = run_oracle(first, ids), "float32"
    else:
        assert b is not None
        other = build(open_checkpoint(_path(b)), against, numerics, device)
        theirs = run_model(other, ids, str(b))
    chosen = gate_named(gate) if gate is not None else usual_gate(dtype, against)
    result = compare(ours, theirs, chosen, first.config, _biases(first))
    if not result.ok and explanations:
        # Mistakes built into the trusted side reproduce a faulty A; where B cannot be run, they are built into A.
        sides = [(other, theirs, ours)] if other is not None else []
        for runnable, plain, aim in [*sides, (model, ours, theirs)]:
            result.explanations = explain(runnable, plain, aim)
            if result.explanations:
                break
    return result


def _biases(checkpoint: Checkpoint) -> dict[int, torch.Tensor]:
    names = {layer: f"layers.{layer}.ffn.gate.bias" for layer in range(checkpoint.config.num_hidden_layers)}
    return {layer: checkpoint[name].read().float() for layer, name in names.items() if name in checkpoint}


def _path(model: str | Path) -> Path:
    return EMBEDDED / "nano" if model == "nano" else Path(model)


def _tokens(
    checkpoint: Checkpoint, held: Run | None, tokens: Sequence[int] | None, length: int, seed: int
) -> list[int]:
    size = checkpoint.config.vocab_size
    if held is not None:
        if tokens is not None:
            raise OptionError("goldens bring their own tokens; leave --tokens away.")
        ids = list(held.tokens)
    elif tokens is not None:
        ids = list(tokens)
    else:
        ids = random_tokens(size, min(length, checkpoint.config.max_position_embeddings), seed)
    bad = [token for token in ids if type(token) is not int or not 0 <= token < size]
    if bad or not ids:
        raise TokenError(f"token id {bad[0] if bad else None!r} is outside the vocabulary of {size}.")
    return ids
