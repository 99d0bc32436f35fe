// staged.cu whole, for one tile: argv are its integer arguments behind the pointers, whole units, ranges of
// tiles and blocks last; the tensors come by standard input as elements of T, and the result leaves so.
typedef unsigned u32;
typedef unsigned short u16;
#include "block.h"

alignas(16) static unsigned char memory[SHARED_BYTES + 64];
#include "kernel.h"
typedef K::T T;
typedef K::Acc Acc;
static const int CIN = K::CIN, COUT = K::COUT, COUT_G = K::COUT_G, TAPS = K::TAPS;

static std::vector<T> first, second, out;
static std::vector<Acc> partial;
static int sizes[9], whole_units, splits;
static i64 tiles;

static T* data(std::vector<T>& v) { return (T*)(((size_t)(v.data() + 16) + 15) / 16 * 16) + !whole_units; }
// Between guards that are NaN, at 16 bytes or, where units are not whole, an element behind.
static void read(std::vector<T>& to, size_t count) {
  to.resize(count + 64);
  memset((void*)to.data(), 0xff, to.size() * sizeof(T));
  T* at = data(to);
  if (fread(at, sizeof(T), count, stdin) != count) fail("too few elements");
}

#if GRAD_WEIGHT
static void weight_body() {
  grad_weight<Config>(data(first), data(second), partial.data(), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
              sizes[7], sizes[8], whole_units, (int)((tiles + splits - 1) / splits));
}
static void reduce_body() {
  reduce_staged<K>(partial.data(), out.data(), splits, (i64)COUT_G * TAPS, TAPS, 1);
}
#else
static void input_body() {
  grad_input<Config>(data(first), data(second), data(out), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
             sizes[7], sizes[8], whole_units);
}
#endif

int main(int, char** argv) {
  for (int i = 0; i < 9; i++) sizes[i] = atoi(argv[1 + i]);
  whole_units = atoi(argv[10]);
  splits = atoi(argv[11]);
  int blocks = atoi(argv[12]);
  tiles = (i64)sizes[0] * sizes[1] * sizes[7] * sizes[8];
  size_t in = (size_t)sizes[0] * sizes[1] * sizes[2] * sizes[3] * CIN, grad = (size_t)sizes[0] * sizes[4] * sizes[5] * sizes[6] * COUT;
  size_t weights = (size_t)CIN * COUT_G * TAPS;
  // Where nothing is written stays NaN: all ones in each type.
  memset(memory, 0xff, sizeof memory);
#if GRAD_WEIGHT
  read(first, in);
  read(second, grad);
  partial.resize(splits * weights);
  memset((void*)partial.data(), 0xff, partial.size() * sizeof(Acc));
  out.resize(weights);
  run_grid(blocks, THREADS, weight_body);
  run_grid((int)((weights + 255) / 256), 256, reduce_body);
#else
  read(first, grad);
  read(second, weights);
  out.resize(in + 64);
  memset((void*)out.data(), 0xff, out.size() * sizeof(T));
  run_grid(blocks, THREADS, input_body);
#endif
  for (unsigned char* end = memory + SHARED_BYTES; end < memory + sizeof memory; end++)
    if (*end != 0xff) fail("a store behind the block's shared memory");
#if GRAD_WEIGHT
  fwrite(out.data(), sizeof(T), weights, stdout);
#else
  for (T* at = out.data(); at < out.data() + out.size(); at++)
    for (size_t k = 0; (at < data(out) || at >= data(out) + in) && k < sizeof(T); k++)
      if (((unsigned char*)at)[k] != 0xff) fail("a store beside the result");
  fwrite(data(out), sizeof(T), in, stdout);
#endif
}
