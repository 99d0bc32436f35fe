// Depthwise transposed convolution in two dimensions with few taps, channels_last: bytes are the limit, nothing is shared.
// (NCHW: direct_walk_nchw.cu.)
//
// Layout. Input (BATCH, GROUPS, H, W) and output (BATCH, GROUPS, OH, OW), both dense, channels_last. Weights are packed by
// `direct_pack` in the accumulator's type, [tap][group].
//
// Steps. Cells, phases and taps are those of direct.cu. A thread owns CELLS neighbouring cells along W of CHANNELS
// neighbouring channels, keeps their weights in registers and walks down `strip` cells along H with a window
// of SPAN_H + 1 input rows in registers; the row of the next step is on its way while this one's outputs are computed.
// Neighbouring threads have neighbouring channels, so that a warp loads and stores
// whole lines without shared memory and without a barrier. The window rotates through its registers by unrolling.
//
// Constraints: GROUPS is a multiple of CHANNELS; taps * CHANNELS and the window fit in registers (the planner checks);
// fewer than 2^31 threads.

#include "direct.cuh"

// src: (GROUPS, 1, KH, KW) with strides in elements (the third one, of depth, is not used); one thread per packed element.
extern "C" __global__ void direct_pack(const T* __restrict__ src, Acc* __restrict__ dst, i64 s0, i64, i64, i64 s3, i64 s4,
                                       i64 total) {
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (i64)gridDim.x * blockDim.x) {
        const int tap = (int)(at / GROUPS);
        const i64 group = at % GROUPS;
        dst[at] = load_value(src[group * s0 + tap / KW * s3 + tap % KW * s4]);
    }
}

constexpr int RUN = CELLS * SW;       // neighbouring outputs of a row
constexpr int COLS = CELLS + SPAN_W;  // input columns of a window
constexpr int RING = SPAN_H + 1;      // input rows of a window
constexpr int CHANNEL_BLOCKS = GROUPS / CHANNELS;

struct alignas(CHANNELS * sizeof(T)) Pixel {
    T v[CHANNELS];
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_walk(const T* __restrict__ x, const Acc* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out,
                int h, int w, int oh_size, int ow_size, int runs, int strips, int strip, int total) {
    u32 at = blockIdx.x * (u32)THREADS + threadIdx.x;
    if (at >= (u32)total) return;
    const int channel = at % CHANNEL_BLOCKS * CHANNELS;
    at /= CHANNEL_BLOCKS;
    const int cell_w = at % (u32)runs * CELLS;
    at /= (u32)runs;
    const int cell_h = at % (u32)strips * strip;
    const i64 image = at / (u32)strips;

    Acc taps[KH * KW][CHANNELS];
#pragma unroll
    for (int k = 0; k < KH * KW; ++k)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
            taps[k][c] = weight[k * GROUPS + channel + c];
    Acc start[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) start[c] = bias ? load_value(bias[channel + c]) : Acc(0);

    const int first_col = cell_w + MIN_W;
    const T* from = x + image * h * w * GROUPS + channel + (i64)first_col * GROUPS;
    const bool whole_pixels = CHANNELS == 1 || (unsigned long long)x % sizeof(Pixel) == 0;
    const auto fetch = [&](Pixel(&to)[COLS], int row) {
        const bool inside = (u32)row < (u32)h;
        const T* line = from + (i64)row * w * GROUPS;
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
#pragma unroll
            for (int m = 0; m < CHANNELS; ++m) to[c].v[m] = 0;
            if (inside && (u32)(first_col + c) < (u32)w) {
                if (whole_pixels) {
                    to[c] = *reinterpret_cast<const Pixel*>(line + (i64)c * GROUPS);
                } else {
#pragma unroll
                    for (int m = 0; m < CHANNELS; ++m) to[c].v[m] = line[(i64)c * GROUPS + m];
                }
            }
        }
    };

    Acc ring[RING][COLS][CHANNELS];
    Pixel next[COLS];
    const auto keep = [&](Acc(&to)[COLS][CHANNELS]) {
#pragma unroll
        for (int c = 0; c < COLS; ++c)
#pragma unroll
            for (int m = 0; m < CHANNELS; ++m) to[c][m] = load_value(next[c].v[m]);
    };
#pragma unroll
    for (int r = 0; r < SPAN_H; ++r) {
        fetch(next, cell_h + MIN_H + r);
        keep(ring[r]);
    }
    fetch(next, cell_h + MIN_H + SPAN_H);

    const int cells_left = (oh_size + SH - 1) / SH - cell_h;
    const int count = cells_left < strip ? cells_left : strip;
    const int ow = cell_w * SW;
    T* to = out + image * oh_size * ow_size * GROUPS + channel + ((i64)cell_h * SH * ow_size + ow) * GROUPS;
    const bool whole_lines = (unsigned long long)out % sizeof(Pixel) == 0;
#pragma unroll 1
    for (int base = 0; base < count; base += RING) {
#pragma unroll
        for (int i = 0; i < RING; ++i) {
            const int step = base + i;
            if (step >= count) break;
            keep(ring[(i + SPAN_H) % RING]);
            fetch(next, step + 1 < count ? cell_h + MIN_H + SPAN_H + step + 1 : -1);
#pragma unroll
            for (int t = 0; t < SH; ++t) {
                Acc sum[RUN][CHANNELS];
#pragma unroll
                for (int v = 0; v < RUN; ++v)
#pragma unroll
                    for (int m = 0; m < CHANNELS; ++m) sum[v][m] = start[m];
#pragma unroll
                for (int kh = 0; kh < KH; ++kh) {
                    if (floor_mod(kh * DH - PH, SH) != t) continue;
                    const int r = (t + PH - kh * DH - MIN_H * SH) / SH;
#pragma unroll
                    for (int kw = 0; kw < KW; ++kw) {
                        const int u = floor_mod(kw * DW - PW, SW);
                        const int shift = (u + PW - kw * DW - MIN_W * SW) / SW;
#pragma unroll
                        for (int c = 0; c < CELLS; ++c)
#pragma unroll
                            for (int m = 0; m < CHANNELS; ++m)
                                sum[c * SW + u][m] = multiply_add(taps[kh * KW + kw][m], ring[(i + r) % RING][c + shift][m],
                                                                  sum[c * SW + u][m]);
                    }
                }
                if ((cell_h + step) * SH + t >= oh_size) continue;
                T* line = to + ((i64)step * SH + t) * ow_size * GROUPS;
                Pixel pixels[RUN];
#pragma unroll
                for (int v = 0; v < RUN; ++v)
#pragma unroll
                    for (int m = 0; m < CHANNELS; ++m)
                        pixels[v].v[m] = store_value(sum[v][m]);
                if (whole_lines) {
#pragma unroll
                    for (int v = 0; v < RUN; ++v)
                        if (ow + v < ow_size) *reinterpret_cast<Pixel*>(line + (i64)v * GROUPS) = pixels[v];
                } else {
#pragma unroll
                    for (int v = 0; v < RUN; ++v)
#pragma unroll
                        for (int m = 0; m < CHANNELS; ++m)
                            if (ow + v < ow_size)
                                line[(i64)v * GROUPS + m] = pixels[v].v[m];
                }
            }
        }
    }
}
