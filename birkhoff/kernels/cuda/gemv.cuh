// Skinny GEMM building blocks for FP8, Q8_0, FP4 and bfloat16 weights, bound by the bandwidth of reading the weights.
//
// A warp owns sixteen rows of a weight (or sixteen of each of two). Lane (g, q) = (lane / 4, lane % 4) loads sixteen
// bytes of rows g and g + 8 directly into registers, decodes them to half2 and passes them to mma.m16n8k16 as operand
// A; the inputs are operand B, eight tokens per tile. The order of k inside an mma is free as long as both operands
// agree, so every lane multiplies exactly the bytes it loaded: no shared memory, no shuffles, and eight tokens cost
// about as much as one. The warps of a block split K; their sums are added through shared memory at the end, in a fixed
// order. Products are exact, sums are float32. Inputs are bfloat16 with bfloat16 weights, else float16.

#pragma once
#include "common.cuh"

__device__ __forceinline__ uint4 load_once16(const void* p) {  // bypasses L1: weights are read once
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ uint2 load_once8(const void* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

__device__ __forceinline__ uint4 load_input16(const void* p, bool valid) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (valid) v = *reinterpret_cast<const uint4*>(p);
    return v;
}

// Four codes to two pairs. The halves of the register are operands as they are, which a shift by 16 would not be.
__device__ __forceinline__ uint2 e4m3x4_to_f16x4(u32 four_e4m3) {
    uint2 r;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(r.x), "=r"(r.y)
        : "r"(four_e4m3));
    return r;
}

__device__ __forceinline__ float2 f16x2_to_floats(u32 two) {
    float2 f;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(f.x), "=f"(f.y)
        : "r"(two));
    return f;
}

__device__ __forceinline__ u32 sub_f16x2(u32 a, u32 b) {
    u32 r;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Two of four unsigned bytes (0, 1 or 2, 3), less 128, as float16.
template <bool UPPER>
__device__ __forceinline__ u32 bytes_to_f16x2(u32 four) {
    return sub_f16x2(__byte_perm(four, 0x64646464u, UPPER ? 0x4342 : 0x4140), 0x64806480u);
}

__device__ __forceinline__ i64 q8_row_bytes(int inner) { return inner / 32 * 34; }

// Store a number as float16 and return what was stored.
__device__ __forceinline__ float store_f16(u16* p, float v) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    *p = bits;
    float stored;
    asm("cvt.f32.f16 %0, %1;" : "=f"(stored) : "h"(bits));
    return stored;
}

__device__ __forceinline__ float round_to_bf16(float v) {
    const u32 bits = __float_as_uint(v);
    return __uint_as_float((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

__device__ __forceinline__ u32 mul_f16x2(u32 a, u32 s) {
    u32 r;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(s));
    return r;
}

template <bool BF16>
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The K loop of a warp, with U blocks in flight: the next block is requested as soon as one is multiplied.
template <int WARPS, int U, typename LOAD, typename MULTIPLY>
__device__ __forceinline__ void pipeline_k(int warp, int blocks, const LOAD& load, const MULTIPLY& multiply) {
#pragma unroll
    for (int u = 0; u < U; u++)
        if (warp + u * WARPS < blocks) load(u, warp + u * WARPS);
    grid_dependency_wait();
    for (int kb = warp; kb < blocks; kb += WARPS * U)
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int at = kb + u * WARPS, next = at + WARPS * U;
            if (at < blocks) multiply(u, at);
            if (next < blocks) load(u, next);
        }
}

// FP8: RT tiles of sixteen rows, tile r at codes[r]; K in blocks of 128 with one scale byte each.
template <int NT, int RT, int WARPS, int U, int WM = 1>
__device__ __forceinline__ void gemm_fp8(float (&acc)[RT][NT][4], const u8* const (&codes)[RT],
                                         const u8* const (&scale)[RT], int scale_stride, const u16* const (&x)[NT],
                                         const bool (&valid)[NT], int inner) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) / WM, g = lane >> 2, q = lane & 3;
    const int blocks = inner >> 7;
    uint4 w[U][RT][2][2];
    float s[U][RT];
    auto load = [&](int u, int at) {
#pragma unroll
        for (int r = 0; r < RT; r++) {
            const u8* row = codes[r] + (i64)g * inner + at * 128 + q * 16;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                w[u][r][c][0] = load_once16(row + c * 64);
                w[u][r][c][1] = load_once16(row + (i64)8 * inner + c * 64);
            }
            s[u][r] = __uint_as_float((u32)scale[r][(i64)at * scale_stride] << 23);
        }
    };
    auto multiply = [&](int u, int at) {
        float part[RT][NT][4];
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) part[r][t][i] = 0.f;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            uint4 b[NT][2];
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const u16* from = x[t] + at * 128 + c * 64 + q * 16;
                b[t][0] = load_input16(from, valid[t]);
                b[t][1] = load_input16(from + 8, valid[t]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    const u32 low = word(w[u][r][c][0], i), high = word(w[u][r][c][1], i);
                    const uint2 a = e4m3x4_to_f16x4(low), below = e4m3x4_to_f16x4(high);
#pragma unroll
                    for (int t = 0; t < NT; t++)
                        mma<false>(part[r][t], a.x, below.x, a.y, below.y, word(b[t][i >> 1], 2 * (i & 1)),
                                   word(b[t][i >> 1], 2 * (i & 1) + 1));
                }
            }
        }
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[r][t][i] += s[u][r] * part[r][t][i];
    };
    pipeline_k<WARPS, U>(warp, blocks, load, multiply);
}

// Q8_ROWS (packed/types.py): as `gemm_fp8`, with a float16 scale per row and 32 columns. Two rows' four scales of 128
// columns are eight bytes each.
template <int NT, int RT, int WARPS, int U, int WM = 1>
__device__ __forceinline__ void gemm_q8(float (&acc)[RT][NT][4], const u8* const (&codes)[RT], const u16* const (&x)[NT],
                                        const bool (&valid)[NT], int inner) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) / WM, g = lane >> 2, q = lane & 3;
    const int blocks = inner >> 7;
    const i64 stride = q8_row_bytes(inner);
    uint4 w[U][RT][2][2];
    uint2 s[U][RT][2];
    auto load = [&](int u, int at) {
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const u8* row = codes[r] + (g + 8 * side) * stride;
                w[u][r][0][side] = load_once16(row + at * 128 + q * 16);
                w[u][r][1][side] = load_once16(row + at * 128 + 64 + q * 16);
                s[u][r][side] = __ldg(reinterpret_cast<const uint2*>(row + inner + at * 8));
            }
    };
    auto multiply = [&](int u, int at) {
#pragma unroll
        for (int c = 0; c < 4; c++) {  // 32 columns
            uint4 b[NT];
#pragma unroll
            for (int t = 0; t < NT; t++) b[t] = load_input16(x[t] + at * 128 + c * 32 + q * 8, valid[t]);
#pragma unroll
            for (int r = 0; r < RT; r++) {
                const uint4 low = w[u][r][c >> 1][0], high = w[u][r][c >> 1][1];
                u32 a[2][4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32 first = word(low, 2 * (c & 1) + i), second = word(high, 2 * (c & 1) + i);
                    a[i][0] = bytes_to_f16x2<false>(first);
                    a[i][1] = bytes_to_f16x2<false>(second);
                    a[i][2] = bytes_to_f16x2<true>(first);
                    a[i][3] = bytes_to_f16x2<true>(second);
                }
                float2 scale[2];
#pragma unroll
                for (int side = 0; side < 2; side++)
                    scale[side] = f16x2_to_floats(c & 2 ? s[u][r][side].y : s[u][r][side].x);
                const float s0 = c & 1 ? scale[0].y : scale[0].x, s1 = c & 1 ? scale[1].y : scale[1].x;
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    float part[4] = {};
                    mma<false>(part, a[0][0], a[0][1], a[0][2], a[0][3], b[t].x, b[t].y);
                    mma<false>(part, a[1][0], a[1][1], a[1][2], a[1][3], b[t].z, b[t].w);
                    acc[r][t][0] += s0 * part[0];
                    acc[r][t][1] += s0 * part[1];
                    acc[r][t][2] += s1 * part[2];
                    acc[r][t][3] += s1 * part[3];
                }
            }
        }
    };
    pipeline_k<WARPS, U>(warp, blocks, load, multiply);
}

// bfloat16: sixteen rows with a stride of `stride` elements; K in blocks of 128.
template <int NT, int WARPS, int U, int WM = 1>
__device__ __forceinline__ void gemm_bf16(float (&acc)[1][NT][4], const u16* weight, const u16* const (&x)[NT],
                                          const bool (&valid)[NT], int inner, int stride) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) / WM, g = lane >> 2, q = lane & 3;
    const int blocks = inner >> 7;
    uint4 w[U][4][2];
    auto load = [&](int u, int at) {
        const u16* row = weight + (i64)g * stride + at * 128 + q * 8;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            w[u][c][0] = load_once16(row + c * 32);
            w[u][c][1] = load_once16(row + (i64)8 * stride + c * 32);
        }
    };
    auto multiply = [&](int u, int at) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint4 b = load_input16(x[t] + at * 128 + c * 32 + q * 8, valid[t]);
                mma<true>(acc[0][t], w[u][c][0].x, w[u][c][1].x, w[u][c][0].y, w[u][c][1].y, b.x, b.y);
                mma<true>(acc[0][t], w[u][c][0].z, w[u][c][1].z, w[u][c][0].w, w[u][c][1].w, b.z, b.w);
            }
        }
    };
    pipeline_k<WARPS, U>(warp, blocks, load, multiply);
}

// Stores the sums of every warp as [warp][RT][16 rows][NT * 8 tokens]; `sum_partials` adds them in warp order.
template <int NT, int RT, int WARPS>
__device__ __forceinline__ void store_partials(float* shared, float (&acc)[RT][NT][4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    float* warp_part = shared + warp * (RT * 16 * NT * 8);
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int t = 0; t < NT; t++) {
            float* at = warp_part + (r * 16 + g) * (NT * 8) + t * 8 + 2 * q;
            at[0] = acc[r][t][0];
            at[1] = acc[r][t][1];
            at[8 * NT * 8] = acc[r][t][2];
            at[8 * NT * 8 + 1] = acc[r][t][3];
        }
    __syncthreads();
}

template <int WARPS>
__device__ __forceinline__ float sum_partials(const float* shared, int at, int size) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += shared[w * size + at];
    return sum;
}

__device__ __forceinline__ void store_as(float* p, float v) { *p = v; }
__device__ __forceinline__ void store_as(u16* p, float v) {
    asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; st.global.b16 [%0], h; }" ::"l"(p), "f"(v) : "memory");
}
struct bf16 {
    u16 bits;
};
__device__ __forceinline__ void store_as(bf16* p, float v) {
    asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; st.global.b16 [%0], h; }" ::"l"(p), "f"(v) : "memory");
}

__device__ __forceinline__ float swiglu(float a, float b, float limit) {
    a = fminf(a, limit);
    b = fminf(fmaxf(b, -limit), limit);
    return a / (1.f + __expf(-a)) * b;
}
