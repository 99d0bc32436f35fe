// gather's `pack`, for one tiling: argv are its blocks, the taps' step, and how many words it writes; weights come by standard
// input, words leave by standard output, those that nothing wrote as all ones. With a fourth argument it is `pack_float`: float32
// weights, and behind them so many biases, which leave behind the words.
#include "warp.h"
#include "block.h"

#include "kernel.h"  // the tiling's constants, and gather_pack.cuh
void let_dependent_begin() {}

template <class P>
struct Packing {
using Type = typename P::Type;
static inline std::vector<Type> weight, packed_bias;
static inline std::vector<float> single;
static inline std::vector<u32> packed;
static inline int tap_step;

static void pack_weights() { pack<P>(weight.data(), (char*)packed.data(), tap_step); }
static void pack_floats() {
  size_t weights = single.size() - packed_bias.size();
  pack_float<P>(single.data(), (char*)packed.data(), tap_step, packed_bias.empty() ? nullptr : single.data() + weights, packed_bias.data());
}
template <class V> static void read(std::vector<V>& values) {
  for (V v; fread(&v, sizeof v, 1, stdin) == 1;) values.push_back(v);
}
template <class V> static void write(const std::vector<V>& values) { fwrite(values.data(), sizeof(V), values.size(), stdout); }

static void run(int argc, char** argv) {
  int blocks = atoi(argv[1]);
  tap_step = atoi(argv[2]);
  packed.assign(atoi(argv[3]), ~0u);
  if constexpr (sizeof(Type) == 2) {
    if (argc > 4) {
      packed_bias.assign(atoi(argv[4]), 0xffff);
      read(single);
      run_grid(blocks, PACK_THREADS, pack_floats);
      write(packed);
      write(packed_bias);
      return;
    }
  }
  read(weight);
  run_grid(blocks, PACK_THREADS, pack_weights);
  write(packed);
}
};

int main(int argc, char** argv) { Packing<GatherPack<Config>>::run(argc, argv); }
