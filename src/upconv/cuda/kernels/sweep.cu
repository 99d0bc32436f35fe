// Sweep: a 3-D transposed convolution without strides, of few output channels. Positions are rows of M, output channels are columns:
//
//   out[first + slot][position][channel] += sum over k of in[d][position + tap][k] weight[slot][tap][k][channel]
//
// A block goes along D, slice by slice of the input. A slice is multiplied once, with the taps of all `slots` kernel slices side by side: slot j
// has the sums of the output slice j behind the first that this input slice reaches. Then the first slot's sums are complete. They are stored, and
// the others move up by one. So every product is useful but at the ends of such a walk.
//
// M-rows are neighbouring pixel rows of the tile, its halo's columns among them, whose sums nobody stores. Consumers halve them: `nb` x 64 each.
//
// Chunks, and how pixels come, are `gather`'s (gather_tile.cuh, gather_produce.cuh): in NCHW by way of slots and a pass that turns them, in
// channels-last by a box that is the tile. Weights are B, by descriptor: for a chunk and a tap (of H and W) `b_columns` rows of a chunk's channels,
// swizzled as pixels are. A stage of their ring has `w_stage` steps of K, whole taps.
#include "gather_produce.cuh"
#include "pixel_stores.cuh"
#include "pixels.cuh"

// A kernel K's tiles as `gather` asks for them.
template <class K>
struct InOrder {
  using Sizes = typename K::Sizes;
  __device__ __forceinline__ explicit InOrder(const Sizes&) {}
  __device__ __forceinline__ int first(const Sizes& s) const { return K::first_tile(0, s); }
  __device__ __forceinline__ int next(int tile, const Sizes& s) const { return K::next_tile(tile, s); }
  __device__ __forceinline__ void end() {}
};

template <class C_>
struct Sweep : PixelTile<C_>, PacksUnits<Sweep<C_>> {
using C = C_;
using T = PixelTile<C>;
using Number = NumberOf<C::precision>;
using Type = typename Number::Type;
using Sizes = typename T::Sizes;
using Maps = typename T::template TensorMapsAnd<0>;

static constexpr int ELEMENT = T::ELEMENT, VEC = T::VEC, ROW_BYTES = T::ROW_BYTES, K_STEPS = T::K_STEPS, PITCH = T::PITCH, CHUNKS = T::CHUNKS;
static constexpr int CONSUMERS = T::CONSUMERS, PRODUCER_WARPS = T::PRODUCER_WARPS;
static constexpr bool BOX = T::BOX;
static constexpr int NB = C::nb;
static constexpr int STEP_BYTES = C::b_columns * 32;    // of weights, of a step of K
static constexpr int TAP_BYTES = STEP_BYTES * K_STEPS;
static constexpr int CHUNK_STEPS = C::tap_entries * K_STEPS;
static constexpr int SLOT_SUMS = C::slot_columns / 2;   // a thread's of an M-row pair
using Sums = float[NB][C::slots * SLOT_SUMS];
static constexpr int POSITIONS = NB * 64;               // M-rows of a consumer

using Ring = RingOf<C::stages_p, T::STAGE_BYTES>;        // of pixels
using Weights = RingOf<C::stages_w, C::w_stage * STEP_BYTES>;
using Slots = RingOf<C::channels_last ? 0 : C::stages_s, BoxesOf<C>::BYTES>;
static constexpr int WEIGHTS_AT = Ring::BYTES;
static constexpr int SLOTS_AT = WEIGHTS_AT + Weights::BYTES;
static constexpr int BARRIERS_AT = SLOTS_AT + Slots::BYTES;
static_assert(BARRIERS_AT + Ring::BARRIER_BYTES + Weights::BARRIER_BYTES + Slots::BARRIER_BYTES == C::shared_bytes, "the planner's shared memory is not the kernel's");
static_assert(BOX && T::PARTS == 1 && !C::strided_box && C::w_stage % K_STEPS == 0,
              "boxes bring pixels, in one part, channels-last ones one for a chunk, and a stage of the ring has whole taps");

// As pixels.cuh asks: each consumer has a part of every tile, and behind a chunk the one before is given back.
static constexpr int PRODUCERS = 2, FILLERS = T::DIRECT_BOX ? 1 : PRODUCER_WARPS, RINGS = 1, READERS = CONSUMERS;
static constexpr bool TURNS = false, HOLDS = true;
static __device__ __forceinline__ Ring ring_of(u32 memory, int) { return Ring::at(memory, memory + BARRIERS_AT); }
static __device__ __forceinline__ Weights weights_of(u32 memory) { return Weights::at(memory + WEIGHTS_AT, memory + BARRIERS_AT + Ring::BARRIER_BYTES); }
static __device__ __forceinline__ Slots slots_of(u32 memory) {
  return Slots::at(memory + SLOTS_AT, memory + BARRIERS_AT + Ring::BARRIER_BYTES + Weights::BARRIER_BYTES);
}
static __device__ __forceinline__ void init(u32 memory) {
  weights_of(memory).init(1, CONSUMERS * 4);
  slots_of(memory).init(1, PRODUCER_WARPS);
}

struct Tile {
  int group;                                           // 0
  int n, d, h, w;                                      // d: the input's slice
  int step;                                            // of the walk
};

// Slices of a walk, and the output's of a segment.
static __device__ __forceinline__ int segment_of(const Sizes& s) { return (s.out_d + s.tiles_d - 1) / s.tiles_d; }
static __device__ __forceinline__ int steps_of(const Sizes& s) { return segment_of(s) + C::slots - 1; }

// A block's walks, slice by slice.
static __device__ __forceinline__ int first_tile(int, const Sizes& s) { return blockIdx.x * steps_of(s); }
static __device__ __forceinline__ int next_tile(int index, const Sizes& s) {
  int steps = steps_of(s);
  return (index + 1) % steps ? index + 1 : index + 1 + (gridDim.x - 1) * steps;
}

static __device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  Tile t;
  int steps = steps_of(s), q = index / steps;
  t.group = 0;
  t.step = index - q * steps;
  t.w = q % s.tiles_w * C::tile_w;  q /= s.tiles_w;
  t.h = q % s.tiles_h * C::tile_h;  q /= s.tiles_h;
  t.d = q % s.tiles_d * segment_of(s) + t.step - (C::slots - 1) - C::first_slot;
  t.n = q / s.tiles_d;
  return t;
}

// Who brings pixels goes by these (gather_walk.cuh). Of slices that the input has not nothing is loaded.
using Order = InOrder<Sweep>;
using LoaderOrder = Order;
static constexpr int SHARES = 1;
static __device__ __forceinline__ int first_chunk() { return 0; }
static __device__ __forceinline__ int end_chunk(const Tile& t, const Sizes& s) { return (u32)t.d < (u32)s.in_d ? CHUNKS : 0; }

// --- weights ---------------------------------------------------------------------------------------------------------

static constexpr int PACK_UNITS = CHUNKS * C::tap_entries * C::b_columns * T::UNITS_PER_ROW;
static constexpr int SECOND = C::grad_input ? C::cin : C::cout, TAPS_IN_ALL = C::slots * C::taps;

// [chunk][tap][slot, output channel][channel of the chunk], zeros where there is none of either. The weight is (C::cin, C::cout, kernel), for a
// gradient for the input (C::cout, C::cin, kernel).
template <class Write>
static __device__ __forceinline__ void pack_unit(int i, const Write& write) {
  int unit = i % T::UNITS_PER_ROW, column = i / T::UNITS_PER_ROW % C::b_columns, rest = i / (T::UNITS_PER_ROW * C::b_columns);
  int entry = rest % C::tap_entries, first = rest / C::tap_entries * C::ck + unit * VEC;
  int slot = column / C::slot_columns, cout = column % C::slot_columns;
  int tap = (C::grad_input ? C::slots - 1 - slot : slot) * C::taps + constant_at<C::tap_indices>(entry);
  write((long long)rest * TAP_BYTES + T::unit_at(column, unit), [=](int e) -> WeightAt {
    int cin = first + e;
    return {cin < C::cin && cout < C::cout, C::grad_input ? cout : cin, C::grad_input ? cin : cout, tap};
  });
}

// One thread: every slice's weights go through the ring, chunk by chunk.
static __device__ __forceinline__ void stream_weights(const char* packed, const Sizes& s, const Weights& ring) {
  wait_for_results();                                   // of `pack`
  typename Weights::Cursor cursor = {0, 1};
#pragma unroll 1
  for (int index = first_tile(0, s); index < s.tiles; index = next_tile(index, s)) {
    int chunks = end_chunk(tile_at(index, s), s);
    const char* from = packed;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++)
#pragma unroll 1
      for (int left = CHUNK_STEPS; left > 0; left -= C::w_stage, cursor.next()) {
        u32 bytes = (left < C::w_stage ? left : C::w_stage) * STEP_BYTES, barrier = ring.full(cursor);
        ring.wait_empty(cursor);
        expect_bytes(barrier, bytes);
        copy_bulk(ring.stage(cursor), from, bytes, barrier);
        from += bytes;
      }
  }
}

// --- consumers -------------------------------------------------------------------------------------------------------

struct Consumer {
  const Work<Sweep>& work;
  int wg, thread;
  Weights ring;                                         // of weights
  typename Weights::Cursor cursor;                      // the stage to be waited for next
  u32 read;                                             // the barrier of the stage that instructions still read; 0: none
  Tile t;

  __device__ __forceinline__ Consumer(const Work<Sweep>& work, int wg, int thread)
      : work(work), wg(wg), thread(thread), ring(weights_of(work.memory)), cursor({0, 0}) {}

  __device__ __forceinline__ Steps steps(int index) {
    t = tile_at(index, work.sizes);
    return {0, end_chunk(t, work.sizes)};
  }

  // A walk's first sums are zeros; then each slot has those of the next one.
  __device__ __forceinline__ void begin(Sums& acc, int) {
    constexpr int CARRIED = (C::slots - 1) * SLOT_SUMS;
#pragma unroll
    for (int nb = 0; nb < NB; nb++)
#pragma unroll
      for (int i = 0; i < CARRIED + SLOT_SUMS; i++) {
        acc[nb][i] = i < CARRIED && t.step > 0 ? acc[nb][i < CARRIED ? i + SLOT_SUMS : i] : 0.f;
        opaque(acc[nb][i]);
      }
    read = 0;
  }

  // Where the consumer's pixels are, as descriptors have it.
  __device__ __forceinline__ u32 at(u32 stage) const { return uniform((stage + wg * (POSITIONS * ROW_BYTES)) >> 4 | 1u << 16); }

  // acc += pixels x weights of a chunk. Instructions are queued up to two stages of the weights' ring ahead; what the stage before the last
  // read is given back, and with the first the pixels' chunk before.
  __device__ __forceinline__ void multiply(Sums& acc, u32 pixels, u32 held) {
    const int lane = thread & 31;
    u32 weights = 0, barrier = 0;
#pragma unroll
    for (int i = 0; i < CHUNK_STEPS; i++) {
      const int k = i % K_STEPS * 2;
      if (i % C::w_stage == 0) {
        ring.wait_full(cursor);
        weights = uniform(ring.stage(cursor) >> 4 | 1u << 16);
        barrier = ring.empty(cursor);
        cursor.next();
        wgmma_fence();
      }
#pragma unroll
      for (int nb = 0; nb < NB; nb++) {
        u64 a = ROWS_OF<ROW_BYTES> | (pixels + (value_at<C::tap_rows>(i / K_STEPS) + nb * 64) * (ROW_BYTES / 16) + k);
        u64 b = ROWS_OF<ROW_BYTES> | (weights + i % C::w_stage / K_STEPS * (TAP_BYTES / 16) + k);
        WgmmaOf<C::b_columns>::template multiply<C::precision, false, false, true>(acc[nb], a, b);
      }
      if ((i + 1) % C::w_stage == 0 || i + 1 == CHUNK_STEPS) {
        wgmma_commit();
        wgmma_wait<1>();
        give_back(read, lane);
        if (i < C::w_stage) leave(held, lane);
        read = barrier;
      }
    }
  }

  __device__ __forceinline__ void store(const Sums& acc, int) const {
    give_back(read, thread & 31);
    const int od = t.d + C::first_slot;
    if (t.step < C::slots - 1 || od >= work.sizes.out_d) return;
    if constexpr (C::channels_last) store_pixels(acc, od);
    else store_rows(acc, od);
  }

  // Where a thread's sum of M-rows 64 `nb` and behind is in the tile; `eight`: the one eight rows further.
  __device__ __forceinline__ int position(int nb, int eight, int thread) const {
    return wg * POSITIONS + nb * 64 + (thread >> 5) * 16 + (thread >> 2) % 8 + eight * 8;
  }

  __device__ __forceinline__ float bias_of(int channel) const {
    return work.bias && (C::cout % 8 == 0 || channel < C::cout) ? Number::value(work.bias[channel]) : 0.f;
  }

  // Channels-last: the sums of the first slot, those of output slice `od`.
  __device__ __forceinline__ void store_pixels(const Sums& acc, int od) const {
    using Stores = PixelStores<C::precision, C::cout, C::slot_columns, C::wide_stores>;
    constexpr int PIXEL = C::cout * ELEMENT;
    const Sizes& s = work.sizes;
    float b[SLOT_SUMS / 2];                             // not what sums begin with: ptxas would serialise some kernels (C7515)
#pragma unroll
    for (int i = 0; i < SLOT_SUMS / 2; i++) b[i] = bias_of(i / 2 * 8 + (thread & 3) * 2 + i % 2);
    char* const y = work.y + (((long long)t.n * s.out_d + od) * s.out_h + t.h) * s.out_w * PIXEL + (long long)t.w * PIXEL;
#pragma unroll
    for (int nb = 0; nb < NB; nb++) {
      float sums[SLOT_SUMS];
#pragma unroll
      for (int i = 0; i < SLOT_SUMS; i++) sums[i] = acc[nb][i] + b[i / 4 * 2 + i % 2];
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        int at = position(nb, eight, thread), row = at / PITCH, w = at - row * PITCH;
        bool there = row < C::tile_h && t.h + row < s.out_h && w < C::tile_w && t.w + w < s.out_w;
        char* pixel = y + ((long long)row * s.out_w + w) * PIXEL;
#pragma unroll
        for (int i = 0; i < Stores::UNITS; i++) Stores::store(sums, i, eight, pixel, C::cout, there, thread & 31);
      }
    }
  }

  // NCHW: a thread has two of each eight channels of a position, and eight lanes neighbouring positions, in float32 a sector's. One loop for
  // both layouts, with sums that all have their bias first, takes up to 15 % longer.
  __device__ __forceinline__ void store_rows(const Sums& acc, int od) const {
    const Sizes& s = work.sizes;
    const int channel = (thread & 3) * 2;
    const long long plane = (long long)s.out_d * s.out_h * s.out_w * ELEMENT;
    float b[SLOT_SUMS / 2];
#pragma unroll
    for (int i = 0; i < SLOT_SUMS / 2; i++) b[i] = bias_of(i / 2 * 8 + channel + i % 2);
    char* const y = work.y + ((long long)t.n * C::cout + channel) * plane + (((long long)od * s.out_h + t.h) * s.out_w + t.w) * ELEMENT;
#pragma unroll
    for (int nb = 0; nb < NB; nb++)
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        int at = position(nb, eight, thread), row = at / PITCH, w = at - row * PITCH;
        bool there = row < C::tile_h && t.h + row < s.out_h && w < C::tile_w && t.w + w < s.out_w;
        char* to = y + ((long long)row * s.out_w + w) * ELEMENT;
#pragma unroll
        for (int i = 0; i < SLOT_SUMS / 2; i++) {
          const int of = i / 2 * 8 + i % 2;
          const u32 v = Number::bits(acc[nb][i / 2 * 4 + eight * 2 + i % 2] + b[i]);
          const bool ok = there && (C::cout % 8 == 0 || of + channel < C::cout);
          if constexpr (ELEMENT == 4) store_global_if(to + of * plane, v, ok);
          else store_global_16_if(to + of * plane, v, ok);
        }
      }
  }
};

static __device__ __forceinline__ void produce(const Work<Sweep>& work) {
  const int warp = uniform(threadIdx.x >> 5);
  const Sizes& s = work.sizes;
  const Ring pixels = ring_of(work.memory, 0);
  const Slots slots = slots_of(work.memory);
  if (!C::channels_last && warp < PRODUCER_WARPS) {
    if constexpr (!C::channels_last) turn_slots<Sweep>(nullptr, s, pixels, slots, threadIdx.x);
  } else if (warp == T::LOADER_WARP && (threadIdx.x & 31) == 0) {
    if constexpr (C::channels_last) load_boxes<Sweep>(work.maps, s, pixels);
    else load_boxes<Sweep>(work.maps, s, slots);
  } else if (warp == T::WEIGHTS_WARP && (threadIdx.x & 31) == 0) {
    stream_weights(work.packed, s, weights_of(work.memory));
  }
}
};

template <class M>
__global__ void __launch_bounds__(M::THREADS, 1)
sweep(const char* __restrict__ packed, const typename M::Type* __restrict__ bias, char* __restrict__ y, int batch, int in_d, int in_h, int in_w,
      int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tiles, const __grid_constant__ typename M::Maps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const typename M::Sizes sizes = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles};
  run<M>({packed, bias, y, sizes, maps, shared_address(memory)});
}
