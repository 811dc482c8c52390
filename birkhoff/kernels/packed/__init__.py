"""Matrices in the number formats of checkpoints, and products that read them as stored.

`PackedType`      a format: block size, bytes, where the scales are (`types.py`)
`PackedMatrix`    codes and scales of one matrix (`matrix.py`)
`dequantise`      every format in plain PyTorch; equal to the `gguf` package bit for bit (`reference.py`)
`native`          products, rows and experts on a CPU in C++ with AVX-512 where the processor has it (`native.cpp`)
`layer`           whole layers of a decode step, and their parts, in C++ (`layer.h`)

`native.Product([matrix, ...])(x [n, in]) -> [n, sum of rows]` and `native.ExpertProducts`: float32 inputs, sums and
results, for any n. Tolerance against the plain twin: 1e-5 relative to the largest result. Values that
are not finite propagate to the result; nothing else does, so damaged blocks cannot affect other rows.
"""

from birkhoff.kernels.packed.matrix import PackedMatrix
from birkhoff.kernels.packed.reference import dequantise, from_blocks
from birkhoff.kernels.packed.types import FLOAT_TYPES, Q8_ROWS, TYPES, PackedType, gpu_type, stored_type

__all__ = [
    "FLOAT_TYPES",
    "PackedMatrix",
    "PackedType",
    "Q8_ROWS",
    "TYPES",
    "dequantise",
    "from_blocks",
    "gpu_type",
    "stored_type",
]
