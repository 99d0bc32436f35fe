// A warpgroup's multiplications in wgrad_wgmma.cu: fragments of g, from registers or by descriptor, by rows of x.
#include "wgrad_copies.cuh"
#include "wgmma.cuh"

// What a thread has of M, and a chunk's positions as g's tile has them.
template <class T>
struct WgradView {
using C = typename T::C;
using Sizes = typename T::Sizes;
using Rows = typename T::Rows;

// A lane's rows of a warp's sixteen are `row` and T::NEXT_ROWS on; its warp's begin at a channel of the block's and a unit.
struct Lane { int warp, lane, row, q, wg_m, first_unit, channel; };

static __device__ __forceinline__ Lane lane_of(int wg, int thread) {
  Lane of;
  of.wg_m = wg % C::split_m, of.lane = thread & 31, of.q = of.lane & 3;
  if constexpr (C::interleaved) {
    of.warp = thread >> 5, of.row = (of.lane >> 2) / C::subs;
    of.first_unit = wg / C::split_m * (C::subs * T::UNITS) + (of.lane >> 2) % C::subs;
    of.channel = of.wg_m * T::ROWS_PER_SUB + of.warp * (16 / C::subs);
  } else {
    of.warp = thread >> 5, of.row = of.lane >> 2;
    // By a shuffle ptxas knows that a warp's lanes have the same. Most of these tiles gain by it; other tiles lose.
    if constexpr (C::stacked && !C::channels_last) of.warp = __shfl_sync(0xffffffffu, of.warp, 0);
    of.first_unit = (wg / C::split_m * C::subs + of.warp * 16 / T::ROWS_PER_SUB) * T::UNITS;
    of.channel = of.wg_m * T::ROWS_PER_SUB + of.warp * 16 % T::ROWS_PER_SUB;
  }
  return of;
}

// A lane's view of its taps; the same for all chunks.
struct Taps {
  int at[T::UNITS];                        // of g's tile: elements (NCHW) or pixels (channels_last) by which the unit is shifted
  u32 line[T::UNITS];                      // NCHW: rows of memory from a chunk's first row to the unit's, as elements modulo 2^32
};

static __device__ __forceinline__ void set_tap(Taps& taps, int u, int unit, const Sizes& s) {
  if (unit >= T::SET_UNITS) unit = T::SET_UNITS - 1;    // its sums are not stored
  int td = unit / (T::SET_UNITS / C::taps_d), th = C::stacked ? 0 : unit / C::taps_w % C::taps_h, tw = unit % C::taps_w;
  int shift = td * C::tap_rows_d * T::CLASS_ROWS + th * C::tap_rows_h;
  if constexpr (C::gapless) taps.at[u] = unit * (T::PLANE_BYTES / T::G_PIXEL_BYTES);
  else if constexpr (C::parted) taps.at[u] = shift * T::G_LINE + tw % C::g_planes * (T::PLANE_BYTES / T::G_PIXEL_BYTES) + tw / C::g_planes * C::plane_taps;
  else if constexpr (C::channels_last) taps.at[u] = shift * T::G_LINE + tw * C::dilation_w;
  else taps.at[u] = shift * (T::G_CHANNELS * C::g_pitch) + tw * C::dilation_w;
  taps.line[u] = ((u32)(td * C::dilation_d) * s.out_h + th * C::dilation_h) * s.out_w;
}

// Half of a step's K: where it lies in g's tile before the tap's share, and (NCHW) in memory; constants after unrolling.
struct Half {
  int row, column;
  Rows memory;
};
struct Step { Half half[2]; };

// Place of a tile's row of q in g's tile before the tap's own share; stacked of the first row of a slice.
static __device__ __forceinline__ int tile_row(const Rows& q) {
  return (q.n * C::g_rows_d + q.d * C::q_rows_d) * T::CLASS_ROWS + q.h * C::q_rows_h;
}

// Step `k_step` of a chunk's positions: a strip of 8, or two of 16-bit types.
static __device__ __forceinline__ Step step_of(int k_step) {
  Step step;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int strip = T::NARROW ? 2 * k_step + k : k_step;
    Rows q = T::x_row(strip / T::W_STRIPS);
    step.half[k] = {tile_row(q), (strip % T::W_STRIPS * 8 + (T::NARROW ? 0 : 4 * k)) * T::G_STEP_W, {q.n, q.d * C::step_d, q.h * C::step_h}};
  }
  return step;
}

// Stacked: step `column` of row `r` of g's slice that belongs to image `n` and slice `d` of q.
static __device__ __forceinline__ Step step_of_row(int n, int d, int r, int column) {
  Step step;
#pragma unroll
  for (int k = 0; k < 2; k++)
    step.half[k] = {r % C::row_classes * (C::tile_n * C::g_rows_d * T::CLASS_ROWS) + tile_row({n, d, 0}) + r / C::row_classes,
                    (T::NARROW ? 16 * column + 8 * k : 8 * column + 4 * k) * T::G_STEP_W, {n, d * C::step_d, r}};
  return step;
}

// By how much rows of a chunk's tile begin off 16 bytes, in elements, for a lane's channels: each class of rows (classed); or the
// chunk's first row, from which others follow.
struct Phases { u32 of[C::row_classes]; };

static __device__ __forceinline__ u32 memory_row(const Rows& row, const Sizes& s) {
  return ((u32)(row.n * T::COUT) * s.out_d + row.d) * s.out_h * s.out_w + (u32)row.h * s.out_w;
}

// g's tile of a chunk, as a lane sees it from `lane_at` on.
struct Tile {
  const unsigned char* at;
  const Taps& taps;
  const Sizes& s;
  Phases phases;
  int lane_at;
};
};

// =====================================================================================================================
// The fragment of unit `u` at a step: rows g and g + 8 of the warp's sixteen; of the two halves of K, pixels q and q + 4 of a strip
// (TF32), or 2q and 2q + 1 of two strips.
// =====================================================================================================================

template <class T>
struct WgradFragments : WgradView<T> {
using C = typename T::C;
using V = WgradView<T>;
using Half = typename V::Half;
using Step = typename V::Step;
using Tile = typename V::Tile;

// Where a lane begins, of channels_last in bytes, of NCHW in elements.
static __device__ __forceinline__ int lane_first(const typename V::Lane& of) {
  if constexpr (C::a_shared) {
    return of.wg_m * T::G_SLAB_BYTES;      // the warpgroup's 64 channels
  } else if constexpr (T::TURN_X) {
    int channel = of.channel + of.row;
    return T::strip_pixel(of.q) * T::G_STEP_W * T::G_PIXEL_BYTES + channel / C::g_width * T::G_SLAB_BYTES + channel % C::g_width * 4;
  } else if constexpr (C::channels_last) {  // rows of 8 channels, of pixels 0-7 and 8-15 (lane / 16), of channels 0-7 and 8-15 (lane / 8 % 2)
    int channel = of.channel + (of.lane >> 3 & 1) * 8, first = (of.lane & 7) * T::G_STEP_W * T::G_PIXEL_BYTES;
    return first + channel / C::g_width * T::G_SLAB_BYTES + channel % C::g_width * 2;
  } else {
    const int channel = of.channel + of.row, of_channels = channel / T::G_CHANNELS;  // the lane's class
    return of_channels * (T::CLASS_BYTES / T::ELEMENT * C::row_classes) + channel % T::G_CHANNELS * C::g_pitch + (T::NARROW ? 2 * of.q : of.q) * C::step_w;
  }
}

static __device__ __forceinline__ void load(u32 (&a)[4], const Tile& g, int u, const Step& step) {
  if constexpr (C::a_shared) describe(a, g, u, step);
  else if constexpr (T::TURN_X) load_words(a, g, u, step);
  else if constexpr (C::channels_last) load_matrices(a, g, u, step);
  else load_elements(a, g, u, step);
}

static __device__ __forceinline__ int pixel_of(const Half& half) { return half.row * T::G_LINE + half.column; }

// By descriptor, which takes the place of two words: rows of 64 channels of the tap's pixels, as the engine leaves them. Nothing is
// waited for, so that instructions are queued from chunk to chunk.
static __device__ __forceinline__ void describe(u32 (&a)[4], const Tile& g, int u, const Step& step) {
  const int p0 = pixel_of(step.half[0]), p1 = pixel_of(step.half[1]);
  a[0] = ((shared_address(g.at) + g.lane_at + (g.taps.at[u] + p0) * T::G_PIXEL_BYTES) & 0x3ffff) >> 4;
  a[1] = 1u << 30 | (p1 - p0) * T::G_PIXEL_BYTES >> 4;    // the swizzle, and from 8 pixels to the next 8
}

// Channels_last float32: words of swizzled rows.
static __device__ __forceinline__ void load_words(u32 (&a)[4], const Tile& g, int u, const Step& step) {
  u32 first = shared_address(g.at) + (g.taps.at[u] + pixel_of(step.half[0])) * T::G_PIXEL_BYTES + g.lane_at;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    u32 address = first + k * (T::strip_pixel(4) * T::G_STEP_W * T::G_PIXEL_BYTES);
    address ^= (address >> 7 & (C::g_width / 4 - 1)) << 4;  // the engine's swizzle, a function of the address
    a[2 * k] = load_shared_u32(address);
    a[2 * k + 1] = load_shared_u32(address ^ 32);        // 8 channels on
  }
}

// Channels_last of 16 bits.
static __device__ __forceinline__ void load_matrices(u32 (&a)[4], const Tile& g, int u, const Step& step) {
  int p0 = pixel_of(step.half[0]), p1 = pixel_of(step.half[1]);
  int p = g.taps.at[u] + p0 + ((threadIdx.x & 16) ? p1 - p0 : 0);
  u32 address = shared_address(g.at) + p * T::G_PIXEL_BYTES + g.lane_at;
  address ^= (address >> 7 & (C::g_width / 8 - 1)) << 4;  // the engine's swizzle, a function of the address
  load_matrices_turned(a, address);
}

// NCHW: elements of channels' rows, which begin anywhere. What is known only at run time of where a half begins:
static __device__ __forceinline__ int begin_of(const Tile& g, int u, const Half& half) {
  int at = g.lane_at + g.taps.at[u];
  if constexpr (C::aligned_g) return at;
  else if constexpr (T::CLASSED) return at + g.phases.of[half.memory.h % C::row_classes];
  else return at + ((g.phases.of[0] + g.taps.line[u] + V::memory_row(half.memory, g.s)) & (T::VEC - 1));
}
// And constants that are even, so that the addresses are a register and an immediate; of rows g and g + 8.
static __device__ __forceinline__ int constant_of(const Half& half, int h) {
  return half.row * (T::G_CHANNELS * C::g_pitch) + half.column + h * T::NEXT_ROWS * C::g_pitch;
}

static __device__ __forceinline__ void load_elements(u32 (&a)[4], const Tile& g, int u, const Step& step) {
  const u32* words = (const u32*)g.at;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const int at = begin_of(g, u, step.half[k]);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int constant = constant_of(step.half[k], h);
      if constexpr (T::NARROW) {
        int second = at + C::step_w;
        u32 selector = (at & 1 ? 0x32u : 0x10u) | (second & 1 ? 0x7600u : 0x5400u);
        a[2 * k + h] = __byte_perm(words[(at >> 1) + constant / 2], words[(second >> 1) + constant / 2], selector);
      } else {
        u32 v = words[at + constant];
        a[2 * k + h] = C::box_g ? v : to_tf32(__uint_as_float(v));  // boxes are rounded on their way
      }
    }
  }
}
};

// [16 bits] NCHW: K is two pixels a word, and a tap begins at any. Units that are neighbours along W (C::run of them) may have nearly all
// their words in common. Then these are loaded once (C::run_words), and shifted in registers.
template <class T>
struct WgradUnits {
  using C = typename T::C;
  using F = WgradFragments<T>;
  static constexpr bool SHARED = C::run_words > 0;
  static constexpr int WORDS = SHARED ? C::run_words : 1;
  u32 word[2][2][WORDS];                   // of a step's two strips, of rows g and g + 8: all words of a run of taps
  bool odd[2];                             // whether the run begins in the middle of the first

  // The fragment of unit `u`, of units one after the other.
  __device__ __forceinline__ void load(u32 (&a)[4], const typename F::Tile& g, int u, const typename F::Step& step) {
    if constexpr (SHARED) {
      if (u % C::run == 0) load_words(g, u, step);
      shift(a, u % C::run);
    } else {
      F::load(a, g, u, step);
    }
  }

  // The words of the run that begins with unit `u`.
  __device__ __forceinline__ void load_words(const typename F::Tile& g, int u, const typename F::Step& step) {
    const u32* words = (const u32*)g.at;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int at = F::begin_of(g, u, step.half[k]);
      odd[k] = C::parity_known ? C::padding_w & 1 : at & 1;
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < WORDS; j++) word[k][h][j] = words[(at >> 1) + F::constant_of(step.half[k], h) / 2 + j];
    }
  }

  // The fragment of the run's tap `i`, as F would load it.
  __device__ __forceinline__ void shift(u32 (&a)[4], int i) const {
    const int first = i * C::dilation_w, second = first + C::step_w;  // elements from the run's own first to the two of a word of K
#pragma unroll
    for (int k = 0; k < 2; k++) {
      u32 selector = (odd[k] == (first % 2 == 0) ? 0x32u : 0x10u) | (odd[k] == (second % 2 == 0) ? 0x7600u : 0x5400u);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        u32 low = first % 2 && odd[k] ? word[k][h][(first + 1) / 2] : word[k][h][first / 2];
        u32 high = second % 2 && odd[k] ? word[k][h][(second + 1) / 2] : word[k][h][second / 2];
        a[2 * k + h] = __byte_perm(low, high, selector);
      }
    }
  }
};

// =====================================================================================================================
// Multiplications
// =====================================================================================================================

template <class T>
struct WgradMultiply {
using C = typename T::C;
using F = WgradFragments<T>;
using Taps = typename F::Taps;
using Step = typename F::Step;
using Tile = typename F::Tile;
using UnitSums = float[T::NB][T::OF_UNIT * (T::N_WIDTH / 2)];
using Sums = UnitSums[T::UNITS];

// Stacked: rows of x that a row of g meets by a column of taps: for each remainder r of the row by step_h those of taps r, r + step_h,
// ..., each a row above the one before; their sums lie in the order of the rows.
static constexpr int LEAST = C::taps_h / C::step_h, OVER = C::taps_h % C::step_h;
static __device__ __forceinline__ int stack_of(int r) { return C::stacked ? LEAST + (r < OVER) : 1; }
static __device__ __forceinline__ int stack_begin(int r) { return r * LEAST + (r < OVER ? r : OVER); }
// Where a unit's tap has its sums.
static __device__ __forceinline__ int place_of(int tap) {
  if constexpr (!C::stacked) return 0;
  else return stack_begin(tap % C::step_h) + stack_of(tap % C::step_h) - 1 - tap / C::step_h;
}

// A fragment by ROWS rows of x, whose first begins at `x`: their sums follow each other from `first` rows on.
template <int ROWS>
static __device__ __forceinline__ void multiply_by(UnitSums& acc, int first, const u32 (&a)[4], u32 x) {
  // From 8 channels or pixels to the next 8; MN-major also from the channels of a swizzled line to the next: of the next box, or, stacked,
  // of the next row of x.
  const u64 strides = ((u64)(8 * C::segment >> 4) << 32) | ((u64)((T::K_MAJOR ? 8 * C::segment : C::stacked ? T::X_ROW_BYTES : T::BOX_BYTES) >> 4) << 16);
  const u64 upper = strides | ((u64)(C::segment == 32 ? 3 : C::segment == 64 ? 2 : 1) << 62);
  using Wgmma = WgmmaOf<ROWS * T::N_WIDTH>;
#pragma unroll
  for (int nb = 0; nb < T::NB; nb++) {
    u64 b = upper | (((x + nb * (T::K_MAJOR ? T::N_WIDTH * C::segment : T::BOX_BYTES)) & 0x3ffff) >> 4);
    float (&d)[ROWS * (T::N_WIDTH / 2)] = *(float (*)[ROWS * (T::N_WIDTH / 2)])&acc[nb][first * (T::N_WIDTH / 2)];
    // [channels_last] A described has rows of channels, as B has.
    if constexpr (C::a_shared) Wgmma::template multiply<C::precision, true, C::channels_last, true>(d, descriptor_of_words(a), b);
    else Wgmma::template multiply<C::precision, false, C::channels_last, true>(d, a, b);
  }
}

static __device__ __forceinline__ void multiply(UnitSums& acc, int first, int rows, const u32 (&a)[4], u32 x) {
  if (rows == C::stack) multiply_by<C::stack>(acc, first, a, x);
  else if constexpr (C::stacked && LEAST > 0 && LEAST < C::stack) multiply_by<LEAST>(acc, first, a, x);
}

// A step's fragment of a unit by rows of x from `x` on. From registers the instruction that had them before must be done.
static __device__ __forceinline__ void multiply_unit(UnitSums& acc, WgradUnits<T>& units, u32 (&a)[4], const Tile& g, int u, const Step& step, int first, int rows, u32 x) {
  units.load(a, g, u, step);
  if constexpr (!C::a_shared) wgmma_fence();
  multiply(acc, first, rows, a, x);
  if constexpr (!C::a_shared) wgmma_commit();
}

// Stacked: the unrolled steps of every row of a chunk from step `first` of a row on.
static __device__ __forceinline__ void multiply_rows(Sums& acc, int first, const unsigned char* tile, Tile g) {
  u32 a[T::FRAGMENTS][4];
  WgradUnits<T> units;
  g.at = tile + T::X_TILE_BYTES;
  g.lane_at += first * (32 / T::ELEMENT * T::G_STEP_W) * T::G_PIXEL_BYTES;
  const u32 x_tile = shared_address(tile) + T::x_at(first);
  int step = 0;                            // a constant after unrolling
#pragma unroll
  for (int remainder = 0; remainder < C::step_h && remainder < C::taps_h; remainder++)
#pragma unroll
    for (int i = 0; i < C::tile_n * C::tile_d * C::tile_h * C::unrolled; i++) {
      const int column = i % C::unrolled, q = i / C::unrolled % C::tile_h, slice = i / (C::unrolled * C::tile_h);
      const Step at = F::step_of_row(slice / C::tile_d, slice % C::tile_d, q * C::step_h + remainder, column);
      const u32 x = x_tile + T::x_at(column) + (slice * T::X_ROWS_H + q + C::stack - stack_of(remainder)) * T::X_ROW_BYTES;
#pragma unroll
      for (int u = 0; u < T::UNITS; u++) {
        multiply_unit(acc[u], units, a[step++ % T::FRAGMENTS], g, u, at, stack_begin(remainder), stack_of(remainder), x);
        wgmma_wait<T::FRAGMENTS - 1>();
      }
    }
  wgmma_wait<0>();
}

// The unrolled steps of run `run` of a chunk. A run is some whole rows of q or a part of one, so that runs differ by an offset.
static __device__ __forceinline__ void multiply_run(Sums& acc, int run, const unsigned char* tile, Tile g) {
  u32 a[T::FRAGMENTS][4];
  WgradUnits<T> units;
  const int first = run * (C::unrolled / C::entries);
  const typename F::Half from = F::step_of(first).half[0];
  g.at = tile + T::X_TILE_BYTES + from.row * T::G_BOX_BYTES;
  if constexpr (!C::channels_last && !C::aligned_g && !T::CLASSED) g.phases.of[0] += F::memory_row(from.memory, g.s);
  g.lane_at += from.column * T::G_PIXEL_BYTES;
  u32 x_from = shared_address(tile) + T::x_at(first);
#pragma unroll
  for (int step = 0; step < C::unrolled; step++) {
    const int e = step % C::entries, k = step / C::entries;
    multiply_unit(acc[e], units, a[step % T::FRAGMENTS], g, e, F::step_of(k), 0, 1, x_from + T::x_at(k));
    if constexpr (!C::a_shared) {
      if (step + 1 == C::unrolled) wgmma_wait<0>();
      else wgmma_wait<T::FRAGMENTS - 1>();
    }
  }
}
};
