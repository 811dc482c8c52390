"""Measure and plot nano's four streams: the figures and values of docs/streams.md.

    python -m training.streams TEXTS OUT [--vector FILE]      TEXTS: one story per line; OUT: folder of figures

Uses public calls on forward passes over the texts: norms and similarity of the streams by layer, mixing matrices by
kind of token, read and write weights, the lens per stream, and the effect of a vector added to one stream or to all.
Every value has its spread over texts, to separate signal from noise.
"""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import birkhoff
from birkhoff import Add
from birkhoff.steering.vector_file import SteeringVector

HOOK, FINAL = "mhc_streams_pre_attn", "mhc_streams_final"
WARM, COOL = (190, 70, 20), (20, 90, 170)
KINDS = ("word", "piece", "mark", "break")


def kind_of(token: str) -> str:
    """Classify a token: a new word, a piece inside a word, punctuation, or white space."""
    if not token.strip():
        return "break"
    if all(letter in string.punctuation for letter in token.strip()):
        return "mark"
    return "word" if token[0] in " \n" or token[0].isupper() else "piece"


class Sums:
    """Running mean and deviation over texts of named tensors."""

    def __init__(self) -> None:
        self._held: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, value: torch.Tensor) -> None:
        self._held.setdefault(name, []).append(value.double())

    def mean(self, name: str) -> torch.Tensor:
        return torch.stack(self._held[name]).mean(0)

    def spread(self, name: str) -> torch.Tensor:
        return torch.stack(self._held[name]).std(0, unbiased=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)


def study(engine: birkhoff.Engine, texts: list[list[int]], skip: int = 8) -> Sums:
    """Run every measurement but the wake, text by text; the first `skip` tokens of each are skipped."""
    sums = Sums()
    layers = engine.config.num_hidden_layers
    streams = engine.config.hc_mult
    for ids in texts:
        trace = engine.trace(ids)
        depths = [trace[HOOK, layer] for layer in range(layers)] + [trace[FINAL, layers - 1]]
        rows = [depth[skip:].float() for depth in depths]
        sums.add("norm", torch.stack([row.norm(dim=-1).mean(0) for row in rows]))  # [depth, stream]
        units = [row / row.norm(dim=-1, keepdim=True) for row in rows]
        sums.add("cosine", torch.stack([torch.einsum("nad,nbd->ab", u, u) / len(u) for u in units]))
        share = [row.mean(1).pow(2).sum() * streams / row.pow(2).sum() for row in rows]
        sums.add("mean share", torch.stack(share))
        kinds = [kind_of(engine.tokenizer.decode([token])) for token in ids[skip:]]
        for name in ("attn", "ffn"):
            mixes = torch.stack([trace[f"mhc_{name}_res_mix", layer][skip:] for layer in range(layers)])
            sums.add(f"{name} mix", mixes.mean(1))  # [layer, from, to]
            for kind in KINDS:
                chosen = torch.tensor([values == kind for values in kinds])
                if chosen.any():
                    sums.add(f"{name} mix {kind}", mixes[:, chosen].mean(1))
            for weight in ("pre", "post"):
                weights = [trace[f"mhc_{name}_{weight}_mix", layer][skip:].mean(0) for layer in range(layers)]
                sums.add(f"{name} {weight}", torch.stack(weights))  # [layer, stream]
        sums.add("head", trace["mhc_head_mix", layers - 1][skip:].mean(0))
        lens = engine.lens(ids)
        after = torch.tensor(ids[skip + 1 :])
        for of in lens.views:
            losses = []
            for depth in range(lens.depths):
                chances = lens.logits(depth, of)[skip:-1].log_softmax(-1)
                losses.append(-chances.gather(1, after.unsqueeze(1)).mean())
            sums.add(f"lens {of}", torch.stack(losses))
    return sums


def wake(engine: birkhoff.Engine, texts: list[list[int]], vector: SteeringVector) -> dict[str, torch.Tensor]:
    """Return how far each stream moves at each depth, relative to its norm.

    The vector is added as it is in all streams, and its block of each stream in that stream alone, scaled to the whole
    norm.
    """
    layers, (layer,) = engine.config.num_hidden_layers, vector.layers
    row = vector.at(layer).tensor().view(engine.config.hc_mult, -1)
    changes = {"all streams": row}
    for stream in range(len(row)):
        alone = torch.zeros_like(row)
        alone[stream] = row[stream] / row[stream].norm() * row.norm()
        changes[f"stream {stream}"] = alone
    sites = [(HOOK, at) for at in range(layers)] + [(FINAL, layers - 1)]
    moved: dict[str, list[torch.Tensor]] = {name: [] for name in changes}
    for ids in texts:
        plain = engine.trace(ids, [HOOK, FINAL])
        for name, change in changes.items():
            steered = engine.trace(ids, [HOOK, FINAL], steer=[Add(change.flatten(), HOOK, [layer])])
            moved[name].append(
                torch.stack(
                    [((steered[s] - plain[s]).norm(dim=-1) / plain[s].norm(dim=-1)).mean(0) for s in sites]
                )
            )
    return {name: torch.stack(values).mean(0) for name, values in moved.items()}


def grid(
    title: str, values: torch.Tensor, rows: list[str], columns: list[str], full: tuple[int, int, int]
) -> str:
    """Return a shaded table [rows, columns] as SVG, with values in the cells."""
    cell = 56
    high = 24
    left = 78
    top = 44
    most = float(values.max()) or 1.0
    width = left + cell * len(columns) + 12
    height = top + high * len(rows) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    ]
    out += [
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="16" font-size="12">{title}</text>',
    ]
    out += [
        f'<text x="{left + n * cell + 4}" y="{top - 8}" font-size="10">{name}</text>'
        for n, name in enumerate(columns)
    ]
    for index, name in enumerate(rows):
        y = top + index * high
        out.append(f'<text x="8" y="{y + 16}" font-size="10">{name}</text>')
        for column in range(len(columns)):
            value = float(values[index, column])
            red, green, blue = (round(255 - (255 - tone) * max(value, 0.0) / most) for tone in full)
            dark = max(value, 0.0) / most > 0.6
            x, ink = left + column * cell, "white" if dark else "black"
            out.append(
                f'<rect x="{x}" y="{y}" width="{cell - 2}" height="{high - 2}" fill="rgb({red},{green},{blue})"/>'
            )
            out.append(f'<text x="{x + 8}" y="{y + 15}" font-size="10" fill="{ink}">{value:.2f}</text>')
    return "\n".join([*out, "</svg>\n"])


def pictures(
    sums: Sums, layers: int, streams: list[str], depths: list[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return figures by name, and the values they show."""
    views = (*range(len(streams)), "mean", "head")
    both = [f"{sublayer} {n}" for sublayer in ("attn", "ffn") for n in range(len(streams))]
    reads, writes = (torch.cat([sums.mean(f"attn {w}"), sums.mean(f"ffn {w}")], 1) for w in ("pre", "post"))
    lens = torch.stack([sums.mean(f"lens {of}") for of in views], 1)
    after = ["embedding", *(f"after {n}" for n in range(layers))]
    draw = {
        "norms": grid("mean norm of each stream, entering", sums.mean("norm"), depths, streams, COOL),
        "reads": grid("read-in weights of each sublayer", reads, depths[:-1], both, WARM),
        "writes": grid("write-out weights of each sublayer", writes, depths[:-1], both, WARM),
        "lens": grid("nats of the next token, read from", lens, after, [*streams, "mean", "head"], COOL),
    }
    numbers = {
        name: {"mean": sums.mean(name).tolist(), "spread": sums.spread(name).tolist()} for name in sums
    }
    return draw, numbers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vector", type=Path)
    parser.add_argument("--most", type=int, default=40)
    options = parser.parse_args()
    lines = [json.loads(line)["messages"] for line in options.texts.read_text().splitlines()][: options.most]
    options.out.mkdir(parents=True, exist_ok=True)
    with birkhoff.load("nano", max_requests=1) as engine:
        texts = [engine.encode_chat(messages) for messages in lines]
        sums = study(engine, texts)
        layers = engine.config.num_hidden_layers
        streams = [f"stream {n}" for n in range(engine.config.hc_mult)]
        depths = [f"layer {n}" for n in range(layers)] + ["head"]
        draw, numbers = pictures(sums, layers, streams, depths)
        if options.vector is not None:
            wakes = wake(engine, texts[:10], SteeringVector.load(options.vector))
            numbers["wake"] = {name: values.tolist() for name, values in wakes.items()}
            for name, values in wakes.items():
                draw[f"wake-{name.replace(' ', '-')}"] = grid(
                    f"moved by a vector in {name}", values, depths, streams, WARM
                )
    for name, picture in draw.items():
        (options.out / f"{name}.svg").write_text(picture, encoding="utf-8")
    (options.out / "numbers.json").write_text(json.dumps(numbers), encoding="utf-8")
    print(f"{len(texts)} texts, {sum(map(len, texts))} tokens: {options.out}")


if __name__ == "__main__":
    main()
