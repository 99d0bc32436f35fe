// wgmma.cuh for the host: WGMMA_N by what descriptors say of shared memory.
#ifndef A_TURNED
#define A_TURNED 0
#endif
#ifndef B_TURNED
#define B_TURNED 0
#endif

namespace machine {
// Operand row (of A, or column of B) `mn` of a descriptor, K numbers.
static void described(u64 of, bool turned, int mn, float* to) {
  const u32 start = (u32)(of & 0x3fff) << 4, leading = (u32)(of >> 16 & 0x3fff) << 4, stride = (u32)(of >> 32 & 0x3fff) << 4;
  const u32 span = (of >> 62) == 1 ? 128 : (of >> 62) == 2 ? 64 : (of >> 62) == 3 ? 32 : 0;
  if (!span) fail("a descriptor without a swizzle, which no kernel has");
  if (!turned) {
    for (u32 unit = 0; unit < 2; unit++) {
      const u32* words = (const u32*)shared_at(swizzled(start + mn / 8 * stride + mn % 8 * span + unit * 16, span), 16);
      for (int i = 0; i < 4; i++) numbers_of(words[i], to + unit * (K / 2) + i * (K / 8));
    }
    return;
  }
  const u32 wide = span / 2;  // numbers of a line
  for (int k = 0; k < K; k++) {
    float two[2];
    numbers_of(*(const u16*)shared_at(swizzled(start + mn / wide * leading + mn % wide * 2 + k % 8 * span + k / 8 * stride, span), 2), two);
    to[k] = two[0];
  }
}
// A thread's own sums: rows g and g + 8 of its warp's 16, columns 2t and 2t + 1 of each 8.
static void multiply_rows(float* d, int columns, const float (&rows)[2][16], u64 b, bool adds) {
  const int t = self->thread % 4;
  for (int j = 0; j < columns / 8; j++)
    for (int c = 0; c < 2; c++) {
      float column[16];
      described(b, B_TURNED && PRECISION >= 2, 8 * j + 2 * t + c, column);
      for (int h = 0; h < 2; h++) {
        float sum = 0;
        for (int k = 0; k < K; k++) sum += rows[h][k] * column[k];
        float& to = d[4 * j + 2 * h + c];
        to = adds ? to + sum : sum;
      }
    }
}
static void multiply_described(const Product& p) {
  float rows[2][16];
  const int row = self->thread % 128 / 32 * 16 + self->thread % 32 / 4;
  for (int h = 0; h < 2; h++) described(p.a, A_TURNED && PRECISION >= 2, row + 8 * h, rows[h]);
  multiply_rows(p.d, p.columns, rows, p.b, p.adds);
}
static void multiply_held(const Product& p) { multiply_rows(p.d, p.columns, p.rows, p.b, p.adds); }
static void wgmma(float* d, int columns, u64 a, u64 b, bool adds) { later({d, columns, adds, a, b}, multiply_described); }
static void wgmma(float* d, int columns, const u32 (&a)[4], u64 b, bool adds) {
  if (A_SHARED) return wgmma(d, columns, (u64)a[1] << 32 | a[0], b, adds);
  Product p = {d, columns, adds, 0, b};
  rows_of(exchange({a[0], a[1], a[2], a[3]}), p.rows);
  later(p, multiply_held);
}
}  // namespace machine
#define WGMMA_8(d, a, b, scale) machine::wgmma(d, 8, a, b, scale[0] == '1')
#define WGMMA_16(d, a, b, scale) machine::wgmma(d, 16, a, b, scale[0] == '1')
#define WGMMA_24(d, a, b, scale) machine::wgmma(d, 24, a, b, scale[0] == '1')
#define WGMMA_32(d, a, b, scale) machine::wgmma(d, 32, a, b, scale[0] == '1')
#define WGMMA_40(d, a, b, scale) machine::wgmma(d, 40, a, b, scale[0] == '1')
#define WGMMA_48(d, a, b, scale) machine::wgmma(d, 48, a, b, scale[0] == '1')
#define WGMMA_56(d, a, b, scale) machine::wgmma(d, 56, a, b, scale[0] == '1')
#define WGMMA_64(d, a, b, scale) machine::wgmma(d, 64, a, b, scale[0] == '1')
#define WGMMA_72(d, a, b, scale) machine::wgmma(d, 72, a, b, scale[0] == '1')
#define WGMMA_80(d, a, b, scale) machine::wgmma(d, 80, a, b, scale[0] == '1')
#define WGMMA_88(d, a, b, scale) machine::wgmma(d, 88, a, b, scale[0] == '1')
#define WGMMA_96(d, a, b, scale) machine::wgmma(d, 96, a, b, scale[0] == '1')
#define WGMMA_104(d, a, b, scale) machine::wgmma(d, 104, a, b, scale[0] == '1')
#define WGMMA_112(d, a, b, scale) machine::wgmma(d, 112, a, b, scale[0] == '1')
#define WGMMA_120(d, a, b, scale) machine::wgmma(d, 120, a, b, scale[0] == '1')
#define WGMMA_128(d, a, b, scale) machine::wgmma(d, 128, a, b, scale[0] == '1')
#define WGMMA_136(d, a, b, scale) machine::wgmma(d, 136, a, b, scale[0] == '1')
#define WGMMA_144(d, a, b, scale) machine::wgmma(d, 144, a, b, scale[0] == '1')
#define WGMMA_152(d, a, b, scale) machine::wgmma(d, 152, a, b, scale[0] == '1')
#define WGMMA_160(d, a, b, scale) machine::wgmma(d, 160, a, b, scale[0] == '1')
#define WGMMA_168(d, a, b, scale) machine::wgmma(d, 168, a, b, scale[0] == '1')
#define WGMMA_176(d, a, b, scale) machine::wgmma(d, 176, a, b, scale[0] == '1')
#define WGMMA_184(d, a, b, scale) machine::wgmma(d, 184, a, b, scale[0] == '1')
#define WGMMA_192(d, a, b, scale) machine::wgmma(d, 192, a, b, scale[0] == '1')
#define WGMMA_200(d, a, b, scale) machine::wgmma(d, 200, a, b, scale[0] == '1')
#define WGMMA_208(d, a, b, scale) machine::wgmma(d, 208, a, b, scale[0] == '1')
#define WGMMA_216(d, a, b, scale) machine::wgmma(d, 216, a, b, scale[0] == '1')
#define WGMMA_224(d, a, b, scale) machine::wgmma(d, 224, a, b, scale[0] == '1')
#define WGMMA_232(d, a, b, scale) machine::wgmma(d, 232, a, b, scale[0] == '1')
#define WGMMA_240(d, a, b, scale) machine::wgmma(d, 240, a, b, scale[0] == '1')
#define WGMMA_248(d, a, b, scale) machine::wgmma(d, 248, a, b, scale[0] == '1')
#define WGMMA_256(d, a, b, scale) machine::wgmma(d, 256, a, b, scale[0] == '1')

#ifdef MULTIPLY
template <int SUMS, class Operand> static void multiply(float (&d)[SUMS], const Operand& a, u64 b) { MULTIPLY(d, a, b, "1"); }
#endif
