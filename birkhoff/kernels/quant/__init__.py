"""Number formats of V4: weights as stored in checkpoints, and the activation rounding of the released numerics.

    decode_e8m0(bytes)             uint8 -> float32, 2^(byte - 127); 255 is NaN
    dequant_fp8(codes, scale)      E4M3 [out, in], E8M0 [out/128, in/128] -> float32 [out, in]; edge tiles may be
    partial dequant_fp4(codes, scale)      E2M1 pairs [out, in/2], E8M0 [out, in/32] -> float32 [out, in]
    quant_fp8(weight)              -> float8_e4m3fn codes, uint8 scale; the inverse of dequant_fp8
    quant_fp4(weight)              -> uint8 codes, uint8 scale; the inverse of dequant_fp4
    fp8_round(x, group, keep=0)    round each group of the last axis to E4M3 times one power of two; keeps the dtype,
                                   and the last `keep` channels as they are
    fp4_round(x, group=32)         as fp8_round, with E2M1
    hadamard_fp4(x)                fp4_round(hadamard(x))
    hadamard(x)                    orthogonal Walsh-Hadamard of the last axis, Sylvester order; keeps the dtype

Each is exact up to the one rounding in its name: scales are powers of two built from float32 bits, so no logarithm or
division can change a value. Rounding is to nearest, ties to even. None of them is differentiable.
Rows are independent of each other, so results do not depend on the batch. Twins for a GPU, and the quantisation of
inputs of FP8 tensor cores: `device.py`.
"""

from birkhoff.kernels.quant.reference import (
    decode_e8m0,
    dequant_fp4,
    dequant_fp8,
    fp4_round,
    fp8_round,
    hadamard,
    hadamard_fp4,
    quant_fp4,
    quant_fp8,
)

__all__ = [
    "decode_e8m0",
    "dequant_fp4",
    "dequant_fp8",
    "fp4_round",
    "fp8_round",
    "hadamard",
    "hadamard_fp4",
    "quant_fp4",
    "quant_fp8",
]
