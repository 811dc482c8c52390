"""The configuration of a V4 model: a frozen dataclass with the field names of the released config.json.

Two spellings are read: the released one (`compress_ratios`, `rope_scaling`, `num_hash_layers`) and that of
`transformers` (`layer_types`, `rope_parameters`, `mlp_layer_types`). A key that is neither used nor known to be
harmless is listed in `unknown`, for the caller to report. A value that changes the computation and is not implemented
is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol

from birkhoff.errors import ConfigError, UnsupportedModel
from birkhoff.small_file import read_json

LayerKind = Literal["swa", "csa", "hca"]
KIND_OF_RATIO: dict[int, LayerKind] = {0: "swa", 4: "csa", 128: "hca"}
PAGE_TOKENS = 128  # one cache page: 32 CSA entries and 1 HCA entry, so that prefixes can be shared

_RATIO_OF_LAYER_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}

# Keys of other config files that do not change what the trunk computes.
_HARMLESS = frozenset(
    """architectures auto_map model_type torch_dtype dtype transformers_version initializer_range use_cache
    pad_token_id hidden_act output_router_logits router_aux_loss_coef router_jitter_noise attention_dropout
    partial_rotary_factor intermediate_size topk_method n_group topk_group ep_size pretraining_tp aux_loss_alpha
    seq_aux first_k_dense_replace moe_layer_freq _name_or_path return_dict output_hidden_states output_attentions
    chunk_size_feed_forward id2label label2id problem_type is_encoder_decoder keys_to_ignore_at_inference
    num_local_experts sep_token_id decoder_start_token_id max_length dspark_config name
    mlp_bias
    """.split()
)


class ModelConfig(Protocol):
    """What requests and analyses need to know of any model, whichever engine runs it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None:
        """The id that text is encoded after, None if there is none."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters; V4 applies them to compressed layers only, without the magnitude factor (spec 5)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class V4Config:
    """Sizes and constants of one V4 model. Defaults are V4-Flash."""

    vocab_size: int = 129280
    hidden_size: int = 4096
    num_hidden_layers: int = 43
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0) + (4, 128) * 20 + (4,)  # trunk layers; MTP is always sliding
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 2048
    num_hash_layers: int = 3
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 1048576
    num_nextn_predict_layers: int = 1
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    expert_dtype: str | None = None
    quantization_config: dict[str, Any] | None = field(default=None, compare=False, hash=False)
    unknown: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        _check(self)

    def layer_kind(self, layer: int) -> LayerKind:
        """The attention of a trunk layer: sliding window, CSA or HCA."""
        return KIND_OF_RATIO[self.compress_ratios[layer]]

    def is_hash_routed(self, layer: int) -> bool:
        """Whether a layer selects experts by token id."""
        return layer < self.num_hash_layers

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @classmethod
    def from_file(cls, path: str | Path) -> V4Config:
        """Read a config.json."""
        path = Path(path)
        try:
            raw = read_json(path)
        except FileNotFoundError:
            raise ConfigError(
                f"{path.name} is missing in {path.parent}. A checkpoint is a directory with config.json "
                "and safetensors files; check the path."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{path.name} cannot be read as JSON ({reason}). Download it again.") from None
        try:
            return cls.from_dict(raw)
        except ConfigError as error:
            if path.name in str(error):
                raise
            raise type(error)(f"{path.name}: {error}") from None

    @classmethod
    def from_dict(cls, raw: object) -> V4Config:
        """Translate and validate the object of a config.json."""
        if not isinstance(raw, dict):
            raise ConfigError(
                f"config.json holds a {type(raw).__name__}, expected an object with the model's sizes."
            )
        _check_model_type(raw)
        values = dict(raw)
        _translate_transformers_spelling(values)
        _translate_rope_scaling(values)
        _translate_ratios(values)
        if isinstance(values.get("eos_token_id"), list):
            values["eos_token_id"] = tuple(values["eos_token_id"])
        known = {f.name for f in fields(cls)} - {"unknown"}
        unknown = tuple(sorted(k for k in values if k not in known and k not in _HARMLESS))
        if values.get("hidden_act", "silu") != "silu":
            raise ConfigError(
                f"hidden_act is {values['hidden_act']!r}; V4 experts are SwiGLU, expected 'silu'."
            )
        if values.get("mlp_bias"):
            raise ConfigError(
                "mlp_bias is true; V4 experts have no biases. Take the checkpoint's own config.json."
            )
        return cls(**{k: v for k, v in values.items() if k in known}, unknown=unknown)

    def to_dict(self) -> dict[str, Any]:
        """The released spelling; `from_dict(to_dict(c)) == c`."""
        out: dict[str, Any] = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "unknown" or (value is None and f.name in ("expert_dtype", "quantization_config")):
                continue
            out[f.name] = list(value) if isinstance(value, tuple) else value
        out["compress_ratios"] = list(self.compress_ratios) + [0] * self.num_nextn_predict_layers
        if self.rope_scaling is not None:
            out["rope_scaling"] = {"type": "yarn", **vars(self.rope_scaling)}
        return out


def _check_model_type(raw: dict[str, Any]) -> None:
    seen = raw.get("model_type")
    if seen == "deepseek_v4":
        return
    text = raw.get("text_config")
    inner = text.get("model_type") if isinstance(text, dict) else None
    if any(str(name).startswith(("deepseek_v41", "deepseek_v4_1")) for name in (seen, inner)):
        raise UnsupportedModel(_v41_refusal(raw))
    raise UnsupportedModel(
        f"model_type is {seen!r}, expected 'deepseek_v4'. This is not a DeepSeek-V4 checkpoint."
    )


# Parts that DeepSeek-V4.1 has and this model lacks: fields of its config that announce the part, and the part. A field
# that is absent from a config does not name its part; those without fields are part of every V4.1 model.
_V41_PARTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (),
        "delayed mHC: the read-in weights of a sublayer are used by the next one, and the last ones replace hc_head",
    ),
    ((), "queries without the RMS norm of every head"),
    (("compress_ratios",), "compression by 2 and by 1 without position bias or overlap (compress_ratios {})"),
    (
        ("kv_source_layer_ids", "kv_source_layers"),
        "compressed keys of layers {} used by the layers after them",
    ),
    (
        ("index_source_layer_ids", "index_source_layers"),
        "index keys from the compressed latent, of layers {}",
    ),
    (
        ("candidate_source_layer_id", "candidate_source_layer"),
        "a pool of candidate blocks, scored in layer {}",
    ),
    (("engram_layer_ids",), "Engram: hashed n-gram tables added to the streams before layers {}"),
    (("weight_block_size",), "FP8 weights in blocks of {}"),
    (("dspark_target_layer_ids",), "a DSpark drafter on layers {}"),
    (("vision_config",), "the vision tower and its router biases"),
)


def _v41_refusal(raw: dict[str, Any]) -> str:
    """Why a V4.1 config is refused: its size, and each part of it that this model lacks."""
    fields_of: dict[str, Any] = dict(raw)
    for name in ("quantization_config", "text_config"):
        if isinstance(raw.get(name), dict):
            fields_of |= raw[name]
    sizes = [
        f"{fields_of[name]} {word}"
        for name, word in (
            ("num_hidden_layers", "layers"),
            ("hidden_size", "wide"),
            ("n_routed_experts", "experts"),
        )
        if name in fields_of
    ]
    parts = []
    for names, part in _V41_PARTS:
        found = next((fields_of[name] for name in names if fields_of.get(name) is not None), None)
        if names and found is None:
            continue
        shown = sorted(set(found)) if "compress_ratios" in names and isinstance(found, list) else found
        parts.append(part.format(", ".join(map(str, shown)) if isinstance(shown, list) else shown))
    numbered = "; ".join(f"({number}) {part}" for number, part in enumerate(parts, 1))
    return (
        f"this is DeepSeek-V4.1{' (' + ', '.join(sizes) + ')' if sizes else ''}, which has parts that V4 lacks and "
        f"that are not built here: {numbered}. Use a V4-Flash or V4-Pro checkpoint."
    )


def _translate_transformers_spelling(values: dict[str, Any]) -> None:
    """Replace `layer_types`, `mlp_layer_types` and `rope_parameters` by the released fields, in place."""
    kinds = {"compress_rates": dict, "rope_parameters": dict, "layer_types": list, "mlp_layer_types": list}
    for key, kind in kinds.items():
        if values.get(key) is not None and not isinstance(values[key], kind):
            raise ConfigError(
                f"{key} is {values[key]!r}, expected a JSON {'object' if kind is dict else 'list'}."
            )
    rates = values.pop("compress_rates", None) or {}
    for name, expected in (("compressed_sparse_attention", 4), ("heavily_compressed_attention", 128)):
        if rates.get(name, expected) != expected:
            raise ConfigError(
                f"compress_rates.{name} is {rates[name]}, expected {expected}: "
                "cache pages hold 32 CSA entries and 1 HCA entry."
            )
    layer_types = values.pop("layer_types", None)
    if layer_types is not None and "compress_ratios" not in values:
        bad = [t for t in layer_types if not isinstance(t, str) or t not in _RATIO_OF_LAYER_TYPE]
        if bad:
            raise ConfigError(
                f"layer_types holds {bad[0]!r}, expected one of {sorted(_RATIO_OF_LAYER_TYPE)}."
            )
        values["compress_ratios"] = [_RATIO_OF_LAYER_TYPE[t] for t in layer_types]
    mlp_types = values.pop("mlp_layer_types", None)
    if mlp_types is not None and "num_hash_layers" not in values:
        hashed = sum(t == "hash_moe" for t in mlp_types)
        if list(mlp_types) != ["hash_moe"] * hashed + ["moe"] * (len(mlp_types) - hashed):
            raise ConfigError(
                f"mlp_layer_types is {mlp_types}, expected every 'hash_moe' before every 'moe'."
            )
        values["num_hash_layers"] = hashed
    rope = values.pop("rope_parameters", None)
    if isinstance(rope, dict) and isinstance(rope.get("compress"), dict):
        compress, main = rope["compress"], rope.get("main") or {}
        if not isinstance(main, dict):
            raise ConfigError(f"rope_parameters.main is {main!r}, expected a JSON object.")
        values["rope_theta"] = main.get("rope_theta", values.get("rope_theta", 10000.0))
        values["compress_rope_theta"] = compress.get(
            "rope_theta", values.get("compress_rope_theta", 160000.0)
        )
        if main.get("rope_type", "default") != "default":
            raise ConfigError(
                f"rope_parameters.main.rope_type is {main['rope_type']!r}, expected 'default': "
                "sliding layers have no YaRN."
            )
        values["rope_scaling"] = compress if compress.get("rope_type", "default") != "default" else None
    elif isinstance(rope, dict) and rope:
        values.setdefault("rope_scaling", rope)


def _translate_rope_scaling(values: dict[str, Any]) -> None:
    scaling = values.get("rope_scaling")
    if scaling is None or isinstance(scaling, RopeScaling):
        return
    if not isinstance(scaling, dict):
        raise ConfigError(f"rope_scaling is {scaling!r}, expected an object or null.")
    kind = scaling.get("type", scaling.get("rope_type", "yarn"))
    if kind == "default":
        values["rope_scaling"] = None
        return
    if kind != "yarn":
        raise ConfigError(f"rope_scaling.type is {kind!r}, expected 'yarn'.")
    try:
        values["rope_scaling"] = RopeScaling(
            factor=float(scaling["factor"]),
            original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
            beta_fast=float(scaling.get("beta_fast") or 32),
            beta_slow=float(scaling.get("beta_slow") or 1),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"rope_scaling {scaling} lacks or misstates {error}; expected factor and original_max_position_embeddings."
        ) from None


def _translate_ratios(values: dict[str, Any]) -> None:
    """Drop the entries of MTP layers (always 0), which follow those of the trunk in the released list."""
    ratios = values.get("compress_ratios")
    layers = values.get("num_hidden_layers", V4Config.num_hidden_layers)
    if ratios is None:
        raise ConfigError(
            "compress_ratios is missing (and layer_types too): the attention kind of each layer cannot "
            "be guessed. Take config.json from the checkpoint's own directory."
        )
    if not isinstance(ratios, (list, tuple)) or not all(type(r) is int for r in ratios):
        raise ConfigError(f"compress_ratios is {ratios!r}, expected a list of 0, 4 and 128.")
    if isinstance(layers, int) and len(ratios) > layers and any(ratios[layers:]):
        raise ConfigError(
            f"compress_ratios has {len(ratios)} entries for {layers} layers and its tail "
            f"{list(ratios[layers:])} is not sliding (0), as MTP layers are."
        )
    values["compress_ratios"] = tuple(ratios[:layers]) if isinstance(layers, int) else tuple(ratios)


_POSITIVE = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim q_lora_rank o_groups o_lora_rank "
    "sliding_window index_n_heads index_head_dim index_topk n_routed_experts num_experts_per_tok "
    "moe_intermediate_size hc_mult hc_sinkhorn_iters max_position_embeddings"
).split()


_POSITIVE_NUMBERS = (
    "routed_scaling_factor swiglu_limit hc_eps rms_norm_eps rope_theta compress_rope_theta".split()
)


def _check(c: V4Config) -> None:
    """Raise `ConfigError` unless the values are possible and describe a V4."""
    _check_numbers(c)
    _check_attention(c)
    _check_experts(c)
    if type(c.tie_word_embeddings) is not bool:
        raise ConfigError(f"tie_word_embeddings is {c.tie_word_embeddings!r}, expected true or false.")
    if c.attention_bias:
        raise ConfigError("attention_bias must be false: V4 has no biases.")
    if type(c.num_nextn_predict_layers) is not int or c.num_nextn_predict_layers < 0:
        raise ConfigError(f"num_nextn_predict_layers is {c.num_nextn_predict_layers!r}, expected 0 or more.")
    _check_rope_scaling(c.rope_scaling)
    for token in (*c.eos_token_ids, *(() if c.bos_token_id is None else (c.bos_token_id,))):
        if type(token) is not int or not 0 <= token < c.vocab_size:
            raise ConfigError(f"special token id {token!r} lies outside the vocabulary of {c.vocab_size}.")


def _check_numbers(c: V4Config) -> None:
    for name in _POSITIVE:
        value = getattr(c, name)
        if type(value) is not int or not 0 < value <= 2**31:
            raise ConfigError(f"{name} is {value!r}, expected a positive whole number.")
    for name in _POSITIVE_NUMBERS:
        value = getattr(c, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{name} is {value!r}, expected a positive number.")


def _check_attention(c: V4Config) -> None:
    rope = c.qk_rope_head_dim
    if type(rope) is not int or rope < 2 or rope % 2 or rope > c.head_dim:
        raise ConfigError(
            f"qk_rope_head_dim is {rope!r}, expected an even number up to head_dim ({c.head_dim})."
        )
    if c.num_key_value_heads != 1:
        raise ConfigError(
            f"num_key_value_heads is {c.num_key_value_heads}, expected 1: V4 shares one key/value vector."
        )
    if c.num_attention_heads % c.o_groups:
        raise ConfigError(
            f"num_attention_heads ({c.num_attention_heads}) is not a multiple of o_groups ({c.o_groups})."
        )
    ratios = c.compress_ratios
    if len(ratios) != c.num_hidden_layers:
        raise ConfigError(
            f"compress_ratios has {len(ratios)} entries, expected {c.num_hidden_layers}, one per layer."
        )
    bad = [ratio for ratio in ratios if ratio not in KIND_OF_RATIO]
    if bad:
        raise ConfigError(f"compress_ratios holds {bad[0]}, expected 0 (sliding), 4 (CSA) or 128 (HCA).")
    if 4 in ratios and c.index_head_dim < rope:
        raise ConfigError(
            f"index_head_dim is {c.index_head_dim}, expected at least qk_rope_head_dim ({rope})."
        )


def _check_experts(c: V4Config) -> None:
    if c.num_experts_per_tok > c.n_routed_experts:
        raise ConfigError(
            f"num_experts_per_tok ({c.num_experts_per_tok}) exceeds n_routed_experts ({c.n_routed_experts})."
        )
    if c.n_shared_experts != 1:
        raise ConfigError(f"n_shared_experts is {c.n_shared_experts}, expected 1.")
    if type(c.num_hash_layers) is not int or not 0 <= c.num_hash_layers <= c.num_hidden_layers:
        raise ConfigError(f"num_hash_layers is {c.num_hash_layers!r}, expected 0 to {c.num_hidden_layers}.")
    if c.scoring_func != "sqrtsoftplus":
        raise ConfigError(f"scoring_func is {c.scoring_func!r}, expected 'sqrtsoftplus'.")
    if not c.norm_topk_prob:
        raise ConfigError("norm_topk_prob is false; V4 always normalises routing weights.")


def _check_rope_scaling(scaling: RopeScaling | None) -> None:
    if scaling is None:
        return
    length, fast, slow = scaling.original_max_position_embeddings, scaling.beta_fast, scaling.beta_slow
    if not (scaling.factor >= 1 and length > 0 and fast > slow > 0):
        raise ConfigError(
            f"rope_scaling {scaling} is impossible: factor >= 1, a positive original length and "
            "beta_fast > beta_slow > 0 are expected."
        )
