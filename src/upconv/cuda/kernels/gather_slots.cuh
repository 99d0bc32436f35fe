// NCHW: staging slots, in which a chunk's pixels lie as they come from memory, in a way for each `Fetch`.
#include "gather_tile.cuh"

struct Corner { int at[5]; };                           // of a box in a tensor, innermost first
struct SlotPlace { u32 from; bool exists; };            // of a pixel in a slot, in bytes; the upper 8 bits are its row's phase, see below

// What ways have in common. A slot has BOXES boxes (what threads copy is one): `corner` says where the tensor `map` has box r. `place` says where
// the first channel of a pixel is in the slot, by the segment (of an image) and the column that have it.
template <class C, int CHANNEL, int COPIED, int COUNT>
struct SlotOf {
static constexpr int CHANNEL_BYTES = CHANNEL;           // from a channel to the next
static constexpr int COPIED_BYTES = COPIED;             // of a box
static constexpr int BOXES = COUNT;
static constexpr int BOX_BYTES = (COPIED + 127) / 128 * 128;
static constexpr int BYTES = BOXES * BOX_BYTES;
static constexpr bool EVERY_TILE = false;               // places are other ones in every tile
static __device__ __forceinline__ constexpr int map(int) { return 0; }
static __device__ __forceinline__ constexpr int channel_at(int c) { return c * CHANNEL; }
// Of the pixels whose bits are `found` those that are read, of a tile whose first column is `w`. Boxes bring zeros for the others.
static __device__ __forceinline__ u32 existing(u32, int) { return 0xffffffffu; }
// Where rows begin at any element of a unit: what a channel is ahead of the one before, in elements, and how many channels ahead of the first
// channel c is. All have one phase where they are `aligned`.
static __device__ __forceinline__ u32 plane_of(const typename PixelTile<C>::Sizes&) { return 0; }
static __device__ __forceinline__ int channels_ahead(int first, int c) { return first + c; }
static __device__ __forceinline__ bool aligned(u32 plane) { return plane % PixelTile<C>::VEC == 0; }
};

template <class C, int = C::fetch>
struct Slot;

// --- rows by threads --------------------------------------------------------------------------------------------------

// A slot is [image][channel][row][column], in the units that hold a row, whatever its alignment.
template <class C>
struct CopiedRows {
static constexpr int UNITS = (C::columns + 2 * PixelTile<C>::VEC - 2) / PixelTile<C>::VEC;  // of 16 bytes, of a segment
static constexpr int CHANNEL = C::rows_d * C::rows_h * UNITS * 16;
using Of = SlotOf<C, CHANNEL, C::tile_n * C::ck * CHANNEL, 1>;
};

template <class C>
struct Slot<C, BY_THREADS> : CopiedRows<C>::Of {
using T = PixelTile<C>;
static constexpr bool EVERY_TILE = true;
static __device__ __forceinline__ u32 existing(u32 found, int) { return found; }
static __device__ __forceinline__ u32 plane_of(const typename T::Sizes& s) { return (u32)s.in_d * s.in_h * s.in_w; }
static __device__ __forceinline__ SlotPlace place(const char* x, const typename T::Sizes& s, const typename T::Source& at, int segment, int image, int column, u32 plane) {
  u32 from = (segment + image * (C::ck - 1) * (C::rows_d * C::rows_h)) * CopiedRows<C>::UNITS * 16 + column * T::ELEMENT;
  const typename T::Row row = T::row_of(at, segment);
  bool in = row.exists(s) && column < C::columns && (u32)(at.w + column) < (u32)s.in_w;
  u32 first = ((u32)row.n * C::cin + at.channel) * plane + ((u32)row.d * s.in_h + row.h) * s.in_w + at.w + (u32)((u64)x / T::ELEMENT);
  return {from | (first & (T::VEC - 1)) << 24, in};
}
};

// --- rows by boxes ----------------------------------------------------------------------------------------------------

// A slot is [box][image][channel][row][column]: boxes of C::box_units begin C::column_pad columns early, at whole units. There are several where
// rows are longer than one.
template <class C>
struct BoxedRows {
static constexpr int UNITS = (C::columns + C::column_pad + PixelTile<C>::VEC - 1) / PixelTile<C>::VEC;  // of a segment
static constexpr int CHANNEL = C::rows_d * C::rows_h * C::box_units * 16;
using Of = SlotOf<C, CHANNEL, C::tile_n * C::ck * CHANNEL, (UNITS + C::box_units - 1) / C::box_units>;
};

template <class C>
struct Slot<C, BY_BOXES> : BoxedRows<C>::Of {
using T = PixelTile<C>;
using Of = typename BoxedRows<C>::Of;
static constexpr int BOX_COLUMNS = C::box_units * T::VEC;

static __device__ __forceinline__ Corner corner(const typename T::Source& at, const typename T::Sizes&, int r) {
  return {at.w - C::column_pad + r * BOX_COLUMNS, at.h + C::first_h, at.d + C::first_d, at.channel, at.n};
}
static __device__ __forceinline__ SlotPlace place(const char*, const typename T::Sizes&, const typename T::Source&, int segment, int image, int column, u32) {
  int at_column = column + C::column_pad, box = Of::BOXES > 1 ? at_column / BOX_COLUMNS : 0;
  if (Of::BOXES > 1 && C::in_step_w > 1 && box == Of::BOXES) box--;  // a column that only fills a plane up
  u32 from = box * Of::BOX_BYTES + (segment + image * (C::ck - 1) * (C::rows_d * C::rows_h)) * C::box_units * 16 + (at_column - box * BOX_COLUMNS) * T::ELEMENT;
  return {from, false};
}
};

// A slot is [class of channels][class of rows][image][channel][row][column].
template <class C>
struct ClassedRows {
static constexpr int ROWS = (C::rows_h + C::row_classes - 1) / C::row_classes;  // along H of a class
static constexpr int CHANNEL = C::rows_d * ROWS * C::box_units * 16;
using Of = SlotOf<C, CHANNEL, C::tile_n * (C::ck / C::channel_classes) * CHANNEL, C::row_classes * C::channel_classes>;
};

template <class C>
struct Slot<C, BY_CLASSES> : ClassedRows<C>::Of {
using T = PixelTile<C>;
using Of = typename ClassedRows<C>::Of;

static __device__ __forceinline__ constexpr int map(int r) { return r; }
// Box r begins at the unit that has its first column, and at a row of its class.
static __device__ __forceinline__ Corner corner(const typename T::Source& at, const typename T::Sizes& s, int r) {
  int row = at.h + C::first_h + r % C::row_classes * C::rows_apart;
  int lead = (r / C::row_classes * plane_of(s) + (u32)row * s.in_w) & (T::VEC - 1);  // of the tensor, ahead of each row's first column
  int h = (row - (row & (C::row_period - 1))) / C::row_period;
  return {(at.w + lead) & ~(T::VEC - 1), h, at.d + C::first_d, at.channel / C::channel_classes, at.n};
}
// In a class with a lead the columns ahead of a row are no zeros but the row's before.
static __device__ __forceinline__ SlotPlace place(const char*, const typename T::Sizes& s, const typename T::Source&, int segment, int image, int column, u32) {
  constexpr int ROWS = ClassedRows<C>::ROWS;
  int j = segment % C::rows_h, row = segment / C::rows_h % C::rows_d * ROWS + j / C::row_classes;
  u32 from = j % C::row_classes * Of::BOX_BYTES + (image * (C::ck / C::channel_classes) * (C::rows_d * ROWS) + row) * C::box_units * 16 + column * T::ELEMENT;
  from |= (u32)((C::first_w + (C::first_h + j * C::rows_apart) * s.in_w) & (T::VEC - 1)) << 24;
  return {from, C::first_w + column >= 0};
}
static __device__ __forceinline__ u32 existing(u32 found, int w) { return C::first_w >= 0 || w > 0 ? 0xffffffffu : found; }
static __device__ __forceinline__ constexpr int channel_at(int c) {
  return c / C::channel_classes * Of::CHANNEL_BYTES + c % C::channel_classes * (C::row_classes * Of::BOX_BYTES);
}
static __device__ __forceinline__ u32 plane_of(const typename T::Sizes& s) { return (u32)s.in_d * s.in_h * s.in_w; }
static __device__ __forceinline__ int channels_ahead(int, int c) { return c % C::channel_classes; }
static __device__ __forceinline__ bool aligned(u32) { return C::channel_classes == 1; }
};

// --- small images -----------------------------------------------------------------------------------------------------

template <class C, int IMAGES>                          // side by side
struct ImagesOf {
static constexpr int PIXELS = C::image_d * C::image_h * C::image_w;
static constexpr int CHANNEL = IMAGES * C::box_pixels * PixelTile<C>::ELEMENT;
using Of = SlotOf<C, CHANNEL, C::tile_n * C::ck * CHANNEL, PIXELS / C::box_pixels>;
};

// A slot is [box][image][channel][pixel].
template <class C>
struct Slot<C, WHOLE_IMAGES> : ImagesOf<C, 1>::Of {
using T = PixelTile<C>;
static constexpr bool EVERY_TILE = C::own_rows;

static __device__ __forceinline__ Corner corner(const typename T::Source& at, const typename T::Sizes&, int r) {
  return {r * C::box_pixels, 0, 0, at.channel, at.n};
}
// The copy engine fills images beyond the batch with zeros; what lies beyond an image's borders is nowhere.
static __device__ __forceinline__ SlotPlace place(const char*, const typename T::Sizes&, const typename T::Source& at, int segment, int image, int column, u32) {
  const typename T::Row row = T::row_of(at, segment);
  int w = C::first_w + column;
  bool inside = (u32)row.d < C::image_d && (u32)row.h < C::image_h && (u32)w < C::image_w;
  int pixel = inside ? (row.d * C::image_h + row.h) * C::image_w + w : 0;
  u32 from = ((pixel / C::box_pixels * C::tile_n + image) * C::ck * C::box_pixels + pixel % C::box_pixels) * T::ELEMENT;
  return {from, inside};
}
static __device__ __forceinline__ u32 existing(u32 found, int) { return found; }
};

// A slot is [set of C::box_channels][image][channel of the set][pixel].
template <class C>
struct Slot<C, IMAGES_BESIDE> : ImagesOf<C, C::beside>::Of {
using T = PixelTile<C>;
static constexpr bool EVERY_TILE = true;                // each has rows of its own

static __device__ __forceinline__ Corner corner(const typename T::Source& at, const typename T::Sizes&, int) { return {0, at.n, at.channel / C::box_channels, 0, 0}; }
// Column w of all images, then column w + 1. What lies beyond an image's borders is nowhere.
static __device__ __forceinline__ SlotPlace place(const char*, const typename T::Sizes&, const typename T::Source& at, int segment, int image, int column, u32) {
  const typename T::Row row = T::row_of(at, segment);
  int beside = column % C::beside, w = C::first_w + column / C::beside;
  bool inside = (u32)row.d < C::image_d && (u32)row.h < C::image_h && (u32)w < C::image_w;
  u32 from = inside ? (beside * C::box_channels * C::box_pixels + (row.d * C::image_h + row.h) * C::image_w + w) * T::ELEMENT : 0;
  return {from, inside};
}
static __device__ __forceinline__ u32 existing(u32 found, int) { return found; }
static __device__ __forceinline__ constexpr int channel_at(int c) {
  return (c / C::box_channels * C::beside * C::box_channels + c % C::box_channels) * C::box_pixels * T::ELEMENT;
}
};
