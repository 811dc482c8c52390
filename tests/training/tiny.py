"""Small configs and corpora for the training tests: every mechanism, no external files."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path

import torch

from birkhoff.config import RopeScaling, V4Config
from training.corpus import HELD_OUT_FILES, TRAIN_FILES, Record
from training.feed import Feed
from training.forward import Forward
from training.loop import Bench, Log
from training.measure import held_out
from training.parameters import Store
from training.settings import Settings

VOCAB = 400
SETTINGS = Settings(batch=4, length=64, warmup_steps=5, bias_fast_steps=20)


def write_records(path: Path, records: list[Record]) -> None:
    """Write records as `read_records` expects them, compressed if the name ends in .xz."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(vars(record)) + "\n" for record in records)


def tiny_config(**changes) -> V4Config:
    """All layer kinds, both routers, YaRN, an active clamp, a selective top-k, and MTP."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 8,
        "compress_ratios": (0, 4, 128, 4, 128),
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_hash_layers": 2,
        "swiglu_limit": 1.0,
        "max_position_embeddings": 1024,
        "num_nextn_predict_layers": 1,
        "rope_scaling": RopeScaling(factor=4.0, original_max_position_embeddings=64),
    }
    return V4Config(**(sizes | changes))


def randomise(store: Store, seed: int) -> dict[str, torch.Tensor]:
    """Randomise every parameter, norms around one, so that no term is zero or symmetric."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for parameter in store.parameters:
        noise = torch.randn(parameter.shape, generator=draw)
        if parameter.name.endswith("norm.weight"):
            value = 1 + 0.1 * noise
        elif parameter.name.endswith(("_base", "attn_sink", ".ape")):
            value = 0.5 * noise
        elif parameter.name.endswith("_scale"):
            value = 0.5 + 0.2 * noise
        else:
            value = noise * 1.3 * parameter.shape[-1] ** -0.5
        tensors[parameter.name] = value
    for name, bias in store.biases.items():
        tensors[name] = 0.2 * torch.randn(bias.shape, generator=draw)
    for name, table in store.tables.items():
        experts = store.config.n_routed_experts
        picks = [torch.randperm(experts, generator=draw)[: table.shape[1]] for _ in range(table.shape[0])]
        tensors[name] = torch.stack(picks)
    store.load(tensors)
    return store.export()


def released_name(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a tensor by released name: one expert of a stack, or the tensor itself."""
    if name in tensors:
        return tensors[name]
    head, expert, part, _ = name.rsplit(".", 3)
    return tensors[f"{head}.{part}"][int(expert)]


def write_corpus(folder: Path, records: int = 60, seed: int = 0) -> Path:
    """Write a synthetic corpus of six files, with short sentences and listed names."""
    draw = random.Random(seed)
    animals, things, names = (
        ("cat", "dog", "bird", "fox"),
        ("ball", "hat", "cake", "tree"),
        ("Lily", "Tom", "Anna", "Ben"),
    )
    verbs = ("found", "saw", "wanted", "lost", "painted")

    def story(length: int) -> tuple[str, str]:
        name, animal = draw.choice(names), draw.choice(animals)
        lines = [f"Once upon a time, there was a little {animal} named {name}."]
        lines += [
            f"{name} {draw.choice(verbs)} a big {draw.choice(things)} near the {draw.choice(animals)}."
            for _ in range(length)
        ]
        return name, " ".join(lines)

    def many(count: int, source: str, longest: int) -> list[Record]:
        out = []
        for _ in range(count):
            name, text = story(draw.randrange(1, longest))
            out.append(Record(source, f'Tell me a story called "{name} and the Ball".', text))
        return out

    folder.mkdir(parents=True, exist_ok=True)
    talk = [
        Record("smalltalk", "Hello!", "Hello! I am happy to see you."),
        Record("smalltalk", "Thank you!", "You are welcome!"),
    ]
    parts = {
        "stories": many(records, "child", 12),
        "tinystories": many(records, "tiny", 6),
        "smalltalk": talk,
        "general": many(records // 2, "scene", 12),
    }
    for part, name in TRAIN_FILES.items():
        write_records(folder / name, parts[part])
    for name in HELD_OUT_FILES.values():
        write_records(folder / name, many(6, "child", 8))
    return folder


def small_config(**changes) -> V4Config:
    """A two-layer config for CPU training; FP8 matrices divide into tiles, so a run can include rounding."""
    return tiny_config(
        vocab_size=VOCAB,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=1,
        head_dim=128,
        q_lora_rank=128,
        o_groups=1,
        o_lora_rank=128,
        compress_ratios=(0, 4),
        moe_intermediate_size=128,
        n_routed_experts=4,
        num_hash_layers=1,
        index_topk=6,
        rope_scaling=None,
        swiglu_limit=10.0,
        **changes,
    )


def bench(data: tuple, work: Path, settings: Settings = SETTINGS) -> Bench:
    """Return the Bench over the corpus of the `data` fixture."""
    folder, corpus, tokenizer = data
    parts = [held_out(name, records, tokenizer, settings.length) for name, records in corpus.held_out.items()]
    feed = Feed(folder, folder / "tokenizer", settings.length, settings.seed)
    return Bench(
        Forward(small_config(), settings.length, "cpu"), feed, parts, 2, Log(work / "log.jsonl"), work
    )
