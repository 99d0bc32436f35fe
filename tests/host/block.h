// A block of a CUDA kernel on the host: its threads are fibers.
#include "fibers.h"

#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)

struct Index { int x; };
struct ThreadIndex {
  struct {
    operator int() const { return this_fiber; }
  } x;
};
#define HAS_THREADS
#define HAS_BLOCKS
static ThreadIndex threadIdx;
static Index blockIdx, gridDim;

static void __syncthreads() { wait_for_all(); }
// Runs `body` for every thread of every block.
static void run_grid(int blocks, int count, void (*body)()) {
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_fibers(count, body);
}

// Every thread takes part, in the same order.
static std::vector<double> exchanged;
template <class V> static V __shfl_xor_sync(unsigned, V v, int mask) {
  exchanged.resize(fibers.size());
  exchanged[this_fiber] = v;
  __syncthreads();
  V found = (V)exchanged[this_fiber ^ mask];
  __syncthreads();
  return found;
}

// The same of a warp's votes.
static unsigned __ballot_sync(unsigned, bool vote) {
  exchanged.resize(fibers.size());
  exchanged[this_fiber] = vote;
  __syncthreads();
  unsigned found = 0;
  for (int lane = 0; lane < 32; lane++) found |= (unsigned)(exchanged[this_fiber / 32 * 32 + lane] != 0) << lane;
  __syncthreads();
  return found;
}
static int __ffs(unsigned v) { return __builtin_ffs((int)v); }

#define OPAQUE(v)

static float fmaf(float a, float b, float c) { return a * b + c; }
static double fma(double a, double b, double c) { return a * b + c; }
