"""Tensors of a V4 checkpoint: name, logical shape, and storage in the release (spec 4 and 10).

`model_tensors` is the single definition of the layout; all code that writes, checks or counts checkpoints uses it.
`Storage` is how the release stores a tensor: "dense" (FP8, 128x128 scales), "expert" (FP4, 1x32 scales), "bf16", "f32"
or "ids". Shapes are those of the values, not of the codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from birkhoff.config import V4Config
from birkhoff.errors import OptionError, TensorShape
from birkhoff.weights.safetensors import item_bytes

Storage = Literal["dense", "expert", "bf16", "f32", "ids"]

DENSE_FORMATS = ("fp8", "bf16", "f32")
EXPERT_FORMATS = ("fp4", "fp8", "bf16", "f32")

FP8_BLOCK = 128
FP4_GROUP = 32


class ModelTensor(NamedTuple):
    """One logical tensor of a model."""

    name: str
    shape: tuple[int, ...]
    storage: Storage


class StoredTensor(NamedTuple):
    """One tensor as stored in a file. `dtype` is the safetensors name."""

    shape: tuple[int, ...]
    dtype: str
    storage: Storage

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


def model_tensors(config: V4Config) -> Iterator[ModelTensor]:
    """Yield every logical tensor of a model, without scales, in reading order."""
    hidden, streams = config.hidden_size, config.hc_mult
    yield ModelTensor("embed.weight", (config.vocab_size, hidden), "bf16")
    for layer, ratio in enumerate(config.compress_ratios):
        yield from _layer(config, f"layers.{layer}", ratio, config.is_hash_routed(layer))
    yield from _head_mixer("", hidden, streams)
    yield ModelTensor("norm.weight", (hidden,), "bf16")
    yield ModelTensor("head.weight", (config.vocab_size, hidden), "bf16")
    for index in range(config.num_nextn_predict_layers):
        prefix = f"mtp.{index}"
        yield from _layer(config, prefix, 0, False)
        for part in ("e_proj", "h_proj"):
            yield ModelTensor(f"{prefix}.{part}.weight", (hidden, hidden), "dense")
        for part in ("enorm", "hnorm", "norm"):
            yield ModelTensor(f"{prefix}.{part}.weight", (hidden,), "bf16")
        yield from _head_mixer(f"{prefix}.", hidden, streams)


def expected_tensors(config: V4Config, dense: str = "fp8", experts: str = "fp4") -> dict[str, StoredTensor]:
    """Return every stored tensor of a checkpoint, including scales, by name."""
    out: dict[str, StoredTensor] = {}
    for tensor in model_tensors(config):
        for name, stored in stored_tensors(tensor, dense, experts):
            out[name] = stored
    return out


def stored_tensors(
    tensor: ModelTensor, dense: str = "fp8", experts: str = "fp4"
) -> list[tuple[str, StoredTensor]]:
    """Return the stored tensors of a logical one: the weight, and its scale where it is quantised.

    With dense matrices in f32 every other float is f32 too: such a checkpoint holds any source exactly."""
    check_formats(dense, experts)
    name, shape, storage = tensor
    others = "f32" if storage == "bf16" and dense == "f32" else storage
    written = {"dense": dense, "expert": experts}.get(storage, others)
    if written == "fp8":
        scale = StoredTensor((-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK)), "F8_E8M0", storage)
        return [(name, StoredTensor(shape, "F8_E4M3", storage)), (scale_name(name), scale)]
    if written == "fp4":
        if shape[1] % FP4_GROUP:
            raise TensorShape(
                f"{name} is {shape}: FP4 needs an input width that is a multiple of {FP4_GROUP}. "
                "Write the experts as fp8, bf16 or f32."
            )
        scale = StoredTensor((shape[0], shape[1] // FP4_GROUP), "F8_E8M0", storage)
        return [(name, StoredTensor((shape[0], shape[1] // 2), "I8", storage)), (scale_name(name), scale)]
    return [(name, StoredTensor(shape, {"bf16": "BF16", "f32": "F32", "ids": "I64"}[written], storage))]


def scale_name(name: str) -> str:
    """`layers.0.attn.wq_a.weight` -> `layers.0.attn.wq_a.scale`."""
    return name.removesuffix("weight") + "scale"


def check_formats(dense: str, experts: str) -> None:
    """Raise OptionError for an unknown storage format."""
    if dense not in DENSE_FORMATS:
        raise OptionError(f"dense is {dense!r}, expected one of {', '.join(DENSE_FORMATS)}.")
    if experts not in EXPERT_FORMATS:
        raise OptionError(f"experts is {experts!r}, expected one of {', '.join(EXPERT_FORMATS)}.")


def _layer(c: V4Config, prefix: str, ratio: int, hashed: bool) -> Iterator[ModelTensor]:
    hidden, mixes = c.hidden_size, (2 + c.hc_mult) * c.hc_mult
    for part in ("attn", "ffn"):
        yield ModelTensor(f"{prefix}.{part}_norm.weight", (hidden,), "bf16")
        yield ModelTensor(f"{prefix}.hc_{part}_fn", (mixes, c.hc_mult * hidden), "f32")
        yield ModelTensor(f"{prefix}.hc_{part}_base", (mixes,), "f32")
        yield ModelTensor(f"{prefix}.hc_{part}_scale", (3,), "f32")
    yield from _attention(c, f"{prefix}.attn", ratio)
    yield from _moe(c, f"{prefix}.ffn", hashed)


def _attention(c: V4Config, prefix: str, ratio: int) -> Iterator[ModelTensor]:
    width = c.num_attention_heads * c.head_dim
    yield ModelTensor(f"{prefix}.attn_sink", (c.num_attention_heads,), "f32")
    yield ModelTensor(f"{prefix}.wq_a.weight", (c.q_lora_rank, c.hidden_size), "dense")
    yield ModelTensor(f"{prefix}.q_norm.weight", (c.q_lora_rank,), "bf16")
    yield ModelTensor(f"{prefix}.wq_b.weight", (width, c.q_lora_rank), "dense")
    yield ModelTensor(f"{prefix}.wkv.weight", (c.head_dim, c.hidden_size), "dense")
    yield ModelTensor(f"{prefix}.kv_norm.weight", (c.head_dim,), "bf16")
    yield ModelTensor(f"{prefix}.wo_a.weight", (c.o_groups * c.o_lora_rank, width // c.o_groups), "dense")
    yield ModelTensor(f"{prefix}.wo_b.weight", (c.hidden_size, c.o_groups * c.o_lora_rank), "dense")
    if ratio:
        yield from _compressor(f"{prefix}.compressor", c.hidden_size, c.head_dim, ratio)
    if ratio == 4:
        yield ModelTensor(
            f"{prefix}.indexer.wq_b.weight", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), "dense"
        )
        yield ModelTensor(f"{prefix}.indexer.weights_proj.weight", (c.index_n_heads, c.hidden_size), "bf16")
        yield from _compressor(f"{prefix}.indexer.compressor", c.hidden_size, c.index_head_dim, ratio)


def _compressor(prefix: str, hidden: int, width: int, ratio: int) -> Iterator[ModelTensor]:
    columns = 2 * width if ratio == 4 else width  # CSA blocks overlap: each channel has two halves
    yield ModelTensor(f"{prefix}.wkv.weight", (columns, hidden), "bf16")
    yield ModelTensor(f"{prefix}.wgate.weight", (columns, hidden), "bf16")
    yield ModelTensor(f"{prefix}.ape", (ratio, columns), "f32")
    yield ModelTensor(f"{prefix}.norm.weight", (width,), "bf16")


def _moe(c: V4Config, prefix: str, hashed: bool) -> Iterator[ModelTensor]:
    hidden, inner = c.hidden_size, c.moe_intermediate_size
    yield ModelTensor(f"{prefix}.gate.weight", (c.n_routed_experts, hidden), "bf16")
    if hashed:
        yield ModelTensor(f"{prefix}.gate.tid2eid", (c.vocab_size, c.num_experts_per_tok), "ids")
    else:
        yield ModelTensor(f"{prefix}.gate.bias", (c.n_routed_experts,), "f32")
    shapes = (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden)))
    for part, shape in shapes:
        yield ModelTensor(f"{prefix}.shared_experts.{part}.weight", shape, "dense")
    for expert in range(c.n_routed_experts):
        for part, shape in shapes:
            yield ModelTensor(f"{prefix}.experts.{expert}.{part}.weight", shape, "expert")


def _head_mixer(prefix: str, hidden: int, streams: int) -> Iterator[ModelTensor]:
    yield ModelTensor(f"{prefix}hc_head_fn", (streams, streams * hidden), "f32")
    yield ModelTensor(f"{prefix}hc_head_base", (streams,), "f32")
    yield ModelTensor(f"{prefix}hc_head_scale", (1,), "f32")
