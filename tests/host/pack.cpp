// gather.cu's `pack`, for one tiling: argv are its blocks, the taps' step, and how many words it writes; weights come by standard
// input, words leave by standard output, those that nothing wrote as all ones.
#include "warp.h"
#include "block.h"

#include "kernel.h"  // the tiling's macros and what packs, cut from gather.cu by test_host.py

static std::vector<ELEMENT_TYPE> weight;
static std::vector<u32> packed;
static int tap_step;

int main(int, char** argv) {
  int blocks = atoi(argv[1]);
  tap_step = atoi(argv[2]);
  packed.assign(atoi(argv[3]), ~0u);
  for (ELEMENT_TYPE v; fread(&v, sizeof v, 1, stdin) == 1;) weight.push_back(v);
  run_grid(blocks, PACK_THREADS, [] { pack(weight.data(), packed.data(), tap_step); });
  fwrite(packed.data(), sizeof(u32), packed.size(), stdout);
}
