// A strided layer with few output channels as a layer without a stride whose channels are the output's phases: the output's
// gradient with its phases as channels, weights with their taps by phase, and the weight's gradient back from there.
//
// Per axis an output o, with the padding, is q STRIDE + u: phase u of position q; tap t is a STRIDE + u: tap a of phase u.
// Channel c, phase u is channel c PHASES + u; channels from COUT PHASES to CHANNELS are zeros. OFFSET: o = q STRIDE + u - OFFSET.
#include "ptx.cuh"

#define THREADS 256
#define PHASES (STRIDE_D * STRIDE_H * STRIDE_W)
#if ELEMENT == 2
typedef u16 Element;
#else
typedef u32 Element;
#endif

// What `index`, that of an element among `of` along the innermost axis, leaves for the next one.
__device__ __forceinline__ int split(int& index, int of) {
  int within = index % of;
  index /= of;
  return within;
}

// (batch, COUT, out) to (batch, CHANNELS, q), both in one memory format. Fewer than 2^31 elements.
__device__ __forceinline__ void unshuffle_output(const Element* __restrict__ from, Element* __restrict__ to, int index, int total, int out_d, int out_h, int out_w, int q_d, int q_h, int q_w) {
  int rest = index;
  if (index >= total) return;
#if CHANNELS_LAST
  int channel = split(rest, CHANNELS);
#endif
  int w = split(rest, q_w), h = split(rest, q_h), d = split(rest, q_d);
#if !CHANNELS_LAST
  int channel = split(rest, CHANNELS);
#endif
  int u = channel % PHASES, c = channel / PHASES;
  w = w * STRIDE_W + u % STRIDE_W - OFFSET_W;
  h = h * STRIDE_H + u / STRIDE_W % STRIDE_H - OFFSET_H;
  d = d * STRIDE_D + u / (STRIDE_W * STRIDE_H) - OFFSET_D;
  bool exists = c < COUT && (u32)w < (u32)out_w && (u32)h < (u32)out_h && (u32)d < (u32)out_d;
#if CHANNELS_LAST
  long long at = ((((long long)rest * out_d + d) * out_h + h) * out_w + w) * COUT + c;
#else
  long long at = ((((long long)rest * COUT + c) * out_d + d) * out_h + h) * out_w + w;
#endif
  to[index] = exists ? from[at] : (Element)0;
}

#define KERNEL (KERNEL_D * KERNEL_H * KERNEL_W)
#define TAPS_D ((KERNEL_D + STRIDE_D - 1) / STRIDE_D)    // of a phase
#define TAPS_H ((KERNEL_H + STRIDE_H - 1) / STRIDE_H)
#define TAPS_W ((KERNEL_W + STRIDE_W - 1) / STRIDE_W)
#define OF_CHANNEL (CHANNELS * TAPS_D * TAPS_H * TAPS_W)  // of an input channel, contiguous

struct Strides { long long in, out, d, h, w; };

// Weights (CIN, COUT, kernel) of any strides to contiguous (CIN, CHANNELS, taps).
template <class T>
__device__ __forceinline__ void expand_weights(const T* __restrict__ from, T* __restrict__ to, int index, int total, const Strides& s) {
  int rest = index;
  if (index >= total) return;
  int w = split(rest, TAPS_W), h = split(rest, TAPS_H), d = split(rest, TAPS_D), channel = split(rest, CHANNELS);
  int u = channel % PHASES, c = channel / PHASES;
  w = w * STRIDE_W + u % STRIDE_W;
  h = h * STRIDE_H + u / STRIDE_W % STRIDE_H;
  d = d * STRIDE_D + u / (STRIDE_W * STRIDE_H);
  bool exists = c < COUT && w < KERNEL_W && h < KERNEL_H && d < KERNEL_D;
  to[index] = exists ? from[rest * s.in + c * s.out + d * s.d + h * s.h + w * s.w] : (T)0;
}

// Their gradient, contiguous (CIN, CHANNELS, taps), to (CIN, COUT, kernel) of any strides.
template <class T>
__device__ __forceinline__ void fold_weights(const T* __restrict__ from, T* __restrict__ to, int index, int total, const Strides& s) {
  int rest = index;
  if (index >= total) return;
  int w = split(rest, KERNEL_W), h = split(rest, KERNEL_H), d = split(rest, KERNEL_D), c = split(rest, COUT);
  int u = (d % STRIDE_D * STRIDE_H + h % STRIDE_H) * STRIDE_W + w % STRIDE_W;
  int at = ((c * PHASES + u) * TAPS_D + d / STRIDE_D) * TAPS_H + h / STRIDE_H;
  to[rest * s.in + c * s.out + d * s.d + h * s.h + w * s.w] = from[rest * OF_CHANNEL + at * TAPS_W + w / STRIDE_W];
}

#define INDEX ((int)(blockIdx.x * THREADS + threadIdx.x))
#define OUTPUTS const Element* __restrict__ from, Element* __restrict__ to, int total, int out_d, int out_h, int out_w, int q_d, int q_h, int q_w
#define UNSHUFFLE(index) unshuffle_output(from, to, index, total, out_d, out_h, out_w, q_d, q_h, q_w)

extern "C" __global__ void __launch_bounds__(THREADS)
unshuffle(OUTPUTS) {
  UNSHUFFLE(INDEX);
}

// `unshuffle` and, by the first blocks, weights expanded: one launch less.
#define UNSHUFFLE_KERNEL(name, T) \
  extern "C" __global__ void __launch_bounds__(THREADS) \
  name(const T* __restrict__ weight, T* __restrict__ expanded, int of_weight, long long s_in, long long s_out, long long s_d, long long s_h, long long s_w, OUTPUTS) { \
    int before = (of_weight + THREADS - 1) / THREADS * THREADS; \
    if (INDEX < before) expand_weights(weight, expanded, INDEX, of_weight, Strides{s_in, s_out, s_d, s_h, s_w}); \
    else UNSHUFFLE(INDEX - before); /* their sum is below 2^31 */ \
  }
UNSHUFFLE_KERNEL(unshuffle_and_expand, Element)

#define FOLD_KERNEL(name, T) \
  extern "C" __global__ void __launch_bounds__(THREADS) \
  name(const T* __restrict__ from, T* __restrict__ to, int total, long long s_in, long long s_out, long long s_d, long long s_h, long long s_w) { \
    fold_weights(from, to, INDEX, total, Strides{s_in, s_out, s_d, s_h, s_w}); \
  }
FOLD_KERNEL(fold, Element)
#if ELEMENT == 2                                         // float32 weights of a 16-bit layer, as autocast leaves them
UNSHUFFLE_KERNEL(unshuffle_and_expand_float, u32)
FOLD_KERNEL(fold_float, u32)
#endif
