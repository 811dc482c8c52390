"""Packed matrices: the plain decoders against the `gguf` package, the native kernels against the plain decoders."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import TensorShape
from birkhoff.kernels.attend import reference
from birkhoff.kernels.experts import Stack, experts
from birkhoff.kernels.packed import TYPES, PackedMatrix, native
from tests.packed_matrices import random_matrix

BLOCK_TYPES = [kind for kind in TYPES.values() if kind.dtype is None and kind.tile is None]
needs_native = pytest.mark.skipif(not native.available(), reason="no C++ compiler")


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_plain_decoders_equal_the_gguf_package_for_any_bytes(kind, seed):
    raw = np.random.default_rng(seed).integers(0, 256, (1, 3 * kind.block_bytes), np.uint8)
    if kind.name == "MXFP4" and (raw.reshape(-1, 17)[:, 0] == 255).any():
        return  # NaN here and in the OCP definition, a number in the package
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name])
    actual = PackedMatrix(kind, 3 * kind.block, torch.from_numpy(raw.copy())).dense().numpy()
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_sizes_are_those_of_the_gguf_package(kind):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]]
    assert (kind.block, kind.block_bytes) == (block, size)
    assert kind.nbytes(4, 2 * block) == 8 * size


@needs_native
@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 33])
def test_native_products_equal_the_plain_product(kind, rows):
    matrices = [random_matrix(kind, height, 768, seed) for seed, height in enumerate((70, 3))]
    dense = torch.cat([matrix.dense() for matrix in matrices])
    x = torch.randn(rows, 768, generator=torch.Generator().manual_seed(rows))
    expected = x.double() @ dense.double().T
    actual = native.Product(matrices)(x)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    grouped = native.Product([matrices[0]]).grouped(torch.cat((x, x.flip(1)), dim=1), 35)
    halves = (x.double() @ dense[:35].double().T, x.flip(1).double() @ dense[35:70].double().T)
    assert (grouped - torch.cat(halves, dim=1)).abs().max() <= 1e-5 * expected.abs().max()


@needs_native
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_matrices_of_all_types_share_an_input(rows):
    """Each type takes x in an order or form of its own."""
    matrices = [random_matrix(kind, 6, 512, seed) for seed, kind in enumerate(TYPES.values())]
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
    expected = torch.cat([x.double() @ matrix.dense().double().T for matrix in matrices], dim=1)
    assert (native.Product(matrices)(x) - expected).abs().max() <= 1e-5 * expected.abs().max()


@needs_native
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_rows_longer_than_the_first_cache_equal_the_plain_product(name, rows):
    matrix = random_matrix(TYPES[name], 11, 5120)
    x = torch.randn(rows, 5120, generator=torch.Generator().manual_seed(rows))
    expected = x.double() @ matrix.dense().double().T
    assert (native.Product([matrix])(x) - expected).abs().max() <= 1e-5 * expected.abs().max()


@needs_native
@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
def test_a_row_does_not_depend_on_the_other_rows_of_a_batch(kind):
    product = native.Product([random_matrix(kind, 33, 512)])
    x = torch.randn(7, 512, generator=torch.Generator().manual_seed(2))
    together = product(x)
    for row in range(7):
        assert torch.equal(product(x[row : row + 1])[0], together[row])
    x = torch.randn(60, 512, generator=torch.Generator().manual_seed(3))  # the kernels for many rows
    together = product(x)
    for first in (1, 7, 29):
        assert torch.equal(product(x[first : first + 30]), together[first : first + 30])


@needs_native
@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
@given(exponents=st.lists(st.integers(-100, 40), min_size=512, max_size=512), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6, deadline=None)
def test_inputs_of_any_size_are_rounded_by_little_of_the_largest(kind, exponents, seed):
    """Types from Q2_K on may round inputs to 2^-22 of the largest of their 256 columns, others to float32."""
    matrix = random_matrix(kind, 5, 512)
    sizes = torch.exp2(torch.tensor(exponents, dtype=torch.float32))
    x = (torch.randn(2, 512, generator=torch.Generator().manual_seed(seed)) * sizes).float()
    x[1, :256] = 0
    expected = x.double() @ matrix.dense().double().T
    largest = x.double().abs().view(2, 2, 256).amax(-1)
    weights = matrix.dense().double().abs().view(5, 2, 256).sum(-1)
    bound = 2.0**-19 * largest @ weights.T
    assert ((native.Product([matrix])(x).double() - expected).abs() <= bound).all()


@needs_native
@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_not_finite_affect_their_own_row_only(kind, value):
    product = native.Product([random_matrix(kind, 5, 512)])
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(4))
    expected = product(x)
    x[1, 300] = value
    actual = product(x)
    assert not torch.isfinite(actual[1]).any() and torch.equal(actual[[0, 2]], expected[[0, 2]])


@needs_native
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "FP8"])
@pytest.mark.parametrize("columns", [1, 8, 17, 130, 257])
def test_native_products_take_any_width(name, columns):
    matrix = random_matrix(TYPES[name], 129, columns)
    for rows in (1, 5, 31):
        x = torch.randn(rows, columns)
        expected = x @ matrix.dense().T
        assert (native.Product([matrix])(x) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(1)


@needs_native
@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
def test_native_dequantisation_is_that_of_the_plain_decoder(kind):
    matrix = random_matrix(kind, 130, 512)
    dense = matrix.dense()
    assert (native.dequantise(matrix) - dense).abs().max() <= 1e-6 * dense.abs().max()


@needs_native
@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 6, 45])
def test_native_experts_equal_the_plain_twin(kind, rows):
    count, hidden, inner, topk = 5, 256, 512, 3
    packed = [
        matrix
        for e in range(count)
        for matrix in (
            random_matrix(kind, inner, hidden, 10 * e),
            random_matrix(kind, inner, hidden, 10 * e + 1),
            random_matrix(kind, hidden, inner, 10 * e + 2),
        )
    ]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, hidden, generator=generator) * 0.1
    ids = torch.stack([torch.randperm(count, generator=generator)[:topk] for _ in range(rows)])
    weights = torch.rand(rows, topk, generator=generator)
    stack = Stack(
        count,
        lambda e: torch.cat((packed[3 * e].dense(), packed[3 * e + 1].dense())),
        lambda e: packed[3 * e + 2].dense().T,
    )
    expected = experts(x, ids, weights, stack, 10.0, None)
    actual = torch.zeros(rows, hidden)
    native.ExpertProducts(packed, 10.0).add(x, ids, weights, actual)
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()
    products = native.ExpertProducts(packed, 10.0)
    summed = products.sum(x, ids, weights)
    assert (summed - expected).abs().max() <= 2e-5 * expected.abs().max()
    half = rows // 2
    assert torch.equal(products.sum(x[half:], ids[half:], weights[half:]), summed[half:])


@needs_native
@given(
    st.integers(1, 40),
    st.integers(0, 20),
    st.sampled_from([1, 3, 6, 200]),
    st.sampled_from([8, 33, 128, 520]),
    st.integers(1, 24),
    st.integers(0, 40),
    st.integers(0, 9999),
)
def test_native_attention_equals_the_plain_twin(length, past, heads, width, window, entries, seed):
    generator = torch.Generator().manual_seed(seed)
    batch = 2
    queries = torch.randn(batch, length, heads, width, generator=generator)
    recent = torch.randn(batch, past + length, width, generator=generator)
    oldest = torch.randint(0, past + 1, (batch,), generator=generator)
    blocks = torch.randn(batch, entries, width, generator=generator) if entries else None
    seen = torch.rand(batch, length, entries, generator=generator) < 0.3 if entries else None
    arguments = (
        queries,
        recent,
        oldest,
        blocks,
        seen,
        torch.randn(heads, generator=generator),
        window,
        width**-0.5,
    )
    expected = reference.attend(
        *(a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments)
    )
    assert (native.attend(*arguments) - expected).abs().max() <= 2e-6 * (1 + 2 * width**0.5)


@needs_native
@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
@given(row=st.integers(0, 5), seed=st.integers(0, 2**32 - 1), byte=st.sampled_from([None, 0, 127, 254, 255]))
@settings(max_examples=12, deadline=None)
def test_damaged_blocks_are_found_and_affect_their_own_row_only(kind, row, seed, byte):
    """Rows of random bytes, or of one byte: scales of zero, NaN and maximal exponents."""
    matrix = random_matrix(kind, 6, 512)
    codes = matrix.codes.clone()
    generator = torch.Generator().manual_seed(seed)
    codes[row] = (
        torch.randint(0, 256, codes.shape[1:], generator=generator, dtype=torch.uint8)
        if byte is None
        else byte
    )
    damaged = PackedMatrix(kind, 512, codes, matrix.scales)
    finite = torch.isfinite(damaged.dense()).all(1)
    if kind.name != "FP8":  # E4M3's NaN is rejected by the loader and read as 480 here
        assert native.first_bad_row(damaged) == (None if finite.all() else row)
    others = [index for index in range(6) if index != row]
    for rows in (1, 4):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
        before, after = native.Product([matrix])(x), native.Product([damaged])(x)
        assert torch.equal(before[:, others], after[:, others])


def test_a_matrix_must_be_whole_blocks():
    with pytest.raises(TensorShape, match="multiple of 256"):
        TYPES["Q4_K"].row_bytes(128)
    with pytest.raises(TensorShape, match="rows of 34 bytes"):
        PackedMatrix(TYPES["Q8_0"], 32, torch.zeros(2, 33, dtype=torch.uint8))
    with pytest.raises(TensorShape, match="scales"):
        PackedMatrix(TYPES["FP8"], 128, torch.zeros(2, 128, dtype=torch.uint8))
