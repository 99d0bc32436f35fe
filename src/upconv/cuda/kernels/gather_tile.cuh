// A chunk's pixels in shared memory, who brings them, and what kernels are told: shared by `gather` and `sweep`. Before it a kernel
// includes ptx.cuh; behind it, it defines `Tile` with its group and first q (n, d, h, w), `tile_at`, FIRST_TILE, NEXT_TILE
// and CHUNKS_OF, before it includes gather_produce.cuh.
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
#if BESIDE  // these of so many images, which lie side by side along the tile's width: [channel][image][pixel]
#define CHANNEL_BYTES (BESIDE * BOX_PIXELS * ELEMENT)
#else
#define CHANNEL_BYTES (BOX_PIXELS * ELEMENT)
#endif
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
// row pitches of whole 16 bytes. Else threads copy. Bulk copies of single rows cost too many clocks each.
#define BOX (WGMMA && TENSOR_MAP)
#define SLOTS_BY_BOX (BOX && !CHANNELS_LAST)
// The box is the tile: nothing to turn, and float32 is rounded to TF32, to nearest even, on its way.
// IEEE needs both parts.
#define DIRECT_BOX (BOX && CHANNELS_LAST && PRECISION != 1)
#define THREADS (FIRST_CONSUMER * 128 + CONSUMER_THREADS)

__constant__ const int ROW_D[] = OFFSETS_D;            // input offset of a tile's rows
__constant__ const int ROW_H[] = OFFSETS_H;
__constant__ const int RESIDUE[] = RESIDUES;           // of a tile's columns, counted from the first, by plane
#if STRIDED_BOX
__constant__ const int PLANE_D[] = PLANES_D;           // a plane's first row
__constant__ const int PLANE_H[] = PLANES_H;
#endif

#include "numbers.cuh"

#if ELEMENT == 2
__device__ __forceinline__ u32 pack_pair(float2 v) { return PAIR_BITS(v.x, v.y); }
#endif

struct Sizes {                                         // one layout for the packed argument block
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;                       // tiles of q per axis
  int tiles;                                           // all of them, times M_GROUPS
#if CLAIMED
  u32 claims;                                          // where shared memory has their ring
  u32* counters;                                       // claims.cuh's
#endif
};

#define MAPS (CLASSED ? ROW_CLASSES * CHANNEL_CLASSES : 1)
#if DRAINED
struct TensorMaps { TensorMap of[MAPS + 1]; };             // the last: the result's
#else
struct TensorMaps { TensorMap of[MAPS + WEIGHTS_BOX]; };   // the last: the weights'
#endif

// Byte of the 16-byte unit `unit` of pixel row `p` in a tile.
__device__ __forceinline__ u32 unit_at(int p, int unit) {
  int swizzle = ROW_BYTES == 32 ? (p >> 2) & 1 : ROW_BYTES == 64 ? (p >> 1) & 3 : p & 7;
  return p * ROW_BYTES + ((unit ^ swizzle) << 4);
}

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
