// Matrix instructions of Hopper (sm_90a) for a warp group of 128 threads: D[64, N] += A[64, 32] B[32, N], E4M3 inputs,
// float32 sums. A is in registers; B is in shared memory, N rows of 128 bytes of which a product reads 32, in the
// layout with 128-byte swizzle: the 16 bytes c of row n are stored as 16 bytes c ^ (n % 8).
//
// Fragments: lane = 4 g + t of warp q holds rows 16 q + g and 16 q + g + 8. a[0] and a[1] are columns 4 t .. 4 t + 3 of
// these two rows, a[2] and a[3] columns 16 + 4 t ..; d[4 j], d[4 j + 1] are columns 8 j + 2 t, 8 j + 2 t + 1 of the
// first row, d[4 j + 2], d[4 j + 3] of the second one.

#pragma once

#include "common.cuh"

// Order the writes of registers by this thread before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Descriptor of B: rows of 128 bytes at `address`, which is a multiple of 1024 (plus 32 bytes per product of a row).
__device__ __forceinline__ u64 b_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Descriptor of B without swizzle: tiles of eight rows of 16 bytes follow each other, all those of one 16 columns first.
template <int N>
__device__ __forceinline__ u64 plain_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)(N * 16 >> 4) << 16 | (u64)(128 >> 4) << 32;
}

// `sum` 0: D = A B.
template <int N>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[N / 2], const u32 (&a)[4], u64 b, int sum);

// The specialisations. Operands of a statement are numbered in order: first the sums, by sixteens, then A, B and `sum`.
#define SUMS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_1 SUMS_0 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_2 SUMS_1 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_3 SUMS_2 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FIRST_4 "%0, %1, %2, %3"
#define FIRST_8 FIRST_4 ", %4, %5, %6, %7"
#define NEXT_2 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NEXT_3 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
#define WGMMA_E4M3(N, SUMS, INPUTS, SUM, ...)                                                            \
    template <>                                                                                          \
    __device__ __forceinline__ void wgmma_e4m3<N>(float (&d)[N / 2], const u32 (&a)[4], u64 b, int sum) { \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " SUM ", 0; wgmma.mma_async.sync.aligned.m64n" #N    \
                     "k32.f32.e4m3.e4m3 {" SUMS "}, " INPUTS ", p, 1, 1;}"                               \
                     : __VA_ARGS__                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(sum));                    \
    }

WGMMA_E4M3(8, FIRST_4, "{%4, %5, %6, %7}, %8", "%9", FOUR(0))
WGMMA_E4M3(16, FIRST_8, "{%8, %9, %10, %11}, %12", "%13", EIGHT(0))
WGMMA_E4M3(32, SUMS_0, "{%16, %17, %18, %19}, %20", "%21", SIXTEEN(0))
WGMMA_E4M3(64, SUMS_1, "{%32, %33, %34, %35}, %36", "%37", SIXTEEN(0), SIXTEEN(16))
WGMMA_E4M3(80, SUMS_1 NEXT_2, "{%40, %41, %42, %43}, %44", "%45", SIXTEEN(0), SIXTEEN(16), EIGHT(32))
WGMMA_E4M3(96, SUMS_2, "{%48, %49, %50, %51}, %52", "%53", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32))
WGMMA_E4M3(112, SUMS_2 NEXT_3, "{%56, %57, %58, %59}, %60", "%61", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), EIGHT(48))
WGMMA_E4M3(128, SUMS_3, "{%64, %65, %66, %67}, %68", "%69", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48))
