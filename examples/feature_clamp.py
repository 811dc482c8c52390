"""A dictionary of features from nothing: train it on a model's own text, name a feature, and turn it up.

    python examples/feature_clamp.py --steps 150 --out features

The model writes some texts; a sparse autoencoder learns the rows of one site from them; the features that fire are
explained by where they fire most. One of them is then held at a multiple of its largest activation while the model
writes, with everything else of each row left as it was.
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
    parser.add_argument("--strength", type=float, default=3.0, help="in largest activations")
    parser.add_argument("--out", type=Path, default=Path("features"))
    options = parser.parse_args()
    with birkhoff.load(options.model) as engine:
        outputs = [
            engine.generate(STARTS, max_tokens=48, seed=seed)
            for seed in range(max(1, options.texts // len(STARTS)))
        ]
        texts = [output.prompt_token_ids + output.token_ids for group in outputs for output in group]
        source = LiveRows(engine, texts, options.hook, options.layer, batch_rows=512, pool_batches=2)
        done = train_sae(source, TrainOptions(512, k=16, steps=options.steps, rate=5e-3), options.out)
        print(
            f"{done.rows} rows: {done.quality.explained_variance:.0%} explained, {done.quality.l0:.0f} features a row"
        )

        entries = explain(engine, done.sae, texts, contexts=4, tokens=5)
        print(f"{len(entries)} features in {save_features(entries, options.out)}")
        rare = sorted(
            entries.values(), key=lambda entry: (entry.density > 0.05, -len(entry.contexts), -entry.largest)
        )
        for entry in rare[:5]:
            print(f"  {entry.feature:4d} {entry.density:6.2%} {entry.label!r}: {entry.contexts[0]['text']!r}")
        chosen = rare[0].feature
        with engine.attach("mine", done.sae, features=[chosen]):
            clamp = [SaeSet("mine", {chosen: {"x_max": options.strength}})]
            for name, steer in (("plain", None), (f"feature {chosen} up", clamp)):
                output = engine.generate(
                    "Once upon a time", max_tokens=30, seed=5, temperature=0.7, steer=steer
                )
                print(f"{name}: {output.text.strip()!r}")


if __name__ == "__main__":
    main()
