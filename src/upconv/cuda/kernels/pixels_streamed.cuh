// What `subpixel` and `pairs` share: places of an NCHW tensor times columns, whose pixels and weights come through one ring.
//
// A stage has `boxes` of pixels, which lanes of one warp bring, and `rows` of weights: for each of a block's columns 128 bytes of K. Consumers
// halve a tile's places. A mode M has
//   Sizes, Boxes       begin(tile): a lane's box; load(stage, to, barrier)
//   weight_at          of a column of all, a stage, a row of its weights and a place of K: the weight there
//   own_place          where a stage has the first fragments of a thread
//   load_fragments     of two steps of K
//   begin, store       a tile's sums
#include "pixels.cuh"

template <class M, class C>
struct Streamed : PixelsOf<C>, PacksUnits<M> {
using PixelsOf<C>::ELEMENT;
using PixelsOf<C>::VEC;

static constexpr int PLACES = 128, COLUMNS = C::columns, ALL_COLUMNS = C::all_columns;
static constexpr int BOX_PLACE = (C::box_bytes + 127) / 128 * 128;  // where boxes may begin
static constexpr int WEIGHT_BYTES = C::rows * COLUMNS * 128, WEIGHTS_AT = C::stage_bytes - WEIGHT_BYTES;
static constexpr int K_STEPS = 4;                       // of a row of weights: a matrix instruction takes 32 bytes of K
static constexpr bool HOLDS = true;
using Sums = float[COLUMNS / 2];
using Maps = TensorMap;
using Ring = RingOf<C::stages, C::stage_bytes>;

static __device__ __forceinline__ Ring ring_of(u32 memory, int) { return Ring::at(memory, memory + Ring::BYTES); }

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

struct Consumer {
  const Work<M>& work;
  int wg, thread;
  u32 own;

  __device__ __forceinline__ Consumer(const Work<M>& work, int wg, int thread) : work(work), wg(wg), thread(thread), own(M::own_place(wg, thread)) {}
  __device__ __forceinline__ At at(u32 stage) const { return {stage, uniform(stage + WEIGHTS_AT)}; }
  __device__ __forceinline__ Steps steps(int) const { return {0, C::stages_k}; }
  __device__ __forceinline__ void begin(Sums& acc, int tile) const { M::begin(acc, work, tile, thread); }
  __device__ __forceinline__ void multiply(Sums& acc, const At& at, u32 held) const { M::multiply(acc, at, own, held, thread & 31); }
  __device__ __forceinline__ void store(const Sums& acc, int tile) const { M::store(acc, work, tile, wg, thread); }
};
};
