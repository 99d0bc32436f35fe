// How `implicit` and `sweep` store: rows of M are pixels of a channels-last result, columns of N its channels.
// A kernel that includes this has COUT, the result's channels, STORE_COLUMNS, a block's, and WIDE_STORES, whether lanes store 16 bytes of float32 each.
#include "numbers.cuh"

// Columns that are stored together, each by a lane of four; of 16 lanes exchange some before.
#if WIDE_STORES || (ELEMENT == 2 && STORE_COLUMNS % 16 == 0 && COUT % 4 == 0)
#define UNIT 16
#else
#define UNIT 8
#endif
#define UNITS (STORE_COLUMNS / UNIT)

__device__ __forceinline__ u32 from_lane(u32 v, int apart) { return __shfl_xor_sync(0xffffffffu, v, apart); }

// 16 bits: sums of columns 8j + 2t and the next, of pixel g (`eight`: g + 8), by one conversion (by two ptxas serialised wgmma where COUT
// is odd, C7514).
#define SUM(j, k) sums[4 * (j) + 2 * eight + (k)]
#define PAIR(j) PAIR_BITS(SUM(j, 0), SUM(j, 1))

// Columns from UNIT * i on of a row's sums, of which `left` exist: a thread's are columns 8j + 2t and the next, of pixels g and g + 8 of the warp's 16.
template <int SUMS>  // of which the first are the columns'
__device__ __forceinline__ void store_unit(const float (&sums)[SUMS], int i, int eight, char* pixel, int left, bool there, int lane) {
#if UNIT == 16
  const int odd = lane & 1;
  // Lanes exchange with a neighbour, so that an even one stores four of columns 16i and on, an odd one of 16i + 8 and on.
  const int column = 16 * i + (lane & 2) * 2 + odd * 8;
  const bool one = there && (COUT % STORE_COLUMNS == 0 || column < left);
  u32 v[4];
#if ELEMENT == 4
#pragma unroll
  for (int k = 0; k < 2; k++) {
    u32 low = bits_of(SUM(2 * i, k)), high = bits_of(SUM(2 * i + 1, k));
    u32 other = from_lane(odd ? low : high, 1);
    v[k] = odd ? other : low, v[2 + k] = odd ? high : other;
  }
  store_global_128_if(pixel + column * ELEMENT, v, one);
#else
  u32 low = PAIR(2 * i), high = PAIR(2 * i + 1), other = from_lane(odd ? low : high, 1);
  v[0] = odd ? other : low, v[1] = odd ? high : other;
  store_global_64_if(pixel + column * ELEMENT, v, one);
#endif
#else
  const int column = 8 * i + (lane & 3) * 2;
  char* to = pixel + column * ELEMENT;
  bool one = there && (COUT % STORE_COLUMNS == 0 || column < left), two = there && column + 1 < left;
#if ELEMENT == 4
  u32 v[4] = {bits_of(SUM(i, 0)), bits_of(SUM(i, 1))};
#if COUT % 2 == 0
  store_global_64_if(to, v, one);
#else
  store_global_if(to, v[0], one);
  store_global_if(to + 4, v[1], two);
#endif
#else
  u32 pair = PAIR(i);
#if COUT % 2 == 0
  store_global_if(to, pair, one);
#else
  store_global_16_if(to, pair, one);
  store_global_16_if(to + 2, pair >> 16, two);
#endif
#endif
#endif
}
