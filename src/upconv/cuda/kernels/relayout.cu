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
static constexpr int WORDS = NARROW ? COLUMNS / 2 : COLUMNS;  // of a lane, of a row
static_assert(TILE_P * UNITS >= THREADS && TILE_P % 64 == 0, "a thread has a unit, and a lane words, of each of its rows");

struct Part {                              // of a tensor, that a block copies
  long long first;                         // element of its image
  int channel, pixel;
};

// Where a channel's pixel is, in elements, where an image begins or (IMAGES) the tensor.
static __device__ __forceinline__ long long place_of(int channel, int pixel, int channels, int pixels) {
  if constexpr (IMAGES) return (long long)(pixel / C::image) * channels * C::image + channel * C::image + pixel % C::image;
  else return (long long)channel * pixels + pixel;
}

static __device__ __forceinline__ Part part_of(int channels, int pixels) {
  int of_channels = (channels + TILE_C - 1) / TILE_C, of_pixels = (pixels + TILE_P - 1) / TILE_P, rest = blockIdx.x / of_channels;
  return {(long long)(rest / of_pixels) * channels * pixels, (int)(blockIdx.x % of_channels) * TILE_C, rest % of_pixels * TILE_P};
}

// Rows of 16 bits are read in words, from that which has their first element: an element lies `odd` places further in the tile.
static __device__ __forceinline__ u32 load_word(const u16* word, bool whole) { return whole ? *(const u32*)word : *word; }

// To the tile: a warp's rows, whose words lie as the tile's.
static __device__ __forceinline__ void bring_rows(u32* tile, const Element* from, const Part& at, int channels, int pixels, int lane, int warp) {
  constexpr int IN_WORD = NARROW ? 2 : 1;
  u32 v[ROWS][WORDS];
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
      int c = at.channel + warp + i * WARPS, p = at.pixel + IN_WORD * (lane + j * 32);
      long long place = NARROW ? 0 : at.first;          // of 16 bits these are images, whose places count from the tensor's
      v[i][j] = c < channels && p < pixels ? *(const u32*)(from + place + place_of(c, p, channels, pixels)) : 0;
    }
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j < WORDS; j++) tile[(warp + i * WARPS) * PITCH + lane + j * 32] = v[i][j];
}

// The same of 16 bits whose rows may begin between words: one word more.
static __device__ __forceinline__ void bring_odd_rows(u32* tile, const Element* first, const Part& at, int channels, int pixels, int lane, int warp) {
  u32 v[ROWS][WORDS + 1];
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    int c = warp + i * WARPS;
    const u16* row = (const u16*)first + (long long)c * pixels;
    int odd = (int)((u64)row >> 1 & 1);
    bool last = at.channel + c == channels - 1;        // whose image may end with the tensor
#pragma unroll
    for (int j = 0; j <= WORDS; j++) {
      int p = 2 * (lane + j * 32) - odd;               // of the word's first element
      bool exists = at.channel + c < channels && at.pixel + p < pixels && p < TILE_P && (j < WORDS || lane == 0);
      v[i][j] = exists ? load_word(row + p, !(last && at.pixel + p + 1 >= pixels)) : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j <= WORDS; j++)
      if (j < WORDS || lane == 0) tile[(warp + i * WARPS) * PITCH + lane + j * 32] = v[i][j];
}

static __device__ __forceinline__ void to_channels_last(u32* tile, const Element* __restrict__ from, Element* __restrict__ to, int channels, int pixels, int width) {
  Part at = part_of(channels, pixels);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int odd = 0, then = 0;                   // of even and of odd channels, which lie `pixels` apart
  if constexpr (NARROW && !IMAGES) {
    const Element* first = from + at.first + (long long)at.channel * pixels + at.pixel;
    bring_odd_rows(tile, first, at, channels, pixels, lane, warp);
    odd = (int)((u64)first >> 1 & 1), then = odd ^ (pixels & 1);
  } else {
    bring_rows(tile, from, at, channels, pixels, lane, warp);
  }
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
      if constexpr (NARROW) {
        const u16* own = (const u16*)(tile + (unit * EACH + 2 * i) * PITCH);
        words[i] = own[pixel + odd] | (u32)own[2 * PITCH + pixel + then] << 16;
      } else {
        words[i] = tile[(unit * EACH + i) * PITCH + pixel];
      }
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
    Element* own = (Element*)(tile + unit * EACH * PITCH) + first + j * STEP;
    const u32 words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (NARROW) {
        own[4 * i * PITCH] = (u16)words[i];
        own[(4 * i + 2) * PITCH] = (u16)(words[i] >> 16);
      } else {
        own[i * PITCH] = words[i];
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
        to[at.first + place_of(at.channel + warp + i * WARPS, at.pixel + lane + j * 32, channels, pixels)] = ((const Element*)(tile + (warp + i * WARPS) * PITCH))[lane + j * 32];
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
