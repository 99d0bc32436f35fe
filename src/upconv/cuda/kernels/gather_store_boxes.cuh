// NCHW, 16 bits: while the next tile is multiplied, the copy engine stores this one's outputs. Nothing hides other epilogues unless consumers take
// tiles in turn.
#include "gather_epilogue.cuh"

template <class C>
struct Epilogue<C, STORE_BOXES> : Runs<C> {
using G = GatherWork<C>;
using R = Runs<C>;
using Number = typename G::Number;
using Result = const TensorMap&;
// The warp's outputs of a whole tile, as boxes of [row][channel][C::out_span bytes], swizzled, which the copy engine brings to memory.
static constexpr int RUN_BOXES = R::RUN * C::w_subs * G::ELEMENT / C::out_span;  // of a run, side by side; C::out_span: bytes of a box's row
static constexpr int BOX_ROWS = R::TALL ? 8 : 1;
static constexpr int BOX_BYTES = BOX_ROWS * 16 * C::out_span;
static constexpr int BUFFER_BYTES = G::NB * 64 * C::w_subs * 16 * G::ELEMENT;
static_assert(C::w_subs == 1 || C::w_subs == 2 || C::w_subs == 4, "a lane's words are one store, and rows of boxes a whole number of them");

// A lane's V words.
template <int V>
static __device__ __forceinline__ void store_words(u32 to, const u32 (&v)[V]) {
  if constexpr (V == 1) store_shared_u32(to, v[0]);
  else if constexpr (V == 2) store_shared_f32x2(to, __uint_as_float(v[0]), __uint_as_float(v[1]));
  else store_shared_128(to, v[0], v[1], v[2], v[3]);
}

static __device__ __forceinline__ constexpr int box_of(int r, int i) { return (R::TALL ? r : r * R::OF_SUBTILE + i) * RUN_BOXES; }

static __device__ __forceinline__ void store(float (&acc)[G::MB][G::NB][32], const typename Number::Type* __restrict__ bias, const TensorMap& map, const typename G::Sizes& s, const typename G::Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  OPAQUE(lane);
  int g = lane >> 2, q = lane & 3;
  Slab slab = slab_of<C>(t, cout_block, warp);
  if (slab.couts <= 0) return;
  float b[2];
  load_bias<C>(b, bias, slab, slab.cout, g);
  if (lane == 0) bulk_wait_read();                      // the last tile's have left the buffer
  __syncwarp();
  // The swizzle exchanges 16-byte units by bits of the address that are the channel's alone.
  u32 swizzle = (g * C::out_span >> 7 & (C::out_span / 16 - 1)) << 4, own = buffer + g * C::out_span, lanes = q * (2 * C::w_subs * G::ELEMENT) ^ swizzle;
#pragma unroll
  for (int r = 0; r < R::COUNT; r++)
#pragma unroll
    for (int i = 0; i < R::OF_SUBTILE; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int k = 0; k < R::GROUPS; k++) {
          const int nb = R::nb_of(r, i, k), j = R::j_of(r, i, k), at = k * 8 * C::w_subs * G::ELEMENT;
          const int box = box_of(r, i) + at / C::out_span, row = R::TALL ? i : 0;
          float v[2 * C::w_subs];
#pragma unroll
          for (int c = 0; c < 2; c++)
#pragma unroll
            for (int u = 0; u < C::w_subs; u++) v[c * C::w_subs + u] = b[h] + R::sum_of(acc, u, nb, 4 * j + 2 * h + c, 0.f);
          u32 words[C::w_subs];
#pragma unroll
          for (int u = 0; u < C::w_subs; u++) words[u] = Number::pair(v[2 * u], v[2 * u + 1]);
          store_words(own + box * BOX_BYTES + (row * 16 + 8 * h) * C::out_span + (at % C::out_span ^ lanes), words);
        }
  fence_async_shared();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int r = 0; r < R::COUNT; r++) {
      typename R::Place place = R::place_of(first_subtile + R::first_of(r));
#pragma unroll
      for (int i = 0; i < (R::TALL ? 1 : R::OF_SUBTILE); i++)
#pragma unroll
        for (int k = 0; k < RUN_BOXES; k++) {
          int w = C::out_step_w * (t.w + place.w + i * R::RUN) + k * (C::out_span / G::ELEMENT);
          store_box(map, buffer + (box_of(r, i) + k) * BOX_BYTES, w, slab.cout, t.h + place.h, slab.oh, t.n + place.n);
        }
    }
    bulk_commit();
  }
}
};
