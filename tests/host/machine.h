// A GPU's blocks on the host, of which kernels run whole: every thread is a fiber, which waits at warps', blocks' and named barriers,
// mbarriers and the barriers of clusters. What hardware does beside the threads (copies, wgmma) is done at once or as late as a kernel
// lets it, as a launch says: a wait that is missing shows in one of both. The names that kernels know are CUDA's.
#pragma once
#include "standard.h"

#define __device__
#define __host__
#define __constant__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __cluster_dims__(...)

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }

namespace machine {

// --- fibers -------------------------------------------------------------------------------------------------------------

struct Sync { u32 arrived = 0, generation = 0; };

struct Warp {
  Sync sync;
  u32 alive = 0;
  u64 exchanged[2][32][4];  // what lanes show each other, by the parity of the barrier behind which it is read
  Sync of_some[32];         // some of the lanes alone, by the first of them
  u64 of_some_exchanged[2][32][4];
};

struct Block {
  int index = 0;
  unsigned char* bytes = nullptr;
  Sync all, named[16];
  u32 alive = 0;
  std::vector<Warp> warps;
};

struct Fiber {
  ucontext_t context;  // in which it begins
  jmp_buf at;          // where it goes on
  bool begun, done;
  char* stack = nullptr;
  Block* block;
  int thread;
  // What it waits for: a barrier's next generation, an mbarrier's phase, or nothing.
  const Sync* sync;
  u32 generation;
  const u64* barrier;
  u32 parity;
  long long spins;
  std::vector<std::function<void()>> products, stores;                // under way: matrix instructions; bulk copies out
  std::vector<size_t> product_groups;                                 // how many of them, of each group
  std::vector<std::function<void()>> copies;                          // cp.async
  std::vector<size_t> copy_groups;
  size_t uncommitted_products, uncommitted_copies;
};

extern std::vector<Block> blocks;                       // that run at once
extern Fiber* self;
extern Sync cluster_sync_state;
extern u32 cluster_alive;
extern bool late;                                       // whether what is asynchronous is done when it is waited for, not at once
extern u32 shared_bytes;
extern int grid, block_size;
extern const char* given;                               // a launch's arguments

[[noreturn]] void fail(const char* what);
void yield();
void release(Sync& s, u32 count);
void wait_for(const Sync& s, u32 generation);
void meet(Sync& s, u32 count);
static Warp& warp_of() { return self->block->warps[self->thread / 32]; }

}  // namespace machine

// --- what kernels know of threads ---------------------------------------------------------------------------------------

struct ThreadIndex { struct { operator u32() const { return machine::self->thread; } } x; };
struct BlockIndex { struct { operator u32() const { return machine::self->block->index; } } x; };
struct GridSize { struct { operator u32() const { return machine::grid; } } x; };
struct BlockSize { struct { operator u32() const { return machine::block_size; } } x; };
static ThreadIndex threadIdx;
static BlockIndex blockIdx;
static GridSize gridDim;
static BlockSize blockDim;

static void __threadfence() {}
static void __syncthreads() { machine::meet(machine::self->block->all, machine::self->block->alive); }
static void __syncwarp() {
  machine::Warp& w = machine::warp_of();
  machine::meet(w.sync, w.alive);
}

namespace machine {
// Shows the lanes of a mask `words`, and returns what they showed.
const u64 (&exchange(const u64 (&words)[4], u32 lanes = ~0u))[32][4];
template <class V> static V exchange_one(V v, int lane, u32 lanes) {
  u64 words[4] = {};
  static_assert(sizeof v <= 8, "a value of a register");
  memcpy(words, &v, sizeof v);
  memcpy(&v, exchange(words, lanes)[lane & 31], sizeof v);
  return v;
}
}  // namespace machine

// `width`: lanes of a group, whose own `lane` is meant.
template <class V> static V __shfl_sync(u32 lanes, V v, int lane, int width = 32) {
  return machine::exchange_one(v, (machine::self->thread & 31 & -width) | (lane & (width - 1)), lanes);
}
template <class V> static V __shfl_xor_sync(u32 lanes, V v, int mask) {
  return machine::exchange_one(v, (machine::self->thread ^ mask) & 31, lanes);
}
static u32 __byte_perm(u32 low, u32 high, u32 selector) {
  u64 bytes = (u64)high << 32 | low;
  u32 found = 0;
  for (int i = 0; i < 4; i++) found |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return found;
}
template <class V, class W> static V atomicAdd(V* to, W v) {
  V before = *to;
  *to += v;
  return before;
}
template <class V> static V __ldg(const V* from) { return *from; }
template <class V> static V __ldcg(const V* from) { return *from; }
template <class V> static V __ldcs(const V* from) { return *from; }
template <class To, class From> static To same_bits(From v) {
  static_assert(sizeof(To) == sizeof v, "of one size");
  To to;
  memcpy(&to, &v, sizeof v);
  return to;
}
static double __hiloint2double(int high, int low) { return same_bits<double>((u64)(u32)high << 32 | (u32)low); }
static u32 __float_as_uint(float v) { return same_bits<u32>(v); }
static float __uint_as_float(u32 u) { return same_bits<float>(u); }
static float fmaf(float a, float b, float c) { return a * b + c; }
static double fma(double a, double b, double c) { return a * b + c; }

namespace machine {

// --- shared memory ------------------------------------------------------------------------------------------------------

// A shared address: 1024 and on, as a block's dynamic memory does not begin at 0; of another block of the cluster with its rank above.
static const u32 SHARED_BEGIN = 1024;
static unsigned char* dynamic_memory() { return self->block->bytes; }

unsigned char* shared_at(u32 at, u32 bytes);
template <class T> static T load_shared(u32 at) {
  T v;
  memcpy(&v, shared_at(at, sizeof v), sizeof v);
  return v;
}
template <class T> static void store_shared(u32 at, T v) { memcpy(shared_at(at, sizeof v), &v, sizeof v); }

// --- launches -----------------------------------------------------------------------------------------------------------

// Calls a kernel with arguments that have a slot of 8 bytes each, or as many as a tensor map takes.
template <class T> static T argument(const char*& from) {
  T v;
  memcpy((void*)&v, from, sizeof v);
  from += (sizeof v + 7) / 8 * 8;
  return v;
}
template <class... A> struct Called {
  Called(void (*kernel)(A...), A... arguments) { kernel(arguments...); }
};
template <class... A> static void call(void (*kernel)(A...)) {
  const char* from = given;
  Called<A...>{kernel, argument<A>(from)...};           // in braces, so that arguments are taken in their order
}
// Runs a grid; `together`: blocks that run at once. With `end`, of its blocks those from `begin` on. Returns what went wrong, or null.
const char* launch(void (*with)(), int count, int threads, int shared, const char* arguments, int together, int seed, int begin = 0, int end = 0);
}  // namespace machine

static u32 shared_address(const void* p) { return (u32)((const unsigned char*)p - machine::dynamic_memory()) + machine::SHARED_BEGIN; }
