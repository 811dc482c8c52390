"""Opening GGUF files of architecture `deepseek4`, dialects A (upstream) and B (ds4), as one `Checkpoint`.

The header is read by `gguf_header.py` in a process of its own, with limits on time and memory, so that no file can hang
or crash the reader of it. Parts of a split file are found by their numbers and must be complete. An MTP block lives in
a second file: one called NAME-mtp.gguf beside NAME.gguf is used with it, and the notices say so. What the config
implies must be there, and nothing else, exactly as for safetensors.
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
from birkhoff.weights.gguf_keys import STUB_ADVICE, check_architecture, config_from
from birkhoff.weights.gguf_tensors import GGUFTensor, References, read_exactly, refer
from birkhoff.weights.gguf_text import tokenizer_json
from birkhoff.weights.shard_index import Complain, raise_it, some

DEADLINE_SECONDS = 30.0  # of the clock; the child itself stops after five seconds of work
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


class OpenedGGUF(NamedTuple):
    """What a GGUF model is made of."""

    config: V4Config
    dialect: str
    references: References
    notices: list[str]
    files: list[Path]
    tokenizer_json: str | None
    chat_texts: str | None
    scales: Mapping[str, torch.Tensor]  # E8M0 scales the source had, for numbers that are stored without them


def read_header(path: Path) -> GGUFHeader:
    """The header of one file, read in a child process."""
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing in {path.parent}. Download it again.")
    limits = [str(CHILD_LIMITS["seconds"]), str(CHILD_LIMITS["bytes"])]
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(gguf_header.__file__), str(path), *limits]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=DEADLINE_SECONDS, stdin=subprocess.DEVNULL
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        answer = {}
    except (ValueError, RecursionError):
        answer = {}
    if not answer:
        raise CheckpointError(
            f"the header of {path.name} could not be read within its limits ({CHILD_LIMITS['seconds']} s of work). "
            "It is damaged or was made to do harm; download it again."
        )
    return header_from(path, answer)


def header_from(path: Path, answer: dict[str, Any]) -> GGUFHeader:
    """What the reader said, as a header or as a typed error."""
    if "malformed" in answer:
        kind = {"shape": TensorShape, "dtype": TensorDtype}.get(answer["kind"], CheckpointError)
        raise kind(f"{path.name} {answer['malformed']}. Download it again, or convert it again.")
    raw = answer["header"]
    tensors = [
        GGUFTensor(path, name, kind, tuple(shape), at, size) for name, kind, shape, at, size in raw["tensors"]
    ]
    keys = {key: _long_array(path, value) for key, value in raw["keys"].items()}
    return GGUFHeader(path, keys, raw["types"], tensors, raw["alignment"])


def _long_array(path: Path, value: Any) -> Any:
    """Arrays that were left in the file are read here; their bounds were checked."""
    if not isinstance(value, dict):
        return value
    kind = np.dtype(_NUMPY[value["type"]])
    data = bytearray(value["count"] * kind.itemsize)
    read_exactly(path, value["at"], memoryview(data))
    array = np.frombuffer(data, kind)
    return array if kind.itemsize == 1 else array.tolist()


def open_gguf(
    path: Path, complain: Complain = raise_it, read: Callable[[Path], GGUFHeader] = read_header
) -> OpenedGGUF:
    """Open a file, the parts it belongs to, and the MTP file beside it; `read` is how a header is read."""
    headers = _parts(path, complain, read)
    notices: list[str] = []
    first = headers[0]
    check_architecture(first.keys, first.path.name)
    tensors = [tensor for header in headers for tensor in header.tensors]
    _refuse_stub(first.path.name, tensors)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    config = config_from(first.keys, shapes, first.path.name)
    layers = config.num_hidden_layers
    if "blk.0.attn_q_a.weight" not in shapes and any(
        name.startswith((f"blk.{layers}.", "mtp.")) for name in shapes
    ):
        raise CheckpointError(
            f"{first.path.name} holds an MTP block alone, which drafts for a model. Give the trunk's file; the MTP "
            "file is used when it is called NAME-mtp.gguf beside NAME.gguf."
        )
    references = References()
    refer(tensors, layers, False, references, complain)
    files = [header.path for header in headers]
    if not any(name.startswith("mtp.") for name in references):
        beside = _mtp_beside(first.path)
        if beside is not None:
            header = read(beside)
            check_architecture(header.keys, beside.name)
            copies = refer(header.tensors, layers, True, references, complain)
            files.append(beside)
            notices.append(
                f"{beside.name} was used for multi-token prediction; its {len(copies)} copies were skipped."
            )
            tensors += header.tensors
    elif "mtp.0.hc_head_fn" not in references:
        notices.append(
            f"{first.path.name} holds an MTP block without a head mixer of its own; it was left out."
        )
        references = References()
        refer(
            [t for t in tensors if not t.name.startswith(f"blk.{layers}.")],
            layers,
            False,
            references,
            complain,
        )
    has_mtp = any(name.startswith("mtp.0.") for name in references)
    config = replace(config, num_nextn_predict_layers=int(has_mtp))
    text = tokenizer_json(first.keys, first.path.name, notices)
    texts = first.keys.get(CHAT_TEXTS)
    texts = texts if isinstance(texts, str) else None
    return OpenedGGUF(
        config, _dialect(tensors), references, notices, files, text, texts, kept_scales(first.keys)
    )


def raw_references(path: Path) -> References:
    """The tensors of one file, taken as trunk, for a file whose metadata describes no model."""
    references = References()
    refer(read_header(path).tensors, MAX_BLOCKS, False, references, lambda error: None)
    return references


def kept_scales(keys: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The scales of FP8 and FP4 matrices that were written out as plain numbers, flat, by released name.

    They only ever help to find the same codes again, so anything odd about them means that there are none.
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


def _parts(path: Path, complain: Complain, read: Callable[[Path], GGUFHeader]) -> list[GGUFHeader]:
    """Every part of a split file, first part first; the file itself when it is whole."""
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
            f"{len(missing)} of {count} parts are missing: {some(missing)}. Download them again."
        )
    headers = [read(path.parent / name) for name in names]
    for number, header in enumerate(headers):
        seen = (header.keys.get("split.no"), header.keys.get("split.count"))
        if seen != (number, count):
            complain(
                CheckpointError(
                    f"{header.path.name} says it is part {seen[0]} of {seen[1]}, expected {number} of {count} (counted "
                    "from 0). The parts come from different downloads."
                )
            )
    total = sum(len(h.tensors) for h in headers)
    announced = headers[0].keys.get("split.tensors.count")
    if announced != total:
        complain(
            CheckpointError(
                f"{path.name} announces {announced} tensors, its parts hold {total}. Download them again."
            )
        )
    return headers


def _mtp_beside(path: Path) -> Path | None:
    match = _PART.fullmatch(path.name)
    stem = match[1] if match else path.name.removesuffix(".gguf")
    beside = path.with_name(f"{stem}-mtp.gguf")
    return beside if beside.is_file() and beside != path else None


def _refuse_stub(label: str, tensors: list[GGUFTensor]) -> None:
    stub = [tensor.name for tensor in tensors if _STUB_NAME.search(tensor.name)]
    if stub:
        raise UnsupportedModel(f"{label} holds {some(stub)}: names of the old stub dialect. {STUB_ADVICE}")


def _dialect(tensors: list[GGUFTensor]) -> str:
    """A and B share names; B is told by its own MTP names, or by float16 where A never has it."""
    kinds = {tensor.name: tensor.kind for tensor in tensors}
    ds4 = any(name.startswith("mtp.") for name in kinds)
    return "gguf-ds4" if ds4 or kinds.get("blk.0.hc_attn_fn.weight") == "F16" else "gguf"
