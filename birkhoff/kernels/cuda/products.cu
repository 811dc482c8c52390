// Products of all tokens' inputs with one or several matrices: of attention, of the head, and of router and shared expert,
// where a single token is routed on the way. Their portable twins are linear/triton.py and experts/triton.py.

#include "rows.cuh"

// One launch over the rows of up to two FP8 matrices (stacked in blocks of sixteen rows) and one bfloat16 matrix. WARPS
// share a row's K; with many tokens WM of them stand side by side on different rows, so that they meet their common
// inputs in L1.
template <int NT, int WARPS, int U, int WM, typename OUT>
__device__ __forceinline__ void product(const u8* codes, const u8* scale, int rows8, const u8* codes2, const u8* scale2,
                                        int rows8b, const u16* plain, int rows16, const u16* xh, const u16* xb, int n,
                                        int inner, int x_stride, OUT* out, int out_stride, int group) {
    __shared__ float shared[WM * WARPS * 16 * NT * 8];
    let_next_start();
    const int g = (threadIdx.x & 31) >> 2, side = (threadIdx.x >> 5) % WM;
    int row = (blockIdx.x * WM + side) * 16;
    const bool inside = row < rows8 + rows8b + rows16;
    if (!inside) row = 0;  // the last block's spare warps repeat the first rows, and store nothing
    const int place = row;
    float acc[1][NT][4] = {};
    const u16* x[NT];
    bool there[NT];
    const bool coded = row < rows8 + rows8b;
    const u16* from = (coded ? xh : xb) + (group ? (i64)(row / group) * inner : 0);
#pragma unroll
    for (int t = 0; t < NT; t++) {
        there[t] = t * 8 + g < n;
        x[t] = from + (i64)(t * 8 + g) * x_stride;
    }
    if (coded) {
        const bool second = row >= rows8;
        if (second) row -= rows8;
        const u8* const c[1] = {(second ? codes2 : codes) + (i64)row * inner};
        const u8* const s[1] = {(second ? scale2 : scale) + row};
        fp8_rows<NT, 1, WARPS, U, WM>(acc, c, s, second ? rows8b : rows8, x, there, inner);
    } else {
        row -= rows8 + rows8b;
        plain_rows<NT, WARPS, U, WM>(acc, plain + (i64)row * inner, x, there, inner, inner);
    }
    gather<NT, 1, WM * WARPS>(shared, acc);
    const int lane = (threadIdx.x >> 5) / WM * 32 + (threadIdx.x & 31);  // among the threads of this row block
    for (int i = lane; i < 16 * NT * 8; i += WARPS * 32) {
        const int r = i & 15, t = i >> 4;
        if (t < n && inside) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += shared[(w * WM + side) * (16 * NT * 8) + r * (NT * 8) + t];
            put(out + (i64)t * out_stride + place + r, sum);
        }
    }
}

// Sixteen rows of the shared expert's gate and as many of its up, gated.
template <int NT, int WARPS, int U>
__device__ __forceinline__ void gated_rows(float* shared, int row, const u8* codes, const u8* scale, int inner, const u16* xh,
                                           int n, int width, u16* z, float limit) {
    const int g = (threadIdx.x & 31) >> 2;
    const u16* x[NT];
    bool there[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        there[t] = t * 8 + g < n;
        x[t] = xh + (i64)(t * 8 + g) * width;
    }
    float acc[2][NT][4] = {};
    const u8* const c[2] = {codes + (i64)row * width, codes + (i64)(inner + row) * width};
    const u8* const s[2] = {scale + row, scale + inner + row};
    fp8_rows<NT, 2, WARPS, U>(acc, c, s, 2 * inner, x, there, width);
    gather<NT, 2, WARPS>(shared, acc);
    for (int i = threadIdx.x; i < 16 * NT * 8; i += WARPS * 32) {
        const int r = i & 15, t = i >> 4, at = r * (NT * 8) + t, size = 2 * 16 * NT * 8;
        if (t < n) {
            const float a = whole<WARPS>(shared, at, size), b = whole<WARPS>(shared, at + 16 * NT * 8, size);
            put(z + (i64)t * inner + row + r, gated(a, b, limit));
        }
    }
}

// Gate and up rows of the shared expert; then the router's rows.
template <int NT, int WARPS, int U>
__device__ __forceinline__ void open_shared(const u8* codes, const u8* scale, int inner, const u16* router, int experts,
                                            const u16* xh, const u16* xb, int n, int width, u16* z, float* logits,
                                            int logit_stride, float limit) {
    __shared__ float shared[WARPS * 2 * 16 * NT * 8];
    let_next_start();
    const int g = (threadIdx.x & 31) >> 2;
    int row = blockIdx.x * 16;
    if (row < inner) {
        gated_rows<NT, WARPS, U>(shared, row, codes, scale, inner, xh, n, width, z, limit);
        return;
    }
    row -= inner;
    const u16* x[NT];
    bool there[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        there[t] = t * 8 + g < n;
        x[t] = xb + (i64)(t * 8 + g) * width;
    }
    float acc[1][NT][4] = {};
    plain_rows<NT, WARPS, U>(acc, router + (i64)row * width, x, there, width, width);
    gather<NT, 1, WARPS>(shared, acc);
    for (int i = threadIdx.x; i < 16 * NT * 8; i += WARPS * 32) {
        const int r = i & 15, t = i >> 4;
        if (t < n) logits[(i64)t * logit_stride + row + r] = whole<WARPS>(shared, r * (NT * 8) + t, 16 * NT * 8);
    }
}

// The same for a single token, routed on the way: router rows come first, in two halves of K so that they are done early.
// The last of their blocks adds the halves, chooses, and writes the plan, while the shared expert is still being read.
// `arrived` counts those blocks and is left at zero; `parts` has room for two halves of all logits.
template <int EACH, int WARPS>
__device__ __forceinline__ void open_one(const u8* codes, const u8* scale, int inner, const u16* router, int experts,
                                         const u16* xh, const u16* xb, int width, u16* z, float* logits, float limit,
                                         float* parts, int* arrived, const float* bias, const int* table, const i64* tokens,
                                         const i64* addresses, int* ids, float* weights, int* order, Slot* slots, int places,
                                         float factor) {
    __shared__ float shared[WARPS * 2 * 16 * 8];
    __shared__ bool last;
    const int t = threadIdx.x, lane = t & 31, routing = experts / 8;
    let_next_start();
    if (blockIdx.x >= routing) {
        gated_rows<1, WARPS, 2>(shared, (blockIdx.x - routing) * 16, codes, scale, inner, xh, 1, width, z, limit);
        return;
    }
    if (blockIdx.x == 0) {  // what is needed at the end is on its way
        for (int i = t; i < experts / 4; i += WARPS * 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(addresses + i * 16));
        if (bias && t < experts / 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(bias + t * 32));
    }
    const int row = blockIdx.x / 2 * 16, side = blockIdx.x & 1, half = width / 2;
    const u16* const x[1] = {xb + side * half};
    const bool there[1] = {lane < 4};
    float acc[1][1][4] = {};
    plain_rows<1, WARPS, 2>(acc, router + (i64)row * width + side * half, x, there, half, width);
    gather<1, 1, WARPS>(shared, acc);
    if (t < 16) {
        parts[side * experts + row + t] = whole<WARPS>(shared, t * 8, 128);
        __threadfence();
    }
    __syncthreads();
    if (t == 0) last = atomicAdd(arrived, 1) == routing - 1;
    __syncthreads();
    if (!last || t >= 32) return;
    __threadfence();
    float each[EACH], offset[EACH], weight;
    int id;
    load_each(offset, bias, experts);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int e = lane + 32 * j;
        each[j] = 0.f;
        if (e < experts) {
            each[j] = __ldcg(parts + e) + __ldcg(parts + experts + e);
            logits[e] = each[j];
        }
    }
    choose_experts(each, offset, table ? table + tokens[0] * places : nullptr, experts, places, factor, id, weight);
    if (lane == 0) *arrived = 0;
    if (lane >= places) return;
    ids[lane] = id;
    weights[lane] = weight;
    order[lane] = lane;
    Slot& into = slots[lane];
    into.expert = id;
    into.first = lane;
    into.count = 1;
    const longlong2 opens = reinterpret_cast<const longlong2*>(addresses)[id * 2];
    const longlong2 closes = reinterpret_cast<const longlong2*>(addresses)[id * 2 + 1];
    reinterpret_cast<longlong2*>(into.address)[0] = opens;
    reinterpret_cast<longlong2*>(into.address)[1] = closes;
}

#define PRODUCT(NAME, NT, WARPS, U, WM, OUT)                                                                              \
    extern "C" __global__ void __launch_bounds__(WM * WARPS * 32) NAME(                                                  \
        const u8* codes, const u8* scale, int rows8, const u8* codes2, const u8* scale2, int rows8b, const u16* plain,    \
        int rows16, const u16* xh, const u16* xb, int n, int inner, int x_stride, OUT* out, int out_stride, int group) {  \
        product<NT, WARPS, U, WM, OUT>(codes, scale, rows8, codes2, scale2, rows8b, plain, rows16, xh, xb, n, inner,     \
                                       x_stride, out, out_stride, group);                                                \
    }
#define PRODUCTS(NT, WARPS, U, WM)                                           \
    PRODUCT(product_f32_##NT##_##WARPS##_##U##_##WM, NT, WARPS, U, WM, float) \
    PRODUCT(product_f16_##NT##_##WARPS##_##U##_##WM, NT, WARPS, U, WM, u16)   \
    PRODUCT(product_bf16_##NT##_##WARPS##_##U##_##WM, NT, WARPS, U, WM, bf16)
PRODUCTS(1, 8, 1, 1)
PRODUCTS(1, 8, 2, 1)
PRODUCTS(1, 8, 3, 1)
PRODUCTS(2, 4, 1, 1)
PRODUCTS(2, 8, 1, 1)
PRODUCTS(4, 2, 1, 4)
PRODUCTS(4, 4, 1, 2)
PRODUCTS(4, 8, 1, 1)
PRODUCTS(8, 1, 1, 8)
PRODUCTS(8, 2, 1, 4)
PRODUCTS(8, 4, 1, 1)

#define OPEN_SHARED(NT, WARPS, U)                                                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) open_shared_##NT(                                            \
        const u8* codes, const u8* scale, int inner, const u16* router, int experts, const u16* xh, const u16* xb, int n, \
        int width, u16* z, float* logits, int logit_stride, float limit) {                                               \
        open_shared<NT, WARPS, U>(codes, scale, inner, router, experts, xh, xb, n, width, z, logits, logit_stride, limit); \
    }
OPEN_SHARED(1, 8, 2)
OPEN_SHARED(2, 8, 1)
OPEN_SHARED(4, 8, 1)
OPEN_SHARED(8, 4, 1)

#define OPEN_ONE(EACH)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) open_one_##EACH(                                                    \
        const u8* codes, const u8* scale, int inner, const u16* router, int experts, const u16* xh, const u16* xb,        \
        int width, u16* z, float* logits, float limit, float* parts, int* arrived, const float* bias, const int* table,   \
        const i64* tokens, const i64* addresses, int* ids, float* weights, int* order, Slot* slots, int places,           \
        float factor) {                                                                                                   \
        open_one<EACH, 8>(codes, scale, inner, router, experts, xh, xb, width, z, logits, limit, parts, arrived, bias,    \
                          table, tokens, addresses, ids, weights, order, slots, places, factor);                          \
    }
OPEN_ONE(8)
OPEN_ONE(16)
