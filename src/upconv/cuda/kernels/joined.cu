// Joined: a transposed convolution without strides, NCHW, on tensor cores, whose rows are joined to one: the forward.
// Without padding along W a row of the result is longer than one of the source by as much as the kernel reaches; with as
// many zeros behind each of the source's rows, place f of a slice's results, counted through its rows, has its taps of a
// slice of the kernel at
//
//     f - kh (dilation_h pitch) - kw dilation_w,       pitch: results of a row
//
// of the source's places. So a tile is `places` neighbouring places of whatever rows, of which none is wasted at an
// image's right border, and a channel's results of a tile are neighbours in memory, stored 16 bytes a lane. (`gather`
// has rectangles as tiles: it computes columns beyond the image, and its rows end in the middle of memory's sectors.)
//
// Channels of the result are M, places N: one matrix instruction has all of a consumer's, B is `span` rows of 32 bytes of
// channels, and a tap is another first row. Weights are A, by descriptor, through a ring of `taps_of_stage` taps a stage.
//
// A stage of pixels is a chunk of channels of one slice of the kernel. The copy engine brings the rows of the source
// that a tile and its halo touch to a slot (what lies beyond the source is zeros), and two warps pass them on as
// rows of channels. (One instruction of 256 columns wants 154 registers as the kernel is compiled: 384 threads, two
// warps of which turn, not 512 and six.)
//
// Consumers take whole tiles in turn, so that one stores while another multiplies, and the rings run on from tile to
// tile. One begins to wait for its stages when the other has all of its own: a barrier's parity tells a phase from the
// next, not from the one behind that.
//
// Constants are Joined's C (cuda/gemm/joined.py computes them and explains each); sizes of the input are arguments.
#include "columns.cuh"

template <class C_>
struct Joined : PacksUnits<Joined<C_>> {
using C = C_;
using Number = NumberOf<C::precision>;
using Type = typename Number::Type;

static constexpr int ELEMENT = Number::SIZE;
static constexpr bool NARROW = ELEMENT == 2;            // of 16 bits
static constexpr int VEC = 16 / ELEMENT;
static constexpr int PLACES = C::places;
static constexpr int CK = 32 / ELEMENT;                 // channels of a chunk: a matrix instruction takes 32 bytes of K
static constexpr int CHUNKS = (C::cin + CK - 1) / CK;
static constexpr int ROWS_M = 64;
static constexpr int BLOCKS_M = (C::cout + ROWS_M - 1) / ROWS_M;
static constexpr int TAPS = C::kernel_h * C::kernel_w;  // of a slice
static constexpr int STAGES_OF_SLICE = (TAPS + C::taps_of_stage - 1) / C::taps_of_stage;
static constexpr int TAP_BYTES = ROWS_M * 32;
static constexpr int STAGE_BYTES = C::span * 32;
static constexpr int WEIGHT_BYTES = C::taps_of_stage * TAP_BYTES;
static constexpr int OUT_SPAN = 512;                    // bytes of a channel that are stored at a time
static constexpr int OUT_PLACES = OUT_SPAN / ELEMENT;
static constexpr int OUT_PITCH = OUT_SPAN + (NARROW ? 16 : 32);  // so that channels meet different banks, and begin as late as in memory
static constexpr int OUT_BYTES = 8 * OUT_PITCH;         // of a warp: eight channels

static constexpr int CONSUMERS = 2, TURNERS = 2;
static constexpr int THREADS = 128 + CONSUMERS * 128;
static constexpr int LANES = C::warps_of_stage * 32;    // of those that turn a stage

using Stages = RingOf<C::stages, STAGE_BYTES>;
using Slots = RingOf<C::slots, C::slot_bytes>;          // [channel][row][column]; of 16 bits boxes of 64 columns as Turn16 has them
using Weights = RingOf<C::weight_stages, WEIGHT_BYTES>;
static constexpr int WEIGHTS_AT = Slots::BYTES;         // whole 256 bytes, of 16 bits 1,024
static constexpr int STAGES_AT = WEIGHTS_AT + Weights::BYTES;  // whole 256
static constexpr int BUFFERS_AT = STAGES_AT + Stages::BYTES;
static constexpr int BARRIERS_AT = BUFFERS_AT + CONSUMERS * 4 * OUT_BYTES;
static constexpr int TURNS_AT = BARRIERS_AT + Stages::BARRIER_BYTES + Slots::BARRIER_BYTES + Weights::BARRIER_BYTES;
static constexpr int TRASH_AT = TURNS_AT + 8 * CONSUMERS;
static_assert(TRASH_AT + 16 == C::shared_bytes, "the planner's shared memory is not the kernel's");

struct Memory {                                         // of a block; the rings' barriers are one behind the other
  Stages stages;
  Slots slots;
  Weights weights;
  u32 buffers, turns, trash;
};
static __device__ __forceinline__ Memory memory_at(u32 a) {
  u32 full = a + BARRIERS_AT, landed = full + Stages::BARRIER_BYTES, full_w = landed + Slots::BARRIER_BYTES;
  return {Stages::at(a + STAGES_AT, full), Slots::at(a, landed), Weights::at(a + WEIGHTS_AT, full_w), a + BUFFERS_AT, a + TURNS_AT, a + TRASH_AT};
}

struct Sizes {
  int in_d, out_d, pitch, plane;                        // pitch, plane: places of a row and of a slice of the result
  int tiles_f, tiles;                                   // of a slice's places; all, times BLOCKS_M
  int rows, columns;                                    // of a slot
};

struct Tile { int n, d, block, f; };                    // image, slice, block of channels, first place

// Neighbouring blocks have the same places.
static __device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  int q = index / BLOCKS_M, slice = q / s.tiles_f;
  return {slice / s.out_d, slice % s.out_d, index % BLOCKS_M, q % s.tiles_f * PLACES};
}
static __device__ __forceinline__ int halo(const Sizes& s) { return (C::kernel_h - 1) * C::dilation_h * s.pitch + (C::kernel_w - 1) * C::dilation_w; }

// The kernel's slices that meet the source's; of others nothing is loaded or multiplied.
struct Slices { int first, count; };
static __device__ __forceinline__ Slices slices_of(const Tile& t, const Sizes& s) {
  int d = t.d + C::padding_d, first = d < s.in_d ? 0 : (d - s.in_d) / C::dilation_d + 1, last = d / C::dilation_d;
  if (last > C::kernel_d - 1) last = C::kernel_d - 1;
  return {first, last < first ? 0 : last - first + 1};
}

// Where a tile's slots begin in the source, and how many of a slot's places lie ahead of the tile's first with its
// halo. Rows ahead of the first are -1 and so on.
struct Corner { int row, ahead; };
static __device__ __forceinline__ Corner corner_of(const Tile& t, const Sizes& s) {
  int f = t.f - halo(s), row = f >= 0 ? f / s.pitch : -((s.pitch - 1 - f) / s.pitch);
  return {row + C::padding_h, f - row * s.pitch};
}
static __device__ __forceinline__ int rows_of(int ahead, int span, const Sizes& s) { return (ahead + span - 1) / s.pitch + 1; }

// --- weights ---------------------------------------------------------------------------------------------------------

static constexpr int PACK_UNITS = BLOCKS_M * CHUNKS * C::kernel_d * TAPS * ROWS_M * 2;
static constexpr int SECOND = C::cout, TAPS_IN_ALL = C::kernel_d * TAPS;

static __device__ __forceinline__ u32 unit_at(int row, int unit) { return row * 32 + ((unit ^ (row >> 2 & 1)) << 4); }  // swizzled

// [block][chunk][slice][tap][channel of the result][32 bytes of channels, swizzled], zeros where there is none of
// either. The weight is (C::cin, C::cout, kernel).
template <class Write>
static __device__ __forceinline__ void pack_unit(int i, const Write& write) {
  int unit = i % 2, row = i / 2 % ROWS_M, rest = i / (2 * ROWS_M), tap = rest % TAPS_IN_ALL, chunk = rest / TAPS_IN_ALL % CHUNKS;
  int cout = rest / (TAPS_IN_ALL * CHUNKS) * ROWS_M + row;
  write((long long)rest * TAP_BYTES + unit_at(row, unit), [=](int e) -> WeightAt {
    int cin = chunk * CK + unit * VEC + e;
    return {cin < C::cin && cout < C::cout, cin, cout, tap};
  });
}

// --- producers: a thread for weights, one for pixels, warps that turn these ------------------------------------------

static __device__ __forceinline__ void bring_weights(const char* __restrict__ packed, const Sizes& s, const Weights& ring) {
  typename Weights::Cursor cursor = {0, 1};             // all are free at first
  wait_for_results();                                   // of `pack`
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    const Tile t = tile_at(index, s);
    const Slices slices = slices_of(t, s);
    const char* from = packed + ((long long)t.block * (CHUNKS * C::kernel_d) + slices.first) * (TAPS * TAP_BYTES);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++, from += (C::kernel_d - slices.count) * (TAPS * TAP_BYTES))
#pragma unroll 1
      for (int slice = 0; slice < slices.count; slice++)
#pragma unroll 1
        for (int tap = 0; tap < TAPS; tap += C::taps_of_stage, cursor.next()) {
          bool all = TAPS % C::taps_of_stage == 0 || TAPS - tap > C::taps_of_stage;
          u32 barrier = ring.full(cursor), bytes = (all ? C::taps_of_stage : TAPS - tap) * TAP_BYTES;
          ring.wait_empty(cursor);
          expect_bytes(barrier, bytes);
          copy_bulk(ring.stage(cursor), from, bytes, barrier);
          from += bytes;
        }
  }
}

// A thread of its own: a copy takes longer where the thread also starts those of weights, or turns pixels
// (docs/experiments.md).
static __device__ __forceinline__ void bring_pixels(const TensorMap& map, const Sizes& s, const Slots& slots) {
  typename Slots::Cursor cursor = {0, 1};
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    const Tile t = tile_at(index, s);
    const Slices slices = slices_of(t, s);
    const Corner corner = corner_of(t, s);
    int first = t.d + C::padding_d - slices.first * C::dilation_d;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll 1
      for (int d = first; d > first - slices.count * C::dilation_d; d -= C::dilation_d, cursor.next()) {
        u32 to = slots.stage(cursor), barrier = slots.full(cursor);
        slots.wait_empty(cursor);
        expect_bytes(barrier, s.rows * s.columns * 32);
        int c = chunk * CK;
        if constexpr (NARROW) {
#pragma unroll 1
          for (int w = 0; w < s.columns; w += 64, to += s.rows * (64 * 32)) load_box(to, map, w, c, corner.row, d, t.n, barrier);
        } else load_box(to, map, 0, corner.row, d, c, t.n, barrier);
      }
  }
}

// A stage is turned by `warps_of_stage`. One warp hides the other's waits and fence (docs/experiments.md); of two slots both
// warps turn each stage. A warp alone may wait for a slot, or for a stage to be free, only where itself saw the one
// before land or filled it: else a parity tells too little. So both rings have a multiple of the warps.
static_assert(C::warps_of_stage == TURNERS || (C::warps_of_stage == 1 && C::slots % TURNERS == 0 && C::stages % TURNERS == 0),
              "a slot and a stage are one warp's");

// What a slot has, from its place `ahead` on, as rows of CK channels: `locate` is for a tile, `turn` for each of its stages. Loads of
// several places come before their stores, so that a thread waits for memory once, not once a place (docs/experiments.md).

// Places behind rows, which no slot has.
struct Gaps {
  int behind, count, at, column, more, columns;         // of a row, of a stage; a lane's first, and its way to the next
  __device__ __forceinline__ void locate(const Sizes& s, int ahead, int span, int lane) {
    behind = s.pitch - s.columns, count = rows_of(ahead, span, s) * behind;
    if (behind == 0) return;
    column = lane % behind, at = lane / behind * s.pitch + s.columns + column - ahead;
    columns = LANES % behind, more = LANES / behind * s.pitch + columns;
  }
  __device__ __forceinline__ void clear(const Sizes& s, int span, u32 stage, int lane) const {
#pragma unroll 1
    for (int i = lane, p = at, w = column; i < count; i += LANES) {
      if ((u32)p < (u32)span) {
        store_shared_128(stage + p * 32, 0, 0, 0, 0);
        store_shared_128(stage + p * 32 + 16, 0, 0, 0, 0);
      }
      p += more, w += columns;
      if (w >= behind) w -= behind, p += s.columns;
    }
  }
};

// 16 bits: [box][row][channel][column, swizzled]. Matrices of 8 columns and 8 channels: 8 places of a row, to which a lane gives each its
// address; `trash` where there is none.
struct Turn16 {
  int rows;
  __device__ __forceinline__ void locate(const Sizes& s, int ahead, int span, int lane) { rows = rows_of(ahead, span, s); }
  __device__ __forceinline__ void turn(const Sizes& s, int ahead, int span, u32 slot, u32 stage, u32 trash, int lane) const {
    int half = lane >> 3 & 1, own = lane & 7, second = lane >> 4 & 1;
    u32 from = slot + (half * 8 + own) * 128;
#pragma unroll 1
    for (int w = second * 8 + own; w < s.columns; w += 64, from += s.rows * (CK * 128)) {
#pragma unroll 1
      for (int row = lane >> 5; row < rows; row += C::warps_of_stage) {
        int p = row * s.pitch + w - ahead;
        u32 at = from + row * (CK * 128), to = stage + unit_at(p, half);  // of others, 16 places on, 512 bytes further
        u32 v[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++) load_matrices_turned(v[j], at + ((j * 2 + second ^ own) << 4));
#pragma unroll
        for (int j = 0; j < 4; j++) store_matrices((u32)(p + j * 16) < (u32)span && w + j * 16 < s.pitch ? to + j * 512 : trash, v[j]);
      }
    }
  }
};

// Float32. A lane a pixel of a channel, so that loads are constants apart, and loads and stores meet all banks; `to`: where a stage has its
// place, ~0: nowhere. Lanes behind the last pixel load what is none: of the last slot's last channel, weights. The engine has rounded to TF32.
struct Turn32 {
  static constexpr int OWN_PIXELS = (C::span + LANES - 1) / LANES, AT_ONCE = 3;
  int first;                                            // pixel: of the first place, or the next behind it
  u32 to[OWN_PIXELS];
  __device__ __forceinline__ void locate(const Sizes& s, int ahead, int span, int lane) {
    first = ahead < s.columns ? ahead : s.columns;
#pragma unroll
    for (int k = 0; k < OWN_PIXELS; k++) {
      int i = first + lane + k * LANES, row = i / s.columns, p = i + row * (s.pitch - s.columns) - ahead;
      to[k] = p < span ? unit_at(p, 0) : ~0u;
    }
  }
  __device__ __forceinline__ void turn(const Sizes& s, int, int, u32 slot, u32 stage, u32, int lane) const {
    u32 from[8];
#pragma unroll
    for (int c = 0; c < 8; c++) {
      from[c] = slot + (c * s.rows * s.columns + first + lane) * 4;
      opaque(from[c]);
    }
#pragma unroll
    for (int k = 0; k < OWN_PIXELS; k += AT_ONCE) {
      if (to[k] == ~0u) break;
      u32 v[AT_ONCE][8];
#pragma unroll
      for (int i = 0; i < AT_ONCE && k + i < OWN_PIXELS; i++)
#pragma unroll
        for (int c = 0; c < 8; c++) v[i][c] = load_shared_u32(from[c] + (k + i) * (LANES * 4));
#pragma unroll
      for (int i = 0; i < AT_ONCE && k + i < OWN_PIXELS; i++) {
        if (to[k + i] == ~0u) break;
        store_shared_128(stage + to[k + i], v[i][0], v[i][1], v[i][2], v[i][3]);
        store_shared_128(stage + to[k + i] ^ 16, v[i][4], v[i][5], v[i][6], v[i][7]);
      }
    }
  }
};

template <class Turn>
static __device__ __forceinline__ void turn_pixels(const Sizes& s, const Memory& memory, int thread) {
  typename Slots::Cursor slot = {0, 0};
  typename Stages::Cursor stage = {0, 1};
  int turn_of = 0, warp = C::warps_of_stage > 1 ? 0 : thread >> 5, lane = thread % LANES, span = PLACES + halo(s);
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    const Tile t = tile_at(index, s);
    int ahead = corner_of(t, s).ahead;
    Turn own;
    Gaps gaps;
    own.locate(s, ahead, span, lane);
    gaps.locate(s, ahead, span, lane);
#pragma unroll 1
    for (int i = CHUNKS * slices_of(t, s).count; i > 0; i--, slot.next(), stage.next()) {
      bool others = turn_of != warp;
      if (C::warps_of_stage == 1) turn_of = (turn_of + 1) % TURNERS;
      if (others) continue;
      memory.slots.wait_full(slot);
      memory.stages.wait_empty(stage);
      own.turn(s, ahead, span, memory.slots.stage(slot), memory.stages.stage(stage), memory.trash, lane);
      gaps.clear(s, span, memory.stages.stage(stage), lane);
      fence_async_shared();
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(memory.stages.full(stage));
      if (thread % 32 == 0) barrier_arrive(memory.slots.empty(slot));
    }
  }
}

// --- consumers -------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ u32 lower(u32 address) { return address >> 4 | 1u << 16; }

// A thread's sums: of channels g and g + 8 of its warp's 16, places 8j + 2t and the next. The buffer has a channel's as
// many bytes late as they begin in 16 of memory, so that lanes store whole 16, an instruction a channel's; up to three
// words at either end follow. The copy engine would be slower: it takes a copy for each channel (docs/experiments.md).
static __device__ __forceinline__ void store(
    const float (&acc)[PLACES / 2], const Type* __restrict__ bias, char* __restrict__ y, const Sizes& s, const Tile& t, u32 buffer, int warp, int lane) {
  int g = lane >> 2, q = lane & 3, block = t.block * ROWS_M + warp * 16;
  int left = (s.plane - t.f < PLACES ? s.plane - t.f : PLACES) * ELEMENT;
  long long plane = (long long)s.out_d * s.plane * ELEMENT;  // of a channel
  y += ((long long)t.n * C::cout + block) * plane + ((long long)t.d * s.plane + t.f) * ELEMENT;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int channel = block + 8 * h + g;
    float b = bias && channel < C::cout ? Number::value(bias[channel]) : 0.f;
    char* to = y + 8 * h * plane;
    u32 late = (u32)(u64)(to + g * plane) & 15, from = buffer + g * OUT_PITCH;
#pragma unroll
    for (int first = 0; first < PLACES; first += OUT_PLACES, to += OUT_SPAN) {
      const int most = (PLACES - first < OUT_PLACES ? PLACES - first : OUT_PLACES) * ELEMENT;
      int bytes = left - first * ELEMENT < most ? left - first * ELEMENT : most;
#pragma unroll
      for (int j = 0; j < OUT_PLACES / 8; j++) {
        if (first + 8 * j >= PLACES) break;
        u32 at = from + late + (8 * j + 2 * q) * ELEMENT;
        const int i = 4 * (j + first / 8) + 2 * h;
        float v = acc[i] + b, w = acc[i + 1] + b;
        if constexpr (NARROW) store_shared_u32(at, Number::pair(v, w));
        else store_shared_f32x2(at, v, w);
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 8; r++) {
        char* line = to + r * plane;
        u32 begins = (u32)(u64)line & 15, at = ((begins + 15) & 16) + lane * 16, v[4];
        bool ok = (int)at + 16 <= (int)begins + bytes && block + 8 * h + r < C::cout;
        load_shared_128(v, buffer + r * OUT_PITCH + (ok ? at : 0));
        store_global_128_if(line - begins + at, v, ok);
      }
      int end = (int)late + bytes, a = (late + 15) & 16, z = end & ~15, head = late + q * 4, tail = z + q * 4;
      char* line = to + g * plane - late;
      bool heads = channel < C::cout && head < a && head < end, tails = channel < C::cout && tail >= a && tail < end;
      store_global_if(line + head, load_shared_u32_if(from + head, heads), heads);
      store_global_if(line + tail, load_shared_u32_if(from + tail, tails), tails);
      __syncwarp();
    }
  }
}

// Adds what `COUNT` taps of a stage give, from one on, as far as there are such.
template <int COUNT>
static __device__ __forceinline__ void multiply_taps(float (&acc)[PLACES / 2], u32 of_taps, u32 pixels, int first, int shift_h) {
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    const int tap = first + k;
    u64 a = ROWS_OF<32> | (u64)(of_taps + k * (TAP_BYTES / 16));
    u64 b = ROWS_OF<32> | (u64)(pixels - tap / C::kernel_w * shift_h - tap % C::kernel_w * (C::dilation_w * 2));
    if (tap < TAPS) WgmmaOf<PLACES>::template multiply<C::precision, false, false, true>(acc, a, b);
  }
}

static __device__ __forceinline__ void consume(const Type* bias, char* y, const Sizes& s, const Memory& memory, int own, int thread) {
  int lane = thread & 31, warp = thread >> 5;
  typename Stages::Cursor stage = {0, 0};
  typename Weights::Cursor weights = {0, 0};
  u32 parity = 0, buffer = memory.buffers + (own * 4 + warp) * OUT_BYTES;
  int shift_h = C::dilation_h * s.pitch * 2, begin = halo(s) * 2;  // in 16 bytes
  if (own == 1 && lane == 0) barrier_arrive(memory.turns);  // the first turn is the other's
#pragma unroll 1
  for (int index = blockIdx.x, of = 0; index < s.tiles; index += gridDim.x, of ^= 1) {
    const Tile t = tile_at(index, s);
    int count = CHUNKS * slices_of(t, s).count;
    if (of != own) {
      stage.move(count);
      weights.move(count * STAGES_OF_SLICE);
      continue;
    }
    float acc[PLACES / 2];
    zero(acc);
    barrier_wait(memory.turns + own * 8, parity);
    parity ^= 1;
    u32 behind = 0, behind_w = 0;                       // the stages that instructions under way read
#pragma unroll 1
    for (int i = 0; i < count; i++, stage.next()) {
      u32 pixels = uniform(lower(memory.stages.stage(stage)) + begin);
      memory.stages.wait_full(stage);
#pragma unroll
      for (int part = 0; part < STAGES_OF_SLICE; part++, weights.next()) {
        u32 of_taps = uniform(lower(memory.weights.stage(weights)));
        memory.weights.wait_full(weights);
        wgmma_fence();
        multiply_taps<C::taps_of_stage>(acc, of_taps, pixels, part * C::taps_of_stage, shift_h);
        wgmma_commit();
        wgmma_wait<1>();
        give_back(behind_w, lane);
        if (part == 0) give_back(behind, lane);
        behind_w = memory.weights.empty(weights);
      }
      behind = memory.stages.empty(stage);
    }
    __syncwarp();                                       // of a tile without stages lanes have only waited for its turn
    if (lane == 0) barrier_arrive(memory.turns + (own ^ 1) * 8);
    wgmma_wait<0>();
    give_back(behind_w, lane);
    give_back(behind, lane);
    store(acc, bias, y, s, t, buffer, warp, lane);
  }
}

static __device__ __forceinline__ void run(const char* packed, const Type* bias, char* y, const Sizes& s, const TensorMap& map, u32 address) {
  const Memory memory = memory_at(address);
  run_block<1, CONSUMERS, 96, 200>(
      [&] {
        memory.stages.init(C::warps_of_stage, 4);
        memory.slots.init(1, C::warps_of_stage);
        memory.weights.init(1, 4);
        for (int i = 0; i < CONSUMERS; i++) barrier_init(memory.turns + 8 * i, 4);
      },
      [&] {
        constexpr int TURNER_THREADS = TURNERS * 32;
        if constexpr (NARROW) {
          if (threadIdx.x < TURNER_THREADS) turn_pixels<Turn16>(s, memory, threadIdx.x);
        } else {
          if (threadIdx.x < TURNER_THREADS) turn_pixels<Turn32>(s, memory, threadIdx.x);
        }
        if (threadIdx.x == TURNER_THREADS) bring_pixels(map, s, memory.slots);
        if (threadIdx.x == TURNER_THREADS + 32) bring_weights(packed, s, memory.weights);
      },
      [&](int consumer, int thread) { consume(bias, y, s, memory, consumer, thread); });
}
};

template <class C>
__global__ void __launch_bounds__(Joined<C>::THREADS, 1)
joined(const char* __restrict__ packed, const typename Joined<C>::Type* __restrict__ bias, char* __restrict__ y, int in_d, int out_d, int pitch,
       int plane, int tiles_f, int tiles, int rows, int columns, const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Joined<C>::run(packed, bias, y, {in_d, out_d, pitch, plane, tiles_f, tiles, rows, columns}, map, shared_address(memory));
}
