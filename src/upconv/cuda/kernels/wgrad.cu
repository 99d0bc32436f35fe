// Grad-weight on tensor cores: dW[ci, co, tap] = sum over images and positions q of x[ci, q] * g[co, q * step + tap * dilation - padding].
//
// A GEMM whose K is the pixels: M = block_ci input channels, N = block_co output channels, one accumulator for each tap of a set
// (taps_d x taps_h x taps_w neighbouring taps). A block takes a tile of channels, a set of taps and a range of pixel tiles
// (tile_n x tile_d x tile_h x tile_w positions q, a "chunk"): x's tile and g's with the halo of the set are copied to shared
// memory once and serve all taps of the set. mma.sync takes both operands from registers, so that a tap may begin at any
// column: fragments of x are read once a step and meet those of every tap.
//
// Shared memory: NCHW [row][channel][column], channels_last [row][column][channel]; pitches keep the eight rows of a fragment in
// different banks. Copies of 16 bytes (cp.async), two stages. NCHW rows of any alignment: the 16-byte units of memory that
// hold them are copied, and a row then begins (address % 16) bytes into its place.
//
// K is split over ranges of chunks and WARPS_K warps; each leaves a record of its sums, which `reduce` adds (wgrad_sums.cuh).
#include "wgrad_sums.cuh"
#include "wgmma.cuh"

template <class C_>
struct WgradSync {
using C = C_;
using S = WgradShape<C>;
using Number = typename S::Number;
using Sizes = typename S::Sizes;
using Chunk = typename S::Chunk;
using Work = typename S::Work;
using Rows = typename S::Rows;

static constexpr int ELEMENT = S::ELEMENT, VEC = S::VEC;
static constexpr bool NARROW = S::NARROW, LAST = C::channels_last;
static constexpr int WARPS = 8, THREADS = WARPS * 32;
static constexpr int WARPS_M = C::block_ci / C::warp_m;
static constexpr int WARPS_N = C::block_co / C::warp_n;
static constexpr int WARPS_K = WARPS / (WARPS_M * WARPS_N);
static constexpr int M_FRAGMENTS = C::warp_m / 16;
static constexpr int N_FRAGMENTS = C::warp_n / 8;
static constexpr int X_BYTES = S::Q_ROWS * (LAST ? C::tile_w : C::block_ci) * C::x_pitch * ELEMENT;
static constexpr int STAGE_BYTES = X_BYTES + S::G_BYTES;
static_assert(2 * STAGE_BYTES == C::shared_bytes, "the planner's shared memory is not the kernel's");

static constexpr int W_STRIPS = C::tile_w / 8;          // a strip is 8 columns of a row
static constexpr int STRIPS = S::Q_ROWS * W_STRIPS;
static constexpr int STEPS = NARROW ? STRIPS / 2 : STRIPS;  // a matrix instruction takes one strip of float32, two of 16-bit types
static constexpr bool PROMOTES = C::precision == IEEE;  // sums leave the tensor cores, which truncate them, after every chunk
static constexpr int PARTS = PROMOTES ? 2 : 1;

using Sums = float[S::SET_TAPS][M_FRAGMENTS][N_FRAGMENTS][4];

struct X {                                              // as threads copy it
  static constexpr int ROWS = S::Q_ROWS, ROWS_H = C::tile_h, BLOCK = C::block_ci, CHANNELS = S::CIN, OF_GROUP = C::cin;
  static constexpr int COLUMNS = C::tile_w, UNITS = C::x_units, PITCH = C::x_pitch, APART_H = 1;
  static __device__ __forceinline__ Rows row(int r) { return S::q_row(r); }
};
using CopiesX = WgradCopies<S, X, THREADS>;
using CopiesG = WgradCopies<S, WgradG<S>, THREADS>;

static __device__ __forceinline__ WgradMemory x_memory(const Sizes& s) { return {s.batch, s.in_d, s.in_h, s.in_w}; }
static __device__ __forceinline__ WgradMemory g_memory(const Sizes& s) { return {s.batch, s.out_d, s.out_h, s.out_w}; }

static __device__ __forceinline__ void copy_chunk(const char* __restrict__ x, const char* __restrict__ g, const Sizes& s, const Chunk& c, const Work& work, unsigned char* stage, int thread) {
  const Chunk at = S::in_g(c, work);
  const int x_channel = work.group * C::cin + work.ci, g_channel = work.group * C::cout + work.co;
  if constexpr (LAST) {
    CopiesX::copy_pixels(x, x_memory(s), c, x_channel, C::cin - work.ci, stage, thread);
    CopiesG::copy_pixels(g, g_memory(s), at, g_channel, C::cout - work.co, stage + X_BYTES, thread);
  } else {
    CopiesX::copy_rows(x, x_memory(s), c, x_channel, C::cin - work.ci, stage, thread);
    CopiesG::copy_rows(g, g_memory(s), at, g_channel, C::cout - work.co, stage + X_BYTES, thread);
  }
}

// --- multiplications -------------------------------------------------------------------------------------------------

struct Lane {                              // of a warp
  int lane, g, q;                          // row of a fragment, place in it
  int m, n, k;                             // the warp's first channels of the block, its part of K
  u32 x_phase, g_phase;                    // NCHW: elements by which row g of a chunk's tiles is misaligned, before a row's own share
};

struct Half {                              // of a step's K
  Rows q;
  int column, x_at;                        // of q; where it lies in x's tile
};

static __device__ __forceinline__ Half half_of(int step, int k, const Sizes& s, u32 x_phase) {
  const int strip = NARROW ? 2 * step + k : step, row = strip / W_STRIPS, column = strip % W_STRIPS * 8 + (NARROW ? 0 : 4 * k);
  const Rows q = S::q_row(row);
  if constexpr (LAST) return {q, column, row * C::tile_w + column};
  const int phase = C::aligned_x ? 0 : (x_phase + ((u32)(q.n * S::CIN) * s.in_d + q.d) * s.in_h * s.in_w + q.h * s.in_w) & (VEC - 1);
  return {q, column, row * C::block_ci * C::x_pitch + column + phase};
}

// Where a half begins in g's tile for a row of taps.
static __device__ __forceinline__ int g_at(const Half& half, int td, int th, const Sizes& s, u32 g_phase) {
  const Rows& q = half.q;
  const int row = (q.n * C::g_rows_d + q.d * C::q_rows_d + td * C::tap_rows_d) * C::g_rows_h + q.h * C::q_rows_h + th * C::tap_rows_h;
  if constexpr (LAST) return row * C::g_columns + half.column * C::step_w;
  const int d = q.d * C::step_d + td * C::dilation_d, h = q.h * C::step_h + th * C::dilation_h;
  const int phase = (g_phase + ((u32)(q.n * S::COUT) * s.out_d + d) * s.out_h * s.out_w + (u32)h * s.out_w) & (VEC - 1);
  return row * C::block_co * C::g_pitch + half.column * C::step_w + phase;
}

// NCHW: element e; of 16 bits elements e and e + step, as the two halves of a word.
static __device__ __forceinline__ u32 element_pair(const u32* words, int e, int step) {
  if constexpr (!NARROW) return words[e];
  int f = e + step;
  u32 selector = (e & 1 ? 0x32u : 0x10u) | (f & 1 ? 0x7600u : 0x5400u);
  return __byte_perm(words[e >> 1], words[f >> 1], selector);
}

// A register of a fragment in its parts: of IEEE float32 what TF32 has, and what it leaves.
template <int REGISTERS>
static __device__ __forceinline__ void set_parts(u32 (&parts)[PARTS][REGISTERS], int r, u32 v) {
  if constexpr (NARROW) {
    parts[0][r] = v;
  } else {
    parts[0][r] = to_tf32_quick(__uint_as_float(v));
    if constexpr (PARTS == 2) parts[1][r] = low_part(__uint_as_float(v), parts[0][r]);
  }
}

static __device__ __forceinline__ void load_x(u32 (&a)[M_FRAGMENTS][PARTS][4], const unsigned char* stage, const Half (&half)[2], const Lane& of) {
  if constexpr (LAST && NARROW) {
    int at = (of.lane >> 4 ? half[1].x_at : half[0].x_at) + (of.lane & 7);
    u32 address = shared_address(stage) + (at * C::x_pitch + of.m + (of.lane >> 3 & 1) * 8) * 2;
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; i++)
      load_matrices_turned(a[i][0], address + i * 32);
  } else {
    const u32* xs = (const u32*)stage;
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; i++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        int m = of.m + i * 16 + (r & 1) * 8 + of.g, k = r >> 1;
        u32 v;
        if constexpr (LAST) v = xs[(half[k].x_at + of.q) * C::x_pitch + m];
        else v = element_pair(xs, half[k].x_at + m * C::x_pitch + (NARROW ? 2 * of.q : of.q), 1);
        set_parts(a[i], r, v);
      }
  }
}

static __device__ __forceinline__ void load_g(u32 (&b)[N_FRAGMENTS][PARTS][2], const unsigned char* stage, const int (&base)[2], int tw, const Lane& of) {
  if constexpr (LAST && NARROW) {
    int at = (of.lane >> 3 & 1 ? base[1] : base[0]) + (of.lane & 7) * C::step_w + tw * C::dilation_w;
    u32 address = shared_address(stage) + X_BYTES + (at * C::g_pitch + of.n + (of.lane >> 4) * 8) * 2;
#pragma unroll
    for (int j = 0; j + 1 < N_FRAGMENTS; j += 2) {
      u32 two[4];
      load_matrices_turned(two, address + j * 16);
#pragma unroll
      for (int k = 0; k < 4; k++) b[j + 1 < N_FRAGMENTS ? j + k / 2 : j][0][k % 2] = two[k];
    }
    if constexpr (N_FRAGMENTS % 2) {
      u32 last = address - (of.lane >> 4) * 16 + (N_FRAGMENTS - 1) * 16;
      load_two_matrices_turned(b[N_FRAGMENTS - 1][0], last);
    }
  } else {
    const u32* gs = (const u32*)(stage + X_BYTES);
#pragma unroll
    for (int j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        int n = of.n + j * 8 + of.g;
        u32 v;
        if constexpr (LAST) v = gs[(base[k] + of.q * C::step_w + tw * C::dilation_w) * C::g_pitch + n];
        else v = element_pair(gs, base[k] + n * C::g_pitch + (NARROW ? 2 * of.q : of.q) * C::step_w + tw * C::dilation_w, C::step_w);
        set_parts(b[j], k, v);
      }
  }
}

static __device__ __forceinline__ void multiply(float (&acc)[M_FRAGMENTS][N_FRAGMENTS][4], const u32 (&a)[M_FRAGMENTS][PARTS][4], const u32 (&b)[N_FRAGMENTS][PARTS][2]) {
#pragma unroll
  for (int j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; i++) {
      if constexpr (PARTS == 2) {  // the small products first
        mma_of<C::precision>(acc[i][j], a[i][1], b[j][0][0], b[j][0][1]);
        mma_of<C::precision>(acc[i][j], a[i][0], b[j][1][0], b[j][1][1]);
      }
      mma_of<C::precision>(acc[i][j], a[i][0], b[j][0][0], b[j][0][1]);
    }
}

// One chunk of a stage: all its steps that are this warp's.
static __device__ __forceinline__ void multiply_chunk(Sums& acc, const unsigned char* stage, const Sizes& s, const Lane& of) {
#pragma unroll 1
  for (int step = of.k; step < STEPS; step += WARPS_K) {
    const Half half[2] = {half_of(step, 0, s, of.x_phase), half_of(step, 1, s, of.x_phase)};
    u32 a[M_FRAGMENTS][PARTS][4];
    load_x(a, stage, half, of);
#pragma unroll
    for (int td = 0; td < C::taps_d; td++)
#pragma unroll
      for (int th = 0; th < C::taps_h; th++) {
        const int base[2] = {g_at(half[0], td, th, s, of.g_phase), g_at(half[1], td, th, s, of.g_phase)};
#pragma unroll
        for (int tw = 0; tw < C::taps_w; tw++) {
          u32 b[N_FRAGMENTS][PARTS][2];
          load_g(b, stage, base, tw, of);
          multiply(acc[(td * C::taps_h + th) * C::taps_w + tw], a, b);
        }
      }
  }
}

// --- a block ---------------------------------------------------------------------------------------------------------

// NCHW: what lies before the border of a chunk's tile of g, and how rows of both tiles are misaligned.
static __device__ __forceinline__ void begin_rows(Lane& of, const char* x, const char* g, const Sizes& s, const Chunk& c, const Work& work, unsigned char* stage, int thread) {
  const Chunk at = S::in_g(c, work);
  const int first_x = work.group * C::cin + work.ci, first_g = work.group * C::cout + work.co;
  if (at.w < 0) {
    CopiesG::clear_left(g, g_memory(s), at, first_g, stage + X_BYTES, thread);
    __syncthreads();
  }
  // Rows 8 channels apart have the same alignment, so that a lane has one for each row of a tile.
  int channel_x = first_x + of.g, channel_g = first_g + of.g;
  of.x_phase = (u32)((u64)x / ELEMENT) + (((u32)c.n * S::CIN + channel_x) * s.in_d + c.d) * s.in_h * s.in_w + (u32)c.h * s.in_w + c.w;
  of.g_phase = (u32)((u64)g / ELEMENT) + (((u32)c.n * S::COUT + channel_g) * s.out_d + at.d) * s.out_h * s.out_w + (u32)at.h * s.out_w + at.w;
}

// The warp's part of its record: each part of K has one.
static __device__ __forceinline__ void store(const Sums& sums, char* records, const Lane& of) {
  char* record = records + ((long long)(blockIdx.x / S::TILES * WARPS_K + of.k) * S::TILES + blockIdx.x % S::TILES) * S::SUMS_BYTES;
#pragma unroll
  for (int tap = 0; tap < S::SET_TAPS; tap++)
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; i++)
#pragma unroll
      for (int j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float* pair = &sums[tap][i][j][2 * h];
          *(float2*)(record + S::sum_at(tap, of.m + i * 16 + of.g + 8 * h, of.n + j * 8 + 2 * of.q)) = make_float2(pair[0], pair[1]);
        }
}

static __device__ __forceinline__ void run(const char* __restrict__ x, const char* __restrict__ g, char* __restrict__ records, const Sizes& s, unsigned char* memory) {
  Work work;
  int split = S::take_work(work, blockIdx.x);
  int thread = threadIdx.x, warp = __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31;
  Lane of = {lane, lane >> 2, lane & 3, warp / (WARPS_K * WARPS_N) * C::warp_m, warp / WARPS_K % WARPS_N * C::warp_n, warp % WARPS_K, 0, 0};
  int begin = split * s.per_split, end = begin + s.per_split < s.chunks ? begin + s.per_split : s.chunks;

  Sums acc = {}, sum = {};
  if (begin < end) copy_chunk(x, g, s, S::chunk_at(begin, s), work, memory, thread);
  copy_commit();
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    unsigned char* stage = memory + ((i - begin) & 1) * STAGE_BYTES;
    if (i + 1 < end) copy_chunk(x, g, s, S::chunk_at(i + 1, s), work, memory + ((i + 1 - begin) & 1) * STAGE_BYTES, thread);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    if constexpr (!LAST) begin_rows(of, x, g, s, S::chunk_at(i, s), work, stage, thread);
    multiply_chunk(acc, stage, s, of);
    if constexpr (PROMOTES) {
#pragma unroll
      for (int e = 0; e < (int)(sizeof(Sums) / 4); e++) {
        (&sum[0][0][0][0])[e] += (&acc[0][0][0][0])[e];
        (&acc[0][0][0][0])[e] = 0.f;
      }
    }
    __syncthreads();
  }
  if constexpr (PROMOTES) store(sum, records, of);
  else store(acc, records, of);
}
};

template <class C>
__global__ void __launch_bounds__(WgradSync<C>::THREADS, 1)
wgrad(const char* __restrict__ x, const char* __restrict__ g, char* __restrict__ records, int batch, int in_d, int in_h, int in_w,
      int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split) {
  extern __shared__ __align__(1024) unsigned char memory[];
  WgradSync<C>::run(x, g, records, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, chunks, per_split}, memory);
}
