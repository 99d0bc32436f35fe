// A transposed convolution and its two gradients, a kernel each: right for every layer, fast for none. The other kernels compute the same.
//
//   y[n, o, p]  = bias[o] + sum over c, k of x[n, c, i] * w[c, o, k]         where along each axis
//   dx[n, c, i] =           sum over o, k of dy[n, o, p] * w[c, o, k]        p + padding = i * stride + k * dilation
//   dw[c, o, k] =           sum over n, i of x[n, c, i] * dy[n, o, p]        and c and o are channels of one group
//
// A thread computes an element of y or dx, a block one of dw. Each adds up in an order that is always the same. Sizes are arguments, and so
// are the elements between neighbours of each tensor: a precision has one binary for every layer in any layout.
#include "scalar.cuh"

struct PlainAxis {
    i64 in, out, kernel, stride, padding, dilation;
    i64 phase;  // taps from one that an output meets to the next, stride / gcd(stride, dilation)
};

struct PlainLayer {
    i64 batch, groups, cin, cout;  // channels of a group
    PlainAxis axis[3];             // D, H and W
    i64 x[5], w[5], y[5];          // elements between images, channels, slices, rows and columns; of w the images are input channels
};

template <class C>
struct Plain {
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;
static constexpr int THREADS = C::threads;

// Where an element is: its image, channel and place.
struct Element { i64 n, c, at[3]; };

// The element `index` of a tensor, whose neighbours are columns of a row, or with `last` channels of a pixel.
static __device__ __forceinline__ Element element(i64 index, bool last, i64 channels, i64 d, i64 h, i64 w) {
    Element e;
    if (last) {
        e.c = index % channels;
        index /= channels;
    }
    e.at[2] = index % w;
    index /= w;
    e.at[1] = index % h;
    index /= h;
    e.at[0] = index % d;
    index /= d;
    if (!last) {
        e.c = index % channels;
        index /= channels;
    }
    e.n = index;
    return e;
}

static __device__ __forceinline__ i64 offset(const i64 (&steps)[5], i64 n, i64 c, const i64 (&at)[3]) {
    return n * steps[0] + c * steps[1] + at[0] * steps[2] + at[1] * steps[3] + at[2] * steps[4];
}

// The taps that output `p` meets, and the input that it meets there, if there is one.
struct TapsOfOutput {
    static __device__ __forceinline__ i64 first(const PlainAxis& a, i64 p) {
        i64 k = 0;
        while (k < a.kernel && (p + a.padding - k * a.dilation) % a.stride != 0) ++k;
        return k;
    }
    static __device__ __forceinline__ i64 step(const PlainAxis& a) { return a.phase; }
    static __device__ __forceinline__ bool meets(const PlainAxis& a, i64 p, i64 k, i64& i) {
        const i64 reach = p + a.padding - k * a.dilation;
        i = reach / a.stride;
        return reach >= 0 && i < a.in;
    }
};

// The taps of input `i`, which are all, and the output that it meets there, if there is one.
struct TapsOfInput {
    static __device__ __forceinline__ i64 first(const PlainAxis&, i64) { return 0; }
    static __device__ __forceinline__ i64 step(const PlainAxis&) { return 1; }
    static __device__ __forceinline__ bool meets(const PlainAxis& a, i64 i, i64 k, i64& p) {
        p = i * a.stride + k * a.dilation - a.padding;
        return p >= 0 && p < a.out;
    }
};

// The sum over all taps and `channels` of what is read times the weight.
template <class Taps>
static __device__ __forceinline__ Acc sum_of_taps(const T* from, const i64 (&steps)[5], const T* w, i64 w_step, i64 channels,
                                                  const i64 (&at)[3], const PlainLayer& l) {
    const PlainAxis &d = l.axis[0], &h = l.axis[1], &columns = l.axis[2];
    const i64 first_h = Taps::first(h, at[1]), first_column = Taps::first(columns, at[2]);
    Acc sum = 0;
    i64 k[3], met[3];
    for (k[0] = Taps::first(d, at[0]); k[0] < d.kernel; k[0] += Taps::step(d)) {
        if (!Taps::meets(d, at[0], k[0], met[0])) continue;
        for (k[1] = first_h; k[1] < h.kernel; k[1] += Taps::step(h)) {
            if (!Taps::meets(h, at[1], k[1], met[1])) continue;
            for (k[2] = first_column; k[2] < columns.kernel; k[2] += Taps::step(columns)) {
                if (!Taps::meets(columns, at[2], k[2], met[2])) continue;
                const T *value = from + offset(steps, 0, 0, met), *weight = w + offset(l.w, 0, 0, k);
                for (i64 c = 0; c < channels; ++c)
                    sum = multiply_add(Scalar::value(value[c * steps[1]]), Scalar::value(weight[c * w_step]), sum);
            }
        }
    }
    return sum;
}

static __device__ __forceinline__ void forward(const T* x, const T* w, const T* bias, T* y, const PlainLayer& l) {
    const i64 channels = l.groups * l.cout, d = l.axis[0].out, h = l.axis[1].out, columns = l.axis[2].out;
    const i64 total = l.batch * channels * d * h * columns;
    for (i64 index = (i64)blockIdx.x * THREADS + threadIdx.x; index < total; index += (i64)gridDim.x * THREADS) {
        const Element e = element(index, l.y[1] == 1, channels, d, h, columns);
        const i64 first = e.c / l.cout * l.cin;  // input channel of the group
        const T *image = x + e.n * l.x[0] + first * l.x[1], *weights = w + first * l.w[0] + e.c % l.cout * l.w[1];
        Acc sum = sum_of_taps<TapsOfOutput>(image, l.x, weights, l.w[0], l.cin, e.at, l);
        if (bias) sum += Scalar::value(bias[e.c]);
        y[offset(l.y, e.n, e.c, e.at)] = Scalar::stored(sum);
    }
}

static __device__ __forceinline__ void grad_input(const T* dy, const T* w, T* dx, const PlainLayer& l) {
    const i64 channels = l.groups * l.cin, d = l.axis[0].in, h = l.axis[1].in, columns = l.axis[2].in;
    const i64 total = l.batch * channels * d * h * columns;
    for (i64 index = (i64)blockIdx.x * THREADS + threadIdx.x; index < total; index += (i64)gridDim.x * THREADS) {
        const Element e = element(index, l.x[1] == 1, channels, d, h, columns);
        const T* image = dy + e.n * l.y[0] + e.c / l.cin * l.cout * l.y[1];
        const Acc sum = sum_of_taps<TapsOfInput>(image, l.y, w + e.c * l.w[0], l.w[1], l.cout, e.at, l);
        dx[offset(l.x, e.n, e.c, e.at)] = Scalar::stored(sum);
    }
}

// A thread's share of an element of dw. The block's threads take as many neighbouring columns at once as there are, of several rows.
static __device__ __forceinline__ Acc sum_of_pixels(const T* x, const T* dy, const i64 (&tap)[3], const PlainLayer& l) {
    const PlainAxis &d = l.axis[0], &h = l.axis[1], &w = l.axis[2];
    int columns = 1;
    while (columns < w.in && columns < THREADS) columns *= 2;
    Acc sum = 0;
    for (i64 row = threadIdx.x / columns; row < l.batch * d.in * h.in; row += THREADS / columns) {
        const i64 n = row / h.in / d.in;
        i64 i[3] = {row / h.in % d.in, row % h.in}, p[3];
        if (!TapsOfInput::meets(d, i[0], tap[0], p[0]) || !TapsOfInput::meets(h, i[1], tap[1], p[1])) continue;
        for (i[2] = threadIdx.x % columns; i[2] < w.in; i[2] += columns) {
            if (!TapsOfInput::meets(w, i[2], tap[2], p[2])) continue;
            sum = multiply_add(Scalar::value(x[offset(l.x, n, 0, i)]), Scalar::value(dy[offset(l.y, n, 0, p)]), sum);
        }
    }
    return sum;
}

static __device__ __forceinline__ void grad_weight(const T* x, const T* dy, T* dw, const PlainLayer& l) {
    __shared__ Acc sums[THREADS];
    const i64 kd = l.axis[0].kernel, kh = l.axis[1].kernel, kw = l.axis[2].kernel;
    for (i64 index = blockIdx.x; index < l.groups * l.cin * l.cout * kd * kh * kw; index += gridDim.x) {
        const Element e = element(index, false, l.cout, kd, kh, kw);  // e.n is the input channel
        sums[threadIdx.x] = sum_of_pixels(x + e.n * l.x[1], dy + (e.n / l.cin * l.cout + e.c) * l.y[1], e.at, l);
        for (int half = THREADS / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        }
        if (threadIdx.x == 0) dw[offset(l.w, e.n, e.c, e.at)] = Scalar::stored(sums[0]);
        __syncthreads();
    }
}
};

// Two blocks a multiprocessor: asked for one, the compiler spills registers.
template <class C>
__global__ void __launch_bounds__(C::threads, 2)
    plain_forward(const typename Plain<C>::T* __restrict__ x, const typename Plain<C>::T* __restrict__ w,
                  const typename Plain<C>::T* __restrict__ bias, typename Plain<C>::T* __restrict__ y, PlainLayer layer) {
    Plain<C>::forward(x, w, bias, y, layer);
}

template <class C>
__global__ void __launch_bounds__(C::threads, 2)
    plain_grad_input(const typename Plain<C>::T* __restrict__ dy, const typename Plain<C>::T* __restrict__ w,
                     typename Plain<C>::T* __restrict__ dx, PlainLayer layer) {
    Plain<C>::grad_input(dy, w, dx, layer);
}

template <class C>
__global__ void __launch_bounds__(C::threads, 2)
    plain_grad_weight(const typename Plain<C>::T* __restrict__ x, const typename Plain<C>::T* __restrict__ dy,
                      typename Plain<C>::T* __restrict__ dw, PlainLayer layer) {
    Plain<C>::grad_weight(x, dy, dw, layer);
}
