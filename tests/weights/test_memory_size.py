"""Peak memory of loading, measured in a separate process."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from birkhoff.config import V4Config
from birkhoff.convert.presets import preset
from birkhoff.convert.synth import RandomRows, synth
from birkhoff.weights import write_released
from tests.sizes import scaled

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs /proc to measure memory"
)

MEASURE = """
import json, sys
import torch
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer
from birkhoff.weights import load_into, open_checkpoint

def resident(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def load(path, packed, dtype):
    checkpoint = open_checkpoint(path)
    model = Transformer(checkpoint.config, Numerics(getattr(torch, dtype)), packed=packed)
    report = load_into(model.destinations(), checkpoint)
    return model, report

warm, path, packed, dtype = sys.argv[1], sys.argv[2], sys.argv[3] == "packed", sys.argv[4]
load(warm, packed, dtype)   # libraries, thread pools and allocator arenas are part of the baseline
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")         # reset the peak
before = resident("VmRSS:")
model, report = load(path, packed, dtype)
weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
print(json.dumps({"peak": resident("VmHWM:") - before, "weights": weights, "files": report.file_bytes}))
"""


def config_of(megabytes: int, bytes_per_expert_number: float) -> V4Config:
    """Return a config of about that many stored megabytes: wide tables and matrices, as many experts as needed."""
    base = replace(
        preset("tiny"),
        vocab_size=8192,
        hidden_size=1024,
        num_attention_heads=16,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=512,
        o_groups=4,
        o_lora_rank=256,
        index_n_heads=16,
        index_head_dim=64,
        moe_intermediate_size=1024,
        num_hidden_layers=3,
        compress_ratios=(0, 4, 128),
        num_hash_layers=1,
        num_nextn_predict_layers=0,
    )
    rest = 60e6
    experts = int((megabytes * 1e6 - rest) / (3 * 3 * 1024 * 1024 * bytes_per_expert_number))
    return replace(base, n_routed_experts=max(experts, 4))


@pytest.mark.parametrize(
    ("dense", "experts", "packed", "dtype", "megabytes"),
    [
        ("bf16", "bf16", "plain", "bfloat16", scaled(1000, 150)),  # values to values
        ("fp8", "fp4", "packed", "bfloat16", scaled(1000, 150)),  # codes to codes
        (
            "fp8",
            "fp4",
            "plain",
            "float32",
            scaled(300, 100),
        ),  # codes to values: the files are an eighth of the weights
    ],
)
def test_loading_holds_at_most_115_percent_of_the_weights(dense, experts, packed, dtype, megabytes, tmp_path):
    synth(tmp_path / "warm", "tiny", dense=dense, experts=experts)
    config = config_of(megabytes, 2 if experts == "bf16" else 17 / 32)
    path = tmp_path / "c"
    write_released(path, config, RandomRows(config, 0, dense, experts), dense, experts)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "warm"), str(path), packed, dtype]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    measured = json.loads(run.stdout)
    ratio = measured["peak"] / measured["weights"]
    print(
        f"{dense}/{experts} {packed} {dtype}: files {measured['files'] / 1e6:.0f} MB, weights "
        f"{measured['weights'] / 1e6:.0f} MB, peak {measured['peak'] / 1e6:.0f} MB, ratio {ratio:.3f}"
    )
    assert 0.9 < ratio <= 1.15
