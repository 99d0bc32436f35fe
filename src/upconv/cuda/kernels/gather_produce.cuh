// =====================================================================================================================
// Producer
// =====================================================================================================================

struct Source {                                        // where a tile's chunk lies in the input
  int n, d, h, w;                                      // of the halo's corner, before the rows' offsets
  int channel, left;                                   // first channel, channels left in the group
};

__device__ __forceinline__ Source source_of(const Tile& t, int chunk) {
  return {t.n, t.d * IN_STEP_D, t.h * IN_STEP_H, t.w * IN_STEP_W + FIRST_W, t.group * CIN_G + chunk * CK, CIN_G - chunk * CK};
}

// The segment's (n, d, h), and whether that row of the input exists.
__device__ __forceinline__ bool row_of(const Source& at, const Sizes& s, int packed, int& n, int& d, int& h) {
  n = at.n + (packed >> 24);
  d = at.d + ((packed << 8) >> 20);
  h = at.h + ((packed << 20) >> 20);
  return n < s.batch && (u32)d < (u32)s.in_d && (u32)h < (u32)s.in_h;
}

#if !CHANNELS_LAST
#if !SLOTS_BY_BOX
// Copies CK channels of every segment into a slot, in the 16-byte units of memory that hold them, so that any alignment is
// served; units without a pixel of the row are left out. A segment then begins (address % 16) bytes into its place.
__device__ __forceinline__ void stage(const char* __restrict__ x, const Sizes& s, const Source& at, u32 slot, int thread) {
  long long slice = (long long)s.in_h * s.in_w * ELEMENT, plane = slice * s.in_d;
  const char* corner = x + ((long long)at.n * CIN + at.channel) * plane + (long long)at.w * ELEMENT;
  // A thread keeps its channel and place in the row for all rows, since finding them anew for each unit is
  // what would take the time. Where rows are short, threads share them out.
  constexpr int PLACES = CK * STAGING_UNITS, SHARES = PLACES < PRODUCER_THREADS ? PRODUCER_THREADS / PLACES : 1;
  constexpr int SLICES = TILE_N * ROWS_D, BY_SLICE = SLICES >= SHARES ? SHARES : 1, BY_ROW = BY_SLICE > 1 ? 1 : SHARES;
  int share = SHARES > 1 ? thread / PLACES : 0, place_of = SHARES > 1 ? thread % PLACES : thread;
  if (share >= SHARES) return;
#pragma unroll 1
  for (int unit = place_of % STAGING_UNITS, c = place_of / STAGING_UNITS; c < CK;) {
    if (CIN_G % CK == 0 || c < at.left) {
      const char* place = corner + c * plane + unit * 16;
      int column = at.w + unit * VEC;                   // of the unit's first element, were the row aligned
      u32 to = slot + c * CHANNEL_BYTES + unit * 16;
#pragma unroll 1
      for (int r = BY_SLICE > 1 ? share : 0; r < SLICES; r += BY_SLICE) {
        int image = r / ROWS_D, d = at.d + ROW_D[r % ROWS_D];
        bool exists = at.n + image < s.batch && (u32)d < (u32)s.in_d;
        const char* line = place + image * (CIN * plane) + d * slice;
#pragma unroll ROWS_H % 5 == 0 ? 5 : ROWS_H % 4 == 0 ? 4 : ROWS_H % 3 == 0 ? 3 : 2
        for (int j = BY_ROW > 1 ? share : 0; j < ROWS_H; j += BY_ROW) {
          int h = at.h + ROW_H[j];
          u64 p = multiply_add_wide(h, s.in_w * ELEMENT, (u64)line);
          int first = column - (int)(p & 15) / ELEMENT;
          if (exists && (u32)h < (u32)s.in_h && first + VEC > 0 && first < s.in_w)
            copy16(to + image * (CK - 1) * CHANNEL_BYTES + (r * ROWS_H + j) * (STAGING_UNITS * 16), (const char*)(p & ~15ull));
        }
      }
    }
    if (SHARES > 1) break;
    unit += PRODUCER_THREADS % STAGING_UNITS;
    c += PRODUCER_THREADS / STAGING_UNITS;
    if (unit >= STAGING_UNITS) {
      unit -= STAGING_UNITS;
      c++;
    }
  }
}
#endif

#define OWN_PIXELS ((PIXELS + PRODUCER_THREADS - 1) / PRODUCER_THREADS)

// The pixel row of a thread's pixel i: rows in their order, or, where the columns of neighbouring rows lie a multiple of four
// apart, so that lanes would meet few banks, columns in theirs.
#define BY_COLUMN (IN_STEP_W % 4 == 0)
__device__ __forceinline__ int pixel_row(int i) {
#if BESIDE  // rows first: an image's lie together in a slot, where columns of several images would meet few banks
  return i % SEGMENTS * PITCH + i / SEGMENTS;
#endif
  return BY_COLUMN ? i / PITCH * PITCH + i % PITCH % PLANES * PLANE + i % PITCH / PLANES : i;
}

// A thread's pixels of a tile: where they lie in a slot and, for copies by threads, whether they are in the image and how their
// row is aligned. Found once a tile, not a chunk.
struct Pixels {
  u32 from[OWN_PIXELS], ok;
  u32 plane;                                            // channel c of a row begins at (phase + c * plane) % VEC of a unit
  __device__ __forceinline__ void locate(const char* x, const Sizes& s, const Source& at, const int* segments, int thread) {
    plane = SLOTS_BY_BOX && !CLASSED ? 0 : (u32)s.in_d * s.in_h * s.in_w;
    ok = 0;
#pragma unroll
    for (int k = 0; k < OWN_PIXELS; k++) {
      int p = pixel_row(thread + k * PRODUCER_THREADS), segment = p / PITCH, within = p % PITCH;
      int column = COLUMN(within), image = segment / (ROWS_D * ROWS_H);
      if (thread + k * PRODUCER_THREADS >= PIXELS) break;
#if BESIDE
      // Images begin PERIOD columns apart. What lies between them is nowhere, and as many zeros as the taps of either read.
      int d = at.d + ((segments[segment] << 8) >> 20), h = at.h + ((segments[segment] << 20) >> 20);
      int beside = (FIRST_W + column + PERIOD) / PERIOD - 1, w = FIRST_W + column - beside * PERIOD;
      bool inside = (u32)d < IMAGE_D && (u32)h < IMAGE_H && w < IMAGE_W && (u32)beside < BESIDE;
      from[k] = inside ? (beside * BOX_PIXELS + (d * IMAGE_H + h) * IMAGE_W + w) * ELEMENT : 0;
      ok |= (u32)inside << k;
#elif WHOLE
      // The copy engine fills images beyond the batch with zeros; what lies beyond an image's borders is nowhere.
      int d = (segments[segment] << 8) >> 20, h = (segments[segment] << 20) >> 20, w = FIRST_W + column;
      bool inside = (u32)d < IMAGE_D && (u32)h < IMAGE_H && (u32)w < IMAGE_W;
      int pixel = inside ? (d * IMAGE_H + h) * IMAGE_W + w : 0;
      from[k] = ((pixel / BOX_PIXELS * TILE_N + image) * CK * BOX_PIXELS + pixel % BOX_PIXELS) * ELEMENT;
      ok |= (u32)inside << k;
#elif SLOTS_BY_BOX && CLASSED
      // The row's class and place in it; in a class with a lead the columns ahead of a row are no zeros but the row's before.
      int j = segment % ROWS_H, row = segment / ROWS_H % ROWS_D * CLASS_ROWS + j / ROW_CLASSES;
      from[k] = j % ROW_CLASSES * SLOT_BOX_BYTES + (image * (CK / CHANNEL_CLASSES) * (ROWS_D * CLASS_ROWS) + row) * ROW_UNITS * 16 + column * ELEMENT;
      from[k] |= (u32)((FIRST_W + (FIRST_H + j * ROWS_APART) * s.in_w) & (VEC - 1)) << 24;
      ok |= (u32)(FIRST_W + column >= 0) << k;
#else
      int at_column = column + COLUMN_PAD, box = SLOT_BOXES > 1 ? at_column / (ROW_UNITS * VEC) : 0;
      if (SLOT_BOXES > 1 && IN_STEP_W > 1 && box == SLOT_BOXES) box--;  // a column that only fills a plane up
      from[k] = box * SLOT_BOX_BYTES + (segment + image * (CK - 1) * (ROWS_D * ROWS_H)) * ROW_UNITS * 16 + (at_column - box * (ROW_UNITS * VEC)) * ELEMENT;
#endif
#if !SLOTS_BY_BOX
      int n, d, h;
      bool in = row_of(at, s, segments[segment], n, d, h) && column < COLUMNS && (u32)(at.w + column) < (u32)s.in_w;
      u32 first = ((u32)n * CIN + at.channel) * plane + ((u32)d * s.in_h + h) * s.in_w + at.w + (u32)((u64)x / ELEMENT);
      from[k] |= (first & (VEC - 1)) << 24;             // the low 24 bits: the place in a slot; above: the phase
      ok |= (u32)in << k;
#endif
    }
  }
};

// A slot's pixels to rows of CK channels, rounded: a lane takes a pixel, so that loads and stores meet all banks.
template <bool ALIGNED>  // every channel of a row has the same misalignment
__device__ __forceinline__ void turn(const Pixels& own, u32 exist, int channel, int left, u32 slot, u32 tile, int thread) {
#pragma unroll
  for (int k = 0; k < OWN_PIXELS; k++) {
    int p = pixel_row(thread + k * PRODUCER_THREADS);
    if (PIXELS % PRODUCER_THREADS && thread + k * PRODUCER_THREADS >= PIXELS) break;
    bool ok = exist >> k & 1;
    u32 phase = own.from[k] >> 24, from = slot + (own.from[k] & 0xffffff) + (ALIGNED ? phase * ELEMENT : 0);
#pragma unroll 2  // more of them spill
    for (int unit = 0; unit < UNITS_PER_ROW; unit++) {
      u32 v[VEC];
#pragma unroll
      for (int e = 0; e < VEC; e++) {
        int c = unit * VEC + e;
        bool have = ok && (CIN_G % CK == 0 || c < left);
        u32 a = from + (CLASSED ? c / CHANNEL_CLASSES * CHANNEL_BYTES + c % CHANNEL_CLASSES * (ROW_CLASSES * SLOT_BOX_BYTES) : c * CHANNEL_BYTES);
        if (!ALIGNED && CLASSED) a += ((phase + c % CHANNEL_CLASSES * own.plane) & (VEC - 1)) * ELEMENT;
        else if (!ALIGNED) a += ((phase + (channel + c) * own.plane) & (VEC - 1)) * ELEMENT;
#if ELEMENT == 4
        v[e] = have ? load_shared_u32(a) : 0;
#else
        v[e] = have ? load_shared_u16(a) : 0;
#endif
      }
#if ELEMENT == 4
      u32 hi[4];
#pragma unroll
      for (int e = 0; e < 4; e++) hi[e] = to_tf32(__uint_as_float(v[e]));
      store_shared_128(tile + unit_at(p, unit), hi[0], hi[1], hi[2], hi[3]);
#if PARTS == 2
#pragma unroll
      for (int e = 0; e < 4; e++) v[e] = low_part(__uint_as_float(v[e]), hi[e]);
      store_shared_128(tile + PART_BYTES + unit_at(p, unit), v[0], v[1], v[2], v[3]);
#endif
#else
      store_shared_128(tile + unit_at(p, unit), v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
#endif
    }
  }
}
#else
// Copies pixel rows straight into a tile; what lies outside of the image or past the last channel is zero.
__device__ __forceinline__ void fetch(const char* __restrict__ x, const Sizes& s, const Source& at, const int* segments, u32 tile, int thread) {
  for (int i = thread; i < PIXELS * UNITS_PER_ROW; i += PRODUCER_THREADS) {
    int unit = i % UNITS_PER_ROW, p = i / UNITS_PER_ROW, segment = p / PITCH, within = p % PITCH, n, d, h;
    int column = COLUMN(within), w = at.w + column;
    bool ok = row_of(at, s, segments[segment], n, d, h) && column < COLUMNS && (u32)w < (u32)s.in_w;
    int have = at.left - unit * VEC;                    // channels from this unit on
    const char* from = x + (((((long long)n * s.in_d + d) * s.in_h + h) * s.in_w + w) * CIN + at.channel + unit * VEC) * ELEMENT;
#if ALIGNED_CHANNELS
    int bytes = ok && have > 0 ? (have < VEC ? have * ELEMENT : 16) : 0;
    copy16(tile + unit_at(p, unit), bytes ? from : x, bytes);
#else  // a channel count that is no multiple of 16 bytes: element by element, which waits for memory
    u32 v[VEC];
#pragma unroll
    for (int e = 0; e < VEC; e++) v[e] = ok && e < have ? (u32)((const ELEMENT_BITS*)from)[e] : 0;
#if ELEMENT == 4
    store_shared_128(tile + unit_at(p, unit), v[0], v[1], v[2], v[3]);
#else
    store_shared_128(tile + unit_at(p, unit), v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
#endif
#endif
  }
}

// Rounds the units that this thread has fetched itself, or (BOX) that its turn falls on.
__device__ __forceinline__ void round_units(u32 tile, int thread) {
#if ELEMENT == 4
#pragma unroll 4
  for (int i = thread; i < PIXELS * UNITS_PER_ROW; i += PRODUCER_THREADS) {
    u32 a = tile + (BOX ? i * 16 : unit_at(i / UNITS_PER_ROW, i % UNITS_PER_ROW)), v[4], hi[4];
    load_shared_128(v, a);
#pragma unroll
    for (int e = 0; e < 4; e++) hi[e] = to_tf32(__uint_as_float(v[e]));
    store_shared_128(a, hi[0], hi[1], hi[2], hi[3]);
#if PARTS == 2
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] = low_part(__uint_as_float(v[e]), hi[e]);
    store_shared_128(a + PART_BYTES, v[0], v[1], v[2], v[3]);
#endif
  }
#endif
}
#endif

// A walk over (tile, chunk) in the order in which consumers take them.
#if CLAIMED
template <class Claiming>                               // the loader's, or others'
struct WalkOf {
  Claiming claims;
#else
struct Walk {
#endif
  int index, chunk;
  Tile tile;
#if CLUSTER > 1  // a share of one tile's
  __device__ __forceinline__ void begin(int first, const Sizes& s) { index = first; chunk = FIRST_CHUNK; tile = tile_at(index, s); }
  __device__ __forceinline__ bool live(const Sizes& s) const { return index < s.tiles && chunk < END_CHUNK; }
  __device__ __forceinline__ void next(const Sizes& s) { chunk++; }
#else
  __device__ __forceinline__ void begin(int first, const Sizes& s) { index = first; chunk = 0; settle(s); }
  __device__ __forceinline__ bool live(const Sizes& s) const { return index < s.tiles; }
  __device__ __forceinline__ void settle(const Sizes& s) {  // past tiles without chunks
    while (index < s.tiles) {
      tile = tile_at(index, s);
      if (chunk < CHUNKS_OF(tile, s)) return;
      NEXT_TILE(index, s);
      chunk = 0;
    }
  }
  __device__ __forceinline__ void next(const Sizes& s) {
    if (++chunk >= CHUNKS) settle(s);
  }
#endif
};
#if CLAIMED
typedef WalkOf<ClaimsOf<false>> Walk;
#endif

// The tile is written: make it visible to the matrix units and say so, once a warp.
__device__ __forceinline__ void hand_over(u32 barrier, int lane) {
  fence_async_shared();
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}

#if CLASSED
// Where box r begins in the tensor of its class: the column at a whole unit, and the row among the class's.
struct ClassedBox { int w, h; };
__device__ __forceinline__ ClassedBox classed_box(const Source& at, const Sizes& s, int r) {
  int row = at.h + FIRST_H + r % ROW_CLASSES * ROWS_APART;
  u32 plane = (u32)s.in_d * s.in_h * s.in_w;
  int lead = (r / ROW_CLASSES * plane + (u32)row * s.in_w) & (VEC - 1);  // of the tensor, ahead of each row's first column
  return {(at.w + lead) & ~(VEC - 1), (row - (row & (ROW_PERIOD - 1))) / ROW_PERIOD};
}
#endif

struct Barriers { u32 full, empty, landed, left; };      // of tiles; of slots or boxes: `landed` by the copy engine

#if BOX
// The loader, one thread: ahead of everyone by as many slots (NCHW) or tiles (channels-last) as are free. Channels-last pixels
// whose taps step over columns or rows come as a box for each plane, with the copy engine's element strides.
__device__ __forceinline__ void load_boxes(const TensorMaps& maps, const Sizes& s, u32 to, u32 stage_bytes, u32 landed, u32 left) {
#if CLAIMED
  WalkOf<Claimer> walk = {Claimer(s.claims, s.counters, s.tiles)};
#else
  Walk walk;
#endif
  Cursor cursor = {0, 1};                               // all are free at first
#pragma unroll 1
  for (walk.begin(FIRST_TILE(s), s); walk.live(s); walk.next(s), cursor.next(CHANNELS_LAST ? STAGES_P : STAGES_S)) {
    Source at = source_of(walk.tile, walk.chunk);
    u32 barrier = landed + cursor.stage * 8, bytes = CHANNELS_LAST ? PLANES * SEGMENTS * PLANE * ROW_BYTES : SLOT_BOXES * COPIED_BYTES;
#if PLANE_BARRIERS == 1
    barrier_wait(left + cursor.stage * 8, cursor.parity);
    expect_bytes(barrier, bytes);
#endif
    int c = at.channel, w = at.w - COLUMN_PAD, h = at.h + FIRST_H, d = at.d + FIRST_D;
#pragma unroll
    for (int r = 0; r < (CHANNELS_LAST ? PLANES : SLOT_BOXES); r++) {
#if PLANE_BARRIERS > 1
      barrier = landed + (cursor.stage * PLANE_BARRIERS + r) * 8;
      barrier_wait(left + (cursor.stage * PLANE_BARRIERS + r) * 8, cursor.parity);
      expect_bytes(barrier, bytes / PLANES);
#endif
#if BESIDE  // a box of pixels, images and channels
      h = at.n, d = c, c = at.n = 0;
#endif
#if STRIDED_BOX
      d = at.d + PLANE_D[r], h = at.h + PLANE_H[r];
#endif
      if (CHANNELS_LAST) w = at.w + RESIDUE[r];
#if BESIDE
      w = 0;
#else
      if (WHOLE) w = r * BOX_PIXELS, h = 0, d = 0;
      else if (SLOTS_BY_BOX && !CLASSED && r) w += ROW_UNITS * VEC;
#endif
#if CLASSED
      const ClassedBox box = classed_box(at, s, r);
      w = box.w, h = box.h, c = at.channel / CHANNEL_CLASSES;
#endif
      load_box(to + cursor.stage * stage_bytes + r * (SLOTS_BY_BOX ? SLOT_BOX_BYTES : PLANE_PITCH * ROW_BYTES), maps.of[CLASSED ? r : 0],
               CHANNELS_LAST ? c : w, CHANNELS_LAST ? w : h, CHANNELS_LAST ? h : d, CHANNELS_LAST ? d : c, at.n, barrier);
    }
#if CLAIMED
    walk.claims.tell();
#endif
  }
#if CLAIMED
  walk.claims.end();
#endif
}
#endif

__device__ __forceinline__ void produce(const char* __restrict__ x, const Sizes& s, const int* segments, u32 tiles, u32 slots, const Barriers& barriers, int thread) {
  int lane = thread & 31;
#if CLAIMED
  Walk now = {ClaimsOf<false>(s.claims)};
#else
  Walk now;
#endif
  Cursor tile = {0, 1};
#if !CHANNELS_LAST
  Pixels own;
#if !BESIDE
  if (SLOTS_BY_BOX) own.locate(x, s, Source(), segments, thread);
#endif
  Cursor slot = {0, 0};
#if !SLOTS_BY_BOX
  Walk ahead;
  ahead.begin(FIRST_TILE(s), s);
  u32 next_slot = 0;
#pragma unroll 1
  for (int i = 0; i < STAGES_S - 1; i++) {
    if (ahead.live(s)) {
      stage(x, s, source_of(ahead.tile, ahead.chunk), slots + i * SLOT_BYTES, thread);
      ahead.next(s);
    }
    copy_commit();
  }
  next_slot = STAGES_S - 1;
#endif
#pragma unroll 1
  for (now.begin(FIRST_TILE(s), s); now.live(s); now.next(s), tile.next(STAGES_P), slot.next(STAGES_S)) {
#if CLUSTER > 1
    if ((!SLOTS_BY_BOX || BESIDE) && now.chunk == FIRST_CHUNK) own.locate(x, s, source_of(now.tile, 0), segments, thread);
#elif BESIDE
    if (now.chunk == 0) own.locate(x, s, source_of(now.tile, 0), segments, thread);  // its rows
#else
    if (!SLOTS_BY_BOX && now.chunk == 0) own.locate(x, s, source_of(now.tile, 0), segments, thread);
#endif
#if SLOTS_BY_BOX
    barrier_wait(barriers.landed + slot.stage * 8, slot.parity);
#else
    copy_wait<STAGES_S - 2>();
    named_sync<1, PRODUCER_THREADS>();                  // everyone's copies have landed, and everyone has left the next slot
    if (ahead.live(s)) {
      stage(x, s, source_of(ahead.tile, ahead.chunk), slots + next_slot * SLOT_BYTES, thread);
      ahead.next(s);
    }
    if (++next_slot == STAGES_S) next_slot = 0;
    copy_commit();
#endif
    barrier_wait(barriers.empty + tile.stage * 8, tile.parity);
    int channel = now.chunk * CK;
    // Boxes bring zeros for pixels that do not exist, but for those ahead of a class's rows.
    u32 exist = SLOTS_BY_BOX && !WHOLE && (!CLASSED || FIRST_W >= 0 || now.tile.w > 0) ? 0xffffffffu : own.ok;
    if (CLASSED ? CHANNEL_CLASSES == 1 : own.plane % VEC == 0) {
      turn<true>(own, exist, channel, CIN_G - channel, slots + slot.stage * SLOT_BYTES, tiles + tile.stage * STAGE_BYTES, thread);
    } else {
      turn<false>(own, exist, channel, CIN_G - channel, slots + slot.stage * SLOT_BYTES, tiles + tile.stage * STAGE_BYTES, thread);
    }
    hand_over(barriers.full + tile.stage * 8, lane);
#if SLOTS_BY_BOX
    if (lane == 0) barrier_arrive(barriers.left + slot.stage * 8);
#endif
  }
#elif BOX
#pragma unroll 1
  for (now.begin(FIRST_TILE(s), s); now.live(s); now.next(s), tile.next(STAGES_P)) {
    barrier_wait(barriers.landed + tile.stage * 8, tile.parity ^ 1);
    round_units(tiles + tile.stage * STAGE_BYTES, thread);
    hand_over(barriers.full + tile.stage * 8, lane);
  }
#else
  Walk ahead;
  Cursor free = {0, 1};
  int pending = 0;
  ahead.begin(FIRST_TILE(s), s);
#pragma unroll 1
  for (now.begin(FIRST_TILE(s), s); now.live(s); now.next(s), tile.next(STAGES_P), pending--) {
#pragma unroll 1
    for (; pending < STAGES_P - 1; pending++) {         // one more at each turn, STAGES_P - 1 at the first
      if (ahead.live(s)) {
        barrier_wait(barriers.empty + free.stage * 8, free.parity);
        fetch(x, s, source_of(ahead.tile, ahead.chunk), segments, tiles + free.stage * STAGE_BYTES, thread);
        ahead.next(s);
        free.next(STAGES_P);
      }
      copy_commit();
    }
    copy_wait<STAGES_P - 2>();
    round_units(tiles + tile.stage * STAGE_BYTES, thread);
    hand_over(barriers.full + tile.stage * 8, lane);
  }
#endif
}
