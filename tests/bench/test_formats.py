"""Decode by stored format at a tiny size: rows, their bytes, and formats that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from birkhoff.bench.formats import bench_formats, parse_format
from birkhoff.bench.synthetic import random_on_device
from birkhoff.cli.bench import app
from birkhoff.errors import OptionError
from birkhoff.kernels.packed import TYPES
from tests.interpreter import DEVICE
from tests.models import TINY

CONFIG = replace(
    TINY,
    vocab_size=128,
    hidden_size=256,
    num_hidden_layers=1,
    compress_ratios=(0,),
    num_hash_layers=0,
    q_lora_rank=256,
    n_routed_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=256,
    num_nextn_predict_layers=0,
    max_position_embeddings=512,
)


def test_every_format_is_checked_and_timed_beside_the_released_one():
    rows = list(bench_formats(["Q2_K/Q3_K+Q8_0"], (1,), 4, 1, 1, 1, CONFIG, DEVICE, torch.float32))
    assert [(row["kind"], row["format"]) for row in rows] == [
        ("agreement", "FP4+FP8"),
        ("format", "FP4+FP8"),
        ("agreement", "Q2_K/Q3_K+Q8_0"),
        ("format", "Q2_K/Q3_K+Q8_0"),
    ]
    errors = [row["error_most"] for row in rows if row["kind"] == "agreement" and row["passed"]]
    assert len(errors) == 2 and max(errors) < 0.005, (
        errors
    )  # the plain path rounds the head's input to bfloat16
    released, packed = rows[1], rows[3]
    assert released["times_released"] == 1.0 and packed["times_released"] > 0
    assert packed["share_of_limit"] > 0 and packed["tokens_per_second"] > 0
    expert = 2 * TYPES["Q2_K"].nbytes(256, 256) + TYPES["Q3_K"].nbytes(256, 256)
    fewer = 3 * TYPES["FP4"].nbytes(256, 256) - expert
    more = (TYPES["Q8_0"].bits - TYPES["FP8"].bits) / 8
    assert fewer > 0 and packed["bytes_per_step"] < released["bytes_per_step"] - fewer + more * 2**20


@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
def test_random_weights_of_any_type_keep_the_scale_of_their_inputs(kind):
    model = random_on_device(CONFIG, torch.device("cpu"), types=(kind, kind, kind), dtype=torch.float32)
    experts = model.layers[0].ffn.experts
    if kind.dtype is None:
        assert experts.types == (kind, kind)
    for matrix in (*experts.matrices(1), *model.layers[0].attn.wq_b.matrices()):
        assert 0.3 < float(matrix.dense().std()) * matrix.columns**0.5 < 3


def test_formats_are_parsed():
    each = parse_format("MXFP4")
    assert [kind.name for kind in each.types] == ["FP4", "FP4", "Q8_0"] and each.name == "MXFP4"
    assert [kind.name for kind in parse_format("IQ2_XXS/Q2_K+BF16").types] == ["IQ2_XXS", "Q2_K", "BF16"]
    for text in ("Q9_K", "Q2_K+moon", "", "F32"):
        with pytest.raises(OptionError, match=r"expected EXPERTS\+DENSE"):
            parse_format(text)
    refused = CliRunner().invoke(app, ["decode", "--format", "Q9_K"])
    assert isinstance(refused.exception, OptionError) and "Q9_K" in str(refused.exception)
    both = CliRunner().invoke(app, ["decode", "--format", "Q2_K", "--placement", "0.5"])
    assert "Use one of them at a time" in str(both.exception)
