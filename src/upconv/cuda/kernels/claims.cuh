// The order of a block's tiles. It says which is the first, and which follows one; the loader's also when it is done. A kernel K has an `Order` for
// warps, one for a thread alone (`AloneOrder`), and one for its loader (`LoaderOrder`).
#include "ring.cuh"

// Tiles that are dealt out evenly. Where they are few, CLUSTER blocks, which are neighbours and have no other tile, have one together: each a
// share of its chunks.
template <class Sizes, int CLUSTER = 1>
struct DealtOut {
  __device__ __forceinline__ explicit DealtOut(const Sizes&) {}
  __device__ __forceinline__ int first(const Sizes&) const { return blockIdx.x / CLUSTER; }
  __device__ __forceinline__ int next(int index, const Sizes& s) const { return CLUSTER > 1 ? s.tiles : index + gridDim.x; }
  __device__ __forceinline__ void end() {}
};

// Tiles that blocks claim as they come to them: one thread of a block, which loads its pixels, asks a counter for the next, and tells
// the others through a ring in shared memory. Dealt out evenly, the last blocks are late by 2 to 11% of the time where memory bounds:
// multiprocessors differ in their share of its bandwidth. What a tile's results are does not depend on who computes them.
constexpr int CLAIMS = 16;                       // places of the ring
constexpr int CLAIMS_BYTES = CLAIMS * 12;        // of shared memory: barriers, then tiles

__device__ __forceinline__ void claims_init(u32 ring) {
  for (int i = 0; i < CLAIMS; i++) barrier_init(ring + 8 * i, 1);
}

// The thread that claims. STEP: a block's tiles are this far apart, where it keeps what belongs to their remainder; else 1.
//
// `counters`: zeros in device memory, which the last block leaves: how many tiles are claimed (STEP such), and how many blocks
// are done. Null: tiles are dealt out evenly.
template <class Sizes, int STEP>
struct Claiming {
  u32 ring;
  u32* counters;
  int upcoming;                         // asked for a tile ahead, so that nobody waits for memory
  CursorOf<CLAIMS> cursor;
  __device__ __forceinline__ explicit Claiming(const Sizes& s) : ring(s.claims), counters(s.counters), cursor({0, 0}) { ask(blockIdx.x); }
  __device__ __forceinline__ void ask(int index) {
    const int own = STEP == 1 ? 0 : blockIdx.x % STEP;
    upcoming = index + gridDim.x;
    if (counters) upcoming = gridDim.x + atomicAdd(counters + own, 1u) * STEP + own;
  }
  __device__ __forceinline__ int first(const Sizes&) const { return blockIdx.x; }
  // Nobody says that a place is free again: who loads is ahead of those who read by no more tiles than stages, of pixels and of slots,
  // and one more have chunks of, but for two that consumers who take turns have in hand, and the next. These must be CLAIMS at most.
  __device__ __forceinline__ int next(int, const Sizes&) {
    const int index = upcoming;
    ask(index);
    store_shared_u32(ring + 8 * CLAIMS + 4 * cursor.stage, index);
    barrier_arrive(ring + 8 * cursor.stage);
    cursor.next();
    return index;
  }
  __device__ __forceinline__ void end() {
    if (!counters || atomicAdd(counters + STEP, 1u) != gridDim.x - 1) return;
    for (int i = 0; i <= STEP; i++) counters[i] = 0;
  }
};

// Others: warps, or (ALONE) single threads.
template <class Sizes, bool ALONE>
struct Told {
  u32 ring;
  CursorOf<CLAIMS> cursor;
  __device__ __forceinline__ explicit Told(const Sizes& s) : ring(s.claims), cursor({0, 0}) {}
  __device__ __forceinline__ int first(const Sizes&) const { return blockIdx.x; }
  __device__ __forceinline__ int next(int, const Sizes&) {
    barrier_wait(ring + 8 * cursor.stage, cursor.parity);
    const int index = load_shared_u32(ring + 8 * CLAIMS + 4 * cursor.stage);
    cursor.next();
    return ALONE ? index : __shfl_sync(0xffffffffu, index, 0);  // so that ptxas knows that warps do not part over it
  }
};
