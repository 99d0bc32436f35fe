// The forward and the gradient for the input on CUDA cores: depthwise layers, few channels and float64.
//
//   forward  out[n, co, o] = bias[co] + sum over ci of the group and taps of in[n, ci, i] * w[ci, co, tap],  o = i * stride + tap * dilation - padding
//   dX       gi[n, ci, i]  =            sum over co of the group and taps of g[n, co, o] * w[ci, co, tap]
//
// A block computes some channels of a tile of cells (direct_tile.cuh), a thread those of `rows` cells. For each chunk of the source's channels and
// tap along D the tile and the slice's weights come to shared memory. A cell of the forward has outputs of all phases, so every tap is
// unrolled.
//
// Stores. A lane's neighbouring results are a run. Where a run is one vector a lane stores it. Else runs go through shared memory,
// so that lanes store neighbours; stored as they are, or exchanged by pairs of lanes, they take more than twice as long.
#include "direct_tile.cuh"

template <class C_>
struct Direct : DirectTile<C_> {
using C = C_;
using Base = DirectTile<C>;
using typename Base::Scalar; using typename Base::T; using typename Base::Acc; using typename Base::Pack;
using typename Base::Sizes; using typename Base::Tile; using typename Base::Own;
using Base::VEC; using Base::ELEMENT; using Base::BY_CHANNELS; using Base::TO; using Base::LANES; using Base::CHANNELS; using Base::ROWS; using Base::CHUNK;
using Base::KERNEL_H; using Base::KERNEL_W; using Base::THREADS; using Base::CHANNEL_BLOCKS;
using Base::ROW_PITCH; using Base::column_at; using Base::thread_index;
static constexpr int CIN_G = C::forward ? C::from_g : C::to_g, COUT_G = C::forward ? C::to_g : C::from_g;
static constexpr int CELL_H = C::out_h, CELL_W = C::out_w;  // results of a cell

// A tap's weights, for the lanes' channels or a thread's; those of one channel lie by columns of taps, so that four are one load.
static constexpr bool ONE_CHANNEL = !BY_CHANNELS && CHANNELS == 1;
static constexpr int WEIGHTS = BY_CHANNELS ? LANES : ONE_CHANNEL ? 1 : (CHANNELS + VEC - 1) / VEC * VEC;
static constexpr int WEIGHTS_READ = BY_CHANNELS ? 1 : WEIGHTS;
static __device__ __forceinline__ constexpr int tap_at(int kh, int kw) {
  return ONE_CHANNEL ? kw * ((KERNEL_H + VEC - 1) / VEC * VEC) + kh : (kw * KERNEL_H + kh) * WEIGHTS;
}
static constexpr int SLICE_WORDS = ONE_CHANNEL ? KERNEL_W * ((KERNEL_H + VEC - 1) / VEC * VEC) : KERNEL_H * KERNEL_W * WEIGHTS;  // of a channel of the source
static constexpr int TAP_WORDS = KERNEL_H * KERNEL_W * WEIGHTS;               // without gaps
static constexpr int TAP_BATCH = (CHUNK * TAP_WORDS + THREADS - 1) / THREADS;

// What a block computes: channels (lanes_are_channels: from `channel` on; else of `group`) of a tile.
struct Item {
  Tile tile;
  int group, channel;
};

static __device__ __forceinline__ Item item_of(u32 index, const Sizes& s) {
  Item item;
  const int block = index % CHANNEL_BLOCKS;  index /= CHANNEL_BLOCKS;
  item.group = 0;
  item.channel = block * (BY_CHANNELS ? LANES : CHANNELS);
  if constexpr (BY_CHANNELS) {
    item.tile = Base::tile_of(index, s);
  } else if constexpr (C::channels_last) {
    // A pixel's channels are neighbours: groups that share its sectors find them in L2.
    item.group = index % C::groups;
    item.tile = Base::tile_of(index / C::groups, s);
  } else {
    // A channel's tiles are neighbours: what their halos share comes from L2.
    const u32 tiles = s.tiles_w * s.tiles_h * s.d;
    item.group = index / tiles % C::groups;
    item.tile = Base::tile_of(index % tiles, s);
    item.tile.n = index / tiles / C::groups;
  }
  return item;
}

// A slice's weights, of the source's channels from `from` on.
static __device__ __forceinline__ void load_weights(T (&v)[TAP_BATCH], const T* weight, const Item& item, int from, int kd) {
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < TAP_BATCH; b++) {
    const int i = thread + b * THREADS, source = from + i / TAP_WORDS, tap = i % TAP_WORDS / WEIGHTS;
    const int own = i % WEIGHTS, to = item.channel + own;
    const bool exists = source < C::from_g && (BY_CHANNELS ? to < TO : own < CHANNELS && to < C::to_g);
    const i64 in = BY_CHANNELS ? to : item.group * CIN_G + (C::forward ? source : to);
    const i64 row = BY_CHANNELS ? in : in * COUT_G + (C::forward ? to : source);
    v[b] = 0;
    if (i < CHUNK * TAP_WORDS && exists) v[b] = weight[(row * C::kernel_d + kd) * (KERNEL_H * KERNEL_W) + tap];
  }
}

static __device__ __forceinline__ void store_weights(Acc* weights, const T (&v)[TAP_BATCH]) {
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < TAP_BATCH; b++) {
    const int i = thread + b * THREADS, tap = i % TAP_WORDS / WEIGHTS;
    if (i < CHUNK * TAP_WORDS) weights[i / TAP_WORDS * SLICE_WORDS + tap_at(tap / KERNEL_W, tap % KERNEL_W) + i % WEIGHTS] = Scalar::value(v[b]);
  }
}

// A tap's weights of a thread.
static __device__ __forceinline__ void read_weights(Acc (&w)[WEIGHTS_READ], const Acc* from, int mine) {
  if constexpr (WEIGHTS_READ == 1) {
    w[0] = from[BY_CHANNELS ? mine : 0];
  } else {
#pragma unroll
    for (int i = 0; i < WEIGHTS_READ; i += VEC) {
      const Pack pack = *(const Pack*)(from + i);
#pragma unroll
      for (int k = 0; k < VEC; k++) w[i + k] = pack.v[k];
    }
  }
}

using Sums = Acc[ROWS][CELL_H][CELL_W][CHANNELS];

// A slice's products: a column of taps after the other, whose rows of the tile stay in registers where they are unrolled.
static __device__ __forceinline__ void multiply(Sums& sum, const Acc* tile, const Acc* weights, const Own& own) {
#pragma unroll C::unroll_w
  for (int kw = 0; kw < KERNEL_W; kw++) {
    const int u = Base::phase_of(kw, C::stride_w, C::dilation_w, C::padding_w);
    const Acc* column = tile + own.at + column_at(Base::column_of_tap(kw));
#pragma unroll C::unroll_h
    for (int kh = 0; kh < KERNEL_H; kh++) {
      const int t = Base::phase_of(kh, C::stride_h, C::dilation_h, C::padding_h);
      Acc w[WEIGHTS_READ];
      read_weights(w, weights + tap_at(kh, kw), own.mine);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const Acc v = column[(r * C::in_h + Base::row_of_tap(kh)) * ROW_PITCH];
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) sum[r][t][u][c] = multiply_add(v, w[c], sum[r][t][u][c]);
      }
    }
  }
}

// A run: columns of a cell in NCHW, a pixel's channels in channels_last, those of all columns where a thread has all channels.
static constexpr bool WHOLE_PIXELS = C::channels_last && !BY_CHANNELS && C::groups == 1 && CHANNELS == C::to_g;
static constexpr int RUN = BY_CHANNELS ? 1 : WHOLE_PIXELS ? CELL_W * CHANNELS : C::channels_last ? CHANNELS : CELL_W;
static constexpr int RUNS = CELL_W * CHANNELS / RUN;    // of a row of a cell
static constexpr int POWER = RUN & -RUN, OF_16 = 16 / ELEMENT;
static constexpr int WIDE = POWER < OF_16 ? POWER : OF_16, LINES = RUN / WIDE;
struct alignas(WIDE * sizeof(T)) Line { T v[WIDE]; };

// Where line `at` of a warp's is in its buffer: eight lanes that write meet eight different places of 128 bytes.
static __device__ __forceinline__ int swizzled(int at) { return LINES % 2 ? at : at ^ (at >> 3 & (LINES - 1 & 7)); }

// A warp's runs, UNIT (WIDE or 1) elements a lane and store: element e of a lane's goes to `place` + e, if that is before `left`.
template <int UNIT>
static __device__ __forceinline__ void store_turned(T* out, const Line* buffer, i64 place, int left, int lane) {
  constexpr int UNITS = RUN / UNIT;        // of a lane
#pragma unroll
  for (int k = 0; k < UNITS; k++) {
    const int at = k * 32 + lane, element = at % UNITS * UNIT;
    const i64 of = __shfl_sync(0xffffffffu, place, at / UNITS);
    const int room = __shfl_sync(0xffffffffu, left, at / UNITS);
    const Line& line = buffer[swizzled(at / UNITS * LINES + element / WIDE)];
    if (element >= room) continue;
    if (UNIT == WIDE) *(Line*)(out + of + element) = line;
    else out[of + element] = line.v[element % WIDE];
  }
}

// A lane's run to `place`, of which the result has `left` elements. `whole`: runs begin at multiples of a line.
static __device__ __forceinline__ void store_run(T* out, const Line (&line)[LINES], i64 place, int left, bool whole, Line* buffer, int lane) {
  if constexpr (LINES == 1) {
    if (whole && left >= RUN) *(Line*)(out + place) = line[0];
    if (whole && left >= RUN) return;
#pragma unroll
    for (int e = 0; e < RUN; e++)
      if (e < left) out[place + e] = line[0].v[e];
  } else {
    __syncwarp();
#pragma unroll
    for (int k = 0; k < LINES; k++) buffer[swizzled(lane * LINES + k)] = line[k];
    __syncwarp();
    if (whole) store_turned<WIDE>(out, buffer, place, left, lane);
    else store_turned<1>(out, buffer, place, left, lane);
  }
}

static __device__ __forceinline__ void store(T* out, const Sums& sum, const T* bias, const Item& item, const Own& own, Line* buffer, int lane, const Sizes& s) {
  const Tile& t = item.tile;
  const bool whole = (unsigned long long)out % sizeof(Line) == 0 && (C::channels_last ? WHOLE_PIXELS ? s.w % WIDE * TO : C::to_g : s.w) % WIDE == 0;
  const int first = item.group * C::to_g + item.channel + (BY_CHANNELS ? lane : 0);  // channel
  const int channels = BY_CHANNELS ? (lane < LANES && first < TO) : C::to_g - item.channel;
  constexpr int PIXEL = C::channels_last ? TO : 1;     // elements from column to column
  const i64 plane = (i64)s.h * s.w, channel_step = s.d * plane;
  T* to = out + (C::channels_last ? ((i64)t.n * s.d + t.d) * plane * TO + first : ((i64)t.n * TO + first) * channel_step + t.d * plane);
  opaque(to);
  Acc start[CHANNELS];
#pragma unroll
  for (int c = 0; c < CHANNELS; c++) start[c] = bias && c < channels ? Scalar::value(bias[first + c]) : Acc(0);
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int y = 0; y < CELL_H; y++) {
      const int row = (t.h + own.ty + r) * C::out_h + y;
#pragma unroll
      for (int k = 0; k < RUNS; k++) {
        const int column = (t.w + own.tx) * CELL_W + (C::channels_last ? k : 0), ahead = C::channels_last ? 0 : k;  // channels
        Line line[LINES];
#pragma unroll
        for (int e = 0; e < RUN; e++) {
          const int c = C::channels_last ? e % CHANNELS : k, x = !C::channels_last ? e : WHOLE_PIXELS ? e / CHANNELS : k;
          line[e / WIDE].v[e % WIDE] = Scalar::stored(sum[r][y][x][c] + start[c]);
        }
        const int exists = !C::channels_last ? s.w - column : WHOLE_PIXELS ? min(s.w - column, CELL_W) * CHANNELS : channels;
        const int left = row < s.h && column < s.w && ahead < channels ? exists : 0;
        store_run(to, line, ((i64)row * s.w + column) * PIXEL + ahead * channel_step, left, whole, buffer, lane);
      }
    }
}

static __device__ __forceinline__ void run(unsigned char* memory, const T* __restrict__ source, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out, const Sizes& s, bool whole_units) {
  Acc *tile = (Acc*)memory, *weights = tile + Base::TILE_WORDS;
  const int lane = threadIdx.x & 31;
  const Own own = Base::own_of(BY_CHANNELS ? threadIdx.x / 32 : threadIdx.x, lane);
  const Item item = item_of(blockIdx.x, s);
  Sums sum = {};
#pragma unroll 1
  for (int slice = 0; slice < (C::from_g + CHUNK - 1) / CHUNK * C::kernel_d; slice++) {
    const int from = slice / C::kernel_d * CHUNK, kd = slice % C::kernel_d, depth = Base::depth_of(item.tile.d, kd, s);
    if (depth < 0) continue;
    const int channel = BY_CHANNELS ? item.channel : item.group * C::from_g + from, left = BY_CHANNELS ? TO - channel : C::from_g - from;
    T taps[TAP_BATCH];
    load_weights(taps, weight, item, from, kd);
    __syncthreads();                       // the slice before has been read
    Base::stage(tile, source, item.tile, depth, channel, left, whole_units, s);
    store_weights(weights, taps);
    __syncthreads();
#pragma unroll 1
    for (int c = 0; c < CHUNK && c < left; c++) multiply(sum, tile + c * Base::CHANNEL_WORDS, weights + c * SLICE_WORDS, own);
  }
  if (LINES > 1) __syncthreads();          // the last slice has been read
  store(out, sum, bias, item, own, (Line*)memory + threadIdx.x / 32 * (32 * LINES), lane, s);
}
};

template <class C>
__global__ void __launch_bounds__(C::threads, C::min_blocks)
direct(const typename Direct<C>::T* __restrict__ source, const typename Direct<C>::T* __restrict__ weight, const typename Direct<C>::T* __restrict__ bias,
       typename Direct<C>::T* __restrict__ out, int batch, int from_d, int from_h, int from_w, int d, int h, int w, int tiles_h, int tiles_w, int whole_units) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Direct<C>::run(memory, source, weight, bias, out, {batch, from_d, from_h, from_w, d, h, w, tiles_h, tiles_w}, whole_units);
}
