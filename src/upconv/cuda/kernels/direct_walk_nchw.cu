// Depthwise transposed convolution in one or two dimensions, NCHW: the output's bytes are the limit. Weights are packed by
// `direct_pack` in the accumulator's type, [group][tap].
//
// As direct_walk.cu: a thread owns CELLS neighbouring cells along W and walks down `strip` cells along H with a window of
// SPAN_H + 1 input rows in registers, the next one on its way. Its taps lie in shared memory, so that there may be many (FCN's
// bilinear kernel has 16 x 16 at a stride of 8); a block has threads of one channel of one image, so that a warp reads the
// same 16 bytes of them at once (or, in PIECES, as many times 16).
//
// Stores. Where a thread's outputs of a row are one vector, a warp stores neighbouring vectors. Else they go through shared
// memory, so that each store covers neighbours: in vectors, or, where rows do not begin at such, one by one. Stored
// as they are, or exchanged by pairs of lanes, they take more than twice as long.
//
// PIECES > 1: as many threads have a cell, neighbours, and a vector of its outputs each, which they store as it is where rows begin at
// vectors: its taps are neighbours too, and others than the next thread's. Nothing goes through shared memory but taps then.
//
// Constraints: an output plane has fewer than 2^31 elements; a channel of an image has (runs * strips) / THREADS blocks,
// rounded up.

#include "direct.cuh"

extern "C" __global__ void direct_pack(const T* __restrict__ src, Acc* __restrict__ dst, i64 s0, i64, i64, i64 s3, i64 s4,
                                       i64 total) {
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (i64)gridDim.x * blockDim.x) {
        const int tap = (int)(at % (KH * KW));
        dst[at] = load_value(src[at / (KH * KW) * s0 + tap / KW * s3 + tap % KW * s4]);
    }
}

constexpr int RUN = CELLS * SW / PIECES;                            // neighbouring outputs of a row
constexpr int ROW_TAPS = KW / SW;                                   // PIECES > 1: taps of an output in a row
constexpr int COLS = PIECES > 1 ? ROW_TAPS : CELLS + SPAN_W;        // input columns of a window
constexpr int TAP_ROW = (KW + VEC - 1) / VEC;  // vectors of a row of taps

// Outputs of a row in one vector: the largest power of two that divides RUN, at most 16 bytes.
__device__ constexpr int wide() {
    int n = 1;
    while (RUN % (2 * n) == 0 && 2 * n * (int)sizeof(T) <= 16) n *= 2;
    return n;
}
constexpr int WIDE = wide(), LINES = RUN / WIDE;
struct alignas(WIDE * sizeof(T)) Line {
    T v[WIDE];
};

// A vector of taps, read where it stands: the compiler would keep those of all steps, and spill them.
__device__ __forceinline__ Pack load_taps(u32 at) {
    Pack pack;
    load_shared_constants(pack.v, at);
    return pack;
}

// Where vector `at` of a warp's lies in its buffer: eight lanes that write meet eight different places of 128 bytes.
__device__ __forceinline__ int swizzled(int at) { return LINES % 2 ? at : at ^ (at >> 3 & (LINES - 1 & 7)); }

// A warp's outputs of a row each, UNIT (WIDE or 1) elements a lane and store: element e of a thread goes to `place` + e, if that is before `left`.
template <int UNIT>
__device__ __forceinline__ void store_turned(T* plane, const Line* buffer, int place, int left, int lane) {
    constexpr int UNITS = RUN / UNIT;  // of a thread
#pragma unroll
    for (int k = 0; k < UNITS; ++k) {
        const int at = k * 32 + lane, element = at % UNITS * UNIT;
        const int of = __shfl_sync(0xffffffffu, place, at / UNITS), room = __shfl_sync(0xffffffffu, left, at / UNITS);
        const Line& line = buffer[swizzled(at / UNITS * LINES + element / WIDE)];
        if (element >= room) continue;
        if (UNIT == WIDE) *reinterpret_cast<Line*>(plane + of + element) = line;
        else plane[of + element] = line.v[element % WIDE];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_walk(const T* __restrict__ x, const Acc* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out,
                int h, int w, int oh_size, int ow_size, int runs, int strips, int strip, int) {
    __shared__ Pack taps[KH * TAP_ROW];
    __shared__ Line buffers[THREADS * LINES];
    const int parts = (runs * strips + THREADS - 1) / THREADS;
    const int part = blockIdx.x % (u32)parts;
    const i64 image = blockIdx.x / (u32)parts;  // and channel
    const int channel = (int)(image % GROUPS);
    for (int i = threadIdx.x; i < KH * KW; i += THREADS)
        taps[i / KW * TAP_ROW + i % KW / VEC].v[i % KW % VEC] = weight[channel * (KH * KW) + i];
    const Acc start = bias ? load_value(bias[channel]) : Acc(0);

    const int at = part * THREADS + threadIdx.x;
    const int cell_w = at % runs / PIECES * CELLS, piece = at % runs % PIECES, cell_h = at / runs * strip;
    const int first_phase = PIECES > 1 ? piece * RUN + PW : 0;  // whose taps are at multiples of the stride from its remainder on
    const int cells_left = (oh_size + SH - 1) / SH - cell_h;
    const int count = at >= runs * strips ? 0 : cells_left < strip ? cells_left : strip;
    const int first_col = cell_w + (PIECES > 1 ? first_phase / SW - (ROW_TAPS - 1) : MIN_W);
    const T* from = x + image * h * w + first_col;
    const auto fetch = [&](T(&to)[COLS], int row) {
        const bool inside = (u32)row < (u32)h;
#pragma unroll
        for (int c = 0; c < COLS; ++c) to[c] = inside && (u32)(first_col + c) < (u32)w ? from[(i64)row * w + c] : T(0);
    };

    Acc window[SPAN_H + 1][COLS];
    T next[COLS];
#pragma unroll
    for (int r = 0; r < SPAN_H; ++r) {
        fetch(next, count ? cell_h + MIN_H + r : -1);
#pragma unroll
        for (int c = 0; c < COLS; ++c) window[r][c] = load_value(next[c]);
    }
    fetch(next, count ? cell_h + MIN_H + SPAN_H : -1);
    __syncthreads();

    T* plane = out + image * oh_size * ow_size;
    const int ow = cell_w * SW + piece * RUN;
    const bool aligned = (unsigned long long)out % sizeof(Line) == 0 && ow_size % WIDE == 0;
    const int lane = threadIdx.x % 32;
    Line* buffer = buffers + threadIdx.x / 32 * (32 * LINES);
    const u32 taps_at = (u32)__cvta_generic_to_shared(taps) + first_phase % SW * (u32)sizeof(Acc);
#pragma unroll 1
    for (int step = 0; step < strip; ++step) {
#pragma unroll
        for (int c = 0; c < COLS; ++c) window[SPAN_H][c] = load_value(next[c]);
        fetch(next, step + 1 < count ? cell_h + MIN_H + SPAN_H + step + 1 : -1);
#pragma unroll
        for (int t = 0; t < SH; ++t) {
            Acc sum[RUN];
#pragma unroll
            for (int v = 0; v < RUN; ++v) sum[v] = start;
#pragma unroll
            for (int kh = 0; kh < KH; ++kh) {
                if (floor_mod(kh * DH - PH, SH) != t) continue;
                const int r = (t + PH - kh * DH - MIN_H * SH) / SH;
                Pack pack;
#if PIECES > 1
#pragma unroll
                for (int tap = 0; tap < ROW_TAPS * RUN; ++tap) {
                    const int j = tap / RUN, v = tap % RUN;
                    if (v % VEC == 0) pack = load_taps(taps_at + (kh * TAP_ROW + (j * SW + v) / VEC) * (u32)sizeof(Pack));
                    sum[v] = multiply_add(pack.v[v % VEC], window[r][ROW_TAPS - 1 - j], sum[v]);
                }
#else
#pragma unroll
                for (int kw = 0; kw < KW; ++kw) {
                    if (kw % VEC == 0) pack = load_taps(taps_at + (kh * TAP_ROW + kw / VEC) * (u32)sizeof(Pack));
                    const int u = floor_mod(kw * DW - PW, SW);
                    const int shift = (u + PW - kw * DW - MIN_W * SW) / SW;
#pragma unroll
                    for (int c = 0; c < CELLS; ++c)
                        sum[c * SW + u] = multiply_add(pack.v[kw % VEC], window[r][c + shift], sum[c * SW + u]);
                }
#endif
            }
            const int oh = (cell_h + step) * SH + t;
            const int place = oh * ow_size + ow, left = step < count && oh < oh_size ? ow_size - ow : 0;
            Line lines[LINES];
#pragma unroll
            for (int v = 0; v < RUN; ++v) lines[v / WIDE].v[v % WIDE] = store_value(sum[v]);
            if (LINES == 1 && aligned) {
                if (left > 0) *reinterpret_cast<Line*>(plane + place) = lines[0];
                continue;
            }
            __syncwarp();
#pragma unroll
            for (int k = 0; k < LINES; ++k) buffer[swizzled(lane * LINES + k)] = lines[k];
            __syncwarp();
            if (aligned) store_turned<WIDE>(plane, buffer, place, left, lane);
            else store_turned<1>(plane, buffer, place, left, lane);
        }
#pragma unroll
        for (int r = 0; r < SPAN_H; ++r)
#pragma unroll
            for (int c = 0; c < COLS; ++c) window[r][c] = window[r + 1][c];
    }
}
