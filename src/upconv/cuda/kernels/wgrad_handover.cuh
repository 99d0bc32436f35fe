// Handover: blocks of two splits of K that exchange half of a tile's sums while they multiply. Both take all of a tile's units until
// HANDED chunks, those in the middle of K, are left. Then each hands its sums of half of the units over, through global memory, and
// multiplies these chunks for its own units alone, whose sums it gets from the other block meanwhile; so that behind the last chunk it
// has half of the tile's sums, whole, in registers, and writes them to the weight.
//
// Blocks meet as a cluster, or in a cooperative launch. The latter is faster, since the order of its blocks is free (`wgrad_tile_of`):
// neighbours have the same pixels of g, which are more than x's. With 8 chunks and more the second-level cache is late, since such a chunk
// brings x for half of the products.
//
// A warpgroup has two units; the first of these, by the block's `rank`, is its own. Two blocks are a cluster, or all blocks run at once
// (together) and meet by counters, as wgrad_sums.cuh has it.
#include "wgrad_sums.cuh"

// A block's chunks: `whole` ones, then those `handed`, which both blocks have.
struct WgradHalves {
  static constexpr int HANDED = 4;
  int whole, handed, rank;
  __device__ __forceinline__ WgradHalves(int chunks, int rank) : rank(rank) {
    handed = HANDED + (chunks & 1);        // so that the others are even
    if (handed > chunks) handed = chunks;
    whole = (chunks - handed) / 2;
  }
  __device__ __forceinline__ int count() const { return whole + handed; }
  __device__ __forceinline__ int chunk(int i) const { return rank && i < whole ? i + count() : i; }
};

// Where a tile lies: of neighbours (of one set of taps) four have two blocks of channels of each operand between them, sixteen four, and
// sixty-four eight, where channels have so many. So, together, two of a pair of multiprocessors share g; those of a cluster are the two
// halves of K, and share nothing.
template <int CI_TILES, int CO_TILES>
__device__ __forceinline__ void wgrad_tile_of(int index, int& ci, int& co) {
  int ci_left = CI_TILES, co_left = CO_TILES, ci_unit = 1, co_unit = 1;
  ci = co = 0;
#pragma unroll
  for (int level = 0; level < 3; level++) {
    if (ci_left % 2 == 0) {
      ci += index % 2 * ci_unit;
      index /= 2, ci_left /= 2, ci_unit *= 2;
    }
    if (co_left % 2 == 0) {
      co += index % 2 * co_unit;
      index /= 2, co_left /= 2, co_unit *= 2;
    }
  }
  co += index % co_left * co_unit;
  ci += index / co_left % ci_left * ci_unit;
}

// --- the thread that loads -----------------------------------------------------------------------------------------------

template <class T>
struct WgradHandoverCopies {
using C = typename T::C;
using Boxes = WgradBoxes<T>;
static constexpr int OWN_PLANES = C::parted && C::g_planes == 2 && C::taps_w % 2 == 0 ? 1 : C::g_planes;  // 1: the columns of a unit, by its parity

// A chunk of x, and of g what a block's own units take.
static __device__ __forceinline__ void load_own(const WgradBlock<T>& block, const typename T::Chunk& c, u32 to, u32 barrier) {
  expect_bytes(barrier, T::X_TILE_BYTES + T::G_ROWS * OWN_PLANES * C::plane_columns * C::block_co * T::ELEMENT);
  Boxes::load_x(block.maps.of[0], c, block.work.group * C::cin + block.work.ci, to, barrier);
  const int channel = block.work.group * C::cout + block.work.co;
  to += T::X_TILE_BYTES;
  const typename T::Chunk at = T::in_g(c, block.work);
#pragma unroll 1
  for (int i = 0; i < T::G_BOXES * OWN_PLANES; i++) {
    const int plane = OWN_PLANES < C::g_planes ? block.split : i % OWN_PLANES, box = i / OWN_PLANES;
    load_box(to + box * T::G_SLAB_BYTES + plane * T::PLANE_BYTES, block.maps.of[1], channel + box * T::G_WIDTH, at.w + plane * C::dilation_w, at.h, at.d, at.n, barrier);
  }
}

static __device__ __forceinline__ void produce(const WgradBlock<T>& block) {
  const WgradHalves halves(block.s.chunks, block.split);
  CursorOf<C::stages> cursor = {0, 1};
#pragma unroll 1
  for (int i = 0; i < halves.count(); i++, cursor.next()) {
    const typename T::Chunk c = T::chunk_at(halves.chunk(i), block.s);
    const u32 to = block.base + cursor.stage * T::STAGE_BYTES, barrier = block.full + cursor.stage * 8;
    barrier_wait(block.empty + cursor.stage * 8, cursor.parity);
    if (i < halves.whole) Boxes::load(block.maps, block.s, c, block.work, to, barrier);
    else load_own(block, c, to, barrier);
  }
}
};

// --- ways in which two blocks meet: `tell` behind a thread's stores, `wait` ahead of its loads ---------------------------

template <class T>
struct WgradMeetTogether {
  u32* counters;
  __device__ __forceinline__ void tell(int, int wg, int thread) const {
    named_sync<2, T::CONSUMERS>();         // all have stored theirs
    if (wg == 0 && thread == 0) wgrad_arrive(counters);
  }
  __device__ __forceinline__ void wait(int wg, int thread) const {
    if (wg == 0 && thread == 0) wgrad_wait(counters, 2);
    named_sync<2, T::CONSUMERS>();
  }
};

template <class T>
struct WgradMeetInCluster {
  u32 met;                                 // a barrier
  __device__ __forceinline__ void tell(int rank, int, int thread) const {
    int lane = thread & 31;
    cluster_wait();                        // the other block's barriers are ready
    __syncwarp();
    if (lane == 0) barrier_arrive_cluster(met, rank ^ 1);
  }
  __device__ __forceinline__ void wait(int, int) const { barrier_wait_cluster(met); }
};

template <class T>
using WgradMeet = WgradEither<T::C::together, WgradMeetTogether<T>, WgradMeetInCluster<T>>;

// --- consumers -----------------------------------------------------------------------------------------------------------

template <class T>
struct WgradHandover {
using C = typename T::C;
using M = WgradMultiply<T>;
using F = typename M::F;
using Taps = typename F::Taps;
using Gradient = WgradGradient<T>;
static constexpr int WORDS = T::CONSUMERS * (T::N_WIDTH / 2);  // that a block hands over

// A warpgroup on its way over its chunks.
struct Way {
  int i;                                   // the chunk
  CursorOf<C::stages> cursor;
};

// A chunk by the first of a warpgroup's units, or by both.
template <int OF_UNITS>
static __device__ __forceinline__ void multiply_chunk(typename M::Sums& acc, Way& way, const WgradBlock<T>& block, const Taps& taps, int lane_first, int lane) {
  const unsigned char* tile = block.memory + way.cursor.stage * T::STAGE_BYTES;
  const u32 x_tile = shared_address(tile);
  barrier_wait(block.full + way.cursor.stage * 8, way.cursor.parity);
  wgmma_fence();
#pragma unroll 1
  for (int run = 0; run < T::STEPS / C::unrolled; run++) {
    u32 a[4];
    const int first = run * (C::unrolled / C::entries);
    const typename F::Half from = F::step_of(first).half[0];
    const unsigned char* g_tile = tile + T::X_TILE_BYTES + from.row * T::G_ROW_BYTES;
    const int lane_from = lane_first + from.column * T::G_PIXEL_BYTES;
    const u32 x_from = x_tile + T::x_at(first);
#pragma unroll
    for (int step = 0; step < C::unrolled; step++) {
      const int e = step % C::entries, k = step / C::entries;
      if (e >= OF_UNITS) continue;
      F::load(a, g_tile, taps, block.s, typename F::Phases{}, e, F::step_of(k), lane_from);
      M::multiply(acc[e], 0, 1, a, x_from + T::x_at(k));
    }
  }
  wgmma_commit();
  wgmma_wait<1>();                         // the chunk before is done with
  if (way.i > 0 && lane == 0) barrier_arrive(block.empty + (way.cursor.stage ? way.cursor.stage - 1 : C::stages - 1) * 8);
  way.cursor.next();
  way.i++;
}

// A block's own units, from shared memory to any weight.
static __device__ __forceinline__ void put_own(const Gradient& out, const typename T::Work& work, u32 sums, int rank, int thread) {
  constexpr int QUADS = C::block_co / 4, ITEMS = T::SET_UNITS / T::UNITS * QUADS, AT_ONCE = T::CONSUMERS / ITEMS;
  const int item = thread % ITEMS, co = item % QUADS * 4, tap = item / QUADS * T::UNITS + rank;
  const int rows = C::cin - work.ci < C::block_ci ? C::cin - work.ci : C::block_ci;
  const bool by_co = out.stride_co == 1;
  const long long to = out.place_of(work, tap, 0, co);
  if (to < 0) return;
#pragma unroll 4
  for (int row = thread / ITEMS; row < rows; row += AT_ONCE) {
    u32 words[4];
    load_shared_128(words, sums + T::sum_at(tap, row, co));
    const float sum[4] = {__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]), __uint_as_float(words[3])};
    if (by_co) out.put_quad(work, sum, to + row * out.stride_ci, 0, co, true);
    else out.store_each(work, sum, to + row * out.stride_ci, co, out.stride_co);
  }
}

// A block's own sums, whole, to the weight.
static __device__ __forceinline__ void put(const Gradient& out, const WgradBlock<T>& block, const float (&sums)[T::N_WIDTH / 2], const typename F::Lane& of, int wg, int thread) {
  named_sync<2, T::CONSUMERS>();           // nobody reads a stage any more
  const u32 shared = shared_address(block.memory);
  if (out.has_rows()) {
    out.put_rows(block.work, sums, shared + wg * Gradient::ROWS_BYTES, of.first_unit + block.split, of.wg_m * T::ROWS_PER_SUB, wg, thread);
    return;
  }
#pragma unroll
  for (int j = 0; j < T::N_WIDTH / 8; j++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 at = shared + T::sum_at(of.first_unit + block.split, j * 8 + 2 * of.q, of.channel + of.row + 8 * h);
      store_shared_f32(at, sums[4 * j + 2 * h]);
      store_shared_f32(at + T::SUMS_PITCH * 4, sums[4 * j + 2 * h + 1]);
    }
  named_sync<2, T::CONSUMERS>();
  put_own(out, block.work, shared, block.split, threadIdx.x - T::COPIERS);
}

// `handed`: WORDS in global memory of each block; `other` is the block they are exchanged with.
static __device__ __forceinline__ void consume(const Gradient& out, const WgradBlock<T>& block, float4* handed, const WgradMeet<T>& meet, int other, int wg, int thread) {
  const typename F::Lane of = F::lane_of(wg, thread);
  const int rank = block.split, lane_first = F::lane_first(of);
  Taps taps;
#pragma unroll
  for (int u = 0; u < T::UNITS; u++) F::set_tap(taps, u, of.first_unit + (u ^ rank), block.s);
  typename M::Sums acc = {};
  const WgradHalves halves(block.s.chunks, rank);
  Way way = {0, {0, 0}};
#pragma unroll 1
  while (way.i < halves.whole) multiply_chunk<T::UNITS>(acc, way, block, taps, lane_first, of.lane);
  multiply_chunk<1>(acc, way, block, taps, lane_first, of.lane);  // which the tensor cores have while sums leave
  float (&passed)[T::N_WIDTH / 2] = acc[1][0];
  float4* to = handed + (long long)blockIdx.x * (WORDS / 4) + wg * 128 + thread;
#pragma unroll
  for (int j = 0; j < T::N_WIDTH / 8; j++) to[j * T::CONSUMERS] = make_float4(passed[4 * j], passed[4 * j + 1], passed[4 * j + 2], passed[4 * j + 3]);
  meet.tell(rank, wg, thread);
#pragma unroll 1
  while (way.i < halves.count() - 2) multiply_chunk<1>(acc, way, block, taps, lane_first, of.lane);
  meet.wait(wg, thread);
  const float4* from = handed + (long long)other * (WORDS / 4) + wg * 128 + thread;
#pragma unroll
  for (int j = 0; j < T::N_WIDTH / 8; j++) {
    const float4 v = __ldcg(from + j * T::CONSUMERS);
    passed[4 * j] = v.x, passed[4 * j + 1] = v.y, passed[4 * j + 2] = v.z, passed[4 * j + 3] = v.w;
  }
#pragma unroll 1
  while (way.i < halves.count()) multiply_chunk<1>(acc, way, block, taps, lane_first, of.lane);
  wgmma_wait<0>();
  float (&sums)[T::N_WIDTH / 2] = acc[0][0];
#pragma unroll
  for (int j = 0; j < T::N_WIDTH / 2; j++) sums[j] += passed[j];
  put(out, block, sums, of, wg, thread);
}
};
