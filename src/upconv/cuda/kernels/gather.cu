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

template <class C_>
struct Gather {
using C = C_;
using G = GatherWork<C>;
using Sizes = typename G::Sizes;
using Type = typename G::Number::Type;
using Chunk = ChunkOf<C>;
using Store = Epilogue<C>;
using Result = typename Store::Result;
static constexpr bool IN_TURN = C::split == 2;
static constexpr bool DRAINED = C::store == STORE_BOXES;

// --- shared memory ----------------------------------------------------------------------------------------------------

// Boxes of NCHW are no tiles yet.
// [IEEE] Nor are others, which lie where the tile will.
static constexpr int SLOTS = !C::channels_last ? C::stages_s : G::BOX && !G::DIRECT_BOX ? C::stages_p : 0;
using Pixels = RingOf<C::stages_p, G::STAGE_BYTES>;
using Slots = RingOf<SLOTS, C::channels_last ? 0 : BoxesOf<C>::BYTES>;
using Ring = WeightRing<C>;
static constexpr int RING_AT = Pixels::BYTES;
static constexpr int SLOTS_AT = RING_AT + Ring::BYTES;
static constexpr int SLOTS_END = SLOTS_AT + Slots::BYTES;
static constexpr int BUFFERS_AT = DRAINED ? (SLOTS_END + 1023) / 1024 * 1024 : SLOTS_END;  // where boxes' swizzle begins
static constexpr int BARRIERS_AT = BUFFERS_AT + G::CONSUMERS * 4 * Store::BUFFER_BYTES;
static constexpr int CLAIMS_AT = BARRIERS_AT + Pixels::BARRIER_BYTES + Ring::BARRIER_BYTES + Slots::BARRIER_BYTES;
static_assert(C::shared_bytes == CLAIMS_AT + (C::claimed ? CLAIMS_BYTES : 0), "the planner's shared memory is not the kernel's");
static_assert(!C::claimed || (C::stages_p + C::stages_s) / G::CHUNKS + 4 <= CLAIMS, "the thread that claims runs around the ring");
static_assert(C::cluster == 1 || ClusterSums<C>::BYTES <= BUFFERS_AT, "a block's sums have no room where pixels and weights were");

struct Memory {
  Pixels pixels;
  Ring weights;
  Slots slots;
  u32 buffers;
};
static __device__ __forceinline__ Memory memory_at(u32 a) {
  const u32 of_pixels = a + BARRIERS_AT, of_weights = of_pixels + Pixels::BARRIER_BYTES;
  return {Pixels::at(a, of_pixels), Ring::at(a + RING_AT, of_weights), Slots::at(a + SLOTS_AT, of_weights + Ring::BARRIER_BYTES), a + BUFFERS_AT};
}

// --- consumers --------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ void consume(const char* packed, const Type* bias, Result y, const Sizes& s, const Memory& memory, int wg, int thread) {
  // By a shuffle ptxas knows that branches over a warp's number do not part it.
  // [bare] But beside the stores of outputs without taps that makes some kernels slower.
  constexpr bool PLAIN = C::bare && (G::ELEMENT == 2 || C::channels_last);
  int warp = PLAIN ? thread >> 5 : __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31;
  int first_subtile = C::split == 0 ? wg * G::NB : 0;
  u32 buffer = memory.buffers + (wg * 4 + warp) * Store::BUFFER_BYTES;
  typename Pixels::Cursor cursor = {0, 0};
  Fragments<C> weights(memory.weights, wg, thread);
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
      if constexpr (C::wgmma && !C::resident) weights.skip(t.variant);
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
    if constexpr (!C::wgmma) weights.begin(packed, t);
    else if constexpr (C::resident) weights.begin();
    int variant = __shfl_sync(0xffffffffu, t.variant, 0);  // so that ptxas knows that warps do not part over it
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++, cursor.next()) {
      Columns<C> pixels(memory.pixels.stage(cursor), first_subtile);
      memory.pixels.wait_full(cursor);
      if constexpr (!C::wgmma) weights.begin_chunk(chunk);
      Chunk::multiply(variant, acc, sum, weights, pixels, lane);
      give_back(memory.pixels.empty(cursor), lane);
    }
    if (IN_TURN) named_arrive(2 + (wg ^ 1), G::CONSUMER_THREADS);
    if (EARLY) following = order.next(index, s);
    auto& sums = G::PARTS == 2 ? sum : acc;
    if constexpr (C::cluster > 1) ClusterSums<C>::add_up(sums, memory.pixels.stages, wg, thread);
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

// All warps but the consumers'.
template <class Maps>
static __device__ __forceinline__ void bring(const Given& given, const Maps& maps, const Sizes& s, const Memory& memory) {
  int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  bool alone = (threadIdx.x & 31) == 0;
  if (warp < G::PRODUCER_WARPS) {
    if constexpr (!C::channels_last) turn_slots<G>(given.x, s, memory.pixels, memory.slots, threadIdx.x);
    else if constexpr (!G::DIRECT_BOX) round_tiles<G>(given.x, s, memory.pixels, memory.slots, threadIdx.x);
  } else if (G::BOX && warp == G::LOADER_WARP && alone) {
    if constexpr (G::DIRECT_BOX) load_boxes<G>(maps, s, memory.pixels);
    else if constexpr (G::BOX && C::channels_last) load_boxes<G>(maps, s, Pixels{memory.pixels.stages, memory.slots.full_at, memory.pixels.empty_at});
    else if constexpr (G::BOX) load_boxes<G>(maps, s, memory.slots);
  } else if (C::wgmma && warp == G::WEIGHTS_WARP && alone) {
    if constexpr (C::boxed) stream_weights<C>(maps.of[MAPS_OF<C>], s, memory.weights);
    else if constexpr (C::wgmma) stream_weights<C>(given.packed, s, memory.weights);
  }
}

template <class Maps>
static __device__ __forceinline__ void run(const Given& given, const Maps& maps, Sizes s, u32 base) {
  const Memory memory = memory_at(base);
  s.claims = base + CLAIMS_AT;
  run_block<G::FIRST_CONSUMER, G::CONSUMERS, C::producer_registers, C::consumer_registers>(
      [&] {
        memory.pixels.init(G::DIRECT_BOX ? 1 : G::PRODUCER_WARPS, G::RELEASES * 4);
        memory.weights.init(1, G::RELEASES * 4);
        memory.slots.init(1, G::PRODUCER_WARPS);
        if constexpr (C::claimed) claims_init(s.claims);
      },
      [&] { bring(given, maps, s, memory); },
      [&](int wg, int thread) {
        if constexpr (DRAINED) {
          consume(given.packed, given.bias, maps.of[MAPS_OF<C>], s, memory, wg, thread);
          if ((thread & 31) == 0) bulk_wait();
        } else {
          consume(given.packed, given.bias, given.y, s, memory, wg, thread);
        }
      });
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
  Gather<C>::run({x, packed, bias, y}, NoMaps(), {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles}, shared_address(memory));
}

// `counters`, of blocks that claim tiles: as many as M-groups that stay with a block, and one; or null (claims.cuh).
template <class C>
__global__ typename OnlyIf<C, MAPS>::Kernel __launch_bounds__(PixelTile<C>::THREADS, 1)
gather(const char* __restrict__ x, const char* __restrict__ packed, const typename PixelTile<C>::Number::Type* __restrict__ bias, char* __restrict__ y, u32* counters,
       int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tiles,
       const __grid_constant__ typename Gather<C>::TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Gather<C>::run({x, packed, bias, y}, maps, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles, counters}, shared_address(memory));
}

template <class C>
__global__ typename OnlyIf<C, CLUSTER>::Kernel __launch_bounds__(PixelTile<C>::THREADS, 1) CLUSTER_DIMS(C::cluster)
gather(const char* __restrict__ x, const char* __restrict__ packed, const typename PixelTile<C>::Number::Type* __restrict__ bias, char* __restrict__ y, u32*,
       int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tiles,
       const __grid_constant__ typename Gather<C>::TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Gather<C>::run({x, packed, bias, y}, maps, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles}, shared_address(memory));
}
