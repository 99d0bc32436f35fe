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

// A block's sums as a record, in shared memory and at its place in global memory.
// WAITS: until it is there.
template <class T, bool WAITS = false>
struct WgradRecord {
using C = typename T::C;
using M = WgradMultiply<T>;
using Lane = typename M::F::Lane;
char* records;

__device__ __forceinline__ void put(const typename M::Sums& acc, const WgradBlock<T>& block, const Lane& of, int thread) const {
  put_shared(acc, block.base, of);
  fence_async_shared();
  named_sync<2, T::CONSUMERS>();           // all have stored theirs
  if (thread == 0) {
    store_bulk<T::SUMS_BYTES>(records + (long long)block_index() * T::SUMS_BYTES, block.base);  // the index is read again: kept, it spills
    bulk_commit();
    if constexpr (WAITS) bulk_wait();
    else bulk_wait_read();                 // the launch's end waits
  }
}

static __device__ __forceinline__ void put_shared(const typename M::Sums& acc, u32 memory, const Lane& of) {
  named_sync<2, T::CONSUMERS>();           // nobody reads a stage any more
#pragma unroll
  for (int u = 0; u < T::UNITS; u++) {
    int unit = of.first_unit + u * T::NEXT_UNIT;
    if (unit >= T::SET_UNITS) continue;
#pragma unroll
    for (int i = 0; i < T::OF_UNIT; i++) {
      // A unit is a tap, or (stacked) a column of taps_h of them.
      int tap = C::stacked ? (unit / C::taps_w * C::taps_h + i) * C::taps_w + unit % C::taps_w : unit;
#pragma unroll
      for (int nb = 0; nb < T::NB; nb++)
#pragma unroll
        for (int j = 0; j < T::N_WIDTH / 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int m = T::channel_of(of.channel + of.row + T::NEXT_ROWS * h);
            u32 to = memory + T::sum_at(tap, nb * T::N_WIDTH + j * 8 + 2 * of.q, m);
            const float* sums = &acc[u][nb][M::place_of(i) * (T::N_WIDTH / 2) + 4 * j + 2 * h];
            store_shared_f32(to, sums[0]);
            store_shared_f32(to + T::SUMS_PITCH * 4, sums[1]);
          }
    }
  }
}
};

// The weight's gradient: by the blocks of a tile together, or (alone) by the only one.
template <class T>
struct WgradWhole {
using C = typename T::C;
using M = WgradMultiply<T>;
using Weight = WgradSums<T, T::CONSUMERS>;
Weight weight;
char* records;
u32* counters;                             // [arrived, left] of each tile; zeros, which the last to leave leaves

__device__ __forceinline__ void put(const typename M::Sums& acc, const WgradBlock<T>& block, const typename M::F::Lane& of, int thread) const {
  int rank = 0, count = 1;
  if constexpr (C::alone) {
    WgradRecord<T>::put_shared(acc, block.base, of);
  } else {
    WgradRecord<T, true>{records}.put(acc, block, of, thread);
    const int index = block_index(), tile = index % T::TILES;
    rank = index / T::TILES, count = (int)gridDim.x / T::TILES;
    if (thread == 0) meet(counters + 2 * tile, count);
    named_sync<2, T::CONSUMERS>();
    Weight::add(records + (long long)tile * T::SUMS_BYTES, count, Weight::share_of(rank, count, block.base), thread);
  }
  named_sync<2, T::CONSUMERS>();
  weight.store(block.work, Weight::share_of(rank, count, block.base), thread);
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

template <class C_>
struct WgradWgmma {
using C = C_;
using T = WgradTile<C>;
using Number = typename T::Number;
using Sizes = typename T::Sizes;
using Chunk = typename T::Chunk;
using Work = typename T::Work;
using TensorMaps = typename T::TensorMaps;
using Block = WgradBlock<T>;
using M = WgradMultiply<T>;
using F = typename M::F;

// =====================================================================================================================
// Consumers
// =====================================================================================================================

// NCHW: where rows of a chunk's tile begin, for a lane.
static __device__ __forceinline__ void begin_rows(typename F::Tile& g, const Block& block, int i, const typename F::Lane& of) {
  const Sizes& s = block.s;
  Chunk c = T::in_g(T::chunk_at(i, s), block.work);
  if constexpr (C::aligned_g) {
    g.lane_at += c.w & (T::VEC - 1);
  } else if constexpr (T::CLASSED) {
    const int of_channels = (of.channel + of.row) / T::G_CHANNELS;  // the lane's class
#pragma unroll
    for (int j = 0; j < C::row_classes; j++)
      g.phases.of[j] = WgradBoxes<T>::class_of(c.h + j, block.work.group * C::cout + block.work.co + of_channels, c.w, s).phase;
  } else {
    // Rows 8 channels apart have the same alignment, so that a lane has one for each row of a tile.
    g.phases.of[0] = (u32)((u64)block.g / T::ELEMENT) + (((u32)c.n * T::COUT + block.work.group * C::cout + block.work.co + of.row) * s.out_d + c.d) * s.out_h * s.out_w + (u32)c.h * s.out_w + c.w;
  }
}

// A split's sums; what becomes of them is `end`'s to say.
template <class E>
static __device__ __forceinline__ void consume(const E& end, const Block& block, int wg, int thread) {
  const typename F::Lane of = F::lane_of(wg, thread);
  typename M::Sums acc = {};               // ahead of what addresses need: behind it ptxas is given two sets of zeros
  typename F::Taps taps;
#pragma unroll
  for (int u = 0; u < T::UNITS; u++) F::set_tap(taps, u, of.first_unit + u * T::NEXT_UNIT, block.s);
  const int lane_first = F::lane_first(of);
  const int first = block.begin(), last = block.end();
  CursorOf<C::stages> cursor = {0, 0};
  // A warpgroup whose taps are all beyond the kernel leaves the tensor cores to the others.
  const int units_before = wg / C::split_m * (C::subs * T::UNITS);
  const bool idle = units_before >= T::SET_UNITS || (T::SET_UNITS == C::taps_w && block.work.tap_w + units_before >= C::kernel_w);
#pragma unroll 1
  for (int i = first; i < last; i++, cursor.next()) {
    typename F::Tile g = {nullptr, taps, block.s, {}, lane_first};
    if constexpr (!C::channels_last) begin_rows(g, block, i, of);
    const unsigned char* tile = block.memory + cursor.stage * T::STAGE_BYTES;
    barrier_wait(block.full + cursor.stage * 8, cursor.parity);
    if constexpr (C::a_shared) wgmma_fence();
    if constexpr (C::stacked) {
#pragma unroll 1
      for (int at = idle ? T::ROW_STEPS : 0; at < T::ROW_STEPS; at += C::unrolled) M::multiply_rows(acc, at, tile, g);
    } else {
#pragma unroll 1
      for (int run = idle ? T::STEPS / C::unrolled : 0; run < T::STEPS / C::unrolled; run++) M::multiply_run(acc, run, tile, g);
    }
    if constexpr (C::a_shared) {
      // The chunk before is done with. That is late: instructions wait for room in the tensor cores' queue, so that most of this chunk's
      // are behind them, too. With 2 stages that is far too late. A stage given back behind a chunk's first instruction, or its third,
      // is slower with more stages: the queue runs empty.
      wgmma_commit();
      wgmma_wait<1>();
      if (i > first && of.lane == 0) barrier_arrive(block.empty + (cursor.stage ? cursor.stage - 1 : C::stages - 1) * 8);
    } else {
      __syncwarp();
      if (of.lane == 0) barrier_arrive(block.empty + cursor.stage * 8);
    }
  }
  if constexpr (C::a_shared) wgmma_wait<0>();
  end.put(acc, block, of, wg * 128 + thread);
}

// =====================================================================================================================
// A block
// =====================================================================================================================

template <class E>
static __device__ __forceinline__ void run(const char* g, const E& end, const Sizes& s, const TensorMaps& maps, unsigned char* memory) {
  const u32 base = shared_address(memory), full = base + T::BARRIERS_AT, empty = full + 8 * C::stages, last = base + T::BARRIERS_AT + 16 * C::stages;
  Block block = {maps, g, s, {}, 0, memory, base, full, empty, last};
  block.split = T::take_work(block.work, blockIdx.x);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::stages; i++) {
      barrier_init(full + 8 * i, WgradProducer<T>::ARRIVALS);
      barrier_init(empty + 8 * i, C::warpgroups * 4);
    }
    barrier_init(last, 1);
    barriers_begun();
  }
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role == 0) {
    fewer_registers<C::producer_registers>();
    WgradProducer<T>::run(block, thread);
  } else {
    more_registers<C::consumer_registers>();
    consume(end, block, role - 1, thread);
  }
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
