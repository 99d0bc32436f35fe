// gather.cu's pass from a staging slot to rows of channels, for one tiling: slots are filled as the tensor copy engine fills
// them (a box, zeros beyond the tensor), and every pixel row of the tile must have its source's channels, zeros in the halo.
#include "warp.h"

#include "kernel.h"  // the tiling's macros, its box, and the pass, cut from gather.cu by test_host.py

static unsigned seed;
static int below(int n) {
  seed = seed * 1103515245u + 12345u;
  return (int)((seed >> 8) % (unsigned)n);
}

static Sizes sizes;
static std::vector<float> x;  // (N, CIN, D, H, W)

static float source(int n, int c, int d, int h, int w) {
  if (n >= sizes.batch || c >= CIN || (u32)d >= (u32)sizes.in_d || (u32)h >= (u32)sizes.in_h || (u32)w >= (u32)sizes.in_w || n < 0 || c < 0) return 0.f;
  return x[((((size_t)n * CIN + c) * sizes.in_d + d) * sizes.in_h + h) * sizes.in_w + w];
}
static u32 bits_of(float v) { return ELEMENT == 4 ? __float_as_uint(v) : STORE_BITS(v); }

// One box of the copy engine: dimension 0 innermost, `steps` between the elements that are copied, dense in shared memory.
static void box(u32 to, const int (&start)[5]) {
  static const int extents[] = COPY_BOX, steps[] = COPY_STEPS;
  int count[5];
  for (int i = 0; i < 5; i++) count[i] = (extents[i] + steps[i] - 1) / steps[i];
  if (to % 128 || start[0] * ELEMENT % 16) fail("a misaligned box");
  for (int e = 0; e < count[4]; e++)
    for (int d = 0; d < count[3]; d++)
      for (int c = 0; c < count[2]; c++)
        for (int b = 0; b < count[1]; b++)
          for (int a = 0; a < count[0]; a++, to += ELEMENT) {
            int at[] = {start[0] + a * steps[0], start[1] + b * steps[1], start[2] + c * steps[2], start[3] + d * steps[3], start[4] + e * steps[4]};
            float v;
            if (WHOLE) {  // an image is a line
              int pixel = at[0];
              v = at[1] || at[2] || pixel >= IMAGE_D * IMAGE_H * IMAGE_W ? 0.f : source(at[4], at[3], pixel / (IMAGE_H * IMAGE_W), pixel / IMAGE_W % IMAGE_H, pixel % IMAGE_W);
            } else {
              v = source(at[4], at[3], at[2], at[1], at[0]);
            }
            u32 word = bits_of(v);
            memcpy(shared_at(to, ELEMENT), &word, ELEMENT);
          }
}

#if CLASSED
// The box of class r, from the tensor of its rows and channels, which begins at the unit that has their first element.
static void class_box(u32 to, const Source& at, int r) {
  static const int extents[] = COPY_BOX, steps[] = COPY_STEPS;
  const ClassedBox begins = classed_box(at, sizes, r);
  int w = sizes.in_w, h = sizes.in_h, d = sizes.in_d, k = r / ROW_CLASSES;
  int of_h = ((FIRST_H + r % ROW_CLASSES * ROWS_APART) % ROW_PERIOD + ROW_PERIOD) % ROW_PERIOD;
  long long plane = (long long)d * h * w, begin = k * plane + of_h * w, lead = begin % VEC;
  long long dims[] = {w + lead, (h - of_h + ROW_PERIOD - 1) / ROW_PERIOD, d, (CIN - k + CHANNEL_CLASSES - 1) / CHANNEL_CLASSES, sizes.batch};
  long long strides[] = {1, (long long)ROW_PERIOD * w, (long long)h * w, CHANNEL_CLASSES * plane, CIN * plane};
  for (int i = 1; i < 5; i++)
    if (dims[i] > 1 && strides[i] % VEC) fail("a stride that is no unit");
  int start[] = {begins.w, begins.h, at.d + FIRST_D, at.channel / CHANNEL_CLASSES, at.n}, count[5];
  for (int i = 0; i < 5; i++) count[i] = (extents[i] + steps[i] - 1) / steps[i];
  if (to % 128 || start[0] % VEC) fail("a misaligned box");
  for (int e = 0; e < count[4]; e++)
    for (int c = 0; c < count[3]; c++)
      for (int b = 0; b < count[2]; b++)
        for (int a = 0; a < count[1]; a++)
          for (int i = 0; i < count[0]; i++, to += ELEMENT) {
            long long place[] = {start[0] + i, start[1] + a * steps[1], start[2] + b * steps[2], start[3] + c, start[4] + e};
            long long index = begin - lead;
            bool in = true;
            for (int n = 0; n < 5; n++) {
              in = in && place[n] >= 0 && place[n] < dims[n];
              index += place[n] * strides[n];
            }
            u32 word = in ? bits_of(x.at(index)) : 0;
            memcpy(shared_at(to, ELEMENT), &word, ELEMENT);
          }
}

static int divisor(long long n) {  // of 16 bytes
  n = n * ELEMENT % 16;
  return n == 0 ? 16 : n & -n;
}
static bool of_classes() {
  long long row = sizes.in_w, slice = row * sizes.in_h, plane = slice * sizes.in_d;
  return (ROW_PERIOD == 1 || 16 / divisor(row) == ROW_PERIOD) && 16 / divisor(plane) == CHANNEL_CLASSES && (sizes.in_d == 1 || divisor(slice) == 16) &&
         (sizes.batch == 1 || divisor(CIN * plane) == 16) && sizes.in_h >= ROW_PERIOD && CIN >= CHANNEL_CLASSES;
}
#endif

static long long one_chunk() {
  sizes = {};
  sizes.batch = 1 + below(2 * TILE_N);
  sizes.in_d = WHOLE ? IMAGE_D : 1 + below(2 * TILE_D * IN_STEP_D);
  sizes.in_h = WHOLE ? IMAGE_H : 1 + below(2 * TILE_H * IN_STEP_H);
  sizes.in_w = WHOLE ? IMAGE_W : 16 / ELEMENT * (1 + below(TILE_W * IN_STEP_W / 2));
#if CLASSED
  do {
    sizes.batch = 1 + below(2 * TILE_N);
    sizes.in_d = 1 + below(2 * TILE_D * IN_STEP_D);
    sizes.in_h = 1 + below(2 * TILE_H * IN_STEP_H + 4);
    sizes.in_w = 1 + below(TILE_W * IN_STEP_W * 3 / 2);
    if (ROW_PERIOD == 1) sizes.in_d = sizes.in_h = 1;  // 1-D, whose rows are channels
  } while (!of_classes());
#endif
  size_t count = (size_t)sizes.batch * CIN * sizes.in_d * sizes.in_h * sizes.in_w;
  if (count > 4000000) return 0;
  x.resize(count);
  for (float& v : x) v = (float)(1 + below(250)) / 2 + (PARTS == 2 ? (float)(1 + below(60)) / 16384 : 0.f);
  Tile tile = {};
  tile.group = below(CIN / CIN_G);
  tile.n = below((sizes.batch + TILE_N - 1) / TILE_N) * TILE_N;
  if (!WHOLE) {
    tile.d = below(sizes.in_d / (TILE_D * IN_STEP_D) + 1) * TILE_D;
    tile.h = below(sizes.in_h / (TILE_H * IN_STEP_H) + 1) * TILE_H;
    tile.w = below(sizes.in_w / (TILE_W * IN_STEP_W) + 1) * TILE_W;
  }
  int chunk = below(CHUNKS);
  Source at = source_of(tile, chunk);
  // The slot lies last: columns past the last that a tap reads may be read, and a few elements behind them, but no more.
  u32 rows = 0, slot = (STAGE_BYTES + 1023) / 1024 * 1024;
  shared_memory.assign(slot + SLOT_BYTES + IN_STEP_W * ELEMENT, 0xdd);
  for (int i = 0; i < SLOT_BOXES; i++) {  // several of small images, of long rows, or of rows of several classes
#if CLASSED
    class_box(slot + i * SLOT_BOX_BYTES, at, i);
    continue;
#endif
    if (WHOLE) box(slot + i * SLOT_BOX_BYTES, {i * BOX_PIXELS, 0, 0, at.channel, at.n});
    else box(slot + i * SLOT_BOX_BYTES, {at.w - COLUMN_PAD + i * ROW_UNITS * VEC, at.h + FIRST_H, at.d + FIRST_D, at.channel, at.n});
  }
  int segments[SEGMENTS];
  for (int i = 0; i < SEGMENTS; i++)
    segments[i] = (i / (ROWS_H * ROWS_D)) << 24 | (ROW_D[i / ROWS_H % ROWS_D] & 0xfff) << 12 | (ROW_H[i % ROWS_H] & 0xfff);
  for (int thread = 0; thread < PRODUCER_THREADS; thread++) {
    Pixels own;
    own.locate(nullptr, sizes, Source(), segments, thread);
    u32 exist = WHOLE || (CLASSED && FIRST_W < 0 && tile.w == 0) ? own.ok : 0xffffffffu;
    turn<!CLASSED || CHANNEL_CLASSES == 1>(own, exist, chunk * CK, CIN_G - chunk * CK, slot, rows, thread);
  }
  long long checked = 0;
  for (int p = 0; p < PIXELS; p++) {
    int segment = p / PITCH, within = p % PITCH, column = COLUMN(within);
    if (column >= COLUMNS) continue;  // no tap reads it
    int n = at.n + segment / (ROWS_D * ROWS_H), d = at.d + ROW_D[segment / ROWS_H % ROWS_D], h = at.h + ROW_H[segment % ROWS_H], w = at.w + column;
    for (int c = 0; c < CK; c++) {
      float v = c < at.left ? source(n, at.channel + c, d, h, w) : 0.f;
      u32 from = rows + unit_at(p, c / VEC) + c % VEC * ELEMENT, got = 0;
      u32 want = ELEMENT == 4 ? to_tf32(v) : bits_of(v);
      memcpy(&got, shared_at(from, ELEMENT), ELEMENT);
      if (got != want) fail("a wrong value");
      if (PARTS == 2 && load_shared_u32(from + PART_BYTES) != low_part(v, want)) fail("a wrong low part");
      checked += v != 0.f;
    }
  }
  return checked;
}

int main(int, char** arguments) {
  seed = atoi(arguments[1]);
  long long checked = 0;
  for (int i = atoi(arguments[2]); i > 0; i--) checked += one_chunk();
  printf("%lld\n", checked);
}
