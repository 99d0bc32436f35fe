// Joined: a transposed convolution without strides, NCHW, on tensor cores, whose rows are joined to one: forward, or
// (FLIPPED) the gradient for the input, which is the same with flipped taps. Without padding along W a row of the
// result is longer than one of the source by as much as the kernel reaches; with as many zeros behind each of the
// source's rows, place f of a slice's results, counted through its rows, has its taps of a slice of the kernel at
//
//     f - kh (DILATION_H pitch) - kw DILATION_W,       pitch: results of a row
//
// of the source's places. So a tile is PLACES neighbouring places of whatever rows, of which none is wasted at an
// image's right border, and a channel's results of a tile are neighbours in memory, stored 16 bytes a lane. (`gather`
// has rectangles as tiles: it computes columns beyond the image, and its rows end in the middle of memory's sectors.)
// LINE: one row of any length, of which a tile reads its part, and any padding.
//
// Channels of the result are M, places N: one matrix instruction has all of a consumer's, B is SPAN rows of 32 bytes of
// channels, and a tap is another first row. Weights are A, by descriptor, through a ring of TAPS_OF_STAGE taps a stage.
//
// A stage of pixels is a chunk of channels of one slice of the kernel. The copy engine brings the rows of the source
// that a tile and its halo touch to a slot (what lies beyond the source is zeros), and TURNERS warps pass them on as
// rows of channels. (One instruction of 256 columns wants 154 registers as the kernel is compiled: 384 threads, two
// warps of which turn, not 512 and six.)
//
// Consumers take whole tiles in turn, so that one stores while another multiplies, and the rings run on from tile to
// tile. One begins to wait for its stages when the other has all of its own: a barrier's parity tells a phase from the
// next, not from the one behind that.
//
// Constants come as macros (cuda/gemm/joined.py computes them and explains each); sizes of the input are arguments.
#include "ptx.cuh"
#define A_SHARED 1
#include "wgmma.cuh"

#include "numbers.cuh"

#define VEC (16 / ELEMENT)
#include "columns.cuh"
#include "ring.cuh"

#define CK (32 / ELEMENT)                               // channels of a chunk: a matrix instruction takes 32 bytes of K
#define CHUNKS ((CIN + CK - 1) / CK)
#define ROWS_M 64
#define BLOCKS_M ((COUT + ROWS_M - 1) / ROWS_M)
#define TAPS (KERNEL_H * KERNEL_W)                      // of a slice
#define STAGES_OF_SLICE ((TAPS + TAPS_OF_STAGE - 1) / TAPS_OF_STAGE)
#define TAP_BYTES (ROWS_M * 32)
#define STAGE_BYTES (SPAN * 32)
#define WEIGHT_BYTES (TAPS_OF_STAGE * TAP_BYTES)
#if ELEMENT == 2
#define BOX_COLUMNS 64
#define BOX_BYTES (ROWS * CK * 128)                     // [row][channel][column, swizzled]
#else
#define BOX_COLUMNS (BOX_W / BOXES)
#define CHANNEL_BYTES (ROWS * BOX_COLUMNS * 4)
#define BOX_BYTES (CK * CHANNEL_BYTES)                  // [channel][row][column]
#endif
#define SLOT_BYTES (BOXES * BOX_BYTES)
#define OUT_SPAN 512                                    // bytes of a channel that are stored at a time
#define OUT_PLACES (OUT_SPAN / ELEMENT)
#define OUT_PITCH (OUT_SPAN + (ELEMENT == 4 ? 32 : 16))  // so that channels meet different banks, and begin as late as in memory
#define OUT_BYTES (8 * OUT_PITCH)                       // of a warp: eight channels

#define CONSUMERS 2
#define TURNERS 2
#define TURNER_THREADS (TURNERS * 32)
#define THREADS (128 + CONSUMERS * 128)

struct Sizes {
  int in_d, out_d, pitch, plane;                        // pitch, plane: places of a row and of a slice of the result
  int tiles_f, tiles;                                   // of a slice's places; all, times BLOCKS_M
};

struct Tile { int n, d, block, f; };                    // image, slice, block of channels, first place

// Neighbouring blocks have the same places.
__device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  int q = index / BLOCKS_M, slice = q / s.tiles_f;
  return {slice / s.out_d, slice % s.out_d, index % BLOCKS_M, q % s.tiles_f * PLACES};
}
__device__ __forceinline__ int halo(const Sizes& s) { return (KERNEL_H - 1) * DILATION_H * s.pitch + (KERNEL_W - 1) * DILATION_W; }

// The kernel's slices that meet the source's; of others nothing is loaded or multiplied.
struct Slices { int first, count; };
__device__ __forceinline__ Slices slices_of(const Tile& t, const Sizes& s) {
  int d = t.d + PADDING_D, first = d < s.in_d ? 0 : (d - s.in_d) / DILATION_D + 1, last = d / DILATION_D;
  if (last > KERNEL_D - 1) last = KERNEL_D - 1;
  return {first, last < first ? 0 : last - first + 1};
}

// Where a tile's slots begin in the source, and how many of a slot's places lie ahead of the tile's first with its
// halo. Rows ahead of the first are -1 and so on; LINE: a box begins at 16 bytes.
struct Corner { int row, w, ahead; };
__device__ __forceinline__ Corner corner_of(const Tile& t, const Sizes& s) {
  int f = t.f - halo(s);
#if LINE
  f += PADDING_W;
  return {0, f & ~(VEC - 1), f & (VEC - 1)};
#else
  int row = f >= 0 ? f / s.pitch : -((s.pitch - 1 - f) / s.pitch);
  return {row + PADDING_H, 0, f - row * s.pitch};
#endif
}
__device__ __forceinline__ int rows_of(int ahead, int span, const Sizes& s) { return LINE ? 1 : (ahead + span - 1) / s.pitch + 1; }

// =====================================================================================================================
// Weights
// =====================================================================================================================

#define PACK_UNITS (BLOCKS_M * CHUNKS * KERNEL_D * TAPS * ROWS_M * 2)

__device__ __forceinline__ u32 unit_at(int row, int unit) { return row * 32 + ((unit ^ (row >> 2 & 1)) << 4); }  // swizzled

// [block][chunk][slice][tap][channel of the result][32 bytes of channels, swizzled], zeros where there is none of
// either; a thread writes 16 bytes. The weight is (CIN, COUT, kernel), FLIPPED (COUT, CIN, kernel): contiguous, or
// channels-last, whose taps are `tap_step` elements apart.
template <class Weight>
__device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  let_dependent_begin();                                // `joined`
  int i = blockIdx.x * PACK_THREADS + threadIdx.x;
  if (i >= PACK_UNITS) return;
  constexpr int KERNEL = KERNEL_D * TAPS, SECOND = FLIPPED ? CIN : COUT;
  int unit = i % 2, row = i / 2 % ROWS_M, rest = i / (2 * ROWS_M), tap = rest % KERNEL, chunk = rest / KERNEL % CHUNKS;
  int cout = rest / (KERNEL * CHUNKS) * ROWS_M + row;
  if (FLIPPED) tap = KERNEL - 1 - tap;
  u32 v[VEC];
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    int cin = chunk * CK + unit * VEC + e, first = FLIPPED ? cout : cin, second = FLIPPED ? cin : cout;
    int at = first * (SECOND * KERNEL) + (tap_step == 1 ? second * KERNEL + tap : tap * tap_step + second);
    v[e] = cin < CIN && cout < COUT ? operand(weight[at]) : 0;
  }
  write_operands(packed + (long long)rest * TAP_BYTES + unit_at(row, unit), v);
}

#include "columns_pack.cuh"

// =====================================================================================================================
// Producers: a thread for weights, one for pixels, warps that turn these
// =====================================================================================================================

typedef CursorOf<STAGES_S> SlotCursor;
typedef CursorOf<STAGES_W> WeightCursor;

__device__ __forceinline__ void bring_weights(const char* __restrict__ packed, const Sizes& s, u32 ring, u32 full, u32 empty) {
  WeightCursor cursor = {0, 1};                         // all are free at first
  wait_for_results();                                   // of `pack`
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    const Tile t = tile_at(index, s);
    const Slices slices = slices_of(t, s);
    const char* from = packed + ((long long)t.block * (CHUNKS * KERNEL_D) + slices.first) * (TAPS * TAP_BYTES);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++, from += (KERNEL_D - slices.count) * (TAPS * TAP_BYTES))
#pragma unroll 1
      for (int slice = 0; slice < slices.count; slice++)
#pragma unroll 1
        for (int tap = 0; tap < TAPS; tap += TAPS_OF_STAGE, cursor.next()) {
          u32 barrier = full + cursor.stage * 8, bytes = (TAPS % TAPS_OF_STAGE == 0 || TAPS - tap > TAPS_OF_STAGE ? TAPS_OF_STAGE : TAPS - tap) * TAP_BYTES;
          barrier_wait(empty + cursor.stage * 8, cursor.parity);
          expect_bytes(barrier, bytes);
          copy_bulk(ring + cursor.stage * WEIGHT_BYTES, from, bytes, barrier);
          from += bytes;
        }
  }
}

// A thread of its own: a copy takes longer where the thread also starts those of weights, or turns pixels
// (docs/experiments.md).
__device__ __forceinline__ void bring_pixels(const TensorMap& map, const Sizes& s, u32 slots, u32 landed, u32 left) {
  SlotCursor cursor = {0, 1};
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    const Tile t = tile_at(index, s);
    const Slices slices = slices_of(t, s);
    const Corner corner = corner_of(t, s);
    int first = t.d + PADDING_D - slices.first * DILATION_D;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll 1
      for (int d = first; d > first - slices.count * DILATION_D; d -= DILATION_D, cursor.next()) {
        u32 to = slots + cursor.stage * SLOT_BYTES, barrier = landed + cursor.stage * 8;
        barrier_wait(left + cursor.stage * 8, cursor.parity);
        expect_bytes(barrier, SLOT_BYTES);
#pragma unroll
        for (int b = 0; b < BOXES; b++) {
          int w = corner.w + b * BOX_COLUMNS, c = chunk * CK;
          load_box(to + b * BOX_BYTES, map, w, ELEMENT == 2 ? c : corner.row, ELEMENT == 2 ? corner.row : d, ELEMENT == 2 ? d : c, t.n, barrier);
        }
      }
  }
}

// A stage is turned by WARPS_OF_STAGE. One warp hides the other's waits and fence (docs/experiments.md); of two slots both
// warps turn each stage. A warp alone may wait for a slot, or for a stage to be free, only where itself saw the one
// before land or filled it: else a parity tells too little. So both rings have a multiple of the warps.
static_assert(WARPS_OF_STAGE == TURNERS || (WARPS_OF_STAGE == 1 && STAGES_S % TURNERS == 0 && STAGES % TURNERS == 0), "a slot and a stage are one warp's");
#define LANES (WARPS_OF_STAGE * 32)
#define OWN_PIXELS ((SPAN + LANES - 1) / LANES)
#define AT_ONCE 3

// What a slot has, from its place `ahead` on, as rows of CK channels. Loads of several places come before their stores,
// so that a thread waits for memory once, not once a place (docs/experiments.md).
#if ELEMENT == 2
// Matrices of 8 columns and 8 channels: 8 places of a row, to which a lane gives each its address; `trash` where there
// is none. `zeros`: the lane's first place of those behind a row that no box has; `lane`: of the stage's warps.
__device__ __forceinline__ void turn(const Sizes& s, int ahead, int span, int rows, int zeros, u32 slot, u32 stage, u32 trash, int lane) {
  int half = lane >> 3 & 1, own = lane & 7, second = lane >> 4 & 1;
  u32 from = slot + (half * 8 + own) * 128;
#pragma unroll 1
  for (int i = lane >> 5; i < rows * BOXES; i += WARPS_OF_STAGE) {  // a row's box
    int row = i / BOXES, box = i % BOXES, w = box * 64 + second * 8 + own, p = row * (LINE ? 0 : s.pitch) + w - ahead;
    u32 at = from + (box * ROWS + row) * (CK * 128), to = stage + unit_at(p, half);  // of others, 16 places on, 512 bytes further
    u32 v[4][4];
#pragma unroll
    for (int j = 0; j < 4; j++) load_matrices_turned(v[j], at + ((j * 2 + second ^ own) << 4));
#pragma unroll
    for (int j = 0; j < 4; j++) store_matrices((u32)(p + j * 16) < (u32)span && (LINE || w + j * 16 < s.pitch) ? to + j * 512 : trash, v[j]);
  }
#if !LINE
  int behind = s.pitch - BOX_W;
#pragma unroll 1
  for (int i = lane, at = zeros; i < rows * behind;) {
    if ((u32)at < (u32)span) {
      store_shared_128(stage + at * 32, 0, 0, 0, 0);
      store_shared_128(stage + at * 32 + 16, 0, 0, 0, 0);
    }
    if ((i += LANES) < rows * behind) at = i / behind * s.pitch + BOX_W + i % behind - ahead;
  }
#endif
}
#else
// A lane a place, so that loads and stores meet all banks; `from`: where a slot has its places, ~0: nowhere. The engine
// has rounded to TF32.
__device__ __forceinline__ void turn(const u32 (&from)[OWN_PIXELS], int span, u32 slot, u32 stage, int lane) {
#pragma unroll
  for (int first = 0; first < OWN_PIXELS; first += AT_ONCE) {
    u32 v[AT_ONCE][8];
#pragma unroll
    for (int i = 0; i < AT_ONCE && first + i < OWN_PIXELS; i++)
#pragma unroll
      for (int c = 0; c < 8; c++) v[i][c] = load_shared_u32_if(slot + from[first + i] + c * CHANNEL_BYTES, from[first + i] != ~0u);
#pragma unroll
    for (int i = 0; i < AT_ONCE && first + i < OWN_PIXELS; i++) {
      int p = lane + (first + i) * LANES;
      if (p >= span) break;
      store_shared_128(stage + unit_at(p, 0), v[i][0], v[i][1], v[i][2], v[i][3]);
      store_shared_128(stage + unit_at(p, 1), v[i][4], v[i][5], v[i][6], v[i][7]);
    }
  }
}
#endif

__device__ __forceinline__ void turn_pixels(const Sizes& s, u32 slots, u32 landed, u32 left, u32 stages, u32 full, u32 empty, u32 trash, int thread) {
  SlotCursor slot = {0, 0};
  Cursor stage = {0, 1};
  int turn_of = 0, warp = WARPS_OF_STAGE > 1 ? 0 : thread >> 5, lane = thread % LANES, span = PLACES + halo(s);
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    const Tile t = tile_at(index, s);
    int ahead = corner_of(t, s).ahead;
#if ELEMENT == 2
    int rows = rows_of(ahead, span, s), behind = s.pitch - BOX_W, zeros = 0;
    if (!LINE && behind > 0) zeros = lane / behind * s.pitch + BOX_W + lane % behind - ahead;
#else
    u32 from[OWN_PIXELS];
#pragma unroll
    for (int k = 0; k < OWN_PIXELS; k++) {
      int p = lane + k * LANES, row = LINE ? 0 : (ahead + p) / s.pitch, w = ahead + p - row * s.pitch;
      from[k] = w < BOX_W && p < span ? w / BOX_COLUMNS * BOX_BYTES + (row * BOX_COLUMNS + w % BOX_COLUMNS) * 4 : ~0u;
    }
#endif
#pragma unroll 1
    for (int i = CHUNKS * slices_of(t, s).count; i > 0; i--, slot.next(), stage.next()) {
      bool others = turn_of != warp;
      if (WARPS_OF_STAGE == 1) turn_of = (turn_of + 1) % TURNERS;
      if (others) continue;
      barrier_wait(landed + slot.stage * 8, slot.parity);
      barrier_wait(empty + stage.stage * 8, stage.parity);
#if ELEMENT == 2
      turn(s, ahead, span, rows, zeros, slots + slot.stage * SLOT_BYTES, stages + stage.stage * STAGE_BYTES, trash, lane);
#else
      turn(from, span, slots + slot.stage * SLOT_BYTES, stages + stage.stage * STAGE_BYTES, lane);
#endif
      fence_async_shared();
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(full + stage.stage * 8);
      if (thread % 32 == 0) barrier_arrive(left + slot.stage * 8);
    }
  }
}

// =====================================================================================================================
// Consumers
// =====================================================================================================================

#define UPPER ((u64)(256 >> 4) << 32 | (u64)3 << 62)    // rows of 32 bytes, swizzled; groups of 8 lie one behind the other

__device__ __forceinline__ u32 lower(u32 address) { return address >> 4 | 1u << 16; }

// A thread's sums: of channels g and g + 8 of its warp's 16, places 8j + 2t and the next. The buffer has a channel's as
// many bytes late as they begin in 16 of memory, so that lanes store whole 16, an instruction a channel's; up to three
// words at either end follow. The copy engine would be slower: it takes a copy for each channel (docs/experiments.md).
__device__ __forceinline__ void store(const float (&acc)[PLACES / 2], const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, const Sizes& s, const Tile& t, u32 buffer, int warp, int lane) {
  int g = lane >> 2, q = lane & 3, block = t.block * ROWS_M + warp * 16;
  int left = (s.plane - t.f < PLACES ? s.plane - t.f : PLACES) * ELEMENT;
  long long plane = (long long)s.out_d * s.plane * ELEMENT;  // of a channel
  y += ((long long)t.n * COUT + block) * plane + ((long long)t.d * s.plane + t.f) * ELEMENT;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int channel = block + 8 * h + g;
    float b = bias && channel < COUT ? VALUE(bias[channel]) : 0.f;
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
#if ELEMENT == 4
        store_shared_f32x2(at, v, w);
#else
        store_shared_u32(at, PAIR_BITS(v, w));
#endif
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 8; r++) {
        char* line = to + r * plane;
        u32 begins = (u32)(u64)line & 15, at = ((begins + 15) & 16) + lane * 16, v[4];
        bool ok = (int)at + 16 <= (int)begins + bytes && block + 8 * h + r < COUT;
        load_shared_128(v, buffer + r * OUT_PITCH + (ok ? at : 0));
        store_global_128_if(line - begins + at, v, ok);
      }
      int end = (int)late + bytes, a = (late + 15) & 16, z = end & ~15, head = late + q * 4, tail = z + q * 4;
      char* line = to + g * plane - late;
      bool heads = channel < COUT && head < a && head < end, tails = channel < COUT && tail >= a && tail < end;
      store_global_if(line + head, load_shared_u32_if(from + head, heads), heads);
      store_global_if(line + tail, load_shared_u32_if(from + tail, tails), tails);
      __syncwarp();
    }
  }
}

#if QUICK
#define THERE(tap) true
#else
#define THERE(tap) ((tap) < TAPS)
#endif

// Adds what `COUNT` taps of a stage give, from one on, as far as there are such.
template <int COUNT>
__device__ __forceinline__ void multiply_taps(float (&acc)[PLACES / 2], u32 of_taps, u32 pixels, int first, int shift_h) {
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    const int tap = first + k;
    if (THERE(tap)) multiply(acc, UPPER | (u64)(of_taps + k * (TAP_BYTES / 16)), UPPER | (u64)(pixels - tap / KERNEL_W * shift_h - tap % KERNEL_W * (DILATION_W * 2)));
  }
}

__device__ __forceinline__ void consume(const ELEMENT_TYPE* bias, char* y, const Sizes& s, u32 stages, u32 full, u32 empty, u32 ring, u32 full_w, u32 empty_w, u32 turns, u32 buffers, int own, int thread) {
  int lane = thread & 31, warp = thread >> 5;
  Cursor stage = {0, 0};
  WeightCursor weights = {0, 0};
  u32 parity = 0, buffer = buffers + (own * 4 + warp) * OUT_BYTES;
  int shift_h = DILATION_H * s.pitch * 2, begin = halo(s) * 2;  // in 16 bytes
  if (own == 1 && lane == 0) barrier_arrive(turns);    // the first turn is the other's
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
#pragma unroll
    for (int i = 0; i < PLACES / 2; i++) {
      acc[i] = 0.f;
      opaque(acc[i]);
    }
    barrier_wait(turns + own * 8, parity);
    parity ^= 1;
    u32 behind = 0, behind_w = 0;                       // the stages that instructions under way read
#pragma unroll 1
    for (int i = 0; i < count; i++, stage.next()) {
      u32 pixels = uniform(lower(stages + stage.stage * STAGE_BYTES) + begin);
      barrier_wait(full + stage.stage * 8, stage.parity);
#if QUICK                                               // a loop, which compiles faster than straight code
#pragma unroll 1
#else
#pragma unroll
#endif
      for (int part = 0; part < STAGES_OF_SLICE; part++, weights.next()) {
        u32 of_taps = uniform(lower(ring + weights.stage * WEIGHT_BYTES));
        barrier_wait(full_w + weights.stage * 8, weights.parity);
        wgmma_fence();
#if QUICK && TAPS % TAPS_OF_STAGE
        if (part == TAPS / TAPS_OF_STAGE) multiply_taps<TAPS % TAPS_OF_STAGE>(acc, of_taps, pixels, part * TAPS_OF_STAGE, shift_h);
        else
#endif
        multiply_taps<TAPS_OF_STAGE>(acc, of_taps, pixels, part * TAPS_OF_STAGE, shift_h);
        wgmma_commit();
        wgmma_wait<1>();
        give_back(behind_w, lane);
        if (part == 0) give_back(behind, lane);
        behind_w = empty_w + weights.stage * 8;
      }
      behind = empty + stage.stage * 8;
    }
    if (lane == 0) barrier_arrive(turns + (own ^ 1) * 8);
    wgmma_wait<0>();
    give_back(behind_w, lane);
    give_back(behind, lane);
    store(acc, bias, y, s, t, buffer, warp, lane);
  }
}

// =====================================================================================================================

#define SLOTS_AT (STAGES_W * WEIGHT_BYTES)              // whole 1,024 bytes
#define STAGES_AT (SLOTS_AT + STAGES_S * SLOT_BYTES)
#define BUFFERS_AT (STAGES_AT + STAGES * STAGE_BYTES)   // whole 256, as those before
#define BARRIERS_AT (BUFFERS_AT + CONSUMERS * 4 * OUT_BYTES)
#define SHARED_BYTES (BARRIERS_AT + 16 * (STAGES + STAGES_S + STAGES_W) + 8 * CONSUMERS + 16)
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
joined(const char* __restrict__ packed, const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, int in_d, int out_d, int pitch, int plane, int tiles_f, int tiles,
       const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {in_d, out_d, pitch, plane, tiles_f, tiles};
  u32 ring = shared_address(memory), stages = ring + STAGES_AT, slots = ring + SLOTS_AT, buffers = ring + BUFFERS_AT;
  u32 full = ring + BARRIERS_AT, empty = full + 8 * STAGES, landed = empty + 8 * STAGES, left = landed + 8 * STAGES_S;
  u32 full_w = left + 8 * STAGES_S, empty_w = full_w + 8 * STAGES_W, turns = empty_w + 8 * STAGES_W, trash = turns + 8 * CONSUMERS;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, WARPS_OF_STAGE);
      barrier_init(empty + 8 * i, 4);
    }
    for (int i = 0; i < STAGES_S; i++) {
      barrier_init(landed + 8 * i, 1);
      barrier_init(left + 8 * i, WARPS_OF_STAGE);
    }
    for (int i = 0; i < STAGES_W; i++) {
      barrier_init(full_w + 8 * i, 1);
      barrier_init(empty_w + 8 * i, 4);
    }
    for (int i = 0; i < CONSUMERS; i++) barrier_init(turns + 8 * i, 4);
    barriers_begun();
  }
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (role == 0) {
    fewer_registers<96>();
    if (threadIdx.x < TURNER_THREADS) turn_pixels(s, slots, landed, left, stages, full, empty, trash, threadIdx.x);
    if (threadIdx.x == TURNER_THREADS) bring_pixels(map, s, slots, landed, left);
    if (threadIdx.x == TURNER_THREADS + 32) bring_weights(packed, s, ring, full_w, empty_w);
  } else {
    more_registers<200>();
    wait_for_results();                                 // of `pack`: the bias; nor is stored where it may still read
    consume(bias, y, s, stages, full, empty, ring, full_w, empty_w, turns, buffers, role - 1, threadIdx.x & 127);
  }
}
