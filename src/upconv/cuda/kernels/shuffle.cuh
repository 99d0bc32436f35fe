// Rows of M that are the output channels and phases of a strided layer: tiles and taps are those of the layer without its
// stride, whose results the epilogue shuffles (cuda/gemm/shuffle.py explains it and computes the constants).
//
// Per axis an output is o = q stride + u and a tap k = a stride + u - zeros: phase u of q sums tap a of input q - a.
// C::inner rows of M are neighbours in memory at one q: the phases along W, in channels_last each with all channels. With those of the
// q beside it they make a line of the output; a slab, the 16 rows of a warp, has C::per_slab lines of the C::lines that there are.
#include "packing.cuh"

template <class C>
struct Shuffle {
static constexpr int TAPS_H = (C::zeros_h + C::layer_kernel_h + C::layer_stride_h - 1) / C::layer_stride_h;  // of a phase
static constexpr int TAPS_W = (C::zeros_w + C::layer_kernel_w + C::layer_stride_w - 1) / C::layer_stride_w;

struct Line { int channel, d, h; };                      // its first channel, and its phases along D and H

static __device__ __forceinline__ Line line_at(int line) {
  if constexpr (C::channels_last) return {0, line / C::layer_stride_h, line % C::layer_stride_h};
  else return {line / (C::layer_stride_d * C::layer_stride_h), line / C::layer_stride_h % C::layer_stride_d, line % C::layer_stride_h};
}

struct Row {                                             // of M
  bool exists;
  int line, place;                                       // line of its slab, and which of the INNER
  int channel, d, h, w;                                  // and phases
};

static __device__ __forceinline__ Row row_at(int row) {
  int within = row % 16, of_slab = within / C::inner, number = row / 16 * C::per_slab + of_slab;
  Line line = line_at(number);
  int place = within % C::inner, channel = C::channels_last ? place % C::cout : line.channel;
  return {of_slab < C::per_slab && number < C::lines, of_slab, place, channel, line.d, line.h, C::channels_last ? place / C::cout : place};
}

// The weight (input channels, output channels, kernel) of a row of M and an input channel for a tap of the layer without its stride: `found`
// has that tap, and whether it exists.
static __device__ __forceinline__ void find_weight(WeightAt& found, int row, int channel) {
  Row of = row_at(row);
  int d = found.tap / (TAPS_H * TAPS_W) * C::layer_stride_d + of.d - C::zeros_d;
  int h = found.tap / TAPS_W % TAPS_H * C::layer_stride_h + of.h - C::zeros_h;
  int w = found.tap % TAPS_W * C::layer_stride_w + of.w - C::zeros_w;
  found.there = found.there && of.exists && (u32)d < C::layer_kernel_d && (u32)h < C::layer_kernel_h && (u32)w < C::layer_kernel_w;
  found.first = channel, found.second = of.channel, found.tap = (d * C::layer_kernel_h + h) * C::layer_kernel_w + w;
}
};
