// ptx.cuh for the host (machine.h): every function of its that kernels call, by the same name.
#pragma once
#include "machine.h"

#define __CUDA_ARCH__ 900

#define CLUSTER_DIMS(blocks)

static void let_dependent_begin() {}
static void wait_for_results() {}

// --- mbarriers: bit 0 is the phase's parity, then 15 bits of arrivals that it has, 15 of those still missing, 32 of bytes -----

namespace machine {
static u64& mbarrier(u32 at) { return *(u64*)shared_at(at, 8); }
void advance(u32 at, int arrivals, int bytes);
}  // namespace machine

static void barrier_init(u32 barrier, int count) { machine::mbarrier(barrier) = (u64)count << 1 | (u64)count << 16; }
static void barriers_begun() {}
static void barrier_arrive(u32 barrier) { machine::advance(barrier, 1, 0); }
static void expect_bytes(u32 barrier, u32 bytes) {
  machine::advance(barrier, 0, bytes);
  machine::advance(barrier, 1, 0);
}
void barrier_wait(u32 barrier, u32 parity);
static void named_sync(int id, int threads) { machine::meet(machine::self->block->named[id], threads); }
template <int ID, int THREADS_OF> static void named_sync() { named_sync(ID, THREADS_OF); }
static void named_arrive(int id, int threads) {
  machine::Sync& s = machine::self->block->named[id];
  s.arrived++;
  machine::release(s, threads);
}

// --- clusters -----------------------------------------------------------------------------------------------------------

static void cluster_sync() { machine::meet(machine::cluster_sync_state, machine::cluster_alive); }
static u32 cluster_address(u32 a, int rank) { return (a & 0xffffff) | (u32)(rank + 1) << 24; }
static void load_cluster_128(float (&v)[4], u32 a, int rank) { memcpy(v, machine::shared_at(cluster_address(a, rank), 16), 16); }

// --- copies into shared memory ------------------------------------------------------------------------------------------

namespace machine {
void finish_copies(Fiber& f, size_t groups_left);
}  // namespace machine

void copy16(u32 to, const void* from, int bytes = 16);
static void copy_commit() {
  machine::self->copy_groups.push_back(machine::self->uncommitted_copies);
  machine::self->uncommitted_copies = 0;
}
template <int N> static void copy_wait() { machine::finish_copies(*machine::self, N); }
void arrive_when_copied(u32 barrier);

// --- bulk copies --------------------------------------------------------------------------------------------------------

// As tests/emulator.py encodes a map.
struct alignas(64) TensorMap {
  u64 address, strides[5];  // bytes; of the first the element's size
  u32 dims[5];
  u16 box[5], steps[5];     // what a box traverses, and from one element that is copied to the next
  u16 span, rounded;        // bytes of the swizzle; whether float32 becomes TF32
  u32 unused[2];
};
static_assert(sizeof(TensorMap) == 128, "a CUtensorMap");
static u32 to_tf32(float v);

namespace machine {
static u32 swizzled(u32 at, u32 span) { return span ? at ^ (at >> 7 & (span / 16 - 1)) << 4 : at; }
void store_words(void* to, u32 from, int bytes);          // a bulk copy out: now, or when it is waited for
}  // namespace machine

void copy_bulk(u32 to, const char* from, u32 bytes, u32 barrier);
void load_box(u32 to, const TensorMap& map, int a, int b, int c, int d, int e, u32 barrier);
void store_box(const TensorMap& map, u32 from, int a, int b, int c, int d, int e);
template <int BYTES> static void store_bulk(void* to, u32 from) { machine::store_words(to, from, BYTES); }
static void bulk_commit() {}
void bulk_wait();
static void bulk_wait_read() { bulk_wait(); }
static void fence_async_shared() {}
static void fence_async() {}

// --- loads and stores ---------------------------------------------------------------------------------------------------

// A lane's address of each row, and the rows' words.
static void load_matrices(u32 (&v)[4], u32 a) {
  const auto& shown = machine::exchange({a});
  const int lane = machine::self->thread % 32;
  for (int i = 0; i < 4; i++) v[i] = *(u32*)(machine::shared_at((u32)shown[i * 8 + lane / 4][0], 16) + lane % 4 * 4);
}
namespace machine {
template <int N> static void load_turned(u32 (&v)[N], u32 a) {
  const auto& shown = exchange({a});
  const int lane = self->thread % 32;
  for (int i = 0; i < N; i++) {
    v[i] = 0;
    for (int j = 0; j < 2; j++) v[i] |= (u32) * (u16*)(shared_at((u32)shown[i * 8 + lane % 4 * 2 + j][0], 16) + lane / 4 * 2) << 16 * j;
  }
}
}  // namespace machine
static void load_matrices_turned(u32 (&v)[4], u32 a) { machine::load_turned(v, a); }
static void load_two_matrices_turned(u32 (&v)[2], u32 a) { machine::load_turned(v, a); }
static void store_matrices(u32 a, const u32 (&v)[4]) {
  const auto& shown = machine::exchange({a});
  const int lane = machine::self->thread % 32;
  for (int i = 0; i < 4; i++) *(u32*)(machine::shared_at((u32)shown[i * 8 + lane / 4][0], 16) + lane % 4 * 4) = v[i];
}
template <int N> static void store_matrices_turned(u32 a, const u32 (&v)[N]) {
  const auto& shown = machine::exchange({a});
  const int lane = machine::self->thread % 32;
  for (int i = 0; i < N; i++)
    for (int j = 0; j < 2; j++) *(u16*)(machine::shared_at((u32)shown[i * 8 + lane % 4 * 2 + j][0], 16) + lane / 4 * 2) = (u16)(v[i] >> 16 * j);
}
static float load_shared_f32(u32 a) { return machine::load_shared<float>(a); }
static u32 load_shared_u32(u32 a) { return machine::load_shared<u32>(a); }
static u32 load_shared_u32_if(u32 a, bool ok) { return ok ? machine::load_shared<u32>(a) : 0; }
static u32 load_shared_u16(u32 a) { return machine::load_shared<u16>(a); }
static void load_shared_128(u32 (&v)[4], u32 a) { memcpy(v, machine::shared_at(a, 16), 16); }
static void load_shared_64(u32 (&v)[4], u32 a) { memcpy(v, machine::shared_at(a, 8), 8); }
static void store_shared_u16(u32 a, u32 v) { machine::store_shared<u16>(a, (u16)v); }
static void store_shared_u32(u32 a, u32 v) { machine::store_shared<u32>(a, v); }
static void store_shared_128(u32 a, u32 v0, u32 v1, u32 v2, u32 v3) { machine::store_shared<uint4>(a, {v0, v1, v2, v3}); }
static void store_shared_f32(u32 a, float v) { machine::store_shared<float>(a, v); }
static void store_shared_f32x2(u32 a, float v, float w) { machine::store_shared<float2>(a, {v, w}); }
static void store_shared_f32x4(u32 a, float v0, float v1, float v2, float v3) { machine::store_shared<float4>(a, {v0, v1, v2, v3}); }

namespace machine {
void store_global(void* to, const void* from, size_t bytes, bool ok);
}  // namespace machine
static void store_global_if(void* to, u32 v, bool ok) { machine::store_global(to, &v, 4, ok); }
static void store_global_64_if(void* to, const u32 (&v)[4], bool ok) { machine::store_global(to, v, 8, ok); }
static void store_global_128_if(void* to, const u32 (&v)[4], bool ok) { machine::store_global(to, v, 16, ok); }
static void store_global_16_if(void* to, u32 v, bool ok) { machine::store_global(to, &v, 2, ok); }
u32 load_acquire(const u32* from);

// --- the compiler and registers -----------------------------------------------------------------------------------------

template <class T> static void opaque(T&) {}
static void loads_ahead() {}
#define OPAQUE(a)
#define OPAQUE_2(a, b)
#define OPAQUE_4(a, b, c, d)
static u32 bits_of(float v) { return __float_as_uint(v); }
static int block_index() { return machine::self->block->index; }
template <int REGISTERS> static void fewer_registers() {}
template <int REGISTERS> static void more_registers() {}
static u64 multiply_add_wide(int a, int b, u64 c) { return (u64)((long long)a * b) + c; }

// --- numbers ------------------------------------------------------------------------------------------------------------

static u32 to_tf32(float v) {
  const u32 b = __float_as_uint(v);
  return (b & 0x7f800000u) == 0x7f800000u ? b : (b + 0xfffu + (b >> 13 & 1)) & 0xffffe000u;
}
static u32 to_tf32_quick(float v) { return to_tf32(v); }
static u32 low_part(float v, u32 high) { return (high & 0x7f800000u) == 0x7f800000u ? 0u : to_tf32(v - __uint_as_float(high)); }
static u32 half_bits(float v) { return same_bits<u16>((_Float16)v); }
static float half_value(u32 bits) { return (float)same_bits<_Float16>((u16)bits); }
static u32 bfloat_bits(float v) {
  const u32 u = __float_as_uint(v);
  return v != v ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static float bfloat_value(u32 bits) { return __uint_as_float(bits << 16); }
static u32 half_pair(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
static u32 bfloat_pair(float low, float high) { return bfloat_bits(low) | bfloat_bits(high) << 16; }

// --- matrix instructions ------------------------------------------------------------------------------------------------

namespace machine {
// A thread's part of a wgmma: by what descriptors say of A, or by rows that it holds.
struct Product { float* d; int columns; bool adds; u64 a, b; float rows[2][16]; };
void later(const Product& product, void (*multiply)(const Product&));  // now, or when it is waited for
void finish_products(size_t groups_left);
}  // namespace machine

static void wgmma_fence() {}
void wgmma_commit();
// A warp's lanes go on together, as of all instructions that are `.sync.aligned`: what one gives back none reads any more.
template <int N> static void wgmma_wait() {
  machine::finish_products(N);
  __syncwarp();
}
