// The small stages of a decoding step that are all latency: reading the streams, routing, and the indexer's choice.
// Their portable twins are mhc/triton.py, experts/triton.py and index/triton.py.

#include "common.cuh"

__device__ __forceinline__ float wide(u32 bits) { return __uint_as_float(bits << 16); }  // of a bfloat16
__device__ __forceinline__ u32 bf16_bits(float v) {
    u32 r;
    asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(r) : "f"(v));
    return r;
}
__device__ __forceinline__ u32 half_bits(float v) {
    u32 r;
    asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(r) : "f"(v));
    return r;
}
__device__ __forceinline__ float sum_warp(float v) {
#pragma unroll
    for (int s = 16; s; s >>= 1) v += __shfl_xor_sync(~0u, v, s);
    return v;
}
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }
__device__ __forceinline__ void share(float& a, float& b, float& c, float& d, float eps) {
    const float over = __fdividef(1.f, (a + b) + (c + d) + eps);
    a *= over;
    b *= over;
    c *= over;
    d *= over;
}

// Sums of 32 numbers over a warp, number i in lane i: after every round a lane has half as many, of twice as many lanes.
template <int HALF>
__device__ __forceinline__ void fold(float (&v)[32], int lane) {
    const bool upper = lane & HALF;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float keep = upper ? v[i + HALF] : v[i], give = upper ? v[i] : v[i + HALF];
        v[i] = keep + __shfl_xor_sync(~0u, give, HALF);
    }
    if constexpr (HALF > 1) fold<HALF / 2>(v, lane);
}

// A sublayer's output goes into the streams, and while a slice of them is in registers, its part of the next sublayer's 24
// products and of the square sum is taken. Block (slice of 64 columns, token); warp k has stream k, a lane two columns.
// Without `y` the streams begin as a token's embedding. `fn` is read before anything is waited for; leave to start is given
// only then, since whoever starts now would read weights while the launch before still does.
extern "C" __global__ void __launch_bounds__(128)
    write_and_mix(u16* streams, const float* y, int y_parts, const float* post, const float* mix, const float* fn,
                  float* parts, const u16* embed, const i64* tokens, int width) {
    __shared__ float sums[4][32];
    const int lane = threadIdx.x & 31, k = threadIdx.x >> 5, d = blockIdx.x * 64 + 2 * lane;
    const i64 row = blockIdx.y;
    float2 f[24];
#pragma unroll
    for (int m = 0; m < 24; m++) f[m] = *reinterpret_cast<const float2*>(fn + (i64)m * 4 * width + k * width + d);
    wait_for_inputs();
    let_next_start();
    u16* mine = streams + row * 4 * width + d;
    u32 made;
    if (y) {
        u32 a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = *reinterpret_cast<const u32*>(mine + (i64)j * width);
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
        x.x = by[0] * wide(a[0] & 0xffffu) + by[1] * wide(a[1] & 0xffffu);
        x.x += by[2] * wide(a[2] & 0xffffu) + by[3] * wide(a[3] & 0xffffu);
        x.y = by[0] * wide(a[0] >> 16) + by[1] * wide(a[1] >> 16);
        x.y += by[2] * wide(a[2] >> 16) + by[3] * wide(a[3] >> 16);
        made = bf16_bits(x.x + out * wide(bf16_bits(total.x))) | bf16_bits(x.y + out * wide(bf16_bits(total.y))) << 16;
        __syncthreads();  // all four streams were read before any is written
    } else {
        made = *reinterpret_cast<const u32*>(embed + tokens[row] * width + d);
    }
    *reinterpret_cast<u32*>(mine + (i64)k * width) = made;
    const float2 g = make_float2(wide(made & 0xffffu), wide(made >> 16));
    float v[32];
#pragma unroll
    for (int m = 0; m < 32; m++) v[m] = m < 24 ? f[m].x * g.x + f[m].y * g.y : m == 24 ? g.x * g.x + g.y * g.y : 0.f;
    fold<16>(v, lane);
    sums[k][lane] = v[0];
    __syncthreads();
    if (k == 0)
        parts[(row * gridDim.x + blockIdx.x) * 32 + lane] = (sums[0][lane] + sums[1][lane]) + (sums[2][lane] + sums[3][lane]);
}

// Block (token, 0) collapses and normalises; block (token, 1) finds the weights of the write. Parts are [n, splits, 32].
extern "C" __global__ void __launch_bounds__(512)
    read_streams(const float* parts, int splits, const u16* streams, const float* base, const float* scale, const float* norm,
                 u16* out, u16* half, u16* mixed, float* pre, float* post, float* mix, int width, int iters, float eps,
                 float rms_eps, float norm_eps) {
    __shared__ float sums[16][33];
    __shared__ float logits[32];
    __shared__ float squares[16];
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const i64 row = blockIdx.x;
    const bool collapses = blockIdx.y == 0;
    let_next_start();
    // What does not depend on the streams is fetched before they are waited for.
    const float gain = scale[collapses ? 0 : 2], post_gain = scale[1];
    const float bias = lane < 24 ? base[lane] : 0.f;
    float4 weight[2][2];
    if (collapses) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int d = (i * 512 + t) * 8;
            if (d < width) {
                weight[i][0] = *reinterpret_cast<const float4*>(norm + d);
                weight[i][1] = *reinterpret_cast<const float4*>(norm + d + 4);
            }
        }
    }
    wait_for_inputs();
    const float* mine = parts + row * splits * 32;
    float part = 0.f;
#pragma unroll 4
    for (int s = warp; s < splits; s += 16) part += mine[s * 32 + lane];
    uint4 x[2][4];
    if (collapses) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int d = (i * 512 + t) * 8;
            if (d < width)
#pragma unroll
                for (int k = 0; k < 4; k++) x[i][k] = *reinterpret_cast<const uint4*>(streams + (row * 4 + k) * width + d);
        }
    }
    sums[warp][lane] = part;
    __syncthreads();
    if (warp == 0) {
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < 16; i++) total += sums[i][lane];
        const float rho = rsqrtf(__shfl_sync(~0u, total, 24) / (4.f * width) + rms_eps);
        const float by = collapses ? gain : lane < 8 ? post_gain : gain;
        logits[lane] = total * rho * by + bias;
    }
    __syncthreads();
    if (!collapses) {
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
        for (int k = 0; k < 4; k++) share(a[0][k], a[1][k], a[2][k], a[3][k], eps);
        for (int i = 1; i < iters; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) share(a[j][0], a[j][1], a[j][2], a[j][3], eps);
#pragma unroll
            for (int k = 0; k < 4; k++) share(a[0][k], a[1][k], a[2][k], a[3][k], eps);
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
                    u[i][2 * j] += w[k] * wide(words[j] & 0xffffu);
                    u[i][2 * j + 1] += w[k] * wide(words[j] >> 16);
                }
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                u[i][j] = wide(bf16_bits(u[i][j]));
                square += u[i][j] * u[i][j];
            }
        }
    }
    square = sum_warp(square);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    const float rho = rsqrtf(sum_warp(lane < 16 ? squares[lane] : 0.f) / width + norm_eps);
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
                h[j] = half_bits(wide(b[j]));
            }
            const i64 at = row * width + d;
            *reinterpret_cast<uint4*>(out + at) = make_uint4(b[0] | b[1] << 16, b[2] | b[3] << 16, b[4] | b[5] << 16, b[6] | b[7] << 16);
            *reinterpret_cast<uint4*>(half + at) = make_uint4(h[0] | h[1] << 16, h[2] | h[3] << 16, h[4] | h[5] << 16, h[6] | h[7] << 16);
            *reinterpret_cast<uint4*>(mixed + at) = make_uint4(h[0] | h[2] << 16, h[4] | h[6] << 16, h[1] | h[3] << 16, h[5] | h[7] << 16);
        }
    }
}

// One block: a warp per token chooses; then pairs are grouped by expert. Up to 1024 pairs and 512 experts. Which of an
// expert's pairs comes first is whoever arrives first: no result depends on it.
template <int EACH>
__device__ __forceinline__ void route(const float* logits, int logit_stride, const float* bias, const int* table,
                                      const i64* tokens, const i64* addresses, int* ids, float* weights, int* order,
                                      Slot* slots, int slot_count, int n, int experts, int places, float factor) {
    __shared__ int counts[32 * EACH], starts[32 * EACH];
    __shared__ int warp_pairs[EACH], warp_used[EACH];
    __shared__ int chosen[1024], before[1024];
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    let_next_start();
    float offset[EACH];
    load_each(offset, bias, experts);
    if (t < 32 * EACH) counts[t] = 0;
    wait_for_inputs();
    __syncthreads();
    for (int b = warp; b < n; b += 32) {
        float each[EACH], weight;
        int id;
        load_each(each, logits + (i64)b * logit_stride, experts);
        choose_experts(each, offset, table ? table + tokens[b] * places : nullptr, experts, places, factor, id, weight);
        if (lane < places) {
            const int at = b * places + lane;
            weights[at] = weight;
            ids[at] = id;
            chosen[at] = id;
            before[at] = atomicAdd(&counts[id], 1);
        }
    }
    __syncthreads();
    int count = 0, at = 0, slot = 0;
    if (t < 32 * EACH) {
        count = counts[t];
        int sum = count, used = count > 0;
#pragma unroll
        for (int s = 1; s < 32; s <<= 1) {
            const int more = __shfl_up_sync(~0u, sum, s), also = __shfl_up_sync(~0u, used, s);
            if (lane >= s) {
                sum += more;
                used += also;
            }
        }
        if (lane == 31) {
            warp_pairs[warp] = sum;
            warp_used[warp] = used;
        }
        at = sum - count;
        slot = used - (count > 0);
    }
    __syncthreads();
    int in_use = 0;
#pragma unroll
    for (int w = 0; w < EACH; w++) {
        if (w < warp) {
            at += warp_pairs[w];
            slot += warp_used[w];
        }
        in_use += warp_used[w];
    }
    if (count) {
        Slot* into = slots + slot;
        into->expert = t;
        into->first = at;
        into->count = count;
        const longlong2 low = reinterpret_cast<const longlong2*>(addresses)[t * 2];
        const longlong2 high = reinterpret_cast<const longlong2*>(addresses)[t * 2 + 1];
        reinterpret_cast<longlong2*>(into->address)[0] = low;
        reinterpret_cast<longlong2*>(into->address)[1] = high;
    }
    if (t < 32 * EACH) starts[t] = at;
    __syncthreads();
    if (t < n * places) order[starts[chosen[t]] + before[t]] = t;
    if (t >= in_use && t < slot_count) slots[t].count = 0;
}

#define ROUTE(EACH)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(1024)                                                                  \
        route_##EACH(const float* logits, int logit_stride, const float* bias, const int* table, const i64* tokens,     \
                     const i64* addresses, int* ids, float* weights, int* order, Slot* slots, int slot_count, int n,    \
                     int experts, int places, float factor) {                                                           \
        route<EACH>(logits, logit_stride, bias, table, tokens, addresses, ids, weights, order, slots, slot_count, n,    \
                    experts, places, factor);                                                                           \
    }
ROUTE(8)
ROUTE(16)

// The blocks of a cluster tell each other one pair of numbers a round: everyone's lie in everyone's shared memory, by rank.
// Rounds take turns with two places, so one barrier each is enough.
template <int BLOCKS>
struct Board {
    uint2 told[2][BLOCKS];
    __device__ __forceinline__ void tell(int round, int rank, int to, uint2 v) {
        u32 place = (u32)__cvta_generic_to_shared(&told[round & 1][rank]), there;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(to));
        asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(there), "r"(v.x), "r"(v.y) : "memory");
    }
};
__device__ __forceinline__ void meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The topk best of a sequence's scores, the lower entry among equals, in ascending order. Thread t of all has entries
// t * PER ... Two bits of the last place's value are found a round, by counting who reaches each of three values. BLOCKS
// of a cluster share a sequence.
template <int PER, int WARPS, int BLOCKS>
__device__ __forceinline__ void choose(const float* scores, const i64* positions, int* chosen, int room, int topk) {
    __shared__ uint2 parts[2][WARPS];
    __shared__ Board<BLOCKS> board;
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5, rank = blockIdx.x % BLOCKS;
    const i64 row = blockIdx.x / BLOCKS;
    int round = 0;
    let_next_start();
    wait_for_inputs();
    const int count = (int)((positions[row] + 1) >> 2), first = (rank * WARPS * 32 + t) * PER;
    int* out = chosen + row * topk;
    if (count <= topk) {
        for (int e = rank * WARPS * 32 + t; e < count; e += BLOCKS * WARPS * 32) out[e] = e;
        return;
    }
    // Every warp's pair, which lane 0 has, added up for each block.
    auto exchange = [&](uint2 mine, uint2 (&blocks)[BLOCKS]) {
        uint2* all = parts[round & 1];
        if (lane == 0) all[warp] = mine;
        __syncthreads();
        if (BLOCKS == 1) {
            blocks[0] = make_uint2(0, 0);
#pragma unroll
            for (int w = 0; w < WARPS; w++) blocks[0] = make_uint2(blocks[0].x + all[w].x, blocks[0].y + all[w].y);
        } else {
            if (warp == 0) {
                const uint2 its = lane < WARPS ? all[lane] : make_uint2(0, 0);
                const uint2 sum = make_uint2(__reduce_add_sync(~0u, its.x), __reduce_add_sync(~0u, its.y));
                if (lane < BLOCKS) board.tell(round, rank, lane, sum);
            }
            meet();
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) blocks[b] = board.told[round & 1][b];
        }
        round++;
    };
    if (BLOCKS > 1) meet();  // nobody is told anything before it has begun
    u32 key[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = first + i;
        key[i] = e < count ? ordered(scores[row * room + e]) : 0u;
    }
    u32 place = 0;
    int better = 0;
    uint2 blocks[BLOCKS];
    for (int bit = 30; bit >= 0; bit -= 2) {  // the largest value that topk entries reach
        const u32 one = place | 1u << bit, two = place | 2u << bit, three = place | 3u << bit;
        u32 low = 0, high = 0;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            low += (key[i] >= one) + ((u32)(key[i] >= two) << 16);
            high += key[i] >= three;
        }
        low = __reduce_add_sync(~0u, low);
        high = __reduce_add_sync(~0u, high);
        exchange(make_uint2(low, high), blocks);
        int reach[3] = {0, 0, 0};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            reach[0] += blocks[b].x & 0xffffu;
            reach[1] += blocks[b].x >> 16;
            reach[2] += blocks[b].y;
        }
        int reached = 0;
        if (reach[2] >= topk) place = three, reached = reach[2];
        else if (reach[1] >= topk) place = two, better = reach[2], reached = reach[1];
        else if (reach[0] >= topk) place = one, better = reach[1], reached = reach[0];
        else better = reach[0];
        if (reached == topk) {  // nobody else is in question: all of these are above the value before this one
            place -= 1;
            better = topk;
            break;
        }
    }
    // How many before this thread tie with the last place, and how many are better: who is kept, and where it stands.
    int ties = 0, above = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        ties += key[i] == place;
        above += key[i] > place;
    }
    int tied = ties, over = above;
#pragma unroll
    for (int s = 1; s < 32; s <<= 1) {
        const int more = __shfl_up_sync(~0u, tied, s), also = __shfl_up_sync(~0u, over, s);
        if (lane >= s) {
            tied += more;
            over += also;
        }
    }
    exchange(make_uint2(__shfl_sync(~0u, tied, 31), __shfl_sync(~0u, over, 31)), blocks);
    tied -= ties;
    over -= above;
    for (int w = 0; w < warp; w++) {
        tied += parts[(round - 1) & 1][w].x;
        over += parts[(round - 1) & 1][w].y;
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
        if (b < rank) {
            tied += blocks[b].x;
            over += blocks[b].y;
        }
    const int places = topk - better;  // for those that tie
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const bool ties_too = key[i] == place;
        if (key[i] > place || (ties_too && tied < places)) out[over + min(tied, places)] = first + i;
        tied += ties_too;
        over += key[i] > place;
    }
}

#define CHOOSE(PER)                                                                                \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        choose_##PER(const float* scores, const i64* positions, int* chosen, int room, int topk) { \
        choose<PER, 8, 1>(scores, positions, chosen, room, topk);                                  \
    }
#define CHOOSE_WIDE(PER)                                                                                \
    extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(1024)                        \
        choose_wide_##PER(const float* scores, const i64* positions, int* chosen, int room, int topk) { \
        choose<PER, 32, 8>(scores, positions, chosen, room, topk);                                      \
    }
CHOOSE(4)
CHOOSE(8)
CHOOSE(16)
CHOOSE(32)
CHOOSE_WIDE(4)
CHOOSE_WIDE(8)
CHOOSE_WIDE(16)
CHOOSE_WIDE(32)
