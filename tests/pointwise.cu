// A layer of one tap: y[n, o, p] = bias[o] + sum over c of x[n, c, p] * w[c, o], contiguous. A thread computes an output.
// `scalar.cuh` is ahead of it.

template <class C_>
struct Pointwise {
using C = C_;
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
};

template <class C, class T = typename Pointwise<C>::T>
__global__ void __launch_bounds__(C::threads)
pointwise(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ bias, T* __restrict__ y, i64 pixels, i64 total) {
    using Scalar = typename Pointwise<C>::Scalar;
    const i64 index = (i64)blockIdx.x * C::threads + threadIdx.x;
    if (index >= total) return;
    const i64 pixel = index % pixels, channel = index / pixels % C::cout, image = index / pixels / C::cout;
    typename Scalar::Acc sum = bias ? Scalar::value(bias[channel]) : 0;
    for (i64 c = 0; c < C::cin; ++c)
        sum = multiply_add(Scalar::value(x[(image * C::cin + c) * pixels + pixel]), Scalar::value(w[c * C::cout + channel]), sum);
    y[index] = Scalar::stored(sum);
}
