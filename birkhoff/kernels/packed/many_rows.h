// Products with many rows of x, as in prefill.
//
// PANEL rows of a weight at a time are decoded and transposed into a panel [columns][PANEL] that stays in the L2 cache,
// and multiplied with all rows of x, whose sums stay in registers. x is packed too: TILE rows side by side, column by
// column. The sum of a row adds its columns in order, whatever the other rows are.

#pragma once

#include <vector>

#include "decode.h"

namespace {

constexpr int PANEL = 2 * LANES;  // outputs
constexpr int DEPTH = 512;        // columns of a panel
#if WIDE
constexpr int TILE = 12;  // rows of x, so that 24 of 32 vector registers hold sums
#else
constexpr int TILE = 6;  // twelve of sixteen
#endif

// exp of LANES numbers, relative error about 2^-22; 0 below -87.3, and beyond 88 some number above 10^38.
inline Vec exponential(Vec x) {
#if WIDE
    const __m512 value = _mm512_min_ps((__m512)x, _mm512_set1_ps(89.f));
    const __mmask16 visible = _mm512_cmp_ps_mask(value, _mm512_set1_ps(-87.33f), _CMP_GT_OQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(value, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), value);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691e-4f);
    for (const float c : {1.3981999e-3f, 8.3334519e-3f, 4.1665795e-2f, 1.6666665e-1f, 5.0000001e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.f));
    return (Vec)_mm512_maskz_scalef_ps(visible, p, n);
#else
    typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
    const Vec most = splat(88.f), value = x < most ? x : most;
    const Ints whole = __builtin_convertvector(value * 1.44269504f + (value > Vec{} ? splat(0.5f) : splat(-0.5f)), Ints);
    const Vec n = __builtin_convertvector(whole, Vec);
    Vec r = fused(n, splat(-0.693359375f), value);
    r = fused(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691e-4f);
    for (const float c : {1.3981999e-3f, 8.3334519e-3f, 4.1665795e-2f, 1.6666665e-1f, 5.0000001e-1f}) p = fused(p, r, splat(c));
    p = fused(p, r * r, r) + 1.f;
    return value > splat(-87.33f) ? p * Vec((whole + 127) << 23) : Vec{};
#endif
}

// swiglu(a, b) * weight with the model's clamps.
inline Vec gated(Vec a, Vec b, float limit, float weight) {
    const Vec high = splat(limit), low = splat(-limit);
    a = a > high ? high : a;  // NaN stays
    b = b > high ? high : b;
    b = b < low ? low : b;
    return a / (1.f + exponential(-a)) * b * weight;
}

// Rows of x as tiles [tiles][columns][TILE]; `row(r)` is the address of row r. Missing rows are zero.
template <class Row> void pack_rows(const Row &row, int64_t n, int64_t columns, std::vector<float> &packed) {
    const int64_t tiles = (n + TILE - 1) / TILE;
    packed.resize(size_t(tiles * columns * TILE));
    for (int64_t tile = 0; tile < tiles; tile++) {
        float *into = packed.data() + tile * columns * TILE;
        for (int r = 0; r < TILE; r++) {
            if (tile * TILE + r < n) {
                const float *from = row(tile * TILE + r);
                for (int64_t k = 0; k < columns; k++) into[k * TILE + r] = from[k];
            } else {
                for (int64_t k = 0; k < columns; k++) into[k * TILE + r] = 0.f;
            }
        }
    }
}

// 16 rows of `stride` floats, 16 columns, as 16 columns of `into_stride`.
inline void transpose16(const float *from, int64_t stride, float *into, int64_t into_stride) {
#if WIDE
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from + i * stride);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    // a[4g + c]: columns c, c + 4, c + 8, c + 12 of rows 4g .. 4g + 3
    for (int c = 0; c < 4; c++) {
        const __m512 p = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), q = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
        const __m512 s = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd), t = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_ps(into + c * into_stride, _mm512_shuffle_f32x4(p, q, 0x88));
        _mm512_storeu_ps(into + (c + 8) * into_stride, _mm512_shuffle_f32x4(p, q, 0xdd));
        _mm512_storeu_ps(into + (c + 4) * into_stride, _mm512_shuffle_f32x4(s, t, 0x88));
        _mm512_storeu_ps(into + (c + 12) * into_stride, _mm512_shuffle_f32x4(s, t, 0xdd));
    }
#elif AVX2
    for (int row = 0; row < 16; row += 8)
        for (int column = 0; column < 16; column += 8) {
            __m256 a[8], b[8];
            for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(from + (row + i) * stride + column);
            for (int i = 0; i < 8; i += 2) {
                b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
                b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
            }
            for (int i = 0; i < 8; i += 4)
                for (int j = 0; j < 2; j++) {
                    a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
                    a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xee);
                }
            // a[4g + c]: columns c and c + 4 of rows 4g .. 4g + 3
            for (int c = 0; c < 4; c++) {
                float *at = into + (column + c) * into_stride + row;
                _mm256_storeu_ps(at, _mm256_permute2f128_ps(a[c], a[4 + c], 0x20));
                _mm256_storeu_ps(at + 4 * into_stride, _mm256_permute2f128_ps(a[c], a[4 + c], 0x31));
            }
        }
#else
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++) into[k * into_stride + i] = from[i * stride + k];
#endif
}

// Buffers of a thread for one panel.
struct PanelBuffer {
    alignas(64) float rows[16][DEPTH];
    alignas(64) float panel[DEPTH][PANEL];
};

// Columns [0, depth) of up to PANEL rows, transposed into buffer.panel; `read(row, into)` writes one row's columns.
template <class Read> void make_panel(PanelBuffer &buffer, int rows, int depth, const Read &read) {
    const int padded = (depth + 15) / 16 * 16;
    for (int half_panel = 0; half_panel < PANEL; half_panel += 16) {
        for (int r = 0; r < 16; r++) {
            const bool present = half_panel + r < rows;
            if (present) read(half_panel + r, buffer.rows[r]);
            const int from = present ? depth : 0;
            memset(buffer.rows[r] + from, 0, sizeof(float) * (padded - from));
        }
        for (int k = 0; k < padded; k += 16) transpose16(buffer.rows[0] + k, DEPTH, buffer.panel[k] + half_panel, PANEL);
    }
}

// out[r * stride + c] (+)= sum over k of x[k * TILE + r] * panel[k][c], for X rows and `columns` of PANEL outputs.
template <int X>
inline void multiply_tile(const float *x, const float (*panel)[PANEL], int64_t depth, float *out, int64_t stride, int columns,
                          bool add) {
    Vec left[X], right[X];
    for (int r = 0; r < X; r++) left[r] = right[r] = Vec{};
    for (int64_t k = 0; k < depth; k++) {
        const Vec a = load(panel[k]), b = load(panel[k] + LANES);
        for (int r = 0; r < X; r++) {
            const Vec value = splat(x[k * TILE + r]);
            left[r] += value * a;
            right[r] += value * b;
        }
    }
    for (int r = 0; r < X; r++) {
        float *at = out + r * stride;
        if (columns == PANEL) {
            store(at, add ? load(at) + left[r] : left[r]);
            store(at + LANES, add ? load(at + LANES) + right[r] : right[r]);
        } else {
            for (int c = 0; c < columns; c++) {
                const float value = c < LANES ? left[r][c] : right[r][c - LANES];
                at[c] = add ? at[c] + value : value;
            }
        }
    }
}

// All n rows of a packed x (of `columns` columns, read from `first` on) times one panel.
inline void multiply_panel(const float *packed, int64_t n, int64_t columns, int64_t first, const float (*panel)[PANEL],
                           int64_t depth, float *out, int64_t stride, int outputs, bool add) {
    for (int64_t r = 0; r < n; r += TILE) {
        const float *x = packed + r * columns + first * TILE;
        float *at = out + r * stride;
#define ROWS(X) case X: multiply_tile<X>(x, panel, depth, at, stride, outputs, add); break
        switch (std::min<int64_t>(n - r, TILE)) {
#if WIDE
            ROWS(12);
            ROWS(11);
            ROWS(10);
            ROWS(9);
            ROWS(8);
            ROWS(7);
#endif
            ROWS(6);
            ROWS(5);
            ROWS(4);
            ROWS(3);
            ROWS(2);
            ROWS(1);
        }
#undef ROWS
    }
}

// out[r * stride + i] = x[r] . row (first + i) of a matrix, for up to PANEL rows of it.
inline void product_panel(const Matrix &m, int64_t first, int rows, const float *packed, int64_t n, float *out, int64_t stride,
                          PanelBuffer &buffer) {
    for (int64_t start = 0; start < m.columns; start += DEPTH) {
        const int depth = int(std::min<int64_t>(DEPTH, m.columns - start));
        make_panel(buffer, rows, depth, [&](int row, float *into) {
            const uint8_t *codes = m.codes + (first + row) * m.row_bytes, *scales = scales_of(m, first + row);
#define COLUMNS(T) decode<T>(codes, scales, int(start), depth, into)
            FOR_TYPE(m.type, COLUMNS)
#undef COLUMNS
        });
        multiply_panel(packed, n, m.columns, start, buffer.panel, depth, out, stride, rows, start > 0);
    }
}

}  // namespace
