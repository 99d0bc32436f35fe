// bias.cu whole: argv are the blocks of `sum` and of `finish`, channels, ranges, by how many elements the tensor begins off 16
// bytes, and `sum`'s further arguments; the tensor comes by standard input as elements of T, and the result leaves so. In NCHW
// `sum_at_once` runs too, twice, and must say the same.
typedef unsigned u32;
typedef unsigned short u16;
#include "block.h"

struct uint4 { unsigned x, y, z, w; };
static uint4 __ldcs(const uint4* from) {
  if ((size_t)from % 16) fail("a unit off 16 bytes");
  return *from;
}
static double __hiloint2double(unsigned high, unsigned low) {
  unsigned long long bits = (unsigned long long)high << 32 | low;
  double v;
  memcpy(&v, &bits, 8);
  return v;
}
static float __ldcg(const float* from) { return *from; }
static double __ldcg(const double* from) { return *from; }
static void __threadfence() {}
static unsigned atomicAdd(unsigned* to, unsigned v) {
  unsigned before = *to;
  *to += v;
  return before;
}
#include "kernel.h"
typedef K::T T;
typedef K::Acc Acc;

static std::vector<T> memory, out;
static std::vector<Acc> partial;
static T* grad;
static int channels, ranges;
static i64 more[6];

static void sum_body() {
#if CHANNELS_LAST
  sum_last<Config>(grad, partial.data(), channels, more[0], more[1]);
#else
  sum<Config>(grad, partial.data(), channels, more[0], more[1], (int)more[2], (int)more[3], (int)more[4], (int)more[5]);
#endif
}
static void finish_body() { finish<Config>(partial.data(), out.data(), channels, ranges); }

#if !CHANNELS_LAST
static std::vector<T> at_once;
static std::vector<float> wide;
static std::vector<unsigned> counters;
static void at_once_body() {
  sum_at_once<Config>(grad, partial.data(), at_once.data(), counters.data(), 0, ranges, channels, more[0], more[1], (int)more[2], (int)more[3], (int)more[4], (int)more[5]);
}
static void wide_body() {
  sum_at_once<Config>(grad, partial.data(), wide.data(), counters.data(), 1, ranges, channels, more[0], more[1], (int)more[2], (int)more[3], (int)more[4], (int)more[5]);
}

static void check_at_once(int blocks) {
  counters.resize(channels);
  for (int turn = 0; turn < 2; turn++) {
    at_once.assign(channels, T());
    memset((void*)partial.data(), 0xff, partial.size() * sizeof(Acc));
    run_grid(blocks, THREADS, at_once_body);
    if (memcmp(at_once.data(), out.data(), channels * sizeof(T))) fail("one launch says otherwise");
    for (unsigned counter : counters)
      if (counter) fail("a counter is left");
  }
  if (sizeof(T) > 2) return;
  wide.assign(channels, 0.f);
  run_grid(blocks, THREADS, wide_body);
  for (int i = 0; i < channels; i++)
    if (K::Scalar::stored(wide[i]) != out[i]) fail("float32 sums of one launch say otherwise");
}
#endif

int main(int argc, char** argv) {
  int blocks = atoi(argv[1]), last_blocks = atoi(argv[2]), offset = atoi(argv[5]);
  channels = atoi(argv[3]);
  ranges = atoi(argv[4]);
  for (int i = 6; i < argc; i++) more[i - 6] = atoll(argv[i]);
  std::vector<T> given;
  for (T v; fread(&v, sizeof v, 1, stdin) == 1;) given.push_back(v);
  memory.resize(given.size() + 128);
  memset((void*)memory.data(), 0xff, memory.size() * sizeof(T));  // NaN beside the tensor, and where nothing is written
  grad = (T*)(((size_t)(memory.data() + 16) + 15) / 16 * 16) + offset;
  memcpy((void*)grad, given.data(), given.size() * sizeof(T));
  partial.resize((size_t)ranges * channels);
  memset((void*)partial.data(), 0xff, partial.size() * sizeof(Acc));
  out.resize(channels);
  run_grid(blocks, THREADS, sum_body);
  run_grid(last_blocks, THREADS, finish_body);
#if !CHANNELS_LAST
  check_at_once(blocks);
#endif
  fwrite(out.data(), sizeof(T), channels, stdout);
}
