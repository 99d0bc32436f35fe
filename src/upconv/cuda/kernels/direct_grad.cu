// The gradient for the input on CUDA cores, for layers whose tensors' bytes are the work: depthwise and small groups, few channels, float64.
//
//   gi[n, ci, i] = sum over co of the group and taps of g[n, co, i * STEP + tap * DIL - PAD] * w[ci, co, tap]
//
// Neighbouring lanes take neighbours in memory: columns in NCHW, channels in CHANNELS_LAST, so that every load is whole sectors; what taps
// share comes from L1. A thread holds the sums of CI_TILE input channels of a position in registers.
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
