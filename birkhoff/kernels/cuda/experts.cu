// Routed experts: FP4 rows through a table of addresses, some of which may lie across the bus. The portable twin is
// experts/triton.py.

#include "rows.cuh"

// Sixteen rows that lie across the bus come by way of shared memory: sixteen lanes ask for 256 bytes of a row at once, so
// that whole lines cross, where lanes that load what they multiply ask for 64 bytes of eight rows each.
__device__ __forceinline__ void fetch(uint4* into, const u8* codes, int row_bytes, int lane) {
    const u32 place = (u32)__cvta_generic_to_shared(into);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = 2 * i + (lane >> 4), at = lane & 15;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place + (row * 16 + (at ^ (row & 7))) * 16),
                     "l"(codes + (i64)row * row_bytes + at * 16));
    }
}

__device__ __forceinline__ void fetched() {
    asm volatile("cp.async.commit_group;" :::);
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
}

// FP4: RT times sixteen rows; a lane's sixteen bytes are one group of 32 codes with one scale. K in steps of 512, each in
// two halves.
template <int RT>
struct Half {
    uint4 w[RT][2][2];
    uint2 s[RT][2];
};

template <int RT>
__device__ __forceinline__ void load_half(Half<RT>& half, const u8* const (&codes)[RT], const u8* const (&scale)[RT], int inner,
                                          int kb, int side) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const i64 row = g + 8 * h;
            half.s[r][h] = stream8(scale[r] + row * (inner >> 5) + kb * 16 + side * 8);
#pragma unroll
            for (int c = 0; c < 2; c++)
                half.w[r][h][c] = stream16(codes[r] + row * (inner >> 1) + kb * 256 + side * 128 + c * 64 + q * 16);
        }
}

// Codes leave a 32-bit word as pairs (0,2) (4,6) (1,3) (5,7); the inputs lie in that order already.
template <int RT>
__device__ __forceinline__ void multiply_half(float (&acc)[RT][1][4], const Half<RT>& half, const u16* x, bool there, int offset,
                                              int kb, int side) {
    const int q = threadIdx.x & 3;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        u32 factor[RT][2];
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 four = c ? half.s[r][h].y : half.s[r][h].x;
                const u32 one = (((four >> (8 * q)) & 255u) + offset) << 10;  // a float16 power of two
                factor[r][h] = one | one << 16;
            }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 b = input16(x + kb * 512 + side * 256 + c * 128 + q * 32 + i * 8, there);
#pragma unroll
            for (int r = 0; r < RT; r++) {
                u32 even[2], odd[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 v = word(half.w[r][h][c], i);
                    even[h] = ((v << 4) & 0x80808080u) | ((v << 2) & 0x1c1c1c1cu);
                    odd[h] = (v & 0x80808080u) | ((v >> 2) & 0x1c1c1c1cu);
                }
                mma<false>(acc[r][0], scaled(pair(even[0]), factor[r][0]), scaled(pair(even[1]), factor[r][1]),
                           scaled(pair(even[0] >> 16), factor[r][0]), scaled(pair(even[1] >> 16), factor[r][1]), b.x, b.y);
                mma<false>(acc[r][0], scaled(pair(odd[0]), factor[r][0]), scaled(pair(odd[1]), factor[r][1]),
                           scaled(pair(odd[0] >> 16), factor[r][0]), scaled(pair(odd[1] >> 16), factor[r][1]), b.z, b.w);
            }
        }
    }
}

// PIPE: a half is asked for while the one before is multiplied; otherwise both at once, which takes fewer registers. WAIT:
// inputs are waited for when the first weights are on their way.
template <int RT, int WARPS, bool PIPE, bool WAIT>
__device__ __forceinline__ void fp4_rows(float (&acc)[RT][1][4], const u8* const (&codes)[RT], const u8* const (&scale)[RT],
                                         const u16* x, bool there, int inner, int offset) {
    const int warp = threadIdx.x >> 5, steps = inner >> 9;
    Half<RT> left, right;
    if (PIPE && warp < steps) load_half(left, codes, scale, inner, warp, 0);
    for (int kb = warp; kb < steps; kb += WARPS) {
        if (!PIPE) load_half(left, codes, scale, inner, kb, 0);
        load_half(right, codes, scale, inner, kb, 1);
        if (WAIT && kb == warp) wait_for_inputs();
        multiply_half(acc, left, x, there, offset, kb, 0);
        if (PIPE && kb + WARPS < steps) load_half(left, codes, scale, inner, kb + WARPS, 0);
        multiply_half(acc, right, x, there, offset, kb, 1);
    }
    if (WAIT) wait_for_inputs();
}

// The same for rows across the bus: they are fetched into `lent`, RT * 256 places for each warp; scales wait in `known`.
template <int RT, int WARPS>
__device__ __forceinline__ void far_rows(float (&acc)[RT][1][4], const u8* const (&codes)[RT], const u16* x, bool there,
                                         int inner, int offset, uint4* lent, const uint4* known) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    for (int kb = warp; kb < inner >> 9; kb += WARPS) {
        __syncwarp();
#pragma unroll
        for (int r = 0; r < RT; r++) fetch(lent + (warp * RT + r) * 256, codes[r] + kb * 256, inner >> 1, lane);
        fetched();
#pragma unroll
        for (int side = 0; side < 2; side++) {
            Half<RT> half;
#pragma unroll
            for (int r = 0; r < RT; r++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = g + 8 * h;
                    const uint4 s = known[(r * 16 + row) * (inner >> 9) + kb];
                    half.s[r][h] = side ? make_uint2(s.z, s.w) : make_uint2(s.x, s.y);
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        half.w[r][h][c] = lent[(warp * RT + r) * 256 + row * 16 + ((side * 8 + c * 4 + q) ^ (row & 7))];
                }
            multiply_half(acc, half, x, there, offset, kb, side);
        }
    }
}

constexpr int FAR_SCALES = 256;  // sixteen bytes of scales for up to 8,192 inputs of sixteen rows

// Scales of RT times sixteen rows that lie across the bus, all of them at once: sixteen rows are one piece of memory.
template <int RT, int WARPS>
__device__ __forceinline__ void fetch_scales(uint4* known, const u8* const (&scale)[RT], int scale_bytes) {
#pragma unroll
    for (int r = 0; r < RT; r++)
        for (int i = threadIdx.x; i < scale_bytes; i += WARPS * 32) known[r * scale_bytes + i] = stream16(scale[r] + i * 16);
    __syncthreads();
}

// Experts of the step's plan: blockIdx.y is a slot, blockIdx.x sixteen rows of gate and of up. With BUS some experts, those
// at addresses from `far_from` to `far_to`, lie in host memory. The next launch is given leave when the plan is there, so
// that it may read it before it waits.
template <int WARPS, bool BUS, bool PIPE>
__device__ __forceinline__ void open_experts(const Slot* slots, const int* order, const float* weights, const u16* x, u16* z,
                                             int inner, int width, int places, float limit, int offset, float gain,
                                             i64 far_from, i64 far_to) {
    __shared__ float shared[WARPS * 2 * 16 * 8];
    __shared__ uint4 lent[BUS ? WARPS * 2 * 256 : 1], known[BUS ? 2 * FAR_SCALES : 1];
    wait_for_inputs();
    let_next_start();
    const Slot* slot = slots + blockIdx.y;
    const int4 about = __ldcg(reinterpret_cast<const int4*>(slot));
    const int count = about.z, first = about.y;
    const int g = (threadIdx.x & 31) >> 2, row = blockIdx.x * 16;
    const longlong2 place = __ldcg(reinterpret_cast<const longlong2*>(slot->address));
    const u8* codes = reinterpret_cast<const u8*>(place.x) + (i64)row * (width >> 1);
    const u8* scale = reinterpret_cast<const u8*>(place.y) + (i64)row * (width >> 5);
    const u8* const c[2] = {codes, codes + (i64)inner * (width >> 1)};
    const u8* const s[2] = {scale, scale + (i64)inner * (width >> 5)};
    const bool far = BUS && place.x >= far_from && place.x < far_to;
    if (far && count) fetch_scales<2, WARPS>(known, s, width >> 5);
    for (int base = 0; base < count; base += 8) {
        const bool there = base + g < count;
        const int token = there ? __ldcg(order + first + base + g) / places : 0;
        float acc[2][1][4] = {};
        if (far)
            far_rows<2, WARPS>(acc, c, x + (i64)token * width, there, width, offset, lent, known);
        else
            fp4_rows<2, WARPS, PIPE, false>(acc, c, s, x + (i64)token * width, there, width, offset);
        if (base) __syncthreads();
        gather<1, 2, WARPS>(shared, acc);
        for (int i = threadIdx.x; i < 128; i += WARPS * 32) {
            const int r = i & 15, t = i >> 4;
            if (base + t < count) {
                const int mine = __ldcg(order + first + base + t);
                const float a = whole<WARPS>(shared, r * 8 + t, 256) * gain;
                const float b = whole<WARPS>(shared, 128 + r * 8 + t, 256) * gain;
                const int at = row + (r & 8) + ((r & 7) >> 1) + 4 * (r & 1);  // the order in which codes of `down` are met
                put(z + (i64)mine * inner + at, gated(a, b, limit) * __ldcg(weights + mine));
            }
        }
    }
}

// Slots as above, RT times sixteen rows of down; behind the last slot the shared expert's down, up to eight tokens a block.
template <int WARPS, int RT, bool BUS, bool PIPE>
__device__ __forceinline__ void close_experts(const Slot* slots, int slot_count, const int* order, const u16* z, float* y,
                                              int inner, int width, int places, int offset, float gain, const u8* codes,
                                              const u8* scale, const u16* z_shared, int n, i64 far_from, i64 far_to) {
    __shared__ float shared[WARPS * RT * 16 * 8];
    __shared__ uint4 lent[BUS ? WARPS * RT * 256 : 1], known[BUS ? RT * FAR_SCALES : 1];
    let_next_start();
    const int g = (threadIdx.x & 31) >> 2, row = blockIdx.x * 16 * RT;
    const u8 *c[RT], *s[RT];
    float acc[RT][1][4] = {};
    if (blockIdx.y >= slot_count) {
        const int first = (blockIdx.y - slot_count) * 8;
        const u16* const x[1] = {z_shared + (i64)(first + g) * inner};
        const bool there[1] = {first + g < n};
#pragma unroll
        for (int r = 0; r < RT; r++) {
            c[r] = codes + (i64)(row + 16 * r) * inner;
            s[r] = scale + row + 16 * r;
        }
        fp8_rows<1, RT, WARPS, WARPS == 1 ? 4 : 2>(acc, c, s, width, x, there, inner);
        gather<1, RT, WARPS>(shared, acc);
        for (int i = threadIdx.x; i < RT * 128; i += WARPS * 32) {
            const int r = i & (16 * RT - 1), t = i / (16 * RT);
            if (first + t < n)
                y[((i64)(first + t) * (places + 1) + places) * width + row + r] = whole<WARPS>(shared, r * 8 + t, RT * 128);
        }
        return;
    }
    const Slot* slot = slots + blockIdx.y;  // written before `open_experts` let this launch start
    const int4 about = __ldcg(reinterpret_cast<const int4*>(slot));
    const int count = about.z, first = about.y;
    const longlong2 place = __ldcg(reinterpret_cast<const longlong2*>(slot->address) + 1);
#pragma unroll
    for (int r = 0; r < RT; r++) {
        c[r] = reinterpret_cast<const u8*>(place.x) + (i64)(row + 16 * r) * (inner >> 1);
        s[r] = reinterpret_cast<const u8*>(place.y) + (i64)(row + 16 * r) * (inner >> 5);
    }
    const bool far = BUS && place.x >= far_from && place.x < far_to;
    if (far && count) fetch_scales<RT, WARPS>(known, s, inner >> 5);
    if (far || !count) wait_for_inputs();
    for (int base = 0; base < count; base += 8) {
        const bool there = base + g < count;
        const int mine = there ? __ldcg(order + first + base + g) : 0;
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[r][0][i] = 0.f;
        if (far)
            far_rows<RT, WARPS>(acc, c, z + (i64)mine * inner, there, inner, offset, lent, known);
        else
            fp4_rows<RT, WARPS, PIPE, true>(acc, c, s, z + (i64)mine * inner, there, inner, offset);
        if (base) __syncthreads();
        gather<1, RT, WARPS>(shared, acc);
        for (int i = threadIdx.x; i < RT * 128; i += WARPS * 32) {
            const int r = i & (16 * RT - 1), t = i / (16 * RT);
            if (base + t < count) {
                const int p = __ldcg(order + first + base + t);
                y[((i64)(p / places) * (places + 1) + p % places) * width + row + r] =
                    whole<WARPS>(shared, r * 8 + t, RT * 128) * gain;
            }
        }
    }
}

#define OPEN(NAME, WARPS, BUS, PIPE, BLOCKS)                                                                               \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) NAME(                                                 \
        const Slot* slots, const int* order, const float* weights, const u16* x, u16* z, int inner, int width, int places, \
        float limit, int offset, float gain, i64 far_from, i64 far_to) {                                                  \
        open_experts<WARPS, BUS, PIPE>(slots, order, weights, x, z, inner, width, places, limit, offset, gain, far_from,  \
                                       far_to);                                                                           \
    }
#define CLOSE(NAME, WARPS, RT, BUS, PIPE, BLOCKS)                                                                          \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) NAME(                                                 \
        const Slot* slots, int slot_count, const int* order, const u16* z, float* y, int inner, int width, int places,     \
        int offset, float gain, const u8* codes, const u8* scale, const u16* z_shared, int n, i64 far_from, i64 far_to) { \
        close_experts<WARPS, RT, BUS, PIPE>(slots, slot_count, order, z, y, inner, width, places, offset, gain, codes,    \
                                            scale, z_shared, n, far_from, far_to);                                        \
    }
// The last number is how many blocks are to stay on a processor: all of a single token's launches at once on an H200.
OPEN(open_experts_2, 2, false, true, 6)
OPEN(open_experts_4, 4, false, false, 4)
OPEN(open_experts_2_bus, 2, true, true, 6)
OPEN(open_experts_4_bus, 4, true, false, 4)
CLOSE(close_experts_1_1, 1, 1, false, true, 14)
CLOSE(close_experts_4_1, 4, 1, false, false, 5)
CLOSE(close_experts_2_2, 2, 2, false, false, 6)
CLOSE(close_experts_1_1_bus, 1, 1, true, true, 14)
CLOSE(close_experts_4_1_bus, 4, 1, true, false, 5)
CLOSE(close_experts_2_2_bus, 2, 2, true, false, 6)
