// Steps of the kernels of FP4 experts with FP8 inputs, which prompt_experts.cu explains: copies, decoding, products and
// their scales.

#pragma once

#include "wgmma.cuh"

#define SPAN 12  // powers of two that an E4M3 code has room for beside an E2M1 value

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Half of a line of 128 bytes of which the next step reads the rest.
__device__ __forceinline__ void copy16_of_line(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy8(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

__device__ __forceinline__ u32 e4m3_code(float v) {  // |v| <= 448
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(v));
    return pair & 0xFFu;
}

// Make what this thread wrote visible to the tensor cores, which read it by another proxy.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four E2M1 codes in the low 16 bits of `magnitudes` and `signs` (one bit each) to E4M3 codes by a table of eight bytes.
__device__ __forceinline__ u32 four_codes(u32 magnitudes, u32 signs, u32 low, u32 high) {
    return permute(low, high, magnitudes) | permute(0x00008000u, 0u, signs);
}

struct RowTable {  // E4M3 codes of 0, .5, 1, 1.5, 2, 3, 4, 6 times 2^power; zeros if the power is outside the span
    u32 low, high;
    __device__ __forceinline__ RowTable(int power) {
        const bool inside = (u32)power < SPAN;
        low = inside ? 0x14100800u + power * 0x08080800u : 0u;
        high = inside ? 0x24201C18u + power * 0x08080808u : 0u;
    }
};

// The A operands of a tile of 64 rows and 128 columns: codes of rows `row` and `row` + 8, columns 32 t .. 32 t + 31.
// `scales` are those of the 128 columns, four of the eight bytes of a row.
__device__ __forceinline__ void decode_tile(u32 (&a)[4][4], const u8* codes, const u8* scales, int row, int t,
                                            const int (&base)[2]) {
    const uint4 w0 = *(const uint4*)(codes + row * 64 + t * 16);
    const uint4 w1 = *(const uint4*)(codes + (row + 8) * 64 + t * 16);
    const RowTable table0(scales[row * 8 + t] - base[0] + SPAN - 1);
    const RowTable table1(scales[(row + 8) * 8 + t] - base[1] + SPAN - 1);
    const u32 words0[4] = {w0.x, w0.y, w0.z, w0.w}, words1[4] = {w1.x, w1.y, w1.z, w1.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 m0 = words0[i] & 0x77777777u, s0 = (words0[i] >> 3) & 0x11111111u;
        const u32 m1 = words1[i] & 0x77777777u, s1 = (words1[i] >> 3) & 0x11111111u;
        a[i][0] = four_codes(m0, s0, table0.low, table0.high);
        a[i][1] = four_codes(m1, s1, table1.low, table1.high);
        a[i][2] = four_codes(m0 >> 16, s0 >> 16, table0.low, table0.high);
        a[i][3] = four_codes(m1 >> 16, s1 >> 16, table1.low, table1.high);
    }
}

template <int N>
__device__ __forceinline__ void multiply(float (&sums)[N / 2], const u32 (&a)[4][4], u32 x) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_e4m3<N>(sums, a[i], b_descriptor(x + 32 * i), i > 0);
    wgmma_commit();
}

template <int N>
__device__ __forceinline__ void add_scaled(float (&total)[N / 2], const float (&sums)[N / 2], const float* x_scale, int t) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float2 s = *(const float2*)(x_scale + 8 * j + 2 * t);
        total[4 * j] = fmaf(sums[4 * j], s.x, total[4 * j]);
        total[4 * j + 1] = fmaf(sums[4 * j + 1], s.y, total[4 * j + 1]);
        total[4 * j + 2] = fmaf(sums[4 * j + 2], s.x, total[4 * j + 2]);
        total[4 * j + 3] = fmaf(sums[4 * j + 3], s.y, total[4 * j + 3]);
    }
}

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

__device__ __forceinline__ u32 bf16_bits(float v) {  // round to nearest even
    const u32 bits = __float_as_uint(v);
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}
__device__ __forceinline__ float bf16_round(float v) { return __uint_as_float(bf16_bits(v) << 16); }
