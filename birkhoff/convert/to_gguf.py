"""Plan a conversion to GGUF: the type, file and offset of every tensor.

Types follow dialect A: experts MXFP4, dense projections Q8_0 (BF16 and F32 are options), embeddings and routers BF16,
small tensors F32, token tables I32. The preset `ds4` follows dialect B. The MTP block is written to a separate file.
With `dense="f32"` every float is F32, for comparisons with other engines. The FP8 and FP4 scales of matrices that are
written unquantised are kept in the metadata, so that converting back recovers the same codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from birkhoff import __version__
from birkhoff.config import V4Config
from birkhoff.convert.chat_template import chat_template
from birkhoff.convert.conversion_plan import ConversionPlan, ConversionUnit, FileRegion, OutputFile
from birkhoff.convert.gguf_bytes import TensorRow, block_width, encode_header
from birkhoff.convert.produce import Produce, producer, side_by_side
from birkhoff.errors import OptionError, TensorShape
from birkhoff.text.prompt_texts import PromptTexts, own_prompt_texts, prompt_texts_to_json
from birkhoff.weights.checkpoint import Checkpoint
from birkhoff.weights.gguf import CHAT_TEXTS, SCALE_NAMES, SCALES
from birkhoff.weights.gguf_keys import STRING, U32, MetadataEntry, metadata_of
from birkhoff.weights.gguf_names import (
    DS4_MTP,
    EH_PROJ,
    NEXTN,
    ROOT,
    STACKS,
    GGUFName,
    block_name,
    trunk_name,
)
from birkhoff.weights.gguf_text import tokenizer_metadata
from birkhoff.weights.inspect import tensor_class
from birkhoff.weights.layout import ModelTensor, model_tensors, scale_name

EXPERTS = {"fp4": "MXFP4", "bf16": "BF16", "f32": "F32"}
DENSE = {"q8_0": "Q8_0", "bf16": "BF16", "f32": "F32"}
PRESETS = ("upstream", "ds4")
MAX_KEPT_SCALE_BYTES = 64 << 20
_FILE_TYPE = {"MXFP4": 38, "BF16": 32, "F32": 0}  # ggml's id of the type that most of the file has
_U16, _I32 = 2, 5

# A tensor, and (source name, producer, file order) per part.
Item = tuple[TensorRow, list[tuple[str, Produce, int]]]


class GGUFPlan:
    """Builds the ConversionPlan of one GGUF output."""

    def __init__(
        self,
        source: Checkpoint,
        path: Path,
        experts: str,
        dense: str,
        preset: str,
        mtp: bool,
        part_bytes: int,
    ):
        if preset not in PRESETS:
            raise OptionError(f"preset is {preset!r}, expected one of {', '.join(PRESETS)}.")
        if preset == "ds4" and dense != "q8_0":
            raise OptionError(f"preset ds4 fixes dense to q8_0, got {dense!r}. Leave --dense away.")
        self.source = source
        self.path = path
        self.preset = preset
        self.experts = EXPERTS[experts]
        self.dense = DENSE[dense]
        self.part_bytes = part_bytes
        self.mtp = mtp and source.has_mtp
        self.notices: list[str] = []
        self._file_order = {name: index for index, name in enumerate(source)}

    def plan(
        self, options: dict[str, Any], texts: dict[str, str], tokenizer: str | None, prompt_texts: PromptTexts
    ) -> ConversionPlan:
        trunk = list(self._trunk())
        parts = self._parts(trunk)
        keys = self._metadata(tokenizer, prompt_texts, mtp_file=False)
        files: list[OutputFile] = []
        units: list[ConversionUnit] = []
        stem = self.path.name.removesuffix(".gguf")
        for index, items in enumerate(parts):
            if len(parts) == 1:
                name, part_keys = self.path.name, keys
            else:
                name = f"{stem}-{index + 1:05}-of-{len(parts):05}.gguf"
                split = [
                    MetadataEntry("split.no", _U16, index),
                    MetadataEntry("split.count", _U16, len(parts)),
                    MetadataEntry("split.tensors.count", _I32, len(trunk)),
                ]
                part_keys = [*(keys if index == 0 else keys[:1]), *split]
            self._add(files, units, self.path.with_name(name), part_keys, items)
        if self.mtp:
            mtp_keys = self._metadata(tokenizer, prompt_texts, mtp_file=True)
            self._add(files, units, self.path.with_name(f"{stem}-mtp.gguf"), mtp_keys, list(self._mtp()))
        return ConversionPlan(
            str(self.source.path), self.path, options, files, units, self.source.files, texts, self.notices
        )

    def _add(
        self,
        files: list[OutputFile],
        units: list[ConversionUnit],
        path: Path,
        keys: list[MetadataEntry],
        items: list[Item],
    ) -> None:
        rows = [row for row, _ in items]
        header, offsets, size = encode_header(keys, rows)
        for (row, parts), offset in zip(items, offsets):
            part_bytes = row.nbytes // len(parts)
            for index, (source_name, produce, order) in enumerate(parts):
                label = f"{row.name}[{index}]" if len(parts) > 1 else row.name
                region = FileRegion(label, offset + index * part_bytes, part_bytes)
                units.append(ConversionUnit(len(files), tensor_class(source_name), order, (region,), produce))
        files.append(OutputFile(path, header, size, len(rows)))

    def _parts(self, items: list[Item]) -> list[list[Item]]:
        """Split between tensors; a tensor larger than a part gets its own."""
        parts: list[list[Item]] = [[]]
        filled = 0
        for item in items:
            if parts[-1] and filled + item[0].nbytes > self.part_bytes:
                parts.append([])
                filled = 0
            parts[-1].append(item)
            filled += item[0].nbytes
        return parts

    def _trunk(self) -> Iterator[Item]:
        yield from self._items(
            (t for t in model_tensors(replace(self.source.config, num_nextn_predict_layers=0))), ""
        )

    def _mtp(self) -> Iterator[Item]:
        """Yield the MTP block. Dialect A adds copies of the tables and puts the head mixer under root names."""
        config = self.source.config
        tensors = {t.name: t for t in model_tensors(config)}
        block = f"blk.{config.num_hidden_layers}"
        if self.preset == "ds4":
            yield from self._items((t for t in tensors.values() if t.name.startswith("mtp.0.")), "mtp.0")
            return
        for name in ("embed.weight", "norm.weight", "head.weight"):
            yield self._item(tensors[name], ROOT[name])
        for part in ("fn", "base", "scale"):
            yield self._item(tensors[f"mtp.0.hc_head_{part}"], ROOT[f"hc_head_{part}"])
        left = tensors["mtp.0.e_proj.weight"]
        right = tensors["mtp.0.h_proj.weight"]
        kind = self._supported_kind(left.name, self.dense, 2 * left.shape[1])
        row = TensorRow(f"{block}.{EH_PROJ}", kind, (left.shape[0], 2 * left.shape[1]))
        yield row, [(left.name, side_by_side(self.source, left, right, kind), self._file_order[left.name])]
        written = ("e_proj.weight", "h_proj.weight", "hc_head_fn", "hc_head_base", "hc_head_scale")
        rest = (t for t in tensors.values() if t.name.startswith("mtp.0.") and not t.name.endswith(written))
        yield from self._items(rest, block)

    def _items(self, tensors: Iterator[ModelTensor], block: str) -> Iterator[Item]:
        """Yield items in order, with the experts of a block collected into its three stacks."""
        stacks: dict[str, list[ModelTensor]] = {}
        for tensor in tensors:
            target = self._gguf_name(tensor.name, block)
            if target.expert is None:
                yield self._item(tensor, target.name)
                continue
            stacks.setdefault(target.name, []).append(tensor)
            if len(stacks) == len(STACKS) and all(
                len(s) == self.source.config.n_routed_experts for s in stacks.values()
            ):
                for name, experts in stacks.items():
                    yield self._stack(name, experts)
                stacks = {}

    def _gguf_name(self, name: str, block: str) -> GGUFName:
        if not block:
            target = trunk_name(name)
        else:
            suffix = name.removeprefix("mtp.0.")
            table = DS4_MTP if block.startswith("mtp.") else NEXTN
            target = GGUFName(f"{block}.{table[suffix]}") if suffix in table else block_name(suffix, block)
        assert target is not None, name
        return target

    def _item(self, tensor: ModelTensor, name: str) -> Item:
        kind = self._kind(tensor)
        row = TensorRow(name, kind, tensor.shape)
        return row, [(tensor.name, producer(self.source, tensor, kind), self._file_order[tensor.name])]

    def _stack(self, name: str, experts: list[ModelTensor]) -> Item:
        shape = experts[0].shape
        if shape[1] % block_width(self.experts):
            raise TensorShape(
                f"{name} has rows of {shape[1]}, expected a multiple of 32 for MXFP4. Use --experts bf16."
            )
        row = TensorRow(name, self.experts, (len(experts), *shape))
        return row, [
            (t.name, producer(self.source, t, self.experts), self._file_order[t.name]) for t in experts
        ]

    def _kind(self, tensor: ModelTensor) -> str:
        if tensor.storage == "ids":
            return "I32"
        if self.preset == "ds4":
            return self._ds4_kind(tensor)
        if tensor.storage == "dense":
            return self._supported_kind(tensor.name, self.dense, tensor.shape[1])
        if tensor.storage == "f32" or len(tensor.shape) == 1:
            return "F32"
        return "F32" if self.dense == "F32" else "BF16"

    def _ds4_kind(self, tensor: ModelTensor) -> str:
        """Types of dialect B (6): F16 where A has BF16 or F32 matrices, Q8_0 for the head too."""
        name = tensor.name
        if len(tensor.shape) == 1 or name.startswith("mtp.0.hc_"):
            return "F32"
        if ".indexer." in name or ".compressor." in name or name.endswith("_fn"):
            return "F16"
        if tensor.storage == "dense" or name == "head.weight":
            return self._supported_kind(name, "Q8_0", tensor.shape[1])
        return "F16"

    def _supported_kind(self, name: str, kind: str, columns: int) -> str:
        if columns % block_width(kind) == 0:
            return kind
        self.notices.append(f"{name} has rows of {columns}, which {kind} cannot hold; it is written as BF16.")
        return "BF16"

    def _metadata(
        self, tokenizer: str | None, prompt_texts: PromptTexts, mtp_file: bool
    ) -> list[MetadataEntry]:
        config = self.source.config
        keys = [
            MetadataEntry("general.architecture", STRING, "deepseek4"),
            MetadataEntry("general.type", STRING, "model"),
            MetadataEntry("general.name", STRING, self.path.name.removesuffix(".gguf")),
            MetadataEntry("general.file_type", U32, _FILE_TYPE[self.experts]),
            MetadataEntry("general.quantization_version", U32, 2),
            MetadataEntry("birkhoff.version", STRING, __version__),
            MetadataEntry("birkhoff.source_dialect", STRING, self.source.dialect),
            *metadata_of(replace(config, num_nextn_predict_layers=int(mtp_file)), mtp_file),
        ]
        eos = config.eos_token_ids
        notices = [] if mtp_file else self.notices
        keys += tokenizer_metadata(
            tokenizer, config.vocab_size, config.bos_token_id, eos[0] if eos else None, notices
        )
        if tokenizer is not None:
            keys.append(MetadataEntry("tokenizer.chat_template", STRING, chat_template(prompt_texts)))
            if prompt_texts.source != own_prompt_texts().source:
                keys.append(MetadataEntry(CHAT_TEXTS, STRING, prompt_texts_to_json(prompt_texts)))
        return keys + self._scale_metadata(config, mtp_file)

    def _scale_metadata(self, config: V4Config, mtp_file: bool) -> list[MetadataEntry]:
        """Return the scales of quantised matrices that are written unquantised, all in the trunk's file."""
        if mtp_file:
            return []
        plain = {"dense": self.dense in ("BF16", "F32"), "expert": self.experts in ("BF16", "F32")}
        names = [
            tensor.name
            for tensor in model_tensors(config)
            if plain.get(tensor.storage) and self.source[tensor.name].format != "float"
        ]
        if sum(self.source[scale_name(name)].nbytes for name in names) > MAX_KEPT_SCALE_BYTES:
            self.notices.append(
                "scales were not kept: converting back gives the same numbers in other codes."
            )
            return []
        flat, labels = bytearray(), []
        for name in names:
            scale = self.source[scale_name(name)].read().numpy()
            flat += np.ascontiguousarray(scale).tobytes()
            labels.append(f"{name}|{scale.shape[0]}x{scale.shape[1]}")
        return (
            [MetadataEntry(SCALE_NAMES, (9, 8), labels), MetadataEntry(SCALES, (9, 0), flat)]
            if labels
            else []
        )
