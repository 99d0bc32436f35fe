// Stores rows of M that are phases, of one W sub-position: they go to their lines in the buffer, where the phases of neighbouring q are neighbours.
#include "gather_epilogue.cuh"
#include "shuffle.cuh"

template <class C>
struct Epilogue<C, STORE_PHASES> : Runs<C> {
using G = GatherWork<C>;
using R = Runs<C>;
using Number = typename G::Number;
using Result = char*;
static constexpr int LINE_PITCH = (R::RUN + 1) * C::inner * 4;  // of a line of the output, in float32
static constexpr int BUFFER_BYTES = C::per_slab * LINE_PITCH;
static constexpr int OUTPUTS = R::RUN * C::inner;       // of a run's line

// A line of a run from the buffer to memory, outputs `first` ... of which those up to `end` exist. (One by one:
// most layers whose phases are rows write few outputs.)
static __device__ __forceinline__ void store_line(char* to, int first, int end, u32 line, int lane) {
#pragma unroll
  for (int i = 0; i < (OUTPUTS + 31) / 32; i++) {
    int e = lane + 32 * i, at = first + e;
    bool ok = at < end && (OUTPUTS % 32 == 0 || e < OUTPUTS);
    float v = load_shared_f32(line + (OUTPUTS % 32 == 0 || ok ? e : 0) * 4);
    char* p = to + (long long)at * G::ELEMENT;
    if constexpr (G::ELEMENT == 4) store_global_if(p, Number::bits(v), ok);
    else store_global_16_if(p, Number::bits(v), ok);
  }
}

static __device__ __forceinline__ void store(float (&acc)[G::MB][G::NB][32], const typename Number::Type* __restrict__ bias, char* __restrict__ y, const typename G::Sizes& s, const typename G::Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  OPAQUE(lane);
  int g = lane >> 2, q = lane & 3;
  Slab slab = slab_of<C>(t, cout_block, warp);
  if (slab.couts <= 0) return;
  float b[2] = {0.f, 0.f};
  u32 place[2];
  bool exists[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const typename Shuffle<C>::Row row = Shuffle<C>::row_at(slab.cout + g + 8 * h);
    exists[h] = row.exists;
    place[h] = buffer + row.line * LINE_PITCH + (2 * q * C::inner + row.place) * 4;
    if (bias && row.exists) b[h] = Number::value(bias[row.channel]);
  }
  constexpr int PER_PIXEL = C::channels_last ? C::cout : 1;  // neighbours
  int first_line = slab.cout / 16 * C::per_slab;
#pragma unroll
  for (int r = 0; r < R::COUNT; r++) {
    typename R::Place at = R::place_of(first_subtile + R::first_of(r));
    int n = t.n + at.n, d = C::out_step_d * (t.d + at.d) + slab.od;
#pragma unroll
    for (int i = 0; i < R::OF_SUBTILE; i++) {
      int h = C::out_step_h * (t.h + at.h + (R::TALL ? i : 0)) + slab.oh;
      int w = C::out_step_w * (t.w + at.w + (R::TALL ? 0 : i * R::RUN));
      int first = w * C::layer_stride_w * PER_PIXEL, end = s.out_w * PER_PIXEL;
      if (n >= s.batch || d * C::layer_stride_d >= s.out_d || h * C::layer_stride_h >= s.out_h || first >= end) continue;
#pragma unroll
      for (int k = 0; k < R::GROUPS; k++) {
        const int nb = R::nb_of(r, i, k), j = R::j_of(r, i, k);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int c = 0; c < 2; c++)
            if (exists[half]) store_shared_f32(place[half] + (k * 8 + c) * (C::inner * 4), acc[0][nb][4 * j + 2 * half + c] + b[half]);
      }
      __syncwarp();
#pragma unroll 1
      for (int l = 0; l < C::per_slab; l++) {
        const typename Shuffle<C>::Line line = Shuffle<C>::line_at(first_line + l);
        int od = d * C::layer_stride_d + line.d, oh = h * C::layer_stride_h + line.h;
        if (first_line + l >= C::lines || od >= s.out_d || oh >= s.out_h) continue;
        long long row = (((long long)n * (C::channels_last ? 1 : C::cout) + line.channel) * s.out_d + od) * s.out_h + oh;
        store_line(y + row * end * G::ELEMENT, first, end, buffer + l * LINE_PITCH, lane);
      }
      __syncwarp();
    }
  }
}
};
