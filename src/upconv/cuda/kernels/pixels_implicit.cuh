// Implicit GEMM: forward and gradient for the input of channels-last layers, one tap at a time. Pixels are rows of M, channels of the result
// columns of N; K is taps x channels of the source, CK channels of a tap at a time.
// A stage of the ring has, for such a step, the pixels that the tap reads for a tile, by a box of the tensor copy engine, and its
// weights, by another; both are swizzled, float32 is rounded to TF32 on its way, and both operands are read by descriptors.
//
// A forward's results are of phases: a tile has neighbouring ones of a phase, its steps are of the phase's taps alone, and what it stores
// is the strides apart. Tiles of the same pixels follow each other, a phase each, for L2's sake, and a block has another phase each time.
//
// Taps share nothing, so that a tile is a box of any shape: its pixels follow each other in shared memory, whatever rows they lie in, and
// images of 14 x 14 fill it, where tiles of whole rows leave a quarter empty. (`gather`, whose taps are shifts of one
// tile, reads a pixel once for several taps; where the kernel is the stride there is nothing to share.) A launch tells the box. Rows of a tile
// that its box leaves out are whatever shared memory had: a row of M is a pixel of the result alone, and these are not stored.
//
// Consumers halve a tile's pixels (`halves`), or take whole tiles in turn, so that one stores while another multiplies. Where tiles are
// few, blocks of a cluster have one together, each a share of its steps, and add up their sums in shared memory, in the order of their rank.
//
// Weights have channels of the source side by side, as a gradient's channels-last weights do, or are packed so. Or they are a forward's
// channels-last weights of 16 bits (`turned`), with channels of the result side by side, which tensor cores read as well, 64 of them a box.
#include "pixel_stores.cuh"
#include "pixels.cuh"

template <class C>
struct Implicit : PixelsOf<C> {
using typename PixelsOf<C>::Number;
using PixelsOf<C>::ELEMENT;
using PixelsOf<C>::VEC;
using PixelsOf<C>::CONSUMERS;

static constexpr int MB = C::mb, COLUMNS = C::columns, PHASES = C::phases, CLUSTER = C::cluster;
static constexpr int ROW_BYTES = 128;                   // a pixel's row in a stage, and a column's of the weights
static constexpr int CK = ROW_BYTES / ELEMENT;          // channels of a step
static constexpr int K_STEPS = ROW_BYTES / 32;          // a matrix instruction takes 32 bytes of K
static constexpr int CHUNKS = (C::cin + CK - 1) / CK;
static constexpr int COLUMN_BLOCKS = (C::cout + COLUMNS - 1) / COLUMNS;
static constexpr int ROWS = 64 * MB * (C::halves ? CONSUMERS : 1);  // pixels of a tile, at most
static constexpr int PIXEL_BYTES = ROWS * ROW_BYTES;
static constexpr int SUMS_OF_M = COLUMNS / 2;           // a thread's of 64 pixels
static constexpr int ALL_COLUMNS = C::cout;
static constexpr int RINGS = 1, READERS = C::halves ? CONSUMERS : 1;
static constexpr bool HOLDS = C::stages > 3, TURNS = !C::halves, ALIKE = false;
using Sums = float[MB][SUMS_OF_M];
using typename PixelsOf<C>::Ring;
static_assert(CLUSTER == 1 || (C::halves && CONSUMERS * 128 * MB * SUMS_OF_M * 4 <= Ring::BYTES),
              "a block's sums have no room where its stages were");
using Stores = PixelStores<C::precision, C::cout, COLUMNS, C::wide_stores>;

struct Maps { TensorMap source, weights; };

static __device__ __forceinline__ int channel_of(int column) { return column; }

struct Sizes {
  int out_n, out_d, out_h, out_w;                       // of the result
  int box_n, box_d, box_h, box_w;                       // of a tile: ROWS pixels at most
  int tiles_d, tiles_h, tiles_w, tiles;                 // along these axes, of a phase; all, with phases and blocks of columns
  int turn;                                             // pixel tiles after which the first phase is another
};

struct Tile { int n, d, h, w, column, phase; };         // first pixel (of the phase's) and column

static __device__ __forceinline__ Tile tile_at(int q, const Sizes& s) {
  Tile t;
  t.column = q % COLUMN_BLOCKS * COLUMNS;  q /= COLUMN_BLOCKS;  // blocks of the same pixels are neighbours, for L2's sake
  t.phase = 0;
  if constexpr (PHASES > 1) {
    t.phase = (q % PHASES + q / PHASES / s.turn) % PHASES;
    q /= PHASES;
  }
  t.w = q % s.tiles_w * s.box_w;  q /= s.tiles_w;
  t.h = q % s.tiles_h * s.box_h;  q /= s.tiles_h;
  t.d = q % s.tiles_d * s.box_d;
  t.n = q / s.tiles_d * s.box_n;
  return t;
}

// The tiles of a block: the first, and from one to the next; a cluster has one.
static __device__ __forceinline__ int rank() { return CLUSTER > 1 ? blockIdx.x % CLUSTER : 0; }
static __device__ __forceinline__ int first_tile(int, const Sizes&) { return blockIdx.x / CLUSTER; }
static __device__ __forceinline__ int next_tile(int tile, const Sizes& s) { return CLUSTER > 1 ? s.tiles : tile + gridDim.x; }

// The steps of a tile that are the block's own, a tap's chunk each; they count from the first tap of all.
static __device__ __forceinline__ Steps steps_of(const Tile& t) {
  int begin = 0, count = C::taps * CHUNKS;
  if constexpr (PHASES > 1) {
    begin = constant_at<C::first_taps>(t.phase) * CHUNKS;
    count = constant_at<C::first_taps>(t.phase + 1) * CHUNKS - begin;
  }
  return {begin + rank() * count / CLUSTER, begin + (rank() + 1) * count / CLUSTER};
}

// --- weights that are not yet as boxes want them ---------------------------------------------------------------------

// They become channels-last, or [channel of the result][tap][channel of the source], where a forward's are not `turned`.
// A matrix has DEPTH rows, whose columns of MATRIX get these side by side. To channels-last the weight (first, second, kernel) has one of (second
// x kernel) for each `first`; else it is one, first x (second, kernel). A block turns `pack_rows` x `pack_columns` of it in shared memory. The
// weight is contiguous, or channels-last, whose taps are `tap_step` elements apart.
static constexpr bool ONE = C::forward && !C::turned;
static constexpr int MATRIX = ONE ? C::cout * C::taps : C::taps, DEPTH = C::turned ? C::cout : C::cin;

// To shared memory; ALONG: by channels, which lie side by side, else by columns.
template <bool ALONG, class Weight>
static __device__ __forceinline__ void bring_weights(u32 (&turned)[C::pack_columns][C::pack_rows + 1], const Weight* from, int channel, int column, int tap_step) {
  constexpr int COUNT = C::pack_rows * C::pack_columns, LOADS = (COUNT + PACK_THREADS - 1) / PACK_THREADS;
  Weight v[LOADS];  // all under way at once: a branch around each would keep them apart. What is not there is loaded from elsewhere
#pragma unroll
  for (int j = 0; j < LOADS; j++) {
    const u32 i = j * PACK_THREADS + threadIdx.x;
    const int row = min(channel + int(ALONG ? i % C::pack_rows : i / C::pack_columns), DEPTH - 1);
    const int at = min(column + int(ALONG ? i / C::pack_rows : i % C::pack_columns), MATRIX - 1);
    v[j] = from[ALONG ? at * tap_step + row : (long long)row * MATRIX + at];
  }
#pragma unroll
  for (int j = 0; j < LOADS; j++) {
    const u32 i = j * PACK_THREADS + threadIdx.x;
    if (i >= COUNT) continue;
    turned[ALONG ? i / C::pack_rows : i % C::pack_columns][ALONG ? i % C::pack_rows : i / C::pack_columns] = operand<C::precision>(v[j]);
  }
}

template <class Weight>
static __device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  constexpr int ACROSS = (MATRIX + C::pack_columns - 1) / C::pack_columns, DOWN = (DEPTH + C::pack_rows - 1) / C::pack_rows;
  __shared__ u32 turned[C::pack_columns][C::pack_rows + 1];
  let_dependent_begin();
  const int part = blockIdx.x / ACROSS, column = blockIdx.x % ACROSS * C::pack_columns, channel = part % DOWN * C::pack_rows, matrix = part / DOWN;
  const Weight* from = weight + (long long)matrix * (DEPTH * MATRIX);
  if (!ONE && tap_step != 1) bring_weights<true>(turned, from, channel, column, tap_step);
  else bring_weights<false>(turned, from, channel, column, tap_step);
  __syncthreads();
  constexpr int UNITS = C::pack_rows * C::pack_columns / VEC;
#pragma unroll
  for (int j = 0; j < (UNITS + PACK_THREADS - 1) / PACK_THREADS; j++) {
    const u32 i = j * PACK_THREADS + threadIdx.x;
    const int of = i / (C::pack_rows / VEC), at = column + of, first = i % (C::pack_rows / VEC) * VEC;
    if (i >= UNITS || at >= MATRIX || channel + first >= DEPTH) continue;
    u32 v[VEC];
#pragma unroll
    for (int e = 0; e < VEC; e++) v[e] = turned[of][first + e];
    const long long row = ONE && tap_step != 1 ? at % C::cout * C::taps + at / C::cout : (long long)matrix * MATRIX + at;
    write_operands(packed + (row * DEPTH + channel + first) * ELEMENT, v);
  }
}

// --- producer: one thread --------------------------------------------------------------------------------------------

struct Loader {
  const Work<Implicit>& work;
  u32 bytes;                                            // of a stage
  Tile tile;

  __device__ __forceinline__ explicit Loader(const Work<Implicit>& work) : work(work) {
    const Sizes& s = work.sizes;
    bytes = (s.box_n * s.box_d * s.box_h * s.box_w + COLUMNS) * ROW_BYTES;
    wait_for_results();                                 // of `pack`
  }

  __device__ __forceinline__ Steps begin(int index) {
    tile = tile_at(index, work.sizes);
    return steps_of(tile);
  }

  __device__ __forceinline__ void load(int step, u32 to, u32 barrier) const {
    const int tap = step / CHUNKS, channel = step % CHUNKS * CK;
    expect_bytes(barrier, bytes);
    load_box(to, work.maps.source, channel, tile.w * C::step_w + constant_at<C::taps_w>(tap), tile.h * C::step_h + constant_at<C::taps_h>(tap),
             tile.d * C::step_d + constant_at<C::taps_d>(tap), tile.n, barrier);
    int kernel_tap = tap;
    if constexpr (PHASES > 1) kernel_tap = constant_at<C::kernel_taps>(tap);
    if constexpr (C::turned) {
#pragma unroll
      for (int j = 0; j < COLUMNS / 64; j++)
        load_box(to + PIXEL_BYTES + j * (CK * 128), work.maps.weights, tile.column + 64 * j, kernel_tap, channel, 0, 0, barrier);
    } else {
      load_box(to + PIXEL_BYTES, work.maps.weights, channel, kernel_tap, tile.column, 0, 0, barrier);
    }
  }
};

static __device__ __forceinline__ void produce(const Work<Implicit>& work) {
  if (threadIdx.x == 0) ::produce<Implicit>(work, Loader(work));
}

// --- consumers -------------------------------------------------------------------------------------------------------

// Of pixels' rows, and of the weights': ROW_BYTES each, swizzled, one behind the other. Turned weights have rows of 64 channels of the
// result, swizzled; those of the next 64 are a chunk's rows away.
static __device__ __forceinline__ u64 descriptor(u32 start) { return ROWS_OF<ROW_BYTES> | (start | 1u << 16); }
static __device__ __forceinline__ u64 descriptor_of_weights(u32 start) {
  return C::turned ? ROWS_OF<128> | (start | (u32)(CK * 128 >> 4) << 16) : descriptor(start);
}

// acc += a stage's pixels x its weights, both as descriptors have them.
static __device__ __forceinline__ void multiply_stage(Sums& acc, u32 pixels, u32 weights) {
  constexpr int B_STEP = C::turned ? 16 * 128 / 16 : 2;  // from a matrix instruction's rows to the next one's, in units
  u32 a = uniform(pixels & 0x3fff), b = uniform(weights & 0x3fff);  // of a cluster's blocks addresses have more bits
#pragma unroll
  for (int k = 0; k < K_STEPS; k++)
#pragma unroll
    for (int m = 0; m < MB; m++)
      WgmmaOf<COLUMNS>::template multiply<C::precision, false, C::turned, true>(
          acc[m], descriptor(a + m * (64 * ROW_BYTES / 16) + k * 2), descriptor_of_weights(b + k * B_STEP));
}

struct Consumer {
  const Work<Implicit>& work;
  int wg, thread, turn, first;                          // first: of a tile's rows, the consumer's

  __device__ __forceinline__ Consumer(const Work<Implicit>& work, int wg, int thread) : work(work), wg(wg), thread(thread), turn(0) {
    first = TURNS ? 0 : wg * (64 * MB);
    if (TURNS && wg == CONSUMERS - 1) named_arrive(1, 256);  // the first turn is consumer 0's
  }

  __device__ __forceinline__ u32 at(u32 stage) const { return stage; }
  __device__ __forceinline__ Steps steps(int tile) const {
    Steps found = steps_of(tile_at(tile, work.sizes));
    if (PHASES > 1) OPAQUE(found.end);                  // kept, not loaded again for each step
    return found;
  }
  // Whether the next tile is the consumer's.
  __device__ __forceinline__ bool takes() {
    const bool mine = turn == wg;
    turn = turn + 1 == CONSUMERS ? 0 : turn + 1;
    return mine;
  }
  __device__ __forceinline__ void begin(Sums& acc, int tile) const {
    // Of a cluster the first block's sums begin with the bias.
    begin_sums<Implicit>(acc[0], rank() == 0 ? work.bias : nullptr, tile_at(tile, work.sizes).column + thread % 4 * 2);
#pragma unroll
    for (int i = SUMS_OF_M; i < MB * SUMS_OF_M; i++) {
      acc[i / SUMS_OF_M][i % SUMS_OF_M] = acc[0][i % SUMS_OF_M];
      opaque(acc[i / SUMS_OF_M][i % SUMS_OF_M]);
    }
    if (TURNS) named_sync(1 + wg, 256);
  }
  __device__ __forceinline__ void pass_turn() const { named_arrive(1 + (wg + 1 == CONSUMERS ? 0 : wg + 1), 256); }
  __device__ __forceinline__ void multiply(Sums& acc, u32 at, u32 held) const {
    wgmma_fence();
    const u32 stage = at >> 4;
    multiply_stage(acc, stage + first * (ROW_BYTES / 16), stage + PIXEL_BYTES / 16);
    wgmma_commit();
    wgmma_wait<HOLDS>();
    if (HOLDS) give_back(held, thread & 31);
  }

  // Where row `row` of a tile is in the result, or nowhere.
  __device__ __forceinline__ char* place_of(const Tile& t, int row, bool& there) const {
    const Sizes& s = work.sizes;
    int w = row % s.box_w, rest = row / s.box_w, h = rest % s.box_h;
    rest /= s.box_h;
    int d = rest % s.box_d, n = rest / s.box_d;
    there = n < s.box_n;
    n += t.n, d += t.d, h += t.h, w += t.w;
    if constexpr (PHASES > 1) {
      d = d * C::out_step_d + constant_at<C::phases_d>(t.phase);
      h = h * C::out_step_h + constant_at<C::phases_h>(t.phase);
      w = w * C::out_step_w + constant_at<C::phases_w>(t.phase);
    }
    there = there && n < s.out_n && d < s.out_d && h < s.out_h && w < s.out_w;
    return work.y + ((((long long)n * s.out_d + d) * s.out_h + h) * s.out_w + w) * (C::cout * ELEMENT) + t.column * ELEMENT;
  }

  // Of a cluster: where sums are in shared memory, four of a thread's.
  __device__ __forceinline__ u32 sums_at(int i) const { return work.memory + (i * (CONSUMERS * 128) + wg * 128 + thread) * 16; }

  // Sums to shared memory, where all blocks of the cluster find them.
  __device__ __forceinline__ void publish(const Sums& acc) const {
    named_sync<4, CONSUMERS * 128>();                   // nobody reads a stage any more
#pragma unroll
    for (int i = 0; i < MB * COLUMNS / 8; i++) {
      const float* v = &acc[i / (COLUMNS / 8)][i % (COLUMNS / 8) * 4];
      store_shared_f32x4(sums_at(i), v[0], v[1], v[2], v[3]);
    }
    cluster_sync();
  }

  // Four sums of all blocks, in the order of their rank.
  __device__ __forceinline__ void add_up(Sums& acc, int i) const {
    float v[CLUSTER][4];
#pragma unroll
    for (int rank = 0; rank < CLUSTER; rank++) load_cluster_128(v[rank], sums_at(i), rank);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float sum = v[0][e];
#pragma unroll
      for (int rank = 1; rank < CLUSTER; rank++) sum += v[rank][e];
      acc[i / (COLUMNS / 8)][i % (COLUMNS / 8) * 4 + e] = sum;
    }
  }

  __device__ __forceinline__ void store(Sums& acc, int tile) const {
    const Tile t = tile_at(tile, work.sizes);
    const int lane = thread & 31;
    if constexpr (CLUSTER > 1) publish(acc);
#pragma unroll
    for (int m = 0; m < MB; m++) {
      const int row = first + m * 64 + (thread >> 5) * 16 + (lane >> 2);
      bool there[2];
      char* pixel[2];
#pragma unroll
      for (int eight = 0; eight < 2; eight++) pixel[eight] = place_of(t, row + eight * 8, there[eight]);
#pragma unroll
      for (int i = 0; i < Stores::UNITS; i++) {
        if constexpr (CLUSTER > 1) {
          constexpr int QUADS = Stores::UNIT / 8;
          if ((m * Stores::UNITS + i) % CLUSTER != rank()) continue;
#pragma unroll
          for (int j = 0; j < QUADS; j++) add_up(acc, (m * Stores::UNITS + i) * QUADS + j);
        }
#pragma unroll
        for (int eight = 0; eight < 2; eight++) Stores::store(acc[m], i, eight, pixel[eight], C::cout - t.column, there[eight], lane);
      }
    }
    if constexpr (CLUSTER > 1) cluster_sync();          // none reads this block's any more
  }
};
};
