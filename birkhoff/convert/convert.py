"""`convert(src, dst)`: convert a checkpoint to another format, with a few megabytes in memory at a time.

The plan is built from headers alone and can be inspected with `dry_run`. Writing resumes after an interruption and
publishes the files at the end. The output is then reopened and compared with the source: every small tensor, and a
sample of rows and experts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from birkhoff.convert.check import check_output
from birkhoff.convert.conversion_plan import ConversionPlan
from birkhoff.convert.formats import DEFAULTS, resolve_format
from birkhoff.convert.to_gguf import GGUFPlan
from birkhoff.convert.to_safetensors import plan_safetensors
from birkhoff.convert.write import WriteResult, journal_path, run_conversion
from birkhoff.errors import ConvertError, OptionError
from birkhoff.option_checks import check_int
from birkhoff.small_file import read_text
from birkhoff.text.prompt_texts import load_prompt_texts
from birkhoff.weights.checkpoint import Checkpoint, open_checkpoint
from birkhoff.weights.locate import locate
from birkhoff.weights.released import SHARD_BYTES
from birkhoff.weights.tensor_ref import naming_files

NO_SPLIT = 1 << 62
_TEXTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "encoding/encoding_dsv4.py")
_MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion or dry run. `rounding` is per class: values, values changed, worst relative error."""

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
    """Convert a checkpoint. `to` is "gguf" or "safetensors"; by default it follows from the suffix of `dst`.

    `experts` and `dense` are formats of `formats.py`; by default those of the release, in GGUF fp4 and q8_0."""
    destination = Path(dst).expanduser()
    to = to or _format_of(destination)
    if to not in DEFAULTS:
        raise OptionError(f"to is {to!r}, expected gguf or safetensors.")
    if to == "gguf" and destination.suffix != ".gguf":
        raise OptionError(f"{destination.name} does not end in .gguf, which a GGUF file's name must.")
    if to == "safetensors" and preset != "upstream":
        raise OptionError(f"preset is {preset!r}, but presets are for GGUF. Leave --preset away.")
    if shard_bytes is not None:
        check_int("shard_bytes", shard_bytes)
    if workers is not None:
        check_int("workers", workers, 1, 64)
    experts = resolve_format("experts", experts or DEFAULTS[to]["experts"], to)
    dense = resolve_format("dense", dense or DEFAULTS[to]["dense"], to)
    source = open_checkpoint(locate(src))
    plan = _plan(source, destination, to, experts, dense, preset, mtp, shard_bytes)
    result, checked = WriteResult(), 0
    if not dry_run:
        _refuse_existing(plan)
        with naming_files(source):
            result = run_conversion(plan, workers or min(4, os.cpu_count() or 1), exact, progress)
        checked = check_output(source, open_checkpoint(_opened_by(plan)), result.rounding)
    return Conversion(
        source=str(src),
        destination=str(destination),
        to=to,
        experts=experts,
        dense=dense,
        preset=preset,
        files=[{"name": f.path.name, "bytes": f.nbytes, "tensors": f.tensors} for f in plan.files],
        tensors=sum(file.tensors for file in plan.files),
        source_bytes=sum(ref.nbytes for ref in source.values()),
        bytes=plan.nbytes,
        bytes_by_class=plan.bytes_by_class(),
        written=not dry_run,
        units=len(plan.units),
        notices=[*source.notices, *plan.notices],
        seconds=round(result.seconds, 3),
        resumed_units=result.resumed_units,
        rounding={kind: rounding.to_json() for kind, rounding in result.rounding.items()},
        checked=checked,
    )


def _format_of(destination: Path) -> str:
    """The format that the name of the output asks for. A name such as `model.bin` is one of a file, which no format
    has; a suffix that is no word, as in `V4.1`, is part of a directory's name."""
    if destination.suffix == ".gguf":
        return "gguf"
    if re.fullmatch(r"\.[A-Za-z]+", destination.suffix) and not destination.is_dir():
        raise OptionError(
            f"{destination.name} has the suffix {destination.suffix}, expected NAME.gguf for a GGUF file, or a "
            "directory for safetensors. Choose such a name, or say --to safetensors (in Python to=)."
        )
    return "safetensors"


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
    builder = GGUFPlan(source, destination, experts, dense, preset, mtp, shard_bytes or NO_SPLIT)
    return builder.plan(options, {}, tokenizer, load_prompt_texts(source.path, source.chat_texts))


def _text(path: Path) -> str | None:
    try:
        return read_text(path, _MAX_TEXT_BYTES)
    except (OSError, UnicodeDecodeError):
        return None


def _opened_by(plan: ConversionPlan) -> Path:
    """Return the path that opens the output: the directory, or the first GGUF part."""
    return plan.destination if plan.texts else plan.files[0].path


def _refuse_existing(plan: ConversionPlan) -> None:
    if journal_path(plan.destination).exists():
        return
    existing = [file.path for file in plan.files if file.path.exists()]
    if plan.texts and plan.destination.is_dir():
        existing += list(plan.destination.glob("*.safetensors"))
    if existing:
        raise ConvertError(f"{existing[0]} already exists. Choose another name or remove it first.")
    if plan.texts and plan.destination.is_file():
        raise ConvertError(f"{plan.destination} is a file, expected a directory to write shards into.")
