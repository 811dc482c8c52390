// FP4 experts with FP8 inputs for the many rows of a prompt, on Hopper's matrix instructions (sm_90a).
//
// The twin of kernels/experts/fp8.py, which explains the arithmetic: E2M1 codes become E4M3 codes that include their
// scale relative to the largest one of the row; sums of 128 columns by the hardware, then float32 with the scale of the
// inputs. A tile is 256 rows of a matrix and up to 128 tokens of an expert. The kernels are persistent: a block computes
// one tile after the other. Two groups of four warps multiply 128 rows each, as two tiles of 64; a third group copies
// the operands of 128 columns after the other into a ring of stages, across the ends of tiles, and finds the largest
// scales of the rows of the next tile. Groups meet at the barriers of stages alone, so that one group decodes while
// the products of the other one run, and neither waits for the start of a tile.
//
// The weights are the operand that matrix instructions take from registers: a thread reads 16 bytes of codes of a row,
// which are one group of 32 columns with one scale, and decodes them to its part of four products. The columns of the
// inputs are in the order that follows ("fragments" in quant/device.py), so nothing is exchanged between threads.
//
// Inputs are written by ordinary asynchronous copies and read by the tensor cores, which is another proxy. The copying
// threads await their copies, fence, and arrive at the barrier: the fence costs nothing to those that multiply.
//
// The 128 columns of z that a tile makes are one group of the FP8 rounding of z: they are rounded and stored as codes.

#include "wgmma.cuh"
#include "prompt_common.cuh"

#define STAGES 5
#define MULTIPLYING 256  // threads that multiply
#define COPYING 128
#define THREADS (MULTIPLYING + COPYING)
#define PENDING 2  // stages whose copies are under way while a further one is requested
#define TOKENS 128
#define INFOS (STAGES + 1)  // tiles that may be in the ring, and the one whose results are stored
#define PITCH 72  // of a row of 64 results, so that threads of a warp use different banks

// Offsets within a stage, and after the stages.
#define STAGE_CODES (TOKENS * 128)
#define STAGE_X_SCALE (STAGE_CODES + 256 * 64)
#define STAGE_BYTES (33 * 1024)
#define SCALES (STAGES * STAGE_BYTES)  // of all rows and 256 columns, eight bytes a row, in a ring of three
#define SCALE_BYTES (256 * 8)
#define RESULTS (SCALES + 3 * SCALE_BYTES)
#define RESULT_BYTES (2 * TOKENS * PITCH * 2)

struct TileInfo {  // written by the copying threads, read by all
    u8 largest[256];  // scale of every row
    u32 token[TOKENS];  // of gate and up: bits of the routing weight; of down: row of the output
    int passes, unused[3];
};

struct Shared {
    u8* base;
    __device__ __forceinline__ u8* stage(int i) const { return base + i * STAGE_BYTES; }
    __device__ __forceinline__ u8* results() const { return base + RESULTS; }
    __device__ __forceinline__ TileInfo* info(int tile) const {
        return (TileInfo*)(base + RESULTS + RESULT_BYTES) + tile % INFOS;
    }
    __device__ __forceinline__ u32 full(int i) const { return shared_address(info(0) + INFOS) + 8 * i; }
    __device__ __forceinline__ u32 empty(int i) const { return full(STAGES + i); }
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

__device__ __forceinline__ void sync_copying() { asm volatile("bar.sync 2, 128;" ::: "memory"); }

__device__ __forceinline__ void sync_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory"); }

__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }

__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

__device__ __forceinline__ void wgmma_wait_all() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// No use of these sums moves across this point.
template <int COUNT>
__device__ __forceinline__ void hold(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

struct Arguments {
    const u8* x;           // codes of the inputs
    const float* x_scale;  // [width / 128, x_rows]
    int x_rows, width;     // columns of the matrix
    const i64* addresses;  // [experts, 4]
    const int *blocks, *order;  // of routing.plan
    int row_tiles;
};

// One tile of the list; the same for both roles.
struct Tile {
    int expert, first, count, row;
    __device__ __forceinline__ Tile(const Arguments& a, int i) {
        const int4 block = *(const int4*)(a.blocks + i / a.row_tiles * 4);
        expert = block.x;
        first = block.y;
        count = block.z;
        row = i % a.row_tiles;
    }
};

__device__ __forceinline__ int tile_count(const Arguments& a) { return a.blocks[3] * a.row_tiles; }

// How the kernels differ. A kernel's `Rows` says which row of the matrix local row r (0 .. 255) of a tile is, which row of
// the inputs belongs to a pair, and what is kept of a pair for the results.
struct GateUp {  // gate and up alternate by eight, so that a thread has both values of its SwiGLU
    static constexpr int matrix = 0;
    const float* weights;
    int topk, inner;
    float limit;
    u8* z;
    float* z_scale;
    int pairs;
    __device__ __forceinline__ int row(int tile, int r) const {
        return (r / 8 & 1) * inner + tile * 128 + r / 64 * 32 + r % 64 / 16 * 8 + r % 8;
    }
    __device__ __forceinline__ int input(const int* order, int pair) const { return order[pair] / topk; }
    __device__ __forceinline__ u32 token(const int* order, int pair) const {
        return __float_as_uint(weights[order[pair]]);
    }
    template <int N>
    __device__ __forceinline__ void store(const Tile& tile, const TileInfo* info, u8* results, float (&total)[2][N / 2],
                                          const int (&scale)[2][2]) const;
};

struct Down {
    static constexpr int matrix = 2;
    u16* y;
    int width;  // of the output
    __device__ __forceinline__ int row(int tile, int r) const { return tile * 256 + r; }
    __device__ __forceinline__ int input(const int* order, int pair) const { return pair; }
    __device__ __forceinline__ u32 token(const int* order, int pair) const { return order[pair]; }
    template <int N>
    __device__ __forceinline__ void store(const Tile& tile, const TileInfo* info, u8* results, float (&total)[2][N / 2],
                                          const int (&scale)[2][2]) const;
};

// The largest scale of a row, and the passes that its scales need.
__device__ __forceinline__ int scan_row(const u8* scales, int blocks, u8* largest) {
    u32 high = 0, low = ~0u;
#pragma unroll 8
    for (int block = 0; block < blocks; block++) {
        const u32 four = *(const u32*)(scales + 4 * block);
        high = __vmaxu4(high, four);
        low = __vminu4(low, four);
    }
    const int most = max(max(high & 255, high >> 8 & 255), max(high >> 16 & 255, high >> 24));
    const int least = min(min(low & 255, low >> 8 & 255), min(low >> 16 & 255, low >> 24));
    *largest = most;
    return (most - least) / SPAN + 1;
}

// The copying threads: tile after tile, stage after stage, as they become empty.
template <class Kernel>
__device__ __forceinline__ void copy_tiles(const Arguments& a, const Kernel& kernel, const Shared& shared) {
    const int tid = threadIdx.x - MULTIPLYING, blocks = a.width / 128, row_bytes = a.width / 2;
    const int tiles = tile_count(a);
    int stage = 0, announced = 0, waiting = 0, ring = 0, number = 0;  // stage of the next copies and barriers, their distance
    u32 parity = 0;
    bool wrapped = false;
    const u32 into = shared_address(shared.base) + tid / 8 * 128 + ((tid % 8) ^ (tid / 8 % 8)) * 16;
    const u32 codes_into = shared_address(shared.base) + STAGE_CODES + tid * 16;
    const u32 x_scale_into = shared_address(shared.base) + STAGE_X_SCALE + tid * 4;
    const u32 scales_into = shared_address(shared.base) + SCALES + tid * 8;
    auto announce = [&] {
        fence_async_proxy();
        barrier_arrive(shared.full(announced));
        announced = announced + 1 == STAGES ? 0 : announced + 1;
        waiting--;
    };
    for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        const Tile tile(a, i);
        if (tile.count <= 0) continue;
        TileInfo* info = shared.info(number++);
        const u8* codes = (const u8*)a.addresses[tile.expert * 4 + Kernel::matrix];
        const u8* scales = (const u8*)a.addresses[tile.expert * 4 + Kernel::matrix + 1];
        if (tid == 0) info->passes = 1;
        info->token[tid] = kernel.token(a.order, tile.first + min(tid, tile.count - 1));
        u32 own_x[8];  // offset of 16 bytes of 128 columns of the inputs
#pragma unroll
        for (int j = 0; j < 8; j++)
            own_x[j] = kernel.input(a.order, tile.first + min(tid / 8 + 16 * j, tile.count - 1)) * a.width + tid % 8 * 16;
        const u32 own_x_scale = 4 * kernel.input(a.order, tile.first + min(tid, tile.count - 1));
        const u32 own_scales = kernel.row(tile.row, tid) * (a.width / 32);
        const u32 other_scales = kernel.row(tile.row, tid + 128) * (a.width / 32);
        const int passes = max(scan_row(scales + own_scales, blocks, info->largest + tid),
                               scan_row(scales + other_scales, blocks, info->largest + tid + 128));
        sync_copying();
        if (passes > 1) atomicMax(&info->passes, passes);
        sync_copying();
        const u32 own_codes = kernel.row(tile.row, tid / 4) * row_bytes + tid % 4 * 16;
        const u32 next_half = (kernel.row(0, 32) - kernel.row(0, 0)) * row_bytes;
        const u32 next_tile = (kernel.row(0, 64) - kernel.row(0, 0)) * row_bytes;
        const int parts = (tile.count + 15) / 16;
        for (int pass = info->passes; pass > 0; pass--) {
            const u8 *x = a.x, *x_scale = (const u8*)a.x_scale, *code = codes, *scale = scales;
            for (int block = 0; block < blocks; block++) {
                if (wrapped) barrier_wait(shared.empty(stage), parity ^ 1);
                const u32 to = into + stage * STAGE_BYTES;
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (j < parts) copy16(to + j * 2048, x + own_x[j]);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    copy16_of_line(codes_into + stage * STAGE_BYTES + j * 2048,
                                   code + (j / 2 * next_tile + j % 2 * next_half) + own_codes);
                copy4(x_scale_into + stage * STAGE_BYTES, x_scale + own_x_scale);
                if (block % 2 == 0) {
                    copy8(scales_into + ring * SCALE_BYTES, scale + own_scales);
                    copy8(scales_into + ring * SCALE_BYTES + 1024, scale + other_scales);
                    scale += 8;
                    ring = ring == 2 ? 0 : ring + 1;
                }
                copies_commit();
                x += 128;
                x_scale += 4 * (i64)a.x_rows;
                code += 64;
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                    wrapped = true;
                }
                if (++waiting > PENDING) {
                    copies_wait<PENDING>();
                    announce();
                }
            }
        }
        copies_wait<0>();
        while (waiting > 0) announce();
    }
}

struct Position {  // of the next step in the rings
    int stage = 0, ring = 0;
    u32 parity = 0;
};

// One tile, from position `at` on. Up to 112 tokens the next half is decoded while the products of this one run; more do not
// leave enough registers.
template <int N, class Kernel>
__device__ __forceinline__ void multiply_tile(const Arguments& a, const Kernel& kernel, const Shared& shared,
                                              const Tile& tile, const TileInfo* info, Position& at) {
    const int tid = threadIdx.x, group = tid / 128, lane = tid % 32, g = lane / 4, t = lane % 4;
    const int row = group * 128 + (tid % 128) / 32 * 16 + g;  // of the thread in the first of its two halves
    const int blocks = a.width / 128;
    constexpr bool AHEAD = N <= 112;
    float total[2][N / 2];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) total[m][i] = 0.f;
    int stage = at.stage, ring = at.ring;
    u32 parity = at.parity;
    barrier_wait(shared.full(stage), parity);
    const int steps = info->passes * blocks;
    int of_row[2][2];  // scale that counts as 2^11 in the current pass
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) of_row[m][h] = info->largest[row + 64 * m + 8 * h];
    float sums[N / 2];
    u32 first[4][4], second[4][4];
    const u8* scales = shared.base + SCALES + ring * SCALE_BYTES;  // of the columns that are decoded
    if (AHEAD) decode_tile(first, shared.stage(stage) + STAGE_CODES, scales, row, t, of_row[0]);
    for (int s = 0, block = 0; s < steps; s++) {
        const u8* here = shared.stage(stage);
        const u32 x = shared_address(here);
        const float* x_scale = (const float*)(here + STAGE_X_SCALE);
        const int own_stage = stage;
        const bool more = s + 1 < steps, pass_ends = ++block == blocks && more;
        if (AHEAD) {
            multiply<N>(sums, first, x);
            decode_tile(second, here + STAGE_CODES, scales, row + 64, t, of_row[1]);
        } else {
            decode_tile(first, here + STAGE_CODES, scales, row, t, of_row[0]);
            multiply<N>(sums, first, x);
        }
        wgmma_wait_all();
        hold(sums);
        add_scaled<N>(total[0], sums, x_scale, t);
        if (!AHEAD) decode_tile(first, here + STAGE_CODES, scales, row + 64, t, of_row[1]);
        multiply<N>(sums, AHEAD ? second : first, x);
        if (pass_ends) {
            block = 0;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) of_row[m][h] -= SPAN;
        }
        if (more) {
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            parity ^= stage == 0;
            barrier_wait(shared.full(stage), parity);
            if (block % 2 == 0) ring = ring == 2 ? 0 : ring + 1;
            scales = shared.base + SCALES + ring * SCALE_BYTES + block % 2 * 4;
            if (AHEAD) decode_tile(first, shared.stage(stage) + STAGE_CODES, scales, row, t, of_row[0]);
        }
        wgmma_wait_all();
        hold(sums);
        add_scaled<N>(total[1], sums, x_scale, t);
        __syncwarp();
        if (more && lane == 0) barrier_arrive(shared.empty(own_stage));
        if (pass_ends) {
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int i = 0; i < N / 2; i++) total[m][i] *= (float)(1 << SPAN);
        }
    }
    int scale[2][2];  // a code is its value times 2^(scale - base + 6)
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) scale[m][h] = of_row[m][h] - 6 - 127;
    kernel.template store<N>(tile, info, shared.results(), total, scale);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.empty(stage));  // not before: `info` is written again after this
    at.stage = stage + 1 == STAGES ? 0 : stage + 1;
    at.parity = parity ^ (at.stage == 0);
    at.ring = ring == 2 ? 0 : ring + 1;
}

template <class Kernel>
__device__ __forceinline__ void multiply_tiles(const Arguments& a, const Kernel& kernel, const Shared& shared) {
    const int tiles = tile_count(a);
    int number = 0;
    Position at;
    for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        const Tile tile(a, i);
        if (tile.count <= 0) continue;
        const TileInfo* info = shared.info(number++);
#define CALL(N) multiply_tile<N>(a, kernel, shared, tile, info, at)
        if (tile.count <= 32) CALL(32);
        else if (tile.count <= 64) CALL(64);
        else if (tile.count <= 80) CALL(80);
        else if (tile.count <= 96) CALL(96);
        else if (tile.count <= 112) CALL(112);
        else CALL(128);
#undef CALL
    }
}

// x [n, width] codes -> z [pairs in sorted order, inner] codes, z_scale [inner / 128, pairs].
template <int N>
__device__ __forceinline__ void GateUp::store(const Tile& tile, const TileInfo* info, u8* results,
                                              float (&total)[2][N / 2], const int (&scale)[2][2]) const {
    const int tid = threadIdx.x, group = tid / 128, q = tid % 128 / 32, g = tid % 32 / 4, t = tid % 4;
    u32* peaks = (u32*)results;  // the largest magnitude of every token, as bits
    u8* tile_codes = results + 512;  // [N, 128]
    sync_multiplying();  // the results of the tile before are stored
    if (tid < N) peaks[tid] = 0;
    sync_multiplying();
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int n = 8 * j + 2 * t + c;
            const float weight = __uint_as_float(info->token[n]);
            float peak = 0.f;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const float gate = fminf(total[m][4 * j + c] * power_of_two(scale[m][0]), limit);
                const float up = fminf(fmaxf(total[m][4 * j + 2 + c] * power_of_two(scale[m][1]), -limit), limit);
                const float v = bf16_round(gate / (1.f + __expf(-gate)) * up * weight);
                total[m][4 * j + c] = v;
                peak = fmaxf(peak, fabsf(v));
            }
#pragma unroll
            for (int s = 4; s < 32; s <<= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, s));
            if (g == 0) atomicMax(peaks + n, __float_as_uint(peak));
        }
    }
    sync_multiplying();
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int n = 8 * j + 2 * t + c;
            const u32 bits = __float_as_uint(fmaxf(__uint_as_float(peaks[n]), 1e-4f));
            const int exponent = (int)(bits >> 23) - 135 + ((bits & 0x7FFFFFu) > 0x600000u);
#pragma unroll
            for (int m = 0; m < 2; m++)  // column 32 (2 group + m) + 8 q + g of the 128
                tile_codes[n * 128 + q * 32 + g / 4 * 16 + (2 * group + m) * 4 + g % 4] =
                    e4m3_code(total[m][4 * j + c] * power_of_two(-exponent));
        }
    }
    sync_multiplying();
    for (int i = tid; i < tile.count * 8; i += MULTIPLYING)
        *(uint4*)(z + (i64)(tile.first + i / 8) * inner + tile.row * 128 + i % 8 * 16) = *(const uint4*)(tile_codes + i * 16);
    if (tid < tile.count) {
        const u32 bits = __float_as_uint(fmaxf(__uint_as_float(peaks[tid]), 1e-4f));
        const int exponent = (int)(bits >> 23) - 135 + ((bits & 0x7FFFFFu) > 0x600000u);
        z_scale[(i64)tile.row * pairs + tile.first + tid] = power_of_two(exponent);
    }
}

// z codes [pairs in sorted order, inner] -> y [pairs, width] bfloat16, in the order of the pairs. A group stores its own
// rows.
template <int N>
__device__ __forceinline__ void Down::store(const Tile& tile, const TileInfo* info, u8* results,
                                            float (&total)[2][N / 2], const int (&scale)[2][2]) const {
    const int tid = threadIdx.x % 128, group = threadIdx.x / 128, q = tid / 32, g = tid % 32 / 4, t = tid % 4;
    u16* rows = (u16*)results + group * TOKENS * PITCH;  // [N, 64]
#pragma unroll
    for (int m = 0; m < 2; m++) {
        sync_group(group);  // what was here before is stored
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                rows[(8 * j + 2 * t + i % 2) * PITCH + 16 * q + g + i / 2 * 8] =
                    bf16_bits(total[m][4 * j + i] * power_of_two(scale[m][i / 2]));
        sync_group(group);
        for (int i = tid; i < tile.count * 8; i += 128)
            *(uint4*)(y + (i64)info->token[i / 8] * width + tile.row * 256 + (2 * group + m) * 64 + i % 8 * 8) =
                *(const uint4*)(rows + i / 8 * PITCH + i % 8 * 8);
    }
}

template <class Kernel>
__device__ __forceinline__ void run_tiles(const Arguments& a, const Kernel& kernel, u8* memory) {
    const Shared shared{memory};
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full(i), COPYING);
            barrier_init(shared.empty(i), MULTIPLYING / 32);
        }
    __syncthreads();
    if (threadIdx.x >= MULTIPLYING) {
        fewer_registers();
        copy_tiles(a, kernel, shared);
    } else {
        more_registers();
        multiply_tiles(a, kernel, shared);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prompt_gate_up(const u8* x, const float* x_scale, int x_rows, const i64* addresses, const int* blocks,
                   const int* order, const float* weights, u8* z, float* z_scale, int pairs, int inner, int width,
                   int topk, float limit) {
    extern __shared__ __align__(1024) u8 shared[];
    run_tiles(Arguments{x, x_scale, x_rows, width, addresses, blocks, order, inner / 128},
              GateUp{weights, topk, inner, limit, z, z_scale, pairs}, shared);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prompt_down(const u8* z, const float* z_scale, int pairs, const i64* addresses, const int* blocks, const int* order,
                u16* y, int inner, int width) {
    extern __shared__ __align__(1024) u8 shared[];
    run_tiles(Arguments{z, z_scale, pairs, inner, addresses, blocks, order, width / 256}, Down{y, width}, shared);
}
