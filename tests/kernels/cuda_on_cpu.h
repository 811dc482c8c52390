// Enough of CUDA to run a thread block of our kernels on a CPU: a thread per CUDA thread, barriers for warps and blocks.
// Functions with inline PTX are left out of the kernels' sources and defined here.
//
// Asynchronous copies are as slow as the hardware allows them to be: what a request will write is junk until the thread
// has waited for it, so a kernel that reads earlier computes wrong numbers. Compiled with ThreadSanitizer
// (test_sanitizers.py), threads are ordered by what orders them on a GPU and nothing else: barriers, and not the exchange
// of registers between the lanes of a warp.
#pragma once
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) longlong2 { long long x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Place { int x, y; };
static Place gridDim;
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;
static thread_local Place threadIdx, blockIdx;

struct Fragments { unsigned a[32][4], b[32][2]; float value[32]; };
static std::unique_ptr<std::barrier<>> block_barrier;
static std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
static std::vector<Fragments> fragments;

inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __syncwarp() { warp_barriers[threadIdx.x >> 5]->arrive_and_wait(); }

// Lanes exchange registers within the life of this object: that orders none of their accesses to memory.
#ifdef __SANITIZE_THREAD__
extern "C" void AnnotateIgnoreSyncBegin(const char*, int);
extern "C" void AnnotateIgnoreSyncEnd(const char*, int);
extern "C" void AnnotateIgnoreReadsBegin(const char*, int);
extern "C" void AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int);
extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
struct Exchange {
    Exchange() {
        AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~Exchange() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
        AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    }
};
#else
struct Exchange {
    ~Exchange() {}
};
#endif
template <typename T> T __ldcg(const T* p) { return *p; }
template <typename T> T __ldg(const T* p) { return *p; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline float __expf(float v) { return std::exp(v); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return (unsigned)((((uint64_t)high << 32 | low) << (by & 31)) >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(bytes >> (8 * (selectors >> (4 * i) & 7)) & 255) << (8 * i);
    return r;
}
inline unsigned select_bytes(unsigned a, unsigned b, unsigned selector) { return __byte_perm(a, b, selector); }

inline _Float16 f16_of(unsigned bits) {
    const uint16_t half = (uint16_t)bits;
    _Float16 f;
    memcpy(&f, &half, 2);
    return f;
}
inline unsigned bits_of(_Float16 f) {
    uint16_t half;
    memcpy(&half, &f, 2);
    return half;
}
inline unsigned mul_f16x2(unsigned a, unsigned b) {
    return bits_of(f16_of(a) * f16_of(b)) | bits_of(f16_of(a >> 16) * f16_of(b >> 16)) << 16;
}
inline unsigned sub_f16x2(unsigned a, unsigned b) {
    return bits_of(f16_of(a) - f16_of(b)) | bits_of(f16_of(a >> 16) - f16_of(b >> 16)) << 16;
}
inline float half_at(const unsigned char* p) { return (float)f16_of(*reinterpret_cast<const uint16_t*>(p)); }
inline float2 f16x2_to_floats(unsigned two) { return {(float)f16_of(two), (float)f16_of(two >> 16)}; }
inline float store_f16(unsigned short* p, float v) {
    *p = (unsigned short)bits_of((_Float16)v);
    return (float)f16_of(*p);
}
inline void store_as(unsigned short* p, float v) { store_f16(p, v); }
inline void store_as(float* p, float v) { *p = v; }

inline float bf16_of(unsigned bits) {
    const unsigned wide = bits << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
}
inline uint2 e4m3x4_to_f16x4(unsigned four);

// mma.m16n8k16: row.col, float16 or bfloat16 inputs. Each lane computes its own four results.
template <bool BF16>
void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    Exchange registers;
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    Fragments& all = fragments[threadIdx.x >> 5];
    const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    std::copy(a, a + 4, all.a[lane]);
    std::copy(b, b + 2, all.b[lane]);
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const int upper = i >> 1, column = 2 * q + (i & 1);  // row g or g + 8
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            const int owner = (k & 7) >> 1, half = 16 * (k & 1), second = k >> 3;
            const unsigned left = all.a[g * 4 + owner][upper + 2 * second] >> half & 0xffff;
            const unsigned right = all.b[column * 4 + owner][second] >> half & 0xffff;
            sum += BF16 ? (double)bf16_of(left) * bf16_of(right) : (double)f16_of(left) * (double)f16_of(right);
        }
        c[i] = (float)sum;
    }
    __syncwarp();
}

// mma.m16n8k32 of bytes: signed or unsigned A, signed B.
template <bool SIGNED>
void mma_bytes(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    Exchange registers;
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    Fragments& all = fragments[threadIdx.x >> 5];
    const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    std::copy(a, a + 4, all.a[lane]);
    std::copy(b, b + 2, all.b[lane]);
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const int upper = i >> 1, column = 2 * q + (i & 1);
        for (int k = 0; k < 32; k++) {
            const int owner = (k & 15) >> 2, by = 8 * (k & 3), second = k >> 4;
            const unsigned left = all.a[g * 4 + owner][upper + 2 * second] >> by & 255;
            c[i] += (SIGNED ? (int)(int8_t)left : (int)left) * (int8_t)(all.b[column * 4 + owner][second] >> by);
        }
    }
    __syncwarp();
}

inline unsigned __reduce_max_sync(unsigned, unsigned v) {
    Exchange registers;
    Fragments& all = fragments[threadIdx.x >> 5];
    all.a[threadIdx.x & 31][0] = v;
    __syncwarp();
    for (int lane = 0; lane < 32; lane++) v = std::max(v, all.a[lane][0]);
    __syncwarp();
    return v;
}
inline int __float2int_rn(float v) { return (int)std::nearbyint(v); }

inline float __shfl_xor_sync(unsigned, float v, int by) {
    Exchange registers;
    const int lane = threadIdx.x & 31;
    Fragments& all = fragments[threadIdx.x >> 5];
    all.value[lane] = v;
    __syncwarp();
    v = all.value[lane ^ by];
    __syncwarp();
    return v;
}
template <typename T> T __shfl_sync(unsigned, T v, int from) {
    Exchange registers;
    Fragments& all = fragments[threadIdx.x >> 5];
    memcpy(&all.value[threadIdx.x & 31], &v, 4);
    __syncwarp();
    memcpy(&v, &all.value[from], 4);
    __syncwarp();
    return v;
}
inline float __uint_as_float(unsigned bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
inline unsigned __float_as_uint(float f) {
    unsigned bits;
    memcpy(&bits, &f, 4);
    return bits;
}
inline _Float16 e4m3_to_f16(unsigned code) {  // the bits shifted into place are the value times 2^-8
    return f16_of((code & 0x80) << 8 | (code & 0x7f) << 7) * (_Float16)256;
}
inline unsigned e4m3x2_to_f16x2(unsigned two) {
    return bits_of(e4m3_to_f16(two & 255)) | bits_of(e4m3_to_f16(two >> 8 & 255)) << 16;
}
inline uint2 e4m3x4_to_f16x4(unsigned four) { return {e4m3x2_to_f16x2(four), e4m3x2_to_f16x2(four >> 16)}; }
inline uint4 load_once16(const void* p) { return *static_cast<const uint4*>(p); }
inline uint2 load_once8(const void* p) { return *static_cast<const uint2*>(p); }

unsigned __reduce_min_sync(unsigned, unsigned);  // only other kernels call it

inline void require_multiple(const void* p, int bytes) {
    if ((size_t)p % bytes == 0) return;
    fprintf(stderr, "an address of %d bytes is not a multiple of that\n", bytes);
    abort();
}

// A barrier in shared memory (mbarrier). Its eight bytes hold the phase, the arrivals that a phase takes, those that it
// still takes, and the bytes that it still takes.
struct BarrierState {
    uint64_t phase : 8, arrivals : 12, pending : 12;
    int64_t bytes : 32;
};
inline void barrier_change(uint64_t* at, int arrivals, int bytes) {
    std::atomic_ref<uint64_t> word(*at);
    uint64_t before = word.load(std::memory_order_relaxed), after;
    do {
        BarrierState state;
        memcpy(&state, &before, 8);
        state.pending -= arrivals;
        state.bytes += bytes;
        if (state.pending == 0 && state.bytes == 0) state.phase++, state.pending = state.arrivals;
        memcpy(&after, &state, 8);
    } while (!word.compare_exchange_weak(before, after, std::memory_order_acq_rel));
    word.notify_all();
}
inline void barrier_start(uint64_t* at, int arrivals) {
    const BarrierState state{0, (uint64_t)arrivals, (uint64_t)arrivals, 0};
    memcpy(at, &state, 8);
}
inline void barrier_await(uint64_t* at, unsigned parity) {
    std::atomic_ref<uint64_t> word(*at);
    for (uint64_t now; ((now = word.load(std::memory_order_acquire)) & 1) == parity;) word.wait(now);
}
inline void barrier_init(unsigned long long* at) { barrier_start((uint64_t*)at, 1); }
inline void fence_barriers() {}
inline void barrier_expect(unsigned long long* at, int bytes) { barrier_change((uint64_t*)at, 1, bytes); }
inline void copy_bulk(unsigned char* into, const unsigned char* from, int bytes, unsigned long long* at) {
    require_multiple(into, 16);
    require_multiple(from, 16);
    require_multiple((const void*)(size_t)bytes, 16);
    memcpy(into, from, bytes);
    barrier_change((uint64_t*)at, 0, -bytes);
}
inline void barrier_wait(unsigned long long* at, int parity) { barrier_await((uint64_t*)at, parity); }

// Asynchronous copies of this thread: the group that is open, and those that were committed.
struct Copy { unsigned char* into; const void* from; int bytes; };  // zeros from a null pointer
static thread_local std::vector<Copy> open_copies;
static thread_local std::deque<std::vector<Copy>> committed_copies;
inline void request_copy(unsigned char* into, const void* from, int bytes) {
    require_multiple(into, bytes);
    require_multiple(from, bytes);
    memset(into, 0xFF, bytes);
    open_copies.push_back({into, from, bytes});
}
inline void commit_requests() {
    committed_copies.push_back(std::move(open_copies));
    open_copies.clear();
}
inline void await_requests(int pending) {
    for (; (int)committed_copies.size() > pending; committed_copies.pop_front())
        for (const Copy& each : committed_copies.front())
            each.from ? memcpy(each.into, each.from, each.bytes) : memset(each.into, 0, each.bytes);
}
inline void copy_async16(unsigned char* into, const unsigned char* from) { request_copy(into, from, 16); }
inline void copy16(unsigned char* into, const void* from) { request_copy(into, from, 16); }
inline void copy_or_zero16(unsigned char* into, const void* from, bool valid) {
    request_copy(into, valid ? from : nullptr, 16);
}
static std::vector<std::vector<const unsigned char*>> matrix_rows(32, std::vector<const unsigned char*>(32));
inline uint4 load_matrices(const unsigned char* row) {  // ldmatrix.x4: word q of row g of each
    const int lane = threadIdx.x & 31;
    auto& rows = matrix_rows[threadIdx.x >> 5];
    require_multiple(row, 16);
    const unsigned char* of_lane[4];
    {
        Exchange registers;
        rows[lane] = row;
        __syncwarp();
        for (int i = 0; i < 4; i++) of_lane[i] = rows[i * 8 + (lane >> 2)];
        __syncwarp();
    }
    unsigned words[4];
    for (int i = 0; i < 4; i++) memcpy(words + i, of_lane[i] + (lane & 3) * 4, 4);
    return {words[0], words[1], words[2], words[3]};
}
inline void commit_copies() { commit_requests(); }
template <int PENDING> void wait_for_copies() { await_requests(PENDING); }
inline void grid_dependency_wait() {}
inline void launch_dependents() {}

// Run `kernel` for some blocks of a grid, one block at a time.
template <typename KERNEL>
void run_blocks(Place grid, const int (*blocks)[2], int count, int threads, const KERNEL& kernel) {
    gridDim = grid;
    block_barrier = std::make_unique<std::barrier<>>(threads);
    warp_barriers.clear();
    for (int i = 0; i < threads / 32; i++) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
    fragments.resize(threads / 32);
    for (int i = 0; i < count; i++) {
        std::vector<std::thread> team;
        for (int t = 0; t < threads; t++)
            team.emplace_back([&, t] {
                threadIdx = {t, 0};
                blockIdx = {blocks[i][0], blocks[i][1]};
                kernel();
            });
        for (std::thread& each : team) each.join();
    }
}
