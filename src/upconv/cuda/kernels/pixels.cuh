// What modes of `pixels` share: a block's roles, its loops over tiles and over stages of a ring, and fragments of A from shared memory.
//
// A mode M is a template over its constants C. It has
//   Sums               a consumer's thread's; Sizes, whose last is `tiles`; Maps, of the copy engine
//   PRODUCERS, RINGS   of a block: its warpgroups, and rings, of which each consumer may have its own
//   FILLERS, READERS   of a stage: arrivals when it is full, and consumers that read it
//   first_tile, next_tile  of a block
//   Loader             begin(tile): a tile's steps; load(step, stage, barrier): what a stage gets, whose bytes count at a barrier
//   Consumer           steps(tile); begin(sums, tile); at(stage): where it is, ahead of the wait; multiply(sums, at, held); store(sums, tile)
// If instructions still read a stage behind `multiply` (M::HOLDS), the next one gives it back, by its barrier `held`.
// Where consumers take whole tiles in turn (M::TURNS) `takes` says whose turn it is.
#include "columns.cuh"
#include "table.cuh"

template <class C_>
struct PixelsOf {
  using C = C_;
  using Number = NumberOf<C::precision>;
  using Type = typename Number::Type;
  static constexpr int ELEMENT = Number::SIZE, VEC = 16 / ELEMENT;
  static constexpr bool NARROW = ELEMENT == 2;          // of 16 bits
  static constexpr int CONSUMERS = 2, THREADS = 128 + CONSUMERS * 128;
  static constexpr int PRODUCERS = 1, FILLERS = 1, RINGS = 1, READERS = CONSUMERS;
  static constexpr bool TURNS = false;
  using Ring = RingOf<C::stages, C::stage_bytes>;       // whose stages a producer fills and consumers read
  static __device__ __forceinline__ Ring ring_of(u32 memory, int) { return Ring::at(memory, memory + Ring::BYTES); }
  template <class Sizes> static __device__ __forceinline__ int first_tile(int, const Sizes&) { return blockIdx.x; }
  template <class Sizes> static __device__ __forceinline__ int next_tile(int tile, const Sizes&) { return tile + gridDim.x; }
  static __device__ __forceinline__ void init(u32) {}   // barriers beside the rings'
};

struct Steps { int first, end; };                       // of a tile, a stage each

// What a launch gives.
template <class M>
struct Work {
  const char* packed;
  const typename M::Type* bias;
  char* y;
  const typename M::Sizes& sizes;
  const typename M::Maps& maps;
  u32 memory;
};

template <class M>
__device__ __forceinline__ void produce(const Work<M>& work, typename M::Loader loader, int consumer = 0) {
  const typename M::Ring ring = M::ring_of(work.memory, consumer);
  typename M::Ring::Cursor cursor = {0, 1};             // all are free at first
#pragma unroll 1
  for (int tile = M::first_tile(consumer, work.sizes); tile < work.sizes.tiles; tile = M::next_tile(tile, work.sizes)) {
    const Steps steps = loader.begin(tile);
#pragma unroll 1
    for (int step = steps.first; step < steps.end; step++, cursor.next()) {
      ring.wait_empty(cursor);
      loader.load(step, ring.stage(cursor), ring.full(cursor));
    }
  }
}

template <class M>
__device__ __forceinline__ void consume(const Work<M>& work, const typename M::Ring& ring, int wg, int thread) {
  typename M::Ring::Cursor cursor = {0, 0};
  typename M::Consumer consumer(work, wg, thread);
  typename M::Sums sums;
#pragma unroll 1
  for (int tile = M::first_tile(wg, work.sizes); tile < work.sizes.tiles; tile = M::next_tile(tile, work.sizes)) {
    const Steps steps = consumer.steps(tile);
    if constexpr (M::TURNS) {
      if (!consumer.takes()) {
        cursor.move(steps.end - steps.first);
        continue;
      }
    }
    consumer.begin(sums, tile);
    u32 held = 0;                                       // the stage that instructions under way read
#pragma unroll 1
    for (int step = steps.first; step < steps.end; step++, cursor.next()) {
      const auto at = consumer.at(ring.stage(cursor));
      ring.wait_full(cursor);
      consumer.multiply(sums, at, held);
      if (M::HOLDS) held = ring.empty(cursor);
      else give_back(ring.empty(cursor), thread & 31);
    }
    if constexpr (M::TURNS) consumer.pass_turn();
    wgmma_wait<0>();
    if (M::HOLDS) give_back(held, thread & 31);
    consumer.store(sums, tile);
  }
}

template <class M>
__device__ __forceinline__ void run(const Work<M>& work) {
  const typename M::Ring ring = M::ring_of(work.memory, 0);
  run_block<M::PRODUCERS, M::CONSUMERS, M::C::producer_registers, M::C::consumer_registers>(
      [&] {
        for (int i = 0; i < M::RINGS; i++) M::ring_of(work.memory, i).init(M::FILLERS, 4 * M::READERS);
        M::init(work.memory);
      },
      [&] { M::produce(work); },
      [&](int wg, int thread) { consume<M>(work, M::RINGS > 1 ? M::ring_of(work.memory, wg) : ring, wg, thread); });
}

// --- fragments of A from shared memory; rows of weights have 128 bytes of K ------------------------------------------

// The channel of a chunk at place `k`. Of float32 a lane (t = lane % 4) has the places t and t + 4 of a step: channels 2t and 2t + 1, so
// that those of four lanes are in other banks: rows are swizzled by the channel, or lie an odd number of 16 bytes apart.
template <int P>
__device__ __forceinline__ constexpr int channel_at(int k) { return P < FP16 ? k / 8 * 8 + k % 4 * 2 + k / 4 % 2 : k; }

// acc += fragments of steps `first` and behind x a row of weights.
template <int P, int COLUMNS, int HALF>
__device__ __forceinline__ void multiply_half(float (&acc)[COLUMNS / 2], u32 (&a)[HALF][4], u32 weights, int first) {
#pragma unroll
  for (int i = 0; i < HALF * 4; i++) opaque(a[i / 4][i % 4]);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < HALF; step++)
    WgmmaOf<COLUMNS>::template multiply<P, false, false, true>(acc, a[step], ROWS_OF<128> | (u64)((weights >> 4 | 1u << 16) + (first + step) * 2));
  wgmma_commit();
}

// acc += row `row` of a stage's weights x the fragments that M loads from `pixels` for it: a half of them while the other is multiplied.
// Behind the first row's first half nothing reads the stage before any more, whose barrier is `held`.
template <class M, int SUMS>
__device__ __forceinline__ void multiply_row(float (&acc)[SUMS], int row, u32 pixels, u32 weights, u32 held, int lane) {
  constexpr int HALF = 2, COLUMNS = 2 * SUMS;
  u32 a[HALF][4], b[HALF][4];
  weights += row * (COLUMNS * 128);
  M::load_fragments(a, pixels, 2 * HALF * row);
  multiply_half<M::C::precision, COLUMNS>(acc, a, weights, 0);
  wgmma_wait<1>();
  if (row == 0) give_back(held, lane);
  M::load_fragments(b, pixels, 2 * HALF * row + HALF);
  multiply_half<M::C::precision, COLUMNS>(acc, b, weights, HALF);
  wgmma_wait<1>();
}

// Sums begin with the bias; `first`: the thread's first column, of the layer's. (Added to what is stored, its loads are all made first, and
// spill.) M::ALIKE: a thread's two neighbouring columns have one channel.
template <class M, int SUMS>
__device__ __forceinline__ void begin_sums(float (&acc)[SUMS], const typename M::Type* bias, int first) {
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    const int column = first + i / 4 * 8 + i % 2;
    const bool own = i % 4 == 0 || (i % 4 == 1 && !M::ALIKE);
    float b = own && bias && (M::ALL_COLUMNS % (2 * SUMS) == 0 || column < M::ALL_COLUMNS) ? M::Number::value(bias[M::channel_of(column)]) : 0.f;
    acc[i] = own ? b : acc[i % 4 == 1 ? i - 1 : i - 2];  // pixels g and g + 8 of a column
    opaque(acc[i]);
  }
}

// Lanes of neighbouring g that have columns of pixels g and g + 8: an even one's g + 8 for an odd one's g. Then an even one has g and
// g + 1, an odd one g + 7 and g + 8. Of 16 bits both columns are together.
template <bool HALVES>
__device__ __forceinline__ void exchange(u32 (&v)[2][2], int odd) {
  if constexpr (HALVES) {
#pragma unroll
    for (int h = 0; h < 2; h++) v[h][0] |= v[h][1] << 16;
  }
#pragma unroll
  for (int c = 0; c < (HALVES ? 1 : 2); c++) {
    u32 other = __shfl_xor_sync(0xffffffffu, odd ? v[0][c] : v[1][c], 4);
    v[0][c] = odd ? other : v[0][c];
    v[1][c] = odd ? v[1][c] : other;
  }
}
