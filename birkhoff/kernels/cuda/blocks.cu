// Routed experts of ggml's types for a decode step. The Triton twin is experts/block_types.py, which has all types.
//
// A tile is sixteen rows of an expert: eight of gate and the same eight of up, or sixteen of down. They are copied whole
// into shared memory; the warps of a thread block then take their blocks of 256 columns in turn. With STAGES of 1 a
// thread block has one tile. With more of them it has a range of tiles and copies up to STAGES at a time, so that later
// tiles arrive while the first is multiplied; gridDim.x says how many thread blocks share the tiles.
//
// Compiled for one variant at a time (BLOCK_TYPE, BLOCK_WARPS, BLOCK_STAGES and BLOCK_RESIDENT, the thread blocks that
// are to fit a multiprocessor), as kernels `gate_up` and `down`.

#include "block_types.cuh"

// Dynamic shared memory has STAGES tiles, then sums of inputs (`sum_inputs`), then the table of the type.

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

// The products of sixteen staged rows with up to eight tokens, `token_of(t)` their rows of x; sums into `shared`. A type
// for ONE token has sums of its four lanes of a row, of which the first stores the total.
template <typename TYPE, int WARPS, typename TOKEN>
__device__ __forceinline__ void multiply_rows(float* shared, const u8* rows, const uint4* sums, const u8* table,
                                              const u16* x, int count, int inner, const TOKEN& token_of) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, blocks = inner >> 8;
    const int t = !TYPE::ONE && g < count ? g : 0;
    const u16* own = x + (i64)token_of(t) * inner;
    float acc[1][1][4] = {};
    const u8* row = rows + g * blocks * TYPE::BYTES;
    for (int at = warp; at < blocks; at += WARPS) {
        const u8* low = row + at * TYPE::BYTES;
        TYPE::multiply(acc[0][0], low, low + 8 * blocks * TYPE::BYTES, own + at * 256, table,
                       sums + (t * blocks + at) * 4);
    }
    if constexpr (TYPE::ONE)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            float& sum = acc[0][0][i];
            sum = TYPE::finish(sum);
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
        }
    store_partials<1, 1, WARPS>(shared, acc);
}

// The tiles of a thread block, with STAGES of them requested or present at a time. GATE_UP: rows of gate and up, inputs x
// of `inner` columns and `rows` rows of each; down otherwise. `store(slot, row, base)` writes the products of up to eight
// tokens of an expert; `token_of(pair)` is the row of x of a pair.
template <typename TYPE, int WARPS, int STAGES, bool GATE_UP, typename TOKEN, typename STORE>
__device__ __forceinline__ void multiply_tiles(float* shared, const ExpertSlot* slots, int slot_count, const int* order,
                                               const u16* x, const u8* grid, int inner, int rows, const TOKEN& token_of,
                                               const STORE& store) {
    constexpr int STEP = GATE_UP ? 8 : 16;
    const int per_slot = rows / STEP, tiles = per_slot * slot_count, bytes = (inner >> 8) * TYPE::BYTES;
    const int begin = (int)((i64)tiles * blockIdx.x / gridDim.x), end = (int)((i64)tiles * (blockIdx.x + 1) / gridDim.x);
    u8* stages = reinterpret_cast<u8*>(memory);  // sixteen rows are `bytes` times sixteen bytes
    uint4* sums = memory + STAGES * bytes;
    u8* table = reinterpret_cast<u8*>(sums + (TYPE::SUMS ? (TYPE::ONE ? 1 : 8) * (inner >> 6) : 0));
    auto request = [&](int tile) {
        if (tile < end) {
            const ExpertSlot* slot = slots + tile / per_slot;
            const i64 address = __ldcg(slot->address + (GATE_UP ? 0 : 2));
            if (address && __ldcg(&slot->count)) {  // experts without an address are computed elsewhere
                const u8* from = reinterpret_cast<const u8*>(address) + (i64)(tile % per_slot * STEP) * bytes;
                u8* into = stages + (tile - begin) % STAGES * (16 * bytes);
                copy_whole<WARPS>(into, from, STEP * bytes);
                if (GATE_UP) copy_whole<WARPS>(into + 8 * bytes, from + (i64)rows * bytes, 8 * bytes);
            }
        }
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i + 1 < STAGES || i < 1; i++) request(begin + i);
    if constexpr (TYPE::TABLE != 0) TYPE::template fill_table<WARPS * 32>(table, grid);
    grid_dependency_wait();
    int summed = -1;  // slot whose inputs are in `sums`
    for (int tile = begin; tile < end; tile++) {
        if (STAGES > 1 || tile > begin) request(tile + STAGES - 1);
        const int at = tile / per_slot;
        const int4 header = __ldcg(reinterpret_cast<const int4*>(slots + at));
        const int first = header.y, count = __ldcg(slots[at].address + (GATE_UP ? 0 : 2)) ? header.z : 0;
        wait_for_copies<STAGES - 1>();
        __syncthreads();
        for (int base = 0; base < count; base += 8) {
            auto token = [&](int t) { return token_of(__ldcg(order + first + base + t)); };
            if (TYPE::SUMS && (summed != at || count > 8)) {
                if (base) __syncthreads();
                sum_inputs<WARPS>(sums, x, TYPE::ONE ? 1 : min(count - base, 8), inner, token);
                summed = at;
                __syncthreads();
            } else if (base) {
                __syncthreads();
            }
            multiply_rows<TYPE, WARPS>(shared, stages + (tile - begin) % STAGES * (16 * bytes), sums, table, x,
                                       count - base, inner, token);
            store(first + base, count - base, tile % per_slot * STEP);
        }
    }
}

// As `experts_gate_up` and `experts_down` of experts.cu, without the shared expert.
template <typename TYPE, int WARPS, int STAGES>
__device__ __forceinline__ void gate_up_blocks(const ExpertSlot* slots, int slot_count, const int* order,
                                               const float* weights, const u16* x, u16* z, const u8* grid, int inner,
                                               int width, int topk, float limit) {
    __shared__ float shared[WARPS * 16 * 8];
    grid_dependency_wait();
    launch_dependents();
    multiply_tiles<TYPE, WARPS, STAGES, true>(
        shared, slots, slot_count, order, x, grid, width, inner, [=](int pair) { return pair / topk; },
        [=](int first, int count, int row) {
            for (int i = threadIdx.x; i < 64; i += WARPS * 32) {
                const int r = i & 7, t = i >> 3;
                if (t < count) {
                    const int pair = __ldcg(order + first + t);
                    const float a = sum_partials<WARPS>(shared, r * 8 + t, 128);
                    const float b = sum_partials<WARPS>(shared, (8 + r) * 8 + t, 128);
                    const int at = row + (r >> 1) + 4 * (r & 1);  // the order in which codes of `down` unpack
                    store_as(z + (i64)pair * inner + at, swiglu(a, b, limit) * __ldcg(weights + pair));
                }
            }
        });
}

template <typename TYPE, int WARPS, int STAGES>
__device__ __forceinline__ void down_blocks(const ExpertSlot* slots, int slot_count, const int* order, const u16* z,
                                            float* y, const u8* grid, int inner, int width, int topk) {
    __shared__ float shared[WARPS * 16 * 8];
    launch_dependents();  // slots are complete since before `gate_up_blocks` launched this kernel
    multiply_tiles<TYPE, WARPS, STAGES, false>(
        shared, slots, slot_count, order, z, grid, inner, width, [](int pair) { return pair; },
        [=](int first, int count, int row) {
            for (int i = threadIdx.x; i < 128; i += WARPS * 32) {
                const int r = i & 15, t = i >> 4;
                if (t < count) {
                    const int p = __ldcg(order + first + t);
                    y[((i64)(p / topk) * (topk + 1) + p % topk) * width + row + r] =
                        sum_partials<WARPS>(shared, r * 8 + t, 128);
                }
            }
        });
}

#ifdef BLOCK_TYPE
extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, BLOCK_RESIDENT)
    gate_up(const ExpertSlot* slots, int slot_count, const int* order, const float* weights, const u16* x, u16* z,
            const u8* grid, int inner, int width, int topk, float limit) {
    gate_up_blocks<BLOCK_TYPE, BLOCK_WARPS, BLOCK_STAGES>(slots, slot_count, order, weights, x, z, grid, inner, width, topk, limit);
}
extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, BLOCK_RESIDENT)
    down(const ExpertSlot* slots, int slot_count, const int* order, const u16* z, float* y, const u8* grid, int inner,
         int width, int topk) {
    down_blocks<BLOCK_TYPE, BLOCK_WARPS, BLOCK_STAGES>(slots, slot_count, order, z, y, grid, inner, width, topk);
}
#endif
