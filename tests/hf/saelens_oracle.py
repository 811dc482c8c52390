"""SAELens and TransformerLens on the same weights and tokens: `python saelens_oracle.py JOB.json`.

Needs an interpreter with sae_lens and transformer_lens, and imports nothing of Birkhoff. A job is

    {"kind": "lens", "model": PATH, "name": "gpt2", "centered": false, "tokens": [...], "saes": [PATH, ...], "out": DIR}
        features of every dictionary at its own hook_name, in TransformerLens' model made from the weights
    {"kind": "gemma", "model": PATH, "params": FILE.npz, "layer": L, "texts": [...], "feature": N, "value": X, ...}
        SAELens' JumpReLU dictionary in Transformers' Gemma 2: features, losses and the effect of a clamp
"""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers


def lens(job):
    from sae_lens import SAE
    from transformer_lens import HookedTransformer

    network = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], attn_implementation="eager"
    ).float()
    model = HookedTransformer.from_pretrained(
        job["name"],
        hf_model=network,
        tokenizer=None,
        device="cpu",
        dtype=torch.float32,
        fold_ln=False,
        center_writing_weights=job["centered"],
        center_unembed=False,
        fold_value_biases=False,
    )
    with torch.no_grad():
        _, cache = model.run_with_cache(torch.tensor([job["tokens"]]), prepend_bos=False)
        for index, path in enumerate(job["saes"]):
            sae = SAE.load_from_disk(path, device="cpu")
            rows = cache[sae.cfg.metadata.hook_name]
            np.save(f"{job['out']}/{index}.npy", sae.encode(rows)[0].numpy())


def gemma(job):
    from sae_lens import JumpReLUSAE
    from sae_lens.saes.jumprelu_sae import JumpReLUSAEConfig

    arrays = {
        name.replace("w_", "W_"): torch.from_numpy(value).float()
        for name, value in np.load(job["params"]).items()
    }
    d_in, d_sae = arrays["W_enc"].shape
    sae = JumpReLUSAE(JumpReLUSAEConfig(d_in=d_in, d_sae=d_sae, apply_b_dec_to_input=False))
    sae.load_state_dict(arrays)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], attn_implementation="eager"
    ).float()
    layer = model.model.layers[job["layer"]]

    def run(ids, change):
        def hook(module, args, out):
            old = out[0] if isinstance(out, tuple) else out
            new = change(old)
            return (new, *out[1:]) if isinstance(out, tuple) else new

        handle = layer.register_forward_hook(hook)
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        handle.remove()
        return logits

    def loss(change):
        total, count = 0.0, 0
        for ids in job["texts"]:
            chances = run(ids, lambda x, ids=ids: keep(ids, x, change(x)))[:-1]
            total -= chances.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
            count += len(ids) - 1
        return total / count

    def keep(ids, old, new):
        left = torch.tensor([token in job["exclude"] for token in ids])
        return torch.where(left[None, :, None], old, new)

    def clamped(x):
        features = sae.encode(x)
        changed = features.clone()
        changed[..., job["feature"]] = job["value"]
        return sae.decode(changed) + (x - sae.decode(features))

    seen = []
    before = run(job["texts"][0], lambda x: (seen.append(sae.encode(x)[0]), x)[1])
    after = run(job["texts"][0], clamped)
    np.save(f"{job['out']}/features.npy", seen[0].numpy())
    result = {
        "plain": loss(lambda x: x),
        "spliced": loss(lambda x: sae.decode(sae.encode(x))),
        "kl": (before.exp() * (before - after)).sum(-1).mean().item(),
    }
    with open(f"{job['out']}/result.json", "w", encoding="utf-8") as file:
        json.dump(result, file)


with open(sys.argv[1], encoding="utf-8") as job_file:
    read = json.load(job_file)
{"lens": lens, "gemma": gemma}[read["kind"]](read)
