// Products with rows of Q8_0 in ranges: a thread block has consecutive tiles of sixteen rows, and every warp copies its
// part of up to Q8_DEPTH stages ahead, across tiles, so that requests never pause. `gemv.cu` has a tile per thread block.
//
// Compiled for one variant at a time (Q8_TILES of eight tokens, Q8_WARPS that split K, Q8_DEPTH, Q8_RESIDENT thread
// blocks that are to fit a multiprocessor, Q8_ONE if there is a single token).

#include "blocks.cuh"

#ifdef Q8_TILES
#define GEMV_Q8_ROWS(NAME, OUT)                                                                                           \
    extern "C" __global__ void __launch_bounds__(Q8_WARPS * 32, Q8_RESIDENT)                                                    \
        NAME(const u8* codes, int rows, const u8* codes2, int rows2, const u16* xh, int n, int inner, int x_stride,       \
             OUT* out, int out_stride, int group) {                                                                       \
        __shared__ float shared[2 * Q8_WARPS * 16 * Q8_TILES * 8];                                                        \
        __shared__ u64 barriers[Q8_WARPS * Q8_DEPTH];                                                                     \
        launch_dependents();                                                                                              \
        multiply_q8_rows<Q8_TILES, Q8_WARPS, Q8_DEPTH, Q8_ONE>(shared, barriers, blockIdx.x, gridDim.x, codes,      \
                                                               rows, codes2, rows2, xh, n, inner, x_stride, out,          \
                                                               out_stride, group);                                        \
    }
GEMV_Q8_ROWS(gemv_q8_f32, float)
GEMV_Q8_ROWS(gemv_q8_f16, u16)
GEMV_Q8_ROWS(gemv_q8_bf16, bf16)
#endif
