// Depthwise transposed convolution in one or two dimensions with few taps: bytes are the limit, nothing is shared.
//
// Layout. Input (BATCH, GROUPS, H, W) and output (BATCH, GROUPS, OH, OW), both dense, NCHW or channels_last (LAST).
// Weights are packed by `direct_pack` in the accumulator's type: [group][tap] for NCHW, [tap][group] for channels_last.
//
// Steps. Cells, phases and taps are those of direct.cu. A thread owns CELLS neighbouring cells along W of CHANNELS
// neighbouring channels (1 for NCHW), keeps their weights in registers and walks down `strip` cells along H with a window
// of SPAN_H + 1 input rows in registers; the row of the next step is on its way while this one's outputs are computed.
// Neighbouring threads have neighbouring cells (NCHW) or channels (channels_last), so that a warp loads and stores
// whole lines without shared memory and without a barrier. The window rotates through its registers by unrolling.
//
// Constraints: GROUPS is a multiple of CHANNELS; taps * CHANNELS and the window fit in registers (the planner checks);
// fewer than 2^31 threads.

#include "direct.cuh"

// src: (GROUPS, 1, KH, KW) with strides in elements (the third one, of depth, is not used); one thread per packed element.
extern "C" __global__ void direct_pack(const T* __restrict__ src, Acc* __restrict__ dst, i64 s0, i64, i64, i64 s3, i64 s4,
                                       i64 total) {
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (i64)gridDim.x * blockDim.x) {
        const int tap = (int)(LAST ? at / GROUPS : at % (KH * KW));
        const i64 group = LAST ? at % GROUPS : at / (KH * KW);
        dst[at] = load_value(src[group * s0 + tap / KW * s3 + tap % KW * s4]);
    }
}

constexpr int RUN = CELLS * SW;       // neighbouring outputs of a row
constexpr int COLS = CELLS + SPAN_W;  // input columns of a window
constexpr int RING = SPAN_H + 1;      // input rows of a window
constexpr int STEP = LAST ? GROUPS : 1;  // elements from a pixel to its neighbour
constexpr int CHANNEL_BLOCKS = GROUPS / CHANNELS;

// Outputs of a row in one vector: the largest power of two that divides RUN, at most 16 bytes.
__device__ constexpr int wide() {
    int n = 1;
    while (RUN % (2 * n) == 0 && 2 * n * (int)sizeof(T) <= 16) n *= 2;
    return n;
}
constexpr int WIDE = LAST ? CHANNELS : wide();
struct alignas(WIDE * sizeof(T)) Line {
    T v[WIDE];
};
struct alignas(CHANNELS * sizeof(T)) Pixel {
    T v[CHANNELS];
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct_walk(const T* __restrict__ x, const Acc* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out,
                int h, int w, int oh_size, int ow_size, int runs, int strips, int strip, int total) {
    u32 at = blockIdx.x * (u32)THREADS + threadIdx.x;
    if (at >= (u32)total) return;
    int channel = 0;
    if (LAST) {
        channel = at % CHANNEL_BLOCKS * CHANNELS;
        at /= CHANNEL_BLOCKS;
    }
    const int cell_w = at % (u32)runs * CELLS;
    at /= (u32)runs;
    const int cell_h = at % (u32)strips * strip;
    i64 image = at / (u32)strips;
    if (!LAST) {
        channel = (int)(image % GROUPS);
        image /= GROUPS;
    }

    Acc taps[KH * KW][CHANNELS];
#pragma unroll
    for (int k = 0; k < KH * KW; ++k)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
            taps[k][c] = LAST ? weight[k * GROUPS + channel + c] : weight[channel * (KH * KW) + k];
    Acc start[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) start[c] = bias ? load_value(bias[channel + c]) : Acc(0);

    const int first_col = cell_w + MIN_W;
    const T* from = x + (LAST ? image * h * w * GROUPS + channel : (image * GROUPS + channel) * h * w) + (i64)first_col * STEP;
    const bool whole_pixels = CHANNELS == 1 || (unsigned long long)x % sizeof(Pixel) == 0;
    const auto fetch = [&](Pixel(&to)[COLS], int row) {
        const bool inside = (u32)row < (u32)h;
        const T* line = from + (i64)row * w * STEP;
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
#pragma unroll
            for (int m = 0; m < CHANNELS; ++m) to[c].v[m] = 0;
            if (inside && (u32)(first_col + c) < (u32)w) {
                if (whole_pixels) {
                    to[c] = *reinterpret_cast<const Pixel*>(line + (i64)c * STEP);
                } else {
#pragma unroll
                    for (int m = 0; m < CHANNELS; ++m) to[c].v[m] = line[(i64)c * STEP + m];
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
    T* to = out + (LAST ? image * oh_size * ow_size * GROUPS + channel : (image * GROUPS + channel) * oh_size * ow_size) +
            ((i64)cell_h * SH * ow_size + ow) * STEP;
    const bool whole_lines =
        (unsigned long long)out % sizeof(Line) == 0 && (LAST || (ow + RUN <= ow_size && ow_size % WIDE == 0));
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
                T* line = to + ((i64)step * SH + t) * ow_size * STEP;
                Line lines[RUN * CHANNELS / WIDE];
#pragma unroll
                for (int v = 0; v < RUN; ++v)
#pragma unroll
                    for (int m = 0; m < CHANNELS; ++m)
                        lines[(v * CHANNELS + m) / WIDE].v[(v * CHANNELS + m) % WIDE] = store_value(sum[v][m]);
                if (whole_lines) {
#pragma unroll
                    for (int k = 0; k < RUN * CHANNELS / WIDE; ++k)
                        if (!LAST || ow + k < ow_size)
                            *reinterpret_cast<Line*>(line + (i64)k * (LAST ? GROUPS : WIDE)) = lines[k];
                } else {
#pragma unroll
                    for (int v = 0; v < RUN; ++v)
#pragma unroll
                        for (int m = 0; m < CHANNELS; ++m)
                            if (ow + v < ow_size)
                                line[(i64)v * STEP + m] = lines[(v * CHANNELS + m) / WIDE].v[(v * CHANNELS + m) % WIDE];
                }
            }
        }
    }
}
