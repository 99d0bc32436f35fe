// Pairs: the gradient for the input of a transposed convolution with strides along W, NCHW. A place q of it sums g at
// q STEP_W + k - PAD_W for all k, channels and rows of the kernel: places x (channels x taps) by (channels x taps) x channels of the result.
//
// Fragments of A come from a channel's row as the copy engine left it. Where strides, padding and kernels are even, two taps of K that are
// neighbours are a lane's pair of K: in float32 the places t and t + 4 of a step, in 16 bits a register. Nothing turns g in shared memory,
// whose traffic is what bounds `gather` here.
//
// A row of the result is cut into groups of GROUP places; a block takes GROUPS of them, of whichever rows and images, times COLUMNS
// columns at a time, and its consumers halve them. The lanes of one warp bring a box each, and the first the weights.
#include "pixels.cuh"

template <class C>
struct Pairs : PixelsOf<C>, PacksUnits<Pairs<C>> {
using typename PixelsOf<C>::Number;
using PixelsOf<C>::ELEMENT;
using PixelsOf<C>::NARROW;
using PixelsOf<C>::VEC;
using PixelsOf<C>::CONSUMERS;

static constexpr int MB = C::mb, COLUMNS = C::columns, GROUP = C::group;
static constexpr int GROUPS = CONSUMERS * MB * 64 / GROUP;
static constexpr int K_STEPS = 4;                       // of a row of weights: a matrix instruction takes 32 bytes of K
static constexpr int CHUNKS = (C::cin + C::chunk - 1) / C::chunk;  // of channels of g, whose taps along W are ROWS_B rows of weights
static constexpr int ROWS_B = C::chunk * C::kernel_w * ELEMENT / 128;
static constexpr int TAPS = C::kernel_d * C::kernel_h;  // stages of a chunk, which have a row of g each
static constexpr int STAGES_K = CHUNKS * TAPS;          // of a tile
static constexpr int BOX_BYTES = C::chunk * C::pitch * ELEMENT;
static constexpr int BOX_PLACE = (BOX_BYTES + 127) / 128 * 128;  // where boxes may begin
static constexpr int WEIGHT_BYTES = ROWS_B * COLUMNS * 128;  // of a stage
static constexpr int WEIGHTS_AT = (GROUPS * BOX_PLACE + 1023) / 1024 * 1024;
static constexpr int BLOCKS_N = (C::cout + COLUMNS - 1) / COLUMNS;
static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static constexpr bool HOLDS = true;
using Sums = float[MB][COLUMNS / 2];
using Maps = TensorMap;
using Ring = RingOf<C::stages, WEIGHTS_AT + WEIGHT_BYTES>;
static_assert(Ring::BYTES + Ring::BARRIER_BYTES == C::shared_bytes, "the planner's shared memory is not the kernel's");

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

// Neighbouring blocks have the same places.
static __device__ __forceinline__ int block_of(int tile) { return tile % BLOCKS_N; }
static __device__ __forceinline__ int first_group(int tile) { return tile / BLOCKS_N * GROUPS; }

// =====================================================================================================================
// Weights
// =====================================================================================================================

static constexpr int PACK_UNITS = BLOCKS_N * STAGES_K * ROWS_B * COLUMNS * 8;
static constexpr int SECOND = C::cin, TAPS_IN_ALL = TAPS * C::kernel_w;

// [block][chunk][row of the kernel][row of weights][column][128 bytes of K, swizzled], zeros where there is no such channel. The weight is
// (C::cout, C::cin, kernel).
template <class Write>
static __device__ __forceinline__ void pack_unit(int i, const Write& write) {
  int unit = i % 8, column = i / 8 % COLUMNS, rest = i / (8 * COLUMNS), row = rest % ROWS_B, tap = rest / ROWS_B % TAPS;
  int chunk = rest / (ROWS_B * TAPS) % CHUNKS, result = rest / (ROWS_B * STAGES_K) * COLUMNS + column;
  write((long long)(i - unit) * 16 + ((unit ^ (column & 7)) << 4), [=](int e) -> WeightAt {
    constexpr int OF_STEP = 32 / ELEMENT;
    int k = unit * VEC + e, step = row * K_STEPS + k / OF_STEP, place = k % OF_STEP;
    int slot = C::slot == 1 ? place : NARROW ? place / 2 : place % 4, second = C::slot == 1 ? 0 : NARROW ? place % 2 : place / 4;
    int source = chunk * C::chunk + channel_of(step, slot), kw = tap_of(step, slot) + second;
    return {result < C::cout && source < C::cin, result, source, tap * C::kernel_w + kw};
  });
}

// =====================================================================================================================
// Producer: a warp
// =====================================================================================================================

struct Loader {
  const Work<Pairs>& work;
  int lane, n, d, h, w;                                 // the lane's box
  const char* weights;
  bool packing;                                         // weights are not known to be packed

  __device__ __forceinline__ Loader(const Work<Pairs>& work, int lane) : work(work), lane(lane), packing(true) {}

  __device__ __forceinline__ Steps begin(int tile) {
    Group group = group_at(first_group(tile) + lane, work.sizes);  // the last tile's may be of no image, whose boxes are zeros
    n = group.n, d = group.d * C::step_d - C::pad_d, h = group.h * C::step_h - C::pad_h, w = group.w * C::step_w + C::first;
    weights = work.packed + (long long)block_of(tile) * STAGES_K * WEIGHT_BYTES;
    return {0, STAGES_K};
  }

  __device__ __forceinline__ void load(int i, u32 to, u32 barrier) {
    const int chunk = i / TAPS, tap = i % TAPS;
    if (lane == 0) expect_bytes(barrier, GROUPS * BOX_BYTES + WEIGHT_BYTES);
    __syncwarp();
    if (lane < GROUPS)
      load_box(to + lane * BOX_PLACE, work.maps, w, h + tap % C::kernel_h * C::dilation_h, d + tap / C::kernel_h * C::dilation_d,
               chunk * C::chunk, n, barrier);
    if (lane == 0) {
      if (packing) wait_for_results();                  // of `pack`
      packing = false;
      copy_bulk(to + WEIGHTS_AT, weights, WEIGHT_BYTES, barrier);
    }
    weights += WEIGHT_BYTES;
  }
};

static __device__ __forceinline__ Ring ring_of(u32 memory, int) { return Ring::at(memory, memory + Ring::BYTES); }
static __device__ __forceinline__ void produce(const Work<Pairs>& work) {
  if (threadIdx.x < 32) ::produce<Pairs>(work, Loader(work, threadIdx.x));
}

// =====================================================================================================================
// Consumers
// =====================================================================================================================

// Where a stage has the lane's first slot, of its first place.
static __device__ __forceinline__ u32 own_slot(int wg, int thread) {
  int position = wg * (MB * 64) + (thread >> 5) * 16, slot = (thread & 3) * (NARROW && C::slot == 1 ? 2 : 1);
  return position / GROUP * BOX_PLACE + ((position % GROUP + (thread >> 2) % 8) * C::step_w + slot_at(0, slot)) * ELEMENT;
}

// Fragments of steps `first` and `first` + 1, from such a place: of places g and g + 8.
static __device__ __forceinline__ void load_fragments(u32 (&a)[2][MB][4], u32 from, int first) {
#pragma unroll
  for (int step = 0; step < 2; step++)
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 at = from + m * (64 / GROUP) * BOX_PLACE + (slot_at(first + step, 0) - slot_at(0, 0)) * ELEMENT;
        at += i * (GROUP == 8 ? BOX_PLACE : 8 * C::step_w * ELEMENT);
        if constexpr (!NARROW && C::slot == 2) {
          u32 pair[4];
          load_shared_64(pair, at);
          a[step][m][i] = pair[0];
          a[step][m][2 + i] = pair[1];
        } else {
#pragma unroll
          for (int k = 0; k < 2; k++, at += (slot_at(0, SLOTS / 2) - slot_at(0, 0)) * ELEMENT) {
            if constexpr (!NARROW || C::slot == 2) a[step][m][2 * k + i] = load_shared_u32(at);
            else a[step][m][2 * k + i] = load_shared_u16(at) | load_shared_u16(at + (slot_at(0, 1) - slot_at(0, 0)) * ELEMENT) << 16;
          }
        }
      }
}

struct Consumer {
  const Work<Pairs>& work;
  int wg, thread;
  u32 own;
  struct At { u32 stage, weights; };

  __device__ __forceinline__ Consumer(const Work<Pairs>& work, int wg, int thread) : work(work), wg(wg), thread(thread), own(own_slot(wg, thread)) {}
  __device__ __forceinline__ At at(u32 stage) const { return {stage, uniform(stage + WEIGHTS_AT)}; }
  __device__ __forceinline__ Steps steps(int) const { return {0, STAGES_K}; }
  __device__ __forceinline__ void begin(Sums& acc, int) const { zero(acc); }
  __device__ __forceinline__ void multiply(Sums& acc, const At& at, u32 held) const {
#pragma unroll
    for (int row = 0; row < ROWS_B; row++) multiply_row<Pairs>(acc, row, at.stage + own, at.weights, held, thread & 31);
  }
  __device__ __forceinline__ void store(const Sums& acc, int tile) const {
    if (work.sizes.w % 2 == 0) Pairs::store<true>(acc, work.y, work.sizes, tile, wg, thread);
    else Pairs::store<false>(acc, work.y, work.sizes, tile, wg, thread);
  }
};

// A thread's sums: of columns 8j + 2t and the next, places g and g + 8 of MB x 64. PAIRED: rows have pairs of places. Then lanes of
// neighbouring g exchange, and a warp stores 16 places of a column at once.
template <bool PAIRED>
static __device__ __forceinline__ void store(const Sums& acc, char* __restrict__ y, const Sizes& s, int tile, int wg, int thread) {
  constexpr int STORES = PAIRED ? 1 : 2;
  int lane = thread & 31, odd = PAIRED ? lane >> 2 & 1 : 0, plane = s.d * s.h * s.w;
  long long at[MB][STORES];                             // of the place in an image's first channel; -1: there is no such place
#pragma unroll
  for (int m = 0; m < MB; m++)
#pragma unroll
    for (int h = 0; h < STORES; h++) {
      int position = (wg * MB + m) * 64 + (thread >> 5) * 16 + (h + odd) * 8, index = first_group(tile) + position / GROUP;
      Group group = group_at(index, s);
      int w = group.w + position % GROUP + (lane >> 2) - odd;
      long long row = (long long)group.n * C::cout * plane + (group.d * s.h + group.h) * s.w;
      at[m][h] = index < s.groups && w < s.w ? row + w : -1;
    }
  int first = block_of(tile) * COLUMNS + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    OPAQUE_2(first, plane);                             // what follows from them is found here, not kept (spills)
    int of = first + 8 * j;
    char* channel = y + (long long)of * plane * ELEMENT;
#pragma unroll
    for (int m = 0; m < MB; m++) {
      u32 v[2][2];                                      // of a place, of a column
#pragma unroll
      for (int i = 0; i < 4; i++) v[i / 2][i % 2] = Number::bits(acc[m][4 * j + i]);
      if constexpr (PAIRED) exchange<NARROW>(v, odd);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        bool column = C::cout % COLUMNS == 0 || of + c < C::cout;
#pragma unroll
        for (int h = 0; h < STORES; h++) {
          char* place = channel + ((long long)c * plane + at[m][h]) * ELEMENT;
          bool ok = at[m][h] >= 0 && column;
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
}
};
