// Pairs: the gradient for the input of a transposed convolution with strides along W, NCHW, on tensor cores. An element q of it sums g at
// q STEP_W + k - PAD_W for all k, channels and rows of the kernel: a product of matrices, places q x (channels x taps) by (channels x taps)
// x input channels.
//
// Places are M: fragments of A that lanes read from a channel's row as the copy engine left it. Where strides, padding and kernels are even,
// two taps of K that lie side by side are a lane's pair of K: in float32 the places t and t + 4 of a step, in 16 bits a register. Nothing
// turns g in shared memory, whose traffic is what bounds `gather` here. Columns (input channels) are N, weights are B, by descriptor.
//
// A row of the gradient is cut into groups of GROUP places; a block takes GROUPS of them, of whichever rows and images, times COLUMNS
// columns at a time, and its consumers halve them. The lanes of one warp bring a box each, and the first the weights.
//
// Constants are Pairs' C (cuda/pixels/pairs.py computes them and explains each); sizes of the input are arguments.
#include "places.cuh"

template <class C_>
struct Pairs : PacksUnits<Pairs<C_>> {
using C = C_;
using Number = NumberOf<C::precision>;
using Type = typename Number::Type;

static constexpr int ELEMENT = Number::SIZE;
static constexpr bool NARROW = ELEMENT == 2;            // of 16 bits
static constexpr int VEC = 16 / ELEMENT;
static constexpr int CONSUMERS = 2;
static constexpr int MB = C::mb, COLUMNS = C::columns, GROUP = C::group;
static constexpr int PLACES = CONSUMERS * MB * 64;
static constexpr int GROUPS = PLACES / GROUP;
static constexpr int K_STEPS = 4;                       // of a row of weights: a matrix instruction takes 32 bytes of K
static constexpr int CHUNKS = (C::cin + C::chunk - 1) / C::chunk;  // of channels of g, whose taps along W are ROWS_B rows of weights
static constexpr int ROWS_B = C::chunk * C::kernel_w * ELEMENT / 128;
static constexpr int TAPS = C::kernel_d * C::kernel_h;  // stages of a chunk, which have a row of g each
static constexpr int STAGES_K = CHUNKS * TAPS;          // of a tile
static constexpr int BOX_BYTES = C::chunk * C::pitch * ELEMENT;
static constexpr int BOX_PLACE = (BOX_BYTES + 127) / 128 * 128;  // where boxes may begin
static constexpr int PIXEL_BYTES = GROUPS * BOX_PLACE;  // of a stage
static constexpr int WEIGHT_BYTES = ROWS_B * COLUMNS * 128;  // of a stage
static constexpr int STAGE_BYTES = (PIXEL_BYTES + 1023) / 1024 * 1024 + WEIGHT_BYTES;
static constexpr int WEIGHTS_AT = STAGE_BYTES - WEIGHT_BYTES;
static constexpr int ALL_COLUMNS = C::cout;
static constexpr int BLOCKS_N = (ALL_COLUMNS + COLUMNS - 1) / COLUMNS;
static constexpr int THREADS = 128 + CONSUMERS * 128;
using Ring = RingOf<C::stages, STAGE_BYTES>;
static constexpr int BARRIERS_AT = Ring::BYTES;
static_assert(BARRIERS_AT + Ring::BARRIER_BYTES == C::shared_bytes, "the planner's shared memory is not the kernel's");

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
  int batch, in_d, in_h, in_w;                          // of the gradient
  int groups_w, groups, tiles;                          // of a row; all; all tiles
};

struct Group { int n, d, h, w; };                       // its first place

static __device__ __forceinline__ Group group_at(int index, const Sizes& s) {
  int row = index / s.groups_w, q = row / s.in_h;
  return {q / s.in_d, q % s.in_d, row % s.in_h, index % s.groups_w * GROUP};
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

static __device__ __forceinline__ void produce(const TensorMap& map, const char* __restrict__ packed, const Sizes& s, const Ring& ring, int lane) {
  typename Ring::Cursor cursor = {0, 1};                // all are free at first
  bool packing = true;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < s.tiles; tile += gridDim.x) {
    Group group = group_at(first_group(tile) + lane, s);  // the last tile's may be of no image, whose boxes are zeros
    int w = group.w * C::step_w + C::first, h = group.h * C::step_h - C::pad_h, d = group.d * C::step_d - C::pad_d;
    if constexpr (C::line > 0) {                        // 1-D: the map has a channel's row as lines, of which a box has some
      h = w / C::line - (w % C::line < 0);
      w = 0;
    }
    const char* from = packed + (long long)block_of(tile) * STAGES_K * WEIGHT_BYTES;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll 1
      for (int tap = 0; tap < TAPS; tap++, cursor.next(), from += WEIGHT_BYTES) {
        u32 to = ring.stage(cursor), barrier = ring.full(cursor);
        ring.wait_empty(cursor);
        if (lane == 0) expect_bytes(barrier, GROUPS * BOX_BYTES + WEIGHT_BYTES);
        __syncwarp();
        if (lane < GROUPS)
          load_box(to + lane * BOX_PLACE, map, w, h + tap % C::kernel_h * C::dilation_h, d + tap / C::kernel_h * C::dilation_d, chunk * C::chunk,
                   group.n, barrier);
        if (lane == 0) {
          if (packing) wait_for_results();              // of `pack`
          packing = false;
          copy_bulk(to + WEIGHTS_AT, from, WEIGHT_BYTES, barrier);
        }
      }
  }
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
            if constexpr (!NARROW || C::together) a[step][m][2 * k + i] = load_shared_u32(at);
            else a[step][m][2 * k + i] = load_shared_u16(at) | load_shared_u16(at + (C::slot == 2 ? 1 : C::pitch) * ELEMENT) << 16;
          }
        }
      }
}

// A thread's sums: of columns 8j + 2t and the next, places g and g + 8 of MB x 64. PAIRED: rows have pairs of places. Then lanes of
// neighbouring g exchange, so that an even one has g and g + 1, an odd one g + 7 and g + 8, and a warp stores 16 places of a column at once.
template <bool PAIRED>
static __device__ __forceinline__ void store(const float (&acc)[MB][COLUMNS / 2], char* __restrict__ y, const Sizes& s, int tile, int wg, int thread) {
  constexpr int STORES = PAIRED ? 1 : 2;
  int lane = thread & 31, odd = PAIRED ? lane >> 2 & 1 : 0, plane = s.in_d * s.in_h * s.in_w;
  long long at[MB][STORES];                             // of the place in an image's first channel; -1: there is no such place
#pragma unroll
  for (int m = 0; m < MB; m++)
#pragma unroll
    for (int h = 0; h < STORES; h++) {
      int position = (wg * MB + m) * 64 + (thread >> 5) * 16 + (h + odd) * 8, index = first_group(tile) + position / GROUP;
      Group group = group_at(index, s);
      int w = group.w + position % GROUP + (lane >> 2) - odd;
      long long row = (long long)group.n * C::cout * plane + (group.d * s.in_h + group.h) * s.in_w;
      at[m][h] = index < s.groups && w < s.in_w ? row + w : -1;
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
      if constexpr (PAIRED) exchange(v, odd);
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

// Of lanes that have places g and g + 8: an even one's g + 8 for an odd one's g. Both columns of 16 bits together.
static __device__ __forceinline__ void exchange(u32 (&v)[2][2], int odd) {
  if constexpr (NARROW) {
#pragma unroll
    for (int h = 0; h < 2; h++) v[h][0] |= v[h][1] << 16;
  }
#pragma unroll
  for (int c = 0; c < ELEMENT / 2; c++) {
    u32 other = __shfl_xor_sync(0xffffffffu, odd ? v[0][c] : v[1][c], 4);
    v[0][c] = odd ? other : v[0][c];
    v[1][c] = odd ? v[1][c] : other;
  }
}

static __device__ __forceinline__ void consume(char* y, const Sizes& s, const Ring& ring, int wg, int thread) {
  int lane = thread & 31;
  typename Ring::Cursor cursor = {0, 0};
  float acc[MB][COLUMNS / 2];
  u32 own = own_slot(wg, thread);
#pragma unroll 1
  for (int tile = blockIdx.x; tile < s.tiles; tile += gridDim.x) {
    zero(acc);
    u32 behind = 0;                                     // the stage that instructions under way read
#pragma unroll 1
    for (int i = 0; i < STAGES_K; i++, cursor.next()) {
      u32 stage = ring.stage(cursor), weights = uniform(stage + WEIGHTS_AT);
      ring.wait_full(cursor);
#pragma unroll
      for (int row = 0; row < ROWS_B; row++) multiply_row<Pairs>(acc, row, stage + own, weights, behind, lane);
      behind = ring.empty(cursor);
    }
    wgmma_wait<0>();
    give_back(behind, lane);
    if (s.in_w % 2 == 0) store<true>(acc, y, s, tile, wg, thread);
    else store<false>(acc, y, s, tile, wg, thread);
  }
}

static __device__ __forceinline__ void run(const char* packed, char* y, const Sizes& s, const TensorMap& map, u32 memory) {
  const Ring ring = Ring::at(memory, memory + BARRIERS_AT);
  run_block<1, CONSUMERS, 40, 232>(
      [&] { ring.init(1, CONSUMERS * 4); },
      [&] { if (threadIdx.x < 32) produce(map, packed, s, ring, threadIdx.x); },
      [&](int consumer, int thread) {
        consume(y, s, ring, consumer, thread);
      });
}
};

template <class C>
__global__ void __launch_bounds__(Pairs<C>::THREADS, 1)
pairs(const char* __restrict__ packed, const typename Pairs<C>::Type* __restrict__, char* __restrict__ y, int batch, int in_d, int in_h, int in_w,
      int groups_w, int groups, int tiles, const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Pairs<C>::run(packed, y, {batch, in_d, in_h, in_w, groups_w, groups, tiles}, map, shared_address(memory));
}
