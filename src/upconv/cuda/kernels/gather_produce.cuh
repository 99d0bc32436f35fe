// Producers: from slots, or from memory, to the tiles that consumers read. One way for each layout, whether they or the copy engine bring
// pixels.
#include "gather_boxes.cuh"
#include "gather_rows.cuh"
#include "gather_turn.cuh"

// The tile is written: make it visible to the matrix units and say so, once a warp.
__device__ __forceinline__ void hand_over(u32 full, int lane) {
  fence_async_shared();
  __syncwarp();
  if (lane == 0) barrier_arrive(full);
}

// NCHW: slots are turned. Boxes fill them; or threads, with a chunk ahead of the one that they turn.
template <class K, class Tiles, class Slots>
__device__ __forceinline__ void turn_slots(const char* __restrict__ x, const typename K::Sizes& s, const Tiles& tiles, const Slots& slots, int thread) {
  using C = typename K::C;
  int lane = thread & 31;
  OwnPixels<C> own;
  Walk<K> now(s), ahead(s);
  typename Tiles::Cursor tile = {0, 1};
  typename Slots::Cursor slot = {0, 0}, next_slot = {0, 0};
  const auto stage_next = [&] {
    if constexpr (!K::BOX) {
      if (ahead.live(s)) {
        stage_rows<C>(x, s, K::source_of(ahead.tile, ahead.chunk), slots.stage(next_slot), thread);
        ahead.next(s);
      }
      next_slot.next();
      copy_commit();
    }
  };
  if constexpr (!K::BOX) {
    ahead.begin(s);
#pragma unroll 1
    for (int i = 0; i < C::stages_s - 1; i++) stage_next();
  }
  if constexpr (!Slot<C>::EVERY_TILE) own.locate(x, s, typename K::Source(), thread);
#pragma unroll 1
  for (now.begin(s); now.live(s); now.next(s), tile.next(), slot.next()) {
    if (Slot<C>::EVERY_TILE && now.chunk == K::first_chunk()) own.locate(x, s, K::source_of(now.tile, 0), thread);
    if constexpr (K::BOX) {
      slots.wait_full(slot);
    } else {
      copy_wait<C::stages_s - 2>();
      named_sync<1, K::PRODUCER_THREADS>();             // everyone's copies have landed, and everyone has left the next slot
      stage_next();
    }
    tiles.wait_empty(tile);
    if (Slot<C>::aligned(own.plane)) own.template turn<true>(now.tile.w, now.chunk, slots.stage(slot), tiles.stage(tile), thread);
    else own.template turn<false>(now.tile.w, now.chunk, slots.stage(slot), tiles.stage(tile), thread);
    hand_over(tiles.full(tile), lane);
    if constexpr (K::BOX) leave(slots.empty(slot), lane);
  }
}

// Channels-last: rows lie in tiles as they are read, and are rounded there. IEEE's boxes land there, as `slots` say; or threads copy chunks ahead
// of the one that they round.
template <class K, class Tiles, class Slots>
__device__ __forceinline__ void round_tiles(const char* __restrict__ x, const typename K::Sizes& s, const Tiles& tiles, const Slots& slots, int thread) {
  using C = typename K::C;
  int lane = thread & 31, pending = 0;
  Walk<K> now(s), ahead(s);
  typename Tiles::Cursor tile = {0, 0}, free = {0, 1};
  if constexpr (!K::BOX) ahead.begin(s);
#pragma unroll 1
  for (now.begin(s); now.live(s); now.next(s), tile.next(), pending--) {
    if constexpr (K::BOX) {
      barrier_wait(slots.full(tile), tile.parity);
    } else {
#pragma unroll 1
      for (; pending < C::stages_p - 1; pending++) {    // one more at each turn, all but one at the first
        if (ahead.live(s)) {
          tiles.wait_empty(free);
          fetch_rows<C>(x, s, K::source_of(ahead.tile, ahead.chunk), tiles.stage(free), thread);
          ahead.next(s);
          free.next();
        }
        copy_commit();
      }
      copy_wait<C::stages_p - 2>();
    }
    round_units<C>(tiles.stage(tile), thread);
    hand_over(tiles.full(tile), lane);
  }
}
