// Attention of one new token per sequence for few rows, where it is all latency. The portable twin is attend/triton.py.
//
// A block has sixteen heads and a share of the keys, in tiles of 32. A warp owns 64 channels of every key, as keys and as
// values: it fetches them itself and needs no other warp for that. Warps meet to add squares of the queries, to add
// scores (each then does the softmax of a few heads, a lane a key) and to take the probabilities.

#include "common.cuh"

__device__ __forceinline__ void copy16(void* to, const void* from, bool there) {  // zeros where nothing is there
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER>
__device__ __forceinline__ void wait_for_copies() {  // all but the last groups
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
__device__ __forceinline__ void load_tiles(u32 (&r)[4], const void* row) {  // four 8 x 8, a row of one per lane
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((u32)__cvta_generic_to_shared(row)) : "memory");
}
__device__ __forceinline__ void load_turned_tiles(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((u32)__cvta_generic_to_shared(row)) : "memory");
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ u32 half_pair(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float exp_of(float v) {  // 0 where that is denormal
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v * 1.44269504f));
    return r;
}
// End of instructions.

__device__ __forceinline__ float low_of(u32 two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float high_of(u32 two) { return __uint_as_float(two & 0xffff0000u); }
__device__ __forceinline__ float float_of(u32 place) {  // undoes `ordered`
    return __uint_as_float(place & 0x80000000u ? place ^ 0x80000000u : ~place);
}
__device__ __forceinline__ float sum_warp(float v) {
#pragma unroll
    for (int s = 16; s; s >>= 1) v += __shfl_xor_sync(~0u, v, s);
    return v;
}

// A warp's part of a tile is 32 keys of eight chunks of sixteen bytes. Chunk c of a key lies at c ^ mixed(key): eight keys'
// same chunk are in different banks, and so are four chunks of neighbouring keys.
__device__ __forceinline__ int mixed(int key) { return (key & 1) << 2 | (key >> 1 & 3); }

constexpr float LEAST = -1e30f;  // a peak before any key

struct Place {  // of a key
    const u16* at;
    bool seen;
};

// queries [n, >= heads * WIDTH]; keys [slots, ring, WIDTH]; pages [*, 128 >> ratio_bits, WIDTH] or null; table [slots,
// table_stride]; chosen [n, topk] or null -> sums [n, shares, heads, WIDTH], peaks and masses [n, shares, heads].
template <int WIDTH>
__device__ __forceinline__ void attend(const u16* queries, int query_stride, const u16* keys, int ring, int window,
                                       const u16* pages, int ratio_bits, const i64* table, int table_stride,
                                       const int* chosen, int topk, const i64* slots, const i64* positions, const float* cos,
                                       const float* sin, int turning, float* sums, float* peaks, float* masses, int heads,
                                       int share, int stages, float scale, float eps) {
    constexpr int WARPS = WIDTH / 64, EACH = 16 / WARPS, SLICE = 32 * 128;
    extern __shared__ __align__(128) u8 memory[];  // [stages][WARPS][32 keys][128 bytes], then scores
    __shared__ __align__(16) u16 likely[16][40];   // probabilities; rows begin in different banks
    __shared__ __align__(16) float squares[16][WARPS];
    __shared__ float fades[16];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    const int first = blockIdx.z * share, head = blockIdx.y * 16, page_bits = 7 - ratio_bits;
    const i64 row = blockIdx.x;
    u8* const slices = memory + warp * SLICE;
    float* const scores = reinterpret_cast<float*>(memory + stages * WARPS * SLICE);  // [WARPS][16 heads][32 keys]
    let_next_start();
    // A sequence's numbers are read as if lanes differed: taken for uniform, they would be waited for one by one.
    const i64 own = row + threadIdx.y;
    const u16* const from_queries = queries + row * query_stride + (head + g) * WIDTH + warp * 64 + q * 8;
    const int turn = warp * 64 + q * 8 - (WIDTH - turning);
    const float* const from_cos = cos + row * 2 * turning + turn / 2;
    const float* const from_sin = sin + row * 2 * turning + turn / 2;
    auto listed_at = [&](int start) {
        return chosen ? chosen[row * topk + min(max(start + lane - ring, 0), topk - 1)] : start + lane - ring;
    };
    wait_for_inputs();

    // Everything that depends on nothing, at once.
    const int position = (int)positions[own], slot = (int)slots[own], listed_first = listed_at(first);
    uint4 raw[2][2];  // heads g and g + 8; channels 8 q .. of 32, and of 32 more
    float4 cosines[2], sines[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
        for (int r = 0; r < 2; r++) raw[c][r] = *reinterpret_cast<const uint4*>(from_queries + c * 32 + r * 8 * WIDTH);
        if (turn + c * 32 >= 0) {
            cosines[c] = *reinterpret_cast<const float4*>(from_cos + c * 16);
            sines[c] = *reinterpret_cast<const float4*>(from_sin + c * 16);
        }
    }
    const int listed_second = stages > 1 ? listed_at(first + 32) : 0;

    // Where this lane's key of a tile lies.
    int entries = 0;
    if (pages) entries = chosen ? min((position + 1) >> ratio_bits, topk) : (position + 1) >> ratio_bits;
    const int newest = (int)((u32)position % (u32)ring);
    const i64* const own_pages = table + (i64)slot * table_stride;
    auto place_of = [&](int start, int number) {
        const int j = start + lane;
        Place found = {keys, false};
        if (j < ring) {
            const int age = newest - j + (newest < j ? ring : 0);  // how long ago a row of the ring was written
            found = {keys + (i64)(slot * ring + j) * WIDTH, age < window && age <= position};
        } else if (j - ring < entries) {
            const int page = (int)own_pages[number >> page_bits];
            found = {pages + (i64)((page << page_bits) + (number & ((1 << page_bits) - 1))) * WIDTH, true};
        }
        return found;
    };
    // Eight lanes fetch a key's chunks, four keys at once.
    const int chunk_even = (lane & 7) ^ mixed(lane >> 3), into = (lane >> 3) * 128;  // `mixed` of four keys on: another bit
    auto fetch = [&](const Place& place, int stage) {
        u8* const even = slices + stage * WARPS * SLICE + into + (chunk_even << 4);
        u8* const odd = slices + stage * WARPS * SLICE + into + ((chunk_even ^ 2) << 4);
        const u32 seen = __ballot_sync(~0u, place.seen) >> (lane >> 3);
        const u64 at = reinterpret_cast<u64>(place.at + warp * 64);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u64 from = __shfl_sync(~0u, at, 4 * i + (lane >> 3)) + (lane & 7) * 16;
            copy16((i & 1 ? odd : even) + i * 512, reinterpret_cast<const void*>(from), seen >> (4 * i) & 1);
        }
    };
    Place now = place_of(first, listed_first), after = {keys, false};
    fetch(now, 0);
    end_of_copies();
    // A share without keys has a tile of which nothing is seen.
    const int tiles = __reduce_max_sync(~0u, (max(min(share, ring + entries - first), 1) + 31) >> 5);
    if (stages > 1) {
        if (tiles > 1) {
            after = place_of(first + 32, listed_second);
            fetch(after, 1);
        }
        end_of_copies();
    }
    float total[8][4], peak[EACH], mass[EACH];  // mass: of this lane's keys
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) total[n][i] = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        peak[i] = LEAST;
        mass[i] = 0.f;
    }

    // While keys are on their way: queries normalised, rounded, turned, rounded.
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float square = 0.f;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const u32 words[4] = {raw[c][r].x, raw[c][r].y, raw[c][r].z, raw[c][r].w};
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const float even = low_of(words[m]), odd = high_of(words[m]);
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
            for (int m = 0; m < 4; m++) query[c][m][r] = bf16_pair(low_of(words[m]) * rho, high_of(words[m]) * rho);
            if (turn + c * 32 >= 0) {
                const float along[4] = {cosines[c].x, cosines[c].y, cosines[c].z, cosines[c].w};
                const float across[4] = {sines[c].x, sines[c].y, sines[c].z, sines[c].w};
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    const float even = low_of(query[c][m][r]), odd = high_of(query[c][m][r]);
                    query[c][m][r] = bf16_pair(even * along[m] - odd * across[m], even * across[m] + odd * along[m]);
                }
            }
        }
    }

    for (int tile = 0, stage = 0; tile < tiles; tile++) {
        const int ahead = tile + stages;
        Place next = {keys, false};
        if (ahead < tiles) next = place_of(first + ahead * 32, listed_at(first + ahead * 32));
        if (stages > 1) wait_for_copies<1>();
        else wait_for_copies<0>();
        __syncwarp();
        const u8* const slice = slices + stage * WARPS * SLICE;
        float part[4][4];
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) part[t][i] = 0.f;
        // Which channel stands where inside an mma does not matter as long as both sides agree.
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int t = 0; t < 4; t++) {
                const u8* key = slice + (8 * t + g) * 128;
                const uint4 b = *reinterpret_cast<const uint4*>(key + (((4 * c + q) ^ mixed(g)) << 4));
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
        for (int i = 0; i < EACH; i++) {
            const int h = warp * EACH + i;
            float logit = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) logit += scores[(w * 16 + h) * 32 + (lane ^ (8 * (h & 3)))];
            logit = now.seen ? logit * scale : __uint_as_float(0xff800000u);
            const float higher = fmaxf(peak[i], float_of(__reduce_max_sync(~0u, ordered(logit))));
            const float p = exp_of(logit - higher), fade = exp_of(peak[i] - higher);
            likely[h][lane] = (u16)bf16_pair(p, 0.f);
            if (lane == 0) fades[h] = fade;
            mass[i] = mass[i] * fade + p;
            peak[i] = higher;
        }
        __syncthreads();
        u32 p[2][4];
#pragma unroll
        for (int k = 0; k < 2; k++) load_tiles(p[k], &likely[lane & 15][16 * k + 8 * (lane >> 4)]);
        if (tile) {
            const float low = fades[g], high = fades[g + 8];
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
            load_turned_tiles(v, slice + lane * 128 + ((n ^ mixed(lane)) << 4));
            mma(total[n], p[0][0], p[0][1], p[0][2], p[0][3], v[0], v[1]);
            mma(total[n], p[1][0], p[1][1], p[1][2], p[1][3], v[2], v[3]);
        }
        __syncwarp();
        if (ahead < tiles) fetch(next, stage);
        end_of_copies();
        now = stages > 1 ? after : next;
        after = next;
        stage = stages > 1 ? stage ^ 1 : 0;
    }

    const i64 place = (row * gridDim.z + blockIdx.z) * heads + head;
    float* to = sums + (place + g) * WIDTH + warp * 64 + 2 * q;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(total[n][0], total[n][1]);
        *reinterpret_cast<float2*>(to + 8 * WIDTH + 8 * n) = make_float2(total[n][2], total[n][3]);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const float whole = sum_warp(mass[i]);
        if (lane == 0) {
            peaks[place + warp * EACH + i] = peak[i];
            masses[place + warp * EACH + i] = whole;
        }
    }
}

// A block has 128 channels of one head, a warp all of them in every eighth share. Shares are added, the sink is let in, the
// result is rounded and turned back.
template <int WIDTH>
__device__ __forceinline__ void combine(const float* sums, const float* peaks, const float* masses, const float* sink,
                                        const float* cos, const float* sin, int turning, u16* out, u16* half, int heads,
                                        int shares) {
    constexpr int WARPS = 8, PARTS = WIDTH / 128, DEPTH = 4;
    __shared__ float4 totals[WARPS][32];
    __shared__ float2 summed[WARPS];  // peak and mass
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y / PARTS;
    const int d = blockIdx.y % PARTS * 128 + 4 * lane, turn = d - (WIDTH - turning);
    const i64 row = blockIdx.x;
    let_next_start();
    const float drain = sink[head];
    const i64 place = (row * shares + warp) * heads + head;
    const float *peak_at = peaks + place, *mass_at = masses + place, *sum_at = sums + place * WIDTH + d;
    const float *from_cos = cos + row * 2 * turning + turn / 2, *from_sin = sin + row * 2 * turning + turn / 2;
    wait_for_inputs();
    float2 along = make_float2(1.f, 1.f), across = make_float2(0.f, 0.f);
    float peak = LEAST, mass = 0.f;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int first = warp; first < shares; first += WARPS * DEPTH) {
        float peak_of[DEPTH], mass_of[DEPTH];
        float4 part[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const u32 on = (first - warp + i * WARPS) * heads;
            peak_of[i] = LEAST;
            if (first + i * WARPS < shares) {
                peak_of[i] = peak_at[on];
                mass_of[i] = mass_at[on];
                part[i] = *reinterpret_cast<const float4*>(sum_at + (i64)on * WIDTH);
            }
        }
        if (first == 0 && turn >= 0) {
            along = *reinterpret_cast<const float2*>(from_cos);
            across = *reinterpret_cast<const float2*>(from_sin);
        }
        float higher = peak;
#pragma unroll
        for (int i = 0; i < DEPTH; i++) higher = fmaxf(higher, peak_of[i]);
        const float fade = exp_of(peak - higher);
        mass *= fade;
        total = make_float4(total.x * fade, total.y * fade, total.z * fade, total.w * fade);
#pragma unroll
        for (int i = 0; i < DEPTH; i++)
            if (first + i * WARPS < shares) {
                const float weight = exp_of(peak_of[i] - higher);
                mass += mass_of[i] * weight;
                total.x += part[i].x * weight;
                total.y += part[i].y * weight;
                total.z += part[i].z * weight;
                total.w += part[i].w * weight;
            }
        peak = higher;
    }
    totals[warp][lane] = total;
    if (lane == 0) summed[warp] = make_float2(peak, mass);
    __syncthreads();
    if (warp) return;
    float2 each[WARPS];
    float top = drain;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        each[w] = summed[w];
        top = fmaxf(top, each[w].x);
    }
    float whole = exp_of(drain - top);
    total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float weight = exp_of(each[w].x - top);
        const float4 more = totals[w][lane];
        whole += each[w].y * weight;
        total.x += more.x * weight;
        total.y += more.y * weight;
        total.z += more.z * weight;
        total.w += more.w * weight;
    }
    const float over = __fdividef(1.f, whole);
    const u32 low = bf16_pair(total.x * over, total.y * over), high = bf16_pair(total.z * over, total.w * over);
    const float a = low_of(low), b = high_of(low), c = low_of(high), e = high_of(high);
    const float back[4] = {a * along.x + b * across.x, b * along.x - a * across.x, c * along.y + e * across.y,
                           e * along.y - c * across.y};
    const i64 at = (row * heads + head) * WIDTH + d;
    *reinterpret_cast<uint2*>(out + at) = make_uint2(bf16_pair(back[0], back[1]), bf16_pair(back[2], back[3]));
    if (half) *reinterpret_cast<uint2*>(half + at) = make_uint2(half_pair(back[0], back[1]), half_pair(back[2], back[3]));
}

#define ATTENTION(WIDTH)                                                                                               \
    extern "C" __global__ void __launch_bounds__(WIDTH / 2, 2)                                                         \
        attend_##WIDTH(const u16* queries, int query_stride, const u16* keys, int ring, int window, const u16* pages,  \
                       int ratio_bits, const i64* table, int table_stride, const int* chosen, int topk,                \
                       const i64* slots, const i64* positions, const float* cos, const float* sin, int turning,        \
                       float* sums, float* peaks, float* masses, int heads, int share, int stages, float scale,        \
                       float eps) {                                                                                    \
        attend<WIDTH>(queries, query_stride, keys, ring, window, pages, ratio_bits, table, table_stride, chosen, topk, \
                      slots, positions, cos, sin, turning, sums, peaks, masses, heads, share, stages, scale, eps);     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        combine_##WIDTH(const float* sums, const float* peaks, const float* masses, const float* sink, const float* cos,\
                        const float* sin, int turning, u16* out, u16* half, int heads, int shares) {                   \
        combine<WIDTH>(sums, peaks, masses, sink, cos, sin, turning, out, half, heads, shares);                        \
    }
ATTENTION(128)
ATTENTION(512)
