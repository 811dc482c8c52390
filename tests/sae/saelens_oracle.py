"""Runs dictionaries with SAELens itself: `python saelens_oracle.py JOB.json`, with an interpreter that has sae_lens.

The job lists directories and one file of rows; features and reconstructions are written beside each directory's name
as `INDEX.features.npy` and `INDEX.rows.npy` into the folder `out`. This file imports nothing of Birkhoff."""

import json
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from sae_lens import SAE


def main(job_file: str) -> None:
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    rows = torch.from_numpy(np.load(job["rows"]))
    for index, entry in enumerate(job["saes"]):
        sae = SAE.load_from_disk(entry["path"], device="cpu")
        if entry.get("input_scale") is not None:
            sae.fold_activation_norm_scaling_factor(entry["input_scale"])
        x = rows - rows.mean(-1, keepdim=True) if entry.get("centered") else rows
        with torch.no_grad():
            features = sae.encode(x)
            np.save(f"{job['out']}/{index}.features.npy", features.numpy())
            np.save(f"{job['out']}/{index}.rows.npy", sae.decode(features).numpy())


main(sys.argv[1])
