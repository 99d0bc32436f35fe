// Gather-GEMM on tensor cores: out[o = OUT_STEP q + u] = sum over taps of W(u, tap) x in[i = IN_STEP q + offset(u, tap)],
// for every axis; u < OUT_STEP are the sub-positions of q (the phases of a stride, or rows unrolled to fill a tile).
// The gradient for the input is the same with exchanged steps: `in` is the output's gradient, CIN its channels, `out` the input's.
//
// Work of a block (persistent, `for tile`): TILE_N x TILE_D x TILE_H x TILE_W positions q times one M-group. An M-group is
// MB blocks of 64 rows (for WGS_M = 2: a pair of them); a row is one output channel at one (d, h) sub-position, a block one
// W sub-position. K is input channels x taps, in chunks of CK channels.
//
// Roles:
//   producers  loads the input tile with its halo once per chunk. NCHW: 16-byte copies into a staging slot (bytes in flight:
//              STAGES_S - 1 slots), then a pass of shared memory -> registers -> shared memory that turns pixels to rows of CK
//              channels and rounds to TF32. Channels-last: copies straight to those rows.
//   consumers  multiply: weights are A, from registers, packed in fragment order (one 16-byte load per thread and step);
//              pixels are B, rows of CK channels in shared memory, swizzled. A tap is a shift of B's start by whole rows:
//              the swizzle is a function of address bits, so any shift is right (measured: 32, 64 and 128 bytes).
//   one thread streams the weights' fragments through a ring (or loads all of them once: RESIDENT).
// SPLIT 0: both consumers share an M-group and halve the pixels. 1: they share the pixels. 2: ping-pong, whole tiles in turn,
// so that one stores while the other multiplies.
//
// Constants come as macros (cuda/gather.py computes them and explains each); sizes of the input are arguments.
#include "ptx.cuh"
#include "shuffle.cuh"
#include "wgmma.cuh"

#define WORDS 4                         // 32-bit words of a 16-byte unit
#define VEC (16 / ELEMENT)              // elements of a 16-byte unit
#define ROW_BYTES (CK * ELEMENT)        // a pixel's row in a tile: 32, 64 or 128
#define UNITS_PER_ROW (ROW_BYTES / 16)
#define K_STEPS (ROW_BYTES / 32)        // a matrix instruction takes 32 bytes of K
#define SEGMENTS (TILE_N * ROWS_D * ROWS_H)
// Columns of a segment with one residue modulo IN_STEP_W make a plane of PLANE neighbours; there are PLANES residues that some tap
// reads. A segment has its planes one behind the other. STRIDED_BOX: a plane is a box, of all segments of a band of rows.
#define PITCH (STRIDED_BOX ? PLANE : PLANES * PLANE)  // pixel rows from a segment to the next
#define PLANE_PITCH (STRIDED_BOX ? (SEGMENTS * PLANE + 7) / 8 * 8 : PLANE)  // the swizzle's pattern begins every 8 rows
#define PIXELS (STRIDED_BOX ? PLANES * PLANE_PITCH : SEGMENTS * PITCH)
#define COLUMN(within) ((within) % PLANE * IN_STEP_W + (PLANES == IN_STEP_W ? (within) / PLANE : RESIDUE[(within) / PLANE]))
#define PART_BYTES ((PIXELS * ROW_BYTES + 1023) / 1024 * 1024)
#define STAGE_BYTES (PARTS * PART_BYTES)
// 16-byte units of a segment: boxes of BOX_UNITS begin COLUMN_PAD columns early, at whole units; threads take the units that hold
// the row, whatever its alignment.
#define STAGING_UNITS ((COLUMNS + (SLOTS_BY_BOX && !CLASSED ? COLUMN_PAD + VEC - 1 : 2 * VEC - 2)) / VEC)
#define ROW_UNITS (SLOTS_BY_BOX ? BOX_UNITS : STAGING_UNITS)
#if WHOLE  // of small images all pixels are copied, without a halo: a slot is [box][image][channel][pixel]
#define CHANNEL_BYTES (BOX_PIXELS * ELEMENT)
#define SLOT_BOXES (IMAGE_D * IMAGE_H * IMAGE_W / BOX_PIXELS)
#else
// A slot is [box][image][channel][row][column]. There are several boxes where rows are longer than one; or, CLASSED, where rows do
// not all begin at the same place of a 16-byte unit: then rows and channels of one class, which do, are a tensor and a box.
#define CLASS_ROWS (CLASSED ? (ROWS_H + ROW_CLASSES - 1) / ROW_CLASSES : ROWS_H)
#define CHANNEL_BYTES (ROWS_D * CLASS_ROWS * ROW_UNITS * 16)
#define SLOT_BOXES (CLASSED ? ROW_CLASSES * CHANNEL_CLASSES : (STAGING_UNITS + ROW_UNITS - 1) / ROW_UNITS)
#endif
#define COPIED_BYTES (TILE_N * (CLASSED ? CK / CHANNEL_CLASSES : CK) * CHANNEL_BYTES)  // of a box
#define SLOT_BOX_BYTES ((COPIED_BYTES + 127) / 128 * 128)
#define SLOT_BYTES (SLOT_BOXES * SLOT_BOX_BYTES)
#define FRAGMENT (64 * 32)              // bytes: 64 rows of 32 bytes of K
#define CHUNKS ((CIN_G + CK - 1) / CK)
#define CONSUMERS 2
#define CONSUMER_THREADS (CONSUMERS * 128)
#if WGMMA  // two warpgroups of 56 registers produce, so that the consumers have 200: six warps turn pixels, one loads them,
           // one loads the weights
#define PRODUCER_THREADS 192
#define LOADER_WARP 6
#define WEIGHTS_WARP 7
#define FIRST_CONSUMER 2
#else      // no warpgroup can give its registers away
#define PRODUCER_THREADS 128
#define FIRST_CONSUMER 1
#endif
#define PRODUCER_WARPS (PRODUCER_THREADS / 32)
// How pixels come. BOX: the tensor copy engine brings a chunk with one instruction, zeros beyond the borders included; it wants
// row pitches of whole 16 bytes. Else threads copy. (Bulk copies of single rows are no way: 69 clocks each, 3.4 ms on kb57.)
#define BOX (WGMMA && TENSOR_MAP)
#define SLOTS_BY_BOX (BOX && !CHANNELS_LAST)
// The box is the tile: nothing to turn, and float32 is rounded to TF32, to nearest even, on its way (NOTES: 6 to 16% on seven
// channels-last layers); IEEE needs both parts.
#define DIRECT_BOX (BOX && CHANNELS_LAST && PRECISION != 1)
#define THREADS (FIRST_CONSUMER * 128 + CONSUMER_THREADS)
#define SUBTILES (TILE_N * TILE_D * (TILE_H / SUB_H) * (TILE_W / SUB_W))
#define NB (SPLIT == 0 ? SUBTILES / 2 : SUBTILES)
#define WGS_M (SPLIT == 1 ? 2 : 1)
#define RELEASES (SPLIT == 2 ? 1 : 2)   // consumers that read a stage
#define W_SUBTILES (TILE_W / SUB_W)
#define H_SUBTILES (TILE_H / SUB_H)

__constant__ const int TAP_ROW[] = TAP_ROWS;           // [variant, block, tap]: the tap's shift in pixel rows
__constant__ const int ENTRY[] = ENTRIES;              // [variant][MB + 1]: where a block's taps begin
#if STRETCHES < VARIANTS
__constant__ const int STRETCH_OF[] = STRETCHES_OF;    // [variant]: which of those with the same taps
__constant__ const int VARIANT_ROW[] = VARIANT_ROWS;   // [variant]: shift of its taps against the first of these
#endif
__constant__ const short SUB_D[] = SUBS_D;             // [variant][SUBS]: output offset of an M-row's sub-position
__constant__ const short SUB_HH[] = SUBS_H;
__constant__ const short U_W[] = SUBS_W;               // [variant]: first W sub-position
__constant__ const int ROW_D[] = OFFSETS_D;            // input offset of a tile's rows
__constant__ const int ROW_H[] = OFFSETS_H;
__constant__ const int RESIDUE[] = RESIDUES;           // of a tile's columns, counted from the first, by plane
#if PLANE_BARRIERS > 1 && !(DIRECT_BOX && STRIDED_BOX && STRAIGHT && PLANE_BARRIERS == PLANES)
#error "planes have barriers of their own where boxes bring them and a chunk is one stretch"
#endif
#if STRIDED_BOX
__constant__ const int PLANE_D[] = PLANES_D;           // a plane's first row
__constant__ const int PLANE_H[] = PLANES_H;
#endif

#if PRECISION == 0 || PRECISION == 1                   // tf32, ieee
#define STORE_BITS(v) __float_as_uint(v)
#elif PRECISION == 2
#define STORE_BITS(v) half_bits(v)
#define PACK_PAIR "cvt.rn.f16x2.f32 %0, %1, %2;\n"
#else
#define STORE_BITS(v) bfloat_bits(v)
#define PACK_PAIR "cvt.rn.bf16x2.f32 %0, %1, %2;\n"
#endif

#if ELEMENT == 2
__device__ __forceinline__ u32 pack_pair(float2 v) {   // the first of the two in the low half
  u32 r;
  asm(PACK_PAIR : "=r"(r) : "f"(v.y), "f"(v.x));
  return r;
}
#endif

struct Sizes {                                         // one layout for the packed argument block
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;                       // tiles of q per axis
  int tiles;                                           // all of them, times M_GROUPS
};

struct alignas(64) TensorMap { u64 opaque[16]; };        // a CUtensorMap; <cuda.h> does not compile under NVRTC
#define MAPS (CLASSED ? ROW_CLASSES * CHANNEL_CLASSES : 1)
struct TensorMaps { TensorMap of[MAPS + WEIGHTS_BOX]; };   // the last: the weights'

struct Tile {
  int group, cout_block, variant;                      // M-group
  int n, d, h, w;                                      // first q
};

__device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  Tile t;
  int m = index % M_GROUPS, q = index / M_GROUPS;
  // Variants differ in taps; rotated, so that a block, whose tiles lie gridDim.x apart, meets all of them.
  if (!RESIDENT && VARIANTS > 1) m = (m + q) % M_GROUPS;
  t.variant = m % VARIANTS;
  t.cout_block = m / VARIANTS % COUT_BLOCKS;
  t.group = m / (VARIANTS * COUT_BLOCKS);
  t.w = q % s.tiles_w * TILE_W;  q /= s.tiles_w;
  t.h = q % s.tiles_h * TILE_H;  q /= s.tiles_h;
  t.d = q % s.tiles_d * TILE_D;
  t.n = q / s.tiles_d * TILE_N;
  return t;
}

__device__ __forceinline__ int entries_of(int variant) { return ENTRY[variant * (MB + 1) + MB] - ENTRY[variant * (MB + 1)]; }
__device__ __forceinline__ int chunks_of(int variant) { return entries_of(variant) ? CHUNKS : 0; }  // 0: only the bias

// Byte of the 16-byte unit `unit` of pixel row `p` in a tile.
__device__ __forceinline__ u32 unit_at(int p, int unit) {
  int swizzle = ROW_BYTES == 32 ? (p >> 2) & 1 : ROW_BYTES == 64 ? (p >> 1) & 3 : p & 7;
  return p * ROW_BYTES + ((unit ^ swizzle) << 4);
}

// =====================================================================================================================
// Packing: weight (CIN, COUT_G, taps), for GRAD_INPUT (COUT, CIN_G, taps), to fragments [group][cout block][variant][chunk][entry][k step][part][wgs][warp][lane]
// =====================================================================================================================

__constant__ const short TAP_INDEX[] = TAP_INDICES;    // [variant, block, tap][SUBS]: the kernel's tap, -1 for none

#if !WEIGHTS_BOX
// A block packs 16 rows of M, those of a warp, for one step of K and PACK_TAPS taps. It brings their weights to shared
// memory in the order of memory, then writes its quarter of each of these taps' fragments as one piece, two at a time.
#define PACK_THREADS 256
#define PACK_SPLITS ((TAPS + PACK_TAPS - 1) / PACK_TAPS)  // blocks that share the taps
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

// Weights are dense: contiguous, taps one element apart, or channels-last, `tap_step` elements.
#if ELEMENT == 2
template <class Weight>
__device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, u32* __restrict__ packed, int tap_step) {
#else
extern "C" __global__ void __launch_bounds__(PACK_THREADS) pack(const ELEMENT_TYPE* __restrict__ weight, u32* __restrict__ packed, int tap_step) {
#endif
  __shared__ ELEMENT_TYPE tile[16 * PACK_K * PACK_PITCH];
  let_dependent_begin();                                // `gather`
  int thread = threadIdx.x, rest = blockIdx.x;
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
  if (tap_step == 1) bring_weights<false>(tile, from + (inner * TAPS + begin), outer_left, inner_left, TAPS - begin, 1, thread);
  else bring_weights<true>(tile, from + (inner + begin * tap_step), outer_left, inner_left, TAPS - begin, tap_step, thread);
#endif
  __syncthreads();
  int sub = warp * 16 / ROWS_PER_SUB, entries = ENTRY[VARIANTS * (MB + 1) - 1];
  int word = thread % QUARTER, r = word & 3, lane = word >> 2;  // the thread's of a fragment: these rows and channels
  const ELEMENT_TYPE* own = tile + (((lane >> 2) + (r & 1) * 8) * PACK_K + (lane & 3) * (4 / ELEMENT) + (r >> 1) * (16 / ELEMENT)) * PACK_PITCH;
#pragma unroll 1
  for (int variant = 0; variant < VARIANTS; variant++) {
    int of = entries_of(variant), before = ENTRY[variant * (MB + 1)];
#pragma unroll 4
    for (int e = thread / QUARTER; e < of; e += PACK_THREADS / QUARTER) {
      int tap = TAP_INDEX[(before + e) * SUBS + sub];   // -1: zeros, which the first of the blocks writes
      if (tap < 0 ? begin > 0 : (u32)(tap - begin) >= PACK_TAPS) continue;
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
    }
  }
}

#if ELEMENT == 2
extern "C" __global__ void __launch_bounds__(PACK_THREADS) pack(const ELEMENT_TYPE* __restrict__ weight, u32* __restrict__ packed, int tap_step) {
  pack_weights(weight, packed, tap_step);
}

// The same of float32 weights, and of a bias, if there is one, as autocast leaves them.
extern "C" __global__ void __launch_bounds__(PACK_THREADS)
pack_float(const float* __restrict__ weight, u32* __restrict__ packed, int tap_step, const float* __restrict__ bias, ELEMENT_TYPE* __restrict__ packed_bias) {
  if (bias && blockIdx.x == 0)
    for (int i = threadIdx.x; i < BIASES; i += PACK_THREADS) packed_bias[i] = as_element(bias[i]);
  pack_weights(weight, packed, tap_step);
}
#endif
#endif

// A place in a ring of `count` stages, and the parity of its phase.
struct Cursor {
  u32 stage, parity;
  __device__ __forceinline__ void next(u32 count) {
    if (++stage == count) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// =====================================================================================================================
// Producer
// =====================================================================================================================

struct Source {                                        // where a tile's chunk lies in the input
  int n, d, h, w;                                      // of the halo's corner, before the rows' offsets
  int channel, left;                                   // first channel, channels left in the group
};

__device__ __forceinline__ Source source_of(const Tile& t, int chunk) {
  return {t.n, t.d * IN_STEP_D, t.h * IN_STEP_H, t.w * IN_STEP_W + FIRST_W, t.group * CIN_G + chunk * CK, CIN_G - chunk * CK};
}

// The segment's (n, d, h), and whether that row of the input exists.
__device__ __forceinline__ bool row_of(const Source& at, const Sizes& s, int packed, int& n, int& d, int& h) {
  n = at.n + (packed >> 24);
  d = at.d + ((packed << 8) >> 20);
  h = at.h + ((packed << 20) >> 20);
  return n < s.batch && (u32)d < (u32)s.in_d && (u32)h < (u32)s.in_h;
}

#if !CHANNELS_LAST
#if !SLOTS_BY_BOX
// One instruction, where the compiler of (long long)a * b + c takes the product apart.
__device__ __forceinline__ u64 multiply_add_wide(int a, int b, u64 c) {
  u64 r;
  asm("mad.wide.s32 %0, %1, %2, %3;\n" : "=l"(r) : "r"(a), "r"(b), "l"(c));
  return r;
}

// Copies CK channels of every segment into a slot, in the 16-byte units of memory that hold them, so that any alignment is
// served; units without a pixel of the row are left out. A segment then begins (address % 16) bytes into its place.
__device__ __forceinline__ void stage(const char* __restrict__ x, const Sizes& s, const Source& at, u32 slot, int thread) {
  long long slice = (long long)s.in_h * s.in_w * ELEMENT, plane = slice * s.in_d;
  const char* corner = x + ((long long)at.n * CIN + at.channel) * plane + (long long)at.w * ELEMENT;
  // A thread keeps its channel and place in the row for all rows (NOTES: found anew for each unit, kb57's gradient for the input took
  // 3.25 ms instead of 2.27). Where rows are short, threads share them out.
  constexpr int PLACES = CK * STAGING_UNITS, SHARES = PLACES < PRODUCER_THREADS ? PRODUCER_THREADS / PLACES : 1;
  constexpr int SLICES = TILE_N * ROWS_D, BY_SLICE = SLICES >= SHARES ? SHARES : 1, BY_ROW = BY_SLICE > 1 ? 1 : SHARES;
  int share = SHARES > 1 ? thread / PLACES : 0, place_of = SHARES > 1 ? thread % PLACES : thread;
  if (share >= SHARES) return;
#pragma unroll 1
  for (int unit = place_of % STAGING_UNITS, c = place_of / STAGING_UNITS; c < CK;) {
    if (CIN_G % CK == 0 || c < at.left) {
      const char* place = corner + c * plane + unit * 16;
      int column = at.w + unit * VEC;                   // of the unit's first element, were the row aligned
      u32 to = slot + c * CHANNEL_BYTES + unit * 16;
#pragma unroll 1
      for (int r = BY_SLICE > 1 ? share : 0; r < SLICES; r += BY_SLICE) {
        int image = r / ROWS_D, d = at.d + ROW_D[r % ROWS_D];
        bool exists = at.n + image < s.batch && (u32)d < (u32)s.in_d;
        const char* line = place + image * (CIN * plane) + d * slice;
#pragma unroll ROWS_H % 5 == 0 ? 5 : ROWS_H % 4 == 0 ? 4 : ROWS_H % 3 == 0 ? 3 : 2
        for (int j = BY_ROW > 1 ? share : 0; j < ROWS_H; j += BY_ROW) {
          int h = at.h + ROW_H[j];
          u64 p = multiply_add_wide(h, s.in_w * ELEMENT, (u64)line);
          int first = column - (int)(p & 15) / ELEMENT;
          if (exists && (u32)h < (u32)s.in_h && first + VEC > 0 && first < s.in_w)
            copy16(to + image * (CK - 1) * CHANNEL_BYTES + (r * ROWS_H + j) * (STAGING_UNITS * 16), (const char*)(p & ~15ull));
        }
      }
    }
    if (SHARES > 1) break;
    unit += PRODUCER_THREADS % STAGING_UNITS;
    c += PRODUCER_THREADS / STAGING_UNITS;
    if (unit >= STAGING_UNITS) {
      unit -= STAGING_UNITS;
      c++;
    }
  }
}
#endif

#define OWN_PIXELS ((PIXELS + PRODUCER_THREADS - 1) / PRODUCER_THREADS)

// The pixel row of a thread's pixel i: rows in their order, or, where the columns of neighbouring rows lie a multiple of four
// apart, so that lanes would meet few banks, columns in theirs.
#define BY_COLUMN (IN_STEP_W % 4 == 0)
__device__ __forceinline__ int pixel_row(int i) {
  return BY_COLUMN ? i / PITCH * PITCH + i % PITCH % PLANES * PLANE + i % PITCH / PLANES : i;
}

// A thread's pixels of a tile: where they lie in a slot and, for copies by threads, whether they are in the image and how their
// row is aligned. Found once a tile, not a chunk.
struct Pixels {
  u32 from[OWN_PIXELS], ok;
  u32 plane;                                            // channel c of a row begins at (phase + c * plane) % VEC of a unit
  __device__ __forceinline__ void locate(const char* x, const Sizes& s, const Source& at, const int* segments, int thread) {
    plane = SLOTS_BY_BOX && !CLASSED ? 0 : (u32)s.in_d * s.in_h * s.in_w;
    ok = 0;
#pragma unroll
    for (int k = 0; k < OWN_PIXELS; k++) {
      int p = pixel_row(thread + k * PRODUCER_THREADS), segment = p / PITCH, within = p % PITCH;
      int column = COLUMN(within), image = segment / (ROWS_D * ROWS_H);
      if (thread + k * PRODUCER_THREADS >= PIXELS) break;
#if WHOLE
      // The copy engine fills images beyond the batch with zeros; what lies beyond an image's borders is nowhere.
      int d = (segments[segment] << 8) >> 20, h = (segments[segment] << 20) >> 20, w = FIRST_W + column;
      bool inside = (u32)d < IMAGE_D && (u32)h < IMAGE_H && (u32)w < IMAGE_W;
      int pixel = inside ? (d * IMAGE_H + h) * IMAGE_W + w : 0;
      from[k] = ((pixel / BOX_PIXELS * TILE_N + image) * CK * BOX_PIXELS + pixel % BOX_PIXELS) * ELEMENT;
      ok |= (u32)inside << k;
#elif SLOTS_BY_BOX && CLASSED
      // The row's class and place in it; in a class with a lead the columns ahead of a row are no zeros but the row's before.
      int j = segment % ROWS_H, row = segment / ROWS_H % ROWS_D * CLASS_ROWS + j / ROW_CLASSES;
      from[k] = j % ROW_CLASSES * SLOT_BOX_BYTES + (image * (CK / CHANNEL_CLASSES) * (ROWS_D * CLASS_ROWS) + row) * ROW_UNITS * 16 + column * ELEMENT;
      from[k] |= (u32)((FIRST_W + (FIRST_H + j * ROWS_APART) * s.in_w) & (VEC - 1)) << 24;
      ok |= (u32)(FIRST_W + column >= 0) << k;
#else
      int at_column = column + COLUMN_PAD, box = SLOT_BOXES > 1 ? at_column / (ROW_UNITS * VEC) : 0;
      if (SLOT_BOXES > 1 && IN_STEP_W > 1 && box == SLOT_BOXES) box--;  // a column that only fills a plane up
      from[k] = box * SLOT_BOX_BYTES + (segment + image * (CK - 1) * (ROWS_D * ROWS_H)) * ROW_UNITS * 16 + (at_column - box * (ROW_UNITS * VEC)) * ELEMENT;
#endif
#if !SLOTS_BY_BOX
      int n, d, h;
      bool in = row_of(at, s, segments[segment], n, d, h) && column < COLUMNS && (u32)(at.w + column) < (u32)s.in_w;
      u32 first = ((u32)n * CIN + at.channel) * plane + ((u32)d * s.in_h + h) * s.in_w + at.w + (u32)((u64)x / ELEMENT);
      from[k] |= (first & (VEC - 1)) << 24;             // the low 24 bits: the place in a slot; above: the phase
      ok |= (u32)in << k;
#endif
    }
  }
};

// A slot's pixels to rows of CK channels, rounded: a lane takes a pixel, so that loads and stores meet all banks.
template <bool ALIGNED>  // every channel of a row has the same misalignment
__device__ __forceinline__ void turn(const Pixels& own, u32 exist, int channel, int left, u32 slot, u32 tile, int thread) {
#pragma unroll
  for (int k = 0; k < OWN_PIXELS; k++) {
    int p = pixel_row(thread + k * PRODUCER_THREADS);
    if (PIXELS % PRODUCER_THREADS && thread + k * PRODUCER_THREADS >= PIXELS) break;
    bool ok = exist >> k & 1;
    u32 phase = own.from[k] >> 24, from = slot + (own.from[k] & 0xffffff) + (ALIGNED ? phase * ELEMENT : 0);
#pragma unroll 2  // more of them spill
    for (int unit = 0; unit < UNITS_PER_ROW; unit++) {
      u32 v[VEC];
#pragma unroll
      for (int e = 0; e < VEC; e++) {
        int c = unit * VEC + e;
        bool have = ok && (CIN_G % CK == 0 || c < left);
        u32 a = from + (CLASSED ? c / CHANNEL_CLASSES * CHANNEL_BYTES + c % CHANNEL_CLASSES * (ROW_CLASSES * SLOT_BOX_BYTES) : c * CHANNEL_BYTES);
        if (!ALIGNED && CLASSED) a += ((phase + c % CHANNEL_CLASSES * own.plane) & (VEC - 1)) * ELEMENT;
        else if (!ALIGNED) a += ((phase + (channel + c) * own.plane) & (VEC - 1)) * ELEMENT;
#if ELEMENT == 4
        v[e] = have ? load_shared_u32(a) : 0;
#else
        v[e] = have ? load_shared_u16(a) : 0;
#endif
      }
#if ELEMENT == 4
      u32 hi[4];
#pragma unroll
      for (int e = 0; e < 4; e++) hi[e] = to_tf32(__uint_as_float(v[e]));
      store_shared_128(tile + unit_at(p, unit), hi[0], hi[1], hi[2], hi[3]);
#if PARTS == 2
#pragma unroll
      for (int e = 0; e < 4; e++) v[e] = low_part(__uint_as_float(v[e]), hi[e]);
      store_shared_128(tile + PART_BYTES + unit_at(p, unit), v[0], v[1], v[2], v[3]);
#endif
#else
      store_shared_128(tile + unit_at(p, unit), v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
#endif
    }
  }
}
#else
// Copies pixel rows straight into a tile; what lies outside of the image or past the last channel is zero.
__device__ __forceinline__ void fetch(const char* __restrict__ x, const Sizes& s, const Source& at, const int* segments, u32 tile, int thread) {
  for (int i = thread; i < PIXELS * UNITS_PER_ROW; i += PRODUCER_THREADS) {
    int unit = i % UNITS_PER_ROW, p = i / UNITS_PER_ROW, segment = p / PITCH, within = p % PITCH, n, d, h;
    int column = COLUMN(within), w = at.w + column;
    bool ok = row_of(at, s, segments[segment], n, d, h) && column < COLUMNS && (u32)w < (u32)s.in_w;
    int have = at.left - unit * VEC;                    // channels from this unit on
    const char* from = x + (((((long long)n * s.in_d + d) * s.in_h + h) * s.in_w + w) * CIN + at.channel + unit * VEC) * ELEMENT;
#if ALIGNED_CHANNELS
    int bytes = ok && have > 0 ? (have < VEC ? have * ELEMENT : 16) : 0;
    copy16(tile + unit_at(p, unit), bytes ? from : x, bytes);
#else  // a channel count that is no multiple of 16 bytes: element by element, which waits for memory
    u32 v[VEC];
#pragma unroll
    for (int e = 0; e < VEC; e++) v[e] = ok && e < have ? (u32)((const ELEMENT_BITS*)from)[e] : 0;
#if ELEMENT == 4
    store_shared_128(tile + unit_at(p, unit), v[0], v[1], v[2], v[3]);
#else
    store_shared_128(tile + unit_at(p, unit), v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
#endif
#endif
  }
}

// Rounds the units that this thread has fetched itself, or (BOX) that its turn falls on.
__device__ __forceinline__ void round_units(u32 tile, int thread) {
#if ELEMENT == 4
#pragma unroll 4
  for (int i = thread; i < PIXELS * UNITS_PER_ROW; i += PRODUCER_THREADS) {
    u32 a = tile + (BOX ? i * 16 : unit_at(i / UNITS_PER_ROW, i % UNITS_PER_ROW)), v[4], hi[4];
    load_shared_128(v, a);
#pragma unroll
    for (int e = 0; e < 4; e++) hi[e] = to_tf32(__uint_as_float(v[e]));
    store_shared_128(a, hi[0], hi[1], hi[2], hi[3]);
#if PARTS == 2
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] = low_part(__uint_as_float(v[e]), hi[e]);
    store_shared_128(a + PART_BYTES, v[0], v[1], v[2], v[3]);
#endif
  }
#endif
}
#endif

// A walk over (tile, chunk) in the order in which consumers take them.
struct Walk {
  int index, chunk;
  Tile tile;
  __device__ __forceinline__ void begin(int first, const Sizes& s) { index = first; chunk = 0; settle(s); }
  __device__ __forceinline__ bool live(const Sizes& s) const { return index < s.tiles; }
  __device__ __forceinline__ void settle(const Sizes& s) {  // past tiles without chunks
    while (index < s.tiles) {
      tile = tile_at(index, s);
      if (chunk < chunks_of(tile.variant)) return;
      index += gridDim.x;
      chunk = 0;
    }
  }
  __device__ __forceinline__ void next(const Sizes& s) {
    if (++chunk >= CHUNKS) settle(s);
  }
};

// The tile is written: make it visible to the matrix units and say so, once a warp.
__device__ __forceinline__ void hand_over(u32 barrier, int lane) {
#if HAS_ASYNC_PROXY
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}

#if CLASSED
// Where box r begins in the tensor of its class: the column at a whole unit, and the row among the class's.
struct ClassedBox { int w, h; };
__device__ __forceinline__ ClassedBox classed_box(const Source& at, const Sizes& s, int r) {
  int row = at.h + FIRST_H + r % ROW_CLASSES * ROWS_APART;
  u32 plane = (u32)s.in_d * s.in_h * s.in_w;
  int lead = (r / ROW_CLASSES * plane + (u32)row * s.in_w) & (VEC - 1);  // of the tensor, ahead of each row's first column
  return {(at.w + lead) & ~(VEC - 1), (row - (row & (ROW_PERIOD - 1))) / ROW_PERIOD};
}
#endif

struct Barriers { u32 full, empty, landed, left; };      // of tiles; of slots or boxes: `landed` by the copy engine

#if BOX
// The loader, one thread: ahead of everyone by as many slots (NCHW) or tiles (channels-last) as are free. Channels-last pixels
// whose taps step over columns or rows come as a box for each plane, with the copy engine's element strides.
__device__ __forceinline__ void load_boxes(const TensorMaps& maps, const Sizes& s, u32 to, u32 stage_bytes, u32 landed, u32 left) {
  Walk walk;
  Cursor cursor = {0, 1};                               // all are free at first
#pragma unroll 1
  for (walk.begin(blockIdx.x, s); walk.live(s); walk.next(s), cursor.next(CHANNELS_LAST ? STAGES_P : STAGES_S)) {
    Source at = source_of(walk.tile, walk.chunk);
    u32 barrier = landed + cursor.stage * 8, bytes = CHANNELS_LAST ? PLANES * SEGMENTS * PLANE * ROW_BYTES : SLOT_BOXES * COPIED_BYTES;
#if PLANE_BARRIERS == 1
    barrier_wait(left + cursor.stage * 8, cursor.parity);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
#endif
    int c = at.channel, w = at.w - COLUMN_PAD, h = at.h + FIRST_H, d = at.d + FIRST_D;
#pragma unroll
    for (int r = 0; r < (CHANNELS_LAST ? PLANES : SLOT_BOXES); r++) {
#if PLANE_BARRIERS > 1
      barrier = landed + (cursor.stage * PLANE_BARRIERS + r) * 8;
      barrier_wait(left + (cursor.stage * PLANE_BARRIERS + r) * 8, cursor.parity);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes / PLANES) : "memory");
#endif
#if STRIDED_BOX
      d = at.d + PLANE_D[r], h = at.h + PLANE_H[r];
#endif
      if (CHANNELS_LAST) w = at.w + RESIDUE[r];
      if (WHOLE) w = r * BOX_PIXELS, h = 0, d = 0;
      else if (SLOTS_BY_BOX && !CLASSED && r) w += ROW_UNITS * VEC;
#if CLASSED
      const ClassedBox box = classed_box(at, s, r);
      w = box.w, h = box.h, c = at.channel / CHANNEL_CLASSES;
#endif
      asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];\n"
                   ::"r"(to + cursor.stage * stage_bytes + r * (SLOTS_BY_BOX ? SLOT_BOX_BYTES : PLANE_PITCH * ROW_BYTES)), "l"(CLASSED ? maps.of + r : maps.of), "r"(CHANNELS_LAST ? c : w), "r"(CHANNELS_LAST ? w : h), "r"(CHANNELS_LAST ? h : d), "r"(CHANNELS_LAST ? d : c), "r"(at.n), "r"(barrier) : "memory");
    }
  }
}
#endif

__device__ __forceinline__ void produce(const char* __restrict__ x, const Sizes& s, const int* segments, u32 tiles, u32 slots, const Barriers& barriers, int thread) {
  int lane = thread & 31;
  Walk now;
  Cursor tile = {0, 1};
#if !CHANNELS_LAST
  Pixels own;
  if (SLOTS_BY_BOX) own.locate(x, s, Source(), segments, thread);
  Cursor slot = {0, 0};
#if !SLOTS_BY_BOX
  Walk ahead;
  ahead.begin(blockIdx.x, s);
  u32 next_slot = 0;
#pragma unroll 1
  for (int i = 0; i < STAGES_S - 1; i++) {
    if (ahead.live(s)) {
      stage(x, s, source_of(ahead.tile, ahead.chunk), slots + i * SLOT_BYTES, thread);
      ahead.next(s);
    }
    copy_commit();
  }
  next_slot = STAGES_S - 1;
#endif
#pragma unroll 1
  for (now.begin(blockIdx.x, s); now.live(s); now.next(s), tile.next(STAGES_P), slot.next(STAGES_S)) {
    if (!SLOTS_BY_BOX && now.chunk == 0) own.locate(x, s, source_of(now.tile, 0), segments, thread);
#if SLOTS_BY_BOX
    barrier_wait(barriers.landed + slot.stage * 8, slot.parity);
#else
    copy_wait<STAGES_S - 2>();
    named_sync<1, PRODUCER_THREADS>();                  // everyone's copies have landed, and everyone has left the next slot
    if (ahead.live(s)) {
      stage(x, s, source_of(ahead.tile, ahead.chunk), slots + next_slot * SLOT_BYTES, thread);
      ahead.next(s);
    }
    if (++next_slot == STAGES_S) next_slot = 0;
    copy_commit();
#endif
    barrier_wait(barriers.empty + tile.stage * 8, tile.parity);
    int channel = now.chunk * CK;
    // Boxes bring zeros for pixels that do not exist, but for those ahead of a class's rows.
    u32 exist = SLOTS_BY_BOX && !WHOLE && (!CLASSED || FIRST_W >= 0 || now.tile.w > 0) ? 0xffffffffu : own.ok;
    if (CLASSED ? CHANNEL_CLASSES == 1 : own.plane % VEC == 0) {
      turn<true>(own, exist, channel, CIN_G - channel, slots + slot.stage * SLOT_BYTES, tiles + tile.stage * STAGE_BYTES, thread);
    } else {
      turn<false>(own, exist, channel, CIN_G - channel, slots + slot.stage * SLOT_BYTES, tiles + tile.stage * STAGE_BYTES, thread);
    }
    hand_over(barriers.full + tile.stage * 8, lane);
#if SLOTS_BY_BOX
    if (lane == 0) barrier_arrive(barriers.left + slot.stage * 8);
#endif
  }
#elif BOX
#pragma unroll 1
  for (now.begin(blockIdx.x, s); now.live(s); now.next(s), tile.next(STAGES_P)) {
    barrier_wait(barriers.landed + tile.stage * 8, tile.parity ^ 1);
    round_units(tiles + tile.stage * STAGE_BYTES, thread);
    hand_over(barriers.full + tile.stage * 8, lane);
  }
#else
  Walk ahead;
  Cursor free = {0, 1};
  int pending = 0;
  ahead.begin(blockIdx.x, s);
#pragma unroll 1
  for (now.begin(blockIdx.x, s); now.live(s); now.next(s), tile.next(STAGES_P), pending--) {
#pragma unroll 1
    for (; pending < STAGES_P - 1; pending++) {         // one more at each turn, STAGES_P - 1 at the first
      if (ahead.live(s)) {
        barrier_wait(barriers.empty + free.stage * 8, free.parity);
        fetch(x, s, source_of(ahead.tile, ahead.chunk), segments, tiles + free.stage * STAGE_BYTES, thread);
        ahead.next(s);
        free.next(STAGES_P);
      }
      copy_commit();
    }
    copy_wait<STAGES_P - 2>();
    round_units(tiles + tile.stage * STAGE_BYTES, thread);
    hand_over(barriers.full + tile.stage * 8, lane);
  }
#endif
}

// =====================================================================================================================
// Weights: fragments in the order in which they are used
// =====================================================================================================================

#define FRAGMENTS(entries) ((entries) * CHUNKS * K_STEPS * PARTS)
#define ENTRY_BYTES (STEPS_PER_TAP * WGS_M * FRAGMENT)  // of a tap's weights for a chunk
#if WEIGHTS_BOX && !(BOX && GRAD_INPUT && PARTS == 1 && (SUBS == 1 || WGS_M == 1) && (RESIDENT || W_STAGE % K_STEPS == 0))
#error "boxes have whole taps, whose channels lie in memory as K does"
#endif

__device__ __forceinline__ const char* fragments_of(const char* packed, const Tile& t) {
  long long before = (long long)(t.group * COUT_BLOCKS + t.cout_block) * FRAGMENTS(ENTRY[VARIANTS * (MB + 1) - 1]);
  return packed + (before + FRAGMENTS(ENTRY[t.variant * (MB + 1)])) * (WGS_M * FRAGMENT);
}

#define STEPS_PER_TAP (K_STEPS * PARTS)
// A stretch is a piece of code without a loop: matrix instructions are queued from its beginning to its end. STRAIGHT: all blocks
// of a chunk; else TAPS_UNROLLED taps of a block, and single ones that are left. A stage of the ring holds W_STAGE fragments of a
// stretch, its last one what is left, so that the code knows where stages begin. RESIDENT: a chunk is a stage, one behind the other.
#define STAGE_FRAGMENTS(left) ((left) < W_STAGE ? (left) : W_STAGE)
#define LONGEST_STRETCH (TAPS_UNROLLED * STEPS_PER_TAP)  // where not STRAIGHT

#if WGMMA
#if WEIGHTS_BOX
__device__ __forceinline__ void announce(u32 bytes, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bring_tap(u32 to, const TensorMap& map, int channel, int tap, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %5}], [%6];\n"
               ::"r"(to), "l"(&map), "r"(channel), "r"(tap), "r"(row), "r"(0), "r"(barrier) : "memory");
}
#else
__device__ __forceinline__ void bring(u32 to, const char* from, u32 bytes, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#endif

// Where a tile's weights come from, in the order in which they are used.
#if WEIGHTS_BOX
struct Weights {  // not packed: (COUT, taps, CIN_G) as a tensor; a box is a chunk's channels for all rows of a sub-position, swizzled as pixels are
  const TensorMap& map;
  int row, channel, entry;
};
__device__ __forceinline__ Weights weights_of(const TensorMap& map, const Tile& t) {
  return {map, t.group * COUT_G + t.cout_block * (WGS_M * ROWS_PER_SUB), 0, 0};
}
__device__ __forceinline__ void begin_chunk(Weights& from, const Tile& t, int chunk) {
  from.channel = chunk * CK;
  from.entry = ENTRY[t.variant * (MB + 1)];
}
__device__ __forceinline__ void bring(u32 to, Weights& from, u32 bytes, u32 barrier) {
  announce(bytes, barrier);
#pragma unroll 1
  for (u32 end = to + bytes; to < end; from.entry++)
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++, to += ENTRY_BYTES / SUBS) {
      int tap = TAP_INDEX[from.entry * SUBS + sub];
      bring_tap(to, from.map, from.channel, tap < 0 ? TAPS : tap, from.row, barrier);  // beyond the last tap: zeros
    }
}
#else
typedef const char* Weights;  // packed; chunks lie one behind the other
__device__ __forceinline__ Weights weights_of(const char* packed, const Tile& t) { return fragments_of(packed, t); }
#endif

// One thread: streams every tile's weights through the ring; RESIDENT: loads them once.
template <class Source>
__device__ __forceinline__ void stream_weights(const Source& packed, const Sizes& s, u32 ring, u32 full, u32 empty) {
  wait_for_results();                                   // of `pack`
#if RESIDENT
  if (blockIdx.x >= s.tiles) return;
  Tile t = tile_at(blockIdx.x, s);
  Weights from = weights_of(packed, t);
  u32 bytes = entries_of(t.variant) * STEPS_PER_TAP * (WGS_M * FRAGMENT);
  if (bytes == 0) return;
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
#if WEIGHTS_BOX
    begin_chunk(from, t, chunk);
    bring(ring + chunk * bytes, from, bytes, full + chunk * 8);
#else
    bring(ring + chunk * bytes, from + (long long)chunk * bytes, bytes, full + chunk * 8);
#endif
  }
#else
  Cursor cursor = {0, 1};
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    Tile t = tile_at(index, s);
    Weights from = weights_of(packed, t);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks_of(t.variant); chunk++) {
#if WEIGHTS_BOX
      begin_chunk(from, t, chunk);
#endif
#pragma unroll 1
      for (int b = 0; b < (STRAIGHT ? 1 : MB); b++) {
        int left = STRAIGHT ? entries_of(t.variant) : ENTRY[t.variant * (MB + 1) + b + 1] - ENTRY[t.variant * (MB + 1) + b];
        left *= STEPS_PER_TAP;
#pragma unroll 1
        while (left > 0) {
          int stretch = STRAIGHT ? left : left >= LONGEST_STRETCH ? LONGEST_STRETCH : STEPS_PER_TAP;
          left -= stretch;
#pragma unroll 1
          for (; stretch > 0; stretch -= W_STAGE, cursor.next(STAGES_W)) {
            u32 bytes = STAGE_FRAGMENTS(stretch) * (WGS_M * FRAGMENT);
            barrier_wait(empty + cursor.stage * 8, cursor.parity);
            bring(ring + cursor.stage * (W_STAGE * WGS_M * FRAGMENT), from, bytes, full + cursor.stage * 8);
#if !WEIGHTS_BOX
            from += bytes;
#endif
          }
        }
      }
    }
  }
#endif
}
#endif

// A thread's part of a ring's first fragment.
__device__ __forceinline__ u32 fragment_part(int wg, int thread) {
#if WEIGHTS_BOX  // rows of CK channels: the 16 bytes whose address it gives to ldmatrix, of one of its warp's 16 rows and half a step
  int lane = thread & 31;
  return (SPLIT == 1 ? wg * (64 * ROW_BYTES) : 0) + unit_at(thread / 32 * 16 + lane % 16, lane / 16);
#else
  return (SPLIT == 1 ? wg * FRAGMENT : 0) + thread * 16;
#endif
}
// Fragment i of those that begin at `at`.
__device__ __forceinline__ void load_fragment(u32 (&a)[4], u32 at, int i) {
#if WEIGHTS_BOX  // a step of K is another 32 bytes of the row, and bits of the address, as the swizzle is
  load_matrices(a, (at ^ (i % K_STEPS * 32)) + i / K_STEPS * ENTRY_BYTES);
#else
  load_shared_128(a, at + i * (WGS_M * FRAGMENT));
#endif
}

// The consumers' side. Before sm_90 fragments come straight from global memory (L2).
struct Fragments {
  u32 ring, full, empty;                               // of the ring: this thread's part of its first fragment; barriers
  Cursor cursor;                                       // the stage to be waited for next
  u32 at;                                              // this thread's part of the first fragment of the stage in hand, or of the stretch
  u32 in_hand;                                         // the barrier that says that the stage in hand is free
  bool first;                                          // RESIDENT: the first tile waits for the weights
  const char* from;

  __device__ __forceinline__ void begin(const char* packed, const Tile& t, int offset) {
#if !WGMMA
    from = fragments_of(packed, t) + offset;
#elif RESIDENT
    at = ring;
#endif
  }
  __device__ __forceinline__ void begin_chunk(int chunk) {
    if (WGMMA && RESIDENT && first) barrier_wait(full + chunk * 8, 0);
  }
  __device__ __forceinline__ void end() { first = false; }
  // Fragment i of a stretch; a stage is waited for with its first.
  __device__ __forceinline__ void load(u32 (&a)[4], int i) {
#if !WGMMA
    const uint4 v = __ldg((const uint4*)from);
    a[0] = v.x; a[1] = v.y; a[2] = v.z; a[3] = v.w;
    from += WGS_M * FRAGMENT;
#elif RESIDENT
    load_fragment(a, at, i);
#else
    if (i % W_STAGE == 0) {
      barrier_wait(full + cursor.stage * 8, cursor.parity);
      at = ring + cursor.stage * (W_STAGE * WGS_M * FRAGMENT);
      in_hand = empty + cursor.stage * 8;
      cursor.next(STAGES_W);
    }
    load_fragment(a, at, i % W_STAGE);
#endif
  }
  __device__ __forceinline__ void end_stretch(int steps) {
    if (WGMMA && RESIDENT) at += steps * (WGS_M * FRAGMENT);
  }
  __device__ __forceinline__ void skip(int variant) {  // a tile
    for (int chunk = 0; chunk < chunks_of(variant); chunk++)
      for (int b = 0; b < (STRAIGHT ? 1 : MB); b++) {
        int left = (STRAIGHT ? entries_of(variant) : ENTRY[variant * (MB + 1) + b + 1] - ENTRY[variant * (MB + 1) + b]) * STEPS_PER_TAP;
        int longest = STRAIGHT ? left : LONGEST_STRETCH, whole = longest ? left / longest : 0;
        int stages = whole * ((longest + W_STAGE - 1) / W_STAGE) + (STRAIGHT ? 0 : left % longest / STEPS_PER_TAP * ((STEPS_PER_TAP + W_STAGE - 1) / W_STAGE));
        for (; stages > 0; stages--) cursor.next(STAGES_W);
      }
  }
};

// =====================================================================================================================
// Consumers
// =====================================================================================================================

struct Place { int n, d, h, w; };                      // of a subtile in a tile, in q

// PAIRED: subtiles one below the other are neighbours, so that one matrix instruction takes both (WIDE).
__device__ __forceinline__ constexpr Place place_of(int subtile) {
  return {subtile / (W_SUBTILES * H_SUBTILES * TILE_D), subtile / (W_SUBTILES * H_SUBTILES) % TILE_D,
          PAIRED ? (subtile / (2 * W_SUBTILES) % ((H_SUBTILES + 1) / 2) * 2 + subtile % 2) * SUB_H : subtile / W_SUBTILES % H_SUBTILES * SUB_H,
          (PAIRED ? subtile / 2 : subtile) % W_SUBTILES * SUB_W};
}
__device__ __forceinline__ constexpr int pixel_row_of(int subtile) {  // its first pixel's row in the tile, for a tap of shift 0
  Place p = place_of(subtile);
  return ((p.n * ROWS_D + p.d * ROW_STEP_D) * ROWS_H + p.h * ROW_STEP_H) * PITCH + p.w;
}
#define SUBTILES_OF_WGMMA (WIDE ? 2 : 1)                   // that a matrix instruction takes
#define GROUP_ROWS (SUB_H == 8 ? ROW_STEP_H * PITCH : 8)  // pixel rows from one group of eight columns to the next

// Where a consumer's pixels lie in a tile. `start`: of its first subtile; wgmma: the lower half of its descriptor, the same in all
// threads; mma.sync: the tile's address.
struct Columns {
  u32 start;
  int first;                                           // its first subtile
#if PLANE_BARRIERS > 1
  u32 full, empty, parity;                             // of the tile's first plane
#endif
};

// Pixel rows from the consumer's first subtile to another of its: known to the compiler where both halves of a tile are alike.
__device__ __forceinline__ constexpr bool halves_alike() {
  for (int nb = 1; SPLIT == 0 && nb < NB; nb++)
    if (pixel_row_of(NB + nb) - pixel_row_of(NB) != pixel_row_of(nb) - pixel_row_of(0)) return false;
  return true;
}
__device__ __forceinline__ int rows_to(int nb, int first) {
  constexpr bool alike = halves_alike();
  return alike ? pixel_row_of(nb) - pixel_row_of(0) : pixel_row_of(first + nb) - pixel_row_of(first);
}

__device__ __forceinline__ Columns pixels_of(u32 tile, int first) {
#if WGMMA
  u32 start = (tile + pixel_row_of(first) * ROW_BYTES) >> 4 | 1u << 16;
  return {__shfl_sync(0xffffffffu, start, 0), first};  // so that ptxas counts in uniform registers
#else
  return {tile, first};
#endif
}

#if PRECISION < 2
#define TAIL ", 1, 1"
#else
#define TAIL ", 1, 1, 0"
#endif
#if WIDE  // groups of columns lie evenly over two neighbouring subtiles (NOTES: kb78 0.79 -> 0.71 ms, unet1 channels_last 0.244 -> 0.227)
#define MULTIPLY_SUBTILES MULTIPLY_128
#else
#define MULTIPLY_SUBTILES MULTIPLY_64
#endif

// acc[64 x 64 NB] += fragment x pixels; `shift` is the tap's, in pixel rows, `part` the pixels' part. FRESH: = instead of +=.
template <bool FRESH>
__device__ __forceinline__ void multiply(float (&acc)[NB][32], const u32 (&a)[4], const Columns& pixels, int shift, int k_step, int part, int lane) {
#if WGMMA
  const u64 upper = ((u64)(GROUP_ROWS * ROW_BYTES >> 4) << 32) | ((u64)(ROW_BYTES == 32 ? 3 : ROW_BYTES == 64 ? 2 : 1) << 62);
#pragma unroll
  for (int nb = 0; nb < NB; nb += SUBTILES_OF_WGMMA) {
    u64 b = upper | (pixels.start + shift * (ROW_BYTES / 16) + (rows_to(nb, pixels.first) * ROW_BYTES + k_step * 32 + part * PART_BYTES) / 16);
    float* d = acc[nb];
#if PROMOTE
    if (FRESH) MULTIPLY_SUBTILES(d, a, b, "0");
    else MULTIPLY_SUBTILES(d, a, b, "1");
#else
    MULTIPLY_SUBTILES(d, a, b, "1");
#endif
  }
#else
  int matrix = lane >> 3;                              // ldmatrix: columns 8j.. of both halves of K, then columns 8j + 8..
#pragma unroll
  for (int nb = 0; nb < NB; nb++) {
    int row = pixel_row_of(pixels.first + nb) + shift;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      int p = row + (j + (matrix >> 1)) * GROUP_ROWS + (lane & 7);
      u32 b[4];
      load_matrices(b, pixels.start + part * PART_BYTES + unit_at(p, k_step * 2 + (matrix & 1)));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float* d = &acc[nb][4 * (j + i)];
#if PRECISION < 2
#define MMA "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
#elif PRECISION == 2
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
        asm volatile(MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * i]), "r"(b[2 * i + 1]));
      }
    }
  }
#endif
}

// Step i of a stretch of `steps`. Fragments take FRAGMENT_SETS sets of registers in turn: one is multiplied by, the one before may
// still be, the next one is loaded. At the end of a stretch the pipeline drains, since in a loop ptxas cannot see that a set is
// free again and serialises every wgmma, C7513 (NOTES: kb57's multiplications took 2.9 ms instead of 1.6). CONTINUED: where the
// steps of a chunk are a multiple of the sets it can, and a chunk's last step is multiplied while the next chunk begins.
__device__ __forceinline__ void step(float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights, const Columns& pixels, int shift, int i, int steps, int lane) {
  int k_step = i / PARTS % K_STEPS, part = i % PARTS;
#if WGMMA
  wgmma_fence();
#else
  weights.load(a[i % FRAGMENT_SETS], i);
#endif
  if (PARTS == 2 && i == 0) multiply<true>(acc, a[i % FRAGMENT_SETS], pixels, shift, k_step, 1, lane);
  else if (PARTS == 2 && part == 0) multiply<false>(acc, a[i % FRAGMENT_SETS], pixels, shift, k_step, 1, lane);
  multiply<false>(acc, a[i % FRAGMENT_SETS], pixels, shift, k_step, 0, lane);
#if WGMMA
  wgmma_commit();
  u32 done = weights.in_hand;
  if (i + 1 < steps) {
    weights.load(a[(i + 1) % FRAGMENT_SETS], i + 1);
    wgmma_wait<1>();
  } else if (CONTINUED) {
    wgmma_wait<1>();
  } else {
    wgmma_wait<0>();
  }
  if (!RESIDENT && (i + 1 == steps || (i + 1) % W_STAGE == 0)) {
    __syncwarp();
    if (lane == 0) barrier_arrive(done);
  }
#endif
}

#if STRAIGHT
#define SUM_ARGUMENT
#endif
// A pixel tile that no matrix instruction reads any more, by its barrier; 0: none.
__device__ __forceinline__ void give_back(u32 barrier, int lane) {
  __syncwarp();
  if (lane == 0 && (!CONTINUED || barrier)) barrier_arrive(barrier);
}

#if STRAIGHT  // few steps: all blocks of a chunk are one stretch
__device__ constexpr int entry_at(int i) {
  constexpr int entry[] = ENTRIES;
  return entry[i];
}
__device__ constexpr int row_at(int i) {
  constexpr int row[] = TAP_ROWS;
  return row[i];
}
__device__ constexpr int block_of(int variant, int entry) {
  int b = 0;
  while (entry >= entry_at(variant * (MB + 1) + b + 1)) b++;
  return b;
}

#if PLANE_BARRIERS > 1
__device__ constexpr int plane_at(int i) {
  constexpr int plane[] = PLANES_OF_ENTRIES;
  return plane[i];
}
#endif

template <int VARIANT, int STEP>
__device__ __forceinline__ void multiply_from(float (&acc)[MB][NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights, const Columns& pixels, u32 behind, int lane) {
  constexpr int first = entry_at(VARIANT * (MB + 1)), steps = (entry_at(VARIANT * (MB + 1) + MB) - first) * STEPS_PER_TAP;
  if constexpr (STEP < steps) {
    constexpr int entry = first + STEP / STEPS_PER_TAP, block = block_of(VARIANT, entry);
#if PLANE_BARRIERS > 1  // a plane is waited for with its first step; behind it no instruction reads the plane before
    constexpr int plane = plane_at(entry);
    constexpr bool begins = STEP % STEPS_PER_TAP == 0 && (STEP == 0 || plane_at(entry - (STEP > 0)) != plane);
    if (begins) barrier_wait(pixels.full + plane * 8, pixels.parity);
#endif
    step(acc[block], a, weights, pixels, row_at(entry), STEP, steps, lane);
    if (CONTINUED && STEP == 0) give_back(behind, lane);
#if PLANE_BARRIERS > 1
    if (begins && STEP > 0) give_back(pixels.empty + (plane - 1) * 8, lane);
#endif
    multiply_from<VARIANT, STEP + 1>(acc, a, weights, pixels, behind, lane);
  } else {
    weights.end_stretch(steps);
  }
}

// Variants share a stretch where their taps lie alike, as the phases of a kernel do whose sizes are multiples of its strides.
// (NOTES: with one for each of 4 dcgan3 in channels_last takes 3.4 s to compile instead of 0.9.)
template <int STRETCH>
__device__ __forceinline__ void multiply_chunk(int variant, float (&acc)[MB][NB][32], Fragments& weights, const Columns& pixels, u32 behind, int lane) {
  constexpr int first[] = FIRST_OF_STRETCHES;  // variant
#if STRETCHES < VARIANTS
  int stretch = STRETCH_OF[variant];
#else
  int stretch = variant;
#endif
  if (STRETCHES == 1 || stretch == STRETCH) {
    u32 a[FRAGMENT_SETS][4];
    weights.load(a[0], 0);
#if STRETCHES < VARIANTS
    Columns shifted = pixels;
    shifted.start += VARIANT_ROW[variant] * (ROW_BYTES / 16);
    multiply_from<first[STRETCH], 0>(acc, a, weights, shifted, behind, lane);
#else
    multiply_from<first[STRETCH], 0>(acc, a, weights, pixels, behind, lane);
#endif
  } else if constexpr (STRETCH + 1 < STRETCHES) {
    multiply_chunk<STRETCH + 1>(variant, acc, weights, pixels, behind, lane);
  }
}
#else
template <int COUNT>
__device__ __forceinline__ void multiply_some(float (&acc)[NB][32], Fragments& weights, const Columns& pixels, int entry, int lane) {
  u32 a[FRAGMENT_SETS][4];
#if WGMMA
  weights.load(a[0], 0);
#endif
  const int* taps = TAP_ROW + __shfl_sync(0xffffffffu, entry, 0);
#pragma unroll
  for (int i = 0; i < COUNT * STEPS_PER_TAP; i++)
    step(acc, a, weights, pixels, taps[i / STEPS_PER_TAP], i, COUNT * STEPS_PER_TAP, lane);
  weights.end_stretch(COUNT * STEPS_PER_TAP);
}

#if PROMOTE
// Tensor cores truncate as they add, an error that grows with the length of a sum (NOTES: kb57's IEEE error was 3.8 times
// PyTorch's with sums of 54 products of 8 channels). So sums are kept short, and added with rounding.
__device__ __forceinline__ void promote(float (&acc)[NB][32], float (&sum)[NB][32]) {
#pragma unroll
  for (int nb = 0; nb < NB; nb++)
#pragma unroll
    for (int i = 0; i < 32; i++) {
      sum[nb][i] += acc[nb][i];
      if (!WGMMA) acc[nb][i] = 0.f;                     // wgmma begins a stretch's sums anew
    }
}
#define SUM_PARAMETER float (&sum)[MB][NB][32],
#define SUM_ARGUMENT sum,
#else
#define SUM_PARAMETER
#define SUM_ARGUMENT
#endif

template <int FIRST>
__device__ __forceinline__ void multiply_chunk(int variant, float (&acc)[MB][NB][32], SUM_PARAMETER Fragments& weights, const Columns& pixels, u32 behind, int lane) {
#pragma unroll
  for (int b = 0; b < MB; b++) {
    int e = ENTRY[variant * (MB + 1) + b], last = ENTRY[variant * (MB + 1) + b + 1];
#pragma unroll 1
    for (; e + TAPS_UNROLLED <= last; e += TAPS_UNROLLED) {
      multiply_some<TAPS_UNROLLED>(acc[b], weights, pixels, e, lane);
#if PROMOTE
      promote(acc[b], sum[b]);
#endif
    }
#if TAPS_LEFT                                           // some block has a number of taps that is no multiple
#pragma unroll 1
    for (; e < last; e++) {
      multiply_some<1>(acc[b], weights, pixels, e, lane);
#if PROMOTE
      promote(acc[b], sum[b]);
#endif
    }
#endif
  }
}
#endif

// --- epilogue ---------------------------------------------------------------------------------------------------------
// A warp holds 16 rows of M. They pass through a shared buffer, so that memory is written in whole lines: NCHW 8 rows of a run of
// RUN x W_SUBS consecutive outputs, through a buffer of the warp; channels-last ROUND pixels of ROWS_PER_SUB channels, through one
// of all warps that hold these.
#define RUN (RUN_GROUPS * 8)
#define ROUND (64 / RUN * RUN)                          // channels-last: pixels that pass through at once, in whole runs: of one row or, SUB_H = 8, of several
// Bytes of a row of the buffer; the rest beyond whole 128 bytes lets rows meet different banks, and a row begin up to 31 bytes late.
#define RUN_PITCH ((RUN * W_SUBS * ELEMENT + 127) / 128 * 128 + (ELEMENT == 4 ? 32 : 48))
#if SHUFFLED
#define LINE_PITCH ((RUN + 1) * INNER * 4)              // of a line of the output, in float32
#define BUFFER_BYTES (PER_SLAB * LINE_PITCH)
#elif CHANNELS_LAST
#define BUFFER_BYTES (ROUND * 16 * ELEMENT)             // a warp's part
#else
#define BUFFER_BYTES (8 * RUN_PITCH)
#endif
#define RUN_SUBTILES (SUB_H == 8 ? RUN_GROUPS : RUN_GROUPS > 8 ? RUN_GROUPS / 8 : 1)  // neighbours along W that a run crosses
#define RUNS_OF_SUBTILE (SUB_H == 8 ? 8 : RUN_GROUPS > 8 ? 1 : 8 / RUN_GROUPS)
// Group k of run i of subtiles RUN_FIRST(r) ...: which subtile, and which of its groups of 8 columns.
#define RUN_FIRST(r) (PAIRED ? (r) / 2 * (2 * RUN_SUBTILES) + (r) % 2 : (r) * RUN_SUBTILES)  // subtile of a run's first group
#define RUN_NB(r, i, k) (PAIRED ? RUN_FIRST(r) + 2 * (k) : SUB_H == 8 ? RUN_FIRST(r) + (k) : RUN_FIRST(r) + (k) / 8)
#define RUN_J(r, i, k) (SUB_H == 8 ? (i) : RUN_GROUPS > 8 ? (k) % 8 : (i) * RUN_GROUPS + (k))

// A warp's 16 rows of M are output channels of one (d, h) sub-position (ROWS_PER_SUB is 64, 32 or 16).
struct Slab {
  int cout, couts;                                      // first channel in the group, and how many of the 16 exist
  int od, oh;                                           // offsets of the sub-position
};

__device__ __forceinline__ Slab slab_of(const Tile& t, int cout_block, int warp) {
  Slab slab;
  int sub = warp * 16 / ROWS_PER_SUB;
  slab.cout = cout_block * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB;
  slab.couts = COUT_G - slab.cout < 16 ? COUT_G - slab.cout : 16;
  slab.od = SUB_D[t.variant * SUBS + sub];
  slab.oh = SUB_HH[t.variant * SUBS + sub];
  return slab;
}

#if !CHANNELS_LAST
#define OUTPUTS (RUN * W_SUBS)                          // of a row of a run

#define CONTIGUOUS (W_SUBS == OUT_STEP_W)                // a tile's outputs of a row are neighbours in memory

// UNIT, below: bytes at multiples of which all rows of a run begin and end: 16, two outputs or one.
#define SHIFTED(unit) (ELEMENT == 2 && (unit) == 2)     // rows lie in the buffer as they do in their first sector
#define TOGETHER(unit) (SHIFTED(unit) ? 1 : 2)          // outputs that a thread stores to the buffer together

// Which of a thread's outputs of a row go first to the buffer, as an exclusive or of their order, so that the lanes of an
// instruction meet different banks: rows lie 8 banks apart (half precision: 12), the outputs of neighbouring lanes 2 W_SUBS.
template <int UNIT>
__device__ __forceinline__ int order_of(int g, int q) {
  if (ELEMENT == 2) return W_SUBS % 2 == 0 ? (g & 1) << 1 : 0;
  int by_column = W_SUBS % 4 == 0 ? q << 1 : W_SUBS % 2 == 0 ? q & 2 : 0;
  return TOGETHER(UNIT) == 2 ? by_column : by_column | g >> 2;
}

// One thread's 2 W_SUBS neighbouring outputs to the buffer.
template <int UNIT>
__device__ __forceinline__ void put(float (&v)[2 * W_SUBS], u32 at, int order) {
#pragma unroll
  for (int bit = TOGETHER(UNIT); bit < 8 && W_SUBS % bit == 0; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 2 * W_SUBS; i++) {
      if (i & bit) continue;
      float low = v[i], high = v[i ^ bit];
      v[i] = order & bit ? high : low;
      v[i ^ bit] = order & bit ? low : high;
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * W_SUBS; i += TOGETHER(UNIT)) {
    u32 to = at + (i ^ order) * ELEMENT;
#if ELEMENT == 4
    if (TOGETHER(UNIT) == 2) store_shared_f32x2(to, v[i], v[i ^ 1]);
    else store_shared_f32(to, v[i]);
#else
    if (TOGETHER(UNIT) == 2) store_shared_u32(to, pack_pair(make_float2(v[i], v[i ^ 1])));
    else store_shared_u16(to, STORE_BITS(v[i]));
#endif
  }
}

#if !CONTIGUOUS
// Eight rows with the other tiles' sub-positions between.
__device__ __forceinline__ void store_spread(char* to, long long plane, int rows, int left, u32 buffer, int lane) {
#pragma unroll
  for (int i = 0; i < (OUTPUTS + 31) / 32; i++) {
    int e = lane + 32 * i, o = e / W_SUBS * OUT_STEP_W + e % W_SUBS;
    bool in = (OUTPUTS % 32 == 0 || e < OUTPUTS) && o < left;
#pragma unroll
    for (int r = 0; r < 8; r++) {
      u32 from = buffer + r * RUN_PITCH + (OUTPUTS % 32 == 0 || e < OUTPUTS ? e : 0) * ELEMENT;
      char* p = to + r * plane + (long long)o * ELEMENT;
      bool ok = in && (COUT_G % 16 == 0 || r < rows);
      if (ELEMENT == 4) store_global_if(p, load_shared_u32(from), ok);
      else store_global_16_if(p, load_shared_u16(from), ok);
    }
  }
}
#else
template <int UNIT>
__device__ __forceinline__ void copy_unit(char* to, u32 from, bool ok) {
  u32 v[4];
  if (UNIT == 16) load_shared_128(v, from);
  else if (UNIT == 8) load_shared_64(v, from);
  else v[0] = UNIT == 4 ? load_shared_u32(from) : load_shared_u16(from);
  if (UNIT == 16) store_global_128_if(to, v, ok);
  else if (UNIT == 8) store_global_64_if(to, v, ok);
  else if (UNIT == 4) store_global_if(to, v[0], ok);
  else store_global_16_if(to, v[0], ok);
}

// Eight rows in units: an instruction stores 32 of them, of several rows if they are short.
template <int UNIT>
__device__ __forceinline__ void store_units(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int PER_ROW = OUTPUTS * ELEMENT / UNIT;
#pragma unroll
  for (int i = 0; i < (8 * PER_ROW + 31) / 32; i++) {
    int index = lane + 32 * i, first = 32 * i / PER_ROW, more = index / PER_ROW - first;  // rows: the first lane's, and how many on
    // Compared, not divided, where rows are long (NOTES: kb81, rows of 320 outputs, bfloat16 0.207 -> 0.187 ms).
    if (PER_ROW >= 32) more = 32 * i % PER_ROW + 31 >= PER_ROW && index >= (first + 1) * PER_ROW;
    int r = first + more, at = (index - r * PER_ROW) * UNIT;
    char* row = to + first * plane + (PER_ROW >= 32 ? more ? plane : 0 : more * plane);
    bool in = PER_ROW % 4 == 0 || r < 8;
    copy_unit<UNIT>(row + at, in ? buffer + r * RUN_PITCH + at : buffer, in && at < end && (COUT_G % 16 == 0 || r < rows));
  }
}

#if ELEMENT == 4
// Eight rows that begin anywhere, a lane an output: each instruction begins at a sector's first output, since a sector of 32
// bytes whose parts are stored at different times costs as much as 5 to 10 whole ones (NOTES: loads and stores of kb57
// with rows of 1026 outputs 2.15 ms, of 1024 1.44; 16 bytes a lane and the ends of rows by themselves, as below, 2.00 -> 2.20 ms).
__device__ __forceinline__ void store_sectors(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  u32 first = (u32)(u64)to, step = (u32)plane;
#pragma unroll
  for (int i = 0; i < (OUTPUTS + 38) / 32; i++) {
    u32 v[8];
    int at[8];                                          // the lane's output of each row; some are before or behind it
#pragma unroll
    for (int r = 0; r < 8; r++) {
      at[r] = (lane + 32 * i) * 4 - (int)((first + r * step) & 31);
      v[r] = load_shared_u32(buffer + r * RUN_PITCH + ((u32)at[r] < (u32)end ? at[r] : 0));
    }
#pragma unroll
    for (int r = 0; r < 8; r++) store_global_if(to + r * plane + at[r], v[r], (u32)at[r] < (u32)end && (COUT_G % 16 == 0 || r < rows));
  }
}
#else
// Eight rows that begin between words. The buffer has a row where memory has it in its first sector of 32 bytes, so that 16 bytes
// of the one are 16 of the other; two lanes have a sector. What a row's first and last 16 bytes have of it follows in
// units (NOTES: instead of words made of their neighbours: kb79 bfloat16 0.44 -> 0.34 ms, kb77 0.55 -> 0.44).
template <int UNIT>
__device__ __forceinline__ void store_shifted(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int PER_ROW = (OUTPUTS * ELEMENT + 32 - UNIT + 31) / 32 * 2, ENDS = 16 / UNIT;
#pragma unroll
  for (int i = 0; i < (8 * PER_ROW + 31) / 32; i++) {
    int index = lane + 32 * i, r = index / PER_ROW, unit = index % PER_ROW;
    char* row = to + r * plane;
    int at = unit * 16 - (int)((u64)row & 31);          // in the row
    bool in = PER_ROW % 4 == 0 || r < 8;
    copy_unit<16>(row + at, in ? buffer + r * RUN_PITCH + unit * 16 : buffer, in && at >= 0 && at + 16 <= end && r < rows);
  }
#pragma unroll
  for (int i = 0; i < 8 * 2 * ENDS / 32; i++) {         // ENDS lanes for either end of a row
    int r = (lane + 32 * i) / (2 * ENDS), at = lane % ENDS * UNIT;
    char* row = to + r * plane;
    int phase = (int)((u64)row & 15), head = -phase & 15;
    bool tail = lane & ENDS;
    if (tail) at += ((phase + end) & ~15) - phase;
    bool ok = (tail ? at >= head : at < head) && at < end && r < rows;
    copy_unit<UNIT>(row + at, buffer + r * RUN_PITCH + ((u32)(u64)row & 31) + (ok ? at : 0), ok);
  }
}
#endif

// Eight rows (output channels) of a run from the buffer to memory: `end` bytes of each. `to` is the first row's first output, rows
// lie `plane` bytes apart.
template <int UNIT>
__device__ __forceinline__ void store_rows(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
#if ELEMENT == 4
  if (UNIT == 4) store_sectors(to, plane, rows, end, buffer, lane);
#else
  if (SHIFTED(UNIT)) store_shifted<UNIT>(to, plane, rows, end, buffer, lane);
#endif
  else store_units<UNIT>(to, plane, rows, end, buffer, lane);
}
#endif
#else
// Warps that hold the channels of a sub-position. (NOTES: with a buffer for each, so that a store had 32 bytes of a pixel in half
// precision: bfloat16 kb81 0.214 ms instead of 0.131, unet4 0.356 and 0.236, vae 0.164 and 0.132, kb57 1.00 and 0.89.)
#define TEAM (ROWS_PER_SUB / 16)
#define PIXEL_UNITS (ROWS_PER_SUB * ELEMENT / 16)       // of a pixel in the buffer
#define ROUND_GROUPS (ROUND / 8)                        // of 8 columns of an accumulator
#define MATRICES (ROUND_GROUPS % 2 ? 2 : 4)             // of 8 channels and pixels that are turned together

__device__ __forceinline__ void team_sync() {
  if (TEAM == 1) __syncwarp();
  else named_sync(4 + ((threadIdx.x >> 5) - FIRST_CONSUMER * 4) / TEAM, TEAM * 32);
}

// Byte of a unit of 16 bytes of pixel p in the buffer: swizzled, so that lanes which write (float32: 8 channels of 4 pixels, half
// precision: 16 bytes of 8 pixels) or read (neighbouring units) meet different banks.
__device__ __forceinline__ u32 place_in_round(int p, int unit) {
  if (ELEMENT == 4) return ((p * PIXEL_UNITS + unit) ^ (p & 6)) << 4;
  return (p * PIXEL_UNITS + (unit ^ (p & 7) * PIXEL_UNITS / 8)) << 4;
}

// W sub-position u of runs i ... of subtiles RUN_FIRST(r) ...: a warp's outputs to its team's buffer.
__device__ __forceinline__ void put_round(float (&acc)[MB][NB][32], float (&bias)[2], int r, int i, int u, u32 buffer, int warp, int lane) {
  constexpr signed char blocks[] = BLOCKS_OF_W;         // the block of a W sub-position, -1: it has no taps
#if ELEMENT == 4
  int g = lane >> 2, q = lane & 3;
#pragma unroll
  for (int m = 0; m < ROUND_GROUPS; m++) {
    const int nb = RUN_NB(r, i + m / RUN_GROUPS, m % RUN_GROUPS), j = RUN_J(r, i + m / RUN_GROUPS, m % RUN_GROUPS);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int c = 0; c < 2; c++)
        store_shared_f32(buffer + place_in_round(m * 8 + 2 * q + c, warp * 4 + 2 * h + (g >> 2)) + (g & 3) * 4,
                         blocks[u] < 0 ? bias[h] : acc[blocks[u] < 0 ? 0 : blocks[u]][nb][4 * j + 2 * h + c]);
  }
#else
  u32 row = buffer + place_in_round(lane / 16 * 8 % (MATRICES * 4) + lane % 8, warp * 2 + lane / 8 % 2);  // the lane's of its matrix
#pragma unroll
  for (int m = 0; m < ROUND_GROUPS; m += MATRICES / 2) {
    u32 v[MATRICES];
#pragma unroll
    for (int e = 0; e < MATRICES; e++) {
      const int k = m + e / 2, h = e % 2;
      const int nb = RUN_NB(r, i + k / RUN_GROUPS, k % RUN_GROUPS), j = RUN_J(r, i + k / RUN_GROUPS, k % RUN_GROUPS);
      float (&from)[32] = acc[blocks[u] < 0 ? 0 : blocks[u]][nb];
      v[e] = blocks[u] < 0 ? pack_pair(make_float2(bias[h], bias[h])) : pack_pair(make_float2(from[4 * j + 2 * h], from[4 * j + 2 * h + 1]));
    }
    store_matrices_turned(row + m * 8 * PIXEL_UNITS * 16, v);
  }
#endif
}

#define APART (32 / ELEMENT)                            // pixels between those of a thread
#define LINE (SUB_H == 8 ? RUN : ROUND)                 // pixels of a round in a row of the output

// A round from the buffer to memory. The thread's first unit goes to `to`, column `column` of its row; `couts` channels, `left` columns
// and `lines` rows of the output are left there, and rows lie `pitch` bytes apart.
__device__ __forceinline__ void store_round(char* to, int column, int couts, int left, int lines, long long pitch, u32 from) {
#pragma unroll
  for (int i = 0; i < (ROUND + APART - 1) / APART; i++) {
    int line = i * APART / LINE, over = i * APART % LINE;
    bool crosses = over + APART > LINE && LINE > APART && column + over >= LINE;  // into the row below
    char* at = to + line * pitch + over * (1LL * OUT_STEP_W * COUT * ELEMENT);
    if (crosses) at += pitch - LINE * (1LL * OUT_STEP_W * COUT * ELEMENT);
    bool ok = over * OUT_STEP_W < left + (crosses ? LINE * OUT_STEP_W : 0) && (line + crosses) * OUT_STEP_H < lines && couts > 0;
    if (ROUND % APART != 0) ok = ok && column + i * APART < ROUND;
    u32 v[4];
    load_shared_128(v, from + (ROUND % APART == 0 || ok ? i * (APART * PIXEL_UNITS * 16) : 0));
#if ALIGNED_COUT
    store_global_128_if(at, v, ok);
#else
#pragma unroll
    for (int e = 0; e < VEC; e++) {
#if ELEMENT == 4
      store_global_if(at + e * 4, v[e], ok && e < couts);
#else
      store_global_16_if(at + e * 2, v[e / 2] >> e % 2 * 16, ok && e < couts);
#endif
    }
#endif
  }
}
#endif

#if !CHANNELS_LAST
// Rows h * 8 ... of run i of subtiles RUN_FIRST(r) ...: a thread's outputs of its row to the buffer.
template <int UNIT>
__device__ __forceinline__ void put_rows(float (&acc)[MB][NB][32], float bias, int r, int i, int h, u32 row, int lane) {
  constexpr signed char blocks[] = BLOCKS_OF_W;         // the block of a W sub-position, -1: it has no taps
  int g = lane >> 2, q = lane & 3, order = order_of<UNIT>(g, q);
#pragma unroll
  for (int k = 0; k < RUN_GROUPS; k++) {
    const int nb = RUN_NB(r, i, k), j = RUN_J(r, i, k);
    float v[2 * W_SUBS];
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int u = 0; u < W_SUBS; u++) v[c * W_SUBS + u] = blocks[u] < 0 ? bias : acc[blocks[u] < 0 ? 0 : blocks[u]][nb][4 * j + 2 * h + c];
    put<UNIT>(v, row + (k * 8 + 2 * q) * W_SUBS * ELEMENT, order);
  }
}

#if CONTIGUOUS
template <int UNIT>
__device__ __forceinline__ void pass_rows(float (&acc)[MB][NB][32], float bias, int r, int i, int h, u32 row, char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  put_rows<UNIT>(acc, bias, r, i, h, row, lane);
  __syncwarp();
  store_rows<UNIT>(to, plane, rows, end, buffer, lane);
}
#endif
#endif

#if SHUFFLED
// A line of a run from the buffer to memory, outputs `first` ... of which those from 0 to `end` exist. (One by one:
// most layers whose phases are rows write few outputs, FSRCNN's a thirteenth of what it reads.)
__device__ __forceinline__ void store_line(char* to, int first, int end, u32 line, int lane) {
#pragma unroll
  for (int i = 0; i < (RUN * INNER + 31) / 32; i++) {
    int e = lane + 32 * i, at = first + e;
    bool ok = (u32)at < (u32)end && (RUN * INNER % 32 == 0 || e < RUN * INNER);
    float v = load_shared_f32(line + (RUN * INNER % 32 == 0 || ok ? e : 0) * 4);
    char* p = to + (long long)at * ELEMENT;
    if (ELEMENT == 4) store_global_if(p, STORE_BITS(v), ok);
    else store_global_16_if(p, STORE_BITS(v), ok);
  }
}

// As below, of one W sub-position: rows of M go to their lines in the buffer, where the phases of neighbouring q are neighbours.
__device__ __forceinline__ void epilogue(float (&acc)[MB][NB][32], const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, const Sizes& s, const Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  asm volatile("" : "+r"(lane));
  int g = lane >> 2, q = lane & 3;
  Slab slab = slab_of(t, cout_block, warp);
  if (slab.couts <= 0) return;
  float b[2] = {0.f, 0.f};
  u32 place[2];
  bool exists[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    Row row = shuffled_row(slab.cout + g + 8 * h);
    exists[h] = row.exists;
    place[h] = buffer + row.line * LINE_PITCH + (2 * q * INNER + row.place) * 4;
    if (bias && row.exists) b[h] = VALUE(bias[row.channel]);
  }
  constexpr int PER_PIXEL = CHANNELS_LAST ? LAYER_CHANNELS : 1;  // neighbours
  int first_line = slab.cout / 16 * PER_SLAB;
#pragma unroll
  for (int r = 0; r < NB / RUN_SUBTILES; r++) {
    Place at = place_of(first_subtile + RUN_FIRST(r));
    int n = t.n + at.n, d = OUT_STEP_D * (t.d + at.d) + slab.od;
#pragma unroll
    for (int i = 0; i < RUNS_OF_SUBTILE; i++) {
      int h = OUT_STEP_H * (t.h + at.h + (SUB_H == 8 ? i : 0)) + slab.oh;
      int w = OUT_STEP_W * (t.w + at.w + (SUB_H == 8 ? 0 : i * RUN));
      int first = (w * LAYER_STRIDE_W - LEAD_W) * PER_PIXEL, end = s.out_w * PER_PIXEL;
      if (n >= s.batch || d * LAYER_STRIDE_D - LEAD_D >= s.out_d || h * LAYER_STRIDE_H - LEAD_H >= s.out_h || first >= end) continue;
#pragma unroll
      for (int k = 0; k < RUN_GROUPS; k++) {
        const int nb = RUN_NB(r, i, k), j = RUN_J(r, i, k);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int c = 0; c < 2; c++)
            if (exists[half]) store_shared_f32(place[half] + (k * 8 + c) * (INNER * 4), acc[0][nb][4 * j + 2 * half + c] + b[half]);
      }
      __syncwarp();
#pragma unroll 1
      for (int l = 0; l < PER_SLAB; l++) {
        Line line = shuffled_line(first_line + l);
        int od = d * LAYER_STRIDE_D + line.d - LEAD_D, oh = h * LAYER_STRIDE_H + line.h - LEAD_H;
        if (first_line + l >= LINES || (u32)od >= (u32)s.out_d || (u32)oh >= (u32)s.out_h) continue;
        long long row = (((long long)n * (CHANNELS_LAST ? 1 : LAYER_CHANNELS) + line.channel) * s.out_d + od) * s.out_h + oh;
        store_line(y + row * end * ELEMENT, first, end, buffer + l * LINE_PITCH, lane);
      }
      __syncwarp();
    }
  }
}
#else
// Unrolled, since registers have no run-time index. (NOTES: with the stores once in a loop, and only the reading of registers in
// branches, tiles of 8 x 8 took 20 to 100% longer and compiled no faster.)
__device__ __forceinline__ void epilogue(float (&acc)[MB][NB][32], const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, const Sizes& s, const Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  asm volatile("" : "+r"(lane));                        // what follows from it is found here, not kept from tile to tile (spills)
  int g = lane >> 2;
  Slab slab = slab_of(t, cout_block, warp);
#if CHANNELS_LAST
  int in_team = warp % TEAM, first = slab.cout - in_team * 16;  // the team's first channel
  if (first >= COUT_G) return;
  buffer -= in_team * BUFFER_BYTES;
  u32 thread = in_team * 32 + lane, unit = thread % PIXEL_UNITS, pixel = thread / PIXEL_UNITS;
  int column = pixel % LINE, row = pixel / LINE, couts = COUT_G - first - (int)unit * VEC;
  u32 from = buffer + place_in_round(pixel, unit);      // pixels 8 and 16 further have the same swizzle
  long long pitch = s.out_w * (1LL * COUT * ELEMENT * OUT_STEP_H);
  y += row * pitch + (column * (1LL * OUT_STEP_W * COUT) + first + (int)unit * VEC) * ELEMENT;
#else
  if (slab.couts <= 0) return;
#endif
  float b[2] = {0.f, 0.f};
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (bias && g + 8 * h < slab.couts) b[h] = VALUE(bias[t.group * COUT_G + slab.cout + g + 8 * h]);
  if (bias) {
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int e = 0; e < 32; e++) acc[m][nb][e] += b[e >> 1 & 1];
  }
#if !CHANNELS_LAST
  int channel = t.group * COUT_G + slab.cout;
  long long plane = (long long)s.out_d * s.out_h * s.out_w * ELEMENT;
#endif
#pragma unroll
  for (int r = 0; r < NB / RUN_SUBTILES; r++) {
    Place place = place_of(first_subtile + RUN_FIRST(r));
    int n = t.n + place.n, od = OUT_STEP_D * (t.d + place.d) + slab.od;
    bool image = n < s.batch && od < s.out_d;
#if CHANNELS_LAST
    int oh = OUT_STEP_H * (t.h + place.h) + slab.oh, ow = OUT_STEP_W * (t.w + place.w) + U_W[t.variant];
    char* to = y + (((((long long)n * s.out_d + od) * s.out_h + oh) * s.out_w + ow) * COUT + t.group * COUT_G) * ELEMENT;
#pragma unroll
    for (int i = 0; i < RUNS_OF_SUBTILE; i += ROUND / RUN) {
      int lines = s.out_h - oh - OUT_STEP_H * (SUB_H == 8 ? i : 0), left = s.out_w - ow;
      if (!image || lines <= 0 || left <= 0) continue;
#pragma unroll
      for (int u = 0; u < W_SUBS; u++) {
        put_round(acc, b, r, i, u, buffer, in_team, lane);
        team_sync();
        char* first_of = to + (SUB_H == 8 ? i * pitch : 0) + u * (1LL * COUT * ELEMENT);
        store_round(first_of, column, couts, left - u - column * OUT_STEP_W, lines - row * OUT_STEP_H, pitch, from);
        team_sync();
      }
    }
#else
#pragma unroll
    for (int i = 0; i < RUNS_OF_SUBTILE; i++) {
      int oh = OUT_STEP_H * (t.h + place.h + (SUB_H == 8 ? i : 0)) + slab.oh;
      int ow = OUT_STEP_W * (t.w + place.w + (SUB_H == 8 ? 0 : i * RUN)) + U_W[t.variant], left = s.out_w - ow;
      if (!image || oh >= s.out_h || left <= 0) continue;
      char* to = y + (((long long)n * COUT + channel) * s.out_d + od) * s.out_h * s.out_w * ELEMENT + ((long long)oh * s.out_w + ow) * ELEMENT;
      int end = (left < OUTPUTS ? left : OUTPUTS) * ELEMENT;
#if STORE_UNIT  // the plan knows (NOTES: with three ways to store instead of one kb68 takes 2.6 s to compile, not 1.2, and kb57 1.3, not 1.0)
      constexpr u32 misaligned = STORE_UNIT;
#else
      u32 misaligned = (u32)(u64)to | (u32)plane | end;  // multiples of what all rows begin and end at
#endif
#pragma unroll
      for (int h = 0; h < 2; h++) {
        char* first = to + h * 8 * plane;
        int rows = COUT_G % 16 && slab.couts < 8 * h + 8 ? slab.couts - 8 * h : 8;
        u32 row = buffer + g * RUN_PITCH;
#if CONTIGUOUS
        if ((misaligned & 15) == 0) pass_rows<16>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
        else if ((misaligned & (2 * ELEMENT - 1)) == 0) pass_rows<2 * ELEMENT>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
        else pass_rows<ELEMENT>(acc, b[h], r, i, h, row + (SHIFTED(ELEMENT) ? (u32)(u64)(first + g * plane) & 31 : 0), first, plane, rows, end, buffer, lane);
#else
        put_rows<16>(acc, b[h], r, i, h, row, lane);
        __syncwarp();
        store_spread(first, plane, rows, left, buffer, lane);
#endif
        __syncwarp();
      }
    }
#endif
  }
}
#endif

__device__ __forceinline__ void consume(const char* packed, const ELEMENT_TYPE* bias, char* y, const Sizes& s, u32 tiles, u32 full, u32 empty, Fragments& weights, u32 buffers, int wg, int thread) {
  int warp = thread >> 5, lane = thread & 31;
  int first_subtile = SPLIT == 0 ? wg * NB : 0, offset = fragment_part(wg, thread);
  u32 buffer = buffers + (wg * 4 + warp) * BUFFER_BYTES;
  Cursor cursor = {0, 0};
  weights.cursor = {0, 0};
  weights.ring += offset;
  weights.first = true;
  int turn = 0;
  if (SPLIT == 2 && wg == 1) named_arrive(2, CONSUMER_THREADS);  // the first turn is warpgroup 0's
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x, turn++) {
    Tile t = tile_at(index, s);
    int chunks = chunks_of(t.variant);
    if (SPLIT == 2 && (turn & 1) != wg) {
      for (int i = 0; i < chunks; i++) cursor.next(STAGES_P);
      if (!RESIDENT) weights.skip(t.variant);
      continue;
    }
    float acc[MB][NB][32];
#if PROMOTE
    float sum[MB][NB][32];
#endif
#pragma unroll
    for (int b = 0; b < MB; b++)
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int i = 0; i < 32; i++) {
          acc[b][nb][i] = 0.f;
          asm volatile("" : "+f"(acc[b][nb][i]));       // here, not behind a fence of wgmma: ptxas would serialise all (C7519)
#if PROMOTE
          sum[b][nb][i] = 0.f;
#endif
        }
    if (SPLIT == 2) named_sync(2 + wg, CONSUMER_THREADS);
    weights.begin(packed, t, offset);
    int variant = __shfl_sync(0xffffffffu, t.variant, 0);  // so that ptxas knows that warps do not part over it
    u32 behind = 0;                                      // CONTINUED: the chunk that the last step may still read
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++, cursor.next(STAGES_P)) {
      Columns pixels = pixels_of(tiles + cursor.stage * STAGE_BYTES, first_subtile);
#if PLANE_BARRIERS > 1
      pixels.full = full + cursor.stage * (PLANE_BARRIERS * 8), pixels.empty = empty + cursor.stage * (PLANE_BARRIERS * 8), pixels.parity = cursor.parity;
      u32 last = pixels.empty + (PLANE_BARRIERS - 1) * 8;
#else
      u32 last = empty + cursor.stage * 8;
      barrier_wait(full + cursor.stage * 8, cursor.parity);
#endif
      weights.begin_chunk(chunk);
      multiply_chunk<0>(variant, acc, SUM_ARGUMENT weights, pixels, behind, lane);
      if (CONTINUED) behind = last;
      else give_back(last, lane);
    }
    weights.end();
    if (SPLIT == 2) named_arrive(2 + (wg ^ 1), CONSUMER_THREADS);
#if CONTINUED
    wgmma_wait<0>();
    give_back(behind, lane);
#endif
#if PROMOTE
    epilogue(sum, bias, y, s, t, t.cout_block, first_subtile, buffer, warp, lane);
#else
    epilogue(acc, bias, y, s, t, t.cout_block * WGS_M + (SPLIT == 1 ? wg : 0), first_subtile, buffer, warp, lane);
#endif
  }
}

// =====================================================================================================================

#define TILES_AT 0
#define RING_AT (TILES_AT + STAGES_P * STAGE_BYTES)
#define SLOTS_AT (RING_AT + RING_FRAGMENTS * WGS_M * FRAGMENT)
#define BUFFERS_AT (SLOTS_AT + (CHANNELS_LAST ? 0 : STAGES_S * SLOT_BYTES))
#define BARRIERS_AT (BUFFERS_AT + CONSUMERS * 4 * BUFFER_BYTES)
#define PIXEL_BARRIERS (STAGES_P * PLANE_BARRIERS)
#define SLOT_BARRIERS (BOX ? (CHANNELS_LAST ? STAGES_P : STAGES_S) : 0)
#define SEGMENTS_AT (BARRIERS_AT + 16 * (PIXEL_BARRIERS + STAGES_W + SLOT_BARRIERS))
#define SHARED_BYTES (SEGMENTS_AT + SEGMENTS * 4)
#if WHOLE && !SLOTS_BY_BOX
#error "whole images come by boxes"
#endif
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gather(const char* __restrict__ x, const char* __restrict__ packed, const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y,
       int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tile_count
#if BOX
       , const __grid_constant__ TensorMaps maps
#endif
) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tile_count};
  u32 base = shared_address(memory);
  u32 full = base + BARRIERS_AT, empty = full + 8 * PIXEL_BARRIERS, full_w = empty + 8 * PIXEL_BARRIERS, empty_w = full_w + 8 * STAGES_W;
  const Barriers barriers = {full, empty, empty_w + 8 * STAGES_W, empty_w + 8 * (STAGES_W + SLOT_BARRIERS)};
  int* segments = (int*)(memory + SEGMENTS_AT);
  if (threadIdx.x == 0) {
    for (int i = 0; i < PIXEL_BARRIERS; i++) {
      barrier_init(full + 8 * i, DIRECT_BOX ? 1 : PRODUCER_WARPS);
      barrier_init(empty + 8 * i, RELEASES * 4);
    }
    for (int i = 0; i < STAGES_W; i++) {
      barrier_init(full_w + 8 * i, 1);
      barrier_init(empty_w + 8 * i, RELEASES * 4);
    }
    for (int i = 0; i < SLOT_BARRIERS; i++) {
      barrier_init(barriers.landed + 8 * i, 1);
      barrier_init(barriers.left + 8 * i, PRODUCER_WARPS);
    }
#if HAS_ASYNC_PROXY
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
  }
  for (int i = threadIdx.x; i < SEGMENTS; i += THREADS)
    segments[i] = (i / (ROWS_H * ROWS_D)) << 24 | (ROW_D[i / ROWS_H % ROWS_D] & 0xfff) << 12 | (ROW_H[i % ROWS_H] & 0xfff);
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role < FIRST_CONSUMER) {
#if WGMMA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(PRODUCER_REGISTERS));
#endif
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (warp < PRODUCER_WARPS) {
      if (!DIRECT_BOX) produce(x, s, segments, base + TILES_AT, base + SLOTS_AT, barriers, threadIdx.x);
    }
#if BOX
    else if (warp == LOADER_WARP && (thread & 31) == 0) {
#if CHANNELS_LAST
      load_boxes(maps, s, base + TILES_AT, STAGE_BYTES, DIRECT_BOX ? full : barriers.landed, empty);
#else
      load_boxes(maps, s, base + SLOTS_AT, SLOT_BYTES, barriers.landed, barriers.left);
#endif
    }
#endif
#if WGMMA
    else if (warp == WEIGHTS_WARP && (thread & 31) == 0) {
#if WEIGHTS_BOX
      stream_weights(maps.of[MAPS], s, base + RING_AT, full_w, empty_w);
#else
      stream_weights(packed, s, base + RING_AT, full_w, empty_w);
#endif
    }
#endif
  } else {
    wait_for_results();                                 // of `pack`: the bias; nor is stored where `pack` may still read
#if WGMMA
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(CONSUMER_REGISTERS));
#endif
    Fragments weights;
    weights.ring = base + RING_AT;
    weights.full = full_w;
    weights.empty = empty_w;
    consume(packed, bias, y, s, base + TILES_AT, full, empty, weights, base + BUFFERS_AT, role - FIRST_CONSUMER, thread);
  }
}
