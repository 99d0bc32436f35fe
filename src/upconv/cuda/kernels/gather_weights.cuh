// =====================================================================================================================
// Weights: fragments in the order in which they are used
// =====================================================================================================================

#define FRAGMENTS(entries) ((entries) * CHUNKS * K_STEPS * PARTS)
#define ENTRY_BYTES (STEPS_PER_TAP * WGS_M * FRAGMENT)  // of a tap's weights for a chunk
#if WEIGHTS_BOX && !(BOX && PARTS == 1 && (SUBS == 1 || (GRAD_INPUT && WGS_M == 1)) && (RESIDENT || W_STAGE % K_STEPS == 0))
#error "boxes have whole taps"
#endif
#if PARTS == 2 && WGMMA && !RESIDENT && W_STAGE % 2
#error "a stage has both parts of a step's weights"
#endif
// Not packed, weights lie with the channels of their second dimension side by side: GRAD_INPUT, K; else rows of M, of which a box
// has SPAN bytes, and a warpgroup's 64 PANELS of them.
#define SPAN (GRAD_INPUT ? ROW_BYTES : 128)
#define PANELS (64 * ELEMENT / 128)

__device__ __forceinline__ const char* fragments_of(const char* packed, const Tile& t) {
  long long before = (long long)(t.group * COUT_BLOCKS + t.cout_block) * FRAGMENTS(ENTRY[VARIANTS * (MB + 1) - 1]);
  return packed + (before + FRAGMENTS(ENTRY[t.variant * (MB + 1)])) * (WGS_M * FRAGMENT);
}

#define STEPS_PER_TAP (K_STEPS * PARTS)
// A stretch is a piece of code without a loop: matrix instructions are queued from its beginning to its end. STRAIGHT: all blocks
// of a chunk; else TAPS_UNROLLED taps of a block, and single ones that are left. A stage of the ring holds W_STAGE fragments of a
// stretch, its last one what is left, so that the code knows where stages begin. RESIDENT: a chunk is a stage, one behind the other.
#define STAGE_FRAGMENTS(left) ((left) < W_STAGE ? (left) : W_STAGE)
#define LONGEST_STRETCH (TAPS_UNROLLED * STEPS_PER_TAP)  // where not STRAIGHT

#if WGMMA
// Where a tile's weights come from, in the order in which they are used.
#if WEIGHTS_BOX
// Not packed: (COUT, taps, CIN_G) as a tensor, for a forward (CIN, taps, COUT_G). A box is a chunk's channels for all rows of a
// sub-position, swizzled as pixels are; of a forward rows of channels, for some rows of M side by side.
struct Weights {
  const TensorMap& map;
  int row, channel, entry;
};
__device__ __forceinline__ Weights weights_of(const TensorMap& map, const Tile& t) {
  return {map, (GRAD_INPUT ? t.group * COUT_G : 0) + t.cout_block * (WGS_M * ROWS_PER_SUB), 0, 0};
}
__device__ __forceinline__ void begin_chunk(Weights& from, const Tile& t, int chunk) {
  from.channel = (GRAD_INPUT ? 0 : t.group * CIN_G) + chunk * CK;
  from.entry = ENTRY[t.variant * (MB + 1)];
}
__device__ __forceinline__ void bring(u32 to, Weights& from, u32 bytes, u32 barrier) {
  expect_bytes(barrier, bytes);
#pragma unroll 1
  for (u32 end = to + bytes; to < end; from.entry++)
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++) {
      int tap = TAP_INDEX[from.entry * SUBS + sub];
      if (tap < 0) tap = TAPS;                          // beyond the last one: zeros
#if GRAD_INPUT
      load_box(to, from.map, from.channel, tap, from.row, 0, 0, barrier);
      to += ENTRY_BYTES / SUBS;
#else
#pragma unroll
      for (int panel = 0; panel < WGS_M * PANELS; panel++, to += CK * SPAN)
        load_box(to, from.map, from.row + panel * (SPAN / ELEMENT), tap, from.channel, 0, 0, barrier);
#endif
    }
}
#else
typedef const char* Weights;  // packed; chunks lie one behind the other
__device__ __forceinline__ Weights weights_of(const char* packed, const Tile& t) { return fragments_of(packed, t); }
__device__ __forceinline__ void bring(u32 to, const char* from, u32 bytes, u32 barrier) {
  expect_bytes(barrier, bytes);
  copy_bulk(to, from, bytes, barrier);
}
#endif

// One thread: streams every tile's weights through the ring; RESIDENT: loads them once.
template <class Source>
__device__ __forceinline__ void stream_weights(const Source& packed, const Sizes& s, u32 ring, u32 full, u32 empty) {
  wait_for_results();                                   // of `pack`
#if RESIDENT
  if (blockIdx.x >= s.tiles) return;
  Tile t = tile_at(blockIdx.x, s);
  Weights from = weights_of(packed, t);
  u32 bytes = entries_of(t.variant) * STEPS_PER_TAP * (WGS_M * FRAGMENT);
  if (bytes == 0) return;
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
#if WEIGHTS_BOX
    begin_chunk(from, t, chunk);
    bring(ring + chunk * bytes, from, bytes, full + chunk * 8);
#else
    bring(ring + chunk * bytes, from + (long long)chunk * bytes, bytes, full + chunk * 8);
#endif
  }
#else
#if CLAIMED
  ClaimsOf<true> claims(s.claims);
#endif
  Cursor cursor = {0, 1};
#pragma unroll 1
  for (int index = FIRST_TILE(s); index < s.tiles; NEXT_TILE(index, s)) {
    Tile t = tile_at(index, s);
    Weights from = weights_of(packed, t);
#if CLUSTER > 1 && !WEIGHTS_BOX
    from += (long long)FIRST_CHUNK * entries_of(t.variant) * STEPS_PER_TAP * (WGS_M * FRAGMENT);
#endif
#pragma unroll 1
#if CLUSTER > 1
    for (int chunk = FIRST_CHUNK; chunk < END_CHUNK; chunk++) {
#else
    for (int chunk = 0; chunk < chunks_of(t.variant); chunk++) {
#endif
#if WEIGHTS_BOX
      begin_chunk(from, t, chunk);
#endif
#pragma unroll 1
      for (int b = 0; b < (STRAIGHT ? 1 : MB); b++) {
        int left = STRAIGHT ? entries_of(t.variant) : ENTRY[t.variant * (MB + 1) + b + 1] - ENTRY[t.variant * (MB + 1) + b];
        left *= STEPS_PER_TAP;
#pragma unroll 1
        while (left > 0) {
          int stretch = STRAIGHT ? left : left >= LONGEST_STRETCH ? LONGEST_STRETCH : STEPS_PER_TAP;
          left -= stretch;
#pragma unroll 1
          for (; stretch > 0; stretch -= W_STAGE, cursor.next(STAGES_W)) {
            u32 bytes = STAGE_FRAGMENTS(stretch) * (WGS_M * FRAGMENT);
            barrier_wait(empty + cursor.stage * 8, cursor.parity);
            bring(ring + cursor.stage * (W_STAGE * WGS_M * FRAGMENT), from, bytes, full + cursor.stage * 8);
#if !WEIGHTS_BOX
            from += bytes;
#endif
          }
        }
      }
    }
  }
#endif
}
#endif

// A thread's part of a ring's first fragment.
__device__ __forceinline__ u32 fragment_part(int wg, int thread) {
#if WEIGHTS_BOX && !GRAD_INPUT
  // Rows of rows of M: of the warp's 16 the 16 bytes whose address the lane gives to ldmatrix, of one channel and half of them; of
  // float32, which ldmatrix does not turn, the lane's first.
  int lane = thread & 31, m = thread / 32 * 16 + (ELEMENT == 2 ? (lane >> 3 & 1) * 8 : lane >> 2), k = ELEMENT == 2 ? (lane >> 4) * 8 + lane % 8 : lane & 3;
  int panel = (SPLIT == 1 ? wg * PANELS : 0) + m / (SPAN / ELEMENT), byte = m % (SPAN / ELEMENT) * ELEMENT;
  return panel * (CK * SPAN) + k * SPAN + (byte ^ (k & 7) << 4);
#elif WEIGHTS_BOX  // rows of CK channels: the 16 bytes whose address it gives to ldmatrix, of one of its warp's 16 rows and half a step
  int lane = thread & 31;
  return (SPLIT == 1 ? wg * (64 * ROW_BYTES) : 0) + unit_at(thread / 32 * 16 + lane % 16, lane / 16);
#else
  return (SPLIT == 1 ? wg * FRAGMENT : 0) + thread * 16;
#endif
}
// Fragment i of those that begin at `at`.
__device__ __forceinline__ void load_fragment(u32 (&a)[4], u32 at, int i) {
#if WEIGHTS_BOX && !GRAD_INPUT  // a step of K is other rows; 8 rows of M and 4 channels further bits of the address change, too
  u32 from = at + i % K_STEPS * (32 / ELEMENT * SPAN) + i / K_STEPS * ENTRY_BYTES;
#if ELEMENT == 2
  load_matrices_turned(a, from);
#else
#pragma unroll
  for (int r = 0; r < 4; r++) a[r] = load_shared_u32((from ^ (r & 1) * 32 ^ (r >> 1) * 64) + (r >> 1) * 4 * SPAN);
#endif
#elif WEIGHTS_BOX  // a step of K is another 32 bytes of the row, and bits of the address, as the swizzle is
  load_matrices(a, (at ^ (i % K_STEPS * 32)) + i / K_STEPS * ENTRY_BYTES);
#else
  load_shared_128(a, at + i * (WGS_M * FRAGMENT));
#endif
}

// The consumers' side. Before sm_90 fragments come straight from global memory (L2).
struct Fragments {
  u32 ring, full, empty;                               // of the ring: this thread's part of its first fragment; barriers
  Cursor cursor;                                       // the stage to be waited for next
  u32 at;                                              // this thread's part of the first fragment of the stage in hand, or of the stretch
  u32 in_hand;                                         // the barrier that says that the stage in hand is free
  bool first;                                          // RESIDENT: the first tile waits for the weights
  const char* from;

  __device__ __forceinline__ void begin(const char* packed, const Tile& t, int offset) {
#if !WGMMA
    from = fragments_of(packed, t) + offset;
#elif RESIDENT
    at = ring;
#endif
  }
  __device__ __forceinline__ void begin_chunk(int chunk) {
    if (WGMMA && RESIDENT && first) barrier_wait(full + chunk * 8, 0);
  }
  __device__ __forceinline__ void end() { first = false; }
  // Fragment i of a stretch; a stage is waited for with its first.
  __device__ __forceinline__ void load(u32 (&a)[4], int i) {
#if !WGMMA
    const uint4 v = __ldg((const uint4*)from);
    a[0] = v.x; a[1] = v.y; a[2] = v.z; a[3] = v.w;
    from += WGS_M * FRAGMENT;
#elif RESIDENT
    load_fragment(a, at, i);
#else
    if (i % W_STAGE == 0) {
      barrier_wait(full + cursor.stage * 8, cursor.parity);
      at = ring + cursor.stage * (W_STAGE * WGS_M * FRAGMENT);
      in_hand = empty + cursor.stage * 8;
      cursor.next(STAGES_W);
    }
    load_fragment(a, at, i % W_STAGE);
#endif
  }
  __device__ __forceinline__ void end_stretch(int steps) {
    if (WGMMA && RESIDENT) at += steps * (WGS_M * FRAGMENT);
  }
  __device__ __forceinline__ void skip(int variant) {  // a tile
    for (int chunk = 0; chunk < chunks_of(variant); chunk++)
      for (int b = 0; b < (STRAIGHT ? 1 : MB); b++) {
        int left = (STRAIGHT ? entries_of(variant) : ENTRY[variant * (MB + 1) + b + 1] - ENTRY[variant * (MB + 1) + b]) * STEPS_PER_TAP;
        int longest = STRAIGHT ? left : LONGEST_STRETCH, whole = longest ? left / longest : 0;
        int stages = whole * ((longest + W_STAGE - 1) / W_STAGE) + (STRAIGHT ? 0 : left % longest / STEPS_PER_TAP * ((STEPS_PER_TAP + W_STAGE - 1) / W_STAGE));
        for (; stages > 0; stages--) cursor.next(STAGES_W);
      }
  }
};
