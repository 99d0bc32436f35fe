// How a block of direct.cu stores its sums: through shared memory, so that stores cover whole lines; directly where a thread's sums are
// one vector.
#include "scalar.cuh"

// K: Direct<C>.
template <class K>
struct DirectStores {
using C = typename K::C;
using Scalar = typename K::Scalar;
using T = typename K::T;
using Acc = typename K::Acc;
using Pack = typename Scalar::Pack;
using Sums = typename K::Sums;
using Place = typename K::Place;
using Thread = typename K::Thread;
using Sizes = typename K::Sizes;

static constexpr int VEC = Scalar::VEC, CO = K::CO, CO_GROUP = C::cout_g, RUN = K::RUN, PART = C::part;
static constexpr int RUN_PITCH = C::run_pitch;
static constexpr bool DIRECT = RUN * (int)sizeof(T) <= 16 && (RUN & (RUN - 1)) == 0;

// A warp stores `count` neighbouring outputs, WIDE at a time, from runs in shared memory.
template <int WIDE>
static __device__ __forceinline__ void store_segment(T* to, const Acc* from, int count, int lane) {
    struct alignas(WIDE * sizeof(T)) Line {
        T v[WIDE];
    } line;
#pragma unroll 4
    for (int v = lane * WIDE; v < count; v += 32 * WIDE) {
        const Acc* at = from + v / RUN * RUN_PITCH + v % RUN;
        if constexpr (WIDE == VEC) {
            const Pack pack = *reinterpret_cast<const Pack*>(at);
#pragma unroll
            for (int m = 0; m < WIDE; ++m) line.v[m] = Scalar::stored(pack.v[m]);
        } else {
#pragma unroll
            for (int m = 0; m < WIDE; ++m) line.v[m] = Scalar::stored(at[m]);
        }
        *reinterpret_cast<Line*>(to + v) = line;
    }
}

// A thread's sums of a row, from column `ow` on, where `to` is, of `couts` channels `channel_step` apart.
static __device__ __forceinline__ void store_own(const Acc (&sum)[CO][RUN], T* to, i64 channel_step, int couts, int ow, int ow_size, bool whole) {
    struct alignas(RUN * sizeof(T)) Line {
        T v[RUN];
    };
#pragma unroll
    for (int c = 0; c < CO; ++c) {
        if (c < couts) {
            Line line;
#pragma unroll
            for (int v = 0; v < RUN; ++v) line.v[v] = Scalar::stored(sum[c][v]);
            if (whole) {
                *reinterpret_cast<Line*>(to + c * channel_step) = line;
            } else {
#pragma unroll
                for (int v = 0; v < RUN; ++v)
                    if (ow + v < ow_size) to[c * channel_step + v] = line.v[v];
            }
        }
    }
}

// Each warp turns its threads' sums of PART channels into rows: 32 runs in, segments of LANES runs out. `row_at`: where the thread's row
// begins in the output, or -1 where it has none.
static __device__ __forceinline__ void store_turned(const Acc (&sum)[CO][RUN], T* out, Acc* shared, i64 row_at, int ow, i64 channel_step, int couts, int ow_size) {
    constexpr int LANES = C::block_x < 32 ? C::block_x : 32;
    constexpr int SEGMENT = LANES * RUN;
    constexpr int WIDE = RUN % 4 == 0 && VEC == 4 ? 4 : RUN % 2 == 0 ? 2 : 1;
    const int lane = threadIdx.x % 32;
    Acc* mine = shared + threadIdx.x / 32 * (32 * RUN_PITCH * PART);
    const unsigned long long start_of_out = (unsigned long long)out / sizeof(T);
    const int wide = (ow_size % WIDE == 0 && start_of_out % WIDE == 0) ? WIDE
                     : (RUN % 2 == 0 && ow_size % 2 == 0 && start_of_out % 2 == 0) ? 2 : 1;
#pragma unroll
    for (int part = 0; part < CO; part += PART) {
        __syncwarp();
#pragma unroll
        for (int c = 0; c < PART; ++c) {
            Acc* to = mine + (c * 32 + lane) * RUN_PITCH;
            if constexpr (RUN % VEC == 0) {
#pragma unroll
                for (int v = 0; v < RUN; v += VEC) {
                    Pack pack;
#pragma unroll
                    for (int m = 0; m < VEC; ++m) pack.v[m] = sum[part + c][v + m];
                    *reinterpret_cast<Pack*>(to + v) = pack;
                }
            } else {
#pragma unroll
                for (int v = 0; v < RUN; ++v) to[v] = sum[part + c][v];
            }
        }
        __syncwarp();
        const int present = couts - part < PART ? couts - part : PART;
#pragma unroll 1
        for (int segment = 0; segment < 32 / LANES; ++segment) {
            const i64 start = __shfl_sync(0xffffffffu, row_at, segment * LANES);
            const int ow0 = __shfl_sync(0xffffffffu, ow, segment * LANES);
            if (start < 0) continue;
            T* to = out + start + part * channel_step + ow0;
            const Acc* from = mine + segment * LANES * RUN_PITCH;
            const int count = ow_size - ow0 < SEGMENT ? ow_size - ow0 : SEGMENT;
#pragma unroll 1
            for (int c = 0; c < present; ++c, to += channel_step, from += 32 * RUN_PITCH) {
                if (WIDE > 1 && wide == WIDE) store_segment<WIDE>(to, from, count, lane);
                else if (WIDE > 2 && wide == 2) store_segment<2>(to, from, count, lane);
                else store_segment<1>(to, from, count, lane);
            }
        }
    }
}

// NCHW.
static __device__ __forceinline__ void store_rows(const Sums (&sum)[C::phases_h], T* out, Acc* shared, const Place& p, const Thread& own, bool stores, const Sizes& s) {
    const int g = p.group + own.slot, oh = (p.cell_h + own.jh) * C::stride_h + own.th, ow = (p.cell_w + own.tx * C::cells) * C::stride_w;
    const int couts = CO_GROUP - p.cout_block * CO < CO ? CO_GROUP - p.cout_block * CO : CO;
    const i64 plane = (i64)s.oh * s.ow, channel_step = s.od * plane;
    const i64 first_at = ((p.image * (C::groups * CO_GROUP) + (i64)g * CO_GROUP + p.cout_block * CO) * s.od + p.od) * plane + (i64)oh * s.ow;
#pragma unroll
    for (int t = 0; t < C::phases_h; ++t) {
        const bool row_stores = stores && oh + t < s.oh;
        const i64 row_at = row_stores ? first_at + (i64)t * s.ow : -1;
        if constexpr (DIRECT) {
            const bool whole = ow + RUN <= s.ow && s.ow % RUN == 0 && (unsigned long long)out % (RUN * sizeof(T)) == 0;
            if (row_stores) store_own(sum[t], out + row_at + ow, channel_step, couts, ow, s.ow, whole);
        } else {
            store_turned(sum[t], out, shared, row_at, ow, channel_step, couts, s.ow);
        }
    }
}

// channels_last: the block turns PART channels of every slot at a time into runs of slots * PART channels of a pixel.
static __device__ __forceinline__ void store_pixels(const Sums (&sum)[C::phases_h], T* out, Acc* shared, const Place& p, const Thread& own, const Sizes& s) {
    constexpr int RUN_CHANNELS = C::slots * PART;
    constexpr int UNIT_WORDS = RUN * RUN_CHANNELS;
    constexpr int UNIT_PITCH = UNIT_WORDS | 1;
    const i64 plane = (i64)s.oh * s.ow;
#pragma unroll
    for (int t = 0; t < C::phases_h; ++t) {
#pragma unroll
        for (int part = 0; part < CO; part += PART) {
            if (t + part > 0) __syncthreads();
            if (threadIdx.x < C::slots * K::UNITS) {
#pragma unroll
                for (int v = 0; v < RUN; ++v)
#pragma unroll
                    for (int c = 0; c < PART; ++c)
                        shared[own.unit * UNIT_PITCH + v * RUN_CHANNELS + own.slot * PART + c] = sum[t][part + c][v];
            }
            __syncthreads();
#pragma unroll 2
            for (int i = threadIdx.x; i < K::UNITS * UNIT_WORDS; i += C::threads) {
                const int u = i / UNIT_WORDS, in_unit = i % UNIT_WORDS;
                const int v = in_unit / RUN_CHANNELS, channel = in_unit % RUN_CHANNELS;
                const int row = u / C::block_x;
                const int oh = K::ALL_H ? (p.cell_h + row) * C::stride_h + t : (p.cell_h + row % C::block_h) * C::stride_h + row / C::block_h;
                const int ow = (p.cell_w + u % C::block_x * C::cells) * C::stride_w + v;
                const int group = p.group + channel / PART, co = p.cout_block * CO + part + channel % PART;
                if (oh < s.oh && ow < s.ow && group < C::groups && co < CO_GROUP)
                    out[((p.image * s.od + p.od) * plane + (i64)oh * s.ow + ow) * (C::groups * CO_GROUP) + group * CO_GROUP + co] =
                        Scalar::stored(shared[u * UNIT_PITCH + in_unit]);
            }
        }
    }
}
};
