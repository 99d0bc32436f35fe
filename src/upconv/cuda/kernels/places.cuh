// What `subpixel` and `pairs` share: rows of M are places of the input, columns of N have rows of 128 bytes of channels in shared memory.
#include "columns.cuh"

// The channel of a chunk at place `k`. Of float32 a lane (t = lane % 4) has the places t and t + 4 of a step: channels 2t and 2t + 1, so
// that those of four lanes are in other banks: rows are swizzled by the channel, or lie an odd number of 16 bytes apart.
template <int P>
__device__ __forceinline__ constexpr int channel_at(int k) { return P < FP16 ? k / 8 * 8 + k % 4 * 2 + k / 4 % 2 : k; }

// acc += fragments of steps `first` and behind x a row of weights, 128 bytes of K.
template <int P, int COLUMNS, int HALF, int MB>
__device__ __forceinline__ void multiply_half(float (&acc)[MB][COLUMNS / 2], u32 (&a)[HALF][MB][4], u32 weights, int first) {
#pragma unroll
  for (int i = 0; i < HALF * MB * 4; i++) opaque(a[i / (MB * 4)][i / 4 % MB][i % 4]);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < HALF; step++)
#pragma unroll
    for (int m = 0; m < MB; m++)
      WgmmaOf<COLUMNS>::template multiply<P, false, false, true>(acc[m], a[step][m], ROWS_OF<128> | (u64)((weights >> 4 | 1u << 16) + (first + step) * 2));
  wgmma_commit();
}

// acc += row `row` of a stage's weights x the fragments that K loads from `pixels` for it: a half of them while the other is multiplied.
// Behind the first row's first half nothing reads the stage before any more, whose barrier is `behind`.
template <class K, int MB, int SUMS>
__device__ __forceinline__ void multiply_row(float (&acc)[MB][SUMS], int row, u32 pixels, u32 weights, u32 behind, int lane) {
  constexpr int HALF = 2, COLUMNS = 2 * SUMS;
  u32 a[HALF][MB][4], b[HALF][MB][4];
  weights += row * (COLUMNS * 128);
  K::load_fragments(a, pixels, 2 * HALF * row);
  multiply_half<K::C::precision, COLUMNS>(acc, a, weights, 0);
  wgmma_wait<1>();
  if (row == 0) give_back(behind, lane);
  K::load_fragments(b, pixels, 2 * HALF * row + HALF);
  multiply_half<K::C::precision, COLUMNS>(acc, b, weights, HALF);
  wgmma_wait<1>();
}

// Sums of a kernel K begin with the bias; `first`: the thread's first column, of the layer's. (Added to what is stored, its 32 loads are
// all made first, and spill.)
template <class K, int MB, int SUMS>
__device__ __forceinline__ void begin_sums(float (&acc)[MB][SUMS], const typename K::Number::Type* bias, int first) {
#pragma unroll
  for (int j = 0; j < SUMS / 4; j++) {
    int of = first + 8 * j;
    float b = bias && (K::ALL_COLUMNS % (2 * SUMS) == 0 || of < K::ALL_COLUMNS) ? K::Number::value(bias[K::channel_of(of)]) : 0.f;
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i++) {
        acc[m][i] = b;
        opaque(acc[m][i]);
      }
  }
}
