// The kernels of FP4 experts with FP8 inputs, over the `product` of the source that includes this. THREADS are those of a
// block; those from MULTIPLYING on run `copy_stages`.

// x [n, width] codes -> z [pairs in sorted order, inner] codes, z_scale [inner / 128, pairs].
template <int N>
__device__ __forceinline__ void gate_up(const Product& p, u8* shared, const int* order, const float* weights, int first,
                                        int count, int topk, float limit, int inner, u8* z, float* z_scale, int pairs) {
    const int tid = threadIdx.x, group = tid / 128, q = tid % 128 / 32, g = tid % 32 / 4, t = tid % 4;
    const int tile = blockIdx.x * 128;
    float total[2][N / 2];
    int scale[2][2];
    product<N>(p, shared, GateUpRows{order, first, count, topk, inner}, total, scale);
    u32* peaks = (u32*)shared;  // the largest magnitude of every token, as bits
    u8* tile_codes = shared + 1024;  // [N, 128]
    if (tid < N) peaks[tid] = 0;
    sync_multiplying();
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int n = 8 * j + 2 * t + c;
            const float weight = weights[order[first + min(n, count - 1)]];
            float peak = 0.f;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const float a = fminf(total[m][4 * j + c] * power_of_two(scale[m][0]), limit);
                const float b = fminf(fmaxf(total[m][4 * j + 2 + c] * power_of_two(scale[m][1]), -limit), limit);
                const float v = bf16_round(a / (1.f + __expf(-a)) * b * weight);
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
    for (int i = tid; i < count * 8; i += 256)
        *(uint4*)(z + (i64)(first + i / 8) * inner + tile + i % 8 * 16) = *(const uint4*)(tile_codes + i * 16);
    if (tid < count) {
        const u32 bits = __float_as_uint(fmaxf(__uint_as_float(peaks[tid]), 1e-4f));
        const int exponent = (int)(bits >> 23) - 135 + ((bits & 0x7FFFFFu) > 0x600000u);
        z_scale[(i64)blockIdx.x * pairs + first + tid] = power_of_two(exponent);
    }
}

// z codes [pairs in sorted order, inner] -> y [pairs, width] bfloat16, in the order of the pairs.
template <int N>
__device__ __forceinline__ void down(const Product& p, u8* shared, const int* order, int first, int count, int width,
                                     u16* y) {
    const int tid = threadIdx.x, group = tid / 128, q = tid % 128 / 32, g = tid % 32 / 4, t = tid % 4;
    const int tile = blockIdx.x * 256;
    float total[2][N / 2];
    int scale[2][2];
    product<N>(p, shared, DownRows{first, count}, total, scale);
    u16* rows = (u16*)shared;  // [N, 256], rows 8 columns apart, so that threads of a warp use different banks
    constexpr int PITCH = 264;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                rows[(8 * j + 2 * t + i % 2) * PITCH + (2 * group + m) * 64 + 16 * q + g + i / 2 * 8] =
                    bf16_bits(total[m][4 * j + i] * power_of_two(scale[m][i / 2]));
    sync_multiplying();
    for (int i = tid; i < count * 32; i += 256)
        *(uint4*)(y + (i64)order[first + i / 32] * width + tile + i % 32 * 8) =
            *(const uint4*)(rows + i / 32 * PITCH + i % 32 * 8);
}

#define FOR_COUNT(CALL)         \
    if (count <= 32) CALL(32);  \
    else if (count <= 64) CALL(64);  \
    else if (count <= 80) CALL(80);  \
    else if (count <= 96) CALL(96);  \
    else if (count <= 112) CALL(112);  \
    else CALL(128);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prompt_gate_up(const u8* x, const float* x_scale, int x_rows, const i64* addresses, const int* blocks,
                   const int* order, const float* weights, u8* z, float* z_scale, int pairs, int inner, int width,
                   int topk, float limit) {
    extern __shared__ __align__(1024) u8 shared[];
    const int expert = blocks[blockIdx.y * 4], first = blocks[blockIdx.y * 4 + 1], count = blocks[blockIdx.y * 4 + 2];
    if (count <= 0) return;
    const Product p{x, x_scale, x_rows, width, (const u8*)addresses[expert * 4], (const u8*)addresses[expert * 4 + 1]};
    const GateUpRows rows{order, first, count, topk, inner};
    if (threadIdx.x >= MULTIPLYING) {
        fewer_registers();
#define CALL(N) copy_stages<N>(p, shared, rows)
        FOR_COUNT(CALL)
#undef CALL
    } else {
        more_registers();
#define CALL(N) gate_up<N>(p, shared, order, weights, first, count, topk, limit, inner, z, z_scale, pairs)
        FOR_COUNT(CALL)
#undef CALL
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prompt_down(const u8* z, const float* z_scale, int pairs, const i64* addresses, const int* blocks, const int* order,
                u16* y, int inner, int width) {
    extern __shared__ __align__(1024) u8 shared[];
    const int expert = blocks[blockIdx.y * 4], first = blocks[blockIdx.y * 4 + 1], count = blocks[blockIdx.y * 4 + 2];
    if (count <= 0) return;
    const Product p{z, z_scale, pairs, inner, (const u8*)addresses[expert * 4 + 2], (const u8*)addresses[expert * 4 + 3]};
    const DownRows rows{first, count};
    if (threadIdx.x >= MULTIPLYING) {
        fewer_registers();
#define CALL(N) copy_stages<N>(p, shared, rows)
        FOR_COUNT(CALL)
#undef CALL
    } else {
        more_registers();
#define CALL(N) down<N>(p, shared, order, first, count, width, y)
        FOR_COUNT(CALL)
#undef CALL
    }
}
