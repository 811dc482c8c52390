"""Gemma 2 with a Gemma Scope dictionary: features of a text, the loss with its reconstruction, a clamped feature.

    python examples/gemma_scope.py --model google/gemma-2-2b \\
        --sae gemma-scope-2b-pt-res-canonical/layer_20/width_16k/canonical
    python examples/gemma_scope.py --out random     # a small random Gemma 2, and a dictionary trained on it

Download the first with `birkhoff pull NAME`; both arguments may be paths. Prints one JSON object. The random model and
its dictionary (in Gemma Scope's layout) are left in the folder of --out. Any other model and dictionary work too."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import birkhoff
from birkhoff import Sae, SaeReconstruct, SaeSet
from birkhoff.analysis.sae_quality import loss_recovered, row_quality
from birkhoff.analysis.sae_rows import LiveRows, begin_token, text_ids
from birkhoff.analysis.sae_train import train_sae
from birkhoff.sae.train import TrainOptions

TEXT = "The Golden Gate Bridge is a suspension bridge in San Francisco. It was opened in 1937."
RANDOM_SAE = "gemma-scope-random-res/layer_2/width_256/average_l0_16"


def random_gemma(folder: Path) -> None:
    """Write a Gemma 2 of random weights."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16}
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, max_position_embeddings=512, sliding_window=64))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0.0, 0.3 if weight.dim() > 1 else 0.1)
    model.save_pretrained(folder)


def sampled(engine: birkhoff.Engine, count: int, length: int) -> list[list[int]]:
    """Texts for a model without a tokenizer: what it says itself."""
    starts = [[7 + start] for start in range(count)]
    outputs = engine.generate(starts, max_tokens=length, seed=1, ignore_eos=True)
    return [[*start, *output.token_ids] for start, output in zip(starts, outputs)]


def train_scope(engine: birkhoff.Engine, folder: Path) -> None:
    """Train a dictionary on the model's residual and write it in Gemma Scope's layout."""
    source = LiveRows(engine, sampled(engine, 32, 48), "post_mlp", 2, batch_rows=256, pool_batches=2)
    sae = train_sae(source, TrainOptions(features=256, k=16, steps=200, rate=3e-3)).sae
    arrays = {
        "W_enc": sae.encoder.T,
        "W_dec": sae.decoder,
        "b_enc": sae.encoder_bias,
        "b_dec": sae.decoder_bias,
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / "params.npz",
        threshold=sae.activation.tensors()["threshold"].numpy(),
        **{name: tensor.contiguous().numpy() for name, tensor in arrays.items()},
    )


def report(
    engine: birkhoff.Engine, sae: Sae, texts: list[list[int]], feature: int | None, times: float
) -> dict[str, Any]:
    """Quality, losses, features of the first text, and what setting a feature to `times` its maximum there does."""
    begin = begin_token(engine)
    quality, _ = row_quality(engine, sae, texts)
    loss = loss_recovered(engine, sae, texts, [] if begin is None else [begin])
    with engine.attach("scope", sae, kind="full"), engine.attach("clamp", sae):
        found = engine.features(texts[0], "scope", k=8)
        strongest = max((hit for hits in found[1:] for hit in hits), key=lambda hit: hit.activation)
        chosen = strongest.feature if feature is None else feature
        largest = max((h.activation for hits in found for h in hits if h.feature == chosen), default=1.0)
        clamp = SaeSet("clamp", {chosen: times * largest})
        before, after = (engine.logits(texts[0], steer).log_softmax(-1) for steer in (None, [clamp]))
        runs = {"plain": None, "reconstructed": [SaeReconstruct("scope", error="drop")], "clamped": [clamp]}
        greedy = {
            name: engine.generate(texts[0], steer=s, max_tokens=24, temperature=0) for name, s in runs.items()
        }
    return {
        "site": [sae.hook, sae.layer],
        "texts": texts,
        "quality": quality.to_json(),
        "loss": loss.to_json(),
        "features": [[hit.to_json() for hit in hits] for hits in found],
        "clamp": {
            "feature": chosen,
            "value": times * largest,
            "kl": (before.exp() * (before - after)).sum(-1).mean().item(),
            "top_before": before[-1].topk(5).indices.tolist(),
            "top_after": after[-1].topk(5).indices.tolist(),
        },
        "generated": {name: {"text": o.text, "token_ids": o.token_ids} for name, o in greedy.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="Gemma 2: a path or a name in the hub cache; random if left out")
    parser.add_argument("--sae", help="its dictionary: a path or a published name")
    parser.add_argument("--text", action="append", help="a text to measure on; repeatable")
    parser.add_argument(
        "--feature", type=int, help="the feature to set; default: the strongest of the first text"
    )
    parser.add_argument(
        "--times", type=float, default=4.0, help="set it to this many times its maximum there"
    )
    parser.add_argument("--out", type=Path, default=Path("random-gemma"), help="folder of the random model")
    args = parser.parse_args()
    if args.model is None and not (args.out / "model/config.json").exists():
        random_gemma(args.out / "model")
    with birkhoff.load(
        args.model or args.out / "model", max_requests=8, dtype="float32", max_context=512
    ) as engine:
        if args.model is None and not (args.out / RANDOM_SAE / "params.npz").exists():
            train_scope(engine, args.out / RANDOM_SAE)
        sae = Sae.load(args.sae or args.out / RANDOM_SAE)
        texts = (
            [text_ids(engine, sae, text) for text in args.text or [TEXT]]
            if args.model
            else sampled(engine, 3, 40)
        )
        print(json.dumps(report(engine, sae, texts, args.feature, args.times)))


if __name__ == "__main__":
    main()
