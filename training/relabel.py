"""Describe the features of the shipped SAE again: labels, scores, contexts and examples, without training it.

    python -m training.relabel WORK [OUT]        WORK keeps the texts; OUT is the shipped directory unless given

The texts are nano's own answers (`training/own_text.py`). Names of features that moved answers to a theme when raised
are taken from the SAE's metadata, where they were measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import birkhoff
from birkhoff.analysis.sae_features import explain
from birkhoff.embedded import shipped_dictionary
from birkhoff.sae.dictionary import Sae
from training import own_text
from training.labels import ship
from training.themes import PROVED, THEMES

TEXTS = 300
SKIP = 3  # markers before a request


def main() -> None:
    work, shipped = Path(sys.argv[1]), shipped_dictionary("nano")
    assert shipped is not None
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else shipped
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "own.jsonl").exists():
        own_text.write(work / "own.jsonl", TEXTS)
    sae = Sae.load(shipped)
    sae.labels = {}
    with birkhoff.load("nano") as engine:
        lines = (work / "own.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [engine.encode_chat(json.loads(line)["messages"])[:-1] for line in lines]
        topics = {name: words.split() for name, words in THEMES.items()}
        entries = explain(engine, sae, texts, skip=SKIP, contexts=5, tokens=8, examples=2, topics=topics)
    names = {
        int(clamp["feature"]): clamp["theme"] for clamp in sae.metadata["clamps"] if clamp["moved"] >= PROVED
    }
    described = {str(feature): entry.to_json() for feature, entry in entries.items()}
    size = ship(sae, described, names, sae.metadata, out)
    scores = sorted(entry.score for entry in entries.values() if entry.score is not None)
    print(f"{len(entries)} of {sae.d_sae} features described, {size} bytes in {out}")
    print(
        f"median score {scores[len(scores) // 2]:.3f}, {sum(s >= 0.3 for s in scores)} of {len(scores)} at least 0.3"
    )


if __name__ == "__main__":
    main()
