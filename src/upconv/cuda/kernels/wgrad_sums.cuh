// How blocks of wgrad_wgmma.cu that have all splits of a tile between them write the weight's gradient from their sums in shared memory,
// as a CLUSTER, TOGETHER through global memory, or ALONE, or (BY_ROWS) from registers. Sums of
// splits are added in the order of `reduce`, to the same bits; those that are handed over (wgrad_handover.cuh) are of other ranges.

struct Gradient {                          // for the weight: of float32 (`wide`) or the operands' type
  char* at;
  long long stride_ci, stride_co, stride_tap;
  int wide;
};

// V neighbours in memory, which begin at V elements.
template <int V>
__device__ __forceinline__ void store_some(const Gradient& out, long long to, const float (&v)[V]) {
#if ELEMENT == 2
  if (!out.wide) {
    u32 words[(V + 1) / 2];
#pragma unroll
    for (int i = 0; i < V; i++) {
      u32 one = STORE_BITS(v[i]);
      words[i / 2] = i % 2 ? words[i / 2] | one << 16 : one;
    }
    bits* at = (bits*)out.at + to;
    if constexpr (V == 4) *(uint2*)at = make_uint2(words[0], words[1]);
    else if constexpr (V == 2) *(u32*)at = words[0];
    else *at = (bits)words[0];
    return;
  }
#endif
  float* at = (float*)out.at + to;
  if constexpr (V == 4) *(float4*)at = make_float4(v[0], v[1], v[2], v[3]);
  else if constexpr (V == 2) *(float2*)at = make_float2(v[0], v[1]);
  else *at = v[0];
}

// Where the weight has the block's tap, and its channels `ci` and `co`; negative: nowhere.
__device__ __forceinline__ long long place_of(const Gradient& out, const Work& work, int tap, int ci, int co) {
  int kd = work.tap_d + tap / (TAPS_H * TAPS_W), kh = work.tap_h + tap / TAPS_W % TAPS_H, kw = work.tap_w + tap % TAPS_W;
  ci += work.ci, co += work.co;
  bool exists = ci < CIN_G && co < COUT_G && kd < KERNEL_D && kh < KERNEL_H && kw < KERNEL_W;
  return exists ? (work.group * CIN_G + ci) * out.stride_ci + co * out.stride_co + ((kd * KERNEL_H + kh) * KERNEL_W + kw) * out.stride_tap : -1;
}

#if BY_ROWS
#define ROW_PITCH (64 * ELEMENT + 16)      // bytes of 64 output channels, so that eight rows meet all banks

// Whether the weight has output channels innermost, which begin at 16 bytes.
__device__ __forceinline__ bool has_rows(const Gradient& out) {
  const bool by_16 = ((u32)(u64)out.at & 15) == 0 && ((u32)(out.stride_ci | out.stride_tap) & 7) == 0 && COUT_G % 8 == 0;
  return by_16 && !out.wide && out.stride_co == 1;
}

// A warpgroup's unit to a weight that has output channels innermost, by rows of 64 of them, 16 bytes a thread.
__device__ __forceinline__ void put_rows(const Gradient& out, const Work& work, const float (&sums)[N_WIDTH / 2], u32 rows, int tap, int co, int wg, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  const u32 to = rows + ((lane >> 4) * 8 + (lane & 7)) * ROW_PITCH + warp * 32 + (lane >> 3 & 1) * 16;
#pragma unroll
  for (int j = 0; j < N_WIDTH / 8; j += 2) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float a = sums[4 * j + 2 * i], b = sums[4 * j + 2 * i + 1];
      words[i] = STORE_BITS(a) | STORE_BITS(b) << 16;
    }
    store_matrices_turned(to + j * 8 * ROW_PITCH, words);
  }
  named_sync(3 + wg, 128);
  const int unit = thread % 8;
  const long long first = place_of(out, work, tap, 0, co + unit * 8);
  if (first < 0) return;
#pragma unroll 8
  for (int row = thread / 8; row < BLOCK_CI; row += 16) {
    u32 v[4];
    load_shared_128(v, rows + row * ROW_PITCH + unit * 16);
    if (work.ci + row < CIN_G) *(uint4*)(out.at + (first + row * out.stride_ci) * ELEMENT) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}
#endif

#if TOGETHER
// The blocks of a tile: what they have written when they meet is seen by all of them behind it.
struct Peers {
  const char* sums;                        // of the first of them; each has SUMS_BYTES, `apart` bytes from one to the next
  long long apart;
  int count;
};

// One thread of each block: its sums are there to be read; those of all `count` are. `counters` [arrived, left] are zeros, which the last
// to leave leaves.
__device__ __forceinline__ void arrive_at(u32* counters) {
  __threadfence();
  atomicAdd(counters, 1);
}
__device__ __forceinline__ void wait_at(u32* counters, u32 count) {
  while (load_acquire(counters) < count) {}
  if (atomicAdd(counters + 1, 1) == count - 1) counters[0] = counters[1] = 0;
}

// A block's sums from shared memory to its place in global memory; then it waits for its peers'.
__device__ __forceinline__ void publish(char* own, u32 sums, u32* counters, const Peers& peers, int thread) {
  fence_async_shared();
  named_sync<2, WGS * 128>();              // all have stored theirs
  if (thread == 0) {
    store_bulk<SUMS_BYTES>(own, sums);
    bulk_commit();
    bulk_wait();
    fence_async();
    arrive_at(counters);
    wait_at(counters, peers.count);
  }
  named_sync<2, WGS * 128>();
}
#else
struct Peers {                             // a cluster, or a block alone
  static constexpr int count = CLUSTER;
};
#endif

// Four of a split's sums.
__device__ __forceinline__ void load_sums(float (&v)[4], const Peers& peers, u32 sums, int at, int split) {
#if TOGETHER
  float4 found = __ldcg((const float4*)(peers.sums + split * peers.apart + at));
  v[0] = found.x, v[1] = found.y, v[2] = found.z, v[3] = found.w;
#elif ALONE
  u32 words[4];
  load_shared_128(words, sums + at);
#pragma unroll
  for (int e = 0; e < 4; e++) v[e] = __uint_as_float(words[e]);
#else
  load_cluster_128(v, sums + at, split);
#endif
}

#define THREADS_ADDING (WGS * 128)
#define PARTS (TOGETHER && REDUCE_ROWS == 1 ? RUNS : 1)  // ranges of splits that are sums of their own, as the warps of `reduce` have them

// The sum of all splits' quad `at`, in the order of `reduce`; LANES of a warp have a part each, of which lane 0 then has the sum.
template <int LANES>
__device__ __forceinline__ void add_splits(float (&sum)[4], const Peers& peers, u32 sums, int at, int lane) {
  constexpr int BATCH = TOGETHER ? 8 : CLUSTER;  // splits whose loads are on their way at a time
  const int run = (peers.count + PARTS - 1) / PARTS;
#pragma unroll 1
  for (int part = lane; part < PARTS; part += LANES) {
    const int begin = part * run, end = begin + run < peers.count ? begin + run : peers.count;
    float own[4] = {};
    for (int split = begin; split < end; split += BATCH) {
      float v[BATCH][4] = {};
#pragma unroll
      for (int k = 0; k < BATCH; k++)
        if (!TOGETHER || split + k < end) load_sums(v[k], peers, sums, at, split + k);
#pragma unroll
      for (int k = 0; k < BATCH; k++)
#pragma unroll
        for (int e = 0; e < 4; e++) own[e] += v[k][e];
    }
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] = part ? sum[e] + own[e] : own[e];
  }
  if (LANES > 1) {
    const u32 lanes = 0xffu << (threadIdx.x & 24);  // a quad's eight
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float part = sum[e];
      sum[e] = __shfl_sync(lanes, part, 0, LANES);
#pragma unroll
      for (int other = 1; other < LANES; other++) sum[e] += __shfl_sync(lanes, part, other, LANES);
    }
  }
}

// A quad's sum to the weight, where that has output channels innermost (`by_co`); else to shared memory.
__device__ __forceinline__ void put_quad(const Gradient& out, const Work& work, const float (&sum)[4], long long to, u32 at, int co, bool by_co) {
  if (by_co && COUT_G % 4 == 0) {
    store_some(out, to, sum);
  } else if (by_co) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float one[1] = {sum[e]};
      if (work.co + co + e < COUT_G) store_some(out, to + e, one);
    }
  } else {
    store_shared_128(at, __float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3]));
  }
}

// Neighbouring taps of a row of the kernel, or of several whole ones, which lie side by side in contiguous weights.
#define NEAR (TAPS_W == KERNEL_W ? TAPS_H * TAPS_W : TAPS_W)
#define OF_KERNEL (TAPS_W == KERNEL_W ? KERNEL_H * KERNEL_W : KERNEL_W)
#define NEAR_TAPS (NEAR % 4 == 0 && OF_KERNEL % 4 == 0 ? 4 : NEAR % 2 == 0 && OF_KERNEL % 2 == 0 ? 2 : 1)
#define RUNS_OF_TAPS (SET_TAPS / NEAR_TAPS)

__device__ __forceinline__ void put_taps(const Gradient& out, u32 sums, long long to, int tap, int ci, int co) {
  float v[NEAR_TAPS];
#pragma unroll
  for (int e = 0; e < NEAR_TAPS; e++) v[e] = load_shared_f32(sums + SUM_AT(tap + e, ci, co));
  store_some(out, to, v);
}

#define QUADS (BLOCK_CO / 4)

#if TOGETHER
// A block's share of its tile's sums, some quads of all taps: so that with many splits all blocks add.
template <int LANES>
__device__ __forceinline__ void add_quads(const Gradient& out, const Work& work, const Peers& peers, u32 sums, int first, int quads, bool by_co, int thread) {
#pragma unroll 1
  for (int i = thread; i < SET_TAPS * quads * LANES; i += THREADS_ADDING) {
    const int lane = i % LANES, quad = first + i / LANES % quads, tap = i / (LANES * quads), ci = quad / QUADS, co = quad % QUADS * 4;
    float sum[4] = {};
    add_splits<LANES>(sum, peers, sums, SUM_AT(tap, ci, co), lane);
    const long long to = place_of(out, work, tap, ci, co);
    if (lane == 0 && to >= 0) put_quad(out, work, sum, to, sums + SUM_AT(tap, ci, co), co, by_co);
  }
}

__device__ __forceinline__ void add_up(const Gradient& out, const Work& work, const Peers& peers, u32 sums, int rank, int thread) {
  const int share = (BLOCK_CI * QUADS + peers.count - 1) / peers.count, first = rank * share, left = BLOCK_CI * QUADS - first, quads = left < share ? left : share;
  const bool by_co = out.stride_co == 1;   // what memory has innermost; else taps
  // Lanes that divide a quad's parts where quads are few; else each thread adds them all.
  if (PARTS > 1 && SET_TAPS * share <= THREADS_ADDING / 2) add_quads<PARTS>(out, work, peers, sums, first, quads, by_co, thread);
  else add_quads<1>(out, work, peers, sums, first, quads, by_co, thread);
  if (by_co) return;
  named_sync<2, WGS * 128>();
#pragma unroll 4
  for (int i = thread; i < RUNS_OF_TAPS * quads * 4; i += THREADS_ADDING) {
    const int tap = i % RUNS_OF_TAPS * NEAR_TAPS, of_quads = i / RUNS_OF_TAPS, quad = first + of_quads / 4;
    const int ci = quad / QUADS, co = quad % QUADS * 4 + of_quads % 4;
    const long long to = place_of(out, work, tap, ci, co);
    if (to >= 0) put_taps(out, sums, to, tap, ci, co);
  }
}
#else
// A block's share, some rows of ci. A thread keeps its taps and output channels, so that a row is an addition away: a place
// computed for each quad takes three times as long.
__device__ __forceinline__ void add_up(const Gradient& out, const Work& work, const Peers& peers, u32 sums, int rank, int thread) {
  constexpr int SHARE = (BLOCK_CI + CLUSTER - 1) / CLUSTER;
  const int first = rank * SHARE, left = (CIN_G - work.ci < BLOCK_CI ? CIN_G - work.ci : BLOCK_CI) - first, rows = left < SHARE ? left : SHARE;
  const bool by_co = out.stride_co == 1;   // what memory has innermost; else taps
#if CLUSTER > 1
  cluster_sync();                          // all have stored theirs
#else
  named_sync<2, WGS * 128>();
#endif
  constexpr int ITEMS = SET_TAPS * QUADS, EACH = ITEMS < THREADS_ADDING ? ITEMS : THREADS_ADDING, AT_ONCE = THREADS_ADDING / EACH;
  if (thread < AT_ONCE * EACH && (CLUSTER > 1 || by_co)) {
#pragma unroll 1
    for (int i = thread % EACH; i < ITEMS; i += EACH) {
      const int co = i % QUADS * 4, tap = i / QUADS;
      const long long to = place_of(out, work, tap, first, co);
      if (to < 0) continue;
#pragma unroll 4
      for (int row = thread / EACH; row < rows; row += AT_ONCE) {
        float sum[4] = {};
        add_splits<1>(sum, peers, sums, SUM_AT(tap, first + row, co), 0);
        put_quad(out, work, sum, to + row * out.stride_ci, sums + SUM_AT(tap, first + row, co), co, by_co);
      }
    }
  }
#if CLUSTER > 1
  cluster_sync();                          // none reads another's any more; and this block's are complete
#endif
  if (by_co) return;
  constexpr int ITEMS_OF_TAPS = RUNS_OF_TAPS * BLOCK_CO, EACH_OF_TAPS = ITEMS_OF_TAPS < THREADS_ADDING ? ITEMS_OF_TAPS : THREADS_ADDING, ROWS_AT_ONCE = THREADS_ADDING / EACH_OF_TAPS;
  if (thread >= ROWS_AT_ONCE * EACH_OF_TAPS) return;
#pragma unroll 1
  for (int i = thread % EACH_OF_TAPS; i < ITEMS_OF_TAPS; i += EACH_OF_TAPS) {
    const int tap = i % RUNS_OF_TAPS * NEAR_TAPS, co = i / RUNS_OF_TAPS;
    const long long to = place_of(out, work, tap, first, co);
    if (to < 0) continue;
#pragma unroll 4
    for (int row = thread / EACH_OF_TAPS; row < rows; row += ROWS_AT_ONCE) put_taps(out, sums, to + row * out.stride_ci, tap, first + row, co);
  }
}
#endif
