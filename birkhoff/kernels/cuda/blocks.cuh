// Rows of ggml's block types, read as the file stores them.
//
// Blocks are not aligned to sixteen bytes, but some number of them is: a warp copies that many columns of sixteen rows
// (a stage) into shared memory with 16-byte requests and decodes them there. What follows is the scheme of gemv.cuh:
// lane (g, q) decodes codes of rows g and g + 8 to half2 and passes them to mma.m16n8k16. Codes are small integers; as
// the low bits of a float16 they are exact subnormal numbers (the integer times 2^-24), so they need no conversion, and
// products and sums are exact up to the rounding of float32.

#pragma once
#include "gemv.cuh"

__device__ __forceinline__ void copy_async16(u8* into, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(into)), "l"(from));
}
// A barrier in shared memory, of one arrival and the bytes of bulk copies.
__device__ __forceinline__ void barrier_init(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((u32)__cvta_generic_to_shared(barrier)) : "memory");
}
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(u64* barrier, int bytes) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(
                     (u32)__cvta_generic_to_shared(barrier)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, int parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"((u32)__cvta_generic_to_shared(barrier)),
        "r"(parity)
        : "memory");
}
// Copy contiguous bytes, all three multiples of sixteen.
__device__ __forceinline__ void copy_bulk(u8* into, const u8* from, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     (u32)__cvta_generic_to_shared(into)),
                 "l"(from), "r"(bytes), "r"((u32)__cvta_generic_to_shared(barrier))
                 : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" :::); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    __syncwarp();
}

// Request BYTES (a multiple of sixteen) of each of sixteen rows, by one warp; rows follow each other in `into`.
template <int BYTES>
__device__ __forceinline__ void copy_rows(u8* into, const u8* from, i64 row_bytes) {
    constexpr int CHUNKS = BYTES / 16;
#pragma unroll
    for (int j = 0; j < (16 * CHUNKS + 31) / 32; j++) {
        const int i = (threadIdx.x & 31) + 32 * j, row = i / CHUNKS;
        if (i < 16 * CHUNKS)
            copy_async16(into + i * 16, from + row * row_bytes + (i - row * CHUNKS) * 16);
    }
}

// N words at an even address of shared memory; HALF says that it is not a multiple of four.
template <int N, bool HALF>
__device__ __forceinline__ void load_words(u32 (&w)[N], const u8* p) {
    const u32* from = reinterpret_cast<const u32*>(HALF ? p - 2 : p);
    u32 last = from[0];
#pragma unroll
    for (int i = 0; i < N; i++) {
        w[i] = last;
        if (HALF || i + 1 < N) last = from[i + 1];
        if (HALF) w[i] = __funnelshift_r(w[i], last, 16);
    }
}

template <bool HALF>
__device__ __forceinline__ uint2 load_two_words(const u8* p) {
    u32 w[2];
    load_words<2, HALF>(w, p);
    return make_uint2(w[0], w[1]);
}

__device__ __forceinline__ float half_at(const u8* p) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(*reinterpret_cast<const u16*>(p)));
    return f;
}

__device__ __forceinline__ float2 f16x2_to_floats(u32 two) {
    float2 f;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(f.x), "=f"(f.y)
        : "r"(two));
    return f;
}

// Store a number as float16 and return what was stored.
__device__ __forceinline__ float store_f16(u16* p, float v) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    *p = bits;
    float stored;
    asm("cvt.f32.f16 %0, %1;" : "=f"(stored) : "h"(bits));
    return stored;
}

__device__ __forceinline__ u32 sub_f16x2(u32 a, u32 b) {
    u32 r;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// A number from 0 to 255 as float16, twice.
__device__ __forceinline__ u32 small_to_f16x2(u32 n) { return sub_f16x2(n * 0x00010001u | 0x64006400u, 0x64006400u); }

// Dynamic shared memory.
extern __shared__ uint4 memory[];

constexpr float SUBNORMAL = 16777216.f;  // 2^24: a code in the low bits of a float16 stands for code / 2^24

// --- One token, products of bytes --------------------------------------------------------------------------------------
//
// Codes are bytes already, and an mma of bytes takes four of them in a register where float16 takes two. The inputs of
// 256 columns are integers of 23 bits times a power of two (of float16 numbers only those below 2^-11 of the largest are
// rounded, to 2^-22 of it), as three signed bytes: columns 0, 1 and 2 of operand B. Sums are exact integers.

// mma.m16n8k32 of signed or unsigned bytes (A) and signed ones (B).
template <bool SIGNED>
__device__ __forceinline__ void mma_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

constexpr int DIGIT_WORDS = 48;  // uint4 of 256 columns: [four rows][three digits][lane q], a row for each use of a type

// Inputs as digits, and a factor per 256 columns. A lane has eight columns, in their order if IN_ORDER, else in that of
// FP4; `TYPE::put` stores a digit of them. Inputs that are not finite make the factor NaN.
template <typename TYPE, int WARPS, bool IN_ORDER>
__device__ __forceinline__ void split_inputs(uint4* digits, float* factors, const u16* x, int inner) {
    const int lane = threadIdx.x & 31;
    auto load = [&](int at) { return *reinterpret_cast<const uint4*>(x + min(at * 256, inner - 256) + lane * 8); };
    uint4 next = load(threadIdx.x >> 5);
    for (int at = threadIdx.x >> 5; at < inner >> 8; at += WARPS) {
        const uint4 eight = next;
        next = load(at + WARPS);  // before the others are needed
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 two = word(eight, i) & 0x7fff7fffu;
            largest = max(largest, max(two & 0xffffu, two >> 16));
        }
        largest = __reduce_max_sync(~0u, largest);
        const u32 exponent = max(largest >> 10, 1u);  // numbers are below 2^(exponent - 14)
        const float to_integer = __uint_as_float((127u + 36u - exponent) << 23);
        u32 bytes[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {  // in the order of FP4 columns (0, 2), (4, 6), (1, 3), (5, 7)
            const float2 two = f16x2_to_floats(word(eight, i));
            const int first = IN_ORDER ? 2 * i : 4 * (i & 1) + (i >> 1), second = first + (IN_ORDER ? 1 : 2);
            bytes[first] = ((u32)__float2int_rn(two.x * to_integer) + 0x00808080u) ^ 0x00808080u;
            bytes[second] = ((u32)__float2int_rn(two.y * to_integer) + 0x00808080u) ^ 0x00808080u;
        }
#pragma unroll
        for (int digit = 0; digit < 3; digit++) {  // the highest first
            const u32 from = 0x40u + 0x11u * (2 - digit);
            u32 four[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                four[i] = __byte_perm(__byte_perm(bytes[4 * i], bytes[4 * i + 1], from),
                                      __byte_perm(bytes[4 * i + 2], bytes[4 * i + 3], from), 0x5410u);
            TYPE::put(digits + at * DIGIT_WORDS + digit * 4, lane, four[0], four[1]);
        }
        if (lane == 0)
            factors[at] = __uint_as_float(largest < 0x7c00u ? (127u - 36u + exponent) << 23 : 0x7fc00000u);
    }
}

// The number that three digits of a product stand for: columns 0 and 1 are in lane 0 of a row, column 2 in lane 1.
__device__ __forceinline__ float join_digits(float first, float second) {
    const int q = threadIdx.x & 3;
    return q == 0 ? 65536.f * first + 256.f * second : q == 1 ? first : 0.f;
}

// The digits of lane (g, q) for a use of a type. Columns from 3 on are not read, so their lanes may read any.
__device__ __forceinline__ uint4 digits_of(const uint4* digits, int row) {
    const int q = threadIdx.x & 3, g = (threadIdx.x & 31) >> 2;
    return digits[(row * 3 + (g < 3 ? g : 0)) * 4 + q];
}

// --- Q8_0: a float16 scale and 32 signed bytes ---------------------------------------------------------------------

constexpr int Q8_COLUMNS = 256, Q8_BYTES = 272, Q8_STAGE = 16 * Q8_BYTES;

// Two of four signed bytes (0, 1 or 2, 3) as float16.
template <bool UPPER>
__device__ __forceinline__ u32 bytes_to_f16x2(u32 four) {
    return sub_f16x2(__byte_perm(four ^ 0x80808080u, 0x64646464u, UPPER ? 0x4342 : 0x4140), 0x64806480u);
}

template <int NT, int RT, int B>
__device__ __forceinline__ void multiply_q8_block(float (&acc)[RT][NT][4], const u8* staged, const u16* const (&x)[NT],
                                                  const bool (&valid)[NT], int column) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    uint4 b[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) b[t] = load_input16(x[t] + column + B * 32 + q * 8, valid[t]);
#pragma unroll
    for (int r = 0; r < RT; r++) {
        const u8* low = staged + r * Q8_STAGE + g * Q8_BYTES + B * 34;
        const u8* high = low + 8 * Q8_BYTES;
        const uint2 a = load_two_words<B % 2 == 0>(low + 2 + q * 8), c = load_two_words<B % 2 == 0>(high + 2 + q * 8);
        const float s = half_at(low), s8 = half_at(high);
#pragma unroll
        for (int t = 0; t < NT; t++) {
            float part[4] = {};
            mma<false>(part, bytes_to_f16x2<false>(a.x), bytes_to_f16x2<false>(c.x), bytes_to_f16x2<true>(a.x),
                       bytes_to_f16x2<true>(c.x), b[t].x, b[t].y);
            mma<false>(part, bytes_to_f16x2<false>(a.y), bytes_to_f16x2<false>(c.y), bytes_to_f16x2<true>(a.y),
                       bytes_to_f16x2<true>(c.y), b[t].z, b[t].w);
            acc[r][t][0] += s * part[0];
            acc[r][t][1] += s * part[1];
            acc[r][t][2] += s8 * part[2];
            acc[r][t][3] += s8 * part[3];
        }
    }
}

template <int NT, int RT>
__device__ __forceinline__ void multiply_q8_stage(float (&acc)[RT][NT][4], const u8* staged, const u16* const (&x)[NT],
                                                  const bool (&valid)[NT], int column) {
    multiply_q8_block<NT, RT, 0>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 1>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 2>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 3>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 4>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 5>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 6>(acc, staged, x, valid, column);
    multiply_q8_block<NT, RT, 7>(acc, staged, x, valid, column);
}

// As `gemm_fp8`, for RT tiles of sixteen rows of Q8_0; `staging` has room for STAGES * RT stages per warp.
template <int NT, int RT, int WARPS, int STAGES, int WM = 1>
__device__ __forceinline__ void gemm_q8(float (&acc)[RT][NT][4], const u8* const (&codes)[RT], const u16* const (&x)[NT],
                                        const bool (&valid)[NT], int inner, u8* staging) {
    const int warp = (threadIdx.x >> 5) / WM, stages = inner / Q8_COLUMNS;
    const i64 row_bytes = (i64)stages * Q8_BYTES;
    u8* own = staging + (threadIdx.x >> 5) * (STAGES * RT * Q8_STAGE);
    auto request = [&](int slot, int at) {
        if (at < stages)
#pragma unroll
            for (int r = 0; r < RT; r++)
                copy_rows<Q8_BYTES>(own + (slot * RT + r) * Q8_STAGE, codes[r] + (i64)at * Q8_BYTES, row_bytes);
        commit_copies();
    };
#pragma unroll
    for (int slot = 0; slot < STAGES; slot++) request(slot, warp + slot * WARPS);
    grid_dependency_wait();
    int slot = 0;
    for (int at = warp; at < stages; at += WARPS) {
        wait_for_copies<STAGES - 1>();
        multiply_q8_stage<NT, RT>(acc, own + slot * RT * Q8_STAGE, x, valid, at * Q8_COLUMNS);
        __syncwarp();
        request(slot, at + WARPS * STAGES);
        if (++slot == STAGES) slot = 0;
    }
}

// One token: codes are operand A as they are.
struct Q8_DIGITS {
    static __device__ __forceinline__ void put(uint4* digits, int lane, u32 first, u32 second) {
        // words 2 m and 2 m + 1 of 32 columns, of which lane q takes q and q + 4
        u32* into = reinterpret_cast<u32*>(digits + (lane >> 3) * 12 + (lane & 1) * 2) + (lane >> 2 & 1) * 2 + (lane >> 1 & 1);
        into[0] = first;
        into[4] = second;
    }
};

template <int B>
__device__ __forceinline__ void multiply_q8_digits(float (&sums)[4], const u8* staged, const uint4& digits) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const u8* low = staged + g * Q8_BYTES + B * 34;
    const u8* high = low + 8 * Q8_BYTES;
    u32 a[2][1], c[2][1];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        load_words<1, B % 2 == 0>(a[i], low + 2 + 16 * i + 4 * q);
        load_words<1, B % 2 == 0>(c[i], high + 2 + 16 * i + 4 * q);
    }
    int part[4] = {};
    mma_bytes<true>(part, a[0][0], c[0][0], a[1][0], c[1][0], B % 2 ? digits.z : digits.x, B % 2 ? digits.w : digits.y);
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] += half_at(i < 2 ? low : high) * (float)part[i];
}

__device__ __forceinline__ void multiply_q8_digits_stage(float (&acc)[4], const u8* staged, const uint4* digits,
                                                         float factor) {
    float sums[4] = {};
    uint4 two = digits_of(digits, 0);
    multiply_q8_digits<0>(sums, staged, two);
    multiply_q8_digits<1>(sums, staged, two);
    two = digits_of(digits, 1);
    multiply_q8_digits<2>(sums, staged, two);
    multiply_q8_digits<3>(sums, staged, two);
    two = digits_of(digits, 2);
    multiply_q8_digits<4>(sums, staged, two);
    multiply_q8_digits<5>(sums, staged, two);
    two = digits_of(digits, 3);
    multiply_q8_digits<6>(sums, staged, two);
    multiply_q8_digits<7>(sums, staged, two);
    acc[0] += factor * join_digits(sums[0], sums[1]);
    acc[2] += factor * join_digits(sums[2], sums[3]);
}

// Products of tiles of sixteen rows of one or two matrices of Q8_0, of which thread block `block` of `blocks` has a
// range: every warp copies its part of up to DEPTH stages ahead, across tiles, so that requests never pause. `shared` has
// 2 * WARPS * NT * 128 numbers, dynamic shared memory WARPS * DEPTH stages. Row r of a group of `group` rows reads inputs
// of its own. With DIGITS there is one token, its digits follow the stages, and there are WARPS * DEPTH `barriers` of
// bulk copies.
template <int NT, int WARPS, int DEPTH, bool DIGITS, typename OUT>
__device__ __forceinline__ void multiply_q8_rows(float* shared, u64* barriers, int block, int blocks, const u8* codes, int rows,
                                                 const u8* codes2, int rows2, const u16* xh, int n, int inner,
                                                 int x_stride, OUT* out, int out_stride, int group) {
    const int g = (threadIdx.x & 31) >> 2, warp = threadIdx.x >> 5, stages = inner / Q8_COLUMNS;
    const int tiles = (rows + rows2) / 16, per_tile = (stages + WARPS - 1) / WARPS;
    const int begin = (int)((i64)tiles * block / blocks), end = (int)((i64)tiles * (block + 1) / blocks);
    const i64 bytes = (i64)stages * Q8_BYTES;
    u8* own = reinterpret_cast<u8*>(memory) + warp * (DEPTH * Q8_STAGE);
    int wanted = begin * 16, at_wanted = warp, into = 0;  // what is requested next
    const int lane = threadIdx.x & 31;
    u64* arrived = barriers + warp * DEPTH;
    u32 phases = 0;  // a bit per stage, of the phase to wait for
    if (DIGITS) {
        if (lane < DEPTH) barrier_init(arrived + lane);
        fence_barriers();
        __syncwarp();
    }
    auto request = [&] {
        if (wanted < end * 16 && at_wanted < stages) {
            const u8* from = wanted < rows ? codes + wanted * bytes : codes2 + (wanted - rows) * bytes;
            from += (i64)at_wanted * Q8_BYTES;
            if constexpr (DIGITS) {
                if (lane == 0) barrier_expect(arrived + into, Q8_STAGE);
                __syncwarp();
                if (lane < 16)
                    copy_bulk(own + into * Q8_STAGE + lane * Q8_BYTES, from + lane * bytes, Q8_BYTES, arrived + into);
            } else copy_rows<Q8_BYTES>(own + into * Q8_STAGE, from, bytes);
        }
        if (!DIGITS) commit_copies();
        if (++into == DEPTH) into = 0;
        if ((at_wanted += WARPS) >= per_tile * WARPS) at_wanted = warp, wanted += 16;
    };
#pragma unroll
    for (int i = 0; i < DEPTH; i++) request();
    grid_dependency_wait();
    bool valid[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) valid[t] = t * 8 + g < n;
    int slot = 0, split = -1;
    uint4* digits = memory + WARPS * DEPTH * (Q8_STAGE / 16);
    float* factors = reinterpret_cast<float*>(digits + stages * DIGIT_WORDS);
    for (int tile = begin; tile < end; tile++) {
        float acc[1][NT][4] = {};
        if (DIGITS && split != (group ? tile * 16 / group : 0)) {  // all warps are beyond their last product
            split = group ? tile * 16 / group : 0;
            split_inputs<Q8_DIGITS, WARPS, true>(digits, factors, xh + (i64)split * inner, inner);
            __syncthreads();
        }
        const u16* x[NT];
#pragma unroll
        for (int t = 0; t < NT; t++)
            x[t] = xh + (group ? (i64)(tile * 16 / group) * inner : 0) + (i64)(t * 8 + g) * x_stride;
        for (int at = warp; at < per_tile * WARPS; at += WARPS) {
            if (!DIGITS) wait_for_copies<DEPTH - 1>();
            if (at < stages) {
                if constexpr (DIGITS) {
                    barrier_wait(arrived + slot, phases >> slot & 1);
                    phases ^= 1u << slot;
                    multiply_q8_digits_stage(acc[0][0], own + slot * Q8_STAGE, digits + at * DIGIT_WORDS, factors[at]);
                } else multiply_q8_stage<NT, 1>(acc, own + slot * Q8_STAGE, x, valid, at * Q8_COLUMNS);
            }
            __syncwarp();
            request();
            if (++slot == DEPTH) slot = 0;
        }
        if (DIGITS)
#pragma unroll
            for (int i = 0; i < 4; i += 2) acc[0][0][i] += __shfl_xor_sync(~0u, acc[0][0][i], 1);
        float* sums = shared + (tile & 1) * (WARPS * 16 * NT * 8);  // the other one may still be read
        store_partials<NT, 1, WARPS>(sums, acc);
        for (int i = threadIdx.x; i < 16 * NT * 8; i += WARPS * 32) {
            const int r = i & 15, t = i >> 4;
            if (t < n)
                store_as(out + (i64)t * out_stride + tile * 16 + r,
                         sum_partials<WARPS>(sums, r * (NT * 8) + t, 16 * NT * 8));
        }
    }
}
