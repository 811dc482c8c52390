"""Store the weights of a run: a few large float32 stacks instead of about four hundred tensors.

Matrices of one shape and storage class share a stack [n, rows, columns]; the rest is one flat vector per group
("embedding", "mhc", "small"), so the optimiser works on a dozen tensors. A step creates *leaves* (copies in the
compute dtype, optionally rounded as in the file), splits them into named weights, and differentiates with respect to
the leaves; one concatenation per stack collects the gradient. Names are the released ones, with experts stacked as
[experts, ..]. Router biases and hash tables are state, not parameters: the former are updated by a rule, the latter
are fixed.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from birkhoff.config import V4Config
from birkhoff.errors import TensorMissing, TensorShape
from birkhoff.weights.layout import model_tensors
from training.rounding import round_stored

_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(w[123])\.weight$")
_MATRIX = re.compile(
    r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.weight$|compressor\.(wkv|wgate)\.weight$|indexer\.wq_b\.weight$"
    r"|experts\.w[123](\.weight)?$|(e|h)_proj\.weight$"
)
ALIGN = 16  # elements: compiled kernels assume 64-byte alignment of every tensor


class Parameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    storage: str


class Location(NamedTuple):
    """A parameter's slices [start, stop) in its stack, or elements in its flat vector."""

    group: str
    start: int
    stop: int


def parameters_of(config: V4Config) -> list[Parameter]:
    """Return the model's tensors with routed experts stacked per layer, without hash tables and router biases."""
    out: dict[str, Parameter] = {}
    for tensor in model_tensors(config):
        if tensor.storage == "ids" or tensor.name.endswith("gate.bias"):
            continue
        match = _EXPERT.match(tensor.name)
        name = f"{match.group(1)}.{match.group(3)}" if match else tensor.name
        shape = (config.n_routed_experts, *tensor.shape) if match else tensor.shape
        out[name] = Parameter(name, shape, tensor.storage)
    return list(out.values())


def group_of(parameter: Parameter) -> str:
    """Return the update rule of a parameter: "matrix" (Muon), or one of the Adam groups."""
    if _MATRIX.search(parameter.name):
        return "matrix"
    if parameter.name in ("embed.weight", "head.weight"):
        return "embedding"
    return "mhc" if "hc_" in parameter.name else "small"


class Store:
    """Master weights, their locations, and rule-updated state."""

    def __init__(self, config: V4Config, device: torch.device | str = "cpu"):
        self.config = config
        self.device = torch.device(device)
        self.parameters = parameters_of(config)
        self.locations: dict[str, Location] = {}
        self.storage: dict[str, str] = {}  # of stacks
        sizes: dict[str, int] = defaultdict(int)
        shapes: dict[str, tuple[int, int]] = {}
        for parameter in self.parameters:
            group = group_of(parameter)
            if group == "matrix":
                rows, columns = self._slice_shape(parameter)
                group = f"{parameter.storage}-{rows}x{columns}"
                count = math.prod(parameter.shape) // (rows * columns)
                shapes[group], self.storage[group] = (rows, columns), parameter.storage
                used = count
            else:
                count = math.prod(parameter.shape)
                used = -(-count // ALIGN) * ALIGN
            self.locations[parameter.name] = Location(group, sizes[group], sizes[group] + count)
            sizes[group] += used
        self.masters: dict[str, Tensor] = {
            group: torch.zeros((size, *shapes[group]) if group in shapes else (size,), device=self.device)
            for group, size in sizes.items()
        }
        self.stacks = tuple(group for group in self.masters if group in shapes)
        self.flats = tuple(group for group in self.masters if group not in shapes)
        self.biases = {
            name: torch.zeros(config.n_routed_experts, device=self.device) for name in bias_names(config)
        }
        self.tables = {
            f"layers.{i}.ffn.gate.tid2eid": torch.zeros(
                config.vocab_size, config.num_experts_per_tok, dtype=torch.long, device=self.device
            )
            for i in range(config.num_hash_layers)
        }

    def _slice_shape(self, parameter: Parameter) -> tuple[int, int]:
        rows, columns = parameter.shape[-2:]
        # A grouped output projection is one matrix per group, orthogonalised separately.
        return (
            (rows // self.config.o_groups, columns)
            if parameter.name.endswith("wo_a.weight")
            else (rows, columns)
        )

    def leaves(self, dtype: torch.dtype, rounded: bool = False) -> dict[str, Tensor]:
        """Return new copies of every stack and vector that require grad; matrices in `dtype`, the rest float32."""
        out = {}
        with torch.no_grad():
            for group in self.stacks:
                master = self.masters[group]
                out[group] = (round_stored(master, self.storage[group]) if rounded else master).to(dtype)
            for group in self.flats:
                master = self.masters[group]
                out[group] = self._round_flat(group) if rounded else master.clone()
        # Float32 runs would otherwise alias the masters, which the optimiser step changes.
        return {
            group: (leaf.clone() if leaf is self.masters[group] else leaf).requires_grad_()
            for group, leaf in out.items()
        }

    def _round_flat(self, group: str) -> Tensor:
        """Return a flat vector with its bf16 members rounded, in one select."""
        master = self.masters[group]
        return torch.where(self._bf16_mask(group), master.bfloat16().float(), master)

    def _bf16_mask(self, group: str) -> Tensor:
        masks: dict[str, Tensor] = self.__dict__.setdefault("_masks", {})
        if group not in masks:
            mask = torch.zeros(self.masters[group].shape, dtype=torch.bool)
            for parameter in self.parameters:
                location = self.locations[parameter.name]
                if location.group == group and parameter.storage == "bf16":
                    mask[location.start : location.stop] = True
            masks[group] = mask.to(self.device)
        return masks[group]

    def named(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return every weight by name as a view of the leaves, with biases and tables; differentiable."""
        out: dict[str, Tensor] = {}
        by_group: dict[str, list[Parameter]] = defaultdict(list)
        for parameter in self.parameters:
            by_group[self.locations[parameter.name].group].append(parameter)
        for group, members in by_group.items():
            cuts, ends = [], 0
            for parameter in members:
                location = self.locations[parameter.name]
                if location.start > ends:
                    cuts.append(location.start - ends)  # alignment gap after the previous member
                cuts.append(location.stop - location.start)
                ends = location.stop
            if ends < leaves[group].shape[0]:
                cuts.append(leaves[group].shape[0] - ends)
            pieces, ends = iter(leaves[group].split(cuts)), 0
            for parameter in members:
                location = self.locations[parameter.name]
                if location.start > ends:
                    next(pieces)
                out[parameter.name] = next(pieces).reshape(parameter.shape)
                ends = location.stop
        return out | self.biases | self.tables

    def export(self) -> dict[str, Tensor]:
        """Return float32 copies by name, including biases and tables."""
        with torch.no_grad():
            return {name: tensor.detach().clone() for name, tensor in self.named(self.masters).items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load the result of `export`."""
        expected = {parameter.name: parameter.shape for parameter in self.parameters}
        expected |= {name: tuple(t.shape) for name, t in (self.biases | self.tables).items()}
        missing = sorted(set(expected) - set(tensors))
        if missing:
            raise TensorMissing(
                f"{len(missing)} tensors are missing, first {missing[0]}. Load a file that export() wrote."
            )
        with torch.no_grad():
            for name, shape in expected.items():
                if tuple(tensors[name].shape) != tuple(shape):
                    raise TensorShape(f"{name} is {tuple(tensors[name].shape)}, expected {tuple(shape)}.")
                if name in self.biases or name in self.tables:
                    (self.biases | self.tables)[name].copy_(tensors[name])
                    continue
                location = self.locations[name]
                target = self.masters[location.group][location.start : location.stop]
                target.copy_(tensors[name].reshape(target.shape))


def bias_names(config: V4Config) -> list[str]:
    """Return router biases in layer order, MTP last."""
    names = [f"layers.{i}.ffn.gate.bias" for i in range(config.num_hash_layers, config.num_hidden_layers)]
    return names + [f"mtp.{i}.ffn.gate.bias" for i in range(config.num_nextn_predict_layers)]
