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

// Inputs as digits, and a factor per 256 columns. A lane has eight columns in the order of FP4; `TYPE::put` stores a digit
// of them. Inputs that are not finite make the factor NaN.
template <typename TYPE, int WARPS>
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
        for (int i = 0; i < 4; i++) {  // columns (0, 2), (4, 6), (1, 3), (5, 7)
            const float2 two = f16x2_to_floats(word(eight, i));
            const int first = 4 * (i & 1) + (i >> 1), second = first + 2;
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
