// Pairs: the gradient for the input of a transposed convolution with strides along W, NCHW. A place q of it sums g at
// q STEP_W + k - PAD_W for all k, channels and rows of the kernel: places x (channels x taps) by (channels x taps) x channels of the result.
//
// Fragments of A come from a channel's row as the copy engine left it. Where strides, padding and kernels are even, two taps of K that are
// neighbours are a lane's pair of K: in float32 the places t and t + 4 of a step, in 16 bits a register. Nothing turns g in shared memory,
// whose traffic is what bounds `gather` here.
//
// A row of the result is cut into groups of GROUP places; a block takes GROUPS of them, of whichever rows and images, times COLUMNS
// columns at a time.
#include "pixels_streamed.cuh"

// Channels of g in a stage have a row of g for each group, and their taps along W are rows of weights. A chunk of them has a stage for each
// row of the kernel.
template <class C>
struct Pairs : Streamed<Pairs<C>, C> {
using Base = Streamed<Pairs, C>;
using typename Base::Number;
using typename Base::Sums;
using Base::ELEMENT;
using Base::NARROW;
using Base::COLUMNS;
using Base::BOX_PLACE;

static constexpr int GROUP = C::group, GROUPS = Base::PLACES / GROUP;
static constexpr int TAPS = C::kernel_d * C::kernel_h;  // stages of a chunk
static constexpr int SECOND = C::cin, TAPS_IN_ALL = TAPS * C::kernel_w;

// A step of K has SLOTS slots of `slot` taps: of `slots_lane` neighbouring ones along W, times channels. Further steps have further taps, then
// further channels.
static constexpr int SLOTS = 32 / ELEMENT / C::slot;
static constexpr int CHANNELS_STEP = SLOTS / C::slots_lane;
static constexpr int STEPS_W = C::kernel_w / C::slot / C::slots_lane;
static __device__ __forceinline__ constexpr int channel_of(int step, int slot) { return step / STEPS_W * CHANNELS_STEP + slot / C::slots_lane; }
static __device__ __forceinline__ constexpr int tap_of(int step, int slot) { return C::slot * (step % STEPS_W * C::slots_lane + slot % C::slots_lane); }
// And where a box has it, of its first place, in elements.
static __device__ __forceinline__ constexpr int slot_at(int step, int slot) { return channel_of(step, slot) * C::pitch + tap_of(step, slot) + C::lead; }

struct Sizes {
  int d, h, w;                                          // of the result
  int groups_w, groups, unused, tiles;                  // of a row; all; all tiles
};

struct Group { int n, d, h, w; };                       // its first place

static __device__ __forceinline__ Group group_at(int index, const Sizes& s) {
  int row = index / s.groups_w, q = row / s.h;
  return {q / s.d, q % s.d, row % s.h, index % s.groups_w * GROUP};
}

// K is slots. The weight is (C::cout, C::cin, kernel).
static __device__ __forceinline__ WeightAt weight_at(int column, int stage, int row, int k) {
  constexpr int OF_STEP = 32 / ELEMENT;
  int step = row * Base::K_STEPS + k / OF_STEP, place = k % OF_STEP;
  int slot = C::slot == 1 ? place : NARROW ? place / 2 : place % 4, second = C::slot == 1 ? 0 : NARROW ? place % 2 : place / 4;
  int source = stage / TAPS * C::chunk + channel_of(step, slot), kw = tap_of(step, slot) + second;
  return {column < C::cout && source < C::cin, column, source, stage % TAPS * C::kernel_w + kw};
}

struct Box {
  int n, d, h, w;
  __device__ __forceinline__ void begin(int places, int lane, const Sizes& s) {
    Group group = group_at(places * GROUPS + lane, s);  // the last tile's may be of no image, whose boxes are zeros
    n = group.n, d = group.d * C::step_d - C::pad_d, h = group.h * C::step_h - C::pad_h, w = group.w * C::step_w + C::first;
  }
  __device__ __forceinline__ void load(int stage, u32 to, const TensorMap& map, u32 barrier) const {
    const int chunk = stage / TAPS, tap = stage % TAPS;
    load_box(to, map, w, h + tap % C::kernel_h * C::dilation_h, d + tap / C::kernel_h * C::dilation_d, chunk * C::chunk, n, barrier);
  }
};

// =====================================================================================================================
// Consumers
// =====================================================================================================================

// Where a stage has the lane's first slot, of its first place.
static __device__ __forceinline__ u32 own_place(int wg, int thread) {
  int position = wg * 64 + (thread >> 5) * 16, slot = (thread & 3) * (NARROW && C::slot == 1 ? 2 : 1);
  return position / GROUP * BOX_PLACE + ((position % GROUP + (thread >> 2) % 8) * C::step_w + slot_at(0, slot)) * ELEMENT;
}

// Fragments of steps `first` and `first` + 1, from such a place: of places g and g + 8.
static __device__ __forceinline__ void load_fragments(u32 (&a)[2][4], u32 from, int first) {
#pragma unroll
  for (int step = 0; step < 2; step++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 at = from + (slot_at(first + step, 0) - slot_at(0, 0)) * ELEMENT + i * (GROUP == 8 ? BOX_PLACE : 8 * C::step_w * ELEMENT);
      if constexpr (!NARROW && C::slot == 2) {
        u32 pair[4];
        load_shared_64(pair, at);
        a[step][i] = pair[0];
        a[step][2 + i] = pair[1];
      } else {
#pragma unroll
        for (int k = 0; k < 2; k++, at += (slot_at(0, SLOTS / 2) - slot_at(0, 0)) * ELEMENT) {
          if constexpr (!NARROW || C::slot == 2) a[step][2 * k + i] = load_shared_u32(at);
          else a[step][2 * k + i] = load_shared_u16(at) | load_shared_u16(at + (slot_at(0, 1) - slot_at(0, 0)) * ELEMENT) << 16;
        }
      }
    }
}

static __device__ __forceinline__ void begin(Sums& acc, const Work<Pairs>&, int, int) { zero(acc); }

static __device__ __forceinline__ void store(const Sums& acc, const Work<Pairs>& work, int tile, int wg, int thread) {
  if (work.sizes.w % 2 == 0) store_as<true>(acc, work.y, work.sizes, tile, wg, thread);
  else store_as<false>(acc, work.y, work.sizes, tile, wg, thread);
}

// A thread's sums: of columns 8j + 2t and the next, places g and g + 8. PAIRED: rows have pairs of places. Then lanes of
// neighbouring g exchange, and a warp stores 16 places of a column at once.
template <bool PAIRED>
static __device__ __forceinline__ void store_as(const Sums& acc, char* __restrict__ y, const Sizes& s, int tile, int wg, int thread) {
  constexpr int STORES = PAIRED ? 1 : 2;
  int lane = thread & 31, odd = PAIRED ? lane >> 2 & 1 : 0, plane = s.d * s.h * s.w;
  long long at[STORES];                                 // of the place in an image's first channel; -1: there is no such place
#pragma unroll
  for (int h = 0; h < STORES; h++) {
    int position = wg * 64 + (thread >> 5) * 16 + (h + odd) * 8, index = Base::places_of(tile) * GROUPS + position / GROUP;
    Group group = group_at(index, s);
    int w = group.w + position % GROUP + (lane >> 2) - odd;
    long long row = (long long)group.n * C::cout * plane + (group.d * s.h + group.h) * s.w;
    at[h] = index < s.groups && w < s.w ? row + w : -1;
  }
  int first = Base::block_of(tile) * COLUMNS + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    OPAQUE_2(first, plane);                             // what follows from them is found here, not kept (spills)
    int of = first + 8 * j;
    char* channel = y + (long long)of * plane * ELEMENT;
    u32 v[2][2];                                        // of a place, of a column
#pragma unroll
    for (int i = 0; i < 4; i++) v[i / 2][i % 2] = Number::bits(acc[4 * j + i]);
    if constexpr (PAIRED) exchange<NARROW>(v, odd);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      bool column = C::cout % COLUMNS == 0 || of + c < C::cout;
#pragma unroll
      for (int h = 0; h < STORES; h++) {
        char* place = channel + ((long long)c * plane + at[h]) * ELEMENT;
        bool ok = at[h] >= 0 && column;
        if constexpr (PAIRED && !NARROW) {
          const u32 both[4] = {v[0][c], v[1][c]};
          store_global_64_if(place, both, ok);
        } else if constexpr (PAIRED) {
          store_global_if(place, c ? v[0][0] >> 16 | (v[1][0] & 0xffff0000u) : (v[0][0] & 0xffffu) | v[1][0] << 16, ok);
        } else if constexpr (!NARROW) {
          store_global_if(place, v[h][c], ok);
        } else {
          store_global_16_if(place, v[h][c], ok);
        }
      }
    }
  }
}
};
