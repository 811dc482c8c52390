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
// Copies of inputs are ordinary asynchronous ones: they are awaited, then a barrier follows, and matrix instructions read
// them without a further fence, as in the code that Triton makes for this chip. With a fence of the async proxy the
// results have the same bits and take 4 % longer.
//
// Rows of a tile of gate and up alternate by eight, so that a thread has both values of its SwiGLU. The 128 columns of z
// that a block makes are one group of the FP8 rounding of z: they are rounded and stored as codes.

#include "wgmma.cuh"

#define STAGES 5
#define SPAN 12  // powers of two that an E4M3 code has room for beside an E2M1 value

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Half of a line of 128 bytes of which the next step reads the rest.
__device__ __forceinline__ void copy16_of_line(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

// Four E2M1 codes in the low 16 bits of `magnitudes` and `signs` (one bit each) to E4M3 codes by a table of eight bytes.
__device__ __forceinline__ u32 four_codes(u32 magnitudes, u32 signs, u32 low, u32 high) {
    return permute(low, high, magnitudes) | permute(0x00008000u, 0u, signs);
}

struct RowTable {  // E4M3 codes of 0, .5, 1, 1.5, 2, 3, 4, 6 times 2^power; zeros if the power is outside the span
    u32 low, high;
    __device__ __forceinline__ RowTable(int power) {
        const bool inside = (u32)power < SPAN;
        low = inside ? 0x14100800u + power * 0x08080800u : 0u;
        high = inside ? 0x24201C18u + power * 0x08080808u : 0u;
    }
};

template <int N>
struct Stage {  // offsets within one stage of shared memory
    static constexpr int codes = N * 128, x_scale = codes + 256 * 64;
    static constexpr int bytes = (x_scale + N * 4 + 1023) / 1024 * 1024;
};

// The A operands of a tile of 64 rows and 128 columns: codes of rows `row` and `row` + 8, columns 32 t .. 32 t + 31.
// `scales` are those of the 128 columns, four bytes per row.
__device__ __forceinline__ void decode_tile(u32 (&a)[4][4], const u8* codes, const u8* scales, int row, int t,
                                            const int (&base)[2]) {
    const uint4 w0 = *(const uint4*)(codes + row * 64 + t * 16);
    const uint4 w1 = *(const uint4*)(codes + (row + 8) * 64 + t * 16);
    const RowTable table0(scales[row * 4 + t] - base[0] + SPAN - 1);
    const RowTable table1(scales[(row + 8) * 4 + t] - base[1] + SPAN - 1);
    const u32 words0[4] = {w0.x, w0.y, w0.z, w0.w}, words1[4] = {w1.x, w1.y, w1.z, w1.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 m0 = words0[i] & 0x77777777u, s0 = (words0[i] >> 3) & 0x11111111u;
        const u32 m1 = words1[i] & 0x77777777u, s1 = (words1[i] >> 3) & 0x11111111u;
        a[i][0] = four_codes(m0, s0, table0.low, table0.high);
        a[i][1] = four_codes(m1, s1, table1.low, table1.high);
        a[i][2] = four_codes(m0 >> 16, s0 >> 16, table0.low, table0.high);
        a[i][3] = four_codes(m1 >> 16, s1 >> 16, table1.low, table1.high);
    }
}

template <int N>
__device__ __forceinline__ void multiply(float (&sums)[N / 2], const u32 (&a)[4][4], u32 x) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_e4m3<N>(sums, a[i], b_descriptor(x + 32 * i), i > 0);
    wgmma_commit();
}

template <int N>
__device__ __forceinline__ void add_scaled(float (&total)[N / 2], const float (&sums)[N / 2], const float* x_scale, int t) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float2 s = *(const float2*)(x_scale + 8 * j + 2 * t);
        total[4 * j] = fmaf(sums[4 * j], s.x, total[4 * j]);
        total[4 * j + 1] = fmaf(sums[4 * j + 1], s.y, total[4 * j + 1]);
        total[4 * j + 2] = fmaf(sums[4 * j + 2], s.x, total[4 * j + 2]);
        total[4 * j + 3] = fmaf(sums[4 * j + 3], s.y, total[4 * j + 3]);
    }
}

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

__device__ __forceinline__ u32 bf16_bits(float v) {  // round to nearest even
    const u32 bits = __float_as_uint(v);
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}
__device__ __forceinline__ float bf16_round(float v) { return __uint_as_float(bf16_bits(v) << 16); }

__device__ __forceinline__ u32 e4m3_code(float v) {  // |v| <= 448
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(v));
    return pair & 0xFFu;
}

struct Product {
    const u8* x;           // codes of the inputs [rows, width]
    const float* x_scale;  // [width / 128, x_rows]
    int x_rows, width;
    const u8 *codes, *scales;  // of the matrix [rows, width]
};

// Multiply. `matrix_row(r)` is the row of the matrix that local row r (0 .. 255) of the block is, `input_row(n)` the row
// of the inputs of token n. Totals of tile m of the calling thread are in units of 2^scale[m][0] and 2^scale[m][1] for
// its two rows.
template <int N, class MatrixRow, class InputRow>
__device__ __forceinline__ void product(const Product& p, u8* shared, MatrixRow matrix_row, InputRow input_row,
                                        float (&total)[2][N / 2], int (&scale)[2][2]) {
    using S = Stage<N>;
    u32* all_scales = (u32*)(shared + STAGES * S::bytes);  // [width / 128, 256]
    int* largest = (int*)(all_scales + p.width / 128 * 256);
    int* passes_needed = largest + 256;
    const int tid = threadIdx.x, group = tid / 128, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int row = group * 128 + (tid % 128) / 32 * 16 + g;  // of the thread in the first of its two tiles
    const int blocks = p.width / 128, row_bytes = p.width / 2, groups = p.width / 32;
    const u8* own_codes = p.codes + (i64)matrix_row(tid / 4) * row_bytes + tid % 4 * 16;
    const i64 codes_step = (i64)(matrix_row(64) - matrix_row(0)) * row_bytes;
    const u8* own_scales = p.scales + (i64)matrix_row(tid) * groups;
    constexpr int X_COPIES = (N * 8 + 255) / 256;
    const u8* own_x[X_COPIES];
#pragma unroll
    for (int i = 0; i < X_COPIES; i++)
        own_x[i] = p.x + (i64)input_row((tid / 8 + 32 * i) % N) * p.width + tid % 8 * 16;
    const float* own_x_scale = p.x_scale + input_row(tid % N);
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
    {  // the largest scale of every row, and the passes that the row with the widest scales needs
        u32 high = 0, low = ~0u;
#pragma unroll 8
        for (int i = 0; i < blocks; i++) {
            const u32 four = *(const u32*)(own_scales + 4 * i);
            all_scales[i * 256 + tid] = four;
            high = __vmaxu4(high, four);
            low = __vminu4(low, four);
        }
        const int most = max(max(high & 255, high >> 8 & 255), max(high >> 16 & 255, high >> 24));
        const int least = min(min(low & 255, low >> 8 & 255), min(low >> 16 & 255, low >> 24));
        largest[tid] = most;
        if ((most - least) / SPAN > 0) atomicMax(passes_needed, (most - least) / SPAN + 1);
    }
    copies_wait<STAGES - 2>();
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

// x [n, width] codes -> z [pairs in sorted order, inner] codes, z_scale [inner / 128, pairs].
template <int N>
__device__ __forceinline__ void gate_up(const Product& p, u8* shared, const int* order, const float* weights, int first,
                                        int count, int topk, float limit, int inner, u8* z, float* z_scale, int pairs) {
    const int tid = threadIdx.x, group = tid / 128, q = tid % 128 / 32, g = tid % 32 / 4, t = tid % 4;
    const int tile = blockIdx.x * 128;
    float total[2][N / 2];
    int scale[2][2];
    product<N>(
        p, shared,
        [&](int r) { return (r / 8 & 1) * inner + tile + r / 64 * 32 + r % 64 / 16 * 8 + r % 8; },
        [&](int n) { return order[first + min(n, count - 1)] / topk; }, total, scale);
    u32* peaks = (u32*)shared;  // the largest magnitude of every token, as bits
    u8* tile_codes = shared + 1024;  // [N, 128]
    if (tid < N) peaks[tid] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int n = 8 * j + 2 * t + c;
            const float weight = weights[order[first + min(n, count - 1)]];
            float peak = 0.f;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const float a = fminf(total[m][4 * j + c] * power_of_two(scale[m][0]), limit);
                const float b = fminf(fmaxf(total[m][4 * j + 2 + c] * power_of_two(scale[m][1]), -limit), limit);
                const float v = bf16_round(a / (1.f + __expf(-a)) * b * weight);
                total[m][4 * j + c] = v;
                peak = fmaxf(peak, fabsf(v));
            }
#pragma unroll
            for (int s = 4; s < 32; s <<= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, s));
            if (g == 0) atomicMax(peaks + n, __float_as_uint(peak));
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int n = 8 * j + 2 * t + c;
            const u32 bits = __float_as_uint(fmaxf(__uint_as_float(peaks[n]), 1e-4f));
            const int exponent = (int)(bits >> 23) - 135 + ((bits & 0x7FFFFFu) > 0x600000u);
#pragma unroll
            for (int m = 0; m < 2; m++)  // column 32 (2 group + m) + 8 q + g of the 128
                tile_codes[n * 128 + q * 32 + g / 4 * 16 + (2 * group + m) * 4 + g % 4] =
                    e4m3_code(total[m][4 * j + c] * power_of_two(-exponent));
        }
    }
    __syncthreads();
    for (int i = tid; i < count * 8; i += 256)
        *(uint4*)(z + (i64)(first + i / 8) * inner + tile + i % 8 * 16) = *(const uint4*)(tile_codes + i * 16);
    if (tid < count) {
        const u32 bits = __float_as_uint(fmaxf(__uint_as_float(peaks[tid]), 1e-4f));
        const int exponent = (int)(bits >> 23) - 135 + ((bits & 0x7FFFFFu) > 0x600000u);
        z_scale[(i64)blockIdx.x * pairs + first + tid] = power_of_two(exponent);
    }
}

// z codes [pairs in sorted order, inner] -> y [pairs, width] bfloat16, in the order of the pairs.
template <int N>
__device__ __forceinline__ void down(const Product& p, u8* shared, const int* order, int first, int count, int width,
                                     u16* y) {
    const int tid = threadIdx.x, group = tid / 128, q = tid % 128 / 32, g = tid % 32 / 4, t = tid % 4;
    const int tile = blockIdx.x * 256;
    float total[2][N / 2];
    int scale[2][2];
    product<N>(
        p, shared, [&](int r) { return tile + r; }, [&](int n) { return first + min(n, count - 1); }, total, scale);
    u16* rows = (u16*)shared;  // [N, 256], rows 8 columns apart, so that threads of a warp use different banks
    constexpr int PITCH = 264;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                rows[(8 * j + 2 * t + i % 2) * PITCH + (2 * group + m) * 64 + 16 * q + g + i / 2 * 8] =
                    bf16_bits(total[m][4 * j + i] * power_of_two(scale[m][i / 2]));
    __syncthreads();
    for (int i = tid; i < count * 32; i += 256)
        *(uint4*)(y + (i64)order[first + i / 32] * width + tile + i % 32 * 8) =
            *(const uint4*)(rows + i / 32 * PITCH + i % 32 * 8);
}

#define FOR_COUNT(CALL)         \
    if (count <= 32) CALL(32);  \
    else if (count <= 64) CALL(64);  \
    else if (count <= 80) CALL(80);  \
    else if (count <= 96) CALL(96);  \
    else if (count <= 112) CALL(112);  \
    else CALL(128);

extern "C" __global__ void __launch_bounds__(256, 1)
    prompt_gate_up(const u8* x, const float* x_scale, int x_rows, const i64* addresses, const int* blocks,
                   const int* order, const float* weights, u8* z, float* z_scale, int pairs, int inner, int width,
                   int topk, float limit) {
    extern __shared__ __align__(1024) u8 shared[];
    const int expert = blocks[blockIdx.y * 4], first = blocks[blockIdx.y * 4 + 1], count = blocks[blockIdx.y * 4 + 2];
    if (count <= 0) return;
    const Product p{x, x_scale, x_rows, width, (const u8*)addresses[expert * 4], (const u8*)addresses[expert * 4 + 1]};
#define CALL(N) gate_up<N>(p, shared, order, weights, first, count, topk, limit, inner, z, z_scale, pairs)
    FOR_COUNT(CALL)
#undef CALL
}

extern "C" __global__ void __launch_bounds__(256, 1)
    prompt_down(const u8* z, const float* z_scale, int pairs, const i64* addresses, const int* blocks, const int* order,
                u16* y, int inner, int width) {
    extern __shared__ __align__(1024) u8 shared[];
    const int expert = blocks[blockIdx.y * 4], first = blocks[blockIdx.y * 4 + 1], count = blocks[blockIdx.y * 4 + 2];
    if (count <= 0) return;
    const Product p{z, z_scale, pairs, inner, (const u8*)addresses[expert * 4 + 2], (const u8*)addresses[expert * 4 + 3]};
#define CALL(N) down<N>(p, shared, order, first, count, width, y)
    FOR_COUNT(CALL)
#undef CALL
}
