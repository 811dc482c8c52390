// Products with few rows of x, as in a decode step.
//
// Four rows of a weight are decoded at a time, 256 columns each, into a buffer that stays in the L1 cache, and multiplied
// with all rows of x. The common types take a shorter way: their codes are decoded in registers.

#pragma once

#include <memory>
#include <vector>

#include "decode.h"
#include "digits.h"

namespace {

constexpr int WEIGHT_ROWS = 4;

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
        const uint8_t *next = m.codes + row * m.row_bytes + prefetch_distance(m, WEIGHT_ROWS);
        const int weight_rows = int(std::min<int64_t>(WEIGHT_ROWS, stop - row));
        memset(acc, 0, sizeof(Vec) * n * WEIGHT_ROWS);
        for (int start = 0; start < m.columns; start += CHUNK) {
            const int count = int(std::min<int64_t>(CHUNK, m.columns - start));
            const int64_t chunk_bytes = WEIGHT_ROWS * m.row_bytes * count / m.columns;
            for (int64_t b = 0; b < chunk_bytes; b += 64) prefetch(next + b);
            next += chunk_bytes;
            for (int w = 0; w < WEIGHT_ROWS; w++) {
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

// The columns of a group of 32 in the order in which its codes are decoded to registers.
#if WIDE
const uint8_t fp4_order[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                               1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
const uint8_t mxfp4_order[32] = {};  // as stored
#else
const uint8_t fp4_order[32] = {0,  4,  8,  12, 1,  5,  9,  13, 2,  6,  10, 14, 3,  7,  11, 15,
                               16, 20, 24, 28, 17, 21, 25, 29, 18, 22, 26, 30, 19, 23, 27, 31};
const uint8_t mxfp4_order[32] = {0, 2,  4,  6,  16, 18, 20, 22, 1, 3,  5,  7,  17, 19, 21, 23,
                                 8, 10, 12, 14, 24, 26, 28, 30, 9, 11, 13, 15, 25, 27, 29, 31};
#endif

#if AVX2
// 32 numbers: two vectors of 16, or four of 8.
struct Group {
    Vec v[4];
};

inline Group load_group(const float *x) {
    Group group;
    group.v[0] = load(x);
    group.v[1] = load(x + LANES);
    if (!WIDE) {
        group.v[2] = load(x + 2 * LANES);
        group.v[3] = load(x + 3 * LANES);
    }
    return group;
}

// Sums of products of the numbers in a lane.
inline Vec dot(const Group &a, const Group &b) {
    const Vec two = fused(a.v[1], b.v[1], a.v[0] * b.v[0]);
    return WIDE ? two : fused(a.v[3], b.v[3], fused(a.v[2], b.v[2], two));
}

// The codes of a group as numbers, without its scale. FP4 and MXFP4 are in the order of fp4_order and mxfp4_order.
template <int T> inline Group decode_group(const uint8_t *codes) {
    Group out;
    if (T == Q8_0) {
        out.v[0] = signed_bytes(codes);
        out.v[1] = signed_bytes(codes + LANES);
        if (!WIDE) {
            out.v[2] = signed_bytes(codes + 2 * LANES);
            out.v[3] = signed_bytes(codes + 3 * LANES);
        }
        return out;
    }
#if WIDE
    const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    const __m512 table = _mm512_loadu_ps(fp4_levels);
    out.v[0] = Vec(_mm512_permutexvar_ps(pairs, table));
    out.v[1] = Vec(_mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), table));
#else
    // The upper sixteen bits of every number, whose bytes come from two tables; the lower ones are zero.
    const __m256i pairs = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codes));
    const __m256i apart = _mm256_srlv_epi32(pairs, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    const __m256i index = _mm256_and_si256(apart, _mm256_set1_epi8(15)), upper = _mm256_set1_epi32(int(0xffff0000));
    const __m256i first = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)fp4_first_bytes));
    const __m256i second = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)fp4_second_bytes));
    const __m256i tops = _mm256_shuffle_epi8(first, index), next = _mm256_shuffle_epi8(second, index);
    const __m256i low = _mm256_unpacklo_epi8(next, tops), high = _mm256_unpackhi_epi8(next, tops);
    out.v[0] = Vec(_mm256_slli_epi32(low, 16));
    out.v[1] = Vec(_mm256_and_si256(low, upper));
    out.v[2] = Vec(_mm256_slli_epi32(high, 16));
    out.v[3] = Vec(_mm256_and_si256(high, upper));
#endif
    return out;
}

// LANES numbers of a row from column k on.
template <int T> inline Vec decode_columns(const uint8_t *row, int64_t k) {
    return T == F32 ? load((const float *)row + k) : T == F16 ? float16s(row + 2 * k) : bfloat16s(row + 2 * k);
}

// X rows of x, codes decoded in registers. ROWS weight rows share the loads of x. The operations of a row of x do not
// depend on X, so that results do not depend on the other rows of a batch. `request`: prefetch the rows after these.
enum Request { NO_ROWS, NEXT_ROWS, NEXT_ROWS_ONCE };
template <int T, int ROWS, int X>
inline void few_rows(const Matrix &m, int64_t row, const float *x, int64_t stride, float *out, int64_t out_stride,
                     Request request) {
    Vec acc[ROWS][X];
    const uint8_t *codes[ROWS], *scales[ROWS];
#pragma GCC unroll 4
    for (int w = 0; w < ROWS; w++) {
#pragma GCC unroll 4
        for (int r = 0; r < X; r++) acc[w][r] = Vec{};
        codes[w] = m.codes + (row + w) * m.row_bytes;
        scales[w] = scales_of(m, row + w);
    }
    const uint8_t *next = codes[0] + prefetch_distance(m, ROWS);
    if (T == MXFP4 || T == Q8_0 || T == FP4) {
        constexpr int BYTES = T == Q8_0 ? 34 : T == MXFP4 ? 17 : 16;
        constexpr int GROUPS = T == Q8_0 ? 2 : 4;  // about a cache line
        for (int64_t g = 0; g < m.columns / 32; g++) {
            if (request && g % GROUPS == 0) {
                for (int b = 0; b < ROWS * GROUPS * BYTES; b += 64) prefetch(next + b);
                next += ROWS * GROUPS * BYTES;
            }
            Group own[X];
#pragma GCC unroll 4
            for (int r = 0; r < X && (WIDE || X == 1); r++) {  // sixteen registers do not hold more
                own[r] = load_group(x + r * stride + 32 * g);
                for (int p = 0; p < 32 / LANES; p++) in_register(own[r].v[p]);
            }
#pragma GCC unroll 4
            for (int w = 0; w < ROWS; w++) {
                const uint8_t *at = codes[w] + BYTES * g;
                const Group weights = decode_group<T>(at + BYTES % 16);
                const float scale = T == Q8_0 ? half(at) : e8m0_table[T == MXFP4 ? at[0] : scales[w][g]];
#pragma GCC unroll 4
                for (int r = 0; r < X; r++) {
                    const Vec sum = dot(weights, WIDE || X == 1 ? own[r] : load_group(x + r * stride + 32 * g));
                    acc[w][r] = fused(sum, splat(scale), acc[w][r]);
                }
            }
        }
    } else if (T == FP8) {
        for (int64_t start = 0; start < m.columns; start += 128) {
            const int64_t stop = std::min<int64_t>(start + 128, m.columns);
            Vec sum[ROWS][X];
#pragma GCC unroll 4
            for (int w = 0; w < ROWS; w++)
#pragma GCC unroll 4
                for (int r = 0; r < X; r++) sum[w][r] = Vec{};
            if (request) {
                for (int b = 0; b < ROWS * 128; b += 64) prefetch(next + b);
                next += ROWS * 128;
            }
            for (int64_t k = start; k < stop; k += LANES) {
#pragma GCC unroll 4
                for (int w = 0; w < ROWS; w++) {
                    const Vec weight = e4m3(codes[w] + k);
#pragma GCC unroll 4
                    for (int r = 0; r < X; r++) sum[w][r] = fused(weight, load(x + r * stride + k), sum[w][r]);
                }
            }
#pragma GCC unroll 4
            for (int w = 0; w < ROWS; w++) {
                const Vec scale = splat(256.f * e8m0_table[scales[w][start / 128]]);
#pragma GCC unroll 4
                for (int r = 0; r < X; r++) acc[w][r] = fused(sum[w][r], scale, acc[w][r]);
            }
        }
    } else {
        constexpr int BYTES = ROWS * LANES * (T == F32 ? 4 : 2);
        for (int64_t k = 0; k < m.columns; k += LANES) {
            if (request == NEXT_ROWS_ONCE) {
                for (int b = 0; b < BYTES; b += 64) prefetch_once(next + b);
            } else if (request) {
                for (int b = 0; b < BYTES; b += 64) prefetch(next + b);
            }
            next += BYTES;
#pragma GCC unroll 4
            for (int w = 0; w < ROWS; w++) {
                const Vec weight = decode_columns<T>(codes[w], k);
#pragma GCC unroll 4
                for (int r = 0; r < X; r++) acc[w][r] = fused(weight, load(x + r * stride + k), acc[w][r]);
            }
        }
    }
#pragma GCC unroll 4
    for (int w = 0; w < ROWS; w++)
#pragma GCC unroll 4
        for (int r = 0; r < X; r++) out[r * out_stride + w] = total(acc[w][r]);
}

template <int T, int ROWS>
inline void all_rows(const Matrix &m, int64_t row, const float *x, int64_t stride, int n, float *out, int64_t out_stride) {
    // Rows too long for the first cache until they are used; a second pass over them would miss them.
    const Request first = n <= 4 && ROWS * m.row_bytes > (1 << 14) ? NEXT_ROWS_ONCE : NEXT_ROWS;
    int r = 0;
    for (; r + 4 <= n; r += 4)
        few_rows<T, ROWS, 4>(m, row, x + r * stride, stride, out + r * out_stride, out_stride, r ? NO_ROWS : first);
    for (; r + 2 <= n; r += 2)
        few_rows<T, ROWS, 2>(m, row, x + r * stride, stride, out + r * out_stride, out_stride, r ? NO_ROWS : first);
    for (; r < n; r++)
        few_rows<T, ROWS, 1>(m, row, x + r * stride, stride, out + r * out_stride, out_stride, r ? NO_ROWS : first);
}

// Columns of whole vectors only; FP4 and MXFP4 take x in the order of their codes.
template <int T>
void in_registers(const Matrix &m, int64_t first, int64_t stop, const float *x, int64_t stride, int n, float *out,
                  int64_t out_stride) {
    int64_t row = first;
    if (!WIDE && n > 1)  // sixteen registers
        for (; row + 2 <= stop; row += 2) all_rows<T, 2>(m, row, x, stride, n, out + row, out_stride);
    for (; row + 4 <= stop; row += 4) all_rows<T, 4>(m, row, x, stride, n, out + row, out_stride);
    for (; row < stop; row++) all_rows<T, 1>(m, row, x, stride, n, out + row, out_stride);
}
#endif

// x with rows padded by zeros to whole vectors, for FP4 and MXFP4 also in the order of their codes, and for products of
// bytes its digits.
struct Input {
    const float *rows;
    int64_t stride;
    int n;
    const float *fp4, *mxfp4;
    int64_t ordered_stride;
    const DigitChunk *digits;
    int64_t digit_stride;
};

// The memory of an Input.
struct InputBuffers {
    std::vector<float> padded, fp4, mxfp4;
    std::vector<DigitChunk> digits;
};

// Which forms of x some types need besides rows.
struct InputForms {
    bool fp4, mxfp4, digits;
    explicit InputForms(std::initializer_list<int64_t> types) : fp4(false), mxfp4(false), digits(false) {
        for (int64_t type : types) add(type);
    }
    void add(int64_t type) {
        fp4 |= AVX2 && type == FP4;
        mxfp4 |= AVX2 && !WIDE && type == MXFP4;
        digits |= has_digits(type);
    }
};

void product(const Matrix &m, int64_t first, int64_t stop, const Input &in, float *out, int64_t out_stride) {
#if AVX2
    if (m.columns % LANES == 0) {
#define REGISTERS(T) in_registers<T>(m, first, stop, in.rows, in.stride, in.n, out, out_stride)
        switch (m.type) {
            case F32: return REGISTERS(F32);
            case F16: return REGISTERS(F16);
            case BF16: return REGISTERS(BF16);
            case FP8: return REGISTERS(FP8);
            case Q8_0: return REGISTERS(Q8_0);
            case FP4: return in_registers<FP4>(m, first, stop, in.fp4, in.ordered_stride, in.n, out, out_stride);
            case MXFP4:
                if (WIDE) return REGISTERS(MXFP4);
                return in_registers<MXFP4>(m, first, stop, in.mxfp4, in.ordered_stride, in.n, out, out_stride);
        }
#undef REGISTERS
    }
#endif
#if DIGITS
#define BYTES(T) case T: return digit_rows<T>(m, first, stop, in.digits, in.digit_stride, in.n, out, out_stride)
    switch (m.type) {
        BYTES(Q2_K);
        BYTES(Q3_K);
        BYTES(Q4_K);
        BYTES(Q5_K);
        BYTES(Q6_K);
        BYTES(IQ2_XXS);
        BYTES(IQ2_XS);
        BYTES(IQ3_XXS);
        BYTES(IQ4_XS);
    }
#undef BYTES
#endif
#define ROWS(T) product_rows<T>(m, first, stop, in.rows, in.stride, in.n, out, out_stride)
    FOR_TYPE(m.type, ROWS)
#undef ROWS
}

int64_t whole(int64_t columns) { return (columns + CHUNK - 1) / CHUNK * CHUNK; }

// Rows of x with every 32 columns in the given order; columns are a multiple of 32.
const float *reorder(const float *x, int64_t stride, int n, int64_t columns, const uint8_t (&order)[32],
                     std::vector<float> &into) {
    into.resize(size_t(n * columns));
    for (int r = 0; r < n; r++) {
        const float *from = x + r * stride;
        float *row = &into[size_t(r * columns)];
        for (int64_t g = 0; g < columns; g += 32)
            for (int j = 0; j < 32; j++) row[g + j] = from[g + order[j]];
    }
    return into.data();
}

Input prepare(const float *x, int64_t stride, int n, int64_t columns, const InputForms &forms, InputBuffers &buffers) {
    Input in{x, stride, n, nullptr, nullptr, columns, nullptr, columns / CHUNK};
    if (columns % LANES) {  // the loops read whole vectors
        const int64_t width = whole(columns);
        buffers.padded.assign(n * width, 0.f);
        for (int r = 0; r < n; r++) memcpy(&buffers.padded[r * width], x + r * stride, 4 * columns);
        in.rows = buffers.padded.data();
        in.stride = width;
    }
    if (forms.fp4) in.fp4 = reorder(x, stride, n, columns, fp4_order, buffers.fp4);
    if (forms.mxfp4) in.mxfp4 = reorder(x, stride, n, columns, mxfp4_order, buffers.mxfp4);
#if DIGITS
    if (forms.digits) {
        buffers.digits.resize(n * in.digit_stride);
        for (int r = 0; r < n; r++)
            for (int64_t c = 0; c < in.digit_stride; c++)
                split_chunk(x + r * stride + c * CHUNK, buffers.digits[r * in.digit_stride + c]);
        in.digits = buffers.digits.data();
    }
#endif
    return in;
}

}  // namespace
