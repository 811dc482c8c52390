"""DeepSeek-V4 in vLLM's own class for CPUs, against our engine on the same files: tokens, and every hook at layer 0.

vLLM caches V4's entries in FP8 and ours are bfloat16 here, so deeper layers differ; edits are compared with a plain
twin in the same batch. It needs a CPU with AVX512-BF16, for which vLLM has the native operations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import birkhoff
from birkhoff import Add, Capture
from birkhoff.config import V4Config
from birkhoff.convert.synth import RandomRows
from birkhoff.text.byte_tokenizer import byte_tokenizer_json
from birkhoff.vllm.armed_sites import V4_HOOKS
from birkhoff.weights.released import write_released
from tests.vllm.models import prompts_of
from tests.vllm.v4_metadata import install

D, STREAMS = 256, 4
RATIOS = (0, 0, 4, 128)


def has_native_operations():
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "avx512_bf16" in flags


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not has_native_operations(), reason="needs a CPU with AVX512-BF16"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v4")
    config = V4Config(
        vocab_size=512,
        hidden_size=D,
        num_hidden_layers=len(RATIOS),
        num_attention_heads=8,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=128,
        sliding_window=128,
        compress_ratios=RATIOS,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=512,
        n_routed_experts=256,
        num_experts_per_tok=6,
        moe_intermediate_size=64,
        num_hash_layers=1,
        max_position_embeddings=4096,
        num_nextn_predict_layers=0,
        bos_token_id=0,
        eos_token_id=1,
    )
    write_released(folder, config, RandomRows(config, 0, "bf16", "bf16"), dense="bf16", experts="bf16")
    (folder / "tokenizer.json").write_text(byte_tokenizer_json(config.vocab_size))
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | {"hidden_act": "silu", "topk_method": "noaux_tc"}
    file.write_text(json.dumps(raw))
    return folder


def test_v4_equals_our_engine(folder, monkeypatch):
    install(monkeypatch)
    vector = torch.randn(D, generator=torch.Generator().manual_seed(3))
    edit = [Add(vector, "mhc_streams_pre_attn", [2], scale=2.0, streams=[1])]
    (prompt,) = prompts_of(150, seed=3)
    every = Capture(dict.fromkeys(V4_HOOKS, "all"), "all")
    settings = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    options = {"max_requests": 4, "max_batch_tokens": 1024, "max_context": 512, "cache_bytes": 256 << 20}
    with birkhoff.load(
        folder, backend="vllm", dtype="bfloat16", vllm={"enforce_eager": True, "seed": 0}, **options
    ) as engine:
        plain, steered = engine.generate([prompt, prompt], steer=[None, edit], capture=every, **settings)
    with birkhoff.load(folder, dtype="bfloat16", kernels="reference", weights="dense", device="cpu") as ours:
        text = [*prompt, *plain.token_ids]
        trace = ours.trace(text[:-1], V4_HOOKS)
        agree = trace.logits[len(prompt) - 1 :].argmax(-1).tolist()
    assert sum(a == b for a, b in zip(agree, plain.token_ids)) >= 5
    for hook in ("mhc_streams_pre_attn", "mhc_attn_res_mix", "mhc_attn_post_mix", "pre_attn"):
        rows, wanted = plain.acts[hook, 0].tensor.float(), trace[hook, 0].float()
        error = float((rows.view(wanted.shape) - wanted).norm() / wanted.norm())
        assert error < 1e-2, (hook, error)
    prompt_rows = len(prompt)
    before = plain.acts["mhc_streams_pre_attn", 1].tensor[:prompt_rows]
    assert torch.equal(before, steered.acts["mhc_streams_pre_attn", 1].tensor[:prompt_rows])
    mixes = [output.acts["mhc_attn_post_mix", 2].tensor[:prompt_rows] for output in (plain, steered)]
    assert not torch.equal(*mixes), "the sublayer reads the edited streams"
    assert steered.interp["rows_steered"] == len(text) - 1 and steered.interp["paths"] == ["both"]
    assert set(plain.acts) == {
        (hook, layer)
        for hook in V4_HOOKS
        for layer in ([3] if hook in ("mhc_streams_final", "final_hidden") else range(4))
    }
