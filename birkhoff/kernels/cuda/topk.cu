// Selection of the indexer's best entries in a decode step. The Triton twin is `topk_entries` of index/decode.py.

#include "common.cuh"

// All-gather of one uint2 per block of a cluster and round: every block keeps the values of all ranks in shared memory,
// double-buffered by round, so that one barrier per round suffices.
template <int BLOCKS>
struct ClusterExchange {
    uint2 values[2][BLOCKS];
    __device__ __forceinline__ void send(int round, int rank, int to, uint2 v) {
        u32 local = (u32)__cvta_generic_to_shared(&values[round & 1][rank]), remote;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(to));
        asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(remote), "r"(v.x), "r"(v.y) : "memory");
    }
};
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Indices of the topk highest scores of a sequence in ascending order; ties go to the lower index. Thread t of a
// sequence holds entries t * PER .. . Radix select: every round finds two bits of the topk-th value by counting the
// entries that reach each of three candidates. The BLOCKS blocks of a cluster share a sequence.
template <int PER, int WARPS, int BLOCKS>
__device__ __forceinline__ void topk_entries(const float* scores, const i64* positions, int* topk_indices,
                                             int max_entries, int topk) {
    __shared__ uint2 warp_parts[2][WARPS];
    __shared__ ClusterExchange<BLOCKS> cluster;
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5, rank = blockIdx.x % BLOCKS;
    const i64 row = blockIdx.x / BLOCKS;
    int round = 0;
    launch_dependents();
    grid_dependency_wait();
    const int count = (int)((positions[row] + 1) >> 2), first = (rank * WARPS * 32 + t) * PER;
    int* out = topk_indices + row * topk;
    if (count <= topk) {
        for (int e = rank * WARPS * 32 + t; e < count; e += BLOCKS * WARPS * 32) out[e] = e;
        return;
    }
    // Sum over the warps of a block the pair held by lane 0, and gather the sums of all blocks.
    auto exchange = [&](uint2 warp_pair, uint2(&blocks)[BLOCKS]) {
        uint2* all = warp_parts[round & 1];
        if (lane == 0) all[warp] = warp_pair;
        __syncthreads();
        if (BLOCKS == 1) {
            blocks[0] = make_uint2(0, 0);
#pragma unroll
            for (int w = 0; w < WARPS; w++) blocks[0] = make_uint2(blocks[0].x + all[w].x, blocks[0].y + all[w].y);
        } else {
            if (warp == 0) {
                const uint2 warp_value = lane < WARPS ? all[lane] : make_uint2(0, 0);
                const uint2 sum =
                    make_uint2(__reduce_add_sync(~0u, warp_value.x), __reduce_add_sync(~0u, warp_value.y));
                if (lane < BLOCKS) cluster.send(round, rank, lane, sum);
            }
            cluster_sync();
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) blocks[b] = cluster.values[round & 1][b];
        }
        round++;
    };
    if (BLOCKS > 1) cluster_sync();  // no remote write before every block has started
    u32 key[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = first + i;
        key[i] = e < count ? sortable_bits(scores[row * max_entries + e] + 0.f) : 0u;  // -0 equals 0
    }
    u32 threshold = 0;
    int above_threshold = 0;
    uint2 blocks[BLOCKS];
    for (int bit = 30; bit >= 0; bit -= 2) {  // find the largest value that at least topk entries reach
        const u32 one = threshold | 1u << bit, two = threshold | 2u << bit, three = threshold | 3u << bit;
        u32 low = 0, high = 0;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            low += (key[i] >= one) + ((u32)(key[i] >= two) << 16);
            high += key[i] >= three;
        }
        low = __reduce_add_sync(~0u, low);
        high = __reduce_add_sync(~0u, high);
        exchange(make_uint2(low, high), blocks);
        int reach[3] = {0, 0, 0};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            reach[0] += blocks[b].x & 0xffffu;
            reach[1] += blocks[b].x >> 16;
            reach[2] += blocks[b].y;
        }
        int reached = 0;
        if (reach[2] >= topk) threshold = three, reached = reach[2];
        else if (reach[1] >= topk) threshold = two, above_threshold = reach[2], reached = reach[1];
        else if (reach[0] >= topk) threshold = one, above_threshold = reach[1], reached = reach[0];
        else above_threshold = reach[0];
        if (reached == topk) {  // exactly topk entries reach it: keep all above the value before
            threshold -= 1;
            above_threshold = topk;
            break;
        }
    }
    // Prefix sums over threads of the ties with the threshold and of the entries above it give every kept entry its
    // place.
    int ties = 0, above = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        ties += key[i] == threshold;
        above += key[i] > threshold;
    }
    int tied = ties, over = above;
#pragma unroll
    for (int s = 1; s < 32; s <<= 1) {
        const int more = __shfl_up_sync(~0u, tied, s), also = __shfl_up_sync(~0u, over, s);
        if (lane >= s) {
            tied += more;
            over += also;
        }
    }
    exchange(make_uint2(__shfl_sync(~0u, tied, 31), __shfl_sync(~0u, over, 31)), blocks);
    tied -= ties;
    over -= above;
    for (int w = 0; w < warp; w++) {
        tied += warp_parts[(round - 1) & 1][w].x;
        over += warp_parts[(round - 1) & 1][w].y;
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
        if (b < rank) {
            tied += blocks[b].x;
            over += blocks[b].y;
        }
    const int ties_kept = topk - above_threshold;  // entries equal to the threshold that are kept
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const bool is_tie = key[i] == threshold;
        if (key[i] > threshold || (is_tie && tied < ties_kept)) out[over + min(tied, ties_kept)] = first + i;
        tied += is_tie;
        over += key[i] > threshold;
    }
}

#define TOPK(PER)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
        topk_##PER(const float* scores, const i64* positions, int* topk_indices, int max_entries, int topk) { \
        topk_entries<PER, 8, 1>(scores, positions, topk_indices, max_entries, topk);                          \
    }
#define TOPK_CLUSTER(PER)                                                                                             \
    extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(1024)                                      \
        topk_cluster_##PER(const float* scores, const i64* positions, int* topk_indices, int max_entries, int topk) { \
        topk_entries<PER, 32, 8>(scores, positions, topk_indices, max_entries, topk);                                 \
    }
TOPK(4)
TOPK(8)
TOPK(16)
TOPK(32)
TOPK_CLUSTER(4)
TOPK_CLUSTER(8)
TOPK_CLUSTER(16)
TOPK_CLUSTER(32)
