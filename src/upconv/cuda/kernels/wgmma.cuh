// Matrix instructions, by a kernel's precision P (number.cuh). PTX is here and in ptx.cuh, and nowhere else.
#include "number.cuh"

// --- mma.sync: one warp, D[16 x 8] += A[16 x K] B[K x 8] of 32 bytes of K -------------------------------------------------

#define MMA_OF(shape, types) \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." types ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// Lane (g, t): D[2h + c] is row g + 8h, column 2t + c.
template <int P>
__device__ __forceinline__ void mma_of(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (P < FP16) MMA_OF("m16n8k8", "tf32.tf32");
  else if constexpr (P == FP16) MMA_OF("m16n8k16", "f16.f16");
  else MMA_OF("m16n8k16", "bf16.bf16");
}

// --- wgmma: one warpgroup, D[64 x N] += A[64 x K] B[K x N] of 32 bytes of K, N = 8 to 256 ---------------------------------

// `WgmmaOf<N>::multiply<P, A_TURNED, B_TURNED, ADDS>(d, a, b)`: B is in shared memory, by its descriptor; A in registers, or in shared
// memory too, by its descriptor. Fragments (g = lane / 4, t = lane % 4): D[4j + 2h + c] is row 16 warp + g + 8h, column 8j + 2t + c.
// Without ADDS D is A B.
// [16 bits] A_TURNED and B_TURNED say that rows of shared memory lie along M or N, not along K.
template <int N> struct WgmmaOf;

// A descriptor's two words, of which one alone changes.
__device__ __forceinline__ u64 descriptor_of_words(const u32 (&a)[4]) { return (u64)a[1] << 32 | a[0]; }

#define WGMMA_TEXT(n, types, sums, a, b, rest) "wgmma.mma_async.sync.aligned.m64n" n types " {" sums "}, " a ", " b ", " rest ";\n"
#define WGMMA_FRAGMENTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
// A width: the numbers of its sums in PTX, those of the operands behind them, and the sums.
#define WGMMA_WIDTH(n, sums, x0, x1, x2, x3, x4, x5, x6, ...) \
  template <> struct WgmmaOf<n> { \
    template <int P, bool A_TURNED, bool B_TURNED, bool ADDS, int COUNT> \
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], const u32 (&a)[4], u64 b) { \
      if constexpr (P < FP16) asm volatile(WGMMA_TEXT(#n, "k8.f32.tf32.tf32", sums, "{" x0 "," x1 "," x2 "," x3 "}", x4, x5 ", 1, 1") : __VA_ARGS__ : WGMMA_FRAGMENTS, "l"(b), "n"(ADDS)); \
      else if constexpr (P == FP16) asm volatile(WGMMA_TEXT(#n, "k16.f32.f16.f16", sums, "{" x0 "," x1 "," x2 "," x3 "}", x4, x5 ", 1, 1, " x6) : __VA_ARGS__ : WGMMA_FRAGMENTS, "l"(b), "n"(ADDS), "n"(B_TURNED)); \
      else asm volatile(WGMMA_TEXT(#n, "k16.f32.bf16.bf16", sums, "{" x0 "," x1 "," x2 "," x3 "}", x4, x5 ", 1, 1, " x6) : __VA_ARGS__ : WGMMA_FRAGMENTS, "l"(b), "n"(ADDS), "n"(B_TURNED)); \
    } \
    template <int P, bool A_TURNED, bool B_TURNED, bool ADDS, int COUNT> \
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b) { \
      if constexpr (P < FP16) asm volatile(WGMMA_TEXT(#n, "k8.f32.tf32.tf32", sums, x0, x1, x2 ", 1, 1") : __VA_ARGS__ : "l"(a), "l"(b), "n"(ADDS)); \
      else if constexpr (P == FP16) asm volatile(WGMMA_TEXT(#n, "k16.f32.f16.f16", sums, x0, x1, x2 ", 1, 1, " x3 ", " x4) : __VA_ARGS__ : "l"(a), "l"(b), "n"(ADDS), "n"(A_TURNED), "n"(B_TURNED)); \
      else asm volatile(WGMMA_TEXT(#n, "k16.f32.bf16.bf16", sums, x0, x1, x2 ", 1, 1, " x3 ", " x4) : __VA_ARGS__ : "l"(a), "l"(b), "n"(ADDS), "n"(A_TURNED), "n"(B_TURNED)); \
    } \
  };
#define FOUR_SUMS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_FROM(i) FOUR_SUMS(i), FOUR_SUMS(i + 4), FOUR_SUMS(i + 8), FOUR_SUMS(i + 12)
#define NUMBERS_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NUMBERS_1 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NUMBERS_2 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NUMBERS_3 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NUMBERS_4 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NUMBERS_5 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NUMBERS_6 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define NUMBERS_7 "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
WGMMA_WIDTH(8, "%0,%1,%2,%3", "%4", "%5", "%6", "%7", "%8", "%9", "%10", FOUR_SUMS(0))
WGMMA_WIDTH(16, "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", "%10", "%11", "%12", "%13", "%14", FOUR_SUMS(0), FOUR_SUMS(4))
WGMMA_WIDTH(24, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11", "%12", "%13", "%14", "%15", "%16", "%17", "%18", FOUR_SUMS(0), FOUR_SUMS(4), FOUR_SUMS(8))
WGMMA_WIDTH(32, NUMBERS_0, "%16", "%17", "%18", "%19", "%20", "%21", "%22", SUMS_FROM(0))
WGMMA_WIDTH(40, NUMBERS_0 "," "%16,%17,%18,%19", "%20", "%21", "%22", "%23", "%24", "%25", "%26", SUMS_FROM(0), FOUR_SUMS(16))
WGMMA_WIDTH(48, NUMBERS_0 "," "%16,%17,%18,%19,%20,%21,%22,%23", "%24", "%25", "%26", "%27", "%28", "%29", "%30", SUMS_FROM(0), FOUR_SUMS(16), FOUR_SUMS(20))
WGMMA_WIDTH(56, NUMBERS_0 "," "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27", "%28", "%29", "%30", "%31", "%32", "%33", "%34", SUMS_FROM(0), FOUR_SUMS(16), FOUR_SUMS(20), FOUR_SUMS(24))
WGMMA_WIDTH(64, NUMBERS_0 "," NUMBERS_1, "%32", "%33", "%34", "%35", "%36", "%37", "%38", SUMS_FROM(0), SUMS_FROM(16))
WGMMA_WIDTH(72, NUMBERS_0 "," NUMBERS_1 "," "%32,%33,%34,%35", "%36", "%37", "%38", "%39", "%40", "%41", "%42", SUMS_FROM(0), SUMS_FROM(16), FOUR_SUMS(32))
WGMMA_WIDTH(80, NUMBERS_0 "," NUMBERS_1 "," "%32,%33,%34,%35,%36,%37,%38,%39", "%40", "%41", "%42", "%43", "%44", "%45", "%46", SUMS_FROM(0), SUMS_FROM(16), FOUR_SUMS(32), FOUR_SUMS(36))
WGMMA_WIDTH(88, NUMBERS_0 "," NUMBERS_1 "," "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43", "%44", "%45", "%46", "%47", "%48", "%49", "%50", SUMS_FROM(0), SUMS_FROM(16), FOUR_SUMS(32), FOUR_SUMS(36), FOUR_SUMS(40))
WGMMA_WIDTH(96, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2, "%48", "%49", "%50", "%51", "%52", "%53", "%54", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32))
WGMMA_WIDTH(104, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," "%48,%49,%50,%51", "%52", "%53", "%54", "%55", "%56", "%57", "%58", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), FOUR_SUMS(48))
WGMMA_WIDTH(112, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," "%48,%49,%50,%51,%52,%53,%54,%55", "%56", "%57", "%58", "%59", "%60", "%61", "%62", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), FOUR_SUMS(48), FOUR_SUMS(52))
WGMMA_WIDTH(120, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59", "%60", "%61", "%62", "%63", "%64", "%65", "%66", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), FOUR_SUMS(48), FOUR_SUMS(52), FOUR_SUMS(56))
WGMMA_WIDTH(128, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3, "%64", "%65", "%66", "%67", "%68", "%69", "%70", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48))
WGMMA_WIDTH(136, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," "%64,%65,%66,%67", "%68", "%69", "%70", "%71", "%72", "%73", "%74", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), FOUR_SUMS(64))
WGMMA_WIDTH(144, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," "%64,%65,%66,%67,%68,%69,%70,%71", "%72", "%73", "%74", "%75", "%76", "%77", "%78", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), FOUR_SUMS(64), FOUR_SUMS(68))
WGMMA_WIDTH(152, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75", "%76", "%77", "%78", "%79", "%80", "%81", "%82", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), FOUR_SUMS(64), FOUR_SUMS(68), FOUR_SUMS(72))
WGMMA_WIDTH(160, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4, "%80", "%81", "%82", "%83", "%84", "%85", "%86", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64))
WGMMA_WIDTH(168, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," "%80,%81,%82,%83", "%84", "%85", "%86", "%87", "%88", "%89", "%90", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), FOUR_SUMS(80))
WGMMA_WIDTH(176, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," "%80,%81,%82,%83,%84,%85,%86,%87", "%88", "%89", "%90", "%91", "%92", "%93", "%94", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), FOUR_SUMS(80), FOUR_SUMS(84))
WGMMA_WIDTH(184, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91", "%92", "%93", "%94", "%95", "%96", "%97", "%98", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), FOUR_SUMS(80), FOUR_SUMS(84), FOUR_SUMS(88))
WGMMA_WIDTH(192, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," NUMBERS_5, "%96", "%97", "%98", "%99", "%100", "%101", "%102", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), SUMS_FROM(80))
WGMMA_WIDTH(200, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," NUMBERS_5 "," "%96,%97,%98,%99", "%100", "%101", "%102", "%103", "%104", "%105", "%106", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), SUMS_FROM(80), FOUR_SUMS(96))
WGMMA_WIDTH(208, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," NUMBERS_5 "," "%96,%97,%98,%99,%100,%101,%102,%103", "%104", "%105", "%106", "%107", "%108", "%109", "%110", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), SUMS_FROM(80), FOUR_SUMS(96), FOUR_SUMS(100))
WGMMA_WIDTH(216, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," NUMBERS_5 "," "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107", "%108", "%109", "%110", "%111", "%112", "%113", "%114", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), SUMS_FROM(80), FOUR_SUMS(96), FOUR_SUMS(100), FOUR_SUMS(104))
WGMMA_WIDTH(224, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," NUMBERS_5 "," NUMBERS_6, "%112", "%113", "%114", "%115", "%116", "%117", "%118", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), SUMS_FROM(80), SUMS_FROM(96))
WGMMA_WIDTH(232, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," NUMBERS_5 "," NUMBERS_6 "," "%112,%113,%114,%115", "%116", "%117", "%118", "%119", "%120", "%121", "%122", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), SUMS_FROM(80), SUMS_FROM(96), FOUR_SUMS(112))
WGMMA_WIDTH(240, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," NUMBERS_5 "," NUMBERS_6 "," "%112,%113,%114,%115,%116,%117,%118,%119", "%120", "%121", "%122", "%123", "%124", "%125", "%126", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), SUMS_FROM(80), SUMS_FROM(96), FOUR_SUMS(112), FOUR_SUMS(116))
WGMMA_WIDTH(248, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," NUMBERS_5 "," NUMBERS_6 "," "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123", "%124", "%125", "%126", "%127", "%128", "%129", "%130", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), SUMS_FROM(80), SUMS_FROM(96), FOUR_SUMS(112), FOUR_SUMS(116), FOUR_SUMS(120))
WGMMA_WIDTH(256, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," NUMBERS_5 "," NUMBERS_6 "," NUMBERS_7, "%128", "%129", "%130", "%131", "%132", "%133", "%134", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), SUMS_FROM(80), SUMS_FROM(96), SUMS_FROM(112))
