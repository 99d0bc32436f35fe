// Who brings a chunk's pixels to the shared memory of wgrad_wgmma.cu: tensor maps, their boxes, classes of rows; x's pixels turned
// (TURN_X), and cleared where no box has any (GAPLESS). Copies by threads are wgrad.cuh's.

// =====================================================================================================================
// Copies
// =====================================================================================================================

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

#if !TURN_X
// A chunk of x, from its input channel `channel` on.
__device__ __forceinline__ void load_x(const TensorMap* map_x, const Chunk& c, int channel, u32 to, u32 barrier) {
#if X_ONE_BOX
  load_box(to, *map_x, 0, c.w, c.h - STACK + 1, c.n, channel / X_WIDTH, barrier);
#else
#pragma unroll 1
  for (int i = 0; i < BOXES; i++) {
#if CHANNELS_LAST
    load_box(to + i * BOX_BYTES, *map_x, channel + i * X_WIDTH, c.w, c.h - STACK + 1, c.d, c.n, barrier);
#else
    int w = (LINES ? c.h * TILE_W : c.w) + i * (SEGMENT / ELEMENT);
    load_box(to + i * BOX_BYTES, *map_x, w, channel, LINES ? 0 : c.h - STACK + 1, c.d, c.n, barrier);
#endif
  }
#endif
}
#endif

__device__ __forceinline__ void load_boxes(const TensorMap* map_x, const TensorMap* map_g, const Sizes& s, const Chunk& c, const Work& work, u32 to, u32 barrier) {
#if GAPLESS
  const int pixels = s.box_n * s.box_d * s.box_h * s.box_w;
  expect_bytes(barrier, pixels * (((TURN_X ? 0 : BLOCK_CI) + SET_TAPS * BLOCK_CO) * ELEMENT));
#else
  expect_bytes(barrier, (TURN_X ? 0 : X_TILE_BYTES) + (!BOX_G ? 0 : CHANNELS_LAST ? G_ROWS * (G_ONE_BOX ? G_PLANES * PLANE_COLUMNS : G_COLUMNS) * BLOCK_CO * ELEMENT : G_BYTES));
#endif
  int channel = work.group * CIN_G + work.ci;
#if !TURN_X
  load_x(map_x, c, channel, to, barrier);
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
    load_box(to + i * CLASS_BYTES, map_g[at.index], w + at.lead - at.phase, first / CHANNEL_CLASSES, (row - (row & (ROW_CLASSES - 1))) / ROW_CLASSES, d, c.n, barrier);
  }
#elif GAPLESS
#pragma unroll 1
  for (int i = 0; i < G_BOXES * SET_TAPS; i++) {
    int tap = i % SET_TAPS, td = tap / (TAPS_H * TAPS_W), th = tap / TAPS_W % TAPS_H, tw = tap % TAPS_W;
    load_box(to + i / SET_TAPS * G_SLAB_BYTES + tap * PLANE_BYTES, *map_g, channel + i / SET_TAPS * G_WIDTH, w + tw * DIL_W, h + th * DIL_H, d + td * DIL_D, c.n, barrier);
  }
#elif G_ONE_BOX && CHANNELS_LAST
#pragma unroll 1
  for (int i = 0; i < G_BOXES * G_PLANES; i++)
    load_box(to + i / G_PLANES * G_SLAB_BYTES + i % G_PLANES * PLANE_BYTES, *map_g, channel + i / G_PLANES * G_WIDTH, w + i % G_PLANES * DIL_W, h, d, c.n, barrier);
#elif G_LINED
  load_box(to, *map_g, 0, (w - (w & (G_BEGIN - 1))) / G_BEGIN, channel, 0, c.n, barrier);
#elif G_ONE_BOX
  load_box(to, *map_g, w - (w & (VEC - 1)), channel, h, d, c.n, barrier);
#else
#pragma unroll 1
  for (int r = 0; r < G_ROWS; r++) {
    Rows at = g_row(r);
#if CHANNELS_LAST
    for (int i = 0; i < G_BOXES; i++)
      load_box(to + (i * G_ROWS + r) * G_BOX_BYTES, *map_g, channel + i * G_WIDTH, w, h + at.h, d + at.d, c.n + at.n, barrier);
#else
    load_box(to + r * G_BOX_BYTES, *map_g, w - (w & (VEC - 1)), channel, h + at.h, d + at.d, c.n + at.n, barrier);
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
  expect_bytes(barrier, bytes);
  load_box(to, *map_x, work.group * CIN_G + work.ci, c.w, c.h - STACK + 1, c.d, c.n, barrier);
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
  fence_async_shared();  // the tensor cores read by descriptor
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
  fence_async_shared();  // the tensor cores read by descriptor
}
#endif
