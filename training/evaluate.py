"""Evaluate a checkpoint on disk: held-out loss, bits per byte, MTP acceptance, liveness, and text from fixed seeds.

    python -m training.evaluate CHECKPOINT --data DIR [--before CHECKPOINT] [--json FILE]

Losses come from the training forward on the exactly dequantised weights, in float32 on a CPU, with whole records (rows
of 2,048) and truncated at 1,024 as during training. `--exact N` also runs N records through `birkhoff.model` and
reports the largest difference, so that the results hold for the model that users run. `--before` is the same model
stored without rounding, to measure the cost of the released layout.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import birkhoff
from birkhoff.config import V4Config
from birkhoff.errors import BirkhoffError
from birkhoff.model.transformer import Transformer
from birkhoff.weights import load_into, open_checkpoint
from training.corpus import HELD_OUT_FILES, Corpus, Record, read_corpus
from training.data import ANSWER, Conversation, Markers, Rows, encode_conversations, pack, seeded
from training.export import load_named
from training.forward import Forward
from training.liveness import liveness
from training.measure import Score, held_out, measure, report
from training.parameters import Store
from training.report import as_text
from training.sampling import CHAT, Ask
from training.tokenizer import load_tokenizer

WHOLE, CUT = 2048, 1024
Weights = dict[str, Tensor]


def weights_of(folder: Path, device: str) -> tuple[V4Config, Weights]:
    """Return the config and float32 weights of a released directory, on a device."""
    config, tensors = load_named(folder)
    store = Store(config, device)
    store.load(tensors)
    return config, store.named(store.leaves(torch.float32))


def held_out_report(
    forward: Forward, weights: Weights, corpus: Corpus, tokenizer: Tokenizer, batch: int
) -> dict:
    parts = [held_out(name, records, tokenizer, forward.length) for name, records in corpus.held_out.items()]
    pad = Markers.of(tokenizer).pad
    with torch.no_grad():
        return report(parts, [_measure_trimmed(forward, weights, part.rows, pad, batch) for part in parts])


def _measure_trimmed(forward: Forward, weights: Weights, rows: Rows, pad: int, batch: int) -> list[Score]:
    """`measure` without padding, with rows of similar length batched. Later tokens do not affect a token's loss."""
    block = forward.config.sliding_window
    needed = -(-(rows.ids != pad).sum(1) // block) * block
    scores: dict[int, Score] = {}
    for length in sorted(set(needed.tolist())):
        where = np.flatnonzero(needed == length)
        short = Rows(rows.ids[where, :length], rows.roles[where, :length])
        trimmed = Forward(forward.config, length, forward.device)
        batch_scores = measure(trimmed, weights, short, pad, min(batch, len(where)), torch.float32)
        scores |= dict(zip(where.tolist(), batch_scores))
    return [scores[row] for row in range(len(rows.ids))]


def packed_held_out(corpus: Corpus, tokenizer: Tokenizer, length: int, rows: int) -> Tensor:
    """Return held-out conversations packed into rows, the fullest ones, for metrics that padding would bias."""
    markers = Markers.of(tokenizer)
    talks = [Conversation((record,)) for records in corpus.held_out.values() for record in records]
    packed = pack(
        [pair for pair in encode_conversations(tokenizer, markers, talks) if len(pair[0]) <= length],
        length,
        markers.pad,
        seeded("held-out"),
    )
    fullest = np.argsort((packed.ids == markers.pad).sum(1), kind="stable")[:rows]
    return torch.from_numpy(packed.ids[fullest].astype(np.int64))


def exact_difference(
    folder: Path, weights: Weights, corpus: Corpus, tokenizer: Tokenizer, records: int
) -> dict:
    """Run the same records through the exact model: largest difference of a record's loss, and both means."""
    checkpoint = open_checkpoint(folder)
    model = Transformer(checkpoint.config)
    load_into(model.destinations(), checkpoint)
    markers = Markers.of(tokenizer)
    chosen = [record for part in corpus.held_out.values() for record in part[: (records + 1) // 2]][:records]
    forward = Forward(checkpoint.config, CUT, "cpu")
    worst = 0.0
    ours = 0.0
    theirs = 0.0
    for ids, roles in encode_conversations(
        tokenizer, markers, [Conversation((record,)) for record in chosen]
    ):
        ids, roles = ids[:CUT].astype(np.int64), roles[:CUT]
        counted = torch.from_numpy(roles[1:] == ANSWER)
        with torch.no_grad():
            logits = model(torch.from_numpy(ids))
            exact = F.cross_entropy(logits[:-1], torch.from_numpy(ids[1:]), reduction="none")[counted].mean()
            row = torch.full((1, CUT), markers.pad)
            row[0, : len(ids)] = torch.from_numpy(ids)
            fast = measure(forward, weights, _one_row(row, roles), markers.pad, 1, torch.float32)[0].loss
        worst = max(worst, abs(float(exact) - fast))
        ours = ours + fast / len(chosen)
        theirs = theirs + float(exact) / len(chosen)
    return {
        "records": len(chosen),
        "worst_difference": worst,
        "training_forward": ours,
        "exact_model": theirs,
    }


def _one_row(row: Tensor, roles: np.ndarray) -> Rows:
    full = np.zeros((1, row.shape[1]), dtype=np.uint8)
    full[0, : len(roles)] = roles
    return Rows(row.numpy().astype(np.uint16), full)


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    folder, device = Path(options.checkpoint), options.device
    tokenizer = load_tokenizer(options.tokenizer or folder)
    corpus = read_corpus(options.data)
    asked = corpus.held_out
    if options.files:
        corpus = replace(corpus, held_out={name: asked[name] for name in options.files})
    config, weights = weights_of(folder, device)
    cut = Forward(config, CUT, device)
    whole = Forward(config, WHOLE, device)
    out: dict[str, Any] = {"checkpoint": folder.name}
    out["bytes"] = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    out["cut"] = held_out_report(cut, weights, corpus, tokenizer, options.batch)
    if options.whole:
        out["whole"] = held_out_report(whole, weights, corpus, tokenizer, max(1, options.batch // 2))
    if options.before:
        _, unrounded = weights_of(Path(options.before), device)
        out["before_rounding"] = held_out_report(cut, unrounded, corpus, tokenizer, options.batch)
    rows = packed_held_out(corpus, tokenizer, CUT, 8).to(device)
    out["alive"] = liveness(
        {name: weight.detach() for name, weight in weights.items()}, rows, config, torch.float32
    )
    if options.exact:
        out["exact"] = exact_difference(folder, weights, corpus, tokenizer, options.exact)
    if options.samples:
        asks = [*CHAT, *(Ask(record.prompt, 0.8, seed) for seed, record in enumerate(_requests(asked)))]
        out["samples"] = written(folder, asks, options.samples)
    return out


def written(folder: Path, asks: list[Ask], longest: int, top_k: int = 40) -> list[dict]:
    """Return answers of the engine that users run, reproducible from their seeds."""
    out = []
    with birkhoff.load(folder, device="cpu") as engine:
        for ask in asks:
            talk = [{"role": "user", "content": ask.prompt}]
            options: dict[str, Any] = {
                "temperature": ask.temperature,
                "top_k": top_k,
                "seed": ask.seed,
                "max_tokens": longest,
            }
            answer = engine.chat(talk, **options)
            out.append(
                {
                    **ask._asdict(),
                    "tokens": len(answer.token_ids),
                    "ended": answer.finish_reason == "stop",
                    "text": answer.text,
                }
            )
    return out


def _requests(held_out_records: dict[str, tuple[Record, ...]]) -> list[Record]:
    """Return ten fixed held-out records, five from each file, evenly spread."""
    return [part[i * len(part) // 5] for part in held_out_records.values() for i in range(5)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--data", default="data")
    parser.add_argument("--tokenizer", help="folder of the tokenizer, if not next to the weights")
    parser.add_argument("--before", help="the same model stored without rounding")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--files", nargs="+", choices=sorted(HELD_OUT_FILES), help="held-out files; all by default"
    )
    parser.add_argument(
        "--whole", action=argparse.BooleanOptionalAction, default=True, help="also evaluate whole records"
    )
    parser.add_argument(
        "--exact", type=int, default=4, metavar="N", help="also run this many records through the exact model"
    )
    parser.add_argument(
        "--samples", type=int, default=0, metavar="TOKENS", help="write samples of at most this length"
    )
    parser.add_argument("--json", help="file for all results")
    options = parser.parse_args(arguments)
    try:
        results = evaluate(options)
    except BirkhoffError as error:
        print(f"{error.code}  {error}", file=sys.stderr)
        return 1
    print(as_text(results))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
