"""Evaluate on unseen text: nats per answer token, bits per byte, accepted MTP drafts.

Each held-out record is alone in a row from position 0, with its request; answers including EOS count, requests do not.
The head runs in float32. Evaluation uses the compiled training graphs (dropout and dense selection are scalars set to
zero), so it needs no compilation. A draft is *accepted* where MTP's best token equals the trunk's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training.corpus import Record
from training.data import ANSWER, Rows, held_out_rows
from training.forward import Forward, still
from training.step import prepare


@dataclass(frozen=True)
class HeldOut:
    """One held-out file as rows, with byte counts for bits per byte, and sources."""

    name: str
    rows: Rows
    sources: tuple[str, ...]
    text_bytes: int  # of the answers, as far as they fit the rows


def held_out(name: str, records: tuple[Record, ...], tokenizer: Tokenizer, length: int) -> HeldOut:
    rows = held_out_rows(records, tokenizer, length)
    kept = 0
    for ids, roles in zip(rows.ids, rows.roles):
        answer = ids[roles == ANSWER].tolist()
        kept += len(tokenizer.decode(answer, skip_special_tokens=True).encode())
    return HeldOut(name, rows, tuple(record.source for record in records), kept)


@dataclass
class Score:
    nats: float = 0.0
    tokens: int = 0
    mtp_nats: float = 0.0
    mtp_tokens: int = 0
    accepted: int = 0
    guessed: int = 0  # drafts that equal the text itself

    def add(self, other: Score) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def loss(self) -> float:
        return self.nats / max(self.tokens, 1)

    def summary(self) -> dict[str, float]:
        drafts = max(self.mtp_tokens, 1)
        return {
            "nats_per_token": self.loss,
            "tokens": self.tokens,
            "mtp_nats_per_token": self.mtp_nats / drafts,
            "mtp_acceptance": self.accepted / drafts,
            "mtp_hits_text": self.guessed / drafts,
        }


def measure(
    forward: Forward, weights: dict[str, Tensor], rows: Rows, pad: int, batch: int, stream_dtype: torch.dtype
) -> list[Score]:
    """Return one score per row. Rows run in batches of `batch`; the last batch is padded."""
    knobs, scores = still(forward.device), []
    for start in range(0, len(rows.ids), batch):
        ids = _padded(rows.ids[start : start + batch], batch, pad)
        roles = _padded(rows.roles[start : start + batch], batch, 0)
        data = prepare(
            torch.from_numpy(ids.astype(np.int64)).to(forward.device),
            torch.from_numpy(roles).to(forward.device),
            pad,
            0.0,
        )
        trunk = forward.trunk(weights, data.ids, data.valid, knobs, stream_dtype)
        nats, best = _judge(trunk.hidden, weights["head.weight"], data.next_ids)
        counted = data.weight > 0
        if forward.config.num_nextn_predict_layers:
            drafted, _ = forward.mtp(weights, trunk.streams, data.next_ids, data.valid, knobs)
            mtp_nats, draft = _judge(drafted, weights["head.weight"], data.after_ids)
            drafts = (data.after_weight > 0) & counted
            chosen = torch.cat((best[:, 1:], best[:, :1]), 1)  # the trunk's choice for the token after next
            accepted = (draft == chosen) & drafts
            guessed = (draft == data.after_ids) & drafts
        else:
            mtp_nats = torch.zeros_like(nats)
            drafts = torch.zeros_like(counted)
            accepted = guessed = drafts
        columns = [nats * counted, counted, mtp_nats * drafts, drafts, accepted, guessed]
        table = torch.stack([column.double().sum(1) for column in columns], 1).tolist()
        scores += [Score(row[0], int(row[1]), row[2], int(row[3]), int(row[4]), int(row[5])) for row in table]
    return scores[: len(rows.ids)]


def report(parts: list[HeldOut], scores: list[list[Score]]) -> dict:
    """Aggregate per file, per source and over both files; JSON-serialisable."""
    out: dict = {"files": {}, "sources": {}}
    by_source: dict[str, Score] = defaultdict(Score)
    both, text_bytes = Score(), 0
    for part, rows in zip(parts, scores):
        total = Score()
        for source, score in zip(part.sources, rows):
            total.add(score)
            by_source[source].add(score)
        both.add(total)
        text_bytes += part.text_bytes
        out["files"][part.name] = total.summary() | {
            "bits_per_byte": total.nats / math.log(2) / max(part.text_bytes, 1)
        }
    out["both"] = both.summary() | {"bits_per_byte": both.nats / math.log(2) / max(text_bytes, 1)}
    out["sources"] = {source: round(score.loss, 4) for source, score in sorted(by_source.items())}
    return out


def _judge(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return nats [b, t] and best tokens [b, t]; row by row, to keep float32 logits small."""
    nats, best = [], []
    with torch.no_grad():
        for row, target in zip(hidden.detach(), targets):
            logits = F.linear(row.float(), head.float())
            nats.append(F.cross_entropy(logits, target, reduction="none"))
            best.append(logits.argmax(-1))
    return torch.stack(nats), torch.stack(best)


def _padded(array: np.ndarray, rows: int, fill: int) -> np.ndarray:
    missing = rows - len(array)
    return (
        array
        if not missing
        else np.concatenate((array, np.full((missing, array.shape[1]), fill, array.dtype)))
    )
