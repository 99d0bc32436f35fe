// Pairs: a row's places times channels, NCHW, of passes that step along W in the source or in the result. A place q sums
//
//   out[q OUT + u - TRIM] = sum over channels and taps k of source[q STEP + k - PAD] weight[u, k]
//
// The gradient for the input steps in the source: STEP is the stride, OUT is 1, and columns are channels of the result. A 1-D forward steps in
// the result: OUT is the stride, STEP is 1, and columns are channels times phases u, each with as many taps as the kernel has strides.
//
// Fragments of A come from a channel's row as the copy engine left it. Where strides, padding and kernels are even, two taps of K that are
// neighbours are a lane's pair of K: in float32 the places t and t + 4 of a step, in 16 bits a register. Nothing turns the source in shared
// memory, whose traffic is what bounds `gather` here. (Boxes and descriptors begin at whole 16 bytes, so that a tap is neither's shift.)
//
// A row of places is cut into groups of GROUP; a block takes GROUPS of them, of whichever rows and images, times COLUMNS columns at a time.
#include "pixels_streamed.cuh"

// Channels of the source in a stage have a row for each group, and their taps along W are rows of weights. A chunk of them has a stage for
// each row of taps.
template <class C>
struct Pairs : Streamed<Pairs<C>, C> {
using Base = Streamed<Pairs, C>;
using typename Base::Number;
using typename Base::Sums;
using Base::ELEMENT;
using Base::NARROW;
using Base::COLUMNS;
using Base::ALL_COLUMNS;
using Base::BOX_PLACE;

static constexpr int GROUP = C::group, GROUPS = Base::PLACES / GROUP;
static constexpr int TAPS = C::kernel_d * C::kernel_h;  // stages of a chunk
static constexpr int SECOND = C::forward ? C::cout : C::cin, TAPS_IN_ALL = TAPS * C::taps_w;
static constexpr int OUT = C::out, TRIM = C::trim;
static constexpr bool ALIKE = OUT % 2 == 0;

static __device__ __forceinline__ int channel_of(int column) { return column / OUT; }  // of the result

// A step of K has SLOTS slots of `slot` taps: of `slots_lane` neighbouring ones along W, times channels. Further steps have further taps, then
// further channels.
static constexpr int SLOTS = 32 / ELEMENT / C::slot;
static constexpr int CHANNELS_STEP = SLOTS / C::slots_lane;
static constexpr int STEPS_W = C::kernel_w / C::slot / C::slots_lane;
static __device__ __forceinline__ constexpr int channel_of_slot(int step, int slot) { return step / STEPS_W * CHANNELS_STEP + slot / C::slots_lane; }
static __device__ __forceinline__ constexpr int tap_of(int step, int slot) { return C::slot * (step % STEPS_W * C::slots_lane + slot % C::slots_lane); }
// And where a box has it, of its first place, in elements.
static __device__ __forceinline__ constexpr int slot_at(int step, int slot) { return channel_of_slot(step, slot) * C::pitch + tap_of(step, slot) + C::lead; }

struct Sizes {
  int d, h, w;                                          // of the result
  int groups_w, groups, unused, tiles;                  // of a row; all; all tiles
};

struct Group { int n, d, h, w; };                       // its first place

static __device__ __forceinline__ Group group_at(int index, const Sizes& s) {
  int row = index / s.groups_w, q = row / s.h;
  return {q / s.d, q % s.d, row % s.h, index % s.groups_w * GROUP};
}

// K is slots. The weight is (C::cout, C::cin, taps), or of a forward (C::cin, C::cout, taps), whose later taps are of earlier pixels.
static __device__ __forceinline__ WeightAt weight_at(int column, int stage, int row, int k) {
  constexpr int OF_STEP = 32 / ELEMENT;
  int step = row * Base::K_STEPS + k / OF_STEP, place = k % OF_STEP;
  int slot = C::slot == 1 ? place : NARROW ? place / 2 : place % 4, second = C::slot == 1 ? 0 : NARROW ? place % 2 : place / 4;
  int source = stage / TAPS * C::chunk + channel_of_slot(step, slot), channel = channel_of(column), kw = tap_of(step, slot) + second;
  if constexpr (C::forward) kw = (C::kernel_w - 1 - kw) * OUT + column % OUT;
  bool there = column < ALL_COLUMNS && source < C::cin && kw < C::taps_w;
  return {there, C::forward ? source : channel, C::forward ? channel : source, stage % TAPS * C::taps_w + kw};
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

// --- consumers -------------------------------------------------------------------------------------------------------

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
      u32 at = from + (slot_at(first + step, 0) - slot_at(0, 0)) * ELEMENT + i * (8 * C::step_w * ELEMENT);
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

static __device__ __forceinline__ void store(const Sums& acc, const Work<Pairs>& work, int tile, int wg, int thread) {
  if constexpr (!C::forward) {
    if (work.sizes.w % 2 == 0) return Base::template store_sums<true, false>(acc, work, tile, wg, thread);
  }
  Base::template store_sums<false, C::phases_together>(acc, work, tile, wg, thread);
}

// As `store_sums` asks. Each column goes on from the one before: addresses that follow from columns alone ptxas finds ahead, and spills.
template <int STORES>
struct Result {
  static constexpr int PLACE_8 = 8 * OUT * ELEMENT, CHANNELS_8 = 8 / OUT, PHASES_8 = 8 % OUT;
  char* own;                                            // of the first place, at column `of`
  int w;                                                // of its first phase in its row; behind the row: there is no such place
  int of, phase, plane, row;

  __device__ __forceinline__ Result(const Work<Pairs>& work, int tile, int whole, int place, int first)
      : of(first), phase(first % OUT), plane(work.sizes.d * work.sizes.h * work.sizes.w), row(work.sizes.w) {
    const Sizes& s = work.sizes;
    const int index = Base::places_of(tile) * GROUPS + whole / GROUP;
    const Group group = group_at(index, s);
    const int at = (group.w + whole % GROUP + place) * OUT - TRIM;
    const long long column = (long long)channel_of(first) * plane + phase;
    own = work.y + ((long long)group.n * C::cout * plane + (group.d * s.h + group.h) * s.w + at + column) * ELEMENT;
    w = index < s.groups ? at : row;
  }
  __device__ __forceinline__ void go(int j) {
    if (j == 0) return;
    OPAQUE_2(plane, phase);
    const bool next = PHASES_8 && phase + PHASES_8 >= OUT;
    const long long step = ((long long)CHANNELS_8 * plane + PHASES_8 + (next ? plane - OUT : 0)) * ELEMENT;
    of += 8, phase += PHASES_8 - (next ? OUT : 0);
    own += step;
  }
  __device__ __forceinline__ bool next_channel(int c) const { return c && (OUT == 1 || (!ALIKE && phase == OUT - 1)); }
  __device__ __forceinline__ char* to(int i, int c) const {
    return own + i * PLACE_8 + (next_channel(c) ? plane - (OUT - 1) : c) * (long long)ELEMENT;
  }
  // A place's phases may be ahead of its row and behind it. (Behind it, places of no group are too.)
  __device__ __forceinline__ bool there(int i, int c) const {
    return (u32)(w + i * 8 * OUT + (next_channel(c) ? 0 : phase + c)) < (u32)row && (ALL_COLUMNS % COLUMNS == 0 || of + c < ALL_COLUMNS);
  }
};
};
