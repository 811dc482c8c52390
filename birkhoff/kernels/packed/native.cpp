// Products with packed matrices on a CPU.
//
// A matrix is read as it is stored. Rows of the result are independent of each other and of the number of threads.
// Four rows of a weight are decoded at a time, 256 columns each, into a buffer that stays in the L1 cache, and multiplied
// with all rows of x. The common types take a shorter way: their codes are decoded in registers.
// Sums are float32. The types are those of types.py.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE 1
#include <immintrin.h>
#else
#define WIDE 0
#if defined(__F16C__)
#include <immintrin.h>
#endif
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
constexpr int WEIGHT_ROWS = 4;
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

// A hint only: addresses behind the end of a matrix are harmless.
inline void prefetch(const uint8_t *at) { __builtin_prefetch(at, 0, 3); }

inline const uint8_t *scales_of(const Matrix &m, int64_t row) {
    return m.scales ? m.scales + row / m.scale_rows * m.scale_stride : nullptr;
}

inline Vec load(const float *at) {
    Vec value;
    memcpy(&value, at, sizeof value);
    return value;
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

// acc[r][w] += x[r] . buffer[w] over CHUNK columns (zero-padded), for X rows of x.
template <int X> inline void multiply(const float *x, int64_t stride, const float (*buffer)[CHUNK], int count, Vec *acc) {
    Vec sums[X][WEIGHT_ROWS];
    for (int r = 0; r < X; r++)
        for (int w = 0; w < WEIGHT_ROWS; w++) sums[r][w] = acc[r * WEIGHT_ROWS + w];
    for (int k = 0; k < count; k += LANES) {
        Vec weights[WEIGHT_ROWS];
        for (int w = 0; w < WEIGHT_ROWS; w++) weights[w] = load(buffer[w] + k);
        for (int r = 0; r < X; r++) {
            const Vec value = load(x + r * stride + k);
            for (int w = 0; w < WEIGHT_ROWS; w++) sums[r][w] += weights[w] * value;
        }
    }
    for (int r = 0; r < X; r++)
        for (int w = 0; w < WEIGHT_ROWS; w++) acc[r * WEIGHT_ROWS + w] = sums[r][w];
}

// Rows [first, stop) of the product: out[r * out_stride + row] for n rows of x. x is padded to whole chunks.
template <int T>
void product_rows(const Matrix &m, int64_t first, int64_t stop, const float *x, int64_t stride, int n, float *out,
                  int64_t out_stride) {
    alignas(64) float buffer[WEIGHT_ROWS][CHUNK];
    Vec acc_few[4 * WEIGHT_ROWS];
    std::unique_ptr<Vec[]> acc_many(n > 4 ? new Vec[n * WEIGHT_ROWS] : nullptr);
    Vec *acc = n > 4 ? acc_many.get() : acc_few;
    for (int64_t row = first; row < stop; row += WEIGHT_ROWS) {
        const int weight_rows = int(std::min<int64_t>(WEIGHT_ROWS, stop - row));
        memset(acc, 0, sizeof(Vec) * n * WEIGHT_ROWS);
        for (int start = 0; start < m.columns; start += CHUNK) {
            const int count = int(std::min<int64_t>(CHUNK, m.columns - start));
            const int64_t from = m.row_bytes * start / m.columns, chunk_bytes = m.row_bytes * count / m.columns;
            for (int w = 0; w < WEIGHT_ROWS; w++) {
                const uint8_t *next = m.codes + (row + WEIGHT_ROWS + w) * m.row_bytes + from;
                for (int64_t b = 0; b < chunk_bytes; b += 64) prefetch(next + b);
                if (w < weight_rows)
                    decode<T>(m.codes + (row + w) * m.row_bytes, scales_of(m, row + w), start, count, buffer[w]);
                if (w >= weight_rows) memset(buffer[w], 0, sizeof buffer[w]);
                else if (count < CHUNK) memset(buffer[w] + count, 0, 4 * (CHUNK - count));
            }
            const int padded = (count + LANES - 1) / LANES * LANES;
            int r = 0;
            for (; r + 4 <= n; r += 4) multiply<4>(x + r * stride + start, stride, buffer, padded, acc + r * WEIGHT_ROWS);
            for (; r + 2 <= n; r += 2) multiply<2>(x + r * stride + start, stride, buffer, padded, acc + r * WEIGHT_ROWS);
            for (; r < n; r++) multiply<1>(x + r * stride + start, stride, buffer, padded, acc + r * WEIGHT_ROWS);
        }
        for (int r = 0; r < n; r++)
            for (int w = 0; w < weight_rows; w++) out[r * out_stride + row + w] = total(acc[r * WEIGHT_ROWS + w]);
    }
}

#if WIDE
// X rows of x, codes decoded in registers. ROWS weight rows share the loads of x. The operations of a row of x do not
// depend on X, so that results do not depend on the other rows of a batch.
template <int T, int ROWS, int X>
inline void few_rows(const Matrix &m, int64_t row, const float *x, int64_t stride, float *out, int64_t out_stride) {
    const __m512 table = _mm512_loadu_ps(fp4_levels);
    __m512 acc[ROWS][X];
    const uint8_t *codes[ROWS], *scales[ROWS];
    const int64_t next = ROWS * m.row_bytes;  // the rows after these: short rows end before hardware prefetch pays
    for (int w = 0; w < ROWS; w++) {
        for (int r = 0; r < X; r++) acc[w][r] = _mm512_setzero_ps();
        codes[w] = m.codes + (row + w) * m.row_bytes;
        scales[w] = scales_of(m, row + w);
    }
    if (T == MXFP4 || T == Q8_0 || T == FP4) {
        for (int64_t g = 0; g < m.columns / 32; g++) {
            __m512 x0[X], x1[X];
            for (int r = 0; r < X; r++) {
                x0[r] = _mm512_loadu_ps(x + r * stride + 32 * g);
                x1[r] = _mm512_loadu_ps(x + r * stride + 32 * g + 16);
            }
            if (X == 1 && g % (T == Q8_0 ? 2 : 4) == 0)  // about a cache line of every row
                for (int w = 0; w < ROWS; w++) prefetch(codes[w] + next + (T == Q8_0 ? 34 : T == MXFP4 ? 17 : 16) * g);
            for (int w = 0; w < ROWS; w++) {
                __m512 low, high, scale;
                if (T == Q8_0) {
                    const uint8_t *at = codes[w] + 34 * g;
                    low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at + 2))));
                    high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at + 18))));
                    scale = _mm512_set1_ps(half(at));
                } else {
                    const uint8_t *at = T == MXFP4 ? codes[w] + 17 * g + 1 : codes[w] + 16 * g;
                    const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
                    low = _mm512_permutexvar_ps(pairs, table);
                    high = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), table);
                    scale = _mm512_set1_ps(e8m0_table[T == MXFP4 ? at[-1] : scales[w][g]]);
                }
                for (int r = 0; r < X; r++) {
                    const __m512 sum = _mm512_fmadd_ps(high, x1[r], _mm512_mul_ps(low, x0[r]));
                    acc[w][r] = _mm512_fmadd_ps(sum, scale, acc[w][r]);
                }
            }
        }
    } else if (T == FP8) {
        for (int64_t start = 0; start < m.columns; start += 128) {
            const int64_t stop = std::min<int64_t>(start + 128, m.columns);
            __m512 sum[ROWS][X];
            for (int w = 0; w < ROWS; w++)
                for (int r = 0; r < X; r++) sum[w][r] = _mm512_setzero_ps();
            if (X == 1)
                for (int w = 0; w < ROWS; w++) {
                    prefetch(codes[w] + next + start);
                    prefetch(codes[w] + next + start + 64);
                }
            for (int64_t k = start; k < stop; k += 16) {
                for (int w = 0; w < ROWS; w++) {
                    const __m512 weight = e4m3(codes[w] + k);
                    for (int r = 0; r < X; r++)
                        sum[w][r] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(x + r * stride + k), sum[w][r]);
                }
            }
            for (int w = 0; w < ROWS; w++) {
                const __m512 scale = _mm512_set1_ps(256.f * e8m0_table[scales[w][start / 128]]);
                for (int r = 0; r < X; r++) acc[w][r] = _mm512_fmadd_ps(sum[w][r], scale, acc[w][r]);
            }
        }
    } else {
        for (int64_t k = 0; k < m.columns; k += 16) {
            for (int w = 0; w < ROWS; w++) {
                __m512 weight;
                if (T == F32) weight = _mm512_loadu_ps((const float *)codes[w] + k);
                else {
                    const __m256i raw = _mm256_loadu_si256((const __m256i *)(codes[w] + 2 * k));
                    weight = T == F16 ? _mm512_cvtph_ps(raw)
                                      : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
                }
                for (int r = 0; r < X; r++)
                    acc[w][r] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(x + r * stride + k), acc[w][r]);
            }
        }
    }
    for (int w = 0; w < ROWS; w++)
        for (int r = 0; r < X; r++) out[r * out_stride + w] = _mm512_reduce_add_ps(acc[w][r]);
}

template <int T, int ROWS>
inline void all_rows(const Matrix &m, int64_t row, const float *x, int64_t stride, int n, float *out, int64_t out_stride) {
    int r = 0;
    for (; r + 4 <= n; r += 4) few_rows<T, ROWS, 4>(m, row, x + r * stride, stride, out + r * out_stride, out_stride);
    for (; r + 2 <= n; r += 2) few_rows<T, ROWS, 2>(m, row, x + r * stride, stride, out + r * out_stride, out_stride);
    for (; r < n; r++) few_rows<T, ROWS, 1>(m, row, x + r * stride, stride, out + r * out_stride, out_stride);
}

// Columns of whole vectors only; FP4 takes x with the even columns of every 32 before the odd ones.
template <int T>
void in_registers(const Matrix &m, int64_t first, int64_t stop, const float *x, int64_t stride, int n, float *out,
                  int64_t out_stride) {
    int64_t row = first;
    for (; row + 4 <= stop; row += 4) all_rows<T, 4>(m, row, x, stride, n, out + row, out_stride);
    for (; row < stop; row++) all_rows<T, 1>(m, row, x, stride, n, out + row, out_stride);
}
#endif

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

// x with rows padded by zeros to whole vectors, and for FP4 also deinterleaved.
struct Input {
    const float *rows;
    int64_t stride;
    int n;
    const float *deinterleaved;
    int64_t deinterleaved_stride;
};

void product(const Matrix &m, int64_t first, int64_t stop, const Input &in, float *out, int64_t out_stride) {
#if WIDE
    if (m.columns % 16 == 0) {
#define REGISTERS(T) in_registers<T>(m, first, stop, in.rows, in.stride, in.n, out, out_stride)
        switch (m.type) {
            case F32: return REGISTERS(F32);
            case F16: return REGISTERS(F16);
            case BF16: return REGISTERS(BF16);
            case FP8: return REGISTERS(FP8);
            case Q8_0: return REGISTERS(Q8_0);
            case MXFP4: return REGISTERS(MXFP4);
            case FP4:
                return in_registers<FP4>(m, first, stop, in.deinterleaved, in.deinterleaved_stride, in.n, out, out_stride);
        }
#undef REGISTERS
    }
#endif
#define ROWS(T) product_rows<T>(m, first, stop, in.rows, in.stride, in.n, out, out_stride)
    FOR_TYPE(m.type, ROWS)
#undef ROWS
}

// Threads. A job is a function of the part index. The caller computes parts too, and all of them if no other thread gets
// to run, so that a busy machine costs no more than it must.
class Pool {
  public:
    void run(int parts, int threads, const std::function<void(int)> &job) {
        if (parts <= 1 || threads <= 1) {
            for (int part = 0; part < parts; part++) job(part);
            return;
        }
        std::lock_guard<std::mutex> one_job(jobs_);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (int(workers_.size()) < threads - 1) workers_.emplace_back([this] { work(); });
            job_ = &job;
            parts_ = parts;
            next_.store(0);
            open_ = true;
            generation_.fetch_add(1);
        }
        wake_.notify_all();
        take_parts(job, parts);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            open_ = false;  // no worker may join any more
        }
        for (int spin = 0; active_.load(std::memory_order_acquire) > 0; spin++)
            if (spin > 1000) std::this_thread::yield();
    }

  private:
    void take_parts(const std::function<void(int)> &job, int parts) {
        for (int part; (part = next_.fetch_add(1)) < parts;) job(part);
    }

    void work() {
        uint64_t seen = 0;
        for (;;) {
            for (int spin = 0; spin < 2000 && generation_.load(std::memory_order_acquire) == seen; spin++) {
#if WIDE
                _mm_pause();
#endif
            }
            const std::function<void(int)> *job = nullptr;
            int parts = 0;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return generation_.load() != seen; });
                seen = generation_.load();
                if (open_) {
                    job = job_;
                    parts = parts_;
                    active_.fetch_add(1);
                }
            }
            if (job) {
                take_parts(*job, parts);
                active_.fetch_sub(1, std::memory_order_release);
            }
        }
    }

    std::mutex jobs_, mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::atomic<uint64_t> generation_{0};
    std::atomic<int> next_{0}, active_{0};
    const std::function<void(int)> *job_ = nullptr;
    int parts_ = 0;
    bool open_ = false;
};

Pool &pool() {
    // Never destroyed, since threads may outlive static objects; a forked child has none of them and gets its own.
    static std::atomic<Pool *> instance{nullptr};
    static std::atomic<pid_t> owner{0};
    if (owner.load() != getpid()) {
        instance.store(new Pool);
        owner.store(getpid());
    }
    return *instance.load();
}

// Parts of a job: at least this many weights each, and at most four for every thread.
constexpr int64_t PART_WEIGHTS = 1 << 17;

int parts_for(int64_t weights, int threads) {
    if (threads <= 1 || weights < 3 * PART_WEIGHTS) return 1;
    return int(std::min<int64_t>(4 * threads, weights / PART_WEIGHTS));
}

// Buffers of the calling thread, kept between calls.
struct Scratch {
    std::vector<float> padded, deinterleaved, gate, hidden, partial;
};
thread_local Scratch scratch;

int64_t whole(int64_t columns) { return (columns + CHUNK - 1) / CHUNK * CHUNK; }

Input prepare(const float *x, int64_t stride, int n, int64_t columns, bool fp4, std::vector<float> &padded,
              std::vector<float> &deinterleaved) {
    Input in{x, stride, n, nullptr, columns};
    if (columns % LANES) {  // the loops read whole vectors
        const int64_t width = whole(columns);
        padded.assign(n * width, 0.f);
        for (int r = 0; r < n; r++) memcpy(&padded[r * width], x + r * stride, 4 * columns);
        in.rows = padded.data();
        in.stride = width;
    }
    if (fp4) {
        deinterleaved.resize(n * columns);
        for (int r = 0; r < n; r++) {
            const float *from = x + r * stride;
            float *into = &deinterleaved[r * columns];
            for (int64_t g = 0; g < columns; g += 32)
                for (int j = 0; j < 16; j++) {
                    into[g + j] = from[g + 2 * j];
                    into[g + 16 + j] = from[g + 2 * j + 1];
                }
        }
        in.deinterleaved = deinterleaved.data();
    }
    return in;
}

inline float swiglu(float a, float b, float limit) {
    a = std::min(a, limit);
    b = std::max(std::min(b, limit), -limit);
    return a / (1.f + std::exp(-a)) * b;
}

}  // namespace

extern "C" {

int birkhoff_abi() { return 1; }

void birkhoff_tables(const uint8_t *iq2_xxs, const uint8_t *iq2_xs, const uint8_t *iq3_xxs) {
    memcpy(grid_iq2_xxs, iq2_xxs, sizeof grid_iq2_xxs);
    memcpy(grid_iq2_xs, iq2_xs, sizeof grid_iq2_xs);
    memcpy(grid_iq3_xxs, iq3_xxs, sizeof grid_iq3_xxs);
    for (int i = 0; i < 256; i++) {
        e8m0_table[i] = i == 255 ? NAN : i ? bits_to_float(uint32_t(i) << 23) : bits_to_float(0x00400000u);
        const int exponent = (i >> 3) & 15, mantissa = i & 7;
        const float size = exponent ? std::ldexp(1.f + mantissa / 8.f, exponent - 7) : std::ldexp(mantissa / 8.f, -6);
        e4m3_table[i] = i & 128 ? -size : size;
    }
    for (int i = 0; i < 128; i++) {
        int minus = 0;
        for (int j = 0; j < 7; j++) {
            sign_table[i][j] = (i >> j) & 1 ? -1 : 1;
            minus += (i >> j) & 1;
        }
        sign_table[i][7] = minus % 2 ? -1 : 1;
    }
}

// out[r, :] = x[r] . every matrix, side by side. All matrices have the same columns.
void birkhoff_products(const Matrix *matrices, int count, const float *x, int64_t stride, int n, float *out,
                       int64_t out_stride, int threads) {
    bool fp4 = false;
    int64_t rows = 0;
    for (int i = 0; i < count; i++) {
        fp4 |= matrices[i].type == FP4;
        rows += matrices[i].rows;
    }
    const int64_t columns = matrices[0].columns;
    const Input in = prepare(x, stride, n, columns, fp4, scratch.padded, scratch.deinterleaved);
    const int parts = parts_for(rows * columns, threads);
    pool().run(parts, threads, [&](int part) {
        // Rows [begin, end) of all matrices stacked, split at multiples of four.
        const int64_t begin = rows * part / parts / 4 * 4, end = part + 1 == parts ? rows : rows * (part + 1) / parts / 4 * 4;
        int64_t start = 0;
        for (int i = 0; i < count; i++) {
            const Matrix &m = matrices[i];
            const int64_t first = std::max<int64_t>(begin - start, 0), stop = std::min(end - start, m.rows);
            if (first < stop) product(m, first, stop, in, out + start, out_stride);
            start += m.rows;
        }
    });
}

// As birkhoff_products with one matrix whose rows form groups; group g reads columns [g * columns, ...) of x.
void birkhoff_grouped(const Matrix *matrix, int64_t group, const float *x, int64_t stride, int n, float *out,
                      int64_t out_stride, int threads) {
    for (int64_t g = 0; g * group < matrix->rows; g++) {
        const Input in = prepare(x + g * matrix->columns, stride, n, matrix->columns, matrix->type == FP4,
                                 scratch.padded, scratch.deinterleaved);
        const int parts = parts_for(group * matrix->columns, threads);
        pool().run(parts, threads, [&](int part) {
            const int64_t first = group * part / parts / 4 * 4, stop = part + 1 == parts ? group : group * (part + 1) / parts / 4 * 4;
            if (first < stop) product(*matrix, g * group + first, g * group + stop, in, out, out_stride);
        });
    }
}

// Rows [first, stop) of a matrix as float32 [stop - first, columns].
void birkhoff_dequantise(const Matrix *matrix, int64_t first, int64_t stop, float *out, int threads) {
    const Matrix &m = *matrix;
    const int parts = parts_for((stop - first) * m.columns, threads);
    pool().run(parts, threads, [&](int part) {
        const int64_t begin = first + (stop - first) * part / parts, end = first + (stop - first) * (part + 1) / parts;
        for (int64_t row = begin; row < end; row++) {
#define WHOLE_ROW(T) decode<T>(m.codes + row * m.row_bytes, scales_of(m, row), 0, int(m.columns), out + (row - first) * m.columns)
            FOR_TYPE(m.type, WHOLE_ROW)
#undef WHOLE_ROW
        }
    });
}

// The given rows of a matrix as float32 [n, columns].
void birkhoff_rows(const Matrix *matrix, const int64_t *rows, int n, float *out) {
    for (int r = 0; r < n; r++) birkhoff_dequantise(matrix, rows[r], rows[r] + 1, out + r * matrix->columns, 1);
}

// Routed experts: out[r] += sum over the experts of row r, in ascending order of expert.
// matrices: gate, up and down of every expert; ids and weights [n, k]; x [n, columns], out [n, columns].
void birkhoff_experts(const Matrix *matrices, int experts, const float *x, int n, const int64_t *ids, const float *weights,
                      int k, float limit, float *out, int threads) {
    const int64_t width = matrices[0].columns, inner = matrices[0].rows;
    const bool fp4_in = matrices[0].type == FP4 || matrices[1].type == FP4, fp4_down = matrices[2].type == FP4;
    struct Pair { int64_t expert; int row; float weight; };
    std::vector<Pair> pairs;
    pairs.reserve(n * k);
    for (int r = 0; r < n; r++)
        for (int c = 0; c < k; c++) pairs.push_back({ids[r * k + c], r, weights[r * k + c]});
    std::stable_sort(pairs.begin(), pairs.end(), [](const Pair &a, const Pair &b) { return a.expert < b.expert; });
    const int total_pairs = int(pairs.size());
    // One task per expert in use; threads divide the rows of every task among themselves.
    struct Task { int first, count; };
    std::vector<Task> tasks;
    for (int i = 0; i < total_pairs;) {
        int stop = i + 1;
        while (stop < total_pairs && pairs[stop].expert == pairs[i].expert) stop++;
        if (pairs[i].expert >= 0 && pairs[i].expert < experts) tasks.push_back({i, stop - i});
        i = stop;
    }
    std::vector<float> &gate = scratch.gate, &hidden = scratch.hidden, &partial = scratch.partial;
    gate.resize(total_pairs * 2 * inner);
    hidden.resize(total_pairs * whole(inner));
    partial.resize(total_pairs * width);
    std::vector<float> gathered(n > 1 ? total_pairs * width : 0);
    if (n > 1)
        for (int i = 0; i < total_pairs; i++) memcpy(&gathered[i * width], x + pairs[i].row * width, 4 * width);
    std::vector<Input> inputs(tasks.size()), middles(tasks.size());
    std::vector<std::vector<float>> padded(2 * tasks.size()), split(2 * tasks.size());
    const bool shared_input = n == 1;
    for (size_t t = 0; t < tasks.size(); t++) {
        if (shared_input && t) {
            inputs[t] = inputs[0];
            inputs[t].n = tasks[t].count;
        } else {
            const float *from = n > 1 ? &gathered[tasks[t].first * width] : x;
            inputs[t] = prepare(from, n > 1 ? width : 0, tasks[t].count, width, fp4_in, padded[2 * t], split[2 * t]);
        }
    }
    const int parts = parts_for(int64_t(tasks.size()) * 2 * inner * width, threads);
    pool().run(parts, threads, [&](int part) {
        const int64_t first = inner * part / parts / 4 * 4, stop = part + 1 == parts ? inner : inner * (part + 1) / parts / 4 * 4;
        for (size_t t = 0; t < tasks.size(); t++) {
            const Matrix *expert = matrices + 3 * pairs[tasks[t].first].expert;
            float *into = &gate[tasks[t].first * 2 * inner];
            product(expert[0], first, stop, inputs[t], into, 2 * inner);
            product(expert[1], first, stop, inputs[t], into + inner, 2 * inner);
            for (int i = tasks[t].first; i < tasks[t].first + tasks[t].count; i++)
                for (int64_t j = first; j < stop; j++)
                    hidden[i * inner + j] =
                        swiglu(gate[i * 2 * inner + j], gate[i * 2 * inner + inner + j], limit) * pairs[i].weight;
        }
    });
    for (size_t t = 0; t < tasks.size(); t++)
        middles[t] = prepare(&hidden[tasks[t].first * inner], inner, tasks[t].count, inner, fp4_down, padded[2 * t + 1], split[2 * t + 1]);
    pool().run(parts, threads, [&](int part) {
        const int64_t first = width * part / parts / 4 * 4, stop = part + 1 == parts ? width : width * (part + 1) / parts / 4 * 4;
        for (size_t t = 0; t < tasks.size(); t++) {
            const Matrix &down = matrices[3 * pairs[tasks[t].first].expert + 2];
            product(down, first, stop, middles[t], &partial[tasks[t].first * width], width);
            for (int i = tasks[t].first; i < tasks[t].first + tasks[t].count; i++) {
                float *target = out + pairs[i].row * width;
                for (int64_t j = first; j < stop; j++) target[j] += partial[i * width + j];
            }
        }
    });
}

// The first row with a value that is not finite, or -1.
int64_t birkhoff_first_bad_row(const Matrix *matrix) {
    const Matrix &m = *matrix;
    std::vector<float> values(m.columns);
    for (int64_t row = 0; row < m.rows; row++) {
        birkhoff_dequantise(&m, row, row + 1, values.data(), 1);
        uint32_t largest = 0;  // by its bits without the sign
        for (int64_t k = 0; k < m.columns; k++) {
            uint32_t bits;
            memcpy(&bits, &values[k], 4);
            largest = std::max(largest, bits & 0x7fffffffu);
        }
        if (largest >= 0x7f800000u) return row;
    }
    return -1;
}

// Sum of 64-bit words, to measure how fast memory can be read.
uint64_t birkhoff_read(const uint64_t *words, int64_t count, int threads) {
    std::vector<uint64_t> sums(threads * 8);
    pool().run(threads, threads, [&](int part) {
        uint64_t sum = 0;
        const int64_t stop = count * (part + 1) / threads;
        for (int64_t i = count * part / threads; i < stop; i++) sum += words[i];
        sums[part * 8] = sum;
    });
    uint64_t sum = 0;
    for (int part = 0; part < threads; part++) sum += sums[part * 8];
    return sum;
}

}  // extern "C"
