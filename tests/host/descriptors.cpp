// wgrad_wgmma.cu's descriptors of g in half precision, channels_last, for one tiling: the 16 pixels of a step that each names must be
// those whose rows `ldmatrix` would fetch for the fragment.
#include "warp.h"

static u32 shared_address(const void*) { return 0; }

#include "kernel.h"  // the tiling's macros and the kernel's fragments, cut from it by test_host.py

static unsigned seed;
static int below(int n) {
  seed = seed * 1103515245u + 12345u;
  return (int)((seed >> 8) % (unsigned)n);
}

static long long one_warpgroup() {
  int wg_m = below(WGS_M), first_unit = below(WGS_T) * UNITS;
  const Sizes s = {};
  const Phases phases = {};
  Taps taps;
  for (int u = 0; u < UNITS; u++) {  // as `consume` has it
    int unit = first_unit + u < SET_UNITS ? first_unit + u : SET_UNITS - 1;
    int td = unit / (SET_UNITS / TAPS_D), th = STACKED ? 0 : unit / TAPS_W % TAPS_H, tw = unit % TAPS_W;
    int shift = (DENSE_D ? td * (DIL_D / APART_D) : td) * CLASS_ROWS + (DENSE_H ? th * (DIL_H / APART_H) : th);
    taps.at[u] = shift * G_LINE + (PARTED ? tw % G_PLANES * (PLANE_BYTES / G_PIXEL_BYTES) + tw / G_PLANES * PLANE_TAPS : tw * DIL_W);
  }
  const unsigned char* tile = nullptr;
  long long checked = 0;
  for (int k = 0; k < (STACKED ? TILE_N * TILE_D * G_ROWS_H * STRETCH : STRETCH / ENTRIES); k++) {
    int r = k / STRETCH % G_ROWS_H, slice = k / (STRETCH * G_ROWS_H);
    Step step = STACKED ? step_of_row(slice / TILE_D, slice % TILE_D, r, k % STRETCH) : step_of(k);
    for (int u = 0; u < UNITS; u++) {
      u32 a[4];
      load_fragment(a, tile, taps, s, phases, u, step, wg_m * G_SLAB_BYTES);
      u64 descriptor = (u64)a[1] << 32 | a[0];
      if (descriptor >> 62 != 1 || descriptor >> 46 << 46 != (u64)1 << 62 || a[0] >> 14) fail("not a descriptor of rows of 128 bytes");
      for (int pixel = 0; pixel < 16; pixel++) {
        const Half& half = step.half[pixel / 8];
        long long p = taps.at[u] + half.row * G_LINE + half.column + pixel % 8 * G_STEP_W;
        long long named = (a[0] << 4) + pixel % 8 * 128 + pixel / 8 * ((long long)(a[1] & 0x3fff) << 4);
        if (named != wg_m * G_SLAB_BYTES + p * (G_WIDTH * 2)) fail("another pixel's row");
        if (named + 128 > G_BYTES) fail("a row beyond the tile");
        checked++;
      }
    }
  }
  return checked;
}

int main(int, char** arguments) {
  seed = atoi(arguments[1]);
  long long checked = 0;
  for (int i = atoi(arguments[2]); i > 0; i--) checked += one_warpgroup();
  printf("%lld\n", checked);
}
