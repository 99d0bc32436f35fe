// Rows of the result without taps are the bias alone, and are stored from registers with a tile's own outputs. What of them lies together
// in memory, whole planes along H and W or rows, the tiles that cover it divide without regard for what each covers, so that shares
// are long and begin where sectors do. Tiles of their own would multiply nothing, and pass
// through the buffer all the same.
#include "gather_epilogue.cuh"

template <class C> __constant__ const auto BARE_D = table_of<short>(C::bares_d);  // offsets of (D, H) sub-positions without taps, of rows the first
template <class C> __constant__ const auto BARE_H = table_of<short>(C::bares_h);
template <class C> __constant__ const auto BARE_ROW = table_of<short>(C::bares_rows);  // rows along H, neighbours; 0: all

struct Run { int n, od, oh; long long before; int own; bool last; };  // of an image's rows a share: outputs before it and its own; whether none follows

// A warp's channels of the bare sub-positions. Of consumers that halve the pixels each takes every second channel (channels-last: round of
// pixels), `part` says which.
template <class C, bool CHANNELS_LAST = C::channels_last>
struct FillOf;

template <class C>
struct FillOf<C, false> {
using G = GatherWork<C>;
static constexpr int SHARES = C::split == 0 ? 2 : 1;
static constexpr int SHARE_BYTES = C::tile_w * C::out_step_w / C::variants * G::ELEMENT;  // of a row
static constexpr int RUN_STORES = SHARE_BYTES / 512 < 3 ? SHARE_BYTES / 512 + 1 : 4;

int first, couts, part, lane;                           // channels
u32 word;                                               // the lane's channel's bias
long long channel_bytes;

__device__ __forceinline__ FillOf(const typename G::Number::Type* __restrict__ bias, const typename G::Sizes& s, const typename G::Tile& t, const Slab& slab, int part, int, int lane)
    : first(t.group * C::cout_g + slab.cout), couts(slab.couts), part(part), lane(lane) {
  word = bias && lane < couts ? G::Number::bits(G::Number::value(bias[first + lane])) : 0;
  if (G::ELEMENT == 2) word |= word << 16;
  channel_bytes = (long long)s.out_d * s.out_h * s.out_w * G::ELEMENT;
}
__device__ __forceinline__ bool none() const { return false; }

// A share of a run of one channel: from where the sector of its first byte begins (but not before `lowest`) to `end`, or, if it is not
// the run's `last`, to where the sector of `end` begins. A call stores RUN_STORES times 512 bytes, `from` there on, without a branch, so
// that several channels' are under way, each along its row: all channels in turn would be slower.
static __device__ __forceinline__ void fill_some(char* share, int lowest, int end, bool last, int from, u32 word, int lane, bool exists) {
  constexpr int VEC = G::VEC;
  const u32 v[4] = {word, word, word, word};
  int phase = (int)((u64)share & 31), a = -phase > lowest ? -phase : lowest, z = last ? end : ((end + phase) & ~31) - phase;
  int at = ((a + phase) & ~15) - phase + from + lane * 16;
#pragma unroll
  for (int i = 0; i < RUN_STORES; i++) store_global_128_if(share + at + i * 512, v, exists && at + i * 512 >= a && at + i * 512 + 16 <= z);
  // What is left of 16 bytes at either end, in elements: the first lanes have the head, and all where both ends are in one unit.
  bool tail = lane & VEC, ragged = (a + phase) & 15;
  at = (((tail ? z : a) + phase) & ~15) - phase + lane % VEC * G::ELEMENT;
  bool ok = exists && from == 0 && lane < 2 * VEC && (tail ? !ragged || (a + phase) / 16 < (z + phase) / 16 : ragged) && at >= a && at < z;
  if constexpr (G::ELEMENT == 4) store_global_if(share + at, word, ok);
  else store_global_16_if(share + at, word, ok);
}

__device__ __forceinline__ void store(char* y, const typename G::Sizes& s, const Run& run) const {
  int own = run.own * G::ELEMENT;
  long long before = run.before * G::ELEMENT;
  int lowest = before < 31 ? -(int)before : -31;
  char* to = y + (((((long long)run.n * C::cout + first) * s.out_d + run.od) * s.out_h + run.oh) * s.out_w) * G::ELEMENT + before;
  const bool once = own + 46 <= RUN_STORES * 512;            // with up to 31 bytes of the sector, and 15 of the unit, that it begins in
  if (once) {
#pragma unroll 4
    for (int c = part; c < 16; c += SHARES)
      fill_some(to + c * channel_bytes, lowest, own, run.last, 0, __shfl_sync(0xffffffffu, word, c), lane, c < couts);
  } else {
#pragma unroll 1
    for (int c = part; c < 16; c += SHARES)
#pragma unroll 1
      for (int from = 0; from < own + 46; from += RUN_STORES * 512)
        fill_some(to + c * channel_bytes, lowest, own, run.last, from, __shfl_sync(0xffffffffu, word, c), lane, c < couts);
  }
}
};

template <class C>
struct FillOf<C, true> {
using G = GatherWork<C>;
static constexpr int SHARES = C::split == 0 ? 2 : 1;
static constexpr int EACH = SHARES * Team<C>::PIXELS_AT_ONCE;
static constexpr int PIXEL_BYTES = C::cout * G::ELEMENT;

int channel, couts, first_pixel;                        // the thread's first channel of the result, how many exist; its first pixel
u32 v[4];                                               // its unit of a pixel

__device__ __forceinline__ FillOf(const typename G::Number::Type* __restrict__ bias, const typename G::Sizes&, const typename G::Tile& t, const Slab& slab, int part, int warp, int lane) : v() {
  int in_team = warp % Team<C>::WARPS, thread = in_team * 32 + lane, of_group = slab.cout - in_team * 16 + thread % Team<C>::PIXEL_UNITS * G::VEC;
  channel = t.group * C::cout_g + of_group, couts = C::cout_g - of_group;
  if (none()) return;
#pragma unroll
  for (int e = 0; e < G::VEC; e++) {
    u32 one = bias && e < couts ? G::Number::bits(G::Number::value(bias[channel + e])) : 0;
    v[e * G::ELEMENT / 4] |= one << e * G::ELEMENT % 4 * 8;
  }
  first_pixel = part * Team<C>::PIXELS_AT_ONCE + thread / Team<C>::PIXEL_UNITS;
}
__device__ __forceinline__ bool none() const { return couts <= 0; }

__device__ __forceinline__ void store(char* y, const typename G::Sizes& s, const Run& run) const {
  char* to = y + channel * G::ELEMENT + (((long long)run.n * s.out_d + run.od) * s.out_h + run.oh) * s.out_w * PIXEL_BYTES;
  to += run.before * PIXEL_BYTES;
#pragma unroll 4
  for (int p = first_pixel; p < run.own; p += EACH) Team<C>::store_unit(to + (long long)p * PIXEL_BYTES, v, couts, true);
}
};

// All variants share what a tile's positions cover, so that blocks which keep to one of them store as much as others. Of the
// sub-positions each C::subs-th is a warp's own.
template <class C>
__device__ __forceinline__ void fill(const typename GatherWork<C>::Number::Type* __restrict__ bias, char* __restrict__ y, const typename GatherWork<C>::Sizes& s, const typename GatherWork<C>::Tile& t, const Slab& slab, int part, int warp, int lane) {
  const FillOf<C> channels(bias, s, t, slab, part, warp, lane);
  if (channels.none()) return;
#pragma unroll 1
  for (int b = warp * 16 / C::rows_per_sub; b < C::bares; b += C::subs) {
    const bool plane = BARE_ROW<C>[b] == 0;             // else so many rows
    int share = t.w / C::tile_w, shares = s.tiles_w, most = plane ? s.out_h : BARE_ROW<C>[b];
    if (plane) share += t.h / C::tile_h * shares, shares *= s.tiles_h;
    share = share * C::variants + t.variant, shares *= C::variants;
    const bool last = share + 1 == shares;
    u32 whole = (u64)most * s.out_w / shares;           // outputs of a share, where all rows exist
#pragma unroll 1
    for (int i = 0; i < C::tile_n * C::tile_d * C::tile_h; i += plane ? C::tile_h : 1) {
      int n = t.n + i / (C::tile_d * C::tile_h), od = C::out_step_d * (t.d + i / C::tile_h % C::tile_d) + BARE_D<C>[b];
      int oh = plane ? 0 : C::out_step_h * (t.h + i % C::tile_h) + BARE_H<C>[b], rows = s.out_h - oh < most ? s.out_h - oh : most;
      if (n >= s.batch || od >= s.out_d || rows <= 0) continue;
      u32 each = rows == most ? whole : (u64)rows * s.out_w / shares;
      channels.store(y, s, {n, od, oh, (long long)share * each, last ? (int)((u32)rows * s.out_w - share * each) : (int)each, last});
    }
  }
}
