// Who brings a chunk's pixels to the shared memory of wgrad_wgmma.cu: boxes by one thread, or, for g, all threads by words (wgrad.cuh).
#include "ring.cuh"
#include "wgrad_tiles.cuh"

// =====================================================================================================================
// Boxes
// =====================================================================================================================

template <class T>
struct WgradBoxes {
using C = typename T::C;
using Sizes = typename T::Sizes;
using Chunk = typename T::Chunk;
using Work = typename T::Work;
using TensorMaps = typename T::TensorMaps;

// --- x ---

// A chunk, from its input channel `channel` on.
static __device__ __forceinline__ void load_x(const TensorMap& map, const Chunk& c, int channel, u32 to, u32 barrier) {
#pragma unroll 1
  for (int i = 0; i < T::BOXES; i++) {
    if constexpr (C::channels_last) {
      load_box(to + i * T::BOX_BYTES, map, channel + i * C::x_width, c.w, c.h - C::stack + 1, c.d, c.n, barrier);
    } else {
      int w = (C::lines ? c.h * C::tile_w : c.w) + i * (C::segment / T::ELEMENT);
      load_box(to + i * T::BOX_BYTES, map, w, channel, C::lines ? 0 : c.h - C::stack + 1, c.d, c.n, barrier);
    }
  }
}

// Pixels that are to be turned.
static __device__ __forceinline__ void load_raw(const TensorMaps& maps, const Chunk& c, const Work& work, u32 to, u32 barrier) {
  expect_bytes(barrier, T::RAW_BYTES);
  load_box(to, maps.of[0], work.group * C::cin + work.ci, c.w, c.h - C::stack + 1, c.d, c.n, barrier);
}

// --- g: from its place `at` and output channel `channel` on ---

// Of a tile's rows along H, and of channels, those that begin alike.
struct Class {
  int index, lead;                         // its map; elements by which its rows begin early
  int phase;                               // of a tile: elements by which its first column begins off 16 bytes
};

// The class of a row and a channel, and a tile of it that begins at column `w`.
static __device__ __forceinline__ Class class_of(int row, int channel, int w, const Sizes& s) {
  int of_rows = row & (C::row_classes - 1), of_channels = channel & (C::channel_classes - 1);
  int lead = ((u32)of_channels * s.out_d * s.out_h * s.out_w + (u32)of_rows * s.out_w) & (T::VEC - 1);
  return {of_channels * C::row_classes + of_rows, lead, (w + lead) & (T::VEC - 1)};
}

static __device__ __forceinline__ void load_classes(const TensorMap* maps, const Sizes& s, const Chunk& at, int channel, u32 to, u32 barrier) {
#pragma unroll 1
  for (int i = 0; i < T::CLASSES; i++) {
    int row = at.h + i % C::row_classes, first = channel + i / C::row_classes;  // of the class in this chunk
    Class of = class_of(row, first, at.w, s);
    load_box(to + i * T::CLASS_BYTES, maps[of.index], at.w + of.lead - of.phase, first / C::channel_classes, (row - (row & (C::row_classes - 1))) / C::row_classes, at.d, at.n, barrier);
  }
}

// Of channels-last tensors a chunk may be a box of any shape, of which a launch tells, and each tap of the set then has g's pixels for
// it: a strip is the next 8 of them in whatever rows they lie, so that images of 4 x 4 fill K (rows of 8 leave half of it empty).
static __device__ __forceinline__ void load_taps(const TensorMap& map, const Chunk& at, int channel, u32 to, u32 barrier) {
#pragma unroll 1
  for (int i = 0; i < T::G_BOXES * T::SET_TAPS; i++) {
    int tap = i % T::SET_TAPS, td = tap / (C::taps_h * C::taps_w), th = tap / C::taps_w % C::taps_h, tw = tap % C::taps_w;
    load_box(to + i / T::SET_TAPS * T::G_SLAB_BYTES + tap * T::PLANE_BYTES, map, channel + i / T::SET_TAPS * C::g_width, at.w + tw * C::dilation_w, at.h + th * C::dilation_h, at.d + td * C::dilation_d, at.n, barrier);
  }
}

static __device__ __forceinline__ void load_planes(const TensorMap& map, const Chunk& at, int channel, u32 to, u32 barrier) {
#pragma unroll 1
  for (int i = 0; i < T::G_BOXES * C::g_planes; i++)
    load_box(to + i / C::g_planes * T::G_SLAB_BYTES + i % C::g_planes * T::PLANE_BYTES, map, channel + i / C::g_planes * C::g_width, at.w + i % C::g_planes * C::dilation_w, at.h, at.d, at.n, barrier);
}

static __device__ __forceinline__ void load_g(const TensorMap* maps, const Sizes& s, const Chunk& at, int channel, u32 to, u32 barrier) {
  if constexpr (T::CLASSED) load_classes(maps, s, at, channel, to, barrier);
  else if constexpr (C::gapless) load_taps(*maps, at, channel, to, barrier);
  else if constexpr (C::channels_last) load_planes(*maps, at, channel, to, barrier);
  else load_box(to, *maps, at.w - (at.w & (T::VEC - 1)), channel, at.h, at.d, at.n, barrier);
}

// --- a chunk ---

// Bytes that `load` brings.
static constexpr int OF_G = C::channels_last ? T::G_ROWS * C::g_planes * C::plane_columns * C::block_co * T::ELEMENT : T::G_BYTES;
static constexpr int BYTES = (T::TURN_X ? 0 : T::X_TILE_BYTES) + (C::box_g ? OF_G : 0);

static __device__ __forceinline__ void load(const TensorMaps& maps, const Sizes& s, const Chunk& c, const Work& work, u32 to, u32 barrier) {
  expect_bytes(barrier, BYTES);
  if constexpr (!T::TURN_X) load_x(maps.of[0], c, work.group * C::cin + work.ci, to, barrier);
  if constexpr (C::box_g) load_g(maps.of + 1, s, T::in_g(c, work), work.group * C::cout + work.co, to + T::X_TILE_BYTES, barrier);
}
};

// =====================================================================================================================
// The warpgroup that copies: one thread asks for boxes; all threads turn x's pixels, or copy rows of g that boxes cannot bring
// =====================================================================================================================

// A block's share of the work, and where its ring is.
template <class T>
struct WgradBlock {
  const typename T::TensorMaps& maps;
  const char* g;
  typename T::Sizes s;
  typename T::Work work;
  int split;
  unsigned char* memory;
  u32 base, full, empty, last;             // memory's address; barriers: of stages, and of raw pixels

  __device__ __forceinline__ int begin() const { return split * s.per_split; }
  __device__ __forceinline__ int end() const { return begin() + s.per_split < s.chunks ? begin() + s.per_split : s.chunks; }
};

template <class T>
struct WgradProducer {
using C = typename T::C;
using Chunk = typename T::Chunk;
using Block = WgradBlock<T>;
using Boxes = WgradBoxes<T>;
using Copies = WgradCopies<T, WgradG<T>, T::COPIERS>;
static constexpr int ARRIVALS = 1 + (T::TURN_X ? T::COPIERS : C::box_g ? 0 : 2 * T::COPIERS);  // at a stage's barrier, for each chunk

// x's pixels that are to be turned: TF32 has no form whose rows lie along the pixels' channels.
static __device__ __forceinline__ void load_raw(const Block& block, int i) {
  Boxes::load_raw(block.maps, T::chunk_at(i, block.s), block.work, block.base + T::RAW_AT, block.last);
}

// Rows of a pixel's channels to rows of a channel's pixels: a lane takes a channel, four pixels at a time.
static __device__ __forceinline__ void turn(u32 raw, u32 tile, int thread) {
#pragma unroll 4
  for (int i = thread; i < T::PIXELS / 4 * C::block_ci; i += T::COPIERS) {
    int c = i % C::block_ci, quad = i / C::block_ci, strip = quad / 2, half = quad % 2;
    u32 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int pixel = strip * 8 + (half ? T::strip_pixel(j + 4) : T::strip_pixel(j));
      v[j] = load_shared_u32(raw + (pixel * C::block_ci + c) * 4);
    }
    u32 to = tile + T::x_at(strip) + half * 16 + c * C::segment;
    store_shared_128(to ^ (to >> 7 & (C::segment / 16 - 1)) << 4, v[0], v[1], v[2], v[3]);
  }
  fence_async_shared();                    // the tensor cores read by descriptor
}

static __device__ __forceinline__ void turn_chunk(const Block& block, int i, u32 tile, u32 barrier, int thread) {
  barrier_wait(block.last, (i - block.begin()) & 1);
  turn(block.base + T::RAW_AT, tile, thread);
  barrier_arrive(barrier);
  named_sync<1, T::COPIERS>();             // all have read
  if (thread == 0 && i + 1 < block.end()) load_raw(block, i + 1);
}

// NCHW: g's rows by 16 bytes of all threads.
static __device__ __forceinline__ void copy_rows(const Block& block, const Chunk& at, unsigned char* to, u32 barrier, int thread) {
  const WgradMemory memory = {block.s.batch, block.s.out_d, block.s.out_h, block.s.out_w};
  const int channel = block.work.group * C::cout + block.work.co;
  Copies::copy(block.g, memory, at, channel, C::cout - block.work.co, to, thread);
  if (Copies::has_borders(memory, at)) {
    copy_commit();
    copy_wait<0>();
    named_sync<1, T::COPIERS>();           // all have landed
    Copies::clear_borders(block.g, memory, at, channel, to, thread);
  }
  arrive_when_copied(barrier);
  barrier_arrive(barrier);                 // what it stored itself
}

static __device__ __forceinline__ void run(const Block& block, int thread) {
  if (ARRIVALS == 1 && thread > 0) return;
  if (T::TURN_X && thread == 0 && block.begin() < block.s.chunks) load_raw(block, block.begin());
  CursorOf<C::stages> cursor = {0, 1};     // all are free at first
  const int end = block.end();
#pragma unroll 1
  for (int i = block.begin(); i < end; i++, cursor.next()) {
    const Chunk c = T::chunk_at(i, block.s);
    barrier_wait(block.empty + cursor.stage * 8, cursor.parity);
    unsigned char* tile = block.memory + cursor.stage * T::STAGE_BYTES;
    const u32 barrier = block.full + cursor.stage * 8;
    if (thread == 0) Boxes::load(block.maps, block.s, c, block.work, shared_address(tile), barrier);
    if constexpr (T::TURN_X) turn_chunk(block, i, shared_address(tile), barrier, thread);
    else if constexpr (!C::box_g) copy_rows(block, T::in_g(c, block.work), tile + T::X_TILE_BYTES, barrier, thread);
  }
}
};
