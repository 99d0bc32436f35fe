// Gather-GEMM on tensor cores: out[o = OUT_STEP q + u] = sum over taps of W(u, tap) x in[i = IN_STEP q + offset(u, tap)],
// for every axis; u < OUT_STEP are the sub-positions of q (the phases of a stride, or rows unrolled to fill a tile).
// The gradient for the input is the same with exchanged steps: `in` is the output's gradient, `cin` its channels, `out` the input's.
//
// Work of a block (persistent, `for tile`): tile_n x tile_d x tile_h x tile_w positions q times one M-group. An M-group is
// mb blocks of 64 rows (for WGS_M = 2: a pair of them); a row is one output channel at one (d, h) sub-position, a block one
// W sub-position. K is input channels x taps, in chunks of ck channels.
//
// Roles:
//   producers  load the input tile with its halo once per chunk. NCHW: copies into a staging slot (bytes in flight:
//              stages_s - 1 slots), then a pass of shared memory -> registers -> shared memory that turns pixels to rows of ck
//              channels and rounds to TF32.
// [channels_last] Producers copy straight to those rows.
//   consumers  multiply: weights are A, from registers, packed in fragment order (one 16-byte load per thread and step);
//              pixels are B, rows of ck channels in shared memory, swizzled. A tap is a shift of B's start by whole rows:
//              the swizzle is a function of address bits, so any shift is right (measured: 32, 64 and 128 bytes).
//   one thread streams the weights' fragments through a ring.
// [resident] Or it loads all of them once.
// `split` 0: both consumers share an M-group and halve the pixels. 1: they share the pixels. 2: ping-pong, whole tiles in turn,
// so that one stores while the other multiplies.
//
// Constants are Gather's C; sizes of the input are arguments.
// [library] cuda/gemm/tiling.py computes C and explains it.
#include "gather_work.cuh"            // tiles, their M-groups and chunks; what kernels are told
#include "gather_pack.cuh"            // puts weights in the order of fragments
#include "gather_produce.cuh"         // producers and the loader: pixels to shared memory
#include "gather_weights.cuh"         // weights from memory to a consumer's registers
#include "gather_straight.cuh"        // a chunk's matrix instructions
#include "gather_rolled.cuh"
#include "gather_store_rows.cuh"      // sums to memory
#include "gather_store_pixels.cuh"
#include "gather_store_phases.cuh"
#include "gather_store_boxes.cuh"
#include "gather_cluster.cuh"         // sums of several blocks

template <class C, bool CHANNELS_LAST = C::channels_last> constexpr int SLOTS_BYTES = C::stages_s * Slot<C>::BYTES;
template <class C> constexpr int SLOTS_BYTES<C, true> = 0;

template <class C_>
struct Gather {
using C = C_;
using G = GatherWork<C>;
using Sizes = typename G::Sizes;
using Type = typename G::Number::Type;
using Chunk = ChunkOf<C>;
using Weights = Fragments<C>;
using Store = Epilogue<C>;
using Result = typename Store::Result;
static constexpr bool BY_PLANES = C::plane_barriers > 1;
static constexpr bool IN_TURN = C::split == 2;
static constexpr bool DRAINED = C::store == STORE_BOXES;

// --- shared memory ----------------------------------------------------------------------------------------------------

static constexpr int TILES_AT = 0;
static constexpr int RING_AT = TILES_AT + C::stages_p * G::STAGE_BYTES;
static constexpr int SLOTS_AT = RING_AT + C::ring_fragments * G::WGS_M * G::FRAGMENT;
static constexpr int SLOTS_END = SLOTS_AT + SLOTS_BYTES<C>;
static constexpr int BUFFERS_AT = DRAINED ? (SLOTS_END + 1023) / 1024 * 1024 : SLOTS_END;  // where boxes' swizzle begins
static constexpr int BARRIERS_AT = BUFFERS_AT + G::CONSUMERS * 4 * Store::BUFFER_BYTES;
static constexpr int PIXEL_BARRIERS = C::stages_p * C::plane_barriers;
static constexpr int SLOT_BARRIERS = G::BOX ? (C::channels_last ? C::stages_p : C::stages_s) : 0;
static constexpr int CLAIMS_AT = BARRIERS_AT + 16 * (PIXEL_BARRIERS + C::stages_w + SLOT_BARRIERS);
static constexpr int SEGMENTS_AT = CLAIMS_AT + (C::claimed ? CLAIMS_BYTES : 0);
static constexpr int SHARED_BYTES = SEGMENTS_AT + G::SEGMENTS * 4;

static_assert(C::shared_bytes == SHARED_BYTES, "the planner's shared memory is not the kernel's");
static_assert(G::BOX || (C::channels_last ? C::stages_p : C::stages_s) >= 2, "threads that copy pixels have a stage ahead of the one that is read");
static_assert(!BY_PLANES || (G::DIRECT_BOX && C::strided_box && C::plane_barriers == C::planes),
              "planes have barriers of their own where boxes bring them");
static_assert(!C::claimed || (G::BOX && C::cluster == 1), "tiles are claimed by the thread that loads boxes");
static_assert(!C::claimed || (C::stages_p + C::stages_s) / G::CHUNKS + 4 <= CLAIMS, "the thread that claims runs around the ring");
static_assert(C::cluster == 1 || !(!G::BOX || C::resident || IN_TURN || C::bare || C::store > STORE_PIXELS),
              "blocks of a cluster have a tile each, boxes and a ring of weights");
static_assert(C::cluster == 1 || ClusterSums<C>::BYTES <= BUFFERS_AT, "a block's sums have no room where pixels and weights were");

// --- consumers --------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ void consume(const char* packed, const Type* bias, Result y, const Sizes& s, u32 tiles, u32 full, u32 empty, Weights& weights, u32 buffers, int wg, int thread) {
  // By a shuffle ptxas knows that branches over a warp's number do not part it.
  // [bare] But beside the stores of outputs without taps that makes some kernels slower.
  constexpr bool PLAIN = C::bare && (G::ELEMENT == 2 || C::channels_last);
  int warp = PLAIN ? thread >> 5 : __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31;
  int first_subtile = C::split == 0 ? wg * G::NB : 0;
  u32 buffer = buffers + (wg * 4 + warp) * Store::BUFFER_BYTES;
  CursorOf<C::stages_p> cursor = {0, 0};
  int turn = 0;
  typename G::Order order(s);
  if (IN_TURN && wg == 1) named_arrive(2, G::CONSUMER_THREADS);  // the first turn is warpgroup 0's
  constexpr bool EARLY = C::claimed && !IN_TURN;        // asks for the next tile ahead of the stores, which hide the wait
  int following = 0;
#pragma unroll 1
  for (int index = order.first(s); index < s.tiles; index = EARLY ? following : order.next(index, s), turn++) {
    const typename G::Tile t = G::tile_at(index, s);
    int chunks = G::end_chunk(t.variant) - G::first_chunk();
    if (IN_TURN && (turn & 1) != wg) {
      cursor.move(chunks);
      weights.skip(t.variant);
      continue;
    }
    float acc[G::MB][G::NB][32], sum[G::MB][G::NB][32];  // `sum`: IEEE's, which leave the tensor cores
#pragma unroll
    for (int b = 0; b < G::MB; b++)
#pragma unroll
      for (int nb = 0; nb < G::NB; nb++)
#pragma unroll
        for (int i = 0; i < 32; i++) {
          acc[b][nb][i] = 0.f;
          opaque(acc[b][nb][i]);
          if (G::PARTS == 2) sum[b][nb][i] = 0.f;
        }
    if (IN_TURN) named_sync(2 + wg, G::CONSUMER_THREADS);
    weights.begin(packed, t);
    int variant = __shfl_sync(0xffffffffu, t.variant, 0);  // so that ptxas knows that warps do not part over it
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++, cursor.next()) {
      Columns<C> pixels(tiles + cursor.stage * G::STAGE_BYTES, first_subtile);
      u32 last = empty + cursor.stage * 8;
      if constexpr (BY_PLANES) {
        pixels.full = full + cursor.stage * (C::plane_barriers * 8), pixels.empty = empty + cursor.stage * (C::plane_barriers * 8), pixels.parity = cursor.parity;
        last = pixels.empty + (C::plane_barriers - 1) * 8;
      } else {
        barrier_wait(full + cursor.stage * 8, cursor.parity);
      }
      weights.begin_chunk(chunk);
      Chunk::multiply(variant, acc, sum, weights, pixels, lane);
      Chunk::give_back(last, lane);
    }
    weights.end();
    if (IN_TURN) named_arrive(2 + (wg ^ 1), G::CONSUMER_THREADS);
    if (EARLY) following = order.next(index, s);
    auto& sums = G::PARTS == 2 ? sum : acc;
    if constexpr (C::cluster > 1) ClusterSums<C>::add_up(sums, tiles, wg, thread);
    Store::store(sums, bias, y, s, t, t.cout_block * G::WGS_M + (C::split == 1 ? wg : 0), first_subtile, buffer, warp, lane);
  }
}

// --- a block ----------------------------------------------------------------------------------------------------------

// What a kernel is given beside the sizes.
struct Given {
  const char* x;
  const char* packed;
  const Type* bias;
  char* y;
};
// The last is of a result or of weights.
using TensorMaps = typename G::template TensorMapsAnd<DRAINED || C::boxed>;

static __device__ __forceinline__ void init_barriers(const PixelBarriers& pixels, u32 full_w, u32 empty_w) {
  for (int i = 0; i < PIXEL_BARRIERS; i++) {
    barrier_init(pixels.full + 8 * i, G::DIRECT_BOX ? 1 : G::PRODUCER_WARPS);
    barrier_init(pixels.empty + 8 * i, G::RELEASES * 4);
  }
  for (int i = 0; i < C::stages_w; i++) {
    barrier_init(full_w + 8 * i, 1);
    barrier_init(empty_w + 8 * i, G::RELEASES * 4);
  }
  for (int i = 0; i < SLOT_BARRIERS; i++) {
    barrier_init(pixels.landed + 8 * i, 1);
    barrier_init(pixels.left + 8 * i, G::PRODUCER_WARPS);
  }
}

// All warps but the consumers'.
template <class Maps>
static __device__ __forceinline__ void bring(const Given& given, const Maps& maps, const Sizes& s, const int* segments, u32 base, const PixelBarriers& barriers, u32 full_w, u32 empty_w) {
  int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), thread = threadIdx.x & 127;
  if (warp < G::PRODUCER_WARPS) {
    if constexpr (!G::DIRECT_BOX) Producer<G>::produce(given.x, s, segments, base + TILES_AT, base + SLOTS_AT, barriers, threadIdx.x);
  } else if (G::BOX && warp == G::LOADER_WARP && (thread & 31) == 0) {
    if constexpr (G::BOX && C::channels_last) load_boxes<G>(maps, s, base + TILES_AT, G::DIRECT_BOX ? barriers.full : barriers.landed, barriers.empty);
    else if constexpr (G::BOX) load_boxes<G>(maps, s, base + SLOTS_AT, barriers.landed, barriers.left);
  } else if (C::wgmma && warp == G::WEIGHTS_WARP && (thread & 31) == 0) {
    if constexpr (C::boxed) stream_weights<C>(maps.of[MAPS_OF<C>], s, base + RING_AT, full_w, empty_w);
    else if constexpr (C::wgmma) stream_weights<C>(given.packed, s, base + RING_AT, full_w, empty_w);
  }
}

template <class Maps>
static __device__ __forceinline__ void run(const Given& given, const Maps& maps, Sizes s, unsigned char* memory) {
  u32 base = shared_address(memory);
  u32 full = base + BARRIERS_AT, empty = full + 8 * PIXEL_BARRIERS, full_w = empty + 8 * PIXEL_BARRIERS, empty_w = full_w + 8 * C::stages_w;
  const PixelBarriers barriers = {full, empty, empty_w + 8 * C::stages_w, empty_w + 8 * (C::stages_w + SLOT_BARRIERS)};
  int* segments = (int*)(memory + SEGMENTS_AT);
  s.claims = base + CLAIMS_AT;
  if (threadIdx.x == 0) {
    init_barriers(barriers, full_w, empty_w);
    if constexpr (C::claimed) claims_init(s.claims);
    barriers_begun();
  }
  for (int i = threadIdx.x; i < G::SEGMENTS; i += G::THREADS) segments[i] = G::pack_segment(i);
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role < G::FIRST_CONSUMER) {
    if constexpr (C::wgmma) fewer_registers<C::producer_registers>();
    bring(given, maps, s, segments, base, barriers, full_w, empty_w);
  } else {
    wait_for_results();                                 // of `pack`: the bias; nor is stored where `pack` may still read
    if constexpr (C::wgmma) more_registers<C::consumer_registers>();
    int wg = role - G::FIRST_CONSUMER;
    Weights weights(base + RING_AT, full_w, empty_w, wg, thread);
    if constexpr (DRAINED) {
      consume(given.packed, given.bias, maps.of[MAPS_OF<C>], s, base + TILES_AT, full, empty, weights, base + BUFFERS_AT, wg, thread);
      if ((thread & 31) == 0) bulk_wait();
    } else {
      consume(given.packed, given.bias, given.y, s, base + TILES_AT, full, empty, weights, base + BUFFERS_AT, wg, thread);
    }
  }
}
};

// --- the kernel, whose parameters depend on its constants -------------------------------------------------------------

enum Kinds { POINTERS, MAPS, CLUSTER };
template <class C>
constexpr int KIND_OF = C::cluster > 1 ? CLUSTER : C::fetch != BY_THREADS ? MAPS : POINTERS;

template <class C, int KIND, bool = KIND_OF<C> == KIND> struct OnlyIf {};
template <class C, int KIND> struct OnlyIf<C, KIND, true> { using Kernel = void; };
struct NoMaps {};

template <class C>
__global__ typename OnlyIf<C, POINTERS>::Kernel __launch_bounds__(PixelTile<C>::THREADS, 1)
gather(const char* __restrict__ x, const char* __restrict__ packed, const typename PixelTile<C>::Number::Type* __restrict__ bias, char* __restrict__ y,
       int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tiles) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Gather<C>::run({x, packed, bias, y}, NoMaps(), {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles}, memory);
}

// `counters`, of blocks that claim tiles: as many as M-groups that stay with a block, and one; or null (claims.cuh).
template <class C>
__global__ typename OnlyIf<C, MAPS>::Kernel __launch_bounds__(PixelTile<C>::THREADS, 1)
gather(const char* __restrict__ x, const char* __restrict__ packed, const typename PixelTile<C>::Number::Type* __restrict__ bias, char* __restrict__ y, u32* counters,
       int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tiles,
       const __grid_constant__ typename Gather<C>::TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Gather<C>::run({x, packed, bias, y}, maps, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles, counters}, memory);
}

template <class C>
__global__ typename OnlyIf<C, CLUSTER>::Kernel __launch_bounds__(PixelTile<C>::THREADS, 1) CLUSTER_DIMS(C::cluster)
gather(const char* __restrict__ x, const char* __restrict__ packed, const typename PixelTile<C>::Number::Type* __restrict__ bias, char* __restrict__ y, u32*,
       int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tiles,
       const __grid_constant__ typename Gather<C>::TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Gather<C>::run({x, packed, bias, y}, maps, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles}, memory);
}
