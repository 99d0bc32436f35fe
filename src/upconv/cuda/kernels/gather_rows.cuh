// Channels-last: threads copy pixel rows straight into a tile, or round what came there.
#include "gather_tile.cuh"

// Copies pixel rows; what lies outside of the image or past the last channel is zero.
template <class C>
__device__ __forceinline__ void fetch_rows(const char* __restrict__ x, const typename PixelTile<C>::Sizes& s, const typename PixelTile<C>::Source& at, u32 tile, int thread) {
  using T = PixelTile<C>;
  for (int i = thread; i < T::PIXELS * T::UNITS_PER_ROW; i += T::PRODUCER_THREADS) {
    int unit = i % T::UNITS_PER_ROW, p = i / T::UNITS_PER_ROW, segment = p / T::PITCH, within = p % T::PITCH;
    int column = T::column_of(within), w = at.w + column;
    const typename T::Row row = T::row_of(at, segment);
    bool ok = row.exists(s) && column < C::columns && (u32)w < (u32)s.in_w;
    int have = at.left - unit * T::VEC;                 // channels from this unit on
    const char* from = x + (((((long long)row.n * s.in_d + row.d) * s.in_h + row.h) * s.in_w + w) * C::cin + at.channel + unit * T::VEC) * T::ELEMENT;
    u32 to = tile + T::unit_at(p, unit);
    if constexpr (C::aligned_channels) {
      int bytes = ok && have > 0 ? (have < T::VEC ? have * T::ELEMENT : 16) : 0;
      copy16(to, bytes ? from : x, bytes);
    } else {                                            // a channel count that is no multiple of 16 bytes: element by element, which waits for memory
      u32 v[T::VEC];
#pragma unroll
      for (int e = 0; e < T::VEC; e++) v[e] = ok && e < have ? (u32)((const typename T::Number::Bits*)from)[e] : 0;
      if constexpr (T::ELEMENT == 4) store_shared_128(to, v[0], v[1], v[2], v[3]);
      else store_halves(to, v);
    }
  }
}

// Rounds the units of float32 that this thread has fetched itself, or (BOX) that its turn falls on.
template <class C>
__device__ __forceinline__ void round_units(u32 tile, int thread) {
  using T = PixelTile<C>;
  if constexpr (T::ELEMENT == 4) {
#pragma unroll 4
    for (int i = thread; i < T::PIXELS * T::UNITS_PER_ROW; i += T::PRODUCER_THREADS) {
      u32 a = tile + (T::BOX ? i * 16 : T::unit_at(i / T::UNITS_PER_ROW, i % T::UNITS_PER_ROW)), v[4];
      load_shared_128(v, a);
      store_parts<C>(a, v);
    }
  }
}
