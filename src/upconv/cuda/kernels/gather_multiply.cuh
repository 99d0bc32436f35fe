// =====================================================================================================================
// Consumers
// =====================================================================================================================

struct Place { int n, d, h, w; };                      // of a subtile in a tile, in q

// PAIRED: subtiles one below the other are neighbours, so that one matrix instruction takes both (WIDE).
__device__ __forceinline__ constexpr Place place_of(int subtile) {
  return {subtile / (W_SUBTILES * H_SUBTILES * TILE_D), subtile / (W_SUBTILES * H_SUBTILES) % TILE_D,
          PAIRED ? (subtile / (2 * W_SUBTILES) % ((H_SUBTILES + 1) / 2) * 2 + subtile % 2) * SUB_H : subtile / W_SUBTILES % H_SUBTILES * SUB_H,
          (PAIRED ? subtile / 2 : subtile) % W_SUBTILES * SUB_W};
}
__device__ __forceinline__ constexpr int pixel_row_of(int subtile) {  // its first pixel's row in the tile, for a tap of shift 0
  Place p = place_of(subtile);
  return ((p.n * ROWS_D + p.d * ROW_STEP_D) * ROWS_H + p.h * ROW_STEP_H) * PITCH + p.w;
}
#define SUBTILES_OF_WGMMA (WIDE ? 2 : 1)                   // that a matrix instruction takes
#define GROUP_ROWS (SUB_H == 8 ? ROW_STEP_H * PITCH : 8)  // pixel rows from one group of eight columns to the next

// Where a consumer's pixels lie in a tile. `start`: of its first subtile; wgmma: the lower half of its descriptor, the same in all
// threads; mma.sync: the tile's address.
struct Columns {
  u32 start;
  int first;                                           // its first subtile
#if PLANE_BARRIERS > 1
  u32 full, empty, parity;                             // of the tile's first plane
#endif
};

// Pixel rows from the consumer's first subtile to another of its: known to the compiler where both halves of a tile are alike.
__device__ __forceinline__ constexpr bool halves_alike() {
  for (int nb = 1; SPLIT == 0 && nb < NB; nb++)
    if (pixel_row_of(NB + nb) - pixel_row_of(NB) != pixel_row_of(nb) - pixel_row_of(0)) return false;
  return true;
}
__device__ __forceinline__ int rows_to(int nb, int first) {
  constexpr bool alike = halves_alike();
  return alike ? pixel_row_of(nb) - pixel_row_of(0) : pixel_row_of(first + nb) - pixel_row_of(first);
}

__device__ __forceinline__ Columns pixels_of(u32 tile, int first) {
#if WGMMA
  u32 start = (tile + pixel_row_of(first) * ROW_BYTES) >> 4 | 1u << 16;
  return {__shfl_sync(0xffffffffu, start, 0), first};  // so that ptxas counts in uniform registers
#else
  return {tile, first};
#endif
}

#if WIDE  // groups of columns lie evenly over two neighbouring subtiles
#define MULTIPLY_SUBTILES WGMMA_128
#else
#define MULTIPLY_SUBTILES WGMMA_64
#endif

// acc[64 x 64 NB] += fragment x pixels; `shift` is the tap's, in pixel rows, `part` the pixels' part. FRESH: = instead of +=.
template <bool FRESH>
__device__ __forceinline__ void multiply(float (&acc)[NB][32], const u32 (&a)[4], const Columns& pixels, int shift, int k_step, int part, int lane) {
#if WGMMA
  const u64 upper = ((u64)(GROUP_ROWS * ROW_BYTES >> 4) << 32) | ((u64)(ROW_BYTES == 32 ? 3 : ROW_BYTES == 64 ? 2 : 1) << 62);
#pragma unroll
  for (int nb = 0; nb < NB; nb += SUBTILES_OF_WGMMA) {
    u64 b = upper | (pixels.start + shift * (ROW_BYTES / 16) + (rows_to(nb, pixels.first) * ROW_BYTES + k_step * 32 + part * PART_BYTES) / 16);
    float* d = acc[nb];
#if PROMOTE
    if (FRESH) MULTIPLY_SUBTILES(d, a, b, "0");
    else MULTIPLY_SUBTILES(d, a, b, "1");
#else
    MULTIPLY_SUBTILES(d, a, b, "1");
#endif
  }
#else
  int matrix = lane >> 3;                              // ldmatrix: columns 8j.. of both halves of K, then columns 8j + 8..
#pragma unroll
  for (int nb = 0; nb < NB; nb++) {
    int row = pixel_row_of(pixels.first + nb) + shift;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      int p = row + (j + (matrix >> 1)) * GROUP_ROWS + (lane & 7);
      u32 b[4];
      load_matrices(b, pixels.start + part * PART_BYTES + unit_at(p, k_step * 2 + (matrix & 1)));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float* d = &acc[nb][4 * (j + i)];
        mma(d, a, b[2 * i], b[2 * i + 1]);
      }
    }
  }
#endif
}

// A stage of the ring of weights whose fragments are in registers, by its barrier.
__device__ __forceinline__ void give_back_weights(u32 done, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(done);
}

// Step i of a stretch of `steps`. Fragments take FRAGMENT_SETS sets of registers in turn: one is multiplied by, the one before may
// still be, the next one is loaded. At the end of a stretch the pipeline drains, since in a loop ptxas cannot see that a set is
// free again and serialises every wgmma, C7513. CONTINUED: where the
// steps of a chunk are a multiple of the sets it can, and a chunk's last step is multiplied while the next chunk begins. ROLLED: so
// it can where those of a round are; `left` rounds of the chunk follow.
__device__ __forceinline__ void step(float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights, const Columns& pixels, int shift, int i, int steps, int lane, int left = 0) {
#if WGMMA
  wgmma_fence();
#else
  weights.load(a[i % FRAGMENT_SETS], i);
#endif
  multiply<false>(acc, a[i % FRAGMENT_SETS], pixels, shift, i % K_STEPS, 0, lane);
#if WGMMA
  wgmma_commit();
  u32 done = weights.in_hand;
  if (i + 1 < steps) {
    weights.load(a[(i + 1) % FRAGMENT_SETS], i + 1);
    wgmma_wait<1>();
  } else if (ROLLED) {
    weights.end_stretch(steps);
    if (left) weights.load(a[0], 0);
    wgmma_wait<1>();
  } else if (CONTINUED) {
    wgmma_wait<1>();
  } else {
    wgmma_wait<0>();
  }
  if (!RESIDENT && (i + 1 == steps || (i + 1) % W_STAGE == 0)) give_back_weights(done, lane);
#endif
}

#if STRAIGHT || ROLLED
#define SUM_ARGUMENT
#endif
// A pixel tile that no matrix instruction reads any more, by its barrier; 0: none.
__device__ __forceinline__ void give_back(u32 barrier, int lane) {
  __syncwarp();
  if (lane == 0 && (!CONTINUED || barrier)) barrier_arrive(barrier);
}

#if STRAIGHT || ROLLED
// 0 to N - 1.
template <int...>
struct Sequence {};
template <int N, int... BEHIND>
struct Counting : Counting<N - 1, N - 1, BEHIND...> {};
template <int... ALL>
struct Counting<0, ALL...> { typedef Sequence<ALL...> type; };
#endif

#if STRAIGHT  // few steps: all blocks of a chunk are one stretch
__device__ constexpr int entry_at(int i) {
  constexpr int entry[] = ENTRIES;
  return entry[i];
}
__device__ constexpr int row_at(int i) {
  constexpr int row[] = TAP_ROWS;
  return row[i];
}
__device__ constexpr int steps_of(int variant) {
  return (entry_at(variant * (MB + 1) + MB) - entry_at(variant * (MB + 1))) * STEPS_PER_TAP;
}
__device__ constexpr int block_of(int variant, int entry) {
  int b = 0;
  while (entry >= entry_at(variant * (MB + 1) + b + 1)) b++;
  return b;
}

#if PLANE_BARRIERS > 1
__device__ constexpr int plane_at(int i) {
  constexpr int plane[] = PLANES_OF_ENTRIES;
  return plane[i];
}
#endif

template <int VARIANT, int STEP>
__device__ __forceinline__ void multiply_one(float (&acc)[MB][NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights, const Columns& pixels, u32 behind, int lane) {
  constexpr int first = entry_at(VARIANT * (MB + 1)), entry = first + STEP / STEPS_PER_TAP, block = block_of(VARIANT, entry);
#if PLANE_BARRIERS > 1  // a plane is waited for with its first step; behind it no instruction reads the plane before
  constexpr int plane = plane_at(entry);
  constexpr bool begins = STEP % STEPS_PER_TAP == 0 && (STEP == 0 || plane_at(entry - (STEP > 0)) != plane);
  if (begins) barrier_wait(pixels.full + plane * 8, pixels.parity);
#endif
  step(acc[block], a, weights, pixels, row_at(entry), STEP, steps_of(VARIANT), lane);
  if (CONTINUED && STEP == 0) give_back(behind, lane);
#if PLANE_BARRIERS > 1
  if (begins && STEP > 0) give_back(pixels.empty + (plane - 1) * 8, lane);
#endif
}

// Not by recursion, each level of which the compiler works through with all that are in it. The machine code is the same.
template <int VARIANT, int... STEPS>
__device__ __forceinline__ void multiply_from(Sequence<STEPS...>, float (&acc)[MB][NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights, const Columns& pixels, u32 behind, int lane) {
  (multiply_one<VARIANT, STEPS>(acc, a, weights, pixels, behind, lane), ...);
  weights.end_stretch(sizeof...(STEPS));
}

// Variants share a stretch where their taps lie alike, as the phases of a kernel do whose sizes are multiples of its strides. Less
// is then compiled, and fetched.
template <int STRETCH>
__device__ __forceinline__ void multiply_chunk(int variant, float (&acc)[MB][NB][32], Fragments& weights, const Columns& pixels, u32 behind, int lane) {
  constexpr int first[] = FIRST_OF_STRETCHES;  // variant
#if STRETCHES < VARIANTS
  int stretch = STRETCH_OF[variant];
#else
  int stretch = variant;
#endif
  if (STRETCHES == 1 || stretch == STRETCH) {
    u32 a[FRAGMENT_SETS][4];
    const typename Counting<steps_of(first[STRETCH])>::type steps;
    weights.load(a[0], 0);
#if STRETCHES < VARIANTS
    Columns shifted = pixels;
    shifted.start += VARIANT_ROW[variant] * (ROW_BYTES / 16);
    multiply_from<first[STRETCH]>(steps, acc, a, weights, shifted, behind, lane);
#else
    multiply_from<first[STRETCH]>(steps, acc, a, weights, pixels, behind, lane);
#endif
  } else if constexpr (STRETCH + 1 < STRETCHES) {
    multiply_chunk<STRETCH + 1>(variant, acc, weights, pixels, behind, lane);
  }
}
#elif ROLLED
__device__ constexpr int shift_at(int i) {
  constexpr int shift[] = ROUND_SHIFTS;
  return shift[i];
}

template <int STEP>
__device__ __forceinline__ void multiply_one(float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights, const Columns& pixels, int left, u32& behind, int lane) {
  step(acc, a, weights, pixels, shift_at(STEP / STEPS_PER_TAP), STEP, LONGEST_STRETCH, lane, left);
  if ((CONTINUED || PLANE_BARRIERS > 1) && STEP == 0 && behind) {
    give_back(behind, lane);
    behind = 0;
  }
}
template <int... STEPS>
__device__ __forceinline__ void multiply_round(Sequence<STEPS...>, float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights, const Columns& pixels, int left, u32& behind, int lane) {
  (multiply_one<STEPS>(acc, a, weights, pixels, left, behind, lane), ...);
}

// A loop of rounds, in each of which all sets of fragments come round: so ptxas can see that a set is free again, and the tensor
// cores do not drain between them. Rounds are alike but for where their pixels begin. What a round begins with, its pixels' place
// and its first fragment, is asked for in the one before: tables of taps read in each
// would be slower. Shorter stretches stay straight, which is the fastest.
template <int FIRST>
__device__ __forceinline__ void multiply_chunk(int variant, float (&acc)[MB][NB][32], Fragments& weights, const Columns& pixels, u32 behind, int lane) {
  u32 a[FRAGMENT_SETS][4];
  int left = (ENTRY[variant * (MB + 1) + MB] - ENTRY[variant * (MB + 1)]) / TAPS_UNROLLED;
#if PLANE_BARRIERS > 1
  u32 full = pixels.full, empty = pixels.empty;
#endif
  weights.load(a[0], 0);
#pragma unroll
  for (int b = 0; b < MB; b++) {
    int entry = ENTRY[variant * (MB + 1) + b], last = ENTRY[variant * (MB + 1) + b + 1];
    int begin = TAP_ROW[entry];
#pragma unroll 1
    while (entry < last) {
      Columns shifted = pixels;
      shifted.start = __shfl_sync(0xffffffffu, pixels.start + begin * (ROW_BYTES / 16), 0);
      entry += TAPS_UNROLLED;
      if (entry < last) begin = TAP_ROW[entry];
#if PLANE_BARRIERS > 1                                  // a round is a plane
      barrier_wait(full, pixels.parity);
      full += 8;
#endif
      multiply_round(typename Counting<LONGEST_STRETCH>::type(), acc[b], a, weights, shifted, --left, behind, lane);
#if PLANE_BARRIERS > 1
      behind = left ? empty : 0;                        // the last plane is the chunk's to give back
      empty += 8;
#endif
    }
  }
  if (!CONTINUED) wgmma_wait<0>();
}
#else
#if PARTS == 2
// The products of IEEE's parts. Tensor cores truncate as they add, by an error in proportion to the sum: so all corrections of a
// stretch, which are smaller by 2^-11, come before the first product of high parts. Low parts of weights take FRAGMENT_SETS sets
// of registers in turn, high ones keep theirs to the end.
template <int COUNT>
__device__ __forceinline__ void multiply_some(float (&acc)[NB][32], Fragments& weights, const Columns& pixels, int entry, int lane) {
  constexpr int steps = COUNT * K_STEPS;               // of two fragments
  u32 high[steps][4], low[FRAGMENT_SETS][4];
  const int* taps = TAP_ROW + __shfl_sync(0xffffffffu, entry, 0);
  weights.load(high[0], 0);
  weights.load(low[0], 1);
#pragma unroll
  for (int i = 0; i < steps; i++) {
    int shift = taps[i / K_STEPS], k_step = i % K_STEPS;
#if WGMMA
    wgmma_fence();
#endif
    if (i == 0) multiply<true>(acc, high[0], pixels, shift, k_step, 1, lane);
    else multiply<false>(acc, high[i], pixels, shift, k_step, 1, lane);
    multiply<false>(acc, low[i % FRAGMENT_SETS], pixels, shift, k_step, 0, lane);
#if WGMMA
    wgmma_commit();
    u32 done = weights.in_hand;
#endif
    if (i + 1 < steps) {
      weights.load(high[i + 1], 2 * i + 2);
      weights.load(low[(i + 1) % FRAGMENT_SETS], 2 * i + 3);
    }
#if WGMMA
    if (i + 1 < steps) wgmma_wait<1>();
    if (!RESIDENT && (i + 1 == steps || (2 * i + 2) % W_STAGE == 0)) give_back_weights(done, lane);
#endif
  }
#if WGMMA
  wgmma_fence();
#endif
#pragma unroll
  for (int i = 0; i < steps; i++) multiply<false>(acc, high[i], pixels, taps[i / K_STEPS], i % K_STEPS, 0, lane);
#if WGMMA
  wgmma_commit();
  wgmma_wait<0>();
#endif
  weights.end_stretch(2 * steps);
}
#else
template <int COUNT>
__device__ __forceinline__ void multiply_some(float (&acc)[NB][32], Fragments& weights, const Columns& pixels, int entry, int lane) {
  u32 a[FRAGMENT_SETS][4];
#if WGMMA
  weights.load(a[0], 0);
#endif
  const int* taps = TAP_ROW + __shfl_sync(0xffffffffu, entry, 0);
#pragma unroll
  for (int i = 0; i < COUNT * STEPS_PER_TAP; i++)
    step(acc, a, weights, pixels, taps[i / STEPS_PER_TAP], i, COUNT * STEPS_PER_TAP, lane);
  weights.end_stretch(COUNT * STEPS_PER_TAP);
}
#endif

#if PROMOTE
// Tensor cores truncate as they add, an error that grows with the length of a sum. So sums are kept short, and added with rounding.
__device__ __forceinline__ void promote(float (&acc)[NB][32], float (&sum)[NB][32]) {
#pragma unroll
  for (int nb = 0; nb < NB; nb++)
#pragma unroll
    for (int i = 0; i < 32; i++) {
      sum[nb][i] += acc[nb][i];
      if (!WGMMA) acc[nb][i] = 0.f;                     // wgmma begins a stretch's sums anew
    }
}
#define SUM_PARAMETER float (&sum)[MB][NB][32],
#define SUM_ARGUMENT sum,
#else
#define SUM_PARAMETER
#define SUM_ARGUMENT
#endif

template <int FIRST>
__device__ __forceinline__ void multiply_chunk(int variant, float (&acc)[MB][NB][32], SUM_PARAMETER Fragments& weights, const Columns& pixels, u32 behind, int lane) {
#pragma unroll
  for (int b = 0; b < MB; b++) {
    int e = ENTRY[variant * (MB + 1) + b], last = ENTRY[variant * (MB + 1) + b + 1];
#pragma unroll 1
    for (; e + TAPS_UNROLLED <= last; e += TAPS_UNROLLED) {
      multiply_some<TAPS_UNROLLED>(acc[b], weights, pixels, e, lane);
#if PROMOTE
      promote(acc[b], sum[b]);
#endif
    }
#if TAPS_LEFT                                           // some block has a number of taps that is no multiple
#pragma unroll 1
    for (; e < last; e++) {
      multiply_some<1>(acc[b], weights, pixels, e, lane);
#if PROMOTE
      promote(acc[b], sum[b]);
#endif
    }
#endif
  }
}
#endif
