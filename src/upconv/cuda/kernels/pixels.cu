// Pixels: forwards and gradients for the input on tensor cores, with positions of the result or the source as rows of M:
//
//   out[position][column] = sum over k of A[position][k] B[k][column]
//
// A is the source and B the packed weights; columns are channels of the result, times taps or phases. A mode (pixels_*.cuh, on top of
// pixels.cuh) says what a tile is, what a stage of the ring has, how A reaches the tensor cores, and where sums go. Its constants are C,
// which cuda/pixels/ computes; sizes of the input are arguments. wgmma alone, no groups.
#include "pixels_pairs.cuh"
#include "pixels_phases.cuh"
#include "pixels_subpixel.cuh"

// Three sizes, and a mode's own.
template <class M>
__global__ void __launch_bounds__(M::THREADS, 1)
pixels(const char* __restrict__ packed, const typename M::Type* __restrict__ bias, char* __restrict__ y, int d, int h, int w,
       int a, int b, int c, int tiles, const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const typename M::Sizes sizes = {d, h, w, a, b, c, tiles};
  run<M>({packed, bias, y, sizes, map, shared_address(memory)});
}
