// Types of experts, decoded from the blocks that blocks.cuh copies.
//
// A type has BYTES per block of 256 columns, the bytes of its table in shared memory (TABLE, filled by `fill_table`),
// whether it needs sums of its inputs (SUMS), and `multiply`: one block of sixteen rows times the inputs of eight
// tokens. `low` and `high` are the block in rows g and g + 8, in shared memory; `x` are 256 inputs of token g, in the
// order in which a word of codes unpacks (0, 2, 4, 6, 1, 3, 5, 7), which is that of FP4. Lanes of absent tokens may
// read those of another. Types with DIGITS serve a single token, whose inputs are digits (blocks.cuh).
//
// The product of a code and its integer scale is an exact float16 number up to 2048 and is multiplied as one. Where it
// may be larger (Q6_K, IQ4_XS), an mma has columns of one scale, which multiplies the result.

#pragma once
#include "blocks.cuh"

constexpr u32 EVEN_BYTES = 0x00ff00ffu;

// Bytes 0, 2 and 1, 3 of a word as two float16 numbers each: exact subnormal ones.
__device__ __forceinline__ u32 even_bytes(u32 four) { return four & EVEN_BYTES; }
__device__ __forceinline__ u32 odd_bytes(u32 four) { return __byte_perm(four, 0u, 0x4341); }

// Two pairs of columns of rows g and g + 8, by row: of two words of codes the even ones, (0, 2) and (4, 6) of eight inputs,
// or the odd ones, (1, 3) and (5, 7).
__device__ __forceinline__ void multiply_pairs(float (&part)[4], const u32 (&a)[2][2], const uint4& b, bool odd) {
    mma<false>(part, a[0][0], a[1][0], a[0][1], a[1][1], odd ? b.z : b.x, odd ? b.w : b.y);
}

// Minima are multiplied with the sums of their sixteen inputs, split into two float16 numbers: those of lane q of token
// g, four by s (`sum_inputs`). `minima` are four subnormal numbers of rows g and g + 8.
__device__ __forceinline__ void multiply_sums(float (&least)[4], const u32 (&minima)[2][2], const uint4& sums) {
    mma<false>(least, minima[0][0], minima[1][0], minima[0][1], minima[1][1], sums.x, sums.y);
    mma<false>(least, minima[0][0], minima[1][0], minima[0][1], minima[1][1], sums.z, sums.w);
}

// 84 bytes: sixteen bytes of (scale, minimum) nibbles, 64 bytes of codes, d and dmin. Column 128 h + 32 s + 16 u + l has
// bits 2 s of byte 32 h + 16 u + l and the nibbles of byte 8 h + 2 s + u. Lane q takes h = q / 2, u = q % 2. Codes are
// not shifted down: their factor 4^s is divided out of the scale.
struct Q2_K {
    static constexpr int BYTES = 84, TABLE = 0;
    static constexpr bool SUMS = true, DIGITS = false;
    static __device__ __forceinline__ void multiply(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                    const u8*, const uint4* sums) {
        const int q = threadIdx.x & 3;
        const u32* const rows[2] = {reinterpret_cast<const u32*>(low), reinterpret_cast<const u32*>(high)};
        u32 w[2][4], minima[2][2], step[2][4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int i = 0; i < 4; i++) w[h][i] = rows[h][4 + 4 * q + i];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 nibbles = rows[h][(q >> 1) * 2 + i] >> ((q & 1) * 8);
                const u32 ones = i ? 0x4c005400u : 0x5c006400u;  // 2^(10 - 2 s): the last bit of such a number is 4^-s
                const u32 pair = sub_f16x2((nibbles & 0x000f000fu) | ones, ones);
                step[h][2 * i] = __byte_perm(pair, 0u, 0x1010);
                step[h][2 * i + 1] = __byte_perm(pair, 0u, 0x3232);
                minima[h][i] = (nibbles >> 4) & 0x000f000fu;
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
            for (int odd = 0; odd < 2; odd++)
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    const u32 mask = 0x00030003u << (2 * s);
                    u32 a[2][2];
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int next = 0; next < 2; next++)
                            a[h][next] = mul_f16x2(w[h][i + next] >> (8 * odd) & mask, step[h][s]);
                    multiply_pairs(part, a, inputs[s], odd);
                }
        }
        multiply_sums(least, minima, sums[q]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u8* row = i < 2 ? low : high;
            acc[i] += SUBNORMAL * (half_at(row + 80) * part[i] - half_at(row + 82) * least[i]);
        }
    }
};

// 110 bytes: 32 bytes of third bits, 64 of codes as in Q2_K, twelve of scales, d. Column 128 h + 32 s + 16 u + l has bit
// 4 h + s of byte 16 u + l; a value is code + 4 bit - 4. The scale less 32 of sixteen columns has four bits in nibble h
// of byte 2 s + u and two in bits 2 (2 h + s / 2) of byte 8 + (2 s + u) % 4.
struct Q3_K {
    static constexpr int BYTES = 110, TABLE = 0;
    static constexpr bool SUMS = true, DIGITS = false;
    template <bool HALF>
    static __device__ __forceinline__ void multiply_as(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                       const uint4* sums) {
        const int q = threadIdx.x & 3, h = q >> 1, u = q & 1;
        u32 w[2][4], top[2][4], minima[2][2], step[2][4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u8* row = r ? high : low;
            u32 packed[3];
            load_words<4, HALF>(w[r], row + 32 + 16 * q);
            load_words<4, HALF>(top[r], row + 16 * u);
            load_words<3, HALF>(packed, row + 96);
#pragma unroll
            for (int i = 0; i < 4; i++) top[r][i] >>= 4 * h;
            const u32 upper = packed[2] >> (8 * u + 4 * h);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 pair = (packed[i] >> (8 * u + 4 * h) & 0x000f000fu) | (upper << (i ? 2 : 4) & 0x00300030u);
                const u32 ones = i ? 0x4c005400u : 0x5c006400u;  // as in Q2_K
                const u32 less = sub_f16x2(pair | ones, ones | 0x00200020u);
                step[r][2 * i] = __byte_perm(less, 0u, 0x1010);
                step[r][2 * i + 1] = __byte_perm(less, 0u, 0x3232);
                minima[r][i] = sub_f16x2(pair, 0x00200020u);
            }
        }
        float part[4] = {}, least[4] = {};
        x += h * 128 + u * 16;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            uint4 inputs[4];
#pragma unroll
            for (int s = 0; s < 4; s++) inputs[s] = *reinterpret_cast<const uint4*>(x + s * 32 + i * 4);
#pragma unroll
            for (int odd = 0; odd < 2; odd++)
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    u32 a[2][2];
#pragma unroll
                    for (int r = 0; r < 2; r++)
#pragma unroll
                        for (int next = 0; next < 2; next++) {
                            const u32 code = w[r][i + next] >> (8 * odd) & 0x00030003u << (2 * s);
                            const u32 bit = top[r][i + next] >> (8 * odd) << (s + 2) & 0x00040004u << (2 * s);
                            a[r][next] = mul_f16x2(code | bit, step[r][s]);
                        }
                    multiply_pairs(part, a, inputs[s], odd);
                }
        }
        multiply_sums(least, minima, sums[q]);
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[i] += SUBNORMAL * half_at((i < 2 ? low : high) + 108) * (part[i] - 4.f * least[i]);
    }
    static __device__ __forceinline__ void multiply(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                    const u8*, const uint4* sums) {
        if (reinterpret_cast<u64>(low) & 2) multiply_as<true>(acc, low, high, x, sums);
        else multiply_as<false>(acc, low, high, x, sums);
    }
};

// 144 or 176 bytes: d, dmin, twelve bytes of scales and minima of six bits, in Q5_K 32 bytes of fifth bits, 128 bytes of
// codes. Byte 32 q + l of the codes has columns 64 q + l and 64 q + 32 + l, bits 2 q and 2 q + 1 of byte l are their
// fifth ones. Lane q takes these 64 columns.
template <bool FIFTH>
struct K_WITH_MINIMA {
    static constexpr int BYTES = FIFTH ? 176 : 144, TABLE = 0;
    static constexpr bool SUMS = true, DIGITS = false;
    static __device__ __forceinline__ void multiply(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                    const u8*, const uint4* sums) {
        const int q = threadIdx.x & 3;
        const bool second = q >> 1;
        u32 step[2][2], minima[2][2];
        uint4 codes[2][2], top[2][2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint4* row = reinterpret_cast<const uint4*>(r ? high : low);
            const uint4 head = row[0];
            const u32 scales = second ? (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u) : head.y & 0x3f3f3f3fu;
            const u32 least = second ? (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u) : head.z & 0x3f3f3f3fu;
            const u32 ones = FIFTH ? 0x64006400u : 0x54006400u;  // codes of Q4_K in upper nibbles are not shifted down
            const u32 pair = sub_f16x2(__byte_perm(scales, 0u, q & 1 ? 0x4342 : 0x4140) | ones, ones);
            step[r][0] = __byte_perm(pair, 0u, 0x1010);
            step[r][1] = __byte_perm(pair, 0u, 0x3232);
            minima[r][0] = __byte_perm(least, 0u, 0x4140);
            minima[r][1] = __byte_perm(least, 0u, 0x4342);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                codes[r][i] = row[(FIFTH ? 3 : 1) + 2 * q + i];
                if (FIFTH) top[r][i] = row[1 + i];
            }
        }
        float part[2][4] = {}, least[4] = {};
        x += 64 * q;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const uint4 inputs[2] = {*reinterpret_cast<const uint4*>(x + 8 * e),
                                     *reinterpret_cast<const uint4*>(x + 32 + 8 * e)};
            u32 a[2][2][2][2];  // by group of 32 columns, odd columns, row, word
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int next = 0; next < 2; next++) {
                    const u32 w = word(codes[r][e >> 1], 2 * (e & 1) + next);
                    if (FIFTH) {
                        const u32 bits = word(top[r][e >> 1], 2 * (e & 1) + next);
                        const u32 moved = __funnelshift_l(bits, bits, 4 - 2 * q);
                        const u32 lower = (w & 0x0f0f0f0fu) | (moved & 0x10101010u);
                        const u32 upper = (w >> 4 & 0x0f0f0f0fu) | (moved >> 1 & 0x10101010u);
                        a[0][0][r][next] = even_bytes(lower);
                        a[0][1][r][next] = odd_bytes(lower);
                        a[1][0][r][next] = even_bytes(upper);
                        a[1][1][r][next] = odd_bytes(upper);
                    } else {
                        a[0][0][r][next] = w & 0x000f000fu;
                        a[0][1][r][next] = w >> 8 & 0x000f000fu;
                        a[1][0][r][next] = w & 0x00f000f0u;
                        a[1][1][r][next] = w >> 8 & 0x00f000f0u;
                    }
                }
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        a[n][odd][i >> 1][i & 1] = mul_f16x2(a[n][odd][i >> 1][i & 1], step[i >> 1][n]);
                    multiply_pairs(part[n], a[n][odd], inputs[n], odd);
                }
        }
        multiply_sums(least, minima, sums[q]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u8* row = i < 2 ? low : high;
            acc[i] += SUBNORMAL * (half_at(row) * (part[0][i] + part[1][i]) - half_at(row + 2) * least[i]);
        }
    }
};
typedef K_WITH_MINIMA<false> Q4_K;
typedef K_WITH_MINIMA<true> Q5_K;

// The inputs of four columns 4 q .. of sixteen: pairs (0, 2) and (1, 3).
__device__ __forceinline__ uint2 four_inputs(const u16* sixteen) {
    const int q = threadIdx.x & 3;
    const u32* from = reinterpret_cast<const u32*>(sixteen) + (q >> 1) * 4 + (q & 1);
    return make_uint2(from[0], from[2]);
}

// 210 bytes: 128 of lower nibbles, 64 of upper bits, sixteen scales, d. Sixteen columns j = 8 n + 4 v + i have nibble v of
// bytes 64 n + 16 i .. and bits 4 v + 2 (i / 2) of bytes 32 n + 16 (i % 2) ..; a value is the code less 32.
struct Q6_K {
    static constexpr int BYTES = 210, TABLE = 0;
    static constexpr bool SUMS = false, DIGITS = false;
    template <bool HALF>
    static __device__ __forceinline__ void multiply_as(float (&acc)[4], const u8* low, const u8* high, const u16* x) {
        const int q = threadIdx.x & 3;
        u32 scales[2][4];
        load_words<4, HALF>(scales[0], low + 192);
        load_words<4, HALF>(scales[1], high + 192);
        float sum[4] = {};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 lower[2][1], upper[2][1];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const u8* row = (r ? high : low) + 4 * q;
                    load_words<1, HALF>(lower[r], row + 64 * n + 16 * i);
                    load_words<1, HALF>(upper[r], row + 128 + 32 * n + 16 * (i & 1));
                    upper[r][0] = upper[r][0] >> (i & 2);
                }
#pragma unroll
                for (int v = 0; v < 2; v++) {
                    const int j = 8 * n + 4 * v + i;
                    const uint2 b = four_inputs(x + 16 * j);
                    u32 a[2][2];
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const u32 top = v ? upper[r][0] : upper[r][0] << 4;
                        const u32 code = (lower[r][0] >> (4 * v) & 0x0f0f0f0fu) | (top & 0x30303030u);
                        a[r][0] = sub_f16x2(even_bytes(code), 0x00200020u);
                        a[r][1] = sub_f16x2(odd_bytes(code), 0x00200020u);
                    }
                    float part[4] = {};
                    mma<false>(part, a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        sum[k] += (float)(signed char)(scales[k >> 1][j >> 2] >> (8 * (j & 3))) * part[k];
                }
            }
#pragma unroll
        for (int k = 0; k < 4; k++) acc[k] += SUBNORMAL * half_at((k < 2 ? low : high) + 208) * sum[k];
    }
    static __device__ __forceinline__ void multiply(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                    const u8*, const uint4*) {
        if (reinterpret_cast<u64>(low) & 2) multiply_as<true>(acc, low, high, x);
        else multiply_as<false>(acc, low, high, x);
    }
};

// 136 bytes: d, upper bits of scales, their lower nibbles, 128 bytes of codes. Byte 16 m + l has columns 32 m + l and
// 32 m + 16 + l, whose code selects one of sixteen levels. The scale less 32 of 32 columns has six bits.
struct IQ4_XS {
    static constexpr int BYTES = 136, TABLE = 0;
    static constexpr bool SUMS = false, DIGITS = false;
    // The levels, plus 128, of four codes: one in each of the lowest nibbles.
    static __device__ __forceinline__ u32 levels(u32 four) {
        const u32 at = four & 0x7777u;
        const u32 lower = __byte_perm(0x3f2d1801u, 0x766a5d4fu, at), upper = __byte_perm(0xa6998d81u, 0xf1d9c5b5u, at);
        return __byte_perm(lower, upper, (four & 0x8888u) >> 1 | 0x3210u);
    }
    static __device__ __forceinline__ void multiply(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                    const u8*, const uint4*) {
        const int q = threadIdx.x & 3;
        const u32* const rows[2] = {reinterpret_cast<const u32*>(low), reinterpret_cast<const u32*>(high)};
        float sum[4] = {};
#pragma unroll
        for (int m = 0; m < 8; m++) {
            u32 a[2][4];
            float step[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u32 codes = rows[r][2 + 4 * m + q], scale = rows[r][0] >> (16 + 2 * m), lower = rows[r][1];
                step[r] = (float)((int)((lower >> (4 * m) & 15u) | (scale & 3u) << 4) - 32);
                const u32 first = levels(codes), last = levels(codes >> 16);
#pragma unroll
                for (int i = 0; i < 4; i++) {  // columns 0, 2; 1, 3; 16, 18; 17, 19
                    const u32 two = __byte_perm(first, last, i == 0 ? 0x0400 : i == 1 ? 0x0602 : i == 2 ? 0x0501 : 0x0703);
                    a[r][i] = sub_f16x2((two & EVEN_BYTES) | 0x64006400u, 0x64806480u);
                }
            }
            const uint2 b = four_inputs(x + 32 * m), c = four_inputs(x + 32 * m + 16);
            float part[4] = {};
            mma<false>(part, a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
            mma<false>(part, a[0][2], a[1][2], a[0][3], a[1][3], c.x, c.y);
#pragma unroll
            for (int k = 0; k < 4; k++) sum[k] += step[k >> 1] * part[k];
        }
#pragma unroll
        for (int k = 0; k < 4; k++) acc[k] += half_at(k < 2 ? low : high) * sum[k];
    }
};

// Lattice points are rows of a table of magnitudes in bytes, POINT bytes each.
template <int POINTS, int POINT>
struct PointTable {
    static constexpr int TABLE = POINTS * POINT;
    template <int THREADS>
    static __device__ __forceinline__ void fill_table(u8* table, const u8* grid) {
        for (int i = threadIdx.x * 4; i < TABLE; i += THREADS * 4)
            *reinterpret_cast<u32*>(table + i) = *reinterpret_cast<const u32*>(grid + i);
    }
    static __device__ __forceinline__ const u32* point(const u8* table, u32 index) {
        return reinterpret_cast<const u32*>(table + index * POINT);
    }
};

// Eight magnitudes with their signs, as float16, by even and odd columns of both words. There are seven signs; the eighth
// makes the number of minus signs even. Signs are spread to the highest bits of four bytes (bit i to 7 + 8 i), which
// become the upper bytes of float16 numbers.
__device__ __forceinline__ void signed_values(u32 (&even)[2], u32 (&odd)[2], u32 first, u32 last, u32 signs) {
    const u32 bits[2] = {signs, (signs >> 4) + ((u32)__popc(signs) << 3)};  // further bits do no harm
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 upper = bits[i] * 0x10204080u & 0x80808080u;
        even[i] = __byte_perm(i ? last : first, upper, 0x6240);
        odd[i] = __byte_perm(i ? last : first, upper, 0x7351);
    }
}

__device__ __forceinline__ void scale_pairs(u32 (&a)[2], u32 step) {
    a[0] = mul_f16x2(a[0], step);
    a[1] = mul_f16x2(a[1], step);
}

// 66 bytes: d, then per 32 columns four indices of lattice points, four times seven sign bits and a scale of four bits.
// Lane q takes groups q and q + 4 of 32 columns.
struct IQ2_XXS : PointTable<256, 8> {
    static constexpr int BYTES = 66;
    static constexpr bool SUMS = false, DIGITS = false;
    template <bool HALF>
    static __device__ __forceinline__ void multiply_as(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                       const u8* table) {
        const int q = threadIdx.x & 3;
        float part[2][4] = {};
#pragma unroll
        for (int pass = 0; pass < 2; pass++) {
            const int group = 4 * pass + q;
            uint2 words[2];
            u32 step[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                words[h] = load_two_words<HALF>((h ? high : low) + 2 + group * 8);
                step[h] = small_to_f16x2((words[h].y >> 27 & 30u) + 1u);  // twice the scale and one half
            }
#pragma unroll
            for (int o = 0; o < 4; o++) {
                u32 even[2][2], odd[2][2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint2 both =
                        *reinterpret_cast<const uint2*>(point(table, __byte_perm(words[h].x, 0u, 0x4440 + o)));
                    signed_values(even[h], odd[h], both.x, both.y, words[h].y >> (7 * o) & 127u);
                    scale_pairs(even[h], step[h]);
                    scale_pairs(odd[h], step[h]);
                }
                const uint4 b = *reinterpret_cast<const uint4*>(x + group * 32 + o * 8);
                multiply_pairs(part[0], even, b, false);
                multiply_pairs(part[1], odd, b, true);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[i] += half_at(i < 2 ? low : high) * (0.125f * SUBNORMAL) * (part[0][i] + part[1][i]);
    }
    static __device__ __forceinline__ void multiply(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                    const u8* table, const uint4*) {
        if (reinterpret_cast<u64>(low) & 2) multiply_as<false>(acc, low, high, x, table);
        else multiply_as<true>(acc, low, high, x, table);
    }
};

// 74 bytes: d, per eight columns nine bits of index and seven of signs, per sixteen a scale of four bits. Lane q takes 64
// columns.
struct IQ2_XS : PointTable<512, 8> {
    static constexpr int BYTES = 74;
    static constexpr bool SUMS = false, DIGITS = false;
    template <bool HALF>
    static __device__ __forceinline__ void multiply_as(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                       const u8* table) {
        const int q = threadIdx.x & 3;
        u32 words[2][4], scales[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u8* row = r ? high : low;
            load_words<4, HALF>(words[r], row + 2 + 16 * q);
            scales[r] = *reinterpret_cast<const u16*>(row + 66 + 2 * q);
        }
        float part[2][4] = {};
#pragma unroll
        for (int o = 0; o < 8; o++) {
            u32 even[2][2], odd[2][2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u32 both = words[r][o >> 1] >> (16 * (o & 1));
                const u32 step = small_to_f16x2((scales[r] >> (4 * (o >> 1)) & 15u) * 2u + 1u);
                const uint2 values = *reinterpret_cast<const uint2*>(point(table, both & 511u));
                signed_values(even[r], odd[r], values.x, values.y, both >> 9 & 127u);
                scale_pairs(even[r], step);
                scale_pairs(odd[r], step);
            }
            const uint4 b = *reinterpret_cast<const uint4*>(x + 64 * q + 8 * o);
            multiply_pairs(part[0], even, b, false);
            multiply_pairs(part[1], odd, b, true);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[i] += half_at(i < 2 ? low : high) * (0.125f * SUBNORMAL) * (part[0][i] + part[1][i]);
    }
    static __device__ __forceinline__ void multiply(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                    const u8* table, const uint4*) {
        if (reinterpret_cast<u64>(low) & 2) multiply_as<false>(acc, low, high, x, table);
        else multiply_as<true>(acc, low, high, x, table);
    }
};

// 98 bytes: d, 64 indices of points of four columns, then per 32 columns signs and scale as in IQ2_XXS. Lane q takes
// groups q and q + 4 of 32 columns.
struct IQ3_XXS : PointTable<256, 4> {
    static constexpr int BYTES = 98;
    static constexpr bool SUMS = false, DIGITS = false;
    template <bool HALF>
    static __device__ __forceinline__ void multiply_as(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                       const u8* table) {
        const int q = threadIdx.x & 3;
        float part[2][4] = {};
#pragma unroll
        for (int pass = 0; pass < 2; pass++) {
            const int group = 4 * pass + q;
            u32 points[2][2], signs[2][1], step[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u8* row = r ? high : low;
                load_words<2, HALF>(points[r], row + 2 + 8 * group);
                load_words<1, HALF>(signs[r], row + 66 + 4 * group);
                step[r] = small_to_f16x2((signs[r][0] >> 27 & 30u) + 1u);
            }
#pragma unroll
            for (int o = 0; o < 4; o++) {
                u32 even[2][2], odd[2][2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const u32 two = points[r][o >> 1] >> (16 * (o & 1));
                    signed_values(even[r], odd[r], *point(table, two & 255u),
                                  *point(table, two >> 8 & 255u), signs[r][0] >> (7 * o) & 127u);
                    scale_pairs(even[r], step[r]);
                    scale_pairs(odd[r], step[r]);
                }
                const uint4 b = *reinterpret_cast<const uint4*>(x + group * 32 + o * 8);
                multiply_pairs(part[0], even, b, false);
                multiply_pairs(part[1], odd, b, true);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[i] += half_at(i < 2 ? low : high) * (0.25f * SUBNORMAL) * (part[0][i] + part[1][i]);
    }
    static __device__ __forceinline__ void multiply(float (&acc)[4], const u8* low, const u8* high, const u16* x,
                                                    const u8* table, const uint4*) {
        if (reinterpret_cast<u64>(low) & 2) multiply_as<false>(acc, low, high, x, table);
        else multiply_as<true>(acc, low, high, x, table);
    }
};

// --- One token, products of bytes (see blocks.cuh) ---------------------------------------------------------------------

// `__byte_perm` of a selector without its fourth bits, which it would clear.
__device__ __forceinline__ u32 select_bytes(u32 a, u32 b, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

// Q2_K. The product of a code and its scale is at most 45, with codes two bits further up 180: a byte. Lane q takes
// its words in the order i ^ q, so that no two lanes read the same bank.
struct Q2_K_DIGITS {
    static constexpr int BYTES = 84, TABLE = 0;
    static constexpr bool SUMS = false, DIGITS = true;
    static __device__ __forceinline__ void put(uint4* digits, int lane, u32 first, u32 second) {
        const int s = lane >> 2 & 3, q = (lane >> 4) * 2 + (lane >> 1 & 1);
        uint2* into = reinterpret_cast<uint2*>(digits + s * 12 + q) + ((lane & 1) ^ (q >> 1));
        *into = q & 1 ? make_uint2(second, first) : make_uint2(first, second);
    }
    static __device__ __forceinline__ void multiply(float (&acc)[4], const u8* low, const u8* high, const uint4* digits,
                                                    float factor, const u8*) {
        const int q = threadIdx.x & 3;
        const u32* const rows[2] = {reinterpret_cast<const u32*>(low), reinterpret_cast<const u32*>(high)};
        u32 w[2][4], nibbles[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int i = 0; i < 4; i++) w[h][i] = rows[h][4 + 4 * q + (i ^ q)];
#pragma unroll
            for (int i = 0; i < 2; i++) nibbles[h][i] = rows[h][(q >> 1) * 2 + i] >> ((q & 1) * 8);
        }
        int sums[2][4] = {}, least[2][4] = {};
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const uint4 b = digits_of(digits, s);
            u32 a[2][4], minima[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 both = nibbles[h][s >> 1] >> (16 * (s & 1)), scale = both & 15u;
                minima[h] = __byte_perm(nibbles[h][s >> 1] >> 4 & 0x000f000fu, 0u, s & 1 ? 0x2222u : 0x0000u);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a[h][i] = ((s & 2 ? w[h][i] >> 4 : w[h][i]) & (s & 1 ? 0x0c0c0c0cu : 0x03030303u)) * scale;
            }
            mma_bytes<false>(sums[s & 1], a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
            mma_bytes<false>(sums[s & 1], a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
            mma_bytes<false>(least[0], minima[0], minima[1], minima[0], minima[1], b.x, b.y);
            mma_bytes<false>(least[1], minima[0], minima[1], minima[0], minima[1], b.z, b.w);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 both = f16x2_to_floats(rows[h][20]);
            const int i = 2 * h;
            const float sum = join_digits(4 * sums[0][i] + sums[1][i], 4 * sums[0][i + 1] + sums[1][i + 1]);
            const float minimum = join_digits(least[0][i] + least[1][i], least[0][i + 1] + least[1][i + 1]);
            acc[i] += factor * (0.25f * both.x * sum - both.y * minimum);
        }
    }
};

// IQ2_XXS. Lane q takes point q of every 32 columns, which are one mma, and multiplies its sums with their scale. The
// table has per point a selector of __byte_perm for eight levels, per signs what makes these levels negative. COPIES lie
// side by side, one for each of as many lanes, so that few lanes meet in a bank.
template <int COPIES>
struct IQ2_XXS_BYTE_PRODUCTS {
    static constexpr int BYTES = 66, TABLE = (256 + 128) * 4 * COPIES;
    static constexpr bool SUMS = false, DIGITS = true;
    template <int THREADS>
    static __device__ __forceinline__ void fill_table(u8* table, const u8* grid) {
        for (int i = threadIdx.x; i < 384; i += THREADS) {
            u32 entry = 0;
            if (i < 256) {
                const uint2 point = reinterpret_cast<const uint2*>(grid)[i];
#pragma unroll
                for (int k = 0; k < 4; k++)  // 0, 1, 2 of 8, 25, 43
                    entry |= (point.x >> (8 * k + 4) & 3u) << (4 * k) | (point.y >> (8 * k + 4) & 3u) << (4 * k + 16);
            } else {
                const u32 signs = (i & 127) | (__popc(i & 127) & 1) << 7;  // their number is even
#pragma unroll
                for (int k = 0; k < 8; k++) entry |= (signs >> k & 1u) << (4 * k + 2);
            }
            uint4* into = reinterpret_cast<uint4*>(table) + i * (COPIES / 4);
#pragma unroll
            for (int k = 0; k < COPIES / 4; k++) into[k] = make_uint4(entry, entry, entry, entry);
        }
    }
    static __device__ __forceinline__ void put(uint4* digits, int lane, u32 first, u32 second) {
        reinterpret_cast<uint2*>(digits + (lane >> 3) * 12 + (lane & 3))[lane >> 2 & 1] = make_uint2(first, second);
    }
    template <bool HALF>
    static __device__ __forceinline__ void multiply_as(float (&acc)[4], const u8* low, const u8* high,
                                                       const uint4* digits, float factor, const u8* table) {
        constexpr u32 SIZE = 4 * COPIES;  // bytes of an entry
        constexpr int SHIFT = COPIES == 8 ? 5 : COPIES == 16 ? 6 : 4;
        const int q = threadIdx.x & 3;
        const u32 own = (threadIdx.x & (COPIES - 1)) * 4;
        int sums[4] = {};
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const uint4 both = digits_of(digits, j >> 1);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                u32 a[2][2], scale[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint2 words = load_two_words<HALF>((h ? high : low) + 2 + (j + n) * 8);
                    const u32 at = __funnelshift_r(words.x, words.x, 8 * q - SHIFT) & (255u * SIZE);
                    const u32 signs = __funnelshift_r(words.y, words.y, 7 * q - SHIFT) & (127u * SIZE);
                    const u32 selector = *reinterpret_cast<const u32*>(table + (at | own)) ^
                                         *reinterpret_cast<const u32*>(table + 256 * SIZE + (signs | own));
                    a[h][0] = select_bytes(0x002b1908u, 0x00d5e7f8u, selector);
                    a[h][1] = select_bytes(0x002b1908u, 0x00d5e7f8u, selector >> 16);
                    scale[h] = (words.y >> 27 & 30u) | 1u;  // twice the scale and one half
                }
                int part[4] = {};
                mma_bytes<true>(part, a[0][0], a[1][0], a[0][1], a[1][1], n ? both.z : both.x, n ? both.w : both.y);
#pragma unroll
                for (int i = 0; i < 4; i++) sums[i] += (int)scale[i >> 1] * part[i];
            }
        }
        acc[0] += factor * 0.125f * half_at(low) * join_digits(sums[0], sums[1]);
        acc[2] += factor * 0.125f * half_at(high) * join_digits(sums[2], sums[3]);
    }
    static __device__ __forceinline__ void multiply(float (&acc)[4], const u8* low, const u8* high, const uint4* digits,
                                                    float factor, const u8* table) {
        if (reinterpret_cast<u64>(low) & 2) multiply_as<false>(acc, low, high, digits, factor, table);
        else multiply_as<true>(acc, low, high, digits, factor, table);
    }
};
typedef IQ2_XXS_BYTE_PRODUCTS<8> IQ2_XXS_DIGITS;
typedef IQ2_XXS_BYTE_PRODUCTS<16> IQ2_XXS_DIGITS16;
