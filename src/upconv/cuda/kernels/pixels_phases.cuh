// Phases: the forward of layers with strides and few channels, NCHW, for weights that stay in shared memory. Places q of the input are rows of
// M (64 x MB neighbours), output channels of a row's phases columns of N: a layer of 32 output channels multiplies 32 columns for each
// phase, where `gather`, whose rows of M are channels, fills 64 with several phases and multiplies all their taps.
//
// A pair is a phase of D and one of H; its sums have all phases of W, so that a thread has neighbouring outputs. A phase's taps read the
// input at q and a few offsets. So a row of the source is loaded once for each of its offsets along W (shifts), as fragments of A from
// where the tensor copy engine left it, and multiplied for every pair that reads it. Columns of a shift are those of the phases of W that
// have a tap there. Phases lie in such an order that these come first (cuda/pixels/phases.py): sums of a narrower instruction are then the first
// of a wider one's. In any other order ptxas waits for each TF32 instruction (C7511).
//
// Consumers take neighbouring tiles, each from a ring of its own, and never wait for each other. So both write their parts of a sector at
// about the same time. It is faster than an offset between them, or turns (docs/experiments.md).
#include "pixels.cuh"

template <class C>
struct Phases : PixelsOf<C>, PacksUnits<Phases<C>> {
using typename PixelsOf<C>::Number;
using typename PixelsOf<C>::Type;
using PixelsOf<C>::ELEMENT;
using PixelsOf<C>::NARROW;
using PixelsOf<C>::VEC;
using PixelsOf<C>::CONSUMERS;

static constexpr int MB = C::mb, PAIRS = C::pairs, SHIFTS = C::shifts, CO_COLUMNS = C::co_columns, PASS = C::passed;
static constexpr int TILE_W = C::tile_w, STEP_W = C::step_w;
static constexpr int PITCH_BYTES = C::pitch * ELEMENT;  // from a channel to the next
static constexpr int ROW_BYTES = C::chunk * PITCH_BYTES;  // of a row of the source: whole 128 bytes, where boxes begin
static constexpr int PAIR_COLUMNS = STEP_W * CO_COLUMNS;  // of a pair's sums
static constexpr bool HOLDS = false;
static constexpr int RINGS = CONSUMERS, READERS = 1;
using Sums = float[PAIRS][MB][PAIR_COLUMNS / 2];
using Maps = TensorMap;
using typename PixelsOf<C>::Ring;

// A consumer's buffer: `passed` output channels of its tile's row, each in units of 16 bytes, so that neighbouring lanes store neighbours. Rows
// begin and end at whole units.
static constexpr int RUN = TILE_W * STEP_W;             // outputs of one along W
static constexpr int UNITS = RUN / VEC;
static constexpr int CHANNEL_BYTES = C::buffer_bytes / PASS;
static constexpr int OF_WARP = PASS / 4;                // channels that a warp stores
static constexpr int ROUNDS = (OF_WARP * UNITS + 31) / 32;

// Shared memory: weights, each consumer's ring and buffer, barriers.
static constexpr int RINGS_AT = (C::weight_bytes + 127) / 128 * 128;
static constexpr int BUFFERS_AT = RINGS_AT + CONSUMERS * Ring::BYTES;
static constexpr int BARRIERS_AT = BUFFERS_AT + CONSUMERS * C::buffer_bytes;
static_assert(BARRIERS_AT + CONSUMERS * Ring::BARRIER_BYTES + 8 == C::shared_bytes, "the planner's shared memory is not the kernel's");

struct Sizes {
  int d, h, w;                                          // of the result
  int tiles_d, tiles_h, tiles_w, tiles;
};

struct Tile { int n, d, h, w; };                        // image and first place

static __device__ __forceinline__ Tile tile_at(int q, const Sizes& s) {
  Tile t;
  t.w = q % s.tiles_w * TILE_W;  q /= s.tiles_w;
  t.h = q % s.tiles_h;  q /= s.tiles_h;
  t.d = q % s.tiles_d;
  t.n = q / s.tiles_d;
  return t;
}

// --- weights ---------------------------------------------------------------------------------------------------------

static constexpr int PACK_UNITS = C::weight_bytes / 16;
static constexpr int SECOND = C::cout, TAPS_IN_ALL = C::kernel_d * C::kernel_h * C::kernel_w;

// [step of K][user][shift][phase of W, output channel][32 bytes of channels, swizzled], zeros where there is none of either. The weight is
// (C::cin, C::cout, kernel).
template <class Write>
static __device__ __forceinline__ void pack_unit(int i, const Write& write) {
  constexpr int OF_USER = 2 * C::shift_columns;
  int unit = i % 2, column = i / 2 % C::shift_columns, user = i / OF_USER % C::users, step = i / (OF_USER * C::users);
  int cout = column % CO_COLUMNS, of_w = constant_at<C::column_taps>(column / CO_COLUMNS);
  int tap = constant_at<C::user_taps>(user) * C::kernel_w + of_w;
  write((long long)(i - unit) * 16 + ((unit ^ (column >> 2 & 1)) << 4), [=](int e) -> WeightAt {
    int cin = step * (32 / ELEMENT) + (NARROW ? unit * VEC + e : 2 * e + unit);
    return {cin < C::cin && cout < C::cout && of_w >= 0, cin, cout, tap};
  });
}

// --- producers: a thread for each consumer, one for the weights ------------------------------------------------------

struct Loader {
  const Work<Phases>& work;
  Tile tile;

  __device__ __forceinline__ Steps begin(int index) {
    tile = tile_at(index, work.sizes);
    return {0, C::chunks};
  }

  __device__ __forceinline__ void load(int chunk, u32 to, u32 barrier) const {
    expect_bytes(barrier, C::stage_bytes);
#pragma unroll 1
    for (int row = 0; row < C::rows_d * C::rows_h; row++)
      load_box(to + row * ROW_BYTES, work.maps, tile.w + C::first_w, tile.h + C::first_h + row % C::rows_h,
               tile.d + C::first_d + row / C::rows_h, chunk * C::chunk, tile.n, barrier);
  }
};

// Neighbouring consumers have neighbouring tiles.
static __device__ __forceinline__ int first_tile(int consumer, const Sizes&) { return blockIdx.x * CONSUMERS + consumer; }
static __device__ __forceinline__ int next_tile(int tile, const Sizes&) { return tile + gridDim.x * CONSUMERS; }

static __device__ __forceinline__ u32 landed(u32 memory) { return memory + C::shared_bytes - 8; }  // weights
static __device__ __forceinline__ Ring ring_of(u32 memory, int consumer) {
  return Ring::at(memory + RINGS_AT + consumer * Ring::BYTES, memory + BARRIERS_AT + consumer * Ring::BARRIER_BYTES);
}
static __device__ __forceinline__ void init(u32 memory) { barrier_init(landed(memory), 1); }

static __device__ __forceinline__ void produce(const Work<Phases>& work) {
  int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  if (threadIdx.x & 31) return;
  if (warp < CONSUMERS) {
    ::produce<Phases>(work, Loader{work}, warp);
  } else if (warp == 3) {
    wait_for_results();                                 // of `pack`
    expect_bytes(landed(work.memory), C::weight_bytes);
    copy_packed(work.memory, work.packed, C::weight_bytes, landed(work.memory));
  }
}

// --- consumers -------------------------------------------------------------------------------------------------------

// The instruction of so many columns, one of C::widths from the I-th on.
template <int I = 0>
static __device__ __forceinline__ void multiply(float (&d)[PAIR_COLUMNS / 2], int width, const u32 (&a)[4], u64 b) {
  constexpr int WIDTH = C::widths[I];
  if (width == WIDTH) WgmmaOf<WIDTH>::template multiply<C::precision, false, false, true>(d, a, b);
  if constexpr (I + 1 < sizeof(C::widths) / sizeof(int)) multiply<I + 1>(d, width, a, b);
}

// A source row's fragments of a step, for each shift: lanes' q g and g + 8, of channels `channel_at`.
static __device__ __forceinline__ void load_fragments(u32 (&a)[SHIFTS][MB][4], u32 from) {
#pragma unroll
  for (int shift = 0; shift < SHIFTS; shift++)
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int columns = value_at<C::shifts_at>(shift) + m * 64 + i % 2 * 8, half = i / 2;
        u32 at = from + columns * ELEMENT;
        if constexpr (NARROW)
          a[shift][m][i] = load_shared_u16(at + half * 8 * PITCH_BYTES) | load_shared_u16(at + (half * 8 + 1) * PITCH_BYTES) << 16;
        else a[shift][m][i] = load_shared_u32(at + half * PITCH_BYTES);
      }
#pragma unroll
  for (int i = 0; i < SHIFTS * MB * 4; i++) opaque(a[i / (MB * 4)][i / 4 % MB][i % 4]);
}

// acc += a source row x the weights of all pairs that read it; `weights`: of the step, as descriptors have it.
static __device__ __forceinline__ void multiply_row(Sums& acc, const u32 (&a)[SHIFTS][MB][4], int row, u32 weights) {
  wgmma_fence();
#pragma unroll
  for (int shift = 0; shift < SHIFTS; shift++)
#pragma unroll
    for (int user = 0; user < C::users; user++)         // (bounds that depend on an outer loop's constant are not unrolled)
#pragma unroll
      for (int m = 0; m < MB; m++)
        if (user >= value_at<C::first_users>(row) && user < value_at<C::first_users>(row + 1)) {
          u32 columns = weights + (user * C::shift_columns + value_at<C::columns_before>(shift)) * 2;
          multiply(acc[value_at<C::user_pairs>(user)][m], value_at<C::shift_widths>(shift), a[shift][m], ROWS_OF<32> | (u64)1 << 16 | columns);
        }
  wgmma_commit();
}

// Neighbouring outputs, two at a time where there is an even number of them.
static __device__ __forceinline__ void store_neighbours(u32 to, const float (&v)[STEP_W]) {
#pragma unroll
  for (int u = 0; u < STEP_W; u++) {
    if constexpr (STEP_W % 2) {
      if constexpr (NARROW) store_shared_u16(to + u * 2, Number::bits(v[u]));
      else store_shared_f32(to + u * 4, v[u]);
    } else if (u % 2) {
      if constexpr (NARROW) store_shared_u32(to + u * 2 - 2, Number::pair(v[u - 1], v[u]));
      else store_shared_f32x2(to + u * 4 - 4, v[u - 1], v[u]);
    }
  }
}

struct Consumer {
  const Work<Phases>& work;
  int wg, warp, lane;
  u32 own;                                              // where a stage has the lane's first channel and q
  u32 buffer;
  u32 weights;                                          // of the chunk, as descriptors have it

  __device__ __forceinline__ Consumer(const Work<Phases>& work, int wg, int thread) : work(work), wg(wg), warp(thread >> 5), lane(thread & 31) {
    own = (thread & 3) * 2 * PITCH_BYTES + (warp * 16 + (lane >> 2)) * ELEMENT;
    buffer = work.memory + BUFFERS_AT + wg * C::buffer_bytes;
    barrier_wait(landed(work.memory), 0);
  }

  struct At { u32 stage, weights; };
  __device__ __forceinline__ At at(u32 stage) const { return {stage, uniform(weights)}; }
  __device__ __forceinline__ Steps steps(int) const { return {0, C::chunks}; }
  __device__ __forceinline__ void begin(Sums& acc, int) {
    zero(acc);
    weights = work.memory >> 4;
  }
  // The stage is given back behind this, and so behind the instructions that take what was loaded. The arrival does not wait for loads, and
  // these are late where stores fill the path to memory. Ahead of the instructions it gave wrong outputs on long rows (docs/experiments.md).
  __device__ __forceinline__ void multiply(Sums& acc, const At& at, u32) {
    u32 a[2][SHIFTS][MB][4];
#pragma unroll
    for (int row = 0; row < C::source_row_count; row++) {
      if (row == 0 && C::source_row_count % 2) wgmma_wait<0>();  // its registers are read by the last row's instructions
      else wgmma_wait<1>();
      load_fragments(a[row % 2], own + at.stage + value_at<C::source_rows>(row) * ROW_BYTES);
      multiply_row(acc, a[row % 2], row, at.weights);
    }
    weights += C::weight_bytes / C::chunks / 16;
  }

  // The buffer gets `passed` channels' outputs of a pair's row, from channel `first` on; `channel`: of these the lane's.
  __device__ __forceinline__ void fill_buffer(const float (&acc)[MB][PAIR_COLUMNS / 2], int first, int channel) const {
    const Type* const bias = work.bias;
#pragma unroll
    for (int j = first / 8; j < CO_COLUMNS / 8; j++) {
      if (j >= (first + PASS) / 8) continue;
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int of = 8 * j + c;                       // the channel, but for the lane's share
        float b = bias && (C::cout % 8 == 0 || of + channel < C::cout) ? Number::value(bias[of + channel]) : 0.f;
        const u32 to = buffer + (of - first + channel) * CHANNEL_BYTES + (lane >> 2) * (STEP_W * ELEMENT);
#pragma unroll
        for (int m = 0; m < MB; m++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float v[STEP_W];
#pragma unroll
            for (int u = 0; u < STEP_W; u++) v[u] = acc[m][value_at<C::places_of_phases>(u) * (CO_COLUMNS / 2) + 4 * j + 2 * h + c] + b;
            store_neighbours(to + (m * 64 + warp * 16 + h * 8) * (STEP_W * ELEMENT), v);
          }
      }
    }
  }

  // What the buffer has of a row, from channel `first` on, of which `columns` exist if `row` does; `to_row`: where it begins in the first channel.
  __device__ __forceinline__ void store_row(int first, char* to_row, bool row, int columns, u32 plane) const {
    u32 v[ROUNDS][4];                                   // all on their way before the first is stored
    char* to[ROUNDS];
    bool there[ROUNDS];
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
      int index = lane + k * 32, c = warp * OF_WARP + (OF_WARP * UNITS % 32 == 0 || index < OF_WARP * UNITS ? index / UNITS : 0), unit = index % UNITS;
      to[k] = to_row + (long long)((first + c) * (u64)plane) * ELEMENT + unit * 16;
      load_shared_128(v[k], buffer + c * CHANNEL_BYTES + unit * 16);
      there[k] = row && unit * VEC < columns && (C::cout % 8 == 0 || first + c < C::cout) && (OF_WARP * UNITS % 32 == 0 || index < OF_WARP * UNITS);
    }
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) store_global_128_if(to[k], v[k], there[k]);
  }

  __device__ __forceinline__ void store(const Sums& acc, int tile) const {
    const Sizes& s = work.sizes;
    const Tile t = tile_at(tile, s);
    u32 plane = (u32)s.d * s.h * s.w;                   // elements of a channel
    int channel = (lane & 3) * 2;
    const int columns = min(s.w - t.w * STEP_W, RUN);   // of a row, that exist
    char* const y = work.y + (long long)t.n * C::cout * plane * ELEMENT;
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
      int first_d = t.d * C::step_d + value_at<C::pair_phases_d>(pair), first_h = t.h * C::step_h + value_at<C::pair_phases_h>(pair);
      char* begin = y + (long long)(((u32)first_d * s.h + first_h) * s.w + t.w * STEP_W) * ELEMENT;
#pragma unroll
      for (int first = 0; first < CO_COLUMNS; first += PASS) {
        OPAQUE_2(plane, channel);                       // what follows from them is found here, not kept (spills)
        named_sync(1 + wg, 128);                        // everyone has read what was there before
        fill_buffer(acc[pair], first, channel);
        named_sync(1 + wg, 128);
        store_row(first, begin, first_d < s.d && first_h < s.h, columns, plane);
      }
    }
  }
};
};
