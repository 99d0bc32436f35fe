// Stores channels-last pixels, by rounds.
#include "gather_fill.cuh"

template <class C>
struct Epilogue<C, STORE_PIXELS> : Runs<C> {
using G = GatherWork<C>;
using R = Runs<C>;
using Number = typename G::Number;
using Result = char*;
static constexpr int ELEMENT = G::ELEMENT;
static constexpr int PIXEL_UNITS = Team<C>::PIXEL_UNITS;
static constexpr int BUFFER_BYTES = R::ROUND * 16 * ELEMENT;  // a warp's part
static constexpr int ROUND_GROUPS = R::ROUND / 8;       // of 8 columns of an accumulator
static constexpr int MATRICES = ROUND_GROUPS % 2 ? 2 : 4;  // of 8 channels and pixels that are turned together
static constexpr int APART = 32 / ELEMENT;              // pixels between those of a thread
static constexpr int LINE = R::TALL ? R::RUN : R::ROUND;  // pixels of a round in a row of the output

static __device__ __forceinline__ void team_sync() {
  if constexpr (Team<C>::WARPS == 1) __syncwarp();
  else named_sync(4 + ((threadIdx.x >> 5) - G::FIRST_CONSUMER * 4) / Team<C>::WARPS, Team<C>::WARPS * 32);
}

// Byte of a unit of 16 bytes of pixel p in the buffer: swizzled, so that lanes which write (float32: 8 channels of 4 pixels, half
// precision: 16 bytes of 8 pixels) or read (neighbouring units) meet different banks.
static __device__ __forceinline__ u32 place_in_round(int p, int unit) {
  if (ELEMENT == 4) return ((p * PIXEL_UNITS + unit) ^ (p & 6)) << 4;
  return (p * PIXEL_UNITS + (unit ^ (p & 7) * PIXEL_UNITS / 8)) << 4;
}

// W sub-position u of runs i ... of subtiles first_of(r) ...: a warp's outputs to its team's buffer.
static __device__ __forceinline__ void put_round(float (&acc)[G::MB][G::NB][32], float (&bias)[2], int r, int i, int u, u32 buffer, int warp, int lane) {
  if constexpr (ELEMENT == 4) {
    int g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int m = 0; m < ROUND_GROUPS; m++) {
      const int nb = R::nb_of(r, i + m / R::GROUPS, m % R::GROUPS), j = R::j_of(r, i + m / R::GROUPS, m % R::GROUPS);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < 2; c++)
          store_shared_f32(buffer + place_in_round(m * 8 + 2 * q + c, warp * 4 + 2 * h + (g >> 2)) + (g & 3) * 4, R::sum_of(acc, u, nb, 4 * j + 2 * h + c, bias[h]));
    }
  } else {
    u32 row = buffer + place_in_round(lane / 16 * 8 % (MATRICES * 4) + lane % 8, warp * 2 + lane / 8 % 2);  // the lane's of its matrix
#pragma unroll
    for (int m = 0; m < ROUND_GROUPS; m += MATRICES / 2) {
      u32 v[MATRICES];
#pragma unroll
      for (int e = 0; e < MATRICES; e++) {
        const int k = m + e / 2, h = e % 2;
        const int nb = R::nb_of(r, i + k / R::GROUPS, k % R::GROUPS), j = R::j_of(r, i + k / R::GROUPS, k % R::GROUPS);
        v[e] = Number::pair(R::sum_of(acc, u, nb, 4 * j + 2 * h, bias[h]), R::sum_of(acc, u, nb, 4 * j + 2 * h + 1, bias[h]));
      }
      store_matrices_turned(row + m * 8 * PIXEL_UNITS * 16, v);
    }
  }
}

// Where a pixel of the output lies, in pixels, and the bytes from one q to the next along H and W. A batch as width is a dimension more than
// memory has: columns are images.
static __device__ __forceinline__ long long pixel_of(const typename G::Sizes& s, int n, int d, int h, int w) {
  if constexpr (C::batch_as_width) return ((long long)w * s.out_d + d) * s.out_h + h;
  else return (((long long)n * s.out_d + d) * s.out_h + h) * s.out_w + w;
}
static __device__ __forceinline__ long long row_pitch(const typename G::Sizes& s) {
  if constexpr (C::batch_as_width) return 1LL * C::cout * ELEMENT * C::out_step_h;
  else return s.out_w * (1LL * C::cout * ELEMENT * C::out_step_h);
}
static __device__ __forceinline__ long long column_pitch(const typename G::Sizes& s) {
  if constexpr (C::batch_as_width) return (long long)s.out_d * s.out_h * (1LL * C::out_step_w * C::cout * ELEMENT);
  else return 1LL * C::out_step_w * C::cout * ELEMENT;
}

// A round from the buffer to memory. The thread's first unit goes to `to`, column `column` of its row; `couts` channels, `left` columns
// and `lines` rows of the output are left there, and rows lie `pitch` bytes apart, columns `step`.
static __device__ __forceinline__ void store_round(char* to, int column, int couts, int left, int lines, long long pitch, long long step, u32 from) {
#pragma unroll
  for (int i = 0; i < (R::ROUND + APART - 1) / APART; i++) {
    int line = i * APART / LINE, over = i * APART % LINE;
    bool crosses = over + APART > LINE && LINE > APART && column + over >= LINE;  // into the row below
    char* at = to + line * pitch + over * step;
    if (crosses) at += pitch - LINE * step;
    bool ok = over * C::out_step_w < left + (crosses ? LINE * C::out_step_w : 0) && (line + crosses) * C::out_step_h < lines && couts > 0;
    if (R::ROUND % APART != 0) ok = ok && column + i * APART < R::ROUND;
    u32 v[4];
    load_shared_128(v, from + (R::ROUND % APART == 0 || ok ? i * (APART * PIXEL_UNITS * 16) : 0));
    Team<C>::store_unit(at, v, couts, ok);
  }
}

// Unrolled, since registers have no run-time index. Stores once in a loop, with only the reading of registers in
// branches, take longer and compile no faster.
static __device__ __forceinline__ void store(float (&acc)[G::MB][G::NB][32], const typename Number::Type* __restrict__ bias, char* __restrict__ y, const typename G::Sizes& s, const typename G::Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  OPAQUE(lane);                                         // what follows from it is found here, not kept from tile to tile (spills)
  int g = lane >> 2;
  Slab slab = slab_of<C>(t, cout_block, warp);
  if constexpr (C::bare) fill<C>(bias, y, s, t, slab, first_subtile / G::NB, warp, lane);
  int in_team = warp % Team<C>::WARPS, first = slab.cout - in_team * 16;  // the team's first channel
  if (first >= C::cout_g) return;
  buffer -= in_team * BUFFER_BYTES;
  u32 thread = in_team * 32 + lane, unit = thread % PIXEL_UNITS, pixel = thread / PIXEL_UNITS;
  int column = pixel % LINE, row = pixel / LINE, couts = C::cout_g - first - (int)unit * G::VEC;
  u32 from = buffer + place_in_round(pixel, unit);      // pixels 8 and 16 further have the same swizzle
  long long pitch = row_pitch(s), step = column_pitch(s);
  y += row * pitch + column * step + (first + (int)unit * G::VEC) * ELEMENT;
  float b[2];
  load_bias<C>(b, bias, slab, t.group * C::cout_g + slab.cout, g);
  if (bias) add_bias<C>(acc, b);
#pragma unroll
  for (int r = 0; r < R::COUNT; r++) {
    typename R::Place place = R::place_of(first_subtile + R::first_of(r));
    int n = t.n + place.n, od = C::out_step_d * (t.d + place.d) + slab.od;
    bool image = n < s.batch && od < s.out_d;
    int oh = C::out_step_h * (t.h + place.h) + slab.oh, ow = C::out_step_w * (t.w + place.w) + U_W<C>[t.variant];
    char* to = y + (pixel_of(s, n, od, oh, ow) * C::cout + t.group * C::cout_g) * ELEMENT;
#pragma unroll
    for (int i = 0; i < R::OF_SUBTILE; i += R::ROUND / R::RUN) {
      int lines = s.out_h - oh - C::out_step_h * (R::TALL ? i : 0), left = s.out_w - ow;
      if (!image || lines <= 0 || left <= 0) continue;
      if (R::others(r, i)) continue;
#pragma unroll
      for (int u = 0; u < C::w_subs; u++) {
        put_round(acc, b, r, i, u, buffer, in_team, lane);
        team_sync();
        char* first_of = to + (R::TALL ? i * pitch : 0) + u * (1LL * C::cout * ELEMENT);
        store_round(first_of, column, couts, left - u - column * C::out_step_w, lines - row * C::out_step_h, pitch, step, from);
        team_sync();
      }
    }
  }
}
};
