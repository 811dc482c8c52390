// What all sources begin with: types, leave to start early, a step's plan, and the choice of experts.

#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
typedef long long i64;

// A kernel launched with leave to start early loads weights, which nobody writes, before it waits for its predecessor; and
// it gives the next kernel the same leave as soon as all its blocks have begun.
__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" :::); }

// A slot of the step's plan: an expert, its first pair in `order` and how many it has, and where its weights lie.
struct Slot {
    int expert, first, count, pad;
    i64 address[4];  // gate and up, their scales, down, its scales
    int rest[4];
};

__device__ __forceinline__ float score_of(float z) { return sqrtf(fmaxf(z, 0.f) + log1pf(__expf(-fabsf(z)))); }
__device__ __forceinline__ u32 ordered(float v) {  // a float's place among floats
    const u32 bits = __float_as_uint(v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A warp chooses the experts of one token, lane i among experts i, i + 32 ...: by score and bias, or from a table's row.
// Lane k leaves with the k-th choice and its weight.
template <int EACH>
__device__ __forceinline__ void choose_experts(const float (&logits)[EACH], const float (&bias)[EACH], const int* listed,
                                               int experts, int places, float factor, int& id, float& weight) {
    const int lane = threadIdx.x & 31;
    float scores[EACH];
    u32 rivals[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        scores[j] = score_of(logits[j]);
        rivals[j] = lane + 32 * j < experts && !listed ? ordered(scores[j] + bias[j]) : 0u;
    }
    float total = 0.f, mine = 0.f;
    id = 0;
    for (int k = 0; k < places; k++) {
        int best;
        if (listed) {
            best = listed[k];
        } else {
            u32 top = 0;
#pragma unroll
            for (int j = 0; j < EACH; j++) top = max(top, rivals[j]);
            top = __reduce_max_sync(~0u, top);
            u32 lowest = 0xffffffffu;  // id among equals
#pragma unroll
            for (int j = EACH - 1; j >= 0; j--)
                if (rivals[j] == top) lowest = lane + 32 * j;
            best = __reduce_min_sync(~0u, lowest);
#pragma unroll
            for (int j = 0; j < EACH; j++)
                if (lane + 32 * j == best) rivals[j] = 0u;
        }
        float score = 0.f;
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (j == best >> 5) score = scores[j];
        score = __shfl_sync(~0u, score, best & 31);
        total += score;
        if (lane == k) {
            mine = score;
            id = best;
        }
    }
    weight = mine / total * factor;
}

template <int EACH>
__device__ __forceinline__ void load_each(float (&values)[EACH], const float* from, int experts) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < EACH; j++) values[j] = from && lane + 32 * j < experts ? from[lane + 32 * j] : 0.f;
}
