// Subpixel: a forward whose kernel is its stride, NCHW. Every output has one tap, so that it is a product of matrices: pixels x channels by
// channels x (kernel row, output channel, tap of W), whose rows go to neighbouring outputs. No pixel has a halo: an image's pixels are one
// row of each channel, whatever its width.
//
// Float32 pixels are fragments of A that lanes read from a channel's row as it lies, and nothing turns pixels in shared memory, which bounds
// `gather` for many channels; of 16 bits A is a descriptor, since those may lie along M.
//
// A block has PIXELS pixels of an image times COLUMNS columns at a time; its consumers halve the pixels. One thread brings both
// operands. Two neighbouring columns of a thread's sums are taps of W side by side, so that it stores them together.
#include "pixels.cuh"

template <class C>
struct Subpixel : PixelsOf<C>, PacksUnits<Subpixel<C>> {
using typename PixelsOf<C>::Number;
using PixelsOf<C>::ELEMENT;
using PixelsOf<C>::NARROW;
using PixelsOf<C>::VEC;
using PixelsOf<C>::CONSUMERS;

static constexpr int MB = C::mb, COLUMNS = C::columns;
static constexpr int PIXELS = CONSUMERS * MB * 64;
static constexpr int CK = 128 / ELEMENT;                // channels of a chunk: a column's row has 128 bytes
static constexpr int ROW_PIXELS = 128 / ELEMENT;        // pixels of a row in shared memory, of one channel
static constexpr int CHUNKS = (C::cin + CK - 1) / CK;
static constexpr int K_STEPS = 4;                       // of a chunk: a matrix instruction takes 32 bytes of K
static constexpr int BOX_BYTES = CK * 128;              // of ROW_PIXELS pixels
static constexpr int BOXES = PIXELS / ROW_PIXELS;
static constexpr int WEIGHTS_AT = BOXES * BOX_BYTES, WEIGHT_BYTES = COLUMNS * 128;
static constexpr int TAPS = C::kernel_d * C::kernel_h * C::kernel_w;
static constexpr int ALL_COLUMNS = C::cout * TAPS;
static constexpr int BLOCKS_N = (ALL_COLUMNS + COLUMNS - 1) / COLUMNS;
static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static constexpr bool HOLDS = true, ALIKE = true;
using Sums = float[MB][COLUMNS / 2];
using Maps = TensorMap;
using Ring = RingOf<C::stages, WEIGHTS_AT + WEIGHT_BYTES>;
static_assert(Ring::BYTES + Ring::BARRIER_BYTES == C::shared_bytes, "the planner's shared memory is not the kernel's");

static __device__ __forceinline__ int channel_of(int column) { return column / C::kernel_w % C::cout; }

struct Sizes {
  int d, h, w;                                          // of the source
  int pixels, tiles_p, unused, tiles;                   // of an image; tiles of these; all, times BLOCKS_N
};

struct Tile { int n, p, block; };                       // image, first pixel, block of columns

// Neighbouring blocks have the same pixels.
static __device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  int block = index % BLOCKS_N, q = index / BLOCKS_N;
  return {q / s.tiles_p, q % s.tiles_p * PIXELS, block};
}

// =====================================================================================================================
// Weights
// =====================================================================================================================

static constexpr int PACK_UNITS = BLOCKS_N * CHUNKS * COLUMNS * 8;
static constexpr int SECOND = C::cout, TAPS_IN_ALL = TAPS;

// [block][chunk][column][128 bytes of channels, swizzled], zeros where there is none of either. The weight is (C::cin, C::cout, kernel).
template <class Write>
static __device__ __forceinline__ void pack_unit(int i, const Write& write) {
  int unit = i % 8, column = i / 8 % COLUMNS, rest = i / (8 * COLUMNS), chunk = rest % CHUNKS;
  int of = rest / CHUNKS * COLUMNS + column;
  int kw = of % C::kernel_w, cout = of / C::kernel_w % C::cout, tap = of / (C::kernel_w * C::cout) * C::kernel_w + kw;
  write((long long)(i - unit) * 16 + ((unit ^ (column & 7)) << 4), [=](int e) -> WeightAt {
    int cin = chunk * CK + channel_at<C::precision>(unit * VEC + e);
    return {cin < C::cin && of < ALL_COLUMNS, cin, cout, tap};
  });
}

// =====================================================================================================================
// Producer: one thread
// =====================================================================================================================

struct Loader {
  const Work<Subpixel>& work;
  Tile tile;
  bool packing;                                         // weights are not known to be packed

  __device__ __forceinline__ explicit Loader(const Work<Subpixel>& work) : work(work), packing(true) {}

  __device__ __forceinline__ Steps begin(int index) {
    tile = tile_at(index, work.sizes);
    return {0, CHUNKS};
  }

  __device__ __forceinline__ void load(int chunk, u32 to, u32 barrier) {
    expect_bytes(barrier, WEIGHTS_AT + WEIGHT_BYTES);
#pragma unroll
    for (int b = 0; b < BOXES; b++)
      load_box(to + b * BOX_BYTES, work.maps, tile.p + b * ROW_PIXELS, chunk * CK, tile.n, 0, 0, barrier);
    if (packing) wait_for_results();                    // of `pack`
    packing = false;
    copy_bulk(to + WEIGHTS_AT, work.packed + ((long long)tile.block * CHUNKS + chunk) * WEIGHT_BYTES, WEIGHT_BYTES, barrier);
  }
};

static __device__ __forceinline__ Ring ring_of(u32 memory, int) { return Ring::at(memory, memory + Ring::BYTES); }
static __device__ __forceinline__ void produce(const Work<Subpixel>& work) {
  if (threadIdx.x == 0) ::produce<Subpixel>(work, Loader(work));
}

// =====================================================================================================================
// Consumers
// =====================================================================================================================

// Float32: fragments of steps `first` and `first` + 1: lanes' pixels g and g + 8 of a row, of two channels.
static __device__ __forceinline__ void load_fragments(u32 (&a)[2][MB][4], u32 from, int first) {
#pragma unroll
  for (int step = 0; step < 2; step++)
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        // Eight pixels are two units of 16 bytes; channel c = 8 (first + step) + 2t + i / 2 has them swapped by c % 8.
        const int c = 8 * (first + step) + i / 2;
        u32 at = from + m * (64 / ROW_PIXELS * BOX_BYTES) + c * 128;
        a[step][m][i] = load_shared_u32(at ^ ((i / 2) << 4) ^ ((i % 2) << 5));
      }
}

// 16 bits: acc += a chunk's pixels x its weights, both by descriptor.
static __device__ __forceinline__ void multiply_turned(Sums& acc, u32 pixels, u32 weights) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < K_STEPS; step++)
#pragma unroll
    for (int m = 0; m < MB; m++) {
      u32 from = uniform(pixels) + m * BOX_BYTES + step * 2048;
      const u32 a[4] = {(from >> 4) | 1u << 16, (u32)(ROWS_OF<128> >> 32)};
      u64 b = ROWS_OF<128> | (u64)((weights >> 4 | 1u << 16) + step * 2);
      WgmmaOf<COLUMNS>::template multiply<C::precision, true, false, true>(acc[m], descriptor_of_words(a), b);
    }
  wgmma_commit();
}

struct Consumer {
  const Work<Subpixel>& work;
  int wg, thread;
  u32 own;                                              // where a stage has the consumer's pixels; float32: the lane's first
  struct At { u32 stage, weights; };

  __device__ __forceinline__ Consumer(const Work<Subpixel>& work, int wg, int thread) : work(work), wg(wg), thread(thread) {
    // The first pixel within boxes of 32: of warps 0 and 1 the consumer's first, of 2 and 3 the second; its units are swapped by its first
    // channel, 2t, and those of other steps by the same.
    int t = thread & 3, g = (thread & 31) >> 2, pixel = (thread >> 5) * 16 + g;
    u32 of_lane = pixel / 32 * BOX_BYTES + 2 * t * 128 + ((pixel % 32 * 4) ^ (2 * t << 4));
    own = wg * (MB * (64 / ROW_PIXELS) * BOX_BYTES) + (NARROW ? 0 : of_lane);
  }

  __device__ __forceinline__ At at(u32 stage) const { return {stage, uniform(stage + WEIGHTS_AT)}; }
  __device__ __forceinline__ Steps steps(int) const { return {0, CHUNKS}; }
  __device__ __forceinline__ void begin(Sums& acc, int tile) const {
    begin_sums<Subpixel>(acc, work.bias, tile_at(tile, work.sizes).block * COLUMNS + thread % 4 * 2);
  }
  __device__ __forceinline__ void multiply(Sums& acc, const At& at, u32 held) const {
    if constexpr (NARROW) {
      multiply_turned(acc, at.stage + own, at.weights);
      wgmma_wait<1>();
      give_back(held, thread & 31);
    } else {
      multiply_row<Subpixel>(acc, 0, at.stage + own, at.weights, held, thread & 31);
    }
  }
  __device__ __forceinline__ void store(const Sums& acc, int tile) const {
    if constexpr (C::kernel_w == 2 && NARROW) {         // float32 loses by it (docs/experiments.md)
      if (work.sizes.w % 2 == 0) return Subpixel::store<true>(acc, work.y, work.sizes, tile_at(tile, work.sizes), wg, thread);
    }
    Subpixel::store<false>(acc, work.y, work.sizes, tile_at(tile, work.sizes), wg, thread);
  }
};

// A thread's sums: of columns 8j + 2t and the next, pixels g and g + 8 of MB x 64. PAIRS: pixels 2i and 2i + 1 are in one row and have
// two taps of W each; lanes of neighbouring g exchange, and store 8 bytes.
template <bool PAIRS>
static __device__ __forceinline__ void store(const Sums& acc, char* __restrict__ y, const Sizes& s, const Tile& t, int wg, int thread) {
  int lane = thread & 31, odd = lane >> 2 & 1, out_w = s.w * C::kernel_w, out_h = s.h * C::kernel_h;
  int plane = s.pixels * TAPS;
  y += (long long)t.n * C::cout * plane * ELEMENT;
  constexpr int STORES = PAIRS ? 1 : 2;
  int at[MB][STORES];                                   // of the first tap's output in a channel; -1: there is no such pixel
#pragma unroll
  for (int m = 0; m < MB; m++)
#pragma unroll
    for (int h = 0; h < STORES; h++) {
      int p = t.p + (wg * MB + m) * 64 + (thread >> 5) * 16 + (lane >> 2) + (PAIRS ? odd * 7 : h * 8);
      int w = p % s.w, q = p / s.w, row = q % s.h, d = q / s.h;
      at[m][h] = p < s.pixels ? (d * C::kernel_d * out_h + row * C::kernel_h) * out_w + w * C::kernel_w : -1;
    }
  int first = t.block * COLUMNS + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    OPAQUE_4(first, plane, out_w, out_h);               // what follows from them is found here, not kept (spills)
    int of = first + 8 * j, kw = of % C::kernel_w, cout = of / C::kernel_w % C::cout, tap = of / (C::kernel_w * C::cout);
    bool column = ALL_COLUMNS % COLUMNS == 0 || of < ALL_COLUMNS;
    char* channel = y + ((long long)cout * plane + (tap / C::kernel_h * out_h + tap % C::kernel_h) * out_w + kw) * ELEMENT;
#pragma unroll
    for (int m = 0; m < MB; m++) {
      u32 v[2][4];
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < 2; c++) v[h][c] = Number::bits(acc[m][4 * j + 2 * h + c]);
      if constexpr (NARROW) {
#pragma unroll
        for (int h = 0; h < 2; h++) v[h][0] |= v[h][1] << 16;
        if constexpr (PAIRS) {
          u32 other = __shfl_xor_sync(0xffffffffu, odd ? v[0][0] : v[1][0], 4);
          v[0][1] = odd ? v[1][0] : other;
          v[0][0] = odd ? other : v[0][0];
        }
      }
#pragma unroll
      for (int h = 0; h < STORES; h++) {
        char* place = channel + (long long)at[m][h] * ELEMENT;
        bool ok = at[m][h] >= 0 && column;
        if constexpr (!NARROW || PAIRS) store_global_64_if(place, v[h], ok);
        else store_global_if(place, v[h][0], ok);
      }
    }
  }
}
};
