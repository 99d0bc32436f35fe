// A chunk in the shared memory of wgrad_wgmma.cu, as wgrad_warpgroups.py counts it: how x and g lie, stages, sums, steps of K.
#include "wgrad.cuh"

// C: the constants of a tiling (cuda/wgrad/wgrad_warpgroups.py).
template <class C_>
struct WgradTile : WgradShape<C_> {
using C = C_;
using S = WgradShape<C>;
static constexpr int ELEMENT = S::ELEMENT;
static constexpr bool LAST = C::channels_last;

// --- rows of M, a unit's taps ------------------------------------------------------------------------------------------

static constexpr int ROWS_PER_SUB = 64 / C::subs;
static constexpr int NEXT_ROWS = C::interleaved ? 8 / C::subs : 8;  // channels from row g of a warp's sixteen to row g + 8
static constexpr int NEXT_UNIT = C::interleaved ? C::subs : 1;      // units from one of a lane's to the next
static constexpr int COPIERS = 128;
static constexpr int CONSUMERS = C::warpgroups * 128;
static constexpr int THREADS = COPIERS + CONSUMERS;
static constexpr int OF_UNIT = C::stacked ? C::taps_h : 1;          // taps of a unit
static constexpr int SET_UNITS = S::SET_TAPS / OF_UNIT;

// --- x -----------------------------------------------------------------------------------------------------------------

// Rows of a channel's pixels (K-major): for each `segment` bytes of a row a box of [row][channel][segment]. Channels_last of 16 bits: for
// each `x_width` channels a box of the chunk's pixels. A row's `line_bytes` are several rows' where the image is as wide as a chunk (lines).
static constexpr bool TURN_X = LAST && !S::NARROW;      // channels_last float32 is turned by the copying warpgroup
static constexpr bool K_MAJOR = !LAST || TURN_X;
static constexpr int PIXELS = S::Q_ROWS / C::tile_h * (C::tile_h + C::stack - 1) * C::tile_w;  // `stack` rows may meet a row of g
static constexpr int BOXES = K_MAJOR ? C::line_bytes / C::segment : C::block_ci / C::x_width;
static constexpr int BOX_BYTES = K_MAJOR ? PIXELS * C::block_ci * ELEMENT / BOXES : PIXELS * C::segment;
static constexpr int X_ROW_BYTES = (K_MAJOR ? C::block_ci : C::tile_w) * C::segment;  // from one row of the tile to the next
static constexpr int X_TILE_BYTES = BOXES * BOX_BYTES;
static constexpr int N_WIDTH = C::stacked && !K_MAJOR && C::block_ci > 64 ? 64 : C::block_ci;  // of one matrix instruction; stacked: for each row of x
static constexpr int NB = C::block_ci / N_WIDTH;

// --- g -----------------------------------------------------------------------------------------------------------------

// NCHW, classed: rows off 16 bytes, where the tensor copy engine reads none, by a box for each class of rows along H and of channels:
// those of a class begin alike, and are a tensor of their own, whose rows then begin early (its lead).
static constexpr int CLASSES = C::row_classes * C::channel_classes;
static constexpr int G_CHANNELS = C::block_co / C::channel_classes;  // of a class

// Channels_last: boxes have `g_width` channels, a swizzled row, and all rows of a plane. Gapless: a plane is a tap's pixels. Parted: a
// plane has the columns that taps of one remainder by step_w read. So a fragment's are neighbours, which meet different banks, and
// columns that no tap reads stay away. Tap t reads plane t % g_planes, plane_taps columns on for each g_planes taps.
static constexpr int G_BOXES = LAST ? C::block_co / C::g_width : 1;
static constexpr int G_ROW_BYTES = (LAST ? C::plane_columns : G_CHANNELS) * C::g_pitch * ELEMENT;  // of a box
static constexpr int PLANE_BYTES = (S::G_ROWS * G_ROW_BYTES + 127) / 128 * 128;  // where a box may begin
static constexpr int G_SLAB_BYTES = C::g_planes * PLANE_BYTES;  // of g_width channels
static constexpr int G_BYTES = LAST ? G_BOXES * G_SLAB_BYTES : S::G_BYTES;
static constexpr int CLASS_BYTES = G_BYTES / CLASSES;
// From one pixel of g's tile to the next (of NCHW counted in elements), and from one of q to the next.
static constexpr int G_PIXEL_BYTES = LAST ? C::g_pitch * ELEMENT : 1;
static constexpr int G_STEP_W = C::parted ? 1 : C::step_w;           // in pixels

// --- stages and sums ---------------------------------------------------------------------------------------------------

static constexpr int STAGE_BYTES = (X_TILE_BYTES + G_BYTES + 1023) / 1024 * 1024;
static constexpr int RAW_AT = C::stages * STAGE_BYTES;               // x's pixels before they are turned
static constexpr int RAW_BYTES = TURN_X ? PIXELS * C::block_ci * ELEMENT : 0;
static constexpr int RING_BYTES = RAW_AT + RAW_BYTES;
static constexpr int BARRIERS_AT = RING_BYTES > S::SUMS_BYTES ? RING_BYTES : S::SUMS_BYTES;  // a block's sums are where its stages were
static_assert(BARRIERS_AT + 16 * C::stages + 16 == C::shared_bytes, "the planner's shared memory is not the kernel's");

// The output channel of a block's row of M: classes follow each other.
static __device__ __forceinline__ int channel_of(int m) { return LAST ? m : m % G_CHANNELS * C::channel_classes + m / G_CHANNELS; }

// Of a row along H and a channel: the place of their class in the list of maps, and the elements by which the class's rows begin early.
struct Class { int index, lead; };
static __device__ __forceinline__ Class class_of(int row, int channel, const typename S::Sizes& s) {
  const int of_rows = row & (C::row_classes - 1), of_channels = channel & (C::channel_classes - 1);
  const u32 begins = (u32)of_channels * s.out_d * s.out_h * s.out_w + (u32)of_rows * s.out_w;
  return {of_channels * C::row_classes + of_rows, (int)(begins & (S::VEC - 1))};
}

// --- steps of K --------------------------------------------------------------------------------------------------------

// A matrix instruction takes 32 bytes of K, a strip of 8 columns. Steps are unrolled in parts, which differ by an offset: some whole rows
// of positions or a part of one; stacked some columns of all rows.
// [16 bits] It takes two strips.
static constexpr int OF_ROW = C::tile_w * ELEMENT / 32;
static constexpr int PARTS = S::Q_ROWS * C::tile_w * ELEMENT / 32 / C::unrolled;
static constexpr int FRAGMENTS = S::NARROW && !LAST && C::warpgroups == 3 ? 2 : 3;  // in flight; a third spills there
static_assert(!(C::gapless && TURN_X) || PARTS == 1 || C::unrolled % 4 == 0, "a part ends amid a segment of x");

// Where 32 bytes of pixels lie in x's tile. Bits of the number choose rows, segments and what lies in them: sums are of numbers as of places.
static __device__ __forceinline__ u32 x_pixels_at(int i) {
  if constexpr (!K_MAJOR) return i * (16 * C::segment);
  const int line = i / (C::line_bytes / 32), within = i % (C::line_bytes / 32) * 32;
  return within / C::segment * BOX_BYTES + line * X_ROW_BYTES + within % C::segment;
}
// Where step `k_step` begins there. Between slices are rows of a halo.
static __device__ __forceinline__ u32 x_at(int k_step) {
  if constexpr (C::stack == 1) return x_pixels_at(k_step);
  return x_pixels_at(k_step + k_step / (C::tile_h * OF_ROW) * ((C::stack - 1) * OF_ROW));
}

// Turned pixels of a strip in the order of K: even ones first, so that a fragment's four lie in different banks of g's swizzled rows (they
// are two rows apart; where a stride already parts them, in their own order).
static __device__ __forceinline__ int strip_pixel(int j) { return G_STEP_W % 2 ? j % 4 * 2 + j / 4 : j; }

struct TensorMaps { TensorMap of[1 + (C::box_g ? CLASSES : 0)]; };   // of x, and of g
};
