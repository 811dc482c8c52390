// What kernels for Hopper's matrix instructions need beside cuda_on_cpu.h. A product reads its operands, also those in
// registers, when its warp waits for it; before that its results are not numbers.
#pragma once
#include "cuda_on_cpu.h"

typedef unsigned char u8;
alignas(1024) static u8 memory[256 * 1024];

inline size_t __cvta_generic_to_shared(const void* p) { return static_cast<const u8*>(p) - memory; }
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
template <typename PICK> unsigned by_byte(unsigned a, unsigned b, PICK pick) {
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8) r |= pick(a >> i & 255, b >> i & 255) << i;
    return r;
}
inline unsigned __vmaxu4(unsigned a, unsigned b) {
    return by_byte(a, b, [](unsigned x, unsigned y) { return x > y ? x : y; });
}
inline unsigned __vminu4(unsigned a, unsigned b) {
    return by_byte(a, b, [](unsigned x, unsigned y) { return x < y ? x : y; });
}
template <typename T, typename V> void atomicMax(T* p, V v) {
    std::atomic_ref<T> value(*p);
    T before = value.load(std::memory_order_relaxed);
    while (static_cast<T>(v) > before && !value.compare_exchange_weak(before, v, std::memory_order_relaxed)) {
    }
}

// Barriers of named groups of threads, and those of stages, by address.
static Barrier multiplying, copiers, groups[2];
inline uint64_t* barrier_at(unsigned address) { return reinterpret_cast<uint64_t*>(memory + address); }
inline void barrier_init(unsigned address, int arrivals) { barrier_start(barrier_at(address), arrivals); }
inline void barrier_arrive(unsigned address) { barrier_change(barrier_at(address), 1, 0); }
inline void barrier_wait(unsigned address, unsigned parity) { barrier_await(barrier_at(address), parity); }
inline void sync_multiplying() { arrive_and_wait(multiplying); }
inline void sync_copying() { arrive_and_wait(copiers); }
inline void sync_group(int group) { arrive_and_wait(groups[group]); }
inline void fewer_registers() {}
inline void more_registers() {}
inline void fence_async_proxy() {}

// Matrix products of this thread.
inline void wgmma_fence() {}
inline void wgmma_commit() { self().products.commit(); }
inline void await_products(int pending) { self().products.await(pending); }
inline void wgmma_wait_all() { await_products(0); }
template <int COUNT> void hold(float (&)[COUNT]) {}
template <int PENDING, int COUNT> void wait_for_products(float (&)[4][COUNT]) { await_products(PENDING); }

inline void copy16(unsigned to, const void* from) { request_copy(memory + to, from, 16); }
inline void copy16_of_line(unsigned to, const void* from) { request_copy(memory + to, from, 16); }
inline void copy4(unsigned to, const void* from) { request_copy(memory + to, from, 4); }
inline void copy8(unsigned to, const void* from) { request_copy(memory + to, from, 8); }
inline void copy_or_zero16(unsigned to, const void* from, bool valid) {
    request_copy(memory + to, valid ? from : nullptr, 16);
}
inline void copies_commit() { commit_requests(); }
template <int PENDING> void copies_wait() { await_requests(PENDING); }
inline unsigned permute(unsigned a, unsigned b, unsigned selector) { return __byte_perm(a, b, selector); }

// D[64, N] += A[64, 32] B[32, N]: the rows of a warp are its own, B is at the address of its descriptor, swizzled.
UNSEEN inline void rows_of_lanes(unsigned (&rows)[4][4], const unsigned (&a)[4]) {  // of the four lanes of a row
    const int lane = threadIdx.x & 31;
    Lanes& all = lanes();
    for (int i = 0; i < 4; i++) all.a[lane][i] = a[i];
    exchanged();
    for (int i = 0; i < 16; i++) rows[i / 4][i % 4] = all.a[(lane >> 2) * 4 + i / 4][i % 4];
}
template <int N> void product_e4m3(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, int sum) {
    const int lane = threadIdx.x & 31, t = lane & 3;
    unsigned rows[4][4];
    rows_of_lanes(rows, a);
    const unsigned start = (unsigned)(b & 0x3FFF) << 4;
    for (int i = 0; i < N / 2; i++) {
        const int n = i / 4 * 8 + 2 * t + i % 2, upper = i % 4 / 2;
        double total = sum ? d[i] : 0.0;
        for (int k = 0; k < 32; k++) {
            const unsigned code = rows[k % 16 / 4][upper + k / 16 * 2] >> 8 * (k % 4) & 255;
            unsigned at = start + n * 128 + k;
            at ^= (at >> 7 & 7) << 4;
            if (!(b >> 62)) at = start + k / 16 * ((b >> 16 & 0x3FFF) << 4) + n / 8 * 128 + n % 8 * 16 + k % 16;
            total += (double)of_e4m3(code) * of_e4m3(memory[at]);
        }
        d[i] = (float)total;
    }
}
template <int N> void wgmma_e4m3(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, int sum) {
    if (!sum) std::fill(d, d + N / 2, NAN);
    self().products.add([&d, &a, b, sum] { product_e4m3<N>(d, a, b, sum); });
}

// One block of a grid of persistent blocks.
template <typename KERNEL> void run_roles(int threads, Place block, int grid, const KERNEL& kernel) {
    multiplying = {.expected = 256};
    copiers = {.expected = threads - 256};
    for (Barrier& each : groups) each = {.expected = 128};
    const int chosen[1][2] = {{block.x, block.y}};
    run_blocks({grid, 1}, chosen, 1, threads, kernel);
}
