// HANDOVER: blocks of two splits of K that exchange half of a tile's sums while they multiply. Both take all of a tile's units until
// HANDED chunks, those in the middle of K, are left. Then each hands its sums of half of the units over, through global memory, and
// multiplies these chunks for its own units alone, whose sums it gets from the other block meanwhile; so that behind the last chunk it
// has half of the tile's sums, whole, in registers, and writes them to the weight.
//
// Blocks meet as a cluster, or in a cooperative launch. The latter is faster, since the order of its blocks is free (`tile_of`): neighbours
// have the same pixels of g, which are more than x's. With 8 chunks and more the second-level cache is late, since such a chunk brings x
// for half of the products.
//
// A warpgroup has two units; the first of these, by the block's `rank`, is its own. Two blocks are a cluster, or all blocks run at once
// (TOGETHER) and meet by counters, as wgrad_sums.cuh has it.
#define HANDED 4
#define HANDED_WORDS (WGS * 128 * (N_WIDTH / 2))  // of a block

// A block's chunks: `whole` ones, then those `handed`, which both blocks have.
struct Halves {
  int whole, handed, rank;
  __device__ __forceinline__ Halves(int chunks, int rank) : rank(rank) {
    handed = HANDED + (chunks & 1);        // so that the others are even
    if (handed > chunks) handed = chunks;
    whole = (chunks - handed) / 2;
  }
  __device__ __forceinline__ int count() const { return whole + handed; }
  __device__ __forceinline__ int chunk(int i) const { return rank && i < whole ? i + count() : i; }
};

// Where a tile lies: of neighbours (of one set of taps) four have two blocks of channels of each operand between them, sixteen four, and
// sixty-four eight, where channels have so many. So, TOGETHER, two of a pair of multiprocessors share g; those of a cluster are the two
// halves of K, and share nothing.
__device__ __forceinline__ void tile_of(int index, int& ci, int& co) {
  int ci_left = CI_TILES, co_left = CO_TILES, ci_unit = 1, co_unit = 1;
  ci = co = 0;
#pragma unroll
  for (int level = 0; level < 3; level++) {
    if (ci_left % 2 == 0) {
      ci += index % 2 * ci_unit;
      index /= 2, ci_left /= 2, ci_unit *= 2;
    }
    if (co_left % 2 == 0) {
      co += index % 2 * co_unit;
      index /= 2, co_left /= 2, co_unit *= 2;
    }
  }
  co += index % co_left * co_unit;
  ci += index / co_left % ci_left * ci_unit;
}

#if PARTED && G_PLANES == 2 && TAPS_W % 2 == 0
#define OWN_PLANES 1                       // the columns of a unit, by its parity
#else
#define OWN_PLANES G_PLANES
#endif

// A chunk of x, and of g what a block's own units take.
__device__ __forceinline__ void load_own(const TensorMap* map_x, const TensorMap* map_g, const Chunk& c, const Work& work, int rank, u32 to, u32 barrier) {
  expect_bytes(barrier, X_TILE_BYTES + G_ROWS * OWN_PLANES * PLANE_COLUMNS * BLOCK_CO * ELEMENT);
  load_x(map_x, c, work.group * CIN_G + work.ci, to, barrier);
  const int channel = work.group * COUT_G + work.co;
  to += X_TILE_BYTES;
  const int d = c.d * STEP_D + work.tap_d * DIL_D - PAD_D, h = c.h * STEP_H + work.tap_h * DIL_H - PAD_H, w = c.w * STEP_W + work.tap_w * DIL_W - PAD_W;
#pragma unroll 1
  for (int i = 0; i < G_BOXES * OWN_PLANES; i++) {
    const int plane = OWN_PLANES < G_PLANES ? rank : i % OWN_PLANES, box = i / OWN_PLANES;
    load_box(to + box * G_SLAB_BYTES + plane * PLANE_BYTES, *map_g, channel + box * G_WIDTH, w + plane * DIL_W, h, d, c.n, barrier);
  }
}

// The thread that loads.
__device__ __forceinline__ void produce_halves(const TensorMaps& maps, const Sizes& s, const Work& work, int rank, u32 base, u32 full, u32 empty) {
  const Halves halves(s.chunks, rank);
  u32 stage = 0, parity = 1;
#pragma unroll 1
  for (int i = 0; i < halves.count(); i++) {
    const Chunk c = chunk_at(halves.chunk(i), s);
    const u32 to = base + stage * STAGE_BYTES, barrier = full + stage * 8;
    barrier_wait(empty + stage * 8, parity);
    if (i < halves.whole) load_boxes(&maps.x, maps.g, s, c, work, to, barrier);
    else load_own(&maps.x, maps.g, c, work, rank, to, barrier);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// A warpgroup on its way over its chunks.
struct Way {
  int i;                                   // the chunk
  u32 stage, parity;
};

// A chunk by the first of a warpgroup's units, or by both.
template <int OF_UNITS>
__device__ __forceinline__ void multiply_chunk(float (&acc)[UNITS][NB][N_WIDTH / 2], Way& way, const unsigned char* memory, const Taps& taps, const Sizes& s, u32 full, u32 empty, int lane_first, int lane) {
  const unsigned char* tile = memory + way.stage * STAGE_BYTES;
  const u32 x_tile = shared_address(tile);
  barrier_wait(full + way.stage * 8, way.parity);
  wgmma_fence();
#pragma unroll 1
  for (int run = 0; run < STEPS / STRETCH; run++) {
    u32 a[4];
    const int first = run * (STRETCH / ENTRIES);
    const Half from = step_of(first).half[0];
    const unsigned char* g_tile = tile + X_TILE_BYTES + from.row * G_ROW_BYTES;
    const int lane_from = lane_first + from.column * G_PIXEL_BYTES;
    const u32 x_from = x_tile + x_at(first);
#pragma unroll
    for (int step = 0; step < STRETCH; step++) {
      const int e = step % ENTRIES, k = step / ENTRIES;
      if (e >= OF_UNITS) continue;
      load_fragment(a, g_tile, taps, s, Phases{}, e, step_of(k), lane_from);
      multiply(acc[e], 0, 1, a, x_from + x_at(k));
    }
  }
  wgmma_commit();
  wgmma_wait<1>();                         // the chunk before is done with
  if (way.i > 0 && lane == 0) barrier_arrive(empty + (way.stage ? way.stage - 1 : STAGES - 1) * 8);
  if (++way.stage == STAGES) {
    way.stage = 0;
    way.parity ^= 1;
  }
  way.i++;
}

// A block's own units, from shared memory to any weight.
__device__ __forceinline__ void put_own(const Gradient& out, const Work& work, u32 sums, int rank, int thread) {
  constexpr int ITEMS = SET_UNITS / UNITS * QUADS, AT_ONCE = THREADS_ADDING / ITEMS;
  const int item = thread % ITEMS, co = item % QUADS * 4, tap = item / QUADS * UNITS + rank;
  const int rows = CIN_G - work.ci < BLOCK_CI ? CIN_G - work.ci : BLOCK_CI;
  const bool by_co = out.stride_co == 1;
  const long long to = place_of(out, work, tap, 0, co);
  if (to < 0) return;
#pragma unroll 4
  for (int row = thread / ITEMS; row < rows; row += AT_ONCE) {
    u32 words[4];
    load_shared_128(words, sums + SUM_AT(tap, row, co));
    const float sum[4] = {__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]), __uint_as_float(words[3])};
    if (by_co) {
      put_quad(out, work, sum, to + row * out.stride_ci, 0, co, true);
      continue;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float one[1] = {sum[e]};
      if (work.co + co + e < COUT_G) store_some(out, to + row * out.stride_ci + e * out.stride_co, one);
    }
  }
}

// `handed`: HANDED_WORDS in global memory of each block; `other` is the block they are exchanged with.
__device__ __forceinline__ void consume_halves(const Gradient& out, const Work& work, float4* handed, u32* counters, const Sizes& s, u32 full, u32 empty, u32 met, const unsigned char* memory, int rank, int other, int wg, int thread) {
  const int warp = thread >> 5, lane = thread & 31, row = lane >> 2, q = lane & 3;
  const int wg_m = wg % WGS_M, first_unit = wg / WGS_M * UNITS;
  Taps taps;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int unit = first_unit + (u ^ rank), td = unit / (SET_UNITS / TAPS_D), th = unit / TAPS_W % TAPS_H, tw = unit % TAPS_W;
    const int shift = (DENSE_D ? td * (DIL_D / APART_D) : td) * CLASS_ROWS + (DENSE_H ? th * (DIL_H / APART_H) : th);
#if PARTED
    taps.at[u] = shift * G_LINE + tw % G_PLANES * (PLANE_BYTES / G_PIXEL_BYTES) + tw / G_PLANES * PLANE_TAPS;
#else
    taps.at[u] = shift * G_LINE + tw * DIL_W;
#endif
  }
  const int lane_first = wg_m * G_SLAB_BYTES;
  float acc[UNITS][NB][N_WIDTH / 2] = {};
  const Halves halves(s.chunks, rank);
  Way way = {0, 0, 0};
#pragma unroll 1
  while (way.i < halves.whole) multiply_chunk<UNITS>(acc, way, memory, taps, s, full, empty, lane_first, lane);
  multiply_chunk<1>(acc, way, memory, taps, s, full, empty, lane_first, lane);  // which the tensor cores have while sums leave
  float (&passed)[N_WIDTH / 2] = acc[1][0];
  float4* to = handed + (long long)blockIdx.x * (HANDED_WORDS / 4) + wg * 128 + thread;
#pragma unroll
  for (int j = 0; j < N_WIDTH / 8; j++) to[j * (WGS * 128)] = make_float4(passed[4 * j], passed[4 * j + 1], passed[4 * j + 2], passed[4 * j + 3]);
#if TOGETHER
  named_sync<2, WGS * 128>();              // all have stored theirs
  if (wg == 0 && thread == 0) arrive_at(counters);
#else
  cluster_wait();                          // the other block's barriers are ready
  __syncwarp();
  if (lane == 0) barrier_arrive_cluster(met, rank ^ 1);
#endif
#pragma unroll 1
  while (way.i < halves.count() - 2) multiply_chunk<1>(acc, way, memory, taps, s, full, empty, lane_first, lane);
#if TOGETHER
  if (wg == 0 && thread == 0) wait_at(counters, 2);
  named_sync<2, WGS * 128>();
#else
  barrier_wait_cluster(met);
#endif
  const float4* from = handed + (long long)other * (HANDED_WORDS / 4) + wg * 128 + thread;
#pragma unroll
  for (int j = 0; j < N_WIDTH / 8; j++) {
    const float4 v = __ldcg(from + j * (WGS * 128));
    passed[4 * j] = v.x, passed[4 * j + 1] = v.y, passed[4 * j + 2] = v.z, passed[4 * j + 3] = v.w;
  }
#pragma unroll 1
  while (way.i < halves.count()) multiply_chunk<1>(acc, way, memory, taps, s, full, empty, lane_first, lane);
  wgmma_wait<0>();
  float (&sums)[N_WIDTH / 2] = acc[0][0];
#pragma unroll
  for (int j = 0; j < N_WIDTH / 2; j++) sums[j] += passed[j];
  named_sync<2, WGS * 128>();              // nobody reads a stage any more
  const u32 shared = shared_address(memory);
  if (has_rows(out)) {
    put_rows(out, work, sums, shared + wg * (BLOCK_CI * ROW_PITCH), first_unit + rank, wg_m * ROWS_PER_SUB, wg, thread);
    return;
  }
#pragma unroll
  for (int j = 0; j < N_WIDTH / 8; j++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 at = shared + SUM_AT(first_unit + rank, j * 8 + 2 * q, wg_m * ROWS_PER_SUB + warp * 16 + row + 8 * h);
      store_shared_f32(at, sums[4 * j + 2 * h]);
      store_shared_f32(at + SUMS_PITCH * 4, sums[4 * j + 2 * h + 1]);
    }
  named_sync<2, WGS * 128>();
  put_own(out, work, shared, rank, threadIdx.x - 128);
}
