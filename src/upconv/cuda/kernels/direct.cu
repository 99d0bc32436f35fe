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
// has one output row of a cell (one phase along H) and CELLS neighbouring cells along W: CO * CELLS * SW sums. For every
// depth tap of the block's phase and every chunk of CHUNK input channels: the block copies the input tile with its halo
// (zeros outside) and the chunk's weights to shared memory, then each thread walks channels and the taps of its row's
// phase; the taps along W are unrolled, so that a row's window is read once for all of them. A row in shared memory
// has one word between runs of CELLS, which makes the threads' stride odd and their reads free of bank conflicts.
// The sums leave through shared memory, so that stores cover whole lines; directly when a thread's are one vector.
//
// Constraints: the tile and the unrolled taps must fit (the planner checks); `direct_any` needs nothing of it.

#if DTYPE == 0
typedef float T;
typedef float Acc;
#elif DTYPE == 1 || DTYPE == 2
typedef unsigned short T;
typedef float Acc;
#else
typedef double T;
typedef double Acc;
#endif

typedef long long i64;
typedef unsigned int u32;

__device__ __forceinline__ Acc load_value(T v) {
#if DTYPE == 1
    return __uint_as_float((u32)v << 16);
#elif DTYPE == 2
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
#else
    return v;
#endif
}

__device__ __forceinline__ T store_value(Acc v) {
#if DTYPE == 1
    T r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
#elif DTYPE == 2
    T r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
#else
    return v;
#endif
}

__device__ __forceinline__ Acc multiply_add(Acc a, Acc b, Acc c) {
#if DTYPE == 3
    return fma(a, b, c);
#else
    return fmaf(a, b, c);
#endif
}

constexpr int VEC = 16 / (int)sizeof(Acc);  // accumulators in 16 bytes
struct alignas(16) Pack {
    Acc v[VEC];
};

__device__ constexpr int floor_mod(int a, int b) { return (a % b + b) % b; }
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

constexpr int ROWS = BLOCK_H * SH;              // output rows of a block
constexpr int UNITS = ROWS * BLOCK_X;           // threads that compute, per slot
constexpr int BLOCK_W = BLOCK_X * CELLS;        // cells
constexpr int RUN = CELLS * SW;                 // neighbouring outputs of a thread
constexpr int PITCH = CELLS | 1;                // words from one thread's cells to the next one's
constexpr int IN_ROWS = BLOCK_H + SPAN_H;       // input rows of a tile
constexpr int IN_COLS = BLOCK_W + SPAN_W + LEAD;
constexpr int ROW_PITCH = (IN_COLS + CELLS - 1) / CELLS * PITCH;
constexpr int PLANE = (IN_ROWS * ROW_PITCH) | 1;  // odd: channels_last writes neighbouring channels at once
constexpr int CHANNELS = SLOTS * CHUNK;           // planes of a stage
constexpr int CHUNKS = (CI + CHUNK - 1) / CHUNK;
constexpr int WEIGHT_CHANNEL = KH * WEIGHT_ROW;
constexpr int WEIGHT_WORDS = CHANNELS * WEIGHT_CHANNEL;  // per stage; a multiple of VEC
constexpr int STAGE_WORDS = (WEIGHT_WORDS + CHANNELS * PLANE + VEC - 1) / VEC * VEC;
constexpr int GROUP_BLOCKS = (GROUPS + SLOTS - 1) / SLOTS;
constexpr int WARPS = THREADS / 32;
constexpr bool DIRECT = !LAST && RUN * (int)sizeof(T) <= 16 && (RUN & (RUN - 1)) == 0;

#if DTYPE == 0 || DTYPE == 3
__device__ __forceinline__ void copy_async(Acc* to, const T* from, bool inside) {
    const u32 at = (u32)__cvta_generic_to_shared(to);
    const int bytes = inside ? (int)sizeof(T) : 0;  // 0: nothing is read, the words become zeros
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(sizeof(T)), "r"(bytes));
}
#endif
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ int column_word(int c) { return c / CELLS * PITCH + c % CELLS; }

__device__ __forceinline__ void put(Acc* to, const T* from, bool inside) {
#if DTYPE == 0 || DTYPE == 3
    copy_async(to, from, inside);
#else
    *to = inside ? load_value(*from) : Acc(0);
#endif
}

struct Sizes {
    int d, h, w;
};

// Copies the input tile and the weights of one (kd, chunk) to a stage. Channels, rows and columns outside are zeros.
__device__ __forceinline__ void load_stage(Acc* stage, const T* __restrict__ x, const Acc* __restrict__ weight, i64 image,
                                           int group, int cout_block, int kd, int depth, int first, int row, int col,
                                           Sizes in, bool vector) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int channels = CI - first < CHUNK ? CI - first : CHUNK;
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot) {
        const int g = group + slot < GROUPS ? group + slot : GROUPS - 1;
        const Acc* w = weight + (((i64)(g * COUT_BLOCKS + cout_block) * KD + kd) * CI + first) * WEIGHT_CHANNEL;
        Acc* to = stage + slot * CHUNK * WEIGHT_CHANNEL;
        for (int at = threadIdx.x * VEC; at < channels * WEIGHT_CHANNEL; at += THREADS * VEC) {
            const u32 shared = (u32)__cvta_generic_to_shared(to + at);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(w + at));
        }
    }
    Acc* tile = stage + WEIGHT_WORDS;
    const i64 plane = (i64)in.h * in.w;
#if LAST
    constexpr int PIXELS = IN_ROWS * IN_COLS;
    const T* base = x + ((image * in.d + depth) * plane) * (GROUPS * CI) + group * CI + first;
    const int present = SLOTS > 1 ? (GROUPS - group) * CI : channels;
#pragma unroll(sizeof(T) == 2 ? 4 : 1)  // halves wait for what they load, asynchronous copies do not
    for (int at = threadIdx.x; at < PIXELS * CHANNELS; at += THREADS) {
        const int channel = at % CHANNELS, pixel = at / CHANNELS;
        const int r = pixel / IN_COLS, c = pixel % IN_COLS;
        const int ih = row + r, iw = col + c;
        const bool inside = (u32)ih < (u32)in.h && (u32)iw < (u32)in.w && channel < present;
        const T* from = inside ? base + ((i64)ih * in.w + iw) * (GROUPS * CI) + channel : x;
        put(tile + channel * PLANE + r * ROW_PITCH + column_word(c), from, inside);
    }
#else
    const T* base = x + (image * (GROUPS * CI) + (i64)group * CI + first) * in.d * plane + depth * plane;
    const int present = SLOTS > 1 ? (GROUPS - group) * CI : channels;
#pragma unroll 2
    for (int at = warp; at < CHANNELS * IN_ROWS; at += WARPS) {
        const int channel = at / IN_ROWS, r = at % IN_ROWS;
        const int ih = row + r;
        const bool row_inside = (u32)ih < (u32)in.h && channel < present;
        const T* from = row_inside ? base + channel * in.d * plane + (i64)ih * in.w : x;
        Acc* to = tile + channel * PLANE + r * ROW_PITCH;
#if DTYPE == 1 || DTYPE == 2
        if (vector) {  // four columns at once: rows and tiles start at multiples of four, so a vector is in or out
#pragma unroll
            for (int c = lane * 4; c < IN_COLS; c += 128) {
                const int iw = col + c;
                uint2 four = make_uint2(0, 0);
                if (row_inside && (u32)iw < (u32)in.w) four = *reinterpret_cast<const uint2*>(from + iw);
                const u32 words[2] = {four.x, four.y};
#pragma unroll
                for (int m = 0; m < 4; ++m)
                    if (IN_COLS % 4 == 0 || c + m < IN_COLS)
                        to[column_word(c + m)] = load_value((T)(words[m / 2] >> (m % 2 * 16)));
            }
            continue;
        }
#endif
#pragma unroll
        for (int c = lane; c < IN_COLS; c += 32) {
            const int iw = col + c;
            const bool inside = row_inside && (u32)iw < (u32)in.w;
            put(to + column_word(c), inside ? from + iw : x, inside);
        }
    }
#endif
    copy_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    direct(const T* __restrict__ x, const Acc* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out, int d,
           int h, int w, int od_size, int oh_size, int ow_size, int tiles_h, int tiles_w) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Acc* shared = reinterpret_cast<Acc*>(shared_bytes);
    const Sizes in = {d, h, w};

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
    const bool vector = QUADS && w % 4 == 0 && (unsigned long long)x % (4 * sizeof(T)) == 0;

    // Rows go phase by phase, so that the threads of a warp share their taps.
    const int tid = threadIdx.x;
    const int slot = tid / UNITS, unit = tid % UNITS;
    const int tx = unit % BLOCK_X, my_row = unit / BLOCK_X;
    const int th = my_row / BLOCK_H, jh = my_row % BLOCK_H;
    const bool computes = tid < SLOTS * UNITS;
    int first_kh = KH;
#pragma unroll 1
    for (int k = 0; k < KH && k < STEP_KH; ++k)
        if ((th + PH + KH * DH * SH - k * DH) % SH == 0) first_kh = k;
    const int first_row = jh + (th + PH - first_kh * DH - MIN_H * SH) / SH;  // exact where the phase has taps

    Acc sum[CO][RUN];
#pragma unroll
    for (int c = 0; c < CO; ++c)
#pragma unroll
        for (int v = 0; v < RUN; ++v) sum[c][v] = 0;

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
    const auto load = [&](int buffer) {
        load_stage(shared + buffer * STAGE_WORDS, x, weight, image, group, cout_block, kd, depth, chunk * CHUNK, row, col,
                   in, vector);
    };

    advance();
    if (kd < KD) load(0);
#pragma unroll 1
    for (int buffer = 0; kd < KD;) {
        const int channels = CI - chunk * CHUNK < CHUNK ? CI - chunk * CHUNK : CHUNK;
        if (STAGES > 1) {
            advance();
            if (kd < KD) {
                load(buffer ^ 1);
                copy_wait<1>();
            } else {
                copy_wait<0>();
            }
        } else {
            copy_wait<0>();
        }
        __syncthreads();
        if (computes) {
            const Acc* stage = shared + buffer * STAGE_WORDS;
            const Acc* weights = stage + slot * CHUNK * WEIGHT_CHANNEL;
            const Acc* tile = stage + WEIGHT_WORDS + slot * CHUNK * PLANE + tx * PITCH;
#pragma unroll 1
            for (int ci = 0; ci < channels; ++ci) {
                int r = first_row;
#pragma unroll 1
                for (int kh = first_kh; kh < KH; kh += STEP_KH, r -= STEP_ROW) {
                    const Acc* line = tile + ci * PLANE + r * ROW_PITCH;
                    const Pack* packs = reinterpret_cast<const Pack*>(weights + (ci * KH + kh) * WEIGHT_ROW);
                    Acc window[CELLS + SPAN_W];
#pragma unroll
                    for (int c = 0; c < CELLS + SPAN_W; ++c)
                        window[c] = line[(c + LEAD) / CELLS * PITCH + (c + LEAD) % CELLS];
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
                                sum[c][m * SW + t] = multiply_add(pack.v[word % VEC], window[m + shift], sum[c][m * SW + t]);
                        }
                    }
                }
            }
        }
        if (STAGES > 1) {
            buffer ^= 1;
            __syncthreads();
        } else {
            advance();
            __syncthreads();
            if (kd < KD) load(0);
        }
    }

    const int g = group + slot;
    const int oh = (cell_h + jh) * SH + th, ow = (cell_w + tx * CELLS) * SW;
    const bool stores = computes && g < GROUPS && oh < oh_size;
    if (bias) {
#pragma unroll
        for (int c = 0; c < CO; ++c) {
            const int co = cout_block * CO + c;
            const Acc b = stores && co < CO_GROUP ? load_value(bias[g * CO_GROUP + co]) : Acc(0);
#pragma unroll
            for (int v = 0; v < RUN; ++v) sum[c][v] += b;
        }
    }
    const int couts = CO_GROUP - cout_block * CO < CO ? CO_GROUP - cout_block * CO : CO;
    const i64 out_plane = (i64)oh_size * ow_size;

#if !LAST
    const i64 channel_step = od_size * out_plane;
    i64 row_at = ((image * (GROUPS * CO_GROUP) + (i64)g * CO_GROUP + cout_block * CO) * od_size + od) * out_plane +
                 (i64)oh * ow_size;
    if (DIRECT) {
        if (!stores) return;
        T* to = out + row_at + ow;
        const bool whole = ow + RUN <= ow_size && ow_size % RUN == 0 && (unsigned long long)out % (RUN * sizeof(T)) == 0;
#pragma unroll
        for (int c = 0; c < CO; ++c) {
            if (c < couts) {
                struct alignas(DIRECT ? RUN * sizeof(T) : 16) Line {
                    T v[RUN];
                } line;
#pragma unroll
                for (int v = 0; v < RUN; ++v) line.v[v] = store_value(sum[c][v]);
                if (whole) {
                    *reinterpret_cast<Line*>(to + c * channel_step) = line;
                } else {
#pragma unroll
                    for (int v = 0; v < RUN; ++v)
                        if (ow + v < ow_size) to[c * channel_step + v] = line.v[v];
                }
            }
        }
        return;
    }
    // Each warp turns its threads' runs into rows: 32 runs in, ROWS_PER_WARP segments of LANES runs out.
    constexpr int LANES = BLOCK_X < 32 ? BLOCK_X : 32;
    constexpr int SEGMENT = LANES * RUN;
    const int lane = tid % 32;
    Acc* mine = shared + tid / 32 * (32 * RUN_PITCH);
    if (!stores) row_at = -1;
#pragma unroll
    for (int c = 0; c < CO; ++c) {
        if (c < couts) {
            __syncwarp();
#pragma unroll
            for (int v = 0; v < RUN; ++v) mine[lane * RUN_PITCH + v] = sum[c][v];
            __syncwarp();
#pragma unroll 1
            for (int segment = 0; segment < 32 / LANES; ++segment) {
                const i64 start = __shfl_sync(0xffffffffu, row_at, segment * LANES);
                const int ow0 = __shfl_sync(0xffffffffu, ow, segment * LANES);
                if (start < 0) continue;
                T* to = out + start + c * channel_step + ow0;
                const Acc* from = mine + segment * LANES * RUN_PITCH;
                const int count = ow_size - ow0 < SEGMENT ? ow_size - ow0 : SEGMENT;
                constexpr int WIDE = 16 / (int)sizeof(Acc);  // elements of a vector store
                if (RUN % WIDE == 0 && ow_size % WIDE == 0 && (unsigned long long)out % (WIDE * sizeof(T)) == 0) {
                    struct alignas(WIDE * sizeof(T)) Line {
                        T v[WIDE];
                    } line;
#pragma unroll 4
                    for (int v = lane * WIDE; v < count; v += 32 * WIDE) {
                        const Pack four = *reinterpret_cast<const Pack*>(from + v / RUN * RUN_PITCH + v % RUN);
#pragma unroll
                        for (int m = 0; m < WIDE; ++m) line.v[m] = store_value(four.v[m]);
                        *reinterpret_cast<Line*>(to + v) = line;
                    }
                } else {
#pragma unroll 4
                    for (int v = lane; v < count; v += 32)
                        to[v] = store_value(from[v / RUN * RUN_PITCH + v % RUN]);
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
    for (int part = 0; part < CO; part += PART) {
        if (computes) {
#pragma unroll
            for (int v = 0; v < RUN; ++v)
#pragma unroll
                for (int c = 0; c < PART; ++c)
                    shared[unit * UNIT_PITCH + v * RUN_CHANNELS + slot * PART + c] = sum[part + c][v];
        }
        __syncthreads();
#pragma unroll 2
        for (int i = tid; i < UNITS * UNIT_WORDS; i += THREADS) {
            const int u = i / UNIT_WORDS, in_unit = i % UNIT_WORDS;
            const int v = in_unit / RUN_CHANNELS, channel = in_unit % RUN_CHANNELS;
            const int its_row = u / BLOCK_X;
            const int its_oh = (cell_h + its_row % BLOCK_H) * SH + its_row / BLOCK_H;
            const int its_ow = (cell_w + u % BLOCK_X * CELLS) * SW + v;
            const int its_group = group + channel / PART, co = cout_block * CO + part + channel % PART;
            if (its_oh < oh_size && its_ow < ow_size && its_group < GROUPS && co < CO_GROUP)
                out[((image * od_size + od) * out_plane + (i64)its_oh * ow_size + its_ow) * (GROUPS * CO_GROUP) +
                    its_group * CO_GROUP + co] = store_value(shared[u * UNIT_PITCH + in_unit]);
        }
        if (part + PART < CO) __syncthreads();
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
