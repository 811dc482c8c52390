// Packed matrices and the decoding of their codes to float32. The types are those of types.py.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// WIDE: AVX-512. AVX2: at least that, with FMA and conversions of float16. Other processors get what the compiler makes of
// vector types and plain loops.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE 1
#else
#define WIDE 0
#endif
#if WIDE || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#define AVX2 1
#include <immintrin.h>
#else
#define AVX2 0
#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif
#endif

// One copy of a function for all callers, so that all of them get the same bits.
#if defined(__GNUC__) && !defined(__clang__)
#define ONE_COPY __attribute__((noinline, noclone))
#else
#define ONE_COPY __attribute__((noinline))
#endif

enum Type { F32, F16, BF16, FP8, FP4, Q8_0, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ2_XS, IQ3_XXS, IQ4_XS };

// One matrix, as Python passes it. scale_rows: rows that share a scale (128 for FP8, 1 for FP4).
struct Matrix {
    int64_t type, rows, columns, row_bytes;
    const uint8_t *codes, *scales;
    int64_t scale_rows, scale_stride;
};

namespace {

constexpr int CHUNK = 256;  // columns decoded at a time: a multiple of every block size
constexpr int LANES = WIDE ? 16 : 8;
typedef float Vec __attribute__((vector_size(4 * LANES)));

float e8m0_table[256];
float e4m3_table[256];
uint8_t grid_iq2_xxs[256][8], grid_iq2_xs[512][8], grid_iq3_xxs[256][4];
int8_t sign_table[128][8];
const float fp4_levels[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
const int8_t fp4_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// The two upper bytes of the levels of FP4 as float32; their other bytes are zero.
const uint8_t fp4_first_bytes[16] = {0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
const uint8_t fp4_second_bytes[16] = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0, 0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0};
const int8_t iq4_levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline float half(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
#if AVX2
    return _cvtsh_ss(bits);
#else
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) return (sign ? -1.f : 1.f) * float(mantissa) * 5.9604644775390625e-8f;
    return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
#endif
}

inline uint32_t word(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

// Sixteen bytes, and the same bits as eight words: processors have no shifts of bytes.
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Words __attribute__((vector_size(16)));

inline Bytes load_bytes(const uint8_t *at) {
    Bytes bytes;
    memcpy(&bytes, at, 16);
    return bytes;
}

// Bits [shift, ...) under `mask` of every byte.
inline Bytes bits_of(Bytes bytes, int shift, int mask) { return Bytes(Words(bytes) >> uint16_t(shift)) & uint8_t(mask); }

// table[i] for sixteen indices below 16.
inline Bytes look_up(const int8_t *table, Bytes index) {
#if AVX2
    return Bytes(_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)table), __m128i(index)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return Bytes(vqtbl1q_s8(vld1q_s8(table), uint8x16_t(index)));
#else
    Bytes out;
    for (int j = 0; j < 16; j++) out[j] = uint8_t(table[index[j]]);
    return out;
#endif
}

// a[0], b[0], a[1], b[1], ...: the first eight of both, and the last.
inline void interleave(Bytes a, Bytes b, Bytes &low, Bytes &high) {
#if AVX2
    low = Bytes(_mm_unpacklo_epi8(__m128i(a), __m128i(b)));
    high = Bytes(_mm_unpackhi_epi8(__m128i(a), __m128i(b)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    low = Bytes(vzip1q_u8(uint8x16_t(a), uint8x16_t(b)));
    high = Bytes(vzip2q_u8(uint8x16_t(a), uint8x16_t(b)));
#else
    for (int j = 0; j < 8; j++) {
        low[2 * j] = a[j], low[2 * j + 1] = b[j];
        high[2 * j] = a[j + 8], high[2 * j + 1] = b[j + 8];
    }
#endif
}

// out[0 .. 16) = a * values + b for sixteen signed bytes.
inline void store16(Bytes values, float a, float b, float *out) {
#if WIDE
    const __m512 wide = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(__m128i(values)));
    _mm512_storeu_ps(out, _mm512_fmadd_ps(wide, _mm512_set1_ps(a), _mm512_set1_ps(b)));
#elif AVX2
    const __m128i both = __m128i(values);
    const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(both));
    const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(both, both)));
    _mm256_storeu_ps(out, _mm256_fmadd_ps(low, _mm256_set1_ps(a), _mm256_set1_ps(b)));
    _mm256_storeu_ps(out + 8, _mm256_fmadd_ps(high, _mm256_set1_ps(a), _mm256_set1_ps(b)));
#else
    int8_t each[16];
    memcpy(each, &values, 16);
    for (int j = 0; j < 16; j++) out[j] = a * float(each[j]) + b;
#endif
}

inline Vec load(const float *at) {
    Vec value;
    memcpy(&value, at, sizeof value);
    return value;
}

inline void store(float *at, Vec value) { memcpy(at, &value, sizeof value); }

inline Vec splat(float value) { return value - Vec{}; }

// Keep a value in a register: a compiler reads it from memory wherever it is used instead, and loads are scarce.
template <class Value> inline void in_register(Value &value) {
#if AVX2
    asm("" : "+v"(value));
#else
    (void)value;
#endif
}

// a * b + c, rounded once where the processor can. The compiler keeps the order of these sums, whatever a loop's length.
inline Vec fused(Vec a, Vec b, Vec c) {
#if WIDE
    return Vec(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif AVX2
    return Vec(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#else
    return a * b + c;
#endif
}

inline float total(Vec v) {
#if WIDE
    return _mm512_reduce_add_ps(__m512(v));
#elif AVX2
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(__m256(v)), _mm256_extractf128_ps(__m256(v), 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += v[lane];
    return sum;
#endif
}

// LANES numbers of other types. E4M3 codes are 2^8 too small: their bits are those of float16. NaN codes, which loaders
// reject, become 480.
#if WIDE
inline Vec signed_bytes(__m128i bytes) { return Vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))); }
inline Vec signed_bytes(const uint8_t *at) { return signed_bytes(_mm_loadu_si128((const __m128i *)at)); }
inline Vec float16s(const uint8_t *at) { return Vec(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at))); }
inline Vec bfloat16s(const uint8_t *at) {
    return Vec(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16));
}
inline Vec e4m3(const uint8_t *at) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at));
    return Vec(_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xBFFF)))));
}
#elif AVX2
inline Vec signed_bytes(__m128i bytes) { return Vec(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))); }
inline Vec signed_bytes(const uint8_t *at) { return signed_bytes(_mm_loadl_epi64((const __m128i *)at)); }
inline Vec float16s(const uint8_t *at) { return Vec(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at))); }
inline Vec bfloat16s(const uint8_t *at) {
    return Vec(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16));
}
inline Vec e4m3(const uint8_t *at) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)at));
    return Vec(_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(short(0xBFFF)))));
}
#endif

// decode<T>(codes of a row, scales of a row, first column, count, out): columns [first, first + count) as float32.

template <int T> void decode(const uint8_t *row, const uint8_t *scales, int first, int count, float *out);

template <> void decode<F32>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    memcpy(out, row + 4 * int64_t(first), 4 * size_t(count));
}

template <> void decode<F16>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += 2 * int64_t(first);
    int j = 0;
#if AVX2
    for (; j + LANES <= count; j += LANES) store(out + j, float16s(row + 2 * j));
#endif
    for (; j < count; j++) out[j] = half(row + 2 * j);
}

template <> void decode<BF16>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += 2 * int64_t(first);
    for (int j = 0; j < count; j++) {
        uint16_t bits;
        memcpy(&bits, row + 2 * j, 2);
        out[j] = bits_to_float(uint32_t(bits) << 16);
    }
}

template <> void decode<FP8>(const uint8_t *row, const uint8_t *scales, int first, int count, float *out) {
    row += first;
    for (int start = 0; start < count;) {  // pieces under one scale
        const int stop = std::min(count, start + 128 - (first + start) % 128);
        const float scale = e8m0_table[scales[(first + start) / 128]];
        int j = start;
#if AVX2
        for (; j + LANES <= stop; j += LANES) store(out + j, e4m3(row + j) * 256.f * scale);
#endif
        for (; j < stop; j++) out[j] = e4m3_table[row[j]] * scale;
        start = stop;
    }
}

template <> void decode<FP4>(const uint8_t *row, const uint8_t *scales, int first, int count, float *out) {
    row += first / 2;
    scales += first / 32;
    for (int g = 0; g < count / 32; g++, row += 16, out += 32) {
        const float scale = e8m0_table[scales[g]];
#if WIDE
        const __m512 table = _mm512_loadu_ps(fp4_levels), factor = _mm512_set1_ps(scale);
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)row));
        const __m512 even = _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), factor);
        const __m512 odd = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table), factor);
        const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        _mm512_storeu_ps(out, _mm512_permutex2var_ps(even, low, odd));
        _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(even, high, odd));
#else
        const Bytes codes = load_bytes(row);
        const Bytes even = look_up(fp4_doubled, codes & uint8_t(15)), odd = look_up(fp4_doubled, bits_of(codes, 4, 15));
        Bytes low, high;
        interleave(even, odd, low, high);
        store16(low, 0.5f * scale, 0.f, out);
        store16(high, 0.5f * scale, 0.f, out + 16);
#endif
    }
}

template <> void decode<Q8_0>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += int64_t(first / 32) * 34;
    for (int g = 0; g < count / 32; g++, row += 34, out += 32) {
        const float scale = half(row);
        for (int part = 0; part < 32; part += 16) store16(load_bytes(row + 2 + part), scale, 0.f, out + part);
    }
}

template <> void decode<MXFP4>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += int64_t(first / 32) * 17;
    for (int g = 0; g < count / 32; g++, row += 17, out += 32) {
        const float scale = e8m0_table[row[0]];
#if WIDE
        const __m512 table = _mm512_loadu_ps(fp4_levels), factor = _mm512_set1_ps(scale);
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(row + 1)));
        _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), factor));
        const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table);
        _mm512_storeu_ps(out + 16, _mm512_mul_ps(high, factor));
#else
        const Bytes codes = load_bytes(row + 1);
        store16(look_up(fp4_doubled, codes & uint8_t(15)), 0.5f * scale, 0.f, out);
        store16(look_up(fp4_doubled, bits_of(codes, 4, 15)), 0.5f * scale, 0.f, out + 16);
#endif
    }
}

// out[0 .. 16) = a * (((codes >> shift) & mask) + ((top >> top_shift) & top_mask) * high - offset) + b. `high` is 4 or 16.
inline void fields(const uint8_t *codes, int shift, int mask, const uint8_t *top, int top_shift, int top_mask, int high,
                   int offset, float a, float b, float *out) {
    Bytes values = bits_of(load_bytes(codes), shift, mask);
    if (top) values |= Bytes(Words(bits_of(load_bytes(top), top_shift, top_mask)) << uint16_t(high == 4 ? 2 : 4));
    store16(values - uint8_t(offset), a, b, out);
}

template <> void decode<Q2_K>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += int64_t(first / 256) * 84;
    for (int block = 0; block < count / 256; block++, row += 84) {
        const float d = half(row + 80), least = half(row + 82);
        for (int group = 0; group < 16; group++, out += 16) {
            const uint8_t scale = row[group];
            const uint8_t *codes = row + 16 + 32 * (group / 8) + 16 * (group % 2);
            fields(codes, 2 * (group / 2 % 4), 3, nullptr, 0, 0, 0, 0, d * float(scale & 15), -least * float(scale >> 4), out);
        }
    }
}

template <> void decode<Q3_K>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += int64_t(first / 256) * 110;
    for (int block = 0; block < count / 256; block++, row += 110) {
        const float d = half(row + 108);
        for (int group = 0; group < 16; group++, out += 16) {
            const int low = (row[96 + group % 8] >> (4 * (group / 8))) & 15;
            const int high = (row[104 + group % 4] >> (2 * (group / 4))) & 3;
            const float step = d * float((low | high << 4) - 32);
            const uint8_t *codes = row + 32 + 32 * (group / 8) + 16 * (group % 2), *top = row + 16 * (group % 2);
            fields(codes, 2 * (group / 2 % 4), 3, top, group / 2, 1, 4, 4, step, 0.f, out);
        }
    }
}

inline void scale_and_minimum(const uint8_t *packed, int group, float &scale, float &least) {
    if (group < 4) {
        scale = float(packed[group] & 63);
        least = float(packed[group + 4] & 63);
    } else {
        scale = float((packed[group + 4] & 15) | ((packed[group - 4] >> 2) & 48));
        least = float((packed[group + 4] >> 4) | ((packed[group] >> 2) & 48));
    }
}

template <> void decode<Q4_K>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += int64_t(first / 256) * 144;
    for (int block = 0; block < count / 256; block++, row += 144) {
        const float d = half(row), dmin = half(row + 2);
        for (int group = 0; group < 8; group++, out += 32) {
            float scale, least;
            scale_and_minimum(row + 4, group, scale, least);
            for (int part = 0; part < 32; part += 16)
                fields(row + 16 + 32 * (group / 2) + part, 4 * (group % 2), 15, nullptr, 0, 0, 0, 0, d * scale, -dmin * least,
                       out + part);
        }
    }
}

template <> void decode<Q5_K>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += int64_t(first / 256) * 176;
    for (int block = 0; block < count / 256; block++, row += 176) {
        const float d = half(row), dmin = half(row + 2);
        for (int group = 0; group < 8; group++, out += 32) {
            float scale, least;
            scale_and_minimum(row + 4, group, scale, least);
            const uint8_t *codes = row + 48 + 32 * (group / 2), *top = row + 16;
            for (int part = 0; part < 32; part += 16)
                fields(codes + part, 4 * (group % 2), 15, top + part, group, 1, 16, 0, d * scale, -dmin * least, out + part);
        }
    }
}

template <> void decode<Q6_K>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += int64_t(first / 256) * 210;
    for (int block = 0; block < count / 256; block++, row += 210) {
        const float d = half(row + 208);
        const int8_t *scales = (const int8_t *)(row + 192);
        for (int group = 0; group < 8; group++, out += 32) {
            const uint8_t *low = row + 64 * (group / 4) + 32 * (group % 2), *high = row + 128 + 32 * (group / 4);
            for (int part = 0; part < 2; part++)
                fields(low + 16 * part, 4 * (group / 2 % 2), 15, high + 16 * part, 2 * (group % 4), 3, 16, 32,
                       d * float(scales[2 * group + part]), 0.f, out + 16 * part);
        }
    }
}

// Eight magnitudes times eight signs times a step.
inline void lattice(const uint8_t *grid, const int8_t *signs, float step, float *out) {
#if AVX2
    const __m256i magnitudes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)grid));
    const __m256i factors = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)signs));
    const __m256 values = _mm256_cvtepi32_ps(_mm256_sign_epi32(magnitudes, factors));
    _mm256_storeu_ps(out, _mm256_mul_ps(values, _mm256_set1_ps(step)));
#else
    for (int j = 0; j < 8; j++) out[j] = step * float(grid[j]) * float(signs[j]);
#endif
}

template <> void decode<IQ2_XXS>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += int64_t(first / 256) * 66;
    for (int block = 0; block < count / 256; block++, row += 66) {
        const float d = half(row);
        for (int group = 0; group < 8; group++, out += 32) {
            const uint8_t *at = row + 2 + 8 * group;
            const uint32_t aux = word(at + 4);
            const float step = d * (0.5f + float(aux >> 28)) * 0.25f;
            for (int k = 0; k < 4; k++)
                lattice(grid_iq2_xxs[at[k]], sign_table[(aux >> (7 * k)) & 127], step, out + 8 * k);
        }
    }
}

template <> void decode<IQ2_XS>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += int64_t(first / 256) * 74;
    for (int block = 0; block < count / 256; block++, row += 74) {
        const float d = half(row);
        for (int k = 0; k < 32; k += 2, out += 16) {
            const float step = d * (0.5f + float((row[66 + k / 4] >> (2 * (k % 4))) & 15)) * 0.25f;
            const uint32_t pair = word(row + 2 + 2 * k);
            lattice(grid_iq2_xs[pair & 511], sign_table[(pair >> 9) & 127], step, out);
            lattice(grid_iq2_xs[(pair >> 16) & 511], sign_table[pair >> 25], step, out + 8);
        }
    }
}

template <> void decode<IQ3_XXS>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += int64_t(first / 256) * 98;
    for (int block = 0; block < count / 256; block++, row += 98) {
        const float d = half(row);
        for (int group = 0; group < 8; group++) {
            const uint32_t aux = word(row + 66 + 4 * group);
            const float step = d * (0.5f + float(aux >> 28)) * 0.5f;
            const uint8_t *at = row + 2 + 8 * group;
            for (int k = 0; k < 4; k++, out += 8) {
                uint8_t magnitudes[8];
                memcpy(magnitudes, grid_iq3_xxs[at[2 * k]], 4);
                memcpy(magnitudes + 4, grid_iq3_xxs[at[2 * k + 1]], 4);
                lattice(magnitudes, sign_table[(aux >> (7 * k)) & 127], step, out);
            }
        }
    }
}

template <> void decode<IQ4_XS>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += int64_t(first / 256) * 136;
    for (int block = 0; block < count / 256; block++, row += 136) {
        const float d = half(row);
        const int high = row[2] | row[3] << 8;
        for (int group = 0; group < 8; group++, out += 32) {
            const int low = (row[4 + group / 2] >> (4 * (group % 2))) & 15;
            const float step = d * float((low | ((high >> (2 * group)) & 3) << 4) - 32);
            const Bytes codes = load_bytes(row + 8 + 16 * group);
            store16(look_up(iq4_levels, codes & uint8_t(15)), step, 0.f, out);
            store16(look_up(iq4_levels, bits_of(codes, 4, 15)), step, 0.f, out + 16);
        }
    }
}

inline const uint8_t *scales_of(const Matrix &m, int64_t row) {
    return m.scales ? m.scales + row / m.scale_rows * m.scale_stride : nullptr;
}

// Rows are multiplied several at a time, but requested in the order of their addresses, so that memory sees one stream: this
// many bytes before they are used. Requests for each row of its own reach little more than half of the memory's speed.
inline int64_t prefetch_distance(const Matrix &m, int rows) { return rows * m.row_bytes + 8192; }

// A hint only: addresses behind the end of a matrix are harmless.
inline void prefetch(const uint8_t *at) { __builtin_prefetch(at, 0, 3); }

// For what is read once: past the other caches. Float16 rows of 4,096 columns from memory at 39 instead of 29 GB/s.
inline void prefetch_once(const uint8_t *at) { __builtin_prefetch(at, 0, 0); }

#define FOR_TYPE(type, call)                                                                      \
    switch (type) {                                                                               \
        case F32: call(F32); break;                                                               \
        case F16: call(F16); break;                                                               \
        case BF16: call(BF16); break;                                                             \
        case FP8: call(FP8); break;                                                               \
        case FP4: call(FP4); break;                                                               \
        case Q8_0: call(Q8_0); break;                                                             \
        case MXFP4: call(MXFP4); break;                                                           \
        case Q2_K: call(Q2_K); break;                                                             \
        case Q3_K: call(Q3_K); break;                                                             \
        case Q4_K: call(Q4_K); break;                                                             \
        case Q5_K: call(Q5_K); break;                                                             \
        case Q6_K: call(Q6_K); break;                                                             \
        case IQ2_XXS: call(IQ2_XXS); break;                                                       \
        case IQ2_XS: call(IQ2_XS); break;                                                         \
        case IQ3_XXS: call(IQ3_XXS); break;                                                       \
        case IQ4_XS: call(IQ4_XS); break;                                                         \
    }

}  // namespace
