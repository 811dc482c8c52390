"""Search steering sites: add each concept at every site, layer, stream and strength, and measure the effect.

    python -m training.search DATA OUT [NAME ...]        DATA holds the *-train.jsonl.xz files

The direction is a contrast of paragraphs (`training/concepts.py`). A trial adds it to all streams or to one, scaled to
a share of the mean row norm at that site, answers a few requests, and is scored by a probe trained on other paragraphs
and by the loss of its text under the unsteered model. One JSON line per concept goes to OUT; a concept already there
is skipped, so an interrupted run resumes. `training.vectors` chooses from it. The tables of docs/nano.md are printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import birkhoff
from birkhoff.analysis.contrast import ContrastRows, contrast_rows
from birkhoff.analysis.steering_effect import score_answers
from birkhoff.analysis.vector_search import Trial, search_vectors
from birkhoff.steering.word_probe import WordProbe
from training.concepts import CONCEPTS, as_answer, paragraphs, sets

STRENGTHS = [0.25, 0.6]
SITES = {
    "mhc_streams_pre_attn": [2, 4, 6],
    "mhc_streams_pre_mlp": [4],
    "mlp_out": [2, 4, 6],
}  # and their layers
SEEDS, BATCH = 2, 12
LENGTH = 40  # tokens of an answer that are scored
REQUESTS = [
    "Tell me a story about a girl named Lily.",
    "Write a short story about a garden.",
    "Write a story called The Red Door.",
    "Write a story about a long walk.",
    "Tell me a story about a picture.",
    "Write a story about a gift.",
]


def searched(engine: birkhoff.Engine, name: str, texts: list[tuple[str, str]]) -> dict[str, Any]:
    """Return all trials of a concept, and how well each site separates its two paragraph classes."""
    up, down, probe_up, probe_down = sets(CONCEPTS[name], texts)
    probe = WordProbe.trained(probe_up, probe_down)
    contrasts = {site: rows_of(engine, up, down, site) for site in SITES}
    plain = score_answers(engine, REQUESTS, SEEDS, probe.score, max_tokens=LENGTH)
    trials = search_vectors(
        engine,
        contrasts,
        REQUESTS,
        probe.score,
        SEEDS,
        STRENGTHS,
        plain=plain,
        max_tokens=LENGTH,
        progress=lambda trial: print(f"{name} {line(trial)}", flush=True),
    )
    separation = [entry.to_json() for rows in contrasts.values() for entry in rows.separation()]
    return {"name": name, "trials": [trial.to_json() for trial in trials], "separation": separation}


def rows_of(engine: birkhoff.Engine, up: list[str], down: list[str], site: str) -> ContrastRows:
    return contrast_rows(
        engine, [as_answer(text) for text in up], [as_answer(text) for text in down], site, SITES[site]
    )


def line(trial: Trial) -> str:
    where = "all" if trial.streams is None else trial.streams[0]
    site = f"{trial.hook} layer {trial.layer} stream {where} length {trial.strength}"
    return f"{site}: moved {trial.moved:.0%}, measure {trial.gained:+.3f}, loss {trial.loss_gained:+.3f}"


def trials_of(search: dict[str, Any]) -> list[Trial]:
    return [
        Trial(**{**trial, "streams": None if trial["streams"] is None else tuple(trial["streams"])})
        for trial in search["trials"]
    ]


def read_searches(path: Path) -> dict[str, dict[str, Any]]:
    """Return finished searches by concept."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {search["name"]: search for search in map(json.loads, lines)}


def tables(search: dict[str, Any]) -> str:
    """Return Markdown, one row per site, layer and strength; a cell is the share of answers moved and nats paid."""
    cells = {(t.hook, t.layer, t.strength, t.streams): t for t in trials_of(search)}
    rows = [
        f"| `{search['name']}` at | length | all | stream 0 | stream 1 | stream 2 | stream 3 |",
        "| --- " * 7 + "|",
    ]
    for site, layers in SITES.items():
        for layer in layers:
            for strength in STRENGTHS:
                places = [
                    cells.get((site, layer, strength, streams)) for streams in (None, (0,), (1,), (2,), (3,))
                ]
                cells_text = ["–" if t is None else f"{t.moved:.0%} {t.loss_gained:+.2f}" for t in places]
                rows.append(f"| `{site}[{layer}]` | {strength} | {' | '.join(cells_text)} |")
    return "\n".join(rows)


def main() -> None:
    data, out, *names = sys.argv[1:]
    path = Path(out)
    texts = list(paragraphs(Path(data)))
    done = read_searches(path)
    with birkhoff.load("nano", max_requests=BATCH) as engine:
        for name in names or CONCEPTS:
            if name not in done:
                done[name] = searched(engine, name, texts)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(done[name]) + "\n")
            print(tables(done[name]), flush=True)


if __name__ == "__main__":
    main()
