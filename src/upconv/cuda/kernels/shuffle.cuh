#if SHUFFLED
// Rows of M that are the output channels and phases of a strided layer (SHUFFLED): tiles and taps are those of the layer without its
// stride, whose results the epilogue shuffles (cuda/gemm/shuffle.py explains it and computes the macros).
//
// Per axis an output is o = q LAYER_STRIDE + u - LEAD and a tap k = a LAYER_STRIDE + u - ZEROS: phase u of q sums tap a of input q - a.
// INNER rows of M are neighbours in memory at one q: the phases along W, in channels_last each with all channels. With those of the
// q beside it they make a line of the output; a slab, the 16 rows of a warp, has PER_SLAB lines of the LINES that there are.
#define TAPS_H ((ZEROS_H + LAYER_KERNEL_H + LAYER_STRIDE_H - 1) / LAYER_STRIDE_H)  // of a phase
#define TAPS_W ((ZEROS_W + LAYER_KERNEL_W + LAYER_STRIDE_W - 1) / LAYER_STRIDE_W)
#define LAYER_TAPS (LAYER_KERNEL_D * LAYER_KERNEL_H * LAYER_KERNEL_W)

struct Line { int channel, d, h; };                      // its first channel, and its phases along D and H

__device__ __forceinline__ Line shuffled_line(int line) {
#if CHANNELS_LAST
  return {0, line / LAYER_STRIDE_H, line % LAYER_STRIDE_H};
#else
  return {line / (LAYER_STRIDE_D * LAYER_STRIDE_H), line / LAYER_STRIDE_H % LAYER_STRIDE_D, line % LAYER_STRIDE_H};
#endif
}

struct Row {                                             // of M
  bool exists;
  int line, place;                                       // line of its slab, and which of the INNER
  int channel, d, h, w;                                  // and phases
};

__device__ __forceinline__ Row shuffled_row(int row) {
  int within = row % 16, of_slab = within / INNER, number = row / 16 * PER_SLAB + of_slab;
  Line line = shuffled_line(number);
  int place = within % INNER, channel = CHANNELS_LAST ? place % LAYER_CHANNELS : line.channel;
  return {of_slab < PER_SLAB && number < LINES, of_slab, place, channel, line.d, line.h, CHANNELS_LAST ? place / LAYER_CHANNELS : place};
}

// Where tap `tap` of the layer without its stride lies for a row of M, among the weights (output channels, kernel) of an input
// channel; -1 where the row or the tap does not exist. Taps are `tap_step` apart: 1, or in channels_last the channels.
__device__ __forceinline__ int weight_at(int row, int tap, int tap_step) {
  Row of = shuffled_row(row);
  int d = tap / (TAPS_H * TAPS_W) * LAYER_STRIDE_D + of.d - ZEROS_D;
  int h = tap / TAPS_W % TAPS_H * LAYER_STRIDE_H + of.h - ZEROS_H;
  int w = tap % TAPS_W * LAYER_STRIDE_W + of.w - ZEROS_W;
  if (!of.exists || (u32)d >= LAYER_KERNEL_D || (u32)h >= LAYER_KERNEL_H || (u32)w >= LAYER_KERNEL_W) return -1;
  int k = (d * LAYER_KERNEL_H + h) * LAYER_KERNEL_W + w;
  return tap_step == 1 ? of.channel * LAYER_TAPS + k : of.channel + k * tap_step;
}
#endif
