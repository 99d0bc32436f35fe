// =====================================================================================================================
// Packing: weight (CIN, COUT_G, taps), for GRAD_INPUT (COUT, CIN_G, taps), to fragments [group][cout block][variant][chunk][entry][k step][part][wgs][warp][lane]
// =====================================================================================================================

#define PACK_SPLITS ((TAPS + PACK_TAPS - 1) / PACK_TAPS)  // blocks that share the taps
#if PACK_SPLITS > 8                                    // a warp's lanes read it at different places, which constant memory serves in turn
__device__
#else
__constant__
#endif
const short TAP_INDEX[] = TAP_INDICES;                 // [variant, block, tap][SUBS]: the kernel's tap, -1 for none

#if !WEIGHTS_BOX
// A part is 16 rows of M, those of a warp, for one step of K and PACK_TAPS taps. A block brings its weights to shared
// memory in the order of memory, then writes its quarter of each of these taps' fragments as one piece, two at a time.
#define PACK_THREADS 256
#define PACK_PITCH (PACK_TAPS | 1)                     // odd, so that a warp's rows and channels meet different banks
#define PACK_K (32 / ELEMENT)                          // input channels of a step
#define PACK_OUTER (GRAD_INPUT ? 16 : PACK_K)          // of a block along the weight's first dimension
#define PACK_INNER (GRAD_INPUT ? PACK_K : 16)          // and along its second
#define PACK_PLANE ((GRAD_INPUT ? CIN_G : COUT_G) * TAPS)  // elements from one index of its first dimension to the next
#define QUARTER (FRAGMENT / 4 / 4)                     // words
#if SHUFFLED
#define BIASES LAYER_CHANNELS
#else
#define BIASES COUT
#endif

#if ELEMENT == 2                                       // weights may be float32, rounded on their way
#define WEIGHT Weight
__device__ __forceinline__ ELEMENT_TYPE as_element(ELEMENT_TYPE v) { return v; }
__device__ __forceinline__ ELEMENT_TYPE as_element(float v) { return STORE_BITS(v); }
#else
#define WEIGHT ELEMENT_TYPE
#endif

// A block's weights to shared memory, [row of M][channel][tap]; `outer`, `inner` and `taps` of them exist. A warp takes
// an index of the first dimension, whose elements it reads in the order of memory: taps innermost, or (LAST) channels,
// with taps `tap_step` apart.
#if ELEMENT == 2
template <bool LAST, class Weight>
#else
template <bool LAST>
#endif
__device__ __forceinline__ void bring_weights(ELEMENT_TYPE* tile, const WEIGHT* __restrict__ from, int outer, int inner, int taps, int tap_step, int thread) {
  constexpr int COUNT = PACK_INNER * PACK_TAPS;
#pragma unroll
  for (int j = 0; j < PACK_OUTER / (PACK_THREADS / 32); j++) {
    int o = thread / 32 + j * (PACK_THREADS / 32);
#pragma unroll 16  // loads in flight
    for (int k = 0; k < (COUNT + 31) / 32; k++) {
      int e = thread % 32 + k * 32, i = LAST ? e % PACK_INNER : e / PACK_TAPS, tap = LAST ? e / PACK_INNER : e % PACK_TAPS;
      if (COUNT % 32 && e >= COUNT) break;
      bool exists = o < outer && i < inner && (TAPS % PACK_TAPS == 0 || tap < taps);
#if ELEMENT == 2
      tile[(GRAD_INPUT ? o * PACK_K + i : i * PACK_K + o) * PACK_PITCH + tap] = exists ? as_element(from[o * PACK_PLANE + (LAST ? i + tap * tap_step : i * TAPS + tap)]) : 0;
#else
      tile[(GRAD_INPUT ? o * PACK_K + i : i * PACK_K + o) * PACK_PITCH + tap] = exists ? from[o * PACK_PLANE + (LAST ? i + tap * tap_step : i * TAPS + tap)] : 0;
#endif
    }
  }
}

#if PACK_WIDE > 1
// The same of contiguous weights that begin at 16 bytes, of which each load brings several taps.
template <class Weight>
__device__ __forceinline__ void bring_wide(ELEMENT_TYPE* tile, const Weight* __restrict__ from, int outer, int inner, int taps, int thread) {
  constexpr int EACH = PACK_WIDE * sizeof(Weight) > 16 ? 16 / sizeof(Weight) : PACK_WIDE;
  constexpr int PIECES = PACK_TAPS / EACH, COUNT = PACK_INNER * PIECES;
  struct alignas(EACH * sizeof(Weight)) Piece { Weight tap[EACH]; };
#pragma unroll
  for (int j = 0; j < PACK_OUTER / (PACK_THREADS / 32); j++) {
    int o = thread / 32 + j * (PACK_THREADS / 32);
#pragma unroll 4  // loads in flight
    for (int k = 0; k < (COUNT + 31) / 32; k++) {
      int e = thread % 32 + k * 32, i = e / PIECES, tap = e % PIECES * EACH;
      if (COUNT % 32 && e >= COUNT) break;
      bool exists = o < outer && i < inner && (TAPS % PACK_TAPS == 0 || tap < taps);
      Piece piece = {};
      if (exists) piece = *(const Piece*)(from + (o * PACK_PLANE + i * TAPS + tap));
      ELEMENT_TYPE* to = tile + (GRAD_INPUT ? o * PACK_K + i : i * PACK_K + o) * PACK_PITCH + tap;
#pragma unroll
      for (int w = 0; w < EACH; w++)
#if ELEMENT == 2
        to[w] = as_element(piece.tap[w]);
#else
        to[w] = piece.tap[w];
#endif
    }
  }
}
#endif

#if SHUFFLED
// The same where rows of M are channels and phases: from the first weight of an input channel on, of which `outer` exist.
#if ELEMENT == 2
template <class Weight>
#endif
__device__ __forceinline__ void bring_shuffled(ELEMENT_TYPE* tile, const WEIGHT* __restrict__ from, int outer, int row, int begin, int tap_step, int thread) {
  for (int e = thread; e < 16 * PACK_K * PACK_TAPS; e += PACK_THREADS) {
    int tap = e % PACK_TAPS, o = e / PACK_TAPS % PACK_K, i = e / (PACK_TAPS * PACK_K);
    int at = o < outer && begin + tap < TAPS ? weight_at(row + i, begin + tap, tap_step) : -1;
    ELEMENT_TYPE v = 0;
#if ELEMENT == 2
    if (at >= 0) v = as_element(from[o * (LAYER_CHANNELS * LAYER_TAPS) + at]);
#else
    if (at >= 0) v = from[o * (LAYER_CHANNELS * LAYER_TAPS) + at];
#endif
    tile[(i * PACK_K + o) * PACK_PITCH + tap] = v;
  }
}
#endif

#if PACKS
#define PACK_SYNC() named_sync<9, CONSUMER_THREADS>()
#else
#define PACK_SYNC() __syncthreads()
#endif

// Weights are dense: contiguous, taps one element apart, or channels-last, `tap_step` elements.
#if ELEMENT == 2
template <class Weight>
#endif
__device__ __forceinline__ void pack_part(ELEMENT_TYPE* tile, const WEIGHT* __restrict__ weight, u32* __restrict__ packed, int tap_step, int rest, int thread) {
  int begin = rest % PACK_SPLITS * PACK_TAPS;  rest /= PACK_SPLITS;
  int warp = rest % 4;  rest /= 4;
  int wg = rest % WGS_M;  rest /= WGS_M;
  int k_step = rest % K_STEPS;  rest /= K_STEPS;
  int chunk = rest % CHUNKS, block = rest / CHUNKS, group = block / COUT_BLOCKS;
  int cout = (block % COUT_BLOCKS * WGS_M + wg) * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB, cin = chunk * CK + k_step * PACK_K;
#if SHUFFLED
  bring_shuffled(tile, weight + cin * (LAYER_CHANNELS * LAYER_TAPS), CIN_G - cin, cout, begin, tap_step, thread);
#else
  int outer = GRAD_INPUT ? cout : cin, inner = GRAD_INPUT ? cin : cout;  // the group's first along the weight's dimensions
  const WEIGHT* from = weight + (long long)(group * (GRAD_INPUT ? COUT_G : CIN_G) + outer) * PACK_PLANE;
  int outer_left = (GRAD_INPUT ? COUT_G : CIN_G) - outer, inner_left = (GRAD_INPUT ? CIN_G : COUT_G) - inner;
#if PACK_WIDE > 1
  if (tap_step == 1 && !((unsigned long long)weight & 15)) bring_wide(tile, from + (inner * TAPS + begin), outer_left, inner_left, TAPS - begin, thread);
  else
#endif
  if (tap_step == 1) bring_weights<false>(tile, from + (inner * TAPS + begin), outer_left, inner_left, TAPS - begin, 1, thread);
  else bring_weights<true>(tile, from + (inner + begin * tap_step), outer_left, inner_left, TAPS - begin, tap_step, thread);
#endif
  PACK_SYNC();
  int sub = warp * 16 / ROWS_PER_SUB, entries = ENTRY[VARIANTS * (MB + 1) - 1];
  int word = thread % QUARTER, r = word & 3, lane = word >> 2;  // the thread's of a fragment: these rows and channels
  const ELEMENT_TYPE* own = tile + (((lane >> 2) + (r & 1) * 8) * PACK_K + (lane & 3) * (4 / ELEMENT) + (r >> 1) * (16 / ELEMENT)) * PACK_PITCH;
  auto here = [&](int tap) { return tap < 0 ? begin == 0 : (u32)(tap - begin) < PACK_TAPS; };  // -1: zeros, by the first of the blocks
  auto write = [&](int variant, int e, int tap) {       // the thread's word of an entry's fragment
    int of = entries_of(variant), before = ENTRY[variant * (MB + 1)];
    int fragment = ((block * entries + before) * CHUNKS + chunk * of + e) * K_STEPS + k_step;
    u32* to = packed + (long long)((fragment * PARTS * WGS_M + wg) * 4 + warp) * QUARTER + word;
    const ELEMENT_TYPE* at = own + (tap - begin);
#if ELEMENT == 4
    float v = tap < 0 ? 0.f : *at;
    u32 high = to_tf32(v);
    *to = high;
    if (PARTS == 2) to[WGS_M * (FRAGMENT / 4)] = low_part(v, high);
#else
    *to = tap < 0 ? 0u : *at | (u32)at[PACK_PITCH] << 16;
#endif
  };
#if PACK_SPLITS > 8                                    // few of all entries: a warp looks at 32 at once
  constexpr int STEP = PACK_THREADS / QUARTER;
#pragma unroll 1
  for (int base = 0; base < entries; base += 32 * STEP) {
    int first = base + thread / QUARTER, own_entry = first + thread % 32 * STEP;
    u32 found = __ballot_sync(0xffffffffu, own_entry < entries && here(TAP_INDEX[own_entry * SUBS + sub]));
#pragma unroll 1
    for (; found; found &= found - 1) {
      int entry = first + (__ffs(found) - 1) * STEP, variant = 0;
#pragma unroll 1
      for (int end = VARIANTS; end - variant > 1;) {    // the variant that has it
        int middle = (variant + end) / 2;
        if (ENTRY[middle * (MB + 1)] <= entry) variant = middle;
        else end = middle;
      }
      write(variant, entry - ENTRY[variant * (MB + 1)], TAP_INDEX[entry * SUBS + sub]);
    }
  }
#else
#pragma unroll 1
  for (int variant = 0; variant < VARIANTS; variant++) {
    int of = entries_of(variant), before = ENTRY[variant * (MB + 1)];
#pragma unroll 4
    for (int e = thread / QUARTER; e < of; e += PACK_THREADS / QUARTER) {
      int tap = TAP_INDEX[(before + e) * SUBS + sub];
      if (here(tap)) write(variant, e, tap);
    }
  }
#endif
}

#if PACKS  // no kernel of their own: the consumers pack before they multiply
// Every block takes parts that nobody has taken, so that none waits for a block that does not run yet; then what is packed is
// counted, and whoever reads it waits until all is. `counters` [taken, packed, left] are zeros, which the last to leave leaves.
__device__ __forceinline__ void leave(u32* counters) {
  __threadfence();
  if (atomicAdd(counters + 2, 1) == 2 * gridDim.x - 1) counters[0] = counters[1] = counters[2] = 0;
}

// The consumers of a block, by `memory`: 16 bytes and a tile, which copies may overwrite when the warp that has these made has
// met them (barrier 10).
__device__ __forceinline__ void pack_weights(const void* weight, u32* packed, int tap_step, bool single, u32* counters, void* memory, int thread) {
  u32* taken = (u32*)memory;
  ELEMENT_TYPE* tile = (ELEMENT_TYPE*)(taken + 4);
  int packs = 0;
#pragma unroll 1
  for (;; packs++) {
    if (thread == 0) *taken = atomicAdd(counters, 1);
    PACK_SYNC();                                        // all are done with the tile, too
    u32 part = *taken;
    if (part >= PACK_PARTS) break;
#if ELEMENT == 2
    if (single) pack_part(tile, (const float*)weight, packed, tap_step, part, thread);
    else
#endif
    pack_part(tile, (const ELEMENT_TYPE*)weight, packed, tap_step, part, thread);
    PACK_SYNC();                                        // all know the part
  }
  fence_async();                                        // what is written here is read by copies, and the tile overwritten
  __threadfence();
  PACK_SYNC();
  named_arrive(10, CONSUMER_THREADS + 32);
  if (thread == 0) {
    if (packs) atomicAdd(counters + 1, packs);
    leave(counters);
  }
}

// One thread: until all weights are packed.
__device__ __forceinline__ void wait_for_weights(u32* counters) {
  while (load_acquire(counters + 1) < PACK_PARTS) {}
  fence_async();
  leave(counters);
}
#else
extern "C" __global__ void __launch_bounds__(PACK_THREADS) pack(const ELEMENT_TYPE* __restrict__ weight, u32* __restrict__ packed, int tap_step) {
  __shared__ ELEMENT_TYPE tile[16 * PACK_K * PACK_PITCH];
  let_dependent_begin();                                // `gather`
  pack_part(tile, weight, packed, tap_step, blockIdx.x, threadIdx.x);
}

#if ELEMENT == 2
// The same of float32 weights, and of a bias, if there is one, as autocast leaves them.
extern "C" __global__ void __launch_bounds__(PACK_THREADS)
pack_float(const float* __restrict__ weight, u32* __restrict__ packed, int tap_step, const float* __restrict__ bias, ELEMENT_TYPE* __restrict__ packed_bias) {
  if (bias && blockIdx.x == 0)
    for (int i = threadIdx.x; i < BIASES; i += PACK_THREADS) packed_bias[i] = as_element(bias[i]);
  __shared__ ELEMENT_TYPE tile[16 * PACK_K * PACK_PITCH];
  let_dependent_begin();
  pack_part(tile, weight, packed, tap_step, blockIdx.x, threadIdx.x);
}
#endif
#endif
#endif
