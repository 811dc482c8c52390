"""Make a finished model's probabilities mean what they say: one number for the trunk, one for MTP.

    python -m training.calibrate CHECKPOINT --data DIR --out DIR

A model that has read its text many times is surer of itself than it is right. The cure is a temperature, and since
the head has no bias, dividing the weight of the norm in front of it by that temperature is the same thing: ranks,
greedy text and drafts accepted stay as they are. The temperature is fitted on every second held-out record; the
others say whether it holds on text that had no part in it. All other tensors are written back bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from birkhoff.errors import BirkhoffError
from training.corpus import Corpus, read_corpus
from training.data import Markers
from training.evaluate import CUT, weights_of
from training.export import export, load_named
from training.forward import Forward, still
from training.measure import held_out
from training.step import prepare
from training.tokenizer import load_tokenizer

NORMS = {"trunk": "norm.weight", "mtp": "mtp.0.norm.weight"}
CHUNK = 4096  # rows of logits at a time
NEWTON_STEPS = 8


@dataclass
class Half:
    """Hidden rows in front of the head and the tokens that followed, per block, for half of the records."""

    hidden: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in NORMS})
    wanted: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in NORMS})

    def add(self, block: str, hidden: Tensor, wanted: Tensor, counted: Tensor) -> None:
        self.hidden[block].append(hidden[counted])
        self.wanted[block].append(wanted[counted])

    def rows(self, block: str) -> tuple[Tensor, Tensor]:
        return torch.cat(self.hidden[block]), torch.cat(self.wanted[block])


@torch.no_grad()
def read_halves(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> tuple[tuple[Half, Half], Tensor]:
    """Every held-out record once; records alternate between the half that fits and the half that judges."""
    config, weights = weights_of(folder, "cpu")
    pad, halves, forwards = Markers.of(tokenizer).pad, (Half(), Half()), dict[int, Forward]()
    for name, records in corpus.held_out.items():
        rows = held_out(name, records, tokenizer, CUT).rows
        for number, (ids, roles) in enumerate(zip(rows.ids, rows.roles)):
            length = -(-int((ids != pad).sum()) // config.sliding_window) * config.sliding_window
            forward = forwards.setdefault(length, Forward(config, length, "cpu"))
            row = torch.from_numpy(ids[None, :length].astype("int64"))
            data = prepare(row, torch.from_numpy(roles[None, :length]), pad, 0.0)
            knobs, half = still(forward.device), halves[number % 2]
            trunk = forward.trunk(weights, data.ids, data.valid, knobs, torch.float32)
            half.add("trunk", trunk.hidden, data.next_ids, data.weight > 0)
            if config.num_nextn_predict_layers:
                drafted, _ = forward.mtp(weights, trunk.streams, data.next_ids, data.valid, knobs)
                half.add("mtp", drafted, data.after_ids, (data.after_weight > 0) & (data.weight > 0))
    return halves, weights["head.weight"].detach().float()


@torch.no_grad()
def loss_at(hidden: Tensor, wanted: Tensor, head: Tensor, sharpness: float) -> tuple[float, float, float]:
    """Nats per token with logits times `sharpness`, and its first two derivatives: convex, so Newton finds the end."""
    nats = slope = bend = 0.0
    for rows, targets in zip(hidden.split(CHUNK), wanted.split(CHUNK)):
        logits = F.linear(rows.float(), head)
        share = (logits * sharpness).softmax(-1)
        mean = (share * logits).sum(-1)
        chosen = logits.gather(1, targets[:, None]).squeeze(1)
        nats += float(F.cross_entropy(logits * sharpness, targets, reduction="sum"))
        slope += float((mean - chosen).sum())
        bend += float((share * (logits - mean[:, None]).square()).sum())
    count = max(len(wanted), 1)
    return nats / count, slope / count, bend / count


def fit(hidden: Tensor, wanted: Tensor, head: Tensor) -> float:
    """The temperature that makes the text likeliest."""
    sharpness = 1.0
    for _ in range(NEWTON_STEPS):
        _, slope, bend = loss_at(hidden, wanted, head, sharpness)
        sharpness = min(max(sharpness - slope / max(bend, 1e-9), sharpness / 2), 2 * sharpness)
        if abs(slope) < 1e-5:
            break
    return 1 / sharpness


def calibrate(folder: Path, data: str, out: Path) -> dict:
    """Write the calibrated checkpoint; returns temperatures and losses before and after on both halves."""
    tokenizer = load_tokenizer(folder)
    (fitting, judging), head = read_halves(folder, read_corpus(data), tokenizer)
    config, tensors = load_named(folder)
    found = {}
    for block, norm in NORMS.items():
        if not fitting.hidden[block]:
            continue
        temperature = fit(*fitting.rows(block), head)
        found[block] = {"temperature": temperature}
        for name, half in (("fitted", fitting), ("others", judging)):
            for moment, sharpness in (("before", 1.0), ("after", 1 / temperature)):
                found[block][f"{name}_{moment}"] = loss_at(*half.rows(block), head, sharpness)[0]
            found[block][f"{name}_tokens"] = sum(map(len, half.wanted[block]))
        tensors[norm] = tensors[norm] / temperature
    export(out, config, tensors, folder)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--out", required=True)
    options = parser.parse_args(arguments)
    try:
        found = calibrate(Path(options.checkpoint), options.data, Path(options.out))
    except BirkhoffError as error:
        print(f"{error.code}  {error}", file=sys.stderr)
        return 1
    (Path(options.out) / "calibration.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
