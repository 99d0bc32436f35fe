// The kernels that pack weights for `joined`, `sweep`, `subpixel`, `pairs`, `implicit` and
// `phases`, which define `pack_weights` before.
extern "C" __global__ void __launch_bounds__(PACK_THREADS) pack(const ELEMENT_TYPE* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  pack_weights(weight, packed, tap_step);
}

#if ELEMENT == 2
// The same of float32 weights, and of a bias, if there is one, as autocast leaves them.
extern "C" __global__ void __launch_bounds__(PACK_THREADS)
pack_float(const float* __restrict__ weight, char* __restrict__ packed, int tap_step, const float* __restrict__ bias, ELEMENT_TYPE* __restrict__ packed_bias) {
  if (bias && blockIdx.x == 0)
    for (int i = threadIdx.x; i < COUT; i += PACK_THREADS) packed_bias[i] = STORE_BITS(bias[i]);
  pack_weights(weight, packed, tap_step);
}
#endif
