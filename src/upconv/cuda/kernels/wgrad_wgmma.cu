// Grad-weight by wgmma (sm_90a): dW[ci, co, tap] = sum over images and positions q of x[ci, q] * g[co, q * step + tap * dilation - padding].
//
// The GEMM of `wgrad` with the operands the other way round. M = 64 rows, an output channel at a tap each (subs taps of
// 64 / subs channels), N = block_ci input channels, K = pixels.
//   A, from registers: g's tile with its halo, read from shared memory at any column, so that a tap is an address.
//   B, from shared memory by descriptor: x's tile as the tensor copy engine leaves it. NCHW: rows of a channel's pixels (K-major),
//      rounded to TF32 on the way.
// Roles: one warpgroup copies, the others multiply: split_m of them divide the output channels of a block, the others its taps,
// UNITS x subs fragments of A at a time: UNITS neighbours for each of subs bands of rows. A unit is a tap.
// [stacked] Or a column of taps: the rows of x that a row of g meets by them follow each other in shared memory, and so are columns of
// one instruction. Then a fragment is read once, not once a tap: reads of A take as long as a multiplication by 64 channels. Chunks are
// of rows of g, step_h at a time, and it is x's tile that has a halo, so that an instruction always takes all of its rows: ptxas waits
// for each one where some that share sums differ in shape (C7511). Rows beyond the image are zeros.
// [interleaved] The taps of a block of rows are neighbours along W, and their rows neighbours in M, so that lanes read neighbouring columns
// of few channels, which meet more banks than columns step_w apart of many.
// [a_shared] A of 16-bit rows of 64 channels: by descriptor, at any pixel.
// [channels_last] B of 16 bits: rows of a pixel's channels (MN-major). TF32 has no MN-major form, so that float32 is turned by the
// copying warpgroup.
// [box_g] g comes by boxes too, where its rows lie evenly: channels_last by one for each C::g_width channels and plane; NCHW by one, or
// by one for each class of rows that begin off 16 bytes (classed), or by threads where these are too many.
//
// K is split over ranges of chunks; a block leaves a record of its sums, and what follows adds the records.
// [library] That is `reduce`. Where all blocks run at once (a cooperative launch), those of a tile wait for each other and add them in the
// same order. A block that has the only split (alone) has nothing to add: it stores the weight's gradient from its own shared memory.
//
// [library] Files: wgrad_tiles.cuh (a chunk in shared memory), wgrad_copies.cuh (who brings it), wgrad_multiply.cuh (fragments and matrix
// instructions), wgrad_sums.cuh (how records become the weight's gradient).
#include "wgrad_multiply.cuh"
#include "wgrad_sums.cuh"

// What becomes of a block's sums, of which each warpgroup has put its own into shared memory. As a record to global memory.
// WAITS: until it is there.
template <class T, bool WAITS = false>
struct WgradRecord {
char* records;

__device__ __forceinline__ void put(const WgradBlock<T>& block, int thread) const {
  fence_async_shared();
  named_sync<2, T::CONSUMERS>();           // all have stored theirs
  if (thread == 0) {
    store_bulk<T::SUMS_BYTES>(records + (long long)block_index() * T::SUMS_BYTES, block.ring.stages);  // the index is read again: kept, it spills
    bulk_commit();
    if constexpr (WAITS) bulk_wait();
    else bulk_wait_read();                 // the launch's end waits
  }
}
};

// To the weight's gradient: by the blocks of a tile together, or (alone) by the only one.
template <class T>
struct WgradWhole {
using Weight = WgradSums<T, T::CONSUMERS>;
Weight weight;
char* records;
u32* counters;                             // [arrived, left] of each tile; zeros, which the last to leave leaves

__device__ __forceinline__ void put(const WgradBlock<T>& block, int thread) const {
  int rank = 0, count = 1;
  if constexpr (!T::C::alone) {
    WgradRecord<T, true>{records}.put(block, thread);
    const int index = block_index(), tile = index % T::TILES;
    rank = index / T::TILES, count = (int)gridDim.x / T::TILES;
    if (thread == 0) meet(counters + 2 * tile, count);
    named_sync<2, T::CONSUMERS>();
    Weight::add(records + (long long)tile * T::SUMS_BYTES, count, Weight::share_of(rank, count, block.ring.stages), thread);
  }
  named_sync<2, T::CONSUMERS>();
  weight.store(block.work, Weight::share_of(rank, count, block.ring.stages), thread);
}

// One thread of each of `count` blocks that run at once: what they have written is seen by all of them behind it.
static __device__ __forceinline__ void meet(u32* counters, u32 count) {
  fence_async();
  __threadfence();
  atomicAdd(counters, 1);
  while (load_acquire(counters) < count) {}
  if (atomicAdd(counters + 1, 1) == count - 1) counters[0] = counters[1] = 0;
}
};

template <class C>
struct WgradWgmma {
using T = WgradTile<C>;
using Block = WgradBlock<T>;
using Ring = typename Block::Ring;
using M = WgradMultiply<T>;

// A chunk's tile of g, for a lane. NCHW: its rows, 8 channels apart, begin alike.
static __device__ __forceinline__ typename M::Tile tile_of(const Block& block, int i, const typename M::Lane& of, const typename M::Taps& taps, int lane_first) {
  typename M::Tile g = {nullptr, taps, block.s, {}, lane_first};
  if constexpr (C::channels_last) return g;
  const typename T::Sizes& s = block.s;
  const typename T::Chunk c = T::in_g(T::chunk_at(i, s), block.work);
  const int channel = block.work.group * C::cout + block.work.co;
#pragma unroll
  for (int j = 0; j < C::row_classes; j++)
    if constexpr (C::box_g) g.phases[j] = (c.w + T::class_of(c.h + j, channel + (of.channel + of.row) / T::G_CHANNELS, s).lead) & (T::VEC - 1);
    else g.phases[j] = (u32)((u64)block.g / T::ELEMENT) + (((u32)c.n * T::COUT + channel + of.row) * s.out_d + c.d) * s.out_h * s.out_w + (u32)c.h * s.out_w + c.w;
  return g;
}

// A split's sums; what becomes of them is `end`'s to say.
template <class E>
static __device__ __forceinline__ void consume(const E& end, const Block& block, int wg, int thread) {
  const typename M::Lane of = M::lane_of(wg, thread);
  typename M::Sums acc = {};               // ahead of what addresses need: behind it ptxas is given two sets of zeros
  typename M::Taps taps;
#pragma unroll
  for (int u = 0; u < C::units; u++) M::set_tap(taps, u, of.first_unit + u * T::NEXT_UNIT, block.s);
  const int lane_first = M::lane_first(of);
  typename Ring::Cursor cursor = {0, 0};
  // A warpgroup whose taps are all beyond the kernel leaves the tensor cores to the others.
  const int units_before = wg / C::split_m * (C::subs * C::units);
  const bool idle = units_before >= T::SET_UNITS || (T::SET_UNITS == C::taps_w && block.work.tap_w + units_before >= C::kernel_w);
#pragma unroll 1
  for (int i = block.begin; i < block.end; i++, cursor.next()) {
    const typename M::Tile g = tile_of(block, i, of, taps, lane_first);
    const unsigned char* stage = block.memory + cursor.stage * T::STAGE_BYTES;
    block.ring.wait_full(cursor);
    if constexpr (C::a_shared) wgmma_fence();
#pragma unroll 1
    for (int part = idle ? T::PARTS : 0; part < T::PARTS; part++) M::multiply_part(acc, part, stage, g);
    if constexpr (C::a_shared) {
      // The chunk before is done with. That is late: instructions wait for room in the tensor cores' queue, so that most of this chunk's
      // are behind them, too. With 2 stages that is far too late. A stage given back behind a chunk's first instruction, or its third,
      // is slower with more stages: the queue runs empty.
      wgmma_commit();
      wgmma_wait<1>();
      if (i > block.begin) leave(block.ring.empty({cursor.stage ? cursor.stage - 1 : C::stages - 1, 0}), of.lane);
    } else {
      give_back(block.ring.empty(cursor), of.lane);
    }
  }
  if constexpr (C::a_shared) wgmma_wait<0>();
  named_sync<2, T::CONSUMERS>();           // nobody reads a stage any more
  M::store_sums(acc, block.ring.stages, of);
  end.put(block, wg * 128 + thread);
}

template <class E>
static __device__ __forceinline__ void run(const char* g, const E& end, const typename T::Sizes& s, const typename T::TensorMaps& maps, unsigned char* memory) {
  const u32 base = shared_address(memory), barriers = base + T::BARRIERS_AT;
  Block block = {maps, g, s, {}, 0, 0, memory, Ring::at(base, barriers), barriers + Ring::BARRIER_BYTES};
  block.begin = T::take_work(block.work, blockIdx.x) * s.per_split;
  block.end = block.begin + s.per_split < s.chunks ? block.begin + s.per_split : s.chunks;
  const auto init = [&] {
    block.ring.init(WgradProducer<T>::ARRIVALS, C::warpgroups * 4);
    barrier_init(block.raw_full, 1);
  };
  const auto produce = [&] { WgradProducer<T>::run(block, threadIdx.x & 127); };  // whose loops then have a known length
  const auto consumer = [&](int wg, int thread) { consume(end, block, wg, thread); };
  run_block<1, C::warpgroups, C::producer_registers, C::consumer_registers>(init, produce, consumer);
}
};

template <class C>
__global__ void __launch_bounds__(WgradTile<C>::THREADS, 1)
wgrad_wgmma(const char* __restrict__ g, char* __restrict__ records, int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w,
      int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split, const __grid_constant__ typename WgradTile<C>::TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using K = WgradWgmma<C>;
  K::run(g, WgradRecord<WgradTile<C>>{records}, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, chunks, per_split}, maps, memory);
}

// Blocks that write the weight's gradient, `out`.
template <class C>
__global__ void __launch_bounds__(WgradTile<C>::THREADS, 1)
wgrad_whole(const char* __restrict__ g, char* __restrict__ out, char* records, u32* counters, int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w,
      int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split, long long stride_ci, long long stride_co, long long stride_tap, long long wide,
      const __grid_constant__ typename WgradTile<C>::TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using K = WgradWgmma<C>;
  K::run(g, WgradWhole<WgradTile<C>>{{out, stride_ci, stride_co, stride_tap, wide}, records, counters}, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, chunks, per_split}, maps, memory);
}
