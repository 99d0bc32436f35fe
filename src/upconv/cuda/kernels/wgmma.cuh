// wgmma: one warpgroup, D[64 x N] += A[64 x K] B[K x N] of 32 bytes of K, N = 8 to 256. B is in shared memory, by its descriptor;
// A in registers, or (A_SHARED) in shared memory too, by its descriptor or a descriptor's two words.
// Fragments (g = lane / 4, t = lane % 4): D[4j + 2h + c] is row 16 warp + g + 8h, column 8j + 2t + c.
// A kernel that includes this defines PRECISION and A_SHARED and, of 16 bits, A_TURNED and B_TURNED if rows of shared memory lie along
// M or N, not along K.
#if PRECISION < 2
#define TYPES "k8.f32.tf32.tf32"
#elif PRECISION == 2
#define TYPES "k16.f32.f16.f16"
#else
#define TYPES "k16.f32.bf16.bf16"
#endif
#ifndef A_TURNED
#define A_TURNED 0
#endif
#ifndef B_TURNED
#define B_TURNED 0
#endif
// TAIL: signs of A and B, and how they lie.
#if PRECISION < 2
#define TAIL ", 1, 1"
#elif !A_SHARED && B_TURNED
#define TAIL ", 1, 1, 1"
#elif !A_SHARED
#define TAIL ", 1, 1, 0"
#elif A_TURNED && B_TURNED
#define TAIL ", 1, 1, 1, 1"
#elif A_TURNED
#define TAIL ", 1, 1, 1, 0"
#elif B_TURNED
#define TAIL ", 1, 1, 0, 1"
#else
#define TAIL ", 1, 1, 0, 0"
#endif
#if A_SHARED
__device__ __forceinline__ u64 descriptor_of(u64 a) { return a; }
__device__ __forceinline__ u64 descriptor_of(const u32 (&a)[4]) { return (u64)a[1] << 32 | a[0]; }
#define OPERANDS(a, b) "l"(descriptor_of(a)), "l"(b)
#else
#define OPERANDS(a, b) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#endif

// WGMMA_N(d, a, b, scale): `scale` "1", or "0" for D = A B.
#define REGISTERS_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS_1 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGISTERS_2 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define REGISTERS_3 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_4 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define REGISTERS_5 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define REGISTERS_6 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define REGISTERS_7 "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#if A_SHARED
#define INSTRUCTION(n, registers, a0, b0, unused1, unused2, unused3, scale) \
  "wgmma.mma_async.sync.aligned.m64n" n TYPES " {" registers "}, " a0 ", " b0 ", " scale TAIL ";\n"
#else
#define INSTRUCTION(n, registers, a0, a1, a2, a3, b0, scale) \
  "wgmma.mma_async.sync.aligned.m64n" n TYPES " {" registers "}, {" a0 "," a1 "," a2 "," a3 "}, " b0 ", " scale TAIL ";\n"
#endif
#define WGMMA_8(d, a, b, scale) asm volatile(INSTRUCTION("8", "%0,%1,%2,%3", "%4", "%5", "%6", "%7", "%8", scale) : SUMS_4(d, 0) : OPERANDS(a, b))
#define WGMMA_16(d, a, b, scale) asm volatile(INSTRUCTION("16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", "%10", "%11", "%12", scale) : SUMS_4(d, 0), SUMS_4(d, 4) : OPERANDS(a, b))
#define WGMMA_24(d, a, b, scale) asm volatile(INSTRUCTION("24", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11", "%12", "%13", "%14", "%15", "%16", scale) : SUMS_4(d, 0), SUMS_4(d, 4), SUMS_4(d, 8) : OPERANDS(a, b))
#define WGMMA_32(d, a, b, scale) asm volatile(INSTRUCTION("32", REGISTERS_0, "%16", "%17", "%18", "%19", "%20", scale) : SUMS(d, 0) : OPERANDS(a, b))
#define WGMMA_40(d, a, b, scale) asm volatile(INSTRUCTION("40", REGISTERS_0 "," "%16,%17,%18,%19", "%20", "%21", "%22", "%23", "%24", scale) : SUMS(d, 0), SUMS_4(d, 16) : OPERANDS(a, b))
#define WGMMA_48(d, a, b, scale) asm volatile(INSTRUCTION("48", REGISTERS_0 "," "%16,%17,%18,%19,%20,%21,%22,%23", "%24", "%25", "%26", "%27", "%28", scale) : SUMS(d, 0), SUMS_4(d, 16), SUMS_4(d, 20) : OPERANDS(a, b))
#define WGMMA_56(d, a, b, scale) asm volatile(INSTRUCTION("56", REGISTERS_0 "," "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27", "%28", "%29", "%30", "%31", "%32", scale) : SUMS(d, 0), SUMS_4(d, 16), SUMS_4(d, 20), SUMS_4(d, 24) : OPERANDS(a, b))
#define WGMMA_64(d, a, b, scale) asm volatile(INSTRUCTION("64", REGISTERS_0 "," REGISTERS_1, "%32", "%33", "%34", "%35", "%36", scale) : SUMS(d, 0), SUMS(d, 16) : OPERANDS(a, b))
#define WGMMA_72(d, a, b, scale) asm volatile(INSTRUCTION("72", REGISTERS_0 "," REGISTERS_1 "," "%32,%33,%34,%35", "%36", "%37", "%38", "%39", "%40", scale) : SUMS(d, 0), SUMS(d, 16), SUMS_4(d, 32) : OPERANDS(a, b))
#define WGMMA_80(d, a, b, scale) asm volatile(INSTRUCTION("80", REGISTERS_0 "," REGISTERS_1 "," "%32,%33,%34,%35,%36,%37,%38,%39", "%40", "%41", "%42", "%43", "%44", scale) : SUMS(d, 0), SUMS(d, 16), SUMS_4(d, 32), SUMS_4(d, 36) : OPERANDS(a, b))
#define WGMMA_88(d, a, b, scale) asm volatile(INSTRUCTION("88", REGISTERS_0 "," REGISTERS_1 "," "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43", "%44", "%45", "%46", "%47", "%48", scale) : SUMS(d, 0), SUMS(d, 16), SUMS_4(d, 32), SUMS_4(d, 36), SUMS_4(d, 40) : OPERANDS(a, b))
#define WGMMA_96(d, a, b, scale) asm volatile(INSTRUCTION("96", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2, "%48", "%49", "%50", "%51", "%52", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32) : OPERANDS(a, b))
#define WGMMA_104(d, a, b, scale) asm volatile(INSTRUCTION("104", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," "%48,%49,%50,%51", "%52", "%53", "%54", "%55", "%56", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS_4(d, 48) : OPERANDS(a, b))
#define WGMMA_112(d, a, b, scale) asm volatile(INSTRUCTION("112", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," "%48,%49,%50,%51,%52,%53,%54,%55", "%56", "%57", "%58", "%59", "%60", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS_4(d, 48), SUMS_4(d, 52) : OPERANDS(a, b))
#define WGMMA_120(d, a, b, scale) asm volatile(INSTRUCTION("120", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59", "%60", "%61", "%62", "%63", "%64", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS_4(d, 48), SUMS_4(d, 52), SUMS_4(d, 56) : OPERANDS(a, b))
#define WGMMA_128(d, a, b, scale) asm volatile(INSTRUCTION("128", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3, "%64", "%65", "%66", "%67", "%68", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48) : OPERANDS(a, b))
#define WGMMA_136(d, a, b, scale) asm volatile(INSTRUCTION("136", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," "%64,%65,%66,%67", "%68", "%69", "%70", "%71", "%72", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS_4(d, 64) : OPERANDS(a, b))
#define WGMMA_144(d, a, b, scale) asm volatile(INSTRUCTION("144", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," "%64,%65,%66,%67,%68,%69,%70,%71", "%72", "%73", "%74", "%75", "%76", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS_4(d, 64), SUMS_4(d, 68) : OPERANDS(a, b))
#define WGMMA_152(d, a, b, scale) asm volatile(INSTRUCTION("152", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75", "%76", "%77", "%78", "%79", "%80", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS_4(d, 64), SUMS_4(d, 68), SUMS_4(d, 72) : OPERANDS(a, b))
#define WGMMA_160(d, a, b, scale) asm volatile(INSTRUCTION("160", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4, "%80", "%81", "%82", "%83", "%84", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64) : OPERANDS(a, b))
#define WGMMA_168(d, a, b, scale) asm volatile(INSTRUCTION("168", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," "%80,%81,%82,%83", "%84", "%85", "%86", "%87", "%88", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS_4(d, 80) : OPERANDS(a, b))
#define WGMMA_176(d, a, b, scale) asm volatile(INSTRUCTION("176", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," "%80,%81,%82,%83,%84,%85,%86,%87", "%88", "%89", "%90", "%91", "%92", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS_4(d, 80), SUMS_4(d, 84) : OPERANDS(a, b))
#define WGMMA_184(d, a, b, scale) asm volatile(INSTRUCTION("184", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91", "%92", "%93", "%94", "%95", "%96", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS_4(d, 80), SUMS_4(d, 84), SUMS_4(d, 88) : OPERANDS(a, b))
#define WGMMA_192(d, a, b, scale) asm volatile(INSTRUCTION("192", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," REGISTERS_5, "%96", "%97", "%98", "%99", "%100", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80) : OPERANDS(a, b))
#define WGMMA_200(d, a, b, scale) asm volatile(INSTRUCTION("200", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," REGISTERS_5 "," "%96,%97,%98,%99", "%100", "%101", "%102", "%103", "%104", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80), SUMS_4(d, 96) : OPERANDS(a, b))
#define WGMMA_208(d, a, b, scale) asm volatile(INSTRUCTION("208", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," REGISTERS_5 "," "%96,%97,%98,%99,%100,%101,%102,%103", "%104", "%105", "%106", "%107", "%108", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80), SUMS_4(d, 96), SUMS_4(d, 100) : OPERANDS(a, b))
#define WGMMA_216(d, a, b, scale) asm volatile(INSTRUCTION("216", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," REGISTERS_5 "," "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107", "%108", "%109", "%110", "%111", "%112", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80), SUMS_4(d, 96), SUMS_4(d, 100), SUMS_4(d, 104) : OPERANDS(a, b))
#define WGMMA_224(d, a, b, scale) asm volatile(INSTRUCTION("224", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," REGISTERS_5 "," REGISTERS_6, "%112", "%113", "%114", "%115", "%116", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80), SUMS(d, 96) : OPERANDS(a, b))
#define WGMMA_232(d, a, b, scale) asm volatile(INSTRUCTION("232", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," REGISTERS_5 "," REGISTERS_6 "," "%112,%113,%114,%115", "%116", "%117", "%118", "%119", "%120", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80), SUMS(d, 96), SUMS_4(d, 112) : OPERANDS(a, b))
#define WGMMA_240(d, a, b, scale) asm volatile(INSTRUCTION("240", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," REGISTERS_5 "," REGISTERS_6 "," "%112,%113,%114,%115,%116,%117,%118,%119", "%120", "%121", "%122", "%123", "%124", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80), SUMS(d, 96), SUMS_4(d, 112), SUMS_4(d, 116) : OPERANDS(a, b))
#define WGMMA_248(d, a, b, scale) asm volatile(INSTRUCTION("248", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," REGISTERS_5 "," REGISTERS_6 "," "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123", "%124", "%125", "%126", "%127", "%128", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80), SUMS(d, 96), SUMS_4(d, 112), SUMS_4(d, 116), SUMS_4(d, 120) : OPERANDS(a, b))
#define WGMMA_256(d, a, b, scale) asm volatile(INSTRUCTION("256", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," REGISTERS_5 "," REGISTERS_6 "," REGISTERS_7, "%128", "%129", "%130", "%131", "%132", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80), SUMS(d, 96), SUMS(d, 112) : OPERANDS(a, b))

#ifdef MULTIPLY                                        // a kernel's only width
template <int SUMS, class Operand>
__device__ __forceinline__ void multiply(float (&d)[SUMS], const Operand& a, u64 b) { MULTIPLY(d, a, b, "1"); }
#endif
