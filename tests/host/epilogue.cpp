// gather's epilogue for one tiling, on random tiles of random images: each accumulator must arrive at the output that
// the fragment layout of wgmma and the tiling's definition give it, and nothing else may be written.
#include "warp.h"

#define HAS_THREADS
static int first_thread;
static struct {
  struct {
    operator u32() const { return first_thread + this_fiber; }
  } x;
} threadIdx;

#include "kernel.h"  // the tiling's constants and its box of the result (Box); gather_work.cuh
using C = Config;
using G = GatherWork<C>;
static constexpr int ELEMENT = G::ELEMENT;
static constexpr bool BARE = C::bare, DRAINED = C::store == STORE_BOXES, SHUFFLED = C::store == STORE_PHASES;
static constexpr int WARPS = C::store == STORE_PIXELS ? C::rows_per_sub / 16 : 1;  // of a team

static int first_warp, consumer;
static int team() { return (consumer * 4 + first_warp) / WARPS; }
// The team, which is all fibers, meets at a barrier that no other part of the kernel uses (0 to 3) and no other team.
void named_sync(int id, int count) {
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
#ifdef MOVMATRIX
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
static G::Sizes sizes;

// The copy engine: boxes of the result's map (Box, innermost first) are read when their group is waited for, as late as it may.
struct TensorMap {};
struct Asked { u32 from; int w, channel, h, phase, n; };
static std::vector<Asked> asked, under_way;
void store_box(const TensorMap&, u32 from, int w, int channel, int h, int phase, int n) {
  if (from % 128 || w * ELEMENT % 16) fail("a box that the engine does not take");
  asked.push_back({from, w, channel, h, phase, n});
}
void bulk_commit() {
  under_way.insert(under_way.end(), asked.begin(), asked.end());
  asked.clear();
}
template <class C> static void read_boxes() {
  for (const Asked& b : under_way)
    for (int i = 0; i < Box::extents[0] * Box::extents[1] * Box::extents[2]; i++) {
      u32 at = b.from + i * ELEMENT;
      at ^= (at >> 7 & (C::out_span / 16 - 1)) << 4;
      int column = b.w + i % Box::extents[0], c = b.channel + i / Box::extents[0] % Box::extents[1], row = b.h + i / (Box::extents[0] * Box::extents[1]);
      u16 v = load_shared<u16>(at);
      bool ok = column < sizes.out_w && c < C::cout && row < sizes.out_h / C::out_step_h && b.n < sizes.batch;
      long long place = (((long long)b.n * C::cout + c) * sizes.out_h + row * C::out_step_h + b.phase) * sizes.out_w + column;
      store_global(y + place * ELEMENT, &v, ELEMENT, ok);
    }
  under_way.clear();
}
void bulk_wait_read() {
  if constexpr (DRAINED) read_boxes<C>();
}

#include "epilogue.h"  // the epilogue's ways
using Store = Epilogue<C>;

static float accumulators[WARPS * 32][C::mb][G::NB][32];
static std::vector<G::Number::Type> bias;
static bool has_bias;
static G::Tile tile;
static int cout_block, first_subtile;

template <class Result> static Result result() {
  if constexpr (DRAINED) {
    static TensorMap map;
    return map;
  } else {
    return y;
  }
}
static void body() {
  float acc[C::mb][G::NB][32];
  memcpy(acc, accumulators[this_fiber], sizeof acc);
  int of_team = this_fiber / 32;
  Store::store(acc, has_bias ? bias.data() : nullptr, result<Store::Result>(), sizes, tile, cout_block, first_subtile, of_team * Store::BUFFER_BYTES, first_warp + of_team, this_fiber % 32);
}

static void run() {
  first_thread = (G::FIRST_CONSUMER + consumer) * 128 + first_warp * 32;
  run_fibers(WARPS * 32, body);
}

static unsigned seed;
static int below(int n) {
  seed = seed * 1103515245u + 12345u;
  return (int)((seed >> 8) % (unsigned)n);
}
static G::Number::Type stored(float v) {
  u32 bits = G::Number::bits(v);
  G::Number::Type element;
  memcpy(&element, &bits, ELEMENT);
  return element;
}
static float value_of(int channel) { return has_bias ? G::Number::value(bias[channel]) : 0.f; }
static int first_q(int out, int step, int tile) { return below((out + step * tile - 1) / (step * tile)) * tile; }

// A strided layer's whose phases are rows; else there is none.
struct Axes { int stride[3], lead[3]; };
template <class C> static constexpr Axes axes() {
  if constexpr (C::store == STORE_PHASES) return {{C::layer_stride_d, C::layer_stride_h, C::layer_stride_w}, {C::lead_d, C::lead_h, C::lead_w}};
  else return {{1, 1, 1}, {0, 0, 0}};
}
static constexpr Axes layer = axes<C>();

template <class C> static long long place_in_output(int n, int channel, int d, int h, int w) {
  if constexpr (C::store == STORE_PIXELS) {
    if (C::batch_as_width) return (((long long)w * sizes.out_d + d) * sizes.out_h + h) * C::cout + channel;  // columns are images, one behind the other
  }
  return C::channels_last ? ((((long long)n * sizes.out_d + d) * sizes.out_h + h) * sizes.out_w + w) * C::cout + channel
                          : ((((long long)n * C::cout + channel) * sizes.out_d + d) * sizes.out_h + h) * sizes.out_w + w;
}
static void expect(long long at, float v) {
  const auto want = stored(v);
  if (memcmp(y + at * ELEMENT, &want, ELEMENT)) fail("a wrong value");
}

// Of phases as rows: a row of M by its definition, lines of C::inner, as many as 16 rows have room for. Whether it exists.
template <class C> static bool shuffled(int cout, int& channel, int& d, int& h, int& w) {
  if constexpr (C::store == STORE_PHASES) {
    int of_slab = cout % 16 / C::inner, line = cout / 16 * C::per_slab + of_slab, within = cout % 16 % C::inner;
    if (of_slab >= C::per_slab || line >= C::lines) return false;
    int phase[] = {line / C::layer_stride_h, line % C::layer_stride_h, within};
    channel = 0;
    if (C::channels_last) channel = within % C::cout, phase[2] = within / C::cout;
    else channel = phase[0] / C::layer_stride_d, phase[0] %= C::layer_stride_d;
    d = d * layer.stride[0] + phase[0] - layer.lead[0], h = h * layer.stride[1] + phase[1] - layer.lead[1], w = w * layer.stride[2] + phase[2] - layer.lead[2];
    return d >= 0 && h >= 0 && w >= 0;
  }
  return true;
}

// What the consumer in hand has accumulated; the number of outputs.
static long long check_own() {
  long long checked = 0;
  for (int thread = 0; thread < WARPS * 32; thread++)
    for (int nb = 0; nb < G::NB; nb++)
      for (int e = 0; e < 32; e++)
        for (int u = 0; u < C::w_subs; u++) {
          int lane = thread % 32, row = first_warp * 16 + thread / 32 * 16 + lane / 4 + 8 * (e >> 1 & 1), column = 8 * (e >> 2) + 2 * (lane % 4) + (e & 1);
          int sub = row / C::rows_per_sub, cout = cout_block * C::rows_per_sub + row % C::rows_per_sub, block = C::blocks_of_w[u];
          Store::Place place = Store::place_of(first_subtile + nb);
          int q_h = tile.h + place.h + (C::sub_h == 8 ? column / 8 : 0), q_w = tile.w + place.w + (C::sub_h == 8 ? column % 8 : column);
          int n = tile.n + place.n, d = C::out_step_d * (tile.d + place.d) + C::subs_d[tile.variant * C::subs + sub];
          int h = C::out_step_h * q_h + C::subs_h[tile.variant * C::subs + sub], w = C::out_step_w * q_w + C::subs_w[tile.variant] + u;
          int channel = tile.group * C::cout_g + cout;
          if (!shuffled<C>(cout, channel, d, h, w)) continue;
          if (cout >= C::cout_g || n >= sizes.batch || d >= sizes.out_d || h >= sizes.out_h || w >= sizes.out_w) continue;
          expect(place_in_output<C>(n, channel, d, h, w), (block < 0 ? 0.f : accumulators[thread][block][nb][e]) + value_of(channel));
          checked++;
        }
  return checked;
}

// All sub-positions without taps, of the block's channels, in the tile's images and slices; the number of outputs.
template <class C> static long long check_bare() {
  long long checked = 0;
  int first = cout_block * C::rows_per_sub;
  for (size_t b = 0; b < sizeof C::bares_rows / sizeof C::bares_rows[0]; b++)
    for (int n = tile.n; n < tile.n + C::tile_n && n < sizes.batch; n++)
      for (int q = tile.d; q < tile.d + C::tile_d && C::out_step_d * q + C::bares_d[b] < sizes.out_d; q++)
        for (int h = 0; h < sizes.out_h; h++)
          for (int w = 0; w < sizes.out_w; w++) {
            int row = h % C::out_step_h - C::bares_h[b], column = w % C::out_step_w - C::bares_w[b];
            if (C::bares_rows[b] && (row < 0 || row >= C::bares_rows[b])) continue;
            if (C::bares_w[b] >= 0 && (column < 0 || column >= C::w_subs)) continue;
            for (int cout = first; cout < first + C::rows_per_sub && cout < C::cout_g; cout++, checked++) {
              int channel = tile.group * C::cout_g + cout;
              expect(place_in_output<C>(n, channel, C::out_step_d * q + C::bares_d[b], h, w), value_of(channel));
            }
          }
  return checked;
}

static void draw_sums() {
  for (auto& lane : accumulators)
    for (auto& block : lane)
      for (auto& subtile : block)
        for (float& v : subtile) v = (float)(1 + below(200));
}

// Bytes of which rows of the result begin at multiples; 0: at any of an element's.
template <class C> static constexpr int rows_begin() {
  if constexpr (C::store == STORE_ROWS) return C::store_unit;
  else return 0;
}
template <class C> static constexpr bool whole_units() {
  if constexpr (C::store == STORE_PIXELS) return C::aligned_cout;
  else return false;
}
template <class C> static constexpr bool batch_as_width() {
  if constexpr (C::store == STORE_PIXELS) return C::batch_as_width;
  else return false;
}

static void draw_tile() {
  int widths[] = {1 + below(2 * C::out_step_w * C::tile_w), 1 + below(40), 2 + 2 * below(C::out_step_w * C::tile_w), 16 * (1 + below(C::out_step_w * C::tile_w / 8))};
  constexpr int UNIT = rows_begin<C>();
  sizes = {};
  sizes.batch = batch_as_width<C>() ? 1 : 1 + below(2 * C::tile_n);
  sizes.out_d = 1 + below(2 * C::out_step_d * C::tile_d);
  sizes.out_h = 1 + below(2 * C::out_step_h * C::tile_h);
  sizes.out_w = widths[below(4)];
  if (DRAINED) {  // images whose rows are whole units
    sizes.out_d = 1;
    sizes.out_w = (sizes.out_w + 7) / 8 * 8;
    sizes.out_h = (sizes.out_h + C::out_step_h - 1) / C::out_step_h * C::out_step_h;
  }
  if (UNIT) sizes.out_w = (sizes.out_w * ELEMENT + UNIT - 1) / UNIT * UNIT / ELEMENT;
  tile.group = SHUFFLED ? 0 : below(C::cout / C::cout_g);
  tile.variant = below(C::variants);
  tile.n = first_q(sizes.batch, 1, C::tile_n);
  tile.d = first_q(sizes.out_d + layer.lead[0], C::out_step_d * layer.stride[0], C::tile_d);
  tile.h = first_q(sizes.out_h + layer.lead[1], C::out_step_h * layer.stride[1], C::tile_h);
  tile.w = first_q(sizes.out_w + layer.lead[2], C::out_step_w * layer.stride[2], C::tile_w);
  cout_block = below(C::cout_blocks * G::WGS_M);
  first_subtile = C::split == 0 ? below(2) * G::NB : 0;
  first_warp = below(4 / WARPS) * WARPS;
  consumer = below(2);
  has_bias = below(2);
}

static long long one_tile() {
  draw_tile();
  constexpr int UNIT = rows_begin<C>();
  long long count = (long long)sizes.batch * C::cout * sizes.out_d * sizes.out_h * sizes.out_w;
  if (count > (BARE ? 300000 : 4000000)) return 0;
  global_memory.assign((count + 64) * ELEMENT + 256, 0);
  written.assign(global_memory.size(), 0);
  y = (char*)(((u64)global_memory.data() + 255) / 128 * 128);
  if (UNIT > ELEMENT || DRAINED) y += below(2) * 16;
  else if (!below(3) && !whole_units<C>()) y += below(32 / ELEMENT) * ELEMENT;
  bias.resize(C::cout);
  for (auto& b : bias) b = stored((float)below(8));
  draw_sums();
  sizes.tiles_w = (sizes.out_w + layer.lead[2] + C::out_step_w * layer.stride[2] * C::tile_w - 1) / (C::out_step_w * layer.stride[2] * C::tile_w);
  shared_memory.assign(WARPS * Store::BUFFER_BYTES, 0xdd);
  long long checked = 0, bytes = 0;
  if constexpr (BARE) {  // of which every warp of all tiles of these images and slices stores a share
    sizes.tiles_h = (sizes.out_h + C::out_step_h * C::tile_h - 1) / (C::out_step_h * C::tile_h);
    for (tile.variant = 0; tile.variant < C::variants; tile.variant++)
      for (tile.h = 0; tile.h < sizes.tiles_h * C::tile_h; tile.h += C::tile_h)
        for (tile.w = 0; tile.w < sizes.tiles_w * C::tile_w; tile.w += C::tile_w)
          for (first_subtile = 0; first_subtile < G::SUBTILES; first_subtile += G::NB)
            for (first_warp = 0; first_warp < 4; first_warp += WARPS) {
              run();
              checked += check_own();
            }
    if constexpr (!SHUFFLED) checked += check_bare<C>();
  } else if constexpr (DRAINED) {  // another warp's outputs follow in the same buffer, while the engine has not read the first ones
    static float before[WARPS * 32][C::mb][G::NB][32];
    int warp = first_warp;
    run();
    memcpy(before, accumulators, sizeof before);
    draw_sums();
    first_warp = (warp + 1) % 4;
    run();
    bulk_wait_read();                      // the kernel's end
    if (!asked.empty()) fail("boxes of no group");
    checked += check_own();
    memcpy(accumulators, before, sizeof before);
    first_warp = warp;
    checked += check_own();
  } else {
    run();
    checked += check_own();
  }
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
