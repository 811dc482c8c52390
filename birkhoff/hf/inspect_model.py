"""What a checkpoint for the backend transformers holds, from `config.json` and the headers of its weight files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from birkhoff.hf.checkpoint import family_of, has_tokenizer, read_config, stored_codes
from birkhoff.hf.families import points_of
from birkhoff.text.template_answer import call_syntax, takes_tools, writes_reasoning
from birkhoff.weights.shard_index import read_shards


def inspect_model(path: Path) -> dict[str, Any]:
    """A report as JSON; raises `UnsupportedModel` for a model that does not run."""
    config = read_config(path)
    family = family_of(config)
    layers = _first(config, "num_hidden_layers", "n_layer")
    problems: list[str] = []
    tensors = read_shards(path, lambda error: problems.append(str(error))).tensors
    if (codes := stored_codes(tensors)) is not None:
        problems.append(codes)
    dtypes: dict[str, int] = {}
    for tensor in tensors.values():
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + math.prod(tensor.shape)
    if not has_tokenizer(path):
        problems.append("no tokenizer files: text cannot be encoded, token ids work")
    template = _chat_template(path)
    return {
        "path": str(path),
        "backend": "transformers",
        "family": family.model_type,
        "title": family.title,
        "architecture": family.architecture,
        "layers": layers,
        "hidden_size": _first(config, "hidden_size", "n_embd"),
        "vocab_size": config.get("vocab_size"),
        "experts": _first(config, "num_experts", "num_local_experts") if family.moe else None,
        "max_context": _first(config, "max_position_embeddings", "n_positions"),
        "hooks": [*points_of(family, config, _has_dense_layers(config)), "final_hidden"],
        "tensors": len(tensors),
        "parameters": sum(dtypes.values()),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "dtypes": dtypes,
        "chat_template": bool(template),
        "tools": call_syntax(template).name if takes_tools(template) else None,
        "reasoning": writes_reasoning(template),
        "problems": problems,
    }


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _has_dense_layers(config: Mapping[str, Any]) -> bool:
    return bool(config.get("mlp_only_layers")) or int(config.get("decoder_sparse_step") or 1) > 1


def _chat_template(path: Path) -> str:
    """The text of the chat template, of all of them if there are several; empty if there is none."""
    try:
        if (path / "chat_template.jinja").is_file():
            return (path / "chat_template.jinja").read_text(encoding="utf-8")
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    template = settings.get("chat_template") if isinstance(settings, dict) else None
    return template if isinstance(template, str) else json.dumps(template) if template else ""
