"""Train a sparse autoencoder on generated text, describe its features, and clamp one of them.

    python examples/feature_clamp.py --steps 150 --out features

The model generates texts; an SAE is trained on the rows of one site; active features are described by their top
contexts. One feature is then clamped to a multiple of its largest activation during generation, with the rest of each
row unchanged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import birkhoff
from birkhoff import SaeSet
from birkhoff.analysis.sae_features import explain, save_features
from birkhoff.analysis.sae_rows import LiveRows
from birkhoff.analysis.sae_train import train_sae
from birkhoff.sae.train import TrainOptions

STARTS = [
    "Once upon a time",
    "The dog",
    "In the morning",
    "Mother said",
    "The sea",
    "At school",
    "A red bird",
    "Tom had",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano")
    parser.add_argument("--hook", default="mlp_out")
    parser.add_argument("--layer", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--strength", type=float, default=3.0, help="in units of the largest activation")
    parser.add_argument("--out", type=Path, default=Path("features"))
    options = parser.parse_args()
    with birkhoff.load(options.model) as engine:
        outputs = [
            engine.generate(STARTS, max_tokens=48, seed=seed)
            for seed in range(max(1, options.texts // len(STARTS)))
        ]
        texts = [output.prompt_token_ids + output.token_ids for group in outputs for output in group]
        source = LiveRows(engine, texts, options.hook, options.layer, batch_rows=512, pool_batches=2)
        result = train_sae(source, TrainOptions(512, k=16, steps=options.steps, rate=5e-3), options.out)
        quality = result.quality
        print(
            f"{result.rows} rows: {quality.explained_variance:.0%} explained, {quality.l0:.0f} features a row"
        )

        entries = explain(engine, result.sae, texts, contexts=4, tokens=5)
        print(f"{len(entries)} features in {save_features(entries, options.out)}")
        rare = sorted(
            entries.values(), key=lambda entry: (entry.density > 0.05, -len(entry.contexts), -entry.largest)
        )
        for entry in rare[:5]:
            print(f"  {entry.feature:4d} {entry.density:6.2%} {entry.label!r}: {entry.contexts[0]['text']!r}")
        feature = rare[0].feature
        with engine.attach("mine", result.sae, features=[feature]):
            clamp = [SaeSet("mine", {feature: {"x_max": options.strength}})]
            for name, steer in (("plain", None), (f"feature {feature} up", clamp)):
                output = engine.generate(
                    "Once upon a time", max_tokens=30, seed=5, temperature=0.7, steer=steer
                )
                print(f"{name}: {output.text.strip()!r}")


if __name__ == "__main__":
    main()
