// Depthwise transposed convolution in one or two dimensions, NCHW: the output's bytes are the limit. Weights are packed by
// `direct_pack` in the accumulator's type, [group][tap].
//
// A thread owns `cells` neighbouring cells (direct.cu) along W and iterates over `strip` cells along H with a window of SPAN_H + 1
// input rows in registers. The next row is loaded while this step's outputs are computed. Taps are in shared memory, so that
// there may be many (a bilinear kernel has 16 x 16 at a stride of 8). A block has threads of one channel of one image, so that a
// warp reads the same 16 bytes of them at once.
//
// Stores. Where a thread's outputs of a row are one vector, a warp stores neighbouring vectors. Else they go through shared
// memory, so that each store covers neighbours: in vectors, or, where rows do not begin at such, one by one. Stored
// as they are, or exchanged by pairs of lanes, they take more than twice as long.
//
// Constraints: an output plane has fewer than 2^31 elements; a channel of an image has (runs * strips) / threads blocks,
// rounded up.
#include "direct_weights.cuh"

template <class C_>
struct DirectWalk {
using C = C_;
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;
using Pack = typename Scalar::Pack;

static constexpr int VEC = Scalar::VEC, THREADS = C::threads, CELLS = C::cells;
static constexpr int KH = C::kernel_h, KW = C::kernel_w, SH = C::stride_h, SW = C::stride_w;
static constexpr int PH = C::padding_h, PW = C::padding_w, DH = C::dilation_h, DW = C::dilation_w;
static constexpr int MIN_H = C::min_h, MIN_W = C::min_w, SPAN_H = C::span_h;
static constexpr int RUN = CELLS * SW;                // neighbouring outputs of a row
static constexpr int COLS = CELLS + C::span_w;        // input columns of a window
static constexpr int TAP_ROW = (KW + VEC - 1) / VEC;  // vectors of a row of taps

static __device__ __forceinline__ Acc packed_weight(const T* src, i64 at, const WeightStrides& s) {
    const int tap = (int)(at % (KH * KW));
    return Scalar::value(src[at / (KH * KW) * s.in + tap / KW * s.h + tap % KW * s.w]);
}

// Outputs of a row in one vector: the largest power of two that divides RUN, at most 16 bytes.
static constexpr int RUN_UNIT = RUN & -RUN, UNIT_OF_16 = 16 / (int)sizeof(T);
static constexpr int WIDE = RUN_UNIT < UNIT_OF_16 ? RUN_UNIT : UNIT_OF_16, LINES = RUN / WIDE;
struct alignas(WIDE * sizeof(T)) Line {
    T v[WIDE];
};

struct Sizes { int h, w, oh, ow, runs, strips, strip; };

// A vector of taps, read where it stands: the compiler would keep those of all steps, and spill them.
static __device__ __forceinline__ Pack load_taps(u32 at) {
    Pack pack;
    load_shared_constants(pack.v, at);
    return pack;
}

using Window = Acc[SPAN_H + 1][COLS];

// Row t of the outputs of a step. `taps_at`: the channel's taps in shared memory.
static __device__ __forceinline__ void multiply(Acc (&sum)[RUN], const Window& window, u32 taps_at, int t) {
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
        if (floor_mod(kh * DH - PH, SH) != t) continue;
        const int r = (t + PH - kh * DH - MIN_H * SH) / SH;
        Pack pack;
#pragma unroll
        for (int kw = 0; kw < KW; ++kw) {
            if (kw % VEC == 0) pack = load_taps(taps_at + (kh * TAP_ROW + kw / VEC) * (u32)sizeof(Pack));
            const int u = floor_mod(kw * DW - PW, SW);
            const int shift = (u + PW - kw * DW - MIN_W * SW) / SW;
#pragma unroll
            for (int c = 0; c < CELLS; ++c)
                sum[c * SW + u] = multiply_add(pack.v[kw % VEC], window[r][c + shift], sum[c * SW + u]);
        }
    }
}

// Where vector `at` of a warp's is in its buffer: eight lanes that write meet eight different places of 128 bytes.
static __device__ __forceinline__ int swizzled(int at) { return LINES % 2 ? at : at ^ (at >> 3 & (LINES - 1 & 7)); }

// A warp's outputs of a row each, UNIT (WIDE or 1) elements a lane and store: element e of a thread goes to `place` + e, if that is before `left`.
template <int UNIT>
static __device__ __forceinline__ void store_turned(T* plane, const Line* buffer, int place, int left, int lane) {
    constexpr int UNITS = RUN / UNIT;  // of a thread
#pragma unroll
    for (int k = 0; k < UNITS; ++k) {
        const int at = k * 32 + lane, element = at % UNITS * UNIT;
        const int of = __shfl_sync(0xffffffffu, place, at / UNITS), room = __shfl_sync(0xffffffffu, left, at / UNITS);
        const Line& line = buffer[swizzled(at / UNITS * LINES + element / WIDE)];
        if (element >= room) continue;
        if (UNIT == WIDE) *reinterpret_cast<Line*>(plane + of + element) = line;
        else plane[of + element] = line.v[element % WIDE];
    }
}

// A channel's taps to shared memory.
static __device__ __forceinline__ void copy_taps(Pack* to, const Acc* weight, int channel) {
    for (int i = threadIdx.x; i < KH * KW; i += THREADS) to[i / KW * TAP_ROW + i % KW / VEC].v[i % KW % VEC] = weight[channel * (KH * KW) + i];
}

static __device__ __forceinline__ void run(const T* __restrict__ x, const Acc* __restrict__ weight, const T* __restrict__ bias,
                                           T* __restrict__ out, const Sizes& s) {
    __shared__ Pack taps[KH * TAP_ROW];
    __shared__ Line buffers[THREADS * LINES];
    const int parts = (s.runs * s.strips + THREADS - 1) / THREADS;
    const int part = blockIdx.x % (u32)parts;
    const i64 image = blockIdx.x / (u32)parts;  // and channel
    const int channel = (int)(image % C::groups);
    copy_taps(taps, weight, channel);
    const Acc start = bias ? Scalar::value(bias[channel]) : Acc(0);

    const int at = part * THREADS + threadIdx.x;
    const int cell_w = at % s.runs * CELLS, cell_h = at / s.runs * s.strip;
    const int cells_left = (s.oh + SH - 1) / SH - cell_h;
    const int count = at >= s.runs * s.strips ? 0 : cells_left < s.strip ? cells_left : s.strip;
    const int first_col = cell_w + MIN_W;
    const T* from = x + image * s.h * s.w + first_col;
    const auto fetch = [&](T(&to)[COLS], int row) {
        const bool inside = (u32)row < (u32)s.h;
#pragma unroll
        for (int c = 0; c < COLS; ++c) to[c] = inside && (u32)(first_col + c) < (u32)s.w ? from[(i64)row * s.w + c] : T(0);
    };

    Window window;
    T next[COLS];
#pragma unroll
    for (int r = 0; r < SPAN_H; ++r) {
        fetch(next, count ? cell_h + MIN_H + r : -1);
#pragma unroll
        for (int c = 0; c < COLS; ++c) window[r][c] = Scalar::value(next[c]);
    }
    fetch(next, count ? cell_h + MIN_H + SPAN_H : -1);
    __syncthreads();

    T* plane = out + image * s.oh * s.ow;
    const int ow = cell_w * SW;
    const bool aligned = (unsigned long long)out % sizeof(Line) == 0 && s.ow % WIDE == 0;
    const int lane = threadIdx.x % 32;
    Line* buffer = buffers + threadIdx.x / 32 * (32 * LINES);
    const u32 taps_at = shared_address(taps);
#pragma unroll 1
    for (int step = 0; step < s.strip; ++step) {
#pragma unroll
        for (int c = 0; c < COLS; ++c) window[SPAN_H][c] = Scalar::value(next[c]);
        fetch(next, step + 1 < count ? cell_h + MIN_H + SPAN_H + step + 1 : -1);
#pragma unroll
        for (int t = 0; t < SH; ++t) {
            Acc sum[RUN];
#pragma unroll
            for (int v = 0; v < RUN; ++v) sum[v] = start;
            multiply(sum, window, taps_at, t);
            const int oh = (cell_h + step) * SH + t;
            const int place = oh * s.ow + ow, left = step < count && oh < s.oh ? s.ow - ow : 0;
            Line lines[LINES];
#pragma unroll
            for (int v = 0; v < RUN; ++v) lines[v / WIDE].v[v % WIDE] = Scalar::stored(sum[v]);
            if (LINES == 1 && aligned) {
                if (left > 0) *reinterpret_cast<Line*>(plane + place) = lines[0];
                continue;
            }
            __syncwarp();
#pragma unroll
            for (int k = 0; k < LINES; ++k) buffer[swizzled(lane * LINES + k)] = lines[k];
            __syncwarp();
            if (aligned) store_turned<WIDE>(plane, buffer, place, left, lane);
            else store_turned<1>(plane, buffer, place, left, lane);
        }
#pragma unroll
        for (int r = 0; r < SPAN_H; ++r)
#pragma unroll
            for (int c = 0; c < COLS; ++c) window[r][c] = window[r + 1][c];
    }
}
};

template <class C>
__global__ void __launch_bounds__(C::threads, C::min_blocks)
    direct_walk(const typename DirectWalk<C>::T* __restrict__ x, const typename DirectWalk<C>::Acc* __restrict__ weight,
                     const typename DirectWalk<C>::T* __restrict__ bias, typename DirectWalk<C>::T* __restrict__ out, int h,
                     int w, int oh_size, int ow_size, int runs, int strips, int strip, int) {
    DirectWalk<C>::run(x, weight, bias, out, {h, w, oh_size, ow_size, runs, strips, strip});
}
