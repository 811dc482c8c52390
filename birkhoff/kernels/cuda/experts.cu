// Routed experts: FP4 weights read through a table of addresses, some of which may be in host memory. The Triton twin
// is experts/decode.py.

#include "gemv.cuh"

// Rows in host memory are staged through shared memory: sixteen lanes request 256 contiguous bytes of a row, so that
// whole lines cross the bus. Direct loads (every lane loads what it multiplies) would request 64 bytes of each of eight
// rows.
__device__ __forceinline__ void fetch_rows(uint4* into, const u8* codes, int row_bytes, int lane) {
    const u32 address_of = (u32)__cvta_generic_to_shared(into);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = 2 * i + (lane >> 4), at = lane & 15;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address_of + (row * 16 + (at ^ (row & 7))) * 16),
                     "l"(codes + (i64)row * row_bytes + at * 16));
    }
}

__device__ __forceinline__ void wait_for_fetch() {
    asm volatile("cp.async.commit_group;" :::);
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
}

// FP4 tile of RT * 16 rows; the sixteen bytes of a lane are one group of 32 codes with one scale. K advances in steps
// of 512, each loaded in two halves.
template <int RT>
struct HalfStep {
    uint4 w[RT][2][2];
    uint2 s[RT][2];
};

template <int RT>
__device__ __forceinline__ void load_half(HalfStep<RT>& half, const u8* const (&codes)[RT],
                                          const u8* const (&scale)[RT], int inner, int kb, int side) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const i64 row = g + 8 * h;
            half.s[r][h] = load_once8(scale[r] + row * (inner >> 5) + kb * 16 + side * 8);
#pragma unroll
            for (int c = 0; c < 2; c++)
                half.w[r][h][c] = load_once16(codes[r] + row * (inner >> 1) + kb * 256 + side * 128 + c * 64 + q * 16);
        }
}

// A 32-bit word of codes unpacks to the pairs (0,2) (4,6) (1,3) (5,7); the inputs are stored in that order.
template <int RT>
__device__ __forceinline__ void multiply_half(float (&acc)[RT][1][4], const HalfStep<RT>& half, const u16* x,
                                              bool valid, int offset, int kb, int side) {
    const int q = threadIdx.x & 3;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        u32 factor[RT][2];
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 two = __byte_perm(c ? half.s[r][h].y : half.s[r][h].x, 0, 0x4040 | q << 8 | q);
                factor[r][h] = (two << 10) + 0x10001u * (offset << 10);  // two float16 powers of two
            }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 b = load_input16(x + kb * 512 + side * 256 + c * 128 + q * 32 + i * 8, valid);
#pragma unroll
            for (int r = 0; r < RT; r++) {
                uint2 even[2], odd[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 v = word(half.w[r][h][c], i);
                    even[h] = e4m3x4_to_f16x4(((v << 4) & 0x80808080u) | ((v << 2) & 0x1c1c1c1cu));
                    odd[h] = e4m3x4_to_f16x4((v & 0x80808080u) | ((v >> 2) & 0x1c1c1c1cu));
                }
                const u32 low = factor[r][0], high = factor[r][1];
                mma<false>(acc[r][0], mul_f16x2(even[0].x, low), mul_f16x2(even[1].x, high),
                           mul_f16x2(even[0].y, low), mul_f16x2(even[1].y, high), b.x, b.y);
                mma<false>(acc[r][0], mul_f16x2(odd[0].x, low), mul_f16x2(odd[1].x, high), mul_f16x2(odd[0].y, low),
                           mul_f16x2(odd[1].y, high), b.z, b.w);
            }
        }
    }
}

// PIPE: load a half while the previous one is multiplied; otherwise load both at once, which takes fewer registers.
// WAIT: wait for the preceding grid after the first weights are requested.
template <int RT, int WARPS, bool PIPE, bool WAIT>
__device__ __forceinline__ void gemm_fp4(float (&acc)[RT][1][4], const u8* const (&codes)[RT],
                                         const u8* const (&scale)[RT], const u16* x, bool valid, int inner,
                                         int offset) {
    const int warp = threadIdx.x >> 5, steps = inner >> 9;
    HalfStep<RT> left, right;
    if (PIPE && warp < steps) load_half(left, codes, scale, inner, warp, 0);
    for (int kb = warp; kb < steps; kb += WARPS) {
        if (!PIPE) load_half(left, codes, scale, inner, kb, 0);
        load_half(right, codes, scale, inner, kb, 1);
        if (WAIT && kb == warp) grid_dependency_wait();
        multiply_half(acc, left, x, valid, offset, kb, 0);
        if (PIPE && kb + WARPS < steps) load_half(left, codes, scale, inner, kb + WARPS, 0);
        multiply_half(acc, right, x, valid, offset, kb, 1);
    }
    if (WAIT) grid_dependency_wait();
}

// `gemm_fp4` for rows in host memory, staged in `staging` (RT * 256 uint4 per warp); scales are in `staged_scales`.
template <int RT, int WARPS>
__device__ __forceinline__ void gemm_fp4_host(float (&acc)[RT][1][4], const u8* const (&codes)[RT], const u16* x,
                                              bool valid, int inner, int offset, uint4* staging,
                                              const uint4* staged_scales) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    for (int kb = warp; kb < inner >> 9; kb += WARPS) {
        __syncwarp();
#pragma unroll
        for (int r = 0; r < RT; r++) fetch_rows(staging + (warp * RT + r) * 256, codes[r] + kb * 256, inner >> 1, lane);
        wait_for_fetch();
#pragma unroll
        for (int side = 0; side < 2; side++) {
            HalfStep<RT> half;
#pragma unroll
            for (int r = 0; r < RT; r++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = g + 8 * h;
                    const uint4 s = staged_scales[(r * 16 + row) * (inner >> 9) + kb];
                    half.s[r][h] = side ? make_uint2(s.z, s.w) : make_uint2(s.x, s.y);
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        half.w[r][h][c] =
                            staging[(warp * RT + r) * 256 + row * 16 + ((side * 8 + c * 4 + q) ^ (row & 7))];
                }
            multiply_half(acc, half, x, valid, offset, kb, side);
        }
    }
}

constexpr int HOST_SCALES = 256;  // uint4 of scales of sixteen rows, for up to 8,192 inputs

// Stage the scales of RT * 16 rows in host memory at once; the scales of sixteen rows are contiguous.
template <int RT, int WARPS>
__device__ __forceinline__ void fetch_scales(uint4* staged_scales, const u8* const (&scale)[RT], int scale_bytes) {
#pragma unroll
    for (int r = 0; r < RT; r++)
        for (int i = threadIdx.x; i < scale_bytes; i += WARPS * 32)
            staged_scales[r * scale_bytes + i] = load_once16(scale[r] + i * 16);
    __syncthreads();
}

// Gate and up of the routed experts, clamped SwiGLU, times the routing weight. blockIdx.y is a slot of the routing
// plan, blockIdx.x sixteen rows of gate and of up. With HOST, experts at addresses from `host_begin` to `host_end` are
// in host memory. Dependents are launched only after the plan is complete, so that they may read it before they wait.
template <int WARPS, bool HOST, bool PIPE>
__device__ __forceinline__ void experts_gate_up(const ExpertSlot* slots, const int* order, const float* weights,
                                                const u16* x, u16* z, int inner, int width, int topk, float limit,
                                                int offset, float gain, i64 host_begin, i64 host_end) {
    __shared__ float shared[WARPS * 2 * 16 * 8];
    __shared__ uint4 staging[HOST ? WARPS * 2 * 256 : 1], staged_scales[HOST ? 2 * HOST_SCALES : 1];
    grid_dependency_wait();
    launch_dependents();
    const ExpertSlot* slot = slots + blockIdx.y;
    const int4 header = __ldcg(reinterpret_cast<const int4*>(slot));
    const int first = header.y;
    const int g = (threadIdx.x & 31) >> 2, row = blockIdx.x * 16;
    const longlong2 address_of = __ldcg(reinterpret_cast<const longlong2*>(slot->address));
    const int count = address_of.x ? header.z : 0;  // experts without an address are computed elsewhere
    const u8* codes = reinterpret_cast<const u8*>(address_of.x) + (i64)row * (width >> 1);
    const u8* scale = reinterpret_cast<const u8*>(address_of.y) + (i64)row * (width >> 5);
    const u8* const c[2] = {codes, codes + (i64)inner * (width >> 1)};
    const u8* const s[2] = {scale, scale + (i64)inner * (width >> 5)};
    const bool in_host = HOST && address_of.x >= host_begin && address_of.x < host_end;
    if (in_host && count) fetch_scales<2, WARPS>(staged_scales, s, width >> 5);
    for (int base = 0; base < count; base += 8) {
        const bool valid = base + g < count;
        const int token = valid ? __ldcg(order + first + base + g) / topk : 0;
        float acc[2][1][4] = {};
        if (in_host)
            gemm_fp4_host<2, WARPS>(acc, c, x + (i64)token * width, valid, width, offset, staging, staged_scales);
        else gemm_fp4<2, WARPS, PIPE, false>(acc, c, s, x + (i64)token * width, valid, width, offset);
        if (base) __syncthreads();
        store_partials<1, 2, WARPS>(shared, acc);
        for (int i = threadIdx.x; i < 128; i += WARPS * 32) {
            const int r = i & 15, t = i >> 4;
            if (base + t < count) {
                const int pair_index = __ldcg(order + first + base + t);
                const float a = sum_partials<WARPS>(shared, r * 8 + t, 256) * gain;
                const float b = sum_partials<WARPS>(shared, 128 + r * 8 + t, 256) * gain;
                const int at =
                    row + (r & 8) + ((r & 7) >> 1) + 4 * (r & 1);  // the order in which codes of `down` unpack
                store_as(z + (i64)pair_index * inner + at, swiglu(a, b, limit) * __ldcg(weights + pair_index));
            }
        }
    }
}

// Down projection: slots as above, RT * 16 rows per block; the blocks after the last slot compute the shared expert's
// down, up to eight tokens each. Its weights are FP8 or Q8_0.
template <int WARPS, int RT, bool HOST, bool PIPE, bool Q8>
__device__ __forceinline__ void experts_down(const ExpertSlot* slots, int slot_count, const int* order, const u16* z,
                                             float* y, int inner, int width, int topk, int offset, float gain,
                                             const u8* codes, const u8* scale, const u16* z_shared, int n,
                                             i64 host_begin, i64 host_end) {
    __shared__ float shared[WARPS * RT * 16 * 8];
    __shared__ uint4 staging[HOST ? WARPS * RT * 256 : 1], staged_scales[HOST ? RT * HOST_SCALES : 1];
    launch_dependents();
    const int g = (threadIdx.x & 31) >> 2, row = blockIdx.x * 16 * RT;
    const u8 *c[RT], *s[RT];
    float acc[RT][1][4] = {};
    if (blockIdx.y >= slot_count) {
        const int first = (blockIdx.y - slot_count) * 8;
        const u16* const x[1] = {z_shared + (i64)(first + g) * inner};
        const bool valid[1] = {first + g < n};
#pragma unroll
        for (int r = 0; r < RT; r++) {
            c[r] = codes + (i64)(row + 16 * r) * (Q8 ? q8_row_bytes(inner) : inner);
            s[r] = scale + row + 16 * r;
        }
        constexpr int U = WARPS == 1 ? 4 : 2;
        if (Q8) gemm_q8<1, RT, WARPS, U>(acc, c, x, valid, inner);
        else gemm_fp8<1, RT, WARPS, U>(acc, c, s, width, x, valid, inner);
        store_partials<1, RT, WARPS>(shared, acc);
        for (int i = threadIdx.x; i < RT * 128; i += WARPS * 32) {
            const int r = i & (16 * RT - 1), t = i / (16 * RT);
            if (first + t < n)
                y[((i64)(first + t) * (topk + 1) + topk) * width + row + r] =
                    sum_partials<WARPS>(shared, r * 8 + t, RT * 128);
        }
        return;
    }
    const ExpertSlot* slot = slots + blockIdx.y;  // complete before `experts_gate_up` launched this kernel
    const int4 header = __ldcg(reinterpret_cast<const int4*>(slot));
    const int first = header.y;
    const longlong2 address_of = __ldcg(reinterpret_cast<const longlong2*>(slot->address) + 1);
    const int count = address_of.x ? header.z : 0;
#pragma unroll
    for (int r = 0; r < RT; r++) {
        c[r] = reinterpret_cast<const u8*>(address_of.x) + (i64)(row + 16 * r) * (inner >> 1);
        s[r] = reinterpret_cast<const u8*>(address_of.y) + (i64)(row + 16 * r) * (inner >> 5);
    }
    const bool in_host = HOST && address_of.x >= host_begin && address_of.x < host_end;
    if (in_host && count) fetch_scales<RT, WARPS>(staged_scales, s, inner >> 5);
    if (in_host || !count) grid_dependency_wait();
    for (int base = 0; base < count; base += 8) {
        const bool valid = base + g < count;
        const int pair_index = valid ? __ldcg(order + first + base + g) : 0;
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[r][0][i] = 0.f;
        if (in_host)
            gemm_fp4_host<RT, WARPS>(acc, c, z + (i64)pair_index * inner, valid, inner, offset, staging, staged_scales);
        else gemm_fp4<RT, WARPS, PIPE, true>(acc, c, s, z + (i64)pair_index * inner, valid, inner, offset);
        if (base) __syncthreads();
        store_partials<1, RT, WARPS>(shared, acc);
        for (int i = threadIdx.x; i < RT * 128; i += WARPS * 32) {
            const int r = i & (16 * RT - 1), t = i / (16 * RT);
            if (base + t < count) {
                const int p = __ldcg(order + first + base + t);
                y[((i64)(p / topk) * (topk + 1) + p % topk) * width + row + r] =
                    sum_partials<WARPS>(shared, r * 8 + t, RT * 128) * gain;
            }
        }
    }
}

#define GATE_UP(NAME, WARPS, HOST, PIPE, BLOCKS)                                                                 \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                             \
        NAME(const ExpertSlot* slots, const int* order, const float* weights, const u16* x, u16* z, int inner,   \
             int width, int topk, float limit, int offset, float gain, i64 host_begin, i64 host_end) {           \
        experts_gate_up<WARPS, HOST, PIPE>(slots, order, weights, x, z, inner, width, topk, limit, offset, gain, \
                                           host_begin, host_end);                                                \
    }
#define DOWN(NAME, WARPS, RT, HOST, PIPE, Q8, BLOCKS)                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                                  \
        NAME(const ExpertSlot* slots, int slot_count, const int* order, const u16* z, float* y, int inner, int width, \
             int topk, int offset, float gain, const u8* codes, const u8* scale, const u16* z_shared, int n,          \
             i64 host_begin, i64 host_end) {                                                                          \
        experts_down<WARPS, RT, HOST, PIPE, Q8>(slots, slot_count, order, z, y, inner, width, topk, offset, gain,     \
                                                codes, scale, z_shared, n, host_begin, host_end);                     \
    }
// The last argument is the minimum of resident blocks per SM: all blocks of a single-token launch fit an H200 at once.
GATE_UP(experts_gate_up_2, 2, false, true, 6)
GATE_UP(experts_gate_up_4, 4, false, false, 4)
GATE_UP(experts_gate_up_2_many, 2, false, false, 8)
GATE_UP(experts_gate_up_2_host, 2, true, true, 6)
GATE_UP(experts_gate_up_4_host, 4, true, false, 4)
DOWN(experts_down_1_1, 1, 1, false, true, false, 14)
DOWN(experts_down_4_1, 4, 1, false, false, false, 5)
DOWN(experts_down_2_2, 2, 2, false, false, false, 7)
DOWN(experts_down_1_1_host, 1, 1, true, true, false, 14)
DOWN(experts_down_4_1_host, 4, 1, true, false, false, 5)
DOWN(experts_down_2_2_host, 2, 2, true, false, false, 6)
DOWN(experts_down_1_1_q8, 1, 1, false, true, true, 14)
DOWN(experts_down_4_1_q8, 4, 1, false, false, true, 5)
DOWN(experts_down_2_2_q8, 2, 2, false, false, true, 6)
