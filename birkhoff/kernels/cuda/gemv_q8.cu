// Products with rows of Q8_0 in ranges: a thread block has consecutive tiles of sixteen rows, and every warp copies its
// part of up to Q8_DEPTH stages ahead, across tiles, so that requests never pause. `gemv.cu` has a tile per thread block.
//
// Compiled for one variant at a time (Q8_TILES of eight tokens, Q8_WARPS that split K, Q8_DEPTH).

#include "blocks.cuh"

// The arguments are those of `gemv`, without a bfloat16 matrix. Dynamic shared memory: WARPS * DEPTH stages.
template <int NT, int WARPS, int DEPTH, typename OUT>
__device__ __forceinline__ void gemv_q8_rows(const u8* codes, int rows, const u8* codes2, int rows2, const u16* xh, int n,
                                             int inner, int x_stride, OUT* out, int out_stride, int group) {
    __shared__ float shared[2][WARPS * 16 * NT * 8];
    launch_dependents();
    const int g = (threadIdx.x & 31) >> 2, warp = threadIdx.x >> 5, stages = inner / Q8_COLUMNS;
    const int tiles = (rows + rows2) / 16, per_tile = (stages + WARPS - 1) / WARPS;
    const int begin = (int)((i64)tiles * blockIdx.x / gridDim.x), end = (int)((i64)tiles * (blockIdx.x + 1) / gridDim.x);
    const i64 bytes = (i64)stages * Q8_BYTES;
    u8* own = reinterpret_cast<u8*>(memory) + warp * (DEPTH * Q8_STAGE);
    auto request = [&](int item) {
        const int row = (begin + item / per_tile) * 16, at = warp + item % per_tile * WARPS;
        if (row < end * 16 && at < stages) {
            const u8* from = row < rows ? codes + row * bytes : codes2 + (row - rows) * bytes;
            copy_rows<Q8_BYTES>(own + item % DEPTH * Q8_STAGE, from + (i64)at * Q8_BYTES, bytes);
        }
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < DEPTH; i++) request(i);
    grid_dependency_wait();
    bool valid[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) valid[t] = t * 8 + g < n;
    int item = 0;
    for (int tile = begin; tile < end; tile++) {
        float acc[1][NT][4] = {};
        const u16* x[NT];
#pragma unroll
        for (int t = 0; t < NT; t++)
            x[t] = xh + (group ? (i64)(tile * 16 / group) * inner : 0) + (i64)(t * 8 + g) * x_stride;
        for (int i = 0; i < per_tile; i++, item++) {
            const int at = warp + i * WARPS;
            wait_for_copies<DEPTH - 1>();
            if (at < stages) multiply_q8_stage<NT, 1>(acc, own + item % DEPTH * Q8_STAGE, x, valid, at * Q8_COLUMNS);
            __syncwarp();
            request(item + DEPTH);
        }
        float* sums = shared[tile & 1];  // the other one may still be read
        store_partials<NT, 1, WARPS>(sums, acc);
        for (int i = threadIdx.x; i < 16 * NT * 8; i += WARPS * 32) {
            const int r = i & 15, t = i >> 4;
            if (t < n)
                store_as(out + (i64)t * out_stride + tile * 16 + r,
                         sum_partials<WARPS>(sums, r * (NT * 8) + t, 16 * NT * 8));
        }
    }
}

#ifdef Q8_TILES
#define GEMV_Q8_ROWS(NAME, OUT)                                                                                           \
    extern "C" __global__ void __launch_bounds__(Q8_WARPS * 32)                                                           \
        NAME(const u8* codes, int rows, const u8* codes2, int rows2, const u16* xh, int n, int inner, int x_stride,       \
             OUT* out, int out_stride, int group) {                                                                       \
        gemv_q8_rows<Q8_TILES, Q8_WARPS, Q8_DEPTH>(codes, rows, codes2, rows2, xh, n, inner, x_stride, out, out_stride,   \
                                                   group);                                                                \
    }
GEMV_Q8_ROWS(gemv_q8_f32, float)
GEMV_Q8_ROWS(gemv_q8_f16, u16)
GEMV_Q8_ROWS(gemv_q8_bf16, bf16)
#endif
