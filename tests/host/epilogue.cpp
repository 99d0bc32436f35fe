// gather.cu's epilogue for one tiling, on random tiles of random images: each accumulator must arrive at the output that
// the fragment layout of wgmma and the tiling's definition give it, and nothing else may be written.
#include "warp.h"

#include "kernel.h"  // the tiling's macros and the epilogue, cut from gather.cu by test_host.py

static u32 pack_pair(float2 v) { return STORE_BITS(v.x) | STORE_BITS(v.y) << 16; }

#if CHANNELS_LAST && !SHUFFLED
#define WARPS (ROWS_PER_SUB / 16)                       // a team
#else
#define WARPS 1
#endif
static int first_warp, consumer;
static int team() { return (consumer * 4 + first_warp) / WARPS; }
static struct {
  struct {
    operator u32() const { return (FIRST_CONSUMER + consumer) * 128 + first_warp * 32 + this_fiber; }
  } x;
} threadIdx;
// The team, which is all fibers, meets at a barrier that no other part of the kernel uses (0 to 3) and no other team.
static void named_sync(int id, int count) {
  static int team_of[16];
  if (id < 4 || id > 15) fail("a barrier of others");
  if (count != (int)fibers.size()) fail("a barrier that waits for another number of threads");
  if (team_of[id] && team_of[id] != team() + 1) fail("a barrier of two teams");
  team_of[id] = team() + 1;
  static int ids[WARPS * 32];
  ids[this_fiber] = id;
  wait_for_all();
  if (ids[0] != id) fail("threads at different barriers");
}
static u32 exchanged[WARPS * 32];
static u32 __shfl_sync(u32, u32 v, int lane) {
  exchanged[this_fiber] = v;
  wait_for_all();
  v = exchanged[this_fiber / 32 * 32 + lane];
  wait_for_all();
  return v;
}
#if MOVMATRIX
// A lane has two neighbours of row lane / 4 of a matrix, then of its transpose.
static u32 movmatrix(u32 v) {
  exchanged[this_fiber] = v;
  wait_for_all();
  int lane = this_fiber % 32, row = lane / 4, column = lane % 4 * 2;
  const u32* warp = exchanged + this_fiber / 32 * 32;
  u32 turned = 0;
  for (int j = 0; j < 2; j++) turned |= (warp[(column + j) * 4 + row / 2] >> 16 * (row % 2) & 0xffff) << 16 * j;
  wait_for_all();
  return turned;
}
#include "turned.h"  // cut from ptx.cuh
#else
// stmatrix with .trans: matrix i's row r goes where lane 8 i + r of the warp says; a lane has two neighbours of a column.
static std::vector<u32> rows;
template <int N> static void store_matrices_turned(u32 a, const u32 (&v)[N]) {
  rows.resize(fibers.size());
  rows[this_fiber] = a;
  wait_for_all();
  int lane = this_fiber % 32, warp = this_fiber / 32;
  for (int i = 0; i < N; i++)
    for (int j = 0; j < 2; j++) {
      u32 row = rows[warp * 32 + i * 8 + lane % 4 * 2 + j];
      if (row % 16) fail("a misaligned row of a matrix");
      store_shared<u16>(row + lane / 4 * 2, (u16)(v[i] >> 16 * j));
    }
  wait_for_all();
}
#endif

static char* y;
static Sizes sizes;
#if DRAINED
// The copy engine: boxes of the result's map (OUT_BOX, innermost first) are read when their group is waited for, as late as it may.
struct TensorMap {};
struct Box { u32 from; int w, channel, h, phase, n; };
static std::vector<Box> asked, under_way;
static void store_box(const TensorMap&, u32 from, int w, int channel, int h, int phase, int n) {
  if (from % 128 || w * ELEMENT % 16) fail("a box that the engine does not take");
  asked.push_back({from, w, channel, h, phase, n});
}
static void bulk_commit() {
  under_way.insert(under_way.end(), asked.begin(), asked.end());
  asked.clear();
}
static void bulk_wait_read() {
  constexpr int box[] = OUT_BOX;
  for (const Box& b : under_way)
    for (int i = 0; i < box[0] * box[1] * box[2]; i++) {
      u32 at = b.from + i * ELEMENT;
      at ^= (at >> 7 & (OUT_SPAN / 16 - 1)) << 4;
      int column = b.w + i % box[0], c = b.channel + i / box[0] % box[1], row = b.h + i / (box[0] * box[1]);
      u16 v = load_shared<u16>(at);
      bool ok = column < sizes.out_w && c < COUT && row < sizes.out_h / OUT_STEP_H && b.n < sizes.batch;
      long long place = (((long long)b.n * COUT + c) * sizes.out_h + row * OUT_STEP_H + b.phase) * sizes.out_w + column;
      store_global(y + place * ELEMENT, &v, ELEMENT, ok);
    }
  under_way.clear();
}
#endif

#include "epilogue.h"

static float accumulators[WARPS * 32][MB][NB][32];
static std::vector<ELEMENT_TYPE> bias;
static bool has_bias;
static Tile tile;
static int cout_block, first_subtile;

static void body() {
  float acc[MB][NB][32];
  memcpy(acc, accumulators[this_fiber], sizeof acc);
  int of_team = this_fiber / 32;
#if DRAINED
  TensorMap y;
#endif
  epilogue(acc, has_bias ? bias.data() : nullptr, y, sizes, tile, cout_block, first_subtile, of_team * BUFFER_BYTES, first_warp + of_team, this_fiber % 32);
}

static unsigned seed;
static int below(int n) {
  seed = seed * 1103515245u + 12345u;
  return (int)((seed >> 8) % (unsigned)n);
}
static ELEMENT_TYPE stored(float v) {
  u32 bits = STORE_BITS(v);
  ELEMENT_TYPE element;
  memcpy(&element, &bits, ELEMENT);
  return element;
}
static int first_q(int out, int step, int tile) { return below((out + step * tile - 1) / (step * tile)) * tile; }

#if SHUFFLED  // in outputs of the strided layer
static const int stride[] = {LAYER_STRIDE_D, LAYER_STRIDE_H, LAYER_STRIDE_W}, lead[] = {LEAD_D, LEAD_H, LEAD_W}, channels = LAYER_CHANNELS;
#else
static const int stride[] = {1, 1, 1}, lead[] = {0, 0, 0}, channels = COUT;
#endif

static long long place_in_output(int n, int channel, int d, int h, int w) {
#if BATCH_AS_WIDTH                                      // columns are images, one behind the other
  return (((long long)w * sizes.out_d + d) * sizes.out_h + h) * channels + channel;
#endif
  return CHANNELS_LAST ? ((((long long)n * sizes.out_d + d) * sizes.out_h + h) * sizes.out_w + w) * channels + channel
                       : ((((long long)n * channels + channel) * sizes.out_d + d) * sizes.out_h + h) * sizes.out_w + w;
}
static void expect(long long at, float v) {
  ELEMENT_TYPE want = stored(v);
  if (memcmp(y + at * ELEMENT, &want, ELEMENT)) fail("a wrong value");
}

// What the consumer in hand has accumulated; the number of outputs.
static long long check_own() {
  constexpr signed char blocks[] = BLOCKS_OF_W;
  long long checked = 0;
  for (int thread = 0; thread < WARPS * 32; thread++)
    for (int nb = 0; nb < NB; nb++)
      for (int e = 0; e < 32; e++)
        for (int u = 0; u < W_SUBS; u++) {
          int lane = thread % 32, row = first_warp * 16 + thread / 32 * 16 + lane / 4 + 8 * (e >> 1 & 1), column = 8 * (e >> 2) + 2 * (lane % 4) + (e & 1);
          int sub = row / ROWS_PER_SUB, cout = cout_block * ROWS_PER_SUB + row % ROWS_PER_SUB;
          Place place = place_of(first_subtile + nb);
          int q_h = tile.h + place.h + (SUB_H == 8 ? column / 8 : 0), q_w = tile.w + place.w + (SUB_H == 8 ? column % 8 : column);
          int n = tile.n + place.n, d = OUT_STEP_D * (tile.d + place.d) + SUB_D[tile.variant * SUBS + sub];
          int h = OUT_STEP_H * q_h + SUB_HH[tile.variant * SUBS + sub], w = OUT_STEP_W * q_w + U_W[tile.variant] + u;
          int channel = tile.group * COUT_G + cout;
#if SHUFFLED  // rows of M by their definition: lines of INNER, as many as 16 rows have room for
          int of_slab = cout % 16 / INNER, line = cout / 16 * PER_SLAB + of_slab, within = cout % 16 % INNER;
          if (of_slab >= PER_SLAB || line >= LINES) continue;
          int phase[] = {0, line % LAYER_STRIDE_H, within};
          phase[0] = line / LAYER_STRIDE_H, channel = 0;
          if (CHANNELS_LAST) channel = within % LAYER_CHANNELS, phase[2] = within / LAYER_CHANNELS;
          else channel = phase[0] / LAYER_STRIDE_D, phase[0] %= LAYER_STRIDE_D;
          d = d * stride[0] + phase[0] - lead[0], h = h * stride[1] + phase[1] - lead[1], w = w * stride[2] + phase[2] - lead[2];
          if (d < 0 || h < 0 || w < 0) continue;
#endif
          if (cout >= COUT_G || n >= sizes.batch || d >= sizes.out_d || h >= sizes.out_h || w >= sizes.out_w) continue;
          float v = (blocks[u] < 0 ? 0.f : accumulators[thread][blocks[u]][nb][e]) + (has_bias ? VALUE(bias[channel]) : 0.f);
          expect(place_in_output(n, channel, d, h, w), v);
          checked++;
        }
  return checked;
}

#if BARE
// All sub-positions without taps, of the block's channels, in the tile's images and slices; the number of outputs.
static long long check_bare() {
  long long checked = 0;
  int first = cout_block * ROWS_PER_SUB;
  for (int b = 0; b < sizeof BARE_ROW / sizeof BARE_ROW[0]; b++)
    for (int n = tile.n; n < tile.n + TILE_N && n < sizes.batch; n++)
      for (int q = tile.d; q < tile.d + TILE_D && OUT_STEP_D * q + BARE_D[b] < sizes.out_d; q++)
        for (int h = 0; h < sizes.out_h; h++)
          for (int w = 0; w < sizes.out_w; w++) {
            int row = h % OUT_STEP_H - BARE_H[b], column = w % OUT_STEP_W - BARE_W[b];
            if (BARE_ROW[b] && (row < 0 || row >= BARE_ROW[b])) continue;
            if (BARE_W[b] >= 0 && (column < 0 || column >= W_SUBS)) continue;
            for (int cout = first; cout < first + ROWS_PER_SUB && cout < COUT_G; cout++, checked++) {
              int channel = tile.group * COUT_G + cout;
              expect(place_in_output(n, channel, OUT_STEP_D * q + BARE_D[b], h, w), has_bias ? VALUE(bias[channel]) : 0.f);
            }
          }
  return checked;
}
#endif

static void draw_sums() {
  for (auto& lane : accumulators)
    for (auto& block : lane)
      for (auto& subtile : block)
        for (float& v : subtile) v = (float)(1 + below(200));
}

static long long one_tile() {
  int widths[] = {1 + below(2 * OUT_STEP_W * TILE_W), 1 + below(40), 2 + 2 * below(OUT_STEP_W * TILE_W), 16 * (1 + below(OUT_STEP_W * TILE_W / 8))};
  sizes = {};
  sizes.batch = BATCH_AS_WIDTH ? 1 : 1 + below(2 * TILE_N);
  sizes.out_d = 1 + below(2 * OUT_STEP_D * TILE_D);
  sizes.out_h = 1 + below(2 * OUT_STEP_H * TILE_H);
  sizes.out_w = widths[below(4)];
  if (DRAINED) {  // images whose rows are whole units
    sizes.out_d = 1;
    sizes.out_w = (sizes.out_w + 7) / 8 * 8;
    sizes.out_h = (sizes.out_h + OUT_STEP_H - 1) / OUT_STEP_H * OUT_STEP_H;
  }
  if (STORE_UNIT) sizes.out_w = (sizes.out_w * ELEMENT + STORE_UNIT - 1) / STORE_UNIT * STORE_UNIT / ELEMENT;
  tile.group = below(COUT / COUT_G);
  tile.variant = below(VARIANTS);
  tile.n = first_q(sizes.batch, 1, TILE_N);
  tile.d = first_q(sizes.out_d + lead[0], OUT_STEP_D * stride[0], TILE_D);
  tile.h = first_q(sizes.out_h + lead[1], OUT_STEP_H * stride[1], TILE_H);
  tile.w = first_q(sizes.out_w + lead[2], OUT_STEP_W * stride[2], TILE_W);
  cout_block = below(COUT_BLOCKS * WGS_M);
  first_subtile = SPLIT == 0 ? below(2) * NB : 0;
  first_warp = below(4 / WARPS) * WARPS;
  consumer = below(2);
  has_bias = below(2);

  long long count = (long long)sizes.batch * channels * sizes.out_d * sizes.out_h * sizes.out_w;
  if (count > (BARE ? 300000 : 4000000)) return 0;
  global_memory.assign((count + 64) * ELEMENT + 256, 0);
  written.assign(global_memory.size(), 0);
  y = (char*)(((u64)global_memory.data() + 255) / 128 * 128);
  if (STORE_UNIT > ELEMENT || DRAINED) y += below(2) * 16;
  else if (!below(3) && !(CHANNELS_LAST && ALIGNED_COUT)) y += below(32 / ELEMENT) * ELEMENT;
  bias.resize(channels);
  for (ELEMENT_TYPE& b : bias) b = stored((float)below(8));
  draw_sums();
  sizes.tiles_w = (sizes.out_w + lead[2] + OUT_STEP_W * stride[2] * TILE_W - 1) / (OUT_STEP_W * stride[2] * TILE_W);
  shared_memory.assign(WARPS * BUFFER_BYTES, 0xdd);
  long long checked = 0, bytes = 0;
#if BARE  // of which every warp of all tiles of these images and slices stores a share
  sizes.tiles_h = (sizes.out_h + OUT_STEP_H * TILE_H - 1) / (OUT_STEP_H * TILE_H);
  for (tile.variant = 0; tile.variant < VARIANTS; tile.variant++)
    for (tile.h = 0; tile.h < sizes.tiles_h * TILE_H; tile.h += TILE_H)
      for (tile.w = 0; tile.w < sizes.tiles_w * TILE_W; tile.w += TILE_W)
        for (first_subtile = 0; first_subtile < SUBTILES; first_subtile += NB)
          for (first_warp = 0; first_warp < 4; first_warp += WARPS) {
            run_fibers(WARPS * 32, body);
            checked += check_own();
          }
  checked += check_bare();
#elif DRAINED  // another warp's outputs follow in the same buffer, while the engine has not read the first ones
  static float before[WARPS * 32][MB][NB][32];
  int warp = first_warp;
  run_fibers(WARPS * 32, body);
  memcpy(before, accumulators, sizeof before);
  draw_sums();
  first_warp = (warp + 1) % 4;
  run_fibers(WARPS * 32, body);
  bulk_wait_read();                        // the kernel's end
  if (!asked.empty()) fail("boxes of no group");
  checked += check_own();
  memcpy(accumulators, before, sizeof before);
  first_warp = warp;
  checked += check_own();
#else
  run_fibers(WARPS * 32, body);
  checked += check_own();
#endif
  for (unsigned char w : written) bytes += w;
  if (bytes != checked * ELEMENT) fail("stores beside the tile");
  return checked;
}

int main(int, char** arguments) {
  seed = atoi(arguments[1]);
  long long checked = 0;
  for (int i = atoi(arguments[2]); i > 0; i--) checked += one_tile();
  printf("%lld\n", checked);
}
