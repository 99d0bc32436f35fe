// One warp of a CUDA kernel on the host: 32 fibers in turn, shared memory that checks bounds and alignment, global stores that
// check both and that no byte is written twice. The names are those of ptx.cuh.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __restrict__
#define __constant__

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct float2 { float x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
struct uint4 { u32 x, y, z, w; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

[[noreturn]] static void fail(const char* what) {
  printf("%s\n", what);
  exit(1);
}

// --- 32 lanes -----------------------------------------------------------------------------------------------------------

struct Lane {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 18);
  int waits = 0;
  bool done = false;
};
static Lane lanes[32];
static ucontext_t scheduler;
static int this_lane;
static void (*lane_body)(int);

static void lane_entry() {
  lane_body(this_lane);
  lanes[this_lane].done = true;
}
static void __syncwarp() {
  lanes[this_lane].waits++;
  swapcontext(&lanes[this_lane].context, &scheduler);
}
// Runs `body` for every lane; all lanes must meet at the same barriers.
static void run_warp(void (*body)(int)) {
  lane_body = body;
  for (Lane& lane : lanes) {
    lane.waits = 0;
    lane.done = false;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.data();
    lane.context.uc_stack.ss_size = lane.stack.size();
    lane.context.uc_link = &scheduler;
    makecontext(&lane.context, lane_entry, 0);
  }
  while (!lanes[0].done) {
    for (this_lane = 0; this_lane < 32; this_lane++) {
      if (lanes[this_lane].done) fail("a lane left while others wait");
      swapcontext(&scheduler, &lanes[this_lane].context);
    }
    for (const Lane& lane : lanes)
      if (lane.done != lanes[0].done || lane.waits != lanes[0].waits) fail("lanes part at a barrier");
  }
}

// --- memory -------------------------------------------------------------------------------------------------------------

static std::vector<unsigned char> shared_memory, global_memory, written;

static unsigned char* shared_at(u32 at, u32 bytes) {
  if (at % bytes) fail("a misaligned access to shared memory");
  if (at + bytes > shared_memory.size()) fail("an access outside of shared memory");
  return shared_memory.data() + at;
}
template <class T> static T load_shared(u32 at) {
  T v;
  memcpy(&v, shared_at(at, sizeof v), sizeof v);
  return v;
}
template <class T> static void store_shared(u32 at, T v) { memcpy(shared_at(at, sizeof v), &v, sizeof v); }
static void store_global(void* to, const void* from, size_t bytes, bool ok) {
  if (!ok) return;
  long long at = (unsigned char*)to - global_memory.data();
  if (at < 0 || at + bytes > global_memory.size()) fail("a store outside of memory");
  if ((u64)to % bytes) fail("a misaligned store");
  for (size_t i = 0; i < bytes; i++)
    if (written[at + i]++) fail("a byte stored twice");
  memcpy(to, from, bytes);
}

struct alignas(8) Pair { u32 v[2]; };
struct alignas(16) Quad { u32 v[4]; };
static u32 load_shared_u32(u32 a) { return load_shared<u32>(a); }
static u32 load_shared_u16(u32 a) { return load_shared<u16>(a); }
static void load_shared_64(u32 (&v)[4], u32 a) {
  Pair p = load_shared<Pair>(a);
  memcpy(v, &p, sizeof p);
}
static void load_shared_128(u32 (&v)[4], u32 a) {
  Quad q = load_shared<Quad>(a);
  memcpy(v, &q, sizeof q);
}
static void store_shared_u16(u32 a, u32 v) { store_shared<u16>(a, (u16)v); }
static void store_shared_u32(u32 a, u32 v) { store_shared<u32>(a, v); }
static void store_shared_f32(u32 a, float v) { store_shared<float>(a, v); }
static void store_shared_f32x2(u32 a, float v, float w) {
  Pair p;
  memcpy(p.v, &v, 4);
  memcpy(p.v + 1, &w, 4);
  store_shared<Pair>(a, p);
}
static void store_shared_128(u32 a, u32 v0, u32 v1, u32 v2, u32 v3) { store_shared<Quad>(a, {{v0, v1, v2, v3}}); }
static void store_global_16_if(void* to, u32 v, bool ok) {
  u16 low = (u16)v;
  store_global(to, &low, 2, ok);
}
static void store_global_if(void* to, u32 v, bool ok) { store_global(to, &v, 4, ok); }
static void store_global_64_if(void* to, const u32 (&v)[4], bool ok) { store_global(to, v, 8, ok); }
static void store_global_128_if(void* to, const u32 (&v)[4], bool ok) { store_global(to, v, 16, ok); }

// --- numbers ------------------------------------------------------------------------------------------------------------

static u32 __float_as_uint(float v) {
  u32 u;
  memcpy(&u, &v, 4);
  return u;
}
static float __uint_as_float(u32 u) {
  float v;
  memcpy(&v, &u, 4);
  return v;
}
static u32 half_bits(float v) {
  _Float16 h = (_Float16)v;
  u16 u;
  memcpy(&u, &h, 2);
  return u;
}
static float half_value(u32 bits) {
  u16 u = (u16)bits;
  _Float16 h;
  memcpy(&h, &u, 2);
  return (float)h;
}
static u32 bfloat_bits(float v) {  // finite
  u32 u = __float_as_uint(v);
  return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static float bfloat_value(u32 bits) { return __uint_as_float(bits << 16); }
