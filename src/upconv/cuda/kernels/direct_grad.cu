// Gradients on CUDA cores, for layers whose tensors' bytes are the work: depthwise and small groups, few channels, and float64.
//
//   grad_input   gi[n, ci, i] = sum over co of the group and taps of g[n, co, i * STEP + tap * DIL - PAD] * w[ci, co, tap]
//   grad_weight  dW[ci, co, tap] = sum over n and i of x[n, ci, i] * g[n, co, i * STEP + tap * DIL - PAD]
//
// Neighbouring lanes take neighbours in memory: columns in NCHW, channels in CHANNELS_LAST, so that every load is whole sectors; what taps
// share comes from L1. A thread holds its sums in registers: CI_TILE input channels of a position (grad_input), or
// CO_TILE output channels x TAP_TILE taps of one input channel (grad_weight). grad_weight's blocks take a range of positions each and
// write partial sums; `reduce` adds them in the order of their index, so that every run gives the same bits.
#include "direct.cuh"

#define TAPS (KERNEL_D * KERNEL_H * KERNEL_W)
#define CIN (GROUPS * CIN_G)
#define COUT (GROUPS * COUT_G)
#define THREADS 256

struct Sizes {
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
};

struct Place { int n, d, h, w; };

__device__ __forceinline__ Place place_of(i64 q, const Sizes& s) {
  Place p;
  if (q < 0x7fffffff) {  // divisions of 64 bits cost some 70 instructions each
    u32 r = (u32)q;
    p.w = r % s.in_w;  r /= s.in_w;
    p.h = r % s.in_h;  r /= s.in_h;
    p.d = r % s.in_d;
    p.n = r / s.in_d;
  } else {
    p.w = (int)(q % s.in_w);  q /= s.in_w;
    p.h = (int)(q % s.in_h);  q /= s.in_h;
    p.d = (int)(q % s.in_d);
    p.n = (int)(q / s.in_d);
  }
  return p;
}

// Elements from one column, row, slice and channel of the output's gradient to the next.
#define G_COLUMN (CHANNELS_LAST ? COUT : 1)
#define G_CHANNEL(s) (CHANNELS_LAST ? (i64)1 : (i64)(s).out_d * (s).out_h * (s).out_w)

// =====================================================================================================================
// The gradient for the input
// =====================================================================================================================

#define CI_BLOCKS ((CIN_G + CI_TILE - 1) / CI_TILE)

extern "C" __global__ void __launch_bounds__(THREADS)
grad_input(const T* __restrict__ g, const T* __restrict__ weight, T* __restrict__ gi, int batch, int in_d, int in_h, int in_w,
           int out_d, int out_h, int out_w, i64 total) {
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w};
  i64 index = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (index >= total) return;
  const i64 pixels = (i64)in_d * in_h * in_w;
  int tile, group, ci;
  Place p;
#if CHANNELS_LAST
  tile = (int)(index % (GROUPS * CI_BLOCKS));
  p = place_of(index / (GROUPS * CI_BLOCKS), s);
#else
  i64 q = index % pixels, rest = index / pixels;
  tile = (int)(rest % (GROUPS * CI_BLOCKS));
  p = place_of(q, s);
  p.n = (int)(rest / (GROUPS * CI_BLOCKS));
#endif
  group = tile / CI_BLOCKS;
  ci = tile % CI_BLOCKS * CI_TILE;
  const int first_d = p.d * STEP_D - PAD_D, first_h = p.h * STEP_H - PAD_H, first_w = p.w * STEP_W - PAD_W;
  Acc acc[CI_TILE] = {};
  const T* image = g + (CHANNELS_LAST ? (i64)p.n * out_d * out_h * out_w * COUT + group * COUT_G : ((i64)p.n * COUT + group * COUT_G) * out_d * out_h * out_w);
  const T* w_ci = weight + (i64)(group * CIN_G + ci) * COUT_G * TAPS;
#pragma unroll 1
  for (int co = 0; co < COUT_G; co++, image += G_CHANNEL(s), w_ci += TAPS) {
#pragma unroll UNROLL_D
    for (int kd = 0; kd < KERNEL_D; kd++) {
      int d = first_d + kd * DIL_D;
      if ((u32)d >= (u32)out_d) continue;
#pragma unroll UNROLL_H
      for (int kh = 0; kh < KERNEL_H; kh++) {
        int h = first_h + kh * DIL_H;
        if ((u32)h >= (u32)out_h) continue;
        const T* row = image + ((i64)d * out_h + h) * out_w * G_COLUMN;
        const T* w_row = w_ci + (kd * KERNEL_H + kh) * KERNEL_W;
#pragma unroll UNROLL_W
        for (int kw = 0; kw < KERNEL_W; kw++) {
          int w = first_w + kw * DIL_W;
          if ((u32)w >= (u32)out_w) continue;
          Acc v = load_value(row[(i64)w * G_COLUMN]);
#pragma unroll
          for (int t = 0; t < CI_TILE; t++)
            if (CIN_G % CI_TILE == 0 || ci + t < CIN_G) acc[t] = multiply_add(v, load_value(w_row[(i64)t * COUT_G * TAPS + kw]), acc[t]);
        }
      }
    }
  }
  const i64 at = ((i64)p.d * in_h + p.h) * in_w + p.w;
#pragma unroll
  for (int t = 0; t < CI_TILE; t++) {
    if (CIN_G % CI_TILE && ci + t >= CIN_G) continue;
    int channel = group * CIN_G + ci + t;
    gi[CHANNELS_LAST ? ((i64)p.n * pixels + at) * CIN + channel : ((i64)p.n * CIN + channel) * pixels + at] = store_value(acc[t]);
  }
}

// =====================================================================================================================
// The gradient for the weight
// =====================================================================================================================

#define CO_BLOCKS ((COUT_G + CO_TILE - 1) / CO_TILE)
#define TAP_BLOCKS ((TAPS + TAP_TILE - 1) / TAP_TILE)
#define CHANNEL_BLOCKS (CHANNELS_LAST ? (CIN + 31) / 32 : CIN)  // of input channels: a warp's lanes, or one
#define SUMS (CO_TILE * TAP_TILE)

// partial: [splits][CIN][COUT_G][TAPS] accumulators.
extern "C" __global__ void __launch_bounds__(THREADS)
grad_weight(const T* __restrict__ x, const T* __restrict__ g, Acc* __restrict__ partial, int batch, int in_d, int in_h, int in_w,
            int out_d, int out_h, int out_w, i64 positions, i64 per_split) {
  __shared__ Acc sums[THREADS / 32][CHANNELS_LAST ? 32 : 1];
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int index = blockIdx.x;
  const int first_tap = index % TAP_BLOCKS * TAP_TILE;  index /= TAP_BLOCKS;
  const int co = index % CO_BLOCKS * CO_TILE;  index /= CO_BLOCKS;
  const int channel = index % CHANNEL_BLOCKS * (CHANNELS_LAST ? 32 : 1) + (CHANNELS_LAST ? lane : 0);  index /= CHANNEL_BLOCKS;
  const int split = index, group = channel / CIN_G;
  const i64 begin = split * per_split, end = begin + per_split < positions ? begin + per_split : positions;
  const i64 pixels = (i64)in_d * in_h * in_w, plane = G_CHANNEL(s);
  Acc acc[CO_TILE][TAP_TILE] = {};
  const bool ours = !CHANNELS_LAST || channel < CIN;
#if CHANNELS_LAST
  for (i64 q = begin + warp; q < end; q += THREADS / 32) {  // a warp takes a position
#else
  for (i64 q = begin + threadIdx.x; q < end; q += THREADS) {
#endif
    Place p = place_of(q, s);
    if (!ours) continue;
    i64 at = ((i64)p.d * in_h + p.h) * in_w + p.w;
    Acc v = load_value(x[CHANNELS_LAST ? ((i64)p.n * pixels + at) * CIN + channel : ((i64)p.n * CIN + channel) * pixels + at]);
    const int first_d = p.d * STEP_D - PAD_D, first_h = p.h * STEP_H - PAD_H, first_w = p.w * STEP_W - PAD_W;
    const T* image = g + (CHANNELS_LAST ? (i64)p.n * out_d * out_h * out_w * COUT + group * COUT_G + co
                                        : ((i64)p.n * COUT + group * COUT_G + co) * plane);
#pragma unroll
    for (int t = 0; t < TAP_TILE; t++) {
      int tap = first_tap + t;
      int d = first_d + tap / (KERNEL_H * KERNEL_W) * DIL_D, h = first_h + tap / KERNEL_W % KERNEL_H * DIL_H, w = first_w + tap % KERNEL_W * DIL_W;
      bool in = (TAPS % TAP_TILE == 0 || tap < TAPS) && (u32)d < (u32)out_d && (u32)h < (u32)out_h && (u32)w < (u32)out_w;
      const T* from = image + (((i64)d * out_h + h) * out_w + w) * G_COLUMN;
#pragma unroll
      for (int c = 0; c < CO_TILE; c++)
        if (in && (COUT_G % CO_TILE == 0 || co + c < COUT_G)) acc[c][t] = multiply_add(v, load_value(from[c * plane]), acc[c][t]);
    }
  }
  // Sums of a block's threads, in a fixed order: of a warp's lanes (NCHW), then of its warps.
#pragma unroll
  for (int c = 0; c < CO_TILE; c++)
#pragma unroll
    for (int t = 0; t < TAP_TILE; t++) {
      Acc v = acc[c][t];
#if !CHANNELS_LAST
#pragma unroll
      for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
      if (lane == 0) sums[warp][0] = v;
#else
      sums[warp][lane] = v;
#endif
      __syncthreads();
      if (warp == 0 && (CHANNELS_LAST || lane == 0)) {
        Acc sum = 0;
        for (int i = 0; i < THREADS / 32; i++) sum += sums[i][CHANNELS_LAST ? lane : 0];
        int tap = first_tap + t;
        if (ours && tap < TAPS && co + c < COUT_G) partial[(i64)split * CIN * COUT_G * TAPS + ((i64)channel * COUT_G + co + c) * TAPS + tap] = sum;
      }
      __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
reduce(const Acc* __restrict__ partial, T* __restrict__ out, int splits, i64 stride_ci, i64 stride_co, i64 stride_tap) {
  const i64 total = (i64)CIN * COUT_G * TAPS;
  i64 e = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (e >= total) return;
  Acc sum = 0;
#pragma unroll 8
  for (int i = 0; i < splits; i++) sum += partial[i * total + e];
  i64 tap = e % TAPS, co = e / TAPS % COUT_G, ci = e / ((i64)TAPS * COUT_G);
  out[ci * stride_ci + co * stride_co + tap * stride_tap] = store_value(sum);
}
