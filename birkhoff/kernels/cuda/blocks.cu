// Routed experts of ggml's types for a decode step. The Triton twin is experts/block_types.py, which has all types.
//
// A thread block has sixteen rows of an expert: eight of gate and the same eight of up, or sixteen of down. It copies
// them whole into shared memory; its warps then take the blocks of 256 columns in turn.

#include "blocks.cuh"

// Dynamic shared memory: rows, then sums of inputs (`Sums`).
extern __shared__ uint4 memory[];

// Request `bytes` (a multiple of sixteen) of contiguous rows.
template <int WARPS>
__device__ __forceinline__ void copy_whole(u8* into, const u8* from, int bytes) {
    for (int i = threadIdx.x * 16; i < bytes; i += WARPS * 512) copy_async16(into + i, from + i);
}

// Sums of sixteen inputs of eight tokens as two float16 numbers each: [token][block of 256][q], four by s (see `Q2_K`).
template <int WARPS, typename TOKEN>
__device__ __forceinline__ void sum_inputs(uint4* sums, const u16* x, int tokens, int inner, const TOKEN& token_of) {
    const int groups = inner >> 4;
    for (int i = threadIdx.x; i < tokens * groups; i += WARPS * 32) {
        const int t = i / groups, j = i - t * groups, block = j >> 4, h = (j >> 3) & 1, s = (j >> 1) & 3, u = j & 1;
        const u16* from = x + (i64)token_of(t) * inner + j * 16;
        float sum = 0.f;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const uint4 eight = *reinterpret_cast<const uint4*>(from + 8 * part);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 pair = f16x2_to_floats(word(eight, k));
                sum += pair.x + pair.y;
            }
        }
        u16* into = reinterpret_cast<u16*>(sums + (t * (inner >> 8) + block) * 4 + 2 * h + u);
        const float first = store_f16(into + s, sum);
        store_f16(into + 4 + s, sum - first);
    }
}

template <typename TYPE, int WARPS>
__device__ __forceinline__ void load_table(uint2* table, const u8* grid) {
    if constexpr (TYPE::TABLE != 0)
        for (int i = threadIdx.x; i < TYPE::TABLE / 8; i += WARPS * 32) table[i] = TYPE::table_entry(grid, i);
}

// The products of sixteen staged rows with up to eight tokens, `token_of(t)` their rows of x; sums into `shared`.
template <typename TYPE, int WARPS, typename TOKEN>
__device__ __forceinline__ void multiply_rows(float* shared, const u8* rows, uint4* sums, const uint2* table,
                                              const u16* x, int count, int inner, const TOKEN& token_of) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, blocks = inner >> 8;
    if (TYPE::SUMS) {
        sum_inputs<WARPS>(sums, x, min(count, 8), inner, token_of);
        __syncthreads();
    }
    const int t = g < count ? g : 0;
    const u16* own = x + (i64)token_of(t) * inner;
    float acc[1][1][4] = {};
    const u8* row = rows + g * blocks * TYPE::BYTES;
    for (int at = warp; at < blocks; at += WARPS) {
        const u8* low = row + at * TYPE::BYTES;
        TYPE::multiply(acc[0][0], low, low + 8 * blocks * TYPE::BYTES, own + at * 256, table,
                       sums + (t * blocks + at) * 4);
    }
    store_partials<1, 1, WARPS>(shared, acc);
}

// As `experts_gate_up` and `experts_down` of experts.cu, without the shared expert.
template <typename TYPE, int WARPS>
__device__ __forceinline__ void gate_up_blocks(const ExpertSlot* slots, const int* order, const float* weights,
                                               const u16* x, u16* z, const u8* grid, int inner, int width, int topk,
                                               float limit) {
    __shared__ float shared[WARPS * 16 * 8];
    __shared__ uint2 table[TYPE::TABLE ? TYPE::TABLE / 8 : 1];
    load_table<TYPE, WARPS>(table, grid);
    grid_dependency_wait();
    launch_dependents();
    const ExpertSlot* slot = slots + blockIdx.y;
    const int4 header = __ldcg(reinterpret_cast<const int4*>(slot));
    const i64 address = __ldcg(slot->address);
    const int first = header.y, row = blockIdx.x * 8;
    const int count = address ? header.z : 0;  // experts without an address are computed elsewhere
    const int bytes = (width >> 8) * TYPE::BYTES;
    u8* rows = reinterpret_cast<u8*>(memory);
    uint4* sums = memory + bytes;  // sixteen rows are `bytes` times sixteen bytes
    if (count) {
        const u8* gate = reinterpret_cast<const u8*>(address) + (i64)row * bytes;
        copy_whole<WARPS>(rows, gate, 8 * bytes);
        copy_whole<WARPS>(rows + 8 * bytes, gate + (i64)inner * bytes, 8 * bytes);
        commit_copies();
    }
    for (int base = 0; base < count; base += 8) {
        if (!base) wait_for_copies<0>();
        __syncthreads();
        multiply_rows<TYPE, WARPS>(shared, rows, sums, table, x, count - base, width,
                                   [&](int t) { return __ldcg(order + first + base + t) / topk; });
        if (threadIdx.x < 64) {
            const int r = threadIdx.x & 7, t = threadIdx.x >> 3;
            if (base + t < count) {
                const int pair = __ldcg(order + first + base + t);
                const float a = sum_partials<WARPS>(shared, r * 8 + t, 128);
                const float b = sum_partials<WARPS>(shared, (8 + r) * 8 + t, 128);
                const int at = row + (r >> 1) + 4 * (r & 1);  // the order in which codes of `down` unpack
                store_as(z + (i64)pair * inner + at, swiglu(a, b, limit) * __ldcg(weights + pair));
            }
        }
    }
}

template <typename TYPE, int WARPS>
__device__ __forceinline__ void down_blocks(const ExpertSlot* slots, const int* order, const u16* z, float* y,
                                            const u8* grid, int inner, int width, int topk) {
    __shared__ float shared[WARPS * 16 * 8];
    __shared__ uint2 table[TYPE::TABLE ? TYPE::TABLE / 8 : 1];
    launch_dependents();
    const ExpertSlot* slot = slots + blockIdx.y;  // complete before `gate_up_blocks` launched this kernel
    const int4 header = __ldcg(reinterpret_cast<const int4*>(slot));
    const i64 address = __ldcg(slot->address + 2);
    const int first = header.y, row = blockIdx.x * 16;
    const int count = address ? header.z : 0;
    const int bytes = (inner >> 8) * TYPE::BYTES;
    u8* rows = reinterpret_cast<u8*>(memory);
    uint4* sums = memory + bytes;
    if (count) copy_whole<WARPS>(rows, reinterpret_cast<const u8*>(address) + (i64)row * bytes, 16 * bytes);
    commit_copies();
    load_table<TYPE, WARPS>(table, grid);
    grid_dependency_wait();
    for (int base = 0; base < count; base += 8) {
        if (!base) wait_for_copies<0>();
        __syncthreads();
        multiply_rows<TYPE, WARPS>(shared, rows, sums, table, z, count - base, inner,
                                   [&](int t) { return __ldcg(order + first + base + t); });
        for (int i = threadIdx.x; i < 128; i += WARPS * 32) {
            const int r = i & 15, t = i >> 4;
            if (base + t < count) {
                const int p = __ldcg(order + first + base + t);
                y[((i64)(p / topk) * (topk + 1) + p % topk) * width + row + r] =
                    sum_partials<WARPS>(shared, r * 8 + t, 128);
            }
        }
    }
}

#define EXPERTS_BLOCKS(TYPE, WARPS)                                                                               \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                      \
        gate_up_##TYPE##_##WARPS(const ExpertSlot* slots, const int* order, const float* weights, const u16* x,   \
                                 u16* z, const u8* grid, int inner, int width, int topk, float limit) {           \
        gate_up_blocks<TYPE, WARPS>(slots, order, weights, x, z, grid, inner, width, topk, limit);                \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                      \
        down_##TYPE##_##WARPS(const ExpertSlot* slots, const int* order, const u16* z, float* y, const u8* grid,  \
                              int inner, int width, int topk) {                                                   \
        down_blocks<TYPE, WARPS>(slots, order, z, y, grid, inner, width, topk);                                   \
    }
EXPERTS_BLOCKS(Q2_K, 2)
EXPERTS_BLOCKS(Q2_K, 4)
EXPERTS_BLOCKS(Q2_K, 8)
EXPERTS_BLOCKS(IQ2_XXS, 2)
EXPERTS_BLOCKS(IQ2_XXS, 4)
EXPERTS_BLOCKS(IQ2_XXS, 8)
