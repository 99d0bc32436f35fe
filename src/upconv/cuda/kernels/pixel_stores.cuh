// How `implicit` and `sweep` store: rows of M are pixels of a channels-last result, columns of N its channels.
#include "number.cuh"

// Of precision P and COUT channels; a block has COLUMNS. WIDE: lanes store 16 bytes of float32 each.
template <int P, int COUT, int COLUMNS, bool WIDE>
struct PixelStores {
  using Number = NumberOf<P>;
  static constexpr bool NARROW = Number::SIZE == 2;     // of 16 bits
  // Columns that are stored together, each by a lane of four; of 16 lanes exchange some before.
  static constexpr int UNIT = WIDE || (NARROW && COLUMNS % 16 == 0 && COUT % 4 == 0) ? 16 : 8;
  static constexpr int UNITS = COLUMNS / UNIT;

  // Columns from UNIT * i on of a row's sums, of which `left` exist: a thread's are columns 8j + 2t and the next, of pixels g and g + 8
  // (`eight`) of the warp's 16. More sums may follow those of the columns.
  template <int SUMS>
  static __device__ __forceinline__ void store(const float (&sums)[SUMS], int i, int eight, char* pixel, int left, bool there, int lane) {
    if constexpr (UNIT == 16) store_16(sums, i, eight, pixel, left, there, lane);
    else store_8(sums, i, eight, pixel, left, there, lane);
  }

private:
  static __device__ __forceinline__ bool is_there(int column, int left, bool there) { return there && (COUT % COLUMNS == 0 || column < left); }
  // Of 16 bits two by one conversion (by two ptxas serialised wgmma where COUT is odd, C7514).
  static __device__ __forceinline__ u32 pair(const float* sums) { return Number::pair(sums[0], sums[1]); }
  static __device__ __forceinline__ u32 from_neighbour(u32 v) { return __shfl_xor_sync(0xffffffffu, v, 1); }

  // Lanes exchange with a neighbour, so that an even one stores four of columns 16i and on, an odd one of 16i + 8 and on.
  template <int SUMS>
  static __device__ __forceinline__ void store_16(const float (&sums)[SUMS], int i, int eight, char* pixel, int left, bool there, int lane) {
    const int odd = lane & 1, column = 16 * i + (lane & 2) * 2 + odd * 8;
    const bool one = is_there(column, left, there);
    const float *low_sums = sums + 8 * i + 2 * eight, *high_sums = low_sums + 4;
    u32 v[4];
    if constexpr (NARROW) {
      u32 low = pair(low_sums), high = pair(high_sums), other = from_neighbour(odd ? low : high);
      v[0] = odd ? other : low, v[1] = odd ? high : other;
      store_global_64_if(pixel + column * 2, v, one);
    } else {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        u32 low = bits_of(low_sums[k]), high = bits_of(high_sums[k]);
        u32 other = from_neighbour(odd ? low : high);
        v[k] = odd ? other : low, v[2 + k] = odd ? high : other;
      }
      store_global_128_if(pixel + column * 4, v, one);
    }
  }

  template <int SUMS>
  static __device__ __forceinline__ void store_8(const float (&sums)[SUMS], int i, int eight, char* pixel, int left, bool there, int lane) {
    const int column = 8 * i + (lane & 3) * 2;
    const float* own = sums + 4 * i + 2 * eight;
    char* to = pixel + column * Number::SIZE;
    const bool one = is_there(column, left, there), two = there && column + 1 < left;
    if constexpr (NARROW) {
      u32 both = pair(own);
      if constexpr (COUT % 2 == 0) {
        store_global_if(to, both, one);
      } else {
        store_global_16_if(to, both, one);
        store_global_16_if(to + 2, both >> 16, two);
      }
    } else {
      const u32 v[4] = {bits_of(own[0]), bits_of(own[1])};
      if constexpr (COUT % 2 == 0) {
        store_global_64_if(to, v, one);
      } else {
        store_global_if(to, v[0], one);
        store_global_if(to + 4, v[1], two);
      }
    }
  }
};
