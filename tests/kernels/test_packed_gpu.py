"""GPU kernels for every packed type against the plain twin: on a CUDA device, else in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.kernels.experts import Stack
from birkhoff.kernels.experts import experts as plain_experts
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.linear.reference import packed_linear as plain_linear
from birkhoff.kernels.packed import Q8_ROWS, TYPES, PackedMatrix
from tests.interpreter import DEVICE, linear
from tests.packed_matrices import random_matrix
from tests.sizes import FULL

pytest.importorskip("triton", reason="triton is not installed")

from birkhoff.kernels.experts import block_types
from birkhoff.kernels.experts import decode as experts_decode
from birkhoff.kernels.experts import prefill as experts_prefill
from birkhoff.kernels.linear import prefill

EVERY = list(TYPES.values())
by_type = pytest.mark.parametrize("kind", [*EVERY, Q8_ROWS], ids=lambda kind: kind.name)
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def weight_of(kind, rows, columns, seed=0) -> PackedWeight:
    matrix = random_matrix(kind, rows, columns, seed)
    scales = None if matrix.scales is None else matrix.scales.to(DEVICE)
    return PackedWeight(matrix.codes.to(DEVICE), scales, kind, columns)


def close(actual, expected, tolerance):
    return (actual.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max()


@by_type
def test_tiles_are_the_plain_decoders_values(kind):
    weight = weight_of(kind, 37, 768)
    assert torch.equal(prefill.dequantise(weight, torch.float32), weight.dense())


@by_type
@given(seed=st.integers(0, 2**32 - 1), byte=st.sampled_from([None, 0, 1, 127, 254]))
@settings(max_examples=4, deadline=None)
def test_any_bytes_give_the_plain_decoders_values(kind, seed, byte):
    """Scales of zero, NaN and maximal exponents, in rows of random bytes or of one byte."""
    generator = torch.Generator().manual_seed(seed)
    matrix = random_matrix(kind, 3, 256)
    row = torch.randint(0, 256, matrix.codes.shape[1:], generator=generator, dtype=torch.uint8)
    matrix.codes[1] = row if byte is None else byte
    if (
        kind.name == "MXFP4"
    ):  # an exponent of 0 is read as zero, one of 255 as infinite; loaders reject the latter
        matrix.codes.view(3, -1, 17)[..., 0].clamp_(1, 254)
    if kind.name == "FP8":
        matrix.codes[(matrix.codes & 127) == 127] = 0  # NaN, which loaders reject
    scales = None if matrix.scales is None else matrix.scales.to(DEVICE)
    weight = PackedWeight(matrix.codes.to(DEVICE), scales, kind, 256)
    actual, expected = prefill.dequantise(weight, torch.float32), weight.dense()
    assert torch.equal(actual.isnan(), expected.isnan())
    finite = ~expected.isnan()
    # The interpreter computes float16 infinities and subnormal products as NumPy does.
    assert torch.allclose(actual[finite], expected[finite], rtol=1e-6, atol=1e-38)


@by_type
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
def test_products_of_a_decode_step_equal_the_plain_product(kind, dtype):
    weights = [weight_of(kind, 35, 512, 1), weight_of(kind, 16, 512, 2)]
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(3)).to(dtype).to(DEVICE)
    out = torch.empty(3, 51, device=DEVICE)
    linear.gemv(weights, x, out)
    expected = torch.cat([plain_linear(x, weight, None, torch.float32) for weight in weights], 1)
    assert close(out, expected, TOLERANCE[dtype])


@by_type
@pytest.mark.parametrize("rows", [5, 300])
def test_products_of_a_prompt_equal_the_plain_product(kind, rows):
    """300 rows of bfloat16 go through dequantised weights."""
    dtype = torch.float32 if rows == 5 else torch.bfloat16
    weight = weight_of(kind, 32, 256)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(3)).to(dtype).to(DEVICE)
    expected = plain_linear(x, weight, 16)
    assert close(prefill.packed_linear(x, weight, 16), expected, TOLERANCE[dtype])
    alone = prefill.packed_linear(x[:, :256], weight)
    assert close(alone, plain_linear(x[:, :256], weight), TOLERANCE[dtype])


class ExpertsOf:
    """Packed experts of a layer, and the plain twin's view of them."""

    def __init__(self, gate, down, count=3, hidden=256, inner=256):
        self.gate, self.down, self.count, self.hidden, self.inner = gate, down, count, hidden, inner
        self.matrices = [
            [
                self._move(random_matrix(gate, inner, hidden, 9 * e)),
                self._move(random_matrix(gate, inner, hidden, 9 * e + 1)),
                self._move(random_matrix(down, hidden, inner, 9 * e + 2)),
            ]
            for e in range(count)
        ]
        self.kept = [self._joined(*each) for each in self.matrices]
        rows = [[0 if part is None else part.data_ptr() for part in each] for each in self.kept]
        self.addresses = torch.tensor(rows, dtype=torch.int64, device=DEVICE)

    def _move(self, matrix: PackedMatrix) -> PackedMatrix:
        scales = None if matrix.scales is None else matrix.scales.to(DEVICE)
        return PackedMatrix(matrix.type, matrix.columns, matrix.codes.to(DEVICE), scales)

    def _joined(self, gate, up, down):
        scales = None if gate.scales is None else torch.cat((gate.scales, up.scales))
        return torch.cat((gate.codes, up.codes)), scales, down.codes, down.scales

    def stack(self, dtype):
        return Stack(
            self.count,
            lambda e: torch.cat([m.dense() for m in self.matrices[e][:2]]).to(dtype),
            lambda e: self.matrices[e][2].dense().T.to(dtype),
            None,
            lambda: [(None, self.addresses)],
            self.inner,
            (self.gate, self.down),
        )


def routing(rows, count, topk, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(count, generator=generator)[:topk] for _ in range(rows)])
    return ids.to(DEVICE), torch.rand(rows, topk, generator=generator).to(DEVICE)


@pytest.mark.parametrize("kind", [k for k in EVERY if k.name != "FP4"], ids=lambda kind: kind.name)
def test_experts_of_a_prompt_equal_the_plain_twin(kind):
    held = ExpertsOf(kind, kind, count=2)
    ids, weights = routing(3, held.count, 1)
    x = (0.1 * torch.randn(3, held.hidden, generator=torch.Generator().manual_seed(2))).to(DEVICE)
    shared = torch.ones(3, held.hidden, device=DEVICE)
    expected = plain_experts(x, ids, weights, held.stack(torch.float32), 10.0, None, shared)
    actual = experts_prefill.experts(x, ids, weights, held.stack(torch.float32), 10.0, None, shared)
    assert close(actual, expected, 2e-5)


def decode_step(held, x, ids, weights, z_dtype):
    """Gate, up and down through the plan of a decode step, whose routing is by hash."""
    rows, topk = ids.shape
    order = torch.empty(2, rows * topk, dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(min(held.count, rows * topk), 16, dtype=torch.int32, device=DEVICE)
    chosen = torch.empty(rows, topk, dtype=torch.int32, device=DEVICE)
    tokens = torch.arange(rows, device=DEVICE)
    logits = torch.zeros(rows, held.count, device=DEVICE)
    table = ids.to(torch.int32)
    given_weights = torch.empty(rows, topk, device=DEVICE)
    experts_decode.route(
        logits, None, table, tokens, held.addresses, chosen, given_weights, order, slots, 1.0
    )
    z = torch.zeros(rows * topk, held.inner, dtype=z_dtype, device=DEVICE)
    y = torch.zeros(rows, topk + 1, held.hidden, device=DEVICE)
    config = block_types.tile_config(16, x.dtype is torch.float32, decoding=True)
    block_types.gate_up(held.gate, x, held.addresses, slots, order[1], weights, z, 10.0, config)
    block_types.down(held.down, z, held.addresses, slots, order[1], y, topk, config)
    return y


@pytest.mark.parametrize(
    "gate, down", [("Q2_K", "Q3_K"), ("IQ2_XXS", "Q2_K"), ("FP8", "FP8"), ("FP4", "Q8_0"), ("BF16", "F16")]
)
def test_experts_of_a_decode_step_equal_the_plain_twin(gate, down):
    """Gate and down of different types; more tokens than one tile has."""
    held = ExpertsOf(TYPES[gate], TYPES[down])
    ids, weights = routing(20, held.count, 2)
    x = (0.1 * torch.randn(20, held.hidden, generator=torch.Generator().manual_seed(2))).to(DEVICE)
    y = decode_step(held, x, ids, weights, torch.float32)
    expected = plain_experts(x, ids, weights, held.stack(torch.float32), 10.0, None)
    assert close(y.sum(1), expected, 2e-5)
    rounded = decode_step(held, x.to(HALF), ids, weights, torch.float16)  # as beside the CUDA kernels
    assert close(rounded.sum(1), expected, 2.0**-6)


def test_experts_without_an_address_are_left_out():
    held = ExpertsOf(TYPES["Q4_K"], TYPES["Q4_K"])
    ids, weights = routing(4, held.count, 2)
    x = (0.1 * torch.randn(4, held.hidden, generator=torch.Generator().manual_seed(2))).to(DEVICE)
    whole = decode_step(held, x, ids, weights, torch.float32)
    held.addresses[1] = 0
    y = decode_step(held, x, ids, weights, torch.float32)
    elsewhere = ids == 1
    assert (y[:, :2][elsewhere] == 0).all() and elsewhere.any()
    assert torch.equal(y[:, :2][~elsewhere], whole[:, :2][~elsewhere])


KERNELS = [f"{step} {part}" for step in ("decode", "prompt") for part in ("product", "gate_up", "down")]
SOME = (("Q8_0", "decode product"), ("Q2_K", "decode gate_up"), ("IQ2_XXS", "prompt down"))


def test_kernels_compile_for_hopper(tmp_path):
    """Decode and prompt kernels of a type; the interpreter accepts programs that the compiler rejects."""
    wanted = [(name, kernel) for name in TYPES for kernel in KERNELS] if FULL else SOME
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.kernels.compile_for_hopper",
            "types",
            *(f"{name} {kernel}" for name, kernel in wanted),
        ],
        cwd=Path(__file__).parent.parent.parent,
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    assert [(row["type"], row["kernel"]) for row in rows] == list(wanted)
    for row in rows:
        assert row["shared"] <= 232_448 and row["products"], row
