// Weights as the forwards on CUDA cores read them: packed in the accumulator's type.
#include "scalar.cuh"

// Of a weight (input channels, output channels of a group, depth, height, width), in elements.
struct WeightStrides { i64 in, out, d, h, w; };

// One thread per packed element: `K::packed_weight(src, at, strides)` is the one at `at`.
template <class K>
__global__ void direct_pack(const typename K::T* __restrict__ src, typename K::Acc* __restrict__ dst, i64 s0, i64 s1, i64 s2, i64 s3,
                            i64 s4, i64 total) {
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (i64)gridDim.x * blockDim.x)
        dst[at] = K::packed_weight(src, at, {s0, s1, s2, s3, s4});
}

// Rows of [kw][co] per (group, block of co_tile output channels, kd, ci, kh), padded to 16 bytes.
template <class C>
struct WeightRows {
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;

static constexpr int CO = C::co_tile;
static constexpr int COUT_BLOCKS = (C::cout_g + CO - 1) / CO;
static constexpr int WORDS = (C::kernel_w * CO + Scalar::VEC - 1) / Scalar::VEC * Scalar::VEC;  // of the weights of one (kd, ci, kh)

static __device__ __forceinline__ Acc packed_weight(const T* src, i64 at, const WeightStrides& s) {
    i64 rest = at / WORDS;
    const int in_row = (int)(at - rest * WORDS);
    const int kw = in_row / CO, co_in = in_row % CO;
    const int kh = (int)(rest % C::kernel_h);
    rest /= C::kernel_h;
    const int ci = (int)(rest % C::cin_g);
    rest /= C::cin_g;
    const int kd = (int)(rest % C::kernel_d);
    rest /= C::kernel_d;
    const int co = (int)(rest % COUT_BLOCKS) * CO + co_in;
    const i64 group = rest / COUT_BLOCKS;
    if (kw >= C::kernel_w || co >= C::cout_g) return 0;
    return Scalar::value(src[(group * C::cin_g + ci) * s.in + co * s.out + kd * s.d + kh * s.h + kw * s.w]);
}
};
