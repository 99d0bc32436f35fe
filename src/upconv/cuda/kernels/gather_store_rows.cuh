// Stores NCHW rows, by runs of eight channels.
#include "gather_fill.cuh"

// Bytes of a row of a warp's buffer; the rest beyond whole 128 bytes lets rows meet different banks, and a row begin up to 31 bytes late.
template <class C>
constexpr int RUN_PITCH = (C::run_groups * 8 * C::w_subs * PixelTile<C>::ELEMENT + 127) / 128 * 128 + (PixelTile<C>::ELEMENT == 4 ? 32 : 48);

template <int UNIT>
__device__ __forceinline__ void copy_unit(char* to, u32 from, bool ok) {
  u32 v[4];
  if constexpr (UNIT == 16) load_shared_128(v, from);
  else if constexpr (UNIT == 8) load_shared_64(v, from);
  else v[0] = UNIT == 4 ? load_shared_u32(from) : load_shared_u16(from);
  if constexpr (UNIT == 16) store_global_128_if(to, v, ok);
  else if constexpr (UNIT == 8) store_global_64_if(to, v, ok);
  else if constexpr (UNIT == 4) store_global_if(to, v[0], ok);
  else store_global_16_if(to, v[0], ok);
}

// How eight rows of OUTPUTS leave a warp's buffer. `to` is the first row's first output, rows lie `plane` bytes apart; `rows` of them exist.
template <class C>
struct RowStores {
using T = PixelTile<C>;
static constexpr int ELEMENT = T::ELEMENT;
static constexpr int OUTPUTS = C::run_groups * 8 * C::w_subs;  // of a row of a run
static constexpr int PITCH = RUN_PITCH<C>;
static constexpr bool WHOLE_SLABS = C::cout_g % 16 == 0;  // all rows exist

// With the other tiles' sub-positions between; `left` outputs are left in a row.
static __device__ __forceinline__ void store_spread(char* to, long long plane, int rows, int left, u32 buffer, int lane) {
#pragma unroll
  for (int i = 0; i < (OUTPUTS + 31) / 32; i++) {
    int e = lane + 32 * i, o = e / C::w_subs * C::out_step_w + e % C::w_subs;
    bool in = (OUTPUTS % 32 == 0 || e < OUTPUTS) && o < left;
#pragma unroll
    for (int r = 0; r < 8; r++) {
      u32 from = buffer + r * PITCH + (OUTPUTS % 32 == 0 || e < OUTPUTS ? e : 0) * ELEMENT;
      char* p = to + r * plane + (long long)o * ELEMENT;
      bool ok = in && (WHOLE_SLABS || r < rows);
      if constexpr (ELEMENT == 4) store_global_if(p, load_shared_u32(from), ok);
      else store_global_16_if(p, load_shared_u16(from), ok);
    }
  }
}

// Of images side by side, which the buffer has one behind the other, a lane some outputs.
static __device__ __forceinline__ void store_beside(char* to, long long plane, int rows, int images, u32 buffer, int lane) {
  constexpr int PERIOD = C::beside_columns * C::w_subs;
  constexpr int EACH = C::beside_w % 2 == 0 && PERIOD % 2 == 0 ? C::beside_w % 4 == 0 && PERIOD % 4 == 0 ? 4 : 2 : 1;
  constexpr int PER_IMAGE = C::beside_w / EACH, PER_ROW = C::beside * PER_IMAGE;
  long long image_bytes = plane * C::cout;
#pragma unroll
  for (int i = 0; i < (8 * PER_ROW + 31) / 32; i++) {
    int index = lane + 32 * i, r = index / PER_ROW, image = index % PER_ROW / PER_IMAGE, at = index % PER_IMAGE * EACH;
    bool in = 8 * PER_ROW % 32 == 0 || r < 8;
    u32 from = buffer + r * PITCH + (image * PERIOD + at) * ELEMENT;
    copy_unit<EACH * ELEMENT>(to + r * plane + image * image_bytes + at * ELEMENT, in ? from : buffer, in && r < rows && image < images);
  }
}

// In units: an instruction stores 32 of them, of several rows if they are short; `end` bytes of each.
template <int UNIT>
static __device__ __forceinline__ void store_units(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int PER_ROW = OUTPUTS * ELEMENT / UNIT;
#pragma unroll
  for (int i = 0; i < (8 * PER_ROW + 31) / 32; i++) {
    int index = lane + 32 * i, first = 32 * i / PER_ROW, more = index / PER_ROW - first;  // rows: the first lane's, and how many on
    // Compared, not divided, where rows are long.
    if (PER_ROW >= 32) more = 32 * i % PER_ROW + 31 >= PER_ROW && index >= (first + 1) * PER_ROW;
    int r = first + more, at = (index - r * PER_ROW) * UNIT;
    char* row = to + first * plane + (PER_ROW >= 32 ? more ? plane : 0 : more * plane);
    bool in = PER_ROW % 4 == 0 || r < 8;
    copy_unit<UNIT>(row + at, in ? buffer + r * PITCH + at : buffer, in && at < end && (WHOLE_SLABS || r < rows));
  }
}

// Of float32, beginning anywhere, a lane an output: each instruction begins at a sector's first output, since a sector of 32
// bytes whose parts are stored at different times costs as much as several whole ones. 16 bytes a lane and the ends
// of rows by themselves, as below, is slower for float32.
static __device__ __forceinline__ void store_sectors(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int ROWS = C::store_unit == ELEMENT ? 8 : 4;  // at a time: of kernels that have other ways beside, eight spill
  static_assert(8 % ROWS == 0, "all rows in turn");
#pragma unroll
  for (int from_row = 0; from_row < 8; from_row += ROWS) {
    char* row[ROWS];
    u32 from[ROWS];
    int at[ROWS];                                       // the lane's first output of each row; some are before or behind it
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
      int r = from_row + k;
      char* first = to + r * plane;
      at[k] = lane * 4 - ((int)(u64)first & 31);
      row[k] = first + at[k], from[k] = buffer + r * PITCH + at[k];
      if (!WHOLE_SLABS && r >= rows) at[k] = 1 << 20;
    }
    // What follows of a row is at known distances. A place for each output takes a third more instructions.
#pragma unroll
    for (int i = 0; i < (OUTPUTS + 38) / 32; i++) {
      u32 v[ROWS];
      bool in[ROWS];
#pragma unroll
      for (int k = 0; k < ROWS; k++) {
        in[k] = i ? at[k] < end - i * 128 : (u32)at[k] < (u32)end;
        v[k] = load_shared_u32_if(from[k] + i * 128, in[k]);
      }
#pragma unroll
      for (int k = 0; k < ROWS; k++) store_global_if(row[k] + i * 128, v[k], in[k]);
    }
  }
}

// Of 16 bits, beginning between words. The buffer has a row where memory has it in its first sector of 32 bytes, so that 16 bytes
// of the one are 16 of the other; two lanes have a sector. What a row's first and last 16 bytes have of it follows in
// units. Words made of their neighbours take longer.
template <int UNIT>
static __device__ __forceinline__ void store_shifted(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int PER_ROW = (OUTPUTS * ELEMENT + 32 - UNIT + 31) / 32 * 2, ENDS = 16 / UNIT;
#pragma unroll
  for (int i = 0; i < (8 * PER_ROW + 31) / 32; i++) {
    int index = lane + 32 * i, r = index / PER_ROW, unit = index % PER_ROW;
    char* row = to + r * plane;
    int at = unit * 16 - (int)((u64)row & 31);          // in the row
    bool in = PER_ROW % 4 == 0 || r < 8;
    copy_unit<16>(row + at, in ? buffer + r * PITCH + unit * 16 : buffer, in && at >= 0 && at + 16 <= end && r < rows);
  }
#pragma unroll
  for (int i = 0; i < 8 * 2 * ENDS / 32; i++) {         // ENDS lanes for either end of a row
    int r = (lane + 32 * i) / (2 * ENDS), at = lane % ENDS * UNIT;
    char* row = to + r * plane;
    int phase = (int)((u64)row & 15), head = -phase & 15;
    bool tail = lane & ENDS;
    if (tail) at += ((phase + end) & ~15) - phase;
    bool ok = (tail ? at >= head : at < head) && at < end && r < rows;
    copy_unit<UNIT>(row + at, buffer + r * PITCH + ((u32)(u64)row & 31) + (ok ? at : 0), ok);
  }
}
};

template <class C>
struct Epilogue<C, STORE_ROWS> : Runs<C> {
using G = GatherWork<C>;
using R = Runs<C>;
using Number = typename G::Number;
using Result = char*;
using Rows = RowStores<C>;
static constexpr int ELEMENT = G::ELEMENT;
static constexpr int BUFFER_BYTES = 8 * Rows::PITCH;
static constexpr bool CONTIGUOUS = C::w_subs == C::out_step_w;  // a tile's outputs of a row are neighbours in memory

// UNIT, below: bytes at multiples of which all rows of a run begin and end: 16, two outputs or one.
static __device__ __forceinline__ constexpr bool shifted(int unit) { return ELEMENT == 2 && unit == 2; }  // rows lie in the buffer as they do in their first sector

// One thread's 2 w_subs neighbouring outputs to the buffer.
template <int UNIT>
static __device__ __forceinline__ void put(float (&v)[2 * C::w_subs], u32 at) {
#pragma unroll
  for (int i = 0; i < 2 * C::w_subs; i += 2) {
    u32 to = at + i * ELEMENT;
    if constexpr (ELEMENT == 4) {
      store_shared_f32x2(to, v[i], v[i + 1]);
    } else if constexpr (!shifted(UNIT)) {
      store_shared_u32(to, Number::pair(v[i], v[i + 1]));
    } else {
      store_shared_u16(to, Number::bits(v[i]));
      store_shared_u16(to + 2, Number::bits(v[i + 1]));
    }
  }
}

// Rows h * 8 ... of run i of subtiles first_of(r) ...: a thread's outputs of its row to the buffer.
template <int UNIT>
static __device__ __forceinline__ void put_rows(float (&acc)[G::MB][G::NB][32], float bias, int r, int i, int h, u32 row, int lane) {
  int q = lane & 3;
#pragma unroll
  for (int k = 0; k < R::GROUPS; k++) {
    const int nb = R::nb_of(r, i, k), j = R::j_of(r, i, k);
    float v[2 * C::w_subs];
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int u = 0; u < C::w_subs; u++) v[c * C::w_subs + u] = R::sum_of(acc, u, nb, 4 * j + 2 * h + c, bias);
    if constexpr (C::fetch == IMAGES_BESIDE) put_beside(v, row, k * 8 + 2 * q);
    else put<UNIT>(v, row + (k * 8 + 2 * q) * C::w_subs * ELEMENT);
  }
}

// One thread's outputs of two neighbouring columns, which are two images', to where the buffer has these.
static __device__ __forceinline__ void put_beside(float (&v)[2 * C::w_subs], u32 row, int column) {
#pragma unroll
  for (int c = 0; c < 2; c++) {
    u32 to = row + ((column % C::beside + c) * C::beside_columns + column / C::beside) * C::w_subs * ELEMENT;
    if (C::beside * C::beside_columns < R::RUN && column >= C::beside * C::beside_columns) continue;
#pragma unroll
    for (int u = 0; u < C::w_subs; u++) {
      if constexpr (ELEMENT == 4) store_shared_f32(to + u * 4, v[c * C::w_subs + u]);
      else if (C::w_subs % 2) store_shared_u16(to + u * 2, Number::bits(v[c * C::w_subs + u]));
      else if (u % 2 == 0) store_shared_u32(to + u * 2, Number::pair(v[c * C::w_subs + u], v[c * C::w_subs + (u | 1)]));
    }
  }
}

// Eight rows (output channels) of a run by way of the buffer to memory: `end` bytes of each.
template <int UNIT>
static __device__ __forceinline__ void pass_rows(float (&acc)[G::MB][G::NB][32], float bias, int r, int i, int h, u32 row, char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  put_rows<UNIT>(acc, bias, r, i, h, row, lane);
  __syncwarp();
  Rows::template store_units<UNIT>(to, plane, rows, end, buffer, lane);
}
// The same of rows that begin and end anywhere.
static __device__ __forceinline__ void pass_odd_rows(float (&acc)[G::MB][G::NB][32], float bias, int r, int i, int h, u32 row, char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  put_rows<ELEMENT>(acc, bias, r, i, h, row, lane);
  __syncwarp();
  if constexpr (ELEMENT == 4) Rows::store_sectors(to, plane, rows, end, buffer, lane);
  else Rows::template store_shifted<ELEMENT>(to, plane, rows, end, buffer, lane);
}

// Unrolled, since registers have no run-time index. Stores once in a loop, with only the reading of registers in
// branches, take longer and compile no faster.
static __device__ __forceinline__ void store(float (&acc)[G::MB][G::NB][32], const typename Number::Type* __restrict__ bias, char* __restrict__ y, const typename G::Sizes& s, const typename G::Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  OPAQUE(lane);                                         // what follows from it is found here, not kept from tile to tile (spills)
  int g = lane >> 2;
  Slab slab = slab_of<C>(t, cout_block, warp);
  if constexpr (C::bare) fill<C>(bias, y, s, t, slab, first_subtile / G::NB, warp, lane);
  if (slab.couts <= 0) return;
  int channel = t.group * C::cout_g + slab.cout;
  float b[2];
  load_bias<C>(b, bias, slab, channel, g);
  if (bias) add_bias<C>(acc, b);
  long long plane = (long long)s.out_d * s.out_h * s.out_w * ELEMENT;
#pragma unroll
  for (int r = 0; r < R::COUNT; r++) {
    typename R::Place place = R::place_of(first_subtile + R::first_of(r));
    int n = t.n + place.n, od = C::out_step_d * (t.d + place.d) + slab.od;
    bool image = n < s.batch && od < s.out_d;
#pragma unroll
    for (int i = 0; i < R::OF_SUBTILE; i++) {
      int oh = C::out_step_h * (t.h + place.h + (R::TALL ? i : 0)) + slab.oh;
      int ow = C::out_step_w * (t.w + place.w + (R::TALL ? 0 : i * R::RUN)) + U_W<C>[t.variant], left = s.out_w - ow;
      if (!image || oh >= s.out_h || left <= 0) continue;
      if (R::others(r, i)) continue;
      char* to = y + (((long long)n * C::cout + channel) * s.out_d + od) * s.out_h * s.out_w * ELEMENT + ((long long)oh * s.out_w + ow) * ELEMENT;
      int end = (left < Rows::OUTPUTS ? left : Rows::OUTPUTS) * ELEMENT;
      u32 misaligned = (u32)(u64)to | (u32)plane | end;  // multiples of what all rows begin and end at
#pragma unroll
      for (int h = 0; h < 2; h++) {
        char* first = to + h * 8 * plane;
        int rows = C::cout_g % 16 && slab.couts < 8 * h + 8 ? slab.couts - 8 * h : 8;
        u32 row = buffer + g * Rows::PITCH;
        if constexpr (C::fetch == IMAGES_BESIDE) {
          put_rows<16>(acc, b[h], r, i, h, row, lane);
          __syncwarp();
          Rows::store_beside(first, plane, rows, s.batch - n, buffer, lane);
        } else if constexpr (CONTIGUOUS) {
          if (C::any_rows && misaligned & (C::store_unit - 1)) {
            pass_rows<ELEMENT>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
          } else if (C::store_unit == 16 || (C::store_unit != ELEMENT && is_at<16>(misaligned))) {
            pass_rows<16>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
          } else if (C::store_unit == 2 * ELEMENT || (C::store_unit != ELEMENT && is_at<2 * ELEMENT>(misaligned))) {
            pass_rows<2 * ELEMENT>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
          } else {
            pass_odd_rows(acc, b[h], r, i, h, row + (shifted(ELEMENT) ? (u32)(u64)(first + g * plane) & 31 : 0), first, plane, rows, end, buffer, lane);
          }
        } else {
          put_rows<16>(acc, b[h], r, i, h, row, lane);
          __syncwarp();
          Rows::store_spread(first, plane, rows, left, buffer, lane);
        }
        __syncwarp();
      }
    }
  }
}

// Whether all rows begin and end at multiples of UNIT bytes, where C::store_unit does not say so.
template <int UNIT>
static __device__ __forceinline__ bool is_at(u32 misaligned) { return (misaligned & (UNIT - 1)) == 0; }
};
