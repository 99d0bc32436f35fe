// The gradient for the input on CUDA cores, for layers whose tensors' bytes are the work: depthwise and small groups, few channels, float64.
//
//   gi[n, ci, i] = sum over co of the group and taps of g[n, co, i * stride + tap * dilation - padding] * w[ci, co, tap]
//
// Neighbouring lanes take neighbours in memory: columns in NCHW, channels in channels_last, so that every load is whole sectors; what taps
// share comes from L1. A thread holds the sums of ci_tile input channels of a position in registers.
#include "scalar.cuh"

template <class C_>
struct DirectGrad {
using C = C_;
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;

static constexpr int THREADS = 256;
static constexpr int TAPS = C::kernel_d * C::kernel_h * C::kernel_w;
static constexpr int CIN_G = C::cin_g, COUT_G = C::cout_g;
static constexpr int CIN = C::groups * CIN_G;
static constexpr int COUT = C::groups * COUT_G;
static constexpr int CI_TILE = C::ci_tile;
static constexpr int CI_BLOCKS = (CIN_G + CI_TILE - 1) / CI_TILE;
static constexpr int TILES = C::groups * CI_BLOCKS;     // of a position
static constexpr int G_COLUMN = C::channels_last ? COUT : 1;  // elements from one column of the output's gradient to the next

struct Sizes {
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
};

struct Place { int n, d, h, w; };

static __device__ __forceinline__ Place place_of(i64 q, const Sizes& s) {
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

// Adds what one output channel, whose gradient is `image`, gives to the sums; `w_ci`: its taps of the first input channel.
static __device__ __forceinline__ void add_channel(Acc (&acc)[CI_TILE], const T* image, const T* w_ci, const Place& p, int ci, const Sizes& s) {
  const int first_d = p.d * C::stride_d - C::padding_d, first_h = p.h * C::stride_h - C::padding_h, first_w = p.w * C::stride_w - C::padding_w;
#pragma unroll C::unroll_d
  for (int kd = 0; kd < C::kernel_d; kd++) {
    int d = first_d + kd * C::dilation_d;
    if ((u32)d >= (u32)s.out_d) continue;
#pragma unroll C::unroll_h
    for (int kh = 0; kh < C::kernel_h; kh++) {
      int h = first_h + kh * C::dilation_h;
      if ((u32)h >= (u32)s.out_h) continue;
      const T* row = image + ((i64)d * s.out_h + h) * s.out_w * G_COLUMN;
      const T* w_row = w_ci + (kd * C::kernel_h + kh) * C::kernel_w;
#pragma unroll C::unroll_w
      for (int kw = 0; kw < C::kernel_w; kw++) {
        int w = first_w + kw * C::dilation_w;
        if ((u32)w >= (u32)s.out_w) continue;
        Acc v = Scalar::value(row[(i64)w * G_COLUMN]);
#pragma unroll
        for (int t = 0; t < CI_TILE; t++)
          if (CIN_G % CI_TILE == 0 || ci + t < CIN_G) acc[t] = multiply_add(v, Scalar::value(w_row[(i64)t * COUT_G * TAPS + kw]), acc[t]);
      }
    }
  }
}

static __device__ __forceinline__ void run(const T* __restrict__ g, const T* __restrict__ weight, T* __restrict__ gi, const Sizes& s, i64 index) {
  const i64 pixels = (i64)s.in_d * s.in_h * s.in_w;
  int tile;
  Place p;
  if constexpr (C::channels_last) {
    tile = (int)(index % TILES);
    p = place_of(index / TILES, s);
  } else {
    i64 q = index % pixels, rest = index / pixels;
    tile = (int)(rest % TILES);
    p = place_of(q, s);
    p.n = (int)(rest / TILES);
  }
  const int group = tile / CI_BLOCKS, ci = tile % CI_BLOCKS * CI_TILE;
  Acc acc[CI_TILE] = {};
  const T* image = g + (C::channels_last ? (i64)p.n * s.out_d * s.out_h * s.out_w * COUT + group * COUT_G : ((i64)p.n * COUT + group * COUT_G) * s.out_d * s.out_h * s.out_w);
  const T* w_ci = weight + (i64)(group * CIN_G + ci) * COUT_G * TAPS;
#pragma unroll 1
  for (int co = 0; co < COUT_G; co++) {
    add_channel(acc, image, w_ci, p, ci, s);
    image += C::channels_last ? (i64)1 : (i64)s.out_d * s.out_h * s.out_w;
    w_ci += TAPS;
  }
  const i64 at = ((i64)p.d * s.in_h + p.h) * s.in_w + p.w;
#pragma unroll
  for (int t = 0; t < CI_TILE; t++) {
    if (CIN_G % CI_TILE && ci + t >= CIN_G) continue;
    int channel = group * CIN_G + ci + t;
    gi[C::channels_last ? ((i64)p.n * pixels + at) * CIN + channel : ((i64)p.n * CIN + channel) * pixels + at] = Scalar::stored(acc[t]);
  }
}
};

template <class C>
__global__ void __launch_bounds__(DirectGrad<C>::THREADS)
direct_grad(const typename DirectGrad<C>::T* __restrict__ g, const typename DirectGrad<C>::T* __restrict__ weight, typename DirectGrad<C>::T* __restrict__ gi, int batch, int in_d, int in_h, int in_w,
            int out_d, int out_h, int out_w, i64 total) {
  i64 index = (i64)blockIdx.x * DirectGrad<C>::THREADS + threadIdx.x;
  if (index < total) DirectGrad<C>::run(g, weight, gi, {batch, in_d, in_h, in_w, out_d, out_h, out_w}, index);
}
