// The tensor copy engine brings pixels: NCHW to slots, else to tiles.
#include "gather_slots.cuh"
#include "gather_walk.cuh"

// Channels-last: a first row of D and of H for each plane.
template <class C> __constant__ const auto PLANE_D = table_of<int>(C::planes_d);
template <class C> __constant__ const auto PLANE_H = table_of<int>(C::planes_h);

// Channels-last pixels, as slots have NCHW's: those whose taps step over columns or rows come as a box for each plane, with the copy engine's
// element strides.
template <class C>
struct PlaneBoxes {
using T = PixelTile<C>;
static constexpr int BOXES = C::planes, BYTES = T::STAGE_BYTES;
static constexpr int COPIED_BYTES = T::SEGMENTS * C::plane * T::ROW_BYTES, BOX_BYTES = T::PLANE_PITCH * T::ROW_BYTES;

static __device__ __forceinline__ constexpr int map(int) { return 0; }
static __device__ __forceinline__ Corner corner(const typename T::Source& at, const typename T::Sizes&, int r) {
  if constexpr (C::strided_box) return {at.channel, at.w + RESIDUE<C>[r], at.h + PLANE_H<C>[r], at.d + PLANE_D<C>[r], at.n};
  else return {at.channel, at.w + RESIDUE<C>[r], at.h + C::first_h, at.d + C::first_d, at.n};
}
};

template <class C, bool CHANNELS_LAST = C::channels_last> struct BoxesOf : Slot<C> {};
template <class C> struct BoxesOf<C, true> : PlaneBoxes<C> {};

// The loader, one thread: ahead of everyone by as many stages of the ring, slots (NCHW) or tiles, as are free.
template <class K, class Maps, class Ring>
__device__ __forceinline__ void load_boxes(const Maps& maps, const typename K::Sizes& s, const Ring& ring) {
  using C = typename K::C;
  using Boxes = BoxesOf<C>;
  Walk<K, typename K::LoaderOrder> walk(s);
  typename Ring::Cursor cursor = {0, 1};                // all are free at first
#pragma unroll 1
  for (walk.begin(s); walk.live(s); walk.next(s), cursor.next()) {
    const auto at = K::source_of(walk.tile, walk.chunk);
    ring.wait_empty(cursor);
    expect_bytes(ring.full(cursor), Boxes::BOXES * Boxes::COPIED_BYTES);
#pragma unroll
    for (int r = 0; r < Boxes::BOXES; r++) {
      const Corner corner = Boxes::corner(at, s, r);
      const int (&c)[5] = corner.at;
      load_box(ring.stage(cursor) + r * Boxes::BOX_BYTES, maps.of[Boxes::map(r)], c[0], c[1], c[2], c[3], c[4], ring.full(cursor));
    }
  }
  walk.order.end();
}
