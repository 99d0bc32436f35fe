// NCHW: staging slots, in which a chunk's pixels lie as they come from memory, in a way for each `Fetch`.
#include "gather_tile.cuh"

struct Corner { int at[5]; };                           // of a box in a tensor, innermost first
struct SlotPlace { u32 from; bool exists; };            // of a pixel in a slot, in bytes; the upper 8 bits are its row's phase, see below

// What ways have in common. A slot has BOXES boxes (what threads copy is one): `corner` says where the tensor `map` has box r. `place` says where
// the first channel of a pixel is in the slot, by the segment (of an image) and the column that have it.
template <class C>
struct SlotOf {
static constexpr int BOXES = C::slot_boxes, COPIED_BYTES = C::slot_copied;
static constexpr int BOX_BYTES = (COPIED_BYTES + 127) / 128 * 128, BYTES = BOXES * BOX_BYTES;
static constexpr int OTHERS = (C::ck - 1) * C::rows_d * C::rows_h;  // rows of an image's other channels
static constexpr bool EVERY_TILE = false;               // places are other ones in every tile
static __device__ __forceinline__ constexpr int map(int) { return 0; }
static __device__ __forceinline__ constexpr int channel_at(int c) { return c * C::slot_channel; }
// Of the pixels whose bits are `found` those that are read, of a tile whose first column is `w`. Boxes bring zeros for the others.
static __device__ __forceinline__ u32 existing(u32, int) { return 0xffffffffu; }
// Where rows begin at any element of a unit: what a channel is ahead of the one before, in elements, and how many channels ahead of the first
// channel c is. All have one phase where they are `aligned`.
static __device__ __forceinline__ u32 plane_of(const typename PixelTile<C>::Sizes&) { return 0; }
static __device__ __forceinline__ int channels_ahead(int first, int c) { return first + c; }
static __device__ __forceinline__ constexpr bool aligned(u32) { return true; }
};

template <class C, int = C::fetch>
struct Slot;

// [image][channel][row][column], by threads: the units that hold a row, whatever its alignment.
template <class C>
struct Slot<C, BY_THREADS> : SlotOf<C> {
using T = PixelTile<C>;
using Of = SlotOf<C>;
static constexpr bool EVERY_TILE = true;
static __device__ __forceinline__ u32 existing(u32 found, int) { return found; }
static __device__ __forceinline__ u32 plane_of(const typename T::Sizes& s) { return (u32)s.in_d * s.in_h * s.in_w; }
static __device__ __forceinline__ bool aligned(u32 plane) { return plane % T::VEC == 0; }
static __device__ __forceinline__ SlotPlace place(const char* x, const typename T::Sizes& s, const typename T::Source& at, int segment, int image, int column, u32 plane) {
  u32 from = (segment + image * Of::OTHERS) * C::slot_units * 16 + column * T::ELEMENT;
  const typename T::Row row = T::row_of(at, segment);
  bool in = row.exists(s) && column < C::columns && (u32)(at.w + column) < (u32)s.in_w;
  u32 first = ((u32)row.n * C::cin + at.channel) * plane + ((u32)row.d * s.in_h + row.h) * s.in_w + at.w + (u32)((u64)x / T::ELEMENT);
  return {from | (first & (T::VEC - 1)) << 24, in};
}
};

// [box][image][channel][row][column]: boxes of C::slot_units begin C::column_pad columns early, at whole units. There are several where rows are
// longer than one.
template <class C>
struct Slot<C, BY_BOXES> : SlotOf<C> {
using T = PixelTile<C>;
using Of = SlotOf<C>;
static constexpr int BOX_COLUMNS = C::slot_units * T::VEC;

static __device__ __forceinline__ Corner corner(const typename T::Source& at, const typename T::Sizes&, int r) {
  return {at.w - C::column_pad + r * BOX_COLUMNS, at.h + C::first_h, at.d + C::first_d, at.channel, at.n};
}
static __device__ __forceinline__ SlotPlace place(const char*, const typename T::Sizes&, const typename T::Source&, int segment, int image, int column, u32) {
  int at_column = column + C::column_pad, box = C::slot_boxes > 1 ? at_column / BOX_COLUMNS : 0;
  if (C::slot_boxes > 1 && C::in_step_w > 1 && box == C::slot_boxes) box--;  // a column that only fills a plane up
  u32 from = box * Of::BOX_BYTES + (segment + image * Of::OTHERS) * C::slot_units * 16 + (at_column - box * BOX_COLUMNS) * T::ELEMENT;
  return {from, false};
}
};

// [class of channels][class of rows][image][channel][row][column], a box for each class.
template <class C>
struct Slot<C, BY_CLASSES> : SlotOf<C> {
using T = PixelTile<C>;
using Of = SlotOf<C>;

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
  int j = segment % C::rows_h, row = segment / C::rows_h % C::rows_d * (C::slot_channel / (C::rows_d * C::slot_units * 16)) + j / C::row_classes;
  u32 from = j % C::row_classes * Of::BOX_BYTES + image * (C::ck / C::channel_classes) * C::slot_channel + row * C::slot_units * 16 + column * T::ELEMENT;
  from |= (u32)((C::first_w + (C::first_h + j * C::rows_apart) * s.in_w) & (T::VEC - 1)) << 24;
  return {from, C::first_w + column >= 0};
}
static __device__ __forceinline__ u32 existing(u32 found, int w) { return C::first_w >= 0 || w > 0 ? 0xffffffffu : found; }
static __device__ __forceinline__ constexpr int channel_at(int c) {
  return c / C::channel_classes * C::slot_channel + c % C::channel_classes * (C::row_classes * Of::BOX_BYTES);
}
static __device__ __forceinline__ u32 plane_of(const typename T::Sizes& s) { return (u32)s.in_d * s.in_h * s.in_w; }
static __device__ __forceinline__ int channels_ahead(int, int c) { return c % C::channel_classes; }
static __device__ __forceinline__ constexpr bool aligned(u32) { return C::channel_classes == 1; }
};

// Small images, [box][image][channel][pixel]; side by side, [set of C::box_channels][image][channel of the set][pixel]. (C::beside and
// C::box_channels are 1 of others.)
template <class C>
struct SlotOfImages : SlotOf<C> {
using T = PixelTile<C>;
static constexpr bool BESIDE = C::fetch == IMAGES_BESIDE, EVERY_TILE = BESIDE || C::own_rows;

static __device__ __forceinline__ Corner corner(const typename T::Source& at, const typename T::Sizes&, int r) {
  if constexpr (BESIDE) return {0, at.n, at.channel / C::box_channels, 0, 0};
  else return {r * C::box_pixels, 0, 0, at.channel, at.n};
}
// The copy engine fills images beyond the batch with zeros; what lies beyond an image's borders is nowhere. Side by side are column w of all
// images, then column w + 1.
static __device__ __forceinline__ SlotPlace place(const char*, const typename T::Sizes&, const typename T::Source& at, int segment, int image, int column, u32) {
  const typename T::Row row = T::row_of(at, segment);
  int w = C::first_w + column / C::beside;
  bool inside = (u32)row.d < C::image_d && (u32)row.h < C::image_h && (u32)w < C::image_w;
  int pixel = inside ? (row.d * C::image_h + row.h) * C::image_w + w : 0;
  int from = (pixel / C::box_pixels * C::tile_n + image) * C::ck * C::box_pixels + column % C::beside * C::box_channels * C::box_pixels + pixel % C::box_pixels;
  return {(u32)from * T::ELEMENT, inside};
}
static __device__ __forceinline__ u32 existing(u32 found, int) { return found; }
static __device__ __forceinline__ constexpr int channel_at(int c) {
  return c / C::box_channels * C::box_channels * C::slot_channel + c % C::box_channels * C::box_pixels * T::ELEMENT;
}
};
template <class C> struct Slot<C, WHOLE_IMAGES> : SlotOfImages<C> {};
template <class C> struct Slot<C, IMAGES_BESIDE> : SlotOfImages<C> {};
