// FP4 experts of a decode step of several tokens on Hopper's FP8 tensor cores. A code becomes an E4M3 code by moving its
// bits; its scale multiplies the sum of 32 products. experts.cu converts to float16 and multiplies by the scale. Inputs
// are four digits (digits.cuh), which are four columns of operand B. The Triton twin is experts/decode.py.

#include "gemv.cuh"
#include "wgmma.cuh"
#include "prompt_common.cuh"
#include "digits.cuh"

extern __shared__ __align__(1024) u8 memory[];

constexpr int THREADS = 128, ROWS = 64, STAGES = 4;  // three thread blocks per multiprocessor
constexpr int STEP = 256;  // columns: 128 bytes of codes and 8 scales per row, 1024 bytes of digits per token
constexpr int CODES = ROWS * 128, SCALES = ROWS * 8, INPUTS = 4 * 1024;
constexpr int STAGE = CODES + INPUTS + SCALES;

__device__ __forceinline__ void copy_or_zero16(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ uint4 load_matrices(const u8* row) {  // four of 8 by 16 bytes; lane i has the address of row i
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared_address(row)));
    return v;
}
template <int PENDING, int COUNT>
__device__ __forceinline__ void wait_for_products(float (&d)[4][COUNT]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[j][i])::"memory");
}

// 64 rows of FP4 with the digits of up to N / 4 tokens: sums by digit. `codes` and `scale` point to the row of lane % 16
// of this warp's sixteen; token t's digits are `inputs[t]`, null beyond the last one.
template <int N, bool WAIT>
__device__ __forceinline__ void multiply_digits(float (&acc)[N / 2], const u8* codes, i64 row_bytes, const u8* scale,
                                                i64 scale_bytes, const u8* const (&inputs)[N / 4], int steps) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, row = lane & 15;
    // What this thread copies, as addresses of the first step: four rows of codes, scales, and a chunk per two tokens.
    const u8* from_rows = codes + (lane >> 3) * row_bytes + (lane & 7) * 16;
    const i64 four_rows = 4 * row_bytes;
    const u8* from_scales = scale + (lane & 15) * scale_bytes;
    const u32 into_rows = shared_address(memory) + warp * 2048 + (lane >> 3) * 128 + ((lane & 7) ^ (lane >> 3)) * 16;
    const int other = (((lane & 7) ^ (lane >> 3) ^ 4) - ((lane & 7) ^ (lane >> 3))) * 16;  // of rows 4 .. 7 and 12 .. 15
    const u32 into_scales = shared_address(memory) + CODES + INPUTS + (warp * 16 + (lane & 15)) * 8;
    const int chunk = threadIdx.x & 63;
    const u32 into_inputs = shared_address(memory) + CODES + (chunk >> 2) * N * 16 + ((threadIdx.x >> 6) * 4 + (chunk & 3)) * 16;
    const u8* from_inputs[N / 8];
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        const u8* of_token = threadIdx.x < 64 ? inputs[2 * i] : inputs[2 * i + 1];
        from_inputs[i] = of_token ? of_token + chunk * 16 : nullptr;
    }
    auto copy_weights = [&](int slot) {
        copy16_of_line(into_rows + slot * STAGE, from_rows);
        copy16_of_line(into_rows + slot * STAGE + 512 + other, from_rows + four_rows);
        copy16_of_line(into_rows + slot * STAGE + 1024, from_rows + 2 * four_rows);
        copy16_of_line(into_rows + slot * STAGE + 1536 + other, from_rows + 3 * four_rows);
        if (lane < 16) copy8(into_scales + slot * STAGE, from_scales);
        from_rows += 128;
        from_scales += 8;
    };
    auto copy_inputs = [&](int slot) {
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            copy_or_zero16(into_inputs + slot * STAGE + i * 128, from_inputs[i] ? from_inputs[i] : codes,
                           from_inputs[i] != nullptr);
            if (from_inputs[i]) from_inputs[i] += 1024;
        }
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) copy_weights(s);
    copies_commit();
    if (WAIT) grid_dependency_wait();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        copy_inputs(s);
        copies_commit();
    }
    const u8* const rows = memory + warp * 2048 + row * 128;
    const uint2* const scales = reinterpret_cast<const uint2*>(memory + CODES + INPUTS) + warp * 16 + g;
    const int swizzle = row & 7, upper = lane >> 4;
    const u64 b = plain_descriptor<N>(shared_address(memory + CODES));
    for (int at = 0; at < steps; at += STAGES)
#pragma unroll
        for (int slot = 0; slot < STAGES; slot++) {
            copies_wait<STAGES - 2>();
            fence_async_proxy();
            __syncthreads();  // copies of all threads have arrived, and none reads the slot of the previous step
            if (at + slot + STAGES - 1 < steps) {
                copy_weights((slot + STAGES - 1) % STAGES);
                copy_inputs((slot + STAGES - 1) % STAGES);
            }
            copies_commit();
            const uint2 low = scales[slot * STAGE / 8], high = scales[slot * STAGE / 8 + 8];
            float d[2][4][N / 2];
            u32 a[2][4][4];
#pragma unroll
            for (int batch = 0; batch < 2; batch++) {
#pragma unroll
                for (int pair = 0; pair < 2; pair++) {
                    const uint4 v = load_matrices(rows + slot * STAGE + ((batch * 4 + pair * 2 + upper) ^ swizzle) * 16);
#pragma unroll
                    for (int i = 0; i < 4; i++) {  // rows g and g + 8 of the first group, then of the second
                        const u32 codes8 = word(v, i);
                        u32(&into)[4] = a[batch][pair * 2 + (i >> 1)];
                        into[i & 1] = ((codes8 << 4) & 0x80808080u) | ((codes8 << 2) & 0x1c1c1c1cu);
                        into[2 + (i & 1)] = (codes8 & 0x80808080u) | ((codes8 >> 2) & 0x1c1c1c1cu);
                    }
                }
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    wgmma_e4m3<N>(d[batch][j], a[batch][j], b + (slot * STAGE + (batch * 4 + j) * 32 * N) / 16, 0);
                wgmma_commit();
            }
#pragma unroll
            for (int batch = 0; batch < 2; batch++) {
                if (batch) wait_for_products<0>(d[1]);
                else wait_for_products<1>(d[0]);
                const u32 four = batch ? low.y : low.x, four_below = batch ? high.y : high.x;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const u32 s = j == 3 ? four >> 1 : four << (23 - 8 * j);
                    const u32 s_below = j == 3 ? four_below >> 1 : four_below << (23 - 8 * j);
                    const float factor = __uint_as_float(s & 0x7f800000u), below = __uint_as_float(s_below & 0x7f800000u);
#pragma unroll
                    for (int i = 0; i < N / 2; i++) acc[i] += (i & 2 ? below : factor) * d[batch][j][i];
                }
            }
        }
    copies_wait<0>();
    __syncthreads();
}

// Sums over digits to `sums`: [token][64 rows].
template <int N>
__device__ __forceinline__ void add_digits(float* sums, const float (&acc)[N / 2]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    const float part = q & 1 ? 1.f / 1024 : 1.f;
#pragma unroll
    for (int i = 0; i < N / 2; i += 2) {  // two digits of one row and token
        const float two = (acc[i] + acc[i + 1] * (1.f / 32)) * part;
        const float all = two + __shfl_xor_sync(~0u, two, 1);
        if (!(q & 1)) sums[(i / 4 * 2 + (q >> 1)) * ROWS + warp * 16 + g + (i & 2) * 4] = all;
    }
    __syncthreads();
}

// Gate and up: 32 rows of each per thread block, then clamped SwiGLU times the routing weight, as digits.
template <int N>
__device__ __forceinline__ void gate_up_tokens(const int4& header, const longlong2& address_of, int base, int count,
                                               const int* order, const float* weights, const u8* x, u8* z, int inner,
                                               int width, int topk, float limit, float gain, float z_gain) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.x * 32;
    const int first = row + (warp & 1) * 16 + (warp < 2 ? 0 : inner);
    const u8* inputs[N / 4];
#pragma unroll
    for (int t = 0; t < N / 4; t++)
        inputs[t] = base + t < count ? x + (i64)(__ldcg(order + header.y + base + t) / topk) * width * 4 : nullptr;
    float acc[N / 2] = {};
    multiply_digits<N, false>(acc, reinterpret_cast<const u8*>(address_of.x) + (i64)first * (width >> 1), width >> 1,
                              reinterpret_cast<const u8*>(address_of.y) + (i64)first * (width >> 5), width >> 5, inputs,
                              width / STEP);
    float* sums = reinterpret_cast<float*>(memory);
    add_digits<N>(sums, acc);
    for (int t = warp; t < N / 4 && base + t < count; t += 4) {
        const int pair_index = __ldcg(order + header.y + base + t);
        const float a = sums[t * ROWS + lane] * gain, b = sums[t * ROWS + 32 + lane] * gain;
        store_digits(z + (i64)pair_index * inner * 4 + blockIdx.x * 128,
                     swiglu(a, b, limit) * __ldcg(weights + pair_index) * z_gain);
    }
    __syncthreads();
}

template <int N>
__device__ __forceinline__ void down_tokens(const int4& header, const longlong2& address_of, int base, int count,
                                            const int* order, const u8* z, float* y, int inner, int width, int topk,
                                            float gain) {
    const int warp = threadIdx.x >> 5, row = blockIdx.x * ROWS, first = row + warp * 16;
    const u8* inputs[N / 4];
#pragma unroll
    for (int t = 0; t < N / 4; t++)
        inputs[t] = base + t < count ? z + (i64)__ldcg(order + header.y + base + t) * inner * 4 : nullptr;
    float acc[N / 2] = {};
    multiply_digits<N, true>(acc, reinterpret_cast<const u8*>(address_of.x) + (i64)first * (inner >> 1), inner >> 1,
                             reinterpret_cast<const u8*>(address_of.y) + (i64)first * (inner >> 5), inner >> 5, inputs,
                             inner / STEP);
    float* sums = reinterpret_cast<float*>(memory);
    add_digits<N>(sums, acc);
    for (int i = threadIdx.x; i < ROWS * (N / 4); i += THREADS) {
        const int r = i % ROWS, t = i / ROWS;
        if (base + t < count) {
            const int p = __ldcg(order + header.y + base + t);
            y[((i64)(p / topk) * (topk + 1) + p % topk) * width + row + r] = sums[t * ROWS + r] * gain;
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void gate_up(const ExpertSlot* slots, const int* order, const float* weights, const u8* x,
                                        u8* z, int inner, int width, int topk, float limit, float gain, float z_gain) {
    grid_dependency_wait();
    launch_dependents();
    const ExpertSlot* slot = slots + blockIdx.y;
    const int4 header = __ldcg(reinterpret_cast<const int4*>(slot));
    const longlong2 address_of = __ldcg(reinterpret_cast<const longlong2*>(slot->address));
    const int count = address_of.x ? header.z : 0;
    for (int base = 0; base < count;) {
        const bool two = count - base <= 2;
        if (two) gate_up_tokens<8>(header, address_of, base, count, order, weights, x, z, inner, width, topk, limit, gain, z_gain);
        else gate_up_tokens<16>(header, address_of, base, count, order, weights, x, z, inner, width, topk, limit, gain, z_gain);
        base += two ? 2 : 4;
    }
}

// The shared expert's down, FP8 or Q8_ROWS: 64 rows and up to eight tokens per thread block.
template <bool Q8>
__device__ __forceinline__ void shared_down(const u8* codes, const u8* scale, const u16* z, float* y, int inner, int width,
                                            int topk, int first, int n) {
    float* sums = reinterpret_cast<float*>(memory);
    const int g = (threadIdx.x & 31) >> 2;
    const u16* const x[1] = {z + (i64)(first + g) * inner};
    const bool valid[1] = {first + g < n};
    for (int row = blockIdx.x * ROWS; row < blockIdx.x * ROWS + ROWS; row += 16) {
        const u8* const c[1] = {codes + (i64)row * (Q8 ? q8_row_bytes(inner) : inner)};
        const u8* const s[1] = {scale + row};
        float acc[1][1][4] = {};
        if (Q8) gemm_q8<1, 1, 4, 2>(acc, c, x, valid, inner);
        else gemm_fp8<1, 1, 4, 2>(acc, c, s, width, x, valid, inner);
        store_partials<1, 1, 4>(sums, acc);
        const int r = threadIdx.x & 15, t = threadIdx.x >> 4;
        if (first + t < n)
            y[((i64)(first + t) * (topk + 1) + topk) * width + row + r] = sum_partials<4>(sums, r * 8 + t, 128);
        __syncthreads();
    }
}

// Down of the routed experts. The first thread blocks compute that of the shared expert: its weights are read from L2 for
// every eight tokens, which would be waited for at the end.
template <bool Q8>
__device__ __forceinline__ void down(const ExpertSlot* slots, int slot_count, const int* order, const u8* z, float* y,
                                     int inner, int width, int topk, float gain, const u8* codes, const u8* scale,
                                     const u16* z_shared, int n) {
    launch_dependents();
    const int index = (int)blockIdx.y - ((int)gridDim.y - slot_count);
    if (index < 0) {
        shared_down<Q8>(codes, scale, z_shared, y, inner, width, topk, blockIdx.y * 8, n);
        return;
    }
    const ExpertSlot* slot = slots + index;  // complete before `gate_up` launched this kernel
    const int4 header = __ldcg(reinterpret_cast<const int4*>(slot));
    const longlong2 address_of = __ldcg(reinterpret_cast<const longlong2*>(slot->address) + 1);
    const int count = address_of.x ? header.z : 0;
    if (!count) grid_dependency_wait();
    for (int base = 0; base < count;) {
        const bool two = count - base <= 2;
        if (two) down_tokens<8>(header, address_of, base, count, order, z, y, inner, width, topk, gain);
        else down_tokens<16>(header, address_of, base, count, order, z, y, inner, width, topk, gain);
        base += two ? 2 : 4;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    digits_gate_up(const ExpertSlot* slots, const int* order, const float* weights, const u8* x, u8* z, int inner,
                   int width, int topk, float limit, float gain, float z_gain) {
    gate_up(slots, order, weights, x, z, inner, width, topk, limit, gain, z_gain);
}
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    digits_down(const ExpertSlot* slots, int slot_count, const int* order, const u8* z, float* y, int inner, int width,
                int topk, float gain, const u8* codes, const u8* scale, const u16* z_shared, int n) {
    down<false>(slots, slot_count, order, z, y, inner, width, topk, gain, codes, scale, z_shared, n);
}
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    digits_down_q8(const ExpertSlot* slots, int slot_count, const int* order, const u8* z, float* y, int inner, int width,
                   int topk, float gain, const u8* codes, const u8* scale, const u16* z_shared, int n) {
    down<true>(slots, slot_count, order, z, y, inner, width, topk, gain, codes, scale, z_shared, n);
}
