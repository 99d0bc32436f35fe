// wgrad_wgmma.cu's fragments of g in half precision, NCHW, for one tiling: those that neighbouring taps shift out of words in
// common must be those that each would load by itself.
#include "kernel.h"  // the kernel of a tiling, by test_host.py

using C = Config;
using T = WgradTile<C>;
using F = WgradFragments<T>;
#include "machine.cpp"
using machine::below;

static long long checked;
static int steps;

static void one_step(const std::vector<u16>& tile) {
  T::Sizes s = {};
  s.out_d = 1 + below(9);
  s.out_h = 1 + below(40);
  s.out_w = C::aligned_g ? 8 * (1 + below(20)) : 1 + below(200);
  F::Lane of;  // as `lane_of` has it
  of.lane = below(32), of.warp = below(4), of.row = of.lane / 4, of.q = of.lane % 4, of.wg_m = below(C::split_m);
  of.first_unit = (below(C::warpgroups / C::split_m) * C::subs + of.warp * 16 / T::ROWS_PER_SUB) * T::UNITS;
  of.channel = of.wg_m * T::ROWS_PER_SUB + of.warp * 16 % T::ROWS_PER_SUB;
  F::Taps taps;
  for (int u = 0; u < T::UNITS; u++) F::set_tap(taps, u, of.first_unit + u, s);
  int lane_at = F::lane_first(of);
  F::Phases phases = {};
  if (C::aligned_g) lane_at += (u32)(below(9) * C::tile_w * C::step_w + below(C::sets_w) * C::taps_w * C::dilation_w - C::padding_w) & (T::VEC - 1);
  else
    for (int j = 0; j < C::row_classes; j++) phases.of[j] = T::CLASSED ? below(T::VEC) : below(1 << 20);
  const unsigned char* bytes = (const unsigned char*)tile.data();
  for (int k = 0; k < (C::stacked ? C::tile_n * C::tile_d * T::G_ROWS_H * C::unrolled : C::unrolled / C::entries); k++) {
    int r = k / C::unrolled % T::G_ROWS_H, slice = k / (C::unrolled * T::G_ROWS_H);
    F::Step step = C::stacked ? F::step_of_row(slice / C::tile_d, slice % C::tile_d, r, k % C::unrolled) : F::step_of(k);
    WgradSharedWords<T> words;
    for (int u = 0; u < T::UNITS; u++) {
      u32 shifted[4], loaded[4];
      words.load(shifted, bytes, taps, s, phases, u, step, lane_at);
      if (of.first_unit + u >= T::SET_UNITS) continue;  // its sums are not stored
      F::load(loaded, bytes, taps, s, phases, u, step, lane_at);
      if (memcmp(shifted, loaded, sizeof loaded)) machine::fail("a wrong fragment");
      checked += 8;
    }
  }
}

static void run() {
  std::vector<u16> tile(T::G_BYTES / 2 + 64);
  for (size_t i = 0; i < tile.size(); i++) tile[i] = (u16)(i * 2654435761u >> 16);
  for (int i = 0; i < steps; i++) one_step(tile);
}

int main(int, char** arguments) {
  static_assert(WgradRuns<T>::SHARED, "neighbouring taps have words in common");
  steps = atoi(arguments[2]);
  const char* wrong = machine::launch(run, 1, 1, 0, nullptr, 1, atoi(arguments[1]));
  if (wrong) printf("%s\n", wrong);
  else printf("%lld\n", checked);
  return wrong != nullptr;
}
