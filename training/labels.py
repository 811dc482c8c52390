"""Write the shipped SAE directory: SAELens files with two bytes per value, labels, and feature descriptions.

Every feature that fired in text nano wrote is described (label and its score, contexts, examples, density, promoted
tokens). Features that were raised and moved answers to a theme are named after it. Labels are unique, so repeats are
numbered, the best predicted first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from birkhoff.sae.compact import compact
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.feature_index import FeatureIndex
from birkhoff.sae.features import FeatureEntry

SUPPRESSES = 5  # tokens kept of each feature


def ship(
    sae: Sae, entries: Mapping[str, Any], names: Mapping[int, str], metadata: dict[str, Any], out: Path
) -> int:
    """Write `out`; return the size of its files in bytes. `names` are given labels and take precedence."""
    read = {int(number): FeatureEntry.from_json(int(number), entry) for number, entry in entries.items()}
    by_score = sorted(read.values(), key=lambda entry: (-(entry.score or 0.0), entry.feature))
    labels = numbered({entry.feature: names.get(entry.feature) or entry.label for entry in by_score})
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
    described = {
        feature: replace(
            entry,
            label=labels[feature],
            suppresses=entry.suppresses[:SUPPRESSES],
            made="clamp" if feature in names else entry.made,
        )
        for feature, entry in read.items()
    }
    FeatureIndex(described).save(out, compressed=True)
    return sum(path.stat().st_size for path in out.iterdir())


def numbered(labels: Mapping[int, str]) -> dict[int, str]:
    """Make labels unique by numbering repeats."""
    repeated: dict[str, list[int]] = {}
    for feature, label in labels.items():
        repeated.setdefault(label, []).append(feature)
    return {
        feature: label if len(repeated[label]) == 1 else f"{label} ({repeated[label].index(feature) + 1})"
        for feature, label in labels.items()
    }
