// What `subpixel` and `pairs` share: places of an NCHW tensor times columns, whose pixels and weights come through one ring.
//
// A stage has M::BOXES boxes of pixels, which lanes of one warp bring, and ROWS_B rows of weights: for each of a block's columns 128 bytes of
// K. Consumers halve a tile's places. A mode M has
//   Sizes, Boxes       begin(tile): a lane's box; load(stage, to, barrier)
//   weight_at          of a column of all, a stage, a row of its weights and a place of K: the weight there
//   own_place          where a stage has the first fragments of a thread
//   load_fragments     of two steps of K
//   begin, store       a tile's sums
#include "pixels.cuh"

template <class M, class C, int BOXES, int BOX_BYTES, int ROWS_B, int STAGES_K, int ALL_COLUMNS_>
struct Streamed : PixelsOf<C>, PacksUnits<M> {
using PixelsOf<C>::ELEMENT;
using PixelsOf<C>::VEC;

static constexpr int PLACES = 128, COLUMNS = C::columns, ALL_COLUMNS = ALL_COLUMNS_;
static constexpr int BLOCKS_N = (ALL_COLUMNS + COLUMNS - 1) / COLUMNS;
static constexpr int BOX_PLACE = (BOX_BYTES + 127) / 128 * 128;  // where boxes may begin
static constexpr int WEIGHTS_AT = (BOXES * BOX_PLACE + 1023) / 1024 * 1024, WEIGHT_BYTES = ROWS_B * COLUMNS * 128;
static constexpr int K_STEPS = 4;                       // of a row of weights: a matrix instruction takes 32 bytes of K
static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static constexpr bool HOLDS = true;
using Sums = float[COLUMNS / 2];
using Maps = TensorMap;
using Ring = RingOf<C::stages, WEIGHTS_AT + WEIGHT_BYTES>;
static_assert(Ring::BYTES + Ring::BARRIER_BYTES == C::shared_bytes, "the planner's shared memory is not the kernel's");
static_assert(BOXES <= 32, "a warp's lanes bring a box each");

static __device__ __forceinline__ Ring ring_of(u32 memory, int) { return Ring::at(memory, memory + Ring::BYTES); }

// Neighbouring blocks have the same places.
static __device__ __forceinline__ int block_of(int tile) { return tile % BLOCKS_N; }
static __device__ __forceinline__ int places_of(int tile) { return tile / BLOCKS_N; }

// Packed weights: [block][stage][row][column][128 bytes of K, swizzled], zeros where there is no such column or channel.
static constexpr int PACK_UNITS = BLOCKS_N * STAGES_K * ROWS_B * COLUMNS * 8;

template <class Write>
static __device__ __forceinline__ void pack_unit(int i, const Write& write) {
  int unit = i % 8, column = i / 8 % COLUMNS, rest = i / (8 * COLUMNS), row = rest % ROWS_B, stage = rest / ROWS_B % STAGES_K;
  int of = rest / (ROWS_B * STAGES_K) * COLUMNS + column;
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
    weights = work.packed + (long long)block_of(tile) * STAGES_K * WEIGHT_BYTES;
    return {0, STAGES_K};
  }

  __device__ __forceinline__ void load(int stage, u32 to, u32 barrier) {
    if (lane == 0) expect_bytes(barrier, BOXES * BOX_BYTES + WEIGHT_BYTES);
    __syncwarp();
    if (lane < BOXES) box.load(stage, to + lane * BOX_PLACE, work.maps, barrier);
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
  for (int row = 0; row < ROWS_B; row++) multiply_row<M>(acc, row, at.stage + own, at.weights, held, lane);
}

struct Consumer {
  const Work<M>& work;
  int wg, thread;
  u32 own;

  __device__ __forceinline__ Consumer(const Work<M>& work, int wg, int thread) : work(work), wg(wg), thread(thread), own(M::own_place(wg, thread)) {}
  __device__ __forceinline__ At at(u32 stage) const { return {stage, uniform(stage + WEIGHTS_AT)}; }
  __device__ __forceinline__ Steps steps(int) const { return {0, STAGES_K}; }
  __device__ __forceinline__ void begin(Sums& acc, int tile) const { M::begin(acc, work, tile, thread); }
  __device__ __forceinline__ void multiply(Sums& acc, const At& at, u32 held) const { M::multiply(acc, at, own, held, thread & 31); }
  __device__ __forceinline__ void store(const Sums& acc, int tile) const { M::store(acc, work, tile, wg, thread); }
};
};
