"""The layout table against the published counts and sizes of the releases, and against the model."""

import math
import re
from collections import Counter

import pytest

from birkhoff.convert.presets import preset
from birkhoff.errors import OptionError, TensorShape
from birkhoff.model.transformer import Transformer
from birkhoff.weights.layout import expected_tensors, model_tensors
from birkhoff.weights.safetensors import item_bytes


def counts(like: str) -> Counter:
    return Counter(
        re.match(r"((?:layers|mtp)\.\d+)?", name)[0] or "root" for name in expected_tensors(preset(like))
    )


def test_flash_has_the_released_counts_and_bytes():
    count = counts("flash")
    assert count.total() == 69187
    assert (count["layers.0"], count["layers.3"], count["layers.2"]) == (1565, 1569, 1576)
    assert (count["mtp.0"], count["root"]) == (1575, 6)
    stored = expected_tensors(preset("flash")).values()
    size = sum(math.prod(tensor.shape) * item_bytes(tensor.dtype) for tensor in stored)
    assert round(size / 1e9, 1) == 159.6


def test_pro_has_the_derived_count():
    assert counts("pro").total() == 145116


def test_the_trunks_have_their_published_parameters():
    def trunk(like: str) -> int:
        return sum(
            math.prod(shape)
            for name, shape, storage in model_tensors(preset(like))
            if storage != "ids" and not name.startswith("mtp.")
        )

    assert round(trunk("flash") / 1e9, 2) == 284.33
    assert round(trunk("pro") / 1e12, 1) == 1.6


def test_flash_shapes_and_dtypes_as_released():
    table = expected_tensors(preset("flash"))
    rows = {
        "embed.weight": ((129280, 4096), "BF16"),
        "hc_head_fn": ((4, 16384), "F32"),
        "layers.0.hc_attn_fn": ((24, 16384), "F32"),
        "layers.0.attn.attn_sink": ((64,), "F32"),
        "layers.0.attn.wq_b.scale": ((256, 8), "F8_E8M0"),
        "layers.0.attn.wo_a.weight": ((8192, 4096), "F8_E4M3"),
        "layers.0.attn.wo_b.scale": ((32, 64), "F8_E8M0"),
        "layers.0.ffn.gate.tid2eid": ((129280, 6), "I64"),
        "layers.3.ffn.gate.bias": ((256,), "F32"),
        "layers.3.ffn.experts.255.w1.weight": ((2048, 2048), "I8"),
        "layers.3.ffn.experts.255.w2.weight": ((4096, 1024), "I8"),
        "layers.3.ffn.experts.255.w2.scale": ((4096, 64), "F8_E8M0"),
        "layers.2.attn.compressor.ape": ((4, 1024), "F32"),
        "layers.3.attn.compressor.ape": ((128, 512), "F32"),
        "layers.2.attn.indexer.wq_b.scale": ((64, 8), "F8_E8M0"),
        "layers.2.attn.indexer.compressor.wkv.weight": ((256, 4096), "BF16"),
        "mtp.0.e_proj.weight": ((4096, 4096), "F8_E4M3"),
        "mtp.0.ffn.gate.bias": ((256,), "F32"),
    }
    assert {name: table[name][:2] for name in rows} == rows


@pytest.mark.parametrize("like", ["tiny", "nano"])
def test_the_model_asks_for_exactly_these_tensors(like):
    config = preset(like)
    expected = {d.name: tuple(d.tensor.shape) for d in Transformer(config).destinations()}
    assert expected == {name: shape for name, shape, _ in model_tensors(config)}
    packed = {d.name: tuple(d.tensor.shape) for d in Transformer(config, packed=True).destinations()}
    stored = {name: stored.shape for name, stored in expected_tensors(config).items()}
    # wo_a is always unpacked, so a packed model has no destination for its scale
    assert {n: s for n, s in stored.items() if n in packed or not n.endswith("wo_a.scale")} == packed


def test_formats_are_checked():
    with pytest.raises(OptionError, match="dense is 'int4', expected one of fp8, bf16, f32"):
        expected_tensors(preset("tiny"), dense="int4")
    with pytest.raises(OptionError, match="experts is 'fp5'"):
        expected_tensors(preset("tiny"), experts="fp5")
    from dataclasses import replace

    with pytest.raises(TensorShape, match="multiple of 32"):
        expected_tensors(replace(preset("tiny"), moe_intermediate_size=48))
