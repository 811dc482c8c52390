"""How many launches a chunk of a prompt takes per layer with released numerics, counted in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from tests.interpreter import DEVICE, packed_model
from tests.launches import counted
from tests.model.test_prefill import with_kernels
from tests.models import random_tokens, variant
from tests.sizes import FULL

from birkhoff.kernels.mhc import prefill as mhc  # isort: skip
from birkhoff.kernels.quant import device

SIZES = {
    "hidden_size": 128,
    "q_lora_rank": 128,
    "head_dim": 128,
    "qk_rope_head_dim": 16,
    "o_lora_rank": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 2,
    "index_topk": 3,
    "n_routed_experts": 2,
    "num_hash_layers": 0,
    "num_nextn_predict_layers": 0,
}
# Per layer. A GPU launches one more for the grouped output projection, whose weight it dequantises first.
ALWAYS = {
    "_mix": 2,
    "_coefficients_and_collapse": 2,
    "_write": 2,
    "_rms_norm": 1,  # of the query latent, with its codes
    "_norm_rotate": 2,  # queries, keys
    "_list_keys": 1,
    "_attend": 1,
    "_store": 1,
    "_quantise": 1,  # input of the last projection
    "_topk_experts": 1,
    "_count_pairs": 1,
    "_sort_pairs": 1,
    "_gate_up_fp8": 1,
    "_down_fp8": 1,
    "_sum_pairs": 1,
    "_swiglu_codes": 1,
}
BY_RATIO = {
    0: {"_fp8_product": 5, "_packed_linear": 2},
    4: {
        "_fp8_product": 6,
        "_packed_linear": 3,
        "_compress": 1,
        "_rotate_in_place": 1,
        "_hadamard_fp4": 1,
        "_score": 1,
        "_topk_entries": 1,
    },
    128: {"_fp8_product": 5, "_packed_linear": 3, "_compress": 1},
}
# What a GPU's own expert kernels do without: they round the middle of the experts themselves.
TWINS = {"_quantise": 1}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts calls of the interpreter")
@pytest.mark.parametrize("ratio", BY_RATIO if FULL else [4])
def test_a_chunk_takes_a_fixed_number_of_launches_per_layer(ratio, monkeypatch):
    monkeypatch.setattr(mhc, "MIN_ROWS", 16)
    monkeypatch.setattr(device, "MIN_ROWS", 16)
    config = variant(**SIZES, compress_ratios=(ratio,))
    model = with_kernels(packed_model(config, dtype=torch.float16), "triton", released=True)
    n = 16
    tokens = random_tokens(config, n)
    state = State.contiguous(config, 1, n, device=DEVICE, dtype=torch.float16)
    phases = model.rope.step(torch.arange(n))
    block = model.blocks()[0]
    with torch.no_grad():
        model.fuse()
        streams = model.embedding(tokens).unsqueeze(1).expand(-1, 4, -1).contiguous()
        batch = Batch.of([SequenceChunk(0, 0, tokens)], DEVICE)
        block(streams, batch, phases, state.at(0), NoTap())  # what is computed once per weight and per batch
        with counted(monkeypatch) as counts:
            block(streams, batch, phases, state.at(0), NoTap())
    kernels = {name: count for name, count in counts.items() if name.startswith("_")}
    expected = ALWAYS | BY_RATIO[ratio]
    for name, count in TWINS.items():
        expected[name] += count
    operations = {name: count for name, count in counts.items() if not name.startswith("_")}
    assert kernels == expected
    assert not operations
