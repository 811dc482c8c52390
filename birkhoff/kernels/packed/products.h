// Products of layers and experts, divided among threads: with few rows of x, as in a decode step, and with many.

#pragma once

#include <memory>
#include <vector>

#include "few_rows.h"
#include "many_rows.h"
#include "threads.h"

namespace {

// Buffers of the calling thread, kept between calls.
struct Scratch {
    InputBuffers input;
    std::vector<float> packed, gate, hidden, partial;
};
thread_local Scratch scratch;

PanelBuffer &panel_buffer() {
    thread_local std::unique_ptr<PanelBuffer> buffer(new PanelBuffer);
    return *buffer;
}

constexpr int64_t FEW_ROWS = 24;  // rows of x up to which decoding codes in registers is faster

// out[r, :] = x[r] . every matrix, side by side. All matrices have the same columns.
void few_products(const Matrix *matrices, int count, const float *x, int64_t stride, int n, float *out,
                  int64_t out_stride, int threads) {
    InputForms forms({});
    int64_t rows = 0;
    for (int i = 0; i < count; i++) {
        forms.add(matrices[i].type);
        rows += matrices[i].rows;
    }
    const int64_t columns = matrices[0].columns;
    const Input in = prepare(x, stride, n, columns, forms, scratch.input);
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

// As few_products with one matrix whose rows form groups; group g reads columns [g * columns, ...) of x.
void few_grouped(const Matrix &matrix, int64_t group, const float *x, int64_t stride, int n, float *out,
                 int64_t out_stride, int threads) {
    const int64_t groups = matrix.rows / group, columns = matrix.columns;
    const InputForms forms({matrix.type});
    // Inputs that must be padded are prepared one group at a time, the others all at once.
    const int64_t step = columns % LANES ? 1 : groups;
    for (int64_t begin = 0; begin < groups; begin += step) {
        const Input in = prepare(x + begin * columns, stride, n, step * columns, forms, scratch.input);
        const int64_t rows = step * group, each = parts_for(rows * columns, threads);
        pool().run(int(each), threads, [&](int part) {
            const int64_t first = rows * part / each / 4 * 4, stop = part + 1 == each ? rows : rows * (part + 1) / each / 4 * 4;
            for (int64_t g = first / group; g < step && g * group < stop; g++) {
                Input own = in;
                own.rows += g * columns;
                if (forms.fp4) own.fp4 += g * columns;
                if (forms.mxfp4) own.mxfp4 += g * columns;
                if (forms.digits) own.digits += g * columns / CHUNK;
                const int64_t from = std::max(first, g * group), to = std::min(stop, (g + 1) * group);
                if (from < to) product(matrix, begin * group + from, begin * group + to, own, out, out_stride);
            }
        });
    }
}

// hidden[j] = swiglu(gate[j], up[j]) * weight for LANES numbers.
ONE_COPY void gate_vector(const float *gate, const float *up, float limit, float weight, float *hidden) {
    store(hidden, gated(load(gate), load(up), limit, weight));
}

// The same for `count` numbers. Every number is computed alike, wherever a part begins.
void gate_row(const float *gate, const float *up, int64_t count, float limit, float weight, float *hidden) {
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) gate_vector(gate + j, up + j, limit, weight, hidden + j);
    if (j < count) {
        float a[LANES] = {}, b[LANES] = {};
        memcpy(a, gate + j, 4 * size_t(count - j));
        memcpy(b, up + j, 4 * size_t(count - j));
        gate_vector(a, b, limit, weight, a);
        memcpy(hidden + j, a, 4 * size_t(count - j));
    }
}

// out[first .. stop) = x [inner] . weight [inner, width], columns [first, stop).
void multiply_columns(const float *x, const float *weight, int64_t inner, int64_t width, int64_t first, int64_t stop,
                      float *out) {
    int64_t c = first;
    for (; c + LANES <= stop; c += LANES) {
        Vec sum{};
        for (int64_t i = 0; i < inner; i++) sum = fused(load(weight + i * width + c), splat(x[i]), sum);
        store(out + c, sum);
    }
    for (; c < stop; c++) {  // the last columns, which are in the same part whatever the parts are
        float sum = 0;
        for (int64_t i = 0; i < inner; i++) sum += weight[i * width + c] * x[i];
        out[c] = sum;
    }
}

// Routed experts: out[r] += sum over the experts of row r, in ascending order of expert.
// matrices: gate, up and down of every expert; ids and weights [n, k]; x [n, columns], out [n, columns]. `transposed`, if
// not null, is down of all experts as numbers [experts, inner, columns] instead.
void few_experts(const Matrix *matrices, const float *transposed, int experts, const float *x, int n, const int64_t *ids,
                 const float *weights, int k, float limit, float *out, int threads) {
    const int64_t width = matrices[0].columns, inner = matrices[0].rows;
    const InputForms forms({matrices[0].type, matrices[1].type}), down_forms({matrices[2].type});
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
    std::vector<InputBuffers> buffers(2 * tasks.size());
    const bool shared_input = n == 1;
    for (size_t t = 0; t < tasks.size(); t++) {
        if (!shared_input) {
            const float *from = &gathered[tasks[t].first * width];
            inputs[t] = prepare(from, width, tasks[t].count, width, forms, buffers[2 * t]);
            continue;
        }
        inputs[t] = t ? inputs[0] : prepare(x, width, 1, width, forms, buffers[0]);
        inputs[t].n = tasks[t].count;  // one row, as often as it lists the expert
        inputs[t].stride = inputs[t].ordered_stride = inputs[t].digit_stride = 0;
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
                gate_row(&gate[i * 2 * inner + first], &gate[i * 2 * inner + inner + first], stop - first, limit,
                         pairs[i].weight, &hidden[i * inner + first]);
        }
    });
    for (size_t t = 0; t < tasks.size() && !transposed; t++)
        middles[t] = prepare(&hidden[tasks[t].first * inner], inner, tasks[t].count, inner, down_forms, buffers[2 * t + 1]);
    pool().run(parts, threads, [&](int part) {
        const int64_t first = width * part / parts / LANES * LANES;
        const int64_t stop = part + 1 == parts ? width : width * (part + 1) / parts / LANES * LANES;
        for (size_t t = 0; t < tasks.size(); t++) {
            const Matrix &down = matrices[3 * pairs[tasks[t].first].expert + 2];
            if (!transposed) product(down, first, stop, middles[t], &partial[tasks[t].first * width], width);
            for (int i = tasks[t].first; i < tasks[t].first + tasks[t].count; i++) {
                if (transposed)
                    multiply_columns(&hidden[i * inner], transposed + pairs[i].expert * inner * width, inner, width, first,
                                     stop, &partial[i * width]);
                float *target = out + pairs[i].row * width;
                for (int64_t j = first; j < stop; j++) target[j] += partial[i * width + j];
            }
        }
    });
}

// As few_products for many rows of x.
void many_products(const Matrix *matrices, int count, const float *x, int64_t stride, int64_t n, float *out,
                   int64_t out_stride, int threads) {
    const int64_t columns = matrices[0].columns;
    pack_rows([&](int64_t r) { return x + r * stride; }, n, columns, scratch.packed);
    struct Part { const Matrix *matrix; int64_t first, column; };
    std::vector<Part> parts;
    int64_t column = 0;
    for (int i = 0; i < count; i++) {
        for (int64_t row = 0; row < matrices[i].rows; row += PANEL) parts.push_back({matrices + i, row, column + row});
        column += matrices[i].rows;
    }
    const float *packed = scratch.packed.data();
    pool().run(int(parts.size()), threads, [&](int index) {
        const Part &part = parts[index];
        const int rows = int(std::min<int64_t>(PANEL, part.matrix->rows - part.first));
        product_panel(*part.matrix, part.first, rows, packed, n, out + part.column, out_stride, panel_buffer());
    });
}

// As few_grouped for many rows of x.
void many_grouped(const Matrix &matrix, int64_t group, const float *x, int64_t stride, int64_t n, float *out,
                  int64_t out_stride, int threads) {
    for (int64_t g = 0; g * group < matrix.rows; g++) {
        const float *columns = x + g * matrix.columns;
        pack_rows([&](int64_t r) { return columns + r * stride; }, n, matrix.columns, scratch.packed);
        const float *packed = scratch.packed.data();
        const int64_t panels = (group + PANEL - 1) / PANEL;
        pool().run(int(panels), threads, [&](int panel) {
            const int64_t first = g * group + int64_t(panel) * PANEL;
            const int rows = int(std::min<int64_t>(PANEL, (g + 1) * group - first));
            product_panel(matrix, first, rows, packed, n, out + first, out_stride, panel_buffer());
        });
    }
}

void products(const Matrix *matrices, int count, const float *x, int64_t stride, int64_t n, float *out, int64_t out_stride,
              int threads) {
    if (n <= FEW_ROWS) few_products(matrices, count, x, stride, int(n), out, out_stride, threads);
    else many_products(matrices, count, x, stride, n, out, out_stride, threads);
}

void grouped(const Matrix &matrix, int64_t group, const float *x, int64_t stride, int64_t n, float *out, int64_t out_stride,
             int threads) {
    if (n <= FEW_ROWS) few_grouped(matrix, group, x, stride, int(n), out, out_stride, threads);
    else many_grouped(matrix, group, x, stride, n, out, out_stride, threads);
}

// As few_experts for many rows of x; `out` is written, not added to.
void many_experts(const Matrix *matrices, int experts, const float *x, int64_t n, const int64_t *ids,
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

}  // namespace
