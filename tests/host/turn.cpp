// gather's pass from a staging slot to rows of channels, for one tiling: slots are filled as the tensor copy engine fills
// them (a box, zeros beyond the tensor), and every pixel row of the tile must have its source's channels, zeros in the halo.
#include "warp.h"

#include "kernel.h"  // the tiling's constants and its box (Box), and gather_turn.cuh

static unsigned seed;
static int below(int n) {
  seed = seed * 1103515245u + 12345u;
  return (int)((seed >> 8) % (unsigned)n);
}

template <class C>
struct Turn {
using T = PixelTile<C>;
using Source = typename T::Source;
static constexpr int ELEMENT = T::ELEMENT, VEC = T::VEC;
static constexpr bool CLASSED = C::fetch == BY_CLASSES, WHOLE = C::fetch == WHOLE_IMAGES;
struct Tile { int group, n, d, h, w; };

static inline typename T::Sizes sizes;
static inline std::vector<float> x;  // (N, cin, D, H, W)

static float source(int n, int c, int d, int h, int w) {
  if (n >= sizes.batch || c >= C::cin || (u32)d >= (u32)sizes.in_d || (u32)h >= (u32)sizes.in_h || (u32)w >= (u32)sizes.in_w || n < 0 || c < 0) return 0.f;
  return x[((((size_t)n * C::cin + c) * sizes.in_d + d) * sizes.in_h + h) * sizes.in_w + w];
}
static u32 word_of(float v) { return T::Number::bits(v); }

// A box of the copy engine, dense in shared memory: `value` is that of an element, by its coordinates, innermost first.
template <class Value>
static void box(u32 to, const int (&start)[5], Value value) {
  int count[5];
  for (int i = 0; i < 5; i++) count[i] = (Box::extents[i] + Box::steps[i] - 1) / Box::steps[i];
  if (to % 128 || start[0] * ELEMENT % 16) fail("a misaligned box");
  for (int e = 0; e < count[4]; e++)
    for (int d = 0; d < count[3]; d++)
      for (int c = 0; c < count[2]; c++)
        for (int b = 0; b < count[1]; b++)
          for (int a = 0; a < count[0]; a++, to += ELEMENT) {
            const int k[] = {a, b, c, d, e};
            long long at[5];
            for (int i = 0; i < 5; i++) at[i] = start[i] + (long long)k[i] * Box::steps[i];
            u32 word = word_of(value(at));
            memcpy(shared_at(to, ELEMENT), &word, ELEMENT);
          }
}

// Box r of a chunk, in its place in the slot.
static void land(u32 slot, const Source& at, int r) {
  const Corner corner = Slot<C>::corner(at, sizes, r);
  const u32 to = slot + r * Slot<C>::BOX_BYTES;
  if constexpr (CLASSED) {
    box(to, corner.at, classed_tensor(Slot<C>::map(r)));
  } else if constexpr (WHOLE) {  // an image is a line
    box(to, corner.at, [](const long long (&i)[5]) {
      const int pixel = i[0], plane = C::image_h * C::image_w;
      return i[1] || i[2] || pixel >= C::image_d * plane ? 0.f : source(i[4], i[3], pixel / plane, pixel / C::image_w % C::image_h, pixel % C::image_w);
    });
  } else {
    box(to, corner.at, [](const long long (&i)[5]) { return source(i[4], i[3], i[2], i[1], i[0]); });
  }
}

// The tensor of class r, of its rows and channels, which begins at the unit that has their first element.
static auto classed_tensor(int r) {
  const int w = sizes.in_w, h = sizes.in_h, d = sizes.in_d, k = r / C::row_classes;
  const int of_h = ((C::first_h + r % C::row_classes * C::rows_apart) % C::row_period + C::row_period) % C::row_period;
  const long long plane = (long long)d * h * w, begin = k * plane + of_h * w, lead = begin % VEC;
  const std::vector<long long> dims = {w + lead, (h - of_h + C::row_period - 1) / C::row_period, d, (C::cin - k + C::channel_classes - 1) / C::channel_classes, sizes.batch};
  const std::vector<long long> strides = {1, (long long)C::row_period * w, (long long)h * w, C::channel_classes * plane, C::cin * plane};
  for (int i = 1; i < 5; i++)
    if (dims[i] > 1 && strides[i] % VEC) fail("a stride that is no unit");
  return [=](const long long (&at)[5]) {
    long long index = begin - lead;
    bool in = true;
    for (int n = 0; n < 5; n++) {
      in = in && at[n] >= 0 && at[n] < dims[n];
      index += at[n] * strides[n];
    }
    return in ? x.at(index) : 0.f;
  };
}

static int divisor(long long n) {  // of 16 bytes
  n = n * ELEMENT % 16;
  return n == 0 ? 16 : n & -n;
}
static bool of_classes() {
  long long row = sizes.in_w, slice = row * sizes.in_h, plane = slice * sizes.in_d;
  return (C::row_period == 1 || 16 / divisor(row) == C::row_period) && 16 / divisor(plane) == C::channel_classes && (sizes.in_d == 1 || divisor(slice) == 16) &&
         (sizes.batch == 1 || divisor(C::cin * plane) == 16) && sizes.in_h >= C::row_period && C::cin >= C::channel_classes;
}

static void draw_sizes() {
  sizes = {};
  sizes.batch = 1 + below(2 * C::tile_n);
  if constexpr (WHOLE) {
    sizes.in_d = C::image_d, sizes.in_h = C::image_h, sizes.in_w = C::image_w;
  } else if constexpr (CLASSED) {
    do {
      sizes.batch = 1 + below(2 * C::tile_n);
      sizes.in_d = 1 + below(2 * C::tile_d * C::in_step_d);
      sizes.in_h = 1 + below(2 * C::tile_h * C::in_step_h + 4);
      sizes.in_w = 1 + below(C::tile_w * C::in_step_w * 3 / 2);
      if (C::row_period == 1) sizes.in_d = sizes.in_h = 1;  // 1-D, whose rows are channels
    } while (!of_classes());
  } else {
    sizes.in_d = 1 + below(2 * C::tile_d * C::in_step_d);
    sizes.in_h = 1 + below(2 * C::tile_h * C::in_step_h);
    sizes.in_w = 16 / ELEMENT * (1 + below(C::tile_w * C::in_step_w / 2));
  }
}

static long long one_chunk() {
  draw_sizes();
  size_t count = (size_t)sizes.batch * C::cin * sizes.in_d * sizes.in_h * sizes.in_w;
  if (count > 4000000) return 0;
  x.resize(count);
  for (float& v : x) v = (float)(1 + below(250)) / 2 + (T::PARTS == 2 ? (float)(1 + below(60)) / 16384 : 0.f);
  Tile tile = {};
  tile.group = below(C::cin / C::cin_g);
  tile.n = below((sizes.batch + C::tile_n - 1) / C::tile_n) * C::tile_n;
  if (!WHOLE) {
    tile.d = below(sizes.in_d / (C::tile_d * C::in_step_d) + 1) * C::tile_d;
    tile.h = below(sizes.in_h / (C::tile_h * C::in_step_h) + 1) * C::tile_h;
    tile.w = below(sizes.in_w / (C::tile_w * C::in_step_w) + 1) * C::tile_w;
  }
  int chunk = below(T::CHUNKS);
  Source at = T::source_of(tile, chunk);
  // The slot lies last: columns past the last that a tap reads may be read, and a few elements behind them, but no more.
  u32 rows = 0, slot = (T::STAGE_BYTES + 1023) / 1024 * 1024;
  shared_memory.assign(slot + Slot<C>::BYTES + C::in_step_w * ELEMENT, 0xdd);
  for (int i = 0; i < Slot<C>::BOXES; i++) land(slot, at, i);  // several of small images, of long rows, or of rows of several classes
  int segments[T::SEGMENTS];
  for (int i = 0; i < T::SEGMENTS; i++) segments[i] = T::pack_segment(i);
  for (int thread = 0; thread < T::PRODUCER_THREADS; thread++) {
    OwnPixels<C> own;
    own.locate(nullptr, sizes, Source(), segments, thread);
    const u32 exist = Slot<C>::existing(own.ok, tile.w);
    if (Slot<C>::aligned(own.plane)) turn<C, true>(own, exist, chunk * C::ck, C::cin_g - chunk * C::ck, slot, rows, thread);
    else turn<C, false>(own, exist, chunk * C::ck, C::cin_g - chunk * C::ck, slot, rows, thread);
  }
  long long checked = 0;
  for (int p = 0; p < T::PIXELS; p++) {
    int segment = p / T::PITCH, within = p % T::PITCH, column = T::column_of(within);
    if (column >= C::columns) continue;  // no tap reads it
    int n = at.n + segment / (C::rows_d * C::rows_h), d = at.d + C::offsets_d[segment / C::rows_h % C::rows_d], h = at.h + C::offsets_h[segment % C::rows_h], w = at.w + column;
    for (int c = 0; c < C::ck; c++) {
      float v = c < at.left ? source(n, at.channel + c, d, h, w) : 0.f;
      u32 from = rows + T::unit_at(p, c / VEC) + c % VEC * ELEMENT, got = 0;
      u32 want = ELEMENT == 4 ? to_tf32(v) : word_of(v);
      memcpy(&got, shared_at(from, ELEMENT), ELEMENT);
      if (got != want) fail("a wrong value");
      if (T::PARTS == 2 && load_shared_u32(from + T::PART_BYTES) != low_part(v, want)) fail("a wrong low part");
      checked += v != 0.f;
    }
  }
  return checked;
}
};

int main(int, char** arguments) {
  seed = atoi(arguments[1]);
  long long checked = 0;
  for (int i = atoi(arguments[2]); i > 0; i--) checked += Turn<Config>::one_chunk();
  printf("%lld\n", checked);
}
