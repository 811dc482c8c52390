// A layer of a decode step: residual streams, attention over rings and pages, router and experts, for a few rows.
//
// The parts are functions that Python can call one by one, where something between them is captured or edited, and
// `run_layers` calls one after the other; a row has the same bits either way. Structures are filled by Python
// (layer.py, decode/native.py). All numbers are float32.

#pragma once

#include <vector>

#include "products.h"

// Linear layers with a common input, their results side by side; `rows` and `columns` are those of all of them.
struct Linears {
    const Matrix *matrices;
    int64_t count, rows, columns;
};

// The hyper-connection of a sublayer, and the norm of the sublayer's input.
struct Mixer {
    Matrix fn;
    const float *base, *scale, *norm;
    int64_t iters;
    double eps, rms_eps, norm_eps;
};

// A compressor; without one, `ratio` is 0. `omega` [pairs]: frequencies of its rotation.
struct Pooling {
    const float *ape, *norm, *omega;
    int64_t ratio, overlap, width;
};

struct Layer {
    int64_t hidden, streams, heads, head_dim, rank, pairs, window, ratio, group_rank;
    int64_t index_heads, index_width, index_topk;
    int64_t experts, inner, topk;
    double eps, scale, factor, limit;
    Mixer attention_mixer, expert_mixer;
    Linears in_proj, wq_b, wo_a, wo_b, index_wq_b;
    const float *q_norm, *kv_norm, *sink;
    Pooling entry, index;
    Linears router, shared_down;     // router: logits, gate and up of the shared expert
    const Matrix *expert_matrices;   // gate, up and down of every expert
    const float *transposed_down;    // instead of down: numbers [experts, inner, hidden]; or null
    const float *bias;               // of the router, or null
    const int32_t *hash_table;       // [vocabulary, topk] expert ids of each token, or null
};

// Rings [slots, size, width] and pages [pages, per_page, width] of one layer.
struct Cache {
    float *keys, *entry_raw, *entry_pages, *index_raw, *index_pages;
    int64_t key_size, raw_size, per_page;
    const int64_t *table;  // [slots, table_stride] pages of a sequence
    int64_t table_stride;
};

// The rows of a step. cos and sin [n, pairs] for sliding and for compressed layers.
struct Step {
    int64_t n, threads;
    const int64_t *tokens, *slots, *positions;
    const float *cos[2], *sin[2];
};

namespace {

ONE_COPY float dot(const float *a, const float *b, int64_t count) {
    Vec sum{};
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) sum = fused(load(a + k), load(b + k), sum);
    float rest = 0;
    for (; k < count; k++) rest += a[k] * b[k];
    return total(sum) + rest;
}

// One over the root mean square of numbers with this sum of squares.
inline float inverse_rms(float squares, int64_t count, double eps) {
    return float(1.0 / std::sqrt(double(squares) / double(count) + eps));
}

ONE_COPY void norm_row(const float *x, const float *weight, int64_t width, double eps, float *out) {
    const float rho = inverse_rms(dot(x, x, width), width, eps);
    if (weight)
        for (int64_t k = 0; k < width; k++) out[k] = x[k] * rho * weight[k];
    else
        for (int64_t k = 0; k < width; k++) out[k] = x[k] * rho;
}

// Rotate the last 2 * pairs channels; `sign` -1 inverts.
ONE_COPY void rotate_row(const float *x, const float *cos, const float *sin, float sign, int64_t width, int64_t pairs,
                         float *out) {
    const int64_t fixed = width - 2 * pairs;
    memmove(out, x, 4 * size_t(fixed));
    for (int64_t i = 0; i < pairs; i++) {
        const float a = x[fixed + 2 * i], b = x[fixed + 2 * i + 1], c = cos[i], s = sin[i] * sign;
        out[fixed + 2 * i] = a * c - b * s;
        out[fixed + 2 * i + 1] = a * s + b * c;
    }
}

// Divide rows among threads if they are worth it; `cost` is that of a row in weights of a product.
template <class Row> void for_rows(int64_t n, int64_t cost, int threads, const Row &row) {
    const int parts = int(std::min<int64_t>(n, parts_for(n * cost, threads)));
    pool().run(parts, threads, [&](int part) {
        for (int64_t r = n * part / parts; r < n * (part + 1) / parts; r++) row(r);
    });
}

ONE_COPY void sum_streams(const float *streams, const float *weights, int64_t m, int64_t width, float *out) {
    for (int64_t c = 0; c < width; c++) out[c] = weights[0] * streams[c];
    for (int64_t s = 1; s < m; s++)
        for (int64_t c = 0; c < width; c++) out[c] += weights[s] * streams[s * width + c];
}

inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

// Make the matrix [m, m] doubly stochastic: a softmax of its rows, then columns and rows in turn.
template <int M> inline void sinkhorn(float *mix, int64_t streams, int64_t iters, float eps) {
    const int m = M ? M : int(streams);
    for (int j = 0; j < m; j++) {
        float top = -INFINITY, sum = 0;
        for (int k = 0; k < m; k++) top = std::max(top, mix[j * m + k]);
        for (int k = 0; k < m; k++) sum += mix[j * m + k] = std::exp(mix[j * m + k] - top);
        for (int k = 0; k < m; k++) mix[j * m + k] = mix[j * m + k] / sum + eps;
    }
    for (int64_t step = 0; step < iters; step++) {
        for (int j = 0; step && j < m; j++) {
            float sum = eps;
            for (int k = 0; k < m; k++) sum += mix[j * m + k];
            for (int k = 0; k < m; k++) mix[j * m + k] /= sum;
        }
        for (int k = 0; k < m; k++) {
            float sum = eps;
            for (int j = 0; j < m; j++) sum += mix[j * m + k];
            for (int j = 0; j < m; j++) mix[j * m + k] /= sum;
        }
    }
}

// pre [m], post [m] and mix [m, m] of a row, from the projection z of its streams; rho is one over their root mean square.
ONE_COPY void mixer_weights(const Mixer &mixer, const float *z, float rho, int64_t m, float *pre, float *post, float *mix) {
    const float eps = float(mixer.eps);
    const float *base = mixer.base, *scale = mixer.scale;
    for (int64_t s = 0; s < m; s++) {
        pre[s] = sigmoid(z[s] * rho * scale[0] + base[s]) + eps;
        post[s] = 2.f * sigmoid(z[m + s] * rho * scale[1] + base[m + s]);
    }
    for (int64_t i = 0; i < m * m; i++) mix[i] = z[2 * m + i] * rho * scale[2] + base[2 * m + i];
    if (m == 4) sinkhorn<4>(mix, m, mixer.iters, eps);
    else sinkhorn<0>(mix, m, mixer.iters, eps);
}

constexpr int64_t MIXER_COST = 1 << 14;  // of the weights of one row: about a microsecond

// streams [n, m, d] -> u [n, d] and the coefficients pre [n, m], post [n, m], mix [n, from, to].
void read_streams(const Mixer &mixer, const float *streams, int64_t n, int64_t m, int64_t width, int threads, float *u,
                  float *pre, float *post, float *mix) {
    thread_local std::vector<float> logits;
    logits.resize(size_t(n * mixer.fn.rows));
    float *z = logits.data();
    products(&mixer.fn, 1, streams, m * width, n, z, mixer.fn.rows, threads);
    for_rows(n, MIXER_COST, threads, [&](int64_t r) {
        const float *row = streams + r * m * width;
        const float rho = inverse_rms(dot(row, row, m * width), m * width, mixer.rms_eps);
        mixer_weights(mixer, z + r * mixer.fn.rows, rho, m, pre + r * m, post + r * m, mix + r * m * m);
        sum_streams(row, pre + r * m, m, width, u + r * width);
    });
}

// out[k] = post[k] y + sum over j of mix[j, k] streams[j], for n rows.
ONE_COPY void write_streams(const float *streams, const float *y, const float *post, const float *mix, int64_t n, int64_t m,
                            int64_t width, float *out) {
    for (int64_t r = 0; r < n; r++, streams += m * width, y += width, post += m, mix += m * m)
        for (int64_t k = 0; k < m; k++, out += width) {
            for (int64_t c = 0; c < width; c++) out[c] = post[k] * y[c];
            for (int64_t j = 0; j < m; j++) {
                const float coefficient = mix[j * m + k], *source = streams + j * width;
                for (int64_t c = 0; c < width; c++) out[c] += coefficient * source[c];
            }
        }
}

// streams [n, m, d] -> merged [n, d] with read-out weights [n, m]. Of the mixer, fn, base, scale and the epsilons count.
void merge_streams(const Mixer &mixer, const float *streams, int64_t n, int64_t m, int64_t width, int threads, float *merged,
                   float *weights) {
    products(&mixer.fn, 1, streams, m * width, n, weights, m, threads);
    for (int64_t r = 0; r < n; r++, streams += m * width, merged += width, weights += m) {
        const float rho = inverse_rms(dot(streams, streams, m * width), m * width, mixer.rms_eps);
        for (int64_t s = 0; s < m; s++)
            weights[s] = sigmoid(weights[s] * rho * mixer.scale[0] + mixer.base[s]) + float(mixer.eps);
        sum_streams(streams, weights, m, width, merged);
    }
}

void multiply(const Linears &layers, const float *x, int64_t n, float *out, int threads) {
    products(layers.matrices, int(layers.count), x, layers.columns, n, out, layers.rows, threads);
}

inline const float *page_row(const Cache &cache, const float *pages, int64_t slot, int64_t entry, int64_t width) {
    const int64_t page = cache.table[slot * cache.table_stride + entry / cache.per_page];
    return pages + (page * cache.per_page + entry % cache.per_page) * width;
}

// Pool the block that a row completes, normalise and rotate it, and store it on its page. With overlap 2 the preceding
// block contributes the first half of its channels; the first block has none.
ONE_COPY void pool_entry(const Layer &layer, const Pooling &p, const Cache &cache, const float *ring, float *pages,
                         int64_t slot, int64_t position) {
    const int64_t entry = position / p.ratio, first = entry * p.ratio, gates = p.overlap * p.width;
    const int64_t oldest = std::max<int64_t>(first - (p.overlap - 1) * p.ratio, 0), row_width = 2 * gates;
    thread_local std::vector<float> buffer;
    buffer.assign(size_t(3 * p.width + 2 * layer.pairs), 0.f);
    float *top = buffer.data(), *sum = top + p.width, *pooled = sum + p.width, *cos = pooled + p.width;
    float *sin = cos + layer.pairs;
    for (int64_t c = 0; c < p.width; c++) top[c] = -INFINITY;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t at = oldest; at <= position; at++) {
            const float *row = ring + (slot * cache.raw_size + at % cache.raw_size) * row_width;
            row += p.overlap == 2 && at >= first ? p.width : 0;
            if (pass == 0)
                for (int64_t c = 0; c < p.width; c++) top[c] = std::max(top[c], row[gates + c]);
            else
                for (int64_t c = 0; c < p.width; c++) {
                    const float weight = std::exp(row[gates + c] - top[c]);
                    sum[c] += weight;
                    pooled[c] += weight * row[c];
                }
        }
    for (int64_t c = 0; c < p.width; c++) pooled[c] /= sum[c];
    norm_row(pooled, p.norm, p.width, layer.eps, pooled);
    for (int64_t i = 0; i < layer.pairs; i++) {
        const float angle = float(first) * p.omega[i];
        cos[i] = std::cos(angle);
        sin[i] = std::sin(angle);
    }
    float *target = const_cast<float *>(page_row(cache, pages, slot, entry, p.width));
    rotate_row(pooled, cos, sin, 1.f, p.width, layer.pairs, target);
}

// Store raw rows [n, stride] of a compressor in its ring, with the position bias of the gates, and the entries they
// complete on their pages.
void compress(const Layer &layer, const Pooling &p, const Cache &cache, const Step &step, const float *raw, int64_t stride,
              float *ring, float *pages) {
    const int64_t half = p.overlap * p.width;
    for (int64_t r = 0; r < step.n; r++) {
        const int64_t position = step.positions[r];
        float *target = ring + (step.slots[r] * cache.raw_size + position % cache.raw_size) * 2 * half;
        const float *bias = p.ape + position % p.ratio * half;
        memcpy(target, raw + r * stride, 4 * size_t(half));
        for (int64_t k = 0; k < half; k++) target[half + k] = raw[r * stride + half + k] + bias[k];
    }
    for (int64_t r = 0; r < step.n; r++)
        if ((step.positions[r] + 1) % p.ratio == 0)
            pool_entry(layer, p, cache, ring, pages, step.slots[r], step.positions[r]);
}

// The entries that a row attends to, in order: all finished ones, or the `index_topk` with the highest scores (ties: the
// lowest index). queries [heads, width] are rotated; weights [heads].
void select_entries(const Layer &layer, const Cache &cache, const float *queries, const float *weights, int64_t slot,
                    int64_t count, int threads, std::vector<int64_t> &chosen) {
    const int64_t heads = layer.index_heads, width = layer.index_width;
    thread_local std::vector<float> buffer;
    thread_local std::vector<int64_t> order;
    buffer.resize(size_t(count));
    float *scores = buffer.data();
    const float scale = float(1.0 / std::sqrt(double(heads * width)));
    for_rows(count, 2 * heads * width, threads, [&](int64_t e) {
        const float *key = page_row(cache, cache.index_pages, slot, e, width);
        float sum = 0;
        for (int64_t h = 0; h < heads; h++)
            sum += weights[h] * scale * std::max(dot(queries + h * width, key, width), 0.f);
        scores[e] = sum == sum ? sum : -INFINITY;  // NaN is not ordered
    });
    order.resize(size_t(count));
    for (int64_t e = 0; e < count; e++) order[e] = e;
    const auto better = [&](int64_t a, int64_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; };
    std::nth_element(order.begin(), order.begin() + layer.index_topk, order.end(), better);
    chosen.assign(order.begin(), order.begin() + layer.index_topk);
    std::sort(chosen.begin(), chosen.end());
}

// out [width] = sum over keys of weights[e] keys[e].
ONE_COPY void sum_keys(const float *const *keys, const float *weights, int64_t count, int64_t width, float *out) {
    constexpr int BLOCK = 8;
    int64_t c = 0;
    for (; c + BLOCK * LANES <= width; c += BLOCK * LANES) {
        Vec sums[BLOCK] = {};
        for (int64_t e = 0; e < count; e++)
            for (int b = 0; b < BLOCK; b++) sums[b] = fused(load(keys[e] + c + b * LANES), splat(weights[e]), sums[b]);
        for (int b = 0; b < BLOCK; b++) store(out + c + b * LANES, sums[b]);
    }
    for (; c + LANES <= width; c += LANES) {
        Vec sum{};
        for (int64_t e = 0; e < count; e++) sum = fused(load(keys[e] + c), splat(weights[e]), sum);
        store(out + c, sum);
    }
    for (; c < width; c++) {
        float sum = 0;
        for (int64_t e = 0; e < count; e++) sum += keys[e][c] * weights[e];
        out[c] = sum;
    }
}

// scores[e] = query . keys[e], four keys at a time.
ONE_COPY void score_keys(const float *query, const float *const *keys, int64_t count, int64_t width, float *scores) {
    const int64_t vectors = width / LANES * LANES;
    for (int64_t e = 0; e < count; e += 4) {
        const int present = int(std::min<int64_t>(4, count - e));
        const float *own[4];
        for (int i = 0; i < 4; i++) own[i] = keys[e + std::min(i, present - 1)];
        Vec sums[4] = {};
        for (int64_t k = 0; k < vectors; k += LANES)
            for (int i = 0; i < 4; i++) sums[i] = fused(load(query + k), load(own[i] + k), sums[i]);
        for (int i = 0; i < present; i++) {
            float rest = 0;
            for (int64_t k = vectors; k < width; k++) rest += query[k] * own[i][k];
            scores[e + i] = total(sums[i]) + rest;
        }
    }
}

// Softmax of `count` scores with the sink in the denominator, in place; the buffer is padded to whole vectors.
ONE_COPY void softmax_with_sink(float *scores, int64_t count, float scale, float sink) {
    float top = sink;
    for (int64_t e = 0; e < count; e++) {
        scores[e] *= scale;
        top = std::max(top, scores[e]);
    }
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t e = count; e < padded; e++) scores[e] = -INFINITY;
    Vec sums{};
    for (int64_t e = 0; e < padded; e += LANES) {
        const Vec weight = exponential(load(scores + e) - top);
        store(scores + e, weight);
        sums += weight;
    }
    const float sum = total(sums) + std::exp(sink - top);
    for (int64_t e = 0; e < count; e++) scores[e] /= sum;
}

// x [n, hidden], normalised -> attended [n, heads, head_dim], rotated back; stores keys and entries.
void attend_rows(const Layer &layer, const Cache &cache, const Step &step, const float *x, float *attended) {
    thread_local std::vector<float> qkv_buffer, latent_buffer, query_buffer, index_buffer;
    thread_local std::vector<std::vector<const float *>> keys;
    thread_local std::vector<int64_t> chosen;
    const int threads = int(step.threads), family = layer.ratio != 0;
    const int64_t n = step.n, width = layer.head_dim, stride = layer.in_proj.rows, rank = layer.rank, pairs = layer.pairs;
    const double eps = layer.eps;
    qkv_buffer.resize(size_t(n * stride));
    latent_buffer.resize(size_t(n * rank));
    query_buffer.resize(size_t(n * layer.heads * width));
    float *qkv = qkv_buffer.data(), *latent = latent_buffer.data(), *queries = query_buffer.data();
    multiply(layer.in_proj, x, n, qkv, threads);
    for (int64_t r = 0; r < n; r++) {
        norm_row(qkv + r * stride, layer.q_norm, rank, eps, latent + r * rank);
        float *key = qkv + r * stride + rank;
        norm_row(key, layer.kv_norm, width, eps, key);
        float *target = cache.keys + (step.slots[r] * cache.key_size + step.positions[r] % cache.key_size) * width;
        rotate_row(key, step.cos[family] + r * pairs, step.sin[family] + r * pairs, 1.f, width, pairs, target);
    }
    multiply(layer.wq_b, latent, n, queries, threads);
    int64_t column = rank + width;
    if (layer.entry.ratio) {
        compress(layer, layer.entry, cache, step, qkv + column, stride, cache.entry_raw, cache.entry_pages);
        column += 2 * layer.entry.overlap * layer.entry.width;
    }
    int64_t last = 0;
    for (int64_t r = 0; r < n; r++) last = std::max(last, step.positions[r]);
    const bool selects = layer.index.ratio && (last + 1) / 4 > layer.index_topk;
    const int64_t index_row = layer.index_heads * layer.index_width;
    if (layer.index.ratio) {
        compress(layer, layer.index, cache, step, qkv + column, stride, cache.index_raw, cache.index_pages);
        column += 2 * layer.index.overlap * layer.index.width;
        if (selects) {
            index_buffer.resize(size_t(n * index_row));
            multiply(layer.index_wq_b, latent, n, index_buffer.data(), threads);
        }
    }
    keys.resize(std::max<size_t>(keys.size(), size_t(n)));
    int64_t most = 0;
    for (int64_t r = 0; r < n; r++) {
        const int64_t slot = step.slots[r], position = step.positions[r], near = std::min(position + 1, layer.window);
        std::vector<const float *> &own = keys[r];
        own.clear();
        for (int64_t at = position - near + 1; at <= position; at++)
            own.push_back(cache.keys + (slot * cache.key_size + at % cache.key_size) * width);
        const int64_t finished = layer.ratio ? (position + 1) / layer.ratio : 0;
        if (selects && finished > layer.index_topk) {
            float *index_queries = index_buffer.data() + r * index_row;
            for (int64_t h = 0; h < layer.index_heads; h++)
                rotate_row(index_queries + h * layer.index_width, step.cos[1] + r * pairs, step.sin[1] + r * pairs, 1.f,
                           layer.index_width, pairs, index_queries + h * layer.index_width);
            select_entries(layer, cache, index_queries, qkv + r * stride + column, slot, finished, threads, chosen);
            for (const int64_t e : chosen) own.push_back(page_row(cache, cache.entry_pages, slot, e, width));
        } else {
            for (int64_t e = 0; e < finished; e++) own.push_back(page_row(cache, cache.entry_pages, slot, e, width));
        }
        most = std::max(most, int64_t(own.size()));
    }
    const std::vector<const float *> *rows = keys.data();  // of this thread
    for_rows(n * layer.heads, 2 * most * width, threads, [&](int64_t unit) {
        thread_local std::vector<float> score_buffer;
        const int64_t r = unit / layer.heads;
        const std::vector<const float *> &own = rows[r];
        const int64_t count = int64_t(own.size());
        score_buffer.resize(size_t(count + LANES));
        float *query = queries + unit * width, *out = attended + unit * width, *scores = score_buffer.data();
        const float *cos = step.cos[family] + r * pairs, *sin = step.sin[family] + r * pairs;
        norm_row(query, nullptr, width, eps, query);
        rotate_row(query, cos, sin, 1.f, width, pairs, query);
        score_keys(query, own.data(), count, width, scores);
        softmax_with_sink(scores, count, float(layer.scale), layer.sink[unit % layer.heads]);
        sum_keys(own.data(), scores, count, width, out);
        rotate_row(out, cos, sin, -1.f, width, pairs, out);
    });
}

// attended [n, heads * head_dim] -> y [n, hidden] through one low-rank matrix per group of heads.
void project_out(const Layer &layer, const float *attended, int64_t n, int threads, float *y) {
    thread_local std::vector<float> buffer;
    buffer.resize(size_t(n * layer.wo_a.rows));
    grouped(layer.wo_a.matrices[0], layer.group_rank, attended, layer.heads * layer.head_dim, n, buffer.data(),
            layer.wo_a.rows, threads);
    multiply(layer.wo_b, buffer.data(), n, y, threads);
}

ONE_COPY void route_row(const Layer &layer, const float *logits, const int32_t *hash_ids, int64_t *ids, float *weights) {
    thread_local std::vector<float> buffer;
    buffer.resize(size_t(2 * layer.experts));
    float *scores = buffer.data(), *biased = scores + layer.experts;
    for (int64_t e = 0; e < layer.experts; e++) {
        scores[e] = std::sqrt(std::max(logits[e], 0.f) + std::log1p(std::exp(-std::fabs(logits[e]))));
        biased[e] = scores[e] + (layer.bias ? layer.bias[e] : 0.f);
    }
    float sum = 0;
    for (int64_t choice = 0; choice < layer.topk; choice++) {
        int64_t best = 0;
        if (hash_ids) best = hash_ids[choice];
        else
            for (int64_t e = 1; e < layer.experts; e++)
                if (biased[e] > biased[best]) best = e;  // ties: lowest id
        ids[choice] = best;
        biased[best] = -INFINITY;
        sum += scores[best];
    }
    for (int64_t choice = 0; choice < layer.topk; choice++)
        weights[choice] = scores[ids[choice]] / sum * float(layer.factor);
}

// x [n, hidden], normalised -> logits [n, experts], ids and weights [n, topk], and the input of the shared expert's down,
// shared [n, inner].
void route(const Layer &layer, const Step &step, const float *x, float *logits, int64_t *ids, float *weights, float *shared) {
    thread_local std::vector<float> buffer;
    const int64_t stride = layer.router.rows, count = layer.experts, inner = layer.inner;
    buffer.resize(size_t(step.n * stride));
    multiply(layer.router, x, step.n, buffer.data(), int(step.threads));
    for (int64_t r = 0; r < step.n; r++) {
        const float *row = buffer.data() + r * stride;
        memcpy(logits + r * count, row, 4 * size_t(count));
        const int32_t *hash_ids = layer.hash_table ? layer.hash_table + step.tokens[r] * layer.topk : nullptr;
        route_row(layer, row, hash_ids, ids + r * layer.topk, weights + r * layer.topk);
        gate_row(row + count, row + count + inner, inner, float(layer.limit), 1.f, shared + r * inner);
    }
}

// The output y [n, hidden] of shared and routed experts.
void run_experts(const Layer &layer, const Step &step, const float *x, const int64_t *ids, const float *weights,
                 const float *shared, float *y) {
    const int threads = int(step.threads);
    multiply(layer.shared_down, shared, step.n, y, threads);
    few_experts(layer.expert_matrices, layer.transposed_down, int(layer.experts), x, int(step.n), ids, weights,
                int(layer.topk), float(layer.limit), y, threads);
}

struct LayerBuffers {
    std::vector<float> between, u, y, pre, post, mix, attended, logits, weights, shared;
    std::vector<int64_t> ids;
};

void norm_rows(const float *x, const float *weight, int64_t n, int64_t width, double eps, float *out) {
    for (int64_t r = 0; r < n; r++) norm_row(x + r * width, weight, width, eps, out + r * width);
}

// One layer: streams [n, m, hidden] -> out, which may be the same memory.
void run_layer(const Layer &layer, const Cache &cache, const Step &step, const float *streams, float *out, LayerBuffers &b) {
    const int64_t n = step.n, m = layer.streams, d = layer.hidden;
    const int threads = int(step.threads);
    b.u.resize(size_t(n * d));
    b.y.resize(size_t(n * d));
    b.pre.resize(size_t(n * m));
    b.post.resize(size_t(n * m));
    b.mix.resize(size_t(n * m * m));
    b.attended.resize(size_t(n * layer.heads * layer.head_dim));
    b.logits.resize(size_t(n * layer.experts));
    b.weights.resize(size_t(n * layer.topk));
    b.ids.resize(size_t(n * layer.topk));
    b.shared.resize(size_t(n * layer.inner));
    b.between.resize(size_t(n * m * d));
    float *u = b.u.data(), *y = b.y.data(), *between = b.between.data();

    const Mixer &first = layer.attention_mixer, &second = layer.expert_mixer;
    read_streams(first, streams, n, m, d, threads, u, b.pre.data(), b.post.data(), b.mix.data());
    norm_rows(u, first.norm, n, d, first.norm_eps, u);
    attend_rows(layer, cache, step, u, b.attended.data());
    project_out(layer, b.attended.data(), n, threads, y);
    write_streams(streams, y, b.post.data(), b.mix.data(), n, m, d, between);

    read_streams(second, between, n, m, d, threads, u, b.pre.data(), b.post.data(), b.mix.data());
    norm_rows(u, second.norm, n, d, second.norm_eps, u);
    route(layer, step, u, b.logits.data(), b.ids.data(), b.weights.data(), b.shared.data());
    run_experts(layer, step, u, b.ids.data(), b.weights.data(), b.shared.data(), y);
    write_streams(between, y, b.post.data(), b.mix.data(), n, m, d, out);
}

}  // namespace
