// Packed matrices and the decoding of their codes to float32. The types are those of types.py.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE 1
#include <immintrin.h>
#else
#define WIDE 0
#if defined(__F16C__)
#include <immintrin.h>
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
typedef float Vec __attribute__((vector_size(64)));
constexpr int LANES = 16;

float e8m0_table[256];
float e4m3_table[256];
uint8_t grid_iq2_xxs[256][8], grid_iq2_xs[512][8], grid_iq3_xxs[256][4];
int8_t sign_table[128][8];
const float fp4_levels[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
const int8_t iq4_levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline float half(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
#if defined(__F16C__) || WIDE
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

// decode<T>(codes of a row, scales of a row, first column, count, out): columns [first, first + count) as float32.

template <int T> void decode(const uint8_t *row, const uint8_t *scales, int first, int count, float *out);

template <> void decode<F32>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    memcpy(out, row + 4 * int64_t(first), 4 * size_t(count));
}

template <> void decode<F16>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += 2 * int64_t(first);
    int j = 0;
#if WIDE
    for (; j + 16 <= count; j += 16)
        _mm512_storeu_ps(out + j, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(row + 2 * j))));
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

#if WIDE
// Sixteen E4M3 codes, 2^8 too small: the bits are those of float16. NaN codes, which loaders reject, become 480.
inline __m512 e4m3(const uint8_t *codes) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xBFFF))));
}
#endif

template <> void decode<FP8>(const uint8_t *row, const uint8_t *scales, int first, int count, float *out) {
    row += first;
    for (int start = 0; start < count;) {  // pieces under one scale
        const int stop = std::min(count, start + 128 - (first + start) % 128);
        const float scale = e8m0_table[scales[(first + start) / 128]];
        int j = start;
#if WIDE
        const __m512 factor = _mm512_set1_ps(scale), up = _mm512_set1_ps(256.f);
        for (; j + 16 <= stop; j += 16)
            _mm512_storeu_ps(out + j, _mm512_mul_ps(_mm512_mul_ps(e4m3(row + j), up), factor));
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
        for (int j = 0; j < 16; j++) {
            out[2 * j] = fp4_levels[row[j] & 15] * scale;
            out[2 * j + 1] = fp4_levels[row[j] >> 4] * scale;
        }
#endif
    }
}

template <> void decode<Q8_0>(const uint8_t *row, const uint8_t *, int first, int count, float *out) {
    row += int64_t(first / 32) * 34;
    for (int g = 0; g < count / 32; g++, row += 34, out += 32) {
        const float scale = half(row);
        const int8_t *codes = (const int8_t *)(row + 2);
        for (int j = 0; j < 32; j++) out[j] = float(codes[j]) * scale;
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
        for (int j = 0; j < 16; j++) {
            out[j] = fp4_levels[row[1 + j] & 15] * scale;
            out[j + 16] = fp4_levels[row[1 + j] >> 4] * scale;
        }
#endif
    }
}

#if WIDE
// The bits [shift, ...) under `mask` of sixteen bytes.
inline __m128i bits_of(const uint8_t *codes, int shift, int mask) {
    const __m128i raw = _mm_loadu_si128((const __m128i *)codes);
    return _mm_and_si128(_mm_srl_epi16(raw, _mm_cvtsi32_si128(shift)), _mm_set1_epi8(char(mask)));
}

// out[0 .. 16) = a * values + b for sixteen signed bytes.
inline void store16(__m128i values, float a, float b, float *out) {
    const __m512 wide = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(values));
    _mm512_storeu_ps(out, _mm512_fmadd_ps(wide, _mm512_set1_ps(a), _mm512_set1_ps(b)));
}
#endif

// out[0 .. 16) = a * (((codes >> shift) & mask) + ((top >> top_shift) & top_mask) * high - offset) + b.
inline void fields(const uint8_t *codes, int shift, int mask, const uint8_t *top, int top_shift, int top_mask, int high,
                   int offset, float a, float b, float *out) {
#if WIDE
    __m128i values = bits_of(codes, shift, mask);
    if (top) {
        const __m128i above = bits_of(top, top_shift, top_mask);
        values = _mm_or_si128(values, high == 4 ? _mm_slli_epi16(above, 2) : _mm_slli_epi16(above, 4));
    }
    if (offset) values = _mm_sub_epi8(values, _mm_set1_epi8(char(offset)));
    store16(values, a, b, out);
#else
    for (int j = 0; j < 16; j++) {
        const int above = top ? ((top[j] >> top_shift) & top_mask) * high : 0;
        out[j] = a * float(((codes[j] >> shift) & mask) + above - offset) + b;
    }
#endif
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
#if WIDE
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
            const uint8_t *codes = row + 8 + 16 * group;
#if WIDE
            const __m128i table = _mm_loadu_si128((const __m128i *)iq4_levels), mask = _mm_set1_epi8(15);
            const __m128i both = _mm_loadu_si128((const __m128i *)codes);
            const __m128i first_half = _mm_shuffle_epi8(table, _mm_and_si128(both, mask));
            const __m128i second_half = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(both, 4), mask));
            const __m512 factor = _mm512_set1_ps(step);
            _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first_half)), factor));
            _mm512_storeu_ps(out + 16, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(second_half)), factor));
#else
            for (int j = 0; j < 16; j++) {
                out[j] = step * float(iq4_levels[codes[j] & 15]);
                out[j + 16] = step * float(iq4_levels[codes[j] >> 4]);
            }
#endif
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

inline Vec load(const float *at) {
    Vec value;
    memcpy(&value, at, sizeof value);
    return value;
}

// a * b + c, rounded once where the processor can. The compiler keeps the order of these sums, whatever a loop's length.
inline Vec fused(Vec a, Vec b, Vec c) {
#if WIDE
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

inline float total(Vec v) {
#if WIDE
    return _mm512_reduce_add_ps((__m512)v);
#else
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += v[lane];
    return sum;
#endif
}

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
