// Inputs of digit_experts.cu: four digits of base 32. With u the power of two above a sixteenth of the largest of 32
// columns, x = (d0 + d1 / 32 + d2 / 32^2 + d3 / 32^3) u and |d| <= 16, so that a digit times u is an E4M3 number and sums
// of 32 products of a digit with an FP4 code are exact. Digits of a row: [columns / 32][even, odd columns][digit][16].

#pragma once
#include "common.cuh"

__device__ __forceinline__ u32 digit_code(float v) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(v));
    return pair & 0xFFu;
}
__device__ __forceinline__ float f16_value(u16 bits) {
    float value;
    asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "h"(bits));
    return value;
}

// A warp writes the digits of 32 columns, one per lane; `row` points to the first digit of these columns.
__device__ __forceinline__ void store_digits(u8* row, float value) {
    const u32 largest = __reduce_max_sync(~0u, __float_as_uint(fabsf(value)));
    const int exponent = min(max((int)(largest >> 23) - 130, -9), 4);
    const float unit = __uint_as_float((u32)(exponent + 127) << 23);
    float rest = value * __uint_as_float((u32)(127 - exponent) << 23);
    u8* into = row + (threadIdx.x & 1) * 64 + (threadIdx.x & 31) / 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float nearest = rintf(rest);
        rest = (rest - nearest) * 32.f;
        into[i * 16] = (u8)digit_code(nearest * unit);
    }
}
