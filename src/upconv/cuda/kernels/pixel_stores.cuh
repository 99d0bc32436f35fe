// How `pixels` and `implicit` store: rows of M are pixels of a channels-last result, columns of N its channels.
// A kernel that includes this has COUT, the result's channels, and COLUMNS, a block's.
#if PRECISION == 0
// Unseen by the compiler, which else keeps sums as integers through loops and copies them at each end (ptxas then serialises: C7514).
__device__ __forceinline__ u32 bits_of(float v) {
  u32 r;
  asm("mov.b32 %0, %1;\n" : "=r"(r) : "f"(v));
  return r;
}
#define STORE_BITS(v) bits_of(v)
#else
#define STORE_BITS(v) (PRECISION == 2 ? half_bits(v) : bfloat_bits(v))
#endif

#define WIDE_STORES (ELEMENT == 2 && COUT % 16 == 0 && COLUMNS % 16 == 0)
#define UNIT (WIDE_STORES ? 16 : 8)                     // columns that are stored together, each by a lane of four
#define UNITS (COLUMNS / UNIT)

// Columns from UNIT * i on of a row's sums, of which `left` exist: a thread's are columns 8j + 2t and the next, of pixels g and g + 8 of the warp's 16.
__device__ __forceinline__ void store_unit(const float (&sums)[COLUMNS / 2], int i, int eight, char* pixel, int left, bool there, int lane) {
#if WIDE_STORES
  // Lanes exchange with a neighbour, so that an even one stores 8 bytes of columns 16i and on, an odd one of 16i + 8 and on.
  int odd = lane & 1, column = (lane & 2) * 2 + odd * 8;
  u32 pair[2], v[4];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int at = 4 * (2 * i + j) + 2 * eight;
    pair[j] = STORE_BITS(sums[at]) | STORE_BITS(sums[at + 1]) << 16;
  }
  u32 other = __shfl_xor_sync(0xffffffffu, odd ? pair[0] : pair[1], 1);
  v[0] = odd ? other : pair[0], v[1] = odd ? pair[1] : other;
  store_global_64_if(pixel + (16 * i + column) * ELEMENT, v, there && (COUT % COLUMNS == 0 || 16 * i < left));
#else
  const int at = 4 * i + 2 * eight;
  int column = 8 * i + lane % 4 * 2;
  u32 v[4] = {STORE_BITS(sums[at]), STORE_BITS(sums[at + 1])};
  char* to = pixel + column * ELEMENT;
  bool one = there && (COUT % COLUMNS == 0 || column < left), two = there && column + 1 < left;
#if COUT % 2 == 0 && ELEMENT == 4
  store_global_64_if(to, v, one);
#elif COUT % 2 == 0
  store_global_if(to, v[0] | v[1] << 16, one);
#elif ELEMENT == 4
  store_global_if(to, v[0], one);
  store_global_if(to + 4, v[1], two);
#else
  store_global_16_if(to, v[0], one);
  store_global_16_if(to + 2, v[1], two);
#endif
#endif
}
