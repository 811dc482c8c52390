// Products of few rows with FP8, FP4 and bfloat16 weights, bound by how fast the weights can be read.
//
// A warp owns sixteen rows of a weight (or sixteen of each of two). Lane (g, q) = (lane / 4, lane % 4) loads sixteen bytes
// of rows g and g + 8 straight into registers, decodes them to half pairs and hands them to mma.m16n8k16 as the A side; the
// inputs are the B side, eight tokens a tile. Which k stands where inside an mma does not matter as long as both sides
// agree, so every lane multiplies exactly the bytes it loaded: no shared memory, no shuffles, and eight tokens cost about
// what one does. Warps of a block share K and add up through shared memory at the end, in a fixed order.
// Products are exact, sums are float32. Inputs are float16 beside FP8 and FP4, bfloat16 beside bfloat16.

#pragma once
#include "common.cuh"

__device__ __forceinline__ uint4 stream16(const void* p) {  // read once: do not keep it in L1
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ uint2 stream8(const void* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

__device__ __forceinline__ uint4 input16(const void* p, bool there) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (there) v = *reinterpret_cast<const uint4*>(p);
    return v;
}

__device__ __forceinline__ u32 pair(u32 two_e4m3) {
    u32 r;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h; }" : "=r"(r) : "r"(two_e4m3));
    return r;
}

__device__ __forceinline__ u32 scaled(u32 a, u32 s) {
    u32 r;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(s));
    return r;
}

template <bool BF16>
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// A warp's share of K: it has U blocks on their way, and asks for another as soon as one is multiplied.
template <int WARPS, int U, typename LOAD, typename MULTIPLY>
__device__ __forceinline__ void roll(int warp, int blocks, const LOAD& load, const MULTIPLY& multiply) {
#pragma unroll
    for (int u = 0; u < U; u++)
        if (warp + u * WARPS < blocks) load(u, warp + u * WARPS);
    wait_for_inputs();
    for (int kb = warp; kb < blocks; kb += WARPS * U)
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int at = kb + u * WARPS, next = at + WARPS * U;
            if (at < blocks) multiply(u, at);
            if (next < blocks) load(u, next);
        }
}

// FP8: rows `first + 16 r ..` for r < RT at codes[r]; K in blocks of 128 with one scale byte each.
template <int NT, int RT, int WARPS, int U, int WM = 1>
__device__ __forceinline__ void fp8_rows(float (&acc)[RT][NT][4], const u8* const (&codes)[RT], const u8* const (&scale)[RT],
                                         int scale_stride, const u16* const (&x)[NT], const bool (&there)[NT], int inner) {
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
                w[u][r][c][0] = stream16(row + c * 64);
                w[u][r][c][1] = stream16(row + (i64)8 * inner + c * 64);
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
                b[t][0] = input16(from, there[t]);
                b[t][1] = input16(from + 8, there[t]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    const u32 low = word(w[u][r][c][0], i), high = word(w[u][r][c][1], i);
                    const u32 a0 = pair(low), a1 = pair(high), a2 = pair(low >> 16), a3 = pair(high >> 16);
#pragma unroll
                    for (int t = 0; t < NT; t++)
                        mma<false>(part[r][t], a0, a1, a2, a3, word(b[t][i >> 1], 2 * (i & 1)),
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
    roll<WARPS, U>(warp, blocks, load, multiply);
}

// bfloat16: sixteen rows, `stride` apart; K in blocks of 128.
template <int NT, int WARPS, int U, int WM = 1>
__device__ __forceinline__ void plain_rows(float (&acc)[1][NT][4], const u16* weight, const u16* const (&x)[NT],
                                           const bool (&there)[NT], int inner, int stride) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) / WM, g = lane >> 2, q = lane & 3;
    const int blocks = inner >> 7;
    uint4 w[U][4][2];
    auto load = [&](int u, int at) {
        const u16* row = weight + (i64)g * stride + at * 128 + q * 8;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            w[u][c][0] = stream16(row + c * 32);
            w[u][c][1] = stream16(row + (i64)8 * stride + c * 32);
        }
    };
    auto multiply = [&](int u, int at) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint4 b = input16(x[t] + at * 128 + c * 32 + q * 8, there[t]);
                mma<true>(acc[0][t], w[u][c][0].x, w[u][c][1].x, w[u][c][0].y, w[u][c][1].y, b.x, b.y);
                mma<true>(acc[0][t], w[u][c][0].z, w[u][c][1].z, w[u][c][0].w, w[u][c][1].w, b.z, b.w);
            }
        }
    };
    roll<WARPS, U>(warp, blocks, load, multiply);
}

// Adds the warps' sums: whole[r][row][token] for RT tiles of sixteen rows.
template <int NT, int RT, int WARPS>
__device__ __forceinline__ void gather(float* shared, float (&acc)[RT][NT][4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    float* mine = shared + warp * (RT * 16 * NT * 8);
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int t = 0; t < NT; t++) {
            float* at = mine + (r * 16 + g) * (NT * 8) + t * 8 + 2 * q;
            at[0] = acc[r][t][0];
            at[1] = acc[r][t][1];
            at[8 * NT * 8] = acc[r][t][2];
            at[8 * NT * 8 + 1] = acc[r][t][3];
        }
    __syncthreads();
}

template <int WARPS>
__device__ __forceinline__ float whole(const float* shared, int at, int size) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += shared[w * size + at];
    return sum;
}

__device__ __forceinline__ void put(float* p, float v) { *p = v; }
__device__ __forceinline__ void put(u16* p, float v) { asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; st.global.b16 [%0], h; }" ::"l"(p), "f"(v) : "memory"); }
struct bf16 { u16 bits; };
__device__ __forceinline__ void put(bf16* p, float v) { asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; st.global.b16 [%0], h; }" ::"l"(p), "f"(v) : "memory"); }

__device__ __forceinline__ float gated(float a, float b, float limit) {
    a = fminf(a, limit);
    b = fminf(fmaxf(b, -limit), limit);
    return a / (1.f + __expf(-a)) * b;
}
