// Copies of tensors in the other memory format: (batch, channels, pixels) to (batch, pixels, channels) and back. Pixels of channels that
// are no whole 16 bytes become pixels of `width`, of which the rest are zeros.
//
// A block copies TILE_C channels of TILE_P pixels through shared memory: on the one side warps take rows of pixels, whatever
// their alignment, on the other threads take 16-byte units of channels. Of
// images of `image` pixels, fewer than a tile has, `pixels` are those of all images, one behind the other.
#include "elements.cuh"

template <class C_>
struct Relayout {
using C = C_;
using Element = ElementOf<C::element>;
static constexpr bool NARROW = C::element == 2;
static constexpr bool IMAGES = C::image > 0;            // a tile has pixels of several
static constexpr int TILE_C = C::tile_c, TILE_P = C::tile_p;
static constexpr int THREADS = 256, WARPS = THREADS / 32;
static constexpr int EACH = 16 / C::element;            // elements of a unit
static constexpr int UNITS = TILE_C / EACH;
static constexpr int PITCH = TILE_P * C::element / 4 + 1;  // words of a channel, an odd number: units of channels lie in different banks
static constexpr int ROWS = TILE_C / WARPS;             // of a warp
static constexpr int COLUMNS = TILE_P / 32;             // of a lane
static_assert(TILE_P * UNITS >= THREADS && TILE_P % 32 == 0, "a thread has a unit, and a lane an element, of each of its rows");

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
  Element v[ROWS][COLUMNS];                // all on their way before the first is stored
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
      int c = at.channel + warp + i * WARPS, p = at.pixel + lane + j * 32;
      v[i][j] = c < channels && p < pixels ? from[at.first + place_of(c, p, channels, pixels)] : (Element)0;
    }
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) row_of(tile, warp + i * WARPS)[lane + j * 32] = v[i][j];
  __syncthreads();
  int unit = threadIdx.x % UNITS, pixel = threadIdx.x / UNITS;
  if (at.channel + unit * EACH >= width) return;
  to += (at.first / channels + at.pixel) * width + at.channel + unit * EACH;
#pragma unroll
  for (int j = 0; j < TILE_P * UNITS / THREADS; j++, pixel += THREADS / UNITS) {
    if (at.pixel + pixel >= pixels) return;
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (NARROW) words[i] = row_of(tile, unit * EACH + 2 * i)[pixel] | (u32)row_of(tile, unit * EACH + 2 * i + 1)[pixel] << 16;
      else words[i] = row_of(tile, unit * EACH + i)[pixel];
    }
    *(uint4*)(to + (long long)pixel * width) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

static __device__ __forceinline__ void to_contiguous(u32* tile, const Element* __restrict__ from, Element* __restrict__ to, int channels, int pixels) {
  constexpr int OF_THREAD = TILE_P * UNITS / THREADS, STEP = THREADS / UNITS;
  Part at = part_of(channels, pixels);
  int unit = threadIdx.x % UNITS, first = threadIdx.x / UNITS;
  const Element* source = from + at.first + (long long)(at.pixel + first) * channels + at.channel + unit * EACH;
  uint4 v[OF_THREAD];
#pragma unroll
  for (int j = 0; j < OF_THREAD; j++) {
    bool exists = at.channel + unit * EACH < channels && at.pixel + first + j * STEP < pixels;
    v[j] = exists ? *(const uint4*)(source + (long long)j * STEP * channels) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int j = 0; j < OF_THREAD; j++) {
    const int pixel = first + j * STEP;
    const u32 words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (NARROW) {
        row_of(tile, unit * EACH + 2 * i)[pixel] = (u16)words[i];
        row_of(tile, unit * EACH + 2 * i + 1)[pixel] = (u16)(words[i] >> 16);
      } else {
        row_of(tile, unit * EACH + i)[pixel] = words[i];
      }
    }
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
  u32 v[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++) v[e] = first + e < channels ? from[e] : 0;
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    if constexpr (NARROW) words[i] = v[2 * i] | v[2 * i + 1] << 16;
    else words[i] = v[i];
  *(uint4*)(to + (long long)index * EACH) = make_uint4(words[0], words[1], words[2], words[3]);
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
