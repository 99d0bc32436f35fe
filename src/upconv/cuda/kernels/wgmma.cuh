// A kernel that includes this defines PRECISION, A_SHARED, and TAIL: the signs of A and B and, for halves, how they lie in shared memory.
#if PRECISION < 2
#define TYPES "k8.f32.tf32.tf32"
#elif PRECISION == 2
#define TYPES "k16.f32.f16.f16"
#else
#define TYPES "k16.f32.bf16.bf16"
#endif

// wgmma: one warpgroup, D[64 x N] += A[64 x K] B[K x N], N = 32 to 256; A from registers or (A_SHARED) shared memory,
// B from shared memory by descriptor.
// Fragments (g = lane / 4, t = lane % 4): D[4j + 2h + c] is row 16 warp + g + 8h, column 8j + 2t + c.
// Its registers in blocks of 16, those of A (A_SHARED: two, a descriptor's words), B's descriptor; `scale` 0: D = A B instead.
#define REGISTERS_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS_1 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGISTERS_2 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define REGISTERS_3 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_4 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define REGISTERS_5 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define REGISTERS_6 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define REGISTERS_7 "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),        \
    "+f"(d[i + 6]), "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]),                 \
    "+f"(d[i + 12]), "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])
#if A_SHARED
#define INSTRUCTION(n, registers, a0, b0, unused1, unused2, unused3, scale) \
  "wgmma.mma_async.sync.aligned.m64n" n TYPES " {" registers "}, " a0 ", " b0 ", " scale TAIL ";\n"
#define OPERANDS(a, b) "l"((u64)a[1] << 32 | a[0]), "l"(b)
#else
#define INSTRUCTION(n, registers, a0, a1, a2, a3, b0, scale) \
  "wgmma.mma_async.sync.aligned.m64n" n TYPES " {" registers "}, {" a0 "," a1 "," a2 "," a3 "}, " b0 ", " scale TAIL ";\n"
#define OPERANDS(a, b) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#endif
#define MULTIPLY_32(d, a, b, scale) asm volatile(INSTRUCTION("32", REGISTERS_0, "%16", "%17", "%18", "%19", "%20", scale) : SUMS(d, 0) : OPERANDS(a, b))
#define MULTIPLY_64(d, a, b, scale) asm volatile(INSTRUCTION("64", REGISTERS_0 "," REGISTERS_1, "%32", "%33", "%34", "%35", "%36", scale) : SUMS(d, 0), SUMS(d, 16) : OPERANDS(a, b))
#define MULTIPLY_96(d, a, b, scale) asm volatile(INSTRUCTION("96", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2, "%48", "%49", "%50", "%51", "%52", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32) : OPERANDS(a, b))
#define MULTIPLY_128(d, a, b, scale) asm volatile(INSTRUCTION("128", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3, "%64", "%65", "%66", "%67", "%68", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48) : OPERANDS(a, b))
#define MULTIPLY_160(d, a, b, scale) asm volatile(INSTRUCTION("160", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4, "%80", "%81", "%82", "%83", "%84", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64) : OPERANDS(a, b))
#define MULTIPLY_192(d, a, b, scale) asm volatile(INSTRUCTION("192", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," REGISTERS_5, "%96", "%97", "%98", "%99", "%100", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80) : OPERANDS(a, b))
#define MULTIPLY_224(d, a, b, scale) asm volatile(INSTRUCTION("224", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," REGISTERS_5 "," REGISTERS_6, "%112", "%113", "%114", "%115", "%116", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80), SUMS(d, 96) : OPERANDS(a, b))
#define MULTIPLY_256(d, a, b, scale) asm volatile(INSTRUCTION("256", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3 "," REGISTERS_4 "," REGISTERS_5 "," REGISTERS_6 "," REGISTERS_7, "%128", "%129", "%130", "%131", "%132", scale) : SUMS(d, 0), SUMS(d, 16), SUMS(d, 32), SUMS(d, 48), SUMS(d, 64), SUMS(d, 80), SUMS(d, 96), SUMS(d, 112) : OPERANDS(a, b))
