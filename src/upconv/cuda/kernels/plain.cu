// A transposed convolution and its two gradients: right for every layer, fast for none. The definition that other kernels speed up.
//
//   y[n, o, p]  = bias[o] + sum over c, k of x[n, c, i] * w[c, o, k]         where along each axis
//   dx[n, c, i] =           sum over o, k of dy[n, o, p] * w[c, o, k]        p + padding = i * stride + k * dilation
//   dw[c, o, k] =           sum over n, i of x[n, c, i] * dy[n, o, p]        and c and o are channels of one group
//
// A thread computes one element of y or dx, a block one of dw. Each adds in an order of its own that is always the same. Sizes are
// arguments, and so are the elements between neighbours of each tensor: one binary of a precision serves every layer in any layout.
#include "scalar.cuh"

struct PlainAxis { i64 in, out, kernel, stride, padding, dilation; };

struct PlainLayer {
    i64 batch, groups, cin, cout;  // channels of a group
    PlainAxis axis[3];             // D, H and W
    i64 x[5], w[5], y[5];          // elements between images, channels, slices, rows and columns
};

template <class C_>
struct Plain {
using Scalar = ScalarOf<C_::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;
static constexpr int THREADS = C_::threads;

// A tensor's element, by image, channel and place; of the weight by input channel, output channel of the group and tap.
struct Element { i64 n, c, at[3]; };

static __device__ __forceinline__ i64 offset(const i64 (&steps)[5], i64 n, i64 c, const i64 (&at)[3]) {
    return n * steps[0] + c * steps[1] + at[0] * steps[2] + at[1] * steps[3] + at[2] * steps[4];
}

// Of the element `index` of a contiguous tensor of so many channels.
static __device__ __forceinline__ Element element(i64 index, i64 channels, i64 d, i64 h, i64 w) {
    Element e;
    e.at[2] = index % w;
    index /= w;
    e.at[1] = index % h;
    index /= h;
    e.at[0] = index % d;
    index /= d;
    e.c = index % channels;
    e.n = index / channels;
    return e;
}

// Whether output `p` meets an input at tap `k`, and at which.
static __device__ __forceinline__ bool input_of(const PlainAxis& a, i64 p, i64 k, i64& i) {
    const i64 reach = p + a.padding - k * a.dilation;
    i = reach / a.stride;
    return reach >= 0 && reach % a.stride == 0 && i < a.in;
}

// Whether input `i` meets an output at tap `k`, and at which.
static __device__ __forceinline__ bool output_of(const PlainAxis& a, i64 i, i64 k, i64& p) {
    p = i * a.stride + k * a.dilation - a.padding;
    return p >= 0 && p < a.out;
}

// Adds what `channels` of `from` and of the weight give at each tap; `MEETS` says which place of `from` a tap meets.
template <bool (*MEETS)(const PlainAxis&, i64, i64, i64&)>
static __device__ __forceinline__ Acc sum_of_taps(const T* from, i64 from_step, const i64 (&steps)[5], const T* w, i64 w_step,
                                                  i64 channels, const i64 (&at)[3], const PlainLayer& l) {
    Acc sum = 0;
    i64 k[3], met[3];
    for (k[0] = 0; k[0] < l.axis[0].kernel; ++k[0]) {
        if (!MEETS(l.axis[0], at[0], k[0], met[0])) continue;
        for (k[1] = 0; k[1] < l.axis[1].kernel; ++k[1]) {
            if (!MEETS(l.axis[1], at[1], k[1], met[1])) continue;
            for (k[2] = 0; k[2] < l.axis[2].kernel; ++k[2]) {
                if (!MEETS(l.axis[2], at[2], k[2], met[2])) continue;
                const T *value = from + offset(steps, 0, 0, met), *weight = w + offset(l.w, 0, 0, k);
                for (i64 c = 0; c < channels; ++c)
                    sum = multiply_add(Scalar::value(value[c * from_step]), Scalar::value(weight[c * w_step]), sum);
            }
        }
    }
    return sum;
}

static __device__ __forceinline__ void forward(const T* x, const T* w, const T* bias, T* y, const PlainLayer& l) {
    const i64 channels = l.groups * l.cout, d = l.axis[0].out, h = l.axis[1].out, columns = l.axis[2].out;
    const i64 total = l.batch * channels * d * h * columns;
    for (i64 index = (i64)blockIdx.x * THREADS + threadIdx.x; index < total; index += (i64)gridDim.x * THREADS) {
        const Element e = element(index, channels, d, h, columns);
        const i64 first = e.c / l.cout * l.cin;  // input channel of the group
        Acc sum = sum_of_taps<input_of>(x + e.n * l.x[0] + first * l.x[1], l.x[1], l.x, w + first * l.w[0] + e.c % l.cout * l.w[1],
                                        l.w[0], l.cin, e.at, l);
        if (bias) sum += Scalar::value(bias[e.c]);
        y[offset(l.y, e.n, e.c, e.at)] = Scalar::stored(sum);
    }
}

static __device__ __forceinline__ void grad_input(const T* dy, const T* w, T* dx, const PlainLayer& l) {
    const i64 channels = l.groups * l.cin, d = l.axis[0].in, h = l.axis[1].in, columns = l.axis[2].in;
    const i64 total = l.batch * channels * d * h * columns;
    for (i64 index = (i64)blockIdx.x * THREADS + threadIdx.x; index < total; index += (i64)gridDim.x * THREADS) {
        const Element e = element(index, channels, d, h, columns);
        const i64 first = e.c / l.cin * l.cout;  // output channel of the group
        const Acc sum = sum_of_taps<output_of>(dy + e.n * l.y[0] + first * l.y[1], l.y[1], l.y, w + e.c * l.w[0], l.w[1], l.cout, e.at, l);
        dx[offset(l.x, e.n, e.c, e.at)] = Scalar::stored(sum);
    }
}

// A thread's share of an element of dw: every `THREADS`th input of all images.
static __device__ __forceinline__ Acc sum_of_pixels(const T* x, const T* dy, const i64 (&tap)[3], const PlainLayer& l) {
    const i64 d = l.axis[0].in, h = l.axis[1].in, columns = l.axis[2].in;
    Acc sum = 0;
    for (i64 index = threadIdx.x; index < l.batch * d * h * columns; index += THREADS) {
        const Element e = element(index, 1, d, h, columns);
        i64 p[3];
        bool inside = true;
        for (int a = 0; a < 3; ++a) inside &= output_of(l.axis[a], e.at[a], tap[a], p[a]);
        if (inside) sum = multiply_add(Scalar::value(x[offset(l.x, e.n, 0, e.at)]), Scalar::value(dy[offset(l.y, e.n, 0, p)]), sum);
    }
    return sum;
}

static __device__ __forceinline__ void grad_weight(const T* x, const T* dy, T* dw, const PlainLayer& l) {
    __shared__ Acc sums[THREADS];
    const i64 total = l.groups * l.cin * l.cout * l.axis[0].kernel * l.axis[1].kernel * l.axis[2].kernel;
    for (i64 index = blockIdx.x; index < total; index += gridDim.x) {
        const Element e = element(index, l.cout, l.axis[0].kernel, l.axis[1].kernel, l.axis[2].kernel);
        const i64 out_channel = e.n / l.cin * l.cout + e.c;
        sums[threadIdx.x] = sum_of_pixels(x + e.n * l.x[1], dy + out_channel * l.y[1], e.at, l);
        for (int half = THREADS / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        }
        if (threadIdx.x == 0) dw[offset(l.w, e.n, e.c, e.at)] = Scalar::stored(sums[0]);
        __syncthreads();
    }
}
};

template <class C>
__global__ void __launch_bounds__(C::threads)
    plain_forward(const typename Plain<C>::T* __restrict__ x, const typename Plain<C>::T* __restrict__ w,
                  const typename Plain<C>::T* __restrict__ bias, typename Plain<C>::T* __restrict__ y, PlainLayer layer) {
    Plain<C>::forward(x, w, bias, y, layer);
}

template <class C>
__global__ void __launch_bounds__(C::threads)
    plain_grad_input(const typename Plain<C>::T* __restrict__ dy, const typename Plain<C>::T* __restrict__ w,
                     typename Plain<C>::T* __restrict__ dx, PlainLayer layer) {
    Plain<C>::grad_input(dy, w, dx, layer);
}

template <class C>
__global__ void __launch_bounds__(C::threads)
    plain_grad_weight(const typename Plain<C>::T* __restrict__ x, const typename Plain<C>::T* __restrict__ dy,
                      typename Plain<C>::T* __restrict__ dw, PlainLayer layer) {
    Plain<C>::grad_weight(x, dy, dw, layer);
}
