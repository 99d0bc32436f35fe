// wgmma.cuh for the host: matrix instructions of precision P, wgmma by what descriptors say of shared memory.
namespace machine {
template <int P> constexpr int K_OF = P < FP16 ? 8 : 16;

// The numbers of 32 bits as matrix instructions read them: one of TF32, whose low bits they ignore, or two of 16 bits.
template <int P> static void numbers_in(u32 word, float* to) {
  if (P < FP16) to[0] = __uint_as_float(word & 0xffffe000u);
  else if (P == FP16) to[0] = half_value(word & 0xffff), to[1] = half_value(word >> 16);
  else to[0] = bfloat_value(word & 0xffff), to[1] = bfloat_value(word >> 16);
}
// Row g and row g + 8 of a warp's 16, from the registers of the lanes that have them.
template <int P> static void rows_shown(const u64 (&shown)[32][4], float (&rows)[2][16]) {
  const int g = self->thread % 32 / 4;
  for (int t = 0; t < 4; t++)
    for (int r = 0; r < 4; r++) numbers_in<P>((u32)shown[4 * g + t][r], rows[r % 2] + K_OF<P> / 8 * (r / 2 * 4 + t));
}
// Operand row (of A, or column of B) `mn` of a descriptor, K numbers.
template <int P> static void operand_row(u64 of, bool turned, int mn, float* to) {
  const u32 start = (u32)(of & 0x3fff) << 4, leading = (u32)(of >> 16 & 0x3fff) << 4, stride = (u32)(of >> 32 & 0x3fff) << 4;
  const u32 span = (of >> 62) == 1 ? 128 : (of >> 62) == 2 ? 64 : (of >> 62) == 3 ? 32 : 0;
  if (!span) fail("a descriptor without a swizzle, which no kernel has");
  if (!turned || P < FP16) {
    for (u32 unit = 0; unit < 2; unit++) {
      const u32* words = (const u32*)shared_at(swizzled(start + mn / 8 * stride + mn % 8 * span + unit * 16, span), 16);
      for (int i = 0; i < 4; i++) numbers_in<P>(words[i], to + unit * (K_OF<P> / 2) + i * (K_OF<P> / 8));
    }
    return;
  }
  const u32 wide = span / 2;  // numbers of a line
  for (int k = 0; k < K_OF<P>; k++) {
    float two[2];
    numbers_in<P>(*(const u16*)shared_at(swizzled(start + mn / wide * leading + mn % wide * 2 + k % 8 * span + k / 8 * stride, span), 2), two);
    to[k] = two[0];
  }
}
// A thread's own sums: rows g and g + 8 of its warp's 16, columns 2t and 2t + 1 of each 8.
template <int P> static void add_products(float* d, int columns, const float (&rows)[2][16], u64 b, bool turned, bool adds) {
  const int t = self->thread % 4;
  for (int j = 0; j < columns / 8; j++)
    for (int c = 0; c < 2; c++) {
      float column[16];
      operand_row<P>(b, turned, 8 * j + 2 * t + c, column);
      for (int h = 0; h < 2; h++) {
        float sum = 0;
        for (int k = 0; k < K_OF<P>; k++) sum += rows[h][k] * column[k];
        float& to = d[4 * j + 2 * h + c];
        to = adds ? to + sum : sum;
      }
    }
}
template <int P, bool A_TURNED, bool B_TURNED> static void multiply_described(const Product& p) {
  float rows[2][16];
  const int row = self->thread % 128 / 32 * 16 + self->thread % 32 / 4;
  for (int h = 0; h < 2; h++) operand_row<P>(p.a, A_TURNED, row + 8 * h, rows[h]);
  add_products<P>(p.d, p.columns, rows, p.b, B_TURNED, p.adds);
}
template <int P, bool B_TURNED> static void multiply_rows(const Product& p) { add_products<P>(p.d, p.columns, p.rows, p.b, B_TURNED, p.adds); }
}  // namespace machine

template <int P> static void mma_of(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  using namespace machine;
  const int g = self->thread % 32 / 4, t = self->thread % 4;
  const auto& shown = exchange({a[0] | (u64)b0 << 32, a[1] | (u64)b1 << 32, a[2], a[3]});
  float rows[2][16], columns[2][16];
  rows_shown<P>(shown, rows);
  for (int c = 0; c < 2; c++)
    for (int s = 0; s < 4; s++)
      for (int r = 0; r < 2; r++) numbers_in<P>((u32)(shown[4 * (2 * t + c) + s][r] >> 32), columns[c] + K_OF<P> / 8 * (r * 4 + s));
  for (int h = 0; h < 2; h++)
    for (int c = 0; c < 2; c++) {
      float sum = 0;
      for (int k = 0; k < K_OF<P>; k++) sum += rows[h][k] * columns[c][k];
      d[2 * h + c] += sum;
    }
}

static u64 descriptor_of_words(const u32 (&a)[4]) { return (u64)a[1] << 32 | a[0]; }

template <int N> struct WgmmaOf {
  template <int P, bool A_TURNED, bool B_TURNED, bool ADDS, int COUNT> static void multiply(float (&d)[COUNT], u64 a, u64 b) {
    machine::later({d, N, ADDS, a, b}, machine::multiply_described<P, A_TURNED, B_TURNED>);
  }
  template <int P, bool A_TURNED, bool B_TURNED, bool ADDS, int COUNT> static void multiply(float (&d)[COUNT], const u32 (&a)[4], u64 b) {
    machine::Product product = {d, N, ADDS, 0, b};
    machine::rows_shown<P>(machine::exchange({a[0], a[1], a[2], a[3]}), product.rows);
    machine::later(product, machine::multiply_rows<P, B_TURNED>);
  }
};
