// Grad-weight on tensor cores: dW[ci, co, tap] = sum over images and positions q of x[ci, q] * g[co, q * STEP + tap * DIL - PAD].
//
// A GEMM whose K is the pixels: M = BLOCK_M input channels, N = BLOCK_N output channels, one accumulator for each tap of a set
// (TAPS_D x TAPS_H x TAPS_W neighbouring taps). A block takes a tile of channels, a set of taps and a range of pixel tiles
// (TILE_N x TILE_D x TILE_H x TILE_W positions q, a "chunk"): x's tile and g's with the halo of the set are copied to shared
// memory once and serve all taps of the set. mma.sync takes both operands from registers, so that a tap may begin at any
// column: fragments of x are read once a step and meet those of every tap.
//
// Shared memory: NCHW [row][channel][column], CHANNELS_LAST [row][column][channel]; pitches keep the eight rows of a fragment in
// different banks. Copies of 16 bytes (cp.async), two stages. NCHW rows of any alignment: the 16-byte units of memory that
// hold them are copied, and a row then begins (address % 16) bytes into its place.
//
// K is split over SPLITS ranges of chunks and WARPS_K warps; each writes its own partial sums, `reduce` adds them in the order of
// their index: the same bits in every run, without atomics.
#define WARPS 8
#define COPIERS (WARPS * 32)             // threads that copy
#define CI_INNERMOST 0
#define BOX_G 0
#define STACKED 0
#define ROW_CLASSES 1
#define X_ROWS_H TILE_H                  // of x's tile in a slice
#include "wgrad.cuh"

#define THREADS (WARPS * 32)
#define WARPS_M (BLOCK_CI / WARP_M)
#define WARPS_N (BLOCK_CO / WARP_N)
#define WARPS_K (WARPS / (WARPS_M * WARPS_N))
#define M_FRAGMENTS (WARP_M / 16)
#define N_FRAGMENTS (WARP_N / 8)
#define M_TILES ((CIN_G + BLOCK_CI - 1) / BLOCK_CI)
#define N_TILES ((COUT_G + BLOCK_CO - 1) / BLOCK_CO)

#define STAGE_BYTES (X_BYTES + G_BYTES)
#define STAGES 2
#define SHARED_BYTES (STAGES * STAGE_BYTES)
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

#define W_STRIPS (TILE_W / 8)              // a strip is 8 columns of a row
#define STRIPS (X_ROWS * W_STRIPS)
#define STEPS (ELEMENT == 4 ? STRIPS : STRIPS / 2)  // a matrix instruction takes one strip of float32, two of 16-bit types
#define PARTS (PRECISION == 1 ? 2 : 1)

struct Work {                              // of a block
  int group, m, n;                         // first channels within the group
  int tap_d, tap_h, tap_w;                 // first tap of the set
};

__device__ __forceinline__ void copy_chunk(const char* __restrict__ x, const char* __restrict__ g, const Sizes& s, const Chunk& c, const Work& work, unsigned char* stage, int thread) {
#if CHANNELS_LAST
  constexpr int x_extent = TILE_W, g_extent = G_COLUMNS;
#else
  constexpr int x_extent = X_UNITS, g_extent = G_UNITS;
#endif
  copy_tile<X_ROWS, BLOCK_CI, x_extent, X_PITCH, CIN, CIN_G, true>(
      x, s.batch, s.in_d, s.in_h, s.in_w, c.n, c.d, c.h, c.w, work.group * CIN_G + work.m, CIN_G - work.m, stage, thread);
  copy_tile<G_ROWS, BLOCK_CO, g_extent, G_PITCH, COUT, COUT_G, false>(
      g, s.batch, s.out_d, s.out_h, s.out_w, c.n, c.d * STEP_D + work.tap_d * DIL_D - PAD_D, c.h * STEP_H + work.tap_h * DIL_H - PAD_H,
      c.w * STEP_W + work.tap_w * DIL_W - PAD_W, work.group * COUT_G + work.n, COUT_G - work.n, stage + X_BYTES, thread);
}

// =====================================================================================================================
// Multiplications
// =====================================================================================================================

struct Lane {
  int g, q;                                // row of a fragment, place in it
  int x_phase, g_phase;                    // NCHW: elements by which row g of a tile is misaligned, before the row's own share
  int x_plane, g_plane;                    // of a row: sizes modulo VEC
};

#if !CHANNELS_LAST
#if ELEMENT == 4
__device__ __forceinline__ u32 element_pair(const u32* words, int e, int) { return words[e]; }
#else
// Elements e and e + step of 16 bits, as the two halves of a word.
__device__ __forceinline__ u32 element_pair(const u32* words, int e, int step) {
  int f = e + step;
  u32 selector = (e & 1 ? 0x32u : 0x10u) | (f & 1 ? 0x7600u : 0x5400u);
  return __byte_perm(words[e >> 1], words[f >> 1], selector);
}
#endif
#endif

// One chunk of a stage: all its steps that are this warp's.
__device__ __forceinline__ void multiply_chunk(float (&acc)[SET_TAPS][M_FRAGMENTS][N_FRAGMENTS][4], const unsigned char* stage, const Sizes& s, u32 x_phase, u32 g_phase, int warp_m, int warp_n, int warp_k, int lane) {
  const int g = lane >> 2, q = lane & 3;
  const u32* xs = (const u32*)stage;
  const u32* gs = (const u32*)(stage + X_BYTES);
#pragma unroll 1
  for (int step = warp_k; step < STEPS; step += WARPS_K) {
    int x_at[2], g_row_n[2], row_d[2], row_h[2], column[2];  // of the two halves of K
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int strip = ELEMENT == 4 ? step : 2 * step + k, row = strip / W_STRIPS;
      Rows at = x_row(row);
      g_row_n[k] = at.n * G_ROWS_D;
      row_d[k] = at.d * (DENSE_D ? STEP_D / APART_D : TAPS_D);
      row_h[k] = at.h * (DENSE_H ? STEP_H / APART_H : TAPS_H);
      column[k] = strip % W_STRIPS * 8 + (ELEMENT == 4 ? 4 * k : 0);
#if CHANNELS_LAST
      x_at[k] = row * TILE_W + column[k];
#else
      int phase = ALIGNED_X ? 0 : (x_phase + ((u32)(at.n * CIN) * s.in_d + at.d) * s.in_h * s.in_w + at.h * s.in_w) & (VEC - 1);
      x_at[k] = row * BLOCK_CI * X_PITCH + column[k] + phase;
#endif
    }
    u32 a[M_FRAGMENTS][PARTS][4];
#if CHANNELS_LAST && ELEMENT == 2
    {
      int at = (lane >> 4 ? x_at[1] : x_at[0]) + (lane & 7);
      u32 address = shared_address(stage) + (at * X_PITCH + warp_m + (lane >> 3 & 1) * 8) * 2;
#pragma unroll
      for (int i = 0; i < M_FRAGMENTS; i++)
        load_matrices_turned(a[i][0], address + i * 32);
    }
#else
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; i++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        int m = warp_m + i * 16 + (r & 1) * 8 + g, k = r >> 1;
#if CHANNELS_LAST
        u32 v = xs[(x_at[k] + q) * X_PITCH + m];
#else
        u32 v = element_pair(xs, x_at[k] + m * X_PITCH + (ELEMENT == 4 ? q : 2 * q), 1);
#endif
        if (ELEMENT == 4) {
          a[i][0][r] = to_tf32_quick(__uint_as_float(v));
          if (PARTS == 2) a[i][PARTS - 1][r] = low_part(__uint_as_float(v), a[i][0][r]);
        } else {
          a[i][0][r] = v;
        }
      }
#endif
#pragma unroll
    for (int td = 0; td < TAPS_D; td++)
#pragma unroll
      for (int th = 0; th < TAPS_H; th++) {
        int base[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          int d = row_d[k] + (DENSE_D ? td * (DIL_D / APART_D) : td), h = row_h[k] + (DENSE_H ? th * (DIL_H / APART_H) : th);
          int row = (g_row_n[k] + d) * G_ROWS_H + h;
#if CHANNELS_LAST
          base[k] = row * G_COLUMNS + column[k] * STEP_W;
#else
          int image = g_row_n[k] / G_ROWS_D, at_d = DENSE_D ? d * APART_D : row_d[k] / TAPS_D * STEP_D + td * DIL_D, at_h = DENSE_H ? h * APART_H : row_h[k] / TAPS_H * STEP_H + th * DIL_H;
          int phase = (g_phase + ((u32)(image * COUT) * s.out_d + at_d) * s.out_h * s.out_w + (u32)at_h * s.out_w) & (VEC - 1);
          base[k] = row * BLOCK_CO * G_PITCH + column[k] * STEP_W + phase;
#endif
        }
#pragma unroll
        for (int tw = 0; tw < TAPS_W; tw++) {
          const int tap = (td * TAPS_H + th) * TAPS_W + tw;
          u32 b[N_FRAGMENTS][PARTS][2];
#if CHANNELS_LAST && ELEMENT == 2
          int at = (lane >> 3 & 1 ? base[1] : base[0]) + (lane & 7) * STEP_W + tw * DIL_W;
          u32 address = shared_address(stage) + X_BYTES + (at * G_PITCH + warp_n + (lane >> 4) * 8) * 2;
#pragma unroll
          for (int j = 0; j + 1 < N_FRAGMENTS; j += 2) {
            u32 two[4];
            load_matrices_turned(two, address + j * 16);
#pragma unroll
            for (int k = 0; k < 4; k++) b[j + 1 < N_FRAGMENTS ? j + k / 2 : j][0][k % 2] = two[k];
          }
          if (N_FRAGMENTS % 2) {
            u32 last = address - (lane >> 4) * 16 + (N_FRAGMENTS - 1) * 16;
            load_two_matrices_turned(b[N_FRAGMENTS - 1][0], last);
          }
#else
#pragma unroll
          for (int j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
              int n = warp_n + j * 8 + g;
#if CHANNELS_LAST
              u32 v = gs[(base[k] + q * STEP_W + tw * DIL_W) * G_PITCH + n];
#else
              u32 v = element_pair(gs, base[k] + n * G_PITCH + (ELEMENT == 4 ? q : 2 * q) * STEP_W + tw * DIL_W, STEP_W);
#endif
              if (ELEMENT == 4) {
                b[j][0][k] = to_tf32_quick(__uint_as_float(v));
                if (PARTS == 2) b[j][PARTS - 1][k] = low_part(__uint_as_float(v), b[j][0][k]);
              } else {
                b[j][0][k] = v;
              }
            }
#endif
#pragma unroll
          for (int j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
            for (int i = 0; i < M_FRAGMENTS; i++) {
              if (PARTS == 2) {  // the small products first
                mma(acc[tap][i][j], a[i][PARTS - 1], b[j][0][0], b[j][0][1]);
                mma(acc[tap][i][j], a[i][0], b[j][PARTS - 1][0], b[j][PARTS - 1][1]);
              }
              mma(acc[tap][i][j], a[i][0], b[j][0][0], b[j][0][1]);
            }
        }
      }
  }
}

// partial: [SPLITS * WARPS_K][TAPS][CIN][COUT_G] float32.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
wgrad(const char* __restrict__ x, const char* __restrict__ g, float* __restrict__ partial, int batch, int in_d, int in_h, int in_w,
      int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, chunks, per_split};
  int index = blockIdx.x;
  Work work;                               // blocks of the same pixels are neighbours, for L2's sake
  int set = index % SETS;  index /= SETS;
  work.n = index % N_TILES * BLOCK_CO;  index /= N_TILES;
  work.m = index % M_TILES * BLOCK_CI;  index /= M_TILES;
  work.group = index % GROUPS;
  int split = index / GROUPS;
  work.tap_w = set % SETS_W * TAPS_W;
  work.tap_h = set / SETS_W % SETS_H * TAPS_H;
  work.tap_d = set / (SETS_W * SETS_H) * TAPS_D;
  int thread = threadIdx.x, warp = __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31;
  int warp_k = warp % WARPS_K, warp_n = warp / WARPS_K % WARPS_N * WARP_N, warp_m = warp / (WARPS_K * WARPS_N) * WARP_M;
  int begin = split * per_split, end = begin + per_split < chunks ? begin + per_split : chunks;

  float acc[SET_TAPS][M_FRAGMENTS][N_FRAGMENTS][4] = {};
#if PROMOTE
  float sum[SET_TAPS][M_FRAGMENTS][N_FRAGMENTS][4] = {};
#endif
  if (begin < end) copy_chunk(x, g, s, chunk_at(begin, s), work, memory, thread);
  copy_commit();
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    unsigned char* stage = memory + ((i - begin) & 1) * STAGE_BYTES;
    if (i + 1 < end) copy_chunk(x, g, s, chunk_at(i + 1, s), work, memory + ((i + 1 - begin) & 1) * STAGE_BYTES, thread);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    u32 x_phase = 0, g_phase = 0;
#if !CHANNELS_LAST
    Chunk c = chunk_at(i, s);
    int d = c.d * STEP_D + work.tap_d * DIL_D - PAD_D, h = c.h * STEP_H + work.tap_h * DIL_H - PAD_H, w = c.w * STEP_W + work.tap_w * DIL_W - PAD_W;
    int first_x = work.group * CIN_G + work.m, first_g = work.group * COUT_G + work.n;
    bool borders_x = has_borders(c.w, TILE_W, in_w), borders_g = has_borders(w, G_COLUMNS, out_w);
    if (borders_x) clear_borders<X_ROWS, BLOCK_CI, X_UNITS, X_PITCH, CIN, true>(x, in_d, in_h, in_w, c.n, c.d, c.h, c.w, first_x, stage, thread);
    if (borders_g) clear_borders<G_ROWS, BLOCK_CO, G_UNITS, G_PITCH, COUT, false>(g, out_d, out_h, out_w, c.n, d, h, w, first_g, stage + X_BYTES, thread);
    if (borders_x || borders_g) __syncthreads();
    // Rows 8 channels apart have the same alignment, so that a lane has one for each row of a tile.
    int channel_x = first_x + (lane >> 2), channel_g = first_g + (lane >> 2);
    x_phase = (u32)((u64)x / ELEMENT) + (((u32)c.n * CIN + channel_x) * in_d + c.d) * in_h * in_w + (u32)c.h * in_w + c.w;
    g_phase = (u32)((u64)g / ELEMENT) + (((u32)c.n * COUT + channel_g) * out_d + d) * out_h * out_w + (u32)h * out_w + w;
#endif
    multiply_chunk(acc, stage, s, x_phase, g_phase, warp_m, warp_n, warp_k, lane);
#if PROMOTE                                // tensor cores truncate their sums; these are rounded
#pragma unroll
    for (int e = 0; e < SET_TAPS * M_FRAGMENTS * N_FRAGMENTS * 4; e++) {
      (&sum[0][0][0][0])[e] += (&acc[0][0][0][0])[e];
      (&acc[0][0][0][0])[e] = 0.f;
    }
#endif
    __syncthreads();
  }

  const int row = lane >> 2, q = lane & 3;
  long long slice = ((long long)split * WARPS_K + warp_k) * (TAPS * CIN * (long long)COUT_G);
#pragma unroll
  for (int tap = 0; tap < SET_TAPS; tap++) {
    int kd = work.tap_d + tap / (TAPS_H * TAPS_W), kh = work.tap_h + tap / TAPS_W % TAPS_H, kw = work.tap_w + tap % TAPS_W;
    if (kd >= KERNEL_D || kh >= KERNEL_H || kw >= KERNEL_W) continue;
    float* to = partial + slice + ((long long)((kd * KERNEL_H + kh) * KERNEL_W + kw) * CIN + work.group * CIN_G) * COUT_G;
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; i++)
#pragma unroll
      for (int j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          int m = work.m + warp_m + i * 16 + row + 8 * h, n = work.n + warp_n + j * 8 + 2 * q;
#if PROMOTE
          float v0 = sum[tap][i][j][2 * h], v1 = sum[tap][i][j][2 * h + 1];
#else
          float v0 = acc[tap][i][j][2 * h], v1 = acc[tap][i][j][2 * h + 1];
#endif
          if (m >= CIN_G) continue;
          float* at = to + (long long)m * COUT_G + n;
          if (COUT_G % 2 == 0) {
            if (n < COUT_G) *(float2*)at = make_float2(v0, v1);
          } else {
            if (n < COUT_G) at[0] = v0;
            if (n + 1 < COUT_G) at[1] = v1;
          }
        }
  }
}

