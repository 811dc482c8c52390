"""Compute a steering vector from two small sets of sentences, save it, and generate with it.

    python examples/contrast_vector.py --out dark.safetensors

Two sets of short texts run through the model; the vector is the difference of their mean activations. The table shows
how well each layer and each residual stream separates the sets on held-out sentences. The best layer's vector is saved
with its metadata, loaded, and added while the model completes a prompt.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

import birkhoff
from birkhoff import Add
from birkhoff.analysis.contrast import contrast_rows
from birkhoff.analysis.vector_search import scaled_vector
from birkhoff.cli.vector_report import separation_table

HOOK = "mhc_streams_pre_attn"
DARK = [
    "The old house stood dark and silent, and something moved behind the door.",
    "A cold wind howled in the graveyard.",
    "She heard slow footsteps in the empty hall, and her heart began to pound.",
    "The shadow had no face.",
    "Nobody who went into the black forest at night had ever come back.",
    "A pale hand reached out of the water.",
    "The candle went out, and in the dark someone whispered his name.",
    "Blood dripped from the ceiling.",
]
BRIGHT = [
    "The little house stood in the sun, and a puppy played by the door.",
    "A warm breeze blew over the garden.",
    "She heard happy voices in the kitchen, and she ran in with a smile.",
    "The kitten had soft white paws.",
    "Everybody who came to the party in the park got a big balloon.",
    "A friendly duck swam in the pond.",
    "The birthday cake had six candles, and his friends sang his name.",
    "Honey dripped from the spoon.",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", nargs="?", default="One evening Anna walked home. She saw")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--out", type=Path, default=Path("dark.safetensors"))
    parser.add_argument("--strength", type=float, default=0.4, help="norm in units of the mean row norm")
    options = parser.parse_args()
    with birkhoff.load(options.model) as engine:
        rows = contrast_rows(engine, DARK, BRIGHT, HOOK)
        separations = rows.separation()
        Console(highlight=False, width=100).print(separation_table(separations))
        best = max(
            (entry for entry in separations if entry.stream is None and entry.layer),
            key=lambda entry: entry.d_prime,
        )
        vector = scaled_vector(
            engine, rows, best.layer, None, options.strength, note="dark rather than bright"
        )
        engine.modules["dark"] = vector.save(options.out)
        print(f"best separation at layer {best.layer}: d' {best.d_prime:.2f}; written to {options.out}")
        for name, steer in (("plain", None), ("dark", [Add("dark")]), ("bright", [Add("dark", scale=-1.0)])):
            output = engine.generate(
                options.prompt, max_tokens=40, temperature=0.7, top_k=40, seed=3, steer=steer
            )
            print(
                f"{name:>6}: {output.text.strip()!r}  ({output.interp.get('rows_steered', 0)} tokens steered)"
            )


if __name__ == "__main__":
    main()
