// A block's tiles, and a walk over their chunks.
#include "claims.cuh"
#include "gather_tile.cuh"

// An order says which tile is a block's first, and which follows one; the loader also when others may be told, and when it is done. A kernel K
// has an `Order` for warps, one for a thread alone (`AloneOrder`), and one for its loader (`LoaderOrder`).
//
// Tiles that are dealt out evenly.
template <class Sizes>
struct DealtOut {
  __device__ __forceinline__ explicit DealtOut(const Sizes&) {}
  __device__ __forceinline__ int first(const Sizes&) const { return blockIdx.x; }
  __device__ __forceinline__ int next(int index, const Sizes&) const { return index + gridDim.x; }
  __device__ __forceinline__ void tell() {}
  __device__ __forceinline__ void end() {}
};

// Where tiles are few, CLUSTER blocks have one together, each a share of its chunks, and add up their sums in shared memory. They are
// neighbours, and have no other tile.
template <class Sizes, int CLUSTER>
struct OneTogether {
  __device__ __forceinline__ explicit OneTogether(const Sizes&) {}
  __device__ __forceinline__ int first(const Sizes&) const { return blockIdx.x / CLUSTER; }
  __device__ __forceinline__ int next(int, const Sizes& s) const { return s.tiles; }
  __device__ __forceinline__ void tell() {}
  __device__ __forceinline__ void end() {}
};
template <int CLUSTER>
__device__ __forceinline__ int rank_in_cluster() { return (int)(blockIdx.x % CLUSTER); }

// Tiles that are claimed.
template <class Sizes, bool ALONE>
struct Told {
  ClaimsOf<ALONE> claims;
  __device__ __forceinline__ explicit Told(const Sizes& s) : claims(s.claims) {}
  __device__ __forceinline__ int first(const Sizes&) const { return blockIdx.x; }
  __device__ __forceinline__ int next(int, const Sizes&) { return claims.next(); }
};
template <class Sizes, int STEP>
struct Claiming {
  Claimer<STEP> claims;
  __device__ __forceinline__ explicit Claiming(const Sizes& s) : claims(s.claims, s.counters) {}
  __device__ __forceinline__ int first(const Sizes&) const { return blockIdx.x; }
  __device__ __forceinline__ int next(int, const Sizes&) { return claims.next(); }
  __device__ __forceinline__ void tell() { claims.tell(); }
  __device__ __forceinline__ void end() { claims.end(); }
};

// A walk over (tile, chunk) in the order in which consumers take them. K has `tile_at`, a tile's chunks, `first_chunk` to `end_chunk`, and SHARES,
// the blocks that share these.
template <class K, class Order = typename K::Order>
struct Walk {
  using Sizes = typename K::Sizes;
  Order order;
  int index, chunk;
  typename K::Tile tile;

  __device__ __forceinline__ explicit Walk(const Sizes& s) : order(s) {}
  __device__ __forceinline__ void begin(const Sizes& s) {
    index = order.first(s);
    chunk = K::first_chunk();
    if constexpr (K::SHARES > 1) tile = K::tile_at(index, s);
    else settle(s);
  }
  __device__ __forceinline__ bool live(const Sizes& s) const {
    if constexpr (K::SHARES > 1) return index < s.tiles && chunk < K::end_chunk(tile, s);
    else return index < s.tiles;
  }
  __device__ __forceinline__ void settle(const Sizes& s) {  // past tiles without chunks
    while (index < s.tiles) {
      tile = K::tile_at(index, s);
      if (chunk < K::end_chunk(tile, s)) return;
      index = order.next(index, s);
      chunk = 0;
    }
  }
  __device__ __forceinline__ void next(const Sizes& s) {
    if constexpr (K::SHARES > 1) chunk++;
    else if (++chunk >= K::CHUNKS) settle(s);
  }
};
