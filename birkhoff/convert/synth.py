"""Generate random checkpoints in the released layout: real formats and names, random weights.

Weights are scaled so that every mechanism has an effect: logits have a spread of one to two, stream mixers are neither
identity nor uniform, sinks, position biases and router biases matter, token tables name different experts. Quantised
matrices are drawn directly as codes (a random 16-bit integer indexes a table of normal quantiles) with scales that
vary between blocks, so that writing runs at disk speed with one strip in memory. Each strip is seeded by seed, name
and row: the same call always writes the same bytes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from birkhoff.config import V4Config
from birkhoff.convert.formats import resolve_format
from birkhoff.convert.presets import preset
from birkhoff.free_disk import check_free_disk, naming_full_disk
from birkhoff.kernels import quant
from birkhoff.option_checks import check_int
from birkhoff.text.byte_tokenizer import byte_tokenizer_json
from birkhoff.weights.layout import FP4_GROUP, FP8_BLOCK, ModelTensor, expected_tensors, model_tensors
from birkhoff.weights.released import SHARD_BYTES, Packed, write_released

LOGIT_SPREAD = 1.5
# Half of the blocks get half the scale; this preserves the spread of the whole matrix.
_SCALE_MIX = (5 / 8) ** 0.5
_ROWS_AT_ONCE = 4096


def synth(
    out: str | Path,
    like: str = "tiny",
    layers: int | None = None,
    seed: int = 0,
    dense: str = "fp8",
    experts: str = "fp4",
    mtp: bool = True,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: bool = True,
    progress: Callable[[int, int], None] | None = None,
    routed_experts: int | None = None,
) -> V4Config:
    """Write a random checkpoint to directory `out` and return its config. `layers` and `routed_experts`: fewer than the
    model has."""
    check_int("seed", seed, 0, 2**63 - 1)
    config = preset(like, layers, mtp, routed_experts)
    dense, experts = (
        resolve_format(option, name, "safetensors")
        for option, name in (("dense", dense), ("experts", experts))
    )
    out = Path(out)
    needed = sum(stored.nbytes for stored in expected_tensors(config, dense, experts).values())
    check_free_disk(out, out, needed)
    texts = {"tokenizer.json": byte_tokenizer_json(config.vocab_size)} if tokenizer else {}
    rows = RandomRows(config, seed, dense, experts)
    with naming_full_disk(out, out, lambda: needed):
        write_released(out, config, rows, dense, experts, shard_bytes, progress, texts)
    return config


class RandomRows:
    """`rows(name, start, stop)` for every tensor of a config, as `write_released` calls it."""

    def __init__(self, config: V4Config, seed: int, dense: str = "fp8", experts: str = "fp4"):
        self.config = config
        self.seed = seed
        self.formats = {"dense": dense, "expert": experts}
        self.tensors = {tensor.name: tensor for tensor in model_tensors(config)}

    def __call__(self, name: str, start: int, stop: int) -> torch.Tensor | Packed:
        tensor = self.tensors[name]
        random = np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(name.encode()), start]))
        shape = (stop - start, *tensor.shape[1:])
        if tensor.storage == "ids":
            return self._experts(random, shape)
        written = self.formats.get(tensor.storage)
        if written == "fp4":
            return _random_fp4(random, shape, _spread(tensor))
        if written == "fp8":
            return _random_fp8(random, shape, _spread(tensor))
        mean, spread = _normal(tensor, start, stop)
        return torch.from_numpy(random.standard_normal(shape, np.float32)).mul_(spread).add_(mean)

    def _experts(self, random: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        """Draw distinct experts for every row, uniformly."""
        ids = np.empty(shape, np.int64)
        for start in range(0, len(ids), _ROWS_AT_ONCE):
            part = ids[start : start + _ROWS_AT_ONCE]
            order = random.random((len(part), self.config.n_routed_experts), np.float32)
            part[:] = order.argsort(axis=1)[:, : shape[1]]
        return torch.from_numpy(ids)


def _spread(tensor: ModelTensor) -> float:
    """Standard deviation 1 / sqrt(inputs), which preserves the scale of the activations."""
    return float(tensor.shape[1] ** -0.5)


def _normal(tensor: ModelTensor, start: int, stop: int) -> tuple[float | torch.Tensor, float]:
    """Return mean and standard deviation of an unquantised tensor."""
    leaf = tensor.name.rsplit(".", 1)[-1]
    if tensor.name == "head.weight":
        return 0.0, LOGIT_SPREAD * _spread(tensor)
    if tensor.name == "embed.weight":
        return 0.0, 1.0
    if tensor.name.endswith("norm.weight"):
        return 1.0, 0.1
    if leaf.startswith("hc_") and leaf.endswith("_scale"):
        return 0.6, 0.1
    if leaf.startswith("hc_") and leaf.endswith("_base"):
        return _mixer_base(tensor.shape[0])[start:stop], 0.4
    if leaf == "attn_sink":
        return 0.0, 1.0
    if leaf == "ape":
        return 0.0, 0.5
    if leaf == "bias":
        return 0.0, 0.1
    return 0.0, _spread(tensor)


def _mixer_base(size: int) -> torch.Tensor:
    """Bias the stream mixers towards identity (comb diagonal)."""
    base = torch.zeros(size)
    streams = int((size + 1) ** 0.5) - 1  # (2 + n) n values per sublayer; the head has n, all zero
    if (2 + streams) * streams == size and streams > 1:
        base[2 * streams :] = torch.eye(streams).flatten()
    return base


def _random_fp8(random: np.random.Generator, shape: tuple[int, ...], spread: float) -> Packed:
    exponent, table = _code_table("fp8", spread / _SCALE_MIX)
    codes = _draw(random, shape, table)
    tiles = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
    return Packed(codes.view(torch.float8_e4m3fn), _scales(random, tiles, exponent))


def _random_fp4(random: np.random.Generator, shape: tuple[int, ...], spread: float) -> Packed:
    exponent, table = _code_table("fp4", spread / _SCALE_MIX)
    codes = _draw(random, (shape[0], shape[1] // 2), table)
    scale = _scales(random, (shape[0], shape[1] // FP4_GROUP), exponent)
    return Packed(codes.view(torch.int8), scale)


def _draw(random: np.random.Generator, shape: tuple[int, ...], table: torch.Tensor) -> torch.Tensor:
    """Index a table of 2^16 entries uniformly; each raw 64-bit integer gives four draws."""
    count = math.prod(shape)
    raw = random.bit_generator.random_raw(-(-count // 4)).view(np.uint16)[:count]
    return table.index_select(0, torch.from_numpy(raw.astype(np.int32))).view(shape)


def _scales(random: np.random.Generator, shape: tuple[int, int], exponent: int) -> torch.Tensor:
    return torch.from_numpy(exponent + 127 - random.integers(0, 2, shape, np.uint8))


@lru_cache(maxsize=64)
def _code_table(kind: str, spread: float) -> tuple[int, torch.Tensor]:
    """Return a scale exponent, and the codes of 2^16 equally likely draws of a normal variate.

    The scale puts the standard deviation at a fifth to a tenth of the largest FP8 value, or at 1.5 to 3 of FP4's 6, as
    quantising by the largest element of a block does. An FP4 entry combines two of 2^8 levels, one per nibble.
    """
    reference = 64.0 if kind == "fp8" else 1.5
    exponent = int(np.floor(np.log2(spread / reference)))
    levels = 2**16 if kind == "fp8" else 2**8
    quantiles = torch.special.ndtri((torch.arange(levels, dtype=torch.float64) + 0.5) / levels)
    values = (quantiles * spread * 2.0**-exponent).float()
    if kind == "fp8":
        return exponent, values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    clipped = torch.cat(
        (torch.full((levels, 1), 6.0), values.clamp(-6, 6)[:, None], torch.zeros(levels, 30)), 1
    )
    nibble = quant.quant_fp4(clipped)[0][:, 0] >> 4  # a 6 in each group fixes its scale at 1
    draws = torch.arange(2**16)
    return exponent, nibble[draws & 255] | nibble[draws >> 8] << 4
