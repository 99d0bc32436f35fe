// Depthwise transposed convolution in two dimensions with few taps, channels_last: bytes are the limit, nothing is shared.
// (NCHW: direct_walk_nchw.cu.)
//
// Layout. Input (batch, groups, H, W) and output (batch, groups, OH, OW), both dense, channels_last. Weights are packed by
// `direct_pack` in the accumulator's type, [tap][group].
//
// Steps. Cells, phases and taps are those of direct.cu. A thread owns `cells` neighbouring cells along W of a
// channel, keeps its weights in registers and iterates over `strip` cells along H with a window
// of SPAN_H + 1 input rows in registers; the row of the next step is loaded while this one's outputs are computed.
// Neighbouring threads have neighbouring channels, so that a warp loads and stores
// whole lines without shared memory and without a barrier. The window rotates through its registers by unrolling.
//
// Constraints: taps and the window fit in registers (the planner checks); fewer than 2^31 threads.
#include "direct_weights.cuh"

template <class C_>
struct DirectWalk {
using C = C_;
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;

static constexpr int GROUPS = C::groups, CELLS = C::cells;
static constexpr int KH = C::kernel_h, KW = C::kernel_w, SH = C::stride_h, SW = C::stride_w;
static constexpr int PH = C::padding_h, PW = C::padding_w, DH = C::dilation_h, DW = C::dilation_w;
static constexpr int MIN_H = C::min_h, MIN_W = C::min_w, SPAN_H = C::span_h;
static constexpr int RUN = CELLS * SW;          // neighbouring outputs of a row
static constexpr int COLS = CELLS + C::span_w;  // input columns of a window
static constexpr int RING = SPAN_H + 1;         // input rows of a window

static __device__ __forceinline__ Acc packed_weight(const T* src, i64 at, const WeightStrides& s) {
    const int tap = (int)(at / GROUPS);
    const i64 group = at % GROUPS;
    return Scalar::value(src[group * s.in + tap / KW * s.h + tap % KW * s.w]);
}

struct Sizes { int h, w, oh, ow, runs, strips, strip; };

using Row = Acc[COLS];
using Sums = Acc[RUN];

// Row t of the outputs of a step whose window begins at row `first` of the ring.
static __device__ __forceinline__ void multiply(Sums& sum, const Acc (&taps)[KH * KW], const Row (&ring)[RING], int first, int t) {
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        if (floor_mod(kh * DH - PH, SH) != t) continue;
        const int r = (t + PH - kh * DH - MIN_H * SH) / SH;
#pragma unroll
        for (int kw = 0; kw < KW; ++kw) {
            const int u = floor_mod(kw * DW - PW, SW);
            const int shift = (u + PW - kw * DW - MIN_W * SW) / SW;
#pragma unroll
            for (int c = 0; c < CELLS; ++c) sum[c * SW + u] = multiply_add(taps[kh * KW + kw], ring[(first + r) % RING][c + shift], sum[c * SW + u]);
        }
    }
}

// Sums from column `ow` on, where `line` is, to that row of the output.
static __device__ __forceinline__ void store(T* line, const Sums& sum, int ow, int ow_size) {
#pragma unroll
    for (int v = 0; v < RUN; ++v)
        if (ow + v < ow_size) line[(i64)v * GROUPS] = Scalar::stored(sum[v]);
}

static __device__ __forceinline__ void run(const T* __restrict__ x, const Acc* __restrict__ weight, const T* __restrict__ bias,
                                           T* __restrict__ out, const Sizes& s, u32 at) {
    const int channel = at % GROUPS;
    at /= GROUPS;
    const int cell_w = at % (u32)s.runs * CELLS;
    at /= (u32)s.runs;
    const int cell_h = at % (u32)s.strips * s.strip;
    const i64 image = at / (u32)s.strips;

    Acc taps[KH * KW];
#pragma unroll
    for (int k = 0; k < KH * KW; ++k) taps[k] = weight[k * GROUPS + channel];
    const Acc start = bias ? Scalar::value(bias[channel]) : Acc(0);

    const int first_col = cell_w + MIN_W;
    const T* from = x + image * s.h * s.w * GROUPS + channel + (i64)first_col * GROUPS;
    const auto fetch = [&](T(&to)[COLS], int row) {
        const bool inside = (u32)row < (u32)s.h;
        const T* line = from + (i64)row * s.w * GROUPS;
#pragma unroll
        for (int c = 0; c < COLS; ++c) to[c] = inside && (u32)(first_col + c) < (u32)s.w ? line[(i64)c * GROUPS] : T(0);
    };

    Row ring[RING];
    T next[COLS];
    const auto keep = [&](Row& to) {
#pragma unroll
        for (int c = 0; c < COLS; ++c) to[c] = Scalar::value(next[c]);
    };
#pragma unroll
    for (int r = 0; r < SPAN_H; ++r) {
        fetch(next, cell_h + MIN_H + r);
        keep(ring[r]);
    }
    fetch(next, cell_h + MIN_H + SPAN_H);

    const int cells_left = (s.oh + SH - 1) / SH - cell_h;
    const int count = cells_left < s.strip ? cells_left : s.strip;
    const int ow = cell_w * SW;
    T* to = out + image * s.oh * s.ow * GROUPS + channel + ((i64)cell_h * SH * s.ow + ow) * GROUPS;
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
                Sums sum;
#pragma unroll
                for (int v = 0; v < RUN; ++v) sum[v] = start;
                multiply(sum, taps, ring, i, t);
                if ((cell_h + step) * SH + t >= s.oh) continue;
                store(to + ((i64)step * SH + t) * s.ow * GROUPS, sum, ow, s.ow);
            }
        }
    }
}
};

template <class C>
__global__ void __launch_bounds__(C::threads, C::min_blocks)
    direct_walk(const typename DirectWalk<C>::T* __restrict__ x, const typename DirectWalk<C>::Acc* __restrict__ weight,
                const typename DirectWalk<C>::T* __restrict__ bias, typename DirectWalk<C>::T* __restrict__ out, int h, int w,
                int oh_size, int ow_size, int runs, int strips, int strip, int total) {
    const u32 at = blockIdx.x * (u32)C::threads + threadIdx.x;
    if (at < (u32)total) DirectWalk<C>::run(x, weight, bias, out, {h, w, oh_size, ow_size, runs, strips, strip}, at);
}
