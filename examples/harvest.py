"""Store activations of a few texts in files and read them back: by text, and as batches of rows.

    python examples/harvest.py --out captures/example

A second run computes nothing again; an interrupted run resumes and gives the same files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import birkhoff
from birkhoff import Capture
from birkhoff.analysis.harvest import harvest
from birkhoff.capture.store.reader import iter_rows, read_sharded

TEXTS = [
    "The cat sat on the wall and looked at the moon.",
    "A river ran through the town, and nobody knew where it came from.",
    "She opened the box. It was empty, but for a key.",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano")
    parser.add_argument("--out", type=Path, default=Path("captures/example"))
    options = parser.parse_args()
    spec = Capture({"mhc_streams_pre_attn": "all", "mhc_ffn_res_mix": [-1]}, positions="all_prompt")
    with birkhoff.load(options.model, batch_invariant=True) as engine:
        report = harvest(engine, TEXTS, spec, options.out)
        layers = engine.config.num_hidden_layers
    print(
        f"{report.texts} texts, {report.rows} rows, {report.bytes} bytes in {report.out}; new: {report.new_texts}"
    )

    # text -> (hook, layer) -> rows with positions and token ids
    by_text = read_sharded(options.out / "harvest")
    for name, entries in sorted(by_text.items()):
        rows = entries["mhc_streams_pre_attn", layers - 1]
        print(f"text {int(name)}: {len(rows)} tokens, streams {rows.array.shape[1:]} each")

    for layer in range(layers):
        # input of SAE training: rows of all texts, shuffled, in batches
        batches = iter_rows(
            options.out / "harvest", "mhc_streams_pre_attn", layer, 64, shuffle=True, dtype="float32"
        )
        norms = np.concatenate([np.linalg.norm(batch.array, axis=-1) for batch in batches])  # [rows, streams]
        print(f"layer {layer}: mean norm of each stream", norms.mean(0).round(2).tolist())


if __name__ == "__main__":
    main()
