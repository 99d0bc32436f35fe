// Rows: the gradient for the input of 3-D layers with strides and few channels, on tensor cores, from NCDHW rows as they lie.
// Neither boxes of the tensor copy engine (rows may begin anywhere) nor a pass that turns pixels: warps copy whole rows of the
// source (the output's gradient) in units of 16 bytes, and consumers read fragments of A from them, whatever their alignment.
//
// Pixels of a result row are M (64 x MB neighbours), output channels N. A block walks along D: step t multiplies the STEP_D source
// slices t STEP_D - PAD_D + f. Slice f meets the kernel slices f, f + STEP_D, ...: one after the other they belong to the result
// slices t, t - 1, ..., whose sums are the slots. So a source slice is read and multiplied once, as in `sweep`, all its kernel
// slices side by side. Behind a step the last slot is complete and is stored; the others move on by one.
//
// A consumer (warpgroup) has a result row of the tile. A unit of the ring is one source row of CK channels; a row that several
// consumers read is multiplied by each with its own tap of H. Weights are resident.
//
// Constants come as macros (cuda/rows.py computes them and explains each); sizes of the input are arguments.
#include "ptx.cuh"
#define A_SHARED 0
#include "wgmma.cuh"

#define VEC (16 / ELEMENT)
#define K_STEPS (CK * ELEMENT / 32)                     // a matrix instruction takes 32 bytes of K
#define CHUNKS ((CIN + CK - 1) / CK)
#define PLANE_ROWS (STEP_H * (CONSUMERS - 1) + KERNEL_H) // source rows of a tile's slice
#define PITCH_BYTES (ROW_PITCH * 16)                    // from a channel to the next
#define GROUP_PAD (ELEMENT == 4 ? 0 : 32)               // bytes behind VEC channels, so that fragments meet all banks
#define UNIT_BYTES (CK * PITCH_BYTES + (CK / VEC - 1) * GROUP_PAD)
#define SLOT_SUMS (SLOT_COLUMNS / 2)                    // a thread's of an M-row pair
#define USERS ((KERNEL_H + STEP_H - 1) / STEP_H)        // consumers of a row, at most
#define THREADS (128 + CONSUMERS * 128)
// Kernel slices that source slice f of a step meets, and those of the slices before it.
__device__ __forceinline__ constexpr int meets(int f) { return f < KERNEL_D ? (KERNEL_D - f + STEP_D - 1) / STEP_D : 0; }
__device__ __forceinline__ constexpr int met_before(int f) { return f == 0 ? 0 : met_before(f - 1) + meets(f - 1); }

#if PRECISION == 0
#define STORE_BITS(v) __float_as_uint(v)
#elif PRECISION == 2
#define STORE_BITS(v) half_bits(v)
#else
#define STORE_BITS(v) bfloat_bits(v)
#endif

// The channel of a chunk that a fragment's place in K has: lane % 4 = t, `half` 1 for its second pair of registers, `low` the place in
// a register of two. Neighbouring lanes have channels VEC apart, whose rows begin at the same place of 16 bytes.
__device__ __forceinline__ constexpr int channel_at(int step, int t, int half, int low) {
#if ELEMENT == 4
  return step * 8 + (t & 1) * 4 + (t >> 1) + half * 2;
#elif CK == 32
  return t * 8 + step * 4 + half * 2 + low;
#else
  return step * 16 + (t & 1) * 8 + (t >> 1) * 4 + half * 2 + low;
#endif
}

#include "columns.cuh"

struct Sizes {
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;    // of the source; of the result
  int segments, tiles_h, tiles_w, walks;
};

struct Walk {
  int n, h, w;
  int begin, end;                                       // result slices
};

__device__ __forceinline__ Walk walk_at(int q, const Sizes& s) {
  Walk t;
  int slices = (s.out_d + s.segments - 1) / s.segments;
  t.w = q % s.tiles_w * (MB * 64);  q /= s.tiles_w;
  t.h = q % s.tiles_h * CONSUMERS;  q /= s.tiles_h;
  t.begin = q % s.segments * slices;
  t.end = t.begin + slices < s.out_d ? t.begin + slices : s.out_d;
  t.n = q / s.segments;
  return t;
}
// Whether slice f of a step is in the source and meets a result slice of the walk.
__device__ __forceinline__ bool slice_counts(const Walk& walk, const Sizes& s, int step, int f) {
  int d = step * STEP_D - PAD_D + f;
  return meets(f) && (u32)d < (u32)s.in_d && step - meets(f) + 1 < walk.end;
}

struct Cursor {                                        // a place in the ring, and the parity of its phase
  u32 stage, parity;
  __device__ __forceinline__ void move(u32 by) {
    stage += by;
    if (stage >= STAGES) {
      stage -= STAGES;
      parity ^= 1;
    }
  }
};

// =====================================================================================================================
// Weights
// =====================================================================================================================

#define BLOCK_BYTES (SLOT_COLUMNS * 32)                 // of one kernel slice, a step of K
#define WEIGHT_STEPS (CHUNKS * KERNEL_H * KERNEL_W * K_STEPS)
#define WEIGHT_BYTES (WEIGHT_STEPS * KERNEL_D * BLOCK_BYTES)

// [slice f of a step][chunk][tap of H and W][step of K][slot, output channel][32 bytes of channels], zeros where there is none of
// either; a thread writes 16 bytes. The weight is (COUT, CIN, kernel): contiguous, or channels-last, whose taps are `tap_step` apart.
template <class Weight>
__device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  let_dependent_begin();                                // `rows`
  int i = blockIdx.x * PACK_THREADS + threadIdx.x;
  if (i >= WEIGHT_BYTES / 16) return;
  int f = 0, rest = i;
  while (rest >= WEIGHT_STEPS * meets(f) * (BLOCK_BYTES / 16)) rest -= WEIGHT_STEPS * meets(f++) * (BLOCK_BYTES / 16);
  int columns = meets(f) * SLOT_COLUMNS, unit = rest % 2, column = rest / 2 % columns, of = rest / (2 * columns);
  int step = of % K_STEPS, tap = of / K_STEPS % (KERNEL_H * KERNEL_W), chunk = of / (K_STEPS * KERNEL_H * KERNEL_W);
  int cout = column % SLOT_COLUMNS, kd = f + STEP_D * (column / SLOT_COLUMNS);
  tap += kd * (KERNEL_H * KERNEL_W);
  constexpr int KERNEL = KERNEL_D * KERNEL_H * KERNEL_W;
  u32 v[VEC];
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    int cin = chunk * CK + (ELEMENT == 4 ? channel_at(step, e, unit, 0) : channel_at(step, e / 2, unit, e % 2));
    int at = cout * (CIN * KERNEL) + (tap_step == 1 ? cin * KERNEL + tap : tap * tap_step + cin);
    v[e] = cin < CIN && cout < COUT ? operand(weight[at]) : 0;
  }
  write_operands(packed + (long long)(i - unit) * 16 + ((unit ^ (column >> 2 & 1)) << 4), v);
}

extern "C" __global__ void __launch_bounds__(PACK_THREADS) pack(const ELEMENT_TYPE* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  pack_weights(weight, packed, tap_step);
}

#if ELEMENT == 2
// The same of float32 weights, as autocast leaves them; gradients have no bias.
extern "C" __global__ void __launch_bounds__(PACK_THREADS)
pack_float(const float* __restrict__ weight, char* __restrict__ packed, int tap_step, const float* /*bias*/, ELEMENT_TYPE* /*packed_bias*/) {
  pack_weights(weight, packed, tap_step);
}
#endif

__device__ __forceinline__ void load_weights(const char* packed, u32 to, u32 barrier) {
  wait_for_results();                                   // of `pack`
  expect_bytes(barrier, WEIGHT_BYTES);
  copy_packed(to, packed, WEIGHT_BYTES, barrier);
}

// =====================================================================================================================
// Producers: four warps
// =====================================================================================================================

#define ROW_ROUNDS ((ROW_UNITS + 31) / 32)

__device__ __forceinline__ void produce(const char* __restrict__ x, const Sizes& s, u32 ring, u32 full, u32 empty, int thread) {
  int warp = thread >> 5, lane = thread & 31;
  const char* nowhere = (const char*)((u64)x & ~15ull);  // what a copy of no bytes names
  u32 slice = (u32)s.in_h * s.in_w, plane = slice * s.in_d;
  Cursor cursor = {0, 1};                               // all are free at first
#pragma unroll 1
  for (int q = blockIdx.x; q < s.walks; q += gridDim.x) {
    Walk walk = walk_at(q, s);
    int left = walk.w * STEP_W - PAD_W;                 // the tile's first column
#pragma unroll 1
    for (int i = walk.begin * STEP_D; i < (walk.end + SLOTS - 1) * STEP_D; i++) {
      int step = i / STEP_D, f = i % STEP_D, d = i - PAD_D;
      if (!slice_counts(walk, s, step, f)) continue;
      const char* corner = x + ((long long)walk.n * CIN * plane + (long long)d * slice + left) * ELEMENT;
#pragma unroll 1
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll 1
        for (int row = 0; row < PLANE_ROWS; row++, cursor.move(1)) {
          int h = walk.h * STEP_H - PAD_H + row;
          bool exists = (u32)h < (u32)s.in_h;
          barrier_wait(empty + cursor.stage * 8, cursor.parity);
          u32 to = ring + cursor.stage * UNIT_BYTES + lane * 16;
#pragma unroll
          for (int c = warp; c < CK; c += 4) {
            int channel = chunk * CK + c;
            const char* begin = corner + ((long long)channel * plane + h * s.in_w) * ELEMENT;
            int column = left - (int)((u64)begin & 15) / ELEMENT + lane * VEC;  // of the lane's unit
            const char* from = (const char*)((u64)begin & ~15ull) + lane * 16;
            bool have = exists && (CIN % CK == 0 || channel < CIN);
#pragma unroll
            for (int r = 0; r < ROW_ROUNDS; r++, column += 32 * VEC, from += 512) {
              int there = s.in_w - column;
              there = there < VEC ? there : VEC;
              bool ok = have && there > 0 && column + VEC > 0;
              if (ROW_UNITS % 32 == 0 || r + 1 < ROW_ROUNDS || lane < ROW_UNITS % 32)
                copy16(to + c * PITCH_BYTES + c / VEC * GROUP_PAD + r * 512, ok ? from : nowhere, ok ? there * ELEMENT : 0);
            }
          }
          asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(full + cursor.stage * 8) : "memory");
        }
      }
    }
  }
}

// =====================================================================================================================
// Consumers
// =====================================================================================================================

#if PRECISION == 0
#define SIGNS ", 1, 1, 1"
#else
#define SIGNS ", 1, 1, 1, 0"
#endif
// Rows of 32 bytes, swizzled; groups of 8 lie one behind the other.
#define DESCRIPTOR(start) ((u64)(256 >> 4) << 32 | (u64)3 << 62 | (u64)1 << 16 | (start))

template <int COUNT>  // of kernel slices, whose results are the first slots
__device__ __forceinline__ void multiply(float (&d)[SLOTS * SLOT_SUMS], const u32 (&a)[4], u64 b) {
  if constexpr (COUNT == SLOTS)
    asm volatile("wgmma.mma_async.sync.aligned.m64n" ALL_COLUMNS TYPES " {" ALL_REGISTERS "}, " ALL_A_AND_B SIGNS ";\n" : ALL_SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#if SLOTS > 1
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n" LESS_COLUMNS TYPES " {" LESS_REGISTERS "}, " LESS_A_AND_B SIGNS ";\n" : LESS_SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

__device__ __forceinline__ void release(u32 barrier, int count) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0], %1;\n}\n" ::"r"(barrier), "r"(count) : "memory");
}

struct Lane {
  u32 plane;                                            // of the source; of all counts of elements only the place in 16 bytes counts
  u32 at;                                               // byte of the lane's first channel and pixel in a unit whose rows begin at 16 bytes
  u32 phase;                                            // where that channel of the walk's image begins
  int column;                                           // of the first tap of the first pixel
};

// acc += a unit's row x the weights of a tap of H; `phase`: of the row's first column.
template <int F>
__device__ __forceinline__ void multiply_row(float (&acc)[MB][SLOTS * SLOT_SUMS], const Lane& lane, u32 unit, u32 phase, u32 weights, u32 empty, int count) {
#pragma unroll
  for (int step = 0; step < K_STEPS; step++) {
    u32 a[KERNEL_W][MB][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 from[ELEMENT == 4 ? 1 : 2];
#pragma unroll
      for (int low = 0; low < (ELEMENT == 4 ? 1 : 2); low++) {
        const int c = channel_at(step, 0, half, low);
        from[low] = unit + lane.at + c * PITCH_BYTES + ((phase + c * lane.plane) & (VEC - 1)) * ELEMENT;
      }
#pragma unroll
      for (int kw = 0; kw < KERNEL_W; kw++)
#pragma unroll
        for (int m = 0; m < MB; m++)
#pragma unroll
          for (int eight = 0; eight < 2; eight++) {
            const int columns = STEP_W * (m * 64 + eight * 8) + kw;
#if ELEMENT == 4
            u32 v = to_tf32(load_shared_f32(from[0] + columns * 4));
#else
            u32 v = load_shared_u16(from[0] + columns * 2) | load_shared_u16(from[1] + columns * 2) << 16;
#endif
            if (columns < PAD_W) v = lane.column + columns < 0 ? 0 : v;
            a[kw][m][half * 2 + eight] = v;
          }
    }
#pragma unroll
    for (int i = 0; i < KERNEL_W * MB * 4; i++) asm volatile("" : "+r"(a[i / (MB * 4)][i / 4 % MB][i % 4]));
    wgmma_fence();
#pragma unroll
    for (int kw = 0; kw < KERNEL_W; kw++)
#pragma unroll
      for (int m = 0; m < MB; m++)
        multiply<meets(F)>(acc[m], a[kw][m], DESCRIPTOR(weights + (kw * K_STEPS + step) * (meets(F) * BLOCK_BYTES / 16)));
    wgmma_commit();
    if (step == K_STEPS - 1) {                          // behind what takes the loaded values: the arrival does not wait for loads (phases.cu)
      __syncwarp();
      if ((threadIdx.x & 31) == 0) release(empty, count);
    }
    wgmma_wait<0>();
  }
}

// Consumers that read row `row` of a tile's slice; the first of them releases it for those that it lacks of USERS.
__device__ __forceinline__ int releases(int row, int wg) {
  int first = row < KERNEL_H ? 0 : (row - KERNEL_H) / STEP_H + 1, last = row / STEP_H;
  last = last < CONSUMERS ? last : CONSUMERS - 1;
  return wg == first ? USERS - (last - first) : 1;
}

template <int F>
__device__ __forceinline__ void multiply_slice(float (&acc)[MB][SLOTS * SLOT_SUMS], const Lane& lane, u32 phase, const Sizes& s, Cursor& cursor, u32 ring, u32 full, u32 empty, u32 weights, int wg) {
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
    for (int kh = 0; kh < KERNEL_H; kh++) {
      Cursor at = cursor;
      at.move(wg * STEP_H + kh);
      barrier_wait(full + at.stage * 8, at.parity);
      u32 of = weights + ((met_before(F) * WEIGHT_STEPS + (chunk * KERNEL_H + kh) * (KERNEL_W * K_STEPS) * meets(F)) * BLOCK_BYTES >> 4);
      multiply_row<F>(acc, lane, ring + at.stage * UNIT_BYTES, phase + kh * s.in_w, uniform(of), empty + at.stage * 8, releases(wg * STEP_H + kh, wg));
    }
    cursor.move(PLANE_ROWS);
  }
}

template <int F>
__device__ __forceinline__ void multiply_step(float (&acc)[MB][SLOTS * SLOT_SUMS], const Lane& lane, u32 phase, const Walk& walk, const Sizes& s, int step, Cursor& cursor, u32 ring, u32 full, u32 empty, u32 weights, int wg) {
  if constexpr (F < STEP_D) {
    if (slice_counts(walk, s, step, F)) multiply_slice<F>(acc, lane, phase + (step * STEP_D - PAD_D + F) * s.in_h * s.in_w, s, cursor, ring, full, empty, weights, wg);
    multiply_step<F + 1>(acc, lane, phase, walk, s, step, cursor, ring, full, empty, weights, wg);
  }
}

// The last slot's sums: a row of the result. Eight lanes store neighbours, a whole sector of float32.
__device__ __forceinline__ void store_row(const float (&acc)[MB][SLOTS * SLOT_SUMS], char* __restrict__ y, const Sizes& s, const Walk& walk, int d, int wg, int thread) {
  int h = walk.h + wg, w = walk.w + (thread >> 5) * 16 + ((thread & 31) >> 2), first = thread % 4 * 2;
  long long plane = (long long)s.out_d * s.out_h * s.out_w * ELEMENT;
  y += (walk.n * COUT + first) * plane + (((long long)d * s.out_h + h) * s.out_w + w) * ELEMENT;
#pragma unroll
  for (int j = 0; j < SLOT_COLUMNS / 8; j++)
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int m = 0; m < MB; m++)
#pragma unroll
        for (int eight = 0; eight < 2; eight++) {
          const int pixel = m * 64 + eight * 8;
          bool ok = h < s.out_h && w + pixel < s.out_w && (COUT % 8 == 0 || 8 * j + first + c < COUT);
          char* to = y + (8 * j + c) * plane + pixel * ELEMENT;
          float v = acc[m][(SLOTS - 1) * SLOT_SUMS + 4 * j + 2 * eight + c];
#if ELEMENT == 4
          store_global_if(to, __float_as_uint(v), ok);
#else
          store_global_16_if(to, STORE_BITS(v), ok);
#endif
        }
}

__device__ __forceinline__ void consume(u32 x, char* y, const Sizes& s, u32 ring, u32 full, u32 empty, u32 weights, int wg, int thread) {
  int t = thread & 3, pixel = (thread >> 5) * 16 + ((thread & 31) >> 2), channel = channel_at(0, t, 0, 0);
  Lane lane;
  lane.plane = (u32)s.in_d * s.in_h * s.in_w;
  lane.at = channel * PITCH_BYTES + channel / VEC * GROUP_PAD + pixel * (STEP_W * ELEMENT);
  Cursor cursor = {0, 0};
  float acc[MB][SLOTS * SLOT_SUMS];
#pragma unroll 1
  for (int q = blockIdx.x; q < s.walks; q += gridDim.x) {
    Walk walk = walk_at(q, s);
    int left = walk.w * STEP_W - PAD_W;
    lane.column = left + pixel * STEP_W;
    lane.phase = x / ELEMENT + ((u32)walk.n * CIN + channel) * lane.plane + left;
    u32 phase = lane.phase + ((walk.h + wg) * STEP_H - PAD_H) * s.in_w;
#pragma unroll 1
    for (int step = walk.begin; step < walk.end + SLOTS - 1; step++) {
#pragma unroll
      for (int m = 0; m < MB; m++)
#pragma unroll
        for (int i = SLOTS * SLOT_SUMS - 1; i >= 0; i--) {
          const bool carried = i >= SLOT_SUMS;
          acc[m][i] = carried && step > walk.begin ? acc[m][carried ? i - SLOT_SUMS : i] : 0.f;
          asm volatile("" : "+f"(acc[m][i]));           // here, not behind a fence of wgmma: ptxas would serialise all (C7519)
        }
      multiply_step<0>(acc, lane, phase, walk, s, step, cursor, ring, full, empty, weights, wg);
      if (step - walk.begin >= SLOTS - 1) store_row(acc, y, s, walk, step - (SLOTS - 1), wg, thread);
    }
  }
}

// =====================================================================================================================

#define WEIGHTS_AT 0
#define RING_AT (WEIGHT_BYTES)
#define BARRIERS_AT (RING_AT + STAGES * UNIT_BYTES)
#define SHARED_BYTES (BARRIERS_AT + 16 * STAGES + 8)
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
rows(const char* __restrict__ x, const char* __restrict__ packed, char* __restrict__ y,
     int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int segments, int tiles_h, int tiles_w, int walks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, segments, tiles_h, tiles_w, walks};
  u32 base = shared_address(memory), full = base + BARRIERS_AT, empty = full + 8 * STAGES, loaded = empty + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 128);
      barrier_init(empty + 8 * i, USERS * 4);
    }
    barrier_init(loaded, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x == 0) load_weights(packed, base + WEIGHTS_AT, loaded);
    __syncwarp();
    produce(x, s, base + RING_AT, full, empty, thread);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(CONSUMER_REGISTERS));
    wait_for_results();                                 // of `pack`: nothing is stored where it may still read
    barrier_wait(loaded, 0);
    consume((u32)(u64)x, y, s, base + RING_AT, full, empty, (base + WEIGHTS_AT) >> 4, role - 1, thread);
  }
}
