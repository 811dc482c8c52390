"""Convert a V4Config to GGUF metadata of architecture `deepseek4`, and back.

`metadata_of` writes every key that a reader of dialect A or B looks up, including four whose absence is silently wrong
(`rope.dimension_count` and three of `rope.scaling`). `config_from_metadata` requires all keys that cannot be derived,
derives what tensors or other keys determine (vocabulary, output rank, hash layers, streams), uses a default only where
all readers agree on it, and reports all missing keys at once. A rope scaling of type "none" means no scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from birkhoff.config import RopeScaling, V4Config
from birkhoff.errors import ConfigError, UnsupportedModel, quoted

ARCHITECTURE = "deepseek4"
SQRT_SOFTPLUS = 4
U32 = 4
F32 = 6
BOOL = 7
STRING = 8
I32_ARRAY = (9, 5)
F32_ARRAY = (9, 6)
STUB_ADVICE = (
    "It was written by an early draft that no program reads any more. Convert the original checkpoint: "
    "birkhoff convert CHECKPOINT OUT.gguf"
)


class MetadataEntry(NamedTuple):
    """One metadata entry. `kind` is the value type id, or (9, element type id) for an array."""

    name: str
    kind: int | tuple[int, int]
    value: Any


def metadata_of(config: V4Config, mtp_file: bool = False) -> list[MetadataEntry]:
    """Return every `deepseek4.` key of a trunk file, or of a file that holds only the MTP block."""
    blocks = config.num_hidden_layers + mtp_file
    clamp = [config.swiglu_limit] * blocks
    ratios = list(config.compress_ratios) + [0] * config.num_nextn_predict_layers
    scaling = config.rope_scaling
    rows: list[tuple[str, Any, Any]] = [
        ("context_length", U32, config.max_position_embeddings),
        ("embedding_length", U32, config.hidden_size),
        ("embedding_length_out", U32, config.hc_mult * config.hidden_size),
        ("block_count", U32, blocks),
        ("vocab_size", U32, config.vocab_size),
        ("feed_forward_length", U32, config.moe_intermediate_size),
        ("attention.head_count", U32, config.num_attention_heads),
        ("attention.head_count_kv", U32, 1),
        ("attention.key_length", U32, config.head_dim),
        ("attention.value_length", U32, config.head_dim),
        ("attention.layer_norm_rms_epsilon", F32, config.rms_norm_eps),
        ("attention.q_lora_rank", U32, config.q_lora_rank),
        ("attention.output_group_count", U32, config.o_groups),
        ("attention.output_lora_rank", U32, config.o_lora_rank),
        ("attention.sliding_window", U32, config.sliding_window),
        ("attention.compress_ratios", I32_ARRAY, ratios),
        ("attention.compress_rope_freq_base", F32, config.compress_rope_theta),
        ("attention.indexer.head_count", U32, config.index_n_heads),
        ("attention.indexer.key_length", U32, config.index_head_dim),
        ("attention.indexer.top_k", U32, config.index_topk),
        ("rope.dimension_count", U32, config.qk_rope_head_dim),
        ("rope.freq_base", F32, config.rope_theta),
        ("rope.scaling.type", STRING, "yarn" if scaling else "none"),
        ("rope.scaling.factor", F32, scaling.factor if scaling else 1.0),
        (
            "rope.scaling.original_context_length",
            U32,
            scaling.original_max_position_embeddings if scaling else config.max_position_embeddings,
        ),
        ("rope.scaling.yarn_beta_fast", F32, scaling.beta_fast if scaling else 32.0),
        ("rope.scaling.yarn_beta_slow", F32, scaling.beta_slow if scaling else 1.0),
        ("expert_count", U32, config.n_routed_experts),
        ("expert_used_count", U32, config.num_experts_per_tok),
        ("expert_shared_count", U32, config.n_shared_experts),
        ("expert_feed_forward_length", U32, config.moe_intermediate_size),
        ("expert_weights_scale", F32, config.routed_scaling_factor),
        ("expert_weights_norm", BOOL, True),
        ("expert_gating_func", U32, SQRT_SOFTPLUS),
        ("expert_group_count", U32, 0),
        ("expert_group_used_count", U32, 0),
        ("swiglu_clamp_exp", F32_ARRAY, clamp),
        ("swiglu_clamp_shexp", F32_ARRAY, clamp),
        ("hyper_connection.count", U32, config.hc_mult),
        ("hyper_connection.sinkhorn_iterations", U32, config.hc_sinkhorn_iters),
        ("hyper_connection.epsilon", F32, config.hc_eps),
        ("hash_layer_count", U32, config.num_hash_layers),
    ]
    if mtp_file:
        rows.append(("nextn_predict_layers", U32, config.num_nextn_predict_layers))
    return [MetadataEntry(f"{ARCHITECTURE}.{name}", kind, value) for name, kind, value in rows]


def check_architecture(keys: Mapping[str, Any], label: str) -> None:
    """Raise UnsupportedModel unless the file is of dialect A or B."""
    seen = keys.get("general.architecture")
    if seen == ARCHITECTURE:
        return
    if seen in ("deepseek-v4", "deepseek_v4"):
        raise UnsupportedModel(f"{label} has the architecture {seen!r}, the old stub dialect. {STUB_ADVICE}")
    if seen == "dflash":
        raise UnsupportedModel(
            f"{label} holds a DSpark drafter (architecture 'dflash'), not a model, and drafters are not run here: they "
            "need the stream means after three target layers, attention in both directions over a block, and a Markov "
            "head. Give the trunk's file; its greedy tokens are the same."
        )
    if seen == "deepseek41":
        raise UnsupportedModel(
            f"{label} is DeepSeek-V4.1, which has parts that V4 lacks and that are not built here: delayed mHC "
            "without hc_head, compressed and index keys shared between layers, compression by 2 and by 1, Engram "
            "tables, a pool of candidate blocks. Use a V4 file."
        )
    raise UnsupportedModel(
        f"{label} has the architecture {quoted(seen)}, expected {ARCHITECTURE!r}. This is not a DeepSeek-V4 file."
    )


class _MetadataReader:
    """Typed look-ups that collect missing keys instead of raising at the first."""

    def __init__(self, keys: Mapping[str, Any], label: str):
        self.keys = keys
        self.label = label
        self.missing: list[str] = []

    def has(self, name: str) -> bool:
        return f"{ARCHITECTURE}.{name}" in self.keys

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        key = f"{ARCHITECTURE}.{name}"
        value = self.keys.get(key)
        if value is None:
            if default is None:
                self.missing.append(key)
            return default
        good = type(value) is kind or (kind is float and type(value) is int)
        if not good or (kind is float and not math.isfinite(value)):
            raise ConfigError(f"{self.label}: {key} is {quoted(value)}, expected {_KIND_TEXT[kind]}.")
        return float(value) if kind is float else value

    def integer(self, name: str, default: int | None = None) -> Any:
        return self.get(name, int, default)

    def number(self, name: str, default: float | None = None) -> Any:
        value = self.get(name, float, default)
        return value if value is None else shortest(value)

    def per_layer(self, name: str, kind: type, blocks: int) -> list[Any]:
        """Return an array with one entry per block, or a single value repeated."""
        key = f"{ARCHITECTURE}.{name}"
        value = self.keys.get(key)
        if value is None:
            self.missing.append(key)
            return []
        if type(value) is kind or (kind is float and type(value) is int):
            return [value] * blocks
        if (
            not isinstance(value, list)
            or not all(type(v) in (int, kind) for v in value)
            or len(value) < blocks
        ):
            raise ConfigError(
                f"{self.label}: {key} is {quoted(value)}, expected one number for each of {blocks} blocks."
            )
        return value


_KIND_TEXT = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def shortest(value: float) -> float:
    """Return the shortest decimal that rounds to this float32: 1e-6 instead of 9.999999974752427e-07."""
    import numpy as np

    return float(str(np.float32(value)))


def config_from_metadata(
    keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], label: str
) -> V4Config:
    """Return the config that a file describes. `shapes` are its tensors, outermost dimension first."""
    check_architecture(keys, label)
    read = _MetadataReader(keys, label)
    blocks = read.integer("block_count")
    nextn = read.integer("nextn_predict_layers", 0)
    values = _plain_values(read, keys, shapes)
    gating = read.integer("expert_gating_func")
    value_length = read.integer("attention.value_length")
    scaling = _scaling(read)
    valid_blocks = blocks if blocks is not None and 0 < blocks < 65_536 else 0
    ratios = read.per_layer("attention.compress_ratios", int, valid_blocks)
    clamps = read.per_layer("swiglu_clamp_exp", float, valid_blocks)
    if read.missing:
        raise ConfigError(
            f"{label} lacks {len(read.missing)} keys that cannot be derived: {', '.join(read.missing[:6])}"
            f"{' and more' if len(read.missing) > 6 else ''}. A model without them would be silently wrong; "
            "convert the original checkpoint again."
        )
    layers = blocks - nextn
    if not valid_blocks or not layers > 0:
        raise ConfigError(
            f"{label} has {blocks} blocks of which {nextn} are MTP, expected 1 to 65535 and some trunk."
        )
    if gating != SQRT_SOFTPLUS:
        raise ConfigError(
            f"{label}: expert_gating_func is {gating}, expected {SQRT_SOFTPLUS} (sqrt-softplus)."
        )
    if value_length != values["head_dim"]:
        raise ConfigError(
            f"{label}: value_length is {value_length}, key_length {values['head_dim']}; V4 has one size."
        )
    return V4Config(
        **values,
        num_hidden_layers=layers,
        compress_ratios=tuple(ratios[:layers]),
        swiglu_limit=_swiglu_limit(read, clamps, blocks, label),
        rope_scaling=scaling,
        num_nextn_predict_layers=nextn,
        bos_token_id=_token(keys, "bos"),
        eos_token_id=_token(keys, "eos"),
    )


def _plain_values(
    read: _MetadataReader, keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Fields of the config that are one key each, or follow from the shape of a tensor where the key is missing."""
    groups = read.integer("attention.output_group_count")
    derived = _derived(keys, shapes, groups)
    return {
        "max_position_embeddings": read.integer("context_length"),
        "hidden_size": read.integer("embedding_length"),
        "vocab_size": read.integer("vocab_size", derived.get("vocab_size")),
        "num_attention_heads": read.integer("attention.head_count"),
        "num_key_value_heads": read.integer("attention.head_count_kv"),
        "head_dim": read.integer("attention.key_length"),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "q_lora_rank": read.integer("attention.q_lora_rank"),
        "o_groups": groups,
        "o_lora_rank": read.integer("attention.output_lora_rank", derived.get("o_lora_rank")),
        "sliding_window": read.integer("attention.sliding_window"),
        "compress_rope_theta": read.number("attention.compress_rope_freq_base"),
        "index_n_heads": read.integer("attention.indexer.head_count"),
        "index_head_dim": read.integer("attention.indexer.key_length"),
        "index_topk": read.integer("attention.indexer.top_k"),
        "qk_rope_head_dim": read.integer("rope.dimension_count"),
        "rope_theta": read.number("rope.freq_base", 10000.0),
        "n_routed_experts": read.integer("expert_count"),
        "num_experts_per_tok": read.integer("expert_used_count"),
        "n_shared_experts": read.integer("expert_shared_count"),
        "moe_intermediate_size": read.integer("expert_feed_forward_length"),
        "routed_scaling_factor": read.number("expert_weights_scale"),
        "norm_topk_prob": read.get("expert_weights_norm", bool),
        "hc_mult": read.integer("hyper_connection.count", derived.get("hc_mult")),
        "hc_sinkhorn_iters": read.integer("hyper_connection.sinkhorn_iterations"),
        "hc_eps": read.number("hyper_connection.epsilon"),
        "num_hash_layers": read.integer("hash_layer_count", derived.get("num_hash_layers")),
    }


def _swiglu_limit(read: _MetadataReader, clamps: Sequence[float], blocks: int, label: str) -> float:
    """The one limit of routed (`clamps`) and shared experts; a `ConfigError` if layers differ."""
    shared = clamps
    if read.has("swiglu_clamp_shexp"):
        shared = read.per_layer("swiglu_clamp_shexp", float, blocks)
    limits = set(map(shortest, [*clamps[:blocks], *shared[:blocks]]))
    if len(limits) != 1:
        raise ConfigError(
            f"{label} has SwiGLU limits {sorted(limits)[:4]} that differ; V4 has one for all layers."
        )
    return limits.pop()


def _derived(
    keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], groups: int | None
) -> dict[str, int]:
    out: dict[str, int] = {}
    tokens = keys.get("tokenizer.ggml.tokens")
    if "token_embd.weight" in shapes:
        out["vocab_size"] = shapes["token_embd.weight"][0]
    elif isinstance(tokens, list) and tokens:
        out["vocab_size"] = len(tokens)
    first = shapes.get("blk.0.attn_output_a.weight")
    if first and groups:
        out["o_lora_rank"] = first[1] if len(first) == 3 else first[0] // groups
    if "output_hc_base.weight" in shapes:
        out["hc_mult"] = shapes["output_hc_base.weight"][0]
    if any(name.startswith("blk.") for name in shapes):
        out["num_hash_layers"] = sum(name.endswith(".ffn_gate_tid2eid.weight") for name in shapes)
    return out


def _scaling(read: _MetadataReader) -> RopeScaling | None:
    kind = read.get("rope.scaling.type", str)
    factor = read.number("rope.scaling.factor")
    length = read.integer("rope.scaling.original_context_length")
    if kind in (None, "none") or factor is None or length is None:
        return None
    if kind != "yarn":
        raise ConfigError(f"{read.label}: rope.scaling.type is {quoted(kind)}, expected 'yarn' or 'none'.")
    fast = read.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = read.number("rope.scaling.yarn_beta_slow", 1.0)
    return RopeScaling(factor, length, fast, slow)


def _token(keys: Mapping[str, Any], which: str) -> int | None:
    value = keys.get(f"tokenizer.ggml.{which}_token_id")
    return value if type(value) is int else None
