"""Write the model card: what nano is, how it was trained, what was measured. All values come from the run's record.

    python -m training.card FOLDER --record training.json --evaluation evaluation.json

`training.train` writes a first card next to its weights; this command adds the results of `training.evaluate` on the
files themselves (whole records, the exact model, text from fixed seeds).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from birkhoff.errors import BirkhoffError
from birkhoff.weights import open_checkpoint
from training.parameters import parameters_of
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
machine, not to know things.

## Limits

It writes simple stories and answers short questions. It invents facts, forgets who said what after a few sentences,
mostly ignores words it is asked to use, loops when decoded greedily for long, explains in fluent nonsense, and knows
only English. It has had no safety training. It was trained on rows of {length} tokens; nothing longer was tried.

## Measured

On held-out records, one record in fifty of the same collections, never trained on. *Stored* is what lies here;
*before rounding* the same weights before they were written as FP8 and FP4.

| text | nats/token | bits/byte | MTP drafts accepted | before rounding | bits/byte |
| --- | --- | --- | --- | --- | --- |
{scores}

Nats per answer token, end-of-text included, each record alone from position 0 and cut at {length} tokens. A draft
is accepted where the best token of the MTP block is the trunk's own best token. These records also chose among a few
settings, which makes the numbers a little too good. By kind of text: {sources}.
{evaluated}
Hyper-connections, layer by layer (pairs are attention and experts; `mean share` is how much of the streams' energy
their mean holds, one would mean four copies; distances are Frobenius norms of the mixing matrices; experts are the
idlest and the busiest over an even share; index is the attention mass its choice keeps, the best possible, and by
chance):

```
{alive}
```

## How it was made

{minutes:.1f} minutes on one {device}: {steps} steps of {tokens_per_step} tokens, {tokens:.0f} M tokens in all. Muon
(rate {muon_rate:g}) for matrices, AdamW for embedding and head ({embedding_rate:g}), hyper-connections ({mhc_rate:g})
and the rest ({small_rate:g}); {warmup_steps} steps of warm-up, then linear to {final_rate:g}; weight decay
{weight_decay:g} on matrices and {embedding_decay:g} on the embedding; dropout {dropout:g}, then {dropout_late:g}
from half-way; general text left out after {mixed_share:.0%} of the run; weights rounded as stored in the last
{round_share:.0%}. The folder `training/` of the repository has everything.

## Training text and licences

* Stories, poems, explanations and general text: `training_data/` of the GitHub repository `erikhyrkas/snakes` at
  commit d235dd496dcd99b8898cf14e45aec15720ac58e4, MIT License, Copyright (c) 2024 Erik Hyrkas; its author states
  that the text was generated with Llama 3.1, hence the line at the top.
* TinyStories (Eldan and Li, 2023), CDLA-Sharing-1.0, written by GPT-3.5 and GPT-4.
* Greetings and simple facts written for this project.

All of it is synthetic. Character names and requests were varied on every pass.

## Samples

By fixed seeds, none left out. Temperature 0 is greedy; else top-k 40.

{samples}
"""


def model_card(record: dict[str, Any], parameters: int) -> str:
    """Return the card as Markdown, from the record of `training.train` and evaluation results if present."""
    stored = record["stored"]
    settings = record["settings"]
    evaluation = record.get("evaluation", {})
    tokens = settings["batch"] * settings["length"]
    return CARD.format(
        **{key: value for key, value in settings.items() if key not in ("length",)},
        parameters=parameters / 1e6,
        megabytes=sum(record["bytes"].values()) / 1e6,
        minutes=record["seconds"] / 60,
        steps=f"{record['steps']:,}",
        tokens_per_step=f"{tokens:,}",
        tokens=record["steps"] * tokens / 1e6,
        device=record["device"],
        scores=_scores(stored, record["unrounded"]),
        sources=", ".join(f"{source} {loss:.2f}" for source, loss in stored["sources"].items()),
        evaluated=_evaluated(evaluation),
        length=f"{settings['length']:,}",
        alive="\n".join(
            line.removeprefix("  ").rstrip() for line in alive_table(evaluation.get("alive", record["alive"]))
        ),
        samples="\n\n".join(map(_sample, evaluation.get("samples", record["samples"]))),
    )


def _scores(stored: dict, unrounded: dict) -> str:
    lines = []
    for name in (*stored["files"], "both"):
        part, before = ((all_ if name == "both" else all_["files"])[name] for all_ in (stored, unrounded))
        loss = f"{part['nats_per_token']:.3f} | {part['bits_per_byte']:.3f} | {part['mtp_acceptance']:.1%}"
        lines.append(f"| {name} | {loss} | {before['nats_per_token']:.3f} | {before['bits_per_byte']:.3f} |")
    return "\n".join(lines)


def _evaluated(evaluation: dict) -> str:
    """Return the section on CPU evaluation of the files; empty if there was none."""
    if not evaluation:
        return ""
    files = evaluation["cut"]["files"].items()
    losses = ", ".join(
        f"{name} {part['nats_per_token']:.4f} nats/token with {part['mtp_acceptance']:.1%} of drafts accepted"
        for name, part in files
    )
    exact = evaluation["exact"]
    return (
        f"\nThese files read back and run in float32 on a CPU: {losses}. On {exact['records']} records\n"
        f"the engine's own model and the training code differ by at most {exact['worst_difference']:.0e} nats/token.\n"
    )


def _sample(sample: dict) -> str:
    how = f"temperature {sample['temperature']:g}, seed {sample['seed']}"
    end = "" if sample["ended"] else " [...]"
    text = "\n".join(f"> {line}".rstrip() for line in (sample["text"].strip() + end).splitlines())
    return f"**{' '.join(sample['prompt'].split())}** ({how})\n\n{text}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--record", required=True, help="training.json of the run")
    parser.add_argument("--evaluation", help="output of training.evaluate --json")
    options = parser.parse_args(arguments)
    try:
        config = open_checkpoint(Path(options.folder)).config
    except BirkhoffError as error:
        print(f"{error.code}  {error}", file=sys.stderr)
        return 1
    record = json.loads(Path(options.record).read_text(encoding="utf-8"))
    if options.evaluation:
        record["evaluation"] = json.loads(Path(options.evaluation).read_text(encoding="utf-8"))
    parameters = sum(math.prod(parameter.shape) for parameter in parameters_of(config))
    (Path(options.folder) / "MODEL_CARD.md").write_text(model_card(record, parameters), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
