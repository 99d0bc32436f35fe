// Packing: weight (CIN, COUT_G, taps), of a gradient for the input (COUT, CIN_G, taps), to fragments
// [group][cout block][variant][chunk][entry][k step][part][wgs][warp][lane].
#include "packing.cuh"
#include "gather_weights.cuh"
#include "shuffle.cuh"

// A part is 16 rows of M, those of a warp, for one step of K and C::pack_taps taps. A block brings its weights to shared
// memory in the order of memory, then writes its quarter of each of these taps' fragments as one piece, two at a time.
//
// Weights are dense: contiguous, taps one element apart, or channels-last, `tap_step` elements.
template <class C_>
struct GatherPack {
using C = C_;
using G = GatherWork<C>;
using Number = typename G::Number;
using Type = typename Number::Type;
static constexpr int ELEMENT = G::ELEMENT, TAPS = C::pack_taps;
static constexpr int SPLITS = PACK_SPLITS<C>;
static constexpr int PITCH = TAPS | 1;                  // odd, so that a warp's rows and channels meet different banks
static constexpr int K = 32 / ELEMENT;                  // input channels of a step
static constexpr int OUTER = C::grad_input ? 16 : K;    // of a block along the weight's first dimension
static constexpr int INNER = C::grad_input ? K : 16;    // and along its second
static constexpr int PLANE = (C::grad_input ? C::cin_g : C::cout_g) * C::taps;  // elements from one index of its first dimension to the next
static constexpr int QUARTER = G::FRAGMENT / 4 / 4;     // words
static constexpr int TILE = 16 * K * PITCH;             // elements of a block's weights, [row of M][channel][tap]
static constexpr int WARPS = PACK_THREADS / 32;

// Of 16 bits weights may be float32, rounded on their way.
static __device__ __forceinline__ Type as_element(Type v) { return v; }
template <class Weight>
static __device__ __forceinline__ Type as_element(Weight v) { return Number::bits(v); }

// Where the tile has an index of the weight's first dimension and one of its second.
static __device__ __forceinline__ Type* place_in(Type* tile, int o, int i, int tap) { return tile + (C::grad_input ? o * K + i : i * K + o) * PITCH + tap; }

// A block's weights to the tile; `outer`, `inner` and `taps` of them exist. A warp takes
// an index of the first dimension, whose elements it reads in the order of memory: taps innermost, or (LAST) channels,
// with taps `tap_step` apart.
template <bool LAST, class Weight>
static __device__ __forceinline__ void bring(Type* tile, const Weight* __restrict__ from, int outer, int inner, int taps, int tap_step, int thread) {
  constexpr int COUNT = INNER * TAPS;
#pragma unroll
  for (int j = 0; j < OUTER / WARPS; j++) {
    int o = thread / 32 + j * WARPS;
#pragma unroll 16  // loads in flight
    for (int k = 0; k < (COUNT + 31) / 32; k++) {
      int e = thread % 32 + k * 32, i = LAST ? e % INNER : e / TAPS, tap = LAST ? e / INNER : e % TAPS;
      if (COUNT % 32 && e >= COUNT) break;
      bool exists = o < outer && i < inner && (C::taps % TAPS == 0 || tap < taps);
      *place_in(tile, o, i, tap) = exists ? as_element(from[o * PLANE + (LAST ? i + tap * tap_step : i * C::taps + tap)]) : 0;
    }
  }
}

// The same of contiguous weights that begin at 16 bytes, of which each load brings several taps.
template <class Weight>
static __device__ __forceinline__ void bring_wide(Type* tile, const Weight* __restrict__ from, int outer, int inner, int taps, int thread) {
  constexpr int EACH = C::pack_wide * sizeof(Weight) > 16 ? 16 / sizeof(Weight) : C::pack_wide;
  constexpr int PIECES = TAPS / EACH, COUNT = INNER * PIECES;
  struct alignas(EACH * sizeof(Weight)) Piece { Weight tap[EACH]; };
#pragma unroll
  for (int j = 0; j < OUTER / WARPS; j++) {
    int o = thread / 32 + j * WARPS;
#pragma unroll 4  // loads in flight
    for (int k = 0; k < (COUNT + 31) / 32; k++) {
      int e = thread % 32 + k * 32, i = e / PIECES, tap = e % PIECES * EACH;
      if (COUNT % 32 && e >= COUNT) break;
      bool exists = o < outer && i < inner && (C::taps % TAPS == 0 || tap < taps);
      Piece piece = {};
      if (exists) piece = *(const Piece*)(from + (o * PLANE + i * C::taps + tap));
      Type* to = place_in(tile, o, i, tap);
#pragma unroll
      for (int w = 0; w < EACH; w++) to[w] = as_element(piece.tap[w]);
    }
  }
}

// The same where rows of M are channels and phases: from the first weight of an input channel on, of which `outer` exist.
template <class Weight>
static __device__ __forceinline__ void bring_shuffled(Type* tile, const Weight* __restrict__ from, int outer, int row, int begin, int tap_step, int thread) {
  using S = Shuffle<C>;
  for (int e = thread; e < 16 * K * TAPS; e += PACK_THREADS) {
    int tap = e % TAPS, o = e / TAPS % K, i = e / (TAPS * K);
    int at = o < outer && begin + tap < C::taps ? S::weight_at(row + i, begin + tap, tap_step) : -1;
    Type v = 0;
    if (at >= 0) v = as_element(from[o * (C::cout * S::LAYER_TAPS) + at]);
    tile[(i * K + o) * PITCH + tap] = v;
  }
}

static __device__ __forceinline__ void sync() {
  if constexpr (C::packs) named_sync<9, G::CONSUMER_THREADS>();
  else __syncthreads();
}

struct Part { int begin, warp, wg, k_step, chunk, block, cout, cin; };  // first tap; the fragments'; first channels in the group

static __device__ __forceinline__ Part part_at(int rest) {
  Part p;
  p.begin = rest % SPLITS * TAPS;  rest /= SPLITS;
  p.warp = rest % 4;  rest /= 4;
  p.wg = rest % G::WGS_M;  rest /= G::WGS_M;
  p.k_step = rest % G::K_STEPS;  rest /= G::K_STEPS;
  p.chunk = rest % G::CHUNKS, p.block = rest / G::CHUNKS;
  p.cout = (p.block % C::cout_blocks * G::WGS_M + p.wg) * C::rows_per_sub + p.warp * 16 % C::rows_per_sub, p.cin = p.chunk * C::ck + p.k_step * K;
  return p;
}

template <class Weight>
static __device__ __forceinline__ void bring_part(Type* tile, const Weight* __restrict__ weight, int tap_step, const Part& p, int thread) {
  if constexpr (C::store == STORE_PHASES) {
    bring_shuffled(tile, weight + p.cin * (C::cout * Shuffle<C>::LAYER_TAPS), C::cin_g - p.cin, p.cout, p.begin, tap_step, thread);
  } else {
    constexpr int OF_FIRST = C::grad_input ? C::cout_g : C::cin_g, OF_SECOND = C::grad_input ? C::cin_g : C::cout_g;  // of the weight's dimensions, in a group
    int group = p.block / C::cout_blocks, outer = C::grad_input ? p.cout : p.cin, inner = C::grad_input ? p.cin : p.cout;
    const Weight* from = weight + (long long)(group * OF_FIRST + outer) * PLANE;
    int outer_left = OF_FIRST - outer, inner_left = OF_SECOND - inner, taps_left = C::taps - p.begin;
    if constexpr (C::pack_wide > 1) {
      if (tap_step == 1 && !((unsigned long long)weight & 15)) {
        bring_wide(tile, from + (inner * C::taps + p.begin), outer_left, inner_left, taps_left, thread);
        return;
      }
    }
    if (tap_step == 1) bring<false>(tile, from + (inner * C::taps + p.begin), outer_left, inner_left, taps_left, 1, thread);
    else bring<true>(tile, from + (inner + p.begin * tap_step), outer_left, inner_left, taps_left, tap_step, thread);
  }
}

template <class Weight>
static __device__ __forceinline__ void pack_part(Type* tile, const Weight* __restrict__ weight, u32* __restrict__ packed, int tap_step, int part, int thread) {
  const Part p = part_at(part);
  bring_part(tile, weight, tap_step, p, thread);
  sync();
  int sub = p.warp * 16 / C::rows_per_sub, entries = G::end_entry(C::variants - 1);
  int word = thread % QUARTER, r = word & 3, lane = word >> 2;  // the thread's of a fragment: these rows and channels
  const Type* own = tile + (((lane >> 2) + (r & 1) * 8) * K + (lane & 3) * (4 / ELEMENT) + (r >> 1) * (16 / ELEMENT)) * PITCH;
  constexpr bool LACKS = lacks_taps<C>();               // -1: zeros, by the first of the blocks
  auto here = [&](int tap) { return SPLITS == 1 || (LACKS && tap < 0 ? p.begin == 0 : (u32)(tap - p.begin) < TAPS); };
  auto write = [&](int variant, int e, int tap) {       // the thread's word of an entry's fragment
    int of = G::entries_of(variant), before = G::first_entry(variant);
    int fragment = ((p.block * entries + before) * G::CHUNKS + p.chunk * of + e) * G::K_STEPS + p.k_step;
    u32* to = packed + (long long)((fragment * G::PARTS * G::WGS_M + p.wg) * 4 + p.warp) * QUARTER + word;
    const Type* at = own + (tap - p.begin);
    if constexpr (ELEMENT == 4) {
      float v = LACKS && tap < 0 ? 0.f : *at;
      u32 high = to_tf32(v);
      *to = high;
      if (G::PARTS == 2) to[G::WGS_M * (G::FRAGMENT / 4)] = low_part(v, high);
    } else {
      *to = LACKS && tap < 0 ? 0u : *at | (u32)at[PITCH] << 16;
    }
  };
  if constexpr (SPLITS > 8) {                           // few of all entries: a warp looks at 32 at once
    constexpr int STEP = PACK_THREADS / QUARTER;
#pragma unroll 1
    for (int base = 0; base < entries; base += 32 * STEP) {
      int first = base + thread / QUARTER, own_entry = first + thread % 32 * STEP;
      u32 found = __ballot_sync(0xffffffffu, own_entry < entries && here(tap_index<C>(own_entry * C::subs + sub)));
#pragma unroll 1
      for (; found; found &= found - 1) {
        int entry = first + (__ffs(found) - 1) * STEP, variant = variant_of(entry);
        write(variant, entry - G::first_entry(variant), tap_index<C>(entry * C::subs + sub));
      }
    }
  } else {
#pragma unroll 1
    for (int variant = 0; variant < C::variants; variant++) {
      int of = G::entries_of(variant), before = G::first_entry(variant);
#pragma unroll 4
      for (int e = thread / QUARTER; e < of; e += PACK_THREADS / QUARTER) {
        int tap = tap_index<C>((before + e) * C::subs + sub);
        if (here(tap)) write(variant, e, tap);
      }
    }
  }
}

// The variant that has an entry.
static __device__ __forceinline__ int variant_of(int entry) {
  int variant = 0;
#pragma unroll 1
  for (int end = C::variants; end - variant > 1;) {
    int middle = (variant + end) / 2;
    if (G::first_entry(middle) <= entry) variant = middle;
    else end = middle;
  }
  return variant;
}

// --- by a kernel of its own: `pack` and `pack_float` of packing.cuh ---------------------------------------------------

template <class Weight>
static __device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  __shared__ Type tile[TILE];
  let_dependent_begin();                                // `gather`
  pack_part(tile, weight, (u32*)packed, tap_step, blockIdx.x, threadIdx.x);
}

// --- by the consumers, before they multiply ---------------------------------------------------------------------------

// Every block takes parts that nobody has taken, so that none waits for a block that does not run yet; then what is packed is
// counted, and whoever reads it waits until all is. `counters` [taken, packed, left] are zeros, which the last to leave leaves.
static __device__ __forceinline__ void leave(u32* counters) {
  __threadfence();
  if (atomicAdd(counters + 2, 1) == 2 * gridDim.x - 1) counters[0] = counters[1] = counters[2] = 0;
}

// The consumers of a block, by `memory`: 16 bytes and a tile, which copies may overwrite when the warp that has these made has
// met them (barrier 10). `single`: weights are float32.
static __device__ __forceinline__ void pack_beside(const void* weight, u32* packed, int tap_step, bool single, u32* counters, void* memory, int thread) {
  u32* taken = (u32*)memory;
  Type* tile = (Type*)(taken + 4);
  int packs = 0;
#pragma unroll 1
  for (;; packs++) {
    if (thread == 0) *taken = atomicAdd(counters, 1);
    sync();                                             // all are done with the tile, too
    u32 part = *taken;
    if (part >= C::pack_parts) break;
    if (ELEMENT == 2 && single) pack_part(tile, (const float*)weight, packed, tap_step, part, thread);
    else pack_part(tile, (const Type*)weight, packed, tap_step, part, thread);
    sync();                                             // all know the part
  }
  fence_async();                                        // what is written here is read by copies, and the tile overwritten
  __threadfence();
  sync();
  named_arrive(10, G::CONSUMER_THREADS + 32);
  if (thread == 0) {
    if (packs) atomicAdd(counters + 1, packs);
    leave(counters);
  }
}

// One thread: until all weights are packed.
static __device__ __forceinline__ void wait_for_weights(u32* counters) {
  while (load_acquire(counters + 1) < C::pack_parts) {}
  fence_async();
  leave(counters);
}
};
