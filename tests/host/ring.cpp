// gather's stream of weights and the consumers' way through it, for one tiling: what the one puts into a stage of the ring must
// be what the other takes it for, fragment by fragment, and every stage must be waited for and given back once, in order.
#include "standard.h"

#define __device__
#define __forceinline__ inline
#define __constant__
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct uint4 { u32 x, y, z, w; };

[[noreturn]] static void fail(const char* what) {
  printf("%s\n", what);
  exit(1);
}
#define HAS_BLOCKS
struct Dim { int x; };
static Dim blockIdx, gridDim;
static void __syncwarp() {}
static void wait_for_results() {}
static int __shfl_sync(u32, int v, int) { return v; }
static u32 __shfl_sync(u32, u32 v, int) { return v; }
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int N> static void wgmma_wait() {}

static const u32 RING = 1 << 20, FULL = 1 << 10, EMPTY = 1 << 11;
struct Box { u32 to; int channel, tap, row; };
struct Fill { u32 to; const char* from; u32 bytes, announced; std::vector<Box> boxes; };
static std::vector<Fill> fills;
static bool streaming;
static long long taken, released;  // stages so far: of all tiles, the other consumer's included
static std::vector<bool> landed;   // RESIDENT: chunks that this consumer has waited for

struct TensorMap {};
static void expect_bytes(u32 barrier, u32 bytes);
static void copy_bulk(u32 to, const char* from, u32 bytes, u32 barrier);
static void load_box(u32 to, const TensorMap& map, int channel, int tap, int row, int, int, u32 barrier);
static void barrier_wait(u32 barrier, u32 parity);
static void barrier_arrive(u32 barrier);
static void load_shared_128(u32 (&a)[4], u32 address);
static void load_matrices(u32 (&a)[4], u32 address);
static void load_matrices_turned(u32 (&a)[4], u32 address);
static u32 load_shared_u32(u32 address);

#include "kernel.h"  // the tiling's constants; gather_weights.cuh
using C = Config;
using G = GatherWork<C>;
using Tile = G::Tile;
static constexpr int MB = C::mb, NB = G::NB, WGS_M = G::WGS_M, FRAGMENT = G::FRAGMENT, K_STEPS = G::K_STEPS, STEPS_PER_TAP = G::STEPS_PER_TAP;
static constexpr int ELEMENT = G::ELEMENT, ROW_BYTES = G::ROW_BYTES, ROWS_PER_SUB = C::rows_per_sub, STAGES_W = C::stages_w, W_STAGE = C::w_stage;
static constexpr bool RESIDENT = C::resident, CONTINUED = C::continued, BOXED = C::boxed, GRAD_INPUT = C::grad_input;
static constexpr int PLANE_BARRIERS = C::plane_barriers, SPLIT = C::split;

// The pixels of a chunk, which are a number of rows: `multiply` checks a step.
template <class C>
struct Columns {
  u32 start = 0, full = 0, empty = 0, parity = 0;
  Columns shifted(int rows) const {
    Columns found = *this;
    found.start += rows * (ROW_BYTES / 16);
    return found;
  }
  template <bool FRESH> void multiply(float (&sums)[NB][32], const u32 (&a)[4], int shift, int k_step, int part, int) const;
};

#include "steps.h"  // the ways to go through a chunk's steps

// A block's chunks of a tile: all, or its share in a cluster.
static int chunks_now(const Tile& t) { return G::end_chunk(t.variant) - G::first_chunk(); }
static long long chunk_bytes(const Tile& t) { return (long long)G::entries_of(t.variant) * STEPS_PER_TAP * (WGS_M * FRAGMENT); }
static const char* first_of(const char* packed, const Tile& t) { return fragments_of<C>(packed, t) + G::first_chunk() * chunk_bytes(t); }

static long long streamed;  // the streamer's own count of stages
static u32 announced_to;
static void expect_bytes(u32 barrier, u32 bytes) {
  if (!fills.empty() && fills.back().bytes != fills.back().announced) fail("other bytes brought than announced");
  long long stage = RESIDENT ? (long long)fills.size() : streamed++ % STAGES_W;
  if (barrier != FULL + 8 * stage) fail("bytes announced to another stage's barrier");
  if (!RESIDENT && bytes > W_STAGE * WGS_M * FRAGMENT) fail("more bytes than a stage has");
  u32 before = fills.empty() ? RING : fills.back().to + fills.back().bytes;
  fills.push_back({RESIDENT ? before : (u32)(RING + stage * (W_STAGE * WGS_M * FRAGMENT)), nullptr, 0, bytes});
  announced_to = barrier;
}
static void copy_bulk(u32 to, const char* from, u32 bytes, u32 barrier) {
  Fill& fill = fills.back();
  if (barrier != announced_to || bytes != fill.announced) fail("other bytes brought than announced");
  if (to != fill.to) fail("a stage brought to another's place");
  fill.from = from, fill.bytes = bytes;
}
// Not packed, weights lie with the channels of their second dimension side by side: of a gradient K; else rows of M, of which a box has
// SPAN bytes, and a warpgroup's 64 PANELS of them.
static constexpr u32 SPAN = GRAD_INPUT ? ROW_BYTES : 128;
static constexpr int PANELS = 64 * ELEMENT / 128;
static const u32 BOX_BYTES = GRAD_INPUT ? ROWS_PER_SUB * WGS_M * ROW_BYTES : C::ck * SPAN;
static const int BOXES = GRAD_INPUT ? C::subs : WGS_M * PANELS;  // of a tap
static void load_box(u32 to, const TensorMap&, int channel, int tap, int row, int, int, u32 barrier) {
  Fill& fill = fills.back();
  if (barrier != announced_to) fail("a box of another barrier");
  if (to != fill.to + fill.bytes || to % (8 * SPAN)) fail("a box brought to another's place");
  fill.boxes.push_back({to, channel, tap, row}), fill.bytes += BOX_BYTES;
}
// Planes of pixels are waited for in their order, and given back but for the last when the next one's first step is queued.
static int multiplied;
static Tile tile_now;
static const u32 PLANES_FULL = 1u << 28, PLANES_EMPTY = 1u << 29;
static int planes, planes_back;
template <class C> static int plane_of(int entry) {
  if constexpr (C::steps == STRAIGHT) return C::planes_of_entries[entry];
  else return (entry - G::first_entry(tile_now.variant)) / C::taps_unrolled;  // a round is a plane
}
template <class C> static bool of_planes(u32 barrier) {
  if constexpr (C::plane_barriers > 1) {
    if (barrier == PLANES_FULL + 8 * planes && planes < PLANE_BARRIERS) return planes++, true;
    if (barrier != PLANES_EMPTY + 8 * planes_back) return false;
    if (planes_back + 2 != planes) fail("a plane is given back whose next one was not waited for");
    if (plane_of<C>(G::first_entry(tile_now.variant) + (multiplied - 1) / K_STEPS) != planes_back + 1) fail("a plane is given back before the next one's first step");
    return planes_back++, true;
  }
  return false;
}
static void barrier_wait(u32 barrier, u32 parity) {
  if (!streaming && of_planes<C>(barrier)) return;
  if (streaming) {
    if (barrier != EMPTY + 8 * (streamed % STAGES_W) || parity != 1 - (streamed / STAGES_W & 1)) fail("the stream waits for another stage");
    return;
  }
  if (RESIDENT) {
    if (parity || barrier < FULL || (barrier - FULL) % 8 || (barrier - FULL) / 8 >= landed.size()) fail("a consumer waits for no chunk's barrier");
    landed[(barrier - FULL) / 8] = true;
    return;
  }
  if (barrier != FULL + 8 * (taken % STAGES_W) || parity != (taken / STAGES_W & 1)) fail("a consumer waits for another stage");
  taken++;
}
static const u32 CHUNK_BEFORE = 1u << 30;  // the barrier of the chunk before
static int given_back;
static void barrier_arrive(u32 barrier) {
  if (of_planes<C>(barrier)) return;
  if (barrier == CHUNK_BEFORE) {
    given_back++;
    return;
  }
  if (RESIDENT) fail("resident weights are given back");
  if (barrier != EMPTY + 8 * (released % STAGES_W)) fail("another stage is given back");
  released++;
  if (released > taken) fail("a stage is given back before it was taken");
}
static const char* expected;  // the packed fragment that comes next
static u32 part;              // this thread's of a fragment
static const Fill* landed_at(u32 address) {
  const Fill* fill = nullptr;
  if (RESIDENT) {
    for (const Fill& f : fills)
      if (address >= f.to && address < f.to + f.bytes) fill = &f;
    if (!fill) fail("weights that nobody brought");
    if (!landed[fill - fills.data()]) fail("a chunk's weights are loaded before they have landed");
  } else {
    fill = &fills[taken - 1];
    if (released >= taken) fail("a fragment of a stage that was given back");
    if (address < fill->to || address >= fill->to + fill->bytes) fail("a fragment beyond its stage");
  }
  return fill;
}
static u32 loaded;            // fragments of the chunk so far
static void load_shared_128(u32 (&a)[4], u32 address) {
  const Fill* fill = landed_at(address - part);
  if (fill->from + (address - part - fill->to) != expected) fail("another fragment than the tile's next");
  expected += WGS_M * FRAGMENT;
  a[0] = loaded++;
}

// Of weights as they lie in memory: the tile, the thread and the step of K that comes next.
static int thread_now, wg_now, step_now;
static void load_matrices(u32 (&)[4], u32 address) {
  if (!GRAD_INPUT) fail("a forward's weights lie as M does");
  const Fill* fill = landed_at(address);
  const int entries = G::entries_of(tile_now.variant), lane = thread_now % 32;
  const int chunk = G::first_chunk() + step_now / (entries * K_STEPS), entry = step_now / K_STEPS % entries, k_step = step_now % K_STEPS;
  const Box& box = fill->boxes[(address - fill->to) / BOX_BYTES];
  const int of_entry = (int)((address - fill->to) / BOX_BYTES) % BOXES, offset = (address - box.to) % BOX_BYTES, row = offset / ROW_BYTES;
  const int tap = C::tap_indices[(G::first_entry(tile_now.variant) + entry) * C::subs + of_entry];
  if (box.channel != chunk * C::ck || box.tap != (tap < 0 ? C::taps : tap)) fail("another tap or chunk than the tile's next");
  if (box.row != tile_now.group * C::cout_g + tile_now.cout_block * WGS_M * ROWS_PER_SUB) fail("rows of another M-group");
  if (of_entry * ROWS_PER_SUB + row != wg_now * 64 + thread_now / 32 * 16 + lane % 16) fail("another row than the lane's");
  // The copy engine swaps 16-byte units within the span of its swizzle, by bits of the address above it.
  const u32 swapped = ROW_BYTES == 128 ? address >> 7 & 7 : ROW_BYTES == 64 ? address >> 7 & 3 : address >> 7 & 1;
  if ((offset % ROW_BYTES / 16 ^ swapped) != k_step * 2 + lane / 16) fail("other channels than the step's");
  step_now++;
}
// What lies at an address must be the weight of row m of the warpgroup's 64 at channel k of the step.
static void found(u32 address, int m, int k) {
  const Fill* fill = landed_at(address);
  const int entries = G::entries_of(tile_now.variant);
  const int chunk = G::first_chunk() + step_now / (entries * K_STEPS), entry = step_now / K_STEPS % entries, k_step = step_now % K_STEPS;
  const Box& box = fill->boxes[(address - fill->to) / BOX_BYTES];
  const int of_entry = (int)((address - fill->to) / BOX_BYTES) % BOXES, offset = (address - box.to) % BOX_BYTES;
  const int wg = of_entry / PANELS, panel = of_entry % PANELS, tap = C::tap_indices[G::first_entry(tile_now.variant) + entry];
  if (box.row != tile_now.group * C::cin_g + chunk * C::ck || box.tap != (tap < 0 ? C::taps : tap)) fail("another tap or chunk than the tile's next");
  const int first = tile_now.cout_block * WGS_M * ROWS_PER_SUB + (wg * PANELS + panel) * (SPAN / ELEMENT);
  if (box.channel != first) fail("rows of another M-group");
  const int byte = (offset % SPAN / 16 ^ (address >> 7 & 7)) * 16 + offset % 16;
  if (byte % ELEMENT || wg * 64 + panel * (SPAN / ELEMENT) + byte / ELEMENT != wg_now * 64 + m) fail("another row than the lane's");
  if (offset / SPAN != k_step * (32 / ELEMENT) + k) fail("another channel than the lane's");
}
static void load_matrices_turned(u32 (&)[4], u32 address) {
  if (GRAD_INPUT) fail("a gradient's weights lie as K does");
  if (ELEMENT != 2) fail("float32 is not turned by matrices");
  const int lane = thread_now % 32, matrix = lane / 8;  // rows 0.., 8.. of M at channels 0.., then at channels 8..
  found(address, thread_now / 32 * 16 + matrix % 2 * 8, matrix / 2 * 8 + lane % 8);
  step_now++;
}
static u32 load_shared_u32(u32 address) {
  static int r;                                         // the register
  if (GRAD_INPUT) fail("a gradient's weights are loaded by matrices");
  if (ELEMENT != 4) fail("halves are loaded by matrices");
  const int lane = thread_now % 32;
  found(address, thread_now / 32 * 16 + lane / 4 + r % 2 * 8, r / 2 * 4 + lane % 4);
  r = (r + 1) % 4;
  if (r == 0) step_now++;
  return 0;
}
// A step of the chunk: its sums and the pixels that it reads must be its tap's.
static float acc[MB][NB][32];
// Of IEEE's parts three products a step, each once: corrections first, and behind a stretch's high parts its sums begin anew.
static std::vector<int> products;
static bool high_begun;
static int step_of(bool fresh, u32 fragment, int part) {
  if (G::PARTS == 1) return multiplied;
  const int step = fragment / 2, high = fragment % 2 == 0, product = high ? part ? 1 : 4 : 2;
  if (!high && part) fail("low parts of both");
  if (product < 4 && high_begun != fresh) fail(fresh ? "sums begin anew amid a stretch" : "a correction behind high parts");
  if (product == 4 && fresh) fail("a stretch begins with high parts");
  high_begun = product == 4;
  if (products.size() <= (size_t)step) products.resize(step + 1);
  if (products[step] & product) fail("a product twice");
  products[step] |= product;
  return step;
}
static constexpr int PRODUCTS = G::PARTS == 2 ? 3 : 1;   // a step
template <class C>
template <bool FRESH>
void Columns<C>::multiply(float (&sums)[NB][32], const u32 (&a)[4], int shift, int k_step, int part, int) const {
  const int variant = tile_now.variant, step = step_of(FRESH, a[0], part), entry = G::first_entry(variant) + step / K_STEPS;
  int block = 0;
  while (entry >= G::end_entry(variant, block)) block++;
  if (&sums != &acc[block]) fail("a step of another block");
  if ((int)start / (ROW_BYTES / 16) + shift != C::tap_rows[entry]) fail("pixels of another tap");
  if constexpr (C::plane_barriers > 1) {
    if (plane_of<C>(entry) != planes - 1) fail("pixels of a plane that was not waited for");
  }
  if (k_step != step % K_STEPS) fail("other channels of the pixels");
  multiplied++;
}

// As `consume`, without pixels and sums.
static long long consume(const char* packed, const G::Sizes& s, int wg, int thread) {
  using W = WeightsOf<C>;
  wg_now = SPLIT == 1 ? wg : 0, thread_now = thread;
  part = W::part_of(wg_now, thread);
  Fragments<C> weights(RING, FULL, EMPTY, wg_now, thread);
  G::AloneOrder order(s);
  landed.assign(fills.size(), false);
  static float sum[MB][NB][32];
  long long checked = 0, before = 0;
  int turn = 0;
  for (int index = order.first(s); index < s.tiles; turn++) {
    Tile t = G::tile_at(index, s);
    index = order.next(index, s);
    long long stages = 0;
    for (const char* at = first_of(packed, t), *end = at + chunks_now(t) * chunk_bytes(t); !RESIDENT && at < end; stages++) {
      if (!BOXED && fills[before + stages].from != at) fail("the stream leaves fragments out");
      at += fills[before + stages].bytes;
    }
    tile_now = t, step_now = 0;
    if (SPLIT == 2 && (turn & 1) != wg) {
      if (!RESIDENT) weights.skip(t.variant);
    } else {
      taken = released = before;
      expected = first_of(packed, t);
      weights.begin(packed, t);
      for (int chunk = 0; chunk < chunks_now(t); chunk++) {
        weights.begin_chunk(chunk);
        given_back = multiplied = 0;
        loaded = 0;
        products.clear();
        high_begun = true;
        Columns<C> pixels;
        pixels.full = PLANES_FULL, pixels.empty = PLANES_EMPTY, planes = planes_back = 0;
        ChunkOf<C>::multiply(t.variant, acc, sum, weights, pixels, CONTINUED && chunk ? CHUNK_BEFORE : 0, 0);
        if (PLANE_BARRIERS > 1 && (planes != PLANE_BARRIERS || planes_back != PLANE_BARRIERS - 1)) fail("not all planes of a chunk, or its last given back twice");
        if (multiplied != G::entries_of(t.variant) * K_STEPS * PRODUCTS) fail("not all steps of a chunk");
        if (given_back != (CONTINUED && chunk ? 1 : 0)) fail("the pixels of the chunk before are given back once");
      }
      weights.end();
      long long bytes = BOXED ? (long long)step_now * (WGS_M * FRAGMENT) : expected - first_of(packed, t);
      if (bytes != chunks_now(t) * chunk_bytes(t)) fail("not all fragments of a tile");
      if (!RESIDENT && (taken != before + stages || released != taken)) fail("a stage is left");
      checked += bytes / FRAGMENT;
    }
    before += stages;
  }
  return checked;
}

template <class C> static void stream(const char* packed, const G::Sizes& s) {
  if constexpr (C::boxed) stream_weights<C>(TensorMap(), s, RING, FULL, EMPTY);
  else stream_weights<C>(packed, s, RING, FULL, EMPTY);
}

int main(int, char** arguments) {
  int seed = atoi(arguments[1]), count = atoi(arguments[2]);
  G::Sizes s = {};
  s.tiles_d = s.tiles_h = s.tiles_w = 1;
  s.tiles = C::m_groups * count;
  gridDim.x = C::cluster > 1 ? s.tiles * C::cluster : RESIDENT ? C::m_groups : 1 + seed % 5;
  static char packed[1];
  long long checked = 0;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
    fills.clear();
    streamed = 0;
    streaming = true;
    stream<C>(packed, s);
    streaming = false;
    if (!fills.empty() && fills.back().bytes != fills.back().announced) fail("other bytes brought than announced");
    for (int thread : {0, 21, 77, 127})
      for (int wg = 0; wg < (SPLIT == 0 ? 1 : 2); wg++) checked += consume(packed, s, wg, thread);
  }
  printf("%lld\n", checked);
}
