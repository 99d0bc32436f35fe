// A strided layer with few output channels as a layer without a stride whose channels are the output's phases: the output's
// gradient with its phases as channels, weights with their taps by phase, and the weight's gradient back from there.
//
// Per axis an output o, with the padding, is q stride + u: phase u of position q; tap t is a stride + u: tap a of phase u.
// Channel c, phase u is channel c PHASES + u; channels from cout PHASES to C's `channels` are zeros. offset: o = q stride + u - offset.
#include "elements.cuh"

template <class C_>
struct Unshuffle {
using C = C_;
using Element = ElementOf<C::element>;
static constexpr int THREADS = 256;
static constexpr int PHASES = C::stride_d * C::stride_h * C::stride_w;
static constexpr int TAPS_D = (C::kernel_d + C::stride_d - 1) / C::stride_d;  // of a phase
static constexpr int TAPS_H = (C::kernel_h + C::stride_h - 1) / C::stride_h;
static constexpr int TAPS_W = (C::kernel_w + C::stride_w - 1) / C::stride_w;
static constexpr int OF_CHANNEL = C::channels * TAPS_D * TAPS_H * TAPS_W;     // of an input channel, contiguous

struct Sizes { int total, out_d, out_h, out_w, q_d, q_h, q_w; };  // of the result, the layer's output and positions
struct Strides { long long in, out, d, h, w; };

static __device__ __forceinline__ int index() { return (int)(blockIdx.x * THREADS + threadIdx.x); }

// What `index`, that of an element among `of` along the innermost axis, leaves for the next one.
static __device__ __forceinline__ int split(int& index, int of) {
  int within = index % of;
  index /= of;
  return within;
}

// (batch, cout, out) to (batch, channels, q), both in one memory format. Fewer than 2^31 elements.
static __device__ __forceinline__ void unshuffle_output(const Element* __restrict__ from, Element* __restrict__ to, int index, const Sizes& s) {
  int rest = index, channel;
  if (index >= s.total) return;
  if constexpr (C::channels_last) channel = split(rest, C::channels);
  int w = split(rest, s.q_w), h = split(rest, s.q_h), d = split(rest, s.q_d);
  if constexpr (!C::channels_last) channel = split(rest, C::channels);
  int u = channel % PHASES, c = channel / PHASES;
  w = w * C::stride_w + u % C::stride_w - C::offset_w;
  h = h * C::stride_h + u / C::stride_w % C::stride_h - C::offset_h;
  d = d * C::stride_d + u / (C::stride_w * C::stride_h) - C::offset_d;
  bool exists = c < C::cout && (u32)w < (u32)s.out_w && (u32)h < (u32)s.out_h && (u32)d < (u32)s.out_d;
  long long at;
  if constexpr (C::channels_last) at = ((((long long)rest * s.out_d + d) * s.out_h + h) * s.out_w + w) * C::cout + c;
  else at = ((((long long)rest * C::cout + c) * s.out_d + d) * s.out_h + h) * s.out_w + w;
  to[index] = exists ? from[at] : (Element)0;
}

// Weights (cin, cout, kernel) of any strides to contiguous (cin, channels, taps).
template <class T>
static __device__ __forceinline__ void expand_weights(const T* __restrict__ from, T* __restrict__ to, int index, int total, const Strides& s) {
  int rest = index;
  if (index >= total) return;
  int w = split(rest, TAPS_W), h = split(rest, TAPS_H), d = split(rest, TAPS_D), channel = split(rest, C::channels);
  int u = channel % PHASES, c = channel / PHASES;
  w = w * C::stride_w + u % C::stride_w;
  h = h * C::stride_h + u / C::stride_w % C::stride_h;
  d = d * C::stride_d + u / (C::stride_w * C::stride_h);
  bool exists = c < C::cout && w < C::kernel_w && h < C::kernel_h && d < C::kernel_d;
  to[index] = exists ? from[rest * s.in + c * s.out + d * s.d + h * s.h + w * s.w] : (T)0;
}

// Their gradient, contiguous (cin, channels, taps), to (cin, cout, kernel) of any strides.
template <class T>
static __device__ __forceinline__ void fold_weights(const T* __restrict__ from, T* __restrict__ to, int index, int total, const Strides& s) {
  int rest = index;
  if (index >= total) return;
  int w = split(rest, C::kernel_w), h = split(rest, C::kernel_h), d = split(rest, C::kernel_d), c = split(rest, C::cout);
  int u = (d % C::stride_d * C::stride_h + h % C::stride_h) * C::stride_w + w % C::stride_w;
  int at = ((c * PHASES + u) * TAPS_D + d / C::stride_d) * TAPS_H + h / C::stride_h;
  to[rest * s.in + c * s.out + d * s.d + h * s.h + w * s.w] = from[rest * OF_CHANNEL + at * TAPS_W + w / C::stride_w];
}

// Weights by the first blocks, and by those behind them the output's gradient. Weights may be float32 ones of a 16-bit layer, or none.
template <class T>
static __device__ __forceinline__ void run(const T* weight, T* expanded, int of_weight, const Strides& strides, const Element* from, Element* to, const Sizes& s) {
  int before = (of_weight + THREADS - 1) / THREADS * THREADS;
  if (index() < before) expand_weights(weight, expanded, index(), of_weight, strides);
  else unshuffle_output(from, to, index() - before, s);  // their sum is below 2^31
}
};

template <class C>
__global__ void __launch_bounds__(Unshuffle<C>::THREADS)
unshuffle(const typename Unshuffle<C>::Element* __restrict__ weight, typename Unshuffle<C>::Element* __restrict__ expanded, int of_weight,
          long long s_in, long long s_out, long long s_d, long long s_h, long long s_w, const typename Unshuffle<C>::Element* __restrict__ from,
          typename Unshuffle<C>::Element* __restrict__ to, int total, int out_d, int out_h, int out_w, int q_d, int q_h, int q_w) {
  Unshuffle<C>::run(weight, expanded, of_weight, {s_in, s_out, s_d, s_h, s_w}, from, to, {total, out_d, out_h, out_w, q_d, q_h, q_w});
}

template <class C>
__global__ void __launch_bounds__(Unshuffle<C>::THREADS)
unshuffle_float(const u32* __restrict__ weight, u32* __restrict__ expanded, int of_weight, long long s_in, long long s_out, long long s_d,
                long long s_h, long long s_w, const typename Unshuffle<C>::Element* __restrict__ from, typename Unshuffle<C>::Element* __restrict__ to,
                int total, int out_d, int out_h, int out_w, int q_d, int q_h, int q_w) {
  Unshuffle<C>::run(weight, expanded, of_weight, {s_in, s_out, s_d, s_h, s_w}, from, to, {total, out_d, out_h, out_w, q_d, q_h, q_w});
}

template <class C>
__global__ void __launch_bounds__(Unshuffle<C>::THREADS)
fold(const typename Unshuffle<C>::Element* __restrict__ from, typename Unshuffle<C>::Element* __restrict__ to, int total, long long s_in,
     long long s_out, long long s_d, long long s_h, long long s_w) {
  Unshuffle<C>::fold_weights(from, to, Unshuffle<C>::index(), total, {s_in, s_out, s_d, s_h, s_w});
}

template <class C>
__global__ void __launch_bounds__(Unshuffle<C>::THREADS)
fold_float(const u32* __restrict__ from, u32* __restrict__ to, int total, long long s_in, long long s_out, long long s_d, long long s_h,
           long long s_w) {
  Unshuffle<C>::fold_weights(from, to, Unshuffle<C>::index(), total, {s_in, s_out, s_d, s_h, s_w});
}
