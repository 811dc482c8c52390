"""Write the shipped SAE directory: SAELens files with two bytes per value, labels, and feature descriptions.

A feature is described (contexts in text nano wrote, density, promoted tokens) if it fired in at least five texts and
not nearly everywhere: features that peak on one token first, then rarer ones. Labels are unique, so repeats are
numbered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from birkhoff.sae.compact import compact
from birkhoff.sae.dictionary import Sae

DESCRIBED = 500
LEAST_CONTEXTS = 5
DENSITIES = (2e-4, 0.15)


def ship(
    sae: Sae, entries: Mapping[str, Any], names: Mapping[int, str], metadata: dict[str, Any], out: Path
) -> int:
    """Write `out`; return the size of its files in bytes. `names` are given labels and take precedence."""
    chosen = described(entries) | {feature: entries[str(feature)] for feature in names}
    labels = numbered(
        {feature: names.get(feature) or entry["label"] for feature, entry in sorted(chosen.items())}
    )
    Sae(
        sae.encoder,
        sae.encoder_bias,
        sae.decoder,
        sae.decoder_bias,
        activation="jumprelu",
        threshold=sae.activation.threshold,
        hook=sae.hook,
        layer=sae.layer,
        view=sae.view,
        x_max=sae.x_max,
        labels=labels,
        metadata=metadata,
    ).save(out)
    compact(out)
    lines = [f"{json.dumps(str(feature))}: {_line(chosen[feature], labels[feature])}" for feature in labels]
    (out / "features.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return sum(path.stat().st_size for path in out.iterdir())


def described(entries: Mapping[str, Any]) -> dict[int, Any]:
    """Return the features to describe, at most `DESCRIBED`."""
    low, high = DENSITIES
    good = {
        int(feature): entry
        for feature, entry in entries.items()
        if len(entry["contexts"]) >= LEAST_CONTEXTS and low < entry["density"] < high
    }
    pure = sorted(
        good,
        key=lambda feature: (
            not good[feature]["label"].startswith(('"', "before ")),
            good[feature]["density"],
            feature,
        ),
    )
    return {feature: good[feature] for feature in pure[:DESCRIBED]}


def numbered(labels: Mapping[int, str]) -> dict[int, str]:
    """Make labels unique by numbering repeats."""
    repeated: dict[str, list[int]] = {}
    for feature, label in labels.items():
        repeated.setdefault(label, []).append(feature)
    return {
        feature: label if len(repeated[label]) == 1 else f"{label} ({repeated[label].index(feature) + 1})"
        for feature, label in labels.items()
    }


def _line(entry: Mapping[str, Any], label: str) -> str:
    shown = {
        **entry,
        "label": label,
        "promotes": entry["promotes"][:8],
        "suppresses": entry["suppresses"][:5],
    }
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
