// Enough of CUDA to run our kernels on a CPU, with the threads of threads_on_cpu.h. Functions with inline PTX are left out
// of the kernels' sources and defined here.
//
// Asynchronous copies are as slow as the hardware allows them to be: what a request will write is junk until the thread
// has waited for it, so a kernel that reads earlier computes wrong numbers. Compiled with ThreadSanitizer
// (test_sanitizers.py), threads are ordered by what orders them on a GPU and nothing else: barriers, and not the exchange
// of registers between the lanes of a warp.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include "threads_on_cpu.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;
#define threadIdx (self().index)
#define blockIdx (self().block_index)
#define gridDim (self().block->grid->size)

template <typename T> T __ldcg(const T* p) { return *p; }
template <typename T> T __ldg(const T* p) { return *p; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline float __expf(float v) { return v != v ? NAN : std::exp(v); }  // a GPU makes no NaN with a sign
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline long long __double_as_longlong(double v) {
    long long bits;
    memcpy(&bits, &v, 8);
    return bits;
}
inline double __longlong_as_double(long long bits) {
    double v;
    memcpy(&v, &bits, 8);
    return v;
}
inline void prefetch(const void* p) { (void)*static_cast<const volatile unsigned char*>(p); }
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
template <typename T> unsigned bf16_bits(T v) {  // the nearest one, ties to even; some sources have their own
    unsigned bits;
    memcpy(&bits, &v, 4);
    return v != v ? 0x7fff : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
inline unsigned bf16_pair(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline unsigned f16_bits(float v) { return bits_of((_Float16)v); }
inline unsigned f16_pair(float low, float high) { return f16_bits(low) | f16_bits(high) << 16; }
inline float f16_value(unsigned short bits) { return (float)f16_of(bits); }
template <typename T> requires requires(T v) { v.bits; } void store_as(T* p, float v) { p->bits = bf16_bits(v); }
inline float fast_exp(float v) {  // ex2.approx.ftz
    const float r = std::exp2(v * 1.44269504f);
    return r < 1.17549435e-38f ? 0.f : r;
}
inline uint2 e4m3x4_to_f16x4(unsigned four);

// mma.m16n8k16: row.col, float16 or bfloat16 inputs. Each lane computes its own four results.
template <bool BF16>
UNSEEN void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    Lanes& all = lanes();
    unsigned *const a = all.a[lane], *const b = all.b[lane];
    a[0] = a0, a[1] = a1, a[2] = a2, a[3] = a3, b[0] = b0, b[1] = b1;
    exchanged();
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
}

inline void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    mma<true>(c, a0, a1, a2, a3, b0, b1);
}

// mma.m16n8k32 of bytes: signed or unsigned A, signed B.
template <bool SIGNED>
UNSEEN void mma_bytes(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    Lanes& all = lanes();
    unsigned *const a = all.a[lane], *const b = all.b[lane];
    a[0] = a0, a[1] = a1, a[2] = a2, a[3] = a3, b[0] = b0, b[1] = b1;
    exchanged();
    for (int i = 0; i < 4; i++) {
        const int upper = i >> 1, column = 2 * q + (i & 1);
        for (int k = 0; k < 32; k++) {
            const int owner = (k & 15) >> 2, by = 8 * (k & 3), second = k >> 4;
            const unsigned left = all.a[g * 4 + owner][upper + 2 * second] >> by & 255;
            c[i] += (SIGNED ? (int)(int8_t)left : (int)left) * (int8_t)(all.b[column * 4 + owner][second] >> by);
        }
    }
}

// Exchanges between the lanes of a warp, all of which take part. `value_of_lane` reads what another one has handed over.
template <typename T> UNSEEN T value_of_lane(const Lanes& all, int lane) {
    T value;
    memcpy(&value, &all.value[lane], sizeof(T));
    return value;
}
template <typename T> UNSEEN const Lanes& hand_over(unsigned mask, T value) {
    if (mask != ~0u) fail("only whole warps exchange registers here");
    Lanes& all = lanes();
    memcpy(&all.value[threadIdx.x & 31], &value, sizeof(T));
    exchanged();
    return all;
}
template <typename T> T __shfl_sync(unsigned mask, T v, int from) {
    return value_of_lane<T>(hand_over(mask, v), from & 31);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T v, int by) {
    return value_of_lane<T>(hand_over(mask, v), (threadIdx.x & 31) ^ by);
}
template <typename T> T __shfl_up_sync(unsigned mask, T v, int by) {
    const int lane = threadIdx.x & 31;
    return value_of_lane<T>(hand_over(mask, v), lane >= by ? lane - by : lane);
}
template <typename JOIN> unsigned reduce_lanes(unsigned mask, unsigned v, const JOIN& join) {
    const Lanes& all = hand_over(mask, v);
    unsigned result = value_of_lane<unsigned>(all, 0);
    for (int lane = 1; lane < 32; lane++) result = join(result, value_of_lane<unsigned>(all, lane));
    return result;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) {
    return reduce_lanes(mask, v, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) {
    return reduce_lanes(mask, v, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) {
    return reduce_lanes(mask, v, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __ballot_sync(unsigned mask, bool v) {
    return reduce_lanes(mask, (unsigned)v << (threadIdx.x & 31), [](unsigned a, unsigned b) { return a | b; });
}
inline int __float2int_rn(float v) { return (int)std::nearbyint(v); }
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
inline uint4 load_once16(const void* p) { return *static_cast<const uint4*>(p); }
inline uint2 load_once8(const void* p) { return *static_cast<const uint2*>(p); }

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
    wake(at);
}
inline void barrier_start(uint64_t* at, int arrivals) {
    const BarrierState state{0, (uint64_t)arrivals, (uint64_t)arrivals, 0};
    memcpy(at, &state, 8);
}
inline void barrier_await(uint64_t* at, unsigned parity) {
    std::atomic_ref<uint64_t> word(*at);
    while ((word.load(std::memory_order_acquire) & 1) == parity) park(at);
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

// Asynchronous copies of this thread; zeros from a null pointer.
inline void request_copy(unsigned char* into, const void* from, int bytes) {
    require_multiple(into, bytes);
    require_multiple(from, bytes);
    memset(into, 0xFF, bytes);
    self().copies.add([=] { from ? memcpy(into, from, bytes) : memset(into, 0, bytes); });
}
inline void commit_requests() { self().copies.commit(); }
inline void await_requests(int pending) { self().copies.await(pending); }
inline void copy_async16(unsigned char* into, const unsigned char* from) { request_copy(into, from, 16); }
inline void copy16(unsigned char* into, const void* from) { request_copy(into, from, 16); }
inline void copy_or_zero16(unsigned char* into, const void* from, bool valid) {
    request_copy(into, valid ? from : nullptr, 16);
}
// ldmatrix.x4: four tiles of eight rows of eight numbers, a row for each lane. Lane (g, q) gets numbers 2 q and 2 q + 1 of
// row g of each; transposed, number g of rows 2 q and 2 q + 1.
inline void load_tiles(unsigned (&words)[4], const void* row, bool transposed) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    require_multiple(row, 16);
    const Lanes& all = hand_over(~0u, static_cast<const unsigned char*>(row));
    for (int i = 0; i < 4; i++) {
        unsigned short both[2];
        for (int side = 0; side < 2; side++) {
            const int from = transposed ? 2 * q + side : g, column = transposed ? g : 2 * q + side;
            memcpy(both + side, value_of_lane<const unsigned char*>(all, i * 8 + from) + 2 * column, 2);
        }
        words[i] = both[0] | (unsigned)both[1] << 16;
    }
}
inline uint4 load_matrices(const unsigned char* row) {
    unsigned words[4];
    load_tiles(words, row, false);
    return {words[0], words[1], words[2], words[3]};
}
inline void ldmatrix_x4(unsigned (&r)[4], const void* row) { load_tiles(r, row, false); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) { load_tiles(r, row, true); }
inline void cp_async16(void* into, const void* from, bool valid) {
    request_copy(static_cast<unsigned char*>(into), valid ? from : nullptr, 16);
}
inline void cp_async_commit() { commit_requests(); }
template <int PENDING> void cp_async_wait() { await_requests(PENDING); }
inline void commit_copies() { commit_requests(); }
template <int PENDING> void wait_for_copies() { await_requests(PENDING); }

// Stores to the shared memory of another block of the cluster.
template <int BLOCKS> struct ClusterExchange {
    uint2 values[2][BLOCKS];
    void send(int round, int rank, int to, uint2 v) {
        *reinterpret_cast<uint2*>(remote_shared(&values[round & 1][rank], to, sizeof v)) = v;
    }
};
inline void store_remote(void* at, int rank, unsigned long long low, unsigned long long high) {
    *reinterpret_cast<ulonglong2*>(remote_shared(at, rank, 16)) = {low, high};
}
template <int COUNT> void refresh(float (&)[COUNT]) {}

// Run `kernel` for some blocks of a grid, one block at a time: kernels whose shared memory is that of all blocks.
template <typename KERNEL>
void run_blocks(Place grid, const int (*blocks)[2], int count, int threads, const KERNEL& kernel) {
    for (int i = 0; i < count; i++) {
        std::vector<std::unique_ptr<Grid>> launch(1);
        launch[0] = std::make_unique<Grid>(Grid{.size = grid, .threads = threads, .kernel = kernel});
        add_block(*launch[0], {blocks[i][0], blocks[i][1], 0});
        run_chain(launch, i);
    }
}
