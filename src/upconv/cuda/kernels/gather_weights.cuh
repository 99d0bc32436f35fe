// Weights, from memory to a consumer's registers: fragments in the order in which they are used.
#include "gather_work.cuh"

// Packed; or by boxes of a tensor (channels, taps, channels), whose rows of channels lie along K (of a gradient for the input) or along M (of a
// forward).
enum WeightsAs { PACKED, ROWS_ALONG_K, ROWS_ALONG_M };

// [variant, block, tap][subs]: the kernel's tap, -1 for none.
template <class C> __constant__ const auto TAP_INDEX = table_of<short>(C::tap_indices);
// Whether some entry has no tap for a sub-position.
template <class C>
__host__ __device__ constexpr bool lacks_taps() {
  for (int tap : C::tap_indices)
    if (tap < 0) return true;
  return false;
}

template <class C>
constexpr int WEIGHTS_OF = !C::boxed ? PACKED : C::grad_input ? ROWS_ALONG_K : ROWS_ALONG_M;

// Packed weights of a tile's chunk (gather_pack.cuh).
template <class C>
__device__ __forceinline__ const char* fragments_of(const char* packed, const typename GatherWork<C>::Tile& t, int chunk) {
  using G = GatherWork<C>;
  long long before = ((long long)(t.group * C::cout_blocks + t.cout_block) * G::CHUNKS + chunk) * G::ENTRIES + G::first_entry(t.variant);
  return packed + before * (G::STEPS_PER_TAP * G::WGS_M * G::FRAGMENT);
}

// --- the ring's stages, by the way that weights come ------------------------------------------------------------------

// A thread's `Source`, a chunk's weights, is brought to the ring in pieces, by `bring`. A consumer's thread has `part_of` a piece's first fragment, and
// loads fragment i of those that begin there.
template <class C, int = WEIGHTS_OF<C>>
struct WeightsOf;

template <class C>
struct WeightsOf<C, PACKED> {
using G = GatherWork<C>;
using Memory = const char*;
using Source = const char*;

static __device__ __forceinline__ Source source_of(const char* packed, const typename G::Tile& t, int chunk) { return fragments_of<C>(packed, t, chunk); }
static __device__ __forceinline__ void bring(u32 to, Source& from, u32 bytes, u32 barrier) {
  expect_bytes(barrier, bytes);
  copy_bulk(to, from, bytes, barrier);
  from += bytes;
}
static __device__ __forceinline__ u32 part_of(int wg, int thread) { return (C::split == 1 ? wg * G::FRAGMENT : 0) + thread * 16; }
static __device__ __forceinline__ void load(u32 (&a)[4], u32 at, int i) { load_shared_128(a, at + i * (G::WGS_M * G::FRAGMENT)); }
};

template <class C>
struct BoxedWeights {
using G = GatherWork<C>;
using Memory = TensorMap;
static constexpr int ENTRY_BYTES = G::STEPS_PER_TAP * G::WGS_M * G::FRAGMENT;  // of a tap's weights for a chunk
static constexpr bool LACKS = lacks_taps<C>();
static constexpr int SPAN = 128;                        // bytes of a row of channels along M
static constexpr int BOXES = C::grad_input ? 1 : G::WGS_M * 64 * G::ELEMENT / SPAN;  // of a tap at a sub-position
static_assert(G::BOX && G::PARTS == 1 && (C::subs == 1 || (C::grad_input && G::WGS_M == 1)) && C::w_stage % G::K_STEPS == 0, "boxes have whole taps");

struct Source {
  const TensorMap& map;
  int row, channel, entry;
};
static __device__ __forceinline__ Source source_of(const TensorMap& map, const typename G::Tile& t, int chunk) {
  const int row = (C::grad_input ? t.group * C::cout_g : 0) + t.cout_block * (G::WGS_M * C::rows_per_sub);
  return {map, row, (C::grad_input ? 0 : t.group * C::cin_g) + chunk * C::ck, G::first_entry(t.variant)};
}
static __device__ __forceinline__ void bring(u32 to, Source& from, u32 bytes, u32 barrier) {
  expect_bytes(barrier, bytes);
#pragma unroll 1
  for (u32 end = to + bytes; to < end; from.entry++)
#pragma unroll
    for (int i = 0; i < C::subs * BOXES; i++, to += ENTRY_BYTES / (C::subs * BOXES)) {
      int tap = TAP_INDEX<C>[from.entry * C::subs + i / BOXES], row = from.row + i % BOXES * (SPAN / G::ELEMENT);
      if (LACKS && tap < 0) tap = C::taps;                              // beyond the last one: zeros
      load_box(to, from.map, C::grad_input ? from.channel : row, tap, C::grad_input ? row : from.channel, 0, 0, barrier);
    }
}
};

// (COUT, taps, CIN_G): a box is a chunk's channels for all rows of a sub-position, swizzled as pixels are.
template <class C>
struct WeightsOf<C, ROWS_ALONG_K> : BoxedWeights<C> {
using G = GatherWork<C>;
using Base = BoxedWeights<C>;

// The 16 bytes whose address the thread gives to ldmatrix, of one of its warp's 16 rows and half a step.
static __device__ __forceinline__ u32 part_of(int wg, int thread) {
  int lane = thread & 31;
  return (C::split == 1 ? wg * (64 * G::ROW_BYTES) : 0) + G::unit_at(thread / 32 * 16 + lane % 16, lane / 16);
}
// A step of K is another 32 bytes of the row, and bits of the address, as the swizzle is.
static __device__ __forceinline__ void load(u32 (&a)[4], u32 at, int i) { load_matrices(a, (at ^ (i % G::K_STEPS * 32)) + i / G::K_STEPS * Base::ENTRY_BYTES); }
};

// (CIN, taps, COUT_G): boxes are rows of channels of M, SPAN bytes of them, for a chunk; a warpgroup's 64 rows are PANELS of them side by side.
template <class C>
struct WeightsOf<C, ROWS_ALONG_M> : BoxedWeights<C> {
using G = GatherWork<C>;
using Base = BoxedWeights<C>;
static constexpr int SPAN = Base::SPAN, PANELS = 64 * G::ELEMENT / SPAN;
static constexpr bool NARROW = G::ELEMENT == 2;

// Of the warp's 16 rows of M the 16 bytes whose address the lane gives to ldmatrix, of one channel and half of them; of
// float32, which ldmatrix does not turn, the lane's first.
static __device__ __forceinline__ u32 part_of(int wg, int thread) {
  int lane = thread & 31, m = thread / 32 * 16 + (NARROW ? (lane >> 3 & 1) * 8 : lane >> 2), k = NARROW ? (lane >> 4) * 8 + lane % 8 : lane & 3;
  int panel = (C::split == 1 ? wg * PANELS : 0) + m / (SPAN / G::ELEMENT), byte = m % (SPAN / G::ELEMENT) * G::ELEMENT;
  return panel * (C::ck * SPAN) + k * SPAN + (byte ^ (k & 7) << 4);
}
// A step of K is other rows; 8 rows of M and 4 channels further bits of the address change, too.
static __device__ __forceinline__ void load(u32 (&a)[4], u32 at, int i) {
  u32 from = at + i % G::K_STEPS * (32 / G::ELEMENT * SPAN) + i / G::K_STEPS * Base::ENTRY_BYTES;
  if constexpr (NARROW) {
    load_matrices_turned(a, from);
  } else {
#pragma unroll
    for (int r = 0; r < 4; r++) a[r] = load_shared_u32((from ^ (r & 1) * 32 ^ (r >> 1) * 64) + (r >> 1) * 4 * SPAN);
  }
}
};

// --- one thread fills the ring ----------------------------------------------------------------------------------------

template <class C>
using WeightRing = RingOf<C::stages_w, C::w_stage * GatherWork<C>::WGS_M * GatherWork<C>::FRAGMENT>;

// A stage of the ring holds C::w_stage fragments of a stretch, its last one what is left, so that the code knows where stages begin.
// Every tile's weights stream through.
// [resident] The ring has all stages of a tile, which are filled once and stay.
template <class C>
__device__ __forceinline__ void stream_weights(const typename WeightsOf<C>::Memory& memory, const typename GatherWork<C>::Sizes& s, const WeightRing<C>& ring) {
  using G = GatherWork<C>;
  using W = WeightsOf<C>;
  wait_for_results();                                   // of `pack`
  typename G::AloneOrder order(s);
  typename WeightRing<C>::Cursor cursor = {0, 1};
#pragma unroll 1
  for (int index = order.first(s); index < s.tiles; index = order.next(index, s)) {
    const typename G::Tile t = G::tile_at(index, s);
#pragma unroll 1
    for (int chunk = G::first_chunk(); chunk < G::end_chunk(t.variant); chunk++) {
      typename W::Source from = W::source_of(memory, t, chunk);
#pragma unroll 1
      for (int i = G::stretches_of(t.variant); i > 0; i--) {
#pragma unroll 1
        for (int left = G::stretch_of(t.variant); left > 0; left -= C::w_stage, cursor.next()) {
          u32 bytes = (left < C::w_stage ? left : C::w_stage) * (G::WGS_M * G::FRAGMENT);
          ring.wait_empty(cursor);
          W::bring(ring.stage(cursor), from, bytes, ring.full(cursor));
        }
      }
    }
    if (C::resident) return;
  }
}

// --- the consumers' side ----------------------------------------------------------------------------------------------

// `load` brings fragment i of a stretch.
template <class C, bool RING = C::wgmma>
struct Fragments {                                      // before sm_90: straight from memory
using G = GatherWork<C>;
int part;                                               // this thread's of a fragment
const char *first, *from;                               // of the tile, and the next

__device__ __forceinline__ Fragments(const WeightRing<C>&, int wg, int thread) : part((C::split == 1 ? wg * G::FRAGMENT : 0) + thread * 16) {}
__device__ __forceinline__ void begin(const char* packed, const typename G::Tile& t) { first = fragments_of<C>(packed, t, 0) + part; }
__device__ __forceinline__ void begin_chunk(int chunk) { from = first + (long long)chunk * (G::ENTRIES * G::STEPS_PER_TAP * G::WGS_M * G::FRAGMENT); }
__device__ __forceinline__ void load(u32 (&a)[4], int) {
  const uint4 v = __ldg((const uint4*)from);
  a[0] = v.x; a[1] = v.y; a[2] = v.z; a[3] = v.w;
  from += G::WGS_M * G::FRAGMENT;
}
};

template <class C>
struct Fragments<C, true> {                             // from the ring
using G = GatherWork<C>;
using W = WeightsOf<C>;
WeightRing<C> ring;
u32 part;                                               // this thread's of a stage
CursorOf<C::stages_w> cursor;                           // the stage to be waited for next
u32 at;                                                 // its part of the stage in hand
u32 done;                                               // the barrier that says that this is free
// [resident] Later than the first tile; all stages have come.
bool later = false, all = false;

__device__ __forceinline__ Fragments(const WeightRing<C>& ring, int wg, int thread) : ring(ring), part(W::part_of(wg, thread)), cursor({0, 0}) {}
__device__ __forceinline__ void begin() { cursor = {0, 0}, all = later, later = true; }  // a tile, whose stages stay
// A stage is waited for with its first fragment.
__device__ __forceinline__ void load(u32 (&a)[4], int i) {
  if (i % C::w_stage == 0) {
    if (!C::resident || !all) ring.wait_full(cursor);
    at = ring.stage(cursor) + part, done = ring.empty(cursor);
    cursor.next();
  }
  W::load(a, at, i % C::w_stage);
}
__device__ __forceinline__ void skip(int variant) {
  cursor.move(G::chunks_of(variant) * G::stretches_of(variant) * ((G::stretch_of(variant) + C::w_stage - 1) / C::w_stage));
}
};
