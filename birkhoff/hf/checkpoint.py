"""Which checkpoints run through Transformers, decided from `config.json` alone, and why the others do not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from birkhoff.errors import CheckpointError, UnsupportedModel, quoted
from birkhoff.hf.families import BY_TYPE, FAMILIES, Family

OURS = "deepseek_v4"
_NUMBERS = ("F64", "F32", "F16", "BF16")  # dtypes of safetensors
_ENCODERS = (
    "T5",
    "Bart",
    "Marian",
    "Pegasus",
    "Whisper",
    "EncoderDecoder",
    "M2M100",
    "Seamless",
    "Bert",
    "Roberta",
)
_PARTS = ("vision_config", "audio_config", "image_token_id", "image_token_index", "mm_vision_tower")


def read_config(path: Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint directory."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no config.json. Check the path.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Download it again.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is no JSON object. Download it again.")
    return config


def has_tokenizer(path: Path) -> bool:
    """Whether the directory has files of a tokenizer."""
    return any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def stored_codes(tensors: Mapping[str, Any]) -> str | None:
    """Why weights with these headers are not numbers but codes of a quantisation; None if they are numbers."""
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dtype not in _NUMBERS:
            return (
                f"{name} is stored as {tensor.dtype}: a quantised checkpoint, although its config does not say so. Use "
                "the unquantised one."
            )
    return None


def runs_here(config: Mapping[str, Any]) -> bool:
    """Whether the config is of another model than ours: `family_of` accepts it or says why not."""
    kind = config.get("model_type")
    return isinstance(kind, str) and not kind.startswith(OURS)


def family_of(config: Mapping[str, Any]) -> Family:
    """The row of the table; `UnsupportedModel` says why there is none."""
    why = _refusal(config)
    if why is not None:
        raise UnsupportedModel(why)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in BY_TYPE:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise UnsupportedModel(
            f"model_type is {quoted(kind)}, which has no row in the table of families: {known}. docs/models.md says "
            "how to add one."
        )
    return BY_TYPE[kind]


def _refusal(config: Mapping[str, Any]) -> str | None:
    """Why a model of a kind that is known by name does not run; None if nothing speaks against it."""
    kind = quoted(config.get("model_type"))
    names = [str(name) for name in config.get("architectures") or ()]
    if config.get("is_encoder_decoder") or any(name.startswith(_ENCODERS) for name in names):
        return f"{kind} is an encoder or encoder-decoder; hooks and generation here are for causal decoders."
    if any(part in config for part in _PARTS):
        return (
            f"{kind} is multimodal: it also takes images or sound, whose rows are no tokens. Use a text-only "
            "checkpoint of the family."
        )
    if config.get("model_type") not in BY_TYPE and "auto_map" in config:
        return (
            f"{kind} brings its own Python code (auto_map), which is never executed. Use a family that Transformers "
            "itself implements."
        )
    if config.get("model_type") in BY_TYPE:
        quantization = config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            return (
                f"the checkpoint is quantised with {quoted(method)}: fused and packed modules hide the tensors of "
                "hooks. Use the unquantised checkpoint."
            )
        if config.get("add_cross_attention"):
            return f"{kind} has cross-attention to an encoder; hooks and generation here are for causal decoders."
    return None
