// wgrad_wgmma.cu's fragments of g in half precision, NCHW, for one tiling: those that neighbouring taps shift out of words in
// common must be those that each would load by itself.
#include "warp.h"

static u32 __byte_perm(u32 low, u32 high, u32 selector) {
  u64 bytes = (u64)high << 32 | low;
  u32 found = 0;
  for (int i = 0; i < 4; i++) found |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return found;
}
static u32 shared_address(const void*) { return 0; }
struct Thread { int x; };
static Thread threadIdx;

#include "kernel.h"  // the tiling's macros and the kernel's fragments, cut from it by test_host.py

static unsigned seed;
static int below(int n) {
  seed = seed * 1103515245u + 12345u;
  return (int)((seed >> 8) % (unsigned)n);
}

static long long one_step(const std::vector<u16>& tile) {
  Sizes s = {};
  s.out_d = 1 + below(9);
  s.out_h = 1 + below(40);
  s.out_w = ALIGNED_G ? 8 * (1 + below(20)) : 1 + below(200);
  int lane = below(32), wg_m = below(WGS_M), warp = below(4), first_unit = (below(WGS_T) * SUBS + warp * 16 / ROWS_PER_SUB) * UNITS;
  Taps taps;
  for (int u = 0; u < UNITS; u++) {  // as `consume` has it
    int unit = first_unit + u < SET_UNITS ? first_unit + u : SET_UNITS - 1;
    int td = unit / (SET_UNITS / TAPS_D), th = STACKED ? 0 : unit / TAPS_W % TAPS_H, tw = unit % TAPS_W;
    int shift = (DENSE_D ? td * (DIL_D / APART_D) : td) * CLASS_ROWS + (DENSE_H ? th * (DIL_H / APART_H) : th);
    taps.at[u] = shift * (G_CHANNELS * G_PITCH) + tw * DIL_W;
    taps.line[u] = ((u32)(td * DIL_D) * s.out_h + th * DIL_H) * s.out_w;
  }
  int channel = wg_m * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB + lane / 4;
  int lane_at = channel / G_CHANNELS * (CLASS_BYTES / 2 * ROW_CLASSES) + channel % G_CHANNELS * G_PITCH + 2 * (lane % 4) * STEP_W;
  Phases phases = {};
  if (ALIGNED_G) lane_at += (u32)(below(9) * TILE_W * STEP_W + below(SETS_W) * TAPS_W * DIL_W - PAD_W) & (VEC - 1);
  else
    for (int j = 0; j < ROW_CLASSES; j++) phases.of[j] = CLASSED ? below(VEC) : below(1 << 20);
  long long checked = 0;
  for (int k = 0; k < (STACKED ? TILE_N * TILE_D * G_ROWS_H * STRETCH : STRETCH / ENTRIES); k++) {
    int r = k / STRETCH % G_ROWS_H, slice = k / (STRETCH * G_ROWS_H);
    Step step = STACKED ? step_of_row(slice / TILE_D, slice % TILE_D, r, k % STRETCH) : step_of(k);
    for (int u = 0; u < UNITS; u += W_RUN) {
      Words words;
      load_words(words, (const unsigned char*)tile.data(), taps, s, phases, u, step, lane_at);
      for (int i = 0; i < W_RUN; i++) {
        if (first_unit + u + i >= SET_UNITS) continue;  // its sums are not stored
        u32 shifted[4], loaded[4];
        shift_words(shifted, words, i);
        load_fragment(loaded, (const unsigned char*)tile.data(), taps, s, phases, u + i, step, lane_at);
        if (memcmp(shifted, loaded, sizeof loaded)) fail("a wrong fragment");
        checked += 8;
      }
    }
  }
  return checked;
}

int main(int, char** arguments) {
  seed = atoi(arguments[1]);
  std::vector<u16> tile(G_BYTES / 2 + 64);
  for (size_t i = 0; i < tile.size(); i++) tile[i] = (u16)(i * 2654435761u >> 16);
  long long checked = 0;
  for (int i = atoi(arguments[2]); i > 0; i--) checked += one_step(tile);
  printf("%lld\n", checked);
}
