// A consumer's pixels: columns of N, and the matrix instructions that multiply fragments by them.
#include "gather_work.cuh"
#include "wgmma.cuh"

template <class C>
struct Columns {
using G = GatherWork<C>;
static constexpr int NB = G::NB;

struct Place { int n, d, h, w; };                       // of a subtile in a tile, in q

static __device__ __forceinline__ constexpr Place place_of(int subtile) {
  constexpr int W = G::W_SUBTILES, H = G::H_SUBTILES;
  return {subtile / (W * H * C::tile_d), subtile / (W * H) % C::tile_d,
          subtile / W % H * C::sub_h, subtile % W * C::sub_w};
}
static __device__ __forceinline__ constexpr int pixel_row_of(int subtile) {  // its first pixel's row in the tile, for a tap of shift 0
  Place p = place_of(subtile);
  return ((p.n * C::rows_d + p.d * C::row_step_d) * C::rows_h + p.h * C::row_step_h) * G::PITCH + p.w;
}
static constexpr int SUBTILES_AT_ONCE = C::wide ? 2 : 1;  // that a matrix instruction takes; groups of columns lie evenly over both
static constexpr int GROUP_ROWS = C::sub_h == 8 ? C::row_step_h * G::PITCH : 8;  // pixel rows from one group of eight columns to the next

// Pixel rows from the consumer's first subtile to another of its: known to the compiler where both halves of a tile are alike.
static __device__ __forceinline__ constexpr bool halves_alike() {
  for (int nb = 1; C::split == 0 && nb < NB; nb++)
    if (pixel_row_of(NB + nb) - pixel_row_of(NB) != pixel_row_of(nb) - pixel_row_of(0)) return false;
  return true;
}
static __device__ __forceinline__ int rows_to(int nb, int first) {
  constexpr bool alike = halves_alike();
  return alike ? pixel_row_of(nb) - pixel_row_of(0) : pixel_row_of(first + nb) - pixel_row_of(first);
}

// Where they lie in a tile. `start`: of the consumer's first subtile the lower half of its descriptor, the same in all threads.
// [mma.sync] `start`: the tile's address.
u32 start;
int first;                                              // its first subtile

__device__ __forceinline__ Columns(u32 tile, int first) : first(first) {
  // By a shuffle, so that ptxas counts in uniform registers.
  if constexpr (C::wgmma) start = __shfl_sync(0xffffffffu, (tile + pixel_row_of(first) * G::ROW_BYTES) >> 4 | 1u << 16, 0);
  else start = tile;
}
__device__ __forceinline__ Columns shifted(int rows) const {
  Columns found = *this;
  found.start += rows * (G::ROW_BYTES / 16);
  return found;
}

// acc[64 x 64 NB] += fragment x pixels; `shift` is the tap's, in pixel rows, `part` the pixels' part. FRESH: = instead of +=.
template <bool FRESH>
__device__ __forceinline__ void multiply(float (&acc)[NB][32], const u32 (&a)[4], int shift, int k_step, int part, int lane) const {
  if constexpr (C::wgmma) multiply_by_descriptor<!FRESH>(acc, a, shift, k_step, part);
  else multiply_by_matrices(acc, a, shift, k_step, part, lane);
}

template <bool ADDS>
__device__ __forceinline__ void multiply_by_descriptor(float (&acc)[NB][32], const u32 (&a)[4], int shift, int k_step, int part) const {
  const u64 upper = ((u64)(GROUP_ROWS * G::ROW_BYTES >> 4) << 32) | ((u64)(G::ROW_BYTES == 32 ? 3 : G::ROW_BYTES == 64 ? 2 : 1) << 62);
#pragma unroll
  for (int nb = 0; nb < NB; nb += SUBTILES_AT_ONCE) {
    u64 b = upper | (start + shift * (G::ROW_BYTES / 16) + (rows_to(nb, first) * G::ROW_BYTES + k_step * 32 + part * G::PART_BYTES) / 16);
    using Sums = float[SUBTILES_AT_ONCE * 32];
    WgmmaOf<SUBTILES_AT_ONCE * 64>::template multiply<C::precision, false, false, ADDS>((Sums&)acc[nb], a, b);
  }
}

__device__ __forceinline__ void multiply_by_matrices(float (&acc)[NB][32], const u32 (&a)[4], int shift, int k_step, int part, int lane) const {
  int matrix = lane >> 3;                               // ldmatrix: columns 8j.. of both halves of K, then columns 8j + 8..
#pragma unroll
  for (int nb = 0; nb < NB; nb++) {
    int row = pixel_row_of(first + nb) + shift;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      int p = row + (j + (matrix >> 1)) * GROUP_ROWS + (lane & 7);
      u32 b[4];
      load_matrices(b, start + part * G::PART_BYTES + G::unit_at(p, k_step * 2 + (matrix & 1)));
#pragma unroll
      for (int i = 0; i < 2; i++) mma_of<C::precision>(&acc[nb][4 * (j + i)], a, b[2 * i], b[2 * i + 1]);
    }
  }
}
};
