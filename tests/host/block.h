// A block of a CUDA kernel on the host: its threads are fibers that take turns at barriers, where all must meet.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)

struct Index { int x; };
static Index threadIdx, blockIdx;

[[noreturn]] static void fail(const char* what) {
  printf("%s\n", what);
  exit(1);
}

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  int waits = 0;
  bool done = false;
};
static std::vector<Thread> threads;
static ucontext_t scheduler;
static void (*thread_body)();

static void thread_entry() {
  thread_body();
  threads[threadIdx.x].done = true;
}
static void __syncthreads() {
  int self = threadIdx.x;
  threads[self].waits++;
  swapcontext(&threads[self].context, &scheduler);
}

// Runs `body` for every thread of every block. All leave behind the same last barrier.
static void run_grid(int blocks, int count, void (*body)()) {
  thread_body = body;
  threads.resize(count);
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    for (Thread& t : threads) {
      t.waits = 0;
      t.done = false;
      getcontext(&t.context);
      t.context.uc_stack.ss_sp = t.stack.data();
      t.context.uc_stack.ss_size = t.stack.size();
      t.context.uc_link = &scheduler;
      makecontext(&t.context, thread_entry, 0);
    }
    for (bool running = true; running;) {
      running = false;
      bool finished = false;
      int waits = -1;
      for (int i = 0; i < count; i++) {
        Thread& t = threads[i];
        if (t.done) continue;
        threadIdx.x = i;
        swapcontext(&scheduler, &t.context);
        if (t.done) {
          finished = true;
          continue;
        }
        running = true;
        if (waits >= 0 && t.waits != waits) fail("threads part at a barrier");
        waits = t.waits;
      }
      if (finished && running) fail("threads wait for those that have left");
    }
  }
}

// Every thread takes part, in the same order.
static std::vector<double> exchanged;
template <class V> static V __shfl_xor_sync(unsigned, V v, int mask) {
  exchanged.resize(threads.size());
  exchanged[threadIdx.x] = v;
  __syncthreads();
  V found = (V)exchanged[threadIdx.x ^ mask];
  __syncthreads();
  return found;
}

static float __uint_as_float(unsigned u) {
  float v;
  memcpy(&v, &u, 4);
  return v;
}
static float fmaf(float a, float b, float c) { return a * b + c; }
static double fma(double a, double b, double c) { return a * b + c; }
static unsigned short half_bits(float v) {
  _Float16 h = (_Float16)v;
  unsigned short u;
  memcpy(&u, &h, 2);
  return u;
}
static unsigned short bfloat_bits(float v) {  // finite
  unsigned u;
  memcpy(&u, &v, 4);
  return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
