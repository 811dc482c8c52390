"""The model's destinations are exactly the tensors of a released checkpoint: names, counts and shapes (spec 10)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from birkhoff.config import RopeScaling, V4Config
from birkhoff.model.transformer import Transformer
from tests.models import TINY

FLASH = V4Config(rope_scaling=RopeScaling(16.0, 65536))


@pytest.fixture(scope="module")
def flash():
    """Every tensor of V4-Flash as the release stores it, on the meta device."""
    with torch.device("meta"):
        model = Transformer(FLASH, packed=True)
    return {d.name: d.tensor for d in model.destinations()}


def test_flash_has_the_released_number_of_tensors(flash):
    per_layer = Counter(name.split(".")[1] for name in flash if name.startswith("layers."))
    for layer, ratio in enumerate(FLASH.compress_ratios):
        assert per_layer[str(layer)] == {0: 1565, 4: 1576, 128: 1569}[ratio]
    assert sum(name.startswith("mtp.0.") for name in flash) == 1575
    assert sum(not name.startswith(("layers.", "mtp.")) for name in flash) == 6
    assert len(flash) == 69187


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embed.weight", (129280, 4096)),
        ("head.weight", (129280, 4096)),
        ("norm.weight", (4096,)),
        ("hc_head_fn", (4, 16384)),
        ("hc_head_base", (4,)),
        ("hc_head_scale", (1,)),
        ("layers.0.hc_attn_fn", (24, 16384)),
        ("layers.0.hc_ffn_base", (24,)),
        ("layers.0.hc_ffn_scale", (3,)),
        ("layers.0.attn.attn_sink", (64,)),
        ("layers.0.attn.wq_a.weight", (1024, 4096)),
        ("layers.0.attn.wq_a.scale", (8, 32)),
        ("layers.0.attn.q_norm.weight", (1024,)),
        ("layers.0.attn.wq_b.weight", (32768, 1024)),
        ("layers.0.attn.wq_b.scale", (256, 8)),
        ("layers.0.attn.wkv.weight", (512, 4096)),
        ("layers.0.attn.wkv.scale", (4, 32)),
        ("layers.0.attn.wo_a.weight", (8192, 4096)),
        ("layers.0.attn.wo_a.scale", (64, 32)),
        ("layers.0.attn.wo_b.weight", (4096, 8192)),
        ("layers.0.attn.wo_b.scale", (32, 64)),
        ("layers.0.ffn.gate.weight", (256, 4096)),
        ("layers.2.ffn.gate.tid2eid", (129280, 6)),
        ("layers.3.ffn.gate.bias", (256,)),
        ("layers.3.ffn.experts.255.w1.weight", (2048, 2048)),
        ("layers.3.ffn.experts.255.w3.scale", (2048, 128)),
        ("layers.3.ffn.experts.0.w2.weight", (4096, 1024)),
        ("layers.3.ffn.experts.0.w2.scale", (4096, 64)),
        ("layers.3.ffn.shared_experts.w1.weight", (2048, 4096)),
        ("layers.3.ffn.shared_experts.w3.scale", (16, 32)),
        ("layers.3.ffn.shared_experts.w2.scale", (32, 16)),
        ("layers.2.attn.compressor.wkv.weight", (1024, 4096)),
        ("layers.2.attn.compressor.ape", (4, 1024)),
        ("layers.3.attn.compressor.wgate.weight", (512, 4096)),
        ("layers.3.attn.compressor.ape", (128, 512)),
        ("layers.3.attn.compressor.norm.weight", (512,)),
        ("layers.2.attn.indexer.wq_b.weight", (8192, 1024)),
        ("layers.2.attn.indexer.wq_b.scale", (64, 8)),
        ("layers.2.attn.indexer.weights_proj.weight", (64, 4096)),
        ("layers.2.attn.indexer.compressor.wkv.weight", (256, 4096)),
        ("layers.2.attn.indexer.compressor.ape", (4, 256)),
        ("layers.2.attn.indexer.compressor.norm.weight", (128,)),
        ("mtp.0.e_proj.weight", (4096, 4096)),
        ("mtp.0.h_proj.scale", (32, 32)),
        ("mtp.0.enorm.weight", (4096,)),
        ("mtp.0.hc_head_fn", (4, 16384)),
        ("mtp.0.ffn.gate.bias", (256,)),
    ],
)
def test_a_tensor_of_flash_has_its_released_shape(flash, name, shape):
    assert tuple(flash[name].shape) == shape


def test_routing_tensors_follow_the_layer(flash):
    """Hash tables on layers 0 to 2, biases on all others and on the MTP block, never both."""
    for layer in range(FLASH.num_hidden_layers):
        assert (f"layers.{layer}.ffn.gate.tid2eid" in flash) == (layer < 3)
        assert (f"layers.{layer}.ffn.gate.bias" in flash) == (layer >= 3)
    assert "mtp.0.ffn.gate.bias" in flash and "mtp.0.ffn.gate.tid2eid" not in flash


def test_pro_has_the_derived_number_of_tensors():
    pro = replace(
        FLASH,
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        compress_ratios=(128, 128) + (4, 128) * 29 + (4,),
        index_topk=1024,
        n_routed_experts=384,
        moe_intermediate_size=3072,
        routed_scaling_factor=2.5,
    )
    with torch.device("meta"):
        model = Transformer(pro, packed=True)
    assert sum(1 for _ in model.destinations()) == 145116


def test_names_are_unique_and_every_parameter_has_one():
    model = Transformer(TINY)
    names = [d.name for d in model.destinations()]
    assert len(names) == len(set(names))
    total = sum(p.numel() for p in model.parameters()) + sum(b.numel() for b in model.buffers())
    assert sum(d.tensor.numel() for d in model.destinations()) == total
