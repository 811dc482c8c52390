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

// Request BYTES (a multiple of sixteen) of each of sixteen rows, by one warp; rows follow each other in `into`.
template <int BYTES>
__device__ __forceinline__ void copy_rows(u8* into, const u8* from, i64 row_bytes) {
    constexpr int CHUNKS = BYTES / 16;
#pragma unroll
    for (int j = 0; j < (16 * CHUNKS + 31) / 32; j++) {
        const int i = (threadIdx.x & 31) + 32 * j, row = i / CHUNKS;
        if (i < 16 * CHUNKS) copy_async16(into + i * 16, from + row * row_bytes + (i - row * CHUNKS) * 16);
    }
}

// Eight bytes at an even address of shared memory; HALF says that it is not a multiple of four.
template <bool HALF>
__device__ __forceinline__ uint2 load_two_words(const u8* p) {
    if (!HALF) return make_uint2(*reinterpret_cast<const u32*>(p), *reinterpret_cast<const u32*>(p + 4));
    const u32* w = reinterpret_cast<const u32*>(p - 2);
    const u32 a = w[0], b = w[1], c = w[2];
    return make_uint2(__funnelshift_r(a, b, 16), __funnelshift_r(b, c, 16));
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

// As `gemm_fp8`, for RT tiles of sixteen rows of Q8_0; `staging` has room for STAGES * RT stages per warp.
template <int NT, int RT, int WARPS, int STAGES, int WM = 1>
__device__ __forceinline__ void gemm_q8(float (&acc)[RT][NT][4], const u8* const (&codes)[RT], const u16* const (&x)[NT],
                                        const bool (&valid)[NT], int inner, u8* staging) {
    const int warp = (threadIdx.x >> 5) / WM, stages = inner / Q8_COLUMNS;
    const i64 row_bytes = (i64)stages * Q8_BYTES;
    u8* own = staging + (threadIdx.x >> 5) * (STAGES * RT * Q8_STAGE);
    auto request = [&](int slot, int at) {
        if (at < stages)
#pragma unroll
            for (int r = 0; r < RT; r++)
                copy_rows<Q8_BYTES>(own + (slot * RT + r) * Q8_STAGE, codes[r] + (i64)at * Q8_BYTES, row_bytes);
        commit_copies();
    };
#pragma unroll
    for (int slot = 0; slot < STAGES; slot++) request(slot, warp + slot * WARPS);
    grid_dependency_wait();
    int slot = 0;
    for (int at = warp; at < stages; at += WARPS) {
        wait_for_copies<STAGES - 1>();
        const u8* staged = own + slot * RT * Q8_STAGE;
        const int column = at * Q8_COLUMNS;
        multiply_q8_block<NT, RT, 0>(acc, staged, x, valid, column);
        multiply_q8_block<NT, RT, 1>(acc, staged, x, valid, column);
        multiply_q8_block<NT, RT, 2>(acc, staged, x, valid, column);
        multiply_q8_block<NT, RT, 3>(acc, staged, x, valid, column);
        multiply_q8_block<NT, RT, 4>(acc, staged, x, valid, column);
        multiply_q8_block<NT, RT, 5>(acc, staged, x, valid, column);
        multiply_q8_block<NT, RT, 6>(acc, staged, x, valid, column);
        multiply_q8_block<NT, RT, 7>(acc, staged, x, valid, column);
        __syncwarp();
        request(slot, at + WARPS * STAGES);
        if (++slot == STAGES) slot = 0;
    }
}

// --- Types of experts ----------------------------------------------------------------------------------------------
// A type has BYTES per block of 256 columns, the bytes of its table in shared memory (TABLE), whether it needs sums of
// its inputs (SUMS), and `multiply`: block `at` of sixteen rows times the inputs of eight tokens. `low` and `high` are
// the block in rows g and g + 8, in shared memory; `x` are inputs 256 at .. of token g, in the order in which a word of
// codes unpacks (0, 2, 4, 6, 1, 3, 5, 7), which is that of FP4. Lanes of absent tokens may read those of another.

// 84 bytes: sixteen bytes of (scale, minimum) nibbles, 64 bytes of codes, d and dmin. Column 128 h + 32 s + 16 u + l has
// bits 2 s of byte 32 h + 16 u + l and the nibbles of byte 8 h + 2 s + u. Lane q takes h = q / 2, u = q % 2. Codes are
// not shifted down: their factor 4^s is divided out of the scale. Minima are multiplied with the sum of their sixteen
// inputs, split into two float16 numbers: `sums` of token g, by q and s.
struct Q2_K {
    static constexpr int BYTES = 84, TABLE = 0;
    static constexpr bool SUMS = true;

    static __device__ __forceinline__ void multiply(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                    const uint2*, const uint4* sums) {
        const int q = threadIdx.x & 3;
        const u32* const rows[2] = {reinterpret_cast<const u32*>(low), reinterpret_cast<const u32*>(high)};
        u32 w[2][4], nibbles[2][2], step[2][4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int i = 0; i < 4; i++) w[h][i] = rows[h][4 + 4 * q + i];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                nibbles[h][i] = rows[h][(q >> 1) * 2 + i] >> ((q & 1) * 8);
                const u32 ones = i ? 0x4c005400u : 0x5c006400u;  // 2^(10 - 2 s): the last bit of such a number is 4^-s
                const u32 pair = sub_f16x2((nibbles[h][i] & 0x000f000fu) | ones, ones);
                step[h][2 * i] = __byte_perm(pair, 0u, 0x1010);
                step[h][2 * i + 1] = __byte_perm(pair, 0u, 0x3232);
            }
        }
        float part[4] = {}, least[4] = {};
        x += (q >> 1) * 128 + (q & 1) * 16;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            uint4 inputs[4];
#pragma unroll
            for (int s = 0; s < 4; s++) inputs[s] = *reinterpret_cast<const uint4*>(x + s * 32 + i * 4);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 a = w[0][i + half], b = w[1][i + half], c = a >> 8, d = b >> 8;
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    const u32 mask = 0x00030003u << (2 * s);
                    mma<false>(part, mul_f16x2(a & mask, step[0][s]), mul_f16x2(b & mask, step[1][s]),
                               mul_f16x2(c & mask, step[0][s]), mul_f16x2(d & mask, step[1][s]),
                               half ? inputs[s].y : inputs[s].x, half ? inputs[s].w : inputs[s].z);
                }
            }
        }
        const u32 a0 = (nibbles[0][0] >> 4) & 0x000f000fu, a1 = (nibbles[1][0] >> 4) & 0x000f000fu,
                  a2 = (nibbles[0][1] >> 4) & 0x000f000fu, a3 = (nibbles[1][1] >> 4) & 0x000f000fu;
        const uint4 sum = sums[q];
        mma<false>(least, a0, a1, a2, a3, sum.x, sum.y);
        mma<false>(least, a0, a1, a2, a3, sum.z, sum.w);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u8* row = i < 2 ? low : high;
            acc[i] += SUBNORMAL * (half_at(row + 80) * part[i] - half_at(row + 82) * least[i]);
        }
    }
};

// 66 bytes: d, then per 32 columns four indices of lattice points, four times seven sign bits and a scale of four bits.
// Lane q takes groups q and q + 4 of 32 columns. The table has a point in two words: per pair of columns (0, 2), (1, 3),
// (4, 6), (5, 7) a selector of __byte_perm that makes the levels 8, 25 and 43 float16 numbers of the form above.
struct IQ2_XXS {
    static constexpr int BYTES = 66, TABLE = 2048;
    static constexpr bool SUMS = false;

    static __device__ __forceinline__ uint2 table_entry(const u8* grid, int i) {
        const uint2 point = reinterpret_cast<const uint2*>(grid)[i];
        auto selectors = [](u32 four) {
            const u32 c = (four >> 4) & 0x03030303u;  // 0, 1, 2 of 8, 25, 43; the fourth byte of the levels is zero
            return 0x30303030u | (c & 3u) | (c >> 8 & 0x300u) | (c & 0x300u) << 8 | (c & 0x03000000u);
        };
        return make_uint2(selectors(point.x), selectors(point.y));
    }

    template <bool HALF>
    static __device__ __forceinline__ void multiply_as(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                       const uint2* table) {
        const int q = threadIdx.x & 3;
        float part[4] = {};
#pragma unroll
        for (int pass = 0; pass < 2; pass++) {
            uint2 words[2];
            u32 step[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                words[h] = load_two_words<HALF>((h ? high : low) + 2 + (4 * pass + q) * 8);
                step[h] = small_to_f16x2((words[h].y >> 27 & 30u) + 1u);  // twice the scale and one half
            }
#pragma unroll
            for (int o = 0; o < 4; o++) {
                const uint4 b = *reinterpret_cast<const uint4*>(x + (4 * pass + q) * 32 + o * 8);
                u32 a[2][4];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint2 point = table[__byte_perm(words[h].x, 0u, 0x4440 + o)];
                    u32 signs = (words[h].y >> (7 * o)) & 127u;
                    signs += (u32)__popc(signs) << 7;  // the eighth makes their number even; more bits do no harm
                    signs *= 0x01000400u;              // bit i to 10 + i and 24 + i
                    const u32 levels = 0x002b1908u;
                    a[h][0] = __byte_perm(levels, 0u, point.x) ^ (signs << 5 & 0x80008000u);
                    a[h][1] = __byte_perm(levels, 0u, point.x >> 16) ^ (signs << 4 & 0x80008000u);
                    a[h][2] = __byte_perm(levels, 0u, point.y) ^ (signs << 1 & 0x80008000u);
                    a[h][3] = __byte_perm(levels, 0u, point.y >> 16) ^ (signs & 0x80008000u);
#pragma unroll
                    for (int i = 0; i < 4; i++) a[h][i] = mul_f16x2(a[h][i], step[h]);
                }
                mma<false>(part, a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.z);
                mma<false>(part, a[0][2], a[1][2], a[0][3], a[1][3], b.y, b.w);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) acc[i] += half_at(i < 2 ? low : high) * (0.125f * SUBNORMAL) * part[i];
    }

    static __device__ __forceinline__ void multiply(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                    const uint2* table, const uint4*) {
        if (reinterpret_cast<u64>(low) & 2) multiply_as<false>(acc, low, high, x, table);
        else multiply_as<true>(acc, low, high, x, table);
    }
};
