// PTX in small wrappers, so that a kernel body reads as an algorithm. It includes no headers.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900       // a host's compiler reads the names, and no more
#define HAS_ASYNC_PROXY 1  // wgmma and bulk copies read shared memory through another proxy than ordinary stores
#else
#define HAS_ASYNC_PROXY 0
#endif

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Dependent launches (sm_90): a kernel launched so begins when all blocks of the one before let it; else these do nothing.
__device__ __forceinline__ void let_dependent_begin() {
#if HAS_ASYNC_PROXY
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
// And waits for what that one wrote.
__device__ __forceinline__ void wait_for_results() {
#if HAS_ASYNC_PROXY
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// --- mbarriers: `count` arrivals (and the announced bytes) complete a phase; waits name the phase by its parity -------

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(count));
}
// What was initialised is seen by copies and, in a cluster, by other blocks.
__device__ __forceinline__ void barriers_begun() {
#if HAS_ASYNC_PROXY
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}
// One thread arrives, and the phase waits for so many bytes of copies too.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// An arrival, once the thread's own `copy16`s have landed.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
  u32 done;
#if HAS_ASYNC_PROXY
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#else  // before sm_90 a test takes the state of a phase; parity tests came with PTX 7.1 for sm_80
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#endif
  return done;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_done(barrier, parity)) {}
}
template <int ID, int THREADS_OF>
__device__ __forceinline__ void named_sync() { asm volatile("bar.sync %0, %1;\n" ::"n"(ID), "n"(THREADS_OF) : "memory"); }
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// --- clusters: blocks that read each other's shared memory -------------------------------------------------------------

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900       // whose compiler refuses the attribute on any template
#define CLUSTER_DIMS(blocks)
#else
#define CLUSTER_DIMS(blocks) __cluster_dims__(blocks)
#endif
#if HAS_ASYNC_PROXY
// All threads of a cluster that have not returned; what they stored before is seen by all behind it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
// Where block `rank` has what this one has at `a`.
__device__ __forceinline__ u32 cluster_address(u32 a, int rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(a), "r"(rank));
  return there;
}
// 16 bytes from there.
__device__ __forceinline__ void load_cluster_128(float (&v)[4], u32 a, int rank) {
  const u32 there = cluster_address(a, rank);
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];\n" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(there) : "memory");
}
#endif

// --- copies into shared memory ----------------------------------------------------------------------------------------

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {  // the rest of the 16 becomes zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory"); }

// --- bulk copies (sm_90): one thread starts them; those to shared memory count at a barrier, those from it in groups ---

struct alignas(64) TensorMap { u64 opaque[16]; };  // a CUtensorMap; <cuda.h> does not compile under NVRTC

// Whole 16 bytes.
__device__ __forceinline__ void copy_bulk(u32 to, const char* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// A box of a tensor, whose first element has these coordinates, innermost first; zeros where the tensor has none.
__device__ __forceinline__ void load_box(u32 to, const TensorMap& map, int a, int b, int c, int d, int e, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];\n"
      ::"r"(to), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(barrier) : "memory");
}
// The same from shared memory to the tensor.
__device__ __forceinline__ void store_box(const TensorMap& map, u32 from, int a, int b, int c, int d, int e) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];\n"
      ::"l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(from) : "memory");
}
template <int BYTES>
__device__ __forceinline__ void store_bulk(void* to, u32 from) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Until all groups have left shared memory, or are in global memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }
// What the thread stored in shared memory, or anywhere, is seen by wgmma and bulk copies behind it.
__device__ __forceinline__ void fence_async_shared() {
#if HAS_ASYNC_PROXY
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;\n" ::: "memory"); }

// --- loads and stores -------------------------------------------------------------------------------------------------

// Four matrices of 8 rows of 16 bytes; each lane has the address of a row.
__device__ __forceinline__ void load_matrices(u32 (&v)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(a) : "memory");
}
// The same, each turned: a row of memory is a column of the registers.
__device__ __forceinline__ void load_matrices_turned(u32 (&v)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(a) : "memory");
}
// Two so.
__device__ __forceinline__ void load_two_matrices_turned(u32 (&v)[2], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n" : "=r"(v[0]), "=r"(v[1]) : "r"(a) : "memory");
}
// Four to shared memory, as `load_matrices` reads them (sm_90).
__device__ __forceinline__ void store_matrices(u32 a, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(a), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
// To shared memory, two matrices or four of 16-bit elements, each turned: a row of memory is a column of the registers.
template <int N>
__device__ __forceinline__ void store_matrices_turned(u32 a, const u32 (&v)[N]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (N == 4) asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(a), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
  else asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};\n" ::"r"(a), "r"(v[0]), "r"(v[1]) : "memory");
#else
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < N; i++) {
    u32 turned, row = __shfl_sync(0xffffffffu, a, i * 8 + lane / 4);
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(turned) : "r"(v[i]));
    asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(row + lane % 4 * 4), "r"(turned) : "memory");
  }
#endif
}
__device__ __forceinline__ float load_shared_f32(u32 a) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_shared_u32(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_shared_u32_if(u32 a, bool ok) {  // else 0
  u32 v = 0;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p ld.shared.u32 %0, [%1];\n}\n" : "+r"(v) : "r"(a), "r"((u32)ok) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_shared_u16(u32 a) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ void load_shared_128(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void load_shared_64(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];\n" : "=r"(v[0]), "=r"(v[1]) : "r"(a) : "memory");
}
__device__ __forceinline__ void store_shared_u16(u32 a, u32 v) { asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(a), "h"((u16)v) : "memory"); }
__device__ __forceinline__ void store_shared_u32(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(a), "r"(v) : "memory"); }
__device__ __forceinline__ void store_shared_128(u32 a, u32 v0, u32 v1, u32 v2, u32 v3) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"r"(a), "r"(v0), "r"(v1), "r"(v2), "r"(v3) : "memory");
}
__device__ __forceinline__ void store_shared_f32(u32 a, float v) {
  asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(a), "f"(v) : "memory");
}
__device__ __forceinline__ void store_shared_f32x2(u32 a, float v, float w) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};\n" ::"r"(a), "f"(v), "f"(w) : "memory");
}
// (Of bits: then sums that matrix instructions add to would be integers between them, and be moved behind their fence, C7519.)
__device__ __forceinline__ void store_shared_f32x4(u32 a, float v0, float v1, float v2, float v3) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"r"(a), "f"(v0), "f"(v1), "f"(v2), "f"(v3) : "memory");
}

// Stores under a predicate, never a branch: ptxas makes hundreds of branches of an epilogue.
__device__ __forceinline__ void store_global_if(void* to, u32 v, bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p st.global.u32 [%0], %1;\n}\n" ::"l"(to), "r"(v), "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_64_if(void* to, const u32 (&v)[4], bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n @p st.global.v2.u32 [%0], {%1,%2};\n}\n" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_128_if(void* to, const u32 (&v)[4], bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p st.global.v4.u32 [%0], {%1,%2,%3,%4};\n}\n" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_16_if(void* to, u32 v, bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p st.global.u16 [%0], %1;\n}\n" ::"l"(to), "h"((u16)v), "r"((u32)ok) : "memory");
}

// With what other blocks wrote before they released it.
__device__ __forceinline__ u32 load_acquire(const u32* from) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// --- the compiler and registers ---------------------------------------------------------------------------------------

// The compiler knows no more of a value than its type: what follows from it is computed behind this, and sums are set ahead of a
// fence of wgmma, not behind it, where ptxas would wait for every instruction (C7519).
__device__ __forceinline__ void opaque(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void opaque(u32& v) { asm volatile("" : "+r"(v)); }
// An address in global memory, which stays in registers: else the compiler makes it anew from a kernel's arguments at every use.
template <class T> __device__ __forceinline__ void opaque(T*& v) {
  asm volatile("" : "+l"(v));
  __builtin_assume(__isGlobal(v));
}
// Integers. Macros, since by references the compiler keeps variables in another order.
#define OPAQUE(a) asm volatile("" : "+r"(a))
#define OPAQUE_2(a, b) asm volatile("" : "+r"(a), "+r"(b))
#define OPAQUE_4(a, b, c, d) asm volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d))
// Loads ahead of it are under way before what follows. Else ptxas may put each of many loads ahead of its own use, and all wait.
__device__ __forceinline__ void loads_ahead() { __syncwarp(__activemask()); }
// A float's bits, unseen by the compiler, which else keeps sums as integers through loops and copies them at each end (C7514).
__device__ __forceinline__ u32 bits_of(float v) {
  u32 r;
  asm("mov.b32 %0, %1;\n" : "=r"(r) : "f"(v));
  return r;
}
// `blockIdx.x`, read again rather than kept.
__device__ __forceinline__ int block_index() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(block));
  return block;
}
// A warpgroup's registers for each thread (sm_90a): some are given back, or more taken.
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS)); }
template <int REGISTERS>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS)); }
// a * b + c by one instruction, where the compiler of (long long)a * b + c takes the product apart.
__device__ __forceinline__ u64 multiply_add_wide(int a, int b, u64 c) {
  u64 r;
  asm("mad.wide.s32 %0, %1, %2, %3;\n" : "=l"(r) : "r"(a), "r"(b), "l"(c));
  return r;
}

// --- numbers ----------------------------------------------------------------------------------------------------------

// Nearest TF32, ties to even, as cuDNN rounds: with it results agree with cuDNN to 3e-6, with rna to 5e-5.
__device__ __forceinline__ u32 to_tf32(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  u32 r;
  asm("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(v));
  return r;
#else  // add half of the last kept bit, less one where that bit is even; infinities and NaNs stay
  u32 b = __float_as_uint(v);
  return (b & 0x7f800000u) == 0x7f800000u ? b : (b + 0xfffu + ((b >> 13) & 1u)) & 0xffffe000u;
#endif
}
// By one instruction before sm_90, where nearest-even takes six: ties away from zero.
__device__ __forceinline__ u32 to_tf32_quick(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return to_tf32(v);
#else
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(v));
  return r;
#endif
}
// What TF32 leaves of a float, in TF32 itself; nothing of infinities and NaNs, whose difference to themselves is a NaN.
__device__ __forceinline__ u32 low_part(float v, u32 high) {
  return (high & 0x7f800000u) == 0x7f800000u ? 0u : to_tf32(v - __uint_as_float(high));
}
__device__ __forceinline__ u32 half_bits(float v) {
  u16 r;
  asm("cvt.rn.f16.f32 %0, %1;\n" : "=h"(r) : "f"(v));
  return r;
}
__device__ __forceinline__ u32 bfloat_bits(float v) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;\n" : "=h"(r) : "f"(v));
  return r;
#else
  const u32 b = __float_as_uint(v);
  return (b & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
#endif
}
// Two by one instruction, the first in the low half.
__device__ __forceinline__ u32 half_pair(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ u32 bfloat_pair(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float half_value(u32 bits) {
  float r;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(r) : "h"((u16)bits));
  return r;
}
__device__ __forceinline__ float bfloat_value(u32 bits) { return __uint_as_float(bits << 16); }

// --- matrix instructions ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory"); }
