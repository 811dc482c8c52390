// Enough of CUDA to run a thread block of our kernels on a CPU: a thread per CUDA thread, barriers for warps and blocks.
// Functions with inline PTX are left out of the kernels' sources and defined here.
#pragma once
#include <algorithm>
#include <barrier>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
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

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
struct longlong2 { long long x, y; };
struct float2 { float x, y; };
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
    Fragments& all = fragments[threadIdx.x >> 5];
    all.a[threadIdx.x & 31][0] = v;
    __syncwarp();
    for (int lane = 0; lane < 32; lane++) v = std::max(v, all.a[lane][0]);
    __syncwarp();
    return v;
}
inline int __float2int_rn(float v) { return (int)std::nearbyint(v); }

inline float __shfl_xor_sync(unsigned, float v, int by) {
    const int lane = threadIdx.x & 31;
    Fragments& all = fragments[threadIdx.x >> 5];
    all.value[lane] = v;
    __syncwarp();
    v = all.value[lane ^ by];
    __syncwarp();
    return v;
}
template <typename T> T __shfl_sync(unsigned, T v, int from) {
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

// Only other kernels use these, so they are declared and never called.
unsigned __reduce_min_sync(unsigned, unsigned);
uint2 load_once8(const void*);

// Barriers of bulk copies: a phase ends with one arrival and when all expected bytes were copied.
struct CopyBarrier { int arrived = 0, bytes = 0, phase = 0; };
static std::map<const void*, CopyBarrier> copy_barriers;
static std::mutex copying;
static std::condition_variable copied;
inline void barrier_change(uint64_t* at, int arrivals, int bytes) {
    std::lock_guard held(copying);
    CopyBarrier& barrier = copy_barriers[at];
    barrier.arrived += arrivals;
    barrier.bytes += bytes;
    if (barrier.arrived == 1 && barrier.bytes == 0) barrier.arrived = 0, barrier.phase++;
    copied.notify_all();
}
inline void barrier_init(unsigned long long* at) {
    std::lock_guard held(copying);
    copy_barriers[at] = {};
}
inline void fence_barriers() {}
inline void barrier_expect(unsigned long long* at, int bytes) { barrier_change((uint64_t*)at, 1, bytes); }
inline void copy_bulk(unsigned char* into, const unsigned char* from, int bytes, unsigned long long* at) {
    memcpy(into, from, bytes);
    barrier_change((uint64_t*)at, 0, -bytes);
}
inline void barrier_wait(unsigned long long* at, int parity) {
    std::unique_lock held(copying);
    copied.wait(held, [&] { return (copy_barriers[at].phase & 1) != parity; });
}
inline void copy_async16(unsigned char* into, const unsigned char* from) { memcpy(into, from, 16); }
inline void copy16(unsigned char* into, const void* from) { memcpy(into, from, 16); }
inline void copy_or_zero16(unsigned char* into, const void* from, bool valid) {
    valid ? memcpy(into, from, 16) : memset(into, 0, 16);
}
static std::vector<std::vector<const unsigned char*>> matrix_rows(32, std::vector<const unsigned char*>(32));
inline uint4 load_matrices(const unsigned char* row) {  // ldmatrix.x4: word q of row g of each
    const int lane = threadIdx.x & 31;
    auto& rows = matrix_rows[threadIdx.x >> 5];
    rows[lane] = row;
    __syncwarp();
    unsigned words[4];
    for (int i = 0; i < 4; i++) memcpy(words + i, rows[i * 8 + (lane >> 2)] + (lane & 3) * 4, 4);
    __syncwarp();
    return {words[0], words[1], words[2], words[3]};
}
inline void commit_copies() {}
template <int PENDING> void wait_for_copies() { __syncwarp(); }
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
