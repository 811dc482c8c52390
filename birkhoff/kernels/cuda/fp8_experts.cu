// Routed experts in FP8 for a decode step: E4M3 codes with an E8M0 scale per tile of 128 x 128. The Triton twin is
// experts/block_types.py.

#include "gemv.cuh"

constexpr int WARPS = 4;

// Sixteen rows of RT matrices of an expert, `apart` rows from each other, times up to eight tokens; sums into `shared`.
template <int RT>
__device__ __forceinline__ void multiply_fp8(float* shared, const u8* codes, const u8* scale, int row, int apart,
                                             const u16* x, bool valid, int inner) {
    const u8 *c[RT], *s[RT];
#pragma unroll
    for (int r = 0; r < RT; r++) {
        const i64 first = row + (i64)r * apart;
        c[r] = codes + first * inner;
        s[r] = scale + (first >> 7) * (inner >> 7);
    }
    const u16* const from[1] = {x};
    const bool present[1] = {valid};
    float acc[RT][1][4] = {};
    gemm_fp8<1, RT, WARPS, 2>(acc, c, s, 1, from, present, inner);
    store_partials<1, RT, WARPS>(shared, acc);
}

// As `experts_gate_up` of experts.cu; inputs and results are in the order of the columns.
__device__ __forceinline__ void gate_up_fp8(const ExpertSlot* slots, const int* order, const float* weights,
                                            const u16* x, u16* z, int inner, int width, int topk, float limit) {
    __shared__ float shared[WARPS * 2 * 16 * 8];
    grid_dependency_wait();
    launch_dependents();
    const ExpertSlot* slot = slots + blockIdx.y;
    const int4 header = __ldcg(reinterpret_cast<const int4*>(slot));
    const longlong2 address_of = __ldcg(reinterpret_cast<const longlong2*>(slot->address));
    const int g = (threadIdx.x & 31) >> 2, row = blockIdx.x * 16, first = header.y;
    const int count = address_of.x ? header.z : 0;  // experts without an address are computed elsewhere
    for (int base = 0; base < count; base += 8) {
        const bool valid = base + g < count;
        const int token = valid ? __ldcg(order + first + base + g) / topk : 0;
        if (base) __syncthreads();
        multiply_fp8<2>(shared, reinterpret_cast<const u8*>(address_of.x), reinterpret_cast<const u8*>(address_of.y), row,
                        inner, x + (i64)token * width, valid, width);
        for (int i = threadIdx.x; i < 128; i += WARPS * 32) {
            const int r = i & 15, t = i >> 4;
            if (base + t < count) {
                const int pair = __ldcg(order + first + base + t);
                const float a = sum_partials<WARPS>(shared, r * 8 + t, 256);
                const float b = sum_partials<WARPS>(shared, 128 + r * 8 + t, 256);
                store_as(z + (i64)pair * inner + row + r, swiglu(a, b, limit) * __ldcg(weights + pair));
            }
        }
    }
}

// As `experts_down` of experts.cu, without the shared expert.
__device__ __forceinline__ void down_fp8(const ExpertSlot* slots, const int* order, const u16* z, float* y, int inner,
                                         int width, int topk) {
    __shared__ float shared[WARPS * 16 * 8];
    launch_dependents();
    const ExpertSlot* slot = slots + blockIdx.y;  // complete before `gate_up_fp8` launched this kernel
    const int4 header = __ldcg(reinterpret_cast<const int4*>(slot));
    const longlong2 address_of = __ldcg(reinterpret_cast<const longlong2*>(slot->address) + 1);
    const int g = (threadIdx.x & 31) >> 2, row = blockIdx.x * 16, first = header.y;
    const int count = address_of.x ? header.z : 0;
    if (!count) grid_dependency_wait();
    for (int base = 0; base < count; base += 8) {
        const bool valid = base + g < count;
        const int pair = valid ? __ldcg(order + first + base + g) : 0;
        if (base) __syncthreads();
        multiply_fp8<1>(shared, reinterpret_cast<const u8*>(address_of.x), reinterpret_cast<const u8*>(address_of.y), row,
                        0, z + (i64)pair * inner, valid, inner);
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

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    gate_up(const ExpertSlot* slots, const int* order, const float* weights, const u16* x, u16* z, int inner, int width,
            int topk, float limit) {
    gate_up_fp8(slots, order, weights, x, z, inner, width, topk, limit);
}
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    down(const ExpertSlot* slots, const int* order, const u16* z, float* y, int inner, int width, int topk) {
    down_fp8(slots, order, z, y, inner, width, topk);
}
