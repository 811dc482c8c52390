// What kernels for Hopper's matrix instructions need beside cuda_on_cpu.h. A product is computed at once by each warp;
// copies are complete when they return; a barrier of a stage counts arrivals as the hardware does.
#pragma once
#include "cuda_on_cpu.h"
#include <condition_variable>
#include <mutex>

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
static std::mutex guard;
template <typename T, typename V> void atomicMax(T* p, V v) {
    std::lock_guard<std::mutex> held(guard);
    if (static_cast<T>(v) > *p) *p = v;
}

// Barriers of named groups of threads, and those of stages, by address.
static std::unique_ptr<std::barrier<>> multiplying, copiers, groups[2];
struct StageBarrier { int arrivals = 0, pending = 0; unsigned phase = 0; };
static StageBarrier stage_barriers[64];
static std::condition_variable changed;
inline StageBarrier& stage_barrier(unsigned address) { return stage_barriers[address / 8 % 64]; }
inline void barrier_init(unsigned address, int arrivals) { stage_barrier(address) = {arrivals, arrivals, 0}; }
inline void barrier_arrive(unsigned address) {
    std::lock_guard<std::mutex> held(guard);
    StageBarrier& barrier = stage_barrier(address);
    if (--barrier.pending == 0) {
        barrier.pending = barrier.arrivals;
        barrier.phase++;
        changed.notify_all();
    }
}
inline void barrier_wait(unsigned address, unsigned parity) {
    std::unique_lock<std::mutex> held(guard);
    changed.wait(held, [&] { return (stage_barrier(address).phase & 1) != parity; });
}
inline void sync_multiplying() { multiplying->arrive_and_wait(); }
inline void sync_copying() { copiers->arrive_and_wait(); }
inline void sync_group(int group) { groups[group]->arrive_and_wait(); }
inline void fewer_registers() {}
inline void more_registers() {}
inline void fence_async_proxy() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
inline void wgmma_wait_all() {}
template <int COUNT> void hold(float (&)[COUNT]) {}
template <int PENDING, int COUNT> void wait_for_products(float (&)[4][COUNT]) {}

inline void copy16(unsigned to, const void* from) { memcpy(memory + to, from, 16); }
inline void copy16_of_line(unsigned to, const void* from) { memcpy(memory + to, from, 16); }
inline void copy4(unsigned to, const void* from) { memcpy(memory + to, from, 4); }
inline void copy8(unsigned to, const void* from) { memcpy(memory + to, from, 8); }
inline void copy_or_zero16(unsigned to, const void* from, bool valid) {
    valid ? memcpy(memory + to, from, 16) : memset(memory + to, 0, 16);
}
inline void copies_commit() {}
template <int PENDING> void copies_wait() {}
inline unsigned permute(unsigned a, unsigned b, unsigned selector) { return __byte_perm(a, b, selector); }

struct E4M3 {
    float values[256];
    E4M3() {
        for (int code = 0; code < 256; code++) values[code] = (float)e4m3_to_f16(code);
    }
};
static const E4M3 e4m3;
inline float of_e4m3(unsigned code) { return e4m3.values[code]; }
inline unsigned e4m3_code(float v) {  // the nearest one, ties to even
    const float magnitude = std::fabs(v);
    unsigned best = 0;
    for (unsigned code = 1; code < 127; code++) {
        const float off = std::fabs(of_e4m3(code) - magnitude), least = std::fabs(of_e4m3(best) - magnitude);
        if (off < least || (off == least && code % 2 == 0)) best = code;
    }
    return best | (v < 0 ? 128 : 0);
}
inline unsigned digit_code(float v) { return e4m3_code(v); }

// D[64, N] += A[64, 32] B[32, N]: the rows of a warp are its own, B is at the address of its descriptor, swizzled.
template <int N>
void wgmma_e4m3(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, int sum) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    Fragments& all = fragments[threadIdx.x >> 5];
    std::copy(a, a + 4, all.a[lane]);
    __syncwarp();
    const unsigned start = (unsigned)(b & 0x3FFF) << 4;
    for (int i = 0; i < N / 2; i++) {
        const int n = i / 4 * 8 + 2 * t + i % 2, upper = i % 4 / 2;
        double total = sum ? d[i] : 0.0;
        for (int k = 0; k < 32; k++) {
            const unsigned code = all.a[g * 4 + k % 16 / 4][upper + k / 16 * 2] >> 8 * (k % 4) & 255;
            unsigned at = start + n * 128 + k;
            at ^= (at >> 7 & 7) << 4;
            if (!(b >> 62)) at = start + k / 16 * ((b >> 16 & 0x3FFF) << 4) + n / 8 * 128 + n % 8 * 16 + k % 16;
            total += (double)of_e4m3(code) * of_e4m3(memory[at]);
        }
        d[i] = (float)total;
    }
    __syncwarp();
}

// One block of a grid of persistent blocks.
template <typename KERNEL> void run_roles(int threads, Place block, int grid, const KERNEL& kernel) {
    multiplying = std::make_unique<std::barrier<>>(256);
    copiers = std::make_unique<std::barrier<>>(threads - 256);
    for (auto& each : groups) each = std::make_unique<std::barrier<>>(128);
    const int chosen[1][2] = {{block.x, block.y}};
    run_blocks({grid, 1}, chosen, 1, threads, kernel);
}
