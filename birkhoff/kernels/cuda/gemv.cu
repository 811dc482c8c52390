// Products of up to 64 rows with packed weights: the projections of attention, the LM head, and router with the gate
// and up of the shared expert (which also routes when there is one token). The Triton twins are linear/decode.py and
// experts/decode.py.

#include "gemv.cuh"

// Compiled once for codes of FP8 and once for those of Q8_0.
#ifndef Q8_CODES
#define Q8_CODES 0
#endif
constexpr bool Q8 = Q8_CODES;

__device__ __forceinline__ i64 row_bytes(int inner) { return Q8 ? q8_row_bytes(inner) : inner; }

// One launch over the rows of up to two matrices of codes, FP8 or Q8_0 (in blocks of sixteen rows), and one bfloat16
// matrix. WARPS split the K of a row block; a thread block holds WM row blocks, whose common inputs are then shared in
// L1 (used for many tokens).
template <int NT, int WARPS, int U, int WM, typename OUT>
__device__ __forceinline__ void gemv(const u8* codes, const u8* scale, int rows8, const u8* codes2, const u8* scale2,
                                     int rows8b, const u16* weight16, int rows16, const u16* xh, const u16* xb, int n,
                                     int inner, int x_stride, OUT* out, int out_stride, int group) {
    __shared__ float shared[WM * WARPS * 16 * NT * 8];
    launch_dependents();
    const int g = (threadIdx.x & 31) >> 2, side = (threadIdx.x >> 5) % WM;
    int row = (blockIdx.x * WM + side) * 16;
    const bool in_range = row < rows8 + rows8b + rows16;
    if (!in_range) row = 0;  // spare warps of the last block repeat the first rows and store nothing
    const int out_row = row;
    float acc[1][NT][4] = {};
    const u16* x[NT];
    bool valid[NT];
    const bool is_codes = row < rows8 + rows8b;
    const u16* from = (is_codes ? xh : xb) + (group ? (i64)(row / group) * inner : 0);
#pragma unroll
    for (int t = 0; t < NT; t++) {
        valid[t] = t * 8 + g < n;
        x[t] = from + (i64)(t * 8 + g) * x_stride;
    }
    if (is_codes) {
        const bool second = row >= rows8;
        if (second) row -= rows8;
        const u8* const c[1] = {(second ? codes2 : codes) + row * row_bytes(inner)};
        const u8* const s[1] = {(second ? scale2 : scale) + row};
        if (Q8) gemm_q8<NT, 1, WARPS, U, WM>(acc, c, x, valid, inner);
        else gemm_fp8<NT, 1, WARPS, U, WM>(acc, c, s, second ? rows8b : rows8, x, valid, inner);
    } else {
        row -= rows8 + rows8b;
        gemm_bf16<NT, WARPS, U, WM>(acc, weight16 + (i64)row * inner, x, valid, inner, inner);
    }
    store_partials<NT, 1, WM * WARPS>(shared, acc);
    const int lane = (threadIdx.x >> 5) / WM * 32 + (threadIdx.x & 31);  // index among the threads of this row block
    for (int i = lane; i < 16 * NT * 8; i += WARPS * 32) {
        const int r = i & 15, t = i >> 4;
        if (t < n && in_range) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += shared[(w * WM + side) * (16 * NT * 8) + r * (NT * 8) + t];
            store_as(out + (i64)t * out_stride + out_row + r, sum);
        }
    }
}

// Sixteen rows of the shared expert's gate and of its up, then clamped SwiGLU.
template <int NT, int WARPS, int U>
__device__ __forceinline__ void shared_gate_up(float* shared, int row, const u8* codes, const u8* scale, int inner,
                                               const u16* xh, int n, int width, u16* z, float limit) {
    const int g = (threadIdx.x & 31) >> 2;
    const u16* x[NT];
    bool valid[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        valid[t] = t * 8 + g < n;
        x[t] = xh + (i64)(t * 8 + g) * width;
    }
    float acc[2][NT][4] = {};
    const i64 bytes = row_bytes(width);
    const u8* const c[2] = {codes + row * bytes, codes + (inner + row) * bytes};
    const u8* const s[2] = {scale + row, scale + inner + row};
    if (Q8) gemm_q8<NT, 2, WARPS, U>(acc, c, x, valid, width);
    else gemm_fp8<NT, 2, WARPS, U>(acc, c, s, 2 * inner, x, valid, width);
    store_partials<NT, 2, WARPS>(shared, acc);
    for (int i = threadIdx.x; i < 16 * NT * 8; i += WARPS * 32) {
        const int r = i & 15, t = i >> 4, at = r * (NT * 8) + t, size = 2 * 16 * NT * 8;
        if (t < n) {
            const float a = sum_partials<WARPS>(shared, at, size),
                        b = sum_partials<WARPS>(shared, at + 16 * NT * 8, size);
            store_as(z + (i64)t * inner + row + r, swiglu(a, b, limit));
        }
    }
}

// Gate and up of the shared expert; the blocks after them compute the router logits.
template <int NT, int WARPS, int U>
__device__ __forceinline__ void router_gate_up(const u8* codes, const u8* scale, int inner, const u16* router,
                                               int experts, const u16* xh, const u16* xb, int n, int width, u16* z,
                                               float* logits, int logit_stride, float limit) {
    __shared__ float shared[WARPS * 2 * 16 * NT * 8];
    launch_dependents();
    const int g = (threadIdx.x & 31) >> 2;
    int row = blockIdx.x * 16;
    if (row < inner) {
        shared_gate_up<NT, WARPS, U>(shared, row, codes, scale, inner, xh, n, width, z, limit);
        return;
    }
    row -= inner;
    const u16* x[NT];
    bool valid[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        valid[t] = t * 8 + g < n;
        x[t] = xb + (i64)(t * 8 + g) * width;
    }
    float acc[1][NT][4] = {};
    gemm_bf16<NT, WARPS, U>(acc, router + (i64)row * width, x, valid, width, width);
    store_partials<NT, 1, WARPS>(shared, acc);
    for (int i = threadIdx.x; i < 16 * NT * 8; i += WARPS * 32) {
        const int r = i & 15, t = i >> 4;
        if (t < n) logits[(i64)t * logit_stride + row + r] = sum_partials<WARPS>(shared, r * (NT * 8) + t, 16 * NT * 8);
    }
}

// `router_gate_up` for a single token, including routing. Router blocks come first and split K in two, so that they
// finish first. The last of them to finish adds the halves, selects the experts and writes the plan while the shared
// expert is still being read. `blocks_done` counts finished router blocks and is reset to zero; `partial_logits` holds
// both halves of all logits.
template <int PER_LANE, int WARPS>
__device__ __forceinline__ void router_gate_up_one(const u8* codes, const u8* scale, int inner, const u16* router,
                                                   int experts, const u16* xh, const u16* xb, int width, u16* z,
                                                   float* logits, float limit, float* partial_logits, int* blocks_done,
                                                   const float* bias, const int* hash_table, const i64* tokens,
                                                   const i64* addresses, int* ids, float* weights, int* order,
                                                   ExpertSlot* slots, int topk, float factor) {
    __shared__ float shared[WARPS * 2 * 16 * 8];
    __shared__ bool last;
    const int t = threadIdx.x, lane = t & 31, router_blocks = experts / 8;
    launch_dependents();
    if (blockIdx.x >= router_blocks) {
        const int row = (blockIdx.x - router_blocks) * 16;
        shared_gate_up<1, WARPS, 2>(shared, row, codes, scale, inner, xh, 1, width, z, limit);
        return;
    }
    if (blockIdx.x == 0) {  // prefetch what the last block reads
        for (int i = t; i < experts / 4; i += WARPS * 32)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(addresses + i * 16));
        if (bias && t < experts / 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(bias + t * 32));
    }
    const int row = blockIdx.x / 2 * 16, side = blockIdx.x & 1, half = width / 2;
    const u16* const x[1] = {xb + side * half};
    const bool valid[1] = {lane < 4};
    float acc[1][1][4] = {};
    gemm_bf16<1, WARPS, 2>(acc, router + (i64)row * width + side * half, x, valid, half, width);
    store_partials<1, 1, WARPS>(shared, acc);
    if (t < 16) {
        partial_logits[side * experts + row + t] = sum_partials<WARPS>(shared, t * 8, 128);
        __threadfence();
    }
    __syncthreads();
    if (t == 0) last = atomicAdd(blocks_done, 1) == router_blocks - 1;
    __syncthreads();
    if (!last || t >= 32) return;
    __threadfence();
    float logit[PER_LANE], lane_bias[PER_LANE], weight;
    int id;
    load_per_lane(lane_bias, bias, experts);
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        const int e = lane + 32 * j;
        logit[j] = 0.f;
        if (e < experts) {
            logit[j] = __ldcg(partial_logits + e) + __ldcg(partial_logits + experts + e);
            logits[e] = logit[j];
        }
    }
    topk_experts(logit, lane_bias, hash_table ? hash_table + tokens[0] * topk : nullptr, experts, topk, factor, id,
                 weight);
    if (lane == 0) *blocks_done = 0;
    if (lane >= topk) return;
    ids[lane] = id;
    weights[lane] = weight;
    order[lane] = lane;
    ExpertSlot& into = slots[lane];
    into.expert = id;
    into.first = lane;
    into.count = 1;
    const longlong2 gate_up_address = reinterpret_cast<const longlong2*>(addresses)[id * 2];
    const longlong2 down_address = reinterpret_cast<const longlong2*>(addresses)[id * 2 + 1];
    reinterpret_cast<longlong2*>(into.address)[0] = gate_up_address;
    reinterpret_cast<longlong2*>(into.address)[1] = down_address;
}

#define GEMV(NAME, NT, WARPS, U, WM, OUT)                                                                             \
    extern "C" __global__ void __launch_bounds__(WM * WARPS * 32)                                                     \
        NAME(const u8* codes, const u8* scale, int rows8, const u8* codes2, const u8* scale2, int rows8b,             \
             const u16* weight16, int rows16, const u16* xh, const u16* xb, int n, int inner, int x_stride, OUT* out, \
             int out_stride, int group) {                                                                             \
        gemv<NT, WARPS, U, WM, OUT>(codes, scale, rows8, codes2, scale2, rows8b, weight16, rows16, xh, xb, n, inner,  \
                                    x_stride, out, out_stride, group);                                                \
    }
#define GEMV_ALL_TYPES(NT, WARPS, U, WM)                                \
    GEMV(gemv_f32_##NT##_##WARPS##_##U##_##WM, NT, WARPS, U, WM, float) \
    GEMV(gemv_f16_##NT##_##WARPS##_##U##_##WM, NT, WARPS, U, WM, u16)   \
    GEMV(gemv_bf16_##NT##_##WARPS##_##U##_##WM, NT, WARPS, U, WM, bf16)
GEMV_ALL_TYPES(1, 8, 1, 1)
GEMV_ALL_TYPES(1, 8, 2, 1)
GEMV_ALL_TYPES(1, 8, 3, 1)
GEMV_ALL_TYPES(2, 4, 1, 1)
GEMV_ALL_TYPES(2, 8, 1, 1)
GEMV_ALL_TYPES(4, 2, 1, 4)
GEMV_ALL_TYPES(4, 4, 1, 2)
GEMV_ALL_TYPES(4, 8, 1, 1)
GEMV_ALL_TYPES(8, 1, 1, 8)
GEMV_ALL_TYPES(8, 2, 1, 4)
GEMV_ALL_TYPES(8, 4, 1, 1)

#define ROUTER_GATE_UP(NAME, NT, WARPS, U)                                                                            \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, NT == 1 ? 2 : 1)                                         \
        NAME(const u8* codes, const u8* scale, int inner, const u16* router, int experts, const u16* xh,              \
             const u16* xb, int n, int width, u16* z, float* logits, int logit_stride, float limit) {                 \
        router_gate_up<NT, WARPS, U>(codes, scale, inner, router, experts, xh, xb, n, width, z, logits, logit_stride, \
                                     limit);                                                                          \
    }
ROUTER_GATE_UP(router_gate_up_1, 1, 8, 2)
ROUTER_GATE_UP(router_gate_up_2, 2, 8, 1)
ROUTER_GATE_UP(router_gate_up_4, 4, 8, 1)
ROUTER_GATE_UP(router_gate_up_8, 8, 4, 1)

#define ROUTER_GATE_UP_ONE(NAME, PER_LANE)                                                                         \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                           \
        NAME(const u8* codes, const u8* scale, int inner, const u16* router, int experts, const u16* xh,           \
             const u16* xb, int width, u16* z, float* logits, float limit, float* partial_logits,                  \
             int* blocks_done, const float* bias, const int* hash_table, const i64* tokens, const i64* addresses,  \
             int* ids, float* weights, int* order, ExpertSlot* slots, int topk, float factor) {                    \
        router_gate_up_one<PER_LANE, 8>(codes, scale, inner, router, experts, xh, xb, width, z, logits, limit,     \
                                        partial_logits, blocks_done, bias, hash_table, tokens, addresses, ids,     \
                                        weights, order, slots, topk, factor);                                      \
    }
ROUTER_GATE_UP_ONE(router_gate_up_one_8, 8)
ROUTER_GATE_UP_ONE(router_gate_up_one_16, 16)
