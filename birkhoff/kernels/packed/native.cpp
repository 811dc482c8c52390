// Products with packed matrices and attention on a CPU: what Python calls.
//
// A matrix is read as it is stored. Rows of the result are independent of each other and of the number of threads.
// Sums are float32.

#include <memory>
#include <vector>

#include "attention.h"
#include "layer.h"
#include "products.h"

extern "C" {

int birkhoff_abi() { return 4; }

void birkhoff_tables(const uint8_t *iq2_xxs, const uint8_t *iq2_xs, const uint8_t *iq3_xxs) {
    memcpy(grid_iq2_xxs, iq2_xxs, sizeof grid_iq2_xxs);
    memcpy(grid_iq2_xs, iq2_xs, sizeof grid_iq2_xs);
    memcpy(grid_iq3_xxs, iq3_xxs, sizeof grid_iq3_xxs);
#if VNNI
    pack_points(grid_iq2_xxs, 256, points_iq2_xxs);
    pack_points(grid_iq2_xs, 512, points_iq2_xs);
    pack_points(grid_iq3_xxs, 256, points_iq3_xxs);
#endif
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

void birkhoff_products(const Matrix *matrices, int count, const float *x, int64_t stride, int64_t n, float *out,
                       int64_t out_stride, int threads) {
    products(matrices, count, x, stride, n, out, out_stride, threads);
}

void birkhoff_grouped(const Matrix *matrix, int64_t group, const float *x, int64_t stride, int64_t n, float *out,
                      int64_t out_stride, int threads) {
    grouped(*matrix, group, x, stride, n, out, out_stride, threads);
}

void birkhoff_experts(const Matrix *matrices, int experts, const float *x, int n, const int64_t *ids, const float *weights,
                      int k, float limit, float *out, int threads) {
    few_experts(matrices, nullptr, experts, x, n, ids, weights, k, limit, out, threads);
}

void birkhoff_many_experts(const Matrix *matrices, int experts, const float *x, int64_t n, const int64_t *ids,
                           const float *weights, int k, float limit, float *out, int threads) {
    many_experts(matrices, experts, x, n, ids, weights, k, limit, out, threads);
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

// Attention of one sequence; see attention.h.
void birkhoff_attend(const float *queries, const float *recent, const float *entries, const uint8_t *selected,
                     const float *sink, float *out, int64_t length, int64_t past, int64_t oldest, int64_t entry_count,
                     int64_t selected_stride, int64_t heads, int64_t width, int64_t window, float scale, int threads) {
    const Attention call{queries, recent, entries, selected, sink, out, length, past, oldest, entry_count, selected_stride,
                         heads, width, window, scale};
    const int64_t block = block_queries(heads);
    pool().run(int((length + block - 1) / block), threads, [&](int part) {
        thread_local std::unique_ptr<AttentionScratch> buffers(new AttentionScratch);
        attend_block(call, part * block, std::min(length, (part + 1) * block), *buffers);
    });
}

// Routed experts of one decode step as a callback without arguments of its own. Pairs whose id is negative are left out.
struct ExpertJob {
    const Matrix *matrices;  // gate, up and down of every expert
    int64_t experts, x_type, n, k, threads;
    const uint8_t *x;      // [n, width] of type x_type: F32, F16 or BF16
    const int32_t *ids;    // [n, k]
    const float *weights;  // [n, k]
    float *out;            // [n, width]
    double limit;
};

void birkhoff_expert_job(void *data) {
    const ExpertJob &job = *static_cast<const ExpertJob *>(data);
    const int64_t width = job.matrices[0].columns, bytes = job.x_type == F32 ? 4 : 2;
    memset(job.out, 0, sizeof(float) * job.n * width);
    std::vector<int64_t> ids(job.n * job.k);
    bool any = false;
    for (int64_t i = 0; i < job.n * job.k; i++) {
        ids[i] = job.ids[i];
        any |= job.ids[i] >= 0;
    }
    if (!any) return;
    std::vector<float> x(job.n * width);
    for (int64_t row = 0; row < job.n; row++) {
        const uint8_t *from = job.x + row * width * bytes;
        float *into = &x[row * width];
        if (job.x_type == F32) decode<F32>(from, nullptr, 0, int(width), into);
        else if (job.x_type == F16) decode<F16>(from, nullptr, 0, int(width), into);
        else decode<BF16>(from, nullptr, 0, int(width), into);
    }
    few_experts(job.matrices, nullptr, int(job.experts), x.data(), int(job.n), ids.data(), job.weights, int(job.k),
                     float(job.limit), job.out, int(job.threads));
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

// RMSNorm of rows [n, width]; `weight` may be null.
void birkhoff_norm(const float *x, const float *weight, int64_t n, int64_t width, double eps, float *out) {
    norm_rows(x, weight, n, width, eps, out);
}

void birkhoff_read_streams(const Mixer *mixer, const float *streams, int64_t n, int64_t m, int64_t width, int threads,
                           float *u, float *pre, float *post, float *mix) {
    read_streams(*mixer, streams, n, m, width, threads, u, pre, post, mix);
}

void birkhoff_write_streams(const float *streams, const float *y, const float *post, const float *mix, int64_t n, int64_t m,
                            int64_t width, float *out) {
    write_streams(streams, y, post, mix, n, m, width, out);
}

void birkhoff_merge_streams(const Mixer *mixer, const float *streams, int64_t n, int64_t m, int64_t width, int threads,
                            float *merged, float *weights) {
    merge_streams(*mixer, streams, n, m, width, threads, merged, weights);
}

void birkhoff_attend_rows(const Layer *layer, const Cache *cache, const Step *step, const float *x, float *attended) {
    attend_rows(*layer, *cache, *step, x, attended);
}

void birkhoff_project_out(const Layer *layer, const float *attended, int64_t n, int threads, float *y) {
    project_out(*layer, attended, n, threads, y);
}

void birkhoff_route(const Layer *layer, const Step *step, const float *x, float *logits, int64_t *ids, float *weights,
                    float *shared) {
    route(*layer, *step, x, logits, ids, weights, shared);
}

void birkhoff_run_experts(const Layer *layer, const Step *step, const float *x, const int64_t *ids, const float *weights,
                          const float *shared, float *y) {
    run_experts(*layer, *step, x, ids, weights, shared, y);
}

// Layers [first, stop): streams [n, m, hidden] -> out.
void birkhoff_layers(const Layer *layers, const Cache *caches, const Step *step, int64_t first, int64_t stop,
                     const float *streams, float *out) {
    thread_local LayerBuffers buffers;
    for (int64_t i = first; i < stop; i++, streams = out) run_layer(layers[i], caches[i], *step, streams, out, buffers);
}

}  // extern "C"
