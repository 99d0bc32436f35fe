// Copies of tensors in the other memory format: (batch, channels, pixels) to (batch, pixels, channels) and back. Pixels of channels that
// are no whole 16 bytes become pixels of `width`, of which the rest are zeros.
//
// A block copies TILE_C channels of TILE_P pixels through shared memory: on the one side warps take rows of pixels, whatever
// their alignment, on the other threads take 16-byte units of channels. Of
// images of IMAGE pixels, fewer than a tile has, `pixels` are those of all images, one behind the other.
#include "ptx.cuh"

#define THREADS 256
#define EACH (16 / ELEMENT)                // elements of a unit
#define UNITS (TILE_C / EACH)
#define PITCH (TILE_P * ELEMENT / 4 + 1)   // words of a channel, an odd number: units of channels lie in different banks
#define ROWS (TILE_C / (THREADS / 32))     // of a warp
#define COLUMNS (TILE_P / 32)              // of a lane
#if TILE_P * UNITS < THREADS || TILE_P % 64
#error "a thread has a unit, and a lane words, of each of its rows"
#endif
#if ELEMENT == 2
typedef u16 Element;
#else
typedef u32 Element;
#endif

struct Part {                              // of a tensor, that a block copies
  long long first;                         // element of its image
  int channel, pixel;
};

// Where a channel's pixel is, in elements, where an image begins or (IMAGE) the tensor.
__device__ __forceinline__ long long place_of(int channel, int pixel, int channels, int pixels) {
#if IMAGE
  return (long long)(pixel / IMAGE) * channels * IMAGE + channel * IMAGE + pixel % IMAGE;
#else
  return (long long)channel * pixels + pixel;
#endif
}

__device__ __forceinline__ Part part_of(int channels, int pixels) {
  int of_channels = (channels + TILE_C - 1) / TILE_C, of_pixels = (pixels + TILE_P - 1) / TILE_P, rest = blockIdx.x / of_channels;
  return {(long long)(rest / of_pixels) * channels * pixels, (int)(blockIdx.x % of_channels) * TILE_C, rest % of_pixels * TILE_P};
}

#if ELEMENT == 2
// Rows are read in words, from that which has their first element: an element lies `odd` places further in the tile.
#define WORDS_OF_ROW (TILE_P / 2)          // and one where a row begins between words
__device__ __forceinline__ u32 load_word(const u16* word, bool whole) { return whole ? *(const u32*)word : *word; }
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
to_channels_last(const Element* __restrict__ from, Element* __restrict__ to, int channels, int pixels, int width) {
  __shared__ u32 tile[TILE_C * PITCH];
  Part at = part_of(channels, pixels);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if IMAGE && ELEMENT == 2                  // of an even number of pixels, whose words lie as the tile's
  u32 v[ROWS][WORDS_OF_ROW / 32];
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j < WORDS_OF_ROW / 32; j++) {
      int c = at.channel + warp + i * 8, p = at.pixel + 2 * (lane + j * 32);
      v[i][j] = c < channels && p < pixels ? *(const u32*)(from + place_of(c, p, channels, pixels)) : 0;
    }
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j < WORDS_OF_ROW / 32; j++) tile[(warp + i * 8) * PITCH + lane + j * 32] = v[i][j];
#elif ELEMENT == 2
  const Element* first = from + at.first + (long long)at.channel * pixels + at.pixel;
  u32 v[ROWS][WORDS_OF_ROW / 32 + 1];
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    int c = warp + i * 8;
    const u16* row = first + (long long)c * pixels;
    int odd = (int)((u64)row >> 1 & 1);
    bool last = at.channel + c == channels - 1;        // whose image may end with the tensor
#pragma unroll
    for (int j = 0; j <= WORDS_OF_ROW / 32; j++) {
      int p = 2 * (lane + j * 32) - odd;               // of the word's first element
      bool exists = at.channel + c < channels && at.pixel + p < pixels && p < TILE_P && (j < WORDS_OF_ROW / 32 || lane == 0);
      v[i][j] = exists ? load_word(row + p, !(last && at.pixel + p + 1 >= pixels)) : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j <= WORDS_OF_ROW / 32; j++)
      if (j < WORDS_OF_ROW / 32 || lane == 0) tile[(warp + i * 8) * PITCH + lane + j * 32] = v[i][j];
#else
  u32 v[ROWS][COLUMNS];
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
      int c = at.channel + warp + i * 8, p = at.pixel + lane + j * 32;
      v[i][j] = c < channels && p < pixels ? from[at.first + place_of(c, p, channels, pixels)] : 0;
    }
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) tile[(warp + i * 8) * PITCH + lane + j * 32] = v[i][j];
#endif
  __syncthreads();
  int unit = threadIdx.x % UNITS, pixel = threadIdx.x / UNITS;
  if (at.channel + unit * EACH >= width) return;
  to += (at.first / channels + at.pixel) * width + at.channel + unit * EACH;
#if IMAGE && ELEMENT == 2
  const int odd = 0, then = 0;
#elif ELEMENT == 2                         // channels lie `pixels` apart: even ones begin alike, odd ones do
  int odd = (int)((u64)first >> 1 & 1), then = odd ^ (pixels & 1);
#endif
#pragma unroll
  for (int j = 0; j < TILE_P * UNITS / THREADS; j++, pixel += THREADS / UNITS) {
    if (at.pixel + pixel >= pixels) return;
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if ELEMENT == 2
      const u16* own = (const u16*)(tile + (unit * EACH + 2 * i) * PITCH);
      words[i] = own[pixel + odd] | (u32)own[2 * PITCH + pixel + then] << 16;
#else
      words[i] = tile[(unit * EACH + i) * PITCH + pixel];
#endif
    }
    *(uint4*)(to + (long long)pixel * width) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
to_contiguous(const Element* __restrict__ from, Element* __restrict__ to, int channels, int pixels) {
  __shared__ u32 tile[TILE_C * PITCH];
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
#if ELEMENT == 2
      own[4 * i * PITCH] = (u16)words[i];
      own[(4 * i + 2) * PITCH] = (u16)(words[i] >> 16);
#else
      own[i * PITCH] = words[i];
#endif
    }
  }
  __syncthreads();
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
      if (at.channel + warp + i * 8 < channels && at.pixel + lane + j * 32 < pixels)
        to[at.first + place_of(at.channel + warp + i * 8, at.pixel + lane + j * 32, channels, pixels)] = ((const Element*)(tile + (warp + i * 8) * PITCH))[lane + j * 32];
}

// Pixels of `channels` side by side, as pixels of `width`: a thread a unit. `pixels` are those of all images.
extern "C" __global__ void __launch_bounds__(THREADS)
widen(const Element* __restrict__ from, Element* __restrict__ to, int channels, int pixels, int width) {
  int index = blockIdx.x * THREADS + threadIdx.x, units = width / EACH, pixel = index / units, first = index % units * EACH;
  if (pixel >= pixels) return;
  from += (long long)pixel * channels + first;
  u32 v[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++) v[e] = first + e < channels ? from[e] : 0;
#if ELEMENT == 2
  uint4 words = make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
#else
  uint4 words = make_uint4(v[0], v[1], v[2], v[3]);
#endif
  *(uint4*)(to + (long long)index * EACH) = words;
}
