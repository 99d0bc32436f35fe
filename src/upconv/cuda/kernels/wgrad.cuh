// What both grad-weight kernels share: the geometry of g's tile, a block's record of sums, and copies by threads.
//
// Rows of x and g in a chunk follow from tile, taps, step (the stride) and dilation; the sets of taps differ only in where their
// chunks begin.
#include "number.cuh"

// C: the constants of a tiling (cuda/wgrad/wgrad_tiling.py), and which of wgrad_wgmma.cu's ways it takes. Channels are a group's.
template <class C_>
struct WgradShape {
using C = C_;
using Number = NumberOf<C::precision>;
using Bits = typename Number::Bits;

static constexpr int ELEMENT = Number::SIZE;
static constexpr bool NARROW = ELEMENT == 2;            // of 16 bits
static constexpr int VEC = 16 / ELEMENT;                // elements of a 16-byte unit
static constexpr int TAPS = C::kernel_d * C::kernel_h * C::kernel_w;
static constexpr int SET_TAPS = C::taps_d * C::taps_h * C::taps_w;
static constexpr int SETS = C::sets_d * C::sets_h * C::sets_w;
static constexpr int CIN = C::groups * C::cin;
static constexpr int COUT = C::groups * C::cout;
static constexpr int CI_TILES = (C::cin + C::block_ci - 1) / C::block_ci;
static constexpr int CO_TILES = (C::cout + C::block_co - 1) / C::block_co;

static constexpr int TILES = SETS * CO_TILES * CI_TILES * C::groups;

// A block's sums, [tap][ci][co], with pitches by which a warp's fragments meet all banks of shared memory: neighbours along co lie in a
// row, and ci of neighbouring lanes 2 rows apart, 8 banks. Taps lie 8 banks apart.
static constexpr int SUMS_PITCH = C::block_co + 4;
static constexpr int SUMS_OF_TAP = C::block_ci * SUMS_PITCH + 8;
static constexpr int SUMS_BYTES = SET_TAPS * SUMS_OF_TAP * 4;
static __device__ __forceinline__ int sum_at(int tap, int ci, int co) { return (tap * SUMS_OF_TAP + ci * SUMS_PITCH + co) * 4; }

static constexpr int Q_ROWS = C::tile_n * C::tile_d * C::tile_h;
static constexpr int CLASS_ROWS = (C::g_rows_h + C::row_classes - 1) / C::row_classes;
static constexpr int G_ROWS = C::tile_n * C::g_rows_d * (C::row_classes * CLASS_ROWS);
static constexpr int G_BYTES = G_ROWS * (C::channels_last ? C::g_columns : C::block_co) * C::g_pitch * ELEMENT;

struct Sizes {
  int batch, in_d, in_h, in_w;             // gapless: of a chunk, which has tile_w pixels at most
  int out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;           // chunks per axis
  int chunks, per_split;                   // all of them; of one split
};

struct Chunk { int n, d, h, w; };          // its first place

struct Work {                              // of a block
  int group, ci, co;                       // first channels within the group
  int tap_d, tap_h, tap_w;                 // first tap of the set
};

static __device__ __forceinline__ Chunk chunk_at(int i, const Sizes& s) {
  Chunk c;
  c.w = i % s.tiles_w * (C::gapless ? s.in_w : C::tile_w);  i /= s.tiles_w;
  c.h = i % s.tiles_h * (C::gapless ? s.in_h : C::tile_h);  i /= s.tiles_h;
  c.d = i % s.tiles_d * (C::gapless ? s.in_d : C::tile_d);
  c.n = i / s.tiles_d * (C::gapless ? s.batch : C::tile_n);
  return c;
}

// Where g's tile of a chunk begins.
static __device__ __forceinline__ Chunk in_g(const Chunk& c, const Work& work) {
  return {c.n, c.d * C::step_d + work.tap_d * C::dilation_d - C::padding_d, c.h * C::step_h + work.tap_h * C::dilation_h - C::padding_h,
          c.w * C::step_w + work.tap_w * C::dilation_w - C::padding_w};
}

// Of a block; the split that it takes. Blocks of the same pixels are neighbours, for L2's sake.
static __device__ __forceinline__ int take_work(Work& work, int index) {
  int set = index % SETS;  index /= SETS;
  work.co = index % CO_TILES * C::block_co;  index /= CO_TILES;
  work.ci = index % CI_TILES * C::block_ci;  index /= CI_TILES;
  work.group = index % C::groups;
  work.tap_w = set % C::sets_w * C::taps_w;
  work.tap_h = set / C::sets_w % C::sets_h * C::taps_h;
  work.tap_d = set / (C::sets_w * C::sets_h) * C::taps_d;
  return index / C::groups;
}

// (n, d, h) of row `r` of positions, or of g's tile in its tensor.
struct Rows { int n, d, h; };
static __device__ __forceinline__ Rows q_row(int r) { return {r / (C::tile_d * C::tile_h), r / C::tile_h % C::tile_d, r % C::tile_h}; }
static __device__ __forceinline__ Rows g_row(int r) { return {r / (C::g_rows_h * C::g_rows_d), r / C::g_rows_h % C::g_rows_d * C::apart_d, r % C::g_rows_h * C::apart_h}; }
};

// --- copies by threads -----------------------------------------------------------------------------------------------

struct WgradMemory { int batch, d, h, w; };             // a tensor

// g's tile of a WgradShape S, as threads copy it.
template <class S>
struct WgradG {
  using C = typename S::C;
  static constexpr int ROWS = S::G_ROWS, ROWS_H = C::g_rows_h, BLOCK = C::block_co, CHANNELS = S::COUT, OF_GROUP = C::cout;
  static constexpr int COLUMNS = C::g_columns, UNITS = C::g_units, PITCH = C::g_pitch, APART_H = C::apart_h;
  static __device__ __forceinline__ typename S::Rows row(int r) { return S::g_row(r); }
};

// The tile of an operand by so many threads. `at`: where it begins in the tensor; `channel`, of which `left` are the group's.
template <class S, class Operand, int COPIERS>
struct WgradCopies {
using Bits = typename S::Bits;
using Rows = typename S::Rows;
using Place = typename S::Chunk;
static constexpr int ELEMENT = S::ELEMENT, VEC = S::VEC, BLOCK = Operand::BLOCK, PITCH = Operand::PITCH, CHANNELS = Operand::CHANNELS;

// A unit that begins at any element: channels_last pixels of an odd number of channels.
static __device__ __forceinline__ void copy_elements(unsigned char* to, const char* from, int count) {
#pragma unroll 1
  for (int e = 0; e < VEC; e++) ((Bits*)to)[e] = e < count ? ((const Bits*)from)[e] : (Bits)0;
}

// channels_last: [row][column][channel].
static __device__ __forceinline__ void copy_pixels(const char* __restrict__ tensor, const WgradMemory& memory, const Place& at, int channel, int left, unsigned char* to, int thread) {
  u32 to_address = shared_address(to);
  constexpr int COLUMNS = Operand::COLUMNS, UNITS = BLOCK / VEC;
  constexpr bool WHOLE = CHANNELS % VEC == 0 && Operand::OF_GROUP % VEC == 0;
#pragma unroll 4
  for (int i = thread; i < Operand::ROWS * COLUMNS * UNITS; i += COPIERS) {
    int unit = i % UNITS, column = i / UNITS % COLUMNS, row = i / (UNITS * COLUMNS);
    Rows of = Operand::row(row);
    int n = at.n + of.n, d = at.d + of.d, h = at.h + of.h, w = at.w + column;
    bool in = n < memory.batch && (u32)d < (u32)memory.d && (u32)h < (u32)memory.h && (u32)w < (u32)memory.w;
    int offset = ((row * COLUMNS + column) * PITCH + unit * VEC) * ELEMENT, have = in ? left - unit * VEC : 0;
    const char* from = tensor + ((((long long)n * memory.d + d) * memory.h + h) * memory.w + w) * (CHANNELS * ELEMENT) + (channel + unit * VEC) * ELEMENT;
    if (WHOLE || have <= 0) copy16(to_address + offset, have > 0 ? from : tensor, have > 0 ? 16 : 0);
    else copy_elements(to + offset, from, have);
  }
}

// NCHW: [row][channel][column]. A unit that holds the left border is copied whole; `clear_left` clears what lies before it when it has
// landed. Copies in parts of 4 bytes, by some of a warp's threads each time, take nearly three times as long.
// A thread keeps its channel and place in the row for all rows of the tile: an index for each unit makes address arithmetic the bound.
static __device__ __forceinline__ void copy_rows(const char* __restrict__ tensor, const WgradMemory& memory, const Place& at, int channel, int left, unsigned char* to, int thread) {
  u32 to_address = shared_address(to);
  constexpr int UNITS = Operand::UNITS, ROWS_H = Operand::ROWS_H;
  long long plane = (long long)memory.d * memory.h * memory.w;
#pragma unroll 1
  for (int i = thread; i < BLOCK * UNITS; i += COPIERS) {
    int unit = i % UNITS, c = i / UNITS;
    u32 offset = (c * PITCH + unit * VEC) * ELEMENT;
#pragma unroll 1
    for (int r = 0; r < Operand::ROWS / ROWS_H; r++) {
      Rows of = Operand::row(r * ROWS_H);
      int n = at.n + of.n, d = at.d + of.d;
      bool slice = n < memory.batch && (u32)d < (u32)memory.d && c < left;
      const char* base = tensor + (((long long)n * CHANNELS + channel + c) * plane + (long long)d * memory.h * memory.w + at.w) * ELEMENT;
#pragma unroll 2
      for (int rh = 0; rh < ROWS_H; rh++, offset += BLOCK * PITCH * ELEMENT) {
        int h = at.h + rh * Operand::APART_H;
        const char* from = base + (long long)h * memory.w * ELEMENT;
        int misaligned = (int)((u64)from & 15), first = at.w + (unit * 16 - misaligned) / ELEMENT;  // column of the first element
        from += unit * 16 - misaligned;
        bool in = slice && (u32)h < (u32)memory.h && first + VEC > 0 && first < memory.w;
        const int have = memory.w - first < VEC ? memory.w - first : VEC;
        copy16(to_address + offset, in ? from : tensor, in ? have * ELEMENT : 0);
      }
    }
  }
}

// NCHW, of rows that begin before column 0: clears the elements before it in the unit that holds it.
static __device__ __forceinline__ void clear_left(const char* tensor, const WgradMemory& memory, const Place& at, int channel, unsigned char* to, int thread) {
  u32 plane = (u32)memory.d * memory.h * memory.w;
#pragma unroll 1
  for (int i = thread; i < Operand::ROWS * BLOCK; i += COPIERS) {
    int c = i % BLOCK, row = i / BLOCK;
    Rows of = Operand::row(row);
    u32 first = (u32)((u64)tensor / ELEMENT) + ((u32)(at.n + of.n) * CHANNELS + channel + c) * plane + ((u32)(at.d + of.d) * memory.h + at.h + of.h) * memory.w + at.w;
    const int zero = (int)(first & (VEC - 1)) - at.w;  // the element of column 0
    Bits* line = (Bits*)(to + (row * BLOCK + c) * PITCH * ELEMENT);
    if (zero < Operand::UNITS * VEC)
      for (int e = zero & ~(VEC - 1); e < zero; e++) line[e] = 0;
  }
}
};
