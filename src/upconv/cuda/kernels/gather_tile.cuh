// A chunk's pixels in shared memory, who brings them, and what kernels are told: shared by `gather` and `sweep`, whose constants C are.
#include "number.cuh"
#include "table.cuh"

// How a chunk's pixels come. By threads, at any alignment; or by the tensor copy engine, with one instruction for each box, zeros beyond the
// borders included, which wants row pitches of whole 16 bytes: where rows do not all begin at the same place of such a unit, those of a class,
// which do, are a tensor and a box. Of small images all pixels come, without a halo: of a tile's images, or of some whose columns take turns
// along its width. (Bulk copies of single rows cost too many clocks each.)
enum Fetch { BY_THREADS, BY_BOXES, BY_CLASSES, WHOLE_IMAGES, IMAGES_BESIDE };

template <class C> __constant__ const auto ROW_D = table_of<int>(C::offsets_d);  // input offset of a tile's rows
template <class C> __constant__ const auto ROW_H = table_of<int>(C::offsets_h);
template <class C> __constant__ const auto RESIDUE = table_of<int>(C::residues);  // of a tile's columns, counted from the first, by plane

// Tensor maps of the input.
template <class C, int = C::fetch> constexpr int MAPS_OF = 1;
template <class C> constexpr int MAPS_OF<C, BY_CLASSES> = C::row_classes * C::channel_classes;

template <class C_>
struct PixelTile {
using C = C_;
using Number = NumberOf<C::precision>;

// --- pixels -----------------------------------------------------------------------------------------------------------

static constexpr int ELEMENT = Number::SIZE;
static constexpr int PARTS = C::precision == IEEE ? 2 : 1;  // of an operand
static constexpr int VEC = 16 / ELEMENT;                // elements of a 16-byte unit
static constexpr int ROW_BYTES = C::ck * ELEMENT;       // a pixel's row in a tile: 32, 64 or 128
static constexpr int UNITS_PER_ROW = ROW_BYTES / 16;
static constexpr int K_STEPS = ROW_BYTES / 32;          // a matrix instruction takes 32 bytes of K
static constexpr int CHUNKS = (C::cin_g + C::ck - 1) / C::ck;
static constexpr int SEGMENTS = C::tile_n * C::rows_d * C::rows_h;
// Columns of a segment with one residue modulo the input's step along W make a plane of C::plane neighbours; there are C::planes residues that
// some tap reads. A segment has its planes one behind the other.
// [strided_box] A plane is a box, of all segments of a band of rows.
static constexpr int PITCH = C::strided_box ? C::plane : C::planes * C::plane;  // pixel rows from a segment to the next
static constexpr int PLANE_PITCH = C::strided_box ? (SEGMENTS * C::plane + 7) / 8 * 8 : C::plane;  // the swizzle's pattern begins every 8 rows
static constexpr int PIXELS = C::strided_box ? C::planes * PLANE_PITCH : SEGMENTS * PITCH;
static constexpr int PART_BYTES = (PIXELS * ROW_BYTES + 1023) / 1024 * 1024;
static constexpr int STAGE_BYTES = PARTS * PART_BYTES;

static __device__ __forceinline__ int column_of(int within) {
  if constexpr (C::planes == C::in_step_w) return within % C::plane * C::in_step_w + within / C::plane;
  else return within % C::plane * C::in_step_w + RESIDUE<C>[within / C::plane];
}

// Byte of the 16-byte unit `unit` of pixel row `p` in a tile.
static __device__ __forceinline__ u32 unit_at(int p, int unit) {
  int swizzle = ROW_BYTES == 32 ? (p >> 2) & 1 : ROW_BYTES == 64 ? (p >> 1) & 3 : p & 7;
  return p * ROW_BYTES + ((unit ^ swizzle) << 4);
}

// --- roles ------------------------------------------------------------------------------------------------------------

static constexpr int CONSUMERS = 2;
static constexpr int CONSUMER_THREADS = CONSUMERS * 128;
// C::wgmma: two warpgroups of 56 registers produce, so that the consumers have 200: six warps turn pixels, one loads them,
// one loads the weights. Else no warpgroup can give its registers away.
static constexpr int PRODUCER_THREADS = C::wgmma ? 192 : 128;
static constexpr int PRODUCER_WARPS = PRODUCER_THREADS / 32;
static constexpr int LOADER_WARP = 6, WEIGHTS_WARP = 7;
static constexpr int FIRST_CONSUMER = C::wgmma ? 2 : 1;
static constexpr int THREADS = FIRST_CONSUMER * 128 + CONSUMER_THREADS;
static constexpr bool BOX = C::fetch != BY_THREADS;
// The box is the tile: nothing to turn, and float32 is rounded to TF32, to nearest even, on its way.
// IEEE needs both parts.
static constexpr bool DIRECT_BOX = BOX && C::channels_last && C::precision != IEEE;

// --- what kernels are told --------------------------------------------------------------------------------------------

struct Sizes {
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;                       // tiles of q per axis
  int tiles;                                           // all of them, times M-groups
  u32* counters;                                       // claims.cuh's
  u32 claims;                                          // of blocks that claim tiles: where shared memory has their ring
};

template <int MORE>                                     // behind the input's
struct TensorMapsAnd { TensorMap of[MAPS_OF<C> + MORE]; };

// --- where a tile's chunk lies in the input ---------------------------------------------------------------------------

struct Source {
  int n, d, h, w;                                      // of the halo's corner, before the rows' offsets
  int channel, left;                                   // first channel, channels left in the group
};

template <class Tile>
static __device__ __forceinline__ Source source_of(const Tile& t, int chunk) {
  return {t.n, t.d * C::in_step_d, t.h * C::in_step_h, t.w * C::in_step_w + C::first_w, t.group * C::cin_g + chunk * C::ck, C::cin_g - chunk * C::ck};
}

// The row of the input that a segment of the tile has, and whether it exists.
struct Row {
  int n, d, h;
  __device__ __forceinline__ bool exists(const Sizes& s) const { return n < s.batch && (u32)d < (u32)s.in_d && (u32)h < (u32)s.in_h; }
};
static __device__ __forceinline__ Row row_of(const Source& at, int segment) {
  return {at.n + segment / (C::rows_h * C::rows_d), at.d + ROW_D<C>[segment / C::rows_h % C::rows_d], at.h + ROW_H<C>[segment % C::rows_h]};
}
};

// Four float32 values of a unit, rounded to TF32.
// [IEEE] What that leaves of them, rounded too, goes to the tile's second part.
template <class C>
__device__ __forceinline__ void store_parts(u32 to, const u32 (&v)[4]) {
  using T = PixelTile<C>;
  u32 hi[4];
#pragma unroll
  for (int e = 0; e < 4; e++) hi[e] = to_tf32(__uint_as_float(v[e]));
  store_shared_128(to, hi[0], hi[1], hi[2], hi[3]);
  if constexpr (T::PARTS == 2) {
    u32 low[4];
#pragma unroll
    for (int e = 0; e < 4; e++) low[e] = low_part(__uint_as_float(v[e]), hi[e]);
    store_shared_128(to + T::PART_BYTES, low[0], low[1], low[2], low[3]);
  }
}
// Eight of 16 bits.
__device__ __forceinline__ void store_halves(u32 to, const u32 (&v)[8]) {
  store_shared_128(to, v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
}
