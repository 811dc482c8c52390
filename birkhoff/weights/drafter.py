"""A DSpark drafter in a checkpoint: what it is made of, and why this engine runs the model without it.

V4-Flash-DSpark and V4-Flash-0731 have a block drafter in place of the MTP block, under `mtp.0` to `mtp.2`. The trunk
is complete without it, so such a checkpoint runs, with greedy tokens unchanged and no drafts. `describe` lists the
parts of the drafter that are present, each with what the engine would need for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# part of a tensor's name -> what the engine lacks for it
PARTS = {
    "main_proj": "main_proj: the stream means after layers {targets} of every accepted token, which the engine does "
    "not keep for a drafter",
    "attn.": "draft layers: attention from a block of {block} positions to a window of keys made from those means and "
    "to the whole block in both directions; the engine's attention is causal and makes its keys from its own input",
    "markov_head": "markov_head: a bias of rank {rank} from the token before, added between the draws of one block; "
    "the engine draws drafts from unbiased logits",
    "confidence_head": "confidence_head: a probability of acceptance for every position, by which a block is cut; the "
    "engine verifies a fixed number of drafts",
}
MARKS = ("main_proj", "markov_head", "confidence_head")


def is_drafter(names: Iterable[str]) -> bool:
    """Whether the tensors under `mtp.` are those of a DSpark drafter."""
    return any(name.startswith("mtp.") and any(mark in name for mark in MARKS) for name in names)


def describe(names: Iterable[str], config: Mapping[str, Any]) -> str:
    """The stages and the missing parts, for a notice or a refusal; `config` is the object of config.json."""
    present = [name for name in names if name.startswith("mtp.")]
    nested = config.get("dspark_config")
    options = {**(nested if isinstance(nested, Mapping) else {}), **config}

    def option(*keys: str, default: str) -> str:
        value = next((options[key] for key in keys if key in options), None)
        return (
            default
            if value is None
            else ", ".join(map(str, value))
            if isinstance(value, list)
            else str(value)
        )

    values = {
        "targets": option("dspark_target_layer_ids", "target_layer_ids", default="40, 41, 42"),
        "block": option("dspark_block_size", "block_size", default="5"),
        "rank": option("dspark_markov_rank", "markov_rank", default="256"),
    }
    stages = len({name.split(".")[1] for name in present})
    missing = [text.format(**values) for part, text in PARTS.items() if any(part in name for name in present)]
    return f"a DSpark drafter of {stages} stages. Not supported: " + "; ".join(missing)
