// What `gather`'s blocks compute: tiles of positions q times M-groups, and the taps of each.
#include "gather_walk.cuh"

template <class C> __constant__ const auto TAP_ROW = table_of<int>(C::tap_rows);  // [variant, block, tap]: the tap's shift in pixel rows
template <class C> __constant__ const auto ENTRY = table_of<int>(C::entries);     // [variant][mb + 1]: where a block's taps begin

template <class C> __constant__ const auto ORIGIN_D = table_of<int>(C::origins_d);  // [variant], C::own_rows: from where its tiles' rows count
template <class C> __constant__ const auto ORIGIN_H = table_of<int>(C::origins_h);

// A stretch is a piece of code without a loop: matrix instructions are queued from its beginning to its end. Few steps: all blocks of a chunk are
// one stretch. More: C::taps_unrolled taps of a block are one, a round.
enum Steps { STRAIGHT, ROLLED };

// How results are stored: NCHW rows or channels-last pixels; of rows of M that are phases; or NCHW by the tensor copy engine.
enum Stores { STORE_ROWS, STORE_PIXELS, STORE_PHASES, STORE_BOXES };

// The orders of a block's roles, see claims.cuh.
template <class C, class Sizes, bool CLAIMED = C::claimed>
struct Orders {
  using Order = DealtOut<Sizes, C::cluster>;
  using AloneOrder = Order;
  using LoaderOrder = Order;
};
template <class C, class Sizes>
struct Orders<C, Sizes, true> {
  using Order = Told<Sizes, false>;
  using AloneOrder = Told<Sizes, true>;
  using LoaderOrder = Claiming<Sizes, C::resident ? C::m_groups : 1>;  // resident weights are of one M-group
};

template <class C_>
struct GatherWork : PixelTile<C_>, Orders<C_, typename PixelTile<C_>::Sizes> {
using C = C_;
using T = PixelTile<C>;
using Sizes = typename T::Sizes;

static constexpr int MB = C::mb;                        // blocks of 64 rows of an M-group
static constexpr int W_SUBTILES = C::tile_w / C::sub_w;
static constexpr int H_SUBTILES = C::tile_h / C::sub_h;
static constexpr int SUBTILES = C::tile_n * C::tile_d * H_SUBTILES * W_SUBTILES;  // of 64 pixels
static constexpr int NB = C::split == 0 ? SUBTILES / 2 : SUBTILES;  // a consumer's
static constexpr int WGS_M = C::split == 1 ? 2 : 1;
static constexpr int RELEASES = C::split == 2 ? 1 : 2;  // consumers that read a stage
static constexpr int FRAGMENT = 64 * 32;                // bytes: 64 rows of 32 bytes of K
static constexpr int STEPS_PER_TAP = T::K_STEPS * T::PARTS;
static constexpr int ENTRIES = C::entries[C::variants * (C::mb + 1) - 1];  // of all variants
static constexpr int LONGEST_STRETCH = C::taps_unrolled * STEPS_PER_TAP;

struct Tile {
  int group, cout_block, variant;                      // M-group
  int n, d, h, w;                                      // first q
};

static __device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  Tile t;
  int m = index % C::m_groups, q = index / C::m_groups;
  // Variants differ in taps; rotated, so that a block, whose tiles lie gridDim.x apart, meets all of them.
  if (!C::resident && C::variants > 1) m = (m + q) % C::m_groups;
  t.variant = m % C::variants;
  t.cout_block = m / C::variants % C::cout_blocks;
  t.group = m / (C::variants * C::cout_blocks);
  t.w = q % s.tiles_w * C::tile_w;  q /= s.tiles_w;
  t.h = q % s.tiles_h * C::tile_h;  q /= s.tiles_h;
  t.d = q % s.tiles_d * C::tile_d;
  if constexpr (C::fetch == IMAGES_BESIDE) t.n = q / s.tiles_d * C::beside;
  else t.n = q / s.tiles_d * C::tile_n;
  return t;
}

static __device__ __forceinline__ typename T::Source source_of(const Tile& t, int chunk) {
  typename T::Source at = T::source_of(t, chunk);
  if constexpr (C::own_rows) at.d += ORIGIN_D<C>[t.variant], at.h += ORIGIN_H<C>[t.variant];
  return at;
}

static __device__ __forceinline__ int first_entry(int variant, int block = 0) { return ENTRY<C>[variant * (MB + 1) + block]; }
static __device__ __forceinline__ int end_entry(int variant, int block = MB - 1) { return ENTRY<C>[variant * (MB + 1) + block + 1]; }
static __device__ __forceinline__ int entries_of(int variant) { return end_entry(variant) - first_entry(variant); }
static __device__ __forceinline__ int stretches_of(int variant) { return C::steps == STRAIGHT ? 1 : entries_of(variant) / C::taps_unrolled; }  // of a chunk
static __device__ __forceinline__ int stretch_of(int variant) { return C::steps == STRAIGHT ? entries_of(variant) * STEPS_PER_TAP : LONGEST_STRETCH; }
static __device__ __forceinline__ int chunks_of(int variant) { return entries_of(variant) ? T::CHUNKS : 0; }  // 0: only the bias

// A block's chunks of a tile: all, or a share.
static constexpr int SHARES = C::cluster;
static __device__ __forceinline__ int rank() { return (int)(blockIdx.x % SHARES); }
static __device__ __forceinline__ int first_chunk() { return SHARES > 1 ? rank() * T::CHUNKS / SHARES : 0; }
static __device__ __forceinline__ int end_chunk(int variant) {
  if constexpr (SHARES > 1) return (rank() + 1) * T::CHUNKS / SHARES;
  else return chunks_of(variant);
}
static __device__ __forceinline__ int end_chunk(const Tile& t, const Sizes&) { return end_chunk(t.variant); }
};
