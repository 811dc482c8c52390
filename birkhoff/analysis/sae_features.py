"""Describes SAE features by texts: top contexts, density, and promoted and suppressed tokens.

Texts run through the model one at a time; for every feature the strongest positions are kept with the text around them,
the peak in brackets. `promotes` and `suppresses` are the tokens whose logits rise and fall most when the feature's
decoder row alone passes through the final norm and the head (streams averaged). That is only an indication, because it
skips the layers in between.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from birkhoff.analysis.sae_rows import captured_hook, view_rows
from birkhoff.errors import OptionError, SaeError
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.features import FeatureBook, FeatureEntry, Peak, suggested_label

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

CONTEXT_TOKENS = (12, 4)  # tokens shown before and after a peak
FILE = "features.json"


def collect_features(
    engine: Engine, sae: Sae, texts: Sequence[Sequence[int]], skip: int = 1, contexts: int = 8
) -> FeatureBook:
    """Run texts (token ids) and record feature activations, without the first `skip` tokens of each."""
    if sae.hook is None or sae.layer is None:
        raise SaeError(
            "this dictionary does not say where its rows come from. Load it with hook= and layer=."
        )
    hook = captured_hook(sae.hook, sae.view)
    book = FeatureBook(sae, contexts)
    rows_per_token = (engine.num_streams or 1) if sae.view == "per_stream" else 1
    for ids in texts:
        rows = engine.trace(ids, [hook])[hook, sae.layer][skip:]
        book.add(
            view_rows(rows, sae.view) if len(rows) else torch.zeros(1, sae.d_model), skip, rows_per_token
        )
    return book


def explain(
    engine: Engine,
    sae: Sae,
    texts: Sequence[Sequence[int]],
    features: Sequence[int] | None = None,
    skip: int = 1,
    contexts: int = 8,
    tokens: int = 8,
) -> dict[int, FeatureEntry]:
    """Return a `FeatureEntry` for each of `features`, or for all features that fired."""
    book = collect_features(engine, sae, texts, skip, contexts)
    selected = (
        book.largest.gt(0).nonzero().squeeze(1).tolist()
        if features is None
        else [sae.feature(f) for f in features]
    )
    promoted, suppressed = promoted_tokens(engine, sae, tokens)
    entries = {}
    for feature in selected:
        peaks = book.peaks(feature)
        peak_tokens = [engine.tokenizer.decode([texts[peak.text][peak.position]]) for peak in peaks]
        next_tokens = [
            engine.tokenizer.decode(list(texts[peak.text][peak.position + 1 : peak.position + 2]))
            for peak in peaks
        ]
        label = sae.labels.get(feature) or (
            suggested_label(peak_tokens, next_tokens) if peaks else "never fires here"
        )
        entries[feature] = FeatureEntry(
            feature,
            label,
            float(book.density[feature]),
            float(book.largest[feature]),
            [_context(engine, texts[peak.text], peak) for peak in peaks],
            [engine.tokenizer.decode([token]) for token in promoted[feature].tolist()],
            [engine.tokenizer.decode([token]) for token in suppressed[feature].tolist()],
        )
    return entries


def promoted_tokens(engine: Engine, sae: Sae, tokens: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [F, tokens] whose logits each decoder row raises most, and those it lowers most."""
    if not 1 <= tokens <= engine.config.vocab_size:
        raise OptionError(f"tokens is {tokens}, expected 1 to {engine.config.vocab_size}.")
    model, rows = engine.model, sae.decoder
    if sae.view == "flat":
        rows = rows.view(len(rows), engine.num_streams or 1, -1).mean(1)
    with torch.no_grad():
        directions = model.norm(rows.to(model.device, model.dtype))
        logits = model.logits(directions).float().cpu()
    return logits.topk(tokens, dim=1).indices, (-logits).topk(tokens, dim=1).indices


def _context(engine: Engine, ids: Sequence[int], peak: Peak) -> dict[str, object]:
    """Text around a peak, with the peak token in brackets."""
    before, after = CONTEXT_TOKENS
    start = max(0, peak.position - before)
    stop = peak.position + 1 + after
    parts = (
        ids[start : peak.position],
        ids[peak.position : peak.position + 1],
        ids[peak.position + 1 : stop],
    )
    left, middle, right = (engine.tokenizer.decode(list(part)) for part in parts)
    return {"text": f"{left}[{middle}]{right}", "value": round(peak.value, 3)}


def save_features(entries: dict[int, FeatureEntry], directory: Path) -> Path:
    """Write `features.json` to the SAE's directory and return its path."""
    path = directory / FILE
    content = {str(feature): entry.to_json() for feature, entry in sorted(entries.items())}
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return path
