// FP4 experts with FP8 inputs for the many rows of a prompt, on Hopper's matrix instructions (sm_90a).
//
// The twin of kernels/experts/fp8.py, which explains the arithmetic: E2M1 codes become E4M3 codes that include their
// scale relative to the largest one of the row; sums of 128 columns by the hardware, then float32 with the scale of the
// inputs. One block multiplies 256 rows of a matrix with up to 128 tokens of an expert. Two groups of four warps have
// 128 rows each, as two tiles of 64. The weights are the operand that matrix instructions take from registers: a thread
// reads 16 bytes of codes of a row, which are one group of 32 columns with one scale, and decodes them to its part of
// four products. The columns of the inputs are in the order that follows ("fragments" in quant/device.py), so nothing is
// exchanged between threads. While one tile is multiplied the group decodes the next one.
//
// Inputs are written by ordinary asynchronous copies and read by the tensor cores through another proxy: every thread
// awaits its copies and fences before the barrier. Without the fence the bits were the same in all runs and the kernels
// 4 % faster, but it is required.
//
// The 128 columns of z that a block makes are one group of the FP8 rounding of z: they are rounded and stored as codes.

#include "wgmma.cuh"
#include "prompt_common.cuh"

#define THREADS MULTIPLYING

// All threads copy and multiply.
__device__ __forceinline__ void sync_multiplying() { __syncthreads(); }
__device__ __forceinline__ void fewer_registers() {}
__device__ __forceinline__ void more_registers() {}
template <int N, class Rows>
__device__ __forceinline__ void copy_stages(const Product&, u8*, const Rows&) {}

// Multiply. Totals of tile m of the calling thread are in units of 2^scale[m][0] and 2^scale[m][1] for
// its two rows.
template <int N, class Rows>
__device__ __forceinline__ void product(const Product& p, u8* shared, const Rows& rows,
                                        float (&total)[2][N / 2], int (&scale)[2][2]) {
    using S = Stage<N>;
    u32* all_scales = (u32*)(shared + STAGES * S::bytes);  // [width / 128, 256]
    int* largest = (int*)(all_scales + p.width / 128 * 256);
    int* passes_needed = largest + 256;
    const int tid = threadIdx.x, group = tid / 128, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int row = group * 128 + (tid % 128) / 32 * 16 + g;  // of the thread in the first of its two tiles
    const int blocks = p.width / 128, row_bytes = p.width / 2, groups = p.width / 32;
    const u8* own_codes = p.codes + (i64)rows.of_matrix(tid / 4) * row_bytes + tid % 4 * 16;
    const i64 codes_step = (i64)(rows.of_matrix(64) - rows.of_matrix(0)) * row_bytes;
    const u8* own_scales = p.scales + (i64)rows.of_matrix(tid) * groups;
    constexpr int X_COPIES = (N * 8 + 255) / 256;
    const u8* own_x[X_COPIES];
#pragma unroll
    for (int i = 0; i < X_COPIES; i++)
        own_x[i] = p.x + (i64)rows.of_inputs((tid / 8 + 32 * i) % N) * p.width + tid % 8 * 16;
    const float* own_x_scale = p.x_scale + rows.of_inputs(tid % N);
    const u32 base = shared_address(shared);
    if (tid == 0) *passes_needed = 1;

    auto load = [&](int block, int stage) {
        const u32 to = base + stage * S::bytes;
#pragma unroll
        for (int i = 0; i < X_COPIES; i++) {
            const int n = tid / 8 + 32 * i;
            if (N % 32 == 0 || n < N) copy16(to + n * 128 + ((tid % 8) ^ (n % 8)) * 16, own_x[i] + block * 128);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            copy16_of_line(to + S::codes + (tid + 256 * i) * 16, own_codes + i * codes_step + block * 64);
        if (tid < N) copy4(to + S::x_scale + tid * 4, own_x_scale + (i64)block * p.x_rows);
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        load(i % blocks, i);
        copies_commit();
    }
    __syncthreads();
    scan_scales(own_scales, blocks, all_scales, largest, passes_needed);
    copies_wait<STAGES - 2>();
    fence_async_proxy();
    __syncthreads();
    const int steps = *passes_needed * blocks;
    int of_row[2][2];  // scale that counts as 2^11 in the current pass
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) of_row[m][h] = largest[row + 64 * m + 8 * h];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) total[m][i] = 0.f;

    float sums[N / 2];
    u32 first[4][4], second[4][4];
    const u8* scales = (const u8*)all_scales;  // of the block of columns that is decoded
    decode_tile(first, shared + S::codes, scales, row, t, of_row[0]);
    int stage = 0, block = 0, next_block = (STAGES - 1) % blocks;
    for (int step = 0; step < steps; step++) {
        u8* here = shared + stage * S::bytes;
        const u32 x = base + stage * S::bytes;
        multiply<N>(sums, first, x);
        decode_tile(second, here + S::codes, scales, row + 64, t, of_row[1]);
        wgmma_wait(second);
        add_scaled<N>(total[0], sums, (const float*)(here + S::x_scale), t);
        multiply<N>(sums, second, x);
        const bool pass_ends = ++block == blocks && step + 1 < steps;
        scales += 1024;
        if (pass_ends) {
            block = 0;
            scales = (const u8*)all_scales;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) of_row[m][h] -= SPAN;
        }
        if (step + 1 < steps) {
            copies_wait<STAGES - 3>();
            fence_async_proxy();
            __syncthreads();
            const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;
            if (step + STAGES - 1 < steps) load(next_block, free_stage);
            copies_commit();
            next_block = next_block + 1 == blocks ? 0 : next_block + 1;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            u8* ahead = shared + stage * S::bytes;
            decode_tile(first, ahead + S::codes, scales, row, t, of_row[0]);
        }
        wgmma_wait(first);
        add_scaled<N>(total[1], sums, (const float*)(here + S::x_scale), t);
        if (pass_ends) {
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int i = 0; i < N / 2; i++) total[m][i] *= (float)(1 << SPAN);
        }
    }
    // a code is its value times 2^(scale - base + 6)
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) scale[m][h] = of_row[m][h] - 6 - 127;
    copies_wait<0>();
    __syncthreads();
}

#include "prompt_outputs.cuh"
