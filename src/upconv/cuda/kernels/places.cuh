// What `subpixel` and `pairs` share: rows of M are places of the input, columns of N have rows of 128 bytes of channels in shared memory.
// A kernel that includes this has COLUMNS, MB, K_STEPS, multiply(sums, fragment, descriptor), ALL_COLUMNS and CHANNEL_OF(column): whose
// output channel a column of the layer is.

// The channel of a chunk at place `k`. Of float32 a lane (t = lane % 4) has the places t and t + 4 of a step: channels 2t and 2t + 1, so
// that those of four lanes are in other banks: rows are swizzled by the channel, or lie an odd number of 16 bytes apart.
__device__ __forceinline__ constexpr int channel_at(int k) { return ELEMENT == 2 ? k : k / 8 * 8 + k % 4 * 2 + k / 4 % 2; }

// Rows of 128 bytes, swizzled; groups of 8 lie one behind the other.
#define UPPER ((u64)(1024 >> 4) << 32 | (u64)1 << 62)

#if !A_SHARED
#define HALF (K_STEPS / 2)
// acc += fragments of steps `first` and `first` + 1 x a chunk's weights.
__device__ __forceinline__ void multiply_half(float (&acc)[MB][COLUMNS / 2], u32 (&a)[HALF][MB][4], u32 weights, int first) {
#pragma unroll
  for (int i = 0; i < HALF * MB * 4; i++) opaque(a[i / (MB * 4)][i / 4 % MB][i % 4]);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < HALF; step++)
#pragma unroll
    for (int m = 0; m < MB; m++) multiply(acc[m], a[step][m], UPPER | (u64)((weights >> 4 | 1u << 16) + (first + step) * 2));
  wgmma_commit();
}
#endif

// Sums begin with the bias; `first`: the thread's first column, of the layer's. (Added to what is stored, its 32 loads are all made
// first, and spill.)
__device__ __forceinline__ void begin_sums(float (&acc)[MB][COLUMNS / 2], const ELEMENT_TYPE* bias, int first) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    int of = first + 8 * j;
    float b = bias && (ALL_COLUMNS % COLUMNS == 0 || of < ALL_COLUMNS) ? VALUE(bias[CHANNEL_OF(of)]) : 0.f;
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i++) {
        acc[m][i] = b;
        opaque(acc[m][i]);
      }
  }
}
