"""Describe a checkpoint from its headers: sizes by class, layers by kind, cache cost, and all problems.

The loader stops at the first problem; the inspector lists them all. Both use the same checks, so a checkpoint without
problems here can be opened. No tensor data is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from birkhoff.config import V4Config
from birkhoff.errors import BirkhoffError, ConfigError
from birkhoff.free_memory import free_host_bytes
from birkhoff.model.cache_size import cache_by_kind
from birkhoff.weights.checkpoint import SafetensorsRefs, is_gguf, open_checkpoint
from birkhoff.weights.gguf import raw_refs
from birkhoff.weights.memory_size import MemoryEstimate, estimate_memory
from birkhoff.weights.shard_index import read_shards
from birkhoff.weights.tensor_ref import BYTES, TensorRef

CLASSES = ("experts", "dense", "vocabulary", "compressor", "router", "mhc", "norms", "mtp", "other")
KINDS = ("swa", "csa", "hca")
REPORTED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "sliding_window",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "num_hash_layers",
    "hc_mult",
    "max_position_embeddings",
)
MAX_PROBLEMS = 50


@dataclass(frozen=True)
class Inspection:
    """`bytes_by_class` and `bytes_by_type` are file bytes; `parameters` counts values, not codes or scales."""

    path: str
    dialect: str | None
    files: int
    tensors: int
    file_bytes: int
    bytes_by_class: dict[str, int]
    bytes_by_type: dict[str, int]
    parameters: int
    parameters_mtp: int
    parameters_active: int | None
    layers: dict[str, list[int]] = field(default_factory=dict)
    mtp_blocks: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    cache_bytes_per_token: float | None = None
    cache_bytes_per_sequence: int | None = None
    notices: list[str] = field(default_factory=list)
    problems: list[dict[str, str]] = field(default_factory=list)
    model: V4Config | None = field(default=None, repr=False)
    expert_bytes: int = 0  # routed experts of trunk and MTP, as stored
    expert_parameters: int = 0
    paths: tuple[Path, ...] = field(default=(), repr=False)  # of the weight files

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Memory of the weights as stored, as bfloat16 and as float32."""
        return {"stored": self.file_bytes, "bfloat16": 2 * self.parameters, "float32": 4 * self.parameters}

    def memory(
        self, device_bytes: int, context: int | None = None, requests: int = 1
    ) -> dict[str, MemoryEstimate]:
        """Estimate memory on a device for each form of the weights, with a cache for `requests` requests."""
        if self.cache_bytes_per_token is None or self.cache_bytes_per_sequence is None:
            return {}
        tokens = context if context is not None else self.config["max_position_embeddings"]
        cache = requests * int(self.cache_bytes_per_sequence + tokens * self.cache_bytes_per_token)
        count = (sum(map(len, self.layers.values())) + self.mtp_blocks) * self.config["n_routed_experts"]
        estimates = {}
        for form, item in (("stored", 0), ("bfloat16", 2)):
            experts = item * self.expert_parameters if item else self.expert_bytes
            always = (item * self.parameters if item else self.file_bytes) - experts
            estimates[form] = estimate_memory(device_bytes, form, always, experts, count, cache)
        return estimates

    def fits(self, device_memory: Mapping[str, int]) -> dict[str, list[str]]:
        """For each device with its memory in bytes, return the forms of the weights that fit it."""
        return {
            device: [form for form, size in self.weight_bytes.items() if size <= free]
            for device, free in device_memory.items()
        }

    def to_json(self) -> str:
        rows = {name: value for name, value in asdict(self).items() if name not in ("model", "paths")}
        return json.dumps({**rows, "weight_bytes": self.weight_bytes}, ensure_ascii=False)


class _Problems:
    """Collects the first MAX_PROBLEMS errors and counts the rest: a wrong config mismatches every tensor."""

    def __init__(self) -> None:
        self._first: list[BirkhoffError] = []
        self._count = 0

    def add(self, error: BirkhoffError) -> None:
        self._count += 1
        if len(self._first) < MAX_PROBLEMS:
            self._first.append(error)

    def listed(self) -> list[dict[str, str]]:
        rows = [{"code": error.code, "message": str(error)} for error in self._first]
        if self._count > len(rows):
            rows.append(
                {"code": "more", "message": f"and {self._count - len(rows)} more problems of this kind."}
            )
        return rows


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Describe a checkpoint. Raises if `path` is not a checkpoint; lists any problem inside one."""
    path = Path(path).expanduser()
    problems = _Problems()
    config = None
    dialect = None
    notices = []
    try:
        checkpoint = open_checkpoint(path, problems.add)
        tensors: Mapping[str, TensorRef] = checkpoint
        config = checkpoint.config
        dialect = checkpoint.dialect
        notices = checkpoint.notices
        files = checkpoint.files
    except ConfigError as error:
        problems = _Problems()
        problems.add(error)
        if is_gguf(path):
            tensors, files = raw_refs(path), [path]
        else:
            shards = read_shards(path, problems.add)
            tensors, files = SafetensorsRefs(shards.tensors), shards.files
    return _describe(path, config, dialect, tensors, files, notices, problems.listed())


def device_memory() -> dict[str, int]:
    """Return the memory available on the host, and the total of each GPU, in bytes."""
    import torch

    memory = {"host": free_host_bytes()}
    for index in range(torch.cuda.device_count()):
        memory[f"cuda:{index}"] = torch.cuda.get_device_properties(index).total_memory
    return memory


def _describe(
    path: Path,
    config: V4Config | None,
    dialect: str | None,
    tensors: Mapping[str, TensorRef],
    files: list[Path],
    notices: list[str],
    problems: list[dict[str, str]],
) -> Inspection:
    sizes = dict.fromkeys(CLASSES, 0)
    counts = dict.fromkeys(CLASSES, 0)
    types: dict[str, int] = {}
    expert_bytes = expert_values = 0
    for name in tensors:
        ref = tensors[name]
        kind = tensor_class(name)
        sizes[kind] += ref.nbytes
        if not name.endswith((".scale", ".tid2eid")):
            count = math.prod(ref.shape) * (2 if ref.dtype in BYTES else 1)
            counts[kind] += count
            expert_values += count if ".ffn.experts." in name else 0
        stored = ref.encoding or ref.dtype
        types[stored] = types.get(stored, 0) + ref.nbytes
        expert_bytes += ref.nbytes if ".ffn.experts." in name else 0
    total = sum(counts.values())
    active = None
    if config is not None and "embed.weight" in tensors:
        share = config.num_experts_per_tok / config.n_routed_experts
        embed = config.vocab_size * config.hidden_size  # a lookup, not a product
        active = total - counts["mtp"] - embed - round(counts["experts"] * (1 - share))
    return Inspection(
        path=str(path),
        dialect=dialect,
        files=len(files),
        paths=tuple(files),
        tensors=len(tensors),
        file_bytes=sum(sizes.values()),
        bytes_by_class={kind: size for kind, size in sizes.items() if size},
        bytes_by_type=dict(sorted(types.items(), key=lambda row: -row[1])),
        expert_bytes=expert_bytes,
        expert_parameters=expert_values,
        parameters=total,
        parameters_mtp=counts["mtp"],
        parameters_active=active,
        notices=list(notices),
        problems=problems,
        **(_config_fields(config) if config is not None else {}),
    )


def tensor_class(name: str) -> str:
    """Return the part of the model that a tensor belongs to, one of CLASSES."""
    if name.startswith("mtp."):
        return "mtp"
    if ".ffn.experts." in name:
        return "experts"
    if name in ("embed.weight", "head.weight"):
        return "vocabulary"
    if ".compressor." in name or ".indexer." in name:
        return "compressor"
    if ".gate." in name:
        return "router"
    if name.startswith("hc_head_") or ".hc_" in name:
        return "mhc"
    if name.endswith(("norm.weight", "attn_sink")):
        return "norms"
    return "dense" if ".attn.w" in name or ".shared_experts." in name else "other"


def _config_fields(config: V4Config) -> dict[str, Any]:
    kinds = [config.layer_kind(layer) for layer in range(config.num_hidden_layers)]
    per_token, per_sequence = cache_bytes(config)
    return {
        "layers": {kind: [layer for layer, k in enumerate(kinds) if k == kind] for kind in KINDS},
        "model": config,
        "mtp_blocks": config.num_nextn_predict_layers,
        "config": {name: getattr(config, name) for name in REPORTED_FIELDS},
        "cache_bytes_per_token": per_token,
        "cache_bytes_per_sequence": per_sequence,
    }


def cache_bytes(config: V4Config) -> tuple[float, int]:
    """Return the trunk's bfloat16 cache size (spec 12.4): bytes per token, and constant bytes per sequence."""
    kinds = cache_by_kind(config, item_bytes=2).values()
    return sum(kind.per_token for kind in kinds), sum(kind.per_sequence for kind in kinds)
