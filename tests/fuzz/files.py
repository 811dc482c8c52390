"""Damaged files of every kind that the package reads, and the loaders that must refuse them with a typed error."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import birkhoff
from birkhoff.analysis.vector_import import import_vectors
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import read_request
from birkhoff.capture.store.repair import repair
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.convert.convert import convert
from birkhoff.convert.synth import synth
from birkhoff.errors import BirkhoffError
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.files import load_all
from birkhoff.steering.vector_file import SteeringVector
from birkhoff.text.tokenizer import Tokenizer
from birkhoff.weights.checkpoint import open_checkpoint
from tests.capture.disks import SoftDisk
from tests.capture.sample_chunks import chunk
from tests.fuzz.bodies import HUGE, mutated
from tests.sae.reference import random_sae

TOKENS = [
    b"99999999999999999999",
    b"-1",
    b"1e400",
    b"null",
    b"NaN",
    b'"\\ud800"',
    b"{",
    b"[",
    b"\0",
    b"\xff",
    b'"',
]


@dataclass(frozen=True)
class FileKind:
    """A folder with a valid sample, the file to damage, and the loader of the folder."""

    folder: Path
    name: str
    load: Callable[[Path], Any]
    reach: int | None = None  # damage hits the first bytes only, where the structure is


def damaged_bytes(raw: bytes, dice: random.Random, reach: int | None = None) -> bytes:
    """One to four changes: a bit, a byte, a number of eight bytes, a cut, a repetition, a token, or a shorter end."""
    data = bytearray(raw)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(max(min(reach or len(data), len(data)), 1))
        what = dice.randrange(7)
        if what == 0 and data:
            data[at] ^= 1 << dice.randrange(8)
        elif what == 1 and data:
            data[at] = dice.randrange(256)
        elif what == 2:
            data[at : at + 8] = dice.choice((0, 1, 2**32, 2**63 - 1, 2**64 - 1, len(raw))).to_bytes(
                8, "little"
            )
        elif what == 3:
            del data[at : at + dice.randint(1, 40)]
        elif what == 4:
            data[at:at] = data[at : at + dice.randint(1, 40)]
        elif what == 5:
            data[at : at + 1] = dice.choice(TOKENS)
        elif dice.random() < 0.3:
            del data[at:]
    return bytes(data)


def damaged_file(raw: bytes, name: str, dice: random.Random, reach: int | None) -> bytes:
    """Damaged bytes; half of the JSON files stay valid JSON and have damaged values instead."""
    if name.endswith(".json") and len(raw) < 100_000 and dice.random() < 0.5:
        changed = mutated(json.loads(raw), dice)
        if dice.random() < 0.3 and isinstance(changed, dict) and changed:
            changed[dice.choice(sorted(changed))] = dice.choice(HUGE)
        return json.dumps(changed).encode()
    return damaged_bytes(raw, dice, reach)


def verdict(kind: FileKind, copy: Path, raw: bytes) -> str:
    """What is wrong with how a damaged file is loaded, or nothing: it loads, or a typed error is raised."""
    (copy / kind.name).write_bytes(raw)
    try:
        kind.load(copy)
    except BirkhoffError as error:
        return "" if len(str(error)) < 5000 else f"a message of {len(str(error))} characters"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def samples(root: Path) -> dict[str, FileKind]:
    """Valid files of every kind below `root`."""
    model = root / "model"
    synth(model, "tiny", layers=2, mtp=False, shard_bytes=120_000, tokenizer=False)
    nano = Path(birkhoff.__file__).parent / "models/nano"
    words = root / "words"
    words.mkdir()
    shutil.copy(nano / "tokenizer.json", words / "tokenizer.json")
    shard = min(path.name for path in model.glob("*.safetensors"))
    (root / "gguf").mkdir()
    convert(model, root / "gguf/model.gguf")
    lens = root / "saelens"
    random_sae("jumprelu", 24, 16, hook="mlp_out", layer=1).save(lens)
    own = root / "own"
    random_sae("topk", 24, 16, hook="mlp_out", layer=1).save(own, "manifest")
    scope = root / "scope"
    scope.mkdir()
    arrays = {"W_enc": (16, 24), "W_dec": (24, 16), "b_enc": (24,), "b_dec": (16,), "threshold": (24,)}
    np.savez(scope / "params.npz", **{name: np.ones(shape, np.float32) for name, shape in arrays.items()})
    learned = root / "learned"
    learned.mkdir()
    state = {"encoder.weight": (24, 16), "encoder.bias": (24,), "decoder.weight": (16, 24), "bias": (16,)}
    torch.save({name: torch.ones(shape) for name, shape in state.items()}, learned / "ae.pt")
    vectors = root / "vectors"
    vectors.mkdir()
    SteeringVector({1: [1.0, 2.0]}, "add", "mlp_out").save(vectors / "v.safetensors")
    (vectors / "v.json").write_text(json.dumps({"vectors": {"mlp_out": {"1": [1.0, 2.0]}}}))
    torch.save({1: torch.ones(4)}, vectors / "v.pt")
    captures = _captures(root / "captures")
    sidecar = next(path.name for path in captures.glob("*.json"))
    config = next(path.name for path in lens.glob("*.json") if "label" not in path.name)
    weights = next(path.name for path in lens.glob("*.safetensors"))
    site = next(path.name for path in own.glob("layer*.safetensors"))
    return {
        "config": FileKind(model, "config.json", open_checkpoint),
        "index": FileKind(model, "model.safetensors.index.json", open_checkpoint),
        "shard": FileKind(model, shard, open_checkpoint, 4000),
        "tokenizer": FileKind(words, "tokenizer.json", Tokenizer.from_file),
        "gguf": FileKind(
            root / "gguf", "model.gguf", lambda path: open_checkpoint(path / "model.gguf"), 6000
        ),
        "SAELens config": FileKind(lens, config, Sae.load),
        "SAELens weights": FileKind(lens, weights, Sae.load, 600),
        "manifest": FileKind(own, "manifest.json", load_all),
        "manifest weights": FileKind(own, site, load_all, 600),
        "Gemma Scope": FileKind(scope, "params.npz", lambda path: Sae.load(path, "mlp_out", 1)),
        "dictionary_learning": FileKind(learned, "ae.pt", lambda path: Sae.load(path, "mlp_out", 1)),
        "vector": FileKind(
            vectors, "v.safetensors", lambda path: SteeringVector.load(path / "v.safetensors")
        ),
        "vector module": FileKind(vectors, "v.json", lambda path: import_vectors(path / "v.json", op="add")),
        "vector tensors": FileKind(
            vectors, "v.pt", lambda path: import_vectors(path / "v.pt", op="add", hook="mlp_out")
        ),
        "sidecar": FileKind(captures, sidecar, read_request),
        "journal": FileKind(*_journal(root / "journal"), _repaired),
    }


def _captures(root: Path) -> Path:
    """The folder of one sealed request."""
    with CaptureWriter(FileOptions(root, coalesce_max_bytes=0, num_shards=1), SoftDisk()) as files:
        files.begin(CaptureRequest("r", "r", "tag", "packed"))
        files.append(chunk("r", "mlp_in", 2, 0, 3))
        assert files.finish(CaptureFinish("r")).result(300).status == "ok"
    return root / "tag" / "r"


def _journal(root: Path) -> tuple[Path, str]:
    """A copy of the folder of a request that is still being written, and its journal."""
    with CaptureWriter(FileOptions(root / "live", coalesce_max_bytes=0, num_shards=1), SoftDisk()) as files:
        files.begin(CaptureRequest("r", "r", "tag", "packed"))
        files.append(chunk("r", "mlp_in", 2, 0, 3))
        copied = Path(shutil.copytree(root / "live", root / "copy"))
    journal = next(copied.rglob("*.journal"))
    return copied, str(journal.relative_to(copied))


def _repaired(path: Path) -> None:
    """Repair a copy, since a repair renames the files."""
    copied = Path(shutil.copytree(path, path.with_name(path.name + "-repaired")))
    try:
        repair(copied, SoftDisk())
    finally:
        shutil.rmtree(copied)
