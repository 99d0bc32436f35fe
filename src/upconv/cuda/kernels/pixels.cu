// Pixels: forwards and gradients for the input on tensor cores, with positions of the result or the source as rows of M:
//
//   out[position][column] = sum over k of A[position][k] B[k][column]
//
// A is the source and B the packed weights; columns are channels of the result, times taps or phases. A mode (pixels_*.cuh, on top of
// pixels.cuh) says what a tile is, what a stage of the ring has, how A reaches the tensor cores, and where sums go. Its constants are C,
// which cuda/pixels/ computes; sizes of the input are arguments. wgmma alone, no groups.
#include "pixels_implicit.cuh"
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

// Of channels_last: weights come by a map too.
template <class M>
__global__ void __launch_bounds__(M::THREADS, 1)
pixels_last(char* __restrict__ y, const typename M::Type* __restrict__ bias, int out_n, int out_d, int out_h, int out_w,
            int box_n, int box_d, int box_h, int box_w, int tiles_d, int tiles_h, int tiles_w, int tiles, int turn,
            const __grid_constant__ typename M::Maps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const typename M::Sizes sizes = {out_n, out_d, out_h, out_w, box_n, box_d, box_h, box_w, tiles_d, tiles_h, tiles_w, tiles, turn};
  run<M>({nullptr, bias, y, sizes, maps, shared_address(memory)});
}

template <class M>
__global__ void __cluster_dims__(M::CLUSTER) __launch_bounds__(M::THREADS, 1)
pixels_last_clusters(char* __restrict__ y, const typename M::Type* __restrict__ bias, int out_n, int out_d, int out_h, int out_w,
                     int box_n, int box_d, int box_h, int box_w, int tiles_d, int tiles_h, int tiles_w, int tiles, int turn,
                     const __grid_constant__ typename M::Maps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const typename M::Sizes sizes = {out_n, out_d, out_h, out_w, box_n, box_d, box_h, box_w, tiles_d, tiles_h, tiles_w, tiles, turn};
  run<M>({nullptr, bias, y, sizes, maps, shared_address(memory)});
}
