// NCHW: from memory to staging slots where threads copy, and from slots to a tile: pixels' channels become rows, rounded to TF32.
#include "gather_slots.cuh"

// Copies C::ck channels of every segment into a slot, in the 16-byte units of memory that hold them, so that any alignment is
// served; units without a pixel of the row are left out. A segment then begins (address % 16) bytes into its place.
template <class C>
__device__ __forceinline__ void stage_rows(const char* __restrict__ x, const typename PixelTile<C>::Sizes& s, const typename PixelTile<C>::Source& at, u32 slot, int thread) {
  using T = PixelTile<C>;
  constexpr int UNITS = C::slot_units;
  long long slice = (long long)s.in_h * s.in_w * T::ELEMENT, plane = slice * s.in_d;
  const char* corner = x + ((long long)at.n * C::cin + at.channel) * plane + (long long)at.w * T::ELEMENT;
  // A thread keeps its channel and place in the row for all rows, since finding them anew for each unit is
  // what would take the time. Where rows are short, threads share them out.
  constexpr int PLACES = C::ck * UNITS, SHARES = PLACES < T::PRODUCER_THREADS ? T::PRODUCER_THREADS / PLACES : 1;
  constexpr int SLICES = C::tile_n * C::rows_d, BY_SLICE = SLICES >= SHARES ? SHARES : 1, BY_ROW = BY_SLICE > 1 ? 1 : SHARES;
  constexpr int ROWS_AT_ONCE = C::rows_h % 5 == 0 ? 5 : C::rows_h % 4 == 0 ? 4 : C::rows_h % 3 == 0 ? 3 : 2;
  int share = SHARES > 1 ? thread / PLACES : 0, place_of = SHARES > 1 ? thread % PLACES : thread;
  if (share >= SHARES) return;
#pragma unroll 1
  for (int unit = place_of % UNITS, c = place_of / UNITS; c < C::ck;) {
    if (C::cin_g % C::ck == 0 || c < at.left) {
      const char* place = corner + c * plane + unit * 16;
      int column = at.w + unit * T::VEC;                // of the unit's first element, were the row aligned
      u32 to = slot + c * C::slot_channel + unit * 16;
#pragma unroll 1
      for (int r = BY_SLICE > 1 ? share : 0; r < SLICES; r += BY_SLICE) {
        int image = r / C::rows_d, d = at.d + ROW_D<C>[r % C::rows_d];
        bool exists = at.n + image < s.batch && (u32)d < (u32)s.in_d;
        const char* line = place + image * (C::cin * plane) + d * slice;
#pragma unroll ROWS_AT_ONCE
        for (int j = BY_ROW > 1 ? share : 0; j < C::rows_h; j += BY_ROW) {
          int h = at.h + ROW_H<C>[j];
          u64 p = multiply_add_wide(h, s.in_w * T::ELEMENT, (u64)line);
          int first = column - (int)(p & 15) / T::ELEMENT;
          if (exists && (u32)h < (u32)s.in_h && first + T::VEC > 0 && first < s.in_w)
            copy16(to + image * (C::ck - 1) * C::slot_channel + (r * C::rows_h + j) * (UNITS * 16), (const char*)(p & ~15ull));
        }
      }
    }
    if (SHARES > 1) break;
    unit += T::PRODUCER_THREADS % UNITS;
    c += T::PRODUCER_THREADS / UNITS;
    if (unit >= UNITS) {
      unit -= UNITS;
      c++;
    }
  }
}

// A thread's pixels of a tile: where they lie in a slot and whether they are in the image. Found once a tile, not a chunk.
template <class C>
struct OwnPixels {
using T = PixelTile<C>;
static constexpr int COUNT = (T::PIXELS + T::PRODUCER_THREADS - 1) / T::PRODUCER_THREADS;

u32 from[COUNT], ok;                                    // of the places in a slot the low 24 bits; above: the phase
u32 plane;                                              // channel c of a row begins at (phase + c * plane) % VEC of a unit

// The pixel row of pixel i: rows in their order, or, where the columns of neighbouring rows lie a multiple of four
// apart, so that lanes would meet few banks, columns in theirs.
static __device__ __forceinline__ int pixel_row(int i) {
  // Neighbouring lanes take neighbouring images, whose rows meet all banks of a tile, and every second place, which meet all of a slot.
  if constexpr (C::fetch == IMAGES_BESIDE) return (i / C::beside + i % C::beside * 2) % (T::PIXELS / C::beside) * C::beside + i % C::beside;
  else if constexpr (C::in_step_w % 4 == 0) return i / T::PITCH * T::PITCH + i % T::PITCH % C::planes * C::plane + i % T::PITCH / C::planes;
  else return i;
}

__device__ __forceinline__ void locate(const char* x, const typename T::Sizes& s, const typename T::Source& at, int thread) {
  plane = Slot<C>::plane_of(s);
  ok = 0;
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    int p = pixel_row(thread + k * T::PRODUCER_THREADS), segment = p / T::PITCH, within = p % T::PITCH;
    int column = T::column_of(within), image = segment / (C::rows_d * C::rows_h);
    if (thread + k * T::PRODUCER_THREADS >= T::PIXELS) break;
    const SlotPlace place = Slot<C>::place(x, s, at, segment, image, column, plane);
    from[k] = place.from;
    ok |= (u32)place.exists << k;
  }
}

// A slot's pixels to a tile's rows of C::ck channels, rounded: a lane takes a pixel, so that loads and stores meet all banks. `w`: as
// `Slot::existing` has it. ALIGNED: every channel of a row has the same misalignment.
template <bool ALIGNED>
__device__ __forceinline__ void turn(int w, int chunk, u32 slot, u32 tile, int thread) const {
  const u32 exist = Slot<C>::existing(ok, w);
  const int channel = chunk * C::ck;
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    int p = pixel_row(thread + k * T::PRODUCER_THREADS);
    if (T::PIXELS % T::PRODUCER_THREADS && thread + k * T::PRODUCER_THREADS >= T::PIXELS) break;
    u32 phase = from[k] >> 24, first = slot + (from[k] & 0xffffff) + (ALIGNED ? phase * T::ELEMENT : 0);
#pragma unroll 2  // more of them spill
    for (int unit = 0; unit < T::UNITS_PER_ROW; unit++) {
      u32 v[T::VEC];
#pragma unroll
      for (int e = 0; e < T::VEC; e++) {
        int c = unit * T::VEC + e;
        bool have = exist >> k & 1 && (C::cin_g % C::ck == 0 || channel + c < C::cin_g);
        u32 a = first + Slot<C>::channel_at(c);
        if (!ALIGNED) a += ((phase + Slot<C>::channels_ahead(channel, c) * plane) & (T::VEC - 1)) * T::ELEMENT;
        if constexpr (T::ELEMENT == 4) v[e] = have ? load_shared_u32(a) : 0;
        else v[e] = have ? load_shared_u16(a) : 0;
      }
      if constexpr (T::ELEMENT == 4) store_parts<C>(tile + T::unit_at(p, unit), v);
      else store_halves(tile + T::unit_at(p, unit), v);
    }
  }
}
};
