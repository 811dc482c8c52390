// Products of bytes with few rows of x, for types whose codes are small integers.
//
// A processor with VNNI multiplies 64 codes and bytes of x at once and adds every four products to one of sixteen integers.
// 256 columns of x are integers of 22 bits times a power of two, in three signed bytes; the sums of their products are
// exact. Only x is rounded, to 2^-22 of the largest of its 256 columns. Codes are unsigned: a type adds OFFSET to its
// values, which the sums of x take out again. Scales are small integers times a float16 number and exact, too, so that
// results do not depend on how a compiler orders their products.

#pragma once

#include <vector>

#include "decode.h"

// VNNI: with AVX-512 and these instructions. Other processors with AVX2 have digits_avx2.h.
#if WIDE && defined(__AVX512VNNI__)
#define VNNI 1
#else
#define VNNI 0
#endif
#define DIGITS AVX2
#if AVX2 && !VNNI
#include "digits_avx2.h"
#endif

namespace {

constexpr bool has_digits(int64_t type) { return DIGITS && type >= Q2_K; }
#if !DIGITS
struct DigitChunk {};  // of inputs that have none
#endif

#if VNNI
// 256 columns of a row of x: the digits of every column, the highest first, in two orders.
struct alignas(64) DigitChunk {
    int8_t groups[8][3][32];   // 32 columns after the other
    int8_t strided[4][3][64];  // columns s, s + 4, s + 8, ...
    int32_t fours[8][8];       // sums of four columns, as integers
    // Where sums of products start, so that codes have no offset: group s beside group s + 4, and strided.
    int32_t half_start[3][16], strided_start[3][16];
    float sums[16];  // of sixteen columns
    float factor;
};

// The points of lattices in sixteen bits: eight coordinates 0, 1, 2 for 8, 25, 43, or four from 0 to 7 for 4, 12, ... 52, 62.
alignas(64) uint16_t points_iq2_xxs[256], points_iq2_xs[512], points_iq3_xxs[256];

template <int SIZE> void pack_points(const uint8_t (*grid)[SIZE], int count, uint16_t *points) {
    for (int i = 0; i < count; i++) {
        points[i] = 0;
        for (int k = 0; k < SIZE; k++) {
            const int value = grid[i][k], level = SIZE == 8 ? (value > 8) + (value > 25) : value / 8;
            points[i] |= uint16_t(level << (16 / SIZE * k));
        }
    }
}

constexpr int Q3_K_OFFSET = 127, LATTICE_OFFSET = 64;

inline __m512i ones(int value) { return _mm512_set1_epi8(char(value)); }
inline __m512i load_64(const void *at) { return _mm512_loadu_si512(at); }
inline __m256i load_32(const void *at) { return _mm256_loadu_si256((const __m256i *)at); }
inline __m512i join(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
inline uint64_t eight_bytes(const void *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}
// Bits of every byte. Shifts are of words: what crosses a byte is masked.
inline __m512i bits_of(__m512i bytes, int shift, int mask) {
    return _mm512_and_si512(shift >= 0 ? _mm512_srli_epi16(bytes, shift) : _mm512_slli_epi16(bytes, -shift), ones(mask));
}
// bytes | bit `bit` of every byte of `from`, moved to `place`.
inline __m512i with_bit(__m512i bytes, __m512i from, int bit, int place) {
    const __m512i moved = bit >= place ? _mm512_srli_epi16(from, bit - place) : _mm512_slli_epi16(from, place - bit);
    return _mm512_ternarylogic_epi32(bytes, moved, ones(1 << place), 0xF8);  // a | b & c
}

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
        for (int digit = 0; digit < 3; digit++) {
            const __m128i own = _mm512_cvtepi32_epi8(_mm512_srli_epi32(bytes, 8 * (2 - digit)));
            _mm_store_si128((__m128i *)(into.groups[k / 32][digit] + k % 32), own);
            const __m128i by_stride = _mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
            alignas(16) int32_t fours[4];
            _mm_store_si128((__m128i *)fours, _mm_shuffle_epi8(own, by_stride));
            for (int s = 0; s < 4; s++) memcpy(into.strided[s][digit] + k / 4, fours + s, 4);
        }
        // sums of four, then of sixteen, which are exact
        const __m512i two = _mm512_add_epi32(whole, _mm512_shuffle_epi32(whole, _MM_PERM_CDAB));
        const __m512i four = _mm512_add_epi32(two, _mm512_shuffle_epi32(two, _MM_PERM_BADC));
        const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
        const __m128i fours = _mm512_castsi512_si128(_mm512_permutexvar_epi32(firsts, four));
        _mm_store_si128((__m128i *)(into.fours[k / 32] + k % 32 / 4), fours);
        into.sums[k / 16] = into.factor * float(_mm512_reduce_add_epi32(whole));
    }
    for (int digit = 0; digit < 3; digit++) {
        __m512i halves = _mm512_setzero_si512(), strided = halves;
        for (int s = 0; s < 4; s++) {
            halves = _mm512_dpbusd_epi32(halves, ones(1), join(load_32(into.groups[s][digit]), load_32(into.groups[s + 4][digit])));
            strided = _mm512_dpbusd_epi32(strided, ones(1), load_64(into.strided[s][digit]));
        }
        _mm512_store_si512(into.half_start[digit], _mm512_mullo_epi32(halves, _mm512_set1_epi32(-Q3_K_OFFSET)));
        _mm512_store_si512(into.strided_start[digit], _mm512_mullo_epi32(strided, _mm512_set1_epi32(-LATTICE_OFFSET)));
    }
}

// ByteCodes<T>: a block of 256 columns in four steps of 64 codes. `x(chunk, s, digit)` are the digits that codes(s) belong
// to. Of types with ONE_SCALE, an integer that sums products of all steps has one scale, `scales`, and begins with
// start(chunk, digit) if there is an OFFSET. Other types have the scales of a step in scale(s). `minima` are what is
// subtracted for the sums of sixteen columns.
template <int T> struct ByteCodes;

// Group s of 32 columns beside group s + 4.
struct Halves {
    static __m512i x(const DigitChunk &own, int s, int digit) {
        return join(load_32(own.groups[s][digit]), load_32(own.groups[s + 4][digit]));
    }
    static __m512i start(const DigitChunk &own, int digit) { return load_64(own.half_start[digit]); }
};

// Columns s, s + 4, s + 8, ...: sixteen adjacent columns are added to one integer.
struct Strided {
    static __m512i x(const DigitChunk &own, int s, int digit) { return load_64(own.strided[s][digit]); }
    static __m512i start(const DigitChunk &own, int digit) { return load_64(own.strided_start[digit]); }
};

// Groups first(s) and first(s) + apart.
template <int APART> struct Pairs {
    static constexpr int first(int s) { return APART == 1 ? 2 * s : 4 * (s / 2) + s % 2; }
    static __m512i x(const DigitChunk &own, int s, int digit) {
        return join(load_32(own.groups[first(s)][digit]), load_32(own.groups[first(s) + APART][digit]));
    }
    static __m512i fours(const DigitChunk &own, int s) {
        return join(load_32(own.fours[first(s)]), load_32(own.fours[first(s) + APART]));
    }
    // Eight scales of 32 columns, or sixteen of sixteen, to the lanes of a step.
    static __m512 of_eight(__m512 scales, int s) {
        const int a = first(s), b = a + APART;
        return _mm512_permutexvar_ps(_mm512_set_epi32(b, b, b, b, b, b, b, b, a, a, a, a, a, a, a, a), scales);
    }
    static __m512 of_sixteen(__m512 scales, int s) {
        const int a = 2 * first(s), b = a + 2 * APART, c = a + 1, d = b + 1;
        return _mm512_permutexvar_ps(_mm512_set_epi32(d, d, d, d, b, b, b, b, c, c, c, c, a, a, a, a), scales);
    }
};

// A code is looked up in a table of its multiples, one for sixteen columns.
template <> struct ByteCodes<Q2_K> : Halves {
    static constexpr int BYTES = 84, OFFSET = 0;
    static constexpr bool ONE_SCALE = true, MINIMA = true;
    __m512i block, multiples;
    __m512 scales, minima;
    void begin(const uint8_t *row) {
        block = load_64(row + 16);
        scales = _mm512_set1_ps(half(row + 80));
        const __m128i both = _mm_loadu_si128((const __m128i *)row), mask = _mm_set1_epi8(15);
        const __m128i own = _mm_and_si128(both, mask), least = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
        multiples = _mm512_mullo_epi32(_mm512_cvtepi8_epi32(own), _mm512_set1_epi32(0x03020100));
        minima = _mm512_mul_ps(signed_bytes(least), _mm512_set1_ps(half(row + 82)));
    }
    __m512i codes(int s) const {
        const int a = 2 * s, b = a + 1, c = a + 8, d = b + 8;
        const __m512i lanes = _mm512_set_epi32(d, d, d, d, c, c, c, c, b, b, b, b, a, a, a, a);
        return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(lanes, multiples), bits_of(block, 2 * s, 3));
    }
};

template <> struct ByteCodes<Q3_K> : Halves {
    static constexpr int BYTES = 110, OFFSET = Q3_K_OFFSET;
    static constexpr bool ONE_SCALE = true, MINIMA = false;
    __m512i block, top, multiples[2];  // of groups 0, 1, 4, 5, 8, ... and of groups 2, 3, 6, 7, 10, ...
    __m512 scales;
    void begin(const uint8_t *row) {
        block = load_64(row + 32);
        const __m256i high = load_32(row);
        top = join(high, _mm256_srli_epi16(high, 4));
        scales = _mm512_set1_ps(half(row + 108));
        const uint64_t low = eight_bytes(row + 96), nibbles = 0x0f0f0f0f0f0f0f0full, pairs = 0x03030303;
        const uint64_t above = word(row + 104);
        const uint64_t first = (above & pairs) | (above >> 2 & pairs) << 32, last = (above >> 4 & pairs) | (above >> 6 & pairs) << 32;
        const __m128i bytes = _mm_set_epi64x((low >> 4 & nibbles) | last << 4, (low & nibbles) | first << 4);
        const __m512i own = _mm512_cvtepi8_epi32(bytes);  // 32 more than they stand for
        // (c - 4) (scale - 32) + 127 for codes c from 0 to 3 and from 4 to 7: no byte carries
        const __m512i lower = _mm512_sub_epi32(_mm512_set1_epi32(int(0x9fbfdfffu)), _mm512_mullo_epi32(own, _mm512_set1_epi32(0x01020304)));
        const __m512i upper = _mm512_add_epi32(_mm512_set1_epi32(0x1f3f5f7f), _mm512_mullo_epi32(own, _mm512_set1_epi32(0x03020100)));
        multiples[0] = _mm512_unpacklo_epi32(lower, upper);
        multiples[1] = _mm512_unpackhi_epi32(lower, upper);
    }
    __m512i codes(int s) const {
        // the tables of groups 2 s, 2 s + 1, 2 s + 8 and 2 s + 9 of sixteen columns
        const int a = 2 * (s / 2), b = a + 1, c = a + 4, d = b + 4;
        const __m512i lanes = _mm512_set_epi64(d, d, c, c, b, b, a, a);
        const __m512i table = _mm512_permutexvar_epi64(lanes, multiples[s % 2]);
        return _mm512_shuffle_epi8(table, with_bit(bits_of(block, 2 * s, 3), top, s, 2));
    }
};

// Eight scales and minima of six bits.
struct SixBits : Pairs<2> {
    __m512 own, minima;
    void unpack(const uint8_t *row) {
        const uint32_t a = word(row + 4), b = word(row + 8), c = word(row + 12);
        const uint64_t both = (a & 0x3f3f3f3f) | uint64_t((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)) << 32;
        const uint64_t least = (b & 0x3f3f3f3f) | uint64_t((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)) << 32;
        own = _mm512_mul_ps(signed_bytes(_mm_cvtsi64_si128((long long)both)), _mm512_set1_ps(half(row)));
        const __m128i twice = _mm_unpacklo_epi8(_mm_cvtsi64_si128((long long)least), _mm_cvtsi64_si128((long long)least));
        minima = _mm512_mul_ps(signed_bytes(twice), _mm512_set1_ps(half(row + 2)));
    }
    __m512 scale(int s) const { return of_eight(own, s); }
};

template <> struct ByteCodes<Q4_K> : SixBits {
    static constexpr int BYTES = 144, OFFSET = 0;
    static constexpr bool ONE_SCALE = false, MINIMA = true;
    const uint8_t *block;
    void begin(const uint8_t *row) { unpack(block = row); }
    __m512i codes(int s) const { return bits_of(load_64(block + 16 + 64 * (s / 2)), 4 * (s % 2), 15); }
};

template <> struct ByteCodes<Q5_K> : SixBits {
    static constexpr int BYTES = 176, OFFSET = 0;
    static constexpr bool ONE_SCALE = false, MINIMA = true;
    const uint8_t *block;
    __m512i top;
    void begin(const uint8_t *row) {
        unpack(block = row);
        const __m256i high = load_32(row + 16);
        top = join(high, _mm256_srli_epi16(high, 2));
    }
    __m512i codes(int s) const {
        return with_bit(bits_of(load_64(block + 48 + 64 * (s / 2)), 4 * (s % 2), 15), top, first(s), 4);
    }
};

template <> struct ByteCodes<Q6_K> : Pairs<1> {
    static constexpr int BYTES = 210, OFFSET = 32;
    static constexpr bool ONE_SCALE = false, MINIMA = false;
    const uint8_t *block;
    __m512 own;
    void begin(const uint8_t *row) {
        block = row;
        own = _mm512_mul_ps(signed_bytes(_mm_loadu_si128((const __m128i *)(row + 192))), _mm512_set1_ps(half(row + 208)));
    }
    __m512i codes(int s) const {
        const __m256i top = load_32(block + 128 + 32 * (s / 2));
        const __m512i low = bits_of(load_64(block + 64 * (s / 2)), 4 * (s % 2), 15);
        const __m512i high = bits_of(join(top, _mm256_srli_epi16(top, 2)), s % 2 ? 0 : -4, 48);
        return _mm512_or_si512(low, high);
    }
    __m512 scale(int s) const { return of_sixteen(own, s); }
};

// Seven signs of eight columns from bits FIRST + STEP k on of every eight bytes, k = 0 to 3; an eighth makes their number
// even. Two bytes for each: their low halves are the signs of the first and of the last four columns.
template <int FIRST, int STEP> inline __m512i signs_of(__m512i words) {
#if defined(__GFNI__) && defined(__AVX512VBMI__)
    constexpr uint64_t twice = 0x0101, a = FIRST * twice, b = (FIRST + STEP) * twice, c = (FIRST + 2 * STEP) * twice,
                       d = (FIRST + 3 * STEP) * twice;
    __m512i signs = _mm512_multishift_epi64_epi8(_mm512_set1_epi64((long long)(a | b << 16 | c << 32 | d << 48)), words);
    // a matrix of bits: seven as they are, then their sum
    signs = _mm512_gf2p8affine_epi64_epi8(signs, _mm512_set1_epi64(0x010204081020407F), 0);
#else
    __m512i signs = _mm512_setzero_si512();
    for (int k = 0; k < 4; k++) {
        const __m512i seven = _mm512_and_si512(_mm512_srli_epi64(words, FIRST + STEP * k), _mm512_set1_epi64(127));
        signs = _mm512_or_si512(signs, _mm512_slli_epi64(seven, 16 * k));
    }
    __m512i parity = _mm512_xor_si512(signs, _mm512_srli_epi16(signs, 4));
    parity = _mm512_xor_si512(parity, _mm512_srli_epi16(parity, 2));
    parity = _mm512_xor_si512(parity, _mm512_srli_epi16(parity, 1));
    signs = _mm512_or_si512(signs, _mm512_slli_epi16(_mm512_and_si512(parity, _mm512_set1_epi16(1)), 7));
    signs = _mm512_or_si512(signs, _mm512_slli_epi16(signs, 8));
#endif
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(0xff), signs, _mm512_srli_epi16(signs, 4), 0xCA);  // a ? b : c
}

// Coordinates and signs of points of a lattice. Four adjacent columns have a byte of signs, so that step s takes columns s,
// s + 4, ... Both together are an index of a table of bytes.
struct Lattice : Strided {
    static constexpr int OFFSET = LATTICE_OFFSET;
    static constexpr bool ONE_SCALE = true, MINIMA = false;
    __m512i signs;
    __m512 scales;
    // 28 bits of signs and four of a scale, from bit FIRST of every eight bytes on.
    template <int FIRST> void unpack(__m512i words, float d) {
        signs = signs_of<FIRST, 7>(words);
        __m512i steps = _mm512_srli_epi64(words, FIRST + 28);
        steps = _mm512_shuffle_epi32(steps, _MM_PERM_CCAA);  // of sixteen columns each
        scales = _mm512_fmadd_ps(_mm512_cvtepi32_ps(steps), _mm512_set1_ps(2.f * d), _mm512_set1_ps(d));
    }
};

// Eight coordinates of two bits.
struct TwoBitPoints : Lattice {
    __m512i points;
    __m512i codes(int s) const {
        const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(72, 89, 107, 0, 56, 39, 21, 0, 0, 0, 0, 0, 0, 0, 0, 0));
        return _mm512_shuffle_epi8(table, with_bit(bits_of(points, 2 * s, 3), signs, s, 2));
    }
};

// Entries `index` of a table: 64 at once, then the right ones by a further bit of the index after the other.
template <int COUNT> inline __m512i look_up(const uint16_t *table, __m512i index) {
    if constexpr (COUNT == 64) {
        return _mm512_permutex2var_epi16(load_64(table), index, load_64(table + 32));
    } else {
        const __mmask32 upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16(COUNT / 2));
        return _mm512_mask_blend_epi16(upper, look_up<COUNT / 2>(table, index), look_up<COUNT / 2>(table + COUNT / 2, index));
    }
}

template <> struct ByteCodes<IQ2_XXS> : TwoBitPoints {
    static constexpr int BYTES = 66;
    void begin(const uint8_t *row) {
        const __m512i words = load_64(row + 2);  // eight times four points, then signs and a scale
        points = look_up<256>(points_iq2_xxs, _mm512_cvtepu8_epi16(_mm512_cvtepi64_epi32(words)));
        unpack<32>(words, half(row) * 0.125f);
    }
};

template <> struct ByteCodes<IQ2_XS> : TwoBitPoints {
    static constexpr int BYTES = 74;
    void begin(const uint8_t *row) {
        const __m512i words = load_64(row + 2);  // nine bits of a point and seven signs
        points = look_up<512>(points_iq2_xs, words);
        signs = signs_of<9, 16>(words);
        const __m128i both = _mm_cvtsi64_si128((long long)eight_bytes(row + 66)), mask = _mm_set1_epi8(15);
        const __m128i steps = _mm_and_si128(_mm_unpacklo_epi8(both, _mm_srli_epi16(both, 4)), mask);
        const __m128i odd = _mm_add_epi8(_mm_add_epi8(steps, steps), _mm_set1_epi8(1));
        scales = _mm512_mul_ps(signed_bytes(odd), _mm512_set1_ps(half(row) * 0.125f));
    }
};

template <> struct ByteCodes<IQ3_XXS> : Lattice {
    static constexpr int BYTES = 98;
    __m512i points[2];  // the first two and the last two coordinates of 64 points, four bits each
    void begin(const uint8_t *row) {
        const __m512i low = look_up<256>(points_iq3_xxs, _mm512_cvtepu8_epi16(load_32(row + 2)));
        const __m512i high = look_up<256>(points_iq3_xxs, _mm512_cvtepu8_epi16(load_32(row + 34)));
        for (int i = 0; i < 2; i++)
            points[i] = join(_mm512_cvtepi16_epi8(_mm512_srli_epi16(low, 8 * i)), _mm512_cvtepi16_epi8(_mm512_srli_epi16(high, 8 * i)));
        unpack<0>(_mm512_cvtepu32_epi64(load_32(row + 66)), half(row) * 0.25f);
    }
    __m512i codes(int s) const {
        const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(68, 76, 84, 92, 100, 108, 116, 126, 60, 52, 44, 36, 28, 20, 12, 2));
        return _mm512_shuffle_epi8(table, with_bit(bits_of(points[s / 2], 4 * (s % 2), 7), signs, s, 3));
    }
};

template <> struct ByteCodes<IQ4_XS> : Pairs<1> {
    static constexpr int BYTES = 136, OFFSET = 128;
    static constexpr bool ONE_SCALE = false, MINIMA = false;
    const uint8_t *block;
    __m512 own;
    void begin(const uint8_t *row) {
        block = row + 8;
        const __m256i by_four = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0), by_two = _mm256_srli_epi32(by_four, 1);
        const __m256i low = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(int(word(row + 4))), by_four), _mm256_set1_epi32(15));
        const __m256i high = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(row[2] | row[3] << 8), by_two), _mm256_set1_epi32(3));
        const __m256i steps = _mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)), _mm256_set1_epi32(32));
        own = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_castsi256_si512(steps)), _mm512_set1_ps(half(row)));
    }
    __m512i codes(int s) const {
        const __m512i table = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)iq4_levels)), ones(-128));
        // sixteen bytes of a group in two lanes: their low and their high halves
        const __m512i twice = _mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0);
        const __m512i both = _mm512_permutexvar_epi64(twice, _mm512_castsi256_si512(load_32(block + 32 * s)));
        const __m512i shifts = _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0);
        return _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srlv_epi64(both, shifts), ones(15)));
    }
    __m512 scale(int s) const { return of_eight(own, s); }
};

// ROWS rows of a matrix from `row` on, with X rows of x. The operations of a row and a row of x do not depend on either.
template <int T, int ROWS, int X>
void few_digits(const Matrix &m, int64_t row, const DigitChunk *x, int64_t stride, float *out, int64_t out_stride,
                bool request) {
    typedef ByteCodes<T> Codes;
    __m512 acc[ROWS][X];
    const uint8_t *next = m.codes + row * m.row_bytes + prefetch_distance(m, ROWS);
#pragma GCC unroll 4
    for (int w = 0; w < ROWS; w++)
#pragma GCC unroll 4
        for (int r = 0; r < X; r++) acc[w][r] = _mm512_setzero_ps();
    for (int64_t chunk = 0; chunk < m.columns / CHUNK; chunk++) {
        Codes codes[ROWS];
        __m512 part[ROWS][X];
        __m512i sums[ROWS][X][3];
        if (request)
#pragma GCC unroll 16
            for (int b = 0; b < ROWS * Codes::BYTES; b += 64) prefetch(next + b);
        next += ROWS * Codes::BYTES;
#pragma GCC unroll 4
        for (int w = 0; w < ROWS; w++) {
            codes[w].begin(m.codes + (row + w) * m.row_bytes + chunk * Codes::BYTES);
#pragma GCC unroll 4
            for (int r = 0; r < X; r++) {
                part[w][r] = _mm512_setzero_ps();
                for (int digit = 0; digit < 3; digit++) {
                    if constexpr (Codes::ONE_SCALE && Codes::OFFSET) sums[w][r][digit] = Codes::start(x[r * stride + chunk], digit);
                    else sums[w][r][digit] = _mm512_setzero_si512();
                }
            }
        }
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            __m512i bytes[ROWS];
            __m512 scales[ROWS];
#pragma GCC unroll 4
            for (int w = 0; w < ROWS; w++) {
                bytes[w] = codes[w].codes(s);
                if constexpr (!Codes::ONE_SCALE) scales[w] = codes[w].scale(s);
            }
#pragma GCC unroll 4
            for (int r = 0; r < X; r++) {
                const DigitChunk &own = x[r * stride + chunk];
                __m512i digits[3], offset = _mm512_setzero_si512();
#pragma GCC unroll 3
                for (int digit = 0; digit < 3; digit++) {
                    digits[digit] = Codes::x(own, s, digit);
                    in_register(digits[digit]);
                }
                if constexpr (Codes::OFFSET && !Codes::ONE_SCALE)
                    offset = _mm512_mullo_epi32(Codes::fours(own, s), _mm512_set1_epi32(Codes::OFFSET));
#pragma GCC unroll 4
                for (int w = 0; w < ROWS; w++) {
                    if constexpr (Codes::ONE_SCALE) {
#pragma GCC unroll 3
                        for (int digit = 0; digit < 3; digit++)
                            sums[w][r][digit] = _mm512_dpbusd_epi32(sums[w][r][digit], bytes[w], digits[digit]);
                    } else {
                        __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes[w], digits[0]);
                        sum = _mm512_dpbusd_epi32(_mm512_slli_epi32(sum, 8), bytes[w], digits[1]);
                        sum = _mm512_dpbusd_epi32(_mm512_slli_epi32(sum, 8), bytes[w], digits[2]);
                        if (Codes::OFFSET) sum = _mm512_sub_epi32(sum, offset);
                        part[w][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scales[w], part[w][r]);
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < X; r++) {
            const DigitChunk &own = x[r * stride + chunk];
#pragma GCC unroll 4
            for (int w = 0; w < ROWS; w++) {
                __m512 factor = _mm512_set1_ps(own.factor);
                if constexpr (Codes::ONE_SCALE) {
                    factor = _mm512_mul_ps(factor, codes[w].scales);
                    for (int digit = 0; digit < 3; digit++)
                        part[w][r] = _mm512_fmadd_ps(part[w][r], _mm512_set1_ps(256.f), _mm512_cvtepi32_ps(sums[w][r][digit]));
                }
                acc[w][r] = _mm512_fmadd_ps(part[w][r], factor, acc[w][r]);
                if constexpr (Codes::MINIMA) acc[w][r] = _mm512_fnmadd_ps(codes[w].minima, _mm512_load_ps(own.sums), acc[w][r]);
            }
        }
    }
#pragma GCC unroll 4
    for (int w = 0; w < ROWS; w++)
#pragma GCC unroll 4
        for (int r = 0; r < X; r++) out[r * out_stride + w] = _mm512_reduce_add_ps(acc[w][r]);
}
#endif

#if DIGITS
// Rows [first, stop) of the product, for n rows of x.
template <int T>
void digit_rows(const Matrix &m, int64_t first, int64_t stop, const DigitChunk *x, int64_t stride, int n, float *out,
                int64_t out_stride) {
    // Rows of the matrix at a time, as many as registers hold: with one row of x, and with four.
    constexpr int ROWS = VNNI ? 4 : 1, ROWS_FOR_FOUR = VNNI ? 2 : 1;
    int64_t row = first;
    for (; row + ROWS <= stop; row += ROWS) {
        int r = 0;
        for (; r + 4 <= n; r += 4)
            for (int w = 0; w < ROWS; w += ROWS_FOR_FOUR)
                few_digits<T, ROWS_FOR_FOUR, 4>(m, row + w, x + r * stride, stride, out + r * out_stride + row + w, out_stride, r == 0);
        for (; r < n; r++)
            few_digits<T, ROWS, 1>(m, row, x + r * stride, stride, out + r * out_stride + row, out_stride, r == 0);
    }
    for (; row < stop; row++)
        for (int r = 0; r < n; r++)
            few_digits<T, 1, 1>(m, row, x + r * stride, stride, out + r * out_stride + row, out_stride, r == 0);
}
#endif

}  // namespace
