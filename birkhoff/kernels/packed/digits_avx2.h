// Products of bytes with few rows of x on processors with AVX2 and without AVX-512 VNNI, for types whose codes are small
// integers. 256 columns of x are integers of 22 bits times a power of two, as in digits.h, but in three digits of base
// 255, so that none is -128, which has no negative.
//
// maddubs adds the products of two unsigned codes and two digits to 16 bits, which suffice for codes up to 127. Scales are
// integers, so that the next instruction multiplies by the scale and adds two of these to 32 bits: sums are exact until
// the end of a block of 256 columns. Values that are an offset less than their codes have it in `minima`.

#pragma once

#include "decode.h"

namespace {

// 256 columns of a row of x: the digits of every 32, the highest first, and sums of sixteen columns: those of the first
// half of every 32, then those of the second.
struct alignas(32) DigitChunk {
    int8_t groups[8][3][32];
    float sums[16];
    float factor;
};

inline __m256i load_32(const void *at) { return _mm256_loadu_si256((const __m256i *)at); }
inline __m128i load_16(const void *at) { return _mm_loadu_si128((const __m128i *)at); }
inline uint64_t eight_bytes(const void *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}
inline __m256i both_lanes(__m128i bytes) { return _mm256_broadcastsi128_si256(bytes); }
// Bits of every byte. Shifts are of words: what crosses a byte is masked.
template <int SHIFT> inline __m256i field(__m256i bytes, int mask) {
    const __m256i moved = SHIFT >= 0 ? _mm256_srli_epi16(bytes, SHIFT > 0 ? SHIFT : 0) : _mm256_slli_epi16(bytes, SHIFT < 0 ? -SHIFT : 0);
    return _mm256_and_si256(moved, _mm256_set1_epi8(char(mask)));
}

// Take the lowest digit, from -127 to 127, off integers.
inline __m256i lowest_digit(__m256i &whole) {
    const __m256i base = _mm256_set1_epi32(255);
    __m256i rest = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_cvtepi32_ps(whole), _mm256_set1_ps(1.f / 255)));
    __m256i digit = _mm256_sub_epi32(whole, _mm256_mullo_epi32(rest, base));
    // The quotient is rounded, so that a digit may be 128 or -128.
    const __m256i above = _mm256_cmpgt_epi32(digit, _mm256_set1_epi32(127)), below = _mm256_cmpgt_epi32(_mm256_set1_epi32(-127), digit);
    digit = _mm256_add_epi32(_mm256_sub_epi32(digit, _mm256_and_si256(above, base)), _mm256_and_si256(below, base));
    whole = _mm256_add_epi32(_mm256_sub_epi32(rest, above), below);
    return digit;
}

ONE_COPY void split_chunk(const float *x, DigitChunk &into) {
    __m256i largest = _mm256_setzero_si256();
    for (int k = 0; k < CHUNK; k += 8)
        largest = _mm256_max_epi32(largest, _mm256_and_si256(load_32(x + k), _mm256_set1_epi32(0x7fffffff)));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
    const int bits = _mm_cvtsi128_si32(four), exponent = std::max(bits >> 23, 1), up = 148 - exponent;
    const bool finite = bits < 0x7f800000;
    into.factor = finite ? std::ldexp(1.f, -up) : NAN;
    // Two factors, since 2^147 is no float; the compiler must not multiply them with each other first.
    const __m256 first = _mm256_set1_ps(std::ldexp(1.f, up / 2)), second = _mm256_set1_ps(std::ldexp(1.f, up - up / 2));
    for (int g = 0; g < 8; g++) {
        __m256i wholes[4];
        for (int part = 0; part < 4; part++) {
            __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + 32 * g + 8 * part), first);
            in_register(scaled);
            __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(scaled, second));  // below 2^22
            if (!finite) whole = _mm256_setzero_si256();
            wholes[part] = whole;
        }
        for (int half_group = 0; half_group < 2; half_group++) {
            const __m256i eight = _mm256_add_epi32(wholes[2 * half_group], wholes[2 * half_group + 1]);
            __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
            sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
            sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1));
            into.sums[8 * half_group + g] = into.factor * float(_mm_cvtsi128_si32(sum));
        }
        for (int digit = 2; digit >= 0; digit--) {  // the lowest first
            __m256i own[4];
            for (int part = 0; part < 4; part++) own[part] = lowest_digit(wholes[part]);
            const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(own[0], own[1]), _mm256_packs_epi32(own[2], own[3]));
            const __m256i in_order = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            _mm256_store_si256((__m256i *)into.groups[g][digit], in_order);
        }
    }
}

// ByteCodes<T>: a block of 256 columns in eight groups of 32 codes. `steps` are its integer scales: of the first sixteen
// columns of every group in the lower half, of the last in the upper one; `d` is what they are multiplied by. `minima`
// are subtracted for the sums of sixteen columns. With SIGNED, codes are signed bytes.
template <int T> struct ByteCodes;

struct ScaledBlock {
    static constexpr bool SIGNED = false, MINIMA = true;
    __m256 minima[2];
    const uint8_t *block;
    __m256i steps;
    float d;
    // Sixteen bytes of scales in the order of columns.
    void steps_of_sixteen(__m128i bytes) {
        const __m128i apart = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        steps = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, apart));
    }
    void steps_of_32(uint64_t bytes) { steps = _mm256_cvtepi8_epi16(_mm_set1_epi64x((long long)bytes)); }
    __m256 lower_steps() const { return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(steps))); }
    __m256 upper_steps() const { return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(steps, 1))); }
    // `factor` times the steps is subtracted.
    void set_minima(float factor) {
        minima[0] = _mm256_mul_ps(lower_steps(), _mm256_set1_ps(factor));
        minima[1] = _mm256_mul_ps(upper_steps(), _mm256_set1_ps(factor));
    }
};

template <> struct ByteCodes<Q2_K> : ScaledBlock {
    static constexpr int BYTES = 84;
    void begin(const uint8_t *row) {
        block = row + 16;
        d = half(row + 80);
        const __m128i both = load_16(row), mask = _mm_set1_epi8(15);
        steps_of_sixteen(_mm_and_si128(_mm_srli_epi16(both, 4), mask));
        set_minima(half(row + 82));
        steps_of_sixteen(_mm_and_si128(both, mask));
    }
    template <int G> __m256i codes() const { return field<2 * (G % 4)>(load_32(block + 32 * (G / 4)), 3); }
};

template <> struct ByteCodes<Q3_K> : ScaledBlock {
    static constexpr int BYTES = 110;
    __m256i top;
    void begin(const uint8_t *row) {
        block = row + 32;
        top = load_32(row);
        d = half(row + 108);
        const uint64_t low = eight_bytes(row + 96), nibbles = 0x0f0f0f0f0f0f0f0full, pairs = 0x03030303;
        const uint64_t above = word(row + 104);
        const uint64_t first = (above & pairs) | (above >> 2 & pairs) << 32, last = (above >> 4 & pairs) | (above >> 6 & pairs) << 32;
        const __m128i bytes = _mm_set_epi64x((low >> 4 & nibbles) | last << 4, (low & nibbles) | first << 4);
        steps_of_sixteen(_mm_sub_epi8(bytes, _mm_set1_epi8(32)));
        set_minima(4 * d);
    }
    template <int G> __m256i codes() const {
        return _mm256_or_si256(field<2 * (G % 4)>(load_32(block + 32 * (G / 4)), 3), field<G - 2>(top, 4));
    }
};

// Eight scales and minima of six bits.
struct SixBits : ScaledBlock {
    void unpack(const uint8_t *row) {
        const uint32_t a = word(row + 4), b = word(row + 8), c = word(row + 12);
        const uint64_t own = (a & 0x3f3f3f3f) | uint64_t((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)) << 32;
        const uint64_t least = (b & 0x3f3f3f3f) | uint64_t((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)) << 32;
        steps_of_32(least);
        set_minima(half(row + 2));
        steps_of_32(own);
        d = half(row);
    }
};

template <> struct ByteCodes<Q4_K> : SixBits {
    static constexpr int BYTES = 144;
    void begin(const uint8_t *row) {
        block = row + 16;
        unpack(row);
    }
    template <int G> __m256i codes() const { return field<4 * (G % 2)>(load_32(block + 32 * (G / 2)), 15); }
};

template <> struct ByteCodes<Q5_K> : SixBits {
    static constexpr int BYTES = 176;
    __m256i top;
    void begin(const uint8_t *row) {
        block = row + 48;
        top = load_32(row + 16);
        unpack(row);
    }
    template <int G> __m256i codes() const {
        return _mm256_or_si256(field<4 * (G % 2)>(load_32(block + 32 * (G / 2)), 15), field<G - 4>(top, 16));
    }
};

template <> struct ByteCodes<Q6_K> : ScaledBlock {
    static constexpr int BYTES = 210;
    void begin(const uint8_t *row) {
        block = row;
        d = half(row + 208);
        steps_of_sixteen(load_16(row + 192));
        set_minima(32 * d);
    }
    template <int G> __m256i codes() const {
        const __m256i low = field<4 * (G / 2 % 2)>(load_32(block + 64 * (G / 4) + 32 * (G % 2)), 15);
        return _mm256_or_si256(low, field<2 * (G % 4) - 4>(load_32(block + 128 + 32 * (G / 4)), 48));
    }
};

template <> struct ByteCodes<IQ4_XS> : ScaledBlock {
    static constexpr int BYTES = 136;
    static constexpr bool MINIMA = false, SIGNED = true;
    void begin(const uint8_t *row) {
        block = row + 8;
        d = half(row);
        // Nibbles and pairs of bits to bytes.
        const uint64_t low = word(row + 4), high = row[2] | uint64_t(row[3]) << 8;
        uint64_t nibbles = 0, pairs = 0;
        for (int g = 0; g < 8; g++) {
            nibbles |= (low >> 4 * g & 15) << 8 * g;
            pairs |= (high >> 2 * g & 3) << (8 * g + 4);
        }
        steps = _mm256_cvtepi8_epi16(_mm_sub_epi8(_mm_set1_epi64x((long long)(nibbles | pairs)), _mm_set1_epi8(32)));
    }
    template <int G> __m256i codes() const {
        const __m128i both = load_16(block + 16 * G), mask = _mm_set1_epi8(15), table = load_16(iq4_levels);
        const __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(both, mask));
        return _mm256_set_m128i(_mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(both, 4), mask)), low);
    }
};

// Points of a lattice and their signs, eight columns at a time. Codes are values of at most 62 and 64.
struct Lattice : ScaledBlock {
    // Odd scales of four bits.
    static uint64_t odd(uint64_t fours) { return fours * 2 + 0x0101010101010101ull; }
    static __m256i four_of(uint64_t a, uint64_t b, uint64_t c, uint64_t e) {
        return _mm256_set_epi64x((long long)e, (long long)c, (long long)b, (long long)a);
    }
    static __m256i with_signs(__m256i points, uint64_t a, uint64_t b, uint64_t c, uint64_t e) {
        const uint64_t *table = (const uint64_t *)sign_table;
        const __m256i signs = four_of(table[a & 127], table[b & 127], table[c & 127], table[e & 127]);
        return _mm256_add_epi8(_mm256_sign_epi8(points, signs), _mm256_set1_epi8(64));
    }
    static __m256i with_signs(__m256i points, uint32_t bits) {
        return with_signs(points, bits, bits >> 7, bits >> 14, bits >> 21);
    }
};

template <> struct ByteCodes<IQ2_XXS> : Lattice {
    static constexpr int BYTES = 66;
    void begin(const uint8_t *row) {
        block = row + 2;
        d = half(row) * 0.125f;
        uint64_t fours = 0;
        for (int g = 0; g < 8; g++) fours |= uint64_t(block[8 * g + 7] >> 4) << 8 * g;
        steps_of_32(odd(fours));
        set_minima(64 * d);
    }
    template <int G> __m256i codes() const {
        const uint64_t *table = (const uint64_t *)grid_iq2_xxs;
        const uint8_t *at = block + 8 * G;
        return with_signs(four_of(table[at[0]], table[at[1]], table[at[2]], table[at[3]]), word(at + 4));
    }
};

template <> struct ByteCodes<IQ2_XS> : Lattice {
    static constexpr int BYTES = 74;
    void begin(const uint8_t *row) {
        block = row + 2;
        d = half(row) * 0.125f;
        const __m128i both = _mm_set1_epi64x((long long)eight_bytes(row + 66)), mask = _mm_set1_epi8(15);
        const __m128i fours = _mm_and_si128(_mm_unpacklo_epi8(both, _mm_srli_epi16(both, 4)), mask);
        steps_of_sixteen(_mm_add_epi8(_mm_add_epi8(fours, fours), _mm_set1_epi8(1)));
        set_minima(64 * d);
    }
    template <int G> __m256i codes() const {
        const uint64_t *table = (const uint64_t *)grid_iq2_xs, words = eight_bytes(block + 8 * G);
        const __m256i points =
            four_of(table[words & 511], table[words >> 16 & 511], table[words >> 32 & 511], table[words >> 48 & 511]);
        return with_signs(points, words >> 9, words >> 25, words >> 41, words >> 57);
    }
};

template <> struct ByteCodes<IQ3_XXS> : Lattice {
    static constexpr int BYTES = 98;
    void begin(const uint8_t *row) {
        block = row + 2;
        d = half(row) * 0.25f;
        uint64_t fours = 0;
        for (int g = 0; g < 8; g++) fours |= uint64_t(row[66 + 4 * g + 3] >> 4) << 8 * g;
        steps_of_32(odd(fours));
        set_minima(64 * d);
    }
    template <int G> __m256i codes() const {
        const uint32_t *table = (const uint32_t *)grid_iq3_xxs;
        const uint8_t *at = block + 8 * G;
        const __m256i points =
            _mm256_setr_epi32(int(table[at[0]]), int(table[at[1]]), int(table[at[2]]), int(table[at[3]]), int(table[at[4]]),
                              int(table[at[5]]), int(table[at[6]]), int(table[at[7]]));
        return with_signs(points, word(block + 64 + 4 * G));
    }
};

// Group G of a block of ROWS rows with X rows of x.
template <int T, int ROWS, int X, int G>
inline void add_group(const ByteCodes<T> (&codes)[ROWS], const DigitChunk *x, int64_t stride, __m256i (&sums)[ROWS][X][3]) {
    typedef ByteCodes<T> Codes;
    const __m256i place = _mm256_set1_epi16(short(2 * G | (2 * G + 1) << 8));
#pragma GCC unroll 4
    for (int w = 0; w < ROWS; w++) {
        const __m256i own = codes[w].template codes<G>(), step = _mm256_shuffle_epi8(codes[w].steps, place);
        const __m256i positive = Codes::SIGNED ? _mm256_abs_epi8(own) : own;
#pragma GCC unroll 4
        for (int r = 0; r < X; r++)
#pragma GCC unroll 3
            for (int digit = 0; digit < 3; digit++) {
                __m256i values = load_32(x[r * stride].groups[G][digit]);
                if constexpr (Codes::SIGNED) values = _mm256_sign_epi8(values, own);
                const __m256i products = _mm256_madd_epi16(_mm256_maddubs_epi16(positive, values), step);
                sums[w][r][digit] = G ? _mm256_add_epi32(sums[w][r][digit], products) : products;
            }
    }
    if constexpr (G < 7) add_group<T, ROWS, X, G + 1>(codes, x, stride, sums);
}

// ROWS rows of a matrix from `row` on, with X rows of x. The operations of a row and a row of x do not depend on either.
template <int T, int ROWS, int X>
void few_digits(const Matrix &m, int64_t row, const DigitChunk *x, int64_t stride, float *out, int64_t out_stride,
                bool request) {
    typedef ByteCodes<T> Codes;
    __m256 acc[ROWS][X];
    const uint8_t *next = m.codes + row * m.row_bytes + prefetch_distance(m, ROWS);
    for (int w = 0; w < ROWS; w++)
        for (int r = 0; r < X; r++) acc[w][r] = _mm256_setzero_ps();
    for (int64_t chunk = 0; chunk < m.columns / CHUNK; chunk++) {
        if (request)
            for (int b = 0; b < ROWS * Codes::BYTES; b += 64) prefetch(next + b);
        next += ROWS * Codes::BYTES;
        Codes codes[ROWS];
#pragma GCC unroll 4
        for (int w = 0; w < ROWS; w++) codes[w].begin(m.codes + (row + w) * m.row_bytes + chunk * Codes::BYTES);
        __m256i sums[ROWS][X][3];
        add_group<T, ROWS, X, 0>(codes, x + chunk, stride, sums);
#pragma GCC unroll 4
        for (int w = 0; w < ROWS; w++)
#pragma GCC unroll 4
            for (int r = 0; r < X; r++) {
                const DigitChunk &own = x[r * stride + chunk];
                const __m256 base = _mm256_set1_ps(255.f);
                __m256 part = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[w][r][0]), base, _mm256_cvtepi32_ps(sums[w][r][1]));
                part = _mm256_fmadd_ps(part, base, _mm256_cvtepi32_ps(sums[w][r][2]));
                acc[w][r] = _mm256_fmadd_ps(part, _mm256_set1_ps(own.factor * codes[w].d), acc[w][r]);
                if constexpr (Codes::MINIMA) {
                    acc[w][r] = _mm256_fnmadd_ps(codes[w].minima[0], _mm256_load_ps(own.sums), acc[w][r]);
                    acc[w][r] = _mm256_fnmadd_ps(codes[w].minima[1], _mm256_load_ps(own.sums + 8), acc[w][r]);
                }
            }
    }
    for (int w = 0; w < ROWS; w++)
        for (int r = 0; r < X; r++) {
            const __m256 v = acc[w][r];
            const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
            const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            out[r * out_stride + w] = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
        }
}

}  // namespace
