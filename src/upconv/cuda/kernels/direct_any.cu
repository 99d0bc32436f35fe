// Transposed convolution on CUDA cores, one thread per output element: right for every geometry, fast for none.
//
//   out[n, co, o] = sum over ci of the group and taps of x[n, ci, (o + padding - tap * dilation) / stride] * w[ci, co, tap]
//
// where the division leaves no rest. A thread loops over the taps that its output meets. Tensors are dense, NCHW or channels_last; weights
// are packed by `direct_pack`.
#include "direct_weights.cuh"

template <class C_>
struct DirectAny {
using C = C_;
using Weights = WeightRows<C>;
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;

static constexpr bool LAST = C::channels_last;
static constexpr int CI = C::cin_g, CO_GROUP = C::cout_g;
static constexpr int IN_CHANNELS = C::groups * CI, OUT_CHANNELS = C::groups * CO_GROUP;
static constexpr i64 WEIGHT_CHANNEL = (i64)C::kernel_h * Weights::WORDS;

struct Sizes { i64 d, h, w, od, oh, ow; };
struct Place { i64 n, d, h, w; int channel; };

// Of the element `at` of the output.
static __device__ __forceinline__ Place place_of(i64 at, const Sizes& s) {
    Place p;
    if (LAST) {
        p.channel = (int)(at % OUT_CHANNELS);
        at /= OUT_CHANNELS;
    }
    p.w = at % s.ow;
    at /= s.ow;
    p.h = at % s.oh;
    at /= s.oh;
    p.d = at % s.od;
    at /= s.od;
    if (!LAST) {
        p.channel = (int)(at % OUT_CHANNELS);
        at /= OUT_CHANNELS;
    }
    p.n = at;
    return p;
}

static __device__ __forceinline__ Acc sum_of(const T* x, const Acc* weight, const Place& p, const Sizes& s) {
    const int group = p.channel / CO_GROUP, co = p.channel % CO_GROUP;
    const i64 pixel = LAST ? IN_CHANNELS : 1, plane = s.h * s.w * pixel, volume = LAST ? 1 : s.d * plane;
    const T* image = x + p.n * s.d * s.h * s.w * IN_CHANNELS + group * CI * volume;
    Acc sum = 0;
    for (int kd = 0; kd < C::kernel_d; ++kd) {
        const i64 reach_d = p.d + C::padding_d - (i64)kd * C::dilation_d;
        if (reach_d < 0 || reach_d % C::stride_d || reach_d / C::stride_d >= s.d) continue;
        for (int kh = 0; kh < C::kernel_h; ++kh) {
            const i64 reach_h = p.h + C::padding_h - (i64)kh * C::dilation_h;
            if (reach_h < 0 || reach_h % C::stride_h || reach_h / C::stride_h >= s.h) continue;
            const T* line = image + reach_d / C::stride_d * plane + reach_h / C::stride_h * s.w * pixel;
            for (int kw = 0; kw < C::kernel_w; ++kw) {
                const i64 reach_w = p.w + C::padding_w - (i64)kw * C::dilation_w;
                if (reach_w < 0 || reach_w % C::stride_w || reach_w / C::stride_w >= s.w) continue;
                const T* from = line + reach_w / C::stride_w * pixel;
                const Acc* taps = weight + (((i64)(group * CO_GROUP + co) * C::kernel_d + kd) * CI * C::kernel_h + kh) * Weights::WORDS + kw;
#pragma unroll 4
                for (int ci = 0; ci < CI; ++ci)
                    sum = multiply_add(taps[ci * WEIGHT_CHANNEL], Scalar::value(from[ci * volume]), sum);
            }
        }
    }
    return sum;
}

static __device__ __forceinline__ void run(const T* __restrict__ x, const Acc* __restrict__ weight, const T* __restrict__ bias,
                                           T* __restrict__ out, const Sizes& s, i64 total) {
    for (i64 at = (i64)blockIdx.x * C::threads + threadIdx.x; at < total; at += (i64)gridDim.x * C::threads) {
        const Place p = place_of(at, s);
        Acc sum = sum_of(x, weight, p, s);
        if (bias) sum += Scalar::value(bias[p.channel]);
        out[at] = Scalar::stored(sum);
    }
}
};

template <class C>
__global__ void __launch_bounds__(C::threads)
    direct_any(const typename DirectAny<C>::T* __restrict__ x, const typename DirectAny<C>::Acc* __restrict__ weight,
               const typename DirectAny<C>::T* __restrict__ bias, typename DirectAny<C>::T* __restrict__ out, i64 d, i64 h, i64 w,
               i64 od_size, i64 oh_size, i64 ow_size, i64 total) {
    DirectAny<C>::run(x, weight, bias, out, {d, h, w, od_size, oh_size, ow_size}, total);
}
