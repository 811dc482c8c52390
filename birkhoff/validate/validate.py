"""`validate(a, b)`: check a checkpoint, build or port, and locate and explain a difference.

A is compared with a reference: another checkpoint, the `transformers` oracle over the same weights, or goldens. Each
runs one forward pass over the same tokens; every site and the logits are compared, those of the MTP block too. Outside
the gate, the known mistakes are tried on a side that can be run. Look first at the first diverging site, then at the
explanation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from birkhoff.api.load import load_tokenizer
from birkhoff.config import V4Config
from birkhoff.errors import OptionError, TokenError
from birkhoff.hooks.sites import BY_NAME
from birkhoff.model.transformer import Transformer
from birkhoff.option_checks import as_int, check_int
from birkhoff.validate.compare import Comparison, Explanation, SiteComparison, compare
from birkhoff.validate.faults import explain, explain_mtp
from birkhoff.validate.gates import default_gate, find_gate, type_bits
from birkhoff.validate.goldens import read_goldens, save_goldens
from birkhoff.validate.oracle import run_oracle
from birkhoff.validate.runs import MTP, ForwardRun, build, random_tokens, run_model
from birkhoff.weights.checkpoint import Checkpoint, open_checkpoint
from birkhoff.weights.locate import locate
from birkhoff.weights.tensor_ref import TensorRef

LENGTH = 194  # more than one block of 128 and the sliding window of small models, not a multiple of 4
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "compress_ratios",
    "n_routed_experts",
    "num_experts_per_tok",
    "hc_mult",
)
NOT_COMPUTED_WITH = (
    "max_position_embeddings",
    "num_nextn_predict_layers",
    "bos_token_id",
    "eos_token_id",
    "expert_dtype",
)
MOST_TOKENS = 512  # a default length grows up to this so that the indexer has to choose


def validate(
    a: str | Path,
    b: str | Path | None = None,
    *,
    oracle: str | None = None,
    goldens: str | Path | None = None,
    save: str | Path | None = None,
    save_form: str = "safetensors",
    tokens: Sequence[int] | None = None,
    text: str | None = None,
    length: int | None = None,
    seed: int = 0,
    dtype: str = "float32",
    against_dtype: str | None = None,
    numerics: str = "plain",
    gate: str | None = None,
    explanations: bool = True,
    device: str = "cpu",
) -> Comparison | None:
    """Compare A with exactly one of B, an oracle or goldens. Returns None if goldens were only saved.

    `length`: number of random tokens if neither `tokens`, `text` nor goldens give them; default: `default_length`. Of a
    text, which A's tokenizer encodes, as many tokens are run."""
    others = [x for x in (b, oracle, goldens) if x is not None]
    if len(others) > 1 or (not others and save is None):
        raise OptionError(
            "compare with one thing: another checkpoint, --oracle transformers or --goldens DIR."
        )
    if oracle not in (None, "transformers"):
        raise OptionError(f"oracle is {oracle!r}, expected transformers.")
    requested_gate = find_gate(gate) if gate is not None else None
    first = open_checkpoint(locate(a))
    second = open_checkpoint(locate(b)) if b is not None else None
    settings = _other_settings(first.config, second.config) if second is not None else []
    reference = read_goldens(goldens) if goldens is not None else None
    if reference is not None and reference.mtp is not None and not first.has_mtp:
        raise OptionError(
            f"{goldens} holds arrays of the MTP block, and {a} has none. Leave the files mtp.* away, or give a "
            "checkpoint with an MTP block."
        )
    ids = checked_tokens(first, reference, tokens, text, length, seed)
    model = build(first, dtype, numerics, device)
    ours = run_model(model, ids, str(a))
    if save is not None:
        save_goldens(ours, save, save_form)
        if not others:
            return None
    against = against_dtype or dtype
    other: Transformer | None = None
    rounded: str | None = None
    if reference is not None:
        theirs = reference
    elif oracle is not None:
        theirs, against = run_oracle(first, ids), "float32"
    else:
        assert second is not None
        rounded = _rounded_type(first, second)
        other = build(second, against, numerics, device)
        theirs = run_model(other, ids, str(b))
    other_code = other is None and numerics == "released"
    chosen = requested_gate or default_gate(dtype, against, rounded, other_code, text is not None)
    result = compare(ours, theirs, chosen, first.config, router_biases(first))
    result.notes += settings
    if requested_gate is None and rounded is not None and type_bits(rounded) < 4:
        result.notes.append(f"no tolerances were measured for {rounded}: those of 4-bit types were used")
    if not result.ok and explanations:
        # Mistakes built into the reference reproduce a faulty A; a reference that cannot be run: built into A.
        sides = [(other, theirs, ours)] if other is not None else []
        for runnable, plain, target in [*sides, (model, ours, theirs)]:
            if not any(explanation.complete for explanation in result.explanations):
                found = _explain(runnable, plain, target, result)
                result.explanations = found or result.explanations
    return result


def _explain(
    model: Transformer, plain: ForwardRun, target: ForwardRun, result: Comparison
) -> list[Explanation]:
    """Explain the difference of the trunk; where the trunks agree, that of the MTP block."""
    if not result.trunk_ok:
        return explain(model, plain, target, _layer_of(result.diverging))
    return [] if plain.mtp is None or target.mtp is None else explain_mtp(model, plain, target.mtp)


def _layer_of(first: SiteComparison | None) -> int | None:
    """The layer that computes the first diverging site; None for the embedding and for the head."""
    if first is None:
        return None
    if first.site == "mhc_streams_pre_attn":
        return first.layer - 1 if first.layer > 0 else None
    return first.layer if first.site == "mhc_streams_final" or not BY_NAME[first.site].once else None


def _other_settings(first: V4Config, second: V4Config) -> list[str]:
    """Return notes on values of the configs that differ; models of different sizes are refused."""
    notes = []
    for field in fields(V4Config):
        ours, theirs = getattr(first, field.name), getattr(second, field.name)
        if not field.compare or field.name in NOT_COMPUTED_WITH or ours == theirs:
            continue
        if field.name in SIZES:
            raise OptionError(
                f"these models differ in size: {field.name} is {ours} and {theirs}. Compare checkpoints of one model."
            )
        notes.append(f"the configs differ: {field.name} is {ours} and {theirs}")
    return notes


def default_length(config: V4Config) -> int:
    """Return LENGTH, or more tokens if at most MOST_TOKENS suffice for the indexer to leave blocks out."""
    choosing = 4 * config.index_topk + 34
    return choosing if LENGTH < choosing <= MOST_TOKENS else LENGTH


def _rounded_type(first: Checkpoint, second: Checkpoint) -> str | None:
    """The coarsest type that rounds (Q8_0 and other GGUF blocks, F16) and stores a tensor of one side only.

    FP8, FP4, bfloat16 and float32 hold the values they were converted from, or are what was released."""

    def rounding(tensor: TensorRef) -> str:
        stored = tensor.encoding or tensor.dtype
        return stored if stored.startswith(("Q", "IQ", "TQ", "F16")) else ""

    pairs = {(rounding(first[name]), rounding(second[name])) for name in first if name in second}
    types = {stored for pair in pairs if pair[0] != pair[1] for stored in pair if stored}
    return min(types, key=type_bits, default=None)


def router_biases(checkpoint: Checkpoint) -> dict[int, torch.Tensor]:
    """Return the biases of the routers by layer, where there is one."""
    names = {layer: f"layers.{layer}.ffn.gate.bias" for layer in range(checkpoint.config.num_hidden_layers)}
    names[MTP] = "mtp.0.ffn.gate.bias"
    return {layer: checkpoint[name].read().float() for layer, name in names.items() if name in checkpoint}


def checked_tokens(
    checkpoint: Checkpoint,
    reference: ForwardRun | None,
    tokens: Sequence[int] | None,
    text: str | None,
    length: int | None,
    seed: int,
    room: int = 0,
) -> list[int]:
    """Return the token ids to run: those of goldens, those given, or random ones that leave `room` in the context."""
    size = checkpoint.config.vocab_size
    if length is not None:
        check_int("length", length, 1, 1 << 20)
    if tokens is not None and text is not None:
        raise OptionError(
            "tokens and a text were given, expected one of them: leave --tokens or --text away."
        )
    if reference is not None:
        if tokens is not None or text is not None:
            raise OptionError("goldens bring their own tokens; leave --tokens and --text away.")
        ids = list(reference.tokens)
    elif tokens is not None:
        ids = list(tokens)
    elif text is not None:
        ids = _encoded(checkpoint, text)[: default_length(checkpoint.config) if length is None else length]
    else:
        count = default_length(checkpoint.config) if length is None else length
        ids = random_tokens(size, min(count, checkpoint.config.max_position_embeddings - room), seed)
    bad = [token for token in ids if as_int(token) is None or not 0 <= token < size]
    if bad or not ids:
        raise TokenError(f"token id {bad[0] if bad else None!r} is outside the vocabulary of {size}.")
    return ids


def _encoded(checkpoint: Checkpoint, text: str) -> list[int]:
    """The tokens of a text, after the token that begins every one."""
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise OptionError(
            f"{checkpoint.path} has no tokenizer to encode the text with. Give token ids: --tokens FILE."
        )
    ids = tokenizer.encode(text)
    if not ids:
        raise OptionError(
            "the text is empty, expected at least one token. Give another file, or leave --text away."
        )
    first = checkpoint.config.bos_token_id
    return list(ids) if first is None else [first, *ids]
