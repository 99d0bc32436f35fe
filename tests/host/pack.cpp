// gather.cu's `pack`, for one tiling: argv are its blocks, the taps' step, and how many words it writes; weights come by standard
// input, words leave by standard output, those that nothing wrote as all ones. With a fourth argument it is `pack_float`: float32
// weights, and behind them so many biases, which leave behind the words.
#include "warp.h"
#include "block.h"

static void let_dependent_begin() {}

#include "kernel.h"  // the tiling's macros and what packs, cut from gather.cu by test_host.py

static std::vector<ELEMENT_TYPE> weight;
static std::vector<u32> packed;
static int tap_step;

#if ELEMENT == 2
static std::vector<float> single;
static std::vector<ELEMENT_TYPE> packed_bias;

static void pack_floats() {
  size_t weights = single.size() - packed_bias.size();
  pack_float(single.data(), packed.data(), tap_step, packed_bias.empty() ? nullptr : single.data() + weights, packed_bias.data());
}
#endif

int main(int argc, char** argv) {
  int blocks = atoi(argv[1]);
  tap_step = atoi(argv[2]);
  packed.assign(atoi(argv[3]), ~0u);
#if ELEMENT == 2
  if (argc > 4) {
    packed_bias.assign(atoi(argv[4]), 0xffff);
    for (float v; fread(&v, sizeof v, 1, stdin) == 1;) single.push_back(v);
    run_grid(blocks, PACK_THREADS, pack_floats);
    fwrite(packed.data(), sizeof(u32), packed.size(), stdout);
    fwrite(packed_bias.data(), sizeof(ELEMENT_TYPE), packed_bias.size(), stdout);
    return 0;
  }
#endif
  for (ELEMENT_TYPE v; fread(&v, sizeof v, 1, stdin) == 1;) weight.push_back(v);
  run_grid(blocks, PACK_THREADS, [] { pack(weight.data(), packed.data(), tap_step); });
  fwrite(packed.data(), sizeof(u32), packed.size(), stdout);
}
