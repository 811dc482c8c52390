// Products of 17 to 64 rows of inputs with many rows of FP8 or bfloat16 weights: query projections and LM head. gemv.cu
// reads all inputs again for every sixteen rows of a weight, which at these sizes takes longer than reading the weights.
// Here a thread block multiplies 32 rows of a weight per warp and shares the inputs of a step in shared memory; a weight is
// converted once for all tokens. Sums are those of gemv.cuh in another order. The Triton twin is linear/decode.py.

#include "gemv.cuh"

// Defined by variants.py: tiles of eight tokens, warps of 32 rows, steps of K in flight, thread blocks per multiprocessor.
#ifndef ROWS_TILES
#define ROWS_TILES 8
#define ROWS_WARPS 8
#define ROWS_STAGES 4
#define ROWS_RESIDENT 1
#endif

extern __shared__ uint4 memory[];

constexpr int STEP_BYTES = 128;  // of every row of a weight: 128 columns of FP8, 64 of bfloat16
constexpr int FP8_PITCH = 272, BF16_PITCH = 144;  // bytes between two tokens' inputs of a step: loads of eight lanes hit all banks
constexpr int TILE = 32 * ROWS_WARPS;
constexpr int WEIGHT_SLOT = TILE * STEP_BYTES;
constexpr int SLOT = WEIGHT_SLOT + ROWS_TILES * 8 * FP8_PITCH;
constexpr int SUM_PITCH = TILE + 4;  // floats between two tokens' sums

// `copy_or_zero16` writes zeros where `valid` is false.
__device__ __forceinline__ void copy16(u8* into, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(into)), "l"(from));
}
__device__ __forceinline__ void copy_or_zero16(u8* into, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(into)), "l"(from),
                 "r"(valid ? 16 : 0));
}
__device__ __forceinline__ uint4 load_matrices(const u8* row) {  // four of 8 by 16 bytes; lane i has the address of row i
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"((u32)__cvta_generic_to_shared(row)));
    return v;
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" :::); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// The K loop of a thread block. `weight` points to the first of this warp's 32 rows, `x` to the first token's inputs,
// both at the first column; a warp that is not `active` copies inputs only. `scale` has one byte per 128 columns.
template <bool BF16>
__device__ __forceinline__ void multiply_rows(float (&acc)[2][ROWS_TILES][4], const u8* weight, i64 row_bytes,
                                              const u8* scale, int scale_stride, const u16* x, int x_stride, int n,
                                              int steps, bool active) {
    constexpr int COLUMNS = BF16 ? 64 : 128, PITCH = BF16 ? BF16_PITCH : FP8_PITCH, CHUNKS = COLUMNS / 8;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    u8* const shared = reinterpret_cast<u8*>(memory);
    auto copy_weights = [&](int slot, int at) {
        if (at >= steps || !active) return;
        // Of FP8 every lane reads what it copied itself; of bfloat16 the chunks of a row are stored where reading one
        // of eight rows hits all banks.
        u8* into = shared + slot * SLOT + warp * 4096 + (BF16 ? g * 4 + (q ^ g >> 1) : lane) * 16;
        const u8* from = weight + g * row_bytes + at * STEP_BYTES + q * 16;
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < 2; c++) copy16(into + (r * 2 + c) * 512, from + r * 8 * row_bytes + c * 64);
    };
    auto copy_inputs = [&](int slot, int at) {
        if (at >= steps) return;
        u8* into = shared + slot * SLOT + WEIGHT_SLOT;
#pragma unroll
        for (int base = 0; base < ROWS_TILES * 8 * CHUNKS; base += TILE) {
            const int i = base + threadIdx.x, t = i / CHUNKS, j = i % CHUNKS;
            if (t < ROWS_TILES * 8)
                copy_or_zero16(into + t * PITCH + j * 16, x + (i64)(t < n ? t : 0) * x_stride + at * COLUMNS + j * 8,
                               t < n);
        }
    };
#pragma unroll
    for (int s = 0; s < ROWS_STAGES - 1; s++) copy_weights(s, s);
    commit_copies();
    u32 scales = 0;  // lane i has the scale of step i of 32
    if (!BF16 && active && lane < steps) scales = scale[(i64)lane * scale_stride];
    grid_dependency_wait();
#pragma unroll
    for (int s = 0; s < ROWS_STAGES - 1; s++) {
        copy_inputs(s, s);
        commit_copies();
    }
    int slot = 0, free = ROWS_STAGES - 1;
    for (int at = 0; at < steps; at++) {
        wait_for_copies<ROWS_STAGES - 2>();
        __syncthreads();  // inputs of all threads have arrived, and none reads the slot of the previous step
        copy_weights(free, at + ROWS_STAGES - 1);
        copy_inputs(free, at + ROWS_STAGES - 1);
        commit_copies();
        if (!BF16 && at && !(at & 31)) scales = active && at + lane < steps ? scale[(i64)(at + lane) * scale_stride] : 0;
        if (active) {
            const uint4* w = memory + (slot * SLOT) / 16 + warp * 8 * 32 + lane;
            const u8* inputs = shared + slot * SLOT + WEIGHT_SLOT + g * PITCH;
            if (BF16) {
                const int of_eight = lane & 7, swizzle = of_eight >> 1;
                const u8* rows = shared + slot * SLOT + warp * 4096 + (lane >> 3 & 1) * 1024 + of_eight * 64;
                const u8* columns = shared + slot * SLOT + WEIGHT_SLOT + of_eight * PITCH + (lane >> 3) * 16;
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    uint4 b[ROWS_TILES];
#pragma unroll
                    for (int t = 0; t < ROWS_TILES; t++) b[t] = load_matrices(columns + t * 8 * PITCH + c * 64);
#pragma unroll
                    for (int r = 0; r < 2; r++)
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            const uint4 a = load_matrices(rows + (r * 4 + c) * 512 + ((2 * j + (lane >> 4)) ^ swizzle) * 16);
#pragma unroll
                            for (int t = 0; t < ROWS_TILES; t++)
                                mma<true>(acc[r][t], a.x, a.y, a.z, a.w, j ? b[t].z : b[t].x, j ? b[t].w : b[t].y);
                        }
                }
            } else {
                float part[2][ROWS_TILES][4] = {};
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    uint4 low[2], high[2];
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        low[r] = w[(r * 4 + c) * 32];
                        high[r] = w[(r * 4 + 2 + c) * 32];
                    }
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
                        uint4 b[ROWS_TILES];
#pragma unroll
                        for (int t = 0; t < ROWS_TILES; t++)
                            b[t] = *reinterpret_cast<const uint4*>(inputs + t * 8 * PITCH + c * 128 + q * 32 + i * 8);
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            uint2 a = e4m3x4_to_f16x4(word(low[r], i)), below = e4m3x4_to_f16x4(word(high[r], i));
#pragma unroll
                            for (int t = 0; t < ROWS_TILES; t++) mma<false>(part[r][t], a.x, below.x, a.y, below.y, b[t].x, b[t].y);
                            a = e4m3x4_to_f16x4(word(low[r], i + 1));
                            below = e4m3x4_to_f16x4(word(high[r], i + 1));
#pragma unroll
                            for (int t = 0; t < ROWS_TILES; t++) mma<false>(part[r][t], a.x, below.x, a.y, below.y, b[t].z, b[t].w);
                        }
                    }
                }
                const float s = __uint_as_float(__shfl_sync(~0u, scales, at & 31) << 23);
#pragma unroll
                for (int r = 0; r < 2; r++)
#pragma unroll
                    for (int t = 0; t < ROWS_TILES; t++)
#pragma unroll
                        for (int i = 0; i < 4; i++) acc[r][t][i] += s * part[r][t][i];
            }
        }
        slot = slot + 1 == ROWS_STAGES ? 0 : slot + 1;
        free = free + 1 == ROWS_STAGES ? 0 : free + 1;
    }
}

__device__ __forceinline__ void store_four(float* p, const float4& v) { *reinterpret_cast<float4*>(p) = v; }
template <typename T>
__device__ __forceinline__ void store_four(T* p, const float4& v) {
    store_as(p, v.x);
    store_as(p + 1, v.y);
    store_as(p + 2, v.z);
    store_as(p + 3, v.w);
}

// Rows of up to two FP8 matrices and of one bfloat16 matrix, TILE of them per thread block. `group` as in gemv.cu, a
// multiple of TILE. All row counts are multiples of 32.
template <typename OUT>
__device__ __forceinline__ void gemm_rows(const u8* codes, const u8* scale, int rows8, const u8* codes2,
                                          const u8* scale2, int rows8b, const u16* weight16, int rows16, const u16* xh,
                                          const u16* xb, int n, int inner, int x_stride, OUT* out, int out_stride,
                                          int group) {
    launch_dependents();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    int tile = blockIdx.x;
    const int tiles8 = (rows8 + TILE - 1) / TILE, tiles8b = (rows8b + TILE - 1) / TILE;
    const bool is_fp8 = tile < tiles8 + tiles8b, second = is_fp8 && tile >= tiles8;
    const int rows = !is_fp8 ? rows16 : second ? rows8b : rows8;
    const int base = !is_fp8 ? rows8 + rows8b : second ? rows8 : 0;  // of the output
    tile -= !is_fp8 ? tiles8 + tiles8b : second ? tiles8 : 0;
    int row = tile * TILE + warp * 32;
    const bool active = row < rows;
    if (!active) row = 0;
    const u16* x = (is_fp8 ? xh : xb) + (group ? (i64)((base + tile * TILE) / group) * inner : 0);
    float acc[2][ROWS_TILES][4] = {};
    if (is_fp8)
        multiply_rows<false>(acc, (second ? codes2 : codes) + (i64)row * inner, inner, (second ? scale2 : scale) + row,
                             rows, x, x_stride, n, inner / 128, active);
    else
        multiply_rows<true>(acc, reinterpret_cast<const u8*>(weight16 + (i64)row * inner), 2 * (i64)inner, nullptr, 0, x,
                            x_stride, n, inner / 64, active);
    wait_for_copies<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int t = 0; t < ROWS_TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[(t * 8 + 2 * q + (i & 1)) * SUM_PITCH + warp * 32 + r * 16 + g + 8 * (i >> 1)] = acc[r][t][i];
    __syncthreads();
    for (int i = threadIdx.x; i < TILE / 4 * n; i += TILE) {
        const int r = i % (TILE / 4) * 4, t = i / (TILE / 4);
        if (tile * TILE + r < rows)
            store_four(out + (i64)t * out_stride + base + tile * TILE + r,
                       *reinterpret_cast<const float4*>(sums + t * SUM_PITCH + r));
    }
}

#define ROWS(NAME, OUT)                                                                                               \
    extern "C" __global__ void __launch_bounds__(TILE, ROWS_RESIDENT)                                                 \
        NAME(const u8* codes, const u8* scale, int rows8, const u8* codes2, const u8* scale2, int rows8b,             \
             const u16* weight16, int rows16, const u16* xh, const u16* xb, int n, int inner, int x_stride, OUT* out, \
             int out_stride, int group) {                                                                             \
        gemm_rows(codes, scale, rows8, codes2, scale2, rows8b, weight16, rows16, xh, xb, n, inner, x_stride, out,     \
                  out_stride, group);                                                                                 \
    }
ROWS(rows_f32, float)
ROWS(rows_f16, u16)
ROWS(rows_bf16, bf16)
