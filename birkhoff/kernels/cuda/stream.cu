// Products of few rows with FP8, FP4 and bfloat16 weights, bound by how fast the weights can be read.
//
// A warp owns sixteen rows of a weight (or sixteen of each of two). Lane (g, q) = (lane / 4, lane % 4) loads sixteen bytes
// of rows g and g + 8 straight into registers, decodes them to half pairs and hands them to mma.m16n8k16 as the A side; the
// inputs are the B side, eight tokens a tile. Which k stands where inside an mma does not matter as long as both sides
// agree, so every lane multiplies exactly the bytes it loaded: no shared memory, no shuffles, and eight tokens cost about
// what one does. Warps of a block share K and add up through shared memory at the end, in a fixed order.
// Products are exact, sums are float32. Inputs are float16 beside FP8 and FP4, bfloat16 beside bfloat16.

__device__ __forceinline__ uint4 stream16(const void* p) {  // read once: do not keep it in L1
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ uint2 stream8(const void* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

__device__ __forceinline__ uint4 input16(const void* p, bool there) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (there) v = *reinterpret_cast<const uint4*>(p);
    return v;
}

__device__ __forceinline__ u32 pair(u32 two_e4m3) {
    u32 r;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h; }" : "=r"(r) : "r"(two_e4m3));
    return r;
}

__device__ __forceinline__ u32 scaled(u32 a, u32 s) {
    u32 r;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(s));
    return r;
}

template <bool BF16>
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// FP8: rows `first + 16 r ..` for r < RT at codes[r]; K in blocks of 128 with one scale byte each. A warp has U blocks on
// their way, and asks for another as soon as one is multiplied.
template <int NT, int RT, int WARPS, int U, int WM = 1>
__device__ __forceinline__ void fp8_rows(float (&acc)[RT][NT][4], const u8* const (&codes)[RT], const u8* const (&scale)[RT],
                                         int scale_stride, const u16* const (&x)[NT], const bool (&there)[NT], int inner) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) / WM, g = lane >> 2, q = lane & 3;
    const int blocks = inner >> 7;
    uint4 w[U][RT][2][2];
    float s[U][RT];
    auto load = [&](int u, int at) {
#pragma unroll
        for (int r = 0; r < RT; r++) {
            const u8* row = codes[r] + (i64)g * inner + at * 128 + q * 16;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                w[u][r][c][0] = stream16(row + c * 64);
                w[u][r][c][1] = stream16(row + (i64)8 * inner + c * 64);
            }
            s[u][r] = __uint_as_float((u32)scale[r][(i64)at * scale_stride] << 23);
        }
    };
    auto multiply = [&](int u, int at) {
        float part[RT][NT][4];
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) part[r][t][i] = 0.f;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            uint4 b[NT][2];
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const u16* from = x[t] + at * 128 + c * 64 + q * 16;
                b[t][0] = input16(from, there[t]);
                b[t][1] = input16(from + 8, there[t]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    const u32 low = word(w[u][r][c][0], i), high = word(w[u][r][c][1], i);
                    const u32 a0 = pair(low), a1 = pair(high), a2 = pair(low >> 16), a3 = pair(high >> 16);
#pragma unroll
                    for (int t = 0; t < NT; t++)
                        mma<false>(part[r][t], a0, a1, a2, a3, word(b[t][i >> 1], 2 * (i & 1)),
                                   word(b[t][i >> 1], 2 * (i & 1) + 1));
                }
            }
        }
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[r][t][i] += s[u][r] * part[r][t][i];
    };
#pragma unroll
    for (int u = 0; u < U; u++)
        if (warp + u * WARPS < blocks) load(u, warp + u * WARPS);
    wait_for_inputs();
    for (int kb = warp; kb < blocks; kb += WARPS * U)
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int at = kb + u * WARPS, next = at + WARPS * U;
            if (at < blocks) multiply(u, at);
            if (next < blocks) load(u, next);
        }
}

// bfloat16: sixteen rows, `stride` apart; K in blocks of 128.
template <int NT, int WARPS, int U, int WM = 1>
__device__ __forceinline__ void plain_rows(float (&acc)[1][NT][4], const u16* weight, const u16* const (&x)[NT],
                                           const bool (&there)[NT], int inner, int stride) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) / WM, g = lane >> 2, q = lane & 3;
    const int blocks = inner >> 7;
    uint4 w[U][4][2];
    auto load = [&](int u, int at) {
        const u16* row = weight + (i64)g * stride + at * 128 + q * 8;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            w[u][c][0] = stream16(row + c * 32);
            w[u][c][1] = stream16(row + (i64)8 * stride + c * 32);
        }
    };
    auto multiply = [&](int u, int at) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint4 b = input16(x[t] + at * 128 + c * 32 + q * 8, there[t]);
                mma<true>(acc[0][t], w[u][c][0].x, w[u][c][1].x, w[u][c][0].y, w[u][c][1].y, b.x, b.y);
                mma<true>(acc[0][t], w[u][c][0].z, w[u][c][1].z, w[u][c][0].w, w[u][c][1].w, b.z, b.w);
            }
        }
    };
#pragma unroll
    for (int u = 0; u < U; u++)
        if (warp + u * WARPS < blocks) load(u, warp + u * WARPS);
    wait_for_inputs();
    for (int kb = warp; kb < blocks; kb += WARPS * U)
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int at = kb + u * WARPS, next = at + WARPS * U;
            if (at < blocks) multiply(u, at);
            if (next < blocks) load(u, next);
        }
}

// Sixteen rows that lie across the bus come by way of shared memory: sixteen lanes ask for 256 bytes of a row at once, so
// that whole lines cross, where lanes that load what they multiply ask for 64 bytes of eight rows each.
__device__ __forceinline__ void fetch(uint4* into, const u8* codes, int row_bytes, int lane) {
    const u32 place = (u32)__cvta_generic_to_shared(into);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = 2 * i + (lane >> 4), at = lane & 15;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place + (row * 16 + (at ^ (row & 7))) * 16),
                     "l"(codes + (i64)row * row_bytes + at * 16));
    }
}

__device__ __forceinline__ void fetched() {
    asm volatile("cp.async.commit_group;" :::);
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
}

// FP4: RT times sixteen rows; a lane's sixteen bytes are one group of 32 codes with one scale. K in steps of 512, each in
// two halves.
template <int RT>
struct Half {
    uint4 w[RT][2][2];
    uint2 s[RT][2];
};

template <int RT>
__device__ __forceinline__ void load_half(Half<RT>& half, const u8* const (&codes)[RT], const u8* const (&scale)[RT], int inner,
                                          int kb, int side) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const i64 row = g + 8 * h;
            half.s[r][h] = stream8(scale[r] + row * (inner >> 5) + kb * 16 + side * 8);
#pragma unroll
            for (int c = 0; c < 2; c++)
                half.w[r][h][c] = stream16(codes[r] + row * (inner >> 1) + kb * 256 + side * 128 + c * 64 + q * 16);
        }
}

// Codes leave a 32-bit word as pairs (0,2) (4,6) (1,3) (5,7); the inputs lie in that order already.
template <int RT>
__device__ __forceinline__ void multiply_half(float (&acc)[RT][1][4], const Half<RT>& half, const u16* x, bool there, int offset,
                                              int kb, int side) {
    const int q = threadIdx.x & 3;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        u32 factor[RT][2];
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 four = c ? half.s[r][h].y : half.s[r][h].x;
                const u32 one = (((four >> (8 * q)) & 255u) + offset) << 10;  // a float16 power of two
                factor[r][h] = one | one << 16;
            }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 b = input16(x + kb * 512 + side * 256 + c * 128 + q * 32 + i * 8, there);
#pragma unroll
            for (int r = 0; r < RT; r++) {
                u32 even[2], odd[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 v = word(half.w[r][h][c], i);
                    even[h] = ((v << 4) & 0x80808080u) | ((v << 2) & 0x1c1c1c1cu);
                    odd[h] = (v & 0x80808080u) | ((v >> 2) & 0x1c1c1c1cu);
                }
                mma<false>(acc[r][0], scaled(pair(even[0]), factor[r][0]), scaled(pair(even[1]), factor[r][1]),
                           scaled(pair(even[0] >> 16), factor[r][0]), scaled(pair(even[1] >> 16), factor[r][1]), b.x, b.y);
                mma<false>(acc[r][0], scaled(pair(odd[0]), factor[r][0]), scaled(pair(odd[1]), factor[r][1]),
                           scaled(pair(odd[0] >> 16), factor[r][0]), scaled(pair(odd[1] >> 16), factor[r][1]), b.z, b.w);
            }
        }
    }
}

// PIPE: a half is asked for while the one before is multiplied; otherwise both at once, which takes fewer registers. WAIT:
// inputs are waited for when the first weights are on their way.
template <int RT, int WARPS, bool PIPE, bool WAIT>
__device__ __forceinline__ void fp4_rows(float (&acc)[RT][1][4], const u8* const (&codes)[RT], const u8* const (&scale)[RT],
                                         const u16* x, bool there, int inner, int offset) {
    const int warp = threadIdx.x >> 5, steps = inner >> 9;
    Half<RT> left, right;
    if (PIPE && warp < steps) load_half(left, codes, scale, inner, warp, 0);
    for (int kb = warp; kb < steps; kb += WARPS) {
        if (!PIPE) load_half(left, codes, scale, inner, kb, 0);
        load_half(right, codes, scale, inner, kb, 1);
        if (WAIT && kb == warp) wait_for_inputs();
        multiply_half(acc, left, x, there, offset, kb, 0);
        if (PIPE && kb + WARPS < steps) load_half(left, codes, scale, inner, kb + WARPS, 0);
        multiply_half(acc, right, x, there, offset, kb, 1);
    }
    if (WAIT) wait_for_inputs();
}

// The same for rows across the bus: they are fetched into `lent`, RT * 256 places for each warp; scales wait in `known`.
template <int RT, int WARPS>
__device__ __forceinline__ void far_rows(float (&acc)[RT][1][4], const u8* const (&codes)[RT], const u16* x, bool there,
                                         int inner, int offset, uint4* lent, const uint4* known) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    for (int kb = warp; kb < inner >> 9; kb += WARPS) {
        __syncwarp();
#pragma unroll
        for (int r = 0; r < RT; r++) fetch(lent + (warp * RT + r) * 256, codes[r] + kb * 256, inner >> 1, lane);
        fetched();
#pragma unroll
        for (int side = 0; side < 2; side++) {
            Half<RT> half;
#pragma unroll
            for (int r = 0; r < RT; r++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = g + 8 * h;
                    const uint4 s = known[(r * 16 + row) * (inner >> 9) + kb];
                    half.s[r][h] = side ? make_uint2(s.z, s.w) : make_uint2(s.x, s.y);
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        half.w[r][h][c] = lent[(warp * RT + r) * 256 + row * 16 + ((side * 8 + c * 4 + q) ^ (row & 7))];
                }
            multiply_half(acc, half, x, there, offset, kb, side);
        }
    }
}

// Adds the warps' sums: whole[r][row][token] for RT tiles of sixteen rows.
template <int NT, int RT, int WARPS>
__device__ __forceinline__ void gather(float* shared, float (&acc)[RT][NT][4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    float* mine = shared + warp * (RT * 16 * NT * 8);
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int t = 0; t < NT; t++) {
            float* at = mine + (r * 16 + g) * (NT * 8) + t * 8 + 2 * q;
            at[0] = acc[r][t][0];
            at[1] = acc[r][t][1];
            at[8 * NT * 8] = acc[r][t][2];
            at[8 * NT * 8 + 1] = acc[r][t][3];
        }
    __syncthreads();
}

template <int WARPS>
__device__ __forceinline__ float whole(const float* shared, int at, int size) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += shared[w * size + at];
    return sum;
}

__device__ __forceinline__ void put(float* p, float v) { *p = v; }
__device__ __forceinline__ void put(u16* p, float v) { asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; st.global.b16 [%0], h; }" ::"l"(p), "f"(v) : "memory"); }
struct bf16 { u16 bits; };
__device__ __forceinline__ void put(bf16* p, float v) { asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; st.global.b16 [%0], h; }" ::"l"(p), "f"(v) : "memory"); }

__device__ __forceinline__ float gated(float a, float b, float limit) {
    a = fminf(a, limit);
    b = fminf(fmaxf(b, -limit), limit);
    return a / (1.f + __expf(-a)) * b;
}

// One launch over the rows of up to two FP8 matrices (stacked in blocks of sixteen rows) and one bfloat16 matrix. WARPS
// share a row's K; with many tokens WM of them stand side by side on different rows, so that they meet their common
// inputs in L1.
template <int NT, int WARPS, int U, int WM, typename OUT>
__device__ __forceinline__ void product(const u8* codes, const u8* scale, int rows8, const u8* codes2, const u8* scale2,
                                        int rows8b, const u16* plain, int rows16, const u16* xh, const u16* xb, int n,
                                        int inner, int x_stride, OUT* out, int out_stride, int group) {
    __shared__ float shared[WM * WARPS * 16 * NT * 8];
    let_next_start();
    const int g = (threadIdx.x & 31) >> 2, side = (threadIdx.x >> 5) % WM;
    int row = (blockIdx.x * WM + side) * 16;
    const bool inside = row < rows8 + rows8b + rows16;
    if (!inside) row = 0;  // the last block's spare warps repeat the first rows, and store nothing
    const int place = row;
    float acc[1][NT][4] = {};
    const u16* x[NT];
    bool there[NT];
    const bool coded = row < rows8 + rows8b;
    const u16* from = (coded ? xh : xb) + (group ? (i64)(row / group) * inner : 0);
#pragma unroll
    for (int t = 0; t < NT; t++) {
        there[t] = t * 8 + g < n;
        x[t] = from + (i64)(t * 8 + g) * x_stride;
    }
    if (coded) {
        const bool second = row >= rows8;
        if (second) row -= rows8;
        const u8* const c[1] = {(second ? codes2 : codes) + (i64)row * inner};
        const u8* const s[1] = {(second ? scale2 : scale) + row};
        fp8_rows<NT, 1, WARPS, U, WM>(acc, c, s, second ? rows8b : rows8, x, there, inner);
    } else {
        row -= rows8 + rows8b;
        plain_rows<NT, WARPS, U, WM>(acc, plain + (i64)row * inner, x, there, inner, inner);
    }
    gather<NT, 1, WM * WARPS>(shared, acc);
    const int lane = (threadIdx.x >> 5) / WM * 32 + (threadIdx.x & 31);  // among the threads of this row block
    for (int i = lane; i < 16 * NT * 8; i += WARPS * 32) {
        const int r = i & 15, t = i >> 4;
        if (t < n && inside) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += shared[(w * WM + side) * (16 * NT * 8) + r * (NT * 8) + t];
            put(out + (i64)t * out_stride + place + r, sum);
        }
    }
}

// Sixteen rows of the shared expert's gate and as many of its up, gated.
template <int NT, int WARPS, int U>
__device__ __forceinline__ void gated_rows(float* shared, int row, const u8* codes, const u8* scale, int inner, const u16* xh,
                                           int n, int width, u16* z, float limit) {
    const int g = (threadIdx.x & 31) >> 2;
    const u16* x[NT];
    bool there[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        there[t] = t * 8 + g < n;
        x[t] = xh + (i64)(t * 8 + g) * width;
    }
    float acc[2][NT][4] = {};
    const u8* const c[2] = {codes + (i64)row * width, codes + (i64)(inner + row) * width};
    const u8* const s[2] = {scale + row, scale + inner + row};
    fp8_rows<NT, 2, WARPS, U>(acc, c, s, 2 * inner, x, there, width);
    gather<NT, 2, WARPS>(shared, acc);
    for (int i = threadIdx.x; i < 16 * NT * 8; i += WARPS * 32) {
        const int r = i & 15, t = i >> 4, at = r * (NT * 8) + t, size = 2 * 16 * NT * 8;
        if (t < n) {
            const float a = whole<WARPS>(shared, at, size), b = whole<WARPS>(shared, at + 16 * NT * 8, size);
            put(z + (i64)t * inner + row + r, gated(a, b, limit));
        }
    }
}

// Gate and up rows of the shared expert; then the router's rows.
template <int NT, int WARPS, int U>
__device__ __forceinline__ void open_shared(const u8* codes, const u8* scale, int inner, const u16* router, int experts,
                                            const u16* xh, const u16* xb, int n, int width, u16* z, float* logits,
                                            int logit_stride, float limit) {
    __shared__ float shared[WARPS * 2 * 16 * NT * 8];
    let_next_start();
    const int g = (threadIdx.x & 31) >> 2;
    int row = blockIdx.x * 16;
    if (row < inner) {
        gated_rows<NT, WARPS, U>(shared, row, codes, scale, inner, xh, n, width, z, limit);
        return;
    }
    row -= inner;
    const u16* x[NT];
    bool there[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        there[t] = t * 8 + g < n;
        x[t] = xb + (i64)(t * 8 + g) * width;
    }
    float acc[1][NT][4] = {};
    plain_rows<NT, WARPS, U>(acc, router + (i64)row * width, x, there, width, width);
    gather<NT, 1, WARPS>(shared, acc);
    for (int i = threadIdx.x; i < 16 * NT * 8; i += WARPS * 32) {
        const int r = i & 15, t = i >> 4;
        if (t < n) logits[(i64)t * logit_stride + row + r] = whole<WARPS>(shared, r * (NT * 8) + t, 16 * NT * 8);
    }
}

// The same for a single token, routed on the way: router rows come first, in two halves of K so that they are done early.
// The last of their blocks adds the halves, chooses, and writes the plan, while the shared expert is still being read.
// `arrived` counts those blocks and is left at zero; `parts` has room for two halves of all logits.
template <int EACH, int WARPS>
__device__ __forceinline__ void open_one(const u8* codes, const u8* scale, int inner, const u16* router, int experts,
                                         const u16* xh, const u16* xb, int width, u16* z, float* logits, float limit,
                                         float* parts, int* arrived, const float* bias, const int* table, const i64* tokens,
                                         const i64* addresses, int* ids, float* weights, int* order, Slot* slots, int places,
                                         float factor) {
    __shared__ float shared[WARPS * 2 * 16 * 8];
    __shared__ bool last;
    const int t = threadIdx.x, lane = t & 31, routing = experts / 8;
    let_next_start();
    if (blockIdx.x >= routing) {
        gated_rows<1, WARPS, 2>(shared, (blockIdx.x - routing) * 16, codes, scale, inner, xh, 1, width, z, limit);
        return;
    }
    if (blockIdx.x == 0) {  // what is needed at the end is on its way
        for (int i = t; i < experts / 4; i += WARPS * 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(addresses + i * 16));
        if (bias && t < experts / 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(bias + t * 32));
    }
    const int row = blockIdx.x / 2 * 16, side = blockIdx.x & 1, half = width / 2;
    const u16* const x[1] = {xb + side * half};
    const bool there[1] = {lane < 4};
    float acc[1][1][4] = {};
    plain_rows<1, WARPS, 2>(acc, router + (i64)row * width + side * half, x, there, half, width);
    gather<1, 1, WARPS>(shared, acc);
    if (t < 16) {
        parts[side * experts + row + t] = whole<WARPS>(shared, t * 8, 128);
        __threadfence();
    }
    __syncthreads();
    if (t == 0) last = atomicAdd(arrived, 1) == routing - 1;
    __syncthreads();
    if (!last || t >= 32) return;
    __threadfence();
    float each[EACH], offset[EACH], weight;
    int id;
    load_each(offset, bias, experts);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int e = lane + 32 * j;
        each[j] = 0.f;
        if (e < experts) {
            each[j] = __ldcg(parts + e) + __ldcg(parts + experts + e);
            logits[e] = each[j];
        }
    }
    choose_experts(each, offset, table ? table + tokens[0] * places : nullptr, experts, places, factor, id, weight);
    if (lane == 0) *arrived = 0;
    if (lane >= places) return;
    ids[lane] = id;
    weights[lane] = weight;
    order[lane] = lane;
    Slot& into = slots[lane];
    into.expert = id;
    into.first = lane;
    into.count = 1;
    const longlong2 opens = reinterpret_cast<const longlong2*>(addresses)[id * 2];
    const longlong2 closes = reinterpret_cast<const longlong2*>(addresses)[id * 2 + 1];
    reinterpret_cast<longlong2*>(into.address)[0] = opens;
    reinterpret_cast<longlong2*>(into.address)[1] = closes;
}

#define PRODUCT(NAME, NT, WARPS, U, WM, OUT)                                                                              \
    extern "C" __global__ void __launch_bounds__(WM * WARPS * 32) NAME(                                                  \
        const u8* codes, const u8* scale, int rows8, const u8* codes2, const u8* scale2, int rows8b, const u16* plain,    \
        int rows16, const u16* xh, const u16* xb, int n, int inner, int x_stride, OUT* out, int out_stride, int group) {  \
        product<NT, WARPS, U, WM, OUT>(codes, scale, rows8, codes2, scale2, rows8b, plain, rows16, xh, xb, n, inner,     \
                                       x_stride, out, out_stride, group);                                                \
    }
#define PRODUCTS(NT, WARPS, U, WM)                                           \
    PRODUCT(product_f32_##NT##_##WARPS##_##U##_##WM, NT, WARPS, U, WM, float) \
    PRODUCT(product_f16_##NT##_##WARPS##_##U##_##WM, NT, WARPS, U, WM, u16)   \
    PRODUCT(product_bf16_##NT##_##WARPS##_##U##_##WM, NT, WARPS, U, WM, bf16)
PRODUCTS(1, 8, 1, 1)
PRODUCTS(1, 8, 2, 1)
PRODUCTS(1, 8, 3, 1)
PRODUCTS(2, 4, 1, 1)
PRODUCTS(2, 8, 1, 1)
PRODUCTS(4, 2, 1, 4)
PRODUCTS(4, 4, 1, 2)
PRODUCTS(4, 8, 1, 1)
PRODUCTS(8, 1, 1, 8)
PRODUCTS(8, 2, 1, 4)
PRODUCTS(8, 4, 1, 1)

#define OPEN_SHARED(NT, WARPS, U)                                                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) open_shared_##NT(                                            \
        const u8* codes, const u8* scale, int inner, const u16* router, int experts, const u16* xh, const u16* xb, int n, \
        int width, u16* z, float* logits, int logit_stride, float limit) {                                               \
        open_shared<NT, WARPS, U>(codes, scale, inner, router, experts, xh, xb, n, width, z, logits, logit_stride, limit); \
    }
OPEN_SHARED(1, 8, 2)
OPEN_SHARED(2, 8, 1)
OPEN_SHARED(4, 8, 1)
OPEN_SHARED(8, 4, 1)

#define OPEN_ONE(EACH)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) open_one_##EACH(                                                    \
        const u8* codes, const u8* scale, int inner, const u16* router, int experts, const u16* xh, const u16* xb,        \
        int width, u16* z, float* logits, float limit, float* parts, int* arrived, const float* bias, const int* table,   \
        const i64* tokens, const i64* addresses, int* ids, float* weights, int* order, Slot* slots, int places,           \
        float factor) {                                                                                                   \
        open_one<EACH, 8>(codes, scale, inner, router, experts, xh, xb, width, z, logits, limit, parts, arrived, bias,    \
                          table, tokens, addresses, ids, weights, order, slots, places, factor);                          \
    }
OPEN_ONE(8)
OPEN_ONE(16)

constexpr int FAR_SCALES = 256;  // sixteen bytes of scales for up to 8,192 inputs of sixteen rows

// Scales of RT times sixteen rows that lie across the bus, all of them at once: sixteen rows are one piece of memory.
template <int RT, int WARPS>
__device__ __forceinline__ void fetch_scales(uint4* known, const u8* const (&scale)[RT], int scale_bytes) {
#pragma unroll
    for (int r = 0; r < RT; r++)
        for (int i = threadIdx.x; i < scale_bytes; i += WARPS * 32) known[r * scale_bytes + i] = stream16(scale[r] + i * 16);
    __syncthreads();
}

// Experts of the step's plan: blockIdx.y is a slot, blockIdx.x sixteen rows of gate and of up. With BUS some experts, those
// at addresses from `far_from` to `far_to`, lie in host memory. The next launch is given leave when the plan is there, so
// that it may read it before it waits.
template <int WARPS, bool BUS, bool PIPE>
__device__ __forceinline__ void open_experts(const Slot* slots, const int* order, const float* weights, const u16* x, u16* z,
                                             int inner, int width, int places, float limit, int offset, float gain,
                                             i64 far_from, i64 far_to) {
    __shared__ float shared[WARPS * 2 * 16 * 8];
    __shared__ uint4 lent[BUS ? WARPS * 2 * 256 : 1], known[BUS ? 2 * FAR_SCALES : 1];
    wait_for_inputs();
    let_next_start();
    const Slot* slot = slots + blockIdx.y;
    const int4 about = __ldcg(reinterpret_cast<const int4*>(slot));
    const int count = about.z, first = about.y;
    const int g = (threadIdx.x & 31) >> 2, row = blockIdx.x * 16;
    const longlong2 place = __ldcg(reinterpret_cast<const longlong2*>(slot->address));
    const u8* codes = reinterpret_cast<const u8*>(place.x) + (i64)row * (width >> 1);
    const u8* scale = reinterpret_cast<const u8*>(place.y) + (i64)row * (width >> 5);
    const u8* const c[2] = {codes, codes + (i64)inner * (width >> 1)};
    const u8* const s[2] = {scale, scale + (i64)inner * (width >> 5)};
    const bool far = BUS && place.x >= far_from && place.x < far_to;
    if (far && count) fetch_scales<2, WARPS>(known, s, width >> 5);
    for (int base = 0; base < count; base += 8) {
        const bool there = base + g < count;
        const int token = there ? __ldcg(order + first + base + g) / places : 0;
        float acc[2][1][4] = {};
        if (far)
            far_rows<2, WARPS>(acc, c, x + (i64)token * width, there, width, offset, lent, known);
        else
            fp4_rows<2, WARPS, PIPE, false>(acc, c, s, x + (i64)token * width, there, width, offset);
        if (base) __syncthreads();
        gather<1, 2, WARPS>(shared, acc);
        for (int i = threadIdx.x; i < 128; i += WARPS * 32) {
            const int r = i & 15, t = i >> 4;
            if (base + t < count) {
                const int mine = __ldcg(order + first + base + t);
                const float a = whole<WARPS>(shared, r * 8 + t, 256) * gain;
                const float b = whole<WARPS>(shared, 128 + r * 8 + t, 256) * gain;
                const int at = row + (r & 8) + ((r & 7) >> 1) + 4 * (r & 1);  // the order in which codes of `down` are met
                put(z + (i64)mine * inner + at, gated(a, b, limit) * __ldcg(weights + mine));
            }
        }
    }
}

// Slots as above, RT times sixteen rows of down; behind the last slot the shared expert's down, up to eight tokens a block.
template <int WARPS, int RT, bool BUS, bool PIPE>
__device__ __forceinline__ void close_experts(const Slot* slots, int slot_count, const int* order, const u16* z, float* y,
                                              int inner, int width, int places, int offset, float gain, const u8* codes,
                                              const u8* scale, const u16* z_shared, int n, i64 far_from, i64 far_to) {
    __shared__ float shared[WARPS * RT * 16 * 8];
    __shared__ uint4 lent[BUS ? WARPS * RT * 256 : 1], known[BUS ? RT * FAR_SCALES : 1];
    let_next_start();
    const int g = (threadIdx.x & 31) >> 2, row = blockIdx.x * 16 * RT;
    const u8 *c[RT], *s[RT];
    float acc[RT][1][4] = {};
    if (blockIdx.y >= slot_count) {
        const int first = (blockIdx.y - slot_count) * 8;
        const u16* const x[1] = {z_shared + (i64)(first + g) * inner};
        const bool there[1] = {first + g < n};
#pragma unroll
        for (int r = 0; r < RT; r++) {
            c[r] = codes + (i64)(row + 16 * r) * inner;
            s[r] = scale + row + 16 * r;
        }
        fp8_rows<1, RT, WARPS, WARPS == 1 ? 4 : 2>(acc, c, s, width, x, there, inner);
        gather<1, RT, WARPS>(shared, acc);
        for (int i = threadIdx.x; i < RT * 128; i += WARPS * 32) {
            const int r = i & (16 * RT - 1), t = i / (16 * RT);
            if (first + t < n)
                y[((i64)(first + t) * (places + 1) + places) * width + row + r] = whole<WARPS>(shared, r * 8 + t, RT * 128);
        }
        return;
    }
    const Slot* slot = slots + blockIdx.y;  // which stood there before the launch before gave leave
    const int4 about = __ldcg(reinterpret_cast<const int4*>(slot));
    const int count = about.z, first = about.y;
    const longlong2 place = __ldcg(reinterpret_cast<const longlong2*>(slot->address) + 1);
#pragma unroll
    for (int r = 0; r < RT; r++) {
        c[r] = reinterpret_cast<const u8*>(place.x) + (i64)(row + 16 * r) * (inner >> 1);
        s[r] = reinterpret_cast<const u8*>(place.y) + (i64)(row + 16 * r) * (inner >> 5);
    }
    const bool far = BUS && place.x >= far_from && place.x < far_to;
    if (far && count) fetch_scales<RT, WARPS>(known, s, inner >> 5);
    if (far || !count) wait_for_inputs();
    for (int base = 0; base < count; base += 8) {
        const bool there = base + g < count;
        const int mine = there ? __ldcg(order + first + base + g) : 0;
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[r][0][i] = 0.f;
        if (far)
            far_rows<RT, WARPS>(acc, c, z + (i64)mine * inner, there, inner, offset, lent, known);
        else
            fp4_rows<RT, WARPS, PIPE, true>(acc, c, s, z + (i64)mine * inner, there, inner, offset);
        if (base) __syncthreads();
        gather<1, RT, WARPS>(shared, acc);
        for (int i = threadIdx.x; i < RT * 128; i += WARPS * 32) {
            const int r = i & (16 * RT - 1), t = i / (16 * RT);
            if (base + t < count) {
                const int p = __ldcg(order + first + base + t);
                y[((i64)(p / places) * (places + 1) + p % places) * width + row + r] =
                    whole<WARPS>(shared, r * 8 + t, RT * 128) * gain;
            }
        }
    }
}

#define OPEN(NAME, WARPS, BUS, PIPE, BLOCKS)                                                                               \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) NAME(                                                 \
        const Slot* slots, const int* order, const float* weights, const u16* x, u16* z, int inner, int width, int places, \
        float limit, int offset, float gain, i64 far_from, i64 far_to) {                                                  \
        open_experts<WARPS, BUS, PIPE>(slots, order, weights, x, z, inner, width, places, limit, offset, gain, far_from,  \
                                       far_to);                                                                           \
    }
#define CLOSE(NAME, WARPS, RT, BUS, PIPE, BLOCKS)                                                                          \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) NAME(                                                 \
        const Slot* slots, int slot_count, const int* order, const u16* z, float* y, int inner, int width, int places,     \
        int offset, float gain, const u8* codes, const u8* scale, const u16* z_shared, int n, i64 far_from, i64 far_to) { \
        close_experts<WARPS, RT, BUS, PIPE>(slots, slot_count, order, z, y, inner, width, places, offset, gain, codes,    \
                                            scale, z_shared, n, far_from, far_to);                                        \
    }
// The last number is how many blocks are to stay on a processor: all of a single token's launches at once on an H200.
OPEN(open_experts_2, 2, false, true, 6)
OPEN(open_experts_4, 4, false, false, 4)
OPEN(open_experts_2_bus, 2, true, true, 6)
OPEN(open_experts_4_bus, 4, true, false, 4)
CLOSE(close_experts_1_1, 1, 1, false, true, 14)
CLOSE(close_experts_4_1, 4, 1, false, false, 5)
CLOSE(close_experts_2_2, 2, 2, false, false, 6)
CLOSE(close_experts_1_1_bus, 1, 1, true, true, 14)
CLOSE(close_experts_4_1_bus, 4, 1, true, false, 5)
CLOSE(close_experts_2_2_bus, 2, 2, true, false, 6)
