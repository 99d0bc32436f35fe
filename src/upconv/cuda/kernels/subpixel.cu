// Subpixel: a transposed convolution whose kernel is its stride, forward, NCHW, on tensor cores. Every output has one tap, so that it is
// a product of matrices, pixels x channels by channels x (taps x output channels), whose rows go to neighbouring outputs. No pixel
// has a halo: an image's pixels are one row each channel, whatever its width.
//
// Pixels are M, columns (kernel row, output channel, tap of W) N. So float32 pixels are fragments of A that lanes read from a
// channel's row as it lies, and nothing turns pixels in shared memory, which bounds `gather` for many channels; of 16 bits A is a
// descriptor, since those may lie along M. Weights are B, by descriptor, through the same ring.
//
// A block has PIXELS pixels of an image times COLUMNS columns at a time; its consumers halve the pixels. One thread brings both
// operands. Two neighbouring columns of a thread's sums are taps of W side by side, so that it stores them together.
//
// Constants are Subpixel's C (cuda/pixels/subpixel.py computes them and explains each); sizes of the input are arguments.
#include "places.cuh"

template <class C_>
struct Subpixel : PacksUnits<Subpixel<C_>> {
using C = C_;
using Number = NumberOf<C::precision>;
using Type = typename Number::Type;

static constexpr int ELEMENT = Number::SIZE;
static constexpr bool NARROW = ELEMENT == 2;            // of 16 bits
static constexpr int VEC = 16 / ELEMENT;
static constexpr int CONSUMERS = 2;
static constexpr int MB = C::mb, COLUMNS = C::columns;
static constexpr int PIXELS = CONSUMERS * MB * 64;
static constexpr int CK = 128 / ELEMENT;                // channels of a chunk: a column's row has 128 bytes
static constexpr int ROW_PIXELS = 128 / ELEMENT;        // pixels of a row in shared memory, of one channel
static constexpr int CHUNKS = (C::cin + CK - 1) / CK;
static constexpr int K_STEPS = 4;                       // of a chunk: a matrix instruction takes 32 bytes of K
static constexpr int BOX_BYTES = CK * 128;              // of ROW_PIXELS pixels
static constexpr int BOXES = PIXELS / ROW_PIXELS;
static constexpr int WEIGHT_BYTES = COLUMNS * 128;
static constexpr int STAGE_BYTES = BOXES * BOX_BYTES + WEIGHT_BYTES;
static constexpr int TAPS = C::kernel_d * C::kernel_h * C::kernel_w;
static constexpr int ALL_COLUMNS = C::cout * TAPS;
static constexpr int BLOCKS_N = (ALL_COLUMNS + COLUMNS - 1) / COLUMNS;
static constexpr int THREADS = 128 + CONSUMERS * 128;
using Ring = RingOf<C::stages, STAGE_BYTES>;
static constexpr int BARRIERS_AT = Ring::BYTES;
static_assert(BARRIERS_AT + Ring::BARRIER_BYTES == C::shared_bytes, "the planner's shared memory is not the kernel's");

static __device__ __forceinline__ int channel_of(int column) { return column / C::kernel_w % C::cout; }

struct Sizes {
  int batch, in_h, in_w, pixels;                        // of an image
  int tiles_p, tiles;                                   // tiles of an image's pixels; all, times BLOCKS_N
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

static __device__ __forceinline__ void produce(const TensorMap& map, const char* __restrict__ packed, const Sizes& s, const Ring& ring) {
  typename Ring::Cursor cursor = {0, 1};                               // all are free at first
  bool packing = true;
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    Tile t = tile_at(index, s);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++, cursor.next()) {
      u32 to = ring.stage(cursor), barrier = ring.full(cursor);
      ring.wait_empty(cursor);
      expect_bytes(barrier, STAGE_BYTES);
#pragma unroll
      for (int b = 0; b < BOXES; b++)
        load_box(to + b * BOX_BYTES, map, t.p + b * ROW_PIXELS, chunk * CK, t.n, 0, 0, barrier);
      if (packing) wait_for_results();                  // of `pack`
      packing = false;
      const char* from = packed + ((long long)t.block * CHUNKS + chunk) * WEIGHT_BYTES;
      copy_bulk(to + BOXES * BOX_BYTES, from, WEIGHT_BYTES, barrier);
    }
  }
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

// A thread's sums: of columns 8j + 2t and the next, pixels g and g + 8 of MB x 64. PAIRS: pixels 2i and 2i + 1 are in one row and have
// two taps of W each; lanes of neighbouring g exchange, so that an even one stores 8 bytes from g on, an odd one from g + 7.
template <bool PAIRS>
static __device__ __forceinline__ void store(const float (&acc)[MB][COLUMNS / 2], char* __restrict__ y, const Sizes& s, const Tile& t, int wg, int thread) {
  int lane = thread & 31, odd = lane >> 2 & 1, out_w = s.in_w * C::kernel_w, out_h = s.in_h * C::kernel_h;
  int plane = s.pixels * TAPS;
  y += (long long)t.n * C::cout * plane * ELEMENT;
  constexpr int STORES = PAIRS ? 1 : 2;
  int at[MB][STORES];                                   // of the first tap's output in a channel; -1: there is no such pixel
#pragma unroll
  for (int m = 0; m < MB; m++)
#pragma unroll
    for (int h = 0; h < STORES; h++) {
      int p = t.p + (wg * MB + m) * 64 + (thread >> 5) * 16 + (lane >> 2) + (PAIRS ? odd * 7 : h * 8);
      int w = p % s.in_w, q = p / s.in_w, row = q % s.in_h, d = q / s.in_h;
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

static __device__ __forceinline__ void consume(const Type* bias, char* y, const Sizes& s, const Ring& ring, int wg, int thread) {
  int lane = thread & 31;
  typename Ring::Cursor cursor = {0, 0};
  float acc[MB][COLUMNS / 2];
  // Float32: the lane's first pixel within boxes of 32: of warps 0 and 1 the consumer's first, of 2 and 3 the second; its units are
  // swapped by its first channel, 2t, and those of other steps by the same.
  int t = lane & 3, g = lane >> 2, pixel = (thread >> 5) * 16 + g;
  u32 of_lane = pixel / 32 * BOX_BYTES + 2 * t * 128 + ((pixel % 32 * 4) ^ (2 * t << 4));
  u32 own = wg * (MB * (64 / ROW_PIXELS) * BOX_BYTES) + (NARROW ? 0 : of_lane);
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    begin_sums<Subpixel>(acc, bias, tile_at(index, s).block * COLUMNS + lane % 4 * 2);
    u32 behind = 0;                                     // the stage that instructions under way read
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++, cursor.next()) {
      u32 stage = ring.stage(cursor), weights = uniform(stage + BOXES * BOX_BYTES);
      ring.wait_full(cursor);
      if constexpr (NARROW) {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_STEPS; step++)
#pragma unroll
          for (int m = 0; m < MB; m++) {
            u32 pixels = uniform(stage + own) + m * BOX_BYTES + step * 2048;
            const u32 a[4] = {(pixels >> 4) | 1u << 16, (u32)(ROWS_OF<128> >> 32)};
            u64 b = ROWS_OF<128> | (u64)((weights >> 4 | 1u << 16) + step * 2);
            WgmmaOf<COLUMNS>::template multiply<C::precision, true, false, true>(acc[m], descriptor_of_words(a), b);
          }
        wgmma_commit();
        wgmma_wait<1>();
        give_back(behind, lane);
      } else {
        multiply_row<Subpixel>(acc, 0, stage + own, weights, behind, lane);
      }
      behind = ring.empty(cursor);
    }
    wgmma_wait<0>();
    give_back(behind, lane);
    if constexpr (C::kernel_w == 2 && NARROW) {         // float32 loses by it (docs/experiments.md)
      if (s.in_w % 2 == 0) {
        store<true>(acc, y, s, tile_at(index, s), wg, thread);
        continue;
      }
    }
    store<false>(acc, y, s, tile_at(index, s), wg, thread);
  }
}

static __device__ __forceinline__ void run(const char* packed, const Type* bias, char* y, const Sizes& s, const TensorMap& map, u32 memory) {
  const Ring ring = Ring::at(memory, memory + BARRIERS_AT);
  run_block<1, CONSUMERS, 40, 232>(
      [&] { ring.init(1, CONSUMERS * 4); },
      [&] { if (threadIdx.x == 0) produce(map, packed, s, ring); },
      [&](int consumer, int thread) {
        consume(bias, y, s, ring, consumer, thread);
      });
}
};

template <class C>
__global__ void __launch_bounds__(Subpixel<C>::THREADS, 1)
subpixel(const char* __restrict__ packed, const typename Subpixel<C>::Type* __restrict__ bias, char* __restrict__ y, int batch, int in_h, int in_w,
         int pixels, int tiles_p, int tiles, const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Subpixel<C>::run(packed, bias, y, {batch, in_h, in_w, pixels, tiles_p, tiles}, map, shared_address(memory));
}
