// The warpgroup that brings a chunk's pixels to the shared memory of wgrad_wgmma.cu: one thread asks for boxes; all threads turn x's
// pixels, or copy rows of g that boxes cannot bring (wgrad.cuh).
#include "ring.cuh"
#include "wgrad_tiles.cuh"

// A block's share of the work, and where its ring is.
template <class T>
struct WgradBlock {
  using Ring = RingOf<T::C::stages, T::STAGE_BYTES>;
  const typename T::TensorMaps& maps;
  const char* g;
  typename T::Sizes s;
  typename T::Work work;
  int begin, end;                          // its chunks
  unsigned char* memory;
  Ring ring;
  u32 raw_full;                            // a barrier: of x's pixels before they are turned
};

template <class T>
struct WgradProducer {
using C = typename T::C;
using Chunk = typename T::Chunk;
using Block = WgradBlock<T>;
using Copies = WgradCopies<T, WgradG<T>, T::COPIERS>;
static constexpr int ARRIVALS = 1 + (T::TURN_X ? T::COPIERS : C::box_g ? 0 : 2 * T::COPIERS);  // at a stage's barrier, for each chunk
// Bytes of g's boxes; of a plane what lies behind its rows is none.
static constexpr int G_BOX_BYTES = C::channels_last ? T::G_ROWS * T::G_ROW_BYTES * C::g_planes * T::G_BOXES : T::G_BYTES;

// --- boxes ---

static __device__ __forceinline__ void load_x(const Block& block, const Chunk& c, u32 to, u32 barrier) {
  const int channel = block.work.group * C::cin + block.work.ci;
#pragma unroll 1
  for (int i = 0; i < (T::TURN_X ? 1 : T::BOXES); i++) {
    if constexpr (C::channels_last) {
      load_box(to + i * T::BOX_BYTES, block.maps.of[0], channel + i * C::x_width, c.w, c.h - C::stack + 1, c.d, c.n, barrier);
    } else {
      int w = (C::lines ? c.h * C::tile_w : c.w) + i * (C::segment / T::ELEMENT);
      load_box(to + i * T::BOX_BYTES, block.maps.of[0], w, channel, C::lines ? 0 : c.h - C::stack + 1, c.d, c.n, barrier);
    }
  }
}

// g's tile, which begins `at`. Gapless: a chunk may be a box of any shape, of which a launch tells, and each tap of the set then has g's
// pixels for it: a strip is the next 8 of them in whatever rows they lie, so that images of 4 x 4 fill K (rows of 8 leave half of it empty).
static __device__ __forceinline__ void load_g(const Block& block, const Chunk& at, u32 to, u32 barrier) {
  const TensorMap* maps = block.maps.of + 1;
  const int channel = block.work.group * C::cout + block.work.co;
#pragma unroll 1
  for (int i = 0; i < (C::channels_last ? T::G_BOXES * C::g_planes : T::CLASSES); i++) {
    if constexpr (C::channels_last) {
      const int plane = i % C::g_planes, tw = C::gapless ? plane % C::taps_w : plane;
      const int th = C::gapless ? plane / C::taps_w % C::taps_h : 0, td = C::gapless ? plane / (C::taps_h * C::taps_w) : 0;
      load_box(to + i / C::g_planes * T::G_SLAB_BYTES + plane * T::PLANE_BYTES, *maps, channel + i / C::g_planes * C::g_width,
               at.w + tw * C::dilation_w, at.h + th * C::dilation_h, at.d + td * C::dilation_d, at.n, barrier);
    } else {
      const int row = at.h + i % C::row_classes, of = channel + i / C::row_classes;  // of the class in this chunk
      const typename T::Class c = T::class_of(row, of, block.s);
      const int first = at.w + c.lead;
      load_box(to + i * T::CLASS_BYTES, maps[c.index], first - (first & (T::VEC - 1)), of / C::channel_classes, (row - (row & (C::row_classes - 1))) / C::row_classes, at.d, at.n, barrier);
    }
  }
}

// --- all threads ---

static __device__ __forceinline__ void load_raw(const Block& block, int i) {
  expect_bytes(block.raw_full, T::RAW_BYTES);
  load_x(block, T::chunk_at(i, block.s), block.ring.stages + T::RAW_AT, block.raw_full);
}

// Rows of a pixel's channels to rows of a channel's pixels, since TF32 multiplies no others: a lane takes a channel, four pixels at a time.
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
    u32 to = tile + T::x_pixels_at(strip) + half * 16 + c * C::segment;
    store_shared_128(to ^ (to >> 7 & (C::segment / 16 - 1)) << 4, v[0], v[1], v[2], v[3]);
  }
  fence_async_shared();                    // the tensor cores read by descriptor
}

static __device__ __forceinline__ void turn_chunk(const Block& block, int i, u32 tile, u32 barrier, int thread) {
  barrier_wait(block.raw_full, (i - block.begin) & 1);
  turn(block.ring.stages + T::RAW_AT, tile, thread);
  barrier_arrive(barrier);
  named_sync<1, T::COPIERS>();             // all have read
  if (thread == 0 && i + 1 < block.end) load_raw(block, i + 1);
}

// NCHW: g's rows by 16 bytes of all threads.
static __device__ __forceinline__ void copy_rows(const Block& block, const Chunk& at, unsigned char* to, u32 barrier, int thread) {
  const WgradMemory memory = {block.s.batch, block.s.out_d, block.s.out_h, block.s.out_w};
  const int channel = block.work.group * C::cout + block.work.co;
  Copies::copy_rows(block.g, memory, at, channel, C::cout - block.work.co, to, thread);
  if (at.w < 0) {
    copy_commit();
    copy_wait<0>();
    named_sync<1, T::COPIERS>();           // all have landed
    Copies::clear_left(block.g, memory, at, channel, to, thread);
  }
  arrive_when_copied(barrier);
  barrier_arrive(barrier);                 // what it stored itself
}

static __device__ __forceinline__ void run(const Block& block, int thread) {
  if (ARRIVALS == 1 && thread > 0) return;
  if (T::TURN_X && thread == 0 && block.begin < block.end) load_raw(block, block.begin);
  CursorOf<C::stages> cursor = {0, 1};     // all are free at first
#pragma unroll 1
  for (int i = block.begin; i < block.end; i++, cursor.next()) {
    const Chunk c = T::chunk_at(i, block.s), at = T::in_g(c, block.work);
    const u32 tile = block.ring.stage(cursor), full = block.ring.full(cursor);
    block.ring.wait_empty(cursor);
    if (thread == 0) {
      expect_bytes(full, (T::TURN_X ? 0 : T::X_TILE_BYTES) + (C::box_g ? G_BOX_BYTES : 0));
      if constexpr (!T::TURN_X) load_x(block, c, tile, full);
      if constexpr (C::box_g) load_g(block, at, tile + T::X_TILE_BYTES, full);
    }
    if constexpr (T::TURN_X) turn_chunk(block, i, tile, full, thread);
    else if constexpr (!C::box_g) copy_rows(block, at, block.memory + cursor.stage * T::STAGE_BYTES + T::X_TILE_BYTES, full, thread);
  }
}
};
