"""What methods of TransformerLens, nnsight and SAELens are here, for the error about a name that an `Engine` lacks."""

from __future__ import annotations

PEER_METHODS = {
    "run_with_cache": "engine.trace(text): a mapping from (hook, layer), with logits",
    "run_with_hooks": "engine.logits(text, steer=[Add(v, 'mlp_out', 3)]); functions go into Call(fn, hook, layers)",
    "run_with_saes": "engine.attach(name, sae) and engine.logits(text, steer=[SaeReconstruct(name)])",
    "run_with_cache_with_saes": "engine.attach(name, sae) and engine.features(text, name)",
    "add_sae": "engine.attach(name, sae)",
    "add_hook": "with engine.steering(Call(fn, hook, layers)):",
    "reset_hooks": "nothing to reset: edits belong to a call, or to a block with engine.steering(...)",
    "hooks": "with engine.steering(Call(fn, hook, layers)):",
    "to_tokens": "engine.prompt_ids(text)",
    "to_str_tokens": "engine.token_texts(engine.prompt_ids(text))",
    "to_single_token": "engine.tokenizer.encode(text)[0]; metrics take the text of a token itself",
    "to_string": "engine.tokenizer.decode(ids)",
    "cfg": "engine.config",
    "W_U": "engine.model.logits(rows), or engine.lens(text)",
    "W_E": "engine.trace(text)['mhc_streams_pre_attn', 0]",
    "invoke": "engine.trace([text, other]), or engine.patch(text, source, hook, layers)",
    "edit": "engine.steering(*edits)",
    "eval": "nothing to switch: an engine does not train",
    "to": "birkhoff.load(name, device=..., dtype=...)",
}
