// Grad-weight by wgmma (sm_90a): dW[ci, co, tap] = sum over images and positions q of x[ci, q] * g[co, q * STEP + tap * DIL - PAD].
//
// The GEMM of wgrad.cu with the operands the other way round. M = 64 rows, an output channel at a tap each (SUBS taps of
// 64 / SUBS channels), N = BLOCK_CI input channels, K = pixels. INTERLEAVED: these taps are neighbours along W, and their rows
// neighbours in M, so that lanes read neighbouring columns of few channels, which meet more banks than columns STEP_W apart of many.
//   A, from registers: g's tile with its halo, read from shared memory at any column, so that a tap is an address. A_SHARED (16-bit
//      rows of 64 channels): by descriptor, at any pixel.
//   B, from shared memory by descriptor: x's tile as the tensor copy engine leaves it. NCHW: rows of a channel's pixels (K-major),
//      rounded to TF32 on the way; CHANNELS_LAST of 16 bits: rows of a pixel's channels (MN-major). TF32 has no MN-major form, so
//      that CHANNELS_LAST float32 is turned by the copying warpgroup (TURN_X).
// g comes by boxes too (BOX_G): by one where its rows lie evenly (G_ONE_BOX; CHANNELS_LAST for each G_WIDTH channels and plane), by
// one for each row, NCHW by one for each class of rows that begin off 16 bytes (CLASSED), or by threads where these are too many.
// Roles: one warpgroup copies, WGS warpgroups multiply: WGS_M of them divide the output channels of a block, the others its taps,
// UNITS x SUBS fragments of A at a time: UNITS neighbours for each of SUBS bands of rows. A unit is a tap; or, STACKED, a column of
// taps: the rows of x that a row of g meets by them follow each other in shared memory, and so are columns of one instruction. Then
// a fragment is read once, not once a tap (NOTES: reads of A take as long as a multiplication by 64 channels, of B half of it).
// STACKED chunks are of rows of g, STEP_H at a time, and it is x's tile that has a halo, so that an instruction always takes all
// of its rows (NOTES: ptxas waits for each one where some that share sums differ in shape, C7511); rows beyond the image are zeros.
//
// K is split over ranges of chunks; each split writes partial sums, `reduce` adds them in the order of their index. Where splits are
// few, their blocks are a CLUSTER, which adds the sums through its shared memory in the same order, and writes the weight itself.
// Where more are, but all blocks run at once (a cooperative launch), those of a tile wait for each other and do it TOGETHER, through
// global memory. A split that is the only one (ALONE) writes the weight from its own shared memory.
#define COPIERS 128
#define CI_INNERMOST 1
#define STACK (STACKED ? (TAPS_H + STEP_H - 1) / STEP_H : 1)  // rows of x that may meet a row of g
#define X_ROWS_H (TILE_H + STACK - 1)
#include "wgrad.cuh"
#include "wgmma.cuh"

#define ROWS_PER_SUB (64 / SUBS)
#if INTERLEAVED
#define NEXT_ROWS (8 / SUBS)               // channels from row g of a warp's sixteen to row g + 8
#define NEXT_UNIT SUBS                     // units from one of a lane's to the next
#else
#define NEXT_ROWS 8
#define NEXT_UNIT 1
#endif
#define WGS_T (WGS / WGS_M)                // warpgroups that divide the taps
#define THREADS ((1 + WGS) * 128)
#define CI_TILES ((CIN_G + BLOCK_CI - 1) / BLOCK_CI)
#define CO_TILES ((COUT_G + BLOCK_CO - 1) / BLOCK_CO)
#define TURN_X (CHANNELS_LAST && ELEMENT == 4)
#define K_MAJOR (!CHANNELS_LAST || TURN_X)
#define N_WIDTH (STACKED && !K_MAJOR && BLOCK_CI > 64 ? 64 : BLOCK_CI)  // of one matrix instruction; STACKED: for each row of x
#define NB (BLOCK_CI / N_WIDTH)
#define OF_UNIT (STACKED ? TAPS_H : 1)     // taps of a unit
#define UNITS (ENTRIES / OF_UNIT)
#define SET_UNITS (SET_TAPS / OF_UNIT)

// x in shared memory. Rows of a channel's pixels (K-major): for each SEGMENT bytes of a row a box of [row][channel][SEGMENT].
// CHANNELS_LAST of 16 bits: for each X_WIDTH channels a box of the chunk's pixels.
#define PIXELS (X_ROWS * TILE_W)
#if !K_MAJOR
#define X_WIDTH (BLOCK_CI % 64 == 0 ? 64 : BLOCK_CI % 32 == 0 ? 32 : 16)  // of a swizzled line
#define SEGMENT (X_WIDTH * ELEMENT)
#define BOXES (BLOCK_CI / X_WIDTH)
#define BOX_BYTES (PIXELS * SEGMENT)
#define X_ROW_BYTES (TILE_W * SEGMENT)     // from one row of the tile to the next
#define STEP_BYTES (16 * SEGMENT)          // and from one step of K to the next
#else
#define LINE_BYTES (TILE_W * (LINES ? TILE_H : 1) * ELEMENT)  // LINES: the image is as wide as a chunk, and its rows one line
#define SEGMENT (LINE_BYTES < 128 ? LINE_BYTES : 128)
#define BOXES (LINE_BYTES / SEGMENT)
#define BOX_BYTES (PIXELS * BLOCK_CI * ELEMENT / BOXES)
#define X_ROW_BYTES (BLOCK_CI * SEGMENT)
#define STEP_BYTES 32
#endif
#define X_TILE_BYTES (BOXES * BOX_BYTES)
#if CHANNELS_LAST
#define G_WIDTH (BLOCK_CO % 64 == 0 && ELEMENT == 2 ? 64 : BLOCK_CO % 32 == 0 ? 32 : 16)  // channels of a box of g, a swizzled row
#define G_BOXES (BLOCK_CO / G_WIDTH)
#if G_ONE_BOX
// GAPLESS: a plane is a tap's pixels. Else: a box brings all rows; PARTED: of a plane, the columns that taps of one remainder by STEP_W read. So a fragment's are neighbours,
// which meet different banks, and columns that no tap reads stay away. Tap t reads plane t % G_PLANES, PLANE_TAPS columns on for each G_PLANES taps.
#define G_BOX_BYTES (PLANE_COLUMNS * G_WIDTH * ELEMENT)                     // of a row
#define PLANE_BYTES ((G_ROWS * G_BOX_BYTES + 127) / 128 * 128)             // where a box may begin
#define G_SLAB_BYTES (G_PLANES * PLANE_BYTES)                               // of G_WIDTH channels
#define G_LINE PLANE_COLUMNS                                                // pixels from row to row
#elif BOX_G
#define G_BOX_BYTES ((G_COLUMNS * G_WIDTH * ELEMENT + 127) / 128 * 128)  // where a box may begin
#define G_SLAB_BYTES (G_ROWS * G_BOX_BYTES)
#define G_LINE (G_BOX_BYTES / (G_WIDTH * ELEMENT))                         // pixels from row to row
#else
#define G_LINE G_COLUMNS
#endif
#else
// CLASSED: rows off 16 bytes, where the tensor copy engine reads none, by a box for each class of rows along H and of channels:
// those of a class begin alike, and are a tensor of their own, whose rows then begin early (its lead).
#define G_CHANNELS (BLOCK_CO / CHANNEL_CLASSES)  // of a class
#define CLASS_BYTES (G_BYTES / CLASSES)
#define G_BOXES 1
#define G_BOX_BYTES (G_CHANNELS * G_PITCH * ELEMENT)
#endif
#if G_LINED                                // 1-D: the map has a channel's row as lines of 128 bytes, of which a box has some
#define G_BEGIN (128 / ELEMENT)            // elements at multiples of which boxes begin
#else
#define G_BEGIN VEC
#endif
#define G_STEP_W (PARTED ? 1 : STEP_W)        // pixels of g's tile from one of q to the next
// From one pixel of g's tile to the next (of NCHW counted in elements), and from one row to the next.
#if !CHANNELS_LAST
#define G_PIXEL_BYTES 1
#define G_ROW_BYTES G_BOX_BYTES
#elif BOX_G
#define G_PIXEL_BYTES (G_WIDTH * ELEMENT)
#define G_ROW_BYTES G_BOX_BYTES
#else
#define G_PIXEL_BYTES (G_PITCH * ELEMENT)
#define G_ROW_BYTES (G_LINE * G_PIXEL_BYTES)
#endif
#define STAGE_BYTES ((X_TILE_BYTES + G_BYTES + 1023) / 1024 * 1024)
#define RAW_AT (STAGES * STAGE_BYTES)       // x's pixels before they are turned
#define RAW_BYTES (TURN_X ? PIXELS * BLOCK_CI * ELEMENT : 0)
#define BARRIERS_AT (RAW_AT + RAW_BYTES)
#define SHARED_BYTES (BARRIERS_AT + 16 * STAGES + 16)
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

#define ADDS_UP (CLUSTER > 1 || TOGETHER || ALONE)
#if ADDS_UP
// A block's sums in shared memory, [tap][ci][co], so that a warp's fragments meet all banks: neighbours along co lie in a row, and
// ci of neighbouring lanes 2 rows apart, 8 banks.
#define SUMS_PITCH (BLOCK_CO + 4)
#define SUM_AT(tap, ci, co) (((tap) * (BLOCK_CI * SUMS_PITCH + 8) + (ci) * SUMS_PITCH + (co)) * 4)  // taps lie 8 banks apart
#define SUMS_BYTES SUM_AT(SET_TAPS, 0, 0)
#if SUMS_BYTES > BARRIERS_AT
#error "a block's sums do not fit where its stages were"
#endif
#endif

#define K_STEPS (PIXELS * ELEMENT / 32)    // a matrix instruction takes 32 bytes of K: a strip of 8 columns, or two of 16-bit types
#define STEPS (K_STEPS * ENTRIES)
#define ROW_STEPS (TILE_W * ELEMENT / 32)  // STACKED: of a row
#define SETS_OF_FRAGMENTS (ELEMENT == 2 && !CHANNELS_LAST && WGS == 3 ? 2 : 3)  // a third set spills there
#define W_STRIPS (TILE_W / 8)
#if GAPLESS && TURN_X && STRETCH != STEPS && STRETCH / ENTRIES % 4
#error "a stretch ends amid a segment of x, where the next one's steps are no sums of places"
#endif

// Half precision, NCHW: K is two pixels a word, and a tap begins at any. Units that are neighbours along W (W_RUN of them) have
// nearly all their words in common, so these are loaded once and shifted in registers.
#define W_RUN (SET_UNITS == TAPS_W ? UNITS : TAPS_W % UNITS == 0 ? UNITS : UNITS % TAPS_W == 0 ? TAPS_W : 1)
// Whether a run begins at odd elements, where that is the same for all.
#define PARITY_KNOWN (ALIGNED_G && STEP_W % 2 == 0 && W_RUN * DIL_W % 2 == 0 && (SETS_W == 1 || TAPS_W * DIL_W % 2 == 0))
#define RUN_WORDS (((PARITY_KNOWN ? PAD_W % 2 : 1) + (W_RUN - 1) * DIL_W + STEP_W) / 2 + 1)
#define SHARED_WORDS (ELEMENT == 2 && !CHANNELS_LAST && !INTERLEAVED && W_RUN > 1 && RUN_WORDS < 2 * W_RUN)

#define CLASSES (ROW_CLASSES * CHANNEL_CLASSES)

struct alignas(64) TensorMap { u64 opaque[16]; };
struct TensorMaps {
  TensorMap x;
#if BOX_G
  TensorMap g[CLASSES];
#endif
};

struct Work {                              // of a block
  int group, ci, co;                       // first channels within the group
  int tap_d, tap_h, tap_w;                 // first tap of the set
};

// =====================================================================================================================
// Copies
// =====================================================================================================================

__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, int a, int b, int c, int d, int e, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];\n"
      ::"r"(to), "l"(map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(barrier) : "memory");
}

#if CLASSED
struct Class {
  int index, lead;                         // its map; elements by which its rows begin early
  int phase;                               // of a tile: elements by which its first column begins off 16 bytes
};

// The class of a row along H and a channel, and a tile of it that begins at column `w`.
__device__ __forceinline__ Class class_of(int row, int channel, int w, const Sizes& s) {
  int of_rows = row & (ROW_CLASSES - 1), of_channels = channel & (CHANNEL_CLASSES - 1);
  int lead = ((u32)of_channels * s.out_d * s.out_h * s.out_w + (u32)of_rows * s.out_w) & (VEC - 1);
  return {of_channels * ROW_CLASSES + of_rows, lead, (w + lead) & (VEC - 1)};
}
#endif

__device__ __forceinline__ void load_boxes(const TensorMap* map_x, const TensorMap* map_g, const Sizes& s, const Chunk& c, const Work& work, u32 to, u32 barrier) {
#if GAPLESS
  const int pixels = s.box_n * s.box_d * s.box_h * s.box_w;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(pixels * (((TURN_X ? 0 : BLOCK_CI) + SET_TAPS * BLOCK_CO) * ELEMENT)) : "memory");
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"((TURN_X ? 0 : X_TILE_BYTES) + (!BOX_G ? 0 : CHANNELS_LAST ? G_ROWS * (G_ONE_BOX ? G_PLANES * PLANE_COLUMNS : G_COLUMNS) * BLOCK_CO * ELEMENT : G_BYTES)) : "memory");
#endif
  int channel = work.group * CIN_G + work.ci;
#if !TURN_X
#pragma unroll 1
  for (int i = 0; i < BOXES; i++) {
#if CHANNELS_LAST
    load_box(to + i * BOX_BYTES, map_x, channel + i * X_WIDTH, c.w, c.h - STACK + 1, c.d, c.n, barrier);
#else
    int w = (LINES ? c.h * TILE_W : c.w) + i * (SEGMENT / ELEMENT);
    load_box(to + i * BOX_BYTES, map_x, w, channel, LINES ? 0 : c.h - STACK + 1, c.d, c.n, barrier);
#endif
  }
#endif
#if BOX_G
  int d = c.d * STEP_D + work.tap_d * DIL_D - PAD_D, h = c.h * STEP_H + work.tap_h * DIL_H - PAD_H, w = c.w * STEP_W + work.tap_w * DIL_W - PAD_W;
  channel = work.group * COUT_G + work.co;
  to += X_TILE_BYTES;
#if CLASSED
#pragma unroll 1
  for (int i = 0; i < CLASSES; i++) {
    int row = h + i % ROW_CLASSES, first = channel + i / ROW_CLASSES;  // of the class in this chunk
    Class at = class_of(row, first, w, s);
    load_box(to + i * CLASS_BYTES, map_g + at.index, w + at.lead - at.phase, first / CHANNEL_CLASSES, (row - (row & (ROW_CLASSES - 1))) / ROW_CLASSES, d, c.n, barrier);
  }
#elif GAPLESS
#pragma unroll 1
  for (int i = 0; i < G_BOXES * SET_TAPS; i++) {
    int tap = i % SET_TAPS, td = tap / (TAPS_H * TAPS_W), th = tap / TAPS_W % TAPS_H, tw = tap % TAPS_W;
    load_box(to + i / SET_TAPS * G_SLAB_BYTES + tap * PLANE_BYTES, map_g, channel + i / SET_TAPS * G_WIDTH, w + tw * DIL_W, h + th * DIL_H, d + td * DIL_D, c.n, barrier);
  }
#elif G_ONE_BOX && CHANNELS_LAST
#pragma unroll 1
  for (int i = 0; i < G_BOXES * G_PLANES; i++)
    load_box(to + i / G_PLANES * G_SLAB_BYTES + i % G_PLANES * PLANE_BYTES, map_g, channel + i / G_PLANES * G_WIDTH, w + i % G_PLANES * DIL_W, h, d, c.n, barrier);
#elif G_LINED
  load_box(to, map_g, 0, (w - (w & (G_BEGIN - 1))) / G_BEGIN, channel, 0, c.n, barrier);
#elif G_ONE_BOX
  load_box(to, map_g, w - (w & (VEC - 1)), channel, h, d, c.n, barrier);
#else
#pragma unroll 1
  for (int r = 0; r < G_ROWS; r++) {
    Rows at = g_row(r);
#if CHANNELS_LAST
    for (int i = 0; i < G_BOXES; i++)
      load_box(to + (i * G_ROWS + r) * G_BOX_BYTES, map_g, channel + i * G_WIDTH, w, h + at.h, d + at.d, c.n + at.n, barrier);
#else
    load_box(to + r * G_BOX_BYTES, map_g, w - (w & (VEC - 1)), channel, h + at.h, d + at.d, c.n + at.n, barrier);
#endif
  }
#endif
#endif
}

// Where step `k_step` of K begins in x's tile. Bits of the step choose rows, segments and what lies in them: sums are of steps as of places.
__device__ __forceinline__ u32 x_at(int k_step) {
#if K_MAJOR
  int line = k_step / (LINE_BYTES / 32), within = k_step % (LINE_BYTES / 32) * 32;
  return within / SEGMENT * BOX_BYTES + line * X_ROW_BYTES + within % SEGMENT;
#else
  return k_step * STEP_BYTES;
#endif
}

#if TURN_X
// Pixels of a strip in the order of K: even ones first, so that a fragment's four lie in different banks of g's swizzled rows
// (they are two rows apart; where a stride already parts them, in their own order).
#define STRIP_PIXEL(j) (G_STEP_W % 2 ? (j) % 4 * 2 + (j) / 4 : (j))

__device__ __forceinline__ void load_raw(const TensorMap* map_x, const Sizes& s, const Chunk& c, const Work& work, u32 to, u32 barrier) {
#if GAPLESS
  const int bytes = s.box_n * s.box_d * s.box_h * s.box_w * (BLOCK_CI * 4);
#else
  const int bytes = RAW_BYTES;
#endif
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
  load_box(to, map_x, work.group * CIN_G + work.ci, c.w, c.h - STACK + 1, c.d, c.n, barrier);
}

// Rows of a pixel's channels to rows of a channel's pixels: a lane takes a channel, four pixels at a time.
__device__ __forceinline__ void turn(u32 raw, u32 tile, int thread) {
#pragma unroll 4
  for (int i = thread; i < PIXELS / 4 * BLOCK_CI; i += COPIERS) {
    int c = i % BLOCK_CI, quad = i / BLOCK_CI, strip = quad / 2, half = quad % 2;
    u32 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int pixel = strip * 8 + (half ? STRIP_PIXEL(j + 4) : STRIP_PIXEL(j));
      v[j] = load_shared_u32(raw + (pixel * BLOCK_CI + c) * 4);
    }
    u32 to = tile + x_at(strip) + half * 16 + c * SEGMENT;
    store_shared_128(to ^ (to >> 7 & (SEGMENT / 16 - 1)) << 4, v[0], v[1], v[2], v[3]);
  }
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");  // the tensor cores read by descriptor
}
#endif

#if GAPLESS
// Of channels-last tensors a chunk may be a box of any shape, of which a launch tells, and each tap of the set then has g's pixels for it:
// a strip is the next 8 of them in whatever rows they lie, so that images of 4 x 4 or 14 x 14 fill K (with rows of 8 half of it and 87%).

// Zeros for the pixels of every stage that no box writes, once: a box has fewer than a chunk where no shape of it has as many.
__device__ __forceinline__ void clear_tails(u32 base, const Sizes& s, int thread) {
  const int pixels = s.box_n * s.box_d * s.box_h * s.box_w;
  if (pixels == PIXELS) return;
#if TURN_X                                  // x's pixels before they are turned
  constexpr int X_PIXEL = BLOCK_CI * 4, X_PARTS = 1, X_OF_STAGE = 1;
  const u32 x = base + RAW_AT, x_apart = 0, x_stage = 0;
#else
  constexpr int X_PIXEL = SEGMENT, X_PARTS = STAGES * BOXES, X_OF_STAGE = BOXES;
  const u32 x = base, x_apart = BOX_BYTES, x_stage = STAGE_BYTES;
#endif
  constexpr int G_PIXEL = G_PIXEL_BYTES, G_PARTS = G_BOXES * SET_TAPS;
  for (int i = thread; i < X_PARTS * (PIXELS - pixels) * (X_PIXEL / 16); i += THREADS) {
    int unit = i % (X_PIXEL / 16), at = i / (X_PIXEL / 16), pixel = pixels + at % (PIXELS - pixels), part = at / (PIXELS - pixels);
    store_shared_128(x + part / X_OF_STAGE * x_stage + part % X_OF_STAGE * x_apart + pixel * X_PIXEL + unit * 16, 0, 0, 0, 0);
  }
  for (int i = thread; i < STAGES * G_PARTS * (PIXELS - pixels) * (G_PIXEL / 16); i += THREADS) {
    int unit = i % (G_PIXEL / 16), at = i / (G_PIXEL / 16), pixel = pixels + at % (PIXELS - pixels), part = at / (PIXELS - pixels);
    store_shared_128(base + part / G_PARTS * STAGE_BYTES + X_TILE_BYTES + part % G_PARTS * PLANE_BYTES + pixel * G_PIXEL + unit * 16, 0, 0, 0, 0);
  }
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");  // the tensor cores read by descriptor
}
#endif

// =====================================================================================================================
// Multiplications
// =====================================================================================================================

#if A_SHARED
#define TAIL ", 1, 1, 1, 1"
#elif PRECISION == 0
#define TAIL ", 1, 1"
#elif CHANNELS_LAST  // x's pixels are rows of channels
#define TAIL ", 1, 1, 1"
#else
#define TAIL ", 1, 1, 0"
#endif
#if N_WIDTH == 32
#define MULTIPLY_ROWS_1 MULTIPLY_32
#define MULTIPLY_ROWS_2 MULTIPLY_64
#define MULTIPLY_ROWS_3 MULTIPLY_96
#define MULTIPLY_ROWS_4 MULTIPLY_128
#define MULTIPLY_ROWS_5 MULTIPLY_160
#elif N_WIDTH == 64
#define MULTIPLY_ROWS_1 MULTIPLY_64
#define MULTIPLY_ROWS_2 MULTIPLY_128
#define MULTIPLY_ROWS_3 MULTIPLY_192
#define MULTIPLY_ROWS_4 MULTIPLY_256
#elif N_WIDTH == 128
#define MULTIPLY_ROWS_1 MULTIPLY_128
#define MULTIPLY_ROWS_2 MULTIPLY_256
#elif N_WIDTH == 256
#define MULTIPLY_ROWS_1 MULTIPLY_256
#else  // as wide as the layer: its instructions come as macros too
#define MULTIPLY_OWN(columns, registers, operands, sums, scale) asm volatile("wgmma.mma_async.sync.aligned.m64n" columns TYPES " {" registers "}, " operands ", " scale TAIL ";\n" : sums : OPERANDS(a, b))
#define MULTIPLY_ROWS_1(d, a, b, scale) MULTIPLY_OWN(ROWS_1_COLUMNS, ROWS_1_REGISTERS, ROWS_1_A_AND_B, ROWS_1_SUMS, scale)
#define MULTIPLY_ROWS_2(d, a, b, scale) MULTIPLY_OWN(ROWS_2_COLUMNS, ROWS_2_REGISTERS, ROWS_2_A_AND_B, ROWS_2_SUMS, scale)
#define MULTIPLY_ROWS_3(d, a, b, scale) MULTIPLY_OWN(ROWS_3_COLUMNS, ROWS_3_REGISTERS, ROWS_3_A_AND_B, ROWS_3_SUMS, scale)
#define MULTIPLY_ROWS_4(d, a, b, scale) MULTIPLY_OWN(ROWS_4_COLUMNS, ROWS_4_REGISTERS, ROWS_4_A_AND_B, ROWS_4_SUMS, scale)
#define MULTIPLY_ROWS_5(d, a, b, scale) MULTIPLY_OWN(ROWS_5_COLUMNS, ROWS_5_REGISTERS, ROWS_5_A_AND_B, ROWS_5_SUMS, scale)
#endif

#define STACKS(rows) (STACKED ? TAPS_H / STEP_H == (rows) || STACK == (rows) : (rows) == 1)

// A fragment by `rows` rows of x, whose first begins at `x`: their sums follow each other from `first` rows on.
__device__ __forceinline__ void multiply(float (&acc)[NB][OF_UNIT * (N_WIDTH / 2)], int first, int rows, const u32 (&a)[4], u32 x) {
  // From 8 channels or pixels to the next 8; MN-major also from the channels of a swizzled line to the next: of the next box, or, STACKED,
  // of the next row of x.
  const u64 strides = ((u64)(8 * SEGMENT >> 4) << 32) | ((u64)((K_MAJOR ? 8 * SEGMENT : STACKED ? X_ROW_BYTES : BOX_BYTES) >> 4) << 16);
  const u64 upper = strides | ((u64)(SEGMENT == 32 ? 3 : SEGMENT == 64 ? 2 : 1) << 62);
#pragma unroll
  for (int nb = 0; nb < NB; nb++) {
    u64 b = upper | (((x + nb * (K_MAJOR ? N_WIDTH * SEGMENT : BOX_BYTES)) & 0x3ffff) >> 4);
    float* d = &acc[nb][first * (N_WIDTH / 2)];
#if STACKS(1)
    if (rows == 1) MULTIPLY_ROWS_1(d, a, b, "1");
#endif
#if STACKS(2)
    if (rows == 2) MULTIPLY_ROWS_2(d, a, b, "1");
#endif
#if STACKS(3)
    if (rows == 3) MULTIPLY_ROWS_3(d, a, b, "1");
#endif
#if STACKS(4)
    if (rows == 4) MULTIPLY_ROWS_4(d, a, b, "1");
#endif
#if STACKS(5)
    if (rows == 5) MULTIPLY_ROWS_5(d, a, b, "1");
#endif
  }
}

// A lane's view of its taps; the same for all chunks.
struct Taps {
  int at[UNITS];                           // of g's tile: elements (NCHW) or pixels (CHANNELS_LAST) by which the unit is shifted
  u32 line[UNITS];                         // NCHW: rows of memory from a chunk's first row to the unit's, as elements modulo 2^32
};

// Half of a step's K: where it lies in g's tile before the tap's share, and (NCHW) in memory; constants after unrolling.
struct Half {
  int row, column;
  Rows memory;
};
struct Step { Half half[2]; };

// Place of a tile's row of q in g's tile before the tap's own share; STACKED of the first row of a slice.
__device__ __forceinline__ int tile_row(const Rows& q) {
  return (q.n * G_ROWS_D + q.d * (DENSE_D ? STEP_D / APART_D : TAPS_D)) * CLASS_ROWS + q.h * (DENSE_H ? STEP_H / APART_H : TAPS_H);
}

// Step `k_step` of a chunk's positions: a strip of 8, or two of 16-bit types.
__device__ __forceinline__ Step step_of(int k_step) {
  Step step;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int strip = ELEMENT == 4 ? k_step : 2 * k_step + k;
    Rows q = x_row(strip / W_STRIPS);
    step.half[k] = {tile_row(q), (strip % W_STRIPS * 8 + (ELEMENT == 4 ? 4 * k : 0)) * G_STEP_W, {q.n, q.d * STEP_D, q.h * STEP_H}};
  }
  return step;
}

// STACKED: step `column` of row `r` of g's slice that belongs to image `n` and slice `d` of q.
__device__ __forceinline__ Step step_of_row(int n, int d, int r, int column) {
  Step step;
#pragma unroll
  for (int k = 0; k < 2; k++)
    step.half[k] = {r % ROW_CLASSES * (TILE_N * G_ROWS_D * CLASS_ROWS) + tile_row({n, d, 0}) + r / ROW_CLASSES, (ELEMENT == 4 ? 8 * column + 4 * k : 16 * column + 8 * k) * G_STEP_W, {n, d * STEP_D, r}};
  return step;
}

// By how much rows of a chunk's tile begin off 16 bytes, in elements, for a lane's channels: each class of rows (CLASSED); or the
// chunk's first row, from which others follow.
struct Phases { u32 of[ROW_CLASSES]; };

#if !CHANNELS_LAST && !ALIGNED_G
__device__ __forceinline__ int misaligned(const Phases& phases, u32 line, const Rows& row, const Sizes& s) {
#if CLASSED
  return phases.of[row.h % ROW_CLASSES];
#else
  return (phases.of[0] + line + ((u32)(row.n * COUT) * s.out_d + row.d) * s.out_h * s.out_w + (u32)row.h * s.out_w) & (VEC - 1);
#endif
}
#endif

// The fragment of unit `u` at a step: rows g and g + 8 of the warp's sixteen; of the two halves of K, pixels q and q + 4 of a strip
// (TF32), or 2q and 2q + 1 of two strips.
__device__ __forceinline__ void load_fragment(u32 (&a)[4], const unsigned char* g_tile, const Taps& taps, const Sizes& s, const Phases& phases, int u, const Step& step, int lane_at) {
#if TURN_X
  u32 first = shared_address(g_tile) + (taps.at[u] + step.half[0].row * G_LINE + step.half[0].column) * (G_WIDTH * 4) + lane_at;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    u32 address = first + k * (STRIP_PIXEL(4) * G_STEP_W * G_WIDTH * 4);
    address ^= (address >> 7 & (G_WIDTH / 4 - 1)) << 4;  // the engine's swizzle, a function of the address
    a[2 * k] = load_shared_u32(address);
    a[2 * k + 1] = load_shared_u32(address ^ 32);        // 8 channels on
  }
#elif A_SHARED
  // By descriptor, which takes the place of two words: rows of 64 channels of the tap's pixels, as the engine leaves them. Nothing is
  // waited for, so that instructions are queued from chunk to chunk. (NOTES: bfloat16 kb77 0.082 -> 0.064 ms, dcgan1 0.054 -> 0.052.)
  const int p0 = step.half[0].row * G_LINE + step.half[0].column, p1 = step.half[1].row * G_LINE + step.half[1].column;
  a[0] = ((shared_address(g_tile) + lane_at + (taps.at[u] + p0) * (G_WIDTH * 2)) & 0x3ffff) >> 4;
  a[1] = 1u << 30 | (p1 - p0) * (G_WIDTH * 2) >> 4;     // the swizzle, and from 8 pixels to the next 8
#elif CHANNELS_LAST
  // Lanes address rows of 8 channels: of pixels 0-7 and 8-15 (lane / 16), of channels 0-7 and 8-15 (lane / 8 % 2).
  int p0 = step.half[0].row * G_LINE + step.half[0].column, p1 = step.half[1].row * G_LINE + step.half[1].column;
  int p = taps.at[u] + p0 + ((threadIdx.x & 16) ? p1 - p0 : 0);
#if BOX_G
  u32 address = shared_address(g_tile) + p * (G_WIDTH * 2) + lane_at;
  address ^= (address >> 7 & (G_WIDTH / 8 - 1)) << 4;   // the engine's swizzle, a function of the address
#else
  u32 address = shared_address(g_tile) + p * (G_PITCH * 2) + lane_at;
#endif
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
#else
  const u32* words = (const u32*)g_tile;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    // What is known only at run time, and constants that are even, so that the addresses are a register and an immediate.
    int at = lane_at + taps.at[u];
    const int constant = step.half[k].row * (G_CHANNELS * G_PITCH) + step.half[k].column;
#if !ALIGNED_G
    at += misaligned(phases, taps.line[u], step.half[k].memory, s);
#endif
#pragma unroll
    for (int h = 0; h < 2; h++) {
#if ELEMENT == 4
      u32 v = words[at + constant + h * NEXT_ROWS * G_PITCH];
      a[2 * k + h] = BOX_G ? v : to_tf32(__uint_as_float(v));  // boxes are rounded on their way
#else
      const int words_on = (constant + h * NEXT_ROWS * G_PITCH) / 2;
      int second = at + STEP_W;
      u32 selector = (at & 1 ? 0x32u : 0x10u) | (second & 1 ? 0x7600u : 0x5400u);
      a[2 * k + h] = __byte_perm(words[(at >> 1) + words_on], words[(second >> 1) + words_on], selector);
#endif
    }
  }
#endif
}

#if SHARED_WORDS
struct Words {
  u32 word[2][2][RUN_WORDS];               // of a step's two strips, of rows g and g + 8: all words of a run of taps
  bool odd[2];                             // whether the run begins in the middle of the first
};

// The words of the run that begins with unit `u`.
__device__ __forceinline__ void load_words(Words& run, const unsigned char* g_tile, const Taps& taps, const Sizes& s, const Phases& phases, int u, const Step& step, int lane_at) {
  const u32* words = (const u32*)g_tile;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int at = lane_at + taps.at[u];
    const int constant = step.half[k].row * (G_CHANNELS * G_PITCH) + step.half[k].column;
#if !ALIGNED_G
    at += misaligned(phases, taps.line[u], step.half[k].memory, s);
#endif
    run.odd[k] = PARITY_KNOWN ? PAD_W & 1 : at & 1;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int j = 0; j < RUN_WORDS; j++) run.word[k][h][j] = words[(at >> 1) + (constant + h * NEXT_ROWS * G_PITCH) / 2 + j];
  }
}

// The fragment of the run's tap `i`, as `load_fragment` would load it.
__device__ __forceinline__ void shift_words(u32 (&a)[4], const Words& run, int i) {
  const int first = i * DIL_W, second = first + STEP_W;  // elements from the run's own first to the two of a word of K
#pragma unroll
  for (int k = 0; k < 2; k++) {
    bool odd = run.odd[k];
    u32 selector = (odd == (first % 2 == 0) ? 0x32u : 0x10u) | (odd == (second % 2 == 0) ? 0x7600u : 0x5400u);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 low = first % 2 && odd ? run.word[k][h][(first + 1) / 2] : run.word[k][h][first / 2];
      u32 high = second % 2 && odd ? run.word[k][h][(second + 1) / 2] : run.word[k][h][second / 2];
      a[2 * k + h] = __byte_perm(low, high, selector);
    }
  }
}
#endif

#if STACKED
// Rows of x that a row of g meets by a column of taps: for each remainder r of the row by STEP_H those of taps r, r + STEP_H, ..., each
// a row above the one before; their sums lie in the order of the rows.
#define STACK_OF(r) (TAPS_H / STEP_H + ((r) < TAPS_H % STEP_H))
#define STACK_BEGIN(r) ((r) * (TAPS_H / STEP_H) + ((r) < TAPS_H % STEP_H ? (r) : TAPS_H % STEP_H))
#define STACK_PLACE(tap) (STACK_BEGIN((tap) % STEP_H) + STACK_OF((tap) % STEP_H) - 1 - (tap) / STEP_H)

// STRETCH steps of every row of a chunk.
__device__ __forceinline__ void multiply_rows(float (&acc)[UNITS][NB][OF_UNIT * (N_WIDTH / 2)], const unsigned char* g_tile, const Taps& taps, const Sizes& s, const Phases& phases, int lane_at, u32 x_tile) {
  u32 a[SETS_OF_FRAGMENTS][4];
#if SHARED_WORDS
  Words words;
#endif
  int step = 0;                            // a constant after unrolling
#pragma unroll
  for (int remainder = 0; remainder < STEP_H && remainder < TAPS_H; remainder++)
#pragma unroll
    for (int i = 0; i < TILE_N * TILE_D * TILE_H * STRETCH; i++) {
      const int column = i % STRETCH, q = i / STRETCH % TILE_H, slice = i / (STRETCH * TILE_H);
      const Step at = step_of_row(slice / TILE_D, slice % TILE_D, q * STEP_H + remainder, column);
      const u32 x = x_tile + x_at(column) + (slice * X_ROWS_H + q + STACK - STACK_OF(remainder)) * X_ROW_BYTES;
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        u32 (&fragment)[4] = a[step++ % SETS_OF_FRAGMENTS];
#if SHARED_WORDS
        if (u % W_RUN == 0) load_words(words, g_tile, taps, s, phases, u, at, lane_at);
        shift_words(fragment, words, u % W_RUN);
#else
        load_fragment(fragment, g_tile, taps, s, phases, u, at, lane_at);
#endif
        if (!A_SHARED) wgmma_fence();
        multiply(acc[u], STACK_BEGIN(remainder), STACK_OF(remainder), fragment, x);
        if (!A_SHARED) wgmma_commit();
        if (!A_SHARED) wgmma_wait<SETS_OF_FRAGMENTS - 1>();
      }
    }
  if (!A_SHARED) wgmma_wait<0>();
}
#else
#define STACK_PLACE(tap) 0
#endif

__device__ __forceinline__ void consume(float* __restrict__ partial, const Sizes& s, const Work& work, const char* g, u32 full, u32 empty, const unsigned char* memory, int split, int wg, int thread) {
#if INTERLEAVED
  int warp = thread >> 5, lane = thread & 31, row = (lane >> 2) / SUBS, q = lane & 3;
  int wg_m = wg % WGS_M, first_unit = wg / WGS_M * (SUBS * UNITS) + (lane >> 2) % SUBS;
  int channel = wg_m * ROWS_PER_SUB + warp * (16 / SUBS);                                      // of the block's BLOCK_CO
#else
  int warp = thread >> 5, lane = thread & 31, row = lane >> 2, q = lane & 3;
  int wg_m = wg % WGS_M, first_unit = (wg / WGS_M * SUBS + warp * 16 / ROWS_PER_SUB) * UNITS;
  int channel = wg_m * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB;                                // of the block's BLOCK_CO
#endif
  Taps taps;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    int unit = first_unit + u * NEXT_UNIT;
    if (unit >= SET_UNITS) unit = SET_UNITS - 1;                                               // its sums are not stored
    int td = unit / (SET_UNITS / TAPS_D), th = STACKED ? 0 : unit / TAPS_W % TAPS_H, tw = unit % TAPS_W;
    int shift = (DENSE_D ? td * (DIL_D / APART_D) : td) * CLASS_ROWS + (DENSE_H ? th * (DIL_H / APART_H) : th);
#if GAPLESS
    taps.at[u] = unit * (PLANE_BYTES / G_PIXEL_BYTES);
#elif PARTED
    taps.at[u] = shift * G_LINE + tw % G_PLANES * (PLANE_BYTES / G_PIXEL_BYTES) + tw / G_PLANES * PLANE_TAPS;
#elif CHANNELS_LAST
    taps.at[u] = shift * G_LINE + tw * DIL_W;
#else
    taps.at[u] = shift * (G_CHANNELS * G_PITCH) + tw * DIL_W;
#endif
    taps.line[u] = ((u32)(td * DIL_D) * s.out_h + th * DIL_H) * s.out_w;
  }
#if TURN_X
  const int lane_first = STRIP_PIXEL(q) * G_STEP_W * (G_WIDTH * 4) + (channel + row) / G_WIDTH * G_SLAB_BYTES + (channel + row) % G_WIDTH * 4;
#elif A_SHARED
  const int lane_first = wg_m * G_SLAB_BYTES;  // the warpgroup's 64 channels
#elif CHANNELS_LAST
  int c8 = channel + (lane >> 3 & 1) * 8;  // a lane's 8 channels
#if BOX_G
  const int lane_first = (lane & 7) * G_STEP_W * (G_WIDTH * 2) + c8 / G_WIDTH * G_SLAB_BYTES + c8 % G_WIDTH * 2;
#else
  const int lane_first = (lane & 7) * STEP_W * (G_PITCH * 2) + c8 * 2;
#endif
#else
  const int of_channels = (channel + row) / G_CHANNELS;  // the lane's class
  const int lane_first = of_channels * (CLASS_BYTES / ELEMENT * ROW_CLASSES) + (channel + row) % G_CHANNELS * G_PITCH + (ELEMENT == 4 ? q : 2 * q) * STEP_W;
#endif
  float acc[UNITS][NB][OF_UNIT * (N_WIDTH / 2)] = {};
  int begin = split * s.per_split, end = begin + s.per_split < s.chunks ? begin + s.per_split : s.chunks;
  u32 stage = 0, parity = 0;
  // A warpgroup whose taps are all beyond the kernel leaves the tensor cores to the others.
  const int units_before = wg / WGS_M * (SUBS * UNITS);
  const bool idle = units_before >= SET_UNITS || (SET_UNITS == TAPS_W && work.tap_w + units_before >= KERNEL_W);
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    int lane_at = lane_first;
    Phases phases = {};
#if !CHANNELS_LAST
    // Rows 8 channels apart have the same alignment, so that a lane has one for each row of a tile.
    Chunk c = chunk_at(i, s);
    int d = c.d * STEP_D + work.tap_d * DIL_D - PAD_D, h = c.h * STEP_H + work.tap_h * DIL_H - PAD_H, w = c.w * STEP_W + work.tap_w * DIL_W - PAD_W;
#if ALIGNED_G
    lane_at += w & (G_BEGIN - 1);
#elif CLASSED
#pragma unroll
    for (int j = 0; j < ROW_CLASSES; j++) phases.of[j] = class_of(h + j, work.group * COUT_G + work.co + of_channels, w, s).phase;
#else
    phases.of[0] = (u32)((u64)g / ELEMENT) + (((u32)c.n * COUT + work.group * COUT_G + work.co + row) * s.out_d + d) * s.out_h * s.out_w + (u32)h * s.out_w + w;
#endif
#endif
    const unsigned char* tile = memory + stage * STAGE_BYTES;
    u32 x_tile = shared_address(tile);
    barrier_wait(full + stage * 8, parity);
#if A_SHARED
    wgmma_fence();
#endif
#if STACKED
#pragma unroll 1
    for (int first = idle ? ROW_STEPS : 0; first < ROW_STEPS; first += STRETCH) {
      multiply_rows(acc, tile + X_TILE_BYTES, taps, s, phases, lane_at + first * (32 / ELEMENT * G_STEP_W) * G_PIXEL_BYTES, x_tile + x_at(first));
    }
#else
#pragma unroll 1
    for (int run = idle ? STEPS / STRETCH : 0; run < STEPS / STRETCH; run++) {
      u32 a[SETS_OF_FRAGMENTS][4];
#if SHARED_WORDS
      Words words;
#endif
      // A run is some whole rows of q or a part of one, so that runs differ by an offset.
      const int first = run * (STRETCH / ENTRIES);
      const Half from = step_of(first).half[0];
      const unsigned char* g_tile = tile + X_TILE_BYTES + from.row * G_ROW_BYTES;
      Phases run_phases = phases;
#if !CHANNELS_LAST && !ALIGNED_G && !CLASSED
      run_phases.of[0] += ((u32)(from.memory.n * COUT) * s.out_d + from.memory.d) * s.out_h * s.out_w + (u32)from.memory.h * s.out_w;
#endif
      int lane_from = lane_at + from.column * G_PIXEL_BYTES;
      u32 x_from = x_tile + x_at(first);
#pragma unroll
      for (int step = 0; step < STRETCH; step++) {
        const int e = step % ENTRIES, k = step / ENTRIES;
#if SHARED_WORDS
        if (e % W_RUN == 0) load_words(words, g_tile, taps, s, run_phases, e, step_of(k), lane_from);
        shift_words(a[step % SETS_OF_FRAGMENTS], words, e % W_RUN);
#else
        load_fragment(a[step % SETS_OF_FRAGMENTS], g_tile, taps, s, run_phases, e, step_of(k), lane_from);
#endif
        if (!A_SHARED) wgmma_fence();
        multiply(acc[e], 0, 1, a[step % SETS_OF_FRAGMENTS], x_from + x_at(k));
        if (A_SHARED) continue;
        wgmma_commit();
        if (step + 1 == STRETCH) wgmma_wait<0>();
        else wgmma_wait<SETS_OF_FRAGMENTS - 1>();
      }
    }
#endif
#if A_SHARED
    // The chunk before is done with. That is late: instructions wait for room in the tensor cores' queue, so that most of this chunk's
    // are behind them, too (NOTES: with 2 stages unet1 bfloat16 106 -> 184 us; a stage given back behind a chunk's first
    // instruction, 110 us, or its third, 120, and with more stages 1 to 2% slower: the queue runs empty).
    wgmma_commit();
    wgmma_wait<1>();
    if (i > begin && lane == 0) barrier_arrive(empty + (stage ? stage - 1 : STAGES - 1) * 8);
#else
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + stage * 8);
#endif
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
#if A_SHARED
  wgmma_wait<0>();
#endif
#if ADDS_UP
  named_sync<2, WGS * 128>();              // nobody reads a stage any more
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    int unit = first_unit + u * NEXT_UNIT;
    if (unit >= SET_UNITS) continue;
#pragma unroll
    for (int i = 0; i < OF_UNIT; i++) {
      // A unit is a tap, or (STACKED) a column of TAPS_H of them.
      int tap = STACKED ? (unit / TAPS_W * TAPS_H + i) * TAPS_W + unit % TAPS_W : unit;
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int j = 0; j < N_WIDTH / 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int m = channel + row + NEXT_ROWS * h;
#if !CHANNELS_LAST
            m = m % G_CHANNELS * CHANNEL_CLASSES + m / G_CHANNELS;
#endif
            u32 at = shared_address(memory) + SUM_AT(tap, nb * N_WIDTH + j * 8 + 2 * q, m);
            const float* sums = &acc[u][nb][STACK_PLACE(i) * (N_WIDTH / 2) + 4 * j + 2 * h];
            store_shared_f32(at, sums[0]);
            store_shared_f32(at + SUMS_PITCH * 4, sums[1]);
          }
    }
  }
#else
  long long slice = (long long)split * (TAPS * COUT * (long long)CIN_G);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    int unit = first_unit + u * NEXT_UNIT;
    int kd = work.tap_d + unit / (SET_UNITS / TAPS_D), kw = work.tap_w + unit % TAPS_W;
    if (unit >= SET_UNITS || kd >= KERNEL_D || kw >= KERNEL_W) continue;
#pragma unroll
    for (int i = 0; i < OF_UNIT; i++) {
      int th = STACKED ? i : unit / TAPS_W % TAPS_H, kh = work.tap_h + th;
      if (kh >= KERNEL_H) continue;
      float* to = partial + slice + ((long long)((kd * KERNEL_H + kh) * KERNEL_W + kw) * COUT + work.group * COUT_G) * CIN_G;
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int j = 0; j < N_WIDTH / 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int m = channel + row + NEXT_ROWS * h, ci = work.ci + nb * N_WIDTH + j * 8 + 2 * q;
#if CHANNELS_LAST
            int co = work.co + m;
#else
            int co = work.co + m % G_CHANNELS * CHANNEL_CLASSES + m / G_CHANNELS;
#endif
            if (co >= COUT_G) continue;
            float* at = to + (long long)co * CIN_G + ci;
            const float* sums = &acc[u][nb][STACK_PLACE(i) * (N_WIDTH / 2) + 4 * j + 2 * h];
            if (CIN_G % 2 == 0) {
              if (ci < CIN_G) *(float2*)at = make_float2(sums[0], sums[1]);
            } else {
              if (ci < CIN_G) at[0] = sums[0];
              if (ci + 1 < CIN_G) at[1] = sums[1];
            }
          }
    }
  }
#endif
}

#if ADDS_UP
#include "wgrad_sums.cuh"
#endif

#if GAPLESS
#define BOX_OF_CHUNK int box_n, int box_d, int box_h, int box_w,
#else
#define BOX_OF_CHUNK
#endif
// partial: [SPLITS][TAPS][COUT][CIN_G] float32; where blocks add up, `out` is the weight's gradient.
#if TOGETHER  // partial: SUMS_BYTES for each block
extern "C" __global__ void __launch_bounds__(THREADS, 1)
wgrad(const char* __restrict__ g, char* __restrict__ out, char* partial, u32* counters, int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w,
      int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split, BOX_OF_CHUNK
      long long stride_ci, long long stride_co, long long stride_tap, int wide,
      const __grid_constant__ TensorMaps maps) {
#elif ADDS_UP
extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER)
#endif
__launch_bounds__(THREADS, 1)
wgrad(const char* __restrict__ g, char* __restrict__ out, int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w,
      int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split, BOX_OF_CHUNK
      long long stride_ci, long long stride_co, long long stride_tap, int wide,
      const __grid_constant__ TensorMaps maps) {
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
wgrad(const char* __restrict__ g, float* __restrict__ partial, int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w,
      int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split, BOX_OF_CHUNK const __grid_constant__ TensorMaps maps) {
#endif
  extern __shared__ __align__(1024) unsigned char memory[];
#if GAPLESS
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, chunks, per_split, box_n, box_d, box_h, box_w};
#else
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, chunks, per_split};
#endif
  int index = blockIdx.x;
#if CLUSTER > 1
  const int split = index % CLUSTER;  index /= CLUSTER;  // so that a cluster's blocks are neighbours
#endif
  Work work;                               // blocks of the same pixels are neighbours, for L2's sake
  int set = index % SETS;  index /= SETS;
  work.co = index % CO_TILES * BLOCK_CO;  index /= CO_TILES;
  work.ci = index % CI_TILES * BLOCK_CI;  index /= CI_TILES;
  work.group = index % GROUPS;
#if CLUSTER == 1
  const int split = index / GROUPS;
#endif
  work.tap_w = set % SETS_W * TAPS_W;
  work.tap_h = set / SETS_W % SETS_H * TAPS_H;
  work.tap_d = set / (SETS_W * SETS_H) * TAPS_D;
  u32 base = shared_address(memory), full = base + BARRIERS_AT, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, TURN_X ? COPIERS + 1 : BOX_G ? 1 : 2 * COPIERS + 1);
      barrier_init(empty + 8 * i, WGS * 4);
    }
    barrier_init(base + BARRIERS_AT + 16 * STAGES, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
#if GAPLESS
  clear_tails(base, s, threadIdx.x);
#endif
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(PRODUCER_REGISTERS));
#if TURN_X
    const u32 raw = base + RAW_AT, raw_full = base + BARRIERS_AT + 16 * STAGES;
    if (thread == 0 && split * per_split < chunks) load_raw(&maps.x, s, chunk_at(split * per_split, s), work, raw, raw_full);
#elif BOX_G
    if (thread) return;                    // the others have nothing to do
#endif
    int begin = split * per_split, end = begin + per_split < chunks ? begin + per_split : chunks;
    u32 stage = 0, parity = 1;
#pragma unroll 1
    for (int i = begin; i < end; i++) {
      Chunk c = chunk_at(i, s);
      unsigned char* tile = memory + stage * STAGE_BYTES;
      u32 barrier = full + stage * 8;
      barrier_wait(empty + stage * 8, parity);
#if TURN_X
      if (thread == 0) load_boxes(&maps.x, maps.g, s, c, work, shared_address(tile), barrier);
      barrier_wait(raw_full, (i - begin) & 1);
      turn(raw, shared_address(tile), thread);
      barrier_arrive(barrier);
      named_sync<1, COPIERS>();            // all have read
      if (thread == 0 && i + 1 < end) load_raw(&maps.x, s, chunk_at(i + 1, s), work, raw, raw_full);
#elif BOX_G
      load_boxes(&maps.x, maps.g, s, c, work, shared_address(tile), barrier);
#else
      if (thread == 0) load_boxes(&maps.x, nullptr, s, c, work, shared_address(tile), barrier);
      constexpr int extent = CHANNELS_LAST ? G_COLUMNS : G_EXTENT;
      int d = c.d * STEP_D + work.tap_d * DIL_D - PAD_D, h = c.h * STEP_H + work.tap_h * DIL_H - PAD_H, w = c.w * STEP_W + work.tap_w * DIL_W - PAD_W;
      int channel = work.group * COUT_G + work.co;
      copy_tile<G_ROWS, BLOCK_CO, extent, G_PITCH, COUT, COUT_G, false>(
          g, s.batch, s.out_d, s.out_h, s.out_w, c.n, d, h, w, channel, COUT_G - work.co, tile + X_TILE_BYTES, thread);
#if !CHANNELS_LAST
      if (has_borders(w, G_COLUMNS, s.out_w)) {
        copy_commit();
        copy_wait<0>();
        named_sync<1, COPIERS>();          // all have landed
        clear_borders<G_ROWS, BLOCK_CO, G_UNITS, G_PITCH, COUT, false>(g, s.out_d, s.out_h, s.out_w, c.n, d, h, w, channel, tile + X_TILE_BYTES, thread);
      }
#endif
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");  // when its copies have landed
      barrier_arrive(barrier);                                                                  // what it stored itself
#endif
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(CONSUMER_REGISTERS));
#if ADDS_UP
    consume(nullptr, s, work, g, full, empty, memory, split, role - 1, thread);
    const Gradient gradient = {out, stride_ci, stride_co, stride_tap, wide};
#if TOGETHER
    constexpr int TILES = SETS * CO_TILES * CI_TILES * GROUPS;
    int block;                             // read again, not kept over the loop (NOTES: kb73 TF32 spills 8 bytes)
    asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(block));
    const int tile = block % TILES, rank = block / TILES;
    const Peers peers = {partial + (long long)tile * SUMS_BYTES, (long long)TILES * SUMS_BYTES, (int)gridDim.x / TILES};
    publish(partial + (long long)block * SUMS_BYTES, base, counters + 2 * tile, peers, threadIdx.x - 128);
#else
    const int rank = split;
    const Peers peers;
#endif
    add_up(gradient, work, peers, base, rank, threadIdx.x - 128);
#else
    consume(partial, s, work, g, full, empty, memory, split, role - 1, thread);
#endif
  }
}
