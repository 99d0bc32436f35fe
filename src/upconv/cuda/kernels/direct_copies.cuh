// What a block of direct.cu copies to shared memory for a stage: the input tile with its halo (zeros outside), and the weights.
#include "scalar.cuh"

// K: Direct<C>.
template <class K>
struct DirectCopies {
using C = typename K::C;
using Scalar = typename K::Scalar;
using T = typename K::T;
using Acc = typename K::Acc;

static constexpr bool LAST = C::channels_last;
static constexpr int THREADS = C::threads, CHANNELS = K::CHANNELS;
static constexpr int IN_CHANNELS = C::groups * C::cin_g;
static constexpr int IN_ROWS = C::block_h + C::span_h;  // input rows of a tile
static constexpr int IN_COLS = K::BLOCK_W + C::span_w;
static constexpr int ROW_PITCH = C::row_pitch;
static constexpr int PLANE = K::PLANE;

// A stage's input: where it starts in memory, what of it exists.
struct Source {
    const T* base;  // channel 0 of the stage, depth, row 0, column 0
    i64 channel_step;
    int present, row, col, h, w;
};

static __device__ __forceinline__ int column_word(int c) { return c / C::cells * K::PITCH + c % C::cells; }

static __device__ __forceinline__ void put(Acc* to, const T* from, bool inside) {
    if constexpr (sizeof(T) == sizeof(Acc)) copy_word<sizeof(T)>(shared_address(to), from, inside ? (int)sizeof(T) : 0);
    else *to = inside ? Scalar::value(*from) : Acc(0);
}

// Element by element. Channels, rows and columns outside are zeros.
static __device__ __forceinline__ void copy_pixels(Acc* tile, const Source& s, const T* x) {
#pragma unroll(sizeof(T) == 2 ? 4 : 1)  // halves wait for what they load, asynchronous copies do not
    for (int at = threadIdx.x; at < IN_ROWS * IN_COLS * CHANNELS; at += THREADS) {
        const int channel = at % CHANNELS, pixel = at / CHANNELS;
        const int r = pixel / IN_COLS, c = pixel % IN_COLS;
        const int ih = s.row + r, iw = s.col + c;
        const bool inside = (u32)ih < (u32)s.h && (u32)iw < (u32)s.w && channel < s.present;
        const T* from = inside ? s.base + ((i64)ih * s.w + iw) * IN_CHANNELS + channel : x;
        put(tile + channel * PLANE + r * ROW_PITCH + column_word(c), from, inside);
    }
}

// The same in NCHW: whole warps of columns row by row, the columns that are left, often a halo of two, over all rows at once.
static __device__ __forceinline__ void copy_rows(Acc* tile, const Source& s, const T* x) {
    constexpr int REST = IN_COLS % 32 <= 20 ? IN_COLS % 32 : 0, BODY = IN_COLS - REST;
    const int lane = threadIdx.x % 32;
    if constexpr (BODY > 0) {
#pragma unroll 2
        for (int at = threadIdx.x / 32; at < CHANNELS * IN_ROWS; at += THREADS / 32) {
            const int channel = at / IN_ROWS, r = at % IN_ROWS;
            const int ih = s.row + r;
            const bool row_inside = (u32)ih < (u32)s.h && channel < s.present;
            const T* from = row_inside ? s.base + channel * s.channel_step + (i64)ih * s.w : x;
            Acc* to = tile + channel * PLANE + r * ROW_PITCH;
#pragma unroll
            for (int c = lane; c < BODY; c += 32) {
                const bool inside = row_inside && (u32)(s.col + c) < (u32)s.w;
                put(to + column_word(c), inside ? from + s.col + c : x, inside);
            }
        }
    }
    if constexpr (REST > 0) {
#pragma unroll 2
        for (int at = threadIdx.x; at < CHANNELS * IN_ROWS * REST; at += THREADS) {
            const int c = BODY + at % REST, line = at / REST;
            const int channel = line / IN_ROWS, r = line % IN_ROWS;
            const int ih = s.row + r, iw = s.col + c;
            const bool inside = (u32)ih < (u32)s.h && (u32)iw < (u32)s.w && channel < s.present;
            const T* from = inside ? s.base + channel * s.channel_step + (i64)ih * s.w + iw : x;
            put(tile + channel * PLANE + r * ROW_PITCH + column_word(c), from, inside);
        }
    }
}

// `x`: an address that may be read.
static __device__ __forceinline__ void copy(Acc* tile, const Source& s, const T* x) {
    if constexpr (LAST) copy_pixels(tile, s, x);
    else copy_rows(tile, s, x);
}
};
