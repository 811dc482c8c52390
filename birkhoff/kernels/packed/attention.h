// Shared-key attention of a prefill chunk: every head of a query reads the same keys, which are also the values.
//
// A block of queries is scored against the keys of their windows and the entries that any of them selected; scores,
// softmax with sink, and the weighted sum of the keys stay in the cache.

#pragma once

#include <vector>

#include "many_rows.h"

namespace {

// One sequence. queries and out [length, heads, width]; recent [past + length, width]; entries [.., width]; selected
// [length, selected_stride] or null: which of the `entry_count` entries a query sees.
struct Attention {
    const float *queries, *recent, *entries;
    const uint8_t *selected;
    const float *sink;
    float *out;
    int64_t length, past, oldest, entry_count, selected_stride, heads, width, window;
    float scale;
};

constexpr int64_t BLOCK_ROWS = 128;    // query rows of a block, about
constexpr int64_t BLOCK_QUERIES = 16;  // at most

inline int64_t block_queries(int64_t heads) { return std::max<int64_t>(1, std::min(BLOCK_QUERIES, BLOCK_ROWS / heads)); }

struct AttentionScratch {
    PanelBuffer buffer;
    std::vector<float> queries, scores, weights;
    std::vector<const float *> keys;
    std::vector<int64_t> chosen;  // entries that the block sees
};

// exp(scores - their maximum) where visible, 0 elsewhere; returns 1 / (their sum + exp(sink - maximum)).
inline float softmax_row(float *row, int64_t low, int64_t high, int64_t near, const uint8_t *selected,
                         const std::vector<int64_t> &chosen, int64_t padded, float scale, float sink) {
    const float hidden = -INFINITY;
    for (int64_t j = 0; j < low; j++) row[j] = hidden;
    for (int64_t j = high; j < near; j++) row[j] = hidden;
    for (size_t j = 0; j < chosen.size(); j++)
        if (!selected[chosen[j]]) row[near + int64_t(j)] = hidden;
    for (int64_t j = near + int64_t(chosen.size()); j < padded; j++) row[j] = hidden;
    Vec tops = splat(hidden);
    for (int64_t j = 0; j < padded; j += LANES) {
        const Vec value = load(row + j);
        tops = value > tops ? value : tops;
    }
    float top = tops[0];
    for (int lane = 1; lane < LANES; lane++) top = std::max(top, float(tops[lane]));
    Vec sums{};
    for (int64_t j = 0; j < padded; j += LANES) {
        const Vec value = exponential((load(row + j) - top) * scale);
        store(row + j, value);
        sums += value;
    }
    return 1.f / (total(sums) + std::exp(sink - top * scale));
}

// Queries [start, stop) of a sequence.
inline void attend_block(const Attention &a, int64_t start, int64_t stop, AttentionScratch &s) {
    const int64_t first = std::max<int64_t>(std::max<int64_t>(a.past + start - a.window + 1, 0), a.oldest);
    const int64_t near = a.past + stop - first, rows = (stop - start) * a.heads;
    s.chosen.clear();
    for (int64_t e = 0; a.selected && e < a.entry_count; e++)
        for (int64_t t = start; t < stop; t++)
            if (a.selected[t * a.selected_stride + e]) {
                s.chosen.push_back(e);
                break;
            }
    s.keys.clear();
    for (int64_t j = 0; j < near; j++) s.keys.push_back(a.recent + (first + j) * a.width);
    for (const int64_t e : s.chosen) s.keys.push_back(a.entries + e * a.width);
    const int64_t count = int64_t(s.keys.size()), padded = (count + PANEL - 1) / PANEL * PANEL;
    const float *queries = a.queries + start * a.heads * a.width;
    pack_rows([&](int64_t r) { return queries + r * a.width; }, rows, a.width, s.queries);
    s.scores.resize(size_t(rows * padded));
    for (int64_t panel = 0; panel < count; panel += PANEL) {
        const int present = int(std::min<int64_t>(PANEL, count - panel));
        for (int64_t column = 0; column < a.width; column += DEPTH) {
            const int depth = int(std::min<int64_t>(DEPTH, a.width - column));
            make_panel(s.buffer, present, depth,
                       [&](int key, float *into) { memcpy(into, s.keys[panel + key] + column, 4 * size_t(depth)); });
            multiply_panel(s.queries.data(), rows, a.width, column, s.buffer.panel, depth, s.scores.data() + panel, padded,
                           PANEL, column > 0);
        }
    }
    std::vector<float> &factors = s.weights;
    factors.resize(size_t(rows));
    for (int64_t t = start; t < stop; t++) {
        const int64_t position = a.past + t;
        const int64_t low = std::max<int64_t>(position - a.window + 1 - first, 0), high = position + 1 - first;
        for (int64_t h = 0; h < a.heads; h++) {
            const int64_t r = (t - start) * a.heads + h;
            factors[r] = softmax_row(s.scores.data() + r * padded, low, high, near,
                                     a.selected ? a.selected + t * a.selected_stride : nullptr, s.chosen, padded, a.scale,
                                     a.sink[h]);
        }
    }
    pack_rows([&](int64_t r) { return s.scores.data() + r * padded; }, rows, padded, s.queries);
    float *out = a.out + start * a.heads * a.width;
    for (int64_t column = 0; column < a.width; column += PANEL) {
        const int outputs = int(std::min<int64_t>(PANEL, a.width - column));
        for (int64_t key = 0; key < count; key += DEPTH) {
            const int depth = int(std::min<int64_t>(DEPTH, count - key));
            for (int j = 0; j < depth; j++) {
                memcpy(s.buffer.panel[j], s.keys[key + j] + column, 4 * size_t(outputs));
                if (outputs < PANEL) memset(s.buffer.panel[j] + outputs, 0, 4 * size_t(PANEL - outputs));
            }
            multiply_panel(s.queries.data(), rows, padded, key, s.buffer.panel, depth, out + column, a.width, outputs, key > 0);
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < a.width; c++) out[r * a.width + c] *= factors[r];
}

}  // namespace
