// What a block of direct.cu copies to shared memory for a stage: the input tile with its halo (zeros outside), and the weights.
// Halves are loaded four at a time where alignment allows (QUADS), and wait in registers for the end of the stage before (HOLDS).
#include "scalar.cuh"

// K: Direct<C>.
template <class K>
struct DirectCopies {
using C = typename K::C;
using Scalar = typename K::Scalar;
using T = typename K::T;
using Acc = typename K::Acc;

static constexpr bool LAST = C::channels_last;
static constexpr bool QUADS = C::quads;
static constexpr int THREADS = C::threads, CHANNELS = K::CHANNELS;
static constexpr int IN_CHANNELS = C::groups * C::cin_g;
static constexpr int IN_ROWS = C::block_h + C::span_h;  // input rows of a tile
static constexpr int IN_COLS = K::BLOCK_W + C::span_w + C::lead;
static constexpr int ROW_PITCH = C::row_pitch;
static constexpr int PLANE = K::PLANE;

// Columns of a row, or channels of a pixel.
static constexpr int QUAD_COLS = (IN_COLS + 3) / 4, QUAD_CHANNELS = CHANNELS / 4;
static constexpr int QUAD_ITEMS = !QUADS ? 0 : LAST ? IN_ROWS * IN_COLS * QUAD_CHANNELS : CHANNELS * IN_ROWS * QUAD_COLS;
static constexpr int HELD = (QUAD_ITEMS + THREADS - 1) / THREADS;
static constexpr bool HOLDS = QUADS && C::stages > 1 && HELD <= 4;

// A stage's input: where it starts in memory, what of it exists.
struct Source {
    const T* base;  // channel 0 of the stage, depth, row 0, column 0
    i64 channel_step;
    int present, row, col, h, w;
};

using Held = uint2[HOLDS ? HELD : 1];

static __device__ __forceinline__ int column_word(int c) { return c / C::cells * K::PITCH + c % C::cells; }

static __device__ __forceinline__ void put(Acc* to, const T* from, bool inside) {
    if constexpr (sizeof(T) == sizeof(Acc)) copy_word<sizeof(T)>(shared_address(to), from, inside ? (int)sizeof(T) : 0);
    else *to = inside ? Scalar::value(*from) : Acc(0);
}

static __device__ __forceinline__ uint2 fetch_quad(const Source& s, int at) {
    uint2 four = make_uint2(0, 0);
    if constexpr (LAST) {
        const int channel = at % QUAD_CHANNELS * 4, pixel = at / QUAD_CHANNELS;
        const int ih = s.row + pixel / IN_COLS, iw = s.col + pixel % IN_COLS;
        if ((u32)ih < (u32)s.h && (u32)iw < (u32)s.w && channel < s.present)
            four = *reinterpret_cast<const uint2*>(s.base + ((i64)ih * s.w + iw) * IN_CHANNELS + channel);
    } else {  // rows and tiles start at multiples of four columns, so a quad is in or out
        const int line = at / QUAD_COLS, channel = line / IN_ROWS;
        const int ih = s.row + line % IN_ROWS, iw = s.col + at % QUAD_COLS * 4;
        if ((u32)ih < (u32)s.h && (u32)iw < (u32)s.w && channel < s.present)
            four = *reinterpret_cast<const uint2*>(s.base + channel * s.channel_step + (i64)ih * s.w + iw);
    }
    return four;
}

static __device__ __forceinline__ void put_quad(Acc* tile, int at, uint2 four) {
    const u32 words[2] = {four.x, four.y};
    if constexpr (LAST) {
        const int channel = at % QUAD_CHANNELS * 4, pixel = at / QUAD_CHANNELS;
        Acc* to = tile + channel * PLANE + pixel / IN_COLS * ROW_PITCH + column_word(pixel % IN_COLS);
#pragma unroll
        for (int m = 0; m < 4; ++m) to[m * PLANE] = Scalar::value((T)(words[m / 2] >> (m % 2 * 16)));
    } else {
        const int line = at / QUAD_COLS, c = at % QUAD_COLS * 4;
        Acc* to = tile + line / IN_ROWS * PLANE + line % IN_ROWS * ROW_PITCH;
#pragma unroll
        for (int m = 0; m < 4; ++m)
            if (IN_COLS % 4 == 0 || c + m < IN_COLS) to[column_word(c + m)] = Scalar::value((T)(words[m / 2] >> (m % 2 * 16)));
    }
}

// Element by element. Channels, rows and columns outside are zeros. `x`: an address that may be read.
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

// Starts the copies of a tile; `finish` writes what they left in registers. `vector`: quads are aligned.
static __device__ __forceinline__ void begin(Acc* tile, Held& held, const Source& s, const T* x, bool vector) {
    const int tid = threadIdx.x;
    if (!vector) {
        if constexpr (LAST) copy_pixels(tile, s, x);
        else copy_rows(tile, s, x);
    } else if constexpr (HOLDS) {
#pragma unroll
        for (int k = 0; k < HELD; ++k)
            if (tid + k * THREADS < QUAD_ITEMS) held[k] = fetch_quad(s, tid + k * THREADS);
    } else if constexpr (QUADS) {
#pragma unroll 4
        for (int item = tid; item < QUAD_ITEMS; item += THREADS) put_quad(tile, item, fetch_quad(s, item));
    }
}
static __device__ __forceinline__ void finish(Acc* tile, const Held& held, bool vector) {
    const int tid = threadIdx.x;
    if constexpr (HOLDS) {
        if (vector) {
#pragma unroll
            for (int k = 0; k < HELD; ++k)
                if (tid + k * THREADS < QUAD_ITEMS) put_quad(tile, tid + k * THREADS, held[k]);
        }
    }
    copy_wait_all();
}
};
