// wgrad_wgmma.cu's descriptors of g in half precision, channels_last, for one tiling: the 16 pixels of a step that each names must be
// those whose rows `ldmatrix` would fetch for the fragment.
#include "kernel.h"  // the kernel of a tiling, by test_host.py

using C = Config;
using T = WgradTile<C>;
using F = WgradDescribedFragments<T>;
#include "machine.cpp"
using machine::below;

static long long checked;
static int warpgroups;

static void one_warpgroup() {
  F::Lane of = {};
  of.wg_m = below(C::split_m), of.first_unit = below(C::warpgroups / C::split_m) * T::UNITS;
  const T::Sizes s = {};
  const F::Phases phases = {};
  F::Taps taps;
  for (int u = 0; u < T::UNITS; u++) F::set_tap(taps, u, of.first_unit + u, s);
  const unsigned char* tile = machine::dynamic_memory();
  for (int k = 0; k < (C::stacked ? C::tile_n * C::tile_d * T::G_ROWS_H * C::unrolled : C::unrolled / C::entries); k++) {
    int r = k / C::unrolled % T::G_ROWS_H, slice = k / (C::unrolled * T::G_ROWS_H);
    F::Step step = C::stacked ? F::step_of_row(slice / C::tile_d, slice % C::tile_d, r, k % C::unrolled) : F::step_of(k);
    for (int u = 0; u < T::UNITS; u++) {
      u32 a[4];
      F::load(a, tile, taps, s, phases, u, step, F::lane_first(of));
      u64 descriptor = descriptor_of_words(a);
      if (descriptor >> 62 != 1 || descriptor >> 46 << 46 != (u64)1 << 62 || a[0] >> 14) machine::fail("not a descriptor of rows of 128 bytes");
      for (int pixel = 0; pixel < 16; pixel++) {
        const F::Half& half = step.half[pixel / 8];
        long long p = taps.at[u] + half.row * T::G_LINE + half.column + pixel % 8 * T::G_STEP_W;
        long long named = (a[0] << 4) - machine::SHARED_BEGIN + pixel % 8 * 128 + pixel / 8 * ((long long)(a[1] & 0x3fff) << 4);
        if (named != of.wg_m * T::G_SLAB_BYTES + p * (T::G_WIDTH * 2)) machine::fail("another pixel's row");
        if (named + 128 > T::G_BYTES) machine::fail("a row beyond the tile");
        checked++;
      }
    }
  }
}

int main(int, char** arguments) {
  warpgroups = atoi(arguments[2]);
  const char* wrong = machine::launch([] { for (int i = 0; i < warpgroups; i++) one_warpgroup(); }, 1, 1, 0, nullptr, 1, atoi(arguments[1]));
  if (wrong) printf("%s\n", wrong);
  else printf("%lld\n", checked);
  return wrong != nullptr;
}
