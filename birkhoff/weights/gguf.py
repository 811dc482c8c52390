"""Open GGUF files of architecture `deepseek4`, dialects A (upstream) and B (ds4).

Headers are parsed by `gguf_header.py` in a child process with time and memory limits, so that no file can hang or crash
this one. The parts of a split file are found by their numbers and must be complete. The MTP block is a second file:
NAME-mtp.gguf is used with NAME.gguf if it exists, and the notices say so. As for safetensors, the tensors must be
exactly those the config implies.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from birkhoff.config import V4Config
from birkhoff.errors import CheckpointError, TensorDtype, TensorShape, UnsupportedModel
from birkhoff.weights import gguf_header
from birkhoff.weights.gguf_keys import STUB_ADVICE, check_architecture, config_from_metadata
from birkhoff.weights.gguf_tensors import GGUFRefs, GGUFTensor, add_tensors
from birkhoff.weights.gguf_text import tokenizer_json
from birkhoff.weights.safetensors import read_exactly
from birkhoff.weights.shard_index import ErrorHandler, join_names, raise_error

DEADLINE_SECONDS = 30.0  # wall-clock limit; the child's CPU limit is five seconds
CHILD_LIMITS = {"seconds": 5, "bytes": 2 << 30}
MAX_BLOCKS = 1 << 16
SCALES = "birkhoff.scales"
SCALE_NAMES = "birkhoff.scale_names"
CHAT_TEXTS = "birkhoff.chat_texts"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NUMPY = {
    "B": "u1",
    "b": "i1",
    "H": "<u2",
    "h": "<i2",
    "I": "<u4",
    "i": "<i4",
    "f": "<f4",
    "?": "?",
    "Q": "<u8",
    "q": "<i8",
    "d": "<f8",
}
_STUB_NAME = re.compile(r"\.hc_(attn|ffn)\.(fn|base|scale)|^output\.hc_head\.|\.attn_o_[ab]\.")
_CHILD = """
import runpy, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[3]), int(sys.argv[3]) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[4]), int(sys.argv[4])))
except (ImportError, ValueError, OSError):
    pass
sys.exit(runpy.run_path(sys.argv[1])["main"](sys.argv[2]))
"""


class GGUFHeader(NamedTuple):
    """One file: its metadata, and its tensors in file order."""

    path: Path
    keys: dict[str, Any]
    types: dict[str, int]
    tensors: list[GGUFTensor]
    alignment: int


class GGUFModel(NamedTuple):
    """Everything that is read from the headers of a GGUF model."""

    config: V4Config
    dialect: str
    refs: GGUFRefs
    notices: list[str]
    files: list[Path]
    tokenizer_json: str | None
    chat_texts: str | None
    scales: Mapping[str, torch.Tensor]  # E8M0 scales of the source, for values stored without them


def read_header(path: Path) -> GGUFHeader:
    """Read the header of one file in a child process."""
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing in {path.parent}. Download it again.")
    limits = [str(CHILD_LIMITS["seconds"]), str(CHILD_LIMITS["bytes"])]
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(gguf_header.__file__), str(path), *limits]
    try:
        child = subprocess.run(
            command, capture_output=True, timeout=DEADLINE_SECONDS, stdin=subprocess.DEVNULL
        )
        result = json.loads(child.stdout) if child.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        result = {}
    except (ValueError, RecursionError):
        result = {}
    if not result:
        raise CheckpointError(
            f"the header of {path.name} could not be read within its limits ({CHILD_LIMITS['seconds']} s of work). "
            "It is damaged or was made to do harm; download it again."
        )
    return header_from(path, result)


def header_from(path: Path, result: dict[str, Any]) -> GGUFHeader:
    """Convert the child's JSON output to a header, or raise the error it reports."""
    if "malformed" in result:
        kind = {"shape": TensorShape, "dtype": TensorDtype}.get(result["kind"], CheckpointError)
        raise kind(f"{path.name} {result['malformed']}. Download it again, or convert it again.")
    raw = result["header"]
    tensors = [
        GGUFTensor(path, name, kind, tuple(shape), at, size) for name, kind, shape, at, size in raw["tensors"]
    ]
    keys = {key: _long_array(path, value) for key, value in raw["keys"].items()}
    return GGUFHeader(path, keys, raw["types"], tensors, raw["alignment"])


def _long_array(path: Path, value: Any) -> Any:
    """Read an array that the child reported by position; its bounds were checked there."""
    if not isinstance(value, dict):
        return value
    kind = np.dtype(_NUMPY[value["type"]])
    data = bytearray(value["count"] * kind.itemsize)
    read_exactly(path, value["at"], memoryview(data))
    array = np.frombuffer(data, kind)
    return array if kind.itemsize == 1 else array.tolist()


def open_gguf(
    path: Path, on_error: ErrorHandler = raise_error, read: Callable[[Path], GGUFHeader] = read_header
) -> GGUFModel:
    """Open a file, its other parts, and the MTP file next to it. `read` reads one header."""
    headers = _parts(path, on_error, read)
    notices: list[str] = []
    first = headers[0]
    check_architecture(first.keys, first.path.name)
    tensors = [tensor for header in headers for tensor in header.tensors]
    _refuse_stub(first.path.name, tensors)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    config = config_from_metadata(first.keys, shapes, first.path.name)
    layers = config.num_hidden_layers
    if "blk.0.attn_q_a.weight" not in shapes and any(
        name.startswith((f"blk.{layers}.", "mtp.")) for name in shapes
    ):
        raise CheckpointError(
            f"{first.path.name} holds an MTP block alone, which drafts for a model. Give the trunk's file; the MTP "
            "file is used when it is called NAME-mtp.gguf beside NAME.gguf."
        )
    refs = GGUFRefs()
    add_tensors(tensors, layers, False, refs, on_error)
    files = [header.path for header in headers]
    if not any(name.startswith("mtp.") for name in refs):
        mtp_file = _find_mtp_file(first.path)
        if mtp_file is not None:
            header = read(mtp_file)
            check_architecture(header.keys, mtp_file.name)
            copies = add_tensors(header.tensors, layers, True, refs, on_error)
            files.append(mtp_file)
            skipped = f"; its {len(copies)} copies of shared tensors were skipped" if copies else ""
            notices.append(f"{mtp_file.name} was used for multi-token prediction{skipped}.")
            tensors += header.tensors
    elif "mtp.0.hc_head_fn" not in refs:
        notices.append(
            f"{first.path.name} holds an MTP block without a head mixer of its own; it was left out."
        )
        refs = GGUFRefs()
        add_tensors(
            [t for t in tensors if not t.name.startswith(f"blk.{layers}.")], layers, False, refs, on_error
        )
    has_mtp = any(name.startswith("mtp.0.") for name in refs)
    config = replace(config, num_nextn_predict_layers=int(has_mtp))
    text = tokenizer_json(first.keys, first.path.name, notices)
    texts = first.keys.get(CHAT_TEXTS)
    texts = texts if isinstance(texts, str) else None
    return GGUFModel(config, _dialect(tensors), refs, notices, files, text, texts, stored_scales(first.keys))


def raw_refs(path: Path) -> GGUFRefs:
    """Return the tensors of one file as trunk tensors, for a file whose metadata does not describe a model."""
    refs = GGUFRefs()
    add_tensors(read_header(path).tensors, MAX_BLOCKS, False, refs, lambda error: None)
    return refs


def stored_scales(keys: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the scales of FP8 and FP4 matrices that were written unquantised, by released name.

    They serve only to recover the same codes, so inconsistent scales are ignored.
    """
    flat, names = keys.get(SCALES), keys.get(SCALE_NAMES)
    if flat is None or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return {}
    values = np.asarray(flat)
    if values.ndim != 1 or values.dtype.kind not in "ui":
        return {}
    out, at = {}, 0
    for row in names:
        name, _, sizes = row.partition("|")
        if not re.fullmatch(r"\d{1,9}x\d{1,9}", sizes):
            return {}
        rows, columns = map(int, sizes.split("x"))
        piece = values[at : at + rows * columns]
        if len(piece) != rows * columns or (piece.size and (piece.min() < 0 or piece.max() > 254)):
            return {}
        out[name] = torch.from_numpy(piece.astype(np.uint8).reshape(rows, columns))
        at += rows * columns
    return out if at == len(values) else {}


def _parts(path: Path, on_error: ErrorHandler, read: Callable[[Path], GGUFHeader]) -> list[GGUFHeader]:
    """Return the headers of all parts of a split file in order, or of the single file."""
    match = _PART.fullmatch(path.name)
    if match is None:
        header = read(path)
        if header.keys.get("split.count", 1) != 1:
            raise CheckpointError(
                f"{path.name} is part of a split file but its name does not say which. Restore its name, "
                "NAME-00001-of-000NN.gguf."
            )
        return [header]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count:
        raise CheckpointError(f"{path.name} numbers itself {match[2]} of {match[3]}. Restore its name.")
    names = [f"{match[1]}-{i:05}-of-{match[3]}.gguf" for i in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {count} parts are missing: {join_names(missing)}. Download them again."
        )
    headers = [read(path.parent / name) for name in names]
    for index, header in enumerate(headers):
        seen = (header.keys.get("split.no"), header.keys.get("split.count"))
        if seen != (index, count):
            on_error(
                CheckpointError(
                    f"{header.path.name} says it is part {seen[0]} of {seen[1]}, expected {index} of {count} (counted "
                    "from 0). The parts come from different downloads."
                )
            )
    total = sum(len(h.tensors) for h in headers)
    announced = headers[0].keys.get("split.tensors.count")
    if announced != total:
        on_error(
            CheckpointError(
                f"{path.name} announces {announced} tensors, its parts hold {total}. Download them again."
            )
        )
    return headers


def _find_mtp_file(path: Path) -> Path | None:
    match = _PART.fullmatch(path.name)
    stem = match[1] if match else path.name.removesuffix(".gguf")
    mtp_file = path.with_name(f"{stem}-mtp.gguf")
    return mtp_file if mtp_file.is_file() and mtp_file != path else None


def _refuse_stub(label: str, tensors: list[GGUFTensor]) -> None:
    stub = [tensor.name for tensor in tensors if _STUB_NAME.search(tensor.name)]
    if stub:
        raise UnsupportedModel(
            f"{label} holds {join_names(stub)}: names of the old stub dialect. {STUB_ADVICE}"
        )


def _dialect(tensors: list[GGUFTensor]) -> str:
    """Dialect B is recognised by its MTP names, or by float16 in a tensor that dialect A never stores as such."""
    kinds = {tensor.name: tensor.kind for tensor in tensors}
    ds4 = any(name.startswith("mtp.") for name in kinds)
    return "gguf-ds4" if ds4 or kinds.get("blk.0.hc_attn_fn.weight") == "F16" else "gguf"
