// Subpixel: a forward whose kernel is its stride, NCHW. Every output has one tap, so that it is a product of matrices: pixels x channels by
// channels x (kernel row, output channel, tap of W), whose rows go to neighbouring outputs. No pixel has a halo: an image's pixels are one
// row of each channel, whatever its width.
//
// Float32 pixels are fragments of A that lanes read from a channel's row as it lies, and nothing turns pixels in shared memory, which bounds
// `gather` for many channels; of 16 bits A is a descriptor, since those may lie along M.
//
// A block has PLACES pixels of an image times COLUMNS columns at a time. Two neighbouring columns of a thread's sums are taps of W side by
// side, so that it stores them together.
#include "pixels_streamed.cuh"

template <class C>
struct Subpixel : Streamed<Subpixel<C>, C> {
using Base = Streamed<Subpixel, C>;
using typename Base::Number;
using typename Base::Sums;
using typename Base::At;
using Base::ELEMENT;
using Base::NARROW;
using Base::PLACES;
using Base::COLUMNS;
using Base::ALL_COLUMNS;

static constexpr int ROW_PIXELS = 128 / ELEMENT, CK = ROW_PIXELS;  // of a channel's row in shared memory; channels of a stage
static constexpr int TAPS = C::kernel_d * C::kernel_h * C::kernel_w;
static constexpr int SECOND = C::cout, TAPS_IN_ALL = TAPS;
static constexpr bool ALIKE = true;

static __device__ __forceinline__ int channel_of(int column) { return column / C::kernel_w % C::cout; }

struct Sizes {
  int d, h, w;                                          // of the source
  int pixels, tiles_p, unused, tiles;                   // of an image; tiles of these; all, times blocks of columns
};

struct Tile { int n, p; };                              // image and first pixel

static __device__ __forceinline__ Tile tile_at(int places, const Sizes& s) { return {places / s.tiles_p, places % s.tiles_p * PLACES}; }

// K is channels. The weight is (C::cin, C::cout, kernel).
static __device__ __forceinline__ WeightAt weight_at(int column, int chunk, int, int k) {
  int kw = column % C::kernel_w, cout = column / C::kernel_w % C::cout, tap = column / (C::kernel_w * C::cout) * C::kernel_w + kw;
  int cin = chunk * CK + channel_at<C::precision>(k);
  return {cin < C::cin && column < ALL_COLUMNS, cin, cout, tap};
}

struct Box {
  int n, p;
  __device__ __forceinline__ void begin(int places, int lane, const Sizes& s) {
    Tile tile = tile_at(places, s);
    n = tile.n, p = tile.p + lane * ROW_PIXELS;
  }
  __device__ __forceinline__ void load(int chunk, u32 to, const TensorMap& map, u32 barrier) const { load_box(to, map, p, chunk * CK, n, 0, 0, barrier); }
};

// --- consumers -------------------------------------------------------------------------------------------------------

// Float32: fragments of steps `first` and `first` + 1: lanes' pixels g and g + 8 of a row, of two channels.
static __device__ __forceinline__ void load_fragments(u32 (&a)[2][4], u32 from, int first) {
#pragma unroll
  for (int step = 0; step < 2; step++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      // Eight pixels are two units of 16 bytes; channel c = 8 (first + step) + 2t + i / 2 has them swapped by c % 8.
      const int c = 8 * (first + step) + i / 2;
      a[step][i] = load_shared_u32((from + c * 128) ^ ((i / 2) << 4) ^ ((i % 2) << 5));
    }
}

// 16 bits: acc += a chunk's pixels x its weights, both by descriptor.
static __device__ __forceinline__ void multiply_turned(Sums& acc, u32 pixels, u32 weights) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Base::K_STEPS; step++) {
    u32 from = uniform(pixels) + step * 2048;
    const u32 a[4] = {(from >> 4) | 1u << 16, (u32)(ROWS_OF<128> >> 32)};
    u64 b = ROWS_OF<128> | (u64)((weights >> 4 | 1u << 16) + step * 2);
    WgmmaOf<COLUMNS>::template multiply<C::precision, true, false, true>(acc, descriptor_of_words(a), b);
  }
  wgmma_commit();
}

// Where a stage has the consumer's pixels; in float32 the lane's first. The first pixel within boxes of 32: of warps 0 and 1 the consumer's
// first, of 2 and 3 the second; its units are swapped by its first channel, 2t, and those of other steps by the same.
static __device__ __forceinline__ u32 own_place(int wg, int thread) {
  int t = thread & 3, g = (thread & 31) >> 2, pixel = (thread >> 5) * 16 + g;
  u32 of_lane = pixel / 32 * C::box_bytes + 2 * t * 128 + ((pixel % 32 * 4) ^ (2 * t << 4));
  return wg * (64 / ROW_PIXELS * C::box_bytes) + (NARROW ? 0 : of_lane);
}

static __device__ __forceinline__ void multiply(Sums& acc, const At& at, u32 own, u32 held, int lane) {
  if constexpr (NARROW) {
    multiply_turned(acc, at.stage + own, at.weights);
    wgmma_wait<1>();
    give_back(held, lane);
  } else {
    Base::multiply(acc, at, own, held, lane);
  }
}

static __device__ __forceinline__ void store(const Sums& acc, const Work<Subpixel>& work, int tile, int wg, int thread) {
  if constexpr (C::kernel_w == 2 && NARROW) {           // float32 loses by it (docs/experiments.md)
    if (work.sizes.w % 2 == 0) return Base::template store_sums<true, true>(acc, work, tile, wg, thread);
  }
  Base::template store_sums<false, true>(acc, work, tile, wg, thread);
}

// As `store_sums` asks.
template <int STORES>
struct Result {
  char* y;
  long long image, channel;                             // where an image begins, in elements, and column `of` from its first tap
  int at[STORES];                                       // of a pixel's first tap in a channel; -1: there is no such pixel
  int first, of, plane, out_w, out_h;

  __device__ __forceinline__ Result(const Work<Subpixel>& work, int tile, int whole, int place, int first) : y(work.y), first(first) {
    const Sizes& s = work.sizes;
    const Tile t = tile_at(Base::places_of(tile), s);
    out_w = s.w * C::kernel_w, out_h = s.h * C::kernel_h, plane = s.pixels * TAPS;
    image = (long long)t.n * C::cout * plane;
#pragma unroll
    for (int h = 0; h < STORES; h++) {
      int p = t.p + whole + place + h * 8, w = p % s.w, q = p / s.w, row = q % s.h, d = q / s.h;
      at[h] = p < s.pixels ? (d * C::kernel_d * out_h + row * C::kernel_h) * out_w + w * C::kernel_w : -1;
    }
  }
  __device__ __forceinline__ void go(int j) {
    OPAQUE_4(first, plane, out_w, out_h);               // what follows from them is found here, not kept (spills)
    of = first + j;
    const int kw = of % C::kernel_w, cout = of / C::kernel_w % C::cout, tap = of / (C::kernel_w * C::cout);
    channel = image + (long long)cout * plane + (tap / C::kernel_h * out_h + tap % C::kernel_h) * out_w + kw;
  }
  __device__ __forceinline__ char* to(int h, int) const { return y + (channel + at[h]) * ELEMENT; }
  __device__ __forceinline__ bool there(int h, int) const { return at[h] >= 0 && (ALL_COLUMNS % COLUMNS == 0 || of < ALL_COLUMNS); }
};
};
