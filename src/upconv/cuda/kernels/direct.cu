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
// SPLIT sets of threads share the channels of a stage where the image alone has too few threads; their sums meet in
// shared memory in a fixed order. A row in shared memory has one word between runs of CELLS, and rows are padded so that
// the threads of a warp, over all its rows, have one odd stride: reads are free of bank conflicts.
// Halves are loaded four at a time where alignment allows, and wait in registers for the end of the stage before.
// The sums leave through shared memory, so that stores cover whole lines; directly when a thread's are one vector.
//
// Constraints: the tile and the unrolled taps must fit (the planner checks); `direct_any` needs nothing of it.

#include "direct.cuh"

constexpr int COUT_BLOCKS = (CO_GROUP + CO - 1) / CO;
constexpr int WEIGHT_ROW = (KW * CO + VEC - 1) / VEC * VEC;  // words of the weights of one (kd, ci, kh)

// src: (GROUPS * CI, CO_GROUP, KD, KH, KW) with strides s0 ... s4 in elements; one thread per packed element.
extern "C" __global__ void direct_pack(const T* __restrict__ src, Acc* __restrict__ dst, i64 s0, i64 s1, i64 s2, i64 s3,
                                       i64 s4, i64 total) {
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (i64)gridDim.x * blockDim.x) {
        i64 rest = at / WEIGHT_ROW;
        const int in_row = (int)(at - rest * WEIGHT_ROW);
        const int kw = in_row / CO, co_in = in_row % CO;
        const int kh = (int)(rest % KH);
        rest /= KH;
        const int ci = (int)(rest % CI);
        rest /= CI;
        const int kd = (int)(rest % KD);
        rest /= KD;
        const int co = (int)(rest % COUT_BLOCKS) * CO + co_in;
        const i64 group = rest / COUT_BLOCKS;
        Acc value = 0;
        if (kw < KW && co < CO_GROUP)
            value = load_value(src[(group * CI + ci) * s0 + co * s1 + kd * s2 + kh * s3 + kw * s4]);
        dst[at] = value;
    }
}

#if !ANY

constexpr int ROWS = BLOCK_H * SH / PHASES_H;   // rows of threads
constexpr int UNITS = ROWS * BLOCK_X;           // threads that compute, per slot and split
constexpr int BLOCK_W = BLOCK_X * CELLS;        // cells
constexpr int RUN = CELLS * SW;                 // neighbouring outputs of a thread
constexpr int PITCH = CELLS | 1;                // words from one thread's cells to the next one's
constexpr int IN_ROWS = BLOCK_H + SPAN_H;       // input rows of a tile
constexpr int IN_COLS = BLOCK_W + SPAN_W + LEAD;
constexpr int PLANE = (IN_ROWS * ROW_PITCH) | 1;  // odd: channels_last writes neighbouring channels at once
constexpr int CHANNELS = SLOTS * CHUNK;           // planes of a stage
constexpr int CHUNKS = (CI + CHUNK - 1) / CHUNK;
constexpr int WEIGHT_CHANNEL = KH * WEIGHT_ROW;
constexpr int WEIGHT_WORDS = CHANNELS * WEIGHT_CHANNEL;  // per stage; a multiple of VEC
constexpr int STAGE_WORDS = (WEIGHT_WORDS + CHANNELS * PLANE + VEC - 1) / VEC * VEC;
constexpr int GROUP_BLOCKS = (GROUPS + SLOTS - 1) / SLOTS;
constexpr int WARPS = THREADS / 32;
constexpr bool DIRECT = !LAST && RUN * (int)sizeof(T) <= 16 && (RUN & (RUN - 1)) == 0;
constexpr bool ALL_H = PHASES_H > 1;

// Halves four at a time: columns of a row, or channels of a pixel.
constexpr int QUAD_COLS = (IN_COLS + 3) / 4, QUAD_CHANNELS = CHANNELS / 4;
constexpr int QUAD_ITEMS = !QUADS ? 0 : LAST ? IN_ROWS * IN_COLS * QUAD_CHANNELS : CHANNELS * IN_ROWS * QUAD_COLS;
constexpr int HELD = (QUAD_ITEMS + THREADS - 1) / THREADS;
constexpr bool HOLDS = QUADS && STAGES > 1 && HELD <= 4;  // in registers, until the stage before is done
static_assert(SPLIT == 1 || (SLOTS == 1 && UNITS % 32 == 0), "the sets of threads are whole warps");

__device__ __forceinline__ int column_word(int c) { return c / CELLS * PITCH + c % CELLS; }

__device__ __forceinline__ void put(Acc* to, const T* from, bool inside) {
#if DTYPE == 0 || DTYPE == 3
    copy_word<sizeof(T)>(shared_address(to), from, inside ? (int)sizeof(T) : 0);
#else
    *to = inside ? load_value(*from) : Acc(0);
#endif
}

// A stage's input: where it starts in memory, what of it exists.
struct Source {
    const T* base;  // channel 0 of the stage, depth, row 0, column 0
    i64 channel_step;
    int present, row, col, h, w;
};

__device__ __forceinline__ uint2 fetch_quad(const Source& s, int at) {
    uint2 four = make_uint2(0, 0);
    if (LAST) {
        const int channel = at % QUAD_CHANNELS * 4, pixel = at / QUAD_CHANNELS;
        const int ih = s.row + pixel / IN_COLS, iw = s.col + pixel % IN_COLS;
        if ((u32)ih < (u32)s.h && (u32)iw < (u32)s.w && channel < s.present)
            four = *reinterpret_cast<const uint2*>(s.base + ((i64)ih * s.w + iw) * (GROUPS * CI) + channel);
    } else {  // rows and tiles start at multiples of four columns, so a quad is in or out
        const int line = at / QUAD_COLS, channel = line / IN_ROWS;
        const int ih = s.row + line % IN_ROWS, iw = s.col + at % QUAD_COLS * 4;
        if ((u32)ih < (u32)s.h && (u32)iw < (u32)s.w && channel < s.present)
            four = *reinterpret_cast<const uint2*>(s.base + channel * s.channel_step + (i64)ih * s.w + iw);
    }
    return four;
}

__device__ __forceinline__ void put_quad(Acc* tile, int at, uint2 four) {
    const u32 words[2] = {four.x, four.y};
    if (LAST) {
        const int channel = at % QUAD_CHANNELS * 4, pixel = at / QUAD_CHANNELS;
        Acc* to = tile + channel * PLANE + pixel / IN_COLS * ROW_PITCH + column_word(pixel % IN_COLS);
#pragma unroll
        for (int m = 0; m < 4; ++m) to[m * PLANE] = load_value((T)(words[m / 2] >> (m % 2 * 16)));
    } else {
        const int line = at / QUAD_COLS, c = at % QUAD_COLS * 4;
        Acc* to = tile + line / IN_ROWS * PLANE + line % IN_ROWS * ROW_PITCH;
#pragma unroll
        for (int m = 0; m < 4; ++m)
            if (IN_COLS % 4 == 0 || c + m < IN_COLS)
                to[column_word(c + m)] = load_value((T)(words[m / 2] >> (m % 2 * 16)));
    }
}

// Copies an input tile element by element. Channels, rows and columns outside are zeros.
__device__ __forceinline__ void copy_tile(Acc* tile, const Source& s, const T* x) {
    if (LAST) {
#pragma unroll(sizeof(T) == 2 ? 4 : 1)  // halves wait for what they load, asynchronous copies do not
        for (int at = threadIdx.x; at < IN_ROWS * IN_COLS * CHANNELS; at += THREADS) {
            const int channel = at % CHANNELS, pixel = at / CHANNELS;
            const int r = pixel / IN_COLS, c = pixel % IN_COLS;
            const int ih = s.row + r, iw = s.col + c;
            const bool inside = (u32)ih < (u32)s.h && (u32)iw < (u32)s.w && channel < s.present;
            const T* from = inside ? s.base + ((i64)ih * s.w + iw) * (GROUPS * CI) + channel : x;
            put(tile + channel * PLANE + r * ROW_PITCH + column_word(c), from, inside);
        }
        return;
    }
    // Whole warps of columns row by row, the columns that are left, often a halo of two, over all rows at once.
    constexpr int REST = IN_COLS % 32 <= 20 ? IN_COLS % 32 : 0, BODY = IN_COLS - REST;
    const int lane = threadIdx.x % 32;
    if (BODY) {
#pragma unroll 2
        for (int at = threadIdx.x / 32; at < CHANNELS * IN_ROWS; at += WARPS) {
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
    if (REST) {
        constexpr int DIVISOR = REST ? REST : 1;
#pragma unroll 2
        for (int at = threadIdx.x; at < CHANNELS * IN_ROWS * REST; at += THREADS) {
            const int c = BODY + at % DIVISOR, line = at / DIVISOR;
            const int channel = line / IN_ROWS, r = line % IN_ROWS;
            const int ih = s.row + r, iw = s.col + c;
            const bool inside = (u32)ih < (u32)s.h && (u32)iw < (u32)s.w && channel < s.present;
            const T* from = inside ? s.base + channel * s.channel_step + (i64)ih * s.w + iw : x;
            put(tile + channel * PLANE + r * ROW_PITCH + column_word(c), from, inside);
        }
    }
}

// A warp stores `count` neighbouring outputs, WIDE at a time, from runs in shared memory.
template <int WIDE>
__device__ __forceinline__ void store_segment(T* to, const Acc* from, int count, int lane) {
    struct alignas(WIDE * sizeof(T)) Line {
        T v[WIDE];
    } line;
#pragma unroll 4
    for (int v = lane * WIDE; v < count; v += 32 * WIDE) {
        const Acc* at = from + v / RUN * RUN_PITCH + v % RUN;
        if (WIDE == VEC) {
            const Pack pack = *reinterpret_cast<const Pack*>(at);
#pragma unroll
            for (int m = 0; m < WIDE; ++m) line.v[m] = store_value(pack.v[m]);
        } else {
#pragma unroll
            for (int m = 0; m < WIDE; ++m) line.v[m] = store_value(at[m]);
        }
        *reinterpret_cast<Line*>(to + v) = line;
    }
}

// Whether output t of a cell along H has taps at all.
__device__ constexpr bool has_taps_h(int t) {
    for (int k = 0; k < KH; ++k)
        if (floor_mod(k * DH - PH, SH) == t) return true;
    return false;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct(const T* __restrict__ x, const Acc* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out, int d,
           int h, int w, int od_size, int oh_size, int ow_size, int tiles_h, int tiles_w) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Acc* shared = reinterpret_cast<Acc*>(shared_bytes);

    u32 at = blockIdx.x;
    const int tile_w = at % tiles_w;
    at /= tiles_w;
    const int tile_h = at % tiles_h;
    at /= tiles_h;
    const int cout_block = at % COUT_BLOCKS;
    at /= COUT_BLOCKS;
    const int group = at % GROUP_BLOCKS * SLOTS;
    at /= GROUP_BLOCKS;
    const int od = at % od_size;
    const i64 image = at / od_size;
    const int cell_h = tile_h * BLOCK_H, cell_w = tile_w * BLOCK_W;
    const int row = cell_h + MIN_H, col = cell_w + MIN_W - LEAD;
    const bool vector = QUADS && (LAST || w % 4 == 0) && (unsigned long long)x % (4 * sizeof(T)) == 0;

    // Rows go phase by phase, so that the threads of a warp share their taps.
    const int tid = threadIdx.x, lane = tid % 32;
    const int split = SPLIT > 1 ? tid / UNITS : 0;
    const int slot = SPLIT > 1 ? 0 : tid / UNITS, unit = tid % UNITS;
    const int tx = unit % BLOCK_X, my_row = unit / BLOCK_X;
    const int th = ALL_H ? 0 : my_row / BLOCK_H, jh = ALL_H ? my_row : my_row % BLOCK_H;
    const bool computes = tid < SPLIT * SLOTS * UNITS;
    int first_kh = KH;
#pragma unroll 1
    for (int k = 0; !ALL_H && k < KH && k < STEP_KH; ++k)
        if ((th + PH + KH * DH * SH - k * DH) % SH == 0) first_kh = k;
    const int first_row = jh + (th + PH - first_kh * DH - MIN_H * SH) / SH;  // exact where the phase has taps

    Acc sum[PHASES_H][CO][RUN];
#pragma unroll
    for (int t = 0; t < PHASES_H; ++t)
#pragma unroll
        for (int c = 0; c < CO; ++c)
#pragma unroll
            for (int v = 0; v < RUN; ++v) sum[t][c][v] = 0;

    // The next (kd, chunk): depth taps of this block's phase whose input plane exists.
    int kd = -1, chunk = CHUNKS - 1, depth = 0;
    const auto advance = [&]() {
        if (++chunk < CHUNKS) return;
        chunk = 0;
        for (++kd; kd < KD; ++kd) {
            const int reach = od + PD - kd * DD;
            if (reach < 0 || reach % SD) continue;
            depth = reach / SD;
            if (depth < d) return;
        }
    };
    uint2 held[HOLDS ? HELD : 1];
    // Starts the copies of the stage (kd, chunk); `finish` writes what they left in registers.
    const auto begin = [&](Acc* stage) {
        const int first = chunk * CHUNK;
        const int channels = CI - first < CHUNK ? CI - first : CHUNK;
#pragma unroll 1
        for (int s = 0; s < SLOTS; ++s) {
            const int g = group + s < GROUPS ? group + s : GROUPS - 1;
            const Acc* from = weight + (((i64)(g * COUT_BLOCKS + cout_block) * KD + kd) * CI + first) * WEIGHT_CHANNEL;
            Acc* to = stage + s * CHUNK * WEIGHT_CHANNEL;
            for (int v = tid * VEC; v < channels * WEIGHT_CHANNEL; v += THREADS * VEC) {
                copy16(shared_address(to + v), from + v);
            }
        }
        const i64 plane = (i64)h * w;
        Source s;
        s.channel_step = d * plane;
        s.base = LAST ? x + (image * d + depth) * plane * (GROUPS * CI) + group * CI + first
                      : x + (image * (GROUPS * CI) + (i64)group * CI + first) * s.channel_step + depth * plane;
        s.present = SLOTS > 1 ? (GROUPS - group) * CI : channels;
        s.row = row, s.col = col, s.h = h, s.w = w;
        Acc* tile = stage + WEIGHT_WORDS;
        if (!vector) {
            copy_tile(tile, s, x);
        } else if (HOLDS) {
#pragma unroll
            for (int k = 0; k < HELD; ++k)
                if (tid + k * THREADS < QUAD_ITEMS) held[HOLDS ? k : 0] = fetch_quad(s, tid + k * THREADS);
        } else if (QUADS) {
#pragma unroll 4
            for (int item = tid; item < QUAD_ITEMS; item += THREADS) put_quad(tile, item, fetch_quad(s, item));
        }
    };
    const auto finish = [&](Acc* stage) {
        if (HOLDS && vector) {
#pragma unroll
            for (int k = 0; k < HELD; ++k)
                if (tid + k * THREADS < QUAD_ITEMS)
                    put_quad(stage + WEIGHT_WORDS, tid + k * THREADS, held[HOLDS ? k : 0]);
        }
        copy_wait_all();
    };
    // All products of one input channel: its plane and its weights in shared memory.
    const auto multiply = [&](Acc(&to)[CO][RUN], const Acc* line, const Acc* weights) {
        Acc window[CELLS + SPAN_W];
#pragma unroll
        for (int c = 0; c < CELLS + SPAN_W; ++c) window[c] = line[(c + LEAD) / CELLS * PITCH + (c + LEAD) % CELLS];
        const Pack* packs = reinterpret_cast<const Pack*>(weights);
        Pack pack;
#pragma unroll
        for (int k = 0; k < KW; ++k) {
            const int t = floor_mod(k * DW - PW, SW);
            const int shift = (t + PW - k * DW - MIN_W * SW) / SW;
#pragma unroll
            for (int c = 0; c < CO; ++c) {
                const int word = k * CO + c;
                if (word % VEC == 0) pack = packs[word / VEC];
#pragma unroll
                for (int m = 0; m < CELLS; ++m)
                    to[c][m * SW + t] = multiply_add(pack.v[word % VEC], window[m + shift], to[c][m * SW + t]);
            }
        }
    };

    advance();
    if (kd < KD) {
        begin(shared);
        finish(shared);
    }
    __syncthreads();
#pragma unroll 1
    for (int buffer = 0; kd < KD; buffer ^= 1) {
        const int channels = CI - chunk * CHUNK < CHUNK ? CI - chunk * CHUNK : CHUNK;
        Acc* next = shared + (buffer ^ 1) * STAGE_WORDS;
        advance();
        if (STAGES > 1 && kd < KD) begin(next);
        if (computes) {
            const Acc* stage = shared + buffer * STAGE_WORDS;
            const Acc* weights = stage + slot * CHUNK * WEIGHT_CHANNEL;
            const Acc* tile = stage + WEIGHT_WORDS + slot * CHUNK * PLANE + tx * PITCH;
#pragma unroll 1
            for (int ci = split; ci < channels; ci += SPLIT) {
                if (ALL_H) {  // input row by input row, each for the taps of all phases that meet it
#pragma unroll
                    for (int r = 0; r <= SPAN_H; ++r)
#pragma unroll
                        for (int kh = 0; kh < KH; ++kh) {
                            const int t = floor_mod(kh * DH - PH, SH);
                            if ((t + PH - kh * DH - MIN_H * SH) / SH == r)
                                multiply(sum[ALL_H ? t : 0], tile + ci * PLANE + (jh + r) * ROW_PITCH,
                                         weights + (ci * KH + kh) * WEIGHT_ROW);
                        }
                } else {
                    int r = first_row;
#pragma unroll 1
                    for (int kh = first_kh; kh < KH; kh += STEP_KH, r -= STEP_ROW)
                        multiply(sum[0], tile + ci * PLANE + r * ROW_PITCH, weights + (ci * KH + kh) * WEIGHT_ROW);
                }
            }
        }
        if (STAGES > 1 && kd < KD) finish(next);
        __syncthreads();
    }

    // The sets of threads add up, one after the other.
#pragma unroll 1
    for (int s = 1; s < SPLIT; ++s) {
#pragma unroll
        for (int t = 0; t < PHASES_H; ++t)
#pragma unroll
            for (int c = 0; c < CO; ++c)
#pragma unroll
                for (int v = 0; v < RUN; ++v)
                    if (split == s && (!ALL_H || has_taps_h(t))) shared[((t * CO + c) * RUN + v) * UNITS + unit] = sum[t][c][v];
        __syncthreads();
#pragma unroll
        for (int t = 0; t < PHASES_H; ++t)
#pragma unroll
            for (int c = 0; c < CO; ++c)
#pragma unroll
                for (int v = 0; v < RUN; ++v)
                    if (split == 0 && (!ALL_H || has_taps_h(t))) sum[t][c][v] += shared[((t * CO + c) * RUN + v) * UNITS + unit];
        __syncthreads();
    }

    const int g = group + slot;
    const int oh = (cell_h + jh) * SH + th, ow = (cell_w + tx * CELLS) * SW;
    const bool stores = tid < SLOTS * UNITS && g < GROUPS;
    if (bias) {
#pragma unroll
        for (int c = 0; c < CO; ++c) {
            const int co = cout_block * CO + c;
            const Acc b = stores && co < CO_GROUP ? load_value(bias[g * CO_GROUP + co]) : Acc(0);
#pragma unroll
            for (int t = 0; t < PHASES_H; ++t)
#pragma unroll
                for (int v = 0; v < RUN; ++v) sum[t][c][v] += b;
        }
    }
    const i64 out_plane = (i64)oh_size * ow_size;

#if !LAST
    if (SPLIT > 1 && split) return;
    const int couts = CO_GROUP - cout_block * CO < CO ? CO_GROUP - cout_block * CO : CO;
    const i64 channel_step = od_size * out_plane;
    const i64 first_at = ((image * (GROUPS * CO_GROUP) + (i64)g * CO_GROUP + cout_block * CO) * od_size + od) * out_plane +
                         (i64)oh * ow_size;
#pragma unroll
    for (int t = 0; t < PHASES_H; ++t) {
        const bool row_stores = stores && oh + t < oh_size;
        const i64 row_at = row_stores ? first_at + (i64)t * ow_size : -1;
        if (DIRECT) {
            if (!row_stores) continue;
            T* to = out + row_at + ow;
            const bool whole = ow + RUN <= ow_size && ow_size % RUN == 0 && (unsigned long long)out % (RUN * sizeof(T)) == 0;
#pragma unroll
            for (int c = 0; c < CO; ++c) {
                if (c < couts) {
                    struct alignas(DIRECT ? RUN * sizeof(T) : 16) Line {
                        T v[RUN];
                    } line;
#pragma unroll
                    for (int v = 0; v < RUN; ++v) line.v[v] = store_value(sum[t][c][v]);
                    if (whole) {
                        *reinterpret_cast<Line*>(to + c * channel_step) = line;
                    } else {
#pragma unroll
                        for (int v = 0; v < RUN; ++v)
                            if (ow + v < ow_size) to[c * channel_step + v] = line.v[v];
                    }
                }
            }
            continue;
        }
        // Each warp turns its threads' runs into rows: 32 runs in, segments of LANES runs out.
        constexpr int LANES = BLOCK_X < 32 ? BLOCK_X : 32;
        constexpr int SEGMENT = LANES * RUN;
        constexpr int WIDE = RUN % 4 == 0 && VEC == 4 ? 4 : RUN % 2 == 0 ? 2 : 1;
        Acc* mine = shared + tid / 32 * (32 * RUN_PITCH * PART);  // PART channels at once
        const unsigned long long start_of_out = (unsigned long long)out / sizeof(T);
        const int wide = (ow_size % WIDE == 0 && start_of_out % WIDE == 0) ? WIDE
                         : (RUN % 2 == 0 && ow_size % 2 == 0 && start_of_out % 2 == 0) ? 2 : 1;
#pragma unroll
        for (int part = 0; part < CO; part += PART) {
            __syncwarp();
#pragma unroll
            for (int c = 0; c < PART; ++c) {
                Acc* to = mine + (c * 32 + lane) * RUN_PITCH;
                if (RUN % VEC == 0) {
#pragma unroll
                    for (int v = 0; v < RUN; v += VEC) {
                        Pack pack;
#pragma unroll
                        for (int m = 0; m < VEC; ++m) pack.v[m] = sum[t][part + c][v + m < RUN ? v + m : 0];
                        *reinterpret_cast<Pack*>(to + v) = pack;
                    }
                } else {
#pragma unroll
                    for (int v = 0; v < RUN; ++v) to[v] = sum[t][part + c][v];
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
                    if (WIDE > 1 && wide == WIDE)
                        store_segment<WIDE>(to, from, count, lane);
                    else if (WIDE > 2 && wide == 2)
                        store_segment<2>(to, from, count, lane);
                    else
                        store_segment<1>(to, from, count, lane);
                }
            }
        }
    }
#else
    // The block turns PART channels of every slot at a time into runs of SLOTS * PART channels of a pixel.
    constexpr int RUN_CHANNELS = SLOTS * PART;
    constexpr int UNIT_WORDS = RUN * RUN_CHANNELS;
    constexpr int UNIT_PITCH = UNIT_WORDS | 1;
#pragma unroll
    for (int t = 0; t < PHASES_H; ++t) {
#pragma unroll
        for (int part = 0; part < CO; part += PART) {
            if (t + part > 0) __syncthreads();
            if (tid < SLOTS * UNITS) {
#pragma unroll
                for (int v = 0; v < RUN; ++v)
#pragma unroll
                    for (int c = 0; c < PART; ++c)
                        shared[unit * UNIT_PITCH + v * RUN_CHANNELS + slot * PART + c] = sum[t][part + c][v];
            }
            __syncthreads();
#pragma unroll 2
            for (int i = tid; i < UNITS * UNIT_WORDS; i += THREADS) {
                const int u = i / UNIT_WORDS, in_unit = i % UNIT_WORDS;
                const int v = in_unit / RUN_CHANNELS, channel = in_unit % RUN_CHANNELS;
                const int its_row = u / BLOCK_X;
                const int its_oh = ALL_H ? (cell_h + its_row) * SH + t : (cell_h + its_row % BLOCK_H) * SH + its_row / BLOCK_H;
                const int its_ow = (cell_w + u % BLOCK_X * CELLS) * SW + v;
                const int its_group = group + channel / PART, co = cout_block * CO + part + channel % PART;
                if (its_oh < oh_size && its_ow < ow_size && its_group < GROUPS && co < CO_GROUP)
                    out[((image * od_size + od) * out_plane + (i64)its_oh * ow_size + its_ow) * (GROUPS * CO_GROUP) +
                        its_group * CO_GROUP + co] = store_value(shared[u * UNIT_PITCH + in_unit]);
            }
        }
    }
#endif
}

#else

// One thread per output element, loops over the taps that meet it. Right for every geometry, fast for none.
extern "C" __global__ void __launch_bounds__(THREADS)
    direct_any(const T* __restrict__ x, const Acc* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out,
               i64 d, i64 h, i64 w, i64 od_size, i64 oh_size, i64 ow_size, i64 total) {
    constexpr int OUT_CHANNELS = GROUPS * CO_GROUP, IN_CHANNELS = GROUPS * CI;
    for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < total; at += (i64)gridDim.x * THREADS) {
        i64 rest = at;
        int channel = 0;
        if (LAST) {
            channel = (int)(rest % OUT_CHANNELS);
            rest /= OUT_CHANNELS;
        }
        const i64 ow = rest % ow_size;
        rest /= ow_size;
        const i64 oh = rest % oh_size;
        rest /= oh_size;
        const i64 od = rest % od_size;
        rest /= od_size;
        if (!LAST) {
            channel = (int)(rest % OUT_CHANNELS);
            rest /= OUT_CHANNELS;
        }
        const int group = channel / CO_GROUP, co = channel % CO_GROUP;
        const i64 pixel = LAST ? IN_CHANNELS : 1, plane = h * w * pixel, volume = LAST ? 1 : d * plane;
        const T* image = x + rest * d * h * w * IN_CHANNELS + group * CI * volume;
        Acc sum = 0;
        for (int kd = 0; kd < KD; ++kd) {
            const i64 reach_d = od + PD - (i64)kd * DD;
            if (reach_d < 0 || reach_d % SD || reach_d / SD >= d) continue;
            for (int kh = 0; kh < KH; ++kh) {
                const i64 reach_h = oh + PH - (i64)kh * DH;
                if (reach_h < 0 || reach_h % SH || reach_h / SH >= h) continue;
                const T* line = image + reach_d / SD * plane + reach_h / SH * w * pixel;
                for (int kw = 0; kw < KW; ++kw) {
                    const i64 reach_w = ow + PW - (i64)kw * DW;
                    if (reach_w < 0 || reach_w % SW || reach_w / SW >= w) continue;
                    const T* from = line + reach_w / SW * pixel;
                    const Acc* taps = weight + (((i64)(group * CO_GROUP + co) * KD + kd) * CI * KH + kh) * WEIGHT_ROW + kw;
#pragma unroll 4
                    for (int ci = 0; ci < CI; ++ci)
                        sum = multiply_add(taps[(i64)ci * KH * WEIGHT_ROW], load_value(from[ci * volume]), sum);
                }
            }
        }
        if (bias) sum += load_value(bias[channel]);
        out[at] = store_value(sum);
    }
}
#endif
