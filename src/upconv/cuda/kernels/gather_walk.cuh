// A walk over the chunks of a block's tiles.
#include "claims.cuh"
#include "gather_tile.cuh"

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
    settle(s);
  }
  __device__ __forceinline__ bool live(const Sizes& s) const { return index < s.tiles; }
  __device__ __forceinline__ void settle(const Sizes& s) {  // past tiles without chunks
    while (index < s.tiles) {
      tile = K::tile_at(index, s);
      if (chunk < K::end_chunk(tile, s)) return;
      index = order.next(index, s);
      chunk = K::first_chunk();
    }
  }
  __device__ __forceinline__ void next(const Sizes& s) {
    if (++chunk >= (K::SHARES > 1 ? K::end_chunk(tile, s) : K::CHUNKS)) settle(s);
  }
};
