"""Features of a dictionary explained by texts: top contexts, density, and the tokens each one speaks for.

Texts run through the model one by one; of every feature the strongest places are kept with the words around them, the
peak in brackets. `promotes` and `suppresses` are the tokens whose logits rise and fall most when the feature's decoder
row alone goes through the final norm and the head (streams averaged): a first hint, as layers in between are left out.
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

AROUND = (12, 4)  # tokens shown before and after a peak
FILE = "features.json"


def read_features(
    engine: Engine, sae: Sae, texts: Sequence[Sequence[int]], skip: int = 1, contexts: int = 8
) -> FeatureBook:
    """Go through texts (token ids), leaving out the first `skip` tokens of each."""
    if sae.hook is None or sae.layer is None:
        raise SaeError(
            "this dictionary does not say where its rows come from. Load it with hook= and layer=."
        )
    hook = captured_hook(sae.hook, sae.view)
    book = FeatureBook(sae, contexts)
    each = engine.config.hc_mult if sae.view == "per_stream" else 1
    for ids in texts:
        rows = engine.trace(ids, [hook])[hook, sae.layer][skip:]
        book.add(view_rows(rows, sae.view) if len(rows) else torch.zeros(1, sae.d_model), skip, each)
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
    """An entry for each of `features`, or for all that fired."""
    book = read_features(engine, sae, texts, skip, contexts)
    chosen = (
        book.largest.gt(0).nonzero().squeeze(1).tolist()
        if features is None
        else [sae.feature(f) for f in features]
    )
    up, down = speaks_for(engine, sae, tokens)
    found = {}
    for feature in chosen:
        peaks = book.peaks(feature)
        at = [engine.tokenizer.decode([texts[peak.text][peak.position]]) for peak in peaks]
        after = [
            engine.tokenizer.decode(list(texts[peak.text][peak.position + 1 : peak.position + 2]))
            for peak in peaks
        ]
        label = sae.labels.get(feature) or (suggested_label(at, after) if peaks else "never fires here")
        found[feature] = FeatureEntry(
            feature,
            label,
            float(book.density[feature]),
            float(book.largest[feature]),
            [_context(engine, texts[peak.text], peak) for peak in peaks],
            [engine.tokenizer.decode([token]) for token in up[feature].tolist()],
            [engine.tokenizer.decode([token]) for token in down[feature].tolist()],
        )
    return found


def speaks_for(engine: Engine, sae: Sae, tokens: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [F, tokens] whose logits each decoder row raises, and lowers, most."""
    if not 1 <= tokens <= engine.config.vocab_size:
        raise OptionError(f"tokens is {tokens}, expected 1 to {engine.config.vocab_size}.")
    model, rows = engine.model, sae.decoder
    if sae.view == "flat":
        rows = rows.view(len(rows), engine.config.hc_mult, -1).mean(1)
    with torch.no_grad():
        directions = model.norm(rows.to(model.embed.device, model.numerics.dtype))
        logits = model.logits(directions).float().cpu()
    return logits.topk(tokens, dim=1).indices, (-logits).topk(tokens, dim=1).indices


def _context(engine: Engine, ids: Sequence[int], peak: Peak) -> dict[str, object]:
    before, after = AROUND
    start = max(0, peak.position - before)
    stop = peak.position + 1 + after
    parts = (
        ids[start : peak.position],
        ids[peak.position : peak.position + 1],
        ids[peak.position + 1 : stop],
    )
    left, middle, right = (engine.tokenizer.decode(list(part)) for part in parts)
    return {"text": f"{left}[{middle}]{right}", "value": round(peak.value, 3)}


def save_features(found: dict[int, FeatureEntry], directory: Path) -> Path:
    """`features.json` beside the dictionary."""
    path = directory / FILE
    said = {str(feature): entry.to_json() for feature, entry in sorted(found.items())}
    path.write_text(json.dumps(said, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return path
