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

// One thread: packed weights to shared memory, whose barrier expects their bytes, in pieces that a copy may have.
__device__ __forceinline__ void copy_packed(u32 to, const char* packed, int bytes, u32 barrier) {
  constexpr int PIECE = 16384;
#pragma unroll 1
  for (int at = 0; at < bytes; at += PIECE)
    copy_bulk(to + at, packed + at, bytes - at < PIECE ? bytes - at : PIECE, barrier);
}

__device__ __forceinline__ u32 uniform(u32 v) { return __shfl_sync(0xffffffffu, v, 0); }  // so that ptxas counts in uniform registers
