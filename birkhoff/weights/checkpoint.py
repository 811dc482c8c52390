"""Open a checkpoint as a lazy mapping from released names to unread tensors, plus its config.

`open_checkpoint` reads headers only and rejects everything that could not be loaded: files must be complete and
consistent, names are translated, and every tensor that the config implies must be present exactly once with a valid
shape and dtype, and no other. Tensors that are left out deliberately (embedding and head copies inside MTP, a DSpark
drafter) are listed in `notices`. After it returns, loading can only fail on the values themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from birkhoff.config import V4Config
from birkhoff.errors import CheckpointError, TensorMissing, TensorUnexpected, UnsupportedModel
from birkhoff.small_file import read_json
from birkhoff.weights.drafter import describe as describe_drafter
from birkhoff.weights.drafter import is_drafter
from birkhoff.weights.gguf import open_gguf
from birkhoff.weights.layout import model_tensors, scale_name
from birkhoff.weights.safetensors import TensorEntry, read_rows
from birkhoff.weights.shard_index import ErrorHandler, join_names, raise_error, read_shards
from birkhoff.weights.tensor_names import from_transformers
from birkhoff.weights.tensor_ref import FLOATS, INSPECT, TensorRef, check_expert_table, check_tensor, in_file

_V41 = re.compile(r"(^|\.)(engram|vision|aligner)|gate\.bias_vl$")
_MAX_MISSING = 1000  # stop counting here: a config of impossible size would make the walk endless


class Checkpoint(Mapping[str, TensorRef]):
    """Mapping from released tensor names to TensorRef.

    `dialect` is "released", "base-fp8", "bf16" (any plain floats), "transformers", "gguf" or "gguf-ds4". A GGUF file
    may contain a tokenizer (`tokenizer_json`), the scales its unquantised values had in the source (`scales`) and the
    literal texts of the chat format (`chat_texts`, JSON).
    """

    def __init__(
        self,
        path: Path,
        config: V4Config,
        dialect: str,
        tensors: Mapping[str, TensorRef],
        notices: list[str],
        files: list[Path],
        tokenizer_json: str | None = None,
        scales: Mapping[str, torch.Tensor] | None = None,
        chat_texts: str | None = None,
    ):
        self.path = path
        self.config = config
        self.dialect = dialect
        self.notices = notices
        self.files = files
        self.tokenizer_json = tokenizer_json
        self.scales = scales or {}
        self.chat_texts = chat_texts
        self.drafter: str | None = None  # a DSpark drafter in the files, and what it would need
        self._tensors = tensors

    @property
    def has_mtp(self) -> bool:
        """Whether the files contain a multi-token-prediction block."""
        return self.config.num_nextn_predict_layers > 0

    def __getitem__(self, name: str) -> TensorRef:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.dialect}, {len(self)} tensors)"


class SafetensorsRefs(Mapping[str, TensorRef]):
    """Mapping that builds each TensorRef on access, so that 70,000 tensors cost only their header entries."""

    def __init__(self, entries: dict[str, TensorEntry]):
        self._entries = entries

    def __getitem__(self, name: str) -> TensorRef:
        entry = self._entries[name]
        reader = partial(read_rows, entry)
        where = (entry.path, entry.offset)
        return TensorRef(name, entry.dtype, entry.shape, entry.nbytes, reader, location=where)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def open_checkpoint(path: str | Path, on_error: ErrorHandler = raise_error) -> Checkpoint:
    """Open a directory (index and shards, one file, or numbered shards), a safetensors file or a GGUF file."""
    path = Path(path).expanduser()
    if not path.exists():
        link = f": it is a link to {path.readlink()}, where nothing is" if path.is_symlink() else ""
        raise CheckpointError(
            f"{path} does not exist{link}. A checkpoint is a directory with config.json and safetensors files, or a "
            "GGUF file."
        )
    if not (path.is_dir() or path.is_file()):
        raise CheckpointError(
            f"{path} is neither a directory nor a regular file, expected a directory with config.json and safetensors "
            "files, or a GGUF file. Give such a path."
        )
    if is_gguf(path):
        return _open_gguf(path, on_error)
    if path.is_file() and path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path.name} is neither a safetensors nor a GGUF file. Give the directory that holds config.json and "
            "the safetensors files, or a GGUF file."
        )
    folder = path if path.is_dir() else path.parent
    config = V4Config.from_file(folder / "config.json")
    notices = [f"config.json has the unknown key {key!r}; it was not used." for key in config.unknown]
    shards = read_shards(path, on_error)
    notices += shards.notices
    entries, dialect = _translate(shards.tensors, on_error)
    config = _untied(entries, config, notices)
    drafter = describe_drafter(entries, read_json(folder / "config.json")) if is_drafter(entries) else None
    config = _select_mtp(entries, config, notices, drafter)
    refs = SafetensorsRefs(entries)
    check_layout(config, refs, on_error)
    checkpoint = Checkpoint(path, config, dialect, refs, notices, shards.files)
    checkpoint.drafter = drafter
    return checkpoint


def is_gguf(path: Path) -> bool:
    """Return whether `path` is a GGUF file, by suffix or magic bytes."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _open_gguf(path: Path, on_error: ErrorHandler) -> Checkpoint:
    opened = open_gguf(path, on_error)
    check_layout(opened.config, opened.refs, on_error)
    return Checkpoint(
        path,
        opened.config,
        opened.dialect,
        opened.refs,
        opened.notices,
        opened.files,
        opened.tokenizer_json,
        opened.scales,
        opened.chat_texts,
    )


def check_layout(
    config: V4Config, tensors: Mapping[str, TensorRef], on_error: ErrorHandler = raise_error
) -> None:
    """Check that the tensors are exactly those the config implies, each in a supported format."""
    missing: list[str] = []
    matched = 0
    for name, shape, storage in model_tensors(config):
        try:
            if storage == "ids":
                check_expert_table(tensors, name, shape)
                matched += 1
            else:
                matched += 1 if check_tensor(tensors, name, shape) == "float" else 2
        except TensorMissing:
            missing.append(scale_name(name) if name in tensors else name)
            if len(missing) >= _MAX_MISSING:
                break
        except CheckpointError as error:
            on_error(in_file(error, tensors))
    if missing:
        more = "at least " if len(missing) >= _MAX_MISSING else ""
        on_error(
            TensorMissing(
                f"{more}{len(missing)} tensors that the config implies are not in the files: "
                f"{join_names(missing)}. Check the config, or download the files again."
            )
        )
    if matched < len(tensors) and len(missing) < _MAX_MISSING:
        _check_no_extra(config, tensors, on_error)


def _check_no_extra(config: V4Config, tensors: Mapping[str, TensorRef], on_error: ErrorHandler) -> None:
    used: set[str] = set()
    for tensor in model_tensors(config):
        used.add(tensor.name)
        if tensor.name in tensors and tensors[tensor.name].dtype not in FLOATS:
            used.add(scale_name(tensor.name))
    extra = [name for name in tensors if name not in used]
    if extra:
        on_error(
            TensorUnexpected(
                f"the files hold {len(extra)} tensors the model has no place for: {join_names(extra)}. "
                f"Check that config.json belongs to these shards. {INSPECT}"
            )
        )


def _translate(stored: dict[str, TensorEntry], on_error: ErrorHandler) -> tuple[dict[str, TensorEntry], str]:
    foreign = [name for name in stored if _V41.search(name)]
    if foreign:
        raise UnsupportedModel(
            f"the files hold {join_names(foreign)}: this is DeepSeek-V4.1, which has another architecture "
            "and is not supported. Use a V4-Flash or V4-Pro checkpoint; its own config.json names the parts that are "
            "missing here."
        )
    modules = [name for name in stored if ".self_attn." in name]
    if modules:
        on_error(
            CheckpointError(
                f"the files hold {join_names(modules)}: module names of a transformers model in memory, "
                "which are not a file format. Write the model with its save_pretrained."
            )
        )
    if "model.embed_tokens.weight" in stored:
        return _rename(stored, on_error), "transformers"
    dtypes = {entry.dtype for name, entry in stored.items() if name.endswith(".weight")}
    if dtypes & {"I8", "U8"}:
        return stored, "released"
    return stored, "base-fp8" if "F8_E4M3" in dtypes else "bf16"


def _rename(stored: dict[str, TensorEntry], on_error: ErrorHandler) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for name, entry in stored.items():
        ours = from_transformers(name) or name  # an unknown name is kept and reported as unexpected
        if ours in entries:
            on_error(
                CheckpointError(
                    f"{ours} is in the files under two names, one of them {name}. Expected once; "
                    "take the checkpoint as it was written."
                )
            )
        entries[ours] = entry
    return entries


def _untied(entries: dict[str, TensorEntry], config: V4Config, notices: list[str]) -> V4Config:
    """A model whose head is its embedding, as one with a head of its own: `head.weight` is read from the embedding.

    `transformers` does not store such a head, and does not read one that is stored."""
    embed = entries.get("embed.weight")
    if not config.tie_word_embeddings or embed is None:
        return config
    unused = ", and the head.weight of the files was skipped" if "head.weight" in entries else ""
    notices.append(
        f"config.json ties the head to the embedding: head.weight is read from embed.weight{unused}."
    )
    entries["head.weight"] = embed
    return replace(config, tie_word_embeddings=False)


def _select_mtp(
    entries: dict[str, TensorEntry], config: V4Config, notices: list[str], drafter: str | None
) -> V4Config:
    """Drop unused MTP tensors from `entries`; return the config with the number of MTP blocks present."""

    def drop(unwanted: Callable[[str], bool], text: str) -> None:
        names = [name for name in entries if name.startswith("mtp.") and unwanted(name)]
        for name in names:
            del entries[name]
        if names:
            notices.append(text.format(count=len(names), names=join_names(names)))

    if drafter is not None:
        drop(
            lambda name: True,
            "the files hold a DSpark drafter; its {count} tensors were skipped, and the model runs without drafts: "
            "greedy tokens are the same.",
        )
        return replace(config, num_nextn_predict_layers=0)
    drop(
        lambda name: "emb" in name or name.endswith("head.weight"),
        "{count} copies of the trunk's tables inside MTP were skipped: {names}.",
    )
    announced = config.num_nextn_predict_layers
    drop(
        lambda name: _mtp_index(name) >= announced,
        f"MTP blocks announced by config.json: {announced}; {{count}} tensors beyond that were skipped: {{names}}.",
    )
    present = len({_mtp_index(name) for name in entries if name.startswith("mtp.")})
    if present < announced:
        notices.append(f"MTP blocks announced by config.json: {announced}; found in the files: {present}.")
    return replace(config, num_nextn_predict_layers=present)


def _mtp_index(name: str) -> int:
    index = name.split(".")[1]
    return int(index) if index.isdecimal() and len(index) < 6 else 0
