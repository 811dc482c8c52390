"""A checkpoint: a lazy mapping from our names to tensors that have not been read, plus its config.

`open_checkpoint` reads headers only and lets nothing pass that could not be loaded: files whole and consistent,
names translated, every tensor the config implies present once with a shape and dtype that make sense, nothing left
over. What is knowingly left out (copies of the tables inside MTP, a DSpark drafter) becomes a notice. After it
returns, building and filling the model can only fail on the numbers themselves.
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
from birkhoff.weights.gguf import open_gguf
from birkhoff.weights.layout import model_tensors, scale_name
from birkhoff.weights.safetensors import TensorEntry, read_rows
from birkhoff.weights.shard_index import Complain, gather, raise_it, some
from birkhoff.weights.tensor_names import TRANSFORMERS, Table, names_table, to_ours
from birkhoff.weights.tensor_ref import FLOATS, INSPECT, TensorRef, check_ids, recognise

_DRAFTER = ("main_proj", "markov_head", "confidence_head")
_V41 = re.compile(r"(^|\.)(engram|vision|aligner)|gate\.bias_vl$")
_MANY = 1000  # enough missing names to stop counting: a config of impossible size must not make us walk it


class Checkpoint(Mapping[str, TensorRef]):
    """Tensors by released name.

    `dialect` is "released", "base-fp8", "bf16" (any plain floats), "transformers", "gguf" or "gguf-ds4". A GGUF file
    may bring its tokenizer (`tokenizer_json`), the scales its plain numbers once had (`scales`) and the texts chats
    are made with (`chat_texts`, JSON).
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
        self._tensors = tensors

    @property
    def has_mtp(self) -> bool:
        """Whether the multi-token-prediction block is there to be loaded."""
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


class EntryRefs(Mapping[str, TensorRef]):
    """References made when asked for: 70,000 tensors cost their header rows and no more."""

    def __init__(self, entries: dict[str, TensorEntry]):
        self._entries = entries

    def __getitem__(self, name: str) -> TensorRef:
        entry = self._entries[name]
        return TensorRef(name, entry.dtype, entry.shape, entry.nbytes, partial(read_rows, entry))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def open_checkpoint(path: str | Path, complain: Complain = raise_it) -> Checkpoint:
    """Open a directory (index and shards, one file, or numbered shards), a safetensors file or a GGUF file."""
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist. A checkpoint is a directory with config.json and safetensors files, or a GGUF "
            "file."
        )
    if is_gguf(path):
        return _open_gguf(path, complain)
    if path.is_file() and path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path.name} is neither a safetensors nor a GGUF file. Give the directory that holds config.json and "
            "the safetensors files, or a GGUF file."
        )
    config = V4Config.from_file((path if path.is_dir() else path.parent) / "config.json")
    notices = [f"config.json has the unknown key {key!r}; it was not used." for key in config.unknown]
    shards = gather(path, complain)
    notices += shards.notices
    entries, dialect = _translate(shards.tensors, complain)
    config = _choose_mtp(entries, config, notices)
    refs = EntryRefs(entries)
    check_layout(config, refs, complain)
    return Checkpoint(path, config, dialect, refs, notices, shards.files)


def is_gguf(path: Path) -> bool:
    """A file that is GGUF by its name or by its first bytes."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _open_gguf(path: Path, complain: Complain) -> Checkpoint:
    opened = open_gguf(path, complain)
    check_layout(opened.config, opened.references, complain)
    return Checkpoint(
        path,
        opened.config,
        opened.dialect,
        opened.references,
        opened.notices,
        opened.files,
        opened.tokenizer_json,
        opened.scales,
        opened.chat_texts,
    )


def check_layout(config: V4Config, tensors: Mapping[str, TensorRef], complain: Complain = raise_it) -> None:
    """Every tensor the config implies is there, once, in a form that can be read; and nothing else is."""
    missing: list[str] = []
    fitting = 0
    for name, shape, storage in model_tensors(config):
        try:
            if storage == "ids":
                check_ids(tensors, name, shape)
                fitting += 1
            else:
                fitting += 1 if recognise(tensors, name, shape) == "float" else 2
        except TensorMissing:
            missing.append(scale_name(name) if name in tensors else name)
            if len(missing) >= _MANY:
                break
        except CheckpointError as error:
            complain(error)
    if missing:
        more = "at least " if len(missing) >= _MANY else ""
        complain(
            TensorMissing(
                f"{more}{len(missing)} tensors that the config implies are not in the files: "
                f"{some(missing)}. Check the config, or download the files again."
            )
        )
    if fitting < len(tensors) and len(missing) < _MANY:
        _check_nothing_else(config, tensors, complain)


def _check_nothing_else(config: V4Config, tensors: Mapping[str, TensorRef], complain: Complain) -> None:
    used: set[str] = set()
    for tensor in model_tensors(config):
        used.add(tensor.name)
        if tensor.name in tensors and tensors[tensor.name].dtype not in FLOATS:
            used.add(scale_name(tensor.name))
    extra = [name for name in tensors if name not in used]
    if extra:
        complain(
            TensorUnexpected(
                f"the files hold {len(extra)} tensors the model has no place for: {some(extra)}. "
                f"Check that config.json belongs to these shards. {INSPECT}"
            )
        )


def _translate(found: dict[str, TensorEntry], complain: Complain) -> tuple[dict[str, TensorEntry], str]:
    foreign = [name for name in found if _V41.search(name)]
    if foreign:
        raise UnsupportedModel(
            f"the files hold {some(foreign)}: this is DeepSeek-V4.1, which has another architecture "
            "and is not supported. Use a V4-Flash or V4-Pro checkpoint."
        )
    modules = [name for name in found if ".self_attn." in name]
    if modules:
        complain(
            CheckpointError(
                f"the files hold {some(modules)}: module names of a transformers model in memory, "
                "which are not a file format. Write the model with its save_pretrained."
            )
        )
    table = names_table(found)
    if table is TRANSFORMERS:
        return _rename(found, table, complain), "transformers"
    dtypes = {entry.dtype for name, entry in found.items() if name.endswith(".weight")}
    if dtypes & {"I8", "U8"}:
        return found, "released"
    return found, "base-fp8" if "F8_E4M3" in dtypes else "bf16"


def _rename(found: dict[str, TensorEntry], table: Table, complain: Complain) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for name, entry in found.items():
        ours = (
            to_ours(name, table) or name
        )  # a name the dialect does not have stays, and is reported as left over
        if ours in entries:
            complain(
                CheckpointError(
                    f"{ours} is in the files under two names, one of them {name}. Expected once; "
                    "take the checkpoint as it was written."
                )
            )
        entries[ours] = entry
    return entries


def _choose_mtp(entries: dict[str, TensorEntry], config: V4Config, notices: list[str]) -> V4Config:
    """Drop what no trunk needs from `entries`; the returned config counts the MTP blocks that are really there."""

    def drop(unwanted: Callable[[str], bool], text: str) -> None:
        names = [name for name in entries if name.startswith("mtp.") and unwanted(name)]
        for name in names:
            del entries[name]
        if names:
            notices.append(text.format(count=len(names), names=some(names)))

    if any(name.startswith("mtp.") and any(part in name for part in _DRAFTER) for name in entries):
        drop(
            lambda name: True,
            "the files hold a DSpark drafter; its {count} tensors were skipped, the trunk is complete without it.",
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
    number = name.split(".")[1]
    return int(number) if number.isdecimal() and len(number) < 6 else 0
