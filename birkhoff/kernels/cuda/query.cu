// The query projection of a single token, which also computes its input: the RMS norm of the query latent.

#include "gemv.cuh"

// Rows of one or two FP8 matrices of 1024 columns times the norm of `raw` with `weight`, rounded to bfloat16 before and
// after. `raw` was complete before the preceding launch (norms, rotation, cache writes) started: this one runs beside it
// and waits for it at its end, so that its own dependents find those writes.
template <typename OUT>
__device__ __forceinline__ void project_query(const u8* codes, const u8* scale, int rows, const u8* codes2,
                                              const u8* scale2, int rows2, const float* raw, const float* weight,
                                              float eps, OUT* out) {
    constexpr int INNER = 1024;
    __shared__ __align__(16) u16 x[INNER];
    __shared__ float squares[8], shared[8 * 16];
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5, g = lane >> 2, q = lane & 3;
    launch_dependents();
    uint4 w[2][2];
    int row = blockIdx.x * 16;
    const bool second = row >= rows;
    if (second) row -= rows;
    const u8* own = (second ? codes2 : codes) + (i64)(row + g) * INNER + warp * 128 + q * 16;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        w[c][0] = load_once16(own + c * 64);
        w[c][1] = load_once16(own + 8 * INNER + c * 64);
    }
    const float s = __uint_as_float((u32)(second ? scale2 : scale)[(i64)warp * (second ? rows2 : rows) + row] << 23);
    const float4 v = __ldcg(reinterpret_cast<const float4*>(raw) + t);
    const float4 by = reinterpret_cast<const float4*>(weight)[t];
    const float u[4] = {round_to_bf16(v.x), round_to_bf16(v.y), round_to_bf16(v.z), round_to_bf16(v.w)};
    const float square = warp_sum(u[0] * u[0] + u[1] * u[1] + u[2] * u[2] + u[3] * u[3]);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += squares[i];
    const float rho = 1.f / sqrtf(sum / INNER + eps);
    store_f16(x + 4 * t, round_to_bf16(u[0] * rho * by.x));
    store_f16(x + 4 * t + 1, round_to_bf16(u[1] * rho * by.y));
    store_f16(x + 4 * t + 2, round_to_bf16(u[2] * rho * by.z));
    store_f16(x + 4 * t + 3, round_to_bf16(u[3] * rho * by.w));
    __syncthreads();
    float part[4] = {};
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const uint4 b[2] = {*reinterpret_cast<const uint4*>(x + warp * 128 + c * 64 + q * 16),
                            *reinterpret_cast<const uint4*>(x + warp * 128 + c * 64 + q * 16 + 8)};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint2 a = e4m3x4_to_f16x4(word(w[c][0], i)), below = e4m3x4_to_f16x4(word(w[c][1], i));
            mma<false>(part, a.x, below.x, a.y, below.y, word(b[i >> 1], 2 * (i & 1)), word(b[i >> 1], 2 * (i & 1) + 1));
        }
    }
    if (q == 0) {
        shared[warp * 16 + g] = s * part[0];
        shared[warp * 16 + 8 + g] = s * part[2];
    }
    __syncthreads();
    grid_dependency_wait();
    if (t >= 16) return;
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) total += shared[i * 16 + t];
    store_as(out + blockIdx.x * 16 + t, total);
}

extern "C" __global__ void __launch_bounds__(256, 6)
    project_query(const u8* codes, const u8* scale, int rows, const u8* codes2, const u8* scale2, int rows2,
                  const float* raw, const float* weight, float eps, bf16* out) {
    project_query<bf16>(codes, scale, rows, codes2, scale2, rows2, raw, weight, eps, out);
}
