// Transposed convolution on CUDA cores, for few channels per group and for float64, where bytes or FMAs are the limit.
//
// Layout. Input (BATCH, GROUPS * CI, D, H, W) and output (BATCH, GROUPS * CO_GROUP, OD, OH, OW), both dense, NCHW or
// channels_last (LAST). Ranks below 3 have sizes of 1 in front. Weights are packed by `direct_pack` into rows of
// [kw][co] per (group, block of CO output channels, kd, ci, kh), in the accumulator's type, padded to 16 bytes.
//
// Cells. Outputs j * S ... j * S + S - 1 of a dimension are cell j. Output t of cell j and tap k meet where
// (t + P - k * DIL) is a multiple of S, at input i = j + (t + P - k * DIL) / S. So the outputs of a cell hold all phases,
// start at a multiple of S whatever the padding, and along W all of them belong to one thread.
//
// Steps. A block makes BLOCK_H x BLOCK_W cells of one output depth, for SLOTS groups and CO channels of each. A thread
// has CELLS neighbouring cells along W and of these either one output row (PHASES_H 1, one phase along H) or all SH
// (PHASES_H SH: each input row is then read once for all phases, and every tap is unrolled). For every depth tap of
// the block's phase and every chunk of CHUNK input channels: the block copies the input tile with its halo (zeros
// outside) and the chunk's weights to shared memory, while the threads walk channels and taps of the stage before.
// A row in shared memory has one word between runs of CELLS, and rows are padded so that the threads of a warp, over all
// its rows, have one odd stride: reads are free of bank conflicts.
// The sums leave through shared memory, so that stores cover whole lines; directly when a thread's are one vector.
//
// Constraints: the tile and the unrolled taps must fit (the planner checks).

#include "direct_copies.cuh"
#include "direct_stores.cuh"
#include "direct_weights.cuh"

template <class C_>
struct Direct {
using C = C_;
using Weights = WeightRows<C>;
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;
using Pack = typename Scalar::Pack;

static constexpr int VEC = Scalar::VEC, THREADS = C::threads, GROUPS = C::groups, CI = C::cin_g, CO_GROUP = C::cout_g;
static constexpr int CO = C::co_tile, CELLS = C::cells, SLOTS = C::slots, CHUNK = C::chunk;
static constexpr int KD = C::kernel_d, KH = C::kernel_h, KW = C::kernel_w, SD = C::stride_d, SH = C::stride_h, SW = C::stride_w;
static constexpr int PD = C::padding_d, PH = C::padding_h, PW = C::padding_w, DD = C::dilation_d, DH = C::dilation_h, DW = C::dilation_w;
static constexpr int COUT_BLOCKS = Weights::COUT_BLOCKS, WEIGHT_ROW = Weights::WORDS;
static constexpr int PHASES_H = C::phases_h;
static constexpr bool ALL_H = PHASES_H > 1;
static constexpr int ROWS = C::block_h * SH / PHASES_H;  // rows of threads
static constexpr int UNITS = ROWS * C::block_x;          // threads that compute, per slot
static constexpr int BLOCK_W = C::block_x * CELLS;       // cells
static constexpr int RUN = CELLS * SW;                   // neighbouring outputs of a thread
static constexpr int PITCH = CELLS | 1;                  // words from one thread's cells to the next one's
static constexpr int ROW_PITCH = C::row_pitch;
static constexpr int PLANE = ((C::block_h + C::span_h) * ROW_PITCH) | 1;  // odd: channels_last writes neighbouring channels at once
static constexpr int CHANNELS = SLOTS * CHUNK;                            // planes of a stage
static constexpr int CHUNKS = (CI + CHUNK - 1) / CHUNK;
static constexpr int WEIGHT_CHANNEL = KH * WEIGHT_ROW;
static constexpr int WEIGHT_WORDS = CHANNELS * WEIGHT_CHANNEL;  // per stage; a multiple of VEC
static constexpr int STAGE_WORDS = (WEIGHT_WORDS + CHANNELS * PLANE + VEC - 1) / VEC * VEC;
static constexpr int GROUP_BLOCKS = (GROUPS + SLOTS - 1) / SLOTS;

struct Sizes { int d, h, w, od, oh, ow, tiles_h, tiles_w; };

// What a block computes: a depth of an image, the first of its groups and cells, and a block of channels.
struct Place {
    i64 image;
    int od, group, cout_block, cell_h, cell_w;
};

// What a thread of it computes: its cells along W, and its row of cells and phase along H. Rows go phase by phase, so that the threads
// of a warp share their taps.
struct Thread { int slot, unit, tx, th, jh; };

using Sums = Acc[CO][RUN];
using Copies = DirectCopies<Direct>;
using Stores = DirectStores<Direct>;

static __device__ __forceinline__ Place place_of(u32 at, const Sizes& s) {
    Place p;
    p.cell_w = at % s.tiles_w * BLOCK_W;
    at /= s.tiles_w;
    p.cell_h = at % s.tiles_h * C::block_h;
    at /= s.tiles_h;
    p.cout_block = at % COUT_BLOCKS;
    at /= COUT_BLOCKS;
    p.group = at % GROUP_BLOCKS * SLOTS;
    at /= GROUP_BLOCKS;
    p.od = at % s.od;
    p.image = at / s.od;
    return p;
}

static __device__ __forceinline__ Thread thread_of(int tid) {
    Thread own;
    own.slot = tid / UNITS;
    own.unit = tid % UNITS;
    own.tx = own.unit % C::block_x;
    const int row = own.unit / C::block_x;
    own.th = ALL_H ? 0 : row / C::block_h;
    own.jh = ALL_H ? row : row % C::block_h;
    return own;
}

// A depth tap of the block's phase whose input plane exists, and a chunk of input channels.
struct Stage {
    int kd, chunk, depth;
    __device__ __forceinline__ void advance(int od, int d) {
        if (++chunk < CHUNKS) return;
        chunk = 0;
        for (++kd; kd < KD; ++kd) {
            const int reach = od + PD - kd * DD;
            if (reach < 0 || reach % SD) continue;
            depth = reach / SD;
            if (depth < d) return;
        }
    }
    __device__ __forceinline__ int channels() const { return CI - chunk * CHUNK < CHUNK ? CI - chunk * CHUNK : CHUNK; }
};

static __device__ __forceinline__ void copy_weights(Acc* to, const Acc* weight, const Place& p, const Stage& stage) {
    const int first = stage.chunk * CHUNK, channels = stage.channels();
#pragma unroll 1
    for (int s = 0; s < SLOTS; ++s) {
        const int g = p.group + s < GROUPS ? p.group + s : GROUPS - 1;
        const Acc* from = weight + (((i64)(g * COUT_BLOCKS + p.cout_block) * KD + stage.kd) * CI + first) * WEIGHT_CHANNEL;
        Acc* rows = to + s * CHUNK * WEIGHT_CHANNEL;
        for (int v = threadIdx.x * VEC; v < channels * WEIGHT_CHANNEL; v += THREADS * VEC) copy16(shared_address(rows + v), from + v);
    }
}

static __device__ __forceinline__ typename Copies::Source source_of(const T* x, const Place& p, const Stage& stage, const Sizes& s) {
    const i64 plane = (i64)s.h * s.w;
    const int first = stage.chunk * CHUNK;
    typename Copies::Source from;
    from.channel_step = s.d * plane;
    from.base = C::channels_last ? x + (p.image * s.d + stage.depth) * plane * (GROUPS * CI) + p.group * CI + first
                                 : x + (p.image * (GROUPS * CI) + (i64)p.group * CI + first) * from.channel_step + stage.depth * plane;
    from.present = SLOTS > 1 ? (GROUPS - p.group) * CI : stage.channels();
    from.row = p.cell_h + C::min_h;
    from.col = p.cell_w + C::min_w;
    from.h = s.h;
    from.w = s.w;
    return from;
}

// All products of one input row and the taps of one row of a channel, both in shared memory.
static __device__ __forceinline__ void multiply(Sums& to, const Acc* line, const Acc* weights) {
    Acc window[CELLS + C::span_w];
#pragma unroll
    for (int c = 0; c < CELLS + C::span_w; ++c) window[c] = line[c / CELLS * PITCH + c % CELLS];
    const Pack* packs = reinterpret_cast<const Pack*>(weights);
    Pack pack;
#pragma unroll
    for (int k = 0; k < KW; ++k) {
        const int t = floor_mod(k * DW - PW, SW);
        const int shift = (t + PW - k * DW - C::min_w * SW) / SW;
#pragma unroll
        for (int c = 0; c < CO; ++c) {
            const int word = k * CO + c;
            if (word % VEC == 0) pack = packs[word / VEC];
#pragma unroll
            for (int m = 0; m < CELLS; ++m)
                to[c][m * SW + t] = multiply_add(pack.v[word % VEC], window[m + shift], to[c][m * SW + t]);
        }
    }
}

// The first tap along H of a thread's phase; KH where it has none.
static __device__ __forceinline__ int first_tap(int th) {
    int first = KH;
#pragma unroll 1
    for (int k = 0; !ALL_H && k < KH && k < C::step_kh; ++k)
        if ((th + PH + KH * DH * SH - k * DH) % SH == 0) first = k;
    return first;
}

// A stage's products.
static __device__ __forceinline__ void multiply_stage(Sums (&sum)[PHASES_H], const Acc* stage, const Thread& own, int channels, int first_kh) {
    const Acc* weights = stage + own.slot * CHUNK * WEIGHT_CHANNEL;
    const Acc* tile = stage + WEIGHT_WORDS + own.slot * CHUNK * PLANE + own.tx * PITCH;
    const int first_row = own.jh + (own.th + PH - first_kh * DH - C::min_h * SH) / SH;  // exact where the phase has taps
#pragma unroll 1
    for (int ci = 0; ci < channels; ++ci) {
        if constexpr (ALL_H) {  // input row by input row, each for the taps of all phases that meet it
#pragma unroll
            for (int r = 0; r <= C::span_h; ++r)
#pragma unroll
                for (int kh = 0; kh < KH; ++kh) {
                    const int t = floor_mod(kh * DH - PH, SH);
                    if ((t + PH - kh * DH - C::min_h * SH) / SH == r)
                        multiply(sum[t], tile + ci * PLANE + (own.jh + r) * ROW_PITCH, weights + (ci * KH + kh) * WEIGHT_ROW);
                }
        } else {
            int r = first_row;
#pragma unroll 1
            for (int kh = first_kh; kh < KH; kh += C::step_kh, r -= C::step_row)
                multiply(sum[0], tile + ci * PLANE + r * ROW_PITCH, weights + (ci * KH + kh) * WEIGHT_ROW);
        }
    }
}

static __device__ __forceinline__ void add_bias(Sums (&sum)[PHASES_H], const T* bias, int g, int cout_block, bool stores) {
#pragma unroll
    for (int c = 0; c < CO; ++c) {
        const int co = cout_block * CO + c;
        const Acc b = stores && co < CO_GROUP ? Scalar::value(bias[g * CO_GROUP + co]) : Acc(0);
#pragma unroll
        for (int t = 0; t < PHASES_H; ++t)
#pragma unroll
            for (int v = 0; v < RUN; ++v) sum[t][c][v] += b;
    }
}

static __device__ __forceinline__ void run(const T* __restrict__ x, const Acc* __restrict__ weight, const T* __restrict__ bias,
                                           T* __restrict__ out, const Sizes& s, Acc* shared) {
    const Place p = place_of(blockIdx.x, s);
    const int tid = threadIdx.x;
    const Thread own = thread_of(tid);
    const bool computes = tid < SLOTS * UNITS;
    const int first_kh = first_tap(own.th);

    Sums sum[PHASES_H];
#pragma unroll
    for (int t = 0; t < PHASES_H; ++t)
#pragma unroll
        for (int c = 0; c < CO; ++c)
#pragma unroll
            for (int v = 0; v < RUN; ++v) sum[t][c][v] = 0;

    Stage stage = {-1, CHUNKS - 1, 0};
    const auto begin = [&](Acc* to) {
        copy_weights(to, weight, p, stage);
        Copies::copy(to + WEIGHT_WORDS, source_of(x, p, stage, s), x);
    };
    stage.advance(p.od, s.d);
    if (stage.kd < KD) {
        begin(shared);
        copy_wait_all();
    }
    __syncthreads();
#pragma unroll 1
    for (int buffer = 0; stage.kd < KD; buffer ^= 1) {
        const int channels = stage.channels();
        Acc* next = shared + (buffer ^ 1) * STAGE_WORDS;
        stage.advance(p.od, s.d);
        if (C::stages > 1 && stage.kd < KD) begin(next);
        if (computes) multiply_stage(sum, shared + buffer * STAGE_WORDS, own, channels, first_kh);
        if (C::stages > 1 && stage.kd < KD) copy_wait_all();
        __syncthreads();
    }

    const int g = p.group + own.slot;
    const bool stores = tid < SLOTS * UNITS && g < GROUPS;
    if (bias) add_bias(sum, bias, g, p.cout_block, stores);
    if constexpr (C::channels_last) {
        Stores::store_pixels(sum, out, shared, p, own, s);
    } else {
        Stores::store_rows(sum, out, shared, p, own, stores, s);
    }
}
};

template <class C>
__global__ void __launch_bounds__(C::threads, C::min_blocks)
    direct(const typename Direct<C>::T* __restrict__ x, const typename Direct<C>::Acc* __restrict__ weight,
           const typename Direct<C>::T* __restrict__ bias, typename Direct<C>::T* __restrict__ out, int d, int h, int w, int od_size,
           int oh_size, int ow_size, int tiles_h, int tiles_w) {
    extern __shared__ __align__(16) unsigned char memory[];
    auto* shared = reinterpret_cast<typename Direct<C>::Acc*>(memory);
    Direct<C>::run(x, weight, bias, out, {d, h, w, od_size, oh_size, ow_size, tiles_h, tiles_w}, shared);
}
