// --- epilogue ---------------------------------------------------------------------------------------------------------
// A warp holds 16 rows of M. They pass through a shared buffer, so that memory is written in whole lines: NCHW 8 rows of a run of
// RUN x W_SUBS consecutive outputs, through a buffer of the warp; channels-last ROUND pixels of ROWS_PER_SUB channels, through one
// of all warps that hold these.
#define RUN (RUN_GROUPS * 8)
#define ROUND (64 / RUN * RUN)                          // channels-last: pixels that pass through at once, in whole runs: of one row or, SUB_H = 8, of several
// Bytes of a row of the buffer; the rest beyond whole 128 bytes lets rows meet different banks, and a row begin up to 31 bytes late.
#define RUN_PITCH ((RUN * W_SUBS * ELEMENT + 127) / 128 * 128 + (ELEMENT == 4 ? 32 : 48))
#if SHUFFLED
#define LINE_PITCH ((RUN + 1) * INNER * 4)              // of a line of the output, in float32
#define BUFFER_BYTES (PER_SLAB * LINE_PITCH)
#elif CHANNELS_LAST
#define BUFFER_BYTES (ROUND * 16 * ELEMENT)             // a warp's part
#elif DRAINED
// The warp's outputs of a whole tile, as boxes of [row][channel][OUT_SPAN bytes], swizzled, which the copy engine brings to memory.
#define RUN_BOXES (RUN * W_SUBS * ELEMENT / OUT_SPAN)   // of a run, side by side; OUT_SPAN: bytes of a box's row
#define BOX_ROWS (SUB_H == 8 ? 8 : 1)
#define OUT_BOX_BYTES (BOX_ROWS * 16 * OUT_SPAN)
#define BUFFER_BYTES (NB * 64 * W_SUBS * 16 * ELEMENT)
#else
#define BUFFER_BYTES (8 * RUN_PITCH)
#endif
#define RUN_SUBTILES (SUB_H == 8 ? RUN_GROUPS : RUN_GROUPS > 8 ? RUN_GROUPS / 8 : 1)  // neighbours along W that a run crosses
#define RUNS_OF_SUBTILE (SUB_H == 8 ? 8 : RUN_GROUPS > 8 ? 1 : 8 / RUN_GROUPS)
// Group k of run i of subtiles RUN_FIRST(r) ...: which subtile, and which of its groups of 8 columns.
#define RUN_FIRST(r) (PAIRED ? (r) / 2 * (2 * RUN_SUBTILES) + (r) % 2 : (r) * RUN_SUBTILES)  // subtile of a run's first group
#define RUN_NB(r, i, k) (PAIRED ? RUN_FIRST(r) + 2 * (k) : SUB_H == 8 ? RUN_FIRST(r) + (k) : RUN_FIRST(r) + (k) / 8)
#define RUN_J(r, i, k) (SUB_H == 8 ? (i) : RUN_GROUPS > 8 ? (k) % 8 : (i) * RUN_GROUPS + (k))
#if CLUSTER > 1  // whether another block of a cluster stores run i of these subtiles: of rounds (NCHW: runs) each has its turn
#define OTHERS(r, i) (((r) * RUNS_OF_SUBTILE + (i)) / (CHANNELS_LAST ? ROUND / RUN : 1) % CLUSTER != RANK)
#endif

#if CHANNELS_LAST
// Warps that hold the channels of a sub-position. They share a buffer: with a buffer for each a store has
// 32 bytes of a pixel in half precision, and lanes meet the same banks.
#define TEAM (ROWS_PER_SUB / 16)
#define PIXEL_UNITS (ROWS_PER_SUB * ELEMENT / 16)       // of a pixel in the buffer
#define PIXELS_AT_ONCE (TEAM * 32 / PIXEL_UNITS)        // that a team stores: 32 bytes a thread of its 16 rows

// A thread's unit of 16 bytes of a pixel, as much of it as there are channels.
__device__ __forceinline__ void store_of_pixel(char* to, const u32 (&v)[4], int couts, bool ok) {
#if ALIGNED_COUT
  store_global_128_if(to, v, ok);
#else
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    if (ELEMENT == 4) store_global_if(to + e * 4, v[e * ELEMENT / 4], ok && e < couts);
    else store_global_16_if(to + e * 2, v[e * ELEMENT / 4] >> e % 2 * 16, ok && e < couts);
  }
#endif
}
#endif

// The block of a W sub-position, -1: it has no taps. Up to 16 are one number, of four bits each: a table's entries are constants only
// after unrolling, and until then the compiler keeps all sums in memory.
#if W_SUBS <= 16
__device__ constexpr u64 packed_blocks() {
  constexpr signed char blocks[] = BLOCKS_OF_W;
  u64 packed = 0;
  for (int u = 0; u < W_SUBS; u++) packed |= (u64)(blocks[u] + 1) << 4 * u;
  return packed;
}
static_assert(MB < 15, "four bits name a block");
__device__ __forceinline__ constexpr int block_of_w(int u) {
  constexpr u64 packed = packed_blocks();
  return (int)(packed >> 4 * u & 15) - 1;
}
#else
__device__ __forceinline__ constexpr int block_of_w(int u) {
  constexpr signed char blocks[] = BLOCKS_OF_W;
  return blocks[u];
}
#endif

// A warp's 16 rows of M are output channels of one (d, h) sub-position (ROWS_PER_SUB is 64, 32 or 16).
struct Slab {
  int cout, couts;                                      // first channel in the group, and how many of the 16 exist
  int od, oh;                                           // offsets of the sub-position
};

__device__ __forceinline__ Slab slab_of(const Tile& t, int cout_block, int warp) {
  Slab slab;
  int sub = warp * 16 / ROWS_PER_SUB;
  slab.cout = cout_block * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB;
  slab.couts = COUT_G - slab.cout < 16 ? COUT_G - slab.cout : 16;
  slab.od = SUB_D[t.variant * SUBS + sub];
  slab.oh = SUB_HH[t.variant * SUBS + sub];
  return slab;
}

#if BARE
// Sub-positions without taps are the bias alone, and are stored from registers with a tile's own outputs. What of them lies together
// in memory, whole planes along H and W or rows, the tiles that cover it divide without regard for what each covers, so that shares
// are long and begin where sectors do. Tiles of their own would multiply nothing, and pass
// through the buffer all the same.
#if !CHANNELS_LAST
#define FILL_STEPS (TILE_W * OUT_STEP_W * ELEMENT / 512 < 3 ? TILE_W * OUT_STEP_W * ELEMENT / 512 + 1 : 4)

// A share of a run of one channel: from where the sector of its first byte begins (but not before `lowest`) to `end`, or, if it is not
// the run's `last`, to where the sector of `end` begins. A call stores FILL_STEPS times 512 bytes, `from` there on, without a branch, so
// that several channels' are under way, each along its row: all channels in turn would be slower.
__device__ __forceinline__ void fill_some(char* share, int lowest, int end, bool last, int from, u32 word, int lane, bool exists) {
  const u32 v[4] = {word, word, word, word};
  int phase = (int)((u64)share & 31), a = -phase > lowest ? -phase : lowest, z = last ? end : ((end + phase) & ~31) - phase;
  int at = ((a + phase) & ~15) - phase + from + lane * 16;
#pragma unroll
  for (int i = 0; i < FILL_STEPS; i++) store_global_128_if(share + at + i * 512, v, exists && at + i * 512 >= a && at + i * 512 + 16 <= z);
  // What is left of 16 bytes at either end, in elements: the first lanes have the head, and all where both ends are in one unit.
  bool tail = lane & VEC, ragged = (a + phase) & 15;
  at = (((tail ? z : a) + phase) & ~15) - phase + lane % VEC * ELEMENT;
  bool ok = exists && from == 0 && lane < 2 * VEC && (tail ? !ragged || (a + phase) / 16 < (z + phase) / 16 : ragged) && at >= a && at < z;
  if (ELEMENT == 4) store_global_if(share + at, word, ok);
  else store_global_16_if(share + at, word, ok);
}
#endif

// A warp's channels of the bare sub-positions of a tile's variant, of which each SUBS-th is its own. Of consumers that halve the
// pixels each takes every second channel (channels-last: round of pixels), `part` says which.
__device__ __forceinline__ void fill(const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, const Sizes& s, const Tile& t, const Slab& slab, int part, int warp, int lane) {
  constexpr int SHARES = SPLIT == 0 ? 2 : 1;
#if CHANNELS_LAST
  int thread = warp % TEAM * 32 + lane, channel = slab.cout - warp % TEAM * 16 + thread % PIXEL_UNITS * VEC, couts = COUT_G - channel;
  if (couts <= 0) return;
  u32 v[4] = {};
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    u32 one = bias && e < couts ? STORE_BITS(VALUE(bias[t.group * COUT_G + channel + e])) : 0;
    v[e * ELEMENT / 4] |= one << e * ELEMENT % 4 * 8;
  }
  int first_pixel = part * PIXELS_AT_ONCE + thread / PIXEL_UNITS;
  y += (t.group * COUT_G + channel) * ELEMENT;
#else
  int first = t.group * COUT_G + slab.cout;
  u32 word = bias && lane < slab.couts ? STORE_BITS(VALUE(bias[first + lane])) : 0;
  if (ELEMENT == 2) word |= word << 16;
  long long channel_bytes = (long long)s.out_d * s.out_h * s.out_w * ELEMENT;
#endif
#pragma unroll 1
  for (int b = BARE_OF[t.variant] + warp * 16 / ROWS_PER_SUB; b < BARE_OF[t.variant + 1]; b += SUBS) {
    const bool plane = BARE_ROW[b] == 0;                // else so many rows
    int share = t.w / TILE_W, shares = s.tiles_w, most = plane ? s.out_h : BARE_ROW[b];
    if (plane) share += t.h / TILE_H * shares, shares *= s.tiles_h;
    const bool last = share + 1 == shares;
    u32 whole = (u64)most * s.out_w / shares;           // outputs of a share, where all rows exist
#pragma unroll 1
    for (int i = 0; i < TILE_N * TILE_D * TILE_H; i += plane ? TILE_H : 1) {
      int n = t.n + i / (TILE_D * TILE_H), od = OUT_STEP_D * (t.d + i / TILE_H % TILE_D) + BARE_D[b];
      int oh = plane ? 0 : OUT_STEP_H * (t.h + i % TILE_H) + BARE_H[b], rows = s.out_h - oh < most ? s.out_h - oh : most;
      if (n >= s.batch || od >= s.out_d || rows <= 0) continue;
      u32 each = rows == most ? whole : (u64)rows * s.out_w / shares;
      int own = last ? (u32)rows * s.out_w - share * each : each;
#if CHANNELS_LAST
      char* to = y + (((long long)n * s.out_d + od) * s.out_h + oh) * s.out_w * (COUT * ELEMENT);
#if W_SUBS != OUT_STEP_W
      if (BARE_W[b] >= 0) {                             // a row's phase along W alone
        int ow = OUT_STEP_W * t.w + BARE_W[b];
#pragma unroll 4
        for (int p = first_pixel; p < TILE_W * W_SUBS; p += SHARES * PIXELS_AT_ONCE) {
          int w = ow + p / W_SUBS * OUT_STEP_W + p % W_SUBS;
          store_of_pixel(to + (long long)w * (COUT * ELEMENT), v, couts, w < s.out_w);
        }
        continue;
      }
#endif
      to += (long long)share * each * (COUT * ELEMENT);
#pragma unroll 4
      for (int p = first_pixel; p < own; p += SHARES * PIXELS_AT_ONCE) store_of_pixel(to + (long long)p * (COUT * ELEMENT), v, couts, true);
#else
      own *= ELEMENT;
      long long before = (long long)share * each * ELEMENT;
      int lowest = before < 31 ? -(int)before : -31;
      char* to = y + (((((long long)n * COUT + first) * s.out_d + od) * s.out_h + oh) * s.out_w) * ELEMENT + before;
      const bool once = own + 46 <= FILL_STEPS * 512;   // with up to 31 bytes of the sector, and 15 of the unit, that it begins in
      if (once) {
#pragma unroll 4
        for (int c = part; c < 16; c += SHARES)
          fill_some(to + c * channel_bytes, lowest, own, last, 0, __shfl_sync(0xffffffffu, word, c), lane, c < slab.couts);
      } else {
#pragma unroll 1
        for (int c = part; c < 16; c += SHARES)
#pragma unroll 1
          for (int from = 0; from < own + 46; from += FILL_STEPS * 512)
            fill_some(to + c * channel_bytes, lowest, own, last, from, __shfl_sync(0xffffffffu, word, c), lane, c < slab.couts);
      }
#endif
    }
  }
}
#endif

#if !CHANNELS_LAST
#define OUTPUTS (RUN * W_SUBS)                          // of a row of a run

#define CONTIGUOUS (W_SUBS == OUT_STEP_W)                // a tile's outputs of a row are neighbours in memory

// UNIT, below: bytes at multiples of which all rows of a run begin and end: 16, two outputs or one.
#define SHIFTED(unit) (ELEMENT == 2 && (unit) == 2)     // rows lie in the buffer as they do in their first sector
#define TOGETHER(unit) (SHIFTED(unit) ? 1 : 2)          // outputs that a thread stores to the buffer together

// Which of a thread's outputs of a row go first to the buffer, as an exclusive or of their order, so that the lanes of an
// instruction meet different banks: rows lie 8 banks apart (half precision: 12), the outputs of neighbouring lanes 2 W_SUBS.
template <int UNIT>
__device__ __forceinline__ int order_of(int g, int q) {
  if (ELEMENT == 2) return W_SUBS % 2 == 0 ? (g & 1) << 1 : 0;
  int by_column = W_SUBS % 4 == 0 ? q << 1 : W_SUBS % 2 == 0 ? q & 2 : 0;
  return TOGETHER(UNIT) == 2 ? by_column : by_column | g >> 2;
}

// One thread's 2 W_SUBS neighbouring outputs to the buffer.
template <int UNIT>
__device__ __forceinline__ void put(float (&v)[2 * W_SUBS], u32 at, int order) {
#pragma unroll
  for (int bit = TOGETHER(UNIT); bit < 8 && W_SUBS % bit == 0; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 2 * W_SUBS; i++) {
      if (i & bit) continue;
      float low = v[i], high = v[i ^ bit];
      v[i] = order & bit ? high : low;
      v[i ^ bit] = order & bit ? low : high;
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * W_SUBS; i += TOGETHER(UNIT)) {
    u32 to = at + (i ^ order) * ELEMENT;
#if ELEMENT == 4
    if (TOGETHER(UNIT) == 2) store_shared_f32x2(to, v[i], v[i ^ 1]);
    else store_shared_f32(to, v[i]);
#else
    if (TOGETHER(UNIT) == 2) store_shared_u32(to, pack_pair(make_float2(v[i], v[i ^ 1])));
    else store_shared_u16(to, STORE_BITS(v[i]));
#endif
  }
}

#if !CONTIGUOUS
// Eight rows with the other tiles' sub-positions between.
__device__ __forceinline__ void store_spread(char* to, long long plane, int rows, int left, u32 buffer, int lane) {
#pragma unroll
  for (int i = 0; i < (OUTPUTS + 31) / 32; i++) {
    int e = lane + 32 * i, o = e / W_SUBS * OUT_STEP_W + e % W_SUBS;
    bool in = (OUTPUTS % 32 == 0 || e < OUTPUTS) && o < left;
#pragma unroll
    for (int r = 0; r < 8; r++) {
      u32 from = buffer + r * RUN_PITCH + (OUTPUTS % 32 == 0 || e < OUTPUTS ? e : 0) * ELEMENT;
      char* p = to + r * plane + (long long)o * ELEMENT;
      bool ok = in && (COUT_G % 16 == 0 || r < rows);
      if (ELEMENT == 4) store_global_if(p, load_shared_u32(from), ok);
      else store_global_16_if(p, load_shared_u16(from), ok);
    }
  }
}
#else
template <int UNIT>
__device__ __forceinline__ void copy_unit(char* to, u32 from, bool ok) {
  u32 v[4];
  if (UNIT == 16) load_shared_128(v, from);
  else if (UNIT == 8) load_shared_64(v, from);
  else v[0] = UNIT == 4 ? load_shared_u32(from) : load_shared_u16(from);
  if (UNIT == 16) store_global_128_if(to, v, ok);
  else if (UNIT == 8) store_global_64_if(to, v, ok);
  else if (UNIT == 4) store_global_if(to, v[0], ok);
  else store_global_16_if(to, v[0], ok);
}

// Eight rows in units: an instruction stores 32 of them, of several rows if they are short.
template <int UNIT>
__device__ __forceinline__ void store_units(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int PER_ROW = OUTPUTS * ELEMENT / UNIT;
#pragma unroll
  for (int i = 0; i < (8 * PER_ROW + 31) / 32; i++) {
    int index = lane + 32 * i, first = 32 * i / PER_ROW, more = index / PER_ROW - first;  // rows: the first lane's, and how many on
    // Compared, not divided, where rows are long.
    if (PER_ROW >= 32) more = 32 * i % PER_ROW + 31 >= PER_ROW && index >= (first + 1) * PER_ROW;
    int r = first + more, at = (index - r * PER_ROW) * UNIT;
    char* row = to + first * plane + (PER_ROW >= 32 ? more ? plane : 0 : more * plane);
    bool in = PER_ROW % 4 == 0 || r < 8;
    copy_unit<UNIT>(row + at, in ? buffer + r * RUN_PITCH + at : buffer, in && at < end && (COUT_G % 16 == 0 || r < rows));
  }
}

#if BESIDE
// Eight rows in which images lie side by side, a lane some outputs: of each image a row of BESIDE_W, PERIOD columns from the next.
__device__ __forceinline__ void store_beside(char* to, long long plane, int rows, int images, u32 buffer, int lane) {
  constexpr int EACH = BESIDE_W % 2 == 0 && PERIOD * W_SUBS % 2 == 0 ? BESIDE_W % 4 == 0 && PERIOD * W_SUBS % 4 == 0 ? 4 : 2 : 1;
  constexpr int PER_IMAGE = BESIDE_W / EACH, PER_ROW = BESIDE * PER_IMAGE;
  long long image_bytes = plane * COUT;
#pragma unroll
  for (int i = 0; i < (8 * PER_ROW + 31) / 32; i++) {
    int index = lane + 32 * i, r = index / PER_ROW, image = index % PER_ROW / PER_IMAGE, at = index % PER_IMAGE * EACH;
    bool in = 8 * PER_ROW % 32 == 0 || r < 8;
    u32 from = buffer + r * RUN_PITCH + (image * (PERIOD * W_SUBS) + at) * ELEMENT;
    copy_unit<EACH * ELEMENT>(to + r * plane + image * image_bytes + at * ELEMENT, in ? from : buffer, in && r < rows && image < images);
  }
}
#endif

#if ELEMENT == 4
// Eight rows that begin anywhere, a lane an output: each instruction begins at a sector's first output, since a sector of 32
// bytes whose parts are stored at different times costs as much as several whole ones. 16 bytes a lane and the ends
// of rows by themselves, as below, is slower for float32.
__device__ __forceinline__ void store_sectors(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int ROWS = STORE_UNIT == ELEMENT ? 8 : 4;   // at a time: of kernels that have other ways beside, eight spill
  static_assert(8 % ROWS == 0, "all rows in turn");
#pragma unroll
  for (int from_row = 0; from_row < 8; from_row += ROWS) {
    char* row[ROWS];
    u32 from[ROWS];
    int at[ROWS];                                       // the lane's first output of each row; some are before or behind it
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
      int r = from_row + k;
      char* first = to + r * plane;
      at[k] = lane * 4 - ((int)(u64)first & 31);
      row[k] = first + at[k], from[k] = buffer + r * RUN_PITCH + at[k];
      if (COUT_G % 16 && r >= rows) at[k] = 1 << 20;
    }
    // What follows of a row is at known distances. A place for each output takes a third more instructions.
#pragma unroll
    for (int i = 0; i < (OUTPUTS + 38) / 32; i++) {
      u32 v[ROWS];
      bool in[ROWS];
#pragma unroll
      for (int k = 0; k < ROWS; k++) {
        in[k] = i ? at[k] < end - i * 128 : (u32)at[k] < (u32)end;
        v[k] = load_shared_u32_if(from[k] + i * 128, in[k]);
      }
#pragma unroll
      for (int k = 0; k < ROWS; k++) store_global_if(row[k] + i * 128, v[k], in[k]);
    }
  }
}
#else
// Eight rows that begin between words. The buffer has a row where memory has it in its first sector of 32 bytes, so that 16 bytes
// of the one are 16 of the other; two lanes have a sector. What a row's first and last 16 bytes have of it follows in
// units. Words made of their neighbours take longer.
template <int UNIT>
__device__ __forceinline__ void store_shifted(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int PER_ROW = (OUTPUTS * ELEMENT + 32 - UNIT + 31) / 32 * 2, ENDS = 16 / UNIT;
#pragma unroll
  for (int i = 0; i < (8 * PER_ROW + 31) / 32; i++) {
    int index = lane + 32 * i, r = index / PER_ROW, unit = index % PER_ROW;
    char* row = to + r * plane;
    int at = unit * 16 - (int)((u64)row & 31);          // in the row
    bool in = PER_ROW % 4 == 0 || r < 8;
    copy_unit<16>(row + at, in ? buffer + r * RUN_PITCH + unit * 16 : buffer, in && at >= 0 && at + 16 <= end && r < rows);
  }
#pragma unroll
  for (int i = 0; i < 8 * 2 * ENDS / 32; i++) {         // ENDS lanes for either end of a row
    int r = (lane + 32 * i) / (2 * ENDS), at = lane % ENDS * UNIT;
    char* row = to + r * plane;
    int phase = (int)((u64)row & 15), head = -phase & 15;
    bool tail = lane & ENDS;
    if (tail) at += ((phase + end) & ~15) - phase;
    bool ok = (tail ? at >= head : at < head) && at < end && r < rows;
    copy_unit<UNIT>(row + at, buffer + r * RUN_PITCH + ((u32)(u64)row & 31) + (ok ? at : 0), ok);
  }
}
#endif

// Eight rows (output channels) of a run from the buffer to memory: `end` bytes of each. `to` is the first row's first output, rows
// lie `plane` bytes apart.
template <int UNIT>
__device__ __forceinline__ void store_rows(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
#if ELEMENT == 4
  if (UNIT == 4) store_sectors(to, plane, rows, end, buffer, lane);
#else
  if (SHIFTED(UNIT)) store_shifted<UNIT>(to, plane, rows, end, buffer, lane);
#endif
  else store_units<UNIT>(to, plane, rows, end, buffer, lane);
}
#endif
#else
#define ROUND_GROUPS (ROUND / 8)                        // of 8 columns of an accumulator
#define MATRICES (ROUND_GROUPS % 2 ? 2 : 4)             // of 8 channels and pixels that are turned together

__device__ __forceinline__ void team_sync() {
  if (TEAM == 1) __syncwarp();
  else named_sync(4 + ((threadIdx.x >> 5) - FIRST_CONSUMER * 4) / TEAM, TEAM * 32);
}

// Byte of a unit of 16 bytes of pixel p in the buffer: swizzled, so that lanes which write (float32: 8 channels of 4 pixels, half
// precision: 16 bytes of 8 pixels) or read (neighbouring units) meet different banks.
__device__ __forceinline__ u32 place_in_round(int p, int unit) {
  if (ELEMENT == 4) return ((p * PIXEL_UNITS + unit) ^ (p & 6)) << 4;
  return (p * PIXEL_UNITS + (unit ^ (p & 7) * PIXEL_UNITS / 8)) << 4;
}

// W sub-position u of runs i ... of subtiles RUN_FIRST(r) ...: a warp's outputs to its team's buffer.
__device__ __forceinline__ void put_round(float (&acc)[MB][NB][32], float (&bias)[2], int r, int i, int u, u32 buffer, int warp, int lane) {
#if ELEMENT == 4
  int g = lane >> 2, q = lane & 3;
#pragma unroll
  for (int m = 0; m < ROUND_GROUPS; m++) {
    const int nb = RUN_NB(r, i + m / RUN_GROUPS, m % RUN_GROUPS), j = RUN_J(r, i + m / RUN_GROUPS, m % RUN_GROUPS);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int c = 0; c < 2; c++)
        store_shared_f32(buffer + place_in_round(m * 8 + 2 * q + c, warp * 4 + 2 * h + (g >> 2)) + (g & 3) * 4,
                         block_of_w(u) < 0 ? bias[h] : acc[block_of_w(u) < 0 ? 0 : block_of_w(u)][nb][4 * j + 2 * h + c]);
  }
#else
  u32 row = buffer + place_in_round(lane / 16 * 8 % (MATRICES * 4) + lane % 8, warp * 2 + lane / 8 % 2);  // the lane's of its matrix
#pragma unroll
  for (int m = 0; m < ROUND_GROUPS; m += MATRICES / 2) {
    u32 v[MATRICES];
#pragma unroll
    for (int e = 0; e < MATRICES; e++) {
      const int k = m + e / 2, h = e % 2;
      const int nb = RUN_NB(r, i + k / RUN_GROUPS, k % RUN_GROUPS), j = RUN_J(r, i + k / RUN_GROUPS, k % RUN_GROUPS);
      float (&from)[32] = acc[block_of_w(u) < 0 ? 0 : block_of_w(u)][nb];
      v[e] = block_of_w(u) < 0 ? pack_pair(make_float2(bias[h], bias[h])) : pack_pair(make_float2(from[4 * j + 2 * h], from[4 * j + 2 * h + 1]));
    }
    store_matrices_turned(row + m * 8 * PIXEL_UNITS * 16, v);
  }
#endif
}

#define APART (32 / ELEMENT)                            // pixels between those of a thread
#define LINE (SUB_H == 8 ? RUN : ROUND)                 // pixels of a round in a row of the output

// Where a pixel of the output lies, in pixels, and the bytes from one q to the next along H and W.
#if BATCH_AS_WIDTH                                      // a dimension more than memory has: columns are images
#define PIXEL_OF(s, n, d, h, w) (((long long)(w) * s.out_d + (d)) * s.out_h + (h))
#define ROW_PITCH(s) (1LL * COUT * ELEMENT * OUT_STEP_H)
#define COLUMN_PITCH(s) ((long long)s.out_d * s.out_h * (1LL * OUT_STEP_W * COUT * ELEMENT))
#else
#define PIXEL_OF(s, n, d, h, w) ((((long long)(n) * s.out_d + (d)) * s.out_h + (h)) * s.out_w + (w))
#define ROW_PITCH(s) (s.out_w * (1LL * COUT * ELEMENT * OUT_STEP_H))
#define COLUMN_PITCH(s) (1LL * OUT_STEP_W * COUT * ELEMENT)
#endif

// A round from the buffer to memory. The thread's first unit goes to `to`, column `column` of its row; `couts` channels, `left` columns
// and `lines` rows of the output are left there, and rows lie `pitch` bytes apart, columns `step`.
__device__ __forceinline__ void store_round(char* to, int column, int couts, int left, int lines, long long pitch, long long step, u32 from) {
#pragma unroll
  for (int i = 0; i < (ROUND + APART - 1) / APART; i++) {
    int line = i * APART / LINE, over = i * APART % LINE;
    bool crosses = over + APART > LINE && LINE > APART && column + over >= LINE;  // into the row below
    char* at = to + line * pitch + over * step;
    if (crosses) at += pitch - LINE * step;
    bool ok = over * OUT_STEP_W < left + (crosses ? LINE * OUT_STEP_W : 0) && (line + crosses) * OUT_STEP_H < lines && couts > 0;
    if (ROUND % APART != 0) ok = ok && column + i * APART < ROUND;
    u32 v[4];
    load_shared_128(v, from + (ROUND % APART == 0 || ok ? i * (APART * PIXEL_UNITS * 16) : 0));
    store_of_pixel(at, v, couts, ok);
  }
}
#endif

#if !CHANNELS_LAST
// Rows h * 8 ... of run i of subtiles RUN_FIRST(r) ...: a thread's outputs of its row to the buffer.
template <int UNIT>
__device__ __forceinline__ void put_rows(float (&acc)[MB][NB][32], float bias, int r, int i, int h, u32 row, int lane) {
  int g = lane >> 2, q = lane & 3, order = order_of<UNIT>(g, q);
#pragma unroll
  for (int k = 0; k < RUN_GROUPS; k++) {
    const int nb = RUN_NB(r, i, k), j = RUN_J(r, i, k);
    float v[2 * W_SUBS];
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int u = 0; u < W_SUBS; u++) v[c * W_SUBS + u] = block_of_w(u) < 0 ? bias : acc[block_of_w(u) < 0 ? 0 : block_of_w(u)][nb][4 * j + 2 * h + c];
    put<UNIT>(v, row + (k * 8 + 2 * q) * W_SUBS * ELEMENT, order);
  }
}

#if CONTIGUOUS
template <int UNIT>
__device__ __forceinline__ void pass_rows(float (&acc)[MB][NB][32], float bias, int r, int i, int h, u32 row, char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  put_rows<UNIT>(acc, bias, r, i, h, row, lane);
  __syncwarp();
  store_rows<UNIT>(to, plane, rows, end, buffer, lane);
}
#endif
#endif

#if SHUFFLED
// A line of a run from the buffer to memory, outputs `first` ... of which those from 0 to `end` exist. (One by one:
// most layers whose phases are rows write few outputs.)
__device__ __forceinline__ void store_line(char* to, int first, int end, u32 line, int lane) {
#pragma unroll
  for (int i = 0; i < (RUN * INNER + 31) / 32; i++) {
    int e = lane + 32 * i, at = first + e;
    bool ok = (u32)at < (u32)end && (RUN * INNER % 32 == 0 || e < RUN * INNER);
    float v = load_shared_f32(line + (RUN * INNER % 32 == 0 || ok ? e : 0) * 4);
    char* p = to + (long long)at * ELEMENT;
    if (ELEMENT == 4) store_global_if(p, STORE_BITS(v), ok);
    else store_global_16_if(p, STORE_BITS(v), ok);
  }
}

// As below, of one W sub-position: rows of M go to their lines in the buffer, where the phases of neighbouring q are neighbours.
__device__ __forceinline__ void epilogue(float (&acc)[MB][NB][32], const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, const Sizes& s, const Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  OPAQUE(lane);
  int g = lane >> 2, q = lane & 3;
  Slab slab = slab_of(t, cout_block, warp);
  if (slab.couts <= 0) return;
  float b[2] = {0.f, 0.f};
  u32 place[2];
  bool exists[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    Row row = shuffled_row(slab.cout + g + 8 * h);
    exists[h] = row.exists;
    place[h] = buffer + row.line * LINE_PITCH + (2 * q * INNER + row.place) * 4;
    if (bias && row.exists) b[h] = VALUE(bias[row.channel]);
  }
  constexpr int PER_PIXEL = CHANNELS_LAST ? LAYER_CHANNELS : 1;  // neighbours
  int first_line = slab.cout / 16 * PER_SLAB;
#pragma unroll
  for (int r = 0; r < NB / RUN_SUBTILES; r++) {
    Place at = place_of(first_subtile + RUN_FIRST(r));
    int n = t.n + at.n, d = OUT_STEP_D * (t.d + at.d) + slab.od;
#pragma unroll
    for (int i = 0; i < RUNS_OF_SUBTILE; i++) {
      int h = OUT_STEP_H * (t.h + at.h + (SUB_H == 8 ? i : 0)) + slab.oh;
      int w = OUT_STEP_W * (t.w + at.w + (SUB_H == 8 ? 0 : i * RUN));
      int first = (w * LAYER_STRIDE_W - LEAD_W) * PER_PIXEL, end = s.out_w * PER_PIXEL;
      if (n >= s.batch || d * LAYER_STRIDE_D - LEAD_D >= s.out_d || h * LAYER_STRIDE_H - LEAD_H >= s.out_h || first >= end) continue;
#pragma unroll
      for (int k = 0; k < RUN_GROUPS; k++) {
        const int nb = RUN_NB(r, i, k), j = RUN_J(r, i, k);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int c = 0; c < 2; c++)
            if (exists[half]) store_shared_f32(place[half] + (k * 8 + c) * (INNER * 4), acc[0][nb][4 * j + 2 * half + c] + b[half]);
      }
      __syncwarp();
#pragma unroll 1
      for (int l = 0; l < PER_SLAB; l++) {
        Line line = shuffled_line(first_line + l);
        int od = d * LAYER_STRIDE_D + line.d - LEAD_D, oh = h * LAYER_STRIDE_H + line.h - LEAD_H;
        if (first_line + l >= LINES || (u32)od >= (u32)s.out_d || (u32)oh >= (u32)s.out_h) continue;
        long long row = (((long long)n * (CHANNELS_LAST ? 1 : LAYER_CHANNELS) + line.channel) * s.out_d + od) * s.out_h + oh;
        store_line(y + row * end * ELEMENT, first, end, buffer + l * LINE_PITCH, lane);
      }
      __syncwarp();
    }
  }
}
#elif DRAINED
// While the next tile is multiplied, the copy engine stores this one's outputs. Nothing hides other epilogues unless consumers take tiles
// in turn.
#if W_SUBS != 1 && W_SUBS != 2 && W_SUBS != 4
#error "a lane's words are one store, and rows of boxes a whole number of them"
#endif
// A lane's V words.
template <int V>
__device__ __forceinline__ void store_words(u32 to, const u32 (&v)[V]) {
  if constexpr (V == 1) store_shared_u32(to, v[0]);
  else if constexpr (V == 2) store_shared_f32x2(to, __uint_as_float(v[0]), __uint_as_float(v[1]));
  else store_shared_128(to, v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ void epilogue(float (&acc)[MB][NB][32], const ELEMENT_TYPE* __restrict__ bias, const TensorMap& map, const Sizes& s, const Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  OPAQUE(lane);
  int g = lane >> 2, q = lane & 3;
  Slab slab = slab_of(t, cout_block, warp);
  if (slab.couts <= 0) return;
  float b[2] = {0.f, 0.f};
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (bias && g + 8 * h < slab.couts) b[h] = VALUE(bias[slab.cout + g + 8 * h]);
  if (lane == 0) bulk_wait_read();  // the last tile's have left the buffer
  __syncwarp();
  // The swizzle exchanges 16-byte units by bits of the address that are the channel's alone.
  u32 swizzle = (g * OUT_SPAN >> 7 & (OUT_SPAN / 16 - 1)) << 4, own = buffer + g * OUT_SPAN, lanes = q * (2 * W_SUBS * ELEMENT) ^ swizzle;
#pragma unroll
  for (int r = 0; r < NB / RUN_SUBTILES; r++)
#pragma unroll
    for (int i = 0; i < RUNS_OF_SUBTILE; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int k = 0; k < RUN_GROUPS; k++) {
          const int nb = RUN_NB(r, i, k), j = RUN_J(r, i, k), at = k * 8 * W_SUBS * ELEMENT;
          const int box = (SUB_H == 8 ? r : r * RUNS_OF_SUBTILE + i) * RUN_BOXES + at / OUT_SPAN, row = SUB_H == 8 ? i : 0;
          float v[2 * W_SUBS];
#pragma unroll
          for (int c = 0; c < 2; c++)
#pragma unroll
            for (int u = 0; u < W_SUBS; u++) v[c * W_SUBS + u] = b[h] + (block_of_w(u) < 0 ? 0.f : acc[block_of_w(u) < 0 ? 0 : block_of_w(u)][nb][4 * j + 2 * h + c]);
          u32 words[W_SUBS];
#pragma unroll
          for (int u = 0; u < W_SUBS; u++) words[u] = pack_pair(make_float2(v[2 * u], v[2 * u + 1]));
          store_words(own + box * OUT_BOX_BYTES + (row * 16 + 8 * h) * OUT_SPAN + (at % OUT_SPAN ^ lanes), words);
        }
  fence_async_shared();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int r = 0; r < NB / RUN_SUBTILES; r++) {
      Place place = place_of(first_subtile + RUN_FIRST(r));
#pragma unroll
      for (int i = 0; i < (SUB_H == 8 ? 1 : RUNS_OF_SUBTILE); i++)
#pragma unroll
        for (int k = 0; k < RUN_BOXES; k++) {
          int box = (SUB_H == 8 ? r : r * RUNS_OF_SUBTILE + i) * RUN_BOXES + k;
          int w = OUT_STEP_W * (t.w + place.w + i * RUN) + k * (OUT_SPAN / ELEMENT);
          store_box(map, buffer + box * OUT_BOX_BYTES, w, slab.cout, t.h + place.h, slab.oh, t.n + place.n);
        }
    }
    bulk_commit();
  }
}
#else
// Unrolled, since registers have no run-time index. Stores once in a loop, with only the reading of registers in
// branches, take longer and compile no faster.
__device__ __forceinline__ void epilogue(float (&acc)[MB][NB][32], const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, const Sizes& s, const Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  OPAQUE(lane);                                         // what follows from it is found here, not kept from tile to tile (spills)
  int g = lane >> 2;
  Slab slab = slab_of(t, cout_block, warp);
#if BARE
  fill(bias, y, s, t, slab, first_subtile / NB, warp, lane);
#endif
#if CHANNELS_LAST
  int in_team = warp % TEAM, first = slab.cout - in_team * 16;  // the team's first channel
  if (first >= COUT_G) return;
  buffer -= in_team * BUFFER_BYTES;
  u32 thread = in_team * 32 + lane, unit = thread % PIXEL_UNITS, pixel = thread / PIXEL_UNITS;
  int column = pixel % LINE, row = pixel / LINE, couts = COUT_G - first - (int)unit * VEC;
  u32 from = buffer + place_in_round(pixel, unit);      // pixels 8 and 16 further have the same swizzle
  long long pitch = ROW_PITCH(s), step = COLUMN_PITCH(s);
  y += row * pitch + column * step + (first + (int)unit * VEC) * ELEMENT;
#else
  if (slab.couts <= 0) return;
#endif
  float b[2] = {0.f, 0.f};
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (bias && g + 8 * h < slab.couts) b[h] = VALUE(bias[t.group * COUT_G + slab.cout + g + 8 * h]);
  if (bias) {
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int e = 0; e < 32; e++) acc[m][nb][e] += b[e >> 1 & 1];
  }
#if !CHANNELS_LAST
  int channel = t.group * COUT_G + slab.cout;
  long long plane = (long long)s.out_d * s.out_h * s.out_w * ELEMENT;
#endif
#pragma unroll
  for (int r = 0; r < NB / RUN_SUBTILES; r++) {
    Place place = place_of(first_subtile + RUN_FIRST(r));
    int n = t.n + place.n, od = OUT_STEP_D * (t.d + place.d) + slab.od;
    bool image = n < s.batch && od < s.out_d;
#if CHANNELS_LAST
    int oh = OUT_STEP_H * (t.h + place.h) + slab.oh, ow = OUT_STEP_W * (t.w + place.w) + U_W[t.variant];
    char* to = y + (PIXEL_OF(s, n, od, oh, ow) * COUT + t.group * COUT_G) * ELEMENT;
#pragma unroll
    for (int i = 0; i < RUNS_OF_SUBTILE; i += ROUND / RUN) {
      int lines = s.out_h - oh - OUT_STEP_H * (SUB_H == 8 ? i : 0), left = s.out_w - ow;
      if (!image || lines <= 0 || left <= 0) continue;
#if CLUSTER > 1
      if (OTHERS(r, i)) continue;
#endif
#pragma unroll
      for (int u = 0; u < W_SUBS; u++) {
        put_round(acc, b, r, i, u, buffer, in_team, lane);
        team_sync();
        char* first_of = to + (SUB_H == 8 ? i * pitch : 0) + u * (1LL * COUT * ELEMENT);
        store_round(first_of, column, couts, left - u - column * OUT_STEP_W, lines - row * OUT_STEP_H, pitch, step, from);
        team_sync();
      }
    }
#else
#pragma unroll
    for (int i = 0; i < RUNS_OF_SUBTILE; i++) {
      int oh = OUT_STEP_H * (t.h + place.h + (SUB_H == 8 ? i : 0)) + slab.oh;
      int ow = OUT_STEP_W * (t.w + place.w + (SUB_H == 8 ? 0 : i * RUN)) + U_W[t.variant], left = s.out_w - ow;
      if (!image || oh >= s.out_h || left <= 0) continue;
#if CLUSTER > 1
      if (OTHERS(r, i)) continue;
#endif
      char* to = y + (((long long)n * COUT + channel) * s.out_d + od) * s.out_h * s.out_w * ELEMENT + ((long long)oh * s.out_w + ow) * ELEMENT;
      int end = (left < OUTPUTS ? left : OUTPUTS) * ELEMENT;
      u32 misaligned = (u32)(u64)to | (u32)plane | end;  // multiples of what all rows begin and end at
#pragma unroll
      for (int h = 0; h < 2; h++) {
        char* first = to + h * 8 * plane;
        int rows = COUT_G % 16 && slab.couts < 8 * h + 8 ? slab.couts - 8 * h : 8;
        u32 row = buffer + g * RUN_PITCH;
#if BESIDE
        put_rows<16>(acc, b[h], r, i, h, row, lane);
        __syncwarp();
        store_beside(first, plane, rows, s.batch - n, buffer, lane);
#elif CONTIGUOUS
        if (STORE_UNIT == 16 || (STORE_UNIT != ELEMENT && (misaligned & 15) == 0)) pass_rows<16>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
        else if (STORE_UNIT == 2 * ELEMENT || (STORE_UNIT != ELEMENT && (misaligned & (2 * ELEMENT - 1)) == 0)) pass_rows<2 * ELEMENT>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
        else pass_rows<ELEMENT>(acc, b[h], r, i, h, row + (SHIFTED(ELEMENT) ? (u32)(u64)(first + g * plane) & 31 : 0), first, plane, rows, end, buffer, lane);
#else
        put_rows<16>(acc, b[h], r, i, h, row, lane);
        __syncwarp();
        store_spread(first, plane, rows, left, buffer, lane);
#endif
        __syncwarp();
      }
    }
#endif
  }
}
#endif
