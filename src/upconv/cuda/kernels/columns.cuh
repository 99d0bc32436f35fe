// What kernels share whose columns of N are output channels (sweep, subpixel, pairs, implicit, phases),
// or whose rows of M are (joined): packing what their operand of weights is, and counting in its descriptors.
// A kernel that includes this has ELEMENT, VEC, and STORE_BITS(v): a float32 as it is stored.
#define PACK_THREADS 256

#if ELEMENT == 2                                       // weights may be float32, rounded on their way
__device__ __forceinline__ u32 operand(u16 v) { return v; }
__device__ __forceinline__ u32 operand(float v) { return STORE_BITS(v); }
#else
__device__ __forceinline__ u32 operand(float v) { return to_tf32(v); }
#endif

// 16 bytes of neighbouring operands.
__device__ __forceinline__ void write_operands(char* to, const u32 (&v)[VEC]) {
#if ELEMENT == 4
  *(uint4*)to = make_uint4(v[0], v[1], v[2], v[3]);
#else
  *(uint4*)to = make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
#endif
}

#ifdef N_COLUMNS                                       // both operands by descriptors, channels side by side; or B_TURNED, of 16 bits: columns
#if PRECISION < 2
#define SIGNS ", 1, 1"
#elif B_TURNED
#define SIGNS ", 1, 1, 0, 1"
#else
#define SIGNS ", 1, 1, 0, 0"
#endif
template <int SUMS>
__device__ __forceinline__ void multiply(float (&d)[SUMS], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N_COLUMNS TYPES " {" N_REGISTERS "}, " N_A_AND_B ", 1" SIGNS ";\n" : N_SUMS : "l"(a), "l"(b));
}
#endif

// One thread: bytes that a barrier's phase waits for beside its arrival; and a copy that brings some, in whole 16
// bytes.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 to, const char* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// One thread: packed weights to shared memory, whose barrier expects their bytes, in pieces that a copy may have.
__device__ __forceinline__ void copy_packed(u32 to, const char* packed, int bytes, u32 barrier) {
  constexpr int PIECE = 16384;
#pragma unroll 1
  for (int at = 0; at < bytes; at += PIECE)
    copy_bulk(to + at, packed + at, bytes - at < PIECE ? bytes - at : PIECE, barrier);
}

__device__ __forceinline__ u32 uniform(u32 v) { return __shfl_sync(0xffffffffu, v, 0); }  // so that ptxas counts in uniform registers
