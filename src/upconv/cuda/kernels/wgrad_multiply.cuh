// A warpgroup's multiplications in wgrad_wgmma.cu: fragments of g, from registers or by descriptor, by rows of x.
#include "wgrad_copies.cuh"
#include "wgmma.cuh"

template <class T>
struct WgradMultiply {
using C = typename T::C;
using Sizes = typename T::Sizes;
using Rows = typename T::Rows;
using UnitSums = float[T::NB][T::OF_UNIT * (T::N_WIDTH / 2)];
using Sums = UnitSums[C::units];

// --- what a thread has of M, and of g's tile -------------------------------------------------------------------------

// A lane's rows of a warp's sixteen are `row` and T::NEXT_ROWS on; its warp's begin at a channel of the block's and a unit.
struct Lane { int lane, row, q, first_unit, channel; };

static __device__ __forceinline__ Lane lane_of(int wg, int thread) {
  int warp = thread >> 5, lane = thread & 31, row = lane >> 2;
  const int wg_units = wg / C::split_m * (C::subs * C::units), wg_channel = wg % C::split_m * T::ROWS_PER_SUB;
  if constexpr (C::interleaved) return {lane, row / C::subs, lane & 3, wg_units + row % C::subs, wg_channel + warp * (16 / C::subs)};
  // By a shuffle ptxas knows that a warp's lanes have the same. Most of these tiles gain by it; other tiles lose.
  if constexpr (C::stacked && !C::channels_last) warp = __shfl_sync(0xffffffffu, warp, 0);
  return {lane, row, lane & 3, wg_units + warp * 16 / T::ROWS_PER_SUB * C::units, wg_channel + warp * 16 % T::ROWS_PER_SUB};
}

// A lane's taps, the same for all chunks.
struct Taps {
  int at[C::units];                        // of g's tile: elements (NCHW) or pixels (channels_last) by which the unit is shifted
  u32 line[C::units];                      // NCHW: rows of memory from a chunk's first row to the unit's, as elements modulo 2^32
};

static __device__ __forceinline__ void set_tap(Taps& taps, int u, int unit, const Sizes& s) {
  if (unit >= T::SET_UNITS) unit = T::SET_UNITS - 1;    // its sums are not stored
  int td = unit / (T::SET_UNITS / C::taps_d), th = C::stacked ? 0 : unit / C::taps_w % C::taps_h, tw = unit % C::taps_w;
  int shift = td * C::tap_rows_d * T::CLASS_ROWS + th * C::tap_rows_h;
  if constexpr (C::gapless) taps.at[u] = unit * (T::PLANE_BYTES / T::G_PIXEL_BYTES);
  else if constexpr (C::parted) taps.at[u] = shift * C::plane_columns + tw % C::g_planes * (T::PLANE_BYTES / T::G_PIXEL_BYTES) + tw / C::g_planes * C::plane_taps;
  else if constexpr (C::channels_last) taps.at[u] = shift * C::plane_columns + tw * C::dilation_w;
  else taps.at[u] = shift * (T::G_CHANNELS * C::g_pitch) + tw * C::dilation_w;
  taps.line[u] = ((u32)(td * C::dilation_d) * s.out_h + th * C::dilation_h) * s.out_w;
}

// Where a lane begins, of channels_last in bytes, of NCHW in elements.
static __device__ __forceinline__ int lane_first(const Lane& of) {
  if constexpr (C::a_shared) {
    return of.channel / 64 * T::G_SLAB_BYTES;  // the warpgroup's 64 channels
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

// g's tile of a chunk, as a lane sees it from `lane_at` on.
struct Tile {
  const unsigned char* at;
  const Taps& taps;
  const Sizes& s;
  u32 phases[C::row_classes];              // NCHW: elements by which rows of a class begin off 16 bytes; copied by threads the first row
  int lane_at;
};

// --- steps of K; constants after unrolling ---------------------------------------------------------------------------

// A half: where it lies in g's tile before the tap's share, and (NCHW) in memory.
struct Half {
  int row, column;
  Rows memory;
};
struct Step {
  Half half[2];
  u32 x;                                   // where it begins in x's tile
};

// Step `k_step` of a chunk's positions, a strip of 8.
// [16 bits] It is two strips.
// [stacked] All rows of a column follow each other: by the rows of g with this remainder by step_h.
static __device__ __forceinline__ Step step_of(int k_step, int remainder = 0) {
  if constexpr (C::stacked) k_step = k_step % T::Q_ROWS * T::OF_ROW + k_step / T::Q_ROWS;
  Step step;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const int strip = T::NARROW ? 2 * k_step + k : k_step;
    const Rows q = T::q_row(strip / (C::tile_w / 8));
    const int h = q.h * C::q_rows_h + remainder;
    step.half[k].row = h % C::row_classes * (T::G_ROWS / C::row_classes) + (q.n * C::g_rows_d + q.d * C::q_rows_d) * T::CLASS_ROWS + h / C::row_classes;
    step.half[k].column = (strip % (C::tile_w / 8) * 8 + (T::NARROW ? 0 : 4 * k)) * T::G_STEP_W;
    step.half[k].memory = {q.n, q.d * C::step_d, q.h * C::step_h + remainder};
  }
  step.x = T::x_at(k_step);
  return step;
}

static __device__ __forceinline__ u32 memory_row(const Rows& row, const Sizes& s) {
  return ((u32)(row.n * T::COUT) * s.out_d + row.d) * s.out_h * s.out_w + (u32)row.h * s.out_w;
}

// --- the fragment of unit `u` at a step ------------------------------------------------------------------------------

// Rows g and g + 8 of the warp's sixteen; of the two halves of K, pixels q and q + 4 of a strip (TF32), or 2q and 2q + 1 of two strips.

static __device__ __forceinline__ int pixel_of(const Half& half) { return half.row * C::plane_columns + half.column; }

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
  const int at = g.lane_at + g.taps.at[u];
  if constexpr (C::box_g) return at + g.phases[half.memory.h % C::row_classes];
  else return at + ((g.phases[0] + g.taps.line[u] + memory_row(half.memory, g.s)) & (T::VEC - 1));
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

// [16 bits] NCHW: K is two pixels a word, and a tap begins at any. Units that are neighbours along W (C::run of them) may have nearly all
// their words in common. Then these are loaded once (C::run_words), and shifted in registers.
struct RunWords {
  u32 word[2][2][C::run_words > 0 ? C::run_words : 1];  // of a step's two strips, of rows g and g + 8
  bool odd[2];                             // whether the run begins in the middle of the first
};

// The words of the run that begins with unit `u`.
static __device__ __forceinline__ void load_run(RunWords& run, const Tile& g, int u, const Step& step) {
  const u32* words = (const u32*)g.at;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const int at = begin_of(g, u, step.half[k]);
    run.odd[k] = C::parity_known ? C::padding_w & 1 : at & 1;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int j = 0; j < C::run_words; j++) run.word[k][h][j] = words[(at >> 1) + constant_of(step.half[k], h) / 2 + j];
  }
}

// The fragment of the run's tap `i`, as `load_elements` would load it.
static __device__ __forceinline__ void shift(u32 (&a)[4], const RunWords& run, int i) {
  const int first = i * C::dilation_w, second = first + C::step_w;  // elements from the run's own first to the two of a word of K
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const bool odd = run.odd[k];
    u32 selector = (odd == (first % 2 == 0) ? 0x32u : 0x10u) | (odd == (second % 2 == 0) ? 0x7600u : 0x5400u);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const auto& word = run.word[k][h];   // which is chosen by a constant index: else it would be local memory
      const u32 low = first % 2 && odd ? word[(first + 1) / 2] : word[first / 2];
      const u32 high = second % 2 && odd ? word[(second + 1) / 2] : word[second / 2];
      a[2 * k + h] = __byte_perm(low, high, selector);
    }
  }
}

// Of units one after the other.
static __device__ __forceinline__ void load(u32 (&a)[4], RunWords& run, const Tile& g, int u, const Step& step) {
  if constexpr (C::run_words > 0) {
    if (u % C::run == 0) load_run(run, g, u, step);
    shift(a, run, u % C::run);
  } else if constexpr (C::a_shared) {
    describe(a, g, u, step);
  } else if constexpr (T::TURN_X) {
    load_words(a, g, u, step);
  } else if constexpr (C::channels_last) {
    load_matrices(a, g, u, step);
  } else {
    load_elements(a, g, u, step);
  }
}

// --- multiplications -------------------------------------------------------------------------------------------------

// Stacked: rows of x that a row of g meets by a column of taps: for each remainder r of the row by step_h those of taps r, r + step_h,
// ..., each a row above the one before; their sums lie in the order of the rows.
static constexpr int LEAST = C::taps_h / C::step_h, OVER = C::taps_h % C::step_h;
static constexpr int REMAINDERS = C::stacked ? C::step_h : 1;
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

// By the rows of x that a row of g with remainder `r` meets, of `x` and those behind it.
static __device__ __forceinline__ void multiply(UnitSums& acc, int r, const u32 (&a)[4], u32 x) {
  if (stack_of(r) == C::stack) multiply_by<C::stack>(acc, stack_begin(r), a, x);
  else if constexpr (C::stacked && OVER > 0) multiply_by<LEAST>(acc, stack_begin(r), a, x + T::X_ROW_BYTES);
}

// The unrolled steps of a part of a chunk.
static __device__ __forceinline__ void multiply_part(Sums& acc, int part, const unsigned char* tile, Tile g) {
  u32 a[T::FRAGMENTS][4];                  // of the instructions in flight
  RunWords run;
  const Step from = step_of(part * C::unrolled);
  g.at = tile + T::X_TILE_BYTES + from.half[0].row * T::G_ROW_BYTES;
  if constexpr (!C::channels_last && !C::box_g) g.phases[0] += memory_row(from.half[0].memory, g.s);
  g.lane_at += from.half[0].column * T::G_PIXEL_BYTES;
  const u32 x = shared_address(tile) + from.x;
#pragma unroll
  for (int k = 0; k < C::unrolled; k++)
#pragma unroll
    for (int r = 0; r < REMAINDERS; r++)
#pragma unroll
      for (int u = 0; u < C::units; u++) {
        const Step step = step_of(k, r);
        u32 (&fragment)[4] = a[((k * REMAINDERS + r) * C::units + u) % T::FRAGMENTS];
        load(fragment, run, g, u, step);
        if constexpr (!C::a_shared) wgmma_fence();
        multiply(acc[u], r, fragment, x + step.x);
        if constexpr (!C::a_shared) wgmma_commit(), wgmma_wait<T::FRAGMENTS - 1>();  // a fragment's registers are free again
      }
  if constexpr (!C::a_shared) wgmma_wait<0>();
}

// A warpgroup's part of the block's record, in shared memory.
static __device__ __forceinline__ void store_sums(const Sums& acc, u32 memory, const Lane& of) {
#pragma unroll
  for (int u = 0; u < C::units; u++) {
    int unit = of.first_unit + u * T::NEXT_UNIT;
    if (unit >= T::SET_UNITS) continue;
#pragma unroll
    for (int i = 0; i < T::OF_UNIT; i++) {
      // A unit is a tap, or (stacked) a column of taps_h of them.
      int tap = C::stacked ? (unit / C::taps_w * C::taps_h + i) * C::taps_w + unit % C::taps_w : unit;
#pragma unroll
      for (int nb = 0; nb < T::NB; nb++)
#pragma unroll
        for (int j = 0; j < T::N_WIDTH / 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int m = T::channel_of(of.channel + of.row + T::NEXT_ROWS * h);
            u32 to = memory + T::sum_at(tap, nb * T::N_WIDTH + j * 8 + 2 * of.q, m);
            const float* sums = &acc[u][nb][place_of(i) * (T::N_WIDTH / 2) + 4 * j + 2 * h];
            store_shared_f32(to, sums[0]);
            store_shared_f32(to + T::SUMS_PITCH * 4, sums[1]);
          }
    }
  }
}
};
