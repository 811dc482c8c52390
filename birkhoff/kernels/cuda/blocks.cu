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

// Dynamic shared memory has the table of the type, STAGES tiles, then sums of inputs (`sum_inputs`) or their digits
// (`split_inputs`).

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

// The products of sixteen staged rows with up to eight tokens, `token_of(t)` their rows of x; sums into `shared`.
template <typename TYPE, int WARPS, typename TOKEN>
__device__ __forceinline__ void multiply_rows(float* shared, const u8* rows, const uint4* sums, const u8* table,
                                              const u16* x, int count, int inner, const TOKEN& token_of) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, blocks = inner >> 8;
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

// The tiles of thread block `block` of `blocks`, with STAGES of them requested or present at a time. GATE_UP: rows of gate and up, inputs x
// of `inner` columns and `rows` rows of each; down otherwise. `store(slot, row, base)` writes the products of up to eight
// tokens of an expert; `token_of(pair)` is the row of x of a pair.
template <typename TYPE, int WARPS, int STAGES, bool GATE_UP, typename TOKEN, typename STORE>
__device__ __forceinline__ void multiply_tiles(float* shared, int block, int blocks, const ExpertSlot* slots,
                                               int slot_count, const int* order, const u16* x, const u8* grid, int inner,
                                               int rows, const TOKEN& token_of, const STORE& store) {
    constexpr int STEP = GATE_UP ? 8 : 16;
    const int per_slot = rows / STEP, tiles = per_slot * slot_count, bytes = (inner >> 8) * TYPE::BYTES;
    const int begin = (int)((i64)tiles * block / blocks), end = (int)((i64)tiles * (block + 1) / blocks);
    u8* table = reinterpret_cast<u8*>(memory);
    u8* stages = table + TYPE::TABLE;
    uint4* sums = reinterpret_cast<uint4*>(stages) + STAGES * bytes;  // sixteen rows are `bytes` times sixteen bytes
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
                sum_inputs<WARPS>(sums, x, min(count - base, 8), inner, token);
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

// The tiles of a thread block for a type of DIGITS and a single token. Warp 0 copies rows with bulk copies, up to STAGES
// tiles ahead; a staged row has an odd number of sixteen bytes where rows are that aligned, so that the same word of
// eight rows is in eight banks, four apart. `store(pair, row, r, first, last)` is called by lanes r < 8 of the last warp
// with the products of rows r and r + 8 of a tile.
template <typename TYPE, int WARPS, int STAGES, bool GATE_UP, typename STORE>
__device__ __forceinline__ void multiply_one(float* shared, u64* arrived, int block, int blocks, const ExpertSlot* slots,
                                             int slot_count, const int* order, const u16* x, const u8* grid, int inner,
                                             int rows, const STORE& store) {
    constexpr int STEP = GATE_UP ? 8 : 16;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
    const int per_slot = rows / STEP, tiles = per_slot * slot_count, columns = inner >> 8, bytes = columns * TYPE::BYTES;
    const int stride = bytes % 32 == 0 ? bytes + 16 : bytes;
    const int begin = (int)((i64)tiles * block / blocks), end = (int)((i64)tiles * (block + 1) / blocks);
    u8* table = reinterpret_cast<u8*>(memory);
    u8* stages = table + TYPE::TABLE;
    uint4* digits = reinterpret_cast<uint4*>(stages) + STAGES * stride;
    float* factors = reinterpret_cast<float*>(digits + columns * DIGIT_WORDS);
    auto live_address = [&](int slot) {
        const i64 address = __ldcg(slots[slot].address + (GATE_UP ? 0 : 2));
        return __ldcg(&slots[slot].count) ? address : 0;  // experts without an address are computed elsewhere
    };
    int held = begin / per_slot, wanted = begin - held * per_slot;  // the tile that is requested next
    i64 address = live_address(min(held, slot_count - 1));
    auto request = [&](int stage) {  // by warp 0
        if (wanted == per_slot) {
            wanted = 0;
            if (++held < slot_count) address = live_address(held);
        }
        if (lane == 0) barrier_expect(arrived + stage, address ? 16 * bytes : 0);
        __syncwarp();
        if (address) {
            const u8* from = reinterpret_cast<const u8*>(address) + (i64)wanted * STEP * bytes;
            const i64 apart = GATE_UP ? (i64)(rows - 8) * bytes : 0;  // further that the last eight rows are
            u8* into = stages + stage * 16 * stride;
            if (stride != bytes) {
                if (lane < 16)
                    copy_bulk(into + lane * stride, from + lane * bytes + (lane < 8 ? 0 : apart), bytes, arrived + stage);
            } else if (lane < 2) {
                copy_bulk(into + lane * 8 * bytes, from + lane * (8 * bytes + apart), 8 * bytes, arrived + stage);
            }
        }
        wanted++;
    };
    if (warp == 0) {
        if (lane < STAGES) barrier_init(arrived + lane);
        fence_barriers();
        __syncwarp();
        for (int i = 0; i < STAGES && begin + i < end; i++) request(i);
    }
    if constexpr (TYPE::TABLE != 0) TYPE::template fill_table<WARPS * 32>(table, grid);
    grid_dependency_wait();
    int slot = -1, pair = 0, stage = 0, parity = 0, row = begin % per_slot;
    i64 present = 0;
    for (int tile = begin; tile < end; tile++) {
        if (slot < 0 || row == per_slot) {
            const bool first = slot < 0;
            if (!first) row = 0;
            slot = first ? begin / per_slot : slot + 1;
            present = live_address(slot);
            pair = __ldcg(order + __ldcg(&slots[slot].first));
            if (first || !GATE_UP) {
                if (present || GATE_UP) split_inputs<TYPE, WARPS>(digits, factors, x + (GATE_UP ? 0 : (i64)pair * inner), inner);
                __syncthreads();
            }
        }
        float* sums = shared + (tile & 1) * (WARPS * 16);
        barrier_wait(arrived + stage, parity);
        if (present) {
            float acc[4] = {};
            const u8* staged = stages + stage * 16 * stride + g * stride;
            for (int at = warp; at < columns; at += WARPS) {
                const u8* low = staged + at * TYPE::BYTES;
                TYPE::multiply(acc, low, low + 8 * stride, digits + at * DIGIT_WORDS, factors[at], table);
            }
            acc[0] += __shfl_xor_sync(~0u, acc[0], 1);  // other lanes of a row have no digits
            acc[2] += __shfl_xor_sync(~0u, acc[2], 1);
            if ((lane & 3) == 0) {
                sums[warp * 16 + g] = acc[0];
                sums[warp * 16 + 8 + g] = acc[2];
            }
        }
        __syncthreads();
        if (warp == 0 && tile + STAGES < end) request(stage);
        if (present && warp == WARPS - 1 && lane < 8)
            store(pair, row * STEP, lane, sum_partials<WARPS>(sums, lane, 16), sum_partials<WARPS>(sums, 8 + lane, 16));
        row++;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

// The down projection of a shared expert in Q8_0 for up to eight tokens, by the first `blocks` thread blocks.
template <int WARPS>
__device__ __forceinline__ void multiply_shared(float* shared, int blocks, const u8* codes, int rows, const u16* z, int n,
                                                int inner, float* out, int out_stride) {
    const int g = (threadIdx.x & 31) >> 2, tiles = rows / 16;
    const int begin = (int)((i64)tiles * blockIdx.x / blocks), end = (int)((i64)tiles * (blockIdx.x + 1) / blocks);
    const u16* const x[1] = {z + (i64)g * inner};
    const bool valid[1] = {g < n};
    for (int tile = begin; tile < end; tile++) {
        const u8* const c[1] = {codes + tile * 16 * q8_row_bytes(inner)};
        float acc[1][1][4] = {};
        gemm_q8<1, 1, WARPS, 2>(acc, c, x, valid, inner);
        float* sums = shared + (tile & 1) * (WARPS * 128);  // the other one may still be read
        store_partials<1, 1, WARPS>(sums, acc);
        for (int i = threadIdx.x; i < 128; i += WARPS * 32) {
            const int r = i & 15, t = i >> 4;
            if (t < n) out[(i64)t * out_stride + tile * 16 + r] = sum_partials<WARPS>(sums, r * 8 + t, 128);
        }
    }
}

// As `experts_gate_up` and `experts_down` of experts.cu. The first `shared_blocks` thread blocks of `down` compute a
// shared expert.
template <typename TYPE, int WARPS, int STAGES>
__device__ __forceinline__ void gate_up_blocks(const ExpertSlot* slots, int slot_count, const int* order,
                                               const float* weights, const u16* x, u16* z, const u8* grid, int inner,
                                               int width, int topk, float limit) {
    __shared__ float shared[WARPS * 16 * 8];
    grid_dependency_wait();
    launch_dependents();
    if constexpr (TYPE::DIGITS) {
        __shared__ u64 arrived[STAGES];
        multiply_one<TYPE, WARPS, STAGES, true>(
            shared, arrived, blockIdx.x, gridDim.x, slots, slot_count, order, x, grid, width, inner,
            [=](int pair, int row, int r, float a, float b) {
                const int at = row + (r >> 1) + 4 * (r & 1);
                store_as(z + (i64)pair * inner + at, swiglu(a, b, limit) * __ldcg(weights + pair));
            });
        return;
    } else
    multiply_tiles<TYPE, WARPS, STAGES, true>(
        shared, blockIdx.x, gridDim.x, slots, slot_count, order, x, grid, width, inner,
        [=](int pair) { return pair / topk; },
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
                                            float* y, const u8* grid, int inner, int width, int topk, int shared_blocks,
                                            const u8* shared_codes, const u16* z_shared, int n) {
    __shared__ float shared[2 * WARPS * 16 * 8];
    launch_dependents();  // slots are complete since before `gate_up_blocks` launched this kernel
    const int block = blockIdx.x - shared_blocks;
    if (block < 0) {
        multiply_shared<WARPS>(shared, shared_blocks, shared_codes, width, z_shared, n, inner, y + (i64)topk * width,
                               (topk + 1) * width);
        return;
    }
    if constexpr (TYPE::DIGITS) {
        __shared__ u64 arrived[STAGES];
        multiply_one<TYPE, WARPS, STAGES, false>(
            shared, arrived, block, gridDim.x - shared_blocks, slots, slot_count, order, z, grid, inner, width,
            [=](int pair, int row, int r, float first, float last) {
                float* into = y + (i64)pair * width + row + r;  // of one token
                into[0] = first;
                into[8] = last;
            });
        return;
    } else
    multiply_tiles<TYPE, WARPS, STAGES, false>(
        shared, block, gridDim.x - shared_blocks, slots, slot_count, order, z, grid, inner, width,
        [](int pair) { return pair; },
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
         int width, int topk, int shared_blocks, const u8* shared_codes, const u16* z_shared, int n) {
    down_blocks<BLOCK_TYPE, BLOCK_WARPS, BLOCK_STAGES>(slots, slot_count, order, z, y, grid, inner, width, topk,
                                                       shared_blocks, shared_codes, z_shared, n);
}
#endif
