// Copies of tensors in the other memory format: (batch, channels, pixels) to (batch, pixels, channels) and back. Pixels of channels that
// are no whole 16 bytes become pixels of `width`, of which the rest are zeros.
//
// A block copies TILE_C channels of TILE_P pixels through shared memory: on the one side warps take rows of pixels, whatever
// their alignment, on the other threads take 16-byte units of channels. Of images of `image` pixels, fewer than a tile has,
// `pixels` are those of all images, one behind the other.
#include "elements.cuh"

template <class C_>
struct Relayout {
using C = C_;
using Element = ElementOf<C::element>;
static constexpr bool IMAGES = C::image > 0;            // a tile has pixels of several
static constexpr int TILE_C = C::tile_c, TILE_P = C::tile_p;
static constexpr int THREADS = 256, WARPS = THREADS / 32;
static constexpr int EACH = 16 / C::element;            // elements of a unit
static constexpr int UNITS = TILE_C / EACH;
static constexpr int PITCH = TILE_P * C::element / 4 + 1;  // words of a channel, an odd number: units of channels lie in different banks
static constexpr int ROWS = TILE_C / WARPS;             // of a warp
static constexpr int COLUMNS = TILE_P / 32;             // of a lane
static constexpr int BATCH = ROWS * COLUMNS < 32 ? ROWS * COLUMNS : 32;  // elements of a lane that are on their way at once
static_assert(TILE_P * UNITS >= THREADS && TILE_P % 32 == 0, "a thread has a unit, and a lane an element, of each of its rows");

struct alignas(16) Unit { Element of[EACH]; };  // of neighbouring channels

struct Part {                              // of a tensor, that a block copies
  long long first;                         // element of its image
  int channel, pixel;
};

// Where a channel's pixel is, in elements, where an image begins or (IMAGES) the tensor.
static __device__ __forceinline__ long long place_of(int channel, int pixel, int channels, int pixels) {
  if constexpr (IMAGES) return (long long)(pixel / C::image) * channels * C::image + channel * C::image + pixel % C::image;
  else return (long long)channel * pixels + pixel;
}

static __device__ __forceinline__ Element* row_of(u32* tile, int channel) { return (Element*)(tile + channel * PITCH); }

static __device__ __forceinline__ Part part_of(int channels, int pixels) {
  int of_channels = (channels + TILE_C - 1) / TILE_C, of_pixels = (pixels + TILE_P - 1) / TILE_P, rest = blockIdx.x / of_channels;
  return {(long long)(rest / of_pixels) * channels * pixels, (int)(blockIdx.x % of_channels) * TILE_C, rest % of_pixels * TILE_P};
}

static __device__ __forceinline__ void to_channels_last(u32* tile, const Element* __restrict__ from, Element* __restrict__ to, int channels, int pixels, int width) {
  Part at = part_of(channels, pixels);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int first = 0; first < ROWS * COLUMNS; first += BATCH) {
    Element v[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      int c = at.channel + warp + (first + k) / COLUMNS * WARPS, p = at.pixel + lane + (first + k) % COLUMNS * 32;
      v[k] = c < channels && p < pixels ? from[at.first + place_of(c, p, channels, pixels)] : (Element)0;
    }
#pragma unroll
    for (int k = 0; k < BATCH; k++) row_of(tile, warp + (first + k) / COLUMNS * WARPS)[lane + (first + k) % COLUMNS * 32] = v[k];
  }
  __syncthreads();
  int unit = threadIdx.x % UNITS, pixel = threadIdx.x / UNITS;
  if (at.channel + unit * EACH >= width) return;
  to += (at.first / channels + at.pixel) * width + at.channel + unit * EACH;
#pragma unroll
  for (int j = 0; j < TILE_P * UNITS / THREADS; j++, pixel += THREADS / UNITS) {
    if (at.pixel + pixel >= pixels) return;
    Unit v;
#pragma unroll
    for (int e = 0; e < EACH; e++) v.of[e] = row_of(tile, unit * EACH + e)[pixel];
    *(Unit*)(to + (long long)pixel * width) = v;
  }
}

static __device__ __forceinline__ void to_contiguous(u32* tile, const Element* __restrict__ from, Element* __restrict__ to, int channels, int pixels) {
  constexpr int OF_THREAD = TILE_P * UNITS / THREADS, STEP = THREADS / UNITS;
  Part at = part_of(channels, pixels);
  int unit = threadIdx.x % UNITS, first = threadIdx.x / UNITS;
  const Element* source = from + at.first + (long long)(at.pixel + first) * channels + at.channel + unit * EACH;
  uint4 v[OF_THREAD];                      // (units of 16-bit elements would take a register for each)
#pragma unroll
  for (int j = 0; j < OF_THREAD; j++) {
    bool exists = at.channel + unit * EACH < channels && at.pixel + first + j * STEP < pixels;
    v[j] = exists ? *(const uint4*)(source + (long long)j * STEP * channels) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int j = 0; j < OF_THREAD; j++) {
    const u32 words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
    for (int e = 0; e < EACH; e++) row_of(tile, unit * EACH + e)[first + j * STEP] = (Element)(words[e * 4 / EACH] >> e * C::element * 8 % 32);
  }
  __syncthreads();
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
      if (at.channel + warp + i * WARPS < channels && at.pixel + lane + j * 32 < pixels)
        to[at.first + place_of(at.channel + warp + i * WARPS, at.pixel + lane + j * 32, channels, pixels)] = row_of(tile, warp + i * WARPS)[lane + j * 32];
}

// A thread's unit: pixels of `channels` side by side, as pixels of `width`. `pixels` are those of all images.
static __device__ __forceinline__ void widen(const Element* __restrict__ from, Element* __restrict__ to, int channels, int pixels, int width) {
  int index = blockIdx.x * THREADS + threadIdx.x, units = width / EACH, pixel = index / units, first = index % units * EACH;
  if (pixel >= pixels) return;
  from += (long long)pixel * channels + first;
  Unit v;
#pragma unroll
  for (int e = 0; e < EACH; e++) v.of[e] = first + e < channels ? from[e] : (Element)0;
  *(Unit*)(to + (long long)index * EACH) = v;
}
};

template <class C>
__global__ void __launch_bounds__(Relayout<C>::THREADS)
to_channels_last(const typename Relayout<C>::Element* __restrict__ from, typename Relayout<C>::Element* __restrict__ to, int channels, int pixels, int width) {
  __shared__ u32 tile[Relayout<C>::TILE_C * Relayout<C>::PITCH];
  Relayout<C>::to_channels_last(tile, from, to, channels, pixels, width);
}

template <class C>
__global__ void __launch_bounds__(Relayout<C>::THREADS)
to_contiguous(const typename Relayout<C>::Element* __restrict__ from, typename Relayout<C>::Element* __restrict__ to, int channels, int pixels) {
  __shared__ u32 tile[Relayout<C>::TILE_C * Relayout<C>::PITCH];
  Relayout<C>::to_contiguous(tile, from, to, channels, pixels);
}

template <class C>
__global__ void __launch_bounds__(Relayout<C>::THREADS)
widen(const typename Relayout<C>::Element* __restrict__ from, typename Relayout<C>::Element* __restrict__ to, int channels, int pixels, int width) {
  Relayout<C>::widen(from, to, channels, pixels, width);
}
