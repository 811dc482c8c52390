"""Train nano's SAE: texts, rows, training, evaluation, labels, clamps, and the shipped directory.

    python -m training.dictionary DATA WORK        DATA holds the *-train.jsonl.xz and *-val.jsonl.xz files

Each stage stores its result in WORK and is skipped if the result exists, so the command can be interrupted and
repeated. Measurements use the SAE as shipped, with matrices rounded to bfloat16, on records unseen in training. Chat
markers (`MARKS`) are neither trained on nor replaced. Everything else is determined by seeds; texts are harvested in
batches, so the last bits may depend on interruptions and the machine.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import birkhoff
from birkhoff.analysis.harvest import harvest
from birkhoff.analysis.sae_features import explain
from birkhoff.analysis.sae_quality import loss_recovered, row_quality
from birkhoff.analysis.sae_rows import StoreRows
from birkhoff.analysis.sae_train import train_sae
from birkhoff.capture.spec.request import Capture
from birkhoff.data.texts import open_texts
from birkhoff.sae.compact import rounded
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.train import TrainOptions
from training import own_text
from training.labels import ship
from training.themes import PROVED, THEMES, find_themes, measure_clamps

HOOK = "mhc_streams_pre_attn"
LAYER = 5
VIEW = "flat"
HARVESTED = [5, 7]  # layer 7 for the comparison of views
MARKS = (0, 1, 4055, 4056, 4074)  # start, end, user, assistant, end of thought
STORIES = 1000
TINY = 900
MOST_LETTERS = 4500
BATCH_ROWS = 2048
OPTIONS = TrainOptions(1536, k=144, steps=1500, rate=5e-3, decay=0.9, dead_after=200_000, seed=0)
JUDGED, JUDGED_TOKENS = 40, 320  # held-out records, and tokens used of each
OWN_TEXTS = 150


def write_texts(data: Path, work: Path) -> None:
    """Write `train.jsonl` from training records and `held-out.jsonl` from the others, as conversations."""
    draw = random.Random(7)
    stories, tiny = (_records(data, f"{name}-train") for name in ("stories", "tinystories"))
    draw.shuffle(stories)
    draw.shuffle(tiny)
    chosen = stories[:STORIES] + tiny[:TINY]
    draw.shuffle(chosen)
    held_out = _records(data, "stories-val") + _records(data, "tinystories-val")
    draw.shuffle(held_out)
    for name, records in (("held-out", held_out), ("train", chosen)):
        lines = (json.dumps({"messages": _conversation(record)}) + "\n" for record in records)
        (work / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _records(data: Path, name: str) -> list[dict[str, str]]:
    with lzma.open(data / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _conversation(record: dict[str, str]) -> list[dict[str, str]]:
    answer = record["text"][:MOST_LETTERS]
    return [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": answer}]


def harvest_rows(engine: birkhoff.Engine, work: Path) -> None:
    texts = open_texts(work / "train.jsonl")
    wish = Capture(
        {HOOK: HARVESTED}, positions={"prompt": {"exclude": {"token_ids": list(MARKS)}}}, dtype="bf16"
    )
    report = harvest(engine, texts, wish, work / "rows", source=texts.describe())
    print(
        f"{report.texts} texts, {report.rows} rows of {len(HARVESTED)} layers, {report.seconds:.0f} s",
        flush=True,
    )


def train(work: Path, options: TrainOptions = OPTIONS) -> None:
    source = StoreRows(work / "rows" / "harvest", HOOK, LAYER, VIEW, BATCH_ROWS, options.seed)

    def tell(report: Any) -> None:
        if report.step % 50 == 0:
            print(f"step {report.step}: {report.explained:.4f} explained, {report.dead} dead", flush=True)

    done = train_sae(source, options, work / "dictionary", progress=tell)
    print(json.dumps(done.to_json()), flush=True)


def judge(engine: birkhoff.Engine, sae: Sae, work: Path) -> dict[str, Any]:
    """Evaluate rows and losses on held-out records; the second loss also replaces the markers, which is harder."""
    texts = _ids(engine, work / "held-out.jsonl")[:JUDGED]
    texts = [ids[:JUDGED_TOKENS] for ids in texts]
    quality, _ = row_quality(engine, sae, texts, exclude=MARKS)
    return {
        "quality": quality.to_json(),
        "loss": loss_recovered(engine, sae, texts, MARKS).to_json(),
        "loss_with_marks": loss_recovered(engine, sae, texts[: JUDGED // 4]).to_json(),
    }


def _ids(engine: birkhoff.Engine, path: Path) -> list[list[int]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [engine.encode_chat(json.loads(line)["messages"]) for line in lines]


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return the JSON in `path`, computing and writing it first if the file does not exist."""
    if not path.exists():
        text = json.dumps(make(), ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
        print(f"{path.name}: {text[:400]}", flush=True)
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    data, work = Path(sys.argv[1]), Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "train.jsonl").exists():
        write_texts(data, work)
    if not (work / "dictionary" / "cfg.json").exists():
        with birkhoff.load("nano", max_requests=8) as engine:
            harvest_rows(engine, work)
        train(work)
    if not (work / "own.jsonl").exists():
        own_text.write(work / "own.jsonl", OWN_TEXTS)
    sae = rounded(Sae.load(work / "dictionary"))
    with birkhoff.load("nano", max_requests=10) as engine:
        measured = kept(work / "measured.json", lambda: judge(engine, sae, work))

        def entries() -> dict[str, Any]:
            texts = [ids[:-1] for ids in _ids(engine, work / "own.jsonl")]
            topics = {name: words.split() for name, words in THEMES.items()}
            explanations = explain(
                engine, sae, texts, skip=3, contexts=5, tokens=8, examples=2, topics=topics
            )
            return {str(feature): entry.to_json() for feature, entry in explanations.items()}

        features = kept(work / "entries.json", entries)
        themes = kept(work / "themes.json", lambda: find_themes(engine, sae, features))
        clamps = kept(work / "clamps.json", lambda: measure_clamps(engine, sae, themes, features))
    names = {int(clamp["feature"]): clamp["theme"] for clamp in clamps if clamp["moved"] >= PROVED}
    metadata = {
        "model_name": "nano",
        "training": sae.metadata.get("training"),
        "measured": measured,
        "clamps": clamps,
    }
    size = ship(sae, features, names, metadata, work / "sae")
    print(f"{work / 'sae'}: {size} bytes", flush=True)


if __name__ == "__main__":
    main()
