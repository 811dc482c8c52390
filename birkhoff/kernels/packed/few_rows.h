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

// The codes of a group as numbers, without its scale; FP4 and MXFP4 times FP4_FACTOR. FP4 has the even columns before the
// odd ones.
constexpr float FP4_FACTOR = WIDE ? 1.f : 2.f;
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
    const Bytes pairs = load_bytes(codes);
    const __m128i low = __m128i(look_up(fp4_doubled, pairs & uint8_t(15)));
    const __m128i high = __m128i(look_up(fp4_doubled, bits_of(pairs, 4, 15)));
    out.v[0] = signed_bytes(low);
    out.v[1] = signed_bytes(_mm_unpackhi_epi64(low, low));
    out.v[2] = signed_bytes(high);
    out.v[3] = signed_bytes(_mm_unpackhi_epi64(high, high));
#endif
    return out;
}

// LANES numbers of a row from column k on.
template <int T> inline Vec decode_columns(const uint8_t *row, int64_t k) {
    return T == F32 ? load((const float *)row + k) : T == F16 ? float16s(row + 2 * k) : bfloat16s(row + 2 * k);
}

// X rows of x, codes decoded in registers. ROWS weight rows share the loads of x. The operations of a row of x do not
// depend on X, so that results do not depend on the other rows of a batch. `request`: prefetch the rows after these.
template <int T, int ROWS, int X>
inline void few_rows(const Matrix &m, int64_t row, const float *x, int64_t stride, float *out, int64_t out_stride,
                     bool request) {
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
                const float scale = T == Q8_0 ? half(at) : e8m0_table[T == MXFP4 ? at[0] : scales[w][g]] / FP4_FACTOR;
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
            if (request) {
                for (int b = 0; b < BYTES; b += 64) prefetch(next + b);
                next += BYTES;
            }
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
    int r = 0;
    for (; r + 4 <= n; r += 4)
        few_rows<T, ROWS, 4>(m, row, x + r * stride, stride, out + r * out_stride, out_stride, r == 0);
    for (; r + 2 <= n; r += 2)
        few_rows<T, ROWS, 2>(m, row, x + r * stride, stride, out + r * out_stride, out_stride, r == 0);
    for (; r < n; r++) few_rows<T, ROWS, 1>(m, row, x + r * stride, stride, out + r * out_stride, out_stride, r == 0);
}

// Columns of whole vectors only; FP4 takes x with the even columns of every 32 before the odd ones.
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

// x with rows padded by zeros to whole vectors, for FP4 also deinterleaved, and for products of bytes its digits.
struct Input {
    const float *rows;
    int64_t stride;
    int n;
    const float *deinterleaved;
    int64_t deinterleaved_stride;
    const DigitChunk *digits;
    int64_t digit_stride;
};

// The memory of an Input.
struct InputBuffers {
    std::vector<float> padded, deinterleaved;
    std::vector<DigitChunk> digits;
};

// Which forms of x some types need besides rows.
struct InputForms {
    bool fp4, digits;
    explicit InputForms(std::initializer_list<int64_t> types) : fp4(false), digits(false) {
        for (int64_t type : types) add(type);
    }
    void add(int64_t type) {
        fp4 |= type == FP4;
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
            case MXFP4: return REGISTERS(MXFP4);
            case FP4:
                return in_registers<FP4>(m, first, stop, in.deinterleaved, in.deinterleaved_stride, in.n, out, out_stride);
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

Input prepare(const float *x, int64_t stride, int n, int64_t columns, const InputForms &forms, InputBuffers &buffers) {
    Input in{x, stride, n, nullptr, columns, nullptr, columns / CHUNK};
    if (columns % LANES) {  // the loops read whole vectors
        const int64_t width = whole(columns);
        buffers.padded.assign(n * width, 0.f);
        for (int r = 0; r < n; r++) memcpy(&buffers.padded[r * width], x + r * stride, 4 * columns);
        in.rows = buffers.padded.data();
        in.stride = width;
    }
    if (forms.fp4) {
        buffers.deinterleaved.resize(n * columns);
        for (int r = 0; r < n; r++) {
            const float *from = x + r * stride;
            float *into = &buffers.deinterleaved[r * columns];
            for (int64_t g = 0; g < columns; g += 32)
                for (int j = 0; j < 16; j++) {
                    into[g + j] = from[g + 2 * j];
                    into[g + 16 + j] = from[g + 2 * j + 1];
                }
        }
        in.deinterleaved = buffers.deinterleaved.data();
    }
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
