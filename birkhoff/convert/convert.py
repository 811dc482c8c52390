"""`convert(src, dst)`: one checkpoint in, another out, with a few megabytes of it in memory at a time.

The plan is made from headers alone and can be looked at first (`dry_run`). Writing resumes after a kill and publishes
at the end; then the output is opened again by the reader and held against the source by samples: every small tensor,
rows of every matrix, experts of every stack.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from birkhoff.convert.check import check_output
from birkhoff.convert.conversion_plan import ConversionPlan
from birkhoff.convert.to_gguf import GGUFPlan
from birkhoff.convert.to_safetensors import plan_safetensors
from birkhoff.convert.write import Done, fill, journal_path
from birkhoff.errors import ConvertError, OptionError
from birkhoff.text.literals import Literals, literals_from_json, load_literals
from birkhoff.weights.checkpoint import Checkpoint, open_checkpoint
from birkhoff.weights.released import SHARD_BYTES

DEFAULTS = {"gguf": {"experts": "mxfp4", "dense": "q8_0"}, "safetensors": {"experts": "fp4", "dense": "fp8"}}
NO_SPLIT = 1 << 62
_TEXTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "encoding/encoding_dsv4.py")
_MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True)
class Conversion:
    """What was done, or would be. `rounding` says per class how many numbers changed and by how much of the largest."""

    source: str
    destination: str
    to: str
    experts: str
    dense: str
    preset: str
    files: list[dict[str, Any]]
    tensors: int
    source_bytes: int
    bytes: int
    bytes_by_class: dict[str, int]
    written: bool
    seconds: float = 0.0
    resumed_units: int = 0
    units: int = 0
    rounding: dict[str, dict[str, float]] = field(default_factory=dict)
    checked: int = 0
    notices: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str | None = None,
    experts: str | None = None,
    dense: str | None = None,
    preset: str = "upstream",
    mtp: bool = True,
    shard_bytes: int | None = None,
    exact: bool = False,
    dry_run: bool = False,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Convert a checkpoint. `to` is "gguf" or "safetensors", told by the ending of `dst` when not given."""
    destination = Path(dst).expanduser()
    to = to or ("gguf" if destination.suffix == ".gguf" else "safetensors")
    if to not in DEFAULTS:
        raise OptionError(f"to is {to!r}, expected gguf or safetensors.")
    if to == "gguf" and destination.suffix != ".gguf":
        raise OptionError(f"{destination.name} does not end in .gguf, which a GGUF file's name must.")
    if to == "safetensors" and preset != "upstream":
        raise OptionError(f"preset is {preset!r}, but presets are for GGUF. Leave --preset away.")
    if shard_bytes is not None and (type(shard_bytes) is not int or shard_bytes < 1):
        raise OptionError(f"shard_bytes is {shard_bytes!r}, expected a positive number of bytes.")
    if workers is not None and (type(workers) is not int or not 1 <= workers <= 64):
        raise OptionError(f"workers is {workers!r}, expected 1 to 64.")
    experts = experts or DEFAULTS[to]["experts"]
    dense = dense or DEFAULTS[to]["dense"]
    source = open_checkpoint(_embedded(src))
    work = _plan(source, destination, to, experts, dense, preset, mtp, shard_bytes)
    done, checked = Done(), 0
    if not dry_run:
        _refuse_existing(work)
        done = fill(work, workers or min(4, os.cpu_count() or 1), exact, progress)
        checked = check_output(source, open_checkpoint(_opened_by(work)), done.rounding)
    return Conversion(
        source=str(src),
        destination=str(destination),
        to=to,
        experts=experts,
        dense=dense,
        preset=preset,
        files=[{"name": f.path.name, "bytes": f.nbytes, "tensors": f.tensors} for f in work.files],
        tensors=sum(file.tensors for file in work.files),
        source_bytes=sum(ref.nbytes for ref in source.values()),
        bytes=work.nbytes,
        bytes_by_class=work.bytes_by_class(),
        written=not dry_run,
        units=len(work.units),
        notices=[*source.notices, *work.notices],
        seconds=round(done.seconds, 3),
        resumed_units=done.resumed_units,
        rounding={k: {"numbers": n, "changed": c, "worst": w} for k, (n, c, w, _) in done.rounding.items()},
        checked=checked,
    )


def _embedded(src: str | Path) -> str | Path:
    from birkhoff.embedded import EMBEDDED

    return EMBEDDED / "nano" if src == "nano" else src


def _plan(
    source: Checkpoint,
    destination: Path,
    to: str,
    experts: str,
    dense: str,
    preset: str,
    mtp: bool,
    shard_bytes: int | None,
) -> ConversionPlan:
    options = {
        "to": to,
        "experts": experts,
        "dense": dense,
        "preset": preset,
        "mtp": mtp,
        "shard_bytes": shard_bytes,
    }
    tokenizer = source.tokenizer_json or _text(source.path / "tokenizer.json")
    if to == "safetensors":
        texts = {name: text for name in _TEXTS if (text := _text(source.path / name)) is not None}
        if tokenizer is not None:
            texts["tokenizer.json"] = tokenizer
        return plan_safetensors(
            source, destination, experts, dense, mtp, shard_bytes or SHARD_BYTES, options, texts
        )
    plan = GGUFPlan(source, destination, experts, dense, preset, mtp, shard_bytes or NO_SPLIT)
    return plan.work(options, {}, tokenizer, literals_of(source))


def literals_of(source: Checkpoint) -> Literals:
    """The texts a checkpoint's chats are made with, whatever its format."""
    if source.chat_texts is not None:
        return literals_from_json(source.chat_texts, source.path.name)
    return load_literals(source.path)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= _MAX_TEXT_BYTES else None
    except (OSError, UnicodeDecodeError):
        return None


def _opened_by(work: ConversionPlan) -> Path:
    """What to open to see the output: the directory, or the first GGUF part."""
    return work.destination if work.texts else work.files[0].path


def _refuse_existing(work: ConversionPlan) -> None:
    if journal_path(work.destination).exists():
        return
    there = [file.path for file in work.files if file.path.exists()]
    if work.texts and work.destination.is_dir():
        there += list(work.destination.glob("*.safetensors"))
    if there:
        raise ConvertError(f"{there[0]} already exists. Choose another name or remove it first.")
    if work.texts and work.destination.is_file():
        raise ConvertError(f"{work.destination} is a file, expected a directory to write shards into.")
