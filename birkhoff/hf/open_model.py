"""Open a checkpoint with Transformers: model, tokenizer, chat template, and how much context fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from birkhoff.config import PAGE_TOKENS
from birkhoff.engine.engine import EngineCore
from birkhoff.errors import CapacityError, CheckpointError, OptionError, UnsupportedModel, quoted
from birkhoff.hf.chat_template import TemplateChat
from birkhoff.hf.checkpoint import family_of, has_tokenizer, read_config, stored_codes
from birkhoff.hf.model import HfConfig, HfModel
from birkhoff.hf.runner import HfRunner
from birkhoff.text.general_tokenizer import GeneralTokenizer
from birkhoff.weights.shard_index import read_shards

_LOCAL: Mapping[str, bool] = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """`tokenizer` and `chat` are None where the checkpoint has none."""

    model: HfModel
    tokenizer: GeneralTokenizer | None
    chat: TemplateChat | None


def open_model(path: Path, device: torch.device, dtype: torch.dtype, show_bar: bool = False) -> OpenedModel:
    """Load a checkpoint directory. Code in a checkpoint is never executed, and weights are safetensors only. `show_bar`
    leaves Transformers its progress bar."""
    raw = read_config(path)
    family = family_of(raw)
    transformers = _library()
    _check_weights(path)
    # Soft-capping of attention scores is only in the plain implementation.
    soft_capped = raw.get("attn_logit_softcapping") is not None or family.model_type == "gemma2"
    attention = "eager" if soft_capped or not family.cached else "sdpa"
    try:
        with _progress_bar(transformers, show_bar):
            network, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                output_loading_info=True,
                **_LOCAL,
            )
    except Exception as error:  # Transformers raises many kinds
        raise CheckpointError(f"Transformers cannot load {path}: {_reason(error)}.") from None
    if loaded["missing_keys"]:  # Transformers would fill them with random numbers
        missing = sorted(loaded["missing_keys"])
        raise CheckpointError(
            f"{path} lacks {len(missing)} tensors of the model, such as {missing[0]}, and has {_unused(loaded)}. "
            "Download it again; quantised checkpoints are not read."
        )
    text = open_text(path, int(network.config.vocab_size))
    config = hf_config(network.config, family.model_type, text.first_id, network.generation_config)
    return OpenedModel(HfModel(network.to(device), family, config), text.tokenizer, text.chat)


@dataclass(frozen=True, eq=False)
class OpenedText:
    """`first_id` is the id that the tokenizer puts before a text, None if it puts none."""

    tokenizer: GeneralTokenizer | None = None
    chat: TemplateChat | None = None
    first_id: int | None = None


def open_text(path: Path, vocab_size: int) -> OpenedText:
    """The tokenizer and chat template of a checkpoint directory; empty if it has no tokenizer."""
    own = _tokenizer(path)
    if own is None:
        return OpenedText()
    tokenizer = GeneralTokenizer(own.backend_tokenizer.to_str(), name=path.name, vocab_size=vocab_size)
    chat = TemplateChat(own, tokenizer) if own.chat_template else None
    return OpenedText(tokenizer, chat, _first_id(own))


def read_hf_config(path: Path, first_id: int | None) -> HfConfig:
    """The config of a checkpoint directory without its weights."""
    transformers = _library()
    try:
        config = transformers.AutoConfig.from_pretrained(path, **_LOCAL)
    except Exception as error:  # Transformers raises many kinds
        raise CheckpointError(f"Transformers cannot read {path}: {_reason(error)}.") from None
    generation = None
    if (path / "generation_config.json").is_file():
        generation = transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
    return hf_config(config, config.model_type, first_id, generation)


def context_for(model: HfModel, requested: int | None, requests: int, cache_bytes: int) -> int:
    """The longest context of `requests` requests that fits; `CapacityError` if the requested one does not."""
    limit = model.config.max_position_embeddings
    if requested is not None and requested > limit:
        raise OptionError(f"max_context is {requested}, the model's limit is {limit}. Ask for that or less.")
    each = token_bytes(model)
    fits = cache_bytes // (each * requests)
    if (requested or 1) > fits:
        raise CapacityError(
            f"{requests} requests of {requested or 1} tokens need {each * requests * (requested or 1)} bytes of cache, "
            f"cache_bytes is {cache_bytes}. Lower max_context or max_requests, or raise cache_bytes."
        )
    return requested or min(limit, fits)


def token_bytes(model: HfModel) -> int:
    """Bytes of keys and values of one token in all layers."""
    raw = model.config.raw
    if not model.family.cached:
        return 1
    heads = raw.get("num_key_value_heads") or model.config.num_attention_heads
    width = raw.get("head_dim") or model.config.hidden_size // model.config.num_attention_heads
    return 2 * int(heads) * int(width) * model.dtype.itemsize * len(model.layers)


def make_core(
    model: HfModel, context: int, max_requests: int, max_batch_tokens: int, batch_invariant: bool
) -> EngineCore:
    """The engine core of the model: our scheduler, sampler and requests, with a runner of its own."""
    pages = max_requests * -(-context // PAGE_TOKENS)
    return EngineCore(
        model,
        max_requests=max_requests,
        max_context=context,
        num_pages=pages,
        max_batch_tokens=max_batch_tokens,
        batch_invariant=batch_invariant,
        device=model.device,
        runner=HfRunner(model, max_requests, context, batch_invariant),
    )


def _library() -> Any:
    try:
        import transformers
    except ImportError:
        raise OptionError(
            "this model runs through the package transformers, which is not installed: "
            "pip install 'birkhoff-v4[transformers]'."
        ) from None
    return transformers


def _check_weights(path: Path) -> None:
    """Refuse checkpoints whose weights are missing or stored as codes: Transformers would convert the codes to numbers
    without their scales."""
    if not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{path} has no model.safetensors and no shards of it. Download them; other formats are not read."
        )
    # Broken files are Transformers' to report.
    why = stored_codes(read_shards(path, lambda error: None).tensors)
    if why is not None:
        raise UnsupportedModel(f"{path}: {why}")


def _reason(error: Exception) -> str:
    return quoted(f"{type(error).__name__}: {error}", 400)


def _unused(loaded: Mapping[str, Any]) -> str:
    unused = sorted(loaded["unexpected_keys"])
    return f"{len(unused)} others, such as {unused[0]}" if unused else "no others"


@contextmanager
def _progress_bar(transformers: Any, shown: bool) -> Iterator[None]:
    logging = transformers.utils.logging
    hidden = not shown and logging.is_progress_bar_enabled()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            logging.enable_progress_bar()


def _tokenizer(path: Path) -> Any:
    """The Transformers tokenizer of the checkpoint, None if it has no files of one."""
    if not has_tokenizer(path):
        return None
    try:
        own = _library().AutoTokenizer.from_pretrained(path, **_LOCAL)
    except Exception as error:  # one of many
        raise CheckpointError(f"the tokenizer of {path} cannot be read: {quoted(str(error), 300)}.") from None
    return own if getattr(own, "backend_tokenizer", None) is not None else None


def hf_config(config: Any, model_type: str, first_id: int | None, generation: Any = None) -> HfConfig:
    """From a config of Transformers and, for the ids that end a text, a generation config."""
    ends: list[int] = []
    for source in (getattr(generation, "eos_token_id", None), config.eos_token_id):
        ends += source if isinstance(source, list) else [] if source is None else [source]
    return HfConfig(
        model_type,
        int(config.vocab_size),
        int(config.hidden_size),
        int(config.num_hidden_layers),
        _max_positions(config),
        first_id,
        tuple(dict.fromkeys(int(end) for end in ends)),
        config.to_dict(),
    )


def _first_id(tokenizer: Any) -> int | None:
    with_special = tokenizer("a", add_special_tokens=True)["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    added = len(with_special) > len(plain) and with_special[0] in tokenizer.all_special_ids
    return int(with_special[0]) if added else None


def _max_positions(config: Any) -> int:
    """The context limit. Rotary frequencies that change with the longest request of a batch are not supported: there
    the limit is the length up to which they stay the same."""
    limit = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope, Mapping) and rope.get("rope_type") in ("dynamic", "longrope"):
        limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
    return limit
