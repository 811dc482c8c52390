// Products with packed matrices and attention on a CPU: what Python calls.
//
// A matrix is read as it is stored. Rows of the result are independent of each other and of the number of threads.
// Sums are float32.

#include <memory>
#include <vector>

#include "attention.h"
#include "decode.h"
#include "few_rows.h"
#include "many_rows.h"
#include "threads.h"

namespace {

// Buffers of the calling thread, kept between calls.
struct Scratch {
    std::vector<float> padded, deinterleaved, gate, hidden, partial;
};
thread_local Scratch scratch;

PanelBuffer &panel_buffer() {
    thread_local std::unique_ptr<PanelBuffer> buffer(new PanelBuffer);
    return *buffer;
}

}  // namespace

extern "C" {

int birkhoff_abi() { return 3; }

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

// As birkhoff_products for many rows of x.
void birkhoff_many_products(const Matrix *matrices, int count, const float *x, int64_t stride, int64_t n, float *out,
                            int64_t out_stride, int threads) {
    const int64_t columns = matrices[0].columns;
    pack_rows([&](int64_t r) { return x + r * stride; }, n, columns, scratch.padded);
    struct Part { const Matrix *matrix; int64_t first, column; };
    std::vector<Part> parts;
    int64_t column = 0;
    for (int i = 0; i < count; i++) {
        for (int64_t row = 0; row < matrices[i].rows; row += PANEL) parts.push_back({matrices + i, row, column + row});
        column += matrices[i].rows;
    }
    const float *packed = scratch.padded.data();
    pool().run(int(parts.size()), threads, [&](int index) {
        const Part &part = parts[index];
        const int rows = int(std::min<int64_t>(PANEL, part.matrix->rows - part.first));
        product_panel(*part.matrix, part.first, rows, packed, n, out + part.column, out_stride, panel_buffer());
    });
}

// As birkhoff_grouped for many rows of x.
void birkhoff_many_grouped(const Matrix *matrix, int64_t group, const float *x, int64_t stride, int64_t n, float *out,
                           int64_t out_stride, int threads) {
    for (int64_t g = 0; g * group < matrix->rows; g++) {
        const float *columns = x + g * matrix->columns;
        pack_rows([&](int64_t r) { return columns + r * stride; }, n, matrix->columns, scratch.padded);
        const float *packed = scratch.padded.data();
        const int64_t panels = (group + PANEL - 1) / PANEL;
        pool().run(int(panels), threads, [&](int panel) {
            const int64_t first = g * group + int64_t(panel) * PANEL;
            const int rows = int(std::min<int64_t>(PANEL, (g + 1) * group - first));
            product_panel(*matrix, first, rows, packed, n, out + first, out_stride, panel_buffer());
        });
    }
}

// As birkhoff_experts for many rows of x; `out` is written, not added to.
void birkhoff_many_experts(const Matrix *matrices, int experts, const float *x, int64_t n, const int64_t *ids,
                           const float *weights, int k, float limit, float *out, int threads) {
    const int64_t width = matrices[0].columns, inner = matrices[0].rows, total_pairs = n * k;
    // Pairs of a row and an expert, by expert; position[r * k + i] is where a pair of row r went.
    std::vector<int64_t> first(experts + 1), order(total_pairs), position(total_pairs);
    for (int64_t i = 0; i < total_pairs; i++) first[ids[i] + 1]++;
    for (int e = 0; e < experts; e++) first[e + 1] += first[e];
    {
        std::vector<int64_t> next(first.begin(), first.end() - 1);
        for (int64_t i = 0; i < total_pairs; i++) {
            position[i] = next[ids[i]]++;
            order[position[i]] = i;
        }
    }
    std::vector<int> used;
    for (int e = 0; e < experts; e++)
        if (first[e + 1] > first[e]) used.push_back(e);
    std::unique_ptr<float[]> partial(new float[total_pairs * width]);
    pool().run(int(used.size()), threads, [&](int task) {
        thread_local std::vector<float> packed, gate, hidden;
        PanelBuffer &buffer = panel_buffer();
        const int expert = used[task];
        const int64_t from = first[expert], rows = first[expert + 1] - from;
        const Matrix *matrix = matrices + 3 * int64_t(expert);
        pack_rows([&](int64_t r) { return x + order[from + r] / k * width; }, rows, width, packed);
        gate.resize(size_t(rows * 2 * PANEL));
        hidden.resize(size_t(rows * inner));
        for (int64_t panel = 0; panel < inner; panel += PANEL) {
            const int outputs = int(std::min<int64_t>(PANEL, inner - panel));
            product_panel(matrix[0], panel, outputs, packed.data(), rows, gate.data(), 2 * PANEL, buffer);
            product_panel(matrix[1], panel, outputs, packed.data(), rows, gate.data() + PANEL, 2 * PANEL, buffer);
            for (int64_t r = 0; r < rows; r++) {
                const float weight = weights[order[from + r]], *both = gate.data() + r * 2 * PANEL;
                alignas(64) float result[PANEL];
                for (int j = 0; j < PANEL; j += LANES)
                    store(result + j, gated(load(both + j), load(both + PANEL + j), limit, weight));
                memcpy(hidden.data() + r * inner + panel, result, 4 * size_t(outputs));
            }
        }
        pack_rows([&](int64_t r) { return hidden.data() + r * inner; }, rows, inner, packed);
        for (int64_t panel = 0; panel < width; panel += PANEL)
            product_panel(matrix[2], panel, int(std::min<int64_t>(PANEL, width - panel)), packed.data(), rows,
                          partial.get() + from * width + panel, width, buffer);
    });
    const int64_t rows_per_part = std::max<int64_t>(1, (1 << 16) / width);
    pool().run(int((n + rows_per_part - 1) / rows_per_part), threads, [&](int part) {
        const int64_t stop = std::min(n, (part + 1) * rows_per_part);
        for (int64_t r = part * rows_per_part; r < stop; r++) {
            int64_t *at = position.data() + r * k;
            std::sort(at, at + k);  // in ascending order of expert
            float *target = out + r * width;
            memcpy(target, partial.get() + at[0] * width, 4 * size_t(width));
            for (int i = 1; i < k; i++) {
                const float *more = partial.get() + at[i] * width;
                for (int64_t j = 0; j < width; j++) target[j] += more[j];
            }
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
    birkhoff_experts(job.matrices, int(job.experts), x.data(), int(job.n), ids.data(), job.weights, int(job.k),
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

}  // extern "C"
