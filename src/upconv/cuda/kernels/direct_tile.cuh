// What the kernels of direct.cu and direct_weight.cu share: cells, and a tile of one tensor in shared memory.
//
// Along an axis the staged tensor (source) and the other one meet where, for cell j, phase t and tap k,
//   forward     output j * stride + t = input (j + shift) * stride + k * dilation - padding
//   gradients   input j = the one whose tap k meets the output's gradient at j * stride + shift, shift = k * dilation - padding
// So a cell is `out` results and cells are `in` sources apart: (stride, 1) of the forward, (1, stride) of the gradients.
//
// A block brings what tile_h x tile_w cells need of a slice of the source (`chunk` channels of an image, at a depth) into shared memory, in
// whole units and once; taps read it there. A thread takes `rows` cells, one below the other.
//   Lanes are columns: those of the source lie in `in_w` planes of equal residue, so that lanes read neighbours at any stride.
//   lanes_are_channels (depthwise, channels_last): a pixel's channels are neighbours as they are in memory.
#include "scalar.cuh"

template <bool IN_WORDS, class T> struct LoadedWord { using Type = T; };
template <class T> struct LoadedWord<true, T> { using Type = u32; };

template <class C_>
struct DirectTile {
using C = C_;
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;
using Pack = typename Scalar::Pack;
static constexpr int VEC = Scalar::VEC;
static constexpr int ELEMENT = sizeof(T);
static constexpr bool BY_CHANNELS = C::lanes_are_channels;

static constexpr int FROM = C::groups * C::from_g, TO = C::groups * C::to_g;  // channels of the source and of the other tensor
static constexpr int LANES = C::lanes, CHANNELS = C::channels, ROWS = C::rows;  // channels of a block's lanes, and of a thread
static constexpr int TILE_H = C::tile_h, TILE_W = C::tile_w, SPAN_H = C::span_h, SPAN_W = C::span_w, SHIFT = C::first_w;
static constexpr int KERNEL_H = C::kernel_h, KERNEL_W = C::kernel_w, TAPS = C::kernel_d * KERNEL_H * KERNEL_W;
static constexpr int THREADS = C::threads, WARPS = THREADS / 32, VECTOR = C::vector;
static constexpr int CHUNK = C::chunk;
static constexpr bool PIXELS = C::channels_last && !BY_CHANNELS;  // whose channels are neighbours in memory, not in the tile
static constexpr int CHANNEL_BLOCKS = BY_CHANNELS ? (TO + LANES - 1) / LANES : (C::to_g + CHANNELS - 1) / CHANNELS;  // there of a group
static constexpr bool ALL_CHANNELS = BY_CHANNELS && LANES == FROM;

// The phase of tap `k`, and its source from a cell's first one on.
static __device__ constexpr int phase_of(int k, int stride, int dilation, int padding) {
  return C::forward ? floor_mod(k * dilation - padding, stride) : 0;
}
static __device__ constexpr int shift_of(int k, int stride, int dilation, int padding) {
  return C::forward ? (phase_of(k, stride, dilation, padding) + padding - k * dilation) / stride : k * dilation - padding;
}
static __device__ constexpr int column_of_tap(int k) { return SHIFT + shift_of(k, C::stride_w, C::dilation_w, C::padding_w) - C::min_w; }
static __device__ constexpr int row_of_tap(int k) { return shift_of(k, C::stride_h, C::dilation_h, C::padding_h) - C::min_h; }

// Words of shared memory from row to row of the tile, from channel to channel of a chunk and of all, and where a column of a row lies.
static constexpr int ROW_PITCH = BY_CHANNELS ? SPAN_W * LANES : C::in_w * C::plane_pitch;
static constexpr int CHANNEL_WORDS = SPAN_H * ROW_PITCH, TILE_WORDS = (CHUNK * CHANNEL_WORDS + 3) / 4 * 4;
static __device__ __forceinline__ constexpr int column_at(int c) {
  return BY_CHANNELS ? c * LANES : c % C::in_w * C::plane_pitch + c / C::in_w;
}

// Of the source, and of the other tensor, whose cells are divided into tiles.
struct Sizes {
  int batch, from_d, from_h, from_w, d, h, w, tiles_h, tiles_w;
};

struct Tile { int n, d, h, w; };           // first cell

static __device__ __forceinline__ Tile tile_of(u32 index, const Sizes& s) {
  Tile t;
  t.w = index % s.tiles_w * TILE_W;  index /= s.tiles_w;
  t.h = index % s.tiles_h * TILE_H;  index /= s.tiles_h;
  t.d = index % s.d;
  t.n = index / s.d;
  return t;
}

// The slice of the source that a tile and a tap along D meet; -1 for none.
static __device__ __forceinline__ int depth_of(int d, int kd, const Sizes& s) {
  int depth = C::forward ? d + C::padding_d - kd * C::dilation_d : d * C::stride_d + kd * C::dilation_d - C::padding_d;
  if (C::forward && depth % C::stride_d) return -1;
  if (C::forward) depth /= C::stride_d;
  return (u32)depth < (u32)s.from_d ? depth : -1;
}

// The thread's index, anew: else every place of a batch, the same for all tiles, would be kept in registers between them.
static __device__ __forceinline__ int thread_index() {
  int index = threadIdx.x;
  OPAQUE(index);
  return index;
}

// What a thread takes: `rows` cells from (ty, tx) on, and where their first word of the tile lies.
struct Own { int tx, ty, at, mine; };      // mine: its channel, of those of a block
static __device__ __forceinline__ Own own_of(int place, int lane) {
  const int tx = place % TILE_W, ty = place / TILE_W * ROWS, mine = LANES < 32 && lane >= LANES ? LANES - 1 : lane;
  return {tx, ty, ty * C::in_h * ROW_PITCH + (BY_CHANNELS ? tx * C::in_w * LANES + mine : tx), mine};
}

// Elements that are loaded together, in words where there are some.
static constexpr bool IN_WORDS = ELEMENT == 2 && VECTOR > 1;
struct alignas(VECTOR * ELEMENT) Loaded { typename LoadedWord<IN_WORDS, T>::Type v[IN_WORDS ? VECTOR / 2 : VECTOR]; };
static __device__ __forceinline__ Acc element(const Loaded& unit, int k) {
  if constexpr (!IN_WORDS) {
    return Scalar::value(unit.v[k]);
  } else {
    u32 word = unit.v[k / 2];
    if constexpr (C::precision == BF16) return __uint_as_float(k % 2 ? word & 0xffff0000u : word << 16);
    else return Scalar::value((T)(k % 2 ? word >> 16 : word & 0xffffu));
  }
}

// Units of a row of the tile: of columns, of all channels of columns (ALL_CHANNELS), or of a block's or a chunk's channels of columns. As many
// rows as they fit into the threads are loaded at a time, and of several channels in NCHW; a thread has the same columns of all.
static constexpr int ROW_UNITS = SPAN_W * (BY_CHANNELS ? LANES : PIXELS ? CHUNK : 1) / VECTOR, PLANES = PIXELS ? 1 : CHUNK;
static constexpr int ROUNDS_W = (ROW_UNITS + THREADS - 1) / THREADS, IN_ROWS = ROW_UNITS < THREADS ? THREADS / ROW_UNITS : 1;
static constexpr int ROWS_AT_ONCE = IN_ROWS < SPAN_H ? IN_ROWS : SPAN_H, IN_PLANES = IN_ROWS / ROWS_AT_ONCE;
static constexpr int PLANES_AT_ONCE = IN_PLANES < PLANES ? IN_PLANES : PLANES;
static constexpr int PASSES_H = (SPAN_H + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, PASSES_C = (PLANES + PLANES_AT_ONCE - 1) / PLANES_AT_ONCE;
static constexpr int BATCH_H = C::batch < PASSES_H ? C::batch : PASSES_H, BATCH_C = C::batch / BATCH_H < PASSES_C ? C::batch / BATCH_H : PASSES_C;

// Where a row's element `at` is in the tile, and in one of the source's rows, and whether that has it; `left`: channels from the tile's
// first on.
struct Place { int to; i64 offset; bool in; };
static __device__ __forceinline__ Place place_in_row(int at, int w, int left, i64 line, const Sizes& s) {
  if constexpr (ALL_CHANNELS) {
    const i64 offset = (i64)w * FROM + at;
    return {at, offset, offset >= 0 && offset < line};
  } else if constexpr (C::channels_last) {
    constexpr int NEIGHBOURS = BY_CHANNELS ? LANES : CHUNK;
    const int column = w + at / NEIGHBOURS, channel = at % NEIGHBOURS;
    return {BY_CHANNELS ? at : channel * CHANNEL_WORDS + column_at(at / NEIGHBOURS), (i64)column * FROM + channel, (u32)column < (u32)s.from_w && channel < left};
  } else {
    return {column_at(at), w + at, (u32)(w + at) < (u32)s.from_w};
  }
}

// A unit's elements to shared memory, from that of element `at` of a row on.
static __device__ __forceinline__ void store_unit(Acc* to, const Loaded& unit, int at) {
  if constexpr (BY_CHANNELS && VECTOR % VEC == 0) {
#pragma unroll
    for (int k = 0; k < VECTOR; k += VEC) {
      Pack pack;
#pragma unroll
      for (int j = 0; j < VEC; j++) pack.v[j] = element(unit, k + j);
      *(Pack*)(to + k) = pack;
    }
  } else {
    constexpr bool EVEN = C::in_w % VECTOR == 0 || VECTOR % C::in_w == 0;
#pragma unroll
    for (int k = 0; k < VECTOR; k++) to[BY_CHANNELS ? k : EVEN ? column_at(k) : column_at(at + k) - column_at(at)] = element(unit, k);
  }
}

// What a tile's cells meet of the source at `depth`, of its channels from `channel` on, of which there are `left`, to shared memory; zeros
// beyond the borders. Units are whole where the source lies and its rows end at their multiples; else elements are loaded.
static __device__ __forceinline__ void stage(Acc* tile, const T* source, const Tile& t, int depth, int channel, int left, bool whole, const Sizes& s) {
  const int h = t.h * C::in_h + C::min_h, w = t.w * C::in_w + C::min_w - SHIFT;
  const i64 slice = (i64)s.from_h * s.from_w, pixels = s.from_d * slice, line = (i64)s.from_w * (C::channels_last ? FROM : 1);
  const T* from = source + (C::channels_last ? (t.n * pixels + depth * slice) * FROM + channel : ((i64)t.n * FROM + channel) * pixels + depth * slice);
  const int thread = thread_index(), line_of = ROW_UNITS < THREADS ? thread / ROW_UNITS : 0;
  const int first = line_of % ROWS_AT_ONCE, plane = line_of / ROWS_AT_ONCE;  // of a thread
  if (ROW_UNITS < THREADS && plane >= PLANES_AT_ONCE) return;  // the others have nothing to do
#pragma unroll 1
  for (int round = 0; round < ROUNDS_W; round++) {
    const int at = (ROW_UNITS < THREADS ? thread % ROW_UNITS : thread + round * THREADS) * VECTOR;  // element of a row
    if (ROW_UNITS > THREADS && at >= ROW_UNITS * VECTOR) break;
    if (VECTOR == 1 || whole) {
      const Place in_row = place_in_row(at, w, left, line, s);
#pragma unroll 1
      for (int c = plane; c < PLANES; c += BATCH_C * PLANES_AT_ONCE) {
        const T* place = from + c * pixels + (h + first) * line + in_row.offset;
        Acc* to = tile + c * CHANNEL_WORDS + first * ROW_PITCH + in_row.to;
        int row = h + first;
#pragma unroll 1
        for (int i = 0; i < PASSES_H; i += BATCH_H, row += BATCH_H * ROWS_AT_ONCE, to += BATCH_H * ROWS_AT_ONCE * ROW_PITCH, place += BATCH_H * ROWS_AT_ONCE * line) {
          Loaded unit[BATCH_C][BATCH_H];   // all loads come first: a block waits for memory once in a batch
          const T* of_plane = place;
#pragma unroll
          for (int j = 0; j < BATCH_C; j++, of_plane += PLANES_AT_ONCE * pixels) {
            const T* of_row = of_plane;
#pragma unroll
            for (int b = 0; b < BATCH_H; b++, of_row += ROWS_AT_ONCE * line) {
              opaque(of_row);
              unit[j][b] = {};
              const bool exists = in_row.in && (PLANES == 1 || c + j * PLANES_AT_ONCE < left) && (u32)(row + b * ROWS_AT_ONCE) < (u32)s.from_h;
              if (exists) unit[j][b] = *(const Loaded*)of_row;
            }
          }
          loads_ahead();
#pragma unroll
          for (int j = 0; j < BATCH_C; j++)
#pragma unroll
            for (int b = 0; b < BATCH_H; b++) {
              if ((SPAN_H % ROWS_AT_ONCE || PASSES_H % BATCH_H) && row + b * ROWS_AT_ONCE >= h + SPAN_H) continue;
              if (PLANES > 1 && c + j * PLANES_AT_ONCE >= PLANES) continue;
              store_unit(to + j * PLANES_AT_ONCE * CHANNEL_WORDS + b * ROWS_AT_ONCE * ROW_PITCH, unit[j][b], at);
            }
        }
      }
    } else {
#pragma unroll 1
      for (int c = plane; c < PLANES; c += PLANES_AT_ONCE)
#pragma unroll 1
        for (int row = first; row < SPAN_H; row += ROWS_AT_ONCE)
#pragma unroll
          for (int k = 0; k < VECTOR; k++) {
            const Place place = place_in_row(at + k, w, left, line, s);
            const bool exists = place.in && (PLANES == 1 || c < left) && (u32)(h + row) < (u32)s.from_h;
            tile[c * CHANNEL_WORDS + row * ROW_PITCH + place.to] = exists ? Scalar::value(from[c * pixels + (h + row) * line + place.offset]) : 0;
          }
    }
  }
}
};
