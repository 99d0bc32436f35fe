// A team of a CUDA kernel's threads on the host: fibers that take turns at barriers, where all must meet; and its numbers.
#pragma once
#include "standard.h"

#define __device__
#define __forceinline__ inline
#define __restrict__

[[noreturn]] static void fail(const char* what) {
  printf("%s\n", what);
  fflush(stdout);
  _Exit(1);  // no destructors while this runs on a fiber's stack
}

static const size_t stack_bytes = 1 << 18;
struct Fiber {
  ucontext_t context;  // in which it begins
  jmp_buf at;          // where it goes on: swapcontext asks the system for signals' mask, 5.3 s of a program's 6.2
  bool begun = false;
  char* stack = (char*)malloc(stack_bytes);  // not filled: of 256 threads that took 0.08 s of a program's 0.1
  int waits = 0;
  bool done = false;
};
static std::vector<Fiber> fibers;
static jmp_buf scheduler;
static int this_fiber;
static void (*fiber_body)();

static void fiber_entry() {
  fiber_body();
  fibers[this_fiber].done = true;
  _longjmp(scheduler, 1);
}
static void wait_for_all() {
  Fiber& self = fibers[this_fiber];
  self.waits++;
  if (!_setjmp(self.at)) _longjmp(scheduler, 1);
}
// Until it waits, or is done.
__attribute__((noinline)) static void go_on(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.at, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}
// Runs `body` in every fiber; all meet at the same barriers and leave behind the last.
static void run_fibers(int count, void (*body)()) {
  fiber_body = body;
  fibers.resize(count);
  for (Fiber& fiber : fibers) {
    fiber.waits = 0;
    fiber.begun = fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_entry, 0);
  }
  while (!fibers[0].done) {
    for (this_fiber = 0; this_fiber < count; this_fiber++) {
      if (fibers[this_fiber].done) fail("a thread left while others wait");
      go_on(fibers[this_fiber]);
    }
    for (const Fiber& fiber : fibers)
      if (fiber.done != fibers[0].done || fiber.waits != fibers[0].waits) fail("threads part at a barrier");
  }
}

// --- numbers ------------------------------------------------------------------------------------------------------------

static unsigned __float_as_uint(float v) {
  unsigned u;
  memcpy(&u, &v, 4);
  return u;
}
static float __uint_as_float(unsigned u) {
  float v;
  memcpy(&v, &u, 4);
  return v;
}
static unsigned half_bits(float v) {
  _Float16 h = (_Float16)v;
  unsigned short u;
  memcpy(&u, &h, 2);
  return u;
}
static float half_value(unsigned bits) {
  unsigned short u = (unsigned short)bits;
  _Float16 h;
  memcpy(&h, &u, 2);
  return (float)h;
}
static unsigned bfloat_bits(float v) {  // finite
  unsigned u = __float_as_uint(v);
  return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static float bfloat_value(unsigned bits) { return __uint_as_float(bits << 16); }
static unsigned half_pair(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
static unsigned bfloat_pair(float low, float high) { return bfloat_bits(low) | bfloat_bits(high) << 16; }
