// Flash-decoding attention for small batches, one new token per sequence. The Triton twin is attend/decode.py.
//
// A block handles sixteen heads and one split of the keys, in tiles of 32. A warp owns 64 channels of every key, as
// keys and as values, and fetches them without the other warps. Warps synchronise to sum the squares of the queries, to
// sum scores (each warp then computes the softmax of a few heads, one key per lane) and to read the probabilities.

#include "common.cuh"

__device__ __forceinline__ void cp_async16(void* to, const void* from, bool valid) {  // zeros if not valid
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {  // until PENDING groups are left
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* row) {  // four 8 x 8 tiles, one tile row per lane
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ u32 f16_pair(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float fast_exp(float v) {  // denormal results become 0
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v * 1.44269504f));
    return r;
}

__device__ __forceinline__ float bf16_low(u32 two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float bf16_high(u32 two) { return __uint_as_float(two & 0xffff0000u); }
__device__ __forceinline__ float from_sortable_bits(u32 bits) {  // inverse of `sortable_bits`
    return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

// A warp's slice of a tile is 32 keys of eight 16-byte chunks. Chunk c of a key is stored at c ^ swizzle(key), so that
// the same chunk of eight keys, and four chunks of neighbouring keys, fall into different banks.
__device__ __forceinline__ int swizzle(int key) { return (key & 1) << 2 | (key >> 1 & 3); }

constexpr float NO_MAX = -1e30f;  // running maximum before any key

struct KeyRef {
    const u16* at;
    bool visible;
};

// queries [n, >= heads * WIDTH]; keys [slots, ring, WIDTH]; pages [*, 128 >> ratio_bits, WIDTH] or null; table [slots,
// table_stride]; topk_indices [n, topk] or null -> partial_out [n, splits, heads, WIDTH], partial_max and partial_sum
// [n, splits, heads].
template <int WIDTH>
__device__ __forceinline__ void attend(const u16* queries, int query_stride, const u16* keys, int ring, int window,
                                       const u16* pages, int ratio_bits, const i64* table, int table_stride,
                                       const int* topk_indices, int topk, const i64* slots, const i64* positions,
                                       const float* cos, const float* sin, int rope_dim, float* partial_out,
                                       float* partial_max, float* partial_sum, int heads, int split, int stages,
                                       float scale, float eps) {
    constexpr int WARPS = WIDTH / 64, PER_LANE = 16 / WARPS, SLICE = 32 * 128;
    extern __shared__ __align__(128) u8 memory[];  // [stages][WARPS][32 keys][128 bytes], then scores
    __shared__ __align__(16) u16 probs[16][40];    // rows start in different banks
    __shared__ __align__(16) float squares[16][WARPS];
    __shared__ float rescales[16];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    const int first = blockIdx.z * split, head = blockIdx.y * 16, page_bits = 7 - ratio_bits;
    const i64 row = blockIdx.x;
    u8* const slices = memory + warp * SLICE;
    float* const scores = reinterpret_cast<float*>(memory + stages * WARPS * SLICE);  // [WARPS][16 heads][32 keys]
    launch_dependents();
    // The row index is made to look lane-dependent: the compiler waits for uniform loads one by one.
    const i64 same_row = row + threadIdx.y;
    const u16* const from_queries = queries + row * query_stride + (head + g) * WIDTH + warp * 64 + q * 8;
    const int rope_channel = warp * 64 + q * 8 - (WIDTH - rope_dim);
    const float* const from_cos = cos + row * 2 * rope_dim + rope_channel / 2;
    const float* const from_sin = sin + row * 2 * rope_dim + rope_channel / 2;
    auto entry_at = [&](int start) {
        return topk_indices ? topk_indices[row * topk + min(max(start + lane - ring, 0), topk - 1)]
                            : start + lane - ring;
    };
    grid_dependency_wait();

    // Issue all independent loads at once.
    const int position = (int)positions[same_row], slot = (int)slots[same_row], entry_first = entry_at(first);
    uint4 raw[2][2];  // heads g and g + 8; channels 8 q .. in each of two groups of 32
    float4 cosines[2], sines[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
        for (int r = 0; r < 2; r++) raw[c][r] = *reinterpret_cast<const uint4*>(from_queries + c * 32 + r * 8 * WIDTH);
        if (rope_channel + c * 32 >= 0) {
            cosines[c] = *reinterpret_cast<const float4*>(from_cos + c * 16);
            sines[c] = *reinterpret_cast<const float4*>(from_sin + c * 16);
        }
    }
    const int entry_second = stages > 1 ? entry_at(first + 32) : 0;

    // Address of this lane's key of a tile.
    int entries = 0;
    if (pages) entries = topk_indices ? min((position + 1) >> ratio_bits, topk) : (position + 1) >> ratio_bits;
    const int newest = (int)((u32)position % (u32)ring);
    const i64* const slot_pages = table + (i64)slot * table_stride;
    auto key_at = [&](int start, int entry) {
        const int j = start + lane;
        KeyRef key = {keys, false};
        if (j < ring) {
            const int age = newest - j + (newest < j ? ring : 0);  // steps since this ring row was written
            key = {keys + (i64)(slot * ring + j) * WIDTH, age < window && age <= position};
        } else if (j - ring < entries) {
            const int page = (int)slot_pages[entry >> page_bits];
            key = {pages + (i64)((page << page_bits) + (entry & ((1 << page_bits) - 1))) * WIDTH, true};
        }
        return key;
    };
    // Eight lanes fetch the chunks of one key; a warp fetches four keys at a time.
    const int chunk_even = (lane & 7) ^ swizzle(lane >> 3),
              into = (lane >> 3) * 128;  // four keys on, `swizzle` differs in one bit
    auto fetch = [&](const KeyRef& partial_row, int stage) {
        u8* const even = slices + stage * WARPS * SLICE + into + (chunk_even << 4);
        u8* const odd = slices + stage * WARPS * SLICE + into + ((chunk_even ^ 2) << 4);
        const u32 visible = __ballot_sync(~0u, partial_row.visible) >> (lane >> 3);
        const u64 at = reinterpret_cast<u64>(partial_row.at + warp * 64);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u64 from = __shfl_sync(~0u, at, 4 * i + (lane >> 3)) + (lane & 7) * 16;
            cp_async16((i & 1 ? odd : even) + i * 512, reinterpret_cast<const void*>(from), visible >> (4 * i) & 1);
        }
    };
    KeyRef current = key_at(first, entry_first), following = {keys, false};
    fetch(current, 0);
    cp_async_commit();
    // A split without keys still has one tile, with no visible key.
    const int tiles = __reduce_max_sync(~0u, (max(min(split, ring + entries - first), 1) + 31) >> 5);
    if (stages > 1) {
        if (tiles > 1) {
            following = key_at(first + 32, entry_second);
            fetch(following, 1);
        }
        cp_async_commit();
    }
    float total[8][4], row_max[PER_LANE], row_sum[PER_LANE];  // row_sum: of this lane's keys
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) total[n][i] = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        row_max[i] = NO_MAX;
        row_sum[i] = 0.f;
    }

    // While keys arrive: normalise, round, rotate and round the queries.
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float square = 0.f;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const u32 words[4] = {raw[c][r].x, raw[c][r].y, raw[c][r].z, raw[c][r].w};
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const float even = bf16_low(words[m]), odd = bf16_high(words[m]);
                square += even * even + odd * odd;
            }
        }
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        if (q == 0) squares[g + 8 * r][warp] = square;
    }
    __syncthreads();
    u32 query[2][4][2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float square = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) square += squares[g + 8 * r][w];
        const float rho = rsqrtf(square * (1.f / WIDTH) + eps);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const u32 words[4] = {raw[c][r].x, raw[c][r].y, raw[c][r].z, raw[c][r].w};
#pragma unroll
            for (int m = 0; m < 4; m++) query[c][m][r] = bf16_pair(bf16_low(words[m]) * rho, bf16_high(words[m]) * rho);
            if (rope_channel + c * 32 >= 0) {
                const float cosine[4] = {cosines[c].x, cosines[c].y, cosines[c].z, cosines[c].w};
                const float sine[4] = {sines[c].x, sines[c].y, sines[c].z, sines[c].w};
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    const float even = bf16_low(query[c][m][r]), odd = bf16_high(query[c][m][r]);
                    query[c][m][r] = bf16_pair(even * cosine[m] - odd * sine[m], even * sine[m] + odd * cosine[m]);
                }
            }
        }
    }

    for (int tile = 0, stage = 0; tile < tiles; tile++) {
        const int ahead = tile + stages;
        KeyRef next = {keys, false};
        if (ahead < tiles) next = key_at(first + ahead * 32, entry_at(first + ahead * 32));
        if (stages > 1) cp_async_wait<1>();
        else cp_async_wait<0>();
        __syncwarp();
        const u8* const slice = slices + stage * WARPS * SLICE;
        float part[4][4];
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) part[t][i] = 0.f;
        // The channel order inside an mma is free as long as both operands agree.
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const u8* key = slice + (8 * t + g) * 128;
                const uint4 b = *reinterpret_cast<const uint4*>(key + (((4 * c + q) ^ swizzle(g)) << 4));
                mma(part[t], query[c][0][0], query[c][0][1], query[c][1][0], query[c][1][1], b.x, b.y);
                mma(part[t], query[c][2][0], query[c][2][1], query[c][3][0], query[c][3][1], b.z, b.w);
            }
#pragma unroll
        for (int t = 0; t < 4; t++) {
            float* to = scores + (warp * 16 + g) * 32 + (8 * (t ^ (g & 3)) + 2 * q);
            *reinterpret_cast<float2*>(to) = make_float2(part[t][0], part[t][1]);
            *reinterpret_cast<float2*>(to + 8 * 32) = make_float2(part[t][2], part[t][3]);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int h = warp * PER_LANE + i;
            float logit = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) logit += scores[(w * 16 + h) * 32 + (lane ^ (8 * (h & 3)))];
            logit = current.visible ? logit * scale : __uint_as_float(0xff800000u);
            const float new_max = fmaxf(row_max[i], from_sortable_bits(__reduce_max_sync(~0u, sortable_bits(logit))));
            const float p = fast_exp(logit - new_max), rescale = fast_exp(row_max[i] - new_max);
            probs[h][lane] = (u16)bf16_pair(p, 0.f);
            if (lane == 0) rescales[h] = rescale;
            row_sum[i] = row_sum[i] * rescale + p;
            row_max[i] = new_max;
        }
        __syncthreads();
        u32 p[2][4];
#pragma unroll
        for (int k = 0; k < 2; k++) ldmatrix_x4(p[k], &probs[lane & 15][16 * k + 8 * (lane >> 4)]);
        if (tile) {
            const float low = rescales[g], high = rescales[g + 8];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                total[n][0] *= low;
                total[n][1] *= low;
                total[n][2] *= high;
                total[n][3] *= high;
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            u32 v[4];
            ldmatrix_x4_trans(v, slice + lane * 128 + ((n ^ swizzle(lane)) << 4));
            mma(total[n], p[0][0], p[0][1], p[0][2], p[0][3], v[0], v[1]);
            mma(total[n], p[1][0], p[1][1], p[1][2], p[1][3], v[2], v[3]);
        }
        __syncwarp();
        if (ahead < tiles) fetch(next, stage);
        cp_async_commit();
        current = stages > 1 ? following : next;
        following = next;
        stage = stages > 1 ? stage ^ 1 : 0;
    }

    const i64 partial_row = (row * gridDim.z + blockIdx.z) * heads + head;
    float* to = partial_out + (partial_row + g) * WIDTH + warp * 64 + 2 * q;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(total[n][0], total[n][1]);
        *reinterpret_cast<float2*>(to + 8 * WIDTH + 8 * n) = make_float2(total[n][2], total[n][3]);
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const float denominator = warp_sum(row_sum[i]);
        if (lane == 0) {
            partial_max[partial_row + warp * PER_LANE + i] = row_max[i];
            partial_sum[partial_row + warp * PER_LANE + i] = denominator;
        }
    }
}

// A block handles 128 channels of one head; each warp reads all of them in every eighth split. Merges the splits, adds
// the sink to the denominator, rounds and applies the inverse rotation.
template <int WIDTH>
__device__ __forceinline__ void combine(const float* partial_out, const float* partial_max, const float* partial_sum,
                                        const float* sink, const float* cos, const float* sin, int rope_dim, u16* out,
                                        u16* out_fp16, int heads, int splits) {
    constexpr int WARPS = 8, PARTS = WIDTH / 128, DEPTH = 4;
    __shared__ float4 totals[WARPS][32];
    __shared__ float2 warp_stats[WARPS];  // maximum and sum
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y / PARTS;
    const int d = blockIdx.y % PARTS * 128 + 4 * lane, rope_channel = d - (WIDTH - rope_dim);
    const i64 row = blockIdx.x;
    launch_dependents();
    const float sink_logit = sink[head];
    const i64 partial_row = (row * splits + warp) * heads + head;
    const float *max_at = partial_max + partial_row, *sum_at_split = partial_sum + partial_row,
                *out_at = partial_out + partial_row * WIDTH + d;
    const float *from_cos = cos + row * 2 * rope_dim + rope_channel / 2,
                *from_sin = sin + row * 2 * rope_dim + rope_channel / 2;
    grid_dependency_wait();
    float2 cosine = make_float2(1.f, 1.f), sine = make_float2(0.f, 0.f);
    float row_max = NO_MAX, row_sum = 0.f;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int first = warp; first < splits; first += WARPS * DEPTH) {
        float split_max[DEPTH], split_sum[DEPTH];
        float4 part[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const u32 on = (first - warp + i * WARPS) * heads;
            split_max[i] = NO_MAX;
            if (first + i * WARPS < splits) {
                split_max[i] = max_at[on];
                split_sum[i] = sum_at_split[on];
                part[i] = *reinterpret_cast<const float4*>(out_at + (i64)on * WIDTH);
            }
        }
        if (first == 0 && rope_channel >= 0) {
            cosine = *reinterpret_cast<const float2*>(from_cos);
            sine = *reinterpret_cast<const float2*>(from_sin);
        }
        float new_max = row_max;
#pragma unroll
        for (int i = 0; i < DEPTH; i++) new_max = fmaxf(new_max, split_max[i]);
        const float rescale = fast_exp(row_max - new_max);
        row_sum *= rescale;
        total = make_float4(total.x * rescale, total.y * rescale, total.z * rescale, total.w * rescale);
#pragma unroll
        for (int i = 0; i < DEPTH; i++)
            if (first + i * WARPS < splits) {
                const float weight = fast_exp(split_max[i] - new_max);
                row_sum += split_sum[i] * weight;
                total.x += part[i].x * weight;
                total.y += part[i].y * weight;
                total.z += part[i].z * weight;
                total.w += part[i].w * weight;
            }
        row_max = new_max;
    }
    totals[warp][lane] = total;
    if (lane == 0) warp_stats[warp] = make_float2(row_max, row_sum);
    __syncthreads();
    if (warp) return;
    float2 each[WARPS];
    float top = sink_logit;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        each[w] = warp_stats[w];
        top = fmaxf(top, each[w].x);
    }
    float denominator = fast_exp(sink_logit - top);
    total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float weight = fast_exp(each[w].x - top);
        const float4 more = totals[w][lane];
        denominator += each[w].y * weight;
        total.x += more.x * weight;
        total.y += more.y * weight;
        total.z += more.z * weight;
        total.w += more.w * weight;
    }
    const float over = __fdividef(1.f, denominator);
    const u32 low = bf16_pair(total.x * over, total.y * over), high = bf16_pair(total.z * over, total.w * over);
    const float a = bf16_low(low), b = bf16_high(low), c = bf16_low(high), e = bf16_high(high);
    const float rotated[4] = {a * cosine.x + b * sine.x, b * cosine.x - a * sine.x, c * cosine.y + e * sine.y,
                              e * cosine.y - c * sine.y};
    const i64 at = (row * heads + head) * WIDTH + d;
    *reinterpret_cast<uint2*>(out + at) =
        make_uint2(bf16_pair(rotated[0], rotated[1]), bf16_pair(rotated[2], rotated[3]));
    if (out_fp16)
        *reinterpret_cast<uint2*>(out_fp16 + at) =
            make_uint2(f16_pair(rotated[0], rotated[1]), f16_pair(rotated[2], rotated[3]));
}

#define ATTENTION(WIDTH)                                                                                               \
    extern "C" __global__ void __launch_bounds__(WIDTH / 2, 2) attend_##WIDTH(                                         \
        const u16* queries, int query_stride, const u16* keys, int ring, int window, const u16* pages, int ratio_bits, \
        const i64* table, int table_stride, const int* topk_indices, int topk, const i64* slots, const i64* positions, \
        const float* cos, const float* sin, int rope_dim, float* partial_out, float* partial_max, float* partial_sum,  \
        int heads, int split, int stages, float scale, float eps) {                                                    \
        attend<WIDTH>(queries, query_stride, keys, ring, window, pages, ratio_bits, table, table_stride, topk_indices, \
                      topk, slots, positions, cos, sin, rope_dim, partial_out, partial_max, partial_sum, heads, split, \
                      stages, scale, eps);                                                                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) combine_##WIDTH(                                                 \
        const float* partial_out, const float* partial_max, const float* partial_sum, const float* sink,               \
        const float* cos, const float* sin, int rope_dim, u16* out, u16* out_fp16, int heads, int splits) {            \
        combine<WIDTH>(partial_out, partial_max, partial_sum, sink, cos, sin, rope_dim, out, out_fp16, heads, splits); \
    }
ATTENTION(128)
ATTENTION(512)
