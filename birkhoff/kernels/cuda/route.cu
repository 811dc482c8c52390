// Routing of a decode step with more than one token. The Triton twin is `route` of experts/decode.py.

#include "digits.cuh"

// The first block: a warp per token selects its experts, then (token, expert) pairs are grouped by expert into slots. Up to
// 1024 pairs and 512 experts. The order of the pairs of one expert is not deterministic; no result depends on it. Further
// blocks write the digits of the experts' inputs, 32 columns per warp.
template <int PER_LANE>
__device__ __forceinline__ void route(const float* logits, int logit_stride, const float* bias, const int* hash_table,
                                      const i64* tokens, const i64* addresses, int* ids, float* weights, int* order,
                                      ExpertSlot* slots, int slot_count, int n, int experts, int topk, float factor,
                                      const u16* x, u8* digits, int groups, float gain) {
    __shared__ int counts[32 * PER_LANE], starts[32 * PER_LANE];
    __shared__ int warp_pairs[PER_LANE], warp_used[PER_LANE];
    __shared__ int pair_expert[1024], pair_rank[1024];
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    launch_dependents();
    if (blockIdx.x) {
        const int group = (blockIdx.x - 1) * 32 + warp;
        grid_dependency_wait();
        if (group < groups) store_digits(digits + (i64)group * 128, f16_value(x[(i64)group * 32 + lane]) * gain);
        return;
    }
    float lane_bias[PER_LANE];
    load_per_lane(lane_bias, bias, experts);
    if (t < 32 * PER_LANE) counts[t] = 0;
    grid_dependency_wait();
    __syncthreads();
    for (int b = warp; b < n; b += 32) {
        float logit[PER_LANE], weight;
        int id;
        load_per_lane(logit, logits + (i64)b * logit_stride, experts);
        topk_experts(logit, lane_bias, hash_table ? hash_table + tokens[b] * topk : nullptr, experts, topk, factor, id,
                     weight);
        if (lane < topk) {
            const int at = b * topk + lane;
            weights[at] = weight;
            ids[at] = id;
            pair_expert[at] = id;
            pair_rank[at] = atomicAdd(&counts[id], 1);
        }
    }
    __syncthreads();
    int count = 0, at = 0, slot = 0;
    if (t < 32 * PER_LANE) {
        count = counts[t];
        int sum = count, used = count > 0;
#pragma unroll
        for (int s = 1; s < 32; s <<= 1) {
            const int more = __shfl_up_sync(~0u, sum, s), also = __shfl_up_sync(~0u, used, s);
            if (lane >= s) {
                sum += more;
                used += also;
            }
        }
        if (lane == 31) {
            warp_pairs[warp] = sum;
            warp_used[warp] = used;
        }
        at = sum - count;
        slot = used - (count > 0);
    }
    __syncthreads();
    int in_use = 0;
#pragma unroll
    for (int w = 0; w < PER_LANE; w++) {
        if (w < warp) {
            at += warp_pairs[w];
            slot += warp_used[w];
        }
        in_use += warp_used[w];
    }
    if (count) {
        ExpertSlot* into = slots + slot;
        into->expert = t;
        into->first = at;
        into->count = count;
        const longlong2 low = reinterpret_cast<const longlong2*>(addresses)[t * 2];
        const longlong2 high = reinterpret_cast<const longlong2*>(addresses)[t * 2 + 1];
        reinterpret_cast<longlong2*>(into->address)[0] = low;
        reinterpret_cast<longlong2*>(into->address)[1] = high;
    }
    if (t < 32 * PER_LANE) starts[t] = at;
    __syncthreads();
    if (t < n * topk) order[starts[pair_expert[t]] + pair_rank[t]] = t;
    if (t >= in_use && t < slot_count) slots[t].count = 0;
}

#define ROUTE(PER_LANE)                                                                                        \
    extern "C" __global__ void __launch_bounds__(1024)                                                         \
        route_##PER_LANE(const float* logits, int logit_stride, const float* bias, const int* hash_table,      \
                         const i64* tokens, const i64* addresses, int* ids, float* weights, int* order,        \
                         ExpertSlot* slots, int slot_count, int n, int experts, int topk, float factor,        \
                         const u16* x, u8* digits, int groups, float gain) {                                   \
        route<PER_LANE>(logits, logit_stride, bias, hash_table, tokens, addresses, ids, weights, order, slots, \
                        slot_count, n, experts, topk, factor, x, digits, groups, gain);                        \
    }
ROUTE(8)
ROUTE(16)
