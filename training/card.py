"""The model card: what nano is, what it was trained on, what was measured. Every number comes from the run's record."""

from __future__ import annotations

from typing import Any

from training.report import alive_table

CARD = """---
license: apache-2.0
language: en
---

# nano

Built with Llama.

A very small language model with every mechanism of DeepSeek-V4: four residual streams with manifold
hyper-connections, sliding, compressed sparse (with indexer) and heavily compressed attention, hash-routed and
score-routed experts, and one multi-token-prediction block. {parameters:.1f} M parameters, stored in the released
FP8/FP4 layout in {megabytes:.1f} MB. It is the embedded model of Birkhoff: made to be run, read and steered on any
machine, not to know things. It writes simple stories and answers short questions; it invents facts, loses the
thread of long texts, and knows only English.

## Measured

Trained for {minutes:.1f} minutes ({steps} steps of {tokens_per_step} tokens) on one {device}. On held-out records,
with the weights as stored here:

| text | nats/token | bits/byte | MTP drafts accepted |
| --- | --- | --- | --- |
{scores}

Nats per answer token, end-of-text included, each record alone from position 0 and cut at {length} tokens. A draft
is accepted where the best token of the MTP block is the trunk's own best token.

Hyper-connections, layer by layer (pairs are attention and experts; `mean share` is how much of the streams' energy
their mean holds, one would mean four copies; distances are Frobenius norms of the mixing matrices):

```
{alive}
```

## Training text and licences

* Stories, poems, explanations and general text: `training_data/` of the GitHub repository `erikhyrkas/snakes` at
  commit d235dd496dcd99b8898cf14e45aec15720ac58e4, MIT License, Copyright (c) 2024 Erik Hyrkas; its author states
  that the text was generated with Llama 3.1, hence the line at the top.
* TinyStories (Eldan and Li, 2023), CDLA-Sharing-1.0, written by GPT-3.5 and GPT-4.
* Greetings and simple facts written for this project.

All of it is synthetic. Character names and requests were varied on every pass.
"""


def model_card(record: dict[str, Any], parameters: int) -> str:
    """The card as Markdown, from the record `training.train` writes."""
    stored, settings = record["stored"], record["settings"]
    scores = "\n".join(
        f"| {name} | {part['nats_per_token']:.3f} | {part['bits_per_byte']:.3f} | {part['mtp_acceptance']:.1%} |"
        for name, part in (*stored["files"].items(), ("both", stored["both"]))
    )
    return CARD.format(
        parameters=parameters / 1e6,
        megabytes=sum(record["bytes"].values()) / 1e6,
        minutes=record["seconds"] / 60,
        steps=f"{record['steps']:,}",
        tokens_per_step=f"{settings['batch'] * settings['length']:,}",
        device=record["device"],
        scores=scores,
        length=f"{settings['length']:,}",
        alive="\n".join(line.removeprefix("  ") for line in alive_table(record["alive"])),
    )
