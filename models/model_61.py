"""KernelBench level 1, problem 61: a transposed convolution with CUDA kernels of its own, in one file.

Layer: ConvTranspose3d(48, 48, kernel_size=(3, 3, 3), stride=(1, 1, 1), padding=(0, 0, 0), output_padding=(0, 0, 0),
dilation=(1, 1, 1), groups=1).

ModelNew has the constructor, the parameters (equal under a seed) and the state_dict of the original, and computes
forward, first and second gradients with the kernels below, chosen for inputs of 8 x 48 x 64 x 64 x 64 on an NVIDIA
H200 and serve every batch and spatial size.

Constraints:
- CUDA devices of sm_90a; nvcc, a C++ compiler and ninja at the first call, which takes a minute.
- Values: float32, rounded to TF32 (nearest even) and multiplied on tensor cores, as PyTorch's defaults have it;
  where its flags ask for IEEE float32 a call raises.
- Tensors in other than the contiguous memory format are copied to it first; results are contiguous.
- Results are bit-equal from run to run. Under torch.autocast the layer wants its own dtype all the same.

Kernels:
- forward (rows of 52, 56, 60 or 64 columns): rows joined to one: wgmma tf32, tile of 248 places x 64 channels, 4
  stages of 384 places x 8 channels, 6 of 8 x 64 pixels, 4 of 5 taps, 218 KB shared.
- forward: wgmma tf32, tile 1x2x8x24 (NxDxHxW of q) x 64 rows, chunk of 8 channels, pixels halved, weights ring of 5
  x 5 fragments, 196 KB shared.
- forward (other widths than multiples of 4): wgmma tf32, tile 1x2x8x24 (NxDxHxW of q) x 64 rows, chunk of 8
  channels, pixels halved, weights ring of 5 x 5 fragments, 206 KB shared.
- gradient for the input: wgmma tf32, tile 1x2x8x32 (NxDxHxW of q) x 64 rows, chunk of 8 channels, pixels halved,
  weights ring of 3 x 5 fragments, 226 KB shared.
- gradient for the weight: wgmma of up to 3 rows tf32, 64x64 channels x 1x3x3 taps a block, chunks of 1x1x2x64
  (NxDxHxW of q), K in 44 slices, 204 KB shared.
- gradient for the weight (other widths than multiples of 4): mma.sync tf32, 64x16 channels x 3x3x3 taps a block,
  chunks of 1x4x4x8 (NxDxHxW of q), K in 44 slices, 186 KB shared.

Measured by `upconv bench --suite kernelbench --as-exported --device cuda`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import shutil
import threading
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import cpp_extension

# --- the layer that everything here is specialised for ---------------------------------------------------------------

IN_CHANNELS, OUT_CHANNELS, GROUPS = 48, 48, 1
KERNEL, STRIDE, PADDING = (3, 3, 3), (1, 1, 1), (0, 0, 0)
OUTPUT_PADDING, DILATION = (0, 0, 0), (1, 1, 1)
DTYPE, FORMAT = torch.float32, torch.contiguous_format
RANK, WEIGHTS = 3, 62208
BANDWIDTH = 4.2e12  # of the device memory in bytes/s, for the planner's model
SUM_BYTES = 96 << 20  # of the weight gradient's slices of sums, at most
CAPABILITY = (9, 0)  # of the GPUs that the kernels are compiled for: sm_90a

# --- CUDA C++ --------------------------------------------------------------------------------------------------------

CUDA = r"""
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

// =====================================================================================================================
// Forward where rows have 52, 56, 60 or 64 columns: rows joined to one: wgmma tf32, tile of 248 places x 64 channels, 4
// stages of 384 places x 8 channels, 6 of 8 x 64 pixels, 4 of 5 taps, 218 KB shared.
// =====================================================================================================================

namespace forward_joined {

// Joined: a transposed convolution without strides, NCHW, on tensor cores, whose rows are joined to one: forward, or
// (FLIPPED) the gradient for the input, which is the same with flipped taps. Without padding along W a row of the
// result is longer than one of the source by as much as the kernel reaches; with as many zeros behind each of the
// source's rows, place f of a slice's results, counted through its rows, has its taps of a slice of the kernel at
//
//     f - kh (DILATION_H pitch) - kw DILATION_W,       pitch: results of a row
//
// of the source's places. So a tile is PLACES neighbouring places of whatever rows, of which none is wasted at an
// image's right border, and a channel's results of a tile are neighbours in memory, stored 16 bytes a lane. (`gather`
// has rectangles as tiles: it computes columns beyond the image, and its rows end in the middle of memory's sectors.)
// LINE: one row of any length, of which a tile reads its part, and any padding.
//
// Channels of the result are M, places N: one matrix instruction has all of a consumer's, B is SPAN rows of 32 bytes of
// channels, and a tap is another first row. Weights are A, by descriptor, through a ring of TAPS_OF_STAGE taps a stage.
//
// A stage of pixels is a chunk of channels of one slice of the kernel. The copy engine brings the rows of the source
// that a tile and its halo touch to a slot (what lies beyond the source is zeros), and TURNERS warps pass them on as
// rows of channels. (One instruction of 256 columns wants 154 registers as the kernel is compiled: 384 threads, two
// warps of which turn, not 512 and six.)
//
// Consumers take whole tiles in turn, so that one stores while another multiplies, and the rings run on from tile to
// tile. One begins to wait for its stages when the other has all of its own: a barrier's parity tells a phase from the
// next, not from the one behind that.
//
// Sizes of the input are arguments.

constexpr int ELEMENT = 4;  // bytes of an element
constexpr int CIN = 48;  // channels of what is read
constexpr int COUT = 48;  // channels of what is written
constexpr int PLACES = 248;
constexpr int SPAN = 384;
constexpr int ROWS = 8;
constexpr int BOX_W = 64;
constexpr int BOXES = 1;
constexpr int STAGES = 4;
constexpr int STAGES_S = 6;
constexpr int STAGES_W = 4;
constexpr int WARPS_OF_STAGE = 1;
constexpr int TAPS_OF_STAGE = 5;
constexpr int KERNEL_D = 3, KERNEL_H = 3, KERNEL_W = 3;
constexpr int DILATION_D = 1, DILATION_H = 1, DILATION_W = 1;
constexpr int PADDING_D = 0, PADDING_H = 0;

// PTX in small wrappers, so that a kernel body reads as an algorithm.
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Dependent launches (sm_90): a kernel launched so begins when all blocks of the one before let it; else these do nothing.
__device__ __forceinline__ void let_dependent_begin() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
// And waits for what that one wrote.
__device__ __forceinline__ void wait_for_results() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

// --- mbarriers: `count` arrivals (and the announced bytes) complete a phase; waits name the phase by its parity -------

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(count));
}
// What was initialised is seen by copies and, in a cluster, by other blocks.
__device__ __forceinline__ void barriers_begun() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}
// One thread arrives, and the phase waits for so many bytes of copies too.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_done(barrier, parity)) {}
}

// --- bulk copies (sm_90): one thread starts them; those to shared memory count at a barrier, those from it in groups ---

struct alignas(64) TensorMap { u64 opaque[16]; };  // a CUtensorMap

// Whole 16 bytes.
__device__ __forceinline__ void copy_bulk(u32 to, const char* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// A box of a tensor, whose first element has these coordinates, innermost first; zeros where the tensor has none.
__device__ __forceinline__ void load_box(u32 to, const TensorMap& map, int a, int b, int c, int d, int e, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];\n"
      ::"r"(to), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(barrier) : "memory");
}
// What the thread stored in shared memory, or anywhere, is seen by wgmma and bulk copies behind it.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// --- loads and stores ------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 load_shared_u32_if(u32 a, bool ok) {  // else 0
  u32 v = 0;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p ld.shared.u32 %0, [%1];\n}\n" : "+r"(v) : "r"(a),
      "r"((u32)ok) : "memory");
  return v;
}
__device__ __forceinline__ void load_shared_128(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]),
      "=r"(v[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void store_shared_128(u32 a, u32 v0, u32 v1, u32 v2, u32 v3) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"r"(a), "r"(v0), "r"(v1), "r"(v2), "r"(v3) : "memory");
}
__device__ __forceinline__ void store_shared_f32x2(u32 a, float v, float w) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};\n" ::"r"(a), "f"(v), "f"(w) : "memory");
}

// Stores under a predicate, never a branch: ptxas makes hundreds of branches of an epilogue.
__device__ __forceinline__ void store_global_if(void* to, u32 v, bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p st.global.u32 [%0], %1;\n}\n" ::"l"(to), "r"(v),
      "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_128_if(void* to, const u32 (&v)[4], bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p st.global.v4.u32 [%0], {%1,%2,%3,%4};\n}\n" ::"l"(to),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"((u32)ok) : "memory");
}

// --- the compiler and registers --------------------------------------------------------------------------------------

// The compiler knows no more of a value than its type: what follows from it is computed behind this, and sums are set ahead of a
// fence of wgmma, not behind it, where ptxas would wait for every instruction (C7519).
__device__ __forceinline__ void opaque(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void opaque(u32& v) { asm volatile("" : "+r"(v)); }
// A warpgroup's registers for each thread (sm_90a): some are given back, or more taken.
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}

// --- numbers ---------------------------------------------------------------------------------------------------------

// Nearest TF32, ties to even, as cuDNN rounds: with it results agree with cuDNN to 3e-6, with rna to 5e-5.
__device__ __forceinline__ u32 to_tf32(float v) {
  u32 r;
  asm("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(v));
  return r;
}

// --- matrix instructions ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}
// TAIL: signs of A and B, and how they lie.
__device__ __forceinline__ u64 descriptor_of(u64 a) { return a; }
__device__ __forceinline__ u64 descriptor_of(const u32 (&a)[4]) { return (u64)a[1] << 32 | a[0]; }
#define OPERANDS(a, b) "l"(descriptor_of(a)), "l"(b)

// WGMMA_N(d, a, b, scale): `scale` "1", or "0" for D = A B.
#define SUMS(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define INSTRUCTION(n, registers, a0, b0, unused1, unused2, unused3, scale) \
  "wgmma.mma_async.sync.aligned.m64n" n "k8.f32.tf32.tf32" " {" registers "}, " a0 ", " b0 ", " scale ", 1, 1" ";\n"
#define WGMMA_248(d, a, b, scale) asm volatile(INSTRUCTION("248", \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" "," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31" "," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" "," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63" "," \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" "," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" "," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" "," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123", "%124", "%125", "%126", "%127", "%128", scale) : \
    SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80), SUMS(d, 96), SUMS_4(d, 112), \
    SUMS_4(d, 116), SUMS_4(d, 120) : OPERANDS(a, b))

// a kernel's only width
template <int SUMS, class Operand>
__device__ __forceinline__ void multiply(float (&d)[SUMS], const Operand& a, u64 b) { WGMMA_248(d, a, b, "1"); }
#define VALUE(v) (v)

constexpr int VEC = 16 / ELEMENT;

// What kernels share whose columns of N are output channels (sweep, subpixel, pairs, implicit, phases),
// or whose rows of M are (joined): packing what their operand of weights is, and counting in its descriptors.
// A kernel that includes this has ELEMENT, VEC, and STORE_BITS(v): a float32 as it is stored.
constexpr int PACK_THREADS = 256;

__device__ __forceinline__ u32 operand(float v) { return to_tf32(v); }

// 16 bytes of neighbouring operands.
__device__ __forceinline__ void write_operands(char* to, const u32 (&v)[VEC]) {
  *(uint4*)to = make_uint4(v[0], v[1], v[2], v[3]);
}

// so that ptxas counts in uniform registers
__device__ __forceinline__ u32 uniform(u32 v) { return __shfl_sync(0xffffffffu, v, 0); }

// The ring of STAGES that one thread fills by the tensor copy engine (of `joined` warps, from another ring) and
// consumers empty: shared by `joined`, `subpixel`, `pairs`, `implicit` and `phases`.
template <int COUNT>
struct CursorOf {  // a place in a ring of COUNT stages, and the parity of its phase
  u32 stage, parity;
  __device__ __forceinline__ void next() {
    if (++stage == COUNT) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void move(u32 by) {
    u32 at = stage + by;
    stage = at % COUNT;
    parity ^= at / COUNT & 1;
  }
};
typedef CursorOf<STAGES> Cursor;

// What no matrix instruction reads any more, by its barrier; 0: nothing.
__device__ __forceinline__ void give_back(u32 barrier, int lane) {
  __syncwarp();
  if (lane == 0 && barrier) barrier_arrive(barrier);
}

constexpr int CK = 32 / ELEMENT;  // channels of a chunk: a matrix instruction takes 32 bytes of K
constexpr int CHUNKS = (CIN + CK - 1) / CK;
constexpr int ROWS_M = 64;
constexpr int BLOCKS_M = (COUT + ROWS_M - 1) / ROWS_M;
constexpr int TAPS = KERNEL_H * KERNEL_W;  // of a slice
constexpr int STAGES_OF_SLICE = (TAPS + TAPS_OF_STAGE - 1) / TAPS_OF_STAGE;
constexpr int TAP_BYTES = ROWS_M * 32;
constexpr int STAGE_BYTES = SPAN * 32;
constexpr int WEIGHT_BYTES = TAPS_OF_STAGE * TAP_BYTES;
constexpr int BOX_COLUMNS = BOX_W / BOXES;
constexpr int CHANNEL_BYTES = ROWS * BOX_COLUMNS * 4;
constexpr int BOX_BYTES = CK * CHANNEL_BYTES;  // [channel][row][column]
constexpr int SLOT_BYTES = BOXES * BOX_BYTES;
constexpr int OUT_SPAN = 512;  // bytes of a channel that are stored at a time
constexpr int OUT_PLACES = OUT_SPAN / ELEMENT;
constexpr int OUT_PITCH = OUT_SPAN + 32;  // so that channels meet different banks, and begin as late as in memory
constexpr int OUT_BYTES = 8 * OUT_PITCH;  // of a warp: eight channels

constexpr int CONSUMERS = 2;
constexpr int TURNERS = 2;
constexpr int TURNER_THREADS = TURNERS * 32;
constexpr int THREADS = 128 + CONSUMERS * 128;

struct Sizes {
  int in_d, out_d, pitch, plane;                        // pitch, plane: places of a row and of a slice of the result
  int tiles_f, tiles;                                   // of a slice's places; all, times BLOCKS_M
};

struct Tile { int n, d, block, f; };  // image, slice, block of channels, first place

// Neighbouring blocks have the same places.
__device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  int q = index / BLOCKS_M, slice = q / s.tiles_f;
  return {slice / s.out_d, slice % s.out_d, index % BLOCKS_M, q % s.tiles_f * PLACES};
}
__device__ __forceinline__ int halo(const Sizes& s) {
  return (KERNEL_H - 1) * DILATION_H * s.pitch + (KERNEL_W - 1) * DILATION_W;
}

// The kernel's slices that meet the source's; of others nothing is loaded or multiplied.
struct Slices { int first, count; };
__device__ __forceinline__ Slices slices_of(const Tile& t, const Sizes& s) {
  int d = t.d + PADDING_D, first = d < s.in_d ? 0 : (d - s.in_d) / DILATION_D + 1, last = d / DILATION_D;
  if (last > KERNEL_D - 1) last = KERNEL_D - 1;
  return {first, last < first ? 0 : last - first + 1};
}

// Where a tile's slots begin in the source, and how many of a slot's places lie ahead of the tile's first with its
// halo. Rows ahead of the first are -1 and so on; LINE: a box begins at 16 bytes.
struct Corner { int row, w, ahead; };
__device__ __forceinline__ Corner corner_of(const Tile& t, const Sizes& s) {
  int f = t.f - halo(s);
  int row = f >= 0 ? f / s.pitch : -((s.pitch - 1 - f) / s.pitch);
  return {row + PADDING_H, 0, f - row * s.pitch};
}

// =====================================================================================================================
// Weights
// =====================================================================================================================

constexpr int PACK_UNITS = BLOCKS_M * CHUNKS * KERNEL_D * TAPS * ROWS_M * 2;

// swizzled
__device__ __forceinline__ u32 unit_at(int row, int unit) { return row * 32 + ((unit ^ (row >> 2 & 1)) << 4); }

// [block][chunk][slice][tap][channel of the result][32 bytes of channels, swizzled], zeros where there is none of
// either; a thread writes 16 bytes. The weight is (CIN, COUT, kernel), FLIPPED (COUT, CIN, kernel): contiguous, or
// channels-last, whose taps are `tap_step` elements apart.
template <class Weight>
__device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed,
    int tap_step) {
  let_dependent_begin();                                // `joined`
  int i = blockIdx.x * PACK_THREADS + threadIdx.x;
  if (i >= PACK_UNITS) return;
  constexpr int KERNEL = KERNEL_D * TAPS, SECOND = COUT;
  int unit = i % 2, row = i / 2 % ROWS_M, rest = i / (2 * ROWS_M), tap = rest % KERNEL, chunk = rest / KERNEL % CHUNKS;
  int cout = rest / (KERNEL * CHUNKS) * ROWS_M + row;
  u32 v[VEC];
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    int cin = chunk * CK + unit * VEC + e, first = cin, second = cout;
    int at = first * (SECOND * KERNEL) + (tap_step == 1 ? second * KERNEL + tap : tap * tap_step + second);
    v[e] = cin < CIN && cout < COUT ? operand(weight[at]) : 0;
  }
  write_operands(packed + (long long)rest * TAP_BYTES + unit_at(row, unit), v);
}

// The kernels that pack weights for `joined`, `sweep`, `subpixel`, `pairs`, `implicit` and
// `phases`, which define `pack_weights` before.
__global__ void __launch_bounds__(PACK_THREADS) pack(const float* __restrict__ weight, char* __restrict__ packed,
    int tap_step) {
  pack_weights(weight, packed, tap_step);
}

// =====================================================================================================================
// Producers: a thread for weights, one for pixels, warps that turn these
// =====================================================================================================================

typedef CursorOf<STAGES_S> SlotCursor;
typedef CursorOf<STAGES_W> WeightCursor;

__device__ __forceinline__ void bring_weights(const char* __restrict__ packed, const Sizes& s, u32 ring, u32 full,
    u32 empty) {
  WeightCursor cursor = {0, 1};                         // all are free at first
  wait_for_results();                                   // of `pack`
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    const Tile t = tile_at(index, s);
    const Slices slices = slices_of(t, s);
    const char* from = packed + ((long long)t.block * (CHUNKS * KERNEL_D) + slices.first) * (TAPS * TAP_BYTES);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++, from += (KERNEL_D - slices.count) * (TAPS * TAP_BYTES))
#pragma unroll 1
      for (int slice = 0; slice < slices.count; slice++)
#pragma unroll 1
        for (int tap = 0; tap < TAPS; tap += TAPS_OF_STAGE, cursor.next()) {
          u32 barrier = full + cursor.stage * 8,
              bytes = (TAPS - tap > TAPS_OF_STAGE ? TAPS_OF_STAGE : TAPS - tap) * TAP_BYTES;
          barrier_wait(empty + cursor.stage * 8, cursor.parity);
          expect_bytes(barrier, bytes);
          copy_bulk(ring + cursor.stage * WEIGHT_BYTES, from, bytes, barrier);
          from += bytes;
        }
  }
}

// A thread of its own: a copy takes longer where the thread also starts those of weights, or turns pixels
// (docs/experiments.md).
__device__ __forceinline__ void bring_pixels(const TensorMap& map, const Sizes& s, u32 slots, u32 landed, u32 left) {
  SlotCursor cursor = {0, 1};
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    const Tile t = tile_at(index, s);
    const Slices slices = slices_of(t, s);
    const Corner corner = corner_of(t, s);
    int first = t.d + PADDING_D - slices.first * DILATION_D;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll 1
      for (int d = first; d > first - slices.count * DILATION_D; d -= DILATION_D, cursor.next()) {
        u32 to = slots + cursor.stage * SLOT_BYTES, barrier = landed + cursor.stage * 8;
        barrier_wait(left + cursor.stage * 8, cursor.parity);
        expect_bytes(barrier, SLOT_BYTES);
#pragma unroll
        for (int b = 0; b < BOXES; b++) {
          int w = corner.w + b * BOX_COLUMNS, c = chunk * CK;
          load_box(to + b * BOX_BYTES, map, w, corner.row, d, c, t.n, barrier);
        }
      }
  }
}
constexpr int LANES = WARPS_OF_STAGE * 32;
constexpr int OWN_PIXELS = (SPAN + LANES - 1) / LANES;
constexpr int AT_ONCE = 3;

// What a slot has, from its place `ahead` on, as rows of CK channels. Loads of several places come before their stores,
// so that a thread waits for memory once, not once a place (docs/experiments.md).
// A lane a place, so that loads and stores meet all banks; `from`: where a slot has its places, ~0: nowhere. The engine
// has rounded to TF32.
__device__ __forceinline__ void turn(const u32 (&from)[OWN_PIXELS], int span, u32 slot, u32 stage, int lane) {
#pragma unroll
  for (int first = 0; first < OWN_PIXELS; first += AT_ONCE) {
    u32 v[AT_ONCE][8];
#pragma unroll
    for (int i = 0; i < AT_ONCE && first + i < OWN_PIXELS; i++)
#pragma unroll
      for (int c = 0; c < 8; c++)
        v[i][c] = load_shared_u32_if(slot + from[first + i] + c * CHANNEL_BYTES, from[first + i] != ~0u);
#pragma unroll
    for (int i = 0; i < AT_ONCE && first + i < OWN_PIXELS; i++) {
      int p = lane + (first + i) * LANES;
      if (p >= span) break;
      store_shared_128(stage + unit_at(p, 0), v[i][0], v[i][1], v[i][2], v[i][3]);
      store_shared_128(stage + unit_at(p, 1), v[i][4], v[i][5], v[i][6], v[i][7]);
    }
  }
}

__device__ __forceinline__ void turn_pixels(const Sizes& s, u32 slots, u32 landed, u32 left, u32 stages, u32 full,
    u32 empty, u32 trash, int thread) {
  SlotCursor slot = {0, 0};
  Cursor stage = {0, 1};
  int turn_of = 0, warp = thread >> 5, lane = thread % LANES, span = PLACES + halo(s);
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    const Tile t = tile_at(index, s);
    int ahead = corner_of(t, s).ahead;
    u32 from[OWN_PIXELS];
#pragma unroll
    for (int k = 0; k < OWN_PIXELS; k++) {
      int p = lane + k * LANES, row = (ahead + p) / s.pitch, w = ahead + p - row * s.pitch;
      from[k] = w < BOX_W && p < span ? w / BOX_COLUMNS * BOX_BYTES + (row * BOX_COLUMNS + w % BOX_COLUMNS) * 4 : ~0u;
    }
#pragma unroll 1
    for (int i = CHUNKS * slices_of(t, s).count; i > 0; i--, slot.next(), stage.next()) {
      bool others = turn_of != warp;
      turn_of = (turn_of + 1) % TURNERS;
      if (others) continue;
      barrier_wait(landed + slot.stage * 8, slot.parity);
      barrier_wait(empty + stage.stage * 8, stage.parity);
      turn(from, span, slots + slot.stage * SLOT_BYTES, stages + stage.stage * STAGE_BYTES, lane);
      fence_async_shared();
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(full + stage.stage * 8);
      if (thread % 32 == 0) barrier_arrive(left + slot.stage * 8);
    }
  }
}

// =====================================================================================================================
// Consumers
// =====================================================================================================================

__device__ __forceinline__ u32 lower(u32 address) { return address >> 4 | 1u << 16; }

// A thread's sums: of channels g and g + 8 of its warp's 16, places 8j + 2t and the next. The buffer has a channel's as
// many bytes late as they begin in 16 of memory, so that lanes store whole 16, an instruction a channel's; up to three
// words at either end follow. The copy engine would be slower: it takes a copy for each channel (docs/experiments.md).
__device__ __forceinline__ void store(const float (&acc)[PLACES / 2], const float* __restrict__ bias,
    char* __restrict__ y, const Sizes& s, const Tile& t, u32 buffer, int warp, int lane) {
  int g = lane >> 2, q = lane & 3, block = t.block * ROWS_M + warp * 16;
  int left = (s.plane - t.f < PLACES ? s.plane - t.f : PLACES) * ELEMENT;
  long long plane = (long long)s.out_d * s.plane * ELEMENT;  // of a channel
  y += ((long long)t.n * COUT + block) * plane + ((long long)t.d * s.plane + t.f) * ELEMENT;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int channel = block + 8 * h + g;
    float b = bias && channel < COUT ? VALUE(bias[channel]) : 0.f;
    char* to = y + 8 * h * plane;
    u32 late = (u32)(u64)(to + g * plane) & 15, from = buffer + g * OUT_PITCH;
#pragma unroll
    for (int first = 0; first < PLACES; first += OUT_PLACES, to += OUT_SPAN) {
      const int most = (PLACES - first < OUT_PLACES ? PLACES - first : OUT_PLACES) * ELEMENT;
      int bytes = left - first * ELEMENT < most ? left - first * ELEMENT : most;
#pragma unroll
      for (int j = 0; j < OUT_PLACES / 8; j++) {
        if (first + 8 * j >= PLACES) break;
        u32 at = from + late + (8 * j + 2 * q) * ELEMENT;
        const int i = 4 * (j + first / 8) + 2 * h;
        float v = acc[i] + b, w = acc[i + 1] + b;
        store_shared_f32x2(at, v, w);
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 8; r++) {
        char* line = to + r * plane;
        u32 begins = (u32)(u64)line & 15, at = ((begins + 15) & 16) + lane * 16, v[4];
        bool ok = (int)at + 16 <= (int)begins + bytes && block + 8 * h + r < COUT;
        load_shared_128(v, buffer + r * OUT_PITCH + (ok ? at : 0));
        store_global_128_if(line - begins + at, v, ok);
      }
      int end = (int)late + bytes, a = (late + 15) & 16, z = end & ~15, head = late + q * 4, tail = z + q * 4;
      char* line = to + g * plane - late;
      bool heads = channel < COUT && head < a && head < end, tails = channel < COUT && tail >= a && tail < end;
      store_global_if(line + head, load_shared_u32_if(from + head, heads), heads);
      store_global_if(line + tail, load_shared_u32_if(from + tail, tails), tails);
      __syncwarp();
    }
  }
}

#define THERE(tap) ((tap) < TAPS)

// Adds what `COUNT` taps of a stage give, from one on, as far as there are such.
template <int COUNT>
__device__ __forceinline__ void multiply_taps(float (&acc)[PLACES / 2], u32 of_taps, u32 pixels, int first,
    int shift_h) {
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    const int tap = first + k;
    if (THERE(tap))
      multiply(acc, ((u64)(256 >> 4) << 32 | (u64)3 << 62) | (u64)(of_taps + k * (TAP_BYTES / 16)),
          ((u64)(256 >> 4) << 32 | (u64)3 << 62)
              | (u64)(pixels - tap / KERNEL_W * shift_h - tap % KERNEL_W * (DILATION_W * 2)));
  }
}

__device__ __forceinline__ void consume(const float* bias, char* y, const Sizes& s, u32 stages, u32 full, u32 empty,
    u32 ring, u32 full_w, u32 empty_w, u32 turns, u32 buffers, int own, int thread) {
  int lane = thread & 31, warp = thread >> 5;
  Cursor stage = {0, 0};
  WeightCursor weights = {0, 0};
  u32 parity = 0, buffer = buffers + (own * 4 + warp) * OUT_BYTES;
  int shift_h = DILATION_H * s.pitch * 2, begin = halo(s) * 2;  // in 16 bytes
  if (own == 1 && lane == 0) barrier_arrive(turns);    // the first turn is the other's
#pragma unroll 1
  for (int index = blockIdx.x, of = 0; index < s.tiles; index += gridDim.x, of ^= 1) {
    const Tile t = tile_at(index, s);
    int count = CHUNKS * slices_of(t, s).count;
    if (of != own) {
      stage.move(count);
      weights.move(count * STAGES_OF_SLICE);
      continue;
    }
    float acc[PLACES / 2];
#pragma unroll
    for (int i = 0; i < PLACES / 2; i++) {
      acc[i] = 0.f;
      opaque(acc[i]);
    }
    barrier_wait(turns + own * 8, parity);
    parity ^= 1;
    u32 behind = 0, behind_w = 0;                       // the stages that instructions under way read
#pragma unroll 1
    for (int i = 0; i < count; i++, stage.next()) {
      u32 pixels = uniform(lower(stages + stage.stage * STAGE_BYTES) + begin);
      barrier_wait(full + stage.stage * 8, stage.parity);
#pragma unroll
      for (int part = 0; part < STAGES_OF_SLICE; part++, weights.next()) {
        u32 of_taps = uniform(lower(ring + weights.stage * WEIGHT_BYTES));
        barrier_wait(full_w + weights.stage * 8, weights.parity);
        wgmma_fence();
        multiply_taps<TAPS_OF_STAGE>(acc, of_taps, pixels, part * TAPS_OF_STAGE, shift_h);
        wgmma_commit();
        wgmma_wait<1>();
        give_back(behind_w, lane);
        if (part == 0) give_back(behind, lane);
        behind_w = empty_w + weights.stage * 8;
      }
      behind = empty + stage.stage * 8;
    }
    if (lane == 0) barrier_arrive(turns + (own ^ 1) * 8);
    wgmma_wait<0>();
    give_back(behind_w, lane);
    give_back(behind, lane);
    store(acc, bias, y, s, t, buffer, warp, lane);
  }
}

// =====================================================================================================================

constexpr int SLOTS_AT = STAGES_W * WEIGHT_BYTES;  // whole 1,024 bytes
constexpr int STAGES_AT = SLOTS_AT + STAGES_S * SLOT_BYTES;
constexpr int BUFFERS_AT = STAGES_AT + STAGES * STAGE_BYTES;  // whole 256, as those before
constexpr int BARRIERS_AT = BUFFERS_AT + CONSUMERS * 4 * OUT_BYTES;

__global__ void __launch_bounds__(THREADS, 1)
joined(const char* __restrict__ packed, const float* __restrict__ bias, char* __restrict__ y, int in_d, int out_d,
       int pitch, int plane, int tiles_f, int tiles, const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {in_d, out_d, pitch, plane, tiles_f, tiles};
  u32 ring = shared_address(memory), stages = ring + STAGES_AT, slots = ring + SLOTS_AT, buffers = ring + BUFFERS_AT;
  u32 full = ring + BARRIERS_AT, empty = full + 8 * STAGES, landed = empty + 8 * STAGES, left = landed + 8 * STAGES_S;
  u32 full_w = left + 8 * STAGES_S, empty_w = full_w + 8 * STAGES_W, turns = empty_w + 8 * STAGES_W,
      trash = turns + 8 * CONSUMERS;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, WARPS_OF_STAGE);
      barrier_init(empty + 8 * i, 4);
    }
    for (int i = 0; i < STAGES_S; i++) {
      barrier_init(landed + 8 * i, 1);
      barrier_init(left + 8 * i, WARPS_OF_STAGE);
    }
    for (int i = 0; i < STAGES_W; i++) {
      barrier_init(full_w + 8 * i, 1);
      barrier_init(empty_w + 8 * i, 4);
    }
    for (int i = 0; i < CONSUMERS; i++) barrier_init(turns + 8 * i, 4);
    barriers_begun();
  }
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (role == 0) {
    fewer_registers<96>();
    if (threadIdx.x < TURNER_THREADS) turn_pixels(s, slots, landed, left, stages, full, empty, trash, threadIdx.x);
    if (threadIdx.x == TURNER_THREADS) bring_pixels(map, s, slots, landed, left);
    if (threadIdx.x == TURNER_THREADS + 32) bring_weights(packed, s, ring, full_w, empty_w);
  } else {
    more_registers<200>();
    wait_for_results();                                 // of `pack`: the bias; nor is stored where it may still read
    consume(bias, y, s, stages, full, empty, ring, full_w, empty_w, turns, buffers, role - 1, threadIdx.x & 127);
  }
}

#undef OPERANDS
#undef SUMS
#undef SUMS_4
#undef INSTRUCTION
#undef WGMMA_248
#undef VALUE
#undef THERE
}  // namespace forward_joined

// =====================================================================================================================
// Forward: wgmma tf32, tile 1x2x8x24 (NxDxHxW of q) x 64 rows, chunk of 8 channels, pixels halved, weights ring of 5 x
// 5 fragments, 196 KB shared.
// =====================================================================================================================

namespace forward {

// Gather-GEMM on tensor cores: out[o = OUT_STEP q + u] = sum over taps of W(u, tap) x in[i = IN_STEP q + offset(u, tap)],
// for every axis; u < OUT_STEP are the sub-positions of q (the phases of a stride, or rows unrolled to fill a tile).
// The gradient for the input is the same with exchanged steps: `in` is the output's gradient, CIN its channels, `out` the input's.
//
// Work of a block (persistent, `for tile`): TILE_N x TILE_D x TILE_H x TILE_W positions q times one M-group. An M-group is
// MB blocks of 64 rows (for WGS_M = 2: a pair of them); a row is one output channel at one (d, h) sub-position, a block one
// W sub-position. K is input channels x taps, in chunks of CK channels.
//
// Roles:
//   producers  loads the input tile with its halo once per chunk. NCHW: 16-byte copies into a staging slot (bytes in flight:
//              STAGES_S - 1 slots), then a pass of shared memory -> registers -> shared memory that turns pixels to rows of CK
//              channels and rounds to TF32. Channels-last: copies straight to those rows.
//   consumers  multiply: weights are A, from registers, packed in fragment order (one 16-byte load per thread and step);
//              pixels are B, rows of CK channels in shared memory, swizzled. A tap is a shift of B's start by whole rows:
//              the swizzle is a function of address bits, so any shift is right (measured: 32, 64 and 128 bytes).
//   one thread streams the weights' fragments through a ring (or loads all of them once: RESIDENT).
// SPLIT 0: both consumers share an M-group and halve the pixels. 1: they share the pixels. 2: ping-pong, whole tiles in turn,
// so that one stores while the other multiplies.
//
// Sizes of the input are arguments.

constexpr int ELEMENT = 4;  // bytes of an element
constexpr int PARTS = 1;  // TF32 parts of an operand: 2 for IEEE float32, in three products
constexpr int FIRST_D = -2, FIRST_H = -2, FIRST_W = -2;  // where a tile's halo begins, relative to IN_STEP q
constexpr int COUT = 48;  // channels of what is written
constexpr int CIN_G = 48;  // channels of a group in what is read
constexpr int COUT_G = 48;  // channels of a group in what is written
constexpr int TAPS = 27;  // of the kernel, over all axes
constexpr int PACK_TAPS = 4;
constexpr int CK = 8;  // channels of a chunk
constexpr int SUB_H = 8, SUB_W = 8;  // the 64 positions q that one matrix instruction takes
constexpr int SUBS = 1;  // (d, h) sub-positions in a block of 64 rows of M
constexpr int ROWS_PER_SUB = 64;  // output channels of a sub-position in a block
constexpr int W_SUBS = 1;  // W sub-positions of a tile, neighbours in a thread
constexpr int MB = 1;  // blocks of 64 rows that a consumer accumulates
constexpr int VARIANTS = 1;  // M-groups that differ in their taps
constexpr int COUT_BLOCKS = 1;  // M-groups that share the output channels of a group
constexpr int M_GROUPS = 1;  // groups x COUT_BLOCKS x VARIANTS
constexpr int STAGES_P = 2;  // input tiles in shared memory
constexpr int STAGES_S = 2;  // staging slots
constexpr int STAGES_W = 5;  // stages of the weights: of the ring, or chunks
constexpr int W_STAGE = 5;  // fragments of weights in a stage of the ring, at most
constexpr int RING_FRAGMENTS = 25;  // fragments of weights in shared memory
constexpr int WEIGHTS_BOX = 0;
constexpr int RUN_GROUPS = 3;  // groups of 8 columns that the epilogue stores together
constexpr int ROWS_D = 4, ROWS_H = 10;  // input rows of a tile
constexpr int ROW_STEP_D = 1, ROW_STEP_H = 1;  // rows of the tile from one q to the next
constexpr int COLUMNS = 26;  // input columns of a tile with its halo
constexpr int COLUMN_PAD = 2;  // columns by which a box begins early
constexpr int BOX_UNITS = 7;  // 16-byte units of a row of a box
constexpr int PLANE = 26;  // columns with one residue modulo IN_STEP_W
constexpr int PLANES = 1;  // residues that some tap reads; of several boxes all
constexpr int PLANE_BARRIERS = 1;
constexpr int TAPS_UNROLLED = 9;  // taps of one stretch of code
constexpr int FRAGMENT_SETS = 3;  // sets of registers that weights take in turn
constexpr int PRODUCER_REGISTERS = 56;  // of a thread
constexpr int CONSUMER_REGISTERS = 200;  // of a thread
constexpr int OUT_STEP_D = 1, OUT_STEP_H = 1, OUT_STEP_W = 1;  // outputs from one q to the next
constexpr int IN_STEP_D = 1, IN_STEP_H = 1, IN_STEP_W = 1;  // inputs from one q to the next
constexpr int TILE_D = 2, TILE_H = 8, TILE_W = 24;  // positions q of a tile
constexpr int TILE_N = 1;  // images of a tile

// PTX in small wrappers, so that a kernel body reads as an algorithm.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Dependent launches (sm_90): a kernel launched so begins when all blocks of the one before let it; else these do nothing.
__device__ __forceinline__ void let_dependent_begin() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
// And waits for what that one wrote.
__device__ __forceinline__ void wait_for_results() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

// --- mbarriers: `count` arrivals (and the announced bytes) complete a phase; waits name the phase by its parity -------

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(count));
}
// What was initialised is seen by copies and, in a cluster, by other blocks.
__device__ __forceinline__ void barriers_begun() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}
// One thread arrives, and the phase waits for so many bytes of copies too.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_done(barrier, parity)) {}
}

// --- bulk copies (sm_90): one thread starts them; those to shared memory count at a barrier, those from it in groups ---

struct alignas(64) TensorMap { u64 opaque[16]; };  // a CUtensorMap

// Whole 16 bytes.
__device__ __forceinline__ void copy_bulk(u32 to, const char* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// A box of a tensor, whose first element has these coordinates, innermost first; zeros where the tensor has none.
__device__ __forceinline__ void load_box(u32 to, const TensorMap& map, int a, int b, int c, int d, int e, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];\n"
      ::"r"(to), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(barrier) : "memory");
}
// What the thread stored in shared memory, or anywhere, is seen by wgmma and bulk copies behind it.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// --- loads and stores ------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 load_shared_u32(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_shared_u32_if(u32 a, bool ok) {  // else 0
  u32 v = 0;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p ld.shared.u32 %0, [%1];\n}\n" : "+r"(v) : "r"(a),
      "r"((u32)ok) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_shared_u16(u32 a) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ void load_shared_128(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]),
      "=r"(v[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void load_shared_64(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];\n" : "=r"(v[0]), "=r"(v[1]) : "r"(a) : "memory");
}
__device__ __forceinline__ void store_shared_u32(u32 a, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(a), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared_128(u32 a, u32 v0, u32 v1, u32 v2, u32 v3) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"r"(a), "r"(v0), "r"(v1), "r"(v2), "r"(v3) : "memory");
}
__device__ __forceinline__ void store_shared_f32x2(u32 a, float v, float w) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};\n" ::"r"(a), "f"(v), "f"(w) : "memory");
}

// Stores under a predicate, never a branch: ptxas makes hundreds of branches of an epilogue.
__device__ __forceinline__ void store_global_if(void* to, u32 v, bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p st.global.u32 [%0], %1;\n}\n" ::"l"(to), "r"(v),
      "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_64_if(void* to, const u32 (&v)[4], bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n @p st.global.v2.u32 [%0], {%1,%2};\n}\n" ::"l"(to),
      "r"(v[0]), "r"(v[1]), "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_128_if(void* to, const u32 (&v)[4], bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p st.global.v4.u32 [%0], {%1,%2,%3,%4};\n}\n" ::"l"(to),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_16_if(void* to, u32 v, bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p st.global.u16 [%0], %1;\n}\n" ::"l"(to), "h"((u16)v),
      "r"((u32)ok) : "memory");
}

// --- the compiler and registers --------------------------------------------------------------------------------------

// The compiler knows no more of a value than its type: what follows from it is computed behind this, and sums are set ahead of a
// fence of wgmma, not behind it, where ptxas would wait for every instruction (C7519).
__device__ __forceinline__ void opaque(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void opaque(u32& v) { asm volatile("" : "+r"(v)); }
// Integers. Macros, since by references the compiler keeps variables in another order.
#define OPAQUE(a) asm volatile("" : "+r"(a))
// A warpgroup's registers for each thread (sm_90a): some are given back, or more taken.
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}

// --- numbers ---------------------------------------------------------------------------------------------------------

// Nearest TF32, ties to even, as cuDNN rounds: with it results agree with cuDNN to 3e-6, with rna to 5e-5.
__device__ __forceinline__ u32 to_tf32(float v) {
  u32 r;
  asm("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(v));
  return r;
}

// --- matrix instructions ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}
// TAIL: signs of A and B, and how they lie.
#define OPERANDS(a, b) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

// WGMMA_N(d, a, b, scale): `scale` "1", or "0" for D = A B.
#define SUMS(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define INSTRUCTION(n, registers, a0, a1, a2, a3, b0, scale) \
  "wgmma.mma_async.sync.aligned.m64n" n "k8.f32.tf32.tf32" " {" registers "}, {" a0 "," a1 "," a2 "," a3 "}, " b0 ", " scale ", 1, 1" ";\n"
#define WGMMA_64(d, a, b, scale) asm volatile(INSTRUCTION("64", \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" "," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31", "%32", "%33", "%34", "%35", "%36", scale) : \
    SUMS(d, 0), SUMS(d, 16) : OPERANDS(a, b))

constexpr int FRAGMENT = 2048;  // bytes: 64 rows of 32 bytes of K
constexpr int SUBTILES = TILE_N * TILE_D * (TILE_H / SUB_H) * (TILE_W / SUB_W);
constexpr int NB = SUBTILES / 2;
constexpr int WGS_M = 1;
constexpr int RELEASES = 2;  // consumers that read a stage
constexpr int W_SUBTILES = TILE_W / SUB_W;
constexpr int H_SUBTILES = TILE_H / SUB_H;

// [variant, block, tap]: the tap's shift in pixel rows
__constant__ const int TAP_ROW[] = {
    0, 1, 2, 26, 27, 28, 52, 53, 54, 260, 261, 262, 286, 287, 288, 312, 313, 314, 520, 521, 522, 546, 547, 548, 572,
    573, 574
};
__constant__ const int ENTRY[] = {0,27};  // [variant][MB + 1]: where a block's taps begin
__constant__ const short SUB_D[] = {0};  // [variant][SUBS]: output offset of an M-row's sub-position
__constant__ const short SUB_HH[] = {0};
__constant__ const short U_W[] = {0};  // [variant]: first W sub-position
constexpr int VEC = 16 / ELEMENT;  // elements of a 16-byte unit
constexpr int ROW_BYTES = CK * ELEMENT;  // a pixel's row in a tile: 32, 64 or 128
constexpr int UNITS_PER_ROW = ROW_BYTES / 16;
constexpr int K_STEPS = ROW_BYTES / 32;  // a matrix instruction takes 32 bytes of K
constexpr int SEGMENTS = TILE_N * ROWS_D * ROWS_H;
// Columns of a segment with one residue modulo IN_STEP_W make a plane of PLANE neighbours; there are PLANES residues that some tap
// reads. A segment has its planes one behind the other. STRIDED_BOX: a plane is a box, of all segments of a band of rows.
constexpr int PITCH = PLANES * PLANE;  // pixel rows from a segment to the next
constexpr int PIXELS = SEGMENTS * PITCH;
#define COLUMN(within) ((within) % PLANE * IN_STEP_W + (within) / PLANE)
constexpr int PART_BYTES = (PIXELS * ROW_BYTES + 1023) / 1024 * 1024;
constexpr int STAGE_BYTES = PARTS * PART_BYTES;
// 16-byte units of a segment: boxes of BOX_UNITS begin COLUMN_PAD columns early, at whole units; threads take the units that hold
// the row, whatever its alignment.
constexpr int STAGING_UNITS = (COLUMNS + (COLUMN_PAD + VEC - 1)) / VEC;
constexpr int ROW_UNITS = BOX_UNITS;
// A slot is [box][image][channel][row][column]. There are several boxes where rows are longer than one; or, CLASSED, where rows do
// not all begin at the same place of a 16-byte unit: then rows and channels of one class, which do, are a tensor and a box.
constexpr int CLASS_ROWS = ROWS_H;
constexpr int CHANNEL_BYTES = ROWS_D * CLASS_ROWS * ROW_UNITS * 16;
constexpr int SLOT_BOXES = (STAGING_UNITS + ROW_UNITS - 1) / ROW_UNITS;
constexpr int COPIED_BYTES = TILE_N * CK * CHANNEL_BYTES;  // of a box
constexpr int SLOT_BOX_BYTES = (COPIED_BYTES + 127) / 128 * 128;
constexpr int SLOT_BYTES = SLOT_BOXES * SLOT_BOX_BYTES;
constexpr int CHUNKS = (CIN_G + CK - 1) / CK;
constexpr int CONSUMERS = 2;
constexpr int CONSUMER_THREADS = CONSUMERS * 128;
// two warpgroups of 56 registers produce, so that the consumers have 200: six warps turn pixels, one loads them,
// one loads the weights
constexpr int PRODUCER_THREADS = 192;
constexpr int LOADER_WARP = 6;
constexpr int WEIGHTS_WARP = 7;
constexpr int FIRST_CONSUMER = 2;
constexpr int PRODUCER_WARPS = PRODUCER_THREADS / 32;
constexpr int THREADS = FIRST_CONSUMER * 128 + CONSUMER_THREADS;

__constant__ const int ROW_D[] = {-2,-1,0,1};  // input offset of a tile's rows
__constant__ const int ROW_H[] = {-2,-1,0,1,2,3,4,5,6,7};
#define VALUE(v) (v)

struct Sizes {                                         // one layout for the packed argument block
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;                       // tiles of q per axis
  int tiles;                                           // all of them, times M_GROUPS
  u32 claims;                                          // where shared memory has their ring
  u32* counters;                                       // claims.cuh's
};

constexpr int MAPS = 1;
struct TensorMaps { TensorMap of[MAPS + WEIGHTS_BOX]; };  // the last: the weights'

// Byte of the 16-byte unit `unit` of pixel row `p` in a tile.
__device__ __forceinline__ u32 unit_at(int p, int unit) {
  int swizzle = (p >> 2) & 1;
  return p * ROW_BYTES + ((unit ^ swizzle) << 4);
}

// A place in a ring of `count` stages, and the parity of its phase.
struct Cursor {
  u32 stage, parity;
  __device__ __forceinline__ void next(u32 count) {
    if (++stage == count) {
      stage = 0;
      parity ^= 1;
    }
  }
};

constexpr int CLAIM_STEP = 1;  // a block's weights are of one M-group

// Tiles that blocks claim as they come to them: one thread of a block, which loads its pixels, asks a counter for the
// next, and tells
// the others through a ring in shared memory. Dealt out evenly, the last blocks are late by 2 to 11% of the time where
// memory bounds:
// multiprocessors differ in their share of its bandwidth. What a tile's results are does not depend on who computes them.
// CLAIM_STEP: a block's tiles are this far apart, where it keeps what belongs to their remainder; else 1. Before it
// there is `Cursor`.
// LAST_ROUNDS: rounds of all blocks, those at the end (and what is less than a round), whose tiles are claimed; those
// before are dealt out evenly, so that blocks that read
// the same pixels stay abreast, and yet none is late by more than a few tiles; 0: all are claimed.
//
// `counters`: zeros in device memory, which the last block leaves: how many tiles are claimed (CLAIM_STEP such), and
// how many blocks
// are done. Null: tiles are dealt out evenly.
constexpr int CLAIMS = 16;  // places of the ring
constexpr int CLAIMS_BYTES = CLAIMS * 12;  // of shared memory: barriers, then tiles

__device__ __forceinline__ void claims_init(u32 ring) {
  for (int i = 0; i < CLAIMS; i++) barrier_init(ring + 8 * i, 1);
}

// The thread that claims. A block's first tile is `blockIdx.x`.
struct Claimer {
  u32 ring;
  u32* counters;
  int upcoming;                         // asked for a tile ahead, so that nobody waits for memory
  bool untold;
  Cursor cursor;
  __device__ __forceinline__ Claimer(u32 ring, u32* counters, int tiles) : ring(ring), counters(counters),
      untold(false), cursor({0, 0}) {
    ask(blockIdx.x);
  }
  __device__ __forceinline__ void ask(int index) {
    const int own = 0;
    upcoming = index + gridDim.x;
    if (counters) upcoming = gridDim.x + atomicAdd(counters + own, 1u) * CLAIM_STEP + own;
  }
  __device__ __forceinline__ int next() {
    untold = true;
    return upcoming;
  }
  // Behind the tile's first boxes, which are not to wait for this.
  __device__ __forceinline__ void tell() {
    if (!untold) return;
    untold = false;
    const int index = upcoming;
    ask(index);
    put(index);
  }
  // Nobody says that a place is free again: who loads is ahead of those who read by no more tiles than stages, of
  // pixels and of slots,
  // have chunks of, but for two that consumers who take turns have in hand, and the next. These must be CLAIMS at most.
  __device__ __forceinline__ void put(int index) {
    store_shared_u32(ring + 8 * CLAIMS + 4 * cursor.stage, index);
    barrier_arrive(ring + 8 * cursor.stage);
    cursor.next(CLAIMS);
  }
  __device__ __forceinline__ void end() {
    put(upcoming);                      // beyond the last one
    if (!counters || atomicAdd(counters + CLAIM_STEP, 1u) != gridDim.x - 1) return;
    for (int i = 0; i <= CLAIM_STEP; i++) counters[i] = 0;
  }
};

// Others: warps, or (ALONE) single threads.
template <bool ALONE>
struct ClaimsOf {
  u32 ring;
  Cursor cursor;
  __device__ __forceinline__ ClaimsOf(u32 ring) : ring(ring), cursor({0, 0}) {}
  __device__ __forceinline__ int next() {
    barrier_wait(ring + 8 * cursor.stage, cursor.parity);
    const int index = load_shared_u32(ring + 8 * CLAIMS + 4 * cursor.stage);
    cursor.next(CLAIMS);
    return ALONE ? index : __shfl_sync(0xffffffffu, index, 0);  // so that ptxas knows that warps do not part over it
  }
};

struct Tile {
  int group, cout_block, variant;                      // M-group
  int n, d, h, w;                                      // first q
};

__device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  Tile t;
  int m = index % M_GROUPS, q = index / M_GROUPS;
  t.variant = m % VARIANTS;
  t.cout_block = m / VARIANTS % COUT_BLOCKS;
  t.group = m / (VARIANTS * COUT_BLOCKS);
  t.w = q % s.tiles_w * TILE_W;  q /= s.tiles_w;
  t.h = q % s.tiles_h * TILE_H;  q /= s.tiles_h;
  t.d = q % s.tiles_d * TILE_D;
  t.n = q / s.tiles_d * TILE_N;
  return t;
}

__device__ __forceinline__ int entries_of(int variant) {
  return ENTRY[variant * (MB + 1) + MB] - ENTRY[variant * (MB + 1)];
}
__device__ __forceinline__ int chunks_of(int variant) { return entries_of(variant) ? CHUNKS : 0; }  // 0: only the bias
#define CHUNKS_OF(tile, s) chunks_of((tile).variant)
// The tiles of a block: the first, and from one to the next. (No functions of the tile and the sizes: with these ptxas orders the
// roles' instructions in another way.)
#define FIRST_TILE(s) blockIdx.x
#define NEXT_TILE(index, s) index = claims.next()

// =====================================================================================================================
// Packing: weight (CIN, COUT_G, taps), for GRAD_INPUT (COUT, CIN_G, taps), to fragments [group][cout
// block][variant][chunk][entry][k step][part][wgs][warp][lane]
// =====================================================================================================================

constexpr int PACK_SPLITS = (TAPS + PACK_TAPS - 1) / PACK_TAPS;  // blocks that share the taps
__constant__
// [variant, block, tap][SUBS]: the kernel's tap, -1 for none
const short TAP_INDEX[] = {26,25,24,23,22,21,20,19,18,17,16,15,14,13,12,11,10,9,8,7,6,5,4,3,2,1,0};

// A part is 16 rows of M, those of a warp, for one step of K and PACK_TAPS taps. A block brings its weights to shared
// memory in the order of memory, then writes its quarter of each of these taps' fragments as one piece, two at a time.
constexpr int PACK_THREADS = 256;
constexpr int PACK_PITCH = 5;  // odd, so that a warp's rows and channels meet different banks
constexpr int PACK_K = 32 / ELEMENT;  // input channels of a step
constexpr int PACK_OUTER = PACK_K;  // of a block along the weight's first dimension
constexpr int PACK_INNER = 16;  // and along its second
constexpr int PACK_PLANE = COUT_G * TAPS;  // elements from one index of its first dimension to the next
constexpr int QUARTER = FRAGMENT / 4 / 4;  // words

// A block's weights to shared memory, [row of M][channel][tap]; `outer`, `inner` and `taps` of them exist. A warp takes
// an index of the first dimension, whose elements it reads in the order of memory: taps innermost, or (LAST) channels,
// with taps `tap_step` apart.
template <bool LAST>
__device__ __forceinline__ void bring_weights(float* tile, const float* __restrict__ from, int outer, int inner,
    int taps, int tap_step, int thread) {
  constexpr int COUNT = PACK_INNER * PACK_TAPS;
#pragma unroll
  for (int j = 0; j < PACK_OUTER / (PACK_THREADS / 32); j++) {
    int o = thread / 32 + j * (PACK_THREADS / 32);
#pragma unroll 16  // loads in flight
    for (int k = 0; k < (COUNT + 31) / 32; k++) {
      int e = thread % 32 + k * 32, i = LAST ? e % PACK_INNER : e / PACK_TAPS,
          tap = LAST ? e / PACK_INNER : e % PACK_TAPS;
      bool exists = o < outer && i < inner && (tap < taps);
      tile[(i * PACK_K + o) * PACK_PITCH + tap] = exists
          ? from[o * PACK_PLANE + (LAST ? i + tap * tap_step : i * TAPS + tap)] : 0;
    }
  }
}

#define PACK_SYNC() __syncthreads()

// Weights are dense: contiguous, taps one element apart, or channels-last, `tap_step` elements.
__device__ __forceinline__ void pack_part(float* tile, const float* __restrict__ weight, u32* __restrict__ packed,
    int tap_step, int rest, int thread) {
  int begin = rest % PACK_SPLITS * PACK_TAPS;  rest /= PACK_SPLITS;
  int warp = rest % 4;  rest /= 4;
  int wg = rest % WGS_M;  rest /= WGS_M;
  int k_step = rest % K_STEPS;  rest /= K_STEPS;
  int chunk = rest % CHUNKS, block = rest / CHUNKS, group = block / COUT_BLOCKS;
  int cout = (block % COUT_BLOCKS * WGS_M + wg) * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB,
      cin = chunk * CK + k_step * PACK_K;
  int outer = cin, inner = cout;  // the group's first along the weight's dimensions
  const float* from = weight + (long long)(group * CIN_G + outer) * PACK_PLANE;
  int outer_left = CIN_G - outer, inner_left = COUT_G - inner;
  if (tap_step == 1)
    bring_weights<false>(tile, from + (inner * TAPS + begin), outer_left, inner_left, TAPS - begin, 1, thread);
  else bring_weights<true>(tile, from + (inner + begin * tap_step), outer_left, inner_left, TAPS - begin, tap_step,
      thread);
  PACK_SYNC();
  int sub = warp * 16 / ROWS_PER_SUB, entries = ENTRY[VARIANTS * (MB + 1) - 1];
  int word = thread % QUARTER, r = word & 3, lane = word >> 2;  // the thread's of a fragment: these rows and channels
  const float* own = tile
      + (((lane >> 2) + (r & 1) * 8) * PACK_K + (lane & 3) * (4 / ELEMENT) + (r >> 1) * (16 / ELEMENT)) * PACK_PITCH;
  // -1: zeros, by the first of the blocks
  auto here = [&](int tap) { return tap < 0 ? begin == 0 : (u32)(tap - begin) < PACK_TAPS; };
  auto write = [&](int variant, int e, int tap) {       // the thread's word of an entry's fragment
    int of = entries_of(variant), before = ENTRY[variant * (MB + 1)];
    int fragment = ((block * entries + before) * CHUNKS + chunk * of + e) * K_STEPS + k_step;
    u32* to = packed + (long long)((fragment * PARTS * WGS_M + wg) * 4 + warp) * QUARTER + word;
    const float* at = own + (tap - begin);
    float v = tap < 0 ? 0.f : *at;
    u32 high = to_tf32(v);
    *to = high;
  };
#pragma unroll 1
  for (int variant = 0; variant < VARIANTS; variant++) {
    int of = entries_of(variant), before = ENTRY[variant * (MB + 1)];
#pragma unroll 4
    for (int e = thread / QUARTER; e < of; e += PACK_THREADS / QUARTER) {
      int tap = TAP_INDEX[(before + e) * SUBS + sub];
      if (here(tap)) write(variant, e, tap);
    }
  }
}

__global__ void __launch_bounds__(PACK_THREADS) pack(const float* __restrict__ weight, u32* __restrict__ packed,
    int tap_step) {
  __shared__ float tile[16 * PACK_K * PACK_PITCH];
  let_dependent_begin();                                // `gather`
  pack_part(tile, weight, packed, tap_step, blockIdx.x, threadIdx.x);
}

// =====================================================================================================================
// Producer
// =====================================================================================================================

struct Source {                                        // where a tile's chunk lies in the input
  int n, d, h, w;                                      // of the halo's corner, before the rows' offsets
  int channel, left;                                   // first channel, channels left in the group
};

__device__ __forceinline__ Source source_of(const Tile& t, int chunk) {
  return {t.n, t.d * IN_STEP_D, t.h * IN_STEP_H, t.w * IN_STEP_W + FIRST_W, t.group * CIN_G + chunk * CK,
      CIN_G - chunk * CK};
}

constexpr int OWN_PIXELS = (PIXELS + PRODUCER_THREADS - 1) / PRODUCER_THREADS;
__device__ __forceinline__ int pixel_row(int i) {
  return i;
}

// A thread's pixels of a tile: where they lie in a slot and, for copies by threads, whether they are in the image and how their
// row is aligned. Found once a tile, not a chunk.
struct Pixels {
  u32 from[OWN_PIXELS], ok;
  u32 plane;  // channel c of a row begins at (phase + c * plane) % VEC of a unit
  __device__ __forceinline__ void locate(const char* x, const Sizes& s, const Source& at, const int* segments,
      int thread) {
    plane = 0;
    ok = 0;
#pragma unroll
    for (int k = 0; k < OWN_PIXELS; k++) {
      int p = pixel_row(thread + k * PRODUCER_THREADS), segment = p / PITCH, within = p % PITCH;
      int column = COLUMN(within), image = segment / (ROWS_D * ROWS_H);
      if (thread + k * PRODUCER_THREADS >= PIXELS) break;
      int at_column = column + COLUMN_PAD, box = 0;
      from[k] = box * SLOT_BOX_BYTES + (segment + image * (CK - 1) * (ROWS_D * ROWS_H)) * ROW_UNITS * 16
          + (at_column - box * (ROW_UNITS * VEC)) * ELEMENT;
    }
  }
};

// A slot's pixels to rows of CK channels, rounded: a lane takes a pixel, so that loads and stores meet all banks.
template <bool ALIGNED>  // every channel of a row has the same misalignment
__device__ __forceinline__ void turn(const Pixels& own, u32 exist, int channel, int left, u32 slot, u32 tile,
    int thread) {
#pragma unroll
  for (int k = 0; k < OWN_PIXELS; k++) {
    int p = pixel_row(thread + k * PRODUCER_THREADS);
    if (thread + k * PRODUCER_THREADS >= PIXELS) break;
    bool ok = exist >> k & 1;
    u32 phase = own.from[k] >> 24, from = slot + (own.from[k] & 0xffffff) + (ALIGNED ? phase * ELEMENT : 0);
#pragma unroll 2  // more of them spill
    for (int unit = 0; unit < UNITS_PER_ROW; unit++) {
      u32 v[VEC];
#pragma unroll
      for (int e = 0; e < VEC; e++) {
        int c = unit * VEC + e;
        bool have = ok;
        u32 a = from + c * CHANNEL_BYTES;
        if (!ALIGNED) a += ((phase + (channel + c) * own.plane) & (VEC - 1)) * ELEMENT;
        v[e] = have ? load_shared_u32(a) : 0;
      }
      u32 hi[4];
#pragma unroll
      for (int e = 0; e < 4; e++) hi[e] = to_tf32(__uint_as_float(v[e]));
      store_shared_128(tile + unit_at(p, unit), hi[0], hi[1], hi[2], hi[3]);
    }
  }
}

// A walk over (tile, chunk) in the order in which consumers take them.
template <class Claiming>                               // the loader's, or others'
struct WalkOf {
  Claiming claims;
  int index, chunk;
  Tile tile;
  __device__ __forceinline__ void begin(int first, const Sizes& s) { index = first; chunk = 0; settle(s); }
  __device__ __forceinline__ bool live(const Sizes& s) const { return index < s.tiles; }
  __device__ __forceinline__ void settle(const Sizes& s) {  // past tiles without chunks
    while (index < s.tiles) {
      tile = tile_at(index, s);
      if (chunk < CHUNKS_OF(tile, s)) return;
      NEXT_TILE(index, s);
      chunk = 0;
    }
  }
  __device__ __forceinline__ void next(const Sizes& s) {
    if (++chunk >= CHUNKS) settle(s);
  }
};
typedef WalkOf<ClaimsOf<false>> Walk;

// The tile is written: make it visible to the matrix units and say so, once a warp.
__device__ __forceinline__ void hand_over(u32 barrier, int lane) {
  fence_async_shared();
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}

struct Barriers { u32 full, empty, landed, left; };  // of tiles; of slots or boxes: `landed` by the copy engine

// The loader, one thread: ahead of everyone by as many slots (NCHW) or tiles (channels-last) as are free. Channels-last pixels
// whose taps step over columns or rows come as a box for each plane, with the copy engine's element strides.
__device__ __forceinline__ void load_boxes(const TensorMaps& maps, const Sizes& s, u32 to, u32 stage_bytes, u32 landed,
    u32 left) {
  WalkOf<Claimer> walk = {Claimer(s.claims, s.counters, s.tiles)};
  Cursor cursor = {0, 1};                               // all are free at first
#pragma unroll 1
  for (walk.begin(FIRST_TILE(s), s); walk.live(s); walk.next(s), cursor.next(STAGES_S)) {
    Source at = source_of(walk.tile, walk.chunk);
    u32 barrier = landed + cursor.stage * 8, bytes = SLOT_BOXES * COPIED_BYTES;
    barrier_wait(left + cursor.stage * 8, cursor.parity);
    expect_bytes(barrier, bytes);
    int c = at.channel, w = at.w - COLUMN_PAD, h = at.h + FIRST_H, d = at.d + FIRST_D;
#pragma unroll
    for (int r = 0; r < SLOT_BOXES; r++) {
      if (r) w += ROW_UNITS * VEC;
      load_box(to + cursor.stage * stage_bytes + r * SLOT_BOX_BYTES, maps.of[0],
               w, h, d, c, at.n, barrier);
    }
    walk.claims.tell();
  }
  walk.claims.end();
}

__device__ __forceinline__ void produce(const char* __restrict__ x, const Sizes& s, const int* segments, u32 tiles,
    u32 slots, const Barriers& barriers, int thread) {
  int lane = thread & 31;
  Walk now = {ClaimsOf<false>(s.claims)};
  Cursor tile = {0, 1};
  Pixels own;
  own.locate(x, s, Source(), segments, thread);
  Cursor slot = {0, 0};
#pragma unroll 1
  for (now.begin(FIRST_TILE(s), s); now.live(s); now.next(s), tile.next(STAGES_P), slot.next(STAGES_S)) {
    barrier_wait(barriers.landed + slot.stage * 8, slot.parity);
    barrier_wait(barriers.empty + tile.stage * 8, tile.parity);
    int channel = now.chunk * CK;
    // Boxes bring zeros for pixels that do not exist, but for those ahead of a class's rows.
    u32 exist = 0xffffffffu;
    if (own.plane % VEC == 0) {
      turn<true>(own, exist, channel, CIN_G - channel, slots + slot.stage * SLOT_BYTES,
          tiles + tile.stage * STAGE_BYTES, thread);
    } else {
      turn<false>(own, exist, channel, CIN_G - channel, slots + slot.stage * SLOT_BYTES,
          tiles + tile.stage * STAGE_BYTES, thread);
    }
    hand_over(barriers.full + tile.stage * 8, lane);
    if (lane == 0) barrier_arrive(barriers.left + slot.stage * 8);
  }
}

// =====================================================================================================================
// Weights: fragments in the order in which they are used
// =====================================================================================================================

#define FRAGMENTS(entries) ((entries) * CHUNKS * K_STEPS * PARTS)

__device__ __forceinline__ const char* fragments_of(const char* packed, const Tile& t) {
  long long before = (long long)(t.group * COUT_BLOCKS + t.cout_block) * FRAGMENTS(ENTRY[VARIANTS * (MB + 1) - 1]);
  return packed + (before + FRAGMENTS(ENTRY[t.variant * (MB + 1)])) * (WGS_M * FRAGMENT);
}

constexpr int STEPS_PER_TAP = K_STEPS * PARTS;
// A stretch is a piece of code without a loop: matrix instructions are queued from its beginning to its end. STRAIGHT: all blocks
// of a chunk; else TAPS_UNROLLED taps of a block, and single ones that are left. A stage of the ring holds W_STAGE fragments of a
// stretch, its last one what is left, so that the code knows where stages begin. RESIDENT: a chunk is a stage, one
// behind the other.
#define STAGE_FRAGMENTS(left) ((left) < W_STAGE ? (left) : W_STAGE)
constexpr int LONGEST_STRETCH = TAPS_UNROLLED * STEPS_PER_TAP;  // where not STRAIGHT

// Where a tile's weights come from, in the order in which they are used.
typedef const char* Weights;  // packed; chunks lie one behind the other
__device__ __forceinline__ Weights weights_of(const char* packed, const Tile& t) { return fragments_of(packed, t); }
__device__ __forceinline__ void bring(u32 to, const char* from, u32 bytes, u32 barrier) {
  expect_bytes(barrier, bytes);
  copy_bulk(to, from, bytes, barrier);
}

// One thread: streams every tile's weights through the ring; RESIDENT: loads them once.
template <class Source>
__device__ __forceinline__ void stream_weights(const Source& packed, const Sizes& s, u32 ring, u32 full, u32 empty) {
  wait_for_results();                                   // of `pack`
  ClaimsOf<true> claims(s.claims);
  Cursor cursor = {0, 1};
#pragma unroll 1
  for (int index = FIRST_TILE(s); index < s.tiles; NEXT_TILE(index, s)) {
    Tile t = tile_at(index, s);
    Weights from = weights_of(packed, t);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks_of(t.variant); chunk++) {
#pragma unroll 1
      for (int b = 0; b < MB; b++) {
        int left = ENTRY[t.variant * (MB + 1) + b + 1] - ENTRY[t.variant * (MB + 1) + b];
        left *= STEPS_PER_TAP;
#pragma unroll 1
        while (left > 0) {
          int stretch = left >= LONGEST_STRETCH ? LONGEST_STRETCH : STEPS_PER_TAP;
          left -= stretch;
#pragma unroll 1
          for (; stretch > 0; stretch -= W_STAGE, cursor.next(STAGES_W)) {
            u32 bytes = STAGE_FRAGMENTS(stretch) * (WGS_M * FRAGMENT);
            barrier_wait(empty + cursor.stage * 8, cursor.parity);
            bring(ring + cursor.stage * (W_STAGE * WGS_M * FRAGMENT), from, bytes, full + cursor.stage * 8);
            from += bytes;
          }
        }
      }
    }
  }
}

// A thread's part of a ring's first fragment.
__device__ __forceinline__ u32 fragment_part(int wg, int thread) {
  return thread * 16;
}
// Fragment i of those that begin at `at`.
__device__ __forceinline__ void load_fragment(u32 (&a)[4], u32 at, int i) {
  load_shared_128(a, at + i * (WGS_M * FRAGMENT));
}

// The consumers' side. Before sm_90 fragments come straight from global memory (L2).
struct Fragments {
  u32 ring, full, empty;  // of the ring: this thread's part of its first fragment; barriers
  Cursor cursor;                                       // the stage to be waited for next
  u32 at;  // this thread's part of the first fragment of the stage in hand, or of the stretch
  u32 in_hand;                                         // the barrier that says that the stage in hand is free
  bool first;                                          // RESIDENT: the first tile waits for the weights
  const char* from;

  __device__ __forceinline__ void begin(const char* packed, const Tile& t, int offset) {
  }
  __device__ __forceinline__ void begin_chunk(int chunk) {
  }
  __device__ __forceinline__ void end() { first = false; }
  // Fragment i of a stretch; a stage is waited for with its first.
  __device__ __forceinline__ void load(u32 (&a)[4], int i) {
    if (i % W_STAGE == 0) {
      barrier_wait(full + cursor.stage * 8, cursor.parity);
      at = ring + cursor.stage * (W_STAGE * WGS_M * FRAGMENT);
      in_hand = empty + cursor.stage * 8;
      cursor.next(STAGES_W);
    }
    load_fragment(a, at, i % W_STAGE);
  }
  __device__ __forceinline__ void end_stretch(int steps) {
  }
  __device__ __forceinline__ void skip(int variant) {  // a tile
    for (int chunk = 0; chunk < chunks_of(variant); chunk++)
      for (int b = 0; b < MB; b++) {
        int left = (ENTRY[variant * (MB + 1) + b + 1] - ENTRY[variant * (MB + 1) + b]) * STEPS_PER_TAP;
        int longest = LONGEST_STRETCH, whole = longest ? left / longest : 0;
        int stages = whole * ((longest + W_STAGE - 1) / W_STAGE)
            + left % longest / STEPS_PER_TAP * ((STEPS_PER_TAP + W_STAGE - 1) / W_STAGE);
        for (; stages > 0; stages--) cursor.next(STAGES_W);
      }
  }
};

// =====================================================================================================================
// Consumers
// =====================================================================================================================

struct Place { int n, d, h, w; };  // of a subtile in a tile, in q

// PAIRED: subtiles one below the other are neighbours, so that one matrix instruction takes both (WIDE).
__device__ __forceinline__ constexpr Place place_of(int subtile) {
  return {subtile / (W_SUBTILES * H_SUBTILES * TILE_D), subtile / (W_SUBTILES * H_SUBTILES) % TILE_D,
          subtile / W_SUBTILES % H_SUBTILES * SUB_H,
          subtile % W_SUBTILES * SUB_W};
}
// its first pixel's row in the tile, for a tap of shift 0
__device__ __forceinline__ constexpr int pixel_row_of(int subtile) {
  Place p = place_of(subtile);
  return ((p.n * ROWS_D + p.d * ROW_STEP_D) * ROWS_H + p.h * ROW_STEP_H) * PITCH + p.w;
}
constexpr int SUBTILES_OF_WGMMA = 1;  // that a matrix instruction takes
constexpr int GROUP_ROWS = ROW_STEP_H * PITCH;  // pixel rows from one group of eight columns to the next

// Where a consumer's pixels lie in a tile. `start`: of its first subtile; wgmma: the lower half of its descriptor, the same in all
// threads; mma.sync: the tile's address.
struct Columns {
  u32 start;
  int first;                                           // its first subtile
};

// Pixel rows from the consumer's first subtile to another of its: known to the compiler where both halves of a tile are alike.
__device__ __forceinline__ constexpr bool halves_alike() {
  for (int nb = 1; nb < NB; nb++)
    if (pixel_row_of(NB + nb) - pixel_row_of(NB) != pixel_row_of(nb) - pixel_row_of(0)) return false;
  return true;
}
__device__ __forceinline__ int rows_to(int nb, int first) {
  constexpr bool alike = halves_alike();
  return alike ? pixel_row_of(nb) - pixel_row_of(0) : pixel_row_of(first + nb) - pixel_row_of(first);
}

__device__ __forceinline__ Columns pixels_of(u32 tile, int first) {
  u32 start = (tile + pixel_row_of(first) * ROW_BYTES) >> 4 | 1u << 16;
  return {__shfl_sync(0xffffffffu, start, 0), first};  // so that ptxas counts in uniform registers
}

// acc[64 x 64 NB] += fragment x pixels; `shift` is the tap's, in pixel rows, `part` the pixels' part. FRESH: = instead of +=.
template <bool FRESH>
__device__ __forceinline__ void multiply(float (&acc)[NB][32], const u32 (&a)[4], const Columns& pixels, int shift,
    int k_step, int part, int lane) {
  const u64 upper = ((u64)(GROUP_ROWS * ROW_BYTES >> 4) << 32) | ((u64)(3) << 62);
#pragma unroll
  for (int nb = 0; nb < NB; nb += SUBTILES_OF_WGMMA) {
    u64 b = upper | (pixels.start + shift * (ROW_BYTES / 16)
        + (rows_to(nb, pixels.first) * ROW_BYTES + k_step * 32 + part * PART_BYTES) / 16);
    float* d = acc[nb];
    WGMMA_64(d, a, b, "1");
  }
}

// A stage of the ring of weights whose fragments are in registers, by its barrier.
__device__ __forceinline__ void give_back_weights(u32 done, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(done);
}

// Step i of a stretch of `steps`. Fragments take FRAGMENT_SETS sets of registers in turn: one is multiplied by, the one before may
// still be, the next one is loaded. At the end of a stretch the pipeline drains, since in a loop ptxas cannot see that a set is
// free again and serialises every wgmma, C7513. CONTINUED: where the
// steps of a chunk are a multiple of the sets it can, and a chunk's last step is multiplied while the next chunk begins. ROLLED: so
// it can where those of a round are; `left` rounds of the chunk follow.
__device__ __forceinline__ void step(float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights,
    const Columns& pixels, int shift, int i, int steps, int lane, int left = 0) {
  wgmma_fence();
  multiply<false>(acc, a[i % FRAGMENT_SETS], pixels, shift, i % K_STEPS, 0, lane);
  wgmma_commit();
  u32 done = weights.in_hand;
  if (i + 1 < steps) {
    weights.load(a[(i + 1) % FRAGMENT_SETS], i + 1);
    wgmma_wait<1>();
  } else {
    weights.end_stretch(steps);
    if (left) weights.load(a[0], 0);
    wgmma_wait<1>();
  }
  if (i + 1 == steps || (i + 1) % W_STAGE == 0) give_back_weights(done, lane);
}

// A pixel tile that no matrix instruction reads any more, by its barrier; 0: none.
__device__ __forceinline__ void give_back(u32 barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}

// 0 to N - 1.
template <int...>
struct Sequence {};
template <int N, int... BEHIND>
struct Counting : Counting<N - 1, N - 1, BEHIND...> {};
template <int... ALL>
struct Counting<0, ALL...> { typedef Sequence<ALL...> type; };

__device__ constexpr int shift_at(int i) {
  constexpr int shift[] = {0,1,2,26,27,28,52,53,54};
  return shift[i];
}

template <int STEP>
__device__ __forceinline__ void multiply_one(float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights,
    const Columns& pixels, int left, u32& behind, int lane) {
  step(acc, a, weights, pixels, shift_at(STEP / STEPS_PER_TAP), STEP, LONGEST_STRETCH, lane, left);
}
template <int... STEPS>
__device__ __forceinline__ void multiply_round(Sequence<STEPS...>, float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4],
    Fragments& weights, const Columns& pixels, int left, u32& behind, int lane) {
  (multiply_one<STEPS>(acc, a, weights, pixels, left, behind, lane), ...);
}

// A loop of rounds, in each of which all sets of fragments come round: so ptxas can see that a set is free again, and the tensor
// cores do not drain between them. Rounds are alike but for where their pixels begin. What a round begins with, its pixels' place
// and its first fragment, is asked for in the one before: tables of taps read in each
// would be slower. Shorter stretches stay straight, which is the fastest.
template <int FIRST>
__device__ __forceinline__ void multiply_chunk(int variant, float (&acc)[MB][NB][32], Fragments& weights,
    const Columns& pixels, u32 behind, int lane) {
  u32 a[FRAGMENT_SETS][4];
  int left = (ENTRY[variant * (MB + 1) + MB] - ENTRY[variant * (MB + 1)]) / TAPS_UNROLLED;
  weights.load(a[0], 0);
#pragma unroll
  for (int b = 0; b < MB; b++) {
    int entry = ENTRY[variant * (MB + 1) + b], last = ENTRY[variant * (MB + 1) + b + 1];
    int begin = TAP_ROW[entry];
#pragma unroll 1
    while (entry < last) {
      Columns shifted = pixels;
      shifted.start = __shfl_sync(0xffffffffu, pixels.start + begin * (ROW_BYTES / 16), 0);
      entry += TAPS_UNROLLED;
      if (entry < last) begin = TAP_ROW[entry];
      multiply_round(typename Counting<LONGEST_STRETCH>::type(), acc[b], a, weights, shifted, --left, behind, lane);
    }
  }
  wgmma_wait<0>();
}

// --- epilogue --------------------------------------------------------------------------------------------------------
// A warp holds 16 rows of M. They pass through a shared buffer, so that memory is written in whole lines: NCHW 8 rows of a run of
// RUN x W_SUBS consecutive outputs, through a buffer of the warp; channels-last ROUND pixels of ROWS_PER_SUB channels, through one
// of all warps that hold these.
constexpr int RUN = RUN_GROUPS * 8;
// Bytes of a row of the buffer; the rest beyond whole 128 bytes lets rows meet different banks, and a row begin up to
// 31 bytes late.
constexpr int RUN_PITCH = (RUN * W_SUBS * ELEMENT + 127) / 128 * 128 + 32;
constexpr int BUFFER_BYTES = 8 * RUN_PITCH;
constexpr int RUN_SUBTILES = RUN_GROUPS;  // neighbours along W that a run crosses
constexpr int RUNS_OF_SUBTILE = 8;
// Group k of run i of subtiles RUN_FIRST(r) ...: which subtile, and which of its groups of 8 columns.
#define RUN_FIRST(r) ((r) * RUN_SUBTILES)  // subtile of a run's first group
#define RUN_NB(r, i, k) (RUN_FIRST(r) + (k))
#define RUN_J(r, i, k) ((i))

// The block of a W sub-position, -1: it has no taps. Up to 16 are one number, of four bits each: a table's entries are
// constants only
// after unrolling, and until then the compiler keeps all sums in memory.
__device__ constexpr u64 packed_blocks() {
  constexpr signed char blocks[] = {0};
  u64 packed = 0;
  for (int u = 0; u < W_SUBS; u++) packed |= (u64)(blocks[u] + 1) << 4 * u;
  return packed;
}
__device__ __forceinline__ constexpr int block_of_w(int u) {
  constexpr u64 packed = packed_blocks();
  return (int)(packed >> 4 * u & 15) - 1;
}

// A warp's 16 rows of M are output channels of one (d, h) sub-position (ROWS_PER_SUB is 64, 32 or 16).
struct Slab {
  int cout, couts;                                      // first channel in the group, and how many of the 16 exist
  int od, oh;                                           // offsets of the sub-position
};

__device__ __forceinline__ Slab slab_of(const Tile& t, int cout_block, int warp) {
  Slab slab;
  int sub = warp * 16 / ROWS_PER_SUB;
  slab.cout = cout_block * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB;
  slab.couts = COUT_G - slab.cout < 16 ? COUT_G - slab.cout : 16;
  slab.od = SUB_D[t.variant * SUBS + sub];
  slab.oh = SUB_HH[t.variant * SUBS + sub];
  return slab;
}

constexpr int OUTPUTS = RUN * W_SUBS;  // of a row of a run
#define TOGETHER(unit) (2)  // outputs that a thread stores to the buffer together

// Which of a thread's outputs of a row go first to the buffer, as an exclusive or of their order, so that the lanes of an
// instruction meet different banks: rows lie 8 banks apart (half precision: 12), the outputs of neighbouring lanes 2 W_SUBS.
template <int UNIT>
__device__ __forceinline__ int order_of(int g, int q) {
  int by_column = 0;
  return by_column;
}

// One thread's 2 W_SUBS neighbouring outputs to the buffer.
template <int UNIT>
__device__ __forceinline__ void put(float (&v)[2 * W_SUBS], u32 at, int order) {
#pragma unroll
  for (int bit = TOGETHER(UNIT); bit < 8 && W_SUBS % bit == 0; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 2 * W_SUBS; i++) {
      if (i & bit) continue;
      float low = v[i], high = v[i ^ bit];
      v[i] = order & bit ? high : low;
      v[i ^ bit] = order & bit ? low : high;
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * W_SUBS; i += TOGETHER(UNIT)) {
    u32 to = at + (i ^ order) * ELEMENT;
    store_shared_f32x2(to, v[i], v[i ^ 1]);
  }
}

template <int UNIT>
__device__ __forceinline__ void copy_unit(char* to, u32 from, bool ok) {
  u32 v[4];
  if (UNIT == 16) load_shared_128(v, from);
  else if (UNIT == 8) load_shared_64(v, from);
  else v[0] = UNIT == 4 ? load_shared_u32(from) : load_shared_u16(from);
  if (UNIT == 16) store_global_128_if(to, v, ok);
  else if (UNIT == 8) store_global_64_if(to, v, ok);
  else if (UNIT == 4) store_global_if(to, v[0], ok);
  else store_global_16_if(to, v[0], ok);
}

// Eight rows in units: an instruction stores 32 of them, of several rows if they are short.
template <int UNIT>
__device__ __forceinline__ void store_units(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int PER_ROW = OUTPUTS * ELEMENT / UNIT;
#pragma unroll
  for (int i = 0; i < (8 * PER_ROW + 31) / 32; i++) {
    // rows: the first lane's, and how many on
    int index = lane + 32 * i, first = 32 * i / PER_ROW, more = index / PER_ROW - first;
    // Compared, not divided, where rows are long.
    if (PER_ROW >= 32) more = 32 * i % PER_ROW + 31 >= PER_ROW && index >= (first + 1) * PER_ROW;
    int r = first + more, at = (index - r * PER_ROW) * UNIT;
    char* row = to + first * plane + (PER_ROW >= 32 ? more ? plane : 0 : more * plane);
    bool in = PER_ROW % 4 == 0 || r < 8;
    copy_unit<UNIT>(row + at, in ? buffer + r * RUN_PITCH + at : buffer, in && at < end);
  }
}

// Eight rows that begin anywhere, a lane an output: each instruction begins at a sector's first output, since a sector of 32
// bytes whose parts are stored at different times costs as much as several whole ones. 16 bytes a lane and the ends
// of rows by themselves, as below, is slower for float32.
__device__ __forceinline__ void store_sectors(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int ROWS = 4;   // at a time: of kernels that have other ways beside, eight spill
  static_assert(8 % ROWS == 0, "all rows in turn");
#pragma unroll
  for (int from_row = 0; from_row < 8; from_row += ROWS) {
    char* row[ROWS];
    u32 from[ROWS];
    int at[ROWS];  // the lane's first output of each row; some are before or behind it
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
      int r = from_row + k;
      char* first = to + r * plane;
      at[k] = lane * 4 - ((int)(u64)first & 31);
      row[k] = first + at[k], from[k] = buffer + r * RUN_PITCH + at[k];
    }
    // What follows of a row is at known distances. A place for each output takes a third more instructions.
#pragma unroll
    for (int i = 0; i < (OUTPUTS + 38) / 32; i++) {
      u32 v[ROWS];
      bool in[ROWS];
#pragma unroll
      for (int k = 0; k < ROWS; k++) {
        in[k] = i ? at[k] < end - i * 128 : (u32)at[k] < (u32)end;
        v[k] = load_shared_u32_if(from[k] + i * 128, in[k]);
      }
#pragma unroll
      for (int k = 0; k < ROWS; k++) store_global_if(row[k] + i * 128, v[k], in[k]);
    }
  }
}

// Eight rows (output channels) of a run from the buffer to memory: `end` bytes of each. `to` is the first row's first output, rows
// lie `plane` bytes apart.
template <int UNIT>
__device__ __forceinline__ void store_rows(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  if (UNIT == 4) store_sectors(to, plane, rows, end, buffer, lane);
  else store_units<UNIT>(to, plane, rows, end, buffer, lane);
}

// Rows h * 8 ... of run i of subtiles RUN_FIRST(r) ...: a thread's outputs of its row to the buffer.
template <int UNIT>
__device__ __forceinline__ void put_rows(float (&acc)[MB][NB][32], float bias, int r, int i, int h, u32 row, int lane) {
  int g = lane >> 2, q = lane & 3, order = order_of<UNIT>(g, q);
#pragma unroll
  for (int k = 0; k < RUN_GROUPS; k++) {
    const int nb = RUN_NB(r, i, k), j = RUN_J(r, i, k);
    float v[2 * W_SUBS];
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int u = 0; u < W_SUBS; u++)
        v[c * W_SUBS + u] = block_of_w(u) < 0 ? bias
            : acc[block_of_w(u) < 0 ? 0 : block_of_w(u)][nb][4 * j + 2 * h + c];
    put<UNIT>(v, row + (k * 8 + 2 * q) * W_SUBS * ELEMENT, order);
  }
}

template <int UNIT>
__device__ __forceinline__ void pass_rows(float (&acc)[MB][NB][32], float bias, int r, int i, int h, u32 row, char* to,
    long long plane, int rows, int end, u32 buffer, int lane) {
  put_rows<UNIT>(acc, bias, r, i, h, row, lane);
  __syncwarp();
  store_rows<UNIT>(to, plane, rows, end, buffer, lane);
}

// Unrolled, since registers have no run-time index. Stores once in a loop, with only the reading of registers in
// branches, take longer and compile no faster.
__device__ __forceinline__ void epilogue(float (&acc)[MB][NB][32], const float* __restrict__ bias, char* __restrict__ y,
    const Sizes& s, const Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  OPAQUE(lane);  // what follows from it is found here, not kept from tile to tile (spills)
  int g = lane >> 2;
  Slab slab = slab_of(t, cout_block, warp);
  if (slab.couts <= 0) return;
  float b[2] = {0.f, 0.f};
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (bias && g + 8 * h < slab.couts) b[h] = VALUE(bias[t.group * COUT_G + slab.cout + g + 8 * h]);
  if (bias) {
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int e = 0; e < 32; e++) acc[m][nb][e] += b[e >> 1 & 1];
  }
  int channel = t.group * COUT_G + slab.cout;
  long long plane = (long long)s.out_d * s.out_h * s.out_w * ELEMENT;
#pragma unroll
  for (int r = 0; r < NB / RUN_SUBTILES; r++) {
    Place place = place_of(first_subtile + RUN_FIRST(r));
    int n = t.n + place.n, od = OUT_STEP_D * (t.d + place.d) + slab.od;
    bool image = n < s.batch && od < s.out_d;
#pragma unroll
    for (int i = 0; i < RUNS_OF_SUBTILE; i++) {
      int oh = OUT_STEP_H * (t.h + place.h + i) + slab.oh;
      int ow = OUT_STEP_W * (t.w + place.w) + U_W[t.variant], left = s.out_w - ow;
      if (!image || oh >= s.out_h || left <= 0) continue;
      char* to = y + (((long long)n * COUT + channel) * s.out_d + od) * s.out_h * s.out_w * ELEMENT
          + ((long long)oh * s.out_w + ow) * ELEMENT;
      int end = (left < OUTPUTS ? left : OUTPUTS) * ELEMENT;
      u32 misaligned = (u32)(u64)to | (u32)plane | end;  // multiples of what all rows begin and end at
#pragma unroll
      for (int h = 0; h < 2; h++) {
        char* first = to + h * 8 * plane;
        int rows = 8;
        u32 row = buffer + g * RUN_PITCH;
        if ((misaligned & 15) == 0) pass_rows<16>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
        else if ((misaligned & (2 * ELEMENT - 1)) == 0) pass_rows<2 * ELEMENT>(acc, b[h], r, i, h, row, first, plane,
            rows, end, buffer, lane);
        else pass_rows<ELEMENT>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
        __syncwarp();
      }
    }
  }
}

__device__ __forceinline__ void consume(const char* packed, const float* bias, char* y, const Sizes& s, u32 tiles,
    u32 full, u32 empty, Fragments& weights, u32 buffers, int wg, int thread) {
  // By a shuffle ptxas knows that branches over a warp's number do not part it; but beside BARE's stores that makes some
  // kernels slower.
  int warp = __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31;
  int first_subtile = wg * NB, offset = fragment_part(wg, thread);
  u32 buffer = buffers + (wg * 4 + warp) * BUFFER_BYTES;
  Cursor cursor = {0, 0};
  weights.cursor = {0, 0};
  weights.ring += offset;
  weights.first = true;
  int turn = 0;
  ClaimsOf<false> claims(s.claims);
  int following;
#pragma unroll 1
  for (int index = FIRST_TILE(s); index < s.tiles; index = following, turn++) {
    Tile t = tile_at(index, s);
    int chunks = chunks_of(t.variant);
    float acc[MB][NB][32];
#pragma unroll
    for (int b = 0; b < MB; b++)
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int i = 0; i < 32; i++) {
          acc[b][nb][i] = 0.f;
          opaque(acc[b][nb][i]);
        }
    weights.begin(packed, t, offset);
    int variant = __shfl_sync(0xffffffffu, t.variant, 0);  // so that ptxas knows that warps do not part over it
    u32 behind = 0;                                      // CONTINUED: the chunk that the last step may still read
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++, cursor.next(STAGES_P)) {
      Columns pixels = pixels_of(tiles + cursor.stage * STAGE_BYTES, first_subtile);
      u32 last = empty + cursor.stage * 8;
      barrier_wait(full + cursor.stage * 8, cursor.parity);
      weights.begin_chunk(chunk);
      multiply_chunk<0>(variant, acc, weights, pixels, behind, lane);
      give_back(last, lane);
    }
    weights.end();
    following = claims.next();                           // ahead of the stores, which hide the wait
    epilogue(acc, bias, y, s, t, t.cout_block * WGS_M, first_subtile, buffer, warp, lane);
  }
}

// =====================================================================================================================

constexpr int TILES_AT = 0;
constexpr int RING_AT = TILES_AT + STAGES_P * STAGE_BYTES;
constexpr int SLOTS_AT = RING_AT + RING_FRAGMENTS * WGS_M * FRAGMENT;
constexpr int BUFFERS_AT = SLOTS_AT + STAGES_S * SLOT_BYTES;
constexpr int BARRIERS_AT = BUFFERS_AT + CONSUMERS * 4 * BUFFER_BYTES;
constexpr int PIXEL_BARRIERS = STAGES_P * PLANE_BARRIERS;
constexpr int SLOT_BARRIERS = STAGES_S;
constexpr int CLAIMS_AT = BARRIERS_AT + 16 * (PIXEL_BARRIERS + STAGES_W + SLOT_BARRIERS);
constexpr int SEGMENTS_AT = CLAIMS_AT + CLAIMS_BYTES;

__global__ void __launch_bounds__(THREADS, 1)
gather(const char* __restrict__ x, const char* __restrict__ packed, const float* __restrict__ bias,
    char* __restrict__ y,
       u32* counters,                  // as many as M-groups that stay with a block, and one; or null (claims.cuh)
       int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w,
           int tile_count, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tile_count,
      shared_address(memory) + CLAIMS_AT, counters};
  u32 base = shared_address(memory);
  u32 full = base + BARRIERS_AT, empty = full + 8 * PIXEL_BARRIERS, full_w = empty + 8 * PIXEL_BARRIERS,
      empty_w = full_w + 8 * STAGES_W;
  const Barriers barriers = {full, empty, empty_w + 8 * STAGES_W, empty_w + 8 * (STAGES_W + SLOT_BARRIERS)};
  int* segments = (int*)(memory + SEGMENTS_AT);
  if (threadIdx.x == 0) {
    for (int i = 0; i < PIXEL_BARRIERS; i++) {
      barrier_init(full + 8 * i, PRODUCER_WARPS);
      barrier_init(empty + 8 * i, RELEASES * 4);
    }
    for (int i = 0; i < STAGES_W; i++) {
      barrier_init(full_w + 8 * i, 1);
      barrier_init(empty_w + 8 * i, RELEASES * 4);
    }
    for (int i = 0; i < SLOT_BARRIERS; i++) {
      barrier_init(barriers.landed + 8 * i, 1);
      barrier_init(barriers.left + 8 * i, PRODUCER_WARPS);
    }
    claims_init(s.claims);
    barriers_begun();
  }
  for (int i = threadIdx.x; i < SEGMENTS; i += THREADS)
    segments[i] = (i / (ROWS_H * ROWS_D)) << 24 | (ROW_D[i / ROWS_H % ROWS_D] & 0xfff) << 12
        | (ROW_H[i % ROWS_H] & 0xfff);
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role < FIRST_CONSUMER) {
    fewer_registers<PRODUCER_REGISTERS>();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (warp < PRODUCER_WARPS) {
      produce(x, s, segments, base + TILES_AT, base + SLOTS_AT, barriers, threadIdx.x);
    } else if (warp == LOADER_WARP && (thread & 31) == 0) {
      load_boxes(maps, s, base + SLOTS_AT, SLOT_BYTES, barriers.landed, barriers.left);
    } else if (warp == WEIGHTS_WARP && (thread & 31) == 0) {
      stream_weights(packed, s, base + RING_AT, full_w, empty_w);
    }
  } else {
    wait_for_results();  // of `pack`: the bias; nor is stored where `pack` may still read
    more_registers<CONSUMER_REGISTERS>();
    Fragments weights;
    weights.ring = base + RING_AT;
    weights.full = full_w;
    weights.empty = empty_w;
    consume(packed, bias, y, s, base + TILES_AT, full, empty, weights, base + BUFFERS_AT, role - FIRST_CONSUMER,
        thread);
  }
}

#undef OPAQUE
#undef OPERANDS
#undef SUMS
#undef SUMS_4
#undef INSTRUCTION
#undef WGMMA_64
#undef COLUMN
#undef VALUE
#undef CHUNKS_OF
#undef FIRST_TILE
#undef NEXT_TILE
#undef PACK_SYNC
#undef FRAGMENTS
#undef STAGE_FRAGMENTS
#undef RUN_FIRST
#undef RUN_NB
#undef RUN_J
#undef TOGETHER
}  // namespace forward

// =====================================================================================================================
// Forward where rows begin off 16 bytes: wgmma tf32, tile 1x2x8x24 (NxDxHxW of q) x 64 rows, chunk of 8 channels,
// pixels halved, weights ring of 5 x 5 fragments, 206 KB shared.
// =====================================================================================================================

namespace forward_unaligned {

// Gather-GEMM on tensor cores: out[o = OUT_STEP q + u] = sum over taps of W(u, tap) x in[i = IN_STEP q + offset(u, tap)],
// for every axis; u < OUT_STEP are the sub-positions of q (the phases of a stride, or rows unrolled to fill a tile).
// The gradient for the input is the same with exchanged steps: `in` is the output's gradient, CIN its channels, `out` the input's.
//
// Work of a block (persistent, `for tile`): TILE_N x TILE_D x TILE_H x TILE_W positions q times one M-group. An M-group is
// MB blocks of 64 rows (for WGS_M = 2: a pair of them); a row is one output channel at one (d, h) sub-position, a block one
// W sub-position. K is input channels x taps, in chunks of CK channels.
//
// Roles:
//   producers  loads the input tile with its halo once per chunk. NCHW: 16-byte copies into a staging slot (bytes in flight:
//              STAGES_S - 1 slots), then a pass of shared memory -> registers -> shared memory that turns pixels to rows of CK
//              channels and rounds to TF32. Channels-last: copies straight to those rows.
//   consumers  multiply: weights are A, from registers, packed in fragment order (one 16-byte load per thread and step);
//              pixels are B, rows of CK channels in shared memory, swizzled. A tap is a shift of B's start by whole rows:
//              the swizzle is a function of address bits, so any shift is right (measured: 32, 64 and 128 bytes).
//   one thread streams the weights' fragments through a ring (or loads all of them once: RESIDENT).
// SPLIT 0: both consumers share an M-group and halve the pixels. 1: they share the pixels. 2: ping-pong, whole tiles in turn,
// so that one stores while the other multiplies.
//
// Sizes of the input are arguments.

constexpr int ELEMENT = 4;  // bytes of an element
constexpr int PARTS = 1;  // TF32 parts of an operand: 2 for IEEE float32, in three products
constexpr int CIN = 48;  // channels of what is read
constexpr int COUT = 48;  // channels of what is written
constexpr int CIN_G = 48;  // channels of a group in what is read
constexpr int COUT_G = 48;  // channels of a group in what is written
constexpr int TAPS = 27;  // of the kernel, over all axes
constexpr int PACK_TAPS = 4;
constexpr int CK = 8;  // channels of a chunk
constexpr int SUB_H = 8, SUB_W = 8;  // the 64 positions q that one matrix instruction takes
constexpr int SUBS = 1;  // (d, h) sub-positions in a block of 64 rows of M
constexpr int ROWS_PER_SUB = 64;  // output channels of a sub-position in a block
constexpr int W_SUBS = 1;  // W sub-positions of a tile, neighbours in a thread
constexpr int MB = 1;  // blocks of 64 rows that a consumer accumulates
constexpr int VARIANTS = 1;  // M-groups that differ in their taps
constexpr int COUT_BLOCKS = 1;  // M-groups that share the output channels of a group
constexpr int M_GROUPS = 1;  // groups x COUT_BLOCKS x VARIANTS
constexpr int STAGES_P = 2;  // input tiles in shared memory
constexpr int STAGES_S = 2;  // staging slots
constexpr int STAGES_W = 5;  // stages of the weights: of the ring, or chunks
constexpr int W_STAGE = 5;  // fragments of weights in a stage of the ring, at most
constexpr int RING_FRAGMENTS = 25;  // fragments of weights in shared memory
constexpr int RUN_GROUPS = 3;  // groups of 8 columns that the epilogue stores together
constexpr int ROWS_D = 4, ROWS_H = 10;  // input rows of a tile
constexpr int ROW_STEP_D = 1, ROW_STEP_H = 1;  // rows of the tile from one q to the next
constexpr int FIRST_W = -2;
constexpr int COLUMNS = 26;  // input columns of a tile with its halo
constexpr int COLUMN_PAD = 0;  // columns by which a box begins early
constexpr int PLANE = 26;  // columns with one residue modulo IN_STEP_W
constexpr int PLANES = 1;  // residues that some tap reads; of several boxes all
constexpr int PLANE_BARRIERS = 1;
constexpr int TAPS_UNROLLED = 9;  // taps of one stretch of code
constexpr int FRAGMENT_SETS = 3;  // sets of registers that weights take in turn
constexpr int PRODUCER_REGISTERS = 72;  // of a thread
constexpr int CONSUMER_REGISTERS = 184;  // of a thread
constexpr int OUT_STEP_D = 1, OUT_STEP_H = 1, OUT_STEP_W = 1;  // outputs from one q to the next
constexpr int IN_STEP_D = 1, IN_STEP_H = 1, IN_STEP_W = 1;  // inputs from one q to the next
constexpr int TILE_D = 2, TILE_H = 8, TILE_W = 24;  // positions q of a tile
constexpr int TILE_N = 1;  // images of a tile

// PTX in small wrappers, so that a kernel body reads as an algorithm.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Dependent launches (sm_90): a kernel launched so begins when all blocks of the one before let it; else these do nothing.
__device__ __forceinline__ void let_dependent_begin() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
// And waits for what that one wrote.
__device__ __forceinline__ void wait_for_results() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

// --- mbarriers: `count` arrivals (and the announced bytes) complete a phase; waits name the phase by its parity -------

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(count));
}
// What was initialised is seen by copies and, in a cluster, by other blocks.
__device__ __forceinline__ void barriers_begun() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}
// One thread arrives, and the phase waits for so many bytes of copies too.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_done(barrier, parity)) {}
}
template <int ID, int THREADS_OF>
__device__ __forceinline__ void named_sync() {
  asm volatile("bar.sync %0, %1;\n" ::"n"(ID), "n"(THREADS_OF) : "memory");
}
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// --- copies into shared memory ---------------------------------------------------------------------------------------

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {  // the rest of the 16 becomes zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// --- bulk copies (sm_90): one thread starts them; those to shared memory count at a barrier, those from it in groups ---

// Whole 16 bytes.
__device__ __forceinline__ void copy_bulk(u32 to, const char* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// What the thread stored in shared memory, or anywhere, is seen by wgmma and bulk copies behind it.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// --- loads and stores ------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 load_shared_u32(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_shared_u32_if(u32 a, bool ok) {  // else 0
  u32 v = 0;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p ld.shared.u32 %0, [%1];\n}\n" : "+r"(v) : "r"(a),
      "r"((u32)ok) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_shared_u16(u32 a) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ void load_shared_128(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]),
      "=r"(v[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void load_shared_64(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];\n" : "=r"(v[0]), "=r"(v[1]) : "r"(a) : "memory");
}
__device__ __forceinline__ void store_shared_128(u32 a, u32 v0, u32 v1, u32 v2, u32 v3) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"r"(a), "r"(v0), "r"(v1), "r"(v2), "r"(v3) : "memory");
}
__device__ __forceinline__ void store_shared_f32x2(u32 a, float v, float w) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};\n" ::"r"(a), "f"(v), "f"(w) : "memory");
}

// Stores under a predicate, never a branch: ptxas makes hundreds of branches of an epilogue.
__device__ __forceinline__ void store_global_if(void* to, u32 v, bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p st.global.u32 [%0], %1;\n}\n" ::"l"(to), "r"(v),
      "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_64_if(void* to, const u32 (&v)[4], bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n @p st.global.v2.u32 [%0], {%1,%2};\n}\n" ::"l"(to),
      "r"(v[0]), "r"(v[1]), "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_128_if(void* to, const u32 (&v)[4], bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p st.global.v4.u32 [%0], {%1,%2,%3,%4};\n}\n" ::"l"(to),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_16_if(void* to, u32 v, bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p st.global.u16 [%0], %1;\n}\n" ::"l"(to), "h"((u16)v),
      "r"((u32)ok) : "memory");
}

// --- the compiler and registers --------------------------------------------------------------------------------------

// The compiler knows no more of a value than its type: what follows from it is computed behind this, and sums are set ahead of a
// fence of wgmma, not behind it, where ptxas would wait for every instruction (C7519).
__device__ __forceinline__ void opaque(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void opaque(u32& v) { asm volatile("" : "+r"(v)); }
// Integers. Macros, since by references the compiler keeps variables in another order.
#define OPAQUE(a) asm volatile("" : "+r"(a))
// A warpgroup's registers for each thread (sm_90a): some are given back, or more taken.
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}
// a * b + c by one instruction, where the compiler of (long long)a * b + c takes the product apart.
__device__ __forceinline__ u64 multiply_add_wide(int a, int b, u64 c) {
  u64 r;
  asm("mad.wide.s32 %0, %1, %2, %3;\n" : "=l"(r) : "r"(a), "r"(b), "l"(c));
  return r;
}

// --- numbers ---------------------------------------------------------------------------------------------------------

// Nearest TF32, ties to even, as cuDNN rounds: with it results agree with cuDNN to 3e-6, with rna to 5e-5.
__device__ __forceinline__ u32 to_tf32(float v) {
  u32 r;
  asm("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(v));
  return r;
}

// --- matrix instructions ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}
// TAIL: signs of A and B, and how they lie.
#define OPERANDS(a, b) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

// WGMMA_N(d, a, b, scale): `scale` "1", or "0" for D = A B.
#define SUMS(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define INSTRUCTION(n, registers, a0, a1, a2, a3, b0, scale) \
  "wgmma.mma_async.sync.aligned.m64n" n "k8.f32.tf32.tf32" " {" registers "}, {" a0 "," a1 "," a2 "," a3 "}, " b0 ", " scale ", 1, 1" ";\n"
#define WGMMA_64(d, a, b, scale) asm volatile(INSTRUCTION("64", \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" "," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31", "%32", "%33", "%34", "%35", "%36", scale) : \
    SUMS(d, 0), SUMS(d, 16) : OPERANDS(a, b))

constexpr int FRAGMENT = 2048;  // bytes: 64 rows of 32 bytes of K
constexpr int SUBTILES = TILE_N * TILE_D * (TILE_H / SUB_H) * (TILE_W / SUB_W);
constexpr int NB = SUBTILES / 2;
constexpr int WGS_M = 1;
constexpr int RELEASES = 2;  // consumers that read a stage
constexpr int W_SUBTILES = TILE_W / SUB_W;
constexpr int H_SUBTILES = TILE_H / SUB_H;

// [variant, block, tap]: the tap's shift in pixel rows
__constant__ const int TAP_ROW[] = {
    0, 1, 2, 26, 27, 28, 52, 53, 54, 260, 261, 262, 286, 287, 288, 312, 313, 314, 520, 521, 522, 546, 547, 548, 572,
    573, 574
};
__constant__ const int ENTRY[] = {0,27};  // [variant][MB + 1]: where a block's taps begin
__constant__ const short SUB_D[] = {0};  // [variant][SUBS]: output offset of an M-row's sub-position
__constant__ const short SUB_HH[] = {0};
__constant__ const short U_W[] = {0};  // [variant]: first W sub-position
constexpr int VEC = 16 / ELEMENT;  // elements of a 16-byte unit
constexpr int ROW_BYTES = CK * ELEMENT;  // a pixel's row in a tile: 32, 64 or 128
constexpr int UNITS_PER_ROW = ROW_BYTES / 16;
constexpr int K_STEPS = ROW_BYTES / 32;  // a matrix instruction takes 32 bytes of K
constexpr int SEGMENTS = TILE_N * ROWS_D * ROWS_H;
// Columns of a segment with one residue modulo IN_STEP_W make a plane of PLANE neighbours; there are PLANES residues that some tap
// reads. A segment has its planes one behind the other. STRIDED_BOX: a plane is a box, of all segments of a band of rows.
constexpr int PITCH = PLANES * PLANE;  // pixel rows from a segment to the next
constexpr int PIXELS = SEGMENTS * PITCH;
#define COLUMN(within) ((within) % PLANE * IN_STEP_W + (within) / PLANE)
constexpr int PART_BYTES = (PIXELS * ROW_BYTES + 1023) / 1024 * 1024;
constexpr int STAGE_BYTES = PARTS * PART_BYTES;
// 16-byte units of a segment: boxes of BOX_UNITS begin COLUMN_PAD columns early, at whole units; threads take the units that hold
// the row, whatever its alignment.
constexpr int STAGING_UNITS = (COLUMNS + (2 * VEC - 2)) / VEC;
constexpr int ROW_UNITS = STAGING_UNITS;
// A slot is [box][image][channel][row][column]. There are several boxes where rows are longer than one; or, CLASSED, where rows do
// not all begin at the same place of a 16-byte unit: then rows and channels of one class, which do, are a tensor and a box.
constexpr int CLASS_ROWS = ROWS_H;
constexpr int CHANNEL_BYTES = ROWS_D * CLASS_ROWS * ROW_UNITS * 16;
constexpr int SLOT_BOXES = (STAGING_UNITS + ROW_UNITS - 1) / ROW_UNITS;
constexpr int COPIED_BYTES = TILE_N * CK * CHANNEL_BYTES;  // of a box
constexpr int SLOT_BOX_BYTES = (COPIED_BYTES + 127) / 128 * 128;
constexpr int SLOT_BYTES = SLOT_BOXES * SLOT_BOX_BYTES;
constexpr int CHUNKS = (CIN_G + CK - 1) / CK;
constexpr int CONSUMERS = 2;
constexpr int CONSUMER_THREADS = CONSUMERS * 128;
// two warpgroups of 56 registers produce, so that the consumers have 200: six warps turn pixels, one loads them,
// one loads the weights
constexpr int PRODUCER_THREADS = 192;
constexpr int WEIGHTS_WARP = 7;
constexpr int FIRST_CONSUMER = 2;
constexpr int PRODUCER_WARPS = PRODUCER_THREADS / 32;
constexpr int THREADS = FIRST_CONSUMER * 128 + CONSUMER_THREADS;

__constant__ const int ROW_D[] = {-2,-1,0,1};  // input offset of a tile's rows
__constant__ const int ROW_H[] = {-2,-1,0,1,2,3,4,5,6,7};
#define VALUE(v) (v)

struct Sizes {                                         // one layout for the packed argument block
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;                       // tiles of q per axis
  int tiles;                                           // all of them, times M_GROUPS
};

// Byte of the 16-byte unit `unit` of pixel row `p` in a tile.
__device__ __forceinline__ u32 unit_at(int p, int unit) {
  int swizzle = (p >> 2) & 1;
  return p * ROW_BYTES + ((unit ^ swizzle) << 4);
}

// A place in a ring of `count` stages, and the parity of its phase.
struct Cursor {
  u32 stage, parity;
  __device__ __forceinline__ void next(u32 count) {
    if (++stage == count) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Tile {
  int group, cout_block, variant;                      // M-group
  int n, d, h, w;                                      // first q
};

__device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  Tile t;
  int m = index % M_GROUPS, q = index / M_GROUPS;
  t.variant = m % VARIANTS;
  t.cout_block = m / VARIANTS % COUT_BLOCKS;
  t.group = m / (VARIANTS * COUT_BLOCKS);
  t.w = q % s.tiles_w * TILE_W;  q /= s.tiles_w;
  t.h = q % s.tiles_h * TILE_H;  q /= s.tiles_h;
  t.d = q % s.tiles_d * TILE_D;
  t.n = q / s.tiles_d * TILE_N;
  return t;
}

__device__ __forceinline__ int entries_of(int variant) {
  return ENTRY[variant * (MB + 1) + MB] - ENTRY[variant * (MB + 1)];
}
__device__ __forceinline__ int chunks_of(int variant) { return entries_of(variant) ? CHUNKS : 0; }  // 0: only the bias
#define CHUNKS_OF(tile, s) chunks_of((tile).variant)
// The tiles of a block: the first, and from one to the next. (No functions of the tile and the sizes: with these ptxas orders the
// roles' instructions in another way.)
#define FIRST_TILE(s) blockIdx.x
#define NEXT_TILE(index, s) index += gridDim.x

// =====================================================================================================================
// Packing: weight (CIN, COUT_G, taps), for GRAD_INPUT (COUT, CIN_G, taps), to fragments [group][cout
// block][variant][chunk][entry][k step][part][wgs][warp][lane]
// =====================================================================================================================

constexpr int PACK_SPLITS = (TAPS + PACK_TAPS - 1) / PACK_TAPS;  // blocks that share the taps
__constant__
// [variant, block, tap][SUBS]: the kernel's tap, -1 for none
const short TAP_INDEX[] = {26,25,24,23,22,21,20,19,18,17,16,15,14,13,12,11,10,9,8,7,6,5,4,3,2,1,0};

// A part is 16 rows of M, those of a warp, for one step of K and PACK_TAPS taps. A block brings its weights to shared
// memory in the order of memory, then writes its quarter of each of these taps' fragments as one piece, two at a time.
constexpr int PACK_THREADS = 256;
constexpr int PACK_PITCH = 5;  // odd, so that a warp's rows and channels meet different banks
constexpr int PACK_K = 32 / ELEMENT;  // input channels of a step
constexpr int PACK_OUTER = PACK_K;  // of a block along the weight's first dimension
constexpr int PACK_INNER = 16;  // and along its second
constexpr int PACK_PLANE = COUT_G * TAPS;  // elements from one index of its first dimension to the next
constexpr int QUARTER = FRAGMENT / 4 / 4;  // words

// A block's weights to shared memory, [row of M][channel][tap]; `outer`, `inner` and `taps` of them exist. A warp takes
// an index of the first dimension, whose elements it reads in the order of memory: taps innermost, or (LAST) channels,
// with taps `tap_step` apart.
template <bool LAST>
__device__ __forceinline__ void bring_weights(float* tile, const float* __restrict__ from, int outer, int inner,
    int taps, int tap_step, int thread) {
  constexpr int COUNT = PACK_INNER * PACK_TAPS;
#pragma unroll
  for (int j = 0; j < PACK_OUTER / (PACK_THREADS / 32); j++) {
    int o = thread / 32 + j * (PACK_THREADS / 32);
#pragma unroll 16  // loads in flight
    for (int k = 0; k < (COUNT + 31) / 32; k++) {
      int e = thread % 32 + k * 32, i = LAST ? e % PACK_INNER : e / PACK_TAPS,
          tap = LAST ? e / PACK_INNER : e % PACK_TAPS;
      bool exists = o < outer && i < inner && (tap < taps);
      tile[(i * PACK_K + o) * PACK_PITCH + tap] = exists
          ? from[o * PACK_PLANE + (LAST ? i + tap * tap_step : i * TAPS + tap)] : 0;
    }
  }
}

#define PACK_SYNC() __syncthreads()

// Weights are dense: contiguous, taps one element apart, or channels-last, `tap_step` elements.
__device__ __forceinline__ void pack_part(float* tile, const float* __restrict__ weight, u32* __restrict__ packed,
    int tap_step, int rest, int thread) {
  int begin = rest % PACK_SPLITS * PACK_TAPS;  rest /= PACK_SPLITS;
  int warp = rest % 4;  rest /= 4;
  int wg = rest % WGS_M;  rest /= WGS_M;
  int k_step = rest % K_STEPS;  rest /= K_STEPS;
  int chunk = rest % CHUNKS, block = rest / CHUNKS, group = block / COUT_BLOCKS;
  int cout = (block % COUT_BLOCKS * WGS_M + wg) * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB,
      cin = chunk * CK + k_step * PACK_K;
  int outer = cin, inner = cout;  // the group's first along the weight's dimensions
  const float* from = weight + (long long)(group * CIN_G + outer) * PACK_PLANE;
  int outer_left = CIN_G - outer, inner_left = COUT_G - inner;
  if (tap_step == 1)
    bring_weights<false>(tile, from + (inner * TAPS + begin), outer_left, inner_left, TAPS - begin, 1, thread);
  else bring_weights<true>(tile, from + (inner + begin * tap_step), outer_left, inner_left, TAPS - begin, tap_step,
      thread);
  PACK_SYNC();
  int sub = warp * 16 / ROWS_PER_SUB, entries = ENTRY[VARIANTS * (MB + 1) - 1];
  int word = thread % QUARTER, r = word & 3, lane = word >> 2;  // the thread's of a fragment: these rows and channels
  const float* own = tile
      + (((lane >> 2) + (r & 1) * 8) * PACK_K + (lane & 3) * (4 / ELEMENT) + (r >> 1) * (16 / ELEMENT)) * PACK_PITCH;
  // -1: zeros, by the first of the blocks
  auto here = [&](int tap) { return tap < 0 ? begin == 0 : (u32)(tap - begin) < PACK_TAPS; };
  auto write = [&](int variant, int e, int tap) {       // the thread's word of an entry's fragment
    int of = entries_of(variant), before = ENTRY[variant * (MB + 1)];
    int fragment = ((block * entries + before) * CHUNKS + chunk * of + e) * K_STEPS + k_step;
    u32* to = packed + (long long)((fragment * PARTS * WGS_M + wg) * 4 + warp) * QUARTER + word;
    const float* at = own + (tap - begin);
    float v = tap < 0 ? 0.f : *at;
    u32 high = to_tf32(v);
    *to = high;
  };
#pragma unroll 1
  for (int variant = 0; variant < VARIANTS; variant++) {
    int of = entries_of(variant), before = ENTRY[variant * (MB + 1)];
#pragma unroll 4
    for (int e = thread / QUARTER; e < of; e += PACK_THREADS / QUARTER) {
      int tap = TAP_INDEX[(before + e) * SUBS + sub];
      if (here(tap)) write(variant, e, tap);
    }
  }
}

__global__ void __launch_bounds__(PACK_THREADS) pack(const float* __restrict__ weight, u32* __restrict__ packed,
    int tap_step) {
  __shared__ float tile[16 * PACK_K * PACK_PITCH];
  let_dependent_begin();                                // `gather`
  pack_part(tile, weight, packed, tap_step, blockIdx.x, threadIdx.x);
}

// =====================================================================================================================
// Producer
// =====================================================================================================================

struct Source {                                        // where a tile's chunk lies in the input
  int n, d, h, w;                                      // of the halo's corner, before the rows' offsets
  int channel, left;                                   // first channel, channels left in the group
};

__device__ __forceinline__ Source source_of(const Tile& t, int chunk) {
  return {t.n, t.d * IN_STEP_D, t.h * IN_STEP_H, t.w * IN_STEP_W + FIRST_W, t.group * CIN_G + chunk * CK,
      CIN_G - chunk * CK};
}

// The segment's (n, d, h), and whether that row of the input exists.
__device__ __forceinline__ bool row_of(const Source& at, const Sizes& s, int packed, int& n, int& d, int& h) {
  n = at.n + (packed >> 24);
  d = at.d + ((packed << 8) >> 20);
  h = at.h + ((packed << 20) >> 20);
  return n < s.batch && (u32)d < (u32)s.in_d && (u32)h < (u32)s.in_h;
}

// Copies CK channels of every segment into a slot, in the 16-byte units of memory that hold them, so that any alignment is
// served; units without a pixel of the row are left out. A segment then begins (address % 16) bytes into its place.
__device__ __forceinline__ void stage(const char* __restrict__ x, const Sizes& s, const Source& at, u32 slot,
    int thread) {
  long long slice = (long long)s.in_h * s.in_w * ELEMENT, plane = slice * s.in_d;
  const char* corner = x + ((long long)at.n * CIN + at.channel) * plane + (long long)at.w * ELEMENT;
  // A thread keeps its channel and place in the row for all rows, since finding them anew for each unit is
  // what would take the time. Where rows are short, threads share them out.
  constexpr int PLACES = CK * STAGING_UNITS, SHARES = PRODUCER_THREADS / PLACES;
  constexpr int SLICES = TILE_N * ROWS_D, BY_SLICE = SHARES, BY_ROW = 1;
  int share = thread / PLACES, place_of = thread % PLACES;
  if (share >= SHARES) return;
#pragma unroll 1
  for (int unit = place_of % STAGING_UNITS, c = place_of / STAGING_UNITS; c < CK;) {
    const char* place = corner + c * plane + unit * 16;
    int column = at.w + unit * VEC;                   // of the unit's first element, were the row aligned
    u32 to = slot + c * CHANNEL_BYTES + unit * 16;
#pragma unroll 1
    for (int r = share; r < SLICES; r += BY_SLICE) {
      int image = r / ROWS_D, d = at.d + ROW_D[r % ROWS_D];
      bool exists = at.n + image < s.batch && (u32)d < (u32)s.in_d;
      const char* line = place + image * (CIN * plane) + d * slice;
#pragma unroll 5
      for (int j = 0; j < ROWS_H; j += BY_ROW) {
        int h = at.h + ROW_H[j];
        u64 p = multiply_add_wide(h, s.in_w * ELEMENT, (u64)line);
        int first = column - (int)(p & 15) / ELEMENT;
        if (exists && (u32)h < (u32)s.in_h && first + VEC > 0 && first < s.in_w)
          copy16(to + image * (CK - 1) * CHANNEL_BYTES + (r * ROWS_H + j) * (STAGING_UNITS * 16),
              (const char*)(p & ~15ull));
      }
    }
    break;
    unit += PRODUCER_THREADS % STAGING_UNITS;
    c += PRODUCER_THREADS / STAGING_UNITS;
    if (unit >= STAGING_UNITS) {
      unit -= STAGING_UNITS;
      c++;
    }
  }
}

constexpr int OWN_PIXELS = (PIXELS + PRODUCER_THREADS - 1) / PRODUCER_THREADS;
__device__ __forceinline__ int pixel_row(int i) {
  return i;
}

// A thread's pixels of a tile: where they lie in a slot and, for copies by threads, whether they are in the image and how their
// row is aligned. Found once a tile, not a chunk.
struct Pixels {
  u32 from[OWN_PIXELS], ok;
  u32 plane;  // channel c of a row begins at (phase + c * plane) % VEC of a unit
  __device__ __forceinline__ void locate(const char* x, const Sizes& s, const Source& at, const int* segments,
      int thread) {
    plane = (u32)s.in_d * s.in_h * s.in_w;
    ok = 0;
#pragma unroll
    for (int k = 0; k < OWN_PIXELS; k++) {
      int p = pixel_row(thread + k * PRODUCER_THREADS), segment = p / PITCH, within = p % PITCH;
      int column = COLUMN(within), image = segment / (ROWS_D * ROWS_H);
      if (thread + k * PRODUCER_THREADS >= PIXELS) break;
      int at_column = column + COLUMN_PAD, box = 0;
      from[k] = box * SLOT_BOX_BYTES + (segment + image * (CK - 1) * (ROWS_D * ROWS_H)) * ROW_UNITS * 16
          + (at_column - box * (ROW_UNITS * VEC)) * ELEMENT;
      int n, d, h;
      bool in = row_of(at, s, segments[segment], n, d, h) && column < COLUMNS && (u32)(at.w + column) < (u32)s.in_w;
      u32 first = ((u32)n * CIN + at.channel) * plane + ((u32)d * s.in_h + h) * s.in_w + at.w + (u32)((u64)x / ELEMENT);
      from[k] |= (first & (VEC - 1)) << 24;             // the low 24 bits: the place in a slot; above: the phase
      ok |= (u32)in << k;
    }
  }
};

// A slot's pixels to rows of CK channels, rounded: a lane takes a pixel, so that loads and stores meet all banks.
template <bool ALIGNED>  // every channel of a row has the same misalignment
__device__ __forceinline__ void turn(const Pixels& own, u32 exist, int channel, int left, u32 slot, u32 tile,
    int thread) {
#pragma unroll
  for (int k = 0; k < OWN_PIXELS; k++) {
    int p = pixel_row(thread + k * PRODUCER_THREADS);
    if (thread + k * PRODUCER_THREADS >= PIXELS) break;
    bool ok = exist >> k & 1;
    u32 phase = own.from[k] >> 24, from = slot + (own.from[k] & 0xffffff) + (ALIGNED ? phase * ELEMENT : 0);
#pragma unroll 2  // more of them spill
    for (int unit = 0; unit < UNITS_PER_ROW; unit++) {
      u32 v[VEC];
#pragma unroll
      for (int e = 0; e < VEC; e++) {
        int c = unit * VEC + e;
        bool have = ok;
        u32 a = from + c * CHANNEL_BYTES;
        if (!ALIGNED) a += ((phase + (channel + c) * own.plane) & (VEC - 1)) * ELEMENT;
        v[e] = have ? load_shared_u32(a) : 0;
      }
      u32 hi[4];
#pragma unroll
      for (int e = 0; e < 4; e++) hi[e] = to_tf32(__uint_as_float(v[e]));
      store_shared_128(tile + unit_at(p, unit), hi[0], hi[1], hi[2], hi[3]);
    }
  }
}

// A walk over (tile, chunk) in the order in which consumers take them.
struct Walk {
  int index, chunk;
  Tile tile;
  __device__ __forceinline__ void begin(int first, const Sizes& s) { index = first; chunk = 0; settle(s); }
  __device__ __forceinline__ bool live(const Sizes& s) const { return index < s.tiles; }
  __device__ __forceinline__ void settle(const Sizes& s) {  // past tiles without chunks
    while (index < s.tiles) {
      tile = tile_at(index, s);
      if (chunk < CHUNKS_OF(tile, s)) return;
      NEXT_TILE(index, s);
      chunk = 0;
    }
  }
  __device__ __forceinline__ void next(const Sizes& s) {
    if (++chunk >= CHUNKS) settle(s);
  }
};

// The tile is written: make it visible to the matrix units and say so, once a warp.
__device__ __forceinline__ void hand_over(u32 barrier, int lane) {
  fence_async_shared();
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}

struct Barriers { u32 full, empty, landed, left; };  // of tiles; of slots or boxes: `landed` by the copy engine

__device__ __forceinline__ void produce(const char* __restrict__ x, const Sizes& s, const int* segments, u32 tiles,
    u32 slots, const Barriers& barriers, int thread) {
  int lane = thread & 31;
  Walk now;
  Cursor tile = {0, 1};
  Pixels own;
  Cursor slot = {0, 0};
  Walk ahead;
  ahead.begin(FIRST_TILE(s), s);
  u32 next_slot = 0;
#pragma unroll 1
  for (int i = 0; i < STAGES_S - 1; i++) {
    if (ahead.live(s)) {
      stage(x, s, source_of(ahead.tile, ahead.chunk), slots + i * SLOT_BYTES, thread);
      ahead.next(s);
    }
    copy_commit();
  }
  next_slot = STAGES_S - 1;
#pragma unroll 1
  for (now.begin(FIRST_TILE(s), s); now.live(s); now.next(s), tile.next(STAGES_P), slot.next(STAGES_S)) {
    if (now.chunk == 0) own.locate(x, s, source_of(now.tile, 0), segments, thread);
    copy_wait<STAGES_S - 2>();
    named_sync<1, PRODUCER_THREADS>();  // everyone's copies have landed, and everyone has left the next slot
    if (ahead.live(s)) {
      stage(x, s, source_of(ahead.tile, ahead.chunk), slots + next_slot * SLOT_BYTES, thread);
      ahead.next(s);
    }
    if (++next_slot == STAGES_S) next_slot = 0;
    copy_commit();
    barrier_wait(barriers.empty + tile.stage * 8, tile.parity);
    int channel = now.chunk * CK;
    // Boxes bring zeros for pixels that do not exist, but for those ahead of a class's rows.
    u32 exist = own.ok;
    if (own.plane % VEC == 0) {
      turn<true>(own, exist, channel, CIN_G - channel, slots + slot.stage * SLOT_BYTES,
          tiles + tile.stage * STAGE_BYTES, thread);
    } else {
      turn<false>(own, exist, channel, CIN_G - channel, slots + slot.stage * SLOT_BYTES,
          tiles + tile.stage * STAGE_BYTES, thread);
    }
    hand_over(barriers.full + tile.stage * 8, lane);
  }
}

// =====================================================================================================================
// Weights: fragments in the order in which they are used
// =====================================================================================================================

#define FRAGMENTS(entries) ((entries) * CHUNKS * K_STEPS * PARTS)

__device__ __forceinline__ const char* fragments_of(const char* packed, const Tile& t) {
  long long before = (long long)(t.group * COUT_BLOCKS + t.cout_block) * FRAGMENTS(ENTRY[VARIANTS * (MB + 1) - 1]);
  return packed + (before + FRAGMENTS(ENTRY[t.variant * (MB + 1)])) * (WGS_M * FRAGMENT);
}

constexpr int STEPS_PER_TAP = K_STEPS * PARTS;
// A stretch is a piece of code without a loop: matrix instructions are queued from its beginning to its end. STRAIGHT: all blocks
// of a chunk; else TAPS_UNROLLED taps of a block, and single ones that are left. A stage of the ring holds W_STAGE fragments of a
// stretch, its last one what is left, so that the code knows where stages begin. RESIDENT: a chunk is a stage, one
// behind the other.
#define STAGE_FRAGMENTS(left) ((left) < W_STAGE ? (left) : W_STAGE)
constexpr int LONGEST_STRETCH = TAPS_UNROLLED * STEPS_PER_TAP;  // where not STRAIGHT

// Where a tile's weights come from, in the order in which they are used.
typedef const char* Weights;  // packed; chunks lie one behind the other
__device__ __forceinline__ Weights weights_of(const char* packed, const Tile& t) { return fragments_of(packed, t); }
__device__ __forceinline__ void bring(u32 to, const char* from, u32 bytes, u32 barrier) {
  expect_bytes(barrier, bytes);
  copy_bulk(to, from, bytes, barrier);
}

// One thread: streams every tile's weights through the ring; RESIDENT: loads them once.
template <class Source>
__device__ __forceinline__ void stream_weights(const Source& packed, const Sizes& s, u32 ring, u32 full, u32 empty) {
  wait_for_results();                                   // of `pack`
  Cursor cursor = {0, 1};
#pragma unroll 1
  for (int index = FIRST_TILE(s); index < s.tiles; NEXT_TILE(index, s)) {
    Tile t = tile_at(index, s);
    Weights from = weights_of(packed, t);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks_of(t.variant); chunk++) {
#pragma unroll 1
      for (int b = 0; b < MB; b++) {
        int left = ENTRY[t.variant * (MB + 1) + b + 1] - ENTRY[t.variant * (MB + 1) + b];
        left *= STEPS_PER_TAP;
#pragma unroll 1
        while (left > 0) {
          int stretch = left >= LONGEST_STRETCH ? LONGEST_STRETCH : STEPS_PER_TAP;
          left -= stretch;
#pragma unroll 1
          for (; stretch > 0; stretch -= W_STAGE, cursor.next(STAGES_W)) {
            u32 bytes = STAGE_FRAGMENTS(stretch) * (WGS_M * FRAGMENT);
            barrier_wait(empty + cursor.stage * 8, cursor.parity);
            bring(ring + cursor.stage * (W_STAGE * WGS_M * FRAGMENT), from, bytes, full + cursor.stage * 8);
            from += bytes;
          }
        }
      }
    }
  }
}

// A thread's part of a ring's first fragment.
__device__ __forceinline__ u32 fragment_part(int wg, int thread) {
  return thread * 16;
}
// Fragment i of those that begin at `at`.
__device__ __forceinline__ void load_fragment(u32 (&a)[4], u32 at, int i) {
  load_shared_128(a, at + i * (WGS_M * FRAGMENT));
}

// The consumers' side. Before sm_90 fragments come straight from global memory (L2).
struct Fragments {
  u32 ring, full, empty;  // of the ring: this thread's part of its first fragment; barriers
  Cursor cursor;                                       // the stage to be waited for next
  u32 at;  // this thread's part of the first fragment of the stage in hand, or of the stretch
  u32 in_hand;                                         // the barrier that says that the stage in hand is free
  bool first;                                          // RESIDENT: the first tile waits for the weights
  const char* from;

  __device__ __forceinline__ void begin(const char* packed, const Tile& t, int offset) {
  }
  __device__ __forceinline__ void begin_chunk(int chunk) {
  }
  __device__ __forceinline__ void end() { first = false; }
  // Fragment i of a stretch; a stage is waited for with its first.
  __device__ __forceinline__ void load(u32 (&a)[4], int i) {
    if (i % W_STAGE == 0) {
      barrier_wait(full + cursor.stage * 8, cursor.parity);
      at = ring + cursor.stage * (W_STAGE * WGS_M * FRAGMENT);
      in_hand = empty + cursor.stage * 8;
      cursor.next(STAGES_W);
    }
    load_fragment(a, at, i % W_STAGE);
  }
  __device__ __forceinline__ void end_stretch(int steps) {
  }
  __device__ __forceinline__ void skip(int variant) {  // a tile
    for (int chunk = 0; chunk < chunks_of(variant); chunk++)
      for (int b = 0; b < MB; b++) {
        int left = (ENTRY[variant * (MB + 1) + b + 1] - ENTRY[variant * (MB + 1) + b]) * STEPS_PER_TAP;
        int longest = LONGEST_STRETCH, whole = longest ? left / longest : 0;
        int stages = whole * ((longest + W_STAGE - 1) / W_STAGE)
            + left % longest / STEPS_PER_TAP * ((STEPS_PER_TAP + W_STAGE - 1) / W_STAGE);
        for (; stages > 0; stages--) cursor.next(STAGES_W);
      }
  }
};

// =====================================================================================================================
// Consumers
// =====================================================================================================================

struct Place { int n, d, h, w; };  // of a subtile in a tile, in q

// PAIRED: subtiles one below the other are neighbours, so that one matrix instruction takes both (WIDE).
__device__ __forceinline__ constexpr Place place_of(int subtile) {
  return {subtile / (W_SUBTILES * H_SUBTILES * TILE_D), subtile / (W_SUBTILES * H_SUBTILES) % TILE_D,
          subtile / W_SUBTILES % H_SUBTILES * SUB_H,
          subtile % W_SUBTILES * SUB_W};
}
// its first pixel's row in the tile, for a tap of shift 0
__device__ __forceinline__ constexpr int pixel_row_of(int subtile) {
  Place p = place_of(subtile);
  return ((p.n * ROWS_D + p.d * ROW_STEP_D) * ROWS_H + p.h * ROW_STEP_H) * PITCH + p.w;
}
constexpr int SUBTILES_OF_WGMMA = 1;  // that a matrix instruction takes
constexpr int GROUP_ROWS = ROW_STEP_H * PITCH;  // pixel rows from one group of eight columns to the next

// Where a consumer's pixels lie in a tile. `start`: of its first subtile; wgmma: the lower half of its descriptor, the same in all
// threads; mma.sync: the tile's address.
struct Columns {
  u32 start;
  int first;                                           // its first subtile
};

// Pixel rows from the consumer's first subtile to another of its: known to the compiler where both halves of a tile are alike.
__device__ __forceinline__ constexpr bool halves_alike() {
  for (int nb = 1; nb < NB; nb++)
    if (pixel_row_of(NB + nb) - pixel_row_of(NB) != pixel_row_of(nb) - pixel_row_of(0)) return false;
  return true;
}
__device__ __forceinline__ int rows_to(int nb, int first) {
  constexpr bool alike = halves_alike();
  return alike ? pixel_row_of(nb) - pixel_row_of(0) : pixel_row_of(first + nb) - pixel_row_of(first);
}

__device__ __forceinline__ Columns pixels_of(u32 tile, int first) {
  u32 start = (tile + pixel_row_of(first) * ROW_BYTES) >> 4 | 1u << 16;
  return {__shfl_sync(0xffffffffu, start, 0), first};  // so that ptxas counts in uniform registers
}

// acc[64 x 64 NB] += fragment x pixels; `shift` is the tap's, in pixel rows, `part` the pixels' part. FRESH: = instead of +=.
template <bool FRESH>
__device__ __forceinline__ void multiply(float (&acc)[NB][32], const u32 (&a)[4], const Columns& pixels, int shift,
    int k_step, int part, int lane) {
  const u64 upper = ((u64)(GROUP_ROWS * ROW_BYTES >> 4) << 32) | ((u64)(3) << 62);
#pragma unroll
  for (int nb = 0; nb < NB; nb += SUBTILES_OF_WGMMA) {
    u64 b = upper | (pixels.start + shift * (ROW_BYTES / 16)
        + (rows_to(nb, pixels.first) * ROW_BYTES + k_step * 32 + part * PART_BYTES) / 16);
    float* d = acc[nb];
    WGMMA_64(d, a, b, "1");
  }
}

// A stage of the ring of weights whose fragments are in registers, by its barrier.
__device__ __forceinline__ void give_back_weights(u32 done, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(done);
}

// Step i of a stretch of `steps`. Fragments take FRAGMENT_SETS sets of registers in turn: one is multiplied by, the one before may
// still be, the next one is loaded. At the end of a stretch the pipeline drains, since in a loop ptxas cannot see that a set is
// free again and serialises every wgmma, C7513. CONTINUED: where the
// steps of a chunk are a multiple of the sets it can, and a chunk's last step is multiplied while the next chunk begins. ROLLED: so
// it can where those of a round are; `left` rounds of the chunk follow.
__device__ __forceinline__ void step(float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights,
    const Columns& pixels, int shift, int i, int steps, int lane, int left = 0) {
  wgmma_fence();
  multiply<false>(acc, a[i % FRAGMENT_SETS], pixels, shift, i % K_STEPS, 0, lane);
  wgmma_commit();
  u32 done = weights.in_hand;
  if (i + 1 < steps) {
    weights.load(a[(i + 1) % FRAGMENT_SETS], i + 1);
    wgmma_wait<1>();
  } else {
    weights.end_stretch(steps);
    if (left) weights.load(a[0], 0);
    wgmma_wait<1>();
  }
  if (i + 1 == steps || (i + 1) % W_STAGE == 0) give_back_weights(done, lane);
}

// A pixel tile that no matrix instruction reads any more, by its barrier; 0: none.
__device__ __forceinline__ void give_back(u32 barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}

// 0 to N - 1.
template <int...>
struct Sequence {};
template <int N, int... BEHIND>
struct Counting : Counting<N - 1, N - 1, BEHIND...> {};
template <int... ALL>
struct Counting<0, ALL...> { typedef Sequence<ALL...> type; };

__device__ constexpr int shift_at(int i) {
  constexpr int shift[] = {0,1,2,26,27,28,52,53,54};
  return shift[i];
}

template <int STEP>
__device__ __forceinline__ void multiply_one(float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights,
    const Columns& pixels, int left, u32& behind, int lane) {
  step(acc, a, weights, pixels, shift_at(STEP / STEPS_PER_TAP), STEP, LONGEST_STRETCH, lane, left);
}
template <int... STEPS>
__device__ __forceinline__ void multiply_round(Sequence<STEPS...>, float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4],
    Fragments& weights, const Columns& pixels, int left, u32& behind, int lane) {
  (multiply_one<STEPS>(acc, a, weights, pixels, left, behind, lane), ...);
}

// A loop of rounds, in each of which all sets of fragments come round: so ptxas can see that a set is free again, and the tensor
// cores do not drain between them. Rounds are alike but for where their pixels begin. What a round begins with, its pixels' place
// and its first fragment, is asked for in the one before: tables of taps read in each
// would be slower. Shorter stretches stay straight, which is the fastest.
template <int FIRST>
__device__ __forceinline__ void multiply_chunk(int variant, float (&acc)[MB][NB][32], Fragments& weights,
    const Columns& pixels, u32 behind, int lane) {
  u32 a[FRAGMENT_SETS][4];
  int left = (ENTRY[variant * (MB + 1) + MB] - ENTRY[variant * (MB + 1)]) / TAPS_UNROLLED;
  weights.load(a[0], 0);
#pragma unroll
  for (int b = 0; b < MB; b++) {
    int entry = ENTRY[variant * (MB + 1) + b], last = ENTRY[variant * (MB + 1) + b + 1];
    int begin = TAP_ROW[entry];
#pragma unroll 1
    while (entry < last) {
      Columns shifted = pixels;
      shifted.start = __shfl_sync(0xffffffffu, pixels.start + begin * (ROW_BYTES / 16), 0);
      entry += TAPS_UNROLLED;
      if (entry < last) begin = TAP_ROW[entry];
      multiply_round(typename Counting<LONGEST_STRETCH>::type(), acc[b], a, weights, shifted, --left, behind, lane);
    }
  }
  wgmma_wait<0>();
}

// --- epilogue --------------------------------------------------------------------------------------------------------
// A warp holds 16 rows of M. They pass through a shared buffer, so that memory is written in whole lines: NCHW 8 rows of a run of
// RUN x W_SUBS consecutive outputs, through a buffer of the warp; channels-last ROUND pixels of ROWS_PER_SUB channels, through one
// of all warps that hold these.
constexpr int RUN = RUN_GROUPS * 8;
// Bytes of a row of the buffer; the rest beyond whole 128 bytes lets rows meet different banks, and a row begin up to
// 31 bytes late.
constexpr int RUN_PITCH = (RUN * W_SUBS * ELEMENT + 127) / 128 * 128 + 32;
constexpr int BUFFER_BYTES = 8 * RUN_PITCH;
constexpr int RUN_SUBTILES = RUN_GROUPS;  // neighbours along W that a run crosses
constexpr int RUNS_OF_SUBTILE = 8;
// Group k of run i of subtiles RUN_FIRST(r) ...: which subtile, and which of its groups of 8 columns.
#define RUN_FIRST(r) ((r) * RUN_SUBTILES)  // subtile of a run's first group
#define RUN_NB(r, i, k) (RUN_FIRST(r) + (k))
#define RUN_J(r, i, k) ((i))

// The block of a W sub-position, -1: it has no taps. Up to 16 are one number, of four bits each: a table's entries are
// constants only
// after unrolling, and until then the compiler keeps all sums in memory.
__device__ constexpr u64 packed_blocks() {
  constexpr signed char blocks[] = {0};
  u64 packed = 0;
  for (int u = 0; u < W_SUBS; u++) packed |= (u64)(blocks[u] + 1) << 4 * u;
  return packed;
}
__device__ __forceinline__ constexpr int block_of_w(int u) {
  constexpr u64 packed = packed_blocks();
  return (int)(packed >> 4 * u & 15) - 1;
}

// A warp's 16 rows of M are output channels of one (d, h) sub-position (ROWS_PER_SUB is 64, 32 or 16).
struct Slab {
  int cout, couts;                                      // first channel in the group, and how many of the 16 exist
  int od, oh;                                           // offsets of the sub-position
};

__device__ __forceinline__ Slab slab_of(const Tile& t, int cout_block, int warp) {
  Slab slab;
  int sub = warp * 16 / ROWS_PER_SUB;
  slab.cout = cout_block * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB;
  slab.couts = COUT_G - slab.cout < 16 ? COUT_G - slab.cout : 16;
  slab.od = SUB_D[t.variant * SUBS + sub];
  slab.oh = SUB_HH[t.variant * SUBS + sub];
  return slab;
}

constexpr int OUTPUTS = RUN * W_SUBS;  // of a row of a run
#define TOGETHER(unit) (2)  // outputs that a thread stores to the buffer together

// Which of a thread's outputs of a row go first to the buffer, as an exclusive or of their order, so that the lanes of an
// instruction meet different banks: rows lie 8 banks apart (half precision: 12), the outputs of neighbouring lanes 2 W_SUBS.
template <int UNIT>
__device__ __forceinline__ int order_of(int g, int q) {
  int by_column = 0;
  return by_column;
}

// One thread's 2 W_SUBS neighbouring outputs to the buffer.
template <int UNIT>
__device__ __forceinline__ void put(float (&v)[2 * W_SUBS], u32 at, int order) {
#pragma unroll
  for (int bit = TOGETHER(UNIT); bit < 8 && W_SUBS % bit == 0; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 2 * W_SUBS; i++) {
      if (i & bit) continue;
      float low = v[i], high = v[i ^ bit];
      v[i] = order & bit ? high : low;
      v[i ^ bit] = order & bit ? low : high;
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * W_SUBS; i += TOGETHER(UNIT)) {
    u32 to = at + (i ^ order) * ELEMENT;
    store_shared_f32x2(to, v[i], v[i ^ 1]);
  }
}

template <int UNIT>
__device__ __forceinline__ void copy_unit(char* to, u32 from, bool ok) {
  u32 v[4];
  if (UNIT == 16) load_shared_128(v, from);
  else if (UNIT == 8) load_shared_64(v, from);
  else v[0] = UNIT == 4 ? load_shared_u32(from) : load_shared_u16(from);
  if (UNIT == 16) store_global_128_if(to, v, ok);
  else if (UNIT == 8) store_global_64_if(to, v, ok);
  else if (UNIT == 4) store_global_if(to, v[0], ok);
  else store_global_16_if(to, v[0], ok);
}

// Eight rows in units: an instruction stores 32 of them, of several rows if they are short.
template <int UNIT>
__device__ __forceinline__ void store_units(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int PER_ROW = OUTPUTS * ELEMENT / UNIT;
#pragma unroll
  for (int i = 0; i < (8 * PER_ROW + 31) / 32; i++) {
    // rows: the first lane's, and how many on
    int index = lane + 32 * i, first = 32 * i / PER_ROW, more = index / PER_ROW - first;
    // Compared, not divided, where rows are long.
    if (PER_ROW >= 32) more = 32 * i % PER_ROW + 31 >= PER_ROW && index >= (first + 1) * PER_ROW;
    int r = first + more, at = (index - r * PER_ROW) * UNIT;
    char* row = to + first * plane + (PER_ROW >= 32 ? more ? plane : 0 : more * plane);
    bool in = PER_ROW % 4 == 0 || r < 8;
    copy_unit<UNIT>(row + at, in ? buffer + r * RUN_PITCH + at : buffer, in && at < end);
  }
}

// Eight rows that begin anywhere, a lane an output: each instruction begins at a sector's first output, since a sector of 32
// bytes whose parts are stored at different times costs as much as several whole ones. 16 bytes a lane and the ends
// of rows by themselves, as below, is slower for float32.
__device__ __forceinline__ void store_sectors(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int ROWS = 4;   // at a time: of kernels that have other ways beside, eight spill
  static_assert(8 % ROWS == 0, "all rows in turn");
#pragma unroll
  for (int from_row = 0; from_row < 8; from_row += ROWS) {
    char* row[ROWS];
    u32 from[ROWS];
    int at[ROWS];  // the lane's first output of each row; some are before or behind it
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
      int r = from_row + k;
      char* first = to + r * plane;
      at[k] = lane * 4 - ((int)(u64)first & 31);
      row[k] = first + at[k], from[k] = buffer + r * RUN_PITCH + at[k];
    }
    // What follows of a row is at known distances. A place for each output takes a third more instructions.
#pragma unroll
    for (int i = 0; i < (OUTPUTS + 38) / 32; i++) {
      u32 v[ROWS];
      bool in[ROWS];
#pragma unroll
      for (int k = 0; k < ROWS; k++) {
        in[k] = i ? at[k] < end - i * 128 : (u32)at[k] < (u32)end;
        v[k] = load_shared_u32_if(from[k] + i * 128, in[k]);
      }
#pragma unroll
      for (int k = 0; k < ROWS; k++) store_global_if(row[k] + i * 128, v[k], in[k]);
    }
  }
}

// Eight rows (output channels) of a run from the buffer to memory: `end` bytes of each. `to` is the first row's first output, rows
// lie `plane` bytes apart.
template <int UNIT>
__device__ __forceinline__ void store_rows(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  if (UNIT == 4) store_sectors(to, plane, rows, end, buffer, lane);
  else store_units<UNIT>(to, plane, rows, end, buffer, lane);
}

// Rows h * 8 ... of run i of subtiles RUN_FIRST(r) ...: a thread's outputs of its row to the buffer.
template <int UNIT>
__device__ __forceinline__ void put_rows(float (&acc)[MB][NB][32], float bias, int r, int i, int h, u32 row, int lane) {
  int g = lane >> 2, q = lane & 3, order = order_of<UNIT>(g, q);
#pragma unroll
  for (int k = 0; k < RUN_GROUPS; k++) {
    const int nb = RUN_NB(r, i, k), j = RUN_J(r, i, k);
    float v[2 * W_SUBS];
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int u = 0; u < W_SUBS; u++)
        v[c * W_SUBS + u] = block_of_w(u) < 0 ? bias
            : acc[block_of_w(u) < 0 ? 0 : block_of_w(u)][nb][4 * j + 2 * h + c];
    put<UNIT>(v, row + (k * 8 + 2 * q) * W_SUBS * ELEMENT, order);
  }
}

template <int UNIT>
__device__ __forceinline__ void pass_rows(float (&acc)[MB][NB][32], float bias, int r, int i, int h, u32 row, char* to,
    long long plane, int rows, int end, u32 buffer, int lane) {
  put_rows<UNIT>(acc, bias, r, i, h, row, lane);
  __syncwarp();
  store_rows<UNIT>(to, plane, rows, end, buffer, lane);
}

// Unrolled, since registers have no run-time index. Stores once in a loop, with only the reading of registers in
// branches, take longer and compile no faster.
__device__ __forceinline__ void epilogue(float (&acc)[MB][NB][32], const float* __restrict__ bias, char* __restrict__ y,
    const Sizes& s, const Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  OPAQUE(lane);  // what follows from it is found here, not kept from tile to tile (spills)
  int g = lane >> 2;
  Slab slab = slab_of(t, cout_block, warp);
  if (slab.couts <= 0) return;
  float b[2] = {0.f, 0.f};
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (bias && g + 8 * h < slab.couts) b[h] = VALUE(bias[t.group * COUT_G + slab.cout + g + 8 * h]);
  if (bias) {
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int e = 0; e < 32; e++) acc[m][nb][e] += b[e >> 1 & 1];
  }
  int channel = t.group * COUT_G + slab.cout;
  long long plane = (long long)s.out_d * s.out_h * s.out_w * ELEMENT;
#pragma unroll
  for (int r = 0; r < NB / RUN_SUBTILES; r++) {
    Place place = place_of(first_subtile + RUN_FIRST(r));
    int n = t.n + place.n, od = OUT_STEP_D * (t.d + place.d) + slab.od;
    bool image = n < s.batch && od < s.out_d;
#pragma unroll
    for (int i = 0; i < RUNS_OF_SUBTILE; i++) {
      int oh = OUT_STEP_H * (t.h + place.h + i) + slab.oh;
      int ow = OUT_STEP_W * (t.w + place.w) + U_W[t.variant], left = s.out_w - ow;
      if (!image || oh >= s.out_h || left <= 0) continue;
      char* to = y + (((long long)n * COUT + channel) * s.out_d + od) * s.out_h * s.out_w * ELEMENT
          + ((long long)oh * s.out_w + ow) * ELEMENT;
      int end = (left < OUTPUTS ? left : OUTPUTS) * ELEMENT;
      u32 misaligned = (u32)(u64)to | (u32)plane | end;  // multiples of what all rows begin and end at
#pragma unroll
      for (int h = 0; h < 2; h++) {
        char* first = to + h * 8 * plane;
        int rows = 8;
        u32 row = buffer + g * RUN_PITCH;
        if ((misaligned & 15) == 0) pass_rows<16>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
        else if ((misaligned & (2 * ELEMENT - 1)) == 0) pass_rows<2 * ELEMENT>(acc, b[h], r, i, h, row, first, plane,
            rows, end, buffer, lane);
        else pass_rows<ELEMENT>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
        __syncwarp();
      }
    }
  }
}

__device__ __forceinline__ void consume(const char* packed, const float* bias, char* y, const Sizes& s, u32 tiles,
    u32 full, u32 empty, Fragments& weights, u32 buffers, int wg, int thread) {
  // By a shuffle ptxas knows that branches over a warp's number do not part it; but beside BARE's stores that makes some
  // kernels slower.
  int warp = __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31;
  int first_subtile = wg * NB, offset = fragment_part(wg, thread);
  u32 buffer = buffers + (wg * 4 + warp) * BUFFER_BYTES;
  Cursor cursor = {0, 0};
  weights.cursor = {0, 0};
  weights.ring += offset;
  weights.first = true;
  int turn = 0;
#pragma unroll 1
  for (int index = FIRST_TILE(s); index < s.tiles; NEXT_TILE(index, s), turn++) {
    Tile t = tile_at(index, s);
    int chunks = chunks_of(t.variant);
    float acc[MB][NB][32];
#pragma unroll
    for (int b = 0; b < MB; b++)
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int i = 0; i < 32; i++) {
          acc[b][nb][i] = 0.f;
          opaque(acc[b][nb][i]);
        }
    weights.begin(packed, t, offset);
    int variant = __shfl_sync(0xffffffffu, t.variant, 0);  // so that ptxas knows that warps do not part over it
    u32 behind = 0;                                      // CONTINUED: the chunk that the last step may still read
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++, cursor.next(STAGES_P)) {
      Columns pixels = pixels_of(tiles + cursor.stage * STAGE_BYTES, first_subtile);
      u32 last = empty + cursor.stage * 8;
      barrier_wait(full + cursor.stage * 8, cursor.parity);
      weights.begin_chunk(chunk);
      multiply_chunk<0>(variant, acc, weights, pixels, behind, lane);
      give_back(last, lane);
    }
    weights.end();
    epilogue(acc, bias, y, s, t, t.cout_block * WGS_M, first_subtile, buffer, warp, lane);
  }
}

// =====================================================================================================================

constexpr int TILES_AT = 0;
constexpr int RING_AT = TILES_AT + STAGES_P * STAGE_BYTES;
constexpr int SLOTS_AT = RING_AT + RING_FRAGMENTS * WGS_M * FRAGMENT;
constexpr int BUFFERS_AT = SLOTS_AT + STAGES_S * SLOT_BYTES;
constexpr int BARRIERS_AT = BUFFERS_AT + CONSUMERS * 4 * BUFFER_BYTES;
constexpr int PIXEL_BARRIERS = STAGES_P * PLANE_BARRIERS;
constexpr int SLOT_BARRIERS = 0;
constexpr int SEGMENTS_AT = BARRIERS_AT + 16 * (PIXEL_BARRIERS + STAGES_W + SLOT_BARRIERS);

__global__ void __launch_bounds__(THREADS, 1)
gather(const char* __restrict__ x, const char* __restrict__ packed, const float* __restrict__ bias,
       char* __restrict__ y, int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d,
       int tiles_h, int tiles_w, int tile_count) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tile_count};
  u32 base = shared_address(memory);
  u32 full = base + BARRIERS_AT, empty = full + 8 * PIXEL_BARRIERS, full_w = empty + 8 * PIXEL_BARRIERS,
      empty_w = full_w + 8 * STAGES_W;
  const Barriers barriers = {full, empty, empty_w + 8 * STAGES_W, empty_w + 8 * (STAGES_W + SLOT_BARRIERS)};
  int* segments = (int*)(memory + SEGMENTS_AT);
  if (threadIdx.x == 0) {
    for (int i = 0; i < PIXEL_BARRIERS; i++) {
      barrier_init(full + 8 * i, PRODUCER_WARPS);
      barrier_init(empty + 8 * i, RELEASES * 4);
    }
    for (int i = 0; i < STAGES_W; i++) {
      barrier_init(full_w + 8 * i, 1);
      barrier_init(empty_w + 8 * i, RELEASES * 4);
    }
    barriers_begun();
  }
  for (int i = threadIdx.x; i < SEGMENTS; i += THREADS)
    segments[i] = (i / (ROWS_H * ROWS_D)) << 24 | (ROW_D[i / ROWS_H % ROWS_D] & 0xfff) << 12
        | (ROW_H[i % ROWS_H] & 0xfff);
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role < FIRST_CONSUMER) {
    fewer_registers<PRODUCER_REGISTERS>();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (warp < PRODUCER_WARPS) {
      produce(x, s, segments, base + TILES_AT, base + SLOTS_AT, barriers, threadIdx.x);
    } else if (warp == WEIGHTS_WARP && (thread & 31) == 0) {
      stream_weights(packed, s, base + RING_AT, full_w, empty_w);
    }
  } else {
    wait_for_results();  // of `pack`: the bias; nor is stored where `pack` may still read
    more_registers<CONSUMER_REGISTERS>();
    Fragments weights;
    weights.ring = base + RING_AT;
    weights.full = full_w;
    weights.empty = empty_w;
    consume(packed, bias, y, s, base + TILES_AT, full, empty, weights, base + BUFFERS_AT, role - FIRST_CONSUMER,
        thread);
  }
}

#undef OPAQUE
#undef OPERANDS
#undef SUMS
#undef SUMS_4
#undef INSTRUCTION
#undef WGMMA_64
#undef COLUMN
#undef VALUE
#undef CHUNKS_OF
#undef FIRST_TILE
#undef NEXT_TILE
#undef PACK_SYNC
#undef FRAGMENTS
#undef STAGE_FRAGMENTS
#undef RUN_FIRST
#undef RUN_NB
#undef RUN_J
#undef TOGETHER
}  // namespace forward_unaligned

// =====================================================================================================================
// Gradient for the input: wgmma tf32, tile 1x2x8x32 (NxDxHxW of q) x 64 rows, chunk of 8 channels, pixels halved,
// weights ring of 3 x 5 fragments, 226 KB shared.
// =====================================================================================================================

namespace grad_input {

// Gather-GEMM on tensor cores: out[o = OUT_STEP q + u] = sum over taps of W(u, tap) x in[i = IN_STEP q + offset(u, tap)],
// for every axis; u < OUT_STEP are the sub-positions of q (the phases of a stride, or rows unrolled to fill a tile).
// The gradient for the input is the same with exchanged steps: `in` is the output's gradient, CIN its channels, `out` the input's.
//
// Work of a block (persistent, `for tile`): TILE_N x TILE_D x TILE_H x TILE_W positions q times one M-group. An M-group is
// MB blocks of 64 rows (for WGS_M = 2: a pair of them); a row is one output channel at one (d, h) sub-position, a block one
// W sub-position. K is input channels x taps, in chunks of CK channels.
//
// Roles:
//   producers  loads the input tile with its halo once per chunk. NCHW: 16-byte copies into a staging slot (bytes in flight:
//              STAGES_S - 1 slots), then a pass of shared memory -> registers -> shared memory that turns pixels to rows of CK
//              channels and rounds to TF32. Channels-last: copies straight to those rows.
//   consumers  multiply: weights are A, from registers, packed in fragment order (one 16-byte load per thread and step);
//              pixels are B, rows of CK channels in shared memory, swizzled. A tap is a shift of B's start by whole rows:
//              the swizzle is a function of address bits, so any shift is right (measured: 32, 64 and 128 bytes).
//   one thread streams the weights' fragments through a ring (or loads all of them once: RESIDENT).
// SPLIT 0: both consumers share an M-group and halve the pixels. 1: they share the pixels. 2: ping-pong, whole tiles in turn,
// so that one stores while the other multiplies.
//
// Sizes of the input are arguments.

constexpr int ELEMENT = 4;  // bytes of an element
constexpr int PARTS = 1;  // TF32 parts of an operand: 2 for IEEE float32, in three products
constexpr int CIN = 48;  // channels of what is read
constexpr int COUT = 48;  // channels of what is written
constexpr int CIN_G = 48;  // channels of a group in what is read
constexpr int COUT_G = 48;  // channels of a group in what is written
constexpr int TAPS = 27;  // of the kernel, over all axes
constexpr int PACK_TAPS = 4;
constexpr int CK = 8;  // channels of a chunk
constexpr int SUB_H = 8, SUB_W = 8;  // the 64 positions q that one matrix instruction takes
constexpr int SUBS = 1;  // (d, h) sub-positions in a block of 64 rows of M
constexpr int ROWS_PER_SUB = 64;  // output channels of a sub-position in a block
constexpr int W_SUBS = 1;  // W sub-positions of a tile, neighbours in a thread
constexpr int MB = 1;  // blocks of 64 rows that a consumer accumulates
constexpr int VARIANTS = 1;  // M-groups that differ in their taps
constexpr int COUT_BLOCKS = 1;  // M-groups that share the output channels of a group
constexpr int M_GROUPS = 1;  // groups x COUT_BLOCKS x VARIANTS
constexpr int STAGES_P = 2;  // input tiles in shared memory
constexpr int STAGES_S = 2;  // staging slots
constexpr int STAGES_W = 3;  // stages of the weights: of the ring, or chunks
constexpr int W_STAGE = 5;  // fragments of weights in a stage of the ring, at most
constexpr int RING_FRAGMENTS = 15;  // fragments of weights in shared memory
constexpr int RUN_GROUPS = 4;  // groups of 8 columns that the epilogue stores together
constexpr int ROWS_D = 4, ROWS_H = 10;  // input rows of a tile
constexpr int ROW_STEP_D = 1, ROW_STEP_H = 1;  // rows of the tile from one q to the next
constexpr int FIRST_W = 0;
constexpr int COLUMNS = 34;  // input columns of a tile with its halo
constexpr int COLUMN_PAD = 0;  // columns by which a box begins early
constexpr int PLANE = 34;  // columns with one residue modulo IN_STEP_W
constexpr int PLANES = 1;  // residues that some tap reads; of several boxes all
constexpr int PLANE_BARRIERS = 1;
constexpr int TAPS_UNROLLED = 9;  // taps of one stretch of code
constexpr int FRAGMENT_SETS = 3;  // sets of registers that weights take in turn
constexpr int PRODUCER_REGISTERS = 72;  // of a thread
constexpr int CONSUMER_REGISTERS = 184;  // of a thread
constexpr int OUT_STEP_D = 1, OUT_STEP_H = 1, OUT_STEP_W = 1;  // outputs from one q to the next
constexpr int IN_STEP_D = 1, IN_STEP_H = 1, IN_STEP_W = 1;  // inputs from one q to the next
constexpr int TILE_D = 2, TILE_H = 8, TILE_W = 32;  // positions q of a tile
constexpr int TILE_N = 1;  // images of a tile

// PTX in small wrappers, so that a kernel body reads as an algorithm.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Dependent launches (sm_90): a kernel launched so begins when all blocks of the one before let it; else these do nothing.
__device__ __forceinline__ void let_dependent_begin() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
// And waits for what that one wrote.
__device__ __forceinline__ void wait_for_results() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

// --- mbarriers: `count` arrivals (and the announced bytes) complete a phase; waits name the phase by its parity -------

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(count));
}
// What was initialised is seen by copies and, in a cluster, by other blocks.
__device__ __forceinline__ void barriers_begun() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}
// One thread arrives, and the phase waits for so many bytes of copies too.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_done(barrier, parity)) {}
}
template <int ID, int THREADS_OF>
__device__ __forceinline__ void named_sync() {
  asm volatile("bar.sync %0, %1;\n" ::"n"(ID), "n"(THREADS_OF) : "memory");
}
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// --- copies into shared memory ---------------------------------------------------------------------------------------

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {  // the rest of the 16 becomes zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// --- bulk copies (sm_90): one thread starts them; those to shared memory count at a barrier, those from it in groups ---

// Whole 16 bytes.
__device__ __forceinline__ void copy_bulk(u32 to, const char* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// What the thread stored in shared memory, or anywhere, is seen by wgmma and bulk copies behind it.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// --- loads and stores ------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 load_shared_u32(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_shared_u32_if(u32 a, bool ok) {  // else 0
  u32 v = 0;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p ld.shared.u32 %0, [%1];\n}\n" : "+r"(v) : "r"(a),
      "r"((u32)ok) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_shared_u16(u32 a) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ void load_shared_128(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]),
      "=r"(v[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void load_shared_64(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];\n" : "=r"(v[0]), "=r"(v[1]) : "r"(a) : "memory");
}
__device__ __forceinline__ void store_shared_128(u32 a, u32 v0, u32 v1, u32 v2, u32 v3) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"r"(a), "r"(v0), "r"(v1), "r"(v2), "r"(v3) : "memory");
}
__device__ __forceinline__ void store_shared_f32x2(u32 a, float v, float w) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};\n" ::"r"(a), "f"(v), "f"(w) : "memory");
}

// Stores under a predicate, never a branch: ptxas makes hundreds of branches of an epilogue.
__device__ __forceinline__ void store_global_if(void* to, u32 v, bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p st.global.u32 [%0], %1;\n}\n" ::"l"(to), "r"(v),
      "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_64_if(void* to, const u32 (&v)[4], bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n @p st.global.v2.u32 [%0], {%1,%2};\n}\n" ::"l"(to),
      "r"(v[0]), "r"(v[1]), "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_128_if(void* to, const u32 (&v)[4], bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p st.global.v4.u32 [%0], {%1,%2,%3,%4};\n}\n" ::"l"(to),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_16_if(void* to, u32 v, bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p st.global.u16 [%0], %1;\n}\n" ::"l"(to), "h"((u16)v),
      "r"((u32)ok) : "memory");
}

// --- the compiler and registers --------------------------------------------------------------------------------------

// The compiler knows no more of a value than its type: what follows from it is computed behind this, and sums are set ahead of a
// fence of wgmma, not behind it, where ptxas would wait for every instruction (C7519).
__device__ __forceinline__ void opaque(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void opaque(u32& v) { asm volatile("" : "+r"(v)); }
// Integers. Macros, since by references the compiler keeps variables in another order.
#define OPAQUE(a) asm volatile("" : "+r"(a))
// A warpgroup's registers for each thread (sm_90a): some are given back, or more taken.
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}
// a * b + c by one instruction, where the compiler of (long long)a * b + c takes the product apart.
__device__ __forceinline__ u64 multiply_add_wide(int a, int b, u64 c) {
  u64 r;
  asm("mad.wide.s32 %0, %1, %2, %3;\n" : "=l"(r) : "r"(a), "r"(b), "l"(c));
  return r;
}

// --- numbers ---------------------------------------------------------------------------------------------------------

// Nearest TF32, ties to even, as cuDNN rounds: with it results agree with cuDNN to 3e-6, with rna to 5e-5.
__device__ __forceinline__ u32 to_tf32(float v) {
  u32 r;
  asm("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(v));
  return r;
}

// --- matrix instructions ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}
// TAIL: signs of A and B, and how they lie.
#define OPERANDS(a, b) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

// WGMMA_N(d, a, b, scale): `scale` "1", or "0" for D = A B.
#define SUMS(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define INSTRUCTION(n, registers, a0, a1, a2, a3, b0, scale) \
  "wgmma.mma_async.sync.aligned.m64n" n "k8.f32.tf32.tf32" " {" registers "}, {" a0 "," a1 "," a2 "," a3 "}, " b0 ", " scale ", 1, 1" ";\n"
#define WGMMA_64(d, a, b, scale) asm volatile(INSTRUCTION("64", \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" "," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31", "%32", "%33", "%34", "%35", "%36", scale) : \
    SUMS(d, 0), SUMS(d, 16) : OPERANDS(a, b))

constexpr int FRAGMENT = 2048;  // bytes: 64 rows of 32 bytes of K
constexpr int SUBTILES = TILE_N * TILE_D * (TILE_H / SUB_H) * (TILE_W / SUB_W);
constexpr int NB = SUBTILES / 2;
constexpr int WGS_M = 1;
constexpr int RELEASES = 2;  // consumers that read a stage
constexpr int W_SUBTILES = TILE_W / SUB_W;
constexpr int H_SUBTILES = TILE_H / SUB_H;

// [variant, block, tap]: the tap's shift in pixel rows
__constant__ const int TAP_ROW[] = {
    0, 1, 2, 34, 35, 36, 68, 69, 70, 340, 341, 342, 374, 375, 376, 408, 409, 410, 680, 681, 682, 714, 715, 716, 748,
    749, 750
};
__constant__ const int ENTRY[] = {0,27};  // [variant][MB + 1]: where a block's taps begin
__constant__ const short SUB_D[] = {0};  // [variant][SUBS]: output offset of an M-row's sub-position
__constant__ const short SUB_HH[] = {0};
__constant__ const short U_W[] = {0};  // [variant]: first W sub-position
constexpr int VEC = 16 / ELEMENT;  // elements of a 16-byte unit
constexpr int ROW_BYTES = CK * ELEMENT;  // a pixel's row in a tile: 32, 64 or 128
constexpr int UNITS_PER_ROW = ROW_BYTES / 16;
constexpr int K_STEPS = ROW_BYTES / 32;  // a matrix instruction takes 32 bytes of K
constexpr int SEGMENTS = TILE_N * ROWS_D * ROWS_H;
// Columns of a segment with one residue modulo IN_STEP_W make a plane of PLANE neighbours; there are PLANES residues that some tap
// reads. A segment has its planes one behind the other. STRIDED_BOX: a plane is a box, of all segments of a band of rows.
constexpr int PITCH = PLANES * PLANE;  // pixel rows from a segment to the next
constexpr int PIXELS = SEGMENTS * PITCH;
#define COLUMN(within) ((within) % PLANE * IN_STEP_W + (within) / PLANE)
constexpr int PART_BYTES = (PIXELS * ROW_BYTES + 1023) / 1024 * 1024;
constexpr int STAGE_BYTES = PARTS * PART_BYTES;
// 16-byte units of a segment: boxes of BOX_UNITS begin COLUMN_PAD columns early, at whole units; threads take the units that hold
// the row, whatever its alignment.
constexpr int STAGING_UNITS = (COLUMNS + (2 * VEC - 2)) / VEC;
constexpr int ROW_UNITS = STAGING_UNITS;
// A slot is [box][image][channel][row][column]. There are several boxes where rows are longer than one; or, CLASSED, where rows do
// not all begin at the same place of a 16-byte unit: then rows and channels of one class, which do, are a tensor and a box.
constexpr int CLASS_ROWS = ROWS_H;
constexpr int CHANNEL_BYTES = ROWS_D * CLASS_ROWS * ROW_UNITS * 16;
constexpr int SLOT_BOXES = (STAGING_UNITS + ROW_UNITS - 1) / ROW_UNITS;
constexpr int COPIED_BYTES = TILE_N * CK * CHANNEL_BYTES;  // of a box
constexpr int SLOT_BOX_BYTES = (COPIED_BYTES + 127) / 128 * 128;
constexpr int SLOT_BYTES = SLOT_BOXES * SLOT_BOX_BYTES;
constexpr int CHUNKS = (CIN_G + CK - 1) / CK;
constexpr int CONSUMERS = 2;
constexpr int CONSUMER_THREADS = CONSUMERS * 128;
// two warpgroups of 56 registers produce, so that the consumers have 200: six warps turn pixels, one loads them,
// one loads the weights
constexpr int PRODUCER_THREADS = 192;
constexpr int WEIGHTS_WARP = 7;
constexpr int FIRST_CONSUMER = 2;
constexpr int PRODUCER_WARPS = PRODUCER_THREADS / 32;
constexpr int THREADS = FIRST_CONSUMER * 128 + CONSUMER_THREADS;

__constant__ const int ROW_D[] = {0,1,2,3};  // input offset of a tile's rows
__constant__ const int ROW_H[] = {0,1,2,3,4,5,6,7,8,9};
#define VALUE(v) (v)

struct Sizes {                                         // one layout for the packed argument block
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;                       // tiles of q per axis
  int tiles;                                           // all of them, times M_GROUPS
};

// Byte of the 16-byte unit `unit` of pixel row `p` in a tile.
__device__ __forceinline__ u32 unit_at(int p, int unit) {
  int swizzle = (p >> 2) & 1;
  return p * ROW_BYTES + ((unit ^ swizzle) << 4);
}

// A place in a ring of `count` stages, and the parity of its phase.
struct Cursor {
  u32 stage, parity;
  __device__ __forceinline__ void next(u32 count) {
    if (++stage == count) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Tile {
  int group, cout_block, variant;                      // M-group
  int n, d, h, w;                                      // first q
};

__device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  Tile t;
  int m = index % M_GROUPS, q = index / M_GROUPS;
  t.variant = m % VARIANTS;
  t.cout_block = m / VARIANTS % COUT_BLOCKS;
  t.group = m / (VARIANTS * COUT_BLOCKS);
  t.w = q % s.tiles_w * TILE_W;  q /= s.tiles_w;
  t.h = q % s.tiles_h * TILE_H;  q /= s.tiles_h;
  t.d = q % s.tiles_d * TILE_D;
  t.n = q / s.tiles_d * TILE_N;
  return t;
}

__device__ __forceinline__ int entries_of(int variant) {
  return ENTRY[variant * (MB + 1) + MB] - ENTRY[variant * (MB + 1)];
}
__device__ __forceinline__ int chunks_of(int variant) { return entries_of(variant) ? CHUNKS : 0; }  // 0: only the bias
#define CHUNKS_OF(tile, s) chunks_of((tile).variant)
// The tiles of a block: the first, and from one to the next. (No functions of the tile and the sizes: with these ptxas orders the
// roles' instructions in another way.)
#define FIRST_TILE(s) blockIdx.x
#define NEXT_TILE(index, s) index += gridDim.x

// =====================================================================================================================
// Packing: weight (CIN, COUT_G, taps), for GRAD_INPUT (COUT, CIN_G, taps), to fragments [group][cout
// block][variant][chunk][entry][k step][part][wgs][warp][lane]
// =====================================================================================================================

constexpr int PACK_SPLITS = (TAPS + PACK_TAPS - 1) / PACK_TAPS;  // blocks that share the taps
__constant__
// [variant, block, tap][SUBS]: the kernel's tap, -1 for none
const short TAP_INDEX[] = {0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26};

// A part is 16 rows of M, those of a warp, for one step of K and PACK_TAPS taps. A block brings its weights to shared
// memory in the order of memory, then writes its quarter of each of these taps' fragments as one piece, two at a time.
constexpr int PACK_THREADS = 256;
constexpr int PACK_PITCH = 5;  // odd, so that a warp's rows and channels meet different banks
constexpr int PACK_K = 32 / ELEMENT;  // input channels of a step
constexpr int PACK_OUTER = 16;  // of a block along the weight's first dimension
constexpr int PACK_INNER = PACK_K;  // and along its second
constexpr int PACK_PLANE = CIN_G * TAPS;  // elements from one index of its first dimension to the next
constexpr int QUARTER = FRAGMENT / 4 / 4;  // words

// A block's weights to shared memory, [row of M][channel][tap]; `outer`, `inner` and `taps` of them exist. A warp takes
// an index of the first dimension, whose elements it reads in the order of memory: taps innermost, or (LAST) channels,
// with taps `tap_step` apart.
template <bool LAST>
__device__ __forceinline__ void bring_weights(float* tile, const float* __restrict__ from, int outer, int inner,
    int taps, int tap_step, int thread) {
  constexpr int COUNT = PACK_INNER * PACK_TAPS;
#pragma unroll
  for (int j = 0; j < PACK_OUTER / (PACK_THREADS / 32); j++) {
    int o = thread / 32 + j * (PACK_THREADS / 32);
#pragma unroll 16  // loads in flight
    for (int k = 0; k < (COUNT + 31) / 32; k++) {
      int e = thread % 32 + k * 32, i = LAST ? e % PACK_INNER : e / PACK_TAPS,
          tap = LAST ? e / PACK_INNER : e % PACK_TAPS;
      bool exists = o < outer && i < inner && (tap < taps);
      tile[(o * PACK_K + i) * PACK_PITCH + tap] = exists
          ? from[o * PACK_PLANE + (LAST ? i + tap * tap_step : i * TAPS + tap)] : 0;
    }
  }
}

#define PACK_SYNC() __syncthreads()

// Weights are dense: contiguous, taps one element apart, or channels-last, `tap_step` elements.
__device__ __forceinline__ void pack_part(float* tile, const float* __restrict__ weight, u32* __restrict__ packed,
    int tap_step, int rest, int thread) {
  int begin = rest % PACK_SPLITS * PACK_TAPS;  rest /= PACK_SPLITS;
  int warp = rest % 4;  rest /= 4;
  int wg = rest % WGS_M;  rest /= WGS_M;
  int k_step = rest % K_STEPS;  rest /= K_STEPS;
  int chunk = rest % CHUNKS, block = rest / CHUNKS, group = block / COUT_BLOCKS;
  int cout = (block % COUT_BLOCKS * WGS_M + wg) * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB,
      cin = chunk * CK + k_step * PACK_K;
  int outer = cout, inner = cin;  // the group's first along the weight's dimensions
  const float* from = weight + (long long)(group * COUT_G + outer) * PACK_PLANE;
  int outer_left = COUT_G - outer, inner_left = CIN_G - inner;
  if (tap_step == 1)
    bring_weights<false>(tile, from + (inner * TAPS + begin), outer_left, inner_left, TAPS - begin, 1, thread);
  else bring_weights<true>(tile, from + (inner + begin * tap_step), outer_left, inner_left, TAPS - begin, tap_step,
      thread);
  PACK_SYNC();
  int sub = warp * 16 / ROWS_PER_SUB, entries = ENTRY[VARIANTS * (MB + 1) - 1];
  int word = thread % QUARTER, r = word & 3, lane = word >> 2;  // the thread's of a fragment: these rows and channels
  const float* own = tile
      + (((lane >> 2) + (r & 1) * 8) * PACK_K + (lane & 3) * (4 / ELEMENT) + (r >> 1) * (16 / ELEMENT)) * PACK_PITCH;
  // -1: zeros, by the first of the blocks
  auto here = [&](int tap) { return tap < 0 ? begin == 0 : (u32)(tap - begin) < PACK_TAPS; };
  auto write = [&](int variant, int e, int tap) {       // the thread's word of an entry's fragment
    int of = entries_of(variant), before = ENTRY[variant * (MB + 1)];
    int fragment = ((block * entries + before) * CHUNKS + chunk * of + e) * K_STEPS + k_step;
    u32* to = packed + (long long)((fragment * PARTS * WGS_M + wg) * 4 + warp) * QUARTER + word;
    const float* at = own + (tap - begin);
    float v = tap < 0 ? 0.f : *at;
    u32 high = to_tf32(v);
    *to = high;
  };
#pragma unroll 1
  for (int variant = 0; variant < VARIANTS; variant++) {
    int of = entries_of(variant), before = ENTRY[variant * (MB + 1)];
#pragma unroll 4
    for (int e = thread / QUARTER; e < of; e += PACK_THREADS / QUARTER) {
      int tap = TAP_INDEX[(before + e) * SUBS + sub];
      if (here(tap)) write(variant, e, tap);
    }
  }
}

__global__ void __launch_bounds__(PACK_THREADS) pack(const float* __restrict__ weight, u32* __restrict__ packed,
    int tap_step) {
  __shared__ float tile[16 * PACK_K * PACK_PITCH];
  let_dependent_begin();                                // `gather`
  pack_part(tile, weight, packed, tap_step, blockIdx.x, threadIdx.x);
}

// =====================================================================================================================
// Producer
// =====================================================================================================================

struct Source {                                        // where a tile's chunk lies in the input
  int n, d, h, w;                                      // of the halo's corner, before the rows' offsets
  int channel, left;                                   // first channel, channels left in the group
};

__device__ __forceinline__ Source source_of(const Tile& t, int chunk) {
  return {t.n, t.d * IN_STEP_D, t.h * IN_STEP_H, t.w * IN_STEP_W + FIRST_W, t.group * CIN_G + chunk * CK,
      CIN_G - chunk * CK};
}

// The segment's (n, d, h), and whether that row of the input exists.
__device__ __forceinline__ bool row_of(const Source& at, const Sizes& s, int packed, int& n, int& d, int& h) {
  n = at.n + (packed >> 24);
  d = at.d + ((packed << 8) >> 20);
  h = at.h + ((packed << 20) >> 20);
  return n < s.batch && (u32)d < (u32)s.in_d && (u32)h < (u32)s.in_h;
}

// Copies CK channels of every segment into a slot, in the 16-byte units of memory that hold them, so that any alignment is
// served; units without a pixel of the row are left out. A segment then begins (address % 16) bytes into its place.
__device__ __forceinline__ void stage(const char* __restrict__ x, const Sizes& s, const Source& at, u32 slot,
    int thread) {
  long long slice = (long long)s.in_h * s.in_w * ELEMENT, plane = slice * s.in_d;
  const char* corner = x + ((long long)at.n * CIN + at.channel) * plane + (long long)at.w * ELEMENT;
  // A thread keeps its channel and place in the row for all rows, since finding them anew for each unit is
  // what would take the time. Where rows are short, threads share them out.
  constexpr int PLACES = CK * STAGING_UNITS, SHARES = PRODUCER_THREADS / PLACES;
  constexpr int SLICES = TILE_N * ROWS_D, BY_SLICE = SHARES, BY_ROW = 1;
  int share = thread / PLACES, place_of = thread % PLACES;
  if (share >= SHARES) return;
#pragma unroll 1
  for (int unit = place_of % STAGING_UNITS, c = place_of / STAGING_UNITS; c < CK;) {
    const char* place = corner + c * plane + unit * 16;
    int column = at.w + unit * VEC;                   // of the unit's first element, were the row aligned
    u32 to = slot + c * CHANNEL_BYTES + unit * 16;
#pragma unroll 1
    for (int r = share; r < SLICES; r += BY_SLICE) {
      int image = r / ROWS_D, d = at.d + ROW_D[r % ROWS_D];
      bool exists = at.n + image < s.batch && (u32)d < (u32)s.in_d;
      const char* line = place + image * (CIN * plane) + d * slice;
#pragma unroll 5
      for (int j = 0; j < ROWS_H; j += BY_ROW) {
        int h = at.h + ROW_H[j];
        u64 p = multiply_add_wide(h, s.in_w * ELEMENT, (u64)line);
        int first = column - (int)(p & 15) / ELEMENT;
        if (exists && (u32)h < (u32)s.in_h && first + VEC > 0 && first < s.in_w)
          copy16(to + image * (CK - 1) * CHANNEL_BYTES + (r * ROWS_H + j) * (STAGING_UNITS * 16),
              (const char*)(p & ~15ull));
      }
    }
    break;
    unit += PRODUCER_THREADS % STAGING_UNITS;
    c += PRODUCER_THREADS / STAGING_UNITS;
    if (unit >= STAGING_UNITS) {
      unit -= STAGING_UNITS;
      c++;
    }
  }
}

constexpr int OWN_PIXELS = (PIXELS + PRODUCER_THREADS - 1) / PRODUCER_THREADS;
__device__ __forceinline__ int pixel_row(int i) {
  return i;
}

// A thread's pixels of a tile: where they lie in a slot and, for copies by threads, whether they are in the image and how their
// row is aligned. Found once a tile, not a chunk.
struct Pixels {
  u32 from[OWN_PIXELS], ok;
  u32 plane;  // channel c of a row begins at (phase + c * plane) % VEC of a unit
  __device__ __forceinline__ void locate(const char* x, const Sizes& s, const Source& at, const int* segments,
      int thread) {
    plane = (u32)s.in_d * s.in_h * s.in_w;
    ok = 0;
#pragma unroll
    for (int k = 0; k < OWN_PIXELS; k++) {
      int p = pixel_row(thread + k * PRODUCER_THREADS), segment = p / PITCH, within = p % PITCH;
      int column = COLUMN(within), image = segment / (ROWS_D * ROWS_H);
      if (thread + k * PRODUCER_THREADS >= PIXELS) break;
      int at_column = column + COLUMN_PAD, box = 0;
      from[k] = box * SLOT_BOX_BYTES + (segment + image * (CK - 1) * (ROWS_D * ROWS_H)) * ROW_UNITS * 16
          + (at_column - box * (ROW_UNITS * VEC)) * ELEMENT;
      int n, d, h;
      bool in = row_of(at, s, segments[segment], n, d, h) && column < COLUMNS && (u32)(at.w + column) < (u32)s.in_w;
      u32 first = ((u32)n * CIN + at.channel) * plane + ((u32)d * s.in_h + h) * s.in_w + at.w + (u32)((u64)x / ELEMENT);
      from[k] |= (first & (VEC - 1)) << 24;             // the low 24 bits: the place in a slot; above: the phase
      ok |= (u32)in << k;
    }
  }
};

// A slot's pixels to rows of CK channels, rounded: a lane takes a pixel, so that loads and stores meet all banks.
template <bool ALIGNED>  // every channel of a row has the same misalignment
__device__ __forceinline__ void turn(const Pixels& own, u32 exist, int channel, int left, u32 slot, u32 tile,
    int thread) {
#pragma unroll
  for (int k = 0; k < OWN_PIXELS; k++) {
    int p = pixel_row(thread + k * PRODUCER_THREADS);
    if (thread + k * PRODUCER_THREADS >= PIXELS) break;
    bool ok = exist >> k & 1;
    u32 phase = own.from[k] >> 24, from = slot + (own.from[k] & 0xffffff) + (ALIGNED ? phase * ELEMENT : 0);
#pragma unroll 2  // more of them spill
    for (int unit = 0; unit < UNITS_PER_ROW; unit++) {
      u32 v[VEC];
#pragma unroll
      for (int e = 0; e < VEC; e++) {
        int c = unit * VEC + e;
        bool have = ok;
        u32 a = from + c * CHANNEL_BYTES;
        if (!ALIGNED) a += ((phase + (channel + c) * own.plane) & (VEC - 1)) * ELEMENT;
        v[e] = have ? load_shared_u32(a) : 0;
      }
      u32 hi[4];
#pragma unroll
      for (int e = 0; e < 4; e++) hi[e] = to_tf32(__uint_as_float(v[e]));
      store_shared_128(tile + unit_at(p, unit), hi[0], hi[1], hi[2], hi[3]);
    }
  }
}

// A walk over (tile, chunk) in the order in which consumers take them.
struct Walk {
  int index, chunk;
  Tile tile;
  __device__ __forceinline__ void begin(int first, const Sizes& s) { index = first; chunk = 0; settle(s); }
  __device__ __forceinline__ bool live(const Sizes& s) const { return index < s.tiles; }
  __device__ __forceinline__ void settle(const Sizes& s) {  // past tiles without chunks
    while (index < s.tiles) {
      tile = tile_at(index, s);
      if (chunk < CHUNKS_OF(tile, s)) return;
      NEXT_TILE(index, s);
      chunk = 0;
    }
  }
  __device__ __forceinline__ void next(const Sizes& s) {
    if (++chunk >= CHUNKS) settle(s);
  }
};

// The tile is written: make it visible to the matrix units and say so, once a warp.
__device__ __forceinline__ void hand_over(u32 barrier, int lane) {
  fence_async_shared();
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}

struct Barriers { u32 full, empty, landed, left; };  // of tiles; of slots or boxes: `landed` by the copy engine

__device__ __forceinline__ void produce(const char* __restrict__ x, const Sizes& s, const int* segments, u32 tiles,
    u32 slots, const Barriers& barriers, int thread) {
  int lane = thread & 31;
  Walk now;
  Cursor tile = {0, 1};
  Pixels own;
  Cursor slot = {0, 0};
  Walk ahead;
  ahead.begin(FIRST_TILE(s), s);
  u32 next_slot = 0;
#pragma unroll 1
  for (int i = 0; i < STAGES_S - 1; i++) {
    if (ahead.live(s)) {
      stage(x, s, source_of(ahead.tile, ahead.chunk), slots + i * SLOT_BYTES, thread);
      ahead.next(s);
    }
    copy_commit();
  }
  next_slot = STAGES_S - 1;
#pragma unroll 1
  for (now.begin(FIRST_TILE(s), s); now.live(s); now.next(s), tile.next(STAGES_P), slot.next(STAGES_S)) {
    if (now.chunk == 0) own.locate(x, s, source_of(now.tile, 0), segments, thread);
    copy_wait<STAGES_S - 2>();
    named_sync<1, PRODUCER_THREADS>();  // everyone's copies have landed, and everyone has left the next slot
    if (ahead.live(s)) {
      stage(x, s, source_of(ahead.tile, ahead.chunk), slots + next_slot * SLOT_BYTES, thread);
      ahead.next(s);
    }
    if (++next_slot == STAGES_S) next_slot = 0;
    copy_commit();
    barrier_wait(barriers.empty + tile.stage * 8, tile.parity);
    int channel = now.chunk * CK;
    // Boxes bring zeros for pixels that do not exist, but for those ahead of a class's rows.
    u32 exist = own.ok;
    if (own.plane % VEC == 0) {
      turn<true>(own, exist, channel, CIN_G - channel, slots + slot.stage * SLOT_BYTES,
          tiles + tile.stage * STAGE_BYTES, thread);
    } else {
      turn<false>(own, exist, channel, CIN_G - channel, slots + slot.stage * SLOT_BYTES,
          tiles + tile.stage * STAGE_BYTES, thread);
    }
    hand_over(barriers.full + tile.stage * 8, lane);
  }
}

// =====================================================================================================================
// Weights: fragments in the order in which they are used
// =====================================================================================================================

#define FRAGMENTS(entries) ((entries) * CHUNKS * K_STEPS * PARTS)

__device__ __forceinline__ const char* fragments_of(const char* packed, const Tile& t) {
  long long before = (long long)(t.group * COUT_BLOCKS + t.cout_block) * FRAGMENTS(ENTRY[VARIANTS * (MB + 1) - 1]);
  return packed + (before + FRAGMENTS(ENTRY[t.variant * (MB + 1)])) * (WGS_M * FRAGMENT);
}

constexpr int STEPS_PER_TAP = K_STEPS * PARTS;
// A stretch is a piece of code without a loop: matrix instructions are queued from its beginning to its end. STRAIGHT: all blocks
// of a chunk; else TAPS_UNROLLED taps of a block, and single ones that are left. A stage of the ring holds W_STAGE fragments of a
// stretch, its last one what is left, so that the code knows where stages begin. RESIDENT: a chunk is a stage, one
// behind the other.
#define STAGE_FRAGMENTS(left) ((left) < W_STAGE ? (left) : W_STAGE)
constexpr int LONGEST_STRETCH = TAPS_UNROLLED * STEPS_PER_TAP;  // where not STRAIGHT

// Where a tile's weights come from, in the order in which they are used.
typedef const char* Weights;  // packed; chunks lie one behind the other
__device__ __forceinline__ Weights weights_of(const char* packed, const Tile& t) { return fragments_of(packed, t); }
__device__ __forceinline__ void bring(u32 to, const char* from, u32 bytes, u32 barrier) {
  expect_bytes(barrier, bytes);
  copy_bulk(to, from, bytes, barrier);
}

// One thread: streams every tile's weights through the ring; RESIDENT: loads them once.
template <class Source>
__device__ __forceinline__ void stream_weights(const Source& packed, const Sizes& s, u32 ring, u32 full, u32 empty) {
  wait_for_results();                                   // of `pack`
  Cursor cursor = {0, 1};
#pragma unroll 1
  for (int index = FIRST_TILE(s); index < s.tiles; NEXT_TILE(index, s)) {
    Tile t = tile_at(index, s);
    Weights from = weights_of(packed, t);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks_of(t.variant); chunk++) {
#pragma unroll 1
      for (int b = 0; b < MB; b++) {
        int left = ENTRY[t.variant * (MB + 1) + b + 1] - ENTRY[t.variant * (MB + 1) + b];
        left *= STEPS_PER_TAP;
#pragma unroll 1
        while (left > 0) {
          int stretch = left >= LONGEST_STRETCH ? LONGEST_STRETCH : STEPS_PER_TAP;
          left -= stretch;
#pragma unroll 1
          for (; stretch > 0; stretch -= W_STAGE, cursor.next(STAGES_W)) {
            u32 bytes = STAGE_FRAGMENTS(stretch) * (WGS_M * FRAGMENT);
            barrier_wait(empty + cursor.stage * 8, cursor.parity);
            bring(ring + cursor.stage * (W_STAGE * WGS_M * FRAGMENT), from, bytes, full + cursor.stage * 8);
            from += bytes;
          }
        }
      }
    }
  }
}

// A thread's part of a ring's first fragment.
__device__ __forceinline__ u32 fragment_part(int wg, int thread) {
  return thread * 16;
}
// Fragment i of those that begin at `at`.
__device__ __forceinline__ void load_fragment(u32 (&a)[4], u32 at, int i) {
  load_shared_128(a, at + i * (WGS_M * FRAGMENT));
}

// The consumers' side. Before sm_90 fragments come straight from global memory (L2).
struct Fragments {
  u32 ring, full, empty;  // of the ring: this thread's part of its first fragment; barriers
  Cursor cursor;                                       // the stage to be waited for next
  u32 at;  // this thread's part of the first fragment of the stage in hand, or of the stretch
  u32 in_hand;                                         // the barrier that says that the stage in hand is free
  bool first;                                          // RESIDENT: the first tile waits for the weights
  const char* from;

  __device__ __forceinline__ void begin(const char* packed, const Tile& t, int offset) {
  }
  __device__ __forceinline__ void begin_chunk(int chunk) {
  }
  __device__ __forceinline__ void end() { first = false; }
  // Fragment i of a stretch; a stage is waited for with its first.
  __device__ __forceinline__ void load(u32 (&a)[4], int i) {
    if (i % W_STAGE == 0) {
      barrier_wait(full + cursor.stage * 8, cursor.parity);
      at = ring + cursor.stage * (W_STAGE * WGS_M * FRAGMENT);
      in_hand = empty + cursor.stage * 8;
      cursor.next(STAGES_W);
    }
    load_fragment(a, at, i % W_STAGE);
  }
  __device__ __forceinline__ void end_stretch(int steps) {
  }
  __device__ __forceinline__ void skip(int variant) {  // a tile
    for (int chunk = 0; chunk < chunks_of(variant); chunk++)
      for (int b = 0; b < MB; b++) {
        int left = (ENTRY[variant * (MB + 1) + b + 1] - ENTRY[variant * (MB + 1) + b]) * STEPS_PER_TAP;
        int longest = LONGEST_STRETCH, whole = longest ? left / longest : 0;
        int stages = whole * ((longest + W_STAGE - 1) / W_STAGE)
            + left % longest / STEPS_PER_TAP * ((STEPS_PER_TAP + W_STAGE - 1) / W_STAGE);
        for (; stages > 0; stages--) cursor.next(STAGES_W);
      }
  }
};

// =====================================================================================================================
// Consumers
// =====================================================================================================================

struct Place { int n, d, h, w; };  // of a subtile in a tile, in q

// PAIRED: subtiles one below the other are neighbours, so that one matrix instruction takes both (WIDE).
__device__ __forceinline__ constexpr Place place_of(int subtile) {
  return {subtile / (W_SUBTILES * H_SUBTILES * TILE_D), subtile / (W_SUBTILES * H_SUBTILES) % TILE_D,
          subtile / W_SUBTILES % H_SUBTILES * SUB_H,
          subtile % W_SUBTILES * SUB_W};
}
// its first pixel's row in the tile, for a tap of shift 0
__device__ __forceinline__ constexpr int pixel_row_of(int subtile) {
  Place p = place_of(subtile);
  return ((p.n * ROWS_D + p.d * ROW_STEP_D) * ROWS_H + p.h * ROW_STEP_H) * PITCH + p.w;
}
constexpr int SUBTILES_OF_WGMMA = 1;  // that a matrix instruction takes
constexpr int GROUP_ROWS = ROW_STEP_H * PITCH;  // pixel rows from one group of eight columns to the next

// Where a consumer's pixels lie in a tile. `start`: of its first subtile; wgmma: the lower half of its descriptor, the same in all
// threads; mma.sync: the tile's address.
struct Columns {
  u32 start;
  int first;                                           // its first subtile
};

// Pixel rows from the consumer's first subtile to another of its: known to the compiler where both halves of a tile are alike.
__device__ __forceinline__ constexpr bool halves_alike() {
  for (int nb = 1; nb < NB; nb++)
    if (pixel_row_of(NB + nb) - pixel_row_of(NB) != pixel_row_of(nb) - pixel_row_of(0)) return false;
  return true;
}
__device__ __forceinline__ int rows_to(int nb, int first) {
  constexpr bool alike = halves_alike();
  return alike ? pixel_row_of(nb) - pixel_row_of(0) : pixel_row_of(first + nb) - pixel_row_of(first);
}

__device__ __forceinline__ Columns pixels_of(u32 tile, int first) {
  u32 start = (tile + pixel_row_of(first) * ROW_BYTES) >> 4 | 1u << 16;
  return {__shfl_sync(0xffffffffu, start, 0), first};  // so that ptxas counts in uniform registers
}

// acc[64 x 64 NB] += fragment x pixels; `shift` is the tap's, in pixel rows, `part` the pixels' part. FRESH: = instead of +=.
template <bool FRESH>
__device__ __forceinline__ void multiply(float (&acc)[NB][32], const u32 (&a)[4], const Columns& pixels, int shift,
    int k_step, int part, int lane) {
  const u64 upper = ((u64)(GROUP_ROWS * ROW_BYTES >> 4) << 32) | ((u64)(3) << 62);
#pragma unroll
  for (int nb = 0; nb < NB; nb += SUBTILES_OF_WGMMA) {
    u64 b = upper | (pixels.start + shift * (ROW_BYTES / 16)
        + (rows_to(nb, pixels.first) * ROW_BYTES + k_step * 32 + part * PART_BYTES) / 16);
    float* d = acc[nb];
    WGMMA_64(d, a, b, "1");
  }
}

// A stage of the ring of weights whose fragments are in registers, by its barrier.
__device__ __forceinline__ void give_back_weights(u32 done, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(done);
}

// Step i of a stretch of `steps`. Fragments take FRAGMENT_SETS sets of registers in turn: one is multiplied by, the one before may
// still be, the next one is loaded. At the end of a stretch the pipeline drains, since in a loop ptxas cannot see that a set is
// free again and serialises every wgmma, C7513. CONTINUED: where the
// steps of a chunk are a multiple of the sets it can, and a chunk's last step is multiplied while the next chunk begins. ROLLED: so
// it can where those of a round are; `left` rounds of the chunk follow.
__device__ __forceinline__ void step(float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights,
    const Columns& pixels, int shift, int i, int steps, int lane, int left = 0) {
  wgmma_fence();
  multiply<false>(acc, a[i % FRAGMENT_SETS], pixels, shift, i % K_STEPS, 0, lane);
  wgmma_commit();
  u32 done = weights.in_hand;
  if (i + 1 < steps) {
    weights.load(a[(i + 1) % FRAGMENT_SETS], i + 1);
    wgmma_wait<1>();
  } else {
    weights.end_stretch(steps);
    if (left) weights.load(a[0], 0);
    wgmma_wait<1>();
  }
  if (i + 1 == steps || (i + 1) % W_STAGE == 0) give_back_weights(done, lane);
}

// A pixel tile that no matrix instruction reads any more, by its barrier; 0: none.
__device__ __forceinline__ void give_back(u32 barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}

// 0 to N - 1.
template <int...>
struct Sequence {};
template <int N, int... BEHIND>
struct Counting : Counting<N - 1, N - 1, BEHIND...> {};
template <int... ALL>
struct Counting<0, ALL...> { typedef Sequence<ALL...> type; };

__device__ constexpr int shift_at(int i) {
  constexpr int shift[] = {0,1,2,34,35,36,68,69,70};
  return shift[i];
}

template <int STEP>
__device__ __forceinline__ void multiply_one(float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4], Fragments& weights,
    const Columns& pixels, int left, u32& behind, int lane) {
  step(acc, a, weights, pixels, shift_at(STEP / STEPS_PER_TAP), STEP, LONGEST_STRETCH, lane, left);
}
template <int... STEPS>
__device__ __forceinline__ void multiply_round(Sequence<STEPS...>, float (&acc)[NB][32], u32 (&a)[FRAGMENT_SETS][4],
    Fragments& weights, const Columns& pixels, int left, u32& behind, int lane) {
  (multiply_one<STEPS>(acc, a, weights, pixels, left, behind, lane), ...);
}

// A loop of rounds, in each of which all sets of fragments come round: so ptxas can see that a set is free again, and the tensor
// cores do not drain between them. Rounds are alike but for where their pixels begin. What a round begins with, its pixels' place
// and its first fragment, is asked for in the one before: tables of taps read in each
// would be slower. Shorter stretches stay straight, which is the fastest.
template <int FIRST>
__device__ __forceinline__ void multiply_chunk(int variant, float (&acc)[MB][NB][32], Fragments& weights,
    const Columns& pixels, u32 behind, int lane) {
  u32 a[FRAGMENT_SETS][4];
  int left = (ENTRY[variant * (MB + 1) + MB] - ENTRY[variant * (MB + 1)]) / TAPS_UNROLLED;
  weights.load(a[0], 0);
#pragma unroll
  for (int b = 0; b < MB; b++) {
    int entry = ENTRY[variant * (MB + 1) + b], last = ENTRY[variant * (MB + 1) + b + 1];
    int begin = TAP_ROW[entry];
#pragma unroll 1
    while (entry < last) {
      Columns shifted = pixels;
      shifted.start = __shfl_sync(0xffffffffu, pixels.start + begin * (ROW_BYTES / 16), 0);
      entry += TAPS_UNROLLED;
      if (entry < last) begin = TAP_ROW[entry];
      multiply_round(typename Counting<LONGEST_STRETCH>::type(), acc[b], a, weights, shifted, --left, behind, lane);
    }
  }
  wgmma_wait<0>();
}

// --- epilogue --------------------------------------------------------------------------------------------------------
// A warp holds 16 rows of M. They pass through a shared buffer, so that memory is written in whole lines: NCHW 8 rows of a run of
// RUN x W_SUBS consecutive outputs, through a buffer of the warp; channels-last ROUND pixels of ROWS_PER_SUB channels, through one
// of all warps that hold these.
constexpr int RUN = RUN_GROUPS * 8;
// Bytes of a row of the buffer; the rest beyond whole 128 bytes lets rows meet different banks, and a row begin up to
// 31 bytes late.
constexpr int RUN_PITCH = (RUN * W_SUBS * ELEMENT + 127) / 128 * 128 + 32;
constexpr int BUFFER_BYTES = 8 * RUN_PITCH;
constexpr int RUN_SUBTILES = RUN_GROUPS;  // neighbours along W that a run crosses
constexpr int RUNS_OF_SUBTILE = 8;
// Group k of run i of subtiles RUN_FIRST(r) ...: which subtile, and which of its groups of 8 columns.
#define RUN_FIRST(r) ((r) * RUN_SUBTILES)  // subtile of a run's first group
#define RUN_NB(r, i, k) (RUN_FIRST(r) + (k))
#define RUN_J(r, i, k) ((i))

// The block of a W sub-position, -1: it has no taps. Up to 16 are one number, of four bits each: a table's entries are
// constants only
// after unrolling, and until then the compiler keeps all sums in memory.
__device__ constexpr u64 packed_blocks() {
  constexpr signed char blocks[] = {0};
  u64 packed = 0;
  for (int u = 0; u < W_SUBS; u++) packed |= (u64)(blocks[u] + 1) << 4 * u;
  return packed;
}
__device__ __forceinline__ constexpr int block_of_w(int u) {
  constexpr u64 packed = packed_blocks();
  return (int)(packed >> 4 * u & 15) - 1;
}

// A warp's 16 rows of M are output channels of one (d, h) sub-position (ROWS_PER_SUB is 64, 32 or 16).
struct Slab {
  int cout, couts;                                      // first channel in the group, and how many of the 16 exist
  int od, oh;                                           // offsets of the sub-position
};

__device__ __forceinline__ Slab slab_of(const Tile& t, int cout_block, int warp) {
  Slab slab;
  int sub = warp * 16 / ROWS_PER_SUB;
  slab.cout = cout_block * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB;
  slab.couts = COUT_G - slab.cout < 16 ? COUT_G - slab.cout : 16;
  slab.od = SUB_D[t.variant * SUBS + sub];
  slab.oh = SUB_HH[t.variant * SUBS + sub];
  return slab;
}

constexpr int OUTPUTS = RUN * W_SUBS;  // of a row of a run
#define TOGETHER(unit) (2)  // outputs that a thread stores to the buffer together

// Which of a thread's outputs of a row go first to the buffer, as an exclusive or of their order, so that the lanes of an
// instruction meet different banks: rows lie 8 banks apart (half precision: 12), the outputs of neighbouring lanes 2 W_SUBS.
template <int UNIT>
__device__ __forceinline__ int order_of(int g, int q) {
  int by_column = 0;
  return by_column;
}

// One thread's 2 W_SUBS neighbouring outputs to the buffer.
template <int UNIT>
__device__ __forceinline__ void put(float (&v)[2 * W_SUBS], u32 at, int order) {
#pragma unroll
  for (int bit = TOGETHER(UNIT); bit < 8 && W_SUBS % bit == 0; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 2 * W_SUBS; i++) {
      if (i & bit) continue;
      float low = v[i], high = v[i ^ bit];
      v[i] = order & bit ? high : low;
      v[i ^ bit] = order & bit ? low : high;
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * W_SUBS; i += TOGETHER(UNIT)) {
    u32 to = at + (i ^ order) * ELEMENT;
    store_shared_f32x2(to, v[i], v[i ^ 1]);
  }
}

template <int UNIT>
__device__ __forceinline__ void copy_unit(char* to, u32 from, bool ok) {
  u32 v[4];
  if (UNIT == 16) load_shared_128(v, from);
  else if (UNIT == 8) load_shared_64(v, from);
  else v[0] = UNIT == 4 ? load_shared_u32(from) : load_shared_u16(from);
  if (UNIT == 16) store_global_128_if(to, v, ok);
  else if (UNIT == 8) store_global_64_if(to, v, ok);
  else if (UNIT == 4) store_global_if(to, v[0], ok);
  else store_global_16_if(to, v[0], ok);
}

// Eight rows in units: an instruction stores 32 of them, of several rows if they are short.
template <int UNIT>
__device__ __forceinline__ void store_units(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int PER_ROW = OUTPUTS * ELEMENT / UNIT;
#pragma unroll
  for (int i = 0; i < (8 * PER_ROW + 31) / 32; i++) {
    // rows: the first lane's, and how many on
    int index = lane + 32 * i, first = 32 * i / PER_ROW, more = index / PER_ROW - first;
    // Compared, not divided, where rows are long.
    if (PER_ROW >= 32) more = 32 * i % PER_ROW + 31 >= PER_ROW && index >= (first + 1) * PER_ROW;
    int r = first + more, at = (index - r * PER_ROW) * UNIT;
    char* row = to + first * plane + (PER_ROW >= 32 ? more ? plane : 0 : more * plane);
    bool in = PER_ROW % 4 == 0 || r < 8;
    copy_unit<UNIT>(row + at, in ? buffer + r * RUN_PITCH + at : buffer, in && at < end);
  }
}

// Eight rows that begin anywhere, a lane an output: each instruction begins at a sector's first output, since a sector of 32
// bytes whose parts are stored at different times costs as much as several whole ones. 16 bytes a lane and the ends
// of rows by themselves, as below, is slower for float32.
__device__ __forceinline__ void store_sectors(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int ROWS = 4;   // at a time: of kernels that have other ways beside, eight spill
  static_assert(8 % ROWS == 0, "all rows in turn");
#pragma unroll
  for (int from_row = 0; from_row < 8; from_row += ROWS) {
    char* row[ROWS];
    u32 from[ROWS];
    int at[ROWS];  // the lane's first output of each row; some are before or behind it
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
      int r = from_row + k;
      char* first = to + r * plane;
      at[k] = lane * 4 - ((int)(u64)first & 31);
      row[k] = first + at[k], from[k] = buffer + r * RUN_PITCH + at[k];
    }
    // What follows of a row is at known distances. A place for each output takes a third more instructions.
#pragma unroll
    for (int i = 0; i < (OUTPUTS + 38) / 32; i++) {
      u32 v[ROWS];
      bool in[ROWS];
#pragma unroll
      for (int k = 0; k < ROWS; k++) {
        in[k] = i ? at[k] < end - i * 128 : (u32)at[k] < (u32)end;
        v[k] = load_shared_u32_if(from[k] + i * 128, in[k]);
      }
#pragma unroll
      for (int k = 0; k < ROWS; k++) store_global_if(row[k] + i * 128, v[k], in[k]);
    }
  }
}

// Eight rows (output channels) of a run from the buffer to memory: `end` bytes of each. `to` is the first row's first output, rows
// lie `plane` bytes apart.
template <int UNIT>
__device__ __forceinline__ void store_rows(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  if (UNIT == 4) store_sectors(to, plane, rows, end, buffer, lane);
  else store_units<UNIT>(to, plane, rows, end, buffer, lane);
}

// Rows h * 8 ... of run i of subtiles RUN_FIRST(r) ...: a thread's outputs of its row to the buffer.
template <int UNIT>
__device__ __forceinline__ void put_rows(float (&acc)[MB][NB][32], float bias, int r, int i, int h, u32 row, int lane) {
  int g = lane >> 2, q = lane & 3, order = order_of<UNIT>(g, q);
#pragma unroll
  for (int k = 0; k < RUN_GROUPS; k++) {
    const int nb = RUN_NB(r, i, k), j = RUN_J(r, i, k);
    float v[2 * W_SUBS];
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int u = 0; u < W_SUBS; u++)
        v[c * W_SUBS + u] = block_of_w(u) < 0 ? bias
            : acc[block_of_w(u) < 0 ? 0 : block_of_w(u)][nb][4 * j + 2 * h + c];
    put<UNIT>(v, row + (k * 8 + 2 * q) * W_SUBS * ELEMENT, order);
  }
}

template <int UNIT>
__device__ __forceinline__ void pass_rows(float (&acc)[MB][NB][32], float bias, int r, int i, int h, u32 row, char* to,
    long long plane, int rows, int end, u32 buffer, int lane) {
  put_rows<UNIT>(acc, bias, r, i, h, row, lane);
  __syncwarp();
  store_rows<UNIT>(to, plane, rows, end, buffer, lane);
}

// Unrolled, since registers have no run-time index. Stores once in a loop, with only the reading of registers in
// branches, take longer and compile no faster.
__device__ __forceinline__ void epilogue(float (&acc)[MB][NB][32], const float* __restrict__ bias, char* __restrict__ y,
    const Sizes& s, const Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  OPAQUE(lane);  // what follows from it is found here, not kept from tile to tile (spills)
  int g = lane >> 2;
  Slab slab = slab_of(t, cout_block, warp);
  if (slab.couts <= 0) return;
  float b[2] = {0.f, 0.f};
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (bias && g + 8 * h < slab.couts) b[h] = VALUE(bias[t.group * COUT_G + slab.cout + g + 8 * h]);
  if (bias) {
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int e = 0; e < 32; e++) acc[m][nb][e] += b[e >> 1 & 1];
  }
  int channel = t.group * COUT_G + slab.cout;
  long long plane = (long long)s.out_d * s.out_h * s.out_w * ELEMENT;
#pragma unroll
  for (int r = 0; r < NB / RUN_SUBTILES; r++) {
    Place place = place_of(first_subtile + RUN_FIRST(r));
    int n = t.n + place.n, od = OUT_STEP_D * (t.d + place.d) + slab.od;
    bool image = n < s.batch && od < s.out_d;
#pragma unroll
    for (int i = 0; i < RUNS_OF_SUBTILE; i++) {
      int oh = OUT_STEP_H * (t.h + place.h + i) + slab.oh;
      int ow = OUT_STEP_W * (t.w + place.w) + U_W[t.variant], left = s.out_w - ow;
      if (!image || oh >= s.out_h || left <= 0) continue;
      char* to = y + (((long long)n * COUT + channel) * s.out_d + od) * s.out_h * s.out_w * ELEMENT
          + ((long long)oh * s.out_w + ow) * ELEMENT;
      int end = (left < OUTPUTS ? left : OUTPUTS) * ELEMENT;
      u32 misaligned = (u32)(u64)to | (u32)plane | end;  // multiples of what all rows begin and end at
#pragma unroll
      for (int h = 0; h < 2; h++) {
        char* first = to + h * 8 * plane;
        int rows = 8;
        u32 row = buffer + g * RUN_PITCH;
        if ((misaligned & 15) == 0) pass_rows<16>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
        else if ((misaligned & (2 * ELEMENT - 1)) == 0) pass_rows<2 * ELEMENT>(acc, b[h], r, i, h, row, first, plane,
            rows, end, buffer, lane);
        else pass_rows<ELEMENT>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
        __syncwarp();
      }
    }
  }
}

__device__ __forceinline__ void consume(const char* packed, const float* bias, char* y, const Sizes& s, u32 tiles,
    u32 full, u32 empty, Fragments& weights, u32 buffers, int wg, int thread) {
  // By a shuffle ptxas knows that branches over a warp's number do not part it; but beside BARE's stores that makes some
  // kernels slower.
  int warp = __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31;
  int first_subtile = wg * NB, offset = fragment_part(wg, thread);
  u32 buffer = buffers + (wg * 4 + warp) * BUFFER_BYTES;
  Cursor cursor = {0, 0};
  weights.cursor = {0, 0};
  weights.ring += offset;
  weights.first = true;
  int turn = 0;
#pragma unroll 1
  for (int index = FIRST_TILE(s); index < s.tiles; NEXT_TILE(index, s), turn++) {
    Tile t = tile_at(index, s);
    int chunks = chunks_of(t.variant);
    float acc[MB][NB][32];
#pragma unroll
    for (int b = 0; b < MB; b++)
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int i = 0; i < 32; i++) {
          acc[b][nb][i] = 0.f;
          opaque(acc[b][nb][i]);
        }
    weights.begin(packed, t, offset);
    int variant = __shfl_sync(0xffffffffu, t.variant, 0);  // so that ptxas knows that warps do not part over it
    u32 behind = 0;                                      // CONTINUED: the chunk that the last step may still read
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++, cursor.next(STAGES_P)) {
      Columns pixels = pixels_of(tiles + cursor.stage * STAGE_BYTES, first_subtile);
      u32 last = empty + cursor.stage * 8;
      barrier_wait(full + cursor.stage * 8, cursor.parity);
      weights.begin_chunk(chunk);
      multiply_chunk<0>(variant, acc, weights, pixels, behind, lane);
      give_back(last, lane);
    }
    weights.end();
    epilogue(acc, bias, y, s, t, t.cout_block * WGS_M, first_subtile, buffer, warp, lane);
  }
}

// =====================================================================================================================

constexpr int TILES_AT = 0;
constexpr int RING_AT = TILES_AT + STAGES_P * STAGE_BYTES;
constexpr int SLOTS_AT = RING_AT + RING_FRAGMENTS * WGS_M * FRAGMENT;
constexpr int BUFFERS_AT = SLOTS_AT + STAGES_S * SLOT_BYTES;
constexpr int BARRIERS_AT = BUFFERS_AT + CONSUMERS * 4 * BUFFER_BYTES;
constexpr int PIXEL_BARRIERS = STAGES_P * PLANE_BARRIERS;
constexpr int SLOT_BARRIERS = 0;
constexpr int SEGMENTS_AT = BARRIERS_AT + 16 * (PIXEL_BARRIERS + STAGES_W + SLOT_BARRIERS);

__global__ void __launch_bounds__(THREADS, 1)
gather(const char* __restrict__ x, const char* __restrict__ packed, const float* __restrict__ bias,
       char* __restrict__ y, int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d,
       int tiles_h, int tiles_w, int tile_count) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tile_count};
  u32 base = shared_address(memory);
  u32 full = base + BARRIERS_AT, empty = full + 8 * PIXEL_BARRIERS, full_w = empty + 8 * PIXEL_BARRIERS,
      empty_w = full_w + 8 * STAGES_W;
  const Barriers barriers = {full, empty, empty_w + 8 * STAGES_W, empty_w + 8 * (STAGES_W + SLOT_BARRIERS)};
  int* segments = (int*)(memory + SEGMENTS_AT);
  if (threadIdx.x == 0) {
    for (int i = 0; i < PIXEL_BARRIERS; i++) {
      barrier_init(full + 8 * i, PRODUCER_WARPS);
      barrier_init(empty + 8 * i, RELEASES * 4);
    }
    for (int i = 0; i < STAGES_W; i++) {
      barrier_init(full_w + 8 * i, 1);
      barrier_init(empty_w + 8 * i, RELEASES * 4);
    }
    barriers_begun();
  }
  for (int i = threadIdx.x; i < SEGMENTS; i += THREADS)
    segments[i] = (i / (ROWS_H * ROWS_D)) << 24 | (ROW_D[i / ROWS_H % ROWS_D] & 0xfff) << 12
        | (ROW_H[i % ROWS_H] & 0xfff);
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role < FIRST_CONSUMER) {
    fewer_registers<PRODUCER_REGISTERS>();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (warp < PRODUCER_WARPS) {
      produce(x, s, segments, base + TILES_AT, base + SLOTS_AT, barriers, threadIdx.x);
    } else if (warp == WEIGHTS_WARP && (thread & 31) == 0) {
      stream_weights(packed, s, base + RING_AT, full_w, empty_w);
    }
  } else {
    wait_for_results();  // of `pack`: the bias; nor is stored where `pack` may still read
    more_registers<CONSUMER_REGISTERS>();
    Fragments weights;
    weights.ring = base + RING_AT;
    weights.full = full_w;
    weights.empty = empty_w;
    consume(packed, bias, y, s, base + TILES_AT, full, empty, weights, base + BUFFERS_AT, role - FIRST_CONSUMER,
        thread);
  }
}

#undef OPAQUE
#undef OPERANDS
#undef SUMS
#undef SUMS_4
#undef INSTRUCTION
#undef WGMMA_64
#undef COLUMN
#undef VALUE
#undef CHUNKS_OF
#undef FIRST_TILE
#undef NEXT_TILE
#undef PACK_SYNC
#undef FRAGMENTS
#undef STAGE_FRAGMENTS
#undef RUN_FIRST
#undef RUN_NB
#undef RUN_J
#undef TOGETHER
}  // namespace grad_input

// =====================================================================================================================
// Gradient for the weight: wgmma of up to 3 rows tf32, 64x64 channels x 1x3x3 taps a block, chunks of 1x1x2x64 (NxDxHxW
// of q), K in 44 slices, 204 KB shared.
// =====================================================================================================================

namespace grad_weight {

// What both grad-weight kernels share: the geometry of g's tile, copies by threads, and the second step.
//
// Rows of x and g in a chunk follow from TILE_*, TAPS_*, STEP_* (stride) and DIL_* (dilation); the sets of taps differ
// only in where
// their chunks begin.

constexpr int ELEMENT = 4;  // bytes of an element
constexpr int GROUPS = 1;
constexpr int CIN_G = 48;  // channels of a group in what is read
constexpr int COUT_G = 48;  // channels of a group in what is written
constexpr int BLOCK_CI = 64;  // input channels of a block
constexpr int BLOCK_CO = 64;  // output channels of a block
constexpr int REDUCE_ROWS = 1;
constexpr int TILE_N = 1;  // images of a tile
constexpr int KERNEL_D = 3, KERNEL_H = 3, KERNEL_W = 3;  // the layer's
constexpr int STEP_D = 1, STEP_H = 1, STEP_W = 1;  // stride
constexpr int DIL_D = 1, DIL_H = 1, DIL_W = 1;  // dilation
constexpr int PAD_D = 0, PAD_H = 0, PAD_W = 0;  // padding
constexpr int TAPS_D = 1, TAPS_H = 3, TAPS_W = 3;  // of a set, which a block multiplies
constexpr int SETS_D = 3, SETS_H = 1, SETS_W = 1;  // of taps
constexpr int TILE_D = 1, TILE_H = 2, TILE_W = 64;  // positions q of a chunk
constexpr int APART_D = 1, APART_H = 1;
constexpr int WGS = 3;  // warpgroups that multiply
constexpr int WGS_M = 1;  // of them, those that divide the output channels
constexpr int SUBS = 1;  // taps that share the 64 rows of a matrix instruction
constexpr int ENTRIES = 3;  // accumulators of 64 rows of a warpgroup
constexpr int STAGES = 2;  // chunks in shared memory
constexpr int STRETCH = 8;  // matrix instructions between whose ends the tensor cores do not drain
constexpr int ROW_CLASSES = 1;  // of rows of g along H, by where they begin in 16 bytes
constexpr int CHANNEL_CLASSES = 1;  // and of channels
constexpr int PRODUCER_REGISTERS = 56;  // of a thread
constexpr int CONSUMER_REGISTERS = 152;  // of a thread

// Grad-weight by wgmma (sm_90a): dW[ci, co, tap] = sum over images and positions q of x[ci, q] * g[co, q * STEP + tap * DIL - PAD].
//
// The GEMM of wgrad.cu with the operands the other way round. M = 64 rows, an output channel at a tap each (SUBS taps of
// 64 / SUBS channels), N = BLOCK_CI input channels, K = pixels. INTERLEAVED: these taps are neighbours along W, and their rows
// neighbours in M, so that lanes read neighbouring columns of few channels, which meet more banks than columns STEP_W
// apart of many.
//   A, from registers: g's tile with its halo, read from shared memory at any column, so that a tap is an address. A_SHARED (16-bit
//      rows of 64 channels): by descriptor, at any pixel.
//   B, from shared memory by descriptor: x's tile as the tensor copy engine leaves it. NCHW: rows of a channel's pixels (K-major),
//      rounded to TF32 on the way; CHANNELS_LAST of 16 bits: rows of a pixel's channels (MN-major). TF32 has no MN-major form, so
//      that CHANNELS_LAST float32 is turned by the copying warpgroup (TURN_X).
// g comes by boxes too (BOX_G): by one where its rows lie evenly (G_ONE_BOX; CHANNELS_LAST for each G_WIDTH channels and plane), by
// one for each row, NCHW by one for each class of rows that begin off 16 bytes (CLASSED), or by threads where these are too many.
// Roles: one warpgroup copies, WGS warpgroups multiply: WGS_M of them divide the output channels of a block, the others its taps,
// UNITS x SUBS fragments of A at a time: UNITS neighbours for each of SUBS bands of rows. A unit is a tap; or, STACKED, a column of
// taps: the rows of x that a row of g meets by them follow each other in shared memory, and so are columns of one instruction. Then
// a fragment is read once, not once a tap: reads of A take as long as a multiplication by 64 channels.
// STACKED chunks are of rows of g, STEP_H at a time, and it is x's tile that has a halo, so that an instruction always takes all
// of its rows: ptxas waits for each one where some that share sums differ in shape (C7511). Rows beyond the image are zeros.
//
// K is split over ranges of chunks; each split writes partial sums, `reduce` adds them in the order of their index.
// Where splits are
// few, their blocks are a CLUSTER, which adds the sums through its shared memory in the same order, and writes the weight itself.
// Where more are, but all blocks run at once (a cooperative launch), those of a tile wait for each other and do it
// TOGETHER, through
// global memory. A split that is the only one (ALONE) writes the weight from its own shared memory. Two splits may
// exchange sums while
// they multiply (HANDOVER); these have chunks in another order than two steps have, and other roundings.
constexpr int COPIERS = 128;
constexpr int STACK = (TAPS_H + STEP_H - 1) / STEP_H;  // rows of x that may meet a row of g
constexpr int X_ROWS_H = TILE_H + STACK - 1;

// PTX in small wrappers, so that a kernel body reads as an algorithm.
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// --- mbarriers: `count` arrivals (and the announced bytes) complete a phase; waits name the phase by its parity -------

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(count));
}
// What was initialised is seen by copies and, in a cluster, by other blocks.
__device__ __forceinline__ void barriers_begun() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}
// One thread arrives, and the phase waits for so many bytes of copies too.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// An arrival, once the thread's own `copy16`s have landed.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_done(barrier, parity)) {}
}
template <int ID, int THREADS_OF>
__device__ __forceinline__ void named_sync() {
  asm volatile("bar.sync %0, %1;\n" ::"n"(ID), "n"(THREADS_OF) : "memory");
}
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// --- copies into shared memory ---------------------------------------------------------------------------------------

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {  // the rest of the 16 becomes zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// --- bulk copies (sm_90): one thread starts them; those to shared memory count at a barrier, those from it in groups ---

struct alignas(64) TensorMap { u64 opaque[16]; };  // a CUtensorMap
// A box of a tensor, whose first element has these coordinates, innermost first; zeros where the tensor has none.
__device__ __forceinline__ void load_box(u32 to, const TensorMap& map, int a, int b, int c, int d, int e, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];\n"
      ::"r"(to), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(barrier) : "memory");
}

// --- the compiler and registers --------------------------------------------------------------------------------------

// The compiler knows no more of a value than its type: what follows from it is computed behind this, and sums are set ahead of a
// fence of wgmma, not behind it, where ptxas would wait for every instruction (C7519).
__device__ __forceinline__ void opaque(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void opaque(u32& v) { asm volatile("" : "+r"(v)); }
// A warpgroup's registers for each thread (sm_90a): some are given back, or more taken.
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}

// --- numbers ---------------------------------------------------------------------------------------------------------

// Nearest TF32, ties to even, as cuDNN rounds: with it results agree with cuDNN to 3e-6, with rna to 5e-5.
__device__ __forceinline__ u32 to_tf32(float v) {
  u32 r;
  asm("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(v));
  return r;
}

// --- matrix instructions ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}

constexpr int VEC = 16 / ELEMENT;  // elements of a 16-byte unit
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W;  // of a set, which a block multiplies
constexpr int SET_TAPS = TAPS_D * TAPS_H * TAPS_W;
constexpr int SETS = SETS_D * SETS_H * SETS_W;  // of taps
constexpr int CIN = GROUPS * CIN_G;  // channels of what is read
constexpr int COUT = GROUPS * COUT_G;  // channels of what is written
constexpr int SPAN_D = 1;
constexpr int G_ROWS_D = SPAN_D;
constexpr int G_ROWS_H = TILE_H * STEP_H;
constexpr int G_COLUMNS = 66;
constexpr int X_ROWS = TILE_N * TILE_D * X_ROWS_H;
constexpr int CLASS_ROWS = (G_ROWS_H + ROW_CLASSES - 1) / ROW_CLASSES;
constexpr int G_ROWS = TILE_N * G_ROWS_D * (ROW_CLASSES * CLASS_ROWS);
constexpr int G_EXTENT = (G_COLUMNS + VEC - 1 + VEC - 1) / VEC;  // units of a row (NCHW)
constexpr int G_UNITS = G_EXTENT;
constexpr int G_PITCH = 76;
constexpr int G_BYTES = G_ROWS * BLOCK_CO * G_PITCH * ELEMENT;
struct Sizes {
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;           // chunks per axis
  int chunks, per_split;                   // all of them; of one split
};

struct Chunk { int n, d, h, w; };  // first q

__device__ __forceinline__ Chunk chunk_at(int i, const Sizes& s) {
  Chunk c;
  c.w = i % s.tiles_w * TILE_W;  i /= s.tiles_w;
  c.h = i % s.tiles_h * TILE_H;  i /= s.tiles_h;
  c.d = i % s.tiles_d * TILE_D;
  c.n = i / s.tiles_d * TILE_N;
  return c;
}

// One operand's tile: where it lies in its tensor. (n, d, h) of row `r` of the tile by its kind.
struct Rows { int n, d, h; };
__device__ __forceinline__ Rows x_row(int r) { return {r / (TILE_D * X_ROWS_H), r / X_ROWS_H % TILE_D, r % X_ROWS_H}; }
__device__ __forceinline__ Rows g_row(int r) {
  int h = r % G_ROWS_H, d = r / G_ROWS_H % G_ROWS_D;
  return {r / (G_ROWS_H * G_ROWS_D), d * APART_D,
          h * APART_H};
}

// =====================================================================================================================
// Copies
// =====================================================================================================================

typedef u32 bits;

template <int ROWS, int BLOCK, int COLUMNS_OR_UNITS, int PITCH, int CHANNELS, int CHANNELS_G, bool IS_X>
__device__ __forceinline__ void copy_tile(const char* __restrict__ tensor, int batch, int depth, int height, int width,
    int n0, int d0, int h0, int w0, int channel, int left, unsigned char* to, int thread) {
  u32 to_address = shared_address(to);
  // Units that hold a border are copied whole; `clear_borders` clears what lies beyond it when they have landed. Copies in
  // parts of 4 bytes, by some of a warp's threads each time, take nearly three times as long.
  // A thread keeps its channel and place in the row for all rows of the tile: an index for each unit makes address
  // arithmetic the bound.
  constexpr int UNITS = COLUMNS_OR_UNITS, ROWS_H = IS_X ? X_ROWS_H : G_ROWS_H;
  long long plane = (long long)depth * height * width;
#pragma unroll 1
  for (int i = thread; i < BLOCK * UNITS; i += COPIERS) {
    int unit = i % UNITS, c = i / UNITS;
    u32 offset = (c * PITCH + unit * VEC) * ELEMENT;
#pragma unroll 1
    for (int r = 0; r < ROWS / ROWS_H; r++) {
      Rows at = IS_X ? x_row(r * ROWS_H) : g_row(r * ROWS_H);
      int n = n0 + at.n, d = d0 + at.d;
      bool slice = n < batch && (u32)d < (u32)depth && c < left;
      const char* base = tensor
          + (((long long)n * CHANNELS + channel + c) * plane + (long long)d * height * width + w0) * ELEMENT;
#pragma unroll 2
      for (int rh = 0; rh < ROWS_H; rh++, offset += BLOCK * PITCH * ELEMENT) {
        int h = h0 + (IS_X ? rh : rh * APART_H);
        const char* from = base + (long long)h * (width * ELEMENT);
        // column of the first element
        int misaligned = (int)((u64)from & 15), first = w0 + (unit * 16 - misaligned) / ELEMENT;
        from += unit * 16 - misaligned;
        bool in = slice && (u32)h < (u32)height && first + VEC > 0 && first < width;
        copy16(to_address + offset, in ? from : tensor, in ? 16 : 0);
      }
    }
  }
}

__device__ __forceinline__ bool has_borders(int w0, int columns, int width) { return w0 < 0 || w0 + columns > width; }

// Clears elements before column 0 and from column `width` on, in the units that hold such a border.
template <int ROWS, int BLOCK, int UNITS, int PITCH, int CHANNELS, bool IS_X>
__device__ __forceinline__ void clear_borders(const char* tensor, int depth, int height, int width, int n0, int d0,
    int h0, int w0, int channel, unsigned char* to, int thread) {
  u32 plane = (u32)depth * height * width;
#pragma unroll 1
  for (int i = thread; i < ROWS * BLOCK; i += COPIERS) {
    int c = i % BLOCK, row = i / BLOCK;
    Rows at = IS_X ? x_row(row) : g_row(row);
    u32 first = (u32)((u64)tensor / ELEMENT) + ((u32)(n0 + at.n) * CHANNELS + channel + c) * plane
        + ((u32)(d0 + at.d) * height + h0 + at.h) * width + w0;
    // elements of column 0 and of the one behind the last
    int zero = (int)(first & (VEC - 1)) - w0, end = zero + width;
    bits* line = (bits*)(to + (row * BLOCK + c) * PITCH * ELEMENT);
    if (zero > 0 && zero < UNITS * VEC)
      for (int e = zero & ~(VEC - 1); e < zero; e++) line[e] = 0;
    if (end > 0 && end < UNITS * VEC)
      for (int e = end; e & (VEC - 1); e++) line[e] = 0;
  }
}

// =====================================================================================================================
// The second step: slices are added in the order of their index. A block takes 32 of the innermost channels of some rows of a
// slice. Of large weights these are 64 rows (REDUCE_ROWS), turned through shared memory, so that slices are read and
// the weight is written in
// whole sectors; of small ones it is one row, and the block's warps divide
// the slices, since more rows leave blocks idle.
// =====================================================================================================================

constexpr int RUNS = 8;  // warps of a block

// slices: [tap][COUT][CIN_G], else [tap][CIN][COUT_G]
constexpr int INNERMOST = CIN_G;
constexpr int SLICE_ROWS = COUT * TAPS;

struct SliceRow {
  long long from, to;                      // first element in a slice, and in the weight
};

// Rows are counted as the weight has them.
__device__ __forceinline__ SliceRow slice_row(int row, long long stride_ci, long long stride_co, long long stride_tap) {
  int group = row / (COUT_G * TAPS), j = row % (COUT_G * TAPS);
  bool taps_inside = stride_tap <= stride_co;
  int co = taps_inside ? j / TAPS : j % COUT_G, tap = taps_inside ? j % TAPS : j / COUT_G;
  return {((long long)tap * COUT + group * COUT_G + co) * CIN_G,
      group * CIN_G * stride_ci + co * stride_co + tap * stride_tap};
}

__global__ void __launch_bounds__(32 * RUNS)
reduce(const float* __restrict__ partial, bits* __restrict__ out, int slices, long long stride_ci, long long stride_co,
    long long stride_tap) {
  __shared__ float sums[RUNS][33];
  const long long total = (long long)TAPS * CIN * COUT_G;
  constexpr int COLUMNS_OF_BLOCKS = (INNERMOST + 31) / 32, ROWS_EACH = 1;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int c = blockIdx.x % COLUMNS_OF_BLOCKS * 32 + lane, first = blockIdx.x / COLUMNS_OF_BLOCKS * REDUCE_ROWS;
  int share = (slices + RUNS - 1) / RUNS, begin = warp * share, end = begin + share < slices ? begin + share : slices;
  long long from[ROWS_EACH];
  float sum[ROWS_EACH];
#pragma unroll
  for (int k = 0; k < ROWS_EACH; k++) {
    int row = first;
    from[k] = row < SLICE_ROWS && c < INNERMOST ? slice_row(row, stride_ci, stride_co, stride_tap).from + c : -1;
    sum[k] = 0.f;
  }
#pragma unroll 8
  for (int i = begin; i < end; i++)
#pragma unroll
    for (int k = 0; k < ROWS_EACH; k++)
      if (from[k] >= 0) sum[k] += partial[i * total + from[k]];
#pragma unroll
  for (int k = 0; k < ROWS_EACH; k++) sums[warp + k * RUNS][lane] = sum[k];
  __syncthreads();
  if (warp) return;
#pragma unroll
  for (int run = 1; run < RUNS; run++) sum[0] += sums[run][lane];
  sums[0][lane] = sum[0];
  __syncwarp();
  long long stride_c = stride_ci;
  c -= lane;
#pragma unroll 1
  for (int i = threadIdx.x; i < REDUCE_ROWS * 32; i += 32 * RUNS) {  // neighbouring threads write neighbours
    int row = stride_c == 1 ? i / 32 : i % REDUCE_ROWS, column = stride_c == 1 ? i % 32 : i / REDUCE_ROWS;
    if (first + row >= SLICE_ROWS || c + column >= INNERMOST) continue;
    long long to = slice_row(first + row, stride_ci, stride_co, stride_tap).to + (c + column) * stride_c;
    out[to] = __float_as_uint(sums[row][column]);
  }
}

// wgmma: one warpgroup, D[64 x N] += A[64 x K] B[K x N] of 32 bytes of K, N = 8 to 256. B is in shared memory, by its descriptor;
// A in registers, or (A_SHARED) in shared memory too, by its descriptor or a descriptor's two words.
// Fragments (g = lane / 4, t = lane % 4): D[4j + 2h + c] is row 16 warp + g + 8h, column 8j + 2t + c.
// A kernel that includes this defines PRECISION and A_SHARED and, of 16 bits, A_TURNED and B_TURNED if rows of shared
// memory lie along
// M or N, not along K.
// TAIL: signs of A and B, and how they lie.
#define OPERANDS(a, b) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

// WGMMA_N(d, a, b, scale): `scale` "1", or "0" for D = A B.
#define SUMS(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define INSTRUCTION(n, registers, a0, a1, a2, a3, b0, scale) \
  "wgmma.mma_async.sync.aligned.m64n" n "k8.f32.tf32.tf32" " {" registers "}, {" a0 "," a1 "," a2 "," a3 "}, " b0 ", " scale ", 1, 1" ";\n"
#define WGMMA_192(d, a, b, scale) asm volatile(INSTRUCTION("192", \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" "," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31" "," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" "," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63" "," \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" "," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95", "%96", "%97", "%98", "%99", "%100", scale) : \
    SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80) : OPERANDS(a, b))

constexpr int ROWS_PER_SUB = 64 / SUBS;
constexpr int NEXT_ROWS = 8;
constexpr int NEXT_UNIT = 1;
constexpr int THREADS = (1 + WGS) * 128;
constexpr int CI_TILES = (CIN_G + BLOCK_CI - 1) / BLOCK_CI;
constexpr int CO_TILES = (COUT_G + BLOCK_CO - 1) / BLOCK_CO;
constexpr int N_WIDTH = BLOCK_CI;  // of one matrix instruction; STACKED: for each row of x
constexpr int NB = BLOCK_CI / N_WIDTH;
constexpr int OF_UNIT = TAPS_H;  // taps of a unit
constexpr int UNITS = ENTRIES / OF_UNIT;
constexpr int SET_UNITS = SET_TAPS / OF_UNIT;

// x in shared memory. Rows of a channel's pixels (K-major): for each SEGMENT bytes of a row a box of [row][channel][SEGMENT].
// CHANNELS_LAST of 16 bits: for each X_WIDTH channels a box of the chunk's pixels, or (X_ONE_BOX) one box that brings
// them in that order.
constexpr int PIXELS = X_ROWS * TILE_W;
constexpr int LINE_BYTES = TILE_W * 1 * ELEMENT;  // LINES: the image is as wide as a chunk, and its rows one line
constexpr int SEGMENT = 128;
constexpr int BOXES = LINE_BYTES / SEGMENT;
constexpr int BOX_BYTES = PIXELS * BLOCK_CI * ELEMENT / BOXES;
constexpr int X_ROW_BYTES = BLOCK_CI * SEGMENT;
constexpr int X_TILE_BYTES = BOXES * BOX_BYTES;
// CLASSED: rows off 16 bytes, where the tensor copy engine reads none, by a box for each class of rows along H and of channels:
// those of a class begin alike, and are a tensor of their own, whose rows then begin early (its lead).
constexpr int G_CHANNELS = BLOCK_CO / CHANNEL_CLASSES;  // of a class
constexpr int CLASS_BYTES = 38912;
constexpr int G_STEP_W = STEP_W;  // pixels of g's tile from one of q to the next
// From one pixel of g's tile to the next (of NCHW counted in elements), and from one row to the next.
constexpr int G_PIXEL_BYTES = 1;
constexpr int STAGE_BYTES = (X_TILE_BYTES + G_BYTES + 1023) / 1024 * 1024;
constexpr int RAW_AT = STAGES * STAGE_BYTES;  // x's pixels before they are turned
constexpr int RAW_BYTES = 0;
constexpr int BARRIERS_AT = RAW_AT + RAW_BYTES;
constexpr int ROW_STEPS = TILE_W * ELEMENT / 32;  // STACKED: of a row
constexpr int SETS_OF_FRAGMENTS = 3;  // a third set spills there

struct TensorMaps {
  TensorMap x;
};

struct Work {                              // of a block
  int group, ci, co;                       // first channels within the group
  int tap_d, tap_h, tap_w;                 // first tap of the set
};

// =====================================================================================================================
// Copies
// =====================================================================================================================

// A chunk of x, from its input channel `channel` on.
__device__ __forceinline__ void load_x(const TensorMap* map_x, const Chunk& c, int channel, u32 to, u32 barrier) {
#pragma unroll 1
  for (int i = 0; i < BOXES; i++) {
    int w = (c.w) + i * (SEGMENT / ELEMENT);
    load_box(to + i * BOX_BYTES, *map_x, w, channel, c.h - STACK + 1, c.d, c.n, barrier);
  }
}

__device__ __forceinline__ void load_boxes(const TensorMap* map_x, const TensorMap* map_g, const Sizes& s,
    const Chunk& c, const Work& work, u32 to, u32 barrier) {
  expect_bytes(barrier, X_TILE_BYTES);
  int channel = work.group * CIN_G + work.ci;
  load_x(map_x, c, channel, to, barrier);
}

// Where step `k_step` of K begins in x's tile. Bits of the step choose rows, segments and what lies in them: sums are
// of steps as of places.
__device__ __forceinline__ u32 x_at(int k_step) {
  int line = k_step / (LINE_BYTES / 32), within = k_step % (LINE_BYTES / 32) * 32;
  return within / SEGMENT * BOX_BYTES + line * X_ROW_BYTES + within % SEGMENT;
}

// =====================================================================================================================
// Multiplications
// =====================================================================================================================

// A fragment by `rows` rows of x, whose first begins at `x`: their sums follow each other from `first` rows on.
__device__ __forceinline__ void multiply(float (&acc)[NB][OF_UNIT * (N_WIDTH / 2)], int first, int rows,
    const u32 (&a)[4], u32 x) {
  // From 8 channels or pixels to the next 8; MN-major also from the channels of a swizzled line to the next: of the
  // next box, or, STACKED,
  // of the next row of x.
  const u64 strides = ((u64)(8 * SEGMENT >> 4) << 32) | ((u64)((8 * SEGMENT) >> 4) << 16);
  const u64 upper = strides | ((u64)(1) << 62);
#pragma unroll
  for (int nb = 0; nb < NB; nb++) {
    u64 b = upper | (((x + nb * (N_WIDTH * SEGMENT)) & 0x3ffff) >> 4);
    float* d = &acc[nb][first * (N_WIDTH / 2)];
    if (rows == 3) WGMMA_192(d, a, b, "1");
  }
}

// A lane's view of its taps; the same for all chunks.
struct Taps {
  int at[UNITS];  // of g's tile: elements (NCHW) or pixels (CHANNELS_LAST) by which the unit is shifted
  u32 line[UNITS];  // NCHW: rows of memory from a chunk's first row to the unit's, as elements modulo 2^32
};

// Half of a step's K: where it lies in g's tile before the tap's share, and (NCHW) in memory; constants after unrolling.
struct Half {
  int row, column;
  Rows memory;
};
struct Step { Half half[2]; };

// Place of a tile's row of q in g's tile before the tap's own share; STACKED of the first row of a slice.
__device__ __forceinline__ int tile_row(const Rows& q) {
  return (q.n * G_ROWS_D + q.d * (STEP_D / APART_D)) * CLASS_ROWS + q.h * (STEP_H / APART_H);
}

// STACKED: step `column` of row `r` of g's slice that belongs to image `n` and slice `d` of q.
__device__ __forceinline__ Step step_of_row(int n, int d, int r, int column) {
  Step step;
#pragma unroll
  for (int k = 0; k < 2; k++)
    step.half[k] = {r % ROW_CLASSES * (TILE_N * G_ROWS_D * CLASS_ROWS) + tile_row({n, d, 0}) + r / ROW_CLASSES,
        (8 * column + 4 * k) * G_STEP_W, {n, d * STEP_D, r}};
  return step;
}

// By how much rows of a chunk's tile begin off 16 bytes, in elements, for a lane's channels: each class of rows (CLASSED); or the
// chunk's first row, from which others follow.
struct Phases { u32 of[ROW_CLASSES]; };

__device__ __forceinline__ int misaligned(const Phases& phases, u32 line, const Rows& row, const Sizes& s) {
  return (phases.of[0] + line + ((u32)(row.n * COUT) * s.out_d + row.d) * s.out_h * s.out_w
      + (u32)row.h * s.out_w) & (VEC - 1);
}

// The fragment of unit `u` at a step: rows g and g + 8 of the warp's sixteen; of the two halves of K, pixels q and q + 4 of a strip
// (TF32), or 2q and 2q + 1 of two strips.
__device__ __forceinline__ void load_fragment(u32 (&a)[4], const unsigned char* g_tile, const Taps& taps,
    const Sizes& s, const Phases& phases, int u, const Step& step, int lane_at) {
  const u32* words = (const u32*)g_tile;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    // What is known only at run time, and constants that are even, so that the addresses are a register and an immediate.
    int at = lane_at + taps.at[u];
    const int constant = step.half[k].row * (G_CHANNELS * G_PITCH) + step.half[k].column;
    at += misaligned(phases, taps.line[u], step.half[k].memory, s);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 v = words[at + constant + h * NEXT_ROWS * G_PITCH];
      a[2 * k + h] = to_tf32(__uint_as_float(v));  // boxes are rounded on their way
    }
  }
}

// Rows of x that a row of g meets by a column of taps: for each remainder r of the row by STEP_H those of taps r, r +
// STEP_H, ..., each
// a row above the one before; their sums lie in the order of the rows.
#define STACK_OF(r) (TAPS_H / STEP_H + ((r) < TAPS_H % STEP_H))
#define STACK_BEGIN(r) ((r) * (TAPS_H / STEP_H) + ((r) < TAPS_H % STEP_H ? (r) : TAPS_H % STEP_H))
#define STACK_PLACE(tap) (STACK_BEGIN((tap) % STEP_H) + STACK_OF((tap) % STEP_H) - 1 - (tap) / STEP_H)

// STRETCH steps of every row of a chunk.
__device__ __forceinline__ void multiply_rows(float (&acc)[UNITS][NB][OF_UNIT * (N_WIDTH / 2)],
    const unsigned char* g_tile, const Taps& taps, const Sizes& s, const Phases& phases, int lane_at, u32 x_tile) {
  u32 a[SETS_OF_FRAGMENTS][4];
  int step = 0;                            // a constant after unrolling
#pragma unroll
  for (int remainder = 0; remainder < STEP_H && remainder < TAPS_H; remainder++)
#pragma unroll
    for (int i = 0; i < TILE_N * TILE_D * TILE_H * STRETCH; i++) {
      const int column = i % STRETCH, q = i / STRETCH % TILE_H, slice = i / (STRETCH * TILE_H);
      const Step at = step_of_row(slice / TILE_D, slice % TILE_D, q * STEP_H + remainder, column);
      const u32 x = x_tile + x_at(column) + (slice * X_ROWS_H + q + STACK - STACK_OF(remainder)) * X_ROW_BYTES;
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        u32 (&fragment)[4] = a[step++ % SETS_OF_FRAGMENTS];
        load_fragment(fragment, g_tile, taps, s, phases, u, at, lane_at);
        wgmma_fence();
        multiply(acc[u], STACK_BEGIN(remainder), STACK_OF(remainder), fragment, x);
        wgmma_commit();
        wgmma_wait<SETS_OF_FRAGMENTS - 1>();
      }
    }
  wgmma_wait<0>();
}

__device__ __forceinline__ void consume(float* __restrict__ partial, const Sizes& s, const Work& work, const char* g,
    u32 full, u32 empty, const unsigned char* memory, int split, int wg, int thread) {
  // By a shuffle ptxas knows that a warp's lanes have the same. Most of these tiles gain by it; other tiles lose.
  int warp = __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31, row = lane >> 2, q = lane & 3;
  int wg_m = wg % WGS_M, first_unit = (wg / WGS_M * SUBS + warp * 16 / ROWS_PER_SUB) * UNITS;
  int channel = wg_m * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB;  // of the block's BLOCK_CO
  Taps taps;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    int unit = first_unit + u * NEXT_UNIT;
    if (unit >= SET_UNITS) unit = SET_UNITS - 1;  // its sums are not stored
    int td = unit / (SET_UNITS / TAPS_D), th = 0, tw = unit % TAPS_W;
    int shift = (td * (DIL_D / APART_D)) * CLASS_ROWS + th * (DIL_H / APART_H);
    taps.at[u] = shift * (G_CHANNELS * G_PITCH) + tw * DIL_W;
    taps.line[u] = ((u32)(td * DIL_D) * s.out_h + th * DIL_H) * s.out_w;
  }
  const int of_channels = (channel + row) / G_CHANNELS;  // the lane's class
  const int lane_first = of_channels * (CLASS_BYTES / ELEMENT * ROW_CLASSES) + (channel + row) % G_CHANNELS * G_PITCH
      + q * STEP_W;
  float acc[UNITS][NB][OF_UNIT * (N_WIDTH / 2)] = {};
  int begin = split * s.per_split, end = begin + s.per_split < s.chunks ? begin + s.per_split : s.chunks;
  u32 stage = 0, parity = 0;
  // A warpgroup whose taps are all beyond the kernel leaves the tensor cores to the others.
  const int units_before = wg / WGS_M * (SUBS * UNITS);
  const bool idle = units_before >= SET_UNITS || (work.tap_w + units_before >= KERNEL_W);
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    int lane_at = lane_first;
    Phases phases = {};
    // Rows 8 channels apart have the same alignment, so that a lane has one for each row of a tile.
    Chunk c = chunk_at(i, s);
    int d = c.d * STEP_D + work.tap_d * DIL_D - PAD_D, h = c.h * STEP_H + work.tap_h * DIL_H - PAD_H,
        w = c.w * STEP_W + work.tap_w * DIL_W - PAD_W;
    phases.of[0] = (u32)((u64)g / ELEMENT)
        + (((u32)c.n * COUT + work.group * COUT_G + work.co + row) * s.out_d + d) * s.out_h * s.out_w + (u32)h * s.out_w
            + w;
    const unsigned char* tile = memory + stage * STAGE_BYTES;
    u32 x_tile = shared_address(tile);
    barrier_wait(full + stage * 8, parity);
#pragma unroll 1
    for (int first = idle ? ROW_STEPS : 0; first < ROW_STEPS; first += STRETCH) {
      multiply_rows(acc, tile + X_TILE_BYTES, taps, s, phases,
          lane_at + first * (32 / ELEMENT * G_STEP_W) * G_PIXEL_BYTES, x_tile + x_at(first));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + stage * 8);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  long long slice = (long long)split * (TAPS * COUT * (long long)CIN_G);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    int unit = first_unit + u * NEXT_UNIT;
    int kd = work.tap_d + unit / (SET_UNITS / TAPS_D), kw = work.tap_w + unit % TAPS_W;
    if (unit >= SET_UNITS || kd >= KERNEL_D || kw >= KERNEL_W) continue;
#pragma unroll
    for (int i = 0; i < OF_UNIT; i++) {
      int th = i, kh = work.tap_h + th;
      if (kh >= KERNEL_H) continue;
      float* to = partial + slice
          + ((long long)((kd * KERNEL_H + kh) * KERNEL_W + kw) * COUT + work.group * COUT_G) * CIN_G;
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int j = 0; j < N_WIDTH / 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int m = channel + row + NEXT_ROWS * h, ci = work.ci + nb * N_WIDTH + j * 8 + 2 * q;
            int co = work.co + m % G_CHANNELS * CHANNEL_CLASSES + m / G_CHANNELS;
            if (co >= COUT_G) continue;
            float* at = to + (long long)co * CIN_G + ci;
            const float* sums = &acc[u][nb][STACK_PLACE(i) * (N_WIDTH / 2) + 4 * j + 2 * h];
            if (ci < CIN_G) *(float2*)at = make_float2(sums[0], sums[1]);
          }
    }
  }
}

// partial: [SPLITS][TAPS][COUT][CIN_G] float32; where blocks add up, `out` is the weight's gradient.
__global__ void __launch_bounds__(THREADS, 1)
wgrad(const char* __restrict__ g, float* __restrict__ partial, int batch, int in_d, int in_h, int in_w, int out_d,
      int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split,
      const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, chunks, per_split};
  int index = blockIdx.x;
  Work work;                               // blocks of the same pixels are neighbours, for L2's sake
  int set = index % SETS;  index /= SETS;
  work.co = index % CO_TILES * BLOCK_CO;  index /= CO_TILES;
  work.ci = index % CI_TILES * BLOCK_CI;  index /= CI_TILES;
  work.group = index % GROUPS;
  const int split = index / GROUPS;
  work.tap_w = set % SETS_W * TAPS_W;
  work.tap_h = set / SETS_W % SETS_H * TAPS_H;
  work.tap_d = set / (SETS_W * SETS_H) * TAPS_D;
  u32 base = shared_address(memory), full = base + BARRIERS_AT, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 2 * COPIERS + 1);
      barrier_init(empty + 8 * i, WGS * 4);
    }
    barrier_init(base + BARRIERS_AT + 16 * STAGES, 1);
    barriers_begun();
  }
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role == 0) {
    fewer_registers<PRODUCER_REGISTERS>();
    int begin = split * per_split, end = begin + per_split < chunks ? begin + per_split : chunks;
    u32 stage = 0, parity = 1;
#pragma unroll 1
    for (int i = begin; i < end; i++) {
      Chunk c = chunk_at(i, s);
      unsigned char* tile = memory + stage * STAGE_BYTES;
      u32 barrier = full + stage * 8;
      barrier_wait(empty + stage * 8, parity);
      if (thread == 0) load_boxes(&maps.x, nullptr, s, c, work, shared_address(tile), barrier);
      constexpr int extent = G_EXTENT;
      int d = c.d * STEP_D + work.tap_d * DIL_D - PAD_D, h = c.h * STEP_H + work.tap_h * DIL_H - PAD_H,
          w = c.w * STEP_W + work.tap_w * DIL_W - PAD_W;
      int channel = work.group * COUT_G + work.co;
      copy_tile<G_ROWS, BLOCK_CO, extent, G_PITCH, COUT, COUT_G, false>(
          g, s.batch, s.out_d, s.out_h, s.out_w, c.n, d, h, w, channel, COUT_G - work.co, tile + X_TILE_BYTES, thread);
      if (has_borders(w, G_COLUMNS, s.out_w)) {
        copy_commit();
        copy_wait<0>();
        named_sync<1, COPIERS>();          // all have landed
        clear_borders<G_ROWS, BLOCK_CO, G_UNITS, G_PITCH, COUT,
            false>(g, s.out_d, s.out_h, s.out_w, c.n, d, h, w, channel, tile + X_TILE_BYTES, thread);
      }
      arrive_when_copied(barrier);
      barrier_arrive(barrier);             // what it stored itself
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
  } else {
    more_registers<CONSUMER_REGISTERS>();
    consume(partial, s, work, g, full, empty, memory, split, role - 1, thread);
  }
}

#undef OPERANDS
#undef SUMS
#undef SUMS_4
#undef INSTRUCTION
#undef WGMMA_192
#undef STACK_OF
#undef STACK_BEGIN
#undef STACK_PLACE
}  // namespace grad_weight

// =====================================================================================================================
// Gradient for the weight where rows begin off 16 bytes: mma.sync tf32, 64x16 channels x 3x3x3 taps a block, chunks of
// 1x4x4x8 (NxDxHxW of q), K in 44 slices, 186 KB shared.
// =====================================================================================================================

namespace grad_weight_unaligned {

// What both grad-weight kernels share: the geometry of g's tile, copies by threads, and the second step.
//
// Rows of x and g in a chunk follow from TILE_*, TAPS_*, STEP_* (stride) and DIL_* (dilation); the sets of taps differ
// only in where
// their chunks begin.

constexpr int ELEMENT = 4;  // bytes of an element
constexpr int GROUPS = 1;
constexpr int CIN_G = 48;  // channels of a group in what is read
constexpr int COUT_G = 48;  // channels of a group in what is written
constexpr int BLOCK_CI = 64;  // input channels of a block
constexpr int BLOCK_CO = 16;  // output channels of a block
constexpr int REDUCE_ROWS = 1;
constexpr int TILE_N = 1;  // images of a tile
constexpr int KERNEL_D = 3, KERNEL_H = 3, KERNEL_W = 3;  // the layer's
constexpr int STEP_D = 1, STEP_H = 1, STEP_W = 1;  // stride
constexpr int DIL_D = 1, DIL_H = 1, DIL_W = 1;  // dilation
constexpr int PAD_D = 0, PAD_H = 0, PAD_W = 0;  // padding
constexpr int TAPS_D = 3, TAPS_H = 3, TAPS_W = 3;  // of a set, which a block multiplies
constexpr int SETS_D = 1, SETS_H = 1, SETS_W = 1;  // of taps
constexpr int TILE_D = 4, TILE_H = 4, TILE_W = 8;  // positions q of a chunk
constexpr int APART_D = 1, APART_H = 1;
constexpr int WARP_M = 16;  // input channels of a warp
constexpr int WARP_N = 8;  // output channels of a warp

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
constexpr int WARPS = 8;
constexpr int COPIERS = WARPS * 32;  // threads that copy
constexpr int ROW_CLASSES = 1;  // of rows of g along H, by where they begin in 16 bytes
constexpr int X_ROWS_H = TILE_H;  // of x's tile in a slice

// PTX in small wrappers, so that a kernel body reads as an algorithm.
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// --- copies into shared memory ---------------------------------------------------------------------------------------

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {  // the rest of the 16 becomes zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// --- numbers ---------------------------------------------------------------------------------------------------------

// Nearest TF32, ties to even, as cuDNN rounds: with it results agree with cuDNN to 3e-6, with rna to 5e-5.
__device__ __forceinline__ u32 to_tf32(float v) {
  u32 r;
  asm("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(v));
  return r;
}
// By one instruction before sm_90, where nearest-even takes six: ties away from zero.
__device__ __forceinline__ u32 to_tf32_quick(float v) {
  return to_tf32(v);
}

// --- matrix instructions ---------------------------------------------------------------------------------------------

// mma.sync: one warp, D[16 x 8] += A[16 x K] B[K x 8] of 32 bytes of K. Lane (g, t): D[2h + c] is row g + 8h, column 2t + c.
__device__ __forceinline__ void mma(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

constexpr int VEC = 16 / ELEMENT;  // elements of a 16-byte unit
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W;  // of a set, which a block multiplies
constexpr int SET_TAPS = TAPS_D * TAPS_H * TAPS_W;
constexpr int SETS = SETS_D * SETS_H * SETS_W;  // of taps
constexpr int CIN = GROUPS * CIN_G;  // channels of what is read
constexpr int COUT = GROUPS * COUT_G;  // channels of what is written
constexpr int SPAN_D = 6, SPAN_H = 6;
constexpr int G_ROWS_D = SPAN_D;
constexpr int G_ROWS_H = SPAN_H;
constexpr int G_COLUMNS = 10;
constexpr int X_ROWS = TILE_N * TILE_D * X_ROWS_H;
constexpr int CLASS_ROWS = (G_ROWS_H + ROW_CLASSES - 1) / ROW_CLASSES;
constexpr int G_ROWS = TILE_N * G_ROWS_D * (ROW_CLASSES * CLASS_ROWS);
constexpr int G_EXTENT = (G_COLUMNS + VEC - 1 + VEC - 1) / VEC;  // units of a row (NCHW)
constexpr int X_UNITS = (TILE_W + (VEC - 1) + VEC - 1) / VEC;
constexpr int G_UNITS = G_EXTENT;
constexpr int X_PITCH = 12;
constexpr int G_PITCH = 20;
constexpr int X_BYTES = X_ROWS * BLOCK_CI * X_PITCH * ELEMENT;
constexpr int G_BYTES = G_ROWS * BLOCK_CO * G_PITCH * ELEMENT;
struct Sizes {
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;           // chunks per axis
  int chunks, per_split;                   // all of them; of one split
};

struct Chunk { int n, d, h, w; };  // first q

__device__ __forceinline__ Chunk chunk_at(int i, const Sizes& s) {
  Chunk c;
  c.w = i % s.tiles_w * TILE_W;  i /= s.tiles_w;
  c.h = i % s.tiles_h * TILE_H;  i /= s.tiles_h;
  c.d = i % s.tiles_d * TILE_D;
  c.n = i / s.tiles_d * TILE_N;
  return c;
}

// One operand's tile: where it lies in its tensor. (n, d, h) of row `r` of the tile by its kind.
struct Rows { int n, d, h; };
__device__ __forceinline__ Rows x_row(int r) { return {r / (TILE_D * X_ROWS_H), r / X_ROWS_H % TILE_D, r % X_ROWS_H}; }
__device__ __forceinline__ Rows g_row(int r) {
  int h = r % G_ROWS_H, d = r / G_ROWS_H % G_ROWS_D;
  return {r / (G_ROWS_H * G_ROWS_D), d * APART_D,
          h * APART_H};
}

// =====================================================================================================================
// Copies
// =====================================================================================================================

typedef u32 bits;

template <int ROWS, int BLOCK, int COLUMNS_OR_UNITS, int PITCH, int CHANNELS, int CHANNELS_G, bool IS_X>
__device__ __forceinline__ void copy_tile(const char* __restrict__ tensor, int batch, int depth, int height, int width,
    int n0, int d0, int h0, int w0, int channel, int left, unsigned char* to, int thread) {
  u32 to_address = shared_address(to);
  // Units that hold a border are copied whole; `clear_borders` clears what lies beyond it when they have landed. Copies in
  // parts of 4 bytes, by some of a warp's threads each time, take nearly three times as long.
  // A thread keeps its channel and place in the row for all rows of the tile: an index for each unit makes address
  // arithmetic the bound.
  constexpr int UNITS = COLUMNS_OR_UNITS, ROWS_H = IS_X ? X_ROWS_H : G_ROWS_H;
  long long plane = (long long)depth * height * width;
#pragma unroll 1
  for (int i = thread; i < BLOCK * UNITS; i += COPIERS) {
    int unit = i % UNITS, c = i / UNITS;
    u32 offset = (c * PITCH + unit * VEC) * ELEMENT;
#pragma unroll 1
    for (int r = 0; r < ROWS / ROWS_H; r++) {
      Rows at = IS_X ? x_row(r * ROWS_H) : g_row(r * ROWS_H);
      int n = n0 + at.n, d = d0 + at.d;
      bool slice = n < batch && (u32)d < (u32)depth && c < left;
      const char* base = tensor
          + (((long long)n * CHANNELS + channel + c) * plane + (long long)d * height * width + w0) * ELEMENT;
#pragma unroll 2
      for (int rh = 0; rh < ROWS_H; rh++, offset += BLOCK * PITCH * ELEMENT) {
        int h = h0 + (IS_X ? rh : rh * APART_H);
        const char* from = base + (long long)h * (width * ELEMENT);
        // column of the first element
        int misaligned = (int)((u64)from & 15), first = w0 + (unit * 16 - misaligned) / ELEMENT;
        from += unit * 16 - misaligned;
        bool in = slice && (u32)h < (u32)height && first + VEC > 0 && first < width;
        copy16(to_address + offset, in ? from : tensor, in ? 16 : 0);
      }
    }
  }
}

__device__ __forceinline__ bool has_borders(int w0, int columns, int width) { return w0 < 0 || w0 + columns > width; }

// Clears elements before column 0 and from column `width` on, in the units that hold such a border.
template <int ROWS, int BLOCK, int UNITS, int PITCH, int CHANNELS, bool IS_X>
__device__ __forceinline__ void clear_borders(const char* tensor, int depth, int height, int width, int n0, int d0,
    int h0, int w0, int channel, unsigned char* to, int thread) {
  u32 plane = (u32)depth * height * width;
#pragma unroll 1
  for (int i = thread; i < ROWS * BLOCK; i += COPIERS) {
    int c = i % BLOCK, row = i / BLOCK;
    Rows at = IS_X ? x_row(row) : g_row(row);
    u32 first = (u32)((u64)tensor / ELEMENT) + ((u32)(n0 + at.n) * CHANNELS + channel + c) * plane
        + ((u32)(d0 + at.d) * height + h0 + at.h) * width + w0;
    // elements of column 0 and of the one behind the last
    int zero = (int)(first & (VEC - 1)) - w0, end = zero + width;
    bits* line = (bits*)(to + (row * BLOCK + c) * PITCH * ELEMENT);
    if (zero > 0 && zero < UNITS * VEC)
      for (int e = zero & ~(VEC - 1); e < zero; e++) line[e] = 0;
    if (end > 0 && end < UNITS * VEC)
      for (int e = end; e & (VEC - 1); e++) line[e] = 0;
  }
}

// =====================================================================================================================
// The second step: slices are added in the order of their index. A block takes 32 of the innermost channels of some rows of a
// slice. Of large weights these are 64 rows (REDUCE_ROWS), turned through shared memory, so that slices are read and
// the weight is written in
// whole sectors; of small ones it is one row, and the block's warps divide
// the slices, since more rows leave blocks idle.
// =====================================================================================================================

constexpr int RUNS = 8;  // warps of a block

constexpr int INNERMOST = COUT_G;
constexpr int SLICE_ROWS = CIN * TAPS;

struct SliceRow {
  long long from, to;                      // first element in a slice, and in the weight
};

// Rows are counted as the weight has them.
__device__ __forceinline__ SliceRow slice_row(int row, long long stride_ci, long long stride_co, long long stride_tap) {
  int ci = row / TAPS, tap = row % TAPS;
  return {((long long)tap * CIN + ci) * COUT_G, ci * stride_ci + tap * stride_tap};
}

__global__ void __launch_bounds__(32 * RUNS)
reduce(const float* __restrict__ partial, bits* __restrict__ out, int slices, long long stride_ci, long long stride_co,
    long long stride_tap) {
  __shared__ float sums[RUNS][33];
  const long long total = (long long)TAPS * CIN * COUT_G;
  constexpr int COLUMNS_OF_BLOCKS = (INNERMOST + 31) / 32, ROWS_EACH = 1;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int c = blockIdx.x % COLUMNS_OF_BLOCKS * 32 + lane, first = blockIdx.x / COLUMNS_OF_BLOCKS * REDUCE_ROWS;
  int share = (slices + RUNS - 1) / RUNS, begin = warp * share, end = begin + share < slices ? begin + share : slices;
  long long from[ROWS_EACH];
  float sum[ROWS_EACH];
#pragma unroll
  for (int k = 0; k < ROWS_EACH; k++) {
    int row = first;
    from[k] = row < SLICE_ROWS && c < INNERMOST ? slice_row(row, stride_ci, stride_co, stride_tap).from + c : -1;
    sum[k] = 0.f;
  }
#pragma unroll 8
  for (int i = begin; i < end; i++)
#pragma unroll
    for (int k = 0; k < ROWS_EACH; k++)
      if (from[k] >= 0) sum[k] += partial[i * total + from[k]];
#pragma unroll
  for (int k = 0; k < ROWS_EACH; k++) sums[warp + k * RUNS][lane] = sum[k];
  __syncthreads();
  if (warp) return;
#pragma unroll
  for (int run = 1; run < RUNS; run++) sum[0] += sums[run][lane];
  sums[0][lane] = sum[0];
  __syncwarp();
  long long stride_c = stride_co;
  c -= lane;
#pragma unroll 1
  for (int i = threadIdx.x; i < REDUCE_ROWS * 32; i += 32 * RUNS) {  // neighbouring threads write neighbours
    int row = stride_c == 1 ? i / 32 : i % REDUCE_ROWS, column = stride_c == 1 ? i % 32 : i / REDUCE_ROWS;
    if (first + row >= SLICE_ROWS || c + column >= INNERMOST) continue;
    long long to = slice_row(first + row, stride_ci, stride_co, stride_tap).to + (c + column) * stride_c;
    out[to] = __float_as_uint(sums[row][column]);
  }
}

constexpr int THREADS = WARPS * 32;
constexpr int WARPS_M = BLOCK_CI / WARP_M;
constexpr int WARPS_N = BLOCK_CO / WARP_N;
constexpr int WARPS_K = WARPS / (WARPS_M * WARPS_N);
constexpr int M_FRAGMENTS = WARP_M / 16;
constexpr int N_FRAGMENTS = WARP_N / 8;
constexpr int M_TILES = (CIN_G + BLOCK_CI - 1) / BLOCK_CI;
constexpr int N_TILES = (COUT_G + BLOCK_CO - 1) / BLOCK_CO;

constexpr int STAGE_BYTES = X_BYTES + G_BYTES;

constexpr int W_STRIPS = TILE_W / 8;  // a strip is 8 columns of a row
constexpr int STRIPS = X_ROWS * W_STRIPS;
constexpr int STEPS = STRIPS;  // a matrix instruction takes one strip of float32, two of 16-bit types
constexpr int PARTS = 1;

struct Work {                              // of a block
  int group, m, n;                         // first channels within the group
  int tap_d, tap_h, tap_w;                 // first tap of the set
};

__device__ __forceinline__ void copy_chunk(const char* __restrict__ x, const char* __restrict__ g, const Sizes& s,
    const Chunk& c, const Work& work, unsigned char* stage, int thread) {
  constexpr int x_extent = X_UNITS, g_extent = G_UNITS;
  copy_tile<X_ROWS, BLOCK_CI, x_extent, X_PITCH, CIN, CIN_G, true>(
      x, s.batch, s.in_d, s.in_h, s.in_w, c.n, c.d, c.h, c.w, work.group * CIN_G + work.m, CIN_G - work.m, stage,
          thread);
  copy_tile<G_ROWS, BLOCK_CO, g_extent, G_PITCH, COUT, COUT_G, false>(
      g, s.batch, s.out_d, s.out_h, s.out_w, c.n, c.d * STEP_D + work.tap_d * DIL_D - PAD_D,
          c.h * STEP_H + work.tap_h * DIL_H - PAD_H,
      c.w * STEP_W + work.tap_w * DIL_W - PAD_W, work.group * COUT_G + work.n, COUT_G - work.n, stage + X_BYTES,
          thread);
}

// =====================================================================================================================
// Multiplications
// =====================================================================================================================

__device__ __forceinline__ u32 element_pair(const u32* words, int e, int) { return words[e]; }

// One chunk of a stage: all its steps that are this warp's.
__device__ __forceinline__ void multiply_chunk(float (&acc)[SET_TAPS][M_FRAGMENTS][N_FRAGMENTS][4],
    const unsigned char* stage, const Sizes& s, u32 x_phase, u32 g_phase, int warp_m, int warp_n, int warp_k,
        int lane) {
  const int g = lane >> 2, q = lane & 3;
  const u32* xs = (const u32*)stage;
  const u32* gs = (const u32*)(stage + X_BYTES);
#pragma unroll 1
  for (int step = warp_k; step < STEPS; step += WARPS_K) {
    int x_at[2], g_row_n[2], row_d[2], row_h[2], column[2];  // of the two halves of K
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int strip = step, row = strip / W_STRIPS;
      Rows at = x_row(row);
      g_row_n[k] = at.n * G_ROWS_D;
      row_d[k] = at.d * (STEP_D / APART_D);
      row_h[k] = at.h * (STEP_H / APART_H);
      column[k] = strip % W_STRIPS * 8 + 4 * k;
      int phase = (x_phase + ((u32)(at.n * CIN) * s.in_d + at.d) * s.in_h * s.in_w + at.h * s.in_w) & (VEC - 1);
      x_at[k] = row * BLOCK_CI * X_PITCH + column[k] + phase;
    }
    u32 a[M_FRAGMENTS][PARTS][4];
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; i++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        int m = warp_m + i * 16 + (r & 1) * 8 + g, k = r >> 1;
        u32 v = element_pair(xs, x_at[k] + m * X_PITCH + q, 1);
        a[i][0][r] = to_tf32_quick(__uint_as_float(v));
      }
#pragma unroll
    for (int td = 0; td < TAPS_D; td++)
#pragma unroll
      for (int th = 0; th < TAPS_H; th++) {
        int base[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          int d = row_d[k] + td * (DIL_D / APART_D), h = row_h[k] + th * (DIL_H / APART_H);
          int row = (g_row_n[k] + d) * G_ROWS_H + h;
          int image = g_row_n[k] / G_ROWS_D, at_d = d * APART_D, at_h = h * APART_H;
          int phase = (g_phase + ((u32)(image * COUT) * s.out_d + at_d) * s.out_h * s.out_w
              + (u32)at_h * s.out_w) & (VEC - 1);
          base[k] = row * BLOCK_CO * G_PITCH + column[k] * STEP_W + phase;
        }
#pragma unroll
        for (int tw = 0; tw < TAPS_W; tw++) {
          const int tap = (td * TAPS_H + th) * TAPS_W + tw;
          u32 b[N_FRAGMENTS][PARTS][2];
#pragma unroll
          for (int j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
              int n = warp_n + j * 8 + g;
              u32 v = element_pair(gs, base[k] + n * G_PITCH + q * STEP_W + tw * DIL_W, STEP_W);
              b[j][0][k] = to_tf32_quick(__uint_as_float(v));
            }
#pragma unroll
          for (int j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
            for (int i = 0; i < M_FRAGMENTS; i++) {
              mma(acc[tap][i][j], a[i][0], b[j][0][0], b[j][0][1]);
            }
        }
      }
  }
}

// partial: [SPLITS * WARPS_K][TAPS][CIN][COUT_G] float32.
__global__ void __launch_bounds__(THREADS, 1)
wgrad(const char* __restrict__ x, const char* __restrict__ g, float* __restrict__ partial, int batch, int in_d,
      int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int chunks,
      int per_split) {
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
  if (begin < end) copy_chunk(x, g, s, chunk_at(begin, s), work, memory, thread);
  copy_commit();
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    unsigned char* stage = memory + ((i - begin) & 1) * STAGE_BYTES;
    if (i + 1 < end)
      copy_chunk(x, g, s, chunk_at(i + 1, s), work, memory + ((i + 1 - begin) & 1) * STAGE_BYTES, thread);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    u32 x_phase = 0, g_phase = 0;
    Chunk c = chunk_at(i, s);
    int d = c.d * STEP_D + work.tap_d * DIL_D - PAD_D, h = c.h * STEP_H + work.tap_h * DIL_H - PAD_H,
        w = c.w * STEP_W + work.tap_w * DIL_W - PAD_W;
    int first_x = work.group * CIN_G + work.m, first_g = work.group * COUT_G + work.n;
    bool borders_x = has_borders(c.w, TILE_W, in_w), borders_g = has_borders(w, G_COLUMNS, out_w);
    if (borders_x)
      clear_borders<X_ROWS, BLOCK_CI, X_UNITS, X_PITCH, CIN,
          true>(x, in_d, in_h, in_w, c.n, c.d, c.h, c.w, first_x, stage, thread);
    if (borders_g)
      clear_borders<G_ROWS, BLOCK_CO, G_UNITS, G_PITCH, COUT,
          false>(g, out_d, out_h, out_w, c.n, d, h, w, first_g, stage + X_BYTES, thread);
    if (borders_x || borders_g) __syncthreads();
    // Rows 8 channels apart have the same alignment, so that a lane has one for each row of a tile.
    int channel_x = first_x + (lane >> 2), channel_g = first_g + (lane >> 2);
    x_phase = (u32)((u64)x / ELEMENT) + (((u32)c.n * CIN + channel_x) * in_d + c.d) * in_h * in_w + (u32)c.h * in_w
        + c.w;
    g_phase = (u32)((u64)g / ELEMENT) + (((u32)c.n * COUT + channel_g) * out_d + d) * out_h * out_w + (u32)h * out_w
        + w;
    multiply_chunk(acc, stage, s, x_phase, g_phase, warp_m, warp_n, warp_k, lane);
    __syncthreads();
  }

  const int row = lane >> 2, q = lane & 3;
  long long slice = ((long long)split * WARPS_K + warp_k) * (TAPS * CIN * (long long)COUT_G);
#pragma unroll
  for (int tap = 0; tap < SET_TAPS; tap++) {
    int kd = work.tap_d + tap / (TAPS_H * TAPS_W), kh = work.tap_h + tap / TAPS_W % TAPS_H,
        kw = work.tap_w + tap % TAPS_W;
    if (kd >= KERNEL_D || kh >= KERNEL_H || kw >= KERNEL_W) continue;
    float* to = partial + slice
        + ((long long)((kd * KERNEL_H + kh) * KERNEL_W + kw) * CIN + work.group * CIN_G) * COUT_G;
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; i++)
#pragma unroll
      for (int j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          int m = work.m + warp_m + i * 16 + row + 8 * h, n = work.n + warp_n + j * 8 + 2 * q;
          float v0 = acc[tap][i][j][2 * h], v1 = acc[tap][i][j][2 * h + 1];
          if (m >= CIN_G) continue;
          float* at = to + (long long)m * COUT_G + n;
          if (n < COUT_G) *(float2*)at = make_float2(v0, v1);
        }
  }
}
}  // namespace grad_weight_unaligned

namespace {

// --- launches ----------------------------------------------------------------------------------------------------

// A value as a kernel's parameter: pointers from void*, integers in range, tensor maps bit by bit.
template <typename To, typename From>
To parameter(const From& value) {
  if constexpr (std::is_class_v<To>) {
    static_assert(sizeof(To) == sizeof(From), "a tensor map has 128 bytes");
    To to;
    std::memcpy(&to, &value, sizeof(To));
    return to;
  } else if constexpr (std::is_integral_v<To>) {
    const To found = static_cast<To>(value);
    TORCH_CHECK(found == value, "the tensor is too large: a size or the number of its tiles is ", value);
    return found;
  } else {
    return static_cast<To>(value);
  }
}

template <typename... Parameters, typename Values, size_t... I>
void start(void (*kernel)(Parameters...), const cudaLaunchConfig_t& config, const Values& values,
           std::index_sequence<I...>) {
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, parameter<Parameters>(std::get<I>(values))...));
}

// Launches a kernel on the tensor's device and that device's current stream. The kernel's arguments come as tuples
// and arrays, which are joined.
template <auto Kernel, int Threads, int SharedBytes, typename... Arguments>
void launch(const at::Tensor& on, int64_t blocks, const Arguments&... arguments) {
  TORCH_CHECK(0 < blocks && blocks < (int64_t(1) << 31), "the tensor is too large: it makes ", blocks, " blocks");
  const c10::cuda::CUDAGuard guard(on.device());
  if constexpr (SharedBytes > 48 * 1024) {  // more than the default wants to be asked for, once per device
    static std::array<std::once_flag, 64> asked;
    std::call_once(asked.at(on.get_device()), [] {
      C10_CUDA_CHECK(cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SharedBytes));
    });
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(Threads);
  config.dynamicSmemBytes = SharedBytes;
  config.stream = c10::cuda::getCurrentCUDAStream(on.get_device()).stream();
  const auto values = std::tuple_cat(arguments...);
  start(Kernel, config, values, std::make_index_sequence<std::tuple_size_v<decltype(values)>>());
}

void* address(const std::optional<at::Tensor>& t) { return t ? t->data_ptr() : nullptr; }

// --- tensor maps: what the tensor copy engine must know of a tensor ----------------------------------------------

// The driver's function, found at run time so that nothing links libcuda.
decltype(&cuTensorMapEncodeTiled) encode_tiled() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
    C10_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status));
#else
    C10_CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &status));
#endif
    TORCH_CHECK(function != nullptr, "the CUDA driver must be 12.0 or newer: it has no tensor maps");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return found;
}

// A map over a dense tensor of dimensions `dims`, innermost first, and the box that one copy brings: `box` elements
// traversed by `steps` along each. `channels_second`: the map has the fourth dimension second, and so has the box.
CUtensorMap tensor_map(const at::Tensor& t, CUtensorMapDataType type, const std::array<int64_t, 5>& dims,
                       const std::array<cuuint32_t, 5>& box, const std::array<cuuint32_t, 5>& steps,
                       CUtensorMapSwizzle swizzle, bool channels_second = false) {
  const c10::cuda::CUDAGuard guard(t.device());
  C10_CUDA_CHECK(cudaSetDevice(t.get_device()));  // gives a thread that has called nothing yet its context
  std::array<cuuint64_t, 5> counts;
  std::array<cuuint64_t, 4> pitches;  // bytes from an element to the next along all dimensions but the innermost
  cuuint64_t pitch = t.element_size();
  for (int i = 0; i < 5; i++) {
    counts[i] = dims[i];
    pitch *= dims[i];
    if (i < 4) pitches[i] = pitch;
  }
  if (channels_second) {
    std::rotate(counts.begin() + 1, counts.begin() + 3, counts.begin() + 4);
    std::rotate(pitches.begin(), pitches.begin() + 2, pitches.begin() + 3);
  }
  CUtensorMap map;
  const CUresult result = encode_tiled()(
      &map, type, 5, t.data_ptr(), counts.data(), pitches.data(), box.data(), steps.data(),
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with error ", static_cast<int>(result));
  return map;
}

// The current stream of a tensor's device; none while a graph is captured on it.
std::optional<int64_t> stream_of(const at::Tensor& t) {
  const c10::cuda::CUDAGuard guard(t.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(t.get_device());
  cudaStreamCaptureStatus status;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream.stream(), &status));
  if (status != cudaStreamCaptureStatusNone) return std::nullopt;
  return reinterpret_cast<intptr_t>(stream.stream());
}

// Words of device memory for blocks that claim tiles: zeros, which kernels leave zeros. Each stream has its own,
// since kernels of two may run at once; a captured launch has none, since its graph's replays may, and its tiles
// are dealt out evenly.
void* counters(const at::Tensor& on) {
  const std::optional<int64_t> stream = stream_of(on);
  if (!stream) return nullptr;
  static std::mutex mutex;
  static auto& of_streams =  // not destroyed at exit, when the driver may be gone
      *new std::map<std::pair<int, int64_t>, at::Tensor>();
  const std::pair<int, int64_t> key(on.get_device(), *stream);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = of_streams.find(key);
    if (found != of_streams.end()) return found->second.data_ptr();
  }
  const at::Tensor zeros = at::zeros({2}, on.options().dtype(at::kInt));  // may call Python: not locked
  const std::lock_guard<std::mutex> lock(mutex);
  return of_streams.emplace(key, zeros).first->second.data_ptr();
}

}  // namespace

void pack_forward_joined(const at::Tensor& weight, const at::Tensor& packed) {
  const auto pointers = std::make_tuple(weight.data_ptr(), packed.data_ptr());
  launch<forward_joined::pack, 256, 0>(weight, 81, pointers, std::make_tuple(1));
}

void run_forward_joined(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                        const at::Tensor& out, int64_t blocks, const std::array<int64_t, 6>& sizes) {
  const CUtensorMap map = tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, {x.size(-1), x.size(-2), x.size(2), 48, x.size(0)},
                                     {64, 8, 1, 8, 1}, {1, 1, 1, 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
  const auto pointers = std::make_tuple(packed.data_ptr(), address(bias), out.data_ptr());
  launch<forward_joined::joined, 384, 223488>(x, blocks, pointers, sizes, std::make_tuple(map));
}

void pack_forward(const at::Tensor& weight, const at::Tensor& packed) {
  const auto pointers = std::make_tuple(weight.data_ptr(), packed.data_ptr());
  launch<forward::pack, 256, 0>(weight, 168, pointers, std::make_tuple(1));
}

void run_forward(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                 const at::Tensor& out, int64_t blocks, const std::array<int64_t, 11>& sizes) {
  const CUtensorMap map = tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {sizes[3], sizes[2], sizes[1], 48, sizes[0]},
                                     {28, 10, 4, 8, 1}, {1, 1, 1, 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
  const auto pointers = std::make_tuple(x.data_ptr(), packed.data_ptr(), address(bias), out.data_ptr(), counters(x));
  launch<forward::gather, 512, 201200>(x, blocks, pointers, sizes, std::make_tuple(map));
}

void pack_forward_unaligned(const at::Tensor& weight, const at::Tensor& packed) {
  const auto pointers = std::make_tuple(weight.data_ptr(), packed.data_ptr());
  launch<forward_unaligned::pack, 256, 0>(weight, 168, pointers, std::make_tuple(1));
}

void run_forward_unaligned(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                           const at::Tensor& out, int64_t blocks, const std::array<int64_t, 11>& sizes) {
  const auto pointers = std::make_tuple(x.data_ptr(), packed.data_ptr(), address(bias), out.data_ptr());
  launch<forward_unaligned::gather, 512, 211216>(x, blocks, pointers, sizes);
}

void pack_grad_input(const at::Tensor& weight, const at::Tensor& packed) {
  const auto pointers = std::make_tuple(weight.data_ptr(), packed.data_ptr());
  launch<grad_input::pack, 256, 0>(weight, 168, pointers, std::make_tuple(1));
}

void run_grad_input(const at::Tensor& grad, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                    const at::Tensor& out, int64_t blocks, const std::array<int64_t, 11>& sizes) {
  const auto pointers = std::make_tuple(grad.data_ptr(), packed.data_ptr(), address(bias), out.data_ptr());
  launch<grad_input::gather, 512, 231664>(grad, blocks, pointers, sizes);
}

void run_grad_weight(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& partial,
                     const at::Tensor& out, int64_t blocks, const std::array<int64_t, 12>& sizes) {
  const CUtensorMap map_x = tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, {sizes[3], sizes[2], sizes[1], 48, sizes[0]},
                                       {32, 64, 4, 1, 1}, {1, 1, 1, 1, 1}, CU_TENSOR_MAP_SWIZZLE_128B, true);
  const std::array<CUtensorMap, 1> maps = {map_x};
  const auto pointers = std::make_tuple(grad.data_ptr(), partial.data_ptr());
  launch<grad_weight::wgrad, 512, 208944>(x, blocks, pointers, sizes, std::make_tuple(maps));
  // Adds the slices of sums, always in the same order; out may have any dense memory format.
  const auto sums = std::make_tuple(partial.data_ptr(), out.data_ptr(), partial.size(0));
  const auto strides = std::make_tuple(out.stride(0), out.stride(1), out.stride(-1));
  launch<grad_weight::reduce, 256, 0>(x, 2592, sums, strides);
}

void run_grad_weight_unaligned(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& partial,
                               const at::Tensor& out, int64_t blocks, const std::array<int64_t, 12>& sizes) {
  const auto pointers = std::make_tuple(x.data_ptr(), grad.data_ptr(), partial.data_ptr());
  launch<grad_weight_unaligned::wgrad, 256, 190464>(x, blocks, pointers, sizes);
  // Adds the slices of sums, always in the same order; out may have any dense memory format.
  const auto sums = std::make_tuple(partial.data_ptr(), out.data_ptr(), partial.size(0));
  const auto strides = std::make_tuple(out.stride(0), out.stride(1), out.stride(-1));
  launch<grad_weight_unaligned::reduce, 256, 0>(x, 2592, sums, strides);
}
"""

DECLARATIONS = r"""
#include <array>
#include <optional>
void pack_forward_joined(const at::Tensor& weight, const at::Tensor& packed);
void run_forward_joined(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                        const at::Tensor& out, int64_t blocks, const std::array<int64_t, 6>& sizes);
void pack_forward(const at::Tensor& weight, const at::Tensor& packed);
void run_forward(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                 const at::Tensor& out, int64_t blocks, const std::array<int64_t, 11>& sizes);
void pack_forward_unaligned(const at::Tensor& weight, const at::Tensor& packed);
void run_forward_unaligned(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                           const at::Tensor& out, int64_t blocks, const std::array<int64_t, 11>& sizes);
void pack_grad_input(const at::Tensor& weight, const at::Tensor& packed);
void run_grad_input(const at::Tensor& grad, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                    const at::Tensor& out, int64_t blocks, const std::array<int64_t, 11>& sizes);
void run_grad_weight(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& partial,
                     const at::Tensor& out, int64_t blocks, const std::array<int64_t, 12>& sizes);
void run_grad_weight_unaligned(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& partial,
                               const at::Tensor& out, int64_t blocks, const std::array<int64_t, 12>& sizes);
"""

FUNCTIONS = [
    "pack_forward_joined",
    "run_forward_joined",
    "pack_forward",
    "run_forward",
    "pack_forward_unaligned",
    "run_forward_unaligned",
    "pack_grad_input",
    "run_grad_input",
    "run_grad_weight",
    "run_grad_weight_unaligned",
]

_lock = threading.Lock()
_extension = None


def build():
    """Compiles the kernels and loads them; PyTorch keeps what is compiled in its folder for extensions.

    The first call of ModelNew does it by itself; it takes a minute or two.

    Raises:
        RuntimeError: one sentence on what is missing, or the compiler's messages.
    """
    global _extension
    with _lock:
        if _extension is None:
            if torch.version.cuda is None:
                raise RuntimeError("ModelNew's kernels need a PyTorch with CUDA, and this one is built without")
            if cpp_extension.CUDA_HOME is None:
                raise RuntimeError("ModelNew compiles its kernels with nvcc; install the CUDA toolkit or set CUDA_HOME")
            if not cpp_extension.is_ninja_available():
                raise RuntimeError("ModelNew compiles its kernels with ninja, which is missing: pip install ninja")
            if shutil.which(os.environ.get("CXX", "c++")) is None:
                raise RuntimeError("ModelNew compiles its kernels with a C++ compiler, and there is none; set CXX")
            digest = hashlib.sha256((CUDA + DECLARATIONS).encode()).hexdigest()
            _extension = cpp_extension.load_inline(
                name=f"conv_transpose_{digest[:16]}",
                cpp_sources=DECLARATIONS,
                cuda_sources=CUDA,
                functions=FUNCTIONS,
                extra_cuda_cflags=["-O3", "-gencode=arch=compute_90a,code=sm_90a"],
            )
    return _extension


# --- how much each kernel is launched with ---------------------------------------------------------------------------


def ceil(a: int, b: int) -> int:
    return -(-a // b)


@functools.lru_cache(maxsize=1024)
def output_size(size):
    """Of every spatial dimension."""
    axes = zip(size, KERNEL, STRIDE, PADDING, OUTPUT_PADDING, DILATION)
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, more, d in axes)


def full(size):
    """(depth, height, width); dimensions that the layer lacks have size 1."""
    return (1,) * (3 - RANK) + tuple(size)


class Joined(NamedTuple):
    """Forward or gradient for the input on tensor cores where rows are joined to one: tiles are neighbouring
    results of whatever rows of a slice."""

    name: str
    unit: int  # the source's columns must be a multiple of it, so that rows begin at 16 bytes
    columns: tuple[int, int]  # and as many as the first, at most the second
    places: int  # results of a tile
    blocks: int  # of output channels, each a tile of its own
    words: int  # of the packed weights
    packed: torch.dtype

    def fits(self, source, result):
        """Whether it serves the sizes: a slice's results are pairs, a channel's counted in 32 bits."""
        least, most = self.columns
        pairs = result[1] * result[2] % 2 == 0
        return least <= source[2] <= most and pairs and math.prod(result) < 2**31 - 4096

    def launch(self, batch, source, result, processors):
        """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
        plane = result[1] * result[2]
        places = ceil(plane, self.places)
        tiles = batch * result[0] * places * self.blocks
        return min(tiles, processors), (source[0], result[0], result[2], plane, places, tiles)


class Gather(NamedTuple):
    """Forward or gradient for the input on tensor cores: persistent blocks that take tile after tile."""

    name: str
    unit: int  # the source's columns must be a multiple of it, so that rows begin at 16 bytes
    tile: tuple[int, int, int, int]  # positions of a tile: images, depth, height, width
    steps: tuple[int, int, int]  # results of a position along depth, height, width
    leads: tuple[int, int, int]  # of the first position, those ahead of the image
    m_groups: int  # sets of output channels and phases, each a tile of its own
    resident: bool  # a block keeps the weights of one set, so that all sets have as many blocks
    words: int  # of the packed weights
    packed: torch.dtype

    def launch(self, batch, source, result, processors):
        """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
        axes = zip(result, self.leads, self.steps, self.tile[1:])
        counts = [ceil(size + lead, step * tile) for size, lead, step, tile in axes]
        tiles = ceil(batch, self.tile[0]) * math.prod(counts) * self.m_groups
        blocks = min(tiles, processors)
        if self.resident:
            blocks = max(1, blocks // self.m_groups) * self.m_groups
        return blocks, (batch, *source, *result, *counts, tiles)


class GradWeight(NamedTuple):
    """Gradient for the weight on tensor cores: blocks share the pixels; their sums are added after."""

    name: str
    unit: int  # the input's columns must be a multiple of it, so that rows begin at 16 bytes
    unit_out: int  # and the output's
    tile: tuple[int, int, int, int]  # pixels of a chunk: images, depth, height, width
    halo: int  # rows that chunks reach beyond the input
    blocks: int  # for the channels and taps of the weight, with every share of the pixels
    slices: int  # of sums that a block writes
    chunk_seconds: float  # by the planner's model
    block_seconds: float  # beside its chunks

    def launch(self, batch, size, out_size, processors):
        """(blocks, slices of sums, the kernel's sizes); the sizes are (depth, height, width)."""
        depth, height, width = size
        counts = [ceil(n, t) for n, t in zip((batch, depth, height + self.halo, width), self.tile)]
        chunks = math.prod(counts)
        pixels = batch * (IN_CHANNELS * math.prod(size) + OUT_CHANNELS * math.prod(out_size))
        shares = self.shares(chunks, pixels * DTYPE.itemsize / BANDWIDTH, processors)
        sizes = (batch, *size, *out_size, *counts[1:], chunks, ceil(chunks, shares))
        return self.blocks * shares, self.slices * shares, sizes

    def shares(self, chunks, memory, processors):
        """How many shares the pixels are cut in: the model weighs waves of blocks against sums to add."""
        slice_bytes = 4 * WEIGHTS * self.slices
        most = max(1, min(chunks, SUM_BYTES // slice_bytes))
        best = None
        for n in sorted({min(most, max(1, processors * k // self.blocks)) for k in (1, 2, 3, 4)} | {1}):
            each = ceil(chunks, n)
            n = ceil(chunks, each)  # without shares that were empty
            work = ceil(self.blocks * n, processors) * (each * self.chunk_seconds + self.block_seconds)
            seconds = max(work, memory) + 0.12 * min(work, memory) + n * slice_bytes / BANDWIDTH
            if best is None or seconds < best[0]:
                best = seconds, n
        return best[1]


# For each pass its kernels; the first that fits the size is taken.
FORWARD = (
    Joined(
        name="forward_joined",
        unit=4,
        columns=(49, 64),
        places=248,
        blocks=1,
        words=82944,
        packed=torch.int32,
    ),
    Gather(
        name="forward",
        unit=4,
        tile=(1, 2, 8, 24),
        steps=(1, 1, 1),
        leads=(0, 0, 0),
        m_groups=1,
        resident=False,
        words=82944,
        packed=torch.int32,
    ),
    Gather(
        name="forward_unaligned",
        unit=1,
        tile=(1, 2, 8, 24),
        steps=(1, 1, 1),
        leads=(0, 0, 0),
        m_groups=1,
        resident=False,
        words=82944,
        packed=torch.int32,
    ),
)
GRAD_INPUT = (
    Gather(
        name="grad_input",
        unit=1,
        tile=(1, 2, 8, 32),
        steps=(1, 1, 1),
        leads=(0, 0, 0),
        m_groups=1,
        resident=False,
        words=82944,
        packed=torch.int32,
    ),
)
GRAD_WEIGHT = (
    GradWeight(
        name="grad_weight",
        unit=4,
        unit_out=1,
        tile=(1, 1, 2, 64),
        halo=2,
        blocks=3,
        slices=1,
        chunk_seconds=3.30475322e-06,
        block_seconds=8.31908832e-06,
    ),
    GradWeight(
        name="grad_weight_unaligned",
        unit=1,
        unit_out=1,
        tile=(1, 4, 4, 8),
        halo=0,
        blocks=3,
        slices=1,
        chunk_seconds=9.75954416e-06,
        block_seconds=8.31908832e-06,
    ),
)


def serves(kernel, source, result):
    """Whether a kernel of the forward or of the gradient for the input is one for these sizes."""
    return source[2] % kernel.unit == 0 and (not isinstance(kernel, Joined) or kernel.fits(source, result))


@functools.lru_cache(maxsize=1024)
def forward_launch(batch, size, processors):
    source, result = full(size), full(output_size(size))
    kernel = next(k for k in FORWARD if serves(k, source, result))
    return kernel, *kernel.launch(batch, source, result, processors)


@functools.lru_cache(maxsize=1024)
def grad_input_launch(batch, size, processors):
    source, result = full(output_size(size)), full(size)
    kernel = next(k for k in GRAD_INPUT if serves(k, source, result))
    return kernel, *kernel.launch(batch, source, result, processors)


@functools.lru_cache(maxsize=1024)
def grad_weight_launch(batch, size, processors):
    size, out_size = full(size), full(output_size(size))
    kernel = next(k for k in GRAD_WEIGHT if size[2] % k.unit == 0 and out_size[2] % k.unit_out == 0)
    return kernel, *kernel.launch(batch, size, out_size, processors)


@functools.cache
def processors(device: int) -> int:
    """Multiprocessors of a CUDA device, after a look whether the kernels run there."""
    properties = torch.cuda.get_device_properties(device)
    have = properties.major, properties.minor
    if not (have == CAPABILITY):
        raise RuntimeError(
            f"ModelNew's kernels are compiled for sm_90a; got cuda:{device} ({properties.name}) of compute "
            f"capability {have[0]}.{have[1]}"
        )
    return properties.multi_processor_count


# --- the three passes on tensors -------------------------------------------------------------------------------------


def dense(t: Tensor) -> Tensor:
    """The tensor in the kernels' memory format, beginning at 16 bytes."""
    t = t.contiguous(memory_format=FORMAT)
    return t.clone() if t.data_ptr() % 16 else t


def run(kernel, source: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, blocks: int, sizes) -> Tensor:
    getattr(build_once(), f"run_{kernel.name}")(source, packed, bias, out, blocks, sizes)
    return out


def build_once():
    return _extension or build()


def pack(kernel, weight: Tensor) -> Tensor:
    """The weights in the order in which a kernel reads them, anew at each call; some kernels read them as they are."""
    weight = weight.contiguous()
    if not hasattr(kernel, "words"):
        return weight
    packed = weight.new_empty(kernel.words, dtype=kernel.packed)
    getattr(build_once(), f"pack_{kernel.name}")(weight, packed)
    return packed


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(batch, IN_CHANNELS, *size) -> (batch, OUT_CHANNELS, *output_size(size))."""
    size = x.shape[2:]
    shape = (x.shape[0], OUT_CHANNELS, *output_size(size))
    out = torch.empty(shape, dtype=DTYPE, device=x.device, memory_format=FORMAT)
    if out.numel() == 0:
        return out
    kernel, blocks, sizes = forward_launch(x.shape[0], size, processors(x.get_device()))
    return run(kernel, dense(x), pack(kernel, weight), None if bias is None else bias.contiguous(), out, blocks, sizes)


def grad_input(grad: Tensor, weight: Tensor, size) -> Tensor:
    """(batch, OUT_CHANNELS, *output_size(size)) -> (batch, IN_CHANNELS, *size)."""
    shape = (grad.shape[0], IN_CHANNELS, *size)
    out = torch.empty(shape, dtype=DTYPE, device=grad.device, memory_format=FORMAT)
    if out.numel() == 0:
        return out
    kernel, blocks, sizes = grad_input_launch(grad.shape[0], tuple(size), processors(grad.get_device()))
    return run(kernel, dense(grad), pack(kernel, weight), None, out, blocks, sizes)


def grad_weight(x: Tensor, grad: Tensor) -> Tensor:
    """Inputs and gradients of the outputs -> (IN_CHANNELS, OUT_CHANNELS // GROUPS, *KERNEL)."""
    shape = (IN_CHANNELS, OUT_CHANNELS // GROUPS, *KERNEL)
    if x.numel() == 0:
        return torch.zeros(shape, dtype=DTYPE, device=x.device)
    out = torch.empty(shape, dtype=DTYPE, device=x.device, memory_format=FORMAT)
    kernel, blocks, slices, sizes = grad_weight_launch(x.shape[0], tuple(x.shape[2:]), processors(x.get_device()))
    sums = torch.float64 if DTYPE is torch.float64 else torch.float32
    partial = torch.empty((slices, WEIGHTS), dtype=sums, device=x.device)
    getattr(build_once(), f"run_{kernel.name}")(dense(x), dense(grad), partial, out, blocks, sizes)
    return out


# --- autograd: each of the three is linear in both of its tensors, and the derivatives are the other two --------------


class ForwardFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return forward(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad
        return (
            GradInputFunction.apply(grad, weight, x.shape[2:]) if by_x else None,
            GradWeightFunction.apply(x, grad) if by_weight else None,
            grad.sum((0, *range(2, grad.dim()))) if by_bias else None,
        )


class GradInputFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad, weight, size):
        ctx.save_for_backward(grad, weight)
        return grad_input(grad, weight, size)

    @staticmethod
    def backward(ctx, other):  # of the input's shape
        grad, weight = ctx.saved_tensors
        by_grad, by_weight, _ = ctx.needs_input_grad
        return (
            ForwardFunction.apply(other, weight, None) if by_grad else None,
            GradWeightFunction.apply(other, grad) if by_weight else None,
            None,
        )


class GradWeightFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, grad):
        ctx.save_for_backward(x, grad)
        return grad_weight(x, grad)

    @staticmethod
    def backward(ctx, other):  # of the weight's shape
        x, grad = ctx.saved_tensors
        by_x, by_grad = ctx.needs_input_grad
        return (
            GradInputFunction.apply(grad, other, x.shape[2:]) if by_x else None,
            ForwardFunction.apply(x, other, None) if by_grad else None,
        )


# --- the module ------------------------------------------------------------------------------------------------------


def check_precision() -> None:
    """These kernels round float32 to TF32, as PyTorch does unless it is told not to."""
    cudnn = torch.backends.cudnn
    precision = cudnn.conv.fp32_precision if hasattr(cudnn, "conv") else "tf32" if cudnn.allow_tf32 else "ieee"
    if precision != "tf32" or not cudnn.enabled:
        raise RuntimeError(
            "ModelNew multiplies in TF32, and torch.backends.cudnn (conv.fp32_precision, allow_tf32, enabled) now asks "
            f"for IEEE float32; got {precision!r}"
        )


def check(x: Tensor, weight: Tensor) -> None:
    """Raises ValueError, in a sentence, for an input that the kernels cannot take."""
    if x.dim() != RANK + 2:
        shapes = "(batch, channels, depth, height, width), batched or not"
        raise ValueError(f"ModelNew takes inputs {shapes}; got shape {tuple(x.shape)}")
    if x.shape[1] != IN_CHANNELS:
        raise ValueError(f"ModelNew takes inputs of {IN_CHANNELS} channels; got shape {tuple(x.shape)}")
    if min(x.shape[2:]) < 1 or min(output_size(x.shape[2:])) < 1:
        raise ValueError(f"ModelNew takes inputs that leave an output; got shape {tuple(x.shape)}")
    if x.dtype != DTYPE or weight.dtype != DTYPE:
        raise ValueError(f"ModelNew takes inputs and weights of {DTYPE}; got {x.dtype} and {weight.dtype}")
    if not x.is_cuda or x.device != weight.device:
        raise ValueError(f"ModelNew takes inputs and weights on one CUDA device; got {x.device} and {weight.device}")
    check_precision()


def check_layer(layer: nn.Module) -> None:
    """Raises ValueError for another layer than the one that the kernels are specialised for."""
    for name, value in EXPECTED.items():
        if getattr(layer, name) != value:
            raise ValueError(f"ModelNew is specialised for {name}={value!r}; got {getattr(layer, name)!r}")


EXPECTED = {
    "in_channels": 48,
    "out_channels": 48,
    "kernel_size": (3, 3, 3),
    "stride": (1, 1, 1),
    "padding": (0, 0, 0),
    "output_padding": (0, 0, 0),
    "dilation": (1, 1, 1),
    "groups": 1,
}


class ModelNew(nn.Module):
    """KernelBench level 1, problem 61: ModelNew(48, 48, 3)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        # It holds the parameters, which are drawn here in PyTorch's order; it is never called.
        self.conv_transpose3d = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size=(kernel_size, kernel_size, kernel_size),
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            bias=bias,
        )
        check_layer(self.conv_transpose3d)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, channels, depth, height, width) or the same without batch, any sizes -> likewise."""
        single = x.dim() == RANK + 1
        if single:
            x = x.unsqueeze(0)
        layer = self.conv_transpose3d
        weight, bias = layer.weight, layer.bias
        check(x, weight)
        if torch.is_grad_enabled():
            out = ForwardFunction.apply(x, weight, bias)
        else:
            out = forward(x, weight, bias)
        return out.squeeze(0) if single else out
