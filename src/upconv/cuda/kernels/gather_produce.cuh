// Producers: from slots, or from memory, to the tiles that consumers read. One way for each layout and whoever brings pixels.
#include "gather_boxes.cuh"
#include "gather_rows.cuh"
#include "gather_turn.cuh"

// The tile is written: make it visible to the matrix units and say so, once a warp.
__device__ __forceinline__ void hand_over(u32 full, int lane) {
  fence_async_shared();
  __syncwarp();
  if (lane == 0) barrier_arrive(full);
}

template <class C>
__device__ __forceinline__ void turn_chunk(const OwnPixels<C>& own, int w, int chunk, u32 slot, u32 tile, int thread) {
  int channel = chunk * C::ck;
  u32 exist = Slot<C>::existing(own.ok, w);
  if (Slot<C>::aligned(own.plane)) turn<C, true>(own, exist, channel, C::cin_g - channel, slot, tile, thread);
  else turn<C, false>(own, exist, channel, C::cin_g - channel, slot, tile, thread);
}

// `Producer<K>::produce` fills `tiles`, from `slots` that are filled by the copy engine or by it.
template <class K, bool CHANNELS_LAST = K::C::channels_last, bool BOX = K::BOX>
struct Producer;

// NCHW, threads: they copy a chunk ahead of the one that they turn.
template <class K>
struct Producer<K, false, false> {
  using C = typename K::C;
  template <class Tiles, class Slots>
  static __device__ __forceinline__ void produce(const char* __restrict__ x, const typename K::Sizes& s, const Tiles& tiles, const Slots& slots, int thread) {
    int lane = thread & 31;
    OwnPixels<C> own;
    Walk<K> now(s), ahead(s);
    typename Tiles::Cursor tile = {0, 1};
    typename Slots::Cursor slot = {0, 0}, next_slot = {0, 0};
    ahead.begin(s);
#pragma unroll 1
    for (int i = 0; i < C::stages_s - 1; i++, next_slot.next()) {
      if (ahead.live(s)) {
        stage_rows<C>(x, s, K::source_of(ahead.tile, ahead.chunk), slots.stage(next_slot), thread);
        ahead.next(s);
      }
      copy_commit();
    }
#pragma unroll 1
    for (now.begin(s); now.live(s); now.next(s), tile.next(), slot.next(), next_slot.next()) {
      if (now.chunk == K::first_chunk()) own.locate(x, s, K::source_of(now.tile, 0), thread);
      copy_wait<C::stages_s - 2>();
      named_sync<1, K::PRODUCER_THREADS>();             // everyone's copies have landed, and everyone has left the next slot
      if (ahead.live(s)) {
        stage_rows<C>(x, s, K::source_of(ahead.tile, ahead.chunk), slots.stage(next_slot), thread);
        ahead.next(s);
      }
      copy_commit();
      tiles.wait_empty(tile);
      turn_chunk<C>(own, now.tile.w, now.chunk, slots.stage(slot), tiles.stage(tile), thread);
      hand_over(tiles.full(tile), lane);
    }
  }
};

// NCHW, boxes: slots land, threads turn them.
template <class K>
struct Producer<K, false, true> {
  using C = typename K::C;
  template <class Tiles, class Slots>
  static __device__ __forceinline__ void produce(const char* __restrict__ x, const typename K::Sizes& s, const Tiles& tiles, const Slots& slots, int thread) {
    int lane = thread & 31;
    Walk<K> now(s);
    typename Tiles::Cursor tile = {0, 1};
    OwnPixels<C> own;
    if (!Slot<C>::EVERY_TILE) own.locate(x, s, typename K::Source(), thread);
    typename Slots::Cursor slot = {0, 0};
#pragma unroll 1
    for (now.begin(s); now.live(s); now.next(s), tile.next(), slot.next()) {
      if (Slot<C>::EVERY_TILE && now.chunk == K::first_chunk()) own.locate(x, s, K::source_of(now.tile, 0), thread);
      slots.wait_full(slot);
      tiles.wait_empty(tile);
      turn_chunk<C>(own, now.tile.w, now.chunk, slots.stage(slot), tiles.stage(tile), thread);
      hand_over(tiles.full(tile), lane);
      leave(slots.empty(slot), lane);
    }
  }
};

// Channels-last, threads: they copy chunks ahead of the one that they round.
template <class K>
struct Producer<K, true, false> {
  using C = typename K::C;
  template <class Tiles, class Slots>
  static __device__ __forceinline__ void produce(const char* __restrict__ x, const typename K::Sizes& s, const Tiles& tiles, const Slots& slots, int thread) {
    int lane = thread & 31;
    Walk<K> now(s), ahead(s);
    typename Tiles::Cursor tile = {0, 1}, free = {0, 1};
    int pending = 0;
    ahead.begin(s);
#pragma unroll 1
    for (now.begin(s); now.live(s); now.next(s), tile.next(), pending--) {
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
      round_units<C>(tiles.stage(tile), thread);
      hand_over(tiles.full(tile), lane);
    }
  }
};

// Channels-last, boxes, IEEE: tiles land, threads part their values.
template <class K>
struct Producer<K, true, true> {
  using C = typename K::C;
  template <class Tiles, class Slots>
  static __device__ __forceinline__ void produce(const char* __restrict__ x, const typename K::Sizes& s, const Tiles& tiles, const Slots& slots, int thread) {
    int lane = thread & 31;
    Walk<K> now(s);
    typename Tiles::Cursor tile = {0, 0};
#pragma unroll 1
    for (now.begin(s); now.live(s); now.next(s), tile.next()) {
      barrier_wait(slots.full(tile), tile.parity);
      round_units<C>(tiles.stage(tile), thread);
      hand_over(tiles.full(tile), lane);
    }
  }
};
