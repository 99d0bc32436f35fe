// gather.cu's stream of weights and the consumers' way through it, for one tiling: what the one puts into a stage of the ring must
// be what the other takes it for, fragment by fragment, and every stage must be waited for and given back once, in order.
#include <cstdio>
#include <cstdlib>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __constant__
typedef unsigned int u32;
typedef unsigned long long u64;

[[noreturn]] static void fail(const char* what) {
  printf("%s\n", what);
  exit(1);
}
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
struct Fill { u32 to; const char* from; u32 bytes; };
static std::vector<Fill> fills;
static bool streaming;
static long long taken, released;  // stages so far: of all tiles, the other consumer's included
static std::vector<bool> landed;   // RESIDENT: chunks that this consumer has waited for

static void bring(u32 to, const char* from, u32 bytes, u32 barrier);
static void barrier_wait(u32 barrier, u32 parity);
static void barrier_arrive(u32 barrier);
static void load_shared_128(u32 (&a)[4], u32 address);

#include "kernel.h"  // the tiling's macros and what follows them of the kernel, cut from it by test_host.py

static long long streamed;  // the streamer's own count of stages
static void bring(u32 to, const char* from, u32 bytes, u32 barrier) {
  long long stage = RESIDENT ? (long long)fills.size() : streamed++ % STAGES_W;
  if (barrier != FULL + 8 * stage) fail("bytes announced to another stage's barrier");
  if (!RESIDENT && to != RING + stage * (W_STAGE * WGS_M * FRAGMENT)) fail("a stage brought to another's place");
  if (!RESIDENT && bytes > W_STAGE * WGS_M * FRAGMENT) fail("more bytes than a stage has");
  fills.push_back({to, from, bytes});
}
static void barrier_wait(u32 barrier, u32 parity) {
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
static void load_shared_128(u32 (&)[4], u32 address) {
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
  if (fill->from + (address - fill->to) != expected) fail("another fragment than the tile's next");
  expected += WGS_M * FRAGMENT;
}

// As `consume`, without pixels and sums.
static long long consume(const char* packed, const Sizes& s, int wg) {
  Fragments weights;
  weights.ring = RING;
  weights.full = FULL;
  weights.empty = EMPTY;
  weights.cursor = {0, 0};
  weights.first = true;
  landed.assign(fills.size(), false);
  static float acc[MB][NB][32];
#if PROMOTE
  static float sum[MB][NB][32];
#endif
  long long checked = 0, before = 0;
  int turn = 0;
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x, turn++) {
    Tile t = tile_at(index, s);
    long long stages = 0;
    for (const char* at = fragments_of(packed, t), *end = at + (long long)FRAGMENTS(entries_of(t.variant)) * (WGS_M * FRAGMENT); !RESIDENT && at < end; stages++) {
      if (fills[before + stages].from != at) fail("the stream leaves fragments out");
      at += fills[before + stages].bytes;
    }
    if (SPLIT == 2 && (turn & 1) != wg) {
      if (!RESIDENT) weights.skip(t.variant);
    } else {
      taken = released = before;
      expected = fragments_of(packed, t);
      weights.begin(packed, t, 0);
      for (int chunk = 0; chunk < chunks_of(t.variant); chunk++) {
        weights.begin_chunk(chunk);
        given_back = 0;
        multiply_chunk<0>(t.variant, acc, SUM_ARGUMENT weights, Columns(), CONTINUED && chunk ? CHUNK_BEFORE : 0, 0);
        if (given_back != (CONTINUED && chunk ? 1 : 0)) fail("the pixels of the chunk before are given back once");
      }
      weights.end();
      long long bytes = expected - fragments_of(packed, t);
      if (bytes != (long long)FRAGMENTS(entries_of(t.variant)) * (WGS_M * FRAGMENT)) fail("not all fragments of a tile");
      if (!RESIDENT && (taken != before + stages || released != taken)) fail("a stage is left");
      checked += bytes / FRAGMENT;
    }
    before += stages;
  }
  return checked;
}

int main(int, char** arguments) {
  int seed = atoi(arguments[1]), count = atoi(arguments[2]);
  Sizes s = {};
  s.tiles_d = s.tiles_h = s.tiles_w = 1;
  s.tiles = M_GROUPS * count;
  gridDim.x = RESIDENT ? M_GROUPS : 1 + seed % 5;
  static char packed[1];
  long long checked = 0;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
    fills.clear();
    streamed = 0;
    streaming = true;
    stream_weights(packed, s, RING, FULL, EMPTY);
    streaming = false;
    for (int wg = 0; wg < (SPLIT == 2 ? 2 : 1); wg++) checked += consume(packed, s, wg);
  }
  printf("%lld\n", checked);
}
