"""What a notebook shows for an `Engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from birkhoff import notebook
from birkhoff.dtype_names import dtype_name

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine


def engine_html(engine: Engine) -> str:
    """A table of the model's device and sizes, and of what is attached to it."""
    config = engine.config
    experts = getattr(config, "n_routed_experts", None)
    per_token = getattr(config, "num_experts_per_tok", None)
    facts = {
        "device": f"{engine.model.device}, {dtype_name(engine.model.dtype)}",
        "layers": f"{config.num_hidden_layers} of width {config.hidden_size}",
        "residual streams": engine.num_streams,
        "experts": None if experts is None else f"{experts} per layer, {per_token} per token",
        "vocabulary": config.vocab_size,
        "context": f"{engine.max_context} tokens, {engine.max_requests} requests at once",
        "hooks": ", ".join(engine.schema),
        "dictionaries": ", ".join(engine.saes.registry) or None,
        "named vectors": ", ".join(sorted(engine.modules)) or None,
    }
    return notebook.facts(engine.name or "Engine", facts)
