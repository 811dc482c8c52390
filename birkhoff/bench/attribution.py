"""How well attribution by gradients agrees with exact patching.

Pairs of stories differ in one name; the metric is the logit difference of the two names where the story is about to
mention one of them again. For each pair every node is patched exactly, and the scores of the other methods are compared
with that: Spearman's rank correlation over all nodes, and how many of the 20 largest nodes are the same. Rows are means
over pairs; `worst` is the lowest correlation of a pair, `times_exact` the time relative to exact patching. Streams, of
which there are many, are compared at three layers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import birkhoff
from birkhoff.api.engine import Engine
from birkhoff.bench.report import Progress, Row, check_positive, facts, significant
from birkhoff.bench.timing import torch_threads

TOP = 20
# A story about {name}, and the name it is about: its baseline has the second name instead.
STORIES = (
    ("One day, {name} had a red ball. A boy wanted it. He asked", " Lily", " Anna"),
    ("One day, {name} found a big dog. The dog ran to", " Tom", " Ben"),
    ("One day, {name} and her mom went to the park. Mom gave", " Mia", " Sue"),
    ("One day, {name} was sad. His friend came and hugged", " Max", " Tim"),
    ("Once there was a boy named {name}. He saw a cat in the tree. The cat looked at", " Ben", " Sam"),
    ("Once there was a girl named {name}. She liked to sing. Her dad said to", " Sara", " Lucy"),
    ("One day, {name} had a toy car. Another boy took it from", " Sam", " Max"),
    ("Once upon a time, {name} lost her hat. A bird helped", " Anna", " Lily"),
)
OVER = ("sublayers", "streams", "experts")
STREAM_LAYERS = 3
BASELINES = ("zero", "text")
METHODS = ("gradient", "integrated", "inputs")


@dataclass(frozen=True)
class AttributionSetting:
    """Parameters, repeated in every row."""

    texts: int = 4
    steps: int = 8
    threads: int = 2

    def check(self) -> None:
        check_positive(self)


def bench_attribution(
    model: str = "nano",
    setting: AttributionSetting | None = None,
    progress: Progress | None = None,
    groups: Sequence[str] = OVER,
    baselines: Sequence[str] = BASELINES,
) -> Iterator[Row]:
    """One row per group of nodes, baseline and method."""
    setting = setting or AttributionSetting()
    setting.check()
    results: dict[tuple[str, str, str], list[tuple[float, int, int, float]]] = {}
    with torch_threads(setting.threads), birkhoff.load(model, weights="dense") as engine:
        pairs = usable_pairs(engine)[: setting.texts]
        for done, pair in enumerate(pairs):
            for over in groups:
                for baseline in baselines:
                    for method, result in compare(engine, pair, over, baseline, setting.steps):
                        results.setdefault((over, baseline, method), []).append(result)
            if progress is not None:
                progress(done + 1, len(pairs))
    common = {"bench": "attribution", "model": model, **facts(), "setting": asdict(setting)}
    for (over, baseline, method), rows in results.items():
        correlations, overlaps, nodes, times = zip(*rows)
        yield common | {
            "over": over,
            "baseline": baseline,
            "method": method,
            "texts": len(rows),
            "nodes": nodes[0],
            "spearman": significant(sum(correlations) / len(rows)),
            "worst": significant(min(correlations)),
            "overlap": significant(sum(overlaps) / len(rows)),
            "times_exact": significant(sum(times) / len(rows)),
        }


def usable_pairs(engine: Engine) -> list[tuple[str, str, str, str]]:
    """Text, baseline and their names, where both names are single tokens of this model."""
    return [
        (story.replace(" {name}", name), story.replace(" {name}", other), name, other)
        for story, name, other in STORIES
        if all(len(engine.tokenizer.encode(each)) == 1 for each in (name, other))
    ]


def compare(
    engine: Engine, pair: tuple[str, str, str, str], over: str, baseline: str, steps: int
) -> Iterator[tuple[str, tuple[float, int, int, float]]]:
    """By method: rank correlation, overlap, nodes, and time relative to exact patching."""
    text, other, *names = pair
    common: dict[str, Any] = {"over": over, "baseline": other if baseline == "text" else None, "steps": steps}
    if over == "streams":
        count = engine.config.num_hidden_layers
        common["layers"] = list(range(count // 6, count, max(count // STREAM_LAYERS, 1)))[:STREAM_LAYERS]
    started = time.perf_counter()
    exact = engine.attribute(text, tuple(names), method="exact", **common)
    seconds = time.perf_counter() - started
    for method in METHODS:
        started = time.perf_counter()
        scores = engine.attribute(text, tuple(names), method=method, **common)
        agreement = scores.agreement(exact, TOP)
        times = (time.perf_counter() - started) / seconds
        yield method, (agreement.spearman, agreement.overlap, agreement.nodes, times)
