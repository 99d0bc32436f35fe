// The gradient for the bias: sums of the output's gradient over everything but channels; a read of the tensor, and little more.
//
// `sum`: a block adds a range of the tensor in a fixed order and writes partial[range][channel]. NCHW: its one channel, of which
// each image is a run of memory, cut in pieces. `sum_last`, channels_last: 16-byte units of neighbouring channels, a range of all pixels.
// `finish`: a warp for each channel adds the ranges in the order of their index, so that every run gives the same bits.
// `sum_at_once` (NCHW): both, by one launch; a channel's last block is the warp of `finish`. The bits are the same.
#include "scalar.cuh"

template <class C_>
struct Bias {
using C = C_;
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;
static constexpr int THREADS = 256;
static constexpr int UNROLL = 8;           // loads of 16 bytes of a thread that are on their way at a time
static constexpr int EACH = 16 / (int)sizeof(T);  // elements of a unit of 16 bytes

struct Unit { u32 words[4]; };

static __device__ __forceinline__ Unit load_unit(const T* from) {
  uint4 v = __ldcs((const uint4*)from);
  return {{v.x, v.y, v.z, v.w}};
}

static __device__ __forceinline__ Acc value(const Unit& u, int e) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(u.words[e]);
  else if constexpr (sizeof(T) == 8) return __hiloint2double(u.words[2 * e + 1], u.words[2 * e]);
  else return Scalar::value((T)(u.words[e / 2] >> e % 2 * 16));
}

// channels_last; share: pixels of a range.
static __device__ __forceinline__ void sum_last(const T* __restrict__ g, Acc* __restrict__ partial, int channels, i64 pixels, i64 share) {
  __shared__ Acc shared[THREADS][EACH];
  const int units = channels / EACH, tiles = (units + THREADS - 1) / THREADS;
  int first = blockIdx.x % tiles * THREADS, range = blockIdx.x / tiles;
  int width = units - first < THREADS ? units - first : THREADS, rows = THREADS / width;  // pixels at a time
  int unit = threadIdx.x % width, row = threadIdx.x / width;
  i64 begin = range * share, end = begin + share < pixels ? begin + share : pixels, next = (i64)rows * channels;
  Acc acc[EACH] = {};
  if (row < rows) {
    const T* from = g + (begin + row) * channels + (first + unit) * EACH;
    i64 left = end - begin - row;
    for (; left > (UNROLL - 1) * rows; left -= UNROLL * rows, from += UNROLL * next) {
      Unit u[UNROLL];
#pragma unroll
      for (int k = 0; k < UNROLL; k++) u[k] = load_unit(from + k * next);
#pragma unroll
      for (int k = 0; k < UNROLL; k++)
#pragma unroll
        for (int e = 0; e < EACH; e++) acc[e] += value(u[k], e);
    }
    for (; left > 0; left -= rows, from += next) {
      Unit u = load_unit(from);
#pragma unroll
      for (int e = 0; e < EACH; e++) acc[e] += value(u, e);
    }
  }
#pragma unroll
  for (int e = 0; e < EACH; e++) shared[threadIdx.x][e] = acc[e];
  __syncthreads();
  if (row) return;
  for (int r = 1; r < rows; r++)
#pragma unroll
    for (int e = 0; e < EACH; e++) acc[e] += shared[r * width + unit][e];
#pragma unroll
  for (int e = 0; e < EACH; e++) partial[(i64)range * channels + (first + unit) * EACH + e] = acc[e];
}

// NCHW. Items are pieces of `share` elements (whole units) of an image's run, `pieces` of them; a block takes `items` of them, `width`
// threads each.
struct Items {
  i64 pixels, share;
  int pieces, all, items, width;
};

// A block's sum, in its first thread.
static __device__ __forceinline__ Acc add_items(const T* __restrict__ g, int channels, int channel, int range, const Items& of) {
  const i64 pixels = of.pixels, share = of.share;
  const int pieces = of.pieces, all = of.all, items = of.items, width = of.width;
  __shared__ Acc shared[THREADS / 32];
  int lane = threadIdx.x % width;
  int begin = range * items, end = begin + items < all ? begin + items : all;
  Acc acc = 0;
#pragma unroll 4
  for (int item = begin + threadIdx.x / width; item < end; item += THREADS / width) {
    int piece = item % pieces;
    const T* run = g + ((i64)(item / pieces) * channels + channel) * pixels;
    // Pieces are cut where memory has 16 bytes; the first also has what is ahead of and behind all whole units.
    i64 ahead = (16 - ((unsigned long long)run & 15)) % 16 / sizeof(T);
    if (ahead > pixels) ahead = pixels;
    i64 whole = ahead + (pixels - ahead) / EACH * EACH, at = ahead + piece * share, stop = at + share < whole ? at + share : whole;
    if (piece == 0) {
      if (lane < ahead) acc += Scalar::value(run[lane]);
      if (whole + lane < pixels) acc += Scalar::value(run[whole + lane]);
    }
    const i64 next = (i64)width * EACH;
    for (at += lane * EACH; at + (UNROLL - 1) * next < stop; at += UNROLL * next) {
      Unit u[UNROLL];
#pragma unroll
      for (int k = 0; k < UNROLL; k++) u[k] = load_unit(run + at + k * next);
#pragma unroll
      for (int k = 0; k < UNROLL; k++)
#pragma unroll
        for (int e = 0; e < EACH; e++) acc += value(u[k], e);
    }
    for (; at < stop; at += next) {
      Unit u = load_unit(run + at);
#pragma unroll
      for (int e = 0; e < EACH; e++) acc += value(u, e);
    }
  }
#pragma unroll
  for (int d = 16; d; d /= 2) acc += __shfl_xor_sync(0xffffffffu, acc, d);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = acc;
  __syncthreads();
  if (threadIdx.x == 0)
#pragma unroll
    for (int i = 1; i < THREADS / 32; i++) acc += shared[i];
  return acc;
}

static __device__ __forceinline__ void sum(const T* __restrict__ g, Acc* __restrict__ partial, int channels, const Items& of) {
  int channel = blockIdx.x % channels, range = blockIdx.x / channels;
  Acc acc = add_items(g, channels, channel, range, of);
  if (threadIdx.x == 0) partial[(i64)range * channels + channel] = acc;
}

// As a result, whose type is the tensor's or, of 16 bits, float32.
static __device__ __forceinline__ void put(void* out, int wide, int channel, Acc v) {
  if (wide) ((Acc*)out)[channel] = v;
  else ((T*)out)[channel] = Scalar::stored(v);
}

// A channel's ranges by a warp; from L2, where blocks of the same launch have left them.
static __device__ __forceinline__ Acc add_ranges(const Acc* partial, int channels, int channel, int ranges) {
  Acc v = 0;
#pragma unroll 4
  for (int i = channel < channels ? threadIdx.x % 32 : ranges; i < ranges; i += 32) v += __ldcg(partial + (i64)i * channels + channel);
#pragma unroll
  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  return v;
}

static __device__ __forceinline__ void finish(const Acc* __restrict__ partial, void* __restrict__ out, int wide, int channels, int ranges) {
  int channel = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  Acc v = add_ranges(partial, channels, channel, ranges);
  if (threadIdx.x % 32 == 0 && channel < channels) put(out, wide, channel, v);
}

// NCHW. wide: into float32. counters: a zero for each channel, as they are left.
static __device__ __forceinline__ void sum_at_once(const T* __restrict__ g, Acc* partial, void* __restrict__ out, unsigned* counters, int wide, int ranges, int channels, const Items& of) {
  __shared__ int last;
  int channel = blockIdx.x % channels, range = blockIdx.x / channels;
  Acc acc = add_items(g, channels, channel, range, of);
  if (threadIdx.x == 0) {
    partial[(i64)range * channels + channel] = acc;
    __threadfence();
    last = atomicAdd(counters + channel, 1u) == (unsigned)ranges - 1;
    __threadfence();
    if (last) counters[channel] = 0;
  }
  __syncthreads();
  if (!last) return;
  acc = add_ranges(partial, channels, channel, ranges);
  if (threadIdx.x == 0) put(out, wide, channel, acc);
}
};

template <class C>
__global__ void __launch_bounds__(Bias<C>::THREADS, 4)
sum_last(const typename Bias<C>::T* __restrict__ g, typename Bias<C>::Acc* __restrict__ partial, int channels, i64 pixels, i64 share) {
  Bias<C>::sum_last(g, partial, channels, pixels, share);
}

template <class C>
__global__ void __launch_bounds__(Bias<C>::THREADS, 4)
sum(const typename Bias<C>::T* __restrict__ g, typename Bias<C>::Acc* __restrict__ partial, int channels, i64 pixels, i64 share, int pieces,
    int all, int items, int width) {
  Bias<C>::sum(g, partial, channels, {pixels, share, pieces, all, items, width});
}

template <class C>
__global__ void __launch_bounds__(Bias<C>::THREADS, 4)
finish(const typename Bias<C>::Acc* __restrict__ partial, void* __restrict__ out, int wide, int channels, int ranges) {
  Bias<C>::finish(partial, out, wide, channels, ranges);
}

template <class C>
__global__ void __launch_bounds__(Bias<C>::THREADS, 4)
sum_at_once(const typename Bias<C>::T* __restrict__ g, typename Bias<C>::Acc* partial, void* __restrict__ out, unsigned* counters, int wide,
            int ranges, int channels, i64 pixels, i64 share, int pieces, int all, int items, int width) {
  Bias<C>::sum_at_once(g, partial, out, counters, wide, ranges, channels, {pixels, share, pieces, all, items, width});
}
