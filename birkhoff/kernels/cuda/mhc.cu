// Hyper-connections of a decode step: write and mix the residual streams, then read them. The Triton twin is
// mhc/decode.py.

#include "common.cuh"

__device__ __forceinline__ float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ u32 bf16_bits(float v) {
    u32 r;
    asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(r) : "f"(v));
    return r;
}
__device__ __forceinline__ u32 f16_bits(float v) {
    u32 r;
    asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(r) : "f"(v));
    return r;
}
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }
__device__ __forceinline__ void normalise4(float& a, float& b, float& c, float& d, float eps) {
    const float over = __fdividef(1.f, (a + b) + (c + d) + eps);
    a *= over;
    b *= over;
    c *= over;
    d *= over;
}

// Sums 32 values over a warp; lane i ends with the sum of value i. Every round halves the values a lane holds and
// doubles the lanes they were summed over.
template <int HALF>
__device__ __forceinline__ void transpose_sum(float (&v)[32], int lane) {
    const bool upper = lane & HALF;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float keep = upper ? v[i + HALF] : v[i], give = upper ? v[i] : v[i + HALF];
        v[i] = keep + __shfl_xor_sync(~0u, give, HALF);
    }
    if constexpr (HALF > 1) transpose_sum<HALF / 2>(v, lane);
}

// Writes the output of a sublayer into the streams and, while a slice of them is in registers, computes the slice's
// part of the next sublayer's 24 mixing products and of the sum of squares. Block (slice of 64 columns, token); warp k
// handles stream k, a lane two columns. Without `y` the streams are initialised with the token's embedding. `fn` is
// loaded before waiting for the preceding grid; dependents are launched only after it, since they would otherwise read
// their weights while the preceding grid still reads its own.
extern "C" __global__ void __launch_bounds__(128)
    write_and_mix(u16* streams, const float* y, int y_parts, const float* post, const float* mix, const float* fn,
                  float* mix_parts, const u16* embed, const i64* tokens, int width) {
    __shared__ float sums[4][32];
    const int lane = threadIdx.x & 31, k = threadIdx.x >> 5, d = blockIdx.x * 64 + 2 * lane;
    const i64 row = blockIdx.y;
    float2 f[24];
#pragma unroll
    for (int m = 0; m < 24; m++) f[m] = *reinterpret_cast<const float2*>(fn + (i64)m * 4 * width + k * width + d);
    grid_dependency_wait();
    launch_dependents();
    u16* own = streams + row * 4 * width + d;
    u32 packed;
    if (y) {
        u32 a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = *reinterpret_cast<const u32*>(own + (i64)j * width);
        float2 total = make_float2(0.f, 0.f);
        const float* part = y + row * y_parts * width + d;
#pragma unroll 8
        for (int p = 0; p < y_parts; p++) {
            const float2 more = *reinterpret_cast<const float2*>(part + (i64)p * width);
            total = make_float2(total.x + more.x, total.y + more.y);
        }
        float by[4];
#pragma unroll
        for (int j = 0; j < 4; j++) by[j] = mix[row * 16 + 4 * j + k];
        const float out = post[row * 4 + k];
        float2 x;
        x.x = by[0] * bf16_to_float(a[0] & 0xffffu) + by[1] * bf16_to_float(a[1] & 0xffffu);
        x.x += by[2] * bf16_to_float(a[2] & 0xffffu) + by[3] * bf16_to_float(a[3] & 0xffffu);
        x.y = by[0] * bf16_to_float(a[0] >> 16) + by[1] * bf16_to_float(a[1] >> 16);
        x.y += by[2] * bf16_to_float(a[2] >> 16) + by[3] * bf16_to_float(a[3] >> 16);
        packed = bf16_bits(x.x + out * bf16_to_float(bf16_bits(total.x))) |
                 bf16_bits(x.y + out * bf16_to_float(bf16_bits(total.y))) << 16;
        __syncthreads();  // all four streams are read before any is written
    } else {
        packed = *reinterpret_cast<const u32*>(embed + tokens[row] * width + d);
    }
    *reinterpret_cast<u32*>(own + (i64)k * width) = packed;
    const float2 g = make_float2(bf16_to_float(packed & 0xffffu), bf16_to_float(packed >> 16));
    float v[32];
#pragma unroll
    for (int m = 0; m < 32; m++) v[m] = m < 24 ? f[m].x * g.x + f[m].y * g.y : m == 24 ? g.x * g.x + g.y * g.y : 0.f;
    transpose_sum<16>(v, lane);
    sums[k][lane] = v[0];
    __syncthreads();
    if (k == 0)
        mix_parts[(row * gridDim.x + blockIdx.x) * 32 + lane] =
            (sums[0][lane] + sums[1][lane]) + (sums[2][lane] + sums[3][lane]);
}

// Block (token, 0) collapses and normalises the streams; block (token, 1) computes the coefficients of the write (post
// and the Sinkhorn-normalised mix). mix_parts is [n, splits, 32].
extern "C" __global__ void __launch_bounds__(512)
    read_streams(const float* mix_parts, int splits, const u16* streams, const float* base, const float* scale,
                 const float* norm, u16* out, u16* out_fp16, u16* out_fp4_order, float* pre, float* post, float* mix,
                 int width, int iters, float eps, float rms_eps, float norm_eps) {
    __shared__ float sums[16][33];
    __shared__ float logits[32];
    __shared__ float squares[16];
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const i64 row = blockIdx.x;
    const bool reads = blockIdx.y == 0;
    launch_dependents();
    // Load what does not depend on the streams before waiting for them.
    const float gain = scale[reads ? 0 : 2], post_gain = scale[1];
    const float bias = lane < 24 ? base[lane] : 0.f;
    float4 weight[2][2];
    if (reads) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int d = (i * 512 + t) * 8;
            if (d < width) {
                weight[i][0] = *reinterpret_cast<const float4*>(norm + d);
                weight[i][1] = *reinterpret_cast<const float4*>(norm + d + 4);
            }
        }
    }
    grid_dependency_wait();
    const float* own = mix_parts + row * splits * 32;
    float part = 0.f;
#pragma unroll 4
    for (int s = warp; s < splits; s += 16) part += own[s * 32 + lane];
    uint4 x[2][4];
    if (reads) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int d = (i * 512 + t) * 8;
            if (d < width)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    x[i][k] = *reinterpret_cast<const uint4*>(streams + (row * 4 + k) * width + d);
        }
    }
    sums[warp][lane] = part;
    __syncthreads();
    if (warp == 0) {
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < 16; i++) total += sums[i][lane];
        const float rho = rsqrtf(__shfl_sync(~0u, total, 24) / (4.f * width) + rms_eps);
        const float by = reads ? gain : lane < 8 ? post_gain : gain;
        logits[lane] = total * rho * by + bias;
    }
    __syncthreads();
    if (!reads) {
        if (warp) return;
        if (lane < 4) post[row * 4 + lane] = 2.f * sigmoid(logits[4 + lane]);
        float a[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float top = -3e38f;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                a[j][k] = logits[8 + 4 * j + k];
                top = fmaxf(top, a[j][k]);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) a[j][k] = __expf(a[j][k] - top);
            const float over = __fdividef(1.f, (a[j][0] + a[j][1]) + (a[j][2] + a[j][3]));
#pragma unroll
            for (int k = 0; k < 4; k++) a[j][k] = a[j][k] * over + eps;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) normalise4(a[0][k], a[1][k], a[2][k], a[3][k], eps);
        for (int i = 1; i < iters; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) normalise4(a[j][0], a[j][1], a[j][2], a[j][3], eps);
#pragma unroll
            for (int k = 0; k < 4; k++) normalise4(a[0][k], a[1][k], a[2][k], a[3][k], eps);
        }
        if (lane == 0) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                *reinterpret_cast<float4*>(mix + row * 16 + 4 * j) = make_float4(a[j][0], a[j][1], a[j][2], a[j][3]);
        }
        return;
    }
    float w[4];
#pragma unroll
    for (int k = 0; k < 4; k++) w[k] = sigmoid(logits[k]) + eps;
    if (t < 4) pre[row * 4 + t] = sigmoid(logits[t]) + eps;
    float u[2][8], square = 0.f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int d = (i * 512 + t) * 8;
        if (d < width) {
#pragma unroll
            for (int j = 0; j < 8; j++) u[i][j] = 0.f;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u32 words[4] = {x[i][k].x, x[i][k].y, x[i][k].z, x[i][k].w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u[i][2 * j] += w[k] * bf16_to_float(words[j] & 0xffffu);
                    u[i][2 * j + 1] += w[k] * bf16_to_float(words[j] >> 16);
                }
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                u[i][j] = bf16_to_float(bf16_bits(u[i][j]));
                square += u[i][j] * u[i][j];
            }
        }
    }
    square = warp_sum(square);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    const float rho = rsqrtf(warp_sum(lane < 16 ? squares[lane] : 0.f) / width + norm_eps);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int d = (i * 512 + t) * 8;
        if (d < width) {
            u32 b[8], h[8];
            const float by[8] = {weight[i][0].x, weight[i][0].y, weight[i][0].z, weight[i][0].w,
                                 weight[i][1].x, weight[i][1].y, weight[i][1].z, weight[i][1].w};
#pragma unroll
            for (int j = 0; j < 8; j++) {
                b[j] = bf16_bits(u[i][j] * rho * by[j]);
                h[j] = f16_bits(bf16_to_float(b[j]));
            }
            const i64 at = row * width + d;
            *reinterpret_cast<uint4*>(out + at) =
                make_uint4(b[0] | b[1] << 16, b[2] | b[3] << 16, b[4] | b[5] << 16, b[6] | b[7] << 16);
            *reinterpret_cast<uint4*>(out_fp16 + at) =
                make_uint4(h[0] | h[1] << 16, h[2] | h[3] << 16, h[4] | h[5] << 16, h[6] | h[7] << 16);
            *reinterpret_cast<uint4*>(out_fp4_order + at) =
                make_uint4(h[0] | h[2] << 16, h[4] | h[6] << 16, h[1] | h[3] << 16, h[5] | h[7] << 16);
        }
    }
}
