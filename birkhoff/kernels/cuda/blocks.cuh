// Rows of ggml's block types, read as the file stores them.
//
// Blocks are not aligned to sixteen bytes, but some number of them is: a warp copies that many columns of sixteen rows
// (a stage) into shared memory with 16-byte requests and decodes them there. What follows is the scheme of gemv.cuh:
// lane (g, q) decodes codes of rows g and g + 8 to half2 and passes them to mma.m16n8k16. Codes are small integers; as
// the low bits of a float16 they are exact subnormal numbers (the integer times 2^-24), so they need no conversion, and
// products and sums are exact up to the rounding of float32.

#pragma once
#include "gemv.cuh"

__device__ __forceinline__ void copy_async16(u8* into, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(into)), "l"(from));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" :::); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    __syncwarp();
}

// Request BYTES (a multiple of sixteen) of each of sixteen rows, by one warp; rows follow each other in `into`. The last
// eight are `apart` bytes further than the first eight.
template <int BYTES>
__device__ __forceinline__ void copy_rows(u8* into, const u8* from, i64 row_bytes, i64 apart = 0) {
    constexpr int CHUNKS = BYTES / 16;
#pragma unroll
    for (int j = 0; j < (16 * CHUNKS + 31) / 32; j++) {
        const int i = (threadIdx.x & 31) + 32 * j, row = i / CHUNKS;
        if (i < 16 * CHUNKS)
            copy_async16(into + i * 16, from + row * row_bytes + (row & 8 ? apart : 0) + (i - row * CHUNKS) * 16);
    }
}

// N words at an even address of shared memory; HALF says that it is not a multiple of four.
template <int N, bool HALF>
__device__ __forceinline__ void load_words(u32 (&w)[N], const u8* p) {
    const u32* from = reinterpret_cast<const u32*>(HALF ? p - 2 : p);
    u32 last = from[0];
#pragma unroll
    for (int i = 0; i < N; i++) {
        w[i] = last;
        if (HALF || i + 1 < N) last = from[i + 1];
        if (HALF) w[i] = __funnelshift_r(w[i], last, 16);
    }
}

template <bool HALF>
__device__ __forceinline__ uint2 load_two_words(const u8* p) {
    u32 w[2];
    load_words<2, HALF>(w, p);
    return make_uint2(w[0], w[1]);
}

__device__ __forceinline__ float half_at(const u8* p) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(*reinterpret_cast<const u16*>(p)));
    return f;
}

__device__ __forceinline__ float2 f16x2_to_floats(u32 two) {
    float2 f;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(f.x), "=f"(f.y)
        : "r"(two));
    return f;
}

// Store a number as float16 and return what was stored.
__device__ __forceinline__ float store_f16(u16* p, float v) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    *p = bits;
    float stored;
    asm("cvt.f32.f16 %0, %1;" : "=f"(stored) : "h"(bits));
    return stored;
}

__device__ __forceinline__ u32 sub_f16x2(u32 a, u32 b) {
    u32 r;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// A number from 0 to 255 as float16, twice.
__device__ __forceinline__ u32 small_to_f16x2(u32 n) { return sub_f16x2(n * 0x00010001u | 0x64006400u, 0x64006400u); }

// Dynamic shared memory.
extern __shared__ uint4 memory[];

constexpr float SUBNORMAL = 16777216.f;  // 2^24: a code in the low bits of a float16 stands for code / 2^24

// --- Q8_0: a float16 scale and 32 signed bytes ---------------------------------------------------------------------

constexpr int Q8_COLUMNS = 256, Q8_BYTES = 272, Q8_STAGE = 16 * Q8_BYTES;

// Two of four signed bytes (0, 1 or 2, 3) as float16.
template <bool UPPER>
__device__ __forceinline__ u32 bytes_to_f16x2(u32 four) {
    return sub_f16x2(__byte_perm(four ^ 0x80808080u, 0x64646464u, UPPER ? 0x4342 : 0x4140), 0x64806480u);
}

template <int NT, int RT, int B>
__device__ __forceinline__ void multiply_q8_block(float (&acc)[RT][NT][4], const u8* staged, const u16* const (&x)[NT],
                                                  const bool (&valid)[NT], int column) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    uint4 b[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) b[t] = load_input16(x[t] + column + B * 32 + q * 8, valid[t]);
#pragma unroll
    for (int r = 0; r < RT; r++) {
        const u8* low = staged + r * Q8_STAGE + g * Q8_BYTES + B * 34;
        const u8* high = low + 8 * Q8_BYTES;
        const uint2 a = load_two_words<B % 2 == 0>(low + 2 + q * 8), c = load_two_words<B % 2 == 0>(high + 2 + q * 8);
        const float s = half_at(low), s8 = half_at(high);
#pragma unroll
        for (int t = 0; t < NT; t++) {
            float part[4] = {};
            mma<false>(part, bytes_to_f16x2<false>(a.x), bytes_to_f16x2<false>(c.x), bytes_to_f16x2<true>(a.x),
                       bytes_to_f16x2<true>(c.x), b[t].x, b[t].y);
            mma<false>(part, bytes_to_f16x2<false>(a.y), bytes_to_f16x2<false>(c.y), bytes_to_f16x2<true>(a.y),
                       bytes_to_f16x2<true>(c.y), b[t].z, b[t].w);
            acc[r][t][0] += s * part[0];
            acc[r][t][1] += s * part[1];
            acc[r][t][2] += s8 * part[2];
            acc[r][t][3] += s8 * part[3];
        }
    }
}

template <int NT, int RT>
__device__ __forceinline__ void multiply_q8_stage(float (&acc)[RT][NT][4], const u8* staged, const u16* const (&x)[NT],
                                                  const bool (&valid)[NT], int column) {
    multiply_q8_block<NT, RT, 0>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 1>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 2>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 3>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 4>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 5>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 6>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 7>(acc, staged, x, valid, column);
}

// As `gemm_fp8`, for RT tiles of sixteen rows of Q8_0; `staging` has room for STAGES * RT stages per warp.
// `apart` as in `copy_rows`.
template <int NT, int RT, int WARPS, int STAGES, int WM = 1>
__device__ __forceinline__ void gemm_q8(float (&acc)[RT][NT][4], const u8* const (&codes)[RT], const u16* const (&x)[NT],
                                        const bool (&valid)[NT], int inner, u8* staging, i64 apart = 0) {
    const int warp = (threadIdx.x >> 5) / WM, stages = inner / Q8_COLUMNS;
    const i64 row_bytes = (i64)stages * Q8_BYTES;
    u8* own = staging + (threadIdx.x >> 5) * (STAGES * RT * Q8_STAGE);
    auto request = [&](int slot, int at) {
        if (at < stages)
#pragma unroll
            for (int r = 0; r < RT; r++)
                copy_rows<Q8_BYTES>(own + (slot * RT + r) * Q8_STAGE, codes[r] + (i64)at * Q8_BYTES, row_bytes, apart);
        commit_copies();
    };
#pragma unroll
    for (int slot = 0; slot < STAGES; slot++) request(slot, warp + slot * WARPS);
    grid_dependency_wait();
    int slot = 0;
    for (int at = warp; at < stages; at += WARPS) {
        wait_for_copies<STAGES - 1>();
        multiply_q8_stage<NT, RT>(acc, own + slot * RT * Q8_STAGE, x, valid, at * Q8_COLUMNS);
        __syncwarp();
        request(slot, at + WARPS * STAGES);
        if (++slot == STAGES) slot = 0;
    }
}
