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
  int shift = td * T::TAP_ROWS_D * T::CLASS_ROWS + th * T::TAP_ROWS_H;
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
  return (q.n * T::G_ROWS_D + q.d * T::Q_ROWS_D) * T::CLASS_ROWS + q.h * T::Q_ROWS_H;
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
    step.half[k] = {r % C::row_classes * (C::tile_n * T::G_ROWS_D * T::CLASS_ROWS) + tile_row({n, d, 0}) + r / C::row_classes,
                    (T::NARROW ? 16 * column + 8 * k : 8 * column + 4 * k) * T::G_STEP_W, {n, d * C::step_d, r}};
  return step;
}

// By how much rows of a chunk's tile begin off 16 bytes, in elements, for a lane's channels: each class of rows (classed); or the
// chunk's first row, from which others follow.
struct Phases { u32 of[C::row_classes]; };

static __device__ __forceinline__ u32 memory_row(const Rows& row, const Sizes& s) {
  return ((u32)(row.n * T::COUT) * s.out_d + row.d) * s.out_h * s.out_w + (u32)row.h * s.out_w;
}
};

// =====================================================================================================================
// Ways to the fragment of unit `u` at a step: rows g and g + 8 of the warp's sixteen; of the two halves of K, pixels q and q + 4 of a
// strip (TF32), or 2q and 2q + 1 of two strips.
// =====================================================================================================================

// Channels_last float32: words of swizzled rows.
template <class T>
struct WgradTurnedFragments : WgradView<T> {
using C = typename T::C;
using V = WgradView<T>;

static __device__ __forceinline__ int lane_first(const typename V::Lane& of) {
  int channel = of.channel + of.row;
  return T::strip_pixel(of.q) * T::G_STEP_W * T::G_PIXEL_BYTES + channel / T::G_WIDTH * T::G_SLAB_BYTES + channel % T::G_WIDTH * 4;
}

static __device__ __forceinline__ void load(u32 (&a)[4], const unsigned char* g_tile, const typename V::Taps& taps, const typename T::Sizes&, const typename V::Phases&, int u, const typename V::Step& step, int lane_at) {
  u32 first = shared_address(g_tile) + (taps.at[u] + step.half[0].row * T::G_LINE + step.half[0].column) * T::G_PIXEL_BYTES + lane_at;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    u32 address = first + k * (T::strip_pixel(4) * T::G_STEP_W * T::G_PIXEL_BYTES);
    address ^= (address >> 7 & (T::G_WIDTH / 4 - 1)) << 4;  // the engine's swizzle, a function of the address
    a[2 * k] = load_shared_u32(address);
    a[2 * k + 1] = load_shared_u32(address ^ 32);        // 8 channels on
  }
}
};

// By descriptor, which takes the place of two words: rows of 64 channels of the tap's pixels, as the engine leaves them. Nothing is
// waited for, so that instructions are queued from chunk to chunk.
template <class T>
struct WgradDescribedFragments : WgradView<T> {
using V = WgradView<T>;

static __device__ __forceinline__ int lane_first(const typename V::Lane& of) { return of.wg_m * T::G_SLAB_BYTES; }  // the warpgroup's 64 channels

static __device__ __forceinline__ void load(u32 (&a)[4], const unsigned char* g_tile, const typename V::Taps& taps, const typename T::Sizes&, const typename V::Phases&, int u, const typename V::Step& step, int lane_at) {
  const int p0 = step.half[0].row * T::G_LINE + step.half[0].column, p1 = step.half[1].row * T::G_LINE + step.half[1].column;
  a[0] = ((shared_address(g_tile) + lane_at + (taps.at[u] + p0) * T::G_PIXEL_BYTES) & 0x3ffff) >> 4;
  a[1] = 1u << 30 | (p1 - p0) * T::G_PIXEL_BYTES >> 4;    // the swizzle, and from 8 pixels to the next 8
}
};

// Channels_last of 16 bits: lanes address rows of 8 channels, of pixels 0-7 and 8-15 (lane / 16), of channels 0-7 and 8-15 (lane / 8 % 2).
template <class T>
struct WgradMatrixFragments : WgradView<T> {
using C = typename T::C;
using V = WgradView<T>;

static __device__ __forceinline__ int lane_first(const typename V::Lane& of) {
  int channel = of.channel + (of.lane >> 3 & 1) * 8, first = (of.lane & 7) * T::G_STEP_W * T::G_PIXEL_BYTES;
  return first + channel / T::G_WIDTH * T::G_SLAB_BYTES + channel % T::G_WIDTH * 2;
}

static __device__ __forceinline__ void load(u32 (&a)[4], const unsigned char* g_tile, const typename V::Taps& taps, const typename T::Sizes&, const typename V::Phases&, int u, const typename V::Step& step, int lane_at) {
  int p0 = step.half[0].row * T::G_LINE + step.half[0].column, p1 = step.half[1].row * T::G_LINE + step.half[1].column;
  int p = taps.at[u] + p0 + ((threadIdx.x & 16) ? p1 - p0 : 0);
  u32 address = shared_address(g_tile) + p * T::G_PIXEL_BYTES + lane_at;
  address ^= (address >> 7 & (T::G_WIDTH / 8 - 1)) << 4;  // the engine's swizzle, a function of the address
  load_matrices_turned(a, address);
}
};

// NCHW: elements of channels' rows, which begin anywhere.
template <class T>
struct WgradRowFragments : WgradView<T> {
using C = typename T::C;
using V = WgradView<T>;
using Half = typename V::Half;

static __device__ __forceinline__ int lane_first(const typename V::Lane& of) {
  const int channel = of.channel + of.row, of_channels = channel / T::G_CHANNELS;  // the lane's class
  return of_channels * (T::CLASS_BYTES / T::ELEMENT * C::row_classes) + channel % T::G_CHANNELS * C::g_pitch + (T::NARROW ? 2 * of.q : of.q) * C::step_w;
}

// What is known only at run time of where a half begins.
static __device__ __forceinline__ int begin_of(const typename V::Taps& taps, const typename T::Sizes& s, const typename V::Phases& phases, int u, const Half& half, int lane_at) {
  int at = lane_at + taps.at[u];
  if constexpr (C::aligned_g) return at;
  else if constexpr (T::CLASSED) return at + phases.of[half.memory.h % C::row_classes];
  else return at + ((phases.of[0] + taps.line[u] + V::memory_row(half.memory, s)) & (T::VEC - 1));
}
// And constants that are even, so that the addresses are a register and an immediate; of rows g and g + 8.
static __device__ __forceinline__ int constant_of(const Half& half, int h) {
  return half.row * (T::G_CHANNELS * C::g_pitch) + half.column + h * T::NEXT_ROWS * C::g_pitch;
}

static __device__ __forceinline__ void load(u32 (&a)[4], const unsigned char* g_tile, const typename V::Taps& taps, const typename T::Sizes& s, const typename V::Phases& phases, int u, const typename V::Step& step, int lane_at) {
  const u32* words = (const u32*)g_tile;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const int at = begin_of(taps, s, phases, u, step.half[k], lane_at);
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

template <class T>
using WgradFragments = WgradEither<T::TURN_X, WgradTurnedFragments<T>,
    WgradEither<T::C::a_shared, WgradDescribedFragments<T>, WgradEither<T::C::channels_last, WgradMatrixFragments<T>, WgradRowFragments<T>>>>;

// =====================================================================================================================
// Fragments of a step's units, one after the other
// =====================================================================================================================

// NCHW of 16 bits: K is two pixels a word, and a tap begins at any. Units that are neighbours along W (RUN of them) have nearly all their
// words in common, so these are loaded once and shifted in registers.
template <class T>
struct WgradRuns {
using C = typename T::C;
static constexpr int RUN = T::SET_UNITS == C::taps_w ? T::UNITS : C::taps_w % T::UNITS == 0 ? T::UNITS : T::UNITS % C::taps_w == 0 ? C::taps_w : 1;
// Whether a run begins at odd elements, where that is the same for all.
static constexpr bool PARITY_KNOWN =
    C::aligned_g && C::step_w % 2 == 0 && RUN * C::dilation_w % 2 == 0 && (C::sets_w == 1 || C::taps_w * C::dilation_w % 2 == 0);
static constexpr int WORDS = ((PARITY_KNOWN ? C::padding_w % 2 : 1) + (RUN - 1) * C::dilation_w + C::step_w) / 2 + 1;
static constexpr bool SHARED = T::NARROW && !C::channels_last && !C::interleaved && RUN > 1 && WORDS < 2 * RUN;
};

template <class T>
struct WgradEach {                         // each by itself
  using F = WgradFragments<T>;
  __device__ __forceinline__ void load(u32 (&a)[4], const unsigned char* g_tile, const typename F::Taps& taps, const typename T::Sizes& s, const typename F::Phases& phases, int u, const typename F::Step& step, int lane_at) {
    F::load(a, g_tile, taps, s, phases, u, step, lane_at);
  }
};

template <class T>
struct WgradSharedWords {
  using C = typename T::C;
  using F = WgradFragments<T>;
  using R = WgradRuns<T>;
  u32 word[2][2][R::WORDS];                // of a step's two strips, of rows g and g + 8: all words of a run of taps
  bool odd[2];                             // whether the run begins in the middle of the first

  __device__ __forceinline__ void load(u32 (&a)[4], const unsigned char* g_tile, const typename F::Taps& taps, const typename T::Sizes& s, const typename F::Phases& phases, int u, const typename F::Step& step, int lane_at) {
    if (u % R::RUN == 0) load_words(g_tile, taps, s, phases, u, step, lane_at);
    shift(a, u % R::RUN);
  }

  // The words of the run that begins with unit `u`.
  __device__ __forceinline__ void load_words(const unsigned char* g_tile, const typename F::Taps& taps, const typename T::Sizes& s, const typename F::Phases& phases, int u, const typename F::Step& step, int lane_at) {
    const u32* words = (const u32*)g_tile;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int at = F::begin_of(taps, s, phases, u, step.half[k], lane_at);
      odd[k] = R::PARITY_KNOWN ? C::padding_w & 1 : at & 1;
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < R::WORDS; j++) word[k][h][j] = words[(at >> 1) + F::constant_of(step.half[k], h) / 2 + j];
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

template <class T>
using WgradUnits = WgradEither<WgradRuns<T>::SHARED, WgradSharedWords<T>, WgradEach<T>>;

// =====================================================================================================================
// Multiplications
// =====================================================================================================================

template <class T>
struct WgradMultiply {
using C = typename T::C;
using F = WgradFragments<T>;
using Taps = typename F::Taps;
using Step = typename F::Step;
using Phases = typename F::Phases;
using Sizes = typename T::Sizes;
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
  const u64 strides = ((u64)(8 * T::SEGMENT >> 4) << 32) | ((u64)((T::K_MAJOR ? 8 * T::SEGMENT : C::stacked ? T::X_ROW_BYTES : T::BOX_BYTES) >> 4) << 16);
  const u64 upper = strides | ((u64)(T::SEGMENT == 32 ? 3 : T::SEGMENT == 64 ? 2 : 1) << 62);
  using Wgmma = WgmmaOf<ROWS * T::N_WIDTH>;
#pragma unroll
  for (int nb = 0; nb < T::NB; nb++) {
    u64 b = upper | (((x + nb * (T::K_MAJOR ? T::N_WIDTH * T::SEGMENT : T::BOX_BYTES)) & 0x3ffff) >> 4);
    float (&d)[ROWS * (T::N_WIDTH / 2)] = *(float (*)[ROWS * (T::N_WIDTH / 2)])&acc[nb][first * (T::N_WIDTH / 2)];
    // A described has rows of channels, as B has in channels_last.
    if constexpr (C::a_shared) Wgmma::template multiply<C::precision, true, C::channels_last, true>(d, descriptor_of_words(a), b);
    else Wgmma::template multiply<C::precision, false, C::channels_last, true>(d, a, b);
  }
}

static __device__ __forceinline__ void multiply(UnitSums& acc, int first, int rows, const u32 (&a)[4], u32 x) {
  if (rows == T::STACK) multiply_by<T::STACK>(acc, first, a, x);
  else if constexpr (C::stacked && LEAST > 0 && LEAST < T::STACK) multiply_by<LEAST>(acc, first, a, x);
}

// Stacked: the unrolled steps of every row of a chunk from step `first` of a row on.
static __device__ __forceinline__ void multiply_rows(Sums& acc, int first, const unsigned char* tile, const Taps& taps, const Sizes& s, const Phases& phases, int lane_at) {
  u32 a[T::FRAGMENTS][4];
  WgradUnits<T> units;
  const unsigned char* g_tile = tile + T::X_TILE_BYTES;
  lane_at += first * (32 / T::ELEMENT * T::G_STEP_W) * T::G_PIXEL_BYTES;
  const u32 x_tile = shared_address(tile) + T::x_at(first);
  int step = 0;                            // a constant after unrolling
#pragma unroll
  for (int remainder = 0; remainder < C::step_h && remainder < C::taps_h; remainder++)
#pragma unroll
    for (int i = 0; i < C::tile_n * C::tile_d * C::tile_h * C::unrolled; i++) {
      const int column = i % C::unrolled, q = i / C::unrolled % C::tile_h, slice = i / (C::unrolled * C::tile_h);
      const Step at = F::step_of_row(slice / C::tile_d, slice % C::tile_d, q * C::step_h + remainder, column);
      const u32 x = x_tile + T::x_at(column) + (slice * T::X_ROWS_H + q + T::STACK - stack_of(remainder)) * T::X_ROW_BYTES;
#pragma unroll
      for (int u = 0; u < T::UNITS; u++) {
        u32 (&fragment)[4] = a[step++ % T::FRAGMENTS];
        units.load(fragment, g_tile, taps, s, phases, u, at, lane_at);
        if constexpr (!C::a_shared) wgmma_fence();
        multiply(acc[u], stack_begin(remainder), stack_of(remainder), fragment, x);
        if constexpr (!C::a_shared) {
          wgmma_commit();
          wgmma_wait<T::FRAGMENTS - 1>();
        }
      }
    }
  if constexpr (!C::a_shared) wgmma_wait<0>();
}

// The unrolled steps of run `run` of a chunk. A run is some whole rows of q or a part of one, so that runs differ by an offset.
static __device__ __forceinline__ void multiply_run(Sums& acc, int run, const unsigned char* tile, const Taps& taps, const Sizes& s, Phases phases, int lane_at) {
  u32 a[T::FRAGMENTS][4];
  WgradUnits<T> units;
  const int first = run * (C::unrolled / C::entries);
  const typename F::Half from = F::step_of(first).half[0];
  const unsigned char* g_tile = tile + T::X_TILE_BYTES + from.row * T::G_BOX_BYTES;
  if constexpr (!C::channels_last && !C::aligned_g && !T::CLASSED) phases.of[0] += F::memory_row(from.memory, s);
  int lane_from = lane_at + from.column * T::G_PIXEL_BYTES;
  u32 x_from = shared_address(tile) + T::x_at(first);
#pragma unroll
  for (int step = 0; step < C::unrolled; step++) {
    const int e = step % C::entries, k = step / C::entries;
    units.load(a[step % T::FRAGMENTS], g_tile, taps, s, phases, e, F::step_of(k), lane_from);
    if constexpr (!C::a_shared) wgmma_fence();
    multiply(acc[e], 0, 1, a[step % T::FRAGMENTS], x_from + T::x_at(k));
    if constexpr (!C::a_shared) {
      wgmma_commit();
      if (step + 1 == C::unrolled) wgmma_wait<0>();
      else wgmma_wait<T::FRAGMENTS - 1>();
    }
  }
}
};
