// One warp of a CUDA kernel on the host: 32 fibers in turn, shared memory that checks bounds and alignment, global stores that
// check both and that no byte is written twice. The names are those of ptx.cuh.
#include "fibers.h"

#define __constant__

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct float2 { float x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
struct uint4 { u32 x, y, z, w; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

// --- 32 lanes -----------------------------------------------------------------------------------------------------------

static void (*lane_body)(int);
static void __syncwarp() { wait_for_all(); }
// Runs `body` for every lane; all lanes must meet at the same barriers.
static void run_warp(void (*body)(int)) {
  lane_body = body;
  run_fibers(32, [] { lane_body(this_fiber); });
}

#define OPAQUE(v)
static void fence_async_shared() {}

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
static float load_shared_f32(u32 a) { return load_shared<float>(a); }
static u32 load_shared_u32(u32 a) { return load_shared<u32>(a); }
static u32 load_shared_u32_if(u32 a, bool ok) { return ok ? load_shared<u32>(a) : 0; }
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

static u32 to_tf32(float v) {
  u32 b = __float_as_uint(v);
  return (b + 0xfffu + (b >> 13 & 1)) & 0xffffe000u;
}
static u32 low_part(float v, u32 high) { return to_tf32(v - __uint_as_float(high)); }
