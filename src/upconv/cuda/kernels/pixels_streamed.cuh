// What `subpixel` and `pairs` share: places of an NCHW tensor times columns, whose pixels and weights come through one ring.
//
// A stage has `boxes` of pixels, which lanes of one warp bring, and `rows` of weights: for each of a block's columns 128 bytes of K. Consumers
// halve a tile's places. A mode M has
//   Sizes, Boxes       begin(tile): a lane's box; load(stage, to, barrier)
//   weight_at          of a column of all, a stage, a row of its weights and a place of K: the weight there
//   own_place          where a stage has the first fragments of a thread
//   load_fragments     of two steps of K
//   channel_of         a column of all: the result's, whose bias sums begin with; store: a tile's sums
//   Result             where a thread's sums go (`store_sums`)
#include "pixels.cuh"

template <class M, class C>
struct Streamed : PixelsOf<C>, PacksUnits<M> {
using PixelsOf<C>::ELEMENT;
using PixelsOf<C>::NARROW;
using PixelsOf<C>::VEC;
using typename PixelsOf<C>::Number;

static constexpr int PLACES = 128, COLUMNS = C::columns, ALL_COLUMNS = C::all_columns;
static constexpr int BOX_PLACE = (C::box_bytes + 127) / 128 * 128;  // where boxes may begin
static constexpr int WEIGHT_BYTES = C::rows * COLUMNS * 128, WEIGHTS_AT = C::stage_bytes - WEIGHT_BYTES;
static constexpr int K_STEPS = 4;                       // of a row of weights: a matrix instruction takes 32 bytes of K
static constexpr bool HOLDS = true;
using Sums = float[COLUMNS / 2];
using Maps = TensorMap;

// Neighbouring blocks have the same places.
static __device__ __forceinline__ int block_of(int tile) { return tile % C::blocks; }
static __device__ __forceinline__ int places_of(int tile) { return tile / C::blocks; }

// Packed weights: [block][stage][row][column][128 bytes of K, swizzled], zeros where there is no such column or channel.
static constexpr int PACK_UNITS = C::blocks * C::stages_k * C::rows * COLUMNS * 8;

template <class Write>
static __device__ __forceinline__ void pack_unit(int i, const Write& write) {
  int unit = i % 8, column = i / 8 % COLUMNS, rest = i / (8 * COLUMNS), row = rest % C::rows, stage = rest / C::rows % C::stages_k;
  int of = rest / (C::rows * C::stages_k) * COLUMNS + column;
  write((long long)(i - unit) * 16 + ((unit ^ (column & 7)) << 4), [=](int e) { return M::weight_at(of, stage, row, unit * VEC + e); });
}

struct Loader {
  const Work<M>& work;
  int lane;
  typename M::Box box;                                  // the lane's
  const char* weights;
  bool packing;                                         // weights are not known to be packed

  __device__ __forceinline__ Steps begin(int tile) {
    box.begin(places_of(tile), lane, work.sizes);
    weights = work.packed + (long long)block_of(tile) * C::stages_k * WEIGHT_BYTES;
    return {0, C::stages_k};
  }

  __device__ __forceinline__ void load(int stage, u32 to, u32 barrier) {
    if (lane == 0) expect_bytes(barrier, C::boxes * C::box_bytes + WEIGHT_BYTES);
    __syncwarp();
    if (lane < C::boxes) box.load(stage, to + lane * BOX_PLACE, work.maps, barrier);
    if (lane == 0) {
      if (packing) wait_for_results();                  // of `pack`
      packing = false;
      copy_bulk(to + WEIGHTS_AT, weights, WEIGHT_BYTES, barrier);
    }
    weights += WEIGHT_BYTES;
  }
};

static __device__ __forceinline__ void produce(const Work<M>& work) {
  if (threadIdx.x < 32) ::produce<M>(work, Loader{work, (int)threadIdx.x, {}, nullptr, true});
}

struct At { u32 stage, weights; };

// acc += a stage's fragments x its weights.
static __device__ __forceinline__ void multiply(Sums& acc, const At& at, u32 own, u32 held, int lane) {
#pragma unroll
  for (int row = 0; row < C::rows; row++) multiply_row<M>(acc, row, at.stage + own, at.weights, held, lane);
}

// Of a lane's sums v[place][column] what it stores at once, the one of `h` and `c` first.
template <bool TWO_PLACES, bool TWO_COLUMNS>
static __device__ __forceinline__ void store_some_of(char* to, const u32 (&v)[2][2], int h, int c, bool ok) {
  static_assert(NARROW || !(TWO_PLACES && TWO_COLUMNS), "float32 loses by it (docs/experiments.md)");
  const u32 both[4] = {TWO_PLACES ? v[0][c] : v[h][0], TWO_PLACES ? v[1][c] : v[h][1]};
  if constexpr (NARROW ? TWO_PLACES && TWO_COLUMNS : TWO_PLACES || TWO_COLUMNS) store_global_64_if(to, both, ok);
  else if constexpr (!NARROW) store_global_if(to, v[h][c], ok);
  else if constexpr (TWO_PLACES) store_global_if(to, c ? v[0][0] >> 16 | (v[1][0] & 0xffff0000u) : (v[0][0] & 0xffffu) | v[1][0] << 16, ok);
  else if constexpr (TWO_COLUMNS) store_global_if(to, v[h][0] | v[h][1] << 16, ok);
  else store_global_16_if(to, v[h][c], ok);
}

// A thread's sums: of columns 8j + 2t and the next, places g and g + 8 of a whole 16. TWO_PLACES: places 2i and 2i + 1 are neighbours in
// memory; then lanes of neighbouring g exchange, and a warp stores 16 places of a column at once. TWO_COLUMNS: columns 2i and 2i + 1 are.
//
// M::Result<STORES>, of a tile, a whole 16 of its places, a place of these and the first column, says `to(h, c)`, where the sum goes of the
// place 8h further and of column c behind the one of `go(j)`, and whether it is `there`.
template <bool TWO_PLACES, bool TWO_COLUMNS>
static __device__ __forceinline__ void store_sums(const Sums& acc, const Work<M>& work, int tile, int wg, int thread) {
  constexpr int STORES = TWO_PLACES ? 1 : 2;
  const int lane = thread & 31, odd = TWO_PLACES ? lane >> 2 & 1 : 0;
  const int whole = wg * 64 + (thread >> 5) * 16, place = (lane >> 2) + odd * 7;
  typename M::template Result<STORES> result(work, tile, whole, place, block_of(tile) * COLUMNS + lane % 4 * 2);
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    result.go(8 * j);
    u32 v[2][2];                                        // of a place, of a column
#pragma unroll
    for (int i = 0; i < 4; i++) v[i / 2][i % 2] = Number::bits(acc[4 * j + i]);
    if constexpr (TWO_PLACES) exchange<NARROW>(v, odd);
#pragma unroll
    for (int c = 0; c < (TWO_COLUMNS ? 1 : 2); c++)
#pragma unroll
      for (int h = 0; h < STORES; h++) store_some_of<TWO_PLACES, TWO_COLUMNS>(result.to(h, c), v, h, c, result.there(h, c));
  }
}

struct Consumer {
  const Work<M>& work;
  int wg, thread;
  u32 own;

  __device__ __forceinline__ Consumer(const Work<M>& work, int wg, int thread) : work(work), wg(wg), thread(thread), own(M::own_place(wg, thread)) {}
  __device__ __forceinline__ At at(u32 stage) const { return {stage, uniform(stage + WEIGHTS_AT)}; }
  __device__ __forceinline__ Steps steps(int) const { return {0, C::stages_k}; }
  __device__ __forceinline__ void begin(Sums& acc, int tile) const {
    begin_sums<M>(acc, work.bias, block_of(tile) * COLUMNS + thread % 4 * 2);
  }
  __device__ __forceinline__ void multiply(Sums& acc, const At& at, u32 held) const { M::multiply(acc, at, own, held, thread & 31); }
  __device__ __forceinline__ void store(const Sums& acc, int tile) const { M::store(acc, work, tile, wg, thread); }
};
};
