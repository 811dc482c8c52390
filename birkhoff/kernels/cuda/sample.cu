// Token sampling for decode steps: one cluster of eight blocks per row of logits, one launch per batch.
//
// Every thread keeps its ITEMS logits in registers, so all passes after the first read no memory. Order of operations per
// row: penalties, bias, banned tokens, mask, temperature, top-k, top-p, min-p, draw. The draw is an exponential race with
// noise hashed from (seed, step, token): token i wins with the largest weight_i / noise_i. Truncation is by rejection: if
// the winner among the candidates is outside the truncated set, the set lies among the tokens better than that winner, so
// the race is repeated among those. A winner inside the set is also the winner of the race within the set, so the result
// is exactly the truncated draw, and independent of the other rows.

#include "common.cuh"

constexpr int CLUSTER = 8, THREADS = 512, ITEMS = 32, WARPS = THREADS / 32, STRIDE = CLUSTER * THREADS;
constexpr int MAX_LOGPROBS = 20, OUT = 4 + 2 * MAX_LOGPROBS;

// Must match ROW_PARAMS in kernels/sample/device.py.
struct RowParams {
    double inv_temperature, top_p, min_log_weight;
    double repetition, presence, frequency;
    u32 key_low, key_high;
    int top_k, greedy;
    int logprobs;  // -1: none
    int num_bias, num_banned, pad;
    const u8* seen;         // [vocab] or null
    const float* counts;    // [vocab] or null
    const u8* allowed;      // [vocab] or null
    const i64* bias_ids;    // [num_bias]
    const float* biases;    // [num_bias]
    const i64* banned_ids;  // [num_banned]
};

struct Pair {
    double a, b;
};

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void store_remote(void* at, int rank, u64 low, u64 high) {
    u32 here = (u32)__cvta_generic_to_shared(at), there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("st.shared::cluster.v2.u64 [%0], {%1, %2};" ::"r"(there), "l"(low), "l"(high) : "memory");
}

// All-reduce over the cluster. Two buffers in turn, so one cluster barrier per call suffices.
struct Reducer {
    ulonglong2 (*warps)[WARPS];
    ulonglong2 (*blocks)[CLUSTER];
    int round, rank;

    template <typename Combine>
    __device__ __forceinline__ ulonglong2 run(ulonglong2 v, Combine combine) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, turn = round & 1;
#pragma unroll
        for (int s = 16; s; s >>= 1) {
            ulonglong2 other;
            other.x = __shfl_xor_sync(~0u, v.x, s);
            other.y = __shfl_xor_sync(~0u, v.y, s);
            v = combine(v, other);
        }
        if (lane == 0) warps[turn][warp] = v;
        __syncthreads();
        if (warp == 0) {
            v = warps[turn][lane % WARPS];
#pragma unroll
            for (int s = WARPS / 2; s; s >>= 1) {
                ulonglong2 other;
                other.x = __shfl_xor_sync(~0u, v.x, s);
                other.y = __shfl_xor_sync(~0u, v.y, s);
                v = combine(v, other);
            }
            if (lane < CLUSTER) store_remote(&blocks[turn][rank], lane, v.x, v.y);
        }
        cluster_sync();
        v = blocks[turn][0];
#pragma unroll
        for (int b = 1; b < CLUSTER; b++) v = combine(v, blocks[turn][b]);
        round++;
        return v;
    }

    __device__ __forceinline__ u64 max(u64 key) {
        return run(make_ulonglong2(key, 0), [](ulonglong2 a, ulonglong2 b) {
                   return make_ulonglong2(a.x > b.x ? a.x : b.x, 0);
               }).x;
    }
    __device__ __forceinline__ Pair sum(double a, double b) {
        const ulonglong2 r = run(make_ulonglong2(__double_as_longlong(a), __double_as_longlong(b)),
                                 [](ulonglong2 p, ulonglong2 q) {
                                     return make_ulonglong2(
                                         __double_as_longlong(__longlong_as_double(p.x) + __longlong_as_double(q.x)),
                                         __double_as_longlong(__longlong_as_double(p.y) + __longlong_as_double(q.y)));
                                 });
        return {__longlong_as_double(r.x), __longlong_as_double(r.y)};
    }
    __device__ __forceinline__ u64 add(u64 packed) {
        return run(make_ulonglong2(packed, 0), [](ulonglong2 a, ulonglong2 b) {
                   return make_ulonglong2(a.x + b.x, 0);
               }).x;
    }
};

// Rank of a logit among logits: NaN first, so that it is noticed; zeros of both signs are equal.
__device__ __forceinline__ u32 rank_of(float v) { return v != v ? 0xffffffffu : sortable_bits(v + 0.f); }
__device__ __forceinline__ float value_of(u32 rank) {
    return __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}
__device__ __forceinline__ u64 order_key(u32 rank, int token) { return (u64)rank << 32 | (0xffffffffu - (u32)token); }
__device__ __forceinline__ int token_of(u64 key) { return (int)(0xffffffffu - (u32)key); }

// Whether logit (rank, id) comes before (other, other_id) in sampling order: larger first, then lower id.
__device__ __forceinline__ bool better(u32 rank, int id, u32 other, int other_id) {
    return rank > other || (rank == other && id < other_id);
}

// Hides that the logits are unchanged, so that nothing computed from them in one pass is kept in registers for the next.
__device__ __forceinline__ void refresh(float (&x)[ITEMS]) {
#pragma unroll
    for (int j = 0; j < ITEMS; j++) asm volatile("" : "+f"(x[j]));
}

// The best of a thread's logits among those after (bound, bound_id) in sampling order; 0 if there is none.
__device__ __forceinline__ u64 local_best(float (&x)[ITEMS], int first, u32 bound, int bound_id) {
    u32 top = 0;
    int id = 0;
    bool any = false;
    refresh(x);
#pragma unroll
    for (int j = 0; j < ITEMS; j++) {
        const u32 r = rank_of(x[j]);
        if (better(bound, bound_id, r, first + j * STRIDE) && (!any || r > top)) {
            top = r;
            id = first + j * STRIDE;
            any = true;
        }
    }
    return any ? order_key(top, id) : 0;
}

__device__ __forceinline__ u32 mix32(u32 x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}

// -log(u) for u = (n + 0.5) / 2^32, accurate at both ends.
__device__ __forceinline__ float exponential(u32 n) {
    constexpr float SCALE = 2.3283064365386963e-10f;  // 2^-32
    return n & 0x80000000u ? -log1pf(-(((float)~n + 0.5f) * SCALE)) : -logf(((float)n + 0.5f) * SCALE);
}

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(THREADS, 1)
    sample_rows(const float* logits, int stride, const RowParams* rows, double* out, int vocab) {
    __shared__ __align__(16) ulonglong2 warps[2][WARPS];
    __shared__ __align__(16) ulonglong2 blocks[2][CLUSTER];
    const int rank = blockIdx.x % CLUSTER, row = blockIdx.x / CLUSTER, first = rank * THREADS + threadIdx.x;
    const RowParams p = rows[row];
    const float* from = logits + (i64)row * stride;
    double* into = out + (i64)row * OUT;
    Reducer cluster{warps, blocks, 0, rank};
    const float minus_inf = __uint_as_float(0xff800000u);

    float x[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; j++) {
        const int token = first + j * STRIDE;
        x[j] = token < vocab ? from[token] : minus_inf;
    }
    cluster_sync();  // no block writes to another's shared memory before that block has started
    if (p.seen || p.counts || p.allowed) {
#pragma unroll
        for (int j = 0; j < ITEMS; j++) {
            const int token = first + j * STRIDE;
            if (token >= vocab) continue;
            if (p.seen && p.seen[token])
                x[j] = x[j] > 0.f ? x[j] / (float)p.repetition : x[j] * (float)p.repetition;
            if (p.counts) {
                const float count = p.counts[token];
                x[j] = x[j] - (float)p.frequency * count - (count > 0.f ? (float)p.presence : 0.f);
            }
        }
    }
    for (int i = 0; i < p.num_bias; i++) {
        const int token = (int)p.bias_ids[i];
        if (token % STRIDE == first) {
#pragma unroll
            for (int j = 0; j < ITEMS; j++)
                if (token / STRIDE == j) x[j] += p.biases[i];
        }
    }
    for (int i = 0; i < p.num_banned; i++) {
        const int token = (int)p.banned_ids[i];
        if (token % STRIDE == first) {
#pragma unroll
            for (int j = 0; j < ITEMS; j++)
                if (token / STRIDE == j) x[j] = minus_inf;
        }
    }
    if (p.allowed) {
#pragma unroll
        for (int j = 0; j < ITEMS; j++) {
            const int token = first + j * STRIDE;
            if (token < vocab && !p.allowed[token]) x[j] = minus_inf;
        }
    }

    const u64 best = cluster.max(local_best(x, first, 0xffffffffu, -1));
    const u32 best_rank = (u32)(best >> 32);
    const float peak = best_rank == 0xffffffffu ? __uint_as_float(0x7fc00000u) : value_of(best_rank);
    const bool usable = fabsf(peak) < __uint_as_float(0x7f800000u);
    int token = token_of(best);

    if (usable && !p.greedy) {
        const float scale = fminf((float)p.inv_temperature, 3.4e38f);  // infinity times the best token's 0 is NaN
        u32 last_rank = 0;  // logits below this rank are outside top-k; needed only for the mass that top-p is a share of
        if (p.top_k > 0 && p.top_k < vocab && p.top_p < 1.0) {
            // The largest value that at least top_k logits reach, two bits a round. Three counts of 21 bits in one word.
            for (int shift = 30; shift >= 0; shift -= 2) {
                u64 packed = 0;
                refresh(x);
#pragma unroll
                for (int j = 0; j < ITEMS; j++) {
                    const u32 r = rank_of(x[j]);
                    packed += (u64)(r >= (last_rank | 1u << shift)) + ((u64)(r >= (last_rank | 2u << shift)) << 21) +
                              ((u64)(r >= (last_rank | 3u << shift)) << 42);
                }
                packed = cluster.add(packed);
                const u64 k = p.top_k;
                if ((packed >> 42) >= k)
                    last_rank |= 3u << shift;
                else if ((packed >> 21 & 0x1fffff) >= k)
                    last_rank |= 2u << shift;
                else if ((packed & 0x1fffff) >= k)
                    last_rank |= 1u << shift;
            }
        }
        double total = 0.0;
        if (p.top_p < 1.0) {
            double mass = 0.0;
            refresh(x);
#pragma unroll
            for (int j = 0; j < ITEMS; j++)
                if (rank_of(x[j]) >= last_rank) mass += (double)expf((x[j] - peak) * scale);
            total = cluster.sum(mass, 0.0).a;
        }
        u32 floor_rank = 0;  // candidates are better than this logit: larger, or equal with a lower id
        int floor_token = 0x7fffffff;
        for (int round = 0; round < 64; round++) {
            float top = -1.f;
            int winner = 0;
            refresh(x);
#pragma unroll
            for (int j = 0; j < ITEMS; j++) {
                const int id = first + j * STRIDE;
                const float log_weight = (x[j] - peak) * scale;
                // Noise lies in [2^-33, 23]: a weight below 5e-12 cannot win against the largest, which is 1.
                if (log_weight > -26.f && better(rank_of(x[j]), id, floor_rank, floor_token)) {
                    const u32 noise = mix32(mix32((u32)id ^ p.key_low) ^ p.key_high) ^ 0x80000000u;
                    const float score = expf(log_weight) / exponential(noise);
                    if (score > top) {
                        top = score;
                        winner = id;
                    }
                }
            }
            const u64 race = cluster.max(top < 0.f ? 0 : order_key(__float_as_uint(top), winner));
            winner = token_of(race);
            if (round == 63) {  // not reachable with random noise; the best token is always inside the set
                winner = token_of(best);
            }
            // The winner's logit, from the thread that has it.
            u64 mine = 0;
            refresh(x);
#pragma unroll
            for (int j = 0; j < ITEMS; j++)
                if (first + j * STRIDE == winner) mine = order_key(rank_of(x[j]), winner);
            const u64 key = cluster.max(mine);
            token = winner;
            if (key == best || (p.top_k <= 0 && p.top_p >= 1.0 && p.min_log_weight < -1e30)) break;
            double mass = 0.0;
            int greater = 0;
            refresh(x);
#pragma unroll
            for (int j = 0; j < ITEMS; j++) {
                const u32 r = rank_of(x[j]);
                if (better(r, first + j * STRIDE, (u32)(key >> 32), winner))
                    mass += (double)expf((x[j] - peak) * scale);
                greater += r > (u32)(key >> 32);
            }
            const Pair above = cluster.sum(mass, greater);
            const bool inside_k = p.top_k <= 0 || above.b < (double)p.top_k;
            const bool inside_p = p.top_p >= 1.0 || above.a < p.top_p * total;
            const bool inside_min = (double)((value_of((u32)(key >> 32)) - peak) * scale) >= p.min_log_weight;
            if (inside_k && inside_p && inside_min) break;
            floor_rank = (u32)(key >> 32);
            floor_token = winner;
        }
    }

    if (threadIdx.x == 0 && rank == 0) {
        into[0] = token;
        into[1] = peak;
    }
    if (usable && p.logprobs >= 0) {  // log-softmax of the raw logits
#pragma unroll
        for (int j = 0; j < ITEMS; j++) {
            const int id = first + j * STRIDE;
            x[j] = id < vocab ? from[id] : minus_inf;
        }
        u64 key = cluster.max(local_best(x, first, 0xffffffffu, -1));
        const float raw_peak = value_of((u32)(key >> 32));
        double mass = 0.0, chosen = 0.0;
#pragma unroll
        for (int j = 0; j < ITEMS; j++) {
            mass += (double)expf(x[j] - raw_peak);
            if (first + j * STRIDE == token) chosen = (double)x[j];
        }
        const Pair both = cluster.sum(mass, chosen);
        const double log_total = (double)raw_peak + log(both.a);
        if (threadIdx.x == 0 && rank == 0) into[2] = both.b - log_total;
        for (int i = 0; i < p.logprobs; i++) {
            if (threadIdx.x == 0 && rank == 0) {
                into[4 + i] = token_of(key);
                into[4 + MAX_LOGPROBS + i] = (double)value_of((u32)(key >> 32)) - log_total;
            }
            key = cluster.max(local_best(x, first, (u32)(key >> 32), token_of(key)));
        }
    }
    cluster_sync();  // shared memory of a block stays until all blocks have read it
}
