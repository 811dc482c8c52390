// The kernels of prompt_experts.cu with another main loop: a third group of four warps copies, and the two that multiply
// meet it only at the barriers of a stage. Each of these has two sets of sums, so that products run while the sums
// before are scaled and the next tile is decoded: up to 96 tokens; more do not fit the registers.
//
// Inputs are written by ordinary asynchronous copies and read by the tensor cores, which is another proxy. The copying
// threads await their copies, fence, and arrive at the barrier: the fence costs nothing to those that multiply.

#include "wgmma.cuh"
#include "prompt_common.cuh"

#define COPYING 128
#define THREADS (MULTIPLYING + COPYING)
#define PENDING 2  // stages whose copies are under way while a further one is requested

// Shared memory after the stages.
struct Beside {
    u32* all_scales;  // [width / 128, 256]
    int *largest, *passes_needed;
    u32 full, empty;  // addresses of the barriers, eight bytes per stage
    __device__ __forceinline__ Beside(u8* after_stages, int width) {
        all_scales = (u32*)after_stages;
        largest = (int*)(all_scales + width / 128 * 256);
        passes_needed = largest + 256;
        full = shared_address(passes_needed + 2);
        empty = full + 8 * STAGES;
    }
};

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(barrier) : "memory");
}

// Wait until the phase of this parity is complete.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over: }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void sync_multiplying() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

__device__ __forceinline__ void sync_all() { asm volatile("bar.sync 0, 384;" ::: "memory"); }

__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }

__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

template <int GROUPS>
__device__ __forceinline__ void wgmma_wait_for_all_but() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// No use of these sums moves across this point.
template <int COUNT>
__device__ __forceinline__ void hold(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// The copying threads: stage after stage, as they become empty.
template <int N, class Rows>
__device__ __forceinline__ void copy_stages(const Product& p, u8* shared, const Rows& rows) {
    using S = Stage<N>;
    const Beside beside(shared + STAGES * S::bytes, p.width);
    const int tid = threadIdx.x - MULTIPLYING;
    const int blocks = p.width / 128, row_bytes = p.width / 2;
    const u8* own_codes = p.codes + (i64)rows.of_matrix(tid / 4) * row_bytes + tid % 4 * 16;
    const i64 next_half = (i64)(rows.of_matrix(32) - rows.of_matrix(0)) * row_bytes;
    const i64 next_tile = (i64)(rows.of_matrix(64) - rows.of_matrix(0)) * row_bytes;
    const u32 base = shared_address(shared);
    constexpr int X_COPIES = (N * 8 + COPYING - 1) / COPYING;
    int own_x[X_COPIES];
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) own_x[i] = rows.of_inputs((tid / 8 + 16 * i) % N);
    const float* own_x_scale = p.x_scale + rows.of_inputs(tid % N);

    sync_all();  // barriers are initialised, passes are known
    const int steps = *beside.passes_needed * blocks;
    int block = 0, stage = 0;
    for (int step = 0; step < steps; step++) {
        if (step >= STAGES) barrier_wait(beside.empty + 8 * stage, (step / STAGES - 1) & 1);
        const u32 to = base + stage * S::bytes;
#pragma unroll
        for (int i = 0; i < X_COPIES; i++) {
            const int n = tid / 8 + 16 * i;
            copy16(to + n * 128 + ((tid % 8) ^ (n % 8)) * 16, p.x + (i64)own_x[i] * p.width + block * 128 + tid % 8 * 16);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            copy16_of_line(to + S::codes + (tid + COPYING * i) * 16,
                           own_codes + i / 2 * next_tile + i % 2 * next_half + block * 64);
        if (tid < N) copy4(to + S::x_scale + tid * 4, own_x_scale + (i64)block * p.x_rows);
        copies_commit();
        block = block + 1 == blocks ? 0 : block + 1;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        if (step >= PENDING) {
            copies_wait<PENDING>();
            fence_async_proxy();
            barrier_arrive(beside.full + 8 * ((step - PENDING) % STAGES));
        }
    }
    copies_wait<0>();
    fence_async_proxy();
    for (int step = max(steps - PENDING, 0); step < steps; step++) barrier_arrive(beside.full + 8 * (step % STAGES));
}

// Multiply. Totals of tile m of the calling thread are in units of 2^scale[m][0] and 2^scale[m][1] for its two rows.
template <int N, class Rows>
__device__ __forceinline__ void product(const Product& p, u8* shared, const Rows& rows, float (&total)[2][N / 2],
                                        int (&scale)[2][2]) {
    using S = Stage<N>;
    const Beside beside(shared + STAGES * S::bytes, p.width);
    const int tid = threadIdx.x, group = tid / 128, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int row = group * 128 + (tid % 128) / 32 * 16 + g;  // of the thread in the first of its two tiles
    const int blocks = p.width / 128;
    const u32 base = shared_address(shared);
    if (tid == 0) {
        *beside.passes_needed = 1;
        for (int i = 0; i < STAGES; i++) {
            barrier_init(beside.full + 8 * i, COPYING);
            barrier_init(beside.empty + 8 * i, MULTIPLYING);
        }
    }
    sync_multiplying();
    scan_scales(p.scales + (i64)rows.of_matrix(tid) * (p.width / 32), blocks, beside.all_scales, beside.largest,
                beside.passes_needed);
    sync_all();
    const int steps = *beside.passes_needed * blocks;
    int of_row[2][2];  // scale that counts as 2^11 in the current pass
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) of_row[m][h] = beside.largest[row + 64 * m + 8 * h];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) total[m][i] = 0.f;

    constexpr bool TWO = N <= 96;  // sets of sums
    float sums[2][N / 2];
    u32 first[4][4], second[4][4];
    const u8* const all_scales = (const u8*)beside.all_scales;
    const u8* scales = all_scales;  // of the block of columns that is decoded
    barrier_wait(beside.full, 0);
    decode_tile(first, shared + S::codes, scales, row, t, of_row[0]);
    int stage = 0, block = 0;
    for (int step = 0; step < steps; step++) {
        const u8* here = shared + stage * S::bytes;
        const u32 x = base + stage * S::bytes;
        const float* x_scale = (const float*)(here + S::x_scale);
        multiply<N>(sums[0], first, x);
        decode_tile(second, here + S::codes, scales, row + 64, t, of_row[1]);
        if constexpr (TWO) {
            multiply<N>(sums[1], second, x);
            wgmma_wait_for_all_but<1>();
            hold(sums[0]);
            add_scaled<N>(total[0], sums[0], x_scale, t);
        } else {
            wgmma_wait_for_all_but<0>();
            hold(sums[0]);
            add_scaled<N>(total[0], sums[0], x_scale, t);
            multiply<N>(sums[0], second, x);
        }
        const bool more = step + 1 < steps, pass_ends = ++block == blocks && more;
        scales += 1024;
        if (pass_ends) {
            block = 0;
            scales = all_scales;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) of_row[m][h] -= SPAN;
        }
        const int next = stage + 1 == STAGES ? 0 : stage + 1;
        if (more) {
            barrier_wait(beside.full + 8 * next, (step + 1) / STAGES & 1);
            decode_tile(first, shared + next * S::bytes + S::codes, scales, row, t, of_row[0]);
        }
        wgmma_wait_for_all_but<0>();
        hold(sums[TWO]);
        add_scaled<N>(total[1], sums[TWO], x_scale, t);
        barrier_arrive(beside.empty + 8 * stage);
        stage = next;
        if (pass_ends) {
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int i = 0; i < N / 2; i++) total[m][i] *= (float)(1 << SPAN);
        }
    }
    // a code is its value times 2^(scale - base + 6)
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) scale[m][h] = of_row[m][h] - 6 - 127;
    sync_multiplying();
}

#include "prompt_outputs.cuh"
