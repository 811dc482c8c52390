// Products of bytes with few rows of x, for types whose codes are small integers.
//
// A processor with VNNI multiplies 32 codes and bytes of x at once and adds every four products to one of eight integers.
// 256 columns of x are integers of 22 bits times a power of two, in three signed bytes; the sums of their products are
// exact. Only x is rounded, to 2^-22 of the largest of its 256 columns. Codes are unsigned: a type adds OFFSET to its
// values, which the sums of x take out again. Scales are small integers times a float16 number and exact, too, so that
// results do not depend on how a compiler orders their products.

#pragma once

#include <vector>

#include "decode.h"

#if WIDE && defined(__AVX512VNNI__)
#define DIGITS 1
#else
#define DIGITS 0
#endif

namespace {

// 256 columns of a row of x.
struct alignas(64) DigitChunk {
    int8_t digits[8][3][32];  // of 32 columns, the highest first
    int32_t fours[8][8];      // sums of four columns, as integers
    int32_t lanes[3][8];      // digits of all columns whose products are added to one integer
    float sums[16];           // of sixteen columns
    float factor;
};

constexpr bool has_digits(int64_t type) { return DIGITS && type >= Q2_K; }

#if DIGITS
ONE_COPY void split_chunk(const float *x, DigitChunk &into) {
    __m512i largest = _mm512_setzero_si512();
    for (int k = 0; k < CHUNK; k += 16)
        largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_loadu_si512(x + k), _mm512_set1_epi32(0x7fffffff)));
    const int bits = _mm512_reduce_max_epi32(largest), exponent = std::max(bits >> 23, 1);
    const bool finite = bits < 0x7f800000;
    const __m512 up = _mm512_set1_ps(float(148 - exponent));  // below 2^22
    into.factor = finite ? std::ldexp(1.f, exponent - 148) : NAN;
    for (int k = 0; k < CHUNK; k += 16) {
        __m512i whole = _mm512_cvtps_epi32(_mm512_scalef_ps(_mm512_loadu_ps(x + k), up));
        if (!finite) whole = _mm512_setzero_si512();
        const __m512i middle = _mm512_set1_epi32(0x808080);
        const __m512i bytes = _mm512_xor_si512(_mm512_add_epi32(whole, middle), middle);
        for (int digit = 0; digit < 3; digit++)
            _mm_store_si128((__m128i *)(into.digits[k / 32][digit] + k % 32),
                            _mm512_cvtepi32_epi8(_mm512_srli_epi32(bytes, 8 * (2 - digit))));
        // sums of four, then of sixteen, which are exact
        const __m512i two = _mm512_add_epi32(whole, _mm512_shuffle_epi32(whole, _MM_PERM_CDAB));
        const __m512i four = _mm512_add_epi32(two, _mm512_shuffle_epi32(two, _MM_PERM_BADC));
        const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
        const __m128i fours = _mm512_castsi512_si128(_mm512_permutexvar_epi32(firsts, four));
        _mm_store_si128((__m128i *)(into.fours[k / 32] + k % 32 / 4), fours);
        into.sums[k / 16] = into.factor * float(_mm512_reduce_add_epi32(whole));
    }
    for (int digit = 0; digit < 3; digit++) {
        __m256i sum = _mm256_setzero_si256();
        for (int j = 0; j < 8; j++)
            sum = _mm256_dpbusd_epi32(sum, _mm256_set1_epi8(1), _mm256_load_si256((const __m256i *)into.digits[j][digit]));
        _mm256_store_si256((__m256i *)into.lanes[digit], sum);
    }
}

inline __m256i load_bytes(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)at); }
inline __m256i low_bits(__m256i bytes, int shift, int mask) {
    return _mm256_and_si256(_mm256_srli_epi16(bytes, shift), _mm256_set1_epi8(char(mask)));
}
// One bit of every byte, at the place of `value`, a power of two above it.
inline __m256i one_bit(__m256i bytes, int bit, int place) {
    const __m256i at = place >= bit ? _mm256_slli_epi16(bytes, place - bit) : _mm256_srli_epi16(bytes, bit - place);
    return _mm256_and_si256(at, _mm256_set1_epi8(char(1 << place)));
}
inline uint64_t eight_bytes(const void *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}
// Scales of sixteen columns each: signed bytes times d.
struct SixteenScales {
    __m256 scales[2];
    void unpack(__m128i bytes, float d) {
        for (int i = 0; i < 2; i++) {
            const __m256i wide = _mm256_cvtepi8_epi32(i ? _mm_unpackhi_epi64(bytes, bytes) : bytes);
            scales[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(d));
        }
    }
    __m256 scale(int j) const {
        const int a = 2 * (j % 4), b = a + 1;
        return _mm256_permutevar8x32_ps(scales[j / 4], _mm256_set_epi32(b, b, b, b, a, a, a, a));
    }
};

// ByteCodes<T>: a block of 256 columns. `codes(j)` are those of columns [32 j, 32 j + 32) and `scale(j)` their scales. If
// WHOLE, codes are already multiplied by small integers, and all of the block have the scale `step`. `minima` are what is
// subtracted for the sums of sixteen columns.
template <int T> struct ByteCodes;

// A code is looked up in a table of its multiples, one for sixteen columns.
template <> struct ByteCodes<Q2_K> {
    static constexpr int BYTES = 84, OFFSET = 0;
    static constexpr bool WHOLE = true, MINIMA = true;
    const uint8_t *block;
    float step;
    __m256i multiples[2];
    __m512 minima;
    void begin(const uint8_t *row) {
        block = row;
        step = half(row + 80);
        const __m128i both = _mm_loadu_si128((const __m128i *)row), mask = _mm_set1_epi8(15);
        const __m128i scales = _mm_and_si128(both, mask), least = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
        const __m256i four = _mm256_set1_epi32(0x03020100);
        multiples[0] = _mm256_mullo_epi32(_mm256_cvtepi8_epi32(scales), four);
        multiples[1] = _mm256_mullo_epi32(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(scales, scales)), four);
        minima = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(least)), _mm512_set1_ps(half(row + 82)));
    }
    __m256i codes(int j) const {
        const int a = 2 * (j % 4), b = a + 1;
        const __m256i table = _mm256_permutevar8x32_epi32(multiples[j / 4], _mm256_set_epi32(b, b, b, b, a, a, a, a));
        return _mm256_shuffle_epi8(table, low_bits(load_bytes(block + 16 + j / 4 * 32), 2 * (j % 4), 3));
    }
};

template <> struct ByteCodes<Q3_K> {
    static constexpr int BYTES = 110, OFFSET = 127;
    static constexpr bool WHOLE = true, MINIMA = false;
    const uint8_t *block;
    float step;
    alignas(64) uint64_t multiples[2][8];  // of groups 0, 1, 4, 5, 8, ... and of groups 2, 3, 6, 7, 10, ...
    void begin(const uint8_t *row) {
        block = row;
        step = half(row + 108);
        const uint64_t low = eight_bytes(row + 96), nibbles = 0x0f0f0f0f0f0f0f0full, pairs = 0x03030303;
        const uint64_t top = word(row + 104);
        const uint64_t first = (top & pairs) | (top >> 2 & pairs) << 32, last = (top >> 4 & pairs) | (top >> 6 & pairs) << 32;
        const __m128i bytes = _mm_set_epi64x((low >> 4 & nibbles) | last << 4, (low & nibbles) | first << 4);
        const __m512i scales = _mm512_cvtepi8_epi32(bytes);  // 32 more than they stand for
        // (c - 4) (scale - 32) + 127 for codes c from 0 to 3 and from 4 to 7: no byte carries
        const __m512i lower = _mm512_sub_epi32(_mm512_set1_epi32(int(0x9fbfdfffu)), _mm512_mullo_epi32(scales, _mm512_set1_epi32(0x01020304)));
        const __m512i upper = _mm512_add_epi32(_mm512_set1_epi32(0x1f3f5f7f), _mm512_mullo_epi32(scales, _mm512_set1_epi32(0x03020100)));
        _mm512_store_si512(multiples[0], _mm512_unpacklo_epi32(lower, upper));
        _mm512_store_si512(multiples[1], _mm512_unpackhi_epi32(lower, upper));
    }
    __m256i codes(int j) const {
        const __m256d both = _mm256_castsi256_pd(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)multiples[j % 2] + j / 2)));
        const __m256i table = _mm256_castpd_si256(_mm256_permute_pd(both, 0b1100));
        const __m256i low = low_bits(load_bytes(block + 32 + j / 4 * 32), 2 * (j % 4), 3);
        return _mm256_shuffle_epi8(table, _mm256_or_si256(low, one_bit(load_bytes(block), j, 2)));
    }
};

// Eight scales and minima of six bits.
struct SixBits {
    alignas(32) float scales[8];
    __m512 minima;
    void unpack(const uint8_t *row) {
        const uint32_t a = word(row + 4), b = word(row + 8), c = word(row + 12);
        const uint64_t both = (a & 0x3f3f3f3f) | uint64_t((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)) << 32;
        const uint64_t least = (b & 0x3f3f3f3f) | uint64_t((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)) << 32;
        const __m256i wide = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)both));
        _mm256_store_ps(scales, _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(half(row))));
        const __m128i twice = _mm_unpacklo_epi8(_mm_cvtsi64_si128((long long)least), _mm_cvtsi64_si128((long long)least));
        minima = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(twice)), _mm512_set1_ps(half(row + 2)));
    }
};

template <> struct ByteCodes<Q4_K> : SixBits {
    static constexpr int BYTES = 144, OFFSET = 0;
    static constexpr bool WHOLE = false, MINIMA = true;
    const uint8_t *block;
    void begin(const uint8_t *row) { unpack(block = row); }
    __m256i codes(int j) const { return low_bits(load_bytes(block + 16 + j / 2 * 32), 4 * (j % 2), 15); }
    __m256 scale(int j) const { return _mm256_broadcast_ss(scales + j); }
};

template <> struct ByteCodes<Q5_K> : SixBits {
    static constexpr int BYTES = 176, OFFSET = 0;
    static constexpr bool WHOLE = false, MINIMA = true;
    const uint8_t *block;
    void begin(const uint8_t *row) { unpack(block = row); }
    __m256i codes(int j) const {
        const __m256i low = low_bits(load_bytes(block + 48 + j / 2 * 32), 4 * (j % 2), 15);
        return _mm256_or_si256(low, one_bit(load_bytes(block + 16), j, 4));
    }
    __m256 scale(int j) const { return _mm256_broadcast_ss(scales + j); }
};

template <> struct ByteCodes<Q6_K> : SixteenScales {
    static constexpr int BYTES = 210, OFFSET = 32;
    static constexpr bool WHOLE = false, MINIMA = false;
    const uint8_t *block;
    void begin(const uint8_t *row) {
        block = row;
        unpack(_mm_loadu_si128((const __m128i *)(row + 192)), half(row + 208));
    }
    __m256i codes(int j) const {
        const __m256i low = low_bits(load_bytes(block + 64 * (j / 4) + 32 * (j % 2)), 4 * (j / 2 % 2), 15);
        const __m256i high = low_bits(load_bytes(block + 128 + 32 * (j / 4)), 2 * (j % 4), 3);
        return _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
    }
};

// Signs of 32 columns in 28 bits, for eight groups of them, as a bit per column: every eighth sign makes their number even.
inline __m256i sign_bits(__m256i packed) {
    __m256i bits = _mm256_and_si256(packed, _mm256_set1_epi32(0x7f));
    for (int k = 1; k < 4; k++)
        bits = _mm256_or_si256(bits, _mm256_and_si256(_mm256_slli_epi32(packed, k), _mm256_set1_epi32(0x7f << (8 * k))));
    __m256i parity = _mm256_xor_si256(bits, _mm256_srli_epi32(bits, 4));
    parity = _mm256_xor_si256(parity, _mm256_srli_epi32(parity, 2));
    parity = _mm256_xor_si256(parity, _mm256_srli_epi32(parity, 1));
    return _mm256_or_si256(bits, _mm256_slli_epi32(_mm256_and_si256(parity, _mm256_set1_epi32(0x01010101)), 7));
}

// Four times eight bytes.
inline __m256i join(const void *a, const void *b, const void *c, const void *d) {
    const __m128 low = _mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)a)), (const __m64 *)b);
    const __m128 high = _mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)c)), (const __m64 *)d);
    return _mm256_castps_si256(_mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1));
}

// Points of a lattice: signs and scales of eight times 32 columns.
struct SignedPoints {
    alignas(32) uint32_t signs[8];
    alignas(32) float scales[8];
    // `packed`: 28 bits of signs and four of a scale.
    void unpack(__m256i packed, float d) {
        _mm256_store_si256((__m256i *)signs, sign_bits(packed));
        const __m256i odd = _mm256_or_si256(_mm256_slli_epi32(_mm256_srli_epi32(packed, 28), 1), _mm256_set1_epi32(1));
        _mm256_store_ps(scales, _mm256_mul_ps(_mm256_cvtepi32_ps(odd), _mm256_set1_ps(d)));
    }
    __m256 scale(int j) const { return _mm256_broadcast_ss(scales + j); }
    __m256i with_signs(__m256i points, int j) const {
        const __m256i middle = _mm256_set1_epi8(64);
        return _mm256_mask_sub_epi8(_mm256_add_epi8(points, middle), signs[j], middle, points);
    }
};

template <> struct ByteCodes<IQ2_XXS> : SignedPoints {
    static constexpr int BYTES = 66, OFFSET = 64;
    static constexpr bool WHOLE = false, MINIMA = false;
    const uint8_t *block;
    void begin(const uint8_t *row) {
        block = row + 2;
        unpack(_mm512_cvtepi64_epi32(_mm512_srli_epi64(_mm512_loadu_si512(block), 32)), half(row) * 0.125f);
    }
    __m256i codes(int j) const {
        const uint8_t *at = block + 8 * j;
        return with_signs(join(grid_iq2_xxs[at[0]], grid_iq2_xxs[at[1]], grid_iq2_xxs[at[2]], grid_iq2_xxs[at[3]]), j);
    }
};

template <> struct ByteCodes<IQ2_XS> : SixteenScales {
    static constexpr int BYTES = 74, OFFSET = 64;
    static constexpr bool WHOLE = false, MINIMA = false;
    const uint8_t *block;
    SignedPoints points;
    void begin(const uint8_t *row) {
        block = row + 2;
        const __m128i both = _mm_cvtsi64_si128((long long)eight_bytes(row + 66)), mask = _mm_set1_epi8(15);
        const __m128i steps = _mm_and_si128(_mm_unpacklo_epi8(both, _mm_srli_epi16(both, 4)), mask);
        unpack(_mm_add_epi8(_mm_add_epi8(steps, steps), _mm_set1_epi8(1)), half(row) * 0.125f);
        // four times seven bits of every eight bytes
        const __m512i words = _mm512_loadu_si512(block);
        __m512i packed = _mm512_setzero_si512();
        for (int k = 0; k < 4; k++)
            packed = _mm512_or_si512(packed, _mm512_and_si512(_mm512_srli_epi64(words, 9 + 9 * k), _mm512_set1_epi64(127 << (7 * k))));
        points.unpack(_mm512_cvtepi64_epi32(packed), 0.f);
    }
    __m256i codes(int j) const {
        const uint64_t four = eight_bytes(block + 8 * j);
        const __m256i own = join(grid_iq2_xs[four & 511], grid_iq2_xs[four >> 16 & 511], grid_iq2_xs[four >> 32 & 511],
                                 grid_iq2_xs[four >> 48 & 511]);
        return points.with_signs(own, j);
    }
};

template <> struct ByteCodes<IQ3_XXS> : SignedPoints {
    static constexpr int BYTES = 98, OFFSET = 64;
    static constexpr bool WHOLE = false, MINIMA = false;
    const uint8_t *block;
    void begin(const uint8_t *row) {
        block = row + 2;
        unpack(load_bytes(row + 66), half(row) * 0.25f);
    }
    __m256i codes(int j) const {
        const uint8_t *at = block + 8 * j;
        uint64_t points[4];
        for (int k = 0; k < 4; k++) points[k] = word(grid_iq3_xxs[at[2 * k]]) | uint64_t(word(grid_iq3_xxs[at[2 * k + 1]])) << 32;
        return with_signs(_mm256_set_epi64x((long long)points[3], (long long)points[2], (long long)points[1], (long long)points[0]), j);
    }
};

template <> struct ByteCodes<IQ4_XS> {
    static constexpr int BYTES = 136, OFFSET = 128;
    static constexpr bool WHOLE = false, MINIMA = false;
    const uint8_t *block;
    __m256i table;
    alignas(32) float scales[8];
    void begin(const uint8_t *row) {
        block = row + 8;
        table = _mm256_xor_si256(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)iq4_levels)), _mm256_set1_epi8(-128));
        const __m256i by_four = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0), by_two = _mm256_srli_epi32(by_four, 1);
        const __m256i low = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(int(word(row + 4))), by_four), _mm256_set1_epi32(15));
        const __m256i high = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(row[2] | row[3] << 8), by_two), _mm256_set1_epi32(3));
        const __m256i steps = _mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)), _mm256_set1_epi32(32));
        _mm256_store_ps(scales, _mm256_mul_ps(_mm256_cvtepi32_ps(steps), _mm256_set1_ps(half(row))));
    }
    __m256i codes(int j) const {
        const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(block + 16 * j)));
        const __m256i shifts = _mm256_set_epi32(4, 4, 4, 4, 0, 0, 0, 0);
        return _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srlv_epi32(both, shifts), _mm256_set1_epi8(15)));
    }
    __m256 scale(int j) const { return _mm256_broadcast_ss(scales + j); }
};

// ROWS rows of a matrix from `row` on, with X rows of x. The operations of a row and a row of x do not depend on either.
template <int T, int ROWS, int X>
void few_digits(const Matrix &m, int64_t row, const DigitChunk *x, int64_t stride, float *out, int64_t out_stride) {
    typedef ByteCodes<T> Codes;
    __m256 acc[ROWS][X];
    const uint8_t *next = m.codes + row * m.row_bytes + prefetch_distance(m, ROWS);
#pragma GCC unroll 4
    for (int w = 0; w < ROWS; w++)
#pragma GCC unroll 4
        for (int r = 0; r < X; r++) acc[w][r] = _mm256_setzero_ps();
    for (int64_t chunk = 0; chunk < m.columns / CHUNK; chunk++) {
        Codes codes[ROWS];
        __m256 part[ROWS][X];
        __m256i sums[ROWS][X][3];
        if (X == 1)
#pragma GCC unroll 16
            for (int b = 0; b < ROWS * Codes::BYTES; b += 64) prefetch(next + b);
        next += ROWS * Codes::BYTES;
#pragma GCC unroll 4
        for (int w = 0; w < ROWS; w++) {
            const uint8_t *block = m.codes + (row + w) * m.row_bytes + chunk * Codes::BYTES;
            codes[w].begin(block);
#pragma GCC unroll 4
            for (int r = 0; r < X; r++) {
                part[w][r] = _mm256_setzero_ps();
                for (int digit = 0; digit < 3; digit++) sums[w][r][digit] = _mm256_setzero_si256();
            }
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            __m256i bytes[ROWS];
            __m256 scales[ROWS];
#pragma GCC unroll 4
            for (int w = 0; w < ROWS; w++) {
                bytes[w] = codes[w].codes(j);
                if constexpr (!Codes::WHOLE) scales[w] = codes[w].scale(j);
            }
#pragma GCC unroll 4
            for (int r = 0; r < X; r++) {
                const DigitChunk &own = x[r * stride + chunk];
                __m256i digits[3], offset;
#pragma GCC unroll 3
                for (int digit = 0; digit < 3; digit++) {
                    digits[digit] = _mm256_load_si256((const __m256i *)own.digits[j][digit]);
                    asm("" : "+v"(digits[digit]));  // in a register for all rows: loads are scarce
                }
                if (Codes::OFFSET && !Codes::WHOLE)
                    offset = _mm256_mullo_epi32(_mm256_load_si256((const __m256i *)own.fours[j]), _mm256_set1_epi32(Codes::OFFSET));
#pragma GCC unroll 4
                for (int w = 0; w < ROWS; w++) {
                    if constexpr (Codes::WHOLE) {
#pragma GCC unroll 3
                        for (int digit = 0; digit < 3; digit++)
                            sums[w][r][digit] = _mm256_dpbusd_epi32(sums[w][r][digit], bytes[w], digits[digit]);
                    } else {
                        __m256i sum = _mm256_dpbusd_epi32(_mm256_setzero_si256(), bytes[w], digits[0]);
                        sum = _mm256_dpbusd_epi32(_mm256_slli_epi32(sum, 8), bytes[w], digits[1]);
                        sum = _mm256_dpbusd_epi32(_mm256_slli_epi32(sum, 8), bytes[w], digits[2]);
                        if (Codes::OFFSET) sum = _mm256_sub_epi32(sum, offset);
                        part[w][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scales[w], part[w][r]);
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < X; r++) {
            const DigitChunk &own = x[r * stride + chunk];
#pragma GCC unroll 4
            for (int w = 0; w < ROWS; w++) {
                float factor = own.factor;
                if constexpr (Codes::WHOLE) {
                    factor *= codes[w].step;
                    for (int digit = 0; digit < 3; digit++) {
                        __m256i sum = sums[w][r][digit];
                        if (Codes::OFFSET)
                            sum = _mm256_sub_epi32(sum, _mm256_mullo_epi32(_mm256_load_si256((const __m256i *)own.lanes[digit]), _mm256_set1_epi32(Codes::OFFSET)));
                        part[w][r] = _mm256_fmadd_ps(part[w][r], _mm256_set1_ps(256.f), _mm256_cvtepi32_ps(sum));
                    }
                }
                acc[w][r] = _mm256_fmadd_ps(part[w][r], _mm256_set1_ps(factor), acc[w][r]);
                if constexpr (Codes::MINIMA) {
                    const __m512 least = codes[w].minima;
                    acc[w][r] = _mm256_fnmadd_ps(_mm512_castps512_ps256(least), _mm256_load_ps(own.sums), acc[w][r]);
                    acc[w][r] = _mm256_fnmadd_ps(_mm512_extractf32x8_ps(least, 1), _mm256_load_ps(own.sums + 8), acc[w][r]);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int w = 0; w < ROWS; w++)
#pragma GCC unroll 4
        for (int r = 0; r < X; r++) out[r * out_stride + w] = _mm512_reduce_add_ps(_mm512_zextps256_ps512(acc[w][r]));
}

// Rows [first, stop) of the product, for n rows of x.
template <int T>
void digit_rows(const Matrix &m, int64_t first, int64_t stop, const DigitChunk *x, int64_t stride, int n, float *out,
                int64_t out_stride) {
    int64_t row = first;
    for (; row + 4 <= stop; row += 4) {
        int r = 0;
        for (; r + 4 <= n; r += 4)
            for (int w = 0; w < 4; w += 2)
                few_digits<T, 2, 4>(m, row + w, x + r * stride, stride, out + r * out_stride + row + w, out_stride);
        for (; r < n; r++) few_digits<T, 4, 1>(m, row, x + r * stride, stride, out + r * out_stride + row, out_stride);
    }
    for (; row < stop; row++)
        for (int r = 0; r < n; r++) few_digits<T, 1, 1>(m, row, x + r * stride, stride, out + r * out_stride + row, out_stride);
}
#endif

}  // namespace
