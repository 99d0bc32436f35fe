// A warpgroup's multiplications in wgrad_wgmma.cu: fragments of g, from registers or by descriptor, by rows of x.

// =====================================================================================================================
// Multiplications
// =====================================================================================================================

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
  // waited for, so that instructions are queued from chunk to chunk.
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
  load_matrices_turned(a, address);
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
