// Shared by all sources: types, programmatic dependent launch, warp sum, routing plan and expert selection.

#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
typedef long long i64;

// Programmatic dependent launch: a kernel may start before the preceding grid has ended. It loads weights, which no
// kernel writes, before `grid_dependency_wait`; `launch_dependents` lets the next kernel start once all blocks have
// called it.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" :::); }

// A slot of the routing plan: an expert, the index of its first pair in `order`, its number of pairs, its addresses.
struct ExpertSlot {
    int expert, first, count, pad;
    i64 address[4];  // of gate and up, their scales, down, its scales
    int rest[4];
};

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int s = 16; s; s >>= 1) v += __shfl_xor_sync(~0u, v, s);
    return v;
}
__device__ __forceinline__ float router_score(float z) { return sqrtf(fmaxf(z, 0.f) + log1pf(__expf(-fabsf(z)))); }
__device__ __forceinline__ u32 sortable_bits(float v) {  // unsigned order equals float order
    const u32 bits = __float_as_uint(v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A warp selects the experts of one token, by biased score or from a row of the hash table. Lane i holds experts i, i +
// 32,
// ... and lane k returns the k-th selected id and its weight.
template <int PER_LANE>
__device__ __forceinline__ void topk_experts(const float (&logits)[PER_LANE], const float (&bias)[PER_LANE],
                                             const int* hash_ids, int experts, int topk, float factor, int& id,
                                             float& weight) {
    const int lane = threadIdx.x & 31;
    float scores[PER_LANE];
    u32 keys[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        scores[j] = router_score(logits[j]);
        keys[j] = lane + 32 * j < experts && !hash_ids ? sortable_bits(scores[j] + bias[j]) : 0u;
    }
    float total = 0.f, own_score = 0.f;
    id = 0;
    for (int k = 0; k < topk; k++) {
        int best;
        if (hash_ids) {
            best = hash_ids[k];
        } else {
            u32 top = 0;
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) top = max(top, keys[j]);
            top = __reduce_max_sync(~0u, top);
            u32 lowest = 0xffffffffu;  // lowest id among ties
#pragma unroll
            for (int j = PER_LANE - 1; j >= 0; j--)
                if (keys[j] == top) lowest = lane + 32 * j;
            best = __reduce_min_sync(~0u, lowest);
#pragma unroll
            for (int j = 0; j < PER_LANE; j++)
                if (lane + 32 * j == best) keys[j] = 0u;
        }
        float score = 0.f;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++)
            if (j == best >> 5) score = scores[j];
        score = __shfl_sync(~0u, score, best & 31);
        total += score;
        if (lane == k) {
            own_score = score;
            id = best;
        }
    }
    weight = own_score / total * factor;
}

template <int PER_LANE>
__device__ __forceinline__ void load_per_lane(float (&values)[PER_LANE], const float* from, int experts) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) values[j] = from && lane + 32 * j < experts ? from[lane + 32 * j] : 0.f;
}
